//! `macspoofchk`: frames that come out of a container pass only with the container's own MAC as
//! their source.
//!
//! In table `bridge nat`, shared with ebtables-nft, as Go has it, with `ID` for
//! `<containerID>-<ifname>`:
//! ```text
//! chain PREROUTING { type filter hook prerouting priority -300; policy accept;
//!     iifname "<host veth>" jump cni-br-iface-ID comment "macspoofchk-ID"        }
//! chain cni-br-iface-ID { jump cni-br-iface-ID-mac comment "macspoofchk-ID"      }
//! chain cni-br-iface-ID-mac {
//!     ether saddr <container MAC> return comment "macspoofchk-ID"
//!     drop comment "macspoofchk-ID"                                              }
//! ```
//! Go finds the first rule by its comment and the chains by their names; so does this module, also
//! rules that Go doubled or left. The network, which is not in the key, is in a tag beside the
//! first comment. Two attachments can have one key (the same ID and interface in another network,
//! or ID `a` with interface `eth0-x` and ID `a-eth0` with interface `x`): the tag names the owner
//! of the rules, and an attachment that is not named there neither replaces nor removes them while
//! their interface exists. Nor is the namespace in the key: an ADD into another one does not
//! replace the rules of an interface that exists.
//!
//! **Long IDs.** Kernel limits are 255 bytes for a chain's name and 256 for comment and tags
//! together; `nft` itself takes comments of up to 128 bytes, so IDs over 116 bytes are beyond Go's
//! ADD. Up to 231 bytes the rules still have the plain form (Go's DEL can remove them, `nft` lists
//! them, but cannot load that list again). Longer IDs are cut to 83 bytes and end in `-` and 128
//! bits of the whole ID's SHA-512 in hex: no Go plugin can have made such an attachment.

use std::collections::BTreeMap;

use super::nft::expr::{ether_saddr, ether_saddr_of, iifname_of};
use super::nft::userdata::{self, comment_len};
use super::nft::{BaseChain, Batch, Expr, Family, Hook, Kind, Listed, Nft, Rule, Table, Verdict, raced};
use super::retry;
use cni::AttachmentId;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::mac::Mac;
use cni_linux::netlink::Netlink;

mod identity;

pub(super) use identity::Id;
pub use identity::SpoofOwner;
use identity::{Network, network_hash};

pub(super) const TABLE: Table<'static> = Table { family: Family::Bridge, name: "nat" };
pub(super) const PREROUTING: &str = "PREROUTING";
/// `NF_BR_PRI_NAT_DST_BRIDGED`
const BASE: BaseChain = BaseChain { kind: Kind::Filter, hook: Hook::Prerouting, priority: -300 };
const CHAIN_PREFIX: &str = "cni-br-iface-";
const MAC_SUFFIX: &str = "-mac";
pub(super) const COMMENT_PREFIX: &str = "macspoofchk-";

/// The attachment's mark, as on the host's veth ([`AttachmentId::alias`]).
pub(super) const TAG_MARK: u8 = 0x80;
/// Where the mark does not fit: the first 8 bytes of the SHA-512 of the network's name.
const TAG_NETWORK: u8 = 0x81;
const NETWORK_LEN: usize = 8;

/// The longest ID whose comment leaves room for a [`TAG_NETWORK`].
const PLAIN_ID_MAX: usize = userdata::MAX - comment_len(COMMENT_PREFIX) - (2 + NETWORK_LEN);

/// Rules against forged source MACs, in the namespace whose bridges they guard.
#[derive(Debug)]
pub struct SpoofCheck {
    nft: Nft,
}

/// The rules of the chain that judges the source address.
fn judgement(mac: Mac) -> [Vec<Expr>; 2] {
    let mut own = ether_saddr(mac.0);
    own.push(Expr::Verdict(Verdict::Return));
    [own, vec![Expr::Verdict(Verdict::Drop)]]
}

/// Returns the MAC that these rules accept, if they are those of [`judgement`].
fn pinned(rules: &[Listed]) -> Option<Mac> {
    let mac = Mac(ether_saddr_of(&rules.first()?.rule.exprs)?);
    rules.iter().map(|listed| &listed.rule.exprs).eq(&judgement(mac)).then_some(mac)
}

/// Something of an attachment that is in the kernel.
enum Object {
    Jump(u64),
    Chain(String, u64),
}

