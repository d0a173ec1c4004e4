//! The plugins of this project, which check their own configurations.

use cni::skel::{Plugin, Role};

pub(crate) use cni_multicall::find;

/// Returns the role of the plugin with this `type`, or `None` for a plugin of another project.
pub(crate) fn role(kind: &str) -> Option<Role> {
    find(kind).map(Plugin::role)
}
