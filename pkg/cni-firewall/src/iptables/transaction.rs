//! Turns the additions of an [`Edit`] into a transaction of nf_tables, without a program.

use super::chains::keys_in;
use super::edit::{Edit, IfExists};
use super::{Table, encode, xt};
use crate::nft::{BaseChain, Batch, Chain, Extension, Hook, Kind, Nft};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// Returns the names and properties of the base chains that iptables creates in a table.
fn built_in_chains(table: Table) -> &'static [(&'static str, BaseChain)] {
    const NAT: [(&str, BaseChain); 4] = [
        ("PREROUTING", BaseChain { kind: Kind::Nat, hook: Hook::Prerouting, priority: -100 }),
        ("INPUT", BaseChain { kind: Kind::Nat, hook: Hook::Input, priority: 100 }),
        ("OUTPUT", BaseChain { kind: Kind::Nat, hook: Hook::Output, priority: -100 }),
        ("POSTROUTING", BaseChain { kind: Kind::Nat, hook: Hook::Postrouting, priority: 100 }),
    ];
    const FILTER: [(&str, BaseChain); 3] = [
        ("INPUT", BaseChain { kind: Kind::Filter, hook: Hook::Input, priority: 0 }),
        ("FORWARD", BaseChain { kind: Kind::Filter, hook: Hook::Forward, priority: 0 }),
        ("OUTPUT", BaseChain { kind: Kind::Filter, hook: Hook::Output, priority: 0 }),
    ];
    match table {
        Table::Nat => &NAT,
        Table::Filter => &FILTER,
    }
}

/// Whether rules can be written over netlink: this process must be a 64-bit one, and the kernel
/// must have the xtables match `comment` and, for the table nat, the target `MASQUERADE`.
pub(super) fn can_write_rules(nft: &mut Nft, table: Table, family: Family) -> Result<bool> {
    // A 32-bit process cannot know the sizes of the structures in a 64-bit kernel.
    if cfg!(target_pointer_width = "32") {
        return Ok(false);
    }
    let masquerade = if family == Family::V4 { xt::MASQUERADE_V4 } else { xt::MASQUERADE_V6 };
    let family = table.in_nf_tables(family).family;
    let mut kernel_has =
        |extension: xt::Extension, kind| nft.has_extension(family, extension.name, extension.revision, kind);
    if !kernel_has(xt::COMMENT, Extension::Match)? {
        return Ok(false);
    }
    Ok(table != Table::Nat || kernel_has(masquerade, Extension::Target)?)
}

/// Returns a transaction that creates the edit's chains and rules and, if they are missing, the
/// table and the base chains to which the rules are added. `None` if `iptables-restore` has to do
/// that: in a 32-bit process, for words that [`encode`] does not know, and if a base chain is
/// missing in a table that was made with `nft`.
pub(super) fn additions(nft: &mut Nft, table: Table, family: Family, edit: &Edit) -> Result<Option<Batch>> {
    if cfg!(target_pointer_width = "32") {
        return Ok(None);
    }
    let encoded: Option<Vec<_>> = edit.rules.iter().map(|added| encode::rule(family, &added.words)).collect();
    let Some(encoded) = encoded else { return Ok(None) };
    let mut batch = Batch::new();
    if !add_missing_base_chains(nft, table, family, edit, &mut batch)? {
        return Ok(None);
    }
    let nft_table = table.in_nf_tables(family);
    for (name, if_exists) in &edit.chains {
        if *if_exists == IfExists::Empty && nft.find_chain(nft_table, name)?.is_some() {
            batch.flush_chain(nft_table, name);
        } else {
            batch.create_chain(nft_table, name);
        }
    }
    for (added, rule) in edit.rules.iter().zip(&encoded) {
        batch.add_xtables_rule((nft_table, &added.chain), &rule.exprs, rule.protocol, added.position);
    }
    Ok(Some(batch))
}

/// Adds to `batch` the creation of the base chains to which the edit adds rules, and of the table,
/// if they are missing. Returns `false` if a base chain is missing in a table that was made with
/// `nft`: then `iptables-restore` has to make all additions.
fn add_missing_base_chains(
    nft: &mut Nft,
    table: Table,
    family: Family,
    edit: &Edit,
    batch: &mut Batch,
) -> Result<bool> {
    let nft_table = table.in_nf_tables(family);
    let mut missing = Vec::new();
    for (name, base) in built_in_chains(table) {
        // A base chain that exists must not be in the transaction: closing the socket would then
        // wait for an RCU grace period.
        let is_used = edit.rules.iter().any(|added| added.chain == *name);
        if !is_used {
            continue;
        }
        match nft.find_chain(nft_table, name)? {
            Some(chain) => nft.use_index(nft_table, &chain, keys_in(family))?,
            None => missing.push((name, *base)),
        }
    }
    if missing.is_empty() {
        return Ok(true);
    }
    let existing_chains = nft.chains(nft_table)?;
    // A base chain that iptables would not create shows that the table was made with `nft`.
    let is_made_with_nft =
        |chain: &Chain| chain.base.is_some_and(|base| !built_in_chains(table).contains(&(&chain.name, base)));
    if existing_chains.iter().any(is_made_with_nft) {
        return Ok(false);
    }
    // A table without chains may be missing. If the table exists, `ensure_table` has no effect.
    if existing_chains.is_empty() {
        batch.ensure_table(nft_table, None);
    }
    for (name, base) in missing {
        batch.ensure_base_chain(nft_table, name, base);
    }
    Ok(true)
}
