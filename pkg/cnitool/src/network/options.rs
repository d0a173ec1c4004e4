//! Defines the arguments of `add`, `check`, `del`, `gc`, `status` and `version`.

use std::ffi::OsString;

use clap::{Args, Subcommand};
use cni::skel;

use crate::call::Failure;

/// The verbs of a network that run its plugins.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Attach a network namespace to a network; prints the result
    ///
    /// Runs ADD of the network's plugins in order, prints the result of the last one
    /// and stores it for check, del and gc. If a plugin fails, DEL of every plugin is
    /// run, so that nothing is left over, and all errors are printed.
    ///
    /// ---
    /// Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
    /// Exit codes: 0 attached, 1 failed, 2 the arguments are invalid
    ///
    /// Examples:
    ///   cnitool add mynet /run/netns/blue
    ///   cnitool add mynet /run/netns/blue -i eth1
    ///   export CAP_ARGS='{
    ///     "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
    ///   }'
    ///   cnitool add mynet /run/netns/blue
    #[command(verbatim_doc_comment)]
    Add(Attach),
    /// Check that an attachment is as add left it
    ///
    /// Runs CHECK of the network's plugins in order until one fails. CNI_ARGS and
    /// CAP_ARGS are those of the add unless they are given again. Needs a network of
    /// CNI version 0.4.0 or newer. Prints nothing if it succeeds.
    ///
    /// ---
    /// Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
    /// Exit codes: 0 no difference (or disableCheck is set), 1 a difference,
    ///             2 the arguments are invalid
    ///
    /// Example:
    ///   cnitool check mynet /run/netns/blue
    #[command(verbatim_doc_comment)]
    Check(Attach),
    /// Detach a network namespace; succeeds if it is not attached any more
    ///
    /// Runs DEL of the network's plugins in reverse. It stops at the first error and
    /// can then be repeated. The namespace need not exist any more: give the path it
    /// had, or --container-id. CNI_ARGS and CAP_ARGS are those of the add unless they
    /// are given again. If the network is not configured any more, the configuration
    /// that was stored at the add is used. Prints nothing if it succeeds.
    ///
    /// ---
    /// Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
    /// Exit codes: 0 detached, or was not attached; 1 failed;
    ///             2 the arguments are invalid
    ///
    /// Examples:
    ///   cnitool del mynet /run/netns/blue
    ///   cnitool del mynet --container-id 0123456789ab --keep-going
    #[command(verbatim_doc_comment)]
    Del(Detach),
    /// Remove everything of attachments that are not valid any more
    ///
    /// With a network: removes everything of it that belongs to no valid attachment. An
    /// attachment is valid if --keep names it, or if cnitool has stored it and its
    /// namespace exists. Stored attachments that are not valid get a full DEL. Then
    /// every plugin removes its other addresses, rules and interfaces. If a container
    /// runtime uses the same network, name its attachments with --keep, or theirs are
    /// removed too. Do not run another add or del of the network at the same time.
    ///
    /// Without a network: looks for attachments to all networks of the configuration
    /// folder and of the result caches, also that of Multus. Each one whose namespace is
    /// gone gets a full DEL. A runtime may add and delete attachments meanwhile. The
    /// other things of a network are only removed with --plugins.
    ///
    /// With --valid-from, an attachment that the runtime or list does not name gets a full
    /// DEL even if its namespace exists, unless it is younger than --min-age: a runtime
    /// lists a pod only some time after its ADD. A socket is that of containerd, CRI-O or
    /// another runtime of Kubernetes (CRI). A list has the JSON of 'crictl pods -o json',
    /// or a line ID/IFNAME for each attachment. Name every runtime of this node. If one
    /// does not answer or a list cannot be read in full, nothing is changed.
    ///
    /// ---
    /// Environment: CNI_PATH, NETCONFPATH
    /// Exit codes: 0 done, 1 failed or refused without --all,
    ///             2 the arguments are invalid
    ///
    /// Examples:
    ///   cnitool gc --dry-run
    ///   cnitool gc --valid-from unix:///run/containerd/containerd.sock --every 600
    ///   crictl pods -o json | cnitool gc --valid-from -
    ///   cnitool gc mynet --dry-run
    ///   cnitool gc mynet --keep 0123456789ab/eth0
    ///   cnitool gc mynet --all
    #[command(verbatim_doc_comment)]
    Gc(Collect),
    /// Check that the plugins can handle an add
    ///
    /// Runs STATUS of the plugins of the network, or of each configured network, in
    /// order until one is not ready. A network of a CNI version below 1.1.0 has no
    /// STATUS and counts as ready.
    ///
    /// ---
    /// Environment: CNI_PATH, NETCONFPATH
    /// Exit codes: 0 ready, 1 not ready (with its CNI code: 50, 51, ...),
    ///             2 the arguments are invalid
    ///
    /// Example:
    ///   cnitool status mynet --json
    #[command(verbatim_doc_comment)]
    Status(Named),
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
#[derive(Debug, Default, Args)]
pub(super) struct Interface {
    /// The interface's name in the namespace [default: CNI_IFNAME or eth0]
    #[arg(long, short, value_name = "NAME")]
    pub(super) ifname: Option<String>,
    /// The container's ID [default: derived from NETNS]
    #[arg(long, value_name = "ID")]
    pub(super) container_id: Option<String>,
}

