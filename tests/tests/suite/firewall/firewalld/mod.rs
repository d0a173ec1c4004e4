//! The backend firewalld, with the real one on a bus of its own: sources of a zone, their owners,
//! and what happens when it reloads, stops or was never there.

mod world;

use std::os::unix::net::UnixListener;
use std::thread;

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{bin_dir, probe, require, rounds, wait_until};
use conformance::{HOST, OUTSIDE, patched};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use self::world::{Firewalld, SOCKET, del_without_result, of};
use super::egress;
use super::world::{Backend, Pod, World, config, go, named, naming, rules};
use crate::portmap::world::{IN_VAIN, ask_tcp, ask_tcp_for};

#[test]
fn the_zone_has_the_addresses_from_add_to_del() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    for patch in [json!({}), json!({"backend": null}), json!({"backend": "unknown"})] {
        let config = firewalld.config(patch);
        let (pod, other) = (firewalld.world.dual(), firewalld.world.dual());
        let result = pod.add(&config).success();
        assert_eq!(result["ips"], pod.result["ips"]);
        other.add(&config).success();
        pod.add(&config).success();
        assert_eq!(firewalld.sources("trusted"), of(&[&pod, &other]));
        pod.check(&config).success();
        pod.del(&config).success();
        pod.del(&config).success();
        assert_eq!(firewalld.sources("trusted"), of(&[&other]));
        pod.leave();
        other.leave();
        assert_eq!(firewalld.sources("trusted"), of(&[]));
    }
    assert!(!rules(&firewalld.world).iter().any(|rule| rule.contains("CNI-FORWARD")));
}

#[test]
fn an_add_notes_chains_that_drop_despite_firewalld() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let (node, pod) = (&firewalld.world.node, firewalld.world.dual());
    let config = firewalld.config(json!({}));
    let noted = || {
        let outcome = pod.add(&config);
        outcome.success();
        outcome.stderr
    };
    assert!(!noted().contains("drops what it does not accept"), "firewalld's own chains are not noted");
    node.exec(&[
        "nft",
        "add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }",
    ]);
    let text = noted();
    assert_eq!(
        text.matches("ip filter FORWARD drops what it does not accept itself, and firewalld cannot").count(),
        1,
        "{text}"
    );
    pod.leave();
}

#[test]
fn another_zone_has_them_if_the_configuration_says_so() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let config = firewalld.config(json!({"firewalldZone": "internal"}));
    let pod = firewalld.world.dual();
    pod.add(&config).success();
    assert_eq!(firewalld.sources("internal"), of(&[&pod]));
    assert_eq!(firewalld.sources("trusted"), of(&[]));
    pod.leave();
    assert_eq!(firewalld.sources("internal"), of(&[]));
}

#[test]
fn del_without_prev_result_and_gc_go_by_the_owner() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let newest = json!({"cniVersion": "1.1.0"});
    let config = firewalld.config(newest.clone());
    let (pod, valid, dead) = (firewalld.world.dual(), firewalld.world.dual(), firewalld.world.dual());
    let other = firewalld.world.pod(&firewalld.world.network("net2", &["10.2.0.0/24", "fd00:2::/64"]));
    let second = named(&firewalld.world, "net2", json!({"cniVersion": "1.1.0", "backend": "firewalld"}));
    for (pod, config) in [(&pod, &config), (&valid, &config), (&dead, &config), (&other, &second)] {
        let prev = patched(pod.result.clone(), newest.clone());
        pod.invocation(&bin_dir(), "ADD", config, Some(&prev)).run().success();
    }
    // Regardless of the configuration at that time.
    del_without_result(&pod, &json!({"cniVersion": "1.0.0", "name": "net1", "type": "firewall", "backend": 7}));
    assert_eq!(firewalld.sources("trusted"), of(&[&valid, &dead, &other]));
    let gc = |valid: Value| {
        let config = patched(config.clone(), json!({"firewalldZone": "work", "cni.dev/valid-attachments": valid}));
        firewalld.world.node.plugin("firewall").command("GC").config(&config).run().success();
    };
    gc(json!([{"containerID": valid.container.id, "ifname": "eth0"}]));
    assert_eq!(firewalld.sources("trusted"), of(&[&valid, &other]));
    gc(json!([]));
    assert_eq!(firewalld.sources("trusted"), of(&[&other]));
    del_without_result(&other, &second);
    assert_eq!(firewalld.sources("trusted"), of(&[]));
    assert_eq!(naming(&firewalld.world, &other), 0, "{:#?}", rules(&firewalld.world));
    for pod in [pod, valid, dead, other] {
        pod.network.del_with(&pod.result).success();
    }
}

