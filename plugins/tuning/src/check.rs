//! CHECK: compares sysctls and interface with the configuration, and reports all differences with
//! Go's texts.
//!
//! A list can have several entries of this plugin. So CHECK of an earlier entry accepts the value
//! that a later entry has written: the backup has the written values too. Promiscuous mode may be
//! on although the configuration does not ask for it, because a packet capture turns it on.
//!
//! Runtimes such as Nomad kill a container whose CHECK fails, so differences that harm no packet
//! are only notes.

use std::fmt::Display;

use cni::result::AddResult;
use cni::rollback::Notes;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Ethtool, Link, Mac, Neighbour, Netlink, Netns};

use crate::backup::{self, Content, Namespace, Record, SavedSysctl};
use crate::conf::{Conf, LinkConf};
use crate::features;
use crate::key::cut;
use crate::sysctl::{self, Found};
use crate::value::is_same;

/// Checks the attachment of the call.
///
/// # Errors
/// - Code 101 if a setting differs, with all differences.
/// - Code 3 if the interface does not exist although `prev` lists it or the configuration changes
///   it, also with the differences of the sysctls.
/// - Code 5 if the backup cannot be read.
/// - The kernel's error if the namespace cannot be entered or the interface cannot be read.
pub(crate) fn check(call: &Call<'_>, conf: &Conf, prev: &AddResult) -> Result<()> {
    let netns = Netns::open(call.netns()?)?;
    let record = own_record(call, &netns)?;
    let (netlink, ethtool, sysctls) = netns.run(|| {
        let netlink = Netlink::open();
        let ethtool = (!conf.features.is_empty()).then(Ethtool::open);
        let sysctls: Vec<Result<Found>> = conf.sysctls.iter().map(sysctl::find).collect();
        (netlink, ethtool, sysctls)
    })?;
    let mut errors: Vec<Error> = sysctls.into_iter().filter_map(|found| check_sysctl(found, &record).err()).collect();
    let is_in_result = prev.find_interface(&call.ifname, call.sandbox()).is_some();
    let (netlink, ethtool) = (netlink?, ethtool.transpose()?);
    match netlink.find_link(&call.ifname)? {
        Some(link) => {
            errors.extend(check_link(&link, &conf.link, &record, &call.notes));
            if let Some(ethtool) = &ethtool {
                let found = features::differences(ethtool, &link.name, &conf.features, &record)?;
                errors.extend(found.into_iter().map(|[what, expected, found]| difference(what, expected, found)));
            }
            errors.extend(check_neighbours(&netlink, &link, &conf.neighbours)?);
        }
        None if is_in_result || conf.changes_interface() => {
            let msg = format!("Cannot find container link {}", call.ifname);
            // The first error, because it is the cause if the interface's sysctls do not exist.
            errors.insert(0, Error::new(Code::UNKNOWN_CONTAINER, msg));
        }
        None => {}
    }
    Error::join(errors)
}

/// Returns the record in the attachment's backup, or an empty one if the backup is missing, cannot
/// be decoded, or does not name this attachment and namespace. With an empty record, CHECK accepts
/// only the values of the configuration.
fn own_record(call: &Call<'_>, netns: &Netns) -> Result<Record> {
    let backup = backup::find(call)?;
    let Some(Content::Record(record, _)) = backup::read(&backup)? else { return Ok(Record::default()) };
    let Some(attachment) = &record.attachment else { return Ok(Record::default()) };
    let is_own = !attachment.is_foreign_to(call) && attachment.namespace == Namespace::of(netns)?;
    Ok(if is_own { *record } else { Record::default() })
}

