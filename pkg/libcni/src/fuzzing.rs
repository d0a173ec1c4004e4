//! Gives pkg/cni-fuzz access to the function that writes a plugin's configuration.

use serde_json::value::RawValue;

use super::list::{NetworkList, PluginConf};
use super::members::Members;
use super::request::{AddedKeys, build_request};
use cni::Result;
use cni::config::ValidAttachments;

/// Returns the configuration that one plugin of a list reads on its stdin.
///
/// # Errors
/// Code 999, which does not happen.
pub fn request(
    list: &NetworkList,
    plugin: &PluginConf,
    prev_result: Option<&RawValue>,
    capability_args: Option<&Members>,
    valid: Option<&ValidAttachments>,
) -> Result<Vec<u8>> {
    build_request(list, plugin, AddedKeys { prev_result, capability_args, valid })
}
