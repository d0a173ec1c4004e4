//! A rule in the words of `iptables -S`, put into the expressions that iptables-nft itself writes:
//! the other direction of [`compat`](super::compat).
//!
//! Releases of iptables differ in what they can read. Protocol, interfaces and addresses are
//! expressions of nf_tables, an address loaded whole, with a mask for a prefix; all else is a match
//! or target of xtables. Releases from 1.8.4 on print the words of such a rule; what newer ones
//! write themselves (shorter loads, ports and marks as expressions) 1.8.4 and 1.8.7 misread.

use std::collections::BTreeSet;
use std::mem::offset_of;
use std::net::IpAddr;

use super::compat::{DESTINATION_PORTS, LOCAL, MAP_IPS, PROTO_SPECIFIED, STATE, STATES, protocol_number};
use super::xt::{self, Addrtype, Conntrack, Extension, Mark, Multiport, NatV4, Range2, SetMark, Tcp};
use crate::nft::expr::{self, CmpOp, Expr, MetaKey, Reg, Verdict};
use cni_linux::route::Family;

/// A rule as the kernel gets it.
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) exprs: Vec<Expr>,
    /// The protocol that the rule asks for, 0 for any: matches of xtables want to know.
    pub(super) protocol: u8,
}

/// The rule of these words; `None` if plugins write no such words themselves.
pub(super) fn rule(family: Family, words: &[String]) -> Option<Encoded> {
    let mut encoder = Encoder { family, head: Vec::new(), matches: Vec::new(), protocol: 0, seen: BTreeSet::new() };
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        match word {
            "-j" | "-g" => {
                let end = encoder.end(word, &mut words)?;
                let counter = Expr::Other("counter".to_owned());
                let exprs = [encoder.head, encoder.matches, vec![counter], end].concat();
                return words.next().is_none().then_some(Encoded { exprs, protocol: encoder.protocol });
            }
            "!" => encoder.option(words.next()?, &mut words, CmpOp::NE)?,
            option => encoder.option(option, &mut words, CmpOp::EQ)?,
        }
    }
    let exprs = [encoder.head, encoder.matches, vec![Expr::Other("counter".to_owned())]].concat();
    Some(Encoded { exprs, protocol: encoder.protocol })
}

struct Encoder {
    family: Family,
    head: Vec<Expr>,
    matches: Vec<Expr>,
    protocol: u8,
    seen: BTreeSet<String>,
}

impl Encoder {
    fn option<'w>(&mut self, option: &str, words: &mut impl Iterator<Item = &'w str>, op: CmpOp) -> Option<()> {
        // An option that is given twice is an error of iptables.
        if option != "-m" && !self.seen.insert(option.to_owned()) {
            return None;
        }
        match option {
            "-s" => self.head.extend(address(self.family, words.next()?, expr::saddr, op)?),
            "-d" => self.head.extend(address(self.family, words.next()?, expr::daddr, op)?),
            "-i" => self.head.extend(interface(MetaKey::IIFNAME, words.next()?, op)?),
            "-o" => self.head.extend(interface(MetaKey::OIFNAME, words.next()?, op)?),
            "-p" if op == CmpOp::EQ => {
                self.protocol = protocol_number(words.next()?).filter(|number| *number != 0)?;
                self.head.extend(expr::l4proto(self.protocol));
            }
            "-m" if op == CmpOp::EQ => {
                let (extension, info) = a_match(words.next()?, words)?;
                let (name, revision) = (extension.name.to_owned(), extension.revision);
                self.matches.push(Expr::XtMatch { name, revision, info });
            }
            _ => return None,
        }
        Some(())
    }

    /// Returns the expressions of the target: the verdict on packets that match.
    fn end<'w>(&self, option: &str, words: &mut impl Iterator<Item = &'w str>) -> Option<Vec<Expr>> {
        let target = words.next()?;
        if option == "-g" {
            return Some(vec![Expr::Verdict(Verdict::Goto(target.to_owned()))]);
        }
        let (extension, info) = match target {
            "ACCEPT" => return Some(vec![Expr::Verdict(Verdict::Accept)]),
            "DROP" => return Some(vec![Expr::Verdict(Verdict::Drop)]),
            "RETURN" => return Some(vec![Expr::Verdict(Verdict::Return)]),
            // The number of ranges is one, which says nothing.
            "MASQUERADE" if self.family == Family::V4 => {
                let mut info = Info::new(xt::MASQUERADE_V4);
                info.put(offset_of!(NatV4, count), &1_u32.to_ne_bytes());
                info.done()
            }
            "MASQUERADE" => Info::new(xt::MASQUERADE_V6).done(),
            "DNAT" => {
                let (address, port) = destination((words.next()? == "--to-destination").then(|| words.next())??)?;
                if address.is_ipv4() != (self.family == Family::V4) {
                    return None;
                }
                dnat(address, port)
            }
            "MARK" => {
                let (value, mask) = masked((words.next()? == "--set-xmark").then(|| words.next())??)?;
                let mut info = Info::new(xt::SET_MARK);
                info.put(offset_of!(SetMark, value), &value.to_ne_bytes());
                info.put(offset_of!(SetMark, mask), &mask.to_ne_bytes());
                info.done()
            }
            chain => return Some(vec![Expr::Verdict(Verdict::Jump(chain.to_owned()))]),
        };
        Some(vec![Expr::XtTarget { name: extension.name.to_owned(), revision: extension.revision, info }])
    }
}

