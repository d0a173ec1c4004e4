//! The verbs of `cnitool ipam`: they show and release the reservations of host-local, and show the
//! leases of dhcp.
//!
//! `show`, `gc` and `release` hold the store's lock, as the plugins do, so they see no unfinished
//! change.

mod dhcp;
mod gc;
mod list;
mod release;
mod show;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use cni::config::NetConf;
use cni::rollback::Notes;
use cni::{Error, ident};
use cni_ipam::store::{self, DEFAULT_DATA_DIR, Usage};
use cni_ipam::{Host, Listed, Locked, Options, RangeSets, Reservation, Store};
use libcni::NetworkList;
use plugin_host_local::Pool;

use crate::call::{Call, Exit, Failure, Shared, Streams, Variables, failed};
use crate::help;
use crate::node::{self, Liveness, LivenessSources};

pub(crate) use dhcp::sockets;

/// See and repair the address reservations of host-local, and see the leases of dhcp
#[derive(Debug, Args)]
#[command(after_help = help::AFTER_IPAM, subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
pub(crate) struct Ipam {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    location: StoreLocation,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List each network's ranges and how full they are
    List,
    /// List a network's reservations: address, owner, age, whether it is in use
    Show(show::Show),
    /// Remove the reservations of containers that do not exist any more
    #[command(before_help = help::IPAM_GC, after_help = help::AFTER_IPAM_GC)]
    Gc(gc::Collect),
    /// Remove one reservation, or all reservations of one container
    #[command(before_help = help::IPAM_RELEASE, after_help = help::AFTER_IPAM_RELEASE)]
    Release(release::Release),
    /// List the leases of the dhcp daemon: address, server, times, last error
    Dhcp(dhcp::Dhcp),
}

/// The location of the reservations.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Options of every ipam verb")]
pub(crate) struct StoreLocation {
    /// The folder of reservations [the networks' dataDir, else /var/lib/cni/networks]
    #[arg(long, global = true, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    data_dir: Option<PathBuf>,
}

/// The percentage of used addresses at which a range set is nearly full.
pub(crate) const NEARLY_FULL_PERCENT: u128 = 90;

/// Returns the percentage of a range set's addresses that are used, 100 for a set without
/// addresses.
pub(crate) fn used_percent(usage: &Usage) -> u128 {
    usage.used.saturating_mul(100).checked_div(usage.total).unwrap_or(100)
}

/// Runs `cnitool ipam`.
pub(crate) fn run(args: &Ipam, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let context = IpamContext::new(shared, call, &args.location, &streams.notes);
    let (verb, outcome) = match &args.verb {
        Verb::List => ("ipam list", context.list(streams)),
        Verb::Show(args) => ("ipam show", context.show(args, streams)),
        Verb::Gc(args) => ("ipam gc", context.gc(args, streams)),
        Verb::Release(args) => ("ipam release", context.release(args, streams)),
        Verb::Dhcp(args) => ("ipam dhcp", context.dhcp(args, streams)),
    };
    outcome.map(|()| Exit::Done).map_err(|error| failed(verb, error, shared.format()))
}

/// The input that all verbs of `ipam` have in common.
pub(crate) struct IpamContext<'a, 'm> {
    shared: &'a Shared,
    call: &'a Call<'m>,
    /// The value of `--data-dir`.
    data_dir: Option<&'a Path>,
    notes: Notes,
}

/// The folder of a network's reservations, and the network's ranges.
pub(crate) struct NetworkPool {
    pub(crate) network: String,
    pub(crate) data_dir: PathBuf,
    lock_timeout: Duration,
    /// The ranges, or the reason why they are not known.
    ranges: Result<RangeSets, String>,
    /// Whether the pool comes from the network's configuration. If not, only the folder was found.
    is_configured: bool,
}

impl<'a, 'm> IpamContext<'a, 'm> {
    /// Returns the context of one call.
    pub(crate) fn new(
        shared: &'a Shared,
        call: &'a Call<'m>,
        location: &'a StoreLocation,
        notes: &Notes,
    ) -> IpamContext<'a, 'm> {
        IpamContext { shared, call, data_dir: location.data_dir.as_deref(), notes: notes.clone() }
    }

