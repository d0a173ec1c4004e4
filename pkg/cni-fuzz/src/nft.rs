//! Rules of nf_tables in netlink messages. No bytes make the reader panic. A rule that can be
//! written is read back unchanged, with its comment and its tags. A rule with a comment still has a
//! comment when it is translated to the words of iptables.
//!
//! The input: if the first byte is odd, the rest selects the parts of a rule; otherwise the rest is
//! a message of the kernel.

use cni_firewall::fuzzing;
use cni_firewall::iptables::{Edit, split};
use cni_firewall::nft::decode;
use cni_firewall::nft::expr::{Base, CmpOp, Expr, MetaKey, Reg, Verdict};
use cni_firewall::nft::{Rule, userdata};
use cni_linux::Family;
use cni_linux::netlink::wire;

use crate::input::Input;

/// The length of a netlink message's header.
const NLMSGHDR: usize = 16;
const NFTA_RULE_HANDLE: u16 = 3;
/// The lowest kind of these plugins' tags in a rule's user data. nft uses the lower kinds.
const FIRST_TAG: u8 = 0x80;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    if input.byte() % 2 == 1 { write_and_read(&mut input) } else { read(input.rest()) }
}

/// Reads the bytes as messages of the kernel and as the user data of a rule.
fn read(bytes: &[u8]) {
    check_payload(bytes);
    let (comment, tags) = fuzzing::read_userdata(bytes);
    if let Some(written) = fuzzing::userdata(comment.as_deref(), &tags) {
        let are_own_tags = tags.iter().all(|(kind, _)| *kind >= FIRST_TAG);
        if are_own_tags {
            assert_eq!(fuzzing::read_userdata(&written), (comment, tags), "the written user data");
        }
    }
    for message in wire::messages(bytes) {
        let _ = wire::outcome(&message);
        check_payload(message.payload);
    }
}

/// Reads the bytes as the payload of a message, and checks the rule in it, if it has one.
fn check_payload(bytes: &[u8]) {
    // These must not panic.
    let _ = (decode::chain(bytes), decode::generation(bytes), decode::generation_low_bits(bytes));
    let place = decode::place(bytes);
    let Some(listed) = decode::rule(bytes) else { return };
    if let Some(place) = place {
        assert_eq!(place.handle, listed.handle, "the handle of {listed:?}");
    }
    // A comment that is not UTF-8 is read with replacement characters, so its bytes differ.
    if let Some(comment) = listed.rule.comment.as_deref().filter(|comment| !comment.contains('\u{fffd}')) {
        let wanted = comment.as_bytes();
        let is_in_bytes = wanted.is_empty() || bytes.windows(wanted.len()).any(|part| part == wanted);
        assert!(is_in_bytes, "the comment {comment:?} is not in the message");
    }
    for family in [Family::V4, Family::V6] {
        let words = fuzzing::words_of(family, listed.clone());
        let _ = (words.target(), words.comment(), words.value("-s"));
        if listed.rule.comment.is_some() {
            assert!(words.words().iter().any(|word| word == "--comment"), "no comment in {:?}", words.words());
        }
        // If iptables can express the rule, the text for iptables-restore has the same words.
        let mut edit = Edit::new();
        edit.delete("C", &words);
        if let Ok(text) = fuzzing::restore_text(&edit) {
            let line = text.lines().find_map(|line| line.strip_prefix("-D C"));
            let line = line.unwrap_or_else(|| panic!("no line deletes the rule {:?} in {text:?}", words.words()));
            assert_eq!(split(line), words.words(), "the words of {line:?}");
        }
    }
}

/// Writes a rule that the input selects, and reads it back.
fn write_and_read(input: &mut Input<'_>) {
    let (table, chain) = (name(input), name(input));
    let mut rule = Rule::default();
    if input.byte() % 2 == 1 {
        rule = rule.with_comment(input.text());
    }
    for _ in 0..input.byte() % 4 {
        rule = rule.with_tag(input.byte() | FIRST_TAG, input.bytes());
    }
    while !input.is_empty() && rule.exprs.len() < 64 {
        rule.exprs.push(expr(input));
    }
    // Writing fails only if the comment or the tags are too long for the kernel.
    let size = rule.comment.as_ref().map_or(0, |comment| userdata::comment_len(comment))
        + rule.tags.iter().map(|(_, value)| value.len() + 2).sum::<usize>();
    let bytes = match fuzzing::rule_message(&table, &chain, &rule) {
        Ok(bytes) => bytes,
        Err(error) => {
            let is_too_long = size > userdata::MAX || rule.comment.is_some_and(|comment| comment.len() > 254);
            assert!(is_too_long, "a rule with {size} bytes of user data was refused: {error}");
            return;
        }
    };
    let message = wire::messages(&bytes).next().expect("the written bytes have no message");
    assert_eq!(message.payload.len() + NLMSGHDR, bytes.len(), "the length of the message of {rule:?}");
    // The kernel adds the handle: an attribute of 12 bytes, 4 of which are its header.
    let mut payload = message.payload.to_vec();
    payload.extend(12_u16.to_ne_bytes());
    payload.extend(NFTA_RULE_HANDLE.to_ne_bytes());
    payload.extend(77_u64.to_be_bytes());
    let place = decode::place(&payload).expect("the place of the written rule cannot be read");
    assert_eq!((place.table, place.chain, place.handle), (table.as_bytes(), chain.as_bytes(), 77));
    assert_eq!(decode::rule(&payload).expect("the written rule cannot be read").rule, rule);
    check_payload(&payload);
}

/// Returns a name without NUL, which would end the name in the kernel.
fn name(input: &mut Input<'_>) -> String {
    input.text().replace('\0', "")
}

/// Returns an expression that the input selects.
fn expr(input: &mut Input<'_>) -> Expr {
    match input.byte() % 10 {
        0 => Expr::Meta { key: MetaKey(input.u32()), to: Reg(input.u32()) },
        1 => Expr::Payload { base: Base(input.u32()), offset: input.u32(), len: input.u32(), to: Reg(input.u32()) },
        2 => Expr::Bitwise { reg: Reg(input.u32()), mask: input.bytes().to_vec(), xor: input.bytes().to_vec() },
        3 => Expr::Cmp { op: CmpOp(input.u32()), reg: Reg(input.u32()), data: input.bytes().to_vec() },
        4 => Expr::Load { to: Reg(input.u32()), data: input.bytes().to_vec() },
        5 => Expr::Fib { flags: input.u32(), result: input.u32(), to: Reg(input.u32()) },
        6 => Expr::Masquerade,
        7 => Expr::Dnat {
            family: input.u32(),
            addr: Reg(input.u32()),
            port: (input.byte() % 2 == 1).then(|| Reg(input.u32())),
        },
        8 => Expr::Verdict(match input.byte() % 6 {
            0 => Verdict::Accept,
            1 => Verdict::Drop,
            2 => Verdict::Return,
            3 => Verdict::Jump(name(input)),
            4 => Verdict::Goto(name(input)),
            // 0 and 1 are DROP and ACCEPT, and the verdicts above have negative numbers.
            _ => Verdict::Other(u32::from(input.byte()) + 2),
        }),
        _ => Expr::Other(["counter", "ct", "log", "limit"][usize::from(input.byte()) % 4].to_owned()),
    }
}
