//! What the API server lets the agent do, for what these settings switch on.

use std::path::PathBuf;
use std::time::Duration;

use kube::Client;
use tokio::time::timeout;

use crate::app::permissions::wanted;
use crate::app::pods::plan_of;
use crate::bpf::features::{Check, Level};
use crate::cluster;
use crate::cluster::access::{PODS, Permission, lacking};
use crate::config::PodsFlag;
use crate::node::flags::GateArgs;
use crate::policy::{check, reload};
use crate::remedy::flags::RemedyArgs;
use crate::remedy::policy::Remedies;

/// How long the API server may take for one answer.
const ANSWER: Duration = Duration::from_secs(5);

/// The agent's flags that need permissions.
#[derive(Debug, clap::Args)]
pub(super) struct Cluster {
    /// Where the agent's facts about pods come from; with `cri` no permission is needed
    #[arg(long, env = "NOBYPASS_PODS", value_enum, default_value = "auto")]
    pods: PodsFlag,
    /// This node's name in the cluster
    #[arg(long, env = "NOBYPASS_NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,
    /// How to reach the API server [default: the pod's service account]
    #[arg(long, env = "NOBYPASS_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The agent's policy file: its remedies go before the flags
    #[arg(long, env = "NOBYPASS_POLICY", value_name = "FILE")]
    policy: Option<PathBuf>,
    #[command(flatten)]
    gate: GateArgs,
    #[command(flatten)]
    remedies: RemedyArgs,
}

/// One line for each feature that is switched on; none where there is no cluster.
pub(super) fn checks(args: &Cluster) -> Vec<Check> {
    let plan = match plan_of(args.pods, args.node_name.as_deref(), args.kubeconfig.is_some()) {
        Ok(plan) => plan,
        Err(error) => return vec![not(&error.to_string())],
    };
    if plan.node().is_none() {
        return Vec::new();
    }
    let mut all = Vec::new();
    let remedies = match remedies(args) {
        Ok(remedies) => remedies,
        Err(why) => {
            let remedy = "see `nobypass policy check`; permissions are checked as by flags alone";
            all.push(Check::not(Level::Warn, "policy", why, remedy));
            args.remedies.remedies()
        }
    };
    let mut needs: Vec<(&str, &[Permission])> = vec![("pods", &PODS)];
    needs.extend(wanted(&args.gate, &remedies).into_iter().map(|feature| (feature.label(), feature.needs())));
    let asked = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match asked.map(|runtime| runtime.block_on(ask(args, &needs))) {
        Ok(checks) => all.extend(checks),
        Err(error) => all.push(not(&format!("cannot start the runtime: {error}"))),
    }
    all
}

fn remedies(args: &Cluster) -> Result<Remedies, String> {
    let flags = args.remedies.remedies();
    let Some(path) = &args.policy else { return Ok(flags) };
    let text = reload::read(path).map_err(|error| error.to_string())?;
    let file = check::parse(&text).map_err(|problems| {
        let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
        format!("{}: {}", path.display(), all.join("; "))
    })?;
    Ok(file.remedies.map_or(flags, |section| section.over(&flags)))
}

async fn ask(args: &Cluster, needs: &[(&str, &[Permission])]) -> Vec<Check> {
    let client = match cluster::connect(args.kubeconfig.as_deref()).await {
        Ok(client) => client,
        Err(error) => return vec![not(&error.to_string())],
    };
    let mut checks = Vec::new();
    for (name, needs) in needs {
        match one(&client, name, needs).await {
            Ok(check) => checks.push(check),
            // Whoever does not answer once will not answer the next question either.
            Err(why) => return vec![not(&why)],
        }
    }
    checks
}

async fn one(client: &Client, name: &str, needs: &[Permission]) -> Result<Check, String> {
    let name = format!("may-{name}");
    let missing = match timeout(ANSWER, lacking(client, needs)).await {
        Ok(Ok(missing)) => missing,
        Ok(Err(error)) => return Err(format!("the API server cannot be asked: {error}")),
        Err(_) => return Err(format!("the API server did not answer within {ANSWER:?}")),
    };
    let list = |all: &[Permission]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if missing.is_empty() {
        return Ok(Check::pass(name, list(needs)));
    }
    let remedy = "grant it in the ClusterRole, or switch the feature off: it does nothing without";
    Ok(Check::not(Level::Warn, &name, format!("may not {}", list(&missing)), remedy))
}

fn not(why: &str) -> Check {
    let remedy = "give the pod its service account and NOBYPASS_NODE_NAME, or --kubeconfig FILE and --node-name; --pods=cri does \
                  without a cluster";
    Check::not(Level::Warn, "api-server", why, remedy)
}
