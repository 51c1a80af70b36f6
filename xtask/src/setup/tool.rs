//! Programs of other ecosystems at one version each, from those ecosystems' own package registries, beside the BPF
//! tool-chain and nowhere else.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use super::toolchain;
use crate::exec::{command, find_program, output};

/// A pinned program.
#[derive(Debug)]
pub struct Tool {
    pub program: &'static str,
    version: &'static str,
    from: From,
}

#[derive(Debug)]
enum From {
    /// A package of a Go module, which checks itself against Go's checksum database.
    Go(&'static str),
    /// A package of PyPI, in a virtual environment of its own.
    Python,
}

pub const HELM: Tool =
    Tool { program: "helm", version: "v4.2.4", from: From::Go("helm.sh/helm/v4/cmd/helm") };
pub const KUBERNETES_VALIDATE: Tool =
    Tool { program: "kubernetes-validate", version: "1.37.0", from: From::Python };

impl Tool {
    fn home(&self) -> Result<PathBuf> {
        Ok(toolchain::dir()?.join("tools").join(format!("{}-{}", self.program, self.version)))
    }

    /// Where the program is or will be.
    pub fn path(&self) -> Result<PathBuf> {
        Ok(self.home()?.join("bin").join(self.program))
    }

    /// Where it is, or what is missing.
    pub fn probe(&self) -> Result<PathBuf, String> {
        let path = self.path().map_err(|error| format!("{error:#}"))?;
        if path.is_file() { Ok(path) } else { Err(format!("no {}", path.display())) }
    }

    /// Fetches and builds it.
    pub fn install(&self) -> Result<()> {
        let home = self.home()?;
        // What an interrupted attempt left would be taken for the whole.
        if home.exists() {
            fs::remove_dir_all(&home).with_context(|| format!("cannot remove {}", home.display()))?;
        }
        let making = home.with_extension("part");
        let _ = fs::remove_dir_all(&making);
        fs::create_dir_all(&making).with_context(|| format!("cannot create {}", making.display()))?;
        match self.from {
            From::Go(package) => {
                let go = ["/usr/local/go/bin/go"].map(PathBuf::from).into_iter().find(|file| file.is_file());
                let Some(go) = find_program("go").or(go) else {
                    bail!("no program `go`: install Go (https://go.dev/dl/)");
                };
                let wanted = format!("{package}@{}", self.version);
                let mut install = command(go);
                // Not among this repository's files: a Go module there would be asked for its versions.
                install.current_dir(&making).env("GOBIN", making.join("bin")).args(["install", &wanted]);
                output(&mut install)?;
                fs::rename(&making, &home).with_context(|| format!("cannot create {}", home.display()))
            }
            From::Python => {
                // Scripts of a virtual environment name its directory, so it cannot be moved.
                output(command("python3").args(["-m", "venv"]).arg(&home))
                    .context("Python 3 with venv is needed (Debian: python3-venv)")?;
                let wanted = format!("{}=={}", self.program, self.version);
                let pip = home.join("bin/pip");
                let installed = output(command(pip).args(["install", "--quiet", &wanted]));
                let _ = fs::remove_dir_all(&making);
                installed.map(drop)
            }
        }
    }
}
