//! Draws cases at random: nodes, lists over all keys of the plugins, and steps. A case is JSON, so
//! that it can be printed, cut down and run again.

mod bridge;
mod ipam;
mod node;
mod others;

use conformance::measure::Dice;
use serde_json::{Map, Value, json};

/// The random numbers of a draw.
pub(crate) struct Draw {
    dice: Dice,
    /// Whether values that must be refused may be drawn: true for one case in eight.
    spoilt: bool,
}

impl Draw {
    fn one_in(&mut self, times: u64) -> bool {
        self.dice.below(times) == 0
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.dice.below(100) < chance
    }

    fn below(&mut self, end: u64) -> u64 {
        self.dice.below(end)
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.dice.below(from.len() as u64) as usize].clone()
    }

    /// Draws one of the good values or, now and then, one of the bad values if this case may have
    /// them.
    fn value(&mut self, good: &[Value], bad: &[Value]) -> Value {
        if good.is_empty() || (self.spoilt && !bad.is_empty() && self.one_in(4)) {
            self.pick(bad)
        } else {
            self.pick(good)
        }
    }

    /// Puts a key in with this chance.
    fn key(&mut self, into: &mut Value, chance: u64, key: &str, good: &[Value], bad: &[Value]) {
        // A key in another case is the same key, and `null` is the default.
        if self.percent(chance) || (self.spoilt && !bad.is_empty() && self.one_in(12)) {
            let value = if self.one_in(60) { Value::Null } else { self.value(good, bad) };
            let key = if self.one_in(60) { key.to_uppercase() } else { key.to_owned() };
            into[key] = value;
        }
    }
}

/// Draws the case of this number, always the same for the same seed.
pub(crate) fn draw(seed: u64, number: u64) -> Value {
    let mut mixed = Dice::new(seed);
    let start = mixed.below(u64::MAX) ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d);
    let mut draw = Draw { dice: Dice::new(start), spoilt: false };
    draw.spoilt = draw.one_in(8);
    case(&mut draw)
}

fn case(draw: &mut Draw) -> Value {
    let mut case = json!({"host": [], "inside": [[]], "files": {}, "lists": []});
    let kind = draw.below(100);
    if kind < 3 {
        let plugin = others::loopback(draw);
        let list = list(draw, "lo-net", vec![plugin]);
        case["lists"] = json!([list]);
        case["steps"] = steps(draw, &list, 1);
        return case;
    }
    let name = draw.value(
        &[json!("net1"), json!("net1"), json!("net1"), json!("a.b-c_d"), json!("0"), json!("x".repeat(90))],
        &[json!("net 1"), json!(""), json!("-net"), json!("a/b"), json!(7)],
    );
    let version = version(draw);
    let mut plugins = Vec::new();
    if kind < 9 {
        let mut plugin = json!({"type": "host-local"});
        ipam::sources(draw, &mut plugin, 0);
        plugins.push(plugin);
    } else {
        plugins.push(bridge::bridge(draw, 0));
        if draw.percent(28) {
            plugins.push(others::tuning(draw));
        }
        if draw.percent(40) {
            plugins.push(others::portmap(draw));
        }
        if draw.one_in(12) {
            plugins.push(others::tuning(draw));
        }
    }
    let list = json!({"cniVersion": version, "name": name, "plugins": plugins});
    let bridged = plugins[0]["type"] == "bridge";
    let mut lists = vec![list.clone()];
    let containers = if draw.percent(25) { 2 } else { 1 };
    if bridged && draw.one_in(12) {
        let mut second = bridge::bridge(draw, 1);
        if draw.percent(70) {
            second["bridge"] = json!("br1");
        }
        lists.push(json!({"cniVersion": version, "name": "net2", "plugins": [second]}));
    }
    let args = arguments(draw);
    if !args.is_null() {
        case["args"] = args;
    }
    case["lists"] = Value::from(lists.clone());
    case["inside"] = Value::from(vec![json!([]); containers]);
    if bridged {
        node::node(draw, &mut case);
    }
    ipam::files(&mut case);
    case["steps"] = if lists.len() > 1 { two_networks(draw) } else { steps(draw, &list, containers) };
    case
}

fn list(draw: &mut Draw, name: &str, plugins: Vec<Value>) -> Value {
    json!({"cniVersion": version(draw), "name": name, "plugins": plugins})
}

