//! Many nodes at once, on one segment.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use cni_testkit::{Container, Node, Outcome, Started, probe, require};
use conformance::cluster::{Cluster, ranges};
use conformance::{address, patched, sandboxed};
use serde_json::{Value, json};

use super::supported;

/// Asks for the hardware address of each address in argv[1], and prints all hardware addresses that
/// answered for each.
const ARP: &str = r#"
import json, socket, sys, time
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
link.bind(("eth0", 0))
link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
link.settimeout(0.2)
own = link.getsockname()[4]
seen = {address: set() for address in sys.argv[1].split(",")}

def ask(addresses, seconds):
    for address in addresses:
        link.send(b"\xff" * 6 + own + b"\x08\x06\x00\x01\x08\x00\x06\x04\x00\x01" + own + bytes(10)
                  + socket.inet_aton(address))
        time.sleep(0.001)
    end = time.time() + seconds
    while time.time() < end:
        try:
            frame = link.recv(2048)
        except TimeoutError:
            continue
        if frame[20:22] == b"\x00\x02":
            seen.get(socket.inet_ntoa(frame[28:32]), set()).add(frame[22:28].hex(":"))

deadline = time.time() + 60
while time.time() < deadline and not all(seen.values()):
    ask([address for address, macs in seen.items() if not macs], 1)
# Asks for all again: another machine with one of the addresses would answer too.
ask(list(seen), 2)
print(json.dumps({address: sorted(macs) for address, macs in seen.items()}))
"#;

/// Runs `verb` of a plugin for all containers at the same time. A call is the number of a node, a
/// container on it, and its configuration.
fn at_once(cluster: &Cluster, verb: &str, calls: &[(usize, &Container, Value)]) -> Vec<Outcome> {
    let start = |(node, container, config): &(usize, &Container, Value)| {
        let plugin = config["type"].as_str().unwrap();
        cluster.nodes[*node].plugin(plugin).command(verb).container(container).config(config).start()
    };
    let mut started: Vec<Started> = calls.iter().map(start).collect();
    started.iter_mut().for_each(Started::release);
    started.into_iter().map(Started::finish).collect()
}

/// Connects `eth1` of all nodes, and `eth0` of the returned container, by a bridge.
fn connect(segment: &Node, cluster: &Cluster) -> Container {
    segment.ip(&["link add segment type bridge", "link set segment up"]);
    let machine = segment.container();
    let mut ends = vec![("eth0", machine.netns().to_owned())];
    ends.extend(cluster.nodes.iter().map(|node| ("eth1", node.netns())));
    for (number, (name, netns)) in ends.iter().enumerate() {
        segment.expect_left(&format!("port{number}"));
        segment.ip(&[
            &format!("link add port{number} type veth peer name {name} netns {}", netns.display()),
            &format!("link set port{number} master segment up"),
        ]);
    }
    machine.ip(&["link set eth0 up"]);
    for node in &cluster.nodes {
        node.expect_left("eth1");
        node.ip(&["link set eth1 up"]);
    }
    machine
}

#[test]
fn a_thousand_pods_of_ten_nodes_get_distinct_addresses() {
    require!(supported());
    let count = cni_testkit::crowd(1000);
    let cluster = Cluster::new(10);
    // The test is not about time: 100 calls of a node wait for each other, on a busy machine.
    cluster.set_timeout(20);
    let containers: Vec<(usize, Container)> =
        (0..count).map(|number| (number % 10, cluster.nodes[number % 10].container())).collect();
    // The names of node and network decide in which order a node tries blocks. With these names,
    // all nodes together try at most four blocks that another node has, whichever claims first.
    let network = |node| patched(cluster.network(node, &ranges(&["10.1.0.0/20"])), json!({"name": "net"}));
    let calls: Vec<(usize, &Container, Value)> =
        containers.iter().map(|(node, container)| (*node, container, network(*node))).collect();
    let begin = Instant::now();
    let results: Vec<Value> = at_once(&cluster, "ADD", &calls).iter().map(Outcome::success).collect();
    let (seconds, requests) = (begin.elapsed().as_secs_f32(), cluster.server.take_requests().len());
    let distinct: BTreeSet<String> = results.iter().map(address).collect();
    assert_eq!(distinct.len(), count);
    conformance::measure::figure(&format!("{count} ADDs of ten nodes: {seconds:.1} s, {requests} requests"));
    assert!(requests <= 100, "{requests} requests");
    for outcome in at_once(&cluster, "DEL", &calls) {
        outcome.success();
    }
    // A node keeps at most one empty block.
    assert!(cluster.claims().len() <= 10, "{:?}", cluster.claims());
}

