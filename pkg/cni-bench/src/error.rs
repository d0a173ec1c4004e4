//! The error type: a text with the action, its object and the cause.

use std::fmt::Display;

/// An error message.
#[derive(Debug)]
pub(crate) struct Error(String);

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Returns an error with this text.
    pub(crate) fn new(text: impl Into<String>) -> Error {
        Error(text.into())
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Adds the failed action to an error.
pub(crate) trait Doing<T> {
    /// Prefixes an error with `WHAT: `.
    fn doing(self, what: impl Display) -> Result<T>;
}

impl<T, E: Display> Doing<T> for std::result::Result<T, E> {
    fn doing(self, what: impl Display) -> Result<T> {
        self.map_err(|error| Error(format!("{what}: {error}")))
    }
}
