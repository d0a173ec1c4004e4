//! What went wrong in the kernel: what was being done, to what, and why, with the errno kept as a
//! number.
//!
//! These errors do not mention the operator's configuration; the plugin adds that with
//! [`Error::context`]. Do not match on the text: the kernel's own explanation (the "extended
//! acknowledgement") differs between releases; ask [`Error::errno`] or the `is_…` methods.

use std::fmt;
use std::io;
use std::time::Duration;

use nix::errno::Errno;

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure. Displays as `failed to add 10.1.2.3/24 to eth0: File exists (os error 17): <the
/// kernel's explanation>`.
#[derive(Debug, thiserror::Error)]
#[error("{doing}: {cause}{}", Others(.others))]
pub struct Error {
    doing: String,
    /// Errors that followed.
    others: Vec<Error>,
    #[source]
    cause: Cause,
}

/// Which of the two names of a new veth pair was taken already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakenName {
    /// The name of the host's end: another one can be tried.
    HostName,
    /// The name of the container's end: the interface that has it stays untouched.
    ContainerName,
}

/// Why it failed.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Cause(Reason);

/// The kinds of causes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Reason {
    /// The kernel refused; `ack` is its own explanation, if it gave one.
    #[error("{source}{}", Suffix(.ack))]
    Kernel {
        /// The errno.
        source: io::Error,
        /// The kernel's own explanation.
        ack: Option<Box<str>>,
    },
    /// No interface of that name or index. Go's text, which callers in the field compare with.
    #[error("Link not found")]
    LinkNotFound,
    /// One name of a veth pair is in use.
    #[error("{source}{}", Suffix(.ack))]
    TakenName {
        /// Which of them.
        what: TakenName,
        /// The errno.
        source: io::Error,
        /// The kernel's own explanation.
        ack: Option<Box<str>>,
    },
    /// The path is not a network namespace, or does not exist. Go's text.
    #[error("{text}")]
    NoNetns {
        /// The whole message.
        text: String,
        /// The errno, where the path could not be opened.
        source: Option<io::Error>,
    },
    /// An event did not come in time.
    #[error("it did not happen within {} s", .0.as_secs_f32())]
    Deadline(Duration),
    /// SIGTERM, SIGINT or SIGHUP came first.
    #[error("interrupted by a signal")]
    Terminated,
    /// Another owner, named here, has it and still exists.
    #[error("{0}")]
    Held(String),
    /// Anything that has no errno.
    #[error("{0}")]
    Text(String),
}

struct Others<'a>(&'a [Error]);

impl fmt::Display for Others<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|other| write!(f, "; {other}"))
    }
}

struct Suffix<'a>(&'a Option<Box<str>>);

impl fmt::Display for Suffix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(ack) => write!(f, ": {ack}"),
            None => Ok(()),
        }
    }
}

impl From<Reason> for Cause {
    fn from(reason: Reason) -> Cause {
        Cause(reason)
    }
}

impl From<io::Error> for Cause {
    fn from(source: io::Error) -> Cause {
        Cause(Reason::Kernel { source, ack: None })
    }
}

impl From<Errno> for Cause {
    fn from(errno: Errno) -> Cause {
        io::Error::from(errno).into()
    }
}

impl Cause {
    /// A cause without an errno.
    pub fn text(text: impl Into<String>) -> Cause {
        Cause(Reason::Text(text.into()))
    }

    /// The errno that the kernel answered, and its own explanation, if it gave one.
    pub fn kernel(errno: i32, said: Option<String>) -> Cause {
        Cause(Reason::Kernel { source: io::Error::from_raw_os_error(errno), ack: said.map(Into::into) })
    }

    /// An event that did not come within `limit`.
    pub fn deadline(limit: Duration) -> Cause {
        Cause(Reason::Deadline(limit))
    }

    /// SIGTERM, SIGINT or SIGHUP came first.
    pub fn terminated() -> Cause {
        Cause(Reason::Terminated)
    }

    /// Another attachment, named by `holder`, has it and lives.
    pub fn held(holder: impl Into<String>) -> Cause {
        Cause(Reason::Held(holder.into()))
    }

    /// Whether the event waited for did not come in time.
    pub fn is_deadline(&self) -> bool {
        matches!(self.0, Reason::Deadline(_))
    }

    /// Whether a signal ended the wait.
    pub fn is_terminated(&self) -> bool {
        matches!(self.0, Reason::Terminated)
    }

    /// The same, with which of a veth pair's names is in use.
    pub(crate) fn taken(self, what: TakenName) -> Cause {
        match self.0 {
            Reason::Kernel { source, ack } => Cause(Reason::TakenName { what, source, ack }),
            other => Cause(other),
        }
    }

    fn io(&self) -> Option<&io::Error> {
        match &self.0 {
            Reason::Kernel { source, .. } | Reason::TakenName { source, .. } => Some(source),
            Reason::NoNetns { source, .. } => source.as_ref(),
            Reason::LinkNotFound | Reason::Deadline(_) | Reason::Terminated | Reason::Held(_) | Reason::Text(_) => None,
        }
    }

    pub(crate) fn errno(&self) -> Option<i32> {
        self.io().and_then(io::Error::raw_os_error)
    }
}

impl Error {
    /// An error: the action with its object, and the cause.
    pub fn new(doing: impl fmt::Display, cause: impl Into<Cause>) -> Error {
        Error { doing: doing.to_string(), cause: cause.into(), others: Vec::new() }
    }

    /// Puts `doing: ` before the message.
    #[must_use]
    pub fn context(mut self, doing: impl fmt::Display) -> Error {
        self.doing = format!("{doing}: {}", self.doing);
        self
    }

