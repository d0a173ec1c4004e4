//! Packet filter rules that are written again after something else has removed them.

use super::Call;
use crate::rollback::Rollback;
use crate::{Code, Result};

/// Whether [`Plugin::restore_rules`](super::Plugin::restore_rules) writes missing rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreMode {
    /// Reports them.
    Report,
    /// Writes them.
    Write,
}

/// The outcome of [`Plugin::restore_rules`](super::Plugin::restore_rules).
#[derive(Debug)]
pub struct Restored<'a> {
    /// A sentence for each rule that was missing.
    pub missing: Vec<String>,
    /// Removes what was written; to be committed.
    pub rollback: Rollback<'a>,
}

impl<'a> Restored<'a> {
    /// Calls `write` if CHECK, which compares nothing but rules, has found a difference.
    ///
    /// # Errors
    /// CHECK's, but for differences, and those of `write`.
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
        let is_done = missing.is_empty() || mode == RestoreMode::Report;
        let rollback = if is_done { call.rollback() } else { write()? };
        Ok(Restored { missing, rollback })
    }
}
