//! The verbs of a whole network: its plugins in order, or in reverse, and the result cache.
//!
//! DEL stops at the first error and keeps the cached result, so that it can be repeated
//! (specification); [`OnError::GoOn`] is for clean-ups that are not repeated: after a failed ADD,
//! and in GC.

use serde_json::value::RawValue;

use super::cache::{Entry, Listing, in_version};
use super::list::{NetworkList, PluginConf};
use super::members::Members;
use super::plugin::{Variables, blame};
use super::request::{AddedKeys, derive};
use super::{Attachment, Runtime};
use cni::config::ValidAttachments;
use cni::delegate::find_plugin;
use cni::skel::Verb;
use cni::version::Version;
use cni::{Code, Error, Result, config, ident};

/// The reaction of a DEL to a plugin that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnError {
    /// The plugins before it are not asked.
    Stop,
    /// All are asked, and all errors are reported.
    GoOn,
}

impl Runtime<'_> {
    /// ADD: attaches a container and remembers it. The result, as the last plugin wrote it.
    ///
    /// # Errors
    /// Before any plugin runs: the version, identifiers, a plugin that is not there,
    /// [`Code::CONFLICT`] for an attachment that is already remembered. Later: the plugin's own
    /// error first; every plugin then gets a DEL, in reverse, the ones never reached too, and what
    /// goes wrong there stands in the details. Nothing is remembered.
    pub fn add(&self, list: &NetworkList, attachment: &Attachment) -> Result<Box<RawValue>> {
        ident::check_new_interface_name(&attachment.ifname)?;
        let version = check_call(list, attachment)?;
        for plugin in list.plugins() {
            find_plugin(plugin.kind(), &self.plugin_folders).map_err(|error| blame(plugin, "add", error))?;
        }
        self.cache.reserve(&attachment.id(list.name()))?;

        let mut result = None;
        let outcome = self.add_plugins(list, attachment, version, &mut result).and_then(|()| {
            let entry = Entry {
                network: list.name().to_owned(),
                attachment: attachment.clone(),
                config: list.raw().to_vec(),
                result: result.clone(),
            };
            let remember =
                |error: Error| error.context(format_args!("failed to set network {:?} cached result", list.name()));
            self.cache.write(&entry).map_err(remember)
        });
        let Err(first) = outcome else {
            return result.ok_or_else(|| Error::config("no plugin configs found"));
        };
        // A runtime reports the failure once and forgets the attachment: no later call cleans up.
        let prev_result = result.as_deref().filter(|_| version >= Version::V0_4_0);
        Err(also_uncleaned(first, self.failing_dels(list, attachment, prev_result, OnError::GoOn)))
    }

    /// `result` is always that of the last plugin that succeeded.
    fn add_plugins(
        &self,
        list: &NetworkList,
        attachment: &Attachment,
        version: Version,
        result: &mut Option<Box<RawValue>>,
    ) -> Result<()> {
        for plugin in list.plugins() {
            let failed = |error| blame(plugin, "add", error);
            let stdout = self.call(list, plugin, Verb::Add, attachment, result.as_deref()).map_err(failed)?;
            *result = Some(read_result(&stdout, version).map_err(failed)?);
        }
        Ok(())
    }

    /// CHECK: whether the attachment is as ADD left it.
    ///
    /// # Errors
    /// Code 1 below 0.4.0; a memory that cannot be read or expressed in the list's version; the
    /// first plugin's error.
    pub fn check(&self, list: &NetworkList, attachment: &Attachment) -> Result<()> {
        let version = check_call(list, attachment)?;
        if version < Version::V0_4_0 {
            let msg = format!("configuration version {:?} does not support the CHECK command", list.cni_version());
            return Err(config::incompatible(&msg, list.cni_version()));
        }
        if list.disable_check() {
            return Ok(());
        }
        let cached = self.cache.find(&attachment.id(list.name())).and_then(|entry| previous(entry.as_ref(), version));
        let cached = cached
            .map_err(|error| error.context(format_args!("failed to get network {:?} cached result", list.name())))?;
        for plugin in list.plugins() {
            self.call(list, plugin, Verb::Check, attachment, cached.as_deref())
                .map_err(|error| blame(plugin, "check", error))?;
        }
        Ok(())
    }

    /// DEL: detaches a container, plugins in reverse, and forgets it. What is not there is no
    /// error.
    ///
    /// # Errors
    /// The plugins'; then the memory stays, so that DEL can be repeated. A memory that cannot be
    /// understood is noted and not used.
    pub fn del(&self, list: &NetworkList, attachment: &Attachment, on_error: OnError) -> Result<()> {
        let version = check_call(list, attachment)?;
        let id = attachment.id(list.name());
        let cached = match version {
            // Older plugins were never promised one.
            Version::V0_1_0 | Version::V0_2_0 | Version::V0_3_0 | Version::V0_3_1 => None,
            _ => self.cache.find(&id).and_then(|entry| previous(entry.as_ref(), version)).unwrap_or_else(|error| {
                self.notes.note(format_args!("DEL goes on without the cached result: {error}"));
                None
            }),
        };
        self.del_plugins(list, attachment, cached.as_deref(), on_error)?;
        self.cache.purge(&id)
    }

    fn del_plugins(
        &self,
        list: &NetworkList,
        attachment: &Attachment,
        prev_result: Option<&RawValue>,
        on_error: OnError,
    ) -> Result<()> {
        let failed = self.failing_dels(list, attachment, prev_result, on_error);
        Error::join(failed.into_iter().map(|(plugin, error)| blame(plugin, "delete", error)))
    }

    /// The plugins whose DEL failed, in the order in which they were asked, and with what.
    fn failing_dels<'l>(
        &self,
        list: &'l NetworkList,
        attachment: &Attachment,
        prev_result: Option<&RawValue>,
        on_error: OnError,
    ) -> Vec<(&'l PluginConf, Error)> {
        let mut failed = Vec::new();
        for plugin in list.plugins().iter().rev() {
            if let Err(error) = self.call(list, plugin, Verb::Del, attachment, prev_result) {
                failed.push((plugin, error));
                if on_error == OnError::Stop {
                    break;
                }
            }
        }
        failed
    }

    /// The cached attachments of a network that are not in `valid`, and the files that cannot be
    /// understood: it is not known whose they are, and so whether these are in `valid`.
    ///
    /// # Errors
    /// Code 5 if the cache cannot be read.
    pub fn stale(&self, list: &NetworkList, valid: &ValidAttachments) -> Result<Listing> {
        ident::check_network_name(list.name())?;
        let mut listing = self.cache.list(list.name())?;
        listing
            .entries
            .retain(|Entry { attachment, .. }| !valid.contains(&attachment.container_id, &attachment.ifname));
        Ok(listing)
    }

    /// GC: a full DEL of every remembered attachment that is not in `valid`, then, from 1.1.0 on,
    /// GC of every plugin. Nothing at all with `disableGC`. Files of the memory that cannot be
    /// understood are noted and left alone.
    ///
    /// # Errors
    /// All that went wrong, after everything has been tried.
    pub fn gc(&self, list: &NetworkList, valid: &ValidAttachments) -> Result<()> {
        ident::check_network_name(list.name())?;
        let version = list.version()?;
        if list.disable_gc() {
            return Ok(());
        }
        let mut errors = Vec::new();
        let stale = self.stale(list, valid).unwrap_or_else(|error| {
            errors.push(error.context("failed to find stale attachments"));
            Listing::default()
        });
        stale.problems.iter().for_each(|problem| self.notes.note(format_args!("ignored: {problem}")));
        for Entry { attachment, .. } in stale.entries {
            if let Err(error) = self.del(list, &attachment, OnError::GoOn) {
                let Attachment { container_id, ifname, .. } = &attachment;
                errors.push(error.context(format_args!("failed to delete stale attachment {container_id} {ifname}")));
            }
        }
        errors.extend(self.cache.clean().err());
        if version >= Version::V1_1_0 {
            for plugin in list.plugins() {
                let request = derive(list, plugin, AddedKeys { valid: Some(valid), ..AddedKeys::default() });
                let outcome = request.and_then(|bytes| self.run(plugin.kind(), Verb::Gc, Variables::default(), &bytes));
                if let Err(error) = outcome {
                    errors.push(error.context(format_args!("failed to GC plugin {}", plugin.kind())));
                }
            }
        }
        Error::join(errors)
    }

    /// STATUS: whether the network can handle an ADD. Below 1.1.0 plugins do not have the verb, and
    /// the answer is yes.
    ///
    /// # Errors
    /// The first plugin's, with its code.
    pub fn status(&self, list: &NetworkList) -> Result<()> {
        ident::check_network_name(list.name())?;
        if list.version()? < Version::V1_1_0 {
            return Ok(());
        }
        for plugin in list.plugins() {
            let request = derive(list, plugin, AddedKeys::default())?;
            self.run(plugin.kind(), Verb::Status, Variables::default(), &request)
                .map_err(|error| blame(plugin, "status", error))?;
        }
        Ok(())
    }

    fn call(
        &self,
        list: &NetworkList,
        plugin: &PluginConf,
        verb: Verb,
        attachment: &Attachment,
        prev_result: Option<&RawValue>,
    ) -> Result<Vec<u8>> {
        let extras = AddedKeys { prev_result, capability_args: Some(&attachment.capability_args), valid: None };
        self.run(plugin.kind(), verb, attachment.into(), &derive(list, plugin, extras)?)
    }
}

