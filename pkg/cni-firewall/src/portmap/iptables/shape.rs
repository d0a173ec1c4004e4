//! Builds and reads the rules of the iptables backend, which are those of Go's plugin, in the words
//! of `iptables -S`.
//!
//! The rules in the table `nat`:
//! ```text
//! -A PREROUTING            -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT                             also in OUTPUT
//! -I POSTROUTING           -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
//! -A CNI-HOSTPORT-MASQ     -m mark --mark 0x2000/0x2000 -j MASQUERADE
//! -A CNI-HOSTPORT-SETMARK  -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
//! -A CNI-HOSTPORT-DNAT     -p P -m comment --comment "dnat name: \"N\" id: \"ID\"" -m multiport --dports A,B CONDITIONS -j D
//! -A D                     [-i LINK] -m comment --comment "cni:N/ID/IFNAME"                              not written by Go
//! -A D                     -s SUBNET [-d H] -p P -m P --dport A -j CNI-HOSTPORT-SETMARK
//! -A D                     -s 127.0.0.1/32 [-d H] -p P -m P --dport A -j CNI-HOSTPORT-SETMARK            not in IPv6
//! -A D                     [-d H] -p P -m P --dport A -j DNAT --to-destination C:Q
//! ```
//! - D is the container's chain, which all interfaces of the container share: `CNI-DN-` and 21 hex
//!   digits of the SHA-512 of network and container ID.
//! - N is the network, P the protocol, A and B are ports of the host, H is an address of the host,
//!   and C:Q is the address and port of the container.
//! - The rule without a target is a *marker*: the rules after it belong to the attachment whose
//!   alias is its comment. LINK is the link on the host that had this alias when the rule was
//!   written, if there was one.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};

use cni::hash::sha512_hex;

use super::super::{ClaimedPort, Forwarding, Mapping, Protocol, SetMark, Snat};
use crate::iptables::{CHAIN_NAME_MAX, Rule, rule_in_words, split};
use crate::nft::{Key, Listed};
use cni::AttachmentId;
use cni::Cidr;
use cni_linux::route::Family;

/// The chain whose rules jump to the chains of the containers.
pub(crate) const DNAT: &str = "CNI-HOSTPORT-DNAT";
/// The chain that marks connections for [`MASQ`].
pub(super) const SETMARK: &str = "CNI-HOSTPORT-SETMARK";
/// The chain that masquerades marked connections.
pub(super) const MASQ: &str = "CNI-HOSTPORT-MASQ";
/// The chain that jumps to each container's second chain ([`snat_chain_name`]) in very old releases
/// of Go's plugin.
pub(super) const SNAT: &str = "CNI-HOSTPORT-SNAT";
/// How the names of containers' chains begin.
pub(super) const PREFIX: &str = "CNI-DN-";

/// The most ports of a `multiport` match.
const PORTS_MAX: usize = 15;
/// The most bytes of a comment that the kernel stores.
const COMMENT_MAX: usize = 255;

/// A rule in the words of the command line.
pub(super) type RuleWords = Vec<String>;

/// Returns these words as owned strings.
fn words<const N: usize>(words: [&str; N]) -> RuleWords {
    words.map(str::to_owned).to_vec()
}

/// Returns the name of a container's chain: the prefix and hex digits of the SHA-512 of network and
/// container ID, as many characters as iptables accepts.
fn hashed_name(prefix: &str, attachment: &AttachmentId) -> String {
    let digits = CHAIN_NAME_MAX.saturating_sub(prefix.len());
    format!("{prefix}{}", sha512_hex(&[attachment.network.as_bytes(), attachment.container_id.as_bytes()], digits))
}

/// Returns the name of the container's own chain.
pub(super) fn chain_name(attachment: &AttachmentId) -> String {
    hashed_name(PREFIX, attachment)
}

/// Returns the name of the second chain that very old releases of Go's plugin made for a container.
pub(super) fn snat_chain_name(attachment: &AttachmentId) -> String {
    hashed_name("CNI-SN-", attachment)
}

