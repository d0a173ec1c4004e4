//! ADD: reserves one address of each range set, or none at all.
//!
//! All addresses are chosen before the first file is created, so a refused ADD reserves nothing.
//! Undoing an ADD removes only the files that it created, not all reservations of the attachment:
//! if a repeated ADD fails, the running container must keep its addresses.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::SystemTime;

use cni::{Code, Error, Result};

use super::cooldown::Cooling;
use super::folder::Created;
use super::{Locked, MAX_ATTEMPTS, MAX_LISTED, Owner};
use crate::allocator::{self, Requested};
use crate::content::Content;
use crate::links::Link;
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
    link: Link,
    inode: u64,
    content: String,
}

impl Lease {
    /// Returns the reservations that this ADD created, without those that it reused, for
    /// [`Store::undo`](super::Store::undo).
    pub fn new_reservations(&self) -> Vec<NewReservation> {
        self.new_reservations.clone()
    }
}

/// The range set for which [`Locked::reserve_in`] has found no address in the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The position of the set.
    pub set: usize,
    /// The requested address, which is in none of the blocks, or `None` if every address of the set
    /// in the blocks is occupied.
    pub requested: Option<IpAddr>,
}

/// How many addresses are looked up one by one. After that, reading all names is faster.
const MAX_LOOKUPS: u32 = 64;
/// How many of the oldest reservations a message names.
const MAX_OLDEST: usize = 3;

/// What an ADD may get.
struct Request<'a> {
    owner: &'a Owner,
    sets: &'a RangeSets,
    /// Only addresses in these blocks are chosen.
    blocks: &'a [(IpAddr, IpAddr)],
    /// The requested address of each set.
    requested: Vec<Option<IpAddr>>,
    cooling: Cooling,
    /// The addresses that the owner has already.
    reserved: Vec<IpAddr>,
    /// Addresses in very old reservations, which name only the container. They are not reused,
    /// because they may belong to another interface, but they too make this a repeated ADD.
    reserved_by_old: Vec<IpAddr>,
}

/// The address chosen from one set.
struct Choice {
    address: IpAddr,
    /// Whether the owner has it already.
    is_reused: bool,
}

impl Locked {
    /// Reserves one address of each set for `owner`: the requested address, or the next one in the
    /// round robin. With [`RepeatPolicy::Reuse`], uses an address of the set that the owner has
    /// already. With [`RebootPolicy::Reclaim`](super::RebootPolicy::Reclaim), first releases
    /// reservations of an earlier boot.
    ///
    /// # Errors
    /// After an error, nothing is reserved. The messages of the first three begin with Go's texts.
    /// - Code 11 if a set has no free address.
    /// - Code 102 if the owner has an address of a set already, or if the requested address is not
    ///   free.
    /// - Code 7 if the requested address is a gateway or in no set.
    /// - Code 5 if the folder cannot be read, or a file cannot be created.
    /// - Code 11 if the folder keeps changing.
    pub fn reserve(&mut self, owner: &Owner, sets: &RangeSets, requested: &Requested) -> Result<Lease> {
        self.reserve_in(owner, sets, requested, &allocator::ALL)?
            .or_else(|Shortage { set, .. }| Err(in_set(set, self.exhausted_error(&sets.sets()[set])?)))
    }

