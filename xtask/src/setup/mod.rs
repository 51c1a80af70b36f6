//! `cargo xtask setup`: installs what is missing, and only that; a machine that has all is left alone.
//!
//! Other commands call [`ensure`] with just what they need.

mod apt;
mod debian;
pub mod go;
mod need;
pub mod python;
mod rust;
mod toolchain;

use std::env;
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::path::PathBuf;

use anyhow::{Context as _, Result};

pub use apt::PrivateApt;
pub use need::{
    BUILD, CLUSTER, DEPLOY, FUZZ, KERNEL, LINT, NODE, Need, RUNTIMES, VM, names_a_loader, only_names,
};
use need::{Row, Source, lookup, select};
use rust::Rust;
pub use toolchain::dir as cache_dir;

use crate::exec::{find_program, in_ci, is_root};

/// What could not be had: one line each, for people.
#[derive(Debug, Default)]
pub struct Lacking(Vec<String>);

impl fmt::Display for Lacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for Lacking {}

impl Lacking {
    /// On one line, as the reason why something else does not run.
    pub fn reason(&self) -> String {
        self.0.join("; ")
    }
}

/// The command itself: shows each need with its state. Returns false if something is missing in the end.
pub fn run(only: &[String], check: bool) -> Result<bool> {
    let needs = select(only);
    let rust = Rust::ask()?;
    let errors = if check { Vec::new() } else { install_missing(&needs, &rust)? };
    let mut lacking = Lacking::default();
    let mut without = 0;
    for row in needs.iter().copied().map(lookup) {
        match row.probe(&rust) {
            Ok(path) => println!("ready    {:<15} {}", row.name, path.display()),
            Err(why) if is_optional(row) => {
                without += 1;
                println!("without  {}", line(row, &why, &errors));
            }
            Err(why) => lacking.0.push(line(row, &why, &errors)),
        }
    }
    for line in &lacking.0 {
        println!("missing  {line}");
    }
    println!("{} of {} ready", needs.len() - lacking.0.len() - without, needs.len());
    Ok(lacking.0.is_empty())
}

/// Installs what is missing of `needs`, saying nothing if nothing is; an error lists what could not be had.
pub fn ensure(needs: &[Need]) -> Result<(), Lacking> {
    let failed = |error: anyhow::Error| Lacking(vec![format!("{error:#}")]);
    // A prebuilt object needs no BPF tool-chain, see agent/build.rs.
    let prebuilt = env::var_os("NOBYPASS_EBPF_OBJECT").is_some();
    let of_bpf = |need: &Need| matches!(need, Need::RustSrc | Need::BpfLinker);
    let needs: Vec<Need> = needs.iter().copied().filter(|need| !(prebuilt && of_bpf(need))).collect();
    let rust = Rust::ask().map_err(failed)?;
    let errors = install_missing(&needs, &rust).map_err(failed)?;
    let lack = |row: &Row| Some(line(row, &row.probe(&rust).err()?, &errors));
    let lacking: Vec<String> = needs.iter().copied().map(lookup).filter_map(lack).collect();
    if lacking.is_empty() { Ok(()) } else { Err(Lacking(lacking)) }
}

/// A machine without Go is complete without what only Go can build, and one that is not Debian without what only Debian
/// has: the tests that need it are skipped. One that is there to test is not.
fn is_optional(row: &Row) -> bool {
    match row.source {
        Source::Go(_) => go::version().is_err() && !in_ci(),
        Source::Debian(_) => !in_ci(),
        _ => false,
    }
}

/// Environment for the tests: where the programs are that were built for them.
pub fn test_assets() -> Vec<(&'static str, PathBuf)> {
    let asset = |program: &'static go::GoProgram| Some((program.variable?, program.find().ok()?));
    let kept = |package: &'static debian::DebianPackage| Some((package.variable, package.find().ok()?));
    let programs = [&go::ETCD, &go::KUBE_APISERVER, &go::HELM].into_iter().filter_map(asset);
    programs.chain([&debian::CONTAINERD_1_7, &debian::CONTAINERD_2].into_iter().filter_map(kept)).collect()
}

/// What an installation step said when it failed.
type Errors = Vec<(Need, String)>;

