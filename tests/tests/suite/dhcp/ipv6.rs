//! dhcp with DHCPv6: leases of dnsmasq and Kea, beside and instead of IPv4.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use cni_testkit::{Attachment, Container, bin_dir, crowd, go_bin_dir, probe, require, wait_until};
use conformance::lan::Lan;
use conformance::{VERSION, patched, router};
use serde_json::{Value, json};

use super::servers::for_each;

const DNS: [&str; 2] =
    ["--dhcp-option=option6:dns-server,[2001:db8:1::53]", "--dhcp-option=option6:domain-search,lan.example"];

/// An attachment with these keys in `ipam`.
fn attachment<'a>(lan: &'a Lan, container: &Container, keys: Value) -> Attachment<'a> {
    let attachment = lan.attachment(container);
    let config = patched(attachment.config.clone(), json!({"cniVersion": "1.1.0", "ipam": keys}));
    attachment.config(config)
}

/// An attachment with DHCPv6 only.
pub(super) fn stateful<'a>(lan: &'a Lan, container: &Container) -> Attachment<'a> {
    attachment(lan, container, json!({"ipv6": "stateful", "ipv4": false}))
}

/// What the interface plugin does with the result, which has one address. Returns the address.
#[track_caller]
pub(super) fn configure(container: &Container, result: &Value) -> String {
    let cidr = result["ips"][0]["address"].as_str().unwrap();
    container.ip(&[&format!("address add {cidr} dev eth0 nodad")]);
    cidr.strip_suffix("/128").unwrap().to_owned()
}

/// The global IPv6 addresses of the container.
pub(super) fn globals(container: &Container) -> String {
    container.exec(&["ip", "-6", "-o", "address", "show", "dev", "eth0", "scope", "global"])
}

fn daemon_log(lan: &Lan) -> String {
    fs::read_to_string(lan.node.dir().join("daemon.log")).unwrap_or_default()
}

/// Lease, renewal after kill -9, release, each as the server has it.
#[track_caller]
fn a_lease_from_its_add_to_its_del(lan: &Lan, granted: impl Fn() -> usize, restart: impl FnOnce()) {
    let daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = stateful(lan, &container);
    let result = attachment.add().success();
    assert_eq!((result["ips"].as_array().unwrap().len(), &result["routes"]), (1, &Value::Null), "{result}");
    assert_eq!(result["dns"], json!({"nameservers": ["2001:db8:1::53"], "search": ["lan.example"]}));
    assert_eq!(globals(&container), "", "the interface plugin adds the address");
    let address = configure(&container, &result);
    assert!(address.starts_with("2001:db8:1::"), "{address}");
    wait_until("the server has the lease", || lan.leased() == [address.as_str()]);
    assert_eq!(attachment.add().success(), result, "a repeated ADD has the same lease");
    // T1 is at 60 s.
    daemon.kill();
    restart();
    lan.age(70);
    let before = granted();
    let _daemon = lan.daemon();
    wait_until("the server has renewed it", || granted() > before);
    attachment.check(&result).success();
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
    assert_eq!((lan.records(), globals(&container)), (0, String::new()));
    attachment.del().success();
}

#[test]
fn dnsmasq_leases_renews_and_releases_an_ipv6_address() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::dual(&DNS);
    let granted = || lan.log().matches(" DHCPREPLY(lan) 2001:db8:1::").count();
    a_lease_from_its_add_to_its_del(&lan, granted, || lan.serve_dual(&DNS));
}

#[test]
fn kea_leases_renews_and_releases_an_ipv6_address() {
    require!(probe::kea6().map(drop));
    let lan = Lan::kea6();
    let granted = || lan.log().matches("DHCP6_LEASE_RENEW").count();
    a_lease_from_its_add_to_its_del(&lan, granted, || lan.serve_kea6());
}

