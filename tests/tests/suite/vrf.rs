//! vrf: an interface of the container joins a VRF of the container.
//!
//! The container is sbr's: `eth0` with the default routes, `net1`, and a network behind each.

use std::ffi::OsString;
use std::net::UdpSocket;
use std::time::Duration;

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, patience, probe, require, rounds};
use conformance::{VERSION, patched};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::socket::{setsockopt, sockopt::BindToDevice};
use serde_json::{Value, json};

use crate::sbr::{V4, V6, pod, prev, routes};

/// The attachment of `net1` in the VRF `red`, with these keys.
fn attached<'n>(node: &'n Node, pod: &Container, keys: Value) -> Attachment<'n> {
    let config = json!({"cniVersion": VERSION, "name": "net1", "type": "vrf", "vrfname": "red"});
    Attachment::new(node, pod, patched(config, keys)).ifname("net1")
}

fn master(pod: &Container, name: &str) -> Option<String> {
    pod.link(name).expect("the interface is there")["master"].as_str().map(str::to_owned)
}

/// The table of a VRF, or `None` without the VRF.
fn table(pod: &Container, vrf: &str) -> Option<u64> {
    let link = pod.link(vrf)?;
    assert_eq!(link["linkinfo"]["info_kind"], "vrf");
    assert!(link["flags"].as_array().unwrap().iter().any(|flag| flag == "UP"), "{link}");
    link["linkinfo"]["info_data"]["table"].as_u64()
}

/// Returns links with their masters, addresses, and routes except those of the table `local`.
fn state(pod: &Container) -> Vec<String> {
    let mut all = crate::sbr::state(pod);
    let links = pod.json(&["ip", "-j", "link"]);
    all.extend(links.as_array().unwrap().iter().map(|link| format!("{} {}", link["ifname"], link["master"])));
    all.extend(["eth0", "net1"].iter().flat_map(|name| pod.addresses(name)));
    all.sort();
    all
}

#[test]
fn a_bad_configuration_is_refused() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    for name in [json!(null), json!(""), json!("a/b"), json!("a-name-that-is-too-long")] {
        let attachment = attached(&node, &pod, json!({ "vrfname": name }));
        let refused = attachment.add_after(&prev(&pod, &[V4])).fails_with(7, "");
        assert_eq!(refused.msg, "configuration is expected to have a valid vrf name");
        attachment.del().success();
    }
    let alone = attached(&node, &pod, json!({}));
    assert_eq!(alone.add().fails_with(7, "").msg, "missing prevResult from earlier plugin");
    let unchecked = alone.invocation("CHECK", None).run();
    assert_eq!(unchecked.fails_with(7, "").msg, "missing prevResult from earlier plugin");
    assert_eq!(state(&pod), before);
}

#[test]
fn a_kernel_without_vrfs_is_named() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    let outcome = attached(&node, &pod, json!({})).add_after(&prev(&pod, &[V4]));
    if probe::vrf().is_ok() {
        outcome.success();
    } else {
        outcome.fails_with(2, "cmdAdd failed: could not add VRF red: ");
        assert_eq!(state(&pod), before);
    }
}

#[test]
fn a_conflicting_interface_is_named_and_stays() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let prev = prev(&pod, &[V4]);
    let before = state(&pod);
    let other_kind = attached(&node, &pod, json!({"vrfname": "eth0"}));
    other_kind.add_after(&prev).fails_with(102, "cmdAdd failed: Netlink eth0 is not a VRF");
    other_kind.check(&prev).fails_with(102, "Netlink eth0 is not a VRF");
    other_kind.del().success();
    let missing = attached(&node, &pod, json!({})).ifname("net7");
    missing.add_after(&prev).fails_with(4, "cmdAdd failed: could not get link by name net7");
    assert_eq!(state(&pod), before);
    pod.ip(&["link add br0 type bridge", "link set net1 master br0"]);
    let before = state(&pod);
    let taken = attached(&node, &pod, json!({}));
    taken.add_after(&prev).fails_with(102, "cmdAdd failed: interface net1 has already a master set: br0");
    taken.del().success();
    assert_eq!(state(&pod), before);
}

