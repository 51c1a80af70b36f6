//! Debian's kernels for cloud machines: found by series, fetched once, unpacked into a directory of ours and never
//! installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};

use crate::setup::{PrivateApt, cache_dir};

/// Where Debian keeps a kernel of each series that is tested, and some more.
const SUITES: [&str; 4] = ["bullseye-security", "bookworm", "trixie", "trixie-backports"];

/// The series that are run when none is named: the oldest that is supported, two that clusters have, and the newest.
pub const SERIES: [&str; 4] = ["5.10", "6.1", "6.12", NEWEST];

/// Stands for the newest kernel of any suite.
pub const NEWEST: &str = "newest";

/// Package lists are asked for again after this long.
const FRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// A kernel and its modules, unpacked.
#[derive(Debug)]
pub struct Kernel {
    /// As `uname -r` will say.
    pub release: String,
    pub image: PathBuf,
    /// `lib/modules/<release>`
    pub modules: PathBuf,
}

/// Finds and unpacks kernels; the lists are fetched when the first one is asked for.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    apt: PrivateApt,
    /// What went wrong when the lists were fetched.
    trouble: Option<String>,
}

impl Store {
    /// Fetches the package lists unless they are fresh.
    pub fn open() -> Result<Self> {
        let dir = cache_dir()?.join("kernels");
        let apt = PrivateApt::new(&dir.join("apt"), &SUITES)?;
        let stamp = dir.join("apt/fetched");
        let trouble = if is_fresh(&stamp) { None } else { apt.update().err() };
        if trouble.is_none() {
            fs::write(&stamp, "").with_context(|| format!("cannot write {}", stamp.display()))?;
        }
        Ok(Self { dir, apt, trouble: trouble.map(|error| format!("{error:#}")) })
    }

    /// The newest kernel of a series. Without the archive, the newest that is unpacked already.
    pub fn get(&self, series: &str) -> Result<Kernel> {
        let mut known = self.apt.names("linux-image-").unwrap_or_default();
        known.extend(self.unpacked());
        let Some(package) = newest(&known, series) else {
            let trouble = self.trouble.as_deref().map(|why| format!(" ({why})")).unwrap_or_default();
            bail!("no package linux-image-{series}*-cloud-amd64 in {}{trouble}", SUITES.join(", "));
        };
        let dir = self.dir.join(package);
        if !dir.is_dir() {
            self.unpack(package, &dir)?;
        }
        find(&dir).with_context(|| format!("{package} is not as expected; remove {}", dir.display()))
    }

    fn unpacked(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    /// Since 7.0 the package only pulls in others of the same version.
    fn unpack(&self, package: &str, dir: &Path) -> Result<()> {
        let suffix = package.strip_prefix("linux-image-").unwrap_or(package);
        let mut packages = vec![package.to_owned()];
        packages.extend(self.apt.depends(package)?.into_iter().filter(|name| name.ends_with(suffix)));
        let part = dir.with_extension("part");
        let _ = fs::remove_dir_all(&part);
        fs::create_dir_all(&part).with_context(|| format!("cannot create {}", part.display()))?;
        for package in packages {
            let versions = self.apt.versions(&package)?;
            let version = versions.first().with_context(|| format!("no version of {package}"))?;
            eprintln!("vm: fetching {package} {version}");
            self.apt.unpack(&package, version, &part)?;
        }
        fs::rename(&part, dir).with_context(|| format!("cannot create {}", dir.display()))
    }
}

fn is_fresh(stamp: &Path) -> bool {
    let modified = fs::metadata(stamp).and_then(|metadata| metadata.modified());
    modified.is_ok_and(|then| SystemTime::now().duration_since(then).is_ok_and(|age| age < FRESH))
}

/// The package of the newest kernel of a series, or of all.
fn newest<'a>(packages: &'a [String], series: &str) -> Option<&'a str> {
    let of_series = |package: &&String| {
        let version = version(package);
        version.is_some_and(|version| series == NEWEST || is_of(&version, series))
    };
    let candidates = packages.iter().filter(of_series);
    candidates.max_by_key(|package| version(package)).map(String::as_str)
}

/// The numbers in `linux-image-6.12.117+deb13-cloud-amd64`: 6, 12, 117, 13. `None` for the packages that stand for
/// a whole series, and for other flavours.
fn version(package: &str) -> Option<Vec<u64>> {
    let version = package.strip_prefix("linux-image-")?.strip_suffix("-cloud-amd64")?;
    if version.ends_with("-rt") || version.split('.').count() < 3 {
        return None;
    }
    let numbers = version.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty());
    numbers.map(|part| part.parse().ok()).collect()
}

fn is_of(version: &[u64], series: &str) -> bool {
    let wanted: Option<Vec<u64>> = series.split('.').map(|part| part.parse().ok()).collect();
    wanted.is_some_and(|wanted| !wanted.is_empty() && version.starts_with(&wanted))
}

/// Is this the name of a series, as `6.12`?
pub fn is_series(text: &str) -> bool {
    text == NEWEST || (text.contains('.') && text.split('.').all(|part| part.parse::<u64>().is_ok()))
}

/// The parts of an unpacked kernel, whose place differs from suite to suite.
fn find(dir: &Path) -> Option<Kernel> {
    let modules = ["lib/modules", "usr/lib/modules"].iter().find_map(|place| only_entry(&dir.join(place)))?;
    let release = modules.file_name()?.to_str()?.to_owned();
    let images = [dir.join("boot").join(format!("vmlinuz-{release}")), modules.join("vmlinuz")];
    let image = images.into_iter().find(|image| image.is_file())?;
    Some(Kernel { release, image, modules })
}

fn only_entry(dir: &Path) -> Option<PathBuf> {
    let mut entries = fs::read_dir(dir).ok()?.flatten();
    let first = entries.next()?.path();
    entries.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 12] = [
        "linux-image-cloud-amd64",
        "linux-image-6.1-cloud-amd64",
        "linux-image-5.10.0-46-cloud-amd64",
        "linux-image-5.10.0-9-cloud-amd64",
        "linux-image-6.1.0-0.deb11.52-cloud-amd64",
        "linux-image-6.1.0-50-cloud-amd64",
        "linux-image-6.1.0-50-amd64",
        "linux-image-6.12.117+deb13-cloud-amd64",
        "linux-image-6.18.15+deb13-cloud-amd64",
        "linux-image-7.3.4+deb13-cloud-amd64",
        "linux-image-7.3.4+deb13-cloud-amd64-unsigned",
        "linux-image-7.10.1+deb13-cloud-amd64",
    ];

    #[test]
    fn the_newest_of_a_series_by_number_not_by_letter() {
        let names = NAMES.map(str::to_owned);
        for (series, want) in [
            ("5.10", Some("linux-image-5.10.0-46-cloud-amd64")),
            ("6.1", Some("linux-image-6.1.0-50-cloud-amd64")),
            ("6.12", Some("linux-image-6.12.117+deb13-cloud-amd64")),
            ("7.3", Some("linux-image-7.3.4+deb13-cloud-amd64")),
            (NEWEST, Some("linux-image-7.10.1+deb13-cloud-amd64")),
            ("5.1", None),
            ("5.15", None),
            ("x", None),
        ] {
            assert_eq!(newest(&names, series), want, "{series}");
        }
    }

    #[test]
    fn series_are_numbers() {
        for (text, want) in [("6.12", true), ("newest", true), ("6", false), ("6.x", false), ("", false)] {
            assert_eq!(is_series(text), want, "{text}");
        }
    }
}
