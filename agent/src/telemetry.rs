//! Logs: `tracing`, as text or JSON on standard error, with a level that can change while running.

use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object a line
    Json,
}

/// Changes the level.
#[derive(Clone, Debug)]
pub struct LevelHandle(reload::Handle<EnvFilter, Registry>);

/// Why a level was not taken.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a log filter; write a level (error, warn, info, debug, trace) or target=level, …")]
pub struct BadFilter(String);

/// Reads a filter: a level, or `target=level` terms.
///
/// # Errors
/// [`BadFilter`].
pub fn filter(text: &str) -> Result<EnvFilter, BadFilter> {
    EnvFilter::try_new(text).map_err(|_| BadFilter(text.into()))
}

/// Starts logging; what uses the `log` crate (aya) is included. Call once.
///
/// # Errors
/// [`BadFilter`].
pub fn init(text: &str, format: LogFormat) -> Result<LevelHandle, BadFilter> {
    let (filter, handle) = reload::Layer::new(filter(text)?);
    let registry = tracing_subscriber::registry().with(filter);
    let layer = fmt::layer().with_writer(std::io::stderr);
    // A second call (tests) keeps the first logger.
    let _ = match format {
        LogFormat::Text => {
            registry.with(layer.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))).try_init()
        }
        LogFormat::Json => registry.with(layer.json().flatten_event(true).with_ansi(false)).try_init(),
    };
    Ok(LevelHandle(handle))
}

impl LevelHandle {
    /// Changes the level now.
    ///
    /// # Errors
    /// [`BadFilter`]; the level stays as it was.
    pub fn set(&self, text: &str) -> Result<(), BadFilter> {
        let filter = filter(text)?;
        self.0.reload(filter).map_err(|_| BadFilter(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters() {
        assert!(filter("info").is_ok());
        assert!(filter("warn,nobypass::bpf=debug").is_ok());
        let error = filter("nobypass=loud").err().map(|error| error.to_string()).unwrap();
        assert!(error.contains("nobypass=loud") && error.contains("debug"), "{error}");
    }
}
