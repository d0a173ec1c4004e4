//! Masquerading in nf_tables, as Go has it:
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
//! KEY is two hashes, of the network and of interface and container, joined by a dash: it names the
//! attachment, so no further tag is needed. The rest of the comment is for people,
//! and cut where it is too long.
//!
//! Go fills `postrouting` again at each ADD. This module leaves it alone while it is as it should
//! be, for the reason given at [`Nft::has_base_chain`].

use std::cell::RefCell;

use cni::Cidr;
use cni::hash::sha512_hex;

use crate::iptables::words;
use crate::nft::expr::{Expr, Verdict, daddr, masked, nfproto, not, saddr};
use crate::nft::{self, BaseChain, Batch, Hook, Kind, Listed, Nft, Rule, Table};
use crate::retry;
use cni::AttachmentId;
use cni_linux::error::Result;
use cni_linux::route::Family;

pub(crate) const TABLE: Table<'static> = Table { family: nft::Family::Inet, name: "cni_plugins_masquerade" };
const TABLE_COMMENT: &str = "Masquerading for plugins from github.com/containernetworking/plugins";
pub(crate) const CHECKS: &str = "masq_checks";
const CHECKS_COMMENT: &str = "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet";
const POSTROUTING: &str = "postrouting";
/// `srcnat`
const BASE: BaseChain = BaseChain { kind: Kind::Nat, hook: Hook::Postrouting, priority: 100 };
/// The longest comment that `nft` accepts.
const COMMENT_MAX: usize = 128;

fn h16(text: &str) -> String {
    sha512_hex(&[text.as_bytes()], 16)
}

/// Returns the beginning of the comments of all rules of a network.
fn network_key(network: &str) -> String {
    format!("{}-", h16(network))
}

/// Returns the beginning of the comments of an attachment's rules.
pub(crate) fn key(network: &str, container: &str, ifname: &str) -> String {
    format!("{}{}", network_key(network), h16(&format!("{ifname}:{container}")))
}

fn comment(mark: &AttachmentId) -> String {
    let clean = |text: &str| text.replace('"', "");
    let AttachmentId { network, container_id: container, ifname } = mark;
    let key = key(network, container, ifname);
    let mut comment = format!("{key}, net: {}, if: {}, id: {}", clean(network), clean(ifname), clean(container));
    let mut end = COMMENT_MAX.min(comment.len());
    while !comment.is_char_boundary(end) {
        end -= 1;
    }
    comment.truncate(end);
    comment
}

fn is_of(listed: &Listed, key: &str) -> bool {
    listed.rule.comment.as_deref().is_some_and(|comment| comment.starts_with(key))
}

/// The expressions that `nft` puts before the first address of a rule in an inet table.
fn family(address: Cidr) -> Vec<Expr> {
    let number = if address.is_ipv4() { libc::NFPROTO_IPV4 } else { libc::NFPROTO_IPV6 };
    nfproto(u8::try_from(number).unwrap_or_default())
}

/// `ip saddr ADDRESS ip daddr != NETWORK masquerade`
fn rule(address: Cidr) -> Vec<Expr> {
    let network = address.network();
    let outside = not(masked(daddr(network.address()), network.prefix()));
    [family(address), saddr(address.address()), outside, vec![Expr::Masquerade]].concat()
}

/// The rules of the base chain.
fn base_rules() -> [Vec<Expr>; 3] {
    let multicast = |family| {
        let network = super::iptables::multicast(family);
        [
            self::family(network),
            masked(daddr(network.address()), network.prefix()),
            vec![Expr::Verdict(Verdict::Return)],
        ]
        .concat()
    };
    let checks = vec![Expr::Verdict(Verdict::Goto(CHECKS.into()))];
    [multicast(Family::V4), multicast(Family::V6), checks]
}

/// Makes the attachment's rules in one transaction, which replaces its earlier rules; those are
/// stored in `former`.
pub(super) fn ensure(mark: &AttachmentId, addresses: &[Cidr], former: &RefCell<Option<Vec<Listed>>>) -> Result<()> {
    let mut nft = Nft::open()?;
    let (key, comment) = (key(&mark.network, &mark.container_id, &mark.ifname), comment(mark));
    retry(|| {
        let mut batch = Batch::new();
        batch.only_at(nft.wait_for_generation()?);
        if !hooked_in(&mut nft)? {
            add_shared_chains(&mut batch);
        }
        let mut had = nft.rules_commented(TABLE, CHECKS, &key)?;
        // The kernel-side search also finds comments that only begin with the key.
        had.retain(|listed| is_of(listed, &key));
        for old in &had {
            batch.delete_rule(TABLE, CHECKS, old.handle);
        }
        former.replace(Some(had));
        for address in addresses {
            batch.append_rule(TABLE, CHECKS, &Rule::new(rule(*address)).with_comment(comment.as_str()));
        }
        nft.commit(batch)
    })
}

