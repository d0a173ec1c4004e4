//! Masquerading in iptables' table `nat`, as Go has it, with C for `CNI-` and a hash of network and
//! container, X for `name: "NETWORK" id: "CONTAINER"`, and one line of our own, the last:
//! ```text
//! -A POSTROUTING -s ADDRESS -m comment --comment X -j C
//! -A C -d NETWORK -m comment --comment X -j ACCEPT
//! -A C ! -d 224.0.0.0/4 -m comment --comment X -j MASQUERADE
//! -A C -s ADDRESS -d NETWORK -m comment --comment cni:NETWORK/CONTAINER/IFNAME
//! ```
//! The chain belongs to the container, not to the interface. The last line, which has no target and
//! is never reached, records whose the address is, so that two interfaces on one network can be
//! removed one after the other. Go never reads it and removes it with the chain. Rules without it
//! are Go's (older releases wrote `-s NETWORK` into POSTROUTING).
//!
//! With two networks of one family both ACCEPTs stand before MASQUERADE; Go appends the second
//! where it is never reached.
//!
//! Pure planning: these functions read a [`Chains`] and return an [`Edit`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni::Cidr;
use cni::hash::sha512_hex;

use crate::iptables::{Chains, Edit, Rule};
use cni::AttachmentId;
use cni_linux::error::Result;
use cni_linux::route::Family;

pub(crate) const POSTROUTING: &str = "POSTROUTING";
const CHAIN_PREFIX: &str = "CNI-";
const CHAIN_DIGITS: usize = 24;
/// iptables takes 255 bytes.
const COMMENT_MAX: usize = 255;

/// The container's chain in this network.
pub(super) fn chain_name(network: &str, container: &str) -> String {
    format!("{CHAIN_PREFIX}{}", sha512_hex(&[network.as_bytes(), container.as_bytes()], CHAIN_DIGITS))
}

/// `CNI-` and 24 hex digits: no other chain of CNI plugins looks so.
pub(crate) fn is_chain_name(name: &str) -> bool {
    name.strip_prefix(CHAIN_PREFIX)
        .is_some_and(|hash| hash.len() == CHAIN_DIGITS && hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The comment that Go's rules and ours bear. Neither name has characters that would have to be
/// escaped.
pub(crate) fn comment(network: &str, container: &str) -> String {
    let mut comment = format!("name: \"{network}\" id: \"{container}\"");
    let mut end = COMMENT_MAX.min(comment.len());
    while !comment.is_char_boundary(end) {
        end -= 1;
    }
    comment.truncate(end);
    comment
}

/// Where nothing is ever masqueraded to.
pub(super) fn multicast(family: Family) -> Cidr {
    let network = match family {
        Family::V4 => Cidr::new(IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0)), 4),
        Family::V6 => Cidr::new(IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0)), 8),
    };
    network.unwrap_or_else(|| Cidr::host(IpAddr::V4(Ipv4Addr::UNSPECIFIED)))
}

/// The rules of one container in one network.
struct Shape {
    chain: String,
    comment: String,
    tag: String,
}

impl Shape {
    fn new(mark: &AttachmentId) -> Shape {
        Shape {
            chain: chain_name(&mark.network, &mark.container_id),
            comment: comment(&mark.network, &mark.container_id),
            tag: mark.alias(),
        }
    }

    fn commented(&self, matches: &[&str], target: &str) -> Vec<String> {
        let tail = ["-m", "comment", "--comment", &self.comment, "-j", target];
        matches.iter().chain(&tail).map(|word| (*word).to_owned()).collect()
    }

    fn jump(&self, address: Cidr) -> Vec<String> {
        self.commented(&["-s", &Cidr::host(address.address()).to_string()], &self.chain)
    }

    fn accept(&self, network: Cidr) -> Vec<String> {
        self.commented(&["-d", &network.to_string()], "ACCEPT")
    }

    fn masquerade(&self, family: Family) -> Vec<String> {
        self.commented(&["!", "-d", &multicast(family).to_string()], "MASQUERADE")
    }

    fn tag(&self, address: Cidr) -> Vec<String> {
        let source = Cidr::host(address.address()).to_string();
        let network = address.network().to_string();
        ["-s", &source, "-d", &network, "-m", "comment", "--comment", &self.tag].map(str::to_owned).into()
    }

