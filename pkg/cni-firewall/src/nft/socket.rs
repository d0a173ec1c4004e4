//! Sends transactions to the kernel and reads consistent lists from it.
//!
//! The kernel handles a request while it is sent, and has queued the answer when sending returns.
//! So only sending can wait, for the transactions of other processes; a missing answer is an error.

use cni::steps::{Step, hex};
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST};
use netlink_packet_netfilter::nftables::{
    ChainAttribute, ChainMessage, GenMessage, NfTablesMessage, RuleAttribute, RuleMessage,
};
use nix::errno::Errno;

use super::batch::Batch;
use super::decode;
use super::index::{self, Appended, Index};
use super::refusal::{Absence, Refusal};
use super::{BaseChain, Chain, Family, Listed, NFNL_SUBSYS_NFT_COMPAT, NFNL_SUBSYS_NFTABLES, Table};
use cni_linux::error::{Cause, Error, Result};
use cni_linux::netlink::socket::{Protocol, Socket};
use cni_linux::netlink::wire::{self, Message, NLMSG_ERROR};

const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
const NFNL_BATCH_GENID: u16 = 1;
/// The type of the kernel's messages with a rule.
const NEW_RULE: u16 = NFNL_SUBSYS_NFTABLES << 8 | 6;

/// The maximum number of readings of one list until two successive ones agree. A change of the
/// rules invalidates at most two readings, so only a constant stream of changes reaches this bound.
const READS_MAX: usize = 512;
/// The bound instead of [`READS_MAX`] within [`Nft::with_few_retries`].
const FEW_READS_MAX: usize = 4;

/// The beginning of the errors of a batch as a whole.
const BATCH_FAILED: &str = "failed to change nftables";

/// A connection to nf_tables in the network namespace it was opened in.
#[derive(Debug)]
pub struct Nft {
    socket: Result<Socket, Absence>,
    /// Whether a list is read only once, without a second reading that confirms the first. True
    /// from [`Nft::wait_for_generation`] to the next commit, which fails if the list has changed.
    one_reading_suffices: bool,
    /// The maximum number of readings of one list.
    reads_max: usize,
    /// The indexes that were used since the last transaction.
    pub(super) indexes: Vec<Index>,
}

/// Whether a change failed because another process changed the rules that it was based on
/// ([`Batch::only_at`]). The caller then reads the rules again and repeats the change.
pub fn raced(error: &Error) -> bool {
    error.errno() == Some(libc::ERESTART)
}

/// The number of the ruleset's state: every transaction, of any process, increments it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation(pub(crate) u32);

impl Nft {
    /// Opens a socket in the calling thread's network namespace. Succeeds on a kernel without
    /// nf_tables.
    ///
    /// # Errors
    /// The kernel's error, for example because too many files are open.
    pub fn open() -> Result<Nft> {
        let socket = match Socket::open(Protocol::Netfilter) {
            Ok(socket) => Ok(socket),
            Err(error) => Err(Absence::from_socket(error)?),
        };
        Ok(Nft { socket, one_reading_suffices: false, reads_max: READS_MAX, indexes: Vec::new() })
    }

    /// Returns the error of a transaction with changes on a kernel without nf_tables; `None` if no
    /// reading has shown yet that this kernel is one.
    pub fn absence(&self) -> Option<Error> {
        self.socket.as_ref().err().map(Absence::error)
    }

    /// Returns the socket; the error of a transaction if the kernel has no nf_tables.
    pub(super) fn socket(&mut self) -> Result<&mut Socket> {
        self.socket.as_mut().map_err(|absence| absence.error())
    }

    /// Makes all changes of the batch, or none.
    ///
    /// # Errors
    /// The kernel refuses a change, or does not answer. The error names the first refused change
    /// and has its errno, which [`Batch::ensure_base_chain`] replaces.
    pub fn commit(&mut self, batch: Batch) -> Result<()> {
        self.transact(batch, Ending::Commit)
    }

    /// Makes the kernel check the batch and discard it: fails as [`commit`](Nft::commit) would, but
    /// nothing changes and no notification is sent. Takes about 10 ms, because discarding waits for
    /// an RCU grace period, as it does after a refused `commit`.
    pub fn rehearse(&mut self, batch: Batch) -> Result<()> {
        self.transact(batch, Ending::Abort)
    }

