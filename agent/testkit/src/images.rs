//! Images of test pods, made out of programs of this machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use nobypass_oci::Image;

use crate::{bin, proc};

/// Image of the sandbox process.
pub const PAUSE: &str = "localhost/pause:1";
/// Image with busybox and the traffic helper, `/bin/sh` and `/bin/traffic`.
pub const MESHTEST: &str = "localhost/meshtest:1";

/// Writes the archive of the sandbox image.
pub fn write_pause(to: &Path) -> Result<()> {
    let mut image = Image::default();
    program(&mut image, &bin("traffic")?, "traffic")?;
    image.entrypoint(&["/traffic", "pause"]);
    image.write(PAUSE, to).map(drop)
}

/// Writes the archive of the application image.
pub fn write_meshtest(to: &Path) -> Result<()> {
    let mut image = Image::default();
    program(&mut image, &bin("traffic")?, "bin/traffic")?;
    program(&mut image, &find_busybox()?, "bin/busybox")?;
    for name in ["sh", "sleep", "cat", "echo", "ip", "ps", "id", "ls", "nc"] {
        image.link("/bin/busybox", &format!("bin/{name}"));
    }
    image.dir("tmp", 0o1777);
    for name in ["proc", "sys", "dev", "etc"] {
        image.dir(name, 0o755);
    }
    image.write(MESHTEST, to).map(drop)
}

fn find_busybox() -> Result<PathBuf> {
    ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .map(Into::into)
        .find(|path: &PathBuf| path.is_file())
        .context("busybox is missing: install busybox-static")
}

/// Adds an executable and the shared libraries it needs, at the paths where its loader will look.
fn program(image: &mut Image, from: &Path, path: &str) -> Result<()> {
    image.executable(from, path)?;
    for library in libraries(from)? {
        image.executable(Path::new(&library), &library)?;
    }
    Ok(())
}

/// Absolute paths of the loader and the libraries of an executable; none for a static one.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let mut command = Command::new("ldd");
    command.arg(program);
    let out = proc::output(command, "", crate::wait::HANG)?;
    // A static executable makes ldd fail, with "not a dynamic executable".
    Ok(if out.status.success() { library_paths(&String::from_utf8_lossy(&out.stdout)) } else { Vec::new() })
}

/// The first absolute path of each line of ldd(1)'s output; the vDSO has none.
fn library_paths(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_ldd() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(library_paths(text), ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]);
        assert!(library_paths("\tstatically linked\n").is_empty());
    }
}
