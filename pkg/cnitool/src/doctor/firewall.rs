//! The packet filter around the plugins' own rules: policies, variants, the table of connections.
//!
//! Rules of other programs can be anything, so they are read through `nft` and
//! `iptables-legacy-save`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cni::machine::{Child, Exit, OnSigterm};
use cni_linux::{Link, sysctl};
use libcni::cache::Entry;
use serde_json::Value;

use super::{CheckOutcome, Context};
use crate::inspect::result_of;

/// A program's stdout, if it is there and succeeds.
fn ask(context: &Context<'_, '_>, program: &str, args: &[&str]) -> Option<String> {
    let program = find(context, program)?;
    let child = Child {
        program,
        args: args.iter().map(Into::into).collect(),
        env: None,
        stdin: b"",
        timeout: Duration::from_secs(30),
        on_sigterm: OnSigterm::Kill,
    };
    let output = context.call.machine.run(&child).ok()?;
    (output.status == Exit::Status(0)).then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn find(context: &Context<'_, '_>, program: &str) -> Option<PathBuf> {
    let path = crate::cli::Variables(&context.call.environment).find_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    let folders = std::env::split_paths(&path).filter(|folder| folder.is_absolute()).chain(system);
    folders.map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// A chain that sees what is forwarded and drops what no rule of its table takes.
struct Dropping {
    family: String,
    table: String,
    chain: String,
}

/// The ways in which rules may name a bridge's containers.
struct Known {
    bridge: String,
    /// Their addresses and networks, as rules write them: Go's plugin `firewall` accepts each
    /// address by itself.
    addresses: Vec<String>,
}

impl Known {
    fn of(context: &Context<'_, '_>, bridge: &Link) -> Known {
        let attached = context.snapshot.attached();
        let is_on_it = |entry: &&Entry| {
            let mut its = attached.iter().filter(|(_, link)| link.master == Some(bridge.index));
            its.any(|(mark, _)| mark.network == entry.network && mark.container_id == entry.attachment.container_id)
        };
        let results = context.snapshot.remembered.iter().filter(is_on_it).filter_map(result_of);
        let addresses = results.flat_map(|result| result.ips).flat_map(|ip| {
            let (cidr, address) = (ip.address.network(), ip.address.address());
            [format!("{address}"), format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 }), format!("{cidr}")]
        });
        Known { bridge: bridge.name.clone(), addresses: addresses.collect() }
    }

    fn is_spoken_of(&self, rules: &str) -> bool {
        speaks_of(rules, &self.bridge) || self.addresses.iter().any(|address| speaks_of(rules, address))
    }
}

/// Whether a policy drops what containers send, and nothing in its table speaks of their bridge or
/// network.
pub(super) fn policy(context: &Context<'_, '_>) -> CheckOutcome {
    let mut seen = CheckOutcome::new("policy");
    let bridges: Vec<Known> = context.snapshot.bridges().into_iter().map(|bridge| Known::of(context, bridge)).collect();
    if bridges.is_empty() {
        return seen.ok_summary("no bridge has containers");
    }
    let mut blind = Vec::new();
    match ask(context, "nft", &["-j", "list", "chains"]).and_then(|text| serde_json::from_str::<Value>(&text).ok()) {
        Some(chains) => {
            for Dropping { family, table, chain } in dropping(&chains) {
                let rules = ask(context, "nft", &["list", "table", &family, &table]).unwrap_or_default();
                for Known { bridge, .. } in bridges.iter().filter(|known| !known.is_spoken_of(&rules)) {
                    let what = format!(
                        "chain {family} {table} {chain} drops what is forwarded, and no rule of the table speaks of {bridge}: its \
                         containers reach nothing outside"
                    );
                    let insert =
                        |side: &str| format!("nft insert rule {family} {table} {chain} {side}name {bridge} accept");
                    if ![&family, &table, &chain, bridge].into_iter().all(|word| is_plain(word)) {
                        seen.problem_without_command(what, ACCEPT);
                        continue;
                    }
                    // iptables shows, and saves, only what it has made itself.
                    let command = match (family.as_str(), chain.as_str()) {
                        ("ip", "FORWARD") => by_iptables("iptables", bridge),
                        ("ip6", "FORWARD") => by_iptables("ip6tables", bridge),
                        _ => format!("{} && {}", insert("iif"), insert("oif")),
                    };
                    seen.problem(what, command);
                }
            }
        }
        None => blind.push("nft"),
    }
    for (program, names) in [("iptables", "/proc/net/ip_tables_names"), ("ip6tables", "/proc/net/ip6_tables_names")] {
        if !fs::read_to_string(names).unwrap_or_default().lines().any(|table| table == "filter") {
            continue;
        }
        let Some(saved) = ask(context, &format!("{program}-legacy-save"), &["-t", "filter"]) else {
            blind.push("iptables-legacy-save");
            continue;
        };
        if saved.lines().any(|line| line.starts_with(":FORWARD DROP")) {
            for Known { bridge, .. } in bridges.iter().filter(|known| !known.is_spoken_of(&saved)) {
                let what = format!(
                    "{program}-legacy's FORWARD drops what is forwarded, and no rule of it speaks of {bridge}: its containers \
                     reach nothing outside"
                );
                match is_plain(bridge) {
                    true => seen.problem(what, by_iptables(&format!("{program}-legacy"), bridge)),
                    false => seen.problem_without_command(what, ACCEPT),
                }
            }
        }
    }
    match blind.is_empty() {
        true => seen.ok_summary("no policy drops what containers send"),
        false => seen.ok_summary(format!("not looked at: {} is not installed or does not work", blind.join(", "))),
    }
}

