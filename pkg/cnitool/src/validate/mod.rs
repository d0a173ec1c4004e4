//! validate, and networks, which is validate for every file: all that is wrong with a network, found at once, each as a
//! path into the JSON with line and column.
//!
//! What a plugin makes of its keys is asked of the plugin's own reading ([`rules`]): there is no second table of keys
//! here that could say something else. Of plugins that are not ours only the list's side is checked.

mod blame;
mod place;
mod rules;
mod surroundings;

use std::path::{Path, PathBuf};

use clap::Args;
use cni::libcni::ConfFile;
use cni::{Code, Error};
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
}

/// Something wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Where: `plugins[0].ipam.ranges`; empty for the whole document.
    path: String,
    /// What, and what could be done.
    what: String,
}

impl Problem {
    fn new(path: impl Into<String>, what: impl Into<String>) -> Problem {
        Problem { path: path.into(), what: what.into() }
    }
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
    report(&checked, shared, streams).map_err(|error| failed("validate", error, shared.format()))
}

/// Lists the configured networks, and what is wrong with them.
pub(crate) fn networks(shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    list(shared, call, streams).map_err(|error| failed("networks", error, shared.format()))
}

fn list(shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let folder = shared.conf_folder(&Variables(&call.environment));
    let mut rows = vec![["NETWORK", "VERSION", "PLUGINS", "FILE", ""].map(str::to_owned).to_vec()];
    let (mut checked, mut names, mut networks) = (Vec::new(), Vec::<String>::new(), Vec::new());
    for ConfFile { path, name, list } in node::by_precedence(folder.files()?) {
        let one = check(&path, Some((shared, call)), streams).unwrap_or_else(|error| Checked {
            path: path.clone(),
            text: String::new(),
            network: "?".to_owned(),
            problems: vec![Problem::new("", error.to_string())],
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
        let state = match (one.problems.len(), is_shadowed) {
            (_, true) => "never used: another file has this network".to_owned(),
            (0, false) => "ok".to_owned(),
            (1, false) => "1 problem".to_owned(),
            (count, false) => format!("{count} problems"),
        };
        networks.push(json!({
            "network": name,
            "cniVersion": version,
            "plugins": kinds,
            "file": path.display().to_string(),
            "loads": list.is_ok(),
            "used": list.is_ok() && !is_shadowed,
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
    Ok(if checked.iter().all(|one| one.problems.is_empty()) { Exit::Done } else { Exit::Failed })
}

fn report(checked: &[Checked], shared: &Shared, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    if shared.format() == Format::Json {
        let file = |one: &Checked| json!({"file": one.path.display().to_string(), "network": one.network, "problems": one.as_json()});
        write_json(streams, &json!({"files": checked.iter().map(file).collect::<Vec<_>>()}))?;
    } else {
        let mut text = String::new();
        for one in checked {
            text += &one.lines(streams).concat();
            if one.problems.is_empty() {
                text += &format!("{}: network {} is sound\n", one.path.display(), one.network);
            }
        }
        write(streams, &text)?;
    }
    Ok(if checked.iter().all(|one| one.problems.is_empty()) { Exit::Done } else { Exit::Failed })
}

impl Checked {
    /// `file:line:column: path: what`, as compilers and editors have it.
    fn lines(&self, streams: &Streams<'_>) -> Vec<String> {
        let line = |problem: &Problem| {
            let (line, column) = place::find(&self.text, &problem.path);
            let at = paint(streams.stdout_style, Colour::Bold, &format!("{}:{line}:{column}:", self.path.display()));
            let gap = if problem.path.is_empty() { "" } else { ": " };
            format!("{at} {}{gap}{}\n", problem.path, problem.what)
        };
        self.problems.iter().map(line).collect()
    }

    fn as_json(&self) -> Value {
        let row = |problem: &Problem| {
            let (line, column) = place::find(&self.text, &problem.path);
            json!({"path": problem.path, "line": line, "column": column, "what": problem.what})
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
    match serde_json::from_str::<Value>(&text) {
        Err(error) => {
            // The place stands in the text.
            let what = format!("it is no JSON: {error}");
            problems.push(Problem::new(format!("@{}:{}", error.line(), error.column()), what));
        }
        Ok(document) => {
            if let Some(name) = document.get("name").and_then(Value::as_str) {
                name.clone_into(&mut network);
            }
            problems.extend(rules::check(&document));
            if let Some((shared, call)) = host {
                problems.extend(surroundings::check(&document, path, &problems, shared, call, &streams.notes));
            }
        }
    }
    problems.dedup();
    // In the order of the text.
    problems.sort_by_key(|problem| place::find(&text, &problem.path));
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
            "50-x.conflist:1:1: failed to read ",
            "50-x.conflist: No such file",
            "60-y.conflist:1:1: failed to read ",
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
