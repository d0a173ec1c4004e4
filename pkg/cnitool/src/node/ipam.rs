//! Finds the reservations of host-local and the daemons of dhcp.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cni::rollback::Notes;
use cni::{Error, ident};
use cni_ipam::store::{self, DEFAULT_DATA_DIR, Usage};
use cni_ipam::{Host, Listed, Locked, Options, RangeSets, Store};
use libcni::{Members, NetworkList};
use plugin_dhcp::leases;
use plugin_host_local::Pool;

use super::attachments::{CachedAttachment, read_caches};
use super::{plugin_confs, reserving_confs};
use crate::call::Context;
use crate::report::did_you_mean;

/// The percentage of used addresses at which a range set is nearly full.
pub(crate) const NEARLY_FULL_PERCENT: u128 = 90;

/// Returns the percentage of a range set's addresses that are used, 100 for a set without
/// addresses.
pub(crate) fn used_percent(usage: &Usage) -> u128 {
    usage.used.saturating_mul(100).checked_div(usage.total).unwrap_or(100)
}

/// Finds and opens the stores of reservations.
pub(crate) struct IpamContext<'a> {
    pub(crate) context: &'a Context<'a>,
    /// The value of `--data-dir`.
    pub(crate) data_dir: Option<&'a Path>,
    /// Those of all result caches. `None` if they have not been read.
    pub(crate) cached: Option<&'a [CachedAttachment]>,
}

/// The folder of a network's reservations, and the network's ranges.
pub(crate) struct NetworkPool {
    pub(crate) network: String,
    pub(crate) data_dir: PathBuf,
    lock_timeout: Duration,
    /// How long a released address is not given out again, if others are free.
    cooldown: Duration,
    /// The ranges, or the reason why they are not known.
    pub(crate) ranges: Result<RangeSets, String>,
    /// Whether the pool comes from the network's configuration. If not, only the folder was found.
    pub(crate) is_configured: bool,
}

impl NetworkPool {
    /// Returns a pool that is not configured, and whose ranges are not known for this reason.
    fn new(network: String, data_dir: PathBuf, why: String) -> NetworkPool {
        let (lock_timeout, cooldown) = (cni_ipam::lock::DEFAULT_LIMIT, Duration::ZERO);
        NetworkPool { network, data_dir, lock_timeout, cooldown, ranges: Err(why), is_configured: false }
    }

    /// Returns the pool of the first plugin in `list` that keeps reservations, or `None` if none
    /// does. The runtime may set the ranges with `capability_args`.
    pub(crate) fn of(list: &NetworkList, capability_args: Option<&Members>) -> Option<NetworkPool> {
        let (.., conf) = reserving_confs(list, capability_args).next()?;
        let network = list.name().to_owned();
        Some(match Pool::read(&conf, &Notes::silent()) {
            Ok(Pool { data_dir, lock_timeout, cooldown, ranges }) => {
                let ranges = ranges.ok_or_else(|| "the runtime sets its ranges".to_owned());
                NetworkPool { network, data_dir, lock_timeout, cooldown, ranges, is_configured: true }
            }
            Err(error) => NetworkPool {
                is_configured: true,
                ..NetworkPool::new(network, DEFAULT_DATA_DIR.into(), error.to_string())
            },
        })
    }

    /// Opens the store.
    pub(crate) fn store(&self, notes: &Notes) -> Store {
        // These options keep reservations of an earlier boot: only the operator releases them here.
        let options = Options::new(notes.clone(), Host::read(Path::new("/")));
        Store::open(&self.data_dir, &self.network, Options { cooldown: self.cooldown, ..options })
    }

    /// Returns the usage of each range set, none if the ranges are not known.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub(crate) fn usage(&self, notes: &Notes) -> Result<Vec<Usage>, Error> {
        self.ranges.as_ref().map_or_else(|_| Ok(Vec::new()), |ranges| self.store(notes).usage(ranges))
    }

    /// Returns the folder with the files of the reservations.
    pub(crate) fn folder(&self) -> PathBuf {
        self.data_dir.join(&self.network)
    }
}

