//! What the log of one plugin's call says: its steps and its delegates', and which of them it
//! failed by.
//!
//! Most errors in a log are answers: whether there is a bridge is asked by asking for it. The step
//! that a call failed by is the one whose error its message repeats.

use cni::steps::fields;

use super::recorder::PluginRun;

/// A step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Step {
    /// Whose: the plugin's or a delegate's.
    pub(super) program: String,
    pub(super) what: String,
    pub(super) ms: Option<f64>,
    /// How it ended, where there is something to say about it.
    pub(super) end: Option<String>,
    /// The message of a program that failed.
    pub(super) said: Option<String>,
    /// The request itself, of one that was refused.
    pub(super) request: Option<String>,
    /// Whether it is a delegate's whole call.
    is_call: bool,
    /// Whether the call failed by it.
    pub(super) failed: bool,
}

/// The steps in the order in which they ended.
pub(super) fn read(ran: &PluginRun) -> Vec<Step> {
    let mut steps: Vec<Step> = ran.log.lines().filter_map(step).collect();
    // The plugin's own line says what is known.
    if steps.last().is_some_and(|step| step.program == ran.plugin && step.what.starts_with(&ran.verb)) {
        steps.pop();
    }
    if let Some((code, message)) = &ran.error
        && let Some(at) = culprit(&steps, *code, message)
        && let Some(step) = steps.get_mut(at)
    {
        step.failed = true;
    }
    steps
}

/// A line of the log: `TIME LEVEL cni-PROGRAM KEY=VALUE...`.
fn step(line: &str) -> Option<Step> {
    let mut words = line.split(' ');
    let program = words.nth(2)?.strip_prefix("cni-")?.to_owned();
    let mut fields = fields(line);
    let mut take = |name: &str| {
        let at = fields.iter().position(|(key, _)| key == name)?;
        Some(fields.swap_remove(at).1)
    };
    let ms = take("ms").and_then(|ms| ms.parse().ok());
    if let Some(what) = take("step") {
        let end = take("error").or_else(|| take("end").filter(|end| end != "exit status 0"));
        let (said, request) = (take("said"), take("request"));
        return Some(Step { program, what, ms, end, said, request, ..Step::default() });
    }
    if let Some(what) = take("rollback") {
        return Some(Step { program, what: format!("rollback: {what}"), ..Step::default() });
    }
    let (verb, code) = (take("verb")?, take("code")?);
    let code = if code == "0" { String::new() } else { format!(", code {code}") };
    let what = format!("{verb} in all{code}");
    Some(Step { program, what, ms, end: take("error"), is_call: true, ..Step::default() })
}

/// The last step before the rollback whose error stands in the message, else the delegate's call
/// whose error does. If the message words the error differently: the last program that failed, and
/// of a kernel's refusal (100 and above) the last request.
fn culprit(steps: &[Step], code: Option<u64>, message: &str) -> Option<usize> {
    let undone = steps.iter().position(|step| step.what.starts_with("rollback: ")).unwrap_or(steps.len());
    let last =
        |is_it: &dyn Fn(&Step) -> bool| steps.iter().take(undone).rposition(|step| step.end.is_some() && is_it(step));
    let is_told = |step: &Step| step.end.as_deref().is_some_and(|end| message.contains(end));
    let is_refused = code.is_some_and(|code| code >= 100);
    last(&|step| !step.is_call && is_told(step))
        .or_else(|| last(&|step| step.is_call && is_told(step)))
        .or_else(|| last(&|step| step.said.is_some() || (is_refused && step.request.is_some())))
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
            error: error.map(|(code, msg)| (code, msg.to_owned())),
            log: LOG.to_owned(),
        }
    }

    #[test]
    fn a_log_becomes_steps_and_the_one_that_failed_is_found() {
        let failing = |error| {
            let steps = read(&ran(error));
            steps.into_iter().filter(|step| step.failed).map(|step| step.what).collect::<Vec<_>>()
        };
        let what: Vec<_> = read(&ran(None)).into_iter().map(|step| (step.program, step.what, step.end)).collect();
        let host_local = what.iter().filter(|(program, ..)| program == "host-local").count();
        assert_eq!((what.len(), host_local), (7, 2), "{what:#?}");
        assert_eq!(what[3].2, None, "a program that succeeds has nothing to say");
        assert_eq!(failing(None), [""; 0]);
        let address = ["netlink NewAddress 10.1.0.2/24"];
        assert_eq!(failing(Some((Some(100), "failed to add it: File exists (os error 17)"))), address);
        assert_eq!(failing(Some((Some(100), "in other words"))), address);
        assert_eq!(failing(Some((Some(7), "a mistake in the configuration"))), [""; 0]);
        let mut by_delegate = ran(Some((Some(11), "no addresses are left")));
        by_delegate.log = "\
T info cni-host-local pid=8 plugin=host-local verb=ADD network=n container=c ifname=eth0 code=11 ms=1 error=\"no addresses are left\"
T debug cni-bridge pid=7 step=\"run /bin/host-local\" ms=2.000 end=\"exit status 1\" said=\"{}\" request=\"{}\"
"
        .to_owned();
        let marked = |ran: &PluginRun| read(ran).into_iter().find(|step| step.failed).map(|step| step.what);
        assert_eq!(marked(&by_delegate).as_deref(), Some("ADD in all, code 11"));
        // One that keeps no log.
        by_delegate.log = by_delegate.log.lines().skip(1).collect();
        assert_eq!(marked(&by_delegate).as_deref(), Some("run /bin/host-local"));
        let link = "failed to find br0: No such device (os error 19)";
        assert_eq!(failing(Some((Some(100), link))), ["netlink GetLink br0"]);
    }
}
