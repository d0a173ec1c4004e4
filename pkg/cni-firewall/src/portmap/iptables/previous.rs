//! Records the rules of an attachment before an ADD, and puts them back if the ADD fails.
//!
//! The recorded rules are compared with the present ones, so a recorded rule that another process
//! removed meanwhile is put back too. Rules of other attachments in the same chain are not changed,
//! and the shared chains keep the rules that the ADD wrote.

use super::super::Forwarding;
use super::shape::{self, DNAT, Section};
use super::{IptablesPortMap, delete_section, plan_removal, serves_any};
use crate::iptables::{Chains, Edit, Rule, Variant};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The rules that an attachment had in each family that an ADD has read.
#[derive(Clone, Debug, Default)]
pub struct PreviousRules {
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
    /// Records the attachment's rules in this table, unless those of its family are recorded
    /// already.
    pub(super) fn remember(&mut self, nat: &mut Chains<'_>, variant: Variant, wanted: &Forwarding) -> Result<()> {
        let family = nat.family();
        if self.families.iter().any(|recorded| recorded.family == family) {
            return Ok(());
        }
        let chain = shape::chain(&wanted.attachment);
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

    /// Drops the record of all families but the first `count`, which were changed.
    pub(super) fn truncate(&mut self, count: usize) {
        self.families.truncate(count);
    }
}

/// Whether a section of the container's chain is this attachment's: its marker names the
/// attachment, or it has no marker and all its mappings lead to the container's addresses, like the
/// mappings of an earlier ADD by Go's plugin. True for the empty section of an empty chain.
pub(super) fn is_own(section: &Section, wanted: &Forwarding) -> bool {
    match section.alias() {
        Some(alias) => alias == wanted.attachment.alias(),
        None => section.groups.iter().all(|group| match group.claim {
            Some(claim) => wanted.is_container(claim.container.ip()),
            None => false,
        }),
    }
}

impl IptablesPortMap<'_> {
    /// Puts back the rules that the attachment had before an [`ensure`](IptablesPortMap::ensure),
    /// and removes the rules that `ensure` added. SIGTERM does not interrupt this call, nor later
    /// calls on this object, because SIGTERM may have made the ADD fail.
    ///
    /// # Errors
    /// The first error. The other family is restored anyway.
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
    /// Adds to `edit` the changes from the present rules back to the recorded ones: in the
    /// container's chain, and in the jumps to it. Rules and jumps that other attachments in the
    /// chain need stay.
    fn plan_put_back(&self, nat: &mut Chains<'_>, wanted: &Forwarding, edit: &mut Edit) -> Result<()> {
        let chain = shape::chain(&wanted.attachment);
        if self.rules.is_empty() {
            // The claims of the removed rules are not needed here.
            let _claims = plan_removal(nat, edit, &chain, |section, _| is_own(section, wanted))?;
            return Ok(());
        }
        let sections = shape::sections(nat.rules(&chain)?);
        let (own, others): (Vec<&Section>, Vec<&Section>) =
            sections.iter().partition(|section| is_own(section, wanted));
        let claims_of_others: Vec<_> = others.iter().flat_map(|section| section.claims()).collect();
        if !nat.has_chain(&chain)? {
            edit.create_chain(&chain);
        }
        if !own.iter().flat_map(|section| section.rules()).eq(&self.rules) {
            own.iter().for_each(|section| delete_section(edit, &chain, section, &claims_of_others));
            self.rules.iter().for_each(|rule| edit.put_back(&chain, rule));
        }
        let present_jumps = nat.rules_leading_to(DNAT, &chain)?;
        for jump in &present_jumps {
            if !self.jumps.contains(jump) && !serves_any(jump, &claims_of_others) {
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
