//! `ipMasq`: the addresses that a server outside sees, and the rules that remain. Each test runs
//! with all backends that the machine has.

use std::io::ErrorKind;
use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::thread;
use std::time::Duration;

use cni_testkit::{Attachment, Container, Node, go_bin_dir, probe, require};
use conformance::{HOST, OUTSIDE, addresses, attach, bridge, choose_iptables, patched, uplink, without_iptables};
use serde_json::{Value, json};

/// The backend of the rules.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keeper {
    Nftables,
    IptablesNft,
    IptablesLegacy,
}

use Keeper::{IptablesLegacy, IptablesNft, Nftables};

impl Keeper {
    const ALL: [Keeper; 3] = [Nftables, IptablesNft, IptablesLegacy];

    fn backend(self) -> &'static str {
        if self == Nftables { "nftables" } else { "iptables" }
    }

    /// A node with this variant of iptables as the default.
    fn node(self) -> Node {
        let node = Node::new();
        let variant = if self == IptablesLegacy { "legacy" } else { "nft" };
        choose_iptables(&node, variant);
        node
    }

    fn config(self, node: &Node) -> Value {
        patched(
            bridge(node, &["10.1.0.0/24", "fd00:1::/64"]),
            json!({"isDefaultGateway": true, "ipMasq": true, "ipMasqBackend": self.backend()}),
        )
    }
}

/// A server behind the node's `out0`. It has no way back to any container.
fn server(node: &Node) -> Container {
    uplink(node, "out0")
}

fn listen(at: &Container, address: &str) -> UdpSocket {
    let address = SocketAddr::new(address.parse().unwrap(), 7777);
    // The port may have been another socket's a moment ago: a program that another test starts
    // holds it until it runs.
    let bind = || {
        (0..100).find_map(|_| match UdpSocket::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                thread::sleep(Duration::from_millis(20));
                None
            }
            bound => Some(bound.unwrap()),
        })
    };
    let socket = at.enter(bind).expect("the port is free");
    socket.set_read_timeout(Some(cni_testkit::patience(Duration::from_secs(10)))).unwrap();
    socket
}

/// Returns the sender's address that the listener sees of a datagram that `from` sends to `to`.
#[track_caller]
fn seen(listener: &UdpSocket, from: &Container, to: &str) -> String {
    let to = SocketAddr::new(to.parse().unwrap(), 7777);
    from.enter(|| {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        UdpSocket::bind(any).unwrap().send_to(b"hello", to).unwrap();
    });
    sender(listener)
}

/// Returns the sender of the next datagram.
#[track_caller]
fn sender(listener: &UdpSocket) -> String {
    loop {
        match listener.recv_from(&mut [0; 16]) {
            Ok((_, sender)) => return sender.ip().to_string(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => panic!("nothing came: {error}"),
        }
    }
}

/// Returns the sender's addresses that the server sees, in both families.
#[track_caller]
fn seen_outside(server: &Container, from: &Container) -> [String; 2] {
    OUTSIDE.map(|address| seen(&listen(server, address), from, address))
}

fn own(result: &Value) -> Vec<String> {
    addresses(result).iter().map(|address| address.split('/').next().unwrap().to_owned()).collect()
}

/// Returns all rules of all backends, printed by their own tools.
fn rules(node: &Node) -> String {
    let legacy = |family: &str, save: &str| {
        format!("if grep -q nat /proc/net/{family}_tables_names 2>/dev/null; then {save} -t nat; fi;")
    };
    let script = [
        // nft does not show the comments of iptables-nft.
        "nft -s list ruleset; iptables-nft-save -t nat 2>/dev/null; ip6tables-nft-save -t nat 2>/dev/null;".to_owned(),
        legacy("ip", "iptables-legacy-save"),
        legacy("ip6", "ip6tables-legacy-save"),
        "true".to_owned(),
    ];
    node.exec(&["sh", "-c", &script.concat()])
}

/// Returns the backends that the Go plugins know too.
fn shared() -> &'static [Keeper] {
    if probe::go_nftables().is_ok() { &Keeper::ALL } else { &[IptablesNft, IptablesLegacy] }
}

#[track_caller]
fn each(test: impl Fn(Keeper, &Node)) {
    for keeper in Keeper::ALL {
        test(keeper, &keeper.node());
    }
}

macro_rules! require_both {
    () => {
        require!(probe::iptables());
        require!(probe::tool("iptables-legacy-save"));
        require!(probe::nft());
    };
}

mod exclude;

#[test]
fn packets_to_the_outside_have_the_hosts_address() {
    require_both!();
    each(|keeper, node| {
        let server = server(node);
        let (container, attachment, result) = attach(node, &keeper.config(node), 1).remove(0);
        assert_eq!(seen_outside(&server, &container), HOST, "{keeper:?}\n{}", rules(node));
        // And in the other direction.
        for address in OUTSIDE {
            assert!(container.run(&["ping", "-c1", "-w10", address]).ok, "{keeper:?}: no answer from {address}");
        }
        attachment.del_with(&result).success();
    });
}

