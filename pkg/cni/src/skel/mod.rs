//! The skeleton: runs a [`Plugin`] as the CNI specification asks.
//!
//! The skeleton reads the environment and stdin, checks identifiers, versions and the namespace,
//! and calls a verb of the plugin with a [`Call`]. It converts, encodes and writes the result, and
//! only then commits the ADD. The plugin's verbs never see streams, variables or exit codes.
//!
//! Dropping an uncommitted [`Added`] undoes the ADD. `std::process::exit` would skip the drop, so
//! nothing here calls it.

use std::io::{IsTerminal, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;

use crate::AttachmentId;
use crate::args::CniArgs;
use crate::config::{self, NetConf, ValidAttachments};
use crate::json::{Json, UnknownKey};
use crate::machine::Machine;
use crate::release::{release, version_line};
use crate::result::{AddResult, pretty};
use crate::rollback::{Notes, Rollback};
use crate::steps::{CallTimer, Quoted};
use crate::version::{Version, parse_triple};
use crate::{Cidr, Code, Error, Result, ident};

mod environment;
mod restore;
mod streams;
#[cfg(test)]
mod tests;

pub use environment::{Environment, Verb};
pub use restore::{RestoreMode, missing_rules};
pub use streams::{MAX_STDIN, Streams};
use streams::{read_stdin, write_out};

/// A CNI plugin. The skeleton answers VERSION itself.
pub trait Plugin {
    /// The name of the binary.
    fn name(&self) -> &'static str;

    /// The plugin's role in a list of plugins.
    fn role(&self) -> Role;

    /// Checks a configuration as ADD would, but without changing or reading the node.
    ///
    /// # Errors
    /// The error of an ADD with this configuration.
    fn examine(&self, conf: &NetConf) -> Result<()>;

    /// Returns the keys of a configuration that this plugin does not read.
    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey>;

    /// Checks possible answers of the IPAM plugin as ADD would. Returns for each answer the error
    /// with which ADD would reject it, or `None` if ADD would accept it. `_earlier` has the
    /// addresses that earlier plugins of the list gave to the container. The default accepts every
    /// answer: it is for plugins that run no IPAM plugin.
    ///
    /// # Errors
    /// The configuration itself is invalid.
    fn examine_answers(&self, _: &NetConf, answers: &[AddResult], _earlier: &[Cidr]) -> Result<Vec<Option<Error>>> {
        Ok(answers.iter().map(|_| None).collect())
    }

    /// Attaches the container to the network. [`Added::rollback`] has an undo for each change.
    ///
    /// # Errors
    /// ADD failed and has undone its changes. Only objects that other attachments may use, such as
    /// a bridge or a shared chain, may remain.
    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>>;

    /// Checks that the attachment is as ADD left it, apart from changes that later plugins make.
    ///
    /// # Errors
    /// The first difference.
    fn check(&self, call: &Call<'_>) -> Result<()>;

    /// Removes everything of the attachment that exists. A missing part is not an error.
    ///
    /// # Errors
    /// All failures, joined, after everything else has been removed.
    fn del(&self, call: &Call<'_>) -> Result<()>;

    /// Removes everything of this network that belongs to no attachment in `valid`. The default
    /// does nothing: it is for plugins that only change the container's namespace.
    ///
    /// # Errors
    /// All failures, joined, after everything else has been removed.
    fn gc(&self, _call: &Call<'_>, _valid: &ValidAttachments) -> Result<()> {
        Ok(())
    }

    /// Checks that the plugin can handle an ADD. The default checks only the configuration.
    ///
    /// # Errors
    /// A defect that makes every ADD fail until it is repaired. The skeleton replaces codes about
    /// configurations, files and unsupported keys (2, 5, 6, 7) with 50. It only notes an error that
    /// [is a shortage](Error::is_shortage), which may pass by itself.
    fn status(&self, call: &Call<'_>) -> Result<()> {
        self.examine(&call.conf)
    }

    /// Finds the packet filter rules of the attachment that another program has removed and, with
    /// [`RestoreMode::Write`], writes them again. This is not a verb of the specification; only
    /// `cnitool rules restore` calls it. Returns a sentence for each missing rule; `None` if the
    /// plugin, or this configuration, has no packet filter rules.
    ///
    /// # Errors
    /// The rules cannot be read or written. Some may have been written then; the caller must not
    /// undo that, because the attachment is in use and its other rules would be removed too.
    fn restore_rules<'a>(&self, _call: &'a Call<'_>, _mode: RestoreMode<'_, 'a>) -> Result<Option<Vec<String>>> {
        Ok(None)
    }
}

/// The role of a plugin in a list of plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Creates CNI_IFNAME.
    Interface,
    /// Assigns addresses for a plugin that creates an interface.
    Ipam,
    /// Is used either as [`Ipam`](Role::Ipam) or as [`Chained`](Role::Chained).
    IpamOrChained,
    /// Changes or completes what an earlier plugin of the list created, and needs `prevResult`.
    Chained,
    /// Configures what every network namespace has, such as the loopback interface.
    Namespace,
}

/// A finished ADD: the result, and the undos.
#[derive(Debug)]
pub struct Added<'a> {
    /// The answer to the runtime.
    pub result: AddResult,
    /// The undos. The skeleton commits them once the result has been written, and runs them if the
    /// result cannot be written.
    pub rollback: Rollback<'a>,
}

