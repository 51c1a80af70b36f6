//! apt: installing packages, and reading one package of another suite without touching apt's own state.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context as _, Result, bail};

use crate::exec::{command, find_program, is_root, output};

/// Debian's own keys; a source that names its keys is believed instead.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// One archive of the machine's apt sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Archive {
    pub uri: String,
    pub suites: Vec<String>,
    pub components: Vec<String>,
    /// The value of `Signed-By`, if it is a file.
    pub signed_by: Option<String>,
}

/// Reads a file in the one-line format of sources.list(5).
pub fn parse_list(text: &str) -> Vec<Archive> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Archive> {
    let line = line.split('#').next().unwrap_or_default().trim().strip_prefix("deb")?;
    let line = line.strip_prefix([' ', '\t'])?.trim_start();
    let (options, rest) = match line.strip_prefix('[') {
        Some(line) => line.split_once(']')?,
        None => ("", line),
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    let signed = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
    Some(Archive {
        uri: words.next()?,
        suites: vec![words.next()?],
        components: words.collect(),
        signed_by: signed.map(str::to_owned),
    })
}

/// Reads a file in the deb822 format of sources.list(5).
pub fn parse_deb822(text: &str) -> Vec<Archive> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).flat_map(parse_stanza).collect()
}

fn parse_stanza(lines: &[&str]) -> Vec<Archive> {
    let field = |name: &str| -> Option<String> {
        let matches = |line: &&str| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        };
        let start = lines.iter().position(|line| matches(line).is_some())?;
        let mut value = matches(lines.get(start)?)?;
        for line in lines.iter().skip(start + 1).take_while(|line| line.starts_with([' ', '\t'])) {
            value.push(' ');
            value.push_str(line.trim());
        }
        Some(value)
    };
    let words = |name| -> Vec<String> {
        field(name).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    };
    let off =
        field("Enabled").is_some_and(|value| matches!(value.to_lowercase().as_str(), "no" | "false" | "0"));
    if off || !words("Types").iter().any(|kind| kind == "deb") {
        return Vec::new();
    }
    let (suites, components) = (words("Suites"), words("Components"));
    let signed_by = field("Signed-By").filter(|value| value.starts_with('/'));
    let archive = |uri| Archive {
        uri,
        suites: suites.clone(),
        components: components.clone(),
        signed_by: signed_by.clone(),
    };
    words("URIs").into_iter().map(archive).collect()
}

/// The archive that serves the system itself: the one with its suite in `main`.
pub fn system_archive<'a>(archives: &'a [Archive], codename: &str) -> Option<&'a Archive> {
    let main = |archive: &&Archive| archive.components.iter().any(|component| component == "main");
    let suite = |archive: &&Archive| archive.suites.iter().any(|suite| suite == codename);
    let debian = |archive: &&Archive| archive.uri.trim_end_matches('/').ends_with("/debian");
    let candidates = || archives.iter().filter(main);
    candidates().find(suite).or_else(|| candidates().find(debian))
}

/// The archive that serves a suite: security updates lie beside the system's own archive, as the machine's sources say.
fn archive_of<'a>(archives: &'a [Archive], codename: &str, suite: &str) -> Option<&'a Archive> {
    if suite.ends_with("-security") {
        let own = format!("{codename}-security");
        return archives.iter().find(|archive| archive.suites.contains(&own));
    }
    system_archive(archives, codename)
}

/// The archives of this machine, as its sources say.
fn archives() -> Vec<Archive> {
    let mut archives =
        fs::read_to_string("/etc/apt/sources.list").map_or_else(|_| Vec::new(), |t| parse_list(&t));
    let Ok(files) = fs::read_dir("/etc/apt/sources.list.d") else { return archives };
    let mut files: Vec<PathBuf> = files.filter_map(Result::ok).map(|entry| entry.path()).collect();
    files.sort();
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => archives.extend(parse_list(&text)),
            Some("sources") => archives.extend(parse_deb822(&text)),
            _ => {}
        }
    }
    archives
}

/// `KEY=value` of os-release(5), without quotes.
pub fn os_release(text: &str, key: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
    Some(value.trim_matches('"').to_owned())
}

/// Package lists of our own, in a directory of our own: no root, and nothing of apt's own state is touched.
#[derive(Debug)]
pub struct PrivateApt {
    dir: PathBuf,
}

