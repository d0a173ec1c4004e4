//! Rules of iptables-nft, read over netlink, put into the words that `iptables -S` would print.
//!
//! Only what CNI plugins write is known, in the forms that releases of iptables from 1.8.2 on give
//! it: a match of xtables or expressions of nf_tables for the same thing, a shorter load or a mask
//! for a prefix. All else makes the rule not [whole](super::Rule::is_whole). Never fails or panics:
//! the bytes come from the kernel, but any program may have written them.

use std::net::IpAddr;

use std::mem::offset_of;

use super::rule::Rule;
use super::xt::{self, Addrtype, Conntrack, Mark, Multiport, NatV4, Range, Sctp, SetMark, Tcp, Udp};
use crate::nft::expr::{Base, CmpOp, Expr, MetaKey, Verdict};
use crate::nft::{self, Listed};
use cni_linux::route::Family;

/// The words so far, in iptables' order: addresses, interfaces, protocol, matches, target.
#[derive(Default)]
struct RuleWords {
    source: Vec<String>,
    destination: Vec<String>,
    interfaces: Vec<String>,
    protocol: Option<String>,
    negated_protocol: Vec<String>,
    matches: Vec<String>,
    target: Vec<String>,
    whole: bool,
}

/// The content of a register.
#[derive(Clone, Copy)]
enum Loaded {
    Source,
    Destination,
    Protocol,
    SourcePort,
    DestinationPort,
    In,
    Out,
    Mark,
    Unknown,
}

/// One rule in words.
pub(crate) fn rule(family: Family, listed: Listed) -> Rule {
    let Listed { handle, rule: nft::Rule { exprs, comment, .. }, raw } = listed;
    let mut words = RuleWords::read(family, &exprs);
    // Some releases kept the comment where nft has it.
    if let Some(comment) = comment {
        words.matches.splice(0..0, ["-m".into(), "comment".into(), "--comment".into(), comment]);
    }
    Rule { raw: Some(raw), ..words.into_rule(handle) }
}

/// Returns these expressions as text, without unknown ones. For rules with several spellings.
pub(crate) fn words(family: Family, exprs: &[Expr]) -> Vec<String> {
    RuleWords::read(family, exprs).into_rule(0).words
}

fn meta(key: MetaKey) -> Loaded {
    match key {
        MetaKey::MARK => Loaded::Mark,
        MetaKey::IIFNAME => Loaded::In,
        MetaKey::OIFNAME => Loaded::Out,
        MetaKey::L4PROTO => Loaded::Protocol,
        _ => Loaded::Unknown,
    }
}

fn payload(family: Family, base: Base, offset: u32, len: u32) -> Loaded {
    match (base, family, offset, len) {
        (Base::NETWORK, Family::V4, 12, _) | (Base::NETWORK, Family::V6, 8, _) => Loaded::Source,
        (Base::NETWORK, Family::V4, 16, _) | (Base::NETWORK, Family::V6, 24, _) => Loaded::Destination,
        (Base::NETWORK, Family::V4, 9, 1) | (Base::NETWORK, Family::V6, 6, 1) => Loaded::Protocol,
        (Base::TRANSPORT, _, 0, 2) => Loaded::SourcePort,
        (Base::TRANSPORT, _, 2, 2) => Loaded::DestinationPort,
        _ => Loaded::Unknown,
    }
}

impl RuleWords {
    fn read(family: Family, exprs: &[Expr]) -> RuleWords {
        let mut words = RuleWords { whole: true, ..RuleWords::default() };
        let mut loaded = Loaded::Unknown;
        let mut mask: Option<&[u8]> = None;
        for expr in exprs {
            match expr {
                Expr::Meta { key, .. } => (loaded, mask) = (meta(*key), None),
                Expr::Payload { base, offset, len, .. } => {
                    (loaded, mask) = (payload(family, *base, *offset, *len), None);
                }
                Expr::Bitwise { mask: bits, xor, .. } => {
                    words.whole &= xor.iter().all(|byte| *byte == 0);
                    mask = Some(bits);
                }
                Expr::Cmp { op, data, .. } => words.compare(family, loaded, mask.take(), *op, data),
                Expr::XtMatch { name, revision, info } => words.xt_match(name, *revision, info),
                Expr::XtTarget { name, revision, info } => words.xt_target(family, name, *revision, info),
                Expr::Verdict(verdict) => words.verdict(verdict),
                Expr::Masquerade => words.jump("MASQUERADE"),
                Expr::Other(name) if name == "counter" => {}
                _ => words.whole = false,
            }
        }
        words
    }

