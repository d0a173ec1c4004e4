//! The verbs of a whole network: they run its plugins, DEL in reverse order, and update the result
//! cache.
//!
//! As the specification requires, DEL stops at the first error and keeps the cached result, so that
//! it can be repeated. [`OnError::GoOn`] is for DELs that are not repeated: those after a failed
//! ADD, and those of GC.

use serde_json::value::RawValue;

use super::cache::{Entry, Listing, in_version};
use super::list::{NetworkList, PluginConf};
use super::members::Members;
use super::plugin::{Variables, name_plugin};
use super::request::{AddedKeys, derive};
use super::{Attachment, Runtime};
use cni::config::ValidAttachments;
use cni::delegate::find_plugin;
use cni::skel::Verb;
use cni::version::Version;
use cni::{Code, Error, Result, config, ident};

/// What DEL does after a plugin has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnError {
    /// It does not run the remaining plugins.
    Stop,
    /// It runs the remaining plugins, and reports all errors.
    GoOn,
}

impl Runtime<'_> {
    /// ADD: attaches a container, stores the attachment in the result cache, and returns the result
    /// of the last plugin.
    ///
    /// # Errors
    /// Before any plugin runs: the version is not supported, an identifier is invalid, a plugin
    /// does not exist, or the cache already has the attachment ([`Code::CONFLICT`]). Later: the
    /// error of the plugin that failed. Then all plugins get a DEL in reverse order, those that did
    /// not run too; the errors of these DELs are in the details. The cache does not have the
    /// attachment.
    pub fn add(&self, list: &NetworkList, attachment: &Attachment) -> Result<Box<RawValue>> {
        ident::check_new_interface_name(&attachment.ifname)?;
        let version = check_call(list, attachment)?;
        for plugin in list.plugins() {
            find_plugin(plugin.kind(), &self.plugin_folders).map_err(|error| name_plugin(plugin, "add", error))?;
        }
        self.cache.prepare_for_add(&attachment.id(list.name()))?;

        let mut result = None;
        let outcome = self.add_plugins(list, attachment, version, &mut result).and_then(|()| {
            let entry = Entry {
                network: list.name().to_owned(),
                attachment: attachment.clone(),
                config: list.raw().to_vec(),
                result: result.clone(),
            };
            let written = self.cache.write(&entry);
            written
                .map_err(|error| error.context(format_args!("failed to set network {:?} cached result", list.name())))
        });
        let Err(first) = outcome else {
            return result.ok_or_else(|| Error::config("no plugin configs found"));
        };
        // Runtimes do not call DEL after a failed ADD, so this is the only clean-up.
        let prev_result = result.as_deref().filter(|_| version >= Version::V0_4_0);
        Err(with_clean_up_errors(first, self.failing_dels(list, attachment, prev_result, OnError::GoOn)))
    }

    /// Runs ADD of all plugins until one fails. `result` becomes the result of the last plugin that
    /// succeeded.
    fn add_plugins(
        &self,
        list: &NetworkList,
        attachment: &Attachment,
        version: Version,
        result: &mut Option<Box<RawValue>>,
    ) -> Result<()> {
        for plugin in list.plugins() {
            let failed = |error| name_plugin(plugin, "add", error);
            let stdout = self.call(list, plugin, Verb::Add, attachment, result.as_deref()).map_err(failed)?;
            *result = Some(read_result(&stdout, version).map_err(failed)?);
        }
        Ok(())
    }

    /// CHECK: checks that the attachment is as its ADD left it. Does nothing if the configuration
    /// disables CHECK.
    ///
    /// # Errors
    /// Code 1 if the list's version is below 0.4.0; the cached result cannot be read or cannot be
    /// expressed in the list's version; the error of the first plugin that fails.
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
                .map_err(|error| name_plugin(plugin, "check", error))?;
        }
        Ok(())
    }

    /// DEL: detaches a container, with the plugins in reverse order, and removes the cached entry.
    /// It succeeds if the attachment does not exist. A cached result that cannot be decoded is
    /// noted, and the plugins run without it.
    ///
    /// # Errors
    /// Those of the plugins; then the cached entry stays, so that DEL can be repeated.
    pub fn del(&self, list: &NetworkList, attachment: &Attachment, on_error: OnError) -> Result<()> {
        let version = check_call(list, attachment)?;
        let id = attachment.id(list.name());
        let cached = match version {
            // Before 0.4.0, the specification has no `prevResult` for DEL.
            Version::V0_1_0 | Version::V0_2_0 | Version::V0_3_0 | Version::V0_3_1 => None,
            _ => self.cache.find(&id).and_then(|entry| previous(entry.as_ref(), version)).unwrap_or_else(|error| {
                self.notes.note(format_args!("DEL goes on without the cached result: {error}"));
                None
            }),
        };
        self.del_plugins(list, attachment, cached.as_deref(), on_error)?;
        self.cache.purge(&id)
    }

    /// Runs DEL of the plugins in reverse order, and returns all errors as one.
    fn del_plugins(
        &self,
        list: &NetworkList,
        attachment: &Attachment,
        prev_result: Option<&RawValue>,
        on_error: OnError,
    ) -> Result<()> {
        let failed = self.failing_dels(list, attachment, prev_result, on_error);
        Error::join(failed.into_iter().map(|(plugin, error)| name_plugin(plugin, "delete", error)))
    }

    /// Runs DEL of the plugins in reverse order, and returns those that failed, with their errors.
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

    /// Returns the cached attachments of a network that are not in `valid`, and the problems with
    /// files that cannot be decoded, whose attachments are not known.
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

    /// GC: runs DEL for each cached attachment that is not in `valid`, and then GC of each plugin
    /// if the list's version is 1.1.0 or newer. Does nothing if the configuration disables GC.
    /// Cache files that cannot be decoded are noted and not changed.
    ///
    /// # Errors
    /// All errors as one. The remaining DELs and GCs run after an error.
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

    /// STATUS: checks that the network can handle an ADD. Succeeds without running a plugin if the
    /// list's version is below 1.1.0, which does not have the verb.
    ///
    /// # Errors
    /// That of the first plugin that fails, with its code.
    pub fn status(&self, list: &NetworkList) -> Result<()> {
        ident::check_network_name(list.name())?;
        if list.version()? < Version::V1_1_0 {
            return Ok(());
        }
        for plugin in list.plugins() {
            let request = derive(list, plugin, AddedKeys::default())?;
            self.run(plugin.kind(), Verb::Status, Variables::default(), &request)
                .map_err(|error| name_plugin(plugin, "status", error))?;
        }
        Ok(())
    }

    /// Runs one plugin for a verb of an attachment, and returns its stdout.
    fn call(
        &self,
        list: &NetworkList,
        plugin: &PluginConf,
        verb: Verb,
        attachment: &Attachment,
        prev_result: Option<&RawValue>,
    ) -> Result<Vec<u8>> {
        let added = AddedKeys { prev_result, capability_args: Some(&attachment.capability_args), valid: None };
        self.run(plugin.kind(), verb, attachment.into(), &derive(list, plugin, added)?)
    }
}

