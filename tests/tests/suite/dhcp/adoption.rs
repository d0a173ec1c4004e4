//! dhcp: a lease that Go's daemon made is kept and released by this one.

use std::fs;

use cni_testkit::{Attachment, Container, bin_dir, go_bin_dir, probe, require, wait_until};
use conformance::VERSION;
use serde_json::{Value, json};

use super::{Lan, Process};

/// Writes what libcni remembers of an attachment to the node's cache. Before libcni 1.2 that has no
/// namespace.
fn remember(lan: &Lan, container: &Container, config: &Value, result: &Value, with_netns: bool) {
    let mut plugin = config.clone();
    let members = plugin.as_object_mut().unwrap();
    members.remove("name");
    members.remove("cniVersion");
    let list = json!({"cniVersion": VERSION, "name": "net1", "plugins": [plugin]});
    let list = lan.node.file("net1.conflist", list.to_string()).display().to_string();
    let mut entry = json!({"kind": "cniCacheV1", "containerId": container.id, "ifName": "eth0", "networkName": "net1",
                           "config": lan.node.exec(&["base64", "-w0", &list]).trim(), "result": result});
    if with_netns {
        entry["netns"] = json!(container.netns());
    }
    let entry = lan.node.file("entry", entry.to_string()).display().to_string();
    let path = format!("/var/lib/cni/results/net1-{}-eth0", container.id);
    lan.node.exec(&["mkdir", "-p", "/var/lib/cni/results"]);
    lan.node.exec(&["cp", &entry, &path]);
}

/// DEL, as a runtime does it: nothing is remembered afterwards.
fn del(lan: &Lan, attachment: &Attachment<'_>, container: &Container) {
    attachment.del().success();
    lan.node.exec(&["rm", &format!("/var/lib/cni/results/net1-{}-eth0", container.id)]);
}

/// A container with a lease that Go's plugins and Go's daemon have made. That daemon has ended.
fn leased_by_go<'n>(lan: &'n Lan, container: &Container, with_netns: bool) -> (Attachment<'n>, Value) {
    let ipam = json!({"type": "dhcp", "daemonSocketPath": lan.socket()});
    let config = json!({"cniVersion": VERSION, "name": "net1", "type": "bridge", "bridge": "lan", "ipam": ipam});
    let attachment = Attachment::new(&lan.node, container, config.clone());
    let daemon = lan.daemon_of(&go_bin_dir(), &[]);
    let result = attachment.clone().by(go_bin_dir()).add().success();
    assert_eq!(container.addresses("eth0"), ["192.168.1.5/24"]);
    daemon.kill();
    // Go's daemon starts nowhere where a socket file is left.
    fs::remove_file(lan.socket()).unwrap();
    remember(lan, container, &config, &result, with_netns);
    (attachment, result)
}

fn is_adopted(lan: &Lan) -> bool {
    fs::read_to_string(lan.node.dir().join("daemon.log")).unwrap().contains(" 192.168.1.5 is leased by ")
}

fn searches(lan: &Lan) -> usize {
    lan.log().matches(" DHCPDISCOVER(lan) ").count()
}

#[test]
fn a_lease_of_the_go_daemon_is_adopted_and_released() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::go_plugins());
    let lan = Lan::new(10, &["--dhcp-option=3,192.168.1.1"]);
    let container = lan.node.container();
    let (attachment, result) = leased_by_go(&lan, &container, true);
    let (acks, before) = (lan.log().matches(" DHCPACK(lan) 192.168.1.5 ").count(), searches(&lan));
    let daemon = lan.daemon();
    wait_until("the server has confirmed the lease", || lan.log().matches(" DHCPACK(lan) 192.168.1.5 ").count() > acks);
    wait_until("the lease is recorded", || is_adopted(&lan));
    attachment.check(&result).success();
    // From here on it is a lease like others.
    daemon.kill();
    let _daemon = lan.daemon();
    attachment.check(&result).success();
    assert_eq!(searches(&lan), before, "no new search");
    del(&lan, &attachment, &container);
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn a_lease_is_adopted_from_a_cache_without_namespaces() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::go_plugins());
    let lan = Lan::new(10, &[]);
    let container = lan.node.container();
    let (attachment, _) = leased_by_go(&lan, &container, false);
    let _daemon = lan.daemon();
    wait_until("the lease is recorded", || is_adopted(&lan));
    del(&lan, &attachment, &container);
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn an_adopted_lease_behind_an_ipv6_address_changes_no_route() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::go_plugins());
    let lan = Lan::new(10, &["--dhcp-option=3,192.168.1.1"]);
    let container = lan.node.container();
    let (attachment, mut result) = leased_by_go(&lan, &container, true);
    result["ips"].as_array_mut().unwrap().insert(0, json!({"address": "fd00:1::5/64"}));
    remember(&lan, &container, &attachment.config, &result, true);
    container.exec(&["ip", "route", "del", "default"]);
    let before = container.exec(&["ip", "route"]);
    let _daemon = lan.daemon();
    wait_until("the lease is recorded", || is_adopted(&lan));
    assert_eq!(container.exec(&["ip", "route"]), before);
    del(&lan, &attachment, &container);
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn an_adopted_address_that_is_refused_is_replaced() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::go_plugins());
    let lan = Lan::new(10, &[]);
    let container = lan.node.container();
    let (attachment, _) = leased_by_go(&lan, &container, true);
    // The server has forgotten it, and has other addresses.
    fs::remove_file(lan.node.dir().join("leases")).unwrap();
    lan.serve_from(20);
    let _daemon = lan.daemon();
    wait_until("the interface has another address", || container.addresses("eth0") == ["192.168.1.20/24"]);
    del(&lan, &attachment, &container);
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn a_lease_that_another_daemon_keeps_is_not_adopted() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::go_plugins());
    let lan = Lan::new(10, &[]);
    let container = lan.node.container();
    let (attachment, _) = leased_by_go(&lan, &container, true);
    let program = bin_dir().join("dhcp").display().to_string();
    let other = lan.node.dir().join("other.sock");
    let argv = [&program, "daemon", "-socketpath", other.to_str().unwrap()];
    let _daemon = Process::start(&lan.node, "daemon.log", &argv);
    wait_until("the daemon listens", || std::os::unix::net::UnixStream::connect(&other).is_ok());
    // Its answer comes after it has looked at the cache.
    let ipam = json!({"type": "dhcp", "daemonSocketPath": other});
    let config = json!({"cniVersion": VERSION, "name": "net1", "type": "dhcp", "ipam": ipam});
    Attachment::new(&lan.node, &lan.node.container(), config).del().success();
    assert!(!fs::read_to_string(lan.node.dir().join("daemon.log")).unwrap().contains("adopting"));
    del(&lan, &attachment, &container);
}
