//! `bandwidth`: limits what a container receives and sends, with the Go plugin's numbers, and
//! leaves nothing.

mod swaps;
mod world;

use std::thread;

use cni_testkit::trace::{self, Act, Hit, Plan};
use cni_testkit::{Attachment, Node, require};
use conformance::measure::figure;
use conformance::{VERSION, patched};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::bridge::chained::imitate_pair;
use world::{both, config, ifbs, limits, plug, pod, qdiscs, transfer, unplug};

#[test]
fn both_directions_pass_through_their_filters() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let attachment = Attachment::new(&node, &container, config(both()));
    let result = attachment.add_after(&prev).success();
    let ifb = result["interfaces"][3]["name"].as_str().unwrap();
    for (to_container, link) in [(true, "host0"), (false, ifb)] {
        let passed = || qdiscs(&node, link)[0]["bytes"].as_u64().unwrap();
        let before = passed();
        transfer(&node, &container, to_container, 150_000);
        assert!(passed() - before >= 150_000, "{:?}", qdiscs(&node, link));
    }
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(ifbs(&node), [""; 0]);
    unplug(&node, "host0");
}

#[test]
fn numbers_names_and_result_equal_those_of_go() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let config = patched(config(both()), json!({"name": "cni-plugin-bandwidth-test"}));
    let mut attachment = Attachment::new(&node, &container, config);
    attachment.id = "dummy".to_owned();
    let result = attachment.add_after(&prev).success();
    let added = &result["interfaces"][3];
    assert_eq!((&added["name"], &added["sandbox"]), (&json!("bwpa8eda89404b7"), &Value::Null));
    assert_eq!(result["interfaces"].as_array().unwrap()[..3], prev["interfaces"].as_array().unwrap()[..]);
    let ifb = node.link("bwpa8eda89404b7").unwrap();
    assert_eq!((&ifb["mtu"], &ifb["address"]), (&json!(1400), &added["mac"]));
    let limits = limits(&node, "host0");
    for line in [
        "qdisc tbf 1: dev host0 root refcnt 2 rate 8Mbit burst 100000b lat 25ms",
        "qdisc ingress ffff: dev host0 parent ffff:fff1",
        "qdisc tbf 1: dev bwpa8eda89404b7 root refcnt 2 rate 16Mbit burst 100000b lat 25ms",
        "match 00000000/00000000 at 0",
        "filter protocol all pref 1 u32 chain 0 fh 800::800",
        "flowid 1:1",
        "mirred (Egress Redirect to device bwpa8eda89404b7) stolen",
    ] {
        let words = |text: &str| text.replace("refcnt 2 ", "").replace("refcnt 3 ", "");
        assert!(words(&limits).contains(&words(line)), "{line}\n{limits}");
    }
    attachment.del().success();
    unplug(&node, "host0");
}

#[test]
fn one_direction_creates_only_what_it_needs() {
    let node = Node::new();
    for (number, direction) in ["ingress", "egress"].into_iter().enumerate() {
        let host = format!("host{number}");
        let (container, prev) = pod(&node, &host);
        let keys = json!({format!("{direction}Rate"): 8000, format!("{direction}Burst"): 80});
        let attachment = Attachment::new(&node, &container, config(keys));
        let result = attachment.add_after(&prev).success();
        let kinds: Vec<Value> = qdiscs(&node, &host).iter().map(|qdisc| qdisc["kind"].clone()).collect();
        assert_eq!((kinds, ifbs(&node).len()), (vec![json!(if number == 0 { "tbf" } else { "ingress" })], number));
        assert_eq!(result["interfaces"].as_array().unwrap().len(), 3 + number);
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        unplug(&node, &host);
    }
}

#[test]
fn without_limits_no_request_is_sent_and_no_netns_visited() {
    require!(trace::supported());
    let node = Node::new();
    let container = node.container();
    let prev =
        json!({"cniVersion": VERSION, "interfaces": [{"name": "x", "vendor": 1}], "ips": [{"address": "10.0.0.2/24"}]});
    let attachment = Attachment::new(&node, &container, config(json!({"runtimeConfig": {"bandwidth": null}})));
    let plan = Plan { victim: "bandwidth".to_owned(), at: u64::MAX, act: Act::Signal(Signal::SIGKILL) };
    for verb in ["ADD", "CHECK"] {
        let traced = attachment.invocation(verb, Some(&prev)).traced(&plan);
        traced.outcome.success();
        let is_request = |hit: &&Hit| ["socket", "setns", "sendto", "sendmsg"].contains(&hit.call.as_str());
        assert_eq!(traced.all.iter().find(is_request), None);
        assert!(traced.all.iter().any(|hit| hit.call.starts_with("read")), "{:?}", traced.all);
    }
}

