//! doctor: finds problems that keep this node's networks from working, or soon will, and prints a
//! command or advice for each.
//!
//! The checks change nothing.

mod firewall;
mod places;
mod traffic;

use cni::Error;
use cni_linux::Netlink;
use libcni::{NetworkList, Runtime};
use serde::Serialize;
use serde_json::json;

use crate::call::{Context, Exit, Streams};
use crate::inspect::{AttachmentReport, RULE_KINDS};
use crate::node::leftovers::{self, Leftover, quoted};
use crate::node::snapshot::Snapshot;
use crate::node::{bridges_of, is_true, name_of, plugins_in};
use crate::report::{Fact, Report};
use crate::target::NetnsPresence;

/// A problem of one or more objects of the node.
#[derive(Serialize)]
pub(crate) struct Finding {
    /// The check that found it.
    check: &'static str,
    severity: &'static str,
    /// The objects that have the problem.
    objects: Vec<String>,
    /// The problem of the first object, and its effect.
    what: String,
    /// Its kind. Findings with the same problem are one finding.
    #[serde(skip)]
    problem: String,
    #[serde(flatten)]
    fix: Fix,
}

/// What to do about a problem. One of the two is given.
#[derive(Serialize)]
struct Fix {
    /// The shell command that repairs it for all objects.
    command: Option<String>,
    /// What to do, if no command is safe or right for every node.
    advice: Option<String>,
}

impl From<String> for Fix {
    fn from(command: String) -> Fix {
        Fix { command: Some(command), advice: None }
    }
}

/// Returns advice in words.
fn advice(text: impl Into<String>) -> Fix {
    Fix { command: None, advice: Some(text.into()) }
}

/// The outcome of one check.
#[derive(Serialize)]
pub(crate) struct CheckOutcome {
    check: &'static str,
    #[serde(skip)]
    findings: Vec<Finding>,
    /// The text that is printed if there are no findings: what is in order, or why the check was
    /// incomplete.
    #[serde(rename = "what")]
    summary: String,
}

impl CheckOutcome {
    /// Returns the name of the check, and its number of objects with a problem.
    pub(crate) fn count(&self) -> (&'static str, usize) {
        (self.check, self.findings.iter().map(|finding| finding.objects.len()).sum())
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

    /// Adds a problem of an object: the command that fixes it, or [`advice`].
    fn add(&mut self, object: impl Into<String>, problem: impl Into<String>, fix: impl Into<Fix>) {
        let (object, problem) = (object.into(), problem.into());
        self.push(format!("{object} {problem}"), object, problem, fix.into());
    }

    /// Adds an object to the finding about the same problem, or adds a finding with the text
    /// `what`.
    fn push(&mut self, what: String, object: String, problem: String, fix: Fix) {
        let is_same = |known: &&mut Finding| known.problem == problem && known.fix.advice == fix.advice;
        let Some(known) = self.findings.iter_mut().find(is_same) else {
            let (check, severity) = (self.check, self.severity());
            self.findings.push(Finding { check, severity, objects: vec![object], what, problem, fix });
            return;
        };
        if let (Some(commands), Some(command)) = (&mut known.fix.command, fix.command)
            && !commands.split("; ").any(|other| other == command)
        {
            *commands += &format!("; {command}");
        }
        if !known.objects.contains(&object) {
            known.objects.push(object);
        }
    }

    /// Sets the text that is printed if there are no findings.
    fn with_summary(mut self, summary: impl Into<String>) -> CheckOutcome {
        self.summary = summary.into();
        self
    }
}

/// The input of the checks.
struct Examined<'a> {
    context: &'a Context<'a>,
    extent: Extent,
    snapshot: Snapshot,
    runtime: Runtime<'a>,
    /// The host's network.
    netlink: Netlink,
}

/// Runs `cnitool doctor`: runs all checks and prints their outcomes. Returns
/// [`Exit::Failed`] if there are findings.
///
/// # Errors
/// - As [`Snapshot::take`].
/// - The kernel's error if a check cannot list links, routes or packet filter rules.
/// - Code 5 if a folder cannot be read or stdout cannot be written.
pub(crate) fn run(context: &Context<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let (outcomes, ..) = examine(Extent::All, context)?;
    let (well, bad): (Vec<CheckOutcome>, _) = outcomes.into_iter().partition(|outcome| outcome.findings.is_empty());
    let findings: Vec<Finding> = bad.into_iter().flat_map(|outcome| outcome.findings).collect();
    let mut report = Report::new(streams);
    well.iter().for_each(|outcome| report.fact(false, outcome.check, &outcome.summary));
    for Finding { check, objects, what, fix: Fix { command, advice }, .. } in &findings {
        let others: Vec<&str> = objects.iter().skip(1).take(3).map(String::as_str).collect();
        let others = match objects.len() - 1 {
            0 => String::new(),
            count => format!(" ({count} more: {})", others.join(", ")),
        };
        report.fact(true, check, &format!("{what}{others}"));
        let fix = command.as_ref().map(|command| format!("fix: {command}"));
        let advice = || format!("what to do: {}", advice.as_deref().unwrap_or_default());
        report.line(format_args!("{:15}{}", "", fix.unwrap_or_else(advice)));
    }
    report.line(match findings.len() {
        0 => "Nothing wrong was found.".to_owned(),
        1 => "1 thing is wrong.".to_owned(),
        count => format!("{count} things are wrong."),
    });
    // `well` has the incomplete checks too.
    report.write(streams, context.format(), &json!({"findings": findings, "well": well}))?;
    Ok(if findings.is_empty() { Exit::Done } else { Exit::Failed })
}

