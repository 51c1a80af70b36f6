//! `cargo xtask image`: the agent's container image, FROM scratch around one static program, with no engine.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use nobypass_oci::Image;

use crate::exec::{cargo, command, output, repo_root, succeeds};
use crate::setup::{self, BUILD, names_a_loader};
use crate::workspace::Workspace;

/// The most that a node has to pull.
const MOST_BYTES: usize = 20_000_000;

/// Licences that the program is under, for those who only have the image.
const LICENSES: [&str; 3] = ["LICENSE-APACHE", "LICENSE-GPL2", "LICENSE-MIT"];

/// What `cargo xtask image` is told.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name in the archive, with the tag [default: ghcr.io/nobypass/nobypass:<version>]
    #[arg(long)]
    name: Option<String>,
    /// Where to write [default: image/nobypass.tar in the target directory]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// A debug build: soon there, and too large to be shipped
    #[arg(long)]
    dev: bool,
}

/// Builds the program and writes the image; says where.
pub fn run(args: &Args) -> Result<()> {
    setup::ensure(BUILD)?;
    let workspace = Workspace::read()?;
    let program = build(&workspace, args.dev)?;
    let head = fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
    ensure!(
        !names_a_loader(head.get(..4096).unwrap_or(&head)),
        "{} is not linked statically",
        program.display()
    );
    let package = workspace.package("nobypass").context("there is no package nobypass")?;
    let name = args.name.clone().unwrap_or_else(|| format!("ghcr.io/nobypass/nobypass:{}", package.version));
    let file = args.output.clone().unwrap_or_else(|| workspace.target_dir.join("image/nobypass.tar"));
    if let Some(dir) = file.parent() {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let mut image = Image::default();
    // Where the image's PATH finds it: `kubectl exec ... -- nobypass status`.
    image.executable(&program, "bin/nobypass")?;
    for license in LICENSES {
        let path = repo_root().join(license);
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        image.file(&format!("licenses/{license}"), text, 0o644);
    }
    image.entrypoint(&["/bin/nobypass"]);
    for (key, value) in [
        ("title", "nobypass"),
        ("description", package.description.as_str()),
        ("version", package.version.as_str()),
        ("source", package.repository.as_str()),
        ("documentation", package.repository.as_str()),
        ("licenses", package.license.as_str()),
    ] {
        image.label(&format!("org.opencontainers.image.{key}"), value);
    }
    if let Some(revision) = revision() {
        image.label("org.opencontainers.image.revision", &revision);
    }
    let written = image.write(&name, &file)?;
    if !args.dev && written.size > MOST_BYTES {
        bail!("the image has {} bytes, more than the {MOST_BYTES} that it may have", written.size);
    }
    println!("{} {} {} bytes {}", file.display(), name, written.size, written.digest);
    Ok(())
}

/// The program, linked statically. Only the last step differs from an ordinary build, so nothing else is built anew.
fn build(workspace: &Workspace, dev: bool) -> Result<PathBuf> {
    let mut rustc = cargo();
    rustc.args(["rustc", "--package", "nobypass", "--bin", "nobypass"]);
    if !dev {
        rustc.arg("--release");
    }
    rustc.args(["--", "-C", "target-feature=+crt-static", "-C", "strip=symbols"]);
    if !succeeds(&mut rustc)? {
        bail!(
            "nobypass does not link statically here, see above (the C library's archive is in libc6-dev, glibc-static, ...)"
        );
    }
    Ok(workspace.target_dir.join(if dev { "debug" } else { "release" }).join("nobypass"))
}

/// The commit, if the checkout is exactly one.
fn revision() -> Option<String> {
    let git = |args: &[&str]| output(command("git").args(args)).ok();
    let clean = git(&["status", "--porcelain", "--untracked-files=no"])?.trim().is_empty();
    clean.then(|| git(&["rev-parse", "HEAD"])).flatten().map(|revision| revision.trim().to_owned())
}
