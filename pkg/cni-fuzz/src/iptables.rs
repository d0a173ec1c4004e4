//! The text for `iptables-restore`, and users' conditions in it. This module has its own reader,
//! which finds in the text exactly the requested commands with the same words. The plugins read a
//! rule's line of `iptables-save` as the words that they wrote. An accepted condition contains no
//! command, target or table of iptables or nft.
//!
//! The input: commands, separated by 0x02. A command is one character and the name of a chain,
//! followed by words, each after a 0x01. `N` creates the chain, `:` replaces it, `A` appends, `I`
//! inserts and `D` deletes a rule with the words. After `?` and `!` there is no chain, only words,
//! which are conditions. Any other character deletes the chain.

use cni_firewall::fuzzing;
use cni_firewall::iptables::{Chain, Edit, check_conditions};
use cni_firewall::portmap::conditions::compile;
use cni_linux::Family;
use plugin_portmap::fuzzing::{accepts_for_nft, nft_keywords_refused};

/// A command with its arguments, as `iptables-restore` would read them from a line.
type Words = Vec<String>;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    // The output of iptables-save may be anything, but must not make a plugin panic.
    for (name, chain) in fuzzing::saved_chains(&text) {
        assert!(!name.contains('\n'), "newline in the chain name {name:?}");
        for rule in &chain.rules {
            let is_word = rule.target().is_none_or(|target| rule.words().iter().any(|word| word == target));
            assert!(is_word, "the target {:?} is not a word of {:?}", rule.target(), rule.words());
        }
    }
    let (edit, expected) = build_edit(&text);
    let Ok(restore) = fuzzing::restore_text(&edit) else {
        assert!(!expected.iter().all(is_writable), "refused, although all lines are writable: {expected:?}");
        return;
    };
    let mut lines = restore.lines();
    assert_eq!(lines.next(), Some("*nat"), "the first line");
    assert_eq!(lines.next_back(), Some("COMMIT"), "the last line");
    let lines: Vec<Words> = lines.map(read_line).collect();
    assert_eq!(lines, expected, "the lines between the first and the last");
    // A line that adds a rule is also a line of a listing by iptables-save. Lines with a quoted
    // chain are skipped, because a listing never quotes a chain's name.
    for line in restore.lines().filter(|line| line.starts_with("-A ") && !line.starts_with("-A \"")) {
        let words = read_line(line);
        let [_, chain, rule @ ..] = words.as_slice() else { panic!("{line:?} has no chain") };
        let saved = fuzzing::saved_chains(line);
        let [(saved_name, saved_chain)] = saved.as_slice() else {
            panic!("not one chain was read from {line:?}: {saved:?}")
        };
        assert_eq!((saved_name, saved_chain.rules[0].words()), (chain, rule), "read from {line:?}");
    }
}

/// Whether the writer must accept a line: only long words, long lines and control characters may be
/// refused.
fn is_writable(line: &Words) -> bool {
    let is_short = line.iter().map(|word| 2 * word.len() + 3).sum::<usize>() < 9_000;
    is_short && line.iter().all(|word| word.len() < 1024 && !word.chars().any(char::is_control))
}

/// Returns the edit that the input's commands request, and the lines that the edit's text must
/// have: the created chains, the added rules, the deleted rules, and for the deleted chains first
/// every `-F`, then every `-X`. Also checks the input's conditions.
fn build_edit(text: &str) -> (Edit, Vec<Words>) {
    let mut edit = Edit::new();
    let (mut created, mut added, mut deleted, mut flushed, mut removed) = (vec![], vec![], vec![], vec![], vec![]);
    for line in text.split('\x02').take(32) {
        let Some((command, rest)) = line.split_at_checked(1) else { continue };
        let mut words: Words = rest.split('\x01').map(str::to_owned).collect();
        if matches!(command, "?" | "!") {
            check_accepted_conditions(&words);
            continue;
        }
        let chain = words.remove(0);
        let rule_line = |command: &str| [vec![command.to_owned(), chain.clone()], words.clone()].concat();
        match command {
            "N" => {
                edit.create_chain(&chain);
                created.push(vec!["-N".to_owned(), chain]);
            }
            ":" => {
                edit.replace_chain(&chain);
                created.push(vec![":".to_owned(), chain]);
            }
            "A" => {
                added.push(rule_line("-A"));
                edit.append(&chain, words);
            }
            "I" => {
                added.push(rule_line("-I"));
                edit.insert(&chain, words);
            }
            "D" => {
                deleted.push(rule_line("-D"));
                edit.delete(&chain, &fuzzing::rule(words));
            }
            _ => {
                edit.delete_chain(&chain, &Chain::default());
                flushed.push(vec!["-F".to_owned(), chain.clone()]);
                removed.push(vec!["-X".to_owned(), chain]);
            }
        }
    }
    (edit, [created, added, deleted, flushed, removed].concat())
}

/// Reads a line as iptables-restore does: `:CHAIN POLICY COUNTERS`, or words that are separated by
/// blanks and may be quoted.
fn read_line(line: &str) -> Words {
    assert!(line.len() < 10_240 && !line.contains(['\n', '\r', '\0']), "iptables-restore cannot read {line:?}");
    if let Some(chain) = line.strip_prefix(':') {
        let Some(chain) = chain.strip_suffix(" - [0:0]") else { panic!("policy or counters in {line:?}") };
        return vec![":".to_owned(), words(chain).remove(0)];
    }
    words(line)
}

