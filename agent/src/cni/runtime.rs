//! Asks the container runtime what it has really loaded, wakes it when it missed a change, and tells the guard.
//!
//! Where the runtime cannot be asked, or does not tell, files are all there is: the entry in the active config, its
//! plugin's binary and its kubeconfig.

pub mod answer;
pub mod equipped;
pub mod judge;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::drop_in;
use super::entry::WantedEntry;
use super::guard::{RuntimeReport, Summary};
use super::window::Protection;
use crate::pods::source::cri::CriError;
use crate::pods::source::cri::client::{Deadlines, Runtime};
use crate::pods::source::cri::endpoint;
use answer::{Answer, NETWORK_READY};
use equipped::Places;
use judge::{Expected, Verdict, judge};

/// containerd loads within 4 ms of a change (p99); asked this soon again, then ever more rarely.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// Longest pause while something is wrong.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// A runtime that says something wrong this often missed the change (15 ms after the first question).
const POKE_AFTER: u32 = 4;
/// It is told to the operator from then on (half a second).
const WARN_AFTER: u32 = 9;
/// All is well, and asked again nevertheless.
const RECHECK: Duration = Duration::from_secs(10);
/// Binary and kubeconfig are looked at this often; nothing tells when they go.
const FILES: Duration = Duration::from_secs(1);
const DEADLINES: Deadlines = Deadlines { list: Duration::from_secs(5), detail: Duration::from_secs(2) };

/// How to find out what the runtime has loaded.
#[derive(Clone, Debug)]
pub struct Options {
    /// The runtime's socket; `None` takes the first usual one whose runtime reads this CNI directory.
    pub endpoint: Option<PathBuf>,
    /// Where the host's file system is seen; usual sockets are looked for below it.
    pub host_root: PathBuf,
    /// The entry is in a drop-in file.
    pub drop_in: bool,
    /// Where to look when nobody can be asked.
    pub places: Places,
}

/// One look at what new pods get.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Finding {
    /// The runtime's word.
    Asked(Verdict, Option<PathBuf>),
    /// The runtime cannot be asked for now.
    Silent(String),
    /// There is none to ask, or it does not tell; what the plugin lacks.
    Files(Option<String>),
}

/// What the container runtime says, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Word {
    /// Its name and version; empty when there is none to ask.
    pub name: String,
    /// Its socket.
    pub socket: PathBuf,
    /// `loaded`, `outdated`, `lags`, `no_network`, `doubled`, `silent`; `files` when there is nobody to ask; empty when
    /// nothing was asked yet.
    pub state: &'static str,
    /// What is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// What to do about a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// What the guard is told that pods get; `None` leaves it at what it knows.
    tell: Option<Protection>,
    /// Wake the runtime.
    poke: bool,
    /// Look again after this.
    pause: Duration,
}

/// Follows a guard until it ends.
pub async fn follow(
    options: Options,
    mut summary: watch::Receiver<Summary>,
    report: RuntimeReport,
    word: watch::Sender<Word>,
) {
    let mut asker = Asker { options, client: None, not_cri: false };
    let mut log = Log::default();
    loop {
        let now = summary.borrow_and_update().clone();
        let Some(expected) = expected(&now, asker.options.drop_in) else {
            match changed(&mut summary, &now, None).await {
                Waited::End => return,
                _ => continue,
            }
        };
        let mut attempt = 0_u32;
        // Until another version has to be verified.
        loop {
            let finding = asker.look(expected).await;
            let step = decide(&finding, attempt);
            if let Some(protection) = step.tell {
                report.says(now.version, protection);
            }
            let said = asker.word(&finding);
            word.send_if_modified(|known| {
                let changed = *known != said;
                *known = said;
                changed
            });
            if step.poke {
                tracing::debug!(version = now.version, attempt, ?finding, "waking the container runtime");
                report.poke();
            }
            log.note(&finding, attempt);
            // What was well and no longer is gets the quick pauses again.
            attempt = if finding.is_well() { 0 } else { attempt.saturating_add(1) };
            match changed(&mut summary, &now, Some(Instant::now() + step.pause)).await {
                Waited::Pause => {}
                Waited::News => break,
                Waited::End => return,
            }
        }
    }
}

/// Whether the runtime reads drop-in files; else why not, or why it does not say.
pub async fn reads_drop_ins(options: &Options) -> Result<(), String> {
    let runtime = Runtime::connect(options.endpoint.as_deref(), &options.host_root, DEADLINES).await;
    drop_in::honoured_by(&runtime.map_err(|error| error.to_string())?.name)
}

/// What the runtime should have loaded, when files are as they should be.
fn expected(summary: &Summary, drop_in: bool) -> Option<Expected<'_>> {
    if summary.files != Protection::Protected {
        return None;
    }
    Some(Expected { content: summary.content.as_ref()?, wanted: summary.wanted.as_ref()?, drop_in })
}

