//! Runs the cases on several threads, and reports figures and differences without an explanation.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use cni_testkit::{Node, probe, require};
use conformance::measure::{figure, found, soak};
use serde_json::Value;

use crate::compare::{Compared, Difference, compare};
use crate::draw::draw;
use crate::explained::{explanation, explanations};
use crate::shrink::shrink;

/// The number of cases of an ordinary run, and of a soak run for each unit of `CNI_SOAK`.
const SHARE: u64 = 100;
const SOAK: u64 = 5000;

/// The seed of an ordinary run.
const SHARE_SEED: u64 = 7;

/// The number of findings of a run that are cut down, which takes up to some hundred runs of a
/// case.
const CUT_DOWN: usize = 5;

/// The counters of a run.
#[derive(Default)]
struct Counted {
    explained: Vec<u64>,
    /// (cases, steps done by both, steps refused by both, of these with Go's text first).
    cases: u64,
    done: u64,
    refused: u64,
    texts: u64,
    unexplained: BTreeMap<String, u64>,
    /// The findings, cut down where there was time.
    findings: Vec<String>,
    messages: BTreeMap<(String, String), String>,
}

#[test]
fn random_lists_leave_the_same_as_with_go() {
    require!(probe::go_plugins());
    require!(go_speaks_1_1_0());
    require!(probe::nft());
    require!(probe::iptables());
    if let Some(case) = variable("CNI_CASE") {
        return single(&serde_json::from_str(&case).expect("CNI_CASE is JSON"), true);
    }
    // The share draws the same lists each time, so that no change fails by the luck of the draw; a
    // long run draws others.
    let unless_given = || if soak().is_some() { by_chance() } else { SHARE_SEED };
    let seed = variable("CNI_SEED").map_or_else(unless_given, |text| text.parse().expect("CNI_SEED is a number"));
    if let Some(number) = variable("CNI_DRAW") {
        return single(&draw(seed, number.parse().expect("CNI_DRAW is a number")), variable("CNI_SHRINK").is_some());
    }
    let count = variable("CNI_LISTS").map(|text| text.parse().expect("CNI_LISTS is a number"));
    let count = count.unwrap_or_else(|| soak().map_or(SHARE, |times| SOAK * times));
    // Printed at once: a run that hangs can be repeated too.
    found(&format!("differential: seed {seed}, {count} lists"));
    let began = Instant::now();
    let (next, counted) = (AtomicU64::new(0), Mutex::new(Counted::default()));
    counted.lock().unwrap().explained = vec![0; explanations().count()];
    let threads = thread::available_parallelism().map_or(2, usize::from) * 2;
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        break;
                    }
                    one(seed, number, &counted);
                }
            });
        }
    });
    let counted = counted.into_inner().unwrap();
    report(&counted, seed, began);
}

/// Older releases differ in what they had not learned yet, which explains nothing.
fn go_speaks_1_1_0() -> Result<(), String> {
    let node = Node::new();
    let version = node.go_plugin("bridge").command("VERSION").stdin("{\"cniVersion\":\"1.0.0\"}").run();
    let known = version.stdout.contains("\"1.1.0\"");
    if known { Ok(()) } else { Err("the Go plugins are older than version 1.1.0 of the specification".to_owned()) }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

fn by_chance() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::from(now.subsec_nanos()) ^ now.as_secs()
}

/// Runs and counts one case; cuts it down if it has a new difference without an explanation.
fn one(seed: u64, number: u64, counted: &Mutex<Counted>) {
    let case = draw(seed, number);
    let compared = match catch_unwind(AssertUnwindSafe(|| compare(&case))) {
        Ok(compared) => compared,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a panic".to_owned());
            let mut counted = counted.lock().unwrap();
            *counted.unexplained.entry("panic".to_owned()).or_default() += 1;
            return counted.found(format!("seed {seed} draw {number}: {text}\n{case}"));
        }
    };
    let mut fresh: Vec<Difference> = Vec::new();
    {
        let mut counted = counted.lock().unwrap();
        counted.cases += 1;
        counted.done += compared.done as u64;
        for (plugin, theirs, ours) in &compared.refused {
            counted.refused += 1;
            let message = |text: &str| {
                text.split_once(' ').map_or("", |(_, rest)| rest).split(" (").next().unwrap_or_default().to_owned()
            };
            if message(ours).starts_with(&message(theirs)) {
                counted.texts += 1;
            } else {
                counted.messages.insert((plugin.clone(), theirs.clone()), ours.clone());
            }
        }
        for difference in &compared.differences {
            if let Some(which) = explanation(&case, difference) {
                counted.explained[which] += 1;
                continue;
            }
            let kind = format!("{} {}", difference.verb, general(difference));
            note(&format!("draw {number} {difference}"));
            let seen = counted.unexplained.entry(kind).or_default();
            *seen += 1;
            if *seen == 1 {
                fresh.push(difference.clone());
            }
        }
    }
    if fresh.is_empty() {
        return;
    }
    // One finding of a kind is enough, and some kinds are enough for one run.
    let cut =
        counted.lock().unwrap().findings.len() < CUT_DOWN && variable("CNI_SHRINK").is_none_or(|value| value != "no");
    let (small, difference) = if cut { shrink(case, &fresh[0]) } else { (case, fresh[0].clone()) };
    let others: String = fresh[1..].iter().take(6).map(|other| format!("  also: {other}")).collect();
    let how = if cut { "cut down" } else { "as drawn" };
    counted.lock().unwrap().found(format!("seed {seed} draw {number}, {how}:\n{small}\n{difference}{others}"));
}

