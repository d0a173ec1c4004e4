//! version: lists the plugins of a network with their paths and the versions that they support.

use cni::delegate::find_plugin;
use cni::{Code, Error};
use serde_json::{Value, json};

use super::VerbRun;
use crate::call::{Exit, Format, Streams};
use crate::report::{error_json, write, write_json};

/// A plugin of the network.
struct ListedPlugin<'a> {
    kind: &'a str,
    /// Its path, or `None` if it is missing.
    path: Option<String>,
    /// The versions that it supports; empty if they are not known.
    versions: Vec<String>,
    /// Why they are not known, or that the network's version is not one of them.
    problem: Option<Error>,
}

impl VerbRun<'_, '_> {
    /// Runs `cnitool version`: prints the list of the plugins, even if there is an error. With
    /// `--json`, the errors are part of the list.
    ///
    /// # Errors
    /// As [`configuration`](VerbRun::configuration). Otherwise, unless `--json` is given, these,
    /// joined to one error:
    /// - Code 4 if a plugin is missing, 6 if its answer cannot be decoded, or the plugin's error.
    /// - Code 1 if a plugin does not support the network's version.
    pub(super) fn version(&self, streams: &mut Streams<'_>) -> Result<Exit, Error> {
        let list = self.configuration()?;
        // A configuration without a version has version 0.1.0.
        let wanted = if list.cni_version().is_empty() { "0.1.0" } else { list.cni_version() };
        let plugins: Vec<ListedPlugin<'_>> =
            list.plugins().iter().map(|plugin| self.ask_plugin(plugin.kind(), wanted)).collect();
        if self.command.shared.format() == Format::Json {
            let rows: Vec<Value> = plugins.iter().map(ListedPlugin::as_json).collect();
            let (name, capabilities) = (list.name(), list.capabilities());
            let network = json!({"network": name, "cniVersion": wanted, "capabilities": capabilities, "plugins": rows});
            write_json(streams, &network)?;
            let has_problem = plugins.iter().any(|plugin| plugin.problem.is_some());
            return Ok(if has_problem { Exit::Failed } else { Exit::Done });
        }
        let mut text = format!("network {} uses CNI version {wanted}\n", list.name());
        for ListedPlugin { kind, path, versions, .. } in &plugins {
            let path = path.as_deref().unwrap_or("not found");
            let versions = if versions.is_empty() { "-".to_owned() } else { versions.join(" ") };
            text += &format!("{kind}  {path}  {versions}\n");
        }
        write(streams, &text)?;
        Error::join(plugins.into_iter().filter_map(|plugin| plugin.problem))?;
        Ok(Exit::Done)
    }

    /// Returns the path of a plugin and the versions that it supports. `wanted` is the network's
    /// version.
    fn ask_plugin<'k>(&self, kind: &'k str, wanted: &str) -> ListedPlugin<'k> {
        // If the plugin is missing, `supported_versions` returns the error.
        let path = find_plugin(kind, &self.runtime.plugin_folders).ok().map(|path| path.display().to_string());
        let (versions, problem) = match self.runtime.supported_versions(kind) {
            Err(error) => (Vec::new(), Some(error)),
            Ok(versions) => {
                let fits = versions.is_empty() || versions.iter().any(|version| version == wanted);
                let msg = || format!("plugin {kind} does not support config version {wanted:?}");
                let problem = (!fits).then(|| Error::new(Code::INCOMPATIBLE_VERSION, msg()));
                (versions, problem)
            }
        };
        ListedPlugin { kind, path, versions, problem }
    }
}

impl ListedPlugin<'_> {
    /// Returns the plugin for `--json`. It has an `error` only if there is a problem.
    fn as_json(&self) -> Value {
        let path = self.path.as_deref().unwrap_or_default();
        let mut json = json!({"type": self.kind, "path": path, "versions": self.versions});
        if let Some(problem) = &self.problem {
            json["error"] = error_json(problem);
        }
        json
    }
}
