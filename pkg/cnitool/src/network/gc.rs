//! gc: what is valid is decided here, from what can be seen: the remembered attachments whose namespace exists.
//!
//! cnitool knows nothing of a container runtime on the same machine. A network that some runtime uses must not be
//! collected by hand unless all its attachments are named with `--keep`; so nothing is removed without having been
//! told first, and never everything without `--all`.

use cni::Error;
use cni::config::ValidAttachments;
use cni::libcni::cache::Entry;
use serde_json::{Value, json};

use super::Network;
use crate::Streams;
use crate::report::{Format, write, write_json};
use crate::target::Presence;

/// A remembered attachment and what becomes of it.
struct Judged {
    entry: Entry,
    keeps: bool,
    why: String,
}

impl Network<'_, '_> {
    pub(super) fn gc(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let list = self.list()?;
        let remembered = self.runtime.stale(&list, &ValidAttachments::default())?;
        let judged: Vec<Judged> = remembered.into_iter().map(|entry| self.judge(entry)).collect();
        let kept = judged.iter().filter(|judged| judged.keeps).map(|Judged { entry, .. }| {
            let attachment = &entry.attachment;
            (attachment.container_id.clone(), attachment.ifname.clone())
        });
        // What is named need not be remembered: it may be another runtime's.
        let valid: ValidAttachments = kept.chain(self.command.keep.iter().cloned()).collect();
        let acts = !self.command.dry_run && !list.disable_gc();

        if acts && valid.iter().next().is_none() && !self.command.all {
            let msg = "nothing of this network would stay valid, so everything of it would be removed";
            let details = "name what is in use with --keep CONTAINER-ID/IFNAME, see what would go with --dry-run, or confirm with --all";
            return Err(Error::config(msg).with_details(details));
        }
        if list.disable_gc() {
            self.runtime.notes.note("disableGC is set in the network's configuration: nothing is removed");
        }
        if self.command.shared.format == Format::Text {
            write(streams, &self.plan(&judged, &valid, acts))?;
        }
        if acts {
            self.runtime.gc(&list, &valid)?;
        }
        match self.command.shared.format {
            Format::Text => Ok(()),
            Format::Json => write_json(streams, &self.plan_json(&judged, &valid, acts)),
        }
    }

    fn judge(&self, entry: Entry) -> Judged {
        let attachment = &entry.attachment;
        let named = |(id, ifname): &(String, String)| *id == attachment.container_id && *ifname == attachment.ifname;
        let (keeps, why) = if self.command.keep.iter().any(named) {
            (true, "named with --keep".to_owned())
        } else {
            match Presence::of(&attachment.netns, self.call.machine) {
                Presence::There => (true, format!("{} exists", attachment.netns)),
                Presence::Gone(why) => (false, format!("{}: {why}", attachment.netns)),
                // In doubt for the container.
                Presence::Unknown(why) => (true, format!("whether its namespace exists is unknown: {why}")),
            }
        };
        Judged { entry, keeps, why }
    }

    fn plan(&self, judged: &[Judged], valid: &ValidAttachments, acts: bool) -> String {
        let mut text = String::new();
        for Judged { entry, keeps, why } in judged {
            let attachment = &entry.attachment;
            let verb = if *keeps { "keep" } else { "remove" };
            text += &format!("{verb:<6}  {}/{}  ({why})\n", attachment.container_id, attachment.ifname);
        }
        for (id, ifname) in valid.iter() {
            let remembered =
                |judged: &Judged| judged.entry.key().container_id == id && judged.entry.key().ifname == ifname;
            if !judged.iter().any(remembered) {
                text += &format!("keep    {id}/{ifname}  (named with --keep; not one of cnitool's)\n");
            }
        }
        let count = valid.iter().count();
        let network = &self.command.network;
        text += &match acts {
            true => format!(
                "The plugins of {network} remove whatever does not belong to these {count} valid attachments.\n"
            ),
            false => {
                format!("Nothing was changed. The plugins of {network} would be told of {count} valid attachments.\n")
            }
        };
        text
    }

    fn plan_json(&self, judged: &[Judged], valid: &ValidAttachments, acts: bool) -> Value {
        let removed = judged.iter().filter(|judged| !judged.keeps).map(|Judged { entry, why, .. }| {
            let attachment = &entry.attachment;
            json!({"containerID": attachment.container_id, "ifname": attachment.ifname,
                   "netns": attachment.netns, "reason": why})
        });
        let valid = valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname}));
        json!({
            "network": self.command.network,
            "changed": acts,
            "removed": removed.collect::<Vec<_>>(),
            "valid": valid.collect::<Vec<_>>(),
        })
    }
}
