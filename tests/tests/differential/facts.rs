//! Reads the state of a node and its containers, as facts that can be compared one by one.
//!
//! Facts that differ between two runs of the same program, or that only our plugins make and Go
//! never reads, are left out or renamed here; each place names the reason. Every other difference
//! needs an explanation (`explained.rs`).

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::side::{Side, list};

/// The facts, by their places.
pub(crate) type Facts = BTreeMap<String, String>;

/// The state of a namespace.
struct Shown {
    place: String,
    links: Vec<Value>,
    routes: Vec<Value>,
    rules: Vec<Value>,
    sysctls: Vec<(String, String)>,
}

impl Side<'_> {
    /// Returns all present facts.
    pub(crate) fn facts(&mut self) -> Facts {
        let all = self.literal.contains("\"sysctl\"");
        let mut shown = vec![self.node.enter(|| show("host".to_owned(), all))];
        for (number, container) in self.containers.iter().enumerate() {
            shown.push(container.enter(|| show(format!("c{number}"), all)));
        }
        self.name(&shown);
        let mut facts = Facts::new();
        for one in &shown {
            links(&mut facts, one, &self.literal);
            routes(&mut facts, one);
        }
        self.rules(&mut facts);
        self.files(&mut facts);
        let facts = facts.into_iter().map(|(key, value)| (self.named(&key), self.named(&value)));
        facts.collect()
    }

    /// Learns the owners of random names and MACs: `veth(c0.eth0)` is the host's end of that
    /// interface.
    fn name(&mut self, shown: &[Shown]) {
        for inside in &shown[1..] {
            for link in &inside.links {
                let (name, mac) = (text(link, "ifname"), text(link, "address"));
                if name == "lo" {
                    continue;
                }
                let peer = shown[0].links.iter().find(|host| {
                    host["ifindex"] == link["link_index"]
                        && host["link_index"] == link["ifindex"]
                        && is_random(text(host, "ifname"))
                });
                if let Some(peer) = peer {
                    self.names.insert(text(peer, "ifname").to_owned(), format!("veth({}.{name})", inside.place));
                }
                if !self.literal.contains(mac) {
                    self.names.insert(mac.to_owned(), format!("mac({}.{name})", inside.place));
                }
            }
        }
    }

    /// Returns `text` with the random names in it replaced.
    pub(crate) fn named(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (name, token) in &self.names {
            if text.contains(name.as_str()) {
                text = text.replace(name.as_str(), token);
            }
        }
        // A MAC that a later plugin has replaced.
        let mut from = 0;
        while let Some(at) = (from..text.len().saturating_sub(16)).find(|at| text.get(*at..at + 17).is_some_and(is_mac))
        {
            let mac = text[at..at + 17].to_lowercase();
            let known =
                self.literal.contains(&mac) || ["00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff"].contains(&mac.as_str());
            if !known {
                text.replace_range(at..at + 17, "mac(former)......");
            }
            from = at + 17;
        }
        text
    }

    /// Adds the rules, chain by chain.
    fn rules(&self, facts: &mut Facts) {
        let ruleset = self.node.ruleset();
        chains_of_nft(facts, &ruleset);
        for (family, save) in [("ip", "iptables"), ("ip6", "ip6tables")] {
            if ruleset.contains(&format!("table {family} nat ")) {
                chains_of_iptables(facts, save, &self.node.exec(&[&format!("{save}-nft-save"), "-t", "nat"]));
            }
            let names = if family == "ip" { "ip_tables_names" } else { "ip6_tables_names" };
            if self.node.proc_net(names).contains("nat") {
                let save = format!("{save}-legacy");
                chains_of_iptables(facts, &save, &self.node.exec(&[&format!("{save}-save"), "-t", "nat"]));
            }
        }
    }

    /// Adds the files of plugins: their names, modes and content.
    fn files(&self, facts: &mut Facts) {
        let files = self.node.enter(|| {
            let mut files = Vec::new();
            for folder in ["/var/lib", "/run"] {
                walk(Path::new(folder), &mut files);
            }
            files
        });
        for (path, content) in files {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            // Only our plugins make it; it is empty, and Go's plugins do not read it:
            // `docs/plugins/portmap.md`.
            let lock = name.starts_with("iptables-") && name.ends_with(".lock") || name == "xtables.lock";
            if lock || path.starts_with("/run/netns") {
                continue;
            }
            facts.insert(format!("file{}", path.display()), backup(content));
        }
    }
}

fn is_mac(text: &str) -> bool {
    text.bytes().enumerate().all(|(at, byte)| if at % 3 == 2 { byte == b':' } else { byte.is_ascii_hexdigit() })
}

/// Removes the keys that our tuning adds to Go's backup: Go ignores them.
fn backup(content: String) -> String {
    let Ok(Value::Object(mut fields)) = serde_json::from_str(&content) else { return content };
    fields.retain(|key, _| !["attachment", "sysctls", "written"].contains(&key.as_str()));
    Value::Object(fields).to_string()
}

