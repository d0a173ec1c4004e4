//! ADD, CHECK and DEL in each version of the specification, and the form of the result.

use cni_testkit::Node;
use conformance::{attach, bridge, host_end, patched};
use serde_json::{Value, json};

struct Life {
    result: Value,
    /// MACs of bridge, host end and container end, from the kernel.
    macs: [Value; 3],
    host: String,
    sandbox: String,
}

#[track_caller]
fn life_in(version: &str) -> Life {
    let node = Node::new();
    let config = json!({"cniVersion": version, "isDefaultGateway": true});
    let config = patched(bridge(&node, &["10.1.0.0/24", "fd00:1::/64"]), config);
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(result["cniVersion"], version);
    container.ping("10.1.0.1");
    let host = node.ports("br0").remove(0);
    let mac = |link: Option<Value>| link.unwrap()["address"].clone();
    let macs = [mac(node.link("br0")), mac(node.link(&host)), mac(container.link("eth0"))];
    if version >= "0.4.0" {
        attachment.check(&result).success();
    }
    if version >= "0.3.0" {
        assert_eq!(host_end(&result, "br0"), host);
    }
    attachment.del_with(&result).success();
    assert_eq!(node.reservations("net1"), []);
    Life { result, macs, host, sandbox: container.netns().to_str().unwrap().to_owned() }
}

#[track_caller]
fn the_first_shape(version: &str) {
    let expected = json!({
        "cniVersion": version,
        "ip4": {"ip": "10.1.0.2/24", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}]},
        "ip6": {"ip": "fd00:1::2/64", "gateway": "fd00:1::1", "routes": [{"dst": "::/0", "gw": "fd00:1::1"}]},
        "dns": {},
    });
    assert_eq!(life_in(version).result, expected);
}

fn interfaces(life: &Life) -> Value {
    let [bridge, host, container] = &life.macs;
    json!([
        {"name": "br0", "mac": bridge},
        {"name": life.host, "mac": host},
        {"name": "eth0", "mac": container, "sandbox": life.sandbox},
    ])
}

const ROUTES: [(&str, &str); 2] = [("0.0.0.0/0", "10.1.0.1"), ("::/0", "fd00:1::1")];

fn routes() -> Value {
    ROUTES.iter().map(|(dst, gw)| json!({"dst": dst, "gw": gw})).collect()
}

#[track_caller]
fn the_second_shape(version: &str) {
    let life = life_in(version);
    let expected = json!({
        "cniVersion": version,
        "interfaces": interfaces(&life),
        "ips": [
            {"version": "4", "interface": 2, "address": "10.1.0.2/24", "gateway": "10.1.0.1"},
            {"version": "6", "interface": 2, "address": "fd00:1::2/64", "gateway": "fd00:1::1"},
        ],
        "routes": routes(),
        "dns": {},
    });
    assert_eq!(life.result, expected);
}

#[track_caller]
fn the_third_shape(version: &str) {
    let life = life_in(version);
    let mut result = life.result.clone();
    // An empty dns may be there or not; an interface may name its MTU from 1.1.0 on.
    if result["dns"] == json!({}) {
        result.as_object_mut().unwrap().remove("dns");
    }
    if version == "1.1.0" {
        for interface in result["interfaces"].as_array_mut().unwrap() {
            interface.as_object_mut().unwrap().remove("mtu");
        }
    }
    let expected = json!({
        "cniVersion": version,
        "interfaces": interfaces(&life),
        "ips": [
            {"interface": 2, "address": "10.1.0.2/24", "gateway": "10.1.0.1"},
            {"interface": 2, "address": "fd00:1::2/64", "gateway": "fd00:1::1"},
        ],
        "routes": routes(),
    });
    assert_eq!(result, expected);
}

#[test]
fn verbs_and_result_in_0_1_0() {
    the_first_shape("0.1.0");
}

#[test]
fn verbs_and_result_in_0_2_0() {
    the_first_shape("0.2.0");
}

#[test]
fn verbs_and_result_in_0_3_0() {
    the_second_shape("0.3.0");
}

#[test]
fn verbs_and_result_in_0_3_1() {
    the_second_shape("0.3.1");
}

#[test]
fn verbs_and_result_in_0_4_0() {
    the_second_shape("0.4.0");
}

#[test]
fn verbs_and_result_in_1_0_0() {
    the_third_shape("1.0.0");
}

#[test]
fn verbs_and_result_in_1_1_0() {
    the_third_shape("1.1.0");
}
