//! Compares `validate` with ADD, list by list: ADD accepts what `validate` calls sound, and refuses
//! what it calls an error.

use cni_testkit::{Outcome, probe, require};
use conformance::patched;
use serde_json::{Value, json};

use super::Operator;

/// The longest name of an interface.
const IFNAME: &str = "fifteen-letters";

/// The expected answer of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Sound,
    Refused,
}
use Verdict::{Refused, Sound};

impl Verdict {
    fn of(outcome: &Outcome) -> Verdict {
        if outcome.status == Some(0) { Sound } else { Refused }
    }
}

/// A node on which lists are tried.
struct Bench {
    operator: Operator,
    tried: usize,
}

impl Bench {
    fn new() -> Bench {
        let operator = Operator::new();
        std::fs::remove_file(operator.node.dir().join("net.d/10-net1.conflist")).unwrap();
        Bench { operator, tried: 0 }
    }

    /// Returns host-local with these keys.
    fn ipam(&self, keys: Value) -> Value {
        patched(json!({"type": "host-local", "dataDir": self.operator.node.data_dir()}), keys)
    }

    /// Returns bridge as a gateway, with host-local over 10.1.0.0/24, patched with these keys.
    fn bridge(&self, keys: Value) -> Value {
        let ipam = self.ipam(json!({"subnet": "10.1.0.0/24"}));
        patched(json!({"type": "bridge", "bridge": "br0", "isGateway": true, "ipam": ipam}), keys)
    }

    /// Returns the same with these keys of ipam.
    fn with_ipam(&self, keys: Value) -> Value {
        self.bridge(json!({"ipam": keys}))
    }

    /// Returns the answers of `validate` and ADD, with their texts. The container ID has 64
    /// characters, like those of runtimes.
    fn ask(&mut self, list: &Value) -> (Verdict, Verdict, String) {
        self.tried += 1;
        let node = &self.operator.node;
        let file = node.file("net.d/10-net.conflist", list.to_string());
        let found = self.operator.call(&["validate", file.to_str().unwrap()]).run();
        let (container, id) = (node.container(), format!("{:064}", self.tried));
        let (path, cache) = (container.netns().to_str().unwrap(), node.dir().join("cache"));
        let name = list["name"].as_str().unwrap();
        let verb = |verb: &str| {
            let args = [verb, name, path, "--container-id", &id, "-i", IFNAME, "--keep-going"];
            let args = if verb == "del" { &args[..] } else { &args[..7] };
            self.operator.call(args).arg("--cache-dir").arg(&cache).run()
        };
        let added = verb("add");
        let gone = verb("del");
        // A chained bridge, a refused name: a DEL without an ADD before it may print nothing.
        let left = node.reservations(name);
        assert!(left.is_empty(), "{left:?} is left\n{}\n{}", added.report(), gone.report());
        for bridge in ["br0", "br1"] {
            node.run(&["ip", "link", "delete", bridge]);
        }
        let words = format!("{}{}{}", found.stdout, added.stdout, added.stderr);
        (Verdict::of(&found), Verdict::of(&added), words)
    }

    #[track_caller]
    fn expect(&mut self, version: &str, lists: &[(Verdict, Value)]) {
        let mut complaints = Vec::new();
        for (expected, plugins) in lists {
            let list = json!({"cniVersion": version, "name": format!("net{}", self.tried), "plugins": plugins});
            let (found, added, words) = self.ask(&list);
            if (found, added) != (*expected, *expected) {
                complaints.push(format!("{expected:?} expected, validate {found:?}, ADD {added:?}: {list}\n{words}"));
            }
        }
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    }
}

