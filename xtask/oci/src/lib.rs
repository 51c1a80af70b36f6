//! Container images out of local files, as OCI archives (image-spec v1.0): the same input gives the same bytes, and no
//! engine is needed. `ctr images import`, `skopeo copy oci-archive:FILE`, `podman load` and `docker load` take them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};

enum Entry {
    Dir(u32),
    File(Vec<u8>, u32),
    Link(String),
}

/// An image in the making: one layer, FROM scratch.
#[derive(Default)]
pub struct Image {
    entries: BTreeMap<String, Entry>,
    entrypoint: Vec<String>,
    command: Vec<String>,
    labels: BTreeMap<String, String>,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Digest of the manifest: what a registry calls the image.
    pub digest: String,
    /// Bytes of all blobs: what a node pulls.
    pub size: usize,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.entries.keys()).finish()
    }
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

    /// Adds a file.
    pub fn file(&mut self, path: &str, content: Vec<u8>, mode: u32) {
        self.put(path, Entry::File(content, mode));
    }

    /// Adds a copy of a file, executable.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn executable(&mut self, from: &Path, path: &str) -> Result<()> {
        let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.file(path, bytes, 0o755);
        Ok(())
    }

    /// Program and first arguments of a container.
    pub fn entrypoint(&mut self, words: &[&str]) {
        self.entrypoint = words.iter().map(ToString::to_string).collect();
    }

    /// The arguments of a container that says nothing else.
    pub fn command(&mut self, words: &[&str]) {
        self.command = words.iter().map(ToString::to_string).collect();
    }

    /// Adds a label; `org.opencontainers.image.*` are annotations of the manifest too.
    pub fn label(&mut self, key: &str, value: &str) {
        self.labels.insert(key.to_owned(), value.to_owned());
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

    /// Writes the archive; `name` is `host/repository:tag`.
    ///
    /// # Errors
    /// The file cannot be written, or OCI has no name for this machine's architecture.
    pub fn write(&self, name: &str, to: &Path) -> Result<Written> {
        let layer = self.layer()?;
        let mut config = json!({
            "architecture": architecture()?,
            "os": "linux",
            "config": { "Env": ["PATH=/bin:/sbin:/usr/bin"], "Entrypoint": self.entrypoint, "WorkingDir": "/" },
            "rootfs": { "type": "layers", "diff_ids": [digest(&layer)] },
        });
        if !self.command.is_empty() {
            config["config"]["Cmd"] = json!(self.command);
        }
        let mut manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
        });
        if !self.labels.is_empty() {
            config["config"]["Labels"] = json!(self.labels);
            manifest["annotations"] = json!(self.labels);
        }
        let config = serde_json::to_vec(&config)?;
        manifest["config"] = describe("application/vnd.oci.image.config.v1+json", &config);
        manifest["layers"] = json!([describe("application/vnd.oci.image.layer.v1.tar", &layer)]);
        let manifest = serde_json::to_vec(&manifest)?;
        let mut described = describe("application/vnd.oci.image.manifest.v1+json", &manifest);
        let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        described["annotations"] =
            json!({ "io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag });
        let index = serde_json::to_vec(&json!({ "schemaVersion": 2, "manifests": [described] }))?;

        let file = fs::File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
        let mut archive = tar::Builder::new(file);
        let mut put = |path: &str, data: &[u8]| archive.append_data(&mut header(data, 0o644)?, path, data);
        put("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        put("index.json", &index)?;
        for blob in [&config, &layer, &manifest] {
            put(&format!("blobs/{}", digest(blob).replace(':', "/")), blob)?;
        }
        archive.finish().with_context(|| format!("cannot write {}", to.display()))?;
        Ok(Written { digest: digest(&manifest), size: config.len() + layer.len() + manifest.len() })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Image {
        let mut image = Image::default();
        image.file("a/b/c", b"text".to_vec(), 0o755);
        image.link("/a/b/c", "link");
        image.label("org.opencontainers.image.title", "x");
        image.command(&["agent"]);
        image
    }

    #[test]
    fn writes_the_same_bytes_twice() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = dir.path().join(name);
            (image().write("localhost/x:1", &path).unwrap(), fs::read(path).unwrap())
        };
        assert_eq!(write("1"), write("2"));
    }

    #[test]
    fn parents_come_first() {
        let layer = image().layer().unwrap();
        let mut archive = tar::Archive::new(&layer[..]);
        let names = archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string());
        assert_eq!(names.collect::<Vec<_>>(), ["a", "a/b", "a/b/c", "link"]);
    }

    #[test]
    fn every_descriptor_names_a_blob_with_that_digest_and_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let written = image().write("localhost/x:1", &path).unwrap();
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(fs::File::open(path).unwrap()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
            files.insert(entry.path().unwrap().display().to_string(), bytes);
        }
        let read = |name: &str| serde_json::from_slice::<Value>(&files[name]).unwrap();
        let blob = |described: &Value| {
            let name = format!("blobs/{}", described["digest"].as_str().unwrap().replace(':', "/"));
            assert_eq!(described["size"], files[&name].len());
            assert_eq!(described["digest"], digest(&files[&name]));
            name
        };
        let index = read("index.json");
        assert_eq!(index["manifests"][0]["digest"], written.digest);
        let manifest = read(&blob(&index["manifests"][0]));
        let config = read(&blob(&manifest["config"]));
        blob(&manifest["layers"][0]);
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
        assert_eq!(config["config"]["Cmd"], json!(["agent"]));
        assert_eq!(config["config"]["Labels"], manifest["annotations"]);
    }

    #[test]
    fn digests_as_sha256sum_does() {
        assert_eq!(digest(b""), "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
