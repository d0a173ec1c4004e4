//! `conditionsV4` and `conditionsV6`: extra matches, written in the words of iptables or of nft.
//!
//! [`ConditionSyntax::of`] decides which, as Go does. For nft a subset is compiled here
//! ([`compile`]); what is beyond it only `nft` itself understands. What iptables may be given is
//! judged by [`iptables::check_conditions`](crate::iptables::check_conditions).
//!
//! The subset, each any number of times, in any order:
//! ```text
//! [meta] iifname|oifname [==|!=] NAME         NAME may end in *
//! ip|ip6 saddr|daddr     [==|!=] ADDRESS[/LENGTH]
//! [meta] mark [& NUMBER] [==|!=] NUMBER
//! tcp|udp|sctp sport     [==|!=] PORT
//! ```
//! A string of the list may be several tokens: Go joins them with blanks, so
//! `"ip saddr 10.0.0.0/8"` equals three strings.

use std::net::IpAddr;

use super::super::nft::expr::{self, Base, CmpOp, Expr, MetaKey, Reg};
use super::Protocol;
use cni_linux::route::Family;

/// In whose words conditions are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionSyntax {
    /// Options of the program iptables.
    Iptables,
    /// The language of nft.
    Nft,
}

impl ConditionSyntax {
    /// Judged by the first token; `None` if there is none.
    pub fn of(conditions: &[String]) -> Option<ConditionSyntax> {
        let first = conditions.first()?;
        Some(if first.starts_with(['-', '!']) { ConditionSyntax::Iptables } else { ConditionSyntax::Nft })
    }
}

/// The part of a condition that could not be compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// The token where the known words end; empty if there should have been one more.
    pub token: String,
}

/// Compiles conditions of one family.
///
/// # Errors
/// The first token that is beyond the subset, which does not say that it is wrong.
pub fn compile(conditions: &[String], family: Family) -> Result<Vec<Expr>, Unknown> {
    let words: Vec<&str> = conditions.iter().flat_map(|condition| condition.split_whitespace()).collect();
    let mut reader = Reader { words: &words };
    let mut exprs = Vec::new();
    while !reader.words.is_empty() {
        exprs.extend(reader.one(family)?);
    }
    Ok(exprs)
}

struct Reader<'w> {
    words: &'w [&'w str],
}

impl<'w> Reader<'w> {
    fn next(&mut self) -> &'w str {
        let (word, rest) = self.words.split_first().map_or(("", self.words), |(word, rest)| (*word, rest));
        self.words = rest;
        word
    }

    fn take(&mut self, options: &[&str]) -> bool {
        let found = self.words.first().is_some_and(|word| options.contains(word));
        if found {
            self.next();
        }
        found
    }

    /// The next word as `read` understands it.
    fn value<T>(&mut self, read: impl Fn(&str) -> Option<T>) -> Result<T, Unknown> {
        let word = self.next();
        read(word).ok_or_else(|| Unknown { token: word.to_owned() })
    }

    fn one(&mut self, family: Family) -> Result<Vec<Expr>, Unknown> {
        let meta = self.take(&["meta"]);
        let word = self.next();
        match word {
            "iifname" => self.compared(|reader| reader.name(MetaKey::IIFNAME)),
            "oifname" => self.compared(|reader| reader.name(MetaKey::OIFNAME)),
            "mark" => self.mark(),
            "ip" | "ip6" if !meta && (word == "ip") == (family == Family::V4) => {
                let side = self.value(|word| match word {
                    "saddr" => Some(expr::saddr as fn(IpAddr) -> Vec<Expr>),
                    "daddr" => Some(expr::daddr),
                    _ => None,
                })?;
                self.compared(|reader| reader.address(side, family))
            }
            _ => match Protocol::by_name(word).filter(|protocol| protocol.name() == word && !meta) {
                Some(protocol) => self.source_port(protocol),
                None => Err(Unknown { token: word.to_owned() }),
            },
        }
    }

    /// A comparison whose operator stands before its value; none is `==`.
    fn compared(&mut self, value: impl Fn(&mut Self) -> Result<Vec<Expr>, Unknown>) -> Result<Vec<Expr>, Unknown> {
        let negated = self.take(&["!=", "ne"]);
        if !negated {
            self.take(&["==", "eq"]);
        }
        let exprs = value(self)?;
        Ok(if negated { expr::not(exprs) } else { exprs })
    }

    fn name(&mut self, key: MetaKey) -> Result<Vec<Expr>, Unknown> {
        self.value(|word| {
            let name = word.strip_prefix('"').and_then(|word| word.strip_suffix('"')).unwrap_or(word);
            let plain = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte));
            let data = match name.strip_suffix('*') {
                Some(prefix) if plain(prefix) && !prefix.is_empty() && prefix.len() < libc::IFNAMSIZ => {
                    prefix.as_bytes().to_vec()
                }
                None if plain(name) && !name.is_empty() && name.len() < libc::IFNAMSIZ => {
                    let mut data = name.as_bytes().to_vec();
                    data.resize(libc::IFNAMSIZ, 0);
                    data
                }
                _ => return None,
            };
            Some(vec![Expr::Meta { key, to: Reg::R1 }, Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data }])
        })
    }

    fn address(&mut self, side: fn(IpAddr) -> Vec<Expr>, family: Family) -> Result<Vec<Expr>, Unknown> {
        self.value(|word| {
            let (address, prefix) = match word.split_once('/') {
                Some((address, prefix)) => (address, Some(prefix.parse::<u8>().ok()?)),
                None => (word, None),
            };
            let address: IpAddr = address.parse().ok()?;
            let bits = if address.is_ipv4() { 32 } else { 128 };
            if Family::of(address) != family || prefix.is_some_and(|prefix| prefix > bits) {
                return None;
            }
            let exprs = side(address);
            Some(match prefix.filter(|prefix| *prefix < bits) {
                Some(prefix) => expr::masked(exprs, prefix),
                None => exprs,
            })
        })
    }

    fn mark(&mut self) -> Result<Vec<Expr>, Unknown> {
        let mask = match self.take(&["&", "and"]) {
            true => Some(self.value(number)?),
            false => None,
        };
        self.compared(|reader| {
            let wanted = reader.value(number)?;
            let mut exprs = vec![Expr::Meta { key: MetaKey::MARK, to: Reg::R1 }];
            exprs.extend(mask.map(|mask| Expr::Bitwise {
                reg: Reg::R1,
                mask: mask.to_ne_bytes().to_vec(),
                xor: vec![0; 4],
            }));
            exprs.push(Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data: wanted.to_ne_bytes().to_vec() });
            Ok(exprs)
        })
    }

    fn source_port(&mut self, protocol: Protocol) -> Result<Vec<Expr>, Unknown> {
        self.value(|word| (word == "sport").then_some(()))?;
        self.compared(|reader| {
            let port: u16 = reader.value(|word| word.parse().ok())?;
            let mut exprs = expr::l4proto(protocol.number());
            exprs.push(Expr::Payload { base: Base::TRANSPORT, offset: 0, len: 2, to: Reg::R1 });
            exprs.push(Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data: port.to_be_bytes().to_vec() });
            Ok(exprs)
        })
    }
}

