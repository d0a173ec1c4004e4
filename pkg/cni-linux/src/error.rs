//! The error type of this crate: the failed action with its object, the cause, and the errno.
//!
//! These errors do not mention the operator's configuration; the plugin adds that with
//! [`Error::context`]. Do not match on the text, because the kernel's explanation in it (the
//! "extended acknowledgement") differs between releases; use [`Error::errno`] or the `is_…`
//! methods.

use std::fmt;
use std::io;
use std::time::Duration;

use nix::errno::Errno;

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure. Displays as `failed to add 10.1.2.3/24 to eth0: File exists (os error 17): <the
/// kernel's explanation>`.
#[derive(Debug, thiserror::Error)]
#[error("{failure}: {cause}{}", .others.iter().map(|other| format!("; {other}")).collect::<String>())]
pub struct Error {
    /// The failed action with its object: `failed to add 10.1.2.3/24 to eth0`.
    failure: String,
    /// Later errors of the same work, appended to the message.
    others: Vec<Error>,
    #[source]
    cause: Cause,
}

/// Which of the two names of a new veth pair is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakenName {
    /// The host end's name: the caller can try another one.
    HostName,
    /// The container end's name, which the configuration fixes.
    ContainerName,
}

/// The cause of an [`Error`], without the failed action.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// The kernel refused.
    #[error("{source}{}", .ack.as_ref().map(|ack| format!(": {ack}")).unwrap_or_default())]
    Kernel {
        /// The errno.
        source: io::Error,
        /// The kernel's own explanation.
        ack: Option<Box<str>>,
        /// Which name of a veth pair is in use, if that is why the kernel refused.
        taken: Option<TakenName>,
    },
    /// No interface has this name or index. The text is Go's, which callers compare with.
    #[error("Link not found")]
    LinkNotFound,
    /// The path is not a network namespace, or does not exist. The text is Go's.
    #[error("{text}")]
    NoNetns {
        /// The whole message.
        text: String,
        /// The errno if the path does not exist.
        source: Option<io::Error>,
    },
    /// An event did not come in time.
    #[error("it did not happen within {} s", .0.as_secs_f32())]
    Deadline(Duration),
    /// SIGTERM, SIGINT or SIGHUP came first.
    #[error("interrupted by a signal")]
    Terminated,
    /// Another attachment, which the text names, still uses the object.
    #[error("{0}")]
    Held(String),
    /// A cause without an errno.
    #[error("{0}")]
    Text(String),
}

impl From<io::Error> for Cause {
    fn from(source: io::Error) -> Cause {
        Cause::Kernel { source, ack: None, taken: None }
    }
}

impl From<Errno> for Cause {
    fn from(errno: Errno) -> Cause {
        io::Error::from(errno).into()
    }
}

impl Cause {
    /// Returns a cause without an errno.
    pub fn text(text: impl Into<String>) -> Cause {
        Cause::Text(text.into())
    }

    /// Returns the cause for an errno from the kernel and the kernel's explanation, if there is
    /// one.
    pub fn kernel(errno: i32, explanation: Option<String>) -> Cause {
        let source = io::Error::from_raw_os_error(errno);
        Cause::Kernel { source, ack: explanation.map(Into::into), taken: None }
    }

    /// Whether an awaited event did not come in time.
    pub fn is_deadline(&self) -> bool {
        matches!(self, Cause::Deadline(_))
    }

    /// Whether SIGTERM, SIGINT or SIGHUP ended the wait.
    pub fn is_terminated(&self) -> bool {
        matches!(self, Cause::Terminated)
    }

    /// Stores in the kernel's error for a new veth pair which of the two names is in use. Returns
    /// any other cause unchanged.
    pub(crate) fn with_taken_name(mut self, name: TakenName) -> Cause {
        if let Cause::Kernel { taken, .. } = &mut self {
            *taken = Some(name);
        }
        self
    }

    /// Returns the error of the kernel, if the cause has one.
    fn io(&self) -> Option<&io::Error> {
        match self {
            Cause::Kernel { source, .. } => Some(source),
            Cause::NoNetns { source, .. } => source.as_ref(),
            Cause::LinkNotFound | Cause::Deadline(_) | Cause::Terminated | Cause::Held(_) | Cause::Text(_) => None,
        }
    }

    /// Returns the errno, if the cause has one.
    pub(crate) fn errno(&self) -> Option<i32> {
        self.io().and_then(io::Error::raw_os_error)
    }
}

impl Error {
    /// Returns an error. `failure` names the failed action and its object: `failed to delete eth0`.
    pub fn new(failure: impl fmt::Display, cause: impl Into<Cause>) -> Error {
        Error { failure: failure.to_string(), cause: cause.into(), others: Vec::new() }
    }