    /// Reserves like [`reserve`](Locked::reserve), but only addresses that are in one of `blocks`.
    /// Each block is a first and a last address; they are sorted and do not overlap. An address
    /// that the owner has already may be in none. Returns the first set without an address in the
    /// blocks; then nothing is reserved.
    ///
    /// # Errors
    /// As [`reserve`](Locked::reserve), except those of a [`Shortage`].
    pub fn reserve_in(
        &mut self,
        owner: &Owner,
        sets: &RangeSets,
        requested: &Requested,
        blocks: &[(IpAddr, IpAddr)],
    ) -> Result<Result<Lease, Shortage>> {
        let requested = requested.assign(sets, &self.store.options.notes)?;
        self.reclaim()?;
        let cooling = self.cooling();
        self.repair_future_releases(&cooling);

        let [exact, old] = self.find_both_forms(owner)?;
        let (reserved, reserved_by_old) = (exact.require_complete()?, old.require_complete()?);
        let request = Request { owner, sets, blocks, requested, cooling, reserved, reserved_by_old };
        for _ in 0..MAX_ATTEMPTS {
            let choices = match self.choose_all(&request)? {
                Ok(choices) => choices,
                Err(shortage) => return Ok(Err(shortage)),
            };
            let mut addresses = Vec::with_capacity(choices.len());
            // The addresses that the owner does not have yet, each with the position of its set.
            let mut new: Vec<(usize, IpAddr)> = Vec::with_capacity(choices.len());
            for (position, (set, Choice { address, is_reused })) in sets.sets().iter().zip(choices).enumerate() {
                // Always `Some`: the address was chosen from a range of the set.
                if let Some(range) = set.find(address) {
                    addresses.push((range.clone(), address));
                }
                if !is_reused {
                    new.push((position, address));
                }
            }
            if let Some(new_reservations) = self.create_all(owner, &new)? {
                return Ok(Ok(Lease { addresses, new_reservations }));
            }
        }
        let path = self.folder.path.display();
        let msg = format!("failed to reserve an address in {path}: another program changes it without its lock");
        Err(Error::new(Code::TRY_AGAIN, msg))
    }

    /// Chooses an address from each set, or returns the first set without one. The errors are those
    /// of [`choose`](Locked::choose), with the position of the set.
    fn choose_all(&mut self, request: &Request<'_>) -> Result<Result<Vec<Choice>, Shortage>> {
        let mut choices = Vec::with_capacity(request.requested.len());
        for (set, requested) in request.requested.iter().enumerate() {
            match self.choose(request, set).map_err(|error| in_set(set, error))? {
                Some(choice) => choices.push(choice),
                None => return Ok(Err(Shortage { set, requested: *requested })),
            }
        }
        Ok(Ok(choices))
    }

    /// Chooses the address that the owner gets from the set at this position. Returns `None` if the
    /// set has none in the blocks. An address that cools down is given only if it is requested, or
    /// if no other is free.
    ///
    /// # Errors
    /// Those of [`reserve`](Locked::reserve).
    fn choose(&mut self, request: &Request<'_>, position: usize) -> Result<Option<Choice>> {
        let Request { blocks, cooling, reserved, reserved_by_old, .. } = request;
        let (set, requested) = (&request.sets.sets()[position], request.requested[position]);
        if self.store.options.on_repeat == RepeatPolicy::Reuse {
            let is_requested = |address: IpAddr| requested.is_none_or(|requested| requested == address);
            let reusable = reserved.iter().find(|address| is_requested(**address) && set.can_allocate(**address));
            if let Some(address) = reusable {
                return Ok(Some(Choice { address: *address, is_reused: true }));
            }
        }
        if let Some(address) = requested {
            self.check_requested(address, set)?;
        }
        if let Some(address) = reserved.iter().chain(reserved_by_old).find(|address| set.find(**address).is_some()) {
            return Err(self.repeated_add_error(request, *address));
        }
        if let Some(address) = requested {
            if !is_in(blocks, address) {
                return Ok(None);
            }
            self.note_cooling(cooling, address, "it was requested");
            return Ok(Some(Choice { address, is_reused: false }));
        }
        match self.next_free(request, position)? {
            Some(address) => Ok(Some(Choice { address, is_reused: false })),
            None => Ok(self.choose_cooling(request, set)),
        }
    }

