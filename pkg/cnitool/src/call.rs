//! The input and output of one run of the tool: arguments, environment, streams, exit code, the
//! options of all verbs, and failures.
//!
//! All verbs use this module, and it uses none of them.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use cni::machine::Machine;
use cni::rollback::Notes;
use cni::{Code, Error};
use libcni::cache::DEFAULT_DIR;
use libcni::{Cache, ConfFolder, DEFAULT_TIMEOUT, Runtime};

/// The input of one run of the tool.
#[derive(Debug)]
pub struct Call<'m> {
    /// The arguments, without the program's name.
    pub args: Vec<OsString>,
    /// The whole environment.
    pub environment: Vec<(OsString, OsString)>,
    /// The working directory, for relative paths.
    pub folder: PathBuf,
    /// Runs the plugins.
    pub machine: &'m dyn Machine,
}

/// The output streams of one run of the tool.
pub struct Streams<'a> {
    /// The stream for results.
    pub stdout: &'a mut dyn Write,
    /// The receiver of all other lines. In the program, it writes them to stderr.
    pub notes: Notes,
    /// Whether stdout gets colours.
    pub stdout_style: ColorMode,
    /// Whether stderr gets colours.
    pub stderr_style: ColorMode,
}

/// The colours of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColorMode {
    /// It gets only text, for example because it is a file or NO_COLOR is set.
    Plain,
    /// It gets colours, because it is a terminal.
    Coloured,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// 0: the verb succeeded and found nothing wrong.
    Done = 0,
    /// 1: the verb failed and reported why, or it found something wrong.
    Failed = 1,
    /// 2: the arguments are invalid.
    Usage = 2,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// How results and errors are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// The default folder of the networks.
pub(crate) const DEFAULT_CONF_DIR: &str = "/etc/cni/net.d";

/// The default folder of the plugins.
pub(crate) const DEFAULT_PLUGIN_DIR: &str = "/opt/cni/bin";

/// The folder of Multus' result cache, which has the attachments of Multus' networks.
const MULTUS_DIR: &str = "/var/lib/cni/multus";

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

/// The options of every verb.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Options of every verb")]
pub(crate) struct Shared {
    /// The networks' folder [NETCONFPATH, else /etc/cni/net.d]
    #[arg(long, global = true, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    conf_dir: Option<PathBuf>,
    /// The folder of the result cache; some verbs take several [/var/lib/cni]
    #[arg(long, global = true, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) cache_dir: Vec<PathBuf>,
    /// How long one plugin may take [310]
    #[arg(long, global = true, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    /// Print results and errors as one JSON document on stdout
    #[arg(long, global = true)]
    json: bool,
    /// Use colours [auto]
    #[arg(long, global = true, value_name = "WHEN", value_parser = ["auto", "always", "never"])]
    pub(crate) color: Option<String>,
}

/// The options of all verbs, and the input of the call that they complete.
#[derive(Clone)]
pub(crate) struct Context<'a> {
    pub(crate) shared: Shared,
    pub(crate) call: &'a Call<'a>,
    pub(crate) notes: Notes,
}

impl<'a> Context<'a> {
    /// Returns how results and errors are printed.
    pub(crate) fn format(&self) -> Format {
        if self.shared.json { Format::Json } else { Format::Text }
    }

    /// Returns the networks' folder: from the option, or NETCONFPATH, or the default.
    pub(crate) fn conf_folder(&self) -> ConfFolder {
        let dir = self.shared.conf_dir.clone().or_else(|| self.call.find_os("NETCONFPATH").map(PathBuf::from));
        ConfFolder::new(dir.unwrap_or_else(|| DEFAULT_CONF_DIR.into()))
    }

    /// Returns the runtime that runs the plugins, with these options and the call's environment.
    pub(crate) fn runtime(&self) -> Runtime<'a> {
        let path = self.call.find_os("CNI_PATH").unwrap_or_else(|| DEFAULT_PLUGIN_DIR.into());
        Runtime {
            machine: self.call.machine,
            plugin_folders: std::env::split_paths(&path).filter(|folder| !folder.as_os_str().is_empty()).collect(),
            environment: self.call.environment.clone(),
            cache: self.caches().swap_remove(0),
            timeout: self.shared.timeout.map_or(DEFAULT_TIMEOUT, Duration::from_secs),
            notes: self.notes.clone(),
        }
    }

    /// Returns the folders of all result caches: those of the option, or the default and that of
    /// Multus, which does not exist on a node without Multus. The plugins' verbs use the first.
    pub(crate) fn cache_dirs(&self) -> Vec<PathBuf> {
        match &self.shared.cache_dir[..] {
            [] => [DEFAULT_DIR, MULTUS_DIR].map(PathBuf::from).into(),
            dirs => dirs.to_vec(),
        }
    }

    /// Returns all result caches.
    pub(crate) fn caches(&self) -> Vec<Cache> {
        self.cache_dirs().iter().map(Cache::new).collect()
    }
}

/// The option of the verbs that can be repeated.
#[derive(Debug, Args)]
pub(crate) struct Watch {
    /// Print it again every 2 seconds, or after this time
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2")]
    watch: Option<u64>,
}

impl Watch {
    /// Runs a verb once or, with `--watch`, until a signal arrives or the verb fails.
    ///
    /// # Errors
    /// The error of the verb.
    pub(crate) fn run<T>(
        &self,
        call: &Call<'_>,
        streams: &mut Streams<'_>,
        mut verb: impl FnMut(&mut Streams<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let Some(seconds) = self.watch else { return verb(streams) };
        loop {
            if streams.stdout_style == ColorMode::Coloured {
                // Clears the terminal.
                crate::report::write_raw(streams, "\x1b[H\x1b[2J")?;
            }
            let outcome = verb(streams)?;
            if call.wait(Duration::from_secs(seconds)) {
                return Ok(outcome);
            }
        }
    }
}

/// Returns the user ID of this process.
pub(crate) fn own_uid() -> u32 {
    std::fs::metadata("/proc/self").map(|metadata| metadata.uid()).unwrap_or_default()
}

/// Returns the time since the node was started, or `None` if it is not known.
pub(crate) fn uptime() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/uptime").ok()?;
    Duration::try_from_secs_f64(text.split_whitespace().next()?.parse().ok()?).ok()
}

impl Call<'_> {
    /// Waits for this time. Returns early, and then returns true, if a signal to end arrives.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        /// The longest time after which a signal is noticed.
        const STEP: Duration = Duration::from_millis(100);
        let end = Instant::now() + time;
        while !self.machine.terminated() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            std::thread::sleep(left.min(STEP));
        }
        true
    }

    /// Returns the value of an environment variable, or `None` if the variable is absent or empty.
    /// The last of several duplicates is used.
    pub(crate) fn find_os(&self, name: &str) -> Option<OsString> {
        let found = self.environment.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        found.filter(|value| !value.is_empty())
    }

    /// Returns the value of an environment variable as text, or `None` if the variable is absent or
    /// empty.
    ///
    /// # Errors
    /// Code 4 if the value is not valid UTF-8.
    pub(crate) fn find(&self, name: &str) -> Result<Option<String>, Error> {
        let msg = || format!("environment variable {name} is not valid UTF-8");
        let invalid = |_| Error::new(Code::INVALID_ENVIRONMENT, msg());
        self.find_os(name).map(|value| value.into_string().map_err(invalid)).transpose()
    }
}
