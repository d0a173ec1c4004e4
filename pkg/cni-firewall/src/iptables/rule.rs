//! Represents a rule as the words that `iptables -S` prints after `-A CHAIN`, and quotes words.
//!
//! A rule read over netlink has the same words as one that a program printed, but only for the
//! parts that plugins write. If the rule has other parts, [`Rule::is_whole`] is false. The comment,
//! and any target that is a chain, are among the words even then.

/// A rule in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub(crate) words: Vec<String>,
    /// The rule's number in nf_tables; `None` for a rule that a program printed.
    pub(crate) handle: Option<u64>,
    /// Whether the words describe the whole rule.
    pub(crate) whole: bool,
}

impl Rule {
    /// Returns the rule as `-S` prints it: `-s 10.1.2.3/32 -m comment --comment COMMENT -j CHAIN`,
    /// one word each, unquoted.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// Whether the words describe all that the rule does.
    pub fn is_whole(&self) -> bool {
        self.whole
    }

    /// Returns the word after this option; `None` if the rule does not have the option, or has it
    /// negated (`! -s`).
    pub fn value(&self, option: &str) -> Option<&str> {
        let position = self.words.iter().position(|word| word == option)?;
        if position > 0 && self.words[position - 1] == "!" {
            return None;
        }
        self.words.get(position + 1).map(String::as_str)
    }

    /// Returns the chain or target of `-j` or `-g`; `None` if the rule has neither option.
    pub fn target(&self) -> Option<&str> {
        self.value("-j").or_else(|| self.value("-g"))
    }

    /// Returns the rule's comment, if it has one.
    pub fn comment(&self) -> Option<&str> {
        self.value("--comment")
    }

    /// Whether the rule consists of exactly these words.
    pub fn matches<W: AsRef<str>>(&self, words: &[W]) -> bool {
        self.whole && self.words.iter().map(String::as_str).eq(words.iter().map(AsRef::as_ref))
    }
}

/// Splits a line that `iptables-save` or `iptables -S` printed into words, and removes the quotes.
pub fn split(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    // The word that has begun; empty text for a word that is only quotes so far.
    let mut word: Option<String> = None;
    let (mut quoted, mut chars) = (false, line.chars());
    while let Some(char) = chars.next() {
        match char {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '\\' if quoted => word.get_or_insert_default().extend(chars.next()),
            ' ' | '\t' if !quoted => words.extend(word.take()),
            char => word.get_or_insert_default().push(char),
        }
    }
    words.extend(word);
    words
}

/// Quotes a word so that `iptables-restore` reads it as one word. `None` if that is impossible: the
/// word has control characters, or more than 1023 bytes.
pub fn quote(word: &str) -> Option<String> {
    const WORD_MAX: usize = 1023;
    if word.len() > WORD_MAX || word.chars().any(char::is_control) {
        return None;
    }
    let needs_no_quotes = |char: char| char.is_ascii_alphanumeric() || "-_./:,=+@%!".contains(char);
    if !word.is_empty() && word.chars().all(needs_no_quotes) {
        return Some(word.to_owned());
    }
    let escaped = word.replace('\\', "\\\\").replace('"', "\\\"");
    Some(format!("\"{escaped}\""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rule(line: &str) -> Rule {
        Rule { words: split(line), handle: None, whole: true }
    }

    #[test]
    fn a_line_of_iptables_is_read_as_its_words() {
        let words = split(r#"-s 10.88.0.2/32 -m comment --comment "name: \"my\\net\" id: \"ctr1\"" -j CNI-1"#);
        assert_eq!(
            words,
            ["-s", "10.88.0.2/32", "-m", "comment", "--comment", r#"name: "my\net" id: "ctr1""#, "-j", "CNI-1"]
        );
        assert_eq!(split(r#"--comment "" -j X"#), ["--comment", "", "-j", "X"]);
    }

    #[test]
    fn a_negated_option_has_no_value() {
        let rule = rule(r#"! -d 224.0.0.0/4 -s 10.0.0.0/8 -m comment --comment c -g CNI-X"#);
        assert_eq!((rule.value("-d"), rule.value("-s")), (None, Some("10.0.0.0/8")));
        assert_eq!((rule.comment(), rule.target()), (Some("c"), Some("CNI-X")));
        assert!(!rule.matches(&["-s", "10.0.0.0/8"]));
    }

    #[test]
    fn a_partially_read_rule_is_not_equal_to_its_words() {
        let rule = rule("-s 10.0.0.0/8 -j CNI-X");
        assert!(rule.matches(rule.words()) && !Rule { whole: false, ..rule.clone() }.matches(rule.words()));
    }

    #[test]
    fn what_would_end_a_line_is_refused() {
        for word in ["a\nCOMMIT", "a\0", "a\rb", "\u{1b}", "\u{85}", &"x".repeat(2000)] {
            assert_eq!(quote(word), None, "{word:?}");
        }
        // iptables-restore refuses a word of 1024 bytes ("Parameter too long!").
        assert_eq!((quote(&"x".repeat(1024)), quote(&"x".repeat(1023)).is_some()), (None, true));
        assert_eq!(quote("").as_deref(), Some("\"\""));
        assert_eq!(quote("10.0.0.0/8").as_deref(), Some("10.0.0.0/8"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_words_survive_quoting(words in proptest::collection::vec("\\PC{0,20}", 0..6)) {
            let quoted: Option<Vec<String>> = words.iter().map(|word| quote(word)).collect();
            if let Some(quoted) = quoted {
                prop_assert!(!quoted.iter().any(|word| word.contains('\n')));
                prop_assert_eq!(split(&quoted.join(" ")), words);
            }
        }
    }
}