    /// Sends the batch with this ending, and reports the transaction to the step log.
    fn transact(&mut self, batch: Batch, ending: Ending) -> Result<()> {
        let step = Step::begin();
        let what = match ending {
            Ending::Commit => "nftables transaction",
            Ending::Abort => "nftables rehearsal",
        };
        let mut refused_request = Vec::new();
        let result = self.send_batch(batch, ending, &mut refused_request);
        step.end_request(what, &result, || hex(&refused_request));
        result
    }

    /// Sends the batch and reads the kernel's answers. If the kernel refuses a change, the netlink
    /// message of the change is written to `refused_request`.
    fn send_batch(&mut self, batch: Batch, ending: Ending, refused_request: &mut Vec<u8>) -> Result<()> {
        let required_generation = batch.generation();
        self.one_reading_suffices = false;
        let indexes = std::mem::take(&mut self.indexes);
        let mut changes = batch.into_changes()?;
        for index in &indexes {
            index.prepare(&mut changes);
        }
        let Some(last) = changes.last_mut() else {
            // Nothing to send. But the caller decided to change nothing at the required generation,
            // and must decide again if the ruleset has changed since.
            return match required_generation {
                Some(expected) if self.generation()? != expected => Err(Error::new(BATCH_FAILED, Errno::ERESTART)),
                _ => Ok(()),
            };
        };
        // An acknowledgement is requested for the last change only: the kernel reports refusals
        // anyway, and older kernels never acknowledge the end message.
        last.flags |= NLM_F_ACK;
        let begin_attributes = match required_generation {
            Some(Generation(generation)) => wire::new_attribute(NFNL_BATCH_GENID, &generation.to_be_bytes()),
            None => Vec::new(),
        };
        let mut bytes = Vec::new();
        let first_sequence = self.write_control(NFNL_MSG_BATCH_BEGIN, &begin_attributes, &mut bytes)?;
        for change in &changes {
            change.write(self.socket()?.next_sequence(), &mut bytes);
        }
        // The kernel checks a batch without an end message, answers, and rolls it back.
        if let Ending::Commit = ending {
            self.write_control(NFNL_MSG_BATCH_END, &[], &mut bytes)?;
        }
        self.socket()?.send(&bytes).map_err(|cause| Error::new(BATCH_FAILED, cause))?;

        let (refusal, appended) = self.receive_answers(first_sequence, changes.len())?;
        let Some(refusal) = refusal else {
            let Ending::Commit = ending else { return Ok(()) };
            // Not `all`: each index is brought to the present state.
            let outdated = indexes.into_iter().filter_map(|index| (!index.finish(&changes, &appended)).then_some(()));
            return match outdated.count() {
                0 => Ok(()),
                // The changes are made, but another program's rules were not considered.
                _ => Err(Error::new(BATCH_FAILED, Errno::ERESTART)),
            };
        };
        // A file can name a rule that another program has deleted, or lack a rule.
        let is_planned_by_file = indexes.iter().any(|index| !index.is_fresh());
        indexes.into_iter().for_each(Index::discard);
        if is_planned_by_file {
            return Err(Error::new(BATCH_FAILED, Errno::ERESTART));
        }
        // A refusal of the begin or end message concerns the batch as a whole.
        let Some(change) = refusal.position.checked_sub(1).and_then(|index| changes.get(index)) else {
            return Err(Error::new(BATCH_FAILED, Cause::kernel(refusal.errno, refusal.text)));
        };
        let sequence = first_sequence.wrapping_add(u32::try_from(refusal.position).unwrap_or(0));
        change.write(sequence, refused_request);
        Err(refusal.into_error(change))
    }

