//! Parses the arguments and runs the verb.
//!
//! The help, the completions and the man pages are generated from the parser. So the doc comments
//! of the arguments here, in each verb's module and in `call` are texts for operators.

use std::path::PathBuf;

use clap::builder::Resettable;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;
use cni::skel;

use crate::call::{Call, ColorMode, Context, Exit, Failure, Shared, Streams, failed};
use crate::network::Command;
use crate::{doctor, explain, generate, inspect, ipam, metrics, network, rules, schema, validate};

/// Run, see and repair CNI networks by hand
///
/// ---
/// 'cnitool help VERB' prints more.
///
/// Environment:
///   CNI_PATH     the plugins' folders, separated by ':'         [/opt/cni/bin]
///   NETCONFPATH  the networks' folder                           [/etc/cni/net.d]
///   CNI_IFNAME   the interface's name in the namespace          [eth0]
///   CNI_ARGS     KEY=VALUE;KEY=VALUE for the plugins
///   CAP_ARGS     a JSON object with the value of each capability
///
/// Exit codes:
///   0  done; nothing wrong was found
///   1  it failed, or something wrong was found
///   2  the arguments are invalid
///
/// Examples:
///   ip netns add blue
///   cnitool add mynet /run/netns/blue
///   cnitool check mynet /run/netns/blue
///   cnitool del mynet /run/netns/blue
#[derive(Debug, Parser)]
#[command(name = "cnitool", version = cni::release::release(), verbatim_doc_comment)]
#[command(subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    shared: Shared,
}

