//! Sets the SELinux label of programs that this thread starts.

use std::fs;

use crate::error::{Error, Result};

/// The file with the label of programs that the calling thread starts. An empty label leaves the
/// choice to the policy.
const EXEC_LABEL: &str = "/proc/thread-self/attr/exec";

/// Runs `start` and returns its result. Programs that `start` starts on the calling thread get the
/// label `context`.
///
/// # Errors
/// The kernel refused the label, or does not support SELinux; `start` was not run.
pub fn with_exec_label<T>(context: &str, start: impl FnOnce() -> T) -> Result<T> {
    fs::write(EXEC_LABEL, context)
        .map_err(|error| Error::new(format_args!("failed to write {context:?} to {EXEC_LABEL}"), error))?;
    let _reset = Reset;
    Ok(start())
}

/// Resets the label when dropped, also after a panic.
struct Reset;

impl Drop for Reset {
    fn drop(&mut self) {
        // Cannot fail: the file was writable just before, and the kernel accepts an empty label.
        let _ = fs::write(EXEC_LABEL, "");
    }
}
