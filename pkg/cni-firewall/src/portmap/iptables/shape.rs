//! The chains and rules of the iptables backend, as Go has them, in the words of `iptables -S`.
//!
//! In table `nat`, with D for `CNI-DN-` and 21 hex digits of the SHA-512 of network and container
//! ID:
//! ```text
//! -A PREROUTING            -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT          and the same from OUTPUT
//! -I POSTROUTING           -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
//! -A CNI-HOSTPORT-MASQ     -m mark --mark 0x2000/0x2000 -j MASQUERADE
//! -A CNI-HOSTPORT-SETMARK  -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
//! -A CNI-HOSTPORT-DNAT     -p P -m comment --comment "dnat name: \"N\" id: \"ID\"" -m multiport --dports A,B CONDITIONS -j D
//! -A D                     [-i LINK] -m comment --comment "cni:N/ID/IFNAME"                              these plugins alone
//! -A D                     -s SUBNET [-d H] -p P -m P --dport A -j CNI-HOSTPORT-SETMARK
//! -A D                     -s 127.0.0.1/32 [-d H] -p P -m P --dport A -j CNI-HOSTPORT-SETMARK            not in IPv6
//! -A D                     [-d H] -p P -m P --dport A -j DNAT --to-destination C:Q
//! ```
//! D has no interface in its key. The rule without a target names the attachment of the rules after
//! it; LINK is the host's end of the container's link, if one has the mark.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use cni::hash::sha512_hex;

use super::super::{ClaimedPort, Forwarding, Mapping, Protocol, SetMark, Snat};
use crate::iptables::Rule;
use cni::AttachmentId;
use cni::Cidr;

pub(crate) const DNAT: &str = "CNI-HOSTPORT-DNAT";
pub(super) const SETMARK: &str = "CNI-HOSTPORT-SETMARK";
pub(super) const MASQ: &str = "CNI-HOSTPORT-MASQ";
/// Where very old releases of Go entered the chains of [`snat_chain`].
pub(super) const SNAT: &str = "CNI-HOSTPORT-SNAT";
pub(super) const PREFIX: &str = "CNI-DN-";

/// `multiport` takes no more.
const PORTS: usize = 15;
/// The kernel keeps 255 bytes of a comment.
const COMMENT_MAX: usize = 255;

/// A rule in words.
pub(super) type RuleWords = Vec<String>;

fn words<const N: usize>(words: [&str; N]) -> RuleWords {
    words.map(str::to_owned).to_vec()
}

fn name(prefix: &str, attachment: &AttachmentId) -> String {
    const LEN: usize = 28;
    let digits = LEN.saturating_sub(prefix.len());
    format!("{prefix}{}", sha512_hex(&[attachment.network.as_bytes(), attachment.container_id.as_bytes()], digits))
}

/// The container's own chain.
pub(super) fn chain(attachment: &AttachmentId) -> String {
    name(PREFIX, attachment)
}

/// The name of the chain that very old releases of Go also made.
pub(super) fn snat_chain(attachment: &AttachmentId) -> String {
    name("CNI-SN-", attachment)
}

/// The rule by which a base chain leads to [`DNAT`].
pub(super) fn entry() -> RuleWords {
    words(["-m", "addrtype", "--dst-type", "LOCAL", "-j", DNAT])
}

/// The rule by which POSTROUTING leads to [`MASQ`].
pub(super) fn masq_entry() -> RuleWords {
    words(["-m", "comment", "--comment", "CNI portfwd requiring masquerade", "-j", MASQ])
}

fn bit(bit: u8) -> String {
    let mark = 1_u32.checked_shl(bit.into()).unwrap_or(0);
    format!("{mark:#x}/{mark:#x}")
}

/// The rule of [`MASQ`].
pub(super) fn masquerade(mark_bit: u8) -> RuleWords {
    words(["-m", "mark", "--mark", &bit(mark_bit), "-j", "MASQUERADE"])
}

/// The rule of [`SETMARK`].
pub(super) fn set_mark(mark_bit: u8) -> RuleWords {
    words(["-m", "comment", "--comment", "CNI portfwd masquerade mark", "-j", "MARK", "--set-xmark", &bit(mark_bit)])
}

