//! Masquerading in iptables' table `nat`, in the form of the Go plugins.
//!
//! `CNI-HASH` is `CNI-` and a hash of network and container, COMMENT is
//! `name: "NETWORK" id: "CONTAINER"`. Go writes all of these rules except the last:
//! ```text
//! -A POSTROUTING -s ADDRESS -m comment --comment COMMENT -j CNI-HASH
//! -A CNI-HASH -d NETWORK -m comment --comment COMMENT -j ACCEPT
//! -A CNI-HASH ! -d 224.0.0.0/4 -m comment --comment COMMENT -j MASQUERADE
//! -A CNI-HASH -s ADDRESS -d NETWORK -m comment --comment cni:NETWORK/CONTAINER/IFNAME
//! ```
//! All interfaces of the container in this network share the chain. The last rule, the *tag*, has
//! no target and is never reached. It records which attachment has the address, so that DEL of one
//! interface leaves the rules of another. Go does not read tags, and removes them with the chain. A
//! jump from POSTROUTING whose source is in no tag of the chain is *untagged*: Go wrote it (older
//! releases of Go wrote it as `-s NETWORK`).
//!
//! If a container has addresses of two networks in one family, both ACCEPT rules precede the
//! MASQUERADE rule. Go appends the second ACCEPT after it, where it is never reached.
//!
//! These functions only plan: they read [`Chains`] and return an [`Edit`].

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni::Cidr;
use cni::hash::sha512_hex;

use crate::iptables::{Chain, Chains, Edit, Rule};
use cni::AttachmentId;
use cni_linux::error::Result;
use cni_linux::route::Family;

pub(crate) const POSTROUTING: &str = "POSTROUTING";
const CHAIN_PREFIX: &str = "CNI-";
const CHAIN_DIGITS: usize = 24;
/// The longest comment, in bytes, that iptables accepts.
const COMMENT_MAX: usize = 255;

/// Returns the name of the container's chain in this network.
pub(super) fn chain_name(network: &str, container: &str) -> String {
    format!("{CHAIN_PREFIX}{}", sha512_hex(&[network.as_bytes(), container.as_bytes()], CHAIN_DIGITS))
}

/// Whether this is the name of a masquerading chain: `CNI-` and 24 hex digits. The names of other
/// chains of CNI plugins have a different form.
pub(crate) fn is_chain_name(name: &str) -> bool {
    name.strip_prefix(CHAIN_PREFIX)
        .is_some_and(|hash| hash.len() == CHAIN_DIGITS && hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Returns the comment of the container's rules in this network, as Go writes it, cut to the length
/// that iptables accepts. Valid names have no characters that would have to be escaped.
pub(crate) fn comment(network: &str, container: &str) -> String {
    let mut comment = format!("name: \"{network}\" id: \"{container}\"");
    let mut end = COMMENT_MAX.min(comment.len());
    while !comment.is_char_boundary(end) {
        end -= 1;
    }
    comment.truncate(end);
    comment
}

/// Returns the network and the container that a comment names; `None` if the comment was cut or has
/// a different form.
pub(crate) fn read_comment(comment: &str) -> Option<(&str, &str)> {
    comment.strip_prefix("name: \"")?.strip_suffix('"')?.split_once("\" id: \"")
}

/// Returns the family's multicast addresses: packets to them are never masqueraded.
pub(super) fn multicast(family: Family) -> Cidr {
    let network = match family {
        Family::V4 => Cidr::new(IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0)), 4),
        Family::V6 => Cidr::new(IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0)), 8),
    };
    // `network` is always `Some`, because both prefix lengths are valid.
    network.unwrap_or_else(|| Cidr::host(IpAddr::V4(Ipv4Addr::UNSPECIFIED)))
}

/// The name and the comments in the rules of an attachment.
struct RuleNames {
    /// The name of the container's chain.
    chain: String,
    /// The comment of the container's rules.
    comment: String,
    /// The attachment's alias, `cni:NETWORK/CONTAINER/IFNAME`: the comment of its tags.
    alias: String,
}

impl RuleNames {
    /// Returns the names for the attachment's rules.
    fn new(attachment: &AttachmentId) -> RuleNames {
        RuleNames {
            chain: chain_name(&attachment.network, &attachment.container_id),
            comment: comment(&attachment.network, &attachment.container_id),
            alias: attachment.alias(),
        }
    }

    /// Returns the words of a rule with these matches, the container's comment and this target.
    fn commented(&self, matches: &[&str], target: &str) -> Vec<String> {
        let comment_and_target = ["-m", "comment", "--comment", &self.comment, "-j", target];
        matches.iter().chain(&comment_and_target).map(|word| (*word).to_owned()).collect()
    }