#[test]
fn packets_within_the_network_keep_their_source() {
    require_both!();
    each(|keeper, node| {
        let server = server(node);
        let mut all = attach(node, &keeper.config(node), 2);
        let (neighbour, other, other_result) = all.remove(1);
        let (container, attachment, result) = all.remove(0);
        for (address, to) in own(&result).iter().zip(own(&other_result)) {
            assert_eq!(&seen(&listen(&neighbour, &to), &container, &to), address);
        }
        // An address of the network beyond the host: routed, and still not translated.
        for (distant, host, network) in
            [("10.1.0.200", HOST[0], "10.1.0.0/24"), ("fd00:1::200", HOST[1], "fd00:1::/64")]
        {
            node.exec(&["ip", "route", "add", distant, "dev", "out0"]);
            server.exec(&["ip", "addr", "add", distant, "dev", "eth0", "nodad"]);
            server.exec(&["ip", "route", "add", network, "via", host]);
        }
        node.exec(&["sysctl", "-qw", "net.ipv4.conf.br0.proxy_arp=1", "net.ipv6.conf.br0.proxy_ndp=1"]);
        node.exec(&["ip", "neigh", "add", "proxy", "fd00:1::200", "dev", "br0"]);
        for (address, distant) in own(&result).iter().zip(["10.1.0.200", "fd00:1::200"]) {
            assert_eq!(&seen(&listen(&server, distant), &container, distant), address, "{keeper:?}\n{}", rules(node));
        }
        attachment.del_with(&result).success();
        other.del_with(&other_result).success();
    });
}

#[test]
fn multicast_keeps_its_source() {
    require_both!();
    each(|keeper, node| {
        let server = server(node);
        let (_container, attachment, result) = attach(node, &keeper.config(node), 1).remove(0);
        let (own, index) = (own(&result), node.link("out0").unwrap()["ifindex"].as_u64().unwrap());
        // Forwarding multicast takes a routing daemon. The rules match addresses only, so the host
        // itself sends.
        node.exec(&["ip", "addr", "add", &format!("{}/32", own[0]), "dev", "out0"]);
        node.exec(&["ip", "addr", "add", &format!("{}/128", own[1]), "dev", "out0", "nodad"]);
        server.exec(&["ip", "route", "add", "10.1.0.0/24", "via", HOST[0]]);
        server.exec(&["ip", "route", "add", "fd00:1::/64", "via", HOST[1]]);
        let send = |from: &str, to: SocketAddr| {
            let from = SocketAddr::new(from.parse().unwrap(), 0);
            node.enter(|| UdpSocket::bind(from).unwrap().send_to(b"hello", to).unwrap());
        };
        let listener = listen(&server, "0.0.0.0");
        server
            .enter(|| listener.join_multicast_v4(&"239.1.2.3".parse().unwrap(), &OUTSIDE[0].parse().unwrap()))
            .unwrap();
        send(&own[0], "239.1.2.3:7777".parse().unwrap());
        assert_eq!(sender(&listener), own[0], "{keeper:?}");
        send(&own[0], SocketAddr::new(OUTSIDE[0].parse().unwrap(), 7777));
        assert_eq!(sender(&listener), HOST[0], "{keeper:?}: the same sender, to one receiver");

        drop(listener);
        let listener = listen(&server, "::");
        let group: Ipv6Addr = "ff02::1:2345".parse().unwrap();
        let inside = server.link("eth0").unwrap()["ifindex"].as_u64().unwrap();
        server.enter(|| listener.join_multicast_v6(&group, u32::try_from(inside).unwrap())).unwrap();
        let scope = u32::try_from(index).unwrap();
        send(&own[1], std::net::SocketAddrV6::new(group, 7777, 0, scope).into());
        assert_eq!(sender(&listener), own[1], "{keeper:?}");
        send(&own[1], SocketAddr::new(OUTSIDE[1].parse().unwrap(), 7777));
        assert_eq!(sender(&listener), HOST[1], "{keeper:?}");
        for (address, prefix) in own.iter().zip([32, 128]) {
            node.exec(&["ip", "addr", "del", &format!("{address}/{prefix}"), "dev", "out0"]);
        }
        attachment.del_with(&result).success();
    });
}

