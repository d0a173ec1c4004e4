//! Maps host ports with nf_tables: each call makes one transaction for both families, and runs no
//! program.
//!
//! Exception: mappings with conditions that [`conditions`] does not compile (sets, connection
//! states, and the rest of nft's language) are written by the program `nft`. It cannot write tags,
//! so these rules look like Go's: see module `identity`. It runs after the transaction that has
//! written everything else. If another ADD maps the same port in between, both succeed.
//!
//! Module `shape` shows the rules. An ADD reads the existing rules (module `identity`), finds
//! conflicts in them and plans its transaction. The kernel accepts the transaction only if no rule
//! has changed since, so no lock is needed: of several racing ADDs, one succeeds each time.
//!
//! After a transaction that deletes a rule, closing the socket waits for an RCU grace period of the
//! kernel (some 10 ms), so an ADD deletes only rules that are outdated or conflict with it. The
//! shared chains are never flushed or removed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use cni::machine::{Child, Exit, Machine, OnSigterm};

use super::conditions;
use super::conflict::{ConflictSearch, Holder, SearchedTables};
use super::{ClaimedPort, FamilyRequest, Forwarding, Policy, Refusal, Snat};
use crate::engine::{self, Store};
use crate::iptables::FAMILIES;
use crate::nft::{Batch, Expr, Key, Nft, Rule};
use crate::owner::{ALIAS, AttachmentFilter, OwnerTag, Untagged};
use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni::steps::hex;
use cni_linux::error::Result;
use cni_linux::program;
use cni_linux::route::Family;

mod check;
pub(crate) mod identity;
pub(crate) mod shape;
#[cfg(test)]
mod tests;

pub(super) use check::check;
use identity::{ContainerRule, HASHES, Identity, Ownership, read_rules, read_rules_where, rules_naming_container};
use shape::{CONTAINER_CHAINS, HOSTPORTS, MASQUERADING, Shared};

/// How long the program `nft` may run.
const PROGRAM_LIMIT: Duration = Duration::from_secs(20);

/// What an ADD wants in one family, and what exists there.
struct FamilyState<'w> {
    request: FamilyRequest<'w>,
    shared: Shared,
    /// The rules of containers that were read.
    rules: Vec<ContainerRule>,
}

/// Replaces the attachment's rules, and removes those of dead containers that conflict with them,
/// in one transaction. If a living container has a wanted port, fails and changes nothing. Mappings
/// whose conditions [`conditions`] does not compile are written afterwards by the program `nft`.
/// Sets `changed` to true if rules may have been changed, even on an error.
pub(super) fn ensure(store: &Store<'_>, search: &mut ConflictSearch<'_>, changed: &mut bool) -> Result<(), Refusal> {
    let wanted = search.wanted;
    let program_mappings = ProgramMappings::uncompiled(wanted)?;
    let identity = Identity::new(&wanted.attachment);
    let host_link = search.find_host_link(&wanted.attachment)?;
    // The chains to which `plan` appends rules, in a family with a mapped port. In another family
    // their indexes are trusted too: otherwise each ADD would read the whole chain.
    let extended: &[&str] = if wanted.snat == Snat::No { &[HOSTPORTS] } else { &[HOSTPORTS, MASQUERADING] };
    let plan = |nft: &mut Nft, batch: &mut Batch| {
        search.begin(SearchedTables::Written);
        // A family in which no port is mapped needs the chains and the masquerading too: Go's CHECK
        // looks for them.
        for request in wanted.families_with_address() {
            // The rules of the container, those for its ports, and those that lead to its address.
            let mut keys = vec![Key::comment(&identity.comment), Key::address(request.container.address())];
            keys.extend(request.claims.iter().map(|claim| Key::port(claim.host_port)));
            let state = FamilyState::read(nft, request, &keys, extended)?;
            if wanted.policy == Policy::RefuseIfAlive {
                delete_rules(batch, dead_rules_among(&state.rules, &state.request, &identity, search)?);
            }
            search.remark_older_mappings(mappings_to_other_addresses(&state.rules, &identity, &wanted.addresses()));
            state.shared.add_missing(batch);
            state.add_own_rules(batch, &identity, host_link.as_deref());
        }
        Ok(())
    };
    store.ensure_in_nftables(plan, changed)?;
    for mappings in &program_mappings {
        *changed = true;
        mappings.run(store.machine)?;
    }
    Ok(())
}

