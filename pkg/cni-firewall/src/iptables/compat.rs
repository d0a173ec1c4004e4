//! Translates rules of iptables-nft, read over netlink, to the words that `iptables -S` prints.
//!
//! Only the parts that CNI plugins write are known, in every form that iptables has written since
//! 1.8.2: a match can be one of xtables or an expression of nf_tables, and a prefix can be compared
//! with a mask or by loading only its first bytes. A rule with other parts is not
//! [whole](super::Rule::is_whole). No rule can make a function here fail or panic, because any
//! program may have written it.

use super::extensions;
use super::rule::Rule;
use crate::nft::expr::{Base, CmpOp, Expr, ExtensionKind, MetaKey, Verdict, Xtables};
use crate::nft::{self, Listed};
use cni::cidr::from_octets;
use cni_linux::route::Family;

/// The words of a rule while its expressions are read. Each part of the printed line has a field,
/// because iptables prints the parts in a fixed order, which can differ from that of the
/// expressions.
#[derive(Default)]
struct RuleParts {
    source: Vec<String>,
    destination: Vec<String>,
    interfaces: Vec<String>,
    protocol: Option<String>,
    /// The words `! -p P`. They are not in `protocol`, which names the port match: `-m tcp`.
    negated_protocol: Vec<String>,
    matches: Vec<String>,
    target: Vec<String>,
    /// Whether the words describe all expressions read so far.
    whole: bool,
}

