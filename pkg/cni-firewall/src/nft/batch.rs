//! Collects the changes of one transaction for [`Nft::commit`](super::Nft::commit), each with the
//! error text for a refusal by the kernel.
//!
//! An `ensure_` method leaves an existing object unchanged, including its flags, policy and
//! comment, so two processes that create the same table at once both succeed; only a base chain
//! that exists with another type, hook or priority is an error. With a `create_` method, the commit
//! fails if the object exists, so the second of two processes notices the first.

use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST};
use std::net::IpAddr;

use super::request::{Request, RequestType, number_attribute};
use super::{Expr, Family, Generation, Rule, Table, expr};
use cni_linux::error::{Cause, Error, Result};
use cni_linux::netlink::wire::Message;

/// The place of a base chain in the packet path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseChain {
    /// Its type.
    pub kind: Kind,
    /// The hook.
    pub hook: Hook,
    /// Lower runs earlier.
    pub priority: i32,
}

/// A base chain's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Sees every packet.
    Filter,
    /// Sees the first packet of each connection, and may translate.
    Nat,
}

impl Kind {
    /// Returns the type's name, as `nft` and the kernel write it.
    fn name(self) -> &'static str {
        match self {
            Kind::Filter => "filter",
            Kind::Nat => "nat",
        }
    }

    /// Returns the type of this name; `None` for types that are not used here.
    pub(crate) fn by_name(name: &str) -> Option<Kind> {
        [Kind::Filter, Kind::Nat].into_iter().find(|kind| kind.name() == name)
    }
}

/// A hook of the families ip, ip6, inet and bridge. The numbers are the kernel's, `NF_INET_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Packets that came in.
    Prerouting = 0,
    /// Packets for this machine.
    Input = 1,
    /// Packets that go on to another machine or container.
    Forward = 2,
    /// Packets that start here.
    Output = 3,
    /// Packets about to leave.
    Postrouting = 4,
}

impl Hook {
    /// Returns the hook of this kernel number (`NF_INET_*`).
    pub(crate) fn by_number(number: u32) -> Option<Hook> {
        let all = [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting];
        all.into_iter().find(|hook| *hook as u32 == number)
    }
}

/// The position in a chain at which a rule is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RulePosition {
    First,
    Last,
}

impl RulePosition {
    /// Returns the flags of the netlink message that adds a rule here, and how that changes the
    /// rules of the chain.
    fn flags_and_effect(self) -> (u16, RuleChange) {
        match self {
            RulePosition::First => (NLM_F_CREATE, RuleChange::Other),
            RulePosition::Last => (NLM_F_CREATE | NLM_F_APPEND, RuleChange::Append),
        }
    }
}

/// The family and the name of a chain's table, and the chain's name.
pub(super) type ChainPlace = (Family, String, String);

/// Returns the place of a chain.
pub(super) fn place_of(table: Table<'_>, chain: &str) -> ChainPlace {
    (table.family, table.name.to_owned(), chain.to_owned())
}

/// How a change changes the rules of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RuleChange {
    /// Adds a rule at the end.
    Append,
    /// Deletes the rule with this handle.
    Delete(u64),
    /// Adds a rule elsewhere, or deletes all.
    Other,
}

/// A change of a batch.
#[derive(Debug)]
pub(crate) struct Change {
    /// The beginning of the error's text if the kernel refuses the change: `failed to ...`.
    pub(crate) what: String,
    /// Whether it creates a base chain: then the errno of a refusal is replaced.
    pub(crate) is_base_chain: bool,
    /// `NLM_F_*`
    pub(crate) flags: u16,
    /// The type of the netlink message.
    pub(crate) kind: u16,
    /// What follows the netlink header.
    pub(crate) body: Vec<u8>,
    /// The chain whose rules it changes, and how; `None` for any other change.
    pub(super) rules: Option<(ChainPlace, RuleChange)>,
}

impl Change {
    /// Appends the change's netlink message, with this sequence number, to `bytes`.
    pub(crate) fn write(&self, sequence: u32, bytes: &mut Vec<u8>) {
        Message { kind: self.kind, flags: self.flags, sequence, payload: &self.body }.write(bytes);
    }

    /// Records how the change changes the rules of a chain.
    fn set_rules(&mut self, table: Table<'_>, chain: &str, effect: RuleChange) {
        self.rules = Some((place_of(table, chain), effect));
    }
}

/// Changes that are made together or not at all.
#[derive(Debug, Default)]
pub struct Batch {
    changes: Vec<Change>,
    /// The generation that [`only_at`](Batch::only_at) requires.
    pub(super) generation: Option<Generation>,
    /// The error of the first change that cannot be encoded.
    fault: Option<Error>,
}

impl Batch {
    /// Returns a batch without changes.
    pub fn new() -> Batch {
        Batch::default()
    }

    /// Makes the transaction fail with ERESTART, before anything else is checked, if any rule of
    /// the namespace has changed since `generation` was read. For changes that depend on objects
    /// that they do not name.
    pub fn only_at(&mut self, generation: Generation) {
        self.generation = Some(generation);
    }

