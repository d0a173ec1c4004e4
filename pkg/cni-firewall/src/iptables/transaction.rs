//! What an [`Edit`] adds to a table of iptables-nft, as a transaction of nf_tables, without a
//! program.
//!
//! `None` always means that `iptables-restore` has to do it: for rules in words that
//! [`super::encode()`] does not know, for a table that was made with `nft`, and in a 32-bit
//! program, whose structures may have another size than the kernel's.

use super::edit::{ChainCreation, Edit};
use super::{Table, encode, xt};
use crate::nft::{BaseChain, Batch, Chain, Extension, Hook, Kind, Nft};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The base chains that iptables makes in a table, in its order.
fn built_in(table: Table) -> &'static [(&'static str, BaseChain)] {
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

/// Whether rules can be written without a program.
pub(super) fn is_possible(nft: &mut Nft, table: Table, family: Family) -> Result<bool> {
    if cfg!(target_pointer_width = "32") {
        return Ok(false);
    }
    let masquerade = if family == Family::V4 { xt::MASQUERADE_V4 } else { xt::MASQUERADE_V6 };
    let family = table.of(family).family;
    let mut has = |extension: xt::Extension, kind| nft.has_extension(family, extension.name, extension.revision, kind);
    Ok(has(xt::COMMENT, Extension::Match)? && (table != Table::Nat || has(masquerade, Extension::Target)?))
}

/// The changes that make the edit's chains and rules, and the table and base chains as iptables
/// makes them where they are missing.
pub(super) fn additions(nft: &mut Nft, table: Table, family: Family, edit: &Edit) -> Result<Option<Batch>> {
    let rules = edit.rules.iter().map(|added| encode::rule(family, &added.words)).collect::<Option<Vec<_>>>();
    let Some(rules) = rules.filter(|_| cfg!(target_pointer_width = "64")) else { return Ok(None) };
    let mut batch = Batch::new();
    let in_nft = table.of(family);
    let mut chains = None;
    for (name, base) in built_in(table) {
        // Existing chains are not named again: the kernel would delay the closing of the socket for
        // them.
        if edit.rules.iter().all(|added| added.chain != *name) || nft.find_chain(in_nft, name)?.is_some() {
            continue;
        }
        if chains.is_none() {
            chains = Some(nft.chains(in_nft)?);
        }
        let chains = chains.as_deref().unwrap_or_default();
        let is_foreign = |chain: &Chain| chain.base.is_some_and(|base| !built_in(table).contains(&(&chain.name, base)));
        if chains.iter().any(is_foreign) {
            return Ok(None);
        }
        if chains.is_empty() {
            batch.ensure_table(in_nft, None);
        }
        batch.ensure_base_chain(in_nft, name, *base, None);
    }
    for (name, new) in &edit.chains {
        match new {
            ChainCreation::Replaced if nft.find_chain(in_nft, name)?.is_some() => batch.flush_chain(in_nft, name),
            ChainCreation::Created | ChainCreation::Replaced => batch.create_chain(in_nft, name, None),
        }
    }
    for (added, rule) in edit.rules.iter().zip(&rules) {
        batch.add_xtables_rule((in_nft, &added.chain), &rule.exprs, rule.protocol, added.place);
    }
    Ok(Some(batch))
}
