//! Finds an owner's reservations: by the index, each confirmed by its file.
//!
//! Nothing is changed here. A file that cannot be read (a broken disk, no memory, missing
//! permission) does not stop the work on the others, and its owner is unknown. If the index names
//! the owner, the result is an error beside the readable reservations. A file that was never
//! readable is tried by every verb but STATUS, and noted: an error would keep all containers of the
//! network from ending.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use cni::{Code, Error, Result};

use super::{Locked, Owner, Reservation, Told, Trouble};
use crate::index::table::TableError;
use crate::index::{self, Content, Index};

/// How many of the files that could not be read a verb tries again, and for how long.
const TRIES: usize = 16;
const PATIENCE: Duration = Duration::from_millis(200);

/// All that is reserved, as far as it can be read.
#[derive(Debug)]
pub struct Listed {
    /// In the order of the addresses.
    pub reservations: Vec<Reservation>,
    /// The addresses whose files could not be read, and why.
    pub unread: Vec<(IpAddr, Error)>,
    /// The addresses with an unusual file, and what is unusual. Some of them are among the
    /// reservations.
    pub unusual: Vec<(IpAddr, String)>,
}

/// The reservations of one owner, as far as they can be read.
pub(super) struct Reserved {
    /// The addresses whose files say so.
    pub(super) addresses: Vec<IpAddr>,
    /// Why the others could not be read.
    pub(super) errors: Vec<Error>,
}

impl Reserved {
    /// All of them, or why that is not known.
    pub(super) fn all(self) -> Result<Vec<IpAddr>> {
        Error::join(self.errors).map(|()| self.addresses)
    }
}

impl Locked {
    /// Reads the reservation of one address.
    pub(super) fn read(&self, address: IpAddr) -> Result<Content> {
        let doing = || format!("failed to read {}/{address}", self.folder.path.display());
        index::read(&self.folder.file, address).map_err(|error| Error::caused(Code::IO, doing(), error))
    }

    /// Whether files that this index could not read can be read by now. Notes those that still
    /// cannot be read. Of many files only some are tried: a broken disk takes long for each, and
    /// other processes wait for the lock. GC tries all.
    pub(super) fn could_read_more(&mut self, index: &Index) -> Result<bool, Trouble> {
        let mut unread = index.unread().map_err(TableError::Io)?;
        let all = unread.len();
        if all > TRIES {
            // Others every time.
            unread.rotate_left(std::process::id() as usize % all);
            unread.truncate(TRIES);
        }
        let (mut first, began) = (None, Instant::now());
        for address in unread {
            match self.read(address) {
                Ok(_) => return Ok(true),
                Err(error) => first = first.or(Some(error)),
            }
            if began.elapsed() > PATIENCE {
                break;
            }
        }
        if let (Some(first), Told::NotYet) = (first, self.told) {
            self.told = Told::Once;
            let others = if all == 1 { String::new() } else { format!(", like {} others", all - 1) };
            self.store.options.notes.note(format_args!("{first}{others}; its owner is unknown, so no DEL releases it"));
        }
        Ok(false)
    }

    /// The addresses whose files have the content that `hash` is of, each read and compared.
    pub(super) fn held(&mut self, hash: u64, content: &[u8]) -> Result<Reserved, Trouble> {
        let mut listed = self.index()?.held(hash)?;
        listed.sort_unstable();
        let exact = self.index()?.is_exact();
        let mut held = Reserved { addresses: Vec::with_capacity(listed.len()), errors: Vec::new() };
        for address in listed {
            match self.read(address) {
                Ok(Content::Text(text)) if text == content => held.addresses.push(address),
                // Two contents with one hash, or a file that was edited in place.
                Ok(_) if exact => {}
                Ok(_) => return Err(Trouble::Stale),
                Err(error) => held.errors.push(error),
            }
        }
        Ok(held)
    }

    /// Returns the reservations of `owner`: those of the exact form or, if there are none, those of
    /// its ID alone.
    pub(super) fn held_by_owner(&mut self, owner: &Owner) -> Result<Reserved, Trouble> {
        let [exact, old] = owner.hashes();
        let held = self.held(exact, owner.content().trim().as_bytes())?;
        let none = held.addresses.is_empty() && held.errors.is_empty();
        if none { self.held(old, owner.id.as_bytes()) } else { Ok(held) }
    }

    /// The addresses that `owner` holds: reservations of the exact form, or, if there are none, of
    /// its ID alone.
    ///
    /// # Errors
    /// Code 5 if the folder or one of these files cannot be read.
    pub fn reserved_by(&mut self, owner: &Owner) -> Result<Vec<IpAddr>> {
        self.attempt(|locked| locked.held_by_owner(owner))?.all()
    }

    /// Every reservation. Reads all of them.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub fn list(&mut self) -> Result<Listed> {
        let mut addresses = self.attempt(|locked| {
            let records = locked.index()?.records().map_err(TableError::Io)?;
            Ok(records.into_iter().map(|record| record.address).collect::<Vec<_>>())
        })?;
        addresses.sort_unstable();
        let mut listed =
            Listed { reservations: Vec::with_capacity(addresses.len()), unread: Vec::new(), unusual: Vec::new() };
        for address in addresses {
            match self.read(address) {
                Ok(Content::Text(text)) => listed.reservations.push(Reservation::of(&self.folder, address, &text)),
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

    /// Returns the holder of an address as text for messages: `10.0.0.2 is held by <id> <ifname>`.
    pub(super) fn describe(&self, address: IpAddr) -> String {
        match self.read(address) {
            Ok(Content::Text(text)) => Reservation::of(&self.folder, address, &text).to_string(),
            Ok(Content::Foreign) => format!("{}/{address} is not a reservation", self.folder.path.display()),
            Ok(Content::Absent | Content::Blank) => format!("{address} has just been released"),
            Err(error) => error.to_string(),
        }
    }
}
