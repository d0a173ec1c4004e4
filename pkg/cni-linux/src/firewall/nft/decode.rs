//! Bytes from the kernel into our types, without trust: no input makes it panic, what it does not know it skips.
//!
//! The packet crate is used for writing only. Its reader panics on a truncated nested attribute (0.4.0), and it knows
//! more than is needed here: a rule's handle, comment, tags and the few expressions of [`Expr`].

use super::expr::{Base, CmpOp, Expr, MetaKey, Reg, Verdict};
use super::userdata;
use super::{BaseChain, Chain, Hook, Kind, Listed, Raw, Rule};
use nix::errno::Errno;

/// A netlink message's header, and where its payload is.
#[derive(Debug)]
pub struct Message<'a> {
    /// Type.
    pub kind: u16,
    /// `NLM_F_*`.
    pub flags: u16,
    /// The request it answers.
    pub sequence: u32,
    /// What follows the header.
    pub payload: &'a [u8],
}

/// An answer: errno, then the request.
pub const NLMSG_ERROR: u16 = 2;
/// The end of a dump.
pub const NLMSG_DONE: u16 = 3;

const HEADER: usize = 16;
/// `struct nfgenmsg`: family, version, resource id.
const NFGENMSG: usize = 4;

fn align(len: usize) -> usize {
    len.saturating_add(3) & !3
}

