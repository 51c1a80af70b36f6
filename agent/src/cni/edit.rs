//! A JSON text seen as spans of bytes: what the planner needs to change one element and keep every other byte.
//!
//! [`check`] lets only valid JSON in (serde_json does the grammar); the scanner below relies on that for meaning but
//! not for safety: on any other text it ends early, it never panics and never runs for more than one pass a level.
//! Meaning follows Go's `encoding/json`, since libcni is the reader that counts: the last of two equal keys wins, and
//! struct fields are matched without regard to case while map keys are not
//! (<https://pkg.go.dev/encoding/json#Unmarshal>).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use super::plan::MAX_DEPTH;
use super::refusal::Refusal;
use super::scan::Scan;
pub use super::scan::tokens;

/// Numbers with fewer digits and no exponent cannot leave a 64-bit float's range.
const SURELY_FINITE: usize = 300;
/// [`same`] compares nested values as text below this depth.
const COMPARE_DEPTH: usize = 256;

/// Checks that `text` is one JSON value that Go's reader accepts into an `interface{}`.
pub fn check(text: &str) -> Result<(), Refusal> {
    // `IgnoredAny` walks without recursion and, as Go, takes a lone surrogate escape.
    serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(|error| match error.classify() {
        serde_json::error::Category::Eof => Refusal::Incomplete,
        // serde_json calls a number cut in its middle wrong, not unfinished.
        _ if text.ends_with(['.', 'e', 'E', '+', '-']) && at_end(text, &error) => Refusal::Incomplete,
        _ => Refusal::Syntax { line: error.line(), column: error.column(), what: words(&error) },
    })?;
    let (mut depth, mut scan) = (0_usize, Scan::new(text));
    while let Some(byte) = scan.peek() {
        match byte {
            b'"' => scan.string(),
            b'{' | b'[' => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return Err(Refusal::TooDeep);
                }
                scan.at += 1;
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                scan.at += 1;
            }
            b'-' | b'0'..=b'9' => {
                let number = scan.word();
                let big = number.len() > SURELY_FINITE || number.contains(['e', 'E']);
                if big && number.parse::<f64>().is_ok_and(f64::is_infinite) {
                    return Err(Refusal::NumberRange { text: number.to_owned() });
                }
            }
            _ => scan.at += 1,
        }
    }
    Ok(())
}

/// Whether the error is about the last byte.
fn at_end(text: &str, error: &serde_json::Error) -> bool {
    let mut lines = text.split('\n');
    let last = lines.next_back().unwrap_or_default();
    error.line() == lines.count() + 1 && error.column() >= last.len()
}

/// serde_json's message without its own position.
fn words(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or_default().to_owned()
}

/// A key and value of an object; ranges are offsets into the text that was scanned.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    /// The key, decoded.
    pub key: Cow<'a, str>,
    /// The value's text.
    pub value: &'a str,
    /// From the key's first quote to the value's last byte.
    pub span: Range<usize>,
    /// The value's bytes.
    pub value_span: Range<usize>,
}

/// The members of an object, in the order of the text; none when `text` is not an object.
pub fn members(text: &str) -> Vec<Member<'_>> {
    let mut scan = Scan::new(text);
    let mut found = Vec::new();
    if !scan.open(b'{') {
        return found;
    }
    while scan.peek() == Some(b'"') {
        let start = scan.at;
        scan.string();
        let key = text.get(start..scan.at).map(string).unwrap_or_default();
        scan.space();
        scan.at += usize::from(scan.peek() == Some(b':'));
        scan.space();
        let value_span = scan.value();
        let Some(value) = text.get(value_span.clone()) else { break };
        found.push(Member { key, value, span: start..value_span.end, value_span });
        if !scan.next_item() {
            break;
        }
    }
    found
}

/// The elements' spans in an array, relative to `text`; none when `text` is not an array.
pub fn elements(text: &str) -> Vec<Range<usize>> {
    let mut scan = Scan::new(text);
    let mut found = Vec::new();
    if !scan.open(b'[') {
        return found;
    }
    loop {
        let span = scan.value();
        if span.is_empty() {
            break;
        }
        found.push(span);
        if !scan.next_item() {
            break;
        }
    }
    found
}

/// The deepest nesting of a valid JSON text; 0 for a number.
pub fn depth(text: &str) -> usize {
    let (mut now, mut deepest) = (0_usize, 0);
    for token in tokens(text) {
        match token {
            "{" | "[" => now += 1,
            "}" | "]" => now = now.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(now);
    }
    deepest
}

/// An object's text without the members of exactly this key; the others keep what stands before them.
pub fn without(object: &str, key: &str) -> String {
    let members = members(object);
    let (Some(first), Some(last)) = (members.first(), members.last()) else { return object.to_owned() };
    let text = |span: Range<usize>| object.get(span).unwrap_or_default();
    let mut out = String::with_capacity(object.len());
    out.push_str(text(0..first.span.start));
    let (mut end, mut any) = (first.span.start, false);
    for member in &members {
        if member.key != key {
            out.push_str(if any { text(end..member.span.start) } else { "" });
            out.push_str(text(member.span.clone()));
            any = true;
        }
        end = member.span.end;
    }
    out.push_str(text(last.span.end..object.len()));
    out
}

/// A field of a Go struct decoded from this object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field {
    /// Not there, or null.
    Missing,
    /// A string.
    Text(String),
    /// Something else, which Go refuses for a string field.
    Wrong,
}

