//! Reads a CNI directory as a container runtime would, for `cni status` and `cni plan`; needs no write permission.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::discover::{CILIUM_BACKUP, Listed};
use super::plan::{FileKind, MAX_BYTES};
use super::refusal::Refusal;

/// The configs and cilium's backups in `dir`, sorted by name. Directories with such a name are left out, as libcni
/// does. `host` is the directory's path on the host, for absolute links; links that lead elsewhere are not followed.
pub fn list(dir: &Path, host: &Path) -> io::Result<Vec<Listed>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let backup = name.as_bytes().ends_with(CILIUM_BACKUP.as_bytes());
        if entry.file_type()?.is_dir() || !(backup || FileKind::of(&name).is_some()) {
            continue;
        }
        let content = if backup { Ok(Bytes::new()) } else { content(dir, host, &name) };
        found.push(Listed { name, content });
    }
    found.sort_by(|a, b| a.name.as_bytes().cmp(b.name.as_bytes()));
    Ok(found)
}

/// The content of one file, following a link inside of the directory.
pub fn content(dir: &Path, host: &Path, name: &OsStr) -> Result<Bytes, Refusal> {
    let path = resolve(dir, host, name)?;
    // A FIFO must not block, nor a device do anything.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(&path);
    let file = file.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Refusal::Symlink,
        _ => Refusal::from(&error),
    })?;
    let meta = file.metadata().map_err(|error| Refusal::from(&error))?;
    if !meta.is_file() {
        return Err(Refusal::NotRegular);
    }
    if meta.len() > MAX_BYTES as u64 {
        return Err(Refusal::TooLarge { bytes: meta.len() });
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(|error| Refusal::from(&error))?;
    Ok(Bytes::from(bytes))
}

fn resolve(dir: &Path, host: &Path, name: &OsStr) -> Result<PathBuf, Refusal> {
    let path = dir.join(name);
    let Ok(link) = fs::read_link(&path) else { return Ok(path) };
    let target = match link.strip_prefix(host) {
        Ok(inside) => dir.join(inside),
        Err(_) => dir.join(link), // an absolute link stays what it is
    };
    let (root, target) = (dir.canonicalize(), target.canonicalize());
    match (root, target) {
        (Ok(root), Ok(target)) if target.starts_with(&root) => Ok(target),
        _ => Err(Refusal::Symlink),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn every_kind_of_file() {
        let dir = tempfile::tempdir().unwrap();
        let (root, host) = (dir.path(), Path::new("/etc/cni/net.d"));
        fs::write(root.join("10-a.conflist"), "a").unwrap();
        fs::write(root.join("20-b.conflist.cilium_bak"), "b").unwrap();
        fs::write(root.join("ZZZ-kubeconfig"), "secret").unwrap();
        fs::create_dir(root.join("30-c.conflist")).unwrap();
        symlink("10-a.conflist", root.join("40-link.conf")).unwrap();
        symlink("/etc/cni/net.d/10-a.conflist", root.join("41-host.conf")).unwrap();
        symlink("gone", root.join("42-dangling.conf")).unwrap();
        symlink("/etc/hostname", root.join("43-outside.conf")).unwrap();
        symlink("44-loop.conf", root.join("44-loop.conf")).unwrap();
        symlink(".", root.join("45-dir.conf")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, root.join("50-fifo.conf"), rustix::fs::Mode::RWXU).unwrap();
        fs::write(root.join("60-big.json"), vec![b' '; MAX_BYTES + 1]).unwrap();
        fs::write(root.join("70-closed.json"), "").unwrap();
        fs::set_permissions(root.join("70-closed.json"), fs::Permissions::from_mode(0o000)).unwrap();
        let found = list(root, host).unwrap();
        let shown: Vec<_> = found
            .iter()
            .map(|file| (file.name.to_str().unwrap(), file.content.as_ref().map_err(Refusal::label)))
            .collect();
        let a = Bytes::from_static(b"a");
        // root reads everything
        let closed = if rustix::process::geteuid().is_root() { Ok(&Bytes::new()) } else { Err("permission") };
        assert_eq!(
            shown,
            [
                ("10-a.conflist", Ok(&a)),
                ("20-b.conflist.cilium_bak", Ok(&Bytes::new())),
                ("40-link.conf", Ok(&a)),
                ("41-host.conf", Ok(&a)),
                ("42-dangling.conf", Err("symlink")),
                ("43-outside.conf", Err("symlink")),
                ("44-loop.conf", Err("symlink")),
                ("45-dir.conf", Err("not_regular")),
                ("50-fifo.conf", Err("not_regular")),
                ("60-big.json", Err("too_large")),
                ("70-closed.json", closed),
            ]
        );
        assert!(list(&root.join("gone"), host).is_err());
    }
}
