//! The IPAM plugin `host-local`: reserves addresses from the configured ranges, and records the
//! reservations in a folder on this host.
//!
//! It does not touch the network: the interface plugin that runs it adds the addresses to the
//! interface. Only ADD needs ranges, because a runtime that provides the ranges may leave them out
//! for other verbs. DEL finds the reservations by container ID and interface name, so it works even
//! if the ranges have changed.

mod conf;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod resolv;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::machine::Machine;
use cni::result::{AddResult, IpConfig};
use cni::rollback::Notes;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Cidr, Code, Error, Result};
use cni_ipam::{Host, Lease, Locked, Options, Owner, Range, RangeSets, Requested, Store};

use conf::{AddConf, ShortagePolicy, StatusConf, StoreLocation};

/// The plugin `host-local`.
#[derive(Clone, Copy, Debug)]
pub struct HostLocal;

/// The longest time that a failed ADD waits for the lock to release its addresses. The time is
/// short because the runtime's own deadline is probably near.
const ROLLBACK_LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns example results of an ADD with this configuration, so that a caller can check routes and
/// gateways. Each range occurs in at least one result. Returns no results if the configuration has
/// no ranges, because the runtime provides them.
///
/// # Errors
/// The error of the ADD.
pub fn possible_results(conf: &NetConf) -> Result<Vec<AddResult>> {
    if conf::range_sets(conf)?.is_none() {
        return Ok(Vec::new());
    }
    let conf = AddConf::read(conf, &cni::args::CniArgs::default())?;
    let sets = conf.sets.sets();
    let most_ranges = sets.iter().map(|set| set.ranges().len()).max().unwrap_or_default();
    // Returns a result with an address from each set: from the range with this index, or from the
    // last range if the set has fewer.
    let example_with_range = |index: usize| {
        let ips = sets.iter().filter_map(|set| {
            let range = set.ranges().get(index).or(set.ranges().last())?;
            ip_config(range, range.last())
        });
        AddResult { ips: ips.collect(), routes: conf.routes.clone(), ..AddResult::default() }
    };
    Ok((0..most_ranges).map(example_with_range).collect())
}

/// The part of a network's configuration that tools need to inspect its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// The folder with the stores of all networks.
    pub data_dir: PathBuf,
    /// How long a verb waits for the lock.
    pub lock_timeout: Duration,
    /// How long a released address is not given out again, if others are free.
    pub cooldown: Duration,
    /// The ranges, or `None` if the configuration has none, because the runtime provides them
    /// (`ipRanges`).
    pub ranges: Option<RangeSets>,
}

impl Pool {
    /// Reads the configuration as the plugin does.
    ///
    /// # Errors
    /// Code 6 for a wrong type; 7 for invalid ranges.
    pub fn read(conf: &NetConf, notes: &Notes) -> Result<Pool> {
        let StoreLocation { data_dir, lock_timeout, cooldown, .. } = StoreLocation::read(conf, notes)?;
        Ok(Pool { data_dir, lock_timeout, cooldown, ranges: conf::range_sets(conf)? })
    }
}

/// What an ADD reserves, and where.
pub struct Request<'a> {
    /// The store of the network.
    pub reservations: Reservations<'a>,
    /// The owner of the new reservations.
    pub owner: Owner,
    /// The range sets.
    pub sets: RangeSets,
    /// The addresses that the runtime requests.
    pub requested: Requested,
}

/// The store of a network's reservations, and how long a verb waits for its lock.
pub struct Reservations<'a> {
    store: Store,
    lock_timeout: Duration,
    machine: &'a dyn Machine,
}

