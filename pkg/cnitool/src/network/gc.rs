//! gc: decides which attachments are valid, and removes everything else of the network.
//!
//! An attachment is valid if `--keep` names it, or if it is in the result cache and its namespace
//! exists or may exist.
//!
//! cnitool does not know the attachments of a runtime with another result cache, so gc removes them
//! unless `--keep` names them. Therefore, removing everything of a network needs `--all`.

use cni::config::ValidAttachments;
use cni::version::Version;
use cni::{AttachmentId, Error};
use libcni::NetworkList;
use libcni::cache::Entry;
use serde_json::{Value, json};

use super::VerbRun;
use crate::call::{Format, Streams};
use crate::node::attachments::Liveness;
use crate::report::{REFUSED, write, write_json};

/// The decisions of one gc.
struct Plan<'a> {
    network: &'a str,
    /// The attachments in the result cache.
    checked: Vec<CheckedAttachment>,
    /// The errors of the cache entries that cannot be read. Their attachments may be in use, but
    /// are only valid if `--keep` names them.
    unreadable: Vec<String>,
    /// The valid attachments, which are passed to the plugins' GC.
    valid: ValidAttachments,
    /// Whether the plugins' GC is run, which exists since CNI version 1.1.0.
    runs_plugins: bool,
    /// Whether nothing is removed, because of `--dry-run` or `disableGC`.
    only_reports: bool,
}

/// An attachment in the result cache, and whether gc keeps it.
struct CheckedAttachment {
    entry: Entry,
    is_kept: bool,
    why: String,
}

impl VerbRun<'_, '_> {
    /// Runs `cnitool gc`: prints which attachments are kept and removed, and removes the latter
    /// unless `--dry-run` is given or `disableGC` is set.
    ///
    /// # Errors
    /// - As [`configuration`](VerbRun::configuration).
    /// - Code 1 if the network's CNI version is not supported.
    /// - Code 103 without `--all` if [`Plan::would_remove_everything`] or
    ///   [`Plan::would_remove_unreadable`] is true, unless gc only reports.
    /// - Code 5 if the result cache cannot be read or stdout cannot be written.
    /// - The errors of the plugins' DEL and GC, as one error.
    pub(super) fn gc(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let list = self.configuration()?;
        let plan = self.plan(&list)?;
        let needs_consent = !plan.only_reports && !self.command.all;
        if needs_consent && plan.would_remove_everything() {
            let msg =
                "no attachment of this network is known to be in use, so everything of the network would be removed";
            let details = "name attachments in use with --keep CONTAINER-ID/IFNAME, list what would be removed with --dry-run, or confirm with --all";
            return Err(Error::new(REFUSED, msg).with_details(details));
        }
        if needs_consent && plan.would_remove_unreadable() {
            let msg = "these files of the result cache cannot be read, so their attachments would be removed unless --keep names them";
            let details = "name those in use with --keep CONTAINER-ID/IFNAME and confirm with --all; 'cnitool del' removes an attachment with its file";
            return Err(Error::new(REFUSED, msg).with_details(format!("{}\n{details}", plan.unreadable.join("\n"))));
        }
        if list.disable_gc() {
            self.runtime.notes.note("disableGC is set in the network's configuration: nothing is removed");
        }
        // The text is printed before anything is removed, so that it is complete even if the
        // removal fails.
        if self.command.shared.format() == Format::Text {
            write(streams, &plan.text())?;
        }
        if !plan.only_reports {
            self.runtime.gc(&list, &plan.valid)?;
        }
        match self.command.shared.format() {
            Format::Text => Ok(()),
            Format::Json => write_json(streams, &plan.json()),
        }
    }

