//! The conversation with the kernel: transactions with their answers, dumps that are consistent.
//!
//! Nothing here ever waits: an answer that is not there when the request has been sent will not
//! come, and is an error.

use cni::steps::{Step, hex};
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST};
use netlink_packet_netfilter::nftables::{
    ChainAttribute, ChainMessage, GenMessage, NfTablesMessage, RuleAttribute, RuleMessage,
};
use nix::errno::Errno;

use super::batch::{Batch, ErrnoMeaning};
use super::decode;
use super::{BaseChain, Chain, Family, Listed, NFNL_SUBSYS_NFT_COMPAT, NFNL_SUBSYS_NFTABLES, Table};
use cni_linux::error::{Cause, Error, Result};
use cni_linux::netlink::socket::{Protocol, Socket};
use cni_linux::netlink::wire::{self, Message, NLMSG_ERROR};

const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
const NFNL_BATCH_GENID: u16 = 1;

/// How often a list is read until two readings agree. Every change of the rules spoils at most two,
/// so this is reached by an endless stream of changes only.
const DUMPS: usize = 512;
/// The same where an answer in time is worth more than an answer.
const HURRIED: usize = 4;

/// A connection to nf_tables in the network namespace it was opened in.
#[derive(Debug)]
pub struct Nft {
    socket: Socket,
    /// Whether a list counts at its first reading: between [`Nft::wait_for_generation`] and the
    /// next commit.
    settled: bool,
    /// How often a list is read.
    dumps: usize,
}

/// Whether a change failed because another process changed the rules it was based on: read again
/// and repeat, with a bound.
pub fn raced(error: &Error) -> bool {
    error.is_not_found() || error.is_exists() || error.errno() == Some(libc::ERESTART)
}

/// The number of the ruleset's state: every transaction, of any process, increments it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation(pub(crate) u32);

/// Whether one of these pairs stands anywhere in a rule as the kernel sends it, in one pass. Only
/// even places are looked at: the kernel's attributes begin at multiples of four, and the
/// structures of xtables in them have their ports at even places. What this costs is much of what a
/// long chain costs.
pub fn occurs(rule: &[u8], wanted: &[[u8; 2]]) -> bool {
    rule.as_chunks::<2>().0.iter().any(|pair| wanted.contains(pair))
}

/// Whether the rule contains the text, or an address in network byte order, at such a place.
pub fn mentions(rule: &[u8], text: impl AsRef<[u8]>) -> bool {
    let Some((first, rest)) = text.as_ref().split_first_chunk::<2>() else { return true };
    let follows = |place: usize| rule.get(2 * place + 2..).is_some_and(|after| after.starts_with(rest));
    rule.as_chunks::<2>().0.iter().enumerate().any(|(place, pair)| pair == first && follows(place))
}

/// A failure that [`Error::is_unsupported`] recognises, with the kernel's vaguer words kept.
fn unsupported(what: &str, why: &str, errno: Errno) -> Error {
    Error::new(what, Cause::kernel(libc::EOPNOTSUPP, Some(format!("{why} ({errno})"))))
}

impl Nft {
    /// Opens a socket in the calling thread's network namespace. A kernel without netfilter's
    /// netlink: [`Error::is_unsupported`].
    pub fn open() -> Result<Nft> {
        let socket = Socket::open(Protocol::Netfilter);
        let socket = socket.map_err(|error| Error::new("failed to open a netfilter socket", error))?;
        Ok(Nft { socket, settled: false, dumps: DUMPS })
    }

    /// Makes all changes of the batch, or none. The error names the first change that the kernel
    /// refused, with its errno.
    pub fn commit(&mut self, batch: Batch) -> Result<()> {
        self.transact(batch, Ending::Commit)
    }

    /// Has the kernel check the batch and discard it: nothing changes, no notification is sent.
    /// Discarding takes an RCU grace period, some 10 ms; so does a refused [`commit`](Nft::commit).
    pub fn rehearse(&mut self, batch: Batch) -> Result<()> {
        self.transact(batch, Ending::Abort)
    }

