//! The IPAM plugin `host-local`: reserves addresses from the configured ranges, and records the
//! reservations in a folder on this host.
//!
//! It does not touch the network: the interface plugin that runs it adds the addresses to the
//! interface. DEL, GC and STATUS work without ranges, because a runtime may pass ranges only to ADD
//! and CHECK. DEL finds the reservations by container ID and interface name, so it works with a
//! configuration whose ranges have changed.

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
use cni::result::{AddResult, IpConfig};
use cni::rollback::Notes;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Cidr, Code, Error, Result};
use cni_ipam::{Host, Options, Owner, Range, RangeSets, Store};

use conf::{AddConf, ShortagePolicy, StatusConf, StoreLocation};

/// The plugin `host-local`.
#[derive(Clone, Copy, Debug)]
pub struct HostLocal;

/// How long a failed ADD waits at most for the lock that it needs to release its addresses. This is
/// short because the runtime's own deadline is probably near by then.
const ROLLBACK_LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns examples of results of an ADD with this configuration, for checks of routes and
/// gateways: together they have an address from each range. Returns none if the configuration has
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
    // The result with the nth range of each set. A set with fewer ranges gives its last one.
    let nth_result = |number: usize| {
        let ips = sets.iter().filter_map(|set| {
            let range = set.ranges().get(number).or(set.ranges().last())?;
            ip_config(range, range.last())
        });
        AddResult { ips: ips.collect(), routes: conf.routes.clone(), ..AddResult::default() }
    };
    Ok((0..most_ranges).map(nth_result).collect())
}

/// The part of a network's configuration that tools need to inspect its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// The folder with the stores of all networks.
    pub data_dir: PathBuf,
    /// How long a verb waits for the lock.
    pub lock_timeout: Duration,
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
        let StoreLocation { data_dir, lock_timeout, .. } = StoreLocation::read(conf, notes)?;
        Ok(Pool { data_dir, lock_timeout, ranges: conf::range_sets(conf)? })
    }
}

impl Plugin for HostLocal {
    fn name(&self) -> &'static str {
        "host-local"
    }

    fn role(&self) -> Role {
        Role::Ipam
    }

    /// Also fails if a requested address is a gateway, or a range set has no usable address.
    fn examine(&self, conf: &NetConf) -> Result<()> {
        let conf = AddConf::read(conf, &cni::args::CniArgs::default())?;
        let requested = conf.requested.assign(&conf.sets, &Notes::silent())?;
        for (position, (set, requested)) in conf.sets.sets().iter().zip(requested).enumerate() {
            let failed = |reason: String| Error::config(format!("failed to allocate for range {position}: {reason}"));
            match requested {
                Some(address) if set.is_gateway(address) => {
                    return Err(failed(format!("requested ip {address} is subnet's gateway")));
                }
                None if set.capacity() == 0 => {
                    return Err(failed(format!("no IP addresses available in range set: {set}")));
                }
                Some(_) | None => {}
            }
        }
        Ok(())
    }

    /// Returns unknown keys in `ipam` and `runtimeConfig` only: the others are for the interface
    /// plugin that runs this one.
    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let conf = AddConf::read(&call.conf, &call.args()?)?;
        let dns = conf.resolv_conf.as_deref().map(resolv::read).transpose()?.unwrap_or_default();
        let store = store(call, &conf.location);
        let mut rollback = call.rollback();

        let mut locked = store.lock(conf.location.lock_timeout, call.machine)?;
        // A failed `reserve` leaves no reservation, so its undo is registered after it.
        let lease = locked.reserve(&owner(call), &conf.sets, &conf.requested)?;
        drop(locked);
        let (reservations, machine) = (lease.new_reservations(), call.machine);
        let lock_timeout = conf.location.lock_timeout.min(ROLLBACK_LOCK_TIMEOUT);
        rollback
            .push("release the addresses just reserved", move || store.undo(&reservations, lock_timeout, &*machine));

        let ips = lease.addresses.iter().filter_map(|(range, address)| ip_config(range, *address));
        let result = AddResult { ips: ips.collect(), routes: conf.routes, dns, ..AddResult::default() };
        Ok(Added { result, rollback })
    }

    /// Checks that the attachment has reservations, and that the addresses in prevResult are among
    /// them. Addresses outside the configured ranges may come from other plugins, so they are not
    /// checked.
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
            return Err(Error::new(Code::UNKNOWN_CONTAINER, msg));
        }
        let (Some(prev), Some(sets)) = (call.conf.prev_result()?, conf::range_sets(&call.conf)?) else {
            return Ok(());
        };
        let is_in_range = |address| sets.sets().iter().any(|set| set.find(address).is_some());
        let addresses = prev.ips.iter().map(|ip| ip.address.address());
        let missing: Vec<String> = addresses
            .filter(|address| is_in_range(*address) && !reserved.contains(address))
            .map(|address| address.to_string())
            .collect();
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
        let location = StoreLocation::read(&call.conf, &call.notes)?;
        match store(call, &location).lock_existing(location.lock_timeout, call.machine)? {
            Some(mut locked) => locked.release(&owner(call)).map(drop),
            None => Ok(()),
        }
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let location = StoreLocation::read(&call.conf, &call.notes)?;
        let Some(mut locked) = store(call, &location).lock_existing(location.lock_timeout, call.machine)? else {
            return Ok(());
        };
        let valid: Vec<Owner> = valid.iter().map(|(id, ifname)| Owner::new(id, ifname)).collect();
        let collected = locked.collect(&valid)?;
        for reservation in &collected.removed {
            call.notes.note(format_args!("gc: released, as its attachment is not valid any more: {reservation}"));
        }
        collected.error.map_or(Ok(()), Err)
    }

    /// Only reports a full range or a full disk, unless `fullIsUnavailable` is set. If STATUS
    /// failed, the runtime would mark the node as not ready: Kubernetes would evict pods that work,
    /// and CRI-O would not run the GC that frees addresses.
    fn status(&self, call: &Call<'_>) -> Result<()> {
        let conf = StatusConf::read(&call.conf)?;
        conf.resolv_conf.as_deref().map(resolv::read).transpose()?;
        let store = store(call, &conf.location);
        store.report_foreign();
        let mut shortages: Vec<String> = store.check_writable()?.iter().map(ToString::to_string).collect();
        // Ranges that the runtime provides are only known to ADD.
        if let Some(sets) = &conf.sets {
            let usage = store.usage(sets)?;
            let full_sets = usage.iter().filter(|set| set.is_exhausted());
            shortages.extend(full_sets.map(|set| format!("no IP addresses available in range set: {set}")));
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

/// Returns an address of a range as a result of ADD has it.
fn ip_config(range: &Range, address: IpAddr) -> Option<IpConfig> {
    // This is never `None`: the prefix of a range's subnet is not longer than its addresses.
    let address = Cidr::new(address, range.subnet().prefix())?;
    Some(IpConfig { interface: None, address, gateway: Some(range.gateway()) })
}

/// Returns the store of the call's network. It need not exist yet.
fn store(call: &Call<'_>, location: &StoreLocation) -> Store {
    let options = Options::new(call.notes.clone(), Host::read(Path::new("/")));
    let options = Options { after_reboot: location.after_reboot, on_repeat: location.on_repeat, ..options };
    Store::open(&location.data_dir, call.conf.name(), options)
}
