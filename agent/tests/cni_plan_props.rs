//! Properties of the CNI planner over generated documents, and a bounded fuzz run over mangled ones.
#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests stop at the first surprise")]

use nobypass::cni::document::Document;
use nobypass::cni::edit;
use nobypass::cni::entry::{Place, WantedEntry};
use nobypass::cni::plan::{FileKind, Leave, Options, Plan, Remove, plan, unplan};
use nobypass::cni::refusal::Refusal;
use proptest::prelude::*;
use serde_json::Value;

const OWN: &str = "mesh-cni";

/// A JSON value with the exact text of its tokens.
#[derive(Clone, Debug)]
enum Json {
    Token(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

/// White space between tokens.
#[derive(Clone, Debug)]
enum Style {
    Compact,
    Spaced,
    Lines {
        end: &'static str,
        step: &'static str,
    },
    /// Any white space anywhere, drawn from this seed.
    Wild(u64),
}

struct Printer {
    style: Style,
    out: String,
    depth: usize,
}

impl Printer {
    fn gap(&mut self, after_colon: bool) {
        match &mut self.style {
            Style::Compact => {}
            Style::Spaced => self.out.push(' '),
            Style::Lines { .. } if after_colon => self.out.push(' '),
            Style::Lines { end, step } => {
                self.out.push_str(end);
                self.out.push_str(&step.repeat(self.depth));
            }
            Style::Wild(seed) => {
                *seed = next(*seed);
                for bits in [0, 2, 4] {
                    self.out.push_str(["", " ", "\n", "\r\n\t"][(*seed >> bits) as usize & 3]);
                }
            }
        }
    }

    fn print(&mut self, json: &Json) {
        let (open, close, items): (_, _, Vec<(Option<&String>, &Json)>) = match json {
            Json::Token(token) => return self.out.push_str(token),
            Json::Array(items) => ('[', ']', items.iter().map(|item| (None, item)).collect()),
            Json::Object(items) => ('{', '}', items.iter().map(|(key, item)| (Some(key), item)).collect()),
        };
        self.out.push(open);
        self.depth += 1;
        for (nth, (key, item)) in items.iter().enumerate() {
            if nth > 0 {
                self.out.push(',');
            }
            self.gap(false);
            if let Some(key) = key {
                self.out.push_str(key);
                self.out.push(':');
                self.gap(true);
            }
            self.print(item);
        }
        self.depth -= 1;
        if !items.is_empty() {
            self.gap(false);
        }
        self.out.push(close);
    }
}

/// xorshift64: enough to spread white space and mutations, the same in every run.
fn next(mut seed: u64) -> u64 {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    seed
}

fn literal() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-zA-Z0-9 ,:{}\\[\\]]{0,6}",
        prop::sample::select(vec![
            "\\\"",
            "\\\\",
            "\\/",
            "\\n",
            "\\u0000",
            "\\u00e9",
            "\\ud83d\\ude00",
            "é",
            "😀",
            "\u{2028}",
            "\\\\\\\"",
            "<&>",
        ])
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..4).prop_map(|pieces| format!("\"{}\"", pieces.concat()))
}

fn token() -> impl Strategy<Value = String> {
    prop_oneof![
        literal(),
        prop::sample::select(vec![
            "0",
            "-0",
            "1.0",
            "1.10",
            "1e5",
            "1E+2",
            "-12.5e-3",
            "9007199254740993",
            "123456789012345678901234567890",
            "1e308",
            "5e-324",
            "true",
            "false",
            "null",
        ])
        .prop_map(str::to_owned),
    ]
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => literal(),
        1 => prop::sample::select(vec!["\"dns\"", "\"Plugins\"", "\"NAME\"", "\"k\"", "\"k\"", "\"\\u006b\""])
            .prop_map(str::to_owned),
    ]
}

fn json() -> impl Strategy<Value = Json> {
    token().prop_map(Json::Token).prop_recursive(6, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Json::Array),
            prop::collection::vec((key(), inner), 0..5).prop_map(Json::Object),
        ]
    })
}

