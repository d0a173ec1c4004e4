//! Running another plugin: IPAM for the main plugins.
//!
//! The delegate gets our environment and the very bytes of our stdin, and only CNI_COMMAND differs.
//! Its stderr is passed on, its errors keep their code. If it is missing, dies, hangs or prints
//! something else than JSON, the error names the file.
//!
//! An ADD that was cut short may have done half of its work, so this module, not the caller, runs
//! DEL on the delegate then. A delegate that answered with an error has undone its work and gets no
//! DEL: the refused call may have been the second ADD of a live container, whose address a DEL
//! would release.

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

/// How long a delegate may take unless `delegateTimeout` says otherwise. Longer than host-local
/// waits for its lock.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(55);

/// A plugin found on CNI_PATH, ready to be run for one call.
#[derive(Debug)]
pub struct Delegate<'a> {
    program: PathBuf,
    timeout: Duration,
    conf: &'a NetConf,
    environment: &'a Environment,
    machine: &'a dyn Machine,
    notes: Notes,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Timeouts {
    delegate_timeout: Option<u64>,
}

/// How long delegates may take: the key `delegateTimeout`, 1 to 300 seconds.
///
/// # Errors
/// Code 6 or 7.
pub fn timeout(conf: &NetConf) -> Result<Duration> {
    match conf.decode::<Timeouts>()?.delegate_timeout {
        None => Ok(DEFAULT_TIMEOUT),
        Some(seconds @ 1..=300) => Ok(Duration::from_secs(seconds)),
        Some(other) => {
            Err(Error::config(format!("invalid delegateTimeout {other}: must be between 1 and 300 seconds")))
        }
    }
}

