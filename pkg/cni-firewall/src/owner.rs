//! Selects rules by the attachment that owns them.
//!
//! The rules of each feature name their owner in one form (`OwnerForm`), mostly in the comment.
//! Rules of nf_tables whose comment Go searches for have a tag beside it (`OwnerTag`).
//! Rules of the Go plugins that name only the container are *untagged*.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni::config::ValidAttachments;
use cni::hash::{sha512, sha512_hex};
use cni::text::cut;
use cni::{AttachmentId, Cidr};
use cni_linux::route::Family;

use crate::nft::Rule;

/// A selection of attachments.
#[derive(Clone, Copy, Debug)]
pub enum AttachmentFilter<'a> {
    /// One attachment.
    One {
        /// The attachment.
        attachment: &'a AttachmentId,
        /// The untagged rules of its container that are also selected.
        untagged: Untagged<'a>,
    },
    /// All attachments of a network except the valid ones. Untagged rules are also selected if
    /// their container has no valid attachment.
    Garbage {
        /// The network's name.
        network: &'a str,
        /// The attachments that are still valid.
        valid: &'a ValidAttachments,
    },
}

/// A selection of the untagged rules of a container.
#[derive(Clone, Copy, Debug)]
pub enum Untagged<'a> {
    /// None.
    Keep,
    /// Those for one of these addresses of the attachment.
    Covering(&'a [IpAddr]),
    /// Those for one of these addresses of the attachment, and all of a family that none of them
    /// has.
    ByFamily(&'a [IpAddr]),
    /// All, unless the attachment has rules that name it: its addresses are unknown.
    UnlessTagged,
    /// All.
    All,
}

impl<'a> Untagged<'a> {
    /// Returns the known addresses of the attachment.
    pub(crate) fn addresses(self) -> &'a [IpAddr] {
        match self {
            Untagged::Covering(addresses) | Untagged::ByFamily(addresses) => addresses,
            Untagged::Keep | Untagged::UnlessTagged | Untagged::All => &[],
        }
    }

    /// Returns the addresses to one of which a selected rule of this family leads; `None` if it may
    /// lead to any.
    pub(crate) fn addresses_in(self, family: Family) -> Option<&'a [IpAddr]> {
        let has_family = self.addresses().iter().any(|address| Family::of(*address) == family);
        (has_family || matches!(self, Untagged::Covering(_))).then(|| self.addresses())
    }

    /// Whether an untagged rule for this source address or network is selected; `source` is `None`
    /// for a rule that matches any source. `has_tagged` is whether the attachment has rules that
    /// name it.
    pub(crate) fn selects(&self, source: Option<Cidr>, has_tagged: bool) -> bool {
        match self {
            Untagged::Keep => false,
            Untagged::Covering(addresses) => {
                source.is_some_and(|source| addresses.iter().any(|address| source.contains(*address)))
            }
            Untagged::UnlessTagged => !has_tagged,
            // Only portmap uses `ByFamily`, and selects rules by `addresses_in` instead.
            Untagged::ByFamily(_) | Untagged::All => true,
        }
    }
}

impl<'a> AttachmentFilter<'a> {
    /// Selects the attachment and no untagged rules.
    pub fn one(attachment: &'a AttachmentId) -> AttachmentFilter<'a> {
        AttachmentFilter::One { attachment, untagged: Untagged::Keep }
    }

    /// Selects what DEL removes: the attachment, and the untagged rules for `addresses`, which are
    /// those of the ADD's result, empty if unknown.
    pub fn for_del(attachment: &'a AttachmentId, addresses: &'a [IpAddr]) -> AttachmentFilter<'a> {
        let untagged = if addresses.is_empty() { Untagged::UnlessTagged } else { Untagged::Covering(addresses) };
        AttachmentFilter::One { attachment, untagged }
    }

    /// Returns a function that takes an attachment's name in this form, and returns whether the
    /// attachment is selected.
    pub(crate) fn selector(&self, form: OwnerForm) -> Box<dyn Fn(&str) -> bool> {
        match *self {
            AttachmentFilter::One { attachment, .. } => {
                let selected = (form.name)(attachment);
                Box::new(move |name| name == selected)
            }
            AttachmentFilter::Garbage { network, valid } => {
                let attachments = valid.iter().map(|(id, ifname)| AttachmentId::new(network, id, ifname));
                let kept: BTreeSet<String> = attachments.map(|attachment| (form.name)(&attachment)).collect();
                let prefixes = (form.prefixes)(network);
                Box::new(move |name| prefixes.iter().any(|prefix| name.starts_with(prefix)) && !kept.contains(name))
            }
        }
    }
}