    fn compare(&mut self, family: Family, loaded: Loaded, mask: Option<&[u8]>, op: CmpOp, data: &[u8]) {
        let negated = match op {
            CmpOp::EQ => false,
            CmpOp::NE => true,
            _ => {
                self.whole = false;
                return;
            }
        };
        let not = |words: Vec<String>| if negated { [vec!["!".to_owned()], words].concat() } else { words };
        let port = || <[u8; 2]>::try_from(data).ok().map(u16::from_be_bytes);
        match (loaded, mask) {
            (Loaded::Source, mask) => match cidr(family, mask, data) {
                Some(cidr) => self.source = not(vec!["-s".into(), cidr]),
                None => self.whole = false,
            },
            (Loaded::Destination, mask) => match cidr(family, mask, data) {
                Some(cidr) => self.destination = not(vec!["-d".into(), cidr]),
                None => self.whole = false,
            },
            (Loaded::In, None) => self.interfaces.extend(not(vec!["-i".into(), interface(data)])),
            (Loaded::Out, None) => self.interfaces.extend(not(vec!["-o".into(), interface(data)])),
            (Loaded::Protocol, None) => {
                let name = protocol(data.first().copied().unwrap_or(0));
                if negated {
                    self.negated_protocol = not(vec!["-p".into(), name]);
                } else {
                    self.protocol = Some(name);
                }
            }
            (Loaded::SourcePort, None) if !negated && port().is_some() => self.port("--sport", port().unwrap_or(0)),
            (Loaded::DestinationPort, None) if !negated && port().is_some() => {
                self.port("--dport", port().unwrap_or(0));
            }
            (Loaded::Mark, mask) if !negated => match (number(data), mask.map_or(Some(u32::MAX), number)) {
                (Some(value), Some(mask)) => self.mark(value, mask),
                _ => self.whole = false,
            },
            _ => self.whole = false,
        }
    }

    fn push(&mut self, words: &[&str]) {
        self.matches.extend(words.iter().map(|word| (*word).to_owned()));
    }

    fn port(&mut self, option: &str, port: u16) {
        let protocol = self.protocol.clone().unwrap_or_default();
        self.push(&["-m", &protocol, option, &port.to_string()]);
    }

    fn mark(&mut self, value: u32, mask: u32) {
        self.push(&["-m", "mark", "--mark", &masked(value, mask)]);
    }

    fn xt_match(&mut self, name: &str, revision: u32, info: &[u8]) {
        match (name, revision) {
            ("comment", _) => {
                let end = info.iter().position(|byte| *byte == 0).unwrap_or(info.len());
                let text = String::from_utf8_lossy(&info[..end]).into_owned();
                self.push(&["-m", "comment", "--comment", &text]);
            }
            ("multiport", 1) => match multiport(info) {
                Some((option, ports)) => self.push(&["-m", "multiport", option, &ports]),
                None => self.whole = false,
            },
            ("addrtype", 1) => match (
                u16_at(info, offset_of!(Addrtype, source)),
                u16_at(info, offset_of!(Addrtype, destination)),
                u32_at(info, offset_of!(Addrtype, flags)),
            ) {
                (Some(0), Some(LOCAL), Some(0)) => self.push(&["-m", "addrtype", "--dst-type", "LOCAL"]),
                _ => self.whole = false,
            },
            ("mark", 1) => match (
                u32_at(info, offset_of!(Mark, value)),
                u32_at(info, offset_of!(Mark, mask)),
                info.get(offset_of!(Mark, invert)),
            ) {
                (Some(value), Some(mask), Some(0)) => self.mark(value, mask),
                _ => self.whole = false,
            },
            ("conntrack", 2 | 3) => match conntrack_states(info) {
                Some(states) => self.push(&["-m", "conntrack", "--ctstate", &states]),
                None => self.whole = false,
            },
            ("tcp" | "udp", 0) => {
                let flags = if name == "tcp" {
                    info.get(offset_of!(Tcp, option)..=offset_of!(Tcp, invert))
                } else {
                    info.get(offset_of!(Udp, invert)..=offset_of!(Udp, invert))
                };
                match (ports(info, offset_of!(Tcp, source_ports)), ports(info, offset_of!(Tcp, ports)), flags) {
                    (Some((0, u16::MAX)), Some((first, last)), Some(flags))
                        if first == last && flags.iter().all(|flag| *flag == 0) =>
                    {
                        self.push(&["-m", name, "--dport", &first.to_string()]);
                    }
                    _ => self.whole = false,
                }
            }
            ("sctp", 0) => match (
                ports(info, offset_of!(Sctp, ports)),
                u32_at(info, offset_of!(Sctp, matched)),
                u32_at(info, offset_of!(Sctp, invert)),
            ) {
                (Some((first, last)), Some(DESTINATION_PORTS), Some(0)) if first == last => {
                    self.push(&["-m", "sctp", "--dport", &first.to_string()]);
                }
                _ => self.whole = false,
            },
            _ => self.whole = false,
        }
    }