/// Returns the rules that all containers share, each after the name of its chain.
pub(super) fn shared_rules(wanted: &Forwarding) -> Vec<(&'static str, RuleWords)> {
    let mut rules = Vec::new();
    if let SetMark::Bit(bit) = &wanted.set_mark
        && wanted.snat != Snat::No
    {
        // 0 for a bit above 31, which the configuration refuses.
        let mark = 1_u32.checked_shl((*bit).into()).unwrap_or(0);
        let set_mark =
            format!("-m comment --comment \"CNI portfwd masquerade mark\" -j MARK --set-xmark {mark:#x}/{mark:#x}");
        let masquerade = format!("-m mark --mark {mark:#x}/{mark:#x} -j MASQUERADE");
        let jump = format!("-m comment --comment \"CNI portfwd requiring masquerade\" -j {MASQ}");
        rules.extend([(SETMARK, split(&set_mark)), (MASQ, split(&masquerade)), ("POSTROUTING", split(&jump))]);
    }
    let jump = split(&format!("-m addrtype --dst-type LOCAL -j {DNAT}"));
    rules.extend([("PREROUTING", jump.clone()), ("OUTPUT", jump)]);
    rules
}

/// Returns the comment of a container's jumps in [`DNAT`].
pub(crate) fn comment(attachment: &AttachmentId) -> String {
    let mut comment = format!("dnat name: \"{}\" id: \"{}\"", attachment.network, attachment.container_id);
    if comment.len() > COMMENT_MAX {
        // From a comment of more than 255 bytes, Go keeps 253 and appends `...`. The kernel stores
        // only 255 of the 256 bytes, and Go's CHECK compares with these. The names are ASCII.
        comment = comment.chars().take(COMMENT_MAX - 2).collect::<String>() + "..";
    }
    comment
}

/// Reads network and container ID from a [`comment`]. `None` for a comment that was cut, and for
/// any other text.
pub(crate) fn read_comment(comment: &str) -> Option<(&str, &str)> {
    comment.strip_prefix("dnat name: \"")?.strip_suffix('"')?.split_once("\" id: \"")
}

/// Returns a container's jumps in [`DNAT`]: for each protocol, one for every 15 ports. As with Go's
/// plugin, they also match ports that are mapped only in the other family.
pub(super) fn jump_rules(wanted: &Forwarding, conditions: &[String]) -> Vec<RuleWords> {
    let mut ports_by_protocol: BTreeMap<Protocol, Vec<u16>> = BTreeMap::new();
    for Mapping { protocol, host_port, .. } in &wanted.mappings {
        ports_by_protocol.entry(*protocol).or_default().push(*host_port);
    }
    let (comment, chain) = (comment(&wanted.attachment), chain_name(&wanted.attachment));
    let mut jumps = Vec::new();
    for (protocol, all_ports) in ports_by_protocol {
        for chunk in all_ports.chunks(PORTS_MAX) {
            let ports: Vec<String> = chunk.iter().map(u16::to_string).collect();
            let mut jump = words(["-p", protocol.name(), "-m", "comment", "--comment", &comment]);
            jump.extend(words(["-m", "multiport", "--dports", &ports.join(",")]));
            jump.extend_from_slice(conditions);
            jump.extend(words(["-j", &chain]));
            jumps.push(jump);
        }
    }
    jumps
}

/// Returns the ports that a jump in [`DNAT`] names. Empty if it names none, or names them in an
/// unknown form: such a jump can match any port.
fn jump_ports(jump: &Rule) -> Vec<u16> {
    let ports = jump.value("--dports").unwrap_or_default();
    // Empty if any item is not a number: without the option, or for a range of ports.
    ports.split(',').map(str::parse).collect::<Result<_, _>>().unwrap_or_default()
}

/// Whether a jump in [`DNAT`] can match packets to the host port of one of the claims. Conditions
/// are ignored.
pub(super) fn can_match_any(jump: &Rule, claims: &[ClaimedPort]) -> bool {
    let (protocol, ports) = (jump.value("-p").and_then(Protocol::by_name), jump_ports(jump));
    claims.iter().any(|claim| {
        protocol.is_none_or(|protocol| protocol == claim.protocol)
            && (ports.is_empty() || ports.contains(&claim.host_port))
    })
}

