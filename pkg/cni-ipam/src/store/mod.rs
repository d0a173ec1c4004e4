//! The store of reservations: one folder per network, byte for byte Go's, behind one lock per verb.
//!
//! A reservation is a file named as its address that holds `<containerID>\r\n<ifname>` (very old
//! ones the container ID alone). The index and other files of these plugins are in
//! `<dataDir>/.cni/<network>/` and may be deleted at any time. The store has no ranges of its own:
//! the caller passes them, and DEL, GC and CHECK need none.
//!
//! Other programs use the folder too (Go's plugin, operators, scripts). So an operation reads a
//! reservation's file before it allocates or releases the address. A name that is not an address,
//! or an address that is not a regular file, is never removed.

mod folder;
mod lookup;
mod reboot;
mod release;
mod reserve;
mod status;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;
use cni::{Code, Error, Result};

use crate::host::Host;
use crate::index::header::Stamp;
use crate::index::table::TableError;
use crate::index::{self, Index};
use crate::lock::{self, Guard, MissingFolder};
use crate::ranges::{RangeSet, RangeSets};
use folder::Folder;

pub use lookup::Listed;
pub use reboot::RebootPolicy;
pub use release::Collected;
pub use reserve::{Lease, NewReservation, RepeatPolicy};
pub use status::Usage;

/// Where the folders of all networks lie unless the configuration says otherwise.
pub const DEFAULT_DATA_DIR: &str = "/var/lib/cni/networks";

/// The owner of a reservation: one interface of one container.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    id: String,
    ifname: String,
}

impl Owner {
    /// The container's ID is trimmed, as Go trims it.
    pub fn new(id: &str, ifname: &str) -> Owner {
        Owner { id: id.trim().to_owned(), ifname: ifname.to_owned() }
    }

    /// The container's ID.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The interface's name in the container.
    pub fn ifname(&self) -> &str {
        &self.ifname
    }

    fn content(&self) -> String {
        format!("{}\r\n{}", self.id, self.ifname)
    }

    /// The hashes under which the index lists this owner's addresses: exact, and of the old form.
    fn hashes(&self) -> [u64; 2] {
        [index::hash(self.content().trim().as_bytes()), index::hash(self.id.as_bytes())]
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.id, self.ifname)
    }
}

/// One reservation, as its file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The address.
    pub address: IpAddr,
    /// The container's ID, or whatever else the file's first line says.
    pub id: String,
    /// The interface; `None` in a reservation of the old form.
    pub ifname: Option<String>,
    /// When the file was made.
    pub since: Option<SystemTime>,
}

impl Reservation {
    fn of(folder: &Folder, address: IpAddr, content: &[u8]) -> Reservation {
        let text = String::from_utf8_lossy(content);
        let (id, ifname) = match text.split_once("\r\n") {
            Some((id, ifname)) => (id, Some(ifname.to_owned())),
            None => (text.as_ref(), None),
        };
        Reservation { address, id: id.to_owned(), ifname, since: folder.made_at(address) }
    }
}

impl fmt::Display for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is held by {}", self.address, self.id.escape_debug())?;
        match &self.ifname {
            Some(ifname) => write!(f, " {}", ifname.escape_debug()),
            None => Ok(()),
        }
    }
}

/// The settings of a store.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where remarks go: an index that cannot be written.
    pub notes: Notes,
    /// The machine and boot, which are recorded with a new reservation.
    pub host: Host,
    /// The treatment of reservations that these plugins made before the machine was booted.
    pub earlier: RebootPolicy,
    /// The reaction to an ADD for an attachment that has addresses already.
    pub again: RepeatPolicy,
}

impl Options {
    /// Nothing is reclaimed and nothing is given twice.
    pub fn new(notes: Notes, host: Host) -> Options {
        Options { notes, host, earlier: RebootPolicy::Keep, again: RepeatPolicy::Refuse }
    }
}

/// The store of one network. Opening it does nothing yet.
#[derive(Clone, Debug)]
pub struct Store {
    path: PathBuf,
    sidecar: PathBuf,
    options: Options,
    told: Rc<Cell<Told>>,
}

/// Whether a note that is written at most once has been written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Told {
    #[default]
    NotYet,
    Once,
}

/// The store while its lock is held. Dropping unlocks.
#[derive(Debug)]
pub struct Locked {
    folder: Folder,
    _lock: File,
    store: Store,
    index: Option<Index>,
    trust: Trust,
    /// The range sets of an ADD: a new index counts them from the start, and finds their oldest
    /// holders.
    asking: Option<RangeSets>,
    /// Whether the files that cannot be read have been noted.
    told: Told,
}

