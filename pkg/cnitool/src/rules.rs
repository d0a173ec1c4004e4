//! rules: writes the packet filter rules of attachments again after another program has removed
//! them.
//!
//! Each plugin writes its own rules ([`Plugin::restore_rules`](cni::skel::Plugin::restore_rules)),
//! from the configuration and the result that the result cache has of the attachment's ADD.

use std::path::Path;

use clap::{Args, Subcommand};
use cni::config::NetConf;
use cni::rollback::{Notes, Rollback};
use cni::skel::{self, Environment, RestoreMode};
use cni::{AttachmentId, Result};
use cni_linux::{Netlink, Netns};
use libcni::PluginConf;
use libcni::cache::{Entry, Listing};
use serde::Serialize;
use serde_json::json;

use crate::call::{Call, Context, Exit, Format, Streams};
use crate::node::attachments::{find_host_end, read_caches};
use crate::node::{name_of, plugins_of_type};
use crate::report::{Colour, Report, counted, words};
use crate::target::NetnsPresence;

/// Write packet filter rules again that another program has removed
#[derive(Debug, Args)]
#[command(subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
pub(crate) struct Rules {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Write the missing rules of every attachment
    ///
    /// For a node whose rules were removed by 'firewall-cmd --reload', 'nft flush
    /// ruleset' or 'iptables-restore' without --noflush: containers have lost
    /// masquerading, host ports, acceptance by the firewall and the spoof check.
    /// Compares the rules of each attachment that a runtime or cnitool has stored with
    /// the result and the configuration of its add, and writes those that are missing.
    /// Existing rules and rules of other programs stay. Attachments that are gone are
    /// skipped. Plugins of other projects are not examined.
    ///
    /// ---
    /// Run it in the host's network namespace.
    ///
    /// Exit codes: 0 no rule is missing now; 1 something failed or was not restored, or
    ///             with --dry-run a rule is missing; 2 the arguments are invalid
    ///
    /// Examples:
    ///   cnitool rules restore --dry-run
    ///   cnitool rules restore mynet
    #[command(verbatim_doc_comment)]
    Restore {
        /// Only this network
        network: Option<String>,
        /// Print what is missing, and change nothing
        #[arg(long)]
        dry_run: bool,
    },
}

/// The outcome for one attachment.
#[derive(Serialize)]
struct AttachmentOutcome {
    #[serde(flatten)]
    id: AttachmentId,
    outcome: Outcome,
    /// The reason if it was not examined.
    why: Option<String>,
    /// The plugins that have rules or are of another project.
    plugins: Vec<PluginOutcome>,
}

/// The outcome for the rules of one plugin.
#[derive(Serialize)]
struct PluginOutcome {
    r#type: String,
    outcome: Outcome,
    /// A sentence about each missing or restored rule, or the reason.
    why: Vec<String>,
}

impl AttachmentOutcome {
    /// Returns the outcome for an attachment that was not examined, for this reason.
    fn unexamined(entry: &Entry, (outcome, why): (Outcome, String)) -> AttachmentOutcome {
        AttachmentOutcome { id: entry.id(), outcome, why: Some(why), plugins: Vec::new() }
    }
}

/// What happened to rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Outcome {
    /// No rule was missing.
    Complete,
    /// Rules are missing.
    Missing,
    /// Rules were missing and have been written.
    Restored,
    /// The rules could not be compared or written.
    Failed,
    /// The plugin is of another project and cannot be asked for its rules.
    NotExamined,
    /// The attachment is gone.
    Skipped,
    /// It could not be proved that the attachment is in use.
    NotRestored,
}

impl Outcome {
    /// Returns the words for people.
    fn words(self) -> String {
        words(json!(self).as_str().unwrap_or_default())
    }

    /// Whether rules may be missing.
    fn is_problem(self) -> bool {
        matches!(self, Outcome::Missing | Outcome::Failed | Outcome::NotRestored)
    }
}

