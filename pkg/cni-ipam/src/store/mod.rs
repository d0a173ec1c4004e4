//! The store of reservations: one folder for each network, in the format of the Go plugin, and a
//! lock that each verb takes once.
//!
//! A reservation is a file with the address as its name and `<containerID>\r\n<ifname>` as its
//! content; very old reservations have the container ID alone. The links and other files of these
//! plugins are in `<dataDir>/.cni/<network>/`, the sidecar, and may be deleted at any time. The
//! store does not know the ranges: ADD and STATUS pass them, and DEL, GC and CHECK need none.
//!
//! Other programs use the folder too (Go's plugin, operators, scripts). So no operation relies on
//! the links alone: a reservation's file is read before it is replaced or removed. Only regular
//! files whose names are addresses are removed.

pub(crate) mod cooldown;
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

use crate::content::hash;
use crate::host::Host;
use crate::links::{self, Link, Links, Scan};
use crate::lock::{self, Guard, MissingFolder};
use folder::Folder;

pub use lookup::Listed;
pub use reboot::RebootPolicy;
pub use release::Collected;
pub use reserve::{Lease, NewReservation, RepeatPolicy, Shortage};
pub use status::Usage;

/// The default folder that contains the folder of each network.
pub const DEFAULT_DATA_DIR: &str = "/var/lib/cni/networks";

/// The owner of a reservation: one interface of one container.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    id: String,
    ifname: String,
}

impl Owner {
    /// Returns the owner with this container ID, which is trimmed as in Go, and interface.
    pub fn new(id: &str, ifname: &str) -> Owner {
        Owner { id: id.trim().to_owned(), ifname: ifname.to_owned() }
    }

    /// Returns the container's ID.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the interface's name in the container.
    pub fn ifname(&self) -> &str {
        &self.ifname
    }

    /// Returns the content of the owner's reservation files.
    fn content(&self) -> String {
        format!("{}\r\n{}", self.id, self.ifname)
    }

    /// Returns the hashes of the contents that name this owner: of the content with container ID
    /// and interface, and of the very old content with the container ID alone.
    fn hashes(&self) -> [u64; 2] {
        [hash(self.content().trim().as_bytes()), hash(self.id.as_bytes())]
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.id, self.ifname)
    }
}

/// A reservation, as read from its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The address.
    pub address: IpAddr,
    /// The container's ID, which is the first line of the file.
    pub id: String,
    /// The interface, or `None` in a very old reservation that has the container's ID alone.
    pub ifname: Option<String>,
    /// When the reservation was made: the file's mtime.
    pub since: Option<SystemTime>,
}

impl Reservation {
    /// Returns the reservation of an address whose file has this content.
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
    /// Receives notes for the operator.
    pub notes: Notes,
    /// The machine and boot, which are recorded with a new reservation.
    pub host: Host,
    /// What happens to reservations that these plugins made in an earlier boot.
    pub after_reboot: RebootPolicy,
    /// What ADD does for an attachment that has addresses already.
    pub on_repeat: RepeatPolicy,
    /// How long a released address is not given out again, if others are free. Zero for not at all:
    /// then releases are not stored.
    pub cooldown: Duration,
}

impl Options {
    /// Returns the options that keep reservations of an earlier boot, refuse a repeated ADD, and
    /// have no cool-down.
    pub fn new(notes: Notes, host: Host) -> Options {
        Options {
            notes,
            host,
            after_reboot: RebootPolicy::Keep,
            on_repeat: RepeatPolicy::Refuse,
            cooldown: Duration::ZERO,
        }
    }
}

/// The store of one network.
#[derive(Clone, Debug)]
pub struct Store {
    /// The folder of reservations.
    path: PathBuf,
    /// The folder of these plugins' own files: `<dataDir>/.cni/<network>`.
    sidecar: PathBuf,
    options: Options,
    /// Whether the note about unusable links has been written.
    links_noted: Rc<Cell<Noted>>,
}

/// Whether a note that is written at most once has been written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Noted {
    #[default]
    No,
    Yes,
}

/// The store while this process holds its lock. Dropping it releases the lock.
#[derive(Debug)]
pub struct Locked {
    folder: Folder,
    _lock: File,
    store: Store,
    /// How owners' reservations are found, or `None` until that is needed.
    view: Option<View>,
    /// Whether the note about unreadable files has been written.
    unreadable_noted: Noted,
}

