//! Defines the expressions that a rule consists of.
//!
//! The kernel evaluates a rule's expressions in order: an expression loads a value into a register,
//! changes it there, or compares it. [`Expr`] has those that the plugins' rules need. Rules are
//! written and read as lists of them, and compared as lists. The functions in `build` return lists
//! of expressions.
//!
//! A register's contents are as the kernel loads them: packet bytes as on the wire, marks and
//! families in the host's byte order.

mod build;
mod wire;

pub(super) use build::l4proto_of;
pub use build::{
    ct_dnat, ct_established_related, daddr, dnat, dport, ether_saddr, ether_saddr_of, fib_daddr_local, icmpv6_types,
    iifname, iifname_of, in_set, jump, l4proto, masked, nfproto, not, oifname, saddr, with_mask,
};
pub(super) use wire::name_and_data;

/// A register of 16 bytes, by the kernel's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reg(pub u32);

impl Reg {
    /// The register that matches load into and compare; NAT reads the address from here.
    pub const R1: Reg = Reg(1);
    /// The register that NAT reads the port from.
    pub const R2: Reg = Reg(2);
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

/// The two kinds of xtables extensions. The numbers are those of `NFTA_COMPAT_TYPE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExtensionKind {
    /// `comment` or `multiport`, for example.
    Match = 0,
    /// `MASQUERADE` or `DNAT`, for example.
    Target = 1,
}

/// A match or target of xtables in a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Xtables {
    /// Whether it is a match or a target.
    pub kind: ExtensionKind,
    /// Its name.
    pub name: String,
    /// Its revision.
    pub revision: u32,
    /// The C structure of that name and revision.
    pub info: Vec<u8>,
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
    /// A match or target of xtables, which iptables-nft uses.
    Xtables(Xtables),
    /// Any other expression, of which only the name is read. Not for writing: it would be written
    /// without attributes, which the kernel refuses for most expressions.
    Other(String),
}

#[cfg(test)]
mod tests;
