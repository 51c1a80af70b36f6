//! Where the container runtime listens.

use std::path::{Path, PathBuf};

/// The sockets of the usual runtimes. Distributions that bring their own come first: a plain containerd beside them
/// serves Docker, not the kubelet.
const USUAL: [&str; 7] = [
    "/run/k3s/containerd/containerd.sock", // k3s and rke2
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/crio/crio.sock",
    "/run/cri-dockerd.sock",
    "/run/containerd/containerd.sock",
    "/var/run/containerd/containerd.sock", // where /var/run is no link to /run
];

/// An endpoint that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no container runtime endpoint: give the absolute path of a Unix socket, with or without unix://"
)]
pub struct EndpointError(String);

/// Reads `unix:///run/x.sock` or `/run/x.sock`.
///
/// # Errors
/// [`EndpointError`] for other schemes and for relative paths.
pub fn parse(text: &str) -> Result<PathBuf, EndpointError> {
    let path = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:")).unwrap_or(text);
    let path = Path::new(path);
    if path.is_absolute() { Ok(path.to_owned()) } else { Err(EndpointError(text.to_owned())) }
}

/// The usual sockets that exist, below `host_root` (`/` unless the host's file system is mounted elsewhere).
pub(crate) fn detect(host_root: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for path in USUAL {
        let path = host_root.join(path.trim_start_matches('/'));
        // Resolved, so that /var/run and /run do not make two of one.
        let Ok(real) = path.canonicalize() else { continue };
        if !found.contains(&real) {
            found.push(real);
        }
    }
    found
}

/// All the places where [`detect`] looks, for messages.
pub(super) fn usual() -> String {
    USUAL.join(", ")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn both_forms() {
        for text in ["unix:///run/c.sock", "/run/c.sock", "unix:/run/c.sock"] {
            assert_eq!(parse(text).expect(text), Path::new("/run/c.sock"));
        }
        for text in ["", "c.sock", "tcp://127.0.0.1:1", "unix://c.sock", "npipe:////./pipe/x"] {
            assert!(parse(text).expect_err(text).to_string().contains("absolute path"), "{text}");
        }
    }

    #[test]
    fn a_distributions_own_runtime_comes_first_and_links_count_once() {
        let root = tempfile::tempdir().expect("tempdir");
        let touch = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
            fs::write(path, "").expect("write");
        };
        assert!(detect(root.path()).is_empty());
        touch("run/containerd/containerd.sock");
        touch("run/k3s/containerd/containerd.sock");
        fs::create_dir_all(root.path().join("var")).expect("mkdir");
        std::os::unix::fs::symlink("../run", root.path().join("var/run")).expect("symlink");
        let found = detect(root.path());
        let found: Vec<_> = found
            .iter()
            .map(|path| path.strip_prefix(root.path().canonicalize().expect("root")).expect("below"))
            .collect();
        assert_eq!(
            found,
            [Path::new("run/k3s/containerd/containerd.sock"), Path::new("run/containerd/containerd.sock")]
        );
    }
}
