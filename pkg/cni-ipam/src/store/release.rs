//! DEL, GC and rollback: releasing reservations.
//!
//! Every file is read before it goes, and only regular files named as addresses go. Ranges are not
//! used, because the configuration may have changed since ADD. A reservation of the old form (the
//! container's ID alone) is released only if there is none of the exact form, as in Go.

use std::collections::HashSet;
use std::net::IpAddr;

use cni::{Code, Error, Result};

use super::lookup::Reserved;
use super::{Locked, Owner, Reservation, Trouble};
use crate::index::table::TableError;
use crate::index::{Content, Holder, Index, Record, hash};

/// Above this many changes a new index is cheaper and simpler than that many changes in place.
const MANY: usize = 32;

/// The outcome of GC.
#[derive(Debug)]
pub struct Collected {
    /// The reservations that it removed, in the order of the addresses.
    pub removed: Vec<Reservation>,
    /// How many reservations stay.
    pub kept: usize,
    /// The errors, if any; everything else was done.
    pub error: Option<Error>,
}

impl Locked {
    /// Removes what `owner` holds; nothing is fine. Returns what was removed.
    ///
    /// # Errors
    /// Code 5, after trying everything.
    pub fn release(&mut self, owner: &Owner) -> Result<Vec<IpAddr>> {
        let Reserved { addresses, mut errors } = self.attempt(|locked| locked.held_by_owner(owner))?;
        let (removed, error) = self.remove(&addresses);
        errors.extend(error);
        Error::join(errors).map(|()| removed)
    }

    /// Removes every reservation whose owner is not in `valid`. One of the old form stays if its ID
    /// is in `valid` with any interface. What is not a reservation stays and is noted. What an
    /// earlier boot has left goes before that, valid or not, as the options say.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read; what fails later is part of the answer.
    pub fn collect(&mut self, valid: &[Owner]) -> Result<Collected> {
        self.reclaim()?;
        let valid: HashSet<u64> = valid.iter().flat_map(Owner::hashes).collect();
        let held = self.attempt(|locked| {
            let records = locked.index()?.records().map_err(TableError::Io)?;
            // In an older build's index, reservations whose files are too long have no known owner.
            let held = |record: &Record| record.holder != Holder::Free;
            Ok(records.into_iter().filter(held).collect::<Vec<_>>())
        })?;
        let (mut doomed, mut foreign) = (Vec::new(), Vec::new());
        let mut errors = Vec::new();
        for record in &held {
            if matches!(record.holder, Holder::Content(hash) if valid.contains(&hash)) {
                continue;
            }
            match self.read(record.address) {
                // Judged by what the file says, not by what the index remembers.
                Ok(Content::Text(text)) if !valid.contains(&hash(&text)) => {
                    doomed.push(Reservation::of(&self.folder, record.address, &text));
                }
                Ok(Content::Foreign) => foreign.push(record.address),
                Ok(_) => {}
                Err(error) => errors.push(error),
            }
        }
        self.store.note_foreign(&mut foreign);
        doomed.sort_unstable_by_key(|reservation| reservation.address);
        let addresses: Vec<IpAddr> = doomed.iter().map(|reservation| reservation.address).collect();
        let (removed, error) = self.remove(&addresses);
        errors.extend(error);
        let removed: HashSet<IpAddr> = removed.into_iter().collect();
        doomed.retain(|reservation| removed.contains(&reservation.address));
        Ok(Collected {
            kept: held.len() - foreign.len() - doomed.len(),
            removed: doomed,
            error: Error::join(errors).err(),
        })
    }

    /// Removes reservations that the caller has chosen out of [`list`](Locked::list), under the
    /// lock that it still holds. One that has changed since stays. Returns what was removed.
    ///
    /// # Errors
    /// Code 5, after trying everything.
    pub fn release_chosen(&mut self, chosen: &[Reservation]) -> Result<Vec<IpAddr>> {
        let (mut unchanged, mut errors) = (Vec::with_capacity(chosen.len()), Vec::new());
        for reservation in chosen {
            let now = |text: &[u8]| Reservation::of(&self.folder, reservation.address, text);
            match self.read(reservation.address) {
                // Go's plugin takes the lock, an operator's script may ignore it.
                Ok(Content::Text(text)) if now(&text) == *reservation => unchanged.push(reservation.address),
                Ok(_) => {}
                Err(error) => errors.push(error),
            }
        }
        let (removed, error) = self.remove(&unchanged);
        errors.extend(error);
        Error::join(errors).map(|()| removed)
    }

    /// Unlinks these reservations, which the caller has just read, and updates the index. Continues
    /// after errors.
    pub(super) fn remove(&mut self, addresses: &[IpAddr]) -> (Vec<IpAddr>, Option<Error>) {
        if addresses.is_empty() {
            return (Vec::new(), None);
        }
        // If the folder differs from the index, the next reader must rebuild the index. The files
        // are removed regardless.
        if !matches!(self.begin(), Ok(true)) {
            self.distrust(super::Trust::Records);
        }
        let mut removed = Vec::with_capacity(addresses.len());
        let mut errors = Vec::new();
        for address in addresses {
            match self.folder.unlink(&address.to_string()) {
                Ok(_) => removed.push(*address),
                Err(error) => {
                    let doing = format!("failed to remove {}/{address}", self.folder.path.display());
                    errors.push(Error::caused(Code::IO, doing, error));
                }
            }
        }
        if removed.len() > MANY {
            self.distrust(super::Trust::Records);
            // Errors here cost time later, nothing else.
            let _ = self.attempt(|locked| locked.index().map(|_| ()));
        } else {
            self.settle(|index| removed.iter().try_for_each(|address| index.remove(*address)));
        }
        (removed, Error::join(errors).err())
    }

    /// Step 1 of a change of the folder: `false` if the index is not true any more.
    pub(super) fn begin(&mut self) -> Result<bool, Trouble> {
        self.index()?;
        match &mut self.index {
            Some(index) => Ok(index.begin(&self.folder.file)?),
            None => Ok(false),
        }
    }

    /// Steps 3 to 5: the folder has been changed; `change` updates the index. If that fails, the
    /// index stays dirty, so the next verb rebuilds it.
    pub(super) fn settle(&mut self, change: impl FnOnce(&mut Index) -> Result<(), TableError>) {
        let Some(mut index) = self.index.take() else { return };
        let settled = (|| {
            if index.is_on_disk() {
                index.mark(&self.folder.file)?;
            }
            change(&mut index)?;
            index.finish()
        })();
        match settled {
            Ok(()) => self.index = Some(index),
            Err(TableError::Corrupt) => self.distrust(super::Trust::Place),
            Err(TableError::Io(error)) => {
                self.store.tell(error);
                self.distrust(super::Trust::None);
            }
        }
    }
}