impl<'a> Reservations<'a> {
    /// Returns the store of the call's network, which need not exist yet. An error in a key that
    /// does not change where the store is becomes a note.
    ///
    /// # Errors
    /// Code 6 if `dataDir` is not a string.
    pub fn read(call: &'a Call<'_>) -> Result<Reservations<'a>> {
        Ok(Reservations::at(call, &StoreLocation::read(&call.conf, &call.notes)?))
    }

    /// Returns the store of the call's network at this location.
    fn at(call: &'a Call<'_>, location: &StoreLocation) -> Reservations<'a> {
        Reservations { store: store(call, location), lock_timeout: location.lock_timeout, machine: call.machine }
    }

    /// Returns the folder of these plugins' own files: `<dataDir>/.cni/<network>`.
    pub fn sidecar(&self) -> &Path {
        self.store.sidecar()
    }

    /// Returns the occupied addresses, sorted, or none if the folder cannot be read. Takes no lock.
    pub fn occupied(&self) -> Vec<IpAddr> {
        self.store.occupied()
    }

    /// Releases the reservations of the call's attachment, and returns their addresses.
    ///
    /// # Errors
    /// As [`Locked::release`]; code 11 if the lock is held for too long.
    pub fn release(&self, call: &Call<'_>) -> Result<Vec<IpAddr>> {
        match self.store.lock_existing(self.lock_timeout, self.machine)? {
            Some(mut locked) => locked.release(&owner(call)),
            None => Ok(Vec::new()),
        }
    }

    /// Locks the store, and creates its folder if it does not exist.
    ///
    /// # Errors
    /// As [`Store::lock`].
    pub fn lock(&self) -> Result<Locked> {
        self.store.lock(self.lock_timeout, self.machine)
    }
}

/// Runs an ADD whose addresses `reserve` chooses. If the ADD fails later, they are released.
///
/// # Errors
/// - Code 4, 6 or 7 for an invalid configuration; 5 if `resolvConf` cannot be read.
/// - The error of `reserve`, which must have reserved nothing then.
pub fn add_with<'a>(call: &'a Call<'_>, reserve: impl FnOnce(&Request<'_>) -> Result<Lease>) -> Result<Added<'a>> {
    let AddConf { location, sets, requested, routes, resolv_conf } = AddConf::read(&call.conf, &call.args()?)?;
    let dns = resolv_conf.as_deref().map(resolv::read).transpose()?.unwrap_or_default();
    let request = Request { reservations: Reservations::at(call, &location), owner: owner(call), sets, requested };
    let mut rollback = call.rollback();

    // A failed `reserve` leaves no reservations, so the undo is registered afterwards.
    let lease = reserve(&request)?;
    let (reservations, machine) = (lease.new_reservations(), call.machine);
    let Reservations { store, lock_timeout, .. } = request.reservations;
    let lock_timeout = lock_timeout.min(ROLLBACK_LOCK_TIMEOUT);
    rollback.push("release the addresses just reserved", move || store.undo(&reservations, lock_timeout, &*machine));

    let ips = lease.addresses.iter().filter_map(|(range, address)| ip_config(range, *address));
    let result = AddResult { ips: ips.collect(), routes, dns, ..AddResult::default() };
    Ok(Added { result, rollback })
}