#[test]
fn del_without_a_namespace_succeeds() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = attached(&node, &pod, json!({}));
    attachment.del().success();
    attachment.clone().netns("").del().success();
    let gone = node.dir().join("netns/gone");
    attachment.clone().netns(&gone).del().success();
    assert!(!gone.exists());
    pod.unmount();
    attachment.del().success();
}

#[test]
fn gc_and_status_find_nothing_to_do() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    let attachment = attached(&node, &pod, json!({"cniVersion": "1.1.0"}));
    attachment.gc(&[]).success();
    attachment.status().success();
    let bad = attached(&node, &pod, json!({"cniVersion": "1.1.0", "vrfname": ""}));
    bad.status().fails_with(50, "configuration is expected to have a valid vrf name");
    assert_eq!(state(&pod), before);
}

#[test]
fn the_interface_moves_with_its_addresses_and_routes() {
    require!(probe::vrf());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&[
        "address add fe80::5/64 dev net1 nodad",
        "route add 10.8.0.0/16 dev net1",
        "route add 10.9.0.0/16 via 10.2.0.9 metric 7 src 10.2.0.2",
        "route add 10.9.1.0/24 via 10.2.0.9 table 77",
        "route add fd99::/64 via fd02::9 metric 5",
        "route add fd98::/64 via fd02::9 src fd02::2",
    ]);
    let of_eth0 = |table: &str| {
        let all = [routes(&pod, "-4", table), routes(&pod, "-6", table)].concat();
        all.into_iter().filter(|route| route.contains("eth0")).collect::<Vec<_>>()
    };
    let (addresses, before) = (pod.addresses("net1"), of_eth0("main"));
    let prev = patched(prev(&pod, &[V4, V6]), json!({"vendor": {"id": 7}}));
    let attachment = attached(&node, &pod, json!({}));
    assert_eq!(attachment.add_after(&prev).success(), prev);
    assert_eq!((master(&pod, "net1").as_deref(), table(&pod, "red")), (Some("red"), Some(1)));
    assert_eq!(pod.addresses("net1"), addresses);
    let mut moved = routes(&pod, "-4", "1");
    moved.retain(|route| route.starts_with("10."));
    assert_eq!(
        moved,
        [
            "10.2.0.0/24 dev net1 proto kernel scope link src 10.2.0.2",
            "10.8.0.0/16 dev net1 scope link",
            "10.9.0.0/16 via 10.2.0.9 dev net1 src 10.2.0.2 metric 7",
        ]
    );
    let moved = routes(&pod, "-6", "1").join("\n");
    for route in [
        "fd02::/64 dev net1 proto kernel metric 256",
        "fd99::/64 via fd02::9 dev net1 metric 5",
        "fd98::/64 via fd02::9 dev net1 src fd02::2 metric 1024",
        "fe80::/64 dev net1",
    ] {
        assert!(moved.contains(route), "{route} is missing in\n{moved}");
    }
    assert_eq!(routes(&pod, "-4", "77"), ["10.9.1.0/24 via 10.2.0.9 dev net1"]);
    assert_eq!(of_eth0("main"), before);
    assert_eq!(of_eth0("1"), [""; 0]);
    attachment.check(&prev).success();
    attachment.del_with(&prev).success();
    assert_eq!((master(&pod, "net1"), table(&pod, "red")), (None, None));
    attachment.del_with(&prev).success();
}

