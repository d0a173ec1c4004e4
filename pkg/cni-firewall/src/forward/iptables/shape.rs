//! Builds the rules as words of iptables, and reads the records.

use std::net::IpAddr;

use cni::{AttachmentId, Cidr};

use super::super::owner::{Ingress, OwnedAddress};
use crate::iptables::{Rule, single_address};

/// The kernel's chain that every forwarded packet passes.
pub(super) const FORWARD: &str = "FORWARD";
/// The chain that accepts packets from and to containers.
pub(crate) const CNI_FORWARD: &str = "CNI-FORWARD";
/// The chain of the records, to which no rule leads.
pub(crate) const OWNERS: &str = "CNI-FW-OWNERS";
/// The chain for packets from isolated bridges.
pub(super) const STAGE_1: &str = "CNI-ISOLATION-STAGE-1";
/// The chain for packets that leave an isolated bridge: drops those to another isolated bridge.
pub(super) const STAGE_2: &str = "CNI-ISOLATION-STAGE-2";
/// The chain for the administrator's rules, unless the configuration names another one.
pub const ADMIN: &str = "CNI-ADMIN";

pub(super) const JUMP_COMMENT: &str = "CNI firewall plugin rules";
pub(super) const ADMIN_JUMP_COMMENT: &str = "CNI firewall plugin admin overrides";
pub(super) const ISOLATION_COMMENT: &str = "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)";

/// Returns the words as owned strings.
fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Returns the words of a rule with these matches, this comment and this target.
pub(super) fn commented_rule(matches: &[&str], comment: &str, target: &str) -> Vec<String> {
    words(&[matches, &["-m", "comment", "--comment", comment, "-j", target]].concat())
}

/// Returns the two rules by which [`CNI_FORWARD`] accepts packets of an address: the first accepts
/// replies to the address, the second all packets from the address.
pub(super) fn accept_rules(address: IpAddr) -> [Vec<String>; 2] {
    let host = Cidr::host(address).to_string();
    [
        words(&["-d", &host, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"]),
        words(&["-s", &host, "-j", "ACCEPT"]),
    ]
}

/// Returns the rule by which [`CNI_FORWARD`] accepts the connections that were redirected to an
/// address. Go's plugin does not write it.
pub(super) fn redirected_rule(address: IpAddr) -> Vec<String> {
    let host = Cidr::host(address).to_string();
    words(&["-d", &host, "-m", "conntrack", "--ctstate", "DNAT", "-j", "ACCEPT"])
}

/// Returns the rules that [`CNI_FORWARD`] must have for an address.
pub(super) fn address_rules(owned: &OwnedAddress) -> Vec<Vec<String>> {
    let mut rules = accept_rules(owned.address).to_vec();
    if owned.accepts_redirected {
        rules.push(redirected_rule(owned.address));
    }
    rules
}

/// Returns the rules of the policy's bridge in both stages, each with its chain, in order; none for
/// the policy `open`.
pub(super) fn isolation_rules(ingress: &Ingress) -> Vec<(&'static str, Vec<String>)> {
    let Some(bridge) = ingress.bridge() else { return Vec::new() };
    let comment = format!("CNI firewall plugin rules (ingressPolicy: {})", ingress.name());
    let mut rules = vec![
        (STAGE_1, commented_rule(&["-i", bridge, "!", "-o", bridge], &comment, STAGE_2)),
        (STAGE_2, commented_rule(&["-o", bridge], ISOLATION_COMMENT, "DROP")),
    ];
    if matches!(ingress, Ingress::Isolated(_)) {
        rules.insert(0, (STAGE_1, commented_rule(&["-i", bridge, "-o", bridge], &comment, "DROP")));
    }
    rules
}

/// Returns the last rule of both stages.
pub(super) fn end_of_stage() -> Vec<String> {
    commented_rule(&[], ISOLATION_COMMENT, "RETURN")
}

/// Returns the record of an address for [`OWNERS`]. The interface matches store the policy, as in
/// [`STAGE_1`]: none for `open`, `-i B ! -o B` for `same-bridge`, `-i B -o B` for `isolated`. A
/// match `-d` of the same address stands for `accepts_redirected`.
pub(super) fn record_rule(owned: &OwnedAddress) -> Vec<String> {
    let host = Cidr::host(owned.address).to_string();
    let interface_matches = match &owned.ingress {
        Ingress::Open => Vec::new(),
        Ingress::SameBridge(bridge) => vec!["-i", bridge, "!", "-o", bridge],
        Ingress::Isolated(bridge) => vec!["-i", bridge, "-o", bridge],
    };
    let destination = if owned.accepts_redirected { vec!["-d", &host] } else { Vec::new() };
    words(
        &[&["-s", &host][..], &destination, &interface_matches, &["-m", "comment", "--comment", &owned.owner]].concat(),
    )
}

/// Reads a rule that [`record_rule`] has written; `None` for other rules. Also reads a record of
/// the nftables backend, decoded into words of iptables.
pub(crate) fn read_record(rule: &Rule) -> Option<OwnedAddress> {
    let owner = rule.comment()?;
    if rule.target().is_some() || AttachmentId::parse(owner).is_none() {
        return None;
    }
    // `value` returns `None` for a negated option, as `! -o BRIDGE` of the policy `same-bridge`.
    let ingress = match (rule.value("-i"), rule.value("-o")) {
        (None, _) => Ingress::Open,
        (Some(bridge), None) => Ingress::SameBridge(bridge.to_owned()),
        (Some(bridge), Some(_)) => Ingress::Isolated(bridge.to_owned()),
    };
    let address = single_address(rule, "-s")?;
    let accepts_redirected = single_address(rule, "-d") == Some(address);
    Some(OwnedAddress { owner: owner.to_owned(), address, ingress, accepts_redirected })
}
