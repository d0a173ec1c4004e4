//! `macspoofchk`: frames that come out of a container pass only with the container's own MAC as
//! their source.
//!
//! The rules are in table `bridge nat`, which ebtables-nft uses too, in the form of the Go plugin.
//! `ID` is `<containerID>-<ifname>`:
//! ```text
//! chain PREROUTING { type filter hook prerouting priority -300; policy accept;
//!     iifname "<host veth>" jump cni-br-iface-ID comment "macspoofchk-ID"        }
//! chain cni-br-iface-ID { jump cni-br-iface-ID-mac comment "macspoofchk-ID"      }
//! chain cni-br-iface-ID-mac {
//!     ether saddr <container MAC> return comment "macspoofchk-ID"
//!     drop comment "macspoofchk-ID"                                              }
//! ```
//! This module finds the first rule, the *jump*, by its comment, as Go does, or by its target, and
//! the chains by their names, so it also finds duplicates and leftovers of Go.
//!
//! **Several attachments can have one ID**: the same container and interface in another network, or
//! container `a` with interface `eth0-x` and container `a-eth0` with interface `x`. So the jump has
//! a tag that names the attachment, and DEL of another attachment leaves the rules. An ADD replaces
//! the rules of its ID unless they guard another host interface that exists. That applies even to
//! rules with the attachment's own tag: the tag does not name the network namespace, so they may
//! belong to the container's interface in another namespace.
//!
//! **Long IDs.** Kernel limits are 255 bytes for a chain's name and 256 for comment and tags
//! together. `nft` accepts comments of at most 128 bytes, so Go's ADD fails for IDs over 116 bytes.
//! Up to 231 bytes, this module uses the same form (Go's DEL can remove the rules; `nft` lists
//! them, but cannot load that list again). Longer IDs are cut to 83 bytes, followed by `-` and 128
//! bits of the whole ID's SHA-512 in hex.

use std::collections::{BTreeMap, BTreeSet};

use super::engine;
use super::nft::expr::{ether_saddr, ether_saddr_of, iifname_of};
use super::nft::userdata::{self, comment_len, tag_len};
use super::nft::{
    BaseChain, Batch, Chain, Expr, Family, Hook, IfMissing, Kind, Listed, Nft, Rule, Search, Table, Verdict,
};
use super::owner::{NETWORK_HASH_LEN, OwnerTag, TAG_ALIAS, TAG_HASHES, network_hash};
use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::mac::Mac;
use cni_linux::netlink::Netlink;

mod identity;

pub(super) use identity::Id;
pub use identity::SpoofOwner;

pub(super) const TABLE: Table<'static> = Table { family: Family::Bridge, name: "nat" };
pub(super) const PREROUTING: &str = "PREROUTING";
/// The hook of [`PREROUTING`]; the priority is the kernel's `NF_BR_PRI_NAT_DST_BRIDGED`.
const BASE: BaseChain = BaseChain { kind: Kind::Filter, hook: Hook::Prerouting, priority: -300 };
const CHAIN_PREFIX: &str = "cni-br-iface-";
const MAC_SUFFIX: &str = "-mac";
pub(super) const COMMENT_PREFIX: &str = "macspoofchk-";

/// The advice in the message that the rules of an ID guard another interface that exists.
pub const RESOLVE_CONFLICT: &str = "run DEL for that attachment first, or use another interface name";

/// The longest ID whose comment leaves room for a [`TAG_HASHES`], here only of the network.
const PLAIN_ID_MAX: usize = userdata::MAX - comment_len(COMMENT_PREFIX) - tag_len(NETWORK_HASH_LEN);

/// A connection to nf_tables for the rules against forged source MACs, in one network namespace.
#[derive(Debug)]
pub struct SpoofCheck {
    nft: Nft,
}

/// Returns the rules of the chain `cni-br-iface-ID-mac`: frames from `mac` return, all others are
/// dropped.
fn mac_rules(mac: Mac) -> [Vec<Expr>; 2] {
    let mut return_own = ether_saddr(mac.0);
    return_own.push(Expr::Verdict(Verdict::Return));
    [return_own, vec![Expr::Verdict(Verdict::Drop)]]
}

