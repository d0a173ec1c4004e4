//! metrics: prints figures of the node in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use cni::rollback::Notes;
use cni::{Code, Error};
use cni_ipam::RangeSets;
use cni_ipam::store::Usage;
use cni_linux::{file, flock};
use libcni::NetworkList;

use crate::call::{Context, Exit, Streams, uptime};
use crate::doctor::{self, CheckOutcome, Extent};
use crate::node::attachments::{CachedAttachment, Liveness};
use crate::node::ipam::IpamContext;
use crate::node::leftovers::Leftover;
use crate::node::snapshot::{ListedPool, Snapshot};
use crate::report::write_raw;

/// The arguments of `metrics`.
#[derive(Debug, Args)]
pub(crate) struct MetricsArgs {
    /// Replace this file instead of printing, for node_exporter
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    textfile: Option<PathBuf>,
}

/// The labels of a sample, each with its value.
type Labels<'a> = Vec<(&'a str, &'a str)>;

/// The text of the metrics.
#[derive(Default)]
struct Exposition(String);

impl Exposition {
    /// Adds a gauge: its name, its help and its samples.
    fn add_gauge<'a>(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = (Labels<'a>, f64)>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (labels, value) in samples {
            let labels: Vec<String> =
                labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
            let braces = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let _ = writeln!(self.0, "{name}{braces} {value}");
        }
    }

    /// Adds a gauge with a sample for each key, the number of times that the key occurs.
    fn add_counts<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        labels: [&'a str; N],
        keys: impl IntoIterator<Item = [&'a str; N]>,
    ) {
        let mut counts: BTreeMap<[&str; N], u32> = BTreeMap::new();
        keys.into_iter().for_each(|key| *counts.entry(key).or_default() += 1);
        let samples = counts.into_iter().map(|(key, n)| (labels.into_iter().zip(key).collect(), n.into()));
        self.add_gauge(name, help, samples);
    }
}

/// Escapes the value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Runs `cnitool metrics`. Returns [`Exit::Failed`] if the state of the node could not be read:
/// then only the metrics about locks are printed, with `cni_metrics_complete` 0.
///
/// # Errors
/// Code 5 if the folder of the networks or of reservations cannot be read, the textfile is
/// something else than a regular file or cannot be written, or stdout cannot be written.
pub(crate) fn run(args: &MetricsArgs, context: &Context<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let path = args.textfile.as_ref().map(|path| context.call.folder.join(path));
    path.as_deref().map(check_textfile).transpose()?;
    let mut text = Exposition::default();
    // First, because reading the reservations waits for these locks.
    let wait = oldest_lock_wait(context)?;
    text.add_gauge(
        "cni_lock_wait_seconds",
        "Age of the process that has waited longest for a lock of host-local's reservations, 0 if none waits.",
        [(Vec::new(), wait.as_secs_f64())],
    );
    let examined = doctor::examine(Extent::Host, context).and_then(|(outcomes, snapshot, leftovers)| {
        add_addresses(&mut text, &snapshot, &streams.notes)?;
        add_attachments(&mut text, &snapshot, &leftovers);
        add_findings(&mut text, &outcomes);
        add_leases(&mut text, &snapshot);
        Ok(())
    });
    if let Err(error) = &examined {
        streams.notes.note(format_args!("cnitool: metrics: {error}"));
    }
    let complete = "Whether all metrics could be read.";
    text.add_gauge("cni_metrics_complete", complete, [(Vec::new(), f64::from(u8::from(examined.is_ok())))]);
    match &path {
        Some(path) => write_textfile(path, text.0.as_bytes())?,
        None => write_raw(streams, &text.0)?,
    }
    Ok(if examined.is_ok() { Exit::Done } else { Exit::Failed })
}

/// Adds the usage of each range set.
///
/// # Errors
/// Code 5 if a folder of reservations cannot be read.
fn add_addresses(text: &mut Exposition, snapshot: &Snapshot, notes: &Notes) -> Result<(), Error> {
    let mut rows = Vec::new();
    for ListedPool { pool, reservations, .. } in &snapshot.pools {
        let sets = pool.ranges.iter().flat_map(RangeSets::sets);
        for (Usage { set: name, total, used }, set) in pool.usage(notes)?.into_iter().zip(sets) {
            let liveness = |reservation| snapshot.attachments.liveness_of(&pool.network, reservation);
            let in_set = reservations.iter().filter(|reservation| set.find(reservation.address).is_some());
            let reclaimable = in_set.filter(|one| matches!(liveness(one), Liveness::ContainerGone(_))).count();
            let figures = [total as f64, used as f64, total.saturating_sub(used) as f64, reclaimable as f64];
            rows.push((pool.network.as_str(), name, figures));
        }
    }
    let names = [
        ("", "Addresses of a range that can be allocated."),
        ("_used", "Reserved addresses of a range."),
        ("_free", "Free addresses of a range."),
        ("_reclaimable", "Reserved addresses of a range whose container does not exist any more."),
    ];
    for (index, (suffix, help)) in names.into_iter().enumerate() {
        let samples = rows.iter().map(|(network, range, figures)| {
            (vec![("network", *network), ("range", range.as_str())], figures.get(index).copied().unwrap_or_default())
        });
        text.add_gauge(&format!("cni_range_addresses{suffix}"), help, samples);
    }
    Ok(())
}

