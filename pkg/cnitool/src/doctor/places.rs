//! Checks files: the networks' configurations, the plugins and their STATUS, the permissions of
//! files and folders, and the reservations with their ranges.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use cni::Error;
use cni::config::NetConf;
use cni::delegate::find_plugin;
use cni_cluster::ledger::Ledger;
use libcni::{AddedKeys, NetworkList, Runtime};

use super::{CheckOutcome, Examined, advice};
use crate::call::own_uid;
use crate::node::ipam::{NEARLY_FULL_PERCENT, used_percent};
use crate::node::leftovers::quoted;
use crate::node::snapshot::ListedPool;

/// Checks that the configurations are valid and that no two files have the same network.
///
/// # Errors
/// Code 5 if the networks' folder cannot be read.
pub(super) fn networks(node: &Examined<'_>) -> Result<CheckOutcome, Error> {
    let mut outcome = CheckOutcome::new("networks");
    let mut names: Vec<String> = Vec::new();
    for file in node.context.conf_folder().files()? {
        let path = quoted(&file.path.to_string_lossy());
        match file.list {
            Err(error) => outcome.add(format!("{path}:"), error.to_string(), format!("cnitool validate {path}")),
            Ok(list) if names.iter().any(|name| name == list.name()) => {
                let problem = format!("is never used: another file defines network {:?} too", list.name());
                outcome.add(&path, problem, format!("mv {path} {path}.unused"));
            }
            Ok(list) => names.push(list.name().to_owned()),
        }
    }
    let names = if names.is_empty() { "none is configured".to_owned() } else { names.join(", ") };
    Ok(outcome.with_summary(format!("{names} in {}", node.context.conf_folder().path().display())))
}

/// Checks that the plugins exist. Also checks that only root can change the plugins, the networks'
/// files, the result cache and the reservations.
pub(super) fn folders(node: &Examined<'_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("folders");
    let mut paths: Vec<PathBuf> = vec![node.context.conf_folder().path().to_owned()];
    for list in &node.snapshot.networks {
        for kind in plugin_types(list) {
            match find_plugin(&kind, &node.runtime.plugin_folders) {
                Ok(path) => paths.extend(path.parent().map(Path::to_owned).into_iter().chain([path.clone()])),
                Err(error) => {
                    let folder = node.runtime.plugin_folders.first().cloned().unwrap_or_default();
                    let command = format!("install -m 755 {} {}", quoted(&kind), quoted(&folder.to_string_lossy()));
                    outcome.add(format!("network {}:", list.name()), error.to_string(), command);
                }
            }
        }
    }
    // If the folder cannot be read, the check `networks` fails.
    paths.extend(node.context.conf_folder().files().unwrap_or_default().into_iter().map(|file| file.path));
    paths.extend(node.context.cache_dirs().into_iter().flat_map(|cache| [cache.clone(), cache.join("results")]));
    // The folder of the socket of dhcp's daemon.
    paths.push("/run/cni".into());
    paths.extend(node.snapshot.pools.iter().map(|listed| listed.pool.folder()));
    let mut checked = BTreeSet::new();
    paths.retain(|path| checked.insert(path.clone()));
    paths.iter().for_each(|path| check_permissions(path, &mut outcome));
    outcome.with_summary("all plugins exist, and only root can change them, the networks and the result cache")
}

/// Returns the types of a network's plugins, each followed by the type of its IPAM plugin.
fn plugin_types(list: &NetworkList) -> Vec<String> {
    let types = list.plugins().iter().flat_map(|plugin| {
        let conf = list.request(plugin, AddedKeys::default()).and_then(NetConf::parse);
        [plugin.kind().to_owned(), conf.map(|conf| conf.ipam_type().to_owned()).unwrap_or_default()]
    });
    types.filter(|kind| !kind.is_empty()).collect()
}