/// What the rule has loaded into a register of nf_tables for the next comparison. Some have the
/// option that iptables prints for the comparison.
#[derive(Clone, Copy)]
enum Loaded {
    Source,
    Destination,
    Protocol,
    Port(&'static str),
    Interface(&'static str),
    Mark,
    Unknown,
}

/// Returns a rule of nf_tables in the words of iptables. Unknown parts are left out; the rule is
/// then not [whole](Rule::is_whole).
pub(crate) fn rule_in_words(family: Family, listed: &Listed) -> Rule {
    let nft::Rule { exprs, comment, .. } = &listed.rule;
    let mut parts = RuleParts::read(family, exprs);
    // Some releases of iptables store the comment as nft does: not in an expression. Plugins write
    // the comment before the other matches.
    if let Some(comment) = comment {
        parts.matches.splice(0..0, ["-m".into(), "comment".into(), "--comment".into(), comment.clone()]);
    }
    Rule { handle: Some(listed.handle), whole: parts.whole, words: parts.into_words() }
}

/// Returns these expressions in the words of iptables; unknown expressions are left out. Two forms
/// of the same rule (a mask or a shorter load) give the same words.
pub(crate) fn words(family: Family, exprs: &[Expr]) -> Vec<String> {
    RuleParts::read(family, exprs).into_words()
}

/// Returns what a `meta` or `payload` expression loads: a property of the packet, or a field of its
/// IP or transport header. For an address any length is accepted: a short load compares a prefix.
fn loaded_by(family: Family, expr: &Expr) -> Loaded {
    let (source_at, destination_at, protocol_at) = match family {
        Family::V4 => (12, 16, 9),
        Family::V6 => (8, 24, 6),
    };
    match *expr {
        Expr::Meta { key: MetaKey::MARK, .. } => Loaded::Mark,
        Expr::Meta { key: MetaKey::IIFNAME, .. } => Loaded::Interface("-i"),
        Expr::Meta { key: MetaKey::OIFNAME, .. } => Loaded::Interface("-o"),
        Expr::Meta { key: MetaKey::L4PROTO, .. } => Loaded::Protocol,
        Expr::Payload { base: Base::NETWORK, offset, .. } if offset == source_at => Loaded::Source,
        Expr::Payload { base: Base::NETWORK, offset, .. } if offset == destination_at => Loaded::Destination,
        Expr::Payload { base: Base::NETWORK, offset, len: 1, .. } if offset == protocol_at => Loaded::Protocol,
        // TCP, UDP and SCTP begin with the source port, then the destination port.
        Expr::Payload { base: Base::TRANSPORT, offset: 0, len: 2, .. } => Loaded::Port("--sport"),
        Expr::Payload { base: Base::TRANSPORT, offset: 2, len: 2, .. } => Loaded::Port("--dport"),
        _ => Loaded::Unknown,
    }
}

impl RuleParts {
    /// Reads the expressions of one rule. An unknown expression clears `whole`.
    fn read(family: Family, exprs: &[Expr]) -> RuleParts {
        let mut parts = RuleParts { whole: true, ..RuleParts::default() };
        let mut loaded = Loaded::Unknown;
        let mut mask: Option<&[u8]> = None;
        for expr in exprs {
            match expr {
                Expr::Meta { .. } | Expr::Payload { .. } => (loaded, mask) = (loaded_by(family, expr), None),
                Expr::Bitwise { mask: bits, xor, .. } => {
                    // Plugins write only masks, with an `xor` of 0.
                    parts.whole &= xor.iter().all(|byte| *byte == 0);
                    mask = Some(bits);
                }
                Expr::Cmp { op, data, .. } => {
                    let words = parts.read_comparison(family, loaded, mask.take(), *op, data);
                    parts.whole &= words.is_some();
                }
                Expr::Xtables(extension) => parts.read_extension(family, extension),
                Expr::Verdict(verdict) => parts.read_verdict(verdict),
                Expr::Masquerade => parts.push_target("MASQUERADE"),
                // Every rule of iptables has a counter; `-S` does not print it.
                Expr::Other(name) if name == "counter" => {}
                _ => parts.whole = false,
            }
        }
        parts
    }

    /// Adds the words of a comparison of `loaded` with `data`. With a `mask`, only the bits of the
    /// mask are compared. For a comparison that plugins do not write, returns `None` and adds
    /// nothing.
    fn read_comparison(
        &mut self,
        family: Family,
        loaded: Loaded,
        mask: Option<&[u8]>,
        op: CmpOp,
        data: &[u8],
    ) -> Option<()> {
        let negation = match op {
            CmpOp::EQ => None,
            CmpOp::NE => Some("!".to_owned()),
            _ => return None,
        };
        let is_negated = negation.is_some();
        let option = |name: &str, value: String| negation.into_iter().chain([name.to_owned(), value]);
        match (loaded, mask) {
            (Loaded::Source, _) => self.source = option("-s", prefix(family, mask, data)?).collect(),
            // Only rules of nf_tables have several: those of masquerading with exclusions.
            (Loaded::Destination, _) => self.destination.extend(option("-d", prefix(family, mask, data)?)),
            (Loaded::Interface(name), None) => self.interfaces.extend(option(name, interface(data))),
            (Loaded::Protocol, None) => {
                let protocol = protocol_name(*data.first()?);
                if is_negated {
                    self.negated_protocol = option("-p", protocol).collect();
                } else {
                    self.protocol = Some(protocol);
                }
            }
            (Loaded::Port(name), None) if !is_negated => {
                let port = u16::from_be_bytes(data.try_into().ok()?);
                // The match of a port has the name of the protocol that an earlier expression
                // compares: `-m tcp --dport 80`. Without that expression the name is empty, and no
                // rule that plugins write has these words.
                let protocol = self.protocol.clone().unwrap_or_default();
                self.matches.extend(["-m".into(), protocol, name.into(), port.to_string()]);
            }
            (Loaded::Mark, _) if !is_negated => {
                let (value, mask_bits) = (number(data)?, number(mask.unwrap_or(&[u8::MAX; 4]))?);
                self.matches.extend(["-m", "mark", "--mark"].map(str::to_owned));
                self.matches.push(extensions::mark_text(value, mask_bits));
            }
            _ => return None,
        }
        Some(())
    }

    /// Adds the words of a match or target of xtables. If plugins do not write the match or target
    /// in this form, clears `whole`, and adds only `-j NAME` for a target and nothing for a match.
    fn read_extension(&mut self, family: Family, extension: &Xtables) {
        let options = extensions::read(family, extension);
        self.whole &= options.is_some();
        match (extension.kind, options) {
            (ExtensionKind::Match, Some(options)) => {
                self.matches.extend(["-m".to_owned(), extension.name.clone()]);
                self.matches.extend(options);
            }
            (ExtensionKind::Match, None) => {}
            (ExtensionKind::Target, options) => {
                self.push_target(&extension.name);
                self.target.extend(options.into_iter().flatten());
            }
        }
    }

    /// Adds `-j TARGET`.
    fn push_target(&mut self, target: &str) {
        self.target.extend(["-j".to_owned(), target.to_owned()]);
    }

    /// Adds the words of a verdict of nf_tables. A verdict that iptables does not have clears
    /// `whole`.
    fn read_verdict(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Accept => self.push_target("ACCEPT"),
            Verdict::Drop => self.push_target("DROP"),
            Verdict::Return => self.push_target("RETURN"),
            Verdict::Jump(chain) => self.push_target(chain),
            Verdict::Goto(chain) => self.target.extend(["-g".to_owned(), chain.clone()]),
            Verdict::Other(_) => self.whole = false,
        }
    }

    /// Returns the words in the order in which iptables prints them.
    fn into_words(self) -> Vec<String> {
        let protocol = self.protocol.into_iter().flat_map(|name| ["-p".to_owned(), name]).collect();
        let comparisons = [self.source, self.destination, self.interfaces, protocol, self.negated_protocol];
        [comparisons.concat(), self.matches, self.target].concat()
    }
}

/// Reads `bytes`, which must be four, as a number in the machine's byte order.
fn number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

/// Returns the prefix (`10.1.0.0/16`) that a comparison with `data` compares an address with.
/// Without a mask, the prefix has as many bytes as `data`: a rule of nf_tables can load and compare
/// the first bytes of an address alone. `None` for a mask with holes, for a mask whose length
/// differs from that of `data`, and for `data` that is empty or longer than an address.
fn prefix(family: Family, mask: Option<&[u8]>, data: &[u8]) -> Option<String> {
    let address_len = if family == Family::V4 { 4 } else { 16 };
    if data.is_empty() || data.len() > address_len {
        return None;
    }
    let prefix_len = match mask {
        None => data.len() * 8,
        Some(mask) if mask.len() != data.len() => return None,
        Some(mask) => {
            let mut padded = [0; 16];
            padded[..mask.len()].copy_from_slice(mask);
            let bits = u128::from_be_bytes(padded);
            if bits.count_ones() != bits.leading_ones() {
                return None;
            }
            bits.leading_ones() as usize
        }
    };
    let mut bytes = data.to_vec();
    bytes.resize(address_len, 0);
    Some(format!("{}/{prefix_len}", from_octets(&bytes)?))
}

/// Returns the interface name of a comparison with `data`, as iptables prints it. Without a NUL,
/// `data` is only the beginning of the matching names: `eth+`.
fn interface(data: &[u8]) -> String {
    let end = data.iter().position(|byte| *byte == 0);
    let name = String::from_utf8_lossy(&data[..end.unwrap_or(data.len())]).into_owned();
    if end.is_some() { name } else { name + "+" }
}

/// Returns a protocol as iptables prints it: by name, or by number if CNI plugins do not use the
/// protocol.
fn protocol_name(number: u8) -> String {
    match i32::from(number) {
        libc::IPPROTO_TCP => "tcp".into(),
        libc::IPPROTO_UDP => "udp".into(),
        libc::IPPROTO_SCTP => "sctp".into(),
        libc::IPPROTO_ICMP => "icmp".into(),
        libc::IPPROTO_ICMPV6 => "ipv6-icmp".into(),
        other => other.to_string(),
    }
}

/// Returns the number of the protocol that [`protocol_name`] prints as `name`, which can itself be
/// a number. `None` for any other name.
pub(super) fn protocol_number(name: &str) -> Option<u8> {
    name.parse().ok().or_else(|| (1..=u8::MAX).find(|number| protocol_name(*number) == name))
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
        // The offsets in the kernel's structure, counted by hand.
        const MATCHED: usize = 146;
        const INVERTED: usize = 148;
        const STATES: usize = 150;
        let states = |at: usize, value: u16| {
            let mut info = vec![0; 164];
            for (at, value) in [(MATCHED, 1_u16), (STATES, 6), (at, value)] {
                info[at..at + 2].copy_from_slice(&value.to_ne_bytes());
            }
            let conntrack = Xtables { kind: ExtensionKind::Match, name: "conntrack".into(), revision: 3, info };
            extensions::read(Family::V4, &conntrack)?.pop()
        };
        assert_eq!(states(STATES, 6).as_deref(), Some("RELATED,ESTABLISHED"));
        assert_eq!(states(STATES, 128).as_deref(), Some("DNAT"));
        for (at, value) in [(MATCHED, 3), (INVERTED, 1), (STATES, 64)] {
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
        let listed = Listed { handle: 7, rule: written };
        let rule = rule_in_words(Family::V4, &listed);
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
            let extension = |kind| Expr::Xtables(Xtables { kind, name: name.clone(), revision, info: info.clone() });
            let exprs = [ExtensionKind::Match, ExtensionKind::Target].map(extension);
            for family in [Family::V4, Family::V6] {
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