#[test]
fn unknown_members_of_the_earlier_result_are_handed_on() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let prev = patched(prev, json!({"vendor": {"zone": ["a", null]}, "dns": {"ttl": 5}}));
    for version in ["0.3.0", "0.4.0", "1.0.0", "1.1.0"] {
        let prev = patched(prev.clone(), json!({"cniVersion": version}));
        for (limits, interfaces) in [(json!({}), 3), (both(), 4)] {
            let attachment =
                Attachment::new(&node, &container, patched(config(limits), json!({"cniVersion": version})));
            let result = attachment.add_after(&prev).success();
            assert_eq!((&result["vendor"], &result["dns"]["ttl"]), (&prev["vendor"], &json!(5)), "{version}");
            assert_eq!(result["interfaces"].as_array().unwrap().len(), interfaces);
            attachment.del().success();
        }
    }
    unplug(&node, "host0");
}

#[test]
fn every_version_with_interfaces_is_spoken() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let config = patched(config(both()), json!({"cniVersion": version}));
        let attachment = Attachment::new(&node, &container, config);
        let result = attachment.add_after(&patched(prev.clone(), json!({"cniVersion": version}))).success();
        assert_eq!((&result["cniVersion"], ifbs(&node).len()), (&json!(version), 1));
        attachment.del().success();
        node.exec(&["tc", "qdisc", "del", "dev", "host0", "root"]);
        node.exec(&["tc", "qdisc", "del", "dev", "host0", "ingress"]);
    }
    unplug(&node, "host0");
}

#[test]
fn limits_of_the_runtime_apply_unless_the_list_has_any() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let runtime = json!({"RuntimeConfig": {"bandWidth": {"ingressRate": 8000, "ingressBurst": 80}}});
    let attachment = Attachment::new(&node, &container, config(runtime.clone()));
    attachment.add_after(&prev).success();
    assert_eq!(qdiscs(&node, "host0")[0]["options"]["rate"], 1000);
    attachment.del().success();
    node.exec(&["tc", "qdisc", "del", "dev", "host0", "root"]);
    let attachment = attachment.config(patched(config(runtime), json!({"egressBurst": 0})));
    attachment.add_after(&prev).success();
    assert_eq!(qdiscs(&node, "host0"), [] as [Value; 0]);
    unplug(&node, "host0");
}

#[test]
fn other_kinds_of_interfaces_are_refused_with_gos_text() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    container.exec(&["ip", "link", "add", "a0", "type", "veth", "peer", "name", "a1"]);
    let before = limits(&node, "host0");
    let attachment = Attachment::new(&node, &container, config(both()));
    let with = |interfaces: Value| patched(prev.clone(), json!({"interfaces": interfaces}));
    let elsewhere = with(json!([{"name": "fake"}, {"name": "host0", "sandbox": "/x"}]));
    for (ifname, prev, text) in [
        ("eth0", with(json!([])), "no interfaces provided"),
        ("eth0", elsewhere, "no veth peer of container interface found in host ns"),
        ("eth7", prev.clone(), "container interface eth7 has no veth peer: could not look up \"eth7\": Link not found"),
        ("lo", prev.clone(), "container interface lo has no veth peer: interface \"lo\" was not a veth interface"),
    ] {
        let failure = attachment.clone().ifname(ifname).add_after(&prev).failure();
        assert_eq!(failure.msg, text);
    }
    let failure = attachment.clone().ifname("a0").add_after(&prev).failure();
    assert!(failure.msg.starts_with("veth peer with index ") && failure.msg.ends_with(" is not in host ns"));
    assert_eq!(attachment.add().failure().msg, "must be called as chained plugin");
    assert_eq!(attachment.invocation("CHECK", None).run().failure().msg, "must be called as a chained plugin");
    for (limits, text) in [
        (json!({"ingressRate": 8}), "if rate is set, burst must also be set"),
        (json!({"egressBurst": 8}), "if burst is set, rate must also be set"),
        (json!({"egressRate": 8, "egressBurst": 34_359_738_360_u64}), "burst cannot be more than 4GB"),
    ] {
        assert_eq!(attachment.clone().config(config(limits)).add_after(&prev).failure().msg, text);
    }
    assert_eq!((limits(&node, "host0"), ifbs(&node)), (before, vec![]));
    unplug(&node, "host0");
}

