//! `rules restore` writes rules again that another program has removed, and changes nothing else.

use std::io::Write as _;
use std::net::TcpListener;
use std::thread;

use cni_testkit::{Container, Invocation, probe, report_errors, require};
use conformance::{OUTSIDE, patched, uplink};
use serde_json::{Value, json};

use super::{Operator, path};
use crate::bridge::chained::imitate_pair;
use crate::portmap::world::{BACKENDS, Backend, ask_tcp, at};

/// A node with a network `net1` of all plugins with rules, in one backend.
struct Place {
    operator: Operator,
    backend: Backend,
}

impl Place {
    fn new(backend: Backend) -> Place {
        let place = Place { operator: Operator::new(), backend };
        place.operator.configure(place.keys(), &place.behind());
        place
    }

    fn keys(&self) -> Value {
        json!({"ipMasq": true, "ipMasqBackend": self.backend.key(), "macspoofchk": true, "isDefaultGateway": true})
    }

    fn behind(&self) -> [Value; 2] {
        let key = self.backend.key();
        [
            json!({"type": "portmap", "backend": key, "capabilities": {"portMappings": true}}),
            json!({"type": "firewall", "backend": key, "ingressPolicy": "same-bridge"}),
        ]
    }

    fn call(&self, args: &[&str]) -> Invocation<'_> {
        self.operator.call(args).env("PATH", self.backend.path(&self.operator.node))
    }

    #[track_caller]
    fn done(&self, args: &[&str]) -> String {
        let outcome = self.call(args).run();
        assert_eq!(outcome.status, Some(0), "{}", outcome.report());
        outcome.stdout
    }

    #[track_caller]
    fn failed(&self, args: &[&str]) -> String {
        let outcome = self.call(args).run();
        assert_eq!(outcome.status, Some(1), "{}", outcome.report());
        outcome.stdout + &outcome.stderr
    }

    /// Adds a container with this host port, if given.
    #[track_caller]
    fn attach(&self, network: &str, host_port: Option<u16>) -> Container {
        let container = self.operator.node.container();
        let mapping = |port: u16| json!({"hostPort": port, "containerPort": 80, "protocol": "tcp"});
        let mappings: Vec<Value> = host_port.into_iter().map(mapping).collect();
        let add = self.call(&["add", network, path(&container), "--container-id", &container.id]);
        let outcome = add.env("CAP_ARGS", json!({"portMappings": mappings}).to_string()).run();
        assert_eq!(outcome.status, Some(0), "{}", outcome.report());
        container
    }

    #[track_caller]
    fn detach(&self, network: &str, container: &Container) {
        self.done(&["del", network, path(container), "--container-id", &container.id]);
    }

    fn check<'a>(&'a self, container: &'a Container) -> [&'a str; 5] {
        ["check", "net1", path(container), "--container-id", &container.id]
    }

    #[track_caller]
    fn shell(&self, script: &str) {
        let path = format!("PATH={}", self.backend.path(&self.operator.node));
        self.operator.node.exec(&["env", &path, "sh", "-ec", script]);
    }

    /// Returns every rule and chain of nf_tables and iptables, sorted, without counters.
    fn rules(&self) -> Vec<String> {
        let node = &self.operator.node;
        let mut text = node.ruleset();
        if self.backend == Backend::IptablesLegacy {
            // The save program creates the table that it looks for.
            for table in node.proc_net("ip_tables_names").split_whitespace() {
                text += &node.exec(&["xtables-legacy-multi", "iptables-save", "-t", table]);
            }
        }
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let mut rules: Vec<String> =
            lines.map(|line| line.trim().split(" [").next().unwrap_or_default().to_owned()).collect();
        rules.sort();
        rules
    }
}

/// Returns the lines that are more often in one of two sorted lists than in the other.
fn differences(before: &[String], after: &[String]) -> Vec<String> {
    let count = |all: &[String], line: &String| all.iter().filter(|other| *other == line).count();
    let mut lines = [before, after].concat();
    lines.sort();
    lines.dedup();
    let shown = |line: &String| match (count(before, line), count(after, line)) {
        (before, after) if before == after => None,
        (before, after) => Some(format!("{before} before, {after} after: {line}")),
    };
    lines.iter().filter_map(shown).collect()
}

