//! Collects the changes of a table, and writes them as a text for `iptables-restore`.
//!
//! Every word is quoted or refused, so that no value can end its line and become a command. The
//! conditions that users configure must be matches ([`check_conditions`]): other options could
//! change other rules of the host.

use std::fmt::Write as _;

use super::nft::RulePosition;
use super::rule::{Rule, quote};
use super::{Chain, Table};
use cni_linux::error::{Cause, Error, Result};

/// Changes of one table, which are made in one transaction. Exception: if `iptables-restore` of
/// iptables-nft has to write the additions, the other changes are a second transaction.
#[derive(Clone, Debug, Default)]
pub struct Edit {
    /// The chains that are created.
    pub(crate) chains: Vec<(String, IfExists)>,
    /// The rules that are added to the beginning or the end of a chain.
    pub(crate) rules: Vec<AddedRule>,
    /// Chain name and rule: the rules that are removed because `rules` adds the same rule at the
    /// beginning of the chain.
    pub(crate) old_copies: Vec<(String, Rule)>,
    /// Chain name and rule: all other rules that are removed.
    pub(crate) deleted: Vec<(String, Rule)>,
    /// The chains that are removed: the name of each and, if the chain was read over netlink, its
    /// number in nf_tables.
    pub(crate) deleted_chains: Vec<(String, Option<u64>)>,
}

/// What an edit does if a chain that it creates exists already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IfExists {
    /// The edit fails.
    Fail,
    /// The edit empties the chain.
    Empty,
}

/// A rule that is added to a chain.
#[derive(Clone, Debug)]
pub(crate) struct AddedRule {
    pub(crate) chain: String,
    pub(crate) words: Vec<String>,
    pub(crate) position: RulePosition,
}

impl Edit {
    /// Returns an edit without changes.
    pub fn new() -> Edit {
        Edit::default()
    }

    /// Creates a chain that did not exist when the table was read. If another process has created
    /// the chain since, the edit fails and is planned again, so that the other process's rules are
    /// not lost.
    pub fn create_chain(&mut self, name: &str) {
        self.chains.push((name.to_owned(), IfExists::Fail));
    }

    /// Creates a chain, or empties an existing one.
    pub fn replace_chain(&mut self, name: &str) {
        self.chains.push((name.to_owned(), IfExists::Empty));
    }

    /// Adds a rule at the chain's end. The words are those of the command line, unquoted.
    pub fn append<W: Into<String>>(&mut self, chain: &str, words: impl IntoIterator<Item = W>) {
        self.add_rule(chain, words, RulePosition::Last);
    }

    /// Adds a rule at the chain's beginning, before those that this edit has inserted already.
    pub fn insert<W: Into<String>>(&mut self, chain: &str, words: impl IntoIterator<Item = W>) {
        self.add_rule(chain, words, RulePosition::First);
    }

    /// Adds a rule at the chain's beginning and removes `copies`, the rules with the same words
    /// that were read from this chain. The chain has the rule at every moment.
    pub fn put_first<W: Into<String>>(&mut self, chain: &str, words: impl IntoIterator<Item = W>, copies: &[Rule]) {
        self.insert(chain, words);
        self.old_copies.extend(copies.iter().map(|rule| (chain.to_owned(), rule.clone())));
    }

    /// Adds a rule at the chain's beginning or end.
    pub(crate) fn add_rule<W: Into<String>>(
        &mut self,
        chain: &str,
        words: impl IntoIterator<Item = W>,
        position: RulePosition,
    ) {
        let words = words.into_iter().map(Into::into).collect();
        self.rules.push(AddedRule { chain: chain.to_owned(), words, position });
    }

    /// Removes a rule that was read. If it was removed since, the edit fails and is planned again.
    pub fn delete(&mut self, chain: &str, rule: &Rule) {
        self.deleted.push((chain.to_owned(), rule.clone()));
    }

    /// Removes a chain that was read, with all its rules. The same edit must delete the rules that
    /// jump to the chain.
    pub fn delete_chain(&mut self, name: &str, chain: &Chain) {
        self.deleted_chains.push((name.to_owned(), chain.handle));
    }

    /// Whether the edit has no changes.
    pub fn is_empty(&self) -> bool {
        !self.has_additions() && self.old_copies.is_empty() && self.deleted.is_empty() && self.deleted_chains.is_empty()
    }

    /// Whether the edit creates chains or adds rules: even with iptables-nft, `iptables-restore`
    /// may have to do that.
    pub(crate) fn has_additions(&self) -> bool {
        !self.chains.is_empty() || !self.rules.is_empty()
    }

    /// Returns the part of the edit that creates chains and adds rules.
    pub(crate) fn additions(&self) -> Edit {
        Edit { chains: self.chains.clone(), rules: self.rules.clone(), ..Edit::new() }
    }

