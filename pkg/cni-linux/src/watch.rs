//! Waits, with a deadline, until the network configuration is as the caller needs it.
//!
//! A [`Watch`] receives the kernel's events about changes. [`Watch::wait`] does not read their
//! content: after each event it calls a `check`, which looks at the state itself. So a lost event
//! does no harm as long as another one follows.
//!
//! Open the watch before the awaited change can begin: otherwise its event may come before the
//! watch is open.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Instant;

use cni::machine::Machine;
use netlink_sys::SocketAddr;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::error::{Cause, Error, Result};
use crate::machine::{termination_signals, wait_ready};
use crate::netlink::socket::{Protocol, RECEIVE_BUFFER};
use crate::netlink::wire::{self, Message};
use crate::netns::Netns;

/// The multicast group of changes of links.
const RTMGRP_LINK: u32 = 0x1;

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR, RTMGRP_IPV6_ROUTE. An IPv6 address is
/// reported before its route exists, so the route must be watched.
const GROUPS: u32 = RTMGRP_LINK | 0x10 | 0x100 | 0x400;

/// The bit of RTNLGRP_ND_USEROPT: the options of router advertisements that the kernel itself does
/// not use.
const ND_USEROPT: u32 = 1 << 19;

/// The length of `struct nduseroptmsg` in bytes, which the options follow.
const ND_USEROPT_HEADER: usize = 16;

/// A subscription to changes of links, addresses and IPv6 routes of one network namespace, or of
/// links of many ([`open_everywhere`](Watch::open_everywhere)).
#[derive(Debug)]
pub struct Watch {
    events: netlink_sys::Socket,
}

impl AsFd for Watch {
    /// Returns a descriptor that is readable after a change, until [`drain`](Watch::drain).
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
    /// Subscribes to the changes in the calling thread's namespace, from now on.
    pub fn open() -> Result<Watch> {
        Watch::open_groups(GROUPS)
    }

    /// Subscribes to the changes in another namespace, from now on, and to the options of router
    /// advertisements for [`wait_with_options`](Watch::wait_with_options).
    pub fn open_with_options_in(netns: &Netns) -> Result<Watch> {
        netns.run(|| Watch::open_groups(GROUPS | ND_USEROPT))?
    }

    fn open_groups(groups: u32) -> Result<Watch> {
        let open = || -> io::Result<Watch> {
            let mut events = Protocol::Route.socket()?;
            events.bind(&SocketAddr::new(0, groups))?;
            Ok(Watch { events })
        };
        open().map_err(|error| {
            Error::new("failed to subscribe to the kernel's messages about interfaces, addresses and routes", error)
        })
    }

    /// Subscribes to the changes in another namespace, from now on.
    pub fn open_in(netns: &Netns) -> Result<Watch> {
        netns.run(Watch::open)?
    }

    /// Subscribes to changes of links in every namespace that has an ID in the calling thread's
    /// namespace, and to changes of these IDs.
    pub fn open_everywhere() -> Result<Watch> {
        const RTNLGRP_NSID: u32 = 28;
        let open = || -> io::Result<Watch> {
            let mut events = Protocol::Route.socket()?;
            events.set_listen_all_namespaces(true)?;
            events.bind(&SocketAddr::new(0, RTMGRP_LINK))?;
            events.add_membership(RTNLGRP_NSID)?;
            Ok(Watch { events })
        };
        open().map_err(|error| {
            Error::new("failed to subscribe to the kernel's messages about interfaces and namespaces", error)
        })
    }

