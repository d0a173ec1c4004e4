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
    /// Descriptions of the missing rules. Empty if no rule was missing.
    pub missing: Vec<String>,
    /// Removes the written rules when it is dropped. The caller commits it to keep them.
    pub rollback: Rollback<'a>,
}

impl<'a> Restored<'a> {
    /// Restores the rules of a plugin whose CHECK compares only rules. `checked` is the outcome of
    /// that CHECK. If it reports missing rules and `mode` is [`RestoreMode::Write`], calls `write`,
    /// which writes them and returns the undo.
    ///
    /// # Errors
    /// - The error in `checked` if it is not about missing rules.
    /// - The error of `write`.
    pub fn after_check(
        call: &Call<'_>,
        mode: RestoreMode,
        checked: Result<()>,
        write: impl FnOnce() -> Result<Rollback<'a>>,
    ) -> Result<Restored<'a>> {
        let missing = match checked {
            Ok(()) => Vec::new(),
            // `CHECK_FAILED`: some rules are missing. `UNKNOWN_CONTAINER`: all are.
            Err(error) if matches!(error.code(), Code::CHECK_FAILED | Code::UNKNOWN_CONTAINER) => {
                vec![error.msg().to_owned()]
            }
            Err(error) => return Err(error),
        };
        let must_write = !missing.is_empty() && mode == RestoreMode::Write;
        let rollback = if must_write { write()? } else { call.rollback() };
        Ok(Restored { missing, rollback })
    }
}