/// Searches the tables of nftables for an ADD that makes no rules in them. Removes the rules of
/// dead containers that lead to the container's addresses.
///
/// # Errors
/// - A living container has a wanted port.
/// - The rules cannot be read. A failure to remove rules is only a remark.
pub(super) fn search_other_tables(search: &mut ConflictSearch<'_>) -> Result<()> {
    let mut nft = Nft::open()?;
    let identity = Identity::new(&search.wanted.attachment);
    let mut plan = |nft: &mut Nft, batch: &mut Batch| -> Result<()> {
        search.begin(SearchedTables::Other("nftables".to_owned()));
        for request in search.wanted.families_with_address() {
            let rules = identity::read_conflicting(nft, &request)?;
            delete_rules(batch, dead_rules_among(&rules, &request, &identity, search)?);
        }
        Ok(())
    };
    // The first plan only shows whether there is anything to remove, and mostly there is not. No
    // transaction proves that the lists did not change while this plan read them, so each list is
    // read until two readings agree. `change` plans again, and commits.
    let mut removals = Batch::new();
    plan(&mut nft, &mut removals)?;
    let removal = if removals.is_empty() { Ok(()) } else { engine::change(&mut nft, plan) };
    search.finish(removal)
}

/// Adds the removal of these rules to the batch.
fn delete_rules<'r>(batch: &mut Batch, rules: impl IntoIterator<Item = &'r ContainerRule>) {
    for ContainerRule { family, chain, listed } in rules {
        batch.delete_rule(shape::table(*family), chain, listed.handle);
    }
}

/// Returns the rules of dead containers that must be removed: mappings that conflict with the ADD
/// and, with those that lead to its container's address, the masquerading rules for this address.
///
/// # Errors
/// Those of [`ConflictSearch::decide_removal`].
fn dead_rules_among<'r>(
    rules: &'r [ContainerRule],
    request: &FamilyRequest<'_>,
    identity: &Identity,
    search: &mut ConflictSearch<'_>,
) -> Result<Vec<&'r ContainerRule>> {
    // Conditions that do not compile, for example those in the syntax of iptables, count as
    // different from those of every rule.
    let conditions = conditions::compile(request.conditions(), request.family).ok();
    let mut dead_rules: Vec<&ContainerRule> = Vec::new();
    for found in rules.iter().filter(|found| found.chain != MASQUERADING) {
        let rule = &found.listed.rule;
        let Some((claim, condition_count)) = shape::read_mapping(rule) else { continue };
        // Two attachments of one container do not conflict.
        let is_of_this_container = rule.comment.as_deref() == Some(&identity.comment);
        if is_of_this_container || !search.conflicts_with(&claim) {
            continue;
        }
        let attachment = OwnerTag::of(rule).alias().and_then(AttachmentId::parse);
        let holder = Holder {
            container: rule.comment.clone().unwrap_or_else(|| "(unknown)".to_owned()),
            network: attachment.as_ref().map(|marked| marked.network.clone()),
            attachment,
            had_link: identity::had_link(rule),
            conditions_differ: conditions.as_ref().is_none_or(|wanted| rule.exprs[..condition_count] != *wanted),
            claim,
        };
        if search.decide_removal(holder)? {
            dead_rules.push(found);
        }
    }
    let address = Some(request.container.address());
    // Until now `dead_rules` has only mappings.
    let dead_mappings = dead_rules.iter().copied().map(|found| &found.listed.rule);
    let dead_to_address: Vec<&Rule> = dead_mappings.filter(|rule| shape::container(rule) == address).collect();
    for found in rules.iter().filter(|found| found.chain == MASQUERADING) {
        // The masquerading rules of a container have the comment and the tags of its mappings.
        let rule = &found.listed.rule;
        let is_of_dead = dead_to_address.iter().any(|dead| dead.comment == rule.comment && dead.tags == rule.tags);
        if is_of_dead && shape::container(rule) == address {
            dead_rules.push(found);
        }
    }
    Ok(dead_rules)
}

