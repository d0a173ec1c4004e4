//! The verbs of a whole network: they run its plugins, DEL in reverse order, and update the result
//! cache.
//!
//! The specification requires that DEL stops at the first error ([`OnError::Stop`]). The DELs after
//! a failed ADD and those of GC run the remaining plugins too ([`OnError::GoOn`]), because the
//! runtime might never call another DEL of the attachment.

use serde_json::value::RawValue;

use super::cache::{Entry, Listing, convert_result};
use super::list::{NetworkList, PluginConf};
use super::members::Members;
use super::plugin::name_plugin;
use super::{AddedKeys, Attachment, Runtime};
use cni::config::ValidAttachments;
use cni::delegate::find_plugin;
use cni::skel::Verb;
use cni::version::Version;
use cni::{AttachmentId, Code, Error, Result, ident};

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
    /// Before any plugin runs:
    /// - Code 1 if the version is not supported.
    /// - Code 4 or 7 if an identifier is invalid or a plugin does not exist.
    /// - Code 5 if the cache cannot be read.
    /// - [`Code::CONFLICT`] if the cache already has the attachment, or another one with the same
    ///   file name.
    ///
    /// Later, the error of the plugin that failed, or code 5 if the cache cannot be written. Then
    /// all plugins, even those whose ADD did not run, get a DEL in reverse order. The details
    /// contain the errors of these DELs. The attachment is not cached.
    pub fn add(&self, list: &NetworkList, attachment: &Attachment) -> Result<Box<RawValue>> {
        ident::check_new_interface_name(&attachment.ifname)?;
        let version = check_parameters(list, attachment)?;
        // A missing plugin is an error before the first one has changed anything.
        for plugin in list.plugins() {
            find_plugin(plugin.kind(), &self.plugin_folders).map_err(|error| name_plugin(plugin, "add", error))?;
        }
        self.cache.prepare_for_add(&attachment.id(list.name()))?;

        let mut result = None;
        let outcome = self.run_adds(list, attachment, version, &mut result);
        let stored = outcome.and_then(|()| self.store(list, attachment, result.clone()));
        let Err(add_error) = stored else {
            // Every list has a plugin, so there is a result.
            return result.ok_or_else(|| Error::config("no plugin configs found"));
        };
        // Runtimes do not call DEL after a failed ADD, so this is the only clean-up.
        let prev_result = if has_prev_result_in_del(version) { result.as_deref() } else { None };
        let failed_dels = self.run_dels(list, attachment, prev_result, OnError::GoOn);
        Err(with_errors_of_dels(add_error, failed_dels))
    }

    /// Runs ADD of all plugins until one fails. Sets `result` to the result of the last plugin that
    /// succeeded, even if a later plugin fails.
    fn run_adds(
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

    /// Stores the attachment and its result in the cache.
    ///
    /// # Errors
    /// Code 5 if the cache cannot be written.
    fn store(&self, list: &NetworkList, attachment: &Attachment, result: Option<Box<RawValue>>) -> Result<()> {
        let entry = Entry {
            network: list.name().to_owned(),
            attachment: attachment.clone(),
            config: list.raw().to_vec(),
            result,
        };
        self.cache
            .write(&entry)
            .map_err(|error| error.context(format_args!("failed to set network {:?} cached result", list.name())))
    }

    /// CHECK: checks that the attachment is as its ADD left it. Does nothing if the configuration
    /// disables CHECK.
    ///
    /// # Errors
    /// - Code 1 if the list's version is not supported or is below 0.4.0.
    /// - Code 4 or 7 if an identifier is invalid.
    /// - Code 5 if the cached result cannot be read.
    /// - Code 6 if the cached result cannot be decoded or expressed in the list's version.
    /// - The error of the first plugin that fails.
    pub fn check(&self, list: &NetworkList, attachment: &Attachment) -> Result<()> {
        let version = check_parameters(list, attachment)?;
        if version < Version::V0_4_0 {
            let msg = format!("configuration version {:?} does not support the CHECK command", list.cni_version());
            return Err(Error::new(Code::INCOMPATIBLE_VERSION, msg));
        }
        if list.disable_check() {
            return Ok(());
        }
        let cached = self
            .cached_result(&attachment.id(list.name()), version)
            .map_err(|error| error.context(format_args!("failed to get network {:?} cached result", list.name())))?;
        for plugin in list.plugins() {
            self.call(list, plugin, Verb::Check, attachment, cached.as_deref())
                .map_err(|error| name_plugin(plugin, "check", error))?;
        }
        Ok(())
    }

    /// DEL: detaches a container, with the plugins in reverse order, and then removes the cached
    /// entry. It is not an error if the cache does not have the attachment. If the cached result
    /// cannot be read or decoded, this is noted, and the plugins run without it.
    ///
    /// # Errors
    /// - Code 1 if the list's version is not supported.
    /// - Code 4 or 7 if an identifier is invalid.
    /// - The errors of the plugins, joined. The cached entry stays, so that DEL can be repeated.
    /// - Code 5 if all plugins succeeded, but the file of the cached entry cannot be read or
    ///   removed.
    pub fn del(&self, list: &NetworkList, attachment: &Attachment, on_error: OnError) -> Result<()> {
        let version = check_parameters(list, attachment)?;
        let id = attachment.id(list.name());
        let mut prev_result = None;
        if has_prev_result_in_del(version) {
            prev_result = self.cached_result(&id, version).unwrap_or_else(|error| {
                self.notes.note(format_args!("DEL goes on without the cached result: {error}"));
                None
            });
        }
        let failed = self.run_dels(list, attachment, prev_result.as_deref(), on_error);
        Error::join(failed.into_iter().map(|(plugin, error)| name_plugin(plugin, "delete", error)))?;
        self.cache.purge(&id)
    }

    /// Returns the cached result of an attachment as `prevResult` of `version`, or `None` if none
    /// is cached.
    ///
    /// # Errors
    /// - Code 5 if the cached result cannot be read.
    /// - Code 6 if the cached result cannot be decoded or expressed in `version`.
    fn cached_result(&self, id: &AttachmentId, version: Version) -> Result<Option<Box<RawValue>>> {
        match self.cache.find(id)? {
            Some(entry) => entry.result_as(version),
            None => Ok(None),
        }
    }

    /// Runs DEL of the plugins in reverse order, and returns those that failed, with their errors.
    fn run_dels<'l>(
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

    /// Returns the cached attachments of a network that are not in `valid`. The problems in the
    /// listing are about files without a usable entry: their attachments are not known.
    ///
    /// # Errors
    /// - Code 5 if the cache cannot be read.
    /// - Code 7 if the network's name is invalid.
    pub fn stale(&self, list: &NetworkList, valid: &ValidAttachments) -> Result<Listing> {
        ident::check_network_name(list.name())?;
        let mut listing = self.cache.list(Some(list.name()))?;
        listing
            .entries
            .retain(|Entry { attachment, .. }| !valid.contains(&attachment.container_id, &attachment.ifname));
        Ok(listing)
    }

    /// GC: runs DEL for each cached attachment that is not in `valid`, and then
    /// [`gc_plugins`](Runtime::gc_plugins). Does nothing if the configuration disables GC. Cache
    /// files without a usable entry are noted and not changed; temporary files that killed
    /// processes have left in the cache are removed.
    ///
    /// # Errors
    /// - Code 1 if the list's version is not supported.
    /// - Code 7 if the network's name is invalid.
    /// - All other errors, joined. The remaining DELs and GCs run after an error.
    pub fn gc(&self, list: &NetworkList, valid: &ValidAttachments) -> Result<()> {
        ident::check_network_name(list.name())?;
        list.version()?;
        if list.disable_gc() {
            return Ok(());
        }
        let mut errors = Vec::new();
        let stale = self.stale(list, valid).unwrap_or_else(|error| {
            errors.push(error.context("failed to find stale attachments"));
            Listing::default()
        });
        stale.problems.iter().for_each(|problem| self.notes.note(format_args!("ignored: {problem}")));
        errors.extend(stale.entries.iter().filter_map(|entry| self.del_stale(list, &entry.attachment).err()));
        errors.extend(self.cache.clean().err());
        errors.extend(self.gc_plugins(list, valid).err());
        Error::join(errors)
    }

    /// Runs DEL for an attachment that is not valid any more. All plugins run, even after an error.
    ///
    /// # Errors
    /// As [`del`](Runtime::del), with the attachment in the message.
    pub fn del_stale(&self, list: &NetworkList, attachment: &Attachment) -> Result<()> {
        self.del(list, attachment, OnError::GoOn).map_err(|error| {
            let Attachment { container_id, ifname, .. } = attachment;
            error.context(format_args!("failed to delete stale attachment {container_id} {ifname}"))
        })
    }

    /// Runs GC of each plugin, which removes everything of the network that belongs to no
    /// attachment in `valid`. Does nothing if the configuration disables GC.
    ///
    /// GC exists since version 1.1.0. The plugins of an older list get their configuration with
    /// version 1.1.0. A plugin that does not support this version is noted and skipped.
    ///
    /// # Errors
    /// - Code 1 if the list's version is not supported.
    /// - All other errors, joined. The remaining GCs run after an error.
    pub fn gc_plugins(&self, list: &NetworkList, valid: &ValidAttachments) -> Result<()> {
        let is_older = list.version()? < Version::V1_1_0;
        if list.disable_gc() {
            return Ok(());
        }
        let list = if is_older { &list.with_version(Version::V1_1_0) } else { list };
        let mut errors = Vec::new();
        for plugin in list.plugins() {
            let request = list.request(plugin, AddedKeys { valid: Some(valid), ..AddedKeys::default() });
            match request.and_then(|bytes| self.run(plugin.kind(), Verb::Gc, &Attachment::default(), &bytes)) {
                Ok(_) => {}
                Err(error) if is_older && lacks_gc(&error) => {
                    let (kind, network) = (plugin.kind(), list.name());
                    self.notes.note(format_args!("plugin {kind} of {network} has no GC and was skipped: {error}"));
                }
                Err(error) => errors.push(error.context(format_args!("failed to GC plugin {}", plugin.kind()))),
            }
        }
        Error::join(errors)
    }

    /// STATUS: checks that the network can handle an ADD. Succeeds without running a plugin if the
    /// list's version is below 1.1.0, which does not have the verb.
    ///
    /// # Errors
    /// - Code 1 if the list's version is not supported.
    /// - Code 7 if the network's name is invalid.
    /// - The error of the first plugin that fails, with its code.
    pub fn status(&self, list: &NetworkList) -> Result<()> {
        ident::check_network_name(list.name())?;
        if list.version()? < Version::V1_1_0 {
            return Ok(());
        }
        for plugin in list.plugins() {
            let request = list.request(plugin, AddedKeys::default())?;
            self.run(plugin.kind(), Verb::Status, &Attachment::default(), &request)
                .map_err(|error| name_plugin(plugin, "status", error))?;
        }
        Ok(())
    }

    /// Runs one plugin for ADD, CHECK or DEL of an attachment, and returns its stdout.
    ///
    /// # Errors
    /// Those of [`run`](Runtime::run).
    fn call(
        &self,
        list: &NetworkList,
        plugin: &PluginConf,
        verb: Verb,
        attachment: &Attachment,
        prev_result: Option<&RawValue>,
    ) -> Result<Vec<u8>> {
        let added = AddedKeys { prev_result, capability_args: Some(&attachment.capability_args), valid: None };
        self.run(plugin.kind(), verb, attachment, &list.request(plugin, added)?)
    }
}

