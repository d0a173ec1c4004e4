//! The outcome of a plugin's run, with assertions that print the whole call when they fail.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use serde_json::Value;

use crate::deviation::Deviation;
use crate::schema;

/// The exit status of a plugin and what it wrote.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Its exit status; `None` if a signal ended it.
    pub status: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
    /// Its standard output as one JSON document, if it is one.
    pub json: Option<Value>,
    signal: Option<i32>,
    call: String,
    verb: String,
}

impl Outcome {
    pub(crate) fn new(status: ExitStatus, stdout: String, stderr: String, call: String, verb: String) -> Outcome {
        let json = serde_json::from_str(&stdout).ok();
        Outcome { status: status.code(), signal: status.signal(), stdout, stderr, json, call, verb }
    }

    /// Asserts that a successful result of version 1.x is valid by the schema.
    #[track_caller]
    pub(crate) fn validated(self) -> Outcome {
        let result =
            self.json.as_ref().filter(|json| self.status == Some(0) && json.get("supportedVersions").is_none());
        let version = result.and_then(|json| json["cniVersion"].as_str()).unwrap_or_default();
        if version.starts_with("1.") {
            let errors = schema::result_errors(result.unwrap_or(&Value::Null));
            assert!(errors.is_empty(), "an invalid result of version {version}: {errors:?}\n{}", self.report());
        }
        self
    }

    /// Returns the call, its environment and configuration, and what the plugin returned.
    pub fn report(&self) -> String {
        let end = match (self.status, self.signal) {
            (Some(status), _) => format!("exit status {status}"),
            (None, signal) => format!("signal {signal:?}"),
        };
        format!("--- {}\n{end}\nstdout: {}\nstderr: {}\n---", self.call, self.stdout, self.stderr)
    }

    /// Asserts success and returns what an ADD printed, or `null` for a verb that must not print
    /// anything.
    #[track_caller]
    pub fn success(&self) -> Value {
        assert!(self.status == Some(0), "{} should have succeeded\n{}", self.verb, self.report());
        if matches!(self.verb.as_str(), "DEL" | "CHECK" | "GC" | "STATUS") {
            assert!(self.stdout.is_empty(), "{} must print nothing\n{}", self.verb, self.report());
            return Value::Null;
        }
        match &self.json {
            Some(json) => json.clone(),
            None => panic!("{} should have printed one JSON document\n{}", self.verb, self.report()),
        }
    }

    /// Asserts that it failed with an error object of the specification, and returns that.
    #[track_caller]
    pub fn failure(&self) -> Failure {
        assert!(self.status.is_some_and(|status| status != 0), "{} should have failed\n{}", self.verb, self.report());
        let Some(json) = self.json.as_ref().filter(|json| json.is_object()) else {
            panic!("a failure should print one error object\n{}", self.report());
        };
        let text = |key: &str| json[key].as_str().unwrap_or_default().to_owned();
        let failure = Failure { code: json["code"].as_u64(), msg: text("msg"), details: text("details") };
        assert!(failure.code.is_some() && !failure.msg.is_empty(), "code and msg are missing\n{}", self.report());
        let has_version = json["cniVersion"].is_string() || Deviation::ErrorsWithoutVersion.is_known();
        assert!(has_version, "the error lacks cniVersion\n{}", self.report());
        failure
    }

    /// Asserts that it failed with this code and a message that begins with `beginning`.
    #[track_caller]
    pub fn fails_with(&self, code: u64, beginning: &str) -> Failure {
        let failure = self.failure();
        let is_known_deviation = failure.code == Some(999) && Deviation::Code999.is_known();
        assert!(
            failure.code == Some(code) || is_known_deviation,
            "should have failed with code {code}\n{}",
            self.report()
        );
        assert!(failure.msg.starts_with(beginning), "the message should begin `{beginning}`\n{}", self.report());
        failure
    }

    /// Asserts that it failed with this code, and that the message or the details contain each of
    /// `words`.
    #[track_caller]
    pub fn fails_naming(&self, code: u64, words: &[&str]) -> Failure {
        let failure = self.fails_with(code, "");
        let all = format!("{} {}", failure.msg, failure.details);
        for word in words {
            assert!(all.contains(word), "the error should name `{word}`\n{}", self.report());
        }
        failure
    }
}

/// An error object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Its code.
    pub code: Option<u64>,
    /// Its message.
    pub msg: String,
    /// Its details; empty if absent.
    pub details: String,
}