    /// Returns all changes as the input of `iptables-restore`: the removal of old copies, the
    /// additions, the other removals. The old copies come first because `-D` removes the first rule
    /// with the given words, which would then be the new copy. Fails for a word that cannot be
    /// quoted and for a rule that is longer than a line can be.
    pub(crate) fn restore_text(&self, table: Table) -> Result<String> {
        let mut text = format!("*{}\n", table.name());
        for (chain, rule) in &self.old_copies {
            push_rule(&mut text, "-D", chain, &rule.words)?;
        }
        for (name, if_exists) in &self.chains {
            let name = quoted(name)?;
            // `-N` fails if the chain exists; a line with `:` creates the chain or empties it. The
            // result is ignored because writing to a String cannot fail.
            let _ = match if_exists {
                IfExists::Fail => writeln!(text, "-N {name}"),
                IfExists::Empty => writeln!(text, ":{name} - [0:0]"),
            };
        }
        for AddedRule { chain, words, position } in &self.rules {
            let command = match position {
                RulePosition::First => "-I",
                RulePosition::Last => "-A",
            };
            push_rule(&mut text, command, chain, words)?;
        }
        for (chain, rule) in &self.deleted {
            push_rule(&mut text, "-D", chain, &rule.words)?;
        }
        // All chains are emptied (`-F`) before any is removed (`-X`), because one may jump to
        // another.
        for command in ["-F", "-X"] {
            for (name, _) in &self.deleted_chains {
                let _ = writeln!(text, "{command} {}", quoted(name)?);
            }
        }
        Ok(text + "COMMIT\n")
    }
}

/// Appends a line to `text`: the command, for example `-A`, then the quoted chain and the quoted
/// words of a rule. Fails for a word that cannot be quoted, and if the line is too long.
fn push_rule(text: &mut String, command: &str, chain: &str, words: &[String]) -> Result<()> {
    // iptables-restore reads lines of at most 10,239 bytes; LINE_MAX stays below that.
    const LINE_MAX: usize = 10_000;
    let start = text.len();
    // Results of `write!` are ignored because writing to a String cannot fail.
    let _ = write!(text, "{command} {}", quoted(chain)?);
    for word in words {
        let _ = write!(text, " {}", quoted(word)?);
    }
    text.push('\n');
    if text.len() - start > LINE_MAX {
        return Err(refused(
            "the rule is longer than 10000 bytes, which is more than a line of iptables-restore can have",
        ));
    }
    Ok(())
}

/// Quotes a word for `iptables-restore`. Fails if that is impossible.
fn quoted(word: &str) -> Result<String> {
    quote(word).ok_or_else(|| refused(&format!("{word:?} contains a control character or is longer than 1023 bytes")))
}

/// Returns the error for a rule that cannot be written for the reason `why`.
fn refused(why: &str) -> Error {
    Error::new("failed to write a rule for iptables", Cause::text(why))
}

/// The long options of `iptables` that are not matches. getopt also accepts abbreviations: `--del`.
const FORBIDDEN_OPTIONS: &str = "append check delete delete-chain exact flush goto help insert ipv4 ipv6 jump \
    line-numbers list list-rules modprobe new-chain noflush numeric policy rename-chain replace set-counters table \
    verbose version wait wait-interval zero";

/// Checks that these words, which a user has configured as conditions, are only matches.
///
/// # Errors
/// The first word that is refused: a word with a control character or more than 1023 bytes,
/// `COMMIT`, or an option of iptables itself, except `-s`, `-d`, `-p`, `-i`, `-o`, `-f`, `-m` and
/// their long forms.
pub fn check_conditions<W: AsRef<str>>(words: &[W]) -> Result<(), String> {
    for word in words.iter().map(AsRef::as_ref) {
        if !is_match_or_value(word) {
            return Err(word.to_owned());
        }
    }
    Ok(())
}

/// The longest name, in bytes, that iptables accepts for a chain.
pub const CHAIN_NAME_MAX: usize = 28;

/// Whether iptables accepts the name for a chain and does not read it as an option, a negation or,
/// in the input of iptables-restore, as `COMMIT`.
pub fn is_chain_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= CHAIN_NAME_MAX
        && !name.starts_with(['-', '!'])
        && !name.contains(char::is_whitespace)
        && is_match_or_value(name)
}

