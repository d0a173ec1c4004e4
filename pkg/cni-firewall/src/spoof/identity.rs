//! Builds the ID of an attachment's spoof rules and the names that contain it, and reads which
//! attachment owns existing rules.
//!
//! The documentation of [`super`] shows the rules.

use std::collections::BTreeSet;
use std::fmt;

use super::{CHAIN_PREFIX, COMMENT_PREFIX, MAC_SUFFIX, PLAIN_ID_MAX};
use crate::nft::expr::{iifname, jump};
use crate::nft::{Expr, Key, Listed, Rule, Verdict};
use crate::owner::{OwnerTag, shortened};
use cni_linux::error::{Cause, Error, Result};

/// `<containerID>-<ifname>`, shortened if very long: the part of the names of chains and of the
/// comments that identifies an attachment. Not unique ([`super`]).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Id(pub(super) String);

impl Id {
    /// Returns the ID of an attachment, [`shortened`] if it is longer than [`PLAIN_ID_MAX`].
    pub(crate) fn new(container_id: &str, ifname: &str) -> Id {
        Id(shortened(&format!("{container_id}-{ifname}"), PLAIN_ID_MAX))
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

/// Returns the IDs that a rule of PREROUTING names: in its comment, and in the chain that it leads
/// to.
pub(super) fn ids_of(rule: &Rule) -> impl Iterator<Item = Id> {
    let in_comment = rule.comment.as_deref().and_then(|comment| comment.strip_prefix(COMMENT_PREFIX));
    let in_target = match rule.exprs.last() {
        Some(Expr::Verdict(Verdict::Jump(target) | Verdict::Goto(target))) => target.strip_prefix(CHAIN_PREFIX),
        _ => None,
    };
    in_comment.into_iter().chain(in_target).map(|id| Id(id.to_owned()))
}

/// Returns the keys by which a rule of PREROUTING is searched.
pub(super) fn keys(listed: &Listed) -> Vec<Key> {
    let comment = Key::comment(listed.rule.comment.as_deref().unwrap_or_default());
    std::iter::once(comment).chain(ids_of(&listed.rule).map(|id| id.key())).collect()
}

/// An attachment that has spoof rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpoofOwner {
    pub(super) id: Id,
    /// The interface whose frames are checked; `None` if no jump names one.
    pub host_veth: Option<String>,
    /// The tag of the jump.
    pub(super) tag: OwnerTag,
}

/// Displays the attachment and the guarded interface: `cni:net/c1/eth0, host interface veth12`.
impl fmt::Display for SpoofOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attachment = match &self.tag {
            OwnerTag::Alias(alias) => alias,
            OwnerTag::Hashes(_) => "an attachment whose name is too long to be recorded",
            OwnerTag::Missing => "an attachment created by a Go plugin",
        };
        write!(f, "{attachment}, host interface {}", self.host_veth.as_deref().unwrap_or("unknown"))
    }
}

impl SpoofOwner {
    /// Returns `<containerID>-<ifname>`, shortened if very long.
    pub fn id(&self) -> &str {
        &self.id.0
    }

    /// Whether GC of `network` removes the rules: their ID is not in `valid`, and either their tag
    /// names this network, or they have no tag and guard an interface that is not in `links`.
    pub(super) fn is_garbage(&self, network: &str, valid: &BTreeSet<Id>, links: &BTreeSet<String>) -> bool {
        if valid.contains(&self.id) {
            return false;
        }
        match (self.tag.is_of_network(network), &self.host_veth) {
            (Some(belongs), _) => belongs,
            (None, Some(host_veth)) => !links.contains(host_veth),
            // Chains without a jump: Go creates the chains first, so its ADD may be running.
            (None, None) => false,
        }
    }
}
