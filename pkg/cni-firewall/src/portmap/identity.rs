//! Writes the name of the attachment into a rule of nftables, and reads it back.
//!
//! Go's plugin finds a container's rules by their comment, which is only the container ID. The
//! network and the interface are in a tag, a field beside the comment that `nft` does not print:
//! the alias of the attachment, or two hashes if the alias does not fit beside a long ID.
//!
//! A rule without a tag was made in one of these ways:
//! - By a Go plugin.
//! - By the program `nft`, which cannot write tags, on behalf of these plugins. Then an *ownership
//!   rule*, which has tags but no effect, names the handle of the rule and its attachment.
//! - By `nft` when it restored a saved ruleset, which has no tags.

use std::net::IpAddr;

use cni::hash::{sha512, sha512_hex};

use super::super::nft::userdata::{self, comment_len};
use super::super::nft::{Listed, Rule};
use cni::AttachmentId;

/// The tag with the attachment's alias ([`AttachmentId::alias`]).
const TAG_ALIAS: u8 = 0x80;
/// The tag that replaces an alias that does not fit: 8 bytes of the SHA-512 of the network's name,
/// then 16 of that of the alias.
const TAG_HASHES: u8 = 0x81;
/// An empty tag: a link on the host had the alias when the rule was made. If no link has the alias
/// now, the container is dead.
const TAG_HAD_LINK: u8 = 0x82;
/// The tag of an ownership rule, which has no expressions: the handles, 8 bytes each, of rules of
/// the attachment that the program `nft` wrote without tags.
const TAG_HANDLES: u8 = 0x83;
/// The second tag of an ownership rule: a hash of the text from which `nft` wrote those rules.
const TAG_TEXT: u8 = 0x84;

/// The bytes of the network's hash in [`TAG_HASHES`].
const NETWORK_LEN: usize = 8;
/// The bytes of the alias's hash in [`TAG_HASHES`].
const ALIAS_LEN: usize = 16;
/// The bytes of the hash in [`TAG_TEXT`].
const TEXT_LEN: usize = 16;
/// The bytes of a handle in [`TAG_HANDLES`].
const HANDLE_LEN: usize = 8;
/// The bytes of a tag before its value: type and length.
const TAG_HEADER_LEN: usize = 2;
/// The length of the smallest set of tags: [`TAG_HASHES`], and [`TAG_HAD_LINK`] without a value.
const TAGS_MIN: usize = TAG_HEADER_LEN + NETWORK_LEN + ALIAS_LEN + TAG_HEADER_LEN;
/// The longest container ID that fits whole into the comment beside these tags.
const PLAIN_ID_MAX: usize = userdata::MAX - comment_len("") - TAGS_MIN;

/// The names of one attachment in rules.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// The comment that Go searches for.
    pub(super) comment: String,
    alias: String,
    hashes: Vec<u8>,
}

/// Whether a rule belongs to an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// The rule names this attachment.
    This,
    /// The rule names only this container: it may belong to another of its attachments.
    Container,
    /// The rule names another attachment or another container.
    Other,
}

/// Returns the value of [`TAG_TEXT`].
fn text_hash(text: &str) -> Vec<u8> {
    sha512(&[text.as_bytes()])[..TEXT_LEN].to_vec()
}

/// Returns the value of [`TAG_HASHES`].
fn hashes(network: &str, alias: &str) -> Vec<u8> {
    let mut bytes = sha512(&[network.as_bytes()])[..NETWORK_LEN].to_vec();
    bytes.extend(&sha512(&[alias.as_bytes()])[..ALIAS_LEN]);
    bytes
}

impl Identity {
    /// Returns the names of this attachment.
    pub(crate) fn new(attachment: &AttachmentId) -> Identity {
        let alias = attachment.alias();
        let comment = comment(&attachment.container_id);
        Identity { comment, hashes: hashes(&attachment.network, &alias), alias }
    }

    /// Adds the comment and the tags to a rule. `host_link` is whether a link on the host has the
    /// attachment's alias now.
    pub(super) fn sign(&self, rule: Rule, host_link: HostLink) -> Rule {
        // The second header is that of TAG_HAD_LINK, which has no value.
        let used_bytes = comment_len(&self.comment) + TAG_HEADER_LEN + self.alias.len() + TAG_HEADER_LEN;
        let rule = rule.with_comment(self.comment.clone());
        let rule = if used_bytes <= userdata::MAX {
            rule.with_tag(TAG_ALIAS, self.alias.clone())
        } else {
            rule.with_tag(TAG_HASHES, self.hashes.clone())
        };
        match host_link {
            HostLink::Present => rule.with_tag(TAG_HAD_LINK, []),
            HostLink::Absent => rule,
        }
    }

