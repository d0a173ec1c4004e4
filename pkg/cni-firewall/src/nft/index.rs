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
use std::sync::LazyLock;

use super::batch::{Change, RuleChange};
use super::request::{Request, RequestType};
use super::{Chain, Family, Listed, Nft, Table, decode};
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
/// The number of the boot; empty if it cannot be read.
static BOOT: LazyLock<Vec<u8>> = LazyLock::new(|| fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default());
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

/// How a feature searches the rules of one of its chains.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Search<'a> {
    /// Returns the keys of a rule of the chain; none for a rule that every search must return.
    pub(crate) keys_of: fn(&Listed) -> Vec<Key>,
    /// The keys that the rules that the caller appends have in addition.
    pub(crate) appended: &'a [Key],
    /// The keys of the wanted rules.
    pub(crate) wanted: &'a [Key],
    /// Whether all rules are read if the index lacks a wanted key: for a caller that appends no
    /// rule, so that the kernel does not report whether the index has all rules.
    pub(crate) reads_all_if_missing: bool,
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
    place: (Family, String, String),
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
    pub(crate) fn is_of(&self, table: Table<'_>, chain: &str) -> bool {
        let (family, table_name, chain_name) = &self.place;
        *family == table.family && table_name == table.name && chain_name == chain
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
    pub(crate) fn prepare(&self, changes: &mut [Change]) {
        const NFTA_RULE_POSITION: u16 = 6;
        const NFTA_RULE_ID: u16 = 9;
        const NFTA_RULE_POSITION_ID: u16 = 10;
        let (appends, deleted) = (self.appends(changes), self.deleted(changes));
        // Without a report, `finish` makes the caller read all rules.
        if appends.is_empty() || appends.len() > REPORTS_MAX {
            return;
        }
        let last = entries(&self.entries).filter(|entry| !deleted.contains(&entry.handle)).last();
        let Some(last) = last else { return };
        let mut position = wire::new_attribute(NFTA_RULE_POSITION, &last.handle.to_be_bytes());
        for append in appends {
            let (change, id) = (&mut changes[append], u32::try_from(append).unwrap_or_default().to_be_bytes());
            change.flags |= NLM_F_ECHO;
            change.body.append(&mut position);
            change.body.extend(wire::new_attribute(NFTA_RULE_ID, &id));
            position = wire::new_attribute(NFTA_RULE_POSITION_ID, &id);
        }
    }

    /// Brings the index to the state after a transaction, and writes the file, or removes that of a
    /// chain that is not long any more. `reported` are the rules that the kernel reports. Returns
    /// `false` if the transaction was planned by a file that does not have all rules of the chain.
    /// The file is removed then.
    pub(crate) fn finish(mut self, changes: &[Change], reported: &[Appended]) -> bool {
        let appends = self.appends(changes);
        let deleted = self.deleted(changes);
        let is_changed_otherwise = changes.iter().any(|change| self.effect(change) == Some(&RuleChange::Other));
        let report_of = |append: &usize| reported.iter().find(|rule| rule.position == append + 1);
        let reports: Option<Vec<&Appended>> = appends.iter().map(report_of).collect();
        let Some(reports) =
            reports.filter(|reports| !is_changed_otherwise && reports.last().is_none_or(|last| last.is_last))
        else {
            let is_fresh = self.is_fresh;
            self.discard();
            // A fresh index had all rules when the transaction was planned.
            return is_fresh;
        };
        if !deleted.is_empty() {
            let mut remaining = Vec::with_capacity(self.entries.len());
            let remain = entries(&self.entries).filter(|entry| !deleted.contains(&entry.handle));
            remain.for_each(|entry| remaining.extend(entry.bytes));
            self.entries = remaining;
        }
        for report in &reports {
            let mut keys = (self.keys_of)(&report.listed);
            if !keys.is_empty() {
                keys.extend(&self.appended);
            }
            write_entry(report.listed.handle, &keys, &mut self.entries);
        }
        let (added, removed) = (u32::try_from(appends.len()).ok(), u32::try_from(deleted.len()).ok());
        let uses = added.and_then(|added| self.uses.checked_add(added)?.checked_sub(removed?));
        match uses {
            Some(uses) if uses >= RULES_MIN => {
                self.uses = uses;
                self.save();
            }
            // No call would use the file.
            _ => self.discard(),
        }
        true
    }

    /// Removes the file.
    pub(crate) fn discard(self) {
        // If that fails, the next search finds again that the file does not describe the chain.
        let _ = fs::remove_file(self.path);
    }

    /// Writes the file. A failure is not reported: the file that is there has another number of
    /// rules, or the same rules.
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

    /// Returns what the change does to the rules of this chain; `None` for a change elsewhere.
    fn effect<'c>(&self, change: &'c Change) -> Option<&'c RuleChange> {
        let (place, effect) = change.rules.as_ref()?;
        (*place == self.place).then_some(effect)
    }

    /// Returns the indices of the changes that append a rule to this chain.
    fn appends(&self, changes: &[Change]) -> Vec<usize> {
        let is_append = |(_, change): &(usize, &Change)| self.effect(change) == Some(&RuleChange::Append);
        changes.iter().enumerate().filter(is_append).map(|(index, _)| index).collect()
    }

    /// Returns the handles of the rules of this chain that the changes delete.
    fn deleted(&self, changes: &[Change]) -> Vec<u64> {
        let handle = |change| match self.effect(change) {
            Some(RuleChange::Delete(handle)) => Some(*handle),
            _ => None,
        };
        changes.iter().filter_map(handle).collect()
    }
}