/// A form in which rules name their owner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnerForm {
    /// Returns the name of an attachment.
    pub(crate) name: fn(&AttachmentId) -> String,
    /// Returns the possible beginnings of the names of a network's attachments. No name of another
    /// network has one of them.
    pub(crate) prefixes: fn(&str) -> Vec<String>,
}

/// The form [`AttachmentId::alias`].
pub(crate) const ALIAS: OwnerForm =
    OwnerForm { name: AttachmentId::alias, prefixes: |network| vec![AttachmentId::network_prefix(network)] };

/// The type of the tag with an attachment's alias, in a rule of nf_tables.
pub(crate) const TAG_ALIAS: u8 = 0x80;
/// The type of the tag that replaces an alias that does not fit: the [`network_hash`], and further
/// bytes in some features.
pub(crate) const TAG_HASHES: u8 = 0x81;
/// The bytes of a [`network_hash`].
pub(crate) const NETWORK_HASH_LEN: usize = 8;

/// Returns the hash of a network's name: the first bytes of its SHA-512.
pub(crate) fn network_hash(network: &str) -> Vec<u8> {
    sha512(&[network.as_bytes()])[..NETWORK_HASH_LEN].to_vec()
}

/// Returns the ID or, if it is longer than `max`, its beginning, `-` and a hash of the whole ID:
/// 116 bytes, so that `nft` accepts it as a comment, also with a prefix of 12 bytes.
pub(crate) fn shortened(id: &str, max: usize) -> String {
    const BEGINNING_MAX: usize = 83;
    const HASH_DIGITS: usize = 32;
    if id.len() <= max {
        return id.to_owned();
    }
    format!("{}-{}", cut(id, BEGINNING_MAX), sha512_hex(&[id.as_bytes()], HASH_DIGITS))
}

/// The tag of a rule of nf_tables that names the attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OwnerTag {
    /// The attachment's alias.
    Alias(String),
    /// The hashes that replace a long alias.
    Hashes(Vec<u8>),
    /// The rule has no tag, because a Go plugin or the program `nft` wrote it.
    Missing,
}

impl OwnerTag {
    /// Reads a rule's tag.
    pub(crate) fn of(rule: &Rule) -> OwnerTag {
        match (rule.tag(TAG_ALIAS), rule.tag(TAG_HASHES)) {
            (Some(alias), _) => OwnerTag::Alias(String::from_utf8_lossy(alias).into_owned()),
            (None, Some(hashes)) => OwnerTag::Hashes(hashes.to_vec()),
            (None, None) => OwnerTag::Missing,
        }
    }

    /// Returns the alias, if the tag has it.
    pub(crate) fn alias(&self) -> Option<&str> {
        match self {
            OwnerTag::Alias(alias) => Some(alias),
            OwnerTag::Hashes(_) | OwnerTag::Missing => None,
        }
    }

    /// Whether the attachment belongs to `network`; `None` if the rule has no tag.
    pub(crate) fn is_of_network(&self, network: &str) -> Option<bool> {
        match self {
            OwnerTag::Alias(alias) => Some(alias.starts_with(&AttachmentId::network_prefix(network))),
            OwnerTag::Hashes(hashes) => Some(hashes.starts_with(&network_hash(network))),
            OwnerTag::Missing => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_of_the_network_and_not_valid() {
        let valid = ValidAttachments::from_iter([("c1", "eth0")]);
        let garbage = AttachmentFilter::Garbage { network: "net", valid: &valid }.selector(ALIAS);
        let one = AttachmentId::new("net", "c1", "eth0");
        let only = AttachmentFilter::one(&one).selector(ALIAS);
        for (name, is_one, is_garbage) in [
            ("cni:net/c1/eth0", true, false),
            ("cni:net/c1/eth1", false, true),
            ("cni:net/c2/eth0", false, true),
            ("cni:net2/c1/eth0", false, false),
            ("cni:net2/c2/eth0", false, false),
            ("", false, false),
        ] {
            assert_eq!((only(name), garbage(name)), (is_one, is_garbage), "{name}");
        }
    }
}
