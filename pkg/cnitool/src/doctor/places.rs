//! Checks files: the networks' configurations, the plugins, the permissions of folders, the ranges.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use cni::Error;
use cni::delegate::find_plugin;
use libcni::cache::DEFAULT_DIR;

use super::{CheckOutcome, Context};
use crate::inspect::orphans::quoted;

/// Checks that the configurations are valid and that no two files have the same network.
pub(super) fn networks(context: &Context<'_, '_>) -> Result<CheckOutcome, Error> {
    let mut outcome = CheckOutcome::new("networks");
    let mut names: Vec<String> = Vec::new();
    for file in context.conf_files()? {
        let path = quoted(&file.path.to_string_lossy());
        match file.list {
            Err(error) => outcome.problem(error.to_string(), format!("cnitool validate {path}")),
            Ok(list) if names.iter().any(|name| name == list.name()) => {
                let what = format!("{path} is never used: another file defines network {:?} too", list.name());
                outcome.problem(what, format!("mv {path} {path}.unused"));
            }
            Ok(list) => names.push(list.name().to_owned()),
        }
    }
    let well = match names.is_empty() {
        true => format!("none is configured in {}", context.conf_dir.display()),
        false => format!("{} in {}", names.join(", "), context.conf_dir.display()),
    };
    Ok(outcome.ok_summary(well))
}

/// Checks that the plugins exist, and that only root can change what runs as root.
pub(super) fn folders(context: &Context<'_, '_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("folders");
    let mut checked: Vec<PathBuf> = Vec::new();
    let mut check_once = |path: &Path, outcome: &mut CheckOutcome| {
        if checked.iter().any(|known| known == path) {
            return;
        }
        checked.push(path.to_owned());
        check_owner(path, outcome);
    };
    check_once(&context.conf_dir, &mut outcome);
    for list in &context.snapshot.networks {
        for plugin in list.plugins() {
            let mut kinds = vec![plugin.kind().to_owned()];
            let conf = list.request(plugin, None).and_then(cni::config::NetConf::parse);
            kinds.extend(conf.ok().map(|conf| conf.ipam_type().to_owned()).filter(|kind| !kind.is_empty()));
            for kind in kinds {
                match find_plugin(&kind, &context.runtime.plugin_folders) {
                    Ok(path) => {
                        if let Some(folder) = path.parent() {
                            check_once(folder, &mut outcome);
                        }
                        check_once(&path, &mut outcome);
                    }
                    Err(error) => {
                        let what = format!("network {}: {error}", list.name());
                        if !outcome.findings.iter().any(|one| one.what == what) {
                            let folder = context.runtime.plugin_folders.first().cloned().unwrap_or_default();
                            outcome.problem(
                                what,
                                format!("install -m 755 {} {}", quoted(&kind), quoted(&folder.to_string_lossy())),
                            );
                        }
                    }
                }
            }
        }
    }
    for file in context.conf_files().unwrap_or_default() {
        check_once(&file.path, &mut outcome);
    }
    for path in [DEFAULT_DIR, "/var/lib/cni/results", "/run/cni"] {
        check_once(Path::new(path), &mut outcome);
    }
    for (network, folder, _) in &context.snapshot.reservations {
        check_once(&folder.join(network), &mut outcome);
    }
    outcome.ok_summary("all plugins exist, and only root can change them, the networks and the result cache")
}

/// Checks that only root can change a file or folder. Another user who can could make root run a
/// program, or release addresses of containers.
fn check_owner(path: &Path, outcome: &mut CheckOutcome) {
    // A missing folder is created when it is needed, or another check reports it.
    let Ok(metadata) = fs::metadata(path) else { return };
    let path = quoted(&path.to_string_lossy());
    let mode = metadata.mode() & 0o7777;
    if mode & 0o022 != 0 {
        let who = if mode & 0o002 != 0 { "every user" } else { "its group" };
        outcome.problem(format!("{path} can be changed by {who} (mode {mode:04o})"), format!("chmod go-w {path}"));
    }
    // In a user namespace, the user who runs cnitool is root.
    if metadata.uid() != 0 && metadata.uid() != own_uid() {
        outcome.problem(
            format!("{path} belongs to user {} and not to root", metadata.uid()),
            format!("chown root {path}"),
        );
    }
}

/// Returns the user ID of this process.
fn own_uid() -> u32 {
    fs::metadata("/proc/self").map(|metadata| metadata.uid()).unwrap_or_default()
}

/// The advice if the daemon of dhcp does not answer.
const DAEMON: &str = "start the daemon with `systemctl enable --now cni-dhcp.socket` or `dhcp daemon`; restart a running \
                      daemon that does not answer";

/// Checks that each network's plugins can handle an ADD, with their STATUS.
pub(super) fn status(context: &Context<'_, '_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("status");
    for list in &context.snapshot.networks {
        let is_installed = |kind: &str| find_plugin(kind, &context.runtime.plugin_folders).is_ok();
        if !list.plugins().iter().all(|plugin| is_installed(plugin.kind())) {
            // `folders` reports it.
            continue;
        }
        if let Err(error) = context.runtime.status(list) {
            let what = format!("network {}: {error}", list.name());
            match what.contains("DHCP daemon") {
                true => outcome.problem_without_command(what, DAEMON),
                false => outcome.problem(what, format!("cnitool status {}", quoted(list.name()))),
            }
        }
    }
    outcome.ok_summary("every network's plugins report that they can handle an ADD")
}

/// Checks that the ranges are less than 90 % full, and that the disk has space for a reservation.
/// STATUS succeeds even if the ranges or the disk are full.
///
/// # Errors
/// A folder cannot be read.
pub(super) fn addresses(context: &Context<'_, '_>) -> Result<CheckOutcome, Error> {
    let mut outcome = CheckOutcome::new("addresses");
    let location = crate::ipam::StoreLocation::default();
    let ipam = crate::ipam::IpamContext::new(context.shared, context.call, &location, &context.notes);
    let mut fullest = 0;
    for (network, usage) in ipam.usage()? {
        for set in usage {
            let percent = set.used.saturating_mul(100).checked_div(set.total).unwrap_or(100);
            fullest = fullest.max(percent);
            if percent >= 90 {
                let what =
                    format!("network {network}: {} of {} addresses of {} are used", set.used, set.total, set.set);
                outcome.problem(what, format!("cnitool ipam gc {} --dry-run", quoted(&network)));
            }
        }
    }
    for (network, folder, shortage) in ipam.shortages()? {
        let folder = quoted(&folder.to_string_lossy());
        outcome.problem(format!("network {network}: {shortage}"), format!("df -h {folder}; df -i {folder}"));
    }
    for (network, file, what) in &context.snapshot.unusual {
        let advice = format!(
            "find the container that uses the address (cnitool ipam show {}); if none does, remove the file",
            quoted(network)
        );
        outcome
            .problem_without_command(format!("network {network}: {}: {what}", quoted(&file.to_string_lossy())), advice);
    }
    Ok(outcome.ok_summary(format!("no range is more than {fullest}% full")))
}
