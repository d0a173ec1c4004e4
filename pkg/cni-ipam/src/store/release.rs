//! Releases reservations, for DEL, GC and rollback.
//!
//! Every file is read before it is removed, and only regular files whose names are addresses are
//! removed. The ranges are not used, because the configuration may have changed since ADD. As in
//! Go, DEL releases very old reservations, which have the container's ID alone, only if the
//! attachment has no reservation with the interface's name.

use std::collections::HashSet;
use std::net::IpAddr;

use cni::{Code, Error, Result};

use super::lookup::Reserved;
use super::{Locked, Owner, Reservation, Trouble, Trust};
use crate::index::table::TableError;
use crate::index::{Content, Holder, Index, Record, hash};

/// The largest number of removals after which the index is changed in place. After more, a rebuild
/// is faster.
const MAX_CHANGES_IN_PLACE: usize = 32;

/// The outcome of GC.
#[derive(Debug)]
pub struct Collected {
    /// The removed reservations, sorted by address.
    pub removed: Vec<Reservation>,
    /// The number of remaining reservations, including unreadable files.
    pub kept: usize,
    /// All errors joined, if there are any. They did not prevent the other removals.
    pub error: Option<Error>,
}

impl Locked {
    /// Removes the reservations of `owner` and returns their addresses. Having none is not an
    /// error.
    ///
    /// # Errors
    /// - Code 5 if the folder cannot be read.
    /// - Code 5 if a reservation of `owner` cannot be read or removed. The others have been
    ///   removed.
    /// - Code 11 if the folder keeps changing.
    pub fn release(&mut self, owner: &Owner) -> Result<Vec<IpAddr>> {
        let Reserved { addresses, mut errors } = self.attempt(|locked| locked.find_by_owner(owner))?;
        self.store_release(&addresses);
        let (removed, error) = self.remove(&addresses);
        errors.extend(error);
        Error::join(errors).map(|()| removed)
    }

    /// Removes all reservations whose owner is not in `valid`. A very old reservation, which has
    /// the container's ID alone, stays if `valid` has that ID with any interface. A file that is
    /// not a reservation stays, and a note reports it. With
    /// [`RebootPolicy::Reclaim`](super::RebootPolicy::Reclaim), reservations of an earlier boot are
    /// removed first, even those of valid owners.
    ///
    /// # Errors
    /// - Code 5 if the folder cannot be read. Errors of single files are part of the result.
    /// - Code 11 if the folder keeps changing.
    pub fn gc(&mut self, valid: &[Owner]) -> Result<Collected> {
        self.reclaim()?;
        let valid_hashes: HashSet<u64> = valid.iter().flat_map(Owner::hashes).collect();
        let occupied = self.attempt(|locked| {
            let records = locked.index()?.records().map_err(TableError::Io)?;
            Ok(records.into_iter().filter(Record::is_occupied).collect::<Vec<_>>())
        })?;
        let (mut invalid, mut foreign) = (Vec::new(), Vec::new());
        let mut errors = Vec::new();
        for record in &occupied {
            if matches!(record.holder, Holder::Content(recorded) if valid_hashes.contains(&recorded)) {
                continue;
            }
            // The index is enough to keep a reservation, but not to remove one.
            match self.read(record.address) {
                Ok(Content::Text(text)) if !valid_hashes.contains(&hash(&text)) => {
                    invalid.push(Reservation::of(&self.folder, record.address, &text));
                }
                Ok(Content::Foreign) => foreign.push(record.address),
                Ok(Content::Text(_) | Content::Absent | Content::Blank) => {}
                Err(error) => errors.push(error),
            }
        }
        self.store.note_foreign(&mut foreign);
        invalid.sort_unstable_by_key(|reservation| reservation.address);
        let addresses: Vec<IpAddr> = invalid.iter().map(|reservation| reservation.address).collect();
        self.store_release(&addresses);
        let (removed_addresses, error) = self.remove(&addresses);
        errors.extend(error);
        let removed_addresses: HashSet<IpAddr> = removed_addresses.into_iter().collect();
        let mut removed = invalid;
        removed.retain(|reservation| removed_addresses.contains(&reservation.address));
        let kept = occupied.len() - foreign.len() - removed.len();
        Ok(Collected { removed, kept, error: Error::join(errors).err() })
    }

