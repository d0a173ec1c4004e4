//! Finds an owner's reservations in the index, and confirms each by reading its file.
//!
//! Nothing is changed here. A file that cannot be read (a broken disk, no memory, missing
//! permission) does not end the search. It is an error only if it belongs to the owner according to
//! the index. If it was unreadable already when the index was built, its owner is unknown: every
//! verb except STATUS tries again to read it, and writes a note on failure, because an error would
//! make every DEL of the network fail.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use cni::{Code, Error, Result};

use super::{Locked, Noted, Owner, Reservation, Trouble};
use crate::index::table::TableError;
use crate::index::{self, Content, Index, hash};

/// After this time, a verb stops trying to read unreadable files.
const RETRY_TIME: Duration = Duration::from_millis(200);

/// All reservations that can be read, and the files that cannot.
#[derive(Debug)]
pub struct Listed {
    /// The reservations, sorted by address.
    pub reservations: Vec<Reservation>,
    /// The addresses whose files could not be read, and why.
    pub unread: Vec<(IpAddr, Error)>,
    /// The addresses with an unusual file, and what is unusual. Some are also in `reservations`.
    pub unusual: Vec<(IpAddr, String)>,
    /// The free addresses that cool down, and for how long. Sorted by address.
    pub cooling: Vec<(IpAddr, Duration)>,
}

/// The reservations of one owner.
pub(super) struct Reserved {
    /// The addresses whose files name the owner.
    pub(super) addresses: Vec<IpAddr>,
    /// One error for each file that cannot be read and that names the owner according to the index.
    pub(super) errors: Vec<Error>,
}

impl Reserved {
    /// Returns the addresses, if every file of the owner could be read.
    ///
    /// # Errors
    /// The errors joined, code 5, if there are any: then addresses may be missing.
    pub(super) fn require_complete(self) -> Result<Vec<IpAddr>> {
        Error::join(self.errors).map(|()| self.addresses)
    }
}

impl Locked {
    /// Reads the file of an address.
    ///
    /// # Errors
    /// Code 5 if the file exists and cannot be read.
    pub(super) fn read(&self, address: IpAddr) -> Result<Content> {
        index::read(&self.folder.file, address).map_err(|error| {
            let path = self.folder.path.display();
            Error::caused(Code::IO, format_args!("failed to read {path}/{address}"), error)
        })
    }

    /// Tries again to read the files that were unreadable when the index was built. Returns `true`
    /// if one of them can be read now: then the index should be rebuilt. If all that are tried are
    /// still unreadable, writes a note, only once.
    ///
    /// Stops after [`RETRY_TIME`], because a broken disk takes long for each file and other verbs
    /// wait for the lock. GC reads all files in any case.
    pub(super) fn retry_unreadable(&mut self, index: &Index) -> Result<bool, Trouble> {
        let unread = index.unreadable().map_err(TableError::Io)?;
        let total = unread.len();
        let began = Instant::now();
        let mut first_error = None;
        for address in unread {
            match self.read(address) {
                Ok(_) => return Ok(true),
                Err(error) => first_error = first_error.or(Some(error)),
            }
            if began.elapsed() > RETRY_TIME {
                break;
            }
        }
        if let (Some(first_error), Noted::No) = (first_error, self.unreadable_noted) {
            self.unreadable_noted = Noted::Yes;
            let others = match total - 1 {
                0 => String::new(),
                1 => " (and 1 other file)".to_owned(),
                others => format!(" (and {others} other files)"),
            };
            self.store
                .options
                .notes
                .note(format_args!("{first_error}{others}; its owner is unknown, so no DEL releases it"));
        }
        Ok(false)
    }

