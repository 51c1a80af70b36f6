//! Keeping the kernel half in effect: heartbeat, hooks, the pods' cgroups, the node's addresses.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use super::Ended;
use super::policy::Apply;
use crate::bpf::{BpfError, Hook, Kernel};
use crate::cgroup::parents::{PodParent, find_parents};
use crate::cgroup::root::CgroupRoot;
use crate::policy::exempt::kernel_address;
use crate::server::Health;
use crate::status::hook_status;

/// How often the agent shows the programs that it lives.
const BEAT: Duration = Duration::from_secs(5);
/// How often the hooks' effect is looked at: some ten system calls. So long may a removed pin leave pods uncovered.
const LOOK: Duration = Duration::from_secs(1);
/// How often the node's addresses, and pods' cgroups in new places, are looked for.
const SEARCH: Duration = Duration::from_secs(30);

/// Tells readiness and metrics which hooks are in effect.
pub(super) fn show_hooks(kernel: &Kernel, health: &Health) {
    let effective = kernel.effective();
    let reason = |hook: Hook| {
        let degraded = kernel.degraded().iter().find(|degraded| degraded.hook == hook);
        degraded.map_or(String::new(), |degraded| degraded.reason.clone())
    };
    health.set_hooks(effective.iter().map(|(hook, on)| hook_status(*hook, *on, &reason(*hook))).collect());
    match effective.iter().find(|(hook, _)| *hook == Hook::Egress) {
        Some((_, true)) => health.done("hooks"),
        _ => health.wait_for("hooks", "the egress program is not in effect"),
    }
}

