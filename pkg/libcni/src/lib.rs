//! The runtime's side of the protocol: what containerd or cnitool does around the plugins.
//!
//! - `folder`, `list`: the networks of `/etc/cni/net.d`.
//! - `members`, `request`: the JSON each plugin gets, everything it does not need to understand
//!   verbatim.
//! - `plugin`: running one plugin for one verb.
//! - `verbs`: [`Runtime`]'s ADD, CHECK, DEL, GC and STATUS of a whole network; `versions`: VERSION.
//! - [`cache`]: what is remembered between them, in the layout of Go's libcni.
//!
//! Nothing here knows a container's kernel state: it finds programs, feeds them, and remembers what
//! they said. Where it departs from Go's libcni: a failed ADD is followed by a DEL of every plugin;
//! a second ADD of an attachment is refused before any plugin runs; CHECK, DEL and GC report what
//! goes wrong with the cache; every program has a deadline.

mod folder;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod list;
mod members;
mod plugin;
mod request;
mod verbs;
mod versions;

pub mod cache;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use cni::AttachmentId;
use cni::machine::Machine;
use cni::rollback::Notes;

pub use cache::Cache;
pub use folder::{ConfFile, ConfFolder};
pub use list::{NetworkList, PluginConf};
pub use members::Members;
pub use verbs::OnError;

/// How long a plugin may take by default. Longer than the longest `delegateTimeout`,
/// because deadlines nest.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(310);

/// A container runtime, as far as CNI is concerned: where plugins and memories are, and how
/// programs are run.
#[derive(Clone, Debug)]
pub struct Runtime<'m> {
    /// Runs the plugins.
    pub machine: &'m dyn Machine,
    /// Where the plugins are: CNI_PATH.
    pub plugin_folders: Vec<PathBuf>,
    /// The variables that plugins inherit; the six of the protocol are replaced.
    pub environment: Vec<(OsString, OsString)>,
    /// The result cache.
    pub cache: Cache,
    /// How long one plugin may take.
    pub timeout: Duration,
    /// Where remarks and the plugins' stderr go.
    pub notes: Notes,
}

/// A container's interface in some network: what the runtime decides about it.
#[derive(Clone, Debug, Default)]
pub struct Attachment {
    /// CNI_CONTAINERID
    pub container_id: String,
    /// CNI_NETNS; empty if there is none (any more).
    pub netns: String,
    /// CNI_IFNAME
    pub ifname: String,
    /// CNI_ARGS
    pub args: Vec<(String, String)>,
    /// The value for each capability; a plugin gets those that it declares.
    pub capability_args: Members,
}

impl Attachment {
    /// Returns its name in `network`.
    pub fn id(&self, network: &str) -> AttachmentId {
        AttachmentId::new(network, &self.container_id, &self.ifname)
    }
}
