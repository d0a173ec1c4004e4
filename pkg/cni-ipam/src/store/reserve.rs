//! ADD: one address of each range set, all of them or none.
//!
//! Everything is decided before the first file is created, so a refusal changes nothing. Undoing an
//! ADD releases only the files that this ADD created, not all reservations of the container: a
//! repeated ADD that fails must leave the running container its addresses.

use std::net::IpAddr;
use std::time::SystemTime;

use cni::{Code, Error, Result};

use super::folder::LinkOutcome;
use super::{Locked, Owner, Trouble};
use crate::allocator::{self, Occupied, Requested};
use crate::index::table::TableError;
use crate::index::{Content, Index, Record};
use crate::ranges::{Range, RangeSet, RangeSets};

/// The reaction to an ADD for an attachment that has addresses already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepeatPolicy {
    /// It is refused, as the specification has it: an attachment is added once.
    Refuse,
    /// It gets the same addresses.
    Reuse,
}

/// The addresses that an ADD gets, in the order of the range sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The range that each address is of, and the address.
    pub addresses: Vec<(Range, IpAddr)>,
    made: Vec<NewReservation>,
}

/// A reservation made by this process: enough to take back this one and no other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewReservation {
    address: IpAddr,
    inode: u64,
    content: String,
}

impl Lease {
    /// The reservations that this ADD made, for [`Store::undo`](super::Store::undo): none that it
    /// found.
    pub fn made(&self) -> Vec<NewReservation> {
        self.made.clone()
    }
}

/// The address that one set gives, and whether the owner has it already.
struct Pick {
    address: IpAddr,
    held: bool,
}

/// How many addresses a message names.
const NAMED: usize = 8;

struct Asking<'a>(&'a Index);

impl Occupied for Asking<'_> {
    type Error = Trouble;

    fn next_free(&mut self, from: IpAddr) -> Result<Option<IpAddr>, Trouble> {
        Ok(self.0.next_free(from)?)
    }
}

impl Locked {
    /// Reserves one address of each set for `owner`: the requested one, or the next in turn. What
    /// an earlier boot has left is taken away first, as the options say; and with
    /// [`RepeatPolicy::Reuse`] what the owner has of a set is its address.
    ///
    /// # Errors
    /// Nothing is reserved then. Code 11: a set has no free address; 102: the owner already has an
    /// address of a set, or a requested address is held, and the message names the holder; 7: what
    /// is requested is a gateway or in no set; 5: a file could not be made. The messages begin with
    /// Go's texts.
    pub fn reserve(&mut self, owner: &Owner, sets: &RangeSets, requested: &Requested) -> Result<Lease> {
        let requested = requested.assign(sets, &self.store.options.notes)?;
        self.asking = Some(sets.clone());
        self.reclaim()?;
        self.attempt(|locked| {
            let mut picked = Vec::with_capacity(requested.len());
            for (position, (set, requested)) in sets.sets().iter().zip(&requested).enumerate() {
                let address = locked.pick(owner, position, set, *requested).map_err(|trouble| match trouble {
                    Trouble::Final(error) => {
                        Trouble::Final(error.context(format_args!("failed to allocate for range {position}")))
                    }
                    other => other,
                })?;
                picked.push(address);
            }
            for range in sets.sets().iter().flat_map(RangeSet::ranges) {
                // STATUS answers from these counters.
                locked.index()?.count(range)?;
            }
            let new: Vec<(usize, IpAddr)> = picked
                .iter()
                .enumerate()
                .filter(|(_, pick)| !pick.held)
                .map(|(set, pick)| (set, pick.address))
                .collect();
            let records = if new.is_empty() { Vec::new() } else { locked.carry_out(owner, &new)? };
            let made = |record: Record| NewReservation {
                address: record.address,
                inode: record.inode,
                content: owner.content(),
            };
            let addresses = sets.sets().iter().zip(&picked);
            let addresses = addresses.filter_map(|(set, pick)| Some((set.find(pick.address)?.clone(), pick.address)));
            Ok(Lease { addresses: addresses.collect(), made: records.into_iter().map(made).collect() })
        })
    }