/// Adds the number of attachments and leftovers.
fn add_attachments(text: &mut Exposition, snapshot: &Snapshot, leftovers: &[Leftover]) {
    let cached = &snapshot.attachments.cached;
    let networks = cached.iter().map(|one| [one.id.network.as_str()]);
    text.add_counts("cni_attachments", "Attachments in the result cache.", ["network"], networks);
    // Most attachments of a network have the same configuration, which is parsed once.
    let mut lists: BTreeMap<&[u8], Option<NetworkList>> = BTreeMap::new();
    for CachedAttachment { entry, .. } in cached {
        lists.entry(&entry.config).or_insert_with(|| entry.list().ok());
    }
    let added = cached.iter().filter_map(|one| lists.get(one.entry.config.as_slice())?.as_ref());
    let plugins = added.flat_map(|list| list.plugins().iter().map(|plugin| [list.name(), plugin.kind()]));
    let help = "Attachments in the result cache to which a plugin has contributed.";
    text.add_counts("cni_plugin_attachments", help, ["network", "plugin"], plugins);
    let kinds = leftovers.iter().map(|leftover| [leftover.kind]);
    text.add_counts("cni_leftovers", "Objects of containers that do not exist any more.", ["kind"], kinds);
}

/// Adds the number of findings of each check of doctor, 0 for those without findings.
fn add_findings(text: &mut Exposition, outcomes: &[CheckOutcome]) {
    let sample = |outcome: &CheckOutcome| {
        let (check, count) = outcome.count();
        (vec![("check", check), ("severity", outcome.severity())], count as f64)
    };
    let help = "Problems that cnitool doctor finds on the host.";
    text.add_gauge("cni_doctor_findings", help, outcomes.iter().map(sample));
}

/// Adds the number of dhcp's leases and the shortest time until one ends.
fn add_leases(text: &mut Exposition, snapshot: &Snapshot) {
    let networks = snapshot.leases.iter().map(|(_, lease)| [lease.network.as_str()]);
    text.add_counts("cni_dhcp_leases", "Leases that the daemon of dhcp has recorded.", ["network"], networks);
    let mut next: BTreeMap<&str, Duration> = BTreeMap::new();
    for (_, lease) in &snapshot.leases {
        if let Some(expiry) = lease.times.and_then(|times| times.expiry) {
            let first = next.entry(&lease.network).or_insert(expiry);
            *first = expiry.min(*first);
        }
    }
    let samples = next.into_iter().map(|(network, expiry)| (vec![("network", network)], expiry.as_secs_f64()));
    text.add_gauge("cni_dhcp_next_expiry_seconds", "Time until the first lease of a network ends.", samples);
}

/// Returns the age of the oldest process that waits for a lock of reservations, 0 if none waits.
/// The kernel lists the waiting processes, but not since when they wait; a plugin waits for nearly
/// all of its life.
///
/// # Errors
/// Code 5 if the folder of the networks or of reservations, or the kernel's list, cannot be read.
fn oldest_lock_wait(context: &Context<'_>) -> Result<Duration, Error> {
    let lock_files = IpamContext { context, data_dir: None, cached: Some(&[]) }
        .list_pools()?
        .into_iter()
        .map(|pool| pool.folder().join("lock"));
    let inodes: Vec<String> =
        lock_files.filter_map(|path| Some(format!(":{} ", fs::metadata(path).ok()?.ino()))).collect();
    let locks = flock::read_locks().map_err(|error| Error::caused(Code::IO, "failed to read /proc/locks", error))?;
    let waits = locks.lines().filter(|line| line.contains("->") && inodes.iter().any(|inode| line.contains(inode)));
    // `1: -> FLOCK  ADVISORY  WRITE 4711 fd:01:42 0 EOF`
    let ages = waits.filter_map(|line| age_of_process(line.split_whitespace().nth(5)?));
    Ok(ages.max().unwrap_or_default())
}

/// Returns the age of a process, or `None` if it does not exist any more.
fn age_of_process(pid: &str) -> Option<Duration> {
    /// The unit of times in `/proc`, for every architecture that Linux supports today.
    const TICKS_PER_SECOND: f64 = 100.0;
    /// The position of the start time behind the program's name, which may contain anything.
    const START: usize = 19;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let started: f64 = stat.rsplit_once(')')?.1.split_whitespace().nth(START)?.parse().ok()?;
    let age = uptime()?.as_secs_f64() - started / TICKS_PER_SECOND;
    // 0 stands for no process, also if it started within this tick.
    Duration::try_from_secs_f64(age.max(1.0 / TICKS_PER_SECOND)).ok()
}

/// Checks that a path can be replaced by the metrics: that there is a regular file or nothing.
///
/// # Errors
/// Code 5 if it is something else.
fn check_textfile(path: &Path) -> Result<(), Error> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(()),
        Ok(_) => Err(Error::new(Code::IO, format!("{} is not a regular file, so it is not replaced", path.display()))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::caused(Code::IO, format_args!("failed to replace {}", path.display()), error)),
    }
}

/// Replaces the textfile. node_exporter reads it as another user, so every user can read it.
///
/// # Errors
/// Code 5 if it cannot be written.
fn write_textfile(path: &Path, content: &[u8]) -> Result<(), Error> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // node_exporter reads only names that end with `.prom`.
    let temporary = path.with_file_name(format!(".{name}.tmp"));
    file::replace_with_mode(path, &temporary, content, 0o644)
        .map_err(|error| Error::caused(Code::IO, format_args!("failed to write {}", path.display()), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_equal_keys_are_counted() {
        let mut text = Exposition::default();
        text.add_counts("a", "Help.", ["x", "y"], [["1\n", "\\"], ["\"q\"", ""], ["1\n", "\\"]]);
        let expected = "# HELP a Help.\n# TYPE a gauge\na{x=\"\\\"q\\\"\",y=\"\"} 1\na{x=\"1\\n\",y=\"\\\\\"} 2\n";
        assert_eq!(text.0, expected);
    }
}
