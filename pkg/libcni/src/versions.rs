//! VERSION: asks a plugin for the versions of the specification that it supports.

use serde::Deserialize;

use super::{Attachment, Runtime};
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
    /// Asks the plugin `kind` for the versions that it supports.
    ///
    /// # Errors
    /// - Code 4 if the plugin does not exist.
    /// - Code 6 if its answer cannot be decoded or lacks a required key.
    /// - The error that the plugin returned.
    pub fn supported_versions(&self, kind: &str) -> Result<Vec<String>> {
        // Plugins for the oldest versions of the specification check these variables before the
        // verb.
        let dummy = || "dummy".to_owned();
        let attachment = Attachment { netns: dummy(), ifname: dummy(), ..Attachment::default() };
        let request = format!("{{\"cniVersion\":\"{}\"}}", Version::NEWEST);
        let stdout = match self.run(kind, Verb::Version, &attachment, request.as_bytes()) {
            // A plugin that does not know VERSION supports 0.1.0 only.
            Err(error) if error.msg() == "unknown CNI_COMMAND: VERSION" => return Ok(vec!["0.1.0".to_owned()]),
            other => other?,
        };
        let failed = |why: String| {
            Error::new(Code::DECODE, format!("{kind}: its answer to VERSION cannot be used: {why}"))
                .with_details(String::from_utf8_lossy(&stdout))
        };
        let reply = Json::parse(&stdout).and_then(|json| json.decode::<Reply>()).map_err(|e| failed(e.to_string()))?;
        if reply.cni_version.is_empty() {
            return Err(failed("it lacks cniVersion".to_owned()));
        }
        if !reply.supported_versions.is_empty() {
            return Ok(reply.supported_versions);
        }
        // As in Go, an answer of version 0.2.0 does not need the list.
        if reply.cni_version == "0.2.0" {
            return Ok(vec!["0.1.0".to_owned(), "0.2.0".to_owned()]);
        }
        Err(failed("it lacks supportedVersions".to_owned()))
    }
}
