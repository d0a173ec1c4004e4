//! slaac: addresses, routes and name servers from the advertisements of real routers.

use std::time::{Duration, Instant};

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{Attachment, Container, Node, patience, probe, require, rounds, wait_until};
use conformance::{VERSION, VERSIONS, addresses, ipam, patched, router, uplink};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const PREFIX: &str = "prefix 2001:db8:1::/64 { };";

/// `ipam` with these keys. A virtual machine is slow.
fn slaac(keys: Value) -> Value {
    patched(json!({"type": "slaac", "timeout": 50}), keys)
}

/// A network `net1` of macvlan on the master `eth0`, with slaac and these keys in `ipam`.
fn macvlan(keys: Value) -> Value {
    json!({"cniVersion": VERSION, "name": "net1", "type": "macvlan", "master": "eth0", "ipam": slaac(keys)})
}

/// The link-local address of a router's interface.
fn link_local(router: &Container) -> String {
    let mut found = None;
    wait_until("the router has a link-local address", || {
        let shown = router.exec(&["ip", "-6", "-o", "address", "show", "dev", "eth0", "scope", "link", "-tentative"]);
        found = shown.split_whitespace().find(|word| word.starts_with("fe80:")).map(str::to_owned);
        found.is_some()
    });
    found.unwrap().split('/').next().unwrap().to_owned()
}

/// Gives a router an interface `eth0` on a bridge of the node.
fn plug(node: &Node, router: &Container, bridge: &str) {
    let name = format!("r{}", router.id.trim_start_matches("container-"));
    node.expect_left(&name);
    node.ip(&[
        &format!("link add {name} type veth peer name eth0 netns {}", router.netns().display()),
        &format!("link set {name} master {bridge} up"),
    ]);
    router.ip(&["link set eth0 up"]);
}

/// A node with the bridge `br0` and this many routers on it.
fn bridged(routers: usize) -> (Node, Vec<Container>) {
    let node = Node::new();
    node.expect_left("br0");
    node.ip(&["link add br0 type bridge mcast_snooping 0", "link set br0 up"]);
    let routers = (0..routers).map(|_| node.container()).inspect(|router| plug(&node, router, "br0")).collect();
    (node, routers)
}

/// A network `net1` on the bridge `br0`, with slaac and these keys in `ipam`.
fn bridge(keys: Value) -> Value {
    json!({"cniVersion": VERSION, "name": "net1", "type": "bridge", "bridge": "br0", "ipam": slaac(keys)})
}

/// The kernel's attributes of the interface's global addresses.
fn globals(container: &Container) -> Vec<Value> {
    let links = container.json(&["ip", "-j", "-6", "address", "show", "dev", "eth0", "scope", "global"]);
    let mut infos = links[0]["addr_info"].as_array().cloned().unwrap_or_default();
    // For an address of another scope, `ip` prints an empty object.
    infos.retain(|info| info["local"].is_string());
    infos
}

