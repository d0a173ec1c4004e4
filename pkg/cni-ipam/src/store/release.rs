//! Releases reservations, for DEL, GC and rollback.
//!
//! Every file is read before it is removed, and only regular files whose names are addresses are
//! removed. The ranges are not used, because the configuration may have changed since ADD. As in
//! Go, DEL releases very old reservations, which have the container's ID alone, only if the
//! attachment has no reservation with the interface's name.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use cni::{Code, Error, Result};

use super::lookup::Reserved;
use super::{Locked, Owner, Reservation};
use crate::content::{Content, hash};
use crate::links::Link;

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
    pub fn release(&mut self, owner: &Owner) -> Result<Vec<IpAddr>> {
        let Reserved { links, mut errors } = self.find_by_owner(owner)?;
        self.store_release(links.iter().map(|link| link.address));
        let (removed, error) = self.remove(&links);
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
    /// Code 5 if the folder cannot be read. Errors of single files are part of the result.
    pub fn gc(&mut self, valid: &[Owner]) -> Result<Collected> {
        self.reclaim()?;
        let valid_hashes: HashSet<u64> = valid.iter().flat_map(Owner::hashes).collect();
        let mut scan = self.scan()?;
        let (mut invalid, mut links) = (Vec::new(), Vec::new());
        let (mut errors, mut is_edited) = (Vec::new(), false);
        for (link, _) in scan.held.iter().filter(|(link, _)| !valid_hashes.contains(&link.owner)) {
            // The link is enough to keep a reservation, but not to remove one.
            match self.read(link.address) {
                Ok(Content::Text(text)) if !valid_hashes.contains(&hash(&text)) => {
                    invalid.push(Reservation::of(&self.folder, link.address, &text));
                    links.push(link.clone());
                }
                // The file was edited in place, so it has another owner than its link.
                Ok(_) => {
                    self.folder.links.remove(link);
                    is_edited = true;
                }
                Err(error) => errors.push(error),
            }
        }
        if is_edited {
            self.scan()?;
        }
        let kept = scan.held.len() + scan.unread.len();
        errors.extend(scan.unread.into_iter().map(|(address, error)| self.read_error(address, error)));
        self.store.note_foreign(&mut scan.foreign);
        invalid.sort_unstable_by_key(|reservation| reservation.address);
        self.store_release(links.iter().map(|link| link.address));
        let (removed_addresses, error) = self.remove(&links);
        errors.extend(error);
        let removed_addresses: HashSet<IpAddr> = removed_addresses.into_iter().collect();
        let mut removed = invalid;
        removed.retain(|reservation| removed_addresses.contains(&reservation.address));
        let kept = kept - removed.len();
        Ok(Collected { removed, kept, error: Error::join(errors).err() })
    }

    /// Removes reservations that the caller has chosen from [`list`](Locked::list), except those
    /// that have changed since. Returns the removed addresses.
    ///
    /// # Errors
    /// Code 5 if a reservation cannot be read or removed. The others have been removed.
    pub fn release_chosen(&mut self, chosen: &[Reservation]) -> Result<Vec<IpAddr>> {
        let held: HashMap<IpAddr, Link> = self.scan()?.held.into_iter().map(|(link, _)| (link.address, link)).collect();
        let (mut unchanged, mut errors) = (Vec::with_capacity(chosen.len()), Vec::new());
        for reservation in chosen {
            match self.read(reservation.address) {
                Ok(Content::Text(text)) => {
                    // A program that ignores the lock may have replaced the file since `list`.
                    let is_same = Reservation::of(&self.folder, reservation.address, &text) == *reservation;
                    unchanged.extend(held.get(&reservation.address).filter(|_| is_same).cloned());
                }
                Ok(Content::Absent | Content::Blank | Content::Foreign) => {}
                Err(error) => errors.push(error),
            }
        }
        self.store_release(unchanged.iter().map(|link| link.address));
        let (removed, error) = self.remove(&unchanged);
        errors.extend(error);
        Error::join(errors).map(|()| removed)
    }

    /// Removes these reservations, which the caller has just read, and their links. Continues after
    /// errors. Returns the removed addresses and all errors joined.
    pub(super) fn remove(&mut self, links: &[Link]) -> (Vec<IpAddr>, Option<Error>) {
        if links.is_empty() {
            return (Vec::new(), None);
        }
        let were_complete = self.begin_change();
        let mut removed = Vec::with_capacity(links.len());
        let mut errors = Vec::new();
        for link in links {
            let address = link.address;
            match self.folder.unlink(&address.to_string()) {
                // If the file did not exist any more, the address is free too.
                Ok(_) => {
                    // Not before the file: without a link, the next DEL would not find the file.
                    self.folder.links.remove(link);
                    removed.push(address);
                }
                Err(error) => {
                    let doing = format!("failed to remove {}/{address}", self.folder.path.display());
                    errors.push(Error::caused(Code::IO, doing, error));
                }
            }
        }
        self.finish_change(were_complete);
        (removed, Error::join(errors).err())
    }
}
