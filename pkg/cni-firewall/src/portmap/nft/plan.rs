//! Plans the changes of an ADD in one family.

use cni::Cidr;

use super::super::conflict::{ConflictAction, LivenessProbe};
use super::super::identity::HostLink;
use super::super::{ClaimedPort, Forwarding, Holder, Policy, conditions, older_mapping_remark};
use super::shape::{self, CONTAINER_CHAINS, HOSTPORTS, MASQUERADING};
use super::{ConflictSearch, Identity, NftPortMap, ProgramMappings, Stage, State, read_state};
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
    pub(super) stage: Stage<'a>,
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
    /// dead containers' rules, and in [`Stage::WriteRules`] the attachment's own rules. Returns the
    /// living container that has a wanted port, if there is one; then the plan must not be
    /// committed.
    pub(super) fn plan_family(
        &mut self,
        request: &FamilyRequest<'_>,
        probe: &mut LivenessProbe,
        plan: &mut Plan,
    ) -> Result<Option<Holder>> {
        let FamilyRequest { wanted, identity, container, claims, stage, .. } = *request;
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
        }
        let Stage::WriteRules(program_mappings) = stage else { return Ok(None) };
        if wanted.policy == Policy::RefuseIfAlive {
            let mut older_mappings = state.mappings_to_other_addresses(identity, &wanted.addresses());
            older_mappings.retain(|older| claims.iter().any(|claim| claim.overlaps(older)));
            plan.remarks.extend(older_mappings.iter().map(older_mapping_remark));
        }
        let family_mappings = program_mappings.iter().find(|mappings| mappings.family == family);
        plan.add_own_rules(request, &state, conditions.as_deref(), family_mappings);
        Ok(None)
    }
}

impl Plan {
    /// Adds the attachment's own rules of one family: in each chain whose existing rules differ
    /// from the wanted ones, deletes the existing and appends the wanted ones.
    ///
    /// `conditions` are the compiled conditions; `None` if they cannot be compiled. Then the
    /// program `nft` has already written the mappings, which `program_mappings` describes: in their
    /// chain, the older rules are deleted and ownership rules appended, or nothing changes if an
    /// earlier ADD had the program write the same mappings.
    fn add_own_rules(
        &mut self,
        request: &FamilyRequest<'_>,
        state: &State,
        conditions: Option<&[Expr]>,
        program_mappings: Option<&ProgramMappings>,
    ) {
        let FamilyRequest { wanted, identity, container, claims, host_link, .. } = *request;
        let table = shape::table(state.family);
        for chain in CONTAINER_CHAINS {
            let mut existing = identity.own_rules(state.rules_of(chain), &wanted.addresses(), shape::container);
            // The program writes to this chain only.
            let written_by_program = if chain == HOSTPORTS { program_mappings } else { None };
            if let Some(mappings) = written_by_program {
                existing.retain(|listed| !mappings.has_added(listed));
            }
            let new_rules = match (chain, conditions) {
                (HOSTPORTS, Some(conditions)) => {
                    claims.iter().map(|claim| [conditions, &shape::mapping_rule(claim)].concat()).collect()
                }
                (MASQUERADING, _) => shape::masquerade_rules(container.address(), wanted.snat),
                // The program has written the mappings, or the chain is `HOSTIP_HOSTPORTS`, to
                // which only older releases of Go add rules.
                _ => Vec::new(),
            };
            let is_in_place = match written_by_program {
                Some(mappings) => mappings.is_in_place,
                None => existing.iter().map(|listed| &listed.rule.exprs).eq(&new_rules),
            };
            if is_in_place {
                continue;
            }
            for listed in existing {
                self.batch.delete_rule(table, chain, listed.handle);
            }
            for exprs in new_rules {
                self.batch.append_rule(table, chain, &identity.sign(Rule::new(exprs), host_link));
            }
            if let Some(mappings) = written_by_program {
                for rule in mappings.ownership_rules(identity) {
                    self.batch.append_rule(table, chain, &rule);
                }
            }
        }
    }
}
