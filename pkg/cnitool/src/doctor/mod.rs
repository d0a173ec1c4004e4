//! doctor: what on this node keeps networks from working, or soon will, and the command that fixes
//! it.
//!
//! Each check reads a few facts and judges them; it changes nothing and guesses little: what is
//! found is wrong on this node now. A check reports what it cannot look at. Judgements that need
//! no kernel are functions of values.

mod firewall;
mod places;
mod traffic;

use cni::AttachmentId;
use cni::Error;
use cni::json::Json;
use cni::rollback::Notes;
use libcni::cache::Entry;
use libcni::{NetworkList, Runtime};
use serde_json::json;

use crate::cli::{Failure, Shared, Variables, failed};
use crate::inspect::{Snapshot, bridges_of, orphans};
use crate::node;
use crate::report::{Colour, Format, paint, write, write_json};
use crate::{Call, Exit, Streams};

/// Something wrong.
pub(crate) struct Finding {
    /// The check that found it.
    check: &'static str,
    /// The problem and its effect.
    what: String,
    fix: Fix,
}

/// The repair.
#[derive(PartialEq, Eq)]
pub(crate) enum Fix {
    /// A command, to be run as it stands.
    Command(String),
    /// In words: where a command that is right everywhere would have to know what the node is for.
    Words(String),
}

/// The findings of one check.
pub(crate) struct CheckOutcome {
    check: &'static str,
    findings: Vec<Finding>,
    /// Printed if nothing was found: what is well, or why the check could not look.
    well: String,
}

impl CheckOutcome {
    fn new(check: &'static str) -> CheckOutcome {
        CheckOutcome { check, findings: Vec::new(), well: String::new() }
    }

    fn problem(&mut self, what: impl Into<String>, command: impl Into<String>) {
        self.push(what.into(), Fix::Command(command.into()));
    }

    /// The same, where no command is safe.
    fn problem_without_command(&mut self, what: impl Into<String>, words: impl Into<String>) {
        self.push(what.into(), Fix::Words(words.into()));
    }

    fn push(&mut self, what: String, fix: Fix) {
        self.findings.push(Finding { check: self.check, what, fix });
    }

    fn ok_summary(mut self, well: impl Into<String>) -> CheckOutcome {
        self.well = well.into();
        self
    }
}

/// The input of the checks.
struct Context<'a, 'm> {
    snapshot: Snapshot,
    runtime: Runtime<'m>,
    conf_dir: std::path::PathBuf,
    shared: &'a Shared,
    call: &'a Call<'m>,
    notes: Notes,
}

/// Does what it is there for.
pub(crate) fn run(shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    doctor(shared, call, streams).map_err(|error| failed("doctor", error, shared.format()))
}

fn doctor(shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let conf_folder = shared.conf_folder(&Variables(&call.environment));
    let context = Context {
        snapshot: Snapshot::take(shared, call, &streams.notes)?,
        runtime: shared.runtime(call, &streams.notes),
        conf_dir: conf_folder.path().to_owned(),
        shared,
        call,
        notes: streams.notes.clone(),
    };
    let seen = vec![
        places::networks(&context)?,
        places::folders(&context),
        places::status(&context),
        places::addresses(&context)?,
        traffic::forwarding(&context),
        traffic::links(&context)?,
        traffic::mtu(&context)?,
        traffic::rp_filter(&context)?,
        firewall::policy(&context),
        firewall::bridge_netfilter(&context),
        firewall::variants(&context),
        firewall::conntrack(),
        left_over(&context)?,
    ];
    let count = seen.iter().map(|one| one.findings.len()).sum::<usize>();
    match shared.format() {
        Format::Json => {
            let finding = |one: &Finding| {
                let (command, advice) = match &one.fix {
                    Fix::Command(command) => (Some(command), None),
                    Fix::Words(words) => (None, Some(words)),
                };
                json!({"check": one.check, "what": one.what, "command": command, "advice": advice})
            };
            let findings: Vec<_> = seen.iter().flat_map(|one| &one.findings).map(finding).collect();
            let well = seen.iter().filter(|one| one.findings.is_empty());
            let well: Vec<_> = well.map(|one| json!({"check": one.check, "what": one.well})).collect();
            write_json(streams, &json!({"findings": findings, "well": well}))?;
        }
        Format::Text => write(streams, &text(&seen, count, streams))?,
    }
    Ok(if count == 0 { Exit::Done } else { Exit::Failed })
}

fn text(seen: &[CheckOutcome], count: usize, streams: &Streams<'_>) -> String {
    let mut text = String::new();
    for one in seen.iter().filter(|one| one.findings.is_empty()) {
        text += &format!("  {:<14} {}\n", one.check, one.well);
    }
    for finding in seen.iter().flat_map(|one| &one.findings) {
        let line = format!("! {:<14} {}", finding.check, finding.what);
        let fix = match &finding.fix {
            Fix::Command(command) => format!("fix: {command}"),
            Fix::Words(words) => format!("what to do: {words}"),
        };
        text += &format!("{}\n                 {fix}\n", paint(streams.stdout_style, Colour::Red, &line));
    }
    text += &match count {
        0 => "Nothing wrong was found.\n".to_owned(),
        1 => "1 thing is wrong.\n".to_owned(),
        count => format!("{count} things are wrong.\n"),
    };
    text
}

/// Reports the objects that inspect calls left over.
fn left_over(context: &Context<'_, '_>) -> Result<CheckOutcome, Error> {
    let mut seen = CheckOutcome::new("left over");
    for orphan in orphans::find(&context.snapshot, context.call)? {
        seen.problem(format!("{} {}: {}", orphan.kind, orphan.what, orphan.why), orphan.command);
    }
    Ok(seen.ok_summary("every link, rule, reservation, backup, lease and cache entry has its container"))
}

impl Context<'_, '_> {
    /// Whether some container that is there was attached with this key switched on: by the
    /// configuration of its ADD where that is remembered, else by that of the network whose bridge
    /// it is on.
    fn is_in_use(&self, keys: &[&str]) -> bool {
        let is_on = |config: &[u8]| {
            let config = Json::parse(config).ok();
            let Some(Json::Array(plugins)) = config.as_ref().and_then(|config| config.get("plugins")) else {
                return false;
            };
            plugins.iter().any(|one| keys.iter().any(|key| one.get(key) == Some(&Json::Bool(true))))
        };
        let (attached, bridges) = (self.snapshot.attached(), self.snapshot.bridges());
        let alive = |entry: &&Entry| {
            let is_its = |mark: &AttachmentId| {
                mark.network == entry.network && entry.attachment.container_id == mark.container_id
            };
            attached.iter().any(|(mark, _)| is_its(mark))
        };
        let has_containers =
            |list: &&NetworkList| bridges_of(list).iter().any(|name| bridges.iter().any(|bridge| bridge.name == *name));
        self.snapshot.remembered.iter().filter(alive).any(|entry| is_on(&entry.config))
            || self.snapshot.networks.iter().filter(has_containers).any(|list| is_on(list.raw()))
    }

    fn conf_files(&self) -> Result<Vec<libcni::ConfFile>, Error> {
        Ok(node::by_precedence(self.shared.conf_folder(&Variables(&self.call.environment)).files()?))
    }
}
