//! Host ports with nf_tables: one transaction for each verb and both families, no process.
//!
//! The rules are those of `shape`. Whether something collides, or is there already, is found out by
//! reading, so the transaction of an ADD is valid only if no rule has changed since
//! ([`Batch::only_at`]); else all is read again. That needs no lock, and of many racing ADDs one
//! succeeds each time.
//!
//! A deleted rule makes the closing of the socket wait for an RCU grace period (some 10 ms), so an
//! ADD deletes only rules that conflict with it. The shared chains are never emptied or removed,
//! although Go's ADD refills some of them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni::Cidr;
use cni::machine::Machine;

use super::conditions;
use super::conflict::LivenessProbe;
use super::identity::{self, Identity, LinkMark};
use super::{ClaimedPort, EnsureOutcome, Forwarding, Policy, Removal, Snat, older_mapping};
use crate::nft::{Batch, Expr, Listed, Nft, Rule, decode, mentions, raced};
use cni::AttachmentId;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

mod check;
mod conflicts;
mod others;
mod previous;
mod program;
pub(crate) mod shape;
#[cfg(test)]
mod tests;

use others::Others;
pub use previous::PreviousRules;
use program::Written;
use shape::{ALL, CONTAINERS, ENTRIES, HOSTIP_HOSTPORTS, HOSTPORTS, MASQUERADING};

/// How often a change is planned again because another process changed a rule meanwhile. Of n
/// racing changes each loses at most n - 1 times.
const ATTEMPTS: usize = 1024;

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// Host ports in the tables `cni_hostport` of the namespace in which it was opened.
#[derive(Debug)]
pub struct NftPortMap {
    nft: Nft,
}

/// Why host ports could not be had.
#[derive(Debug)]
pub enum Refusal {
    /// The kernel's words; [`Error::is_unsupported`] if it has no nf_tables or no NAT there.
    Kernel(Error),
    /// Conditions that are not understood.
    Condition {
        /// The first token that is not.
        token: String,
        /// The program that refuses it, and the reason.
        why: String,
    },
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal::Kernel(error)
    }
}

/// How far an ADD has come.
#[derive(Clone, Copy)]
enum Stage<'w> {
    /// The shared chains are made, and the holders of the ports are found.
    Prepare,
    /// Everything; the program has written what it had to.
    Whole(&'w [Written]),
}

