//! Finds rules in a long chain without reading all of its rules.
//!
//! An *index* of a chain is a file with the handle of each rule and, as hashes, the *keys* by which
//! the rule is searched: its comment, its ports, its addresses. It saves the kernel some 5 µs for
//! each rule of other containers.
//!
//! The file is a hint. It is used only if it describes the chain as it is now:
//! - Namespace, table and chain are the ones for which the file was written. Their numbers are
//!   never used twice until the next boot, and the number of a rule is never used twice in a table.
//! - The kernel counts as many rules in the chain as the file has.
//! - A transaction that appends rules makes the kernel report whether the last of them is the last
//!   of the chain. If not, another program has appended rules, the file is removed, and the caller
//!   plans again from all rules, as after a race.
//!
//! So the rules that another program appends are found, also if it removes as many: what the Go
//! plugins do. Not found is a rule that another program inserts elsewhere in the chain after
//! removing another one. Without the file, with a file that does not fit, and for a short chain,
//! all rules are read, and a file is written for the next call.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::batch::{ChainPlace, Change, RuleChange, place_of};
use super::request::{Request, RequestType, number_attribute};
use super::{Chain, Listed, Nft, Table, decode};
use cni_linux::error::Result;
use cni_linux::netlink::wire;
use netlink_packet_core::NLM_F_ECHO;

mod entries;

pub(crate) use entries::Key;
use entries::{Entry, entries, write_entry};

/// The folder of the files.
const FOLDER: &str = "/run/cni";
/// The file of the calling thread's network namespace.
const NETNS: &str = "/proc/thread-self/ns/net";
/// The file with the number of the boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The last bytes of a file, with the version of its format.
const MAGIC: &[u8; 8] = b"cniidx2\n";
/// The number of rules from which a chain has an index. The kernel sends this many rules in one
/// datagram or two.
const RULES_MIN: u32 = 64;
/// The number of rules of a transaction above which the kernel is not asked to report them: more
/// reports could overrun the socket's receive buffer.
const REPORTS_MAX: usize = 64;
/// The size of a file above which it is not read: that of a million rules.
const FILE_MAX: u64 = 64 << 20;

/// What a search does if the chain's index lacks a wanted key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IfMissing {
    /// Trusts the index. For a caller that then appends the missing rule: the kernel reports with
    /// the transaction whether the index had all rules. If the caller appends nothing to the chain,
    /// a rule that the index lacks is overlooked.
    TrustIndex,
    /// Reads all rules of the chain. For all other callers, for example those that delete rules.
    ReadAll,
}

/// How a feature searches the rules of one of its chains.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Search<'a> {
    /// Returns the keys of a rule of the chain; none for a rule that every search must return.
    pub(crate) keys_of: fn(&Listed) -> Vec<Key>,
    /// The keys that the rules that the caller appends have in addition.
    pub(crate) appended: &'a [Key],
    /// The keys of the wanted rules.
    pub(crate) wanted: &'a [Key],
    /// What the search does if the index lacks a wanted key.
    pub(crate) if_missing: IfMissing,
}

impl Search<'_> {
    /// Whether the search must return the rule.
    pub(crate) fn wants(&self, listed: &Listed) -> bool {
        let keys = (self.keys_of)(listed);
        keys.is_empty() || keys.iter().any(|key| self.wanted.contains(key))
    }
}

/// The index of one chain.
#[derive(Debug)]
pub(crate) struct Index {
    path: PathBuf,
    place: ChainPlace,
    /// The bytes that tell the chain from all others: the numbers of its namespace, its table and
    /// itself, and that of the boot.
    identity: Vec<u8>,
    /// The kernel's number of the chain's rules and of the jumps to it.
    uses: u32,
    /// The [`entries`] as they are in the file, which has thousands: decoding them would take
    /// longer than the search.
    entries: Vec<u8>,
    /// As in [`Search`].
    keys_of: fn(&Listed) -> Vec<Key>,
    appended: Vec<Key>,
    /// Whether the index was made from all rules of the chain since the last transaction.
    pub(super) is_fresh: bool,
}

/// What a transaction does to the rules of one chain.
#[derive(Default)]
struct Effects {
    /// The indices of the changes that append a rule.
    appends: Vec<usize>,
    /// The handles of the rules that are deleted.
    deleted: Vec<u64>,
    /// Whether the rules are changed in another way.
    has_others: bool,
}

/// What the kernel reports of a rule that a transaction has appended.
#[derive(Debug)]
pub(crate) struct Appended {
    /// The position of its message in the batch.
    pub(crate) position: usize,
    pub(crate) listed: Listed,
    /// Whether no rule follows it.
    pub(crate) is_last: bool,
}