/// Whether the listed rules have exactly these expressions, in this order.
fn have_exprs(rules: &[Listed], expected: &[Vec<Expr>]) -> bool {
    rules.iter().map(|listed| &listed.rule.exprs).eq(expected)
}

/// Returns the MAC that these rules let pass; `None` if they are not the [`mac_rules`] of any MAC.
fn accepted_mac(rules: &[Listed]) -> Option<Mac> {
    let mac = Mac(ether_saddr_of(&rules.first()?.rule.exprs)?);
    if have_exprs(rules, &mac_rules(mac)) { Some(mac) } else { None }
}

/// The rules of one ID in the kernel, with duplicates and leftovers.
struct IdRules {
    id: Id,
    /// The rules of PREROUTING that belong to the ID.
    jumps: Vec<Listed>,
    /// The ID's chains that exist.
    chains: Vec<Chain>,
}

impl IdRules {
    /// Reads the rules of an ID.
    fn find(nft: &mut Nft, id: &Id) -> Result<IdRules> {
        Ok(IdRules { id: id.clone(), jumps: find_jumps(nft, id)?, chains: find_chains(nft, id)? })
    }

    /// Reads the rules of an ID, but not PREROUTING, which can be long, if the ID has no chains: a
    /// jump exists only together with its target chain.
    fn find_by_chains(nft: &mut Nft, id: &Id) -> Result<IdRules> {
        let chains = find_chains(nft, id)?;
        let jumps = if chains.is_empty() { Vec::new() } else { find_jumps(nft, id)? };
        Ok(IdRules { id: id.clone(), jumps, chains })
    }

    /// Reads the rules of all IDs.
    fn list(nft: &mut Nft) -> Result<Vec<IdRules>> {
        let mut jumps: BTreeMap<Id, Vec<Listed>> = BTreeMap::new();
        for listed in nft.rules(TABLE, PREROUTING)? {
            for id in identity::ids_of(&listed.rule).collect::<BTreeSet<Id>>() {
                jumps.entry(id).or_default().push(listed.clone());
            }
        }
        let mut chains = BTreeMap::new();
        for chain in nft.chains(TABLE)? {
            let Some(name) = chain.name.strip_prefix(CHAIN_PREFIX) else { continue };
            // An ID whose chain has no jump is listed too. A name that ends in "-mac" is that of
            // the second chain of an ID, or of the first chain of an ID that itself ends in "-mac"
            // and that a jump names.
            if !jumps.contains_key(&Id(name.to_owned())) {
                jumps.entry(Id(name.strip_suffix(MAC_SUFFIX).unwrap_or(name).to_owned())).or_default();
            }
            chains.insert(chain.name.clone(), chain);
        }
        let chains_of =
            |id: &Id| [id.chain(), id.mac_chain()].iter().filter_map(|name| chains.get(name).cloned()).collect();
        Ok(jumps.into_iter().map(|(id, jumps)| IdRules { chains: chains_of(&id), id, jumps }).collect())
    }