/// Whether this word of a rule can only be a match, an option of a match, or a value. False if the
/// word cannot be quoted.
fn is_match_or_value(word: &str) -> bool {
    if quote(word).is_none() || word.eq_ignore_ascii_case("commit") {
        return false;
    }
    if let Some(long_option) = word.strip_prefix("--") {
        let name = long_option.split_once('=').map_or(long_option, |(name, _)| name);
        // `--set` of the match `recent` and `--pol` of the match `policy` look like abbreviations
        // of `--set-counters` and `--policy`, but getopt prefers an option with exactly this name.
        if ["set", "pol"].contains(&name) {
            return true;
        }
        // `--` alone ends the options, so it is not a match.
        return !name.is_empty() && !FORBIDDEN_OPTIONS.split(' ').any(|option| option.starts_with(name));
    }
    let Some(short_option) = word.strip_prefix('-') else { return true };
    if short_option.starts_with(|char: char| char.is_ascii_digit()) {
        // A negative number is a value. But `-4` and `-6` make iptables skip the line in the other
        // family, and getopt reads `-42` as `-4` and `-2`.
        return !short_option.starts_with(['4', '6']);
    }
    // `-f` has no value, so letters after it would be another option: `-fjACCEPT`.
    if short_option == "f" {
        return true;
    }
    // iptables-restore reads every word that begins with a single `-` and contains a `t` as the
    // option `-t`, the table.
    short_option.starts_with(['s', 'd', 'p', 'i', 'o', 'm']) && !short_option.contains('t')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edit_is_one_text_additions_first() {
        let rule = Rule { words: vec!["-s".into(), "10.0.0.2/32".into()], handle: None, whole: true };
        let mut edit = Edit::new();
        assert!(edit.is_empty());
        edit.delete_chain("CNI-OLD", &Chain { rules: vec![], handle: None });
        edit.delete("POSTROUTING", &rule);
        edit.append("CNI-A", ["-m", "comment", "--comment", "name: \"n\"", "-j", "ACCEPT"]);
        edit.insert("POSTROUTING", ["!", "-d", "224.0.0.0/4"]);
        edit.create_chain("CNI-B");
        edit.replace_chain("CNI-A");
        let expected = "*nat\n\
            -N CNI-B\n\
            :CNI-A - [0:0]\n\
            -A CNI-A -m comment --comment \"name: \\\"n\\\"\" -j ACCEPT\n\
            -I POSTROUTING ! -d 224.0.0.0/4\n\
            -D POSTROUTING -s 10.0.0.2/32\n\
            -F CNI-OLD\n\
            -X CNI-OLD\n\
            COMMIT\n";
        assert_eq!(edit.restore_text(Table::Nat).unwrap(), expected);
    }

    #[test]
    fn a_moved_rule_is_removed_before_it_is_added_again() {
        let words = ["-j".to_owned(), "CNI-A".to_owned()];
        let rule = Rule { words: words.to_vec(), handle: Some(7), whole: true };
        let mut edit = Edit::new();
        edit.put_first("FORWARD", words, &[rule]);
        let all = "*filter\n-D FORWARD -j CNI-A\n-I FORWARD -j CNI-A\nCOMMIT\n";
        assert_eq!(edit.restore_text(Table::Filter).unwrap(), all);
        assert_eq!(edit.additions().restore_text(Table::Filter).unwrap(), "*filter\n-I FORWARD -j CNI-A\nCOMMIT\n");
    }

    #[test]
    fn a_word_with_a_line_break_fails_the_whole_edit() {
        for hostile in ["x\nCOMMIT\n*filter", "x\0", "x\r"] {
            let mut edit = Edit::new();
            edit.append("CNI-A", ["-m", "comment", "--comment", hostile]);
            assert!(edit.restore_text(Table::Nat).is_err(), "{hostile:?}");
            let mut edit = Edit::new();
            edit.create_chain(hostile);
            assert!(edit.restore_text(Table::Nat).is_err(), "{hostile:?}");
        }
    }

    #[test]
    fn matches_are_conditions() {
        for words in [
            &["-s", "10.0.0.0/8", "!", "-d", "10.1.0.0/16", "-i", "eth0"][..],
            &["-m", "owner", "--uid-owner", "1000"],
            &["-m", "recent", "--set", "--name", "x"],
            &["-m", "policy", "--pol", "none", "--dir", "in"],
            &["-m", "statistic", "--mode", "random", "--probability", "-0.5"],
            &["-f", "-s", "10.0.0.1"],
            &["-p", "tcp", "--dport", "80", "-m", "set", "--match-set", "a", "dst"],
        ] {
            assert_eq!(check_conditions(words), Ok(()), "{words:?}");
        }
    }

    #[test]
    fn conditions_may_only_contain_matches() {
        for word in [
            "-j",
            "-jACCEPT",
            "--jump",
            "--jum",
            "--j",
            "--jump=ACCEPT",
            "--zer",
            "--wait-interval",
            "-g",
            "-A",
            "-AINPUT",
            "-fjACCEPT",
            "-fg",
            "-I",
            "-D",
            "-F",
            "-X",
            "-N",
            "-P",
            "-t",
            "-tfilter",
            "-st",
            "--table",
            "--tab=filter",
            "COMMIT",
            "commit",
            "-4",
            "--",
            "-w",
            "-v",
            "a\nb",
            "a\0b",
            "\u{7f}",
            "--modprobe=/bin/sh",
            "-M",
            "-Z",
            "-c",
            "-h",
        ] {
            assert_eq!(check_conditions(&["-m", "x", word]), Err(word.to_owned()));
        }
    }
}
