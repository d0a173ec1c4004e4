//! The plugins of this project, by whose own reading configurations are judged.

use cni::skel::{Plugin, Role};

pub(crate) use cni_multicall::find;

/// Returns the role of the plugin of that `type`, unless it is another project's.
pub(crate) fn role(kind: &str) -> Option<Role> {
    find(kind).map(Plugin::role)
}
