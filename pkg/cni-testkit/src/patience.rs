//! How long tests wait, and how many they are at once.
//!
//! Under emulation programs start 20 times slower than on the machine that a test was written on.
//! `CNI_TEST_SLOW` says by how much the tests' deadlines are longer. What the plugins themselves
//! wait for stays as it is, and so a crowd that comes one after the other through a lock must be
//! smaller there, and of what is tried over and over a share is enough.

use std::sync::OnceLock;
use std::time::Duration;

use crate::deviation;

/// `CNI_TEST_SLOW`, a whole number; 1 if it is not set.
fn factor() -> u32 {
    static FACTOR: OnceLock<u32> = OnceLock::new();
    *FACTOR.get_or_init(|| match std::env::var("CNI_TEST_SLOW") {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("CNI_TEST_SLOW={text}: {error}")),
        Err(_) => 1,
    })
}

/// `time` of a machine that is not slow, as this one needs it; a quarter in a test that is listed
/// in tests/divergences.txt.
///
/// # Panics
/// If `CNI_TEST_SLOW` is not a number.
pub fn patience(time: Duration) -> Duration {
    // What it waits for will not come.
    let share = if deviation::is_expected_to_fail() { 4 } else { 1 };
    time * factor() / share
}

/// How many may be at once here where a machine that is not slow takes `count`: never less than 6
/// of them.
///
/// # Panics
/// If `CNI_TEST_SLOW` is not a number.
pub fn crowd(count: usize) -> usize {
    let factor = usize::try_from(factor()).unwrap_or(usize::MAX);
    (count / factor).max(count.min(6))
}

/// How often to do here what a machine that is not slow does `count` times: once at least.
///
/// # Panics
/// If `CNI_TEST_SLOW` is not a number.
pub fn rounds(count: u64) -> u64 {
    (count / u64::from(factor())).max(1)
}
