//! validate, and networks, which is validate for every file: all that is wrong with a network,
//! found at once, each as a path into the JSON with line and column.
//!
//! What a plugin makes of its keys is asked of the plugin's own reading ([`rules`]): there is no
//! second table of keys here that could say something else. For plugins of other projects only the
//! list's side is checked. Without an error an ADD is expected to work:
//! tests/tests/suite/operator/sound.rs compares the two.

mod blame;
mod chain;
mod document;
mod place;
mod rules;
mod surroundings;

use std::path::{Path, PathBuf};

use clap::Args;
use cni::{Code, Error};
use libcni::ConfFile;
use serde_json::{Value, json};

use crate::cli::{Failure, Shared, Variables, failed};
use crate::node;
use crate::report::{Colour, Format, paint, table, write, write_json};
use crate::{Call, Exit, Streams};

/// The arguments of `validate`.
#[derive(Debug, Args)]
pub(crate) struct Validate {
    /// The network's file
    #[arg(required = true, value_hint = clap::ValueHint::FilePath)]
    files: Vec<PathBuf>,
    /// The file alone: not this host's plugins, kernel, and other networks
    #[arg(long)]
    file_only: bool,
    /// Exit with 1 on a warning, too
    #[arg(long)]
    strict: bool,
}

/// The arguments of `networks`.
#[derive(Debug, Args)]
pub(crate) struct Networks {
    /// Only these networks; without a name, all
    #[arg(value_name = "NETWORK")]
    names: Vec<String>,
}

/// The meaning of a problem for the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Severity {
    /// An ADD fails.
    Error,
    /// An ADD can work, though perhaps not as the file's author meant.
    Warning,
}

impl Severity {
    fn as_str(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
        }
    }
}

/// Something wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    severity: Severity,
    /// Where: `plugins[0].ipam.ranges`; empty for the whole document.
    path: String,
    /// What, and what could be done.
    what: String,
}

impl Problem {
    fn error(path: impl Into<String>, what: impl Into<String>) -> Problem {
        Problem { severity: Severity::Error, path: path.into(), what: what.into() }
    }

    fn warning(path: impl Into<String>, what: impl Into<String>) -> Problem {
        Problem { severity: Severity::Warning, path: path.into(), what: what.into() }
    }
}

/// Whether an ADD is expected to work.
fn is_sound(problems: &[Problem]) -> bool {
    problems.iter().all(|problem| problem.severity == Severity::Warning)
}

/// A file and what is wrong with it.
struct Checked {
    path: PathBuf,
    text: String,
    network: String,
    problems: Vec<Problem>,
}

/// Checks files.
pub(crate) fn run(
    args: &Validate,
    shared: &Shared,
    call: &Call<'_>,
    streams: &mut Streams<'_>,
) -> Result<Exit, Failure> {
    let check = |path: &PathBuf| {
        let host = (!args.file_only).then_some((shared, call));
        check(path, host, streams)
    };
    let checked: Result<Vec<Checked>, Error> = args.files.iter().map(check).collect();
    let checked = checked.map_err(|error| failed("validate", error, shared.format()))?;
    report(&checked, args, shared, streams).map_err(|error| failed("validate", error, shared.format()))
}

/// Lists the configured networks, and what is wrong with them.
pub(crate) fn networks(
    args: &Networks,
    shared: &Shared,
    call: &Call<'_>,
    streams: &mut Streams<'_>,
) -> Result<Exit, Failure> {
    list(&args.names, shared, call, streams).map_err(|error| failed("networks", error, shared.format()))
}

fn list(asked: &[String], shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let folder = shared.conf_folder(&Variables(&call.environment));
    let mut files = node::by_precedence(folder.files()?);
    for name in asked {
        if !files.iter().any(|file| file.name.as_ref() == Some(name)) {
            let msg = format!("no net configuration with name {name:?} in {}", folder.path().display());
            return Err(Error::config(msg));
        }
    }
    files.retain(|file| asked.is_empty() || file.name.as_ref().is_some_and(|name| asked.contains(name)));
    let mut rows = vec![["NETWORK", "VERSION", "PLUGINS", "FILE", ""].map(str::to_owned).to_vec()];
    let (mut checked, mut names, mut networks, mut exit) = (Vec::new(), Vec::<String>::new(), Vec::new(), Exit::Done);
    for ConfFile { path, name, list } in files {
        let one = check(&path, Some((shared, call)), streams).unwrap_or_else(|error| Checked {
            path: path.clone(),
            text: String::new(),
            network: "?".to_owned(),
            problems: vec![Problem::error("", error.to_string())],
        });
        let shown = name.clone().unwrap_or_else(|| "?".to_owned());
        let (version, kinds) = match &list {
            Ok(list) => {
                let kinds: Vec<&str> = list.plugins().iter().map(|plugin| plugin.kind()).collect();
                (list.cni_version().to_owned(), kinds.join(","))
            }
            Err(_) => ("?".to_owned(), "?".to_owned()),
        };
        let is_shadowed = list.is_ok() && names.contains(&shown);
        if list.is_ok() {
            names.push(shown.clone());
        }
        let state = match is_shadowed {
            true => "never used: another file has this network".to_owned(),
            false => summary(&one.problems),
        };
        // No runtime reads a file behind another one of the same network.
        if !is_shadowed && !is_sound(&one.problems) {
            exit = Exit::Failed;
        }
        networks.push(json!({
            "network": name,
            "cniVersion": version,
            "plugins": kinds,
            "file": path.display().to_string(),
            "loads": list.is_ok(),
            "used": list.is_ok() && !is_shadowed,
            "sound": is_sound(&one.problems),
            "problems": one.as_json(),
        }));
        rows.push(vec![shown, version, kinds, path.display().to_string(), state]);
        checked.push(one);
    }
    if shared.format() == Format::Json {
        write_json(streams, &json!({"folder": folder.path().display().to_string(), "networks": networks}))?;
    } else if checked.is_empty() {
        write(streams, &format!("No network is configured in {}.\n", folder.path().display()))?;
    } else {
        let problems: String = checked.iter().flat_map(|one| one.lines(streams)).collect();
        let gap = if problems.is_empty() { "" } else { "\n" };
        write(streams, &format!("{}\n{gap}{problems}", table(&rows).join("\n")))?;
    }
    Ok(exit)
}