/// As nft reads numbers: decimal, or hexadecimal after 0x.
fn number(word: &str) -> Option<u32> {
    match word.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn compiled(text: &str) -> Result<Vec<Expr>, String> {
        compile(&[text.to_owned()], Family::V4).map_err(|unknown| unknown.token)
    }

    #[test]
    fn the_first_token_decides_the_dialect() {
        let dialect = |text: &str| ConditionSyntax::of(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(dialect("-s 10.0.0.0/8"), Some(ConditionSyntax::Iptables));
        assert_eq!(dialect("! -s 10.0.0.0/8"), Some(ConditionSyntax::Iptables));
        assert_eq!(dialect("ip saddr 10.0.0.0/8"), Some(ConditionSyntax::Nft));
        assert_eq!(ConditionSyntax::of(&[]), None);
    }

    #[test]
    fn the_subset_is_compiled_however_it_is_cut_into_strings() {
        let whole = compiled("ip saddr != 10.0.0.0/8 iifname \"eth0\" meta mark & 0xff == 1 tcp sport 53").unwrap();
        let words: Vec<String> = "ip saddr != 10.0.0.0/8 iifname eth0 mark and 255 0x1 tcp sport eq 53"
            .split(' ')
            .map(str::to_owned)
            .collect();
        assert_eq!(compile(&words, Family::V4).unwrap(), whole);
        assert_eq!(whole.len(), 2 + 2 + 3 + 4);
        assert_eq!(compiled(""), Ok(vec![]));
    }

    #[test]
    fn what_is_beyond_the_subset_is_named() {
        for (text, token) in [
            ("ip saddr { 10.0.0.1 }", "{"),
            ("ct state new", "ct"),
            ("iifname", ""),
            ("iifname sixteen_bytes_xx", "sixteen_bytes_xx"),
            ("iifname \"a;b\"", "\"a;b\""),
            ("ip saddr 10.0.0.0/33", "10.0.0.0/33"),
            ("ip saddr fd00::1", "fd00::1"),
            ("ip6 saddr fd00::1", "ip6"),
            ("tcp dport 80", "dport"),
            ("TCP sport 80", "TCP"),
            ("meta ip saddr 10.0.0.1", "ip"),
            ("mark 0x1ffffffff", "0x1ffffffff"),
        ] {
            assert_eq!(compiled(text), Err(token.to_owned()), "{text}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_condition_makes_it_panic(words in proptest::collection::vec("[a-z0-9!=&*{}./:\" -]{0,12}", 0..8)) {
            let _ = (compile(&words, Family::V4), compile(&words, Family::V6));
        }
    }
}