fn style() -> impl Strategy<Value = Style> {
    prop_oneof![
        Just(Style::Compact),
        Just(Style::Spaced),
        prop::sample::select(vec![("\n", "  "), ("\n", "\t"), ("\r\n", "    "), ("\n", "")])
            .prop_map(|(end, step)| Style::Lines { end, step }),
        (1..u64::MAX).prop_map(Style::Wild),
    ]
}

/// A plugin: of ours or another type, with any other members around its `type`.
fn plugin(own: bool) -> impl Strategy<Value = Json> {
    let name = if own {
        vec!["\"mesh-cni\"", "\"mesh\\u002dcni\""]
    } else {
        vec!["\"bridge\"", "\"portmap\"", "\"x\""]
    };
    let others = prop::collection::vec((literal(), json()), 0..4);
    (prop::sample::select(name), others, any::<prop::sample::Index>()).prop_map(|(name, mut members, at)| {
        // Keys that Go would take for `type` or for a meta-plugin's have tables of their own.
        members.retain(|(key, _)| {
            !["type", "delegates", "clusternetwork"]
                .iter()
                .any(|name| edit::folds_to(&edit::string(key), name))
        });
        members.insert(at.index(members.len() + 1), ("\"type\"".to_owned(), Json::Token(name.to_owned())));
        Json::Object(members)
    })
}

/// A valid list with at least one foreign plugin; `own_too` mixes entries of ours in.
fn list(own_too: bool) -> impl Strategy<Value = String> {
    let first = plugin(false);
    let rest = prop::collection::vec(prop_oneof![plugin(false), plugin(own_too)], 0..4);
    let others = prop::collection::vec((key(), json()), 0..5);
    let shuffled = (first, rest, others).prop_flat_map(|(first, mut plugins, mut members)| {
        plugins.push(first);
        let exact = |key: &str, name: &str| edit::string(key) == name;
        members.retain(|(key, _)| !["name", "cniVersion", "plugins"].iter().any(|name| exact(key, name)));
        members.push(("\"name\"".into(), Json::Token("\"n\"".into())));
        members.push(("\"cniVersion\"".into(), Json::Token("\"0.3.1\"".into())));
        // Equal keys before the ones that count.
        members.push(("\"plugins\"".into(), Json::Array(plugins)));
        Just(members).prop_shuffle()
    });
    (shuffled, style(), prop::sample::select(vec!["", "\n", "\r\n \t"])).prop_map(|(members, style, tail)| {
        let mut printer = Printer { style, out: String::new(), depth: 0 };
        printer.print(&Json::Object(members));
        printer.out + tail
    })
}

fn entry() -> impl Strategy<Value = WantedEntry> {
    (plugin(true), style()).prop_map(|(entry, style)| {
        let mut printer = Printer { style, out: String::new(), depth: 0 };
        printer.print(&entry);
        WantedEntry::from_text(&printer.out, Place::Last).unwrap()
    })
}

/// The list as an independent reader sees it, without our entries.
fn foreign(text: &[u8]) -> Value {
    let mut value: Value = serde_json::from_slice(text).unwrap();
    value["plugins"].as_array_mut().unwrap().retain(|plugin| plugin["type"] != OWN);
    value
}

fn foreign_texts(text: &str) -> Vec<&str> {
    let document = Document::read(FileKind::Conflist, text.as_bytes()).unwrap();
    document.plugins().iter().filter(|plugin| plugin.plugin != OWN).map(|plugin| plugin.text).collect()
}

