//! gc of all networks, or with a list of the valid attachments: removes attachments whose container
//! does not exist any more, each by its own DEL.
//!
//! It runs beside a runtime, whose ADDs go on meanwhile. So it never removes an attachment that
//! appeared after it began, and runs the plugins' GC, which would remove that too, only on request.
//! The attachments are read before the list of the valid ones: an attachment of the list that is
//! missing among those read is kept anyway, and an attachment that is read and missing in the list
//! is older than the list.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use cni::{AttachmentId, Code, Error};
use cni_linux::Link;
use libcni::{Attachment, NetworkList, Runtime};

use super::VerbRun;
use super::gc::{Decision, Plan};
use super::valid_list::ValidList;
use crate::call::{Streams, uptime};
use crate::node::attachments::{CachedAttachment, Liveness, OVER};
use crate::node::ipam::NetworkPool;
use crate::node::objects::{Object, RESERVATION};
use crate::node::snapshot::Snapshot;
use crate::report::did_you_mean;
use crate::target::NetnsPresence;

/// The default of `--min-age`, in seconds. A runtime lists a pod only after its containers can be
/// started, and kubelet waits for that for 240 seconds.
const DEFAULT_MIN_AGE: u64 = 600;

/// What exists of one attachment.
#[derive(Default)]
pub(super) struct Traces<'a> {
    pub(super) cached: Vec<&'a CachedAttachment>,
    /// The latest time at which a cache entry of the attachment was written or, without one, a
    /// reservation.
    since: Option<SystemTime>,
    /// The youngest link on the host that has its alias, after a time at which that link existed.
    link: Option<(SystemTime, &'a str)>,
}

/// The evidence that decides about attachments.
pub(super) struct Evidence<'a> {
    /// What exists of each attachment.
    pub(super) traces: BTreeMap<AttachmentId, Traces<'a>>,
    /// The attachments that a runtime has listed.
    pub(super) list: Option<ValidList>,
    /// Attachments since this time are too young.
    pub(super) young_since: SystemTime,
    /// The lines about unreadable cache files.
    pub(super) unreadable: Vec<String>,
}

impl Traces<'_> {
    /// Returns the folder of the attachment's reservations if it does not exist, for example
    /// because it is not mounted in the container of this process: DEL would release no address.
    /// Returns `None` if the folder may have disappeared because the node was restarted.
    fn missing_folder(&self) -> Option<PathBuf> {
        if self.since < SystemTime::now().checked_sub(uptime()?) {
            return None;
        }
        let folder_of = |CachedAttachment { entry, result, .. }: &&CachedAttachment| {
            result.as_ref().ok().filter(|result| !result.ips.is_empty())?;
            Some(NetworkPool::of(&entry.list().ok()?, Some(&entry.attachment.capability_args))?.folder())
        };
        self.cached.iter().filter_map(folder_of).find(|folder| matches!(folder.try_exists(), Ok(false)))
    }
}

