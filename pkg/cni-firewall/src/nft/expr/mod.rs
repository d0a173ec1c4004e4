//! Defines the expressions that a rule consists of, and encodes them for the kernel.
//!
//! The kernel evaluates a rule's expressions in order: an expression loads a value into a register,
//! changes it there, or compares it. [`Expr`] has those that the plugins' rules need, and
//! [`decode`](super::decode) returns the same type, so rules are compared as lists. The functions
//! below return the expressions, with the same registers, that `nft` writes for the text quoted in
//! their documentation.
//!
//! Attribute numbers are big-endian. A register's contents are as the kernel loads them: packet
//! bytes as on the wire, marks and families in the host's byte order.

use netlink_packet_core::DefaultNla;
use netlink_packet_netfilter::nftables as wire;
use std::net::IpAddr;

/// A register of 16 bytes, by the kernel's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reg(pub u32);

impl Reg {
    /// The register that matches load into and compare; NAT reads the address from here.
    pub const R1: Reg = Reg(1);
    /// The register that NAT reads the port from.
    pub const R2: Reg = Reg(2);

    fn wire(self) -> wire::Register {
        wire::Register::from(self.0)
    }
}

/// The value that `meta` loads, by the kernel's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetaKey(pub u32);

impl MetaKey {
    /// The packet's mark, 4 bytes.
    pub const MARK: MetaKey = MetaKey(3);
    /// The incoming interface's name, 16 bytes, filled up with NULs.
    pub const IIFNAME: MetaKey = MetaKey(6);
    /// The outgoing interface's name.
    pub const OIFNAME: MetaKey = MetaKey(7);
    /// The address family, 1 byte. A rule of an `inet` table compares it before an address.
    pub const NFPROTO: MetaKey = MetaKey(15);
    /// The transport protocol, 1 byte.
    pub const L4PROTO: MetaKey = MetaKey(16);
}

/// The header at which `payload` starts to count its offset, by the kernel's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base(pub u32);

impl Base {
    /// The link-layer header.
    pub const LINK: Base = Base(0);
    /// The network header.
    pub const NETWORK: Base = Base(1);
    /// The transport header.
    pub const TRANSPORT: Base = Base(2);
}

/// The operator of `cmp`, by the kernel's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmpOp(pub u32);

impl CmpOp {
    /// Equal.
    pub const EQ: CmpOp = CmpOp(0);
    /// Not equal.
    pub const NE: CmpOp = CmpOp(1);
}

/// A decision about a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Ends the base chain: the packet passes it.
    Accept,
    /// Drops the packet.
    Drop,
    /// Continues after the jump that led to this chain.
    Return,
    /// Continues in a chain, and returns here at its end.
    Jump(String),
    /// Continues in a chain, and does not return here at its end.
    Goto(String),
    /// Any other code, as the kernel numbers it.
    Other(u32),
}

const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;

impl Verdict {
    /// Returns the verdict for the kernel's code and, for jump and goto, the chain. An unknown
    /// code, or a jump without a chain, becomes [`Verdict::Other`].
    pub(crate) fn from_wire(code: u32, chain: Option<String>) -> Verdict {
        match (wire::Verdict::from(code), chain) {
            (wire::Verdict::Other(NF_ACCEPT), _) => Verdict::Accept,
            (wire::Verdict::Other(NF_DROP), _) => Verdict::Drop,
            (wire::Verdict::Return, _) => Verdict::Return,
            (wire::Verdict::Jump, Some(chain)) => Verdict::Jump(chain),
            (wire::Verdict::Goto, Some(chain)) => Verdict::Goto(chain),
            _ => Verdict::Other(code),
        }
    }

    /// Returns the verdict as the packet crate's attributes.
    fn wire(&self) -> Vec<wire::VerdictAttribute> {
        let (code, chain) = match self {
            Verdict::Accept => (wire::Verdict::Other(NF_ACCEPT), None),
            Verdict::Drop => (wire::Verdict::Other(NF_DROP), None),
            Verdict::Return => (wire::Verdict::Return, None),
            Verdict::Jump(chain) => (wire::Verdict::Jump, Some(chain)),
            Verdict::Goto(chain) => (wire::Verdict::Goto, Some(chain)),
            Verdict::Other(code) => (wire::Verdict::from(*code), None),
        };
        let mut attributes = vec![wire::VerdictAttribute::Code(code)];
        attributes.extend(chain.map(|chain| wire::VerdictAttribute::Chain(chain.clone())));
        attributes
    }
}

