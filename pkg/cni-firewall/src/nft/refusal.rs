//! The kernel's refusals: of a change, and of every request because it has no nf_tables.

use nix::errno::Errno;

use super::batch::Change;
use cni_linux::error::{Cause, Error};

/// The first error that showed that the kernel has no nf_tables.
#[derive(Clone, Debug)]
pub(super) struct Absence {
    what: String,
    errno: i32,
    explanation: Option<String>,
}

impl Absence {
    /// Returns the absence that a failure to open the socket shows; the error itself if it has
    /// another cause.
    pub(super) fn from_socket(error: std::io::Error) -> Result<Absence, Error> {
        const WHAT: &str = "failed to open a netfilter socket";
        let error = Error::new(WHAT, error);
        match error.errno() {
            Some(errno) if error.is_unsupported() => Ok(Absence { what: WHAT.to_owned(), errno, explanation: None }),
            _ => Err(error),
        }
    }

    /// Returns the absence that the errno EINVAL shows, the answer to a request. `what` begins the
    /// error's text.
    pub(super) fn from_refused_request(what: &str) -> Absence {
        let explanation = format!("the kernel has no nf_tables ({})", Errno::EINVAL);
        Absence { what: what.to_owned(), errno: libc::EOPNOTSUPP, explanation: Some(explanation) }
    }

    /// Returns the error of a transaction, which [`Error::is_unsupported`] recognises.
    pub(super) fn error(&self) -> Error {
        Error::new(&self.what, Cause::kernel(self.errno, self.explanation.clone()))
    }
}

/// The kernel's refusal of a change, or of the batch as a whole.
pub(super) struct Refusal {
    /// The position of the refused message in the batch: 0 is the begin message, n the nth change,
    /// counted from 1, and the position after the last change the end message.
    pub(super) position: usize,
    pub(super) errno: i32,
    /// The kernel's explanation.
    pub(super) text: Option<String>,
}

impl Refusal {
    /// Returns the error for the refused `change`. For the creation of a base chain, the errno is
    /// replaced, so that callers need not know the kernel's version:
    /// - ENOENT becomes EOPNOTSUPP: the kernel has no such type of chain for the family. The table
    ///   is not missing, because the same batch creates it.
    /// - EOPNOTSUPP or EEXIST, which depends on the kernel and the difference, becomes an error
    ///   without an errno: the chain exists with another hook, type or priority, or without a hook.
    pub(super) fn into_error(self, change: &Change) -> Error {
        let cause = match self.errno {
            libc::ENOENT if change.is_base_chain => {
                let text = format!("the kernel has no such type of chain ({})", Errno::ENOENT);
                Cause::kernel(libc::EOPNOTSUPP, Some(text))
            }
            // Older kernels always answer EEXIST. Newer ones answer EEXIST for another type or no
            // hook, and EOPNOTSUPP for another hook or priority.
            libc::EOPNOTSUPP | libc::EEXIST if change.is_base_chain => {
                Cause::text("the chain exists with another hook, type or priority")
            }
            errno => Cause::kernel(errno, self.text),
        };
        Error::new(&change.what, cause)
    }
}