    /// Returns the pools of all networks that use host-local or have reservations, sorted by
    /// network and folder. After a change of its `dataDir`, a network may have several pools.
    ///
    /// # Errors
    /// Code 5 if a folder cannot be read.
    pub(crate) fn list_pools(&self) -> Result<Vec<NetworkPool>, Error> {
        let mut pools = Vec::new();
        for list in node::networks(&self.shared.conf_folder(&Variables(&self.call.environment)))? {
            pools.extend(self.find_configured_pool(&list));
        }
        let mut folders: Vec<PathBuf> = match self.data_dir {
            Some(dir) => vec![dir.to_owned()],
            None => pools.iter().map(|pool| pool.data_dir.clone()).chain([DEFAULT_DATA_DIR.into()]).collect(),
        };
        folders.sort();
        folders.dedup();
        for data_dir in folders {
            for network in store::networks(&data_dir)? {
                if pools.iter().any(|pool| pool.network == network && pool.data_dir == data_dir) {
                    continue;
                }
                pools.push(NetworkPool {
                    network,
                    data_dir: data_dir.clone(),
                    lock_timeout: cni_ipam::lock::DEFAULT_LIMIT,
                    ranges: Err("no configured network of this name uses this folder".to_owned()),
                    is_configured: false,
                });
            }
        }
        pools.sort_by(|a, b| (&a.network, &a.data_dir).cmp(&(&b.network, &b.data_dir)));
        Ok(pools)
    }

    /// Returns the name of each network whose ranges are known, with the usage of its range sets.
    ///
    /// # Errors
    /// Code 5 if a folder cannot be read.
    pub(crate) fn usage(&self) -> Result<Vec<(String, Vec<Usage>)>, Error> {
        let mut usage_by_network = Vec::new();
        for pool in self.list_pools()? {
            if let Ok(ranges) = &pool.ranges {
                usage_by_network.push((pool.network.clone(), self.store(&pool).usage(ranges)?));
            }
        }
        Ok(usage_by_network)
    }

    /// Returns the configured networks whose next ADD would fail because the disk is full, each
    /// with the folder of reservations and the error.
    ///
    /// # Errors
    /// Code 5 if a folder cannot be read.
    pub(crate) fn shortages(&self) -> Result<Vec<(String, PathBuf, Error)>, Error> {
        let mut shortages = Vec::new();
        for pool in self.list_pools()?.into_iter().filter(|pool| pool.is_configured) {
            // `Err` is another reason why the folder cannot be written. STATUS of the plugin
            // reports it.
            if let Ok(Some(shortage)) = self.store(&pool).check_writable() {
                shortages.push((pool.network, pool.data_dir, shortage));
            }
        }
        Ok(shortages)
    }

    /// Returns the pool of a network. If there are several, prefers the configured one.
    ///
    /// # Errors
    /// - Code 5 if a folder cannot be read.
    /// - Code 7 if the name is invalid, or the network has neither reservations nor host-local.
    fn pool_of(&self, network: &str) -> Result<NetworkPool, Error> {
        ident::check_network_name(network)?;
        let pools = self.list_pools()?;
        let mut names: Vec<String> = pools.iter().map(|pool| pool.network.clone()).collect();
        names.dedup();
        let pools_of_network = pools.into_iter().filter(|pool| pool.network == network);
        // `false` is less than `true`.
        let preferred = pools_of_network.min_by_key(|pool| !pool.is_configured);
        preferred.ok_or_else(|| {
            let error = Error::config(format!("network {network:?} has no reservations and does not use host-local"));
            error.with_details(match names.is_empty() {
                true => {
                    "no other network has reservations or uses host-local; check --conf-dir and --data-dir".to_owned()
                }
                false => format!("networks with reservations or host-local: {}", names.join(", ")),
            })
        })
    }

