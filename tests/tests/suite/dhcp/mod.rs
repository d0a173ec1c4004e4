//! dhcp: leases of a real server, dnsmasq, through a daemon; restarts of the daemon; Go's plugin
//! and daemon as peers.

mod adoption;
mod daemon;
mod deadlines;
mod faults;
mod files;
mod interfaces;
mod ipv6;
mod kinds;
mod operator;
mod options;
mod servers;
mod wire;
mod wire6;

use std::fs;
use std::path::{Path, PathBuf};

use cni_testkit::{bin_dir, go_bin_dir, probe, require, wait_until};
use conformance::lan::{Lan, Process, configure};
use conformance::{VERSION, patched};
use serde_json::json;

#[test]
fn add_leases_an_address_and_del_releases_it_at_the_server() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &["--dhcp-option=3,192.168.1.1"]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let result = attachment.add().success();
    assert_eq!(result["ips"][0], json!({"address": "192.168.1.5/24", "gateway": "192.168.1.1"}));
    assert_eq!(result["routes"], json!([{"dst": "0.0.0.0/0", "gw": "192.168.1.1"}]));
    configure(&container, "eth0", &result);
    assert_eq!(attachment.add().success(), result, "a repeated ADD has the same lease");
    attachment.check(&result).success();
    wait_until("the server has the lease", || lan.leased() == ["192.168.1.5"]);
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
    attachment.del().success();
}

#[test]
fn dns_and_classless_routes_are_in_the_result() {
    require!(probe::dnsmasq().map(drop));
    let options = ["--dhcp-option=6,192.168.1.1", "--dhcp-option=119,a.example", "--dhcp-option=option:mtu,1400"];
    let lan = Lan::new(10, &[&options[..], &["--dhcp-option=121,10.9.0.0/16,192.168.1.2"]].concat());
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let result = attachment.add().success();
    assert_eq!(result["dns"], json!({"nameservers": ["192.168.1.1"], "search": ["a.example"]}));
    assert_eq!(result["routes"], json!([{"dst": "10.9.0.0/16", "gw": "192.168.1.2", "mtu": 1400}]));
    attachment.del().success();
}

#[test]
fn two_interfaces_of_one_container_have_two_leases() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0", "eth1"]);
    let both = [lan.attachment(&container), lan.attachment(&container).ifname("eth1")];
    let addresses = both.each_ref().map(|attachment| attachment.add().success()["ips"][0]["address"].clone());
    assert_eq!(addresses, [json!("192.168.1.5/24"), json!("192.168.1.6/24")]);
    both.iter().for_each(|attachment| drop(attachment.del().success()));
}

#[test]
fn several_dels_at_once_succeed() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    configure(&container, "eth0", &attachment.add().success());
    let started = [(); 3].map(|()| attachment.invocation("DEL", None).start());
    started.into_iter().for_each(|started| drop(started.finish().success()));
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn del_releases_the_lease_whatever_the_configuration_says() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    configure(&container, "eth0", &attachment.add().success());
    let bad = patched(attachment.config.clone(), json!({"ipam": {"provide": [{"option": "nonsense", "value": "x"}]}}));
    let attachment = attachment.config(bad);
    attachment.add().failure();
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn an_exhausted_pool_fails_the_add_and_its_del_succeeds() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(1, &[]);
    let _daemon = lan.daemon_of(&bin_dir(), &["-timeout", "1s", "-resendmax", "1s", "-resendtimeout", "2s"]);
    let container = lan.container(&["eth0", "eth1"]);
    let (first, second) = (lan.attachment(&container), lan.attachment(&container).ifname("eth1"));
    first.add().success();
    let failure = second.add().failure();
    assert_eq!(failure.msg, "error calling DHCP.Allocate: no more tries");
    second.del().success();
    first.check(&json!({"cniVersion": VERSION})).success();
    first.del().success();
}

