//! Real packets: a machine that reaches both networks talks to each address, and both routers have
//! strict reverse-path filters, so an answer by the wrong interface is lost.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use cni_testkit::{Container, Node, patience};
use serde_json::json;

use super::{V4, V6, empty, pod, prev, routed};

/// How long to wait for an answer that must not come.
const IN_VAIN: Duration = Duration::from_millis(500);

/// Connects `outside` to both networks.
fn outside(node: &Node, networks: &[Container; 2]) -> Container {
    let outside = node.container();
    outside.ip(&["link set lo up", "address add 192.0.2.9/32 dev lo", "address add 2001:db8::9/128 dev lo nodad"]);
    for (number, network) in (1..).zip(networks) {
        let netns = outside.netns().display();
        network.set_sysctl("net/ipv4/ip_forward", "1");
        network.set_sysctl("net/ipv6/conf/all/forwarding", "1");
        network.ip(&[
            &format!("link add wan type veth peer name net{number} netns {netns}"),
            "link set wan up",
            &format!("address add 10.10{number}.0.1/24 dev wan"),
            &format!("address add fd0{number}:1::1/64 dev wan nodad"),
        ]);
        outside.ip(&[
            &format!("link set net{number} up"),
            &format!("address add 10.10{number}.0.9/24 dev net{number}"),
            &format!("address add fd0{number}:1::9/64 dev net{number} nodad"),
            &format!("route add 10.{number}.0.0/24 via 10.10{number}.0.1 src 192.0.2.9"),
            &format!("route add fd0{number}::/64 via fd0{number}:1::1 src 2001:db8::9"),
        ]);
        network.ip(&[
            &format!("route add 192.0.2.9 via 10.10{number}.0.9"),
            &format!("route add 2001:db8::9 via fd0{number}:1::9"),
        ]);
        for interface in ["all", "lan", "wan"] {
            network.set_sysctl(&format!("net/ipv4/conf/{interface}/rp_filter"), "1");
        }
        // IPv6 has no such sysctl: what comes from a source of the other network is not forwarded
        // at all.
        let other = if number == 1 { 2 } else { 1 };
        network.exec(&["ip", "-6", "rule", "add", "from", &format!("fd0{other}::/64"), "prohibit"]);
    }
    outside
}

/// Whether `outside` can connect to the container's address.
fn reaches(outside: &Container, pod: &Container, address: &str, time: Duration) -> bool {
    let address: SocketAddr = format!("{address}:80").parse().unwrap();
    // The kernel answers for a socket that listens.
    let _listener = pod.enter(|| TcpListener::bind(address).unwrap());
    outside.enter(|| TcpStream::connect_timeout(&address, time).is_ok())
}

#[test]
fn answers_from_each_address_leave_by_its_interface() {
    let node = Node::new();
    let (pod, networks) = pod(&node);
    let outside = outside(&node, &networks);
    for interface in ["all", "eth0", "net1"] {
        pod.set_sysctl(&format!("net/ipv4/conf/{interface}/rp_filter"), "1");
    }
    let long = patience(Duration::from_secs(20));
    let first = ["10.1.0.2", "[fd01::2]"];
    let second = ["10.2.0.2", "[fd02::2]"];
    assert!(first.iter().all(|address| reaches(&outside, &pod, address, long)), "by the default route");
    assert!(second.iter().all(|address| !reaches(&outside, &pod, address, IN_VAIN)), "before");
    for hints in [false, true] {
        let node = &node;
        let attachment = routed(node, &pod, json!({ "addSourceHints": hints }));
        if hints {
            pod.ip(&[
                "address flush dev net1",
                "address add 10.2.0.2/24 dev net1",
                "address add fd02::2/64 dev net1 nodad",
            ]);
        }
        let result = attachment.add_after(&prev(&pod, &[V4, V6])).success();
        for address in first.iter().chain(&second) {
            assert!(reaches(&outside, &pod, address, long), "{address}, hints: {hints}");
        }
        attachment.del_with(&result).success();
        empty(&pod);
    }
}

#[test]
fn source_hints_send_neighbour_traffic_by_the_second_interface() {
    let node = Node::new();
    let (pod, networks) = pod(&node);
    for (hints, arrives) in [(false, false), (true, true)] {
        let attachment = routed(&node, &pod, json!({ "addSourceHints": hints }));
        let result = attachment.add_after(&prev(&pod, &[V4, V6])).success();
        for address in ["10.2.0.1:80", "[fd02::1]:80"] {
            let address: SocketAddr = address.parse().unwrap();
            let _listener = networks[1].enter(|| TcpListener::bind(address).unwrap());
            let time = if arrives { patience(Duration::from_secs(20)) } else { IN_VAIN };
            let source =
                pod.enter(|| TcpStream::connect_timeout(&address, time).and_then(|stream| stream.local_addr()));
            assert_eq!(source.is_ok(), arrives, "{address}, {source:?}");
        }
        attachment.del_with(&result).success();
        pod.ip(&[
            "address flush dev net1",
            "address add 10.2.0.2/24 dev net1",
            "address add fd02::2/64 dev net1 nodad",
        ]);
        empty(&pod);
    }
}
