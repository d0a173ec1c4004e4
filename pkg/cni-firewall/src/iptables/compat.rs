//! Translates rules of iptables-nft, read over netlink, to the words that `iptables -S` prints.
//!
//! Only the parts that CNI plugins write are known, in every form that iptables has written since
//! 1.8.2: a match can be one of xtables or an expression of nf_tables, and a prefix can be compared
//! with a mask or by loading only its first bytes. A rule with other parts is not
//! [whole](super::Rule::is_whole). No rule can make a function here fail or panic, because any
//! program may have written it.

use super::rule::Rule;
use super::{extensions, fields};
use crate::nft::expr::{Base, CmpOp, Expr, MetaKey, Verdict};
use crate::nft::{self, Listed};
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

/// What the rule has loaded into a register of nf_tables for the next comparison.
#[derive(Clone, Copy)]
enum Loaded {
    Source,
    Destination,
    Protocol,
    SourcePort,
    DestinationPort,
    InputInterface,
    OutputInterface,
    Mark,
    Unknown,
}

/// Returns a rule of nf_tables in the words of iptables. Unknown parts are left out; the rule is
/// then not [whole](Rule::is_whole).
pub(crate) fn rule_in_words(family: Family, listed: Listed) -> Rule {
    let Listed { handle, rule: nft::Rule { exprs, comment, .. }, .. } = listed;
    let mut parts = RuleParts::read(family, &exprs);
    // Some releases of iptables store the comment as nft does: not in an expression.
    if let Some(comment) = comment {
        parts.matches.splice(0..0, ["-m".into(), "comment".into(), "--comment".into(), comment]);
    }
    parts.into_rule(handle)
}

/// Returns these expressions in the words of iptables; unknown expressions are left out. Two forms
/// of the same rule (a mask or a shorter load) give the same words.
pub(crate) fn words(family: Family, exprs: &[Expr]) -> Vec<String> {
    // The words do not contain the handle, so its value does not matter.
    RuleParts::read(family, exprs).into_rule(0).words
}

/// Returns what a `meta` expression with this key loads.
fn loaded_by_meta(key: MetaKey) -> Loaded {
    match key {
        MetaKey::MARK => Loaded::Mark,
        MetaKey::IIFNAME => Loaded::InputInterface,
        MetaKey::OIFNAME => Loaded::OutputInterface,
        MetaKey::L4PROTO => Loaded::Protocol,
        _ => Loaded::Unknown,
    }
}