#[test]
fn del_needs_no_result_no_namespace_and_no_old_configuration() {
    require_both!();
    each(|keeper, node| {
        let config = keeper.config(node);
        let other = Keeper::ALL.into_iter().find(|other| other.backend() != keeper.backend()).unwrap();
        for changed in [
            json!({}),
            json!({"ipMasq": false}),
            json!({"ipMasq": null, "ipMasqBackend": null}),
            json!({"ipMasqBackend": other.backend()}),
        ] {
            let (container, attachment, _) = attach(node, &config, 1).remove(0);
            assert!(rules(node).contains(&container.id), "{keeper:?}\n{}", rules(node));
            attachment.config(patched(config.clone(), changed)).netns("").del().success();
            assert!(!rules(node).contains(&container.id), "{keeper:?}\n{}", rules(node));
        }
        // A second time, and an attachment that never existed.
        let container = node.container();
        let attachment = Attachment::new(node, &container, config);
        attachment.del().success();
        let result = attachment.add().success();
        attachment.del_with(&result).success();
        attachment.del_with(&result).success();
    });
}

#[test]
fn rules_of_two_interfaces_are_removed_one_by_one() {
    require_both!();
    each(|keeper, node| {
        let server = server(node);
        // One default route is enough for both, whichever interface the packets take.
        let config = keeper.config(node);
        let second = patched(config.clone(), json!({"isDefaultGateway": false}));
        for eth0_first in [true, false] {
            let (container, eth0, result) = attach(node, &config, 1).remove(0);
            let eth1 = eth0.clone().ifname("eth1").config(second.clone());
            let result1 = eth1.add().success();
            let (gone, gone_result, left, left_result) =
                if eth0_first { (&eth0, &result, &eth1, &result1) } else { (&eth1, &result1, &eth0, &result) };
            gone.del_with(gone_result).success();
            if eth0_first {
                container.exec(&["ip", "route", "add", "default", "via", "10.1.0.1"]);
                container.exec(&["ip", "-6", "route", "add", "default", "via", "fd00:1::1"]);
            }
            assert_eq!(seen_outside(&server, &container), HOST, "{keeper:?} {eth0_first}\n{}", rules(node));
            left.check(left_result).success();
            left.del_with(left_result).success();
        }
    });
}

#[test]
fn check_passes_after_add_and_fails_without_a_rule() {
    require_both!();
    each(|keeper, node| {
        let config = keeper.config(node);
        let (_container, attachment, result) = attach(node, &config, 1).remove(0);
        attachment.check(&result).success();
        // The configuration's backend applies to the next ADD, not to this attachment.
        let other = Keeper::ALL.into_iter().find(|other| other.backend() != keeper.backend()).unwrap();
        attachment.clone().config(patched(config, json!({"ipMasqBackend": other.backend()}))).check(&result).success();
        let flush = match keeper {
            Nftables => "nft flush chain inet cni_plugins_masquerade masq_checks",
            IptablesNft => "iptables-nft -t nat -F POSTROUTING",
            IptablesLegacy => "iptables-legacy -t nat -F POSTROUTING",
        };
        node.exec(&["sh", "-c", flush]);
        attachment.check(&result).fails_with(101, "");
        attachment.del_with(&result).success();
    });
}

#[test]
fn gc_removes_the_rules_of_invalid_attachments() {
    require_both!();
    each(|keeper, node| {
        let config = patched(keeper.config(node), json!({"cniVersion": "1.1.0"}));
        let all = attach(node, &config, 3);
        let keep = &all[1].1;
        keep.gc(&[(&keep.id, "eth0")]).success();
        let rules = rules(node);
        for (container, ..) in &all {
            assert_eq!(rules.contains(&container.id), container.id == keep.id, "{keeper:?}\n{rules}");
        }
        keep.check(&all[1].2).success();
        keep.del().success();
    });
}

#[test]
fn a_failed_add_leaves_no_rule() {
    require_both!();
    each(|keeper, node| {
        let container = node.container();
        let attachment = Attachment::new(node, &container, keeper.config(node));
        let outcome = attachment.invocation("ADD", None).with_closed_stdout().run();
        assert_ne!(outcome.status, Some(0), "{}", outcome.report());
        assert!(!rules(node).contains(&container.id), "{keeper:?}\n{}", rules(node));
        assert_eq!(node.reservations("net1"), []);
    });
}

/// The ADD that fails goes into another namespace. With `reuse` IPAM gives it the address that the
/// first one has.
#[test]
fn a_failed_second_add_leaves_the_rules_of_the_first() {
    require_both!();
    each(|keeper, node| {
        let server = server(node);
        let config = patched(keeper.config(node), json!({"ipam": {"reuse": true}}));
        let (container, attachment, result) = attach(node, &config, 1).remove(0);
        let before = rules(node);
        let other = node.container();
        let second = attachment.clone().netns(other.netns());
        assert_ne!(second.invocation("ADD", None).with_closed_stdout().run().status, Some(0));
        assert_eq!(sorted(&rules(node)), sorted(&before), "{keeper:?}");
        // In the other backend: the undo there must not remove the rules here.
        let elsewhere = if keeper == Nftables { "iptables" } else { "nftables" };
        let second = second.config(patched(config, json!({"ipMasqBackend": elsewhere})));
        assert_ne!(second.invocation("ADD", None).with_closed_stdout().run().status, Some(0));
        assert_eq!(seen_outside(&server, &container), HOST, "{keeper:?}\n{}", rules(node));
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        let left = rules(node);
        assert!(!left.contains(&container.id), "{keeper:?}\n{left}");
    });
}