fn walk(folder: &Path, into: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // The links of host-local and the like: only our plugins make them, and they may be deleted
        // at any time.
        if entry.file_name() == ".cni" {
            continue;
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&entry.path(), into);
        } else {
            let content = fs::read(entry.path()).unwrap_or_default();
            into.push((entry.path(), String::from_utf8_lossy(&content).into_owned()));
        }
    }
}

/// Whether the name is `veth` and eight hexadecimal digits, which no configuration names.
fn is_random(name: &str) -> bool {
    name.strip_prefix("veth").is_some_and(|rest| rest.len() == 8 && rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().unwrap_or_default()
}

/// Asks the kernel, by one `ip` for everything without a family and one for the rules of IPv6.
fn show(place: String, all_sysctls: bool) -> Shown {
    // The folder shows the links of the node in every namespace.
    let is_host = place == "host";
    let mut all = ip(&["-j", "-d"], "address show\nroute show table all\nrule show\n").into_iter();
    let mut next = || all.next().unwrap_or_default();
    let (mut links, routes, mut rules) = (next(), next(), next());
    for link in links.iter_mut().filter(|link| is_host && link["linkinfo"]["info_kind"] == "bridge") {
        let path = format!("/sys/class/net/{}/addr_assign_type", text(link, "ifname"));
        link["addr_assign_type"] = fs::read_to_string(path).unwrap_or_default().trim().into();
    }
    rules.extend(ip(&["-6", "-j", "-d"], "rule show\n").into_iter().flatten());
    let mut sysctls = Vec::new();
    // This is half the cost of a capture. Only forwarding and tuning set sysctls that are not an
    // interface's own.
    let folders: &[&str] =
        if all_sysctls { &["/proc/sys/net"] } else { &["/proc/sys/net/ipv4/conf", "/proc/sys/net/ipv6/conf"] };
    for folder in folders {
        read_sysctls(Path::new(folder), &mut sysctls);
    }
    if let Ok(value) = fs::read_to_string("/proc/sys/net/ipv4/ip_forward") {
        sysctls.push(("net/ipv4/ip_forward".to_owned(), value.trim_end().to_owned()));
    }
    Shown { place, links, routes, rules, sysctls }
}

fn ip(options: &[&str], batch: &str) -> Vec<Vec<Value>> {
    let mut command = Command::new("ip");
    command.args(options).args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("to run ip");
    child.stdin.take().expect("a pipe").write_all(batch.as_bytes()).expect("to write to ip");
    let output = child.wait_with_output().expect("to wait for ip");
    assert!(output.status.success(), "ip failed");
    let lists = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Vec<Value>>();
    lists.map(|list| list.expect("ip prints lists")).collect()
}

fn read_sysctls(folder: &Path, into: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        // No plugin sets the sysctls of neighbour tables; the count changes all the time.
        if name == "neigh" || name == "nf_conntrack_count" {
            continue;
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            read_sysctls(&path, into);
        } else {
            let value = fs::read_to_string(&path).unwrap_or_else(|_| "unreadable".to_owned());
            let path = path.strip_prefix("/proc/sys").unwrap_or(&path);
            into.push((path.display().to_string(), value.trim_end().to_owned()));
        }
    }
}

fn links(facts: &mut Facts, shown: &Shown, literal: &str) {
    let place = &shown.place;
    for link in &shown.links {
        let name = text(link, "ifname");
        let mac = text(link, "address");
        let known = name == "lo" || literal.contains(mac);
        facts.insert(format!("{place}/link/{name}/address"), if known { mac } else { "random" }.to_owned());
        let is_bridge = link["linkinfo"]["info_kind"] == "bridge";
        flatten(facts, &format!("{place}/link/{name}"), link, &|key| {
            // Numbers that change all the time, and our mark. `state` and the like follow the
            // carrier, up to a second later.
            [
                "ifindex",
                "link_index",
                "link_netnsid",
                "operstate",
                "ifalias",
                "address",
                "addr_info",
                "flags",
                "linkmode",
            ]
            .contains(&key)
                || key.ends_with("_timer")
                || key.ends_with("_id")
                || key.starts_with("designated_")
                || ["id", "no", "topology_change_ack", "topology_change_detected"].contains(&key)
                || (is_bridge && ["root_port", "root_path_cost", "topology_change"].contains(&key))
        });
        let flags = list(&link["flags"]).iter().filter_map(Value::as_str);
        // These follow the carrier.
        let flags: Vec<&str> =
            flags.filter(|flag| !["LOWER_UP", "NO-CARRIER", "M-DOWN", "DORMANT"].contains(flag)).collect();
        facts.insert(format!("{place}/link/{name}/flags"), flags.join(" "));
        let addresses = list(&link["addr_info"]).iter();
        // The kernel makes these from random MACs, when there is a carrier.
        let addresses = addresses.filter(|info| !text(info, "local").starts_with("fe80:"));
        let addresses: Vec<String> = addresses.map(|info| address(info, place)).collect();
        facts.insert(format!("{place}/addresses/{name}"), addresses.join("\n"));
    }
    for (path, value) in &shown.sysctls {
        facts.insert(format!("{place}/sysctl/{path}"), value.clone());
    }
}