    /// Adds the removal of the rules of these IDs to `batch`, each rule and chain once: two IDs can
    /// share a jump, which names one in its comment and leads to the chain of the other, or a
    /// chain, which is the second chain of `ID` and the first one of `ID-mac`.
    fn delete_all<'a>(ids: impl IntoIterator<Item = &'a IdRules>, batch: &mut Batch) {
        // The chains are ordered by the lengths of their names. A chain jumps only to the one with
        // its name and a suffix, which must be removed later: the kernel refuses to remove the
        // target of a jump.
        let (mut jump_handles, mut chains) = (BTreeSet::new(), BTreeSet::new());
        for rules in ids {
            jump_handles.extend(rules.jumps.iter().map(|listed| listed.handle));
            chains.extend(rules.chains.iter().map(|chain| (chain.name.len(), &chain.name, chain.handle)));
        }
        for handle in jump_handles {
            batch.delete_rule(TABLE, PREROUTING, handle);
        }
        for (_, name, handle) in chains {
            batch.delete_chain(TABLE, name, handle);
        }
    }

    /// Returns the owner of each jump.
    fn owners(&self) -> impl Iterator<Item = SpoofOwner> {
        self.jumps.iter().map(|Listed { rule, .. }| SpoofOwner {
            id: self.id.clone(),
            host_veth: iifname_of(&rule.exprs),
            tag: OwnerTag::of(rule),
        })
    }

    /// Returns the owner: that of the first jump with a tag.
    fn owner(&self) -> SpoofOwner {
        let without_jump = || SpoofOwner { id: self.id.clone(), host_veth: None, tag: OwnerTag::Missing };
        let owner = self.owners().reduce(|known, next| if known.tag == OwnerTag::Missing { next } else { known });
        owner.unwrap_or_else(without_jump)
    }

    /// Returns the owner of the first jump whose tag names a different attachment or network. Jumps
    /// without a tag are skipped.
    fn find_other_owner(&self, attachment: &AttachmentId) -> Option<SpoofOwner> {
        let network_hash = OwnerTag::Hashes(network_hash(&attachment.network));
        let compatible = [OwnerTag::Missing, OwnerTag::Alias(attachment.alias()), network_hash];
        self.owners().find(|owner| !compatible.contains(&owner.tag))
    }

    /// Returns the first owner whose host interface exists and is not `except`. An interface whose
    /// peer is gone counts as deleted: the kernel is deleting the pair.
    fn find_owner_with_link(&self, except: Option<&str>) -> Result<Option<SpoofOwner>> {
        for owner in self.owners() {
            let Some(name) = owner.host_veth.as_deref().filter(|name| Some(*name) != except) else { continue };
            // Opened only for an owner to check: mostly there is none.
            let netlink = Netlink::open()?;
            if let Some(link) = netlink.find_link(name)?
                && !netlink.peer_is_gone(&link)?
            {
                return Ok(Some(owner));
            }
        }
        Ok(None)
    }
}

/// Returns the rules of PREROUTING that belong to the ID.
fn find_jumps(nft: &mut Nft, id: &Id) -> Result<Vec<Listed>> {
    let Some(chain) = nft.find_chain(TABLE, PREROUTING)? else { return Ok(Vec::new()) };
    let search = Search { keys_of: identity::keys, appended: &[], wanted: &[id.key()], if_missing: IfMissing::ReadAll };
    let mut rules = nft.rules_with_keys(TABLE, &chain, search)?;
    rules.retain(|listed| id.owns(&listed.rule));
    Ok(rules)
}

/// Returns the ID's chains that exist.
fn find_chains(nft: &mut Nft, id: &Id) -> Result<Vec<Chain>> {
    let mut chains = Vec::new();
    for name in [id.chain(), id.mac_chain()] {
        chains.extend(nft.find_chain(TABLE, &name)?);
    }
    Ok(chains)
}

impl SpoofCheck {
    /// Opens a connection in the calling thread's network namespace.
    ///
    /// # Errors
    /// Those of [`Nft::open`].
    pub fn open() -> Result<SpoofCheck> {
        Ok(SpoofCheck { nft: Nft::open()? })
    }

    /// Checks that [`ensure`](SpoofCheck::ensure) can work here, and changes nothing. Takes about
    /// 0.1 ms if PREROUTING exists, else about 10 ms, for the kernel's check whether the chain can
    /// be created.
    ///
    /// # Errors
    /// The kernel refuses the check: [`Error::is_unsupported`] if it has no nf_tables for bridges.
    pub fn probe(&mut self) -> Result<()> {
        if self.nft.has_base_chain(TABLE, PREROUTING, BASE)? {
            return Ok(());
        }
        let mut batch = Batch::new();
        add_shared_chain(&mut batch);
        self.nft.rehearse(batch)
    }

    /// Writes the rules that let frames from `host_veth` pass only with the source `mac`. Existing
    /// rules of the ID are replaced in the same transaction, so no frame passes unchecked (before
    /// Linux 5.0 the removal is a transaction of its own). Takes about 0.3 ms if the ID has no
    /// rules yet, whatever the number of other rules.
    ///
    /// # Errors
    /// - [`Error::is_unsupported`]: the kernel has no nf_tables for bridges.
    /// - CNI error code 102: rules of this ID guard another interface that exists.
    /// - The kernel refuses the change for another reason.
    pub fn ensure(&mut self, attachment: &AttachmentId, host_veth: &str, mac: Mac) -> Result<()> {
        let id = Id::new(&attachment.container_id, &attachment.ifname);
        let jump = jump_rule(&id, attachment, host_veth)?;
        engine::change_by_handle(&mut self.nft, |nft, batch| {
            let existing = IdRules::find_by_chains(nft, &id)?;
            if let Some(owner) = existing.find_owner_with_link(Some(host_veth))? {
                let text = format!("they belong to {owner}, which exists: {RESOLVE_CONFLICT}");
                return Err(Error::new(format_args!("failed to create spoof rules {}", id.0), Cause::Held(text)));
            }
            IdRules::delete_all([&existing], batch);
            add_rules(nft, batch, &id, &jump, mac)
        })
    }