    /// Whether the rule of POSTROUTING leads this container's packets to its chain. The comment is
    /// asked too: two pairs of network and container can have one chain (`ab`, `c` and `a`, `bc`).
    fn is_jump(&self, rule: &Rule) -> bool {
        rule.target() == Some(&self.chain) && rule.comment() == Some(&self.comment)
    }
}

/// The rule's source.
fn source(rule: &Rule) -> Option<Cidr> {
    rule.value("-s")?.parse().ok()
}

/// A tag: whose, for which address, in which network.
struct Tag {
    rule: Rule,
    whose: String,
    source: Option<Cidr>,
    network: Option<Cidr>,
}

impl Tag {
    fn read(rule: &Rule) -> Option<Tag> {
        let whose = rule.comment().filter(|comment| rule.target().is_none() && comment.starts_with("cni:"))?.to_owned();
        let network = rule.value("-d").and_then(|network| network.parse().ok());
        Some(Tag { rule: rule.clone(), whose, source: source(rule), network })
    }
}

/// Returns the edit that makes these the attachment's addresses, in the family of `nat`.
pub(super) fn ensure(nat: &mut Chains<'_>, mark: &AttachmentId, addresses: &[Cidr]) -> Result<Edit> {
    let (family, shape) = (nat.family(), Shape::new(mark));
    let mut edit = Edit::new();
    let mut networks: Vec<Cidr> = Vec::new();
    for network in addresses.iter().map(Cidr::network) {
        if !networks.contains(&network) {
            networks.push(network);
        }
    }
    let Some(chain) = nat.chain(&shape.chain)?.cloned() else {
        // Without the chain nothing can lead to it, and POSTROUTING, however long, need not be
        // read.
        edit.create_chain(&shape.chain);
        for network in &networks {
            edit.append(&shape.chain, shape.accept(*network));
        }
        edit.append(&shape.chain, shape.masquerade(family));
        for address in addresses {
            edit.append(&shape.chain, shape.tag(*address));
            edit.append(POSTROUTING, shape.jump(*address));
        }
        return Ok(edit);
    };
    let (own, others): (Vec<Tag>, Vec<Tag>) =
        chain.rules.iter().filter_map(Tag::read).partition(|tag| tag.whose == shape.tag);
    let has = |words: &[String]| chain.rules.iter().any(|rule| rule.matches(words));
    // Before MASQUERADE, wherever that is.
    for network in networks.iter().rev() {
        let accept = shape.accept(*network);
        if !has(&accept) {
            edit.insert(&shape.chain, accept);
        }
    }
    let masquerade = shape.masquerade(family);
    if !has(&masquerade) {
        edit.append(&shape.chain, masquerade);
    }
    for address in addresses {
        let tag = shape.tag(*address);
        if !has(&tag) {
            edit.append(&shape.chain, tag);
        }
    }
    let is_wanted = |source: Option<Cidr>| addresses.iter().any(|wanted| Some(Cidr::host(wanted.address())) == source);
    let is_anothers = |source: Option<Cidr>| others.iter().any(|tag| tag.source == source);
    for stale in own.iter().filter(|tag| !is_wanted(tag.source)) {
        edit.delete(&shape.chain, &stale.rule);
    }
    let mut there: Vec<Cidr> = Vec::new();
    for jump in nat.rules_leading_to(POSTROUTING, &shape.chain)?.iter().filter(|rule| shape.is_jump(rule)) {
        let from = source(jump);
        match from {
            // Doubled by two ADDs of Go that raced.
            Some(from) if there.contains(&from) => edit.delete(POSTROUTING, jump),
            Some(from) => there.push(from),
            None => {}
        }
        let stale = own.iter().any(|tag| tag.source == from) && !is_wanted(from) && !is_anothers(from);
        if stale {
            edit.delete(POSTROUTING, jump);
        }
    }
    for address in addresses.iter().filter(|address| !there.contains(&Cidr::host(address.address()))) {
        edit.append(POSTROUTING, shape.jump(*address));
    }
    Ok(edit)
}

/// The rules that an attachment had in one family before an ADD.
#[derive(Clone, Debug, Default)]
pub(super) struct FamilyRules {
    /// The addresses in its tags, with their networks.
    tagged: Vec<Cidr>,
    /// The sources of the jumps without a tag: rules that Go made.
    untagged: Vec<Cidr>,
}

