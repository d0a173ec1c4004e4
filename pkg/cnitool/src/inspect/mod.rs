//! inspect: prints what exists of each attachment in the kernel and on the disk, compared with the
//! attachment's result, and the leftovers of attachments that do not exist any more.
//!
//! It changes nothing. CHECK compares more: `inspect` compares only what no other program should
//! change.

mod attachment;

use clap::Args;
use cni::{Code, Error};
use libcni::NetworkList;
use serde_json::json;

use crate::call::{Context, Exit, Streams, Watch};
use crate::node::snapshot::Snapshot;
use crate::node::{leftovers, name_of};
use crate::report::{Colour, Report, counted, did_you_mean};

pub(crate) use attachment::{AttachmentReport, RULE_KINDS};

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
        let has_prefix = |prefix: &String| container.is_some_and(|id| id.starts_with(prefix));
        (args.network.is_none() || network == args.network.as_deref()) && args.container.as_ref().is_none_or(has_prefix)
    };
    let cached = &snapshot.attachments.cached;
    let selected = cached.iter().filter(|one| is_selected(Some(&one.id.network), Some(&one.id.container_id)));
    let attachments: Vec<AttachmentReport> =
        selected.map(|one| AttachmentReport::new(&snapshot, one, context.call)).collect();
    let mut left_over = leftovers::list(&snapshot);
    left_over.retain(|leftover| is_selected(leftover.network.as_deref(), leftover.container_id.as_deref()));
    if let Some(network) = &args.network
        && attachments.is_empty()
        && left_over.is_empty()
    {
        let known: Vec<&str> = match args.container {
            Some(_) => cached.iter().map(|one| one.id.container_id.as_str()).collect(),
            None => snapshot.networks.iter().map(NetworkList::name).collect(),
        };
        let hint = did_you_mean(args.container.as_ref().unwrap_or(network), known);
        let of_container = args.container.as_ref().map(|id| format!(" of container {id}")).unwrap_or_default();
        let msg = format!("nothing{of_container} is attached to network {network:?}, and nothing is left over{hint}");
        return Err(Error::new(Code::UNKNOWN_CONTAINER, msg));
    }
    let mut report = Report::new(streams);
    for attachment in &attachments {
        report.painted(Colour::Bold, &name_of(&attachment.id));
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
    report.write(streams, context.format(), &json!({"attachments": attachments, "leftOver": left_over}))?;
    let has_difference = attachments.iter().flat_map(|report| &report.facts).any(|fact| fact.problem.is_some());
    Ok(if has_difference || !left_over.is_empty() { Exit::Failed } else { Exit::Done })
}
