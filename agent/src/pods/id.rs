//! The two identifiers that join the kernel's view (cgroup directories) with the pod's.

use std::{fmt, str::FromStr};

/// Why a text is not an identifier that a pod cgroup could carry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// Not a pod UID.
    #[error(
        "`{0}` is not a pod UID (a UUID, or 32 hex digits for a static pod), so no pod cgroup can carry its name"
    )]
    PodUid(String),
    /// Not a container id.
    #[error("`{0}` is not a container id (64 hex digits), so no container cgroup can carry its name")]
    ContainerId(String),
}

/// How a pod UID is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Form {
    /// `8-4-4-4-12` hex digits: a pod of the API server.
    Dashed,
    /// 32 hex digits: a static pod, whose UID is the hash of its manifest.
    Plain,
}

/// A pod's UID as its cgroup directory carries it.
///
/// Usually `metadata.uid`; for a static pod the annotation `kubernetes.io/config.hash`, because the mirror pod in
/// the API has a UID of its own. Letter case and the systemd driver's `_` for `-` do not matter for equality.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodUid {
    value: u128,
    form: Form,
}

impl PodUid {
    /// Reads a UUID (separators `-`, or `_` as the systemd driver writes them) or 32 hex digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let form = match bytes.len() {
            36 => Form::Dashed,
            32 => Form::Plain,
            _ => return None,
        };
        let mut value = 0_u128;
        for (at, byte) in bytes.iter().enumerate() {
            if form == Form::Dashed && matches!(at, 8 | 13 | 18 | 23) {
                if !matches!(byte, b'-' | b'_') {
                    return None;
                }
            } else {
                value = (value << 4) | u128::from(hex_digit(*byte)?);
            }
        }
        Some(Self { value, form })
    }

    /// Whether this is the hash of a static pod's manifest rather than a UID that the API server gave.
    #[must_use]
    pub fn is_static(self) -> bool {
        self.form == Form::Plain
    }
}

impl FromStr for PodUid {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::parse(text).ok_or_else(|| IdError::PodUid(text.to_owned()))
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let v = self.value;
        match self.form {
            Form::Plain => write!(f, "{v:032x}"),
            Form::Dashed => write!(
                f,
                "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
                v >> 96,
                (v >> 80) & 0xffff,
                (v >> 64) & 0xffff,
                (v >> 48) & 0xffff,
                v & 0xffff_ffff_ffff
            ),
        }
    }
}

impl fmt::Debug for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A container's (or pod sandbox's) id: 32 bytes, written as 64 hex digits by containerd, CRI-O and Docker alike.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContainerId([u8; 32]);

impl ContainerId {
    /// Reads exactly 64 hex digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        if bytes.len() != 64 {
            return None;
        }
        let mut id = [0; 32];
        for (byte, pair) in id.iter_mut().zip(bytes.chunks_exact(2)) {
            let [high, low] = pair else { return None };
            *byte = (hex_digit(*high)? << 4) | hex_digit(*low)?;
        }
        Some(Self(id))
    }
}

impl FromStr for ContainerId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::parse(text).ok_or_else(|| IdError::ContainerId(text.to_owned()))
    }
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn hex_digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pod_uid_forms() {
        let dashed = PodUid::parse("72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae").expect("dashed");
        assert_eq!(PodUid::parse("72f9a42e_50d3_47ee_8ec7_0bccfb6ea7ae"), Some(dashed));
        assert_eq!(PodUid::parse("72F9A42E-50D3-47EE-8EC7-0BCCFB6EA7AE"), Some(dashed));
        assert_eq!(dashed.to_string(), "72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae");
        assert!(!dashed.is_static());

        let plain = PodUid::parse("72f9a42e50d347ee8ec70bccfb6ea7ae").expect("plain");
        assert!(plain.is_static());
        assert_ne!(plain, dashed, "a static pod's hash is not the UUID of the same digits");
        assert_eq!(plain.to_string(), "72f9a42e50d347ee8ec70bccfb6ea7ae");

        for bad in [
            "",
            "72f9a42e-50d3-47ee-8ec7-0bccfb6ea7a",
            "72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ag",
            "72f9a42e50d3-47ee-8ec7-0bccfb6ea7ae0",
            "72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae0",
            "+2f9a42e50d347ee8ec70bccfb6ea7ae",
            "nginx",
        ] {
            assert_eq!(PodUid::parse(bad), None, "{bad}");
        }
        let error = "nginx".parse::<PodUid>().expect_err("not a UID").to_string();
        assert!(error.contains("`nginx` is not a pod UID"), "{error}");
    }

    #[test]
    fn small_uid_keeps_its_leading_zeros() {
        let text = "00000000-0000-0000-0000-000000000001";
        assert_eq!(PodUid::parse(text).expect("uid").to_string(), text);
    }

    proptest! {
        #[test]
        fn pod_uid_round_trips(text in "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}") {
            prop_assert_eq!(PodUid::parse(&text).expect("valid").to_string(), text);
        }

        #[test]
        fn container_id_round_trips(text in "[0-9a-f]{64}") {
            prop_assert_eq!(ContainerId::parse(&text).expect("valid").to_string(), text);
        }

        #[test]
        fn ids_never_panic(text in "\\PC{0,70}") {
            let _ = (PodUid::parse(&text), ContainerId::parse(&text));
        }
    }
}