    /// Returns the rule of POSTROUTING that sends the address's packets to the container's chain.
    fn jump(&self, address: Cidr) -> Vec<String> {
        self.commented(&["-s", &Cidr::host(address.address()).to_string()], &self.chain)
    }

    /// Returns the rule of the container's chain that lets packets to `network` keep their source.
    fn accept(&self, network: Cidr) -> Vec<String> {
        self.commented(&["-d", &network.to_string()], "ACCEPT")
    }

    /// Returns the rule of the container's chain that masquerades all other unicast packets.
    fn masquerade(&self, family: Family) -> Vec<String> {
        self.commented(&["!", "-d", &multicast(family).to_string()], "MASQUERADE")
    }

    /// Returns the rule without a target that records that the attachment has `address`.
    fn tag(&self, address: Cidr) -> Vec<String> {
        let source = Cidr::host(address.address()).to_string();
        let network = address.network().to_string();
        ["-s", &source, "-d", &network, "-m", "comment", "--comment", &self.alias].map(str::to_owned).into()
    }

    /// Whether `rule`, of POSTROUTING, sends packets of this container to its chain. The target is
    /// not enough: the hash has no separator, so network `ab` with container `c` and network `a`
    /// with container `bc` have the same chain.
    fn is_jump(&self, rule: &Rule) -> bool {
        rule.target() == Some(&self.chain) && rule.comment() == Some(&self.comment)
    }
}

/// Returns the rule's source address or network, if it matches one.
fn source(rule: &Rule) -> Option<Cidr> {
    rule.value("-s")?.parse().ok()
}

/// A rule without a target, as read from a container's chain, that records an attachment's address.
struct Tag {
    rule: Rule,
    /// The attachment's alias.
    alias: String,
    /// The address, as /32 or /128.
    source: Option<Cidr>,
    /// The network that the address is in.
    network: Option<Cidr>,
}

impl Tag {
    /// Reads a rule; `None` if it is not a tag.
    fn read(rule: &Rule) -> Option<Tag> {
        let comment = rule.comment()?;
        if rule.target().is_some() || !comment.starts_with("cni:") {
            return None;
        }
        let network = rule.value("-d").and_then(|network| network.parse().ok());
        Some(Tag { rule: rule.clone(), alias: comment.to_owned(), source: source(rule), network })
    }
}

/// Returns the edit after which exactly `addresses` are the attachment's masqueraded addresses, in
/// the family of `nat`.
pub(super) fn ensure(nat: &mut Chains<'_>, attachment: &AttachmentId, addresses: &[Cidr]) -> Result<Edit> {
    let names = RuleNames::new(attachment);
    let mut networks: Vec<Cidr> = Vec::new();
    for network in addresses.iter().map(Cidr::network) {
        if !networks.contains(&network) {
            networks.push(network);
        }
    }
    let Some(chain) = nat.chain(&names.chain)?.cloned() else {
        return Ok(create(&names, nat.family(), addresses, &networks));
    };
    let mut edit = Edit::new();
    add_missing_rules(&mut edit, &names, &chain, nat.family(), addresses, &networks);

    let (own_tags, other_tags): (Vec<Tag>, Vec<Tag>) =
        chain.rules.iter().filter_map(Tag::read).partition(|tag| tag.alias == names.alias);
    let requested_tags: Vec<Vec<String>> = addresses.iter().map(|address| names.tag(*address)).collect();
    let mut unused_networks: Vec<Cidr> = Vec::new();
    for tag in &own_tags {
        if requested_tags.iter().any(|words| tag.rule.matches(words)) {
            continue;
        }
        edit.delete(&names.chain, &tag.rule);
        let is_network_of_other = other_tags.iter().any(|other| other.network == tag.network);
        unused_networks.extend(tag.network.filter(|network| !networks.contains(network) && !is_network_of_other));
    }

    let requested_sources: Vec<Cidr> = addresses.iter().map(|address| Cidr::host(address.address())).collect();
    let mut has_untagged = false;
    let mut existing_sources: Vec<Cidr> = Vec::new();
    for jump in nat.rules_leading_to(POSTROUTING, &names.chain)?.iter().filter(|rule| names.is_jump(rule)) {
        let source = source(jump);
        // Two simultaneous ADDs of the Go plugin can both append the same rule.
        let is_duplicate = source.is_some_and(|source| existing_sources.contains(&source));
        let is_requested = source.is_some_and(|source| requested_sources.contains(&source));
        let has_own_tag = own_tags.iter().any(|tag| tag.source == source);
        let has_other_tag = other_tags.iter().any(|tag| tag.source == source);
        let is_stale = has_own_tag && !has_other_tag && !is_requested;
        has_untagged |= !has_own_tag && !has_other_tag;
        if is_duplicate || is_stale {
            edit.delete(POSTROUTING, jump);
        }
        existing_sources.extend(source);
    }
    // An untagged jump may need any ACCEPT rule.
    if !has_untagged {
        delete_accepts(&mut edit, &names.chain, &chain.rules, &unused_networks);
    }
    for address in addresses {
        if !existing_sources.contains(&Cidr::host(address.address())) {
            edit.append(POSTROUTING, names.jump(*address));
        }
    }
    Ok(edit)
}