    /// Returns the next free address of a set in the round robin that does not cool down.
    ///
    /// The search continues after the address that was allocated last, so the first look-up nearly
    /// always finds a free address.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    fn next_free(&mut self, request: &Request<'_>, position: usize) -> Result<Option<IpAddr>> {
        let Request { sets, blocks, cooling, .. } = request;
        let (set, last) = (&sets.sets()[position], self.folder.last_reserved(position));
        let (mut lookups, mut names) = (0, None);
        let free = allocator::next_in_round_robin(set, blocks, last, |address| {
            lookups += 1;
            if cooling.contains(address) || lookups <= MAX_LOOKUPS {
                return Ok(cooling.contains(address) || !self.folder.is_free(address));
            }
            let names: &HashSet<IpAddr> = match &mut names {
                Some(names) => names,
                names => names.insert(self.store.names()?.into_iter().collect()),
            };
            Ok::<_, Error>(names.contains(&address))
        })?;
        if free.is_some() || names.is_none() {
            return Ok(free);
        }
        // The address of a blank file is free.
        let occupied: HashSet<IpAddr> = self.scan()?.occupied().collect();
        let is_occupied = |address| Ok(cooling.contains(address) || occupied.contains(&address));
        allocator::next_in_round_robin(set, blocks, last, is_occupied)
    }

    /// Chooses the free address of a set that was released first, because all other addresses are
    /// occupied. Returns `None` if the set has none in the blocks.
    fn choose_cooling(&self, request: &Request<'_>, set: &RangeSet) -> Option<Choice> {
        let mut cooling = request.cooling.in_set(set).into_iter().filter(|address| is_in(request.blocks, *address));
        let address = cooling.find(|address| self.folder.is_free(*address))?;
        let why = format!("no other address of range set {set} is free");
        self.note_cooling(&request.cooling, address, &why);
        Some(Choice { address, is_reused: false })
    }

    /// Checks that a requested address, which is in the set, can be allocated and is free.
    ///
    /// # Errors
    /// - Code 7 with Go's text if the address is a gateway.
    /// - Code 102 if the address is not free. The message begins with Go's text and names the
    ///   holder.
    /// - Code 5 if the file of the address cannot be read.
    fn check_requested(&self, address: IpAddr, set: &RangeSet) -> Result<()> {
        if set.is_gateway(address) {
            return Err(Error::config(format!("requested ip {address} is subnet's gateway")));
        }
        if !matches!(self.read(address)?, Content::Absent | Content::Blank) {
            let holder = self.describe(address);
            let msg = format!("requested IP address {address} is not available in range set {set}: {holder}");
            return Err(Error::new(Code::CONFLICT, msg));
        }
        Ok(())
    }

    /// Returns the error, code 102, for an owner that already has this address of a set. The
    /// details list all addresses of the owner.
    fn repeated_add_error(&self, request: &Request<'_>, address: IpAddr) -> Error {
        let msg =
            format!("{address} has been allocated to {}, duplicate allocation is not allowed", request.owner.id());
        let reserved = request.reserved.iter().chain(&request.reserved_by_old).take(MAX_LISTED);
        let listed: Vec<String> = reserved.map(|address| self.describe(*address)).collect();
        let advice = match self.store.options.on_repeat {
            RepeatPolicy::Refuse => "run DEL to release it, or set \"reuse\": true in ipam to get it again",
            RepeatPolicy::Reuse => {
                "run DEL to release it; \"reuse\" cannot return it, because it is not the requested address, is a gateway, or was reserved without an interface name"
            }
        };
        Error::new(Code::CONFLICT, msg).with_details(format!("{}; {advice}", listed.join(", ")))
    }

    /// Returns the error, code 11, for a set without a free address. The details name the holders
    /// of the oldest reservations.
    fn exhausted_error(&mut self, set: &RangeSet) -> Result<Error> {
        let total = set.capacity();
        let mut error = Error::new(
            Code::TRY_AGAIN,
            format!("no IP addresses available in range set: {set}; {total} of {total} are used"),
        );
        let addresses = self.store.names()?.into_iter().filter(|address| set.can_allocate(*address));
        let mut oldest: Vec<_> = addresses.map(|address| (self.folder.made_at(address), address)).collect();
        oldest.sort_unstable();
        let oldest = oldest.into_iter().take(MAX_OLDEST);
        let oldest: Vec<String> = oldest.map(|(_, address)| self.describe_with_age(address)).collect();
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

    /// Returns the text of [`describe`](Locked::describe), and how long ago the reservation was
    /// made.
    fn describe_with_age(&self, address: IpAddr) -> String {
        let age = self.folder.made_at(address).and_then(|made| SystemTime::now().duration_since(made).ok());
        match age.map(|age| age.as_secs()) {
            Some(seconds) => format!("{} for {}", self.describe(address), duration_text(seconds)),
            None => self.describe(address),
        }
    }

    /// Creates a reservation for each of these new addresses, each with the position of its set.
    /// Returns `None` if one has a file meanwhile.
    ///
    /// # Errors
    /// Code 5 if a file cannot be created. Then, and with `None`, the reservations that this call
    /// created have been removed again.
    fn create_all(&mut self, owner: &Owner, addresses: &[(usize, IpAddr)]) -> Result<Option<Vec<NewReservation>>> {
        let mut created: Vec<NewReservation> = Vec::with_capacity(addresses.len());
        if addresses.is_empty() {
            return Ok(Some(created));
        }
        let (mut are_complete, boot) = (self.begin_change(), self.recorded_boot());
        for (position, address) in addresses {
            let link = Link::new(owner.content().trim().as_bytes(), *address, boot);
            let outcome = match self.create(owner, &link) {
                Ok(Some(Created { inode, is_linked })) => {
                    are_complete &= is_linked;
                    created.push(NewReservation { link, inode, content: owner.content() });
                    continue;
                }
                Ok(None) => Ok(None),
                Err(error) => {
                    let doing = format!("failed to create {}/{address}", self.folder.path.display());
                    Err(in_set(*position, Error::caused(Code::IO, doing, error)))
                }
            };
            let created: Vec<Link> = created.into_iter().map(|new| new.link).collect();
            if let (_, Some(error)) = self.remove(&created) {
                self.store.options.notes.note(format_args!("failed to remove a new reservation: {error}"));
            }
            return outcome;
        }
        for (position, address) in addresses {
            if let Err(error) = self.folder.set_last_reserved(*position, *address) {
                // Not an error: only the next allocation starts at another address.
                let path = self.folder.path.display();
                self.store
                    .options
                    .notes
                    .note(format_args!("failed to write {path}/last_reserved_ip.{position}: {error}"));
            }
        }
        self.finish_change(are_complete);
        Ok(Some(created))
    }

    /// Creates one reservation. Replaces a blank file with the address as its name. Returns `None`
    /// if another file has this name.
    fn create(&self, owner: &Owner, link: &Link) -> std::io::Result<Option<Created>> {
        let (address, content) = (link.address, owner.content());
        let created = self.folder.create(link, &content)?;
        if created.is_some() || crate::content::read(&self.folder.file, address)? != Content::Blank {
            return Ok(created);
        }
        self.folder.unlink(&address.to_string())?;
        self.folder.create(link, &content)
    }

    /// Removes reservations that [`reserve`](Locked::reserve) created, except files that have been
    /// replaced or changed since.
    ///
    /// # Errors
    /// Code 5 if a reservation cannot be read or removed. The others have been removed.
    pub fn undo(&mut self, reservations: &[NewReservation]) -> Result<()> {
        use std::os::unix::fs::MetadataExt;
        let (mut unchanged, mut errors) = (Vec::new(), Vec::new());
        for NewReservation { link, inode, content } in reservations {
            let address = link.address;
            let path = self.folder.path.join(address.to_string());
            let is_same_file = std::fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.ino() == *inode);
            if !is_same_file {
                continue;
            }
            match self.read(address) {
                Ok(Content::Text(text)) if text == content.trim().as_bytes() => unchanged.push(link.clone()),
                Ok(_) => {}
                Err(error) => errors.push(error),
            }
        }
        let (_, error) = self.remove(&unchanged);
        errors.extend(error);
        Error::join(errors)
    }
}

/// Whether the address is in one of the blocks.
fn is_in(blocks: &[(IpAddr, IpAddr)], address: IpAddr) -> bool {
    blocks.iter().any(|(first, last)| (*first..=*last).contains(&address))
}

/// Adds the position of the range set to an error, in Go's words.
fn in_set(position: usize, error: Error) -> Error {
    error.context(format_args!("failed to allocate for range {position}"))
}

/// Formats a duration for a message: `90 s`, `15 min`, `3 h` or `12 days`.
fn duration_text(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}
