//! The types of [`Plugin::restore_rules`](super::Plugin::restore_rules), which writes packet filter
//! rules again after another program has removed them.

use super::Call;
use crate::rollback::Rollback;
use crate::{Code, Result};

/// Whether [`Plugin::restore_rules`](super::Plugin::restore_rules) writes missing rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreMode {
    /// Only reports the missing rules.
    Report,
    /// Writes the missing rules.
    Write,
}

/// The outcome of [`Plugin::restore_rules`](super::Plugin::restore_rules).
#[derive(Debug)]
pub struct Restored<'a> {
    /// One sentence about each rule that was missing.
    pub missing: Vec<String>,
    /// The undo of the writing. Dropping it removes the written rules; the caller commits it to
    /// keep them.
    pub rollback: Rollback<'a>,
}

impl<'a> Restored<'a> {
    /// Returns the outcome for a plugin whose CHECK compares nothing but rules. `checked` is the
    /// outcome of that CHECK. Calls `write` if rules are missing and `mode` is
    /// [`RestoreMode::Write`].
    ///
    /// # Errors
    /// - The error in `checked` if CHECK failed for another reason than missing rules.
    /// - The error of `write`.
    pub fn after_check(
        call: &Call<'_>,
        mode: RestoreMode,
        checked: Result<()>,
        write: impl FnOnce() -> Result<Rollback<'a>>,
    ) -> Result<Restored<'a>> {
        let missing = match checked {
            Ok(()) => Vec::new(),
            // Some rules are missing, or all.
            Err(error) if [Code::CHECK_FAILED, Code::UNKNOWN_CONTAINER].contains(&error.code()) => {
                vec![error.msg().to_owned()]
            }
            Err(error) => return Err(error),
        };
        let must_write = !missing.is_empty() && mode == RestoreMode::Write;
        let rollback = if must_write { write()? } else { call.rollback() };
        Ok(Restored { missing, rollback })
    }
}
