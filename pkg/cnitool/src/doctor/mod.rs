//! doctor: finds problems that keep this node's networks from working, or soon will, and prints a
//! command or advice for each.
//!
//! The checks change nothing.

mod firewall;
mod places;
mod traffic;

use cni::Error;
use cni::rollback::Notes;
use libcni::cache::Entry;
use libcni::{NetworkList, Runtime};
use serde_json::{Value, json};

use crate::call::{Call, ColorMode, Exit, Shared, Streams, Variables};
use crate::inspect::{AttachmentReport, Fact, Verdict};
use crate::node::leftovers::{self, quoted};
use crate::node::snapshot::Snapshot;
use crate::node::{self, bridges_of, is_true, plugins_in};
use crate::report::{Colour, paint, write_report};
use crate::target::NetnsPresence;

/// A problem of the node.
pub(crate) struct Finding {
    /// The check that found it.
    check: &'static str,
    /// The problem and its effect.
    what: String,
    fix: Fix,
}

/// The repair of a problem.
#[derive(PartialEq, Eq)]
pub(crate) enum Fix {
    /// A shell command.
    Command(String),
    /// Advice in words, if no command is safe or right for every node.
    Advice(String),
}

/// The outcome of one check.
pub(crate) struct CheckOutcome {
    check: &'static str,
    findings: Vec<Finding>,
    /// The text that is printed if there are no findings: what is in order, or why the check was
    /// incomplete.
    summary: String,
}

impl CheckOutcome {
    /// Returns the name of the check, and its number of findings.
    pub(crate) fn count(&self) -> (&'static str, usize) {
        (self.check, self.findings.len())
    }

    /// Returns the severity of the check's findings: a `warning` is about something that will keep
    /// networks from working, or may; with an `error` some containers have no connection.
    pub(crate) fn severity(&self) -> &'static str {
        match self.check {
            "folders" | "addresses" | "iptables" | "conntrack" | "left over" => "warning",
            _ => "error",
        }
    }

    /// Returns the outcome of a check without findings.
    fn new(check: &'static str) -> CheckOutcome {
        CheckOutcome { check, findings: Vec::new(), summary: String::new() }
    }

    /// Adds a finding with the command that fixes it.
    fn add_problem(&mut self, what: impl Into<String>, command: impl Into<String>) {
        self.push(what.into(), Fix::Command(command.into()));
    }

    /// Adds a finding with advice in words.
    fn add_problem_with_advice(&mut self, what: impl Into<String>, advice: impl Into<String>) {
        self.push(what.into(), Fix::Advice(advice.into()));
    }

    /// Adds a finding.
    fn push(&mut self, what: String, fix: Fix) {
        self.findings.push(Finding { check: self.check, what, fix });
    }

    /// Sets the text that is printed if there are no findings.
    fn with_summary(mut self, summary: impl Into<String>) -> CheckOutcome {
        self.summary = summary.into();
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

/// Runs `cnitool doctor`: runs all checks and prints their outcomes. Returns
/// [`Exit::Failed`] if there are findings.
///
/// # Errors
/// - As [`Snapshot::take`].
/// - The kernel's error if a check cannot list links, routes or packet filter rules.
/// - Code 5 if a folder cannot be read or stdout cannot be written.
pub(crate) fn run(shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let (outcomes, _) = examine(Extent::All, shared, call, &streams.notes)?;
    let count = outcomes.iter().map(|outcome| outcome.findings.len()).sum::<usize>();
    write_report(streams, shared.format(), || as_json(&outcomes), |style| as_text(&outcomes, count, style))?;
    Ok(if count == 0 { Exit::Done } else { Exit::Failed })
}

/// Which checks are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All checks.
    All,
    /// All except `attachments`, which enters the namespace of each container: with 600 containers
    /// it takes longer than all others together.
    Host,
}

/// Runs the checks. Also returns the state of the node that they examined.
///
/// # Errors
/// As [`run`], except those about stdout.
pub(crate) fn examine(
    extent: Extent,
    shared: &Shared,
    call: &Call<'_>,
    notes: &Notes,
) -> Result<(Vec<CheckOutcome>, Snapshot), Error> {
    let conf_folder = shared.conf_folder(&Variables(&call.environment));
    let context = Context {
        snapshot: Snapshot::take(shared, call, notes)?,
        runtime: shared.runtime(call, notes),
        conf_dir: conf_folder.path().to_owned(),
        shared,
        call,
        notes: notes.clone(),
    };
    let policy = firewall::policy(&context);
    let bridge_netfilter = firewall::bridge_netfilter(&policy);
    let mut outcomes = vec![
        places::networks(&context)?,
        places::folders(&context),
        places::status(&context),
        places::addresses(&context)?,
        traffic::forwarding(&context),
        traffic::links(&context),
        traffic::mtu(&context)?,
        traffic::rp_filter(&context)?,
        policy,
        bridge_netfilter,
        firewall::variants(&context),
        firewall::conntrack(),
        left_over(&context),
    ];
    if extent == Extent::All {
        outcomes.insert(outcomes.len() - 1, attachments(&context));
    }
    Ok((outcomes, context.snapshot))
}