#[test]
fn an_add_that_claims_a_block_sends_one_request() {
    require!(supported());
    let cluster = Cluster::new(1);
    let network = patched(cluster.network(0, &ranges(&["10.1.0.0/24"])), json!({"ipam": {"blockSize": 1}}));
    let containers: Vec<Container> = (0..42).map(|_| cluster.nodes[0].container()).collect();
    let call = |verb: &str, network: &Value, container: &Container| {
        cluster.nodes[0].plugin("cluster-local").command(verb).container(container).bad_config(network)
    };
    // The median time of 20 ADDs that send this number of requests, after one that first uses the
    // network.
    let median = |network: &Value, containers: &[Container], requests: usize| {
        call("ADD", network, &containers[0]).run().success();
        let mut times = Vec::new();
        for container in &containers[1..] {
            cluster.server.take_requests();
            let (begin, outcome) = (Instant::now(), call("ADD", network, container).run());
            times.push(begin.elapsed());
            outcome.success();
            assert_eq!(cluster.server.take_requests().len(), requests);
        }
        times.sort();
        times[10]
    };
    let held = patched(network.clone(), json!({"name": "net2", "ipam": {"layer2": "b", "blockSize": 32}}));
    let claiming = median(&network, &containers[..21], 1);
    let allocating = median(&held, &containers[21..], 0);
    let text =
        format!("an ADD that claims a block: {claiming:.1?}, from a held block: {allocating:.1?} (medians of 20)");
    conformance::measure::figure(&text);
    for (network, containers) in [(&network, &containers[..21]), (&held, &containers[21..])] {
        containers.iter().for_each(|container| drop(call("DEL", network, container).run().success()));
    }
}

#[test]
fn each_address_is_seen_from_one_mac_on_the_segment() {
    require!(supported());
    require!(probe::tool("python3"));
    let count = cni_testkit::crowd(1000);
    let cluster = Cluster::new(10);
    cluster.set_timeout(20);
    let segment = Node::new();
    let machine = connect(&segment, &cluster);
    let containers: Vec<(usize, Container)> =
        (0..count).map(|number| (number % 10, cluster.nodes[number % 10].container())).collect();
    let macvlan = |node| {
        let network = cluster.network(node, &ranges(&["10.1.0.0/20"]));
        patched(network, json!({"type": "macvlan", "master": "eth1"}))
    };
    let calls: Vec<(usize, &Container, Value)> =
        containers.iter().map(|(node, container)| (*node, container, macvlan(*node))).collect();
    let begin = Instant::now();
    let results: Vec<Value> = at_once(&cluster, "ADD", &calls).iter().map(Outcome::success).collect();
    let seconds = begin.elapsed().as_secs_f32();
    conformance::measure::figure(&format!("{count} ADDs of macvlan on ten nodes: {seconds:.1} s"));
    let expected: BTreeMap<String, Vec<String>> = results
        .iter()
        .map(|result| (address(result), vec![sandboxed(result)["mac"].as_str().unwrap().to_owned()]))
        .collect();
    assert_eq!(expected.len(), count, "no address twice");
    let asked: Vec<&str> = expected.keys().map(String::as_str).collect();
    let heard = machine.json(&["python3", "-c", ARP, &asked.join(",")]);
    let heard: BTreeMap<String, Vec<String>> = serde_json::from_value(heard).unwrap();
    assert_eq!(heard, expected);
    let calls: Vec<(usize, &Container, Value)> = calls
        .into_iter()
        .zip(&results)
        .map(|((node, container, config), result)| (node, container, patched(config, json!({"prevResult": result}))))
        .collect();
    for outcome in at_once(&cluster, "DEL", &calls) {
        outcome.success();
    }
}
