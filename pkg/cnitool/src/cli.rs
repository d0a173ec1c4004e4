//! Parses the arguments and runs the verb.
//!
//! The help, the completions and the man pages are generated from the parser. So the doc comments
//! of the arguments here, in each verb's module and in `call` are texts for operators.

use clap::builder::Resettable;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::call::{Call, Context, Exit, Failure, Shared, Streams, failed};
use crate::{doctor, explain, generate, help, inspect, ipam, metrics, network, rules, schema, validate};

/// Run, see and repair CNI networks by hand
#[derive(Debug, Parser)]
#[command(name = "cnitool", version = cni::release::release(), about = "Run, see and repair CNI networks by hand", after_help = help::AFTER_OVERVIEW)]
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
    #[command(verbatim_doc_comment, after_help = help::AFTER_VERSION)]
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
    #[command(visible_alias = "networks", verbatim_doc_comment, after_help = help::AFTER_VALIDATE)]
    Validate(validate::Validate),
    /// Print the JSON Schema of a network, or of one plugin's keys
    ///
    /// Prints the JSON Schema of a network, or with a plugin that of the plugin's keys.
    /// It is made from the plugins' own code and refuses unknown keys, which the plugins
    /// ignore. Editors can complete and check a network's file with it.
    #[command(verbatim_doc_comment, after_help = help::AFTER_SCHEMA)]
    Schema(schema::Schema),
    /// Look for problems of the node; each is printed with the command that fixes it
    ///
    /// Checks the networks' files, the plugins and who may change them, the plugins'
    /// own STATUS, how full the ranges are, forwarding, links, MTUs, rp_filter,
    /// policies that drop what containers send, br_netfilter, mixed variants of
    /// iptables, the table of connections, and leftovers. Changes nothing.
    #[command(verbatim_doc_comment, after_help = help::AFTER_DOCTOR)]
    Doctor,
    /// Print figures for Prometheus: addresses, attachments, leftovers, findings, leases
    ///
    /// Prints figures of this node in Prometheus' text format, or writes them into a file
    /// for node_exporter's textfile collector. Run it as root in the host's network
    /// namespace.
    #[command(verbatim_doc_comment, after_help = help::AFTER_METRICS)]
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
    #[command(verbatim_doc_comment, after_help = help::AFTER_INSPECT)]
    Inspect(inspect::Inspect),
    /// Run a verb and print each step of its plugins, and the request that failed
    ///
    /// Runs add, check, del, gc or status, and does everything that the verb does.
    /// Prints for each plugin its steps, in the order in which they ended, with their
    /// durations in milliseconds: requests to the kernel, files, programs, and the
    /// steps of its delegates. A '!' marks the step that made a plugin fail, with the
    /// request itself. An error without a '!' is harmless, for example when a plugin
    /// finds out whether a link exists. The verb's own result follows.
    #[command(verbatim_doc_comment, after_help = help::AFTER_EXPLAIN)]
    Explain(explain::Explain),
    /// See and repair the address reservations of host-local
    Ipam(ipam::Ipam),
    /// Write packet filter rules again that another program has removed
    Rules(rules::Rules),
    /// Print the completions for a shell
    #[command(after_help = help::AFTER_COMPLETIONS)]
    Completions(generate::Completions),
    /// Print the names that the completions add
    #[command(hide = true)]
    Complete(generate::Complete),
    /// Write the man pages into a folder
    ///
    /// Writes cnitool.1, and a page for each verb (cnitool-add.1).
    #[command(verbatim_doc_comment, after_help = help::AFTER_MAN)]
    Man(generate::ManArgs),
}

/// Returns the parser. A verb's description is its doc comment.
fn parser() -> clap::Command {
    Cli::command().mut_subcommands(|verb| match verb.get_name() {
        "explain" => verb.mut_subcommands(explain::describe),
        _ => verb,
    })
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
    if let Some(mode) = shared.color_mode() {
        (streams.stdout_style, streams.stderr_style) = (mode, mode);
    }
    let context = Context { shared, call, notes: streams.notes.clone() };
    let (subject, outcome) = match verb {
        // These verbs have names of their own in their failures.
        Verb::Network(verb) => return network::run(verb, context, streams),
        Verb::Version(args) => return network::run_version(args, context, streams),
        Verb::Explain(args) => return explain::run(args, context, streams),
        Verb::Ipam(args) => return ipam::run(&args, &context, streams),
        Verb::Validate(args) => ("validate", validate::run(&args, &context, streams)),
        Verb::Schema(args) => ("schema", schema::run(&args, streams)),
        Verb::Doctor => ("doctor", doctor::run(&context, streams)),
        Verb::Metrics(args) => ("metrics", metrics::run(&args, &context, streams)),
        Verb::Inspect(args) => ("inspect", inspect::run(&args, &context, streams)),
        Verb::Rules(args) => ("rules restore", rules::run(&args, &context, streams)),
        Verb::Completions(args) => ("completions", generate::completions(&args, with_layout(parser()), streams)),
        Verb::Complete(args) => ("complete", generate::complete(&args, &context, streams)),
        Verb::Man(args) => ("man", generate::man(&args, parser())),
    };
    outcome.map_err(|error| failed(subject, error, context.format()))
}
