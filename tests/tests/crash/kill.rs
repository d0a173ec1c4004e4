//! Plugins are killed at every system call. Then DEL, or GC after the namespace is gone, leaves
//! nothing.

use cni_testkit::require;
use cni_testkit::trace::{self, Act};
use nix::sys::signal::Signal;

use crate::sweep::{self, Sweep, Verb, Victim};
use crate::world::Backend;
use conformance::measure::patience;

const fn victim(plugin: &'static str, program: &'static str, floor: u64) -> Victim {
    Victim { plugin, program, floor }
}

/// Runs a sweep with SIGKILL over the programs of every backend, and `others`.
#[track_caller]
fn killed(backend: Backend, verb: Verb, floor: u64, victims: &[Victim]) {
    require!(trace::supported());
    require!(backend.probe());
    sweep::none(&Sweep { backend, verb, act: Act::Signal(Signal::SIGKILL), share: 6, floor }.over(victims, patience()));
}

#[test]
fn during_add_with_nftables() {
    killed(
        Backend::Nftables,
        Verb::Add,
        25,
        &[
            victim("bridge", "bridge", 150),
            victim("bridge", "bridge+fork", 5),
            victim("bridge", "host-local", 78),
            victim("tuning", "tuning", 72),
            victim("portmap", "portmap", 140),
            victim("bandwidth", "bandwidth", 85),
        ],
    );
}

#[test]
fn during_add_with_iptables() {
    killed(
        Backend::IptablesNft,
        Verb::Add,
        25,
        &[
            victim("bridge", "bridge", 200),
            victim("bridge", "bridge+fork", 5),
            victim("bridge", "host-local", 78),
            victim("tuning", "tuning", 72),
            victim("portmap", "portmap", 240),
            victim("bandwidth", "bandwidth", 85),
        ],
    );
}

#[test]
fn during_del_with_nftables() {
    killed(
        Backend::Nftables,
        Verb::Del,
        25,
        &[
            victim("bridge", "bridge", 115),
            victim("bridge", "bridge+fork", 5),
            victim("bridge", "host-local", 65),
            victim("tuning", "tuning", 65),
            victim("portmap", "portmap", 78),
            victim("bandwidth", "bandwidth", 38),
        ],
    );
}

#[test]
fn during_del_with_iptables() {
    killed(
        Backend::IptablesNft,
        Verb::Del,
        24,
        &[
            victim("bridge", "bridge", 170),
            victim("bridge", "bridge+fork", 5),
            victim("bridge", "host-local", 65),
            victim("tuning", "tuning", 65),
            victim("portmap", "portmap", 130),
            victim("bandwidth", "bandwidth", 38),
        ],
    );
}