/// Adds the errors of the DELs after a failed ADD to the details of the ADD's error: for each
/// plugin one line, and the details of its error. An error that equals the ADD's is not repeated.
fn with_errors_of_dels(add_error: Error, failed_dels: Vec<(&PluginConf, Error)>) -> Error {
    let mut lines: Vec<String> = add_error.details().lines().map(str::to_owned).collect();
    for (plugin, error) in failed_dels {
        // The message about a plugin that gave no answer contains the verb.
        let msg_if_from_add = error.msg().replace(": DEL: ", ": ADD: ");
        // The ADD's message begins with the prefix that `name_plugin` has added.
        let is_same = add_error.msg().ends_with(&msg_if_from_add);
        let why = if is_same { "for the same reason" } else { error.msg() };
        lines.push(format!("the DEL after the failed ADD failed too: plugin {} (delete): {why}", plugin.description()));
        if !is_same {
            lines.extend(error.details().lines().map(str::to_owned));
        }
    }
    add_error.with_details(lines.join("\n"))
}

/// Whether a plugin's error means that it does not support GC.
fn lacks_gc(error: &Error) -> bool {
    error.code() == Code::INCOMPATIBLE_VERSION || error.msg().contains("unknown CNI_COMMAND")
}

/// Whether a DEL passes `prevResult` to the plugins in this version of the specification.
fn has_prev_result_in_del(version: Version) -> bool {
    version >= Version::V0_4_0
}

