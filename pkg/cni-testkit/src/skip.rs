//! A third result: neither passed nor failed, said aloud.
//!
//! libtest knows no skip at run time and swallows what passing tests print, so the line goes
//! straight to standard error, where `scripts/test` collects it.

use std::io::{self, Write};
use std::thread;

/// Reports a skip of the running test; with `CNI_TEST_REQUIRE=all` it is a failure. Use
/// [`skip!`](crate::skip).
///
/// # Panics
/// With `CNI_TEST_REQUIRE=all`.
pub fn skipped(reason: &str) {
    let required = std::env::var("CNI_TEST_REQUIRE").is_ok_and(|value| value == "all");
    assert!(!required, "CNI_TEST_REQUIRE=all, and this test was about to skip: {reason}");
    say(reason);
}

/// Reports that what the test is about cannot be provoked here because the machine is too good for
/// it, which no `CNI_TEST_REQUIRE` can change.
pub fn unprovoked(reason: &str) {
    say(reason);
}

fn say(reason: &str) {
    let thread = thread::current();
    // One write, so that lines of parallel tests do not mix; led by a newline, since libtest may be
    // in one of its own.
    let line = format!("\nSKIP {}: {}\n", thread.name().unwrap_or("?"), reason.replace('\n', " "));
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Ends the test as a visible skip: `skip!("no {tool}")`.
#[macro_export]
macro_rules! skip {
    ($($arg:tt)*) => {{
        $crate::skipped(&format!($($arg)*));
        return;
    }};
}

/// Ends the test as a visible skip if a probe says that something is missing:
/// `require!(probe::nft_bridge())`.
#[macro_export]
macro_rules! require {
    ($probe:expr) => {
        if let Err(reason) = $probe {
            $crate::skip!("{reason}");
        }
    };
}