/// Runs `cnitool rules restore`: restores the rules of each attachment in the result caches, or of
/// each attachment to the network in the arguments, and prints the outcomes. Returns
/// [`Exit::Failed`] if an attachment or a plugin failed, if an attachment may be in use and was not
/// examined, if a file of a cache cannot be read, or if rules are missing in a dry run.
///
/// # Errors
/// Code 5 if a result cache cannot be read or stdout cannot be written.
pub(crate) fn run(args: &Rules, context: &Context<'_>, streams: &mut Streams<'_>) -> Result<Exit> {
    let Verb::Restore { network, dry_run } = &args.verb;
    let Listing { entries, problems } = read_caches(context, network.as_deref())?;
    let restore = |entry: &Entry| {
        restore_attachment(entry, *dry_run, context)
            .unwrap_or_else(|error| AttachmentOutcome::unexamined(entry, (Outcome::Failed, error.to_string())))
    };
    let attachments: Vec<AttachmentOutcome> = entries.iter().map(restore).collect();
    let mut report = Report::new(streams);
    let add = |report: &mut Report, label: &str, outcome: Outcome, why: &[String]| {
        let details = if why.is_empty() { String::new() } else { format!(": {}", why.join("; ")) };
        report.fact(outcome.is_problem(), label, &format!("{}{details}", outcome.words()));
    };
    for AttachmentOutcome { id, outcome, why, plugins } in &attachments {
        report.painted(Colour::Bold, &name_of(id));
        why.iter().for_each(|why| add(&mut report, "attachment", *outcome, std::slice::from_ref(why)));
        plugins.iter().for_each(|plugin| add(&mut report, &plugin.r#type, plugin.outcome, &plugin.why));
    }
    let count = |wanted: Outcome| attachments.iter().filter(|one| one.outcome == wanted).count();
    let (lacking, skipped) = (count(Outcome::Missing) + count(Outcome::Restored), count(Outcome::Skipped));
    let mut summary =
        format!("{}: {lacking} lacked rules, {skipped} skipped", counted(attachments.len(), "attachment"));
    for outcome in [Outcome::NotRestored, Outcome::Failed].into_iter().filter(|outcome| count(*outcome) > 0) {
        summary += &format!(", {} {}", count(outcome), outcome.words());
    }
    report.line(format_args!("{summary}."));
    if context.format() == Format::Text {
        problems.iter().for_each(|problem| streams.notes.note(format_args!("ignored: {problem}")));
    }
    // `changed` is true without `--dry-run`, even if no rule was missing.
    let document = json!({"changed": !dry_run, "attachments": attachments, "problems": problems});
    report.write(streams, context.format(), &document)?;
    let is_incomplete = attachments.iter().any(|one| one.outcome.is_problem()) || !problems.is_empty();
    Ok(if is_incomplete { Exit::Failed } else { Exit::Done })
}

/// Restores the rules of one attachment or, in a dry run, only compares them. Written rules stay,
/// even on an error, unless the attachment was detached during the call.
///
/// # Errors
/// - As [`why_unused`].
/// - The configuration or the result in `entry` is invalid.
/// - A result cache cannot be read after rules were written.
fn restore_attachment(entry: &Entry, dry_run: bool, context: &Context<'_>) -> Result<AttachmentOutcome> {
    let (call, notes) = (context.call, &context.notes);
    if let Some(why) = why_unused(entry, call)? {
        return Ok(AttachmentOutcome::unexamined(entry, why));
    }
    let environment = Environment::new(entry.attachment.variables(skel::Verb::Check));
    let plugin_calls = plugin_calls(entry, &environment, call, notes)?;
    let (mut plugins, mut rollback) = (Vec::new(), Rollback::new(notes.clone()));
    for (kind, plugin_call) in &plugin_calls {
        let mode = if dry_run { RestoreMode::Report } else { RestoreMode::Write(&mut rollback) };
        let (outcome, why) = match cni_multicall::find(kind).map(|found| found.restore_rules(plugin_call, mode)) {
            None => (Outcome::NotExamined, vec!["a plugin of another project".to_owned()]),
            // The plugin has no rules.
            Some(Ok(None)) => continue,
            Some(Ok(Some(missing))) if missing.is_empty() => (Outcome::Complete, missing),
            Some(Ok(Some(missing))) if dry_run => (Outcome::Missing, missing),
            Some(Ok(Some(missing))) => (Outcome::Restored, missing),
            Some(Err(error)) => (Outcome::Failed, vec![error.to_string()]),
        };
        plugins.push(PluginOutcome { r#type: kind.clone(), outcome, why });
    }
    // If DEL ran during the call, it may have ended before the rules were written.
    let is_detached = || -> Result<bool> {
        let caches = context.caches();
        let mut found = caches.iter().filter_map(|cache| cache.find(&entry.id()).transpose());
        Ok(found.next().transpose()?.is_none() || why_unused(entry, call)?.is_some())
    };
    let detached = if rollback.is_empty() { Ok(false) } else { is_detached() };
    if let Ok(true) = detached {
        drop(rollback);
        let why = "it was detached during the call; its rules have been removed again".to_owned();
        return Ok(AttachmentOutcome::unexamined(entry, (Outcome::Skipped, why)));
    }
    // The rules of an attachment that may be in use stay.
    rollback.commit();
    detached?;
    let has = |outcome: &Outcome| plugins.iter().any(|plugin: &PluginOutcome| plugin.outcome == *outcome);
    let worst = [Outcome::Failed, Outcome::Missing, Outcome::Restored].into_iter().find(has);
    Ok(AttachmentOutcome { id: entry.id(), outcome: worst.unwrap_or(Outcome::Complete), why: None, plugins })
}

/// Returns a sentence for each rule of the plugins of the type `kind` that the attachment lacks, as
/// their CHECK finds them. Changes nothing.
///
/// # Errors
/// The configuration or the result in `entry` is invalid, or the rules cannot be read.
pub(crate) fn missing_rules(entry: &Entry, kind: &str, call: &Call<'_>) -> Result<Vec<String>> {
    let environment = Environment::new(entry.attachment.variables(skel::Verb::Check));
    let mut missing = Vec::new();
    for (name, plugin_call) in plugin_calls(entry, &environment, call, &Notes::silent())? {
        if let Some(found) = cni_multicall::find(&name).filter(|found| found.name() == kind) {
            missing.extend(found.restore_rules(&plugin_call, RestoreMode::Report)?.unwrap_or_default());
        }
    }
    Ok(missing)
}

/// Returns the type of each plugin of the attachment, and its call. The plugins compare the rules
/// as in CHECK, so `environment` has that verb.
///
/// # Errors
/// The configuration or the result in `entry` is invalid.
fn plugin_calls<'c>(
    entry: &Entry,
    environment: &'c Environment,
    call: &Call<'c>,
    notes: &Notes,
) -> Result<Vec<(String, skel::Call<'c>)>> {
    let list = entry.list()?;
    let plugin_call = |plugin: &PluginConf| {
        let conf = entry.request(&list, plugin).and_then(NetConf::parse)?;
        let plugin_call = skel::Call {
            container_id: entry.attachment.container_id.clone(),
            netns: Some(entry.attachment.netns.clone().into()),
            ifname: entry.attachment.ifname.clone(),
            conf,
            environment,
            machine: call.machine,
            notes: notes.clone(),
        };
        Ok((plugin.kind().to_owned(), plugin_call))
    };
    list.plugins().iter().map(plugin_call).collect()
}

/// Returns `None` if the attachment is in use, otherwise the outcome [`Outcome::Skipped`]
/// or [`Outcome::NotRestored`]: its rules could match packets of another container.
///
/// The attachments of bridge and ptp have an end on the host, which disappears together with the
/// container's. What the container changes in its namespace, such as the name or the MAC of its
/// interface, has no influence: a container whose MAC is forged needs its spoof rules most.
///
/// Other attachments have nothing on the host. They are in use if their namespace has their
/// interface with the MAC in the result (if the result has one).
///
/// # Errors
/// The kernel's error if the links of the host, the namespace or its links cannot be read; code 6
/// if the result cannot be decoded.
fn why_unused(entry: &Entry, call: &Call<'_>) -> Result<Option<(Outcome, String)>> {
    let skipped = |why| Ok(Some((Outcome::Skipped, why)));
    let unproven = |why| Ok(Some((Outcome::NotRestored, why)));
    let (netns, ifname) = (&entry.attachment.netns, &entry.attachment.ifname);
    let host = Netlink::open()?;
    let container_interface = entry.container_interface()?;
    let result = entry.decoded_result().ok().flatten().unwrap_or_default();
    let presence = NetnsPresence::at(netns, call.machine);
    if let NetnsPresence::Gone(why) = presence {
        return skipped(format!("its namespace {netns} is gone: {why}"));
    }
    if find_host_end(&host.list_links()?, &entry.id(), &result).is_some() {
        return Ok(None);
    }
    // Results below version 0.3.0 have no interfaces.
    let has_host_end = ["bridge", "ptp"].into_iter().any(|kind| !plugins_of_type(&entry.config, kind).is_empty());
    if has_host_end && !result.interfaces.is_empty() {
        return skipped("the host has no interface of it any more".to_owned());
    }
    if let NetnsPresence::OtherFile(why) | NetnsPresence::Unknown(why) = presence {
        return unproven(format!("its namespace {netns} cannot be entered: {why}"));
    }
    let link = host.open_in(&Netns::open(Path::new(netns))?)?.find_link(ifname)?;
    let Some(link) = link else {
        return unproven(format!("its namespace {netns} has no interface {ifname}"));
    };
    let expected = container_interface.map(|interface| interface.mac).unwrap_or_default();
    let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
    if expected.is_empty() || expected.eq_ignore_ascii_case(&mac) {
        return Ok(None);
    }
    unproven(format!("{ifname} in its namespace {netns} has the MAC {mac}, but the result has {expected}"))
}
