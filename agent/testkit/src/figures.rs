//! Figures of benchmarks: a line for people, and one for the table in the README.

use std::fs::File;
use std::io::{self, Write as _};

use anyhow::{Context as _, Result};
use serde_json::json;

/// Names the file to which each figure is appended, as a line of JSON. `cargo xtask bench` sets it.
pub const FILE_ENV: &str = "NOBYPASS_FIGURES";

/// The value after `name` on a benchmark's command line; `default` where it is not given.
///
/// # Errors
/// When what is given is no such value.
pub fn argument<T: std::str::FromStr>(name: &str, default: T) -> Result<T> {
    let Some(text) = std::env::args().skip_while(|arg| arg != name).nth(1) else { return Ok(default) };
    text.parse().ok().with_context(|| format!("{name} {text}: no such value"))
}

/// What was measured, in the words of the README's table.
#[derive(Clone, Debug)]
#[must_use = "a figure that nobody is told was measured for nothing"]
pub struct Figure {
    what: String,
    figure: String,
    promise: Option<String>,
    kept: bool,
}

impl Figure {
    /// A figure without a promise.
    pub fn new(what: impl Into<String>, figure: impl Into<String>) -> Self {
        Self { what: what.into(), figure: figure.into(), promise: None, kept: true }
    }

    /// What was promised of it, and whether that was kept.
    pub fn promised(self, promise: impl Into<String>, kept: bool) -> Self {
        Self { promise: Some(promise.into()), kept, ..self }
    }

    /// Prints it and appends it to the file that [`FILE_ENV`] names, if any. The result says whether the promise is kept.
    ///
    /// # Errors
    /// When standard output or the file cannot be written.
    pub fn tell(self) -> io::Result<bool> {
        let Self { what, figure, promise, kept } = self;
        let verdict = match (&promise, kept) {
            (None, _) => String::new(),
            (Some(promise), true) => format!("   promised {promise}"),
            (Some(promise), false) => format!("   promised {promise}: BROKEN"),
        };
        writeln!(io::stdout(), "{what}: {figure}{verdict}")?;
        if let Some(path) = std::env::var_os(FILE_ENV) {
            let line = json!({"what": what, "figure": figure, "promise": promise, "kept": kept});
            writeln!(File::options().create(true).append(true).open(path)?, "{line}")?;
        }
        Ok(kept)
    }
}

/// Samples in order.
#[derive(Clone, Debug)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Of at least one sample.
    ///
    /// # Panics
    /// Without any.
    #[must_use]
    pub fn new(mut samples: Vec<f64>) -> Self {
        assert!(!samples.is_empty(), "nothing was measured");
        samples.sort_by(f64::total_cmp);
        Self(samples)
    }

    /// The sample below which `percent` of all are.
    #[must_use]
    pub fn at(&self, percent: usize) -> f64 {
        self.0[(self.0.len() * percent / 100).min(self.0.len() - 1)]
    }

    /// The middle one.
    #[must_use]
    pub fn median(&self) -> f64 {
        self.at(50)
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let samples = Samples::new((1..=100).rev().map(f64::from).collect());
        assert_eq!(
            (samples.at(0), samples.median(), samples.at(99), samples.at(100)),
            (1.0, 51.0, 100.0, 100.0)
        );
        assert_eq!(Samples::new(vec![7.0]).at(99), 7.0);
    }
}
