//! What a running agent says of a CNI directory, for `nobypass cni status`.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use hyper::Method;
use serde_json::{Value, json};

use super::status::age_text;
use crate::cli::client::{ClientError, read, runtime, send};

/// Its answer, or why there is none.
pub(super) enum Agent {
    /// What `/v1/cni` says.
    Says(Value),
    /// None answers for this directory, and why.
    Silent(String),
}

impl Agent {
    /// Asks whoever listens on `socket`; an agent of another directory does not count.
    pub fn ask(socket: &Path, dir: &Path) -> Self {
        let answer = runtime().map_err(|error| ClientError::Broken(error.to_string())).and_then(|runtime| {
            runtime.block_on(async { read(send(socket, Method::GET, "/v1/cni", String::new()).await?).await })
        });
        let text = match answer {
            Ok(text) => text,
            Err(error) if error.is_absent() => return Self::Silent("no agent runs here".to_owned()),
            Err(error) => return Self::Silent(error.to_string()),
        };
        let Ok(value) = serde_json::from_str::<Value>(&text) else {
            return Self::Silent("the agent's answer cannot be read; is it of another version?".to_owned());
        };
        let its = value.pointer("/guard/dir").and_then(Value::as_str).unwrap_or_default();
        if same(Path::new(its), dir) {
            Self::Says(value)
        } else {
            Self::Silent(format!("the agent on {} looks after {its}", socket.display()))
        }
    }

    pub fn as_json(&self) -> Value {
        match self {
            Self::Says(value) => value.clone(),
            Self::Silent(why) => json!({ "absent": why }),
        }
    }

    /// Files look well, but the agent knows better: the runtime has not loaded them.
    pub fn contradicts(&self) -> bool {
        self.text("/guard/protection").is_some_and(|protection| protection != "protected")
    }

    /// Rows for people.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let value = match self {
            Self::Says(value) => value,
            Self::Silent(why) => return vec![("agent", why.clone())],
        };
        let number = |at: &str| value.pointer(at).and_then(Value::as_u64).unwrap_or(0);
        let seconds = value.pointer("/guard/unprotected_seconds").and_then(Value::as_f64).unwrap_or(0.0);
        let files = value.pointer("/guard/files").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let writes: u64 = files.iter().filter_map(|file| file["writes"].as_u64()).sum();
        let protection = self.text("/guard/protection").unwrap_or("unknown").replace('_', " ");
        let mut rows = vec![
            ("runtime", self.runtime()),
            (
                "agent",
                format!(
                    "{protection} for {}, unprotected {seconds:.1} s in all, {writes} writes",
                    age_text(number("/guard/seconds"))
                ),
            ),
        ];
        if let Some(newer) = value.pointer("/guard/superseded_by").and_then(Value::as_u64) {
            rows.push(("note", format!("it leaves the directory to a newer agent (generation {newer})")));
        }
        if let Some(why) = self.text("/guard/watching/why") {
            rows.push(("note", format!("the directory is polled, not watched: {why}")));
        }
        for file in files {
            if let (Some(name), Some(undone)) = (file["name"].as_str(), file["undone"].as_u64()) {
                rows.push((
                    "fight",
                    format!("another writer of {name} undid the patch {undone} times; find it and stop it"),
                ));
            }
        }
        rows
    }

    /// Who wrote a file last, if that is known.
    pub fn writer(&self, name: &OsStr) -> Option<&str> {
        let Self::Says(value) = self else { return None };
        let files = value.pointer("/guard/files")?.as_array()?;
        let file = files.iter().find(|file| file["name"].as_str() == name.to_str())?;
        file["by"].as_str()
    }

    fn text(&self, at: &str) -> Option<&str> {
        match self {
            Self::Says(value) => value.pointer(at)?.as_str(),
            Self::Silent(_) => None,
        }
    }

    fn runtime(&self) -> String {
        let name =
            self.text("/runtime/name").filter(|name| !name.is_empty()).unwrap_or("the container runtime");
        let what = match self.text("/runtime/state").unwrap_or_default() {
            "loaded" => format!("{name} has loaded the entry"),
            "outdated" => format!("{name} has loaded the entry, but not yet the rest of the file"),
            "lags" => format!("{name} has NOT loaded the entry"),
            "no_network" => format!("{name} has no pod network"),
            "doubled" => format!("{name} would run the plugin more than once"),
            "silent" => format!("{name} does not answer"),
            "files" => "nobody to ask: what files say is all there is".to_owned(),
            _ => "not asked yet".to_owned(),
        };
        match self.text("/runtime/why") {
            Some(why) => format!("{what}: {why}"),
            None => what,
        }
    }
}

/// Whether two paths are one directory, also where it is mounted twice.
fn same(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    a == b || (id(a).is_some() && id(a) == id(b))
}