/// The error of an ADD with those of its clean-up, a line for each plugin. An error that the ADD
/// and the DELs have in common is reported once.
fn also_uncleaned(first: Error, failed: Vec<(&PluginConf, Error)>) -> Error {
    let mut lines: Vec<String> = first.details().lines().map(str::to_owned).collect();
    for (plugin, error) in failed {
        // Where a plugin did not answer the message names the verb.
        let as_add = error.msg().replace(": DEL: ", ": ADD: ");
        let is_known = first.msg().ends_with(&as_add);
        let why = if is_known { "for the same reason" } else { error.msg() };
        lines.push(format!("cleaning up after it failed too: plugin {} (delete): {why}", plugin.description()));
        if !is_known {
            lines.extend(error.details().lines().map(str::to_owned));
        }
    }
    first.with_details(lines.join("\n"))
}

/// Refuses what every plugin would refuse, before one of them has done anything.
fn check_call(list: &NetworkList, attachment: &Attachment) -> Result<Version> {
    ident::check_container_id(&attachment.container_id)?;
    ident::check_network_name(list.name())?;
    ident::check_interface_name(&attachment.ifname)?;
    list.version()
}

fn previous(entry: Option<&Entry>, version: Version) -> Result<Option<Box<RawValue>>> {
    entry.map_or(Ok(None), |entry| entry.result_as(version))
}

/// The result of an ADD in the list's version. A plugin that does not say its version means the
/// list's; one that answers in another is translated, because the next one would refuse a
/// `prevResult` of another family.
fn read_result(stdout: &[u8], version: Version) -> Result<Box<RawValue>> {
    let text = String::from_utf8_lossy(stdout);
    let text = match text.trim() {
        "null" => "{}",
        text => text,
    };
    let unusable = |error: Error| error.with_details(format!("the plugin answered {text:?}"));
    let mut members =
        Members::parse(text).map_err(|error| unusable(error.context("failed to unmarshal raw result")))?;
    let versionless = members.get("cniVersion").is_none_or(|version| version.get() == "\"\"");
    let text = if versionless {
        members.set("cniVersion", version.as_str())?;
        String::from_utf8_lossy(&members.to_bytes()?).into_owned()
    } else {
        text.to_owned()
    };
    let result = RawValue::from_string(text).map_err(|error| Error::new(Code::DECODE, error.to_string()))?;
    in_version(&result, version).map_err(unusable)
}

#[cfg(test)]
mod tests;
