//! Encodes rules, given in the words of `iptables -S`, as the expressions of nf_tables that
//! iptables-nft writes. [`compat`](super::compat) does the reverse.
//!
//! Every release of iptables from 1.8.4 on can print these expressions. Protocol, interfaces,
//! addresses and verdicts are expressions of nf_tables; all other matches and targets are those of
//! xtables. An address is loaded whole, and a prefix is compared with a mask. Newer releases of
//! iptables load only the bytes of the prefix, and write ports and marks as expressions of
//! nf_tables: 1.8.4 and 1.8.7 misread these.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::compat::protocol_number;
use super::extensions::{self, decimal};
use crate::nft::expr::{self, CmpOp, Expr, ExtensionKind, MetaKey, Reg, Verdict};
use cni_linux::route::Family;

/// Encodes the rule with these words. `None` for words that plugins do not write themselves, for
/// example conditions of a user: then `iptables-restore` has to write the rule.
pub(super) fn rule(family: Family, words: &[String]) -> Option<Vec<Expr>> {
    let mut encoder = Encoder { family, comparisons: Vec::new(), matches: Vec::new(), options: BTreeSet::new() };
    let mut words = words.iter().map(String::as_str);
    let mut target = Vec::new();
    while let Some(word) = words.next() {
        match word {
            "-j" | "-g" => {
                // Plugins write no words after the target and its options.
                target.push(encoder.encode_target(word, &words.by_ref().collect::<Vec<_>>())?);
            }
            "!" => encoder.add_option(words.next()?, &mut words, CmpOp::NE)?,
            option => encoder.add_option(option, &mut words, CmpOp::EQ)?,
        }
    }
    let counter = Expr::Other("counter".to_owned());
    Some([encoder.comparisons, encoder.matches, vec![counter], target].concat())
}

/// The expressions of a rule while its words are read.
struct Encoder {
    family: Family,
    /// Comparisons of addresses, interfaces and the protocol. They precede the matches in the rule.
    comparisons: Vec<Expr>,
    matches: Vec<Expr>,
    /// The options that have been read, except `-m`, which can be repeated.
    options: BTreeSet<String>,
}

impl Encoder {
    /// Adds the expressions of `option`, and takes its values from `words`. `op` is `NE` for a
    /// negated option. `None` if plugins do not write this option and value.
    fn add_option<'w>(&mut self, option: &str, words: &mut impl Iterator<Item = &'w str>, op: CmpOp) -> Option<()> {
        // A repeated option other than `-m` is left to iptables, which refuses it and prints why.
        if option != "-m" && !self.options.insert(option.to_owned()) {
            return None;
        }
        match option {
            "-s" => self.comparisons.extend(compare_address(self.family, words.next()?, expr::saddr, op)?),
            "-d" => self.comparisons.extend(compare_address(self.family, words.next()?, expr::daddr, op)?),
            "-i" => self.comparisons.extend(compare_interface(MetaKey::IIFNAME, words.next()?, op)?),
            "-o" => self.comparisons.extend(compare_interface(MetaKey::OIFNAME, words.next()?, op)?),
            "-p" if op == CmpOp::EQ => {
                let protocol = protocol_number(words.next()?)?;
                // `-p 0` means any protocol, so a comparison with 0 would be wrong.
                if protocol == 0 {
                    return None;
                }
                self.comparisons.extend(expr::l4proto(protocol));
            }
            "-m" if op == CmpOp::EQ => {
                // Every match that plugins write has one option with a value.
                let (name, match_option, value) = (words.next()?, words.next()?, words.next()?);
                self.matches.push(extensions::write(self.family, ExtensionKind::Match, name, &[match_option, value])?);
            }
            _ => return None,
        }
        Some(())
    }

    /// Returns the expression of a target: a verdict, or a target of xtables. `jump_option` is `-j`
    /// or `-g`; `words` are the target and the options of the target. An unknown target is the name
    /// of a chain. `None` without a target, and if plugins do not write these options.
    fn encode_target(&self, jump_option: &str, words: &[&str]) -> Option<Expr> {
        let (target, target_options) = words.split_first()?;
        let verdict = match (jump_option, *target) {
            ("-g", chain) => Verdict::Goto(chain.to_owned()),
            (_, "ACCEPT") => Verdict::Accept,
            (_, "DROP") => Verdict::Drop,
            (_, "RETURN") => Verdict::Return,
            (_, "MASQUERADE" | "DNAT" | "MARK") => {
                return extensions::write(self.family, ExtensionKind::Target, target, target_options);
            }
            (_, chain) => Verdict::Jump(chain.to_owned()),
        };
        // A verdict has no options.
        if target_options.is_empty() { Some(Expr::Verdict(verdict)) } else { None }
    }
}