/// The comment of a container's rules in [`DNAT`].
pub(crate) fn comment(attachment: &AttachmentId) -> String {
    let mut comment = format!("dnat name: \"{}\" id: \"{}\"", attachment.network, attachment.container_id);
    if comment.len() > COMMENT_MAX {
        // Go puts three dots, of which this is what the kernel keeps, and its CHECK compares.
        comment = comment.chars().take(COMMENT_MAX - 2).collect::<String>() + "..";
    }
    comment
}

/// Network and container ID out of such a comment, if it is whole.
pub(crate) fn read_comment(comment: &str) -> Option<(&str, &str)> {
    comment.strip_prefix("dnat name: \"")?.strip_suffix('"')?.split_once("\" id: \"")
}

/// A container's rules of [`DNAT`]: every port that is mapped in any family, as Go has it.
pub(super) fn jumps(wanted: &Forwarding, conditions: &[String]) -> Vec<RuleWords> {
    let mut by_protocol: BTreeMap<Protocol, Vec<u16>> = BTreeMap::new();
    for Mapping { protocol, host_port, .. } in &wanted.mappings {
        by_protocol.entry(*protocol).or_default().push(*host_port);
    }
    let (comment, chain) = (comment(&wanted.attachment), chain(&wanted.attachment));
    let mut jumps = Vec::new();
    for (protocol, ports) in by_protocol {
        for ports in ports.chunks(PORTS) {
            let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
            let mut jump = words(["-p", protocol.name(), "-m", "comment", "--comment", &comment]);
            jump.extend(words(["-m", "multiport", "--dports", &ports.join(",")]));
            jump.extend_from_slice(conditions);
            jump.extend(words(["-j", &chain]));
            jumps.push(jump);
        }
    }
    jumps
}

/// A jump rule of [`DNAT`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Jump {
    /// The chain it leads to.
    pub(super) chain: String,
    pub(super) protocol: Option<Protocol>,
    /// Empty if the rule does not say, or not in a way known here: then it is about every port.
    pub(super) ports: Vec<u16>,
    /// Whether there is nothing else in it.
    pub(super) plain: bool,
}

impl Jump {
    /// Reads a rule. `None` if it leads nowhere.
    pub(super) fn of(rule: &Rule) -> Option<Jump> {
        let ports = rule.value("--dports").unwrap_or_default();
        let ports = ports.split(',').map(str::parse).collect::<Result<_, _>>().unwrap_or_default();
        // -p P, -m comment --comment C, -m multiport --dports A, -j D
        let plain = rule.is_whole() && rule.words().len() == 12 && rule.comment().is_some();
        let protocol = rule.value("-p").and_then(Protocol::by_name);
        Some(Jump { chain: rule.target()?.to_owned(), protocol, ports, plain })
    }

    /// Whether packets for this claim may pass it.
    pub(super) fn serves(&self, claim: &ClaimedPort) -> bool {
        self.protocol.is_none_or(|protocol| protocol == claim.protocol)
            && (self.ports.is_empty() || self.ports.contains(&claim.host_port))
    }
}

/// The rule that names the attachment of the rules after it. `link` is the host's end that has the
/// mark, if there is one.
pub(super) fn marker(attachment: &AttachmentId, link: Option<&str>) -> RuleWords {
    let mut marker = link.map(|link| words(["-i", link])).unwrap_or_default();
    marker.extend(words(["-m", "comment", "--comment", &attachment.alias()]));
    marker
}

/// The rules of one mapping, the one that translates last.
pub(super) fn forward(wanted: &Forwarding, container: Cidr, claim: &ClaimedPort) -> Vec<RuleWords> {
    let mut rules = Vec::new();
    let matches = |source: Option<String>| {
        let mut rule = source.map(|source| words(["-s", &source])).unwrap_or_default();
        rule.extend(claim.host_ip.iter().flat_map(|host_ip| words(["-d", &host(*host_ip)])));
        let port = claim.host_port.to_string();
        rule.extend(words(["-p", claim.protocol.name(), "-m", claim.protocol.name(), "--dport", &port]));
        rule
    };
    let chain = match &wanted.set_mark {
        SetMark::Bit(_) => SETMARK,
        SetMark::Chain(chain) => chain,
    };
    let mut set_mark = |source: Option<String>| rules.push([matches(source), words(["-j", chain])].concat());
    match wanted.snat {
        Snat::No => {}
        Snat::All => set_mark(None),
        Snat::Hairpin => {
            set_mark(Some(container.network().to_string()).filter(|_| container.prefix() > 0));
            if container.is_ipv4() {
                set_mark(Some(host(Ipv4Addr::LOCALHOST.into())));
            }
        }
    }
    let to = claim.container.to_string();
    rules.push([matches(None), words(["-j", "DNAT", "--to-destination", &to])].concat());
    rules
}