/// Heartbeat, the hooks' effect, the node's addresses, and changes of the settings: the one writer of `CONFIG`.
pub(super) async fn keep_alive(
    mut kernel: Kernel,
    parents: Vec<PodParent>,
    mut changes: mpsc::Receiver<Apply>,
    health: Arc<Health>,
) -> Ended {
    let mut beat = tokio::time::interval(BEAT);
    let mut look = tokio::time::interval(LOOK);
    let mut search = tokio::time::interval(SEARCH);
    let mut lost = Vec::new();
    loop {
        let done = tokio::select! {
            _ = beat.tick() => kernel.maps.beat().map_err(text),
            _ = look.tick() => still_there(&parents).and_then(|()| {
                look_after(&mut kernel, &health, &mut lost).map_err(text)
            }),
            _ = search.tick() => {
                show_overridden(&kernel, &health);
                refresh_addresses(&mut kernel).map_err(text)
            }
            Some(Apply { effective, done }) = changes.recv() => {
                let result = kernel.set_config(|config| effective.kernel(config));
                let _ = done.send(result.map_err(text));
                Ok(())
            }
        };
        if let Err(error) = done {
            return ("kernel", Err(error));
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn text(error: BpfError) -> String {
    error.to_string()
}

/// A cgroup of the same name is another one: nothing is attached to it.
fn still_there(parents: &[PodParent]) -> Result<(), String> {
    for PodParent { path, id, .. } in parents {
        match fs::metadata(path) {
            Ok(meta) if meta.ino() == *id => {}
            Ok(_) => return Err(format!("the pods' cgroup {} was removed and made again", path.display())),
            Err(error) => return Err(format!("the pods' cgroup {} is gone ({error})", path.display())),
        }
    }
    Ok(())
}

/// Attaches again what somebody detached. `before` is what was lost already at the last look.
fn look_after(kernel: &mut Kernel, health: &Health, before: &mut Vec<Hook>) -> Result<(), BpfError> {
    let degraded: Vec<Hook> = kernel.degraded().iter().map(|degraded| degraded.hook).collect();
    let effective = kernel.effective().into_iter();
    let lost: Vec<Hook> =
        effective.filter(|(hook, on)| !on && !degraded.contains(hook)).map(|(hook, _)| hook).collect();
    if !lost.is_empty() {
        if lost != *before {
            let hooks: Vec<&str> = lost.iter().map(|hook| hook.label()).collect();
            tracing::error!(?hooks, "somebody detached programs of ours, attaching them again");
        }
        if lost.iter().any(|hook| Hook::CGROUP.contains(hook)) {
            let parents = kernel.parents().to_vec();
            kernel.set_parents(&parents)?;
        }
        let tracepoints: Vec<Hook> =
            lost.iter().filter(|hook| Hook::TRACEPOINT.contains(hook)).copied().collect();
        kernel.attach_tracepoints(&tracepoints)?;
    }
    *before = lost;
    show_hooks(kernel, health);
    Ok(())
}

/// What others attached above and ours takes the place of: told, and left alone.
fn show_overridden(kernel: &Kernel, health: &Health) {
    const WHAT: &str = "foreign-programs";
    let found = kernel.overridden();
    if found.is_empty() {
        health.note_done(WHAT);
        return;
    }
    let text = format!(
        "{} is attached with BPF_F_ALLOW_OVERRIDE and does not run for pods while ours is: attach it with \
         BPF_F_ALLOW_MULTI. nobypass leaves it alone",
        found.join(", ")
    );
    if !health.notes().iter().any(|note| note.ends_with(&text)) {
        tracing::warn!("{text}");
    }
    health.note(WHAT, text);
}

/// Connections from these are the kubelet's, say: no inbound bypasses.
fn refresh_addresses(kernel: &mut Kernel) -> Result<(), BpfError> {
    let addresses = nix::ifaddrs::getifaddrs().into_iter().flatten().filter_map(|interface| {
        let address = interface.address?;
        let ip = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => v4.ip().into(),
            (None, Some(v6)) => v6.ip().into(),
            (None, None) => return None,
        };
        Some(kernel_address(ip).1)
    });
    let addresses: Vec<_> = addresses.collect();
    kernel.maps.set_node_addresses(&addresses)
}

/// Ends when pods have cgroups in a new place, as after a change of the kubelet's cgroup driver.
pub(super) async fn follow_parents(
    root: CgroupRoot,
    explicit: Vec<PathBuf>,
    parents: Vec<PodParent>,
) -> Ended {
    let known: BTreeSet<u64> = parents.iter().map(|parent| parent.id).collect();
    let mut search = tokio::time::interval(SEARCH);
    loop {
        search.tick().await;
        let (root, explicit) = (root.clone(), explicit.clone());
        let found = tokio::task::spawn_blocking(move || find_parents(&root, &explicit)).await;
        let new = match found {
            Ok(Ok(found)) => found.into_iter().find(|parent| !known.contains(&parent.id)),
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot look for pod cgroups in new places");
                None
            }
            Err(error) => return ("parents", Err(error.to_string())),
        };
        if let Some(PodParent { path, .. }) = new {
            return ("parents", Err(format!("pods have a new cgroup, {}", path.display())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::root::RootKind;

    fn tree() -> (tempfile::TempDir, CgroupRoot) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("kubepods")).unwrap();
        let root = CgroupRoot { path: dir.path().into(), kind: RootKind::Given, level: 0 };
        (dir, root)
    }

    #[test]
    fn a_cgroup_that_is_gone_or_another_one_is_noticed() {
        let (_dir, root) = tree();
        let parents = find_parents(&root, &[]).unwrap();
        assert_eq!(still_there(&parents), Ok(()));
        let kubepods = root.path.join("kubepods");
        fs::rename(&kubepods, root.path.join("old")).unwrap();
        assert!(still_there(&parents).unwrap_err().contains("is gone (No such file"));
        fs::create_dir(&kubepods).unwrap();
        assert!(still_there(&parents).unwrap_err().ends_with("kubepods was removed and made again"));
    }

    #[tokio::test]
    async fn a_new_place_ends_the_task() {
        let (_dir, root) = tree();
        let parents = find_parents(&root, &[]).unwrap();
        fs::create_dir(root.path.join("kubepods.slice")).unwrap();
        let (task, ended) = follow_parents(root, Vec::new(), parents).await;
        assert_eq!(task, "parents");
        assert!(ended.unwrap_err().ends_with("/kubepods.slice"));
    }
}
