//! gc: decides which attachments are valid, and removes everything else of the network.
//!
//! Valid are the attachments that `--keep` names, and those in the result cache whose namespace
//! exists or may exist.
//!
//! cnitool does not know the containers of a runtime on the same machine. So an operator must not
//! run gc for a network that a runtime uses, unless all its attachments are named with `--keep`.
//! Therefore everything is printed before it is removed, and removing everything needs `--all`.

use cni::config::ValidAttachments;
use cni::version::Version;
use cni::{AttachmentId, Error};
use libcni::NetworkList;
use libcni::cache::Entry;
use serde_json::{Value, json};

use super::VerbRun;
use crate::Streams;
use crate::report::{Format, REFUSED, write, write_json};
use crate::target::NetnsPresence;

/// The attachments that a gc keeps and removes.
struct Plan<'a> {
    network: &'a str,
    /// The attachments in the result cache.
    checked: Vec<CheckedAttachment>,
    /// The cache entries that cannot be read. Their attachments may be in use, but are only valid
    /// if `--keep` names them.
    unreadable: Vec<String>,
    /// The valid attachments, of which the plugins' GC keeps everything.
    valid: ValidAttachments,
    /// Whether GC of the plugins is run, which exists since version 1.1.0.
    runs_plugins: bool,
    /// Whether anything is removed: it is not a dry run, and `disableGC` is not set.
    removes: bool,
}

/// An attachment in the result cache, and whether gc keeps it.
struct CheckedAttachment {
    entry: Entry,
    keeps: bool,
    why: String,
}

impl VerbRun<'_, '_> {
    /// Runs `cnitool gc`: prints which attachments are kept and removed, and removes unless it is a
    /// dry run or `disableGC` is set.
    ///
    /// # Errors
    /// - As `configuration`.
    /// - Code 103 if, without `--all`, everything or something that may be in use would be removed.
    /// - Code 5 if the result cache cannot be read.
    /// - The errors of the plugins' DEL and GC, as one error.
    pub(super) fn gc(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let list = self.configuration()?;
        let plan = self.plan(&list)?;
        if plan.removes && plan.removes_everything() && !self.command.all {
            let msg =
                "no attachment of this network is known to be in use, so everything of the network would be removed";
            let details = "name attachments in use with --keep CONTAINER-ID/IFNAME, list what would be removed with --dry-run, or confirm with --all";
            return Err(Error::new(REFUSED, msg).with_details(details));
        }
        if plan.removes && plan.removes_unreadable() && !self.command.all {
            let msg = "these files of the result cache cannot be read, so their attachments would be removed";
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
        if plan.removes {
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
    /// Code 5 if the result cache cannot be read.
    fn plan(&self, list: &NetworkList) -> Result<Plan<'_>, Error> {
        let runs_plugins = list.version()? >= Version::V1_1_0;
        // If no attachment is valid, all entries of the network are stale: so this returns all.
        let cached = self.runtime.stale(list, &ValidAttachments::default())?;
        let unreadable = cached.problems;
        let checked: Vec<CheckedAttachment> = cached.entries.into_iter().map(|entry| self.check_entry(entry)).collect();
        let kept = checked.iter().filter(|one| one.keeps).map(|one| one.entry.id());
        let kept = kept.map(|id| (id.container_id, id.ifname));
        // An attachment named with --keep need not be in this result cache.
        let valid = kept.chain(self.command.keep.iter().cloned()).collect();
        let removes = !self.command.dry_run && !list.disable_gc();
        Ok(Plan { network: &self.command.network, checked, unreadable, valid, runs_plugins, removes })
    }

    /// Decides whether gc keeps the attachment of a cache entry.
    fn check_entry(&self, entry: Entry) -> CheckedAttachment {
        let attachment = &entry.attachment;
        let is_named = |(id, ifname): &(String, String)| *id == attachment.container_id && *ifname == attachment.ifname;
        let (keeps, why) = if self.command.keep.iter().any(is_named) {
            (true, "named with --keep".to_owned())
        } else {
            match NetnsPresence::at(&attachment.netns, self.call.machine) {
                NetnsPresence::Exists => (true, format!("{} exists", attachment.netns)),
                NetnsPresence::Gone(why) => (false, format!("{}: {why}", attachment.netns)),
                // If it is not certain that the namespace is gone, the attachment is kept.
                NetnsPresence::OtherFile(why) => (true, format!("{}: {why}", attachment.netns)),
                NetnsPresence::Unknown(why) => (true, format!("whether its namespace exists is unknown: {why}")),
            }
        };
        CheckedAttachment { entry, keeps, why }
    }
}

impl Plan<'_> {
    /// Whether no attachment is kept, and there may be something to remove.
    fn removes_everything(&self) -> bool {
        self.valid.iter().next().is_none() && (self.runs_plugins || !self.checked.is_empty())
    }

    /// Whether attachments whose cache entries cannot be read would be removed, although they may
    /// be in use. Only GC of the plugins removes them; it does not exist before version 1.1.0.
    fn removes_unreadable(&self) -> bool {
        self.runs_plugins && !self.unreadable.is_empty()
    }

    /// Returns the report for people.
    fn text(&self) -> String {
        let mut text = String::new();
        for CheckedAttachment { entry, keeps, why } in &self.checked {
            let AttachmentId { container_id, ifname, .. } = entry.id();
            let verb = if *keeps { "keep" } else { "remove" };
            text += &format!("{verb:<6}  {container_id}/{ifname}  ({why})\n");
        }
        for (id, ifname) in self.valid.iter() {
            let is_same = |attachment: AttachmentId| attachment.container_id == id && attachment.ifname == ifname;
            if !self.checked.iter().any(|one| is_same(one.entry.id())) {
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
        if !self.removes {
            text += "Nothing was changed.\n";
        }
        text
    }

    /// Returns the report for `--json`.
    fn json(&self) -> Value {
        let removed = self.checked.iter().filter(|one| !one.keeps).map(|CheckedAttachment { entry, why, .. }| {
            let AttachmentId { container_id, ifname, .. } = entry.id();
            json!({"containerID": container_id, "ifname": ifname, "netns": entry.attachment.netns, "reason": why})
        });
        let valid = self.valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname}));
        json!({
            "network": self.network,
            "changed": self.removes,
            "removed": removed.collect::<Vec<_>>(),
            "unreadable": self.unreadable,
            "valid": valid.collect::<Vec<_>>(),
        })
    }
}