fn portmap() -> Value {
    json!({"type": "portmap", "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}})
}

#[test]
fn validate_and_add_agree_on_what_plugins_need_of_each_other() {
    require!(probe::plugin("cnitool"));
    require!(probe::iptables());
    let mut bench = Bench::new();
    let bridge = bench.bridge(json!({}));
    let layer2 = json!({"type": "bridge", "bridge": "br0"});
    let elsewhere = json!({"subnet": "10.2.0.0/24", "dataDir": bench.operator.node.dir().join("elsewhere")});
    let other_range = json!({"subnet": "10.2.0.0/24"});
    let tuning = json!({"type": "tuning", "mtu": 1400});
    let prev = json!({"cniVersion": "1.0.0", "ips": []});
    let lists = [
        (Sound, json!([bridge, portmap(), tuning])),
        (Sound, json!([{"type": "loopback"}, bridge, {"type": "tuning"}])),
        (Refused, json!([portmap()])),
        (Refused, json!([{"type": "tuning"}])),
        (Refused, json!([portmap(), bridge])),
        (Refused, json!([tuning, bridge])),
        (Sound, json!([patched(portmap(), json!({"prevResult": prev})), bridge])),
        (Refused, json!([bridge, {"type": "tuning", "mtu": 67}])),
        (Refused, json!([bridge, {"type": "tuning", "mtu": 65536}])),
        (Sound, json!([bridge, {"type": "tuning", "mtu": 65535}])),
        (Refused, json!([bridge, {"type": "host-local", "ipam": bench.ipam(json!({"subnet": "10.1.0.0/20"}))}])),
        (Refused, json!([{"type": "host-local", "ipam": bench.ipam(json!({"subnet": "10.1.0.0/24"}))}, bridge])),
        (Sound, json!([layer2, {"type": "host-local", "ipam": bench.ipam(other_range.clone())}])),
        (Sound, json!([layer2, bridge])),
        (Refused, json!([bridge, bridge])),
        (Refused, json!([layer2, bench.with_ipam(json!({"routes": [{"dst": "10.9.0.1/16"}]}))])),
        (Sound, json!([bridge, patched(bench.with_ipam(elsewhere), json!({"isGateway": null}))])),
        (Refused, json!([layer2, bench.bridge(json!({"bridge": "br1"}))])),
        (Refused, json!([bench.with_ipam(json!({"type": "loopback"}))])),
        (Refused, json!([bench.with_ipam(json!({"type": "portmap"}))])),
        (Refused, json!([bench.with_ipam(json!({"type": "bridge"}))])),
        (Refused, json!([bench.with_ipam(json!({"type": "./host-local"}))])),
        (Refused, json!([patched(bridge.clone(), json!({"type": "../bridge"}))])),
    ];
    bench.expect("1.1.0", &lists);
    // A result of these versions cannot name an interface, nor be without an address.
    bench.expect("0.2.0", &[(Sound, json!([bridge])), (Refused, json!([layer2])), (Refused, json!([bridge, bridge]))]);
}

#[test]
fn validate_and_add_agree_on_routes_addresses_and_gateways() {
    require!(probe::plugin("cnitool"));
    let mut bench = Bench::new();
    let via = |gw: &str| json!({"routes": [{"dst": "10.9.0.0/16", "gw": gw}]});
    let default = json!({"isDefaultGateway": true});
    let on_link = json!({"routes": [{"dst": "10.8.0.1/32", "scope": 253}, {"dst": "10.9.0.0/16", "gw": "10.8.0.1"}]});
    let ranges = json!([[{"subnet": "10.8.0.0/24"}]]);
    let six = json!({"subnet": "fd00:1::/64"});
    let asked = |address: &str| json!({"args": {"cni": {"ips": [address]}}});
    let lists = [
        (Sound, bench.with_ipam(via("10.1.0.9"))),
        (Refused, bench.with_ipam(via("10.8.0.1"))),
        (Refused, bench.with_ipam(via("fd00::1"))),
        (Sound, bench.with_ipam(on_link)),
        (Sound, bench.with_ipam(patched(via("10.8.0.1"), json!({"ranges": ranges})))),
        (Refused, bench.with_ipam(json!({"routes": [{"dst": "10.9.0.1/16"}]}))),
        (Refused, bench.with_ipam(json!({"routes": [{"dst": "::/0", "gw": "fd00::1"}]}))),
        (Refused, patched(bench.with_ipam(json!({"gateway": "10.8.0.1"})), default)),
        (Sound, bench.with_ipam(json!({"gateway": "10.8.0.1"}))),
        (Refused, bench.with_ipam(json!({"rangeStart": "10.1.0.1", "rangeEnd": "10.1.0.1"}))),
        (Refused, patched(bench.with_ipam(six.clone()), json!({"mtu": 1279}))),
        (Sound, patched(bench.with_ipam(six), json!({"mtu": 1280}))),
        (Sound, bench.bridge(json!({"mtu": 1000}))),
        (Refused, bench.bridge(asked("10.8.0.1"))),
        (Refused, bench.bridge(asked("10.1.0.1"))),
        (Sound, bench.bridge(asked("10.1.0.7"))),
        (Refused, bench.bridge(json!({"delegateTimeout": 0}))),
    ];
    bench.expect("1.1.0", &lists.map(|(verdict, bridge)| (verdict, json!([bridge]))));
}

#[test]
fn validate_and_add_agree_on_the_length_of_the_networks_name() {
    require!(probe::plugin("cnitool"));
    let mut bench = Bench::new();
    for (length, expected) in [(174, Sound), (175, Refused), (201, Refused)] {
        let list = json!({"cniVersion": "1.1.0", "name": "n".repeat(length), "plugins": [bench.bridge(json!({}))]});
        let (found, added, words) = bench.ask(&list);
        assert_eq!((found, added), (expected, expected), "{length} bytes\n{words}");
    }
}

/// Pseudo-random numbers, the same for the same seed (splitmix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % end as u64).unwrap()
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }

    /// Draws `first` three times of four: lists with errors everywhere would test nothing.
    fn mostly<T: Clone>(&mut self, first: &T, others: &[T]) -> T {
        if self.below(4) > 0 { first.clone() } else { self.pick(others) }
    }
}