impl Nft {
    /// Returns the chain's rules that have one of the wanted keys, in order; other rules can be
    /// among them. Of a long chain with an index, only these are read. If this and the index of
    /// another chain do not lead to changes, the chain is read as a whole the next time too.
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

    /// Makes an index of a long chain, with the handle and the keys of each of its rules. The next
    /// transaction writes its file. A chain that only seems long because many rules jump to it gets
    /// none.
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

    /// Lets the next transaction, which appends rules to the chain, keep the chain's index, if
    /// there is one.
    pub(crate) fn use_index(
        &mut self,
        table: Table<'_>,
        chain: &Chain,
        keys_of: fn(&Listed) -> Vec<Key>,
    ) -> Result<()> {
        let search = Search { keys_of, appended: &[], wanted: &[], reads_all_if_missing: false };
        if is_long(chain) { self.rules_by_index(table, chain, search).map(drop) } else { Ok(()) }
    }

    /// Does [`rules_with_keys`](Nft::rules_with_keys) by the chain's index; `None` if there is none
    /// that describes the chain as it is now.
    pub(crate) fn rules_by_index(
        &mut self,
        table: Table<'_>,
        chain: &Chain,
        search: Search<'_>,
    ) -> Result<Option<Vec<Listed>>> {
        if !self.indexes.iter().any(|index| index.is_of(table, &chain.name)) {
            let index = self.load_index(table, chain, search)?;
            self.indexes.extend(index);
        }
        self.rules_by_used_index(table, chain, search.wanted, search.reads_all_if_missing)
    }

    /// Returns the chain's rules with one of these keys by an index that was used since the last
    /// transaction; `None` if there is none, if it names a rule that does not exist, or if it lacks
    /// a key and `reads_all_if_missing`.
    pub(crate) fn rules_by_used_index(
        &mut self,
        table: Table<'_>,
        chain: &Chain,
        wanted: &[Key],
        reads_all_if_missing: bool,
    ) -> Result<Option<Vec<Listed>>> {
        let Some(position) = self.indexes.iter().position(|index| index.is_of(table, &chain.name)) else {
            return Ok(None);
        };
        let (handles, has_all) = self.indexes[position].find(wanted);
        if reads_all_if_missing && !has_all {
            self.indexes.remove(position);
            return Ok(None);
        }
        let mut rules = Vec::new();
        for handle in handles {
            match self.rule(table, &chain.name, handle)? {
                Some(listed) => rules.push(listed),
                None => {
                    self.indexes.remove(position).discard();
                    return Ok(None);
                }
            }
        }
        Ok(Some(rules))
    }

    /// Returns the rule with this handle; `None` if it does not exist.
    fn rule(&mut self, table: Table<'_>, chain: &str, handle: u64) -> Result<Option<Listed>> {
        let what = format!("failed to read rule {handle} of nft chain {table} {chain}");
        let request = Request::in_table(RequestType::GetRule, table).text(2, chain).bytes(3, &handle.to_be_bytes());
        let mut found = None;
        match self.ask(&what, &request, 0, |message| found = decode::rule(message.payload)) {
            Ok(_) => Ok(found),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the file of the chain; `None` if there is none that describes the chain as it is now.
    fn load_index(&mut self, table: Table<'_>, chain: &Chain, search: Search<'_>) -> Result<Option<Index>> {
        let Some(mut content) = read_private(&self.index_path(table, &chain.name)) else { return Ok(None) };
        let Some(mut index) = self.new_index(table, chain, search)? else { return Ok(None) };
        let Some(entries) = content.strip_suffix(index.tail().as_slice()) else { return Ok(None) };
        content.truncate(entries.len());
        (index.entries, index.is_fresh) = (content, false);
        Ok(Some(index))
    }

    /// Returns an index of the chain, without entries; `None` on kernels that lack a number.
    fn new_index(&mut self, table: Table<'_>, chain: &Chain, search: Search<'_>) -> Result<Option<Index>> {
        let what = format!("failed to read nft table {table}");
        let request = Request::in_table(RequestType::GetTable, table);
        let mut handle = None;
        self.ask(&what, &request, 0, |message| handle = decode::table(message.payload))?;
        let numbers = self.socket()?.netns_cookie().zip(handle);
        Ok(numbers.map(|(cookie, (table_handle, _))| Index {
            path: self.index_path(table, &chain.name),
            place: (table.family, table.name.to_owned(), chain.name.clone()),
            identity: [[cookie, table_handle, chain.handle].map(u64::to_ne_bytes).as_flattened(), &BOOT].concat(),
            uses: chain.uses,
            entries: Vec::new(),
            keys_of: search.keys_of,
            appended: search.appended.to_vec(),
            is_fresh: true,
        }))
    }

    /// Returns the path of the chain's file.
    fn index_path(&mut self, table: Table<'_>, chain: &str) -> PathBuf {
        // The kernel uses inodes again, so the number of files is bounded.
        let netns = self.netns_inode.get_or_insert_with(|| fs::metadata(NETNS).map_or(0, |metadata| metadata.ino()));
        Path::new(FOLDER).join(format!("rules-{netns}-{}-{}-{chain}", table.family.name(), table.name))
    }
}

/// Reads a file that only this process's user or root can have written; `None` if there is none.
fn read_private(path: &Path) -> Option<Vec<u8>> {
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
pub(crate) fn appended(message: &wire::Message<'_>, position: usize) -> Option<Appended> {
    let listed = decode::rule(message.payload)?;
    Some(Appended { position, listed, is_last: !decode::has_position(message.payload) })
}
