//! Writes the name of the attachment into a rule of nftables, and reads the rules of containers
//! with these names.
//!
//! Go's plugin finds a container's rules by their comment, which is only the container ID. The
//! network and the interface are in a tag, a field beside the comment that `nft` does not print:
//! the alias of the attachment, or two hashes if the alias does not fit beside a long ID.
//!
//! A rule without a tag was written by a Go plugin, or by the program `nft`: for conditions that
//! only `nft` compiles, or when it restored a saved ruleset. The attachment of such a rule is found
//! by the address that the rule leads to.

use std::net::IpAddr;

use cni::hash::sha512;
use cni::steps::hex;

use super::shape::{self, CONTAINER_CHAINS, HOSTIP_HOSTPORTS, HOSTPORTS, MASQUERADING};
use super::{ClaimedPort, FamilyRequest};
use crate::iptables::FAMILIES;
use crate::nft::userdata::{self, comment_len, tag_len};
use crate::nft::{Chain, IfMissing, Key, Listed, Nft, Rule, Search, has_any_pair, mentions};
use crate::owner::{NETWORK_HASH_LEN, OwnerForm, OwnerTag, TAG_ALIAS, TAG_HASHES, network_hash, shortened};
use cni::AttachmentId;
use cni::cidr::octets;
use cni_linux::error::Result;
use cni_linux::route::Family;

/// An empty tag: a link on the host had the alias when the rule was made. If no link has the alias
/// now, the container is dead.
const TAG_HAD_LINK: u8 = 0x82;
/// The bytes of the alias's hash in [`TAG_HASHES`], after that of the network.
const ALIAS_LEN: usize = 16;
/// The length of the smallest set of tags: [`TAG_HASHES`], and [`TAG_HAD_LINK`] without a value.
const TAGS_MIN: usize = tag_len(NETWORK_HASH_LEN + ALIAS_LEN) + tag_len(0);
/// The longest container ID that fits whole into the comment beside these tags.
const PLAIN_ID_MAX: usize = userdata::MAX - comment_len("") - TAGS_MIN;

/// The names of one attachment in rules.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// The comment that Go searches for.
    pub(super) comment: String,
    alias: String,
    network: String,
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

impl Identity {
    /// Returns the names of this attachment.
    pub(crate) fn new(attachment: &AttachmentId) -> Identity {
        let comment = comment(&attachment.container_id);
        Identity { comment, alias: attachment.alias(), network: attachment.network.clone() }
    }

    /// Returns the value of [`TAG_HASHES`].
    fn hashes(&self) -> Vec<u8> {
        let mut bytes = network_hash(&self.network);
        bytes.extend(&sha512(&[self.alias.as_bytes()])[..ALIAS_LEN]);
        bytes
    }

    /// Adds the comment and the tags to a rule. `host_link` is the link on the host that has the
    /// attachment's alias now; the rule records only whether there is one.
    pub(super) fn sign(&self, rule: Rule, host_link: Option<&str>) -> Rule {
        // The second tag is TAG_HAD_LINK, which has no value.
        let used_bytes = comment_len(&self.comment) + tag_len(self.alias.len()) + tag_len(0);
        let rule = rule.with_comment(self.comment.clone());
        let rule = if used_bytes <= userdata::MAX {
            rule.with_tag(TAG_ALIAS, self.alias.clone())
        } else {
            rule.with_tag(TAG_HASHES, self.hashes())
        };
        if host_link.is_some() { rule.with_tag(TAG_HAD_LINK, []) } else { rule }
    }

    /// Returns whether a rule belongs to this attachment, by the rule's comment and tags.
    pub(crate) fn ownership_of(&self, rule: &Rule) -> Ownership {
        if rule.comment.as_deref() != Some(&self.comment) {
            return Ownership::Other;
        }
        let is_this = match OwnerTag::of(rule) {
            OwnerTag::Alias(alias) => alias == self.alias,
            OwnerTag::Hashes(hashes) => hashes == self.hashes(),
            OwnerTag::Missing => return Ownership::Container,
        };
        if is_this { Ownership::This } else { Ownership::Other }
    }

