//! Writing packet filter rules again after another program has removed them.

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
    /// For a plugin whose CHECK compares nothing but rules: takes the outcome of that CHECK as
    /// `checked`, and calls `write` if rules are missing and `mode` asks for writing.
    ///
    /// # Errors
    /// An error in `checked` that is not a difference; those of `write`.
    pub fn after_check(
        call: &Call<'_>,
        mode: RestoreMode,
        checked: Result<()>,
        write: impl FnOnce() -> Result<Rollback<'a>>,
    ) -> Result<Restored<'a>> {
        let missing = match checked {
            Ok(()) => Vec::new(),
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
