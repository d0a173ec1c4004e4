//! The skeleton: what every plugin does around its own work.
//!
//! The environment and stdin are read once and become values; identifiers, versions and the
//! namespace guard are checked before any work; a result is converted, encoded and written in full,
//! and only then committed. A plugin is a [`Plugin`]: five verbs that get a [`Call`] and know
//! nothing of streams, variables or exit codes.
//!
//! An [`Added`] that is not committed undoes itself when it is dropped. So nothing here ends the
//! process while one exists.

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
use crate::release::release;
use crate::result::{AddResult, pretty};
use crate::rollback::{Notes, Rollback};
use crate::steps::{CallTimer, Quoted};
use crate::version::{Version, parse_triple};
use crate::{Cidr, Code, Error, Result, ident};

mod environment;
mod restore;
#[cfg(test)]
mod tests;

pub use environment::{Environment, Verb};
pub use restore::{RestoreMode, Restored};

/// How much is read from stdin.
pub const MAX_STDIN: usize = 16 << 20;

/// A CNI plugin. VERSION is answered by the skeleton.
pub trait Plugin {
    /// The name of the binary.
    fn name(&self) -> &'static str;

    /// The plugin's role in a list of plugins.
    fn role(&self) -> Role;

    /// Checks a configuration without a node to run it on, as ADD would.
    ///
    /// # Errors
    /// ADD's.
    fn examine(&self, conf: &NetConf) -> Result<()>;

    /// Returns the keys of a configuration that this plugin does not read.
    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey>;

    /// Checks possible answers of an IPAM plugin for a configuration, as ADD would, and returns
    /// what is wrong with each one. `earlier`: the networks that the container's addresses from
    /// earlier plugins reach.
    ///
    /// # Errors
    /// ADD's, for the configuration itself. A plugin that asks no IPAM plugin has none.
    fn examine_answers(&self, _: &NetConf, answers: &[AddResult], _earlier: &[Cidr]) -> Result<Vec<Option<Error>>> {
        Ok(answers.iter().map(|_| None).collect())
    }

    /// Attaches the container. What was done is in [`Added::rollback`] until the result has been
    /// written.
    ///
    /// # Errors
    /// Nothing of a failed ADD may stay but what others may use too (a bridge, a shared chain).
    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>>;

    /// Whether the attachment is as ADD left it, and as later plugins may have changed it.
    ///
    /// # Errors
    /// What differs.
    fn check(&self, call: &Call<'_>) -> Result<()>;

    /// Removes all of the attachment that can be found, in whatever state it is. What is missing is
    /// no error.
    ///
    /// # Errors
    /// All that went wrong, after everything that could be removed has been.
    fn del(&self, call: &Call<'_>) -> Result<()>;

    /// Removes everything of this network that belongs to no attachment of `valid`.
    ///
    /// # Errors
    /// All that went wrong, after everything that could be removed has been.
    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()>;

    /// Whether ADDs can be handled.
    ///
    /// # Errors
    /// The defect that makes every ADD fail until it is repaired. The skeleton only reports a
    /// shortage that passes, and turns the codes of configurations, files and unsupported keys into
    /// 50.
    fn status(&self, call: &Call<'_>) -> Result<()>;

    /// Writes those of the attachment's packet filter rules again that something else has removed.
    /// Not a verb of the specification: for `cnitool rules restore` alone. `None` for a plugin, or
    /// a configuration, without such rules.
    ///
    /// # Errors
    /// What keeps the rules from being compared or written. Everything is as before then.
    fn restore_rules<'a>(&self, _call: &'a Call<'_>, _mode: RestoreMode) -> Result<Option<Restored<'a>>> {
        Ok(None)
    }
}

/// The role of a plugin in a list of plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Creates CNI_IFNAME.
    Interface,
    /// Hands out addresses to a plugin that creates an interface.
    Ipam,
    /// Changes or completes what an earlier plugin of the list created, and needs that one's
    /// result.
    Chained,
    /// Sets up what every network namespace has.
    Namespace,
}

/// A finished ADD: the result, and how to undo it.
#[derive(Debug)]
pub struct Added<'a> {
    /// The answer to the runtime.
    pub result: AddResult,
    /// Committed once the result has been written; dropped, and so run, if that fails.
    pub rollback: Rollback<'a>,
}

/// One call of a plugin, as values.
#[derive(Debug)]
pub struct Call<'m> {
    /// CNI_CONTAINERID; empty for GC and STATUS.
    pub container_id: String,
    /// CNI_NETNS. `None` if it was not given, or if a DEL must not touch it because it is the
    /// plugin's own.
    pub netns: Option<PathBuf>,
    /// CNI_IFNAME; empty for GC and STATUS.
    pub ifname: String,
    /// The configuration.
    pub conf: NetConf,
    /// The whole environment, for delegates.
    pub environment: &'m Environment,
    /// The machine.
    pub machine: &'m dyn Machine,
    /// Where remarks go.
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