/// Adds the errors of the DELs after a failed ADD to the details of its error, one line for each
/// plugin. An error of a DEL that equals the ADD's is not repeated.
fn with_clean_up_errors(first: Error, failed: Vec<(&PluginConf, Error)>) -> Error {
    let mut lines: Vec<String> = first.details().lines().map(str::to_owned).collect();
    for (plugin, error) in failed {
        // The message about a plugin that gave no answer names the verb, so the verb of the DEL is
        // replaced before the messages are compared.
        let as_add = error.msg().replace(": DEL: ", ": ADD: ");
        let is_known = first.msg().ends_with(&as_add);
        let why = if is_known { "for the same reason" } else { error.msg() };
        lines.push(format!("the DEL after the failed ADD failed too: plugin {} (delete): {why}", plugin.description()));
        if !is_known {
            lines.extend(error.details().lines().map(str::to_owned));
        }
    }
    first.with_details(lines.join("\n"))
}

/// Checks the identifiers and the version, which every plugin would refuse too, before the first
/// plugin runs. Returns the list's version.
///
/// # Errors
/// An identifier is invalid (codes 4 and 7), or the version is not supported (code 1).
fn check_call(list: &NetworkList, attachment: &Attachment) -> Result<Version> {
    ident::check_container_id(&attachment.container_id)?;
    ident::check_network_name(list.name())?;
    ident::check_interface_name(&attachment.ifname)?;
    list.version()
}

/// Returns the result of a cached entry as `prevResult` of `version`; `None` without an entry.
fn previous(entry: Option<&Entry>, version: Version) -> Result<Option<Box<RawValue>>> {
    match entry {
        Some(entry) => entry.result_as(version),
        None => Ok(None),
    }
}

/// Decodes the answer of a plugin to ADD and converts it to the list's version, because the next
/// plugin may refuse a `prevResult` of another version. An answer without `cniVersion` is in the
/// list's version.
///
/// # Errors
/// The answer is not a result of the list's version.
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