/// Table and chains, and the base chain's rules.
fn add_shared_chains(batch: &mut Batch) {
    batch.ensure_table(TABLE, Some(TABLE_COMMENT));
    batch.ensure_chain(TABLE, CHECKS, Some(CHECKS_COMMENT));
    batch.ensure_base_chain(TABLE, POSTROUTING, BASE, None);
    // In one transaction with its refilling, so that no packet sees it empty.
    batch.flush_chain(TABLE, POSTROUTING);
    for exprs in base_rules() {
        batch.append_rule(TABLE, POSTROUTING, &Rule::new(exprs));
    }
}

/// Whether the base chain exists and leads to the checks past multicast, also if Go's plugin wrote
/// it.
fn hooked_in(nft: &mut Nft) -> Result<bool> {
    if !nft.has_base_chain(TABLE, POSTROUTING, BASE)? {
        return Ok(false);
    }
    // In words: releases of nft differ in how they write a prefix.
    let in_words = |exprs: &[Expr]| [Family::V4, Family::V6].map(|family| words(family, exprs));
    let rules = nft.rules(TABLE, POSTROUTING)?;
    Ok(rules.iter().map(|listed| in_words(&listed.rule.exprs)).eq(base_rules().iter().map(|exprs| in_words(exprs))))
}

/// Removes the attachment's rules. Table and chains stay, as with Go.
pub(super) fn purge(nft: &mut Nft, mark: &AttachmentId) -> Result<()> {
    let key = key(&mark.network, &mark.container_id, &mark.ifname);
    remove(nft, &key, |_| true)
}

/// Undoes an [`ensure`] that found these rules: restores them, and removes all others of the
/// attachment.
pub(super) fn put_back(nft: &mut Nft, mark: &AttachmentId, had: &[Listed]) -> Result<()> {
    let key = key(&mark.network, &mark.container_id, &mark.ifname);
    retry(|| {
        let mut batch = Batch::new();
        batch.only_at(nft.wait_for_generation()?);
        let mut now = nft.rules_commented(TABLE, CHECKS, &key)?;
        now.retain(|listed| is_of(listed, &key));
        for new in now.iter().filter(|listed| had.iter().all(|old| old.handle != listed.handle)) {
            batch.delete_rule(TABLE, CHECKS, new.handle);
        }
        for old in had.iter().filter(|old| now.iter().all(|listed| listed.handle != old.handle)) {
            batch.put_back(TABLE, CHECKS, &old.raw, None);
        }
        nft.commit(batch)
    })
}

/// Removes the rules of the network that belong to no valid attachment.
pub(super) fn gc(nft: &mut Nft, network: &str, valid: &[(&str, &str)]) -> Result<()> {
    let all = network_key(network);
    let valid: Vec<String> = valid.iter().map(|(container, ifname)| key(network, container, ifname)).collect();
    remove(nft, &all, |listed| !valid.iter().any(|key| is_of(listed, key)))
}

/// Removes the rules whose comments begin with `key` and that are garbage.
fn remove(nft: &mut Nft, key: &str, is_garbage: impl Fn(&Listed) -> bool) -> Result<()> {
    retry(|| {
        let mut batch = Batch::new();
        batch.only_at(nft.wait_for_generation()?);
        let rules = nft.rules_commented(TABLE, CHECKS, key)?;
        for old in rules.iter().filter(|listed| is_of(listed, key) && is_garbage(listed)) {
            batch.delete_rule(TABLE, CHECKS, old.handle);
        }
        nft.commit(batch)
    })
}

/// Returns a sentence for each rule that is missing or differs. A kernel without nf_tables has none
/// of the rules.
pub(super) fn check(mark: &AttachmentId, addresses: &[Cidr]) -> Result<Vec<String>> {
    let key = key(&mark.network, &mark.container_id, &mark.ifname);
    let read = || {
        let mut nft = Nft::open()?;
        Ok((hooked_in(&mut nft)?, nft.rules_commented(TABLE, CHECKS, &key)?))
    };
    let (hooked_in, rules) = match read() {
        Err(error) if cni_linux::Error::is_unsupported(&error) => (false, Vec::new()),
        read => read?,
    };
    let mut missing = Vec::new();
    for address in addresses {
        let (family, wanted) = (Family::of(address.address()), rule(*address));
        let wanted = words(family, &wanted);
        if !rules.iter().any(|listed| is_of(listed, &key) && words(family, &listed.rule.exprs) == wanted) {
            missing.push(format!(
                "there is no rule that masquerades {} outside {}",
                address.address(),
                address.network()
            ));
        }
    }
    // A missing jump is reported only if all rules are there.
    if missing.is_empty() && !hooked_in {
        missing.push(format!("nft chain {TABLE} {POSTROUTING} does not lead to {CHECKS}"));
    }
    Ok(missing)
}

/// Whether rules could be made here.
pub(super) fn probe() -> Result<()> {
    let mut nft = Nft::open()?;
    if hooked_in(&mut nft)? {
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
        assert!(long.starts_with(&key(&"n".repeat(200), "c", "eth0")));
    }
}