/// What must hold after any write.
fn check_write(before: &str, after: &str, wanted: &WantedEntry) -> Result<(), TestCaseError> {
    prop_assert_eq!(
        plan(FileKind::Conflist, after.as_bytes(), wanted, Options::default()),
        Plan::Leave(Leave::Satisfied)
    );
    prop_assert_eq!(foreign_texts(before), foreign_texts(after));
    prop_assert_eq!(foreign(before.as_bytes()), foreign(after.as_bytes()));
    let (old, new) = (
        Document::read(FileKind::Conflist, before.as_bytes()).unwrap(),
        Document::read(FileKind::Conflist, after.as_bytes()).unwrap(),
    );
    let ends = |document: &Document<'_>| {
        let plugins = document.plugins();
        (plugins[0].span.start, plugins[plugins.len() - 1].span.end)
    };
    let ((old_start, old_end), (new_start, new_end)) = (ends(&old), ends(&new));
    prop_assert_eq!(&before[..old_start], &after[..new_start]);
    prop_assert_eq!(&before[old_end..], &after[new_end..]);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn foreign_lists_get_one_entry_and_give_it_back(text in list(false), wanted in entry()) {
        let Plan::Write(bytes) = plan(FileKind::Conflist, text.as_bytes(), &wanted, Options::default()) else {
            return Err(TestCaseError::fail("not written"));
        };
        let out = std::str::from_utf8(&bytes).unwrap();
        check_write(&text, out, &wanted)?;
        for remove in [Remove::Type(OWN), Remove::Exactly(&wanted)] {
            prop_assert_eq!(unplan(FileKind::Conflist, &bytes, remove), Plan::Write(text.clone().into()));
        }
    }

    #[test]
    fn lists_with_entries_of_ours_end_with_exactly_one(text in list(true), wanted in entry()) {
        match plan(FileKind::Conflist, text.as_bytes(), &wanted, Options::default()) {
            Plan::Leave(Leave::Satisfied) => {}
            Plan::Write(bytes) => check_write(&text, std::str::from_utf8(&bytes).unwrap(), &wanted)?,
            other => return Err(TestCaseError::fail(format!("{other:?}"))),
        }
    }

    #[test]
    fn a_single_plugin_keeps_its_members(plugin in plugin(false), wanted in entry(), style in style()) {
        let Json::Object(mut members) = plugin else { unreachable!() };
        let moves = |key: &str| ["name", "cniversion"].iter().any(|name| edit::folds_to(&edit::string(key), name));
        members.retain(|(key, _)| !moves(key));
        members.push(("\"name\"".into(), Json::Token("\"n\\u0041\"".into())));
        let mut printer = Printer { style, out: String::new(), depth: 0 };
        printer.print(&Json::Object(members));
        let Plan::Convert(bytes) = plan(FileKind::Conf, printer.out.as_bytes(), &wanted, Options::default()) else {
            return Err(TestCaseError::fail("not converted"));
        };
        let (mut before, after): (Value, Value) =
            (serde_json::from_str(&printer.out).unwrap(), serde_json::from_slice(&bytes).unwrap());
        let name = before.as_object_mut().unwrap().shift_remove("name");
        prop_assert_eq!(after.get("name"), name.as_ref());
        prop_assert_eq!(&after["plugins"][0], &before);
        prop_assert_eq!(
            plan(FileKind::Conflist, &bytes, &wanted, Options::default()),
            Plan::Leave(Leave::Satisfied)
        );
    }

    /// The scanner and an independent reader agree on what equal means, as far as that reader can tell.
    #[test]
    fn equal_texts_are_equal_values(a in json(), b in json(), one in style(), two in style()) {
        let print = |json: &Json, style: &Style| {
            let mut printer = Printer { style: style.clone(), out: String::new(), depth: 0 };
            printer.print(json);
            printer.out
        };
        let value = |text: &str| -> Value { serde_json::from_str(text).unwrap() };
        let (a1, a2, b1) = (print(&a, &one), print(&a, &two), print(&b, &two));
        prop_assert!(edit::same(&a1, &a2));
        prop_assert_eq!(edit::check(&a1), Ok(()));
        if edit::same(&a1, &b1) {
            prop_assert_eq!(value(&a1), value(&b1));
        }
    }
}

