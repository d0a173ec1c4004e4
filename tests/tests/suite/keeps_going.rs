//! DEL continues after an error: whichever of its system calls fails, everything that does not
//! depend on that call is still removed. The error is reported, and the next DEL finds the rest.
//!
//! ENOBUFS on a netlink socket is reported at once; after other errors the plugins try again.

use std::net::UdpSocket;

use cni_testkit::trace::{self, Act, Plan, Traced};
use cni_testkit::{Attachment, Node, bin_dir, probe, require, rounds};
use conformance::{bridge, choose_iptables, patched};
use nix::errno::Errno;
use serde_json::json;

use crate::bridge::chained::made_before;
use crate::portmap::world::{Backend, World, ask_udp, at, map, udp_client};
use crate::tuning::{self, data_dir, pod, prev, tuned};

/// The number of complaints after which a test stops.
const ENOUGH: usize = 20;

/// Runs `live` once for each call of those names that a DEL makes, and lets that call fail. `live`
/// adds, runs DEL with the plan, and returns what is wrong afterwards.
#[track_caller]
fn with_each_failing(victim: &str, names: &[&str], live: impl Fn(&Plan) -> (Traced, Vec<String>)) {
    let never = Plan { victim: victim.to_owned(), at: u64::MAX, act: Act::Fail(Errno::ENOBUFS) };
    // The first round finds fewer resources on the node than all later ones.
    live(&never);
    let (honest, mut complaints) = live(&never);
    honest.outcome.success();
    let is_meant = |hit: &trace::Hit| !hit.starting && names.contains(&hit.call.as_str());
    let points: Vec<u64> = (1..).zip(&honest.all).filter(|(_, hit)| is_meant(hit)).map(|(at, _)| at).collect();
    assert!(points.len() > 3, "{names:?} are not what a DEL of {victim} calls: {:?}", honest.all);
    let some = usize::try_from(rounds(points.len() as u64)).unwrap();
    for at in points.iter().copied().step_by(points.len().div_ceil(some)) {
        if complaints.len() > ENOUGH {
            break;
        }
        let (traced, wrong) = live(&Plan { at, ..never.clone() });
        let call = traced.hit.as_ref().map_or("none", |hit| hit.call.as_str());
        complaints.extend(wrong.iter().map(|wrong| format!("call {at}, {call}: {wrong}\n{}", traced.outcome.report())));
    }
    assert!(complaints.is_empty(), "{} complaints\n{}", complaints.len(), complaints.join("\n"));
}

/// After a DEL that reported success nothing may be left.
fn unless_told(traced: &Traced, left: &[String]) -> Option<String> {
    (traced.outcome.status == Some(0) && !left.is_empty()).then(|| format!("not a word of {left:?}"))
}

/// The interface belongs to the earlier plugin and stays, so an address in the container answers as
/// long as the port exists.
#[test]
fn bridge_del_removes_port_or_address_and_the_next_the_other() {
    require!(trace::supported());
    let node = Node::new();
    let container = node.container();
    let prev = made_before(&node, &container);
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"]));
    let left = || {
        let port = node.link("host0").expect("it is the other plugin's to delete");
        let mut left: Vec<String> = container.addresses("eth0");
        left.extend(port["master"].as_str().map(str::to_owned));
        (left.len(), left, port["ifalias"].as_str().map(str::to_owned))
    };
    with_each_failing("bridge", &["open", "openat", "setns", "sendto", "recvfrom"], |plan| {
        let result = attachment.add_after(&prev).success();
        let traced = attachment.invocation("DEL", Some(&result)).traced(plan);
        let mut wrong = Vec::new();
        let (count, what, _) = left();
        if count > 1 {
            wrong.push(format!("{what:?} are both left"));
        }
        wrong.extend(unless_told(&traced, &what));
        attachment.del_with(&result).success();
        let (count, what, alias) = left();
        if count > 0 || alias.is_some() || !node.reservations("net1").is_empty() {
            wrong.push(format!("after another DEL {what:?} is left, and the port's alias {alias:?}"));
            for address in container.addresses("eth0") {
                container.exec(&["ip", "address", "del", &address, "dev", "eth0"]);
            }
            node.exec(&["ip", "link", "set", "host0", "nomaster", "alias", ""]);
        }
        (traced, wrong)
    });
    node.exec(&["ip", "link", "del", "host0"]);
}

