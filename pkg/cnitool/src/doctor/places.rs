//! Files: the networks' configurations, the plugins, the folders and who may write to them, the
//! ranges.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use cni::Error;
use cni::delegate::find_plugin;
use libcni::cache::DEFAULT_DIR;

use super::{CheckOutcome, Context};
use crate::inspect::orphans::quoted;

/// Whether the configurations load.
pub(super) fn networks(context: &Context<'_, '_>) -> Result<CheckOutcome, Error> {
    let mut seen = CheckOutcome::new("networks");
    let mut names: Vec<String> = Vec::new();
    for file in context.conf_files()? {
        let path = quoted(&file.path.to_string_lossy());
        match file.list {
            Err(error) => seen.problem(error.to_string(), format!("cnitool validate {path}")),
            Ok(list) if names.iter().any(|name| name == list.name()) => {
                let what = format!("{path} is never used: another file has the network {:?} too", list.name());
                seen.problem(what, format!("mv {path} {path}.unused"));
            }
            Ok(list) => names.push(list.name().to_owned()),
        }
    }
    let well = match names.is_empty() {
        true => format!("none is configured in {}", context.conf_dir.display()),
        false => format!("{} in {}", names.join(", "), context.conf_dir.display()),
    };
    Ok(seen.ok_summary(well))
}

/// Whether the plugins are there, and whether root alone decides what runs as root.
pub(super) fn folders(context: &Context<'_, '_>) -> CheckOutcome {
    let mut seen = CheckOutcome::new("folders");
    let mut looked_at: Vec<PathBuf> = Vec::new();
    let mut look = |path: &Path, seen: &mut CheckOutcome| {
        if looked_at.iter().any(|known| known == path) {
            return;
        }
        looked_at.push(path.to_owned());
        judge(path, seen);
    };
    look(&context.conf_dir, &mut seen);
    for list in &context.snapshot.networks {
        for plugin in list.plugins() {
            let mut kinds = vec![plugin.kind().to_owned()];
            let conf = list.request(plugin, None).and_then(cni::config::NetConf::parse);
            kinds.extend(conf.ok().map(|conf| conf.ipam_type().to_owned()).filter(|kind| !kind.is_empty()));
            for kind in kinds {
                match find_plugin(&kind, &context.runtime.plugin_folders) {
                    Ok(path) => {
                        if let Some(folder) = path.parent() {
                            look(folder, &mut seen);
                        }
                        look(&path, &mut seen);
                    }
                    Err(error) => {
                        let what = format!("network {}: {error}", list.name());
                        if !seen.findings.iter().any(|one| one.what == what) {
                            let folder = context.runtime.plugin_folders.first().cloned().unwrap_or_default();
                            seen.problem(
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
        look(&file.path, &mut seen);
    }
    for path in [DEFAULT_DIR, "/var/lib/cni/results", "/run/cni"] {
        look(Path::new(path), &mut seen);
    }
    for (network, folder, _) in &context.snapshot.reservations {
        look(&folder.join(network), &mut seen);
    }
    seen.ok_summary("plugins are there, and only root can change them, the networks and the result cache")
}

/// A user who can write here can make root run a program, or take containers their addresses.
fn judge(path: &Path, seen: &mut CheckOutcome) {
    // A missing folder is made when it is needed, or another check reports it.
    let Ok(metadata) = fs::metadata(path) else { return };
    let shown = quoted(&path.to_string_lossy());
    let mode = metadata.mode() & 0o7777;
    if mode & 0o022 != 0 {
        let who = if mode & 0o002 != 0 { "every user" } else { "its group" };
        seen.problem(format!("{shown} can be changed by {who} (mode {mode:04o})"), format!("chmod go-w {shown}"));
    }
    // In a user namespace, root is the user who runs cnitool.
    let own = nix_uid();
    if metadata.uid() != 0 && metadata.uid() != own {
        seen.problem(
            format!("{shown} belongs to user {} and not to root", metadata.uid()),
            format!("chown root {shown}"),
        );
    }
}

fn nix_uid() -> u32 {
    fs::metadata("/proc/self").map(|metadata| metadata.uid()).unwrap_or_default()
}

/// How the daemon of dhcp is started, with the units of the release or without.
const DAEMON: &str = "start the daemon: systemctl enable --now cni-dhcp.socket, or dhcp daemon; one that runs and does \
                      not answer must be restarted";

/// Whether each network's plugins can handle an ADD, by their STATUS.
pub(super) fn status(context: &Context<'_, '_>) -> CheckOutcome {
    let mut seen = CheckOutcome::new("status");
    for list in &context.snapshot.networks {
        // `folders` reports a missing plugin.
        let there = list.plugins().iter().all(|one| find_plugin(one.kind(), &context.runtime.plugin_folders).is_ok());
        if let (true, Err(error)) = (there, context.runtime.status(list)) {
            let what = format!("network {}: {error}", list.name());
            match what.contains("DHCP daemon") {
                true => seen.problem_without_command(what, DAEMON),
                false => seen.problem(what, format!("cnitool status {}", quoted(list.name()))),
            }
        }
    }
    seen.ok_summary("every network's plugins report that they can handle an ADD")
}

/// Checks how full the ranges are, and whether the disk has room for a reservation. STATUS succeeds
/// where the ranges or the disk are full.
pub(super) fn addresses(context: &Context<'_, '_>) -> Result<CheckOutcome, Error> {
    let mut seen = CheckOutcome::new("addresses");
    let place = crate::ipam::StoreLocation::default();
    let desk = crate::ipam::IpamContext::new(context.shared, context.call, &place, &context.notes);
    let mut fullest = 0;
    for (network, usage) in desk.usage()? {
        for set in usage {
            let percent = set.used.saturating_mul(100).checked_div(set.total).unwrap_or(100);
            fullest = fullest.max(percent);
            if percent >= 90 {
                let what =
                    format!("network {network}: {} of {} addresses of {} are taken", set.used, set.total, set.set);
                seen.problem(what, format!("cnitool ipam gc {} --dry-run", quoted(&network)));
            }
        }
    }
    for (network, folder, shortage) in desk.shortages()? {
        let folder = quoted(&folder.to_string_lossy());
        seen.problem(format!("network {network}: {shortage}"), format!("df -h {folder}; df -i {folder}"));
    }
    for (network, file, what) in &context.snapshot.unusual {
        let advice = format!(
            "find the container that uses the address (cnitool ipam show {}); if none does, remove the file",
            quoted(network)
        );
        seen.problem_without_command(format!("network {network}: {}: {what}", quoted(&file.to_string_lossy())), advice);
    }
    Ok(seen.ok_summary(format!("no range is more than {fullest}% full")))
}
