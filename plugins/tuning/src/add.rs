//! ADD: reads the current values, writes them to the backup, and then sets the configured values.
//!
//! The order of the changes is Go's: the sysctls in the order of the configuration, then MAC,
//! promiscuous mode, MTU, all-multicast mode and transmit queue; then the features and neighbours,
//! which Go does not have. Nothing is changed before the backup is written.
//!
//! A list can have several entries of this plugin. They share the attachment's backup, which keeps
//! the values that the first ADD found, for DEL. A failed ADD restores the values that it found
//! itself.

use std::path::Path;
use std::rc::Rc;

use cni::result::AddResult;
use cni::rollback::{Notes, Rollback};
use cni::skel::{Added, Call};
use cni::{Code, Error, Result};
use cni_linux::{Link, LinkFlag, Neighbour, Netlink, Netns};
use cni_plugin::folder::StateFile;

use crate::backup::{self, Attachment, Content, Interface, Namespace, Record, SavedSysctl, make_last};
use crate::conf::{Conf, LinkConf};
use crate::features::FeatureChange;
use crate::key::shown;
use crate::neighbours;
use crate::sysctl::{self, Found};

/// Makes the changes of the configuration, and returns `prev` with the changed properties of the
/// interface.
///
/// # Errors
/// After an error, the rollback undoes all changes.
/// - Code 4 if the interface does not exist, 7 if a sysctl does not exist.
/// - Code 5 if the backup cannot be read or written, 102 if it belongs to another attachment.
/// - The kernel's error if it refuses a value or the namespace cannot be entered.
pub(crate) fn add<'a>(call: &'a Call<'_>, conf: &Conf, prev: AddResult) -> Result<Added<'a>> {
    let netns = Rc::new(Netns::open(call.netns()?)?);
    let mut rollback = call.rollback();
    if conf.sysctls.is_empty() && !conf.changes_interface() {
        return Ok(Added { result: prev, rollback });
    }
    let backup = backup::find(call)?;
    let previous_backup = backup::read(&backup)?;
    let attachment = Attachment {
        network: call.conf.name().to_owned(),
        container_id: call.container_id.clone(),
        ifname: call.ifname.clone(),
        namespace: Namespace::of(&netns)?,
        interface: None,
    };
    let changes =
        NamespaceChanges { backup, previous_backup, attachment, netns: Rc::clone(&netns), notes: &call.notes };
    let interface = netns.run(|| changes.apply(conf, &mut rollback))??;
    if let Some(InterfaceChange { netlink, link, features, neighbours }) = interface {
        if !conf.link.is_empty() {
            change_link(&netlink, &link, &conf.link, &mut rollback)?;
        }
        if let Some(features) = features.map(Rc::new) {
            let features_of_undo = Rc::clone(&features);
            rollback.push("put the interface's features back", move || features_of_undo.undo());
            features.apply()?;
        }
        add_neighbours(&netlink, &link, neighbours, &mut rollback)?;
    }
    Ok(Added { result: update_result(call, &netns, &conf.link, prev), rollback })
}

/// The steps for which a thread enters the container's namespace: the backup and the sysctls are
/// written, and the netlink socket is opened through which [`change_link`] changes the interface
/// later. The namespace is entered only once, because entering takes as long as all of these steps.
struct NamespaceChanges<'a> {
    backup: StateFile,
    /// The content of the backup before this ADD.
    previous_backup: Option<Content>,
    /// This attachment.
    attachment: Attachment,
    netns: Rc<Netns>,
    notes: &'a Notes,
}

/// The changes to the interface, which are not made yet, with sockets of its namespace.
struct InterfaceChange {
    netlink: Netlink,
    /// The interface before its changes.
    link: Link,
    features: Option<FeatureChange>,
    /// The neighbours that do not exist yet.
    neighbours: Vec<Neighbour>,
}

