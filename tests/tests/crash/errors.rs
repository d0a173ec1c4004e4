//! Each system call fails once. ADD either succeeds or reports the error and undoes everything. DEL
//! continues, and the next DEL finds the rest. SIGTERM at a call counts like a failure of the call.

use cni_testkit::trace::{self, Act};
use cni_testkit::{require, rounds};
use nix::errno::Errno;
use nix::sys::signal::Signal;

use crate::sweep::{self, Sweep, Verb, Victim, Way};
use crate::world::Backend;
use conformance::measure::{patience, soak};

/// The errors of a disk, a kernel, a policy, a machine without memory, a signal and a full socket.
/// Only after the last one the plugins do not retry on a netlink socket, so they must continue
/// after it.
const ERRORS: [Errno; 6] = [Errno::ENOSPC, Errno::EIO, Errno::EPERM, Errno::ENOMEM, Errno::EINTR, Errno::ENOBUFS];

const fn victim(plugin: &'static str, program: &'static str, floor: u64) -> Victim {
    Victim { plugin, program, floor }
}

/// Runs a sweep with each of the errors, in the plugins, in host-local and between fork and exec.
#[track_caller]
fn failing(backend: Backend, verb: Verb, floors: [u64; 6]) {
    require!(trace::supported());
    require!(backend.probe());
    let victims = [
        victim("bridge", "bridge", floors[0]),
        victim("bridge", "bridge+fork", floors[1]),
        victim("bridge", "host-local", floors[2]),
        victim("tuning", "tuning", floors[3]),
        victim("portmap", "portmap", floors[4]),
        victim("bandwidth", "bandwidth", floors[5]),
    ];
    let some = usize::try_from(rounds(ERRORS.len() as u64)).unwrap();
    let mut acts: Vec<Act> = ERRORS.into_iter().take(some).map(Act::Fail).collect();
    if soak().is_some() {
        acts.push(Act::Signal(Signal::SIGTERM));
    }
    let within = patience() / acts.len() as u32;
    let complaints: Vec<String> = acts
        .into_iter()
        .flat_map(|act| Sweep { backend, verb, act, share: 2, floor: 8 }.over(&victims, within))
        .collect();
    sweep::none(&complaints);
}

#[test]
fn during_add_with_nftables() {
    failing(Backend::Nftables, Verb::Add, [90, 2, 48, 42, 72, 48]);
}

#[test]
fn during_add_with_iptables() {
    failing(Backend::IptablesNft, Verb::Add, [120, 2, 48, 42, 150, 48]);
}

#[test]
fn during_del_with_nftables() {
    failing(Backend::Nftables, Verb::Del, [60, 2, 39, 36, 39, 16]);
}

#[test]
fn during_del_with_iptables() {
    failing(Backend::IptablesNft, Verb::Del, [90, 2, 39, 36, 69, 16]);
}

/// Loses the kernel's answer, whether or not the kernel handled the request. A failed ADD must undo
/// the request.
#[track_caller]
fn losing_answers(backend: Backend, floor: u64) {
    require!(trace::supported());
    require!(backend.probe());
    let sweep = Sweep { backend, verb: Verb::Add, act: Act::Fail(Errno::ENOBUFS), share: 0, floor };
    sweep::none(&sweep.at_each(Some("recvfrom"), Way::Del, &["bridge", "tuning", "portmap", "bandwidth"]));
}

#[test]
fn when_an_answer_is_lost_with_nftables() {
    losing_answers(Backend::Nftables, 65);
}

#[test]
fn when_an_answer_is_lost_with_iptables() {
    losing_answers(Backend::IptablesNft, 100);
}
