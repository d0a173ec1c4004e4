//! Writes the firewall rules that are on a node before the measured calls.

use crate::call::Call;
use crate::cases::{FIRST_HOST_PORT, Ready, Side};
use crate::error::{Error, Result};
use crate::world::{World, feed, run};

/// Writes the firewall rules of `count` other attachments: makes one attachment, copies its rules
/// with different names, addresses and ports, and removes the attachment.
pub(crate) fn write_rules_of_other_containers(world: &World, ready: &Ready, count: usize) -> Result<()> {
    if count == 0 {
        // The attachment is only needed as the original of the copies.
        return Ok(());
    }
    let attachment = ready.attachment(0, 0);
    let run_call = |call: &Call| call.run(world.scratch()).map(|(output, _)| output);
    let result = ready.with_interface(|| ready.chain.run("ADD", &attachment, None, run_call))?;
    let Some((address, _prefix_length)) = result["ips"][0]["address"].as_str().and_then(|cidr| cidr.split_once('/'))
    else {
        return Err(Error::new("the result of an ADD has no address"));
    };
    let original = Original { container: &attachment.container, address };
    if ready.side == Side::OursNft {
        multiply_nft_rules(&original, count)
    } else {
        multiply_iptables_rules(&original, count)
    }?;
    // DEL needs no interface to remove the rules.
    ready.chain.run("DEL", &attachment, Some(&result), run_call).map(drop)
}

/// The attachment whose firewall rules are copied.
struct Original<'a> {
    container: &'a str,
    address: &'a str,
}

impl Original<'_> {
    /// Whether a line of a rule listing has the attachment's container ID or address.
    fn is_in(&self, line: &str) -> bool {
        line.contains(self.container) || line.contains(self.address)
    }

    /// Returns the rule with the container ID, the address and the host port of the attachment
    /// `number`.
    fn copy(&self, rule: &str, number: usize) -> String {
        // 250 addresses of each of the networks from 10.1.100.0/24 on.
        let address = format!("10.1.{}.{}", 100 + number / 250, 2 + number % 250);
        rule.replace(self.container, &format!("other-{number}"))
            .replace(self.address, &address)
            .replace(&FIRST_HOST_PORT.to_string(), &(20_000 + number).to_string())
    }
}

/// Adds `count` copies of the attachment's rules and elements in nf_tables: lists the ruleset,
/// inserts copies of each line that [`Original::is_in`] matches, and replaces the ruleset with the
/// result.
fn multiply_nft_rules(original: &Original<'_>, count: usize) -> Result<()> {
    let rules = run(&["nft", "-n", "list", "ruleset"])?;
    if !rules.lines().any(|line| original.is_in(line)) {
        return Err(Error::new("the attachment left no rule in nf_tables"));
    }
    let mut text = String::new();
    for line in rules.lines() {
        if original.is_in(line) {
            for number in 1..=count {
                text.extend([original.copy(line, number).as_str(), "\n"]);
            }
        }
        text.extend([line, "\n"]);
    }
    feed(&["nft", "-f", "-"], &format!("flush ruleset\n{text}")).map(drop)
}

/// Adds `count` copies of the attachment's chain in iptables, of its rules and of the jump to it.
fn multiply_iptables_rules(original: &Original<'_>, count: usize) -> Result<()> {
    let rules = run(&["iptables-save", "-t", "nat"])?;
    // The jump to the attachment's chain has a comment with the container's ID.
    let is_jump =
        |line: &&str| line.starts_with("-A") && line.contains(original.container) && line.contains(" -j CNI-");
    let Some((_, chain)) = rules.lines().find(is_jump).and_then(|line| line.trim().rsplit_once(" -j ")) else {
        return Err(Error::new("the attachment left no chain of its own in iptables"));
    };
    let mut text = String::new();
    for line in rules.lines() {
        if line.contains(chain) {
            for number in 1..=count {
                // The number replaces the end of the hash in the chain's name.
                let name = format!("{}{number:06}", &chain[..chain.len() - 6]);
                text.extend([original.copy(line, number).replace(chain, &name).as_str(), "\n"]);
            }
        }
        text.extend([line, "\n"]);
    }
    feed(&["iptables-restore", "-w"], &text).map(drop)
}

/// Writes a chain of `count` rules that match address and port, as another program could have
/// written them. No rule jumps to the chain. With iptables it is in the table `nat`, which
/// `iptables` reads as a whole; with nftables it is in a table of its own.
pub(crate) fn write_rules_of_other_programs(side: Side, count: usize) -> Result<()> {
    let address = |number: usize| format!("10.200.{}.{}", number / 250, 1 + number % 250);
    if side == Side::OursNft {
        let mut text = "table ip foreign {\n chain services {\n".to_owned();
        for number in 0..count {
            text.push_str(&format!("  ip daddr {} tcp dport 443 counter return\n", address(number)));
        }
        text.push_str(" }\n}\n");
        feed(&["nft", "-f", "-"], &text)?;
    } else {
        let mut text = "*nat\n:FOREIGN-SERVICES - [0:0]\n".to_owned();
        for number in 0..count {
            let address = address(number);
            text.push_str(&format!("-A FOREIGN-SERVICES -d {address}/32 -p tcp -m tcp --dport 443 -j RETURN\n"));
        }
        text.push_str("COMMIT\n");
        feed(&["iptables-restore", "-w", "--noflush"], &text)?;
    }
    Ok(())
}