#[test]
fn invalid_numbers_are_refused_before_any_change() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    for (rate, burst, key) in
        [(7, 8, "ingressRate"), (8_000_000, 7, "ingressBurst"), (80_000_000_000_u64, 8, "ingressBurst")]
    {
        let keys = json!({"ingressRate": rate, "ingressBurst": burst, "egressRate": 8000, "egressBurst": 8000});
        // The namespace does not exist, so opening it would fail.
        let attachment = Attachment::new(&node, &container, config(keys)).netns("/nonexistent");
        attachment.add_after(&prev).fails_naming(7, &[key]);
    }
    unplug(&node, "host0");
}

/// containerd and CRI-O send this burst for a pod with only a rate as annotation.
#[test]
fn a_burst_too_large_for_the_kernel_becomes_the_largest() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let runtime =
        |burst: u64| json!({"runtimeConfig": {"bandwidth": {"ingressRate": 10_000_000, "ingressBurst": burst}}});
    for burst in [u64::from(u32::MAX), 8 * u64::from(u32::MAX) - 1] {
        let attachment = Attachment::new(&node, &container, config(runtime(burst)));
        let added = attachment.add_after(&prev);
        let result = added.success();
        assert!(added.stderr.contains("343597383"), "{}", added.stderr);
        // 274.9 s of 10 Mbit/s.
        assert!(limits(&node, "host0").contains("burst 34359738"), "{}", limits(&node, "host0"));
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
    unplug(&node, "host0");
}

#[test]
fn a_repeated_add_replaces_the_earlier_limits() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let attachment = Attachment::new(&node, &container, config(both()));
    attachment.add_after(&prev).success();
    let slower =
        attachment.clone().config(patched(config(both()), json!({"ingressRate": 4_000_000, "egressRate": 4_000_000})));
    let result = slower.add_after(&prev).success();
    assert_eq!(limits(&node, "host0").matches("rate 4Mbit").count(), 2, "{}", limits(&node, "host0"));
    assert_eq!(ifbs(&node).len(), 1);
    slower.check(&result).success();
    let none = attachment.clone().config(config(json!({"ingressRate": 4_000_000, "ingressBurst": 80_000})));
    none.add_after(&prev).success();
    assert_eq!((qdiscs(&node, "host0").len(), ifbs(&node)), (1, vec![]));
    none.del().success();
    unplug(&node, "host0");
}

#[test]
fn a_second_interface_of_a_container_has_its_own_limits() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let one = Attachment::new(&node, &container, config(both()));
    let other = one.clone().ifname("eth1");
    let prev_other = plug(&node, &container, "host1", "eth1");
    let results = [one.add_after(&prev).success(), other.add_after(&prev_other).success()];
    assert_ne!(results[0]["interfaces"][3]["name"], results[1]["interfaces"][3]["name"]);
    one.check(&results[0]).success();
    other.check(&results[1]).success();
    // Again, and in either order.
    other.add_after(&prev_other).success();
    assert_eq!(ifbs(&node).len(), 2);
    one.del_with(&results[0]).success();
    assert_eq!(ifbs(&node), [results[1]["interfaces"][3]["name"].as_str().unwrap()]);
    one.del_with(&results[0]).success();
    other.check(&results[1]).success();
    other.del().success();
    other.del().success();
    assert_eq!(ifbs(&node), [""; 0]);
    unplug(&node, "host0");
    unplug(&node, "host1");
}

#[test]
fn check_reports_what_has_changed() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let attachment = Attachment::new(&node, &container, config(both()));
    let result = attachment.add_after(&prev).success();
    let ifb = result["interfaces"][3]["name"].as_str().unwrap().to_owned();
    attachment.check(&result).success();
    let changed = |key: &str, value: u64| attachment.clone().config(patched(config(both()), json!({key: value})));
    assert!(changed("ingressRate", 8_000_008).check(&result).failure().msg.starts_with("Rate doesn't match"));
    assert!(changed("egressBurst", 808_000).check(&result).failure().msg.starts_with("Limit doesn't match"));
    for (sabotage, repair, named) in [
        ("tc filter del dev host0 parent ffff:", "", "not redirected"),
        ("tc qdisc del dev host0 ingress", "", "not redirected"),
        ("tc qdisc del dev host0 root", "", "token bucket filter"),
        ("ip link set IFB down", "ip link set IFB up", "is down"),
        ("tc qdisc replace dev IFB root handle 2: pfifo", "", "token bucket filter"),
        ("ip link del IFB", "", "get ifb device: Link not found"),
    ] {
        let run = |line: &str| {
            let line = line.replace("IFB", &ifb);
            if !line.is_empty() {
                node.exec(&line.split(' ').collect::<Vec<_>>());
            }
        };
        run(sabotage);
        attachment.check(&result).fails_naming(101, &[named]);
        run(repair);
        if repair.is_empty() {
            attachment.add_after(&prev).success();
        }
        attachment.check(&result).success();
    }
    attachment.del_with(&result).success();
    unplug(&node, "host0");
}