/// Returns the comparison of the source or destination with `cidr`. `compare_with` is
/// [`expr::saddr`] or [`expr::daddr`], which compare with a single address. `None` if `cidr` is
/// invalid or of the other family.
fn compare_address(family: Family, cidr: &str, compare_with: fn(IpAddr) -> Vec<Expr>, op: CmpOp) -> Option<Vec<Expr>> {
    let address_bits = if family == Family::V4 { 32 } else { 128 };
    let (address, prefix_len) = match cidr.split_once('/') {
        Some((address, prefix_len)) => (address, decimal::<u8>(prefix_len)?),
        None => (cidr, address_bits),
    };
    let address: IpAddr = address.parse().ok()?;
    if Family::of(address) != family || prefix_len > address_bits {
        return None;
    }
    let mut exprs = compare_with(address);
    if prefix_len < address_bits {
        exprs = expr::with_mask(exprs, prefix_len);
    }
    Some(if op == CmpOp::NE { expr::not(exprs) } else { exprs })
}

/// Returns the comparison of an interface with `name`. `eth+` means all names that begin with
/// `eth`, so the compared bytes have no NUL at the end. `None` for `+` alone and for a name that is
/// too long.
fn compare_interface(key: MetaKey, name: &str, op: CmpOp) -> Option<Vec<Expr>> {
    let data = match name.strip_suffix('+') {
        Some(beginning) => beginning.as_bytes().to_vec(),
        None => [name.as_bytes(), &[0]].concat(),
    };
    if data.is_empty() || data.len() > libc::IFNAMSIZ {
        return None;
    }
    Some(vec![Expr::Meta { key, to: Reg::R1 }, Expr::Cmp { op, reg: Reg::R1, data }])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iptables::{split, words};

    #[test]
    fn what_is_written_is_read_as_the_same_words() {
        for line in [
            "-s 10.88.0.0/16 ! -d 224.0.0.0/4 -i eth+ ! -o cni0 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.2:80",
            "-p sctp -m comment --comment c -m sctp --dport 0 -j RETURN",
            "-m conntrack --ctstate RELATED,ESTABLISHED,DNAT -m mark --mark 0x1/0x2 -g CNI-X",
        ] {
            let exprs = rule(Family::V4, &split(line)).unwrap();
            assert_eq!(words(Family::V4, &exprs), split(line));
        }
    }

    #[test]
    fn words_that_only_iptables_understands_are_left_to_it() {
        for line in [
            "-s localhost -j ACCEPT",
            "-s 10.0.0.0/255.0.0.0 -j ACCEPT",
            "-s fd00::1 -j ACCEPT",
            "-s 10.0.0.1 -s 10.0.0.2 -j ACCEPT",
            "-p tcp --dport 80 -j ACCEPT",
            "-p all -j ACCEPT",
            "-p 0 -j ACCEPT",
            "! -p tcp -j ACCEPT",
            "-p tcp -m tcp --dport 080 -j ACCEPT",
            "-p tcp -m tcp --dport +80 -j ACCEPT",
            "-p tcp -m tcp ! --dport 80 -j ACCEPT",
            "-p tcp -m multiport --dports 80:90 -j ACCEPT",
            "-m mark --mark 010 -j ACCEPT",
            "-m conntrack --ctstate SNAT -j ACCEPT",
            "-m owner --uid-owner 0 -j ACCEPT",
            "-j DNAT --to-destination 10.0.0.2-10.0.0.3",
            "-j DNAT --to-destination fd00::2",
            "-j MASQUERADE --random",
            "-j MARK --set-mark 1",
            "-i",
            "-j",
        ] {
            assert!(rule(Family::V4, &split(line)).is_none(), "{line}");
        }
        let long = format!("-m comment --comment {} -j ACCEPT", "x".repeat(256));
        assert!(rule(Family::V4, &split(&long)).is_none(), "what iptables would cut");
    }
}