/// Checks that only root can change a file or folder. Another user with write access could make
/// root run a program, or release addresses of containers.
fn check_permissions(path: &Path, outcome: &mut CheckOutcome) {
    const GROUP_WRITE: u32 = 0o020;
    const OTHERS_WRITE: u32 = 0o002;
    // A path that does not exist is created later, or another check reports it.
    let Ok(metadata) = fs::metadata(path) else { return };
    let path = quoted(&path.to_string_lossy());
    let mode = metadata.mode() & 0o7777;
    if mode & (GROUP_WRITE | OTHERS_WRITE) != 0 {
        let who = if mode & OTHERS_WRITE != 0 { "every user" } else { "its group" };
        let problem = format!("can be changed by {who} (mode {mode:04o})");
        outcome.add(&path, problem, format!("chmod go-w {path}"));
    }
    // The user that runs cnitool need not have the ID 0 in a user namespace.
    if metadata.uid() != 0 && metadata.uid() != own_uid() {
        let problem = format!("belongs to user {} and not to root", metadata.uid());
        outcome.add(&path, problem, format!("chown root {path}"));
    }
}

/// The advice if the daemon of dhcp does not answer.
const DAEMON_ADVICE: &str = "start the daemon with `systemctl enable --now cni-dhcp.socket` or `dhcp daemon`; restart a running \
                      daemon that does not answer";

/// Runs STATUS of each network's plugins. Skips networks with a plugin that is not installed, which
/// `folders` reports.
pub(super) fn status(networks: &[NetworkList], runtime: &Runtime<'_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("status");
    for list in networks {
        let is_installed = |kind: &str| find_plugin(kind, &runtime.plugin_folders).is_ok();
        if !list.plugins().iter().all(|plugin| is_installed(plugin.kind())) {
            continue;
        }
        if let Err(error) = runtime.status(list) {
            let (object, problem) = (format!("network {}:", list.name()), error.to_string());
            // STATUS has one code for all problems, so an error about dhcp's daemon is recognized
            // by its text.
            let fix = match problem.contains("DHCP daemon") {
                true => advice(DAEMON_ADVICE),
                false => format!("cnitool status {}", quoted(list.name())).into(),
            };
            outcome.add(object, problem, fix);
        }
    }
    outcome.with_summary("every network's plugins report that they can handle an ADD")
}

/// Checks that the ranges are not nearly full, that the disk has space for a reservation, and that
/// each file that is named like a reservation can be one. STATUS succeeds even if the ranges or the
/// disk are full.
///
/// # Errors
/// Code 5 if a folder cannot be read.
pub(super) fn addresses(node: &Examined<'_>) -> Result<CheckOutcome, Error> {
    let mut outcome = CheckOutcome::new("addresses");
    let mut fullest_percent = 0;
    for ListedPool { pool, reservations, unusual } in &node.snapshot.pools {
        let (object, network) = (format!("network {}:", pool.network), quoted(&pool.network));
        for set in pool.usage(&node.context.notes)? {
            let percent = used_percent(&set);
            fullest_percent = fullest_percent.max(percent);
            if percent >= NEARLY_FULL_PERCENT {
                let problem = format!("{} of {} addresses of {} are used", set.used, set.total, set.set);
                outcome.add(&object, problem, format!("cnitool ipam gc {network} --dry-run"));
            }
        }
        // STATUS reports other reasons why the folder cannot be written.
        if pool.is_configured
            && let Ok(Some(shortage)) = pool.store(&node.context.notes).check_writable()
        {
            let data_dir = quoted(&pool.data_dir.to_string_lossy());
            outcome.add(&object, shortage.to_string(), format!("df -h {data_dir}; df -i {data_dir}"));
        }
        let reserved: Vec<IpAddr> = reservations.iter().map(|reservation| reservation.address).collect();
        for note in Ledger::read(pool.store(&node.context.notes).sidecar()).lost_notes(&reserved) {
            outcome.add(&object, note, advice("delete the containers and create them again"));
        }
        for (address, what) in unusual {
            let file = pool.folder().join(address.to_string());
            let fix = format!(
                "find the container that uses the address (cnitool ipam show {network}); if none does, remove the file"
            );
            outcome.add(format!("{object} {}:", quoted(&file.to_string_lossy())), what, advice(fix));
        }
    }
    Ok(outcome.with_summary(format!("no range is more than {fullest_percent}% full")))
}
