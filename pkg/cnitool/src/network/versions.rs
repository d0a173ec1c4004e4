//! status and version: whether the plugins of a network, or of all networks, can handle an ADD, and
//! which versions they support.

use cni::delegate::find_plugin;
use cni::{Code, Error};
use libcni::NetworkList;
use serde_json::{Value, json};

use super::VerbRun;
use crate::call::{Exit, Format, Streams};
use crate::report::{Report, error_json};

impl VerbRun<'_> {
    /// Runs `cnitool status`: runs STATUS of the plugins, and prints the outcome for each network.
    ///
    /// # Errors
    /// - As [`configuration`](VerbRun::configuration).
    /// - Unless `--json` is given, the errors of STATUS, as one error.
    pub(super) fn status(&self, streams: &mut Streams<'_>) -> Result<Exit, Error> {
        let (mut report, mut errors, mut networks) = (Report::new(streams), Vec::new(), Vec::new());
        for list in self.lists()? {
            let error = self.runtime.status(&list).err();
            let text = error.as_ref().map_or_else(|| "ready".to_owned(), ToString::to_string);
            report.fact(error.is_some(), list.name(), &text);
            let json = error.as_ref().map(error_json);
            networks.push(json!({"network": list.name(), "ready": error.is_none(), "error": json}));
            errors.extend(error);
        }
        self.write_answers(report, networks, errors, streams)
    }

    /// Runs `cnitool version`: prints the plugins of each network, even if there is an error.
    ///
    /// # Errors
    /// As [`configuration`](VerbRun::configuration). Otherwise, unless `--json` is given, these,
    /// joined to one error:
    /// - Code 4 if a plugin is missing, 6 if its answer cannot be decoded, or the plugin's error.
    /// - Code 1 if a plugin does not support the network's version.
    pub(super) fn version(&self, streams: &mut Streams<'_>) -> Result<Exit, Error> {
        let (mut report, mut errors, mut networks) = (Report::new(streams), Vec::new(), Vec::new());
        for list in self.lists()? {
            // A configuration without a version has version 0.1.0.
            let wanted = if list.cni_version().is_empty() { "0.1.0" } else { list.cni_version() };
            report.line(format_args!("network {} uses CNI version {wanted}", list.name()));
            let mut plugins = Vec::new();
            for plugin in list.plugins() {
                let kind = plugin.kind();
                let (path, versions, error) = self.ask_plugin(kind, wanted);
                let known = if versions.is_empty() { "-".to_owned() } else { versions.join(" ") };
                report.line(format_args!("{kind}  {}  {known}", path.as_deref().unwrap_or("not found")));
                let json = error.as_ref().map(error_json);
                plugins.push(json!({"type": kind, "path": path, "versions": versions, "error": json}));
                errors.extend(error);
            }
            let (name, capabilities) = (list.name(), list.capabilities());
            networks
                .push(json!({"network": name, "cniVersion": wanted, "capabilities": capabilities, "plugins": plugins}));
        }
        self.write_answers(report, networks, errors, streams)
    }

    /// Returns the network in the arguments, or all networks.
    ///
    /// # Errors
    /// As [`configuration`](VerbRun::configuration).
    fn lists(&self) -> Result<Vec<NetworkList>, Error> {
        match self.command.network.is_empty() {
            true => self.context.networks(),
            false => Ok(vec![self.configuration()?]),
        }
    }

    /// Writes the answers, which contain the errors.
    ///
    /// # Errors
    /// Code 5 if stdout cannot be written; without `--json` the errors, as one error.
    fn write_answers(
        &self,
        mut report: Report,
        networks: Vec<Value>,
        errors: Vec<Error>,
        streams: &mut Streams<'_>,
    ) -> Result<Exit, Error> {
        let format = self.context.format();
        if networks.is_empty() {
            report.line(format_args!("No network is configured in {}.", self.context.conf_folder().path().display()));
        }
        report.write(streams, format, &json!({"networks": networks}))?;
        match errors.is_empty() {
            true => Ok(Exit::Done),
            false if format == Format::Json => Ok(Exit::Failed),
            false => Error::join(errors).map(|()| Exit::Done),
        }
    }

    /// Returns the path of a plugin, the versions that it supports, and why they are not known or
    /// that `wanted`, the network's version, is not one of them.
    fn ask_plugin(&self, kind: &str, wanted: &str) -> (Option<String>, Vec<String>, Option<Error>) {
        // If the plugin is missing, `supported_versions` returns the error.
        let path = find_plugin(kind, &self.runtime.plugin_folders).ok().map(|path| path.display().to_string());
        let (versions, error) = match self.runtime.supported_versions(kind) {
            Err(error) => return (path, Vec::new(), Some(error)),
            Ok(versions) if versions.is_empty() || versions.iter().any(|version| version == wanted) => (versions, None),
            Ok(versions) => (versions, Some(format!("plugin {kind} does not support config version {wanted:?}"))),
        };
        (path, versions, error.map(|msg| Error::new(Code::INCOMPATIBLE_VERSION, msg)))
    }
}
