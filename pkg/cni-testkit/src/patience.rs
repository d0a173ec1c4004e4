//! Adapts deadlines and amounts of work in tests to slow machines.
//!
//! Under emulation programs start 20 times slower than on the machine that a test was written on.
//! `CNI_TEST_SLOW` is the factor by which the tests' deadlines are longer. The plugins' own
//! timeouts stay the same. So fewer plugins may wait for one lock at the same time, and tests that
//! repeat something do so less often.

use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::deviation;

/// Returns `CNI_TEST_SLOW`, a whole number, or 1 if it is not set.
fn factor() -> u32 {
    static FACTOR: OnceLock<u32> = OnceLock::new();
    *FACTOR.get_or_init(|| match std::env::var("CNI_TEST_SLOW") {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("CNI_TEST_SLOW={text}: {error}")),
        Err(_) => 1,
    })
}

/// Returns the deadline for this machine. `time` is the deadline for a machine that is not slow. A
/// test that is expected to fail (tests/divergences.txt) gets a quarter, because it waits in vain.
///
/// # Panics
/// If `CNI_TEST_SLOW` is not a number.
pub fn patience(time: Duration) -> Duration {
    let share = if deviation::is_expected_to_fail() { 4 } else { 1 };
    time * factor() / share
}

/// Returns how many processes a test starts at the same time on this machine. `count` is the number
/// for a machine that is not slow. The result is at least 6, or `count` if that is less.
///
/// # Panics
/// If `CNI_TEST_SLOW` is not a number.
pub fn crowd(count: usize) -> usize {
    let factor = usize::try_from(factor()).unwrap_or(usize::MAX);
    (count / factor).max(count.min(6))
}

/// Returns how often a test repeats something on this machine, at least once. `count` is the number
/// for a machine that is not slow.
///
/// # Panics
/// If `CNI_TEST_SLOW` is not a number.
pub fn rounds(count: u64) -> u64 {
    (count / u64::from(factor())).max(1)
}

/// Repeats `attempt` until it succeeds, and returns its value.
///
/// # Panics
/// With the last error, if it does not succeed within 30 s.
#[track_caller]
pub fn retry<T>(mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + patience(Duration::from_secs(30));
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        sleep(Duration::from_millis(5));
    }
}

/// Waits until `condition` holds.
///
/// # Panics
/// With the name `what` of the condition, if it does not hold within 30 s.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    retry(|| if condition() { Ok(()) } else { Err(format!("never: {what}")) });
}
