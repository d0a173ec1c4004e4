//! dhcp: the MTU of the server, routes with host bits, and routes of the configuration.

use cni_testkit::{Attachment, Container, probe, require, wait_until};
use conformance::VERSION;
use conformance::lan::Lan;
use serde_json::{Value, json};

use super::wire::Wire;

/// An attachment with these keys of `ipam`, whose interface this plugin creates on `lan`.
fn attachment<'n>(lan: &'n Lan, container: &Container, keys: &Value, ipam: &Value) -> Attachment<'n> {
    let mut config = json!({"cniVersion": VERSION, "name": "net1"});
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    config["ipam"] = json!({"type": "dhcp", "daemonSocketPath": lan.socket()});
    for (key, value) in ipam.as_object().unwrap() {
        config["ipam"][key] = value.clone();
    }
    Attachment::new(&lan.node, container, config)
}

/// The MTU of the container's eth0.
fn mtu(container: &Container) -> Value {
    container.link("eth0").unwrap()["mtu"].clone()
}

#[test]
fn a_server_mtu_above_that_of_the_link_is_limited() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &["--dhcp-option=3,192.168.1.1", "--dhcp-option=option:mtu,9000"]);
    let _daemon = lan.daemon();
    let container = lan.node.container();
    let attachment = attachment(&lan, &container, &json!({"type": "bridge", "bridge": "lan"}), &json!({}));
    let result = attachment.add().success();
    assert_eq!(result["routes"], json!([{"dst": "0.0.0.0/0", "gw": "192.168.1.1", "mtu": 1500}]));
    let routes = container.exec(&["ip", "route"]);
    assert!(!routes.contains("mtu 9000"), "{routes}");
    assert_eq!(mtu(&container), 1500);
    attachment.check(&result).success();
    attachment.del().success();
}

#[test]
fn a_requested_interface_mtu_is_set_within_the_limits() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::silent();
    lan.node.expect_left("up0");
    lan.node.expect_left("up1");
    lan.node.ip(&["link add up0 type veth peer name up1", "link set up1 master lan up", "link set up0 up"]);
    let _daemon = lan.daemon();
    let bridge = json!({"type": "bridge", "bridge": "lan"});
    let macvlan = json!({"type": "macvlan", "master": "up0", "mtu": 1300});
    let requested = json!({"request": [{"option": "interface-mtu"}]});
    for (keys, ipam, server, expected) in [
        (&bridge, &requested, "1400", 1400),
        // The other end of the veth drops longer packets.
        (&bridge, &requested, "9000", 1500),
        (&bridge, &json!({}), "1400", 1500),
        (&macvlan, &requested, "1400", 1400),
        // The kernel refuses an MTU above that of the master.
        (&macvlan, &requested, "9000", 1300),
    ] {
        lan.serve(10, &["--dhcp-option=3,192.168.1.1", &format!("--dhcp-option=option:mtu,{server}")]);
        let container = lan.node.container();
        let attachment = attachment(&lan, &container, keys, ipam);
        let result = attachment.add().success();
        assert_eq!(mtu(&container), expected, "{keys} {server}");
        let route = u64::min(expected, server.parse().unwrap());
        assert_eq!(result["routes"][0]["mtu"], route, "{keys} {server}");
        attachment.check(&result).success();
        attachment.del().success();
        wait_until("the server has the address back", || lan.leased().is_empty());
    }
}

#[test]
fn host_bits_of_a_classless_route_are_masked() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let _daemon = lan.daemon();
    let container = lan.node.container();
    let attachment = attachment(&lan, &container, &json!({"type": "bridge", "bridge": "lan"}), &json!({}));
    // 10.9.255.0/20.
    let routes: &[u8] = &[121, 8, 20, 10, 9, 255, 192, 168, 1, 1];
    let result = wire.during(|message| vec![message.granted(&[routes])], || attachment.add().success());
    assert_eq!(result["routes"], json!([{"dst": "10.9.240.0/20", "gw": "192.168.1.1"}]));
    attachment.check(&result).success();
    attachment.del().success();
}

#[test]
fn routes_of_the_configuration_are_added_to_those_of_the_lease() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &["--dhcp-option=3,192.168.1.1"]);
    let daemon = lan.daemon();
    let container = lan.node.container();
    let routes = json!([{"dst": "10.9.0.0/16"}, {"dst": "10.8.0.0/16", "gw": "192.168.1.2", "priority": 7}]);
    let keys = json!({"type": "bridge", "bridge": "lan"});
    let attachment = attachment(&lan, &container, &keys, &json!({"routes": routes}));
    let result = attachment.add().success();
    let all = json!([
        {"dst": "0.0.0.0/0", "gw": "192.168.1.1"},
        {"dst": "10.9.0.0/16", "gw": "192.168.1.1"},
        {"dst": "10.8.0.0/16", "gw": "192.168.1.2", "priority": 7},
    ]);
    assert_eq!(result["routes"], all);
    let present = || container.exec(&["ip", "route"]);
    let complete = || {
        ["10.9.0.0/16 via 192.168.1.1 ", "10.8.0.0/16 via 192.168.1.2 "].iter().all(|route| present().contains(route))
    };
    assert!(complete(), "{}", present());
    attachment.check(&result).success();
    // The lease ends, and another one replaces it: the daemon adds the recorded routes again.
    daemon.kill();
    lan.age(130);
    let _daemon = lan.daemon();
    wait_until("the routes are there again", || container.addresses("eth0") == ["192.168.1.5/24"] && complete());
    attachment.del().success();
}
