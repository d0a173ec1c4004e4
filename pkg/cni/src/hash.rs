//! SHA-512, from which CNI plugins derive the names of links, chains and rules.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha512};

/// Returns the SHA-512 of the concatenated `parts`.
pub fn sha512(parts: &[&[u8]]) -> [u8; 64] {
    let mut hash = Sha512::new();
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into()
}

/// Returns the first `digits` hex digits (at most 128) of the SHA-512 of the concatenated `parts`.
pub fn sha512_hex(parts: &[&[u8]], digits: usize) -> String {
    let hash = sha512(parts);
    let needed_bytes = digits.div_ceil(2).min(hash.len());
    let mut hex = String::with_capacity(2 * needed_bytes);
    for byte in &hash[..needed_bytes] {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
    }
    // If `digits` is odd, the last byte has added one digit too many.
    hex.truncate(digits);
    hex
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_hashed_as_one() {
        // The beginning of what `printf abc | sha512sum` prints.
        assert_eq!(sha512_hex(&[b"a", b"bc"], 15), "ddaf35a193617ab");
        assert_eq!(sha512_hex(&[b"abc"], 200).len(), 128);
        assert_eq!(sha512(&[b"abc"])[..2], [0xdd, 0xaf]);
    }
}
