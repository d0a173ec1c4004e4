//! Answers of a store of claims. How the bytes arrive does not matter, a body has at most 16 MiB,
//! and a claim in it is read again as it was written.

use std::io::BufReader;

use cni_cluster::fuzzing::{claims, read_answer};

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let answer = read_answer(data);
    assert_eq!(answer, read_answer(BufReader::with_capacity(1, data)), "the parts in which it arrives matter");
    let Some((_, _, body)) = answer else { return };
    assert!(body.len() <= 16 << 20);
    for claim in claims(&body) {
        let written = serde_json::to_string(&claim).unwrap();
        let read: cni_cluster::store::Claim = serde_json::from_str(&written).unwrap();
        assert_eq!(read, claim);
    }
}