/// Adds to `edit` the rules for `addresses`, which are in `networks`, that the container's existing
/// `chain` lacks.
fn add_missing_rules(
    edit: &mut Edit,
    names: &RuleNames,
    chain: &Chain,
    family: Family,
    addresses: &[Cidr],
    networks: &[Cidr],
) {
    let chain_has = |words: &[String]| chain.rules.iter().any(|rule| rule.matches(words));
    // The ACCEPT rules are inserted, not appended, because they must precede MASQUERADE.
    for network in networks.iter().rev() {
        let accept = names.accept(*network);
        if !chain_has(&accept) {
            edit.insert(&names.chain, accept);
        }
    }
    let masquerade = names.masquerade(family);
    if !chain_has(&masquerade) {
        edit.append(&names.chain, masquerade);
    }
    for address in addresses {
        let tag = names.tag(*address);
        if !chain_has(&tag) {
            edit.append(&names.chain, tag);
        }
    }
}

/// Returns the edit that creates a container's chain and all rules for `addresses`, which are in
/// `networks`. POSTROUTING, which can be long, is not read: a rule cannot jump to a chain that does
/// not exist.
fn create(names: &RuleNames, family: Family, addresses: &[Cidr], networks: &[Cidr]) -> Edit {
    let mut edit = Edit::new();
    edit.create_chain(&names.chain);
    for network in networks {
        edit.append(&names.chain, names.accept(*network));
    }
    edit.append(&names.chain, names.masquerade(family));
    for address in addresses {
        edit.append(&names.chain, names.tag(*address));
        edit.append(POSTROUTING, names.jump(*address));
    }
    edit
}

/// Which untagged jumps of the container are removed with an attachment.
#[derive(Clone, Copy)]
pub(super) enum Untagged<'a> {
    /// None.
    Keep,
    /// Those whose source covers one of these addresses of the attachment.
    Covering(&'a [IpAddr]),
    /// All, unless the attachment has tags: its addresses are unknown.
    UnlessTagged,
}

/// Returns the edit that removes the attachment's rules, with these untagged jumps.
pub(super) fn purge(nat: &mut Chains<'_>, attachment: &AttachmentId, untagged: Untagged<'_>) -> Result<Edit> {
    let names = RuleNames::new(attachment);
    let is_own = |alias: &str| alias == names.alias;
    let is_own_untagged = |source: Option<Cidr>, has_own_tags: bool| match untagged {
        Untagged::Keep => false,
        Untagged::Covering(addresses) => {
            source.is_some_and(|source| addresses.iter().any(|address| source.contains(*address)))
        }
        Untagged::UnlessTagged => !has_own_tags,
    };
    let Some(content) = nat.chain(&names.chain)?.cloned() else { return Ok(Edit::new()) };
    let jumps = nat.rules_leading_to(POSTROUTING, &names.chain)?;
    let chain = ContainerChain { name: &names.chain, content: &content, jumps: &jumps };
    Ok(remove(&chain, Some(&names), is_own, is_own_untagged))
}