impl PrivateApt {
    /// Lists for `suites` of the archives that this machine uses; suites of security updates only where its own are.
    pub fn new(dir: &Path, suites: &[&str]) -> Result<Self> {
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        if os_release(&release, "ID").as_deref() != Some("debian") || find_program("apt-get").is_none() {
            bail!("this is not a Debian system");
        }
        let codename = os_release(&release, "VERSION_CODENAME").unwrap_or_default();
        let archives = archives();
        let system = system_archive(&archives, &codename)
            .context("the apt sources of this machine name no archive with its suite")?;
        for part in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.join(part)).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        let line = |suite: &&str| {
            let archive = archive_of(&archives, &codename, suite)?;
            let key = system.signed_by.as_deref().unwrap_or(KEYRING);
            Some(format!("deb [signed-by={key}] {} {suite} main\n", archive.uri))
        };
        fs::write(dir.join("sources.list"), suites.iter().filter_map(line).collect::<String>())?;
        Ok(Self { dir: dir.to_path_buf() })
    }

    fn apt(&self, program: &str) -> Command {
        let mut apt = command(program);
        for (option, part) in [
            ("Dir::State::lists", "lists"),
            ("Dir::Cache", "cache"),
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::State::status", "status"),
        ] {
            apt.arg("-o").arg(format!("{option}={}", self.dir.join(part).display()));
        }
        for option in [
            "Dir::Etc::sourceparts=/dev/null",
            "Acquire::Languages=none",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
            "APT::Get::List-Cleanup=0",
        ] {
            apt.args(["-o", option]);
        }
        if is_root() {
            // Root's apt would fetch as a user who may not enter a private cache directory.
            apt.args(["-o", "APT::Sandbox::User=root"]);
        }
        apt
    }

    /// Fetches the lists. A suite that the archive does not have does not spoil the others.
    pub fn update(&self) -> Result<()> {
        fs::write(self.dir.join("status"), "")?;
        output(self.apt("apt-get").args(["-qq", "update"])).map(drop)
    }

    /// The versions of a package, newest first.
    pub fn versions(&self, package: &str) -> Result<Vec<String>> {
        let table = output(self.apt("apt-cache").args(["madison", package]))?;
        Ok(table.lines().filter_map(|line| Some(line.split('|').nth(1)?.trim().to_owned())).collect())
    }

    /// All packages whose name begins like this.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let names = output(self.apt("apt-cache").args(["pkgnames", prefix]))?;
        Ok(names.lines().map(str::to_owned).collect())
    }

    /// The packages that one needs directly; alternatives and virtual packages as apt-cache(8) shows them.
    pub fn depends(&self, package: &str) -> Result<Vec<String>> {
        let text = output(self.apt("apt-cache").args(["depends", "--important", package]))?;
        let name = |line: &str| Some(line.trim().strip_prefix("Depends: ")?.to_owned());
        Ok(text.lines().filter_map(name).collect())
    }

    /// Downloads one package and unpacks it below `out`.
    pub fn unpack(&self, package: &str, version: &str, out: &Path) -> Result<()> {
        let debs = self.dir.join("debs");
        let _ = fs::remove_dir_all(&debs);
        fs::create_dir_all(&debs)?;
        let wanted = format!("{package}={version}");
        output(self.apt("apt-get").args(["-qq", "download", &wanted]).current_dir(&debs))?;
        for deb in fs::read_dir(&debs)? {
            output(command("dpkg-deb").arg("-x").arg(deb?.path()).arg(out))?;
        }
        Ok(())
    }
}

/// The command that installs `packages`, for people.
pub fn install_line(packages: &[&str]) -> String {
    format!("apt-get install -y --no-install-recommends {}", packages.join(" "))
}

/// Installs packages; as root only. No service is started by it.
pub fn install(packages: &[&str]) -> Result<()> {
    if run_install(packages).is_ok() {
        return Ok(());
    }
    // The lists are missing or old. Another source's failure is no reason to stop: the next step tells.
    let updated = output(apt_get().args(["-qq", "update"]));
    if run_install(packages).is_ok() {
        return Ok(());
    }
    // One that this system does not have must not keep the others away.
    let failed: Vec<String> = packages
        .iter()
        .filter_map(|package| Some(format!("{package}: {:#}", run_install(&[package]).err()?)))
        .collect();
    if failed.is_empty() {
        return Ok(());
    }
    let update = updated.err().map(|error| format!("; before: {error:#}")).unwrap_or_default();
    bail!("{}{update}", failed.join("; "))
}

fn run_install(packages: &[&str]) -> Result<()> {
    let mut apt = apt_get();
    apt.args(["-qq", "install", "-y", "--no-install-recommends"]).args(packages);
    output(&mut apt).map(drop)
}