fn address(info: &Value, place: &str) -> String {
    let mut line = format!("{}/{}", text(info, "local"), info["prefixlen"]);
    for (key, value) in info.as_object().into_iter().flatten() {
        // On the host duplicate detection continues for about a second after ADD, on both nodes.
        let of_the_moment = place == "host" && key == "tentative";
        if !["local", "prefixlen", "family"].contains(&key.as_str()) && !of_the_moment {
            line += &format!(" {key}={value}");
        }
    }
    line
}

fn routes(facts: &mut Facts, shown: &Shown) {
    let mut lines: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for route in &shown.routes {
        let dst = text(route, "dst");
        // Routes of link-local addresses, see above; multicast comes with the carrier.
        if dst.starts_with("fe80:") || text(route, "type") == "multicast" || (dst == "ff00::/8") {
            continue;
        }
        let mut line = String::new();
        for (key, value) in route.as_object().into_iter().flatten() {
            // `linkdown` follows the carrier.
            if !["dst", "table", "flags"].contains(&key.as_str()) {
                line += &format!("{key}={value} ");
            }
        }
        let table = route["table"].as_str().map_or_else(|| route["table"].to_string(), str::to_owned);
        lines.entry(format!("{}/route/{table}/{dst}", shown.place)).or_default().push(line.trim_end().to_owned());
    }
    for (number, rule) in shown.rules.iter().enumerate() {
        lines.entry(format!("{}/rule/{number}", shown.place)).or_default().push(rule.to_string());
    }
    facts.extend(lines.into_iter().map(|(key, lines)| (key, lines.join("\n"))));
}

/// Adds every leaf of `value`, except the keys that `left_out` names.
pub(crate) fn flatten(facts: &mut Facts, path: &str, value: &Value, left_out: &dyn Fn(&str) -> bool) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields.iter().filter(|(key, _)| !left_out(key)) {
                flatten(facts, &format!("{path}/{key}"), value, left_out);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (index, value) in items.iter().enumerate() {
                flatten(facts, &format!("{path}/{index}"), value, left_out);
            }
        }
        leaf => drop(facts.insert(path.to_owned(), leaf.to_string())),
    }
}

/// Whether this is our rule without a target that names the owner of the other rules: Go never
/// reads it (decision 24).
fn is_owner_rule(line: &str) -> bool {
    line.contains("comment \"cni:") && !line.contains(" -j ")
}

fn chains_of_nft(facts: &mut Facts, ruleset: &str) {
    let (mut table, mut chain) = (String::new(), None::<(String, Vec<String>)>);
    for line in ruleset.lines().filter(|line| !line.starts_with('#')) {
        let line = line.trim();
        if let Some(name) = line.strip_prefix("table ").and_then(|rest| rest.strip_suffix(" {")) {
            table = name.to_owned();
            facts.insert(format!("nft/{table}"), String::new());
        } else if let Some(name) = line.strip_prefix("chain ").and_then(|rest| rest.strip_suffix(" {")) {
            chain = Some((name.to_owned(), Vec::new()));
        } else if line == "}" {
            if let Some((name, lines)) = chain.take() {
                insert_chain(facts, &format!("nft/{table}/{name}"), lines);
            }
        } else if let Some((_, lines)) = &mut chain {
            if !is_owner_rule(line) {
                lines.push(line.to_owned());
            }
        } else if !line.is_empty() {
            facts.insert(format!("nft/{table}/{line}"), String::new());
        }
    }
    // Reading with iptables-nft makes tables and base chains, and `iptables-save` lists its tables
    // in full.
    let tables = ["nft/ip filter", "nft/ip6 filter"];
    facts.retain(|key, _| {
        !tables.contains(&key.as_str()) && !key.starts_with("nft/ip nat") && !key.starts_with("nft/ip6 nat")
    });
}

fn insert_chain(facts: &mut Facts, key: &str, lines: Vec<String>) {
    let base_of_iptables = key.contains(" filter/") && lines.len() == 1 && lines[0].starts_with("type ");
    if !base_of_iptables {
        facts.insert(key.to_owned(), lines.join("\n"));
    }
}

fn chains_of_iptables(facts: &mut Facts, tool: &str, saved: &str) {
    for line in saved.lines() {
        if let Some(chain) = line.strip_prefix(':').and_then(|rest| rest.split(' ').next()) {
            if chain.starts_with("CNI") {
                facts.insert(format!("{tool}/{chain}"), String::new());
            }
        } else if let Some(rule) = line.strip_prefix("-A ").filter(|rule| !is_owner_rule(rule)) {
            let (chain, rule) = rule.split_once(' ').unwrap_or((rule, ""));
            let lines = facts.entry(format!("{tool}/{chain}")).or_default();
            lines.push_str(rule);
            lines.push('\n');
        }
    }
}