const ACCEPT: &str = "accept what comes in by this bridge, and what leaves by it";

/// Whether a name is nothing but a name to the shell, nft and iptables: to nft `;` ends a rule and
/// `*` stands for more, as `+` does to iptables.
fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    name.bytes().all(plain) && name.bytes().next().is_some_and(|first| first.is_ascii_alphabetic())
}

fn by_iptables(program: &str, bridge: &str) -> String {
    format!("{program} -I FORWARD -i {bridge} -j ACCEPT && {program} -I FORWARD -o {bridge} -j ACCEPT")
}

/// Whether the word stands in the text, not as a part of another.
fn speaks_of(rules: &str, bridge: &str) -> bool {
    rules.split(|c: char| c.is_whitespace() || c == '"').any(|word| word == bridge)
}

/// Base chains of the hook `forward` with the policy drop, out of `nft -j list chains`.
fn dropping(chains: &Value) -> Vec<Dropping> {
    let all = chains["nftables"].as_array().into_iter().flatten().filter_map(|one| one.get("chain"));
    let drops = all.filter(|chain| chain["hook"] == "forward" && chain["policy"] == "drop");
    let seen = drops.filter(|chain| matches!(chain["family"].as_str(), Some("ip" | "ip6" | "inet")));
    let text = |chain: &Value, key: &str| chain[key].as_str().unwrap_or_default().to_owned();
    seen.map(|one| Dropping { family: text(one, "family"), table: text(one, "table"), chain: text(one, "name") })
        .collect()
}

/// Whether frames on a bridge go through iptables, which is right for Kubernetes and surprises
/// everybody else.
pub(super) fn bridge_netfilter(context: &Context<'_, '_>) -> CheckOutcome {
    let mut seen = CheckOutcome::new("br_netfilter");
    let value = sysctl::read("net/bridge/bridge-nf-call-iptables").ok();
    let drops = !policy(context).findings.is_empty();
    match value.as_deref() {
        None => seen.ok_summary("not loaded: frames between containers of one bridge do not pass iptables"),
        Some("1") if drops => {
            let what = "net.bridge.bridge-nf-call-iptables is 1, so the policy above drops what containers of one bridge send each other too";
            seen.problem(what, "sysctl -w net.bridge.bridge-nf-call-iptables=0");
            seen
        }
        Some("1") => seen.ok_summary("frames between containers of one bridge pass iptables, as Kubernetes needs it"),
        Some(_) => seen.ok_summary("frames between containers of one bridge do not pass iptables"),
    }
}

