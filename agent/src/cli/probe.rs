//! `nobypass probe`: asks a pod's network whether a new connection would be redirected.

use std::path::PathBuf;

use hyper::Method;
use serde::Deserialize;

use super::client::{ClientError, read, runtime, send};
use super::exit::{Exit, fail, print};
use super::table::Table;
use super::{Format, json};

/// Arguments of `probe`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The pod: namespace/name, or cgroup:ID
    #[arg(value_name = "NAMESPACE/POD")]
    pod: String,
    /// The agent's socket
    #[arg(long, env = "NOBYPASS_SOCKET", value_name = "PATH", default_value = crate::server::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Debug, Deserialize)]
struct Probe {
    families: Vec<Family>,
}

#[derive(Debug, Deserialize)]
struct Family {
    family: String,
    due: bool,
    answer: String,
    #[serde(default)]
    port: u16,
    #[serde(default)]
    ifindex: u32,
    #[serde(default)]
    reason: String,
}

impl Family {
    fn detail(&self) -> String {
        match self.answer.as_str() {
            "redirected" if self.port == 0 => "to the proxy, by TPROXY".into(),
            "redirected" => format!("to port {}", self.port),
            "not_redirected" => format!("leaves by device {}", self.ifindex),
            "no_route" => "nothing can leave".into(),
            _ => self.reason.clone(),
        }
    }

    /// Whether the mesh has what it wants.
    fn is_good(&self) -> bool {
        match self.answer.as_str() {
            "redirected" | "no_route" => true,
            "not_redirected" => !self.due,
            _ => false,
        }
    }
}

/// Asks and prints; the answer is no when a family that the mesh redirects is not redirected, or could not be asked.
pub fn run(args: &Args) -> Exit {
    let ask = async {
        let answer = send(&args.socket, Method::PUT, "/v1/probe", args.pod.clone()).await?;
        let text = read(answer).await?;
        serde_json::from_str(&text).map_err(|error| ClientError::Broken(error.to_string()))
    };
    let value: serde_json::Value = match runtime().map(|runtime| runtime.block_on(ask)) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => return fail(error.exit(), &error.to_string()),
        Err(error) => return fail(Exit::Failed, &error.to_string()),
    };
    let probe: Probe = match serde_json::from_value(value.clone()) {
        Ok(probe) => probe,
        Err(error) => return fail(Exit::Failed, &format!("cannot read the agent's answer: {error}")),
    };
    let text = match args.output {
        Format::Json => json(&value),
        Format::Table => {
            let mut table = Table::new(&["FAMILY", "MESHED", "ANSWER", "DETAIL"]);
            for family in &probe.families {
                let due = if family.due { "yes" } else { "no" };
                table.row([family.family.clone(), due.into(), family.answer.clone(), family.detail()]);
            }
            table.to_string()
        }
    };
    match print(&text) {
        Exit::Ok if !probe.families.iter().all(Family::is_good) => Exit::Failed,
        printed => printed,
    }
}
