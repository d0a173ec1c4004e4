//! Killed at every system call: then DEL, or GC after the namespace has gone, leaves nothing.

use cni_testkit::require;
use cni_testkit::trace::{self, Act};
use nix::sys::signal::Signal;

use crate::sweep::{self, Sweep, Verb, Victim};
use crate::world::Backend;

const fn victim(plugin: &'static str, program: &'static str, floor: u64) -> Victim {
    Victim { plugin, program, floor }
}

/// A sweep with SIGKILL over what every backend has, and `others`.
#[track_caller]
fn killed(backend: Backend, verb: Verb, share: u64, victims: &[Victim]) {
    require!(trace::supported());
    require!(backend.probe());
    sweep::none(&Sweep { backend, verb, act: Act::Signal(Signal::SIGKILL), share }.over(victims));
}

#[test]
fn during_add_with_nftables() {
    killed(
        Backend::Nftables,
        Verb::Add,
        6,
        &[
            victim("bridge", "bridge", 380),
            victim("bridge", "bridge+fork", 9),
            victim("bridge", "host-local", 120),
            victim("tuning", "tuning", 150),
            victim("portmap", "portmap", 240),
        ],
    );
}

#[test]
fn during_add_with_iptables() {
    killed(
        Backend::IptablesNft,
        Verb::Add,
        6,
        &[
            victim("bridge", "bridge", 480),
            victim("bridge", "bridge+fork", 27),
            victim("bridge", "host-local", 120),
            victim("bridge", "xtables-nft-multi", 200),
            victim("tuning", "tuning", 150),
            victim("portmap", "portmap", 600),
            victim("portmap", "portmap+fork", 18),
            victim("portmap", "xtables-nft-multi", 350),
        ],
    );
}

#[test]
fn during_del_with_nftables() {
    killed(
        Backend::Nftables,
        Verb::Del,
        6,
        &[
            victim("bridge", "bridge", 230),
            victim("bridge", "bridge+fork", 9),
            victim("bridge", "host-local", 100),
            victim("tuning", "tuning", 150),
            victim("portmap", "portmap", 120),
        ],
    );
}

#[test]
fn during_del_with_iptables() {
    killed(
        Backend::IptablesNft,
        Verb::Del,
        6,
        &[
            victim("bridge", "bridge", 300),
            victim("bridge", "bridge+fork", 9),
            victim("bridge", "host-local", 100),
            victim("tuning", "tuning", 150),
            victim("portmap", "portmap", 200),
        ],
    );
}
