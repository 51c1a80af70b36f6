//! The README's table of figures: what benchmarks told, a row each, under the command that tells it again.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// The line before the table.
pub const BEGIN: &str = "<!-- figures: written by `cargo xtask bench --readme` -->";
/// The line after it.
pub const END: &str = "<!-- end of figures -->";
const HEAD: &str = "| what | figure | promise | command |\n|---|---|---|---|\n";

/// One figure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    what: String,
    figure: String,
    promise: String,
}

/// What was told, from a file of JSON lines; a benchmark that tells nothing makes none.
pub fn rows(path: &Path) -> Result<Vec<Row>> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| format!("cannot read {}", path.display()))?,
    };
    text.lines().map(row).collect()
}

fn row(line: &str) -> Result<Row> {
    let value: Value = serde_json::from_str(line).with_context(|| format!("not a figure: {line}"))?;
    let text = |key: &str| value[key].as_str().map(str::to_owned);
    let (Some(what), Some(figure)) = (text("what"), text("figure")) else {
        anyhow::bail!("a figure without `what` and `figure`: {line}");
    };
    let promise = match (text("promise"), &value["kept"]) {
        (None, _) => String::new(),
        (Some(promise), Value::Bool(false)) => format!("{promise}: **missed**"),
        (Some(promise), _) => promise,
    };
    Ok(Row { what, figure, promise })
}

/// The text with new rows for the benchmarks that were run, in the order of `names`; rows of others stay. `None`: there
/// is no table.
pub fn replaced(text: &str, names: &[&str], told: &[(&str, Vec<Row>)]) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (table, after) = rest.split_once(END)?;
    let mut new = String::from(HEAD);
    for name in names {
        let command = format!("`cargo xtask bench {name}`");
        match told.iter().find(|(told, _)| told == name) {
            Some((_, rows)) => {
                for Row { what, figure, promise } in rows {
                    new.push_str(&format!("| {what} | {figure} | {promise} | {command} |\n"));
                }
            }
            None => {
                for line in table.lines().filter(|line| line.ends_with(&format!("| {command} |"))) {
                    new.push_str(line);
                    new.push('\n');
                }
            }
        }
    }
    Some(format!("{before}{BEGIN}\n\n{new}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"what": "a packet", "figure": "3 ns", "promise": "≤ 2 ns", "kept": false}"#;

    #[test]
    fn new_figures_take_the_place_of_old_ones_and_others_stay() {
        let row = row(LINE).unwrap();
        let old = format!(
            "text\n{BEGIN}\n\n{HEAD}| b | 1 |  | `cargo xtask bench b` |\n| old | 1 |  | `cargo xtask bench a` |\n\n{END}\nmore"
        );
        let new = replaced(&old, &["a", "b"], &[("a", vec![row])]).unwrap();
        let expected = format!(
            "text\n{BEGIN}\n\n{HEAD}| a packet | 3 ns | ≤ 2 ns: **missed** | `cargo xtask bench a` |\n\
             | b | 1 |  | `cargo xtask bench b` |\n\n{END}\nmore"
        );
        assert_eq!(new, expected);
        assert_eq!(replaced(&new, &["a", "b"], &[]).unwrap(), new);
        assert_eq!(replaced("no table", &["a"], &[]), None);
    }

    #[test]
    fn what_is_no_figure_is_an_error() {
        for line in ["", "[]", "{\"what\": 1}"] {
            assert!(row(line).is_err(), "{line}");
        }
    }
}