/// Runs the test with each available backend, and prints the missing ones.
fn each(test: impl Fn(&Place)) {
    for backend in BACKENDS {
        match backend.probe().and_then(|()| probe::nft()) {
            Ok(()) => test(&Place::new(backend)),
            Err(reason) => cni_testkit::skipped(&format!("{backend:?}: {reason}")),
        }
    }
}

/// A TCP server on port 80 that sends every client the name and the client's address.
fn serve(container: &Container, name: &'static str) {
    let listener = container.enter(|| TcpListener::bind(("::", 80)).unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let peer = stream.peer_addr().map(|peer| peer.ip().to_canonical().to_string()).unwrap_or_default();
            let _ = stream.write_all(format!("{name} {peer}").as_bytes());
        }
    });
}

/// Commands that remove all rules, and commands that remove some.
fn losses(backend: Backend) -> &'static [(&'static str, &'static [&'static str])] {
    match backend {
        Backend::Nftables => &[
            ("nft flush ruleset", &["bridge", "portmap", "firewall"]),
            ("nft flush chain inet cni_plugins_masquerade masq_checks", &["bridge"]),
            ("nft flush chain inet cni_plugins_masquerade postrouting", &["bridge"]),
            ("nft flush chain bridge nat PREROUTING", &["bridge"]),
            ("nft flush chain ip cni_hostport hostports", &["portmap"]),
            ("nft flush chain ip cni_hostport prerouting", &["portmap"]),
            ("nft delete table inet cni_firewall", &["firewall"]),
            ("nft flush set inet cni_firewall cni_pods4", &["firewall"]),
            ("nft flush chain ip cni_hostport masquerading", &["portmap"]),
        ],
        _ => &[
            (
                "for t in nat filter; do iptables -w -t $t -F; iptables -w -t $t -X; done; nft flush chain bridge nat PREROUTING",
                &["bridge", "portmap", "firewall"],
            ),
            ("printf '*nat\\nCOMMIT\\n*filter\\nCOMMIT\\n' | iptables-restore -w", &["bridge", "portmap", "firewall"]),
            ("iptables -w -t nat -F POSTROUTING", &["bridge", "portmap"]),
            ("iptables -w -t nat -F CNI-HOSTPORT-DNAT", &["portmap"]),
            ("iptables -w -t nat -F PREROUTING", &["portmap"]),
            ("iptables -w -F CNI-FORWARD", &["firewall"]),
            ("iptables -w -F FORWARD", &["firewall"]),
            ("iptables -w -F CNI-ISOLATION-STAGE-1", &["firewall"]),
            ("iptables -w -t nat -F CNI-HOSTPORT-MASQ", &["portmap"]),
        ],
    }
}

#[test]
fn flushed_rules_are_written_again_and_carry_packets() {
    require!(probe::plugin("cnitool"));
    each(|place| {
        let client = uplink(&place.operator.node, "up0");
        let mapped = place.attach("net1", Some(8080));
        let plain = place.attach("net1", None);
        serve(&client, "client");
        serve(&mapped, "pod");
        let (seen, whole) = (place.backend, place.rules());
        for (script, losers) in losses(place.backend) {
            place.shell(script);
            let broken = place.rules();
            assert_ne!(broken, whole, "{seen:?} {script}");
            place.failed(&place.check(&mapped));
            let text = place.failed(&["rules", "restore", "--dry-run"]);
            for plugin in ["bridge", "portmap", "firewall"] {
                let is_missing = text.contains(&format!("! {plugin:<12} missing: "));
                assert_eq!(is_missing, losers.contains(&plugin), "{seen:?} {script}\n{text}");
            }
            assert_eq!(place.rules(), broken, "a dry run changes nothing: {seen:?} {script}");
            let text = place.done(&["rules", "restore"]);
            for plugin in *losers {
                assert!(text.contains(&format!("  {plugin:<12} restored: ")), "{seen:?} {script}\n{text}");
            }
            assert_eq!(differences(&whole, &place.rules()), [""; 0], "{seen:?} {script}\n{text}");
            for container in [&mapped, &plain] {
                place.done(&place.check(container));
            }
            let text = place.done(&["rules", "restore"]);
            assert!(text.ends_with("2 attachments: 0 lacked rules, 0 skipped.\n"), "{seen:?} {script}\n{text}");
            assert_eq!(differences(&whole, &place.rules()), [""; 0], "{seen:?} {script}");
        }
        let answer = client.enter(|| ask_tcp(&at(0, 8080)));
        assert_eq!(answer, Some(format!("pod {}", OUTSIDE[0])), "{seen:?}");
        let answer = plain.enter(|| ask_tcp(&format!("{}:80", OUTSIDE[0])));
        assert_eq!(answer, Some(format!("client {}", conformance::HOST[0])), "{seen:?}");
        place.detach("net1", &mapped);
        place.detach("net1", &plain);
    });
}

