//! Compiles `conditionsV4` and `conditionsV6`: extra matches in the syntax of iptables or of nft.
//!
//! [`syntax_of`] decides which syntax it is, as Go does. [`compile`] compiles a subset of nft's;
//! the rest needs the program `nft`. Conditions in the syntax of iptables are checked by
//! [`iptables::check_conditions`](crate::iptables::check_conditions).
//!
//! The subset, each match any number of times, in any order:
//! ```text
//! [meta] iifname|oifname [==|!=] NAME         NAME may end in *
//! ip|ip6 saddr|daddr     [==|!=] ADDRESS[/LENGTH]
//! [meta] mark [& NUMBER] [==|!=] NUMBER
//! tcp|udp|sctp sport     [==|!=] PORT
//! ```
//! A string of the list can have several tokens: Go joins the strings with blanks.

use std::iter::Peekable;
use std::net::IpAddr;
use std::vec::IntoIter;

use super::super::nft::expr::{self, Base, CmpOp, Expr, MetaKey, Reg};
use super::Protocol;
use crate::Backend;
use cni_linux::route::Family;

/// Returns the backend that has the syntax of these conditions: iptables if the first string begins
/// as an option of its program does. `None` without conditions.
pub fn syntax_of(conditions: &[String]) -> Option<Backend> {
    let first = conditions.first()?;
    Some(if first.starts_with(['-', '!']) { Backend::Iptables } else { Backend::Nftables })
}

/// Compiles conditions in nft's syntax for one family.
///
/// # Errors
/// The first token that is not in the subset; empty if a token is missing at the end. The program
/// `nft` may still understand it.
pub fn compile(conditions: &[String], family: Family) -> Result<Vec<Expr>, String> {
    let tokens: Vec<&str> = conditions.iter().flat_map(|condition| condition.split_whitespace()).collect();
    let mut reader = Reader { tokens: tokens.into_iter().peekable() };
    let mut exprs = Vec::new();
    while reader.tokens.peek().is_some() {
        exprs.extend(reader.condition(family)?);
    }
    Ok(exprs)
}

/// Reads conditions token by token.
struct Reader<'w> {
    /// The tokens that have not been read.
    tokens: Peekable<IntoIter<&'w str>>,
}

