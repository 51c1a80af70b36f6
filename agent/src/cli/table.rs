//! Tables for people: columns as wide as their widest cell, two spaces between.

use std::fmt;

/// A table under construction.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new(headings: &[&str]) -> Self {
        Self { rows: vec![headings.iter().map(ToString::to_string).collect()] }
    }

    /// Adds a row; an empty cell shows as `-`.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let cells = cells.into_iter().map(|cell| {
            let cell: String = cell.into();
            if cell.is_empty() { "-".into() } else { printable(&cell) }
        });
        self.rows.push(cells.collect());
    }
}

/// Names come from the cluster: a control character in one must not reach the terminal.
pub fn printable(cell: &str) -> String {
    cell.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
        };
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{cell:<width$}  "));
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_control_characters_do_not_get_through() {
        let mut table = Table::new(&["A", "LONGER"]);
        table.row(["wide cell", "x"]);
        table.row(["", "\u{1b}[31m"]);
        assert_eq!(table.to_string(), "A          LONGER\nwide cell  x\n-          \u{fffd}[31m\n");
    }
}
