//! Container images out of local files, as OCI archives (image-spec v1.0), with no tool and always the same bytes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{EntryType, Header};

use crate::{bin, proc};

/// Image of the sandbox process.
pub const PAUSE: &str = "localhost/pause:1";
/// Image with busybox and the traffic helper, `/bin/sh` and `/bin/traffic`.
pub const MESHTEST: &str = "localhost/meshtest:1";

enum Entry {
    Dir(u32),
    File(Vec<u8>, u32),
    Link(String),
}

/// An image in the making.
#[derive(Default)]
pub struct Image {
    entries: BTreeMap<String, Entry>,
    entrypoint: Vec<String>,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.entries.keys()).finish()
    }
}

/// Writes the archive of the sandbox image.
pub fn write_pause(to: &Path) -> Result<()> {
    let mut image = Image::default();
    image.program(&bin("traffic")?, "traffic")?;
    image.entrypoint(&["/traffic", "pause"]);
    image.write(PAUSE, to)
}

/// Writes the archive of the application image.
pub fn write_meshtest(to: &Path) -> Result<()> {
    let mut image = Image::default();
    image.program(&bin("traffic")?, "bin/traffic")?;
    image.program(&find_busybox()?, "bin/busybox")?;
    for name in ["sh", "sleep", "cat", "echo", "ip", "ps", "id", "ls", "nc"] {
        image.link("/bin/busybox", &format!("bin/{name}"));
    }
    image.dir("tmp", 0o1777);
    for name in ["proc", "sys", "dev", "etc"] {
        image.dir(name, 0o755);
    }
    image.write(MESHTEST, to)
}

fn find_busybox() -> Result<std::path::PathBuf> {
    ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .map(Into::into)
        .find(|path: &std::path::PathBuf| path.is_file())
        .context("busybox is missing: install busybox-static")
}

impl Image {
    /// Adds an empty directory.
    pub fn dir(&mut self, path: &str, mode: u32) {
        self.put(path, Entry::Dir(mode));
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, target: &str, path: &str) {
        self.put(path, Entry::Link(target.to_owned()));
    }

    /// Adds an executable and the shared libraries it needs, at the paths where its loader will look.
    pub fn program(&mut self, from: &Path, path: &str) -> Result<()> {
        self.copy(from, path)?;
        for library in libraries(from)? {
            self.copy(Path::new(&library), &library)?;
        }
        Ok(())
    }

    /// Program and first arguments of a container that says nothing else.
    pub fn entrypoint(&mut self, words: &[&str]) {
        self.entrypoint = words.iter().map(ToString::to_string).collect();
    }

    fn copy(&mut self, from: &Path, path: &str) -> Result<()> {
        let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.put(path, Entry::File(bytes, 0o755));
        Ok(())
    }

    fn put(&mut self, path: &str, entry: Entry) {
        let path = path.trim_start_matches('/');
        for (at, _) in path.match_indices('/') {
            let parent = path.get(..at).unwrap_or_default();
            self.entries.entry(parent.to_owned()).or_insert(Entry::Dir(0o755));
        }
        self.entries.insert(path.to_owned(), entry);
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut archive = tar::Builder::new(Vec::new());
        for (path, entry) in &self.entries {
            let (kind, data, mode) = match entry {
                Entry::Dir(mode) => (EntryType::Directory, &[][..], *mode),
                Entry::File(bytes, mode) => (EntryType::Regular, &bytes[..], *mode),
                Entry::Link(_) => (EntryType::Symlink, &[][..], 0o777),
            };
            let mut header = header(data, mode)?;
            header.set_entry_type(kind);
            if let Entry::Link(target) = entry {
                archive.append_link(&mut header, path, target)?;
            } else {
                archive.append_data(&mut header, path, data)?;
            }
        }
        Ok(archive.into_inner()?)
    }

    /// Writes the archive that `ctr images import` takes; `name` is `host/repository:tag`.
    pub fn write(&self, name: &str, to: &Path) -> Result<()> {
        let layer = self.layer()?;
        let config = serde_json::to_vec(&json!({
            "architecture": architecture()?,
            "os": "linux",
            "config": { "Env": ["PATH=/bin:/sbin:/usr/bin"], "Entrypoint": self.entrypoint, "WorkingDir": "/" },
            "rootfs": { "type": "layers", "diff_ids": [digest(&layer)] },
        }))?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": describe("application/vnd.oci.image.config.v1+json", &config),
            "layers": [describe("application/vnd.oci.image.layer.v1.tar", &layer)],
        }))?;
        let mut described = describe("application/vnd.oci.image.manifest.v1+json", &manifest);
        described["annotations"] = json!({ "io.containerd.image.name": name });
        let index = serde_json::to_vec(&json!({ "schemaVersion": 2, "manifests": [described] }))?;

        let file = fs::File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
        let mut archive = tar::Builder::new(file);
        let mut put = |path: &str, data: &[u8]| archive.append_data(&mut header(data, 0o644)?, path, data);
        put("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        put("index.json", &index)?;
        for blob in [&config, &layer, &manifest] {
            put(&format!("blobs/{}", digest(blob).replace(':', "/")), blob)?;
        }
        archive.finish().with_context(|| format!("cannot write {}", to.display()))
    }
}

/// Owner root, time 0.
fn header(data: &[u8], mode: u32) -> std::io::Result<Header> {
    let mut header = Header::new_gnu();
    header.set_size(u64::try_from(data.len()).map_err(std::io::Error::other)?);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    Ok(header)
}

fn describe(media_type: &str, blob: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": digest(blob), "size": blob.len() })
}

fn digest(blob: &[u8]) -> String {
    Sha256::digest(blob).iter().fold("sha256:".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn architecture() -> Result<&'static str> {
    Ok(match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => bail!("no OCI name known for architecture {other}"),
    })
}

/// Absolute paths of the loader and the libraries of an executable; none for a static one.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let mut command = Command::new("ldd");
    command.arg(program);
    let out = proc::output(command, "", crate::wait::HANG)?;
    // A static executable makes ldd fail, with "not a dynamic executable".
    Ok(if out.status.success() { library_paths(&String::from_utf8_lossy(&out.stdout)) } else { Vec::new() })
}

/// The first absolute path of each line of ldd(1)'s output; the vDSO has none.
fn library_paths(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_ldd() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(library_paths(text), ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]);
        assert!(library_paths("\tstatically linked\n").is_empty());
    }

    #[test]
    fn writes_the_same_bytes_twice_with_parents_first() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let mut image = Image::default();
            image.put("a/b/c", Entry::File(b"text".to_vec(), 0o755));
            image.link("/a/b/c", "link");
            let path = dir.path().join(name);
            image.write("localhost/x:1", &path).unwrap();
            let layer = image.layer().unwrap();
            let mut archive = tar::Archive::new(&layer[..]);
            let names: Vec<_> = archive
                .entries()
                .unwrap()
                .map(|e| e.unwrap().path().unwrap().display().to_string())
                .collect();
            assert_eq!(names, ["a", "a/b", "a/b/c", "link"]);
            fs::read(path).unwrap()
        };
        assert_eq!(write("1"), write("2"));
    }

    #[test]
    fn digests_as_sha256sum_does() {
        assert_eq!(digest(b""), "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