impl IpamContext<'_> {
    /// Returns the pools of all networks that use host-local or have reservations, sorted by
    /// network and folder. After a change of its `dataDir`, a network may have several pools.
    ///
    /// # Errors
    /// Code 5 if a folder cannot be read.
    pub(crate) fn list_pools(&self) -> Result<Vec<NetworkPool>, Error> {
        let mut pools = Vec::new();
        for list in self.context.networks()? {
            pools.extend(self.find_configured_pool(&list));
        }
        let mut folders: Vec<PathBuf> = match self.data_dir {
            Some(dir) => vec![dir.to_owned()],
            None => pools.iter().map(|pool| pool.data_dir.clone()).chain([DEFAULT_DATA_DIR.into()]).collect(),
        };
        folders.sort();
        folders.dedup();
        for data_dir in folders {
            let mut networks = store::networks(&data_dir)?;
            networks.retain(|name| !pools.iter().any(|pool| pool.network == *name && pool.data_dir == data_dir));
            let why = "no configured network of this name uses this folder";
            pools.extend(networks.into_iter().map(|name| NetworkPool::new(name, data_dir.clone(), why.to_owned())));
        }
        pools.sort_by(|a, b| (&a.network, &a.data_dir).cmp(&(&b.network, &b.data_dir)));
        Ok(pools)
    }

    /// Returns the pool of a network. If there are several, prefers the configured one.
    ///
    /// # Errors
    /// - Code 5 if a folder cannot be read.
    /// - Code 7 if the name is invalid, or the network has neither reservations nor host-local.
    pub(crate) fn pool_of(&self, network: &str) -> Result<NetworkPool, Error> {
        ident::check_network_name(network)?;
        let pools = self.list_pools()?;
        let mut names: Vec<String> = pools.iter().map(|pool| pool.network.clone()).collect();
        names.dedup();
        let pools_of_network = pools.into_iter().filter(|pool| pool.network == network);
        // `false` is less than `true`.
        let preferred = pools_of_network.min_by_key(|pool| !pool.is_configured);
        preferred.ok_or_else(|| {
            let error = Error::config(format!("network {network:?} has no reservations and does not use host-local"));
            let hint = did_you_mean(network, names.iter().map(String::as_str));
            let absent = "no other network has reservations or uses host-local; check --conf-dir and --data-dir";
            error.with_details(match names.is_empty() {
                true => absent.to_owned(),
                false => format!("networks with reservations or host-local: {}{hint}", names.join(", ")),
            })
        })
    }

    /// Returns the pool of a configured network, or `None` if it does not use host-local. If
    /// several plugins use host-local, returns the pool of the first.
    fn find_configured_pool(&self, list: &NetworkList) -> Option<NetworkPool> {
        // If the runtime sets the ranges (`ipRanges`), they are only known from the capability
        // arguments of an attachment in the result cache.
        let last = match self.cached {
            Some(cached) => cached.iter().rfind(|one| one.id.network == list.name()).map(|one| one.entry.clone()),
            None => read_caches(self.context, Some(list.name())).unwrap_or_default().entries.pop(),
        };
        let mut pool = NetworkPool::of(list, last.as_ref().map(|entry| &entry.attachment.capability_args))?;
        pool.data_dir = self.data_dir.map_or(pool.data_dir, Path::to_owned);
        Some(pool)
    }

    /// Locks the store of a pool. Returns `None` if its folder does not exist.
    ///
    /// # Errors
    /// Code 11 if the lock is held for too long, 5 if the folder or the lock file cannot be opened.
    pub(crate) fn lock(&self, pool: &NetworkPool) -> Result<Option<Locked>, Error> {
        pool.store(&self.context.notes).lock_existing(pool.lock_timeout, self.context.call.machine)
    }

    /// Lists the reservations of a pool. Writes a note for each file that could not be read.
    ///
    /// # Errors
    /// As [`lock`](IpamContext::lock); code 5 if the folder cannot be read.
    pub(crate) fn list_reservations(&self, pool: &NetworkPool) -> Result<Listed, Error> {
        let listed = self.lock(pool)?.map(|mut locked| locked.list()).transpose()?.unwrap_or_default();
        listed.unread.iter().for_each(|(_, error)| self.context.notes.note(error));
        Ok(listed)
    }
}

/// Returns the daemon's default socket and the sockets in the networks' configurations.
pub(crate) fn sockets(networks: &[NetworkList]) -> Vec<PathBuf> {
    let configured = networks.iter().flat_map(|list| plugin_confs(list, None));
    let configured = configured.filter_map(|(_, _, conf)| leases::socket(&conf).ok().flatten());
    let mut sockets: Vec<PathBuf> = std::iter::once(leases::default_socket()).chain(configured).collect();
    sockets.sort();
    sockets.dedup();
    sockets
}
