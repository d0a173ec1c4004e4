//! ADD: reserves one address of each range set, or none at all.
//!
//! All addresses are chosen before the first file is created, so a refusal changes nothing. Undoing
//! an ADD removes only the files that this ADD created, not all reservations of the attachment: if
//! a repeated ADD fails, the running container must keep its addresses.

use std::net::IpAddr;
use std::time::SystemTime;

use cni::{Code, Error, Result};

use super::folder::LinkOutcome;
use super::{Locked, Owner, Trouble};
use crate::allocator::{self, Occupied, Requested};
use crate::index::table::TableError;
use crate::index::{Content, Index, Record};
use crate::ranges::{Range, RangeSet, RangeSets};

/// What ADD does for an attachment that has addresses already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepeatPolicy {
    /// Fails, because the specification says that an attachment is added once.
    Refuse,
    /// Returns the same addresses.
    Reuse,
}

/// The addresses that an ADD got, in the order of the range sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The addresses, each with its range.
    pub addresses: Vec<(Range, IpAddr)>,
    new_reservations: Vec<NewReservation>,
}

/// A reservation that this ADD created, with what is needed to recognise its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewReservation {
    address: IpAddr,
    inode: u64,
    content: String,
}

impl Lease {
    /// Returns the reservations that this ADD created, for [`Store::undo`](super::Store::undo).
    /// Those that existed before are not among them.
    pub fn new_reservations(&self) -> Vec<NewReservation> {
        self.new_reservations.clone()
    }
}

/// The address chosen from one set.
struct Choice {
    address: IpAddr,
    /// Whether the owner has it already.
    is_reused: bool,
}

/// How many addresses an error message lists.
const MAX_LISTED: usize = 8;

/// The occupied addresses according to an index.
struct IndexedAddresses<'a>(&'a Index);

impl Occupied for IndexedAddresses<'_> {
    type Error = Trouble;

    fn next_free(&mut self, from: IpAddr) -> Result<Option<IpAddr>, Trouble> {
        Ok(self.0.next_free(from)?)
    }
}

impl Locked {
    /// Reserves one address of each set for `owner`: the requested one, or the next of the round
    /// robin. With [`RepeatPolicy::Reuse`], an address of the set that the owner has already is
    /// used again. First releases reservations of an earlier boot, if the options ask for that.
    ///
    /// # Errors
    /// Nothing has been reserved. Code 11: a set has no free address. Code 102: the owner has an
    /// address of a set already, or another owner has the requested address. Code 7: the requested
    /// address is a gateway or in no set. Code 5: a file cannot be created. The messages begin with
    /// Go's texts.
    pub fn reserve(&mut self, owner: &Owner, sets: &RangeSets, requested: &Requested) -> Result<Lease> {
        let requested = requested.assign(sets, &self.store.options.notes)?;
        self.range_sets = Some(sets.clone());
        self.reclaim()?;
        self.attempt(|locked| {
            let mut choices = Vec::with_capacity(requested.len());
            for (position, (set, requested)) in sets.sets().iter().zip(&requested).enumerate() {
                let choice = locked.choose(owner, position, set, *requested).map_err(|trouble| match trouble {
                    Trouble::Final(error) => {
                        Trouble::Final(error.context(format_args!("failed to allocate for range {position}")))
                    }
                    other => other,
                })?;
                choices.push(choice);
            }
            for range in sets.sets().iter().flat_map(RangeSet::ranges) {
                // Adds a counter for the range, from which STATUS answers.
                locked.index()?.count(range)?;
            }
            let mut addresses = Vec::with_capacity(choices.len());
            // The addresses to reserve, each with the position of its set.
            let mut new: Vec<(usize, IpAddr)> = Vec::new();
            for (position, (set, choice)) in sets.sets().iter().zip(&choices).enumerate() {
                addresses.extend(set.find(choice.address).map(|range| (range.clone(), choice.address)));
                if !choice.is_reused {
                    new.push((position, choice.address));
                }
            }
            let records = if new.is_empty() { Vec::new() } else { locked.create_all(owner, &new)? };
            let new_reservation = |record: Record| NewReservation {
                address: record.address,
                inode: record.inode,
                content: owner.content(),
            };
            Ok(Lease { addresses, new_reservations: records.into_iter().map(new_reservation).collect() })
        })
    }

