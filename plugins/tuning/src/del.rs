//! DEL: restores the values in the backup, and removes it. A sysctl that another program has set
//! since ADD keeps its value.
//!
//! In a list with two entries of this plugin, the first DEL restores all values, and the second
//! finds no backup and succeeds. A value that the kernel refuses is only noted: the namespace will
//! usually be deleted anyway, and a failing DEL would keep the container from ending.

use cni::skel::Call;
use cni::{Error, Result};
use cni_linux::{Ethtool, Link, Netlink, Netns, sysctl};

use crate::add::on_or_off;
use crate::backup::{self, Content, Interface, Namespace, Record};
use crate::sysctl::write_original;
use crate::value::is_same;
use crate::{features, neighbours};

/// Restores the settings of the attachment and removes its backup. A backup that cannot be decoded
/// is noted and removed. The backup of another attachment is noted and stays.
///
/// # Errors
/// - Code 5 if the backup cannot be read or removed.
/// - The kernel's error if the namespace exists but cannot be entered, or the interface cannot be
///   read. The backup stays, so a later DEL may succeed.
pub(crate) fn del(call: &Call<'_>) -> Result<()> {
    let backup = backup::find(call)?;
    let path = backup.path().display();
    match backup::read(&backup)? {
        // `purge` is called even without a backup: a killed ADD may have left its temporary file.
        None => {}
        Some(Content::Garbage(why)) => {
            let consequence = "nothing is restored, so sysctls and interface keep their values";
            call.notes.note(format_args!("{consequence}: the backup {path} is not usable: {why}"));
        }
        Some(Content::Record(record, _)) => {
            if let Some(other) = record.attachment.as_ref().filter(|attachment| attachment.is_foreign_to(call)) {
                call.notes.note(format_args!(
                    "nothing is restored: the backup {path} is that of container {}, interface {}, network {}",
                    other.container_id, other.ifname, other.network
                ));
                return Ok(());
            }
            if let Some(netns) = Netns::open_if_exists(call.netns.as_deref())? {
                restore(call, &netns, &record)?;
            }
        }
    }
    backup.purge().map(drop)
}

/// Restores the sysctls and the settings of the interface. The sysctls are restored even after an
/// error with the interface. If the interface is not the recorded one, restores only the sysctls
/// and adds a note. If the backup is of an earlier namespace, restores nothing and adds a note.
///
/// # Errors
/// The kernel's error if the namespace cannot be entered or the interface cannot be read.
fn restore(call: &Call<'_>, netns: &Netns, record: &Record) -> Result<()> {
    let attachment = record.attachment.as_ref();
    if let Some(attachment) = attachment
        && attachment.namespace != Namespace::of(netns)?
    {
        call.notes.note("nothing is restored: the backup is of an earlier namespace of this container");
        return Ok(());
    }
    let restore_interface = || -> Result<()> {
        let open = || (Netlink::open(), (!record.ethtool.is_empty()).then(Ethtool::open));
        let (netlink, ethtool) = netns.run(open)?;
        let (netlink, ethtool) = (netlink?, ethtool.transpose()?);
        if let Some(link) = netlink.find_link(&call.ifname)? {
            let recorded = attachment.and_then(|attachment| attachment.interface.as_ref());
            // Go's files do not record the interface.
            if recorded.is_none_or(|recorded| *recorded == Interface::from(&link)) {
                if let Err(error) = neighbours::purge(&netlink, link.index, &neighbours::saved(record)) {
                    call.notes.note(error);
                }
                if let Some(ethtool) = &ethtool
                    && let Err(error) = features::restore(ethtool, &link.name, record)
                {
                    call.notes.note(format_args!("not restored: {error}"));
                }
                restore_link(call, &netlink, &link, record);
            } else {
                let why = "it is not the interface that ADD has changed";
                call.notes.note(format_args!("the settings of {} are not restored: {why}", call.ifname));
            }
        }
        Ok(())
    };
    let interface_outcome = if record.has_link_settings() { restore_interface() } else { Ok(()) };
    let sysctls_outcome = if record.sysctls.is_empty() { Ok(()) } else { netns.run(|| write_originals(call, record)) };
    Error::join([interface_outcome.err(), sysctls_outcome.err().map(Error::from)].into_iter().flatten())
}

/// Restores the settings of the interface that differ from the record, in the reverse order of ADD.
/// Errors are noted.
fn restore_link(call: &Call<'_>, netlink: &Netlink, link: &Link, record: &Record) {
    let index = link.index;
    let note_error = |outcome: cni_linux::Result<()>| {
        if let Err(error) = outcome {
            call.notes.note(format_args!("not restored: {error}"));
        }
    };
    if let Some(length) = record.txqlen.filter(|length| *length != link.txqlen) {
        note_error(netlink.set_txqlen(index, length));
    }
    if let Some(allmulti) = record.allmulti.filter(|allmulti| *allmulti != link.allmulti) {
        note_error(netlink.set_allmulti(index, on_or_off(allmulti)));
    }
    // In Go's files, 0 means that the MTU was not saved.
    if let Some(mtu) = record.mtu.filter(|mtu| *mtu != 0 && *mtu != link.mtu) {
        note_error(netlink.set_mtu(index, mtu));
    }
    if let Some(promisc) = record.promisc.filter(|promisc| *promisc != link.promisc) {
        note_error(netlink.set_promisc(index, on_or_off(promisc)));
    }
    match record.mac.parse() {
        Ok(mac) if link.mac != Some(mac) => note_error(netlink.set_mac(index, mac)),
        Ok(_) => {}
        Err(_) if record.mac.is_empty() => {}
        Err(error) => call.notes.note(format_args!("the MAC was not restored: the backup's {error}")),
    }
}

/// Restores the sysctls of the calling thread's namespace, in the reverse order of ADD. Notes each
/// existing sysctl that was not restored.
fn write_originals(call: &Call<'_>, record: &Record) {
    let notes = &call.notes;
    for saved in record.sysctls.iter().rev() {
        let path = &saved.path;
        // Only the sysctls below net belong to the namespace. The others are the host's, and must
        // not be written even if the file lists them.
        if !path.starts_with("net/") {
            notes.note(format_args!("sysctl {path} was not restored: it is not below net"));
            continue;
        }
        let current = match sysctl::read(path) {
            Ok(current) => current,
            // The sysctl disappeared with its interface.
            Err(error) if error.is_not_found() => continue,
            Err(error) => {
                notes.note(format_args!("not restored: {error}"));
                continue;
            }
        };
        if is_same(&current, &saved.original) {
            continue;
        }
        if !saved.is_in_force(&current) {
            notes.note(format_args!("not restored: another program has set {path} to {current} since ADD"));
            continue;
        }
        if let Err(error) = write_original(path, &saved.original) {
            notes.note(format_args!("not restored: {}", Error::from(error)));
        }
    }
}
