//! The file system of a virtual machine, in memory: programs of this machine at their own paths, with the libraries
//! that they need.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Cursor, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use cpio::newc;

/// File types of inode(7).
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER: u32 = 0o020_000;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Directory,
    Symlink(PathBuf),
    /// Major and minor number.
    Character(u32, u32),
    Bytes(u32, Vec<u8>),
    /// A file of this machine.
    Copy(u32, PathBuf),
}

/// What the machine will find, by absolute path.
#[derive(Clone, Debug, Default)]
pub struct Initramfs {
    entries: BTreeMap<PathBuf, Entry>,
}

impl Initramfs {
    /// With the directories and the device that the kernel itself wants.
    pub fn new() -> Self {
        let mut new = Self::default();
        for dir in ["/dev", "/mnt", "/proc", "/root", "/run", "/sys", "/tmp", "/etc", "/var"] {
            new.put(Path::new(dir), Entry::Directory);
        }
        new.put(Path::new("/dev/console"), Entry::Character(5, 1));
        new
    }

    /// A file with this content.
    pub fn bytes(&mut self, path: &str, mode: u32, bytes: impl Into<Vec<u8>>) {
        self.put(Path::new(path), Entry::Bytes(mode, bytes.into()));
    }

    /// A copy of a file of this machine.
    pub fn copy(&mut self, path: &Path, from: &Path) -> Result<()> {
        let mode = fs::metadata(from).with_context(|| format!("no {}", from.display()))?.permissions().mode();
        self.put(path, Entry::Copy(mode & 0o7777, from.to_path_buf()));
        Ok(())
    }

    /// A file of this machine at its own path, whatever symbolic links lead to it, and the libraries it is linked with.
    pub fn program(&mut self, path: &Path) -> Result<()> {
        let file = self.same(path)?;
        for library in libraries(&file)? {
            self.same(&library)?;
        }
        Ok(())
    }

    /// All files of a directory of this machine, not those of directories below.
    pub fn directory(&mut self, dir: &Path) -> Result<()> {
        for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
            let entry = entry?;
            if !entry.file_type()?.is_dir() {
                self.same(&entry.path())?;
            }
        }
        Ok(())
    }

    /// A file of this machine at its own path: each symbolic link on the way, then the file. Returns its real path.
    pub fn same(&mut self, path: &Path) -> Result<PathBuf> {
        let mut seen = BTreeSet::new();
        let mut path = path.to_path_buf();
        loop {
            let Some(link) = first_link(&path) else {
                self.copy(&path, &path)?;
                return Ok(path);
            };
            if !seen.insert(path.clone()) {
                bail!("{} is a loop of symbolic links", path.display());
            }
            let target = fs::read_link(&link)?;
            self.put(&link, Entry::Symlink(target.clone()));
            let rest = path.strip_prefix(&link)?;
            let parent = link.parent().unwrap_or_else(|| Path::new("/"));
            let joined = parent.join(target);
            path = normal(&if rest.as_os_str().is_empty() { joined } else { joined.join(rest) });
        }
    }

    fn put(&mut self, path: &Path, entry: Entry) {
        for parent in path.ancestors().skip(1).filter(|parent| parent.parent().is_some()) {
            self.entries.entry(parent.to_path_buf()).or_insert(Entry::Directory);
        }
        self.entries.insert(path.to_path_buf(), entry);
    }

    /// Writes the archive (<https://docs.kernel.org/driver-api/early-userspace/buffer-format.html>).
    pub fn write(&self, mut out: impl Write) -> Result<()> {
        for (inode, (path, entry)) in (1..).zip(&self.entries) {
            let name = path.strip_prefix("/").unwrap_or(path).to_str();
            let name = name.with_context(|| format!("{} is not UTF-8", path.display()))?;
            let head = newc::Builder::new(name).ino(inode).nlink(1);
            match entry {
                Entry::Directory => data(head.mode(DIRECTORY | 0o755), &[], &mut out)?,
                Entry::Symlink(to) => data(head.mode(SYMLINK | 0o777), to.as_os_str().as_bytes(), &mut out)?,
                Entry::Character(major, minor) => {
                    let head = head.mode(CHARACTER | 0o600).rdev_major(*major).rdev_minor(*minor);
                    data(head, &[], &mut out)?;
                }
                Entry::Bytes(mode, bytes) => data(head.mode(REGULAR | mode), bytes, &mut out)?,
                Entry::Copy(mode, from) => {
                    let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
                    data(head.mode(REGULAR | mode), &bytes, &mut out)?;
                }
            }
        }
        newc::trailer(&mut out)?;
        out.flush()?;
        Ok(())
    }

    /// Writes the archive to a file.
    pub fn save(&self, file: &Path) -> Result<()> {
        let out = File::create(file).with_context(|| format!("cannot create {}", file.display()))?;
        self.write(io::BufWriter::new(out)).with_context(|| format!("cannot write {}", file.display()))
    }
}