    /// Receives the answers to a batch of `change_count` changes. Returns `None` if the kernel
    /// acknowledged the batch, otherwise the refusal of the earliest message: later refusals
    /// are often consequences. Also returns the rules that the kernel reports. `first_sequence` is
    /// the sequence number of the begin message.
    ///
    /// # Errors
    /// The kernel neither acknowledged nor refused the batch.
    fn receive_answers(
        &mut self,
        first_sequence: u32,
        change_count: usize,
    ) -> Result<(Option<Refusal>, Vec<Appended>)> {
        let (mut is_acknowledged, mut first_refusal) = (false, None::<Refusal>);
        let mut appended = Vec::new();
        while let Some(datagram) = self.socket()?.receive().map_err(|cause| Error::new(BATCH_FAILED, cause))? {
            for message in wire::messages(datagram) {
                let position = usize::try_from(message.sequence.wrapping_sub(first_sequence)).unwrap_or(usize::MAX);
                if position > change_count + 1 {
                    // A late answer to an earlier batch. Its answers overran the socket's buffer.
                    continue;
                }
                if message.kind == NEW_RULE {
                    appended.extend(index::appended(&message, position));
                }
                if message.kind != NLMSG_ERROR {
                    continue;
                }
                let Some((errno, text)) = wire::outcome(&message) else { continue };
                if errno == 0 {
                    is_acknowledged |= position == change_count;
                    continue;
                }
                if first_refusal.as_ref().is_none_or(|first| position < first.position) {
                    first_refusal = Some(Refusal { position, errno, text });
                }
            }
        }
        if first_refusal.is_none() && !is_acknowledged {
            return Err(Error::new(BATCH_FAILED, Cause::text("the kernel did not answer")));
        }
        Ok((first_refusal, appended))
    }

    /// Returns the chain's rules, in order; none if the chain does not exist. The kernel sends only
    /// this chain.
    pub fn rules(&mut self, table: Table<'_>, chain: &str) -> Result<Vec<Listed>> {
        self.rules_where(table, chain, |_| true)
    }

    /// Returns the chain's rules, in order, whose comment begins with `beginning`.
    pub fn rules_commented(&mut self, table: Table<'_>, chain: &str, beginning: &str) -> Result<Vec<Listed>> {
        self.rules_where(table, chain, |rule| decode::comment(rule).starts_with(beginning.as_bytes()))
    }

    /// Returns the chain's rules for which `matches` is true, in order. `matches` gets a rule's
    /// bytes as the kernel sends them: rules that do not match are not decoded, which saves most of
    /// the time.
    pub fn rules_where(
        &mut self,
        table: Table<'_>,
        chain: &str,
        matches: impl Fn(&[u8]) -> bool,
    ) -> Result<Vec<Listed>> {
        let what = format!("failed to list nft chain {table} {chain}");
        self.dump_rules(&what, table, Some(chain), |_, rule| if matches(rule) { decode::rule(rule) } else { None })
    }

    /// Returns the rules of all chains of the table for which `matches` is true, each with its
    /// chain's name, in order. `matches` gets the name and the rule's bytes. This is one request,
    /// however many chains the table has.
    pub fn rules_of_table(
        &mut self,
        table: Table<'_>,
        matches: impl Fn(&[u8], &[u8]) -> bool,
    ) -> Result<Vec<(String, Listed)>> {
        let what = format!("failed to list nft table {table}");
        self.dump_rules(&what, table, None, |chain, rule| {
            if !matches(chain, rule) {
                return None;
            }
            Some((String::from_utf8_lossy(chain).into_owned(), decode::rule(rule)?))
        })
    }

    /// Lists the rules of a chain, or of all chains of the table, and returns what `read` makes of
    /// each rule's chain and bytes.
    fn dump_rules<T>(
        &mut self,
        what: &str,
        table: Table<'_>,
        chain: Option<&str>,
        read: impl Fn(&[u8], &[u8]) -> Option<T>,
    ) -> Result<Vec<T>> {
        let mut attributes = vec![RuleAttribute::Table(table.name.into())];
        attributes.extend(chain.map(|chain| RuleAttribute::Chain(chain.into())));
        let request = NfTablesMessage::GetRule(RuleMessage { attributes });
        let rules = self.dump(what, table.family, request, |payload| {
            let place = decode::place(payload)?;
            // Old kernels send all rules of the family.
            let is_wanted_chain = chain.is_none_or(|chain| place.chain == chain.as_bytes());
            if place.table != table.name.as_bytes() || !is_wanted_chain {
                return None;
            }
            // The handle is returned even if the rule is left out: `dump` compares all handles.
            Some((place.handle, read(place.chain, payload)))
        })?;
        Ok(rules.into_iter().flatten().collect())
    }