impl Counted {
    /// Prints a finding at once, because a run may take hours, and keeps it for the end.
    fn found(&mut self, finding: String) {
        found(&format!("differential: {finding}"));
        self.findings.push(finding);
    }
}

/// Appends every difference without an explanation to the file `CNI_DIFFS`.
fn note(text: &str) {
    if let Some(path) = variable("CNI_DIFFS") {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).expect("to open CNI_DIFFS");
        file.write_all(text.as_bytes()).expect("to write CNI_DIFFS");
    }
}

/// Returns the place of a difference without the drawn values, so that the same difference in many
/// cases is reported once.
fn general(difference: &Difference) -> String {
    if difference.key == "outcome" {
        let words = |value: &Option<String>| {
            let text = value.clone().unwrap_or_default();
            text.chars().filter(|c| !c.is_ascii_digit()).take(70).collect::<String>()
        };
        return format!("outcome: {} / {}", words(&difference.expected), words(&difference.ours));
    }
    let parts: Vec<&str> = difference.key.split('/').collect();
    let kept = parts.len().min(4);
    parts[..kept].join("/")
}

/// Prints without libtest, which keeps the output of a test until the test fails.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Runs one case and prints everything about it.
fn single(case: &Value, cut: bool) {
    let compared: Compared = compare(case);
    let mut unexplained = Vec::new();
    say(&format!("{case}"));
    for difference in &compared.differences {
        match explanation(case, difference) {
            Some(which) => {
                let name = explanations().nth(which).map_or("", |one| one.name);
                say(&format!("{difference}    explained: {name}"));
            }
            None => {
                say(&format!("{difference}"));
                unexplained.push(difference.clone());
            }
        }
    }
    for (plugin, theirs, ours) in &compared.refused {
        say(&format!("refused by both ({plugin}):\n    Go    {theirs}\n    ours  {ours}"));
    }
    if cut && let Some(first) = unexplained.first() {
        let (small, difference) = shrink(case.clone(), first);
        say(&format!("cut down:\n{small}\n{difference}"));
    }
    assert!(unexplained.is_empty(), "{} differences are not explained", unexplained.len());
}

fn report(counted: &Counted, seed: u64, began: Instant) {
    let took = began.elapsed();
    figure(&format!(
        "differential: seed {seed}, {} lists in {} s, {} steps done by both, {} refused by both, {} of these with Go's text first",
        counted.cases,
        took.as_secs(),
        counted.done,
        counted.refused,
        counted.texts
    ));
    let explained: Vec<(&str, &str, u64)> =
        explanations().zip(&counted.explained).map(|(one, times)| (one.name, one.reason, *times)).collect();
    let differences: u64 = explained.iter().map(|(_, _, times)| times).sum();
    let unused: Vec<&str> = explained.iter().filter(|(_, _, times)| *times == 0).map(|(name, _, _)| *name).collect();
    let used = explained.len() - unused.len();
    figure(&format!("differential: {differences} differences, which {used} of {} explanations cover", explained.len()));
    if counted.cases >= SOAK {
        for (name, reason, times) in &explained {
            figure(&format!("differential: {times:>6} x {name} ({reason})"));
        }
        // An explanation that covers nothing in a long run would hide a defect that it once
        // explained.
        figure(&format!("differential: explanations that covered nothing: {}", unused.join("; ")));
    }
    if let Some(path) = variable("CNI_MESSAGES") {
        let lines: Vec<String> = counted
            .messages
            .iter()
            .map(|((plugin, theirs), ours)| format!("{plugin}\n  Go    {theirs}\n  ours  {ours}\n"))
            .collect();
        std::fs::write(path, lines.concat()).expect("to write the messages");
    }
    let lines: Vec<String> = counted.unexplained.iter().map(|(kind, times)| format!("{times:>6} x {kind}")).collect();
    let findings = counted.findings.iter().take(CUT_DOWN).map(String::as_str).collect::<Vec<_>>().join("\n\n");
    assert!(lines.is_empty(), "differences that nothing explains, seed {seed}:\n{}\n\n{findings}", lines.join("\n"));
}