impl NamespaceChanges<'_> {
    /// Finds the sysctls and the interface, writes the backup, and writes the sysctls. Returns the
    /// changes to the interface, or `None` if the configuration does not change the interface.
    fn apply(&self, conf: &Conf, rollback: &mut Rollback<'_>) -> Result<Option<InterfaceChange>> {
        let sysctls: Vec<Found> = conf.sysctls.iter().map(sysctl::find).collect::<Result<_>>()?;
        let interface = if conf.changes_interface() { Some(self.find_interface(conf)?) } else { None };
        let mut record = self.initial_record(interface.as_ref().map(|change| &change.link))?;
        // Writing an empty value would change nothing. Go accepts it without a message.
        let (ignored, to_write): (Vec<Found>, Vec<Found>) =
            sysctls.into_iter().partition(|found| found.sysctl.value.is_empty());
        for found in &ignored {
            let key = shown(&found.sysctl.key.written);
            self.notes.note(format_args!("sysctl {key} has an empty value: it is not changed"));
        }
        save_sysctls(&mut record, &to_write);
        if let Some(InterfaceChange { link, features, neighbours, .. }) = &interface {
            save_link(&mut record, &conf.link, link);
            neighbours::save(&mut record, neighbours);
            features.iter().for_each(|features| features.save(&mut record));
        }
        // Nothing was saved if none of the sysctls can be read. DEL then has nothing to restore.
        if record.has_link_settings() || !record.sysctls.is_empty() {
            self.write_backup(&record, rollback)?;
        }
        self.write_sysctls(&to_write, &mut record, rollback)?;
        Ok(interface)
    }

    /// Finds the interface and its changes.
    ///
    /// # Errors
    /// - Code 4 if the interface does not exist.
    /// - Code 7 if a feature is unknown or fixed, 102 if a neighbour has another MAC.
    fn find_interface(&self, conf: &Conf) -> Result<InterfaceChange> {
        let (netlink, link) = self.find_link()?;
        let features = FeatureChange::find(&self.attachment.ifname, &conf.features)?;
        let neighbours = neighbours::missing(&netlink, &link, &conf.neighbours)?;
        Ok(InterfaceChange { netlink, link, features, neighbours })
    }

    /// Finds the interface, and returns it with a netlink socket of the namespace.
    ///
    /// # Errors
    /// Code 4 if the interface does not exist.
    fn find_link(&self) -> Result<(Netlink, Link)> {
        let (netlink, ifname) = (Netlink::open()?, &self.attachment.ifname);
        match netlink.find_link(ifname)? {
            Some(link) => Ok((netlink, link)),
            None => {
                let msg = format!("failed to get \"{ifname}\": Link not found (CNI_IFNAME)");
                Err(Error::new(Code::INVALID_ENVIRONMENT, msg))
            }
        }
    }

    /// Returns this attachment's record before this ADD adds its values: the usable part of the
    /// existing backup, or an empty record. `link` is `None` if this ADD does not change the
    /// interface. Adds a note if the backup is not usable.
    ///
    /// # Errors
    /// Code 102 if the backup belongs to another attachment of this boot.
    fn initial_record(&self, link: Option<&Link>) -> Result<Record> {
        let interface = link.map(Interface::from);
        let mut record = match &self.previous_backup {
            None => Record::default(),
            Some(Content::Garbage(why)) => {
                let path = self.backup.path().display();
                self.notes
                    .note(format_args!("the backup {path} is not usable, so its original values are lost: {why}"));
                Record::default()
            }
            Some(Content::Record(record, _)) => match &record.attachment {
                // A file of Go's plugin does not name its attachment. It is used anyway, because
                // the original values are stored nowhere else.
                None => (**record).clone(),
                Some(recorded) => self.usable_part(record, recorded, interface.as_ref())?,
            },
        };
        // An ADD that changes only sysctls keeps the interface that the backup names.
        let interface = interface.or_else(|| record.attachment.and_then(|recorded| recorded.interface));
        record.attachment = Some(Attachment { interface, ..self.attachment.clone() });
        Ok(record)
    }

    /// Returns the original values in `record` that are still valid: all, only sysctls, or none.
    /// `recorded` is the attachment that `record` names. `interface` is the current interface, or
    /// `None` if this ADD does not change it.
    ///
    /// # Errors
    /// Code 102 if `recorded` is another attachment of this boot.
    fn usable_part(&self, record: &Record, recorded: &Attachment, interface: Option<&Interface>) -> Result<Record> {
        let this = &self.attachment;
        // Two attachments can have the same file name: `a` with `b_c`, and `a_b` with `c`.
        if (&recorded.container_id, &recorded.ifname) != (&this.container_id, &this.ifname) {
            if recorded.namespace.boot_id != this.namespace.boot_id {
                // No namespace of an earlier boot exists any more.
                return Ok(Record::default());
            }
            let (path, other_id) = (self.backup.path().display(), &recorded.container_id);
            let msg = format!("the backup {path} is that of container {other_id}, interface {}", recorded.ifname);
            return Err(Error::new(Code::CONFLICT, msg));
        }
        if recorded.namespace != this.namespace {
            // The container has been started again: the new namespace has its own values.
            return Ok(Record::default());
        }
        match (&recorded.interface, interface) {
            // Either the interface was created again, or a new namespace has the numbers of a
            // deleted one. A sysctl with the written value shows that the namespace is the same.
            (Some(old), Some(current)) if old != current => Ok(keep_sysctls_in_force(record)),
            _ => Ok(record.clone()),
        }
    }

    /// Writes the backup. The undo restores the previous one.
    fn write_backup(&self, record: &Record, rollback: &mut Rollback<'_>) -> Result<()> {
        self.backup.write(&record.encode())?;
        let (backup, previous) = (self.backup.clone(), self.previous_backup.clone());
        rollback.push("restore the previous backup", move || match previous {
            Some(Content::Record(_, bytes)) => backup.write(&bytes),
            // Garbage is not written again: it has no values to restore.
            Some(Content::Garbage(_)) | None => backup.purge().map(drop),
        });
        Ok(())
    }

    /// Writes the sysctls in order. If the kernel returns a different text than was written, the
    /// kernel's text is added to the backup, so that DEL recognizes the value.
    fn write_sysctls(&self, sysctls: &[Found], record: &mut Record, rollback: &mut Rollback<'_>) -> Result<()> {
        let mut is_record_changed = false;
        for found in sysctls {
            // Before the write: of several numbers, the kernel stores those before a wrong one.
            if let Some(original) = found.current.clone() {
                let (netns, path) = (Rc::clone(&self.netns), found.path.clone());
                let undo = move || netns.run(|| sysctl::write_original(&path, &original))?;
                rollback.push(format!("restore sysctl {}", found.path), undo);
            }
            let read_back = found.write()?;
            if read_back.is_some()
                && let Some(saved) = record.sysctls.iter_mut().find(|saved| saved.path == found.path)
            {
                saved.read_back = read_back;
                is_record_changed = true;
            }
        }
        if is_record_changed { self.backup.write(&record.encode()) } else { Ok(()) }
    }
}

