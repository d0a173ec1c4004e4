//! Sends transactions to the kernel and reads consistent lists from it.
//!
//! The kernel handles a request while it is sent, and has queued the answer when sending returns.
//! So only sending can wait, for the transactions of other processes; a missing answer is an error.

use cni::steps::{Step, hex};
use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST};
use nix::errno::Errno;

use super::batch::{Batch, Change};
use super::decode;
use super::expr::ExtensionKind;
use super::index::{self, Appended, Index};
use super::lists::Retries;
use super::refusal::{Absence, Refusal};
use super::request::{Request, RequestType};
use super::{Family, NFNL_SUBSYS_NFTABLES};
use cni_linux::error::{Cause, Error, Result};
use cni_linux::netlink::socket::{Protocol, Socket};
use cni_linux::netlink::wire::{self, Message, NLMSG_ERROR};

const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
const NFNL_BATCH_GENID: u16 = 1;
/// The type of the kernel's messages with a rule.
const NEW_RULE: u16 = NFNL_SUBSYS_NFTABLES << 8 | RequestType::NewRule as u16;

/// The beginning of the errors of a batch as a whole.
const BATCH_FAILED: &str = "failed to change nftables";

/// A connection to nf_tables in the network namespace it was opened in.
#[derive(Debug)]
pub struct Nft {
    socket: Result<Socket, Absence>,
    /// Whether a list is read only once, without a second reading that confirms the first. True
    /// from [`Nft::wait_for_generation`] to the next commit, which fails if the list has changed.
    pub(super) one_reading_suffices: bool,
    /// The maximum number of readings of one list.
    pub(super) retries: Retries,
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
        Ok(Nft { socket, one_reading_suffices: false, retries: Retries::Many, indexes: Vec::new() })
    }

    /// Returns the error of a transaction with changes on a kernel without nf_tables; `None` if no
    /// reading has shown yet that this kernel is one.
    pub fn unsupported_error(&self) -> Option<Error> {
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

    /// Sends the batch and reads the kernel's answers. Ends the use of the indexes: updates them
    /// and their files after a commit, removes the files after a refusal, and otherwise only drops
    /// the indexes. If the kernel refuses a change, the netlink message of the change is written to
    /// `refused_request`.
    ///
    /// # Errors
    /// ERESTART ([`raced`]) if the caller must plan again: rules have changed since the required
    /// generation, or an index that was read from a file may have lacked rules or caused a refusal.
    fn send_batch(&mut self, batch: Batch, ending: Ending, refused_request: &mut Vec<u8>) -> Result<()> {
        let required_generation = batch.generation;
        self.one_reading_suffices = false;
        let indexes = std::mem::take(&mut self.indexes);
        let mut changes = batch.into_changes()?;
        if changes.is_empty() {
            // Nothing to send. But the caller decided to change nothing at the required generation,
            // and must decide again if the ruleset has changed since.
            return match required_generation {
                Some(expected) if self.generation()? != expected => Err(Error::new(BATCH_FAILED, Errno::ERESTART)),
                _ => Ok(()),
            };
        }
        for index in &indexes {
            index.request_reports(&mut changes);
        }
        let first_sequence = self.send_changes(&mut changes, required_generation, ending)?;
        let (refusal, appended) = self.receive_answers(first_sequence, changes.len())?;
        let Some(refusal) = refusal else {
            if ending == Ending::Abort {
                return Ok(());
            }
            let mut were_complete = true;
            for index in indexes {
                were_complete &= index.update(&changes, &appended);
            }
            // The changes are made. If an index was not complete, they were planned without rules
            // of another program, so the caller plans again.
            return if were_complete { Ok(()) } else { Err(Error::new(BATCH_FAILED, Errno::ERESTART)) };
        };
        // An outdated file can be the cause of the refusal: it names a rule that another program
        // has deleted, or lacks a rule. So the caller plans again, without the file.
        let is_planned_by_file = indexes.iter().any(|index| !index.is_fresh);
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

    /// Sends the messages of a transaction, and returns the sequence number of the first, the begin
    /// message. Each of the following messages has the next number.
    fn send_changes(
        &mut self,
        changes: &mut [Change],
        required_generation: Option<Generation>,
        ending: Ending,
    ) -> Result<u32> {
        // An acknowledgement is requested for the last change only: the kernel reports refusals
        // anyway, and older kernels never acknowledge the end message.
        if let Some(last) = changes.last_mut() {
            last.flags |= NLM_F_ACK;
        }
        let attribute_of = |Generation(number)| wire::new_attribute(NFNL_BATCH_GENID, &number.to_be_bytes());
        let begin_attributes = required_generation.map(attribute_of).unwrap_or_default();
        let mut bytes = Vec::new();
        let first_sequence = self.write_control(NFNL_MSG_BATCH_BEGIN, &begin_attributes, &mut bytes)?;
        for change in changes {
            change.write(self.socket()?.next_sequence(), &mut bytes);
        }
        // The kernel checks a batch without an end message, answers, and rolls it back.
        if ending == Ending::Commit {
            self.write_control(NFNL_MSG_BATCH_END, &[], &mut bytes)?;
        }
        self.socket()?.send(&bytes).map_err(|cause| Error::new(BATCH_FAILED, cause))?;
        Ok(first_sequence)
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
                    // A late answer to an earlier batch, whose answers overran the socket's buffer.
                    continue;
                }
                let is_earliest = first_refusal.as_ref().is_none_or(|first| position < first.position);
                match (message.kind, wire::outcome(&message)) {
                    (NEW_RULE, _) => appended.extend(index::appended(message.payload, position)),
                    // Only the last change requests an acknowledgement.
                    (NLMSG_ERROR, Some((0, _))) => is_acknowledged |= position == change_count,
                    (NLMSG_ERROR, Some((errno, text))) if is_earliest => {
                        first_refusal = Some(Refusal { position, errno, text });
                    }
                    _ => {}
                }
            }
        }
        if first_refusal.is_none() && !is_acknowledged {
            return Err(Error::new(BATCH_FAILED, Cause::text("the kernel did not answer")));
        }
        Ok((first_refusal, appended))
    }

    /// Whether rules of nf_tables can contain this xtables match or target. The kernel loads the
    /// extension's module if it is installed.
    pub(crate) fn has_extension(
        &mut self,
        family: Family,
        kind: ExtensionKind,
        name: &str,
        revision: u32,
    ) -> Result<bool> {
        const NFNL_SUBSYS_NFT_COMPAT: u16 = 11;
        const NFNL_MSG_COMPAT_GET: u16 = 0;
        const NFTA_COMPAT_NAME: u16 = 1;
        const NFTA_COMPAT_REV: u16 = 2;
        const NFTA_COMPAT_TYPE: u16 = 3;
        let request = Request::of_subsystem(NFNL_SUBSYS_NFT_COMPAT, NFNL_MSG_COMPAT_GET, family)
            .text(NFTA_COMPAT_NAME, name)
            .number(NFTA_COMPAT_REV, revision)
            .number(NFTA_COMPAT_TYPE, kind as u32);
        let Ok(socket) = &mut self.socket else { return Ok(false) };
        let answer = socket.ask(request.kind, 0, &request.body, &mut |_| {});
        let what = || format!("failed to ask the kernel for the xtables extension {name}");
        match answer.map_err(|cause| Error::new(what(), cause)) {
            Ok(_) => Ok(true),
            // ENOENT: the kernel does not have the extension. EINVAL: it has no nft_compat. Not
            // `Nft::ask`, for which EINVAL means that the kernel has no nf_tables.
            Err(error) if error.is_not_found() || error.errno() == Some(libc::EINVAL) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Begins reading for a batch: waits for a running transaction to end, returns the ruleset's
    /// generation, and makes each list be read only once until the next commit. The batch must
    /// require this generation with [`Batch::only_at`]: a change that spoils a reading also
    /// increments the generation, so the commit fails.
    ///
    /// Not for chains at whose beginning other processes insert rules: a transaction that does so
    /// and is aborted shifts the list while it is read, but leaves the generation unchanged.
    pub fn wait_for_generation(&mut self) -> Result<Generation> {
        const WHAT: &str = "failed to wait for the end of a change of nftables";
        let generation = self.generation()?;
        // A kernel without nf_tables has no transaction to wait for.
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
        // All families have the same generation.
        let request = Request::new(RequestType::GetGeneration, Family::Inet);
        match self.find(WHAT, &request, decode::generation)? {
            Some(generation) => Ok(Generation(generation)),
            None if self.socket.is_err() => Ok(Generation(0)),
            None => Err(Error::new(WHAT, Cause::text("the kernel's answer has no generation"))),
        }
    }

    /// Requests one object and returns what `read_object` reads in the answer; `None` if the object
    /// does not exist, or if the answer is malformed. `what` begins an error's text.
    pub(super) fn find<T>(
        &mut self,
        what: &str,
        request: &Request,
        read_object: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<Option<T>> {
        let mut found = None;
        match self.ask(what, request, 0, |object| found = read_object(object)) {
            Ok(_) => Ok(found),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends one request and calls `on_object` for each object of the answer. Returns whether the
    /// answer is uninterrupted: `false` if the kernel flags that a transaction interrupted the
    /// list. On a kernel without nf_tables, the answer has no object. If the answer shows that the
    /// kernel is one, later requests are not sent. `what` begins an error's text.
    pub(super) fn ask(
        &mut self,
        what: &str,
        request: &Request,
        flags: u16,
        mut on_object: impl FnMut(&[u8]),
    ) -> Result<bool> {
        let Ok(socket) = &mut self.socket else { return Ok(true) };
        let answer = socket.ask(request.kind, flags, &request.body, &mut |message| on_object(message.payload));
        match answer.map_err(|cause| Error::new(what, cause)) {
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

/// What the kernel does with a batch: makes the changes, or checks and discards them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Commit,
    Abort,
}
