//! A node is damaged in one way after another: the doctor reports it, the printed command repairs
//! it, and the doctor reports nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use cni_testkit::{Container, go_bin_dir, probe, require};
use serde_json::{Value, json};

use super::{Operator, path};

fn findings(operator: &Operator) -> Vec<Value> {
    operator.json(&["doctor"])["findings"].as_array().unwrap().clone()
}

/// Asserts that exactly this check reports these words and that its command repairs the node.
#[track_caller]
fn found_and_repaired(operator: &Operator, check: &str, words: &[&str]) {
    let found = findings(operator);
    let of_check: Vec<&Value> = found.iter().filter(|one| one["check"] == check).collect();
    assert!(!of_check.is_empty() && of_check.len() == found.len(), "{check} alone should find something: {found:#?}");
    let said: String = of_check.iter().map(|one| one["what"].as_str().unwrap()).collect();
    for word in words {
        assert!(said.contains(word), "it should name `{word}`: {said}");
    }
    for one in of_check {
        operator.paste(one["command"].as_str().unwrap());
    }
    assert_eq!(findings(operator), Vec::<Value>::new(), "not repaired");
}

/// An interface `up0` that leads nowhere.
fn uplink(operator: &Operator) {
    operator.node.exec(&["ip", "link", "add", "up0", "type", "veth", "peer", "name", "up1"]);
    for end in ["up0", "up1"] {
        operator.node.expect_left(end);
        operator.node.exec(&["ip", "link", "set", end, "up"]);
    }
}

#[test]
fn a_healthy_node_is_reported_as_such() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let empty = operator.done(&["doctor"]);
    assert!(empty.ends_with("Nothing wrong was found.\n"), "{empty}");
    let container = operator.attach();
    let text = operator.done(&["doctor"]);
    for words in ["networks     net1 in", "the host forwards packets of containers", "1 host link, up"] {
        assert!(text.contains(words), "it should say `{words}`:\n{text}");
    }
    operator.detach(&container);
}

#[test]
fn what_a_container_has_lost_is_found() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let container = operator.attach();
    container.exec(&["ip", "address", "flush", "dev", "eth0"]);
    container.exec(&["ip", "link", "set", "eth0", "address", "0a:00:00:00:00:99"]);
    let found = findings(&operator);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0]["check"], "attachments");
    let what = found[0]["what"].as_str().unwrap();
    for words in [container.id.as_str(), "0a:00:00:00:00:99", "10.1.0.2/24, interface eth0: in the result"] {
        assert!(what.contains(words), "it should say `{words}`: {what}");
    }
    assert!(found[0]["advice"].as_str().unwrap().contains("create it again"), "{found:#?}");
    operator.detach(&container);
    assert_eq!(findings(&operator), Vec::<Value>::new());
}

#[test]
fn rules_that_a_container_has_lost_are_found_and_repaired() {
    require!(probe::plugin("cnitool").and_then(|()| probe::nft()));
    let operator = Operator::new();
    operator.configure(json!({"ipMasq": true, "ipMasqBackend": "nftables"}), &[]);
    let container = operator.attach();
    operator.node.exec(&["nft", "flush", "ruleset"]);
    found_and_repaired(&operator, "attachments", &["masquerade", container.id.as_str()]);
    operator.detach(&container);
}

#[test]
fn lost_rules_of_an_attachment_of_multus_are_repaired() {
    require!(probe::plugin("cnitool").and_then(|()| probe::nft()));
    let operator = Operator::new();
    operator.configure(json!({"ipMasq": true, "ipMasqBackend": "nftables"}), &[]);
    let pod = operator.node.container();
    let of_pod = [path(&pod), "--container-id", &pod.id, "-i", "net1", "--cache-dir", "/var/lib/cni/multus"];
    operator.done(&[&["add", "net1"], &of_pod[..]].concat());
    operator.node.exec(&["nft", "flush", "ruleset"]);
    found_and_repaired(&operator, "attachments", &["masquerade", pod.id.as_str()]);
    operator.done(&[&["del", "net1"], &of_pod[..]].concat());
}