fn data(head: newc::Builder, bytes: &[u8], out: &mut impl Write) -> Result<()> {
    let size = u32::try_from(bytes.len()).context("a file of more than 4 GiB")?;
    let mut writer = head.write(out, size);
    io::copy(&mut Cursor::new(bytes), &mut writer)?;
    writer.finish()?;
    Ok(())
}

/// The first component of a path that is a symbolic link.
fn first_link(path: &Path) -> Option<PathBuf> {
    let mut ancestors: Vec<&Path> = path.ancestors().collect();
    ancestors.reverse();
    ancestors.into_iter().find(|part| part.is_symlink()).map(Path::to_path_buf)
}

/// Without `.` and `..`; no component is a symbolic link where that matters, because links are followed one by one.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => drop(normal.pop()),
            other => normal.push(other),
        }
    }
    normal
}

/// The libraries that the loader would map; none for a static program.
fn libraries(file: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(file).output().context("cannot run `ldd`")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // It fails for a static program, and for what is none.
    if output.status.success() {
        parse_ldd(&text).with_context(|| file.display().to_string())
    } else {
        Ok(Vec::new())
    }
}

fn parse_ldd(text: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.contains("=> not found") {
            bail!("a library is missing: {line}");
        }
        let path = line.rsplit("=> ").next().and_then(|rest| rest.split(" (").next());
        found.extend(path.filter(|path| path.starts_with('/')).map(PathBuf::from));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn reads_what_ldd_says() {
        let text = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibm.so.6 => /lib/x/libm.so.6 (0x00007f1)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f2)\n";
        let want = ["/lib/x/libm.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse_ldd(text).unwrap(), want);
        assert_eq!(parse_ldd("\tstatically linked\n").unwrap(), [""; 0].map(PathBuf::from));
        assert!(parse_ldd("\tlibx.so => not found\n").is_err());
    }

    #[test]
    fn links_on_the_way_are_there_too() {
        let dir = std::env::temp_dir().join(format!("nobypass-initramfs-{}", std::process::id()));
        fs::create_dir_all(dir.join("usr/real")).unwrap();
        fs::write(dir.join("usr/real/tool"), "x").unwrap();
        symlink("usr/real", dir.join("bin")).unwrap();
        symlink("../real/tool", dir.join("usr/real/alias")).unwrap();
        let mut initramfs = Initramfs::default();
        let real = initramfs.same(&dir.join("bin/alias"));
        fs::remove_dir_all(&dir).unwrap();
        let dir = fs::canonicalize(dir.parent().unwrap()).unwrap().join(dir.file_name().unwrap());
        assert_eq!(real.unwrap(), dir.join("usr/real/tool"));
        let get = |path: &str| initramfs.entries.get(&dir.join(path)).cloned();
        assert_eq!(get("bin"), Some(Entry::Symlink("usr/real".into())));
        assert_eq!(get("usr/real/alias"), Some(Entry::Symlink("../real/tool".into())));
        assert_eq!(get("usr/real"), Some(Entry::Directory));
        assert!(matches!(get("usr/real/tool"), Some(Entry::Copy(..))));
    }

    #[test]
    fn the_archive_can_be_read_again() {
        let mut initramfs = Initramfs::new();
        initramfs.bytes("/a/b", 0o640, "hello");
        let mut archive = Vec::new();
        initramfs.write(&mut archive).unwrap();
        let mut left = archive.as_slice();
        let mut found = Vec::new();
        loop {
            let reader = newc::Reader::new(left).unwrap();
            let entry = reader.entry();
            if entry.is_trailer() {
                break;
            }
            found.push((entry.name().to_owned(), entry.mode(), entry.file_size()));
            left = reader.finish().unwrap();
        }
        assert!(found.contains(&("a".into(), DIRECTORY | 0o755, 0)), "{found:?}");
        assert!(found.contains(&("a/b".into(), REGULAR | 0o640, 5)), "{found:?}");
        assert!(found.contains(&("dev/console".into(), CHARACTER | 0o600, 0)), "{found:?}");
        let place = |name: &str| found.iter().position(|(found, ..)| found == name);
        assert!(place("a") < place("a/b"), "a directory comes before what is in it");
    }
}
