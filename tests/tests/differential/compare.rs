//! Runs a case on both nodes, step by step, and lists the differences.

use std::fmt;

use serde_json::{Value, json};

use crate::facts::{Facts, flatten};
use crate::side::{Did, Side, Who, key_of, list};

/// One fact that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// The step after which it showed, and its verb.
    pub(crate) step: usize,
    pub(crate) verb: String,
    /// The compared states: both sides, or ours before and after.
    pub(crate) kind: Kind,
    /// The place, as in [`Facts`]; `outcome` for the outcome of a step.
    pub(crate) key: String,
    /// The value of Go, or the value before.
    pub(crate) expected: Option<String>,
    /// Our value.
    pub(crate) ours: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Go's node has something else.
    Differs,
    /// Our node has changed by an ADD that both refuse, with a DEL after it if a later plugin
    /// refused.
    Left,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let expected = if self.kind == Kind::Differs { "Go  " } else { "then" };
        writeln!(f, "step {} ({}): {}", self.step, self.verb, self.key)?;
        for (who, value) in [(expected, &self.expected), ("ours", &self.ours)] {
            let value = value.as_deref().unwrap_or("(nothing)");
            for line in if value.is_empty() { "(empty)" } else { value }.lines() {
                writeln!(f, "    {who}  {line}")?;
            }
        }
        Ok(())
    }
}

/// The outcome of a case.
#[derive(Debug, Default)]
pub(crate) struct Compared {
    pub(crate) differences: Vec<Difference>,
    /// Steps that both refused: (plugin, Go's error, ours).
    pub(crate) refused: Vec<(String, String, String)>,
    /// Steps that both did.
    pub(crate) done: usize,
}

/// Runs the case on two fresh nodes.
pub(crate) fn compare(case: &Value) -> Compared {
    let (mut go, mut ours) = (Side::new(Who::Go, case), Side::new(Who::Ours, case));
    let mut compared = Compared::default();
    let mut last = ours.facts();
    let mut all: Vec<Difference> = Vec::new();
    let mut unready = false;
    for (number, step) in list(&case["steps"]).iter().enumerate() {
        let verb = step["verb"].as_str().unwrap_or_default();
        let again = ours.attached.iter().any(|(key, result)| *key == key_of(step) && result.is_some());
        let (by_go, by_us) = (go.step(step), ours.step(step));
        let mut differences = Vec::new();
        let mut over = false;
        match (&by_go.refused, &by_us.refused) {
            (Some((plugin, theirs)), Some((refuser, own))) => {
                compared.refused.push((format!("{verb} {plugin}"), theirs.clone(), own.clone()));
                if verb == "ADD" {
                    // The runtime must undo what the plugins before the refusing one have done.
                    let first = list(&case["lists"][key_of(step).0]["plugins"]).first();
                    let later = first.is_some_and(|first| first["type"] != refuser.as_str());
                    if !again && later {
                        let mut del = step.clone();
                        del["verb"] = json!("DEL");
                        del["keepGoing"] = json!(true);
                        ours.step(&del);
                    }
                    let now = ours.facts();
                    differences = differing(&last, &now, Kind::Left);
                    last = now;
                    // Leftovers of Go would cause differences in all later steps.
                    over = !again;
                }
            }
            (None, None) => {
                compared.done += 1;
                if verb == "ADD" && unready && key_of(step).0 == 0 {
                    differences.push(not_unready());
                }
                if verb != "CHECK" && verb != "STATUS" {
                    let (mut theirs, mut now) = (go.facts(), ours.facts());
                    last.clone_from(&now);
                    if verb == "ADD" {
                        go.result(&by_go, &mut theirs);
                        ours.result(&by_us, &mut now);
                    }
                    differences.extend(differing(&theirs, &now, Kind::Differs));
                    if verb == "GC" || step["netns"].is_string() {
                        // The facts in the containers cannot be compared.
                        differences.retain(|difference| !is_inside(&difference.key));
                    }
                }
            }
            (theirs, own) => {
                let say = |refused: &Option<(String, String)>| match refused {
                    Some((plugin, text)) => format!("refused by {plugin}: {text}"),
                    None => "done".to_owned(),
                };
                // A step that the other side's plugins do names these plugins.
                let (theirs, own) = if step["swap"] == true { (own, theirs) } else { (theirs, own) };
                differences.push(Difference {
                    step: number,
                    verb: verb.to_owned(),
                    kind: Kind::Differs,
                    key: "outcome".to_owned(),
                    expected: Some(say(theirs)),
                    ours: Some(say(own)),
                });
                over = verb != "CHECK" && verb != "STATUS";
                unready |= verb == "STATUS" && by_us.refused.is_some();
            }
        }
        for difference in &mut differences {
            difference.step = number;
            verb.clone_into(&mut difference.verb);
        }
        // A difference that has been reported is not reported again.
        differences.retain(|new| {
            !all.iter().any(|old| {
                old.key == new.key && old.expected == new.expected && old.ours == new.ours && new.key != "outcome"
            })
        });
        all.extend(differences);
        if over {
            break;
        }
    }
    go.node.abandon();
    ours.node.abandon();
    compared.differences = all;
    compared
}

