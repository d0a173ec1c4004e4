//! The errors that a CNI plugin reports: a code, a message and details.
//!
//! The function that knows the meaning of an error chooses its code. The cause is kept as a
//! [`std::error::Error`], so that callers can find its errno.

use std::error::Error as StdError;
use std::fmt;

/// The crate's result, with [`Error`] as the error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A CNI error code. This is not an enum, because any code of a delegate is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Code(pub u32);

impl Code {
    /// The configuration's version is not supported, or does not allow the verb.
    pub const INCOMPATIBLE_VERSION: Code = Code(1);
    /// A valid key that this kernel or host does not support; the message names key and value.
    pub const UNSUPPORTED_FIELD: Code = Code(2);
    /// CHECK: nothing of the attachment exists.
    pub const UNKNOWN_CONTAINER: Code = Code(3);
    /// A `CNI_*` variable is missing or invalid; the message names it.
    pub const INVALID_ENVIRONMENT: Code = Code(4);
    /// Reading or writing a file or a stream failed.
    pub const IO: Code = Code(5);
    /// JSON that cannot be decoded.
    pub const DECODE: Code = Code(6);
    /// A configuration with an invalid or contradictory value.
    pub const INVALID_CONFIG: Code = Code(7);
    /// CNI_NETNS is the plugin's own namespace. The Go plugins use this number, which the
    /// specification does not list.
    pub const INVALID_NETNS: Code = Code(8);
    /// A resource is exhausted, a deadline has passed or a signal came: the same call may succeed
    /// later.
    pub const TRY_AGAIN: Code = Code(11);
    /// STATUS: an ADD would fail.
    pub const NOT_AVAILABLE: Code = Code(50);
    /// STATUS: an ADD would fail, and existing containers may have limited connectivity.
    pub const LIMITED_CONNECTIVITY: Code = Code(51);
    /// A code of this project: the kernel refused an operation; the message has its errno and text.
    pub const KERNEL: Code = Code(100);
    /// A code of this project: CHECK found a difference from the state that ADD left.
    pub const CHECK_FAILED: Code = Code(101);
    /// A code of this project: what was requested (an interface name, an address) is already in
    /// use; the message names the holder.
    pub const CONFLICT: Code = Code(102);
    /// A code of this project: a server refuses a request, and repeating the call does not help;
    /// the message has the server's text.
    pub const REFUSED: Code = Code(103);
    /// An internal error of the plugin.
    pub const INTERNAL: Code = Code(999);
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A failure with its CNI code. Displays as its message, which includes the cause.
#[derive(Debug, thiserror::Error)]
#[error("{msg}")]
pub struct Error {
    code: Code,
    msg: String,
    details: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// Returns an error without a cause.
    pub fn new(code: Code, msg: impl Into<String>) -> Error {
        Error { code, msg: msg.into(), details: String::new(), source: None }
    }

    /// Returns an error of code 7, about the configuration.
    pub fn config(msg: impl Into<String>) -> Error {
        Error::new(Code::INVALID_CONFIG, msg)
    }

    /// Returns an error with a cause. Its message is `doing: cause`, for example `failed to read
    /// /etc/resolv.conf: No such file or directory (os error 2)`.
    pub fn caused(code: Code, doing: impl fmt::Display, cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        let source = cause.into();
        Error { code, msg: format!("{doing}: {source}"), details: String::new(), source: Some(source) }
    }

    /// Sets the details: information that helps, but does not fit into the one-line message.
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Error {
        self.details = details.into();
        self
    }

    /// Replaces the code.
    #[must_use]
    pub fn with_code(mut self, code: Code) -> Error {
        self.code = code;
        self
    }

    /// Puts `doing: ` before the message.
    #[must_use]
    pub fn context(mut self, doing: impl fmt::Display) -> Error {
        self.msg = format!("{doing}: {}", self.msg);
        self
    }

