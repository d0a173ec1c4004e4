//! The ledger's rules for one block, in small types: an answer is computed once for each input.

use std::collections::HashMap;
use std::net::IpAddr;

use super::{Defect, defect};
use crate::ledger::{Action, Holder, Host, Ledger, Seen, State, reclaim};
use crate::pool::Block;
use crate::store::{Change, Claim, Outcome, Reclaim, Version};

/// The state of the block in a node's ledger. Versions are numbers here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Local {
    Absent,
    Claiming,
    Held(u8),
    Releasing(u8),
    Lost,
}

/// What a process has seen of the claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Sight {
    Unread,
    Changed,
    Absent,
    Written(u8),
    Own(u8),
    Other,
}

pub(super) fn block() -> Block {
    Block::of("p", 1, IpAddr::from([10, 61, 0, 9]))
}

fn version(number: u8) -> Version {
    Version(number.to_string())
}

pub(super) fn number(version: &Version) -> u8 {
    version.0.parse().unwrap()
}

fn holder() -> Holder {
    Holder { node: "other".to_owned(), network: "net".to_owned() }
}

pub(super) fn claim(absent_since: Option<String>) -> Claim {
    let Block { pool, first, last } = block();
    let text = String::new;
    Claim { pool, first, last, node: "node".to_owned(), network: text(), machine: text(), nonce: text(), absent_since }
}

/// Returns the ledger with this state of the block.
pub(super) fn ledger(local: Local) -> Ledger {
    let mut ledger = Ledger::default();
    if local == Local::Absent {
        return ledger;
    }
    ledger.begin_claim(&block());
    match local {
        Local::Held(held) | Local::Releasing(held) => {
            drop(ledger.step(&block(), Seen::Outcome(Outcome::Written(version(held))), false))
        }
        Local::Lost => drop(ledger.step(&block(), Seen::Other(holder()), true)),
        Local::Absent | Local::Claiming => {}
    }
    if let Local::Releasing(_) = local {
        ledger.begin_release(&block());
    }
    ledger
}

pub(super) fn local(ledger: &Ledger) -> Local {
    match ledger.state(&block()) {
        None => Local::Absent,
        Some(State::Claiming) => Local::Claiming,
        Some(State::Held(version)) => Local::Held(number(version)),
        Some(State::Releasing(version)) => Local::Releasing(number(version)),
        Some(State::Lost(_)) => Local::Lost,
    }
}

/// The ledger's rules, each asked once for each input.
#[derive(Default)]
pub(super) struct Rules {
    steps: HashMap<(Local, Sight, bool), (Local, Action)>,
    usable: HashMap<(bool, bool), bool>,
    surplus: HashMap<(Local, bool), bool>,
}

impl Rules {
    pub(super) fn step(&mut self, before: Local, sight: Sight, is_reserved: bool) -> (Local, Action) {
        match (defect(), before, sight) {
            (Some(Defect::UsesReleasedBlock), Local::Releasing(held), Sight::Own(seen)) if held == seen => {
                return (Local::Held(held), Action::Done);
            }
            (Some(Defect::AdoptsWithoutSwap), _, Sight::Own(seen)) => return (Local::Held(seen), Action::Done),
            _ => {}
        }
        let ask = || {
            let seen = match sight {
                Sight::Unread => Seen::Unread,
                Sight::Changed => Seen::Outcome(Outcome::Conflict),
                Sight::Absent => Seen::Outcome(Outcome::Absent),
                Sight::Written(number) => Seen::Outcome(Outcome::Written(version(number))),
                Sight::Own(number) => Seen::Own(version(number)),
                Sight::Other => Seen::Other(holder()),
            };
            let mut ledger = ledger(before);
            let action = ledger.step(&block(), seen, is_reserved);
            (local(&ledger), action)
        };
        self.steps.entry((before, sight, is_reserved)).or_insert_with(ask).clone()
    }

    /// Whether a ledger of this or an earlier boot, with a fresh or old verification, may be used.
    pub(super) fn is_usable(&mut self, is_of_boot: bool, is_fresh: bool) -> bool {
        let is_of_boot = is_of_boot || defect() == Some(Defect::UsesLedgerOfEarlierBoot);
        let is_fresh = is_fresh || defect() == Some(Defect::UsesOldLedger);
        let ask = || {
            let host = |boot: &str, uptime| Host { machine: String::new(), boot: boot.to_owned(), uptime };
            let mut ledger = Ledger::default();
            ledger.set_verified(&host("before", 0));
            ledger.is_usable(&host(if is_of_boot { "before" } else { "after" }, if is_fresh { 0 } else { 3600 }))
        };
        *self.usable.entry((is_of_boot, is_fresh)).or_insert_with(ask)
    }

    /// Whether the block is given back in this state, with or without a reservation.
    pub(super) fn is_surplus(&mut self, before: Local, is_reserved: bool) -> bool {
        let reserved: &[IpAddr] = if is_reserved { &[block().first] } else { &[] };
        *self
            .surplus
            .entry((before, is_reserved))
            .or_insert_with(|| !ledger(before).surplus(reserved, None, &|_| true).is_empty())
    }

    /// What another node does to a claim that was marked at this time, two hours after 1970 began,
    /// while the claim's node is absent.
    pub(super) fn reclaim(since: Option<&str>) -> Option<Change> {
        let since =
            since.map(|since| if defect() == Some(Defect::ReclaimsAtOnce) { "1970-01-01T00:00:00Z" } else { since });
        reclaim(&mut claim(since.map(str::to_owned)), version(0), Reclaim::AfterOneHour, 2 * 3600)
    }
}