/// Whether a jump in [`DNAT`] has conditions. Also true for a rule in another form than
/// [`jump_rules`] returns without conditions.
pub(super) fn has_conditions(jump: &Rule) -> bool {
    // The 12 words: -p P -m comment --comment C -m multiport --dports A -j D
    let is_plain = jump.is_whole() && jump.words().len() == 12 && jump.comment().is_some();
    !is_plain
}

/// Returns the function that gives the keys of a rule of [`DNAT`] in this family.
pub(super) fn jump_keys_in(family: Family) -> fn(&Listed) -> Vec<Key> {
    match family {
        Family::V4 => |listed| jump_keys(Family::V4, listed),
        Family::V6 => |listed| jump_keys(Family::V6, listed),
    }
}

/// Returns the keys of a rule of [`DNAT`], its ports and its target; none for a rule that can match
/// any port or has no target, so that every search returns such a rule.
fn jump_keys(family: Family, listed: &Listed) -> Vec<Key> {
    let rule = rule_in_words(family, listed);
    let Some(target) = rule.target() else { return Vec::new() };
    let ports = jump_ports(&rule);
    if ports.is_empty() {
        return Vec::new();
    }
    ports.into_iter().map(Key::port).chain([Key::target(target)]).collect()
}

/// Returns the marker: the rule that names the attachment of the rules after it. `host_link` is the
/// link on the host that has the attachment's alias, if there is one.
pub(super) fn marker_rule(attachment: &AttachmentId, host_link: Option<&str>) -> RuleWords {
    let mut marker = host_link.map(|link| words(["-i", link])).unwrap_or_default();
    marker.extend(words(["-m", "comment", "--comment", &attachment.alias()]));
    marker
}

/// Returns the rules of one mapping: those that mark connections for masquerading, then the one
/// that translates the destination.
pub(super) fn mapping_rules(wanted: &Forwarding, container: Cidr, claim: &ClaimedPort) -> Vec<RuleWords> {
    // A prefix of length 0 is left out, because iptables does not print it.
    let network = (container.prefix() > 0).then(|| container.network().to_string());
    let localhost = Some(Cidr::host(Ipv4Addr::LOCALHOST.into()).to_string());
    // Prefixes; `None` for any source.
    let masqueraded_sources = match wanted.snat {
        Snat::No => vec![],
        Snat::All => vec![None],
        Snat::Hairpin if container.is_ipv4() => vec![network, localhost],
        Snat::Hairpin => vec![network],
    };
    let mark_chain = match &wanted.set_mark {
        SetMark::Bit(_) => SETMARK,
        SetMark::Chain(chain) => chain,
    };
    let mark = |source: &Option<String>| mapping_rule(source.as_deref(), claim, &["-j", mark_chain]);
    let mut rules: Vec<RuleWords> = masqueraded_sources.iter().map(mark).collect();
    rules.push(mapping_rule(None, claim, &["-j", "DNAT", "--to-destination", &claim.container.to_string()]));
    rules
}

/// Returns the rule with this target for packets to the host port of this claim, from `source` if
/// it is given.
fn mapping_rule(source: Option<&str>, claim: &ClaimedPort, target: &[&str]) -> RuleWords {
    let mut rule = RuleWords::new();
    if let Some(source) = source {
        rule.extend(words(["-s", source]));
    }
    if let Some(host_ip) = claim.host_ip {
        rule.extend(words(["-d", &Cidr::host(host_ip).to_string()]));
    }
    let protocol = claim.protocol.name();
    rule.extend(words(["-p", protocol, "-m", protocol, "--dport", &claim.host_port.to_string()]));
    rule.extend(target.iter().map(|word| (*word).to_owned()));
    rule
}

/// Reads the claim of a rule with the target DNAT. `None` for any other rule, and for a rule
/// without a known protocol, port or destination.
pub(super) fn read_claim(rule: &Rule) -> Option<ClaimedPort> {
    if rule.target() != Some("DNAT") {
        return None;
    }
    let container: SocketAddr = rule.value("--to-destination")?.parse().ok()?;
    let host_ip = match rule.value("-d") {
        Some(text) => Some(text.split('/').next()?.parse().ok()?),
        None => None,
    };
    Some(ClaimedPort {
        protocol: Protocol::by_name(rule.value("-p")?)?,
        host_ip,
        host_port: rule.value("--dport")?.parse().ok()?,
        container,
    })
}