    /// Returns the pool of a configured network, or `None` if it does not use host-local. If
    /// several plugins use host-local, returns the pool of the first.
    fn find_configured_pool(&self, list: &NetworkList) -> Option<NetworkPool> {
        // If the runtime sets the ranges (`ipRanges`), they are only known from the capability
        // arguments of an attachment in the result cache.
        let cached = self.shared.cache().list(list.name()).unwrap_or_default().entries;
        let capability_args = cached.last().map(|entry| &entry.attachment.capability_args);
        for plugin in list.plugins() {
            // `cnitool networks` reports an invalid configuration.
            let Ok(conf) = list.request(plugin, capability_args).and_then(NetConf::parse) else { continue };
            if plugin.kind() != "host-local" && conf.ipam_type() != "host-local" {
                continue;
            }
            let (configured_dir, lock_timeout, ranges) = match Pool::read(&conf, &Notes::silent()) {
                Ok(Pool { data_dir, lock_timeout, ranges, .. }) => {
                    (data_dir, lock_timeout, ranges.ok_or_else(|| "the runtime sets its ranges".to_owned()))
                }
                Err(error) => (DEFAULT_DATA_DIR.into(), cni_ipam::lock::DEFAULT_LIMIT, Err(error.to_string())),
            };
            return Some(NetworkPool {
                network: list.name().to_owned(),
                data_dir: self.data_dir.map_or(configured_dir, Path::to_owned),
                lock_timeout,
                ranges,
                is_configured: true,
            });
        }
        None
    }

    /// Opens the store of a pool.
    fn store(&self, pool: &NetworkPool) -> Store {
        // These options keep reservations of an earlier boot: only the operator releases them here.
        let options = Options::new(self.notes.clone(), Host::read(Path::new("/")));
        Store::open(&pool.data_dir, &pool.network, options)
    }

    /// Locks the store of a pool. Returns `None` if its folder does not exist.
    ///
    /// # Errors
    /// Code 11 if the lock is held for too long, 5 if the folder or the lock file cannot be opened.
    pub(crate) fn lock(&self, pool: &NetworkPool) -> Result<Option<Locked>, Error> {
        self.store(pool).lock_existing(pool.lock_timeout, self.call.machine)
    }

    /// Writes a note for each file that could not be read. Returns the reservations and the unusual
    /// files of `listed`.
    pub(crate) fn note_unread(&self, listed: Listed) -> (Vec<Reservation>, Vec<(IpAddr, String)>) {
        for (_, error) in &listed.unread {
            self.notes.note(error);
        }
        (listed.reservations, listed.unusual)
    }

    /// Finds out whether each reservation is in use.
    ///
    /// # Errors
    /// Code 5 if the result cache cannot be read; the kernel's error if the host's links cannot be
    /// listed.
    fn check_all(&self, network: &str, reservations: Vec<Reservation>) -> Result<Vec<CheckedReservation>, Error> {
        let listing = self.shared.cache().list(network)?;
        for problem in &listing.problems {
            self.notes.note(format_args!("ignored: {problem}"));
        }
        let links_by_alias = &node::list_links_by_alias()?;
        let sources = LivenessSources { cached: &listing.entries, links_by_alias, machine: self.call.machine };
        let check = |reservation: Reservation| {
            let liveness = sources.judge(network, &reservation.id, reservation.ifname.as_deref());
            CheckedReservation { reservation, liveness }
        };
        Ok(reservations.into_iter().map(check).collect())
    }
}

/// A reservation, and whether it is in use.
struct CheckedReservation {
    reservation: Reservation,
    liveness: Liveness,
}

/// Returns the time since `since`, such as `3 d`, in the largest unit that gives at least 2, or `?`
/// if `since` is not known.
fn age_text(since: Option<SystemTime>) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    match age_in_seconds(since) {
        None => "?".to_owned(),
        Some(age) if age < 2 * MINUTE => format!("{age} s"),
        Some(age) if age < 2 * HOUR => format!("{} min", age / MINUTE),
        Some(age) if age < 2 * DAY => format!("{} h", age / HOUR),
        Some(age) => format!("{} d", age / DAY),
    }
}

/// Returns the seconds since `since`, 0 for a time in the future, or `None` if `since` is not
/// known.
fn age_in_seconds(since: Option<SystemTime>) -> Option<u64> {
    Some(SystemTime::now().duration_since(since?).unwrap_or_default().as_secs())
}

/// Returns the container ID and the interface of a reservation, with control characters escaped.
/// The interface is empty if the reservation has none.
fn escaped_owner(reservation: &Reservation) -> (String, String) {
    let escaped = |text: &str| text.escape_debug().to_string();
    (escaped(&reservation.id), reservation.ifname.as_deref().map(escaped).unwrap_or_default())
}
