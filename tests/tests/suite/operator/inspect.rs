//! The kernel's state beside the recorded result, and leftovers without an attachment.

use cni_testkit::{Container, probe, require};
use serde_json::{Value, json};

use super::{Operator, path};

/// A network with everything that leaves something on the host.
fn everything(masquerade: &str) -> Operator {
    let operator = Operator::new();
    let keys = json!({"ipMasq": true, "ipMasqBackend": masquerade, "macspoofchk": true});
    let portmap = json!({"type": "portmap", "backend": masquerade, "capabilities": {"portMappings": true}});
    let tuning = json!({"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}});
    operator.configure(keys, &[portmap, tuning]);
    operator
}

fn attach(operator: &Operator) -> Container {
    let container = operator.node.container();
    let call = operator.call(&["add", "net1", path(&container), "--container-id", &container.id]);
    let ports = json!({"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]});
    let outcome = call.env("CAP_ARGS", ports.to_string()).run();
    assert_eq!(outcome.status, Some(0), "{}", outcome.report());
    container
}

/// Returns the kinds of leftovers and the commands, each once.
fn left_over(seen: &Value) -> (Vec<&str>, Vec<&str>) {
    let all = seen["leftOver"].as_array().unwrap();
    let words = |key: &str| {
        let mut words: Vec<&str> = all.iter().map(|one| one[key].as_str().unwrap()).collect();
        words.dedup();
        words
    };
    (words("kind"), words("command"))
}

#[test]
fn an_attachment_is_shown_whole_and_what_differs_is_marked() {
    require!(probe::plugin("cnitool"));
    require!(probe::nft());
    require!(probe::nft_bridge());
    let operator = everything("nftables");
    let container = attach(&operator);
    let text = operator.done(&["inspect"]);
    for words in [
        &format!("net1 {} eth0", container.id)[..],
        "mtu 1500, mac ",
        "state up, master br0, port forwarding",
        "address      10.1.0.2/24, interface eth0",
        "masquerade   -s 10.1.0.2/32",
        "host port    tcp port 8080 to 10.1.0.2:80  [nft ip cni_hostport hostports]",
        "macspoofchk",
        "reservation  10.1.0.2",
        "net/ipv4/conf/eth0/arp_filter=0",
        "1 attachment; nothing is left over.",
    ] {
        assert!(text.contains(words), "it should say `{words}`:\n{text}");
    }
    assert!(!text.contains('!') || !text.lines().any(|line| line.starts_with('!')), "{text}");
    assert_eq!(operator.done(&["inspect", "net1", &container.id[..6]]), text);
    operator.failed(&["inspect", "net1", "x"], &["nothing of container x is attached to network \"net1\""]);

    container.exec(&["ip", "addr", "del", "10.1.0.2/24", "dev", "eth0"]);
    container.exec(&["ip", "link", "set", "eth0", "address", "02:00:00:00:00:77"]);
    operator.node.exec(&["nft", "flush chain ip cni_hostport hostports"]);
    operator.node.exec(&["nft", "flush chain ip cni_hostport masquerading"]);
    let said = operator.failed(
        &["inspect"],
        &[
            "! address      10.1.0.2/24, interface eth0: in the result, but not on the interface",
            "mac 02:00:00:00:00:77, state up: the result has the MAC ",
            "! host port    the attachment has no such rule, although its configuration needs one",
        ],
    );
    assert!(said.stdout.contains("nothing is left over"), "{}", said.report());
    operator.detach(&container);
}

#[test]
fn the_printed_commands_remove_the_leftovers() {
    require!(probe::plugin("cnitool"));
    require!(probe::nft());
    require!(probe::nft_bridge());
    require!(probe::iptables());
    for backend in ["nftables", "iptables"] {
        let operator = everything(backend);
        let container = attach(&operator);
        // The runtime has lost its memory.
        operator.node.exec(&["sh", "-c", "rm /var/lib/cni/results/net1-*"]);
        let seen = operator.json(&["inspect"]);
        // The link's mark still vouches for the rules and the rest.
        let del = format!("cnitool del net1 --container-id {} --ifname eth0 --keep-going", container.id);
        assert_eq!(left_over(&seen), (vec!["link"], vec![del.as_str()]), "{seen:#}");
        // The link too.
        let link = operator.node.ports("br0").pop().unwrap();
        operator.node.exec(&["ip", "link", "delete", &link]);
        let seen = operator.json(&["inspect"]);
        let (kinds, commands) = left_over(&seen);
        assert_eq!(kinds, ["rule", "reservation", "backup"], "{seen:#}");
        assert_eq!(commands[0], del, "{seen:#}");
        for command in commands {
            // One command may have removed what another one was for.
            if operator.json(&["inspect"])["leftOver"].to_string().contains(command) {
                operator.paste(command);
            }
        }
        assert_eq!(operator.done(&["inspect"]), "0 attachments; nothing is left over.\n");
        drop(container);
    }
}

#[test]
fn everything_of_an_attachment_without_namespace_is_left_over() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let container = operator.attach();
    container.unlink();
    let seen = operator.json(&["inspect"]);
    let (kinds, commands) = left_over(&seen);
    assert_eq!(kinds, ["attachment"], "{seen:#}");
    operator.paste(commands[0]);
    assert_eq!(operator.done(&["inspect"]), "0 attachments; nothing is left over.\n");
}

#[test]
fn all_verbs_agree_on_why_an_attachment_is_over() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let container = operator.attach();
    container.unlink();
    // The kernel deletes the host's end together with the namespace, which `unlink` keeps open.
    for port in operator.node.ports("br0") {
        operator.node.exec(&["ip", "link", "delete", &port]);
    }
    let seen = operator.json(&["inspect"]);
    let why = seen["leftOver"][0]["reason"].as_str().unwrap();
    assert!(why.contains("is gone: it does not exist"), "{why}");
    let doctor = operator.json(&["doctor"]);
    let left_over = doctor["findings"].as_array().unwrap().iter().find(|finding| finding["check"] == "left over");
    assert!(left_over.unwrap()["what"].as_str().unwrap().ends_with(why), "{doctor:#}");
    assert_eq!(operator.json(&["ipam", "show", "net1"])["reservations"][0]["reason"], why);
    assert_eq!(operator.json(&["ipam", "gc", "net1", "--dry-run"])["removed"][0]["reason"], why);
    assert_eq!(operator.json(&["gc", "net1", "--dry-run"])["networks"][0]["removed"][0]["reason"], why);
    operator.paste(seen["leftOver"][0]["command"].as_str().unwrap());
}

#[test]
fn a_plain_file_at_the_namespace_path_is_kept_and_reported() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let container = operator.attach();
    // What a mount namespace sees that the namespace's mount has not reached, or has left.
    let away = container.netns().with_extension("away");
    std::fs::rename(container.netns(), &away).unwrap();
    std::fs::write(container.netns(), "").unwrap();
    let from_afar = |verb: &[&str]| operator.call(verb).run().stdout;
    let seen = from_afar(&["inspect", "net1"]);
    assert!(seen.contains("! namespace ") && seen.contains("is not a network namespace"), "{seen}");
    assert!(seen.contains("nothing is left over"), "{seen}");
    let kept = from_afar(&["ipam", "gc", "net1", "--dry-run"]);
    assert!(kept.contains("keep    10.1.0.2") && kept.contains("is not a network namespace"), "{kept}");
    let kept = from_afar(&["gc", "net1", "--dry-run"]);
    assert!(
        kept.contains(&format!("keep    {}/eth0", container.id)) && kept.contains("is not a network namespace"),
        "{kept}"
    );
    operator.detach(&container);
}

#[test]
fn a_go_plugins_leftovers_are_found_too() {
    require!(probe::plugin("cnitool"));
    require!(probe::go_plugins());
    require!(probe::iptables());
    let operator = Operator::new();
    operator.configure(json!({"ipMasq": true}), &[]);
    let container = operator.node.container();
    let mut config = conformance::bridge(&operator.node, &["10.1.0.0/24"]);
    config["ipMasq"] = json!(true);
    let go = operator.node.go_plugin("bridge").command("ADD").container(&container).config(&config);
    go.run().success();
    let seen = operator.json(&["inspect"]);
    let (kinds, commands) = left_over(&seen);
    assert_eq!(kinds, ["rule", "reservation"], "its link has no mark: {seen:#}");
    operator.paste(commands[0]);
    assert_eq!(operator.done(&["inspect"]), "0 attachments; nothing is left over.\n", "one DEL removes both");
    container.exec(&["ip", "link", "delete", "eth0"]);
}

#[test]
fn a_reservation_in_the_default_folder_is_released_there() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    // The network had no `dataDir` once.
    let reserve = "mkdir -p /var/lib/cni/networks/net1 && printf gone > /var/lib/cni/networks/net1/10.1.0.9";
    operator.node.exec(&["sh", "-c", reserve]);
    let seen = operator.json(&["inspect"]);
    let (kinds, commands) = left_over(&seen);
    assert_eq!(kinds, ["reservation"], "{seen:#}");
    operator.paste(commands[0]);
    assert_eq!(operator.done(&["inspect"]), "0 attachments; nothing is left over.\n");
}