/// The parameters of one call of a plugin.
#[derive(Debug)]
pub struct Call<'m> {
    /// CNI_CONTAINERID; empty for GC and STATUS.
    pub container_id: String,
    /// CNI_NETNS. `None` if it is not set, for GC and STATUS, and for a DEL whose CNI_NETNS is the
    /// plugin's own namespace, in which DEL must not change anything.
    pub netns: Option<PathBuf>,
    /// CNI_IFNAME; empty for GC and STATUS.
    pub ifname: String,
    /// The configuration.
    pub conf: NetConf,
    /// All CNI variables, for delegates.
    pub environment: &'m Environment,
    /// The operating system: clock, processes, signals.
    pub machine: &'m dyn Machine,
    /// Receives notes for the operator, which go to stderr and the log.
    pub notes: Notes,
}

impl std::fmt::Debug for dyn Machine + '_ {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Machine")
    }
}

impl Call<'_> {
    /// Returns the attachment that ADD, CHECK and DEL are about.
    pub fn attachment(&self) -> AttachmentId {
        AttachmentId::new(self.conf.name(), &self.container_id, &self.ifname)
    }

    /// Parses CNI_ARGS.
    ///
    /// # Errors
    /// Code 4 for a malformed pair.
    pub fn args(&self) -> Result<CniArgs> {
        CniArgs::parse(&self.environment.args)
    }

    /// Returns CNI_NETNS, for verbs that need it.
    ///
    /// # Errors
    /// Code 4 if it is not set, which the skeleton rules out for ADD and CHECK.
    pub fn netns(&self) -> Result<&Path> {
        self.netns.as_deref().ok_or_else(|| environment::missing_variables(&["CNI_NETNS"]))
    }

    /// Returns CNI_NETNS as it was given, for comparison with the `sandbox` of a result's
    /// interface.
    pub fn sandbox(&self) -> &str {
        &self.environment.netns
    }

    /// Returns an empty stack of undos, which reports failing undos to this call's notes.
    pub fn rollback<'a>(&self) -> Rollback<'a> {
        Rollback::new(self.notes.clone())
    }
}