    /// Calls `handle` for each message of the queued events. Events that the kernel dropped, and
    /// other errors of the socket, are ignored.
    fn read(&self, handle: &mut dyn FnMut(&Message<'_>)) {
        let mut buffer = Vec::with_capacity(RECEIVE_BUFFER);
        loop {
            buffer.clear();
            match self.events.recv(&mut buffer, libc::MSG_DONTWAIT) {
                Ok(_) => wire::messages(&buffer).for_each(|message| handle(&message)),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                // The queue is empty (EAGAIN), or fails.
                Err(_) => return,
            }
        }
    }

    /// Discards all queued events. Returns whether a link or a namespace's ID may have been
    /// removed: an event reported a removal, or events were lost.
    pub fn drain(&self) -> bool {
        const REMOVALS: [u16; 2] = [libc::RTM_DELLINK, libc::RTM_DELNSID];
        let mut has_removal = false;
        // The length (32 bits), type (16) and flags (16) of a message; `recv` cuts off the rest.
        let mut head = [0; 8];
        loop {
            match self.events.recv(&mut &mut head[..], libc::MSG_DONTWAIT) {
                Ok(_) => has_removal |= REMOVALS.contains(&u16::from_ne_bytes([head[4], head[5]])),
                // The kernel dropped events, perhaps the one of a removal.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => has_removal = true,
                // The queue is empty (EAGAIN). Other errors are ignored: events only trigger a
                // look at the kernel's state.
                Err(_) => return has_removal,
            }
        }
    }

    /// Calls `check` at once and after every change until `check` returns `Some`, and returns the
    /// value in it. `what` names the awaited event in errors.
    ///
    /// # Errors
    /// - An error of `check` ends the wait and is returned unchanged.
    /// - `failed to wait for WHAT: …`: the deadline passed ([`Error::is_deadline`]), SIGTERM
    ///   arrived ([`Error::is_terminated`]; the machine must have blocked the signal), or the
    ///   kernel failed.
    pub fn wait<T>(
        &self,
        what: &str,
        deadline: Instant,
        machine: &dyn Machine,
        check: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        self.wait_reading(what, deadline, machine, check, || _ = self.drain())
    }

    /// Waits as [`wait`](Watch::wait) does, and calls `take` for the options of each router
    /// advertisement that the kernel received before `check` returned `Some`. `take` gets the index
    /// of the interface and the encoded options (RFC 4861, 4.6), as the router sent them.
    ///
    /// # Errors
    /// Those of [`wait`](Watch::wait).
    pub fn wait_with_options<T>(
        &self,
        what: &str,
        deadline: Instant,
        machine: &dyn Machine,
        check: impl FnMut() -> Result<Option<T>>,
        mut take: impl FnMut(u32, &[u8]),
    ) -> Result<T> {
        let mut read = || {
            self.read(&mut |message| {
                if message.kind == libc::RTM_NEWNDUSEROPT
                    && let Some((index, options)) = user_options(message.payload)
                {
                    take(index, options);
                }
            });
        };
        let waited = self.wait_reading(what, deadline, machine, check, &mut read);
        // `check` looks at the state after some of the events, and finds what later events report.
        read();
        waited
    }

    /// Waits as [`wait`](Watch::wait) does. `read` takes all events out of the queue.
    fn wait_reading<T>(
        &self,
        what: &str,
        deadline: Instant,
        machine: &dyn Machine,
        mut check: impl FnMut() -> Result<Option<T>>,
        mut read: impl FnMut(),
    ) -> Result<T> {
        let failed = |cause| Error::new(format_args!("failed to wait for {what}"), cause);
        let begin = machine.now();
        let mut opened_sigterm = None;
        loop {
            if let Some(found) = check()? {
                return Ok(found);
            }
            if machine.terminated() {
                return Err(failed(Cause::Terminated));
            }
            let time_left = deadline.saturating_duration_since(machine.now());
            if time_left.is_zero() {
                return Err(failed(Cause::Deadline(deadline.saturating_duration_since(begin))));
            }
            // Opened only if the first `check` has returned `None`.
            let sigterm = match &opened_sigterm {
                Some(sigterm) => sigterm,
                None => opened_sigterm.insert(term_descriptor().map_err(|errno| failed(errno.into()))?),
            };
            let mut fds =
                [PollFd::new(self.events.as_fd(), PollFlags::POLLIN), PollFd::new(sigterm.as_fd(), PollFlags::POLLIN)];
            wait_ready(&mut fds, Some(time_left)).map_err(|error| failed(error.into()))?;
            // Several queued events need only one check.
            read();
        }
    }
}

/// Returns the index of the interface and the options in a message RTM_NEWNDUSEROPT; `None` if it
/// is malformed or not about a router advertisement of IPv6.
fn user_options(payload: &[u8]) -> Option<(u32, &[u8])> {
    const ROUTER_ADVERTISEMENT: u8 = 134;
    // `struct nduseroptmsg`: the family (1 byte), padding (1), the length of the options (2), the
    // index (4), the type of the ICMPv6 message (1), and fields that are not used here.
    let header = payload.get(..ND_USEROPT_HEADER)?;
    if i32::from(header[0]) != libc::AF_INET6 || header[8] != ROUTER_ADVERTISEMENT {
        return None;
    }
    let length = usize::from(u16::from_ne_bytes([header[2], header[3]]));
    let index = u32::from_ne_bytes([header[4], header[5], header[6], header[7]]);
    Some((index, payload.get(ND_USEROPT_HEADER..ND_USEROPT_HEADER + length)?))
}

/// Returns a descriptor that is readable while SIGTERM, SIGINT or SIGHUP is pending. Poll it, but
/// do not read from it: a read would take the signal away from [`Machine::terminated`].
///
/// # Errors
/// The kernel cannot create a descriptor.
pub fn term_descriptor() -> Result<SignalFd, Errno> {
    SignalFd::with_flags(&termination_signals(), SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
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
    fn a_condition_that_already_holds_needs_no_event() {
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
            let fail = || Err::<Option<()>, _>(Error::new("failed to look", Cause::LinkNotFound));
            let error = Watch::open().unwrap().wait("it", in_seconds(30), &machine(), fail).unwrap_err();
            assert_eq!(error.to_string(), "failed to look: Link not found");
        });
    }
}