/// As behind ptp, whose subnet is reached through the gateway.
#[test]
fn a_route_moves_behind_the_one_to_its_gateway() {
    require!(probe::vrf());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["route add 10.8.0.1 dev net1", "route add 10.8.0.0/24 via 10.8.0.1"]);
    let attachment = attached(&node, &pod, json!({"table": 77}));
    let result = attachment.add_after(&prev(&pod, &[V4])).success();
    let moved = routes(&pod, "-4", "77");
    for route in ["10.8.0.0/24 via 10.8.0.1 dev net1", "10.8.0.1 dev net1 scope link"] {
        assert!(moved.iter().any(|there| there == route), "{route} is missing in {moved:#?}");
    }
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn a_vrf_is_removed_with_its_last_interface() {
    require!(probe::vrf());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let prev = prev(&pod, &[V4]);
    let (net1, eth0) = (attached(&node, &pod, json!({})), attached(&node, &pod, json!({})).ifname("eth0"));
    net1.add_after(&prev).success();
    eth0.add_after(&prev).success();
    // Not the VRF that the interface is in.
    let blue = attached(&node, &pod, json!({"vrfname": "blue"}));
    blue.del().success();
    pod.ip(&["link add blue type vrf table 99"]);
    blue.del().success();
    assert_eq!((master(&pod, "net1").as_deref(), pod.link("blue").is_some()), (Some("red"), false));
    net1.del().success();
    assert_eq!((master(&pod, "net1"), master(&pod, "eth0").as_deref()), (None, Some("red")));
    pod.ip(&["link del eth0"]);
    eth0.del().success();
    assert_eq!(table(&pod, "red"), None);
}

#[test]
fn tables_are_chosen_and_compared() {
    require!(probe::vrf());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let prev = prev(&pod, &[V4]);
    pod.ip(&[
        "link add v1 type vrf table 1",
        "link add v3 type vrf table 3",
        "route add 10.70.0.0/16 dev eth0 table 2",
        "rule add fwmark 7 lookup 4",
    ]);
    let first = attached(&node, &pod, json!({}));
    first.add_after(&prev).success();
    assert_eq!(table(&pod, "red"), Some(5));
    let other = attached(&node, &pod, json!({"table": 6})).ifname("eth0");
    let conflict = "cmdAdd failed: VRF red already exist with different routing table 5";
    other.add_after(&prev).fails_with(102, conflict);
    let same = attached(&node, &pod, json!({"table": 5})).ifname("eth0");
    same.add_after(&prev).success();
    same.check(&prev).success();
    other.check(&prev).fails_with(101, "VRF red already exist with different routing table 5");
    same.del().success();
    // Two VRFs may have one table.
    let blue = attached(&node, &pod, json!({"vrfname": "blue", "table": 5})).ifname("eth0");
    blue.add_after(&prev).success();
    assert_eq!((table(&pod, "red"), table(&pod, "blue")), (Some(5), Some(5)));
}

#[test]
fn a_second_add_is_refused_and_leaves_the_first() {
    require!(probe::vrf());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = attached(&node, &pod, json!({}));
    attachment.add_after(&prev(&pod, &[V4])).success();
    let first = state(&pod);
    let refused = attachment.add_after(&prev(&pod, &[V4]));
    refused.fails_with(102, "cmdAdd failed: interface net1 has already a master set: red");
    assert_eq!(state(&pod), first);
}

#[test]
fn check_finds_what_is_missing() {
    require!(probe::vrf());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = attached(&node, &pod, json!({}));
    let result = attachment.add_after(&prev(&pod, &[V4])).success();
    pod.ip(&["link set red down"]);
    attachment.check(&result).fails_with(101, "VRF red is down");
    pod.ip(&["link set red up", "link set net1 nomaster"]);
    attachment.check(&result).fails_with(101, "failed to find net1 associated to vrf red");
    pod.ip(&["link del red"]);
    attachment.check(&result).fails_with(101, "failed to find net1 associated to vrf red");
}

#[test]
fn a_failed_add_puts_everything_back() {
    require!(probe::vrf());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["route add 10.9.0.0/16 via 10.2.0.9 metric 7", "route add fd99::/64 via fd02::9"]);
    for existing in [false, true] {
        if existing {
            pod.ip(&["link add red type vrf table 9", "link set eth0 master red", "link set red up"]);
        }
        let before = state(&pod);
        let attachment = attached(&node, &pod, json!({}));
        let unread = attachment.invocation("ADD", Some(&prev(&pod, &[V4, V6]))).with_closed_stdout().run();
        assert_ne!(unread.status, Some(0), "{}", unread.report());
        assert_eq!(state(&pod), before, "VRF there before: {existing}");
    }
}

