//! ADD: everything is looked at, then saved, then changed, in this order.
//!
//! Sysctls first, as written, then MAC, promiscuous mode, MTU, all-multicast mode and transmit queue, as in Go. Until
//! the backup is written nothing has been touched; from then on each change has its undo, which puts back what was
//! there before this ADD (not before the first one: that is DEL's).

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::{Added, Call};
use cni::{Code, Error, Result};
use cni_linux::{Link, Netlink, Netns, Promisc};

use crate::backup::{Attachment, Backup, Content, Folder, Interface, Namespace, Record, Saved, append};
use crate::conf::{Conf, LinkConf, data_dir};
use crate::key::shown;
use crate::sysctl::{self, Found};

pub(crate) fn add<'a>(call: &'a Call<'_>, conf: &Conf, prev: AddResult) -> Result<Added<'a>> {
    let netns = Rc::new(Netns::open(call.netns()?)?);
    let mut rollback = call.rollback();
    if conf.sysctls.is_empty() && conf.link.is_empty() {
        return Ok(Added { result: prev, rollback });
    }
    // A connection costs as much as all the rest, so it is opened for those alone who need it.
    let open = || (!conf.link.is_empty()).then(Netlink::open).transpose();
    let (netlink, found) = netns.run(|| (open(), sysctl::find_all(&conf.sysctls)))?;
    let (netlink, found) = (netlink?, found?);
    let link = match &netlink {
        Some(netlink) => Some(netlink.find_link(&call.ifname)?.ok_or_else(|| no_link(call))?),
        None => None,
    };
    let backup = Folder::new(data_dir(&call.conf)?).backup(&call.container_id, &call.ifname);

    let before = backup.read()?;
    let mut record = record_to_continue(call, &netns, link.as_ref(), &backup, before.as_ref())?;
    let found: Vec<Found> = found.into_iter().filter(|found| says_something(call, found)).collect();
    save_sysctls(&mut record, &found);
    if let Some(link) = &link {
        save_link(&mut record, &conf.link, link);
    }
    if record.has_link() || !record.sysctls.is_empty() {
        backup.write(&record)?;
        let (backup, before) = (backup.clone(), before);
        rollback.push("put the backup back as it was", move || match before {
            Some(Content::Record(_, bytes)) => backup.write_bytes(&bytes),
            _ => backup.purge().map(drop),
        });
    }

    write_sysctls(&netns, found, &mut record, &backup, &mut rollback)?;
    if let (Some(netlink), Some(link)) = (&netlink, &link) {
        change_link(netlink, link, &conf.link, &mut rollback)?;
    }
    Ok(Added { result: tuned(call, &netns, &conf.link, prev), rollback })
}

fn no_link(call: &Call<'_>) -> Error {
    Error::new(Code::INVALID_ENVIRONMENT, format!("failed to get \"{}\": Link not found (CNI_IFNAME)", call.ifname))
}

/// Writing nothing changes nothing. Go takes such a value without a word.
fn says_something(call: &Call<'_>, found: &Found) -> bool {
    let empty = found.sysctl.value.is_empty();
    if empty {
        call.notes
            .note(format_args!("sysctl {} has an empty value: it is left as it is", shown(&found.sysctl.key.written)));
    }
    !empty
}

/// The record as it is, if it is this attachment's in this namespace; else a new one. Go's files do not say: what is
/// saved there is believed, since with it lost the originals would be too.
fn record_to_continue(
    call: &Call<'_>,
    netns: &Netns,
    link: Option<&Link>,
    backup: &Backup,
    before: Option<&Content>,
) -> Result<Record> {
    let namespace = Namespace::of(netns)?;
    let mut interface = link.map(Interface::from);
    let mut record = match before {
        None => Record::default(),
        Some(Content::Garbage(why)) => {
            call.notes.note(format_args!("{} is replaced: {why}", backup.path().display()));
            Record::default()
        }
        Some(Content::Record(record, _)) => match &record.attachment {
            None => (**record).clone(),
            Some(other) if (&other.container_id, &other.ifname) != (&call.container_id, &call.ifname) => {
                if other.namespace.boot_id == namespace.boot_id {
                    let (path, whose) = (backup.path().display(), &other.container_id);
                    let msg = format!("the backup {path} is that of container {whose}, interface {}", other.ifname);
                    return Err(Error::new(Code::CONFLICT, msg));
                }
                Record::default()
            }
            Some(same) if same.namespace != namespace => Record::default(),
            Some(same) if same.interface.is_some() && interface.is_some() && same.interface != interface => {
                of_another_interface(netns, record)?
            }
            Some(same) => {
                // Not looked at this time, or not at the first.
                interface = interface.or_else(|| same.interface.clone());
                (**record).clone()
            }
        },
    };
    record.attachment = Some(Attachment {
        network: call.conf.name().to_owned(),
        container_id: call.container_id.clone(),
        ifname: call.ifname.clone(),
        namespace,
        interface,
    });
    Ok(record)
}

/// The namespace's number is the same, but the interface is another one: either it was made anew, or the number was
/// given to another namespace. What was saved of the interface is void; a sysctl's original still holds where what we
/// wrote is still in force.
fn of_another_interface(netns: &Netns, record: &Record) -> Result<Record> {
    let in_force = |saved: &&Saved| cni_linux::sysctl::read(&saved.path).is_ok_and(|now| saved.is_in_force(&now));
    let sysctls = netns.run(|| record.sysctls.iter().filter(in_force).cloned().collect())?;
    Ok(Record { sysctls, ..Record::default() })
}

