//! Builds the ID of an attachment's spoof rules and the names that contain it, and reads which
//! attachment owns existing rules.
//!
//! The documentation of [`super`] shows the rules.

use std::collections::BTreeSet;
use std::fmt;

use cni::hash::{sha512, sha512_hex};

use super::{CHAIN_PREFIX, COMMENT_PREFIX, MAC_SUFFIX, NETWORK_HASH_LEN, PLAIN_ID_MAX, TAG_ALIAS, TAG_NETWORK};
use crate::nft::expr::{iifname, iifname_of, jump};
use crate::nft::{Expr, Key, Listed, Rule, Verdict};
use cni::AttachmentId;
use cni_linux::error::{Cause, Error, Result};

/// `<containerID>-<ifname>`, shortened if very long: the part of the names of chains and of the
/// comments that identifies an attachment. Not unique ([`super`]).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Id(pub(super) String);

impl Id {
    /// Returns the ID of an attachment. An ID longer than [`PLAIN_ID_MAX`] is replaced with its
    /// beginning, `-` and a hash of the whole ID: 116 bytes, so that `nft` accepts the comment.
    pub(crate) fn new(container_id: &str, ifname: &str) -> Id {
        const CUT_LEN: usize = 83;
        const HASH_DIGITS: usize = 32;
        let id = format!("{container_id}-{ifname}");
        if id.len() <= PLAIN_ID_MAX {
            return Id(id);
        }
        let hash = sha512_hex(&[id.as_bytes()], HASH_DIGITS);
        // Valid IDs are ASCII. The loop avoids a panic for others.
        let mut end = CUT_LEN;
        while !id.is_char_boundary(end) {
            end -= 1;
        }
        Id(format!("{}-{hash}", &id[..end]))
    }

    /// Returns the name of the chain that the jump leads to.
    pub(super) fn chain(&self) -> String {
        format!("{CHAIN_PREFIX}{}", self.0)
    }

    /// Returns the name of the chain that checks the MAC.
    pub(super) fn mac_chain(&self) -> String {
        format!("{CHAIN_PREFIX}{}{MAC_SUFFIX}", self.0)
    }

    /// Returns the comment of all rules of this ID.
    pub(crate) fn comment(&self) -> String {
        format!("{COMMENT_PREFIX}{}", self.0)
    }

    /// Whether a rule of PREROUTING belongs to this ID: it has the ID's comment, by which Go
    /// searches, or it leads to the ID's chain, which cannot be removed before the rule.
    pub(super) fn owns(&self, rule: &Rule) -> bool {
        ids_of(rule).any(|id| id == *self)
    }

    /// Returns the key of the ID's jumps in the index of PREROUTING.
    pub(super) fn key(&self) -> Key {
        Key::comment(&self.comment())
    }

    /// Returns the expressions of the jump for frames from `host_veth`. Fails if the name is too
    /// long for an interface.
    pub(super) fn jump(&self, host_veth: &str) -> Result<Vec<Expr>> {
        let mut exprs = iifname(host_veth).ok_or_else(|| {
            Error::new(format!("failed to build a rule for interface {host_veth}"), Cause::text("the name is too long"))
        })?;
        exprs.push(jump(self.chain()));
        Ok(exprs)
    }

    /// Returns the expressions of the only rule of [`chain`](Id::chain): the jump to
    /// [`mac_chain`](Id::mac_chain).
    pub(super) fn jump_to_mac_chain(&self) -> Vec<Expr> {
        vec![jump(self.mac_chain())]
    }
}

/// Returns the ID in the comment of a rule.
pub(super) fn id_in_comment(rule: &Rule) -> Option<Id> {
    Some(Id(rule.comment.as_deref()?.strip_prefix(COMMENT_PREFIX)?.to_owned()))
}

/// Returns the IDs that a rule of PREROUTING names: in its comment, and in the chain that it leads
/// to.
pub(super) fn ids_of(rule: &Rule) -> impl Iterator<Item = Id> {
    let target = match rule.exprs.last() {
        Some(Expr::Verdict(Verdict::Jump(target) | Verdict::Goto(target))) => target.strip_prefix(CHAIN_PREFIX),
        _ => None,
    };
    id_in_comment(rule).into_iter().chain(target.map(|id| Id(id.to_owned())))
}

