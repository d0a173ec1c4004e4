//! What an attachment had before an ADD, and how an ADD that fails puts it back.
//!
//! It is compared with the present rules: those that another process removed meanwhile come back,
//! those of other attachments in the same chain are not changed. The shared chains keep their new
//! rules.

use super::super::Forwarding;
use super::shape::{self, DNAT, Section};
use super::{IptablesPortMap, delete_section, is_needed, plan_removal};
use crate::iptables::{Chains, Edit, Rule, Variant};
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The rules that an attachment had in each family that an ADD has read.
#[derive(Clone, Debug, Default)]
pub struct PreviousRules {
    families: Vec<FamilyRules>,
}

#[derive(Clone, Debug)]
struct FamilyRules {
    family: Family,
    variant: Variant,
    /// In the container's own chain.
    rules: Vec<Rule>,
    /// Every way to that chain.
    jumps: Vec<Rule>,
}

impl PreviousRules {
    /// Remembers the table as it is, unless it is remembered already.
    pub(super) fn remember(&mut self, nat: &mut Chains<'_>, variant: Variant, wanted: &Forwarding) -> Result<()> {
        let family = nat.family();
        if self.families.iter().any(|had| had.family == family) {
            return Ok(());
        }
        let chain = shape::chain(&wanted.attachment);
        let sections = shape::sections(nat.rules(&chain)?);
        let own = sections.iter().filter(|section| is_own(section, wanted));
        let rules: Vec<Rule> = own.flat_map(Section::rules).cloned().collect();
        // Without a rule in it no attachment of this name has had the chain.
        let jumps = if rules.is_empty() { Vec::new() } else { nat.rules_leading_to(DNAT, &chain)? };
        self.families.push(FamilyRules { family, variant, rules, jumps });
        Ok(())
    }

    /// Forgets a family that was not changed.
    pub(super) fn forget(&mut self, family: Family) {
        self.families.retain(|had| had.family != family);
    }

    /// Whether no family was changed.
    pub(super) fn is_empty(&self) -> bool {
        self.families.is_empty()
    }

    /// Forgets all families but the first so many, which alone were changed.
    pub(super) fn keep(&mut self, changed: usize) {
        self.families.truncate(changed);
    }
}

/// Whether a section of the container's chain is this attachment's. Unmarked rules that lead to the
/// container's address are an earlier ADD's, by Go.
pub(super) fn is_own(section: &Section, wanted: &Forwarding) -> bool {
    match section.alias() {
        Some(alias) => alias == wanted.attachment.alias(),
        None => section.groups.iter().all(|g| g.claim.is_some_and(|c| wanted.is_container(c.container.ip()))),
    }
}

impl IptablesPortMap<'_> {
    /// Gives the attachment back what it had before an [`ensure`](IptablesPortMap::ensure), and
    /// takes what that added. SIGTERM, which may be why, does not end it, nor what is done with
    /// this connection after it.
    ///
    /// # Errors
    /// The first; the other family is restored anyway.
    pub fn put_back(&mut self, wanted: &Forwarding, previous: &PreviousRules) -> Result<()> {
        self.iptables.finish_on_sigterm();
        let mut failed = None;
        for had in &previous.families {
            let done = self.iptables.change(had.family, had.variant, |nat| {
                let mut edit = Edit::new();
                had.plan(nat, wanted, &mut edit)?;
                Ok(edit)
            });
            if let Err(error) = done {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

impl FamilyRules {
    fn plan(&self, nat: &mut Chains<'_>, wanted: &Forwarding, edit: &mut Edit) -> Result<()> {
        let chain = shape::chain(&wanted.attachment);
        if self.rules.is_empty() {
            return plan_removal(nat, edit, &chain, |section, _| is_own(section, wanted)).map(drop);
        }
        let sections = shape::sections(nat.rules(&chain)?);
        let (own, others): (Vec<&Section>, Vec<&Section>) =
            sections.iter().partition(|section| is_own(section, wanted));
        let still: Vec<_> = others.iter().flat_map(|section| section.claims()).collect();
        if !nat.has_chain(&chain)? {
            edit.create_chain(&chain);
        }
        if !own.iter().flat_map(|section| section.rules()).eq(&self.rules) {
            own.iter().for_each(|section| delete_section(edit, &chain, section, &still));
            self.rules.iter().for_each(|rule| edit.put_back(&chain, rule));
        }
        let jumps = nat.rules_leading_to(DNAT, &chain)?;
        for jump in jumps.iter().filter(|jump| !self.jumps.contains(jump) && !is_needed(jump, &still)) {
            edit.delete(DNAT, jump);
        }
        self.jumps.iter().filter(|jump| !jumps.contains(jump)).for_each(|jump| edit.put_back(DNAT, jump));
        Ok(())
    }
}
