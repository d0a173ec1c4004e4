//! Encodes expressions for the kernel, and decodes the kernel's.
//!
//! The kernel's form of an expression is a name and attributes, whose numbers are those of
//! `enum nft_NAME_attributes` in `linux/netfilter/nf_tables.h`.

use super::{Base, CmpOp, Expr, ExtensionKind, MetaKey, Reg, Verdict, Xtables};
use crate::nft::request::{constant_attribute as constant, number_attribute as numeric, text_attribute as textual};
use cni_linux::netlink::wire::{attribute, attributes, new_attribute, new_nest, number, text};

/// `NFT_NAT_DNAT`; the other kind is source NAT.
const NAT_DNAT: u32 = 1;
/// The attributes in the value of an attribute: a constant, or a verdict.
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;

impl Verdict {
    /// Returns the kernel's code and, for jump and goto, the chain.
    fn code_and_chain(&self) -> (u32, Option<&str>) {
        let (code, chain) = match self {
            Verdict::Accept => (libc::NF_ACCEPT, None),
            Verdict::Drop => (libc::NF_DROP, None),
            Verdict::Return => (libc::NFT_RETURN, None),
            Verdict::Jump(chain) => (libc::NFT_JUMP, Some(chain.as_str())),
            Verdict::Goto(chain) => (libc::NFT_GOTO, Some(chain.as_str())),
            Verdict::Other(code) => (code.cast_signed(), None),
        };
        (code.cast_unsigned(), chain)
    }

    /// Returns the verdict for the kernel's code and chain. An unknown code, or a jump without a
    /// chain, becomes [`Verdict::Other`].
    fn new(code: u32, chain: Option<String>) -> Verdict {
        match (code.cast_signed(), chain) {
            (libc::NF_ACCEPT, _) => Verdict::Accept,
            (libc::NF_DROP, _) => Verdict::Drop,
            (libc::NFT_RETURN, _) => Verdict::Return,
            (libc::NFT_JUMP, Some(chain)) => Verdict::Jump(chain),
            (libc::NFT_GOTO, Some(chain)) => Verdict::Goto(chain),
            _ => Verdict::Other(code),
        }
    }
}

impl Expr {
    /// Returns the expression as an element of a rule's expression list.
    pub(in crate::nft) fn encode(&self) -> Vec<u8> {
        let (name, attributes) = self.name_and_attributes();
        new_nest(1, &[textual(1, name), new_nest(2, &attributes)].concat())
    }

    /// Returns the kernel's name and attributes.
    fn name_and_attributes(&self) -> (&str, Vec<u8>) {
        match self {
            Expr::Meta { key, to } => ("meta", [numeric(2, key.0), numeric(1, to.0)].concat()),
            Expr::Payload { base, offset, len, to } => {
                ("payload", [numeric(1, to.0), numeric(2, base.0), numeric(3, *offset), numeric(4, *len)].concat())
            }
            Expr::Bitwise { reg, mask, xor } => {
                let len = u32::try_from(mask.len()).unwrap_or(u32::MAX);
                let registers_and_len = [numeric(1, reg.0), numeric(2, reg.0), numeric(3, len)].concat();
                ("bitwise", [registers_and_len, constant(4, mask), constant(5, xor)].concat())
            }
            Expr::Cmp { op, reg, data } => ("cmp", [numeric(1, reg.0), numeric(2, op.0), constant(3, data)].concat()),
            Expr::Load { to, data } => ("immediate", [numeric(1, to.0), constant(2, data)].concat()),
            Expr::Verdict(verdict) => {
                let (code, chain) = verdict.code_and_chain();
                let chain = chain.map(|chain| textual(2, chain)).unwrap_or_default();
                let operand = new_nest(2, &new_nest(DATA_VERDICT, &[numeric(1, code), chain].concat()));
                // Register 0 has the verdict.
                ("immediate", [numeric(1, 0), operand].concat())
            }
            Expr::Fib { flags, result, to } => {
                ("fib", [numeric(3, *flags), numeric(2, *result), numeric(1, to.0)].concat())
            }
            Expr::Lookup { set, reg } => ("lookup", [textual(1, set), numeric(2, reg.0)].concat()),
            Expr::Ct { key, to } => ("ct", [numeric(1, to.0), numeric(2, *key)].concat()),
            Expr::Masquerade => ("masq", Vec::new()),
            Expr::Dnat { family, addr, port } => {
                let port = port.map(|reg| numeric(5, reg.0)).unwrap_or_default();
                ("nat", [numeric(1, NAT_DNAT), numeric(2, *family), numeric(3, addr.0), port].concat())
            }
            Expr::Xtables(Xtables { kind, name, revision, info }) => {
                let expression = if *kind == ExtensionKind::Match { "match" } else { "target" };
                (expression, [textual(1, name), numeric(2, *revision), new_attribute(3, info)].concat())
            }
            Expr::Other(name) => (name, Vec::new()),
        }
    }

