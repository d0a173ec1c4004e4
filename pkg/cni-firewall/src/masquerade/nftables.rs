//! Masquerading in nf_tables, in the form of the Go plugins:
//! ```text
//! table inet cni_plugins_masquerade {
//!     comment "Masquerading for plugins from github.com/containernetworking/plugins"
//!     chain masq_checks {
//!         comment "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet"
//!         ip saddr ADDRESS ip daddr != NETWORK masquerade comment "KEY, net: NETWORK, if: IFNAME, id: CONTAINER"  }
//!     chain postrouting { type nat hook postrouting priority srcnat;
//!         ip daddr 224.0.0.0/4 return
//!         ip6 daddr ff00::/8 return
//!         goto masq_checks                                                                                        }}
//! ```
//! With excluded destinations, the rule has a further `ip daddr != EXCLUDED` for each, so it needs
//! no order, and Go's DEL removes it like any other.
//!
//! KEY is two hashes, of the network and of interface and container, joined by a dash: it
//! identifies the attachment. The rest of the comment is for people, and cut if it is too long.
//!
//! Go writes the rules of `postrouting` again at each ADD. This module does so only if they differ
//! from the above, for the reason given at [`Nft::has_base_chain`].

use cni::Cidr;
use cni::hash::sha512_hex;
use cni::text::cut;

use super::Wanted;
use super::iptables::multicast;
use crate::iptables::{IfMissing, words};
use crate::nft::expr::{Expr, Verdict, daddr, masked, nfproto, not, saddr};
use crate::nft::{self, BaseChain, Batch, Hook, Key, Kind, Listed, Nft, Rule, Search, Table, mentions};
use crate::owner::{AttachmentFilter, OwnerForm};
use cni::AttachmentId;
use cni_linux::error::Result;
use cni_linux::route::Family;

pub(crate) const TABLE: Table<'static> = Table { family: nft::Family::Inet, name: "cni_plugins_masquerade" };
const TABLE_COMMENT: &str = "Masquerading for plugins from github.com/containernetworking/plugins";
pub(crate) const CHECKS: &str = "masq_checks";
const CHECKS_COMMENT: &str = "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet";
const POSTROUTING: &str = "postrouting";
/// The base chain; 100 is the priority that `nft` calls `srcnat`.
const BASE: BaseChain = BaseChain { kind: Kind::Nat, hook: Hook::Postrouting, priority: 100 };
/// The longest comment that `nft` accepts.
const COMMENT_MAX: usize = 128;

/// The number of hex digits of a hash in a comment.
const HASH_DIGITS: usize = 16;

/// Returns the first hex digits of the text's SHA-512, as Go shortens names.
fn short_hash(text: &str) -> String {
    sha512_hex(&[text.as_bytes()], HASH_DIGITS)
}

/// The form of the owners of rules: the beginning of the comments.
const KEY: OwnerForm = OwnerForm { name: attachment_key, prefixes: |network| vec![network_key(network)] };

/// Returns the beginning of the comments of all rules of a network.
fn network_key(network: &str) -> String {
    format!("{}-", short_hash(network))
}

/// Returns the beginning of the comments of an attachment's rules.
pub(crate) fn attachment_key(attachment: &AttachmentId) -> String {
    let AttachmentId { network, container_id, ifname } = attachment;
    format!("{}{}", network_key(network), short_hash(&format!("{ifname}:{container_id}")))
}

/// Returns the comment of the attachment's rules, as Go writes it, cut to the length that `nft`
/// accepts.
fn comment(attachment: &AttachmentId) -> String {
    let unquoted = |text: &str| text.replace('"', "");
    let AttachmentId { network, container_id: container, ifname } = attachment;
    let key = attachment_key(attachment);
    let comment = format!("{key}, net: {}, if: {}, id: {}", unquoted(network), unquoted(ifname), unquoted(container));
    cut(&comment, COMMENT_MAX).to_owned()
}