fn save_sysctls(record: &mut Record, all: &[Found]) {
    for Found { sysctl, path, current } in all {
        let Some(current) = current else { continue };
        let known = record.sysctls.iter().position(|saved| saved.path == *path);
        let index = known.unwrap_or_else(|| {
            record.sysctls.push(Saved { path: path.clone(), original: current.clone(), ..Saved::default() });
            record.sysctls.len() - 1
        });
        let saved = &mut record.sysctls[index];
        append(&mut saved.written, sysctl.value.clone());
        saved.reads = None;
    }
}

fn save_link(record: &mut Record, conf: &LinkConf, link: &Link) {
    if let Some(mac) = conf.mac {
        if record.mac.is_empty() {
            record.mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
        }
        append(&mut record.written.mac, mac.to_string());
    }
    if conf.promisc {
        record.promisc.get_or_insert(link.promisc);
    }
    if let Some(mtu) = conf.mtu {
        record.mtu.get_or_insert(link.mtu);
        append(&mut record.written.mtu, mtu);
    }
    if let Some(allmulti) = conf.allmulti {
        record.allmulti.get_or_insert(link.allmulti);
        append(&mut record.written.allmulti, allmulti);
    }
    if let Some(length) = conf.txqlen {
        record.txqlen.get_or_insert(link.txqlen);
        append(&mut record.written.txqlen, length);
    }
}

fn write_sysctls(
    netns: &Rc<Netns>,
    all: Vec<Found>,
    record: &mut Record,
    backup: &Backup,
    rollback: &mut Rollback<'_>,
) -> Result<()> {
    if all.is_empty() {
        return Ok(());
    }
    // The undo is pushed before, so that not even a panic in there gets past it; the count says how far it has to go.
    let (all, written) = (Arc::new(all), Arc::new(AtomicUsize::new(0)));
    let undo = (Rc::clone(netns), Arc::clone(&all), Arc::clone(&written));
    rollback.push("put sysctls back as they were", move || {
        let (netns, all, written) = undo;
        netns.run(|| put_back(&all[..written.load(Ordering::Relaxed)]))?
    });
    let readings = netns.run(|| -> Result<Vec<Option<String>>> {
        let write = |found: &Found| {
            let reads = found.write()?;
            written.fetch_add(1, Ordering::Relaxed);
            Ok(reads)
        };
        all.iter().map(write).collect()
    })??;
    if readings.iter().all(Option::is_none) {
        return Ok(());
    }
    for (found, reads) in all.iter().zip(readings) {
        if let Some(saved) = record.sysctls.iter_mut().find(|saved| saved.path == found.path) {
            saved.reads = reads;
        }
    }
    backup.write(record)
}

/// In reverse, going on after failures.
fn put_back(all: &[Found]) -> Result<()> {
    let put_back = |found: &Found| {
        let original = found.current.as_deref()?;
        sysctl::put_back(&found.path, original).err().map(Error::from)
    };
    Error::join(all.iter().rev().filter_map(put_back)).map_or(Ok(()), Err)
}

/// What is as it should be already is not touched: some drivers refuse even that while the interface is up.
fn change_link(netlink: &Netlink, link: &Link, conf: &LinkConf, rollback: &mut Rollback<'_>) -> Result<()> {
    let index = link.index;
    if let Some(mac) = conf.mac.filter(|mac| link.mac != Some(*mac)) {
        netlink.set_mac(index, mac)?;
        if let Some(old) = link.mac {
            let netlink = netlink.clone();
            rollback.push("restore the MAC", move || netlink.set_mac(index, old));
        }
    }
    if conf.promisc && !link.promisc {
        netlink.set_promisc(index, Promisc::On)?;
        let netlink = netlink.clone();
        rollback.push("turn promiscuous mode off again", move || netlink.set_promisc(index, Promisc::Off));
    }
    if let Some(mtu) = conf.mtu.filter(|mtu| link.mtu != *mtu) {
        netlink.set_mtu(index, mtu)?;
        let (netlink, old) = (netlink.clone(), link.mtu);
        rollback.push("restore the MTU", move || netlink.set_mtu(index, old));
    }
    if let Some(allmulti) = conf.allmulti.filter(|allmulti| link.allmulti != *allmulti) {
        netlink.set_allmulti(index, on_or_off(allmulti))?;
        let (netlink, old) = (netlink.clone(), on_or_off(link.allmulti));
        rollback.push("restore all-multicast mode", move || netlink.set_allmulti(index, old));
    }
    if let Some(length) = conf.txqlen.filter(|length| link.txqlen != *length) {
        netlink.set_txqlen(index, length)?;
        let (netlink, old) = (netlink.clone(), link.txqlen);
        rollback.push("restore the length of the transmit queue", move || netlink.set_txqlen(index, old));
    }
    Ok(())
}

pub(crate) fn on_or_off(on: bool) -> Promisc {
    if on { Promisc::On } else { Promisc::Off }
}

/// prevResult, with what was changed in the entry of this interface: the name alone does not make it ours, other
/// sandboxes may have one that is called the same.
fn tuned(call: &Call<'_>, netns: &Netns, conf: &LinkConf, mut result: AddResult) -> AddResult {
    let path = &call.environment.netns;
    let is_ours = |sandbox: &str| {
        // A runtime may spell the path to one namespace in two ways.
        let is_same = || Netns::open(Path::new(sandbox)).is_ok_and(|other| other.is_same(netns));
        !sandbox.is_empty() && (sandbox == path || is_same())
    };
    for interface in result.interfaces.iter_mut().filter(|interface| interface.name == call.ifname) {
        if is_ours(&interface.sandbox) {
            if let Some(mac) = conf.mac {
                interface.mac = mac.to_string();
            }
            interface.mtu = conf.mtu.or(interface.mtu);
        }
    }
    result
}
