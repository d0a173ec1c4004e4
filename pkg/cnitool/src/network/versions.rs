//! version: lists the plugins of a network with their paths and the versions that they support.

use cni::delegate::find_plugin;
use cni::{Code, Error};
use serde_json::json;

use super::VerbRun;
use crate::Streams;
use crate::report::{Format, write, write_json};

impl VerbRun<'_, '_> {
    /// Runs `cnitool version`: prints the list of the plugins. If there is an error, the list is
    /// printed before it; with `--json`, only the error is printed.
    ///
    /// # Errors
    /// As [`configuration`](VerbRun::configuration). Otherwise these, joined to one error:
    /// - Code 4 if a plugin is missing, 6 if its answer cannot be decoded, or the plugin's error.
    /// - Code 1 if a plugin does not support the network's version.
    pub(super) fn version(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let list = self.configuration()?;
        // A configuration without a version has version 0.1.0.
        let wanted = if list.cni_version().is_empty() { "0.1.0" } else { list.cni_version() };
        let mut problems = Vec::new();
        let mut rows = Vec::new();
        for plugin in list.plugins() {
            let kind = plugin.kind();
            // If the plugin is missing, `supported_versions` returns the error.
            let path = find_plugin(kind, &self.runtime.plugin_folders).ok();
            let versions = match self.runtime.supported_versions(kind) {
                Ok(versions) => versions,
                Err(error) => {
                    problems.push(error);
                    Vec::new()
                }
            };
            if !versions.is_empty() && !versions.iter().any(|version| version == wanted) {
                let msg = format!("plugin {kind} does not support config version {wanted:?}");
                problems.push(Error::new(Code::INCOMPATIBLE_VERSION, msg));
            }
            rows.push((kind, path.map(|path| path.display().to_string()).unwrap_or_default(), versions));
        }
        match self.command.shared.format() {
            Format::Text => {
                let mut text = format!("network {} uses CNI version {wanted}\n", list.name());
                for (kind, path, versions) in rows {
                    let path = if path.is_empty() { "not found" } else { &path };
                    let versions = if versions.is_empty() { "-".to_owned() } else { versions.join(" ") };
                    text += &format!("{kind}  {path}  {versions}\n");
                }
                write(streams, &text)?;
                Error::join(problems)
            }
            Format::Json => {
                Error::join(problems)?;
                let as_json = |(kind, path, versions)| json!({"type": kind, "path": path, "versions": versions});
                let plugins: Vec<_> = rows.into_iter().map(as_json).collect();
                let capabilities = list.capabilities();
                let network = json!({"network": list.name(), "cniVersion": wanted, "capabilities": capabilities, "plugins": plugins});
                write_json(streams, &network)
            }
        }
    }
}