#[test]
fn kea_offers_before_it_leases() {
    require!(probe::kea6().map(drop));
    let lan = Lan::kea6();
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = stateful(&lan, &container);
    configure(&container, &attachment.add().success());
    assert!(lan.log().contains("DHCP6_LEASE_ADVERT"), "an offer was selected");
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn both_protocols_have_their_lease_and_routes() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::dual(&[&DNS[..], &["--dhcp-option=3,192.168.1.1", "--dhcp-option=6,192.168.1.53"]].concat());
    let daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let routes = json!([{"dst": "10.9.0.0/16"}, {"dst": "2001:db8:9::/48", "gw": "fe80::1"}]);
    let attachment = attachment(&lan, &container, json!({"ipv6": "stateful", "routes": routes}));
    let result = attachment.add().success();
    assert_eq!(result["ips"][0], json!({"address": "192.168.1.5/24", "gateway": "192.168.1.1"}));
    assert!(result["ips"][1]["address"].as_str().unwrap().ends_with("/128"), "{result}");
    assert_eq!(
        result["routes"],
        json!([
            {"dst": "0.0.0.0/0", "gw": "192.168.1.1"},
            {"dst": "10.9.0.0/16", "gw": "192.168.1.1"},
            {"dst": "2001:db8:9::/48", "gw": "fe80::1"},
        ])
    );
    assert_eq!(result["dns"]["nameservers"], json!(["192.168.1.53", "2001:db8:1::53"]));
    assert_eq!((lan.leased().len(), lan.records()), (2, 2));
    daemon.kill();
    attachment.del().fails_naming(11, &["the attachment has a lease"]);
    let _daemon = lan.daemon();
    attachment.gc(&[]).success();
    wait_until("the server has both addresses back", || lan.leased().is_empty());
    assert_eq!(lan.records(), 0);
}

#[test]
fn a_silent_ipv6_server_fails_the_add_and_frees_ipv4() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let _daemon = lan.daemon_of(&bin_dir(), &["-timeout", "4s", "-resendmax", "1s", "-resendtimeout", "8s"]);
    let container = lan.container(&["eth0"]);
    let both = attachment(&lan, &container, json!({"ipv6": "stateful"}));
    both.add().fails_naming(11, &["error calling DHCP.AllocateIPv6: no more tries", "eth0: no DHCP server answered"]);
    wait_until("the server has the IPv4 address back", || lan.leased().is_empty());
    assert_eq!(lan.records(), 0);
    both.del().success();
}

#[test]
fn sigterm_during_the_ipv6_search_releases_ipv4() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let both = attachment(&lan, &container, json!({"ipv6": "stateful"}));
    let mut started = both.invocation("ADD", None).start();
    started.release();
    wait_until("the IPv4 address is leased", || daemon_log(&lan).contains(" is leased by "));
    started.terminate();
    let output = started.finish();
    output.fails_naming(11, &["error calling DHCP.AllocateIPv6", "interrupted by a signal"]);
    wait_until("the server has the IPv4 address back", || lan.leased().is_empty());
    assert_eq!((lan.records(), output.stderr.as_str()), (0, ""));
}

#[test]
fn a_managed_network_without_a_server_fails_the_add() {
    require!(probe::radvd().map(drop));
    let lan = Lan::silent();
    let router = lan.container(&["eth0"]);
    let options = "AdvManagedFlag on; AdvOtherConfigFlag on; prefix 2001:db8:1::/64 { AdvAutonomous off; };";
    let _radvd = router::radvd(&lan.node, &router, options);
    let _daemon = lan.daemon_of(&bin_dir(), &["-timeout", "4s", "-resendmax", "1s", "-resendtimeout", "8s"]);
    for (ipam, code, texts) in [
        (
            json!({"type": "dhcp", "daemonSocketPath": lan.socket(), "ipv6": "stateful", "ipv4": false}),
            11,
            ["no more tries", "eth0: no DHCP server answered"],
        ),
        (json!({"type": "slaac", "timeout": 12}), 11, ["IPv6 router", "advertises no prefix for addresses"]),
    ] {
        let container = lan.node.container();
        let config = json!({"cniVersion": VERSION, "name": "net1", "type": "bridge", "bridge": "lan", "ipam": ipam});
        let attachment = Attachment::new(&lan.node, &container, config);
        attachment.add().fails_naming(code, &texts);
        assert_eq!((container.link("eth0"), lan.records()), (None, 0));
        attachment.del().success();
    }
}