impl Object {
    fn remove(&self, batch: &mut Batch) {
        match self {
            Object::Jump(handle) => batch.delete_rule(TABLE, PREROUTING, *handle),
            Object::Chain(name, handle) => batch.delete_chain(TABLE, name, *handle),
        }
    }
}

impl SpoofCheck {
    /// Opens a connection in the calling thread's network namespace. [`Error::is_unsupported`] on a
    /// kernel without netfilter's netlink, where there is nothing to purge either.
    pub fn open() -> Result<SpoofCheck> {
        Ok(SpoofCheck { nft: Nft::open()? })
    }

    /// Whether [`ensure`](SpoofCheck::ensure) can work here: else [`Error::is_unsupported`], or a
    /// missing privilege. Some 0.1 ms where spoof rules or ebtables are or were in use, some 10 ms
    /// (a rehearsal) elsewhere.
    pub fn probe(&mut self) -> Result<()> {
        if self.is_hooked_in()? {
            return Ok(());
        }
        let mut batch = Batch::new();
        add_shared_chains(&mut batch);
        self.nft.rehearse(batch)
    }

    /// Puts the attachment's rules in force, in one transaction; what it had before is replaced in
    /// the same one, so that no frame passes unjudged. Some 0.3 ms where the attachment has no
    /// rules yet, however many others have.
    ///
    /// On failure everything is as it was. [`Error::is_unsupported`] on a kernel without nf_tables
    /// for bridges; code 102 where these rules guard another interface, which lives.
    pub fn ensure(&mut self, mark: &AttachmentId, host_veth: &str, mac: Mac) -> Result<()> {
        let id = Id::new(&mark.container_id, &mark.ifname);
        let jump = jump_rule(&id, mark, host_veth)?;
        retry(|| {
            // A jump cannot be without the chain it leads to: no chains, nothing old, and no list
            // to read.
            let mut old = self.chains(&id)?;
            if !old.is_empty() {
                let rules = self.nft.rules(TABLE, PREROUTING)?;
                if let Some(owner) = living(&id, &rules, host_veth)? {
                    let text = format!("they are those of {owner}");
                    return Err(Error::new(format_args!("failed to make spoof rules {}", id.0), Cause::held(text)));
                }
                old = self.everything(&id, &rules)?;
            }
            match self.replace(&id, &jump, mac, &old) {
                // Kernels before 5.0 count a jump until its removal has been committed: remove
                // first, then make.
                Err(error) if error.errno() == Some(libc::EBUSY) => {
                    self.purge_id(&id, |_| None)?;
                    self.replace(&id, &jump, mac, &[])
                }
                done => done,
            }
        })
    }

    /// Returns the existing interface other than `host_veth` that the rules of this container ID
    /// and interface name guard: [`ensure`](SpoofCheck::ensure) would refuse to replace them.
    /// `None` on a kernel without nf_tables.
    pub fn find_conflicting_interface(&mut self, mark: &AttachmentId, host_veth: &str) -> Result<Option<SpoofOwner>> {
        let id = Id::new(&mark.container_id, &mark.ifname);
        let found = self.chains(&id).and_then(|chains| {
            // A jump exists only together with its target chain.
            if chains.is_empty() { Ok(None) } else { living(&id, &self.nft.rules(TABLE, PREROUTING)?, host_veth) }
        });
        match found {
            Err(error) if error.is_unsupported() => Ok(None),
            found => found,
        }
    }

    fn replace(&mut self, id: &Id, jump: &Rule, mac: Mac, old: &[Object]) -> Result<()> {
        let commented = |exprs: Vec<Expr>| Rule::new(exprs).with_comment(id.comment());
        let mut batch = Batch::new();
        for object in old {
            object.remove(&mut batch);
        }
        if !self.is_hooked_in()? {
            add_shared_chains(&mut batch);
        }
        // `create`: of two processes that make the same attachment's rules one fails here, and
        // replaces the other's.
        batch.create_chain(TABLE, &id.chain(), None);
        batch.create_chain(TABLE, &id.mac_chain(), None);
        batch.append_rule(TABLE, PREROUTING, jump);
        batch.append_rule(TABLE, &id.chain(), &commented(id.to_mac_chain()));
        for exprs in judgement(mac) {
            batch.append_rule(TABLE, &id.mac_chain(), &commented(exprs));
        }
        self.nft.commit(batch)
    }

