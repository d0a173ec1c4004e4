//! Runs a plugin with an environment, a standard input and a deadline.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{PipeReader, PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;

use crate::{Container, Node, Outcome, schema};

/// A call of a plugin in a node. At first its environment has only `CNI_PATH` and `PATH`.
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `run` or `start`"]
pub struct Invocation<'n> {
    node: &'n Node,
    program: PathBuf,
    args: Vec<OsString>,
    env: BTreeMap<OsString, OsString>,
    stdin: Vec<u8>,
    timeout: Duration,
    stdout: Stdout,
}

/// What the plugin's standard output is.
#[derive(Clone, Copy, Debug)]
enum Stdout {
    /// A file, which is read afterwards.
    Kept,
    /// A pipe without a reader: writing fails.
    Closed,
    /// A full pipe that is not read: writing blocks.
    Stuck,
}

impl Node {
    /// Prepares a call of the plugin `name` under test.
    pub fn plugin(&self, name: &str) -> Invocation<'_> {
        Invocation::new(self, crate::bin_dir().join(name)).cni_path(crate::bin_dir())
    }

    /// Prepares a call of the Go plugin `name` of [`go_bin_dir`](crate::go_bin_dir).
    pub fn go_plugin(&self, name: &str) -> Invocation<'_> {
        Invocation::new(self, crate::go_bin_dir().join(name)).cni_path(crate::go_bin_dir())
    }
}

impl<'n> Invocation<'n> {
    /// Prepares a call of any program.
    pub fn new(node: &'n Node, program: impl Into<PathBuf>) -> Invocation<'n> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        Invocation {
            node,
            program: program.into(),
            args: Vec::new(),
            env: BTreeMap::from([("PATH".into(), path)]),
            stdin: Vec::new(),
            timeout: Duration::from_secs(60),
            stdout: Stdout::Kept,
        }
    }

    /// Sets `CNI_COMMAND`.
    pub fn command(self, verb: &str) -> Self {
        self.env("CNI_COMMAND", verb)
    }

    /// Sets `CNI_CONTAINERID`.
    pub fn id(self, id: &str) -> Self {
        self.env("CNI_CONTAINERID", id)
    }

    /// Sets `CNI_NETNS`.
    pub fn netns(self, path: impl AsRef<Path>) -> Self {
        self.env("CNI_NETNS", path.as_ref())
    }

    /// Sets `CNI_IFNAME`.
    pub fn ifname(self, name: &str) -> Self {
        self.env("CNI_IFNAME", name)
    }

    /// Sets `CNI_ARGS`.
    pub fn cni_args(self, args: &str) -> Self {
        self.env("CNI_ARGS", args)
    }

    /// Sets `CNI_PATH`.
    pub fn cni_path(self, path: impl AsRef<OsStr>) -> Self {
        self.env("CNI_PATH", path.as_ref())
    }

    /// Sets the variables for the interface `eth0` of `container`.
    pub fn container(self, container: &Container) -> Self {
        self.id(&container.id).netns(container.netns()).ifname("eth0")
    }

