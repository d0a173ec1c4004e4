//! The parts of [`Plugin::restore_rules`](super::Plugin::restore_rules), which writes packet filter
//! rules again after another program has removed them.

use crate::rollback::Rollback;
use crate::{Code, Result};

/// Whether [`Plugin::restore_rules`](super::Plugin::restore_rules) writes missing rules.
#[derive(Debug)]
pub enum RestoreMode<'r, 'a> {
    /// Only reports the missing rules.
    Report,
    /// Writes the missing rules, and pushes the undo onto this rollback.
    Write(&'r mut Rollback<'a>),
}

/// Returns descriptions of the missing rules of a plugin whose CHECK compares only rules; empty if
/// none is missing. `checked` is the outcome of that CHECK.
///
/// # Errors
/// The error in `checked` if it is not about missing rules.
pub fn missing_rules(checked: Result<()>) -> Result<Vec<String>> {
    match checked {
        Ok(()) => Ok(Vec::new()),
        // `CHECK_FAILED`: some rules are missing. `UNKNOWN_CONTAINER`: all are.
        Err(error) if matches!(error.code(), Code::CHECK_FAILED | Code::UNKNOWN_CONTAINER) => {
            Ok(vec![error.msg().to_owned()])
        }
        Err(error) => Err(error),
    }
}
