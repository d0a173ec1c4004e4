//! The states of two nodes, a store with one block, and the requests on their way.

use super::rules::{Local, Rules, Sight, block, ledger, local, number};
use super::{Defect, defect};
use crate::ledger::Action;
use crate::store::Change;

/// A request to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Request {
    Create,
    Swap(u8),
    Delete(u8),
    /// Marks the claim of the other node as absent.
    Mark(u8),
    /// Deletes the claim of the other node.
    Reclaim(u8),
}

/// A request on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Message {
    sender: usize,
    request: Request,
    /// Whether a process waits for the answer.
    is_awaited: bool,
}

/// What a node's process does. Only one has the claim lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Process {
    None,
    /// Verifies the ledger. The block had reservations when it began, or not.
    Verify(bool),
    /// Claims, releases or reclaims.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Node {
    local: Local,
    /// Whether the ledger was verified in this boot.
    is_of_boot: bool,
    /// Whether the ledger was verified less than 15 minutes ago.
    is_fresh: bool,
    /// Whether a container has an address of the block.
    is_reserved: bool,
    is_alive: bool,
    has_object: bool,
    process: Process,
}

impl Node {
    /// Whether a container of the node may get an address of the block.
    fn may_use(&self, rules: &mut Rules) -> bool {
        let is_held = self.is_alive && matches!(self.local, Local::Held(_));
        is_held && rules.is_usable(self.is_of_boot, self.is_fresh)
    }
}

/// The claim in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Record {
    node: usize,
    version: u8,
    /// Whether the claim is marked, and whether the mark is an hour old.
    mark: Mark,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mark {
    None,
    Young,
    Old,
}

/// How often each event may occur in a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Budget {
    pub(super) kills: u8,
    pub(super) wipes: u8,
    pub(super) deaths: u8,
    /// Deletions of a claim by the operator.
    pub(super) releases: u8,
    /// Deletions of a Node object.
    pub(super) absences: u8,
    pub(super) versions: u8,
    pub(super) messages: u8,
}

const MAX_MESSAGES: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    record: Option<Record>,
    nodes: [Node; 2],
    /// Sorted.
    messages: [Option<Message>; MAX_MESSAGES],
    /// What may still happen.
    pub(super) left: Budget,
}

/// Who makes a step, for the question whether the block can become free without an operator.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Actor {
    Cluster,
    Operator,
}

impl World {
    pub(super) fn new(left: Budget) -> World {
        let node = Node {
            local: Local::Absent,
            is_of_boot: false,
            is_fresh: false,
            is_reserved: false,
            is_alive: true,
            has_object: true,
            process: Process::None,
        };
        World { record: None, nodes: [node; 2], messages: [None; MAX_MESSAGES], left }
    }

    fn with_node(mut self, n: usize, change: impl FnOnce(&mut Node)) -> World {
        change(&mut self.nodes[n]);
        self
    }

    fn with_budget(mut self, spend: impl FnOnce(&mut Budget) -> &mut u8) -> World {
        *spend(&mut self.left) -= 1;
        self
    }

    fn send(mut self, message: Message) -> World {
        let free = self.messages.iter_mut().find(|slot| slot.is_none()).unwrap();
        *free = Some(message);
        self.messages.sort_unstable();
        self
    }

    /// Removes the message of a slot.
    fn take(mut self, slot: usize) -> World {
        self.messages[slot] = None;
        self.messages.sort_unstable();
        self
    }

    /// Ends the node's process, so that it does not wait for the answers to its messages.
    fn abandon(mut self, n: usize) -> World {
        for message in self.messages.iter_mut().flatten().filter(|message| message.sender == n) {
            message.is_awaited = false;
        }
        self.messages.sort_unstable();
        self.with_node(n, |node| node.process = Process::None)
    }

    /// Writes the record with a new version.
    fn write(mut self, node: usize, mark: Mark) -> World {
        self.record = Some(Record { node, version: self.left.versions, mark });
        self.left.versions -= 1;
        self
    }

    /// What node `n` reads of the claim.
    fn sight(&self, n: usize) -> Sight {
        match self.record {
            None => Sight::Absent,
            Some(record) if record.node == n => Sight::Own(record.version),
            Some(_) => Sight::Other,
        }
    }

