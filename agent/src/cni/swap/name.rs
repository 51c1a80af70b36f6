//! Names of hidden files. They carry what is needed after a crash to know whether the file holds something of another
//! writer: a hash of the target's name, of the bytes that were expected to come out, and of those that went in.

use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::os::unix::ffi::OsStrExt as _;

/// Start of every hidden file's name in the CNI directory. Together with [`SUFFIX`] no runtime reads it.
pub const PREFIX: &str = ".nobypass-";
/// End of every temporary hidden file's name.
pub const SUFFIX: &str = ".tmp";
const ASIDE: &str = "aside-";
const POKE: &str = "poke-";

/// What a hidden name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// A new version, or after the exchange the version it displaced.
    Version {
        /// Hash of the target's name.
        target: u64,
        /// Hash of the bytes that were to be displaced.
        expected: u64,
        /// Hash of the bytes that were to be put in place.
        planned: u64,
    },
    /// A `.conf` on its way to its hidden name; the hash of its name.
    Aside(u64),
    /// Made to wake a runtime; holds nothing.
    Poke,
}

/// FNV-1a, 64 bits: stable across versions of the agent. Only used to sort out files after a crash; while running,
/// bytes are compared.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

impl Hidden {
    /// A new name that says this.
    pub fn name(self) -> OsString {
        let random = RandomState::new().build_hasher().finish();
        let said = match self {
            Self::Version { target, expected, planned } => {
                format!("{target:016x}-{expected:016x}-{planned:016x}-")
            }
            Self::Aside(target) => format!("{ASIDE}{target:016x}-"),
            Self::Poke => POKE.to_owned(),
        };
        format!("{PREFIX}{said}{random:016x}{SUFFIX}").into()
    }

    /// Reads a name; `None` when it is not one of ours.
    pub fn parse(name: &OsStr) -> Option<Self> {
        let said = name.as_bytes().strip_prefix(PREFIX.as_bytes())?.strip_suffix(SUFFIX.as_bytes())?;
        let said = std::str::from_utf8(said).ok()?;
        let number = |text: &str| (text.len() == 16).then(|| u64::from_str_radix(text, 16).ok()).flatten();
        if let Some(rest) = said.strip_prefix(ASIDE) {
            return Some(Self::Aside(number(rest.split_once('-')?.0)?));
        }
        if said.starts_with(POKE) {
            return Some(Self::Poke);
        }
        let mut numbers = said.split('-').map(number);
        let version =
            Self::Version { target: numbers.next()??, expected: numbers.next()??, planned: numbers.next()?? };
        numbers.next()??;
        numbers.next().is_none().then_some(version)
    }
}

/// A new name for a hidden file that says nothing and may be removed at any time.
pub fn passing_name() -> OsString {
    Hidden::Poke.name()
}

/// True for every name that the agent itself makes in the directory and that no runtime reads.
pub fn is_hidden(name: &OsStr) -> bool {
    name.as_bytes().starts_with(PREFIX.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::plan::FileKind;

    #[test]
    fn a_name_says_what_it_was_made_from_and_no_runtime_reads_it() {
        for said in [
            Hidden::Version { target: hash(b"10-a.conflist"), expected: 0, planned: u64::MAX },
            Hidden::Aside(hash(b"10-a.conf")),
            Hidden::Poke,
        ] {
            let name = said.name();
            assert_eq!(Hidden::parse(&name), Some(said));
            assert_ne!(name, said.name(), "random part");
            assert_eq!(FileKind::of(&name), None);
            assert!(is_hidden(&name));
        }
    }

    #[test]
    fn other_names_are_not_ours() {
        for name in ["10-a.conflist", ".nobypass-.tmp", ".nobypass-x-y-z-w.tmp", ".nobypass-generation", ""] {
            assert_eq!(Hidden::parse(OsStr::new(name)), None, "{name}");
        }
    }

    #[test]
    fn the_hash_is_fnv_1a() {
        // Test vectors of draft-eastlake-fnv.
        assert_eq!(hash(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(hash(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