/// Whether the chain is so long that an index saves time.
pub(crate) fn is_long(chain: &Chain) -> bool {
    chain.uses >= RULES_MIN
}

impl Index {
    /// Whether this is the index of the chain.
    fn is_of(&self, table: Table<'_>, chain: &Chain) -> bool {
        self.place == place_of(table, &chain.name)
    }

    /// Returns the handles of the rules that may have one of the wanted keys, in the order of the
    /// chain, and whether there is a rule with each of the keys.
    fn find(&self, wanted: &[Key]) -> (Vec<u64>, bool) {
        let may_have = |entry: &Entry<'_>| entry.keys.is_empty() || wanted.iter().any(|key| entry.has(key));
        let found: Vec<Entry<'_>> = entries(&self.entries).filter(may_have).collect();
        let has_all = wanted.iter().all(|key| found.iter().any(|entry| entry.has(key)));
        (found.iter().map(|entry| entry.handle).collect(), has_all)
    }

    /// Changes the appending of rules to this chain so that the kernel reports whether another
    /// program has appended rules since the index was made: the first is added after the last rule
    /// that the index knows, and each other after the one before it. Only the first makes the
    /// kernel search the chain.
    pub(crate) fn request_reports(&self, changes: &mut [Change]) {
        const NFTA_RULE_POSITION: u16 = 6;
        const NFTA_RULE_ID: u16 = 9;
        const NFTA_RULE_POSITION_ID: u16 = 10;
        let Effects { appends, deleted, .. } = self.effects(changes);
        // There is nothing to report, or too much. If an appended rule is not reported, `update`
        // removes the file, and does not trust an index that was read from a file.
        if appends.is_empty() || appends.len() > REPORTS_MAX {
            return;
        }
        // The last rule that remains. Without one, nothing is reported either.
        let last = entries(&self.entries).filter(|entry| !deleted.contains(&entry.handle)).last();
        let Some(last) = last else { return };
        let mut after = wire::new_attribute(NFTA_RULE_POSITION, &last.handle.to_be_bytes());
        for append in appends {
            // The ID is a number that no other rule of the transaction has.
            let (change, id) = (&mut changes[append], u32::try_from(append).unwrap_or_default());
            change.flags |= NLM_F_ECHO;
            change.body.append(&mut after);
            change.body.extend(number_attribute(NFTA_RULE_ID, id));
            after = number_attribute(NFTA_RULE_POSITION_ID, id);
        }
    }

    /// Brings the index to the state after a transaction, and writes the file; removes the file if
    /// the chain has become short. `reported` are the appended rules that the kernel has reported.
    ///
    /// Also removes the file if the state is not known: the kernel has not reported an appended
    /// rule, a rule follows the last appended one, or the transaction has changed the rules in
    /// another way. Then returns `false` if the index was read from a file: the file may have
    /// lacked rules when the transaction was planned, so the caller must plan again.
    pub(crate) fn update(mut self, changes: &[Change], reported: &[Appended]) -> bool {
        let Effects { appends, deleted, has_others } = self.effects(changes);
        // The begin message has position 0 in the batch, and the first change position 1.
        let report_of = |append: &usize| reported.iter().find(|rule| rule.position == append + 1);
        // `None` if a report is missing.
        let reports: Option<Vec<&Appended>> = appends.iter().map(report_of).collect();
        let suffice = |reports: &Vec<&Appended>| !has_others && reports.last().is_none_or(|last| last.is_last);
        let Some(reports) = reports.filter(suffice) else {
            // A fresh index had all rules when the transaction was planned.
            let was_complete = self.is_fresh;
            self.discard();
            return was_complete;
        };
        if !deleted.is_empty() {
            let remaining = entries(&self.entries).filter(|entry| !deleted.contains(&entry.handle));
            self.entries = remaining.map(|entry| entry.bytes).collect::<Vec<_>>().concat();
        }
        for report in reports {
            let mut keys = (self.keys_of)(&report.listed);
            // A rule without keys stays without: every search must return it.
            if !keys.is_empty() {
                keys.extend(&self.appended);
            }
            write_entry(report.listed.handle, &keys, &mut self.entries);
        }
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        self.uses = self.uses.saturating_add(count(appends.len())).saturating_sub(count(deleted.len()));
        // No call would use the file of a short chain.
        if self.uses >= RULES_MIN {
            self.save();
        } else {
            self.discard();
        }
        true
    }

