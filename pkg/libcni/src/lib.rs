//! The runtime's side of the protocol: it reads the networks' configurations, runs the plugins, and
//! stores their results. cnitool uses it.
//!
//! - `folder`, `list`: the networks of `/etc/cni/net.d`.
//! - `members`, `request`: the JSON that each plugin reads. Keys that the runtime does not know
//!   stay as they were written.
//! - `plugin`: runs one plugin for one verb.
//! - `verbs`: [`Runtime`]'s ADD, CHECK, DEL, GC and STATUS of a whole network; `versions`: VERSION.
//! - [`cache`]: the results of ADD, in the layout of Go's libcni.
//!
//! It differs from Go's libcni: after a failed ADD, every plugin gets a DEL; a second ADD of an
//! attachment is refused before any plugin runs; CHECK, DEL and GC report errors of the cache, as
//! errors or notes; every plugin has a deadline.

mod folder;
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
use cni::skel::Verb;

pub use cache::Cache;
pub use folder::{ConfFile, ConfFolder};
pub use list::{NetworkList, PluginConf};
pub use members::Members;
pub use request::AddedKeys;
pub use verbs::OnError;

/// How long a plugin may take by default. It is longer than the longest `delegateTimeout`, so that
/// a plugin whose IPAM plugin takes too long can report that and clean up.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(310);

/// A container runtime, as far as CNI is concerned: the folders of plugins and results, and the way
/// in which programs are run.
#[derive(Clone, Debug)]
pub struct Runtime<'m> {
    /// Runs the plugins.
    pub machine: &'m dyn Machine,
    /// The folders in which plugins are searched: CNI_PATH.
    pub plugin_folders: Vec<PathBuf>,
    /// The environment variables for plugins. Each call replaces the six of the protocol.
    pub environment: Vec<(OsString, OsString)>,
    /// The result cache.
    pub cache: Cache,
    /// How long one plugin may take.
    pub timeout: Duration,
    /// Receives notes, and what the plugins write to stderr.
    pub notes: Notes,
}

/// The runtime's parameters for one interface of a container. The name of the network is in the
/// [`NetworkList`].
#[derive(Clone, Debug, Default)]
pub struct Attachment {
    /// CNI_CONTAINERID
    pub container_id: String,
    /// CNI_NETNS; empty if the namespace does not exist any more or is not known.
    pub netns: String,
    /// CNI_IFNAME
    pub ifname: String,
    /// CNI_ARGS
    pub args: Vec<(String, String)>,
    /// The value of each capability. A plugin gets the values for the capabilities that it
    /// declares.
    pub capability_args: Members,
}

impl Attachment {
    /// Returns the identifier of this attachment in `network`.
    pub fn id(&self, network: &str) -> AttachmentId {
        AttachmentId::new(network, &self.container_id, &self.ifname)
    }

    /// Returns the variables of the protocol for a call about this attachment, except CNI_PATH.
    pub fn variables(&self, verb: Verb) -> Vec<(OsString, OsString)> {
        let Attachment { container_id, netns, ifname, args, .. } = self;
        let args: Vec<String> = args.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let names = ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"];
        let values = [verb.as_str(), container_id, netns, ifname, &args.join(";")];
        names.into_iter().zip(values).map(|(name, value)| (name.into(), value.into())).collect()
    }
}
