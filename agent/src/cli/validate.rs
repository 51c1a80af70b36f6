//! `nobypass validate`: the question from inside a pod, as an init container.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::exit::{Exit, fail, print};
use crate::probe::validate::{Answerer, Family, Found};

/// Arguments of `validate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The port that the mesh redirects outgoing connections to (Linkerd 4140, Istio, Consul and Kuma 15001)
    #[arg(long, env = "NOBYPASS_VALIDATE_PORT", value_name = "PORT", default_value_t = 4140, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Families that must be redirected, if they have a route
    #[arg(
        long,
        env = "NOBYPASS_VALIDATE_FAMILIES",
        value_enum,
        value_delimiter = ',',
        default_value = "ipv4,ipv6"
    )]
    families: Vec<Family>,
    /// The port of the address that is connected to; one that the mesh does not exempt
    #[arg(long, env = "NOBYPASS_VALIDATE_CONNECT_PORT", value_name = "PORT", default_value_t = 80, value_parser = clap::value_parser!(u16).range(1..))]
    connect_port: u16,
    /// How long the redirection is waited for, in seconds
    #[arg(long, env = "NOBYPASS_VALIDATE_TIMEOUT_S", value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3600))]
    timeout_s: u32,
}

/// Asks for each family. The last line says what it came to, for `kubectl logs`.
pub fn run(args: &Args) -> Exit {
    let Args { port, families, connect_port, timeout_s } = args;
    let answerer = match Answerer::start(*port) {
        Ok(answerer) => answerer,
        Err(error) => {
            return fail(
                Exit::Failed,
                &format!(
                    "validate: cannot listen on port {port}: {error}; run it before the proxy, or give its --port"
                ),
            );
        }
    };
    let deadline = Instant::now() + Duration::from_secs((*timeout_s).into());
    let mut good = Vec::new();
    for family in families {
        match answerer.hears(SocketAddr::new(family.nobody(), *connect_port), deadline) {
            Found::Redirected => good.push(format!("{} is redirected to port {port}", family.name())),
            Found::NoRoute => good.push(format!("{} has no route", family.name())),
            Found::NotRedirected(why) => {
                return fail(
                    Exit::NotRedirected,
                    &format!(
                        "validate: this pod's {} connections are not redirected to port {port} ({why}): the mesh's CNI \
                         plugin did not run for this pod; once its node has the plugin, delete the pod",
                        family.name()
                    ),
                );
            }
        }
    }
    print(&format!("nobypass: validate: {}\n", good.join(", ")))
}