    /// CNI_ARGS.
    ///
    /// # Errors
    /// Code 4 for a malformed pair.
    pub fn args(&self) -> Result<CniArgs> {
        CniArgs::parse(&self.environment.args)
    }

    /// CNI_NETNS, for the verbs that need it.
    ///
    /// # Errors
    /// Code 4; the skeleton has checked this for ADD and CHECK.
    pub fn netns(&self) -> Result<&Path> {
        self.netns.as_deref().ok_or_else(|| environment::missing(&["CNI_NETNS"]))
    }

    /// CNI_NETNS as it was given, to be compared with the `sandbox` of a result.
    pub fn sandbox(&self) -> &str {
        &self.environment.netns
    }

    /// A new stack of undos, whose failures are reported to this call's notes.
    pub fn rollback<'a>(&self) -> Rollback<'a> {
        Rollback::new(self.notes.clone())
    }
}

/// The streams of a call, as values. `TimedOut` from them means that the caller exceeded the
/// deadline, or that a signal ended the wait (`Interrupted` would be tried again); it becomes code
/// 11.
pub struct Streams<'a> {
    /// Where the configuration comes from. `None` if that is a terminal.
    pub stdin: Option<&'a mut dyn Read>,
    /// The wire.
    pub stdout: &'a mut dyn Write,
    /// Everything else.
    pub notes: Notes,
}

/// Runs a plugin as a process: its environment, its standard streams, its exit code. `stdin` and
/// `stdout` are the process's, with an end to every wait ([`Streams`]) and without a buffer: std's
/// stdout writes line by line.
pub fn run(plugin: &dyn Plugin, machine: &dyn Machine, stdin: &mut dyn Read, stdout: &mut dyn Write) -> ExitCode {
    // The message of a panic goes into the error; where it happened goes to stderr, without the
    // usual backtrace hint.
    std::panic::set_hook(Box::new(|info| eprint(&info.to_string())));
    let environment = Environment::from_process();
    let terminal = std::io::stdin().is_terminal();
    let streams = Streams {
        stdin: if terminal { None } else { Some(stdin) },
        stdout,
        notes: Notes::new(|line| {
            log::warn!("note={}", Quoted(line));
            eprint(line);
        }),
    };
    match dispatch(plugin, machine, &environment, streams) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failed) => ExitCode::FAILURE,
    }
}

/// Writes one line to stderr. A closed stderr is ignored.
fn eprint(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The call failed and the error has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed;

/// Runs a plugin on values.
///
/// # Errors
/// [`Failed`], after the error has been written to stdout.
pub fn dispatch(
    plugin: &dyn Plugin,
    machine: &dyn Machine,
    environment: &Environment,
    mut streams: Streams<'_>,
) -> Result<(), Failed> {
    let mut version = Version::NEWEST;
    let mut network = String::new();
    let called = CallTimer::begin();
    let known = Known { version: &mut version, network: &mut network };
    let outcome = unwinding(plugin, || serve(plugin, machine, environment, &mut streams, known));
    called.end(plugin.name(), environment, &network, &outcome);
    outcome.map_err(|error| {
        let written = streams.stdout.write_all(&encode_error(&error, version)).and_then(|()| streams.stdout.flush());
        if let Err(why) = written {
            streams.notes.note(format_args!("{error} (and this could not be written to stdout: {why})"));
        }
        Failed
    })
}

#[derive(Serialize)]
struct WireError<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'static str,
    code: u32,
    msg: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    details: &'a str,
}

