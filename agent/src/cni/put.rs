//! Puts a whole file of the agent's own in place: a plugin binary, a kubeconfig. Configs of other owners go through
//! [`swap`](super::swap), which loses no other writer's update; here the agent is the only owner.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

const PREFIX: &[u8] = b".nobypass-put-";
const SUFFIX: &[u8] = b".tmp";

/// Makes `dir/name` a file of mode `mode` with what `fill` writes. A reader sees the old file or the new one, whole,
/// also after a power cut; a program that runs from the old one goes on running.
pub fn put(
    dir: &Path,
    name: &OsStr,
    mode: u32,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let temp = Temp::create(dir)?;
    let mut file = &temp.file;
    fill(&mut file.try_clone()?)?;
    // Independent of the process's umask.
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    io::Write::flush(&mut file)?;
    file.sync_all()?;
    fs::rename(&temp.path, dir.join(name))?;
    File::open(dir)?.sync_all()
}

/// A hidden file that is removed unless it was renamed. A lock on it tells others that its maker is alive.
struct Temp {
    path: PathBuf,
    file: File,
}

impl Temp {
    fn create(dir: &Path) -> io::Result<Self> {
        let random = RandomState::new().build_hasher().finish();
        let path = dir.join(format!(".nobypass-put-{random:016x}.tmp"));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(&path)?;
        let temp = Self { path, file };
        temp.file.try_lock().map_err(io::Error::from)?;
        Ok(temp)
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        // After the rename there is nothing of this name.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes what a killed agent left in `dir`, and says how many files that were. Files of a living one stay.
pub fn clean(dir: &Path) -> io::Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if !(name.as_bytes().starts_with(PREFIX) && name.as_bytes().ends_with(SUFFIX)) {
            continue;
        }
        if !entry.file_type()?.is_file() {
            continue;
        }
        let Ok(file) = File::open(entry.path()) else { continue };
        if file.try_lock().is_ok() && fs::remove_file(entry.path()).is_ok() {
            removed += 1;
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn replaces_whole_files_with_the_mode_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        for (text, mode) in [("one", 0o600), ("two, longer", 0o755), ("3", 0o640)] {
            put(dir.path(), OsStr::new("f"), mode, |file| file.write_all(text.as_bytes())).unwrap();
            assert_eq!(fs::read_to_string(dir.path().join("f")).unwrap(), text);
            assert_eq!(fs::metadata(dir.path().join("f")).unwrap().permissions().mode() & 0o7777, mode);
            assert_eq!(names(dir.path()), ["f"]);
        }
    }

    #[test]
    fn a_failure_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), "old").unwrap();
        let error = put(dir.path(), OsStr::new("f"), 0o600, |file| {
            file.write_all(b"half")?;
            Err(io::Error::from_raw_os_error(libc::ENOSPC))
        });
        assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(fs::read_to_string(dir.path().join("f")).unwrap(), "old");
        assert_eq!(names(dir.path()), ["f"]);
        // A directory in the way.
        fs::create_dir(dir.path().join("d")).unwrap();
        assert!(put(dir.path(), OsStr::new("d"), 0o600, |_| Ok(())).is_err());
        assert_eq!(names(dir.path()), ["d", "f"]);
    }

    #[test]
    fn cleaning_takes_the_dead_s_files_and_leaves_the_living_s() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(".nobypass-put-0123456789abcdef.tmp"), "").unwrap();
        fs::write(dir.path().join("10-x.conflist"), "").unwrap();
        let living = Temp::create(dir.path()).unwrap();
        assert_eq!(clean(dir.path()).unwrap(), 1);
        assert!(living.path.exists());
        drop(living);
        assert_eq!(names(dir.path()), ["10-x.conflist"]);
    }
}
