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

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use clap::Args;
use cni::{Code, Error};
use libcni::{ConfFile, ConfFolder, NetworkList};
use serde::Serialize;
use serde_json::{Value, json};

use crate::call::{Context, Exit, Streams};
use crate::report::{Colour, Report, counted, did_you_mean};

pub(crate) use rules::{LIST_KEYS, STANDARD_KEYS};

/// The arguments of `validate`.
#[derive(Debug, Args)]
pub(crate) struct Validate {
    /// Files, folders, - for stdin, or names of networks [default: all networks]
    #[arg(value_name = "FILE|FOLDER|NETWORK", value_hint = clap::ValueHint::FilePath)]
    subjects: Vec<PathBuf>,
    /// Check the files only, without this host's plugins, kernel and other networks
    #[arg(long)]
    file_only: bool,
    /// Exit with 1 also if there are only warnings
    #[arg(long)]
    strict: bool,
}

/// The effect of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    /// An ADD fails.
    Error,
    /// An ADD can succeed, but perhaps does not do what the file's author intended.
    Warning,
}

/// A problem of a network file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Problem {
    severity: Severity,
    /// The path of the key that causes it, such as `plugins[0].ipam.ranges`. Empty for the whole
    /// document; `@<line>:<column>` if the text is not JSON.
    path: String,
    /// The position of the key in the text, from 1.
    line: usize,
    column: usize,
    /// What is wrong, and how to fix it if that is not obvious.
    what: String,
}

impl Problem {
    /// Returns a problem because of which ADD fails.
    fn error(path: impl Into<String>, what: impl Into<String>) -> Problem {
        Problem { severity: Severity::Error, path: path.into(), line: 1, column: 1, what: what.into() }
    }

    /// Returns a problem despite which ADD can succeed.
    fn warning(path: impl Into<String>, what: impl Into<String>) -> Problem {
        Problem { severity: Severity::Warning, ..Problem::error(path, what) }
    }
}

/// Whether one of the problems is an error.
fn has_error(problems: &[Problem]) -> bool {
    problems.iter().any(|problem| problem.severity == Severity::Error)
}

/// A network file and its problems.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CheckedFile {
    /// The network's name, if the file has one.
    network: Option<String>,
    cni_version: Option<String>,
    /// The types of the plugins.
    plugins: Vec<String>,
    /// Its path, `-` for stdin.
    file: String,
    /// Whether runtimes can load it.
    loads: bool,
    /// Whether runtimes use it for its network: no preceding file of the folder has that network.
    used: bool,
    /// Whether it has no errors.
    sound: bool,
    /// The numbers of its problems, or that it is never used, for people.
    state: String,
    problems: Vec<Problem>,
}

/// Runs `validate`: checks the files, folders or networks in the arguments and writes their
/// problems. Returns [`Exit::Failed`] if a file that runtimes may use has an error or, with
/// `--strict`, a warning.
///
/// # Errors
/// - Code 5 if a file or a folder cannot be read, or stdout cannot be written.
/// - Code 7 if a network in the arguments is not configured.
pub(crate) fn run(args: &Validate, context: &Context<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let host = if args.file_only { None } else { Some(context) };
    let folder = context.conf_folder();
    let configured = folder.files();
    let has_name = |file: &&ConfFile, name: &Path| file.name.as_ref().is_some_and(|found| Path::new(found) == name);
    let mut files: Vec<CheckedFile> = Vec::new();
    // Whether the networks are those of a folder, which are listed in a table.
    let mut is_listing = true;
    for path in &args.subjects {
        // The name of a network has no folder.
        let mut of_network = configured.iter().flatten().filter(|file| has_name(file, path)).peekable();
        if of_network.peek().is_some() {
            list(&mut files, of_network, host);
        } else if path.is_dir() {
            list(&mut files, &ConfFolder::new(path).files()?, host);
        } else if path.components().count() > 1 || path.as_os_str() == "-" || path.exists() {
            is_listing = false;
            files.push(check_file(path, host)?);
        } else {
            let names = configured.iter().flatten().filter_map(|file| file.name.as_deref());
            let msg = format!("no net configuration with name {path:?} in {}", folder.path().display());
            let details = format!("no file has this name either{}", did_you_mean(&path.to_string_lossy(), names));
            return Err(Error::config(msg).with_details(details));
        }
    }
    if args.subjects.is_empty() {
        list(&mut files, &configured?, host);
    }
    let mut report = Report::new(streams);
    let none = format!("No network is configured in {}.", folder.path().display());
    if is_listing {
        let columns = "network cniVersion plugins file state";
        let rows: Vec<Value> = files.iter().map(|file| json!(file)).collect();
        report.table(columns, &rows, |_| None, &none);
        if files.iter().any(|file| !file.problems.is_empty()) {
            report.line("");
        }
    }
    files.iter().for_each(|file| file.add_problems(&mut report));
    for CheckedFile { file, network, .. } in files.iter().filter(|file| file.sound && !is_listing) {
        report.line(format_args!("{file}: network {} has no errors", network.as_deref().unwrap_or("?")));
    }
    let document = json!({"networks": files, "folder": folder.path().display().to_string()});
    report.write(streams, context.format(), &document)?;
    let is_accepted = |file: &CheckedFile| file.sound && (file.problems.is_empty() || !args.strict);
    // A file that is never used does no harm.
    let mut relevant = files.iter().filter(|file| file.used || !file.loads || !is_listing);
    Ok(if relevant.all(is_accepted) { Exit::Done } else { Exit::Failed })
}

