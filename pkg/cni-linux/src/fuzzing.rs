//! Access to parsers of the kernel's texts, for pkg/cni-fuzz only.

use crate::conntrack::{self, Entry, Protocol};

/// Returns the message that identifies an entry to the kernel.
pub fn conntrack_key(entry: &Entry) -> &[u8] {
    entry.key()
}

/// Returns the connections to these ports in a text like `/proc/net/nf_conntrack`, or `None` if its
/// format is unknown.
pub fn conntrack_text(text: &str, ports: &[(Protocol, u16)]) -> Option<Vec<Entry>> {
    conntrack::entries_in(text, ports)
}

/// Returns the ID of the process that holds an flock of this file, in a text like `/proc/locks`.
pub fn lock_holder(locks: &str, device: (u64, u64), inode: u64) -> Option<u32> {
    crate::flock::holder_in(locks, device, inode)
}
