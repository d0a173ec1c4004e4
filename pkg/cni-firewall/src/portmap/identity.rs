//! Whose a rule of the nft shape is.
//!
//! Go's key is the comment, which is the bare container ID. Network and interface, which it lacks,
//! stand in a tag beside it: the attachment's mark, or, where that does not fit beside a long ID,
//! two hashes. A rule without a tag was made by a Go plugin, or written back by `nft -f` from a
//! listing, which loses tags.

use std::net::IpAddr;

use cni::hash::{sha512, sha512_hex};

use super::super::nft::userdata::{self, comment_len};
use super::super::nft::{Listed, Rule};
use cni::AttachmentId;

/// The attachment's mark ([`AttachmentId::alias`]).
const TAG_MARK: u8 = 0x80;
/// Where the mark does not fit: 8 bytes of the SHA-512 of the network's name, then 16 of the
/// mark's.
const TAG_HASHES: u8 = 0x81;
/// Empty: when the rule was made, a link on the host had the mark. If none has it any more, the
/// container is gone.
const TAG_HAD_LINK: u8 = 0x82;
/// In a rule without expressions: the handles, 8 bytes each, of rules of the attachment that could
/// not be tagged.
const TAG_HANDLES: u8 = 0x83;

/// Beside the handles: a hash of the text that those rules were written from.
const TAG_TEXT: u8 = 0x84;

const NETWORK_LEN: usize = 8;
const TEXT_LEN: usize = 16;
const MARK_LEN: usize = 16;
/// Both hashes and a witness.
const TAGS_MIN: usize = 2 + NETWORK_LEN + MARK_LEN + 2;
/// The longest ID that stands as it is in a comment beside the smallest tags. `nft` itself takes
/// 128 bytes.
const PLAIN_ID_MAX: usize = userdata::MAX - comment_len("") - TAGS_MIN;

/// One attachment, as rules name it.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// The comment that Go searches for.
    pub(super) comment: String,
    alias: String,
    hashes: Vec<u8>,
}

/// Whether a rule belongs to this attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// It names this attachment.
    This,
    /// It names the container and no attachment.
    Container,
    /// Another attachment's.
    Other,
}

fn text_hash(text: &str) -> Vec<u8> {
    sha512(&[text.as_bytes()])[..TEXT_LEN].to_vec()
}

fn hashes(network: &str, alias: &str) -> Vec<u8> {
    let mut bytes = sha512(&[network.as_bytes()])[..NETWORK_LEN].to_vec();
    bytes.extend(&sha512(&[alias.as_bytes()])[..MARK_LEN]);
    bytes
}

impl Identity {
    pub(crate) fn new(attachment: &AttachmentId) -> Identity {
        let alias = attachment.alias();
        Identity { comment: comment(&attachment.container_id), hashes: hashes(&attachment.network, &alias), alias }
    }

    /// Puts comment and tags on a rule.
    pub(super) fn sign(&self, rule: Rule, witnessed: LinkMark) -> Rule {
        let fits = comment_len(&self.comment) + 2 + self.alias.len() + 2 <= userdata::MAX;
        let rule = rule.with_comment(self.comment.clone());
        let rule = match fits {
            true => rule.with_tag(TAG_MARK, self.alias.clone()),
            false => rule.with_tag(TAG_HASHES, self.hashes.clone()),
        };
        match witnessed {
            LinkMark::Yes => rule.with_tag(TAG_HAD_LINK, []),
            LinkMark::No => rule,
        }
    }

    /// Rules that do nothing but say that these others are this attachment's, written from this
    /// text.
    pub(super) fn sign_others(&self, handles: &[u64], text: &str) -> Vec<Rule> {
        let used = comment_len(&self.comment) + 2 + self.hashes.len() + 2 + TEXT_LEN + 2;
        let room = (userdata::MAX.saturating_sub(used) / 8).max(1);
        let sign = |handles: &[u64]| {
            let bytes: Vec<u8> = handles.iter().flat_map(|handle| handle.to_be_bytes()).collect();
            let rule = Rule::default().with_comment(self.comment.clone()).with_tag(TAG_HASHES, self.hashes.clone());
            rule.with_tag(TAG_TEXT, text_hash(text)).with_tag(TAG_HANDLES, bytes)
        };
        handles.chunks(room).map(sign).collect()
    }

