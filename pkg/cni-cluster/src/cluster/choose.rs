//! Chooses the block that an ADD claims, and takes blocks of absent nodes if no other is free.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use cni::Result;
use cni_ipam::ranges::RangeSet;

use super::Cluster;
use crate::ledger::{State, reclaim};
use crate::pool::{self, Block};
use crate::store::{Change, NodeState, Reclaim};

/// How many claimed blocks an ADD meets before it asks for a list.
const MAX_REFUSALS: usize = 8;
/// How many nodes an ADD looks up that finds no free block.
const MAX_LOOKUPS: usize = 16;
/// How many nodes the error of an exhausted range set names.
const MAX_LISTED: usize = 5;

impl Cluster<'_> {
    /// Claims a block of the set: first without a list, then one that the store lists as free, then
    /// one of an absent node. Returns why not, if all blocks are claimed.
    pub(super) fn claim_any(&mut self, set: &RangeSet) -> Result<Option<String>> {
        let node = self.ledger.node.clone();
        let seed = format!("{node}/{}", self.network.name);
        let newest: Vec<Block> = self.ledger.entries().iter().rev().map(|entry| entry.block.clone()).collect();
        let is_of_set = |pool: &&String| set.ranges().iter().any(|range| self.network.pool(range) == **pool);
        let pools: Vec<String> = self.ledger.pools.keys().filter(is_of_set).cloned().collect();
        let mut holders: BTreeMap<String, Vec<Block>> = BTreeMap::new();
        let (mut taken, mut refusals) = (HashMap::new(), 0);
        for block in pool::candidates(set, &|range| self.pool_of(range), &seed, &newest) {
            if refusals == MAX_REFUSALS {
                refusals += 1;
                for pool in &pools {
                    let listed = self.store()?.taken(pool)?;
                    taken.extend(listed.into_iter().map(|(first, node)| ((pool.clone(), first), node)));
                }
            }
            let listed = taken.remove(&(block.pool.clone(), block.first));
            let holder = match (self.ledger.state(&block), listed) {
                (Some(State::Lost(holder)), _) => holder.node.clone(),
                (Some(_), _) => node.clone(),
                (None, Some(holder)) => holder,
                (None, None) => {
                    let Some(holder) = self.claim(&block)? else { return Ok(None) };
                    refusals += 1;
                    holder.node
                }
            };
            holders.entry(holder).or_default().push(block);
        }
        // Another machine may have this node's name, and some of the blocks in the list.
        self.own_claims(&node)?;
        let rules = self.store()?.pools()?;
        let mut marks = Vec::new();
        let mut others: Vec<_> = holders.iter().filter(|(holder, _)| !holder.is_empty() && **holder != node).collect();
        // If there are more than this ADD looks up, the next one looks up others.
        let first = getrandom::u32().unwrap_or(0) as usize % others.len().max(1);
        others.rotate_left(first);
        for (holder, blocks) in others.into_iter().take(MAX_LOOKUPS) {
            let NodeState::Absent(now) = self.store()?.node_state(holder)? else { continue };
            for block in blocks {
                let found = self.store()?.get(block)?;
                let Some((mut claim, version)) = found.filter(|(claim, _)| claim.node == *holder) else { continue };
                let rule = rules.iter().find(|(pool, _)| *pool == block.pool);
                let rule = rule.map_or(Reclaim::Never, |(_, pool)| pool.reclaim);
                let change = reclaim(&mut claim, version, rule, now);
                if let Some(change) = &change {
                    self.store()?.change(&claim, change)?;
                }
                if let Some(Change::Delete(_)) = change
                    && self.claim(block)?.is_none()
                {
                    return Ok(None);
                }
                marks.extend(claim.absent_since.filter(|_| rule == Reclaim::AfterOneHour));
            }
        }
        Ok(Some(exhausted_text(&pools, &holders, &marks)))
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
