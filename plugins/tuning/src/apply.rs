//! ADD: everything is looked at, then saved, then changed, in this order.
//!
//! Sysctls first, as written, then MAC, promiscuous mode, MTU, all-multicast mode and transmit
//! queue, as in Go. Until the backup is written nothing has been touched; from then on each change
//! has its undo, which puts back what was there before this ADD (not before the first one: that is
//! DEL's).

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::{Added, Call};
use cni::{Code, Error, Result};
use cni_linux::{Link, LinkFlag, Netlink, Netns};

use crate::backup::{Attachment, Backup, Content, Folder, Interface, Namespace, Record, Saved, append};
use crate::conf::{Conf, LinkConf, data_dir};
use crate::key::shown;
use crate::sysctl::{self, Found};

pub(crate) fn add<'a>(call: &'a Call<'_>, conf: &Conf, prev: AddResult) -> Result<Added<'a>> {
    let netns = Arc::new(Netns::open(call.netns()?)?);
    let mut rollback = call.rollback();
    if conf.sysctls.is_empty() && conf.link.is_empty() {
        return Ok(Added { result: prev, rollback });
    }
    let backup = Folder::new(data_dir(&call.conf)?, call.conf.name()).backup(&call.container_id, &call.ifname);
    let before = backup.read()?;
    let whose = Attachment {
        network: call.conf.name().to_owned(),
        container_id: call.container_id.clone(),
        ifname: call.ifname.clone(),
        namespace: Namespace::of(&netns)?,
        interface: None,
    };
    let visit = Arc::new(Visit {
        backup,
        before,
        whose,
        found: OnceLock::new(),
        saved: AtomicBool::new(false),
        written: AtomicUsize::new(0),
    });
    // Pushed before, so that not even a panic in there gets past it: the visit says how far it
    // came.
    let undo = (Arc::clone(&visit), Arc::clone(&netns));
    rollback.push("put sysctls and the backup back as they were", move || undo.0.undo(&undo.1));
    let seen = netns.run(|| visit.make(conf))??;
    for note in &seen.notes {
        call.notes.note(note);
    }
    if let Some((netlink, link)) = &seen.link {
        change_link(netlink, link, &conf.link, &mut rollback)?;
    }
    Ok(Added { result: tuned(call, &netns, &conf.link, prev), rollback })
}

/// The one visit to the container's namespace, on the thread that makes it: what it needs, and how
/// far it has come. A second one would cost as much as all the rest.
struct Visit {
    backup: Backup,
    /// The backup as it was found.
    before: Option<Content>,
    /// This attachment.
    whose: Attachment,
    /// The sysctls to be written.
    found: OnceLock<Vec<Found>>,
    /// Whether the backup has been written.
    saved: AtomicBool,
    /// How many sysctls have been.
    written: AtomicUsize,
}

/// The outcome of a visit to the namespace.
struct VisitOutcome {
    /// The interface before it is changed, if it is to be.
    link: Option<(Netlink, Link)>,
    /// For the operator.
    notes: Vec<String>,
}

impl Visit {
    fn make(&self, conf: &Conf) -> Result<VisitOutcome> {
        let mut notes = Vec::new();
        let found = sysctl::find_all(&conf.sysctls)?;
        // A connection is opened for those alone who need it.
        let link = if conf.link.is_empty() { None } else { Some(self.link()?) };
        let mut record = self.record_to_continue(link.as_ref().map(|(_, link)| link), &mut notes)?;
        let found: Vec<Found> = found.into_iter().filter(|found| has_value(found, &mut notes)).collect();
        save_sysctls(&mut record, &found);
        if let Some((_, link)) = &link {
            save_link(&mut record, &conf.link, link);
        }
        if record.has_link() || !record.sysctls.is_empty() {
            self.backup.write(&record)?;
            self.saved.store(true, Ordering::Relaxed);
        }
        self.write_sysctls(self.found.get_or_init(|| found), &mut record)?;
        Ok(VisitOutcome { link, notes })
    }

    fn link(&self) -> Result<(Netlink, Link)> {
        let (netlink, ifname) = (Netlink::open()?, &self.whose.ifname);
        match netlink.find_link(ifname)? {
            Some(link) => Ok((netlink, link)),
            None => {
                let msg = format!("failed to get \"{ifname}\": Link not found (CNI_IFNAME)");
                Err(Error::new(Code::INVALID_ENVIRONMENT, msg))
            }
        }
    }

    /// Returns the existing record if it belongs to this attachment in this namespace, otherwise an
    /// empty one. Go's backup files do not name their attachment. They are used anyway, because the
    /// original values are stored nowhere else.
    ///
    /// # Errors
    /// 102 if the record belongs to another attachment of this boot.
    fn record_to_continue(&self, link: Option<&Link>, notes: &mut Vec<String>) -> Result<Record> {
        let mut this = Attachment { interface: link.map(Interface::from), ..self.whose.clone() };
        let mut record = match &self.before {
            None => Record::default(),
            Some(Content::Garbage(why)) => {
                notes.push(format!("{} is replaced: {why}", self.backup.path().display()));
                Record::default()
            }
            Some(Content::Record(record, _)) => match &record.attachment {
                None => (**record).clone(),
                Some(other) if (&other.container_id, &other.ifname) != (&this.container_id, &this.ifname) => {
                    if other.namespace.boot_id == this.namespace.boot_id {
                        let (path, other_id) = (self.backup.path().display(), &other.container_id);
                        let msg =
                            format!("the backup {path} is that of container {other_id}, interface {}", other.ifname);
                        return Err(Error::new(Code::CONFLICT, msg));
                    }
                    Record::default()
                }
                Some(same) if same.namespace != this.namespace => Record::default(),
                Some(same)
                    if same.interface.is_some() && this.interface.is_some() && same.interface != this.interface =>
                {
                    keep_sysctls_in_force(record)
                }
                Some(same) => {
                    // This ADD or the first one did not look the interface up.
                    this.interface = this.interface.or_else(|| same.interface.clone());
                    (**record).clone()
                }
            },
        };
        record.attachment = Some(this);
        Ok(record)
    }

