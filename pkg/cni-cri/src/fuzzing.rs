//! For pkg/cni-fuzz: reads answers of a runtime.

use crate::message::{parse_pods, unframe};

/// Reads the body of an answer. Returns the pods' IDs, or `None` if the body is refused.
pub fn read_body(body: &[u8]) -> Option<Vec<String>> {
    parse_pods(unframe(body).ok()?).ok()
}