    /// Whether a rule is this attachment's; `addresses` are the attachment's known addresses.
    ///
    /// A rule that names only the container is this attachment's if it leads to one of `addresses`
    /// or does not show its address, or if `addresses` is empty. Then only the container is
    /// compared, as Go's plugin does.
    pub(super) fn owns(&self, rule: &Rule, addresses: &[IpAddr]) -> bool {
        match self.ownership_of(rule) {
            Ownership::This => true,
            Ownership::Other => false,
            Ownership::Container => match shape::container(rule) {
                Some(address) => addresses.is_empty() || addresses.contains(&address),
                None => true,
            },
        }
    }

    /// Whether a rule names only this container, and leads to none of `addresses`.
    pub(super) fn leads_elsewhere(&self, rule: &Rule, addresses: &[IpAddr]) -> bool {
        self.ownership_of(rule) == Ownership::Container && !self.owns(rule, addresses)
    }
}

/// The form of the owners in [`TAG_HASHES`], as hex digits.
pub(super) const HASHES: OwnerForm = OwnerForm {
    name: |attachment| hex(&Identity::new(attachment).hashes()),
    prefixes: |network| vec![hex(&network_hash(network))],
};

/// Returns the comment for a container ID: the ID, [`shortened`] if it is longer than
/// [`PLAIN_ID_MAX`]. `nft` and Go's plugin refuse such a long ID.
pub(super) fn comment(container_id: &str) -> String {
    shortened(container_id, PLAIN_ID_MAX)
}

/// Returns the name of the attachment that a rule belongs to, and the function that returns the
/// name of an attachment in the same form: the tag or, without a tag, only the comment.
pub(crate) fn owner_name(rule: &Rule) -> (String, fn(&AttachmentId) -> String) {
    match OwnerTag::of(rule) {
        OwnerTag::Alias(alias) => (alias, AttachmentId::alias),
        OwnerTag::Hashes(hashes) => (hex(&hashes), HASHES.name),
        OwnerTag::Missing => (rule.comment.clone().unwrap_or_default(), |attachment| comment(&attachment.container_id)),
    }
}

/// Whether a link on the host had the attachment's alias when the rule was made.
pub(super) fn had_link(rule: &Rule) -> bool {
    rule.tag(TAG_HAD_LINK).is_some()
}

/// A rule of a container.
#[derive(Clone, Debug)]
pub(super) struct ContainerRule {
    pub(super) family: Family,
    /// One of [`CONTAINER_CHAINS`].
    pub(super) chain: &'static str,
    pub(super) listed: Listed,
}

impl ContainerRule {
    /// Returns the claim of a mapping; `None` for any other rule.
    pub(super) fn claim(&self) -> Option<ClaimedPort> {
        shape::read_mapping(&self.listed.rule).map(|(claim, _)| claim)
    }
}

/// Reads the rules of containers in one family that have one of these keys; other rules can be
/// among them. `chains` are the chains that exist; [`HOSTIP_HOSTPORTS`] may be left out. `extended`
/// names the chains to which the caller appends the rules that are not found. Only of these chains,
/// an index that lacks a key is trusted ([`IfMissing::TrustIndex`]).
pub(super) fn read_rules(
    nft: &mut Nft,
    family: Family,
    chains: &[Chain],
    keys: &[Key],
    extended: &[&str],
) -> Result<Vec<ContainerRule>> {
    let (table, mut rules) = (shape::table(family), Vec::new());
    for name in CONTAINER_CHAINS {
        let listed = match chains.iter().find(|chain| chain.name == name) {
            // Read even if `chains` lacks this chain: a missing chain has no rules. The chain needs
            // no index, because it is short: only older releases of Go add rules to it. If none of
            // the other chains exists, this one does not either.
            _ if name == HOSTIP_HOSTPORTS && !chains.is_empty() => {
                let mut rules_of_chain = nft.rules(table, name)?;
                rules_of_chain.retain(|listed| shape::keys(listed).iter().any(|key| keys.contains(key)));
                rules_of_chain
            }
            Some(chain) => {
                let if_missing = if extended.contains(&name) { IfMissing::TrustIndex } else { IfMissing::ReadAll };
                let search = Search { keys_of: shape::keys, appended: &[], wanted: keys, if_missing };
                nft.rules_with_keys(table, chain, search)?
            }
            None => continue,
        };
        rules.extend(listed.into_iter().map(|listed| ContainerRule { family, chain: name, listed }));
    }
    Ok(rules)
}