    /// Creates the table unless it exists. An existing table keeps its comment.
    pub fn ensure_table(&mut self, table: Table<'_>, comment: Option<&str>) {
        let request = Request::in_table(RequestType::NewTable, table).userdata(6, comment, &[]);
        self.push(format!("failed to add nft table {table}"), NLM_F_CREATE, request);
    }

    /// Creates the base chain, with policy accept, unless it exists. On every kernel, the commit
    /// fails without an errno if the chain exists with another hook, type or priority, and with
    /// [`Error::is_unsupported`] if the kernel has no such type of chain.
    pub fn ensure_base_chain(&mut self, table: Table<'_>, name: &str, base: BaseChain) {
        let what = format!("failed to add nft base chain {table} {name}");
        let hook = [number_attribute(1, base.hook as u32), number_attribute(2, base.priority.cast_unsigned())];
        let request = Request::in_table(RequestType::NewChain, table).text(3, name).nest(4, &hook.concat());
        self.push(what, NLM_F_CREATE, request.text(7, base.kind.name())).is_base_chain = true;
    }

    /// Creates the chain unless it exists. An existing chain keeps its comment.
    pub fn ensure_chain(&mut self, table: Table<'_>, name: &str, comment: Option<&str>) {
        self.push_chain(table, name, comment, NLM_F_CREATE);
    }

    /// Creates the chain. The commit fails with EEXIST if it exists.
    pub fn create_chain(&mut self, table: Table<'_>, name: &str) {
        self.push_chain(table, name, None, NLM_F_CREATE | NLM_F_EXCL);
    }

    /// Adds the creation of a chain with these netlink flags.
    fn push_chain(&mut self, table: Table<'_>, name: &str, comment: Option<&str>, flags: u16) {
        let request = Request::in_table(RequestType::NewChain, table).text(3, name).userdata(12, comment, &[]);
        self.push(format!("failed to add nft chain {table} {name}"), flags, request);
    }

    /// Removes every rule of the chain. The commit fails with ENOENT if the chain does not exist.
    pub fn flush_chain(&mut self, table: Table<'_>, name: &str) {
        let request = Request::in_table(RequestType::DeleteRule, table).text(2, name);
        let what = format!("failed to flush nft chain {table} {name}");
        self.push(what, 0, request).set_rules(table, name, RuleChange::Other);
    }

    /// Makes these the only rules of the chain, which must exist. No packet sees the chain without
    /// rules, because the batch is one transaction.
    pub(crate) fn replace_rules(&mut self, table: Table<'_>, chain: &str, rules: impl IntoIterator<Item = Vec<Expr>>) {
        self.flush_chain(table, chain);
        for exprs in rules {
            self.append_rule(table, chain, &Rule::new(exprs));
        }
    }

    /// Adds the rule at the chain's end. The commit fails with ENOENT if the chain, a chain that
    /// the rule jumps to, or a set that it uses does not exist.
    pub fn append_rule(&mut self, table: Table<'_>, chain: &str, rule: &Rule) {
        self.add_rule(table, chain, rule, RulePosition::Last);
    }

    /// Adds the rule at the chain's beginning, otherwise like [`append_rule`](Batch::append_rule).
    /// Of several inserted rules, the last one inserted becomes the first of the chain.
    pub fn insert_rule(&mut self, table: Table<'_>, chain: &str, rule: &Rule) {
        self.add_rule(table, chain, rule, RulePosition::First);
    }

    /// Adds the rule at this position.
    fn add_rule(&mut self, table: Table<'_>, chain: &str, rule: &Rule, position: RulePosition) {
        let comment = rule.comment.as_deref();
        let what = format!("failed to add rule {:?} to nft chain {table} {chain}", comment.unwrap_or_default());
        let request = new_rule(table, chain, &rule.exprs).userdata(7, comment, &rule.tags);
        let (flags, effect) = position.flags_and_effect();
        self.push(what, flags, request).set_rules(table, chain, effect);
    }

    /// Adds a rule in the form of iptables-nft at the chain's beginning or end.
    pub(crate) fn add_xtables_rule(&mut self, table: Table<'_>, chain: &str, exprs: &[Expr], position: RulePosition) {
        let what = format!("failed to add a rule to iptables chain {table} {chain}");
        // The kernel needs the protocol (`IPPROTO_*`, 0 for any) to check xtables matches: the
        // match `tcp`, for example, requires protocol tcp. Protocol and flags (0: the protocol is
        // not negated) are the attribute `NFTA_RULE_COMPAT`, 5.
        let protocol = expr::l4proto_of(exprs).unwrap_or(0);
        let protocol_and_flags = [number_attribute(1, protocol.into()), number_attribute(2, 0)].concat();
        let request = new_rule(table, chain, exprs).nest(5, &protocol_and_flags);
        let (flags, effect) = position.flags_and_effect();
        self.push(what, flags, request).set_rules(table, chain, effect);
    }