/// How far the files of the sidecar are believed; each disappointment leads one step down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Trust {
    /// They cannot be used: the index of this verb lives in memory.
    None,
    /// They can be written, but what is in them is damaged.
    Place,
    /// The records of single files, where inode and times agree.
    Records,
    /// The whole index, if its stamp agrees.
    Index,
}

/// Why one attempt at an operation came to nothing.
enum Trouble {
    /// The folder is not as the index says: read it again.
    Stale,
    /// The index is damaged or cannot be used.
    Index(TableError),
    /// The operation is refused or failed.
    Final(Error),
}

impl From<TableError> for Trouble {
    fn from(error: TableError) -> Trouble {
        Trouble::Index(error)
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Final(error)
    }
}

/// The networks that have a folder of reservations below `data_dir`, by name. A missing `data_dir`
/// has none.
///
/// # Errors
/// Code 5 if it cannot be read.
pub fn networks(data_dir: &Path) -> Result<Vec<String>> {
    let failed = |error| Error::caused(Code::IO, format_args!("failed to list {}", data_dir.display()), error);
    let entries = match std::fs::read_dir(data_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        // `.cni` is ours; no network can have such a name.
        if let Some(name) = entry.file_name().to_str()
            && cni::ident::check_network_name(name).is_ok()
            && entry.path().is_dir()
        {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

impl Store {
    /// The store of `network` below `data_dir`. The network's name must be a valid one: it becomes
    /// a folder's name.
    pub fn open(data_dir: &Path, network: &str, options: Options) -> Store {
        Store {
            path: data_dir.join(network),
            sidecar: data_dir.join(".cni").join(network),
            options,
            told: Rc::default(),
        }
    }

    /// The folder of reservations.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The network's name, which is the folder's.
    fn network(&self) -> std::borrow::Cow<'_, str> {
        self.path.file_name().unwrap_or_default().to_string_lossy()
    }

    /// Locks the store, and makes its folder if it is missing.
    ///
    /// # Errors
    /// Code 11 if the lock is not to be had within `limit` or SIGTERM arrives; the message names
    /// the holder. Code 5 if the folder or its lock cannot be made or opened.
    pub fn lock(&self, limit: Duration, machine: &dyn Machine) -> Result<Locked> {
        match self.acquire(MissingFolder::Create, OnSigterm::Kill, limit, machine)? {
            Some(locked) => Ok(locked),
            None => Err(Error::new(Code::INTERNAL, format!("{} was neither found nor made", self.path.display()))),
        }
    }

    /// Locks the store if it exists. Makes no folder.
    ///
    /// # Errors
    /// As [`lock`](Store::lock).
    pub fn lock_existing(&self, limit: Duration, machine: &dyn Machine) -> Result<Option<Locked>> {
        self.acquire(MissingFolder::Leave, OnSigterm::Kill, limit, machine)
    }

    /// Takes back what an ADD has reserved, under the lock, which SIGTERM does not keep it from
    /// waiting for: only files that are still those, unchanged.
    ///
    /// # Errors
    /// As [`lock`](Store::lock), and code 5 after trying all of them.
    pub fn undo(&self, made: &[NewReservation], limit: Duration, machine: &dyn Machine) -> Result<()> {
        match self.acquire(MissingFolder::Leave, OnSigterm::Finish, limit, machine)? {
            Some(mut locked) => locked.undo(made),
            None => Ok(()),
        }
    }

    fn acquire(
        &self,
        missing: MissingFolder,
        on_sigterm: OnSigterm,
        limit: Duration,
        machine: &dyn Machine,
    ) -> Result<Option<Locked>> {
        let locked = lock::acquire(&self.path, missing, on_sigterm, limit, machine)?;
        let Some(Guard { lock, folder }) = locked else { return Ok(None) };
        let folder = Folder { file: folder, path: self.path.clone(), sidecar: self.sidecar.clone() };
        let (store, told) = (self.clone(), Told::NotYet);
        Ok(Some(Locked { folder, _lock: lock, store, index: None, trust: Trust::Index, asking: None, told }))
    }

    fn io(&self, doing: &str, error: std::io::Error) -> Error {
        Error::caused(Code::IO, format_args!("failed to {doing} {}", self.path.display()), error)
    }

    fn index_path(&self) -> PathBuf {
        self.sidecar.join("index")
    }

    /// Notes the addresses that files other than reservations occupy, in one line.
    fn note_foreign(&self, foreign: &mut [IpAddr]) {
        const NAMED: usize = 8;
        foreign.sort_unstable();
        let named: Vec<String> = foreign.iter().take(NAMED).map(ToString::to_string).collect();
        let others = match foreign.len().saturating_sub(NAMED) {
            0 => String::new(),
            others => format!(" and {others} others"),
        };
        if !named.is_empty() {
            self.options.notes.note(format_args!(
                "{} in {}{others}: not a reservation, so no DEL and no GC frees the address; remove it if no container uses it",
                named.join(", "),
                self.path.display()
            ));
        }
    }

    /// Says once that the index cannot be kept; everything works without it.
    fn tell(&self, error: impl fmt::Display) {
        if self.told.replace(Told::Once) == Told::NotYet {
            self.options.notes.note(format_args!(
                "the index {} cannot be kept, so every operation reads the whole folder: {error}",
                self.index_path().display()
            ));
        }
    }
}

impl Locked {
    /// Runs an attempt until it succeeds or fails for good. Each failure makes the next attempt
    /// trust less.
    fn attempt<T>(&mut self, mut operation: impl FnMut(&mut Locked) -> Result<T, Trouble>) -> Result<T> {
        for _ in 0..5 {
            match operation(self) {
                Ok(done) => return Ok(done),
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Stale) => self.distrust(Trust::Records),
                Err(Trouble::Index(TableError::Corrupt)) if self.trust == Trust::Place => self.distrust(Trust::None),
                Err(Trouble::Index(TableError::Corrupt)) => self.distrust(Trust::Place),
                Err(Trouble::Index(TableError::Io(error))) => {
                    self.store.tell(error);
                    self.distrust(Trust::None);
                }
            }
        }
        let msg = format!("{} keeps changing although its lock is held", self.folder.path.display());
        Err(Error::new(Code::TRY_AGAIN, msg))
    }

    /// The index, true for the folder: the one on disk if it is, else a new one.
    fn index(&mut self) -> Result<&mut Index, Trouble> {
        if self.index.is_none() {
            let found = if self.trust == Trust::Index { self.open_index()? } else { None };
            let index = match found {
                Some(index) => index,
                None => self.rebuild()?,
            };
            // A file that could not be read when the folder was may be the very one that is looked
            // for.
            self.index = Some(if self.could_read_more(&index)? { self.rebuild()? } else { index });
        }
        // Just set.
        self.index.as_mut().ok_or(Trouble::Stale)
    }

    fn open_index(&self) -> Result<Option<Index>, Trouble> {
        let metadata = self.folder.file.metadata().map_err(|error| self.store.io("read", error))?;
        Ok(index::open(&self.store.index_path(), &Stamp::of(&metadata), &self.store.options.host))
    }

    fn distrust(&mut self, trust: Trust) {
        self.index = None;
        self.trust = self.trust.min(trust);
    }

    /// Reads the folder and writes a new index, or keeps it in memory if that cannot be.
    fn rebuild(&mut self) -> Result<Index, Trouble> {
        let path = self.store.index_path();
        // Marked before it is read: a change meanwhile makes the mark untrue.
        let mark = match self.trust {
            Trust::None => None,
            _ => match self.prepare() {
                Ok(stamp) => Some(stamp),
                Err(error) => {
                    self.store.tell(error);
                    None
                }
            },
        };
        let host = &self.store.options.host;
        let (known, mut former) = match self.trust {
            Trust::None | Trust::Place => Default::default(),
            Trust::Records | Trust::Index => index::old_records(&path, host),
        };
        let scanned = index::scan(&self.folder.path, &self.folder.file, &known);
        let records = scanned.map_err(|error| self.store.io("read", error))?;
        for range in self.asking.iter().flat_map(RangeSets::sets).flat_map(RangeSet::ranges) {
            former.start_counting(range);
        }
        let mut index = Index::of(&records, &former, host)?;
        if let Some(asking) = &self.asking {
            index.find_oldest(asking, &records)?;
        }
        index.set_earlier(self.earlier_in(&records));
        if !reboot::is_local(&self.folder.file) {
            index.set_shared();
        }
        if let Some(stamp) = mark {
            index.marked_as(stamp);
            if let Err(error) = index.save(&path) {
                self.store.tell(error);
            }
        }
        Ok(index)
    }

    fn prepare(&self) -> std::io::Result<Stamp> {
        folder::create_sidecar(&self.folder.sidecar)?;
        folder::sweep(&self.folder.sidecar);
        index::mark(&self.folder.file)
    }
}