    /// Sets a variable.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.insert(name.as_ref().to_owned(), value.as_ref().to_owned());
        self
    }

    /// Removes a variable.
    pub fn without(mut self, name: &str) -> Self {
        self.env.remove(OsStr::new(name));
        self
    }

    /// Adds a command line argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Sets the configuration.
    ///
    /// # Panics
    /// If it is not valid by the schema.
    #[track_caller]
    pub fn config(self, config: &Value) -> Self {
        let errors = schema::config_errors(config);
        assert!(errors.is_empty(), "the test's configuration is invalid: {errors:?}\n{config:#}");
        self.bad_config(config)
    }

    /// Sets a configuration that may be invalid.
    pub fn bad_config(self, config: &Value) -> Self {
        self.stdin(config.to_string())
    }

    /// Sets any bytes as standard input.
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = bytes.into();
        self
    }

    /// Sets the deadline on a machine that is not slow ([`crate::patience`]); a minute by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Makes standard output a pipe without a reader: writing fails.
    pub fn with_closed_stdout(mut self) -> Self {
        self.stdout = Stdout::Closed;
        self
    }

    /// Makes standard output a full pipe that is not read: writing blocks.
    pub fn with_stuck_stdout(mut self) -> Self {
        self.stdout = Stdout::Stuck;
        self
    }

    /// Runs the plugin to its end.
    ///
    /// # Panics
    /// If it cannot be started, if it runs longer than its deadline (then it is killed with its
    /// children), or if it succeeds with a result of version 1.x that is invalid by the schema.
    #[track_caller]
    pub fn run(self) -> Outcome {
        let stdin = file_with(&self.stdin);
        let mut started = self.spawn(Stdio::from(stdin));
        started.end()
    }

    /// Starts the plugin and keeps its standard input open. A plugin waits for the end of its
    /// configuration, which [`Started::finish`] and [`Started::release`] cause. So many plugins can
    /// begin to work at the same moment.
    pub fn start(self) -> Started {
        let config = self.stdin.clone();
        let mut started = self.spawn(Stdio::piped());
        let stdin = started.child.stdin.as_mut().expect("standard input is a pipe");
        stdin.write_all(&config).expect("a configuration fits into a pipe");
        started
    }

    /// Starts a shell that becomes the plugin when [`Started::let_go`] is called.
    pub(crate) fn held(self) -> Started {
        let (call, verb, config) = (self.describe(), self.verb(), self.stdin.clone());
        let (shell, script) = crate::trace::HOLDER;
        let args = ["-c".into(), script.into(), self.program.into_os_string()].into_iter().chain(self.args).collect();
        let held = Invocation { program: shell.into(), args, ..self };
        let mut started = Started { call, verb, ..held.spawn(Stdio::piped()) };
        started.config = config;
        started
    }

    /// Starts the program with this standard input.
    fn spawn(self, stdin: Stdio) -> Started {
        let (stdout, stderr) = (file_with(b""), file_with(b""));
        let (out, err) = (stdout.try_clone().unwrap(), stderr.try_clone().unwrap());
        let (out, reader) = match self.stdout {
            Stdout::Kept => (Stdio::from(out), None),
            Stdout::Closed => (Stdio::from(broken_pipe()), None),
            Stdout::Stuck => {
                let (reader, writer) = full_pipe();
                (Stdio::from(writer), Some(reader))
            }
        };
        let mut command = Command::new(&self.program);
        command.args(&self.args).env_clear().envs(&self.env).stdin(stdin).stdout(out).stderr(err);
        // In its own process group, so that Go's delegates are killed too at the deadline.
        // Delegates of these plugins end with their plugin.
        command.process_group(0).current_dir("/");
        let child = self.node.enter(|| command.spawn());
        let child = child.unwrap_or_else(|error| panic!("to run {}: {error}", self.program.display()));
        let (call, verb) = (self.describe(), self.verb());
        Started { child, stdout, stderr, timeout: self.timeout, call, verb, config: Vec::new(), _reader: reader }
    }

    /// Returns `CNI_COMMAND`, or an empty text.
    fn verb(&self) -> String {
        self.env.get(OsStr::new("CNI_COMMAND")).map(|verb| verb.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Returns the command line, the environment and the configuration, for failure messages.
    fn describe(&self) -> String {
        let mut text = format!("{} {:?}\n", self.program.display(), self.args);
        for (name, value) in self.env.iter().filter(|(name, _)| *name != "PATH") {
            text.push_str(&format!("  {}={}\n", name.to_string_lossy(), value.to_string_lossy()));
        }
        let stdin = String::from_utf8_lossy(&self.stdin);
        text.push_str("config: ");
        text.extend(stdin.chars().take(8000));
        text
    }
}

/// A plugin that is running. Use [`finish`](Started::finish).
#[derive(Debug)]
#[must_use = "a started plugin must be waited for"]
pub struct Started {
    child: Child,
    stdout: File,
    stderr: File,
    timeout: Duration,
    call: String,
    verb: String,
    /// The configuration of a held plugin, which [`let_go`](Started::let_go) writes.
    config: Vec<u8>,
    /// The reading end of a full pipe: as long as it is open, writing blocks.
    _reader: Option<PipeReader>,
}

impl Started {
    /// Returns the process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Closes its standard input, so that it begins to work.
    pub fn release(&mut self) {
        self.child.stdin.take();
    }

    /// Sends it SIGTERM, as a runtime does at its deadline.
    pub fn terminate(&self) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"));
        nix::sys::signal::kill(pid, Signal::SIGTERM).expect("to signal our own child");
    }

    /// Sends this signal to its whole process group, as a terminal does with SIGINT and SIGHUP.
    pub fn signal_group(&self, signal: Signal) {
        let group = Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"));
        killpg(group, signal).expect("to signal our own child");
    }

    /// Closes its standard input and waits until it has ended.
    ///
    /// # Panics
    /// As [`Invocation::run`].
    #[track_caller]
    pub fn finish(mut self) -> Outcome {
        self.end()
    }

    /// Waits until it has ended, with its standard input still open, like that of a terminal.
    ///
    /// # Panics
    /// As [`Invocation::run`].
    #[track_caller]
    pub fn finish_without_end_of_input(mut self) -> Outcome {
        let stdin = self.child.stdin.take();
        let outcome = self.end();
        drop(stdin);
        outcome
    }

    /// Makes the shell of [`Invocation::held`] become the plugin, and writes its configuration.
    pub(crate) fn let_go(&mut self) {
        let mut stdin = self.child.stdin.take().expect("standard input is a pipe");
        let config = [b"go\n", self.config.as_slice()].concat();
        // Fails if the plugin ends before it has read it, which some tests want.
        let _ = stdin.write_all(&config);
    }

    /// Returns the deadline on a machine that is not slow.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the outcome of a process that the caller has waited for.
    pub(crate) fn outcome(&mut self, status: ExitStatus) -> Outcome {
        Outcome::new(status, read(&mut self.stdout), read(&mut self.stderr), self.call.clone(), self.verb.clone())
    }

    /// Closes standard input, waits until the process has ended, and returns its outcome.
    #[track_caller]
    fn end(&mut self) -> Outcome {
        self.release();
        let (status, is_in_time) = self.wait();
        let outcome = self.outcome(status);
        assert!(is_in_time, "still running after {:?}\n{}", self.timeout, outcome.report());
        outcome.validated()
    }

    /// Waits until the process has ended, and kills its process group at the deadline. Returns the
    /// exit status, and whether it ended before the deadline.
    fn wait(&mut self) -> (ExitStatus, bool) {
        let group = Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"));
        let (child, timeout) = (&mut self.child, self.timeout);
        thread::scope(|scope| {
            let (ended, end) = mpsc::channel();
            scope.spawn(move || ended.send(child.wait()));
            let (status, is_in_time) = match end.recv_timeout(crate::patience(timeout)) {
                Ok(status) => (status, true),
                Err(_) => {
                    let _ = killpg(group, Signal::SIGKILL);
                    (end.recv().expect("a killed process ends"), false)
                }
            };
            (status.expect("to wait for our own child"), is_in_time)
        })
    }
}

/// Returns an open temporary file with this content, at its beginning.
fn file_with(bytes: &[u8]) -> File {
    use std::io::Seek;
    let mut file = tempfile::tempfile().expect("a temporary file");
    file.write_all(bytes).expect("to write a temporary file");
    file.rewind().expect("to rewind a temporary file");
    file
}

/// Returns the writing end of a pipe whose reading end is closed.
fn broken_pipe() -> File {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    File::from(std::os::fd::OwnedFd::from(writer))
}

/// Returns both ends of a full pipe.
fn full_pipe() -> (PipeReader, PipeWriter) {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).expect("to change our own pipe");
    while writer.write(&[b' '; 4096]).is_ok() {}
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty())).expect("to change our own pipe");
    (reader, writer)
}

/// Returns the content of a file that a plugin has written.
fn read(file: &mut File) -> String {
    use std::io::{Read, Seek};
    // The plugin shares the position in the file, which is now at the end.
    file.rewind().expect("to rewind a temporary file");
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).expect("to read a temporary file");
    String::from_utf8_lossy(&bytes).into_owned()
}
