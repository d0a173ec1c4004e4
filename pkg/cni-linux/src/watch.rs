//! Waiting until the kernel says that something has changed, with a deadline.
//!
//! A [`Watch`] hears of changes to links, addresses and IPv6 routes; what they are it does not
//! read: after each it asks `check` again, which looks at the state itself. So nothing is missed
//! when events come too fast or were lost.
//!
//! Open the watch before the change begins; otherwise the event may be over before the wait.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Instant;

use cni::machine::Machine;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::error::{Cause, Error, Result};
use crate::machine::{ending, wait_ready};
use crate::netlink::socket::Events;
use crate::netns::Netns;

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR, RTMGRP_IPV6_ROUTE. An IPv6 address is
/// reported before its route exists, so the route must be watched.
const GROUPS: u32 = 0x1 | 0x10 | 0x100 | 0x400;

/// An ear for changes to links, addresses and IPv6 routes of one namespace.
#[derive(Debug)]
pub struct Watch {
    events: Events,
}

impl AsFd for Watch {
    /// Readable after a change, until [`forget`](Watch::forget).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

impl AsRawFd for Watch {
    fn as_raw_fd(&self) -> RawFd {
        self.events.as_fd().as_raw_fd()
    }
}

impl Watch {
    /// Listens to links that go in every namespace that has a number in the calling thread's, and
    /// to namespaces that go.
    pub fn open_everywhere() -> Result<Watch> {
        let events = Events::open_everywhere().map_err(|error| {
            Error::new("failed to subscribe to the kernel's messages about interfaces and namespaces", error)
        })?;
        Ok(Watch { events })
    }

    /// Takes every event out of the queue. Whether one of them was about a link or a namespace that
    /// goes, or was lost.
    pub fn forget(&self) -> bool {
        self.events.forget()
    }

    /// Listens to the calling thread's namespace, from now on.
    pub fn open() -> Result<Watch> {
        let events = Events::open(GROUPS).map_err(|error| {
            Error::new("failed to subscribe to the kernel's messages about interfaces and namespaces", error)
        })?;
        Ok(Watch { events })
    }

    /// Listens to another namespace, from now on.
    pub fn open_in(netns: &Netns) -> Result<Watch> {
        netns.run(Watch::open)?
    }

    /// Calls `check` now and after every change until it returns something, fails, or it is
    /// `deadline`.
    ///
    /// # Errors
    /// What `check` failed with; `failed to wait for WHAT: …` with [`Error::is_deadline`], or
    /// [`Error::is_terminated`] if SIGTERM comes (which the machine must have blocked).
    pub fn wait<T>(
        &self,
        what: &str,
        deadline: Instant,
        machine: &dyn Machine,
        mut check: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let failed = |cause| Error::new(format_args!("failed to wait for {what}"), cause);
        let begin = machine.now();
        let mut sigterm = None;
        loop {
            if let Some(found) = check()? {
                return Ok(found);
            }
            if machine.terminated() {
                return Err(failed(Cause::terminated()));
            }
            let left = deadline.saturating_duration_since(machine.now());
            if left.is_zero() {
                return Err(failed(Cause::deadline(deadline.saturating_duration_since(begin))));
            }
            let sigterm = match &sigterm {
                Some(sigterm) => sigterm,
                None => sigterm.insert(term_descriptor().map_err(|errno| failed(errno.into()))?),
            };
            let mut fds =
                [PollFd::new(self.events.as_fd(), PollFlags::POLLIN), PollFd::new(sigterm.as_fd(), PollFlags::POLLIN)];
            wait_ready(&mut fds, Some(left)).map_err(|error| failed(error.into()))?;
            // Many events, one look.
            self.events.forget();
        }
    }
}

/// Returns a descriptor that is readable as soon as SIGTERM, SIGINT or SIGHUP is pending. Do not
/// read it: the machine does that, and remembers the signal.
///
/// # Errors
/// The kernel's.
pub fn term_descriptor() -> Result<SignalFd, Errno> {
    SignalFd::with_flags(&ending(), SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, machine, new_netns};
    use crate::{BridgeSpec, Netlink};
    use nix::sys::pthread::{pthread_kill, pthread_self};
    use nix::sys::signal::Signal;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    fn in_seconds(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    #[test]
    fn what_is_so_already_needs_no_event() {
        in_new_netns(|| {
            let found = Watch::open().unwrap().wait("it", Instant::now(), &machine(), || Ok(Some(7))).unwrap();
            assert_eq!(found, 7);
        });
    }

    #[test]
    fn an_event_in_another_namespace_ends_the_wait() {
        in_new_netns(|| {
            let netns = new_netns();
            let container = Netlink::open().unwrap().open_in(&netns).unwrap();
            let watch = Watch::open_in(&netns).unwrap();
            let (looked, go) = channel();
            thread::scope(|scope| {
                let maker = container.clone();
                scope.spawn(move || {
                    go.recv().unwrap();
                    maker.create_bridge(&BridgeSpec::named("br0")).unwrap();
                });
                let begin = Instant::now();
                let link = watch
                    .wait("br0", in_seconds(30), &machine(), || {
                        let found = container.find_link("br0");
                        let _ = looked.send(());
                        found
                    })
                    .unwrap();
                assert_eq!(link.name, "br0");
                assert!(begin.elapsed() < Duration::from_secs(15));
            });
        });
    }

    #[test]
    fn a_deadline_error_names_what_was_awaited() {
        in_new_netns(|| {
            let deadline = Instant::now() + Duration::from_millis(30);
            let watch = Watch::open().unwrap();
            let error = watch.wait("Godot", deadline, &machine(), || Ok(None::<()>)).unwrap_err();
            assert!(error.is_deadline() && Instant::now() >= deadline);
            assert!(error.to_string().starts_with("failed to wait for Godot: it did not happen within 0.0"), "{error}");
            assert_eq!(cni::Error::from(error).code(), cni::Code::TRY_AGAIN);
        });
    }

    #[test]
    fn sigterm_ends_the_wait() {
        in_new_netns(|| {
            let machine = machine();
            let watch = Watch::open().unwrap();
            let waiter = pthread_self();
            let (looked, go) = channel();
            let begin = Instant::now();
            thread::scope(|scope| {
                scope.spawn(move || {
                    go.recv().unwrap();
                    pthread_kill(waiter, Signal::SIGTERM).unwrap();
                });
                let error = watch
                    .wait("Godot", in_seconds(30), &machine, || {
                        let _ = looked.send(());
                        Ok(None::<()>)
                    })
                    .unwrap_err();
                assert!(error.is_terminated() && machine.terminated(), "{error}");
            });
            assert!(begin.elapsed() < Duration::from_secs(15));
        });
    }

    #[test]
    fn a_failing_check_ends_the_wait_with_its_own_error() {
        in_new_netns(|| {
            let fail = || Err::<Option<()>, _>(Error::new("failed to look", crate::error::Reason::LinkNotFound));
            let error = Watch::open().unwrap().wait("it", in_seconds(30), &machine(), fail).unwrap_err();
            assert_eq!(error.to_string(), "failed to look: Link not found");
        });
    }
}