#[test]
fn forwarding_that_is_off_is_found_where_it_is_needed() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let write = |name: &str, value: &str| {
        operator.node.exec(&["sh", "-c", &format!("echo {value} > /proc/sys/{name}")]);
    };
    write("net/ipv4/ip_forward", "0");
    assert_eq!(findings(&operator), Vec::<Value>::new(), "no attachment needs it");
    let container = operator.attach();
    write("net/ipv4/conf/br0/forwarding", "0");
    found_and_repaired(&operator, "forwarding", &["net.ipv4.conf.br0.forwarding is 0"]);
    write("net/ipv4/ip_forward", "0");
    found_and_repaired(&operator, "forwarding", &["net.ipv4.ip_forward is 0"]);
    // The bridge's own value decides, as in CHECK.
    write("net/ipv4/ip_forward", "0");
    write("net/ipv4/conf/br0/forwarding", "1");
    operator.done(&["check", "net1", path(&container), "--container-id", &container.id]);
    assert_eq!(findings(&operator), Vec::<Value>::new());
    operator.detach(&container);
}

#[test]
fn forwarding_of_the_host_end_of_ptp_is_checked() {
    require!(probe::plugin("cnitool"));
    require!(probe::nft());
    let operator = Operator::new();
    let keys = json!({"type": "ptp", "bridge": null, "isGateway": null, "ipMasq": true, "ipMasqBackend": "nftables"});
    operator.configure(keys, &[]);
    let container = operator.attach();
    let seen = operator.json(&["inspect"]);
    let facts = seen["attachments"][0]["facts"].as_array().unwrap();
    let name = facts.iter().find(|fact| fact["kind"] == "host link").unwrap()["name"].as_str().unwrap();
    assert_eq!(findings(&operator), Vec::<Value>::new());
    operator.node.exec(&["sh", "-c", &format!("echo 0 > /proc/sys/net/ipv4/conf/{name}/forwarding")]);
    let check = ["check", "net1", path(&container), "--container-id", &container.id];
    operator.failed(&check, &[&format!("sysctl net/ipv4/conf/{name}/forwarding is off")]);
    found_and_repaired(&operator, "forwarding", &[&format!("net.ipv4.conf.{name}.forwarding is 0")]);
    operator.done(&check);
    operator.detach(&container);
}

#[test]
fn links_that_are_down_and_mtus_that_differ_are_found() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let container = operator.attach();
    let link = operator.node.ports("br0").pop().unwrap();
    operator.node.exec(&["ip", "link", "set", "br0", "down"]);
    found_and_repaired(&operator, "links", &["bridge br0 is down"]);
    operator.node.exec(&["ip", "link", "set", &link, "down"]);
    found_and_repaired(&operator, "links", &[&link, "is down"]);
    container.exec(&["ip", "link", "set", "eth0", "down"]);
    // The kernel updates the other end a moment later.
    let deadline = std::time::Instant::now() + cni_testkit::patience(std::time::Duration::from_secs(5));
    while findings(&operator).is_empty() && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // The default route is gone with it, but not what the node can see.
    found_and_repaired(&operator, "links", &["has no carrier: the container's end is down"]);
    container.exec(&["ip", "link", "set", "eth0", "mtu", "1400"]);
    found_and_repaired(&operator, "mtu", &["eth0 in the container has the MTU 1400"]);
    uplink(&operator);
    operator.node.exec(&["ip", "link", "set", "up0", "mtu", "1300"]);
    operator.node.exec(&["ip", "route", "add", "default", "dev", "up0"]);
    found_and_repaired(
        &operator,
        "mtu",
        &["containers have the MTU 1400, but up0, the interface of the default route, has 1300"],
    );
    operator.detach(&container);
}

