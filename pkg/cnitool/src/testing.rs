//! Simulates a node for tests: plugins that only return prepared answers, and namespaces that are
//! paths in a set.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use cni::machine::{Child, Exit as PluginExit, Machine, Output, RunError};
use cni::rollback::Notes;

use crate::call::{Call, ColorMode, Exit, Streams};
use crate::run;

/// A call of a plugin: its name, such as `a ADD`, its environment and its configuration.
pub(crate) type PluginCall = (String, BTreeMap<String, String>, serde_json::Value);

/// A [`Machine`] that runs no programs.
#[derive(Default)]
struct SimulatedMachine {
    namespaces: BTreeSet<String>,
    /// The exit status and stdout by the name of a call. Other calls succeed.
    answers: BTreeMap<String, (i32, String)>,
    calls: RefCell<Vec<PluginCall>>,
    /// The line that is written to the log by the name of a call.
    log_lines: BTreeMap<String, String>,
}

impl Machine for SimulatedMachine {
    fn is_own_netns(&self, path: &Path) -> io::Result<bool> {
        match path.to_str() {
            Some("/secret") => Err(io::ErrorKind::PermissionDenied.into()),
            Some("/plain/file") => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a namespace")),
            Some(path) if self.namespaces.contains(path) => Ok(false),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
    fn terminated(&self) -> bool {
        false
    }
    fn now(&self) -> Instant {
        Instant::now()
    }
    fn run(&self, child: &Child<'_>) -> Result<Output, RunError> {
        let env = child.env.iter().flatten();
        let env: BTreeMap<String, String> =
            env.map(|(key, value)| (key.to_str().unwrap().to_owned(), value.to_str().unwrap().to_owned())).collect();
        let name = format!("{} {}", child.program.file_name().unwrap().to_str().unwrap(), env["CNI_COMMAND"]);
        let default_answer = match env["CNI_COMMAND"].as_str() {
            "ADD" => r#"{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.2/24"}]}"#,
            "VERSION" => r#"{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}"#,
            _ => "",
        };
        let (status, stdout) = self.answers.get(&name).cloned().unwrap_or((0, default_answer.to_owned()));
        if let (Some(line), Some(path)) = (self.log_lines.get(&name), env.get("CNI_LOG_FILE")) {
            let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
            writeln!(file, "2026-11-21T02:16:03.018Z {line}").unwrap();
        }
        self.calls.borrow_mut().push((name, env, serde_json::from_slice(child.stdin).unwrap()));
        Ok(Output { status: PluginExit::Status(status), stdout: stdout.into_bytes(), stderr: Vec::new() })
    }
}

/// A node with the plugins `a` and `b`, the network `net` that uses both, and the namespace
/// `/run/netns/x`.
pub(crate) struct Node {
    pub(crate) folder: tempfile::TempDir,
    /// The working folder of the tool, at first `/run/netns`.
    pub(crate) working_folder: &'static str,
    machine: SimulatedMachine,
    /// The environment of the tool. The last of several duplicates is used.
    variables: Vec<(String, String)>,
}

/// The outcome of a call of the tool.
pub(crate) struct CallOutcome {
    pub(crate) exit: Exit,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl CallOutcome {
    /// Parses stdout.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {:?}", self.stdout))
    }
}

impl Node {
    /// Creates the node.
    pub(crate) fn new() -> Node {
        let folder = tempfile::tempdir().unwrap();
        for plugin in ["bin/a", "bin/b"] {
            let path = folder.path().join(plugin);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let variables = vec![("CNI_PATH".to_owned(), path("bin")), ("NETCONFPATH".to_owned(), path("net.d"))];
        let mut node = Node { folder, working_folder: "/run/netns", machine: SimulatedMachine::default(), variables };
        let plugins = r#"[{"type":"a","capabilities":{"mac":true}},{"type":"b"}]"#;
        node.configure(&format!(r#"{{"cniVersion":"1.1.0","name":"net","plugins":{plugins}}}"#));
        node.add_namespace("/run/netns/x");
        node
    }

    /// Writes `text` to the network's file.
    pub(crate) fn configure(&self, text: &str) {
        let folder = self.folder.path().join("net.d");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("net.conflist"), text).unwrap();
    }

    pub(crate) fn add_namespace(&mut self, path: &str) {
        self.machine.namespaces.insert(path.to_owned());
    }

    pub(crate) fn remove_namespace(&mut self, path: &str) {
        self.machine.namespaces.remove(path);
    }

    pub(crate) fn set_variable(&mut self, key: &str, value: &str) {
        self.variables.push((key.to_owned(), value.to_owned()));
    }

    /// Makes the plugin call `name`, such as `a ADD`, fail with this code.
    pub(crate) fn fail(&mut self, name: &str, code: u32) {
        let error = format!(r#"{{"code":{code},"msg":"{name} went wrong","details":"d"}}"#);
        self.machine.answers.insert(name.to_owned(), (1, error));
    }

    /// Makes the plugin call `name` write this line if its environment names a log.
    pub(crate) fn log(&mut self, name: &str, line: &str) {
        self.machine.log_lines.insert(name.to_owned(), line.to_owned());
    }

    /// Runs the tool with arguments that are separated by blanks.
    pub(crate) fn call(&self, args: &str) -> CallOutcome {
        self.call_with(&args.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs the tool with arguments that may be empty or contain blanks.
    pub(crate) fn call_with(&self, args: &[&str]) -> CallOutcome {
        // `--cache-dir` comes first, because the last argument may be an option without its value.
        let cache = format!("--cache-dir={}", self.folder.path().join("cache").display());
        let args = [cache].into_iter().chain(args.iter().map(|arg| (*arg).to_owned()));
        let call = Call {
            args: args.map(Into::into).collect(),
            environment: self.variables.iter().map(|(key, value)| (key.into(), value.into())).collect(),
            folder: self.working_folder.into(),
            machine: &self.machine,
        };
        let lines = Rc::new(RefCell::new(String::new()));
        let sink = Rc::clone(&lines);
        let notes = Notes::new(move |line| *sink.borrow_mut() += &format!("{line}\n"));
        let mut stdout = Vec::new();
        let (stdout_style, stderr_style) = (ColorMode::Plain, ColorMode::Plain);
        let exit = run(&call, &mut Streams { stdout: &mut stdout, notes, stdout_style, stderr_style });
        let stderr = lines.borrow().clone();
        CallOutcome { exit, stdout: String::from_utf8(stdout).unwrap(), stderr }
    }

    /// Runs the tool, which must succeed, and returns its stdout.
    #[track_caller]
    pub(crate) fn call_ok(&self, args: &str) -> String {
        let outcome = self.call(args);
        assert_eq!(outcome.exit, Exit::Done, "{}", outcome.stderr);
        outcome.stdout
    }

    /// Returns the calls of plugins since the previous `take_calls` or `take_call_names`.
    pub(crate) fn take_calls(&self) -> Vec<PluginCall> {
        self.machine.calls.take()
    }

    /// As [`take_calls`](Node::take_calls), but returns only the names of the calls.
    pub(crate) fn take_call_names(&self) -> String {
        let calls: Vec<String> = self.take_calls().into_iter().map(|(call, ..)| call).collect();
        calls.join(", ")
    }
}
