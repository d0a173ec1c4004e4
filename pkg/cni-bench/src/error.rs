//! The error of every function here: a text with the action, its object and the cause.

use std::fmt::Display;

pub(crate) type Result<T, E = String> = std::result::Result<T, E>;

/// Adds the failed action to an error.
pub(crate) trait Doing<T> {
    /// Prefixes an error with `WHAT: `.
    fn doing(self, what: impl Display) -> Result<T>;
}

impl<T, E: Display> Doing<T> for Result<T, E> {
    fn doing(self, what: impl Display) -> Result<T> {
        self.map_err(|error| format!("{what}: {error}"))
    }
}