/// Mangles one text: cuts, doubles, flips, inserts pieces that matter.
fn mangle(bytes: &mut Vec<u8>, seed: &mut u64) {
    let mut draw = |below: usize| {
        *seed = next(*seed);
        (*seed >> 16) as usize % below.max(1)
    };
    const PIECES: [&[u8]; 16] = [
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\"",
        b"\\",
        b"\"type\":\"mesh-cni\"",
        b"\"plugins\":[",
        b"\xff",
        b"\0",
        b"\\ud800",
        b"1e999",
        b"\xef\xbb\xbf",
        b"{\"type\":\"mesh-cni\"},",
    ];
    let at = draw(bytes.len() + 1);
    match draw(8) {
        5.. => {
            // A whole element somewhere, so that many results are still valid.
            const WHOLE: [&[u8]; 4] =
                [b"{\"type\":\"mesh-cni\"}, ", b"{\"TYPE\":\"c\"},\n", b"{\"type\":\"loopback\"},", b" "];
            let starts: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(b"{")).collect();
            let at = starts.get(draw(starts.len())).copied().unwrap_or(0);
            bytes.splice(at..at, WHOLE[draw(WHOLE.len())].iter().copied());
        }
        0 => bytes.truncate(at),
        1 if at < bytes.len() => bytes[at] ^= 1 << draw(8),
        2 => {
            let end = (at + draw(40)).min(bytes.len());
            bytes.drain(at..end);
        }
        3 => {
            let end = (at + draw(80)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            let to = draw(bytes.len() + 1);
            bytes.splice(to..to, piece);
        }
        _ => {
            let piece = PIECES[draw(PIECES.len())];
            bytes.splice(at..at, piece.iter().copied());
        }
    }
}

/// A bounded fuzz run: no panic, and every answer keeps its promise. `NOBYPASS_FUZZ_ROUNDS` sets the length.
#[test]
fn fuzz_mangled_files() {
    let rounds =
        std::env::var("NOBYPASS_FUZZ_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20_000);
    let wanted = WantedEntry::from_text(r#"{"type":"mesh-cni","k":[1,{"a":"b"}]}"#, Place::Last).unwrap();
    let corpus: [&str; 4] = [
        r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"a","x":{"y":[1,2]}},{"type":"b"}]}"#,
        "{\n  \"name\": \"n\",\n  \"plugins\": [\n    {\n      \"type\": \"a\"\n    },\n    {\n      \"type\": \"mesh-cni\"\n    }\n  ]\n}\n",
        r#"{"name":"n","type":"bridge","ipam":{"type":"host-local"},"cniVersion":"0.3.1"}"#,
        r#"{"name":"m","type":"multus","delegates":[{"name":"n","plugins":[{"type":"a"},{"type":"mesh-cni"}]}]}"#,
    ];
    let mut seed = 0x9e37_79b9_7f4a_7c15;
    let mut writes = 0;
    for round in 0..rounds {
        let mut bytes = corpus[round % corpus.len()].as_bytes().to_vec();
        for _ in 0..=(round / corpus.len()) % 4 {
            mangle(&mut bytes, &mut seed);
        }
        for kind in [FileKind::Conflist, FileKind::Conf] {
            let shown = || String::from_utf8_lossy(&bytes).into_owned();
            match plan(kind, &bytes, &wanted, Options::default()) {
                Plan::Write(out) | Plan::Convert(out) => {
                    writes += 1;
                    let again = plan(FileKind::Conflist, &out, &wanted, Options::default());
                    assert_eq!(again, Plan::Leave(Leave::Satisfied), "{}", shown());
                    assert!(serde_json::from_slice::<serde::de::IgnoredAny>(&out).is_ok(), "{}", shown());
                }
                Plan::Refuse(Refusal::SelfCheck) if kind == FileKind::Conflist => panic!("{}", shown()),
                Plan::Leave(_) | Plan::Refuse(_) => {}
            }
            match unplan(kind, &bytes, Remove::Type(OWN)) {
                Plan::Write(out) => {
                    let again = unplan(kind, &out, Remove::Type(OWN));
                    assert_eq!(again, Plan::Leave(Leave::Satisfied), "{}", shown());
                }
                Plan::Convert(_) => panic!("removal converts nothing"),
                Plan::Leave(_) | Plan::Refuse(_) => {}
            }
            let _ = (edit::members(&shown()), edit::elements(&shown()), edit::without(&shown(), "name"));
        }
    }
    assert!(writes > rounds / 20, "the run reached real edits: {writes}");
}
