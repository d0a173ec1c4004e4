//! ipam: shows and releases the reservations of host-local, and shows the leases of dhcp.
//!
//! Everything that changes or reads single reservations holds the store's lock, as the plugins do.
//! So it sees no unfinished change, and a running plugin waits no longer than for another plugin.

mod dhcp;
mod gc;
mod list;
mod release;
mod show;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use cni::config::NetConf;
use cni::rollback::Notes;
use cni::{Error, ident};
use cni_ipam::store::{DEFAULT_DATA_DIR, Usage, networks};
use cni_ipam::{Host, Listed, Locked, Options, RangeSets, Reservation, Store};
use libcni::NetworkList;
use libcni::cache::Entry;
use plugin_host_local::Pool;

use crate::cli::{Failure, Shared, Variables, failed};
use crate::node::{self, Liveness, LivenessSources};
use crate::{Call, Exit, Streams, help};

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

/// Runs `cnitool ipam`.
pub(crate) fn run(args: &Ipam, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let context = IpamContext::new(shared, call, &args.location, &streams.notes);
    let (doing, outcome) = match &args.verb {
        Verb::List => ("ipam list", context.list(streams)),
        Verb::Show(args) => ("ipam show", context.show(args, streams)),
        Verb::Gc(args) => ("ipam gc", context.gc(args, streams)),
        Verb::Release(args) => ("ipam release", context.release(args, streams)),
        Verb::Dhcp(args) => ("ipam dhcp", context.dhcp(args, streams)),
    };
    outcome.map(|()| Exit::Done).map_err(|error| failed(doing, error, shared.format()))
}

/// What all verbs of `ipam` need: the options, and where the reservations are.
pub(crate) struct IpamContext<'a, 'm> {
    shared: &'a Shared,
    call: &'a Call<'m>,
    data_dir: Option<&'a Path>,
    notes: Notes,
}

/// The store and the ranges of one network.
pub(crate) struct Addresses {
    pub(crate) network: String,
    pub(crate) data_dir: PathBuf,
    lock_timeout: Duration,
    /// The ranges, or the reason why they are not known.
    ranges: Result<RangeSets, String>,
    /// Whether a configured network uses this folder.
    configured: bool,
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

    /// Returns all networks that have reservations or host-local in their configuration, sorted by
    /// name.
    ///
    /// # Errors
    /// A folder cannot be read.
    pub(crate) fn all(&self) -> Result<Vec<Addresses>, Error> {
        let mut found = Vec::new();
        for list in node::networks(&self.shared.conf_folder(&Variables(&self.call.environment)))? {
            found.extend(self.of_list(&list));
        }
        let mut folders: Vec<PathBuf> = match self.data_dir {
            Some(dir) => vec![dir.to_owned()],
            None => found.iter().map(|addresses| addresses.data_dir.clone()).chain([DEFAULT_DATA_DIR.into()]).collect(),
        };
        folders.sort();
        folders.dedup();
        for data_dir in folders {
            for network in networks(&data_dir)? {
                if found.iter().all(|known| known.network != network || known.data_dir != data_dir) {
                    found.push(Addresses {
                        network,
                        data_dir: data_dir.clone(),
                        lock_timeout: cni_ipam::lock::DEFAULT_LIMIT,
                        ranges: Err("no configured network of this name uses host-local here".to_owned()),
                        configured: false,
                    });
                }
            }
        }
        found.sort_by(|a, b| (&a.network, &a.data_dir).cmp(&(&b.network, &b.data_dir)));
        Ok(found)
    }

    /// Returns how full the ranges of each network are whose ranges are known.
    ///
    /// # Errors
    /// A folder cannot be read.
    pub(crate) fn usage(&self) -> Result<Vec<(String, Vec<Usage>)>, Error> {
        let mut all = Vec::new();
        for addresses in self.all()? {
            if let Ok(ranges) = &addresses.ranges {
                all.push((addresses.network.clone(), self.store(&addresses).usage(ranges)?));
            }
        }
        Ok(all)
    }

    /// Returns the configured networks for whose reservations the disk has no space, each with the
    /// folder and the error.
    ///
    /// # Errors
    /// A folder cannot be read.
    pub(crate) fn shortages(&self) -> Result<Vec<(String, PathBuf, Error)>, Error> {
        let mut all = Vec::new();
        for addresses in self.all()?.into_iter().filter(|addresses| addresses.configured) {
            // STATUS reports a folder that cannot be written at all.
            if let Ok(Some(shortage)) = self.store(&addresses).check_writable() {
                all.push((addresses.network, addresses.data_dir, shortage));
            }
        }
        Ok(all)
    }

    /// Returns one network.
    ///
    /// # Errors
    /// Code 7 if it has neither reservations nor host-local.
    fn one(&self, network: &str) -> Result<Addresses, Error> {
        ident::check_network_name(network)?;
        let all = self.all()?;
        let names: Vec<String> = all.iter().map(|addresses| addresses.network.clone()).collect();
        let mut found: Vec<Addresses> = all.into_iter().filter(|addresses| addresses.network == network).collect();
        // A folder that remained after a change of `dataDir` comes after the configured one.
        found.sort_by_key(|addresses| !addresses.configured);
        found.into_iter().next().ok_or_else(|| {
            let error = Error::config(format!("network {network:?} has no reservations and does not use host-local"));
            error.with_details(match names.is_empty() {
                true => {
                    "no other network has reservations or uses host-local; check --conf-dir and --data-dir".to_owned()
                }
                false => format!("networks with reservations or host-local: {}", names.join(", ")),
            })
        })
    }

