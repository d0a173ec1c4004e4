//! Reads the steps of a plugin and of its delegates from the log, and finds the step that made the
//! plugin fail.
//!
//! Most errors in a log are harmless: for example, a request fails if a bridge does not exist yet.
//! The step that made the plugin fail is usually found by its error text, which the plugin's own
//! error message contains.

use cni::steps::fields;
use serde::Serialize;

use super::recorder::{PluginError, PluginRun};

/// A step of a plugin: a request to the kernel, a file, a program, a delegate.
#[derive(Debug, Default, Serialize)]
pub(super) struct Step {
    /// The plugin or delegate that the step belongs to.
    pub(super) program: String,
    /// A description, such as `netlink NewLink br0`.
    #[serde(rename = "step")]
    pub(super) what: String,
    /// The duration in milliseconds.
    pub(super) ms: Option<f64>,
    /// The error or exit status, or `None` if the step succeeded.
    #[serde(rename = "end")]
    pub(super) error: Option<String>,
    /// The stderr of a program that failed.
    #[serde(rename = "said")]
    pub(super) stderr: Option<String>,
    /// The request that the kernel refused.
    pub(super) request: Option<String>,
    /// Whether this is the summary of a delegate's whole run, not a single step.
    #[serde(skip)]
    is_whole_run: bool,
    /// Whether this step made the plugin fail.
    #[serde(rename = "failed")]
    pub(super) is_cause: bool,
}

/// Returns the plugin's steps in the order in which they ended. `log` has the lines that were added
/// during the run. If one of them made the plugin fail, its `is_cause` is true.
pub(super) fn steps_of(run: &PluginRun, log: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = log.lines().filter_map(parse_line).collect();
    // The last line is the summary of the plugin's own run, which `run` already has.
    if steps.last().is_some_and(|step| step.program == run.plugin && step.what.starts_with(&run.verb)) {
        steps.pop();
    }
    let cause = run.error.as_ref().and_then(|error| find_cause(&steps, error));
    if let Some(step) = cause.and_then(|position| steps.get_mut(position)) {
        step.is_cause = true;
    }
    steps
}

/// Parses a line of the log, `TIME LEVEL cni-PROGRAM KEY=VALUE...`. Returns `None` if it is not
/// about a step.
fn parse_line(line: &str) -> Option<Step> {
    let mut words = line.split(' ');
    let program = words.nth(2)?.strip_prefix("cni-")?.to_owned();
    let fields = fields(line);
    let take = |name: &str| fields.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let ms = take("ms").and_then(|ms| ms.parse().ok());
    if let Some(what) = take("step") {
        let error = take("error").or_else(|| take("end").filter(|end| end != "exit status 0"));
        let (stderr, request) = (take("said"), take("request"));
        return Some(Step { program, what, ms, error, stderr, request, ..Step::default() });
    }
    if let Some(what) = take("rollback") {
        return Some(Step { program, what: format!("{ROLLBACK_PREFIX}{what}"), ..Step::default() });
    }
    // The summary of the whole run of a plugin or delegate.
    let (verb, code) = (take("verb")?, take("code")?);
    let code = if code == "0" { String::new() } else { format!(", code {code}") };
    let what = format!("{verb} in all{code}");
    Some(Step { program, what, ms, error: take("error"), is_whole_run: true, ..Step::default() })
}

/// The beginning of the description of a rollback's step.
const ROLLBACK_PREFIX: &str = "rollback: ";