impl FamilyRules {
    /// Reads the rules for the attachment and for the addresses that an ADD is about to give it.
    pub(super) fn read(nat: &mut Chains<'_>, mark: &AttachmentId, addresses: &[Cidr]) -> Result<FamilyRules> {
        let shape = Shape::new(mark);
        let Some(chain) = nat.chain(&shape.chain)?.cloned() else { return Ok(FamilyRules::default()) };
        let tags: Vec<Tag> = chain.rules.iter().filter_map(Tag::read).collect();
        let own = tags.iter().filter(|tag| tag.whose == shape.tag);
        let with_network = |tag: &Tag| Cidr::new(tag.source?.address(), tag.network?.prefix());
        let jumps = nat.rules_leading_to(POSTROUTING, &shape.chain)?;
        let untagged = jumps.iter().filter(|rule| shape.is_jump(rule)).filter_map(source).filter(|from| {
            tags.iter().all(|tag| tag.source != Some(*from)) && addresses.iter().any(|ip| from.contains(ip.address()))
        });
        Ok(FamilyRules { tagged: own.filter_map(with_network).collect(), untagged: untagged.collect() })
    }

    /// Returns the edit that undoes an [`ensure`] of these addresses.
    pub(super) fn put_back(&self, nat: &mut Chains<'_>, mark: &AttachmentId, addresses: &[Cidr]) -> Result<Edit> {
        if !self.tagged.is_empty() {
            return ensure(nat, mark, &self.tagged);
        }
        if self.untagged.is_empty() {
            return purge(nat, mark, &addresses.iter().map(Cidr::address).collect::<Vec<_>>());
        }
        // Go's rules cover the address again once our tags are removed.
        let shape = Shape::new(mark);
        let mut edit = Edit::new();
        for rule in
            nat.rules(&shape.chain)?.iter().filter(|rule| Tag::read(rule).is_some_and(|tag| tag.whose == shape.tag))
        {
            edit.delete(&shape.chain, rule);
        }
        let added = |rule: &&Rule| source(rule).is_some_and(|from| !self.untagged.contains(&from));
        let is_ours = |rule: &&Rule| addresses.iter().any(|ip| source(rule) == Some(Cidr::host(ip.address())));
        let jumps = nat.rules_leading_to(POSTROUTING, &shape.chain)?;
        for jump in jumps.iter().filter(|rule| shape.is_jump(rule)).filter(added).filter(is_ours) {
            edit.delete(POSTROUTING, jump);
        }
        Ok(edit)
    }
}

/// Returns the edit that removes the attachment's rules.
pub(super) fn purge(nat: &mut Chains<'_>, mark: &AttachmentId, addresses: &[IpAddr]) -> Result<Edit> {
    let shape = Shape::new(mark);
    remove(
        nat,
        &shape.chain,
        Some(&shape),
        |whose| whose == shape.tag,
        |source, anything_tagged| {
            if !addresses.is_empty() {
                return source.is_some_and(|source| addresses.iter().any(|address| source.contains(*address)));
            }
            // If there are marked rules, unmarked ones are not taken.
            !anything_tagged
        },
    )
}

/// Returns the edit that removes the rules of attachments of `network` that are not in `valid`.
pub(super) fn gc(nat: &mut Chains<'_>, network: &str, valid: &[(&str, &str)]) -> Result<Edit> {
    let valid_chains: Vec<String> = valid.iter().map(|(container, _)| chain_name(network, container)).collect();
    let valid_tags: Vec<String> =
        valid.iter().map(|(container, ifname)| AttachmentId::new(network, *container, *ifname).alias()).collect();
    let tag_prefix = AttachmentId::network_prefix(network);
    let comment_prefix = format!("name: \"{network}\" id: ");
    let mut edit = Edit::new();
    let mut names = nat.chain_names(CHAIN_PREFIX)?;
    names.retain(|name| is_chain_name(name));
    for name in names {
        let leading: Vec<Rule> =
            nat.rules(POSTROUTING)?.iter().filter(|rule| rule.target() == Some(&name)).cloned().collect();
        let inside = nat.rules(&name)?.to_vec();
        let mut comments = leading.iter().chain(&inside).filter_map(Rule::comment).peekable();
        // It names another network, or none: not ours to judge.
        if comments.peek().is_none()
            || !comments.all(|comment| comment.starts_with(&comment_prefix) || comment.starts_with(&tag_prefix))
        {
            continue;
        }
        let container_is_valid = valid_chains.contains(&name);
        let part =
            remove(nat, &name, None, |whose| !valid_tags.iter().any(|tag| tag == whose), |_, _| !container_is_valid)?;
        edit.extend(part);
    }
    Ok(edit)
}

