//! What a rule is made of: expressions over registers, and how they are written for the kernel.
//!
//! The vocabulary is the kernel's, kept to what the plugins' shapes need. The same [`Expr`] is what
//! [`decode`](super::decode) reads back, so a rule is checked by comparing two lists. To get the
//! very rules that `nft` makes, the functions below use the register and the form `nft` uses; each
//! has its `nft` text above it.
//!
//! Attribute numbers are big-endian. A register's contents are as the kernel loads them: packet
//! bytes as on the wire, marks and families in the machine's order.

use netlink_packet_core::DefaultNla;
use netlink_packet_netfilter::nftables as wire;
use std::net::IpAddr;

/// A register, by the kernel's number. 16 bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reg(pub u32);

impl Reg {
    /// The register that every simple match loads into and compares.
    pub const R1: Reg = Reg(1);
    /// The second one; NAT takes the port from here.
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
    /// The address family, 1 byte (`inet` tables need it before an address is looked at).
    pub const NFPROTO: MetaKey = MetaKey(15);
    /// The transport protocol, 1 byte.
    pub const L4PROTO: MetaKey = MetaKey(16);
}

/// Where `payload` counts its offset from, by the kernel's number.
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

/// How `cmp` compares, by the kernel's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmpOp(pub u32);

impl CmpOp {
    /// Equal.
    pub const EQ: CmpOp = CmpOp(0);
    /// Not equal.
    pub const NE: CmpOp = CmpOp(1);
}

/// The verdict on a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Done with this hook: the packet goes on.
    Accept,
    /// The packet is gone.
    Drop,
    /// Back to the calling chain.
    Return,
    /// To a chain, and back.
    Jump(String),
    /// To a chain, not back.
    Goto(String),
    /// Any other code, as the kernel numbers it.
    Other(u32),
}

const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;

impl Verdict {
    /// Returns the verdict for the kernel's code and, for jump and goto, the chain.
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

/// One step of a rule. The first comparison that fails ends the rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// Loads something about the packet.
    Meta {
        /// What.
        key: MetaKey,
        /// Whereto.
        to: Reg,
    },
    /// Loads bytes of the packet.
    Payload {
        /// Which header.
        base: Base,
        /// Bytes from its start.
        offset: u32,
        /// Number of bytes.
        len: u32,
        /// Whereto.
        to: Reg,
    },
    /// `to = (from & mask) ^ xor`, over as many bytes as the mask has.
    Bitwise {
        /// Operand and result.
        reg: Reg,
        /// The mask.
        mask: Vec<u8>,
        /// The bits that are flipped afterwards; as long as the mask.
        xor: Vec<u8>,
    },
    /// Goes on only if the register compares so with the data.
    Cmp {
        /// How.
        op: CmpOp,
        /// What.
        reg: Reg,
        /// With what.
        data: Vec<u8>,
    },
    /// Loads a constant.
    Load {
        /// Whereto.
        to: Reg,
        /// The constant.
        data: Vec<u8>,
    },
    /// Ends the rule with a verdict.
    Verdict(Verdict),
    /// Looks the packet's addresses up in the routing tables.
    Fib {
        /// `NFTA_FIB_F_*`: which address.
        flags: u32,
        /// `NFT_FIB_RESULT_*`: what of the answer.
        result: u32,
        /// Whereto.
        to: Reg,
    },
    /// Goes on only if the set of this name contains what the register holds.
    Lookup {
        /// The set, in the rule's table.
        set: String,
        /// The register with the value that is looked up.
        reg: Reg,
    },
    /// Loads something about the packet's tracked connection, by the kernel's number (`NFT_CT_*`).
    Ct {
        /// What.
        key: u32,
        /// Whereto.
        to: Reg,
    },
    /// Replaces the source address by the outgoing interface's.
    Masquerade,
    /// Replaces the destination (`dnat`).
    Dnat {
        /// `NFPROTO_*` of the address.
        family: u32,
        /// Where the address is.
        addr: Reg,
        /// Where the port is, if that is replaced too.
        port: Option<Reg>,
    },
    /// A match of xtables (`comment`, `multiport`), as iptables-nft writes them.
    XtMatch {
        /// Its name.
        name: String,
        /// Its revision.
        revision: u32,
        /// The C structure of that name and revision.
        info: Vec<u8>,
    },
    /// A target of xtables (`MASQUERADE`, `DNAT`), as iptables-nft writes them.
    XtTarget {
        /// Its name.
        name: String,
        /// Its revision.
        revision: u32,
        /// The C structure of that name and revision.
        info: Vec<u8>,
    },
    /// Any other expression, by name alone. Read only: it is written as an expression without
    /// attributes, which the kernel refuses for all but a few.
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
    /// As the packet crate's element of a rule's expression list.
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

/// An expression the packet crate has no type for, all of whose attributes are big-endian numbers.
fn other(name: &str, attributes: &[(u16, u32)]) -> wire::Expressions {
    let attributes = attributes.iter().map(|(kind, value)| DefaultNla::new(*kind, value.to_be_bytes().to_vec()));
    wire::Expressions::Other { expression_type: name.to_owned(), attributes: attributes.collect() }
}

/// A match or target; both have their attributes at the same numbers.
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

/// Loads and compares for equality: nearly every match is that.
fn equal(load: Expr, data: Vec<u8>) -> Vec<Expr> {
    vec![load, Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data }]
}