/// Returns the keys by which a rule of PREROUTING is searched.
pub(super) fn keys(listed: &Listed) -> Vec<Key> {
    let comment = Key::comment(listed.rule.comment.as_deref().unwrap_or_default());
    std::iter::once(comment).chain(ids_of(&listed.rule).map(|id| id.key())).collect()
}

/// Returns the network's hash as in a [`TAG_NETWORK`].
pub(super) fn network_hash(network: &str) -> Vec<u8> {
    sha512(&[network.as_bytes()])[..NETWORK_HASH_LEN].to_vec()
}

/// The tag of a jump, which names the attachment that the rules belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum JumpTag {
    /// The attachment's alias, with the network's name.
    Alias(String),
    /// The hash of the network's name, for an alias that is too long.
    NetworkHash(Vec<u8>),
    /// There is no tag, because the Go plugin wrote the rule, or no jump at all.
    Missing,
}

impl JumpTag {
    /// Reads a jump's tag.
    pub(super) fn of(rule: &Rule) -> JumpTag {
        match (rule.tag(TAG_ALIAS), rule.tag(TAG_NETWORK)) {
            (Some(alias), _) => JumpTag::Alias(String::from_utf8_lossy(alias).into_owned()),
            (None, Some(hash)) => JumpTag::NetworkHash(hash.to_vec()),
            (None, None) => JumpTag::Missing,
        }
    }
}

/// Displays the attachment for a message.
impl fmt::Display for JumpTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JumpTag::Alias(alias) => f.write_str(alias),
            JumpTag::NetworkHash(_) => f.write_str("an attachment whose name is too long to be recorded"),
            JumpTag::Missing => f.write_str("an attachment created by a Go plugin"),
        }
    }
}

/// An attachment that has spoof rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpoofOwner {
    pub(super) id: Id,
    /// The interface whose frames are checked; `None` if no jump names one.
    pub host_veth: Option<String>,
    pub(super) tag: JumpTag,
}

/// Displays the attachment and the guarded interface: `cni:net/c1/eth0, host interface veth12`.
impl fmt::Display for SpoofOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, host interface {}", self.tag, self.host_veth.as_deref().unwrap_or("unknown"))
    }
}

impl SpoofOwner {
    /// Returns `<containerID>-<ifname>`, shortened if very long.
    pub fn id(&self) -> &str {
        &self.id.0
    }

    /// Returns the owner of a jump to the chain of this ID.
    pub(super) fn of_jump(id: Id, jump: &Rule) -> SpoofOwner {
        SpoofOwner { id, host_veth: iifname_of(&jump.exprs), tag: JumpTag::of(jump) }
    }

    /// Whether the attachment belongs to `network`; `None` if no jump has a tag, because the Go
    /// plugin wrote the rules or because there are only chains.
    pub(super) fn belongs_to(&self, network: &str) -> Option<bool> {
        match &self.tag {
            JumpTag::Alias(alias) => Some(alias.starts_with(&AttachmentId::network_prefix(network))),
            JumpTag::NetworkHash(hash) => Some(*hash == network_hash(network)),
            JumpTag::Missing => None,
        }
    }

    /// Whether GC of `network` removes the rules: their ID is not in `valid`, and either their tag
    /// names this network, or they have no tag and guard an interface that is not in `links`.
    pub(super) fn is_garbage(&self, network: &str, valid: &BTreeSet<Id>, links: &BTreeSet<String>) -> bool {
        if valid.contains(&self.id) {
            return false;
        }
        match (self.belongs_to(network), &self.host_veth) {
            (Some(belongs), _) => belongs,
            (None, Some(host_veth)) => !links.contains(host_veth),
            // Chains without a jump: Go creates the chains first, so its ADD may be running.
            (None, None) => false,
        }
    }
}
