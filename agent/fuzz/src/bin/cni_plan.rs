//! Any bytes as a CNI config: no panic, valid stays valid, a second plan changes nothing, removal undoes.
#![no_main]
#![expect(clippy::panic, reason = "a fuzz target reports by panicking")]

use libfuzzer_sys::fuzz_target;
use nobypass::cni::entry::{Place, WantedEntry};
use nobypass::cni::plan::{FileKind, Leave, Options, Plan, Remove, plan, unplan};
use nobypass::cni::refusal::Refusal;

const OWN: &str = "mesh-cni";

fn valid(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok()
}

fuzz_target!(|bytes: &[u8]| {
    let Some(wanted) = WantedEntry::from_text(r#"{"type":"mesh-cni","k":[1,{"a":"b"}]}"#, Place::Last).ok()
    else {
        panic!("the wanted entry is not valid");
    };
    for kind in [FileKind::Conflist, FileKind::Conf] {
        match plan(kind, bytes, &wanted, Options::default()) {
            Plan::Write(out) | Plan::Convert(out) => {
                assert!(valid(&out), "a valid file became an invalid one");
                let again = plan(FileKind::Conflist, &out, &wanted, Options::default());
                assert_eq!(again, Plan::Leave(Leave::Satisfied), "a second plan changes something");
            }
            Plan::Refuse(Refusal::SelfCheck) if kind == FileKind::Conflist => {
                panic!("the plan distrusts itself")
            }
            Plan::Leave(_) | Plan::Refuse(_) => {}
        }
        match unplan(kind, bytes, Remove::Type(OWN)) {
            Plan::Write(out) => {
                assert!(valid(&out), "removal broke a file");
                assert_eq!(
                    unplan(kind, &out, Remove::Type(OWN)),
                    Plan::Leave(Leave::Satisfied),
                    "entries are left"
                );
            }
            Plan::Convert(_) => panic!("removal converts nothing"),
            Plan::Leave(_) | Plan::Refuse(_) => {}
        }
    }
});