#[test]
fn check_finds_that_a_reload_has_removed_the_source() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let config = firewalld.config(json!({}));
    let pod = firewalld.world.dual();
    pod.add(&config).success();
    pod.check(&config).success();
    firewalld.cmd(&["--reload"]);
    assert_eq!(firewalld.sources("trusted"), of(&[]));
    let lacks = format!("failed to find the address {}/32 in trusted zone", pod.address(0));
    pod.check(&config).fails_naming(101, &[&lacks]);
    pod.check(&patched(config.clone(), json!({"backend": null}))).fails_naming(101, &[&lacks]);
    pod.add(&config).success();
    pod.check(&config).success();
    firewalld.cmd(&["--reload"]);
    // The source is gone, so its record is removed too.
    del_without_result(&pod, &config);
    assert_eq!(naming(&firewalld.world, &pod), 0, "{:#?}", rules(&firewalld.world));
    pod.leave();
}

#[test]
fn an_error_of_firewalld_is_quoted_and_leaves_nothing() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let pod = firewalld.world.dual();
    let (v4, v6) = (format!("{}/32", pod.address(0)), format!("{}/128", pod.address(1)));
    let unknown = firewalld.config(json!({"firewalldZone": "nosuch"}));
    let text = format!("failed to add the address {v4} to nosuch zone: INVALID_ZONE: nosuch");
    pod.add(&unknown).fails_with(7, &text);
    // The second address of two.
    firewalld.cmd(&["--zone", "public", "--add-source", &v6]);
    let text = format!("failed to add the address {v6} to trusted zone: ZONE_CONFLICT: ");
    pod.add(&firewalld.config(json!({}))).fails_with(100, &text);
    assert_eq!(firewalld.sources("trusted"), of(&[]));
    assert_eq!(naming_in_records(&firewalld.world), 0, "{:#?}", rules(&firewalld.world));
    pod.leave();
    // A source that the administrator has added to another zone stays there.
    assert_eq!(firewalld.sources("public"), [v6]);
}

#[test]
fn an_unread_add_keeps_what_the_administrator_added() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let pod = firewalld.world.dual();
    let v4 = format!("{}/32", pod.address(0));
    firewalld.cmd(&["--zone", "trusted", "--add-source", &v4]);
    let call = pod.invocation(&bin_dir(), "ADD", &firewalld.config(json!({})), Some(&pod.result));
    assert_ne!(call.with_closed_stdout().run().status, Some(0));
    assert_eq!((firewalld.sources("trusted"), naming_in_records(&firewalld.world)), (vec![v4], 0));
    pod.leave();
}

/// Returns the number of records of addresses.
fn naming_in_records(world: &World) -> usize {
    rules(world).iter().filter(|rule| rule.contains("comment \"cni:")).count()
}

#[test]
fn an_unread_add_removes_the_sources_that_it_added() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let config = firewalld.config(json!({}));
    let (pod, neighbour) = (firewalld.world.dual(), firewalld.world.dual());
    neighbour.add(&config).success();
    let unheard = |prev: &Value| {
        let call = pod.invocation(&bin_dir(), "ADD", &config, Some(prev));
        assert_ne!(call.with_closed_stdout().run().status, Some(0));
    };
    let state = || (firewalld.sources("trusted"), naming_in_records(&firewalld.world));
    unheard(&pod.result);
    assert_eq!(state(), (of(&[&neighbour]), 2));
    pod.add(&config).success();
    unheard(&pod.result);
    assert_eq!(state(), (of(&[&pod, &neighbour]), 4), "the sources were in the zone before the ADD");
    // An ADD with other addresses removes the former ones.
    let moved = patched(pod.result.clone(), json!({"ips": [{"address": "10.1.0.77/24"}]}));
    pod.invocation(&bin_dir(), "ADD", &config, Some(&moved)).run().success();
    assert_eq!(naming_in_records(&firewalld.world), 3);
    assert!(firewalld.sources("trusted").contains(&"10.1.0.77/32".to_owned()));
    unheard(&pod.result);
    assert_eq!(state(), (of(&[&neighbour]), 2));
    pod.leave();
    neighbour.leave();
}