    /// Returns the owner of rules with the attachment's ID that guard an existing interface other
    /// than `host_veth`, and so make [`ensure`](SpoofCheck::ensure) fail. `None` if there are no
    /// such rules.
    pub fn find_conflicting_interface(
        &mut self,
        attachment: &AttachmentId,
        host_veth: &str,
    ) -> Result<Option<SpoofOwner>> {
        let id = Id::new(&attachment.container_id, &attachment.ifname);
        IdRules::find_by_chains(&mut self.nft, &id)?.find_owner_with_link(Some(host_veth))
    }

    /// Removes all rules of the attachment in one transaction, including Go's and those of an
    /// interrupted ADD. Returns `Ok(None)` if no rules of the attachment remain.
    ///
    /// If the rules belong to another attachment with the same ID, removes nothing, because that
    /// attachment still needs them, and returns their owner.
    ///
    /// Call this after the link is deleted: without the rules, the container's last frames would
    /// pass unchecked. Closing the connection waits for an RCU grace period, about 10 ms.
    pub fn purge(&mut self, attachment: &AttachmentId) -> Result<Option<SpoofOwner>> {
        self.purge_unless(attachment, |rules| {
            if let Some(other) = rules.find_other_owner(attachment) {
                return Some(other);
            }
            // If the interfaces cannot be read, the rules are removed, as Go always does.
            let owner_with_link = rules.find_owner_with_link(None).unwrap_or(None);
            // Go's rules have no tag. The interface of this attachment is already deleted, so an
            // existing interface that Go's rules guard belongs to another attachment.
            owner_with_link.filter(|owner| owner.tag == OwnerTag::Missing)
        })
    }

    /// Undoes an [`ensure`](SpoofCheck::ensure) for `host_veth`: removes all rules with the
    /// attachment's ID. If one of the jumps is for another attachment or interface, `ensure` did
    /// not write the rules, and all stay.
    pub fn undo(&mut self, attachment: &AttachmentId, host_veth: &str) -> Result<()> {
        let guards_other_veth =
            |owner: &SpoofOwner| owner.host_veth.as_deref().is_some_and(|guarded| guarded != host_veth);
        let find_other =
            |rules: &IdRules| rules.find_other_owner(attachment).or_else(|| rules.owners().find(guards_other_veth));
        self.purge_unless(attachment, find_other).map(drop)
    }

    /// Removes all rules with the attachment's ID and returns `Ok(None)`. If `find_other` returns
    /// another owner, removes nothing and returns that owner.
    fn purge_unless(
        &mut self,
        attachment: &AttachmentId,
        find_other: impl Fn(&IdRules) -> Option<SpoofOwner>,
    ) -> Result<Option<SpoofOwner>> {
        let id = Id::new(&attachment.container_id, &attachment.ifname);
        let mut other = None;
        engine::change_by_handle(&mut self.nft, |nft, batch| {
            // Not `find_by_chains`: a jump with this ID's comment can lead to the chain of another
            // ID.
            let rules = IdRules::find(nft, &id)?;
            other = find_other(&rules);
            if other.is_none() {
                IdRules::delete_all([&rules], batch);
            }
            Ok(())
        })?;
        Ok(other)
    }

    /// Removes the rules of the network's attachments that are not in `valid`. Rules of the Go
    /// plugin do not name their network: they are only removed if their interface does not exist.
    ///
    /// # Errors
    /// The rules or the interfaces cannot be read, or a rule or chain cannot be removed. If a chain
    /// is in use, the others are still removed.
    pub fn gc(&mut self, network: &str, valid: &ValidAttachments) -> Result<()> {
        let valid_ids: BTreeSet<Id> = valid.iter().map(|(id, ifname)| Id::new(id, ifname)).collect();
        engine::change_by_handle(&mut self.nft, |nft, batch| {
            let ids = IdRules::list(nft)?;
            if ids.is_empty() {
                return Ok(());
            }
            let links: BTreeSet<String> = Netlink::open()?.list_links()?.into_iter().map(|link| link.name).collect();
            let is_garbage = |rules: &&IdRules| rules.owner().is_garbage(network, &valid_ids, &links);
            IdRules::delete_all(ids.iter().filter(is_garbage), batch);
            Ok(())
        })
    }