fn missing(needs: &[Need], rust: &Rust) -> Vec<&'static Row> {
    needs.iter().copied().map(lookup).filter(|row| row.probe(rust).is_err()).collect()
}

/// Installs what is missing; two at once take turns. Steps that fail do not stop the others.
fn install_missing(needs: &[Need], rust: &Rust) -> Result<Errors> {
    if missing(needs, rust).is_empty() {
        return Ok(Errors::new());
    }
    let _lock = lock()?;
    let rows = missing(needs, rust);
    let mut errors = Errors::new();
    install_packages(&rows, &mut errors);
    for row in rows {
        let result = match row.source {
            Source::Package(_) => continue,
            Source::Component(name) => {
                eprintln!("setup: adding {name} to the Rust toolchain");
                toolchain::add_component(rust, name)
            }
            Source::RustSrc => {
                eprintln!("setup: fetching rust-src {}", rust.release);
                toolchain::install_rust_src(rust)
            }
            Source::BpfLinker => {
                eprintln!("setup: building bpf-linker for LLVM {} (a minute or two, once)", rust.llvm);
                toolchain::install_bpf_linker(rust)
            }
            Source::Python(program) => {
                eprintln!("setup: fetching {} {} from PyPI", program.name, program.version);
                program.install()
            }
            Source::Debian(package) => {
                eprintln!("setup: unpacking {} from Debian", package.name);
                package.install()
            }
            // Said below: without Go there is nothing to try.
            Source::Go(_) if go::version().is_err() => continue,
            Source::Go(program) => {
                let version = program.pinned()?;
                eprintln!("setup: building {} {version} from Go modules (some minutes, once)", program.name);
                program.build()
            }
        };
        if let Err(error) = result {
            errors.push((row.need, format!("{error:#}")));
        }
    }
    Ok(errors)
}

fn install_packages(rows: &[&Row], errors: &mut Errors) {
    let package = |row: &&Row| match row.source {
        Source::Package(name) => Some((row.need, name)),
        _ => None,
    };
    let wanted: Vec<(Need, &str)> = rows.iter().filter_map(package).collect();
    if wanted.is_empty() || !is_root() || find_program("apt-get").is_none() {
        return;
    }
    let names: Vec<&str> = wanted.iter().map(|(_, name)| *name).collect();
    eprintln!("setup: installing {}", names.join(" "));
    if let Err(error) = apt::install(&names) {
        let error = format!("{error:#}");
        errors.extend(wanted.iter().map(|(need, _)| (*need, error.clone())));
    }
}

/// Held until the file is dropped; the kernel lets go of it also when the process is killed.
fn lock() -> Result<File> {
    let dir = toolchain::dir()?;
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let path = dir.join(".lock");
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            eprintln!("setup: waiting for another one to finish");
            file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    Ok(file)
}

/// One line: what is missing, what does not work without it, what to do.
fn line(row: &Row, why: &str, errors: &Errors) -> String {
    let tried: Vec<&str> =
        errors.iter().filter(|(need, _)| *need == row.need).map(|(_, e)| e.as_str()).collect();
    let advice = match row.source {
        _ if !tried.is_empty() => format!("installing it failed: {}", tried.join("; ")),
        Source::Package(name) if find_program("apt-get").is_none() => {
            format!("install it with your package manager (Debian calls it {name})")
        }
        Source::Go(_) if go::version().is_err() => {
            String::from("install Go, or let KUBEBUILDER_ASSETS name a directory that holds it")
        }
        Source::Package(name) if !is_root() => format!("run `sudo {}`", apt::install_line(&[name])),
        _ => String::from("run `cargo xtask setup`"),
    };
    format!("{}: {} ({why}), for {}: {advice}", row.name, row.what, row.needed_by())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_for_what_and_what_to_do() {
        let row = lookup(Need::Runc);
        let failed = vec![(Need::Runc, "no network".to_owned()), (Need::Nft, "other".to_owned())];
        let text = line(row, "no program `runc`", &failed);
        assert_eq!(
            text,
            "runc: starts the containers (no program `runc`), for `cargo xtask test --tier node`, \
             `cargo xtask demo`: installing it failed: no network"
        );
        assert!(line(lookup(Need::BpfLinker), "x", &Errors::new()).ends_with("run `cargo xtask setup`"));
    }
}