impl Field {
    /// The string, if it is one and not empty.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) if !text.is_empty() => Some(text),
            _ => None,
        }
    }
}

/// How an object reaches Go's struct decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// As the text of a file: fields apply in the order of the text.
    File,
    /// As an element of `plugins`, which libcni decodes into a map and encodes again: fields apply in the order of
    /// the sorted keys.
    Element,
}

/// What Go reads for the string field `name` (lower case) of the struct decoded from `object`.
pub fn field(object: &str, name: &str, origin: Origin) -> Field {
    let mut matching: Vec<(Cow<'_, str>, &str)> = Vec::new();
    for member in members(object) {
        if folds_to(&member.key, name) {
            // In a map the last of several equal keys has replaced the others.
            matching.retain(|(key, _)| origin == Origin::File || *key != member.key);
            matching.push((member.key, member.value));
        }
    }
    if origin == Origin::Element {
        matching.sort_by(|a, b| a.0.cmp(&b.0));
    }
    let mut result = Field::Missing;
    for (_, value) in matching {
        match value.as_bytes().first() {
            // null leaves a string field as it is.
            Some(b'n') => {}
            Some(b'"') if result != Field::Wrong => result = Field::Text(string(value).into_owned()),
            _ => result = Field::Wrong,
        }
    }
    result
}

/// Whether Go matches this key to a struct field of the lower-case name `name`.
pub fn folds_to(key: &str, name: &str) -> bool {
    // Beside ASCII, only these two letters fold to ASCII ones (`foldRune` in encoding/json).
    let fold = |letter: char| match letter {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        other => other.to_ascii_lowercase(),
    };
    key.chars().map(fold).eq(name.chars())
}

/// The non-empty `type` of an element of `plugins`.
pub fn plugin_type(object: &str) -> Option<String> {
    field(object, "type", Origin::Element).text().map(str::to_owned)
}

/// Whether two valid JSON texts mean the same: white space and the order of keys do not count, of equal keys the last
/// one counts, strings are compared decoded and numbers as written (Go refuses `1.0` where it takes `1`).
pub fn same(a: &str, b: &str) -> bool {
    same_within(a.trim(), b.trim(), COMPARE_DEPTH)
}

fn same_within(a: &str, b: &str, depth: usize) -> bool {
    if a == b {
        return true;
    }
    let (kind, other) = (a.as_bytes().first(), b.as_bytes().first());
    if kind != other || depth == 0 {
        return false;
    }
    match kind {
        Some(b'"') => string(a) == string(b),
        Some(b'{') => {
            let (a, b) = (table(a), table(b));
            let mut pairs = a.iter().zip(&b);
            a.len() == b.len() && pairs.all(|(a, b)| a.0 == b.0 && same_within(a.1, b.1, depth - 1))
        }
        Some(b'[') => {
            let (left, right) = (elements(a), elements(b));
            let mut pairs =
                left.iter().zip(&right).map(|(left, right)| (a.get(left.clone()), b.get(right.clone())));
            let equal = |pair: (Option<&str>, Option<&str>)| match pair {
                (Some(left), Some(right)) => same_within(left, right, depth - 1),
                _ => false,
            };
            left.len() == right.len() && pairs.all(equal)
        }
        // Numbers and words differ in their text.
        _ => false,
    }
}

/// An object's values by key; of equal keys the last.
fn table(object: &str) -> BTreeMap<Cow<'_, str>, &str> {
    members(object).into_iter().map(|member| (member.key, member.value)).collect()
}