    /// Removes the file.
    pub(crate) fn discard(self) {
        // If that fails, the next search finds again that the file does not describe the chain.
        let _ = fs::remove_file(self.path);
    }

    /// Writes the file. A failure is not reported: the old file then describes the chain before the
    /// transaction, and is treated as after a transaction of another program.
    fn save(mut self) {
        self.entries.extend(self.tail());
        // Always the same name, so that a killed process leaves one file at most. Of two processes
        // at once, one can publish the file of the other, which is complete.
        let temporary = self.path.with_extension("tmp");
        let _ = DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(FOLDER)
            .and_then(|()| cni_linux::file::replace(&self.path, &temporary, &self.entries));
    }

    /// Returns the end of the file: everything that must be the same for the file to be used. A
    /// file that was cut has no such end.
    fn tail(&self) -> Vec<u8> {
        [self.identity.as_slice(), &self.uses.to_ne_bytes(), MAGIC].concat()
    }

    /// Returns what the changes do to the rules of this chain.
    fn effects(&self, changes: &[Change]) -> Effects {
        let mut effects = Effects::default();
        for (index, change) in changes.iter().enumerate() {
            let Some((_, effect)) = change.rules.as_ref().filter(|(place, _)| *place == self.place) else { continue };
            match effect {
                RuleChange::Append => effects.appends.push(index),
                RuleChange::Delete(handle) => effects.deleted.push(*handle),
                RuleChange::Other => effects.has_others = true,
            }
        }
        effects
    }
}

impl Nft {
    /// Returns the chain's rules that have one of the wanted keys, in order; other rules can be
    /// among them. Of a long chain with an index, reads only these. Of a long chain without one,
    /// reads all rules, and makes an index. The next transaction with changes, of whatever chain,
    /// writes the file of the index. Without changes, no file is written.
    pub(crate) fn rules_with_keys(
        &mut self,
        table: Table<'_>,
        chain: &Chain,
        search: Search<'_>,
    ) -> Result<Vec<Listed>> {
        if is_long(chain)
            && let Some(found) = self.rules_by_index(table, chain, search)?
        {
            return Ok(found);
        }
        let mut rules = self.rules(table, &chain.name)?;
        if is_long(chain) {
            let entries = rules.iter().map(|listed| (listed.handle, (search.keys_of)(listed)));
            self.add_index(table, chain, search, entries)?;
        }
        rules.retain(|listed| search.wants(listed));
        Ok(rules)
    }

    /// Makes an index of a long chain. `rules` are the handle and the keys of each of its rules.
    /// The next transaction with changes writes the file. A chain that only seems long because many
    /// rules jump to it gets no index.
    pub(crate) fn add_index(
        &mut self,
        table: Table<'_>,
        chain: &Chain,
        search: Search<'_>,
        rules: impl Iterator<Item = (u64, Vec<Key>)>,
    ) -> Result<()> {
        let (mut entries, mut count) = (Vec::new(), 0);
        for (handle, keys) in rules {
            write_entry(handle, &keys, &mut entries);
            count += 1;
        }
        if count >= RULES_MIN {
            let index = self.new_index(table, chain, search)?;
            self.indexes.extend(index.map(|index| Index { entries, ..index }));
        }
        Ok(())
    }

    /// Makes the next transaction, which appends rules to the chain, also update the chain's index,
    /// if there is one. Otherwise the index would not describe the chain any more.
    pub(crate) fn keep_index(
        &mut self,
        table: Table<'_>,
        chain: &Chain,
        keys_of: fn(&Listed) -> Vec<Key>,
    ) -> Result<()> {
        let search = Search { keys_of, appended: &[], wanted: &[], if_missing: IfMissing::TrustIndex };
        if is_long(chain) { self.load_index(table, chain, search) } else { Ok(()) }
    }

    /// Does [`rules_with_keys`](Nft::rules_with_keys) by the chain's index; `None` if there is none
    /// that describes the chain as it is now.
    pub(crate) fn rules_by_index(
        &mut self,
        table: Table<'_>,
        chain: &Chain,
        search: Search<'_>,
    ) -> Result<Option<Vec<Listed>>> {
        self.load_index(table, chain, search)?;
        self.rules_by_used_index(table, chain, search.wanted, search.if_missing == IfMissing::ReadAll)
    }

