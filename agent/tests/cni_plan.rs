//! The CNI planner on files as they are found on nodes: tables of inputs with the answer for each.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests stop at the first surprise")]

use std::ffi::OsStr;

use nobypass::cni::entry::{Place, WantedEntry};
use nobypass::cni::plan::{
    self, FileKind, Leave, Options, Plan, Remove, aside_name, list_name, original_name,
};
use nobypass::cni::refusal::Refusal;

const ENTRY: &str = r#"{"name":"linkerd-cni","type":"linkerd-cni","kubernetes":{"kubeconfig":"/etc/k"},"n":9007199254740993}"#;

fn wanted() -> WantedEntry {
    WantedEntry::from_text(ENTRY, Place::Last).unwrap()
}

fn plan(name: &str, text: impl AsRef<[u8]>) -> Plan {
    plan_with(name, text, &wanted(), Options::default())
}

fn plan_with(name: &str, text: impl AsRef<[u8]>, wanted: &WantedEntry, options: Options) -> Plan {
    plan::plan(FileKind::of(OsStr::new(name)).unwrap(), text.as_ref(), wanted, options)
}

#[track_caller]
fn written(plan: Plan) -> String {
    match plan {
        Plan::Write(bytes) => String::from_utf8(bytes.to_vec()).unwrap(),
        other => panic!("expected a write, got {other:?}"),
    }
}

#[track_caller]
fn converted(plan: Plan) -> String {
    match plan {
        Plan::Convert(bytes) => String::from_utf8(bytes.to_vec()).unwrap(),
        other => panic!("expected a conversion, got {other:?}"),
    }
}