/// Checks files of a folder. A file that cannot be read has this problem.
fn list<'f>(
    files: &mut Vec<CheckedFile>,
    of_folder: impl IntoIterator<Item = &'f ConfFile>,
    host: Option<&Context<'_>>,
) {
    for ConfFile { path, .. } in of_folder {
        let mut checked = check_file(path, host)
            .unwrap_or_else(|error| CheckedFile::new(path, None, vec![Problem::error("", error.to_string())]));
        let is_shadowed = files.iter().any(|earlier| earlier.used && earlier.network == checked.network);
        if checked.used && is_shadowed {
            checked.used = false;
            "never used: another file defines this network".clone_into(&mut checked.state);
        }
        files.push(checked);
    }
}

impl CheckedFile {
    /// Returns a file with its problems. `list` is what runtimes load from it.
    fn new(path: &Path, list: Option<&NetworkList>, problems: Vec<Problem>) -> CheckedFile {
        CheckedFile {
            network: list.map(|list| list.name().to_owned()),
            cni_version: list.map(|list| list.cni_version().to_owned()),
            plugins: list.iter().flat_map(|list| list.plugins()).map(|plugin| plugin.kind().to_owned()).collect(),
            file: path.display().to_string(),
            loads: list.is_some(),
            used: list.is_some(),
            sound: !has_error(&problems),
            state: summary(&problems),
            problems,
        }
    }

    /// Adds a line for each problem, in the form that compilers use and editors understand.
    fn add_problems(&self, report: &mut Report) {
        for Problem { severity, path, line, column, what } in &self.problems {
            let severity = match severity {
                Severity::Error => (Some(Colour::Red), "error:"),
                Severity::Warning => (Some(Colour::Yellow), "warning:"),
            };
            // A path with `@` is a position, with which the line already begins.
            let has_key = !path.is_empty() && !path.starts_with('@');
            let text = if has_key { format!("{path}: {what}") } else { what.clone() };
            let position = format!("{}:{line}:{column}:", self.file);
            report.parts(&[(Some(Colour::Bold), &position), severity, (None, &text)]);
        }
    }
}

/// Returns `ok`, or the numbers of errors and warnings.
fn summary(problems: &[Problem]) -> String {
    let errors = problems.iter().filter(|problem| problem.severity == Severity::Error).count();
    let counts = [(errors, "error"), (problems.len() - errors, "warning")];
    let counts: Vec<String> = counts.iter().filter(|(n, _)| *n > 0).map(|(n, noun)| counted(*n, noun)).collect();
    if counts.is_empty() { "ok".to_owned() } else { counts.join(", ") }
}