    /// Like [`rules_where`](Nft::rules_where), but reads the chain only once if the ruleset does
    /// not change meanwhile. Not for chains at whose beginning other processes insert rules; see
    /// [`wait_for_generation`](Nft::wait_for_generation) for the reason.
    pub fn rules_at_once(
        &mut self,
        table: Table<'_>,
        chain: &str,
        matches: impl Fn(&[u8]) -> bool,
    ) -> Result<Vec<Listed>> {
        let what = format!("failed to list nft chain {table} {chain}");
        self.read_at_once(&what, |nft| nft.rules_where(table, chain, &matches))
    }

    /// Calls `read` until the ruleset does not change during the call, and returns its result.
    /// Within `read` each list is read only once. `what` begins an error's text.
    pub fn read_at_once<T>(&mut self, what: &str, mut read: impl FnMut(&mut Nft) -> Result<T>) -> Result<T> {
        for _ in 0..self.reads_max {
            let generation = self.wait_for_generation()?;
            let result = read(self);
            // `wait_for_generation` has set this until the next commit, which may never come.
            self.one_reading_suffices = false;
            let value = result?;
            if self.generation()? == generation {
                return Ok(value);
            }
        }
        Err(self.too_many_changes(what))
    }

    /// Calls `read`, within which reading a list fails soon if other processes keep changing it.
    /// For information that is not worth waiting for.
    pub fn with_few_retries<T>(&mut self, read: impl FnOnce(&mut Nft) -> Result<T>) -> Result<T> {
        self.reads_max = FEW_READS_MAX;
        let result = read(self);
        self.reads_max = READS_MAX;
        result
    }

    /// Returns the error for a list that was changed during each of its readings.
    fn too_many_changes(&self, what: &str) -> Error {
        let text = format!("other processes changed the rules during each of {} readings", self.reads_max);
        Error::new(what, Cause::text(text))
    }

    /// Returns the table's chains; none if the table does not exist. The kernel sends the chains of
    /// the whole family.
    pub fn chains(&mut self, table: Table<'_>) -> Result<Vec<Chain>> {
        let chains = self.chains_where(table.family, |in_table, _| in_table == table.name)?;
        Ok(chains.into_iter().map(|(_, chain)| chain).collect())
    }