    fn transact(&mut self, batch: Batch, ending: Ending) -> Result<()> {
        let step = Step::begin();
        let what = match ending {
            Ending::Commit => "nftables transaction",
            Ending::Abort => "nftables rehearsal",
        };
        let mut refused = Vec::new();
        let done = self.transact_unheard(batch, ending, &mut refused);
        step.end_request(what, &done, || hex(&refused));
        done
    }

    /// `request` becomes the change that was refused, as it went out.
    fn transact_unheard(&mut self, batch: Batch, ending: Ending, request: &mut Vec<u8>) -> Result<()> {
        const WHOLE: &str = "failed to change nftables";
        let generation = batch.generation();
        self.settled = false;
        let mut changes = batch.into_changes()?;
        let Some(last) = changes.last_mut() else {
            // An empty batch, too, is only valid if no rule has changed meanwhile.
            return match generation {
                Some(wanted) if self.generation()? != wanted => Err(Error::new(WHOLE, Errno::ERESTART)),
                _ => Ok(()),
            };
        };
        // One acknowledgement is enough, refusals come unasked. Older kernels never acknowledge
        // the end itself.
        last.flags |= NLM_F_ACK;
        let begin = match generation {
            Some(Generation(generation)) => wire::new_attribute(NFNL_BATCH_GENID, &generation.to_be_bytes()),
            None => Vec::new(),
        };
        let mut bytes = Vec::new();
        let first = self.write_control(NFNL_MSG_BATCH_BEGIN, &begin, &mut bytes);
        for change in &changes {
            change.write(self.socket.next_sequence(), &mut bytes);
        }
        match ending {
            Ending::Commit => drop(self.write_control(NFNL_MSG_BATCH_END, &[], &mut bytes)),
            // Without its end the kernel checks a batch, answers, and rolls it back.
            Ending::Abort => {}
        }
        self.socket.send(&bytes).map_err(|cause| Error::new(WHOLE, cause))?;

        let (mut acknowledged, mut refused) = (false, None::<(usize, i32, Option<String>)>);
        while let Some(datagram) = self.socket.receive().map_err(|cause| Error::new(WHOLE, cause))? {
            for message in wire::messages(datagram).filter(|message| message.kind == NLMSG_ERROR) {
                let Some((errno, said)) = wire::outcome(&message) else { continue };
                // 0: the batch as a whole. Then come the changes, then the end.
                let at = usize::try_from(message.sequence.wrapping_sub(first)).unwrap_or(usize::MAX);
                match errno {
                    // A late answer to an earlier batch, which was given up on an overrun.
                    _ if at > changes.len() + 1 => {}
                    0 => acknowledged |= at == changes.len(),
                    // A later refusal is often a consequence of the first.
                    errno if refused.as_ref().is_none_or(|(before, ..)| at < *before) => {
                        refused = Some((at, errno, said));
                    }
                    _ => {}
                }
            }
        }
        let Some((at, errno, said)) = refused else {
            let silent = || Error::new(WHOLE, Cause::text("the kernel did not answer"));
            return if acknowledged { Ok(()) } else { Err(silent()) };
        };
        let change = at.checked_sub(1).and_then(|at| changes.get(at));
        let what = change.map_or(WHOLE, |change| change.what.as_str());
        if let Some(change) = change {
            change.write(first.wrapping_add(u32::try_from(at).unwrap_or(0)), request);
        }
        Err(match (errno, change.map(|change| change.meaning)) {
            (libc::ENOENT, Some(ErrnoMeaning::BaseChain)) => unsupported(what, "no such type of chain", Errno::ENOENT),
            // Kernels differ in how they refuse to change a base chain's hook; on older ones it is
            // EEXIST.
            (libc::EOPNOTSUPP, Some(ErrnoMeaning::BaseChain)) => {
                let ack = Some("with another hook, type or priority".into());
                Error::new(what, Cause::kernel(libc::EEXIST, ack))
            }
            _ => Error::new(what, Cause::kernel(errno, said)),
        })
    }

