//! Every rule that CNI plugins keep for a container, of any network: for `cnitool`.
//!
//! It only reads. No plugin uses it: plugins search for one attachment's rules and never read the
//! rest. Few rules name all of network, container and interface, so an owner is compared, not
//! parsed; the names are for people.

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

use super::forward;
use super::iptables::{self, Chains, FAMILIES, Iptables, Rule, Variant, words};
use super::masquerade::{iptables as masquerade_iptables, nftables as masquerade_nft};
use super::nft::{self, Listed, Nft, Table};
use super::portmap::identity::{self, Identity, Ownership};
use super::portmap::iptables::shape as portmap_iptables;
use super::portmap::nft::shape as portmap_nft;
use super::spoof;
use cni::AttachmentId;
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
}

impl std::fmt::Display for Purpose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Purpose::Masquerade => "masquerade",
            Purpose::PortMap => "portmap",
            Purpose::SpoofCheck => "macspoofchk",
            Purpose::Forward => "firewall",
        })
    }
}

/// A rule of a container.
#[derive(Clone, Debug)]
pub struct ContainerRule {
    /// The purpose of the rule.
    pub purpose: Purpose,
    /// Where it is: `nft ip cni_hostport hostports`, `iptables-legacy -t nat POSTROUTING`.
    pub place: String,
    /// The attachment that the rule belongs to.
    pub owner: RuleOwner,
    /// A description of the rule.
    pub text: String,
    /// A command that removes this rule and nothing else, where it was read over netlink.
    pub removal: Option<String>,
}

/// The attachment that a rule belongs to, as far as the rule names it.
#[derive(Clone, Debug)]
pub struct RuleOwner {
    /// The network's name.
    pub network: Option<String>,
    /// The container's ID; of a long one the beginning.
    pub container: Option<String>,
    /// The interface's name in the container.
    pub ifname: Option<String>,
    sign: Sign,
}

#[derive(Clone, Debug)]
enum Sign {
    /// The comment of nftables' masquerading.
    MasqueradeNft(String),
    /// The comment of iptables' masquerading.
    MasqueradeIptables(String),
    /// A rule of nftables' host ports.
    PortMapNft(Box<nft::Rule>),
    /// The comment of iptables' host ports.
    PortMapIptables(String),
    /// The comment of the rule that leads into the checks.
    Spoof(String),
    /// The comment of the record of an address.
    Forward(String),
}

impl RuleOwner {
    /// Whether it is this attachment, or may be: some rules name the container alone.
    pub fn matches(&self, mark: &AttachmentId) -> bool {
        match &self.sign {
            Sign::MasqueradeNft(comment) => {
                comment.starts_with(&masquerade_nft::key(&mark.network, &mark.container_id, &mark.ifname))
            }
            Sign::MasqueradeIptables(comment) => {
                *comment == masquerade_iptables::comment(&mark.network, &mark.container_id)
            }
            Sign::PortMapNft(rule) => Identity::new(mark).owner(rule) != Ownership::Other,
            Sign::PortMapIptables(comment) => *comment == portmap_iptables::comment(mark),
            Sign::Forward(comment) => *comment == forward::owner::name(mark),
            Sign::Spoof(comment) => *comment == spoof::Id::new(&mark.container_id, &mark.ifname).comment(),
        }
    }

    /// The names out of a mark's alias.
    fn marked(alias: &str, sign: Sign) -> Option<RuleOwner> {
        let marked = AttachmentId::parse(alias)?;
        Some(RuleOwner {
            network: Some(marked.network),
            container: marked.container_id,
            ifname: Some(marked.ifname),
            sign,
        })
    }
}

/// Every rule that plugins keep for a container in the calling thread's network namespace. What
/// cannot be read (a variant of iptables whose programs are not installed) is reported to `notes`.
///
/// # Errors
/// The kernel's; a kernel without nf_tables is not an error, as it has no rules there.
pub fn list_container_rules(machine: &dyn Machine, notes: &Notes) -> Result<Vec<ContainerRule>> {
    let mut held = Vec::new();
    match Nft::open().and_then(|mut nft| in_nft(&mut nft, &mut held)) {
        Err(error) if error.is_unsupported() => {}
        done => done?,
    }
    let mut iptables = Iptables::open(iptables::Table::Nat, machine, notes.clone(), OnSigterm::Kill)?;
    for family in FAMILIES {
        for variant in
            iptables.variants_to_search(family, &[masquerade_iptables::POSTROUTING, portmap_iptables::DNAT])?
        {
            match iptables.read(family, variant).and_then(|mut nat| in_iptables(&mut nat, variant, &mut held)) {
                Ok(()) => {}
                Err(error) if variant == Variant::Legacy => notes.note(format_args!("not looked at: {error}")),
                Err(error) => return Err(error),
            }
        }
    }
    let mut iptables = Iptables::open(iptables::Table::Filter, machine, notes.clone(), OnSigterm::Kill)?;
    for family in FAMILIES {
        for variant in iptables.variants_to_search(family, &[forward::iptables::OWNERS])? {
            match iptables.read(family, variant).and_then(|mut filter| in_filter(&mut filter, variant, &mut held)) {
                Ok(()) => {}
                Err(error) if variant == Variant::Legacy => notes.note(format_args!("not looked at: {error}")),
                Err(error) => return Err(error),
            }
        }
    }
    held.sort_by_key(|one| one.purpose);
    Ok(held)
}