/// Returns the lines in alphabetical order, without packet counters.
fn sorted(rules: &str) -> Vec<&str> {
    let lines = rules.lines().filter(|line| !line.starts_with('#'));
    let mut lines: Vec<&str> = lines.map(|line| line.split_once(" [").map_or(line, |(chain, _)| chain)).collect();
    lines.sort_unstable();
    lines
}

#[test]
fn concurrent_first_adds_create_each_rule_once() {
    require_both!();
    each(|keeper, node| {
        let config = keeper.config(node);
        let all: Vec<(Container, Attachment<'_>)> = (0..cni_testkit::crowd(20))
            .map(|_| node.container())
            .map(|container| {
                let attachment = Attachment::new(node, &container, config.clone());
                (container, attachment)
            })
            .collect();
        let results: Vec<Value> = thread::scope(|scope| {
            let adds: Vec<_> = all.iter().map(|(_, one)| scope.spawn(|| one.add().success())).collect();
            adds.into_iter().map(|add| add.join().unwrap()).collect()
        });
        let rules = rules(node);
        for result in &results {
            for address in own(result) {
                let (start, source) = match keeper {
                    Nftables => ("\t", format!("saddr {address} ")),
                    IptablesNft | IptablesLegacy => ("-A POSTROUTING", format!("-s {address}/")),
                };
                let masquerading = rules.lines().filter(|line| line.starts_with(start) && line.contains(&source));
                assert_eq!(masquerading.count(), 1, "{keeper:?}: {address}\n{rules}");
            }
        }
        thread::scope(|scope| {
            for ((_, one), result) in all.iter().zip(&results) {
                scope.spawn(|| one.del_with(result).success());
            }
        });
    });
}

#[test]
fn go_adds_and_we_check_and_delete() {
    require_both!();
    require!(probe::go_plugins());
    for keeper in shared() {
        let node = keeper.node();
        let server = server(&node);
        for del in [0, 1, 2] {
            let container = node.container();
            let ours = Attachment::new(&node, &container, keeper.config(&node));
            let result = ours.clone().by(go_bin_dir()).add().success();
            assert_eq!(seen_outside(&server, &container), HOST);
            ours.check(&result).success();
            match del {
                0 => ours.del_with(&result).success(),
                1 => ours.del().success(),
                _ => {
                    container.unlink();
                    // Go's link has no mark, so these plugins cannot find it.
                    node.expect_left(conformance::host_end(&result, "br0"));
                    ours.del().success()
                }
            };
            assert!(!rules(&node).contains(&ours.id), "{keeper:?} {del}\n{}", rules(&node));
        }
    }
}

#[test]
fn we_add_and_go_deletes() {
    require_both!();
    require!(probe::go_plugins());
    for keeper in shared() {
        let node = keeper.node();
        let (container, attachment, result) = attach(&node, &keeper.config(&node), 1).remove(0);
        if *keeper == Nftables {
            // Debian's build of 1.9.1 fails if iptables is installed and has no such chain.
            without_iptables(&node);
        }
        attachment.by(go_bin_dir()).del_with(&result).success();
        assert!(!rules(&node).contains(&container.id), "{keeper:?}\n{}", rules(&node));
    }
}

#[test]
fn a_host_without_iptables_masquerades_with_nftables() {
    require_both!();
    let node = Node::new();
    without_iptables(&node);
    let server = server(&node);
    let config = patched(Nftables.config(&node), json!({"ipMasqBackend": null}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(seen_outside(&server, &container), HOST);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    // By name it is the rules of iptables-nft.
    let (container, attachment, result) = attach(&node, &IptablesNft.config(&node), 1).remove(0);
    assert_eq!(seen_outside(&server, &container), HOST);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn status_is_ready_without_programs() {
    require_both!();
    let node = Node::new();
    let container = node.container();
    let newest = |keeper: Keeper| patched(keeper.config(&node), json!({"cniVersion": "1.1.0"}));
    let status = |config: Value| Attachment::new(&node, &container, config).status();
    status(newest(IptablesNft)).success();
    status(newest(Nftables)).success();
    without_iptables(&node);
    status(newest(IptablesNft)).success();
    status(patched(newest(Nftables), json!({"ipMasqBackend": null}))).success();
    assert_eq!(rules(&node), "", "nothing is made by asking");
}