/// Adds, compares the result with the kernel, checks and deletes.
fn life(node: &Node, router: &Container, config: Value) {
    let container = node.container();
    let attachment = Attachment::new(node, &container, config);
    let result = attachment.add().success();
    let gateway = link_local(router);
    let there = globals(&container);
    assert_eq!(there.len(), 1, "{there:?}");
    assert_eq!((&there[0]["dynamic"], &there[0]["tentative"]), (&json!(true), &Value::Null));
    assert_eq!(addresses(&result), [format!("{}/64", there[0]["local"].as_str().unwrap())]);
    assert_eq!((&result["ips"][0]["gateway"], &result["ips"][0]["interface"]), (&json!(gateway), &json!(0)));
    let expected = json!([{"dst": "2001:db8:2::/48", "gw": gateway}, {"dst": "::/0", "gw": gateway}]);
    assert_eq!(result["routes"], expected);
    let dns = json!({"nameservers": ["2001:db8::53", "fe80::53%eth0"], "search": ["lan.example", "other.example"]});
    assert_eq!(result["dns"], dns);
    let routes = container.exec(&["ip", "-6", "route", "show", "default"]);
    assert_eq!(routes.lines().count(), 1, "{routes}");
    assert!(routes.contains("proto ra"), "the kernel renews the route: {routes}");
    attachment.check(&result).success();
    container.set_sysctl("net/ipv6/conf/eth0/accept_ra", "0");
    attachment.check(&result).fails_with(101, "sysctl net/ipv6/conf/eth0/accept_ra is 0, expected 2");
    attachment.add().failure();
    attachment.del_with(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(container.link("eth0"), None);
}

const ALL: &str = "prefix 2001:db8:1::/64 { }; route 2001:db8:2::/48 { }; RDNSS 2001:db8::53 fe80::53 { }; \
                   DNSSL lan.example other.example { };";

#[test]
fn macvlan_gets_all_that_a_router_advertises() {
    require!(probe::radvd().map(drop));
    let node = Node::new();
    let outside = uplink(&node, "eth0");
    let _radvd = router::radvd(&node, &outside, ALL);
    life(&node, &outside, macvlan(json!({})));
}

#[test]
fn ipvlan_gets_all_that_a_router_advertises() {
    require!(probe::ipvlan());
    require!(probe::radvd().map(drop));
    let node = Node::new();
    let outside = uplink(&node, "eth0");
    let _radvd = router::radvd(&node, &outside, ALL);
    life(&node, &outside, patched(macvlan(json!({})), json!({"type": "ipvlan"})));
}

#[test]
fn vlan_gets_all_that_a_router_advertises() {
    require!(probe::vlan_links());
    require!(probe::radvd().map(drop));
    let node = Node::new();
    let router = node.container();
    node.expect_left("eth0");
    node.ip(&[
        &format!("link add eth0 type veth peer name wire netns {}", router.netns().display()),
        "link set eth0 up",
    ]);
    router.ip(&["link set wire up", "link add link wire name eth0 type vlan id 7", "link set eth0 up"]);
    let _radvd = router::radvd(&node, &router, ALL);
    life(&node, &router, patched(macvlan(json!({})), json!({"type": "vlan", "vlanId": 7})));
}

#[test]
fn a_bridge_with_an_uplink_passes_advertisements() {
    require!(probe::radvd().map(drop));
    let (node, routers) = bridged(1);
    let _radvd = router::radvd(&node, &routers[0], ALL);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(json!({})));
    let result = attachment.add().success();
    assert_eq!(result["ips"][0]["gateway"], link_local(&routers[0]));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn dnsmasq_is_a_router_too() {
    require!(probe::dnsmasq().map(drop));
    let (node, routers) = bridged(1);
    routers[0].ip(&["address add 2001:db8:1::1/64 dev eth0 nodad"]);
    for mode in ["ra-only", "slaac"] {
        let _dnsmasq = router::dnsmasq(&node, &routers[0], &[&format!("--dhcp-range=2001:db8:1::,{mode},64")]);
        let container = node.container();
        let attachment = Attachment::new(&node, &container, bridge(json!({})));
        let result = attachment.add().success();
        assert!(addresses(&result)[0].starts_with("2001:db8:1:"), "{mode}: {result}");
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

#[test]
fn beside_ipv4_it_follows_in_the_list() {
    require!(probe::radvd().map(drop));
    let (node, routers) = bridged(1);
    let _radvd = router::radvd(&node, &routers[0], ALL);
    let container = node.container();
    let first = patched(bridge(json!(null)), json!({"ipam": ipam(&node, &["10.1.0.0/24"])}));
    let first = Attachment::new(&node, &container, first);
    let prev = first.add().success();
    let second = json!({"cniVersion": VERSION, "name": "net1", "type": "slaac", "timeout": 50});
    let second = Attachment::new(&node, &container, second);
    let result = second.add_after(&prev).success();
    assert_eq!(result["interfaces"], prev["interfaces"]);
    assert_eq!(addresses(&result)[0], "10.1.0.2/24");
    assert!(addresses(&result)[1].starts_with("2001:db8:1:"), "{result}");
    assert_eq!((&result["ips"][1]["interface"], result["routes"].as_array().unwrap().len()), (&json!(2), 2));
    assert_eq!(result["dns"]["nameservers"][0], "2001:db8::53");
    for attachment in [&first, &second] {
        attachment.check(&result).success();
    }
    for attachment in [&second, &first] {
        attachment.del_with(&result).success();
    }
}

#[test]
fn two_routers_are_two_default_routes() {
    require!(probe::radvd().map(drop));
    let (node, routers) = bridged(2);
    let _first = router::radvd(&node, &routers[0], PREFIX);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(json!({})));
    let _second = router::radvd(&node, &routers[1], PREFIX);
    let result = attachment.add().success();
    let gateways: Vec<String> = routers.iter().map(link_local).collect();
    let gateway = result["ips"][0]["gateway"].as_str().unwrap();
    assert!(gateways.iter().any(|one| one == gateway), "{gateways:?} {result}");
    wait_until("both routers are in use", || {
        container.exec(&["ip", "-6", "route", "show", "default"]).matches("fe80:").count() == 2
    });
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn the_router_of_the_highest_preference_is_the_gateway() {
    require!(probe::radvd().map(drop));
    let (node, routers) = bridged(2);
    let addresses: Vec<String> = routers.iter().map(link_local).collect();
    for (preferences, expected) in [(["low", "high"], 1), (["high", "medium"], 0), (["low", "medium"], 1)] {
        let advertise = |number: usize| {
            let options = format!("AdvDefaultPreference {}; {PREFIX}", preferences[number]);
            router::radvd(&node, &routers[number], &options)
        };
        let _radvd = [advertise(0), advertise(1)];
        // ADD does not wait for a second router.
        wait_until("both routers have answered", || {
            let container = node.container();
            let attachment = Attachment::new(&node, &container, bridge(json!({})));
            let result = attachment.add().success();
            let routes = result["routes"].as_array().unwrap().clone();
            attachment.del_with(&result).success();
            let are_both = routes.len() == 2;
            assert!(!are_both || result["ips"][0]["gateway"] == addresses[expected], "{preferences:?}: {result}");
            are_both
        });
    }
}

#[test]
fn a_router_with_lifetime_0_is_not_a_gateway() {
    require!(probe::radvd().map(drop));
    let (node, routers) = bridged(1);
    let _radvd = router::radvd(&node, &routers[0], &format!("AdvDefaultLifetime 0; {PREFIX}"));
    let container = node.container();
    // Long enough for the next advertisement and the detection of duplicates.
    let timeout = patience(Duration::from_secs(10)).as_secs().min(50);
    let attachment = Attachment::new(&node, &container, bridge(json!({"timeout": timeout})));
    let failure = attachment.add().fails_naming(11, &["default route"]);
    assert!(failure.details.contains("none of them is a default router"), "{failure:?}");
    assert_eq!(container.link("eth0"), None);
    let attachment = attachment.config(bridge(json!({"timeout": timeout, "required": false})));
    let result = attachment.add().success();
    assert!(addresses(&result)[0].starts_with("2001:db8:1:"), "{result}");
    assert_eq!((&result["ips"][0]["gateway"], &result["routes"]), (&Value::Null, &Value::Null));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn without_a_router_add_fails_in_time_and_leaves_nothing() {
    let (node, _) = bridged(0);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(json!({"timeout": 1})));
    let begin = Instant::now();
    let failure = attachment.add().fails_naming(11, &["eth0", "IPv6 router"]);
    assert!(begin.elapsed() >= Duration::from_secs(1));
    assert!(failure.details.contains("no router answered"), "{failure:?}");
    assert_eq!((container.link("eth0"), node.ports("br0")), (None, vec![]));
    attachment.del().success();
    // The wait ends before the interface plugin ends the IPAM plugin.
    let limit = patience(Duration::from_secs(4)).as_secs().min(12);
    let attachment = attachment.config(patched(bridge(json!({})), json!({"delegateTimeout": limit})));
    attachment.add().fails_naming(11, &["eth0", "IPv6 router"]);
    let attachment = attachment.config(bridge(json!({"timeout": 1, "required": false})));
    let result = attachment.add().success();
    assert_eq!((&result["ips"], container.link("eth0").unwrap()["operstate"].clone()), (&Value::Null, json!("UP")));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn a_failed_chained_add_restores_the_interface() {
    let (node, _) = bridged(0);
    let container = node.container();
    let first = patched(bridge(json!(null)), json!({"ipam": ipam(&node, &["10.1.0.0/24"]), "acceptRa": "no"}));
    let first = Attachment::new(&node, &container, first);
    let prev = first.add().success();
    let state = || ipv6_state(&container);
    let before = state();
    let second = json!({"cniVersion": VERSION, "name": "net1", "type": "slaac", "timeout": 1, "token": "::5"});
    let second = Attachment::new(&node, &container, second);
    second.add_after(&prev).fails_naming(11, &["eth0"]);
    assert_eq!(state(), before);
    // SIGTERM ends the wait.
    let patient = second.clone().config(json!({"cniVersion": VERSION, "name": "net1", "type": "slaac", "timeout": 50}));
    let mut started = patient.invocation("ADD", Some(&prev)).start();
    started.release();
    wait_until("it waits", || container.sysctl("net/ipv6/conf/eth0/accept_ra") == "2");
    started.terminate();
    started.finish().fails_with(11, "");
    assert_eq!(state(), before);
    // A configured address would be lost.
    container.ip(&["address add 2001:db8:9::1/64 dev eth0 nodad"]);
    second.add_after(&prev).fails_with(7, "eth0 has the configured address 2001:db8:9::1/64");
    second.add().fails_with(7, "missing prevResult from earlier plugin");
    second.del().success();
    first.del().success();
}

/// The sysctls that slaac changes, and the global addresses.
fn ipv6_state(container: &Container) -> (Vec<String>, Vec<Value>) {
    let names = ["accept_ra", "autoconf", "accept_dad", "use_tempaddr", "router_solicitation_delay", "disable_ipv6"];
    let sysctls = names.map(|name| container.sysctl(&format!("net/ipv6/conf/eth0/{name}")));
    (sysctls.to_vec(), globals(container))
}

/// Each call before the wait for a router. Without one, the ADD fails anyway.
#[test]
fn whichever_call_fails_a_chained_add_changes_nothing() {
    require!(trace::supported());
    let (node, _) = bridged(0);
    let container = node.container();
    let first = patched(bridge(json!(null)), json!({"ipam": ipam(&node, &["10.1.0.0/24"]), "acceptRa": "no"}));
    let first = Attachment::new(&node, &container, first);
    let prev = first.add().success();
    let before = ipv6_state(&container);
    let second = json!({"cniVersion": VERSION, "name": "net1", "type": "slaac", "timeout": 1, "token": "::5"});
    let second = Attachment::new(&node, &container, second);
    for act in [Act::Fail(Errno::EPERM), Act::Signal(Signal::SIGTERM)] {
        let attempt = |at| {
            let plan = Plan { victim: "slaac".to_owned(), at, act };
            second.invocation("ADD", Some(&prev)).traced(&plan)
        };
        let all = attempt(u64::MAX).all;
        let until_wait = (1..).zip(&all).take_while(|(_, hit)| hit.starting || hit.call != "signalfd4");
        // Without setns, the undo cannot enter the namespace either.
        let is_point = |hit: &trace::Hit| !hit.starting && hit.call != "setns";
        let points: Vec<u64> = until_wait.filter(|(_, hit)| is_point(hit)).map(|(at, _)| at).collect();
        assert!(points.len() > 20, "{all:?}");
        for at in points.iter().copied().step_by(points.len().div_ceil(usize::try_from(rounds(8)).unwrap())) {
            let hurt = attempt(at);
            let story = format!("{act:?} at call {at}, {:?}\n{}", hurt.hit, hurt.outcome.report());
            assert_eq!((hurt.outcome.status, ipv6_state(&container)), (Some(1), before.clone()), "{story}");
        }
    }
    first.del_with(&prev).success();
}

#[test]
fn a_killed_add_leaves_nothing_that_del_misses() {
    let (node, _) = bridged(0);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(json!({})));
    for _ in 0..3 {
        let mut started = attachment.invocation("ADD", None).start();
        started.release();
        wait_until("slaac waits", || {
            let read = container.run(&["cat", "/proc/sys/net/ipv6/conf/eth0/accept_ra"]);
            read.ok && read.stdout.trim() == "2"
        });
        started.signal_group(Signal::SIGKILL);
        drop(started.finish());
        attachment.del().success();
        assert_eq!((container.link("eth0"), node.ports("br0")), (None, vec![]));
    }
}

#[test]
fn modes_and_tokens_choose_the_address() {
    require!(probe::radvd().map(drop));
    let (node, routers) = bridged(1);
    let _radvd = router::radvd(&node, &routers[0], PREFIX);
    let mut attached = Vec::new();
    let mut add = |keys: Value| {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, bridge(keys));
        let found = addresses(&attachment.add().success());
        attached.push(attachment);
        (found, container)
    };
    let (eui64, container) = add(json!({"addrGenMode": "eui64"}));
    let octets = |address: &str| address.split('/').next().unwrap().parse::<std::net::Ipv6Addr>().unwrap().octets();
    let link = container.link("eth0").unwrap();
    let mac = link["address"].as_str().unwrap().split(':').map(|octet| u8::from_str_radix(octet, 16).unwrap());
    let mac: Vec<u8> = mac.collect();
    let expected = [mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]];
    assert_eq!(octets(&eui64[0])[8..], expected);
    let (stable, _) = add(json!({"addrGenMode": "stable-privacy"}));
    assert_ne!(octets(&stable[0])[11..13], [0xff, 0xfe], "{stable:?}");
    let (token, container) = add(json!({"token": "::5"}));
    assert_eq!((&token[..], globals(&container).len()), (&["2001:db8:1::5/64".to_owned()][..], 1));
    let (none, _) = add(json!({"addrGenMode": "none", "token": "::6"}));
    assert_eq!(none, ["2001:db8:1::6/64"]);
    let other = node.container();
    let attachment = Attachment::new(&node, &other, bridge(json!({"token": "::5"})));
    attachment.add().fails_with(102, "address 2001:db8:1::5/64 is in use by another host on the link");
    assert_eq!(other.link("eth0"), None);
    for attachment in attached {
        attachment.del().success();
    }
}

/// Sends advertisements whose options are malformed, from a router's link-local address, until it
/// is killed.
const HOSTILE: &str = r#"
import socket, struct, time
s = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
to = ("ff02::1", 0, 0, socket.if_nametoindex("eth0"))
head = lambda: struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 0, 0, 0)
server = socket.inet_pton(socket.AF_INET6, "2001:db8::bad")
options = [
    b"\x19\x00\0\0\0\0\0\x3c" + server,                      # RDNSS of length 0
    b"\x19\xff\0\0\0\0\0\x3c" + server,                      # longer than the message
    b"\x19\x02\0\0\0\0\0\x3c" + server[:8],                  # half an address
    b"\x1f\x03\0\0\0\0\0\x3c\x3fabcdefghijklmno",            # a label without its end
    b"\x1f\x03\0\0\0\0\0\x3c\xc0\0\xc0\0" + b"\xc0\0" * 6,   # pointers in a circle
    b"\x1f\x03\0\0\0\0\0\x3c\x0ea\nnameserver b",            # a line of resolv.conf
    b"\x18\x03\x81\0\0\0\0\x3c" + server,                    # a route with a prefix of 129 bits
    b"\x1f\x05\0\0\0\0\0\x3c\x19\x03\0\0\0\0\0\x3c" + server + b"\0" * 8,  # an option in an option
]
while True:
    for option in options:
        s.sendto(head() + option, to)
    s.sendto(head() + b"".join(options[2:]), to)
    time.sleep(0.01)