/// Returns `ok`, or the numbers of errors and warnings.
fn summary(problems: &[Problem]) -> String {
    let counted = |severity: Severity| {
        let count = problems.iter().filter(|problem| problem.severity == severity).count();
        let plural = if count == 1 { "" } else { "s" };
        (count > 0).then(|| format!("{count} {}{plural}", severity.as_str()))
    };
    let counts: Vec<String> = [Severity::Error, Severity::Warning].into_iter().filter_map(counted).collect();
    if counts.is_empty() { "ok".to_owned() } else { counts.join(", ") }
}

fn report(checked: &[Checked], args: &Validate, shared: &Shared, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    if shared.format() == Format::Json {
        let file = |one: &Checked| {
            json!({
                "file": one.path.display().to_string(),
                "network": one.network,
                "sound": is_sound(&one.problems),
                "problems": one.as_json(),
            })
        };
        write_json(streams, &json!({"files": checked.iter().map(file).collect::<Vec<_>>()}))?;
    } else {
        let mut text = String::new();
        for one in checked {
            text += &one.lines(streams).concat();
            if is_sound(&one.problems) {
                text += &format!("{}: network {} is sound\n", one.path.display(), one.network);
            }
        }
        write(streams, &text)?;
    }
    let passes = |one: &Checked| if args.strict { one.problems.is_empty() } else { is_sound(&one.problems) };
    Ok(if checked.iter().all(passes) { Exit::Done } else { Exit::Failed })
}

impl Checked {
    /// Writes `file:line:column: error: path: what`, the form that compilers and editors use.
    fn lines(&self, streams: &Streams<'_>) -> Vec<String> {
        let line = |problem: &Problem| {
            let (line, column) = place::find(&self.text, &problem.path);
            let at = paint(streams.stdout_style, Colour::Bold, &format!("{}:{line}:{column}:", self.path.display()));
            let colour = if problem.severity == Severity::Error { Colour::Red } else { Colour::Yellow };
            let severity = paint(streams.stdout_style, colour, &format!("{}:", problem.severity.as_str()));
            // A place in a text that cannot be read has no path.
            let path = match problem.path.as_str() {
                path if path.is_empty() || path.starts_with('@') => String::new(),
                path => format!("{path}: "),
            };
            format!("{at} {severity} {path}{}\n", problem.what)
        };
        self.problems.iter().map(line).collect()
    }

    fn as_json(&self) -> Value {
        let row = |problem: &Problem| {
            let (line, column) = place::find(&self.text, &problem.path);
            let severity = problem.severity.as_str();
            json!({"severity": severity, "path": problem.path, "line": line, "column": column, "what": problem.what})
        };
        self.problems.iter().map(row).collect()
    }
}

/// All that is wrong with one file; without a host the file alone.
fn check(path: &Path, host: Option<(&Shared, &Call<'_>)>, streams: &Streams<'_>) -> Result<Checked, Error> {
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
            let loaded = document::complete(&mut document, path);
            problems.extend(rules::check(&document));
            problems.extend(chain::check(&document));
            // A runtime's own reading decides: it depends on the file's name, too.
            if is_sound(&problems)
                && let Err(problem) = loaded
            {
                problems.push(problem);
            }
            if let Some((shared, call)) = host {
                problems.extend(surroundings::check(&document, path, &problems, shared, call, &streams.notes));
            }
        }
    }
    // In the order of the text.
    problems.sort_by_key(|problem| place::find(&text, &problem.path));
    problems.dedup();
    Ok(Checked { path: path.to_owned(), text, network, problems })
}

#[cfg(test)]
mod tests {
    use crate::Exit;
    use crate::testing::Node;

    #[test]
    fn a_file_that_cannot_be_read_spoils_no_other_network() {
        let node = Node::new();
        let folder = node.folder.path().join("net.d");
        std::os::unix::fs::symlink("nowhere", folder.join("50-x.conflist")).unwrap();
        std::fs::File::create(folder.join("60-y.conflist")).unwrap().set_len(5 << 30).unwrap();
        let said = node.say("networks");
        assert_eq!((said.exit, said.stderr.as_str()), (Exit::Failed, ""));
        assert!(said.stdout.lines().any(|line| line.starts_with("net ") && line.ends_with("ok")), "{}", said.stdout);
        for problem in [
            "50-x.conflist:1:1: error: failed to read ",
            "50-x.conflist: No such file",
            "60-y.conflist:1:1: error: failed to read ",
            "60-y.conflist: it is longer than 16 MiB",
        ] {
            assert!(said.stdout.contains(problem), "{problem}: {}", said.stdout);
        }
        let networks = node.say("networks --json").json()["networks"].clone();
        let column = |key: &str| networks.as_array().unwrap().iter().map(|one| one[key].clone()).collect::<Vec<_>>();
        assert_eq!(column("network"), [serde_json::Value::Null, serde_json::Value::Null, "net".into()]);
        assert_eq!(column("loads"), [false, false, true]);
    }
}
