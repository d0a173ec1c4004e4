//! Builds the matches and statements of rules, as lists of expressions. The functions return the
//! expressions, with the same registers, that `nft` writes for the text quoted in their
//! documentation.

use std::net::IpAddr;

use cni::cidr::octets;

use super::{Base, CmpOp, Expr, MetaKey, Reg, Verdict};
use crate::nft::Family;

/// Returns a match: `load`, which must load a value into register 1, and the comparison of this
/// value with `data`.
pub(super) fn equal(load: Expr, data: Vec<u8>) -> Vec<Expr> {
    vec![load, Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data }]
}

/// Returns the load of packet bytes into register 1.
pub(super) fn payload(base: Base, offset: u32, len: u32) -> Expr {
    Expr::Payload { base, offset, len, to: Reg::R1 }
}

/// Returns the match `iifname "NAME"`, of the whole name, not a prefix. `None` if the name is too
/// long for an interface.
pub fn iifname(name: &str) -> Option<Vec<Expr>> {
    interface_name(MetaKey::IIFNAME, name)
}

/// Returns the match `oifname "NAME"`; see [`iifname`].
pub fn oifname(name: &str) -> Option<Vec<Expr>> {
    interface_name(MetaKey::OIFNAME, name)
}

/// Returns the match of an interface's whole name; `None` if the name is too long.
fn interface_name(key: MetaKey, name: &str) -> Option<Vec<Expr>> {
    // With its final NUL, a name has at most IFNAMSIZ bytes.
    if name.len() >= libc::IFNAMSIZ {
        return None;
    }
    let mut data = name.as_bytes().to_vec();
    data.resize(libc::IFNAMSIZ, 0);
    Some(equal(Expr::Meta { key, to: Reg::R1 }, data))
}

/// Returns the name in an [`iifname`] match, if the rule begins with one.
pub fn iifname_of(exprs: &[Expr]) -> Option<String> {
    match exprs {
        [Expr::Meta { key: MetaKey::IIFNAME, to }, Expr::Cmp { op: CmpOp::EQ, reg, data }, ..] if to == reg => {
            let name = data.split(|byte| *byte == 0).next()?;
            Some(String::from_utf8_lossy(name).into_owned())
        }
        _ => None,
    }
}

/// Returns the match `ether saddr MAC`, for a bridge table; tables of other families also need a
/// match of the link type.
pub fn ether_saddr(mac: [u8; 6]) -> Vec<Expr> {
    // The offset and the length of the source address in the Ethernet header.
    equal(payload(Base::LINK, 6, 6), mac.to_vec())
}

/// Returns the address in an [`ether_saddr`] match, if the rule begins with one.
pub fn ether_saddr_of(exprs: &[Expr]) -> Option<[u8; 6]> {
    let [_, Expr::Cmp { data, .. }, ..] = exprs else { return None };
    let mac = <[u8; 6]>::try_from(&data[..]).ok()?;
    if exprs.starts_with(&ether_saddr(mac)) { Some(mac) } else { None }
}

/// Returns the match `ip saddr ADDR` or `ip6 saddr ADDR`, for an ip or ip6 table; an inet table
/// needs [`nfproto`] first.
pub fn saddr(addr: IpAddr) -> Vec<Expr> {
    address_at(12, 8, addr)
}

/// Returns the match `ip daddr ADDR` or `ip6 daddr ADDR`; see [`saddr`].
pub fn daddr(addr: IpAddr) -> Vec<Expr> {
    address_at(16, 24, addr)
}

/// Returns the match of an address that is at one of these offsets in the IP header.
fn address_at(in_ipv4: u32, in_ipv6: u32, addr: IpAddr) -> Vec<Expr> {
    let (offset, len) = match addr {
        IpAddr::V4(_) => (in_ipv4, 4),
        IpAddr::V6(_) => (in_ipv6, 16),
    };
    equal(payload(Base::NETWORK, offset, len), octets(addr))
}

/// Turns an address match, such as that of [`saddr`], into `ip saddr @SET`: replaces the comparison
/// that ends `exprs` with a lookup in the set.
pub fn in_set(mut exprs: Vec<Expr>, set: &str) -> Vec<Expr> {
    if let Some(last) = exprs.last_mut() {
        *last = Expr::Lookup { set: set.to_owned(), reg: Reg::R1 };
    }
    exprs
}

/// Returns the match `ct state established,related`.
pub fn ct_established_related() -> Vec<Expr> {
    const NFT_CT_STATE: u32 = 0;
    const ESTABLISHED: u32 = 1 << 1;
    const RELATED: u32 = 1 << 2;
    ct_has_any(NFT_CT_STATE, ESTABLISHED | RELATED)
}

/// Returns the match `ct status dnat`: the connection's destination was changed.
pub fn ct_dnat() -> Vec<Expr> {
    const NFT_CT_STATUS: u32 = 2;
    const IPS_DST_NAT: u32 = 1 << 5;
    ct_has_any(NFT_CT_STATUS, IPS_DST_NAT)
}

/// Returns the match of a connection whose value `key` has one of `bits`.
fn ct_has_any(key: u32, bits: u32) -> Vec<Expr> {
    vec![
        Expr::Ct { key, to: Reg::R1 },
        Expr::Bitwise { reg: Reg::R1, mask: bits.to_ne_bytes().to_vec(), xor: vec![0; 4] },
        Expr::Cmp { op: CmpOp::NE, reg: Reg::R1, data: vec![0; 4] },
    ]
}

