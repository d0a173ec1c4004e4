//! The plugins of this project, which check their own configurations.

use cni::skel::{Plugin, Role};
use serde_json::Value;

pub(crate) use cni_multicall::find;

/// Returns `ipam.type` of a plugin's configuration, or the empty string if there is none. Returns
/// the empty string for flannel too: its IPAM plugin gets another `ipam`, with ranges that only the
/// node's subnet file has.
pub(crate) fn ipam_type(object: &Value) -> &str {
    if object["type"] == "flannel" { "" } else { object["ipam"]["type"].as_str().unwrap_or_default() }
}

/// Returns the role of the plugin with this `type`, or `None` for a plugin of another project.
pub(crate) fn role(kind: &str) -> Option<Role> {
    find(kind).map(Plugin::role)
}