fn host(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}

/// Returns the claims of a rule that translates ports. `None` for any other rule.
pub(super) fn read(rule: &Rule) -> Option<ClaimedPort> {
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

/// One mapping in a container's chain.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// The claim of the rule at the section's end; `None` if there is no rule, or an unknown one.
    pub(super) claim: Option<ClaimedPort>,
    /// All its rules.
    pub(super) rules: Vec<Rule>,
}

/// The rules of one attachment in a container's chain, or those without a marker that lead to one
/// address.
#[derive(Clone, Debug, Default)]
pub(super) struct Section {
    /// Its marker.
    pub(super) marker: Option<Rule>,
    /// Its mappings.
    pub(super) groups: Vec<Group>,
}

impl Section {
    /// The mark, as an alias.
    pub(super) fn alias(&self) -> Option<&str> {
        self.marker.as_ref().and_then(Rule::comment)
    }

    /// Whether a link had the mark when the section was written.
    pub(super) fn had_link(&self) -> bool {
        self.marker.as_ref().is_some_and(|marker| marker.value("-i").is_some())
    }

    /// Whether nothing in it says whose it is.
    pub(super) fn is_silent(&self) -> bool {
        self.marker.is_none() && self.address().is_none()
    }

    /// Every rule, the marker first.
    pub(super) fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.marker.iter().chain(self.groups.iter().flat_map(|group| &group.rules))
    }

    pub(super) fn claims(&self) -> impl Iterator<Item = ClaimedPort> {
        self.groups.iter().filter_map(|group| group.claim)
    }

    /// Where it leads to.
    pub(super) fn address(&self) -> Option<IpAddr> {
        self.claims().next().map(|claim| claim.container.ip())
    }
}

/// The one of these rules that a packet for the claim meets first.
pub(super) fn first(rules: &[Rule], claim: &ClaimedPort) -> Option<ClaimedPort> {
    rules.iter().filter_map(read).find(|there| there.overlaps(claim))
}

/// A container's chain as sections: first the rules without a marker, a section for each address
/// and one for each group without an address; then a section for each marker. A rule behind a
/// marker that leads to another address than the first mapping after it was appended by Go. An
/// empty chain is one empty section.
pub(super) fn sections(rules: &[Rule]) -> Vec<Section> {
    let mut unmarked: Vec<Group> = Vec::new();
    let mut marked: Vec<Section> = Vec::new();
    let mut pending: Vec<Rule> = Vec::new();
    for rule in rules {
        let is_marker =
            rule.target().is_none() && rule.comment().is_some_and(|text| AttachmentId::parse(text).is_some());
        if !is_marker {
            pending.push(rule.clone());
            if rule.target() != Some("DNAT") {
                continue;
            }
        }
        let claim = read(rule).filter(|_| !is_marker);
        let same_place = |section: &&mut Section| match (section.address(), claim) {
            (Some(one), Some(claim)) => one == claim.container.ip(),
            _ => true,
        };
        let groups = marked.last_mut().filter(same_place).map_or(&mut unmarked, |section| &mut section.groups);
        if !pending.is_empty() {
            groups.push(Group { claim, rules: std::mem::take(&mut pending) });
        }
        if is_marker {
            marked.push(Section { marker: Some(rule.clone()), groups: Vec::new() });
        }
    }
    if !pending.is_empty() {
        let groups = marked.last_mut().map_or(&mut unmarked, |section| &mut section.groups);
        groups.push(Group { claim: None, rules: pending });
    }
    let mut sections: Vec<Section> = Vec::new();
    for group in unmarked {
        let address = group.claim.map(|claim| claim.container.ip());
        match sections.iter_mut().find(|section| address.is_some() && section.address() == address) {
            Some(section) => section.groups.push(group),
            None => sections.push(Section { marker: None, groups: vec![group] }),
        }
    }
    sections.append(&mut marked);
    if sections.is_empty() {
        sections.push(Section::default());
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_go_s() {
        assert_eq!(chain(&AttachmentId::new("pmnet", "p1", "eth0")), "CNI-DN-810dc0762a76503af332b");
        assert_eq!(snat_chain(&AttachmentId::new("pmnet", "p1", "eth1")), "CNI-SN-810dc0762a76503af332b");
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