/// Draws a plugin; `position` is its place in the list.
fn draw(bench: &Bench, dice: &mut Dice, position: usize) -> Value {
    let dir = |name: &str| json!(bench.operator.node.dir().join(name));
    let kinds = ["bridge", "portmap", "tuning", "loopback", "host-local"];
    let kind = if position == 0 { dice.mostly(&kinds[0], &kinds[1..]) } else { dice.pick(&kinds) };
    let subnets = [json!("fd00:1::/64"), json!("10.2.0.0/24"), json!("10.1.0.128/25")];
    let ipam = bench.ipam(json!({
        "subnet": dice.mostly(&json!("10.1.0.0/24"), &subnets),
        "dataDir": dice.mostly(&json!(bench.operator.node.data_dir()), &[dir("elsewhere")]),
        "gateway": dice.mostly(&Value::Null, &[json!("10.1.0.9"), json!("10.8.0.1"), json!("fd00:1::9")]),
        "rangeStart": dice.mostly(&Value::Null, &[json!("10.1.0.200"), json!("fd00:1::200")]),
        "routes": dice.mostly(&Value::Null, &[
            json!([{"dst": "10.9.0.0/16"}]),
            json!([{"dst": "10.9.0.0/16", "gw": "10.1.0.250"}]),
            json!([{"dst": "10.9.0.0/16", "gw": "10.8.0.1"}]),
            json!([{"dst": "fd00:9::/64", "gw": "fd00:1::9"}]),
            json!([{"dst": "10.9.0.1/16"}]),
        ]),
    }));
    match kind {
        "bridge" => patched(
            json!({"type": "bridge"}),
            json!({
                "bridge": dice.mostly(&"br0", &["br1"]),
                "isGateway": dice.mostly(&json!(true), &[Value::Null]),
                "isDefaultGateway": dice.pick(&[json!(true), Value::Null]),
                "mtu": dice.mostly(&Value::Null, &[json!(67), json!(1000), json!(1500), json!(65536)]),
                "hairpinMode": dice.pick(&[json!(true), Value::Null]),
                "promiscMode": dice.mostly(&Value::Null, &[json!(true)]),
                "delegateTimeout": dice.mostly(&Value::Null, &[json!(0), json!(300)]),
                "ipam": dice.mostly(&ipam, &[Value::Null]),
            }),
        ),
        "portmap" => json!({"type": "portmap"}),
        "tuning" => patched(
            json!({"type": "tuning"}),
            json!({
                "mtu": dice.pick(&[Value::Null, json!(67), json!(1400), json!(65536)]),
                "mac": dice.mostly(&Value::Null, &[json!("02:00:00:00:00:09"), json!("01:00:00:00:00:09")]),
                "sysctl": dice.pick(&[Value::Null, json!({"net.core.somaxconn": "500"})]),
            }),
        ),
        "host-local" => json!({"type": "host-local", "ipam": ipam}),
        other => json!({"type": other}),
    }
}

#[test]
fn validate_and_add_agree_on_lists_drawn_at_random() {
    require!(probe::plugin("cnitool"));
    let number =
        |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty()).map(|text| text.parse().unwrap());
    let (seed, rounds) = (number("CNI_SEED").unwrap_or(1), 10 * number("CNI_SOAK").map_or(1, |times: u64| 20 * times));
    let (mut bench, mut dice, mut complaints) = (Bench::new(), Dice(seed), Vec::new());
    let mut agreed = [0, 0];
    for round in 0..rounds {
        let count = 1 + dice.below(3);
        let plugins: Vec<Value> = (0..count).map(|position| draw(&bench, &mut dice, position)).collect();
        let version = dice.mostly(&"1.1.0", &["0.2.0", "0.4.0", "1.0.0"]);
        let list = json!({"cniVersion": version, "name": format!("net{round}"), "plugins": plugins});
        let (found, added, words) = bench.ask(&list);
        // These warnings mean that ADD may fail: the interface depends on the runtime, the address
        // on earlier ADDs. Two plugins with different gateways on one bridge are not judged.
        let may_fail = ["creates the container's interface", "ADD fails where", "already has an IP address different"];
        let depends = may_fail.iter().any(|one| words.contains(one));
        if found == added {
            agreed[usize::from(found == Refused)] += 1;
        } else if !(found == Sound && depends) {
            complaints.push(format!("validate {found:?}, ADD {added:?}: {list}\n{words}"));
        }
    }
    assert!(complaints.is_empty(), "CNI_SEED={seed}, {} of {rounds}:\n{}", complaints.len(), complaints.join("\n"));
    assert!(agreed.iter().all(|count| *count > 0), "CNI_SEED={seed}: sound and refused {agreed:?}, one of them never");
}
