//! Reads in which ways the plugins under test are known to differ in all tests, as Go's plugins do.
//!
//! The file that `CNI_TEST_DIVERGENCES` names has a line `@<deviation>  <reason>` for each, in
//! groups of releases. A deviation of one release is accepted in all. The other lines of the file
//! name tests that are expected to fail; `scripts/test` reads those. Without the variable no
//! difference is accepted.

use std::collections::BTreeSet;
use std::sync::OnceLock;

/// A rule that the plugins under test are known to break in all tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deviation {
    /// `@code-999`: all errors that a plugin itself finds have the code 999.
    Code999,
    /// `@errors-without-version`: error objects lack `cniVersion`.
    ErrorsWithoutVersion,
}

impl Deviation {
    /// Returns its name in the file.
    fn word(self) -> &'static str {
        match self {
            Deviation::Code999 => "@code-999",
            Deviation::ErrorsWithoutVersion => "@errors-without-version",
        }
    }

    /// Whether it is accepted for the plugins under test.
    pub fn is_known(self) -> bool {
        listed().contains(self.word())
    }
}

/// Whether the file lists the test of this thread as expected to fail, with the release of Go's
/// plugins that `scripts/test` always compares with.
pub(crate) fn is_expected_to_fail() -> bool {
    std::thread::current().name().is_some_and(|name| listed().contains(name))
}

/// Returns the names of all deviations and tests in the file.
fn listed() -> &'static BTreeSet<String> {
    static LISTED: OnceLock<BTreeSet<String>> = OnceLock::new();
    LISTED.get_or_init(read)
}

/// Reads the first words of the file's lines, without tests that fail only with release 1.1.1,
/// which is Debian's.
fn read() -> BTreeSet<String> {
    let Some(path) = std::env::var_os("CNI_TEST_DIVERGENCES") else { return BTreeSet::new() };
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("to read {}: {error}", path.display()));
    let mut releases = "";
    let mut names = BTreeSet::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("##") => releases = words.next().unwrap_or_default(),
            Some(name) if releases != "1.1.1" || name.starts_with('@') => {
                names.insert(name.to_owned());
            }
            _ => {}
        }
    }
    names
}
