//! Maps host ports with nf_tables: each call makes one transaction for both families, and runs no
//! program. Only mappings with conditions that [`conditions`] does not compile are written by the
//! program `nft` (module `program`).
//!
//! Module `shape` shows the rules. An ADD reads the existing rules, finds conflicts in them and
//! plans its transaction. The kernel accepts the transaction only if no rule has changed since
//! ([`Batch::only_at`]); otherwise the ADD reads and plans again. No lock is needed: of several
//! racing ADDs, one succeeds each time.
//!
//! After a transaction that deletes a rule, closing the socket waits for an RCU grace period of the
//! kernel (some 10 ms), so an ADD deletes only rules that are outdated or conflict with it. The
//! shared chains are never flushed or removed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use cni::Cidr;
use cni::cidr::octets;
use cni::machine::Machine;

use super::conditions;
use super::conflict::LivenessProbe;
use super::identity::{self, HostLink, Identity};
use super::{ClaimedPort, EnsureOutcome, Forwarding, Removal, Snat};
use crate::nft::{Batch, Chain, Expr, Key, Listed, Nft, Rule, Search, Table, decode, mentions};
use crate::owner::AttachmentFilter;
use crate::retry;
use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

mod check;
mod conflicts;
mod others;
mod plan;
mod program;
pub(crate) mod shape;
#[cfg(test)]
mod tests;

use others::ConflictSearch;
use plan::{FamilyRequest, Plan};
use program::ProgramMappings;
use shape::{CONTAINER_CHAINS, ENTRY_CHAINS, HOSTIP_HOSTPORTS, HOSTPORTS, HOSTPORTS_ALL, MASQUERADING};

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// A connection to nf_tables for the host ports of the network namespace it was opened in.
#[derive(Debug)]
pub struct NftPortMap {
    nft: Nft,
}

/// The reason why host ports could not be mapped.
#[derive(Debug)]
pub enum Refusal {
    /// The kernel's error; [`Error::is_unsupported`] if it has no nf_tables, or no NAT in it.
    Kernel(Error),
    /// Conditions that neither portmap nor the program `nft` understands.
    Condition {
        /// The first token that is not understood.
        token: String,
        /// The reason, or the error of the program `nft`.
        why: String,
    },
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal::Kernel(error)
    }
}

