//! Records the rules of an attachment before an ADD, and puts them back if the ADD fails.
//!
//! A recorded rule that another process removed meanwhile is put back too. Rules of other
//! attachments in the same chain are not changed. The ADD's shared rules stay.

use super::super::Forwarding;
use super::shape::{self, DNAT, Section};
use super::{IptablesPortMap, can_match_any, delete_section, plan_removal};
use crate::iptables::{Chains, Edit, Rule, Variant};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The rules that an attachment had before an ADD.
#[derive(Clone, Debug, Default)]
pub struct PreviousRules {
    /// The families that the ADD has read, in the order of reading.
    families: Vec<FamilyRules>,
}

/// The rules that an attachment had in one family.
#[derive(Clone, Debug)]
struct FamilyRules {
    family: Family,
    variant: Variant,
    /// The attachment's rules in the container's chain.
    rules: Vec<Rule>,
    /// All rules of [`DNAT`] that jump to that chain; empty if `rules` is empty.
    jumps: Vec<Rule>,
}

impl PreviousRules {
    /// Records the attachment's rules in this table, unless rules of the table's family are
    /// recorded already: a family is read again after a failed attempt, which may have changed it.
    pub(super) fn remember(&mut self, nat: &mut Chains<'_>, variant: Variant, wanted: &Forwarding) -> Result<()> {
        let family = nat.family();
        if self.families.iter().any(|recorded| recorded.family == family) {
            return Ok(());
        }
        let chain = shape::chain_name(&wanted.attachment);
        let sections = shape::sections(nat.rules(&chain)?);
        let own = sections.iter().filter(|section| is_own(section, wanted));
        let rules: Vec<Rule> = own.flat_map(Section::rules).cloned().collect();
        // If the attachment has no rule in the chain, the jumps belong to other attachments.
        let jumps = if rules.is_empty() { Vec::new() } else { nat.rules_leading_to(DNAT, &chain)? };
        self.families.push(FamilyRules { family, variant, rules, jumps });
        Ok(())
    }

    /// Drops the record of a family that was not changed.
    pub(super) fn forget(&mut self, family: Family) {
        self.families.retain(|recorded| recorded.family != family);
    }

    /// Whether no family is recorded.
    pub(super) fn is_empty(&self) -> bool {
        self.families.is_empty()
    }

    /// Keeps only the records of the first `count` families: those that were changed.
    pub(super) fn keep_first(&mut self, count: usize) {
        self.families.truncate(count);
    }
}

/// Whether a section of the container's chain belongs to this attachment: its marker names the
/// attachment, or it has no marker (Go's plugin made it) and all its mappings lead to the
/// container's addresses. True for the empty section of an empty chain, so that undoing an ADD also
/// removes an empty chain.
pub(super) fn is_own(section: &Section, wanted: &Forwarding) -> bool {
    match section.alias() {
        Some(alias) => alias == wanted.attachment.alias(),
        None => section
            .mappings
            .iter()
            .all(|mapping| mapping.claim.is_some_and(|claim| wanted.is_container(claim.container.ip()))),
    }
}

impl IptablesPortMap<'_> {
    /// Puts back the rules that the attachment had before an [`ensure`](IptablesPortMap::ensure),
    /// and removes the attachment's rules that `ensure` added. SIGTERM, which may have made the ADD
    /// fail, does not interrupt this call or later calls on this object.
    ///
    /// # Errors
    /// The first error. An error in one family does not stop the other.
    pub fn put_back(&mut self, wanted: &Forwarding, previous: &PreviousRules) -> Result<()> {
        self.iptables.finish_on_sigterm();
        let mut first_error = None;
        for recorded in &previous.families {
            let result = self.iptables.change(recorded.family, recorded.variant, |nat| {
                let mut edit = Edit::new();
                recorded.plan_put_back(nat, wanted, &mut edit)?;
                Ok(edit)
            });
            if let Err(error) = result {
                first_error.get_or_insert(error);
            }
        }
        match first_error {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl FamilyRules {
    /// Adds to `edit` the changes that restore the recorded rules: those in the container's chain
    /// and the jumps to it. Rules and jumps that other attachments in the chain need stay.
    fn plan_put_back(&self, nat: &mut Chains<'_>, wanted: &Forwarding, edit: &mut Edit) -> Result<()> {
        let chain = shape::chain_name(&wanted.attachment);
        // The attachment had no rules, so all of its present ones were added by `ensure`.
        if self.rules.is_empty() {
            let _claims_of_removed = plan_removal(nat, edit, &chain, |section, _| is_own(section, wanted))?;
            return Ok(());
        }
        let sections = shape::sections(nat.rules(&chain)?);
        let (own, others): (Vec<&Section>, Vec<&Section>) =
            sections.iter().partition(|section| is_own(section, wanted));
        let claims_of_others: Vec<_> = others.iter().flat_map(|section| section.claims()).collect();
        if !nat.has_chain(&chain)? {
            edit.create_chain(&chain);
        }
        let own_rules = own.iter().flat_map(|section| section.rules());
        if !own_rules.eq(&self.rules) {
            for section in own {
                delete_section(edit, &chain, section, &claims_of_others);
            }
            for rule in &self.rules {
                edit.put_back(&chain, rule);
            }
        }
        let present_jumps = nat.rules_leading_to(DNAT, &chain)?;
        for jump in &present_jumps {
            if !self.jumps.contains(jump) && !can_match_any(jump, &claims_of_others) {
                edit.delete(DNAT, jump);
            }
        }
        for jump in &self.jumps {
            if !present_jumps.contains(jump) {
                edit.put_back(DNAT, jump);
            }
        }
        Ok(())
    }
}
