//! Records each plugin that cnitool runs: duration, error, and the lines that it wrote to the log.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use cni::machine::{Child, Exit, Machine, Output, RunError};
use cni::{Code, Error};
use serde::Serialize;

use super::steps::{Step, steps_of};

/// The plugins' log: a temporary file that only this user can read. Dropping the value removes the
/// file.
pub(super) struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Creates the file.
    ///
    /// # Errors
    /// Code 5 if it cannot be created.
    pub(super) fn new() -> Result<Log, Error> {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = std::env::temp_dir().join(format!("cnitool-{}-{nanos}.log", std::process::id()));
        // `create_new` never opens an existing file or follows a link.
        match OpenOptions::new().read(true).append(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => Ok(Log { path, file }),
            Err(error) => Err(Error::caused(Code::IO, format_args!("failed to create {}", path.display()), error)),
        }
    }

    /// Returns the environment for the plugins: `inherited`, but with the variables that make the
    /// plugins write this log.
    pub(super) fn environment(&self, inherited: &[(OsString, OsString)]) -> Vec<(OsString, OsString)> {
        let mut environment = inherited.to_vec();
        environment.retain(|(key, _)| key != "CNI_LOG" && key != "CNI_LOG_FILE");
        environment.push(("CNI_LOG".into(), "debug".into()));
        environment.push(("CNI_LOG_FILE".into(), self.path.clone().into_os_string()));
        environment
    }

    /// Returns the log's text from the offset `begin` on. Returns an empty text if the log cannot
    /// be read, because the verb must not fail for lack of a log.
    fn text_from(&self, begin: u64) -> String {
        let (mut bytes, mut file) = (Vec::new(), &self.file);
        let read = file.seek(SeekFrom::Start(begin)).and_then(|_| file.read_to_end(&mut bytes));
        read.map(|_| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // An error has no effect on the verb, which has already ended.
        let _ = fs::remove_file(&self.path);
    }
}

/// A run of a plugin, and its steps.
#[derive(Debug, Default, Serialize)]
pub(super) struct PluginRun {
    pub(super) plugin: String,
    pub(super) verb: String,
    /// The duration in milliseconds.
    pub(super) ms: f64,
    /// The plugin's error, or `None` if the plugin succeeded.
    pub(super) error: Option<PluginError>,
    pub(super) steps: Vec<Step>,
}

/// The error of a plugin.
#[derive(Debug, Serialize)]
pub(super) struct PluginError {
    /// The code, or `None` if the plugin did not report one.
    pub(super) code: Option<u64>,
    pub(super) msg: String,
}

/// A [`Machine`] that passes every call to another one, and records the plugins that are run.
pub(super) struct Recorder<'a> {
    pub(super) machine: &'a dyn Machine,
    pub(super) log: &'a Log,
    /// The recorded runs, in the order in which they ended.
    pub(super) runs: RefCell<Vec<PluginRun>>,
}

impl Machine for Recorder<'_> {
    fn is_own_netns(&self, path: &Path) -> io::Result<bool> {
        self.machine.is_own_netns(path)
    }

    fn terminated(&self) -> bool {
        self.machine.terminated()
    }

    fn now(&self) -> Instant {
        self.machine.now()
    }

    fn run(&self, child: &Child<'_>) -> Result<Output, RunError> {
        // Where the lines of this run begin in the log.
        let log_begin = self.log.file.metadata().map(|metadata| metadata.len()).unwrap_or_default();
        let started = Instant::now();
        let output = self.machine.run(child);
        // Rounded to microseconds, as in the log.
        let ms = (started.elapsed().as_secs_f64() * 1e6).round() / 1e3;
        let verb = child.env.iter().flatten().find(|(key, _)| key == "CNI_COMMAND");
        let verb = verb.map(|(_, verb)| verb.to_string_lossy().into_owned()).unwrap_or_default();
        let plugin = child.program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut run = PluginRun { plugin, verb, ms, error: error_of(&output), steps: Vec::new() };
        run.steps = steps_of(&run, &self.log.text_from(log_begin));
        self.runs.borrow_mut().push(run);
        output
    }
}

/// Returns the error of a plugin that failed, or `None` if the plugin succeeded. A plugin that was
/// killed or could not be started has no code: the message is its exit status or why it could not
/// run.
fn error_of(output: &Result<Output, RunError>) -> Option<PluginError> {
    match output {
        Ok(output) if output.status == Exit::Status(0) => None,
        Ok(output) => {
            let error: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            let msg = error["msg"].as_str().map_or_else(|| output.status.to_string(), str::to_owned);
            Some(PluginError { code: error["code"].as_u64(), msg })
        }
        Err(error) => Some(PluginError { code: None, msg: error.to_string() }),
    }
}