/// An expression of a rule. The first comparison that fails ends the rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// Loads a property of the packet that is not in its bytes.
    Meta {
        /// The property.
        key: MetaKey,
        /// The register to load into.
        to: Reg,
    },
    /// Loads bytes of the packet.
    Payload {
        /// The header.
        base: Base,
        /// The offset in the header, in bytes.
        offset: u32,
        /// The number of bytes.
        len: u32,
        /// The register to load into.
        to: Reg,
    },
    /// `reg = (reg & mask) ^ xor`, over as many bytes as the mask has.
    Bitwise {
        /// The register of the operand and of the result.
        reg: Reg,
        /// The mask.
        mask: Vec<u8>,
        /// The bits that are flipped afterwards; as long as the mask.
        xor: Vec<u8>,
    },
    /// Ends the rule unless the comparison is true.
    Cmp {
        /// The operator.
        op: CmpOp,
        /// The register of the left operand.
        reg: Reg,
        /// The right operand.
        data: Vec<u8>,
    },
    /// Loads a constant.
    Load {
        /// The register to load into.
        to: Reg,
        /// The constant.
        data: Vec<u8>,
    },
    /// Ends the rule with a verdict.
    Verdict(Verdict),
    /// Looks an address of the packet up in the routing tables and loads a part of the answer.
    Fib {
        /// The address to look up: `NFTA_FIB_F_*`.
        flags: u32,
        /// The part of the answer: `NFT_FIB_RESULT_*`.
        result: u32,
        /// The register to load into.
        to: Reg,
    },
    /// Ends the rule unless the set contains the register's value.
    Lookup {
        /// The set's name, in the rule's table.
        set: String,
        /// The register with the value to look up.
        reg: Reg,
    },
    /// Loads a property of the packet's tracked connection.
    Ct {
        /// The property: `NFT_CT_*`.
        key: u32,
        /// The register to load into.
        to: Reg,
    },
    /// Replaces the source address with the outgoing interface's.
    Masquerade,
    /// Replaces the destination (`dnat`).
    Dnat {
        /// `NFPROTO_*` of the address.
        family: u32,
        /// The register with the address.
        addr: Reg,
        /// The register with the port; `None` if the port is not replaced.
        port: Option<Reg>,
    },
    /// An xtables match (`comment`, `multiport`), which iptables-nft uses.
    XtMatch {
        /// Its name.
        name: String,
        /// Its revision.
        revision: u32,
        /// The C structure of that name and revision.
        info: Vec<u8>,
    },
    /// An xtables target (`MASQUERADE`, `DNAT`), which iptables-nft uses.
    XtTarget {
        /// Its name.
        name: String,
        /// Its revision.
        revision: u32,
        /// The C structure of that name and revision.
        info: Vec<u8>,
    },
    /// Any other expression, of which only the name is read. Not for writing: it would be written
    /// without attributes, which the kernel refuses for most expressions.
    Other(String),
}

const NFTA_FIB_DREG: u16 = 1;
const NFTA_FIB_RESULT: u16 = 2;
const NFTA_FIB_FLAGS: u16 = 3;
const NFTA_CT_DREG: u16 = 1;
const NFTA_CT_KEY: u16 = 2;
const NFTA_NAT_TYPE: u16 = 1;
const NFTA_NAT_FAMILY: u16 = 2;
const NFTA_NAT_REG_ADDR_MIN: u16 = 3;
const NFTA_NAT_REG_PROTO_MIN: u16 = 5;
/// `NFT_NAT_DNAT`.
const NAT_DNAT: u32 = 1;

