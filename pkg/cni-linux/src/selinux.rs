//! The SELinux label of programs that this thread starts.

use std::fs;

use crate::error::{Error, Result};

/// The label of programs that the calling thread starts. Empty: the label that the policy chooses.
const EXEC_LABEL: &str = "/proc/thread-self/attr/exec";

/// Runs `start` while programs that the calling thread starts get the label `context`.
///
/// # Errors
/// The kernel refused the label, or has no SELinux; then `start` has not run.
pub fn with_exec_label<T>(context: &str, start: impl FnOnce() -> T) -> Result<T> {
    fs::write(EXEC_LABEL, context)
        .map_err(|error| Error::new(format_args!("failed to write {context:?} to {EXEC_LABEL}"), error))?;
    let _reset = Reset;
    Ok(start())
}

/// Clears the label when it is dropped.
struct Reset;

impl Drop for Reset {
    fn drop(&mut self) {
        // The kernel always accepts an empty label.
        let _ = fs::write(EXEC_LABEL, "");
    }
}