/// Returns the mappings that name only this container and lead to none of `addresses`.
fn mappings_to_other_addresses(rules: &[ContainerRule], identity: &Identity, addresses: &[IpAddr]) -> Vec<ClaimedPort> {
    let others = rules.iter().filter(|found| identity.leads_elsewhere(&found.listed.rule, addresses));
    others.filter_map(ContainerRule::claim).collect()
}

impl<'w> FamilyState<'w> {
    /// Reads what exists for the request: of the rules of containers, those that [`read_rules`]
    /// returns for `keys` and `extended`.
    fn read(nft: &mut Nft, request: FamilyRequest<'w>, keys: &[Key], extended: &[&str]) -> Result<FamilyState<'w>> {
        let shared = Shared::read(nft, request.family, request.wanted.snat)?;
        let rules = read_rules(nft, request.family, &shared.chains, keys, extended)?;
        Ok(FamilyState { request, shared, rules })
    }

    /// Adds the attachment's own rules of the family: in each chain whose existing rules differ
    /// from the wanted ones, deletes the existing and appends the wanted ones. If the conditions
    /// do not compile, the program `nft` writes the mappings afterwards. `host_link` is the link on
    /// the host that has the attachment's alias.
    fn add_own_rules(&self, batch: &mut Batch, identity: &Identity, host_link: Option<&str>) {
        let FamilyRequest { wanted, family, container, .. } = &self.request;
        let (table, addresses) = (shape::table(*family), wanted.addresses());
        for chain in CONTAINER_CHAINS {
            let of_chain = self.rules.iter().filter(|found| found.chain == chain);
            let own: Vec<&ContainerRule> =
                of_chain.filter(|found| identity.owns(&found.listed.rule, &addresses)).collect();
            let new_rules = match chain {
                HOSTPORTS => mapping_rules(&self.request),
                MASQUERADING => shape::masquerade_rules(container.address(), wanted.snat),
                // Only older releases of Go add rules to `HOSTIP_HOSTPORTS`.
                _ => Vec::new(),
            };
            if own.iter().map(|found| &found.listed.rule.exprs).eq(&new_rules) {
                continue;
            }
            for found in own {
                batch.delete_rule(table, chain, found.listed.handle);
            }
            for exprs in new_rules {
                batch.append_rule(table, chain, &identity.sign(Rule::new(exprs), host_link));
            }
        }
    }
}

/// Returns the rules that map the claims; none if the conditions do not compile.
fn mapping_rules(request: &FamilyRequest<'_>) -> Vec<Vec<Expr>> {
    let Ok(conditions) = conditions::compile(request.conditions(), request.family) else { return Vec::new() };
    request.claims.iter().map(|claim| [conditions.as_slice(), &shape::mapping_rule(claim)].concat()).collect()
}

/// Removes the rules of the selected attachments in both families, in one transaction. Adds the
/// claims of these rules to `claims` even if the removal fails: if only the kernel's answer was
/// lost, the rules are gone.
///
/// For one attachment, a rule that names only the container is removed if it leads to one of the
/// attachment's known addresses: those of the filter, and those in the rules that name the
/// attachment. If no address of the rule's family is known, the rule is removed in any case, as by
/// Go's plugin. Exceptions: the filter has [`Untagged::Covering`], or a rule of the other family
/// that names only the container leads to an unknown address, so there is another attachment.
///
/// For garbage, a rule that names only the container is removed if all rules that name a network
/// and have its container and address are garbage. Others stay, such as those of Go's plugin. If
/// the container of such a mapping has no valid attachment, a note says so.
pub(super) fn purge(store: &Store<'_>, filter: AttachmentFilter<'_>, claims: &mut BTreeSet<ClaimedPort>) -> Result<()> {
    // A set, because a repeated plan finds the same rules again.
    let mut remarks = BTreeSet::new();
    let result = store.purge_in_nftables(|nft, batch| {
        let rules = match filter {
            AttachmentFilter::One { attachment, untagged } => {
                let identity = Identity::new(attachment);
                let rules = rules_naming_container(nft, &identity)?;
                select_one(rules, &identity, untagged)
            }
            AttachmentFilter::Garbage { valid, .. } => {
                let mut rules = Vec::new();
                for family in FAMILIES {
                    rules.extend(read_rules_where(nft, family, |_| true)?);
                }
                select_garbage(rules, filter, valid, &mut remarks)
            }
        };
        delete_rules(batch, &rules);
        claims.extend(rules.iter().filter_map(ContainerRule::claim));
        Ok(())
    });
    for remark in remarks {
        store.notes.note(format_args!("portmap: {remark}"));
    }
    result
}

/// Returns the rules that [`purge`] removes for one attachment, of all rules that name its
/// container.
fn select_one(mut rules: Vec<ContainerRule>, identity: &Identity, untagged: Untagged<'_>) -> Vec<ContainerRule> {
    let mut known = untagged.addresses().to_vec();
    let named = rules.iter().map(|found| &found.listed.rule);
    known.extend(named.filter(|rule| identity.ownership_of(rule) == Ownership::This).filter_map(shape::container));
    // Whether a rule of this family that names only the container must lead to a known address.
    let is_limited = |family: Family| {
        untagged.addresses_in(family).is_some() || known.iter().any(|address| Family::of(*address) == family)
    };
    // A rule of such a family that leads to an unknown address shows that the container has another
    // attachment. Then the rules of the other family must lead to a known address too: they may
    // belong to that attachment.
    let has_other_attachment =
        rules.iter().any(|found| is_limited(found.family) && identity.leads_elsewhere(&found.listed.rule, &known));
    rules.retain(|found| {
        // Without addresses, `owns` compares only the container.
        let addresses: &[IpAddr] = if is_limited(found.family) || has_other_attachment { &known } else { &[] };
        identity.owns(&found.listed.rule, addresses)
    });
    rules
}

/// Returns the rules that [`purge`] removes as garbage, of all `rules`. `filter` selects the
/// attachments that are not `valid`. Adds a remark for each mapping that stays because no rule
/// shows its network, unless its container has a valid attachment.
fn select_garbage(
    mut rules: Vec<ContainerRule>,
    filter: AttachmentFilter<'_>,
    valid: &ValidAttachments,
    remarks: &mut BTreeSet<String>,
) -> Vec<ContainerRule> {
    let (by_alias, by_hashes) = (filter.selector(ALIAS), filter.selector(HASHES));
    // `None` for a rule that names no network.
    let is_garbage = |rule: &Rule| match OwnerTag::of(rule) {
        OwnerTag::Alias(alias) => Some(by_alias(&alias)),
        OwnerTag::Hashes(hashes) => Some(by_hashes(&hex(&hashes))),
        OwnerTag::Missing => None,
    };
    let container_and_address = |rule: &Rule| rule.comment.clone().zip(shape::container(rule));
    // The containers and addresses of the rules that name a network, and whether all of these are
    // garbage.
    let mut owners: BTreeMap<(String, IpAddr), bool> = BTreeMap::new();
    for ContainerRule { listed, .. } in &rules {
        if let Some(this_is_garbage) = is_garbage(&listed.rule)
            && let Some(key) = container_and_address(&listed.rule)
        {
            *owners.entry(key).or_insert(true) &= this_is_garbage;
        }
    }
    let valid_comments: BTreeSet<String> = valid.iter().map(|(id, _)| identity::comment(id)).collect();
    rules.retain(|found| {
        let rule = &found.listed.rule;
        if let Some(this_is_garbage) = is_garbage(rule) {
            return this_is_garbage;
        }
        // `None` if no rule that names a network has this container and address.
        let all_are_garbage = container_and_address(rule).and_then(|key| owners.get(&key).copied());
        if all_are_garbage.is_none()
            && !rule.comment.as_ref().is_some_and(|comment| valid_comments.contains(comment))
            && let Some(claim) = found.claim()
        {
            let (address, id) = (claim.container, rule.comment.as_deref().unwrap_or("(unknown)"));
            remarks.insert(format!(
                "{claim} is mapped to {address} of container {id} by a nftables rule that names no network: it was not \
                 removed, because it may belong to another network",
            ));
        }
        all_are_garbage == Some(true)
    });
    rules
}

/// Returns the text from which `nft` adds the mappings of one family, a line for each: `add rule ip
/// cni_hostport hostports CONDITIONS tcp dport 8080 dnat to 10.0.0.2:80 comment "ID"`.
fn program_text(family: Family, conditions: &[String], claims: &[ClaimedPort], comment: &str) -> String {
    let (table, ip) = (shape::table(family), if family == Family::V4 { "ip" } else { "ip6" });
    let mut text = String::new();
    for claim in claims {
        let host_ip = claim.host_ip.map(|host_ip| format!("{ip} daddr {host_ip} ")).unwrap_or_default();
        text.push_str(&format!(
            "add rule {table} {HOSTPORTS} {} {host_ip}{} dport {} dnat to {} comment \"{comment}\"\n",
            conditions.join(" "),
            claim.protocol,
            claim.host_port,
            claim.container,
        ));
    }
    text
}

/// The mappings of one family that the program writes.
struct ProgramMappings {
    /// The input of the program.
    text: String,
    /// The first token that [`conditions`] does not compile, for errors.
    token: String,
    program: PathBuf,
}

impl ProgramMappings {
    /// Returns the mappings that only the program can write: those of each family whose conditions
    /// [`conditions`] does not compile. Usually empty. Fails if there are some and `nft` is not
    /// installed.
    fn uncompiled(wanted: &Forwarding) -> Result<Vec<ProgramMappings>, Refusal> {
        let mut uncompiled = Vec::new();
        for request in wanted.families() {
            let (family, conditions) = (request.family, request.conditions());
            let Err(token) = conditions::compile(conditions, family) else { continue };
            let Some(program) = program::find(&program::folders(std::env::var_os("PATH")), "nft") else {
                let why = "portmap itself compiles only a part of nft's language, and the program nft, which knows all \
                           of it, is not installed";
                return Err(Refusal::Condition { token, why: why.to_owned() });
            };
            let text = program_text(family, conditions, &request.claims, &Identity::new(&wanted.attachment).comment);
            uncompiled.push(ProgramMappings { text, token, program });
        }
        Ok(uncompiled)
    }

    /// Runs `nft` with the text. If `nft` refuses the text, the error has the first line of its
    /// stderr.
    fn run(&self, machine: &dyn Machine) -> Result<(), Refusal> {
        let refusal = |why: String| Refusal::Condition { token: self.token.clone(), why };
        let child = Child {
            program: self.program.clone(),
            args: vec!["-f".into(), "-".into()],
            env: None,
            stdin: self.text.as_bytes(),
            timeout: PROGRAM_LIMIT,
            on_sigterm: OnSigterm::Kill,
        };
        let program = self.program.display();
        let output = machine.run(&child).map_err(|error| refusal(format!("{program}: {error}")))?;
        if output.status == Exit::Status(0) {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        let first_line = stderr.lines().next().unwrap_or_default();
        Err(refusal(format!("{program} -f -: {}: {first_line}", output.status)))
    }
}
