//! Plans the changes of an ADD in one family.

use cni::Cidr;

use super::super::conflict::LivenessProbe;
use super::super::identity::LinkMark;
use super::super::{ClaimedPort, Forwarding, Holder, Policy, conditions, older_mapping_remark};
use super::shape::{self, HOSTPORTS, MASQUERADING};
use super::{ConflictSearch, Identity, NftPortMap, PreviousRules, ProgramMappings, Stage, State};
use crate::nft::{Batch, Expr, Rule};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// What an ADD wants in one family.
pub(super) struct FamilyRequest<'a> {
    pub(super) wanted: &'a Forwarding,
    pub(super) identity: &'a Identity,
    pub(super) container: Cidr,
    pub(super) claims: &'a [ClaimedPort],
    pub(super) stage: Stage<'a>,
    pub(super) host_link: LinkMark,
}

/// The changes of one transaction, in both families.
pub(super) struct Plan {
    pub(super) batch: Batch,
    /// The rules that the attachment has before the transaction.
    pub(super) previous: PreviousRules,
    /// Remarks for the operator.
    pub(super) remarks: Vec<String>,
}

impl NftPortMap {
    /// Adds the changes of one family to the plan: missing shared chains and rules, the removal of
    /// dead containers' rules, and in [`Stage::Whole`] the attachment's own rules. Returns the
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
        // `None`: the program `nft` writes the mappings of this family.
        let conditions = conditions::compile(wanted.conditions(family), family).ok();
        let state = self.read_state(container, wanted, identity, claims)?;
        state.add_missing(&mut plan.batch);
        if wanted.policy == Policy::RefuseIfAlive {
            let search = ConflictSearch { identity, container, claims, conditions: conditions.as_deref() };
            let decision = search.decide(&state, wanted, probe)?;
            if decision.held.is_some() {
                return Ok(decision.held);
            }
            decision.dead_rules.iter().for_each(|(chain, handle)| plan.batch.delete_rule(table, chain, *handle));
            plan.remarks.extend(decision.remarks);
        }
        let Stage::Whole(by_program) = stage else { return Ok(None) };
        if wanted.policy == Policy::RefuseIfAlive {
            for older in state.mappings_to_other_addresses(identity, &wanted.addresses()) {
                if claims.iter().any(|claim| claim.overlaps(&older)) {
                    plan.remarks.push(older_mapping_remark(&older));
                }
            }
        }
        let by_program = by_program.iter().find(|mappings| mappings.family == family);
        plan.add_own_rules(request, &state, conditions.as_deref(), by_program);
        Ok(None)
    }
}

impl Plan {
    /// Adds the attachment's own rules of one family, chain by chain: if the existing ones differ,
    /// they are deleted and the new ones appended.
    ///
    /// `conditions` are the compiled conditions; `None` if the program `nft` writes the mappings,
    /// as `by_program` describes. Then, in the chain of the mappings, the rules from before the
    /// program ran are deleted and ownership rules are appended; or nothing changes, because the
    /// program did not need to run.
    ///
    /// A chain that does not exist is not in `state`; its new rules are appended.
    fn add_own_rules(
        &mut self,
        request: &FamilyRequest<'_>,
        state: &State,
        conditions: Option<&[Expr]>,
        by_program: Option<&ProgramMappings>,
    ) {
        let FamilyRequest { wanted, identity, container, claims, host_link, .. } = *request;
        let table = shape::table(state.family);
        let mut mapping_rules = Vec::new();
        if let Some(conditions) = conditions {
            mapping_rules.extend(claims.iter().map(|claim| [conditions, &shape::mapping_rule(claim)].concat()));
        }
        // The rules to append, by chain.
        let mut new_rules: Vec<(&str, Vec<Vec<Expr>>)> =
            vec![(HOSTPORTS, mapping_rules), (MASQUERADING, shape::masquerade_rules(container.address(), wanted.snat))];
        for (chain, rules) in &state.rules {
            let mut own = identity.own_rules(rules, &wanted.addresses(), shape::container);
            // The program writes to this chain only.
            let added_here = if *chain == HOSTPORTS { by_program } else { None };
            if let Some(mappings) = added_here {
                own.retain(|listed| !mappings.has_added(listed));
            }
            self.previous.record(state.family, chain, &own);
            if added_here.is_some_and(ProgramMappings::is_in_place) {
                continue;
            }
            let chain_rules = new_rules.iter().find(|(name, _)| name == chain);
            let wanted_exprs = chain_rules.map_or(&[][..], |(_, exprs)| exprs);
            if own.iter().map(|listed| &listed.rule.exprs).eq(wanted_exprs) {
                // All rules of the chain are in place.
                new_rules.retain(|(name, _)| name != chain);
                continue;
            }
            for listed in own {
                self.batch.delete_rule(table, chain, listed.handle);
            }
        }
        for (chain, rules) in new_rules {
            for exprs in rules {
                self.batch.append_rule(table, chain, &identity.sign(Rule::new(exprs), host_link));
            }
        }
        if let Some(mappings) = by_program {
            for rule in mappings.ownership_rules(identity) {
                self.batch.append_rule(table, HOSTPORTS, &rule);
            }
        }
    }
}