    /// Returns the addresses whose files have this content. The index finds the files by the hash
    /// of the content, and each file is read.
    ///
    /// # Errors
    /// - [`Trouble::Stale`] if the content of a file differs and the index may be outdated.
    /// - [`Trouble::Index`] if the index cannot be read.
    /// - [`Trouble::Final`] with code 5 if the folder cannot be read.
    pub(super) fn find_by_content(&mut self, content: &[u8]) -> Result<Reserved, Trouble> {
        let index = self.index()?;
        let (mut listed, is_exact) = (index.owned_by(hash(content))?, index.is_exact());
        listed.sort_unstable();
        let mut reserved = Reserved { addresses: Vec::with_capacity(listed.len()), errors: Vec::new() };
        for address in listed {
            match self.read(address) {
                Ok(Content::Text(text)) if text == content => reserved.addresses.push(address),
                // The two contents have the same hash, or the file was edited in place. An exact
                // index has not missed a created file, so it need not be rebuilt.
                Ok(_) if is_exact => {}
                Ok(_) => return Err(Trouble::Stale),
                Err(error) => reserved.errors.push(error),
            }
        }
        Ok(reserved)
    }

    /// Returns the reservations of `owner`: those that name the container and the interface or, if
    /// there are none, those that name only the container, as very old plugins wrote them.
    pub(super) fn find_by_owner(&mut self, owner: &Owner) -> Result<Reserved, Trouble> {
        let reserved = self.find_by_content(owner.content().trim().as_bytes())?;
        if reserved.addresses.is_empty() && reserved.errors.is_empty() {
            return self.find_by_content(owner.id().as_bytes());
        }
        Ok(reserved)
    }

    /// Returns the addresses that are reserved for `owner`: those that name the container and the
    /// interface or, if there are none, those that name only the container.
    ///
    /// # Errors
    /// Code 5 if the folder or one of these files cannot be read.
    pub fn reserved_by(&mut self, owner: &Owner) -> Result<Vec<IpAddr>> {
        self.attempt(|locked| locked.find_by_owner(owner))?.require_complete()
    }

    /// Returns the occupied addresses according to the index, sorted. With
    /// [`RebootPolicy::Reclaim`](super::RebootPolicy::Reclaim), first releases reservations of an
    /// earlier boot.
    ///
    /// # Errors
    /// - Code 5 if the folder cannot be read.
    /// - Code 11 if the folder keeps changing.
    pub fn occupied(&mut self) -> Result<Vec<IpAddr>> {
        self.reclaim()?;
        let mut occupied = self.attempt(|locked| Ok(locked.index()?.occupied().map_err(TableError::Io)?))?;
        occupied.sort_unstable();
        Ok(occupied)
    }

    /// Returns all reservations. Reads every file whose name is an address. The result also lists
    /// the files that cannot be read.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub fn list(&mut self) -> Result<Listed> {
        let mut addresses = self.attempt(|locked| {
            let records = locked.index()?.records().map_err(TableError::Io)?;
            Ok(records.into_iter().map(|record| record.address).collect::<Vec<_>>())
        })?;
        addresses.sort_unstable();
        let mut cooling = self.cooling().remaining(self.store.options.cooldown);
        cooling.retain(|(address, _)| addresses.binary_search(address).is_err());
        let mut listed = Listed {
            reservations: Vec::with_capacity(addresses.len()),
            unread: Vec::new(),
            unusual: Vec::new(),
            cooling,
        };
        for address in addresses {
            match self.read(address) {
                Ok(Content::Text(text)) => listed.reservations.push(Reservation::of(&self.folder, address, &text)),
                // Only added to `unusual`, below.
                Ok(Content::Foreign) => {}
                Ok(Content::Absent | Content::Blank) => continue,
                Err(error) => {
                    listed.unread.push((address, error));
                    continue;
                }
            }
            listed.unusual.extend(self.folder.peculiarity(address).map(|what| (address, what)));
        }
        Ok(listed)
    }

    /// Returns a text for messages about which container has an address: `10.0.0.2 is held by <id>
    /// <ifname>`.
    pub(super) fn describe(&self, address: IpAddr) -> String {
        match self.read(address) {
            Ok(Content::Text(text)) => Reservation::of(&self.folder, address, &text).to_string(),
            Ok(Content::Foreign) => format!("{}/{address} is not a reservation", self.folder.path.display()),
            Ok(Content::Absent | Content::Blank) => format!("{address} has just been released"),
            Err(error) => error.to_string(),
        }
    }
}
