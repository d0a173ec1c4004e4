//! Runs another plugin, the delegate: the IPAM plugin of an interface plugin, or the interface
//! plugin to which a meta plugin hands its work.
//!
//! The delegate gets the environment of this plugin, apart from CNI_COMMAND. An IPAM plugin gets
//! exactly the bytes of this plugin's stdin, an interface plugin the configuration that the meta
//! plugin has made. The delegate's stderr goes to the notes, and its errors keep their code.
//!
//! If the delegate ends without a usable answer to ADD, it may have left changes, so this module
//! runs its DEL. If the delegate answers ADD with an error, it has undone its changes and gets no
//! DEL: the refused call may have been a second ADD of a running container, whose address a DEL
//! would release. For the same reason there is no DEL if the attachment had its addresses before
//! this ADD (host-local with `"reuse": true`).

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::config::NetConf;
use crate::json::Json;
use crate::machine::{Child, Exit, Machine, OnSigterm, Output, RunError};
use crate::result::AddResult;
use crate::rollback::Notes;
use crate::rollback::Rollback;
use crate::skel::{Call, Environment, Verb};
use crate::{Code, Error, Result};

/// How long a delegate may take if the configuration has no `delegateTimeout`. This is longer than
/// host-local's wait for its lock.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(55);

/// How much longer an interface plugin may take than its own delegate: it also waits for addresses
/// and locks.
const INTERFACE_MARGIN: Duration = Duration::from_secs(30);

/// The largest part of a delegate's time limit that it leaves for its answer.
const MAX_ANSWER_MARGIN: Duration = Duration::from_secs(5);

/// The longest part of a program's output in an error message, in characters.
const MAX_EXCERPT: usize = 1000;

/// A plugin that was found on CNI_PATH, to be run for one call.
#[derive(Debug)]
pub struct Delegate<'a> {
    program: PathBuf,
    timeout: Duration,
    conf: Cow<'a, NetConf>,
    environment: &'a Environment,
    machine: &'a dyn Machine,
    notes: Notes,
}

/// The configuration's key about delegates.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Timeouts {
    delegate_timeout: Option<u64>,
}

/// Returns how long delegates may take: `delegateTimeout`, or [`DEFAULT_TIMEOUT`] without that key.
///
/// # Errors
/// - Code 6 if `delegateTimeout` is not a whole number.
/// - Code 7 if `delegateTimeout` is not between 1 and 300 seconds.
pub fn timeout(conf: &NetConf) -> Result<Duration> {
    match conf.decode::<Timeouts>()?.delegate_timeout {
        None => Ok(DEFAULT_TIMEOUT),
        Some(seconds @ 1..=300) => Ok(Duration::from_secs(seconds)),
        Some(other) => {
            Err(Error::config(format!("invalid delegateTimeout {other}: must be between 1 and 300 seconds")))
        }
    }
}

/// Returns the part of a delegate's time limit that it leaves for its answer, so that its caller
/// gets the error of a wait that was in vain.
pub fn answer_margin(limit: Duration) -> Duration {
    (limit / 4).min(MAX_ANSWER_MARGIN)
}