/// Checks the identifiers and the version before the first plugin runs: every plugin would refuse
/// invalid ones. Returns the list's version.
///
/// # Errors
/// - Code 1 if the version is not supported.
/// - Code 4 if the container ID or the interface name is invalid.
/// - Code 7 if the network's name is invalid.
fn check_parameters(list: &NetworkList, attachment: &Attachment) -> Result<Version> {
    ident::check_container_id(&attachment.container_id)?;
    ident::check_network_name(list.name())?;
    ident::check_interface_name(&attachment.ifname)?;
    list.version()
}

/// Decodes a plugin's answer to ADD and converts it to `version`, that of the list, because the
/// next plugin may refuse a `prevResult` of another version. An answer without `cniVersion`, or
/// with an empty one, is taken to be in `version`. As in Go, `null` is an empty result.
///
/// # Errors
/// Code 6 if the answer is not a result, or cannot be expressed in the list's version.
fn read_result(stdout: &[u8], version: Version) -> Result<Box<RawValue>> {
    let answer = String::from_utf8_lossy(stdout);
    let answer = match answer.trim() {
        "null" => "{}",
        answer => answer,
    };
    let unusable = |error: Error| error.with_details(format!("the plugin answered {answer:?}"));
    let mut members =
        Members::parse(answer).map_err(|error| unusable(error.context("failed to unmarshal raw result")))?;
    let has_version = members.get("cniVersion").is_some_and(|value| value.get() != "\"\"");
    let text = if has_version {
        answer.to_owned()
    } else {
        // `convert_result` leaves a result whose `cniVersion` is `version` verbatim.
        members.set("cniVersion", version.as_str())?;
        String::from_utf8_lossy(&members.to_bytes()?).into_owned()
    };
    let result = RawValue::from_string(text).map_err(|error| Error::new(Code::DECODE, error.to_string()))?;
    convert_result(&result, version).map_err(unusable)
}

#[cfg(test)]
mod tests;
