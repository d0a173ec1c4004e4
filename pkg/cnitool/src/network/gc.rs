//! gc of one network: decides which attachments are valid, and removes everything else of the
//! network.
//!
//! An attachment is valid if `--keep` names it, or if it is in the result cache and its namespace
//! exists or may exist.
//!
//! cnitool does not know the attachments of a runtime with another result cache, so gc removes them
//! unless `--keep` names them. Therefore, removing everything of a network needs `--all`.

use cni::config::ValidAttachments;
use cni::{AttachmentId, Error};
use libcni::NetworkList;
use libcni::cache::Entry;
use serde_json::{Value, json};

use super::VerbRun;
use crate::call::{Format, Streams};
use crate::node::attachments::Liveness;
use crate::report::{REFUSED, write, write_json};

/// The decisions of gc about one network.
pub(super) struct Plan {
    pub(super) network: String,
    pub(super) decisions: Vec<Decision>,
    /// The errors of the cache entries that cannot be read. Their attachments may be in use, but
    /// are only valid if `--keep` names them.
    pub(super) unreadable: Vec<String>,
    /// Whether the plugins' GC is run, and otherwise why it is not.
    pub(super) plugins_gc: Result<(), String>,
    /// Whether nothing is removed, because of `--dry-run` or `disableGC`.
    pub(super) only_reports: bool,
}

/// An attachment, and whether gc keeps it.
pub(super) struct Decision {
    pub(super) id: AttachmentId,
    /// The path of the namespace in the result cache; empty if it is not known.
    pub(super) netns: String,
    pub(super) is_kept: bool,
    /// The word for the reason in `--json`.
    pub(super) state: &'static str,
    /// The reason for people.
    pub(super) why: String,
}

impl VerbRun<'_, '_> {
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
        let needs_consent = !plan.only_reports && !self.command.all;
        if needs_consent && plan.keeps_nothing() {
            let msg =
                "no attachment of this network is known to be in use, so everything of the network would be removed";
            let details = "name attachments in use with --keep CONTAINER-ID/IFNAME, list what would be removed with --dry-run, or confirm with --all";
            return Err(Error::new(REFUSED, msg).with_details(details));
        }
        // The plugins' GC would remove the attachments of these entries. The name of a cache file
        // does not always identify its attachment, so `--keep` alone does not suffice.
        if needs_consent && !plan.unreadable.is_empty() {
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
            self.runtime.gc(&list, &plan.valid())?;
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
    fn plan(&self, list: &NetworkList) -> Result<Plan, Error> {
        // With no valid attachments, `stale` returns all entries of the network.
        let cached = self.runtime.stale(list, &ValidAttachments::default())?;
        let mut decisions: Vec<Decision> = cached.entries.iter().map(|entry| self.check_entry(entry)).collect();
        for (id, ifname) in &self.command.keep {
            let id = AttachmentId::new(list.name(), id, ifname);
            if !decisions.iter().any(|decision| decision.id == id) {
                let why = "named with --keep; not in the result cache".to_owned();
                decisions.push(Decision { id, netns: String::new(), is_kept: true, state: "named", why });
            }
        }
        Ok(Plan {
            network: list.name().to_owned(),
            decisions,
            unreadable: cached.problems,
            plugins_gc: Ok(()),
            only_reports: self.command.dry_run || list.disable_gc(),
        })
    }

    /// Decides whether gc keeps the attachment of a cache entry.
    fn check_entry(&self, entry: &Entry) -> Decision {
        let id = entry.id();
        let (is_kept, state, why) = match self.is_named(&id) {
            true => (true, "named", "named with --keep".to_owned()),
            false => {
                let liveness = Liveness::of(entry, self.call.machine);
                (!matches!(liveness, Liveness::ContainerGone(_)), liveness.word(), liveness.why().to_owned())
            }
        };
        Decision { id, netns: entry.attachment.netns.clone(), is_kept, state, why }
    }

    /// Whether `--keep` names an attachment.
    pub(super) fn is_named(&self, id: &AttachmentId) -> bool {
        self.command.keep.iter().any(|(container, ifname)| *container == id.container_id && *ifname == id.ifname)
    }
}

impl Plan {
    /// Returns the valid attachments, which are passed to the plugins' GC.
    pub(super) fn valid(&self) -> ValidAttachments {
        let kept = self.decisions.iter().filter(|decision| decision.is_kept);
        kept.map(|decision| (decision.id.container_id.clone(), decision.id.ifname.clone())).collect()
    }

    /// Whether no attachment is valid.
    pub(super) fn keeps_nothing(&self) -> bool {
        !self.decisions.iter().any(|decision| decision.is_kept)
    }

    /// Returns the report for people.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for Decision { id: AttachmentId { container_id, ifname, .. }, is_kept, why, .. } in &self.decisions {
            let verb = if *is_kept { "keep" } else { "remove" };
            text += &format!("{verb:<6}  {container_id}/{ifname}  ({why})\n");
        }
        for problem in &self.unreadable {
            text += &format!("unknown {problem}\n");
        }
        text += &match &self.plugins_gc {
            Ok(()) => {
                let valid = match self.decisions.iter().filter(|decision| decision.is_kept).count() {
                    1 => "1 attachment".to_owned(),
                    count => format!("{count} attachments"),
                };
                format!("The plugins of {} keep everything of {valid} and remove the rest.\n", self.network)
            }
            Err(why) => format!("The GC of the plugins of {} is not run: {why}.\n", self.network),
        };
        if self.only_reports {
            text += "Nothing was changed.\n";
        }
        text
    }

    /// Returns the report for `--json`.
    pub(super) fn json(&self) -> Value {
        let decision_json = |Decision { id, netns, state, why, .. }: &Decision| json!({"containerID": id.container_id, "ifname": id.ifname, "netns": netns, "state": state, "reason": why});
        let [kept, removed] = [true, false].map(|is_kept| {
            let chosen = self.decisions.iter().filter(|decision| decision.is_kept == is_kept);
            chosen.map(decision_json).collect::<Vec<Value>>()
        });
        let valid = self.valid();
        let valid = valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname}));
        // `changed` is true unless gc only reports, even if there was nothing to remove.
        json!({
            "network": self.network,
            "changed": !self.only_reports,
            "pluginsGC": self.plugins_gc.is_ok(),
            "removed": removed,
            "kept": kept,
            "unreadable": self.unreadable,
            "valid": valid.collect::<Vec<_>>(),
        })
    }
}
