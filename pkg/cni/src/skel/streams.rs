//! The streams of a call: reads the configuration and writes the result.

use std::io::{Read, Write};

use crate::rollback::Notes;
use crate::{Code, Error, Result};

/// The largest configuration that is accepted on stdin, in bytes.
pub const MAX_STDIN: usize = 16 << 20;

/// The streams of a call. A stream fails with `TimedOut` if the deadline has passed or a signal has
/// ended the wait; this error becomes code 11.
pub struct Streams<'a> {
    /// The source of the configuration. `None` if stdin is a terminal.
    pub stdin: Option<&'a mut dyn Read>,
    /// The destination of the result or the error, and of nothing else.
    pub stdout: &'a mut dyn Write,
    /// Receives notes for the operator.
    pub notes: Notes,
}

/// Writes the result to stdout and flushes it.
///
/// # Errors
/// Code 11 at the deadline or after a signal, 5 if stdout cannot be written.
pub(super) fn write_out(stdout: &mut dyn Write, bytes: &[u8]) -> Result<()> {
    stdout
        .write_all(bytes)
        .and_then(|()| stdout.flush())
        .map_err(|error| stream_error("failed to write the result to stdout", error))
}

/// Returns the error of a stream, with code 11 at the deadline or after a signal, else 5.
fn stream_error(doing: &str, error: std::io::Error) -> Error {
    let code = if error.kind() == std::io::ErrorKind::TimedOut { Code::TRY_AGAIN } else { Code::IO };
    Error::caused(code, doing, error)
}

/// Reads the configuration from stdin.
///
/// # Errors
/// - Code 5 if stdin is a terminal (`None`), cannot be read, or has more than [`MAX_STDIN`] bytes.
/// - Code 11 at the deadline or after a signal.
pub(super) fn read_stdin(stdin: &mut Option<&mut dyn Read>) -> Result<Vec<u8>> {
    let Some(stdin) = stdin else {
        return Err(Error::new(
            Code::IO,
            "error reading from stdin: it is a terminal; the network configuration is expected there",
        ));
    };
    let mut bytes = Vec::with_capacity(4096);
    // Reads one byte more than allowed, to notice a configuration that is too long.
    stdin
        .take(MAX_STDIN as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| stream_error("error reading from stdin", error))?;
    if bytes.len() > MAX_STDIN {
        return Err(Error::new(Code::IO, format!("error reading from stdin: more than {} MiB", MAX_STDIN >> 20)));
    }
    Ok(bytes)
}
