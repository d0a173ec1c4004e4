//! Lists the rules that CNI plugins have for containers of all networks, for `cnitool`.
//!
//! No plugin uses this module: plugins search for one attachment's rules and never read the rest.
//! Many rules contain only a hash of the attachment. So [`RuleOwner::matches`] computes what the
//! rule of a given attachment contains and compares; the names in [`RuleOwner`] are for people.
//!
//! The *alias* of an attachment is `cni:NETWORK/CONTAINER/IFNAME`.

use std::collections::BTreeMap;

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::forward;
use super::forward::owner::Record;
use super::forward::records::RecordChain;
use super::iptables::{self, Chains, FAMILIES, Iptables, Rule, Variant, variant_prefix, words};
use super::masquerade::{iptables as masquerade_iptables, nftables as masquerade_nft};
use super::nft::{self, Listed, Nft, Retries, Table};
use super::owner::OwnerTag;
use super::portmap::iptables::shape as portmap_iptables;
use super::portmap::nft::identity;
use super::portmap::nft::shape as portmap_nft;
use super::spoof;
use cni::AttachmentId;
use cni::attachment::Marked;
use cni_linux::error::Result;
use cni_linux::route::Family;

/// The purpose of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// Packets that leave the network get the host's address as their source.
    Masquerade,
    /// A port of the host leads into the container.
    PortMap,
    /// Frames with forged sources are dropped.
    SpoofCheck,
    /// Packets from and to the container pass the node's filter.
    Forward,
    /// Connections of the container to denied destinations are dropped.
    Egress,
}

impl Purpose {
    /// Returns the word for the purpose.
    pub fn as_str(self) -> &'static str {
        match self {
            Purpose::Masquerade => "masquerade",
            Purpose::PortMap => "portmap",
            Purpose::SpoofCheck => "macspoofchk",
            Purpose::Forward => "firewall",
            Purpose::Egress => "egress",
        }
    }
}

/// An entry of the list: one rule of a container. For the plugin firewall, an entry stands for all
/// rules of an address.
#[derive(Clone, Debug)]
pub struct ContainerRule {
    /// The purpose of the rule.
    pub purpose: Purpose,
    /// Where the rule is: the table and mostly the chain (`nft ip cni_hostport hostports`,
    /// `iptables-legacy -t nat POSTROUTING`), or `firewalld`.
    pub place: String,
    /// The attachment that the rule belongs to.
    pub owner: RuleOwner,
    /// A description of the rule.
    pub text: String,
    /// A command that removes this rule and nothing else. `None` for rules of iptables and of the
    /// plugin firewall.
    pub removal: Option<String>,
}

/// The attachment that a rule belongs to, as far as the rule names it.
#[derive(Clone, Debug)]
pub struct RuleOwner {
    /// The network's name.
    pub network: Option<String>,
    /// The container's ID, or the beginning of a long one.
    pub container: Option<String>,
    /// The interface's name in the container.
    pub ifname: Option<String>,
    /// The name of the owner in the rule, and the function that returns the name of an attachment
    /// in the same form.
    name: (String, fn(&AttachmentId) -> String),
}

impl RuleOwner {
    /// Whether the rule belongs to `attachment`, or may belong to it: some rules contain neither
    /// the network nor the interface.
    pub fn matches(&self, attachment: &AttachmentId) -> bool {
        let (name, name_of) = &self.name;
        *name == name_of(attachment)
    }

    /// Returns the owner that `alias` names; if it is not an alias, the owner with these names of
    /// network, container and interface. `name` is as in the field.
    fn new(
        alias: Option<&str>,
        [network, container, ifname]: [Option<&str>; 3],
        name: (String, fn(&AttachmentId) -> String),
    ) -> RuleOwner {
        let (network, container, ifname) = match alias.and_then(AttachmentId::parse) {
            Some(Marked { network, container_id, ifname }) => (Some(network), container_id, Some(ifname)),
            None => (network.map(str::to_owned), container.map(str::to_owned), ifname.map(str::to_owned)),
        };
        RuleOwner { network, container, ifname, name }
    }

    /// Returns the owner that a record of the plugin firewall names.
    fn of_record(owned: &forward::owner::OwnedAddress) -> RuleOwner {
        RuleOwner::new(Some(&owned.owner), [None; 3], (owned.owner.clone(), forward::owner::name))
    }
}

