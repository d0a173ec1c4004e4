//! What is to be changed in a table, and its text for `iptables-restore`.
//!
//! Every word is quoted or refused here, so that no value can end its line and become a command of
//! its own. What users may write themselves ([`check_conditions`]) is refused wherever it could be
//! more than a match.

use std::fmt::Write as _;

use super::nft::RulePosition;
use super::rule::{Rule, quote};
use super::{Chain, Table};
use cni_linux::error::{Cause, Error, Result};

/// Changes that belong together. They are one transaction; only where the program of iptables-nft
/// has to write the rules, what is removed or put back is another one, after it.
#[derive(Clone, Debug, Default)]
pub struct Edit {
    pub(crate) chains: Vec<(String, ChainCreation)>,
    pub(crate) rules: Vec<Added>,
    /// The rules that are removed because the same rule is added elsewhere in its chain.
    pub(crate) moved: Vec<(String, Rule)>,
    pub(crate) put_back: Vec<(String, Rule)>,
    pub(crate) deleted: Vec<(String, Rule)>,
    pub(crate) deleted_chains: Vec<(String, Option<u64>)>,
}

/// How a chain comes to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChainCreation {
    /// It must not be there.
    Created,
    /// If it is there it is emptied.
    Replaced,
}

#[derive(Clone, Debug)]
pub(crate) struct Added {
    pub(crate) chain: String,
    pub(crate) words: Vec<String>,
    pub(crate) place: RulePosition,
}

impl Edit {
    /// No changes.
    pub fn new() -> Edit {
        Edit::default()
    }

    /// Makes a chain that was seen missing. If another process has made it meanwhile, nothing of
    /// the edit is done and it is planned again. For chains that are shared.
    pub fn create_chain(&mut self, name: &str) {
        self.chains.push((name.to_owned(), ChainCreation::Created));
    }

    /// Makes a chain, or empties it. For chains of one container.
    pub fn replace_chain(&mut self, name: &str) {
        self.chains.push((name.to_owned(), ChainCreation::Replaced));
    }

    /// Puts a rule at the chain's end. The words are those of the command line, unquoted.
    pub fn append<W: Into<String>>(&mut self, chain: &str, words: impl IntoIterator<Item = W>) {
        self.add(chain, words, RulePosition::Last);
    }

    /// Puts a rule at the chain's beginning; of several the last one is the first then.
    pub fn insert<W: Into<String>>(&mut self, chain: &str, words: impl IntoIterator<Item = W>) {
        self.add(chain, words, RulePosition::First);
    }

    /// Puts a rule at the chain's beginning and removes the same rule, read as `before`, from where
    /// else it is. At no time is the chain without it.
    pub fn move_first<W: Into<String>>(&mut self, chain: &str, words: impl IntoIterator<Item = W>, before: &[Rule]) {
        self.insert(chain, words);
        self.moved.extend(before.iter().map(|rule| (chain.to_owned(), rule.clone())));
    }

    fn add<W: Into<String>>(&mut self, chain: &str, words: impl IntoIterator<Item = W>, place: RulePosition) {
        let words = words.into_iter().map(Into::into).collect();
        self.rules.push(Added { chain: chain.to_owned(), words, place });
    }

    /// Removes a rule that was read. If it has gone meanwhile, all is planned again.
    pub fn delete(&mut self, chain: &str, rule: &Rule) {
        self.deleted.push((chain.to_owned(), rule.clone()));
    }

    /// Puts a rule that was read, and has been removed since, at the chain's end, with all there
    /// was in it.
    pub fn put_back(&mut self, chain: &str, rule: &Rule) {
        self.put_back.push((chain.to_owned(), rule.clone()));
    }

    /// Removes a chain that was read, with all its rules. What leads there must be deleted in the
    /// same edit.
    pub fn delete_chain(&mut self, name: &str, chain: &Chain) {
        self.deleted_chains.push((name.to_owned(), chain.handle));
    }

    /// Takes over all changes of another edit, after its own.
    pub fn extend(&mut self, other: Edit) {
        self.chains.extend(other.chains);
        self.rules.extend(other.rules);
        self.moved.extend(other.moved);
        self.put_back.extend(other.put_back);
        self.deleted.extend(other.deleted);
        self.deleted_chains.extend(other.deleted_chains);
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        !self.has_additions()
            && self.moved.is_empty()
            && self.put_back.is_empty()
            && self.deleted.is_empty()
            && self.deleted_chains.is_empty()
    }

    pub(crate) fn has_additions(&self) -> bool {
        !self.chains.is_empty() || !self.rules.is_empty()
    }

    /// The additions in the form that `iptables-restore` reads.
    pub(crate) fn additions_text(&self, table: Table) -> Result<String> {
        self.additions_after(format!("*{}\n", table.name()))
    }