/// Returns the [`attachment_key`] in a rule's comment.
pub(crate) fn key_of(comment: &str) -> &str {
    // Two hashes, each of `HASH_DIGITS`, and the dash.
    comment.get(..2 * HASH_DIGITS + 1).unwrap_or(comment)
}

/// Returns the rules of the attachment.
fn find(nft: &mut Nft, attachment: &AttachmentId, if_missing: IfMissing) -> Result<Vec<Listed>> {
    let Some(chain) = nft.find_chain(TABLE, CHECKS)? else { return Ok(Vec::new()) };
    let key = attachment_key(attachment);
    let search = Search {
        keys_of: |listed| vec![Key::comment(key_of(listed.rule.comment.as_deref().unwrap_or_default()))],
        appended: &[],
        wanted: &[Key::comment(&key)],
        if_missing,
    };
    let mut rules = nft.rules_with_keys(TABLE, &chain, search)?;
    rules.retain(|listed| listed.rule.comment.as_deref().is_some_and(|comment| key_of(comment) == key));
    Ok(rules)
}

/// Returns the rule `ip saddr ADDRESS ip daddr != NETWORK masquerade`, with a further `ip daddr !=`
/// for each of `exclude` that has the address's family.
fn masquerade_rule(address: Cidr, exclude: &[Cidr]) -> Vec<Expr> {
    let excluded = exclude.iter().filter(|excluded| excluded.is_ipv4() == address.is_ipv4());
    let is_outside = std::iter::once(&address.network())
        .chain(excluded)
        .flat_map(|network| not(masked(daddr(network.address()), network.prefix())))
        .collect();
    [nfproto(address.address()), saddr(address.address()), is_outside, vec![Expr::Masquerade]].concat()
}

/// Returns the rules of the base chain: multicast packets of either family return, all others go to
/// [`CHECKS`].
fn base_rules() -> [Vec<Expr>; 3] {
    let return_multicast = |family| {
        let (network, prefix) = multicast(family);
        [nfproto(network), masked(daddr(network), prefix), vec![Expr::Verdict(Verdict::Return)]].concat()
    };
    let goto_checks = vec![Expr::Verdict(Verdict::Goto(CHECKS.into()))];
    [return_multicast(Family::V4), return_multicast(Family::V6), goto_checks]
}

/// Adds to `batch` the changes after which the attachment has exactly the wanted rules.
pub(super) fn ensure(nft: &mut Nft, batch: &mut Batch, wanted: &Wanted<'_>) -> Result<()> {
    if !has_shared_chains(nft)? {
        add_shared_chains(batch);
    }
    let mut missing = wanted.addresses.clone();
    for listed in find(nft, wanted.attachment, IfMissing::TrustIndex)? {
        match missing.iter().position(|address| is_rule_of(&listed, *address, &wanted.exclude)) {
            Some(position) => drop(missing.remove(position)),
            None => batch.delete_rule(TABLE, CHECKS, listed.handle),
        }
    }
    for address in missing {
        let rule = Rule::new(masquerade_rule(address, &wanted.exclude)).with_comment(comment(wanted.attachment));
        batch.append_rule(TABLE, CHECKS, &rule);
    }
    Ok(())
}

/// Whether the rule masquerades packets from `address`, except to `exclude`. Compared as text, as
/// in [`has_shared_chains`].
fn is_rule_of(listed: &Listed, address: Cidr, exclude: &[Cidr]) -> bool {
    let family = Family::of(address.address());
    words(family, &listed.rule.exprs) == words(family, &masquerade_rule(address, exclude))
}

/// Adds to `batch` the creation of the table and the two chains, unless they exist, and the
/// replacement of the base chain's rules.
fn add_shared_chains(batch: &mut Batch) {
    batch.ensure_table(TABLE, Some(TABLE_COMMENT));
    batch.ensure_chain(TABLE, CHECKS, Some(CHECKS_COMMENT));
    batch.ensure_base_chain(TABLE, POSTROUTING, BASE);
    batch.replace_rules(TABLE, POSTROUTING, base_rules());
}