    /// Removes all rules of the attachment, in one transaction, Go's and incomplete ones too. No
    /// rules, or a kernel without nf_tables, are not an error. Table and PREROUTING stay. Rules of
    /// another attachment stay as they are, and it is returned: without them its container could
    /// send with any MAC.
    ///
    /// The kernel frees the removed rules after an RCU grace period, for which the closing of the
    /// socket waits (6.18: 10 ms, one closing after the other). Purging before the link is deleted
    /// and dropping `self` after it would hide that behind the link's own grace period, but let the
    /// container's last frames pass unjudged.
    pub fn purge(&mut self, mark: &AttachmentId) -> Result<Option<SpoofOwner>> {
        let id = Id::new(&mark.container_id, &mark.ifname);
        // The rules of the Go plugins name no network. The caller has deleted the interfaces of
        // this attachment, so an interface that such rules still guard is another one.
        let of_go = |owner: &SpoofOwner| matches!(owner.network, Network::Unknown);
        let guarded = |rules: &[Listed]| living(&id, rules, "").ok().flatten().filter(of_go);
        self.purge_id(&id, |rules| id.rival(rules, mark).or_else(|| guarded(rules)))
    }

    /// Undoes an ADD: removes the same rules, unless rules lead interfaces other than `host_veth`
    /// into these chains. That ADD did not make those, and then all rules stay.
    pub fn undo(&mut self, mark: &AttachmentId, host_veth: &str) -> Result<()> {
        let id = Id::new(&mark.container_id, &mark.ifname);
        let others = |rules: &[Listed]| {
            let is_other = |owner: &SpoofOwner| owner.host_veth.as_deref().is_some_and(|name| name != host_veth);
            id.rival(rules, mark).or_else(|| id.owners(rules).find(is_other))
        };
        self.purge_id(&id, others).map(drop)
    }

    /// The same for something [`list`](SpoofCheck::list)ed.
    pub fn purge_owner(&mut self, owner: &SpoofOwner) -> Result<()> {
        self.purge_id(&Id(owner.id_ifname.clone()), |_| None).map(drop)
    }

    /// Removes all rules of the key, unless `keep` finds an owner in PREROUTING's rules.
    fn purge_id(&mut self, id: &Id, keep: impl Fn(&[Listed]) -> Option<SpoofOwner>) -> Result<Option<SpoofOwner>> {
        let purged = retry(|| {
            let rules = self.nft.rules(TABLE, PREROUTING)?;
            if let Some(owner) = keep(&rules) {
                return Ok(Some(owner));
            }
            let objects = self.everything(id, &rules)?;
            let mut whole = Batch::new();
            for object in &objects {
                object.remove(&mut whole);
            }
            match self.nft.commit(whole) {
                // A kernel before 5.0, or a stranger's rule that leads into our chain. Then what
                // can go goes.
                Err(error) if error.errno() == Some(libc::EBUSY) => self.purge_one_by_one(&objects),
                done => done,
            }
            .map(|()| None)
        });
        match purged {
            Err(error) if error.is_unsupported() => Ok(None),
            done => done,
        }
    }

    fn purge_one_by_one(&mut self, objects: &[Object]) -> Result<()> {
        let mut first = Ok(());
        for object in objects {
            let mut batch = Batch::new();
            object.remove(&mut batch);
            match self.nft.commit(batch) {
                Err(error) if !raced(&error) && first.is_ok() => first = Err(error),
                _ => {}
            }
        }
        first
    }

    /// Returns a sentence for each rule that differs from what [`ensure`](SpoofCheck::ensure)
    /// writes; empty if all is well. Accepts Go's rules, and doubled ones.
    pub fn check(&mut self, container_id: &str, ifname: &str, host_veth: &str, mac: Mac) -> Result<Vec<String>> {
        let id = Id::new(container_id, ifname);
        let mut differences = Vec::new();
        let jump = id.jump(host_veth)?;
        if !self.is_hooked_in()? {
            differences.push(format!("nft chain {TABLE} {PREROUTING} is missing or not hooked in where it should be"));
        }
        if !self.nft.rules(TABLE, PREROUTING)?.iter().any(|listed| listed.rule.exprs == jump) {
            let chain = id.chain();
            differences.push(format!(
                "nft chain {TABLE} {PREROUTING} has no rule that sends frames from {host_veth} to {chain}"
            ));
        }
        for (chain, expected) in [(id.chain(), &[id.to_mac_chain()][..]), (id.mac_chain(), &judgement(mac)[..])] {
            let rules = self.nft.rules(TABLE, &chain)?;
            if rules.iter().map(|listed| &listed.rule.exprs).eq(expected) {
                continue;
            }
            differences.push(match pinned(&rules) {
                Some(pinned) => format!(
                    "spoof rule pins MAC {pinned}, but {ifname} has MAC {mac}, set after the ADD of bridge: its frames are dropped"
                ),
                None => format!("nft chain {TABLE} {chain} is missing or has other rules than it should"),
            });
        }
        Ok(differences)
    }