/// Runs a plugin and returns its exit code. `stdin` and `stdout` are the process's streams, wrapped
/// so that every wait has a deadline. Do not pass std's `Stdout`, which writes each line
/// separately.
pub fn run(
    plugin: &dyn Plugin,
    machine: &dyn Machine,
    environment: &Environment,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
) -> ExitCode {
    // Writes a panic's message and place in the source to stderr, without std's hint about
    // backtraces. `catch_panic` puts the message into the error on stdout.
    std::panic::set_hook(Box::new(|info| eprint(&info.to_string())));
    let is_terminal = std::io::stdin().is_terminal();
    let streams = Streams {
        stdin: if is_terminal { None } else { Some(stdin) },
        stdout,
        notes: Notes::new(|line| {
            log::warn!("note={}", Quoted(line));
            eprint(line);
        }),
    };
    match dispatch(plugin, machine, environment, streams) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failed) => ExitCode::FAILURE,
    }
}

/// Writes one line to stderr. Ignores errors: there is no other place to report them.
fn eprint(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The error of [`dispatch`], which has already reported why the call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed;

/// Handles one call of a plugin: writes its result or its error to stdout, and logs the call. A
/// panic of the plugin becomes an error of code 999.
///
/// # Errors
/// [`Failed`], after the error has been written to stdout or, if that fails, to the notes.
pub fn dispatch(
    plugin: &dyn Plugin,
    machine: &dyn Machine,
    environment: &Environment,
    mut streams: Streams<'_>,
) -> Result<(), Failed> {
    let timer = CallTimer::begin();
    let mut facts = CallFacts { version: Version::NEWEST, network: String::new() };
    let outcome = catch_panic(plugin, || handle(plugin, machine, environment, &mut streams, &mut facts));
    timer.end(plugin.name(), environment, &facts.network, &outcome);
    let Err(error) = outcome else { return Ok(()) };
    let bytes = encode_error(&error, facts.version);
    let written = streams.stdout.write_all(&bytes).and_then(|()| streams.stdout.flush());
    if let Err(why) = written {
        streams.notes.note(format_args!("{error} (this error could not be written to stdout: {why})"));
    }
    Err(Failed)
}

/// An error as the specification's JSON.
#[derive(Serialize)]
struct WireError<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'static str,
    code: u32,
    msg: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    details: &'a str,
}

/// Encodes an error as JSON of the given specification version.
fn encode_error(error: &Error, version: Version) -> Vec<u8> {
    let (code, msg, details) = (error.code().0, error.msg(), error.details());
    pretty(&WireError { cni_version: version.as_str(), code, msg, details })
}

/// What [`dispatch`] needs from the configuration even if [`handle`] fails.
struct CallFacts {
    /// The specification version in which an error is encoded: the configuration's version, or the
    /// newest until `handle` has read a supported version.
    version: Version,
    /// The network's name for the log, or the empty string until `handle` has read it.
    network: String,
}

/// Checks the environment and the configuration, runs the verb and writes its result to stdout.
///
/// # Errors
/// The error for the caller to write to stdout.
fn handle(
    plugin: &dyn Plugin,
    machine: &dyn Machine,
    environment: &Environment,
    streams: &mut Streams<'_>,
    facts: &mut CallFacts,
) -> Result<()> {
    let Some(verb) = environment.verb(plugin.name())? else {
        // A person or a program that asks for the version, such as Nomad.
        streams.notes.note(about(plugin.name()));
        return Ok(());
    };
    if verb == Verb::Version {
        // VERSION succeeds even with invalid variables.
        return write_out(streams.stdout, &version_reply(&mut streams.stdin));
    }
    environment.check(verb)?;
    let conf = read_conf(verb, streams, facts)?;
    // GC and STATUS ignore the variables that name an attachment, as if they were not set.
    let value_for_verb = |value: &str| if verb.has_attachment() { value.to_owned() } else { String::new() };
    let netns = value_for_verb(&environment.netns);
    let call = Call {
        container_id: value_for_verb(&environment.container_id),
        netns: if netns.is_empty() { None } else { Some(PathBuf::from(netns)) },
        ifname: value_for_verb(&environment.ifname),
        conf,
        environment,
        machine,
        notes: streams.notes.clone(),
    };
    if has_forbidden_netns(&call) {
        return Err(refuse_own_netns(plugin, verb, call));
    }
    match verb {
        Verb::Add => add(plugin, &call, streams.stdout),
        Verb::Check => plugin.check(&call),
        Verb::Del => plugin.del(&call),
        Verb::Gc => plugin.gc(&call, &ValidAttachments::from_config(call.conf.json())?),
        Verb::Status => status(plugin, &call),
        // Handled above.
        Verb::Version => Ok(()),
    }
}

