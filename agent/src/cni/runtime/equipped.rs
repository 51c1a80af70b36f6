//! What files say of the plugin that an entry names, where the container runtime cannot be asked.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::super::entry::WantedEntry;

/// Where a host's files are seen from here.
#[derive(Clone, Debug)]
pub struct Places {
    /// The CNI directory.
    pub dir: PathBuf,
    /// Its path on the host.
    pub host: PathBuf,
    /// The plugins' directory.
    pub bin_dir: PathBuf,
}

/// What the entry's plugin lacks to work: its binary or its kubeconfig. What is not visible from here lacks nothing.
pub fn problem(wanted: &WantedEntry, places: &Places) -> Option<String> {
    binary(&places.bin_dir, wanted.plugin()).or_else(|| kubeconfig(wanted, places))
}

/// True when something that the entry needs is seen to be there and nothing is seen to be missing: its mesh is installed.
pub fn is_installed(wanted: &WantedEntry, places: &Places) -> bool {
    let seen = places.bin_dir.join(wanted.plugin()).is_file()
        || kubeconfig_path(wanted, places).is_some_and(|path| path.is_file());
    seen && problem(wanted, places).is_none()
}

fn binary(dir: &Path, plugin: &str) -> Option<String> {
    if !dir.is_dir() {
        return None; // not mounted
    }
    let path = dir.join(plugin);
    match fs::metadata(&path) {
        Ok(found) if !found.is_file() => Some(format!("{} is no file", path.display())),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => {
            Some(format!("{} is not executable", path.display()))
        }
        Ok(_) => None,
        // A link may lead to what is only on the host.
        Err(_) if path.is_symlink() => None,
        Err(error) => Some(format!("the plugin's binary {}: {error}", path.display())),
    }
}

/// Where the kubeconfig that the entry names is seen from here; `None` when it names none, or one elsewhere.
fn kubeconfig_path(wanted: &WantedEntry, places: &Places) -> Option<PathBuf> {
    let entry: serde_json::Value = serde_json::from_str(wanted.text()).ok()?;
    // linkerd-cni and istio-cni; consul-cni gives a name in the CNI directory.
    let path = entry.pointer("/kubernetes/kubeconfig").or_else(|| entry.get("kubeconfig"))?.as_str()?;
    let path = Path::new(path);
    let inside = if path.is_absolute() { path.strip_prefix(&places.host).ok()? } else { path };
    Some(places.dir.join(inside))
}

fn kubeconfig(wanted: &WantedEntry, places: &Places) -> Option<String> {
    let seen = kubeconfig_path(wanted, places)?;
    match fs::File::open(&seen).and_then(|file| file.metadata()) {
        Ok(found) if found.is_file() && found.len() > 0 => None,
        Ok(_) => Some(format!("the plugin's kubeconfig {} is empty or no file", seen.display())),
        Err(error) => Some(format!("the plugin's kubeconfig {}: {error}", seen.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::entry::Place;
    use super::*;

    #[test]
    fn binary_and_kubeconfig_are_looked_for_where_they_can_be_seen() {
        let root = tempfile::tempdir().unwrap();
        let places = Places {
            dir: root.path().join("net.d"),
            host: "/etc/cni/net.d".into(),
            bin_dir: root.path().join("bin"),
        };
        fs::create_dir(&places.dir).unwrap();
        let entry = |text: &str| WantedEntry::from_text(text, Place::Last).unwrap();
        let linkerd =
            entry(r#"{"type":"linkerd-cni","kubernetes":{"kubeconfig":"/etc/cni/net.d/ZZZ-kubeconfig"}}"#);
        let consul = entry(r#"{"type":"consul-cni","kubeconfig":"ZZZ-kubeconfig"}"#);
        let lacks = |wanted: &WantedEntry, what: &str| {
            let found = problem(wanted, &places);
            assert!(found.as_deref().is_some_and(|text| text.contains(what)), "{what}: {found:?}");
        };
        // No plugins' directory here: nothing is known of it.
        lacks(&linkerd, "ZZZ-kubeconfig");
        lacks(&consul, "ZZZ-kubeconfig");
        fs::write(places.dir.join("ZZZ-kubeconfig"), "").unwrap();
        lacks(&linkerd, "empty");
        fs::write(places.dir.join("ZZZ-kubeconfig"), "x").unwrap();
        assert_eq!(problem(&linkerd, &places), None);
        assert_eq!(problem(&entry(r#"{"type":"x","kubernetes":{"kubeconfig":"/var/k"}}"#), &places), None);

        fs::create_dir(&places.bin_dir).unwrap();
        lacks(&linkerd, "bin/linkerd-cni");
        let binary = places.bin_dir.join("linkerd-cni");
        fs::write(&binary, "x").unwrap();
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o644)).unwrap();
        lacks(&linkerd, "not executable");
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(problem(&linkerd, &places), None);
        fs::create_dir(places.bin_dir.join("consul-cni")).unwrap();
        lacks(&consul, "no file");
        std::os::unix::fs::symlink("/nowhere/on/the/host", places.bin_dir.join("istio-cni")).unwrap();
        assert_eq!(problem(&entry(r#"{"type":"istio-cni"}"#), &places), None);
    }
}