impl Plugin for HostLocal {
    fn name(&self) -> &'static str {
        "host-local"
    }

    fn role(&self) -> Role {
        Role::Ipam
    }

    /// Checks the configuration as ADD does. Also fails if a requested address is a gateway, or if
    /// a range set has no address that can be allocated.
    fn examine(&self, conf: &NetConf) -> Result<()> {
        let conf = AddConf::read(conf, &cni::args::CniArgs::default())?;
        let requested = conf.requested.assign(&conf.sets, &Notes::silent())?;
        for (position, (set, requested)) in conf.sets.sets().iter().zip(requested).enumerate() {
            let allocation_error =
                |reason: String| Error::config(format!("failed to allocate for range {position}: {reason}"));
            match requested {
                Some(address) if set.is_gateway(address) => {
                    return Err(allocation_error(format!("requested ip {address} is subnet's gateway")));
                }
                None if set.capacity() == 0 => {
                    return Err(allocation_error(format!("no IP addresses available in range set: {set}")));
                }
                Some(_) | None => {}
            }
        }
        Ok(())
    }

    /// Returns unknown keys in `ipam` and `runtimeConfig` only: other keys are for the interface
    /// plugin that runs this one.
    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        add_with(call, |request| {
            request.reservations.lock()?.reserve(&request.owner, &request.sets, &request.requested)
        })
    }

    /// Checks that the attachment has reservations and, if the ranges are known, that the addresses
    /// in prevResult are among them. Addresses outside the ranges may come from other plugins, so
    /// they are not checked.
    ///
    /// # Errors
    /// - Code 3 if the attachment has no reservation.
    /// - Code 101 if an address in prevResult is not reserved for the attachment.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        let location = StoreLocation::read(&call.conf, &call.notes)?;
        let reserved = match store(call, &location).lock_existing(location.lock_timeout, call.machine)? {
            Some(mut locked) => locked.reserved_by(&owner(call))?,
            None => Vec::new(),
        };
        if reserved.is_empty() {
            let msg = format!("host-local: Failed to find address added by container {}", call.container_id);
            let folder = location.data_dir.join(call.conf.name());
            let details = format!("{} has no reservation for {} {}", folder.display(), call.container_id, call.ifname);
            return Err(Error::new(Code::UNKNOWN_CONTAINER, msg).with_details(details));
        }
        let (Some(prev), Some(sets)) = (call.conf.prev_result()?, conf::range_sets(&call.conf)?) else {
            return Ok(());
        };
        let mut missing: Vec<String> = Vec::new();
        for address in prev.ips.iter().map(|ip| ip.address.address()) {
            let is_in_range = sets.sets().iter().any(|set| set.find(address).is_some());
            if is_in_range && !reserved.contains(&address) {
                missing.push(address.to_string());
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let reserved: Vec<String> = reserved.iter().map(ToString::to_string).collect();
        let (missing, reserved) = (missing.join(", "), reserved.join(", "));
        let owner = format!("{} {}", call.container_id, call.ifname);
        let msg = format!("host-local: prevResult has {missing}, but the reservation of {owner} is {reserved}");
        Err(Error::new(Code::CHECK_FAILED, msg))
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        Reservations::read(call)?.release(call).map(drop)
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let location = StoreLocation::read(&call.conf, &call.notes)?;
        let Some(mut locked) = store(call, &location).lock_existing(location.lock_timeout, call.machine)? else {
            return Ok(());
        };
        let valid: Vec<Owner> = valid.iter().map(|(id, ifname)| Owner::new(id, ifname)).collect();
        let collected = locked.gc(&valid)?;
        for reservation in &collected.removed {
            call.notes.note(format_args!("gc: released, as its attachment is not valid any more: {reservation}"));
        }
        collected.error.map_or(Ok(()), Err)
    }

    /// A full range set or a full disk is an error only with `fullIsUnavailable`; without it,
    /// STATUS writes a note. If STATUS failed, the runtime would mark the node as not ready:
    /// Kubernetes would evict pods that work, and CRI-O would not run the GC that frees addresses.
    fn status(&self, call: &Call<'_>) -> Result<()> {
        let conf = StatusConf::read(&call.conf)?;
        conf.resolv_conf.as_deref().map(resolv::read).transpose()?;
        let store = store(call, &conf.location);
        store.report_foreign();
        let mut shortages: Vec<String> = Vec::new();
        if let Some(full_disk) = store.check_writable()? {
            shortages.push(full_disk.to_string());
        }
        // STATUS does not get the ranges that the runtime provides.
        if let Some(sets) = &conf.sets {
            for usage in store.usage(sets)?.iter().filter(|usage| usage.is_exhausted()) {
                shortages.push(format!("no IP addresses available in range set: {usage}"));
            }
        }
        if shortages.is_empty() {
            return Ok(());
        }
        let shortages = shortages.join("; ");
        match conf.shortage {
            ShortagePolicy::Fail => Err(Error::new(Code::NOT_AVAILABLE, shortages)),
            ShortagePolicy::Report => {
                call.notes.note(format_args!(
                    "{shortages}; the next ADD fails, and STATUS succeeds unless ipam has \"fullIsUnavailable\": true"
                ));
                Ok(())
            }
        }
    }
}

/// Returns the owner of the reservations of this call's attachment.
fn owner(call: &Call<'_>) -> Owner {
    Owner::new(&call.container_id, &call.ifname)
}

/// Returns the entry for an address of a range in the result of ADD. Never `None`, because the
/// prefix of the range's subnet is valid for the address.
fn ip_config(range: &Range, address: IpAddr) -> Option<IpConfig> {
    let address = Cidr::new(address, range.subnet().prefix())?;
    Some(IpConfig { interface: None, address, gateway: Some(range.gateway()) })
}

/// Returns the store of the call's network, which need not exist yet.
fn store(call: &Call<'_>, location: &StoreLocation) -> Store {
    let options = Options::new(call.notes.clone(), Host::read(Path::new("/")));
    let StoreLocation { after_reboot, on_repeat, cooldown, .. } = *location;
    let options = Options { after_reboot, on_repeat, cooldown, ..options };
    Store::open(&location.data_dir, call.conf.name(), options)
}
