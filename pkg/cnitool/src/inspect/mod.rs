//! inspect: what the kernel and the disk hold for attachments, beside their results, and leftovers.
//!
//! It reads, and changes nothing. It compares facts that only the plugin may change. CHECK knows
//! better whether everything is as the plugins want it.

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
pub(crate) use snapshot::{Snapshot, bridges_of, result_of};

/// The arguments of `inspect`.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// This network alone
    network: Option<String>,
    /// This container alone; the beginning of its ID will do
    container: Option<String>,
}

/// Something found, and whether it is as it should be.
pub(crate) struct Fact {
    pub(crate) what: &'static str,
    pub(crate) text: String,
    pub(crate) verdict: Verdict,
}

/// Whether a fact is as the result says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is, or the result says nothing about it.
    Fine,
    /// It is not.
    Differs,
}

impl Fact {
    pub(crate) fn fine(what: &'static str, text: impl Into<String>) -> Fact {
        Fact { what, text: text.into(), verdict: Verdict::Fine }
    }

    pub(crate) fn differs(what: &'static str, text: impl Into<String>) -> Fact {
        Fact { what, text: text.into(), verdict: Verdict::Differs }
    }
}

/// Does what the arguments ask for.
pub(crate) fn run(
    args: &Inspect,
    shared: &Shared,
    call: &Call<'_>,
    streams: &mut Streams<'_>,
) -> Result<Exit, Failure> {
    inspect(args, shared, call, streams).map_err(|error| failed("inspect", error, shared.format()))
}

fn inspect(args: &Inspect, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let snapshot = Snapshot::take(shared, call, &streams.notes)?;
    let is_meant = |network: &str, container: Option<&str>| {
        args.network.as_ref().is_none_or(|wanted| wanted == network)
            && args.container.as_ref().is_none_or(|wanted| container.is_some_and(|id| id.starts_with(wanted.as_str())))
    };
    let attached: Vec<Attached> = snapshot
        .remembered
        .iter()
        .filter(|entry| is_meant(&entry.network, Some(&entry.attachment.container_id)))
        .map(|entry| Attached::look(&snapshot, entry, call))
        .collect();
    let mut orphans = orphans::find(&snapshot, call)?;
    orphans.retain(|orphan| {
        let nobody_named = args.network.is_none() && args.container.is_none();
        nobody_named || is_meant(orphan.network.as_deref().unwrap_or_default(), orphan.container.as_deref())
    });
    if attached.is_empty() && orphans.is_empty() && args.network.is_some() {
        let whom = args.container.as_deref().map(|id| format!(" of container {id}")).unwrap_or_default();
        let network = args.network.as_deref().unwrap_or_default();
        let msg = format!("nothing{whom} is attached to network {network:?}, and nothing of it is left over");
        return Err(Error::new(Code::UNKNOWN_CONTAINER, msg));
    }
    let wrong = attached.iter().flat_map(|one| &one.facts).any(|fact| fact.verdict == Verdict::Differs);
    match shared.format() {
        Format::Json => write_json(streams, &as_json(&attached, &orphans))?,
        Format::Text => {
            let text = as_text(&attached, &orphans, streams);
            write(streams, &text)?;
        }
    }
    Ok(if wrong || !orphans.is_empty() { Exit::Failed } else { Exit::Done })
}

fn as_text(attached: &[Attached], orphans: &[Orphan], streams: &Streams<'_>) -> String {
    let mut text = String::new();
    for one in attached {
        text += &format!("{}\n", paint(streams.stdout_style, Colour::Bold, &one.name));
        for fact in &one.facts {
            let sign = if fact.verdict == Verdict::Fine { ' ' } else { '!' };
            let line = format!("{sign} {:<12} {}", fact.what, fact.text);
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

fn as_json(attached: &[Attached], orphans: &[Orphan]) -> Value {
    let fact = |fact: &Fact| json!({"what": fact.what, "text": fact.text, "ok": fact.verdict == Verdict::Fine});
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
