//! inspect: prints what exists of each attachment in the kernel and on the disk, compared with its
//! result, and all leftovers.
//!
//! It changes nothing. It compares only properties that nothing but the plugins may change; CHECK
//! compares more.

mod attachment;
pub(crate) mod orphans;
mod snapshot;

use clap::Args;
use cni::{Code, Error};
use serde_json::{Value, json};

use crate::cli::{Failure, Shared, failed};
use crate::report::{Colour, Format, paint, write, write_json};
use crate::{Call, Exit, Streams};

pub(crate) use attachment::Attached;
pub(crate) use orphans::Orphan;
pub(crate) use snapshot::{Snapshot, all_plugins, bridges_of, is_true, result_of};

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

/// The comparison of a fact with the attachment's result and configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The fact is as they say, or they do not mention it.
    Fine,
    /// The fact differs from what they say.
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

    /// Whether the fact is about a packet filter rule, which `cnitool rules restore` writes again.
    pub(crate) fn is_rule(&self) -> bool {
        attachment::RULE_KINDS.contains(&self.kind)
    }
}

/// Runs `cnitool inspect`.
pub(crate) fn run(
    args: &Inspect,
    shared: &Shared,
    call: &Call<'_>,
    streams: &mut Streams<'_>,
) -> Result<Exit, Failure> {
    inspect(args, shared, call, streams).map_err(|error| failed("inspect", error, shared.format()))
}

/// Prints the attachments and leftovers that the arguments select. Returns [`Exit::Failed`] if
/// something differs or is left over.
///
/// # Errors
/// - As [`Snapshot::take`].
/// - Code 3 if the arguments name a network, and nothing of it is found.
/// - Code 5 if stdout cannot be written.
fn inspect(args: &Inspect, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let snapshot = Snapshot::take(shared, call, &streams.notes)?;
    // An object whose network or container is not known is only selected if the arguments name
    // none.
    let is_selected = |network: Option<&str>, container: Option<&str>| {
        let is_network = args.network.is_none() || network == args.network.as_deref();
        let is_container = args
            .container
            .as_ref()
            .is_none_or(|beginning| container.is_some_and(|id| id.starts_with(beginning.as_str())));
        is_network && is_container
    };
    let attached: Vec<Attached> = snapshot
        .cached
        .iter()
        .filter(|entry| is_selected(Some(&entry.network), Some(&entry.attachment.container_id)))
        .map(|entry| Attached::inspect(&snapshot, entry, call))
        .collect();
    let mut orphans = orphans::list(&snapshot, call);
    orphans.retain(|orphan| is_selected(orphan.network.as_deref(), orphan.container.as_deref()));
    if attached.is_empty() && orphans.is_empty() && args.network.is_some() {
        let of_container = args.container.as_deref().map(|id| format!(" of container {id}")).unwrap_or_default();
        let network = args.network.as_deref().unwrap_or_default();
        let msg = format!("nothing{of_container} is attached to network {network:?}, and there are no leftovers");
        return Err(Error::new(Code::UNKNOWN_CONTAINER, msg));
    }
    let has_difference = attached.iter().flat_map(|one| &one.facts).any(|fact| fact.verdict == Verdict::Differs);
    match shared.format() {
        Format::Json => write_json(streams, &as_json(&attached, &orphans))?,
        Format::Text => {
            let text = as_text(&attached, &orphans, streams);
            write(streams, &text)?;
        }
    }
    Ok(if has_difference || !orphans.is_empty() { Exit::Failed } else { Exit::Done })
}

/// Returns the report for people.
fn as_text(attached: &[Attached], orphans: &[Orphan], streams: &Streams<'_>) -> String {
    let mut text = String::new();
    for one in attached {
        text += &format!("{}\n", paint(streams.stdout_style, Colour::Bold, &one.name));
        for fact in &one.facts {
            let sign = if fact.verdict == Verdict::Fine { ' ' } else { '!' };
            let line = format!("{sign} {:<12} {}", fact.kind, fact.text);
            text += &match fact.verdict {
                Verdict::Fine => line,
                Verdict::Differs => paint(streams.stdout_style, Colour::Red, &line),
            };
            text.push('\n');
        }
        text.push('\n');
    }
    if orphans.is_empty() {
        let count = attached.len();
        let plural = if count == 1 { "attachment" } else { "attachments" };
        text += &format!("{count} {plural}; nothing is left over.\n");
        return text;
    }
    text += &format!("{}\n", paint(streams.stdout_style, Colour::Bold, "Left over"));
    for orphan in orphans {
        let line = format!("! {:<12} {}", orphan.kind, orphan.what);
        text += &format!("{}\n", paint(streams.stdout_style, Colour::Red, &line));
        text += &format!("    because {}\n    remove: {}\n", orphan.why, orphan.command);
    }
    text
}

/// Returns the report for `--json`.
fn as_json(attached: &[Attached], orphans: &[Orphan]) -> Value {
    let fact = |fact: &Fact| json!({"what": fact.kind, "text": fact.text, "ok": fact.verdict == Verdict::Fine});
    let attachment = |one: &Attached| {
        json!({
            "network": one.network,
            "containerID": one.container_id,
            "ifname": one.ifname,
            "netns": one.netns,
            "facts": one.facts.iter().map(fact).collect::<Vec<_>>(),
        })
    };
    json!({
        "attachments": attached.iter().map(attachment).collect::<Vec<_>>(),
        "leftOver": orphans.iter().map(Orphan::json).collect::<Vec<_>>(),
    })
}