#[test]
fn containers_that_go_plugins_made_are_seen_too() {
    require!(probe::plugin("cnitool"));
    require!(probe::go_plugins());
    require!(probe::nft());
    let operator = Operator::new();
    let file = operator.node.dir().join("net.d/10-net1.conflist");
    // Debian's are older than 1.1.0.
    fs::write(&file, fs::read_to_string(&file).unwrap().replace("1.1.0", "1.0.0")).unwrap();
    let container = operator.node.container();
    let args = ["add", "net1", path(&container), "--container-id", &container.id];
    let add = operator.call(&args).cni_path(go_bin_dir()).run();
    assert_eq!(add.status, Some(0), "{}", add.report());
    assert!(operator.done(&["doctor"]).contains("1 host link, up"));
    let link = operator.node.ports("br0").pop().unwrap();
    operator.node.exec(&["ip", "link", "set", &link, "down"]);
    found_and_repaired(&operator, "links", &[&link, &container.id, "is down"]);
    operator.node.exec(&["sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward"]);
    found_and_repaired(&operator, "forwarding", &["net.ipv4.ip_forward is 0"]);
    let drops = "nft add table inet guard && nft 'add chain inet guard passing { type filter hook forward priority 0; policy drop; }'";
    let _ = operator.node.run(&["sh", "-c", "echo 0 > /proc/sys/net/bridge/bridge-nf-call-iptables"]);
    operator.node.exec(&["sh", "-c", drops]);
    // A rule accepts the container by its address, as Go's plugin firewall adds it.
    operator.node.exec(&["nft", "add rule inet guard passing ip saddr 10.1.0.2 accept"]);
    assert_eq!(findings(&operator), Vec::<Value>::new());
    operator.node.exec(&["nft", "flush chain inet guard passing"]);
    found_and_repaired(&operator, "policy", &["chain inet guard passing", "br0"]);
    operator.node.exec(&["nft", "flush chain inet guard passing"]);
    // Without a memory the network's bridge is known by its name.
    operator.node.exec(&["sh", "-c", "rm /var/lib/cni/results/*"]);
    operator.node.exec(&["ip", "link", "set", &link, "down"]);
    let checks = |found: &[Value]| -> Vec<String> {
        found.iter().map(|one| one["check"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(checks(&findings(&operator)), ["links", "policy", "left over"]);
    operator.node.exec(&["nft", "delete table inet guard"]);
    operator.detach(&container);
}

/// Go's firewall records no owner: the rules are found by their addresses, as its CHECK does.
#[test]
fn the_firewall_rules_of_go_are_not_reported_as_missing() {
    require!(probe::plugin("cnitool"));
    require!(probe::go_plugins());
    require!(probe::iptables());
    let operator = Operator::new();
    operator.configure(json!({}), &[json!({"type": "firewall", "backend": "iptables"})]);
    let file = operator.node.dir().join("net.d/10-net1.conflist");
    fs::write(&file, fs::read_to_string(&file).unwrap().replace("1.1.0", "1.0.0")).unwrap();
    let container = operator.node.container();
    let args = ["add", "net1", path(&container), "--container-id", &container.id];
    let add = operator.call(&args).cni_path(go_bin_dir()).run();
    assert_eq!(add.status, Some(0), "{}", add.report());
    assert!(operator.done(&["inspect"]).contains("firewall     without owner"));
    assert_eq!(findings(&operator), Vec::<Value>::new());
    operator.node.exec(&["iptables", "-F", "CNI-FORWARD"]);
    operator.failed(&["inspect"], &["! firewall     the attachment has no such rule"]);
    let del = ["del", "net1", path(&container), "--container-id", &container.id];
    assert_eq!(operator.call(&del).cni_path(go_bin_dir()).run().status, Some(0));
}

/// The plugin firewall accepts only packets of connections that the container begins.
#[test]
fn a_policy_that_drops_connections_to_host_ports_is_found() {
    require!(probe::plugin("cnitool"));
    require!(probe::nft());
    require!(probe::iptables());
    require!(probe::tool("iptables-nft"));
    let operator = Operator::new();
    let portmap = json!({"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}});
    operator.configure(json!({}), &[json!({"type": "firewall", "backend": "iptables"}), portmap]);
    let container = operator.node.container();
    let mappings = json!({"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]});
    let add = operator.call(&["add", "net1", path(&container), "--container-id", &container.id]);
    let added = add.env("CAP_ARGS", mappings.to_string()).run();
    assert_eq!(added.status, Some(0), "{}", added.report());
    operator.node.exec(&["iptables-nft", "-P", "FORWARD", "DROP"]);
    let _ = operator.node.run(&["sh", "-c", "echo 0 > /proc/sys/net/bridge/bridge-nf-call-iptables"]);
    let words = "chain ip filter FORWARD drops new connections to the host ports of containers on br0";
    found_and_repaired(&operator, "policy", &[words]);
    operator.node.exec(&["iptables-nft", "-F", "FORWARD"]);
    operator.detach(&container);
}

#[test]
fn a_name_with_shell_syntax_is_quoted_in_the_command() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let bridge = "b;touch$IFS\x1b";
    let container = operator.attach();
    operator.node.exec(&["ip", "link", "set", "br0", "down"]);
    operator.node.exec(&["ip", "link", "set", "br0", "name", bridge]);
    let said =
        operator.failed(&["doctor"], &["bridge b;touch$IFS\\u{1b} is down", "dev $'b\\073touch\\044IFS\\033' up"]);
    assert!(!said.stdout.contains('\x1b'), "{:?}", said.stdout);
    operator.node.exec(&["ip", "link", "set", bridge, "name", "br0"]);
    operator.detach(&container);
}

#[test]
fn a_strict_reverse_path_filter_is_found_where_it_drops() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let container = operator.attach();
    operator.node.exec(&["sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/br0/rp_filter"]);
    assert_eq!(findings(&operator), Vec::<Value>::new(), "the way back is the same");
    uplink(&operator);
    operator.node.exec(&["ip", "route", "add", "10.1.0.2/32", "dev", "up0"]);
    found_and_repaired(&operator, "rp_filter", &["10.1.0.2 of network net1 is on br0"]);
    operator.detach(&container);
}

#[test]
fn a_policy_that_drops_what_containers_send_is_found() {
    require!(probe::plugin("cnitool"));
    require!(probe::nft());
    require!(probe::iptables());
    for (sabotage, words) in [
        (
            "nft add table inet guard && nft 'add chain inet guard passing { type filter hook forward priority 0; policy drop; }'",
            "chain inet guard passing",
        ),
        ("iptables-nft -P FORWARD DROP", "chain ip filter FORWARD"),
        ("iptables-legacy -P FORWARD DROP", "chain FORWARD of iptables-legacy"),
    ] {
        let operator = Operator::new();
        let container = operator.attach();
        let program = sabotage.split(' ').next().unwrap();
        require!(probe::tool(program));
        if !operator.node.run(&["sh", "-c", sabotage]).ok {
            cni_testkit::skipped(&format!("`{sabotage}` does not work here"));
            operator.detach(&container);
            continue;
        }
        let _ = operator.node.run(&["sh", "-c", "echo 0 > /proc/sys/net/bridge/bridge-nf-call-iptables"]);
        found_and_repaired(&operator, "policy", &[words, "no rule of", "br0"]);
        let _ = operator.node.run(&["sh", "-c", "nft flush ruleset; iptables-legacy -F FORWARD; true"]);
        operator.detach(&container);
    }
}

#[test]
fn both_iptables_variants_in_use_are_reported_without_a_command() {
    require!(probe::plugin("cnitool"));
    require!(probe::tool("iptables-legacy"));
    require!(probe::tool("iptables-nft"));
    let operator = Operator::new();
    for variant in ["iptables-legacy", "iptables-nft"] {
        if !operator.node.run(&[variant, "-A", "INPUT", "-i", "lo", "-j", "ACCEPT"]).ok {
            cni_testkit::skipped(&format!("{variant} does not work here"));
            return;
        }
    }
    // Emptied as it is, INPUT would shut the node off.
    operator.node.exec(&["iptables-legacy", "-P", "INPUT", "DROP"]);
    let found = findings(&operator);
    let both: Vec<&Value> = found.iter().filter(|one| one["check"] == "iptables").collect();
    assert_eq!(both.len(), 1, "{found:#?}");
    assert!(both[0]["command"].is_null(), "{found:#?}");
    assert!(both[0]["advice"].as_str().is_some_and(|words| words.contains("set its policy to ACCEPT")), "{found:#?}");
    operator.failed(&["doctor"], &["what to do: use one variant only"]);
    operator.node.exec(&["sh", "-c", "iptables-legacy -P INPUT ACCEPT && iptables-legacy -F && iptables-nft -F"]);
}

#[test]
fn folders_writable_by_others_and_wrong_files_are_reported() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let folder = operator.node.dir().join("net.d");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    found_and_repaired(&operator, "folders", &["net.d can be changed by every user (mode 0777)"]);
    let cache = operator.node.dir().join("cache");
    fs::create_dir(&cache).unwrap();
    fs::set_permissions(&cache, fs::Permissions::from_mode(0o777)).unwrap();
    let of_cache = ["doctor", "--cache-dir", "/var/lib/cni", "--cache-dir", cache.to_str().unwrap()];
    let found = operator.json(&of_cache);
    let what = found["findings"][0]["what"].as_str().unwrap_or_default();
    assert!(what.contains("/cache can be changed by every user (mode 0777)"), "{found:#}");
    operator.paste(found["findings"][0]["command"].as_str().unwrap());
    operator.done(&of_cache);
    let twin = operator.node.file("net.d/20-twin.conflist", fs::read(folder.join("10-net1.conflist")).unwrap());
    found_and_repaired(&operator, "networks", &["20-twin.conflist is never used"]);
    assert!(!twin.exists());
    operator.node.file("net.d/30-bad.conflist", r#"{"name": "bad"}"#);
    let found = findings(&operator);
    assert!(found.len() == 1 && found[0]["what"].to_string().contains("no plugin configs found"), "{found:#?}");
    operator.node.file("net.d/30-bad.conflist", r#"{"cniVersion":"1.0.0","name":"bad","plugins":[{"type":"absent"}]}"#);
    let said = operator.failed(&["doctor"], &["failed to find plugin \"absent\"", "fix: install -m 755 absent"]);
    assert!(said.stdout.ends_with("1 thing is wrong.\n"), "{}", said.report());
}

#[test]
fn a_disk_without_room_for_reservations_is_found() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let folder = operator.node.dir().join("small");
    fs::create_dir(&folder).unwrap();
    operator.node.exec(&["mount", "-t", "tmpfs", "-o", "nr_inodes=1,mode=755", "tmpfs", folder.to_str().unwrap()]);
    operator.configure(json!({"ipam": {"dataDir": folder}}), &[]);
    let found = findings(&operator);
    assert_eq!((found.len(), &found[0]["check"]), (1, &json!("addresses")), "{found:#?}");
    assert!(found[0]["what"].as_str().unwrap().contains("small cannot be written: no storage space"), "{found:#?}");
}

#[test]
fn ranges_that_are_nearly_full_and_leftovers_are_found() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.configure(json!({"ipam": {"ranges": [[{"subnet": "10.1.0.0/29"}]]}}), &[]);
    let containers: Vec<_> = (0..5).map(|_| operator.attach()).collect();
    let found = findings(&operator);
    let what: Vec<&str> = found.iter().map(|one| one["what"].as_str().unwrap()).collect();
    assert!(what.iter().any(|what| what.contains("5 of 5 addresses of 10.1.0.1-10.1.0.6 are used")), "{what:?}");
    assert!(!what.iter().any(|what| what.contains("no IP addresses available")), "STATUS succeeds: {what:?}");
    containers[1..].iter().for_each(|container| operator.detach(container));
    let gone = &containers[0];
    assert!(path(gone).contains("netns"));
    gone.unlink();
    found_and_repaired(&operator, "left over", &["attachment cache entry of net1", "is gone"]);
}

#[test]
fn findings_of_one_kind_are_one_finding_with_one_command() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let containers: Vec<_> = (0..5).map(|_| operator.attach()).collect();
    let link = operator.node.ports("br0").pop().unwrap();
    for port in operator.node.ports("br0") {
        operator.node.ip(&[&format!("link set {port} down")]);
    }
    let found = findings(&operator);
    assert_eq!((found.len(), found[0]["objects"].as_array().unwrap().len()), (1, 5), "{found:#?}");
    assert!(found[0]["objects"].to_string().contains(&link), "{found:#?}");
    operator.failed(&["doctor"], &["is down (4 more: host link ", "1 thing is wrong."]);
    found_and_repaired(&operator, "links", &["is down"]);
    containers.iter().for_each(Container::unlink);
    let found = findings(&operator);
    assert_eq!((found.len(), &found[0]["command"]), (1, &json!("cnitool gc")), "{found:#?}");
    assert_eq!(found[0]["objects"].as_array().unwrap().len(), 5, "{found:#?}");
    found_and_repaired(&operator, "left over", &["attachment cache entry of net1"]);
}