impl<'a> Delegate<'a> {
    /// Finds the configuration's IPAM plugin on CNI_PATH. Returns `None` if the configuration has
    /// none.
    ///
    /// # Errors
    /// - Code 4 with Go's text if CNI_PATH has no such plugin.
    /// - Code 7 with Go's text if its type is not a file name.
    /// - Those of [`timeout`], except for DEL and GC: these must clean up even if `delegateTimeout`
    ///   is invalid, so they note the error and use [`DEFAULT_TIMEOUT`].
    pub fn find_ipam(call: &'a Call<'_>) -> Result<Option<Delegate<'a>>> {
        match call.conf.ipam_type() {
            "" => Ok(None),
            kind => Delegate::new(call, kind, Cow::Borrowed(&call.conf)).map(Some),
        }
    }

    /// Finds the interface plugin that `conf` is for. This plugin gets `conf` instead of the call's
    /// configuration, and 30 seconds more than the `delegateTimeout` in `conf`.
    ///
    /// # Errors
    /// Those of [`find_ipam`](Delegate::find_ipam), for the `type` and the `delegateTimeout` of
    /// `conf`.
    pub fn find_interface_plugin(call: &'a Call<'_>, conf: NetConf) -> Result<Delegate<'a>> {
        let kind = conf.json().get("type").and_then(Json::as_str).unwrap_or_default().to_owned();
        let mut delegate = Delegate::new(call, &kind, Cow::Owned(conf))?;
        delegate.timeout += INTERFACE_MARGIN;
        Ok(delegate)
    }

    /// Finds the plugin with the type `kind`, which gets `conf`.
    fn new(call: &'a Call<'_>, kind: &str, conf: Cow<'a, NetConf>) -> Result<Delegate<'a>> {
        let program = find_plugin(kind, &call.environment.plugin_folders())?;
        let verb = call.environment.command.as_str();
        let is_cleanup = verb == Verb::Del.as_str() || verb == Verb::Gc.as_str();
        let timeout = match timeout(&conf) {
            Ok(timeout) => timeout,
            Err(error) if is_cleanup => {
                call.notes.note(format_args!("{error}; using {} seconds instead", DEFAULT_TIMEOUT.as_secs()));
                DEFAULT_TIMEOUT
            }
            Err(error) => return Err(error),
        };
        Ok(Delegate {
            program,
            timeout,
            conf,
            environment: call.environment,
            machine: call.machine,
            notes: call.notes.clone(),
        })
    }

    /// Runs the delegate's ADD, pushes its DEL on `rollback` and returns its result.
    ///
    /// If ADD fails and may have left changes, runs DEL. But if the attachment had its addresses
    /// before this call, DEL is neither pushed nor run: it would release addresses that a running
    /// container may use.
    ///
    /// # Errors
    /// Those of [`interpret`], and code 6 if the answer to ADD is not a result.
    pub fn lease(self, rollback: &mut Rollback<'a>) -> Result<AddResult> {
        let program = self.program.display().to_string();
        let had_addresses = self.has_reusable_addresses()?;
        match self.add() {
            Ok(result) => {
                if !had_addresses {
                    rollback.push(format!("run DEL of {program}"), move || self.call(Verb::Del));
                }
                Ok(result)
            }
            Err(Failure::Unanswered(error)) if !had_addresses => {
                if let Err(del_error) = self.call(Verb::Del) {
                    self.notes.note(format_args!("DEL of {program} after its failed ADD: {del_error}"));
                }
                Err(error)
            }
            Err(failure) => Err(failure.into()),
        }
    }

    /// Runs the delegate's ADD and decodes its result. A result that cannot be used is a
    /// [`Failure::Unanswered`].
    fn add(&self) -> Result<AddResult, Failure> {
        let stdout = self.run(Verb::Add)?;
        self.decode_result(&stdout).map_err(Failure::Unanswered)
    }

    /// Whether the attachment already has addresses, which ADD will return again: the delegate
    /// [keeps reservations](keeps_reservations), `ipam` has `"reuse": true`, and CHECK succeeds or
    /// answers with code 101.
    ///
    /// # Errors
    /// Those of [`interpret`] if CHECK gives no answer, or answers with code 5, 11 or 100.
    fn has_reusable_addresses(&self) -> Result<bool> {
        // For another IPAM plugin, the key and the codes from 100 can mean something else.
        let name = self.program.file_name().and_then(OsStr::to_str);
        if !name.is_some_and(keeps_reservations) {
            return Ok(false);
        }
        let reuse = self.conf.json().get("ipam").and_then(|ipam| ipam.get("reuse"));
        if reuse != Some(&Json::Bool(true)) {
            return Ok(false);
        }
        match self.run(Verb::Check) {
            Ok(_) => Ok(true),
            Err(Failure::Answered(error)) => match error.code() {
                // CHECK could not be completed, so the attachment may have addresses.
                Code::IO | Code::TRY_AGAIN | Code::KERNEL => Err(error),
                // The attachment has other addresses than prevResult, that of an earlier plugin.
                Code::CHECK_FAILED => Ok(true),
                // The attachment has no addresses, or the configuration's version has no CHECK.
                _ => Ok(false),
            },
            Err(failure) => Err(failure.into()),
        }
    }

    /// Runs a verb of the delegate whose answer has no content: any but ADD.
    ///
    /// # Errors
    /// Those of [`interpret`].
    pub fn call(&self, verb: Verb) -> Result<()> {
        self.run(verb)?;
        Ok(())
    }

    /// Runs the delegate, writes its stderr to the notes and returns its stdout.
    ///
    /// # Errors
    /// Those of [`interpret`].
    fn run(&self, verb: Verb) -> Result<Vec<u8>, Failure> {
        let child = Child {
            program: self.program.clone(),
            args: Vec::new(),
            env: Some(self.environment.for_delegate(verb)),
            stdin: self.conf.raw(),
            timeout: self.timeout,
            // DEL must release the addresses even after a SIGTERM that has interrupted the ADD.
            on_sigterm: if verb == Verb::Del { OnSigterm::Finish } else { OnSigterm::Kill },
        };
        let output = self.machine.run(&child);
        if let Ok(Output { stderr, .. }) = &output
            && !stderr.is_empty()
        {
            self.notes.note(String::from_utf8_lossy(stderr).trim_end());
        }
        interpret(&self.program, verb, output)
    }

    /// Decodes the output of the delegate's ADD. As in Go, `null` is an empty result. A result
    /// without `cniVersion` is decoded in the configuration's version.
    ///
    /// # Errors
    /// Code 6 if the output is not a result.
    fn decode_result(&self, stdout: &[u8]) -> Result<AddResult> {
        let json = Json::parse(stdout)
            .map_err(|error| self.invalid_result(format_args!("failed to unmarshal raw result: {error}"), stdout))?;
        if !matches!(json, Json::Object(_) | Json::Null) {
            return Err(self.invalid_result("the result is not a JSON object", stdout));
        }
        AddResult::decode(&json, self.conf.version()).map_err(|error| self.invalid_result(error, stdout))
    }

    /// Returns the error, code 6, about an output of ADD that is not a result.
    fn invalid_result(&self, why: impl std::fmt::Display, stdout: &[u8]) -> Error {
        let msg = format!("{}: the result of its ADD cannot be used: {why}", self.program.display());
        Error::new(Code::DECODE, msg).with_details(excerpt(stdout))
    }
}