/// Returns the header field that a `payload` expression loads: `len` bytes at `offset` of the IP or
/// the transport header. For an address any `len` is accepted: a short load compares a prefix.
fn loaded_by_payload(family: Family, base: Base, offset: u32, len: u32) -> Loaded {
    // The IP header has the source, the destination and the protocol at 12, 16 and 9 in IPv4, at 8,
    // 24 and 6 in IPv6. TCP, UDP and SCTP begin with the source port, then the destination port.
    match (base, family, offset, len) {
        (Base::NETWORK, Family::V4, 12, _) | (Base::NETWORK, Family::V6, 8, _) => Loaded::Source,
        (Base::NETWORK, Family::V4, 16, _) | (Base::NETWORK, Family::V6, 24, _) => Loaded::Destination,
        (Base::NETWORK, Family::V4, 9, 1) | (Base::NETWORK, Family::V6, 6, 1) => Loaded::Protocol,
        (Base::TRANSPORT, _, 0, 2) => Loaded::SourcePort,
        (Base::TRANSPORT, _, 2, 2) => Loaded::DestinationPort,
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
                Expr::Meta { key, .. } => (loaded, mask) = (loaded_by_meta(*key), None),
                Expr::Payload { base, offset, len, .. } => {
                    (loaded, mask) = (loaded_by_payload(family, *base, *offset, *len), None);
                }
                Expr::Bitwise { mask: bits, xor, .. } => {
                    // Plugins write only masks, with an `xor` of 0.
                    parts.whole &= xor.iter().all(|byte| *byte == 0);
                    mask = Some(bits);
                }
                Expr::Cmp { op, data, .. } => parts.read_comparison(family, loaded, mask.take(), *op, data),
                Expr::XtMatch { name, revision, info } => parts.read_match(name, *revision, info),
                Expr::XtTarget { name, revision, info } => parts.read_target(family, name, *revision, info),
                Expr::Verdict(verdict) => parts.read_verdict(verdict),
                Expr::Masquerade => parts.push_target("MASQUERADE"),
                // Every rule of iptables has a counter; `-S` does not print it.
                Expr::Other(name) if name == "counter" => {}
                _ => parts.whole = false,
            }
        }
        parts
    }

    /// Adds the words of a comparison of `loaded` with `data`. With a `mask` only its bits are
    /// compared. A comparison that plugins do not write clears `whole`.
    fn read_comparison(&mut self, family: Family, loaded: Loaded, mask: Option<&[u8]>, op: CmpOp, data: &[u8]) {
        let is_negated = match op {
            CmpOp::EQ => false,
            CmpOp::NE => true,
            _ => {
                self.whole = false;
                return;
            }
        };
        let option_words = |name: &str, value: String| {
            let mut words = vec![name.to_owned(), value];
            if is_negated {
                words.insert(0, "!".to_owned());
            }
            words
        };
        match (loaded, mask) {
            (Loaded::Source, mask) => match fields::prefix(family, mask, data) {
                Some(prefix) => self.source = option_words("-s", prefix),
                None => self.whole = false,
            },
            (Loaded::Destination, mask) => match fields::prefix(family, mask, data) {
                // Only rules of nf_tables have several: those of masquerading with exclusions.
                Some(prefix) => self.destination.extend(option_words("-d", prefix)),
                None => self.whole = false,
            },
            (Loaded::InputInterface, None) => self.interfaces.extend(option_words("-i", fields::interface(data))),
            (Loaded::OutputInterface, None) => self.interfaces.extend(option_words("-o", fields::interface(data))),
            (Loaded::Protocol, None) => {
                let name = fields::protocol_name(data.first().copied().unwrap_or(0));
                if is_negated {
                    self.negated_protocol = option_words("-p", name);
                } else {
                    self.protocol = Some(name);
                }
            }
            (Loaded::SourcePort, None) if !is_negated => self.push_port("--sport", data),
            (Loaded::DestinationPort, None) if !is_negated => self.push_port("--dport", data),
            (Loaded::Mark, mask) if !is_negated => {
                let mask = match mask {
                    Some(mask) => fields::number(mask),
                    None => Some(u32::MAX),
                };
                match (fields::number(data), mask) {
                    (Some(value), Some(mask)) => self.push_mark(value, mask),
                    _ => self.whole = false,
                }
            }
            _ => self.whole = false,
        }
    }

    /// Adds the words of a match.
    fn push_match(&mut self, words: &[&str]) {
        self.matches.extend(words.iter().map(|word| (*word).to_owned()));
    }

    /// Adds a match of one port: `-m tcp --dport 80`. The match has the name of the protocol that
    /// an earlier expression compares. `data` is the port in network byte order; if it does not
    /// have two bytes, clears `whole`.
    fn push_port(&mut self, option: &str, data: &[u8]) {
        let Ok(bytes) = <[u8; 2]>::try_from(data) else {
            self.whole = false;
            return;
        };
        let protocol = self.protocol.clone().unwrap_or_default();
        self.push_match(&["-m", &protocol, option, &u16::from_be_bytes(bytes).to_string()]);
    }

    /// Adds a match of the packet's mark.
    fn push_mark(&mut self, value: u32, mask: u32) {
        self.push_match(&["-m", "mark", "--mark", &extensions::mark_text(value, mask)]);
    }

    /// Adds the words of a match of xtables with the structure `info`. A match that plugins do not
    /// write clears `whole`.
    fn read_match(&mut self, name: &str, revision: u32, info: &[u8]) {
        if name == "comment" {
            return self.push_match(&["-m", name, "--comment", &extensions::read_comment(info)]);
        }
        match extensions::read_match(name, revision, info) {
            Some((option, value)) => self.push_match(&["-m", name, option, &value]),
            None => self.whole = false,
        }
    }

    /// Adds `-j TARGET`.
    fn push_target(&mut self, target: &str) {
        self.target.extend(["-j".to_owned(), target.to_owned()]);
    }

    /// Adds the words of a target of xtables with the structure `info`: always the name, and the
    /// options if they are known. An unknown name or option clears `whole`.
    fn read_target(&mut self, family: Family, name: &str, revision: u32, info: &[u8]) {
        self.push_target(name);
        match extensions::read_target(family, name, revision, info) {
            Some(options) => self.target.extend(options),
            None => self.whole = false,
        }
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

    /// Returns the rule with this handle. Its words are in the order in which iptables prints them.
    fn into_rule(self, handle: u64) -> Rule {
        let mut words = [self.source, self.destination, self.interfaces].concat();
        words.extend(self.protocol.into_iter().flat_map(|name| ["-p".to_owned(), name]));
        words.extend(self.negated_protocol);
        words.extend(self.matches);
        words.extend(self.target);
        Rule { words, handle: Some(handle), whole: self.whole }
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
        // The offsets in the kernel's structure, counted by hand.
        const MATCHED: usize = 146;
        const INVERTED: usize = 148;
        const STATES: usize = 150;
        let states = |at: usize, value: u16| {
            let mut info = vec![0; 164];
            for (at, value) in [(MATCHED, 1_u16), (STATES, 6), (at, value)] {
                info[at..at + 2].copy_from_slice(&value.to_ne_bytes());
            }
            extensions::read_match("conntrack", 3, &info).map(|(_, states)| states)
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
        let rule = rule_in_words(Family::V4, listed);
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
