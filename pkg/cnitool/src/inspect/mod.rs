//! inspect: prints what exists of each attachment in the kernel and on the disk, compared with the
//! attachment's result, and the leftovers of attachments that do not exist any more.
//!
//! It changes nothing. CHECK compares more: `inspect` compares only what no other program should
//! change.

mod attachment;

use clap::Args;
use cni::{Code, Error};
use serde_json::{Value, json};

use crate::call::{Call, ColorMode, Exit, Shared, Streams};
use crate::node::leftovers::{self, Leftover};
use crate::node::snapshot::Snapshot;
use crate::report::{Colour, paint, write_report};

pub(crate) use attachment::AttachmentReport;

/// The arguments of `inspect`.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Only this network
    network: Option<String>,
    /// Only this container; the beginning of its ID is enough
    container: Option<String>,
}

/// A fact about an attachment, and whether it is as expected.
pub(crate) struct Fact {
    /// The kind of fact, which is the first column: `address`, `route`, …
    pub(crate) kind: &'static str,
    pub(crate) text: String,
    pub(crate) verdict: Verdict,
}

/// Whether a fact is as expected: whether it agrees with the attachment's result and configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It agrees, or there is nothing to compare it with.
    Fine,
    /// It does not agree.
    Differs,
}

impl Fact {
    /// Returns a fact that is as expected.
    pub(crate) fn fine(kind: &'static str, text: impl Into<String>) -> Fact {
        Fact { kind, text: text.into(), verdict: Verdict::Fine }
    }

    /// Returns a fact that is not as expected.
    pub(crate) fn differs(kind: &'static str, text: impl Into<String>) -> Fact {
        Fact { kind, text: text.into(), verdict: Verdict::Differs }
    }

    /// Whether the fact is about a packet filter rule, which `cnitool rules restore` can restore.
    pub(crate) fn is_rule(&self) -> bool {
        attachment::RULE_KINDS.contains(&self.kind)
    }
}

/// Runs `cnitool inspect`: prints the attachments and leftovers that the arguments select.
/// Returns [`Exit::Failed`] if something differs or is left over.
///
/// # Errors
/// - As [`Snapshot::take`].
/// - Code 3 if the arguments name a network and select nothing.
/// - Code 5 if stdout cannot be written.
pub(crate) fn run(args: &Inspect, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let snapshot = Snapshot::take(shared, call, &streams.notes)?;
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
        .map(|entry| AttachmentReport::new(&snapshot, entry, call))
        .collect();
    let mut leftovers = leftovers::list(&snapshot, call);
    leftovers.retain(|leftover| is_selected(leftover.network.as_deref(), leftover.container.as_deref()));
    if attachments.is_empty() && leftovers.is_empty() && args.network.is_some() {
        let of_container = args.container.as_deref().map(|id| format!(" of container {id}")).unwrap_or_default();
        let network = args.network.as_deref().unwrap_or_default();
        let msg = format!("nothing{of_container} is attached to network {network:?}, and there are no leftovers");
        return Err(Error::new(Code::UNKNOWN_CONTAINER, msg));
    }
    let has_difference =
        attachments.iter().flat_map(|report| &report.facts).any(|fact| fact.verdict == Verdict::Differs);
    let json = || as_json(&attachments, &leftovers);
    write_report(streams, shared.format(), json, |style| as_text(&attachments, &leftovers, style))?;
    Ok(if has_difference || !leftovers.is_empty() { Exit::Failed } else { Exit::Done })
}

/// Returns the report for people.
fn as_text(attachments: &[AttachmentReport], leftovers: &[Leftover], style: ColorMode) -> String {
    let mut text = String::new();
    for report in attachments {
        text += &format!("{}\n", paint(style, Colour::Bold, &report.name));
        for fact in &report.facts {
            let sign = if fact.verdict == Verdict::Fine { ' ' } else { '!' };
            let line = format!("{sign} {:<12} {}", fact.kind, fact.text);
            text += &match fact.verdict {
                Verdict::Fine => line,
                Verdict::Differs => paint(style, Colour::Red, &line),
            };
            text.push('\n');
        }
        text.push('\n');
    }
    if leftovers.is_empty() {
        let count = attachments.len();
        let plural = if count == 1 { "attachment" } else { "attachments" };
        text += &format!("{count} {plural}; nothing is left over.\n");
        return text;
    }
    text += &format!("{}\n", paint(style, Colour::Bold, "Left over"));
    for leftover in leftovers {
        let line = format!("! {:<12} {}", leftover.kind, leftover.what);
        text += &format!("{}\n", paint(style, Colour::Red, &line));
        text += &format!("    because {}\n    remove: {}\n", leftover.why, leftover.command);
    }
    text
}

/// Returns the report for `--json`.
fn as_json(attachments: &[AttachmentReport], leftovers: &[Leftover]) -> Value {
    // `what` is the fact's kind, the first column of the text.
    let fact_json = |fact: &Fact| json!({"what": fact.kind, "text": fact.text, "ok": fact.verdict == Verdict::Fine});
    let attachment_json = |report: &AttachmentReport| {
        json!({
            "network": report.network,
            "containerID": report.container_id,
            "ifname": report.ifname,
            "netns": report.netns,
            "facts": report.facts.iter().map(fact_json).collect::<Vec<_>>(),
        })
    };
    json!({
        "attachments": attachments.iter().map(attachment_json).collect::<Vec<_>>(),
        "leftOver": leftovers.iter().map(Leftover::json).collect::<Vec<_>>(),
    })
}
