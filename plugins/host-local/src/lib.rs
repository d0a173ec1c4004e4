//! `host-local`: allocates addresses of the configured ranges and records them in a folder of this
//! host.
//!
//! It changes no network state: the calling plugin configures the interface. CNI_NETNS is required
//! and never opened. DEL, GC and STATUS work without ranges, because the runtime may pass ranges
//! only to ADD and CHECK. DEL finds reservations by container ID and interface name, independent of
//! the current configuration.

mod conf;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod resolv;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::result::{AddResult, IpConfig};
use cni::rollback::Notes;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Cidr, Code, Error, Result};
use cni_ipam::{Host, Options, Owner, RangeSets, Store};

use conf::{AddConf, ShortagePolicy, StatusConf, StoreLocation};

/// The plugin.
#[derive(Clone, Copy, Debug)]
pub struct HostLocal;

/// A rollback waits for the lock no longer than this: the caller's own deadline is near by then.
const ROLLBACK_LIMIT: Duration = Duration::from_secs(10);

/// Returns the possible results of an ADD of this configuration, as far as routes and gateways
/// matter: in each one, every set gives an address of another of its ranges. Empty without ranges,
/// which the runtime may provide.
///
/// # Errors
/// ADD's.
pub fn possible_results(conf: &NetConf) -> Result<Vec<AddResult>> {
    if conf::ranges(conf)?.is_none() {
        return Ok(Vec::new());
    }
    let conf = AddConf::read(conf, &cni::args::CniArgs::default())?;
    let sets = conf.sets.sets();
    let most = sets.iter().map(|set| set.ranges().len()).max().unwrap_or_default();
    let nth = |number: usize| {
        let ips = sets.iter().filter_map(|set| {
            let range = set.ranges().get(number).or(set.ranges().last())?;
            let address = Cidr::new(range.last(), range.subnet().prefix())?;
            Some(IpConfig { interface: None, address, gateway: Some(range.gateway()) })
        });
        AddResult { ips: ips.collect(), routes: conf.routes.clone(), ..AddResult::default() }
    };
    Ok((0..most).map(nth).collect())
}

/// A network's configuration of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Where the folders of all networks lie.
    pub data_dir: PathBuf,
    /// How long a verb waits for the lock.
    pub lock_timeout: Duration,
    /// The ranges; `None` if only the runtime knows them (`ipRanges`).
    pub ranges: Option<RangeSets>,
}

impl Pool {
    /// Reads the configuration as the plugin does, for tools that inspect the addresses without
    /// running the plugin.
    ///
    /// # Errors
    /// As ADD's, but for what ADD alone is given.
    pub fn read(conf: &NetConf, notes: &Notes) -> Result<Pool> {
        let StoreLocation { data_dir, lock_timeout, .. } = StoreLocation::read(conf, notes)?;
        Ok(Pool { data_dir, lock_timeout, ranges: conf::ranges(conf)? })
    }
}

