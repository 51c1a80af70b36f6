//! Why a file in the CNI directory is not edited: bounded reasons, each with a metric label and a sentence.

use std::io;

/// The agent does not touch this file, for this reason, until the file changes.
///
/// [`label`](Self::label) is the `reason` of `cni_patches_total{result="refused"}`; the `Display` text is for a log
/// line or `cni status` after the file's name and a colon.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No byte, or only white space: a writer that truncated and has not written yet, or lost its data in a crash.
    #[error("empty; waiting for its owner to write it")]
    Empty,
    /// The text ends before the JSON does. A cut JSON object is never valid, so this means "not finished yet".
    #[error("ends in the middle of its JSON; waiting for its owner to finish it")]
    Incomplete,
    /// Not JSON; the position is 1-based.
    #[error("not JSON at line {line}, column {column}: {what}")]
    Syntax {
        /// Line of the first bad byte, from 1.
        line: usize,
        /// Column of the first bad byte, from 1.
        column: usize,
        /// The parser's words.
        what: String,
    },
    /// Starts with a byte order mark, which container runtimes refuse as well.
    #[error("starts with a byte order mark, which container runtimes refuse; save it as plain UTF-8")]
    Bom,
    /// Not UTF-8.
    #[error("not UTF-8 at byte {at}")]
    NotUtf8 {
        /// Offset of the first bad byte.
        at: usize,
    },
    /// Larger than [`MAX_BYTES`](super::plan::MAX_BYTES).
    #[error("{bytes} bytes, more than the {max} allowed for a CNI configuration", max = super::plan::MAX_BYTES)]
    TooLarge {
        /// The file's size.
        bytes: u64,
    },
    /// Nested deeper than the runtime's own JSON reader accepts.
    #[error("nested deeper than {max} levels, which container runtimes refuse", max = super::plan::MAX_DEPTH)]
    TooDeep,
    /// A number that does not fit a 64-bit float, which the runtime's JSON reader refuses.
    #[error("the number {text:.40} is out of range, which container runtimes refuse")]
    NumberRange {
        /// The number as written.
        text: String,
    },
    /// Valid JSON, but not an object.
    #[error("valid JSON, but not an object")]
    NotAnObject,
    /// A key that a network needs is missing or has the wrong type.
    #[error("`{key}` is {problem}, so container runtimes refuse it")]
    Field {
        /// The key, from a fixed set.
        key: &'static str,
        /// What is wrong with it, from a fixed set.
        problem: &'static str,
    },
    /// A conflist whose `plugins` is an empty array.
    #[error("`plugins` is empty: no network to chain to")]
    NoPlugins,
    /// A list (`plugins`) under a name that runtimes read as a single plugin.
    #[error("a plugin list under a single-plugin name; container runtimes refuse it, name it .conflist")]
    ListInConf,
    /// The mesh's plugin does not support the network's `cniVersion`, so that every pod would fail with the entry.
    #[error("cniVersion {version} is not one that the plugin {plugin} supports; update the plugin")]
    Version {
        /// The network's version.
        version: String,
        /// The mesh's plugin.
        plugin: String,
    },
    /// A `.conf` cannot become a `.conflist` since its owner keeps a list of that name too.
    #[error("its owner also keeps {list}, so it cannot become a list without losing that file")]
    ListExists {
        /// The list's name.
        list: String,
    },
    /// No config of the directory has a mesh entry yet to learn from.
    #[error("no mesh entry is known yet; waiting for the mesh's installer")]
    NoEntry,
    /// A newer agent looks after this directory.
    #[error("left to a newer nobypass agent on this node")]
    Superseded,
    /// The edited text would not have been what was meant. Never seen; checked on every write.
    #[error("internal check failed: the edited text does not hold exactly one mesh entry in its place")]
    SelfCheck,
    /// A FIFO, socket, device or directory with the name of a config.
    #[error("not a regular file")]
    NotRegular,
    /// A symbolic link that leads out of the CNI directory, or nowhere.
    #[error("a symbolic link that leads out of the CNI directory or nowhere")]
    Symlink,
    /// The file cannot be read or written by this agent (`EACCES`, `EPERM`).
    #[error("no permission (on SELinux nodes, check the label of the CNI directory)")]
    Permission,
    /// The file system is read-only.
    #[error("the file system is read-only")]
    ReadOnly,
    /// No space or quota left.
    #[error("no space left on the file system")]
    NoSpace,
    /// Too many open files, here or on the host.
    #[error("too many open files")]
    NoFiles,
    /// Any other error of the system.
    #[error("{0}")]
    Io(String),
}

impl Refusal {
    /// A bounded label for metrics: one word per kind, no data.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Incomplete => "incomplete",
            Self::Syntax { .. } => "syntax",
            Self::Bom => "bom",
            Self::NotUtf8 { .. } => "not_utf8",
            Self::TooLarge { .. } => "too_large",
            Self::TooDeep => "too_deep",
            Self::NumberRange { .. } => "number_range",
            Self::NotAnObject => "not_an_object",
            Self::Field { .. } => "field",
            Self::NoPlugins => "no_plugins",
            Self::ListInConf => "list_in_conf",
            Self::Version { .. } => "version",
            Self::ListExists { .. } => "list_exists",
            Self::NoEntry => "no_entry",
            Self::Superseded => "superseded",
            Self::SelfCheck => "self_check",
            Self::NotRegular => "not_regular",
            Self::Symlink => "symlink",
            Self::Permission => "permission",
            Self::ReadOnly => "read_only",
            Self::NoSpace => "no_space",
            Self::NoFiles => "no_files",
            Self::Io(_) => "io",
        }
    }

    /// Every label there is, so that a metric can start each at zero.
    pub const LABELS: [&'static str; 24] = [
        "empty",
        "incomplete",
        "syntax",
        "bom",
        "not_utf8",
        "too_large",
        "too_deep",
        "number_range",
        "not_an_object",
        "field",
        "no_plugins",
        "list_in_conf",
        "version",
        "list_exists",
        "no_entry",
        "superseded",
        "self_check",
        "not_regular",
        "symlink",
        "permission",
        "read_only",
        "no_space",
        "no_files",
        "io",
    ];

    /// True when the writer has probably not finished, so that silence for a while is right before a warning.
    pub fn may_be_unfinished(&self) -> bool {
        matches!(self, Self::Empty | Self::Incomplete | Self::Syntax { .. } | Self::NotUtf8 { .. })
    }
}

impl From<&io::Error> for Refusal {
    fn from(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::PermissionDenied => Self::Permission,
            io::ErrorKind::ReadOnlyFilesystem => Self::ReadOnly,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace,
            io::ErrorKind::IsADirectory => Self::NotRegular,
            _ => match error.raw_os_error() {
                Some(libc::ELOOP) => Self::Symlink,
                Some(libc::EMFILE | libc::ENFILE) => Self::NoFiles,
                // Opening a socket or a device without a driver.
                Some(libc::ENXIO | libc::ENODEV) => Self::NotRegular,
                _ => Self::Io(error.to_string()),
            },
        }
    }
}
