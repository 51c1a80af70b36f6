//! Writes an object in the style of its neighbours, so that a diff shows nothing but the object.

use super::edit;

/// The white space of a JSON text. Only white space between tokens is ever made; every token stays as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// For texts over several lines: the line end, the object's own indentation, and one step more.
    lines: Option<Lines>,
    /// After a colon.
    colon: &'static str,
    /// After a comma, where no line ends.
    comma: &'static str,
    /// Inside the outermost braces, where no line ends.
    pad: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Lines {
    end: &'static str,
    indent: String,
    step: String,
}

impl Layout {
    /// Two spaces a level, for new files.
    pub fn pretty(indent: &str, line_end: &'static str) -> Self {
        let lines = Lines { end: line_end, indent: indent.to_owned(), step: "  ".to_owned() };
        Self { lines: Some(lines), colon: " ", comma: "", pad: "" }
    }

    /// The style of `object`, a JSON object that starts at `at` in `text`.
    pub fn of(text: &str, at: usize, object: &str) -> Self {
        let first = edit::members(object).into_iter().next();
        let colon = first.as_ref().is_some_and(|first| {
            let key = object.get(first.span.start..first.value_span.start).unwrap_or_default();
            key.ends_with([' ', '\t'])
        });
        let colon = if colon { " " } else { "" };
        if !object.contains('\n') {
            let pad = if object.starts_with("{ ") { " " } else { "" };
            return Self { lines: None, colon, comma: if colon == " " { " " } else { "" }, pad };
        }
        let end = line_end(object);
        let own_line = |at: usize| -> Option<&str> {
            let before = object.get(..at)?;
            let line = before.rsplit_once('\n')?.1;
            line.trim_start_matches([' ', '\t']).is_empty().then_some(line)
        };
        let indent = own_line(object.len() - 1).unwrap_or_else(|| indent_at(text, at));
        let step = first
            .and_then(|first| own_line(first.span.start))
            .and_then(|line| line.strip_prefix(indent))
            .filter(|step| !step.is_empty())
            .unwrap_or_else(|| if indent.starts_with('\t') { "\t" } else { "  " });
        let lines = Lines { end, indent: indent.to_owned(), step: step.to_owned() };
        Self { lines: Some(lines), colon, comma: "", pad: "" }
    }

    /// The tokens of `object` (valid JSON) in this layout; starts at its opening brace, without indentation.
    pub fn write(&self, object: &str) -> String {
        let mut out = String::with_capacity(object.len() * 2);
        let mut depth = 0_usize;
        let mut tokens = edit::tokens(object).peekable();
        while let Some(token) = tokens.next() {
            match token {
                "{" | "[" => {
                    out.push_str(token);
                    if matches!(tokens.peek(), Some(&("}" | "]"))) {
                        out.push_str(tokens.next().unwrap_or_default());
                    } else {
                        depth += 1;
                        self.line(&mut out, depth, if depth == 1 { self.pad } else { "" });
                    }
                }
                "}" | "]" => {
                    let pad = if depth == 1 { self.pad } else { "" };
                    depth = depth.saturating_sub(1);
                    self.line(&mut out, depth, pad);
                    out.push_str(token);
                }
                "," => {
                    out.push(',');
                    self.line(&mut out, depth, self.comma);
                }
                ":" => {
                    out.push(':');
                    out.push_str(self.colon);
                }
                other => out.push_str(other),
            }
        }
        out
    }

    fn line(&self, out: &mut String, depth: usize, otherwise: &str) {
        let Some(lines) = &self.lines else {
            out.push_str(otherwise);
            return;
        };
        out.push_str(lines.end);
        out.push_str(&lines.indent);
        for _ in 0..depth {
            out.push_str(&lines.step);
        }
    }
}

/// The line end that a text uses; `\n` for a text of one line.
pub fn line_end(text: &str) -> &'static str {
    if text.contains("\r\n") { "\r\n" } else { "\n" }
}

/// The indentation of the line that byte `at` is on.
pub fn indent_at(text: &str, at: usize) -> &str {
    let before = text.get(..at).unwrap_or_default();
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let line = text.get(start..).unwrap_or_default();
    let indent = line.len() - line.trim_start_matches([' ', '\t']).len();
    line.get(..indent).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn styles_are_taken_over() {
        let entry = r#"{"type":"m","a":[1,{}],"b":{"c":"x: y, z"}}"#;
        for (neighbour, expected) in [
            (r#"{"type":"x"}"#, entry),
            (r#"{"type": "x"}"#, r#"{"type": "m", "a": [1, {}], "b": {"c": "x: y, z"}}"#),
            (r#"{ "type": "x" }"#, r#"{ "type": "m", "a": [1, {}], "b": {"c": "x: y, z"} }"#),
            (
                "{\n\t\t\"type\": \"x\"\n\t}",
                "{\n\t\t\"type\": \"m\",\n\t\t\"a\": [\n\t\t\t1,\n\t\t\t{}\n\t\t],\n\t\t\"b\": {\n\t\t\t\"c\": \"x: y, z\"\n\t\t}\n\t}",
            ),
            (
                "{\r\n   \"type\":\"x\"\r\n }",
                "{\r\n   \"type\":\"m\",\r\n   \"a\":[\r\n     1,\r\n     {}\r\n   ],\r\n   \"b\":{\r\n     \"c\":\"x: y, z\"\r\n   }\r\n }",
            ),
        ] {
            assert_eq!(Layout::of(neighbour, 0, neighbour).write(entry), expected, "{neighbour:?}");
        }
    }

    #[test]
    fn indentation_of_a_line() {
        assert_eq!(indent_at("{\n  \t\"a\": {", 10), "  \t");
        assert_eq!(indent_at("{", 0), "");
    }
}