#[track_caller]
fn refused(plan: Plan) -> Refusal {
    match plan {
        Plan::Refuse(refusal) => refusal,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

/// Plans, checks that the answer is final, and that taking the entry out gives the first text again.
#[track_caller]
fn patched(text: &str) -> String {
    let out = written(plan("10-x.conflist", text));
    assert_eq!(plan("10-x.conflist", &out), Plan::Leave(Leave::Satisfied));
    let back = plan::unplan(FileKind::Conflist, out.as_bytes(), Remove::Exactly(&wanted()));
    assert_eq!(written(back), text, "removing the entry gives the owner's bytes again");
    out
}

#[test]
fn compact_list() {
    let out =
        patched(r#"{"cniVersion":"0.3.1","name":"x","plugins":[{"type":"bridge"},{"type":"portmap"}]}"#);
    let expected = format!(
        r#"{{"cniVersion":"0.3.1","name":"x","plugins":[{{"type":"bridge"}},{{"type":"portmap"}},{ENTRY}]}}"#
    );
    assert_eq!(out, expected);
}

#[test]
fn pretty_list_keeps_its_indentation_and_final_newline() {
    let text = "{\n  \"name\": \"k8s-pod-network\",\n  \"plugins\": [\n    {\n      \"type\": \"calico\",\n      \"mtu\": 0\n    },\n    {\"type\": \"portmap\"}\n  ]\n}\n";
    let out = patched(text);
    assert!(
        out.contains("    {\"type\": \"portmap\"},\n    {\"name\": \"linkerd-cni\", \"type\": "),
        "{out}"
    );
    assert!(out.ends_with("}\n  ]\n}\n"), "{out}");
}

#[test]
fn tabs_and_crlf() {
    let text = "{\r\n\t\"name\": \"x\",\r\n\t\"plugins\": [\r\n\t\t{\r\n\t\t\t\"type\": \"bridge\"\r\n\t\t}\r\n\t]\r\n}";
    let out = patched(text);
    let entry = "},\r\n\t\t{\r\n\t\t\t\"name\": \"linkerd-cni\",\r\n\t\t\t\"type\": \"linkerd-cni\",\r\n\t\t\t\"kubernetes\": {\r\n\t\t\t\t\"kubeconfig\": \"/etc/k\"\r\n\t\t\t},\r\n\t\t\t\"n\": 9007199254740993\r\n\t\t}\r\n\t]\r\n}";
    assert!(out.ends_with(entry), "{out:?}");
    assert!(!out.replace("\r\n", "").contains('\n'));
}

#[test]
fn bracket_and_brace_on_one_line() {
    let text = "{\n  \"name\": \"x\",\n  \"plugins\": [{\n    \"type\": \"bridge\"\n  }]\n}\n";
    let out = patched(text);
    assert!(out.contains("  },{\n    \"name\": \"linkerd-cni\","), "{out}");
}

/// Linkerd's and Istio's Go installers sort keys, round numbers and escape `<`.
#[test]
fn key_order_numbers_and_escapes_stay() {
    patched(
        r#"{"z":1,"name":"x","a":{"big":9007199254740993,"f":1.10,"e":1E+2,"neg":-0},"plugins":[{"type":"b","s":"<&>\u003c\/é\ud83d\ude00"}],"b":null}"#,
    );
}

#[test]
fn an_equal_entry_in_its_place_is_left_in_any_spelling() {
    for entry in [
        ENTRY.to_owned(),
        r#"{ "n":9007199254740993, "kubernetes" : {"kubeconfig":"\/etc\/k"},"type":"linkerd\u002dcni","name":"linkerd-cni"}"#.to_owned(),
        format!("{}{}", ENTRY.replace("{\"name\"", "{\"n\":1,\"name\""), ""),
    ] {
        let text = format!(r#"{{"name":"x","plugins":[{{"type":"a"}},{entry}]}}"#);
        assert_eq!(plan("10-x.conflist", &text), Plan::Leave(Leave::Satisfied), "{entry}");
    }
}

#[test]
fn numbers_are_compared_as_written() {
    let other = ENTRY.replace("9007199254740993", "9007199254740992");
    let out = written(plan("10-x.conflist", format!(r#"{{"name":"x","plugins":[{{"type":"a"}},{other}]}}"#)));
    assert_eq!(out, format!(r#"{{"name":"x","plugins":[{{"type":"a"}},{ENTRY}]}}"#));
}

#[test]
fn a_changed_entry_is_replaced_where_it_stands() {
    let text = r#"{"name":"x","plugins":[{"type":"a"} , {"type":"linkerd-cni","old":true} ] }"#;
    let out = written(plan("10-x.conflist", text));
    assert_eq!(out, format!(r#"{{"name":"x","plugins":[{{"type":"a"}} , {ENTRY} ] }}"#));
}

/// Two stale entries leave two in Linkerd's Go installer, and Istio checks presence only (istio#55968, #55913: another
/// tool moved the entry to where it does not run).
#[test]
fn duplicates_go_and_the_place_is_checked() {
    let list = |plugins: &str| format!(r#"{{"name":"x","plugins":[{plugins}]}}"#);
    let (a, b) = (r#"{"type":"a"}"#, r#"{"type":"b"}"#);
    let stale = r#"{"type":"linkerd-cni","v":1}"#;
    let expected = list(&format!("{a},{b},{ENTRY}"));
    for plugins in [
        format!("{stale},{stale},{a},{b}"),
        format!("{a},{stale},{b},{stale},{stale}"),
        format!("{a},{ENTRY},{b}"),
        format!("{ENTRY},{a},{b},{ENTRY}"),
        format!("{a},{b},{ENTRY},{ENTRY}"),
        format!("{a},{b},{stale},{ENTRY}"),
        format!("{a},{b},{ENTRY},{stale}"),
        format!("{stale},{a},{stale},{b}"),
    ] {
        assert_eq!(written(plan("10-x.conflist", list(&plugins))), expected, "{plugins}");
    }
}

#[test]
fn any_place_leaves_an_entry_where_it_is() {
    let wanted = WantedEntry::from_text(ENTRY, Place::Anywhere).unwrap();
    let list = |plugins: &str| format!(r#"{{"name":"x","plugins":[{plugins}]}}"#);
    let plan = |plugins: &str| plan_with("1.conflist", list(plugins), &wanted, Options::default());
    let a = r#"{"type":"a"}"#;
    let stale = r#"{"type":"linkerd-cni","v":1}"#;
    assert_eq!(plan(&format!("{ENTRY},{a}")), Plan::Leave(Leave::Satisfied));
    assert_eq!(written(plan(a)), list(&format!("{a},{ENTRY}")));
    assert_eq!(written(plan(&format!("{stale},{a}"))), list(&format!("{ENTRY},{a}")));
    assert_eq!(written(plan(&format!("{stale},{ENTRY},{a},{stale}"))), list(&format!("{ENTRY},{a}")));
}

#[test]
fn every_bad_input_has_its_reason() {
    let big = format!(r#"{{"name":"x","pad":"{}","plugins":[]}}"#, "x".repeat(plan::MAX_BYTES));
    let deep = format!(
        r#"{{"name":"x","d":{}{},"plugins":[{{"type":"a"}}]}}"#,
        "[".repeat(10_000),
        "]".repeat(10_000)
    );
    let table: &[(&str, &[u8], &str)] = &[
        ("1.conflist", b"", "empty"),
        ("1.conf", b" \r\n\t", "empty"),
        ("1.conflist", br#"{"name":"x","plugins":[{"type":"a"}"#, "incomplete"),
        ("1.conflist", b"{\"name\":\"\xc3", "incomplete"),
        ("1.conflist", b"\xef\xbb\xbf{}", "bom"),
        ("1.conflist", b"\xff\xfe{\0}\0", "bom"),
        ("1.conflist", b"{\"name\":\"\xff\"}", "not_utf8"),
        ("1.conflist", b"\0\0\0\0", "syntax"),
        ("1.conflist", b"name: x", "syntax"),
        ("1.conflist", br#"{"name":"x","plugins":[{"type":"a"},]}"#, "syntax"),
        ("1.conflist", br#"{"name":"x"} // comment"#, "syntax"),
        ("1.conflist", br#"{"name":"x","n":1e400,"plugins":[{"type":"a"}]}"#, "number_range"),
        ("1.conflist", big.as_bytes(), "too_large"),
        ("1.conflist", deep.as_bytes(), "too_deep"),
        ("1.conflist", b"[]", "not_an_object"),
        ("1.conflist", b"null", "not_an_object"),
        ("1.conflist", br#"{"plugins":[{"type":"a"}]}"#, "field"),
        ("1.conflist", br#"{"name":7,"plugins":[{"type":"a"}]}"#, "field"),
        ("1.conflist", br#"{"name":"x","cniVersion":1,"plugins":[{"type":"a"}]}"#, "field"),
        ("1.conflist", br#"{"name":"x"}"#, "field"),
        ("1.conflist", br#"{"name":"x","type":"bridge"}"#, "field"),
        ("1.conflist", br#"{"name":"x","plugins":{}}"#, "field"),
        ("1.conflist", br#"{"name":"x","plugins":["a"]}"#, "field"),
        ("1.conflist", br#"{"name":"x","plugins":[{"name":"a"}]}"#, "field"),
        ("1.conflist", br#"{"name":"x","plugins":[{"type":""}]}"#, "field"),
        ("1.conflist", br#"{"name":"x","plugins":[{"type":[]}]}"#, "field"),
        ("1.conflist", br#"{"name":"x","plugins":[]}"#, "no_plugins"),
        ("1.conf", br#"{"name":"x","plugins":[{"type":"a"}]}"#, "list_in_conf"),
        ("1.json", br#"{"name":"x","plugins":[{"type":"a"}]}"#, "list_in_conf"),
        ("1.conf", br#"{"name":"x"}"#, "field"),
        ("1.conf", br#"{"type":"bridge"}"#, "field"),
    ];
    for (name, bytes, label) in table {
        let refusal = refused(plan(name, bytes));
        assert_eq!(
            refusal.label(),
            *label,
            "{name} {:?}",
            String::from_utf8_lossy(&bytes[..bytes.len().min(60)])
        );
        assert!(Refusal::LABELS.contains(&refusal.label()));
        assert!(!refusal.to_string().is_empty());
        assert!(matches!(
            plan::unplan(FileKind::of(OsStr::new(name)).unwrap(), bytes, Remove::Type("linkerd-cni")),
            Plan::Refuse(_) | Plan::Leave(Leave::Satisfied)
        ));
    }
}

/// A cut JSON object is never valid, so a half-written file is told from a finished one at every byte.
#[test]
fn every_prefix_of_a_file_is_unfinished() {
    let text =
        "{\n\t\"name\": \"x\", \"plugins\": [{\"type\": \"a\", \"n\": [1.5e3, true, null, \"\\u00e9é\"]}]}";
    for end in 0..text.len() {
        let refusal = refused(plan("1.conflist", &text.as_bytes()[..end]));
        assert!(matches!(refusal, Refusal::Empty | Refusal::Incomplete), "{end}: {refusal:?}");
    }
}

/// Of two equal keys the last counts for libcni (a Go map), so it is the one edited; nothing else is touched.
#[test]
fn duplicate_keys_follow_the_last() {
    let text = r#"{"name":7,"name":"x","plugins":[],"plugins":[{"type":"b","type":"a"}]}"#;
    let out = patched(text);
    assert_eq!(
        out,
        format!(r#"{{"name":7,"name":"x","plugins":[],"plugins":[{{"type":"b","type":"a"}},{ENTRY}]}}"#)
    );
    let shadowed = r#"{"name":"x","plugins":[{"type":"a"}],"plugins":7}"#;
    assert_eq!(refused(plan("1.conflist", shadowed)).label(), "field");
}

/// libcni looks `plugins` up in a map, with its case, but decodes each plugin into a struct, without.
#[test]
fn case_of_keys_is_go_s() {
    assert_eq!(refused(plan("1.conflist", r#"{"name":"x","Plugins":[{"type":"a"}]}"#)).label(), "field");
    let both = r#"{"name":"x","Plugins":[{"type":"b"}],"plu\u0067ins":[{"TYPE":"a"}]}"#;
    assert_eq!(patched(both), both.replace(r#"{"TYPE":"a"}]"#, &format!(r#"{{"TYPE":"a"}},{ENTRY}]"#)));
    let own = r#"{"name":"x","plugins":[{"type":"a"},{"Type":"linkerd-cni"}]}"#;
    assert_eq!(
        written(plan("1.conflist", own)),
        format!(r#"{{"name":"x","plugins":[{{"type":"a"}},{ENTRY}]}}"#)
    );
}

/// linkerd2#10738, #4049: a network of our own would leave pods without an address.
#[test]
fn never_a_network_of_its_own() {
    let only = format!(r#"{{"name":"x","plugins":[{ENTRY},{ENTRY}]}}"#);
    assert_eq!(plan("1.conflist", &only), Plan::Leave(Leave::OnlyMesh));
    assert_eq!(
        plan("01-linkerd-cni.conf", r#"{"name":"l","type":"linkerd-cni"}"#),
        Plan::Leave(Leave::OnlyMesh)
    );
    let back = plan::unplan(FileKind::Conflist, only.as_bytes(), Remove::Type("linkerd-cni"));
    assert_eq!(back, Plan::Leave(Leave::OnlyMesh));
}

#[test]
fn loopback_is_not_a_network() {
    let list = r#"{"name":"lo","plugins":[{"type":"loopback"}]}"#;
    assert_eq!(plan("99.conflist", list), Plan::Leave(Leave::Loopback));
    assert_eq!(
        plan("99-loopback.conf", r#"{"cniVersion":"0.3.1","type":"loopback"}"#),
        Plan::Leave(Leave::Loopback)
    );
    patched(r#"{"name":"x","plugins":[{"type":"loopback"},{"type":"bridge"}]}"#);
}

/// linkerd2#11250: patched in multus and in its delegate, the plugin would run twice.
#[test]
fn multus_is_left_and_its_delegate_patched() {
    let meta = [
        r#"{"name":"multus-cni-network","type":"multus","kubeconfig":"/k","delegates":[{"name":"c","plugins":[{"type":"calico"}]}]}"#,
        r#"{"name":"m","type":"multus-shim","daemonSocketDir":"/run"}"#,
        r#"{"name":"m","type":"genie-like","Delegates":[]}"#,
        r#"{"name":"m","type":"x","clusterNetwork":"/etc/cni/net.d/10-canal.conflist"}"#,
    ];
    for text in meta {
        assert_eq!(plan("00-multus.conf", text), Plan::Leave(Leave::MetaPlugin), "{text}");
        let list = format!(r#"{{"name":"m","plugins":[{text}]}}"#);
        assert_eq!(plan("00-multus.conflist", &list), Plan::Leave(Leave::MetaPlugin), "{text}");
        // With its entry in there already: left, or cleaned where no installer of the mesh would put it back.
        let twice = format!(r#"{{"name":"m","plugins":[{text},{ENTRY}]}}"#);
        assert_eq!(plan("00-multus.conflist", &twice), Plan::Leave(Leave::MetaPlugin));
        let options = Options { clean_meta: true, ..Options::default() };
        assert_eq!(written(plan_with("00-multus.conflist", &twice, &wanted(), options)), list);
        assert_eq!(plan_with("0.conflist", &list, &wanted(), options), Plan::Leave(Leave::MetaPlugin));
    }
    patched("{\n  \"name\": \"canal\",\n  \"plugins\": [\n    {\"type\": \"calico\"}\n  ]\n}\n");
}

/// istio#32137 (name and version changed on conversion), istio#33971 (list JSON at `.conf`), linkerd2#9343.
#[test]
fn a_conf_becomes_a_list_with_its_own_name_and_version() {
    let text = "{\n  \"cniVersion\": \"0.3.0\",\n  \"name\": \"terway\",\n  \"type\": \"terway\",\n  \"eniip\": [1, 2.50]\n}\n";
    let out = converted(plan("10-terway.conf", text));
    let expected = "{\n  \"cniVersion\": \"0.3.0\",\n  \"name\": \"terway\",\n  \"plugins\": [\n    {\n      \"type\": \"terway\",\n      \"eniip\": [\n        1,\n        2.50\n      ]\n    },\n    {\n      \"name\": \"linkerd-cni\",\n      \"type\": \"linkerd-cni\",\n      \"kubernetes\": {\n        \"kubeconfig\": \"/etc/k\"\n      },\n      \"n\": 9007199254740993\n    }\n  ]\n}\n";
    assert_eq!(out, expected);
    assert_eq!(plan("10-terway.conflist", &out), Plan::Leave(Leave::Satisfied));
    // Not JSON alone: also `.json`, without a version, keys in other cases, duplicates.
    let out = converted(plan("10-x.json", r#"{"Type":"b","NAME":"y","name":"x\u0041","k":1,"k":2}"#));
    let value: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(value["name"], "xA");
    assert!(value.get("cniVersion").is_none());
    assert!(out.contains("\"k\": 1,\n      \"k\": 2"), "{out}");
    let options = Options { convert: false, ..Options::default() };
    assert_eq!(plan_with("10-terway.conf", text, &wanted(), options), Plan::Leave(Leave::SinglePlugin));
}

#[test]
fn no_conversion_that_would_call_another_plugin() {
    // As a file this is plugin "b", as an element of a list plugin "a".
    let refusal = refused(plan("1.conf", r#"{"name":"x","type":"a","Type":"b"}"#));
    assert_eq!(refusal, Refusal::SelfCheck);
}

#[test]
fn a_list_of_a_version_that_the_plugin_does_not_support_is_left() {
    let wanted = wanted().with_versions(vec!["0.4.0".into(), "1.0.0".into()]);
    let list = |head: &str| format!(r#"{{{head}"name":"x","plugins":[{{"type":"a"}}]}}"#);
    let plan = |head| plan_with("1.conflist", list(head), &wanted, Options::default());
    assert_eq!(refused(plan(r#""cniVersion":"1.1.0","#)).label(), "version");
    assert_eq!(refused(plan("")).label(), "version");
    written(plan(r#""cniVersion":"1.0.0","#));
    written(plan(r#""cniVersion":"1.1.0","cniVersions":["1.0.0","1.1.0"],"#));
    let conf = r#"{"cniVersion":"0.2.0","name":"x","type":"a"}"#;
    assert_eq!(refused(plan_with("1.conf", conf, &wanted, Options::default())).label(), "version");
}

#[test]
fn removal_takes_only_its_own() {
    let other = ENTRY.replace("/etc/k", "/other");
    let text = format!(r#"{{"name":"x","plugins":[ {ENTRY}, {{"type":"a"}} ,{other},{ENTRY}]}}"#);
    let exactly = plan::unplan(FileKind::Conflist, text.as_bytes(), Remove::Exactly(&wanted()));
    assert_eq!(written(exactly), format!(r#"{{"name":"x","plugins":[ {{"type":"a"}} ,{other}]}}"#));
    let all = plan::unplan(FileKind::Conflist, text.as_bytes(), Remove::Type("linkerd-cni"));
    assert_eq!(written(all), r#"{"name":"x","plugins":[ {"type":"a"}]}"#);
    let none =
        plan::unplan(FileKind::Conflist, br#"{"name":"x","plugins":[{"type":"a"}]}"#, Remove::Type("m"));
    assert_eq!(none, Plan::Leave(Leave::Satisfied));
    assert_eq!(
        plan::unplan(FileKind::Conf, br#"{"name":"x","type":"a"}"#, Remove::Type("m")),
        Plan::Leave(Leave::Satisfied)
    );
}

#[test]
fn names() {
    let kind = |name: &str| FileKind::of(OsStr::new(name));
    for (name, expected) in [
        ("10-a.conf", Some(FileKind::Conf)),
        ("10-a.json", Some(FileKind::Json)),
        ("10-a.conflist", Some(FileKind::Conflist)),
        (".hidden.conflist", Some(FileKind::Conflist)),
        (".conf", Some(FileKind::Conf)),
        ("conf", None),
        ("10-a.CONF", None),
        ("10-a.conflist.cilium_bak", None),
        (".05-cilium.conflist123456", None),
        ("10-a.conflist.install", None),
        ("ZZZ-linkerd-cni-kubeconfig", None),
        ("10-a.conf~", None),
        (".10-a.conf.swp", None),
        ("", None),
    ] {
        assert_eq!(kind(name), expected, "{name}");
    }
    assert_eq!(list_name(OsStr::new("10-a.b.conf")).unwrap(), "10-a.b.conflist");
    assert_eq!(list_name(OsStr::new("10-a.json")).unwrap(), "10-a.conflist");
    assert_eq!(list_name(OsStr::new("10-a.conflist")), None);
    let aside = aside_name(OsStr::new("10-a.conf"));
    assert_eq!(FileKind::of(&aside), None);
    assert_eq!(original_name(&aside).unwrap(), "10-a.conf");
    assert_eq!(original_name(OsStr::new("10-a.conf")), None);
    assert!("10-a.conf" < "10-a.conflist", "until it is moved aside, the single plugin is the active one");
}
