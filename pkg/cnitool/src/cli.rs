//! The verbs, the options that all verbs have, and environment variables.
//!
//! The help, the completions and the man pages are generated from the parser. So the doc comments
//! of the arguments here and in each verb's module are texts for operators.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use cni::rollback::Notes;
use cni::{Code, Error, skel};
use libcni::cache::DEFAULT_DIR;
use libcni::{Cache, ConfFolder, DEFAULT_TIMEOUT, Runtime};

use crate::report::Format;
use crate::{Call, Exit, Streams, doctor, explain, generate, help, inspect, ipam, network, rules, validate};

/// The default folder of the networks.
pub(crate) const DEFAULT_CONF_DIR: &str = "/etc/cni/net.d";

/// The default folder of the plugins.
pub(crate) const DEFAULT_PLUGIN_DIR: &str = "/opt/cni/bin";

/// Why a call ended without the result of a verb.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The arguments are invalid, or they request the help. clap's error has the text to print.
    Parser(Box<clap::Error>),
    /// The arguments are invalid, for a reason that the parser does not check.
    Usage { verb: String, msg: String },
    /// The verb failed.
    Failed { subject: String, error: Error, format: Format },
}

/// Returns the failure of a verb, to be printed in this format. `subject` is the verb and, if it
/// has one, its network (`add net`).
pub(crate) fn failed(subject: impl Into<String>, error: Error, format: Format) -> Failure {
    Failure::Failed { subject: subject.into(), error, format }
}

/// Run, see and repair CNI networks by hand
#[derive(Debug, Parser)]
#[command(name = "cnitool", version = cni::release::release(), about = "Run, see and repair CNI networks by hand", after_help = help::AFTER_OVERVIEW)]
#[command(subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
pub(crate) struct Cli {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    shared: Shared,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Attach a network namespace to a network; prints the result
    #[command(before_help = help::ADD, after_help = help::AFTER_ADD)]
    Add(network::Attach),
    /// Check that an attachment is as add left it
    #[command(before_help = help::CHECK, after_help = help::AFTER_CHECK)]
    Check(network::Attach),
    /// Detach a network namespace; succeeds if it is not attached any more
    #[command(before_help = help::DEL, after_help = help::AFTER_DEL)]
    Del(network::Detach),
    /// Remove everything of attachments that are not valid any more
    #[command(before_help = help::GC, after_help = help::AFTER_GC)]
    Gc(network::Collect),
    /// Check that the plugins can handle an add
    #[command(before_help = help::STATUS, after_help = help::AFTER_STATUS)]
    Status(network::Named),
    /// List a network's plugins and the versions that they support
    #[command(before_help = help::VERSION, after_help = help::AFTER_VERSION)]
    Version(network::Named),
    /// List the configured networks, and every problem with them
    #[command(before_help = help::NETWORKS, after_help = help::AFTER_NETWORKS)]
    Networks(validate::Networks),
    /// Check a network's file without running it: every problem, with line and column
    #[command(before_help = help::VALIDATE, after_help = help::AFTER_VALIDATE)]
    Validate(validate::Validate),
    /// Look for problems of the node; each is printed with the command that fixes it
    #[command(before_help = help::DOCTOR, after_help = help::AFTER_DOCTOR)]
    Doctor,
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
    /// Write the man pages into a folder
    #[command(before_help = help::MAN, after_help = help::AFTER_MAN)]
    Man(generate::ManArgs),
}

/// The options of every verb.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Options of every verb")]
pub(crate) struct Shared {
    /// The networks' folder [NETCONFPATH, else /etc/cni/net.d]
    #[arg(long, global = true, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    conf_dir: Option<PathBuf>,
    /// The folder of the result cache [/var/lib/cni]
    #[arg(long, global = true, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    cache_dir: Option<PathBuf>,
    /// How long one plugin may take [310]
    #[arg(long, global = true, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    /// Print results and errors as one JSON document on stdout
    #[arg(long, global = true)]
    json: bool,
}

/// The layout of the help, which is the same for -h and --help.
const HELP_TEMPLATE: &str = "{about}\n\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

/// Returns the parser. The help of every verb has the same layout.
pub(crate) fn command() -> clap::Command {
    fn with_template(command: clap::Command) -> clap::Command {
        command.help_template(HELP_TEMPLATE).mut_subcommands(with_template)
    }
    with_template(Cli::command())
}

