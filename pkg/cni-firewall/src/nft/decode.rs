//! Decodes the kernel's nf_tables messages. No input makes it panic; unknown attributes are
//! skipped. A `payload` is what follows the netlink header. A function that returns an `Option`
//! returns `None` if a required attribute is missing or malformed, unless it says otherwise.

use super::expr::{self, Expr};
use super::userdata;
use super::{BaseChain, Chain, Hook, Kind, Listed, Rule};
use cni_linux::netlink::wire::{attribute, attributes, number, text, u64_be};

const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_HANDLE: u16 = 3;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_RULE_POSITION: u16 = 6;
const NFTA_RULE_USERDATA: u16 = 7;

/// Returns the attributes of an object, which follow `struct nfgenmsg`: family, version, resource
/// id. Empty if the payload is too short.
fn object(payload: &[u8]) -> &[u8] {
    payload.get(4..).unwrap_or_default()
}

/// Returns the lower 16 bits of the generation at which an object was dumped: the resource id.
pub fn generation_low_bits(payload: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(*payload.get(2..)?.first_chunk()?))
}

/// Returns the generation in the answer to `GetGen`.
pub fn generation(payload: &[u8]) -> Option<u32> {
    const NFTA_GEN_ID: u16 = 1;
    number(object(payload), NFTA_GEN_ID)
}

/// Decodes a dumped chain; returns its table's name and the chain.
pub fn chain(payload: &[u8]) -> Option<(String, Chain)> {
    const NFTA_CHAIN_TABLE: u16 = 1;
    const NFTA_CHAIN_HANDLE: u16 = 2;
    const NFTA_CHAIN_NAME: u16 = 3;
    const NFTA_CHAIN_HOOK: u16 = 4;
    const NFTA_CHAIN_POLICY: u16 = 5;
    const NF_DROP: u32 = 0;
    const NFTA_CHAIN_USE: u16 = 6;
    const NFTA_CHAIN_TYPE: u16 = 7;
    let bytes = object(payload);
    let table = text(attribute(bytes, NFTA_CHAIN_TABLE)?);
    let name = text(attribute(bytes, NFTA_CHAIN_NAME)?);
    let handle = u64_be(attribute(bytes, NFTA_CHAIN_HANDLE)?)?;
    let base = match (attribute(bytes, NFTA_CHAIN_HOOK), attribute(bytes, NFTA_CHAIN_TYPE)) {
        (Some(hook), Some(kind)) => base_chain(hook, kind),
        _ => None,
    };
    let drops = number(bytes, NFTA_CHAIN_POLICY) == Some(NF_DROP);
    let uses = number(bytes, NFTA_CHAIN_USE).unwrap_or(0);
    Some((table, Chain { name, handle, base, uses, drops }))
}

/// Decodes a base chain's hook and type; `None` for those that are not used here.
fn base_chain(hook: &[u8], kind: &[u8]) -> Option<BaseChain> {
    const NFTA_HOOK_HOOKNUM: u16 = 1;
    const NFTA_HOOK_PRIORITY: u16 = 2;
    Some(BaseChain {
        kind: Kind::by_name(&text(kind))?,
        hook: Hook::by_number(number(hook, NFTA_HOOK_HOOKNUM)?)?,
        priority: number(hook, NFTA_HOOK_PRIORITY)?.cast_signed(),
    })
}

/// The table, the chain and the handle of a dumped rule.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The table's name.
    pub table: &'a [u8],
    /// The chain's name.
    pub chain: &'a [u8],
    /// The rule's number in the table.
    pub handle: u64,
}

/// Whether a rule that the kernel reports has a position: then it is not the last of its chain.
pub(super) fn has_position(payload: &[u8]) -> bool {
    attribute(object(payload), NFTA_RULE_POSITION).is_some()
}

/// Decodes a table; returns its number and its name.
pub(super) fn table(payload: &[u8]) -> Option<(u64, String)> {
    const NFTA_TABLE_NAME: u16 = 1;
    const NFTA_TABLE_HANDLE: u16 = 4;
    let bytes = object(payload);
    Some((u64_be(attribute(bytes, NFTA_TABLE_HANDLE)?)?, text(attribute(bytes, NFTA_TABLE_NAME)?)))
}

/// Decodes only the table, the chain and the handle of a dumped rule.
pub fn place(payload: &[u8]) -> Option<Place<'_>> {
    let bytes = object(payload);
    // Without the final NUL.
    let name = |kind| attribute(bytes, kind)?.split(|byte| *byte == 0).next();
    Some(Place {
        table: name(NFTA_RULE_TABLE)?,
        chain: name(NFTA_RULE_CHAIN)?,
        handle: u64_be(attribute(bytes, NFTA_RULE_HANDLE)?)?,
    })
}

/// Returns how many packets the counters of a dumped rule have counted.
pub fn counted_packets(payload: &[u8]) -> u64 {
    const NFTA_COUNTER_PACKETS: u16 = 2;
    let exprs = attribute(object(payload), NFTA_RULE_EXPRESSIONS).unwrap_or_default();
    let counters =
        attributes(exprs).map(|(_, element)| expr::name_and_data(element)).filter(|(name, _)| name == "counter");
    let packets = counters.filter_map(|(_, data)| u64_be(attribute(data, NFTA_COUNTER_PACKETS)?));
    packets.fold(0, u64::saturating_add)
}

