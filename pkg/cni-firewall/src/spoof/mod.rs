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

use super::nft::expr::{ether_saddr, ether_saddr_of};
use super::nft::userdata::{self, comment_len, tag_len};
use super::nft::{BaseChain, Batch, Expr, Family, Hook, Kind, Listed, Nft, Rule, Search, Table, Verdict, raced};
use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::mac::Mac;
use cni_linux::netlink::Netlink;

mod identity;

pub(super) use identity::Id;
pub use identity::SpoofOwner;
use identity::{JumpTag, network_hash};

pub(super) const TABLE: Table<'static> = Table { family: Family::Bridge, name: "nat" };
pub(super) const PREROUTING: &str = "PREROUTING";
/// The hook of [`PREROUTING`]; the priority is the kernel's `NF_BR_PRI_NAT_DST_BRIDGED`.
const BASE: BaseChain = BaseChain { kind: Kind::Filter, hook: Hook::Prerouting, priority: -300 };
const CHAIN_PREFIX: &str = "cni-br-iface-";
const MAC_SUFFIX: &str = "-mac";
pub(super) const COMMENT_PREFIX: &str = "macspoofchk-";

/// The type of the jump's tag with the attachment's alias ([`AttachmentId::alias`]).
pub(super) const TAG_ALIAS: u8 = 0x80;
/// The type of the tag used if the alias is too long: the first 8 bytes of the SHA-512 of the
/// network's name.
const TAG_NETWORK: u8 = 0x81;
const NETWORK_HASH_LEN: usize = 8;

/// The advice in the message that the rules of an ID guard another interface that exists.
pub const RESOLVE_CONFLICT: &str = "run DEL for that attachment first, or use another interface name";

/// The longest ID whose comment leaves room for a [`TAG_NETWORK`].
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

/// The maximum number of tries of a change that fails with [`is_conflict`].
const TRIES_MAX: usize = 32;

/// Whether a change may have failed because another process has created or deleted an object that
/// the change names, or has appended rules that the index of PREROUTING lacks.
fn is_conflict(error: &Error) -> bool {
    error.is_not_found() || error.is_exists() || raced(error)
}

/// A jump or a chain of an attachment in the kernel.
enum Object {
    Jump { handle: u64 },
    Chain { name: String, handle: u64 },
}