/// The existing chains and rules of one family, as far as an ADD needs them.
struct State {
    family: Family,
    /// The chains that exist and that [`find_missing`] looks for.
    chains: Vec<Chain>,
    /// The shared chains that do not exist.
    missing_chains: Vec<&'static str>,
    /// The shared rules that do not exist, each with its chain.
    missing_rules: Vec<(&'static str, Vec<Expr>)>,
    /// The rules of containers that were read, by chain.
    rules: Vec<(&'static str, Vec<Listed>)>,
}

impl NftPortMap {
    /// Opens a connection in the calling thread's network namespace.
    ///
    /// # Errors
    /// Those of [`Nft::open`].
    pub fn open() -> Result<NftPortMap> {
        Ok(NftPortMap { nft: Nft::open()? })
    }

    /// Replaces the attachment's rules with those of `wanted` in one transaction. If these are in
    /// place already, nothing is changed. On failure, and if a living container has a wanted port,
    /// shared chains may have been added, and rules of dead containers removed. Sets `changed` to
    /// true if the attachment's rules may have been changed, even on an error: the caller then owes
    /// a [`purge`](NftPortMap::purge) if its ADD fails.
    ///
    /// Mappings whose conditions [`conditions`] does not compile are written afterwards by the
    /// program `nft`.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn ensure(
        &mut self,
        machine: &dyn Machine,
        wanted: &Forwarding,
        changed: &mut bool,
    ) -> Result<EnsureOutcome, Refusal> {
        let program_mappings = ProgramMappings::uncompiled(wanted)?;
        let outcome = self.transact(wanted, changed)?;
        if matches!(outcome, EnsureOutcome::Done { .. }) {
            for mappings in &program_mappings {
                *changed = true;
                mappings.run(machine)?;
            }
        }
        Ok(outcome)
    }

    /// Plans and commits the transaction of an ADD, and repeats both if another process has changed
    /// a rule in between.
    fn transact(&mut self, wanted: &Forwarding, changed: &mut bool) -> Result<EnsureOutcome> {
        let mut probe = LivenessProbe::default();
        let host_link = match probe.find_host_link(&wanted.attachment)? {
            Some(_) => HostLink::Present,
            None => HostLink::Absent,
        };
        retry(|| {
            let (batch, outcome) = self.plan(wanted, host_link, &mut probe)?;
            let has_changes = !batch.is_empty();
            let result = self.nft.commit(batch);
            // After an error, the kernel may have written the rules: its answer can be lost.
            *changed |= has_changes;
            result.map(|()| outcome)
        })
    }

    /// Plans the transaction of an ADD, and its outcome. The transaction is empty if a living
    /// container has a wanted port.
    fn plan(
        &mut self,
        wanted: &Forwarding,
        host_link: HostLink,
        probe: &mut LivenessProbe,
    ) -> Result<(Batch, EnsureOutcome)> {
        let identity = Identity::new(&wanted.attachment);
        let mut plan = Plan { batch: Batch::new(), remarks: Vec::new() };
        plan.batch.only_at(self.nft.wait_for_generation()?);
        // A family in which no port is mapped needs the chains and the masquerading too: Go's CHECK
        // looks for them.
        for (container, claims) in wanted.families_with_address() {
            let request = FamilyRequest { wanted, identity: &identity, container, claims: &claims, host_link };
            if let Some(holder) = self.plan_family(&request, probe, &mut plan)? {
                return Ok((Batch::new(), EnsureOutcome::Held(holder)));
            }
        }
        let Plan { batch, remarks } = plan;
        Ok((batch, EnsureOutcome::Done { remarks }))
    }

    /// Removes the rules of the selected attachments in both families, in one transaction.
    ///
    /// For one attachment, a rule that names only the container is removed if it leads to one of
    /// the attachment's known addresses: those of the filter, and those in the attachment's
    /// masquerading rules. If no address of its family is known, it is removed in any case, as by
    /// Go's plugin, unless the filter has [`Untagged::Covering`](crate::owner::Untagged::Covering).
    ///
    /// For garbage, a mapping that names only the container is removed if a masquerading rule of a
    /// selected attachment has its container and address. Others stay, such as those of Go's
    /// plugin. If the container of such a mapping has no valid attachment, the result has a remark.
    pub fn purge(&mut self, filter: AttachmentFilter<'_>) -> Removal {
        match filter {
            AttachmentFilter::One { attachment, untagged } => {
                let identity = Identity::new(attachment);
                // The families with a known address come first: a rule in them that leads to
                // another address shows that the container has another attachment.
                let mut families = FAMILIES;
                families.sort_by_key(|family| untagged.addresses_in(*family).is_none());
                let (mut known, mut has_other_attachment) = (untagged.addresses().to_vec(), false);
                self.purge_where(Some(&identity.comment), families, |family, rules| {
                    let named = rules
                        .iter()
                        .map(|listed| &listed.rule)
                        .filter(|rule| identity.ownership_of(rule) == identity::Ownership::This);
                    known.extend(named.filter_map(shape::container));
                    let is_known = untagged.addresses_in(family).is_some()
                        || known.iter().any(|address| Family::of(*address) == family);
                    // Addresses of the other family select no rule that names only the container.
                    let addresses: &[IpAddr] = if is_known || has_other_attachment { &known } else { &[] };
                    let others = identity.rules_to_other_addresses(rules, addresses, shape::container);
                    has_other_attachment |= !others.is_empty();
                    identity.own_rules(rules, addresses, shape::container)
                })
            }
            AttachmentFilter::Garbage { network, valid } => self.purge_garbage(network, valid),
        }
    }

    /// Does [`purge`](NftPortMap::purge) for [`AttachmentFilter::Garbage`].
    fn purge_garbage(&mut self, network: &str, valid: &ValidAttachments) -> Removal {
        let mut valid_by_comment: BTreeMap<String, Vec<Identity>> = BTreeMap::new();
        for (container_id, ifname) in valid.iter() {
            let identity = Identity::new(&AttachmentId::new(network, container_id, ifname));
            valid_by_comment.entry(identity.comment.clone()).or_default().push(identity);
        }
        // A set, because a repeated attempt finds the same rules again.
        let mut remarks = BTreeSet::new();
        // The containers and addresses of the rules that name a network, and whether all of these
        // are garbage.
        let mut owners: BTreeMap<(String, IpAddr), bool> = BTreeMap::new();
        let mut removal = self.purge_where(None, FAMILIES, |_, rules| {
            let mut garbage = Vec::new();
            for listed @ Listed { rule, .. } in rules {
                let valid_of_container = rule.comment.as_ref().and_then(|comment| valid_by_comment.get(comment));
                let key = rule.comment.clone().zip(shape::container(rule));
                if identity::names_any_network(rule) {
                    let is_valid = valid_of_container.is_some_and(|valid| {
                        valid.iter().any(|identity| identity.ownership_of(rule) == identity::Ownership::This)
                    });
                    let is_garbage = identity::names_network(rule, network) && !is_valid;
                    garbage.extend(is_garbage.then_some(listed));
                    if let Some(key) = key {
                        owners.entry(key).and_modify(|all| *all &= is_garbage).or_insert(is_garbage);
                    }
                    continue;
                }
                match key.and_then(|key| owners.get(&key)) {
                    Some(is_garbage) => garbage.extend(is_garbage.then_some(listed)),
                    None if valid_of_container.is_none() => remarks.extend(unknown_network_remark(rule)),
                    None => {}
                }
            }
            garbage
        });
        removal.remarks.extend(remarks);
        removal
    }

    /// Removes the rules that `select` returns, in one transaction. `select` is called for each
    /// family, in the order of `families`, and each chain, [`MASQUERADING`] first, with the rules
    /// that have this comment, or with all rules if it is `None`; other rules can be among them.
    /// The result has the claims of the selected rules even if the removal fails: if only the
    /// kernel's answer was lost, the rules are gone.
    fn purge_where(
        &mut self,
        comment: Option<&str>,
        families: [Family; 2],
        mut select: impl FnMut(Family, &[Listed]) -> Vec<&Listed>,
    ) -> Removal {
        let mut claims = Vec::new();
        let outcome = retry(|| {
            claims.clear();
            let mut batch = Batch::new();
            batch.only_at(self.nft.wait_for_generation()?);
            for family in families {
                let table = shape::table(family);
                for chain in CONTAINER_CHAINS.into_iter().rev() {
                    let rules = match comment {
                        Some(comment) => rules_commented(&mut self.nft, table, chain, comment)?,
                        None => self.nft.rules(table, chain)?,
                    };
                    for listed in select(family, &rules) {
                        batch.delete_rule(table, chain, listed.handle);
                        claims.extend(shape::read_mapping(&listed.rule).map(|(claim, _)| claim));
                    }
                }
            }
            self.nft.commit(batch)
        });
        Removal { claims, remarks: Vec::new(), outcome }
    }

    /// Whether the attachment has any rule. A rule of Go's plugin names only the container: it
    /// counts if it leads to one of `addresses`, the attachment's known addresses, or if
    /// `addresses` is empty.
    pub fn holds(&mut self, attachment: &AttachmentId, addresses: &[IpAddr]) -> Result<bool> {
        let identity = Identity::new(attachment);
        self.nft.read_at_once("failed to look for host ports in nftables", |nft| {
            for family in FAMILIES {
                for chain in CONTAINER_CHAINS {
                    let rules = rules_commented(nft, shape::table(family), chain, &identity.comment)?;
                    if !identity.own_rules(&rules, addresses, shape::container).is_empty() {
                        return Ok(true);
                    }
                }
            }
            Ok(false)
        })
    }
}

/// Returns the rules of the chain with this comment; other rules can be among them.
fn rules_commented(nft: &mut Nft, table: Table<'_>, chain: &str, comment: &str) -> Result<Vec<Listed>> {
    if chain != HOSTIP_HOSTPORTS {
        let Some(chain) = nft.find_chain(table, chain)? else { return Ok(Vec::new()) };
        let wanted = [Key::comment(comment)];
        let search = Search { keys_of: shape::keys, appended: &[], wanted: &wanted, reads_all_if_missing: true };
        return nft.rules_with_keys(table, &chain, search);
    }
    nft.rules_commented(table, chain, comment)
}

/// Reads the state of one family: the missing shared chains and rules, this container's rules,
/// and those of other containers that contain a claimed port or this container's address. Fails
/// if a base chain exists with another type, hook or priority.
fn read_state(
    nft: &mut Nft,
    container: Cidr,
    wanted: &Forwarding,
    identity: &Identity,
    claims: &[ClaimedPort],
    reads_all_if_missing: bool,
) -> Result<State> {
    let address = octets(container.address());
    let mut state = State::new(Family::of(container.address()));
    find_missing(nft, &mut state, wanted.snat)?;
    let comment = Key::comment(&identity.comment);
    let mut keys = vec![comment, Key::address(container.address())];
    keys.extend(claims.iter().map(|claim| Key::port(claim.host_port)));
    for name in CONTAINER_CHAINS {
        if state.missing_chains.contains(&name) {
            continue;
        }
        if let Some(chain) = state.chains.iter().find(|chain| chain.name == name)
            && name != HOSTIP_HOSTPORTS
        {
            let search = Search { keys_of: shape::keys, appended: &[], wanted: &keys, reads_all_if_missing };
            let rules = nft.rules_with_keys(shape::table(state.family), chain, search)?;
            state.rules.push((name, rules));
            continue;
        }
        let rules = nft.rules_where(shape::table(state.family), name, |rule| {
            decode::comment(rule) == identity.comment.as_bytes()
                || shape::names_port(rule, claims)
                || mentions(rule, &address)
        })?;
        state.rules.push((name, rules));
    }
    Ok(state)
}

/// Adds to `state` the shared chains and rules that do not exist. Ignores [`MASQUERADING`] if
/// `snat` is [`Snat::No`].
fn find_missing(nft: &mut Nft, state: &mut State, snat: Snat) -> Result<()> {
    let table = shape::table(state.family);
    for name in [HOSTPORTS, HOSTIP_HOSTPORTS, HOSTPORTS_ALL] {
        match nft.find_chain(table, name)? {
            Some(chain) => state.chains.push(chain),
            None => state.missing_chains.push(name),
        }
    }
    let mut base_chains = ENTRY_CHAINS.to_vec();
    if snat != Snat::No {
        base_chains.push((MASQUERADING, shape::MASQUERADING_HOOK));
    }
    for (name, base) in base_chains {
        let Some(chain) = nft.find_chain(table, name)? else {
            state.missing_chains.push(name);
            continue;
        };
        if chain.base != Some(base) {
            let cause = Cause::text("the chain exists, but not with the type, hook and priority that portmap needs");
            return Err(Error::new(format_args!("failed to use nft chain {table} {name}"), cause));
        }
        state.chains.push(chain);
    }
    let [prerouting, output] = ENTRY_CHAINS.map(|(name, _)| (name, vec![shape::entry_rule()]));
    let hostports_all = (HOSTPORTS_ALL, shape::hostports_all_rules().to_vec());
    for (chain, wanted_rules) in [prerouting, output, hostports_all] {
        let is_missing = state.missing_chains.contains(&chain);
        let existing_rules = if is_missing { Vec::new() } else { nft.rules(table, chain)? };
        for rule in wanted_rules {
            if !contains_rule(&existing_rules, &rule) {
                state.missing_rules.push((chain, rule));
            }
        }
    }
    Ok(())
}

/// Returns the remark about a mapping that GC keeps because its rule names no network; `None` if
/// the rule is not a mapping.
fn unknown_network_remark(rule: &Rule) -> Option<String> {
    let (claim, _) = shape::read_mapping(rule)?;
    let id = rule.comment.as_deref().unwrap_or("(unknown)");
    Some(format!(
        "{claim} is mapped to {} of container {id} by a nftables rule that names no network: it was not removed, \
         because it may belong to another network",
        claim.container
    ))
}

/// Whether a rule with exactly these expressions is in the list.
fn contains_rule(rules: &[Listed], exprs: &[Expr]) -> bool {
    rules.iter().any(|listed| listed.rule.exprs == exprs)
}

impl State {
    /// Returns a state in which nothing has been read.
    fn new(family: Family) -> State {
        State { family, chains: Vec::new(), missing_chains: Vec::new(), missing_rules: Vec::new(), rules: Vec::new() }
    }

    /// Adds the missing shared chains and rules to a transaction.
    fn add_missing(&self, batch: &mut Batch) {
        let table = shape::table(self.family);
        if !self.missing_chains.is_empty() {
            batch.ensure_table(table, Some(shape::TABLE_COMMENT));
        }
        let [prerouting, output] = ENTRY_CHAINS;
        let base_chains = [prerouting, output, (MASQUERADING, shape::MASQUERADING_HOOK)];
        for name in &self.missing_chains {
            match base_chains.iter().find(|(base_name, _)| base_name == name) {
                Some((_, base)) => batch.ensure_base_chain(table, name, *base, None),
                None => batch.ensure_chain(table, name, None),
            }
        }
        for (chain, exprs) in &self.missing_rules {
            batch.append_rule(table, chain, &Rule::new(exprs.clone()));
        }
    }
}