    /// Decides which attachments gc keeps and removes.
    ///
    /// # Errors
    /// - Code 1 if the network's CNI version is not supported.
    /// - Code 5 if the result cache cannot be read.
    fn plan(&self, list: &NetworkList) -> Result<Plan<'_>, Error> {
        let runs_plugins = list.version()? >= Version::V1_1_0;
        // With no valid attachments, `stale` returns all entries of the network.
        let cached = self.runtime.stale(list, &ValidAttachments::default())?;
        let unreadable = cached.problems;
        let checked: Vec<CheckedAttachment> = cached.entries.into_iter().map(|entry| self.check_entry(entry)).collect();
        let kept_ids = checked.iter().filter(|attachment| attachment.is_kept).map(|kept| kept.entry.id());
        let kept_pairs = kept_ids.map(|id| (id.container_id, id.ifname));
        // An attachment named with --keep need not be in the result cache.
        let valid = kept_pairs.chain(self.command.keep.iter().cloned()).collect();
        let only_reports = self.command.dry_run || list.disable_gc();
        Ok(Plan { network: &self.command.network, checked, unreadable, valid, runs_plugins, only_reports })
    }

    /// Decides whether gc keeps the attachment of a cache entry.
    fn check_entry(&self, entry: Entry) -> CheckedAttachment {
        let attachment = &entry.attachment;
        let is_named = |(id, ifname): &(String, String)| *id == attachment.container_id && *ifname == attachment.ifname;
        let (is_kept, why) = if self.command.keep.iter().any(is_named) {
            (true, "named with --keep".to_owned())
        } else {
            let liveness = Liveness::of(&entry, self.call.machine);
            (!matches!(liveness, Liveness::ContainerGone(_)), liveness.why().to_owned())
        };
        CheckedAttachment { entry, is_kept, why }
    }
}

impl Plan<'_> {
    /// Whether no attachment is valid, and there may be something to remove.
    fn would_remove_everything(&self) -> bool {
        self.valid.iter().next().is_none() && (self.runs_plugins || !self.checked.is_empty())
    }

    /// Whether the plugins' GC would remove attachments with an unreadable cache entry, which may
    /// be in use, unless `--keep` names them. The name of a cache file does not always identify its
    /// attachment, so `--keep` alone does not suffice.
    fn would_remove_unreadable(&self) -> bool {
        self.runs_plugins && !self.unreadable.is_empty()
    }

    /// Returns the report for people.
    fn text(&self) -> String {
        let mut text = String::new();
        for CheckedAttachment { entry, is_kept, why } in &self.checked {
            let AttachmentId { container_id, ifname, .. } = entry.id();
            let verb = if *is_kept { "keep" } else { "remove" };
            text += &format!("{verb:<6}  {container_id}/{ifname}  ({why})\n");
        }
        for (id, ifname) in self.valid.iter() {
            let is_same = |attachment: AttachmentId| attachment.container_id == id && attachment.ifname == ifname;
            if !self.checked.iter().any(|checked| is_same(checked.entry.id())) {
                text += &format!("keep    {id}/{ifname}  (named with --keep; not in the result cache)\n");
            }
        }
        for problem in &self.unreadable {
            text += &format!("unknown {problem}\n");
        }
        if self.runs_plugins {
            let valid = match self.valid.iter().count() {
                1 => "1 attachment".to_owned(),
                count => format!("{count} attachments"),
            };
            text += &format!("The plugins of {} keep everything of {valid} and remove the rest.\n", self.network);
        } else {
            text += &format!("The plugins of {} are not called: its CNI version has no GC.\n", self.network);
        }
        if self.only_reports {
            text += "Nothing was changed.\n";
        }
        text
    }

    /// Returns the report for `--json`.
    fn json(&self) -> Value {
        let removed = self.checked.iter().filter(|checked| !checked.is_kept);
        let removed = removed.map(|CheckedAttachment { entry, why, .. }| {
            let AttachmentId { container_id, ifname, .. } = entry.id();
            json!({"containerID": container_id, "ifname": ifname, "netns": entry.attachment.netns, "reason": why})
        });
        let valid = self.valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname}));
        // `changed` is true unless gc only reports, even if there was nothing to remove.
        json!({
            "network": self.network,
            "changed": !self.only_reports,
            "removed": removed.collect::<Vec<_>>(),
            "unreadable": self.unreadable,
            "valid": valid.collect::<Vec<_>>(),
        })
    }
}
