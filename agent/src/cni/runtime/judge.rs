//! Compares what the runtime has loaded with the file that it should have loaded.

use bytes::Bytes;

use super::super::discover::{self, Listed, Look, discover};
use super::super::edit;
use super::super::entry::WantedEntry;
use super::answer::{Answer, Network};

/// What new pods get, as the runtime says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The wanted entry, once.
    Loaded {
        /// The rest is that of the file too.
        current: bool,
    },
    /// Another config than the one in the file, without the wanted entry.
    Lags,
    /// The mesh's plugin more than once: a drop-in file names it beside the list's entry.
    Doubled,
    /// No network, for this reason.
    NotReady(String),
    /// The runtime does not tell.
    Unknown,
}

/// The config that the runtime should have loaded, and what is wanted in it.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// Its content, which files say is right.
    pub content: &'a Bytes,
    /// The mesh's entry.
    pub wanted: &'a WantedEntry,
    /// It is in a drop-in file.
    pub drop_in: bool,
}

/// Judges one answer.
pub fn judge(answer: &Answer, expected: Expected<'_>) -> Verdict {
    if let Some(reason) = &answer.not_ready {
        let failure = answer.loaded.as_ref().and_then(|loaded| loaded.failure.as_ref());
        return Verdict::NotReady(failure.unwrap_or(reason).clone());
    }
    let Some(loaded) = &answer.loaded else { return Verdict::Unknown };
    let Some(network) = &loaded.network else {
        let failure = loaded.failure.clone();
        return Verdict::NotReady(failure.unwrap_or_else(|| "no network but loopback is loaded".to_owned()));
    };
    let own = network.plugins.iter().filter(|plugin| *plugin == expected.wanted.plugin()).count();
    if own > 1 {
        return Verdict::Doubled;
    }
    if expected.drop_in {
        // Last, as its file is; what a meta-plugin delegates to is not the runtime's.
        let last = network.plugins.last().is_some_and(|plugin| plugin == expected.wanted.plugin());
        return match same(network, expected.content) {
            _ if !last => Verdict::Lags,
            current => Verdict::Loaded { current },
        };
    }
    if same(network, expected.content) {
        return Verdict::Loaded { current: true };
    }
    // An older version of the file, or one that was not noticed here yet. A meta-plugin's answer lies in its delegate,
    // which the runtime knows nothing of, so such a file must be the very same.
    let older = Listed { name: "loaded.conflist".into(), content: Ok(network.source.clone().into()) };
    let found = discover(&[older], discover::Runtime::Containerd, Look::For(expected.wanted));
    if own == 1 && found.delegate.is_none() && found.protected() {
        Verdict::Loaded { current: false }
    } else {
        Verdict::Lags
    }
}