"#;

#[test]
fn hostile_advertisements_change_no_result() {
    require!(probe::radvd().map(drop));
    require!(probe::tool("python3"));
    let (node, routers) = bridged(2);
    let _radvd = router::radvd(&node, &routers[0], ALL);
    link_local(&routers[1]);
    let _hostile = router::start(&node, &routers[1], &["python3", "-c", HOSTILE]);
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(json!({})));
    let result = attachment.add().success();
    assert_eq!(result["dns"]["nameservers"], json!(["2001:db8::53", "fe80::53%eth0"]));
    assert_eq!(result["dns"]["search"], json!(["lan.example", "other.example"]));
    assert_eq!(result["ips"][0]["gateway"], link_local(&routers[0]));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn every_version_gets_slaacs_addresses() {
    require!(probe::radvd().map(drop));
    let node = Node::new();
    let outside = uplink(&node, "eth0");
    let _radvd = router::radvd(&node, &outside, PREFIX);
    for version in VERSIONS {
        let container = node.container();
        let config = patched(macvlan(json!({})), json!({"cniVersion": version}));
        let attachment = Attachment::new(&node, &container, config);
        let result = attachment.add().success();
        assert_eq!(result["cniVersion"], version);
        attachment.del().success();
    }
}

#[test]
fn slaac_refuses_a_host_that_is_the_gateway() {
    let (node, _) = bridged(0);
    let container = node.container();
    for (keys, msg) in [
        (json!({"isGateway": true}), "the IPAM plugin slaac needs a router on the network as the gateway"),
        (json!({"acceptRa": "no"}), "the IPAM plugin slaac needs an interface that accepts advertisements"),
    ] {
        let config = patched(bridge(json!({})), patched(keys, json!({"cniVersion": "1.1.0"})));
        let attachment = Attachment::new(&node, &container, config);
        attachment.add().fails_with(7, msg);
        attachment.status().fails_with(50, msg);
    }
    let bad = patched(bridge(json!({"timeout": 0})), json!({"cniVersion": "1.1.0"}));
    let attachment = Attachment::new(&node, &container, bad);
    attachment.add().fails_with(7, "invalid timeout 0: must be between 1 and 55 seconds");
    attachment.status().fails_with(50, "invalid timeout 0: must be between 1 and 55 seconds");
    attachment.gc(&[]).success();
    assert_eq!(container.link("eth0"), None);
}