/// The string that a JSON string literal (with its quotes) stands for; a lone surrogate becomes U+FFFD, as in Go.
pub fn string(literal: &str) -> Cow<'_, str> {
    let inner = literal.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(literal);
    if !inner.contains('\\') {
        return Cow::Borrowed(inner);
    }
    let mut units: Vec<u16> = Vec::with_capacity(inner.len());
    let mut rest = inner.chars();
    while let Some(letter) = rest.next() {
        let letter = match (letter, letter == '\\') {
            (letter, false) => letter,
            (_, true) => match rest.next() {
                Some('b') => '\u{8}',
                Some('f') => '\u{c}',
                Some('n') => '\n',
                Some('r') => '\r',
                Some('t') => '\t',
                Some('u') => {
                    let digits: String = rest.by_ref().take(4).collect();
                    units.push(u16::from_str_radix(&digits, 16).unwrap_or(0xfffd));
                    continue;
                }
                Some(other) => other,
                None => break,
            },
        };
        units.extend_from_slice(letter.encode_utf16(&mut [0; 2]));
    }
    Cow::Owned(String::from_utf16_lossy(&units))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_of_a_list() {
        let text = r#" { "a\"}" : [ 1 , {"x":"]"} ,"s"] ,"b":{"c":[]} } "#;
        let found = members(text);
        let seen: Vec<_> = found.iter().map(|member| (member.key.as_ref(), member.value)).collect();
        assert_eq!(seen, [("a\"}", r#"[ 1 , {"x":"]"} ,"s"]"#), ("b", r#"{"c":[]}"#)]);
        for member in &found {
            assert_eq!(&text[member.value_span.clone()], member.value);
        }
        let array = found[0].value;
        let items: Vec<_> = elements(array).into_iter().map(|span| &array[span]).collect();
        assert_eq!(items, ["1", r#"{"x":"]"}"#, r#""s""#]);
        assert!(elements("[]").is_empty() && elements("{}").is_empty());
        assert!(members("[]").is_empty());
    }

    #[test]
    fn checking() {
        let deep = |levels| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert_eq!(check(&deep(MAX_DEPTH)), Ok(()));
        assert_eq!(check(&deep(MAX_DEPTH + 1)), Err(Refusal::TooDeep));
        assert_eq!(check(r#"{"a":"\ud800"}"#), Ok(()), "Go reads a lone surrogate");
        assert_eq!(check("[1e308, 1e-999, -0, 12345678901234567890123]"), Ok(()));
        assert_eq!(check("[1e309]"), Err(Refusal::NumberRange { text: "1e309".into() }));
        assert_eq!(check(&"9".repeat(400)), Err(Refusal::NumberRange { text: "9".repeat(400) }));
        assert_eq!(check(r#"{"a":"1e999"}"#), Ok(()));
        assert_eq!(check(r#"{"a":["#), Err(Refusal::Incomplete));
        assert!(matches!(check("{\n  \"a\": x}"), Err(Refusal::Syntax { line: 2, column: 8, .. })));
        assert!(matches!(check("{} {}"), Err(Refusal::Syntax { .. })));
    }

    #[test]
    fn meaning() {
        for (a, b) in [
            (r#"{"a":1,"b":[true]}"#, "{ \"b\" : [ true ] , \"a\":1}"),
            (r#"{"a":1,"a":2}"#, r#"{"a":2}"#),
            (r#""\u0061\n/""#, r#""a\u000a\/""#),
            (r#""\ud83d\ude00""#, "\"\u{1f600}\""),
            (r#""\ud800""#, r#""\udc00""#),
        ] {
            assert!(same(a, b), "{a} = {b}");
        }
        for (a, b) in [
            ("1", "1.0"),
            ("9007199254740993", "9007199254740992"),
            (r#"{"a":1}"#, r#"{"A":1}"#),
            ("[1,2]", "[2,1]"),
            ("[1]", "[1,1]"),
            (r#""1""#, "1"),
            ("null", "{}"),
            (r#"{"a":null}"#, "{}"),
        ] {
            assert!(!same(a, b), "{a} ≠ {b}");
        }
    }

    #[test]
    fn fields_as_go_reads_them() {
        use Origin::{Element, File};
        let text = |text: &str| Field::Text(text.into());
        for (object, origin, expected) in [
            (r#"{"type":"a"}"#, File, text("a")),
            (r#"{"TYPE":"a"}"#, Element, text("a")),
            (r#"{"\u0074ype":"a"}"#, Element, text("a")),
            (r#"{"type":"a","Type":"b"}"#, File, text("b")),
            (r#"{"type":"a","Type":"b"}"#, Element, text("a")),
            (r#"{"type":"a","type":"b"}"#, Element, text("b")),
            (r#"{"type":"a","type":null}"#, File, text("a")),
            (r#"{"type":"a","type":null}"#, Element, Field::Missing),
            (r#"{"type":7}"#, File, Field::Wrong),
            (r#"{"type":7,"type":"a"}"#, File, Field::Wrong),
            (r#"{"type":7,"type":"a"}"#, Element, text("a")),
            (r#"{"types":"a","x":{"type":"b"}}"#, File, Field::Missing),
            ("[]", File, Field::Missing),
        ] {
            assert_eq!(field(object, "type", origin), expected, "{object} {origin:?}");
        }
        assert!(folds_to("\u{212a}\u{17f}", "ks"));
    }

    #[test]
    fn scanning_nonsense_ends() {
        for text in [
            "",
            "{",
            "[",
            "{\"",
            "{\"a",
            "{\"a\":",
            "{\"a\":}",
            "[,",
            "[,]",
            "}",
            "]",
            "{\"a\":\"\\",
            "[\"\\",
            "{\"a\" 1}",
        ] {
            let _ = (members(text), elements(text), field(text, "type", Origin::File), string(text));
        }
    }
}
