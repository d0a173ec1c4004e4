//! cnitool's verbs for a node with dhcp: validate, inspect, doctor.

use cni_testkit::{Container, Invocation, Outcome, bin_dir, probe, report_errors, require, wait_until};
use serde_json::{Value, json};

use super::{Lan, configure};

/// Configures the network `net1`: dhcp on the bridge.
fn network(lan: &Lan, keys: Value) -> String {
    let ipam = conformance::patched(json!({"type": "dhcp", "daemonSocketPath": lan.socket()}), keys);
    let plugin = json!({"type": "bridge", "bridge": "lan", "ipam": ipam});
    let list = json!({"cniVersion": "1.1.0", "name": "net1", "plugins": [plugin]});
    lan.node.file("net.d/10-net1.conflist", list.to_string()).display().to_string()
}

fn cnitool(lan: &Lan, args: &[&str]) -> Outcome {
    let call = Invocation::new(&lan.node, bin_dir().join("cnitool")).cni_path(bin_dir());
    let call = call.env("NETCONFPATH", lan.node.dir().join("net.d"));
    args.iter().fold(call, |call, arg| call.arg(arg)).run()
}

fn attach(lan: &Lan) -> Container {
    let container = lan.node.container();
    let added = cnitool(lan, &["add", "net1", container.netns().to_str().unwrap(), "--container-id", &container.id]);
    assert_eq!(added.status, Some(0), "{}", added.report());
    container
}

#[track_caller]
fn says(outcome: &Outcome, words: &[&str]) {
    let said = format!("{}{}", outcome.stdout, outcome.stderr);
    words.iter().for_each(|word| assert!(said.contains(word), "it should name `{word}`\n{}", outcome.report()));
}

#[test]
fn validate_explains_dhcps_keys_and_that_no_daemon_listens() {
    require!(probe::plugin("cnitool"));
    let lan = Lan::silent();
    let file = network(&lan, json!({"requets": [], "provide": [{"option": "nonsense", "value": "x"}]}));
    says(
        &cnitool(&lan, &["validate", &file]),
        &[
            "plugins[0].ipam.requets: unknown key, which is ignored; did you mean \"request\"?",
            "plugins[0].ipam.provide",
            "Can not parse option \"nonsense\"",
        ],
    );
    network(&lan, json!({}));
    let missing = cnitool(&lan, &["validate", &file]);
    assert_eq!(missing.status, Some(1), "{}", missing.report());
    says(&missing, &["this host cannot handle an ADD: ", "error dialing DHCP daemon: dial unix "]);
    let _daemon = lan.daemon();
    let valid = cnitool(&lan, &["validate", &file]);
    assert_eq!(valid.status, Some(0), "{}", valid.report());
}

#[test]
fn doctor_names_a_missing_daemon_and_what_starts_it() {
    require!(probe::plugin("cnitool"));
    let lan = Lan::silent();
    network(&lan, json!({}));
    let findings = || {
        let seen = cnitool(&lan, &["doctor", "--json"]).json.unwrap();
        let all = seen["findings"].as_array().unwrap().clone();
        all.into_iter().filter(|one| one["check"] == "status").collect::<Vec<Value>>()
    };
    let found = findings();
    assert!(found[0]["what"].as_str().unwrap().contains("error dialing DHCP daemon: dial unix "), "{found:#?}");
    assert!(found[0]["advice"].as_str().unwrap().contains("systemctl enable --now cni-dhcp.socket"), "{found:#?}");
    let _daemon = lan.daemon();
    assert_eq!(findings(), [json!(null); 0]);
}

#[test]
fn inspect_shows_an_attachments_lease() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::plugin("cnitool"));
    let lan = Lan::new(10, &[]);
    let daemon = lan.daemon();
    network(&lan, json!({}));
    let container = attach(&lan);
    let seen = cnitool(&lan, &["inspect"]);
    assert_eq!(seen.status, Some(0), "{}", seen.report());
    says(
        &seen,
        &["  lease        192.168.1.5/24, server 192.168.1.1, expiry 1", "1 attachment; nothing is left over."],
    );
    // At its end, without a server.
    daemon.kill();
    lan.stop();
    lan.age(130);
    let _daemon = lan.daemon();
    wait_until("the loss is shown", || cnitool(&lan, &["inspect"]).stdout.contains("the lease of 192.168.1.5 is lost"));
    says(
        &cnitool(&lan, &["inspect"]),
        &["! lease        192.168.1.5/24, server 192.168.1.1, expiry 0 s  [", ": the lease of 192.168.1.5 is lost"],
    );
    let netns = container.netns().to_str().unwrap();
    cnitool(&lan, &["del", "net1", netns, "--container-id", &container.id]);
}

#[test]
fn a_lease_without_an_attachment_is_left_over_until_released() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::plugin("cnitool"));
    let lan = Lan::new(10, &[]);
    let _daemon = lan.daemon();
    // The second time the network is not configured any more.
    for is_configured in [true, false] {
        let file = network(&lan, json!({}));
        // No runtime remembers it.
        let container = lan.container(&["eth0"]);
        configure(&container, "eth0", &lan.attachment(&container).add().success());
        if !is_configured {
            let ipam = json!({"type": "dhcp", "daemonSocketPath": lan.socket()});
            let other = json!({"cniVersion": "1.1.0", "name": "other", "type": "dhcp", "ipam": ipam});
            std::fs::remove_file(&file).unwrap();
            lan.node.file("net.d/20-other.conf", other.to_string());
        }
        let seen = cnitool(&lan, &["inspect", "--json"]).json.unwrap();
        assert_eq!(report_errors("inspect", &seen), [""; 0], "{seen:#}");
        let left = &seen["leftOver"][0];
        assert_eq!((&left["kind"], &left["network"]), (&json!("lease"), &json!("net1")), "{seen:#}");
        let command = left["command"].as_str().unwrap();
        let starts = if is_configured { "cnitool del net1 " } else { "echo " };
        assert!(command.starts_with(starts), "{command}");
        let doctor = cnitool(&lan, &["doctor"]);
        says(&doctor, &["! left over    lease 192.168.1.5/24 of net1", command]);
        let path = format!("PATH={}:{}", bin_dir().display(), std::env::var("PATH").unwrap());
        let (plugins, folder) = (bin_dir().display().to_string(), lan.node.dir().join("net.d").display().to_string());
        let variables = [path, format!("CNI_PATH={plugins}"), format!("NETCONFPATH={folder}")];
        let argv = [&["env"][..], &variables.each_ref().map(String::as_str), &["sh", "-c", command]].concat();
        lan.node.exec(&argv);
        assert_eq!(lan.records(), 0);
        wait_until("the server has the address back", || lan.leased().is_empty());
    }
}