/// Whether the runtime's list is this file's content. A single plugin is loaded as a list of one.
fn same(network: &Network, content: &Bytes) -> bool {
    let source = network.source.as_str();
    let Ok(content) = std::str::from_utf8(content) else { return false };
    if source == content || edit::same(source, content) {
        return true;
    }
    let plugins = edit::members(source).into_iter().find(|member| member.key == "plugins");
    let Some(plugins) = plugins.map(|member| member.value) else { return false };
    match edit::elements(plugins).as_slice() {
        [only] => plugins.get(only.clone()).is_some_and(|only| edit::same(only, content)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::entry::Place;
    use super::super::answer::Loaded;
    use super::*;

    const BARE: &str = r#"{"cniVersion":"1.0.0","name":"k8s","plugins":[{"type":"calico"}]}"#;
    const GOOD: &str =
        r#"{"cniVersion":"1.0.0","name":"k8s","plugins":[{"type":"calico"},{"type":"linkerd-cni","a":1}]}"#;
    const SPACED: &str = r#"{"cniVersion":"1.0.0", "name":"k8s","plugins":[{"type":"calico"},{"a":1, "type":"linkerd-cni"}] }"#;
    const OLDER: &str =
        r#"{"cniVersion":"0.4.0","name":"old","plugins":[{"type":"calico"},{"type":"linkerd-cni","a":1}]}"#;
    const OUTDATED: &str =
        r#"{"cniVersion":"1.0.0","name":"k8s","plugins":[{"type":"calico"},{"type":"linkerd-cni","a":2}]}"#;
    const FIRST: &str =
        r#"{"cniVersion":"1.0.0","name":"k8s","plugins":[{"type":"linkerd-cni","a":1},{"type":"calico"}]}"#;
    const MULTUS: &str = r#"{"cniVersion":"0.3.1","name":"m","type":"multus","delegates":[{"type":"x"}]}"#;
    const MULTUS_LIST: &str = r#"{"cniVersion":"0.3.1","name":"m","plugins":[{"cniVersion":"0.3.1","delegates":[{"type":"x"}],"name":"m","type":"multus"}]}"#;
    const OTHER_MULTUS: &str = r#"{"cniVersion":"0.3.1","name":"m","plugins":[{"cniVersion":"0.3.1","name":"m","type":"multus","clusterNetwork":"k8s"}]}"#;

    fn answer(source: &str, plugins: &[&str]) -> Answer {
        let plugins = plugins.iter().map(|plugin| (*plugin).to_owned()).collect();
        let network = Network { name: "k8s".to_owned(), source: source.to_owned(), plugins };
        Answer { not_ready: None, loaded: Some(Loaded { network: Some(network), ..Loaded::default() }) }
    }

    fn verdict(answer: &Answer, content: &str) -> Verdict {
        let wanted = WantedEntry::from_text(r#"{"type":"linkerd-cni","a":1}"#, Place::Last).unwrap();
        let content = Bytes::copy_from_slice(content.as_bytes());
        judge(answer, Expected { content: &content, wanted: &wanted, drop_in: false })
    }

    #[test]
    fn an_entry_in_a_drop_in_file_counts_when_the_runtime_runs_it() {
        let wanted = WantedEntry::from_text(r#"{"type":"linkerd-cni","a":1}"#, Place::Last).unwrap();
        for (source, plugins, expected) in [
            (BARE, &["calico", "linkerd-cni"][..], Verdict::Loaded { current: true }),
            (OLDER, &["calico", "linkerd-cni"], Verdict::Loaded { current: false }),
            // A runtime that does not know such files, or has not read this one yet.
            (BARE, &["calico"], Verdict::Lags),
            (BARE, &["linkerd-cni", "calico"], Verdict::Lags),
            (GOOD, &["calico", "linkerd-cni", "linkerd-cni"], Verdict::Doubled),
        ] {
            let content = Bytes::from_static(BARE.as_bytes());
            let expect = Expected { content: &content, wanted: &wanted, drop_in: true };
            assert_eq!(judge(&answer(source, plugins), expect), expected, "{source} {plugins:?}");
        }
    }

    #[test]
    fn verdicts() {
        let both = &["calico", "linkerd-cni"][..];
        for (source, plugins, content, expected) in [
            (GOOD, both, GOOD, Verdict::Loaded { current: true }),
            (SPACED, both, GOOD, Verdict::Loaded { current: true }),
            (OLDER, both, GOOD, Verdict::Loaded { current: false }),
            (BARE, &["calico"][..], GOOD, Verdict::Lags),
            (OUTDATED, both, GOOD, Verdict::Lags),
            (FIRST, &["linkerd-cni", "calico"], GOOD, Verdict::Lags),
            ("not JSON", both, GOOD, Verdict::Lags),
            // The list has it, a drop-in file has it too.
            (GOOD, &["calico", "linkerd-cni", "linkerd-cni"], GOOD, Verdict::Doubled),
            // A meta-plugin's own file must be the very same: what it delegates to is not the runtime's.
            (MULTUS_LIST, &["multus"], MULTUS, Verdict::Loaded { current: true }),
            (OTHER_MULTUS, &["multus"], MULTUS, Verdict::Lags),
        ] {
            assert_eq!(verdict(&answer(source, plugins), content), expected, "{source} {plugins:?}");
        }
    }

    #[test]
    fn without_a_network_or_without_an_answer() {
        let none =
            |failure: Option<&str>| Loaded { failure: failure.map(str::to_owned), ..Loaded::default() };
        for (not_ready, loaded, expected) in [
            (None, None, Verdict::Unknown),
            (Some("why"), None, Verdict::NotReady("why".to_owned())),
            (Some("why"), Some(none(Some("load"))), Verdict::NotReady("load".to_owned())),
            (None, Some(none(Some("load"))), Verdict::NotReady("load".to_owned())),
            (None, Some(none(None)), Verdict::NotReady("no network but loopback is loaded".to_owned())),
        ] {
            let answer = Answer { not_ready: not_ready.map(str::to_owned), loaded };
            assert_eq!(verdict(&answer, GOOD), expected, "{answer:?}");
        }
        // Ready is what counts, whatever is loaded.
        let stalled =
            Answer { not_ready: Some("STATUS failed".to_owned()), ..answer(GOOD, &["linkerd-cni"]) };
        assert_eq!(verdict(&stalled, GOOD), Verdict::NotReady("STATUS failed".to_owned()));
    }
}