    /// Returns the chain's rules with one of these keys by an index that was used since the last
    /// transaction. `None` if no index was used, if the index names a rule that does not
    /// exist, or if it lacks a key and `must_have_all` is true. In the last two cases, the index is
    /// not used any more.
    pub(crate) fn rules_by_used_index(
        &mut self,
        table: Table<'_>,
        chain: &Chain,
        wanted: &[Key],
        must_have_all: bool,
    ) -> Result<Option<Vec<Listed>>> {
        let Some(position) = self.indexes.iter().position(|index| index.is_of(table, chain)) else {
            return Ok(None);
        };
        let (handles, has_all) = self.indexes[position].find(wanted);
        if must_have_all && !has_all {
            // The file stays: it can describe the chain although no rule has the key.
            self.indexes.swap_remove(position);
            return Ok(None);
        }
        let mut rules = Vec::new();
        for handle in handles {
            let what = format!("failed to read rule {handle} of nft chain {table} {}", chain.name);
            // Attribute 2 is the chain's name, 3 the rule's handle.
            let request = Request::in_table(RequestType::GetRule, table).text(2, &chain.name).handle(3, handle);
            let Some(listed) = self.find(&what, &request, decode::rule)? else {
                // The rule was deleted, so the file does not describe the chain.
                self.indexes.swap_remove(position).discard();
                return Ok(None);
            };
            rules.push(listed);
        }
        Ok(Some(rules))
    }

    /// Reads the file of the chain, if it describes the chain as it is now, for the searches until
    /// the next transaction. Does nothing if the chain's index is in use already.
    fn load_index(&mut self, table: Table<'_>, chain: &Chain, search: Search<'_>) -> Result<()> {
        if self.indexes.iter().any(|index| index.is_of(table, chain)) {
            return Ok(());
        }
        let Some(index) = self.new_index(table, chain, search)? else { return Ok(()) };
        let Some(mut entries) = read_private(&index.path) else { return Ok(()) };
        let tail = index.tail();
        if entries.ends_with(&tail) {
            entries.truncate(entries.len() - tail.len());
            self.indexes.push(Index { entries, is_fresh: false, ..index });
        }
        Ok(())
    }

    /// Returns an index of the chain without entries. It is marked as fresh, for a caller that adds
    /// the entries of all rules. `None` if the table does not exist, or if the kernel does not
    /// report its number (before Linux 4.16) or that of the network namespace (before 5.14).
    fn new_index(&mut self, table: Table<'_>, chain: &Chain, search: Search<'_>) -> Result<Option<Index>> {
        let what = format!("failed to read nft table {table}");
        let found = self.find(&what, &Request::in_table(RequestType::GetTable, table), decode::table)?;
        let numbers = self.socket()?.netns_cookie().zip(found);
        let Some((cookie, (table_handle, _))) = numbers else { return Ok(None) };
        // The kernel uses inodes again, so the number of files is bounded. The cookie in
        // `identity`, not the inode, shows that a file is of this namespace.
        let netns = fs::metadata(NETNS).map_or(0, |metadata| metadata.ino());
        let name = format!("rules-{netns}-{}-{}-{}", table.family.name(), table.name, chain.name);
        let boot = fs::read(BOOT_ID).unwrap_or_default();
        Ok(Some(Index {
            path: Path::new(FOLDER).join(name),
            place: place_of(table, &chain.name),
            identity: [[cookie, table_handle, chain.handle].map(u64::to_ne_bytes).as_flattened(), &boot].concat(),
            uses: chain.uses,
            entries: Vec::new(),
            keys_of: search.keys_of,
            appended: search.appended.to_vec(),
            is_fresh: true,
        }))
    }
}

/// Reads a file that only this process's user or root can have written; `None` if the file does not
/// exist, is larger than [`FILE_MAX`], or cannot be read.
fn read_private(path: &Path) -> Option<Vec<u8>> {
    // A symbolic link is refused, and opening a FIFO does not wait for a writer.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let metadata = file.metadata().ok()?;
    let is_private = metadata.uid() == nix::unistd::geteuid().as_raw() && metadata.mode() & 0o077 == 0;
    if !metadata.is_file() || !is_private || metadata.len() > FILE_MAX {
        return None;
    }
    let len = usize::try_from(metadata.len()).ok()?;
    // With room for the rules of a few transactions, so that they need no other allocation.
    let mut content = Vec::with_capacity(len + 2048);
    content.resize(len, 0);
    // A file is never written in place, so its length does not change.
    file.read_exact(&mut content).ok().map(|()| content)
}

/// Reads a rule in the kernel's report about a transaction. `position` is that of its message.
pub(crate) fn appended(payload: &[u8], position: usize) -> Option<Appended> {
    Some(Appended { position, listed: decode::rule(payload)?, is_last: !decode::has_position(payload) })
}
