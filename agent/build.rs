//! Builds the eBPF object with aya-build and puts it where `include_bytes!` finds it.
//!
//! `NOBYPASS_EBPF_OBJECT=<file>` gives a prebuilt object instead: no BPF tool-chain is needed then.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context as _, Result, anyhow, bail};
use aya_build::{Package, Toolchain};

const OBJECT: &str = "nobypass-ebpf";
const PREBUILT: &str = "NOBYPASS_EBPF_OBJECT";
const TOOLCHAIN_DIR: &str = "NOBYPASS_TOOLCHAIN_DIR";

fn main() -> Result<()> {
    for name in [PREBUILT, TOOLCHAIN_DIR, "PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?).join(OBJECT);
    if let Some(object) = env::var_os(PREBUILT) {
        println!("cargo:rerun-if-changed={}", Path::new(&object).display());
        fs::copy(&object, &out).with_context(|| {
            format!("{PREBUILT}={}: cannot copy this object", Path::new(&object).display())
        })?;
        return Ok(());
    }
    let path = toolchain_path();
    if !env::split_paths(&path).any(|dir| dir.join("bpf-linker").is_file()) {
        bail!(
            "the eBPF programs need bpf-linker and rust-src, which are missing here: run `cargo xtask setup` \
             once, or set {PREBUILT} to a prebuilt object (nobypass-ebpf of a release)"
        );
    }
    // SAFETY: a build script has one thread here; aya-build reads these from this process.
    #[expect(clippy::disallowed_methods, reason = "single-threaded build script")]
    unsafe {
        env::set_var("PATH", path);
        // The stable compiler builds `core` for the BPF target; only the child build sees this.
        env::set_var("RUSTC_BOOTSTRAP", "1");
        // aya-build shows what the child build says as warnings of this one: errors only, please.
        env::set_var("CARGO_TERM_QUIET", "true");
    }
    let toolchain = env::var("RUSTUP_TOOLCHAIN").unwrap_or_default();
    // Asked for when it runs: a target directory that was copied with its checkout holds a build script of the old place.
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").context("cargo sets CARGO_MANIFEST_DIR")?);
    let (root, common) = (here.join("../ebpf"), here.join("../common"));
    println!("cargo:rerun-if-changed={}", common.display());
    let root = root.to_str().ok_or_else(|| anyhow!("this checkout's path is not UTF-8"))?;
    let package = Package { name: OBJECT, root_dir: root, ..Package::default() };
    aya_build::build_ebpf([package], Toolchain::Custom(&toolchain))
        .context("building the eBPF programs failed; `cargo xtask setup` checks the tool-chain")
}

/// `PATH` with the directory of `cargo xtask setup` in front.
fn toolchain_path() -> OsString {
    let cache = env::var_os(TOOLCHAIN_DIR).map(PathBuf::from).or_else(|| {
        let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let home = env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
        Some(cache.or(home)?.join("nobypass").join("bpf-toolchain"))
    });
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs = cache.map(|dir| dir.join("bin")).into_iter().chain(env::split_paths(&path));
    env::join_paths(dirs).unwrap_or_else(|_| path.clone())
}