    /// Chooses the address that `owner` gets from `set`, which has this position in the
    /// configuration.
    ///
    /// # Errors
    /// Those of [`reserve`](Locked::reserve); [`Trouble::Stale`] if the folder has to be read again
    /// first.
    fn choose(
        &mut self,
        owner: &Owner,
        position: usize,
        set: &RangeSet,
        requested: Option<IpAddr>,
    ) -> Result<Choice, Trouble> {
        // A reservation names the container and the interface. Very old ones name only the
        // container.
        let [full_hash, id_hash] = owner.hashes();
        let mut reserved = self.held(full_hash, owner.content().trim().as_bytes())?.all()?;
        if self.store.options.on_repeat == RepeatPolicy::Reuse {
            // A reservation that names only the container is not used again, because it may belong
            // to another interface.
            for address in &reserved {
                let is_requested = requested.is_none_or(|requested| requested == *address);
                if is_requested && set.find(*address).is_some() && !set.is_gateway(*address) {
                    return Ok(Choice { address: *address, is_reused: true });
                }
            }
        }
        if let Some(address) = requested {
            if set.is_gateway(address) {
                return Err(Error::config(format!("requested ip {address} is subnet's gateway")).into());
            }
            if !matches!(self.read(address)?, Content::Absent | Content::Blank) {
                let holder = self.describe(address);
                let msg = format!("requested IP address {address} is not available in range set {set}: {holder}");
                return Err(Error::new(Code::CONFLICT, msg).into());
            }
        }
        reserved.extend(self.held(id_hash, owner.id().as_bytes())?.all()?);
        if let Some(address) = reserved.iter().find(|address| set.find(**address).is_some()) {
            let msg = format!("{address} has been allocated to {}, duplicate allocation is not allowed", owner.id());
            let listed: Vec<String> = reserved.iter().take(MAX_LISTED).map(|address| self.describe(*address)).collect();
            let advice = match self.store.options.on_repeat {
                RepeatPolicy::Refuse => "run DEL to release it, or set \"reuse\": true in ipam to get it again",
                RepeatPolicy::Reuse => {
                    "run DEL to release it; \"reuse\" cannot return it, because it is not the requested address, is a gateway, or was reserved without an interface name"
                }
            };
            let details = format!("{}; {advice}", listed.join(", "));
            return Err(Error::new(Code::CONFLICT, msg).with_details(details).into());
        }
        if let Some(address) = requested {
            return Ok(Choice { address, is_reused: false });
        }
        let last = self.folder.last_reserved(position);
        match allocator::next(set, last, &mut IndexedAddresses(self.index()?))? {
            Some(address) => Ok(Choice { address, is_reused: false }),
            // Another program may have removed a reservation without taking the lock. Reading the
            // folder again finds that out.
            None if !self.index()?.is_exact() => Err(Trouble::Stale),
            None => Err(self.exhausted(set)?.into()),
        }
    }

    /// Returns the error, code 11, for a set without a free address. It names the oldest holders.
    fn exhausted(&mut self, set: &RangeSet) -> Result<Error, Trouble> {
        let total = set.capacity();
        let mut error = Error::new(
            Code::TRY_AGAIN,
            format!("no IP addresses available in range set: {set}; {total} of {total} are used"),
        );
        let mut oldest = self.index()?.oldest(set)?;
        if oldest.is_empty() && total > 0 {
            // The index stores the oldest holders only for the sets of the call that rebuilt it.
            oldest = self.index()?.search_oldest(set)?;
        }
        let oldest: Vec<String> = oldest.into_iter().map(|address| self.describe_with_age(address)).collect();
        if !oldest.is_empty() {
            error = error.with_details(format!(
                "oldest reservations: {}; if these containers do not exist any more, run DEL or GC, \
                 or `cnitool ipam gc {} --unknown` for containers that no runtime knows; otherwise configure a larger range",
                oldest.join(", "),
                self.store.network(),
            ));
        }
        Ok(error)
    }

    /// Returns the holder of an address as [`describe`](Locked::describe) does, and since when.
    fn describe_with_age(&self, address: IpAddr) -> String {
        let age = self.folder.made_at(address).and_then(|made| SystemTime::now().duration_since(made).ok());
        match age.map(|age| age.as_secs()) {
            Some(seconds) => format!("{} for {}", self.describe(address), duration_text(seconds)),
            None => self.describe(address),
        }
    }