/// The arguments of `gc`.
#[derive(Debug, Default, Args)]
pub(crate) struct Collect {
    /// The network's name [all configured and cached networks]
    network: Option<String>,
    /// Ignored; Go's cnitool requires it for every verb
    #[arg(hide = true)]
    netns: Option<OsString>,
    /// Keep this attachment; can be repeated
    #[arg(long, value_name = "ID/IFNAME", value_parser = parse_attachment)]
    pub(super) keep: Vec<(String, String)>,
    /// Run even if no attachment is valid, or a cache entry cannot be read
    #[arg(long)]
    pub(super) all: bool,
    /// Print what would be removed, and change nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// The valid ones: a runtime's socket, or a list; - is stdin; can be repeated
    #[arg(long, value_name = "unix://SOCKET|FILE", value_hint = clap::ValueHint::FilePath)]
    pub(super) valid_from: Vec<String>,
    /// Keep younger attachments, except those whose namespace is gone [600]
    #[arg(long, value_name = "SECONDS")]
    pub(super) min_age: Option<u64>,
    /// Also remove attachments that no result cache has, or of unknown age
    #[arg(long)]
    pub(super) unknown: bool,
    /// Also run the plugins' GC; no add may run meanwhile
    #[arg(long)]
    pub(super) plugins: bool,
    /// Run again after this time, also after errors, until SIGTERM
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) every: Option<u64>,
}

/// The arguments of `status` and `version`.
#[derive(Debug, Args)]
pub(crate) struct Named {
    /// The network's name [all configured networks]
    pub(crate) network: Option<String>,
    /// Ignored; Go's cnitool requires it for every verb
    #[arg(hide = true)]
    netns: Option<OsString>,
}

/// A verb of a network with its arguments.
#[derive(Debug)]
pub(crate) struct Command {
    pub(super) verb: skel::Verb,
    /// The network's name; empty for all networks.
    pub(super) network: String,
    /// The path of the namespace as the user gave it, which may be relative.
    pub(super) netns: Option<OsString>,
    pub(super) interface: Interface,
    /// del: whether the other plugins are called after an error.
    pub(super) keep_going: bool,
    pub(super) gc: Collect,
}

impl Command {
    /// Returns the command for a verb's arguments. An empty path counts as a missing path.
    ///
    /// # Errors
    /// [`Failure::Usage`] if the path is missing, for `del` without a container ID; if a repeated
    /// gc reads stdin.
    pub(crate) fn new(verb: Verb) -> Result<Command, Failure> {
        let attach = |verb, Attach { network, netns, interface }| Command {
            netns: Some(netns),
            interface,
            ..Command::of_network(verb, Some(network))
        };
        let mut command = match verb {
            Verb::Add(args) => attach(skel::Verb::Add, args),
            Verb::Check(args) => attach(skel::Verb::Check, args),
            Verb::Del(Detach { network, netns, interface, keep_going }) => {
                Command { netns, interface, keep_going, ..Command::of_network(skel::Verb::Del, Some(network)) }
            }
            Verb::Status(args) => return Ok(Command::of_network(skel::Verb::Status, args.network)),
            Verb::Gc(gc) => {
                if gc.every.is_some() && gc.valid_from.iter().any(|place| place == "-") {
                    let msg = "stdin can be read only once: --valid-from - and --every exclude each other".to_owned();
                    return Err(Failure::Usage { verb: "gc".to_owned(), msg });
                }
                let network = gc.network.clone();
                return Ok(Command { gc, ..Command::of_network(skel::Verb::Gc, network) });
            }
        };
        command.netns = command.netns.filter(|path| !path.is_empty());
        let msg = match command.verb {
            _ if command.netns.is_some() => return Ok(command),
            skel::Verb::Del if command.interface.container_id.is_some() => return Ok(command),
            skel::Verb::Del => "the path of the network namespace or --container-id is expected",
            _ => "the path of a network namespace is expected",
        };
        Err(Failure::Usage { verb: command.verb_name(), msg: msg.to_owned() })
    }

    /// Returns a command with default options.
    pub(crate) fn of_network(verb: skel::Verb, network: Option<String>) -> Command {
        let (network, interface, gc) = (network.unwrap_or_default(), Interface::default(), Collect::default());
        Command { verb, network, netns: None, interface, keep_going: false, gc }
    }

    /// Returns the verb's name on the command line.
    pub(super) fn verb_name(&self) -> String {
        self.verb.as_str().to_ascii_lowercase()
    }

    /// Whether a gc finds attachments in all places and removes each by its own DEL, instead of
    /// running the plugins' GC of one network.
    pub(super) fn sweeps(&self) -> bool {
        let Collect { valid_from, min_age, unknown, plugins, .. } = &self.gc;
        self.network.is_empty() || !valid_from.is_empty() || min_age.is_some() || *unknown || *plugins
    }

    /// Whether the verb runs again and again until a signal arrives.
    pub(crate) fn is_repeated(&self) -> bool {
        self.gc.every.is_some()
    }

    /// Returns the verb and the network's name, if it has one, for error messages.
    pub(crate) fn subject(&self) -> String {
        format!("{} {}", self.verb_name(), self.network).trim_end().to_owned()
    }
}

/// Parses a value of `--keep` or a line of a list: a container ID and an interface name.
pub(super) fn parse_attachment(text: &str) -> Result<(String, String), &'static str> {
    match text.split_once('/') {
        Some((id, ifname)) if !id.is_empty() && !ifname.is_empty() => Ok((id.to_owned(), ifname.to_owned())),
        _ => Err("CONTAINER-ID/IFNAME is expected"),
    }
}