    /// Writes them in order, and into the backup what the kernel writes its own way.
    fn write_sysctls(&self, all: &[Found], record: &mut Record) -> Result<()> {
        let mut rewritten = false;
        for found in all {
            let reads = found.write()?;
            self.written.fetch_add(1, Ordering::Relaxed);
            let saved = record.sysctls.iter_mut().find(|saved| saved.path == found.path);
            if let (Some(saved), true) = (saved, reads.is_some()) {
                saved.reads = reads;
                rewritten = true;
            }
        }
        if rewritten { self.backup.write(record) } else { Ok(()) }
    }

    /// Going on after failures.
    fn undo(&self, netns: &Netns) -> Result<()> {
        let written = self.written.load(Ordering::Relaxed);
        let found = self.found.get().map(|found| &found[..written]).unwrap_or_default();
        let mut errors = Vec::new();
        if !found.is_empty() {
            match netns.run(|| put_back(found)) {
                Ok(put_back) => errors.extend(put_back.err()),
                Err(error) => errors.push(error.into()),
            }
        }
        if self.saved.load(Ordering::Relaxed) {
            let backup = match &self.before {
                Some(Content::Record(_, bytes)) => self.backup.write_bytes(bytes),
                _ => self.backup.purge().map(drop),
            };
            errors.extend(backup.err());
        }
        Error::join(errors)
    }
}

/// Writing nothing changes nothing. Go takes such a value without a word.
fn has_value(found: &Found, notes: &mut Vec<String>) -> bool {
    let empty = found.sysctl.value.is_empty();
    if empty {
        notes.push(format!("sysctl {} has an empty value: it is left as it is", shown(&found.sysctl.key.written)));
    }
    !empty
}

/// Drops what was saved of the interface, and the sysctls whose value is no longer the one that was
/// written. For a namespace with the same number but another interface: either the interface was
/// recreated, or another namespace got the number.
fn keep_sysctls_in_force(record: &Record) -> Record {
    let in_force = |saved: &&Saved| cni_linux::sysctl::read(&saved.path).is_ok_and(|now| saved.is_in_force(&now));
    Record { sysctls: record.sysctls.iter().filter(in_force).cloned().collect(), ..Record::default() }
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

/// In reverse, going on after failures.
fn put_back(all: &[Found]) -> Result<()> {
    let put_back = |found: &Found| {
        let original = found.current.as_deref()?;
        sysctl::put_back(&found.path, original).err().map(Error::from)
    };
    Error::join(all.iter().rev().filter_map(put_back))
}

/// Changes only what differs: some drivers refuse even a change to the same value while the
/// interface is up.
fn change_link(netlink: &Netlink, link: &Link, conf: &LinkConf, rollback: &mut Rollback<'_>) -> Result<()> {
    // Registered before the changes: if the kernel's answer is lost, a change may have been made.
    let (undo, before, changed) = (netlink.clone(), link.clone(), *conf);
    rollback.push("put the interface back as it was", move || put_link_back(&undo, &before, &changed));
    let index = link.index;
    if let Some(mac) = conf.mac.filter(|mac| link.mac != Some(*mac)) {
        netlink.set_mac(index, mac)?;
    }
    if conf.promisc && !link.promisc {
        netlink.set_promisc(index, LinkFlag::On)?;
    }
    if let Some(mtu) = conf.mtu.filter(|mtu| link.mtu != *mtu) {
        netlink.set_mtu(index, mtu)?;
    }
    if let Some(allmulti) = conf.allmulti.filter(|allmulti| link.allmulti != *allmulti) {
        netlink.set_allmulti(index, on_or_off(allmulti))?;
    }
    if let Some(length) = conf.txqlen.filter(|length| link.txqlen != *length) {
        netlink.set_txqlen(index, length)?;
    }
    Ok(())
}

/// Undoes the changes of [`change_link`], in reverse order, and continues after failures.
fn put_link_back(netlink: &Netlink, before: &Link, conf: &LinkConf) -> Result<()> {
    let index = before.index;
    let Some(now) = netlink.find_link_by_index(index)? else { return Ok(()) };
    let mut results = Vec::new();
    if conf.txqlen.is_some() && now.txqlen != before.txqlen {
        results.push(netlink.set_txqlen(index, before.txqlen));
    }
    if conf.allmulti.is_some() && now.allmulti != before.allmulti {
        results.push(netlink.set_allmulti(index, on_or_off(before.allmulti)));
    }
    if conf.mtu.is_some() && now.mtu != before.mtu {
        results.push(netlink.set_mtu(index, before.mtu));
    }
    if conf.promisc && now.promisc != before.promisc {
        results.push(netlink.set_promisc(index, on_or_off(before.promisc)));
    }
    if let Some(mac) = before.mac.filter(|_| conf.mac.is_some() && now.mac != before.mac) {
        results.push(netlink.set_mac(index, mac));
    }
    Error::join(results.into_iter().filter_map(Result::err).map(Error::from))
}

pub(crate) fn on_or_off(on: bool) -> LinkFlag {
    if on { LinkFlag::On } else { LinkFlag::Off }
}

/// prevResult, with what was changed in the entry of this interface: the name alone does not make
/// it ours, other sandboxes may have one that is called the same.
fn tuned(call: &Call<'_>, netns: &Netns, conf: &LinkConf, mut result: AddResult) -> AddResult {
    let path = call.sandbox();
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
