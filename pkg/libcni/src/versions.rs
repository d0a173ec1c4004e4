//! VERSION: asks a plugin for the versions of the specification that it supports.

use serde::Deserialize;

use super::Runtime;
use super::plugin::Variables;
use cni::json::Json;
use cni::skel::Verb;
use cni::version::Version;
use cni::{Code, Error, Result};

/// The JSON of an answer to VERSION.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Reply {
    cni_version: String,
    supported_versions: Vec<String>,
}

impl Runtime<'_> {
    /// Returns the versions that the plugin `kind` supports by its own answer.
    ///
    /// # Errors
    /// - Code 4 if the plugin does not exist.
    /// - Code 6 if its answer cannot be decoded or lacks a key.
    /// - The plugin's own error.
    pub fn supported_versions(&self, kind: &str) -> Result<Vec<String>> {
        // Plugins of the specification's first versions check these variables before the command.
        let dummy = || "dummy".to_owned();
        let variables =
            Variables { netns: dummy(), ifname: dummy(), path: Some(dummy().into()), ..Variables::default() };
        let request = format!("{{\"cniVersion\":\"{}\"}}", Version::NEWEST);
        let stdout = match self.run(kind, Verb::Version, variables, request.as_bytes()) {
            // Only a plugin that supports 0.1.0 alone does not know VERSION.
            Err(error) if error.msg() == "unknown CNI_COMMAND: VERSION" => return Ok(vec!["0.1.0".to_owned()]),
            other => other?,
        };
        let failed = |why: String| {
            Error::new(Code::DECODE, format!("{kind}: its answer to VERSION cannot be used: {why}"))
                .with_details(String::from_utf8_lossy(&stdout))
        };
        let reply = Json::parse(&stdout).and_then(|json| json.decode::<Reply>()).map_err(|e| failed(e.to_string()))?;
        let lacks_list = reply.supported_versions.is_empty();
        match (reply.cni_version.as_str(), lacks_list) {
            ("", _) => Err(failed("it lacks cniVersion".to_owned())),
            (_, false) => Ok(reply.supported_versions),
            // As in Go: answers of 0.2.0 do not need the list.
            ("0.2.0", true) => Ok(vec!["0.1.0".to_owned(), "0.2.0".to_owned()]),
            (_, true) => Err(failed("it lacks supportedVersions".to_owned())),
        }
    }
}