/// Returns the family of an address.
fn family_of(address: IpAddr) -> Family {
    if address.is_ipv4() { Family::Ip } else { Family::Ip6 }
}

/// Returns the match `meta nfproto ipv4` or `ipv6`, the family of the address. `nft` adds this
/// itself before an address in an inet table.
pub fn nfproto(address: IpAddr) -> Vec<Expr> {
    equal(Expr::Meta { key: MetaKey::NFPROTO, to: Reg::R1 }, vec![family_of(address) as u8])
}

/// Returns the match `meta l4proto PROTO`, by `IPPROTO_*`. `nft` adds this itself before a port.
pub fn l4proto(protocol: u8) -> Vec<Expr> {
    equal(Expr::Meta { key: MetaKey::L4PROTO, to: Reg::R1 }, vec![protocol])
}

/// Returns the protocol of the first [`l4proto`] match in a rule.
pub(in crate::nft) fn l4proto_of(exprs: &[Expr]) -> Option<u8> {
    exprs.windows(2).find_map(|pair| match pair {
        [Expr::Meta { key: MetaKey::L4PROTO, .. }, Expr::Cmp { op: CmpOp::EQ, data, .. }] => data.first().copied(),
        _ => None,
    })
}

/// Returns the match `icmpv6 type FIRST-LAST`; needs [`l4proto`] before it.
pub fn icmpv6_types(first: u8, last: u8) -> Vec<Expr> {
    let compare = |op, value| Expr::Cmp { op, reg: Reg::R1, data: vec![value] };
    vec![payload(Base::TRANSPORT, 0, 1), compare(CmpOp::GE, first), compare(CmpOp::LE, last)]
}

/// Returns the match `th dport PORT` of the destination port; needs [`l4proto`] before it.
pub fn dport(port: u16) -> Vec<Expr> {
    // The offset and the length of the destination port in the headers of TCP, UDP and SCTP.
    equal(payload(Base::TRANSPORT, 2, 2), port.to_be_bytes().to_vec())
}

/// Returns the match `fib daddr type local`: the destination is an address of this host.
pub fn fib_daddr_local() -> Vec<Expr> {
    const NFTA_FIB_F_DADDR: u32 = 1 << 1;
    const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
    let load = Expr::Fib { flags: NFTA_FIB_F_DADDR, result: NFT_FIB_RESULT_ADDRTYPE, to: Reg::R1 };
    equal(load, u32::from(libc::RTN_LOCAL).to_ne_bytes().to_vec())
}

/// Returns the statement `dnat to ADDR:PORT`, for an ip or ip6 table; without a port, the packet
/// keeps its port.
pub fn dnat(addr: IpAddr, port: Option<u16>) -> Vec<Expr> {
    let mut exprs = vec![Expr::Load { to: Reg::R1, data: octets(addr) }];
    exprs.extend(port.map(|port| Expr::Load { to: Reg::R2, data: port.to_be_bytes().to_vec() }));
    exprs.push(Expr::Dnat { family: family_of(addr) as u32, addr: Reg::R1, port: port.map(|_| Reg::R2) });
    exprs
}

/// Returns the statement `jump CHAIN`.
pub fn jump(chain: impl Into<String>) -> Expr {
    Expr::Verdict(Verdict::Jump(chain.into()))
}

/// Turns a match for `==` into one for `!=`: inverts the comparison that ends `exprs`.
pub fn not(mut exprs: Vec<Expr>) -> Vec<Expr> {
    if let Some(Expr::Cmp { op, .. }) = exprs.last_mut() {
        *op = CmpOp::NE;
    }
    exprs
}

/// Turns an address match (`saddr`, `daddr`) into a match of the first `prefix_len` bits, such as
/// `ip daddr NET/PREFIX_LEN`. A prefix longer than the address is one of the whole address.
///
/// As in `nft` 1.0 and later, a prefix of whole bytes becomes a shorter load. Any other prefix,
/// also of length 0, becomes a mask. Older releases of `nft` always write a mask.
pub fn masked(mut exprs: Vec<Expr>, prefix_len: u8) -> Vec<Expr> {
    if prefix_len == 0 || !prefix_len.is_multiple_of(8) {
        return with_mask(exprs, prefix_len);
    }
    if let [.., Expr::Payload { len, .. }, Expr::Cmp { data, .. }] = exprs.as_mut_slice() {
        data.truncate(usize::from(prefix_len / 8));
        *len = (*len).min(u32::from(prefix_len / 8));
    }
    exprs
}

/// Does the same as [`masked`], but always with a mask.
pub fn with_mask(mut exprs: Vec<Expr>, prefix_len: u8) -> Vec<Expr> {
    let Some(Expr::Cmp { reg, data, .. }) = exprs.last_mut() else { return exprs };
    // With length 0, the shift by all 128 bits returns `None`.
    let ones = u128::MAX.checked_shl(128_u32.saturating_sub(prefix_len.into())).unwrap_or(0);
    let mask: Vec<u8> = ones.to_be_bytes().into_iter().take(data.len()).collect();
    // The masked register never equals an address that has bits outside the mask.
    for (byte, mask_byte) in data.iter_mut().zip(&mask) {
        *byte &= mask_byte;
    }
    let bitwise = Expr::Bitwise { reg: *reg, xor: vec![0; mask.len()], mask };
    exprs.insert(exprs.len() - 1, bitwise);
    exprs
}
