//! What planning one CNI config costs: `cargo bench --bench cni_plan`.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark")]

use std::hint::black_box;
use std::time::Instant;

use nobypass::cni::entry::{Place, WantedEntry};
use nobypass::cni::plan::{FileKind, Options, Plan, plan};

const ENTRY: &str = r#"{"name":"linkerd-cni","type":"linkerd-cni","log_level":"info","kubernetes":{"kubeconfig":"/etc/cni/net.d/ZZZ-linkerd-cni-kubeconfig"},"linkerd":{"incoming-proxy-port":4143,"outgoing-proxy-port":4140,"proxy-uid":2102,"ports-to-redirect":[],"inbound-ports-to-ignore":["4191","4190"],"simulate":false,"use-wait-flag":false,"iptables-mode":"nft","ipv6":false}}"#;

/// A list of about `bytes` bytes, over many lines, as Calico writes it.
fn list(bytes: usize) -> String {
    let mut members = String::new();
    let mut nth = 0;
    while members.len() + 300 < bytes {
        members.push_str(&format!(
            "      \"setting_{nth}\": {{\n        \"values\": [1, 2.50, \"a, b\"]\n      }},\n"
        ));
        nth += 1;
    }
    format!(
        "{{\n  \"name\": \"k8s-pod-network\",\n  \"cniVersion\": \"0.3.1\",\n  \"plugins\": [\n    {{\n{members}      \"type\": \"calico\",\n      \"policy\": {{\"type\": \"k8s\"}}\n    }},\n    {{\"type\": \"portmap\", \"snat\": true}}\n  ]\n}}\n"
    )
}

fn measure(what: &str, bytes: &[u8], wanted: &WantedEntry) {
    let rounds = 2_000;
    let mut samples: Vec<u128> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            black_box(plan(FileKind::Conflist, black_box(bytes), wanted, Options::default()));
            start.elapsed().as_nanos()
        })
        .collect();
    samples.sort_unstable();
    let at = |share: usize| samples.get(rounds * share / 100).copied().unwrap_or_default();
    println!("{what:<10} {:>8} bytes  p50 {:>8} ns  p99 {:>8} ns", bytes.len(), at(50), at(99));
}

fn main() {
    let wanted = WantedEntry::from_text(ENTRY, Place::Last).unwrap();
    for bytes in [500, 2_048, 20_000, 200_000] {
        let bare = list(bytes);
        let Plan::Write(patched) = plan(FileKind::Conflist, bare.as_bytes(), &wanted, Options::default())
        else {
            unreachable!("a bare list is written");
        };
        measure("write", bare.as_bytes(), &wanted);
        measure("satisfied", &patched, &wanted);
    }
}