#[test]
fn an_address_stays_in_the_zone_while_an_attachment_has_it() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let config = firewalld.config(json!({}));
    let second = named(&firewalld.world, "net2", json!({"backend": "firewalld"}));
    let pod = firewalld.world.dual();
    pod.add(&config).success();
    pod.add(&second).success();
    pod.del(&config).success();
    assert_eq!(firewalld.sources("trusted"), of(&[&pod]));
    pod.check(&second).success();
    del_without_result(&pod, &second);
    assert_eq!(firewalld.sources("trusted"), of(&[]));
    pod.leave();
}

#[test]
fn a_node_can_switch_from_go_to_this_plugin_and_back() {
    require!(probe::firewalld().map(drop));
    require!(probe::go_plugins());
    let firewalld = Firewalld::new();
    for backend in [json!("firewalld"), Value::Null] {
        for policy in ["open", "same-bridge"] {
            let config = firewalld.config(json!({"backend": backend, "ingressPolicy": policy}));
            let (theirs, ours) = (firewalld.world.dual(), firewalld.world.dual());
            theirs.call_by(&go(), "ADD", &config, Some(&theirs.result)).success();
            ours.add(&config).success();
            assert_eq!(firewalld.sources("trusted"), of(&[&theirs, &ours]));
            theirs.check(&config).success();
            ours.call_by(&go(), "CHECK", &config, Some(&ours.result)).success();
            theirs.del(&config).success();
            ours.call_by(&go(), "DEL", &config, Some(&ours.result)).success();
            assert_eq!(firewalld.sources("trusted"), of(&[]));
            // The ADD adopts the source; from now on DEL needs no result.
            theirs.call_by(&go(), "ADD", &config, Some(&theirs.result)).success();
            theirs.add(&config).success();
            del_without_result(&theirs, &config);
            assert_eq!(firewalld.sources("trusted"), of(&[]));
            theirs.leave();
            ours.leave();
            assert_eq!(naming_in_records(&firewalld.world), 0, "{:#?}", rules(&firewalld.world));
        }
    }
}

#[test]
fn del_of_a_go_container_keeps_the_isolation_of_another_one() {
    require!(probe::firewalld().map(drop));
    require!(probe::go_plugins());
    let firewalld = Firewalld::new();
    let config = firewalld.config(json!({"ingressPolicy": "isolated"}));
    let (one, two) = (firewalld.world.dual(), firewalld.world.dual());
    // Go's isolation chains stay after this DEL.
    let iptables = firewalld.config(json!({"backend": "iptables"}));
    one.call_by(&go(), "ADD", &iptables, Some(&one.result)).success();
    one.call_by(&go(), "DEL", &iptables, Some(&one.result)).success();
    for pod in [&one, &two] {
        pod.call_by(&go(), "ADD", &config, Some(&pod.result)).success();
    }
    let isolation = || {
        let rules = firewalld.world.node.exec(&["iptables-save", "-t", "filter"]);
        rules.lines().filter(|rule| rule.contains("br-net1")).map(str::to_owned).collect::<Vec<_>>()
    };
    let before = isolation();
    assert_eq!(before.len(), 3);
    one.del(&config).success();
    assert_eq!(isolation(), before);
    one.leave();
    two.leave();
}

#[test]
fn killed_or_refused_calls_leave_nothing_to_the_next_del() {
    require!(probe::firewalld().map(drop));
    require!(trace::supported());
    let firewalld = Firewalld::new();
    let world = &firewalld.world;
    let config = firewalld.config(json!({}));
    let (pod, neighbour) = (world.dual(), world.dual());
    neighbour.add(&config).success();
    let kept = naming(world, &neighbour);
    assert!(kept > 0);
    for (verb, act) in [
        ("ADD", Act::Signal(Signal::SIGKILL)),
        ("ADD", Act::Fail(Errno::EIO)),
        ("DEL", Act::Signal(Signal::SIGKILL)),
        ("DEL", Act::Fail(Errno::EIO)),
    ] {
        let live = |at: u64| {
            let plan = Plan { victim: "firewall".to_owned(), at, act };
            if verb == "DEL" {
                pod.add(&config).success();
            }
            let traced = pod.invocation(&bin_dir(), verb, &config, Some(&pod.result)).traced(&plan);
            let told = || format!("{verb} call {at}, {:?}\n{}", traced.hit, traced.outcome.report());
            if verb == "ADD" && traced.outcome.status != Some(0) && matches!(act, Act::Fail(_)) {
                assert_eq!(naming(world, &pod), 0, "{}", told());
            }
            del_without_result(&pod, &config);
            assert_eq!((naming(world, &pod), naming(world, &neighbour)), (0, kept), "{}", told());
            traced.calls
        };
        let calls = live(u64::MAX);
        assert!(calls > 40, "{calls}");
        let some = rounds(calls).clamp(1, 12);
        for at in (1..=calls).step_by(usize::try_from(calls.div_ceil(some)).unwrap()) {
            live(at);
        }
    }
    pod.leave();
    neighbour.leave();
}

