//! What the kernel says of a tracked connection. The key that an entry is deleted by names that
//! very entry, and no other: its tuple, byte for byte, and its identity.

use cni_linux::conntrack::entry;
use cni_linux::fuzzing::conntrack_key;
use cni_linux::netlink::wire::{Message, attributes, messages, outcome};

const NEW: u16 = 0x100;
const NFGENMSG: usize = 4;
const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;

/// The target.
pub fn run(data: &[u8]) {
    judge(&Message { kind: NEW, flags: 0, sequence: 0, payload: data });
    for message in messages(data) {
        let _ = outcome(&message);
        judge(&message);
        judge(&Message { kind: NEW, ..message });
    }
}

fn judge(message: &Message<'_>) {
    let Some(found) = entry(message) else { return };
    let find = |bytes, wanted| attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value): (_, &[u8])| value);
    let (body, key) = (&message.payload[NFGENMSG..], conntrack_key(&found));
    assert_eq!(key[0], message.payload[0], "the family");
    for kind in [TUPLE_ORIG, 12, 18] {
        assert_eq!(find(&key[NFGENMSG..], kind), find(body, kind), "attribute {kind}");
    }
    // With the reply's tuple, which a key has no use for, it is read as the same entry.
    let reply = find(body, TUPLE_REPLY).expect("an entry has a reply");
    let mut again = key.to_vec();
    again.extend(u16::try_from(reply.len() + 4).expect("it came in an attribute").to_ne_bytes());
    again.extend(TUPLE_REPLY.to_ne_bytes());
    again.extend(reply);
    assert_eq!(entry(&Message { kind: NEW, flags: 0, sequence: 0, payload: &again }), Some(found));
}