/// Runs a verb of the configuration's IPAM plugin, any but ADD. Does nothing without an IPAM
/// plugin.
///
/// # Errors
/// Those of [`Delegate::find_ipam`] and [`interpret`].
pub fn call_ipam(call: &Call<'_>, verb: Verb) -> Result<()> {
    Delegate::find_ipam(call)?.map_or(Ok(()), |ipam| ipam.call(verb))
}

/// Whether the IPAM plugin of this name keeps reservations as host-local does: in its folder, with
/// its keys and its codes.
pub fn keeps_reservations(kind: &str) -> bool {
    ["host-local", "cluster-local"].contains(&kind)
}

/// Checks that a plugin's `type` is a file name, not a path.
///
/// # Errors
/// Code 7 with Go's text if the `type` is empty or not a file name.
pub fn check_plugin_name(kind: &str) -> Result<()> {
    if kind.is_empty() {
        return Err(Error::config("no plugin name provided").with_details("the plugin's \"type\" is missing or empty"));
    }
    if kind.contains(['/', '\0']) || kind == "." || kind == ".." {
        return Err(Error::config(format!("invalid plugin name: {kind}")));
    }
    Ok(())
}

/// Returns the path of the first executable regular file named `kind` in `folders`.
///
/// # Errors
/// With Go's texts, which other programs search for:
/// - Code 4 if there are no folders, or none of them has the plugin.
/// - Code 7 if `kind` is not a file name.
pub fn find_plugin(kind: &str, folders: &[PathBuf]) -> Result<PathBuf> {
    check_plugin_name(kind)?;
    if folders.is_empty() {
        return Err(Error::new(Code::INVALID_ENVIRONMENT, "no paths provided (CNI_PATH)"));
    }
    let mut unusable = Vec::new();
    for folder in folders {
        let path = folder.join(kind);
        match fs::metadata(&path) {
            Ok(file) if !file.is_file() => unusable.push(format!("{} is not a regular file", path.display())),
            Ok(file) if file.permissions().mode() & 0o111 == 0 => {
                unusable.push(format!("{} is not executable", path.display()));
            }
            Ok(_) => return Ok(path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => unusable.push(format!("{}: {error}", path.display())),
        }
    }
    let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    let mut msg = format!("failed to find plugin {kind:?} in path [{}]", folders.join(" "));
    if !unusable.is_empty() {
        msg = format!("{msg}: {}", unusable.join("; "));
    }
    Err(Error::new(Code::INVALID_ENVIRONMENT, msg).with_details("CNI_PATH"))
}

/// The error of a failed plugin. The variant shows whether the plugin may have left changes.
#[derive(Debug)]
pub enum Failure {
    /// The plugin printed an error, so it has undone its changes.
    Answered(Error),
    /// The plugin could not be started, so it has changed nothing.
    NotStarted(Error),
    /// The plugin was killed, ended without printing an error, or printed a result that cannot be
    /// used, so it may have left changes.
    Unanswered(Error),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        match failure {
            Failure::Answered(error) | Failure::NotStarted(error) | Failure::Unanswered(error) => error,
        }
    }
}