/// Whether CNI_NETNS is the plugin's own namespace, which only CNI_NETNS_OVERRIDE allows. Returns
/// `false` if the path cannot be opened: some plugins do not use it, and the others report the
/// error.
fn has_forbidden_netns(call: &Call<'_>) -> bool {
    match &call.netns {
        Some(path) if !call.environment.netns_override => call.machine.is_own_netns(path).unwrap_or(false),
        _ => false,
    }
}

/// Returns the error of a call in the plugin's own namespace, where ADD would change the host's
/// network. For DEL, first removes what is outside the container, and appends the error of that DEL
/// if it fails or panics.
fn refuse_own_netns(plugin: &dyn Plugin, verb: Verb, mut call: Call<'_>) -> Error {
    let error = Error::new(Code::INVALID_NETNS, "plugin's netns and netns from CNI_NETNS should not be the same")
        .with_details(format!("CNI_NETNS={}", call.environment.netns));
    if verb != Verb::Del {
        return error;
    }
    call.netns = None;
    let outcome = catch_panic(plugin, || plugin.del(&call));
    error.and(outcome.err())
}

/// Reads the configuration from stdin, and checks its name, its version and its standard keys.
/// Stores the name and the version in `facts` as soon as they are known.
///
/// # Errors
/// - Code 1 if the version is not supported or does not have the verb.
/// - Code 5 or 11 if stdin cannot be read, see [`read_stdin`].
/// - Code 6 if the configuration is not a JSON object, or a value has a wrong type.
/// - Code 7 if the name is missing or invalid or, for ADD, too long.
fn read_conf(verb: Verb, streams: &mut Streams<'_>, facts: &mut CallFacts) -> Result<NetConf> {
    let raw = read_stdin(&mut streams.stdin)?;
    let json = config::parse_object(&raw)?;
    // An error about the name is reported in the configuration's version, so `facts` gets the
    // version first.
    let version_text = config::version_text(&json);
    if let Ok(text) = &version_text
        && let Some(version) = Version::find(text)
    {
        facts.version = version;
    }
    config::network_name(&json)?.clone_into(&mut facts.network);
    // As in Go, an error about the version is reported only if the name is valid.
    let version = check_version(verb, &version_text?)?;
    let conf = NetConf::new(raw, json, version)?;
    let (length, limit) = (conf.name().len(), ident::MAX_NETWORK_NAME);
    if verb == Verb::Add && length > limit {
        let msg = format!("network name is too long: {length} bytes, at most {limit} fit");
        return Err(Error::config(msg).with_details(conf.name()));
    }
    Ok(conf)
}

/// Runs ADD and writes its result. Commits the ADD after the whole result has been written; an
/// earlier return drops `rollback`, which undoes the ADD.
fn add(plugin: &dyn Plugin, call: &Call<'_>, stdout: &mut dyn Write) -> Result<()> {
    let Added { result, rollback } = plugin.add(call)?;
    if call.machine.terminated() {
        return Err(Error::new(Code::TRY_AGAIN, "interrupted by a signal: all of this ADD was rolled back"));
    }
    // Other programs compare this error's text for equality, so nothing is added to it.
    let encoded = result.encode(call.conf.version());
    let bytes = encoded.map_err(|error| Error::new(Code::INCOMPATIBLE_VERSION, error.to_string()))?;
    write_out(stdout, &bytes)?;
    rollback.commit();
    Ok(())
}

