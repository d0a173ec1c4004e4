//! An error as a CNI plugin reports it: a code, a message, details.
//!
//! The code is chosen where the meaning is known; the cause stays a typed [`std::error::Error`]
//! (with its errno) until the skeleton writes the message. A message says what was being done, to
//! what, and why it failed.

use std::error::Error as StdError;
use std::fmt;

/// The crate's result, with [`Error`] as the error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A CNI error code. A number and no enum: a delegate may return any code, and it is passed on
/// unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Code(pub u32);

impl Code {
    /// The configuration's version is not supported, or does not allow the verb.
    pub const INCOMPATIBLE_VERSION: Code = Code(1);
    /// A legal key that this kernel or host cannot serve; the message names key and value.
    pub const UNSUPPORTED_FIELD: Code = Code(2);
    /// Only from CHECK: nothing of the attachment exists.
    pub const UNKNOWN_CONTAINER: Code = Code(3);
    /// A `CNI_*` variable is missing or wrong; the message names it.
    pub const INVALID_ENVIRONMENT: Code = Code(4);
    /// Reading or writing a file or a stream failed.
    pub const IO: Code = Code(5);
    /// JSON that cannot be decoded.
    pub const DECODE: Code = Code(6);
    /// A configuration that decodes but makes no sense.
    pub const INVALID_CONFIG: Code = Code(7);
    /// CNI_NETNS is the plugin's own namespace. Go's number; not in the specification's table.
    pub const INVALID_NETNS: Code = Code(8);
    /// Exhaustion, a deadline, an interruption: the same call may succeed later.
    pub const TRY_AGAIN: Code = Code(11);
    /// STATUS: ADD cannot be served.
    pub const NOT_AVAILABLE: Code = Code(50);
    /// STATUS: ADD cannot be served and existing containers may have limited connectivity.
    pub const LIMITED_CONNECTIVITY: Code = Code(51);
    /// Ours: the kernel refused an operation; the message carries its errno and its own text.
    pub const KERNEL: Code = Code(100);
    /// Ours, from CHECK: something of the attachment is not as it should be.
    pub const CHECK_FAILED: Code = Code(101);
    /// A code of this project: what was requested (an interface name, an address) is already in
    /// use; the message names the holder.
    pub const CONFLICT: Code = Code(102);
    /// A fault of the program itself.
    pub const INTERNAL: Code = Code(999);
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Code({})", self.0)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A failure with its CNI code. Displays as its message alone, the cause included.
#[derive(Debug, thiserror::Error)]
#[error("{msg}")]
pub struct Error {
    code: Code,
    msg: String,
    details: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error that is its own cause.
    pub fn new(code: Code, msg: impl Into<String>) -> Error {
        Error { code, msg: msg.into(), details: String::new(), source: None }
    }

    /// Code 7.
    pub fn config(msg: impl Into<String>) -> Error {
        Error::new(Code::INVALID_CONFIG, msg)
    }

    /// `doing: cause`, for example `failed to read /etc/resolv.conf: No such file or directory (os
    /// error 2)`.
    pub fn caused(code: Code, doing: impl fmt::Display, cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        let source = cause.into();
        Error { code, msg: format!("{doing}: {source}"), details: String::new(), source: Some(source) }
    }

    /// Adds what helps but does not belong into the one-line message.
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Error {
        self.details = details.into();
        self
    }

    /// The same failure under another code.
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

    /// The outcome of work that continues after errors: the first error [`and`](Error::and) the
    /// others, if there are any.
    ///
    /// # Errors
    /// The joined one.
    pub fn join(errors: impl IntoIterator<Item = Error>) -> Result<()> {
        let mut errors = errors.into_iter();
        errors.next().map_or(Ok(()), |first| Err(first.and(errors)))
    }

    /// One error out of many: this one's code, every message and all details, joined by `; `.
    #[must_use]
    pub fn and(mut self, others: impl IntoIterator<Item = Error>) -> Error {
        for other in others {
            self.msg = format!("{}; {}", self.msg, other.msg);
            if !other.details.is_empty() {
                let gap = if self.details.is_empty() { "" } else { "; " };
                self.details = format!("{}{gap}{}", self.details, other.details);
            }
        }
        self
    }

    /// The code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// The one-line message.
    pub fn msg(&self) -> &str {
        &self.msg
    }

    /// The details; often empty.
    pub fn details(&self) -> &str {
        &self.details
    }

    /// The errno at the bottom of the chain of causes, if there is one.
    pub fn errno(&self) -> Option<i32> {
        self.io().and_then(std::io::Error::raw_os_error)
    }

    /// Whether the cause is a shortage that passes without a repair: of disk space, inodes, memory,
    /// processes or file descriptors.
    pub fn is_shortage(&self) -> bool {
        use std::io::ErrorKind::{OutOfMemory, QuotaExceeded, StorageFull, WouldBlock};
        // ENFILE, EMFILE, ENOBUFS: std has no kind for them.
        const WITHOUT_A_KIND: [i32; 3] = [23, 24, 105];
        self.io().is_some_and(|error| {
            matches!(error.kind(), OutOfMemory | QuotaExceeded | StorageFull | WouldBlock)
                || error.raw_os_error().is_some_and(|errno| WITHOUT_A_KIND.contains(&errno))
        })
    }

    /// Returns the first operating system error in the chain of causes.
    fn io(&self) -> Option<&std::io::Error> {
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
    fn only_what_passes_without_a_repair_is_a_shortage() {
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