    /// Joins all errors of an operation that went on after errors. Returns `Ok` if there are none.
    ///
    /// # Errors
    /// The first error, with the messages and details of the others appended.
    pub fn join(errors: impl IntoIterator<Item = Error>) -> Result<()> {
        let mut errors = errors.into_iter();
        match errors.next() {
            Some(first) => Err(first.and(errors)),
            None => Ok(()),
        }
    }

    /// Appends the messages and details of other errors to this one, separated by `; `. The code
    /// stays this error's.
    #[must_use]
    pub fn and(mut self, others: impl IntoIterator<Item = Error>) -> Error {
        for other in others {
            self.msg = format!("{}; {}", self.msg, other.msg);
            if !other.details.is_empty() {
                let separator = if self.details.is_empty() { "" } else { "; " };
                self.details = format!("{}{separator}{}", self.details, other.details);
            }
        }
        self
    }

    /// Returns the code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Returns the one-line message.
    pub fn msg(&self) -> &str {
        &self.msg
    }

    /// Returns the details, which are often empty.
    pub fn details(&self) -> &str {
        &self.details
    }

    /// Returns the errno of the first I/O error in the chain of causes, if there is one.
    pub fn errno(&self) -> Option<i32> {
        self.io_cause().and_then(std::io::Error::raw_os_error)
    }

    /// Whether the cause is a shortage of disk space, inodes, memory, processes, file descriptors
    /// or socket buffers, which may pass without a repair.
    pub fn is_shortage(&self) -> bool {
        use std::io::ErrorKind::{OutOfMemory, QuotaExceeded, StorageFull, WouldBlock};
        // ENFILE, EMFILE and ENOBUFS, for which std has no error kind.
        const WITHOUT_A_KIND: [i32; 3] = [23, 24, 105];
        let Some(cause) = self.io_cause() else { return false };
        // `WouldBlock` is EAGAIN, with which the kernel refuses to create another process.
        matches!(cause.kind(), OutOfMemory | QuotaExceeded | StorageFull | WouldBlock)
            || cause.raw_os_error().is_some_and(|errno| WITHOUT_A_KIND.contains(&errno))
    }

    /// Returns the first I/O error in the chain of causes.
    fn io_cause(&self) -> Option<&std::io::Error> {
        let mut cause: Option<&(dyn StdError + 'static)> = self.source();
        while let Some(error) = cause {
            if let Some(io) = error.downcast_ref::<std::io::Error>() {
                return Some(io);
            }
            cause = error.source();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joining_keeps_the_first_code_and_every_message() {
        let all = [Error::config("a"), Error::new(Code::IO, "b").with_details("why")];
        let joined = Error::join(all).unwrap_err();
        assert_eq!((joined.code(), joined.msg(), joined.details()), (Code::INVALID_CONFIG, "a; b", "why"));
        assert!(Error::join([]).is_ok());
    }

    #[test]
    fn only_errors_that_pass_without_repair_are_shortages() {
        let of = |errno| Error::caused(Code::IO, "x", std::io::Error::from_raw_os_error(errno)).is_shortage();
        // EAGAIN, ENOMEM, ENFILE, EMFILE, ENOSPC, ENOBUFS, EDQUOT.
        assert!([11, 12, 23, 24, 28, 105, 122].into_iter().all(of));
        // EPERM, ENOENT, EIO, EACCES, EROFS, EOPNOTSUPP.
        assert!(![1, 2, 5, 13, 30, 95].into_iter().any(of));
        assert!(!Error::new(Code::TRY_AGAIN, "no cause").is_shortage());
    }

    #[test]
    fn the_errno_of_the_cause_stays_reachable() {
        let error = Error::caused(Code::IO, "failed to read x", std::io::Error::from_raw_os_error(2)).context("outer");
        assert_eq!(error.errno(), Some(2));
        assert_eq!(error.msg(), "outer: failed to read x: No such file or directory (os error 2)");
    }
}
