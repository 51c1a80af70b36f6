//! The BPF tool-chain: rust-src for the pinned rustc and a bpf-linker with the same LLVM.
//!
//! `agent/build.rs` looks for the linker in the directory that [`dir`] names.

use std::io::IsTerminal as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use anyhow::{Context as _, Result, anyhow, bail};

use super::apt::{self, PrivateApt};
use super::rust::Rust;
use crate::exec::{cargo, command, find_program, is_root, output, succeeds};

const BPF_LINKER_VERSION: &str = "0.13.0";

/// Where Debian keeps recent compilers, likeliest first; each row is asked only if the one before had nothing.
const SUITES: [&[&str]; 2] = [&["trixie-backports"], &["trixie", "forky", "sid", "bookworm-backports"]];

/// `NOBYPASS_TOOLCHAIN_DIR`, else `nobypass/bpf-toolchain` in the user's cache directory.
pub fn dir() -> Result<PathBuf> {
    if let Some(dir) = env::var_os("NOBYPASS_TOOLCHAIN_DIR") {
        return std::path::absolute(&dir)
            .with_context(|| format!("NOBYPASS_TOOLCHAIN_DIR={}", dir.display()));
    }
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
    let cache = cache.context("neither HOME nor NOBYPASS_TOOLCHAIN_DIR is set: set one of them")?;
    Ok(cache.join("nobypass").join("bpf-toolchain"))
}

/// Where programs built from Go modules are kept: beside the BPF tool-chain, or in it where the user moved that.
pub fn go_dir() -> Result<PathBuf> {
    let dir = dir()?;
    let moved = env::var_os("NOBYPASS_TOOLCHAIN_DIR").is_some();
    Ok(if moved { dir.join("go") } else { dir.with_file_name("go") })
}

fn rust_src_dir(rust: &Rust) -> PathBuf {
    rust.sysroot.join("lib/rustlib/src/rust")
}

/// Where the library's source is, or what is missing.
pub fn rust_src(rust: &Rust) -> Result<PathBuf, String> {
    let dir = rust_src_dir(rust);
    let file = dir.join("library/core/src/lib.rs");
    if file.is_file() { Ok(dir) } else { Err(format!("no {}", file.display())) }
}

/// The linker that the build will use, if it runs and fits, or what is missing.
pub fn bpf_linker(rust: &Rust) -> Result<PathBuf, String> {
    let dir = dir().map_err(|error| format!("{error:#}"))?;
    let ours = dir.join("bin/bpf-linker");
    if !ours.is_file() {
        // One that the user installed is theirs to keep right.
        let other = find_program("bpf-linker").filter(|file| runs(file));
        return other.ok_or_else(|| format!("no {} and none on PATH that runs", ours.display()));
    }
    let made = fs::read_to_string(dir.join(".crates2.json")).unwrap_or_default();
    if !made_for(&made, &rust.llvm) {
        return Err(format!("{} is not version {BPF_LINKER_VERSION} for LLVM {}", ours.display(), rust.llvm));
    }
    // It loads rustc's libLLVM, which another toolchain may have replaced.
    if !runs(&ours) {
        return Err(format!("{} does not run", ours.display()));
    }
    Ok(ours)
}

fn runs(linker: &Path) -> bool {
    output(command(linker).arg("--version")).is_ok()
}

/// Does cargo's record of what it installed (`.crates2.json`) say: our version, for this LLVM?
fn made_for(record: &str, llvm: &str) -> bool {
    let record: serde_json::Value = serde_json::from_str(record).unwrap_or_default();
    let version = format!("bpf-linker {BPF_LINKER_VERSION} ");
    let feature = format!("llvm-{llvm}");
    record.get("installs").and_then(|installs| installs.as_object()).is_some_and(|installs| {
        installs.iter().filter(|(name, _)| name.starts_with(&version)).any(|(_, install)| {
            let features = install.get("features").and_then(|features| features.as_array());
            features.is_some_and(|features| features.iter().any(|f| f.as_str() == Some(&feature)))
        })
    })
}

/// `rustup component add` for the toolchain in use.
pub fn add_component(rust: &Rust, component: &str) -> Result<()> {
    let toolchain = rust.toolchain().filter(|_| find_program("rustup").is_some());
    let toolchain = toolchain.with_context(|| {
        format!(
            "rustc in {} is not rustup's: install {component} where rustc came from",
            rust.sysroot.display()
        )
    })?;
    // Where nothing answers, rustup would try for minutes.
    let mut rustup = Command::new("timeout");
    rustup.args(["120", "rustup", "component", "add", component, "--toolchain", toolchain]);
    output(&mut rustup).map(drop)
}

/// rust-src from rustup, or Debian's package of exactly this rustc, linked into the sysroot.
pub fn install_rust_src(rust: &Rust) -> Result<()> {
    // rustup also says yes when its record has the component and the files are gone.
    let added = add_component(rust, "rust-src");
    let Err(rustup) = added.and_then(|()| rust_src(rust).map_err(|missing| anyhow!("done, but {missing}")))
    else {
        return Ok(());
    };
    rust_src_from_debian(rust).with_context(|| {
        format!(
            "rustup: {rustup:#}; use a rustup toolchain and network access (`rustup component add rust-src`). \
             Debian's package instead"
        )
    })
}

