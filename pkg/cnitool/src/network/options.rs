//! The arguments of the network verbs.

use std::ffi::OsString;

use clap::Args;

use crate::cli::{Failure, Shared};

/// A verb with its arguments.
#[derive(Debug)]
pub(crate) struct Command {
    pub(super) verb: &'static str,
    pub(super) network: String,
    pub(super) netns: Option<OsString>,
    pub(super) ifname: Option<String>,
    pub(super) container_id: Option<String>,
    /// del: go on after an error.
    pub(super) keep_going: bool,
    /// gc: (container ID, interface name) that are valid whatever became of their namespace.
    pub(super) keep: Vec<(String, String)>,
    /// gc: even if nothing is valid.
    pub(super) all: bool,
    /// gc: only tell.
    pub(super) dry_run: bool,
    pub(super) shared: Shared,
}

/// The arguments of `add` and `check`.
#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// The network's name
    network: String,
    /// The path of a network namespace; it stands for a container
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
    /// The path of the network namespace, or the one it had
    #[arg(value_hint = clap::ValueHint::FilePath, required_unless_present = "container_id")]
    netns: Option<OsString>,
    #[command(flatten)]
    interface: Interface,
    /// Ask every plugin even after an error, and tell all errors
    #[arg(long)]
    keep_going: bool,
}

/// Which interface of which container.
#[derive(Debug, Args)]
pub(crate) struct Interface {
    /// The interface's name in the namespace [CNI_IFNAME, else eth0]
    #[arg(long, short, value_name = "NAME")]
    ifname: Option<String>,
    /// The container's ID [cnitool- and 20 digits of NETNS's SHA-512]
    #[arg(long, value_name = "ID")]
    container_id: Option<String>,
}

/// The arguments of `gc`.
#[derive(Debug, Args)]
pub(crate) struct Collect {
    /// The network's name
    network: String,
    /// Ignored; Go's cnitool wants one for every verb
    #[arg(hide = true)]
    netns: Option<OsString>,
    /// This attachment is valid; can be repeated
    #[arg(long, value_name = "ID/IFNAME", value_parser = attachment)]
    keep: Vec<(String, String)>,
    /// Go on even if that removes everything, or a file does not tell whose it is
    #[arg(long)]
    all: bool,
    /// Tell what would be removed and change nothing
    #[arg(long)]
    dry_run: bool,
}

/// The arguments of `status` and `version`.
#[derive(Debug, Args)]
pub(crate) struct Named {
    /// The network's name
    network: String,
    /// Ignored; Go's cnitool wants one for every verb
    #[arg(hide = true)]
    netns: Option<OsString>,
}

impl Command {
    /// Returns the object of the call, for errors.
    pub(crate) fn subject(&self) -> String {
        format!("{} {}", self.verb, self.network)
    }

    fn new(verb: &'static str, network: String, shared: Shared) -> Command {
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
            shared,
        }
    }
}

impl Attach {
    /// The command `add` or `check`.
    ///
    /// # Errors
    /// The path is empty.
    pub(crate) fn command(self, verb: &'static str, shared: Shared) -> Result<Command, Failure> {
        let Attach { network, netns, interface: Interface { ifname, container_id } } = self;
        if netns.is_empty() {
            return Err(Failure::Usage { verb, msg: "the path of a network namespace is expected".to_owned() });
        }
        Ok(Command { netns: Some(netns), ifname, container_id, ..Command::new(verb, network, shared) })
    }
}

impl Detach {
    /// The command `del`.
    ///
    /// # Errors
    /// The path is empty, and there is no ID either.
    pub(crate) fn command(self, shared: Shared) -> Result<Command, Failure> {
        let Detach { network, netns, interface: Interface { ifname, container_id }, keep_going } = self;
        let netns = netns.filter(|path| !path.is_empty());
        if netns.is_none() && container_id.is_none() {
            let msg = "the path of the network namespace or --container-id is expected".to_owned();
            return Err(Failure::Usage { verb: "del", msg });
        }
        Ok(Command { netns, ifname, container_id, keep_going, ..Command::new("del", network, shared) })
    }
}

impl Collect {
    /// The command `gc`.
    pub(crate) fn command(self, shared: Shared) -> Command {
        let Collect { network, netns: _, keep, all, dry_run } = self;
        Command { keep, all, dry_run, ..Command::new("gc", network, shared) }
    }
}

impl Named {
    /// The command `status` or `version`.
    pub(crate) fn command(self, verb: &'static str, shared: Shared) -> Command {
        Command::new(verb, self.network, shared)
    }
}

fn attachment(text: &str) -> Result<(String, String), &'static str> {
    match text.split_once('/') {
        Some((id, ifname)) if !id.is_empty() && !ifname.is_empty() => Ok((id.to_owned(), ifname.to_owned())),
        _ => Err("CONTAINER-ID/IFNAME is expected"),
    }
}