/// A server beyond the node, in both families.
fn serve(world: &World) {
    let listener = world.client.enter(|| std::net::TcpListener::bind(("::", 80)).unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = std::io::Write::write_all(&mut stream, b"outside");
        }
    });
    for (subnet, host) in ["10.0.0.0/8", "fd00::/16"].into_iter().zip(HOST) {
        world.client.exec(&["ip", "route", "add", subnet, "via", host]);
    }
}

#[test]
fn packets_of_the_container_pass_firewalld() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let pod = firewalld.world.dual();
    serve(&firewalld.world);
    let out = [0, 1].map(|family| std::net::SocketAddr::new(OUTSIDE[family].parse().unwrap(), 80).to_string());
    for to in &out {
        assert_eq!(pod.container.enter(|| ask_tcp_for(IN_VAIN, to)), None, "{to}");
    }
    let config = firewalld.config(json!({}));
    pod.add(&config).success();
    for to in &out {
        assert_eq!(pod.container.enter(|| ask_tcp(to)).as_deref(), Some("outside"), "{to}");
    }
    pod.del(&config).success();
    for to in &out {
        assert_eq!(pod.container.enter(|| ask_tcp_for(IN_VAIN, to)), None, "{to}");
    }
    pod.leave();
}

#[test]
fn bridges_are_isolated_beside_firewalld_until_del() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let world = &firewalld.world;
    let (one, near) = (world.dual(), world.dual());
    let far = world.pod(&world.network("net2", &["10.2.0.0/24", "fd00:2::/64"]));
    let same = |network: &str| named(world, network, json!({"backend": "firewalld", "ingressPolicy": "same-bridge"}));
    for (pod, network) in [(&one, "net1"), (&near, "net1"), (&far, "net2")] {
        pod.serve_tcp(80, "pod");
        pod.add(&same(network)).success();
        pod.check(&same(network)).success();
    }
    for family in [0, 1] {
        let to = |pod: &Pod<'_>| std::net::SocketAddr::new(pod.address(family), 80).to_string();
        let (near, far) = (to(&near), to(&far));
        assert!(one.container.enter(|| ask_tcp(&near)).is_some(), "{:#?}", rules(world));
        assert_eq!(one.container.enter(|| ask_tcp_for(IN_VAIN, &far)), None, "{:#?}", rules(world));
    }
    world.node.exec(&["nft", "flush chain inet cni_firewall cni_isolation_1"]);
    one.check(&same("net1")).fails_naming(101, &["cni_isolation_1"]);
    let open = named(world, "net1", json!({"backend": "firewalld"}));
    for pod in [&one, &near] {
        pod.del(&same("net1")).success();
        pod.add(&open).success();
    }
    far.del(&same("net2")).success();
    far.add(&named(world, "net2", json!({"backend": "firewalld"}))).success();
    let to = std::net::SocketAddr::new(far.address(0), 80).to_string();
    assert!(one.container.enter(|| ask_tcp(&to)).is_some(), "{:#?}", rules(world));
    [one, near, far].iter().for_each(Pod::leave);
    assert_eq!(firewalld.sources("trusted"), of(&[]));
}