/// Decodes a dumped rule.
pub fn rule(payload: &[u8]) -> Option<Listed> {
    let bytes = object(payload);
    let handle = u64_be(attribute(bytes, NFTA_RULE_HANDLE)?)?;
    let exprs = attribute(bytes, NFTA_RULE_EXPRESSIONS).unwrap_or_default();
    let exprs = attributes(exprs).map(|(_, element)| Expr::decode(element)).collect();
    let (comment, tags) = userdata::decode(attribute(bytes, NFTA_RULE_USERDATA).unwrap_or_default());
    Some(Listed { handle, rule: Rule { exprs, comment, tags } })
}

/// Whether a rule, as the kernel sends it, has one of these byte pairs at an even offset. Port
/// numbers are at even offsets, also in xtables structures. Does not decode the rule: in a long
/// chain, this search already takes most of the reading's time.
pub fn has_any_pair(rule: &[u8], pairs: &[[u8; 2]]) -> bool {
    rule.as_chunks::<2>().0.iter().any(|pair| pairs.contains(pair))
}

/// Whether a rule, as the kernel sends it, contains these bytes at an even offset, where names of
/// chains, addresses and the comment always begin. Addresses are in network byte order. True for
/// fewer than two bytes.
pub fn mentions(rule: &[u8], bytes: impl AsRef<[u8]>) -> bool {
    let Some((first_pair, rest)) = bytes.as_ref().split_first_chunk::<2>() else { return true };
    let mut pairs = rule.as_chunks::<2>().0.iter().enumerate();
    // Most pairs differ, so comparing the first pair alone saves most of the time.
    pairs.any(|(index, pair)| pair == first_pair && rule[2 * index + 2..].starts_with(rest))
}

#[cfg(test)]
mod tests {
    use super::super::expr::Verdict;
    use super::*;
    use cni_linux::netlink::wire::{Message, messages, outcome};
    use proptest::prelude::*;

    fn round_trip(exprs: &[Expr]) {
        for written in exprs {
            let bytes = written.encode();
            let (_, inner) = attributes(&bytes).next().unwrap();
            assert_eq!(&Expr::decode(inner), written);
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
        round_trip(&expr::in_set(expr::saddr("10.0.0.2".parse().unwrap()), "pods"));
        round_trip(&expr::ct_established_related());
        round_trip(&expr::ct_dnat());
        let verdicts = [Verdict::Accept, Verdict::Drop, Verdict::Return, Verdict::Jump("a".into())];
        round_trip(&verdicts.map(Expr::Verdict));
        round_trip(&[Expr::Verdict(Verdict::Goto("b".into())), Expr::Verdict(Verdict::Other(3))]);
    }

    /// Returns an attribute of type 1 with `len` as the length in its header.
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
    fn the_kernels_explanation_is_found_capped_or_not() {
        const NLM_F_CAPPED: u16 = 0x100;
        const NLM_F_ACK_TLVS: u16 = 0x200;
        // The answer contains the request, or if capped only the request's header of 16 bytes.
        for (flags, request_len) in [(NLM_F_CAPPED | NLM_F_ACK_TLVS, 16_u32), (NLM_F_ACK_TLVS, 20)] {
            let mut payload = (-libc::ENOENT).to_ne_bytes().to_vec();
            payload.extend(request_len.to_ne_bytes());
            payload.resize(4 + usize::try_from(request_len).unwrap(), 0);
            payload.extend(tlv(8, b"why\0"));
            let message = Message { kind: 2, flags, sequence: 0, payload: &payload };
            assert_eq!(outcome(&message), Some((libc::ENOENT, Some("why".into()))));
        }
    }

    /// Calls all decoders with the bytes.
    fn decode_everything(bytes: &[u8]) {
        let _ = (
            rule(bytes),
            place(bytes),
            counted_packets(bytes),
            chain(bytes),
            generation_low_bits(bytes),
            generation(bytes),
            userdata::decode(bytes),
        );
        for message in messages(bytes) {
            let _ = (rule(message.payload), chain(message.payload), outcome(&message));
        }
    }

    /// Returns a netlink message with a rule, as the kernel dumps it.
    fn dumped_rule() -> Vec<u8> {
        let mut batch = super::super::Batch::new();
        let table = super::super::Table { family: super::super::Family::Bridge, name: "nat" };
        let mut exprs = expr::iifname("veth0").unwrap();
        exprs.extend(expr::masked(expr::daddr("10.0.0.0".parse().unwrap()), 8));
        exprs.push(Expr::Verdict(Verdict::Jump("somewhere".into())));
        batch.append_rule(table, "PREROUTING", &Rule::new(exprs).with_comment("c").with_tag(0x80, b"tag"));
        let mut bytes = Vec::new();
        batch.into_changes().unwrap().remove(0).write(0, &mut bytes);
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            decode_everything(&bytes);
        }

        #[test]
        fn damaged_rules_never_panic(
            cut in 0_usize..600,
            damage in proptest::collection::vec((0_usize..600, any::<u8>()), 0..6),
        ) {
            let mut bytes = dumped_rule();
            assert!(messages(&bytes).any(|message| attributes(&message.payload[4..]).count() == 4));
            for (at, byte) in damage {
                let len = bytes.len();
                bytes[at % len] = byte;
            }
            bytes.truncate(cut);
            decode_everything(&bytes);
        }
    }
}
