//! Looks for tables of iptables-legacy, and reads the output of its save program.

use std::collections::BTreeMap;

use super::{Chain, Rule, Table, split};
use cni_linux::error::{Error, Result};
use cni_linux::route::Family;

/// Whether iptables-legacy has this table in the network namespace of the calling thread, which may
/// differ from the process's.
pub(super) fn legacy_table_exists(table: Table, family: Family) -> Result<bool> {
    use std::io::ErrorKind::{NotFound, PermissionDenied};
    let path = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    match std::fs::read_to_string(path) {
        Ok(names) => Ok(names.lines().any(|name| name == table.name())),
        // A kernel without iptables-legacy does not have the file. A process that is not allowed to
        // read the file cannot change the tables either.
        Err(error) if [NotFound, PermissionDenied].contains(&error.kind()) => Ok(false),
        Err(error) => Err(Error::new(format_args!("failed to read {path}"), error)),
    }
}

/// Returns the chains by name from the output of `iptables-save -t TABLE`. Each value is `Some`, as
/// [`Chains`](super::Chains) needs it: there `None` is a chain that is known not to exist.
pub(crate) fn parse(saved: &str) -> BTreeMap<String, Option<Chain>> {
    let mut chains: BTreeMap<String, Option<Chain>> = BTreeMap::new();
    let empty = || Some(Chain::default());
    for line in saved.lines() {
        if let Some(declaration) = line.strip_prefix(':') {
            let name = declaration.split(' ').next().unwrap_or_default();
            chains.entry(name.to_owned()).or_insert_with(empty);
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let mut words = split(rule);
            if words.is_empty() {
                continue;
            }
            let chain_name = words.remove(0);
            if let Some(chain) = chains.entry(chain_name).or_insert_with(empty) {
                chain.rules.push(Rule { words, handle: None, whole: true });
            }
        }
    }
    chains
}