    /// Decodes one element of a rule's expression list. An expression, or a form of it, that
    /// [`Expr`] does not represent becomes [`Expr::Other`].
    pub(in crate::nft) fn decode(element: &[u8]) -> Expr {
        let (name, data) = name_and_data(element);
        Expr::decode_known(&name, data).unwrap_or(Expr::Other(name))
    }

    /// Does [`decode`](Expr::decode) with the name and the attributes; `None` if [`Expr`] does not
    /// represent the expression.
    fn decode_known(name: &str, data: &[u8]) -> Option<Expr> {
        let field = |kind| number(data, kind);
        let reg = |kind| field(kind).map(Reg);
        let value = |kind| Some(attribute(attribute(data, kind)?, DATA_VALUE)?.to_vec());
        Some(match name {
            // `meta set` has a source register (3) instead of the destination.
            "meta" => Expr::Meta { to: reg(1)?, key: MetaKey(field(2)?) },
            "payload" => Expr::Payload { to: reg(1)?, base: Base(field(2)?), offset: field(3)?, len: field(4)? },
            // 6 is the operation: 0, or absent on old kernels, for mask and xor.
            "bitwise" if reg(1) == reg(2) && field(6).unwrap_or(0) == 0 => {
                Expr::Bitwise { reg: reg(2)?, mask: value(4)?, xor: value(5)? }
            }
            "cmp" => Expr::Cmp { reg: reg(1)?, op: CmpOp(field(2)?), data: value(3)? },
            "immediate" => {
                let to = reg(1)?;
                match attribute(attribute(data, 2)?, DATA_VERDICT) {
                    Some(verdict) => {
                        let code = number(verdict, 1)?;
                        Expr::Verdict(Verdict::new(code, attribute(verdict, 2).map(text)))
                    }
                    None => Expr::Load { to, data: value(2)? },
                }
            }
            "fib" => Expr::Fib { to: reg(1)?, result: field(2)?, flags: field(3)? },
            // With a destination register (3) the expression reads a map; a flag (5) inverts it.
            "lookup" if attribute(data, 3).is_none() && field(5).unwrap_or(0) == 0 => {
                Expr::Lookup { set: text(attribute(data, 1)?), reg: reg(2)? }
            }
            // More attributes than destination and key would select a direction, or write.
            "ct" if attributes(data).count() == 2 => Expr::Ct { to: reg(1)?, key: field(2)? },
            // Not checked: the end of a range of addresses (4) or ports (6), which the kernel sends
            // for a single one too, and flags (7).
            "nat" if field(1) == Some(NAT_DNAT) => Expr::Dnat { family: field(2)?, addr: reg(3)?, port: reg(5) },
            "match" | "target" => Expr::Xtables(Xtables {
                kind: if name == "match" { ExtensionKind::Match } else { ExtensionKind::Target },
                name: text(attribute(data, 1)?),
                revision: field(2)?,
                info: attribute(data, 3).unwrap_or_default().to_vec(),
            }),
            // An attribute would be a port range or a flag, which `Expr::Masquerade` does not have.
            "masq" if attributes(data).next().is_none() => Expr::Masquerade,
            _ => return None,
        })
    }
}

/// Returns the name and the attributes of an element of a rule's expression list.
pub(in crate::nft) fn name_and_data(element: &[u8]) -> (String, &[u8]) {
    (text(attribute(element, 1).unwrap_or_default()), attribute(element, 2).unwrap_or_default())
}