#[test]
fn egress_is_enforced_beside_firewalld_until_del() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let world = &firewalld.world;
    egress::prepare(world);
    let config = firewalld.config(egress::denying());
    let (pod, unread) = (world.dual(), world.dual());
    pod.add(&config).success();
    pod.check(&config).success();
    for family in [0, 1] {
        egress::is_dropped(world, &pod, OUTSIDE[family]);
        egress::passes(world, &pod, egress::ALLOWED[family]);
    }
    let call = unread.invocation(&bin_dir(), "ADD", &config, Some(&unread.result));
    assert_ne!(call.with_closed_stdout().run().status, Some(0));
    assert!(!egress::is_checked(world, &unread), "{:#?}", rules(world));
    firewalld.cmd(&["--reload"]);
    assert!(egress::is_checked(world, &pod), "{:#?}", rules(world));
    // An ADD without the key ends the rules.
    pod.add(&firewalld.config(json!({}))).success();
    assert!(!egress::is_checked(world, &pod), "{:#?}", rules(world));
    egress::passes(world, &pod, OUTSIDE[0]);
    pod.add(&config).success();
    del_without_result(&pod, &config);
    assert!(!egress::has_network(world), "{:#?}", rules(world));
    pod.leave();
    unread.leave();
}

#[test]
fn the_sources_of_a_stopped_firewalld_are_gone_and_del_succeeds() {
    require!(probe::firewalld().map(drop));
    let firewalld = Firewalld::new();
    let config = firewalld.config(json!({}));
    let status = patched(config.clone(), json!({"cniVersion": "1.1.0"}));
    let ready = |firewalld: &Firewalld, config: &Value| {
        firewalld.world.node.plugin("firewall").command("STATUS").config(config).run()
    };
    ready(&firewalld, &status).success();
    ready(&firewalld, &patched(status.clone(), json!({"firewalldZone": "nosuch"}))).fails_naming(50, &["nosuch"]);
    let pod = firewalld.world.dual();
    let address = pod.address(0).to_string();
    pod.add(&config).success();
    firewalld.stop();
    let not_there = "The name org.fedoraproject.FirewallD1 was not provided by any .service files";
    {
        let pod = firewalld.world.dual();
        pod.add(&config).fails_naming(11, &["failed to add the address", not_there]);
        assert_eq!(naming_in_records(&firewalld.world), 2, "{:#?}", rules(&firewalld.world));
        pod.leave();
    }
    ready(&firewalld, &status).fails_naming(50, &["firewalld is not running"]);
    pod.check(&config).fails_naming(101, &[&address]);
    del_without_result(&pod, &config);
    assert_eq!(naming_in_records(&firewalld.world), 0, "{:#?}", rules(&firewalld.world));
    // Without a configured backend it is iptables now, as in Go.
    let unasked = patched(config.clone(), json!({"backend": null}));
    pod.add(&unasked).success();
    pod.check(&unasked).success();
    assert!(firewalld.world.node.exec(&["iptables-save", "-t", "filter"]).contains(&address));
    pod.leave();
    // Leftovers of an earlier form of a rule are removed too.
    assert!(!firewalld.world.node.exec(&["iptables-save", "-t", "filter"]).contains(&address));
}

#[test]
fn without_a_bus_firewalld_is_refused_and_iptables_works() {
    require!(probe::iptables());
    let world = World::new(Backend::IptablesNft);
    let asked = config(&world, json!({"backend": "firewalld"}));
    let pod = world.dual();
    pod.add(&asked).fails_naming(11, &[SOCKET]);
    pod.check(&asked).fails_naming(11, &[SOCKET]);
    pod.del(&asked).success();
    let status = patched(asked, json!({"cniVersion": "1.1.0"}));
    world.node.plugin("firewall").command("STATUS").config(&status).run().fails_naming(50, &[SOCKET]);
    let unasked = config(&world, json!({"backend": null}));
    pod.add(&unasked).success();
    assert!(naming(&world, &pod) > 0, "{:#?}", rules(&world));
    pod.leave();
}

#[test]
fn a_bus_that_does_not_answer_does_not_outlive_a_signal() {
    let world = World::new(Backend::Nftables);
    let pod = world.dual();
    let socket = world.node.dir().join("silent");
    let listener = UnixListener::bind(&socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = format!("unix:path={}", socket.display());
    for (verb, backend) in [("ADD", json!("firewalld")), ("ADD", Value::Null), ("CHECK", json!("firewalld"))] {
        let config = config(&world, json!({"backend": backend}));
        let call = pod.invocation(&bin_dir(), verb, &config, Some(&pod.result));
        let mut call = call.env("DBUS_SYSTEM_BUS_ADDRESS", &address).start();
        call.release();
        let mut stream = None;
        wait_until("the plugin connects", || {
            stream = listener.accept().ok();
            stream.is_some()
        });
        call.terminate();
        call.finish().fails_naming(11, &["system bus", "signal"]);
        drop(stream);
    }
    pod.leave();
}
