//! Defines the arguments of `add`, `check`, `del`, `gc`, `status` and `version`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use cni::skel::Verb;

use crate::call::{Failure, Shared};

/// A verb of a network with its arguments.
#[derive(Debug)]
pub(crate) struct Command {
    pub(super) verb: Verb,
    /// The network's name; empty for all networks.
    pub(super) network: String,
    /// The path of the namespace as the user gave it, which may be relative.
    pub(super) netns: Option<OsString>,
    pub(super) ifname: Option<String>,
    pub(super) container_id: Option<String>,
    /// del: whether the other plugins are called after an error.
    pub(super) keep_going: bool,
    /// gc: the container IDs and interface names of attachments that are kept even without a
    /// namespace.
    pub(super) keep: Vec<(String, String)>,
    /// gc: whether it runs even if no attachment is valid or a cache entry cannot be read.
    pub(super) all: bool,
    /// gc: whether it only prints what would be removed.
    pub(super) dry_run: bool,
    /// gc: how it finds the attachments that it may remove.
    pub(super) sweep: SweepOptions,
    pub(super) shared: Shared,
}

/// The arguments of `add` and `check`.
#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// The network's name
    network: String,
    /// The path of the container's network namespace
    #[arg(value_hint = clap::ValueHint::FilePath)]
    netns: OsString,
    #[command(flatten)]
    interface: Interface,
}

/// The arguments of `del`.
#[derive(Debug, Args)]
pub(crate) struct Detach {
    /// The network's name
    network: String,
    /// The path of the network namespace, which need not exist any more
    #[arg(value_hint = clap::ValueHint::FilePath, required_unless_present = "container_id")]
    netns: Option<OsString>,
    #[command(flatten)]
    interface: Interface,
    /// Call the other plugins even after an error, and print all errors
    #[arg(long)]
    keep_going: bool,
}

/// The arguments that select the interface and the container.
#[derive(Debug, Args)]
pub(crate) struct Interface {
    /// The interface's name in the namespace [default: CNI_IFNAME or eth0]
    #[arg(long, short, value_name = "NAME")]
    ifname: Option<String>,
    /// The container's ID [default: derived from NETNS]
    #[arg(long, value_name = "ID")]
    container_id: Option<String>,
}

/// The arguments of `gc`.
#[derive(Debug, Args)]
pub(crate) struct Collect {
    /// The network's name [all configured and cached networks]
    network: Option<String>,
    /// Ignored; Go's cnitool requires it for every verb
    #[arg(hide = true)]
    netns: Option<OsString>,
    /// Keep this attachment; can be repeated
    #[arg(long, value_name = "ID/IFNAME", value_parser = parse_attachment)]
    keep: Vec<(String, String)>,
    /// Run even if no attachment is valid, or a cache entry cannot be read
    #[arg(long)]
    all: bool,
    /// Print what would be removed, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    sweep: SweepOptions,
}

/// The arguments of `gc` without a network or with a list of valid attachments.
#[derive(Debug, Default, Args)]
pub(crate) struct SweepOptions {
    /// The valid ones: ID/IFNAME lines or 'crictl pods -o json'; - is stdin
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(super) valid_from: Option<PathBuf>,
    /// Keep younger attachments, except those whose namespace is gone [600]
    #[arg(long, value_name = "SECONDS")]
    pub(super) min_age: Option<u64>,
    /// Also remove attachments that no result cache has, or of unknown age
    #[arg(long)]
    pub(super) unknown: bool,
    /// Also run the plugins' GC; no add may run meanwhile
    #[arg(long)]
    pub(super) plugins: bool,
}

/// The arguments of `status` and `version`.
#[derive(Debug, Args)]
pub(crate) struct Named {
    /// The network's name [all configured networks]
    network: Option<String>,
    /// Ignored; Go's cnitool requires it for every verb
    #[arg(hide = true)]
    netns: Option<OsString>,
}

impl Command {
    /// Returns the verb's name on the command line.
    pub(super) fn verb_name(&self) -> String {
        self.verb.as_str().to_ascii_lowercase()
    }

    /// Whether a gc finds attachments in all places and removes each by its own DEL, instead of
    /// running the plugins' GC of one network.
    pub(super) fn sweeps(&self) -> bool {
        let SweepOptions { valid_from, min_age, unknown, plugins } = &self.sweep;
        self.network.is_empty() || valid_from.is_some() || min_age.is_some() || *unknown || *plugins
    }

    /// Returns the verb and the network's name, if it has one, for error messages.
    pub(crate) fn subject(&self) -> String {
        format!("{} {}", self.verb_name(), self.network).trim_end().to_owned()
    }

    /// Returns a command with default options.
    fn new(verb: Verb, network: String, shared: Shared) -> Command {
        Command {
            verb,
            network,
            netns: None,
            ifname: None,
            container_id: None,
            keep_going: false,
            keep: Vec::new(),
            all: false,
            dry_run: false,
            sweep: SweepOptions::default(),
            shared,
        }
    }
}

impl Attach {
    /// Converts the arguments to the command `verb`, which is `Add` or `Check`.
    ///
    /// # Errors
    /// [`Failure::Usage`] if the path is empty.
    pub(crate) fn into_command(self, verb: Verb, shared: Shared) -> Result<Command, Failure> {
        let Attach { network, netns, interface: Interface { ifname, container_id } } = self;
        if netns.is_empty() {
            let msg = "the path of a network namespace is expected".to_owned();
            return Err(Failure::Usage { verb: verb.as_str().to_ascii_lowercase(), msg });
        }
        Ok(Command { netns: Some(netns), ifname, container_id, ..Command::new(verb, network, shared) })
    }
}

impl Detach {
    /// Converts the arguments to the command `del`. Treats an empty path like a missing path.
    ///
    /// # Errors
    /// [`Failure::Usage`] if there is neither a path nor a container ID.
    pub(crate) fn into_command(self, shared: Shared) -> Result<Command, Failure> {
        let Detach { network, netns, interface: Interface { ifname, container_id }, keep_going } = self;
        let netns = netns.filter(|path| !path.is_empty());
        if netns.is_none() && container_id.is_none() {
            let msg = "the path of the network namespace or --container-id is expected".to_owned();
            return Err(Failure::Usage { verb: "del".to_owned(), msg });
        }
        Ok(Command { netns, ifname, container_id, keep_going, ..Command::new(Verb::Del, network, shared) })
    }
}

impl Collect {
    /// Converts the arguments to the command `gc`.
    pub(crate) fn into_command(self, shared: Shared) -> Command {
        let Collect { network, netns: _, keep, all, dry_run, sweep } = self;
        let shared = if network.is_none() { shared.with_multus() } else { shared };
        Command { keep, all, dry_run, sweep, ..Command::new(Verb::Gc, network.unwrap_or_default(), shared) }
    }
}

impl Named {
    /// Converts the arguments to the command `verb`, which is `Status` or `Version`.
    pub(crate) fn into_command(self, verb: Verb, shared: Shared) -> Command {
        Command::new(verb, self.network.unwrap_or_default(), shared)
    }
}

/// Parses a value of `--keep`: a container ID and an interface name.
fn parse_attachment(text: &str) -> Result<(String, String), &'static str> {
    match text.split_once('/') {
        Some((id, ifname)) if !id.is_empty() && !ifname.is_empty() => Ok((id.to_owned(), ifname.to_owned())),
        _ => Err("CONTAINER-ID/IFNAME is expected"),
    }
}