/// Returns the report for `--json`.
fn as_json(outcomes: &[CheckOutcome]) -> Value {
    let finding_json = |finding: &Finding| {
        let (command, advice) = match &finding.fix {
            Fix::Command(command) => (Some(command), None),
            Fix::Advice(advice) => (None, Some(advice)),
        };
        json!({"check": finding.check, "what": finding.what, "command": command, "advice": advice})
    };
    let findings: Vec<Value> = outcomes.iter().flat_map(|outcome| &outcome.findings).map(finding_json).collect();
    // `well` also has the checks without findings that were incomplete.
    let well = outcomes.iter().filter(|outcome| outcome.findings.is_empty());
    let well: Vec<Value> = well.map(|outcome| json!({"check": outcome.check, "what": outcome.summary})).collect();
    json!({"findings": findings, "well": well})
}

/// Returns the report for people: the checks without findings, then the findings, of which there
/// are `count`.
fn as_text(outcomes: &[CheckOutcome], count: usize, style: ColorMode) -> String {
    let mut text = String::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.findings.is_empty()) {
        text += &format!("  {:<14} {}\n", outcome.check, outcome.summary);
    }
    for finding in outcomes.iter().flat_map(|outcome| &outcome.findings) {
        let line = format!("! {:<14} {}", finding.check, finding.what);
        let fix = match &finding.fix {
            Fix::Command(command) => format!("fix: {command}"),
            Fix::Advice(advice) => format!("what to do: {advice}"),
        };
        text += &format!("{}\n                 {fix}\n", paint(style, Colour::Red, &line));
    }
    text += &match count {
        0 => "Nothing wrong was found.\n".to_owned(),
        1 => "1 thing is wrong.\n".to_owned(),
        count => format!("{count} things are wrong.\n"),
    };
    text
}

/// Checks that each cached attachment agrees with its result and configuration, as `inspect` does.
/// Checks only attachments whose namespace certainly exists: if it is gone, `left_over` reports the
/// attachment.
fn attachments(context: &Context<'_, '_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("attachments");
    for entry in &context.snapshot.attachments.cached {
        if NetnsPresence::at(&entry.attachment.netns, context.call.machine) != NetnsPresence::Exists {
            continue;
        }
        let report = AttachmentReport::new(&context.snapshot, entry, context.call);
        let differing: Vec<&Fact> = report.facts.iter().filter(|fact| fact.verdict == Verdict::Differs).collect();
        if differing.is_empty() {
            continue;
        }
        let texts: Vec<String> = differing.iter().map(|fact| format!("{}: {}", fact.kind, fact.text)).collect();
        let what = format!("{}: {}", report.name, texts.join("; "));
        match differing.iter().all(|fact| fact.is_rule()) {
            true => outcome.add_problem(what, format!("cnitool rules restore {}", quoted(&report.network))),
            false => outcome.add_problem_with_advice(what, RECREATE_ADVICE),
        }
    }
    outcome.with_summary("every attachment agrees with its result and its configuration")
}

/// The advice for differences that `cnitool rules restore` does not repair.
const RECREATE_ADVICE: &str = "delete the container and create it again: only its ADD creates this";

/// Reports the leftovers that `inspect` finds.
fn left_over(context: &Context<'_, '_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("left over");
    for leftover in leftovers::list(&context.snapshot, context.call) {
        outcome.add_problem(format!("{} {}: {}", leftover.kind, leftover.what, leftover.why), leftover.command);
    }
    outcome
        .with_summary("every link, rule, reservation, record, lease and cache entry belongs to an existing container")
}

impl Context<'_, '_> {
    /// Whether a network that containers use sets one of `keys` to true. Checks the configuration
    /// of each cached attachment whose container has a link on the host. Also checks each
    /// configured network whose bridge has ports, because a container need not be in the result
    /// cache.
    fn a_used_network_sets(&self, keys: &[&str]) -> bool {
        let sets_a_key =
            |config: &[u8]| plugins_in(config).iter().any(|plugin| keys.iter().any(|key| is_true(plugin, key)));
        let links = self.snapshot.attachments.attached_links();
        let has_host_link = |entry: &&Entry| {
            links.iter().any(|(attachment, _)| {
                attachment.network == entry.network && attachment.container_id == entry.attachment.container_id
            })
        };
        if self.snapshot.attachments.cached.iter().filter(has_host_link).any(|entry| sets_a_key(&entry.config)) {
            return true;
        }
        let used_bridges = self.snapshot.bridges();
        let has_used_bridge = |list: &&NetworkList| {
            bridges_of(list).iter().any(|name| used_bridges.iter().any(|bridge| bridge.name == *name))
        };
        self.snapshot.networks.iter().filter(has_used_bridge).any(|list| sets_a_key(list.raw()))
    }

    /// Returns the files of the networks' folder in the order in which runtimes search them.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    fn conf_files(&self) -> Result<Vec<libcni::ConfFile>, Error> {
        Ok(node::by_precedence(self.shared.conf_folder(&Variables(&self.call.environment)).files()?))
    }
}
