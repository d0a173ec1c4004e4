//! A node of values: plugins that only answer, namespaces that are a list of paths.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use cni::machine::{Child, Exit as End, Machine, Output, RunError};
use cni::rollback::Notes;

use crate::{Call, ColorMode, Exit, Streams, run};

/// "plugin VERB", the variables, the configuration.
pub(crate) type PluginCall = (String, BTreeMap<String, String>, serde_json::Value);

#[derive(Default)]
struct Values {
    namespaces: BTreeSet<String>,
    answers: BTreeMap<String, (i32, String)>,
    asked: RefCell<Vec<PluginCall>>,
    logged: BTreeMap<String, String>,
}

impl Machine for Values {
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
        let call = format!("{} {}", child.program.file_name().unwrap().to_str().unwrap(), env["CNI_COMMAND"]);
        let usual = match env["CNI_COMMAND"].as_str() {
            "ADD" => r#"{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.2/24"}]}"#,
            "VERSION" => r#"{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}"#,
            _ => "",
        };
        let (status, stdout) = self.answers.get(&call).cloned().unwrap_or((0, usual.to_owned()));
        if let (Some(line), Some(path)) = (self.logged.get(&call), env.get("CNI_LOG_FILE")) {
            let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
            writeln!(file, "2026-11-21T02:16:03.018Z {line}").unwrap();
        }
        self.asked.borrow_mut().push((call, env, serde_json::from_slice(child.stdin).unwrap()));
        Ok(Output { status: End::Status(status), stdout: stdout.into_bytes(), stderr: Vec::new() })
    }
}

/// A node with the plugins `a` and `b`, the network `net` of both, and the namespace
/// `/run/netns/x`.
pub(crate) struct Node {
    pub(crate) folder: tempfile::TempDir,
    /// Where the operator is: `/run/netns`.
    pub(crate) here: &'static str,
    values: Values,
    variables: Vec<(String, String)>,
}

/// What a call of the tool left.
pub(crate) struct CallOutcome {
    pub(crate) exit: Exit,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl CallOutcome {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {:?}", self.stdout))
    }
}

impl Node {
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
        let mut node = Node { folder, here: "/run/netns", values: Values::default(), variables };
        let plugins = r#"[{"type":"a","capabilities":{"mac":true}},{"type":"b"}]"#;
        node.configure(&format!(r#"{{"cniVersion":"1.1.0","name":"net","plugins":{plugins}}}"#));
        node.namespace("/run/netns/x");
        node
    }

    /// The text of the network's file.
    pub(crate) fn configure(&self, text: &str) {
        let folder = self.folder.path().join("net.d");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("net.conflist"), text).unwrap();
    }

    pub(crate) fn namespace(&mut self, path: &str) {
        self.values.namespaces.insert(path.to_owned());
    }

    pub(crate) fn no_namespace(&mut self, path: &str) {
        self.values.namespaces.remove(path);
    }

    pub(crate) fn variable(&mut self, key: &str, value: &str) {
        self.variables.push((key.to_owned(), value.to_owned()));
    }

    /// `call` ("a ADD") fails with this code.
    pub(crate) fn fail(&mut self, call: &str, code: u32) {
        let error = format!(r#"{{"code":{code},"msg":"{call} went wrong","details":"d"}}"#);
        self.values.answers.insert(call.to_owned(), (1, error));
    }

    /// `call` ("a ADD") writes this line if it is asked for a log.
    pub(crate) fn log(&mut self, call: &str, line: &str) {
        self.values.logged.insert(call.to_owned(), line.to_owned());
    }

    /// Runs the tool; its arguments are separated by blanks.
    pub(crate) fn say(&self, args: &str) -> CallOutcome {
        self.say_args(&args.split_whitespace().collect::<Vec<_>>())
    }

    /// The same, where an argument is empty or has blanks in it.
    pub(crate) fn say_args(&self, args: &[&str]) -> CallOutcome {
        // First, because the last argument may lack its value.
        let cache = format!("--cache-dir={}", self.folder.path().join("cache").display());
        let args = [cache].into_iter().chain(args.iter().map(|arg| (*arg).to_owned()));
        let call = Call {
            args: args.map(Into::into).collect(),
            environment: self.variables.iter().map(|(key, value)| (key.into(), value.into())).collect(),
            folder: self.here.into(),
            machine: &self.values,
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

    /// The same, which must succeed.
    #[track_caller]
    pub(crate) fn done(&self, args: &str) -> String {
        let said = self.say(args);
        assert_eq!(said.exit, Exit::Done, "{}", said.stderr);
        said.stdout
    }

    /// What was asked since the last time.
    pub(crate) fn asked(&self) -> Vec<PluginCall> {
        self.values.asked.take()
    }

    pub(crate) fn calls(&self) -> String {
        let calls: Vec<String> = self.asked().into_iter().map(|(call, ..)| call).collect();
        calls.join(", ")
    }
}