fn rust_src_from_debian(rust: &Rust) -> Result<()> {
    let dir = dir()?;
    let unpacked = dir.join(format!("rust-src-{}", rust.release));
    let source = unpacked.join(format!("usr/src/rustc-{}", rust.release));
    if !source.join("library/core/src/lib.rs").is_file() {
        fetch_rust_src(&dir, &rust.release, &unpacked)?;
    }
    let link = rust_src_dir(rust);
    if let Some(parent) = link.parent() {
        fs::create_dir_all(parent).with_context(|| not_writable(&link))?;
    }
    match fs::remove_file(&link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).context(not_writable(&link)),
        _ => symlink(&source, &link).with_context(|| not_writable(&link)),
    }
}

fn not_writable(link: &Path) -> String {
    format!("cannot link the source to {}: run the set-up as that toolchain's owner", link.display())
}

fn fetch_rust_src(dir: &Path, release: &str, unpacked: &Path) -> Result<()> {
    let mut trouble = String::from("no suite lists it");
    for suites in SUITES {
        let apt = PrivateApt::new(&dir.join("apt"), suites)?;
        if let Err(error) = apt.update() {
            trouble = format!("{error:#}");
        }
        let versions = apt.versions("rust-src").unwrap_or_default();
        let Some(version) = same_release(&versions, release) else { continue };
        let part = dir.join("rust-src.part");
        let _ = fs::remove_dir_all(&part);
        fs::create_dir_all(&part)?;
        apt.unpack("rust-src", version, &part)?;
        let _ = fs::remove_dir_all(unpacked);
        fs::rename(&part, unpacked)?;
        return Ok(fs::remove_dir_all(dir.join("apt"))?);
    }
    bail!("package rust-src {release} not found: {trouble}")
}

/// Debian's version of exactly this release: `1.95.0+dfsg1-1~bpo13+1`.
fn same_release<'a>(versions: &'a [String], release: &str) -> Option<&'a String> {
    versions.iter().find(|version| {
        version.strip_prefix(release).is_some_and(|rest| rest.is_empty() || rest.starts_with(['+', '-', '~']))
    })
}

/// Builds bpf-linker against rustc's own libLLVM, or Debian's package of the same LLVM.
pub fn install_bpf_linker(rust: &Rust) -> Result<()> {
    let dir = dir()?;
    let mut tried = String::from("rustc has no libLLVM of its own");
    if let Some(library) = rust.lib_llvm() {
        let prefix = dir.join("llvm");
        fs::create_dir_all(prefix.join("lib"))?;
        let link = prefix.join("lib/libLLVM.so");
        let _ = fs::remove_file(&link);
        symlink(&library, &link).with_context(|| format!("cannot create {}", link.display()))?;
        match build_linker(rust, &dir, &prefix, &rust.sysroot.join("lib")) {
            Ok(()) => return Ok(()),
            Err(error) => tried = format!("{error:#}"),
        }
    }
    let prefix = PathBuf::from(format!("/usr/lib/llvm-{}", rust.llvm));
    if !prefix.join("lib/libLLVM.so").exists() {
        let package = format!("llvm-{}-dev", rust.llvm);
        if !is_root() || find_program("apt-get").is_none() {
            bail!("{tried}; install {package} and run the set-up again");
        }
        apt::install(&[&package]).with_context(|| tried.clone())?;
    }
    build_linker(rust, &dir, &prefix, &prefix.join("lib")).context(tried)
}

/// `prefix` holds `lib/libLLVM.so`; `rpath` is where the linker finds it when it runs.
fn build_linker(rust: &Rust, dir: &Path, prefix: &Path, rpath: &Path) -> Result<()> {
    let mut install = cargo();
    // What the caller's builds are told is not for this one.
    for name in ["CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_MAKEFLAGS"]
    {
        install.env_remove(name);
    }
    let rustc = rust.sysroot.join("bin/rustc");
    if rustc.is_file() {
        install.env("RUSTC", rustc);
    }
    install
        .current_dir(dir)
        .env("LLVM_PREFIX", prefix)
        .env("RUSTFLAGS", format!("-C link-arg=-Wl,-rpath,{}", rpath.display()))
        .args(["install", "--locked", "--force", "--no-default-features", "--root"])
        .arg(dir)
        .arg("--target-dir")
        .arg(dir.join("build"))
        .args(["--features", &format!("llvm-{}", rust.llvm)])
        .arg(format!("bpf-linker@{BPF_LINKER_VERSION}"));
    if !io::stderr().is_terminal() {
        install.arg("--quiet");
    }
    if !succeeds(&mut install)? {
        bail!("bpf-linker {BPF_LINKER_VERSION} does not build against {}", prefix.display());
    }
    if !runs(&dir.join("bin/bpf-linker")) {
        bail!("bpf-linker built against {} does not run", prefix.display());
    }
    let _ = fs::remove_dir_all(dir.join("build"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_cargos_record() {
        let record =
            r#"{"installs":{"bpf-linker 0.13.0 (registry+https://r.test)":{"features":["llvm-22"]}}}"#;
        assert!(made_for(record, "22"));
        assert!(!made_for(record, "23"));
        assert!(!made_for(&record.replace("0.13.0", "0.12.0"), "22"));
        for text in ["", "{", "{\"installs\": 3}", "null"] {
            assert!(!made_for(text, "22"), "{text}");
        }
    }

    #[test]
    fn takes_debians_version_of_exactly_this_release() {
        let versions = ["1.95.01-1", "1.96.1+dfsg1-1", "1.95.0+dfsg1-2~bpo13+1"].map(String::from);
        assert_eq!(same_release(&versions, "1.95.0"), Some(&versions[2]));
        assert_eq!(same_release(&versions, "1.95"), None);
        assert_eq!(same_release(&["1.95.0".to_owned()], "1.95.0").map(String::as_str), Some("1.95.0"));
    }
}