impl Plugin for HostLocal {
    fn name(&self) -> &'static str {
        "host-local"
    }

    fn role(&self) -> Role {
        Role::Ipam
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        let conf = AddConf::read(conf, &cni::args::CniArgs::default())?;
        let requested = conf.requested.assign(&conf.sets, &Notes::silent())?;
        for (position, (set, requested)) in conf.sets.sets().iter().zip(requested).enumerate() {
            let failed = |why: String| Error::config(format!("failed to allocate for range {position}: {why}"));
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

    /// Reads the keys of `ipam` and of `runtimeConfig`: the plugin that delegates has keys of its
    /// own.
    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let conf = AddConf::read(&call.conf, &call.args()?)?;
        let dns = conf.resolv_conf.as_deref().map(resolv::read).transpose()?.unwrap_or_default();
        let store = store(call, &conf.place);
        let mut rollback = call.rollback();

        let mut locked = store.lock(conf.place.lock_timeout, call.machine)?;
        let lease = locked.reserve(&owner(call), &conf.sets, &conf.requested)?;
        drop(locked);
        let (made, machine) = (lease.new_reservations(), call.machine);
        let limit = conf.place.lock_timeout.min(ROLLBACK_LIMIT);
        rollback.push("release the addresses just reserved", move || store.undo(&made, limit, &*machine));

        let ips = lease.addresses.iter().filter_map(|(range, address)| {
            let address = Cidr::new(*address, range.subnet().prefix())?;
            Some(IpConfig { interface: None, address, gateway: Some(range.gateway()) })
        });
        let result = AddResult { ips: ips.collect(), routes: conf.routes, dns, ..AddResult::default() };
        Ok(Added { result, rollback })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let place = StoreLocation::read(&call.conf, &call.notes)?;
        let held = match store(call, &place).lock_existing(place.lock_timeout, call.machine)? {
            Some(mut locked) => locked.reserved_by(&owner(call))?,
            None => Vec::new(),
        };
        if held.is_empty() {
            let msg = format!("host-local: Failed to find address added by container {}", call.container_id);
            return Err(Error::new(Code::UNKNOWN_CONTAINER, msg));
        }
        // Other plugins may have added addresses of their own; those of our ranges must be ours.
        let (Some(prev), Some(sets)) = (call.conf.prev_result()?, conf::ranges(&call.conf)?) else { return Ok(()) };
        let ours = |address| sets.sets().iter().any(|set| set.find(address).is_some());
        let addresses = prev.ips.iter().map(|ip| ip.address.address());
        let missing: Vec<String> = addresses
            .filter(|address| ours(*address) && !held.contains(address))
            .map(|address| address.to_string())
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let held: Vec<String> = held.iter().map(ToString::to_string).collect();
        let (missing, held) = (missing.join(", "), held.join(", "));
        let whom = format!("{} {}", call.container_id, call.ifname);
        let msg = format!("host-local: prevResult has {missing}, but reserved for {whom} is {held}");
        Err(Error::new(Code::CHECK_FAILED, msg))
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        let place = StoreLocation::read(&call.conf, &call.notes)?;
        match store(call, &place).lock_existing(place.lock_timeout, call.machine)? {
            Some(mut locked) => locked.release(&owner(call)).map(drop),
            None => Ok(()),
        }
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let place = StoreLocation::read(&call.conf, &call.notes)?;
        let Some(mut locked) = store(call, &place).lock_existing(place.lock_timeout, call.machine)? else {
            return Ok(());
        };
        let valid: Vec<Owner> = valid.iter().map(|(id, ifname)| Owner::new(id, ifname)).collect();
        let collected = locked.collect(&valid)?;
        for reservation in &collected.removed {
            call.notes.note(format_args!("gc: released, as its attachment is not valid any more: {reservation}"));
        }
        collected.error.map_or(Ok(()), Err)
    }

    /// A used-up range or a full disk is only reported: where STATUS fails, the runtime makes the
    /// node unready, Kubernetes evicts the pods that have their addresses, and CRI-O does not run
    /// the GC that would free the others.
    fn status(&self, call: &Call<'_>) -> Result<()> {
        let conf = StatusConf::read(&call.conf)?;
        conf.resolv_conf.as_deref().map(resolv::read).transpose()?;
        let store = store(call, &conf.place);
        store.report_foreign();
        let mut shortages: Vec<String> = store.check_writable()?.iter().map(ToString::to_string).collect();
        // The ranges that only the runtime knows come with an ADD.
        if let Some(sets) = &conf.sets {
            let usage = store.usage(sets)?;
            let used_up = usage.iter().filter(|set| set.is_exhausted());
            shortages.extend(used_up.map(|set| format!("no IP addresses available in range set: {set}")));
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

fn owner(call: &Call<'_>) -> Owner {
    Owner::new(&call.container_id, &call.ifname)
}

fn store(call: &Call<'_>, place: &StoreLocation) -> Store {
    let options = Options::new(call.notes.clone(), Host::read(Path::new("/")));
    let options = Options { earlier: place.earlier, again: place.again, ..options };
    Store::open(&place.data_dir, call.conf.name(), options)
}
