//! The kernel's messages about tracked connections. The key with which an entry is deleted has the
//! tuple, ID and zone of that entry, byte for byte, so no other entry can be deleted.

use cni_linux::conntrack::decode_entry;
use cni_linux::fuzzing::conntrack_key;
use cni_linux::netlink::wire::{Message, attribute, messages, new_attribute, outcome};

/// The kind of the messages that are decoded as entries (IPCTNL_MSG_CT_NEW).
const NEW: u16 = 0x100;
/// The length of the header before the attributes.
const NFGENMSG: usize = 4;
const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const ID: u16 = 12;
const ZONE: u16 = 18;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    check(&Message { kind: NEW, flags: 0, sequence: 0, payload: data });
    for message in messages(data) {
        let _ = outcome(&message);
        check(&message);
        check(&Message { kind: NEW, ..message });
    }
}

/// Checks the key of the entry in a message, if the message has an entry.
fn check(message: &Message<'_>) {
    let Some(found) = decode_entry(message) else { return };
    let body = &message.payload[NFGENMSG..];
    let key = conntrack_key(&found);
    assert_eq!(key[0], message.payload[0], "the family of the key of {found:?}");
    for kind in [TUPLE_ORIG, ID, ZONE] {
        assert_eq!(
            attribute(&key[NFGENMSG..], kind),
            attribute(body, kind),
            "attribute {kind} of the key of {found:?}"
        );
    }
    // A key with the reply's tuple, which every entry needs, is decoded as the same entry.
    let reply =
        attribute(body, TUPLE_REPLY).unwrap_or_else(|| panic!("decoded without the tuple of the reply: {found:?}"));
    let again = [key, &new_attribute(TUPLE_REPLY, reply)].concat();
    assert_eq!(decode_entry(&Message { kind: NEW, flags: 0, sequence: 0, payload: &again }), Some(found));
}
