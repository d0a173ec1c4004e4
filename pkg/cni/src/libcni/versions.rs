//! VERSION: what a plugin speaks, and whether a network's plugins speak its version.

use serde::Deserialize;

use super::Runtime;
use super::list::NetworkList;
use super::plugin::Variables;
use crate::json::Json;
use crate::skel::Verb;
use crate::version::Version;
use crate::{Code, Error, Result};

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Reply {
    cni_version: String,
    supported_versions: Vec<String>,
}

impl Runtime<'_> {
    /// The versions that the plugin `kind` says it speaks.
    ///
    /// # Errors
    /// Code 4 if it is not there, 6 for an answer that is none, the plugin's own.
    pub fn supported_versions(&self, kind: &str) -> Result<Vec<String>> {
        // Plugins of the first days look at these before they look at the command.
        let dummy = || "dummy".to_owned();
        let variables =
            Variables { netns: dummy(), ifname: dummy(), path: Some(dummy().into()), ..Variables::default() };
        let request = format!("{{\"cniVersion\":\"{}\"}}", Version::NEWEST);
        let stdout = match self.run(kind, Verb::Version, variables, request.as_bytes()) {
            // VERSION came with 0.2.0.
            Err(error) if error.msg() == "unknown CNI_COMMAND: VERSION" => return Ok(vec!["0.1.0".to_owned()]),
            other => other?,
        };
        let failed = |why: String| {
            Error::new(Code::DECODE, format!("{kind}: its answer to VERSION cannot be used: {why}"))
                .with_details(String::from_utf8_lossy(&stdout))
        };
        let reply = Json::parse(&stdout).and_then(|json| json.decode::<Reply>()).map_err(|e| failed(e.to_string()))?;
        match (reply.cni_version.as_str(), reply.supported_versions.is_empty()) {
            ("", _) => Err(failed("it lacks cniVersion".to_owned())),
            ("0.2.0", true) => Ok(vec!["0.1.0".to_owned(), "0.2.0".to_owned()]),
            (_, true) => Err(failed("it lacks supportedVersions".to_owned())),
            (_, false) => Ok(reply.supported_versions),
        }
    }

    /// That every plugin of the network is there and speaks the network's version. What the network can be given: the
    /// capabilities of its plugins.
    ///
    /// # Errors
    /// All that is wrong.
    pub fn validate<'a>(&self, list: &'a NetworkList) -> Result<Vec<&'a str>> {
        let expected = if list.cni_version().is_empty() { "0.1.0" } else { list.cni_version() };
        let check = |kind: &str| {
            if self.supported_versions(kind)?.iter().any(|version| version == expected) {
                return Ok(());
            }
            let msg = format!("plugin {kind} does not support config version {expected:?}");
            Err(Error::new(Code::INCOMPATIBLE_VERSION, msg))
        };
        let errors = list.plugins().iter().filter_map(|plugin| check(plugin.kind()).err());
        Error::join(errors).map_or_else(|| Ok(list.capabilities()), Err)
    }
}