    fn additions_after(&self, mut text: String) -> Result<String> {
        for (name, new) in &self.chains {
            let name = word(name)?;
            // Writing to a String cannot fail.
            let _ = match new {
                ChainCreation::Created => writeln!(text, "-N {name}"),
                ChainCreation::Replaced => writeln!(text, ":{name} - [0:0]"),
            };
        }
        for Added { chain, words, place } in &self.rules {
            let command = match place {
                RulePosition::First => "-I",
                RulePosition::Last => "-A",
            };
            line(&mut text, command, chain, words)?;
        }
        Ok(text)
    }

    /// Everything in one text: what is added, then what is removed. A rule that is moved is removed
    /// first: `-D` takes the first rule that looks like it, which would be the new one.
    pub(crate) fn restore_text(&self, table: Table) -> Result<String> {
        let mut text = format!("*{}\n", table.name());
        for (chain, rule) in &self.moved {
            line(&mut text, "-D", chain, &rule.words)?;
        }
        let mut text = self.additions_after(text)?;
        for (chain, rule) in &self.put_back {
            line(&mut text, "-A", chain, &rule.words)?;
        }
        for (chain, rule) in &self.deleted {
            line(&mut text, "-D", chain, &rule.words)?;
        }
        for command in ["-F", "-X"] {
            for (name, _) in &self.deleted_chains {
                let _ = writeln!(text, "{command} {}", word(name)?);
            }
        }
        Ok(text + "COMMIT\n")
    }
}

fn line(text: &mut String, command: &str, chain: &str, words: &[String]) -> Result<()> {
    // iptables-restore reads lines of at most 10,239 bytes.
    const LINE_MAX: usize = 10_000;
    let start = text.len();
    let _ = write!(text, "{command} {}", word(chain)?);
    for one in words {
        let _ = write!(text, " {}", word(one)?);
    }
    text.push('\n');
    if text.len() - start > LINE_MAX {
        return Err(refused("the rule is longer than iptables-restore reads"));
    }
    Ok(())
}

fn word(word: &str) -> Result<String> {
    quote(word).ok_or_else(|| refused(&format!("{word:?} contains a control character or is too long")))
}

fn refused(why: &str) -> Error {
    Error::new("failed to write a rule for iptables", Cause::text(why))
}

/// Options of `iptables` itself; anything that begins one of them is taken for it.
const FORBIDDEN: [&str; 29] = [
    "append",
    "check",
    "delete",
    "delete-chain",
    "exact",
    "flush",
    "goto",
    "help",
    "insert",
    "ipv4",
    "ipv6",
    "jump",
    "line-numbers",
    "list",
    "list-rules",
    "modprobe",
    "new-chain",
    "noflush",
    "numeric",
    "policy",
    "rename-chain",
    "replace",
    "set-counters",
    "table",
    "verbose",
    "version",
    "wait",
    "wait-interval",
    "zero",
];

/// Whether these words of a user's can be nothing but matches.
///
/// # Errors
/// The first word that can be more: a control character, `COMMIT`, an option of iptables' own but
/// `-s`, `-d`, `-p`, `-i`, `-o`, `-f` and `-m`.
pub fn check_conditions<W: AsRef<str>>(words: &[W]) -> Result<(), String> {
    words.iter().map(AsRef::as_ref).find(|word| is_more_than_a_match(word)).map_or(Ok(()), |word| Err(word.to_owned()))
}

fn is_more_than_a_match(word: &str) -> bool {
    if quote(word).is_none() || word.eq_ignore_ascii_case("commit") {
        return true;
    }
    if let Some(long) = word.strip_prefix("--") {
        let name = long.split_once('=').map_or(long, |(name, _)| name);
        // These are the matches' `recent` and `policy` own, and getopt prefers what is written out.
        return name.is_empty()
            || (!["set", "pol"].contains(&name) && FORBIDDEN.iter().any(|option| option.starts_with(name)));
    }
    match word.strip_prefix('-') {
        // A number; but `-4` and `-6` make iptables leave the line out.
        Some(short) if short.starts_with(|char: char| char.is_ascii_digit()) => short.starts_with(['4', '6']),
        // This one has no value, so what follows it in its word is the next option: `-fjACCEPT`.
        Some("f") => false,
        // iptables-restore takes a short option with a `t` in it for `-t`, whatever it is.
        Some(short) => !short.starts_with(['s', 'd', 'p', 'i', 'o', 'm']) || short.contains('t'),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edit_is_one_text_additions_first() {
        let rule = Rule { words: vec!["-s".into(), "10.0.0.2/32".into()], handle: None, whole: true, raw: None };
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
        let rule = Rule { words: words.to_vec(), handle: Some(7), whole: true, raw: None };
        let mut edit = Edit::new();
        edit.move_first("FORWARD", words, &[rule]);
        let all = "*filter\n-D FORWARD -j CNI-A\n-I FORWARD -j CNI-A\nCOMMIT\n";
        assert_eq!(edit.restore_text(Table::Filter).unwrap(), all);
        assert_eq!(edit.additions_text(Table::Filter).unwrap(), "*filter\n-I FORWARD -j CNI-A\n");
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