    /// Performs the ledger's actions of the node's process until it has sent a request or ends.
    fn settle(self, n: usize, mut sight: Sight, rules: &mut Rules) -> World {
        let mut world = self;
        let process = world.nodes[n].process;
        if world.nodes[n].local != Local::Absent {
            loop {
                let is_reserved = process == Process::Verify(true);
                let (next, action) = rules.step(world.nodes[n].local, sight, is_reserved);
                world.nodes[n].local = next;
                let request = match action {
                    Action::Done => break,
                    Action::Get => {
                        sight = world.sight(n);
                        continue;
                    }
                    Action::Change(Change::Create) => Request::Create,
                    Action::Change(Change::Swap(version)) => Request::Swap(number(&version)),
                    Action::Change(Change::Delete(version)) => Request::Delete(number(&version)),
                };
                return world.send(Message { sender: n, request, is_awaited: true });
            }
        }
        world.with_node(n, |node| {
            node.process = Process::None;
            if let Process::Verify(_) = process {
                (node.is_of_boot, node.is_fresh) = (true, true);
            }
        })
    }

    /// Applies a request to the store, and returns what its sender learns.
    fn apply(self, Message { sender, request, .. }: Message) -> (World, Sight) {
        let is_own = |record: &Record| record.node == sender;
        let gone = World { record: None, ..self };
        let any_version = defect() == Some(Defect::DeletesAnyVersion);
        match (request, self.record) {
            (Request::Create, None) => (self.write(sender, Mark::None), Sight::Written(self.left.versions)),
            (Request::Swap(version), Some(record)) if is_own(&record) && record.version == version => {
                (self.write(sender, Mark::None), Sight::Written(self.left.versions))
            }
            (Request::Delete(_), None) => (self, Sight::Absent),
            (Request::Delete(version), Some(record))
                if is_own(&record) && (record.version == version || any_version) =>
            {
                (gone, Sight::Absent)
            }
            (Request::Mark(version), Some(record)) if record.version == version => {
                (self.write(record.node, Mark::Young), Sight::Changed)
            }
            (Request::Reclaim(version), Some(record))
                if record.version == version || defect() == Some(Defect::ReclaimsAnyVersion) && !is_own(&record) =>
            {
                (gone, Sight::Changed)
            }
            _ => (self, Sight::Changed),
        }
    }

    /// Returns the states after the next event at node `n`.
    fn node_events(self, n: usize, rules: &mut Rules) -> Vec<(Actor, World)> {
        let node = self.nodes[n];
        let mut next = Vec::new();
        let mut add = |world| next.push((Actor::Cluster, world));
        if self.left.absences > 0 && node.has_object {
            let world = self.with_node(n, |node| node.has_object = false).with_budget(|left| &mut left.absences);
            let is_own = self.record.is_some_and(|record| record.node == n);
            let deletes = defect() == Some(Defect::DeletesWithNodeObject) && is_own;
            add(if deletes { World { record: None, ..world } } else { world });
        }
        if !node.has_object {
            add(self.with_node(n, |node| node.has_object = true));
        }
        if !node.is_alive {
            add(self.with_node(n, |node| node.is_alive = true));
            if self.left.releases > 0 && self.record.is_some_and(|record| record.node == n) {
                let world = World { record: None, ..self }.with_budget(|left| &mut left.releases);
                next.push((Actor::Operator, world));
            }
            return next;
        }
        if node.is_reserved {
            add(self.with_node(n, |node| node.is_reserved = false));
        } else if node.may_use(rules) {
            add(self.with_node(n, |node| node.is_reserved = true));
        }
        if self.left.deaths > 0 {
            let died = |node: &mut Node| (node.is_alive, node.is_reserved, node.is_of_boot) = (false, false, false);
            add(self.abandon(n).with_node(n, died).with_budget(|left| &mut left.deaths));
        }
        if node.process != Process::None {
            if self.left.kills > 0 {
                add(self.abandon(n).with_budget(|left| &mut left.kills));
            }
            return next;
        }
        if self.left.wipes > 0 && node.local != Local::Absent {
            let wiped = |node: &mut Node| (node.local, node.is_of_boot) = (Local::Absent, false);
            add(self.with_node(n, wiped).with_budget(|left| &mut left.wipes));
        }
        for world in self.calls(n, rules) {
            next.push((Actor::Cluster, world));
        }
        next
    }

