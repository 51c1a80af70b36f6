//! `nobypass events`: bypasses as they happen.

use std::io::Write as _;

use http_body_util::BodyExt as _;
use hyper::Method;

use crate::cli::Format;
use crate::cli::client::{ClientError, Place, runtime, send};
use crate::cli::exit::{Exit, fail};
use crate::detect::report::Report;

/// Arguments of `events`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: Place,
    /// Keep following (events are not stored: without this, the command waits for the first one and ends)
    #[arg(short, long)]
    follow: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Shows bypasses as they come.
pub fn run(args: &Args) -> Exit {
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(Exit::Failed, &format!("cannot start: {error}")),
    };
    match runtime.block_on(follow(args)) {
        Ok(()) => Exit::Ok,
        Err(error) => fail(error.exit(), &error.to_string()),
    }
}

async fn follow(args: &Args) -> Result<(), ClientError> {
    let mut body = send(&args.place.socket, Method::GET, "/v1/events", String::new()).await?.into_body();
    if args.output != Format::Json {
        // Silence could as well mean that nobody listens yet. Not for standard output: this is no event.
        let _ = writeln!(std::io::stderr().lock(), "waiting for bypasses on this node");
    }
    let mut line = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| ClientError::Broken(error.to_string()))?;
        for byte in frame.data_ref().into_iter().flatten() {
            if *byte != b'\n' {
                line.push(*byte);
                continue;
            }
            let text = String::from_utf8_lossy(&line).into_owned();
            line.clear();
            let mut out = std::io::stdout().lock();
            let shown = if args.output == Format::Json { text } else { show(&text) };
            // A closed pipe ends the command, as it should.
            if writeln!(out, "{shown}").and_then(|()| out.flush()).is_err() || !args.follow {
                return Ok(());
            }
        }
    }
    Err(ClientError::Broken("the agent stopped".into()))
}

fn show(line: &str) -> String {
    let Ok(report) = serde_json::from_str::<Report>(line) else {
        // `{"missed":n}`: the agent sends nothing else.
        let missed = line.trim_matches(|c: char| !c.is_ascii_digit());
        return format!("({missed} events missed: this reader was too slow)");
    };
    let Report { time_ms, namespace, pod, container, mesh, direction, src, dst, uid, reason, action, .. } =
        report;
    let (seconds, millis) = (time_ms / 1000 % 86_400, time_ms % 1000);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let pod = if pod.is_empty() { "(unknown pod)".into() } else { format!("{namespace}/{pod}") };
    format!(
        "{hours:02}:{minutes:02}:{seconds:02}.{millis:03}Z {action:<7} {direction} {pod} [{container}, uid {uid}] {src} -> {dst} ({mesh}: {reason})"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_for_people() {
        let json = r#"{"time_ms":3723004,"namespace":"shop","pod":"cart","container":"app","mesh":"linkerd",
            "direction":"outbound","src":"10.0.0.5:4","dst":"192.0.2.1:443","protocol":6,"uid":1000,
            "reason":"not_redirected","action":"dropped","mode":"enforce","cgroup":1,"cookie":2}"#;
        assert_eq!(
            show(json),
            "01:02:03.004Z dropped outbound shop/cart [app, uid 1000] 10.0.0.5:4 -> 192.0.2.1:443 (linkerd: not_redirected)"
        );
        assert_eq!(show(r#"{"missed":12}"#), "(12 events missed: this reader was too slow)");
    }
}