    fn pick(
        &mut self,
        owner: &Owner,
        position: usize,
        set: &RangeSet,
        requested: Option<IpAddr>,
    ) -> Result<Pick, Trouble> {
        let [exact, old] = owner.hashes();
        let mut held = self.held(exact, owner.content().trim().as_bytes())?.all()?;
        if self.store.options.again == RepeatPolicy::Reuse {
            // Only reservations of the exact form: one with the container's ID alone may be another
            // interface's.
            let wanted = |address: &IpAddr| requested.is_none_or(|requested| requested == *address);
            let usable = |address: &IpAddr| set.find(*address).is_some() && !set.is_gateway(*address);
            if let Some(address) = held.iter().copied().find(|address| wanted(address) && usable(address)) {
                return Ok(Pick { address, held: true });
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
        // Both forms: an owner that has an address of the set in either form gets no second one.
        held.extend(self.held(old, owner.id().as_bytes())?.all()?);
        if let Some(address) = held.iter().find(|address| set.find(**address).is_some()) {
            let msg = format!("{address} has been allocated to {}, duplicate allocation is not allowed", owner.id());
            let held: Vec<String> = held.iter().take(NAMED).map(|address| self.describe(*address)).collect();
            let advice = match self.store.options.again {
                RepeatPolicy::Refuse => "run DEL to release it, or set \"reuse\": true in ipam to get it again",
                RepeatPolicy::Reuse => {
                    "run DEL to release it; \"reuse\" returns no other address, no gateway, and no address recorded without an interface name"
                }
            };
            let details = format!("{}; {advice}", held.join(", "));
            return Err(Error::new(Code::CONFLICT, msg).with_details(details).into());
        }
        if let Some(address) = requested {
            return Ok(Pick { address, held: false });
        }
        let last = self.folder.last_reserved(position);
        match allocator::next(set, last, &mut Asking(self.index()?))? {
            Some(address) => Ok(Pick { address, held: false }),
            // Something may have been removed without the lock and unseen; reading the folder once
            // will tell.
            None if !self.index()?.is_exact() => Err(Trouble::Stale),
            None => Err(self.exhausted(set)?.into()),
        }
    }

    /// The error that says that a set is used up, by how many and by whom.
    fn exhausted(&mut self, set: &RangeSet) -> Result<Error, Trouble> {
        let total = set.capacity();
        let mut error = Error::new(
            Code::TRY_AGAIN,
            format!("no IP addresses available in range set: {set}; {total} of {total} are used"),
        );
        // The oldest holders need not be the next in the round robin: an address that was freed and
        // taken again has kept its place there.
        let mut oldest = self.index()?.oldest(set)?;
        if oldest.is_empty() && total > 0 {
            // The folder was read for another set, or for none.
            oldest = self.index()?.search_oldest(set)?;
        }
        let oldest: Vec<String> = oldest.into_iter().map(|address| self.describe_with_age(address)).collect();
        if !oldest.is_empty() {
            error = error.with_details(format!(
                "held longest: {}; if these containers are gone, DEL or GC frees their addresses, \
                 and `cnitool ipam gc {} --unknown` what no runtime remembers; else the network needs a larger range",
                oldest.join(", "),
                self.store.network(),
            ));
        }
        Ok(error)
    }

    fn describe_with_age(&self, address: IpAddr) -> String {
        let age = self.folder.made_at(address).and_then(|made| SystemTime::now().duration_since(made).ok());
        match age.map(|age| age.as_secs()) {
            Some(seconds) => format!("{} since {}", self.describe(address), in_words(seconds)),
            None => self.describe(address),
        }
    }

    /// Creates the files, then updates the index, in the order that the head of `index` explains.
    fn carry_out(&mut self, owner: &Owner, picked: &[(usize, IpAddr)]) -> Result<Vec<Record>, Trouble> {
        if !self.begin()? {
            return Err(Trouble::Stale);
        }
        let mut made: Vec<Record> = Vec::with_capacity(picked.len());
        let mut announced = Ok(());
        for (position, address) in picked {
            match self.create(owner, *address, &mut announced) {
                Ok(LinkOutcome::NewReservation(record)) => made.push(record),
                outcome => {
                    let name = |address: &IpAddr| format!("{}/{address}", self.folder.path.display());
                    for record in &made {
                        if let Err(error) = self.folder.unlink(&record.address.to_string()) {
                            let name = name(&record.address);
                            self.store
                                .options
                                .notes
                                .note(format_args!("failed to undo the reservation of {name}: {error}"));
                        }
                    }
                    // The header is dirty, so the next process reads the folder.
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
        for (position, address) in picked {
            if let Err(error) = self.folder.set_last_reserved(*position, *address) {
                // This loses only the starting point of the next allocation.
                let path = self.folder.path.display();
                self.store
                    .options
                    .notes
                    .note(format_args!("failed to write {path}/last_reserved_ip.{position}: {error}"));
            }
        }
        self.settle(|index| announced.and_then(|()| made.iter().try_for_each(|record| index.put(record))));
        Ok(made)
    }

    /// Makes one reservation; a blank file of that name is replaced. What became of telling the
    /// index beforehand is `announced`: no reason not to go on, for an index in doubt is given up
    /// at the end.
    pub(super) fn create(
        &mut self,
        owner: &Owner,
        address: IpAddr,
        announced: &mut Result<(), TableError>,
    ) -> std::io::Result<LinkOutcome> {
        // A reservation on a shared disk survives a reboot of the machine with the disk, even if
        // that machine has the same ID.
        let is_shared = self.index.as_ref().is_some_and(Index::is_shared);
        let (content, boot) = (owner.content(), if is_shared { 0 } else { self.store.options.host.boot() });
        let index = &mut self.index;
        let mut announce = |record: &Record| {
            // One in memory dies with us.
            if let Some(index) = index.as_mut().filter(|index| index.is_on_disk() && announced.is_ok()) {
                *announced = index.put(record);
            }
        };
        match self.folder.create(address, &content, boot, &mut announce)? {
            LinkOutcome::Exists if crate::index::read(&self.folder.file, address)? == Content::Blank => {
                self.folder.unlink(&address.to_string())?;
                self.folder.create(address, &content, boot, &mut announce)
            }
            outcome => Ok(outcome),
        }
    }

    /// Takes back what [`reserve`](Locked::reserve) made: only files that are still those,
    /// unchanged.
    ///
    /// # Errors
    /// Code 5, after trying all of them.
    pub fn undo(&mut self, made: &[NewReservation]) -> Result<()> {
        use std::os::unix::fs::MetadataExt;
        let (mut still, mut errors) = (Vec::new(), Vec::new());
        for made in made {
            let path = self.folder.path.join(made.address.to_string());
            let same = std::fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.ino() == made.inode);
            if !same {
                continue;
            }
            match self.read(made.address) {
                Ok(Content::Text(text)) if text == made.content.trim().as_bytes() => still.push(made.address),
                Ok(_) => {}
                Err(error) => errors.push(error),
            }
        }
        errors.extend(self.remove(&still).1);
        Error::join(errors)
    }
}

fn in_words(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}