fn payload(base: Base, offset: u32, len: u32) -> Expr {
    Expr::Payload { base, offset, len, to: Reg::R1 }
}

/// `iifname "NAME"`
///
/// The whole register is compared, so the name is not a prefix. `None` if it is longer than an
/// interface name can be.
pub fn iifname(name: &str) -> Option<Vec<Expr>> {
    let mut data = vec![0; libc::IFNAMSIZ];
    // The last byte stays NUL: a name of 16 bytes would match nothing, ever.
    data[..libc::IFNAMSIZ - 1].get_mut(..name.len())?.copy_from_slice(name.as_bytes());
    Some(equal(Expr::Meta { key: MetaKey::IIFNAME, to: Reg::R1 }, data))
}

/// `oifname "NAME"`; see [`iifname`].
pub fn oifname(name: &str) -> Option<Vec<Expr>> {
    let mut exprs = iifname(name)?;
    if let Some(Expr::Meta { key, .. }) = exprs.first_mut() {
        *key = MetaKey::OIFNAME;
    }
    Some(exprs)
}

/// The name in an [`iifname`] match, if the rule begins with one.
pub fn iifname_of(exprs: &[Expr]) -> Option<String> {
    match exprs {
        [Expr::Meta { key: MetaKey::IIFNAME, to }, Expr::Cmp { op: CmpOp::EQ, reg, data }, ..] if to == reg => {
            let name = data.split(|byte| *byte == 0).next()?;
            Some(String::from_utf8_lossy(name).into_owned())
        }
        _ => None,
    }
}

/// `ether saddr MAC`, in a bridge table; elsewhere the link layer must be matched first.
pub fn ether_saddr(mac: [u8; 6]) -> Vec<Expr> {
    equal(payload(Base::LINK, 6, 6), mac.to_vec())
}

/// Returns the address in an [`ether_saddr`] match, if the rule begins with one.
pub fn ether_saddr_of(exprs: &[Expr]) -> Option<[u8; 6]> {
    let mac = exprs.iter().find_map(|expr| match expr {
        Expr::Cmp { data, .. } => <[u8; 6]>::try_from(&data[..]).ok(),
        _ => None,
    })?;
    exprs.starts_with(&ether_saddr(mac)).then_some(mac)
}

/// `ip saddr ADDR` or `ip6 saddr ADDR`, in an ip or ip6 table; elsewhere [`nfproto`] must come
/// first.
pub fn saddr(addr: IpAddr) -> Vec<Expr> {
    match addr {
        IpAddr::V4(addr) => equal(payload(Base::NETWORK, 12, 4), addr.octets().to_vec()),
        IpAddr::V6(addr) => equal(payload(Base::NETWORK, 8, 16), addr.octets().to_vec()),
    }
}

/// `ip daddr ADDR` or `ip6 daddr ADDR`; see [`saddr`].
pub fn daddr(addr: IpAddr) -> Vec<Expr> {
    match addr {
        IpAddr::V4(addr) => equal(payload(Base::NETWORK, 16, 4), addr.octets().to_vec()),
        IpAddr::V6(addr) => equal(payload(Base::NETWORK, 24, 16), addr.octets().to_vec()),
    }
}

/// `ip saddr @SET` or `ip6 saddr @SET` for what is in `exprs` a comparison with one address.
pub fn in_set(mut exprs: Vec<Expr>, set: &str) -> Vec<Expr> {
    if let Some(last) = exprs.last_mut() {
        *last = Expr::Lookup { set: set.to_owned(), reg: Reg::R1 };
    }
    exprs
}

/// `ct state established,related`
pub fn ct_established_related() -> Vec<Expr> {
    const NFT_CT_STATE: u32 = 0;
    const ESTABLISHED: u32 = 1 << 1;
    const RELATED: u32 = 1 << 2;
    let mask = (ESTABLISHED | RELATED).to_ne_bytes().to_vec();
    vec![
        Expr::Ct { key: NFT_CT_STATE, to: Reg::R1 },
        Expr::Bitwise { reg: Reg::R1, mask, xor: vec![0; 4] },
        Expr::Cmp { op: CmpOp::NE, reg: Reg::R1, data: vec![0; 4] },
    ]
}