/// Removes from a container's chain, and from POSTROUTING, the attachments that `is_garbage` by
/// their tags, and the jumps without a tag that are `unmarked_is_garbage`, given their source and
/// whether any garbage was tagged. The chain is removed if no rule leads to it and it has no
/// tags.
fn remove(
    nat: &mut Chains<'_>,
    name: &str,
    shape: Option<&Shape>,
    is_garbage: impl Fn(&str) -> bool,
    unmarked_is_garbage: impl Fn(Option<Cidr>, bool) -> bool,
) -> Result<Edit> {
    let mut edit = Edit::new();
    let Some(chain) = nat.chain(name)?.cloned() else { return Ok(edit) };
    let (garbage, others): (Vec<Tag>, Vec<Tag>) =
        chain.rules.iter().filter_map(Tag::read).partition(|tag| is_garbage(&tag.whose));
    let (mut jumps_left, mut unmarked_left) = (0, 0);
    let mut kept: Vec<Cidr> = Vec::new();
    for jump in &nat.rules_leading_to(POSTROUTING, name)? {
        let from = source(jump);
        let goes = if shape.is_some_and(|shape| !shape.is_jump(jump)) {
            false
        } else if others.iter().any(|tag| tag.source == from) {
            // Another attachment's; one such rule is enough.
            from.is_some_and(|from| kept.contains(&from))
        } else if garbage.iter().any(|tag| tag.source == from) {
            true
        } else {
            let goes = unmarked_is_garbage(from, !garbage.is_empty());
            unmarked_left += usize::from(!goes);
            goes
        };
        if goes {
            edit.delete(POSTROUTING, jump);
        } else {
            kept.extend(from);
            jumps_left += 1;
        }
    }
    if jumps_left == 0 && others.is_empty() {
        edit.delete_chain(name, &chain);
        return Ok(edit);
    }
    for tag in &garbage {
        edit.delete(name, &tag.rule);
    }
    // Their networks too, unless another attachment is in them; Go's rules do not say in which
    // they are.
    if unmarked_left == 0 {
        let networks = garbage.iter().filter_map(|tag| tag.network);
        let networks: Vec<Cidr> =
            networks.filter(|network| !others.iter().any(|tag| tag.network == Some(*network))).collect();
        let is_their_accept = |rule: &&Rule| {
            let to = rule.value("-d").and_then(|to| to.parse::<Cidr>().ok());
            rule.target() == Some("ACCEPT") && to.is_some_and(|to| networks.contains(&to))
        };
        for rule in chain.rules.iter().filter(is_their_accept) {
            edit.delete(name, rule);
        }
    }
    Ok(edit)
}

/// Returns a sentence for each rule that is missing. Rules made by another program count.
pub(super) fn check(nat: &mut Chains<'_>, mark: &AttachmentId, addresses: &[Cidr]) -> Result<Vec<String>> {
    let (family, shape) = (nat.family(), Shape::new(mark));
    let Some(chain) = nat.chain(&shape.chain)?.cloned() else {
        return Ok(vec![format!("iptables chain {} is missing from table nat", shape.chain)]);
    };
    let jumps: Vec<Cidr> = nat
        .rules_leading_to(POSTROUTING, &shape.chain)?
        .iter()
        .filter(|rule| shape.is_jump(rule))
        .filter_map(source)
        .collect();
    let mut missing = Vec::new();
    let mut want = |words: Vec<String>| {
        if !chain.rules.iter().any(|rule| rule.matches(&words)) {
            missing.push(format!("iptables chain {} has no rule {}", shape.chain, words.join(" ")));
        }
    };
    for address in addresses {
        want(shape.accept(address.network()));
    }
    want(shape.masquerade(family));
    for address in addresses {
        let host = address.address();
        // Or the network, as older releases of Go's had it.
        if !jumps.iter().any(|source| *source == Cidr::host(host) || *source == address.network()) {
            missing.push(format!("iptables chain {POSTROUTING} has no rule that sends {host} to {}", shape.chain));
        }
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

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
