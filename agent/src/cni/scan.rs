//! Walks over a JSON text that is known to be valid; on any other text it ends early.

use std::ops::Range;

/// The tokens of a valid JSON text: brackets, commas, colons, strings with their quotes, numbers, words.
pub fn tokens(text: &str) -> impl Iterator<Item = &str> {
    let mut scan = Scan::new(text);
    std::iter::from_fn(move || {
        scan.space();
        let start = scan.at;
        match scan.peek()? {
            b'"' => scan.string(),
            b'{' | b'}' | b'[' | b']' | b',' | b':' => scan.at += 1,
            _ => _ = scan.word(),
        }
        text.get(start..scan.at)
    })
}

/// A position in a JSON text.
#[derive(Debug)]
pub(super) struct Scan<'a> {
    text: &'a str,
    pub(super) at: usize,
}

impl<'a> Scan<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    pub(super) fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    /// Skips white space and this opening bracket, and the white space after it.
    pub(super) fn open(&mut self, bracket: u8) -> bool {
        self.space();
        if self.peek() != Some(bracket) {
            return false;
        }
        self.at += 1;
        self.space();
        true
    }

    /// After a value: skips to the next item; false at the end of the object or array.
    pub(super) fn next_item(&mut self) -> bool {
        self.space();
        let more = self.peek() == Some(b',');
        self.at += usize::from(more);
        self.space();
        more
    }

    /// Skips a string, from its opening quote.
    pub(super) fn string(&mut self) {
        self.at += 1;
        while let Some(byte) = self.peek() {
            self.at += match byte {
                b'"' => break,
                b'\\' => 2,
                _ => 1,
            };
        }
        self.at = (self.at + 1).min(self.text.len());
    }

    /// Skips and gives a number or word.
    pub(super) fn word(&mut self) -> &'a str {
        let start = self.at;
        while !matches!(self.peek(), None | Some(b',' | b']' | b'}' | b':' | b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
        self.text.get(start..self.at).unwrap_or_default()
    }

    /// Skips a value and gives its span, which is empty where there is none.
    pub(super) fn value(&mut self) -> Range<usize> {
        let start = self.at;
        let mut depth = 0_usize;
        while let Some(byte) = self.peek() {
            match byte {
                b'"' => self.string(),
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                    continue;
                }
                b'}' | b']' if depth == 0 => break,
                b'}' | b']' => {
                    depth -= 1;
                    self.at += 1;
                }
                _ if depth > 0 => {
                    self.at += 1;
                    continue;
                }
                _ => {
                    self.word();
                    break;
                }
            }
            if depth == 0 {
                break;
            }
        }
        start..self.at
    }
}