    /// Returns the ownership rules for the rules with these handles, which `nft` wrote for this
    /// attachment from `text`. There are several if one cannot hold all handles.
    pub(super) fn ownership_rules(&self, handles: &[u64], text: &str) -> Vec<Rule> {
        let tag_bytes = TAG_HEADER_LEN + self.hashes.len() + TAG_HEADER_LEN + TEXT_LEN + TAG_HEADER_LEN;
        let used_bytes = comment_len(&self.comment) + tag_bytes;
        // `chunks` panics for 0. Only an ID that is too long for `nft` leaves so little room.
        let handles_per_rule = (userdata::MAX.saturating_sub(used_bytes) / HANDLE_LEN).max(1);
        let mut rules = Vec::new();
        for chunk in handles.chunks(handles_per_rule) {
            let handle_bytes: Vec<u8> = chunk.iter().flat_map(|handle| handle.to_be_bytes()).collect();
            let rule = Rule::default().with_comment(self.comment.clone()).with_tag(TAG_HASHES, self.hashes.clone());
            rules.push(rule.with_tag(TAG_TEXT, text_hash(text)).with_tag(TAG_HANDLES, handle_bytes));
        }
        rules
    }

    /// Whether `nft` has already written the rules of `text` for this attachment: all tagged rules
    /// of the attachment are ownership rules for `text`, and name one existing rule for each of its
    /// lines.
    pub(super) fn has_rules_of_text(&self, rules: &[Listed], text: &str) -> bool {
        let hash = text_hash(text);
        let mut owned_handles = Vec::new();
        for listed in rules.iter().filter(|listed| self.ownership_of(&listed.rule) == Ownership::This) {
            // An ownership rule for another text, or a rule that portmap wrote itself.
            if listed.rule.tag(TAG_TEXT) != Some(&hash) {
                return false;
            }
            owned_handles.extend(named_handles(&listed.rule));
        }
        let is_listed = |handle: &u64| rules.iter().any(|listed| listed.handle == *handle);
        owned_handles.len() == text.lines().count() && owned_handles.iter().all(is_listed)
    }

    /// Returns whether a rule belongs to this attachment, by the rule's own comment and tags only:
    /// ownership rules that name the rule are not considered.
    pub(crate) fn ownership_of(&self, rule: &Rule) -> Ownership {
        if rule.comment.as_deref() != Some(&self.comment) {
            return Ownership::Other;
        }
        match (rule.tag(TAG_ALIAS), rule.tag(TAG_HASHES)) {
            (Some(alias), _) if alias == self.alias.as_bytes() => Ownership::This,
            (None, Some(hashes)) if hashes == self.hashes => Ownership::This,
            (None, None) => Ownership::Container,
            _ => Ownership::Other,
        }
    }

    /// Returns the rules of a list that are this attachment's. `container_of` returns the container
    /// address of a rule, and `addresses` are the attachment's known addresses.
    ///
    /// If a rule names only the container, an ownership rule that names its handle decides. Without
    /// an ownership rule, the rule is this attachment's in these cases:
    /// - `container_of` returns one of `addresses`, or `None`.
    /// - `addresses` is empty. Then only the container is compared, as Go's plugin does.
    pub(super) fn own_rules<'l>(
        &self,
        rules: &'l [Listed],
        addresses: &[IpAddr],
        container_of: impl Fn(&Rule) -> Option<IpAddr>,
    ) -> Vec<&'l Listed> {
        let (mut own_handles, mut handles_of_others) = (Vec::new(), Vec::new());
        for listed in rules {
            match self.ownership_of(&listed.rule) {
                Ownership::This => own_handles.extend(named_handles(&listed.rule)),
                _ => handles_of_others.extend(named_handles(&listed.rule)),
            }
        }
        let is_own = |listed: &&Listed| match self.ownership_of(&listed.rule) {
            Ownership::This => true,
            Ownership::Other => false,
            Ownership::Container => {
                if own_handles.contains(&listed.handle) {
                    return true;
                }
                if handles_of_others.contains(&listed.handle) {
                    return false;
                }
                match container_of(&listed.rule) {
                    Some(address) => addresses.is_empty() || addresses.contains(&address),
                    None => true,
                }
            }
        };
        rules.iter().filter(is_own).collect()
    }

    /// Returns the rules that name only the container and are not among
    /// [`own_rules`](Identity::own_rules): they lead to another address, or an ownership rule of
    /// another attachment names them.
    pub(super) fn rules_to_other_addresses<'l>(
        &self,
        rules: &'l [Listed],
        addresses: &[IpAddr],
        container_of: impl Fn(&Rule) -> Option<IpAddr>,
    ) -> Vec<&'l Listed> {
        let own_handles: Vec<u64> =
            self.own_rules(rules, addresses, container_of).iter().map(|listed| listed.handle).collect();
        let is_other = |listed: &&Listed| {
            self.ownership_of(&listed.rule) == Ownership::Container && !own_handles.contains(&listed.handle)
        };
        rules.iter().filter(is_other).collect()
    }
}