#[test]
fn status_is_about_the_keys_of_dhcpv6_too() {
    let lan = Lan::silent();
    let container = lan.container(&["eth0"]);
    let status = |keys: Value| attachment(&lan, &container, keys).status();
    status(json!({"ipv6": "stateful"})).fails_naming(50, &["DHCP daemon"]);
    let _daemon = lan.daemon();
    for keys in [json!({"ipv6": "stateful"}), json!({"ipv6": "stateful", "ipv4": false}), json!({"ipv6": "stateless"})]
    {
        status(keys).success();
    }
    status(json!({"ipv6": "yes"})).fails_with(50, "invalid ipv6 \"yes\": must be stateful or stateless");
}

#[test]
fn stateless_dhcpv6_brings_name_servers_only() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    lan.node.ip(&["address add 2001:db8:1::1/64 dev lan nodad"]);
    lan.serve(10, &[&DNS[..], &["--dhcp-range=2001:db8:1::,ra-stateless"]].concat());
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = attachment(&lan, &container, json!({"ipv6": "stateless"}));
    let result = attachment.add().success();
    assert_eq!(result["ips"].as_array().unwrap().len(), 1, "{result}");
    assert_eq!(result["dns"], json!({"nameservers": ["2001:db8:1::53"], "search": ["lan.example"]}));
    assert_eq!(lan.records(), 1, "that of the IPv4 lease");
    attachment.check(&result).success();
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn slaac_follows_a_stateless_dhcp_in_the_list() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::silent();
    lan.node.ip(&["address add 2001:db8:1::1/64 dev lan nodad"]);
    lan.serve(10, &[&DNS[..], &["--enable-ra", "--dhcp-range=2001:db8:1::,ra-stateless"]].concat());
    let _daemon = lan.daemon();
    let container = lan.node.container();
    let ipam = json!({"type": "dhcp", "daemonSocketPath": lan.socket(), "ipv6": "stateless"});
    let first = json!({"cniVersion": VERSION, "name": "net1", "type": "bridge", "bridge": "lan", "ipam": ipam});
    let first = Attachment::new(&lan.node, &container, first);
    let prev = first.add().success();
    let dns = json!({"nameservers": ["2001:db8:1::53"], "search": ["lan.example"]});
    assert_eq!(prev["dns"], dns, "before slaac");
    let second = json!({"cniVersion": VERSION, "name": "net1", "type": "slaac", "timeout": 50});
    let second = Attachment::new(&lan.node, &container, second);
    let result = second.add_after(&prev).success();
    let addresses = conformance::addresses(&result);
    assert_eq!(addresses[0], "192.168.1.5/24");
    assert!(addresses[1].starts_with("2001:db8:1:") && addresses.len() == 2, "{result}");
    assert_eq!(result["dns"], dns);
    for attachment in [&first, &second] {
        attachment.check(&result).success();
    }
    for attachment in [&second, &first] {
        attachment.del_with(&result).success();
    }
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn an_address_of_another_host_is_declined() {
    require!(probe::kea6().map(drop));
    let lan = Lan::kea6();
    lan.node.ip(&["address add 2001:db8:1::5/64 dev lan nodad"]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = stateful(&lan, &container);
    let address = configure(&container, &attachment.add().success());
    assert_ne!(address, "2001:db8:1::5");
    assert!(daemon_log(&lan).contains("another host on the link has 2001:db8:1::5"), "{}", daemon_log(&lan));
    wait_until("the server knows", || lan.log().contains("DHCP6_DECLINE_LEASE"));
    attachment.del().success();
}

#[test]
fn a_client_id_of_the_configuration_identifies_the_client() {
    require!(probe::dnsmasq().map(drop));
    let duid = "00:04:00:01:02:03:04:05:06:07:08:09:0a:0b:0c:0d:0e:0f";
    let lan = Lan::dual(&[&format!("--dhcp-host=id:{duid},[2001:db8:1::77]")]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let keys = json!({"ipv6": "stateful", "ipv4": false, "clientId": duid});
    let attachment = attachment(&lan, &container, keys);
    assert_eq!(configure(&container, &attachment.add().success()), "2001:db8:1::77");
    attachment.del().success();
}

#[test]
fn an_ipv6_lease_is_listed_by_cnitool() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::dual(&["--dhcp-option=option6:ntp-server,[2001:db8:1::123]"]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = stateful(&lan, &container);
    let address = configure(&container, &attachment.add().success());
    let tool = bin_dir().join("cnitool").display().to_string();
    let listed = lan.node.run(&[&tool, "ipam", "dhcp", "--json", "--socket", &lan.socket().display().to_string()]);
    let listed: Value = serde_json::from_str(&listed.stdout).unwrap();
    let lease = &listed["leases"][0];
    assert_eq!((&lease["address"], &lease["ntp"]), (&json!(format!("{address}/128")), &json!(["2001:db8:1::123"])));
    assert!(lease["server"].as_str().unwrap().len() >= 6, "the DUID: {lease}");
    attachment.del().success();
}

#[test]
fn gos_daemon_refuses_a_request_for_ipv6() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::go_plugins());
    let lan = Lan::dual(&[]);
    let _daemon = lan.daemon_of(&go_bin_dir(), &[]);
    let container = lan.container(&["eth0"]);
    let both = attachment(&lan, &container, json!({"ipv6": "stateful"})).by(bin_dir());
    both.add().fails_with(11, "error calling DHCP.AllocateIPv6: the daemon does not support DHCPv6");
    assert_eq!(lan.leased(), Vec::<String>::new());
}