/// An address that firewall accepts, of whose rules only the record names the owner.
fn forwarded(
    place: String,
    owner: &str,
    address: std::net::IpAddr,
    ingress: &forward::Ingress,
) -> Option<ContainerRule> {
    let text = match ingress.bridge() {
        Some(bridge) => format!("{address} is accepted, {bridge} is {}", ingress.name()),
        None => format!("{address} is accepted"),
    };
    let owner = RuleOwner::marked(owner, Sign::Forward(owner.to_owned()))?;
    Some(ContainerRule { purpose: Purpose::Forward, place, owner, text, removal: None })
}

fn in_filter(filter: &mut Chains<'_>, variant: Variant, held: &mut Vec<ContainerRule>) -> Result<()> {
    let program = if filter.family() == Family::V4 { "iptables" } else { "ip6tables" };
    for rule in filter.rules(forward::iptables::OWNERS)? {
        let Some((owner, address, ingress)) = forward::iptables::read_owner(rule) else { continue };
        let place = format!("{program}-{variant} -t filter {}", forward::iptables::FORWARD);
        held.extend(forwarded(place, owner, address, &ingress));
    }
    Ok(())
}

fn in_nft(nft: &mut Nft, held: &mut Vec<ContainerRule>) -> Result<()> {
    let entry = |purpose, table: Table<'_>, chain: &str, listed: &Listed, owner, text| ContainerRule {
        purpose,
        place: format!("nft {table} {chain}"),
        owner,
        text,
        removal: Some(format!("nft delete rule {table} {chain} handle {}", listed.handle)),
    };
    let (table, chain) = (masquerade_nft::TABLE, masquerade_nft::CHECKS);
    for listed in nft.rules(table, chain)? {
        let comment = listed.rule.comment.clone().unwrap_or_default();
        let name = |key: &str| {
            let value = comment.split(", ").find_map(|part| part.strip_prefix(key));
            value.map(str::to_owned)
        };
        let [network, ifname, container] = ["net: ", "if: ", "id: "].map(name);
        let owner = RuleOwner { network, container, ifname, sign: Sign::MasqueradeNft(comment.clone()) };
        // The address has one family; in the other's words it is nothing.
        let text = [Family::V4, Family::V6].map(|family| words(family, &listed.rule.exprs).join(" "));
        let text = text.into_iter().max_by_key(String::len).unwrap_or_default();
        held.push(entry(Purpose::Masquerade, table, chain, &listed, owner, text));
    }
    for family in [Family::V4, Family::V6] {
        let table = portmap_nft::table(family);
        for chain in portmap_nft::CONTAINERS {
            for listed in nft.rules(table, chain)? {
                let Some(comment) = listed.rule.comment.clone() else { continue };
                let sign = Sign::PortMapNft(Box::new(listed.rule.clone()));
                let marked = identity::alias(&listed.rule).and_then(|alias| RuleOwner::marked(&alias, sign.clone()));
                let unmarked = RuleOwner { network: None, container: Some(comment), ifname: None, sign };
                let text = match portmap_nft::read(&listed.rule) {
                    Some((claim, _)) => format!("{claim} to {}", claim.container),
                    None => words(family, &listed.rule.exprs).join(" "),
                };
                held.push(entry(Purpose::PortMap, table, chain, &listed, marked.unwrap_or(unmarked), text));
            }
        }
    }
    for (family, table, rules) in forward::nftables::owners(nft)? {
        for owned in rules.iter().filter_map(forward::nftables::read) {
            let place = format!("nft {}", Table { family, name: &table });
            held.extend(forwarded(place, &owned.owner, owned.address, &owned.ingress));
        }
    }
    for owned in forward::sources::all(nft)? {
        held.extend(forwarded("firewalld".to_owned(), &owned.owner, owned.address, &owned.ingress));
    }
    let (table, chain) = (spoof::TABLE, spoof::PREROUTING);
    for listed in nft.rules(table, chain)? {
        let Some(comment) = listed.rule.comment.clone() else { continue };
        let Some(id) = comment.strip_prefix(spoof::COMMENT_PREFIX).map(str::to_owned) else { continue };
        let alias = listed.rule.tag(spoof::TAG_MARK).map(|alias| String::from_utf8_lossy(alias).into_owned());
        let sign = Sign::Spoof(comment);
        // `ID-IFNAME`: neither part says where it ends, but an interface's name seldom has a dash.
        let (container, ifname) = id.rsplit_once('-').unwrap_or((&id, ""));
        let unmarked = RuleOwner {
            network: None,
            container: Some(container.to_owned()),
            ifname: Some(ifname.to_owned()),
            sign: sign.clone(),
        };
        let owner = alias.and_then(|alias| RuleOwner::marked(&alias, sign)).unwrap_or(unmarked);
        let text = "only the container's own MAC address passes".to_owned();
        held.push(entry(Purpose::SpoofCheck, table, chain, &listed, owner, text));
    }
    Ok(())
}