/// A structure being filled.
struct Info(Extension, Vec<u8>);

impl Info {
    fn new(extension: Extension) -> Info {
        Info(extension, vec![0; extension.size.next_multiple_of(xt::ALIGN)])
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.1.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    fn done(self) -> (Extension, Vec<u8>) {
        (self.0, self.1)
    }
}

/// The match of this name with its one option.
fn a_match<'w>(name: &str, words: &mut impl Iterator<Item = &'w str>) -> Option<(Extension, Vec<u8>)> {
    let (option, value) = (words.next()?, words.next()?);
    let mut info;
    match (name, option) {
        // iptables cuts a longer text; the last byte ends it.
        ("comment", "--comment") if value.len() < xt::COMMENT.size && !value.contains('\0') => {
            info = Info::new(xt::COMMENT);
            info.put(0, value.as_bytes());
        }
        ("multiport", "--dports") => {
            let ports: Vec<u16> = value.split(',').map(decimal).collect::<Option<_>>()?;
            let count = u8::try_from(ports.len()).ok().filter(|count| usize::from(*count) <= xt::PORTS)?;
            info = Info::new(xt::MULTIPORT);
            info.put(offset_of!(Multiport, kind), &[1]);
            info.put(offset_of!(Multiport, count), &[count]);
            info.put(
                offset_of!(Multiport, ports),
                &ports.iter().flat_map(|port| port.to_ne_bytes()).collect::<Vec<_>>(),
            );
        }
        ("addrtype", "--dst-type") if value == "LOCAL" => {
            info = Info::new(xt::ADDRTYPE);
            info.put(offset_of!(Addrtype, destination), &LOCAL.to_ne_bytes());
        }
        ("mark", "--mark") => {
            let (value, mask) = masked(value)?;
            info = Info::new(xt::MARK);
            info.put(offset_of!(Mark, value), &value.to_ne_bytes());
            info.put(offset_of!(Mark, mask), &mask.to_ne_bytes());
        }
        ("conntrack", "--ctstate") => {
            let bit = |name: &str| STATES.iter().find(|(_, known)| *known == name).map(|(bit, _)| *bit);
            let states = value.split(',').map(bit).try_fold(0, |all, bit| Some(all | bit?))?;
            info = Info::new(xt::CONNTRACK);
            info.put(offset_of!(Conntrack, matched), &STATE.to_ne_bytes());
            info.put(offset_of!(Conntrack, states), &states.to_ne_bytes());
        }
        ("tcp" | "udp", "--dport") => {
            let port: u16 = decimal(value)?;
            info = Info::new(if name == "tcp" { xt::TCP } else { xt::UDP });
            info.put(offset_of!(Tcp, source_ports) + size_of::<u16>(), &u16::MAX.to_ne_bytes());
            info.put(offset_of!(Tcp, ports), &[port, port].map(u16::to_ne_bytes).concat());
        }
        ("sctp", "--dport") => {
            let port: u16 = decimal(value)?;
            info = Info::new(xt::SCTP);
            info.put(offset_of!(xt::Sctp, ports), &[port, port].map(u16::to_ne_bytes).concat());
            // No type of chunk; iptables compares these bytes too.
            let no_chunk = [[u8::MAX, 0, 0]; 4].concat();
            info.put(offset_of!(xt::Sctp, chunk_flags), &no_chunk);
            info.put(offset_of!(xt::Sctp, matched), &DESTINATION_PORTS.to_ne_bytes());
        }
        _ => return None,
    }
    Some(info.done())
}