/// Checks one file, or stdin for `-`. With `host`, also compares it with this host's plugins,
/// kernel and other networks.
///
/// # Errors
/// Code 5 if the file cannot be read.
fn check_file(path: &Path, host: Option<&Context<'_>>) -> Result<CheckedFile, Error> {
    /// The largest network that is read from stdin, in bytes, as for files.
    const MAX_LENGTH: u64 = 16 << 20;
    let is_stdin = path.as_os_str() == "-";
    let mut raw = Vec::new();
    let outcome = match is_stdin {
        true => io::stdin().take(MAX_LENGTH).read_to_end(&mut raw).map(drop),
        false => cni::file::read(path).map(|content| raw = content),
    };
    outcome.map_err(|error| Error::caused(Code::IO, format_args!("failed to read {}", path.display()), error))?;
    let text = String::from_utf8_lossy(&raw).into_owned();
    let list = match is_stdin {
        true => NetworkList::parse(&raw).or_else(|_| NetworkList::parse_single(&raw)),
        false => ConfFile::read(path.to_owned()).list,
    };
    let (mut problems, mut network) = (Vec::new(), None);
    match document::read(&text, &mut problems) {
        Err(problem) => problems.push(problem),
        Ok(mut document) => {
            network = document.get("name").and_then(Value::as_str).map(str::to_owned);
            let loaded = document::add_plugins_of_folder(&mut document, path, &list);
            let plugins = document::plugins(&document);
            problems.extend(rules::check(&document, &plugins));
            problems.extend(chain::check(&document, &plugins));
            // The error of loading mostly repeats another error.
            if !has_error(&problems)
                && let Err(problem) = loaded
            {
                problems.push(problem);
            }
            if let Some(context) = host {
                problems.extend(host::check(&document, &plugins, &problems, context));
            }
        }
    }
    for problem in &mut problems {
        (problem.line, problem.column) = position::find(&text, &problem.path);
    }
    problems.sort_by_key(|problem| (problem.line, problem.column));
    // Several checks may find the same problem.
    problems.dedup();
    let mut checked = CheckedFile::new(path, list.as_ref().ok(), problems);
    checked.network = network;
    Ok(checked)
}

#[cfg(test)]
mod tests {
    use crate::call::Exit;
    use crate::testing::Node;

    #[test]
    fn the_list_of_a_named_network_comes_before_its_single_plugin() {
        let node = Node::new();
        let single = node.folder.path().join("net.d/00-net.conf");
        std::fs::write(single, r#"{"cniVersion":"1.1.0","name":"net","type":"b"}"#).unwrap();
        let named = node.call("validate net --json").json();
        assert_eq!(named, node.call("validate --json").json());
        let used = [0, 1].map(|index| named["networks"][index]["used"].as_bool());
        assert_eq!((used, &named["networks"][0]["plugins"][0]), ([Some(true), Some(false)], &"a".into()), "{named}");
    }

    #[test]
    fn a_file_without_an_object_is_reported() {
        let node = Node::new();
        for text in ["[]", "7", "null", "\"bridge\""] {
            node.configure(text);
            let outcome = node.call("validate");
            assert_eq!(outcome.exit, Exit::Failed, "{text}");
            assert!(outcome.stdout.contains(":1:1: error: not a JSON object\n"), "{text}: {}", outcome.stdout);
        }
    }

    #[test]
    fn validate_takes_files_or_networks() {
        let node = Node::new();
        let file = node.folder.path().join("net.d/net.conflist");
        let listed = node.call("validate");
        assert_eq!(
            (listed.exit, listed.stdout.contains("net      1.1.0        a,b")),
            (Exit::Done, true),
            "{}",
            listed.stdout
        );
        for same in ["networks", "validate net", "networks net"] {
            assert_eq!(node.call(same).stdout, listed.stdout, "{same}");
        }
        assert_eq!(node.call("validate --json").json(), node.call("networks --json").json());
        let of_file = node.call_with(&["validate", file.to_str().unwrap()]);
        assert!(of_file.stdout.ends_with("net.conflist: network net has no errors\n"), "{}", of_file.stdout);
        let folder = node.folder.path().join("net.d");
        assert_eq!(node.call_with(&["validate", folder.to_str().unwrap()]).stdout, listed.stdout);
        let mixed = node.call_with(&["validate", "net", file.to_str().unwrap(), "--json"]).json();
        assert_eq!(mixed["networks"].as_array().map(Vec::len), Some(2), "{mixed}");
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