    /// Puts `context: ` before the message.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Error {
        self.failure = format!("{context}: {}", self.failure);
        self
    }

    /// Combines the errors of work that continued after its first error; `Ok` if there are none.
    ///
    /// # Errors
    /// The first error, with the messages of the others appended.
    pub fn join(errors: impl IntoIterator<Item = Error>) -> Result<()> {
        let mut errors = errors.into_iter();
        let Some(mut first) = errors.next() else { return Ok(()) };
        first.others.extend(errors);
        Err(first)
    }

    /// Returns the errno, if the kernel gave one.
    pub fn errno(&self) -> Option<i32> {
        self.cause.errno()
    }

    /// Whether the errno is one of these.
    fn is_any_of(&self, errnos: &[Errno]) -> bool {
        self.errno().is_some_and(|actual| errnos.iter().any(|errno| *errno as i32 == actual))
    }

    /// Whether the object of the action does not exist: the interface, address, route, rule or
    /// file.
    pub fn is_not_found(&self) -> bool {
        matches!(self.cause, Cause::LinkNotFound)
            || self.is_any_of(&[Errno::ENODEV, Errno::ENOENT, Errno::ESRCH, Errno::EADDRNOTAVAIL])
    }

    /// Whether the object to create, or one with its name, exists already.
    pub fn is_exists(&self) -> bool {
        self.is_any_of(&[Errno::EEXIST])
    }

    /// Whether the kernel does not support the feature.
    pub fn is_unsupported(&self) -> bool {
        self.is_any_of(&[Errno::EOPNOTSUPP, Errno::EPROTONOSUPPORT, Errno::EAFNOSUPPORT])
    }

    /// Whether a path is not a network namespace, or does not exist. DEL then assumes that the
    /// namespace has been deleted.
    pub fn is_no_netns(&self) -> bool {
        matches!(self.cause, Cause::NoNetns { .. })
    }

    /// Whether an awaited event did not come in time.
    pub fn is_deadline(&self) -> bool {
        matches!(self.cause, Cause::Deadline(_))
    }

    /// Whether SIGTERM, SIGINT or SIGHUP ended the wait.
    pub fn is_terminated(&self) -> bool {
        matches!(self.cause, Cause::Terminated)
    }

    /// Whether another attachment still uses the object.
    pub fn is_held(&self) -> bool {
        matches!(self.cause, Cause::Held(_))
    }

    /// Returns which name of a veth pair is in use; `None` if that is not the cause.
    pub fn taken(&self) -> Option<TakenName> {
        match self.cause {
            Cause::Kernel { taken, .. } => taken,
            _ => None,
        }
    }
}

impl From<Error> for cni::Error {
    /// Converts the error. The code is 4 if CNI_NETNS is not a namespace, 11 after a timeout or a
    /// signal, 102 if another attachment uses the object, else 100. A caller that knows a better
    /// code (for an unsupported VLAN setting, for example) sets it with [`cni::Error::with_code`].
    fn from(error: Error) -> cni::Error {
        let Error { failure, cause, others } = error;
        let others = others.into_iter().map(cni::Error::from);
        if let Cause::NoNetns { .. } = &cause {
            // The message begins with Go's text, which callers compare with.
            let text = format!("{failure}: {cause} (CNI_NETNS)");
            return cni::Error::new(cni::Code::INVALID_ENVIRONMENT, text).and(others);
        }
        let code = match &cause {
            Cause::Deadline(_) | Cause::Terminated => cni::Code::TRY_AGAIN,
            Cause::Held(_) => cni::Code::CONFLICT,
            _ => cni::Code::KERNEL,
        };
        cni::Error::caused(code, failure, cause).and(others)
    }
}

impl From<Error> for io::Error {
    /// Converts the error with its whole text. The kind follows from the errno; without an errno,
    /// the kind is `InvalidInput` for a path that is not a network namespace, else `Other`.
    fn from(error: Error) -> io::Error {
        let kind = match error.cause.io() {
            Some(source) => source.kind(),
            None if error.is_no_netns() => io::ErrorKind::InvalidInput,
            None => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exists() -> Error {
        let cause = Cause::Kernel { source: Errno::EEXIST.into(), ack: Some("because".into()), taken: None };
        Error::new("failed to add 10.1.2.3/24 to eth0", cause)
    }

    #[test]
    fn an_error_names_the_operation_the_object_and_the_cause() {
        let error = exists();
        assert_eq!(error.to_string(), "failed to add 10.1.2.3/24 to eth0: File exists (os error 17): because");
        assert!(error.is_exists() && !error.is_not_found() && !error.is_unsupported());
        assert_eq!(error.errno(), Some(17));
    }

    #[test]
    fn the_errno_survives_the_conversion() {
        let error: cni::Error = exists().context("outer").into();
        assert_eq!((error.code(), error.errno()), (cni::Code::KERNEL, Some(17)));
        assert!(error.msg().starts_with("outer: failed to add 10.1.2.3/24 to eth0: File exists"), "{}", error.msg());
    }

    #[test]
    fn error_codes_follow_the_meaning_of_the_errno() {
        let code = |cause: Cause| cni::Error::from(Error::new("x", cause)).code();
        assert_eq!(code(Cause::Terminated), cni::Code::TRY_AGAIN);
        assert_eq!(code(Cause::Deadline(Duration::from_secs(2))), cni::Code::TRY_AGAIN);
        assert_eq!(code(Cause::LinkNotFound), cni::Code::KERNEL);
        let gone = Cause::NoNetns { text: "failed to Statfs \"/x\": no such file or directory".into(), source: None };
        let error = cni::Error::from(Error::new("failed to open netns \"/x\"", gone));
        assert_eq!(error.code(), cni::Code::INVALID_ENVIRONMENT);
        assert_eq!(
            error.msg(),
            "failed to open netns \"/x\": failed to Statfs \"/x\": no such file or directory (CNI_NETNS)"
        );
    }
}