#[test]
fn del_works_without_valid_limits_and_leaves_foreign_ifbs() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let attachment = Attachment::new(&node, &container, config(both()));
    let result = attachment.add_after(&prev).success();
    let ifb = result["interfaces"][3]["name"].as_str().unwrap();
    // No ADD accepts this configuration.
    let bad = attachment.clone().config(config(json!({"ingressRate": 8}))).netns("");
    bad.del().success();
    assert_eq!(ifbs(&node), [""; 0]);
    // The link of another attachment, with the same name.
    node.ip(&[&format!("link add {ifb} type ifb"), &format!("link set {ifb} alias cni:net1/{}/eth1", container.id)]);
    attachment.del().success();
    assert_eq!(ifbs(&node), [ifb]);
    // A link without a mark, as Go creates it; this attachment's result has none.
    node.ip(&[&format!("link set {ifb} alias \"\"")]);
    attachment.del_with(&prev).success();
    assert_eq!(ifbs(&node), [ifb]);
    attachment.del_with(&result).success();
    assert_eq!(ifbs(&node), [""; 0]);
    unplug(&node, "host0");
}

#[test]
fn gc_removes_invalid_attachments_and_status_succeeds() {
    let node = Node::new();
    let (keep, prev) = pod(&node, "host0");
    let (gone, prev_gone) = pod(&node, "host1");
    let config = patched(config(both()), json!({"cniVersion": "1.1.0"}));
    let keep = Attachment::new(&node, &keep, config.clone());
    let result = keep.add_after(&prev).success();
    Attachment::new(&node, &gone, config.clone()).add_after(&prev_gone).success();
    let elsewhere = Attachment::new(&node, &gone, patched(config, json!({"name": "net2"})));
    node.exec(&["tc", "qdisc", "del", "dev", "host1", "ingress"]);
    node.exec(&["tc", "qdisc", "del", "dev", "host1", "root"]);
    let other = elsewhere.add_after(&prev_gone).success();
    // Killed before it was marked: the group is a hash of the network's name.
    node.ip(&["link add bwp0123456789ab group 239661949 type ifb", "link add bwpffffffffffff type ifb"]);
    keep.status().success();
    keep.gc(&[(&keep.id, "eth0")]).success();
    let mut left = ifbs(&node);
    left.sort();
    let name = |result: &Value| result["interfaces"][3]["name"].as_str().unwrap().to_owned();
    let mut expected = vec![name(&result), name(&other), "bwpffffffffffff".to_owned()];
    expected.sort();
    assert_eq!(left, expected);
    keep.check(&result).success();
    keep.clone().config(patched(keep.config.clone(), json!({"ingressBurst": 0}))).status().fails_naming(50, &["burst"]);
    keep.del().success();
    elsewhere.del().success();
    node.exec(&["ip", "link", "del", "bwpffffffffffff"]);
    unplug(&node, "host0");
    unplug(&node, "host1");
}

#[test]
fn a_foreign_qdisc_stays() {
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let attachment = Attachment::new(&node, &container, config(both()));
    for line in [
        "tc qdisc add dev host0 root handle 1: pfifo limit 10",
        "tc qdisc add dev host0 clsact",
        "tc qdisc add dev host0 ingress",
    ] {
        node.exec(&line.split(' ').collect::<Vec<_>>());
        if line.ends_with("ingress") {
            let filter =
                "tc filter add dev host0 parent ffff: protocol ip prio 5 u32 match ip dst 1.2.3.4/32 classid 1:2";
            node.exec(&filter.split(' ').collect::<Vec<_>>());
        }
        let before = limits(&node, "host0");
        attachment.add_after(&prev).fails_naming(102, &["create qdisc: file exists", "host0"]);
        assert_eq!((limits(&node, "host0"), ifbs(&node)), (before, vec![]));
        let place = line.split(' ').nth(5).unwrap();
        node.exec(&["tc", "qdisc", "del", "dev", "host0", place]);
    }
    attachment.add_after(&prev).success();
    attachment.del().success();
    unplug(&node, "host0");
}