fn version(draw: &mut Draw) -> Value {
    let good = ["1.1.0", "1.1.0", "1.1.0", "1.0.0", "1.0.0", "0.4.0", "0.4.0", "0.3.1", "0.3.0", "0.2.0", "0.1.0"]
        .map(Value::from);
    draw.value(&good, &[json!("2.0.0"), json!("0.5.0"), json!("1.1"), json!("x"), json!(1), Value::Null, json!("")])
}

/// Draws `CNI_ARGS`.
fn arguments(draw: &mut Draw) -> Value {
    if !draw.one_in(8) {
        return Value::Null;
    }
    let good = [
        "IgnoreUnknown=1",
        "IgnoreUnknown=true;K8S_POD_NAME=pod",
        "IgnoreUnknown=1;MAC=02:11:22:33:44:55",
        "IgnoreUnknown=1;IP=10.1.0.77",
        "IgnoreUnknown=1;IP=10.1.0.78/24",
        "",
    ];
    let bad = ["MAC=zz", "IP=nonsense;IgnoreUnknown=1", "Unknown=1", "IgnoreUnknown=maybe", "IgnoreUnknown=1;MAC"];
    draw.value(&good.map(Value::from), &bad.map(Value::from))
}

fn step(verb: &str, container: u64, ifname: &str) -> Value {
    json!({"verb": verb, "container": container, "ifname": ifname})
}

fn steps(draw: &mut Draw, list: &Value, containers: usize) -> Value {
    let newest = list["cniVersion"] == "1.1.0";
    let checks = crate::side::at_least(list, "0.4.0");
    let swap = draw.percent(25);
    let mut first = "eth0";
    if draw.one_in(15) {
        first = draw.pick(&["net1", "eth0.100", "a-b_c", "fifteen-letters", "e"]);
    }
    let mut attached: Vec<(u64, &str)> = vec![(0, first)];
    if containers > 1 {
        attached.push((1, first));
    }
    if draw.one_in(12) {
        attached.push((0, "eth1"));
    }
    let mut steps = Vec::new();
    if newest && draw.one_in(6) {
        steps.push(json!({"verb": "STATUS"}));
    }
    for (container, ifname) in &attached {
        steps.push(step("ADD", *container, ifname));
        if draw.one_in(15) {
            steps.push(step("ADD", *container, ifname));
        }
    }
    if checks && draw.percent(60) {
        let (container, ifname) = draw.pick(&attached);
        steps.push(json!({"verb": "CHECK", "container": container, "ifname": ifname, "swap": swap}));
    }
    if newest && draw.one_in(10) {
        // Valid attachments are left alone, and the others are removed as by a DEL.
        let keep = draw.below(attached.len() as u64 + 1);
        steps.push(json!({"verb": "GC", "keep": keep}));
        attached.truncate(keep as usize);
    }
    let far = draw.below(12);
    if draw.percent(30) {
        attached.reverse();
    }
    for (container, ifname) in &attached {
        let mut del = json!({"verb": "DEL", "container": container, "ifname": ifname, "swap": swap});
        if draw.one_in(6) {
            del["prev"] = json!(false);
        }
        if far == 0 && !swap {
            del["netns"] = draw.pick(&[json!("empty"), json!("/run/netns/gone")]);
        }
        steps.push(del.clone());
        if draw.one_in(10) {
            steps.push(del);
        }
    }
    Value::from(steps)
}

/// Draws the steps of a container in two networks.
fn two_networks(draw: &mut Draw) -> Value {
    let mut order = [0, 1];
    if draw.one_in(2) {
        order.reverse();
    }
    let of =
        |verb: &str, list: usize| json!({"verb": verb, "list": list, "container": 0, "ifname": format!("eth{list}")});
    let mut steps = vec![of("ADD", 0), of("ADD", 1)];
    if draw.percent(50) {
        steps.push(of("CHECK", 0));
    }
    steps.extend(order.map(|list| of("DEL", list)));
    Value::from(steps)
}

/// Makes an object of the keys that are not `null`.
fn object(fields: &[(&str, Value)]) -> Value {
    let given = fields.iter().filter(|(_, value)| !value.is_null());
    Value::Object(given.map(|(key, value)| ((*key).to_owned(), value.clone())).collect::<Map<_, _>>())
}