    /// Whether rules written from this text are this attachment's, all of them are there, and no
    /// others beside them.
    pub(super) fn has_signed(&self, rules: &[Listed], text: &str) -> bool {
        let hash = text_hash(text);
        let mut spoken_for = Vec::new();
        for listed in rules.iter().filter(|listed| self.owner(&listed.rule) == Ownership::This) {
            if listed.rule.tag(TAG_TEXT) != Some(&hash) {
                return false;
            }
            spoken_for.extend(handles(&listed.rule));
        }
        let is_there = |handle: &u64| rules.iter().any(|listed| listed.handle == *handle);
        spoken_for.len() == text.lines().count() && spoken_for.iter().all(is_there)
    }

    /// Returns whether a rule belongs to this attachment, as far as the rule names its owner.
    pub(crate) fn owner(&self, rule: &Rule) -> Ownership {
        if rule.comment.as_deref() != Some(&self.comment) {
            return Ownership::Other;
        }
        match (rule.tag(TAG_MARK), rule.tag(TAG_HASHES)) {
            (Some(alias), _) if alias == self.alias.as_bytes() => Ownership::This,
            (None, Some(found)) if found == self.hashes => Ownership::This,
            (None, None) => Ownership::Container,
            _ => Ownership::Other,
        }
    }

    /// The rules of a list that are this attachment's, `addresses` being its addresses as far as
    /// they are known. A rule that names the container alone is its if it leads to one of them;
    /// with no address known, in any case, as in Go.
    pub(super) fn own<'l>(
        &self,
        rules: &'l [Listed],
        addresses: &[IpAddr],
        leads_to: impl Fn(&Rule) -> Option<IpAddr>,
    ) -> Vec<&'l Listed> {
        let (mut claimed_by_others, mut claimed_by_us) = (Vec::new(), Vec::new());
        for listed in rules {
            match self.owner(&listed.rule) {
                Ownership::This => claimed_by_us.extend(handles(&listed.rule)),
                _ => claimed_by_others.extend(handles(&listed.rule)),
            }
        }
        let is_ours = |listed: &&Listed| match self.owner(&listed.rule) {
            Ownership::This => true,
            Ownership::Other => false,
            Ownership::Container if claimed_by_us.contains(&listed.handle) => true,
            Ownership::Container if claimed_by_others.contains(&listed.handle) => false,
            Ownership::Container if addresses.is_empty() => true,
            Ownership::Container => leads_to(&listed.rule).is_none_or(|address| addresses.contains(&address)),
        };
        rules.iter().filter(is_ours).collect()
    }

    /// Returns the rules that name the container alone and lead to another address than these.
    pub(super) fn strays<'l>(
        &self,
        rules: &'l [Listed],
        addresses: &[IpAddr],
        leads_to: impl Fn(&Rule) -> Option<IpAddr>,
    ) -> Vec<&'l Listed> {
        let own: Vec<u64> = self.own(rules, addresses, leads_to).iter().map(|listed| listed.handle).collect();
        let is_stray =
            |listed: &&Listed| self.owner(&listed.rule) == Ownership::Container && !own.contains(&listed.handle);
        rules.iter().filter(is_stray).collect()
    }
}

/// Whether a link had the mark when the rule was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkMark {
    Yes,
    No,
}

/// The comment for a container ID: the ID itself, or its beginning and a hash if it is too long for
/// Go anyway.
fn comment(container_id: &str) -> String {
    const KEPT: usize = 83;
    if container_id.len() <= PLAIN_ID_MAX {
        return container_id.to_owned();
    }
    let hash = sha512_hex(&[container_id.as_bytes()], 32);
    // IDs are ASCII by their rules; a cut in the middle of a character must not panic if one is
    // not.
    let kept: String =
        container_id.chars().scan(0, |len, c| (*len += c.len_utf8(), (*len <= KEPT).then_some(c)).1).collect();
    format!("{kept}-{hash}")
}

