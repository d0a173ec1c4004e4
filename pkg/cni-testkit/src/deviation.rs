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
        static KNOWN: OnceLock<BTreeSet<String>> = OnceLock::new();
        KNOWN.get_or_init(read).contains(self.word())
    }
}

fn read() -> BTreeSet<String> {
    let Some(path) = std::env::var_os("CNI_TEST_DIVERGENCES") else { return BTreeSet::new() };
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("to read {}: {error}", path.display()));
    let words = text.lines().filter_map(|line| line.split_whitespace().next());
    words.filter(|word| word.starts_with('@')).map(str::to_owned).collect()
}