impl<'a> Delegate<'a> {
    /// Finds the plugin `kind` for this call.
    ///
    /// # Errors
    /// Code 4 with Go's text if it is not on CNI_PATH, 7 if `kind` is not a file name or
    /// `delegateTimeout` is bad.
    pub fn find(call: &'a Call<'_>, kind: &str) -> Result<Delegate<'a>> {
        let program = find_plugin(kind, &call.environment.plugin_folders())?;
        // A bad timeout must not keep a DEL from cleaning; ADD refuses it.
        let verb = call.environment.command.as_str();
        let timeout = match timeout(&call.conf) {
            Err(error) if verb == "DEL" || verb == "GC" => {
                call.notes.note(format_args!("{error}; {} s are used", DEFAULT_TIMEOUT.as_secs()));
                DEFAULT_TIMEOUT
            }
            other => other?,
        };
        Ok(Delegate {
            program,
            timeout,
            conf: &call.conf,
            environment: call.environment,
            machine: call.machine,
            notes: call.notes.clone(),
        })
    }

    /// ADD: a lease that is released by `rollback` unless that is committed, or the attachment had
    /// one before.
    ///
    /// # Errors
    /// The delegate's own; if it died, hung or babbled, after a DEL of whatever it may have done.
    pub fn lease(self, rollback: &mut Rollback<'a>) -> Result<AddResult> {
        let program = self.program.display().to_string();
        let had_one = self.reuses_a_lease()?;
        let added = self.run(Verb::Add).and_then(|stdout| self.decode_result(&stdout).map_err(Failure::Unanswered));
        match added {
            Ok(result) if had_one => Ok(result),
            Ok(result) => {
                rollback.push(format!("take back the ADD of {program}"), move || self.del());
                Ok(result)
            }
            Err(Failure::Unanswered(error)) if !had_one => {
                if let Err(second) = self.del() {
                    self.notes.note(format_args!("DEL of {program} after its failed ADD: {second}"));
                }
                Err(error)
            }
            Err(failure) => Err(failure.into()),
        }
    }

    /// Whether ADD would return what the attachment holds already: with `"reuse": true`, CHECK
    /// finds it. A DEL would free what a container that lives may use; what ADD reserves beside it
    /// stays until the runtime's DEL.
    fn reuses_a_lease(&self) -> Result<bool> {
        if self.conf.json().get("ipam").and_then(|ipam| ipam.get("reuse")) != Some(&Json::Bool(true)) {
            return Ok(false);
        }
        match self.run(Verb::Check) {
            Ok(_) => Ok(true),
            // It holds nothing, or the version knows no CHECK.
            Err(Failure::Answered(error)) if error.code() != Code::TRY_AGAIN => Ok(false),
            Err(failure) => Err(failure.into()),
        }
    }

    /// CHECK.
    ///
    /// # Errors
    /// The delegate's own.
    pub fn check(&self) -> Result<()> {
        Ok(self.run(Verb::Check).map(drop)?)
    }

    /// DEL.
    ///
    /// # Errors
    /// The delegate's own.
    pub fn del(&self) -> Result<()> {
        Ok(self.run(Verb::Del).map(drop)?)
    }

    /// GC.
    ///
    /// # Errors
    /// The delegate's own.
    pub fn gc(&self) -> Result<()> {
        Ok(self.run(Verb::Gc).map(drop)?)
    }

    /// STATUS.
    ///
    /// # Errors
    /// The delegate's own.
    pub fn status(&self) -> Result<()> {
        Ok(self.run(Verb::Status).map(drop)?)
    }

    fn run(&self, verb: Verb) -> Result<Vec<u8>, Failure> {
        let child = Child {
            program: self.program.clone(),
            args: Vec::new(),
            env: Some(self.environment.for_delegate(verb)),
            stdin: self.conf.raw(),
            timeout: self.timeout,
            // A lease must be given back also, and above all, after the SIGTERM that ended the ADD.
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

    fn decode_result(&self, stdout: &[u8]) -> Result<AddResult> {
        let json = Json::parse(stdout)
            .map_err(|error| self.garbled(format_args!("failed to unmarshal raw result: {error}"), stdout))?;
        if !matches!(json, Json::Object(_) | Json::Null) {
            return Err(self.garbled("the result is not a JSON object", stdout));
        }
        AddResult::decode(&json, self.conf.version()).map_err(|error| self.garbled(error, stdout))
    }

    fn garbled(&self, why: impl std::fmt::Display, stdout: &[u8]) -> Error {
        let msg = format!("{}: the result of its ADD cannot be used: {why}", self.program.display());
        Error::new(Code::DECODE, msg).with_details(excerpt(stdout))
    }
}

/// Checks that a plugin's `type` is the name of a file, not a path.
///
/// # Errors
/// Code 7 with Go's texts.
pub fn check_plugin_name(kind: &str) -> Result<()> {
    if kind.is_empty() {
        return Err(Error::config("no plugin name provided"));
    }
    if kind.contains(['/', '\0']) || kind == "." || kind == ".." {
        return Err(Error::config(format!("invalid plugin name: {kind}")));
    }
    Ok(())
}

/// Looks a plugin up: a plain file name, in the folders' order, a regular file that may be
/// executed.
///
/// # Errors
/// Go's texts, which other programs search for.
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

/// How a plugin failed: what is known of what it has done.
#[derive(Debug)]
pub enum Failure {
    /// It said so itself: whatever it had done, it has undone.
    Answered(Error),
    /// It never ran.
    NotStarted(Error),
    /// It was killed, died or said something else: what it has done is unknown.
    Unanswered(Error),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        match failure {
            Failure::Answered(error) | Failure::NotStarted(error) | Failure::Unanswered(error) => error,
        }
    }
}

/// Turns the end of a plugin into its stdout or an error.
///
/// # Errors
/// What the plugin said, with its code; code 11 if it ran out of time; 5 or 999 if it gave no
/// answer.
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
    if let Some(error) = reported(&stdout) {
        return Err(Failure::Answered(error));
    }
    let stderr = excerpt(&stderr);
    let msg = match (stdout.is_empty(), stderr.is_empty()) {
        (true, true) => format!("netplugin failed with no error message: {doing}: {status}"),
        (true, false) => format!("netplugin failed: {stderr:?}: {doing}: {status}"),
        (false, _) => {
            let said = excerpt(&stdout);
            format!("netplugin failed but error parsing its diagnostic message {said:?}: {doing}: {status}")
        }
    };
    Err(Failure::Unanswered(Error::new(Code::INTERNAL, msg)))
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct Reported {
    code: u32,
    msg: String,
    details: String,
}

/// The error a plugin wrote, as it wrote it.
fn reported(stdout: &[u8]) -> Option<Error> {
    let json = Json::parse(stdout).ok()?;
    let reported: Reported = matches!(json, Json::Object(_)).then(|| json.decode().ok()).flatten()?;
    if reported.code == 0 && reported.msg.is_empty() {
        return None;
    }
    Some(Error::new(Code(reported.code), reported.msg).with_details(reported.details))
}

/// Enough of what a program said to recognise it.
fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim();
    match text.char_indices().nth(1000) {
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
    fn a_delegate_that_dies_or_babbles_is_named() {
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
