//! Programs built from pinned Go modules, for what no package registry has as a program.
//!
//! A module in `xtask/go/<module>` pins each version (`go.mod`) and each byte (`go.sum`); this table says what is
//! built from it. To move to another version: edit the `require` line (for Kubernetes the `replace` lines as well, its
//! staging modules are published as v0.X of its v1.X), then `go mod tidy` there.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context as _, Result};

use super::toolchain;
use crate::exec::{command, find_program, output, repo_root};

/// One program.
#[derive(Debug, PartialEq, Eq)]
pub struct GoProgram {
    pub name: &'static str,
    /// Directory below `xtask/go`.
    module: &'static str,
    /// What `go build` is given.
    package: &'static str,
    /// Go variable that holds the program's version, if it does not know that itself.
    version_variable: Option<&'static str>,
    /// Names a program that the user brings; `TEST_ASSET_…` is envtest's convention.
    pub variable: Option<&'static str>,
}

/// Rows of [`super::need::TABLE`] name these.
pub static ETCD: GoProgram = GoProgram {
    name: "etcd",
    module: "etcd",
    package: "go.etcd.io/etcd/server/v3",
    version_variable: None,
    variable: Some("TEST_ASSET_ETCD"),
};
pub static KUBE_APISERVER: GoProgram = GoProgram {
    name: "kube-apiserver",
    module: "kubernetes",
    package: "k8s.io/kubernetes/cmd/kube-apiserver",
    version_variable: Some("k8s.io/component-base/version.gitVersion"),
    variable: Some("TEST_ASSET_KUBE_APISERVER"),
};
pub static HELM: GoProgram = GoProgram {
    name: "helm",
    module: "helm",
    package: "helm.sh/helm/v4/cmd/helm",
    version_variable: Some("helm.sh/helm/v4/internal/version.version"),
    variable: Some("NOBYPASS_HELM"),
};

/// What `go` says about itself, as `go1.26.8`; or why there is none.
pub fn version() -> Result<String, String> {
    let go = find_program("go").ok_or("no program `go`")?;
    let version = output(command(go).args(["env", "GOVERSION"])).map_err(|error| format!("{error:#}"))?;
    Ok(version.trim().to_owned())
}

impl GoProgram {
    /// The program that tests are to use: the user's own, or the one that was built here; else what is missing.
    pub fn find(&self) -> Result<PathBuf, String> {
        if let Some((variable, file)) = self.brought() {
            return if file.is_file() { Ok(file) } else { Err(format!("{variable}: no {}", file.display())) };
        }
        let dir = self.dir(&version()?).map_err(|error| format!("{error:#}"))?;
        let file = dir.join(self.name);
        if !file.is_file() {
            return Err(format!("no {}", file.display()));
        }
        let same = |pin: &str| fs::read(dir.join(pin)).ok() == fs::read(self.module_dir().join(pin)).ok();
        if PINS.into_iter().all(same) {
            Ok(file)
        } else {
            Err(format!("{} is of other modules", file.display()))
        }
    }

    fn brought(&self) -> Option<(&'static str, PathBuf)> {
        let variable = self.variable?;
        if let Some(file) = env::var_os(variable) {
            return Some((variable, PathBuf::from(file)));
        }
        let assets = env::var_os("KUBEBUILDER_ASSETS").filter(|_| variable.starts_with("TEST_ASSET_"))?;
        Some(("KUBEBUILDER_ASSETS", Path::new(&assets).join(self.name)))
    }

    fn module_dir(&self) -> PathBuf {
        repo_root().join("xtask/go").join(self.module)
    }

    /// Where it is kept: one directory for each version of the program and of Go.
    fn dir(&self, go: &str) -> Result<PathBuf> {
        let name = format!("{}-{}-{go}", self.name, self.pinned()?);
        Ok(toolchain::go_dir()?.join(name))
    }

    /// The version that `go.mod` pins.
    pub fn pinned(&self) -> Result<String> {
        let file = self.module_dir().join("go.mod");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        required(&text, self.package)
            .with_context(|| format!("{} requires no module of {}", file.display(), self.package))
    }

    /// Builds it into the cache. The modules come from where the user's Go takes them.
    pub fn build(&self) -> Result<()> {
        let go = version().map_err(anyhow::Error::msg)?;
        let dir = self.dir(&go)?;
        let part = dir.with_extension("part");
        let _ = fs::remove_dir_all(&part);
        fs::create_dir_all(&part).with_context(|| format!("cannot create {}", part.display()))?;
        let mut flags = String::from("-s -w");
        if let Some(variable) = self.version_variable {
            flags.push_str(&format!(" -X {variable}={}", self.pinned()?));
        }
        let mut build = command("go");
        build
            .current_dir(self.module_dir())
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-mod=readonly -buildvcs=false");
        build
            .args(["build", "-trimpath", "-ldflags", &flags, "-o"])
            .arg(part.join(self.name))
            .arg(self.package);
        output(&mut build)?;
        for pin in PINS {
            fs::copy(self.module_dir().join(pin), part.join(pin))?;
        }
        let _ = fs::remove_dir_all(&dir);
        fs::rename(&part, &dir).with_context(|| format!("cannot create {}", dir.display()))
    }
}

/// What says which modules a program was built from.
const PINS: [&str; 2] = ["go.mod", "go.sum"];

/// The version that a `go.mod` requires of the module that a package lies in.
fn required(go_mod: &str, package: &str) -> Option<String> {
    let of_line = |line: &str| {
        let mut words = line.trim().trim_start_matches("require ").split_whitespace();
        let (module, version) = (words.next()?, words.next()?);
        let inside = package.strip_prefix(module)?;
        let whole = inside.is_empty() || inside.starts_with('/');
        (whole && version.starts_with('v')).then(|| (module.len(), version.to_owned()))
    };
    go_mod.lines().filter_map(of_line).max().map(|(_, version)| version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_module_holds_the_package() {
        let go_mod = "module x\n\ngo 1.26.0\n\ntool a.io/b/cmd/c\n\nrequire a.io/b v1.2.3\n\nrequire (\n\
                      \ta.io/b/cmd v0.5.0 // indirect\n\ta.io/bc v9.0.0\n)\n";
        for (package, version) in [
            ("a.io/b", Some("v1.2.3")),
            ("a.io/b/x", Some("v1.2.3")),
            ("a.io/b/cmd/c", Some("v0.5.0")),
            ("a.io/bc", Some("v9.0.0")),
            ("a.io", None),
        ] {
            assert_eq!(required(go_mod, package).as_deref(), version, "{package}");
        }
    }

    #[test]
    fn each_program_has_its_module() {
        for program in [&ETCD, &KUBE_APISERVER, &HELM] {
            assert!(program.pinned().is_ok_and(|version| version.starts_with('v')), "{}", program.name);
            let go_mod = fs::read_to_string(program.module_dir().join("go.mod")).expect("committed");
            assert!(go_mod.contains(&format!("tool {}\n", program.package)), "`go mod tidy` would drop it");
        }
    }
}
