//! A machine that remembers what it ran, and the log that the plugins write meanwhile.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use cni::machine::{Child, Exit, Machine, Output, RunError};
use cni::{Code, Error};

/// Names that are tried for the log: two callers may read the same time.
const TRIES: u32 = 16;

/// The plugins' log: a file that only this user can read. Dropping the value removes the file.
pub(super) struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// # Errors
    /// Code 5.
    pub(super) fn new() -> Result<Log, Error> {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().subsec_nanos();
        let mut tries = 0;
        loop {
            let path = std::env::temp_dir().join(format!("cnitool-{}-{nanos}-{tries}.log", std::process::id()));
            // An existing file or link is never used.
            match OpenOptions::new().read(true).append(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => return Ok(Log { path, file }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries < TRIES => tries += 1,
                Err(error) => {
                    return Err(Error::caused(Code::IO, format_args!("failed to make {}", path.display()), error));
                }
            }
        }
    }

    /// An environment in which the plugins write it.
    pub(super) fn environment(&self, inherited: &[(OsString, OsString)]) -> Vec<(OsString, OsString)> {
        let own = [("CNI_LOG", "debug".into()), ("CNI_LOG_FILE", self.path.clone().into_os_string())];
        let others = inherited.iter().filter(|(key, _)| !own.iter().any(|(name, _)| key == name)).cloned();
        others.chain(own.iter().map(|(key, value)| ((*key).into(), value.clone()))).collect()
    }

    fn end(&self) -> u64 {
        self.file.metadata().map(|metadata| metadata.len()).unwrap_or_default()
    }

    fn since(&self, begin: u64) -> String {
        let read = || -> io::Result<Vec<u8>> {
            let mut bytes = Vec::new();
            let mut file = &self.file;
            file.seek(SeekFrom::Start(begin))?;
            file.read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        read().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// A plugin's call.
#[derive(Debug)]
pub(super) struct PluginRun {
    pub(super) plugin: String,
    pub(super) verb: String,
    pub(super) ms: f64,
    /// Code, if it gave one, and message.
    pub(super) error: Option<(Option<u64>, String)>,
    /// The text that the log gained meanwhile.
    pub(super) log: String,
}

/// The machine, and what was run on it.
pub(super) struct Recorder<'a> {
    machine: &'a dyn Machine,
    log: &'a Log,
    ran: RefCell<Vec<PluginRun>>,
}

impl<'a> Recorder<'a> {
    pub(super) fn new(machine: &'a dyn Machine, log: &'a Log) -> Recorder<'a> {
        Recorder { machine, log, ran: RefCell::default() }
    }

    pub(super) fn into_ran(self) -> Vec<PluginRun> {
        self.ran.into_inner()
    }
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
        let (before, begun) = (self.log.end(), Instant::now());
        let output = self.machine.run(child);
        // Rounded to microseconds, as in the log.
        let ms = (begun.elapsed().as_secs_f64() * 1e6).round() / 1e3;
        let verb = child.env.iter().flatten().find(|(key, _)| key == "CNI_COMMAND");
        self.ran.borrow_mut().push(PluginRun {
            plugin: child.program.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            verb: verb.map(|(_, verb)| verb.to_string_lossy().into_owned()).unwrap_or_default(),
            ms,
            error: error(&output),
            log: self.log.since(before),
        });
        output
    }
}

fn error(output: &Result<Output, RunError>) -> Option<(Option<u64>, String)> {
    match output {
        Ok(output) if output.status == Exit::Status(0) => None,
        Ok(output) => {
            let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            let msg = said["msg"].as_str().map_or_else(|| output.status.to_string(), str::to_owned);
            Some((said["code"].as_u64(), msg))
        }
        Err(error) => Some((None, error.to_string())),
    }
}
