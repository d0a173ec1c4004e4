//! validate: reports all problems of network files. Without files, lists the files in the networks'
//! folder with their problems.
//!
//! A plugin's keys are checked by the plugin's own code ([`rules`]). The keys of plugins of other
//! projects are not checked. If no error is reported, an ADD is expected to work:
//! tests/tests/suite/operator/sound.rs checks that.

mod chain;
mod document;
mod host;
mod locate;
mod position;
mod rules;

use std::path::{Path, PathBuf};

use clap::Args;
use cni::{Code, Error};
use libcni::ConfFile;
use serde_json::{Value, json};

use crate::call::{Call, ColorMode, Exit, Format, Shared, Streams, Variables};
use crate::node;
use crate::report::{Colour, paint, table, write_report};

/// The arguments of `validate`.
#[derive(Debug, Args)]
pub(crate) struct Validate {
    /// Files, or names of networks in the networks' folder [default: all networks]
    #[arg(value_name = "FILE|NETWORK", value_hint = clap::ValueHint::FilePath)]
    subjects: Vec<PathBuf>,
    /// Check the files only, without this host's plugins, kernel and other networks
    #[arg(long)]
    file_only: bool,
    /// Exit with 1 also if there are only warnings
    #[arg(long)]
    strict: bool,
}

impl Validate {
    /// Whether these problems of a file let the verb succeed.
    fn accepts(&self, problems: &[Problem]) -> bool {
        if self.strict { problems.is_empty() } else { !has_error(problems) }
    }
}

/// The effect of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Severity {
    /// An ADD fails.
    Error,
    /// An ADD can succeed, but perhaps does not do what the file's author intended.
    Warning,
}

impl Severity {
    /// Returns the word for reports and JSON.
    fn as_str(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
        }
    }
}

/// A problem of a network file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    severity: Severity,
    /// The path of the key that causes it, such as `plugins[0].ipam.ranges`. Empty for the whole
    /// document; `@<line>:<column>` if the text is not JSON.
    path: String,
    /// What is wrong, and how to fix it if that is not obvious.
    what: String,
}

impl Problem {
    /// Returns a problem because of which ADD fails.
    fn error(path: impl Into<String>, what: impl Into<String>) -> Problem {
        Problem { severity: Severity::Error, path: path.into(), what: what.into() }
    }

    /// Returns a problem despite which ADD can succeed.
    fn warning(path: impl Into<String>, what: impl Into<String>) -> Problem {
        Problem { severity: Severity::Warning, path: path.into(), what: what.into() }
    }
}

/// Whether one of the problems is an error.
fn has_error(problems: &[Problem]) -> bool {
    problems.iter().any(|problem| problem.severity == Severity::Error)
}

/// A network file and its problems.
struct CheckedFile {
    path: PathBuf,
    /// The content of the file.
    text: String,
    /// The network's name, or `?` if the file has none.
    network: String,
    problems: Vec<Problem>,
}

/// Runs `validate`: checks the files or networks in the arguments and writes their problems.
/// Returns [`Exit::Failed`] if the arguments do not [accept](Validate::accepts) the problems of a
/// file that runtimes may use.
///
/// # Errors
/// - Code 5 if a file or the networks' folder cannot be read, or stdout cannot be written.
/// - Code 7 if a network in the arguments is not configured.
pub(crate) fn run(args: &Validate, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let host = if args.file_only { None } else { Some((shared, call)) };
    let folder = shared.conf_folder(&Variables(&call.environment));
    let configured = folder.files();
    let is_configured = |path: &Path| configured.iter().flatten().any(|file| has_name(file, path));
    // The name of a network has no folder. If one of the arguments is a file, all are.
    let is_file = |path: &PathBuf| path.components().count() > 1 || (!is_configured(path) && path.exists());
    let is_accepted = if args.subjects.iter().any(is_file) {
        let files = args.subjects.iter().map(|path| check_file(path, host, streams));
        let files = files.collect::<Result<Vec<CheckedFile>, Error>>()?;
        write_files(&files, shared.format(), streams)?;
        files.iter().all(|file| args.accepts(&file.problems))
    } else {
        let listed = list(select(configured?, &args.subjects, folder.path())?, host, streams);
        write_listed(&listed, folder.path(), shared.format(), streams)?;
        listed.iter().all(|file| file.file_use == FileUse::Shadowed || args.accepts(&file.checked.problems))
    };
    Ok(if is_accepted { Exit::Done } else { Exit::Failed })
}