    /// Returns the chain of this name; `None` if it does not exist.
    pub fn find_chain(&mut self, table: Table<'_>, name: &str) -> Result<Option<Chain>> {
        let what = format!("failed to read nft chain {table} {name}");
        let attributes = vec![ChainAttribute::Table(table.name.into()), ChainAttribute::Name(name.into())];
        let request = NfTablesMessage::GetChain(ChainMessage { attributes });
        let mut found = None;
        match self.ask(&what, table.family, &request, 0, |message| found = decode::chain(message.payload)) {
            Ok(_) => Ok(found.map(|(_, chain)| chain)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the chain exists and has this type, hook and priority. Callers check this before
    /// [`Batch::ensure_base_chain`], which leaves an existing chain unchanged but costs time: the
    /// kernel handles it as an update, frees memory after an RCU grace period, and closing the
    /// socket waits for that (12 ms on Linux 6.18).
    pub fn has_base_chain(&mut self, table: Table<'_>, name: &str, base: BaseChain) -> Result<bool> {
        Ok(self.find_chain(table, name)?.is_some_and(|chain| chain.base == Some(base)))
    }

    /// Adds the chain's creation to the batch only if the chain does not exist: for an existing
    /// chain, [`Batch::ensure_chain`] makes closing the socket slow, as
    /// [`has_base_chain`](Nft::has_base_chain) explains.
    pub fn add_missing_chain(&mut self, batch: &mut Batch, table: Table<'_>, name: &str) -> Result<()> {
        if self.find_chain(table, name)?.is_none() {
            batch.ensure_chain(table, name, None);
        }
        Ok(())
    }

    /// Returns the chains of the family for which `matches` is true, given the table's name and the
    /// chain; each with its table's name.
    pub fn chains_where(
        &mut self,
        family: Family,
        matches: impl Fn(&str, &Chain) -> bool,
    ) -> Result<Vec<(String, Chain)>> {
        let what = format!("failed to list the nft chains of family {}", family.name());
        let request = NfTablesMessage::GetChain(ChainMessage { attributes: Vec::new() });
        self.dump(&what, family, request, |payload| {
            let (table, chain) = decode::chain(payload)?;
            if matches(&table, &chain) { Some((chain.handle, (table, chain))) } else { None }
        })
    }

    /// Whether the set exists and contains the address.
    pub fn has_element(&mut self, table: Table<'_>, set: &str, address: std::net::IpAddr) -> Result<bool> {
        let what = format!("failed to read nft set {table} {set}");
        let request = NfTablesMessage::GetSetElement(super::batch::element(table, set, address));
        let mut found = false;
        match self.ask(&what, table.family, &request, 0, |_| found = true) {
            Ok(_) => Ok(found),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether rules of nf_tables can contain this xtables match or target. The kernel loads the
    /// extension's module if it is installed.
    pub(crate) fn has_extension(&mut self, family: Family, name: &str, revision: u32, kind: Extension) -> Result<bool> {
        const NFNL_MSG_COMPAT_GET: u16 = 0;
        const NFTA_COMPAT_NAME: u16 = 1;
        const NFTA_COMPAT_REV: u16 = 2;
        const NFTA_COMPAT_TYPE: u16 = 3;
        let kind = match kind {
            Extension::Match => 0_u32,
            Extension::Target => 1,
        };
        let body = [
            &[family.number(), 0, 0, 0][..],
            &wire::new_attribute(NFTA_COMPAT_NAME, &[name.as_bytes(), &[0]].concat()),
            &wire::new_attribute(NFTA_COMPAT_REV, &revision.to_be_bytes()),
            &wire::new_attribute(NFTA_COMPAT_TYPE, &kind.to_be_bytes()),
        ]
        .concat();
        let Ok(socket) = &mut self.socket else { return Ok(false) };
        let answer = socket.ask(NFNL_SUBSYS_NFT_COMPAT << 8 | NFNL_MSG_COMPAT_GET, 0, &body, &mut |_| {});
        let what = || format!("failed to ask the kernel for the xtables extension {name}");
        match answer.map_err(|cause| Error::new(what(), cause)) {
            Ok(_) => Ok(true),
            // ENOENT: the kernel does not have the extension. EINVAL: it has no nft_compat.
            Err(error) if error.is_not_found() || error.errno() == Some(libc::EINVAL) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the ruleset's generation, after waiting for a running transaction to end. The next
    /// batch that is committed must require this generation with [`Batch::only_at`]. Until then,
    /// each list is read only once: a change that spoils a reading also increments the generation,
    /// so the commit fails.
    ///
    /// Not for chains at whose beginning other processes insert rules: a transaction that does so
    /// and is aborted shifts the list while it is read, but leaves the generation unchanged.
    pub fn wait_for_generation(&mut self) -> Result<Generation> {
        const WHAT: &str = "failed to wait for the end of a change of nftables";
        let generation = self.generation()?;
        if self.socket.is_err() {
            return Ok(generation);
        }
        // The kernel increments the generation before it has taken removed rules off its lists, so
        // the lists are read only after the transaction that has led to this generation has ended.
        // An empty transaction waits for the running one, and does not increment the generation.
        let mut bytes = Vec::new();
        self.write_control(NFNL_MSG_BATCH_BEGIN, &[], &mut bytes)?;
        self.write_control(NFNL_MSG_BATCH_END, &[], &mut bytes)?;
        self.socket()?.send(&bytes).map_err(|cause| Error::new(WHAT, cause))?;
        self.one_reading_suffices = true;
        Ok(generation)
    }

    /// Returns the current generation of the network namespace's ruleset; always the same on a
    /// kernel without nf_tables.
    pub fn generation(&mut self) -> Result<Generation> {
        const WHAT: &str = "failed to read nftables' generation";
        let request = NfTablesMessage::GetGen(GenMessage { attributes: Vec::new() });
        let mut generation = None;
        // All families have the same generation.
        self.ask(WHAT, Family::Inet, &request, 0, |message| generation = decode::generation(message.payload))?;
        if self.socket.is_err() {
            return Ok(Generation(0));
        }
        generation.map(Generation).ok_or_else(|| Error::new(WHAT, Cause::text("the kernel's answer has no generation")))
    }

    /// Returns a list as it was at one instant: reads it until a reading is not interrupted and,
    /// unless `one_reading_suffices`, has the same handles as the reading before. Fails after
    /// `reads_max` readings. `read_object` returns an object's handle and its value, or `None`
    /// to leave the object out.
    ///
    /// The kernel sends a long list in parts, and begins each part by counting objects from the
    /// start. If rules are added or removed meanwhile, the count is wrong. Usually the kernel then
    /// sets a flag, or the objects have different generations. But not always, because a
    /// transaction adds rules to the list before it increments the generation, and takes removed
    /// rules off the list afterwards (on Linux 6.18, rules were missing in 1 of 1,200 reads beside
    /// a busy writer).
    fn dump<T>(
        &mut self,
        what: &str,
        family: Family,
        request: NfTablesMessage,
        read_object: impl Fn(&[u8]) -> Option<(u64, T)>,
    ) -> Result<Vec<T>> {
        let mut previous_handles = None;
        for _ in 0..self.reads_max {
            let (mut handles, mut values, mut generations) = (Vec::new(), Vec::new(), Vec::new());
            let is_uninterrupted = self.ask(what, family, &request, NLM_F_DUMP, |message| {
                let generation = decode::generation_low_bits(message.payload);
                if !generations.contains(&generation) {
                    generations.push(generation);
                }
                if let Some((handle, value)) = read_object(message.payload) {
                    handles.push(handle);
                    values.push(value);
                }
            })?;
            let is_confirmed = self.one_reading_suffices || previous_handles.as_ref() == Some(&handles);
            if is_uninterrupted && generations.len() <= 1 && is_confirmed {
                return Ok(values);
            }
            previous_handles = Some(handles);
        }
        Err(self.too_many_changes(what))
    }

    /// Sends one request and calls `on_object` for each object of the answer. Returns whether the
    /// answer is uninterrupted: `false` if the kernel flags that a transaction interrupted the
    /// list. On a kernel without nf_tables, the answer has no object. `what` begins an error's
    /// text.
    pub(super) fn ask(
        &mut self,
        what: &str,
        family: Family,
        request: &NfTablesMessage,
        flags: u16,
        mut on_object: impl FnMut(&Message<'_>),
    ) -> Result<bool> {
        let Ok(socket) = &mut self.socket else { return Ok(true) };
        let (kind, body) = family.message(request);
        match socket.ask(kind, flags, &body, &mut on_object).map_err(|cause| Error::new(what, cause)) {
            // These requests are well-formed: only a kernel without nf_tables answers EINVAL.
            Err(error) if error.errno() == Some(libc::EINVAL) => {
                self.socket = Err(Absence::from_refused_request(what));
                Ok(true)
            }
            // An old kernel without this family, which therefore has no objects.
            Err(error) if error.errno() == Some(libc::EAFNOSUPPORT) => Ok(true),
            result => result,
        }
    }

    /// Appends the begin or end message of a transaction to `bytes`, and returns its sequence
    /// number.
    fn write_control(&mut self, kind: u16, attributes: &[u8], bytes: &mut Vec<u8>) -> Result<u32> {
        let sequence = self.socket()?.next_sequence();
        // `struct nfgenmsg`: no family, version 0, the subsystem in network byte order.
        let [high, low] = NFNL_SUBSYS_NFTABLES.to_be_bytes();
        let payload = [&[0, 0, high, low][..], attributes].concat();
        Message { kind, flags: NLM_F_REQUEST, sequence, payload: &payload }.write(bytes);
        Ok(sequence)
    }
}

/// A kind of extension of xtables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extension {
    Match,
    Target,
}

/// What the kernel does with a batch: makes the changes, or checks and discards them.
enum Ending {
    Commit,
    Abort,
}
