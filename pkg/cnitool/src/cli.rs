//! Parses the arguments and runs the verb.
//!
//! The help, the completions and the man pages are generated from the parser. So the doc comments
//! of the arguments here, in each verb's module and in `call` are texts for operators.

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
    #[command(before_help = help::VERSION, after_help = help::AFTER_VERSION)]
    Version(network::Named),
    /// Check networks or their files: every problem, with line and column
    #[command(visible_alias = "networks", before_help = help::VALIDATE, after_help = help::AFTER_VALIDATE)]
    Validate(validate::Validate),
    /// Print the JSON Schema of a network, or of one plugin's keys
    #[command(before_help = help::SCHEMA, after_help = help::AFTER_SCHEMA)]
    Schema(schema::Schema),
    /// Look for problems of the node; each is printed with the command that fixes it
    #[command(before_help = help::DOCTOR, after_help = help::AFTER_DOCTOR)]
    Doctor,
    /// Print figures for Prometheus: addresses, attachments, leftovers, findings, leases
    #[command(before_help = help::METRICS, after_help = help::AFTER_METRICS)]
    Metrics(metrics::MetricsArgs),
    /// Show what exists of each attachment in the kernel, and leftovers
    #[command(before_help = help::INSPECT, after_help = help::AFTER_INSPECT)]
    Inspect(inspect::Inspect),
    /// Run a verb and print each step of its plugins, and the request that failed
    #[command(before_help = help::EXPLAIN, after_help = help::AFTER_EXPLAIN)]
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
    #[command(before_help = help::MAN, after_help = help::AFTER_MAN)]
    Man(generate::ManArgs),
}

/// The layout of the help, which is the same for -h and --help.
const HELP_TEMPLATE: &str = "{about}\n\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

/// Returns the parser. The help of every verb has the same layout.
fn command() -> clap::Command {
    fn with_template(command: clap::Command) -> clap::Command {
        command.help_template(HELP_TEMPLATE).mut_subcommands(with_template)
    }
    with_template(Cli::command()).mut_subcommands(|verb| match verb.get_name() {
        "explain" => verb.mut_subcommands(explain::describe),
        _ => verb,
    })
}

/// Parses the arguments and runs the verb, which prints its result. The caller prints a failure.
pub(crate) fn run(call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let parser_failure = |error| Failure::Parser(Box::new(error));
    let args = std::iter::once("cnitool".into()).chain(call.args.iter().cloned());
    let matches = command().try_get_matches_from(args).map_err(parser_failure)?;
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
        Verb::Completions(args) => ("completions", generate::completions(&args, command(), streams)),
        Verb::Complete(args) => ("complete", generate::complete(&args, &context, streams)),
        Verb::Man(args) => ("man", generate::man(&args, command())),
    };
    outcome.map_err(|error| failed(subject, error, context.format()))
}
