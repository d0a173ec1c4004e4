//! Tests a container that the host has no route to: the ports are mapped, as in Go; only
//! `route_localnet` cannot be set.

use std::path::PathBuf;

use cni_testkit::{Attachment, Outcome, bin_dir};
use conformance::patched;
use serde_json::{Value, json};

use super::world::{BACKENDS, World, each, map};

/// No route at all, and the kinds of routes that drop packets.
const KINDS: [&str; 5] = ["", "blackhole", "unreachable", "prohibit", "throw"];

/// One call for a container at 10.7.0.2 and fd00:7::2, or at the latter alone, on a node with
/// routes of this kind to it.
struct Stranded<'w> {
    attachment: Attachment<'w>,
    prev: Value,
    path: String,
}

impl<'w> Stranded<'w> {
    fn new(world: &'w World, kind: &str, addresses: &[&str]) -> Stranded<'w> {
        if !kind.is_empty() {
            world.node.ip(&[&format!("route add {kind} 10.7.0.0/24"), &format!("route add {kind} fd00:7::/64")]);
        }
        let container = world.node.container();
        let ips: Vec<Value> = addresses.iter().map(|address| json!({"address": address})).collect();
        let mut attachment = Attachment::new(&world.node, &container, world.config(json!([map(8080, 80, "tcp")])));
        attachment.id = "stranded".to_owned();
        Stranded { attachment, prev: json!({"cniVersion": "1.0.0", "ips": ips}), path: world.backend.path(&world.node) }
    }

    #[track_caller]
    fn call(&self, verb: &str) -> Outcome {
        self.attachment.invocation(verb, Some(&self.prev)).env("PATH", &self.path).run()
    }
}

const BOTH: [&str; 2] = ["10.7.0.2/24", "fd00:7::2/64"];

#[test]
fn add_without_a_route_to_the_container_maps_the_port() {
    each(&BACKENDS, |world| {
        for kind in KINDS {
            let world = World::new(world.backend);
            let stranded = Stranded::new(&world, kind, &BOTH);
            for verb in ["ADD", "CHECK"] {
                stranded.call(verb).success();
                for target in ["10.7.0.2:80", "[fd00:7::2]:80"] {
                    let count = world.rules().matches(target).count();
                    assert_eq!(count, 1, "{kind} {:?} {target}\n{}", world.backend, world.rules());
                }
            }
            stranded.call("DEL").success();
            assert!(!world.rules().contains(":80"), "{kind} {:?}\n{}", world.backend, world.rules());
        }
    });
}

#[test]
fn add_without_a_route_reports_that_127_0_0_1_is_not_mapped() {
    each(&BACKENDS[..1], |world| {
        for kind in KINDS {
            let world = World::new(world.backend);
            let stranded = Stranded::new(&world, kind, &BOTH);
            let added = stranded.call("ADD");
            added.success();
            for words in ["failed to find the route to 10.7.0.2: ", "127.0.0.1"] {
                assert!(added.stderr.contains(words), "{kind}: {}", added.report());
            }
            stranded.call("DEL").success();
        }
    });
}

#[test]
fn add_needs_no_route_without_ipv4_or_without_snat() {
    each(&BACKENDS[..1], |world| {
        for (addresses, patch) in [(&BOTH[1..], json!({})), (&BOTH[..], json!({"snat": false}))] {
            let mut stranded = Stranded::new(world, "", addresses);
            stranded.attachment.config = patched(stranded.attachment.config, patch);
            let added = stranded.call("ADD");
            added.success();
            assert!(!added.stderr.contains("route"), "{}", added.report());
            stranded.call("DEL").success();
        }
    });
}

#[test]
fn an_interface_without_sysctls_does_not_fail_the_add() {
    each(&BACKENDS[..1], |world| {
        world.node.ip(&["link add far type bridge", "link set far up", "address add 10.7.0.1/24 dev far"]);
        let hide = "mount -t tmpfs none /proc/sys/net/ipv4/conf";
        let text = format!("#!/bin/sh\nexec unshare -m sh -ec '{hide}; exec {}/portmap'\n", bin_dir().display());
        let folder = world.node.script("hidden/portmap", &text).parent().map(PathBuf::from).unwrap_or_default();
        let mut stranded = Stranded::new(world, "", &BOTH);
        stranded.attachment = stranded.attachment.by(folder);
        let added = stranded.call("ADD");
        added.success();
        for words in ["route_localnet", "127.0.0.1"] {
            assert!(added.stderr.contains(words), "{}", added.report());
        }
        stranded.call("CHECK").success();
        stranded.call("DEL").success();
        world.node.ip(&["link del far"]);
    });
}