/// Splits a line at blanks outside quotes, and removes the quotes.
fn words(line: &str) -> Words {
    let (mut words, mut rest) = (Vec::new(), line.trim_start_matches([' ', '\t']));
    while !rest.is_empty() {
        let mut word = String::new();
        let mut quoted = false;
        let mut end = rest.len();
        let mut chars = rest.char_indices();
        while let Some((at, char)) = chars.next() {
            match char {
                '\\' if quoted => word.extend(chars.next().map(|(_, char)| char)),
                '"' => quoted = !quoted,
                ' ' | '\t' if !quoted => {
                    end = at;
                    break;
                }
                char => word.push(char),
            }
        }
        assert!(!quoted, "a quote is not closed in {line:?}");
        words.push(word);
        rest = rest[end..].trim_start_matches([' ', '\t']);
    }
    words
}

/// Checks that an accepted condition contains no command, target or table.
fn check_accepted_conditions(words: &[String]) {
    for family in [Family::V4, Family::V6] {
        // May refuse the words, but must not panic.
        let _ = compile(words, family);
    }
    if check_conditions(words).is_ok() {
        let offender = words.iter().find(|word| is_command_of_iptables(word));
        assert_eq!(offender, None, "accepted for iptables: {words:?}");
    }
    if accepts_for_nft(words) {
        let text = words.join(" ");
        let tokens = [Colons::Separate, Colons::InAddresses].into_iter().flat_map(|colons| nft_tokens(&text, colons));
        let offender = tokens.into_iter().find(|token| nft_keywords_refused().any(|keyword| keyword == token));
        assert_eq!(offender, None, "accepted for nft: {text:?}");
    }
}

/// Whether iptables would read the word as a command, a target or a table. As getopt allows, a long
/// option may be abbreviated, and several short options may share one word.
fn is_command_of_iptables(word: &str) -> bool {
    let Some(options) = word.strip_prefix('-').filter(|rest| !rest.is_empty()) else {
        // The word is not an option. A line `COMMIT` ends a table of iptables-restore.
        return word == "COMMIT";
    };
    if let Some(long) = options.strip_prefix('-') {
        const COMMANDS: [&str; 11] =
            ["jump", "goto", "table", "append", "delete", "insert", "flush", "policy", "modprobe", "zero", "new-chain"];
        let name = long.split('=').next().unwrap_or_default();
        // `--pol` is an option of the match `policy`.
        return name != "pol" && COMMANDS.iter().any(|command| command.starts_with(name));
    }
    for option in options.chars() {
        match option {
            // These options have a value, which is the rest of the word.
            's' | 'd' | 'p' | 'i' | 'o' | 'm' => return false,
            // A negative number, which is a value. Of the digits, only 4 and 6 are options.
            '0'..='3' | '5' | '7'..='9' => return false,
            // These options have no value, so the next character is an option too.
            'f' | 'b' | 'v' | 'n' | 'x' => {}
            _ => return true,
        }
    }
    false
}

/// How [`nft_tokens`] splits hexadecimal digits with two or more colons. Unlike nft, that function
/// does not parse addresses, so both ways are checked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Colons {
    /// Each colon is a token of its own.
    Separate,
    /// The digits and colons are one token: an IPv6 or hardware address.
    InAddresses,
}

/// Splits a text into tokens as nft's scanner does: words that begin with a letter and consist of
/// letters, digits and `_/.-`, strings, numbers (`7`, `0x1e`), times (`1h5ms`) and addresses, each
/// as long as possible. Every other character is a token.
fn nft_tokens(text: &str, colons: Colons) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let prefix_len = |is_part: fn(char) -> bool| rest.find(|char| !is_part(char)).unwrap_or(rest.len());
        let address_len = prefix_len(|char| char.is_ascii_hexdigit() || char == ':');
        let end = if first == '"' {
            let close = rest[1..].find('"').map(|at| at + 2);
            assert!(close.is_some(), "a string is not closed in {text:?}");
            close.unwrap_or(rest.len())
        } else if colons == Colons::InAddresses && rest[..address_len].matches(':').count() > 1 {
            address_len
        } else if first.is_ascii_alphabetic() {
            prefix_len(|char| char.is_ascii_alphanumeric() || "_/.-".contains(char))
        } else {
            number_len(rest).max(first.len_utf8())
        };
        tokens.push(rest[..end].to_owned());
        rest = &rest[end..];
    }
    tokens
}

/// Returns the length of the number or time at the beginning of the text, in bytes; 0 if there is
/// none.
fn number_len(text: &str) -> usize {
    let count_from = |start: usize, is_digit: fn(&u8) -> bool| text.bytes().skip(start).take_while(is_digit).count();
    let mut end = count_from(0, u8::is_ascii_digit);
    if text.starts_with("0x") || text.starts_with("0X") {
        let hexadecimal = count_from(2, u8::is_ascii_hexdigit);
        return if hexadecimal > 0 { 2 + hexadecimal } else { end };
    }
    while end > 0 {
        let Some(unit) = ["ms", "d", "h", "m", "s"].into_iter().find(|unit| text[end..].starts_with(unit)) else {
            break;
        };
        end += unit.len();
        end += count_from(end, u8::is_ascii_digit);
    }
    end
}