fn u16_ne(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_ne(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u32_be(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

fn u64_be(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The messages of one datagram, up to the first that does not fit into it.
pub fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let len = usize::try_from(u32_ne(datagram, 0)?).ok()?;
        let message = Message {
            kind: u16_ne(datagram, 4)?,
            flags: u16_ne(datagram, 6)?,
            sequence: u32_ne(datagram, 8)?,
            payload: datagram.get(HEADER..len)?,
        };
        datagram = datagram.get(align(len)..).unwrap_or_default();
        Some(message)
    })
}

/// Attributes as (type, value), up to the first that does not fit.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const TYPE_MASK: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let len = usize::from(u16_ne(bytes, 0)?);
        let kind = u16_ne(bytes, 2)? & TYPE_MASK;
        let value = bytes.get(4..len)?;
        bytes = bytes.get(align(len)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn attribute(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

fn number(bytes: &[u8], wanted: u16) -> Option<u32> {
    attribute(bytes, wanted).and_then(u32_be)
}

/// The kernel's answer to one message, or the end of a dump: an errno, or none if all went well, and the extended
/// text.
pub fn answer(message: &Message<'_>) -> Option<(Option<Errno>, Option<String>)> {
    const NLM_F_CAPPED: u16 = 0x100;
    const NLM_F_ACK_TLVS: u16 = 0x200;
    const NLMSGERR_ATTR_MSG: u16 = 1;
    let code = i32::from_ne_bytes(message.payload.get(..4)?.try_into().ok()?);
    let errno = (code != 0).then(|| Errno::from_raw(code.saturating_neg()));
    let mut said = None;
    if message.flags & NLM_F_ACK_TLVS != 0 {
        // The request comes back before the attributes: its header alone if capped, else all of it. The end of a dump
        // carries no request.
        let request = match message.flags & NLM_F_CAPPED {
            _ if message.kind == NLMSG_DONE => 0,
            0 => usize::try_from(u32_ne(message.payload, 4)?).ok()?,
            _ => HEADER,
        };
        let tlvs = message.payload.get(align(request).saturating_add(4)..).unwrap_or_default();
        said = attribute(tlvs, NLMSGERR_ATTR_MSG).map(text);
    }
    Some((errno, said))
}

/// The low half of the ruleset's generation that a dumped object belongs to.
pub fn generation(payload: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(payload.get(2..NFGENMSG)?.try_into().ok()?))
}

/// The whole of the generation, as the answer to the question for it has it.
pub fn whole_generation(payload: &[u8]) -> Option<u32> {
    const NFTA_GEN_ID: u16 = 1;
    number(payload.get(NFGENMSG..)?, NFTA_GEN_ID)
}

/// A dumped chain and the table it is in.
pub fn chain(payload: &[u8]) -> Option<(String, Chain)> {
    const NFTA_CHAIN_TABLE: u16 = 1;
    const NFTA_CHAIN_HANDLE: u16 = 2;
    const NFTA_CHAIN_NAME: u16 = 3;
    const NFTA_CHAIN_HOOK: u16 = 4;
    const NFTA_CHAIN_TYPE: u16 = 7;
    const NFTA_CHAIN_USERDATA: u16 = 12;
    let bytes = payload.get(NFGENMSG..)?;
    let table = text(attribute(bytes, NFTA_CHAIN_TABLE)?);
    let name = text(attribute(bytes, NFTA_CHAIN_NAME)?);
    let handle = u64_be(attribute(bytes, NFTA_CHAIN_HANDLE)?)?;
    let (comment, _) = userdata::decode(attribute(bytes, NFTA_CHAIN_USERDATA).unwrap_or_default());
    let base = attribute(bytes, NFTA_CHAIN_HOOK).and_then(|hook| base(hook, attribute(bytes, NFTA_CHAIN_TYPE)?));
    Some((table, Chain { name, handle, base, comment }))
}

fn base(hook: &[u8], kind: &[u8]) -> Option<BaseChain> {
    const NFTA_HOOK_HOOKNUM: u16 = 1;
    const NFTA_HOOK_PRIORITY: u16 = 2;
    Some(BaseChain {
        kind: Kind::by_name(&text(kind))?,
        hook: Hook::by_number(number(hook, NFTA_HOOK_HOOKNUM)?)?,
        priority: number(hook, NFTA_HOOK_PRIORITY)?.cast_signed(),
    })
}

const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_HANDLE: u16 = 3;

/// The table and the chain that a dumped rule is in, and its handle.
pub fn place(payload: &[u8]) -> Option<(&[u8], &[u8], u64)> {
    let bytes = payload.get(NFGENMSG..)?;
    let name = |wanted| attribute(bytes, wanted)?.split(|byte| *byte == 0).next();
    Some((name(NFTA_RULE_TABLE)?, name(NFTA_RULE_CHAIN)?, u64_be(attribute(bytes, NFTA_RULE_HANDLE)?)?))
}

/// The comment of a dumped rule; empty if it has none.
pub fn comment(payload: &[u8]) -> &[u8] {
    const NFTA_RULE_USERDATA: u16 = 7;
    let userdata = payload.get(NFGENMSG..).and_then(|bytes| attribute(bytes, NFTA_RULE_USERDATA));
    userdata::comment(userdata.unwrap_or_default())
}

/// A dumped rule, with the table and the chain it is in.
pub fn rule(payload: &[u8]) -> Option<(String, String, Listed)> {
    const NFTA_RULE_EXPRESSIONS: u16 = 4;
    const NFTA_RULE_USERDATA: u16 = 7;
    let bytes = payload.get(NFGENMSG..)?;
    let table = text(attribute(bytes, NFTA_RULE_TABLE)?);
    let chain = text(attribute(bytes, NFTA_RULE_CHAIN)?);
    let handle = u64_be(attribute(bytes, NFTA_RULE_HANDLE)?)?;
    let raw = Raw {
        exprs: attribute(bytes, NFTA_RULE_EXPRESSIONS).unwrap_or_default().to_vec(),
        userdata: attribute(bytes, NFTA_RULE_USERDATA).unwrap_or_default().to_vec(),
    };
    let exprs = attributes(&raw.exprs).map(|(_, element)| expr(element)).collect();
    let (comment, tags) = userdata::decode(&raw.userdata);
    Some((table, chain, Listed { handle, rule: Rule { exprs, comment, tags }, raw }))
}

/// One element of a rule's expression list.
fn expr(element: &[u8]) -> Expr {
    const NFTA_EXPR_NAME: u16 = 1;
    const NFTA_EXPR_DATA: u16 = 2;
    let name = text(attribute(element, NFTA_EXPR_NAME).unwrap_or_default());
    let data = attribute(element, NFTA_EXPR_DATA).unwrap_or_default();
    let known = match name.as_str() {
        "meta" => meta(data),
        "payload" => payload(data),
        "bitwise" => bitwise(data),
        "cmp" => cmp(data),
        "immediate" => immediate(data),
        "fib" => fib(data),
        "nat" => nat(data),
        "match" => xt(data).map(|(name, revision, info)| Expr::XtMatch { name, revision, info }),
        "target" => xt(data).map(|(name, revision, info)| Expr::XtTarget { name, revision, info }),
        // Port ranges and flags make it something else than a plain masquerade.
        "masq" if attributes(data).next().is_none() => Some(Expr::Masquerade),
        _ => None,
    };
    known.unwrap_or(Expr::Other(name))
}

fn value(data: &[u8]) -> Option<Vec<u8>> {
    const NFTA_DATA_VALUE: u16 = 1;
    attribute(data, NFTA_DATA_VALUE).map(<[u8]>::to_vec)
}

fn meta(data: &[u8]) -> Option<Expr> {
    // 1: destination, 2: key. With a source register instead, `meta` writes.
    Some(Expr::Meta { to: Reg(number(data, 1)?), key: MetaKey(number(data, 2)?) })
}

fn payload(data: &[u8]) -> Option<Expr> {
    let (to, base) = (Reg(number(data, 1)?), Base(number(data, 2)?));
    Some(Expr::Payload { to, base, offset: number(data, 3)?, len: number(data, 4)? })
}

fn bitwise(data: &[u8]) -> Option<Expr> {
    // 1: source, 2: destination, 3: length, 4: mask, 5: xor, 6: operation (absent on old kernels; 0 is mask and xor).
    let (from, to) = (number(data, 1)?, number(data, 2)?);
    let (mask, xor) = (value(attribute(data, 4)?)?, value(attribute(data, 5)?)?);
    (from == to && number(data, 6).unwrap_or(0) == 0).then_some(Expr::Bitwise { reg: Reg(to), mask, xor })
}

fn cmp(data: &[u8]) -> Option<Expr> {
    Some(Expr::Cmp { reg: Reg(number(data, 1)?), op: CmpOp(number(data, 2)?), data: value(attribute(data, 3)?)? })
}

fn immediate(data: &[u8]) -> Option<Expr> {
    const NFTA_DATA_VERDICT: u16 = 2;
    const NFTA_VERDICT_CODE: u16 = 1;
    const NFTA_VERDICT_CHAIN: u16 = 2;
    let (to, constant) = (number(data, 1)?, attribute(data, 2)?);
    match attribute(constant, NFTA_DATA_VERDICT) {
        Some(verdict) => {
            let chain = attribute(verdict, NFTA_VERDICT_CHAIN).map(text);
            Some(Expr::Verdict(Verdict::from_wire(number(verdict, NFTA_VERDICT_CODE)?, chain)))
        }
        None => Some(Expr::Load { to: Reg(to), data: value(constant)? }),
    }
}

fn fib(data: &[u8]) -> Option<Expr> {
    Some(Expr::Fib { to: Reg(number(data, 1)?), result: number(data, 2)?, flags: number(data, 3)? })
}

/// A match or a target of xtables: 1: name, 2: revision, 3: its structure.
fn xt(data: &[u8]) -> Option<(String, u32, Vec<u8>)> {
    Some((text(attribute(data, 1)?), number(data, 2)?, attribute(data, 3).unwrap_or_default().to_vec()))
}

fn nat(data: &[u8]) -> Option<Expr> {
    const NAT_DNAT: u32 = 1;
    let (family, addr) = (number(data, 2)?, Reg(number(data, 3)?));
    (number(data, 1)? == NAT_DNAT).then_some(Expr::Dnat { family, addr, port: number(data, 5).map(Reg) })
}

#[cfg(test)]
mod tests {
    use super::super::expr;
    use super::*;
    use netlink_packet_core::Emitable;
    use proptest::prelude::*;

    fn round_trip(exprs: &[Expr]) {
        for written in exprs {
            let element = written.wire();
            let mut bytes = vec![0; element.buffer_len()];
            element.emit(&mut bytes);
            let (_, inner) = attributes(&bytes).next().unwrap();
            assert_eq!(&super::expr(inner), written);
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        round_trip(&expr::iifname("veth0").unwrap());
        round_trip(&expr::ether_saddr([2, 0, 0, 0, 0, 1]));
        round_trip(&expr::masked(expr::daddr("10.0.0.0".parse().unwrap()), 8));
        round_trip(&expr::fib_daddr_local());
        round_trip(&expr::dnat("10.0.0.2".parse().unwrap(), Some(80)));
        round_trip(&expr::dnat("fd00::2".parse().unwrap(), None));
        round_trip(&[Expr::Masquerade, Expr::Other("counter".into())]);
        let verdicts = [Verdict::Accept, Verdict::Drop, Verdict::Return, Verdict::Jump("a".into())];
        round_trip(&verdicts.map(Expr::Verdict));
        round_trip(&[Expr::Verdict(Verdict::Goto("b".into())), Expr::Verdict(Verdict::Other(3))]);
    }

    /// An attribute of type 1 that says it is that long.
    fn tlv(len: u16, value: &[u8]) -> Vec<u8> {
        [&len.to_ne_bytes(), &1_u16.to_ne_bytes(), value].concat()
    }

    #[test]
    fn a_number_or_value_of_the_wrong_size_is_not_taken() {
        assert_eq!(number(&tlv(7, &[1, 2, 3, 0]), 1), None);
        assert_eq!(attributes(&tlv(3, &[0; 4])).count(), 0, "shorter than its own header");
        assert_eq!(attributes(&tlv(200, &[])).count(), 0, "longer than the buffer");
    }

    #[test]
    fn the_kernels_own_words_are_found_capped_or_not() {
        for (flags, request) in [(0x300, 16_u32), (0x200, 20)] {
            let mut payload = (-2_i32).to_ne_bytes().to_vec();
            payload.extend(request.to_ne_bytes());
            payload.resize(4 + usize::try_from(request).unwrap(), 0);
            payload.extend(tlv(8, b"why\0"));
            let message = Message { kind: 2, flags, sequence: 0, payload: &payload };
            assert_eq!(answer(&message), Some((Some(Errno::ENOENT), Some("why".into()))));
        }
    }

    fn read_everything(bytes: &[u8]) {
        let _ = (
            rule(bytes),
            place(bytes),
            comment(bytes),
            chain(bytes),
            generation(bytes),
            whole_generation(bytes),
            userdata::decode(bytes),
        );
        for message in messages(bytes) {
            let _ = (rule(message.payload), chain(message.payload), answer(&message));
        }
    }

    /// A rule as the kernel dumps it, behind a netlink header.
    fn a_dumped_rule() -> Vec<u8> {
        let mut batch = super::super::Batch::new();
        let table = super::super::Table { family: super::super::Family::Bridge, name: "nat" };
        let mut exprs = expr::iifname("veth0").unwrap();
        exprs.extend(expr::masked(expr::daddr("10.0.0.0".parse().unwrap()), 8));
        exprs.push(Expr::Verdict(Verdict::Jump("somewhere".into())));
        batch.append_rule(table, "PREROUTING", &Rule::new(exprs).with_comment("c").with_tag(0x80, b"tag"));
        let mut change = batch.into_changes().unwrap().remove(0);
        change.message.finalize();
        let mut bytes = vec![0; change.message.buffer_len()];
        change.message.serialize(&mut bytes);
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            read_everything(&bytes);
        }

        #[test]
        fn damaged_rules_never_panic(
            cut in 0_usize..600,
            damage in proptest::collection::vec((0_usize..600, any::<u8>()), 0..6),
        ) {
            let mut bytes = a_dumped_rule();
            assert!(messages(&bytes).any(|message| attributes(&message.payload[4..]).count() == 4));
            for (at, byte) in damage {
                let len = bytes.len();
                bytes[at % len] = byte;
            }
            bytes.truncate(cut);
            read_everything(&bytes);
        }
    }
}