fn in_iptables(nat: &mut Chains<'_>, variant: Variant, held: &mut Vec<ContainerRule>) -> Result<()> {
    let program = match nat.family() {
        Family::V4 => format!("iptables-{variant}"),
        Family::V6 => format!("ip6tables-{variant}"),
    };
    let names = |parsed: Option<(&str, &str)>, ifname, sign| RuleOwner {
        network: parsed.map(|(network, _)| network.to_owned()),
        container: parsed.map(|(_, container)| container.to_owned()),
        ifname,
        sign,
    };
    let entry = |purpose, chain: &str, rule: &Rule, owner| ContainerRule {
        purpose,
        place: format!("{program} -t nat {chain}"),
        owner,
        text: rule.words().join(" "),
        removal: None,
    };
    let chain = masquerade_iptables::POSTROUTING;
    for rule in &nat.rules(chain)?.to_vec() {
        let Some(comment) = rule.comment() else { continue };
        if rule.target().is_some_and(masquerade_iptables::is_chain_name) {
            let parsed = comment.strip_prefix("name: \"").and_then(|rest| rest.strip_suffix('"'));
            let parsed = parsed.and_then(|rest| rest.split_once("\" id: \""));
            let ifname = named_in(nat, rule)?;
            let owner = names(parsed, ifname, Sign::MasqueradeIptables(comment.to_owned()));
            held.push(entry(Purpose::Masquerade, chain, rule, owner));
        }
    }
    let chain = portmap_iptables::DNAT;
    for rule in &nat.rules(chain)?.to_vec() {
        let Some(comment) = rule.comment() else { continue };
        let ifname = named_in(nat, rule)?;
        let owner = names(portmap_iptables::read_comment(comment), ifname, Sign::PortMapIptables(comment.to_owned()));
        held.push(entry(Purpose::PortMap, chain, rule, owner));
    }
    Ok(())
}

/// The interface that the chain a rule leads to names: the first, if it holds several attachments
/// of the container.
fn named_in(nat: &mut Chains<'_>, rule: &Rule) -> Result<Option<String>> {
    let Some(chain) = rule.target() else { return Ok(None) };
    let tags = nat.rules(chain)?.iter().filter(|rule| rule.target().is_none()).filter_map(Rule::comment);
    Ok(tags.filter_map(AttachmentId::parse).map(|marked| marked.ifname).next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::masquerade::PreviousRules;
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
            masquerade
                .ensure(&mine, Some(Backend::Nftables), &["10.1.0.2/24".parse().unwrap()], &PreviousRules::default())
                .unwrap();
            let mut spoof = SpoofCheck::open().unwrap();
            spoof.ensure(&mine, "veth0", "02:00:00:00:00:01".parse().unwrap()).unwrap();
            let wanted = forward::Wanted {
                mark: mine.clone(),
                addresses: vec!["10.1.0.2".parse().unwrap()],
                ingress: forward::Ingress::SameBridge("br0".into()),
                admin: forward::ADMIN.into(),
                place: None,
            };
            let forward = crate::Forward::new(&machine, Notes::silent());
            forward.ensure(&wanted, Backend::Nftables, &forward::PreviousRules::default()).unwrap();
            let found = list_container_rules(&machine, &Notes::silent()).unwrap();
            assert_eq!(found.len(), 3, "{found:#?}");
            for held in &found {
                assert!(held.owner.matches(&mine) && !held.owner.matches(&other), "{held:?}");
                assert_eq!(held.owner.container.as_deref(), Some("c1"));
                assert_eq!(held.owner.ifname.as_deref(), Some("eth0"));
                assert_eq!(held.owner.network.as_deref(), Some("net"));
            }
            assert_eq!(found[2].text, "10.1.0.2 is accepted, br0 is same-bridge");
            assert!(found[0].text.contains("10.1.0.2"), "{}", found[0].text);
        });
    }
}