#[test]
fn whichever_call_fails_an_add_changes_all_or_nothing() {
    require!(probe::vrf());
    require!(trace::supported());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let route = "route add 10.9.0.0/16 via 10.2.0.9";
    pod.ip(&[route]);
    let (before, prev) = (state(&pod), prev(&pod, &[V4, V6]));
    let attachment = attached(&node, &pod, json!({}));
    let attempt = |at, act| {
        let plan = Plan { victim: "vrf".to_owned(), at, act };
        attachment.invocation("ADD", Some(&prev)).traced(&plan)
    };
    let put_back = || {
        attachment.del_with(&prev).success();
        pod.ip(&[
            "address flush dev net1",
            "address add 10.2.0.2/24 dev net1",
            "address add fd02::2/64 dev net1 nodad",
        ]);
        pod.run(&["ip", "route", "replace", "10.9.0.0/16", "via", "10.2.0.9"]);
        assert_eq!(state(&pod), before);
    };
    // Each act has points of its own, because calls that cannot fail are not counted.
    for act in [Act::Fail(Errno::ENOBUFS), Act::Signal(Signal::SIGKILL)] {
        let honest = attempt(u64::MAX, act);
        honest.outcome.success();
        put_back();
        let meant = ["openat", "setns", "sendto", "recvfrom", "socket", "write", "flock"];
        let is_meant = |hit: &trace::Hit| !hit.starting && meant.contains(&hit.call.as_str());
        let points: Vec<u64> = (1..).zip(&honest.all).filter(|(_, hit)| is_meant(hit)).map(|(at, _)| at).collect();
        let some = usize::try_from(rounds(points.len() as u64)).unwrap();
        assert!(points.len() > 15, "{:?}", honest.all);
        for at in points.iter().copied().step_by(points.len().div_ceil(some)) {
            let hurt = attempt(at, act);
            let story = format!("{act:?} at call {at}, {:?}\n{}", hurt.hit, hurt.outcome.report());
            match hurt.outcome.status {
                Some(0) => put_back(),
                Some(_) => assert_eq!(state(&pod), before, "{story}"),
                None => {
                    attachment.del_with(&prev).success();
                    assert_eq!((master(&pod, "net1"), table(&pod, "red")), (None, None), "{story}");
                    put_back();
                }
            }
        }
    }
}

#[test]
fn packets_stay_in_their_vrf() {
    require!(probe::vrf());
    let node = Node::new();
    let (pod, networks) = pod(&node);
    // Both networks have the same addresses.
    pod.ip(&["route del default via fd01::1", "address flush dev eth0", "address flush dev net1"]);
    for (name, vrf, network) in [("eth0", "blue", &networks[0]), ("net1", "red", &networks[1])] {
        network.ip(&[
            "address flush dev lan",
            "address add 10.7.0.1/24 dev lan",
            "address add fd07::1/64 dev lan nodad",
        ]);
        pod.ip(&[
            &format!("address add 10.7.0.2/24 dev {name}"),
            &format!("address add fd07::2/64 dev {name} nodad"),
            &format!("route add 10.50.0.0/16 via 10.7.0.1 dev {name} metric {}", if vrf == "red" { 1 } else { 2 }),
        ]);
        network.ip(&["address add 10.50.0.1/32 dev lan"]);
        let attachment = attached(&node, &pod, json!({ "vrfname": vrf })).ifname(name);
        attachment.add_after(&prev(&pod, &[("10.7.0.2/24", "10.7.0.1")])).success();
    }
    for to in ["10.7.0.1:700", "[fd07::1]:700", "10.50.0.1:700"] {
        let any = if to.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
        let servers = networks.each_ref().map(|network| network.enter(|| UdpSocket::bind(to).unwrap()));
        for (vrf, server, other) in [("blue", &servers[0], &servers[1]), ("red", &servers[1], &servers[0])] {
            let client = pod.enter(|| UdpSocket::bind(any).unwrap());
            setsockopt(&client, BindToDevice, &OsString::from(vrf)).unwrap();
            client.send_to(vrf.as_bytes(), to).unwrap();
            let mut buffer = [0; 8];
            server.set_read_timeout(Some(patience(Duration::from_secs(20)))).unwrap();
            let (length, from) = server.recv_from(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], vrf.as_bytes(), "{to}");
            server.send_to(b"back", from).unwrap();
            client.set_read_timeout(Some(patience(Duration::from_secs(20)))).unwrap();
            assert_eq!(client.recv(&mut buffer).unwrap(), 4, "{to}");
            other.set_nonblocking(true).unwrap();
            assert!(other.recv(&mut buffer).is_err(), "{vrf} was heard in the other network, {to}");
            other.set_nonblocking(false).unwrap();
        }
        // Outside the VRFs there is no route to it.
        let stray = pod.enter(|| UdpSocket::bind(any).unwrap());
        assert!(stray.send_to(b"stray", to).is_err(), "{to}");
    }
}

