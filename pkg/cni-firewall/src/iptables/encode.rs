//! Encodes rules, given in the words of `iptables -S`, as the expressions of nf_tables that
//! iptables-nft writes. [`compat`](super::compat) does the reverse.
//!
//! Every release of iptables from 1.8.4 on can print these expressions. Protocol, interfaces,
//! addresses and verdicts are expressions of nf_tables; all other matches and targets are those of
//! xtables. An address is loaded whole, and a prefix is compared with a mask. Newer releases of
//! iptables load only the bytes of the prefix, and write ports and marks as expressions of
//! nf_tables: 1.8.4 and 1.8.7 misread these.

use std::collections::BTreeSet;
use std::mem::offset_of;
use std::net::IpAddr;

use super::fields::{
    CONNTRACK_STATE, CONNTRACK_STATES, LOCAL_ROUTE_TYPE, MAP_IPS, PROTO_SPECIFIED, SCTP_DESTINATION_PORTS,
    protocol_number,
};
use super::xt::{self, Addrtype, Conntrack, Extension, Mark, Multiport, NatV4, Range2, SetMark, Tcp};
use crate::nft::expr::{self, CmpOp, Expr, MetaKey, Reg, Verdict};
use cni::cidr::octets;
use cni_linux::route::Family;

/// A rule as the kernel receives it.
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) exprs: Vec<Expr>,
    /// The protocol of the rule's `-p`, 0 for any. The kernel refuses some matches of xtables,
    /// `tcp` for example, without it.
    pub(super) protocol: u8,
}

/// Encodes the rule with these words. `None` for words that plugins do not write themselves, for
/// example conditions of a user: then `iptables-restore` has to write the rule.
pub(super) fn rule(family: Family, words: &[String]) -> Option<Encoded> {
    let mut encoder =
        Encoder { family, comparisons: Vec::new(), matches: Vec::new(), protocol: 0, options: BTreeSet::new() };
    let mut words = words.iter().map(String::as_str);
    let mut target = Vec::new();
    while let Some(word) = words.next() {
        match word {
            "-j" | "-g" => {
                target = encoder.encode_target(word, &mut words)?;
                // Plugins write no words after the target and its options.
                if words.next().is_some() {
                    return None;
                }
            }
            "!" => encoder.add_option(words.next()?, &mut words, CmpOp::NE)?,
            option => encoder.add_option(option, &mut words, CmpOp::EQ)?,
        }
    }
    let counter = Expr::Other("counter".to_owned());
    let exprs = [encoder.comparisons, encoder.matches, vec![counter], target].concat();
    Some(Encoded { exprs, protocol: encoder.protocol })
}

/// The expressions of a rule while its words are read.
struct Encoder {
    family: Family,
    /// Comparisons of addresses, interfaces and the protocol. They precede the matches in the rule.
    comparisons: Vec<Expr>,
    matches: Vec<Expr>,
    protocol: u8,
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
                self.protocol = protocol;
                self.comparisons.extend(expr::l4proto(protocol));
            }
            "-m" if op == CmpOp::EQ => {
                let (extension, info) = encode_match(words.next()?, words)?;
                let (name, revision) = (extension.name.to_owned(), extension.revision);
                self.matches.push(Expr::XtMatch { name, revision, info });
            }
            _ => return None,
        }
        Some(())
    }

    /// Returns the expressions of the target after `option`, which is `-j` or `-g`: a verdict, or a
    /// target of xtables. An unknown target is the name of a chain. `None` if plugins do not write
    /// the target's options.
    fn encode_target<'w>(&self, option: &str, words: &mut impl Iterator<Item = &'w str>) -> Option<Vec<Expr>> {
        let target = words.next()?;
        if option == "-g" {
            return Some(vec![Expr::Verdict(Verdict::Goto(target.to_owned()))]);
        }
        let (extension, info) = match target {
            "ACCEPT" => return Some(vec![Expr::Verdict(Verdict::Accept)]),
            "DROP" => return Some(vec![Expr::Verdict(Verdict::Drop)]),
            "RETURN" => return Some(vec![Expr::Verdict(Verdict::Return)]),
            "MASQUERADE" if self.family == Family::V4 => {
                // The kernel requires exactly one NAT range; this one has no addresses or ports.
                let mut info = Info::new(xt::MASQUERADE_V4);
                info.put(offset_of!(NatV4, count), &1_u32.to_ne_bytes());
                info.into_parts()
            }
            "MASQUERADE" => Info::new(xt::MASQUERADE_V6).into_parts(),
            "DNAT" => {
                let (address, port) = socket_address(value_after("--to-destination", words)?)?;
                if address.is_ipv4() != (self.family == Family::V4) {
                    return None;
                }
                dnat(address, port)
            }
            "MARK" => {
                let (value, mask) = value_and_mask(value_after("--set-xmark", words)?)?;
                let mut info = Info::new(xt::SET_MARK);
                info.put(offset_of!(SetMark, value), &value.to_ne_bytes());
                info.put(offset_of!(SetMark, mask), &mask.to_ne_bytes());
                info.into_parts()
            }
            chain => return Some(vec![Expr::Verdict(Verdict::Jump(chain.to_owned()))]),
        };
        Some(vec![Expr::XtTarget { name: extension.name.to_owned(), revision: extension.revision, info }])
    }
}