/// The handles that a rule speaks for.
pub(super) fn handles(rule: &Rule) -> Vec<u64> {
    let bytes = rule.tag(TAG_HANDLES).unwrap_or_default();
    bytes.as_chunks::<8>().0.iter().map(|chunk| u64::from_be_bytes(*chunk)).collect()
}

/// The mark of a rule, as an alias.
pub(crate) fn alias(rule: &Rule) -> Option<String> {
    rule.tag(TAG_MARK).map(|alias| String::from_utf8_lossy(alias).into_owned())
}

/// Returns the network that the rule names; `None` for a rule without a tag, and for one with
/// hashes.
pub(super) fn network(rule: &Rule) -> Option<String> {
    alias(rule).as_deref().and_then(AttachmentId::parse).map(|marked| marked.network)
}

/// Whether the rule names no network: it has no tag, and a Go plugin made it.
pub(super) fn names_no_network(rule: &Rule) -> bool {
    rule.tag(TAG_MARK).is_none() && rule.tag(TAG_HASHES).is_none()
}

/// Whether a link had the mark when the rule was made.
pub(super) fn had_link(rule: &Rule) -> bool {
    rule.tag(TAG_HAD_LINK).is_some()
}

/// Whether the rule names `network`; a rule without a tag names none.
pub(super) fn names_network(rule: &Rule, network: &str) -> bool {
    match (rule.tag(TAG_MARK), rule.tag(TAG_HASHES)) {
        (Some(alias), _) => alias.starts_with(AttachmentId::network_prefix(network).as_bytes()),
        (None, Some(found)) => found.starts_with(&sha512(&[network.as_bytes()])[..NETWORK_LEN]),
        (None, None) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::nft::Raw;
    use super::*;

    fn listed(handle: u64, rule: Rule) -> Listed {
        Listed { handle, rule, raw: Raw::default() }
    }

    fn signed(attachment: &AttachmentId) -> Rule {
        Identity::new(attachment).sign(Rule::default(), LinkMark::Yes)
    }

    #[test]
    fn a_rule_belongs_to_one_attachment_only() {
        for id in ["c1".to_owned(), "x".repeat(128), "x".repeat(220), "x".repeat(300)] {
            let marks = [
                AttachmentId::new("net", &id, "eth0"),
                AttachmentId::new("net", &id, "eth1"),
                AttachmentId::new("net2", &id, "eth0"),
            ];
            for one in &marks {
                let rule = signed(one);
                assert!(userdata::encode(rule.comment.as_deref(), &rule.tags).is_some(), "{} bytes", id.len());
                for other in &marks {
                    let expected = if one == other { Ownership::This } else { Ownership::Other };
                    assert_eq!(Identity::new(other).owner(&rule), expected);
                }
                assert!(names_network(&rule, &one.network) && !names_network(&rule, "ne"));
                assert!(had_link(&rule));
            }
            let gos = Rule::default().with_comment(comment(&id));
            assert_eq!(Identity::new(&marks[0]).owner(&gos), Ownership::Container);
            assert!(!names_network(&gos, "net"));
        }
    }

    #[test]
    fn a_rule_without_a_tag_belongs_to_whom_it_leads() {
        let identity = Identity::new(&AttachmentId::new("net", "c", "eth0"));
        let list = [listed(1, Rule::default().with_comment("c"))];
        let (a, b): (IpAddr, IpAddr) = ("10.0.0.2".parse().unwrap(), "10.0.0.3".parse().unwrap());
        assert_eq!(identity.own(&list, &[a], |_| Some(a)).len(), 1);
        assert_eq!(identity.own(&list, &[b], |_| Some(a)).len(), 0);
        assert_eq!(identity.own(&list, &[], |_| Some(a)).len(), 1);
        let other = Identity::new(&AttachmentId::new("net2", "c", "eth0"));
        let list = [list[0].clone(), listed(2, other.sign_others(&[1], "t").remove(0))];
        assert_eq!(identity.own(&list, &[], |_| None).len(), 0, "another attachment speaks for it");
        assert_eq!(other.own(&list, &[b], |_| Some(a)).len(), 2);
    }
}
