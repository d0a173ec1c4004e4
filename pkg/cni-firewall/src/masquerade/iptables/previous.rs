//! Remembers the masqueraded addresses that an attachment had before an ADD, for the undo.

use cni::{AttachmentId, Cidr};
use cni_linux::error::Result;

use super::{POSTROUTING, RuleNames, Tag, ensure_beside, purge, source};
use crate::iptables::{Chains, Edit};

/// The masqueraded addresses that an attachment had in one family before an ADD.
#[derive(Clone, Debug, Default)]
pub(in crate::masquerade) struct PreviousAddresses {
    /// The addresses in the attachment's tags, with the prefix lengths of their networks.
    tagged: Vec<Cidr>,
    /// The sources of untagged jumps that cover an address of the ADD.
    untagged: Vec<Cidr>,
}

impl PreviousAddresses {
    /// Reads the addresses in the attachment's tags, and the sources of untagged jumps that cover
    /// one of `addresses`, those of the ADD.
    pub(in crate::masquerade) fn read(
        nat: &mut Chains<'_>,
        attachment: &AttachmentId,
        addresses: &[Cidr],
    ) -> Result<PreviousAddresses> {
        let names = RuleNames::new(attachment);
        let Some(chain) = nat.chain(&names.chain)?.cloned() else { return Ok(PreviousAddresses::default()) };
        let tags: Vec<Tag> = chain.rules.iter().filter_map(Tag::read).collect();
        let mut previous = PreviousAddresses::default();
        for tag in tags.iter().filter(|tag| tag.alias == names.alias) {
            if let (Some(source), Some(network)) = (tag.source, tag.network) {
                previous.tagged.extend(Cidr::new(source.address(), network.prefix()));
            }
        }
        for jump in nat.rules_leading_to(POSTROUTING, &names.chain)?.iter().filter(|rule| names.is_jump(rule)) {
            let Some(source) = source(jump) else { continue };
            let is_tagged = tags.iter().any(|tag| tag.source == Some(source));
            if !is_tagged && addresses.iter().any(|address| source.contains(address.address())) {
                previous.untagged.push(source);
            }
        }
        Ok(previous)
    }

    /// Returns the edit that undoes an [`ensure`] of `addresses`, after which the previous
    /// addresses are masqueraded again.
    pub(in crate::masquerade) fn put_back(
        &self,
        nat: &mut Chains<'_>,
        attachment: &AttachmentId,
        addresses: &[Cidr],
    ) -> Result<Edit> {
        // This also removes the rules of the addresses that the ADD has added.
        if !self.tagged.is_empty() {
            return ensure_beside(nat, attachment, &self.tagged, &self.untagged);
        }
        // The attachment had no rules before the ADD.
        if self.untagged.is_empty() {
            return purge(nat, attachment, &addresses.iter().map(Cidr::address).collect::<Vec<_>>());
        }
        // Go's rules already masqueraded an address of the ADD, and stay. Only the tags and jumps
        // that the ADD has added are removed.
        let names = RuleNames::new(attachment);
        let mut edit = Edit::new();
        for rule in nat.rules(&names.chain)? {
            if Tag::read(rule).is_some_and(|tag| tag.alias == names.alias) {
                edit.delete(&names.chain, rule);
            }
        }
        for jump in nat.rules_leading_to(POSTROUTING, &names.chain)?.iter().filter(|rule| names.is_jump(rule)) {
            let Some(source) = source(jump) else { continue };
            let was_added = addresses.iter().any(|address| source == Cidr::host(address.address()));
            if was_added && !self.untagged.contains(&source) {
                edit.delete(POSTROUTING, jump);
            }
        }
        Ok(edit)
    }
}