    /// Returns a sentence for each chain or rule that is missing or differs from what
    /// [`ensure`](SpoofCheck::ensure) writes; empty if none. Accepts Go's rules, and duplicate
    /// jumps.
    pub fn check(&mut self, container_id: &str, ifname: &str, host_veth: &str, mac: Mac) -> Result<Vec<String>> {
        let id = Id::new(container_id, ifname);
        let mut differences = Vec::new();
        let jump = id.jump(host_veth)?;
        if !self.nft.has_base_chain(TABLE, PREROUTING, BASE)? {
            differences.push(format!(
                "nft chain {TABLE} {PREROUTING} is missing, or is not of type filter, hook prerouting, priority -300"
            ));
        }
        if !find_jumps(&mut self.nft, &id)?.iter().any(|listed| listed.rule.exprs == jump) {
            let chain = id.chain();
            differences.push(format!(
                "nft chain {TABLE} {PREROUTING} has no rule that sends frames from {host_veth} to {chain}"
            ));
        }
        // The name and the expected rules of each of the two chains.
        for (chain, expected) in [(id.chain(), &[id.jump_to_mac_chain()][..]), (id.mac_chain(), &mac_rules(mac)[..])] {
            let rules = self.nft.rules(TABLE, &chain)?;
            if have_exprs(&rules, expected) {
                continue;
            }
            differences.push(match accepted_mac(&rules) {
                Some(accepted) => format!(
                    "spoof rule pins MAC {accepted}, but {ifname} has MAC {mac}, set after the ADD of bridge: its frames are dropped"
                ),
                None => format!("nft chain {TABLE} {chain} is missing or has other rules than it should"),
            });
        }
        Ok(differences)
    }
}

/// Adds to `batch` all rules of the ID and, if necessary, the chain that all attachments share.
fn add_rules(nft: &mut Nft, batch: &mut Batch, id: &Id, jump: &Rule, mac: Mac) -> Result<()> {
    let commented = |exprs: Vec<Expr>| Rule::new(exprs).with_comment(id.comment());
    match nft.find_chain(TABLE, PREROUTING)? {
        Some(chain) if chain.base == Some(BASE) => nft.keep_index(TABLE, &chain, identity::keys)?,
        _ => add_shared_chain(batch),
    }
    // `create` fails if the chain exists: of two processes that write the rules of one ID, the
    // second fails here, plans again, and finds the rules of the first.
    batch.create_chain(TABLE, &id.chain());
    batch.create_chain(TABLE, &id.mac_chain());
    batch.append_rule(TABLE, PREROUTING, jump);
    batch.append_rule(TABLE, &id.chain(), &commented(id.jump_to_mac_chain()));
    for exprs in mac_rules(mac) {
        batch.append_rule(TABLE, &id.mac_chain(), &commented(exprs));
    }
    Ok(())
}

/// Adds to `batch` the creation of the table and of PREROUTING, unless they exist.
fn add_shared_chain(batch: &mut Batch) {
    batch.ensure_table(TABLE, None);
    batch.ensure_base_chain(TABLE, PREROUTING, BASE);
}

/// Returns the jump from PREROUTING to the ID's chain, with a tag that names the attachment, or
/// only its network if the alias is too long.
fn jump_rule(id: &Id, attachment: &AttachmentId, host_veth: &str) -> Result<Rule> {
    let rule = Rule::new(id.jump(host_veth)?).with_comment(id.comment());
    let alias = attachment.alias();
    if comment_len(&id.comment()) + tag_len(alias.len()) <= userdata::MAX {
        return Ok(rule.with_tag(TAG_ALIAS, alias));
    }
    Ok(rule.with_tag(TAG_HASHES, network_hash(&attachment.network)))
}

#[cfg(test)]
mod tests;