/// Runs STATUS. A shortage that may pass by itself is only noted, because a runtime that gets an
/// error marks the node as not ready, and Kubernetes then evicts working pods.
///
/// # Errors
/// The plugin's error, with code 50 instead of a code about configurations, files or unsupported
/// keys.
fn status(plugin: &dyn Plugin, call: &Call<'_>) -> Result<()> {
    let Err(error) = plugin.status(call) else { return Ok(()) };
    if error.is_shortage() {
        call.notes.note(format_args!("STATUS succeeds, but the next ADD may fail: {error}"));
        return Ok(());
    }
    Err(match error.code() {
        Code::UNSUPPORTED_FIELD | Code::IO | Code::DECODE | Code::INVALID_CONFIG => {
            error.with_code(Code::NOT_AVAILABLE)
        }
        _ => error,
    })
}

/// Calls `function` and turns a panic in it into an error of code 999. Before this function
/// returns, the unwinding has dropped every rollback in `function`, which has undone the changes.
fn catch_panic(plugin: &dyn Plugin, function: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(function)).unwrap_or_else(|panic| {
        let text = match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
            (Some(text), _) => text,
            (None, Some(text)) => text.as_str(),
            (None, None) => "no text",
        };
        Err(Error::new(Code::INTERNAL, format!("internal error in {}: {text}", plugin.name())))
    })
}

/// Parses a configuration's `cniVersion` and checks that this version has the verb. The checks,
/// their order and the texts are those of the Go plugins.
///
/// # Errors
/// - Code 1 if the version is not supported, or does not have the verb.
/// - Code 6 for CHECK, GC and STATUS if the text is not a version at all.
fn check_version(verb: Verb, cni_version: &str) -> Result<Version> {
    let first_with_verb = match verb {
        Verb::Add | Verb::Del | Verb::Version => None,
        Verb::Check => Some(Version::V0_4_0),
        Verb::Gc | Verb::Status => Some(Version::V1_1_0),
    };
    if let Some(first_with_verb) = first_with_verb {
        let triple = |text: &str| parse_triple(text).map_err(|why| Error::new(Code::DECODE, why));
        let configured = triple(cni_version)?;
        let verb = verb.as_str();
        // Other programs compare these two texts for equality, so they have no details.
        let not_allowed = |msg: String| Err(Error::new(Code::INCOMPATIBLE_VERSION, msg));
        if configured < triple(first_with_verb.as_str())? {
            return not_allowed(format!("config version does not allow {verb}"));
        }
        if configured > triple(Version::NEWEST.as_str())? {
            return not_allowed(format!("plugin version does not allow {verb}"));
        }
    }
    Version::find(cni_version).ok_or_else(|| config::incompatible(cni_version))
}

/// Returns the answer to VERSION, in the version that the JSON on stdin requests, or in the newest.
fn version_reply(stdin: &mut Option<&mut dyn Read>) -> Vec<u8> {
    let supported: Vec<String> = Version::ALL.iter().map(|version| format!("\"{version}\"")).collect();
    let version = requested_version(stdin).unwrap_or(Version::NEWEST);
    format!("{{\"cniVersion\":\"{version}\",\"supportedVersions\":[{}]}}\n", supported.join(",")).into_bytes()
}

/// Returns the `cniVersion` of the JSON on stdin. Returns `None` if that cannot be read or is not a
/// supported version, because VERSION always succeeds.
fn requested_version(stdin: &mut Option<&mut dyn Read>) -> Option<Version> {
    let bytes = read_stdin(stdin).ok()?;
    let json = Json::parse(&bytes).ok()?;
    let text = json.get("cniVersion")?.as_str()?;
    // `find` would take an empty version for 0.1.0, as in a configuration.
    if text.is_empty() { None } else { Version::find(text) }
}

/// Returns the text for a call without CNI_COMMAND: the version line, which programs parse, the
/// supported versions of the specification, and this project's release.
fn about(name: &str) -> String {
    let supported: Vec<&str> = Version::ALL.iter().map(|version| version.as_str()).collect();
    format!(
        "{}\nCNI protocol versions supported: {}\nCNI plugins in Rust: release {}",
        version_line(name),
        supported.join(", "),
        release()
    )
}