impl Object {
    /// Adds the object's removal to `batch`.
    fn add_removal(&self, batch: &mut Batch) {
        match self {
            Object::Jump { handle } => batch.delete_rule(TABLE, PREROUTING, *handle),
            Object::Chain { name, handle } => batch.delete_chain(TABLE, name, *handle),
        }
    }
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
        if self.has_shared_chain()? {
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
        let (jump, ids) = (jump_rule(&id, attachment, host_veth)?, BTreeSet::from([id.clone()]));
        self.retry(|spoof| {
            // PREROUTING, which can be long, need not be read if the ID has no chains: a jump
            // exists only together with its target chain.
            let mut existing = Vec::new();
            if !spoof.find_chains(&ids)?.is_empty() {
                let rules = spoof.jumps(&id)?;
                if let Some(owner) = find_owner_with_link(&id, &rules, Some(host_veth))? {
                    let text = format!("they belong to {owner}, which exists: {RESOLVE_CONFLICT}");
                    return Err(Error::new(format_args!("failed to create spoof rules {}", id.0), Cause::held(text)));
                }
                existing = spoof.find_objects(&ids, &rules)?;
            }
            match spoof.replace(&id, &jump, mac, &existing) {
                // Before Linux 5.0, a chain cannot be removed in the same transaction as the jump
                // to it. So the rules are removed first.
                Err(error) if error.errno() == Some(libc::EBUSY) => {
                    // The owner was checked above.
                    spoof.purge_ids(&ids, |_| None)?;
                    spoof.replace(&id, &jump, mac, &[])
                }
                result => result,
            }
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
        // A jump exists only together with its target chain.
        if self.find_chains(&BTreeSet::from([id.clone()]))?.is_empty() {
            return Ok(None);
        }
        find_owner_with_link(&id, &self.jumps(&id)?, Some(host_veth))
    }

    /// Calls `change`, which reads rules and changes them, and returns its result. If it fails with
    /// [`is_conflict`], calls it again, at most [`TRIES_MAX`] times in all. An error that persists
    /// although no process has changed a rule since the last try has another cause, and is final.
    fn retry<T>(&mut self, mut change: impl FnMut(&mut SpoofCheck) -> Result<T>) -> Result<T> {
        let mut generation_after_last = None;
        for _ in 1..TRIES_MAX {
            let error = match change(self) {
                Err(error) if is_conflict(&error) => error,
                result => return result,
            };
            let generation = Some(self.nft.generation()?);
            if generation == generation_after_last {
                return Err(error);
            }
            generation_after_last = generation;
        }
        change(self)
    }

    /// Removes the `existing` objects and writes all rules of the ID, in one transaction.
    fn replace(&mut self, id: &Id, jump: &Rule, mac: Mac, existing: &[Object]) -> Result<()> {
        let commented = |exprs: Vec<Expr>| Rule::new(exprs).with_comment(id.comment());
        let mut batch = Batch::new();
        for object in existing {
            object.add_removal(&mut batch);
        }
        match self.nft.find_chain(TABLE, PREROUTING)? {
            Some(chain) if chain.base == Some(BASE) => self.nft.use_index(TABLE, &chain, identity::keys)?,
            _ => add_shared_chain(&mut batch),
        }
        // `create` fails if the chain exists: of two processes that write the rules of one ID, the
        // second fails here, is retried, and finds the rules of the first.
        batch.create_chain(TABLE, &id.chain(), None);
        batch.create_chain(TABLE, &id.mac_chain(), None);
        batch.append_rule(TABLE, PREROUTING, jump);
        batch.append_rule(TABLE, &id.chain(), &commented(id.jump_to_mac_chain()));
        for exprs in mac_rules(mac) {
            batch.append_rule(TABLE, &id.mac_chain(), &commented(exprs));
        }
        self.nft.commit(batch)
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
        let id = Id::new(&attachment.container_id, &attachment.ifname);
        self.purge_ids(&BTreeSet::from([id.clone()]), |rules| {
            if let Some(other) = id.find_other_owner(rules, attachment) {
                return Some(other);
            }
            // If the interfaces cannot be read, the rules are removed, as Go always does.
            let owner_with_link = find_owner_with_link(&id, rules, None).unwrap_or(None);
            // Go's rules have no tag. The interface of this attachment is already deleted, so an
            // existing interface that Go's rules guard belongs to another attachment.
            owner_with_link.filter(|owner| owner.tag == JumpTag::Missing)
        })
    }

    /// Undoes an [`ensure`](SpoofCheck::ensure) for `host_veth`: removes all rules with the
    /// attachment's ID. If one of the jumps is for another attachment or interface, `ensure` did
    /// not write the rules, and all stay.
    pub fn undo(&mut self, attachment: &AttachmentId, host_veth: &str) -> Result<()> {
        let id = Id::new(&attachment.container_id, &attachment.ifname);
        let guards_other_veth =
            |owner: &SpoofOwner| owner.host_veth.as_deref().is_some_and(|guarded| guarded != host_veth);
        let find_other = |rules: &[Listed]| {
            id.find_other_owner(rules, attachment).or_else(|| id.owners(rules).find(guards_other_veth))
        };
        self.purge_ids(&BTreeSet::from([id.clone()]), find_other).map(drop)
    }

    /// Removes the rules of the network's attachments that are not in `valid`. Rules of the Go
    /// plugin do not name their network: they are only removed if their interface does not exist.
    ///
    /// # Errors
    /// The rules or the interfaces cannot be read, or a rule cannot be removed. The others are
    /// still removed.
    pub fn gc(&mut self, network: &str, valid: &ValidAttachments) -> Result<()> {
        let owners = self.list()?;
        if owners.is_empty() {
            return Ok(());
        }
        let links: BTreeSet<String> = Netlink::open()?.list_links()?.into_iter().map(|link| link.name).collect();
        let valid: BTreeSet<Id> = valid.iter().map(|(container_id, ifname)| Id::new(container_id, ifname)).collect();
        let garbage = owners.into_iter().filter(|owner| owner.is_garbage(network, &valid, &links));
        self.purge_ids(&garbage.map(|owner| owner.id).collect(), |_| None).map(drop)
    }

    /// Removes all rules of the IDs, after reading the rules once, and returns `Ok(None)`. If
    /// `find_other`, given the rules of PREROUTING, returns another owner, removes nothing and
    /// returns that owner.
    fn purge_ids(
        &mut self,
        ids: &BTreeSet<Id>,
        find_other: impl Fn(&[Listed]) -> Option<SpoofOwner>,
    ) -> Result<Option<SpoofOwner>> {
        self.retry(|spoof| {
            let mut remaining = ids.iter();
            let rules = match (remaining.next(), remaining.next()) {
                (Some(id), None) => spoof.jumps(id)?,
                _ => spoof.nft.rules(TABLE, PREROUTING)?,
            };
            if let Some(owner) = find_other(&rules) {
                return Ok(Some(owner));
            }
            let objects = spoof.find_objects(ids, &rules)?;
            spoof.remove(&objects)?;
            Ok(None)
        })
    }

    /// Removes the objects, in one transaction if possible.
    fn remove(&mut self, objects: &[Object]) -> Result<()> {
        let mut batch = Batch::new();
        for object in objects {
            object.add_removal(&mut batch);
        }
        match self.nft.commit(batch) {
            // Linux is older than 5.0 (see `ensure`), or a rule of another program jumps to one of
            // the chains. That chain stays, but the other objects can be removed.
            Err(error) if error.errno() == Some(libc::EBUSY) => self.purge_one_by_one(objects),
            result => result,
        }
    }

    /// Removes each object in a transaction of its own, and returns the first error. An object that
    /// another process has removed meanwhile is not an error.
    fn purge_one_by_one(&mut self, objects: &[Object]) -> Result<()> {
        let mut result = Ok(());
        for object in objects {
            let mut batch = Batch::new();
            object.add_removal(&mut batch);
            match self.nft.commit(batch) {
                Err(error) if !is_conflict(&error) && result.is_ok() => result = Err(error),
                _ => {}
            }
        }
        result
    }

    /// Returns a sentence for each chain or rule that is missing or differs from what
    /// [`ensure`](SpoofCheck::ensure) writes; empty if none. Accepts Go's rules, and duplicate
    /// jumps.
    pub fn check(&mut self, container_id: &str, ifname: &str, host_veth: &str, mac: Mac) -> Result<Vec<String>> {
        let id = Id::new(container_id, ifname);
        let mut differences = Vec::new();
        let jump = id.jump(host_veth)?;
        if !self.has_shared_chain()? {
            differences.push(format!(
                "nft chain {TABLE} {PREROUTING} is missing, or is not of type filter, hook prerouting, priority -300"
            ));
        }
        if !self.jumps(&id)?.iter().any(|listed| listed.rule.exprs == jump) {
            let chain = id.chain();
            differences.push(format!(
                "nft chain {TABLE} {PREROUTING} has no rule that sends frames from {host_veth} to {chain}"
            ));
        }
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

    /// Returns the owner of each ID that has spoof rules, including Go's and incomplete ones.
    fn list(&mut self) -> Result<Vec<SpoofOwner>> {
        let (rules, chains) = (self.nft.rules(TABLE, PREROUTING)?, self.nft.chains(TABLE)?);
        let mut owners: BTreeMap<Id, SpoofOwner> = BTreeMap::new();
        for Listed { rule, .. } in &rules {
            let Some(id) = identity::id_in_comment(rule) else { continue };
            // If an ID has several jumps, the first one with a tag names its owner.
            if owners.get(&id).is_none_or(|known| known.tag == JumpTag::Missing) {
                owners.insert(id.clone(), SpoofOwner::of_jump(id, rule));
            }
        }
        // Chains without a jump.
        for chain in chains {
            let Some(name) = chain.name.strip_prefix(CHAIN_PREFIX) else { continue };
            let id = Id(name.strip_suffix(MAC_SUFFIX).unwrap_or(name).to_owned());
            // A name that ends in "-mac" is that of the second chain of an ID, or of the first
            // chain of an ID that itself ends in "-mac".
            if !owners.contains_key(&Id(name.to_owned())) && !owners.contains_key(&id) {
                owners.insert(id.clone(), SpoofOwner { id, host_veth: None, tag: JumpTag::Missing });
            }
        }
        Ok(owners.into_values().collect())
    }

    /// Whether PREROUTING, the chain that all attachments share, exists with the hook that the
    /// rules need.
    fn has_shared_chain(&mut self) -> Result<bool> {
        self.nft.has_base_chain(TABLE, PREROUTING, BASE)
    }

    /// Returns the rules of PREROUTING that name the ID; other rules can be among them.
    fn jumps(&mut self, id: &Id) -> Result<Vec<Listed>> {
        let Some(chain) = self.nft.find_chain(TABLE, PREROUTING)? else { return Ok(Vec::new()) };
        let search = Search { keys_of: identity::keys, appended: &[], wanted: &[id.key()], reads_all_if_missing: true };
        self.nft.rules_with_keys(TABLE, &chain, search)
    }

    /// Returns the jumps and chains of the IDs in the order of their removal: a chain follows the
    /// jumps to it, because the kernel refuses to remove the target of a jump. `rules` are the
    /// rules of PREROUTING.
    fn find_objects(&mut self, ids: &BTreeSet<Id>, rules: &[Listed]) -> Result<Vec<Object>> {
        let jumps = rules.iter().filter(|listed| identity::ids_of(&listed.rule).any(|id| ids.contains(&id)));
        let mut objects: Vec<Object> = jumps.map(|listed| Object::Jump { handle: listed.handle }).collect();
        objects.append(&mut self.find_chains(ids)?);
        Ok(objects)
    }

    /// Returns those of the IDs' chains that exist, two for each ID.
    fn find_chains(&mut self, ids: &BTreeSet<Id>) -> Result<Vec<Object>> {
        let names: BTreeSet<String> = ids.iter().flat_map(|id| [id.chain(), id.mac_chain()]).collect();
        let mut chains = Vec::new();
        if ids.len() > 1 {
            chains = self.nft.chains(TABLE)?;
            chains.retain(|chain| names.contains(&chain.name));
        } else {
            for name in &names {
                chains.extend(self.nft.find_chain(TABLE, name)?);
            }
        }
        // A chain jumps only to the one with its name and a suffix, which must be removed later.
        chains.sort_by_key(|chain| chain.name.len());
        Ok(chains.into_iter().map(|chain| Object::Chain { name: chain.name, handle: chain.handle }).collect())
    }
}

/// Returns the first owner of the ID whose host interface exists and is not `except`. `rules` are
/// the rules of PREROUTING. An interface whose peer is gone counts as deleted: the kernel is
/// deleting the pair.
fn find_owner_with_link(id: &Id, rules: &[Listed], except: Option<&str>) -> Result<Option<SpoofOwner>> {
    for owner in id.owners(rules) {
        let Some(name) = owner.host_veth.as_deref() else { continue };
        if Some(name) == except {
            continue;
        }
        let netlink = Netlink::open()?;
        if let Some(link) = netlink.find_link(name)?
            && !netlink.peer_is_gone(&link)?
        {
            return Ok(Some(owner));
        }
    }
    Ok(None)
}

/// Adds to `batch` the creation of the table and of PREROUTING, unless they exist.
fn add_shared_chain(batch: &mut Batch) {
    batch.ensure_table(TABLE, None);
    batch.ensure_base_chain(TABLE, PREROUTING, BASE, None);
}

/// Returns the jump from PREROUTING to the ID's chain, with a tag that names the attachment, or
/// only its network if the alias is too long.
fn jump_rule(id: &Id, attachment: &AttachmentId, host_veth: &str) -> Result<Rule> {
    let rule = Rule::new(id.jump(host_veth)?).with_comment(id.comment());
    let alias = attachment.alias();
    if comment_len(&id.comment()) + tag_len(alias.len()) <= userdata::MAX {
        return Ok(rule.with_tag(TAG_ALIAS, alias));
    }
    Ok(rule.with_tag(TAG_NETWORK, network_hash(&attachment.network)))
}

#[cfg(test)]
mod tests;