#[track_caller]
fn one_family_goes_without_the_other(variant: &str) {
    require!(trace::supported());
    require!(probe::tool(&format!("iptables-{variant}")));
    let node = Node::new();
    choose_iptables(&node, variant);
    let container = node.container();
    let network = json!({"ipMasq": true, "ipMasqBackend": "iptables"});
    let attachment =
        Attachment::new(&node, &container, patched(bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]), network));
    let left = || {
        let families = ["iptables-save", "ip6tables-save"].into_iter();
        let with_rules = families.filter(|save| node.exec(&[save, "-t", "nat"]).contains(&container.id));
        with_rules.map(str::to_owned).collect::<Vec<_>>()
    };
    // A program with empty input exits successfully.
    with_each_failing("bridge", &["open", "openat", "sendto", "recvfrom", "write"], |plan| {
        let result = attachment.add().success();
        assert_eq!(left().len(), 2);
        let traced = attachment.invocation("DEL", Some(&result)).traced(plan);
        let what = left();
        let mut wrong: Vec<String> = unless_told(&traced, &what).into_iter().collect();
        if what.len() > 1 {
            wrong.push("the rules of both families are left".to_owned());
        }
        attachment.del_with(&result).success();
        wrong.extend(left().iter().map(|what| format!("after another DEL {what} is left")));
        (traced, wrong)
    });
}

#[test]
fn bridge_del_removes_the_other_familys_masquerade_rules() {
    one_family_goes_without_the_other("nft");
}

#[test]
fn bridge_del_removes_the_other_familys_legacy_masquerade_rules() {
    one_family_goes_without_the_other("legacy");
}

#[test]
fn tuning_restores_sysctls_if_it_cannot_restore_the_link() {
    require!(trace::supported());
    let node = Node::new();
    let container = pod(&node);
    let keys = json!({"mtu": 1400, "sysctl": {"net.ipv4.conf.all.arp_filter": "1"}});
    let attachment = tuned(&node, &container, keys);
    let left = || {
        let mtu = tuning::state(&container).1;
        let mut left: Vec<String> =
            Some(mtu).filter(|mtu| *mtu != 1500).map(|mtu| format!("mtu {mtu}")).into_iter().collect();
        left.extend((container.sysctl("net/ipv4/conf/all/arp_filter") != "0").then(|| "arp_filter".to_owned()));
        left
    };
    with_each_failing("tuning", &["socket", "bind", "sendto", "recvfrom"], |plan| {
        let result = attachment.add_after(&prev(&container)).success();
        let traced = attachment.invocation("DEL", Some(&result)).traced(plan);
        let what = left();
        let mut wrong = Vec::new();
        if what.iter().any(|what| what == "arp_filter") {
            wrong.push(format!("{what:?} are left"));
        }
        if traced.outcome.status != Some(0) && std::fs::read_dir(data_dir(&node)).unwrap().count() == 0 {
            wrong.push("it fails and leaves no backup to the next DEL".to_owned());
        }
        attachment.del_with(&result).success();
        // A value that the kernel does not take back is only logged, so that the container can end.
        let told = traced.outcome.stderr.contains("not restored: ");
        if !told {
            wrong.extend(left().iter().map(|what| format!("after another DEL {what} is left")));
        }
        container.ip(&["link set eth0 mtu 1500"]);
        (traced, wrong)
    });
}

/// Without `runtimeConfig` and `prevResult` only the rules show which connections were mapped, so
/// both are removed together.
#[test]
fn portmap_deletes_the_connections_of_removed_rules() {
    require!(trace::supported());
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let pod = world.dual();
    pod.serve_udp(53, "pod");
    let config = world.config(json!([map(5353, 53, "udp")]));
    let nothing = world.config(json!([]));
    let tracked = || {
        let table = world.node.proc_net("nf_conntrack");
        table.lines().filter(|line| line.contains(" dport=5353 ")).count()
    };
    with_each_failing("portmap", &["socket", "sendto", "recvfrom"], |plan| {
        pod.add(&config).success();
        let clients: [UdpSocket; 2] = world.client.enter(|| [(); 2].map(|()| udp_client()));
        for client in &clients {
            assert!(world.client.enter(|| ask_udp(client, &at(0, 5353))).is_some());
        }
        assert_eq!(tracked(), 2);
        let traced = pod.invocation(&bin_dir(), "DEL", &nothing, None).traced(plan);
        let (rules, connections) = (world.rules().contains(&pod.container.id), tracked());
        let mut wrong = Vec::new();
        match traced.outcome.status {
            Some(0) if rules => wrong.push("not a word of the rules that are left".to_owned()),
            // A connection that cannot be removed is only logged. Without its own socket the plugin
            // removes none, otherwise all but one.
            Some(0) if connections > 0 => {
                let told = traced.outcome.stderr.contains("portmap: failed to ");
                let opening = traced.hit.as_ref().is_some_and(|hit| hit.call == "socket");
                if !told || (connections > 1 && !opening) {
                    wrong.push(format!("{connections} connections are left"));
                }
            }
            Some(0) => {}
            _ if !rules && connections > 0 => wrong.push(format!("no rules, and {connections} connections are left")),
            _ => {}
        }
        // Both are in the request this time.
        pod.del(&config).success();
        if world.rules().contains(&pod.container.id) || tracked() > 0 {
            wrong.push("after another DEL something is left".to_owned());
        }
        (traced, wrong)
    });
    pod.leave();
}