fn dnat(to: IpAddr, port: Option<u16>) -> (Extension, Vec<u8>) {
    let address = match to {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let flags = if port.is_some() { MAP_IPS | PROTO_SPECIFIED } else { MAP_IPS };
    let port = port.unwrap_or(0).to_be_bytes();
    let mut info = Info::new(xt::DNAT);
    info.put(offset_of!(Range2, flags), &flags.to_ne_bytes());
    info.put(offset_of!(Range2, first), &address);
    info.put(offset_of!(Range2, last), &address);
    info.put(offset_of!(Range2, first_port), &port);
    info.put(offset_of!(Range2, last_port), &port);
    info.done()
}

/// `10.0.0.2:80`, `[fd00::2]:80`, or an address alone.
fn destination(text: &str) -> Option<(IpAddr, Option<u16>)> {
    if let Ok(address) = text.parse() {
        return Some((address, None));
    }
    let socket: std::net::SocketAddr = text.parse().ok()?;
    Some((socket.ip(), Some(socket.port())))
}

/// A number in decimal digits; one that begins with 0 is octal for iptables.
fn decimal<T: std::str::FromStr>(text: &str) -> Option<T> {
    let is_plain = text == "0" || (!text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit()));
    if is_plain { text.parse().ok() } else { None }
}

/// `0x2000/0x2000`, or a value that is compared whole.
fn masked(text: &str) -> Option<(u32, u32)> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => decimal(text),
    };
    match text.split_once('/') {
        Some((value, mask)) => Some((number(value)?, number(mask)?)),
        None => Some((number(text)?, u32::MAX)),
    }
}

/// An address comparison: loaded whole, with a mask where the prefix is shorter.
fn address(family: Family, cidr: &str, load: fn(IpAddr) -> Vec<Expr>, op: CmpOp) -> Option<Vec<Expr>> {
    let (address, prefix) = match cidr.split_once('/') {
        Some((address, prefix)) => (address, Some(decimal::<u32>(prefix)?)),
        None => (cidr, None),
    };
    let address: IpAddr = address.parse().ok()?;
    let bits = if family == Family::V4 { 32 } else { 128 };
    let prefix = prefix.unwrap_or(bits);
    if address.is_ipv4() != (family == Family::V4) || prefix > bits {
        return None;
    }
    let mut exprs = load(address);
    if prefix < bits {
        let mask = match family {
            Family::V4 => u32::MAX.checked_shl(32 - prefix).unwrap_or(0).to_be_bytes().to_vec(),
            Family::V6 => u128::MAX.checked_shl(128 - prefix).unwrap_or(0).to_be_bytes().to_vec(),
        };
        let Some(Expr::Cmp { data, .. }) = exprs.last_mut() else { return None };
        data.iter_mut().zip(&mask).for_each(|(byte, mask)| *byte &= mask);
        let bitwise = Expr::Bitwise { reg: Reg::R1, xor: vec![0; mask.len()], mask };
        exprs.insert(exprs.len() - 1, bitwise);
    }
    Some(compared(exprs, op))
}

/// An interface's name; one that ends in `+` is the beginning of a name, compared without the NUL
/// at its end.
fn interface(key: MetaKey, name: &str, op: CmpOp) -> Option<Vec<Expr>> {
    let mut data = name.strip_suffix('+').unwrap_or(name).as_bytes().to_vec();
    if !name.ends_with('+') {
        data.push(0);
    }
    let fits = !data.is_empty() && data.len() <= libc::IFNAMSIZ;
    let exprs = vec![Expr::Meta { key, to: Reg::R1 }, Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data }];
    fits.then(|| compared(exprs, op))
}

fn compared(mut exprs: Vec<Expr>, wanted: CmpOp) -> Vec<Expr> {
    if let Some(Expr::Cmp { op, .. }) = exprs.last_mut() {
        *op = wanted;
    }
    exprs
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
            "-m conntrack --ctstate RELATED,ESTABLISHED -m mark --mark 0x1/0x2 -g CNI-X",
        ] {
            let encoded = rule(Family::V4, &split(line)).unwrap();
            assert_eq!(words(Family::V4, &encoded.exprs), split(line));
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
            "-m conntrack --ctstate DNAT -j ACCEPT",
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
