//! For pkg/cni-fuzz alone: writers and readers of the firewall's bytes and texts.

use cni_linux::{Result, route};

use crate::iptables::{self, Chain, Edit, Rule};
use crate::nft::{self, Batch, Family, Listed, Table};

/// A rule as its own netlink message, header included.
///
/// # Errors
/// What cannot be written down.
pub fn rule_message(table: &str, chain: &str, rule: &nft::Rule) -> Result<Vec<u8>> {
    let mut batch = Batch::new();
    batch.append_rule(Table { family: Family::Inet, name: table }, chain, rule);
    let mut bytes = Vec::new();
    batch.into_changes()?.iter().for_each(|change| change.write(0, &mut bytes));
    Ok(bytes)
}

/// The bytes of userdata; `None` if they are too many.
pub fn userdata(comment: Option<&str>, tags: &[(u8, Vec<u8>)]) -> Option<Vec<u8>> {
    nft::userdata::encode(comment, tags)
}

/// A comment and all other entries of userdata.
pub fn read_userdata(bytes: &[u8]) -> (Option<String>, Vec<(u8, Vec<u8>)>) {
    nft::userdata::decode(bytes)
}

/// A rule of nf_tables in the words of iptables.
pub fn words_of(family: route::Family, listed: Listed) -> Rule {
    iptables::rule_in_words(family, listed)
}

/// A rule of these words.
pub fn rule(words: Vec<String>) -> Rule {
    Rule { words, handle: None, whole: true, raw: None }
}

/// The text that an edit gives to `iptables-restore`.
///
/// # Errors
/// What cannot be written down.
pub fn restore_text(edit: &Edit) -> Result<String> {
    edit.restore_text(iptables::Table::Nat)
}

/// The chains in what `iptables-save` wrote.
pub fn saved_chains(text: &str) -> Vec<(String, Chain)> {
    iptables::parse(text).into_iter().filter_map(|(name, chain)| Some((name, chain?))).collect()
}
