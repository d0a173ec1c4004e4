//! The subnet file of flanneld. An accepted file has a network and a subnet, without host bits. The
//! values are the same after they are written as flanneld writes them and read again, and no file
//! that is cut within that is accepted.

use plugin_flannel::fuzzing::rewritten;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let Some(written) = rewritten(&String::from_utf8_lossy(data)) else { return };
    // The last line break carries nothing.
    for end in 0..written.len() - 1 {
        assert_eq!(rewritten(&written[..end]), None, "{:?} is accepted", &written[..end]);
    }
}
