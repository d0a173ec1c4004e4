//! For pkg/cni-fuzz alone: readers of the kernel's texts.

use crate::conntrack::{self, Entry, Protocol};

/// Returns the attributes that name an entry to the kernel.
pub fn conntrack_key(entry: &Entry) -> &[u8] {
    entry.key()
}

/// The connections to these ports in a text like `/proc/net/nf_conntrack`; `None` if something in
/// it is not understood.
pub fn conntrack_text(text: &str, ports: &[(Protocol, u16)]) -> Option<Vec<Entry>> {
    conntrack::entries_in(text, ports)
}

/// The process that holds an flock of this file, in a text like `/proc/locks`.
pub fn lock_holder(locks: &str, device: (u64, u64), inode: u64) -> Option<u32> {
    crate::flock::holder_in(locks, device, inode)
}