/// Returns the position of the step that made the plugin fail with `error`, or `None` if no step
/// did. Only steps before the rollback are searched. The first rule that finds a step is used:
/// 1. the last step whose error is in the plugin's message;
/// 2. the last run of a delegate whose error is in the plugin's message;
/// 3. the last program that failed or, if the plugin's code may stand for a kernel error (100 or
///    above), the last request that the kernel refused, whichever is later.
fn find_cause(steps: &[Step], error: &PluginError) -> Option<usize> {
    let rollback_begin = steps.iter().position(|step| step.what.starts_with(ROLLBACK_PREFIX)).unwrap_or(steps.len());
    let last_failed_where = |condition: &dyn Fn(&Step) -> bool| {
        steps.iter().take(rollback_begin).rposition(|step| step.error.is_some() && condition(step))
    };
    let is_in_message = |step: &Step| step.error.as_deref().is_some_and(|text| error.msg.contains(text));
    let may_be_kernel_error = error.code.is_some_and(|code| code >= 100);
    let is_program = |step: &Step| step.stderr.is_some();
    let is_refused_request = |step: &Step| may_be_kernel_error && step.request.is_some();
    last_failed_where(&|step| !step.is_whole_run && is_in_message(step))
        .or_else(|| last_failed_where(&|step| step.is_whole_run && is_in_message(step)))
        .or_else(|| last_failed_where(&|step| is_program(step) || is_refused_request(step)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
2026-11-21T02:16:03.018Z debug cni-bridge pid=7 step=\"netlink GetLink br0\" ms=0.100 error=\"No such device (os error 19)\"
2026-11-21T02:16:03.018Z debug cni-host-local trace=12 pid=8 step=\"lock /x/lock\" ms=0.010
2026-11-21T02:16:03.018Z info cni-host-local pid=8 plugin=host-local verb=ADD network=n container=c ifname=eth0 code=0 ms=0.610
2026-11-21T02:16:03.018Z debug cni-bridge pid=7 step=\"run /bin/host-local\" ms=2.000 end=\"exit status 0\"
2026-11-21T02:16:03.018Z warn cni-bridge pid=7 note=\"said on stderr\"
2026-11-21T02:16:03.018Z debug cni-bridge pid=7 step=\"netlink NewAddress 10.1.0.2/24\" ms=0.100 error=\"File exists (os error 17)\" request=\"type 20: 0a\"
2026-11-21T02:16:03.018Z debug cni-bridge pid=7 rollback=\"delete veth\"
2026-11-21T02:16:03.018Z debug cni-bridge pid=7 step=\"netlink DelLink veth\" ms=15.000 error=\"File exists (os error 17)\" request=\"type 17: 00\"
2026-11-21T02:16:03.018Z info cni-bridge pid=7 plugin=bridge verb=ADD network=n container=c ifname=eth0 code=100 ms=20.1 error=\"no\"
";

    fn ran(error: Option<(Option<u64>, &str)>) -> PluginRun {
        PluginRun {
            plugin: "bridge".to_owned(),
            verb: "ADD".to_owned(),
            ms: 21.0,
            error: error.map(|(code, msg)| PluginError { code, msg: msg.to_owned() }),
            steps: Vec::new(),
        }
    }

    #[test]
    fn a_log_becomes_steps_and_the_one_that_failed_is_found() {
        let failing = |error| {
            let steps = steps_of(&ran(error), LOG);
            steps.into_iter().filter(|step| step.is_cause).map(|step| step.what).collect::<Vec<_>>()
        };
        let what: Vec<_> =
            steps_of(&ran(None), LOG).into_iter().map(|step| (step.program, step.what, step.error)).collect();
        let host_local = what.iter().filter(|(program, ..)| program == "host-local").count();
        assert_eq!((what.len(), host_local), (7, 2), "{what:#?}");
        assert_eq!(what[3].2, None, "a program that succeeds has nothing to say");
        assert_eq!(failing(None), [""; 0]);
        let address = ["netlink NewAddress 10.1.0.2/24"];
        assert_eq!(failing(Some((Some(100), "failed to add it: File exists (os error 17)"))), address);
        assert_eq!(failing(Some((Some(100), "in other words"))), address);
        assert_eq!(failing(Some((Some(7), "a mistake in the configuration"))), [""; 0]);
        let by_delegate = ran(Some((Some(11), "no addresses are left")));
        let log = "\
T info cni-host-local pid=8 plugin=host-local verb=ADD network=n container=c ifname=eth0 code=11 ms=1 error=\"no addresses are left\"
T debug cni-bridge pid=7 step=\"run /bin/host-local\" ms=2.000 end=\"exit status 1\" said=\"{}\" request=\"{}\"
";
        let cause =
            |log: &str| steps_of(&by_delegate, log).into_iter().find(|step| step.is_cause).map(|step| step.what);
        assert_eq!(cause(log).as_deref(), Some("ADD in all, code 11"));
        // A plugin that writes no log.
        assert_eq!(cause(log.lines().nth(1).unwrap()).as_deref(), Some("run /bin/host-local"));
        let link = "failed to find br0: No such device (os error 19)";
        assert_eq!(failing(Some((Some(100), link))), ["netlink GetLink br0"]);
    }
}
