//! The version that a plugin prints without CNI_COMMAND, by the rules of Nomad and nerdctl.

use cni_testkit::Node;
use conformance::PLUGINS;

/// A semantic version without its build metadata: the numbers, and whether it is a pre-release.
#[derive(Debug, PartialEq)]
struct Version {
    numbers: [u64; 3],
    is_pre_release: bool,
}

impl Version {
    /// Parses a semantic version, with or without a leading `v`. `None` if `text` is not one.
    fn parse(text: &str) -> Option<Version> {
        let text = text.strip_prefix('v').unwrap_or(text);
        let (text, metadata) = text.split_once('+').unwrap_or((text, "x"));
        let (core, pre_release) = text.split_once('-').unwrap_or((text, "x"));
        if ![metadata, pre_release].into_iter().all(is_identifiers) {
            return None;
        }
        let numbers: Option<Vec<u64>> = core.split('.').map(|number| number.parse().ok()).collect();
        Some(Version { numbers: numbers?.try_into().ok()?, is_pre_release: text != core })
    }

    /// Whether the version satisfies `>= numbers`, which no pre-release does.
    fn is_at_least(&self, numbers: [u64; 3]) -> bool {
        !self.is_pre_release && self.numbers >= numbers
    }
}

/// Whether `text` is one or more identifiers of a pre-release or of build metadata.
fn is_identifiers(text: &str) -> bool {
    text.split('.').all(|word| !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'))
}

/// What Nomad takes for the version: the first word of stdout and stderr that is one.
fn nomad(output: &str) -> Option<Version> {
    output.split_whitespace().find_map(Version::parse)
}

/// What nerdctl takes for the version: the rest of the line that begins with the plugin's name.
fn nerdctl(output: &str, plugin: &str) -> Option<Version> {
    let begin = format!("CNI {plugin} plugin ");
    output.lines().find_map(|line| line.strip_prefix(&begin)).and_then(Version::parse)
}

#[test]
fn nomad_and_nerdctl_read_the_version_of_each_plugin() {
    let node = Node::new();
    for plugin in PLUGINS.into_iter().chain(["dhcp", "dummy", "tap"]) {
        let outcome = node.plugin(plugin).run();
        let output = format!("{}{}", outcome.stdout, outcome.stderr);
        for version in [nomad(&output), nerdctl(&output, plugin)] {
            // What Nomad and nerdctl require, and what they may require next.
            for wanted in [[0, 4, 0], [1, 1, 0], [1, 3, 0], [1, 7, 1]] {
                assert!(
                    version.as_ref().is_some_and(|version| version.is_at_least(wanted)),
                    "{version:?} does not satisfy >= {wanted:?}: {}",
                    outcome.report()
                );
            }
        }
        assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(0), ""), "{}", outcome.report());
    }
}

#[test]
fn the_rules_of_the_parsers_refuse_what_the_parsers_refuse() {
    let released = "CNI firewall plugin v1.9.1\nCNI protocol versions supported: 0.4.0, 1.0.0, 1.1.0\n";
    assert!(nomad(released).unwrap().is_at_least([1, 9, 1]));
    assert!(nerdctl(released, "firewall").unwrap().is_at_least([1, 9, 1]));
    assert!(!nomad("CNI firewall plugin v1.9.1-rust.0.1.0\n").unwrap().is_at_least([0, 4, 0]));
    let with_commit = "CNI firewall plugin v0.1.0 (commit 15f5291795be)\n";
    assert!(!nomad(with_commit).unwrap().is_at_least([0, 4, 0]));
    assert_eq!(nerdctl(with_commit, "firewall"), None);
    assert_eq!(nerdctl("CNI firewall plugin version unknown\n", "firewall"), None);
    assert_eq!(Version::parse("1.1"), None);
    assert_eq!(Version::parse("v1.9.1+"), None);
}
