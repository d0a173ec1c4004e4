//! Gives pkg/cni-fuzz access to the private encoders and decoders of rules.

use cni_linux::{Result, route};

use crate::iptables::{self, Chain, Edit, Rule};
use crate::nft::{self, Batch, Family, Listed, Table};

/// Returns the netlink message, with its header, that adds a rule.
///
/// # Errors
/// The comment and the tags together are longer than the kernel stores.
pub fn rule_message(table: &str, chain: &str, rule: &nft::Rule) -> Result<Vec<u8>> {
    let mut batch = Batch::new();
    batch.append_rule(Table { family: Family::Inet, name: table }, chain, rule);
    let mut bytes = Vec::new();
    batch.into_changes()?.iter().for_each(|change| change.write(0, &mut bytes));
    Ok(bytes)
}

/// Encodes the userdata of a rule, its comment and tags; `None` if they are too long.
pub fn userdata(comment: Option<&str>, tags: &[(u8, Vec<u8>)]) -> Option<Vec<u8>> {
    nft::userdata::encode(comment, tags)
}

/// Decodes the userdata of a rule: the comment and the tags.
pub fn read_userdata(bytes: &[u8]) -> (Option<String>, Vec<(u8, Vec<u8>)>) {
    nft::userdata::decode(bytes)
}

/// Returns a rule of nf_tables in the words of iptables.
pub fn words_of(family: route::Family, listed: Listed) -> Rule {
    iptables::rule_in_words(family, &listed)
}

/// Returns a rule of iptables with these words, as if a program had listed the rule.
pub fn rule(words: Vec<String>) -> Rule {
    Rule { words, handle: None, whole: true }
}

/// Returns the text for `iptables-restore` that makes the changes of an edit.
///
/// # Errors
/// A word cannot be quoted.
pub fn restore_text(edit: &Edit) -> Result<String> {
    edit.restore_text(iptables::Table::Nat)
}

/// Returns the chains in the output of `iptables-save`.
pub fn saved_chains(text: &str) -> Vec<(String, Chain)> {
    iptables::parse(text).into_iter().filter_map(|(name, chain)| Some((name, chain?))).collect()
}