    fn jump(&mut self, target: &str) {
        self.target.extend(["-j".to_owned(), target.to_owned()]);
    }

    fn xt_target(&mut self, family: Family, name: &str, revision: u32, info: &[u8]) {
        self.jump(name);
        match name {
            "MASQUERADE" => {
                // Plugins write no ports or flags. Without them only the count of ranges is not
                // zero.
                let flags = if family == Family::V4 { offset_of!(NatV4, flags) } else { offset_of!(Range, flags) };
                let flags = u32_at(info, flags);
                self.whole &= flags.is_none_or(|flags| flags == 0);
            }
            "DNAT" => match destination(family, revision, info) {
                Some(to) => self.target.extend(["--to-destination".to_owned(), to]),
                None => self.whole = false,
            },
            "MARK" if revision == 2 => {
                match (u32_at(info, offset_of!(SetMark, value)), u32_at(info, offset_of!(SetMark, mask))) {
                    (Some(value), Some(mask)) => {
                        self.target.extend(["--set-xmark".to_owned(), format!("{value:#x}/{mask:#x}")])
                    }
                    _ => self.whole = false,
                }
            }
            _ => self.whole = false,
        }
    }

    fn verdict(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Accept => self.jump("ACCEPT"),
            Verdict::Drop => self.jump("DROP"),
            Verdict::Return => self.jump("RETURN"),
            Verdict::Jump(chain) => self.jump(chain),
            Verdict::Goto(chain) => self.target.extend(["-g".to_owned(), chain.clone()]),
            Verdict::Other(_) => self.whole = false,
        }
    }

    fn into_rule(self, handle: u64) -> Rule {
        let mut words = [self.source, self.destination, self.interfaces].concat();
        words.extend(self.protocol.into_iter().flat_map(|name| ["-p".to_owned(), name]));
        words.extend(self.negated_protocol);
        words.extend(self.matches);
        words.extend(self.target);
        Rule { words, handle: Some(handle), whole: self.whole, raw: None }
    }
}

/// RTN_LOCAL in a set of bits by route type.
pub(super) const LOCAL: u16 = 1 << libc::RTN_LOCAL;
/// The flag of an sctp match for the destination's ports.
pub(super) const DESTINATION_PORTS: u32 = 2;
/// The flag of a conntrack match for states.
pub(super) const STATE: u16 = 1;
/// The states of connections, in iptables' order.
pub(super) const STATES: [(u16, &str); 4] = [(1, "INVALID"), (8, "NEW"), (4, "RELATED"), (2, "ESTABLISHED")];
/// The flags of a NAT range that has addresses, and of one that has ports.
pub(super) const MAP_IPS: u32 = 1;
pub(super) const PROTO_SPECIFIED: u32 = 2;