/// Returns the difference of a STATUS that failed although the next ADD succeeded.
fn not_unready() -> Difference {
    let (expected, ours) = (Some("ready".to_owned()), Some("not ready, and ADD works".to_owned()));
    Difference { step: 0, verb: String::new(), kind: Kind::Differs, key: "status".to_owned(), expected, ours }
}

fn is_inside(key: &str) -> bool {
    key.starts_with('c') && key.as_bytes().get(1).is_some_and(u8::is_ascii_digit)
}

fn differing(expected: &Facts, ours: &Facts, kind: Kind) -> Vec<Difference> {
    let keys = expected.keys().chain(ours.keys().filter(|key| !expected.contains_key(*key)));
    let different = keys.filter(|key| expected.get(*key) != ours.get(*key));
    let difference = |key: &String| Difference {
        step: 0,
        verb: String::new(),
        kind,
        key: key.clone(),
        expected: expected.get(key).cloned(),
        ours: ours.get(key).cloned(),
    };
    let mut differences: Vec<Difference> = different.map(difference).collect();
    // A link that only one side has is one difference, not one for all that a link has.
    let names = differences.iter().filter_map(|difference| difference.key.strip_suffix("/ifname"));
    let names: Vec<(String, String)> = names
        .filter_map(|key| key.split_once("/link/").map(|(place, name)| (place.to_owned(), name.to_owned())))
        .collect();
    for (place, name) in names {
        let link = format!("{place}/link/{name}");
        differences.retain(|difference| {
            let rest = difference.key.strip_prefix(place.as_str()).unwrap_or_default();
            let of_link = rest.starts_with(&format!("/link/{name}/")) && !rest.ends_with("/ifname");
            let of_family =
                ["ipv4", "ipv6"].iter().any(|family| rest.starts_with(&format!("/sysctl/net/{family}/conf/{name}/")));
            !(of_link || of_family || rest == format!("/addresses/{name}") && difference.key_is_empty())
        });
        for difference in differences.iter_mut().filter(|difference| difference.key == format!("{link}/ifname")) {
            difference.key.clone_from(&link);
        }
    }
    differences
}

impl Difference {
    /// Whether neither side has a value there.
    fn key_is_empty(&self) -> bool {
        [&self.expected, &self.ours].iter().all(|value| value.as_deref().unwrap_or_default().is_empty())
    }
}

impl Side<'_> {
    /// Adds the result of an ADD to the facts. A MAC is compared with that of its link.
    fn result(&self, did: &Did, facts: &mut Facts) {
        let Some(mut result) = did.result.clone() else { return };
        for interface in result["interfaces"].as_array_mut().into_iter().flatten() {
            let name = interface["name"].as_str().unwrap_or_default();
            // An interface in the container is already named in the facts.
            let inside = interface["sandbox"].as_str().is_some_and(|sandbox| !sandbox.is_empty());
            let read = || std::fs::read_to_string(format!("/sys/class/net/{name}/address")).unwrap_or_default();
            if !inside && interface["mac"].as_str() == Some(self.node.enter(read).trim()) {
                interface["mac"] = Value::from("the link's");
            }
        }
        let mut own = Facts::new();
        flatten(&mut own, "result", &result, &|_| false);
        facts.extend(own.into_iter().map(|(key, value)| (key, self.named(&value))));
    }
}
