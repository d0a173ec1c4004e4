//! Errors: a sentence that says what was done, to what, and why it failed.

use std::fmt::Display;

/// What failed, in words.
#[derive(Debug)]
pub(crate) struct Error(String);

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(text: impl Into<String>) -> Error {
        Error(text.into())
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Says what was being done when something failed.
pub(crate) trait Doing<T> {
    fn doing(self, what: impl Display) -> Result<T>;
}

impl<T, E: Display> Doing<T> for std::result::Result<T, E> {
    fn doing(self, what: impl Display) -> Result<T> {
        self.map_err(|error| Error(format!("{what}: {error}")))
    }
}
