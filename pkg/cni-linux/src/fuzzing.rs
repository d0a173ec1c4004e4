//! Makes the parsers of the kernel's texts public for pkg/cni-fuzz.

use crate::conntrack::{self, Entry, Protocol};

/// Returns the body of a request that identifies an entry to the kernel.
pub fn conntrack_key(entry: &Entry) -> &[u8] {
    entry.key()
}

/// Returns the connections to these ports in a text like `/proc/net/nf_conntrack`; `None` if the
/// text is malformed.
pub fn conntrack_text(text: &str, ports: &[(Protocol, u16)]) -> Option<Vec<Entry>> {
    conntrack::entries_in(text, ports)
}

/// Returns the ID of the process that holds the flock of this file, according to a text like
/// `/proc/locks`; `None` if the text has no such lock.
pub fn lock_holder(locks: &str, device: (u64, u64), inode: u64) -> Option<u32> {
    crate::flock::holder_in(locks, device, inode)
}
