//! Kernel modules: which a machine needs, in an order in which they can be loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// A module's name and its uncompressed ELF file.
pub type Module = (String, Vec<u8>);

/// These modules of a kernel and all that they need, dependencies first. One that is not there is built in or unknown
/// to this kernel: what does not work without it will tell.
pub fn with_dependencies(dir: &Path, names: &[&str]) -> Result<Vec<Module>> {
    let mut files = BTreeMap::new();
    index(dir, &mut files)?;
    let mut wanted = Wanted { files, seen: BTreeSet::new(), order: Vec::new() };
    for name in names {
        wanted.add(name)?;
    }
    Ok(wanted.order)
}

struct Wanted {
    files: BTreeMap<String, PathBuf>,
    seen: BTreeSet<String>,
    order: Vec<Module>,
}

impl Wanted {
    fn add(&mut self, name: &str) -> Result<()> {
        let name = name.replace('-', "_");
        let Some(file) = self.files.get(&name) else { return Ok(()) };
        if !self.seen.insert(name.clone()) {
            return Ok(());
        }
        let module = read(file).with_context(|| format!("cannot read {}", file.display()))?;
        for dependency in depends(&module) {
            self.add(&dependency)?;
        }
        self.order.push((name, module));
        Ok(())
    }
}

fn index(dir: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            index(&entry.path(), files)?;
        } else if let Some(name) = module_name(&entry.file_name().to_string_lossy()) {
            files.insert(name, entry.path());
        }
    }
    Ok(())
}

/// `nf_nat` for `nf-nat.ko.xz`.
fn module_name(file: &str) -> Option<String> {
    let stem = file.strip_suffix(".ko").or_else(|| file.strip_suffix(".ko.xz"))?;
    Some(stem.replace('-', "_"))
}

fn read(file: &Path) -> Result<Vec<u8>> {
    if file.extension().is_none_or(|end| end != "xz") {
        return Ok(fs::read(file)?);
    }
    let mut module = Vec::new();
    lzma_rs::xz_decompress(&mut BufReader::new(File::open(file)?), &mut module)?;
    Ok(module)
}

/// What `depends=` says in the section `.modinfo`, whose entries end with a NUL byte.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let found = module.windows(KEY.len()).position(|part| part == KEY);
    let value = found.and_then(|at| module.get(at + KEY.len()..)).unwrap_or_default();
    let value = value.split(|byte| *byte == 0).next().unwrap_or_default();
    let names = value.split(|byte| *byte == b',').filter(|name| !name.is_empty());
    names.map(|name| String::from_utf8_lossy(name).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_kernels() {
        for (file, want) in [
            ("nf_nat.ko", Some("nf_nat")),
            ("nft-chain-nat.ko.xz", Some("nft_chain_nat")),
            ("modules.order", None),
            ("x.ko.zst", None),
        ] {
            assert_eq!(module_name(file).as_deref(), want, "{file}");
        }
    }

    #[test]
    fn reads_what_a_module_needs() {
        let text = |info: &[u8]| depends(info).join(" ");
        assert_eq!(text(b"\x7fELF\0license=GPL\0depends=nf_nat,x_tables\0retpoline=Y\0"), "nf_nat x_tables");
        assert_eq!(text(b"\x7fELF\0depends=\0alias=x\0"), "");
        assert_eq!(text(b"\x7fELF"), "");
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let files = [("a", "b,c"), ("b", "c"), ("c", ""), ("loop", "loop")];
        let dir = std::env::temp_dir().join(format!("nobypass-modules-{}", std::process::id()));
        fs::create_dir_all(dir.join("net")).unwrap();
        for (name, depends) in files {
            fs::write(dir.join(format!("net/{name}.ko")), format!("\0depends={depends}\0")).unwrap();
        }
        let found = with_dependencies(&dir, &["a", "c", "missing", "loop"]);
        fs::remove_dir_all(&dir).unwrap();
        let names: Vec<String> = found.unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["c", "b", "a", "loop"]);
    }
}