/// Returns the edit that removes the rules of the attachments of `network` that are not in `valid`
/// (container ID, interface name). Untagged jumps stay while any interface of their container is
/// valid.
pub(super) fn gc(nat: &mut Chains<'_>, network: &str, valid: &[(&str, &str)]) -> Result<Edit> {
    let chains_of_valid: BTreeSet<String> = valid.iter().map(|(container, _)| chain_name(network, container)).collect();
    let valid_aliases: BTreeSet<String> =
        valid.iter().map(|(container, ifname)| AttachmentId::new(network, *container, *ifname).alias()).collect();
    let alias_prefix = AttachmentId::network_prefix(network);
    let comment_prefix = format!("name: \"{network}\" id: ");
    let mut edit = Edit::new();
    let chains = nat.read_chains_where(is_chain_name)?;
    // POSTROUTING, which can be long, is not read without need.
    if chains.is_empty() {
        return Ok(edit);
    }
    let all_jumps = nat.rules_by_target(POSTROUTING)?;
    for chain in chains {
        let Some(content) = nat.chain(&chain)? else { continue };
        let jumps = all_jumps.get(&chain).map_or(&[][..], Vec::as_slice);
        let comments: Vec<&str> = jumps.iter().chain(&content.rules).filter_map(Rule::comment).collect();
        let is_of_network = |comment: &&str| comment.starts_with(&comment_prefix) || comment.starts_with(&alias_prefix);
        // The chain's name is only a hash: the comments decide which network it belongs to.
        if comments.is_empty() || !comments.iter().all(is_of_network) {
            continue;
        }
        let is_garbage = |alias: &str| !valid_aliases.contains(alias);
        let container_is_valid = chains_of_valid.contains(&chain);
        // All comments were checked above.
        let names = None;
        let chain = ContainerChain { name: &chain, content, jumps };
        edit.extend(remove(&chain, names, is_garbage, |_, _| !container_is_valid));
    }
    Ok(edit)
}

/// A container's chain, with all rules of POSTROUTING that jump to it.
struct ContainerChain<'c> {
    name: &'c str,
    content: &'c Chain,
    jumps: &'c [Rule],
}

/// Returns the edit that removes rules from a container's `chain` and from POSTROUTING. The chain
/// is removed if no jump and no tag remains.
///
/// - `is_garbage(alias)`: whether the rules of the attachment with this alias are removed.
/// - `is_untagged_garbage(source, has_garbage_tags)`: whether an untagged jump with this source is
///   removed. `has_garbage_tags` is whether a tag of the chain has an alias for which `is_garbage`
///   is true.
/// - `names`: if given, only jumps with the comment of this container are removed, because another
///   container can have a chain of the same name ([`RuleNames::is_jump`]).
fn remove(
    chain: &ContainerChain<'_>,
    names: Option<&RuleNames>,
    is_garbage: impl Fn(&str) -> bool,
    is_untagged_garbage: impl Fn(Option<Cidr>, bool) -> bool,
) -> Edit {
    let mut edit = Edit::new();
    let ContainerChain { name, content, jumps } = *chain;
    let (garbage_tags, remaining_tags): (Vec<Tag>, Vec<Tag>) =
        content.rules.iter().filter_map(Tag::read).partition(|tag| is_garbage(&tag.alias));
    let (mut has_remaining_jump, mut has_remaining_untagged) = (false, false);
    let mut remaining_sources: Vec<Cidr> = Vec::new();
    for jump in jumps {
        let source = source(jump);
        let is_of_other_container = names.is_some_and(|names| !names.is_jump(jump));
        let has_remaining_tag = remaining_tags.iter().any(|tag| tag.source == source);
        let has_garbage_tag = garbage_tags.iter().any(|tag| tag.source == source);
        let is_jump_garbage = if is_of_other_container {
            false
        } else if has_remaining_tag {
            // A remaining attachment needs one jump with this source: only duplicates are removed.
            source.is_some_and(|source| remaining_sources.contains(&source))
        } else if has_garbage_tag {
            true
        } else {
            let is_untagged_garbage = is_untagged_garbage(source, !garbage_tags.is_empty());
            has_remaining_untagged |= !is_untagged_garbage;
            is_untagged_garbage
        };
        if is_jump_garbage {
            edit.delete(POSTROUTING, jump);
        } else {
            remaining_sources.extend(source);
            has_remaining_jump = true;
        }
    }
    if !has_remaining_jump && remaining_tags.is_empty() {
        edit.delete_chain(name, content);
        return edit;
    }
    for tag in &garbage_tags {
        edit.delete(name, &tag.rule);
    }
    // An untagged jump may need any ACCEPT rule.
    if has_remaining_untagged {
        return edit;
    }
    let unused_networks: Vec<Cidr> = garbage_tags
        .iter()
        .filter_map(|tag| tag.network)
        .filter(|network| !remaining_tags.iter().any(|tag| tag.network == Some(*network)))
        .collect();
    delete_accepts(&mut edit, name, &content.rules, &unused_networks);
    edit
}