/// Whether a file in the networks' folder defines the network `name`.
fn has_name(file: &ConfFile, name: &Path) -> bool {
    file.name.as_ref().is_some_and(|found| Path::new(found) == name)
}

/// Whether runtimes use a network file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileUse {
    /// Runtimes use it for its network.
    Used,
    /// Runtimes never use it, because another file with the same network precedes it.
    Shadowed,
    /// Runtimes cannot load it.
    Invalid,
}

/// A file in the networks' folder.
struct ListedFile {
    /// The network's name, if the file has one.
    name: Option<String>,
    /// The CNI version, or `?` if the file is invalid.
    version: String,
    /// The types of the plugins, or `?` if the file is invalid.
    kinds: String,
    file_use: FileUse,
    checked: CheckedFile,
}

/// Returns the files whose network is in `requested`, or all files if `requested` is empty, in the
/// order in which runtimes search them.
///
/// # Errors
/// Code 7 if a requested network is not configured.
fn select(files: Vec<ConfFile>, requested: &[PathBuf], folder: &Path) -> Result<Vec<ConfFile>, Error> {
    for name in requested {
        if !files.iter().any(|file| has_name(file, name)) {
            let msg = format!("no net configuration with name {name:?} in {}", folder.display());
            return Err(Error::config(msg).with_details("no file has this name either"));
        }
    }
    let mut files = node::by_precedence(files);
    files.retain(|file| requested.is_empty() || requested.iter().any(|name| has_name(file, name)));
    Ok(files)
}