/// apt-get with a private view in which systemd is not running: maintainer scripts start services only where
/// `/run/systemd/system` exists. In runlevel 1 invoke-rc.d starts none either.
fn apt_get() -> Command {
    let mut apt = if Path::new("/run/systemd/system").is_dir() && find_program("unshare").is_some() {
        let mut apt = command("unshare");
        let script = "mount -t tmpfs none /run/systemd && exec apt-get \"$@\"";
        apt.args(["--mount", "sh", "-c", script, "apt-get"]);
        apt
    } else {
        command("apt-get")
    };
    apt.args(["-o", "DPkg::Lock::Timeout=600", "-o", "Dpkg::Options::=--force-confold"]);
    apt.env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1");
    if env::var_os("PATH")
        .is_none_or(|path| !env::split_paths(&path).any(|dir| dir == Path::new("/usr/sbin")))
    {
        apt.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    }
    apt
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(uri: &str, suites: &[&str], components: &[&str], key: Option<&str>) -> Archive {
        let owned = |words: &[&str]| words.iter().map(ToString::to_string).collect();
        Archive {
            uri: uri.into(),
            suites: owned(suites),
            components: owned(components),
            signed_by: key.map(Into::into),
        }
    }

    #[test]
    fn reads_one_line_sources() {
        let text = "# old\ndeb http://mirror.test/debian bookworm main contrib # note\n\
                    deb-src http://mirror.test/debian bookworm main\n\
                    deb [arch=amd64 signed-by=/k.gpg] https://vendor.test/apt stable main\n\
                    deb\n";
        let want = [
            archive("http://mirror.test/debian", &["bookworm"], &["main", "contrib"], None),
            archive("https://vendor.test/apt", &["stable"], &["main"], Some("/k.gpg")),
        ];
        assert_eq!(parse_list(text), want);
    }

    #[test]
    fn reads_deb822_sources() {
        let text = "Types: deb\n# a comment\nURIs: http://a.test/debian\n http://b.test/debian\n\
                    Suites: bookworm bookworm-updates\nComponents: main\nSigned-By: /k.gpg\n\n\
                    Types: deb-src\nURIs: http://c.test/debian\nSuites: bookworm\nComponents: main\n\n\
                    types: deb\nuris: http://d.test/debian\nsuites: sid\ncomponents: main\nenabled: no\n";
        let want = [
            archive("http://a.test/debian", &["bookworm", "bookworm-updates"], &["main"], Some("/k.gpg")),
            archive("http://b.test/debian", &["bookworm", "bookworm-updates"], &["main"], Some("/k.gpg")),
        ];
        assert_eq!(parse_deb822(text), want);
    }

    #[test]
    fn an_embedded_key_is_not_a_file() {
        let text =
            "Types: deb\nURIs: http://a.test/x\nSuites: s\nComponents: main\nSigned-By:\n -----BEGIN\n .\n";
        assert_eq!(parse_deb822(text), [archive("http://a.test/x", &["s"], &["main"], None)]);
    }

    #[test]
    fn finds_the_systems_archive_among_vendors() {
        let vendor = archive("https://vendor.test/apt", &["stable"], &["main"], None);
        let security = archive("http://m.test/debian-security", &["bookworm-security"], &["main"], None);
        let system = archive("http://m.test/pool", &["bookworm", "bookworm-updates"], &["main"], None);
        let other = archive("http://m.test/debian/", &["stable"], &["main"], None);
        let all = [vendor.clone(), security.clone(), system.clone()];
        assert_eq!(system_archive(&all, "bookworm"), Some(&system));
        assert_eq!(
            system_archive(&[vendor.clone(), security.clone(), other.clone()], "bookworm"),
            Some(&other)
        );
        assert_eq!(system_archive(&[vendor, security], "bookworm"), None);
    }

    #[test]
    fn security_updates_come_from_where_the_systems_own_do() {
        let system = archive("http://m.test/debian", &["bookworm"], &["main"], None);
        let security = archive("http://m.test/debian-security", &["bookworm-security"], &["main"], None);
        let all = [system.clone(), security.clone()];
        assert_eq!(archive_of(&all, "bookworm", "trixie"), Some(&system));
        assert_eq!(archive_of(&all, "bookworm", "bullseye-security"), Some(&security));
        assert_eq!(archive_of(&all[..1], "bookworm", "bullseye-security"), None);
    }

    #[test]
    fn reads_os_release() {
        let text = "NAME=\"Debian GNU/Linux\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        assert_eq!(os_release(text, "ID").as_deref(), Some("debian"));
        assert_eq!(os_release(text, "NAME").as_deref(), Some("Debian GNU/Linux"));
        assert_eq!(os_release(text, "VERSION"), None);
    }
}
