//! Whether the gate was open before this agent started, and in which boot of the machine.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::gate::Before;

/// This boot's id (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What is kept beside the agent's socket.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    boot_id: String,
    open: bool,
}

/// This boot's id.
///
/// # Errors
/// As read(2) says.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

/// What an earlier agent left.
pub fn before(path: &Path, boot_id: &str) -> Before {
    let text = fs::read(path).unwrap_or_default();
    match serde_json::from_slice::<Record>(&text) {
        Ok(Record { open: true, boot_id: then }) if then == boot_id => Before::Open,
        Ok(Record { open: true, .. }) => Before::OtherBoot,
        _ => Before::Closed,
    }
}

/// Notes the gate's state for a later agent.
///
/// # Errors
/// As write(2) says.
pub fn note(path: &Path, boot_id: &str, open: bool) -> io::Result<()> {
    let record = Record { boot_id: boot_id.to_owned(), open };
    fs::write(path, serde_json::to_vec(&record)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_open_gate_of_this_boot_is_taken_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gate");
        assert_eq!(before(&path, "a"), Before::Closed);
        note(&path, "a", true).unwrap();
        assert_eq!(before(&path, "a"), Before::Open);
        assert_eq!(before(&path, "b"), Before::OtherBoot);
        note(&path, "a", false).unwrap();
        assert_eq!((before(&path, "a"), before(&path, "b")), (Before::Closed, Before::Closed));
        fs::write(&path, "{").unwrap();
        assert_eq!(before(&path, "a"), Before::Closed);
        assert!(!boot_id().unwrap().is_empty());
    }
}