/// Checks files in the networks' folder. A file that cannot be read has this problem.
fn list(files: Vec<ConfFile>, host: Option<(&Shared, &Call<'_>)>, streams: &Streams<'_>) -> Vec<ListedFile> {
    let mut listed: Vec<ListedFile> = Vec::new();
    for file in files {
        let checked = check_file(&file.path, host, streams).unwrap_or_else(|error| CheckedFile {
            path: file.path.clone(),
            text: String::new(),
            network: "?".to_owned(),
            problems: vec![Problem::error("", error.to_string())],
        });
        let is_shadowed = listed.iter().any(|earlier| earlier.file_use == FileUse::Used && earlier.name == file.name);
        listed.push(ListedFile::new(file, checked, is_shadowed));
    }
    listed
}

/// Writes a table of the files in `folder`, and below it their problems.
///
/// # Errors
/// Code 5 if stdout cannot be written.
fn write_listed(listed: &[ListedFile], folder: &Path, format: Format, streams: &mut Streams<'_>) -> Result<(), Error> {
    let json = || {
        let networks: Vec<Value> = listed.iter().map(ListedFile::as_json).collect();
        json!({"folder": folder.display().to_string(), "networks": networks})
    };
    let text = |style| {
        if listed.is_empty() {
            return format!("No network is configured in {}.\n", folder.display());
        }
        let rows = listed.iter().map(|file| (file.as_row(), None)).collect();
        let problems: String = listed.iter().flat_map(|file| file.checked.lines(style)).collect();
        let blank_line = if problems.is_empty() { "" } else { "\n" };
        table(&["NETWORK", "VERSION", "PLUGINS", "FILE", ""], rows, style) + blank_line + &problems
    };
    write_report(streams, format, json, text)
}

impl ListedFile {
    /// Combines a file with the outcome of its check. `is_shadowed` says whether a preceding file
    /// defines the same network.
    fn new(ConfFile { name, list, .. }: ConfFile, checked: CheckedFile, is_shadowed: bool) -> ListedFile {
        let Ok(list) = list else {
            let (version, kinds) = ("?".to_owned(), "?".to_owned());
            return ListedFile { name, version, kinds, file_use: FileUse::Invalid, checked };
        };
        let kinds: Vec<&str> = list.plugins().iter().map(|plugin| plugin.kind()).collect();
        let file_use = if is_shadowed { FileUse::Shadowed } else { FileUse::Used };
        ListedFile { name, version: list.cni_version().to_owned(), kinds: kinds.join(","), file_use, checked }
    }

    /// Returns the row of the table.
    fn as_row(&self) -> Vec<String> {
        let name = self.name.clone().unwrap_or_else(|| "?".to_owned());
        let state = match self.file_use {
            FileUse::Shadowed => "never used: another file defines this network".to_owned(),
            FileUse::Used | FileUse::Invalid => summary(&self.checked.problems),
        };
        vec![name, self.version.clone(), self.kinds.clone(), self.checked.path.display().to_string(), state]
    }

    /// Returns the file for `--json`.
    fn as_json(&self) -> Value {
        json!({
            "network": self.name,
            "cniVersion": self.version,
            "plugins": self.kinds,
            "file": self.checked.path.display().to_string(),
            "loads": self.file_use != FileUse::Invalid,
            "used": self.file_use == FileUse::Used,
            "sound": !has_error(&self.checked.problems),
            "problems": self.checked.as_json(),
        })
    }
}

/// Returns `ok`, or the numbers of errors and warnings, such as `1 error, 2 warnings`.
fn summary(problems: &[Problem]) -> String {
    let count_text = |severity: Severity| {
        let count = problems.iter().filter(|problem| problem.severity == severity).count();
        let plural = if count == 1 { "" } else { "s" };
        (count > 0).then(|| format!("{count} {}{plural}", severity.as_str()))
    };
    let counts: Vec<String> = [Severity::Error, Severity::Warning].into_iter().filter_map(count_text).collect();
    if counts.is_empty() { "ok".to_owned() } else { counts.join(", ") }
}

/// Writes the problems of all files.
///
/// # Errors
/// Code 5 if stdout cannot be written.
fn write_files(files: &[CheckedFile], format: Format, streams: &mut Streams<'_>) -> Result<(), Error> {
    let file_json = |file: &CheckedFile| {
        json!({
            "file": file.path.display().to_string(),
            "network": file.network,
            "sound": !has_error(&file.problems),
            "problems": file.as_json(),
        })
    };
    let json = || json!({"files": files.iter().map(file_json).collect::<Vec<_>>()});
    let text = |style| {
        let mut text = String::new();
        for file in files {
            text += &file.lines(style).concat();
            if !has_error(&file.problems) {
                text += &format!("{}: network {} has no errors\n", file.path.display(), file.network);
            }
        }
        text
    };
    write_report(streams, format, json, text)
}

impl CheckedFile {
    /// Returns a line for each problem, `file:line:column: error: path: what`, in the form that
    /// compilers use and editors understand.
    fn lines(&self, style: ColorMode) -> Vec<String> {
        let text_of = |problem: &Problem| {
            let (line, column) = position::find(&self.text, &problem.path);
            let position = paint(style, Colour::Bold, &format!("{}:{line}:{column}:", self.path.display()));
            let colour = if problem.severity == Severity::Error { Colour::Red } else { Colour::Yellow };
            let severity = paint(style, colour, &format!("{}:", problem.severity.as_str()));
            // A path with `@` is a position, with which the line already begins.
            let has_key = !problem.path.is_empty() && !problem.path.starts_with('@');
            let path = if has_key { format!("{}: ", problem.path) } else { String::new() };
            format!("{position} {severity} {path}{}\n", problem.what)
        };
        self.problems.iter().map(text_of).collect()
    }

    /// Returns the problems as a JSON list.
    fn as_json(&self) -> Value {
        let row = |problem: &Problem| {
            let (line, column) = position::find(&self.text, &problem.path);
            let severity = problem.severity.as_str();
            json!({"severity": severity, "path": problem.path, "line": line, "column": column, "what": problem.what})
        };
        self.problems.iter().map(row).collect()
    }
}

/// Checks one file. With `host`, also compares it with this host's plugins, kernel and other
/// networks.
///
/// # Errors
/// Code 5 if the file cannot be read.
fn check_file(path: &Path, host: Option<(&Shared, &Call<'_>)>, streams: &Streams<'_>) -> Result<CheckedFile, Error> {
    let raw = cni::file::read(path)
        .map_err(|error| Error::caused(Code::IO, format_args!("failed to read {}", path.display()), error))?;
    let text = String::from_utf8_lossy(&raw).into_owned();
    let mut problems = Vec::new();
    let mut network = "?".to_owned();
    match document::read(&text, &mut problems) {
        Err(problem) => problems.push(problem),
        Ok(mut document) => {
            if let Some(name) = document.get("name").and_then(Value::as_str) {
                name.clone_into(&mut network);
            }
            let loaded = document::add_plugins_of_folder(&mut document, path);
            problems.extend(rules::check(&document));
            problems.extend(chain::check(&document));
            // The error of loading mostly repeats another error.
            if !has_error(&problems)
                && let Err(problem) = loaded
            {
                problems.push(problem);
            }
            if let Some((shared, call)) = host {
                problems.extend(host::check(&document, &problems, shared, call, &streams.notes));
            }
        }
    }
    problems.sort_by_key(|problem| position::find(&text, &problem.path));
    // Several checks may find the same problem.
    problems.dedup();
    Ok(CheckedFile { path: path.to_owned(), text, network, problems })
}

#[cfg(test)]
mod tests {
    use crate::call::Exit;
    use crate::testing::Node;

    #[test]
    fn validate_takes_files_or_networks() {
        let node = Node::new();
        let file = node.folder.path().join("net.d/net.conflist");
        let listed = node.call("validate");
        assert_eq!((listed.exit, listed.stdout.contains("net      1.1.0")), (Exit::Done, true), "{}", listed.stdout);
        for same in ["networks", "validate net", "networks net"] {
            assert_eq!(node.call(same).stdout, listed.stdout, "{same}");
        }
        assert_eq!(node.call("validate --json").json(), node.call("networks --json").json());
        let of_file = node.call_with(&["validate", file.to_str().unwrap()]);
        assert!(of_file.stdout.ends_with("net.conflist: network net has no errors\n"), "{}", of_file.stdout);
        let mixed = node.call_with(&["validate", "net", file.to_str().unwrap()]);
        assert!(mixed.exit == Exit::Failed && mixed.stderr.contains("failed to read net: "), "{}", mixed.stderr);
        let absent = node.call("validate absent");
        assert!(absent.stderr.contains("no net configuration with name \"absent\" in "), "{}", absent.stderr);
        assert!(absent.stderr.contains("no file has this name either"), "{}", absent.stderr);
        node.configure(r#"{"cniVersion":"1.1.0","name":"net","plugins":[{"type":"a"}],"pluginz":[]}"#);
        let (plain, strict) = (node.call("validate").exit, node.call("validate --strict").exit);
        assert_eq!((plain, strict), (Exit::Done, Exit::Failed));
    }

    #[test]
    fn a_file_that_cannot_be_read_spoils_no_other_network() {
        let node = Node::new();
        let folder = node.folder.path().join("net.d");
        std::os::unix::fs::symlink("nowhere", folder.join("50-x.conflist")).unwrap();
        std::fs::File::create(folder.join("60-y.conflist")).unwrap().set_len(5 << 30).unwrap();
        let outcome = node.call("networks");
        assert_eq!((outcome.exit, outcome.stderr.as_str()), (Exit::Failed, ""));
        assert!(
            outcome.stdout.lines().any(|line| line.starts_with("net ") && line.ends_with("ok")),
            "{}",
            outcome.stdout
        );
        for problem in [
            "50-x.conflist:1:1: error: failed to read ",
            "50-x.conflist: No such file",
            "60-y.conflist:1:1: error: failed to read ",
            "60-y.conflist: it is longer than 16 MiB",
        ] {
            assert!(outcome.stdout.contains(problem), "{problem}: {}", outcome.stdout);
        }
        let networks = node.call("networks --json").json()["networks"].clone();
        let column = |key: &str| networks.as_array().unwrap().iter().map(|one| one[key].clone()).collect::<Vec<_>>();
        assert_eq!(column("network"), [serde_json::Value::Null, serde_json::Value::Null, "net".into()]);
        assert_eq!(column("loads"), [false, false, true]);
    }
}