/// Takes `option` and its value from `words`, and returns the value. `None` if the next word is not
/// this option.
fn value_after<'w>(option: &str, words: &mut impl Iterator<Item = &'w str>) -> Option<&'w str> {
    if words.next()? == option { words.next() } else { None }
}

/// The structure (`info`) of an xtables match or target while its fields are written.
struct Info {
    extension: Extension,
    bytes: Vec<u8>,
}

impl Info {
    /// Returns the structure of this match or target, filled with zeros.
    fn new(extension: Extension) -> Info {
        Info { extension, bytes: vec![0; extension.size.next_multiple_of(xt::ALIGN)] }
    }

    /// Writes the bytes of a field at the field's offset. Does nothing if they do not fit into the
    /// structure.
    fn put(&mut self, offset: usize, bytes: &[u8]) {
        if let Some(field) = self.bytes.get_mut(offset..offset + bytes.len()) {
            field.copy_from_slice(bytes);
        }
    }

    /// Returns the match or target with its filled structure.
    fn into_parts(self) -> (Extension, Vec<u8>) {
        (self.extension, self.bytes)
    }
}

/// Encodes the xtables match of this name, with one option and its value from `words`. `None` if
/// plugins do not write this match, option or value.
fn encode_match<'w>(name: &str, words: &mut impl Iterator<Item = &'w str>) -> Option<(Extension, Vec<u8>)> {
    let (option, value) = (words.next()?, words.next()?);
    let mut info;
    match (name, option) {
        // The last byte of the field must be NUL. iptables cuts a longer comment.
        ("comment", "--comment") if value.len() < xt::COMMENT.size && !value.contains('\0') => {
            info = Info::new(xt::COMMENT);
            info.put(0, value.as_bytes());
        }
        ("multiport", "--dports") => {
            let ports: Vec<u16> = value.split(',').map(decimal).collect::<Option<_>>()?;
            if ports.len() > xt::PORTS_MAX {
                return None;
            }
            let count = u8::try_from(ports.len()).ok()?;
            let port_bytes: Vec<u8> = ports.iter().flat_map(|port| port.to_ne_bytes()).collect();
            info = Info::new(xt::MULTIPORT);
            info.put(offset_of!(Multiport, kind), &[xt::MULTIPORT_DESTINATION]);
            info.put(offset_of!(Multiport, count), &[count]);
            info.put(offset_of!(Multiport, ports), &port_bytes);
        }
        ("addrtype", "--dst-type") if value == "LOCAL" => {
            info = Info::new(xt::ADDRTYPE);
            info.put(offset_of!(Addrtype, destination), &LOCAL_ROUTE_TYPE.to_ne_bytes());
        }
        ("mark", "--mark") => {
            let (value, mask) = value_and_mask(value)?;
            info = Info::new(xt::MARK);
            info.put(offset_of!(Mark, value), &value.to_ne_bytes());
            info.put(offset_of!(Mark, mask), &mask.to_ne_bytes());
        }
        ("conntrack", "--ctstate") => {
            let mut states = 0;
            for name in value.split(',') {
                let (bit, _) = CONNTRACK_STATES.iter().find(|(_, known)| *known == name)?;
                states |= bit;
            }
            info = Info::new(xt::CONNTRACK);
            info.put(offset_of!(Conntrack, matched), &CONNTRACK_STATE.to_ne_bytes());
            info.put(offset_of!(Conntrack, states), &states.to_ne_bytes());
        }
        // A port is a range: first and last port. The structure of udp begins like that of tcp.
        ("tcp" | "udp", "--dport") => {
            let port: u16 = decimal(value)?;
            info = Info::new(if name == "tcp" { xt::TCP } else { xt::UDP });
            info.put(offset_of!(Tcp, source_ports), &[0, u16::MAX].map(u16::to_ne_bytes).concat());
            info.put(offset_of!(Tcp, destination_ports), &[port, port].map(u16::to_ne_bytes).concat());
        }
        ("sctp", "--dport") => {
            let port: u16 = decimal(value)?;
            info = Info::new(xt::SCTP);
            info.put(offset_of!(xt::Sctp, destination_ports), &[port, port].map(u16::to_ne_bytes).concat());
            // Chunk type 255 means that an entry is unused. The four entries must be like those
            // that iptables writes, which compares them when it looks for a rule to delete.
            let unused_chunk_flags = [[u8::MAX, 0, 0]; 4].concat();
            info.put(offset_of!(xt::Sctp, chunk_flags), &unused_chunk_flags);
            info.put(offset_of!(xt::Sctp, matched), &SCTP_DESTINATION_PORTS.to_ne_bytes());
        }
        _ => return None,
    }
    Some(info.into_parts())
}