#[test]
fn an_add_that_fails_at_any_call_leaves_nothing() {
    require!(trace::supported());
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let attachment = Attachment::new(&node, &container, config(both()));
    let before = limits(&node, "host0");
    attachment.invocation("ADD", Some(&prev)).with_closed_stdout().run();
    assert_eq!((limits(&node, "host0"), ifbs(&node)), (before.clone(), vec![]));
    let plan = |at| Plan { victim: "bandwidth".to_owned(), at, act: Act::Fail(Errno::ENOBUFS) };
    let whole = attachment.invocation("ADD", Some(&prev)).traced(&plan(u64::MAX));
    whole.outcome.success();
    let undo = || {
        attachment.del().success();
        for place in ["root", "ingress"] {
            node.exec(&["tc", "qdisc", "del", "dev", "host0", place]);
        }
    };
    undo();
    let is_meant = |hit: &Hit| {
        !hit.starting && ["socket", "setns", "sendto", "recvfrom", "openat", "open"].contains(&hit.call.as_str())
    };
    let points: Vec<u64> = (1..).zip(&whole.all).filter(|(_, hit)| is_meant(hit)).map(|(at, _)| at).collect();
    assert!(points.len() > 20, "{:?}", whole.all);
    for at in points {
        let traced = attachment.invocation("ADD", Some(&prev)).traced(&plan(at));
        if traced.outcome.status == Some(0) {
            attachment.check(&traced.outcome.success()).success();
            undo();
        } else {
            traced.outcome.failure();
        }
        let left = (limits(&node, "host0"), ifbs(&node));
        assert_eq!(left, (before.clone(), vec![]), "call {at}, {:?}\n{}", traced.hit, traced.outcome.report());
    }
    unplug(&node, "host0");
}

/// Measures the bytes that pass each filter in three seconds beyond the burst, relative to its
/// rate, as the filter counts them.
#[test]
#[ignore = "a measurement for an idle machine: a loaded one changes the rates (run with --ignored)"]
fn measured_rates_are_the_configured_ones() {
    for rate in [1_000_000_u64, 10_000_000, 100_000_000, 1_000_000_000] {
        for (ingress, egress) in [(true, false), (false, true), (true, true)] {
            let node = Node::new();
            let (container, prev) = pod(&node, "host0");
            let burst = (rate / 50).max(160_000);
            let mut keys = json!({});
            for (asked, direction) in [(ingress, "ingress"), (egress, "egress")] {
                if asked {
                    keys = patched(keys, json!({format!("{direction}Rate"): rate, format!("{direction}Burst"): burst}));
                }
            }
            let attachment = Attachment::new(&node, &container, config(keys));
            let result = attachment.add_after(&prev).success();
            let ifb = result["interfaces"][3]["name"].as_str().unwrap_or_default();
            let bytes = usize::try_from(rate / 8 * 3).unwrap();
            let measure = |to_container, link: &str| {
                let passed = || qdiscs(&node, link)[0]["bytes"].as_u64().unwrap();
                let (before, took) = (passed(), transfer(&node, &container, to_container, bytes));
                (((passed() - before) * 8 - burst) as f64) / took.as_secs_f64() / rate as f64
            };
            let figures: Vec<String> = thread::scope(|scope| {
                let measure = &measure;
                let runs = [(ingress, true, "host0"), (egress, false, ifb)].into_iter().filter(|run| run.0);
                let runs: Vec<_> = runs.map(|(_, to, link)| (to, scope.spawn(move || measure(to, link)))).collect();
                let name = |to| if to { "received" } else { "sent" };
                runs.into_iter().map(|(to, run)| format!("{} {:.3}", name(to), run.join().unwrap())).collect()
            });
            figure(&format!("{} Mbit/s: {}", rate / 1_000_000, figures.join(", ")));
            attachment.del().success();
            unplug(&node, "host0");
        }
    }
}

#[test]
fn a_pod_that_imitates_anothers_pair_does_not_limit_it() {
    let node = Node::new();
    // So that the ends have two indexes.
    node.ip(&["link add spare0 type bridge"]);
    let (victim, _) = pod(&node, "host0");
    let container = node.container();
    imitate_pair(&container, "eth0", &victim.link("eth0").unwrap(), &node.link("host0").unwrap());
    let prev = json!({
        "cniVersion": VERSION,
        "interfaces": [{"name": "host0"}, {"name": "eth0", "sandbox": container.netns()}],
    });
    Attachment::new(&node, &container, config(both())).add_after(&prev).fails_naming(7, &["not in host ns"]);
    assert_eq!(ifbs(&node), [""; 0]);
    unplug(&node, "host0");
    unplug(&node, "spare0");
}