/// Reads the rules of one family that contain a wanted port or the container's address; other rules
/// can be among them, because the bytes of rules are searched. Uses no index: the kernel reports
/// that an index lacks rules only to a caller that appends rules.
pub(super) fn read_conflicting(nft: &mut Nft, request: &FamilyRequest<'_>) -> Result<Vec<ContainerRule>> {
    // Mostly the chain does not exist, which one request shows.
    if nft.find_chain(shape::table(request.family), HOSTPORTS)?.is_none() {
        return Ok(Vec::new());
    }
    let address_bytes = octets(request.container.address());
    let ports: Vec<[u8; 2]> = request.claims.iter().map(|claim| claim.host_port.to_be_bytes()).collect();
    read_rules_where(nft, request.family, |rule| has_any_pair(rule, &ports) || mentions(rule, &address_bytes))
}

/// Reads the rules of containers in one family for which `is_wanted` is true, given the bytes of a
/// rule. This is one list of the table, not one for each chain.
pub(super) fn read_rules_where(
    nft: &mut Nft,
    family: Family,
    is_wanted: impl Fn(&[u8]) -> bool,
) -> Result<Vec<ContainerRule>> {
    let find_chain = |name: &[u8]| CONTAINER_CHAINS.into_iter().find(|chain| chain.as_bytes() == name);
    let is_read = |chain: &[u8], rule: &[u8]| find_chain(chain).is_some() && is_wanted(rule);
    let mut rules = Vec::new();
    for (name, listed) in nft.rules_of_table(shape::table(family), is_read)? {
        rules.extend(find_chain(name.as_bytes()).map(|chain| ContainerRule { family, chain, listed }));
    }
    Ok(rules)
}

/// Reads the rules in both families that have this container's comment, also those of its other
/// attachments: the caller asks [`Identity::ownership_of`]. Other rules can be among them.
pub(super) fn rules_naming_container(nft: &mut Nft, identity: &Identity) -> Result<Vec<ContainerRule>> {
    let (keys, mut rules) = ([Key::comment(&identity.comment)], Vec::new());
    for family in FAMILIES {
        let mut chains = Vec::new();
        // `read_rules` does not need HOSTIP_HOSTPORTS in `chains`.
        for name in [HOSTPORTS, MASQUERADING] {
            chains.extend(nft.find_chain(shape::table(family), name)?);
        }
        rules.extend(read_rules(nft, family, &chains, &keys, &[])?);
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::portmap::Snat;

    fn signed(attachment: &AttachmentId) -> Rule {
        Identity::new(attachment).sign(Rule::default(), Some("veth1"))
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
                let tag = OwnerTag::of(&rule);
                assert_eq!([&*one.network, "ne"].map(|network| tag.is_of_network(network)), [Some(true), Some(false)]);
                assert!(had_link(&rule));
            }
            let gos = Rule::default().with_comment(comment(&id));
            assert_eq!(Identity::new(&marks[0]).ownership_of(&gos), Ownership::Container);
            assert_eq!(OwnerTag::of(&gos), OwnerTag::Missing);
        }
    }

    #[test]
    fn a_rule_without_a_tag_belongs_to_whom_it_leads() {
        let identity = Identity::new(&AttachmentId::new("net", "c", "eth0"));
        let (a, b): (IpAddr, IpAddr) = ("10.0.0.2".parse().unwrap(), "10.0.0.3".parse().unwrap());
        let to_a = Rule::new(shape::masquerade_rules(a, Snat::All).remove(0)).with_comment("c");
        for (addresses, is_own) in [(&[a][..], true), (&[b], false), (&[], true)] {
            assert_eq!(identity.owns(&to_a, addresses), is_own, "{addresses:?}");
            assert_eq!(identity.leads_elsewhere(&to_a, addresses), !is_own, "{addresses:?}");
        }
        let without_address = Rule::default().with_comment("c");
        assert!(identity.owns(&without_address, &[b]));
    }
}
