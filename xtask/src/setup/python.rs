//! Programs from PyPI at one version each, in a virtual environment beside the BPF tool-chain.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

use super::toolchain;
use crate::exec::{command, output};

/// One program; its package has the same name.
#[derive(Debug)]
pub struct PythonProgram {
    pub name: &'static str,
    pub version: &'static str,
}

pub static KUBERNETES_VALIDATE: PythonProgram =
    PythonProgram { name: "kubernetes-validate", version: "1.37.0" };

impl PythonProgram {
    fn home(&self) -> Result<PathBuf> {
        Ok(toolchain::dir()?.join("python").join(format!("{}-{}", self.name, self.version)))
    }

    /// Where it is, or what is missing.
    pub fn find(&self) -> Result<PathBuf, String> {
        let home = self.home().map_err(|error| format!("{error:#}"))?;
        let path = home.join("bin").join(self.name);
        if path.is_file() { Ok(path) } else { Err(format!("no {}", path.display())) }
    }

    /// Fetches it.
    pub fn install(&self) -> Result<()> {
        let home = self.home()?;
        // What an interrupted attempt left would be taken for the whole.
        if home.exists() {
            fs::remove_dir_all(&home).with_context(|| format!("cannot remove {}", home.display()))?;
        }
        output(command("python3").args(["-m", "venv"]).arg(&home))
            .context("Python 3 with venv is needed (Debian: python3-venv)")?;
        let wanted = format!("{}=={}", self.name, self.version);
        output(command(home.join("bin/pip")).args(["install", "--quiet", &wanted])).map(drop)
    }
}
