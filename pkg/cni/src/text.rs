//! Cuts texts.

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
}
