//! Compares two texts of a sysctl's value.
//!
//! The kernel returns `4096\t131072\t6291456\n` after `4096 131072 6291456` was written, and 16
//! after `0x10`. A number with a leading 0 is octal.

/// Whether both texts are the same value for the kernel: each pair of words is equal, or is the
/// same number.
pub(crate) fn is_same(one: &str, other: &str) -> bool {
    let (mut one, mut other) = (one.split_whitespace(), other.split_whitespace());
    loop {
        match (one.next(), other.next()) {
            (None, None) => return true,
            (Some(one), Some(other)) if one == other => {}
            (Some(one), Some(other)) if number(one).is_some_and(|value| number(other) == Some(value)) => {}
            _ => return false,
        }
    }
}

/// Returns the integer that the kernel reads from a word, or `None` if it is not one.
fn number(word: &str) -> Option<i128> {
    let (sign, digits) = match word.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, word),
    };
    let value = match digits.strip_prefix('0') {
        Some("") => 0,
        Some(rest) => match rest.strip_prefix(['x', 'X']) {
            Some(hex) => unsigned(hex, 16)?,
            None => unsigned(rest, 8)?,
        },
        None => unsigned(digits, 10)?,
    };
    Some(sign * i128::from(value))
}

/// Parses digits of a radix. Returns `None` for a sign, which `from_str_radix` would accept.
fn unsigned(digits: &str, radix: u32) -> Option<u64> {
    if digits.starts_with(['+', '-']) { None } else { u64::from_str_radix(digits, radix).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_and_spelling_of_numbers_do_not_matter() {
        for (one, other) in [
            ("1", "1\n"),
            ("4096 131072  6291456", "4096\t131072\t6291456"),
            ("0x10", "16"),
            ("010", "8"),
            ("-0x1", "-1"),
            ("0", "-0"),
            ("cubic", " cubic"),
            ("", "\n"),
        ] {
            assert!(is_same(one, other) && is_same(other, one), "{one:?} and {other:?}");
        }
    }

    #[test]
    fn different_values_are_not_the_same() {
        for (one, other) in [
            ("1", "0"),
            ("1", "1 1"),
            ("", "0"),
            ("010", "10"),
            ("cubic", "Cubic"),
            ("1", "+1"),
            ("0x", "0"),
            ("--1", "1"),
            ("08", "8"),
            ("1-3", "1,2,3"),
        ] {
            assert!(!is_same(one, other) && !is_same(other, one), "{one:?} and {other:?}");
        }
    }
}