impl VerbRun<'_> {
    /// Runs `cnitool gc` without a network or with `--valid-from`: prints which attachments are
    /// kept and removed, and removes the latter unless `--dry-run` is given.
    ///
    /// # Errors
    /// - As [`Snapshot::take`] and [`ValidList::read`].
    /// - Code 103 if the list of valid attachments names none, without `--all` or `--dry-run`.
    /// - Code 7 if the network in the arguments is neither configured nor in a result cache.
    /// - Code 5 if stdout cannot be written.
    /// - The errors of the plugins' DEL and GC, as one error, with code 5 for a signal to end.
    pub(super) fn sweep(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let options = &self.command.gc;
        let began = SystemTime::now();
        let snapshot = Snapshot::take(self.context)?;
        let list = ValidList::read(&options.valid_from, began, self.runtime.timeout, self.context.call)?;
        if list.as_ref().is_some_and(ValidList::is_empty) && !self.command.gc.all && !self.command.gc.dry_run {
            let msg = "the list of valid attachments names none, so everything would be removed";
            return Err(Error::new(Code::REFUSED, msg).with_details("confirm with --all if this node has no pods"));
        }
        let read_at = list.as_ref().map_or(began, |list| list.read_at);
        let min_age = Duration::from_secs(options.min_age.unwrap_or(DEFAULT_MIN_AGE));
        let young_since = read_at.checked_sub(min_age).unwrap_or(SystemTime::UNIX_EPOCH);
        let networks = self.find_networks(&snapshot)?;
        let (traces, unreadable) = (self.find_traces(&snapshot, &networks), snapshot.attachments.unreadable.clone());
        let evidence = Evidence { traces, list, young_since, unreadable };
        let plans: Vec<Plan> = networks.iter().map(|(name, lists)| self.plan_network(name, lists, &evidence)).collect();
        self.print_around(&plans, streams, || {
            let mut errors = Vec::new();
            for (plan, lists) in plans.iter().zip(networks.values()).filter(|(plan, _)| plan.changed) {
                for Decision { container_id, ifname, .. } in &plan.removed {
                    if self.context.call.machine.terminated() {
                        errors.push(Error::new(Code::IO, "interrupted by a signal; the next gc removes the rest"));
                        return Error::join(errors);
                    }
                    let id = AttachmentId::new(&plan.network, container_id, ifname);
                    errors.extend(self.remove(&id, lists, &evidence));
                }
                if plan.plugins_gc_skipped.is_none() {
                    errors.extend(lists.iter().filter_map(|list| self.runtime.gc_plugins(list, &plan.valid()).err()));
                }
            }
            Error::join(errors)
        })
    }

    /// Returns the network in the arguments, or all networks that are configured or in a result
    /// cache, by name. Each has its configurations: that of the folder, and each other one with
    /// which an attachment in a result cache was added.
    ///
    /// # Errors
    /// Code 7 if the network in the arguments does not exist.
    fn find_networks(&self, snapshot: &Snapshot) -> Result<BTreeMap<String, Vec<NetworkList>>, Error> {
        let mut networks: BTreeMap<String, Vec<NetworkList>> = BTreeMap::new();
        let recorded = snapshot.attachments.cached.iter().filter_map(|cached| cached.entry.list().ok());
        for list in snapshot.networks.iter().cloned().chain(recorded) {
            let lists = networks.entry(list.name().to_owned()).or_default();
            if !lists.iter().any(|known| known.raw() == list.raw()) {
                lists.push(list);
            }
        }
        if !self.command.network.is_empty() {
            let name = &self.command.network;
            let hint = did_you_mean(name, networks.keys().map(String::as_str));
            let msg = format!("network {name:?} is neither configured nor in a result cache{hint}");
            networks.retain(|other, _| other == name);
            if networks.is_empty() {
                return Err(Error::config(msg));
            }
        }
        Ok(networks)
    }

    /// Returns what exists of the attachments to these networks.
    fn find_traces<'a>(
        &self,
        snapshot: &'a Snapshot,
        networks: &BTreeMap<String, Vec<NetworkList>>,
    ) -> BTreeMap<AttachmentId, Traces<'a>> {
        let mut all: BTreeMap<AttachmentId, Traces<'a>> = BTreeMap::new();
        let is_examined = |id: &AttachmentId| networks.contains_key(&id.network);
        let caches = self.context.caches();
        for cached in snapshot.attachments.cached.iter().filter(|cached| is_examined(&cached.id)) {
            let written = caches.iter().filter_map(|cache| cache.written_at(&cached.id)).max();
            let traces = all.entry(cached.id.clone()).or_default();
            traces.cached.push(cached);
            traces.since = traces.since.max(written);
        }
        for (id, link) in snapshot.attachments.aliased_links.iter().filter(|(id, _)| is_examined(id)) {
            let traces = all.entry(id.clone()).or_default();
            traces.link = traces.link.max(Some((existed_at(link), link.name.as_str())));
        }
        for Object { kind, owner, since, .. } in &snapshot.objects {
            // An object that does not name the interface may belong to any attachment of its
            // container, so it says nothing if one is known. Of the others, only a reservation of a
            // known attachment says something: its age.
            let names_interface = owner.names()[2].is_some();
            if (*kind != RESERVATION || !names_interface) && snapshot.attachments.has_owner(owner) {
                continue;
            }
            let Some(id) = owner.attachment().filter(is_examined) else { continue };
            let traces = all.entry(id).or_default();
            if traces.cached.is_empty() {
                // The times of reservations are in whole seconds.
                let since = since.and_then(|since| since.checked_add(Duration::from_secs(1)));
                traces.since = traces.since.max(since);
            }
        }
        all
    }

    /// Decides about the attachments of one network.
    pub(super) fn plan_network(&self, name: &str, lists: &[NetworkList], evidence: &Evidence<'_>) -> Plan {
        let (mut kept, mut removed) = (Vec::new(), Vec::new());
        for (id, traces) in evidence.traces.iter().filter(|(id, _)| id.network == name) {
            let (mut state, mut reason) = self.decide(id, traces, evidence);
            if state == OVER
                && let Some(folder) = traces.missing_folder()
            {
                state = "unknown";
                let folder = folder.display();
                reason += &format!(", but {folder} with its reservations does not exist: mount or create the folder");
            }
            let netns = traces.cached.first().map(|cached| cached.entry.attachment.netns.clone()).unwrap_or_default();
            let (container_id, ifname) = (id.container_id.clone(), id.ifname.clone());
            let decisions = if state == OVER { &mut removed } else { &mut kept };
            decisions.push(Decision { container_id, ifname, netns, state, reason });
        }
        let disables_gc = lists.iter().any(NetworkList::disable_gc);
        // The files of another network can have this prefix too.
        let prefix = format!("/{name}-");
        let unreadable: Vec<String> =
            evidence.unreadable.iter().filter(|line| line.contains(&prefix)).cloned().collect();
        let why_skipped = match () {
            () if disables_gc => Some("disableGC is set in its configuration"),
            () if !self.command.gc.plugins => Some("it is only run with --plugins"),
            () if !self.command.gc.all && (kept.is_empty() || !unreadable.is_empty()) => {
                Some("no attachment is known to be in use, or a cache entry cannot be read; --all runs it")
            }
            () => None,
        };
        let (changed, plugins_gc_skipped) = (!self.command.gc.dry_run && !disables_gc, why_skipped.map(str::to_owned));
        Plan { network: name.to_owned(), changed, plugins_gc_skipped, removed, kept, unreadable }
    }

    /// Returns the state of an attachment, which is removed if that is [`OVER`], and the reason.
    fn decide(&self, id: &AttachmentId, traces: &Traces<'_>, evidence: &Evidence<'_>) -> (&'static str, String) {
        let is_id = |(container, ifname): &(String, String)| *container == id.container_id && *ifname == id.ifname;
        if self.command.gc.keep.iter().any(is_id) {
            let absence = if traces.cached.is_empty() { "; not in the result cache" } else { "" };
            return ("named", format!("named with --keep{absence}"));
        }
        if id.container_id.starts_with('#') {
            return ("unknown", "only the hash of its container ID is known".to_owned());
        }
        let liveness = traces.cached.iter().map(|cached| cached.liveness());
        // `false` is less than `true`: the first one that is in use decides.
        let liveness = liveness.min_by_key(|liveness| !matches!(liveness, Liveness::InUse(_)));
        let what = match (&evidence.list, liveness) {
            (Some(list), _) if list.names(&id.container_id, &id.ifname) => {
                return ("listed", "the list of valid attachments names it".to_owned());
            }
            (Some(_), _) => "the list of valid attachments does not name it",
            (None, Some(liveness)) => return (liveness.word(), liveness.why().to_owned()),
            (None, None) if traces.link.is_some() => {
                let link = traces.link.map(|(_, name)| name).unwrap_or_default();
                return ("in use", format!("link {link} on the host has the alias of this attachment"));
            }
            (None, None) if evidence.unreadable.iter().any(|line| line.contains(&id.container_id)) => {
                return ("unknown", "its file in a result cache cannot be read".to_owned());
            }
            (None, None) if !self.command.gc.unknown => {
                return ("unknown", "no result cache has it; --unknown removes it".to_owned());
            }
            (None, None) => "no result cache has it",
        };
        match traces.since {
            Some(since) if evidence.is_young(since) => ("young", format!("{what}, but it is too young")),
            Some(_) => (OVER, what.to_owned()),
            None if self.command.gc.unknown => (OVER, what.to_owned()),
            None if traces.link.is_some_and(|(time, _)| !evidence.is_young(time)) => (OVER, what.to_owned()),
            None => ("unknown", format!("{what}, but its age is not known; --unknown removes it")),
        }
    }

    /// Runs DEL for an attachment: in each result cache that has it, with the configuration of its
    /// ADD, or otherwise with each configuration of its network. Returns the errors.
    fn remove(&self, id: &AttachmentId, lists: &[NetworkList], evidence: &Evidence<'_>) -> Vec<Error> {
        let mut outcomes: Vec<Result<(), Error>> = Vec::new();
        for cache in self.context.caches() {
            let Some(found) = cache.find(id).transpose() else { continue };
            outcomes.push(found.and_then(|entry| {
                // Another ADD may have created it again since the decision.
                let is_over = match evidence.list {
                    Some(_) => cache.written_at(id).is_some_and(|at| !evidence.is_young(at)),
                    None => NetnsPresence::at(&entry.attachment.netns, self.context.call.machine).is_gone(),
                };
                let recorded = entry.list().ok().filter(|list| list.name() == id.network);
                let runtime = Runtime { cache, ..self.runtime.clone() };
                match recorded.as_ref().or(lists.first()) {
                    Some(list) if is_over => runtime.del_stale(list, &entry.attachment),
                    _ => Ok(()),
                }
            }));
        }
        if outcomes.is_empty() {
            let (container_id, ifname) = (id.container_id.clone(), id.ifname.clone());
            let attachment = Attachment { container_id, ifname, ..Attachment::default() };
            outcomes.extend(lists.iter().map(|list| self.runtime.del_stale(list, &attachment)));
        }
        outcomes.into_iter().filter_map(Result::err).collect()
    }
}

/// Returns a time at which a link of the host existed already: the one at which a process first
/// looked up the folder of the link's sysctls. bridge and ptp write a sysctl of a veth as soon as
/// they have created it. The kernel does not record when a link was created. If it has forgotten
/// the time of the look-up, too, this call is the first one. A container cannot change the time.
fn existed_at(link: &Link) -> SystemTime {
    let first_use = |family| fs::metadata(format!("/proc/sys/net/{family}/conf/{}", link.name)).ok()?.modified().ok();
    ["ipv4", "ipv6"].into_iter().filter_map(first_use).min().unwrap_or_else(SystemTime::now)
}

impl Evidence<'_> {
    /// Whether something that was written at this time is too young to be removed.
    fn is_young(&self, since: SystemTime) -> bool {
        since >= self.young_since
    }
}
