//! inspect: prints what exists of each attachment in the kernel and on the disk, compared with the
//! attachment's result, and the leftovers of attachments that do not exist any more.
//!
//! It changes nothing. CHECK compares more: `inspect` compares only what no other program should
//! change.

mod attachment;

use clap::Args;
use cni::{Code, Error};
use libcni::NetworkList;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::call::{Context, Exit, Streams, Watch};
use crate::node::leftovers;
use crate::node::snapshot::Snapshot;
use crate::report::{Colour, Report, cell, counted, did_you_mean, words};

pub(crate) use attachment::AttachmentReport;

/// The arguments of `inspect`.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Only this network
    network: Option<String>,
    /// Only this container; the beginning of its ID is enough
    container: Option<String>,
    #[command(flatten)]
    watch: Watch,
}

/// The properties of an object, each with its name in JSON. The first one identifies the object.
pub(crate) type Fields = Vec<(&'static str, Value)>;

/// An object of an attachment, and whether it is as expected: whether it agrees with the
/// attachment's result and configuration, or there is nothing to compare it with.
pub(crate) struct Fact {
    /// The kind of object, which is the first column: `address`, `route`, …
    pub(crate) kind: &'static str,
    fields: Fields,
    /// What is not as expected.
    pub(crate) problem: Option<String>,
}

impl Fact {
    /// Returns a fact that is as expected.
    pub(crate) fn fine(kind: &'static str, fields: impl Into<Fields>) -> Fact {
        Fact { kind, fields: fields.into(), problem: None }
    }

    /// Returns a fact that is not as expected.
    pub(crate) fn differs(kind: &'static str, fields: impl Into<Fields>, problem: impl Into<String>) -> Fact {
        Fact { kind, fields: fields.into(), problem: Some(problem.into()) }
    }

    /// Whether the fact is about a packet filter rule, which `cnitool rules restore` can restore.
    pub(crate) fn is_rule(&self) -> bool {
        attachment::RULE_KINDS.contains(&self.kind)
    }

    /// Returns the properties and the problem for people: `eth0, type veth, mtu 1500`.
    pub(crate) fn text(&self) -> String {
        let (mut texts, mut place) = (Vec::new(), String::new());
        for (position, (key, value)) in self.fields.iter().enumerate() {
            let name = words(key.trim_end_matches("Seconds"));
            match value {
                Value::Null | Value::Bool(false) => {}
                Value::Bool(true) => texts.push(name),
                _ if position == 0 => texts.push(cell(key, value)),
                _ if ["place", "folder", "file", "socket"].contains(key) => place = format!("  [{}]", cell(key, value)),
                _ => texts.push(format!("{name} {}", cell(key, value))),
            }
        }
        let separator = if texts.is_empty() || self.problem.is_none() { "" } else { ": " };
        format!("{}{place}{separator}{}", texts.join(", "), self.problem.as_deref().unwrap_or_default())
    }
}

impl Serialize for Fact {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let verdict =
            [("kind", json!(self.kind)), ("ok", json!(self.problem.is_none())), ("problem", json!(self.problem))];
        serializer.collect_map(verdict.into_iter().chain(self.fields.iter().cloned()))
    }
}

/// Runs `cnitool inspect`: prints the attachments and leftovers that the arguments select.
/// Returns [`Exit::Failed`] if something differs or is left over.
///
/// # Errors
/// - As [`Snapshot::take`].
/// - Code 3 if the arguments name a network and select nothing.
/// - Code 5 if stdout cannot be written.
pub(crate) fn run(args: &Inspect, context: &Context<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    args.watch.run(context.call, streams, |streams| inspect(args, context, streams))
}

/// Prints the attachments and leftovers once.
///
/// # Errors
/// As [`run`].
fn inspect(args: &Inspect, context: &Context<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let snapshot = Snapshot::take(context)?;
    // An unknown network or container matches only if the argument is not given.
    let is_selected = |network: Option<&str>, container: Option<&str>| {
        let network_matches = args.network.is_none() || network == args.network.as_deref();
        let container_matches = match &args.container {
            Some(prefix) => container.is_some_and(|id| id.starts_with(prefix.as_str())),
            None => true,
        };
        network_matches && container_matches
    };
    let attachments: Vec<AttachmentReport> = snapshot
        .attachments
        .cached
        .iter()
        .filter(|entry| is_selected(Some(&entry.network), Some(&entry.attachment.container_id)))
        .map(|entry| AttachmentReport::new(&snapshot, entry, context.call))
        .collect();
    let mut left_over = leftovers::list(&snapshot, context.call);
    left_over.retain(|leftover| is_selected(leftover.network.as_deref(), leftover.container_id.as_deref()));
    if attachments.is_empty() && left_over.is_empty() && args.network.is_some() {
        let of_container = args.container.as_deref().map(|id| format!(" of container {id}")).unwrap_or_default();
        let network = args.network.as_deref().unwrap_or_default();
        let cached = &snapshot.attachments.cached;
        let (wanted, known): (&str, Vec<&str>) = match args.container.as_deref() {
            Some(wanted) => (wanted, cached.iter().map(|entry| entry.attachment.container_id.as_str()).collect()),
            None => (network, snapshot.networks.iter().map(NetworkList::name).collect()),
        };
        let hint = did_you_mean(wanted, &known);
        let msg = format!("nothing{of_container} is attached to network {network:?}, and nothing is left over{hint}");
        return Err(Error::new(Code::UNKNOWN_CONTAINER, msg));
    }
    let mut report = Report::new(streams);
    for attachment in &attachments {
        report.painted(Colour::Bold, &attachment.name());
        attachment.facts.iter().for_each(|fact| report.fact(fact.problem.is_some(), fact.kind, &fact.text()));
        report.line("");
    }
    if left_over.is_empty() {
        report.line(format_args!("{}; nothing is left over.", counted(attachments.len(), "attachment")));
    } else {
        report.painted(Colour::Bold, "Left over");
    }
    for leftover in &left_over {
        report.fact(true, leftover.kind, &leftover.text());
        report.line(format_args!("    because {}\n    remove: {}", leftover.reason, leftover.command));
    }
    report.set("attachments", &attachments);
    report.set("leftOver", &left_over);
    report.write(streams, context.format())?;
    let has_difference = attachments.iter().flat_map(|report| &report.facts).any(|fact| fact.problem.is_some());
    Ok(if has_difference || !left_over.is_empty() { Exit::Failed } else { Exit::Done })
}
