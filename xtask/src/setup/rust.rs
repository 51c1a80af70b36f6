//! The Rust toolchain in use here, as rustc describes it.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::exec::{command, output};

/// What rustc says about itself in this checkout, where `rust-toolchain.toml` pins it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rust {
    /// `1.95.0`
    pub release: String,
    /// Major version of the LLVM it was built with: eBPF needs a linker with the same one.
    pub llvm: String,
    pub sysroot: PathBuf,
}

impl Rust {
    pub fn ask() -> Result<Self> {
        let rustc = env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
        let version = output(command(&rustc).arg("-vV")).context("rustc does not run here")?;
        let sysroot = output(command(&rustc).args(["--print", "sysroot"]))?;
        let field = |name| field(&version, name).with_context(|| format!("`rustc -vV` has no line `{name}`"));
        let llvm = field("LLVM version: ")?;
        Ok(Self {
            release: field("release: ")?.to_owned(),
            llvm: llvm.split('.').next().unwrap_or(llvm).to_owned(),
            sysroot: PathBuf::from(sysroot.trim()),
        })
    }

    /// Does this toolchain belong to rustup?
    pub fn rustup(&self) -> bool {
        self.sysroot.parent().is_some_and(|dir| dir.ends_with("toolchains"))
    }

    /// The directory's name is what rustup calls the toolchain, also where another name links to it.
    pub fn toolchain(&self) -> Option<&str> {
        self.sysroot.file_name().filter(|_| self.rustup())?.to_str()
    }

    /// rustc's own libLLVM, where it has one (rustup's toolchains do; Debian's rustc uses the system's).
    pub fn lib_llvm(&self) -> Option<PathBuf> {
        let files = self.sysroot.join("lib").read_dir().ok()?;
        let name = |file: &Path| file.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libLLVM"));
        // Beside the library lies a linker script of a few bytes with a similar name.
        let library = |file: &PathBuf| name(file) && file.metadata().is_ok_and(|meta| meta.len() > 1 << 20);
        files.filter_map(Result::ok).map(|entry| entry.path()).find(library)
    }
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_rustc_fields() {
        let text = "rustc 1.95.0 (59807616e)\nrelease: 1.95.0\nLLVM version: 22.1.2\n";
        assert_eq!(field(text, "release: "), Some("1.95.0"));
        assert_eq!(field(text, "LLVM version: "), Some("22.1.2"));
        assert_eq!(field(text, "host: "), None);
    }

    #[test]
    fn knows_rustups_toolchains() {
        let rust = |sysroot: &str| Rust { release: "1".into(), llvm: "22".into(), sysroot: sysroot.into() };
        assert_eq!(rust("/home/u/.rustup/toolchains/stable-x").toolchain(), Some("stable-x"));
        assert_eq!(rust("/usr").toolchain(), None);
    }

    #[test]
    fn asks_the_rustc_of_this_machine() {
        let rust = Rust::ask().expect("tests are built by a rustc");
        assert!(rust.sysroot.is_dir());
        assert!(rust.llvm.parse::<u32>().is_ok(), "{}", rust.llvm);
    }
}
