//! Cuts texts, and reads them from bytes.

use std::borrow::Cow;

/// Returns the same as [`String::from_utf8_lossy`], which takes several times as long for a text
/// that is valid.
pub fn lossy(bytes: &[u8]) -> Cow<'_, str> {
    str::from_utf8(bytes).map_or_else(|_| String::from_utf8_lossy(bytes), Cow::Borrowed)
}

/// Returns the beginning of a text: at most `max` bytes, without a part of a character.
pub fn cut(text: &str, max: usize) -> &str {
    let mut end = max.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_character_is_cut_in_two() {
        for (max, expected) in [(0, ""), (1, "a"), (2, "a"), (3, "aß"), (4, "aßc"), (9, "aßc")] {
            assert_eq!(cut("aßc", max), expected, "{max}");
        }
    }

    #[test]
    fn bytes_that_are_not_utf8_are_replaced() {
        assert_eq!((lossy("aß".as_bytes()), lossy(b"a\xffb\xc3")), ("aß".into(), "a\u{fffd}b\u{fffd}".into()));
    }
}
