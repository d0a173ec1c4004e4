//! gc: what is valid is decided here, from what can be seen: the remembered attachments whose
//! namespace exists.
//!
//! cnitool knows nothing of a container runtime on the same machine. A network that some runtime
//! uses must not be collected by hand unless all its attachments are named with `--keep`; so
//! nothing is removed without having been printed first, and never everything without `--all`.

use cni::config::ValidAttachments;
use cni::version::Version;
use cni::{AttachmentId, Error};
use libcni::NetworkList;
use libcni::cache::Entry;
use serde_json::{Value, json};

use super::Network;
use crate::Streams;
use crate::report::{Format, REFUSED, write, write_json};
use crate::target::NetnsPresence;

/// The actions of a gc.
struct Plan<'a> {
    network: &'a str,
    judged: Vec<CheckedAttachment>,
    /// The cache entries that cannot be read. Their attachments may be in use, and are not in
    /// `valid`.
    unreadable: Vec<String>,
    valid: ValidAttachments,
    /// Whether the plugins are called too: from 1.1.0 on they remove the other objects.
    asks_plugins: bool,
    /// Neither a dry run nor switched off.
    acts: bool,
}

/// A remembered attachment and what becomes of it.
struct CheckedAttachment {
    entry: Entry,
    keeps: bool,
    why: String,
}

impl Network<'_, '_> {
    pub(super) fn gc(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let list = self.list()?;
        let plan = self.plan(&list)?;
        if plan.acts && plan.removes_everything() && !self.command.all {
            let msg = "nothing of this network would stay valid, so everything of it would be removed";
            let details = "name what is in use with --keep CONTAINER-ID/IFNAME, see what would go with --dry-run, or confirm with --all";
            return Err(Error::new(REFUSED, msg).with_details(details));
        }
        if plan.acts && plan.may_remove_what_is_in_use() && !self.command.all {
            let msg = "it is unknown whose these files are, so what they stand for would be removed";
            let details = "name it with --keep CONTAINER-ID/IFNAME if it is in use, then confirm with --all; 'cnitool del' removes it, and its file";
            return Err(Error::new(REFUSED, msg).with_details(format!("{}\n{details}", plan.unreadable.join("\n"))));
        }
        if list.disable_gc() {
            self.runtime.notes.note("disableGC is set in the network's configuration: nothing is removed");
        }
        if self.command.shared.format() == Format::Text {
            write(streams, &plan.text())?;
        }
        if plan.acts {
            self.runtime.gc(&list, &plan.valid)?;
        }
        match self.command.shared.format() {
            Format::Text => Ok(()),
            Format::Json => write_json(streams, &plan.json()),
        }
    }

    fn plan(&self, list: &NetworkList) -> Result<Plan<'_>, Error> {
        let asks_plugins = list.version()? >= Version::V1_1_0;
        let remembered = self.runtime.stale(list, &ValidAttachments::default())?;
        let unreadable = remembered.problems;
        let judged: Vec<CheckedAttachment> = remembered.entries.into_iter().map(|entry| self.judge(entry)).collect();
        let kept = judged.iter().filter(|judged| judged.keeps).map(|judged| judged.entry.id());
        let kept = kept.map(|id| (id.container_id, id.ifname));
        // A named attachment need not be in the result cache: it may be another runtime's.
        let valid = kept.chain(self.command.keep.iter().cloned()).collect();
        let acts = !self.command.dry_run && !list.disable_gc();
        Ok(Plan { network: &self.command.network, judged, unreadable, valid, asks_plugins, acts })
    }

    fn judge(&self, entry: Entry) -> CheckedAttachment {
        let attachment = &entry.attachment;
        let named = |(id, ifname): &(String, String)| *id == attachment.container_id && *ifname == attachment.ifname;
        let (keeps, why) = if self.command.keep.iter().any(named) {
            (true, "named with --keep".to_owned())
        } else {
            match NetnsPresence::of(&attachment.netns, self.call.machine) {
                NetnsPresence::There => (true, format!("{} exists", attachment.netns)),
                NetnsPresence::Gone(why) => (false, format!("{}: {why}", attachment.netns)),
                // In doubt for the container.
                NetnsPresence::Other(why) => (true, format!("{}: {why}", attachment.netns)),
                NetnsPresence::Unknown(why) => (true, format!("whether its namespace exists is unknown: {why}")),
            }
        };
        CheckedAttachment { entry, keeps, why }
    }
}

impl Plan<'_> {
    fn removes_everything(&self) -> bool {
        self.valid.iter().next().is_none() && (self.asks_plugins || !self.judged.is_empty())
    }

    /// Below 1.1.0 nothing is removed but what is remembered, and understood.
    fn may_remove_what_is_in_use(&self) -> bool {
        self.asks_plugins && !self.unreadable.is_empty()
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for CheckedAttachment { entry, keeps, why } in &self.judged {
            let AttachmentId { container_id, ifname, .. } = entry.id();
            let verb = if *keeps { "keep" } else { "remove" };
            text += &format!("{verb:<6}  {container_id}/{ifname}  ({why})\n");
        }
        for (id, ifname) in self.valid.iter() {
            let is_it = |of: AttachmentId| of.container_id == id && of.ifname == ifname;
            if !self.judged.iter().any(|judged| is_it(judged.entry.id())) {
                text += &format!("keep    {id}/{ifname}  (named with --keep; not one of cnitool's)\n");
            }
        }
        for problem in &self.unreadable {
            text += &format!("unknown {problem}\n");
        }
        if self.asks_plugins {
            let valid = match self.valid.iter().count() {
                1 => "1 attachment".to_owned(),
                count => format!("{count} attachments"),
            };
            text += &format!("The plugins of {} keep what belongs to {valid} and remove the rest.\n", self.network);
        } else {
            text += &format!("The plugins of {} know no GC in its CNI version.\n", self.network);
        }
        if !self.acts {
            text += "Nothing was changed.\n";
        }
        text
    }

    fn json(&self) -> Value {
        let removed =
            self.judged.iter().filter(|judged| !judged.keeps).map(|CheckedAttachment { entry, why, .. }| {
                let AttachmentId { container_id, ifname, .. } = entry.id();
                json!({"containerID": container_id, "ifname": ifname, "netns": entry.attachment.netns, "reason": why})
            });
        let valid = self.valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname}));
        json!({
            "network": self.network,
            "changed": self.acts,
            "removed": removed.collect::<Vec<_>>(),
            "unreadable": self.unreadable,
            "valid": valid.collect::<Vec<_>>(),
        })
    }
}
