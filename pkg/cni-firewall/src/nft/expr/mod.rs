//! Defines the expressions that a rule consists of, and encodes them for the kernel.
//!
//! The kernel evaluates a rule's expressions in order: an expression loads a value into a register,
//! changes it there, or compares it. [`Expr`] has those that the plugins' rules need, and
//! [`decode`](super::decode) returns the same type, so rules are compared as lists. The functions
//! in `build` return lists of expressions.
//!
//! Attribute numbers are big-endian. A register's contents are as the kernel loads them: packet
//! bytes as on the wire, marks and families in the host's byte order.

use netlink_packet_core::DefaultNla;
use netlink_packet_netfilter::nftables as wire;

mod build;

pub use build::{
    ct_dnat, ct_established_related, daddr, dnat, dport, ether_saddr, ether_saddr_of, fib_daddr_local, icmpv6_types,
    iifname, iifname_of, in_set, jump, l4proto, masked, nfproto, not, oifname, saddr, with_mask,
};

/// A register of 16 bytes, by the kernel's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CmpOp(pub u32);

impl CmpOp {
    /// Equal.
    pub const EQ: CmpOp = CmpOp(0);
    /// Not equal.
    pub const NE: CmpOp = CmpOp(1);
    /// Less than or equal.
    pub const LE: CmpOp = CmpOp(3);
    /// Greater than or equal.
    pub const GE: CmpOp = CmpOp(5);
}

/// A decision about a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
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

#[cfg(test)]
mod tests;