    /// The outcome of work that continues after errors: the first one, with the messages of the
    /// others after its own.
    ///
    /// # Errors
    /// The joined one.
    pub fn join(errors: impl IntoIterator<Item = Error>) -> Result<()> {
        let mut errors = errors.into_iter();
        let Some(mut first) = errors.next() else { return Ok(()) };
        first.others.extend(errors);
        Err(first)
    }

    /// The errno, if the kernel gave one.
    pub fn errno(&self) -> Option<i32> {
        self.cause.errno()
    }

    fn is_any_of(&self, errnos: &[Errno]) -> bool {
        self.errno().is_some_and(|got| errnos.iter().any(|errno| *errno as i32 == got))
    }

    /// Whether the thing acted upon does not exist: no such interface, address, route, neighbour,
    /// file.
    pub fn is_not_found(&self) -> bool {
        matches!(self.cause.0, Reason::LinkNotFound)
            || self.is_any_of(&[Errno::ENODEV, Errno::ENOENT, Errno::ESRCH, Errno::EADDRNOTAVAIL])
    }

    /// Whether the thing to be made is there already.
    pub fn is_exists(&self) -> bool {
        self.is_any_of(&[Errno::EEXIST])
    }

    /// Whether this kernel lacks the feature.
    pub fn is_unsupported(&self) -> bool {
        self.is_any_of(&[Errno::EOPNOTSUPP, Errno::EPROTONOSUPPORT, Errno::EAFNOSUPPORT])
    }

    /// Whether a path is not a network namespace, or does not exist. DEL takes this for "already
    /// gone".
    pub fn is_no_netns(&self) -> bool {
        matches!(self.cause.0, Reason::NoNetns { .. })
    }

    /// Whether the event waited for did not come in time.
    pub fn is_deadline(&self) -> bool {
        matches!(self.cause.0, Reason::Deadline(_))
    }

    /// Whether SIGTERM ended the wait.
    pub fn is_terminated(&self) -> bool {
        matches!(self.cause.0, Reason::Terminated)
    }

    /// For a veth pair that could not be made because a name is in use: which one.
    pub fn taken(&self) -> Option<TakenName> {
        match self.cause.0 {
            Reason::TakenName { what, .. } => Some(what),
            _ => None,
        }
    }

    /// The kernel's own explanation, where it gave one.
    pub fn explanation(&self) -> Option<&str> {
        match &self.cause.0 {
            Reason::Kernel { ack, .. } | Reason::TakenName { ack, .. } => ack.as_deref(),
            _ => None,
        }
    }
}

impl From<Error> for cni::Error {
    /// Code 4 if CNI_NETNS is not a namespace, 11 after a timeout or SIGTERM, 102 if another owner
    /// has it, else 100. Where only the caller knows a better code (for an unsupported VLAN
    /// setting, say), the caller uses [`cni::Error::with_code`].
    fn from(error: Error) -> cni::Error {
        let Error { doing, cause, others } = error;
        let others = others.into_iter().map(cni::Error::from);
        let code = match &cause.0 {
            Reason::NoNetns { .. } => {
                // The text begins with Go's words and ends with the variable's name.
                let text = format!("{doing}: {cause} (CNI_NETNS)");
                return cni::Error::new(cni::Code::INVALID_ENVIRONMENT, text).and(others);
            }
            Reason::Deadline(_) | Reason::Terminated => cni::Code::TRY_AGAIN,
            Reason::Held(_) => cni::Code::CONFLICT,
            _ => cni::Code::KERNEL,
        };
        cni::Error::caused(code, doing, cause).and(others)
    }
}

impl From<Error> for io::Error {
    /// The kind by errno, the text complete.
    fn from(error: Error) -> io::Error {
        let kind = error.cause.io().map_or(io::ErrorKind::Other, io::Error::kind);
        let kind = if error.is_no_netns() && kind == io::ErrorKind::Other { io::ErrorKind::InvalidInput } else { kind };
        io::Error::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exists() -> Error {
        let cause = Reason::Kernel { source: Errno::EEXIST.into(), ack: Some("because".into()) };
        Error::new("failed to add 10.1.2.3/24 to eth0", cause)
    }

    #[test]
    fn an_error_says_what_to_what_and_why() {
        let error = exists();
        assert_eq!(error.to_string(), "failed to add 10.1.2.3/24 to eth0: File exists (os error 17): because");
        assert!(error.is_exists() && !error.is_not_found() && !error.is_unsupported());
        assert_eq!((error.errno(), error.explanation()), (Some(17), Some("because")));
    }

    #[test]
    fn the_errno_survives_the_conversion() {
        let error: cni::Error = exists().context("outer").into();
        assert_eq!((error.code(), error.errno()), (cni::Code::KERNEL, Some(17)));
        assert!(error.msg().starts_with("outer: failed to add 10.1.2.3/24 to eth0: File exists"), "{}", error.msg());
    }

    #[test]
    fn codes_follow_the_meaning() {
        let code = |reason: Reason| cni::Error::from(Error::new("x", reason)).code();
        assert_eq!(code(Reason::Terminated), cni::Code::TRY_AGAIN);
        assert_eq!(code(Reason::Deadline(Duration::from_secs(2))), cni::Code::TRY_AGAIN);
        assert_eq!(code(Reason::LinkNotFound), cni::Code::KERNEL);
        let gone = Reason::NoNetns { text: "failed to Statfs \"/x\": no such file or directory".into(), source: None };
        let error = cni::Error::from(Error::new("failed to open netns \"/x\"", gone));
        assert_eq!(error.code(), cni::Code::INVALID_ENVIRONMENT);
        assert_eq!(
            error.msg(),
            "failed to open netns \"/x\": failed to Statfs \"/x\": no such file or directory (CNI_NETNS)"
        );
    }
}