    /// The chain's rules, in order; none if there is no such chain. Only this chain is read,
    /// however many others there are.
    pub fn rules(&mut self, table: Table<'_>, chain: &str) -> Result<Vec<Listed>> {
        self.rules_where(table, chain, |_| true)
    }

    /// Returns the chain's rules, in order, whose comment begins so.
    pub fn rules_commented(&mut self, table: Table<'_>, chain: &str, beginning: &str) -> Result<Vec<Listed>> {
        self.rules_where(table, chain, |rule| decode::comment(rule).starts_with(beginning.as_bytes()))
    }

    /// Returns the chain's rules, in order, for whose bytes, as the kernel sends them, `wanted` is
    /// true. The others are read too, but not decoded, which takes a fraction of the time.
    pub fn rules_where(
        &mut self,
        table: Table<'_>,
        chain: &str,
        wanted: impl Fn(&[u8]) -> bool,
    ) -> Result<Vec<Listed>> {
        let what = format!("failed to list nft chain {table} {chain}");
        let attributes = vec![RuleAttribute::Table(table.name.into()), RuleAttribute::Chain(chain.into())];
        let request = NfTablesMessage::GetRule(RuleMessage { attributes });
        // Kernels that do not filter send everything of the family.
        let rules = self.dump(&what, table, request, |payload| {
            let (in_table, in_chain, handle) = decode::place(payload)?;
            if (in_table, in_chain) != (table.name.as_bytes(), chain.as_bytes()) {
                return None;
            }
            Some((handle, wanted(payload).then(|| decode::rule(payload)).flatten().map(|(.., listed)| listed)))
        })?;
        Ok(rules.into_iter().flatten().collect())
    }

    /// The same, read only once if no rule changes meanwhile. Not for chains into which
    /// others put rules at the front, see [`wait_for_generation`](Nft::wait_for_generation).
    pub fn rules_at_once(
        &mut self,
        table: Table<'_>,
        chain: &str,
        wanted: impl Fn(&[u8]) -> bool,
    ) -> Result<Vec<Listed>> {
        let what = format!("failed to list nft chain {table} {chain}");
        self.at_once(&what, |nft| nft.rules_where(table, chain, &wanted))
    }

    /// Reads lists, each once, if the ruleset does not change meanwhile; else repeats all reads.
    /// The restriction of [`rules_at_once`](Nft::rules_at_once) applies.
    fn at_once<T>(&mut self, what: &str, mut read: impl FnMut(&mut Nft) -> Result<T>) -> Result<T> {
        for _ in 0..self.dumps {
            let generation = self.wait_for_generation()?;
            let found = read(self);
            self.settled = false;
            let found = found?;
            if self.generation()? == generation {
                return Ok(found);
            }
        }
        Err(self.disturbed(what))
    }

    /// Whether the chain has such a rule, by one reading of this chain alone. For a hint that is
    /// read again before anything is done: a chain that takes the kernel more than one part may
    /// hide a rule while it is changed.
    pub fn has_rule(&mut self, table: Table<'_>, chain: &str, wanted: impl Fn(&[u8]) -> bool) -> Result<bool> {
        let settled = std::mem::replace(&mut self.settled, true);
        let found = self.rules_where(table, chain, wanted);
        self.settled = settled;
        Ok(!found?.is_empty())
    }

    /// Reads what is not worth a wait: a list that is changed a few times while it is read is an
    /// error.
    pub fn with_few_retries<T>(&mut self, read: impl FnOnce(&mut Nft) -> Result<T>) -> Result<T> {
        self.dumps = HURRIED;
        let found = read(self);
        self.dumps = DUMPS;
        found
    }

    fn disturbed(&self, what: &str) -> Error {
        Error::new(what, Cause::text(format!("the rules were changed under it {} times", self.dumps)))
    }