#[test]
fn invalid_keys_of_dhcpv6_are_named() {
    let lan = Lan::silent();
    let container = lan.container(&["eth0"]);
    for (keys, text) in [
        (json!({"ipv6": "yes"}), "invalid ipv6 \"yes\": must be stateful or stateless"),
        (json!({"ipv4": false}), "\"ipv4\": false needs \"ipv6\": \"stateful\""),
        (json!({"ipv4": false, "ipv6": "stateless"}), "\"ipv4\": false needs \"ipv6\": \"stateful\""),
        (json!({"clientId": "00:01:02"}), "clientId needs the key ipv6"),
        (json!({"ipv6": "stateful", "clientId": "0001"}), "invalid clientId \"0001\""),
    ] {
        attachment(&lan, &container, keys).add().fails_with(7, text);
    }
}

#[test]
fn two_hundred_containers_have_ipv6_leases() {
    require!(probe::dnsmasq().map(drop));
    let crowd = crowd(200);
    let lan = Lan::dual(&["--dhcp-lease-max=1000"]);
    let _daemon = lan.daemon();
    let containers: Vec<Container> = (0..crowd).map(|_| lan.container(&["eth0"])).collect();
    for_each(&containers, |container| drop(configure(container, &stateful(&lan, container).add().success())));
    let distinct: BTreeSet<String> = lan.leased().into_iter().collect();
    assert_eq!((distinct.len(), lan.records()), (crowd, crowd));
    for_each(&containers, |container| drop(stateful(&lan, container).del().success()));
    wait_until("the server has all addresses back", || lan.leased().is_empty());
    assert_eq!(lan.records(), 0);
}

#[test]
fn a_killed_add_leaves_what_a_del_releases() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::dual(&[]);
    let _daemon = lan.daemon();
    for milliseconds in [100, 1800, 2500, 3200] {
        let container = lan.container(&["eth0"]);
        let attachment = stateful(&lan, &container);
        let mut started = attachment.invocation("ADD", None).start();
        started.release();
        std::thread::sleep(Duration::from_millis(milliseconds));
        // Fails if the ADD has ended.
        lan.node.run(&["kill", "-KILL", &started.pid().to_string()]);
        drop(started);
        attachment.del().success();
        wait_until("the server has no lease", || lan.leased().is_empty());
        assert_eq!((lan.records(), globals(&container)), (0, String::new()), "after {milliseconds} ms");
    }
}

#[test]
fn bridge_gives_the_container_the_ipv6_lease() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::dual(&["--enable-ra"]);
    let _daemon = lan.daemon();
    let container = lan.node.container();
    let ipam = json!({"type": "dhcp", "daemonSocketPath": lan.socket(), "ipv6": "stateful"});
    let config = json!({"cniVersion": VERSION, "name": "net1", "type": "bridge", "bridge": "lan", "ipam": ipam});
    let attachment = Attachment::new(&lan.node, &container, config);
    let result = attachment.add().success();
    let address = result["ips"][1]["address"].as_str().unwrap().to_owned();
    assert!(globals(&container).contains(&address), "{}", globals(&container));
    wait_until("the router comes from its advertisements", || {
        container.exec(&["ip", "-6", "route", "show", "default"]).contains("proto ra")
    });
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    wait_until("the server has both addresses back", || lan.leased().is_empty());
}