#[test]
fn foreign_rules_and_counters_stay() {
    require!(probe::plugin("cnitool"));
    each(|place| {
        let foreign = match place.backend {
            Backend::Nftables => {
                "nft add table ip other; nft add chain ip other kept; \
                 nft add rule ip other kept counter packets 77 bytes 88 accept"
            }
            _ => "iptables -w -N KEPT; iptables -w -A KEPT -c 77 88 -s 192.0.2.77 -j ACCEPT",
        };
        let kept = || match place.backend {
            Backend::Nftables => place.operator.node.exec(&["nft", "list", "table", "ip", "other"]),
            backend => place.operator.node.exec(&[backend.multi(), "iptables", "-w", "-nvxL", "KEPT"]),
        };
        let container = place.attach("net1", Some(8080));
        place.shell(foreign);
        let before = kept();
        assert!(before.contains("77") && before.contains("88"), "{before}");
        let (script, _) = losses(place.backend)[6];
        place.shell(script);
        place.done(&["rules", "restore"]);
        place.done(&place.check(&container));
        assert_eq!(kept(), before, "{:?}", place.backend);
        place.shell(if place.backend == Backend::Nftables {
            "nft delete table ip other"
        } else {
            "iptables -w -F KEPT; iptables -w -X KEPT"
        });
        place.detach("net1", &container);
    });
}

#[test]
fn only_living_attachments_of_the_named_network_are_restored() {
    require!(probe::plugin("cnitool"));
    each(|place| {
        let node = &place.operator.node;
        let other = patched(
            conformance::bridge(node, &["10.2.0.0/24"]),
            json!({"name": null, "cniVersion": null, "bridge": "br2"}),
        );
        let plugins = [&[patched(other, place.keys())][..], &place.behind()].concat();
        node.file(
            "net.d/20-net2.conflist",
            json!({"cniVersion": "1.1.0", "name": "net2", "plugins": plugins}).to_string(),
        );
        let (alive, dead, elsewhere) =
            (place.attach("net1", Some(8080)), place.attach("net1", None), place.attach("net2", None));
        // A container without its interface, and one without its namespace.
        let bare = place.attach("net1", None);
        bare.exec(&["ip", "link", "delete", "eth0"]);
        dead.unmount();
        dead.unlink();
        node.exec(&["sh", "-c", "echo '{' > /var/lib/cni/results/net1-broken-eth0"]);
        let (script, _) = losses(place.backend)[0];
        place.shell(script);
        let text = place.failed(&["rules", "restore", "net1"]);
        for words in [
            "net1-broken-eth0",
            "skipped: its namespace",
            "skipped: the host has no interface of it",
            "portmap      restored",
        ] {
            assert!(text.contains(words), "it should say `{words}` {:?}\n{text}", place.backend);
        }
        assert!(!text.contains("net2"), "{text}");
        place.done(&place.check(&alive));
        let rules = place.rules().join("\n");
        assert!(rules.contains("10.1.0.2") && !rules.contains("10.1.0.3") && !rules.contains("10.2.0.2"), "{rules}");
        node.exec(&["rm", "/var/lib/cni/results/net1-broken-eth0"]);
        let seen = place.call(&["rules", "restore", "--json"]).run();
        assert_eq!(seen.status, Some(0), "{}", seen.report());
        let seen = seen.json.unwrap();
        assert_eq!(report_errors("rules restore", &seen), [""; 0], "{seen:#}");
        let of = |id: &str| {
            let all = seen["attachments"].as_array().unwrap();
            all.iter().find(|one| one["containerID"] == id).cloned().unwrap_or_else(|| panic!("{seen:#}"))
        };
        assert_eq!(of(&alive.id)["plugins"][0]["outcome"], "complete", "{seen:#}");
        assert_eq!(of(&elsewhere.id)["plugins"][1]["outcome"], "restored", "{seen:#}");
        assert!(of(&dead.id)["outcome"] == "skipped" && of(&bare.id)["outcome"] == "skipped", "{seen:#}");
        for (network, container) in [("net1", &alive), ("net1", &bare), ("net1", &dead), ("net2", &elsewhere)] {
            place.detach(network, container);
        }
    });
}

