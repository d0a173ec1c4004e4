//! What holds for every server: dnsmasq and Kea.

use cni_testkit::require;
use conformance::lan::{Lan, Server, configure, until};
use serde_json::json;

/// Lease, renewal, release, each as the server has it.
#[track_caller]
fn a_lease_from_its_add_to_its_del(kind: Server) {
    let lan = Lan::of(kind);
    let daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let result = attachment.add().success();
    assert_eq!(result["ips"][0], json!({"address": "192.168.1.5/24", "gateway": "192.168.1.1"}));
    configure(&container, "eth0", &result);
    until("the server has the lease", || lan.leased() == ["192.168.1.5"]);
    // T1 is at 60 s. The server is another process by then, and knows the lease from its file.
    daemon.kill();
    lan.serve_for(&[]);
    lan.age(70);
    let _daemon = lan.daemon();
    until("the server has renewed it", || lan.granted("192.168.1.5") == 1);
    assert_eq!(lan.searched(), 0, "no new search");
    attachment.check(&result).success();
    attachment.del().success();
    until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn dnsmasq_leases_renews_after_its_restart_and_takes_back() {
    require!(Server::Dnsmasq.probe());
    a_lease_from_its_add_to_its_del(Server::Dnsmasq);
}

#[test]
fn kea_leases_renews_after_its_restart_and_takes_back() {
    require!(Server::Kea.probe());
    a_lease_from_its_add_to_its_del(Server::Kea);
}

/// By the time of the renewal the server has another address for the client.
#[track_caller]
fn a_refused_renewal(kind: Server) {
    let lan = Lan::of(kind);
    let daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    configure(&container, "eth0", &attachment.add().success());
    daemon.kill();
    let mac = container.link("eth0").unwrap()["address"].clone();
    lan.serve_for(&[(mac.as_str().unwrap(), "192.168.1.50")]);
    lan.age(70);
    let _daemon = lan.daemon();
    until("the interface has another address", || container.addresses("eth0") == ["192.168.1.50/24"]);
    until("the server has that lease alone", || lan.leased() == ["192.168.1.50"]);
    attachment.del().success();
    until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn dnsmasq_refuses_an_old_address_and_another_takes_its_place() {
    require!(Server::Dnsmasq.probe());
    a_refused_renewal(Server::Dnsmasq);
}

#[test]
fn kea_refuses_an_old_address_and_another_takes_its_place() {
    require!(Server::Kea.probe());
    a_refused_renewal(Server::Kea);
}
