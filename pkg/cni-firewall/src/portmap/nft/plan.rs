//! Plans the changes of an ADD in one family.

use cni::Cidr;

use super::super::conflict::{ConflictAction, LivenessProbe};
use super::super::identity::HostLink;
use super::super::{ClaimedPort, Forwarding, Holder, Policy, conditions, older_mapping_remark};
use super::shape::{self, CONTAINER_CHAINS, HOSTPORTS, MASQUERADING};
use super::{ConflictSearch, Identity, NftPortMap, State, read_state};
use crate::nft::{Batch, Expr, Rule};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// What an ADD wants in one family.
pub(super) struct FamilyRequest<'a> {
    pub(super) wanted: &'a Forwarding,
    pub(super) identity: &'a Identity,
    /// The container's address.
    pub(super) container: Cidr,
    /// The claims of this address.
    pub(super) claims: &'a [ClaimedPort],
    pub(super) host_link: HostLink,
}

/// The changes of one transaction, in both families.
pub(super) struct Plan {
    pub(super) batch: Batch,
    /// Remarks for the operator.
    pub(super) remarks: Vec<String>,
}

impl NftPortMap {
    /// Adds the changes of one family to the plan: missing shared chains and rules, the removal of
    /// dead containers' rules, and the attachment's own rules. Returns the living container that
    /// has a wanted port, if there is one; then the plan must not be committed.
    pub(super) fn plan_family(
        &mut self,
        request: &FamilyRequest<'_>,
        probe: &mut LivenessProbe,
        plan: &mut Plan,
    ) -> Result<Option<Holder>> {
        let FamilyRequest { wanted, identity, container, claims, .. } = *request;
        let family = Family::of(container.address());
        let table = shape::table(family);
        // `None` if only the program `nft` can write the mappings of this family.
        let conditions = conditions::compile(wanted.conditions(family), family).ok();
        let state = read_state(&mut self.nft, container, wanted, identity, claims, false)?;
        state.add_missing(&mut plan.batch);
        if wanted.policy == Policy::RefuseIfAlive {
            let (conditions, action) = (conditions.as_deref(), ConflictAction::Displace);
            let search = ConflictSearch { identity, container, claims, conditions, action };
            let decision = search.decide(&state, wanted, probe)?;
            if decision.held.is_some() {
                return Ok(decision.held);
            }
            for (chain, handle) in decision.dead_rules {
                plan.batch.delete_rule(table, chain, handle);
            }
            plan.remarks.extend(decision.remarks);
            let mut older_mappings = state.mappings_to_other_addresses(identity, &wanted.addresses());
            older_mappings.retain(|older| claims.iter().any(|claim| claim.overlaps(older)));
            plan.remarks.extend(older_mappings.iter().map(older_mapping_remark));
        }
        plan.add_own_rules(request, &state, conditions.as_deref());
        Ok(None)
    }
}

impl Plan {
    /// Adds the attachment's own rules of one family: in each chain whose existing rules differ
    /// from the wanted ones, deletes the existing and appends the wanted ones.
    ///
    /// `conditions` are the compiled conditions; `None` if they cannot be compiled. Then the
    /// program `nft` writes the mappings afterwards, and the existing ones are deleted.
    fn add_own_rules(&mut self, request: &FamilyRequest<'_>, state: &State, conditions: Option<&[Expr]>) {
        let FamilyRequest { wanted, identity, container, claims, host_link, .. } = *request;
        let table = shape::table(state.family);
        for chain in CONTAINER_CHAINS {
            let existing = identity.own_rules(state.rules_of(chain), &wanted.addresses(), shape::container);
            let new_rules = match (chain, conditions) {
                (HOSTPORTS, Some(conditions)) => {
                    claims.iter().map(|claim| [conditions, &shape::mapping_rule(claim)].concat()).collect()
                }
                (MASQUERADING, _) => shape::masquerade_rules(container.address(), wanted.snat),
                // Only older releases of Go add rules to `HOSTIP_HOSTPORTS`.
                _ => Vec::new(),
            };
            if existing.iter().map(|listed| &listed.rule.exprs).eq(&new_rules) {
                continue;
            }
            for listed in existing {
                self.batch.delete_rule(table, chain, listed.handle);
            }
            for exprs in new_rules {
                self.batch.append_rule(table, chain, &identity.sign(Rule::new(exprs), host_link));
            }
        }
    }
}