    /// Every attachment that has spoof rules or remains of them, ours and Go's. Empty on a kernel
    /// without nf_tables.
    pub fn list(&mut self) -> Result<Vec<SpoofOwner>> {
        let listed = self.nft.rules(TABLE, PREROUTING).and_then(|rules| Ok((rules, self.nft.chains(TABLE)?)));
        let (rules, chains) = match listed {
            Err(error) if error.is_unsupported() => return Ok(Vec::new()),
            listed => listed?,
        };
        let mut owners: BTreeMap<String, SpoofOwner> = BTreeMap::new();
        for Listed { rule, .. } in &rules {
            let Some(id) = rule.comment.as_deref().and_then(|comment| comment.strip_prefix(COMMENT_PREFIX)) else {
                continue;
            };
            // A rule that a second ADD, by Go, put beside ours says less than ours.
            if owners.get(id).is_none_or(|known| known.network == Network::Unknown) {
                let (host_veth, network) = (iifname_of(&rule.exprs), Network::of(rule));
                owners.insert(id.to_owned(), SpoofOwner { id_ifname: id.to_owned(), host_veth, network });
            }
        }
        for chain in chains {
            let Some(name) = chain.name.strip_prefix(CHAIN_PREFIX) else { continue };
            let id = name.strip_suffix(MAC_SUFFIX).unwrap_or(name);
            // An interface's name may itself end in "-mac".
            if !owners.contains_key(name) && !owners.contains_key(id) {
                let remains = SpoofOwner { id_ifname: id.to_owned(), host_veth: None, network: Network::Unknown };
                owners.insert(id.to_owned(), remains);
            }
        }
        Ok(owners.into_values().collect())
    }

    fn is_hooked_in(&mut self) -> Result<bool> {
        self.nft.has_base_chain(TABLE, PREROUTING, BASE)
    }

    /// Returns the attachment's chains and rules, given the `rules` of PREROUTING, in an order in
    /// which the kernel lets them be removed.
    fn everything(&mut self, id: &Id, rules: &[Listed]) -> Result<Vec<Object>> {
        let jumps = rules.iter().filter(|listed| id.owns(&listed.rule));
        let mut objects: Vec<Object> = jumps.map(|listed| Object::Jump(listed.handle)).collect();
        objects.append(&mut self.chains(id)?);
        Ok(objects)
    }

    fn chains(&mut self, id: &Id) -> Result<Vec<Object>> {
        let mut objects = Vec::new();
        for name in [id.chain(), id.mac_chain()] {
            let chain = self.nft.find_chain(TABLE, &name)?;
            objects.extend(chain.map(|chain| Object::Chain(name, chain.handle)));
        }
        Ok(objects)
    }
}

/// Returns the owner whose interface exists, is still judged by these rules, and is not
/// `host_veth`, whose rules are to be made.
fn living(id: &Id, rules: &[Listed], host_veth: &str) -> Result<Option<SpoofOwner>> {
    for owner in id.owners(rules) {
        let Some(other) = owner.host_veth.as_deref().filter(|other| *other != host_veth) else { continue };
        let netlink = Netlink::open()?;
        if let Some(link) = netlink.find_link(other)?
            && !netlink.peer_is_gone(&link)?
        {
            return Ok(Some(owner));
        }
    }
    Ok(None)
}

/// Adds the table and the base chain that all attachments share.
fn add_shared_chains(batch: &mut Batch) {
    batch.ensure_table(TABLE, None);
    batch.ensure_base_chain(TABLE, PREROUTING, BASE, None);
}

/// The rule of PREROUTING, with its tag.
fn jump_rule(id: &Id, mark: &AttachmentId, host_veth: &str) -> Result<Rule> {
    let rule = Rule::new(id.jump(host_veth)?).with_comment(id.comment());
    let alias = mark.alias();
    let fits = comment_len(&id.comment()) + 2 + alias.len() <= userdata::MAX;
    Ok(if fits { rule.with_tag(TAG_MARK, alias) } else { rule.with_tag(TAG_NETWORK, network_hash(&mark.network)) })
}

#[cfg(test)]
mod tests;