/// Parses the arguments and runs the verb, which prints its result. The caller prints a failure.
pub(crate) fn run(call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let parser_failure = |error| Failure::Parser(Box::new(error));
    let args = std::iter::once("cnitool".into()).chain(call.args.iter().cloned());
    let matches = command().try_get_matches_from(args).map_err(parser_failure)?;
    let Cli { verb, shared } = Cli::from_arg_matches(&matches).map_err(parser_failure)?;
    let done = |()| Exit::Done;
    match verb {
        Verb::Add(args) => network::run(args.into_command(skel::Verb::Add, shared)?, call, streams),
        Verb::Check(args) => network::run(args.into_command(skel::Verb::Check, shared)?, call, streams),
        Verb::Del(args) => network::run(args.into_command(shared)?, call, streams),
        Verb::Gc(args) => network::run(args.into_command(shared), call, streams),
        Verb::Status(args) => network::run(args.into_command(skel::Verb::Status, shared), call, streams),
        Verb::Version(args) => network::run(args.into_command(skel::Verb::Version, shared), call, streams),
        Verb::Networks(args) => validate::networks(&args, &shared, call, streams),
        Verb::Validate(args) => validate::run(&args, &shared, call, streams),
        Verb::Doctor => doctor::run(&shared, call, streams),
        Verb::Inspect(args) => inspect::run(&args, &shared, call, streams),
        Verb::Explain(args) => explain::run(args, shared, call, streams),
        Verb::Ipam(args) => ipam::run(&args, &shared, call, streams),
        Verb::Rules(args) => rules::run(&args, &shared, call, streams),
        Verb::Completions(args) => generate::completions(&args, streams).map(done),
        Verb::Man(args) => generate::man(&args).map(done),
    }
}

impl Shared {
    /// Returns how results and errors are printed.
    pub(crate) fn format(&self) -> Format {
        if self.json { Format::Json } else { Format::Text }
    }

    /// Returns the networks' folder: from the option, or NETCONFPATH, or the default.
    pub(crate) fn conf_folder(&self, variables: &Variables<'_>) -> ConfFolder {
        let dir = self.conf_dir.clone().or_else(|| variables.find_os("NETCONFPATH").map(PathBuf::from));
        ConfFolder::new(dir.unwrap_or_else(|| DEFAULT_CONF_DIR.into()))
    }

    /// Returns the runtime that runs the plugins, with these options and the call's environment.
    pub(crate) fn runtime<'m>(&self, call: &Call<'m>, notes: &Notes) -> Runtime<'m> {
        let path = Variables(&call.environment).find_os("CNI_PATH").unwrap_or_else(|| DEFAULT_PLUGIN_DIR.into());
        Runtime {
            machine: call.machine,
            plugin_folders: std::env::split_paths(&path).filter(|folder| !folder.as_os_str().is_empty()).collect(),
            environment: call.environment.clone(),
            cache: self.cache(),
            timeout: self.timeout.map_or(DEFAULT_TIMEOUT, Duration::from_secs),
            notes: notes.clone(),
        }
    }

    /// Returns the folder of the result cache: from the option, or the default.
    pub(crate) fn cache_dir(&self) -> &Path {
        self.cache_dir.as_deref().unwrap_or(DEFAULT_DIR.as_ref())
    }

    /// Returns the result cache.
    pub(crate) fn cache(&self) -> Cache {
        Cache::new(self.cache_dir())
    }
}

/// The environment variables. The last of several duplicates is used. An empty variable counts as
/// absent.
#[derive(Clone, Copy)]
pub(crate) struct Variables<'a>(pub(crate) &'a [(OsString, OsString)]);

impl Variables<'_> {
    /// Returns the value of a variable, or `None` if the variable is absent or empty.
    pub(crate) fn find_os(&self, name: &str) -> Option<OsString> {
        let found = self.0.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        found.filter(|value| !value.is_empty())
    }

    /// Returns the value of a variable as text, or `None` if the variable is absent or empty.
    ///
    /// # Errors
    /// Code 4 if the value is not valid UTF-8.
    pub(crate) fn find(&self, name: &str) -> Result<Option<String>, Error> {
        let text = |value: OsString| {
            value.into_string().map_err(|_| {
                let msg = format!("environment variable {name} is not valid UTF-8");
                Error::new(Code::INVALID_ENVIRONMENT, msg)
            })
        };
        self.find_os(name).map(text).transpose()
    }
}
