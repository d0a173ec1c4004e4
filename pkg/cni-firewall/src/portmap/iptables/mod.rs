//! Host ports with iptables, on nf_tables or the older one: at most two processes for each family
//! and attempt. A family of the container's in which no port is mapped gets a chain too, because
//! the CHECK of Go's plugin looks for it.
//!
//! The rules are those of `shape`; reading, writing, locking and repeating is
//! [`crate::iptables`]'s. What an attachment has is replaced only where it differs, so an ADD that
//! finds everything in place writes nothing.
//!
//! The container's chain must not be emptied: another interface of the container may have rules in
//! it, written by these plugins or by Go's. The shared chains are never removed; only duplicate
//! rules in them are.

use std::net::IpAddr;

use cni::Cidr;
use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::conflict::LivenessProbe;
use super::{ClaimedPort, EnsureOutcome, Forwarding, Holder, Policy, Removal, SetMark, Snat, older_mapping};
use crate::iptables::{Chains, Edit, FAMILIES, Iptables, Rule, Table, Variant};
use cni::AttachmentId;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

mod check;
mod conflicts;
mod others;
mod previous;
pub(crate) mod shape;
#[cfg(test)]
mod tests;

pub use conflicts::UnreadTables;
use others::displace;
pub use previous::PreviousRules;
use previous::is_own;
use shape::{DNAT, Jump, MASQ, SETMARK, SNAT, Section};

/// Host ports in the tables `nat` of the calling thread's network namespace.
#[derive(Debug)]
pub struct IptablesPortMap<'m> {
    iptables: Iptables<'m>,
}