impl<'w> Reader<'w> {
    /// Returns the next token; an empty one at the end.
    fn next(&mut self) -> &'w str {
        self.tokens.next().unwrap_or_default()
    }

    /// Skips the next token if it is one of these. Returns whether it was.
    fn skip_any(&mut self, tokens: &[&str]) -> bool {
        self.tokens.next_if(|token| tokens.contains(token)).is_some()
    }

    /// Takes the next token and returns what `parse` makes of it. Fails with the token if `parse`
    /// returns `None`.
    fn parse_next<T>(&mut self, parse: impl Fn(&str) -> Option<T>) -> Result<T, String> {
        let token = self.next();
        parse(token).ok_or_else(|| token.to_owned())
    }

    /// Compiles the next condition, which is one line of the subset in the module's documentation.
    /// Rules of one family cannot match addresses of the other, so only the keyword of `family` is
    /// accepted.
    fn condition(&mut self, family: Family) -> Result<Vec<Expr>, String> {
        let has_meta = self.skip_any(&["meta"]);
        let ip_keyword = match family {
            Family::V4 => "ip",
            Family::V6 => "ip6",
        };
        let token = self.next();
        match token {
            "iifname" => self.comparison(|reader| reader.interface(MetaKey::IIFNAME)),
            "oifname" => self.comparison(|reader| reader.interface(MetaKey::OIFNAME)),
            "mark" => self.mark(),
            _ if token == ip_keyword && !has_meta => {
                let match_address: fn(IpAddr) -> Vec<Expr> = match self.next() {
                    "saddr" => expr::saddr,
                    "daddr" => expr::daddr,
                    other => return Err(other.to_owned()),
                };
                self.comparison(|reader| reader.address(match_address, family))
            }
            _ => match Protocol::ALL.into_iter().find(|protocol| protocol.name() == token) {
                Some(protocol) if !has_meta => self.source_port(protocol),
                _ => Err(token.to_owned()),
            },
        }
    }

    /// Compiles an optional operator, by default `==`, and the value after it. `compile_equal`
    /// reads the value and returns the match for `==`.
    fn comparison(
        &mut self,
        compile_equal: impl Fn(&mut Self) -> Result<Vec<Expr>, String>,
    ) -> Result<Vec<Expr>, String> {
        let is_negated = self.skip_any(&["!=", "ne"]);
        if !is_negated {
            self.skip_any(&["==", "eq"]);
        }
        let exprs = compile_equal(self)?;
        Ok(if is_negated { expr::not(exprs) } else { exprs })
    }

    /// Compiles an interface name, with or without quotes. `eth*` matches all names that begin with
    /// `eth`; any other name is compared with the NULs that pad it in the kernel. `key` selects the
    /// incoming or the outgoing interface.
    fn interface(&mut self, key: MetaKey) -> Result<Vec<Expr>, String> {
        self.parse_next(|token| {
            let name = token.strip_prefix('"').and_then(|token| token.strip_suffix('"')).unwrap_or(token);
            let (text, is_whole) = match name.strip_suffix('*') {
                Some(beginning) => (beginning, false),
                None => (name, true),
            };
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
            if text.is_empty() || text.len() >= libc::IFNAMSIZ || !text.bytes().all(is_plain) {
                return None;
            }
            let mut data = text.as_bytes().to_vec();
            if is_whole {
                data.resize(libc::IFNAMSIZ, 0);
            }
            Some(vec![Expr::Meta { key, to: Reg::R1 }, Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data }])
        })
    }

    /// Compiles `ADDRESS[/LENGTH]`. `match_address`, which is [`expr::saddr`] or
    /// [`expr::daddr`], returns the match for one address.
    fn address(&mut self, match_address: fn(IpAddr) -> Vec<Expr>, family: Family) -> Result<Vec<Expr>, String> {
        self.parse_next(|token| {
            let (address_text, given_length) = match token.split_once('/') {
                Some((text, length)) => (text, Some(length.parse::<u8>().ok()?)),
                None => (token, None),
            };
            let address: IpAddr = address_text.parse().ok()?;
            let bits = if address.is_ipv4() { 32 } else { 128 };
            let length = given_length.unwrap_or(bits);
            if Family::of(address) != family || length > bits {
                return None;
            }
            let exprs = match_address(address);
            Some(if length < bits { expr::masked(exprs, length) } else { exprs })
        })
    }

    /// Compiles the rest of `mark [& NUMBER] [==|!=] NUMBER`.
    fn mark(&mut self) -> Result<Vec<Expr>, String> {
        let mask = if self.skip_any(&["&", "and"]) { Some(self.parse_next(number)?) } else { None };
        self.comparison(|reader| {
            let value = reader.parse_next(number)?;
            let mut exprs = vec![Expr::Meta { key: MetaKey::MARK, to: Reg::R1 }];
            if let Some(mask) = mask {
                exprs.push(Expr::Bitwise { reg: Reg::R1, mask: mask.to_ne_bytes().to_vec(), xor: vec![0; 4] });
            }
            exprs.push(Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data: value.to_ne_bytes().to_vec() });
            Ok(exprs)
        })
    }

    /// Compiles the rest of `PROTOCOL sport [==|!=] PORT`.
    fn source_port(&mut self, protocol: Protocol) -> Result<Vec<Expr>, String> {
        // Fails unless the next token is `sport`.
        self.parse_next(|token| (token == "sport").then_some(()))?;
        self.comparison(|reader| {
            let port: u16 = reader.parse_next(|token| token.parse().ok())?;
            let mut exprs = expr::l4proto(protocol.number());
            // The source port in the header of TCP, UDP or SCTP.
            exprs.push(Expr::Payload { base: Base::TRANSPORT, offset: 0, len: 2, to: Reg::R1 });
            exprs.push(Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data: port.to_be_bytes().to_vec() });
            Ok(exprs)
        })
    }
}

/// Reads a number as nft does: decimal, or hexadecimal after 0x.
fn number(token: &str) -> Option<u32> {
    match token.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => token.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn compiled(text: &str) -> Result<Vec<Expr>, String> {
        compile(&[text.to_owned()], Family::V4)
    }

    #[test]
    fn the_first_token_decides_the_dialect() {
        let dialect = |text: &str| syntax_of(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(dialect("-s 10.0.0.0/8"), Some(Backend::Iptables));
        assert_eq!(dialect("! -s 10.0.0.0/8"), Some(Backend::Iptables));
        assert_eq!(dialect("ip saddr 10.0.0.0/8"), Some(Backend::Nftables));
        assert_eq!(syntax_of(&[]), None);
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
