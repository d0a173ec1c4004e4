//! Two texts of the kernel. `/proc/net/nf_conntrack` lists connections: only those to the requested
//! ports are read, each with the key that deletes this connection. `/proc/locks` lists locks: a
//! process is found as the holder of a file's lock only if a complete line has the process and the
//! file's inode.

use cni::cidr::octets;
use cni_firewall::portmap::Protocol;
use cni_linux::conntrack::{Entry, decode_entry};
use cni_linux::fuzzing::{conntrack_key, conntrack_text, lock_holder};
use cni_linux::netlink::wire::{Message, new_attribute, new_nest};

/// The kind of the messages that are decoded as entries (IPCTNL_MSG_CT_NEW).
const NEW: u16 = 0x100;
const TUPLE_REPLY: u16 = 2;
const TUPLE_IP: u16 = 1;
const IP_V4_SOURCE: u16 = 1;
const IP_V6_SOURCE: u16 = 3;

/// The device and the inode of the file that the holder of the lock is asked for.
const DEVICE: (u64, u64) = (0xfd, 1);
const INODE: u64 = 77;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    check_connections(&text);
    check_locks(&text);
}

/// Checks the entries that are read from `/proc/net/nf_conntrack`.
fn check_connections(text: &str) {
    let ports = [(Protocol::Udp, 53), (Protocol::Tcp, 80), (Protocol::Sctp, 80), (Protocol::Tcp, 8080)];
    for requested in [&ports[..], &ports[..1]] {
        let Some(entries) = conntrack_text(text, requested) else { continue };
        assert!(entries.len() <= text.lines().count(), "more entries than lines: {entries:?}");
        for entry in entries {
            assert!(requested.contains(&(entry.protocol, entry.destination.port())), "not requested: {entry:?}");
            assert_eq!(decode_key_of(&entry), Some(entry), "the entry that the key of this entry deletes");
        }
    }
}

/// Returns the entry that the key for the deletion of `found` describes. The decoder needs a reply
/// tuple, which the key lacks, so one with the answering address of `found` is added first.
fn decode_key_of(found: &Entry) -> Option<Entry> {
    let kind = if found.answered_by.is_ipv4() { IP_V4_SOURCE } else { IP_V6_SOURCE };
    let address = octets(found.answered_by);
    let reply = new_nest(TUPLE_REPLY, &new_nest(TUPLE_IP, &new_attribute(kind, &address)));
    let payload = [conntrack_key(found), &reply].concat();
    decode_entry(&Message { kind: NEW, flags: 0, sequence: 0, payload: &payload })
}

/// Checks the holder that is found in `/proc/locks`.
fn check_locks(text: &str) {
    let holder = |text: &str| lock_holder(text, DEVICE, INODE);
    if let Some(pid) = holder(text) {
        // The device is not compared.
        let names_holder = |line: &str| {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let [_, "FLOCK", _, _, process, file, ..] = words[..] else { return false };
            let inode = file.rsplit(':').next().and_then(|number| number.parse().ok());
            process.parse() == Ok(pid) && inode == Some(INODE)
        };
        assert!(pid != 0 && text.lines().any(names_holder), "no line names the holder {pid} in {text:?}");
    }
    let line = format!("9: FLOCK  ADVISORY  WRITE 4242 fd:01:{INODE} 0 EOF\n");
    assert_eq!(
        holder(&format!("{line}{text}")),
        Some(4242),
        "the first line about the file names its holder, before {text:?}"
    );
    assert!(
        holder(&format!("{text}\n{line}")).is_some(),
        "the lock's holder in {line:?} was not found at the end of {text:?}"
    );
}