impl<'m> IptablesPortMap<'m> {
    /// Opens a connection in the calling thread's network namespace. `notes` and `on_sigterm` are
    /// [`Iptables::open`]'s.
    pub fn open(machine: &'m dyn Machine, notes: Notes, on_sigterm: OnSigterm) -> Result<IptablesPortMap<'m>> {
        Ok(IptablesPortMap { iptables: Iptables::open(Table::Nat, machine, notes, on_sigterm)? })
    }

    /// The same on an iptables that is open already.
    pub fn new(iptables: Iptables<'m>) -> IptablesPortMap<'m> {
        IptablesPortMap { iptables }
    }

    /// Puts `wanted` in force: IPv4, then IPv6, each in one transaction where nothing has to go.
    /// Both are judged before either is changed. On failure the attachment has what it had before.
    ///
    /// # Errors
    /// What the program said, and what kept the former state from being put back.
    pub fn ensure(&mut self, wanted: &Forwarding) -> Result<EnsureOutcome<PreviousRules>> {
        let mut judge = LivenessProbe::default();
        let link = judge.find_host_link(&wanted.attachment)?;
        let mut families = Vec::new();
        for (container, _) in wanted.families() {
            let family = Family::of(container.address());
            families.push((family, self.variant(family)?));
        }
        let (mut previous, mut held) = (PreviousRules::default(), None);
        // The last plan of each family.
        let mut remarks: Vec<(Family, Vec<String>)> = Vec::new();
        let done = self.iptables.change_all(&families, |nat| {
            let family = nat.family();
            let Some((container, claims)) = wanted.families().find(|(c, _)| Family::of(c.address()) == family) else {
                return Ok(Some(Edit::new()));
            };
            let variant = families.iter().find(|(of, _)| *of == family).map_or(Variant::Nft, |(_, variant)| *variant);
            previous.remember(nat, variant, wanted)?;
            let plan = plan(nat, wanted, container, &claims, link.as_deref(), &mut judge)?;
            if plan.held.is_some() {
                held = plan.held;
                return Ok(None);
            }
            remarks.retain(|(of, _)| *of != family);
            remarks.push((family, plan.remarks));
            Ok(Some(plan.edit))
        });
        let (changed, done) = match done {
            Ok(changed) => (changed, Ok(())),
            Err((changed, error)) => (changed, Err(error)),
        };
        previous.keep(changed);
        // One family may have been changed before the other failed, or before another attachment
        // took a port of it.
        let restored = if done.is_err() || held.is_some() { self.put_back(wanted, &previous) } else { Ok(()) };
        match (done, restored, held) {
            (Err(error), Err(other), _) => Err(error.context(format_args!("{other}; and"))),
            (Err(error), ..) | (Ok(()), Err(error), _) => Err(error),
            (Ok(()), Ok(()), Some(holder)) => Ok(EnsureOutcome::Held(holder)),
            (Ok(()), Ok(()), None) => {
                let mut remarks: Vec<String> = remarks.into_iter().flat_map(|(_, remarks)| remarks).collect();
                if let Err(error) = self.ensure_empty_chains(wanted, link.as_deref(), &mut previous, &mut remarks) {
                    return Err(match self.put_back(wanted, &previous) {
                        Err(other) => error.context(format_args!("{other}; and")),
                        Ok(()) => error,
                    });
                }
                Ok(EnsureOutcome::Done { previous: (!previous.is_empty()).then_some(previous), remarks })
            }
        }
    }

    /// Makes the chain without a mapping, and the rule that leads to it, in each family in which
    /// the container has an address and no port is mapped: the CHECK of Go's plugin fails without
    /// them. They serve nothing else, so a host that lacks iptables for that family is only
    /// remarked on.
    ///
    /// # Errors
    /// SIGTERM or a deadline.
    fn ensure_empty_chains(
        &mut self,
        wanted: &Forwarding,
        link: Option<&str>,
        previous: &mut PreviousRules,
        remarks: &mut Vec<String>,
    ) -> Result<()> {
        for (container, _) in wanted.every_family().filter(|(_, claims)| claims.is_empty()) {
            let family = Family::of(container.address());
            let Some(variant) = self.iptables.variant_for_new_rules(family)? else { continue };
            let name = if family == Family::V4 { "iptables" } else { "ip6tables" };
            let mut judge = LivenessProbe::default();
            let (mut last, mut writes) = (Vec::new(), false);
            let done = self.iptables.change(family, variant, |nat| {
                previous.remember(nat, variant, wanted)?;
                let plan = plan(nat, wanted, container, &[], link, &mut judge)?;
                last = plan.remarks;
                writes |= !plan.edit.is_empty();
                Ok(plan.edit)
            });
            remarks.append(&mut last);
            if !writes {
                previous.forget(family);
            }
            match done {
                Err(error) if error.is_terminated() || error.is_deadline() => return Err(error),
                Err(error) => remarks.push(format!("the chain in {name}, which maps no port, was not made: {error}")),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// The variant in which new rules are made.
    fn variant(&mut self, family: Family) -> Result<Variant> {
        self.iptables.variant_for_new_rules(family)?.ok_or_else(|| {
            let name = if family == Family::V4 { "iptables-restore" } else { "ip6tables-restore" };
            Error::new(format_args!("failed to find {name}"), Cause::text("it is neither in PATH nor in /usr/sbin"))
        })
    }

    /// Removes all rules of the attachment, in both families and variants, Go's too.
    /// `addresses` are the container's as far as they are known; they decide on rules that name the
    /// container alone, which without an address of their family all go. No process where nothing
    /// is found by netlink and there is no legacy table.
    pub fn purge(&mut self, attachment: &AttachmentId, addresses: &[IpAddr]) -> Removal {
        let (chain, old) = (shape::chain(attachment), shape::snat_chain(attachment));
        self.everywhere(&[&chain, &old], |nat, edit| {
            let family = nat.family();
            let known: Vec<&IpAddr> = addresses.iter().filter(|address| Family::of(**address) == family).collect();
            let claims = plan_removal(nat, edit, &chain, |section, named| {
                let is_known = || known.is_empty() || section.address().is_none_or(|address| known.contains(&&address));
                belongs(section, named, attachment) && (section.alias().is_some() || is_known())
            })?;
            if let Some(there) = nat.chain(&old)?.cloned() {
                for rule in nat.rules(SNAT)?.iter().filter(|rule| rule.target() == Some(&old)) {
                    edit.delete(SNAT, rule);
                }
                edit.delete_chain(&old, &there);
            }
            Ok(claims)
        })
    }

    /// Removes the rules that name `network` and none of the valid attachments: those of these
    /// plugins by their marker, Go's by the comment of the jump, which names the container.
    pub fn collect_garbage(&mut self, network: &str, valid: &[AttachmentId]) -> Removal {
        let aliases: Vec<String> = valid.iter().map(AttachmentId::alias).collect();
        let prefix = AttachmentId::network_prefix(network);
        self.everywhere(&[DNAT], |nat, edit| {
            let mut claims = Vec::new();
            for chain in nat.chain_names(shape::PREFIX)? {
                claims.extend(plan_removal(nat, edit, &chain, |section, named| match section.alias() {
                    Some(alias) => alias.starts_with(&prefix) && !aliases.iter().any(|valid| valid == alias),
                    None => named.as_ref().is_some_and(|named| {
                        named.iter().all(|(of, id)| of == network && !valid.iter().any(|mark| mark.container_id == *id))
                    }),
                })?);
            }
            Ok(claims)
        })
    }

    /// Whether there is anything of the attachment.
    pub fn holds(&mut self, attachment: &AttachmentId) -> Result<bool> {
        let chain = shape::chain(attachment);
        for family in FAMILIES {
            for variant in self.iptables.variants_to_search(family, &[&chain])? {
                if variant == Variant::Nft || self.iptables.read(family, variant)?.has_chain(&chain)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn everywhere(
        &mut self,
        chains: &[&str],
        mut plan: impl FnMut(&mut Chains<'_>, &mut Edit) -> Result<Vec<ClaimedPort>>,
    ) -> Removal {
        let (mut claims, mut remarks, mut results) = (Vec::new(), Vec::new(), Vec::new());
        for family in FAMILIES {
            let variants = self.iptables.variants_to_search(family, chains).unwrap_or_else(|error| {
                results.push(Err(error));
                // Where iptables-legacy has no table this finds nothing and starts no program.
                vec![Variant::Legacy]
            });
            for variant in variants {
                match self.iptables.can_remove(family, variant) {
                    Ok(true) => {}
                    Ok(false) => {
                        let name = if family == Family::V4 { "iptables" } else { "ip6tables" };
                        remarks.push(format!(
                            "{name}-{variant} may have a table nat, and its programs are not there: if it has rules of this they stay"
                        ));
                        continue;
                    }
                    Err(error) => {
                        results.push(Err(error));
                        continue;
                    }
                }
                let mut found = Vec::new();
                results.push(self.iptables.change(family, variant, |nat| {
                    let mut edit = Edit::new();
                    found = plan(nat, &mut edit)?;
                    Ok(edit)
                }));
                claims.append(&mut found);
            }
        }
        Removal { claims, remarks, outcome: Error::join(results.into_iter().filter_map(Result::err)) }
    }
}

/// The networks and containers that the jumps to the chain of a section without a marker name;
/// `None` if they name none.
type Named = Option<Vec<(String, String)>>;

/// Whether a section is the attachment's, or could be.
fn belongs(section: &Section, named: &Named, attachment: &AttachmentId) -> bool {
    match section.alias() {
        Some(alias) => alias == attachment.alias(),
        // Without a separator in the key two containers can share a chain; a way that names another
        // is proof.
        None => named.as_ref().is_none_or(|named| {
            named.iter().any(|(network, id)| *network == attachment.network && *id == attachment.container_id)
        }),
    }
}

/// Adds to `edit` the removal of the sections chosen, of the ways that then lead to nothing, and of
/// the chain with the last of them. Returns what was claimed.
fn plan_removal(
    nat: &mut Chains<'_>,
    edit: &mut Edit,
    chain: &str,
    choose: impl Fn(&Section, &Named) -> bool,
) -> Result<Vec<ClaimedPort>> {
    let Some(there) = nat.chain(chain)?.cloned() else { return Ok(Vec::new()) };
    let jumps = nat.rules_leading_to(DNAT, chain)?;
    let comments = jumps.iter().filter_map(|rule| shape::read_comment(rule.comment()?));
    let named: Vec<(String, String)> = comments.map(|(network, id)| (network.to_owned(), id.to_owned())).collect();
    let named = Some(named).filter(|named| !named.is_empty());
    let sections = shape::sections(&there.rules);
    let (gone, left): (Vec<&Section>, Vec<&Section>) = sections.iter().partition(|section| choose(section, &named));
    let left: Vec<&Section> = left.into_iter().filter(|section| section.rules().next().is_some()).collect();
    if gone.is_empty() {
        return Ok(Vec::new());
    }
    let claims = gone.iter().flat_map(|section| section.claims()).collect();
    if left.is_empty() {
        for jump in &jumps {
            edit.delete(DNAT, jump);
        }
        edit.delete_chain(chain, &there);
        return Ok(claims);
    }
    let still: Vec<ClaimedPort> = left.iter().flat_map(|section| section.claims()).collect();
    // Rules without an owner are removed with the last of the others.
    for section in gone.iter().filter(|section| !section.is_silent()) {
        delete_section(edit, chain, section, &still);
    }
    for jump in jumps.iter().filter(|jump| !is_needed(jump, &still)) {
        edit.delete(DNAT, jump);
    }
    Ok(claims)
}

/// Removes a section, but for what marks connections to a port that is still mapped: Go makes that
/// once for all addresses, and iptables-legacy, which knows no handles, would remove the first rule
/// that looks like it.
fn delete_section(edit: &mut Edit, chain: &str, section: &Section, still: &[ClaimedPort]) {
    let is_mapped = |rule: &Rule| {
        let (protocol, port) = (rule.value("-p"), rule.value("--dport"));
        still.iter().any(|c| protocol == Some(c.protocol.name()) && port == Some(&c.host_port.to_string()))
    };
    for rule in section.rules().filter(|rule| rule.target() == Some("DNAT") || !is_mapped(rule)) {
        edit.delete(chain, rule);
    }
}

fn is_needed(jump: &Rule, claims: &[ClaimedPort]) -> bool {
    Jump::of(jump).is_some_and(|jump| claims.iter().any(|claim| jump.serves(claim)))
}

/// The changes for one family.
#[derive(Clone, Debug, Default)]
struct Plan {
    edit: Edit,
    remarks: Vec<String>,
    held: Option<Holder>,
}

fn plan(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    container: Cidr,
    claims: &[ClaimedPort],
    link: Option<&str>,
    judge: &mut LivenessProbe,
) -> Result<Plan> {
    let mut plan = Plan::default();
    let ways = ways(nat, wanted, claims)?;
    if wanted.policy == Policy::RefuseIfAlive {
        displace(nat, wanted, (container, claims), &ways, (judge, &mut plan))?;
        if plan.held.is_some() {
            return Ok(plan);
        }
    }
    shared(nat, wanted, &mut plan.edit)?;
    own(nat, wanted, (container, claims), &ways, link, &mut plan)?;
    Ok(plan)
}

/// The rules that all containers share, chain by chain.
fn shared_rules(wanted: &Forwarding) -> Vec<(&'static str, shape::RuleWords)> {
    let mut rules = Vec::new();
    if let (SetMark::Bit(bit), true) = (&wanted.set_mark, wanted.snat != Snat::No) {
        rules.push((SETMARK, shape::set_mark(*bit)));
        rules.push((MASQ, shape::masquerade(*bit)));
        rules.push(("POSTROUTING", shape::masq_entry()));
    }
    rules.push(("PREROUTING", shape::entry()));
    rules.push(("OUTPUT", shape::entry()));
    rules
}

/// Adds what is missing of what all share, and folds what is double.
fn shared(nat: &mut Chains<'_>, wanted: &Forwarding, edit: &mut Edit) -> Result<()> {
    let rules = shared_rules(wanted);
    for chain in [SETMARK, MASQ, DNAT] {
        let needed = chain == DNAT || rules.iter().any(|(name, _)| *name == chain);
        if needed && !nat.has_chain(chain)? {
            edit.create_chain(chain);
        }
    }
    for (chain, words) in rules {
        let mut same = nat.rules(chain)?.iter().filter(|rule| rule.matches(&words));
        if same.next().is_some() {
            for double in same {
                edit.delete(chain, double);
            }
        } else if chain == "POSTROUTING" {
            edit.insert(chain, words);
        } else {
            edit.append(chain, words);
        }
    }
    Ok(())
}

/// The container's own chain, and the ways to it.
fn own(
    nat: &mut Chains<'_>,
    wanted: &Forwarding,
    (container, claims): (Cidr, &[ClaimedPort]),
    ways: &[Rule],
    link: Option<&str>,
    plan: &mut Plan,
) -> Result<()> {
    let (mark, edit) = (&wanted.attachment, &mut plan.edit);
    let chain = shape::chain(mark);
    let mut new = vec![shape::marker(mark, link)];
    new.extend(claims.iter().flat_map(|claim| shape::forward(wanted, container, claim)));
    let there = nat.chain(&chain)?.cloned();
    let sections = shape::sections(there.as_ref().map_or(&[], |there| there.rules.as_slice()));
    let (own, others): (Vec<&Section>, Vec<&Section>) =
        sections.iter().filter(|section| section.rules().next().is_some()).partition(|section| is_own(section, wanted));
    let still: Vec<ClaimedPort> = others.iter().flat_map(|section| section.claims()).collect();
    let in_place = own.iter().flat_map(|section| section.rules()).count() == new.len()
        && own.iter().flat_map(|section| section.rules()).zip(&new).all(|(rule, words)| rule.matches(words));
    if !in_place {
        if others.is_empty() {
            edit.replace_chain(&chain);
        } else {
            own.iter().for_each(|section| delete_section(edit, &chain, section, &still));
        }
        for words in new {
            edit.append(&chain, words);
        }
    }
    let unmarked = others.iter().filter(|section| section.marker.is_none()).flat_map(|section| section.claims());
    let ahead =
        unmarked.filter(|there| wanted.policy == Policy::RefuseIfAlive && claims.iter().any(|c| c.overlaps(there)));
    plan.remarks.extend(ahead.map(|there| older_mapping(&there)));
    let conditions = wanted.conditions(Family::of(container.address()));
    let jumps: Vec<&Rule> = ways.iter().filter(|rule| rule.target() == Some(&chain)).collect();
    let mut kept: Vec<usize> = Vec::new();
    for words in shape::jumps(wanted, conditions) {
        // The kernel's form of conditions cannot be compared with the configured one, so they are
        // always written again.
        let same = jumps.iter().enumerate().position(|(at, jump)| jump.matches(&words) && !kept.contains(&at));
        match same.filter(|_| conditions.is_empty()) {
            Some(at) => kept.push(at),
            None => edit.append(DNAT, words),
        }
    }
    for (at, jump) in jumps.iter().enumerate() {
        if !kept.contains(&at) && !is_needed(jump, &still) {
            edit.delete(DNAT, jump);
        }
    }
    Ok(())
}

/// Returns the rules of [`DNAT`] that could be about a claimed port or lead to the attachment's own
/// chain.
fn ways(nat: &mut Chains<'_>, wanted: &Forwarding, claims: &[ClaimedPort]) -> Result<Vec<Rule>> {
    let ports: Vec<u16> = claims.iter().map(|claim| claim.host_port).collect();
    nat.rules_mentioning(DNAT, &ports, &shape::chain(&wanted.attachment))
}
