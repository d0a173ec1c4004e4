//! Checks the packet filter outside the plugins' own rules: policies, the two variants of iptables,
//! and the connection tracking table.
//!
//! The rules are read with `nft` and `iptables-legacy-save`, because other programs may use any
//! kind of rule.

use std::fs;
use std::time::Duration;

use cni::machine::{Child, Exit, OnSigterm};
use cni_linux::{Link, program, sysctl};
use serde_json::Value;

use super::{CheckOutcome, Examined, Extent, advice};
use crate::node::attachments::CachedAttachment;
use crate::node::objects::HOST_PORT;

/// Runs a program and returns its stdout. Returns `None` if the program is not installed or fails.
fn stdout_of(node: &Examined<'_>, program: &str, args: &[&str]) -> Option<String> {
    let path = node.context.call.find_os("PATH");
    let program = program::find(&program::folders(path), program)?;
    let (args, timeout) = (args.iter().map(Into::into).collect(), Duration::from_secs(30));
    let child = Child { program, args, env: None, stdin: b"", timeout, on_sigterm: OnSigterm::Kill };
    let output = node.context.call.machine.run(&child).ok().filter(|output| output.status == Exit::Status(0))?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A chain for forwarded packets with the policy drop.
struct DroppingChain {
    name: String,
    /// The rules of its table.
    rules: String,
    /// The beginning of the command that inserts a rule, and the rules' words in its language.
    /// `None` if the chain's names must not be part of a command.
    insertion: Option<(String, RuleWords)>,
}

/// The words of a rule: accept the connections to host ports; from a link; to a link; accept. DNAT
/// has changed the port before the chain FORWARD, so a rule with the host's port would not match.
type RuleWords = [&'static str; 4];

const IPTABLES_WORDS: RuleWords = ["-m conntrack --ctstate DNAT -j ACCEPT", "-i", "-o", "-j ACCEPT"];
const NFT_WORDS: RuleWords = ["ct status dnat accept", "iifname", "oifname", "accept"];

/// The texts by which rules may refer to the containers of a bridge.
struct BridgeNames {
    bridge: String,
    /// The containers' addresses, with and without prefix length, and their subnets. The Go plugin
    /// `firewall` has a rule for each address.
    addresses: Vec<String>,
    /// Whether a port of the host leads to one of the containers.
    has_host_ports: bool,
}

impl BridgeNames {
    /// Collects the addresses of the containers that are attached to a bridge.
    fn of(node: &Examined<'_>, bridge: &Link) -> BridgeNames {
        let attached: Vec<&CachedAttachment> = node.snapshot.attachments.cached_on_bridge(bridge).collect();
        let mut host_ports = node.snapshot.objects.iter().filter(|object| object.fact.kind == HOST_PORT);
        let has_host_ports = host_ports.any(|rule| attached.iter().any(|cached| rule.owner.matches(&cached.id)));
        let results = attached.into_iter().flat_map(|cached| &cached.result);
        let addresses = results.flat_map(|result| &result.ips).flat_map(|ip| {
            let (subnet, address) = (ip.address.network(), ip.address.address());
            let full_length = if address.is_ipv4() { 32 } else { 128 };
            [format!("{address}"), format!("{address}/{full_length}"), format!("{subnet}")]
        });
        BridgeNames { bridge: bridge.name.clone(), addresses: addresses.collect(), has_host_ports }
    }

    /// Whether the rules mention the bridge or one of its containers' addresses.
    fn is_mentioned_in(&self, rules: &str) -> bool {
        mentions(rules, &self.bridge) || self.addresses.iter().any(|address| mentions(rules, address))
    }

    /// Whether the rules accept new connections to host ports: one rule accepts all redirected
    /// connections, or all packets to the bridge or to one of its containers' addresses. Rules that
    /// accept only packets of existing connections do not count, as that of the plugin `firewall`.
    fn has_host_ports_accepted_in(&self, rules: &str) -> bool {
        let names: Vec<&str> = std::iter::once(&self.bridge).chain(&self.addresses).map(String::as_str).collect();
        rules.lines().any(|rule| {
            let words: Vec<&str> = words_of(rule).collect();
            let accepts = words.iter().any(|word| matches!(*word, "accept" | "ACCEPT"));
            let mut pairs = words.windows(2);
            let destination = pairs.find(|pair| matches!(pair[0], "oifname" | "oif" | "daddr" | "-o" | "-d"));
            let destination = destination.map(|pair| pair[1]);
            let is_to_container = destination.is_some_and(|name| names.contains(&name));
            // A set is that of the plugin `firewall`, or of the administrator.
            let may_be_to_container = destination.is_none_or(|name| name.starts_with('@') || is_to_container);
            let is_for_states = ["--ctstate", "ct"].into_iter().any(|word| words.contains(&word));
            let is_for_redirected = words.windows(2).any(|pair| {
                matches!(pair, ["--ctstate", states] if states.split(',').any(|state| state == "DNAT"))
                    || pair == ["status", "dnat"]
            });
            accepts && ((is_for_redirected && may_be_to_container) || (is_to_container && !is_for_states))
        })
    }
}

/// Checks that no chain's policy drops packets of containers. It is assumed that a rule that
/// mentions the bridge, or an address of its containers, accepts their packets.
pub(super) fn policy(node: &Examined<'_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("policy");
    let bridges: Vec<BridgeNames> =
        node.snapshot.bridges().into_iter().map(|bridge| BridgeNames::of(node, bridge)).collect();
    if bridges.is_empty() {
        return outcome.with_summary("no bridge has containers");
    }
    let lists = [("nft", dropping_nft_chains(node)), ("iptables-legacy-save", dropping_legacy_chains(node))];
    let chains = lists.iter().filter_map(|(_, chains)| chains.as_ref()).flatten();
    chains.for_each(|chain| check_chain(chain, &bridges, &mut outcome));
    let unusable: Vec<&str> =
        lists.iter().filter(|(_, chains)| chains.is_none()).map(|(program, _)| *program).collect();
    outcome.with_summary(match unusable.is_empty() {
        true => "no policy drops packets of containers".to_owned(),
        false => format!("not checked completely: {} is not installed or does not work", unusable.join(", ")),
    })
}

/// Reports what a chain with the policy drop drops: new connections to host ports, and the packets
/// of bridges.
fn check_chain(chain: &DroppingChain, bridges: &[BridgeNames], outcome: &mut CheckOutcome) {
    let DroppingChain { name, rules, insertion } = chain;
    let object = format!("chain {name}");
    if let Some(problem) = dropped_host_ports(bridges, rules) {
        let fix = match insertion {
            Some((insert, [redirected, ..])) => format!("{insert} {redirected}").into(),
            None => advice("add a rule that accepts redirected connections"),
        };
        outcome.add(&object, problem, fix);
    }
    for BridgeNames { bridge, .. } in bridges.iter().filter(|names| !names.is_mentioned_in(rules)) {
        let problem = format!(
            "drops forwarded packets, and no rule of the table mentions {bridge}: its containers cannot reach other networks"
        );
        let fix = match insertion {
            Some((insert, [_, from, to, accept])) if is_safe_in_command(bridge) => {
                format!("{insert} {from} {bridge} {accept} && {insert} {to} {bridge} {accept}").into()
            }
            _ => advice("add rules that accept packets that enter or leave through this bridge"),
        };
        outcome.add(&object, problem, fix);
    }
}

/// Returns the base chains of nf_tables that drop forwarded packets, or `None` if `nft` could not
/// list the chains. If a chain's table cannot be listed, it has no rules here.
fn dropping_nft_chains(node: &Examined<'_>) -> Option<Vec<DroppingChain>> {
    let chains = serde_json::from_str::<Value>(&stdout_of(node, "nft", &["-j", "list", "chains"])?).ok()?;
    let read = |[family, table, chain]: [String; 3]| {
        let rules = stdout_of(node, "nft", &["list", "table", &family, &table]).unwrap_or_default();
        // iptables lists and saves only rules that it can express. So a chain of iptables gets its
        // rule from iptables.
        let insertion = match (family.as_str(), chain.as_str()) {
            ("ip", "FORWARD") => Some(("iptables -I FORWARD".to_owned(), IPTABLES_WORDS)),
            ("ip6", "FORWARD") => Some(("ip6tables -I FORWARD".to_owned(), IPTABLES_WORDS)),
            _ if ![&family, &table, &chain].into_iter().all(|word| is_safe_in_command(word)) => None,
            _ => Some((format!("nft insert rule {family} {table} {chain}"), NFT_WORDS)),
        };
        DroppingChain { name: format!("{family} {table} {chain}"), rules, insertion }
    };
    Some(dropping_chains(&chains).into_iter().map(read).collect())
}

/// The programs of iptables, each with the file that lists the existing tables of its legacy
/// variant. The file does not exist if the variant's kernel modules are not loaded.
const IPTABLES_PROGRAMS: [(&str, &str); 2] =
    [("iptables", "/proc/net/ip_tables_names"), ("ip6tables", "/proc/net/ip6_tables_names")];

/// Returns the chains FORWARD of iptables-legacy that drop packets, or `None` if an existing table
/// `filter` could not be listed.
fn dropping_legacy_chains(node: &Examined<'_>) -> Option<Vec<DroppingChain>> {
    let mut chains = Vec::new();
    for (program, names_file) in IPTABLES_PROGRAMS {
        let tables = fs::read_to_string(names_file).unwrap_or_default();
        if !tables.lines().any(|table| table == "filter") {
            continue;
        }
        let rules = stdout_of(node, &format!("{program}-legacy-save"), &["-t", "filter"])?;
        if rules.lines().any(|line| line.starts_with(":FORWARD DROP")) {
            let insertion = Some((format!("{program}-legacy -I FORWARD"), IPTABLES_WORDS));
            chains.push(DroppingChain { name: format!("FORWARD of {program}-legacy"), rules, insertion });
        }
    }
    Some(chains)
}

/// Describes that a chain with the policy drop drops new connections to the host ports of
/// containers, and returns `None` if it does not. `rules` are those of the chain's table. Bridges
/// that no rule mentions are left out, because the finding about them says more.
fn dropped_host_ports(bridges: &[BridgeNames], rules: &str) -> Option<String> {
    let is_affected = |names: &&BridgeNames| {
        names.has_host_ports && names.is_mentioned_in(rules) && !names.has_host_ports_accepted_in(rules)
    };
    let affected: Vec<&str> = bridges.iter().filter(is_affected).map(|names| names.bridge.as_str()).collect();
    let bridges = affected.join(", ");
    let what = "drops new connections to the host ports of containers on";
    (!affected.is_empty()).then(|| format!("{what} {bridges}: no rule of the table accepts them"))
}

/// Whether a name can be part of a command: whether it has no special meaning for the shell, nft
/// (`;`, `*`) or iptables (`+`).
fn is_safe_in_command(name: &str) -> bool {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    name.bytes().all(is_safe) && name.bytes().next().is_some_and(|first| first.is_ascii_alphabetic())
}

/// Whether a word of the rules is exactly `name`.
fn mentions(rules: &str, name: &str) -> bool {
    words_of(rules).any(|word| word == name)
}

/// Returns the words of rules, without quotation marks.
fn words_of(rules: &str) -> impl Iterator<Item = &str> {
    rules.split(|c: char| c.is_whitespace() || c == '"').filter(|word| !word.is_empty())
}

/// Returns the family, the table and the name of each base chain of the hook forward with the
/// policy drop. `chains` is the output of `nft -j list chains`.
fn dropping_chains(chains: &Value) -> Vec<[String; 3]> {
    let chains = chains["nftables"].as_array().into_iter().flatten().filter_map(|item| item.get("chain"));
    let drops = |chain: &&Value| {
        let is_ip = matches!(chain["family"].as_str(), Some("ip" | "ip6" | "inet"));
        chain["hook"] == "forward" && chain["policy"] == "drop" && is_ip
    };
    let names =
        |chain: &Value| ["family", "table", "name"].map(|key| chain[key].as_str().unwrap_or_default().to_owned());
    chains.filter(drops).map(names).collect()
}

/// Checks whether frames between containers of one bridge pass iptables (br_netfilter). Kubernetes
/// needs this, so it is only a problem if a policy drops the frames. `policy` is the outcome of
/// [`policy`].
pub(super) fn bridge_netfilter(policy: &CheckOutcome) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("br_netfilter");
    let value = sysctl::read("net/bridge/bridge-nf-call-iptables").ok();
    if value.as_deref() == Some("1") && !policy.findings.is_empty() {
        let problem = "is 1, so the policy above also drops packets between containers of one bridge";
        let name = "net.bridge.bridge-nf-call-iptables";
        outcome.add(name, problem, format!("sysctl -w {name}=0"));
    }
    outcome.with_summary(match value.as_deref() {
        None => "br_netfilter is not loaded: frames between containers of one bridge do not pass iptables",
        Some("1") => "frames between containers of one bridge pass iptables, which Kubernetes needs",
        Some(_) => "frames between containers of one bridge do not pass iptables",
    })
}

/// Checks for iptables and for ip6tables that at most one of the two variants, legacy and nft, has
/// rules. Each variant shows only its own rules, but every packet passes both.
pub(super) fn variants(node: &Examined<'_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("iptables");
    let mut variants_with_rules = Vec::new();
    for (program, names_file) in IPTABLES_PROGRAMS {
        let legacy_tables = fs::read_to_string(names_file).unwrap_or_default();
        // A variant that is not installed counts as one without rules.
        let count_rules = |variant: &str| -> usize {
            let rules = stdout_of(node, &format!("{program}-{variant}-save"), &[]).unwrap_or_default();
            rules.lines().filter(|line| line.starts_with("-A ")).count()
        };
        // iptables-legacy would load its kernel modules, so it is only run if a legacy table
        // exists.
        let legacy = if legacy_tables.trim().is_empty() { 0 } else { count_rules("legacy") };
        // Without rules of the other variant, these are not a problem.
        let nft = if legacy == 0 && node.extent == Extent::Host { 0 } else { count_rules("nft") };
        if legacy > 0 && nft > 0 {
            let problem = format!(
                "has {legacy} rules and {program}-nft has {nft}: each shows only its own rules, but packets pass both"
            );
            // A command would be dangerous: an emptied chain keeps its policy, which may drop
            // everything, and it is not known which rules are still needed.
            let fix = format!(
                "use one variant only: configure the program that created the fewer rules to use the other variant, and remove \
                 its old rules; before you empty a chain of {program}-legacy, set its policy to ACCEPT ({program}-legacy -S \
                 shows it), or the node may become unreachable"
            );
            outcome.add(format!("{program}-legacy"), problem, advice(fix));
        }
        let counts = [(legacy, "legacy"), (nft, "nft")].into_iter().filter(|(count, _)| *count > 0);
        variants_with_rules.extend(counts.map(|(_, variant)| format!("{program}-{variant}")));
    }
    outcome.with_summary(match variants_with_rules.is_empty() {
        true => "iptables has no rules in either variant".to_owned(),
        false => format!("rules only in {}", variants_with_rules.join(" and ")),
    })
}

/// Checks that the connection tracking table is less than 80 % full.
pub(super) fn conntrack() -> CheckOutcome {
    let read_number = |name: &str| sysctl::read(name).ok()?.trim().parse::<u64>().ok();
    let count = read_number("net/netfilter/nf_conntrack_count");
    judge_conntrack(count.zip(read_number("net/netfilter/nf_conntrack_max")))
}

/// Returns the outcome for the number of tracked connections and its limit, where 0 means no limit.
/// `None` means that the kernel does not track connections.
fn judge_conntrack(count_and_limit: Option<(u64, u64)>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("conntrack");
    let Some((count, max)) = count_and_limit else { return outcome.with_summary("not in use") };
    let Some(percent) = count.saturating_mul(100).checked_div(max) else {
        return outcome.with_summary(format!("{count} connections, no limit"));
    };
    if percent >= 80 {
        let problem = format!("are tracked ({percent}%): beyond the limit, packets of new connections are dropped");
        let command = format!("sysctl -w net.netfilter.nf_conntrack_max={}", max.saturating_mul(2));
        outcome.add(format!("{count} of {max} possible connections"), problem, command);
    }
    outcome.with_summary(format!("{count} of {max} connections ({percent}%)"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_table_of_connections_that_is_nearly_full_is_found() {
        for (fill, found) in
            [(None, false), (Some((799, 1000)), false), (Some((800, 1000)), true), (Some((5, 0)), false)]
        {
            let seen = judge_conntrack(fill);
            assert_eq!(!seen.findings.is_empty(), found, "{fill:?}");
        }
        let seen = judge_conntrack(Some((900, 1000)));
        assert_eq!(seen.findings[0].fix.command.as_deref().unwrap(), "sysctl -w net.netfilter.nf_conntrack_max=2000");
    }

    #[test]
    fn dropping_chains_are_those_that_forward() {
        let chain = |hook: &str, policy: &str| json!({"chain": {"family": "inet", "table": "t", "name": hook, "hook": hook, "policy": policy}});
        let chains = json!({"nftables": [{"metainfo": {}}, chain("forward", "drop"), chain("forward", "accept"), chain("input", "drop")]});
        assert_eq!(dropping_chains(&chains), [["inet", "t", "forward"].map(str::to_owned)]);
    }

    #[test]
    fn only_rules_for_new_connections_accept_host_ports() {
        let names = BridgeNames {
            bridge: "br0".to_owned(),
            addresses: vec!["10.1.0.2".to_owned(), "10.1.0.2/32".to_owned()],
            has_host_ports: true,
        };
        for (rule, accepts) in [
            ("-A CNI-FORWARD -d 10.1.0.2/32 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", false),
            ("-A CNI-FORWARD -s 10.1.0.2/32 -j ACCEPT", false),
            ("ip daddr 10.1.0.2 ct state established,related counter packets 0 bytes 0 accept", false),
            ("-A FORWARD -d 10.1.0.2/32 -j DROP", false),
            ("-A FORWARD -o br0 -j ACCEPT", true),
            ("-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT", true),
            ("-A FORWARD -m conntrack --ctstate ESTABLISHED,DNAT -j ACCEPT", true),
            ("ct status dnat accept", true),
            ("-A CNI-FORWARD -d 10.1.0.2/32 -m conntrack --ctstate DNAT -j ACCEPT", true),
            ("-A CNI-FORWARD -d 10.9.0.9/32 -m conntrack --ctstate DNAT -j ACCEPT", false),
            ("ip daddr @cni_mapped4 ct status dnat accept", true),
            ("oifname \"br0\" counter packets 0 bytes 0 accept", true),
        ] {
            assert_eq!(names.has_host_ports_accepted_in(rule), accepts, "{rule}");
        }
    }

    #[test]
    fn names_that_say_something_to_nft_or_iptables_get_no_command() {
        for name in ["br0;id", "br*", "br+", "-j", "", "br\x1b", "0br"] {
            assert!(!is_safe_in_command(name), "{name:?}");
        }
        assert!(["br0", "cni-br_0.1", "FORWARD"].into_iter().all(is_safe_in_command));
    }

    #[test]
    fn a_bridge_is_printed_with_its_full_name() {
        assert!(mentions("iifname \"br0\" accept", "br0") && mentions("-A FORWARD -i br0 -j ACCEPT", "br0"));
        assert!(!mentions("-A FORWARD -i br01 -j ACCEPT", "br0"));
    }
}
