//! Chooses the block that an ADD claims, and takes blocks of absent nodes if no other is free.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use cni_ipam::ranges::RangeSet;

use super::{Cluster, Obtained};
use crate::ledger::{Reclaiming, reclaiming};
use crate::pool::{self, Block};
use crate::store::{Answer, Claim, NodeState, Reclaim};

/// How many claimed blocks an ADD meets before it asks for a list.
const MAX_REFUSALS: usize = 8;
/// How many nodes an ADD looks up that finds no free block.
const MAX_LOOKUPS: usize = 16;
/// How many nodes the error of an exhausted range set names.
const MAX_LISTED: usize = 5;

impl Cluster<'_> {
    /// Claims a block of the set: first without a list, then one that the store lists as free, then
    /// one of an absent node.
    pub(super) fn claim_any(&mut self, set: &RangeSet) -> Answer<Obtained> {
        let node = self.ledger.node.clone();
        let seed = format!("{node}/{}", self.network.name);
        let newest: Vec<Block> = self.ledger.entries().iter().rev().map(|entry| entry.block.clone()).collect();
        let candidates = pool::candidates(set, &|range| self.pool_of(range), &seed, &newest);
        let unknown = candidates.filter(|block| self.ledger.state(block).is_none());
        for block in unknown.take(MAX_REFUSALS).collect::<Vec<_>>() {
            if self.claim(&block)?.is_none() {
                return Ok(Obtained::Changed);
            }
        }
        let is_of_set = |pool: &&String| set.ranges().iter().any(|range| self.network.pool(range) == **pool);
        let pools: Vec<String> = self.ledger.pools.keys().filter(is_of_set).cloned().collect();
        let mut taken = HashMap::new();
        for pool in &pools {
            for (first, node) in self.ask(|store| store.taken(pool))? {
                taken.insert((pool.clone(), first), node);
            }
        }
        let mut holders: BTreeMap<String, Vec<Block>> = BTreeMap::new();
        for block in pool::candidates(set, &|range| self.pool_of(range), &seed, &newest) {
            let holder = match taken.remove(&(block.pool.clone(), block.first)) {
                _ if self.ledger.state(&block).is_some() => node.clone(),
                Some(holder) => holder,
                None => match self.claim(&block)? {
                    Some(holder) => holder.node,
                    None => return Ok(Obtained::Changed),
                },
            };
            holders.entry(holder).or_default().push(block);
        }
        // Claims in this node's name that the ledger lacks: of another network, of another machine,
        // or of a call whose answer or ledger was lost.
        for block in holders.get(&node).cloned().unwrap_or_default() {
            if self.ledger.state(&block).is_none() && self.claim(&block)?.is_none() {
                return Ok(Obtained::Changed);
            }
        }
        let rules = self.ask(|store| store.pools())?;
        let rule =
            |name: &str| rules.iter().find(|(pool, _)| pool == name).map_or(Reclaim::Never, |(_, pool)| pool.reclaim);
        let mut marks = Vec::new();
        let mut others: Vec<_> = holders.iter().filter(|(holder, _)| !holder.is_empty() && **holder != node).collect();
        if others.len() > MAX_LOOKUPS {
            // The next ADD looks up others.
            let first = getrandom::u32().unwrap_or(0) as usize % others.len();
            others.rotate_left(first);
        }
        for (holder, blocks) in others.into_iter().take(MAX_LOOKUPS) {
            let state = self.ask(|store| store.node_state(holder))?;
            for block in blocks.iter().filter(|_| matches!(state, NodeState::Absent(_))) {
                let found = self.ask(|store| store.get(&block.pool, block.first))?;
                let Some((claim, version)) = found.filter(|(claim, _)| claim.node == *holder) else { continue };
                match reclaiming(&claim, rule(&block.pool), &state) {
                    Reclaiming::Leave => marks.extend(claim.absent_since),
                    Reclaiming::Mark(since) => {
                        marks.push(since.clone());
                        let marked = Claim { absent_since: Some(since), ..claim };
                        self.ask(|store| store.swap(&marked, &version))?;
                    }
                    Reclaiming::Delete => {
                        self.ask(|store| store.delete(&block.pool, block.first, &version))?;
                        if self.claim(block)?.is_none() {
                            return Ok(Obtained::Changed);
                        }
                    }
                }
            }
        }
        Ok(Obtained::Exhausted(exhausted_text(&pools, &holders, &marks)))
    }
}

/// Returns the text for a set of these pools whose blocks are all claimed. `marks` has since when
/// the nodes of some blocks are absent.
fn exhausted_text(pools: &[String], holders: &BTreeMap<String, Vec<Block>>, marks: &[String]) -> String {
    let total: usize = holders.values().map(Vec::len).sum();
    let mut counts: BinaryHeap<(usize, Reverse<&str>)> =
        holders.iter().map(|(node, blocks)| (blocks.len(), Reverse(node.as_str()))).collect();
    let holder = |(count, Reverse(node)): (usize, Reverse<&str>)| match node {
        "" => format!("{count} are reserved by an operator"),
        node => format!("node {node} has {count}"),
    };
    let most: Vec<String> = std::iter::from_fn(|| counts.pop()).take(MAX_LISTED).map(holder).collect();
    let mut text = format!("all {total} blocks of pool {} are claimed: {}", pools.join(", "), most.join(", "));
    if let Some(since) = marks.iter().min() {
        let count = marks.len();
        text +=
            &format!("; {count} belong to nodes that are absent since {since} or later, and are free an hour after");
    }
    text
}