/// Turns `output`, the outcome of running the plugin `program`, into the plugin's stdout or its
/// error.
///
/// # Errors
/// The error that the plugin printed, with its code. If the plugin printed none:
/// - Code 5 if the plugin could not be started, or its input or output failed.
/// - Code 11 if the plugin exceeded its time, or this process received a signal to end.
/// - Code 999 if the plugin exited with a nonzero status, or was killed by a signal.
pub fn interpret(program: &Path, verb: Verb, output: Result<Output, RunError>) -> Result<Vec<u8>, Failure> {
    let name = program.display();
    let doing = format!("{name}: {}", verb.as_str());
    let Output { status, stdout, stderr } = output.map_err(|error| match &error {
        RunError::Timeout(_) | RunError::Terminated => {
            Failure::Unanswered(Error::caused(Code::TRY_AGAIN, &doing, error))
        }
        RunError::Start(_) => Failure::NotStarted(Error::caused(Code::IO, &doing, error)),
        RunError::Io(_) => Failure::Unanswered(Error::caused(Code::IO, &doing, error)),
    })?;
    if status == Exit::Status(0) {
        return Ok(stdout);
    }
    if let Some(error) = printed_error(&stdout) {
        return Err(Failure::Answered(error));
    }
    let stderr = excerpt(&stderr);
    let reason = if !stdout.is_empty() {
        format!("netplugin failed but error parsing its diagnostic message {:?}", excerpt(&stdout))
    } else if !stderr.is_empty() {
        format!("netplugin failed: {stderr:?}")
    } else {
        "netplugin failed with no error message".to_owned()
    };
    Err(Failure::Unanswered(Error::new(Code::INTERNAL, format!("{reason}: {doing}: {status}"))))
}

/// The JSON of an error that a plugin prints.
#[derive(Default, Deserialize)]
#[serde(default)]
struct PrintedError {
    code: u32,
    msg: String,
    details: String,
}

/// Decodes the error that a plugin printed. Returns `None` if its stdout is not a JSON object with
/// a `code` or a `msg`.
fn printed_error(stdout: &[u8]) -> Option<Error> {
    let json = Json::parse(stdout).ok()?;
    if !matches!(json, Json::Object(_)) {
        return None;
    }
    let printed: PrintedError = json.decode().ok()?;
    if printed.code == 0 && printed.msg.is_empty() {
        return None;
    }
    Some(Error::new(Code(printed.code), printed.msg).with_details(printed.details))
}

/// Returns a program's output for an error message, without surrounding whitespace and cut after
/// [`MAX_EXCERPT`] characters.
fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim();
    match text.char_indices().nth(MAX_EXCERPT) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(status: Exit, stdout: &str, stderr: &str) -> Result<Vec<u8>> {
        let output = Output { status, stdout: stdout.into(), stderr: stderr.into() };
        Ok(interpret(Path::new("/bin/ipam"), Verb::Add, Ok(output))?)
    }

    #[test]
    fn errors_of_a_delegate_keep_their_code() {
        let error = ended(Exit::Status(1), r#"{"code":11,"msg":"m","details":"d"}"#, "noise").unwrap_err();
        assert_eq!((error.code(), error.msg(), error.details()), (Code(11), "m", "d"));
    }

    #[test]
    fn a_delegate_that_dies_or_prints_garbage_is_named() {
        for (status, stdout, stderr, expected) in [
            (Exit::Signal(11), "", "", "netplugin failed with no error message: /bin/ipam: ADD: killed by signal 11"),
            (Exit::Status(2), "", "oops\n", "netplugin failed: \"oops\": /bin/ipam: ADD: exit status 2"),
            (
                Exit::Status(1),
                "hello",
                "",
                "netplugin failed but error parsing its diagnostic message \"hello\": /bin/ipam: ADD: exit status 1",
            ),
        ] {
            assert_eq!(ended(status, stdout, stderr).unwrap_err().msg(), expected);
        }
        let late = interpret(Path::new("/bin/ipam"), Verb::Del, Err(RunError::Timeout(Duration::from_secs(2))));
        assert_eq!(Error::from(late.unwrap_err()).code(), Code::TRY_AGAIN);
    }

    #[test]
    fn a_plugin_is_a_plain_executable_file_on_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let first = folder.path().join("first");
        let second = folder.path().join("second");
        fs::create_dir_all(first.join("dir")).unwrap();
        fs::create_dir(&second).unwrap();
        for (path, mode) in [(first.join("plain"), 0o644), (first.join("good"), 0o755), (second.join("plain"), 0o755)] {
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let folders = [first.clone(), second.clone()];
        assert_eq!(find_plugin("good", &folders).unwrap(), first.join("good"));
        assert_eq!(find_plugin("plain", &folders).unwrap(), second.join("plain"));
        let error = find_plugin("plain", &folders[..1]).unwrap_err();
        assert!(error.msg().starts_with("failed to find plugin \"plain\" in path ["), "{error}");
        assert!(error.msg().ends_with("first/plain is not executable"), "{error}");
        assert!(find_plugin("dir", &folders).unwrap_err().msg().contains("is not a regular file"));
        for (kind, msg) in
            [("", "no plugin name provided"), ("a/b", "invalid plugin name: a/b"), ("..", "invalid plugin name: ..")]
        {
            assert_eq!(find_plugin(kind, &folders).unwrap_err().msg(), msg);
        }
        assert!(find_plugin("x", &[]).unwrap_err().msg().starts_with("no paths provided"));
    }
}