/// Which checks are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All checks.
    All,
    /// All except `attachments`, which reads everything in each container, and without texts that
    /// take long to find and are not findings.
    Host,
}

/// Runs the checks. Also returns the state of the node that they examined, and its leftovers.
///
/// # Errors
/// As [`run`], except those about stdout.
pub(crate) fn examine(
    extent: Extent,
    context: &Context<'_>,
) -> Result<(Vec<CheckOutcome>, Snapshot, Vec<Leftover>), Error> {
    let runtime = context.runtime();
    // First, because starting a program takes longer when this process has much memory.
    let status = places::status(&context.networks()?, &runtime);
    let snapshot = Snapshot::take(context)?;
    let leftovers = leftovers::list(&snapshot);
    let node = Examined { context, extent, snapshot, runtime, netlink: Netlink::open()? };
    let policy = firewall::policy(&node);
    let bridge_netfilter = firewall::bridge_netfilter(&policy);
    let mut outcomes = vec![
        places::networks(&node)?,
        places::folders(&node),
        status,
        places::addresses(&node)?,
        traffic::forwarding(&node),
        traffic::links(&node),
        traffic::mtu(&node)?,
        traffic::rp_filter(&node)?,
        policy,
        bridge_netfilter,
        firewall::variants(&node),
        firewall::conntrack(),
        left_over(&leftovers),
    ];
    if extent == Extent::All {
        outcomes.insert(outcomes.len() - 1, attachments(&node));
    }
    Ok((outcomes, node.snapshot, leftovers))
}

/// Checks that each cached attachment agrees with its result and configuration, as `inspect` does.
/// Checks only attachments whose namespace certainly exists: if it is gone, `left_over` reports the
/// attachment.
fn attachments(node: &Examined<'_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("attachments");
    let cached = node.snapshot.attachments.cached.iter();
    for one in cached.filter(|one| one.presence == NetnsPresence::Exists) {
        let report = AttachmentReport::new(&node.snapshot, one, node.context.call);
        let differing: Vec<&Fact> = report.facts.iter().filter(|fact| fact.problem.is_some()).collect();
        if differing.is_empty() {
            continue;
        }
        let texts: Vec<String> = differing.iter().map(|fact| format!("{}: {}", fact.kind, fact.text())).collect();
        let (object, problem) = (format!("{}:", name_of(&report.id)), texts.join("; "));
        let fix = match differing.iter().all(|fact| RULE_KINDS.contains(&fact.kind)) {
            true => format!("cnitool rules restore {}", quoted(&report.id.network)).into(),
            // Only rules can be restored.
            false => advice("delete the container and create it again: only its ADD creates this"),
        };
        outcome.add(object, problem, fix);
    }
    outcome.with_summary("every attachment agrees with its result and its configuration")
}

/// Reports the leftovers that `inspect` finds.
fn left_over(leftovers: &[Leftover]) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("left over");
    for leftover in leftovers {
        let (kind, object) = (leftover.kind, leftover.text());
        let what = format!("{kind} {object}: {}", leftover.reason);
        outcome.push(what, object, kind.to_owned(), leftover.command.clone().into());
    }
    // A command for each of many objects would be hard to read.
    for finding in outcome.findings.iter_mut().filter(|finding| finding.objects.len() > 3) {
        let for_all = match finding.problem.as_str() {
            "attachment" => "cnitool gc",
            "rule" | "reservation" | "backup" | "lease" => "cnitool gc --unknown",
            _ => continue,
        };
        finding.fix = for_all.to_owned().into();
    }
    outcome
        .with_summary("every link, rule, reservation, record, lease and cache entry belongs to an existing container")
}

impl Examined<'_> {
    /// Whether a network that containers use sets one of `keys` to true. Checks the configuration
    /// of each cached attachment whose container has a link on the host. Also checks each
    /// configured network whose bridge has ports, because a container need not be in the result
    /// cache.
    fn a_used_network_sets(&self, keys: &[&str]) -> bool {
        let sets_a_key =
            |config: &[u8]| plugins_in(config).iter().any(|plugin| keys.iter().any(|key| is_true(plugin, key)));
        if self.snapshot.attachments.cached_with_link(|_| true).any(|cached| sets_a_key(&cached.entry.config)) {
            return true;
        }
        let used_bridges = self.snapshot.bridges();
        let has_used_bridge = |list: &&NetworkList| {
            bridges_of(list).iter().any(|name| used_bridges.iter().any(|bridge| bridge.name == *name))
        };
        self.snapshot.networks.iter().filter(has_used_bridge).any(|list| sets_a_key(list.raw()))
    }
}
