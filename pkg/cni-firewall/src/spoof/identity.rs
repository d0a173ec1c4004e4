//! Whose spoof rules are: names and comments of an attachment, and the owner that rules name.

use std::fmt;

use cni::hash::{sha512, sha512_hex};

use super::{CHAIN_PREFIX, COMMENT_PREFIX, MAC_SUFFIX, NETWORK_LEN, PLAIN_ID_MAX, TAG_MARK, TAG_NETWORK};
use crate::nft::expr::{iifname, iifname_of};
use crate::nft::{Expr, Listed, Rule, Verdict};
use cni::AttachmentId;
use cni_linux::error::{Cause, Error, Result};

/// An attachment's key as it appears in names and comments.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Id(pub(super) String);

impl Id {
    pub(crate) fn new(container_id: &str, ifname: &str) -> Id {
        const KEPT: usize = 83;
        let id = format!("{container_id}-{ifname}");
        if id.len() <= PLAIN_ID_MAX {
            return Id(id);
        }
        let hash = sha512_hex(&[id.as_bytes()], 32);
        // Both parts are ASCII by their rules; a cut in the middle of a character must not panic if
        // they are not.
        let kept: String = id.chars().scan(0, |len, c| (*len += c.len_utf8(), (*len <= KEPT).then_some(c)).1).collect();
        Id(format!("{kept}-{hash}"))
    }

    pub(super) fn chain(&self) -> String {
        format!("{CHAIN_PREFIX}{}", self.0)
    }

    pub(super) fn mac_chain(&self) -> String {
        format!("{CHAIN_PREFIX}{}{MAC_SUFFIX}", self.0)
    }

    pub(crate) fn comment(&self) -> String {
        format!("{COMMENT_PREFIX}{}", self.0)
    }

    /// Whether a rule of PREROUTING is this attachment's: by its comment, as Go searches, or
    /// because it leads into its chain, which must go too.
    pub(super) fn owns(&self, rule: &Rule) -> bool {
        rule.comment.as_deref() == Some(&self.comment())
            || matches!(rule.exprs.last(), Some(Expr::Verdict(Verdict::Jump(to) | Verdict::Goto(to))) if *to == self.chain())
    }

    /// Returns the attachments of this key that the rules of PREROUTING name, one for each rule.
    pub(super) fn owners(&self, rules: &[Listed]) -> impl Iterator<Item = SpoofOwner> {
        let owned = rules.iter().map(|listed| &listed.rule).filter(|rule| self.owns(rule));
        owned.map(|rule| SpoofOwner {
            id_ifname: self.0.clone(),
            host_veth: iifname_of(&rule.exprs),
            network: Network::of(rule),
        })
    }

    /// The other attachment of this key that the rules of PREROUTING name; Go's rules name none.
    pub(super) fn rival(&self, rules: &[Listed], mark: &AttachmentId) -> Option<SpoofOwner> {
        self.owners(rules).find(|owner| match &owner.network {
            Network::Marked(other) => *other != mark.alias(),
            Network::Hashed(other) => *other != network_hash(&mark.network),
            Network::Unknown => false,
        })
    }

    pub(super) fn jump(&self, host_veth: &str) -> Result<Vec<Expr>> {
        let mut exprs = iifname(host_veth).ok_or_else(|| {
            Error::new(format!("failed to match interface {host_veth}"), Cause::text("the name is too long"))
        })?;
        exprs.push(Expr::Verdict(Verdict::Jump(self.chain())));
        Ok(exprs)
    }

    pub(super) fn to_mac_chain(&self) -> Vec<Expr> {
        vec![Expr::Verdict(Verdict::Jump(self.mac_chain()))]
    }
}

pub(super) fn network_hash(network: &str) -> Vec<u8> {
    sha512(&[network.as_bytes()])[..NETWORK_LEN].to_vec()
}

/// Which network an attachment belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Network {
    /// The whole mark.
    Marked(String),
    /// The hash of its name.
    Hashed(Vec<u8>),
    /// Made by a Go plugin.
    Unknown,
}

impl Network {
    pub(super) fn of(rule: &Rule) -> Network {
        match (rule.tag(TAG_MARK), rule.tag(TAG_NETWORK)) {
            (Some(mark), _) => Network::Marked(String::from_utf8_lossy(mark).into_owned()),
            (None, Some(hash)) => Network::Hashed(hash.to_vec()),
            (None, None) => Network::Unknown,
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Network::Marked(mark) => f.write_str(mark),
            Network::Hashed(_) => f.write_str("another network"),
            Network::Unknown => f.write_str("a Go plugin"),
        }
    }
}

/// An attachment that has spoof rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpoofOwner {
    /// `<containerID>-<ifname>`, shortened if very long.
    pub id_ifname: String,
    /// The interface whose frames are judged; `None` where chains are left but nothing leads to
    /// them.
    pub host_veth: Option<String>,
    pub(super) network: Network,
}

/// Displays the attachment for a message.
impl fmt::Display for SpoofOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.network, self.host_veth.as_deref().unwrap_or("no interface"))
    }
}

impl SpoofOwner {
    /// Whether it belongs to `network`; `None` if it does not say, because a Go plugin made it.
    pub fn belongs_to(&self, network: &str) -> Option<bool> {
        match &self.network {
            Network::Marked(mark) => Some(mark.starts_with(&AttachmentId::network_prefix(network))),
            Network::Hashed(hash) => Some(*hash == network_hash(network)),
            Network::Unknown => None,
        }
    }

    /// Whether it is this attachment's.
    pub fn matches(&self, container_id: &str, ifname: &str) -> bool {
        self.id_ifname == Id::new(container_id, ifname).0
    }

    /// Whether GC of `network` removes it: it names the network and is none of the valid
    /// attachments (container ID, interface name); or it names none, is not valid, and is dead for
    /// sure: its interface is gone.
    pub fn is_garbage(&self, network: &str, valid: &[(&str, &str)], link_exists: impl Fn(&str) -> bool) -> bool {
        if valid.iter().any(|(container_id, ifname)| self.matches(container_id, ifname)) {
            return false;
        }
        match (self.belongs_to(network), &self.host_veth) {
            (Some(belongs), _) => belongs,
            (None, Some(host_veth)) => !link_exists(host_veth),
            // Go makes chains first and the way to them later: this may be an ADD at work.
            (None, None) => false,
        }
    }
}