/// Whether a link on the host has the attachment's alias when the attachment's rules are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostLink {
    Present,
    Absent,
}

/// Returns the comment for a container ID: the ID, or its beginning and a hash if the ID is longer
/// than [`PLAIN_ID_MAX`]. `nft` and Go's plugin refuse such a long ID.
fn comment(container_id: &str) -> String {
    // Beginning, `-` and hash are together shorter than the 128 bytes that `nft` accepts.
    const BEGINNING_MAX: usize = 83;
    const HASH_DIGITS: usize = 32;
    if container_id.len() <= PLAIN_ID_MAX {
        return container_id.to_owned();
    }
    let hash = sha512_hex(&[container_id.as_bytes()], HASH_DIGITS);
    // Container IDs should be ASCII. If one is not, a character must not be cut in two.
    let mut beginning = String::new();
    for character in container_id.chars() {
        if beginning.len() + character.len_utf8() > BEGINNING_MAX {
            break;
        }
        beginning.push(character);
    }
    format!("{beginning}-{hash}")
}

/// Returns the handles that an ownership rule names; none for any other rule.
pub(super) fn named_handles(rule: &Rule) -> Vec<u64> {
    let bytes = rule.tag(TAG_HANDLES).unwrap_or_default();
    bytes.as_chunks::<HANDLE_LEN>().0.iter().map(|chunk| u64::from_be_bytes(*chunk)).collect()
}

/// Returns the alias in the rule's tag, if it has one.
pub(crate) fn alias(rule: &Rule) -> Option<String> {
    rule.tag(TAG_ALIAS).map(|alias| String::from_utf8_lossy(alias).into_owned())
}

/// Returns the name of the rule's network; `None` for a rule without a tag, and for a rule that has
/// only a hash of the network.
pub(super) fn network(rule: &Rule) -> Option<String> {
    alias(rule).as_deref().and_then(AttachmentId::parse).map(|marked| marked.network)
}

/// Whether the rule names a network, by the alias or by a hash.
pub(super) fn names_any_network(rule: &Rule) -> bool {
    rule.tag(TAG_ALIAS).is_some() || rule.tag(TAG_HASHES).is_some()
}

/// Whether a link on the host had the attachment's alias when the rule was made.
pub(super) fn had_link(rule: &Rule) -> bool {
    rule.tag(TAG_HAD_LINK).is_some()
}

/// Whether the rule names `network`; false for a rule without a tag.
pub(super) fn names_network(rule: &Rule, network: &str) -> bool {
    match (rule.tag(TAG_ALIAS), rule.tag(TAG_HASHES)) {
        (Some(alias), _) => alias.starts_with(AttachmentId::network_prefix(network).as_bytes()),
        (None, Some(found)) => found.starts_with(&sha512(&[network.as_bytes()])[..NETWORK_LEN]),
        (None, None) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(handle: u64, rule: Rule) -> Listed {
        Listed { handle, rule }
    }

    fn signed(attachment: &AttachmentId) -> Rule {
        Identity::new(attachment).sign(Rule::default(), HostLink::Present)
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
                    assert_eq!(Identity::new(other).ownership_of(&rule), expected);
                }
                assert!(names_network(&rule, &one.network) && !names_network(&rule, "ne"));
                assert!(had_link(&rule));
            }
            let gos = Rule::default().with_comment(comment(&id));
            assert_eq!(Identity::new(&marks[0]).ownership_of(&gos), Ownership::Container);
            assert!(!names_network(&gos, "net"));
        }
    }

    #[test]
    fn a_rule_without_a_tag_belongs_to_whom_it_leads() {
        let identity = Identity::new(&AttachmentId::new("net", "c", "eth0"));
        let list = [listed(1, Rule::default().with_comment("c"))];
        let (a, b): (IpAddr, IpAddr) = ("10.0.0.2".parse().unwrap(), "10.0.0.3".parse().unwrap());
        assert_eq!(identity.own_rules(&list, &[a], |_| Some(a)).len(), 1);
        assert_eq!(identity.own_rules(&list, &[b], |_| Some(a)).len(), 0);
        assert_eq!(identity.own_rules(&list, &[], |_| Some(a)).len(), 1);
        let other = Identity::new(&AttachmentId::new("net2", "c", "eth0"));
        let list = [list[0].clone(), listed(2, other.ownership_rules(&[1], "t").remove(0))];
        assert_eq!(identity.own_rules(&list, &[], |_| None).len(), 0, "another attachment speaks for it");
        assert_eq!(other.own_rules(&list, &[b], |_| Some(a)).len(), 2);
    }
}