enum Waited {
    Pause,
    News,
    End,
}

/// Waits until something else has to be verified, or for the pause. What the guard publishes because of an answer is no
/// news.
async fn changed(summary: &mut watch::Receiver<Summary>, before: &Summary, until: Option<Instant>) -> Waited {
    let news = summary.wait_for(|now| {
        now.version != before.version || now.files != before.files || now.wanted != before.wanted
    });
    let news = match until {
        Some(until) => match timeout_at(until, news).await {
            Ok(news) => news,
            Err(_) => return Waited::Pause,
        },
        None => news.await,
    };
    if news.is_ok() { Waited::News } else { Waited::End }
}

impl Finding {
    /// A bounded label, and what is wrong.
    fn state(&self) -> (&'static str, Option<String>) {
        match self {
            Self::Asked(verdict, elsewhere) => {
                let reads = || elsewhere.as_ref().map(|dir| format!("it reads {}", dir.display()));
                match verdict {
                    Verdict::Loaded { current: true } => ("loaded", None),
                    Verdict::Loaded { current: false } => ("outdated", reads()),
                    Verdict::Lags => ("lags", reads()),
                    Verdict::NotReady(why) => ("no_network", Some(why.clone())),
                    Verdict::Doubled => {
                        ("doubled", Some("a drop-in file names the mesh's plugin too".to_owned()))
                    }
                    Verdict::Unknown => ("files", None),
                }
            }
            Self::Silent(why) => ("silent", Some(why.clone())),
            Self::Files(problem) => ("files", problem.clone()),
        }
    }

    fn is_well(&self) -> bool {
        matches!(self, Self::Asked(Verdict::Loaded { current: true }, _) | Self::Files(None))
    }
}

fn decide(finding: &Finding, attempt: u32) -> Step {
    let backoff = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(attempt)).min(MAX_PAUSE);
    let missed = attempt >= POKE_AFTER;
    let (tell, poke, pause) = match finding {
        Finding::Asked(Verdict::Loaded { current: true }, _) => (Some(Protection::Protected), false, RECHECK),
        Finding::Asked(Verdict::Loaded { current: false }, _) => {
            (Some(Protection::Protected), missed, backoff)
        }
        Finding::Asked(Verdict::Lags, _) => (Some(Protection::Unprotected), missed, backoff),
        // No pod starts, so none without the plugin.
        Finding::Asked(Verdict::NotReady(_), _) => (Some(Protection::NoNetwork), missed, backoff),
        Finding::Asked(Verdict::Doubled | Verdict::Unknown, _) => {
            (Some(Protection::Unprotected), false, backoff)
        }
        // No pod starts while the runtime is away, and it loads what is there when it comes back.
        Finding::Silent(_) => (None, false, backoff),
        Finding::Files(None) => (Some(Protection::Protected), false, FILES),
        Finding::Files(Some(_)) => (Some(Protection::Unprotected), false, FILES),
    };
    Step { tell, poke, pause }
}

/// The connection, as long as it lasts.
struct Asker {
    options: Options,
    client: Option<Runtime>,
    /// The usual socket that was found serves no CRI, or for another directory.
    not_cri: bool,
}