/// Encodes the target DNAT to `address`, and to `port` if it is given.
fn dnat(address: IpAddr, port: Option<u16>) -> (Extension, Vec<u8>) {
    let octets = octets(address);
    let flags = if port.is_some() { MAP_IPS | PROTO_SPECIFIED } else { MAP_IPS };
    let port = port.unwrap_or(0).to_be_bytes();
    let mut info = Info::new(xt::DNAT);
    info.put(offset_of!(Range2, flags), &flags.to_ne_bytes());
    info.put(offset_of!(Range2, first), &octets);
    info.put(offset_of!(Range2, last), &octets);
    info.put(offset_of!(Range2, first_port), &port);
    info.put(offset_of!(Range2, last_port), &port);
    info.into_parts()
}

/// Reads an address with or without a port: `10.0.0.2:80`, `[fd00::2]:80`, `fd00::2`. `None` for
/// any other text.
fn socket_address(text: &str) -> Option<(IpAddr, Option<u16>)> {
    if let Ok(address) = text.parse() {
        return Some((address, None));
    }
    let socket: std::net::SocketAddr = text.parse().ok()?;
    Some((socket.ip(), Some(socket.port())))
}

/// Reads a number in decimal digits. `None` for a number with a leading 0, which iptables reads as
/// octal.
fn decimal<T: std::str::FromStr>(text: &str) -> Option<T> {
    let is_plain = text == "0" || (!text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit()));
    if is_plain { text.parse().ok() } else { None }
}

/// Reads the value and the mask of a packet mark: `0x2000/0x3000`, or decimal. Without a mask in
/// the text, the mask has all bits.
fn value_and_mask(text: &str) -> Option<(u32, u32)> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => decimal(text),
    };
    match text.split_once('/') {
        Some((value, mask)) => Some((number(value)?, number(mask)?)),
        None => Some((number(text)?, u32::MAX)),
    }
}

/// Returns the comparison of the source or destination with `cidr`. `compare_with` is
/// [`expr::saddr`] or [`expr::daddr`], which compare with a single address. `None` if `cidr` is
/// invalid or of the other family.
fn compare_address(family: Family, cidr: &str, compare_with: fn(IpAddr) -> Vec<Expr>, op: CmpOp) -> Option<Vec<Expr>> {
    let address_bits = if family == Family::V4 { 32 } else { 128 };
    let (address, prefix_len) = match cidr.split_once('/') {
        Some((address, prefix_len)) => (address, decimal::<u32>(prefix_len)?),
        None => (cidr, address_bits),
    };
    let address: IpAddr = address.parse().ok()?;
    if address.is_ipv4() != (family == Family::V4) || prefix_len > address_bits {
        return None;
    }
    let mut exprs = compare_with(address);
    if prefix_len < address_bits {
        insert_mask(&mut exprs, &mask(family, prefix_len));
    }
    set_operator(&mut exprs, op);
    Some(exprs)
}

/// Returns the bytes of the network mask with this prefix length.
fn mask(family: Family, prefix_len: u32) -> Vec<u8> {
    match family {
        Family::V4 => u32::MAX.checked_shl(32 - prefix_len).unwrap_or(0).to_be_bytes().to_vec(),
        Family::V6 => u128::MAX.checked_shl(128 - prefix_len).unwrap_or(0).to_be_bytes().to_vec(),
    }
}

/// Makes the comparison at the end of the expressions compare only the bits of `mask`: inserts the
/// mask before the comparison, and clears all other bits of the compared address.
fn insert_mask(exprs: &mut Vec<Expr>, mask: &[u8]) {
    let Some(Expr::Cmp { data, .. }) = exprs.last_mut() else { return };
    for (byte, mask_byte) in data.iter_mut().zip(mask) {
        *byte &= mask_byte;
    }
    let bitwise = Expr::Bitwise { reg: Reg::R1, mask: mask.to_vec(), xor: vec![0; mask.len()] };
    exprs.insert(exprs.len() - 1, bitwise);
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

/// Sets the operator of the comparison at the end of the expressions.
fn set_operator(exprs: &mut [Expr], new: CmpOp) {
    if let Some(Expr::Cmp { op, .. }) = exprs.last_mut() {
        *op = new;
    }
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