/// Returns a record with only the sysctls of `record` that still have the written value.
fn keep_sysctls_in_force(record: &Record) -> Record {
    let is_in_force =
        |saved: &&SavedSysctl| cni_linux::sysctl::read(&saved.path).is_ok_and(|current| saved.is_in_force(&current));
    Record { sysctls: record.sysctls.iter().filter(is_in_force).cloned().collect(), ..Record::default() }
}

/// Adds the sysctls to the record: the values that will be written and, if the record does not have
/// them yet, the original values. Sysctls whose value cannot be read are left out.
fn save_sysctls(record: &mut Record, sysctls: &[Found]) {
    for Found { sysctl, path, current } in sysctls {
        let Some(current) = current else { continue };
        let existing = record.sysctls.iter().position(|saved| saved.path == *path);
        let index = existing.unwrap_or_else(|| {
            record.sysctls.push(SavedSysctl { path: path.clone(), original: current.clone(), ..Default::default() });
            record.sysctls.len() - 1
        });
        let saved = &mut record.sysctls[index];
        make_last(&mut saved.written, sysctl.value.clone());
        // It belongs to an earlier written value. `write_sysctls` sets it for the new one.
        saved.read_back = None;
    }
}

/// Adds the settings of the interface that the configuration changes to the record: the values that
/// will be written and, if the record does not have them yet, the original values.
fn save_link(record: &mut Record, conf: &LinkConf, link: &Link) {
    if let Some(mac) = conf.mac {
        if record.mac.is_empty() {
            record.mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
        }
        make_last(&mut record.written.mac, mac.to_string());
    }
    // No entry of the list turns promiscuous mode off, so its written values are not recorded.
    if conf.promisc {
        record.promisc.get_or_insert(link.promisc);
    }
    if let Some(mtu) = conf.mtu {
        record.mtu.get_or_insert(link.mtu);
        make_last(&mut record.written.mtu, mtu);
    }
    if let Some(allmulti) = conf.allmulti {
        record.allmulti.get_or_insert(link.allmulti);
        make_last(&mut record.written.allmulti, allmulti);
    }
    if let Some(length) = conf.txqlen {
        record.txqlen.get_or_insert(link.txqlen);
        make_last(&mut record.written.txqlen, length);
    }
}