/// Returns every rule that plugins have for containers in the calling thread's network namespace,
/// ordered by purpose. `notes` receives a line for each table of iptables-legacy that cannot be
/// read.
///
/// # Errors
/// The tables of nf_tables or of iptables-nft cannot be read.
pub fn list_container_rules(machine: &dyn Machine, notes: &Notes) -> Result<Vec<ContainerRule>> {
    let mut rules = list_nft(&mut Nft::open()?)?;
    let chains_in_nat = [masquerade_iptables::POSTROUTING, portmap_iptables::DNAT];
    rules.extend(list_table(iptables::Table::Nat, &chains_in_nat, machine, notes, list_nat)?);
    rules.extend(list_table(iptables::Table::Filter, &[forward::iptables::OWNERS], machine, notes, list_filter)?);
    rules.sort_by_key(|rule| rule.purpose);
    Ok(rules)
}

/// Returns the entries that `list` finds in an iptables table, in each family and variant in which
/// the table may have one of `searched_chains`. `list` gets the chains and the [`variant_prefix`].
/// A failure for iptables-legacy only becomes a note.
fn list_table(
    table: iptables::Table,
    searched_chains: &[&str],
    machine: &dyn Machine,
    notes: &Notes,
    list: fn(&mut Chains<'_>, &str) -> Result<Vec<ContainerRule>>,
) -> Result<Vec<ContainerRule>> {
    let mut iptables = Iptables::open(table, machine, notes.clone(), OnSigterm::Kill)?;
    let mut rules = Vec::new();
    for family in FAMILIES {
        for variant in iptables.variants_to_search(family, searched_chains)? {
            let program = variant_prefix(family, variant);
            match iptables.read(family, variant).and_then(|mut chains| list(&mut chains, &program)) {
                Ok(listed) => rules.extend(listed),
                Err(error) if variant == Variant::Legacy => {
                    notes.note(format_args!("the rules of {program} are not listed: {error}"))
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(rules)
}

/// Returns the entry for an address whose packets the plugin firewall accepts.
fn forward_entry(place: String, owned: &forward::owner::OwnedAddress) -> ContainerRule {
    let redirected = if owned.accepts_redirected { " and connections to its host ports" } else { "" };
    let mut text = format!("packets of {}{redirected} are accepted", owned.address);
    if let Some(bridge) = owned.ingress.bridge() {
        text += &format!("; {bridge} has ingressPolicy {}", owned.ingress.name());
    }
    ContainerRule { purpose: Purpose::Forward, place, owner: RuleOwner::of_record(owned), text, removal: None }
}

/// Returns an entry for each container address whose packets iptables' table filter accepts. Reads
/// the chain that records the owners of addresses, because the accepting rules do not name owners.
fn list_filter(filter: &mut Chains<'_>, program: &str) -> Result<Vec<ContainerRule>> {
    // The entry's place is the chain of the accepting rules, as the records have no effect.
    let place = format!("{program} -t filter {}", forward::iptables::CNI_FORWARD);
    let records = filter.rules(forward::iptables::OWNERS)?.iter().filter_map(forward::iptables::read_record);
    Ok(records.map(|owned| forward_entry(place.clone(), &owned)).collect())
}

/// Returns the entries of all features that have rules in nf_tables.
fn list_nft(nft: &mut Nft) -> Result<Vec<ContainerRule>> {
    let what = "failed to list the containers' rules in nftables";
    // At once, so that each chain is read once, not twice. No program inserts rules at the
    // beginning of these chains.
    let mut rules = nft.read_at_once(what, Retries::Many, |nft| {
        let mut listed = Vec::new();
        let place = (masquerade_nft::TABLE, masquerade_nft::CHECKS);
        list_nft_chain(nft, Purpose::Masquerade, place, &mut listed, describe_masquerade)?;
        for family in FAMILIES {
            for chain in portmap_nft::CONTAINER_CHAINS {
                let place = (portmap_nft::table(family), chain);
                list_nft_chain(nft, Purpose::PortMap, place, &mut listed, |rule| describe_port_map(family, rule))?;
            }
        }
        Ok(listed)
    })?;
    for chain in forward::nftables::list_record_chains(nft)? {
        if chain.name == forward::egress::OWNERS {
            list_egress(nft, &chain, &mut rules)?;
            continue;
        }
        for record in chain.records(nft)? {
            rules.push(forward_entry(format!("nft {}", chain.table()), &record.owned));
        }
    }
    // The addresses in zones of firewalld, whose owners the plugin firewall records in nf_tables.
    for record in forward::sources::find_record_chain(nft)?.records(nft)? {
        rules.push(forward_entry("firewalld".to_owned(), &record.owned));
    }
    list_nft_chain(nft, Purpose::SpoofCheck, (spoof::TABLE, spoof::PREROUTING), &mut rules, describe_spoof_check)?;
    Ok(rules)
}

/// Adds to `rules` an entry for each container address whose connections are checked by the egress
/// rules of its network.
fn list_egress(nft: &mut Nft, record_chain: &RecordChain, rules: &mut Vec<ContainerRule>) -> Result<()> {
    // The containers of a network share a chain, whose counters are read only once.
    let mut dropped_by_chain = BTreeMap::new();
    for Record { owned, .. } in record_chain.records(nft)? {
        let chain = forward::egress::network_chain(&owned.owner);
        let dropped = match dropped_by_chain.get(&chain) {
            Some(dropped) => *dropped,
            None => forward::egress::count_dropped(nft, &chain)?,
        };
        dropped_by_chain.insert(chain.clone(), dropped);
        rules.push(ContainerRule {
            purpose: Purpose::Egress,
            place: format!("nft {} {chain}", forward::egress::TABLE),
            owner: RuleOwner::of_record(&owned),
            text: format!(
                "connections of {} are checked by the rules of its network, which dropped {dropped} packets",
                owned.address
            ),
            removal: None,
        });
    }
    Ok(())
}

/// Adds to `rules` an entry for each rule of a chain of nf_tables for which `describe` returns an
/// owner and a description. The entry has the `nft` command that removes the rule.
fn list_nft_chain(
    nft: &mut Nft,
    purpose: Purpose,
    (table, chain): (Table<'_>, &str),
    rules: &mut Vec<ContainerRule>,
    describe: impl Fn(&nft::Rule) -> Option<(RuleOwner, String)>,
) -> Result<()> {
    for Listed { handle, rule } in nft.rules(table, chain)? {
        let Some((owner, text)) = describe(&rule) else { continue };
        let removal = Some(format!("nft delete rule {table} {chain} handle {handle}"));
        rules.push(ContainerRule { purpose, place: format!("nft {table} {chain}"), owner, text, removal });
    }
    Ok(())
}

/// Describes a masquerading rule of nf_tables. Its comment is
/// `KEY, net: NETWORK, if: IFNAME, id: CONTAINER`, perhaps cut.
fn describe_masquerade(rule: &nft::Rule) -> Option<(RuleOwner, String)> {
    let comment = rule.comment.as_deref().unwrap_or_default();
    let value_of = |label: &str| comment.split(", ").find_map(|part| part.strip_prefix(label));
    let names = [value_of("net: "), value_of("id: "), value_of("if: ")];
    let key = masquerade_nft::key_of(comment).to_owned();
    let owner = RuleOwner::new(None, names, (key, masquerade_nft::attachment_key));
    // `words` must be given the rule's family. The text for the wrong family lacks the addresses,
    // so the longer text is the right one.
    let [as_v4, as_v6] = FAMILIES.map(|family| words(family, &rule.exprs).join(" "));
    Some((owner, if as_v4.len() > as_v6.len() { as_v4 } else { as_v6 }))
}

/// Describes a rule of portmap in nf_tables: a mapping, or the masquerading of a container with
/// mappings. Its comment is the container's ID, shortened if very long. The network and the
/// interface are only known if the rule also has a tag with the alias. `None` without a comment.
fn describe_port_map(family: Family, rule: &nft::Rule) -> Option<(RuleOwner, String)> {
    let container = rule.comment.as_deref()?;
    let names = [None, Some(container), None];
    let owner = RuleOwner::new(OwnerTag::of(rule).alias(), names, identity::owner_name(rule));
    let text = match portmap_nft::read_mapping(rule) {
        Some((claim, _)) => format!("{claim} to {}", claim.container),
        None => words(family, &rule.exprs).join(" "),
    };
    Some((owner, text))
}

/// Describes a jump to a chain that checks for forged sources; `None` for other rules. A jump of
/// the Go plugin, and a jump for a very long name, has no tag with the alias: only its comment,
/// `macspoofchk-CONTAINER-IFNAME`, names the owner.
fn describe_spoof_check(rule: &nft::Rule) -> Option<(RuleOwner, String)> {
    let comment = rule.comment.as_deref()?;
    let container_ifname = comment.strip_prefix(spoof::COMMENT_PREFIX)?;
    let comment_of = |owner: &AttachmentId| spoof::Id::new(&owner.container_id, &owner.ifname).comment();
    // A guess: both parts can contain a dash, but names of interfaces seldom do.
    let (container, ifname) = container_ifname.rsplit_once('-').unwrap_or((container_ifname, ""));
    let names = [None, Some(container), Some(ifname)];
    let owner = RuleOwner::new(OwnerTag::of(rule).alias(), names, (comment.to_owned(), comment_of));
    Some((owner, "only the container's own MAC address passes".to_owned()))
}

/// Returns the rules of iptables' table nat that lead to chains of containers: from POSTROUTING for
/// masquerading, from the DNAT chain for host ports.
fn list_nat(nat: &mut Chains<'_>, program: &str) -> Result<Vec<ContainerRule>> {
    let mut rules = Vec::new();
    let entry = |purpose, chain: &str, rule: &Rule, owner| ContainerRule {
        purpose,
        place: format!("{program} -t nat {chain}"),
        owner,
        text: rule.words().join(" "),
        removal: None,
    };
    // Every container has chains of its own, so all of them are read with one request.
    nat.read_chains_where(|name| name.starts_with("CNI-"))?;
    // Copied, because `owner_of_jump` reads other chains from `nat`.
    for rule in &nat.rules(masquerade_iptables::POSTROUTING)?.to_vec() {
        if rule.target().is_some_and(masquerade_iptables::is_chain_name) {
            let owner = owner_of_jump(nat, rule, masquerade_iptables::read_comment, masquerade_iptables::comment)?;
            rules.extend(owner.map(|owner| entry(Purpose::Masquerade, masquerade_iptables::POSTROUTING, rule, owner)));
        }
    }
    for rule in &nat.rules(portmap_iptables::DNAT)?.to_vec() {
        let owner = owner_of_jump(nat, rule, portmap_iptables::read_comment, portmap_iptables::comment)?;
        rules.extend(owner.map(|owner| entry(Purpose::PortMap, portmap_iptables::DNAT, rule, owner)));
    }
    Ok(rules)
}

/// Returns the owner of a rule that jumps to a container's chain; `None` if the rule has no
/// comment. `comment_of` returns the comment for the owner, and `read_comment` reads network and
/// container from it. The interface is read from the chain's first tag, a rule without a target and
/// with the alias as its comment; if several interfaces of the container share the chain, it may be
/// the wrong one.
fn owner_of_jump(
    nat: &mut Chains<'_>,
    jump: &Rule,
    read_comment: fn(&str) -> Option<(&str, &str)>,
    comment_of: fn(&AttachmentId) -> String,
) -> Result<Option<RuleOwner>> {
    let Some(comment) = jump.comment() else { return Ok(None) };
    let mut ifname = None;
    if let Some(chain) = jump.target() {
        let tags = nat.rules(chain)?.iter().filter(|rule| rule.target().is_none());
        ifname = tags.filter_map(Rule::comment).find_map(AttachmentId::parse).map(|parsed| parsed.ifname);
    }
    let (network, container) = read_comment(comment).unzip();
    Ok(Some(RuleOwner::new(None, [network, container, ifname.as_deref()], (comment.to_owned(), comment_of))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, machine};
    use crate::{Backend, Masquerade, SpoofCheck};
    use cni_testkit::{probe, require};

    #[test]
    fn rules_are_found_with_their_owners_and_foreign_ones_are_not() {
        require!(probe::nft());
        in_new_netns(|| {
            let machine = machine();
            let (mine, other) = (AttachmentId::new("net", "c1", "eth0"), AttachmentId::new("net", "c2", "eth0"));
            let masquerade = Masquerade::new(&machine, Notes::silent());
            masquerade.ensure(&mine, Some(Backend::Nftables), &["10.1.0.2/24".parse().unwrap()]).unwrap();
            let mut spoof = SpoofCheck::open().unwrap();
            spoof.ensure(&mine, "veth0", "02:00:00:00:00:01".parse().unwrap()).unwrap();
            let rules = forward::ForwardRules {
                attachment: mine.clone(),
                addresses: vec!["10.1.0.2".parse().unwrap()],
                ingress: forward::Ingress::SameBridge("br0".into()),
                accepts_redirected: false,
                egress: Some(forward::Egress { deny: vec!["10.9.0.0/16".parse().unwrap()], ..Default::default() }),
                iptables_admin_chain: forward::ADMIN.into(),
                nftables_admin_chain: None,
            };
            let forward = crate::Forward::new(&machine, Notes::silent());
            forward.ensure(&rules, Backend::Nftables, &mut forward::Written::default()).unwrap();
            forward::egress::ensure(&rules, &mut false).unwrap();
            let found = list_container_rules(&machine, &Notes::silent()).unwrap();
            assert_eq!(found.len(), 4, "{found:#?}");
            for entry in &found {
                assert!(entry.owner.matches(&mine) && !entry.owner.matches(&other), "{entry:?}");
                assert_eq!(entry.owner.container.as_deref(), Some("c1"));
                assert_eq!(entry.owner.ifname.as_deref(), Some("eth0"));
                assert_eq!(entry.owner.network.as_deref(), Some("net"));
            }
            assert_eq!(found[2].text, "packets of 10.1.0.2 are accepted; br0 has ingressPolicy same-bridge");
            let checked = "connections of 10.1.0.2 are checked by the rules of its network, which dropped 0 packets";
            assert_eq!(found[3].text, checked);
            assert!(found[0].text.contains("10.1.0.2"), "{}", found[0].text);
        });
    }
}
