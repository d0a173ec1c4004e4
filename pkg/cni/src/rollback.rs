//! What an ADD has done so far, as a stack of undos.
//!
//! The undo of an effect is pushed before the effect if the outcome may stay unknown (a lost
//! answer), else after it. The stack is handed to the skeleton inside
//! [`Added`](crate::skel::Added); the skeleton commits it only after the result has been written in
//! full. Dropping it, on an error, on `?` or on a panic, runs the undos, newest first.
//!
//! An undo removes only what is this attachment's alone: never a bridge, never a shared chain.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use crate::steps::Quoted;

type Undo<'a> = Box<dyn FnOnce() -> Result<(), Box<dyn std::error::Error>> + 'a>;

/// A stack of undos, run in reverse when dropped, forgotten by [`commit`](Rollback::commit).
///
/// `'a` is what the undos may borrow (a netlink connection, a store).
pub struct Rollback<'a> {
    undos: Vec<(String, Undo<'a>)>,
    notes: Notes,
}

impl<'a> Rollback<'a> {
    /// An empty stack. Failed undos are reported to `notes`.
    pub fn new(notes: Notes) -> Rollback<'a> {
        Rollback { undos: Vec::new(), notes }
    }

    /// Records how to undo what was just done. `what` completes the sentence "failed to …".
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

    /// Forgets every undo: what was done stays.
    pub fn commit(mut self) {
        self.undos.clear();
    }
}

impl Drop for Rollback<'_> {
    fn drop(&mut self) {
        while let Some((what, undo)) = self.undos.pop() {
            log::debug!("rollback={}", Quoted(&what));
            // A panic in an undo must neither skip the remaining ones nor, while unwinding, abort
            // the process.
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

/// Where remarks for the operator go: one line each on stderr, never on stdout, which is the wire.
#[derive(Clone)]
pub struct Notes(Rc<dyn Fn(&str)>);

impl Notes {
    /// Hands every line, without its newline, to `sink`.
    pub fn new(sink: impl Fn(&str) + 'static) -> Notes {
        Notes(Rc::new(sink))
    }

    /// Drops every line.
    pub fn silent() -> Notes {
        Notes::new(|_| {})
    }

    /// Says one thing.
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
    fn dropping_undoes_in_reverse_and_goes_on_after_failures() {
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