#[test]
fn a_lease_is_renewed_after_t1_and_after_t2() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let mut daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    configure(&container, "eth0", &attachment.add().success());
    let requests = || lan.log().matches(" DHCPACK(lan) 192.168.1.5 ").count();
    let found = || lan.log().matches(" DHCPDISCOVER(lan) ").count();
    let before = found();
    // Of 120 s: T1 is at 60, T2 at 105 or before.
    for seconds in [70, 110] {
        let acked = requests();
        daemon.kill();
        lan.age(seconds);
        daemon = lan.daemon();
        // The record too, which the server's log does not show.
        let recorded = || fs::read_to_string(lan.node.dir().join("daemon.log")).unwrap().contains(" is leased by ");
        wait_until("it has been renewed", || requests() > acked && recorded());
    }
    assert_eq!(found(), before, "no new search");
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn an_expired_lease_is_replaced_by_another() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let result = attachment.add().success();
    configure(&container, "eth0", &result);
    let found = || lan.log().matches(" DHCPDISCOVER(lan) ").count();
    let before = found();
    daemon.kill();
    lan.age(130);
    let _daemon = lan.daemon();
    wait_until("it has been looked for", || found() > before);
    wait_until("there is a lease again", || container.addresses("eth0") == ["192.168.1.5/24"]);
    wait_until("it is known", || attachment.invocation("CHECK", Some(&result)).run().json.is_none());
    attachment.del().success();
}

#[test]
fn a_killed_daemon_continues_its_leases_after_a_restart() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let result = attachment.add().success();
    configure(&container, "eth0", &result);
    daemon.kill();
    attachment.del().fails_naming(11, &["the attachment has a lease", "error dialing DHCP daemon"]);
    let _daemon = lan.daemon();
    let found = || lan.log().matches(" DHCPDISCOVER(lan) ").count();
    let before = found();
    attachment.check(&result).success();
    assert_eq!(attachment.add().success(), result);
    assert_eq!(found(), before, "no new search");
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn without_a_daemon_add_and_status_fail_and_del_succeeds() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let failure = attachment.add().failure();
    assert!(failure.msg.starts_with("error dialing DHCP daemon: dial unix "), "{}", failure.msg);
    attachment.del().success();
    let mut config = attachment.config.clone();
    config["cniVersion"] = json!("1.1.0");
    let attachment = attachment.config(config);
    attachment.status().fails_with(50, "error dialing DHCP daemon");
    let _daemon = lan.daemon();
    attachment.status().success();
}

#[test]
fn a_second_daemon_is_refused_and_the_first_is_named() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let daemon = lan.daemon();
    let program = bin_dir().join("dhcp").display().to_string();
    let second = lan.node.run(&[&program, "daemon", "-socketpath", &lan.socket().display().to_string()]);
    assert!(
        !second.ok && second.stderr.contains(&format!("process {} (dhcp) already listens on it", daemon.0.id())),
        "{second:?}"
    );
}

#[test]
fn a_daemon_keeps_no_namespace_open_and_forgets_gone_ones() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    configure(&container, "eth0", &attachment.add().success());
    let records = || fs::read_dir(lan.node.dir().join("dhcp")).unwrap().count();
    assert_eq!(records(), 1);
    container.destroy();
    wait_until("the host's end has gone", || lan.node.link("h0eth0").is_none());
    wait_until("the record has gone", || records() == 0);
    attachment.del().success();
}

#[test]
fn gc_releases_the_leases_of_invalid_attachments() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let _daemon = lan.daemon();
    let containers = [lan.container(&["eth0"]), lan.container(&["eth0"])];
    let attachments = containers.each_ref().map(|container| {
        let attachment = lan.attachment(container);
        let mut config = attachment.config.clone();
        config["cniVersion"] = json!("1.1.0");
        let attachment = attachment.config(config);
        configure(container, "eth0", &attachment.add().success());
        attachment
    });
    attachments[0].gc(&[(&containers[1].id, "eth0")]).success();
    wait_until("one address is free", || lan.leased() == ["192.168.1.6"]);
    attachments[1].del().success();
}

/// The plugin of one folder and the daemon of another.
#[track_caller]
fn together(plugin: PathBuf, daemon: &Path) -> (Lan, Process) {
    let lan = Lan::new(10, &["--dhcp-option=3,192.168.1.1"]);
    let daemon = lan.daemon_of(daemon, &[]);
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container).by(plugin);
    let result = attachment.add().success();
    assert_eq!(result["ips"][0], json!({"address": "192.168.1.5/24", "gateway": "192.168.1.1"}));
    configure(&container, "eth0", &result);
    attachment.check(&result).success();
    attachment.del().success();
    (lan, daemon)
}

#[test]
fn the_go_plugin_works_with_this_daemon() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::go_plugins());
    let (lan, _daemon) = together(go_bin_dir(), &bin_dir());
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn this_plugin_works_with_the_go_daemon() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::go_plugins());
    drop(together(bin_dir(), &go_bin_dir()));
}
