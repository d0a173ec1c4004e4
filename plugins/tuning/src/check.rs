//! CHECK: compares sysctls and interface with the configuration, and reports all differences with
//! Go's texts.
//!
//! A list can have several entries of this plugin. A value that a later entry has written is right
//! too; the backup has the values that all of them have written. Promiscuous mode may be on
//! although the configuration does not ask for it, because a packet capture turns it on.

use std::fmt::Display;

use cni::result::AddResult;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Link, Mac, Netlink, Netns};

use crate::backup::{Content, Folder, Namespace, Record, Saved};
use crate::conf::{Conf, LinkConf, Sysctl, data_dir};
use crate::key::cut;
use crate::sysctl;
use crate::value::is_same;

/// Checks the attachment of the call.
///
/// # Errors
/// Code 101 with all differences; 3 if the interface does not exist although `prev` lists it or the
/// configuration changes it; the backup cannot be read.
pub(crate) fn check(call: &Call<'_>, conf: &Conf, prev: &AddResult) -> Result<()> {
    let netns = Netns::open(call.netns()?)?;
    let record = record(call, &netns)?;
    let (netlink, values) = netns.run(|| (Netlink::open(), conf.sysctls.iter().map(value).collect::<Vec<_>>()))?;
    let mut errors: Vec<Error> = Vec::new();
    for (sysctl, value) in conf.sysctls.iter().zip(values) {
        errors.extend(check_sysctl(sysctl, value, &record).err());
    }
    let is_in_result = prev.find_interface(&call.ifname, call.sandbox()).is_some();
    match netlink?.find_link(&call.ifname)? {
        Some(link) => errors.extend(check_link(&link, &conf.link, &record)),
        None if is_in_result || !conf.link.is_empty() => {
            let msg = format!("Cannot find container link {}", call.ifname);
            return Err(Error::new(Code::UNKNOWN_CONTAINER, msg));
        }
        None => {}
    }
    Error::join(errors)
}

/// Returns the record of the values that the entries of the list have written. It is empty if the
/// backup is missing, cannot be decoded, or does not name this attachment and namespace.
fn record(call: &Call<'_>, netns: &Netns) -> Result<Record> {
    let backup = Folder::new(data_dir(&call.conf)?, call.conf.name()).backup(&call.container_id, &call.ifname);
    let Some(Content::Record(record, _)) = backup.read()? else { return Ok(Record::default()) };
    let Some(attachment) = &record.attachment else { return Ok(Record::default()) };
    let is_own = !attachment.is_foreign_to(call) && attachment.namespace == Namespace::of(netns)?;
    Ok(if is_own { *record } else { Record::default() })
}

/// Returns the path of a sysctl below /proc/sys and its current value, or `None` for a value that
/// cannot be read. To be called inside the namespace.
fn value(sysctl: &Sysctl) -> Result<(String, Option<String>)> {
    sysctl::find(sysctl).map(|found| (found.path, found.current))
}

/// Compares the value of a sysctl with the configuration. `value` is the result of [`value`]. A
/// value that cannot be read counts as equal.
fn check_sysctl(sysctl: &Sysctl, value: Result<(String, Option<String>)>, record: &Record) -> Result<()> {
    let (path, current) = value.map_err(|error| error.with_code(Code::CHECK_FAILED))?;
    let Some(current) = current else { return Ok(()) };
    let expected = &sysctl.value;
    let is_of_later_entry = |saved: &Saved| saved.written.contains(expected) && saved.is_in_force(&current);
    if expected.is_empty() || is_same(expected, &current) || record.find_sysctl(&path).is_some_and(is_of_later_entry) {
        return Ok(());
    }
    Err(differs(format_args!("value of /proc/sys/{path}"), cut(expected), &current))
}

/// Returns Go's error for a difference.
fn differs(what: impl Display, expected: impl Display, found: impl Display) -> Error {
    let msg = format!("Error: Tuning configured {what} is {expected}, current value is {found}");
    Error::new(Code::CHECK_FAILED, msg)
}

/// Compares the settings of the interface with the configuration, and returns all differences.
fn check_link(link: &Link, conf: &LinkConf, record: &Record) -> Vec<Error> {
    let (name, written) = (&link.name, &record.written);
    let mut errors = Vec::new();
    let mut report_unless = |is_right: bool, error: &dyn Fn() -> Error| {
        if !is_right {
            errors.push(error());
        }
    };
    if let Some(mac) = conf.mac {
        let written_macs: Vec<Mac> = written.mac.iter().filter_map(|text| text.parse().ok()).collect();
        let found = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
        let error = || differs(format_args!("Ethernet of {name}"), mac, &found);
        report_unless(link.mac.is_some_and(|found| is_in_force(mac, found, &written_macs)), &error);
    }
    if conf.promisc {
        let msg =
            format!("Error: Tuning link {name} configured promisc is true, current value is {}", link.promiscuity);
        report_unless(link.promisc, &|| Error::new(Code::CHECK_FAILED, msg.clone()));
    }
    if let Some(mtu) = conf.mtu {
        let error = || differs(format_args!("MTU of {name}"), mtu, link.mtu);
        report_unless(is_in_force(mtu, link.mtu, &written.mtu), &error);
    }
    if let Some(allmulti) = conf.allmulti {
        let error = || differs(format_args!("all-multicast mode of {name}"), allmulti, link.allmulti);
        report_unless(is_in_force(allmulti, link.allmulti, &written.allmulti), &error);
    }
    if let Some(length) = conf.txqlen {
        let error = || differs(format_args!("transmit queue length of {name}"), length, link.txqlen);
        report_unless(is_in_force(length, link.txqlen, &written.txqlen), &error);
    }
    errors
}

/// Whether the found value is the expected one, or the value that a later entry of the list has
/// written. `history` has the values that all entries have written, the last one at the end.
fn is_in_force<T: PartialEq + Copy>(expected: T, found: T, history: &[T]) -> bool {
    found == expected || (history.contains(&expected) && history.last() == Some(&found))
}
