//! Exhausted ranges: the error, and the cost of repeated calls.

use std::fs;

use cni_testkit::{Attachment, Invocation, Node, probe, require};
use conformance::{attach, host_local, patched};
use serde_json::{Value, json};

#[test]
fn the_error_has_the_usage_the_holders_and_advice() {
    let node = Node::new();
    let mut all = attach(&node, &host_local(&node, &["10.1.0.0/29"]), 5);
    // The newest reservation is among the oldest, where the round robin continues.
    all.remove(1).1.del().success();
    all.extend(attach(&node, &all[0].1.config.clone(), 1));
    let late = node.container();
    let failure = Attachment::new(&node, &late, all[0].1.config.clone()).add().fails_with(
        11,
        "failed to allocate for range 0: no IP addresses available in range set: 10.1.0.1-10.1.0.6; 5 of 5 are used",
    );
    let oldest =
        ["oldest reservations: 10.1.0.2 is held by container-0 eth0 for", "10.1.0.4 is held by", "10.1.0.5 is held by"];
    let mut said = failure.details.as_str();
    for words in oldest.into_iter().chain(["DEL or GC", "cnitool ipam gc net1", "a larger range"]) {
        let Some((_, rest)) = said.split_once(words) else { panic!("{words:?} in {failure:?}") };
        said = rest;
    }
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

/// Writes a reservation for every address of `10.1.0.0/<prefix>` as Go does.
fn fill(node: &Node, prefix: u32) {
    let folder = node.data_dir().join("net1");
    fs::create_dir_all(&folder).unwrap();
    let hosts = (1u32 << (32 - prefix)) - 1;
    for host in 2..hosts {
        let address = std::net::Ipv4Addr::from_bits(0x0a01_0000 + host);
        fs::write(folder.join(address.to_string()), format!("c{host}\r\neth0")).unwrap();
    }
}

/// Counts by `strace` how many files a verb opens. The verb fails with `code`, or succeeds.
fn opened(node: &Node, verb: &str, config: &Value, code: Option<u64>) -> usize {
    let container = node.container();
    let trace = node.dir().join("trace");
    let call = Invocation::new(node, "/usr/bin/strace").arg("-f").arg("-qq").arg("-o").arg(&trace);
    let call = call.arg("-e").arg("trace=open,openat").arg(cni_testkit::bin_dir().join("host-local"));
    let outcome = call.command(verb).cni_path(cni_testkit::bin_dir()).container(&container).config(config).run();
    match code {
        Some(code) => drop(outcome.fails_with(code, "")),
        None => drop(outcome.success()),
    }
    fs::read_to_string(&trace).unwrap().lines().count()
}

#[test]
fn a_full_range_is_found_full_without_reading_its_files() {
    require!(probe::tool("strace"));
    let mut seen = Vec::new();
    for prefix in [28, 20] {
        let node = Node::new();
        let config = patched(host_local(&node, &[&format!("10.1.0.0/{prefix}")]), json!({"cniVersion": "1.1.0"}));
        fill(&node, prefix);
        // The first call reads the files, once. Only traced for a short folder.
        if prefix == 28 {
            let first = opened(&node, "ADD", &config, Some(11));
            assert!(first > opened(&node, "ADD", &config, Some(11)), "{first} files");
        } else {
            let container = node.container();
            Attachment::new(&node, &container, config.clone()).add().fails_with(11, "");
        }
        seen.push([("ADD", Some(11)), ("STATUS", None)].map(|(verb, code)| opened(&node, verb, &config, code)));
        for host in fs::read_dir(node.data_dir().join("net1")).unwrap().flatten() {
            fs::remove_file(host.path()).unwrap();
        }
    }
    // The folders of links, of which there are at most 256, and the 64 addresses that an ADD looks
    // up.
    let ([small_add, small_status], [large_add, large_status]) = (seen[0], seen[1]);
    assert!(large_add <= small_add + 320, "ADD: {small_add} files on a /28, {large_add} on a /20");
    assert!(large_status <= small_status + 256, "STATUS: {small_status} files on a /28, {large_status} on a /20");
}

#[test]
fn an_add_in_the_same_boot_reads_only_the_boot_id() {
    require!(probe::tool("strace"));
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/24"]);
    let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
    let (container, trace) = (node.container(), node.dir().join("trace"));
    let call = Invocation::new(&node, "/usr/bin/strace").arg("-f").arg("-qq").arg("-o").arg(&trace);
    let call = call.arg("-e").arg("trace=openat,open,statfs,fstatfs").arg(cni_testkit::bin_dir().join("host-local"));
    call.command("ADD").cni_path(cni_testkit::bin_dir()).container(&container).config(&config).run().success();
    let text = fs::read_to_string(&trace).unwrap();
    assert!(text.contains("boot_id") && !text.contains("uptime") && !text.contains("fstatfs("), "{text}");
    // The lock, the folder, the last address read and written, the reservation. The container is
    // the first one in its folder of links, so that does not exist yet.
    let store = text.lines().skip_while(|line| !line.contains("net1/lock"));
    assert_eq!(store.filter(|line| !line.contains("ENOENT")).count(), 5, "{text}");
    Attachment::new(&node, &container, config).del().success();
    attachment.del().success();
}
