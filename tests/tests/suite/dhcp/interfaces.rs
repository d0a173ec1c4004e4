//! dhcp behind the plugins that create the interface: the release leaves before the link goes.

use cni_testkit::{Attachment, Container, bin_dir, probe, report_errors, require, wait_until};
use conformance::VERSION;
use serde_json::{Value, json};

use super::Lan;

/// An attachment whose interface this plugin creates on the bridge `lan`.
fn attachment<'n>(lan: &'n Lan, container: &Container, plugin: &str) -> Attachment<'n> {
    let ipam = json!({"type": "dhcp", "daemonSocketPath": lan.socket()});
    let config: Value = match plugin {
        "bridge" => json!({"cniVersion": VERSION, "name": "net1", "type": plugin, "bridge": "lan", "ipam": ipam}),
        _ => {
            lan.node.expect_left("up0");
            lan.node.expect_left("up1");
            lan.node.ip(&["link add up0 type veth peer name up1", "link set up1 master lan up", "link set up0 up"]);
            json!({"cniVersion": VERSION, "name": "net1", "type": plugin, "master": "up0", "ipam": ipam})
        }
    };
    Attachment::new(&lan.node, container, config)
}

/// DEL of the interface plugin gives the address back at the server, and removes the link.
fn del_releases_at_the_server(plugin: &str) {
    let lan = Lan::new(10, &["--dhcp-option=3,192.168.1.1"]);
    let _daemon = lan.daemon();
    let container = lan.node.container();
    let attachment = attachment(&lan, &container, plugin);
    let result = attachment.add().success();
    assert_eq!(result["ips"][0]["address"], "192.168.1.5/24");
    assert_eq!(container.addresses("eth0"), ["192.168.1.5/24"]);
    attachment.check(&result).success();
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
    assert!(container.link("eth0").is_none());
    attachment.del().success();
}

#[test]
fn del_of_a_bridge_port_releases_at_the_server() {
    require!(probe::dnsmasq().map(drop));
    del_releases_at_the_server("bridge");
}

#[test]
fn del_of_a_macvlan_releases_at_the_server() {
    require!(probe::dnsmasq().map(drop));
    del_releases_at_the_server("macvlan");
}

#[test]
fn an_add_that_fails_releases_at_the_server() {
    require!(probe::dnsmasq().map(drop));
    // A gateway that is not on the link.
    let lan = Lan::new(10, &["--dhcp-option=121,10.9.0.0/16,172.16.0.1"]);
    let _daemon = lan.daemon();
    let container = lan.node.container();
    attachment(&lan, &container, "bridge").add().failure();
    assert!(lan.log().contains(" DHCPACK(lan) 192.168.1.5 "));
    wait_until("the server has the address back", || lan.leased().is_empty());
    assert!(container.link("eth0").is_none());
}

#[test]
fn del_without_a_daemon_still_removes_the_link() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let daemon = lan.daemon();
    let container = lan.node.container();
    let attachment = attachment(&lan, &container, "bridge");
    attachment.add().success();
    daemon.kill();
    attachment.del().fails_naming(11, &["the attachment has a lease"]);
    assert!(container.link("eth0").is_none());
    let _daemon = lan.daemon();
    attachment.del().success();
}

#[test]
fn cnitool_shows_leases_and_their_last_errors() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::plugin("cnitool"));
    let lan = Lan::new(10, &[]);
    let daemon = lan.daemon();
    let container = lan.node.container();
    let attachment = attachment(&lan, &container, "bridge");
    attachment.add().success();
    let program = bin_dir().join("cnitool").display().to_string();
    let socket = lan.socket().display().to_string();
    let shown = |more: &[&str]| {
        let shown = lan.node.run(&[&[&program, "ipam", "dhcp", "--socket", &socket], more].concat());
        assert!(shown.ok, "{shown:?}");
        shown.stdout
    };
    let lease = || {
        let json: Value = serde_json::from_str(&shown(&["--json"])).unwrap();
        assert_eq!(report_errors("ipam dhcp", &json), [""; 0], "{json:#}");
        json["leases"][0].clone()
    };
    let first = lease();
    assert_eq!(
        (&first["network"], &first["containerID"], &first["ifname"]),
        (&json!("net1"), &json!(container.id), &json!("eth0"))
    );
    assert_eq!((&first["address"], &first["server"]), (&json!("192.168.1.5/24"), &json!("192.168.1.1")));
    let seconds = ["t1Seconds", "t2Seconds", "expirySeconds"].map(|key| first[key].as_u64().unwrap());
    assert!(seconds.is_sorted() && seconds[2] <= 120 && first["lastError"].is_null(), "{first}");
    let text = shown(&["net1"]);
    assert!(text.starts_with("NETWORK ") && text.contains(" 192.168.1.5/24 "), "{text}");
    assert_eq!(shown(&["other"]), "No lease is recorded.\n");
    // At its end, without a server: shown with or without a daemon.
    daemon.kill();
    lan.stop();
    lan.age(130);
    let _daemon = lan.daemon();
    wait_until("the loss is shown", || lease()["lastError"] == "the lease of 192.168.1.5 is lost");
    attachment.del().success();
    assert_eq!(shown(&[]), "No lease is recorded.\n");
}