/// How the reservations of an owner are found.
#[derive(Debug)]
enum View {
    /// By the links, which are complete.
    Links,
    /// Among these, which a scan has found. The links are not complete, because they cannot be
    /// written or a file cannot be read.
    Scanned(Vec<Link>),
}

/// How many times an ADD is tried if another program creates files without the lock.
const MAX_ATTEMPTS: usize = 5;
/// The largest number of addresses that a message lists.
const MAX_LISTED: usize = 8;

/// Formats a list of addresses for a message: `10.0.0.2, 10.0.0.3 and 7 more`.
fn address_list(addresses: &[IpAddr]) -> String {
    let listed: Vec<String> = addresses.iter().take(MAX_LISTED).map(ToString::to_string).collect();
    match addresses.len() - listed.len() {
        0 => listed.join(", "),
        more => format!("{} and {more} more", listed.join(", ")),
    }
}

/// Returns the names of the networks that have a folder of reservations in `data_dir`, sorted; none
/// if `data_dir` does not exist.
///
/// # Errors
/// Code 5 if `data_dir` cannot be read.
pub fn networks(data_dir: &Path) -> Result<Vec<String>> {
    let list_error = |error| Error::caused(Code::IO, format_args!("failed to list {}", data_dir.display()), error);
    let entries = match std::fs::read_dir(data_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(list_error(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(list_error)?;
        // `.cni`, which has the sidecars, is not a valid network name.
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
    /// Returns the store of `network` in `data_dir`, which need not exist yet. The caller has
    /// checked the network's name, which becomes a folder's name.
    pub fn open(data_dir: &Path, network: &str, options: Options) -> Store {
        Store {
            path: data_dir.join(network),
            sidecar: data_dir.join(".cni").join(network),
            options,
            links_noted: Rc::default(),
        }
    }

    /// Returns the folder of reservations.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder of these plugins' own files: `<dataDir>/.cni/<network>`.
    pub fn sidecar(&self) -> &Path {
        &self.sidecar
    }

    /// Returns the network's name, which is the folder's name.
    fn network(&self) -> std::borrow::Cow<'_, str> {
        self.path.file_name().unwrap_or_default().to_string_lossy()
    }

    /// Locks the store, and creates its folder if it does not exist.
    ///
    /// # Errors
    /// - Code 11 if another process holds the lock until `limit` has passed or a signal arrives.
    ///   The message names that process.
    /// - Code 5 if the folder or the lock file cannot be created or opened.
    pub fn lock(&self, limit: Duration, machine: &dyn Machine) -> Result<Locked> {
        match self.acquire(MissingFolder::Create, OnSigterm::Kill, limit, machine)? {
            Some(locked) => Ok(locked),
            // Impossible with `MissingFolder::Create`.
            None => Err(Error::new(Code::INTERNAL, format!("{} was neither found nor created", self.path.display()))),
        }
    }

    /// Locks the store. Returns `None` if its folder does not exist.
    ///
    /// # Errors
    /// As [`lock`](Store::lock).
    pub fn lock_existing(&self, limit: Duration, machine: &dyn Machine) -> Result<Option<Locked>> {
        self.acquire(MissingFolder::Leave, OnSigterm::Kill, limit, machine)
    }

    /// Locks the store and removes the reservations that an ADD created, except files that have
    /// been replaced or changed since. A signal does not end the wait for the lock, because a
    /// signal may be the reason for this undo.
    ///
    /// # Errors
    /// - Code 11 if another process holds the lock until `limit` has passed.
    /// - Code 5 if a reservation cannot be read or removed. The others have been removed.
    pub fn undo(&self, reservations: &[NewReservation], limit: Duration, machine: &dyn Machine) -> Result<()> {
        match self.acquire(MissingFolder::Leave, OnSigterm::Finish, limit, machine)? {
            Some(mut locked) => locked.undo(reservations),
            None => Ok(()),
        }
    }

    /// Locks the store; see [`lock::acquire`].
    fn acquire(
        &self,
        missing: MissingFolder,
        on_sigterm: OnSigterm,
        limit: Duration,
        machine: &dyn Machine,
    ) -> Result<Option<Locked>> {
        let locked = lock::acquire(&self.path, missing, on_sigterm, limit, machine)?;
        let Some(Guard { lock, folder }) = locked else { return Ok(None) };
        let folder = Folder { file: folder, path: self.path.clone(), links: self.links() };
        Ok(Some(Locked { folder, _lock: lock, store: self.clone(), view: None, unreadable_noted: Noted::No }))
    }

    /// Returns the error, code 5, of an action on the folder. `doing` is a verb, such as `read`.
    fn io_error(&self, doing: &str, error: std::io::Error) -> Error {
        Error::caused(Code::IO, format_args!("failed to {doing} {}", self.path.display()), error)
    }

    /// Returns the links of the reservations.
    fn links(&self) -> Links {
        Links::of(&self.sidecar)
    }

    /// Writes a note with the addresses whose files are not reservations, if there are any.
    fn note_foreign(&self, foreign: &mut [IpAddr]) {
        if foreign.is_empty() {
            return;
        }
        foreign.sort_unstable();
        self.options.notes.note(format_args!(
            "{} in {}: not a reservation, so no DEL and no GC frees the address; remove it if no container uses it",
            address_list(foreign),
            self.path.display()
        ));
    }

    /// Writes a note, only once, that the links cannot be used. This is not an error.
    fn note_unusable_links(&self, error: impl fmt::Display) {
        if self.links_noted.replace(Noted::Yes) == Noted::No {
            self.options.notes.note(format_args!(
                "the links in {} cannot be used, so every operation reads the whole folder: {error}",
                self.sidecar.display()
            ));
        }
    }
}

impl Locked {
    /// Reads the folder, unless the links are known to be complete.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    fn prepare_view(&mut self) -> Result<()> {
        if self.view.is_some() {
            return Ok(());
        }
        if self.folder.is_complete().map_err(|error| self.store.io_error("read", error))? {
            self.view = Some(View::Links);
            return Ok(());
        }
        self.scan().map(drop)
    }

    /// Reads the folder, creates missing links and removes outdated ones. Writes a note about files
    /// that cannot be read.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    fn scan(&mut self) -> Result<Scan> {
        if self.folder.is_complete().unwrap_or(false) {
            let scan = links::scan(&self.folder.path, &self.folder.file, &self.folder.links);
            let scan = scan.map_err(|error| self.store.io_error("read", error))?;
            if scan.is_up_to_date() {
                self.view = Some(View::Links);
                return Ok(scan);
            }
        }
        folder::sweep(&self.store.sidecar);
        let updated = self.folder.links.update(&self.folder.path, &self.folder.file);
        let (scan, updated) = updated.map_err(|error| self.store.io_error("read", error))?;
        self.view = match &updated {
            Ok(()) if scan.unread.is_empty() => Some(View::Links),
            _ => Some(View::Scanned(scan.held.iter().map(|(link, _)| link.clone()).collect())),
        };
        if let Err(error) = updated {
            self.store.note_unusable_links(error);
        }
        self.note_unread(&scan);
        Ok(scan)
    }

    /// Writes a note, only once, about files that cannot be read.
    fn note_unread(&mut self, scan: &Scan) {
        let Some((address, error)) = scan.unread.first() else { return };
        if std::mem::replace(&mut self.unreadable_noted, Noted::Yes) == Noted::Yes {
            return;
        }
        let others = match scan.unread.len() - 1 {
            0 => String::new(),
            1 => " (and 1 other file)".to_owned(),
            others => format!(" (and {others} other files)"),
        };
        let path = self.folder.path.display();
        self.store.options.notes.note(format_args!(
            "failed to read {path}/{address}: {error}{others}; its owner is unknown, so no DEL releases it"
        ));
    }

    /// Whether the links are complete now, so that they are complete after a change of both the
    /// folder and the links.
    fn begin_change(&self) -> bool {
        self.folder.is_complete().unwrap_or(false)
    }

    /// Stamps the folder after a change of the folder and the links, if they were complete before.
    /// Otherwise the next operation scans the folder.
    fn finish_change(&mut self, were_complete: bool) {
        if were_complete && let Err(error) = self.folder.links.stamp(&self.folder.file) {
            self.store.note_unusable_links(error);
        }
        self.view = None;
    }
}
