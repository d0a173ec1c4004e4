//! What holds for every server, with dnsmasq and with Kea; silence, two networks, routes and many
//! containers at once.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use cni_testkit::{Container, bin_dir, crowd, require, wait_until};
use conformance::lan::{Lan, Server, configure};
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
    wait_until("the server has the lease", || lan.leased() == ["192.168.1.5"]);
    // T1 is at 60 s. The server is another process by then, and knows the lease from its file.
    daemon.kill();
    lan.serve_for(&[]);
    lan.age(70);
    let _daemon = lan.daemon();
    wait_until("the server has renewed it", || lan.granted("192.168.1.5") == 1);
    assert_eq!(lan.searched(), 0, "no new search");
    attachment.check(&result).success();
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn dnsmasq_renews_after_its_restart_and_accepts_a_release() {
    require!(Server::Dnsmasq.probe());
    a_lease_from_its_add_to_its_del(Server::Dnsmasq);
}

#[test]
fn kea_renews_after_its_restart_and_accepts_a_release() {
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
    wait_until("the interface has another address", || container.addresses("eth0") == ["192.168.1.50/24"]);
    wait_until("the server has that lease alone", || lan.leased() == ["192.168.1.50"]);
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn an_address_that_dnsmasq_refuses_is_replaced() {
    require!(Server::Dnsmasq.probe());
    a_refused_renewal(Server::Dnsmasq);
}

#[test]
fn an_address_that_kea_refuses_is_replaced() {
    require!(Server::Kea.probe());
    a_refused_renewal(Server::Kea);
}

#[test]
fn with_a_silent_server_add_ends_at_its_deadline() {
    let lan = Lan::silent();
    let _daemon = lan.daemon_of(&bin_dir(), &["-timeout", "1s", "-resendmax", "1s", "-resendtimeout", "2s"]);
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    attachment.add().fails_with(11, "error calling DHCP.Allocate: no more tries");
    assert_eq!((lan.records(), container.addresses("eth0")), (0, vec![]));
    attachment.del().success();
}

#[test]
fn interfaces_in_two_networks_have_the_lease_of_each() {
    require!(Server::Dnsmasq.probe());
    let lan = Lan::silent();
    lan.node.expect_left("lan2");
    lan.node.ip(&["link add lan2 type bridge", "link set lan2 up", "address add 192.168.2.1/24 dev lan2"]);
    lan.serve(10, &["--interface=lan2", "--dhcp-range=192.168.2.5,192.168.2.14,255.255.255.0,120"]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    lan.plug(&container, "eth1", "lan2");
    let both = [lan.attachment(&container), lan.attachment(&container).ifname("eth1")];
    let addresses = both.each_ref().map(|attachment| attachment.add().success()["ips"][0]["address"].clone());
    assert_eq!(addresses, [json!("192.168.1.5/24"), json!("192.168.2.5/24")]);
    both.iter().for_each(|attachment| drop(attachment.del().success()));
    wait_until("the server has both addresses back", || lan.leased().is_empty());
}

#[test]
fn classless_routes_replace_classful_ones_and_the_router() {
    require!(Server::Dnsmasq.probe());
    let classful = ["--dhcp-option=3,192.168.1.1", "--dhcp-option=33,10.0.0.0,192.168.1.2"];
    let lan = Lan::new(10, &classful);
    let _daemon = lan.daemon();
    let attach = || {
        let container = lan.container(&["eth0"]);
        lan.attachment(&container).add().success()["routes"].clone()
    };
    assert_eq!(
        attach(),
        json!([{"dst": "10.0.0.0/8", "gw": "192.168.1.2"}, {"dst": "0.0.0.0/0", "gw": "192.168.1.1"}])
    );
    lan.serve(10, &[&classful[..], &["--dhcp-option=121,10.9.0.0/16,192.168.1.3"]].concat());
    assert_eq!(attach(), json!([{"dst": "10.9.0.0/16", "gw": "192.168.1.3"}]));
}

/// Does something for each container, sixteen at a time.
pub(super) fn for_each(containers: &[Container], work: impl Fn(&Container) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                while let Some(container) = containers.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(container);
                }
            });
        }
    });
}

#[test]
fn two_hundred_containers_have_leases_without_a_thread_each() {
    require!(Server::Dnsmasq.probe());
    let crowd = crowd(200);
    let lan = Lan::new(240, &[]);
    let daemon = lan.daemon();
    let containers: Vec<Container> = (0..crowd).map(|_| lan.container(&["eth0"])).collect();
    for_each(&containers, |container| configure(container, "eth0", &lan.attachment(container).add().success()));
    let distinct: BTreeSet<String> = lan.leased().into_iter().collect();
    assert_eq!((distinct.len(), lan.records()), (crowd, crowd));
    let threads = || std::fs::read_dir(format!("/proc/{}/task", daemon.0.id())).unwrap().count();
    assert!(threads() <= 8, "{} threads", threads());
    for_each(&containers, |container| drop(lan.attachment(container).del().success()));
    assert!(threads() <= 8, "{} threads", threads());
    wait_until("the server has all addresses back", || lan.leased().is_empty());
    assert_eq!(lan.records(), 0);
}