    /// Removes reservations that the caller has chosen from [`list`](Locked::list), except those
    /// that have changed since. Returns the removed addresses.
    ///
    /// # Errors
    /// Code 5 if a reservation cannot be read or removed. The others have been removed.
    pub fn release_chosen(&mut self, chosen: &[Reservation]) -> Result<Vec<IpAddr>> {
        let (mut unchanged, mut errors) = (Vec::with_capacity(chosen.len()), Vec::new());
        for reservation in chosen {
            match self.read(reservation.address) {
                Ok(Content::Text(text)) => {
                    // A program that ignores the lock may have replaced the file since `list`.
                    if Reservation::of(&self.folder, reservation.address, &text) == *reservation {
                        unchanged.push(reservation.address);
                    }
                }
                Ok(Content::Absent | Content::Blank | Content::Foreign) => {}
                Err(error) => errors.push(error),
            }
        }
        self.store_release(&unchanged);
        let (removed, error) = self.remove(&unchanged);
        errors.extend(error);
        Error::join(errors).map(|()| removed)
    }

    /// Removes the files of these addresses, which the caller has just read, and updates the index.
    /// Continues after errors. Returns the removed addresses and all errors joined.
    pub(super) fn remove(&mut self, addresses: &[IpAddr]) -> (Vec<IpAddr>, Option<Error>) {
        if addresses.is_empty() {
            return (Vec::new(), None);
        }
        // An outdated or unusable index does not prevent the removal. It is dropped and rebuilt
        // later.
        if !matches!(self.begin_change(), Ok(true)) {
            self.distrust(Trust::Records);
        }
        let mut removed = Vec::with_capacity(addresses.len());
        let mut errors = Vec::new();
        for address in addresses {
            match self.folder.unlink(&address.to_string()) {
                // If the file did not exist any more, the address is free too.
                Ok(_) => removed.push(*address),
                Err(error) => {
                    let doing = format!("failed to remove {}/{address}", self.folder.path.display());
                    errors.push(Error::caused(Code::IO, doing, error));
                }
            }
        }
        if removed.len() > MAX_CHANGES_IN_PLACE {
            self.distrust(Trust::Records);
            // Rebuilds the index. If that fails, the next verb does it.
            let _ = self.attempt(|locked| locked.index().map(|_| ()));
        } else {
            self.finish_change(|index| removed.iter().try_for_each(|address| index.remove(*address)));
        }
        (removed, Error::join(errors).err())
    }

    /// Makes the header of the index dirty, before the folder is changed (step 1 in the head of the
    /// module `index`). Returns `false` if the index does not describe the folder any more.
    pub(super) fn begin_change(&mut self) -> Result<bool, Trouble> {
        // Sets `self.index`. The returned reference would borrow `self.folder` too.
        self.index()?;
        match &mut self.index {
            Some(index) => Ok(index.begin(&self.folder.file)?),
            None => Ok(false),
        }
    }

    /// Brings the index up to date after the folder has been changed (steps 3 to 5 in the head of
    /// the module `index`). `update` changes the table, which is step 4. If a step fails, the index
    /// file stays dirty, so the next verb rebuilds it. Does nothing if the index was dropped.
    pub(super) fn finish_change(&mut self, update: impl FnOnce(&mut Index) -> Result<(), TableError>) {
        let Some(mut index) = self.index.take() else { return };
        match self.update_index(&mut index, update) {
            Ok(()) => self.index = Some(index),
            Err(error) => self.distrust_after(error),
        }
    }

    /// Does the work of [`finish_change`](Locked::finish_change).
    fn update_index(
        &self,
        index: &mut Index,
        update: impl FnOnce(&mut Index) -> Result<(), TableError>,
    ) -> Result<(), TableError> {
        if index.is_on_disk() {
            index.stamp_folder(&self.folder.file)?;
        }
        update(index)?;
        index.finish()
    }
}
