//! Defects that tests switch on, to prove that they would be found.

use std::cell::Cell;

/// A defect of the rules.
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
