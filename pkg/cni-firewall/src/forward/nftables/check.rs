//! Compares the rules and set elements of an attachment with those that an ADD would write.

use cni_linux::error::Result;

use super::{
    Accepted, CNI_FORWARD, OWN_CHAIN_HOOK, by_entry_chain, elements, find_accepted, isolation_rules, leads_to_forward,
};
use crate::forward::entry_chain::EntryChain;
use crate::forward::owner::OwnedAddress;
use crate::nft::Nft;

/// Returns a sentence for each missing element or rule of `addresses`; empty if none is missing.
pub(in crate::forward) fn check(
    nft: &mut Nft,
    addresses: &[OwnedAddress],
    admin_chain: Option<&EntryChain>,
) -> Result<Vec<String>> {
    let own_chain = EntryChain::own();
    let mut missing = Vec::new();
    for (entry_chain, group) in by_entry_chain(addresses, admin_chain, &own_chain) {
        let table = entry_chain.table();
        let required = Accepted::required_by(group.iter().copied());
        if find_accepted(nft, entry_chain)?.is_none_or(|accepted| accepted < required) {
            missing.push(format!("nft chain {table} {CNI_FORWARD} is missing or has other rules than it should"));
            continue;
        }
        let is_hooked_in = match nft.find_chain(table, &entry_chain.chain)? {
            // How the administrator's chain is reached is not checked.
            Some(chain) => !entry_chain.is_in_own_table() || chain.base == Some(OWN_CHAIN_HOOK),
            None => false,
        };
        if !is_hooked_in || !leads_to_forward(nft, entry_chain)? {
            missing.push(format!("nft chain {table} {} does not lead to {CNI_FORWARD}", entry_chain.chain));
        }
        for owned in group {
            for (set, address) in elements(owned) {
                if !nft.has_element(table, set, address)? {
                    missing.push(format!("nft set {table} {set} lacks {address}"));
                }
            }
            for (chain, exprs) in isolation_rules(&owned.ingress)? {
                if nft.rules(table, chain)?.iter().any(|listed| listed.rule.exprs == exprs) {
                    continue;
                }
                // Only a policy with a bridge has isolation rules.
                let bridge = owned.ingress.bridge().unwrap_or_default();
                let policy = owned.ingress.name();
                let sentence =
                    format!("nft chain {table} {chain} lacks the rule of bridge {bridge} for ingressPolicy {policy}");
                if !missing.contains(&sentence) {
                    missing.push(sentence);
                }
            }
        }
    }
    Ok(missing)
}