/// Whether both variants of iptables hold rules: each sees its own alone, and what one accepts the
/// other may drop.
pub(super) fn variants(context: &Context<'_, '_>) -> CheckOutcome {
    let mut seen = CheckOutcome::new("iptables");
    let mut variants = Vec::new();
    for program in ["iptables", "ip6tables"] {
        let names = format!("/proc/net/{}_names", if program == "iptables" { "ip_tables" } else { "ip6_tables" });
        let legacy_tables = fs::read_to_string(Path::new(&names)).unwrap_or_default();
        let rules = |variant: &str| -> usize {
            let saved = ask(context, &format!("{program}-{variant}-save"), &[]).unwrap_or_default();
            saved.lines().filter(|line| line.starts_with("-A ")).count()
        };
        // Asking iptables-legacy would load its modules.
        let legacy = if legacy_tables.trim().is_empty() { 0 } else { rules("legacy") };
        let nft = rules("nft");
        if legacy > 0 && nft > 0 {
            let what = format!(
                "{program}-legacy has {legacy} rules and {program}-nft {nft}: each shows its own alone, packets pass both"
            );
            // Emptying a table leaves its policies: one that drops then drops everything, ssh too.
            // Which of these rules are still needed is unknown here.
            let words = format!(
                "have one variant alone in use: let whatever made the fewer rules make them by the other one, and remove \
                 its own; before a chain of {program}-legacy is emptied by hand its policy must be ACCEPT ({program}-legacy -S \
                 shows it), or the node may be cut off"
            );
            seen.problem_without_command(what, words);
        }
        if legacy > 0 {
            variants.push(format!("{program}-legacy"));
        }
        if nft > 0 {
            variants.push(format!("{program}-nft"));
        }
    }
    match variants.is_empty() {
        true => seen.ok_summary("iptables holds no rules in either variant"),
        false => seen.ok_summary(format!("rules in {} alone", variants.join(" and "))),
    }
}

/// Whether the table of connections has room.
pub(super) fn conntrack() -> CheckOutcome {
    let number = |name: &str| sysctl::read(name).ok()?.trim().parse::<u64>().ok();
    let count = number("net/netfilter/nf_conntrack_count");
    judge_conntrack(count.zip(number("net/netfilter/nf_conntrack_max")))
}

fn judge_conntrack(fill: Option<(u64, u64)>) -> CheckOutcome {
    let mut seen = CheckOutcome::new("conntrack");
    match fill {
        // No limit.
        Some((count, 0)) => seen.ok_summary(format!("{count} connections, no limit")),
        Some((count, max)) => {
            let percent = count.saturating_mul(100) / max;
            if percent >= 80 {
                let what = format!(
                    "{count} of {max} connections are tracked ({percent}%): of what comes beyond, packets are dropped"
                );
                seen.problem(what, format!("sysctl -w net.netfilter.nf_conntrack_max={}", max.saturating_mul(2)));
            }
            seen.ok_summary(format!("{count} of {max} connections ({percent}%)"))
        }
        None => seen.ok_summary("not in use"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Fix;
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
        let Fix::Command(command) = &seen.findings[0].fix else { panic!("no command") };
        assert_eq!(command, "sysctl -w net.netfilter.nf_conntrack_max=2000");
    }

    #[test]
    fn dropping_chains_are_those_that_forward() {
        let chain = |hook: &str, policy: &str| json!({"chain": {"family": "inet", "table": "t", "name": hook, "hook": hook, "policy": policy}});
        let chains = json!({"nftables": [{"metainfo": {}}, chain("forward", "drop"), chain("forward", "accept"), chain("input", "drop")]});
        let found: Vec<String> = dropping(&chains).into_iter().map(|one| one.chain).collect();
        assert_eq!(found, ["forward"]);
    }

    #[test]
    fn names_that_say_something_to_nft_or_iptables_get_no_command() {
        for name in ["br0;id", "br*", "br+", "-j", "", "br\x1b", "0br"] {
            assert!(!is_plain(name), "{name:?}");
        }
        assert!(["br0", "cni-br_0.1", "FORWARD"].into_iter().all(is_plain));
    }

    #[test]
    fn a_bridge_is_printed_with_its_full_name() {
        assert!(speaks_of("iifname \"br0\" accept", "br0") && speaks_of("-A FORWARD -i br0 -j ACCEPT", "br0"));
        assert!(!speaks_of("-A FORWARD -i br01 -j ACCEPT", "br0"));
    }
}