#[test]
fn every_version_of_go_gets_its_prev_result_back() {
    require!(probe::vrf());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let mut prev = prev(&pod, &[V4]);
        prev["cniVersion"] = version.into();
        if version.starts_with("0.") {
            prev["ips"].as_array_mut().unwrap().iter_mut().for_each(|ip| ip["version"] = "4".into());
            prev["dns"] = json!({});
        }
        let attachment = attached(&node, &pod, json!({ "cniVersion": version }));
        assert_eq!(attachment.add_after(&prev).success(), prev, "{version}");
        attachment.del().success();
    }
}

/// The PID in a path like `/proc/PID/ns/net` may be that of another container's process.
#[test]
fn del_that_leads_to_another_container_leaves_its_vrf() {
    require!(probe::vrf());
    let node = Node::new();
    let (other, _networks) = pod(&node);
    let theirs = attached(&node, &other, json!({}));
    let result = theirs.add_after(&prev(&other, &[V4])).success();
    let mut dead = theirs.clone();
    dead.id = "dead".to_owned();
    let mut dead_prev = prev(&other, &[("10.2.0.77/24", "10.2.0.1")]);
    dead_prev["interfaces"][1]["mac"] = "02:00:00:00:00:77".into();
    let deleted = dead.del_with(&dead_prev);
    deleted.success();
    assert!(deleted.stderr.contains("belongs to another attachment"), "{}", deleted.report());
    assert_eq!(master(&other, "net1").as_deref(), Some("red"));
    theirs.del_with(&result).success();
    assert_eq!((master(&other, "net1"), table(&other, "red")), (None, None));
}

#[test]
fn del_continues_if_a_process_holds_the_lock() {
    require!(probe::vrf());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = attached(&node, &pod, json!({})).by(bin_dir());
    let result = attachment.add_after(&prev(&pod, &[V4])).success();
    // Any process of the pod can open this file.
    let held = std::fs::File::open(pod.netns()).unwrap();
    held.lock().unwrap();
    attachment.del_with(&result).success();
    held.unlock().unwrap();
    assert_eq!((master(&pod, "net1"), table(&pod, "red")), (None, None));
}

/// The Go plugin, of any release.
fn go_vrf() -> probe::Probed {
    let path = go_bin_dir().join("vrf");
    if path.is_file() { Ok(()) } else { Err(format!("no Go plugin at {}; set CNI_GO_BIN_DIR", path.display())) }
}

#[test]
fn what_one_has_added_the_other_checks_and_deletes() {
    require!(probe::vrf());
    require!(go_vrf());
    for go_first in [true, false] {
        let node = Node::new();
        let (pod, _networks) = pod(&node);
        pod.ip(&["route add 10.9.0.0/16 via 10.2.0.9 metric 7"]);
        let attachment = attached(&node, &pod, json!({}));
        let (ours, go) = (attachment.clone().by(bin_dir()), attachment.by(go_bin_dir()));
        let (first, second) = if go_first { (&go, &ours) } else { (&ours, &go) };
        let result = first.add_after(&prev(&pod, &[V4, V6])).success();
        second.check(&result).success();
        second.clone().ifname("eth0").add_after(&prev(&pod, &[])).success();
        assert_eq!((table(&pod, "red"), master(&pod, "eth0").as_deref()), (Some(1), Some("red")));
        second.del_with(&result).success();
        assert_eq!((master(&pod, "net1"), table(&pod, "red")), (None, Some(1)), "Go first: {go_first}");
        first.clone().ifname("eth0").del().success();
        assert_eq!(table(&pod, "red"), None, "Go first: {go_first}");
    }
}
