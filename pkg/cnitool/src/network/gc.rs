//! gc of one network: decides which attachments are valid, and removes everything else of the
//! network.
//!
//! An attachment is valid if `--keep` names it, or if it is in a result cache and its namespace
//! exists or may exist.
//!
//! cnitool does not know the attachments of a runtime with another result cache, so gc removes them
//! unless `--keep` names them. Therefore, removing everything of a network needs `--all`.

use std::collections::BTreeMap;
use std::time::SystemTime;

use cni::config::ValidAttachments;
use cni::{AttachmentId, Code, Error};
use libcni::{NetworkList, Runtime};
use serde::Serialize;
use serde_json::json;

use super::VerbRun;
use super::sweep::{Evidence, Traces};
use crate::call::{Format, Streams};
use crate::node::attachments::{CachedAttachment, read_caches};
use crate::report::{Report, counted};

/// The decisions of gc about one network.
#[derive(Serialize)]
pub(super) struct Plan {
    pub(super) network: String,
    /// False if nothing is removed, because of `--dry-run` or `disableGC`. Otherwise true, even if
    /// there was nothing to remove.
    pub(super) changed: bool,
    /// Why the plugins' GC is not run, if it is not.
    #[serde(rename = "pluginsGCSkipped")]
    pub(super) plugins_gc_skipped: Option<String>,
    pub(super) removed: Vec<Decision>,
    pub(super) kept: Vec<Decision>,
    /// The errors of the cache entries that cannot be read. Their attachments may be in use, but
    /// are only valid if `--keep` names them.
    pub(super) unreadable: Vec<String>,
}

/// An attachment, and why gc keeps or removes it.
#[derive(Serialize)]
pub(super) struct Decision {
    #[serde(rename = "containerID")]
    pub(super) container_id: String,
    pub(super) ifname: String,
    /// The path of the namespace in the result cache; empty if it is not known.
    pub(super) netns: String,
    /// The word for the reason.
    pub(super) state: &'static str,
    /// The reason for people.
    pub(super) reason: String,
}

impl VerbRun<'_> {
    /// Runs `cnitool gc NETWORK`: prints which attachments are kept and removed, and removes the
    /// latter unless `--dry-run` is given or `disableGC` is set.
    ///
    /// # Errors
    /// - As [`configuration`](VerbRun::configuration).
    /// - Code 1 if the network's CNI version is not supported.
    /// - Code 103 without `--all` if no attachment is valid or a cache entry cannot be read, unless
    ///   gc only reports.
    /// - Code 5 if the result cache cannot be read or stdout cannot be written.
    /// - The errors of the plugins' DEL and GC, as one error.
    pub(super) fn gc(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let list = self.configuration()?;
        list.version()?;
        let plan = self.plan(&list)?;
        let needs_consent = plan.changed && !self.command.gc.all;
        if needs_consent && plan.kept.is_empty() {
            let msg =
                "no attachment of this network is known to be in use, so everything of the network would be removed";
            let details = "name attachments in use with --keep CONTAINER-ID/IFNAME, list what would be removed with --dry-run, or confirm with --all";
            return Err(Error::new(Code::REFUSED, msg).with_details(details));
        }
        // The plugins' GC would remove the attachments of these entries. The name of a cache file
        // does not always identify its attachment, so `--keep` alone does not suffice.
        if needs_consent && !plan.unreadable.is_empty() {
            let msg = "these files of the result cache cannot be read, so their attachments would be removed unless --keep names them";
            let details = "name those in use with --keep CONTAINER-ID/IFNAME and confirm with --all; 'cnitool del' removes an attachment with its file";
            return Err(
                Error::new(Code::REFUSED, msg).with_details(format!("{}\n{details}", plan.unreadable.join("\n")))
            );
        }
        if list.disable_gc() {
            self.runtime.notes.note("disableGC is set in the network's configuration: nothing is removed");
        }
        self.print_around(std::slice::from_ref(&plan), streams, || {
            if !plan.changed {
                return Ok(());
            }
            let (valid, mut errors) = (plan.valid(), Vec::new());
            // The first cache is that of `runtime`, whose gc follows.
            for cache in self.context.caches().split_off(1) {
                let runtime = Runtime { cache, ..self.runtime.clone() };
                let stale = runtime.stale(&list, &valid)?.entries;
                errors.extend(stale.iter().filter_map(|entry| runtime.del_stale(&list, &entry.attachment).err()));
            }
            errors.extend(self.runtime.gc(&list, &valid).err());
            Error::join(errors)
        })
    }

    /// Prints the decisions and carries them out. The text is printed before anything is removed,
    /// so that it is complete even if the removal fails. The JSON document reports what was
    /// removed.
    ///
    /// # Errors
    /// Code 5 if stdout cannot be written; the error of `remove`.
    pub(super) fn print_around(
        &self,
        plans: &[Plan],
        streams: &mut Streams<'_>,
        remove: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (format, mut report) = (self.context.format(), Report::new(streams));
        plans.iter().for_each(|plan| plan.add_to(&mut report));
        if plans.is_empty() {
            report.line("No network is configured or in a result cache.");
        }
        let mut write = || report.write(streams, format, &json!({"networks": plans}));
        match format {
            Format::Text => write().and_then(|()| remove()),
            Format::Json => remove().and_then(|()| write()),
        }
    }

    /// Decides which attachments gc keeps and removes: those in the result caches and those that
    /// `--keep` names.
    ///
    /// # Errors
    /// Code 5 if the result cache cannot be read.
    fn plan(&self, list: &NetworkList) -> Result<Plan, Error> {
        let cached = read_caches(self.context, Some(list.name()))?;
        let read = |entry| CachedAttachment::new(entry, self.context.call.machine);
        let attachments: Vec<CachedAttachment> = cached.entries.into_iter().map(read).collect();
        let mut traces: BTreeMap<AttachmentId, Traces<'_>> = BTreeMap::new();
        for one in &attachments {
            traces.entry(one.id.clone()).or_default().cached.push(one);
        }
        for (container, ifname) in &self.command.gc.keep {
            traces.entry(AttachmentId::new(list.name(), container, ifname)).or_default();
        }
        let (young_since, unreadable) = (SystemTime::UNIX_EPOCH, cached.problems);
        let evidence = Evidence { traces, list: None, young_since, unreadable };
        let plan = self.plan_network(list.name(), std::slice::from_ref(list), &evidence);
        Ok(Plan { plugins_gc_skipped: None, unreadable: evidence.unreadable, ..plan })
    }
}

impl Plan {
    /// Returns the valid attachments, which are passed to the plugins' GC.
    pub(super) fn valid(&self) -> ValidAttachments {
        self.kept.iter().map(|decision| (decision.container_id.clone(), decision.ifname.clone())).collect()
    }

    /// Adds the decisions for people.
    fn add_to(&self, report: &mut Report) {
        report.line(format_args!("{}:", self.network));
        for (verb, decisions) in [("keep", &self.kept), ("remove", &self.removed)] {
            for Decision { container_id, ifname, reason, .. } in decisions {
                report.line(format_args!("{verb:<6}  {container_id}/{ifname}  ({reason})"));
            }
        }
        self.unreadable.iter().for_each(|problem| report.line(format_args!("unknown {problem}")));
        report.line(match &self.plugins_gc_skipped {
            None => {
                let valid = counted(self.kept.len(), "attachment");
                format!("The plugins of {} keep everything of {valid} and remove the rest.", self.network)
            }
            Some(why) => format!("The GC of the plugins of {} is not run: {why}.", self.network),
        });
        if !self.changed {
            report.line("Nothing was changed.");
        }
    }
}