/// Whether the base chain exists and has the [`base_rules`], written by these plugins or by Go. If
/// so, [`CHECKS`] exists too, because one of the rules leads to it.
fn has_shared_chains(nft: &mut Nft) -> Result<bool> {
    if !nft.has_base_chain(TABLE, POSTROUTING, BASE)? {
        return Ok(false);
    }
    // Compared as text: releases of nft write the same prefix match with different expressions.
    // `words` reads a rule as one of a given family. This chain has rules of both, so each rule is
    // read twice.
    let as_text = |exprs: &[Expr]| [Family::V4, Family::V6].map(|family| words(family, exprs));
    let rules = nft.rules(TABLE, POSTROUTING)?;
    let existing = rules.iter().map(|listed| as_text(&listed.rule.exprs));
    let wanted = base_rules();
    Ok(existing.eq(wanted.iter().map(|exprs| as_text(exprs))))
}

/// Adds to `batch` the removal of the selected attachments' rules. Table and chains stay, as with
/// Go.
pub(super) fn purge(nft: &mut Nft, batch: &mut Batch, filter: AttachmentFilter<'_>) -> Result<()> {
    let rules = match filter {
        AttachmentFilter::One { attachment, .. } => find(nft, attachment, IfMissing::ReadAll)?,
        AttachmentFilter::Garbage { network, .. } => {
            let (is_selected, beginning) = (filter.selector(KEY), network_key(network));
            let mut rules = nft.rules_where(TABLE, CHECKS, |rule| mentions(rule, &beginning))?;
            rules.retain(|listed| listed.rule.comment.as_deref().is_some_and(|comment| is_selected(key_of(comment))));
            rules
        }
    };
    for listed in rules {
        batch.delete_rule(TABLE, CHECKS, listed.handle);
    }
    Ok(())
}

/// Returns a sentence for each wanted rule that is missing or differs; empty if none. On a kernel
/// without nf_tables, all rules are missing.
pub(super) fn check(nft: &mut Nft, wanted: &Wanted<'_>) -> Result<Vec<String>> {
    let leads_to_checks = has_shared_chains(nft)?;
    let rules = find(nft, wanted.attachment, IfMissing::ReadAll)?;
    let mut missing = Vec::new();
    for address in &wanted.addresses {
        if !rules.iter().any(|listed| is_rule_of(listed, *address, &wanted.exclude)) {
            let outside: Vec<String> =
                std::iter::once(&address.network()).chain(&wanted.exclude).map(ToString::to_string).collect();
            missing.push(format!(
                "nft chain {TABLE} {CHECKS} has no rule that masquerades packets from {} to addresses outside {}",
                address.address(),
                outside.join(", ")
            ));
        }
    }
    // If rules are missing, their sentences are enough.
    if missing.is_empty() && !leads_to_checks {
        missing.push(format!("nft chain {TABLE} {POSTROUTING} does not lead to {CHECKS}"));
    }
    Ok(missing)
}

/// Checks that [`ensure`] can work here; fails with the reason if it cannot. Nothing changes.
pub(super) fn probe() -> Result<()> {
    let mut nft = Nft::open()?;
    if has_shared_chains(&mut nft)? {
        return Ok(());
    }
    let mut batch = Batch::new();
    add_shared_chains(&mut batch);
    nft.rehearse(batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_is_gos() {
        let expected = "6fd94d501e58f0aa-287fc69eff0574a2, net: unit-test, if: eth0, id: one";
        assert_eq!(comment(&AttachmentId::new("unit-test", "one", "eth0")), expected);
        let long = comment(&AttachmentId::new("n".repeat(200), "c", "eth0"));
        assert_eq!(long.len(), COMMENT_MAX);
        assert!(long.starts_with(&attachment_key(&AttachmentId::new("n".repeat(200), "c", "eth0"))));
    }
}