fn encode_error(error: &Error, version: Version) -> Vec<u8> {
    let (code, msg, details) = (error.code().0, error.msg(), error.details());
    pretty(&WireError { cni_version: version.as_str(), code, msg, details })
}

/// Facts of the call that are needed even if it ends early.
struct Known<'k> {
    /// The specification's version in which an error is written.
    version: &'k mut Version,
    /// For the log.
    network: &'k mut String,
}

fn serve(
    plugin: &dyn Plugin,
    machine: &dyn Machine,
    environment: &Environment,
    streams: &mut Streams<'_>,
    known: Known<'_>,
) -> Result<()> {
    let Some(verb) = environment.verb(plugin.name())? else {
        streams.notes.note(about(plugin.name()));
        return Ok(());
    };
    if verb == Verb::Version {
        // Never fails, whatever else the environment holds.
        return write_out(streams.stdout, &version_reply(&mut streams.stdin));
    }
    environment.check(verb)?;

    let raw = read_config(&mut streams.stdin)?;
    let json = config::parse_object(&raw)?;
    if let Ok(text) = config::version_text(&json) {
        *known.version = Version::find(&text).unwrap_or(Version::NEWEST);
    }
    let name = config::name(&json)?;
    name.clone_into(known.network);
    let name_length = name.len();
    let supported = check_version(verb, &config::version_text(&json)?)?;
    let conf = NetConf::new(raw, json, supported)?;
    if verb == Verb::Add && name_length > ident::MAX_NETWORK_NAME {
        let msg = format!("network name is too long: {name_length} bytes, at most {} fit", ident::MAX_NETWORK_NAME);
        return Err(Error::config(msg).with_details(conf.name()));
    }

    let attachment = matches!(verb, Verb::Add | Verb::Check | Verb::Del);
    let given = |value: &str| if attachment { value.to_owned() } else { String::new() };
    let mut call = Call {
        container_id: given(&environment.container_id),
        netns: Some(PathBuf::from(given(&environment.netns))).filter(|path| !path.as_os_str().is_empty()),
        ifname: given(&environment.ifname),
        conf,
        environment,
        machine,
        notes: streams.notes.clone(),
    };
    // A path that cannot be opened is the plugin's to judge: some never look at it.
    let own = !environment.netns_override
        && call.netns.as_deref().is_some_and(|path| machine.is_own_netns(path).unwrap_or(false));
    let guard = || {
        Error::new(Code::INVALID_NETNS, "plugin's netns and netns from CNI_NETNS should not be the same")
            .with_details(format!("CNI_NETNS={}", environment.netns))
    };
    if own && verb != Verb::Del {
        return Err(guard());
    }
    match verb {
        Verb::Add => add(plugin, &call, streams.stdout),
        Verb::Check => unwinding(plugin, || plugin.check(&call)),
        Verb::Del if own => {
            call.netns = None;
            let outcome = unwinding(plugin, || plugin.del(&call));
            Err(guard().and(outcome.err()))
        }
        Verb::Del => unwinding(plugin, || plugin.del(&call)),
        Verb::Gc => {
            let valid = ValidAttachments::from_config(call.conf.json())?;
            unwinding(plugin, || plugin.gc(&call, &valid))
        }
        Verb::Status => status(plugin, &call),
        Verb::Version => Ok(()),
    }
}

/// The end of an ADD: encode, write all of it, only then commit. Every way out before that rolls
/// back.
fn add(plugin: &dyn Plugin, call: &Call<'_>, stdout: &mut dyn Write) -> Result<()> {
    unwinding(plugin, || {
        let Added { result, rollback } = plugin.add(call)?;
        if call.machine.terminated() {
            return Err(Error::new(Code::TRY_AGAIN, "interrupted by a signal: all of this ADD was rolled back"));
        }
        // Other programs compare this text for equality, so nothing is added to it.
        let encoded = result.encode(call.conf.version());
        let bytes = encoded.map_err(|error| Error::new(Code::INCOMPATIBLE_VERSION, error.to_string()))?;
        write_out(stdout, &bytes)?;
        rollback.commit();
        Ok(())
    })
}