/// What a container does in its namespace decides nothing: its end on the host has the mark.
#[test]
fn a_container_that_changes_its_interface_gets_its_rules() {
    require!(probe::plugin("cnitool"));
    each(|place| {
        let (forger, renamed) = (place.attach("net1", Some(8080)), place.attach("net1", Some(8081)));
        let whole = place.rules();
        let (script, _) = losses(place.backend)[0];
        place.shell(script);
        forger.exec(&["ip", "link", "set", "eth0", "address", "0a:00:00:00:00:99"]);
        renamed.exec(&["ip", "link", "set", "eth0", "name", "mine"]);
        renamed.exec(&["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "decoy"]);
        let text = place.done(&["rules", "restore"]);
        assert!(text.ends_with("2 attachments: 2 lacked rules, 0 skipped.\n"), "{text}");
        assert_eq!(differences(&whole, &place.rules()), [""; 0], "{:?}", place.backend);
        place.detach("net1", &forger);
        place.detach("net1", &renamed);
    });
}

/// Go's plugins set no mark. The forger has a pair with the indexes of the victim's.
#[test]
fn no_rules_for_a_port_whose_pair_a_container_imitates() {
    require!(probe::plugin("cnitool"));
    each(|place| {
        let node = &place.operator.node;
        let (forger, victim) = (place.attach("net1", Some(8080)), place.attach("net1", Some(8081)));
        let end_of = |container: &Container| {
            let index = &container.link("eth0").unwrap()["link_index"];
            let links = node.json(&["ip", "-j", "link", "show", "type", "veth"]);
            links.as_array().unwrap().iter().find(|link| link["ifindex"] == *index).unwrap().clone()
        };
        let (forgers, victims) = (end_of(&forger), end_of(&victim));
        node.exec(&["ip", "link", "set", forgers["ifname"].as_str().unwrap(), "alias", ""]);
        let mac = forger.link("eth0").unwrap()["address"].as_str().unwrap().to_owned();
        forger.ip(&[&format!("link set eth0 netns {} name moved0", victim.netns().display())]);
        imitate_pair(&forger, "eth0", &victim.link("eth0").unwrap(), &victims);
        forger.exec(&["ip", "link", "set", "eth0", "address", &mac]);
        let (script, _) = losses(place.backend)[0];
        place.shell(script);
        let text = place.failed(&["rules", "restore"]);
        assert!(text.contains("! bridge       failed: CNI veth created for bridge br0 was not found"), "{text}");
        let port = format!("iifname \"{}\"", victims["ifname"].as_str().unwrap());
        let rules = place.rules().join("\n");
        assert!(!rules.lines().any(|rule| rule.contains(&port) && rule.contains(&forger.id)), "{rules}");
        place.detach("net1", &forger);
        place.detach("net1", &victim);
    });
}

/// Without an end on the host, only the interface's name and MAC identify the attachment.
#[test]
fn an_attachment_that_may_be_in_use_is_not_skipped_silently() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let node = &operator.node;
    node.ip(&["link add up0 type veth peer name up1"]);
    node.expect_left("up0");
    node.expect_left("up1");
    let ipam = json!({"type": "host-local", "dataDir": node.dir(), "ranges": [[{"subnet": "10.3.0.0/24"}]]});
    let macvlan = json!({"type": "macvlan", "master": "up0", "ipam": ipam});
    let list = json!({"cniVersion": "1.1.0", "name": "net3", "plugins": [macvlan, {"type": "firewall", "backend": "nftables"}]});
    node.file("net.d/30-net3.conflist", list.to_string());
    let container = node.container();
    operator.done(&["add", "net3", path(&container), "--container-id", &container.id]);
    container.exec(&["ip", "link", "set", "eth0", "address", "0a:00:00:00:00:99"]);
    let words = ["not restored: eth0", "0a:00:00:00:00:99", "1 attachment: 0 lacked rules, 0 skipped, 1 not restored."];
    operator.failed(&["rules", "restore"], &words);
    operator.done(&["del", "net3", path(&container), "--container-id", &container.id]);
}

/// The container is in use: removing its rules would make the failure worse.
#[test]
fn what_is_restored_before_a_failure_stays() {
    require!(probe::plugin("cnitool"));
    require!(Backend::IptablesLegacy.probe());
    let place = Place::new(Backend::IptablesLegacy);
    let node = &place.operator.node;
    let subnets = conformance::bridge(node, &["10.2.0.0/24", "fd00:2::/64"]);
    let bridge = patched(subnets, json!({"name": null, "cniVersion": null, "bridge": "br2"}));
    let plugins = json!([bridge, {"type": "firewall", "backend": "iptables"}]);
    let list = json!({"cniVersion": "1.1.0", "name": "net2", "plugins": plugins});
    node.file("net.d/20-net2.conflist", list.to_string());
    let container = place.attach("net2", None);
    let accepting = |program: &str| {
        node.exec(&[place.backend.multi(), program, "-w", "-S", "CNI-FORWARD"]).matches("-j ACCEPT").count()
    };
    assert_eq!((accepting("iptables"), accepting("ip6tables")), (2, 2));
    place.shell("iptables -w -F CNI-FORWARD; ip6tables -w -F CNI-FORWARD");
    let script = node.script("broken/xtables-legacy-fails", "#!/bin/sh\necho broken >&2\nexit 1\n");
    std::os::unix::fs::symlink(&script, script.with_file_name("ip6tables-restore")).unwrap();
    let path = format!("{}:{}", script.parent().unwrap().display(), place.backend.path(node));
    let outcome = place.operator.call(&["rules", "restore", "net2"]).env("PATH", path).run();
    assert_eq!(outcome.status, Some(1), "{}", outcome.report());
    assert!(
        outcome.stdout.contains("! firewall     failed: ") && outcome.stdout.contains("broken"),
        "{}",
        outcome.report()
    );
    assert_eq!((accepting("iptables"), accepting("ip6tables")), (2, 0));
    place.done(&["rules", "restore", "net2"]);
    assert_eq!((accepting("iptables"), accepting("ip6tables")), (2, 2));
    place.detach("net2", &container);
}

#[test]
fn an_attachment_that_fails_is_counted() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let container = operator.attach();
    let version = |from: &str, to: &str| {
        let script =
            format!("sed -i 's/\"cniVersion\":\"{from}\"/\"cniVersion\":\"{to}\"/' /var/lib/cni/results/net1-*");
        operator.node.exec(&["sh", "-c", &script]);
    };
    version("1.1.0", "9.9.9");
    let said = operator.failed(&["rules", "restore"], &["! attachment   failed: failed to decode the result"]);
    assert!(said.stdout.ends_with("1 attachment: 0 lacked rules, 0 skipped, 1 failed.\n"), "{}", said.report());
    version("9.9.9", "1.1.0");
    operator.detach(&container);
}