    /// Returns the states after the beginning of each call that node `n` can make.
    fn calls(self, n: usize, rules: &mut Rules) -> Vec<World> {
        let node = self.nodes[n];
        let sent = self.messages.iter().flatten().filter(|message| message.sender == n).count();
        if sent >= usize::from(self.left.messages) || self.left.versions == 0 {
            return Vec::new();
        }
        let mut next = Vec::new();
        if rules.is_surplus(node.local, node.is_reserved) {
            let mut released = ledger(node.local);
            released.begin_release(&block());
            let world = self.with_node(n, |node| (node.local, node.process) = (local(&released), Process::Other));
            next.push(world.settle(n, Sight::Unread, rules));
        }
        if let Local::Releasing(_) = node.local {
            next.push(self.with_node(n, |node| node.process = Process::Other).settle(n, Sight::Unread, rules));
        }
        if !rules.is_usable(node.is_of_boot, node.is_fresh) {
            let own = match self.sight(n) {
                Sight::Own(version) => Some(version),
                _ => None,
            };
            let world = self.with_node(n, |node| {
                node.process = Process::Verify(node.is_reserved);
                if node.local == Local::Absent && (own.is_some() || node.is_reserved) {
                    node.local = Local::Claiming;
                }
            });
            next.push(world.settle(n, own.map_or(Sight::Unread, Sight::Own), rules));
            return next;
        }
        let world = self.with_node(n, |node| node.process = Process::Other);
        if matches!(node.local, Local::Absent | Local::Claiming) {
            let world = world.with_node(n, |node| node.local = Local::Claiming);
            next.push(world.settle(n, Sight::Unread, rules));
        }
        if let Some(Record { node: other, version, mark }) = self.record
            && other != n
            && !self.nodes[other].has_object
        {
            let since = match mark {
                Mark::None => None,
                Mark::Young => Some("1970-01-01T02:00:00Z"),
                Mark::Old => Some("1970-01-01T01:00:00Z"),
            };
            let request = match Rules::reclaim(since) {
                Some(Change::Swap(_)) => Request::Mark(version),
                Some(Change::Delete(_)) => Request::Reclaim(version),
                _ => return next,
            };
            next.push(world.send(Message { sender: n, request, is_awaited: true }));
        }
        next
    }

    /// Returns the states after the next event.
    pub(super) fn events(self, rules: &mut Rules) -> Vec<(Actor, World)> {
        let mut next = self.node_events(0, rules);
        next.extend(self.node_events(1, rules));
        let mut add = |world| next.push((Actor::Cluster, world));
        // The assumption of the grace period: a node without Node object for an hour runs no
        // container of the network. After the hour, each verification is too old.
        if let Some(record) = self.record
            && record.mark == Mark::Young
            && !self.nodes[record.node].has_object
            && !self.nodes[record.node].is_reserved
        {
            let mut world = self;
            world.record = Some(Record { mark: Mark::Old, ..record });
            world.nodes.iter_mut().for_each(|node| node.is_fresh = false);
            add(world);
        }
        for (slot, message) in self.messages.iter().enumerate() {
            let Some(message) = *message else { continue };
            let needs_version = !matches!(message.request, Request::Delete(_) | Request::Reclaim(_));
            if needs_version && self.left.versions == 0 {
                continue;
            }
            let rest = self.take(slot);
            let (applied, sight) = rest.apply(message);
            if !message.is_awaited {
                add(rest);
                add(applied);
                continue;
            }
            let n = message.sender;
            add(match message.request {
                Request::Mark(_) | Request::Reclaim(_) => applied.abandon(n),
                _ => applied.settle(n, sight, rules),
            });
            if self.left.kills > 0 {
                add(applied.abandon(n).with_budget(|left| &mut left.kills));
            }
        }
        next
    }

    /// Returns what is wrong in this state.
    pub(super) fn violation(&self, rules: &mut Rules) -> Option<&'static str> {
        let uses = self.nodes.map(|node| node.may_use(rules) || node.is_reserved);
        if uses == [true, true] {
            return Some("two nodes may use the block");
        }
        let user = uses.iter().position(|uses| *uses)?;
        let has_claim = self.record.is_some_and(|record| record.node == user);
        (!has_claim).then_some("a node may use the block without a claim")
    }

    /// Whether the block is free, and no request is on its way.
    pub(super) fn is_free(&self) -> bool {
        let has_none = |node: &Node| node.local == Local::Absent;
        self.record.is_none() && self.messages == [None; MAX_MESSAGES] && self.nodes.iter().all(has_none)
    }
}