/// `meta nfproto ipv4` or `ipv6`: what `nft` puts silently before an address in an inet table.
pub fn nfproto(family: u8) -> Vec<Expr> {
    equal(Expr::Meta { key: MetaKey::NFPROTO, to: Reg::R1 }, vec![family])
}

/// `meta l4proto PROTO`: what `nft` puts silently before a port.
pub fn l4proto(protocol: u8) -> Vec<Expr> {
    equal(Expr::Meta { key: MetaKey::L4PROTO, to: Reg::R1 }, vec![protocol])
}

/// `th dport PORT`; needs [`l4proto`] before it.
pub fn dport(port: u16) -> Vec<Expr> {
    equal(payload(Base::TRANSPORT, 2, 2), port.to_be_bytes().to_vec())
}

/// `fib daddr type local`
pub fn fib_daddr_local() -> Vec<Expr> {
    const NFTA_FIB_F_DADDR: u32 = 1 << 1;
    const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
    let load = Expr::Fib { flags: NFTA_FIB_F_DADDR, result: NFT_FIB_RESULT_ADDRTYPE, to: Reg::R1 };
    equal(load, u32::from(libc::RTN_LOCAL).to_ne_bytes().to_vec())
}

/// `dnat to ADDR:PORT`, in an ip or ip6 table.
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

/// Turns the comparison that ends `exprs` into `!=`.
pub fn not(mut exprs: Vec<Expr>) -> Vec<Expr> {
    if let Some(Expr::Cmp { op, .. }) = exprs.last_mut() {
        *op = CmpOp::NE;
    }
    exprs
}

/// Compares only the first `prefix` bits of an address match (`saddr`, `daddr`): `ip daddr
/// NET/prefix`.
///
/// As `nft` does (1.0 and later): whole bytes are a shorter load, other prefixes a mask. Older ones
/// always mask.
pub fn masked(mut exprs: Vec<Expr>, prefix: u8) -> Vec<Expr> {
    let [.., Expr::Payload { len, .. }, Expr::Cmp { reg, data, .. }] = exprs.as_mut_slice() else { return exprs };
    let mask: Vec<u8> = (0..data.len())
        .map(|index| {
            let bits = usize::from(prefix).saturating_sub(index * 8).min(8);
            0xff_u8.checked_shl(u32::try_from(8 - bits).unwrap_or(8)).unwrap_or(0)
        })
        .collect();
    if prefix > 0 && prefix.is_multiple_of(8) {
        data.truncate(usize::from(prefix / 8));
        *len = (*len).min(u32::from(prefix / 8));
        return exprs;
    }
    for (byte, mask) in data.iter_mut().zip(&mask) {
        *byte &= mask;
    }
    let bitwise = Expr::Bitwise { reg: *reg, xor: vec![0; mask.len()], mask };
    exprs.insert(exprs.len() - 1, bitwise);
    exprs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_becomes_a_mask_or_a_shorter_load() {
        let exprs = masked(daddr("10.1.2.3".parse().unwrap()), 20);
        assert_eq!(exprs[1], Expr::Bitwise { reg: Reg::R1, mask: vec![255, 255, 240, 0], xor: vec![0; 4] });
        assert_eq!(exprs[2], Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data: vec![10, 1, 0, 0] });
        assert_eq!(masked(daddr("10.1.2.3".parse().unwrap()), 32), daddr("10.1.2.3".parse().unwrap()));
        let whole_bytes = equal(payload(Base::NETWORK, 24, 6), vec![0xfd, 0, 0, 0, 0, 0]);
        assert_eq!(masked(daddr("fd00::1".parse().unwrap()), 48), whole_bytes);
        let everything = masked(daddr("fd00::1".parse().unwrap()), 0);
        assert_eq!(everything[1], Expr::Bitwise { reg: Reg::R1, mask: vec![0; 16], xor: vec![0; 16] });
    }

    #[test]
    fn an_interface_name_is_compared_whole() {
        let exprs = iifname("veth0").unwrap();
        assert_eq!(exprs[1], Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data: b"veth0\0\0\0\0\0\0\0\0\0\0\0".to_vec() });
        assert_eq!(iifname_of(&exprs).as_deref(), Some("veth0"));
        assert_eq!(iifname_of(&iifname("exactly15bytes_").unwrap()).as_deref(), Some("exactly15bytes_"));
        assert_eq!(iifname("sixteen_bytes_xx"), None);
    }
}