    /// Creates a reservation for each address, which comes with the position of its set, and
    /// updates the index in the order that the head of the module `index` explains. Returns the
    /// records.
    ///
    /// # Errors
    /// A file cannot be created; the others have been removed again. [`Trouble::Stale`] if the
    /// folder has changed.
    fn create_all(&mut self, owner: &Owner, addresses: &[(usize, IpAddr)]) -> Result<Vec<Record>, Trouble> {
        if !self.begin()? {
            return Err(Trouble::Stale);
        }
        let mut created: Vec<Record> = Vec::with_capacity(addresses.len());
        let mut index_outcome = Ok(());
        for (position, address) in addresses {
            match self.create(owner, *address, &mut index_outcome) {
                Ok(LinkOutcome::NewReservation(record)) => created.push(record),
                outcome => {
                    let name = |address: &IpAddr| format!("{}/{address}", self.folder.path.display());
                    for record in &created {
                        if let Err(error) = self.folder.unlink(&record.address.to_string()) {
                            let name = name(&record.address);
                            self.store
                                .options
                                .notes
                                .note(format_args!("failed to remove the new reservation {name}: {error}"));
                        }
                    }
                    // The index file stays marked as dirty, so the next process rebuilds it.
                    self.index = None;
                    return Err(match outcome {
                        Err(error) => {
                            let doing = format!("failed to create {}", name(address));
                            let error = Error::caused(Code::IO, doing, error);
                            error.context(format_args!("failed to allocate for range {position}")).into()
                        }
                        Ok(_) => Trouble::Stale,
                    });
                }
            }
        }
        for (position, address) in addresses {
            if let Err(error) = self.folder.set_last_reserved(*position, *address) {
                // Only the next allocation then starts at another address.
                let path = self.folder.path.display();
                self.store
                    .options
                    .notes
                    .note(format_args!("failed to write {path}/last_reserved_ip.{position}: {error}"));
            }
        }
        self.settle(|index| {
            index_outcome?;
            created.iter().try_for_each(|record| index.put(record))
        });
        Ok(created)
    }

    /// Creates one reservation. Replaces a blank file of that name.
    ///
    /// Just before the file gets its name, a preliminary record is written to the index. If that
    /// fails, the error is stored in `index_outcome`, and the reservation is created even so: the
    /// caller then discards the index.
    pub(super) fn create(
        &mut self,
        owner: &Owner,
        address: IpAddr,
        index_outcome: &mut Result<(), TableError>,
    ) -> std::io::Result<LinkOutcome> {
        // On a disk that another machine may also use, a different boot ID does not prove that the
        // container is gone, so the record gets no boot ID.
        let is_shared = self.index.as_ref().is_some_and(Index::is_shared);
        let (content, boot) = (owner.content(), if is_shared { 0 } else { self.store.options.host.boot() });
        let index = &mut self.index;
        let mut before_link = |record: &Record| {
            // An index in memory does not outlive this process, so it needs no preliminary record.
            if let Some(index) = index.as_mut().filter(|index| index.is_on_disk() && index_outcome.is_ok()) {
                *index_outcome = index.put(record);
            }
        };
        match self.folder.create(address, &content, boot, &mut before_link)? {
            LinkOutcome::Exists if crate::index::read(&self.folder.file, address)? == Content::Blank => {
                self.folder.unlink(&address.to_string())?;
                self.folder.create(address, &content, boot, &mut before_link)
            }
            outcome => Ok(outcome),
        }
    }

    /// Removes the reservations that [`reserve`](Locked::reserve) created. Leaves files that have
    /// been replaced or changed since.
    ///
    /// # Errors
    /// Code 5, after all have been tried.
    pub fn undo(&mut self, reservations: &[NewReservation]) -> Result<()> {
        use std::os::unix::fs::MetadataExt;
        let (mut unchanged, mut errors) = (Vec::new(), Vec::new());
        for NewReservation { address, inode, content } in reservations {
            let path = self.folder.path.join(address.to_string());
            let is_same_file = std::fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.ino() == *inode);
            if !is_same_file {
                continue;
            }
            match self.read(*address) {
                Ok(Content::Text(text)) if text == content.trim().as_bytes() => unchanged.push(*address),
                Ok(_) => {}
                Err(error) => errors.push(error),
            }
        }
        errors.extend(self.remove(&unchanged).1);
        Error::join(errors)
    }
}

/// Formats a duration in its largest sensible unit: `90 s`, `15 min`, `3 h`, `12 days`.
fn duration_text(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}