/// Successive rules of a container's chain that belong together: a marker, or the rules of one
/// mapping, which are those that mark connections and then the DNAT rule. If rules before a marker
/// or at the chain's end have no DNAT rule after them, they count as a mapping too.
#[derive(Clone, Copy, Debug)]
pub(super) struct RuleGroup<'r> {
    /// The marker of the attachment that the rules belong to; `None` for rules of Go's plugin.
    pub(super) marker: Option<&'r Rule>,
    /// The claim of the DNAT rule; `None` if there is no such rule, or [`read_claim`] cannot read
    /// it.
    pub(super) claim: Option<ClaimedPort>,
    /// The rules.
    pub(super) rules: &'r [Rule],
}

impl<'r> RuleGroup<'r> {
    /// Returns the alias of the attachment, if there is a marker.
    pub(super) fn alias(&self) -> Option<&'r str> {
        self.marker.and_then(Rule::comment)
    }

    /// Whether a link on the host had the attachment's alias when the rules were written.
    pub(super) fn had_link(&self) -> bool {
        self.marker.is_some_and(|marker| marker.value("-i").is_some())
    }

    /// Whether this is the marker itself.
    pub(super) fn is_marker(&self) -> bool {
        self.marker.is_some() && self.rules.first() == self.marker
    }

    /// Whether a marker or an address shows to which attachment the rules belong.
    pub(super) fn shows_owner(&self) -> bool {
        self.marker.is_some() || self.claim.is_some()
    }
}

/// Splits a container's chain into groups. An empty chain gives one empty group.
pub(super) fn groups(chain_rules: &[Rule]) -> Vec<RuleGroup<'_>> {
    if chain_rules.is_empty() {
        return vec![RuleGroup { marker: None, claim: None, rules: chain_rules }];
    }
    let mut groups = Vec::new();
    // Every section except perhaps the first begins with a marker.
    for section in chain_rules.chunk_by(|_, next| !is_marker(next)) {
        let (markers, mappings) = section.split_at(usize::from(is_marker(&section[0])));
        let marker = markers.first();
        if marker.is_some() {
            groups.push(RuleGroup { marker, claim: None, rules: markers });
        }
        let mut section_address = None;
        for rules in mappings.split_inclusive(|rule| rule.target() == Some("DNAT")) {
            let claim = rules.last().and_then(read_claim);
            let address = claim.map(|claim| claim.container.ip());
            section_address = section_address.or(address);
            // After the rules of a marker, Go's plugin, which writes no markers, may have appended
            // rules for another address.
            let is_appended = address.is_some() && address != section_address;
            groups.push(RuleGroup { marker: marker.filter(|_| !is_appended), claim, rules });
        }
    }
    groups
}

/// Whether the rule is a marker: one without a target whose comment is the alias of an attachment.
fn is_marker(rule: &Rule) -> bool {
    rule.target().is_none() && rule.comment().is_some_and(|text| AttachmentId::parse(text).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_go_s() {
        assert_eq!(chain_name(&AttachmentId::new("pmnet", "p1", "eth0")), "CNI-DN-810dc0762a76503af332b");
        assert_eq!(snat_chain_name(&AttachmentId::new("pmnet", "p1", "eth1")), "CNI-SN-810dc0762a76503af332b");
    }

    #[test]
    fn a_comment_is_read_back_unless_it_was_cut() {
        let mark = AttachmentId::new("net", "c1", "eth0");
        assert_eq!(comment(&mark), r#"dnat name: "net" id: "c1""#);
        assert_eq!(read_comment(&comment(&mark)), Some(("net", "c1")));
        let long = comment(&AttachmentId::new("net", "x".repeat(300), "eth0"));
        assert_eq!((long.len(), read_comment(&long)), (COMMENT_MAX, None));
        assert!(long.ends_with("x..") && !long.ends_with("..."), "{long}");
    }
}