/// Adds to `edit` the removal of the ACCEPT rules for `networks` from `chain`, which contains
/// `rules`. Must not be called if an untagged jump remains: the jump does not name its network, and
/// may need any of these rules.
fn delete_accepts(edit: &mut Edit, chain: &str, rules: &[Rule], networks: &[Cidr]) {
    for rule in rules.iter().filter(|rule| rule.target() == Some("ACCEPT")) {
        let destination: Option<Cidr> = rule.value("-d").and_then(|network| network.parse().ok());
        if destination.is_some_and(|network| networks.contains(&network)) {
            edit.delete(chain, rule);
        }
    }
}

/// Returns a sentence for each rule of the attachment that is missing in the family of `nat`; empty
/// if none. Accepts rules of any program.
pub(super) fn check(nat: &mut Chains<'_>, attachment: &AttachmentId, addresses: &[Cidr]) -> Result<Vec<String>> {
    let names = RuleNames::new(attachment);
    let Some(chain) = nat.chain(&names.chain)?.cloned() else {
        return Ok(vec![format!("iptables chain {} is missing from table nat", names.chain)]);
    };
    let mut required: Vec<Vec<String>> = addresses.iter().map(|address| names.accept(address.network())).collect();
    required.push(names.masquerade(nat.family()));
    let mut missing = Vec::new();
    for words in required {
        if !chain.rules.iter().any(|rule| rule.matches(&words)) {
            missing.push(format!("iptables chain {} has no rule {}", names.chain, words.join(" ")));
        }
    }
    let jumps = nat.rules_leading_to(POSTROUTING, &names.chain)?;
    let sources: Vec<Cidr> = jumps.iter().filter(|rule| names.is_jump(rule)).filter_map(source).collect();
    for address in addresses {
        let host = address.address();
        // Older releases of Go wrote the network as the source.
        if !sources.contains(&Cidr::host(host)) && !sources.contains(&address.network()) {
            missing.push(format!("iptables chain {POSTROUTING} has no rule that sends {host} to {}", names.chain));
        }
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iptables::Table;

    /// Returns the chains with the rules of this many attachments of the network `net`.
    fn attached(count: usize) -> String {
        let mut saved = String::new();
        for i in 0..count {
            let attachment = AttachmentId::new("net", format!("c{i}"), "eth0");
            let (chain, comment) = (chain_name("net", &attachment.container_id), format!("name: \"net\" id: \"c{i}\""));
            let comment = crate::iptables::quote(&comment).unwrap();
            let (source, alias) = (format!("10.1.{}.{}/32", i / 250, i % 250 + 2), attachment.alias());
            saved += &format!(
                ":{chain} - [0:0]\n\
                 -A POSTROUTING -s {source} -m comment --comment {comment} -j {chain}\n\
                 -A {chain} -d 10.1.0.0/16 -m comment --comment {comment} -j ACCEPT\n\
                 -A {chain} -s {source} -d 10.1.0.0/16 -m comment --comment {alias}\n"
            );
        }
        saved
    }

    #[test]
    fn gc_takes_time_in_proportion_to_the_chains() {
        let plan = |count: usize, saved: &str, valid: usize| {
            let ids: Vec<String> = (0..valid).map(|i| format!("c{i}")).collect();
            let valid: Vec<(&str, &str)> = ids.iter().map(|id| (id.as_str(), "eth0")).collect();
            let mut nat = Chains::of_text(Table::Nat, Family::V4, saved);
            let edit = gc(&mut nat, "net", &valid).unwrap();
            assert_eq!(edit.deleted_chains.len(), count - valid.len());
        };
        let (few, many) = (attached(200), attached(800));
        cni_testkit::assert_cost_below(8, || plan(200, &few, 0), || plan(800, &many, 0));
        cni_testkit::assert_cost_below(8, || plan(200, &few, 200), || plan(800, &many, 800));
    }

    #[test]
    fn names_and_comments_are_gos() {
        // Computed with `sha512sum`.
        assert_eq!(chain_name("mynet", "ctr1"), "CNI-5145007e2a8415ce07579739");
        assert_eq!(comment("mynet", "ctr1"), r#"name: "mynet" id: "ctr1""#);
        assert_eq!(comment(&"n".repeat(200), &"c".repeat(200)).len(), COMMENT_MAX);
        assert!(is_chain_name("CNI-5145007e2a8415ce07579739"));
        for other in ["CNI-DN-45007e2a8415ce0757973", "CNI-HOSTPORT-MASQ", "CNI-", "CNI-5145007e2a8415ce0757973"] {
            assert!(!is_chain_name(other), "{other}");
        }
    }

    #[test]
    fn multicast_is_what_go_leaves_alone() {
        assert_eq!(multicast(Family::V4).to_string(), "224.0.0.0/4");
        assert_eq!(multicast(Family::V6).to_string(), "ff00::/8");
    }
}