#[test]
fn static_addresses_need_no_reservation() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.configure(json!({"ipam": {"type": "static", "addresses": [{"address": "10.1.0.2/24"}]}}), &[]);
    // A network of this name used host-local before.
    let reserve = "mkdir -p /var/lib/cni/networks/net1 && printf gone > /var/lib/cni/networks/net1/10.1.0.9";
    operator.node.exec(&["sh", "-c", reserve]);
    let container = operator.attach();
    let seen = operator.json(&["inspect", "net1", &container.id]);
    let facts = seen["attachments"][0]["facts"].as_array().unwrap();
    assert!(facts.iter().any(|fact| fact["kind"] == "address"), "{seen:#}");
    let differing: Vec<&Value> = facts.iter().filter(|fact| fact["ok"] == false).collect();
    assert!(differing.is_empty(), "{differing:#?}");
    operator.detach(&container);
    operator.node.exec(&["rm", "/var/lib/cni/networks/net1/10.1.0.9"]);
}

#[test]
fn an_alias_with_a_hash_names_the_attachment_too() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.configure(json!({}), &[json!({"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}})]);
    let container = operator.node.container();
    // With this ID, the alias would have more than 255 bytes. The name of the cache file has fewer.
    let id = "c".repeat(243);
    operator.done(&["add", "net1", path(&container), "--container-id", &id]);
    let text = operator.done(&["doctor"]);
    assert!(text.contains("1 host link, up"), "{text}");
    operator.node.exec(&["sh", "-c", "mv /var/lib/cni/results/net1-* /tmp/record"]);
    let seen = operator.json(&["inspect"]);
    let reserved = operator.json(&["ipam", "show", "net1"]);
    operator.node.exec(&["sh", "-c", "mv /tmp/record /var/lib/cni/results/net1-$0-eth0", &id]);
    assert_eq!(left_over(&seen).0, ["link"], "{seen:#}");
    assert_eq!(reserved["reservations"][0]["state"], "in use", "{reserved:#}");
    operator.done(&["del", "net1", path(&container), "--container-id", &id]);
}

/// flannel stores its configuration under the container's ID alone, route-override a record.
#[test]
fn records_are_shown_and_found_without_an_attachment() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let folder = operator.node.dir().join("flannel");
    let env = "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.3.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
    let subnet = operator.node.file("subnet.env", env);
    let flannel = json!({"type": "flannel", "subnetFile": subnet, "dataDir": folder, "delegate": {"bridge": "br0"}});
    let route_override = json!({"type": "route-override", "flushroutes": true});
    let list = json!({"cniVersion": "1.1.0", "name": "net1", "plugins": [flannel, route_override]});
    operator.node.file("net.d/10-net1.conflist", list.to_string());
    let container = attach(&operator);
    let stored = folder.join(&container.id);
    let text = operator.done(&["inspect"]);
    for words in [
        format!("record       flannel, content delegate bridge 10.42.3.0/24  [{}]", stored.display()),
        "record       route-override, content for DEL  [/run/cni/route-override/".to_owned(),
        "1 attachment; nothing is left over.".to_owned(),
    ] {
        assert!(text.contains(&words), "it should say `{words}`:\n{text}");
    }
    operator.done(&["doctor"]);
    // A file that cannot be decoded belongs to the container that has its name.
    let whole = std::fs::read(&stored).unwrap();
    std::fs::write(&stored, "{").unwrap();
    operator.failed(&["inspect"], &["! record       flannel  [", "]: EOF while parsing an object"]);
    std::fs::write(&stored, whole).unwrap();
    // The runtime has lost its memory, and the link is gone too.
    operator.node.exec(&["sh", "-c", "rm /var/lib/cni/results/net1-*"]);
    let link = operator.node.ports("br0").pop().unwrap();
    operator.node.exec(&["ip", "link", "delete", &link]);
    let half = operator.node.file("flannel/gone", "{");
    let seen = operator.json(&["inspect"]);
    let (kinds, commands) = left_over(&seen);
    assert_eq!(kinds, ["reservation", "record"], "{seen:#}");
    let del = format!("cnitool del net1 --container-id {} --ifname eth0 --keep-going", container.id);
    let rm = format!("rm {}", half.display());
    assert!(commands.contains(&&*del) && commands.contains(&&*rm), "{commands:?}");
    operator.failed(&["doctor"], &[&format!("fix: {del}; {rm}")]);
    operator.paste(&del);
    operator.paste(&rm);
    assert_eq!(operator.done(&["inspect"]), "0 attachments; nothing is left over.\n");
}
