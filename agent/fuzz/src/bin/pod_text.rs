//! Any text as what pods and the kernel tell: cgroup paths, ids and mesh profiles never panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nobypass::cgroup::path::{container_only, from_proc, parse, parse_below};
use nobypass::pods::{ContainerId, PodUid};

fuzz_target!(|text: &str| {
    if let Some(pod) = parse(text) {
        let shown = pod.uid.to_string();
        assert_eq!(PodUid::parse(&shown), Some(pod.uid), "a UID does not survive being shown");
    }
    let (parent, path) = text.split_at(text.floor_char_boundary(text.len() / 2));
    let _ = (parse_below(parent, path), container_only(text), from_proc(text));
    if let Some(id) = ContainerId::parse(text) {
        assert_eq!(ContainerId::parse(&id.to_string()), Some(id), "an id does not survive being shown");
    }
});