impl Expr {
    /// Returns the expression as the packet crate's element of a rule's expression list.
    pub(crate) fn wire(&self) -> wire::ListAttribute<wire::ExpressionAttribute> {
        match self {
            Expr::Meta { key, to } => wire::Expressions::Meta(vec![
                wire::Meta::Key(wire::MetaKey::from(key.0)),
                wire::Meta::DestinationRegister(to.wire()),
            ]),
            Expr::Payload { base, offset, len, to } => wire::Expressions::Payload(vec![
                wire::Payload::DestinationRegister(to.wire()),
                wire::Payload::Base(base.0),
                wire::Payload::Offset(*offset),
                wire::Payload::Len(*len),
            ]),
            Expr::Bitwise { reg, mask, xor } => wire::Expressions::Bitwise(vec![
                wire::Bitwise::SourceRegister(reg.wire()),
                wire::Bitwise::DestinationRegister(reg.wire()),
                wire::Bitwise::Length(u32::try_from(mask.len()).unwrap_or(u32::MAX)),
                wire::Bitwise::Mask(wire::DataAttribute::Value(mask.clone())),
                wire::Bitwise::Xor(wire::DataAttribute::Value(xor.clone())),
            ]),
            Expr::Cmp { op, reg, data } => wire::Expressions::Cmp(vec![
                wire::Cmp::SourceRegister(reg.wire()),
                wire::Cmp::Op(wire::Operator::from(op.0)),
                wire::Cmp::Data(wire::DataAttribute::Value(data.clone())),
            ]),
            Expr::Load { to, data } => wire::Expressions::Immediate(vec![
                wire::Immediate::DestinationRegister(to.wire()),
                wire::Immediate::Data(wire::DataAttribute::Value(data.clone())),
            ]),
            Expr::Verdict(verdict) => wire::Expressions::Immediate(vec![
                wire::Immediate::DestinationRegister(wire::Register::Verdict),
                wire::Immediate::Data(wire::DataAttribute::Verdict(verdict.wire())),
            ]),
            Expr::Fib { flags, result, to } => {
                other("fib", &[(NFTA_FIB_FLAGS, *flags), (NFTA_FIB_RESULT, *result), (NFTA_FIB_DREG, to.0)])
            }
            Expr::Lookup { set, reg } => wire::Expressions::Lookup(vec![
                wire::Lookup::Set(set.clone()),
                wire::Lookup::SourceRegister(reg.wire()),
            ]),
            Expr::Ct { key, to } => other("ct", &[(NFTA_CT_DREG, to.0), (NFTA_CT_KEY, *key)]),
            Expr::Masquerade => other("masq", &[]),
            Expr::Dnat { family, addr, port } => {
                let mut attributes = vec![(NFTA_NAT_TYPE, NAT_DNAT), (NFTA_NAT_FAMILY, *family)];
                attributes.push((NFTA_NAT_REG_ADDR_MIN, addr.0));
                attributes.extend(port.map(|reg| (NFTA_NAT_REG_PROTO_MIN, reg.0)));
                other("nat", &attributes)
            }
            Expr::XtMatch { name, revision, info } => xtables("match", name, *revision, info),
            Expr::XtTarget { name, revision, info } => xtables("target", name, *revision, info),
            Expr::Other(name) => other(name, &[]),
        }
        .into()
    }
}

/// Returns an expression that the packet crate has no type for, whose attributes are all big-endian
/// numbers.
fn other(name: &str, attributes: &[(u16, u32)]) -> wire::Expressions {
    let attributes = attributes.iter().map(|(kind, value)| DefaultNla::new(*kind, value.to_be_bytes().to_vec()));
    wire::Expressions::Other { expression_type: name.to_owned(), attributes: attributes.collect() }
}

/// Returns the expression for an xtables `match` or `target` (`kind`): both have attributes of the
/// same numbers.
fn xtables(kind: &str, name: &str, revision: u32, info: &[u8]) -> wire::Expressions {
    const NFTA_NAME: u16 = 1;
    const NFTA_REV: u16 = 2;
    const NFTA_INFO: u16 = 3;
    let attributes = vec![
        DefaultNla::new(NFTA_NAME, [name.as_bytes(), &[0]].concat()),
        DefaultNla::new(NFTA_REV, revision.to_be_bytes().to_vec()),
        DefaultNla::new(NFTA_INFO, info.to_vec()),
    ];
    wire::Expressions::Other { expression_type: kind.to_owned(), attributes }
}

