//! A stack of undos, one for each change that an ADD has made.
//!
//! A plugin pushes an undo after the change. If a lost answer of the kernel could leave the outcome
//! of the change unknown, the plugin pushes the undo before the change. The skeleton gets the stack
//! in [`Added`](crate::skel::Added) and commits it after the whole result has been written.
//! Dropping an uncommitted stack, on an error or a panic, runs the undos, newest first.
//!
//! An undo removes only objects that this attachment alone uses: never a bridge, never a shared
//! chain.
//!
//! [`Notes`] receives notes for the operator, from failing undos and from all parts of a plugin.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use crate::steps::Quoted;

/// A function that undoes one change.
type Undo<'a> = Box<dyn FnOnce() -> Result<(), Box<dyn std::error::Error>> + 'a>;

/// A stack of undos, which run in reverse order when it is dropped, unless it is
/// [committed](Rollback::commit).
///
/// `'a` is the lifetime of values that the undos borrow, such as a netlink socket or a store.
pub struct Rollback<'a> {
    /// The undos, each with the text that completes "failed to …".
    undos: Vec<(String, Undo<'a>)>,
    notes: Notes,
}

impl<'a> Rollback<'a> {
    /// Returns an empty stack. It reports failing undos to `notes`.
    pub fn new(notes: Notes) -> Rollback<'a> {
        Rollback { undos: Vec::new(), notes }
    }

    /// Adds the undo of one change. `what` completes the sentence "failed to …", for a note if the
    /// undo fails.
    pub fn push<E>(&mut self, what: impl Into<String>, undo: impl FnOnce() -> Result<(), E> + 'a)
    where
        E: Into<Box<dyn std::error::Error>>,
    {
        self.undos.push((what.into(), Box::new(|| undo().map_err(Into::into))));
    }

    /// Moves all of `other` on top of this stack.
    pub fn append(&mut self, mut other: Rollback<'a>) {
        self.undos.append(&mut other.undos);
    }

    /// Whether no undo has been pushed.
    pub fn is_empty(&self) -> bool {
        self.undos.is_empty()
    }

    /// Drops the undos without running them, so that the changes stay.
    pub fn commit(mut self) {
        self.undos.clear();
    }
}

impl Drop for Rollback<'_> {
    fn drop(&mut self) {
        while let Some((what, undo)) = self.undos.pop() {
            log::debug!("rollback={}", Quoted(&what));
            // A panic in an undo must not skip the remaining undos. If the stack is dropped during
            // a panic, a second panic would abort the process.
            match catch_unwind(AssertUnwindSafe(undo)) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.notes.note(format_args!("rollback: failed to {what}: {error}")),
                Err(_) => self.notes.note(format_args!("rollback: failed to {what}: it panicked")),
            }
        }
    }
}

impl fmt::Debug for Rollback<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.undos.iter().map(|(what, _)| what)).finish()
    }
}

/// Receives notes for the operator, each one line. In a plugin they go to stderr, never to
/// stdout, which carries the result.
#[derive(Clone)]
pub struct Notes(Rc<dyn Fn(&str)>);

impl Notes {
    /// Returns notes that pass each line, without a newline, to `sink`.
    pub fn new(sink: impl Fn(&str) + 'static) -> Notes {
        Notes(Rc::new(sink))
    }

    /// Returns notes that ignore all lines.
    pub fn silent() -> Notes {
        Notes::new(|_| {})
    }

    /// Writes one line.
    pub fn note(&self, line: impl fmt::Display) {
        (self.0)(&line.to_string());
    }
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn recorder() -> (Rc<RefCell<Vec<String>>>, Notes) {
        let lines = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&lines);
        (lines, Notes::new(move |line| sink.borrow_mut().push(line.to_owned())))
    }

    #[test]
    fn dropping_undoes_in_reverse_and_continues_after_failures() {
        let (lines, notes) = recorder();
        let order = RefCell::new(Vec::new());
        {
            let mut rollback = Rollback::new(notes);
            rollback.push("undo one", || {
                order.borrow_mut().push(1);
                Ok::<_, std::io::Error>(())
            });
            rollback.push("undo two", || Err(std::io::Error::from_raw_os_error(1)));
            rollback.push("undo three", || -> Result<(), std::io::Error> { std::panic::panic_any(()) });
        }
        assert_eq!(*order.borrow(), [1]);
        assert_eq!(lines.borrow().len(), 2);
        assert!(lines.borrow()[1].starts_with("rollback: failed to undo two: Operation not permitted"));
    }

    #[test]
    fn committing_undoes_nothing() {
        let mut rollback = Rollback::new(Notes::silent());
        rollback.push("undo", || -> Result<(), std::io::Error> { panic!("ran") });
        rollback.commit();
    }
}