    /// Returns the store and the ranges of a configured network, or `None` if it does not use
    /// host-local.
    fn of_list(&self, list: &NetworkList) -> Option<Addresses> {
        for plugin in list.plugins() {
            // Ranges of the runtime (`ipRanges`) are only known from the arguments of an
            // attachment.
            let remembered = self.remembered(list.name()).unwrap_or_default();
            let args = remembered.last().map(|entry| &entry.attachment.capability_args);
            let conf = list.request(plugin, args).and_then(NetConf::parse);
            let Ok(conf) = conf else { continue };
            if plugin.kind() != "host-local" && conf.ipam_type() != "host-local" {
                continue;
            }
            let pool = Pool::read(&conf, &Notes::silent());
            let data_dir = |pool: Option<&Pool>| match self.data_dir {
                Some(dir) => dir.to_owned(),
                None => pool.map_or_else(|| DEFAULT_DATA_DIR.into(), |pool| pool.data_dir.clone()),
            };
            return Some(match pool {
                Ok(pool) => Addresses {
                    network: list.name().to_owned(),
                    data_dir: data_dir(Some(&pool)),
                    lock_timeout: pool.lock_timeout,
                    ranges: pool.ranges.ok_or_else(|| "the runtime sets its ranges".to_owned()),
                    configured: true,
                },
                Err(error) => Addresses {
                    network: list.name().to_owned(),
                    data_dir: data_dir(None),
                    lock_timeout: cni_ipam::lock::DEFAULT_LIMIT,
                    ranges: Err(error.to_string()),
                    configured: true,
                },
            });
        }
        None
    }

    /// Returns the entries of a network in the result cache.
    fn remembered(&self, network: &str) -> Result<Vec<Entry>, Error> {
        Ok(self.shared.cache().list(network)?.entries)
    }

    /// Opens the store of a network.
    fn store(&self, addresses: &Addresses) -> Store {
        // These options release no reservations of an earlier boot: only the operator decides here.
        let options = Options::new(self.notes.clone(), Host::read(Path::new("/")));
        Store::open(&addresses.data_dir, &addresses.network, options)
    }

    /// Locks the store of a network. Returns `None` if its folder does not exist.
    ///
    /// # Errors
    /// Code 11 if the lock is held for too long; code 5.
    pub(crate) fn lock(&self, addresses: &Addresses) -> Result<Option<Locked>, Error> {
        self.store(addresses).lock_existing(addresses.lock_timeout, self.call.machine)
    }

    /// Returns the reservations, and the unusual files with a description. Writes a note for each
    /// file that could not be read.
    pub(crate) fn note_unread(&self, listed: Listed) -> (Vec<Reservation>, Vec<(IpAddr, String)>) {
        for (_, error) in &listed.unread {
            self.notes.note(error);
        }
        (listed.reservations, listed.unusual)
    }

    /// Returns the reservations, each with whether it is in use.
    ///
    /// # Errors
    /// The result cache or the host's links cannot be read.
    fn judge_all(&self, network: &str, reservations: Vec<Reservation>) -> Result<Vec<CheckedReservation>, Error> {
        let listing = self.shared.cache().list(network)?;
        for problem in &listing.problems {
            self.notes.note(format_args!("ignored: {problem}"));
        }
        let marks = node::marks()?;
        Ok(judge(network, reservations, &listing.entries, &marks, self.call))
    }
}

/// A reservation, and whether it is in use.
struct CheckedReservation {
    reservation: Reservation,
    liveness: Liveness,
}

/// Decides for each reservation whether it is in use.
fn judge(
    network: &str,
    reservations: Vec<Reservation>,
    remembered: &[Entry],
    marks: &BTreeMap<String, String>,
    call: &Call<'_>,
) -> Vec<CheckedReservation> {
    let sources = LivenessSources { remembered, marks, machine: call.machine };
    let judge = |reservation: Reservation| {
        let liveness = sources.judge(network, &reservation.id, reservation.ifname.as_deref());
        CheckedReservation { reservation, liveness }
    };
    reservations.into_iter().map(judge).collect()
}

/// Formats the time since `since` in one unit, such as `3 d`; `?` if it is not known.
fn age(since: Option<SystemTime>) -> String {
    let Some(age) = seconds(since) else { return "?".to_owned() };
    match age {
        0..120 => format!("{age} s"),
        120..7200 => format!("{} min", age / 60),
        7200..172_800 => format!("{} h", age / 3600),
        _ => format!("{} d", age / 86_400),
    }
}

/// Returns the seconds since `since`.
fn seconds(since: Option<SystemTime>) -> Option<u64> {
    Some(SystemTime::now().duration_since(since?).unwrap_or_default().as_secs())
}

/// Returns the container ID and the interface of a reservation, with control characters escaped.
fn owner(reservation: &Reservation) -> (String, String) {
    let shown = |text: &str| text.escape_debug().to_string();
    (shown(&reservation.id), reservation.ifname.as_deref().map(shown).unwrap_or_default())
}
