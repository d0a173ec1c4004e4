//! What is known to be different in the plugins under test, everywhere and for all tests, as data.
//!
//! Lines `@<deviation>  <releases>  <reason>` of the file that `CNI_TEST_DIVERGENCES` names; a
//! deviation of one release is excused in all. The other lines of that file are tests that are
//! expected to fail; `scripts/test` reads them. Without the variable nothing is excused.

use std::collections::BTreeSet;
use std::sync::OnceLock;

/// A rule that the plugins under test are known to break all over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deviation {
    /// `@code-999`: errors of a plugin's own carry 999, whatever happened.
    Code999,
    /// `@errors-without-version`: error objects lack `cniVersion`.
    ErrorsWithoutVersion,
}

impl Deviation {
    fn word(self) -> &'static str {
        match self {
            Deviation::Code999 => "@code-999",
            Deviation::ErrorsWithoutVersion => "@errors-without-version",
        }
    }

    /// Whether it is on record for the plugins under test.
    pub fn known(self) -> bool {
        listed().contains(self.word())
    }
}

/// Whether the test of this thread is listed for the release that `scripts/test` always compares
/// with.
pub(crate) fn is_expected_to_fail() -> bool {
    std::thread::current().name().is_some_and(|name| listed().contains(name))
}

fn listed() -> &'static BTreeSet<String> {
    static LISTED: OnceLock<BTreeSet<String>> = OnceLock::new();
    LISTED.get_or_init(read)
}

/// The first words of the file's lines, except tests that fail only with Debian's release.
fn read() -> BTreeSet<String> {
    let Some(path) = std::env::var_os("CNI_TEST_DIVERGENCES") else { return BTreeSet::new() };
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("to read {}: {error}", path.display()));
    let words = text.lines().map(|line| line.split_whitespace().take(2).collect::<Vec<_>>());
    let words = words.filter(|words| words.get(1) != Some(&"1.1.1") || words[0].starts_with('@'));
    let words = words.filter_map(|words| words.first().copied());
    words.map(str::to_owned).collect()
}