/// The states in a conntrack match that matches nothing else.
fn conntrack_states(info: &[u8]) -> Option<String> {
    let matched = u16_at(info, offset_of!(Conntrack, matched))?;
    let inverted = u16_at(info, offset_of!(Conntrack, inverted))?;
    let states = u16_at(info, offset_of!(Conntrack, states))?;
    let known = STATES.iter().fold(0, |all, (bit, _)| all | bit);
    if matched != STATE || inverted != 0 || states & !known != 0 {
        return None;
    }
    let names: Vec<&str> = STATES.iter().filter(|(bit, _)| states & bit != 0).map(|(_, name)| *name).collect();
    Some(names.join(","))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn be16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn ports(info: &[u8], at: usize) -> Option<(u16, u16)> {
    Some((u16_at(info, at)?, u16_at(info, at + 2)?))
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

/// As iptables has it: without a mask that says nothing.
fn masked(value: u32, mask: u32) -> String {
    if mask == u32::MAX { format!("{value:#x}") } else { format!("{value:#x}/{mask:#x}") }
}

fn cidr(family: Family, mask: Option<&[u8]>, data: &[u8]) -> Option<String> {
    let size = if family == Family::V4 { 4 } else { 16 };
    if data.is_empty() || data.len() > size {
        return None;
    }
    let prefix = match mask {
        None => data.len() * 8,
        Some(mask) => {
            let ones = mask.iter().take_while(|byte| **byte == 0xff).count();
            let partial = mask.get(ones).map_or(0, |byte| byte.leading_ones() as usize);
            let prefix = ones * 8 + partial;
            // A mask with holes is not a prefix.
            let set: u32 = mask.iter().map(|byte| byte.count_ones()).sum();
            (mask.len() == data.len() && set as usize == prefix).then_some(prefix)?
        }
    };
    let mut bytes = data.to_vec();
    bytes.resize(size, 0);
    Some(format!("{}/{prefix}", address(&bytes)?))
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        16 => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        _ => None,
    }
}

/// A whole name ends in NUL, all of which is compared; what does not is the beginning of one.
fn interface(data: &[u8]) -> String {
    let end = data.iter().position(|byte| *byte == 0);
    let name = String::from_utf8_lossy(&data[..end.unwrap_or(data.len())]).into_owned();
    if end.is_some() { name } else { name + "+" }
}

fn protocol(number: u8) -> String {
    match i32::from(number) {
        libc::IPPROTO_TCP => "tcp".into(),
        libc::IPPROTO_UDP => "udp".into(),
        libc::IPPROTO_SCTP => "sctp".into(),
        libc::IPPROTO_ICMP => "icmp".into(),
        libc::IPPROTO_ICMPV6 => "ipv6-icmp".into(),
        other => other.to_string(),
    }
}

/// The number of a protocol in [`protocol`]'s words.
pub(super) fn protocol_number(name: &str) -> Option<u8> {
    name.parse().ok().or_else(|| (1..=u8::MAX).find(|number| protocol(*number) == name))
}

fn multiport(info: &[u8]) -> Option<(&'static str, String)> {
    const FLAGS: usize = offset_of!(Multiport, begins_range);
    let option = match info.get(offset_of!(Multiport, kind))? {
        0 => "--sports",
        1 => "--dports",
        2 => "--ports",
        _ => return None,
    };
    let count = usize::from(*info.get(offset_of!(Multiport, count))?);
    let flags = info.get(FLAGS..FLAGS + xt::PORTS)?;
    if count > xt::PORTS || *info.get(offset_of!(Multiport, invert))? != 0 {
        return None;
    }
    let mut text = String::new();
    for (index, begins_range) in flags.iter().enumerate().take(count) {
        text += &u16_at(info, offset_of!(Multiport, ports) + 2 * index)?.to_string();
        if index + 1 < count {
            text.push(if *begins_range == 0 { ',' } else { ':' });
        }
    }
    Some((option, text))
}

/// Where a DNAT goes, if that is one address and at most one port: `10.0.0.2:80`, `[fd00::2]:80`.
fn destination(family: Family, revision: u32, info: &[u8]) -> Option<String> {
    let size = if family == Family::V4 { 4 } else { 16 };
    let (flags, from, to, port) = if revision == 0 && family == Family::V4 {
        if u32_at(info, offset_of!(NatV4, count))? != 1 {
            return None;
        }
        (offset_of!(NatV4, flags), offset_of!(NatV4, first), offset_of!(NatV4, last), offset_of!(NatV4, first_port))
    } else {
        (offset_of!(Range, flags), offset_of!(Range, first), offset_of!(Range, last), offset_of!(Range, first_port))
    };
    let (flags, from, to) = (u32_at(info, flags)?, info.get(from..from + size)?, info.get(to..to + size)?);
    let (first, last) = (be16_at(info, port)?, be16_at(info, port + 2)?);
    if flags & !(MAP_IPS | PROTO_SPECIFIED) != 0 || flags & MAP_IPS == 0 || from != to {
        return None;
    }
    let address = address(from)?;
    match flags & PROTO_SPECIFIED {
        0 => Some(address.to_string()),
        _ if first != last => None,
        _ if address.is_ipv6() => Some(format!("[{address}]:{first}")),
        _ => Some(format!("{address}:{first}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nft::Rule as Raw;
    use crate::nft::expr::{Reg, daddr, masked, saddr};
    use proptest::prelude::*;

    fn in_words(exprs: Vec<Expr>) -> Vec<String> {
        words(Family::V4, &exprs)
    }

    #[test]
    fn of_a_conntrack_match_only_the_states_are_read() {
        let states = |at: usize, value: u16| {
            let mut info = vec![0; 164];
            for (at, value) in [(146, 1_u16), (150, 6), (at, value)] {
                info[at..at + 2].copy_from_slice(&value.to_ne_bytes());
            }
            conntrack_states(&info)
        };
        assert_eq!(states(150, 6).as_deref(), Some("RELATED,ESTABLISHED"));
        for (at, value) in [(146, 3), (148, 1), (150, 64)] {
            assert_eq!(states(at, value), None, "{value} at {at}");
        }
    }

    #[test]
    fn a_prefix_is_read_from_a_mask_as_from_a_shorter_load() {
        let network = daddr("10.1.0.0".parse().unwrap());
        let (Expr::Payload { base, offset, to, .. }, data) = (network[0].clone(), vec![10, 1, 0, 0]) else { panic!() };
        let mask = Expr::Bitwise { reg: to, mask: vec![255, 255, 0, 0], xor: vec![0; 4] };
        let older = vec![
            Expr::Payload { base, offset, len: 4, to },
            mask.clone(),
            Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data: data.clone() },
        ];
        assert_eq!(in_words(older), ["-d", "10.1.0.0/16"]);
        assert_eq!(in_words(masked(network, 16)), ["-d", "10.1.0.0/16"]);
        // A mask with a hole is none.
        let hole = Expr::Bitwise { reg: to, mask: vec![255, 0, 255, 0], xor: vec![0; 4] };
        let odd = [Expr::Payload { base, offset, len: 4, to }, hole, Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data }];
        assert_eq!(in_words(odd.into()), Vec::<String>::new());
    }

    #[test]
    fn a_comment_in_nfts_own_place_is_found() {
        let mut exprs = saddr("10.1.2.3".parse().unwrap());
        exprs.push(Expr::Verdict(Verdict::Jump("CNI-A".into())));
        let written = Raw::new(exprs).with_comment("name: \"n\"");
        let listed = Listed { handle: 7, rule: written, raw: nft::Raw::default() };
        let rule = rule(Family::V4, listed);
        assert_eq!(
            (rule.comment(), rule.target(), rule.value("-s")),
            (Some("name: \"n\""), Some("CNI-A"), Some("10.1.2.3/32"))
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn arbitrary_structures_never_panic(
            name in "comment|multiport|addrtype|mark|tcp|udp|sctp|MASQUERADE|DNAT|MARK|x",
            revision in 0_u32..4,
            info in proptest::collection::vec(any::<u8>(), 0..320),
        ) {
            for family in [Family::V4, Family::V6] {
                let (a, b) = (name.clone(), name.clone());
                let exprs = [
                    Expr::XtMatch { name: a, revision, info: info.clone() },
                    Expr::XtTarget { name: b, revision, info: info.clone() },
                ];
                drop(words(family, &exprs));
            }
        }

        #[test]
        fn arbitrary_comparisons_never_panic(
            key in 0_u32..20,
            offset in 0_u32..30,
            len in 0_u32..20,
            mask in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..20)),
            data in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            for family in [Family::V4, Family::V6] {
                for base in [Base::NETWORK, Base::TRANSPORT] {
                    let mask = mask.clone().map(|mask| Expr::Bitwise { reg: Reg::R1, xor: vec![0; mask.len()], mask });
                    let cmp = Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data: data.clone() };
                    let payload = Expr::Payload { base, offset, len, to: Reg::R1 };
                    let meta = Expr::Meta { key: MetaKey(key), to: Reg::R1 };
                    for load in [payload, meta] {
                        let exprs: Vec<Expr> = [Some(load), mask.clone(), Some(cmp.clone())].into_iter().flatten().collect();
                        drop(words(family, &exprs));
                    }
                }
            }
        }
    }
}