    /// Creates a set for addresses of the family of `sample` unless it exists.
    pub fn ensure_set(&mut self, table: Table<'_>, name: &str, sample: IpAddr) {
        // The kernel requires a number that no other set of the transaction has.
        let id = u32::try_from(self.changes.len()).unwrap_or(u32::MAX);
        // `type ipv4_addr` or `type ipv6_addr`: a number that only `nft` interprets, and the length
        // of an element in bytes.
        let (data_type, len) = if sample.is_ipv4() { (7, 4) } else { (8, 16) };
        let request = Request::in_table(RequestType::NewSet, table).text(2, name);
        let request = request.number(4, data_type).number(5, len).number(10, id);
        self.push(format!("failed to add nft set {table} {name}"), NLM_F_CREATE, request);
    }

    /// Removes the set with its elements. The commit fails with EBUSY if a rule uses the set, and
    /// with ENOENT if it does not exist.
    pub fn delete_set(&mut self, table: Table<'_>, name: &str) {
        let request = Request::in_table(RequestType::DeleteSet, table).text(2, name);
        self.push(format!("failed to delete nft set {table} {name}"), 0, request);
    }

    /// Adds an address to a set unless the set contains it. The commit fails with ENOENT if the set
    /// does not exist.
    pub fn ensure_element(&mut self, table: Table<'_>, set: &str, address: IpAddr) {
        let request = Request::in_table(RequestType::NewElement, table).text(2, set).element(address);
        self.push(format!("failed to add {address} to nft set {table} {set}"), NLM_F_CREATE, request);
    }

    /// Removes an address from a set. The commit fails with ENOENT if the set does not contain it.
    pub fn delete_element(&mut self, table: Table<'_>, set: &str, address: IpAddr) {
        let request = Request::in_table(RequestType::DeleteElement, table).text(2, set).element(address);
        self.push(format!("failed to delete {address} from nft set {table} {set}"), 0, request);
    }

    /// Removes one rule. The commit fails with ENOENT if the rule no longer exists.
    pub fn delete_rule(&mut self, table: Table<'_>, chain: &str, handle: u64) {
        let request = Request::in_table(RequestType::DeleteRule, table).text(2, chain);
        let what = format!("failed to delete rule {handle} of nft chain {table} {chain}");
        self.push(what, 0, request.handle(3, handle)).set_rules(table, chain, RuleChange::Delete(handle));
    }

    /// Removes the chain with its rules. The commit fails with ENOENT if no chain has this handle,
    /// even if another chain has the name, and with EBUSY if a rule jumps to the chain.
    ///
    /// Older kernels differ: before Linux 5.0 the commit also fails with EBUSY if the batch removes
    /// the jump, and before Linux 4.16 only the name selects the chain.
    pub fn delete_chain(&mut self, table: Table<'_>, name: &str, handle: u64) {
        let request = Request::in_table(RequestType::DeleteChain, table).text(3, name).handle(2, handle);
        self.push(format!("failed to delete nft chain {table} {name}"), 0, request);
    }

    /// Removes the table with everything in it. The commit fails with ENOENT if it does not exist.
    #[cfg(test)]
    pub(crate) fn delete_table(&mut self, table: Table<'_>) {
        let request = Request::in_table(RequestType::DeleteTable, table);
        self.push(format!("failed to delete nft table {table}"), 0, request);
    }

    /// Whether there are no changes, not even one that could not be encoded.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.fault.is_none()
    }

    /// Returns the changes, or the error of the first one that could not be encoded.
    pub(crate) fn into_changes(self) -> Result<Vec<Change>> {
        match self.fault {
            Some(fault) => Err(fault),
            None => Ok(self.changes),
        }
    }

    /// Returns each removal of the batch as a batch of its own.
    pub(crate) fn into_removals(self) -> impl Iterator<Item = Batch> {
        let removals = self.changes.into_iter().filter(|change| change.flags & NLM_F_CREATE == 0);
        removals.map(|change| Batch { changes: vec![change], ..Batch::default() })
    }

    /// Adds the change that the request makes, and returns the change so that the caller can set
    /// `is_base_chain` or `rules`. `what` is as in [`Change`]; `flags` are the netlink flags beside
    /// `NLM_F_REQUEST`. A request that lacks its userdata makes the whole batch fail: the error is
    /// stored in `fault`.
    fn push(&mut self, what: String, flags: u16, request: Request) -> &mut Change {
        let Request { kind, body, lacks_userdata } = request;
        if lacks_userdata && self.fault.is_none() {
            let cause = Cause::text("comment and tags are longer than the 256 bytes that the kernel stores");
            self.fault = Some(Error::new(&what, cause));
        }
        let position = self.changes.len();
        self.changes.push(Change { what, is_base_chain: false, flags: NLM_F_REQUEST | flags, kind, body, rules: None });
        &mut self.changes[position]
    }
}

/// Returns the request that adds a rule with these expressions.
fn new_rule(table: Table<'_>, chain: &str, exprs: &[Expr]) -> Request {
    let exprs: Vec<u8> = exprs.iter().flat_map(Expr::encode).collect();
    Request::in_table(RequestType::NewRule, table).text(2, chain).nest(4, &exprs)
}