    /// The table's chains; none if there is no such table. The kernel sends the chains of the whole
    /// family.
    pub fn chains(&mut self, table: Table<'_>) -> Result<Vec<Chain>> {
        let chains = self.chains_where(table.family, |in_table, _| in_table == table.name)?;
        Ok(chains.into_iter().map(|(_, chain)| chain).collect())
    }

    /// One chain by name.
    pub fn find_chain(&mut self, table: Table<'_>, name: &str) -> Result<Option<Chain>> {
        let what = format!("failed to read nft chain {table} {name}");
        let attributes = vec![ChainAttribute::Table(table.name.into()), ChainAttribute::Name(name.into())];
        let request = NfTablesMessage::GetChain(ChainMessage { attributes });
        let mut found = None;
        match self.ask(&what, table, &request, 0, |message| found = decode::chain(message.payload)) {
            Ok(_) => Ok(found.map(|(_, chain)| chain)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the chain exists and is hooked in like this. Callers ask before
    /// [`Batch::ensure_base_chain`]: to name an existing chain in a transaction is a change of it,
    /// whose memory the kernel frees after an RCU grace period, and closing the socket waits for
    /// that (6.18: 12 ms).
    pub fn has_base_chain(&mut self, table: Table<'_>, name: &str, base: BaseChain) -> Result<bool> {
        Ok(self.find_chain(table, name)?.is_some_and(|chain| chain.base == Some(base)))
    }

    /// Adds the chain to the batch unless it exists, for the reason given at
    /// [`has_base_chain`](Nft::has_base_chain).
    pub fn add_missing_chain(&mut self, batch: &mut Batch, table: Table<'_>, name: &str) -> Result<()> {
        if self.find_chain(table, name)?.is_none() {
            batch.ensure_chain(table, name, None);
        }
        Ok(())
    }

    /// The chains of all tables of the family that are `wanted`, each with its table.
    pub fn chains_where(
        &mut self,
        family: super::Family,
        wanted: impl Fn(&str, &Chain) -> bool,
    ) -> Result<Vec<(String, Chain)>> {
        let what = format!("failed to list the nft chains of family {}", family.name());
        let request = NfTablesMessage::GetChain(ChainMessage { attributes: Vec::new() });
        self.dump(&what, Table { family, name: "" }, request, |payload| {
            let (table, chain) = decode::chain(payload)?;
            wanted(&table, &chain).then_some((chain.handle, (table, chain)))
        })
    }

    /// Whether the address is in the set; not if there is no such set.
    pub fn has_element(&mut self, table: Table<'_>, set: &str, address: std::net::IpAddr) -> Result<bool> {
        let what = format!("failed to read nft set {table} {set}");
        let request = NfTablesMessage::GetSetElement(super::batch::element(table, set, address));
        match self.ask(&what, table, &request, 0, |_| {}) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether rules of nf_tables can have this match or target of xtables; the kernel loads its
    /// module if there is one.
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
        match self.socket.ask(NFNL_SUBSYS_NFT_COMPAT << 8 | NFNL_MSG_COMPAT_GET, 0, &body, &mut |_| {}) {
            Ok(_) => Ok(true),
            Err(cause) => match Error::new(format_args!("failed to ask for {name} of xtables"), cause) {
                // EINVAL: a kernel without nft_compat.
                error if error.is_not_found() || error.errno() == Some(libc::EINVAL) => Ok(false),
                error => Err(error),
            },
        }
    }

    /// Where the ruleset stands, for [`Batch::only_at`], once the transaction that brought it there
    /// is over. From here to the next commit lists are read once: whatever disturbs a reading also
    /// takes the generation on, and that commit fails. Not for chains into which others put rules
    /// at the front: if such a transaction is given up in the middle, it has shifted the list and
    /// left no trace.
    pub fn wait_for_generation(&mut self) -> Result<Generation> {
        const WHAT: &str = "failed to wait for the end of a change of nftables";
        let generation = self.generation()?;
        // The kernel announces a generation before it has taken removed rules off its lists. A
        // transaction without changes has to wait for the one at work, and is none itself.
        let mut bytes = Vec::new();
        self.write_control(NFNL_MSG_BATCH_BEGIN, &[], &mut bytes);
        self.write_control(NFNL_MSG_BATCH_END, &[], &mut bytes);
        self.socket.send(&bytes).map_err(|cause| Error::new(WHAT, cause))?;
        self.settled = true;
        Ok(generation)
    }

    /// Where the ruleset of this network namespace stands.
    pub fn generation(&mut self) -> Result<Generation> {
        const WHAT: &str = "failed to read nftables' generation";
        let any = Table { family: super::Family::Inet, name: "" };
        let request = NfTablesMessage::GetGen(GenMessage { attributes: Vec::new() });
        let mut generation = None;
        self.ask(WHAT, any, &request, 0, |message| generation = decode::whole_generation(message.payload))?;
        generation.map(Generation).ok_or_else(|| Error::new(WHAT, Cause::text("the kernel's answer does not have it")))
    }

    /// All of a list, as it was at one instant.
    ///
    /// The kernel sends a long list in parts and continues each by counting from the list's start.
    /// It flags a transaction that began in between, and each object names its generation. But it
    /// takes removed rules out of the list only after the new generation has begun, and puts those
    /// of an unfinished transaction in before: then the count is off, and neither sign shows it
    /// (6.18: rules missing in 1 of 1,200 reads beside a busy writer). So a list counts only if the
    /// next reading finds the very same objects.
    fn dump<T>(
        &mut self,
        what: &str,
        table: Table<'_>,
        request: NfTablesMessage,
        decode: impl Fn(&[u8]) -> Option<(u64, T)>,
    ) -> Result<Vec<T>> {
        let mut before = None;
        for _ in 0..self.dumps {
            let (mut handles, mut items, mut generation, mut whole) = (Vec::new(), Vec::new(), None, true);
            let undisturbed = self.ask(what, table, &request, NLM_F_DUMP, |message| {
                let seen = decode::generation(message.payload);
                whole &= *generation.get_or_insert(seen) == seen;
                if let Some((handle, item)) = decode(message.payload) {
                    handles.push(handle);
                    items.push(item);
                }
            })?;
            if undisturbed && whole && (self.settled || before.as_ref() == Some(&handles)) {
                return Ok(items);
            }
            before = Some(handles);
        }
        Err(self.disturbed(what))
    }

    /// Sends one request and hands over each object of the answer. Returns whether the list was
    /// read undisturbed.
    fn ask(
        &mut self,
        what: &str,
        table: Table<'_>,
        request: &NfTablesMessage,
        flags: u16,
        mut object: impl FnMut(&Message<'_>),
    ) -> Result<bool> {
        let (kind, body) = table.family.message(request);
        let answer = self.socket.ask(kind, flags, &body, &mut object);
        answer.map_err(|cause| match Error::new(what, cause) {
            // Only a kernel without nf_tables rejects the form of these requests.
            error if error.errno() == Some(libc::EINVAL) => unsupported(what, "no nf_tables", Errno::EINVAL),
            error => error,
        })
    }

    /// Writes the beginning or the end of a transaction, and returns its number.
    fn write_control(&mut self, kind: u16, attributes: &[u8], bytes: &mut Vec<u8>) -> u32 {
        let sequence = self.socket.next_sequence();
        // No family, no version; the subsystem, in the network's byte order.
        let [high, low] = NFNL_SUBSYS_NFTABLES.to_be_bytes();
        let payload = [&[0, 0, high, low][..], attributes].concat();
        Message { kind, flags: NLM_F_REQUEST, sequence, payload: &payload }.write(bytes);
        sequence
    }
}

/// A kind of extension of xtables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extension {
    Match,
    Target,
}

/// How a transaction ends.
enum Ending {
    Commit,
    Abort,
}