/// Changes the settings of the interface that differ from the configuration. The others are not
/// set, because some drivers refuse even a change to the same value while the interface is up.
fn change_link(netlink: &Netlink, link: &Link, conf: &LinkConf, rollback: &mut Rollback<'_>) -> Result<()> {
    // Pushed before the changes, because a change may have been made although the kernel's answer
    // got lost.
    let (netlink_of_undo, before, conf_of_undo) = (netlink.clone(), link.clone(), *conf);
    let undo = move || put_link_back(&netlink_of_undo, &before, &conf_of_undo);
    rollback.push("put the interface back as it was", undo);
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

/// Restores the settings that [`change_link`] has changed, in reverse order. Continues after an
/// error, and returns all errors.
fn put_link_back(netlink: &Netlink, before: &Link, conf: &LinkConf) -> Result<()> {
    let index = before.index;
    let Some(current) = netlink.find_link_by_index(index)? else { return Ok(()) };
    let mut results = Vec::new();
    if conf.txqlen.is_some() && current.txqlen != before.txqlen {
        results.push(netlink.set_txqlen(index, before.txqlen));
    }
    if conf.allmulti.is_some() && current.allmulti != before.allmulti {
        results.push(netlink.set_allmulti(index, on_or_off(before.allmulti)));
    }
    if conf.mtu.is_some() && current.mtu != before.mtu {
        results.push(netlink.set_mtu(index, before.mtu));
    }
    if conf.promisc && current.promisc != before.promisc {
        results.push(netlink.set_promisc(index, on_or_off(before.promisc)));
    }
    if conf.mac.is_some()
        && current.mac != before.mac
        && let Some(mac) = before.mac
    {
        results.push(netlink.set_mac(index, mac));
    }
    Error::join(results.into_iter().filter_map(Result::err).map(Error::from))
}

/// Creates the permanent neighbours.
fn add_neighbours(
    netlink: &Netlink,
    link: &Link,
    neighbours: Vec<Neighbour>,
    rollback: &mut Rollback<'_>,
) -> Result<()> {
    if neighbours.is_empty() {
        return Ok(());
    }
    let (netlink_of_undo, index, neighbours_of_undo) = (netlink.clone(), link.index, neighbours.clone());
    let undo = move || neighbours::purge(&netlink_of_undo, index, &neighbours_of_undo);
    rollback.push("remove the permanent neighbours", undo);
    for neighbour in neighbours {
        netlink.set_permanent_neighbour(index, neighbour)?;
    }
    Ok(())
}

/// Converts a boolean to the state of a link's flag.
pub(crate) fn on_or_off(on: bool) -> LinkFlag {
    if on { LinkFlag::On } else { LinkFlag::Off }
}

/// Returns prevResult with the configured MAC and MTU in the entry of the call's interface. An
/// entry with the same name and a different namespace describes another interface.
fn update_result(call: &Call<'_>, netns: &Netns, conf: &LinkConf, mut result: AddResult) -> AddResult {
    let is_own_sandbox = |sandbox: &str| {
        if sandbox.is_empty() {
            return false;
        }
        // Another path may lead to the same namespace.
        sandbox == call.sandbox() || Netns::open(Path::new(sandbox)).is_ok_and(|other| other.is_same(netns))
    };
    for interface in result.interfaces.iter_mut().filter(|interface| interface.name == call.ifname) {
        if is_own_sandbox(&interface.sandbox) {
            if let Some(mac) = conf.mac {
                interface.mac = mac.to_string();
            }
            interface.mtu = conf.mtu.or(interface.mtu);
        }
    }
    result
}