/// STATUS: code 50 if no ADD can work until something is repaired. A runtime that gets an error
/// makes the node unready, and Kubernetes then evicts pods that work, so a shortage that passes is
/// only reported.
fn status(plugin: &dyn Plugin, call: &Call<'_>) -> Result<()> {
    let Err(error) = unwinding(plugin, || plugin.status(call)) else { return Ok(()) };
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

/// Turns a panic into code 999. By then unwinding has run every rollback.
fn unwinding(plugin: &dyn Plugin, verb: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(verb)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_owned());
        Err(Error::new(Code::INTERNAL, format!("{} failed by a fault of its own: {text}", plugin.name())))
    })
}

fn write_out(stdout: &mut dyn Write, bytes: &[u8]) -> Result<()> {
    stdout
        .write_all(bytes)
        .and_then(|()| stdout.flush())
        .map_err(|error| stream_failed("failed to write the result to stdout", error))
}

fn stream_failed(doing: &str, error: std::io::Error) -> Error {
    let code = if error.kind() == std::io::ErrorKind::TimedOut { Code::TRY_AGAIN } else { Code::IO };
    Error::caused(code, doing, error)
}

fn read_config(stdin: &mut Option<&mut dyn Read>) -> Result<Vec<u8>> {
    let Some(stdin) = stdin else {
        return Err(Error::new(
            Code::IO,
            "error reading from stdin: it is a terminal; the network configuration is expected there",
        ));
    };
    let mut bytes = Vec::with_capacity(4096);
    stdin
        .take(MAX_STDIN as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| stream_failed("error reading from stdin", error))?;
    if bytes.len() > MAX_STDIN {
        return Err(Error::new(Code::IO, format!("error reading from stdin: more than {} MiB", MAX_STDIN >> 20)));
    }
    Ok(bytes)
}

/// The rules of versions, in Go's order and with Go's texts.
fn check_version(verb: Verb, config: &str) -> Result<Version> {
    let needed = match verb {
        Verb::Check => Some(("CHECK", Version::V0_4_0)),
        Verb::Gc => Some(("GC", Version::V1_1_0)),
        Verb::Status => Some(("STATUS", Version::V1_1_0)),
        Verb::Add | Verb::Del | Verb::Version => None,
    };
    if let Some((verb, needed)) = needed {
        let triple = |text: &str| parse_triple(text).map_err(|why| Error::new(Code::DECODE, why));
        let wanted = triple(config)?;
        if wanted < triple(needed.as_str())? {
            return Err(config::incompatible(&format!("config version does not allow {verb}"), config));
        }
        if wanted > triple(Version::NEWEST.as_str())? {
            return Err(config::incompatible(&format!("plugin version does not allow {verb}"), config));
        }
    }
    Version::find(config).ok_or_else(|| config::incompatible("incompatible CNI versions", config))
}

/// VERSION: the input's version if we speak it, else the newest. Never fails, never waits for a
/// terminal.
fn version_reply(stdin: &mut Option<&mut dyn Read>) -> Vec<u8> {
    let asked = read_config(stdin).ok().and_then(|bytes| {
        let json = Json::parse(&bytes).ok()?;
        Version::find(json.get("cniVersion")?.as_str().filter(|text| !text.is_empty())?)
    });
    let supported: Vec<String> = Version::ALL.iter().map(|version| format!("\"{version}\"")).collect();
    let version = asked.unwrap_or(Version::NEWEST);
    format!("{{\"cniVersion\":\"{version}\",\"supportedVersions\":[{}]}}\n", supported.join(",")).into_bytes()
}

/// Returns the text for a person who runs the plugin by hand.
fn about(name: &str) -> String {
    let supported: Vec<&str> = Version::ALL.iter().map(|version| version.as_str()).collect();
    let release = release();
    format!("CNI {name} plugin v{release}\nCNI protocol versions supported: {}", supported.join(", "))
}