/// The rules of one family that are there.
struct State {
    family: Family,
    /// The chains that are missing.
    missing: Vec<&'static str>,
    /// The base chains without the way to [`ALL`], and [`ALL`] itself for each part it lacks.
    gaps: Vec<(&'static str, Vec<Expr>)>,
    /// The rules of containers that were asked for, chain by chain.
    rules: Vec<(&'static str, Vec<Listed>)>,
}

impl NftPortMap {
    /// Opens a connection in the calling thread's network namespace. [`Error::is_unsupported`] on a
    /// kernel without netfilter's netlink, where there is nothing to purge either.
    pub fn open() -> Result<NftPortMap> {
        Ok(NftPortMap { nft: Nft::open()? })
    }

    /// Puts `wanted` in force, in one transaction. What the attachment had before is replaced in
    /// the same one; if it is the same already, nothing happens. On failure everything is as it
    /// was, but for what all share.
    ///
    /// Conditions beyond those that [`conditions`] compiles go through the program `nft`, if there
    /// is one, and are followed by the transaction.
    ///
    /// # Errors
    /// [`Refusal`]
    pub fn ensure(
        &mut self,
        machine: &dyn Machine,
        wanted: &Forwarding,
    ) -> Result<EnsureOutcome<PreviousRules>, Refusal> {
        let mut written = Written::all(wanted)?;
        if !written.is_empty() {
            // The program needs the chains, and no port may be held.
            if let EnsureOutcome::Held(holder) = self.transact(wanted, Stage::Prepare)? {
                return Ok(EnsureOutcome::Held(holder));
            }
            self.write(machine, wanted, &mut written)?;
        }
        let ensured = self.transact(wanted, Stage::Whole(&written));
        if !matches!(ensured, Ok(EnsureOutcome::Done { .. })) {
            self.discard(&written)?;
        }
        Ok(ensured?)
    }

    fn transact(&mut self, wanted: &Forwarding, stage: Stage<'_>) -> Result<EnsureOutcome<PreviousRules>> {
        let mut judge = LivenessProbe::default();
        let witnessed = if judge.find_host_link(&wanted.attachment)?.is_some() { LinkMark::Yes } else { LinkMark::No };
        repeat(|| self.attempt(wanted, stage, witnessed, &mut judge))
    }

    fn attempt(
        &mut self,
        wanted: &Forwarding,
        stage: Stage<'_>,
        witnessed: LinkMark,
        judge: &mut LivenessProbe,
    ) -> Result<EnsureOutcome<PreviousRules>> {
        let identity = Identity::new(&wanted.attachment);
        let mut batch = Batch::new();
        batch.only_at(self.nft.wait_for_generation()?);
        let (mut previous, mut remarks) = (PreviousRules::default(), Vec::new());
        for (container, claims) in wanted.every_family() {
            let family = Family::of(container.address());
            let table = shape::table(family);
            // `None`: the program has written the mappings of this family.
            let compiled = conditions::compile(wanted.conditions(family), family).ok();
            // Where no port is mapped too: the CHECK of Go's plugin asks for the chains and the
            // masquerading.
            let state = self.state(container, wanted, &identity, &claims)?;
            state.complete(&mut batch);
            if wanted.policy == Policy::RefuseIfAlive {
                let others = Others { identity: &identity, container, claims: &claims, plain: compiled.as_deref() };
                let judged = others.judge(&state, wanted, judge)?;
                if let Some(holder) = judged.held {
                    return Ok(EnsureOutcome::Held(holder));
                }
                judged.displaced.iter().for_each(|(chain, handle)| batch.delete_rule(table, chain, *handle));
                remarks.extend(judged.remarks);
            }
            let written = match stage {
                Stage::Whole(written) => written.iter().find(|written| written.family == family),
                Stage::Prepare => continue,
            };
            if wanted.policy == Policy::RefuseIfAlive {
                let overlaps = |there: &ClaimedPort| claims.iter().any(|claim| claim.overlaps(there));
                let strays = state.strays(&identity, &wanted.addresses());
                remarks.extend(strays.iter().filter(|there| overlaps(there)).map(older_mapping));
            }
            let forward = |claim: &ClaimedPort| Some([compiled.clone()?, shape::forward(claim)].concat());
            let mut new: Vec<(&str, Vec<Vec<Expr>>)> = vec![
                (HOSTPORTS, claims.iter().filter_map(forward).collect()),
                (MASQUERADING, shape::masquerades(container.address(), wanted.snat)),
            ];
            for (chain, rules) in &state.rules {
                let mut own = identity.own(rules, &wanted.addresses(), shape::container);
                let written = written.filter(|_| *chain == HOSTPORTS);
                if let Some(written) = written {
                    own.retain(|listed| !written.has_added(listed));
                }
                previous.remember(family, chain, &own);
                if written.is_some_and(Written::is_in_place) {
                    continue;
                }
                let wanted_here = new.iter().find(|(name, _)| name == chain).map_or(&[][..], |(_, exprs)| exprs);
                if own.iter().map(|listed| &listed.rule.exprs).eq(wanted_here) {
                    new.retain(|(name, _)| name != chain);
                    continue;
                }
                for listed in own {
                    batch.delete_rule(table, chain, listed.handle);
                }
            }
            for (chain, exprs) in new.into_iter().flat_map(|(chain, rules)| rules.into_iter().map(move |r| (chain, r)))
            {
                batch.append_rule(table, chain, &identity.sign(Rule::new(exprs), witnessed));
            }
            for rule in written.iter().flat_map(|written| written.signs(&identity)) {
                batch.append_rule(table, HOSTPORTS, &rule);
            }
        }
        let changes = !batch.is_empty();
        match self.nft.commit(batch) {
            Err(error) if !raced(&error) => {
                // Either nothing has changed, or everything has and the answer was lost: the rules
                // show which.
                let Stage::Whole(written) = stage else { return Err(error) };
                let undone = [self.discard(written), self.put_back(wanted, &previous)];
                Error::join([Err(error)].into_iter().chain(undone).filter_map(Result::err))?;
            }
            done => done?,
        }
        Ok(EnsureOutcome::Done { previous: changes.then_some(previous), remarks })
    }

    /// Removes all rules of the attachment in both families, in one transaction, Go's too.
    /// `addresses` are the container's as far as they are known; they decide on rules that name the
    /// container alone, which without an address of their family all go. Nothing there, or a kernel
    /// without nf_tables: that is fine.
    pub fn purge(&mut self, attachment: &AttachmentId, addresses: &[IpAddr]) -> Removal {
        let identity = Identity::new(attachment);
        let is_known = |family: Family| addresses.iter().any(|address| Family::of(*address) == family);
        // A rule that names no attachment and leads elsewhere shows that the container has another
        // attachment. Then such rules stay in a family without a known address.
        let (mut families, mut has_another) = (FAMILIES, false);
        families.sort_by_key(|family| !is_known(*family));
        self.purge_where(&identity.comment, families, |family, rules| {
            let known = if is_known(family) || has_another { addresses } else { &[] };
            has_another |= !identity.strays(rules, known, shape::container).is_empty();
            identity.own(rules, known, shape::container)
        })
    }

    /// Removes every rule that names `network` and none of the valid attachments. Reports the
    /// mappings that name no network, which Go's plugin made, unless their container is one of the
    /// valid ones: their network is unknown.
    pub fn collect_garbage(&mut self, network: &str, valid: &[AttachmentId]) -> Removal {
        let valid: Vec<Identity> = valid.iter().map(Identity::new).collect();
        let mut left = BTreeSet::new();
        let mut removal = self.purge_where("", FAMILIES, |_, rules| {
            let is_garbage = |rule: &Rule| {
                identity::names_network(rule, network)
                    && !valid.iter().any(|identity| identity.owner(rule) == identity::Ownership::This)
            };
            let mut handles: Vec<u64> = Vec::new();
            for listed in rules.iter().filter(|listed| is_garbage(&listed.rule)) {
                handles.push(listed.handle);
                handles.extend(identity::handles(&listed.rule));
            }
            let spoken_for: Vec<u64> = rules.iter().flat_map(|listed| identity::handles(&listed.rule)).collect();
            for listed in rules.iter().filter(|listed| !spoken_for.contains(&listed.handle)) {
                let is_valid = |identity: &Identity| Some(&identity.comment) == listed.rule.comment.as_ref();
                if identity::names_no_network(&listed.rule)
                    && !valid.iter().any(is_valid)
                    && let Some((claim, _)) = shape::read(&listed.rule)
                {
                    let id = listed.rule.comment.as_deref().unwrap_or("(unknown)");
                    left.insert(format!("{claim} is mapped to {} of container {id} by a nftables rule that names no network: it was left, as it may be another network's", claim.container));
                }
            }
            rules.iter().filter(|listed| handles.contains(&listed.handle)).collect()
        });
        removal.remarks.extend(left);
        removal
    }

    /// Removes the selected ones of the rules in which `within` occurs. Where the kernel's answer
    /// is lost, they may be gone.
    fn purge_where(
        &mut self,
        within: &str,
        families: [Family; 2],
        mut select: impl FnMut(Family, &[Listed]) -> Vec<&Listed>,
    ) -> Removal {
        let mut claims = Vec::new();
        let purged = repeat(|| {
            claims.clear();
            let mut batch = Batch::new();
            batch.only_at(self.nft.wait_for_generation()?);
            for family in families {
                let table = shape::table(family);
                for chain in CONTAINERS {
                    let rules = self.nft.rules_commented(table, chain, within)?;
                    for listed in select(family, &rules) {
                        batch.delete_rule(table, chain, listed.handle);
                        claims.extend(shape::read(&listed.rule).map(|(claim, _)| claim));
                    }
                }
            }
            self.nft.commit(batch)
        });
        let outcome = match purged {
            Err(error) if error.is_unsupported() => Ok(()),
            done => done,
        };
        Removal { claims, remarks: Vec::new(), outcome }
    }

    /// Whether there is any rule of the attachment.
    pub fn holds(&mut self, attachment: &AttachmentId, addresses: &[IpAddr]) -> Result<bool> {
        let identity = Identity::new(attachment);
        for family in FAMILIES {
            for chain in CONTAINERS {
                let rules = match self.nft.rules_commented(shape::table(family), chain, &identity.comment) {
                    Err(error) if error.is_unsupported() => return Ok(false),
                    rules => rules?,
                };
                if !identity.own(&rules, addresses, shape::container).is_empty() {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Reads the shared chains, and of the containers' rules those of this container, those about a
    /// claimed port and those about this container's address.
    fn state(
        &mut self,
        container: Cidr,
        wanted: &Forwarding,
        identity: &Identity,
        claims: &[ClaimedPort],
    ) -> Result<State> {
        let (family, address) = (Family::of(container.address()), shape::octets(container.address()));
        let table = shape::table(family);
        let mut state = State { family, missing: Vec::new(), gaps: Vec::new(), rules: Vec::new() };
        for name in [HOSTPORTS, HOSTIP_HOSTPORTS, ALL] {
            if self.nft.find_chain(table, name)?.is_none() {
                state.missing.push(name);
            }
        }
        let mut bases = ENTRIES.to_vec();
        if wanted.snat != Snat::No {
            bases.push((MASQUERADING, shape::POSTROUTING));
        }
        for (name, base) in bases {
            match self.nft.find_chain(table, name)? {
                None => state.missing.push(name),
                Some(chain) if chain.base == Some(base) => {}
                Some(_) => {
                    let cause = Cause::text("it is there, but hooked in elsewhere than portmap needs it");
                    return Err(Error::new(format_args!("failed to use nft chain {table} {name}"), cause));
                }
            }
        }
        for (name, _) in ENTRIES {
            let entry = shape::entry();
            if state.missing.contains(&name) || !has(&self.nft.rules(table, name)?, &entry) {
                state.gaps.push((name, entry));
            }
        }
        let all = if state.missing.contains(&ALL) { Vec::new() } else { self.nft.rules(table, ALL)? };
        state.gaps.extend(shape::parts().into_iter().filter(|part| !has(&all, part)).map(|part| (ALL, part)));
        for name in CONTAINERS {
            if state.missing.contains(&name) {
                continue;
            }
            let rules = self.nft.rules_where(table, name, |rule| {
                decode::comment(rule) == identity.comment.as_bytes()
                    || shape::names_port(rule, claims)
                    || mentions(rule, &address)
            })?;
            state.rules.push((name, rules));
        }
        Ok(state)
    }
}

/// Repeats `once` while other processes change what it has read.
fn repeat<T>(mut once: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..ATTEMPTS {
        match once() {
            Err(error) if raced(&error) => {}
            done => return done,
        }
    }
    let cause = Cause::text(format!("the rules were changed under it {ATTEMPTS} times"));
    Err(Error::new("failed to change host ports with nftables", cause))
}

/// Whether these matches and this verdict are among the rules.
fn has(rules: &[Listed], exprs: &[Expr]) -> bool {
    rules.iter().any(|listed| listed.rule.exprs == exprs)
}

impl State {
    /// Adds what is missing of what all share.
    fn complete(&self, batch: &mut Batch) {
        let table = shape::table(self.family);
        if !self.missing.is_empty() {
            batch.ensure_table(table, Some(shape::TABLE_COMMENT));
        }
        for name in &self.missing {
            let base = ENTRIES.into_iter().chain([(MASQUERADING, shape::POSTROUTING)]).find(|(base, _)| base == name);
            match base {
                Some((_, base)) => batch.ensure_base_chain(table, name, base, None),
                None => batch.ensure_chain(table, name, None),
            }
        }
        for (chain, exprs) in &self.gaps {
            batch.append_rule(table, chain, &Rule::new(exprs.clone()));
        }
    }
}