/// Podman 4's and containerd 1.6's records are such.
#[test]
fn a_record_without_a_namespace_has_one_in_its_result() {
    require!(probe::plugin("cnitool"));
    each(|place| {
        let (alive, dead) = (place.attach("net1", Some(8080)), place.attach("net1", Some(8081)));
        let whole = place.rules();
        place.operator.node.exec(&["sh", "-ec", "sed -i 's/\"netns\":\"[^\"]*\",//' /var/lib/cni/results/*"]);
        let records = place.operator.node.exec(&["sh", "-c", "cat /var/lib/cni/results/*"]);
        assert!(!records.contains("\"netns\""), "{records}");
        let facts = place.done(&["inspect"]);
        assert!(!facts.contains("no path was recorded"), "{facts}");
        let (script, _) = losses(place.backend)[0];
        place.shell(script);
        let text = place.done(&["rules", "restore"]);
        assert!(text.ends_with("2 attachments: 2 lacked rules, 0 skipped.\n"), "{text}");
        assert_eq!(differences(&whole, &place.rules()), [""; 0], "{:?}", place.backend);
        place.detach("net1", &alive);
        dead.unmount();
        dead.unlink();
        let text = place.done(&["rules", "restore"]);
        assert!(text.contains("is gone"), "{text}");
        place.detach("net1", &dead);
    });
}
