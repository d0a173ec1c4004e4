//! The ledger of cluster-local. The file that is written of an accepted ledger is accepted, equal
//! and, if it is cut, refused. The blocks to allocate from are sorted and not reversed. Whatever is
//! seen of a claim, the rules come to an end after a few answers.

use std::collections::BTreeSet;

use cni_cluster::ledger::{Action, Entry, Holder, Ledger, Seen, State};
use cni_cluster::pool::Block;
use cni_cluster::store::{Change, Outcome, Version};

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let Some(ledger) = Ledger::parse(data) else { return };
    let written = ledger.to_json();
    assert_eq!(Ledger::parse(written.as_bytes()).unwrap().to_json(), written);
    for end in (0..written.len()).step_by(1 + written.len() / 100) {
        assert_eq!(Ledger::parse(&written.as_bytes()[..end]), None, "cut at {end} of {written}");
    }
    let spans = ledger.spans(|_| true);
    assert!(spans.is_sorted() && spans.iter().all(|(first, last)| first <= last), "{spans:?}");
    assert!(ledger.surplus(&[], None, &|_| true).len() <= ledger.entries().len());
    let blocks: BTreeSet<&Block> = ledger.entries().iter().map(|entry| &entry.block).collect();
    assert_eq!(blocks.len(), ledger.entries().len(), "a block has two states");
    for Entry { block, .. } in ledger.entries() {
        let own = Seen::Own(Version("1".to_owned()));
        let other = Seen::Other(Holder { node: "n".to_owned(), network: "net".to_owned() });
        for seen in [Seen::Unread, Seen::Outcome(Outcome::Conflict), Seen::Outcome(Outcome::Absent), own, other] {
            settle(&mut ledger.clone(), block, seen);
        }
    }
}

/// Answers the requests for a block as a store that answers always, until none is left.
fn settle(ledger: &mut Ledger, block: &Block, mut seen: Seen) {
    for _ in 0..4 {
        seen = match ledger.step(block, seen, false) {
            Action::Done => {
                let state = ledger.state(block);
                return assert!(!matches!(state, Some(State::Claiming | State::Releasing(_))), "{state:?}");
            }
            Action::Get | Action::Change(Change::Delete(_)) => Seen::Outcome(Outcome::Absent),
            Action::Change(_) => Seen::Outcome(Outcome::Written(Version("2".to_owned()))),
        };
    }
    panic!("{block} still needs a request: {ledger:?}");
}