/// Compares the value in `found`, a result of [`sysctl::find`], with the configuration. A value
/// that cannot be read is accepted, and so is any value if the configured one is empty.
///
/// # Errors
/// Code 101 if the value differs or the sysctl does not exist.
fn check_sysctl(found: Result<Found>, record: &Record) -> Result<()> {
    let Found { sysctl, path, current } = found.map_err(|error| error.with_code(Code::CHECK_FAILED))?;
    let Some(current) = current else { return Ok(()) };
    let expected = &sysctl.value;
    // ADD skips a sysctl whose value in the configuration is empty.
    if expected.is_empty() || is_same(expected, &current) {
        return Ok(());
    }
    let is_of_later_entry = |saved: &SavedSysctl| saved.written.contains(expected) && saved.is_in_force(&current);
    if record.find_sysctl(&path).is_some_and(is_of_later_entry) {
        return Ok(());
    }
    Err(difference(format_args!("value of /proc/sys/{path}"), cut(expected), &current))
}

/// Returns Go's error for a difference.
fn difference(what: impl Display, expected: impl Display, found: impl Display) -> Error {
    let msg = format!("Error: Tuning configured {what} is {expected}, current value is {found}");
    Error::new(Code::CHECK_FAILED, msg)
}

/// Compares the settings of the interface with the configuration, and returns all differences with
/// which packets can be lost. The others only go to `notes`: another queue length, and
/// all-multicast mode that another program, such as a multicast router, has turned on.
fn check_link(link: &Link, conf: &LinkConf, record: &Record, notes: &Notes) -> Vec<Error> {
    let (name, written) = (&link.name, &record.written);
    let mut errors = Vec::new();
    if let Some(mac) = conf.mac {
        // Only a damaged backup has a text that is not a MAC.
        let written_macs: Vec<Mac> = written.mac.iter().filter_map(|text| text.parse().ok()).collect();
        if !link.mac.is_some_and(|found| is_accepted(mac, found, &written_macs)) {
            let found = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
            errors.push(difference(format_args!("Ethernet of {name}"), mac, found));
        }
    }
    if conf.promisc && !link.promisc {
        // As in Go, the current value is the kernel's count of users of the mode.
        let msg =
            format!("Error: Tuning link {name} configured promisc is true, current value is {}", link.promiscuity);
        errors.push(Error::new(Code::CHECK_FAILED, msg));
    }
    if let Some(mtu) = conf.mtu.filter(|mtu| !is_accepted(*mtu, link.mtu, &written.mtu)) {
        errors.push(difference(format_args!("MTU of {name}"), mtu, link.mtu));
    }
    if let Some(allmulti) = conf.allmulti.filter(|expected| !is_accepted(*expected, link.allmulti, &written.allmulti)) {
        let error = difference(format_args!("all-multicast mode of {name}"), allmulti, link.allmulti);
        if allmulti { errors.push(error) } else { notes.note(error) }
    }
    if let Some(length) = conf.txqlen.filter(|length| !is_accepted(*length, link.txqlen, &written.txqlen)) {
        notes.note(difference(format_args!("transmit queue length of {name}"), length, link.txqlen));
    }
    errors
}

/// Returns an error for each neighbour that the interface does not have as a permanent one.
fn check_neighbours(netlink: &Netlink, link: &Link, wanted: &[Neighbour]) -> Result<Vec<Error>> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let existing = netlink.list_permanent_neighbours(link.index)?;
    let missing = wanted.iter().filter(|neighbour| !existing.contains(neighbour));
    let error = |Neighbour { ip, mac }: &Neighbour| {
        let found = existing.iter().find(|existing| existing.ip == *ip).map(|existing| existing.mac.to_string());
        difference(format_args!("neighbour {ip} of {}", link.name), mac, found.as_deref().unwrap_or("absent"))
    };
    Ok(missing.map(error).collect())
}

/// Whether the found value is the expected one, or the value that a later entry of the list has
/// written. `history` has the values that all entries have written, the newest last.
fn is_accepted<T: PartialEq + Copy>(expected: T, found: T, history: &[T]) -> bool {
    found == expected || (history.contains(&expected) && history.last() == Some(&found))
}
