//! DEL: what the backup holds is put back, and the backup removed.
//!
//! The first DEL of a list with two entries restores all, the second finds
//! nothing, and both succeed. A value that the kernel refuses is a note and not an error: the
//! namespace is about to go, and a DEL that fails for that would keep a container from ending.

use cni::skel::Call;
use cni::{Error, Result};
use cni_linux::{Link, Netlink, Netns, sysctl};

use crate::apply::on_or_off;
use crate::backup::{Content, Folder, Interface, Namespace, Record};
use crate::conf::data_dir;
use crate::sysctl::put_back;
use crate::value::is_same;

pub(crate) fn del(call: &Call<'_>) -> Result<()> {
    let backup = Folder::new(data_dir(&call.conf)?, call.conf.name()).backup(&call.container_id, &call.ifname);
    let path = backup.path().display();
    match backup.read()? {
        // A killed ADD may have come half-way to one.
        None => {}
        Some(Content::Garbage(why)) => call.notes.note(format_args!("{path} cannot be restored: {why}")),
        Some(Content::Record(record, _)) => {
            if let Some(other) = record.attachment.as_ref().filter(|attachment| attachment.is_foreign_to(call)) {
                call.notes.note(format_args!(
                    "{path} was left: it is that of container {}, interface {}, network {}",
                    other.container_id, other.ifname, other.network
                ));
                return Ok(());
            }
            match call.netns.as_deref().map(Netns::open) {
                None => {}
                Some(Err(error)) if error.is_no_netns() => {}
                Some(netns) => restore(call, &netns?, &record)?,
            }
        }
    }
    backup.purge().map(drop)
}

/// Interface and sysctls, whatever becomes of the other.
///
/// # Errors
/// Only where the namespace could not be looked into: then another DEL may succeed.
fn restore(call: &Call<'_>, netns: &Netns, record: &Record) -> Result<()> {
    let attachment = record.attachment.as_ref();
    if let Some(attachment) = attachment
        && attachment.namespace != Namespace::of(netns)?
    {
        call.notes.note("nothing is restored: the backup is of an earlier namespace of this container");
        return Ok(());
    }
    let interface = || -> Result<()> {
        let netlink = netns.run(Netlink::open)??;
        if let Some(link) = netlink.find_link(&call.ifname)? {
            let saved = attachment.and_then(|attachment| attachment.interface.as_ref());
            if saved.is_none_or(|saved| *saved == Interface::from(&link)) {
                restore_link(call, &netlink, &link, record);
            }
        }
        Ok(())
    };
    let sysctls = || -> Result<()> {
        for line in netns.run(|| restore_sysctls(record))? {
            call.notes.note(line);
        }
        Ok(())
    };
    let interface = if record.has_link() { interface() } else { Ok(()) };
    let sysctls = if record.sysctls.is_empty() { Ok(()) } else { sysctls() };
    Error::join([interface.err(), sysctls.err()].into_iter().flatten())
}

/// In the reverse of ADD's order.
fn restore_link(call: &Call<'_>, netlink: &Netlink, link: &Link, record: &Record) {
    let index = link.index;
    let told = |done: cni_linux::Result<()>| {
        if let Err(error) = done {
            call.notes.note(format_args!("not restored: {error}"));
        }
    };
    if let Some(length) = record.txqlen.filter(|length| *length != link.txqlen) {
        told(netlink.set_txqlen(index, length));
    }
    if let Some(allmulti) = record.allmulti.filter(|allmulti| *allmulti != link.allmulti) {
        told(netlink.set_allmulti(index, on_or_off(allmulti)));
    }
    // 0 stands for "not saved" in Go's files.
    if let Some(mtu) = record.mtu.filter(|mtu| *mtu != 0 && *mtu != link.mtu) {
        told(netlink.set_mtu(index, mtu));
    }
    if let Some(promisc) = record.promisc.filter(|promisc| *promisc != link.promisc) {
        told(netlink.set_promisc(index, on_or_off(promisc)));
    }
    match record.mac.parse() {
        Ok(mac) if link.mac != Some(mac) => told(netlink.set_mac(index, mac)),
        Ok(_) => {}
        Err(_) if record.mac.is_empty() => {}
        Err(error) => call.notes.note(format_args!("not restored: the backup's {error}")),
    }
}

/// Restores sysctls inside the namespace, in the reverse of the order in which they were written.
/// Returns notes for the operator.
fn restore_sysctls(record: &Record) -> Vec<String> {
    let mut notes = Vec::new();
    for saved in record.sysctls.iter().rev() {
        let path = &saved.path;
        // The file is root's, yet nothing it says leads out of the namespace.
        if !path.starts_with("net/") {
            notes.push(format!("not restored: {path} is not below net"));
            continue;
        }
        let now = match sysctl::read(path) {
            Ok(now) => now,
            // It went with its interface.
            Err(error) if error.is_not_found() => continue,
            Err(error) => {
                notes.push(format!("not restored: {error}"));
                continue;
            }
        };
        if is_same(&now, &saved.original) {
            continue;
        }
        if !saved.is_in_force(&now) {
            notes.push(format!("not restored: {path} has been set to {now} since"));
            continue;
        }
        if let Err(error) = put_back(path, &saved.original) {
            notes.push(format!("not restored: {}", Error::from(error)));
        }
    }
    notes
}
