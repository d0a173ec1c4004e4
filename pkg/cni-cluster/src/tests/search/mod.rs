//! Searches all interleavings of two nodes that claim one block, with the ledger's own rules.
//!
//! Messages are lost, take effect late, and are answered late; processes are killed at any point;
//! ledgers are lost; nodes die and boot; an operator deletes the claim of a dead node; Node objects
//! disappear and return. In every state at most one node may use the block, and it has the claim;
//! and from every state the block can become free without an operator. With each [`Defect`], the
//! search finds a state where that does not hold.

mod rules;
mod world;

use std::cell::Cell;
use std::collections::HashMap;

use rules::Rules;
use world::{Actor, Budget, World};

/// A defect that the search must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    /// A block that is being released is used again.
    UsesReleasedBlock,
    /// An own claim is used without a swap.
    AdoptsWithoutSwap,
    /// A ledger is used in the next boot without a verification.
    UsesLedgerOfEarlierBoot,
    /// A ledger is used however long ago it was verified.
    UsesOldLedger,
    /// The claim of an absent node is deleted as soon as it is marked.
    ReclaimsAtOnce,
    /// The store deletes a claim that has another version.
    DeletesAnyVersion,
    /// The store deletes the claim of an absent node that has another version.
    ReclaimsAnyVersion,
    /// The claim belongs to the Node object, and is deleted with it.
    DeletesWithNodeObject,
}

thread_local! {
    static DEFECT: Cell<Option<Defect>> = const { Cell::new(None) };
}

/// Returns the defect of this thread's rules.
pub(crate) fn defect() -> Option<Defect> {
    DEFECT.get()
}

/// Runs a function with a defect of the rules.
pub(crate) fn with_defect<T>(defect: Option<Defect>, function: impl FnOnce() -> T) -> T {
    DEFECT.set(defect);
    let outcome = function();
    DEFECT.set(None);
    outcome
}

/// Searches all states. Returns their number, and the number of states from which the block cannot
/// become free.
///
/// # Errors
/// The first violation.
fn search(budget: Budget) -> Result<(usize, usize), String> {
    let mut rules = Rules::default();
    let first = World::new(budget);
    let mut known = HashMap::from([(first, 0_usize)]);
    let mut worlds = vec![first];
    // For each state, those before it.
    let mut before: Vec<Vec<usize>> = vec![Vec::new()];
    let mut at = 0;
    while at < worlds.len() {
        for (actor, world) in worlds[at].events(&mut rules) {
            let next = *known.entry(world).or_insert(worlds.len());
            if next == worlds.len() {
                if let Some(violation) = world.violation(&mut rules) {
                    return Err(format!("{violation}, found after {next} states: {world:?}"));
                }
                worlds.push(world);
                before.push(Vec::new());
            }
            if actor == Actor::Cluster {
                before[next].push(at);
            }
        }
        at += 1;
    }
    let mut reached: Vec<bool> = worlds.iter().map(World::is_free).collect();
    let mut open: Vec<usize> = (0..worlds.len()).filter(|at| reached[*at]).collect();
    while let Some(at) = open.pop() {
        for earlier in before[at].drain(..) {
            if !reached[earlier] {
                reached[earlier] = true;
                open.push(earlier);
            }
        }
    }
    // Shortly before the versions of the search are used up, nothing can be written any more.
    let is_lost = |(world, reached): &(&World, &bool)| !**reached && world.left.versions > 2;
    let lost: Vec<_> = worlds.iter().zip(&reached).filter(is_lost).collect();
    Ok((worlds.len(), lost.len()))
}

/// Without Node objects that disappear.
const MESSAGES: Budget = Budget { kills: 2, wipes: 1, deaths: 1, releases: 1, absences: 0, versions: 5, messages: 2 };
/// With Node objects that disappear.
const ABSENCES: Budget = Budget { kills: 1, wipes: 0, deaths: 0, releases: 0, absences: 2, versions: 7, messages: 1 };

#[test]
fn no_interleaving_gives_a_block_to_two_nodes() {
    for budget in [MESSAGES, ABSENCES] {
        let (states, lost) = search(budget).unwrap();
        assert!(states > 10_000, "{states}");
        assert_eq!(lost, 0);
    }
}

#[test]
fn the_search_finds_each_defect() {
    use Defect::*;
    for (defect, budget) in [
        (UsesReleasedBlock, MESSAGES),
        (AdoptsWithoutSwap, MESSAGES),
        (UsesLedgerOfEarlierBoot, MESSAGES),
        (DeletesAnyVersion, MESSAGES),
        (UsesOldLedger, ABSENCES),
        (ReclaimsAtOnce, ABSENCES),
        (ReclaimsAnyVersion, ABSENCES),
        (DeletesWithNodeObject, ABSENCES),
    ] {
        let found = with_defect(Some(defect), || search(budget));
        assert!(found.is_err(), "{defect:?}: {found:?}");
    }
}