impl Asker {
    async fn look(&mut self, expected: Expected<'_>) -> Finding {
        match self.connected().await {
            Ok(true) => {}
            Ok(false) => return self.files(expected.wanted),
            Err(error) => return Finding::Silent(error.to_string()),
        }
        let Some(client) = &self.client else { return self.files(expected.wanted) };
        let status = match client.status().await {
            Ok(status) => status,
            Err(error) => {
                self.client = None;
                return Finding::Silent(error.to_string());
            }
        };
        let conditions = status.status.unwrap_or_default().conditions;
        let network = conditions.iter().find(|condition| condition.r#type == NETWORK_READY);
        // A runtime that does not mention the network does not complain of it.
        let (ready, why) = network.map_or((true, ""), |network| (network.status, network.message.as_str()));
        let answer = Answer::read(ready, why, &status.info);
        let elsewhere = answer.loaded.as_ref().map(|loaded| PathBuf::from(&loaded.dir));
        let elsewhere = elsewhere.filter(|dir| !self.reads(dir));
        if self.options.endpoint.is_none()
            && let Some(dir) = &elsewhere
        {
            tracing::warn!(runtime = client.name, socket = %client.path().display(), reads = %dir.display(),
                "this container runtime reads another CNI directory; going by files alone. \
                 If it is the right one, name it with --cri-endpoint");
            (self.client, self.not_cri) = (None, true);
            return self.files(expected.wanted);
        }
        match judge(&answer, expected) {
            Verdict::Unknown => self.files(expected.wanted),
            verdict => Finding::Asked(verdict, elsewhere),
        }
    }

    fn word(&self, finding: &Finding) -> Word {
        let (state, why) = finding.state();
        let (name, socket) = match &self.client {
            Some(client) => (client.name.clone(), client.path().to_owned()),
            None => Default::default(),
        };
        Word { name, socket, state, why }
    }

    fn files(&self, wanted: &WantedEntry) -> Finding {
        Finding::Files(equipped::problem(wanted, &self.options.places))
    }

    fn reads(&self, dir: &Path) -> bool {
        let Places { dir: here, host, .. } = &self.options.places;
        let real = |path: &Path| path.canonicalize().ok();
        dir == host || dir == here || real(dir).is_some_and(|dir| Some(dir) == real(here))
    }

    /// False when there is nobody to ask.
    async fn connected(&mut self) -> Result<bool, CriError> {
        if self.client.is_some() {
            return Ok(true);
        }
        let Options { endpoint, host_root, .. } = &self.options;
        if endpoint.is_none() && (self.not_cri || endpoint::detect(host_root).is_empty()) {
            return Ok(false);
        }
        match Runtime::connect(endpoint.as_deref(), host_root, DEADLINES).await {
            Ok(client) => {
                tracing::info!(runtime = client.name, socket = %client.path().display(),
                    "the container runtime is asked what it has loaded");
                self.client = Some(client);
                Ok(true)
            }
            // A containerd that only serves Docker has its CRI plugin switched off.
            Err(error @ CriError::Call { .. }) if endpoint.is_none() => {
                tracing::info!(%error, "no container runtime to ask; going by files alone");
                self.not_cri = true;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

/// Tells what lasts, once, and its end.
#[derive(Default)]
struct Log {
    told: Option<Finding>,
}

impl Log {
    fn note(&mut self, finding: &Finding, attempt: u32) {
        if finding.is_well() {
            if self.told.take().is_some() {
                tracing::info!("what was wrong with the mesh's CNI plugin at the container runtime is over");
            }
            return;
        }
        let lasts = attempt >= WARN_AFTER || matches!(finding, Finding::Files(_));
        if !lasts || self.told.as_ref() == Some(finding) {
            return;
        }
        match finding {
            Finding::Asked(Verdict::NotReady(reason), _) => {
                tracing::warn!(
                    reason,
                    "the container runtime has no pod network, although the CNI config is right"
                );
            }
            Finding::Asked(Verdict::Doubled, _) => {
                tracing::warn!(
                    "the mesh's CNI plugin would run more than once: a drop-in file names it too; \
                    remove it from the directory named after the network"
                );
            }
            Finding::Asked(_, Some(dir)) => {
                tracing::warn!(reads = %dir.display(),
                    "the container runtime has not loaded the CNI config: it seems to read another directory");
            }
            Finding::Asked(_, None) => {
                tracing::warn!("the container runtime does not load the CNI config, although it was woken");
            }
            Finding::Silent(error) => {
                tracing::warn!(error, "the container runtime cannot be asked what it has loaded");
            }
            Finding::Files(problem) => {
                tracing::warn!(problem = problem.as_deref(), "the mesh's CNI plugin lacks something");
            }
        }
        self.told = Some(finding.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps() {
        let asked = |verdict| Finding::Asked(verdict, None);
        let (yes, no) = (Some(Protection::Protected), Some(Protection::Unprotected));
        let (ms, s) = (Duration::from_millis, Duration::from_secs);
        for (finding, attempt, tell, poke, pause) in [
            (asked(Verdict::Loaded { current: true }), 9, yes, false, RECHECK),
            (asked(Verdict::Loaded { current: false }), 0, yes, false, ms(1)),
            (asked(Verdict::Loaded { current: false }), 4, yes, true, ms(16)),
            (asked(Verdict::Lags), 0, no, false, ms(1)),
            (asked(Verdict::Lags), 3, no, false, ms(8)),
            (asked(Verdict::Lags), 4, no, true, ms(16)),
            (asked(Verdict::Lags), u32::MAX, no, true, s(5)),
            (asked(Verdict::NotReady("x".to_owned())), 5, Some(Protection::NoNetwork), true, ms(32)),
            (asked(Verdict::Doubled), 5, no, false, ms(32)),
            (Finding::Silent("x".to_owned()), 30, None, false, s(5)),
            (Finding::Files(None), 7, yes, false, FILES),
            (Finding::Files(Some("x".to_owned())), 7, no, false, FILES),
        ] {
            assert_eq!(decide(&finding, attempt), Step { tell, poke, pause }, "{finding:?} {attempt}");
        }
    }
}