#[derive(Debug, Subcommand)]
enum Verb {
    #[command(flatten)]
    Network(network::Verb),
    /// List a network's plugins and the versions that they support
    ///
    /// Fails if a plugin is missing or does not support the version of its network.
    /// 'cnitool --version' is cnitool's own version.
    ///
    /// ---
    /// Environment: CNI_PATH, NETCONFPATH
    /// Exit codes: 0 all support it, 1 a plugin does not, 2 the arguments are invalid
    ///
    /// Example:
    ///   cnitool version mynet
    #[command(verbatim_doc_comment)]
    Version(network::Named),
    /// Check networks or their files: every problem, with line and column
    ///
    /// Without arguments, lists the files in the networks' folder: whether each one can
    /// be loaded, and all of its problems. With names, lists only those networks. With
    /// folders, lists their files. With files, or - for stdin, reports their problems.
    /// 'cnitool networks' is the same verb.
    /// With an error every add fails:
    ///   wrong types and values, as each plugin would refuse them; a plugin that needs
    ///   the result of an earlier one; a gateway that no address reaches; a plugin that
    ///   is not installed; something that the plugins need and this host's kernel or
    ///   tools do not have, according to the plugins' STATUS.
    /// With a warning an add works, but perhaps not as intended:
    ///   unknown keys (with a similar known key), duplicate keys, capabilities that no
    ///   plugin uses; addresses and host ports that another network uses too.
    /// The keys of plugins of other projects are not checked.
    ///
    /// ---
    /// Environment: CNI_PATH, NETCONFPATH
    /// Exit codes: 0 no error (with --strict: and no warning), 1 at least one,
    ///             2 the arguments are invalid
    ///
    /// An argument with a '/' is a file or folder. Without one, a configured network is
    /// preferred to a file in the working directory.
    ///
    /// Examples:
    ///   cnitool validate
    ///   cnitool validate mynet
    ///   cnitool validate --file-only ./new.conflist
    ///   cnitool validate - < new.conflist
    #[command(visible_alias = "networks", verbatim_doc_comment)]
    Validate(validate::Validate),
    /// Print the JSON Schema of a network, or of one plugin's keys
    ///
    /// Prints the JSON Schema of a network, or with a plugin that of the plugin's keys.
    /// It is made from the plugins' own code and refuses unknown keys, which the plugins
    /// ignore. Editors can complete and check a network's file with it.
    ///
    /// ---
    /// Examples:
    ///   cnitool schema > network.schema.json
    ///   cnitool schema bridge
    #[command(verbatim_doc_comment)]
    Schema(schema::Schema),
    /// Look for problems of the node; each is printed with the command that fixes it
    ///
    /// Checks the networks' files, the plugins and who may change them, the plugins'
    /// own STATUS, how full the ranges are, forwarding, links, MTUs, rp_filter,
    /// policies that drop what containers send, br_netfilter, mixed variants of
    /// iptables, the table of connections, and leftovers. Changes nothing.
    ///
    /// ---
    /// Run it in the host's network namespace. Read each suggested command before you
    /// run it.
    ///
    /// Environment: CNI_PATH, NETCONFPATH
    /// Exit codes: 0 nothing wrong was found; 1 something was, or it failed;
    ///             2 the arguments are invalid
    ///
    /// Example:
    ///   cnitool doctor
    #[command(verbatim_doc_comment)]
    Doctor,
    /// Print figures for Prometheus: addresses, attachments, leftovers, findings, leases
    ///
    /// Prints figures of this node in Prometheus' text format, or writes them into a file
    /// for node_exporter's textfile collector. Run it as root in the host's network
    /// namespace.
    ///
    /// ---
    /// Environment: CNI_PATH, NETCONFPATH
    /// Exit codes: 0 printed; 1 failed, or a part could not be read;
    ///             2 the arguments are invalid
    ///
    /// Examples:
    ///   cnitool metrics
    ///   cnitool metrics --textfile /var/lib/prometheus/node-exporter/cni.prom
    #[command(verbatim_doc_comment)]
    Metrics(metrics::MetricsArgs),
    /// Show what exists of each attachment in the kernel, and leftovers
    ///
    /// Shows for each attachment that a runtime or cnitool has stored: the links on the
    /// host and in the container, addresses, routes, rules, the reservation, and the
    /// values that tuning has saved. A '!' marks a difference from the result of the
    /// add. Then shows the leftovers of other attachments, each with the command
    /// that removes it. Changes nothing.
    ///
    /// The objects of an add that is still running look like leftovers: repeat the
    /// command before you remove them. 'cnitool check' runs the plugins' own checks.
    ///
    /// ---
    /// Run it in the host's network namespace.
    ///
    /// Environment: NETCONFPATH
    /// Exit codes: 0 nothing differs or is left over; 1 something does, or it failed;
    ///             2 the arguments are invalid
    ///
    /// Examples:
    ///   cnitool inspect
    ///   cnitool inspect mynet
    ///   cnitool inspect mynet 0123
    #[command(verbatim_doc_comment)]
    Inspect(inspect::Inspect),
    /// Run a verb and print each step of its plugins, and the request that failed
    ///
    /// Runs add, check, del, gc or status, and does everything that the verb does.
    /// Prints for each plugin its steps, in the order in which they ended, with their
    /// durations in milliseconds: requests to the kernel, files, programs, and the
    /// steps of its delegates. A '!' marks the step that made a plugin fail, with the
    /// request itself. An error without a '!' is harmless, for example when a plugin
    /// finds out whether a link exists. The verb's own result follows.
    ///
    /// ---
    /// 'cnitool explain help VERB' prints a verb's arguments. Of plugins that
    /// write no log, such as Go's, only the duration is shown.
    ///
    /// Environment and exit codes: the verb's
    ///
    /// Examples:
    ///   cnitool explain add mynet /run/netns/blue
    ///   cnitool explain del mynet /run/netns/blue --json
    #[command(verbatim_doc_comment)]
    Explain(explain::Explain),
    /// See and repair the address reservations of host-local
    ///
    /// ---
    /// 'cnitool ipam help VERB' prints more.
    ///
    /// Environment: NETCONFPATH
    /// Exit codes: 0 done, 1 failed or refused, 2 the arguments are invalid
    ///
    /// Examples:
    ///   cnitool ipam list
    ///   cnitool ipam show mynet
    ///   cnitool ipam gc mynet --dry-run
    ///   cnitool ipam release mynet 10.61.0.7
    ///   cnitool ipam dhcp
    #[command(verbatim_doc_comment)]
    Ipam(ipam::Ipam),
    /// Write packet filter rules again that another program has removed
    ///
    /// ---
    /// 'cnitool rules help VERB' prints more.
    ///
    /// Example:
    ///   cnitool rules restore --dry-run
    #[command(verbatim_doc_comment)]
    Rules(rules::Rules),
    /// Print the completions for a shell
    ///
    /// ---
    /// Examples:
    ///   cnitool completions bash > /usr/share/bash-completion/completions/cnitool
    ///   cnitool completions zsh > /usr/local/share/zsh/site-functions/_cnitool
    ///   cnitool completions fish > ~/.config/fish/completions/cnitool.fish
    #[command(verbatim_doc_comment)]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the names that the completions add
    #[command(hide = true)]
    Complete {
        /// The words before the one that is completed, without the program's name
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Write the man pages into a folder
    ///
    /// Writes cnitool.1, and a page for each verb (cnitool-add.1).
    ///
    /// ---
    /// Example:
    ///   cnitool man /usr/local/share/man/man1
    #[command(verbatim_doc_comment)]
    Man {
        /// The folder, which is created if it does not exist
        #[arg(value_hint = clap::ValueHint::DirPath)]
        dir: PathBuf,
    },
}

/// Returns the parser.
fn parser() -> clap::Command {
    with_texts(Cli::command()).mut_subcommands(|verb| match verb.get_name() {
        "explain" => verb.mut_subcommands(explain::describe),
        _ => verb,
    })
}

/// Divides the doc comments of a command and of the verbs below it: what is behind `---` is printed
/// after the options.
fn with_texts(command: clap::Command) -> clap::Command {
    let texts = command.get_long_about().map(ToString::to_string).unwrap_or_default();
    let command = match texts.split_once("\n\n---\n") {
        Some((description, after)) if description.contains("\n\n") => {
            command.long_about(description.to_owned()).after_help(after.to_owned())
        }
        Some((_, after)) => command.long_about(Resettable::Reset).after_help(after.to_owned()),
        None => command,
    };
    command.mut_subcommands(with_texts)
}

/// Gives the help of a verb and of the verbs below it the same layout for -h and --help. The
/// description's first paragraph is also the text in the list of verbs.
fn with_layout(command: clap::Command) -> clap::Command {
    const TEMPLATE: &str = "{about}\n\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";
    let description = command.get_long_about().map(ToString::to_string).unwrap_or_default();
    let command = match description.split_once("\n\n") {
        Some((_, others)) => command.long_about(Resettable::Reset).before_help(others.to_owned()),
        None => command,
    };
    command.help_template(TEMPLATE).mut_subcommands(with_layout)
}

/// Parses the arguments and runs the verb, which prints its result. The caller prints a failure.
pub(crate) fn run(call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let parser_failure = |error| Failure::Parser(Box::new(error));
    let args = std::iter::once("cnitool".into()).chain(call.args.iter().cloned());
    let matches = with_layout(parser()).try_get_matches_from(args).map_err(parser_failure)?;
    let Cli { verb, shared } = Cli::from_arg_matches(&matches).map_err(parser_failure)?;
    match shared.color.as_deref() {
        Some("always") => (streams.stdout_style, streams.stderr_style) = (ColorMode::Coloured, ColorMode::Coloured),
        Some("never") => (streams.stdout_style, streams.stderr_style) = (ColorMode::Plain, ColorMode::Plain),
        _ => {} // the streams decide
    }
    let context = Context { shared, call, notes: streams.notes.clone() };
    let (subject, outcome) = match verb {
        // These verbs have names of their own in their failures.
        Verb::Network(verb) => return network::run(&Command::new(verb)?, &context, streams),
        Verb::Version(args) => {
            return network::run(&Command::of_network(skel::Verb::Version, args.network), &context, streams);
        }
        Verb::Explain(args) => return explain::run(args, context, streams),
        Verb::Ipam(args) => return ipam::run(&args, &context, streams),
        Verb::Validate(args) => ("validate", validate::run(&args, &context, streams)),
        Verb::Schema(args) => ("schema", schema::run(&args, streams)),
        Verb::Doctor => ("doctor", doctor::run(&context, streams)),
        Verb::Metrics(args) => ("metrics", metrics::run(&args, &context, streams)),
        Verb::Inspect(args) => ("inspect", inspect::run(&args, &context, streams)),
        Verb::Rules(args) => ("rules restore", rules::run(&args, &context, streams)),
        Verb::Completions { shell } => ("completions", generate::completions(shell, with_layout(parser()), streams)),
        Verb::Complete { words } => ("complete", generate::complete(&words, &context, streams)),
        Verb::Man { dir } => ("man", generate::man(&dir, parser())),
    };
    outcome.map_err(|error| failed(subject, error, context.format()))
}