/// Returns a match: `load`, which must load a value into register 1, and the comparison of this
/// value with `data`.
fn equal(load: Expr, data: Vec<u8>) -> Vec<Expr> {
    vec![load, Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data }]
}

/// Returns the load of packet bytes into register 1.
fn payload(base: Base, offset: u32, len: u32) -> Expr {
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
    // The offset and the length of the source address in the IP header.
    match addr {
        IpAddr::V4(addr) => equal(payload(Base::NETWORK, 12, 4), addr.octets().to_vec()),
        IpAddr::V6(addr) => equal(payload(Base::NETWORK, 8, 16), addr.octets().to_vec()),
    }
}

/// Returns the match `ip daddr ADDR` or `ip6 daddr ADDR`; see [`saddr`].
pub fn daddr(addr: IpAddr) -> Vec<Expr> {
    // The offset and the length of the destination address in the IP header.
    match addr {
        IpAddr::V4(addr) => equal(payload(Base::NETWORK, 16, 4), addr.octets().to_vec()),
        IpAddr::V6(addr) => equal(payload(Base::NETWORK, 24, 16), addr.octets().to_vec()),
    }
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

/// Returns the match `meta nfproto ipv4` or `ipv6`, by `NFPROTO_*`. `nft` adds this itself before
/// an address in an inet table.
pub fn nfproto(family: u8) -> Vec<Expr> {
    equal(Expr::Meta { key: MetaKey::NFPROTO, to: Reg::R1 }, vec![family])
}

/// Returns the match `meta l4proto PROTO`, by `IPPROTO_*`. `nft` adds this itself before a port.
pub fn l4proto(protocol: u8) -> Vec<Expr> {
    equal(Expr::Meta { key: MetaKey::L4PROTO, to: Reg::R1 }, vec![protocol])
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
    let (family, bytes) = match addr {
        IpAddr::V4(addr) => (libc::NFPROTO_IPV4, addr.octets().to_vec()),
        IpAddr::V6(addr) => (libc::NFPROTO_IPV6, addr.octets().to_vec()),
    };
    let mut exprs = vec![Expr::Load { to: Reg::R1, data: bytes }];
    exprs.extend(port.map(|port| Expr::Load { to: Reg::R2, data: port.to_be_bytes().to_vec() }));
    exprs.push(Expr::Dnat { family: family.unsigned_abs(), addr: Reg::R1, port: port.map(|_| Reg::R2) });
    exprs
}

/// Turns a match for `==` into one for `!=`: inverts the comparison that ends `exprs`.
pub fn not(mut exprs: Vec<Expr>) -> Vec<Expr> {
    if let Some(Expr::Cmp { op, .. }) = exprs.last_mut() {
        *op = CmpOp::NE;
    }
    exprs
}

/// Turns an address match (`saddr`, `daddr`) into a match of the first `prefix` bits, such as `ip
/// daddr NET/prefix`.
///
/// As in `nft` 1.0 and later, a prefix of whole bytes becomes a shorter load. Any other prefix,
/// also 0, becomes a mask. Older releases of `nft` always write a mask.
pub fn masked(mut exprs: Vec<Expr>, prefix: u8) -> Vec<Expr> {
    let [.., Expr::Payload { len, .. }, Expr::Cmp { reg, data, .. }] = exprs.as_mut_slice() else { return exprs };
    if prefix > 0 && prefix.is_multiple_of(8) {
        data.truncate(usize::from(prefix / 8));
        *len = (*len).min(u32::from(prefix / 8));
        return exprs;
    }
    let mut mask = Vec::new();
    let mut remaining_bits = u32::from(prefix);
    for byte in data.iter_mut() {
        let bits = remaining_bits.min(8);
        remaining_bits -= bits;
        // The upper `bits` bits. With 0 bits, the shift by 8 returns `None`.
        let byte_mask = 0xff_u8.checked_shl(8 - bits).unwrap_or(0);
        *byte &= byte_mask;
        mask.push(byte_mask);
    }
    let bitwise = Expr::Bitwise { reg: *reg, xor: vec![0; mask.len()], mask };
    exprs.insert(exprs.len() - 1, bitwise);
    exprs
}

#[cfg(test)]
mod tests;
