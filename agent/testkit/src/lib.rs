//! Test harness: network namespaces, scratch cgroups, a private containerd node, traffic.
