//! Lets a test skip itself visibly.
//!
//! libtest cannot skip a test at run time and hides what passing tests print. So the line is
//! written directly to stderr, where `scripts/test` collects it.

use std::io::{self, Write};
use std::thread;

/// Reports that the running test is skipped. Tests use [`skip!`](crate::skip).
///
/// # Panics
/// With `CNI_TEST_REQUIRE=all`, so that the test fails.
pub fn skipped(reason: &str) {
    let required = std::env::var("CNI_TEST_REQUIRE").is_ok_and(|value| value == "all");
    assert!(!required, "CNI_TEST_REQUIRE=all, and this test was about to skip: {reason}");
    report(reason);
}

/// Reports that the situation of the running test cannot be produced on this machine, for example
/// because it is too fast. This is never a failure.
pub fn unprovoked(reason: &str) {
    report(reason);
}

/// Writes the line about a skipped test.
fn report(reason: &str) {
    let thread = thread::current();
    // In one write, so that lines of parallel tests do not mix. It begins with a newline, because
    // libtest may have written a part of a line.
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
