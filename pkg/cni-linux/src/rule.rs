//! Lists, adds and deletes routing rules, which select the routing table for a packet.
//!
//! The kernel evaluates the rules by priority, the lowest number first. If a rule is added without
//! a priority, the kernel chooses the number below that of the second rule, so the new rule becomes
//! the second.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni::Cidr;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Parseable as _};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};

use crate::error::{Error, Result};
use crate::netlink::{Kind, Netlink};
use crate::route::{Family, SavedRoute};

/// A rule that selects a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The source addresses of the packets; `None` for any.
    pub source: Option<Cidr>,
    /// The table.
    pub table: u32,
    /// The priority; the lowest comes first. With `None`, an added rule gets one from the kernel,
    /// and a deletion matches any priority.
    pub priority: Option<u32>,
}

impl Rule {
    /// Returns the rule by which packets from the address `source` use `table`.
    pub fn from_host(source: IpAddr, table: u32) -> Rule {
        Rule { source: Some(Cidr::host(source)), table, priority: None }
    }
}

/// Returns the numbers of the tables that a rule selects or that have a route.
pub fn tables_in_use(rules: &[Rule], routes: &[SavedRoute]) -> BTreeSet<u32> {
    rules.iter().map(|rule| rule.table).chain(routes.iter().map(SavedRoute::table_id)).collect()
}

impl std::fmt::Display for Rule {
    /// Writes the rule like ip-rule(8), without its priority.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.source {
            Some(source) => write!(f, "from {source} lookup {}", self.table),
            None => write!(f, "from all lookup {}", self.table),
        }
    }
}

impl Netlink {
    /// Adds a rule. The rule must have a source, which determines the family. Without a priority
    /// the rule is added even if the same rule exists.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the same rule with the same priority exists.
    pub fn add_rule(&self, rule: &Rule) -> Result<()> {
        let added = self.request(Kind::NewRule, &rule_request(rule), NLM_F_CREATE | NLM_F_EXCL);
        added.map(drop).map_err(|cause| Error::new(format_args!("failed to add rule {rule}"), cause))
    }

    /// Deletes a rule if it exists.
    pub fn purge_rule(&self, rule: &Rule) -> Result<()> {
        let Err(cause) = self.request(Kind::DelRule, &rule_request(rule), 0) else { return Ok(()) };
        let error = Error::new(format_args!("failed to delete rule {rule}"), cause);
        if error.is_not_found() { Ok(()) } else { Err(error) }
    }

    /// Returns the rules of one family that select a table, in the kernel's order of evaluation.
    pub fn list_rules(&self, family: Family) -> Result<Vec<Rule>> {
        let mut request = RuleMessage::default();
        request.header.family = family.number();
        let answer =
            self.dump(Kind::GetRule, &request).map_err(|cause| Error::new("failed to list the rules", cause))?;
        let messages = answer.iter().filter_map(|reply| RuleMessage::parse(reply.body(Kind::NewRule)?).ok());
        Ok(messages.filter_map(decode).collect())
    }
}

/// Returns the request that adds or deletes a rule.
fn rule_request(rule: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.action = RuleAction::ToTable;
    message.attributes.push(RuleAttribute::Table(rule.table));
    if let Some(source) = rule.source {
        message.header.family = Family::of(source.address()).number();
        message.header.src_len = source.prefix();
        message.attributes.push(RuleAttribute::Source(source.address()));
    }
    message.attributes.extend(rule.priority.map(RuleAttribute::Priority));
    message
}

/// Decodes a rule. Returns `None` for a rule that does not select a table.
fn decode(message: RuleMessage) -> Option<Rule> {
    let RuleMessage { header, attributes, .. } = message;
    if header.action != RuleAction::ToTable {
        return None;
    }
    // The kernel omits a priority of 0.
    let mut rule = Rule { source: None, table: header.table.into(), priority: Some(0) };
    for attribute in attributes {
        match attribute {
            RuleAttribute::Source(address) => rule.source = Cidr::new(address, header.src_len),
            RuleAttribute::Table(table) => rule.table = table,
            RuleAttribute::Priority(priority) => rule.priority = Some(priority),
            _ => {}
        }
    }
    Some(rule)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, output};

    #[test]
    fn rules_of_both_families_are_added_and_deleted() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let rules = [
                Rule::from_host("10.2.0.2".parse().unwrap(), 100),
                Rule::from_host("fd02::2".parse().unwrap(), 70_000),
            ];
            for rule in &rules {
                netlink.add_rule(rule).unwrap();
            }
            assert!(output("ip -4 rule").contains("32765:\tfrom 10.2.0.2 lookup 100\n"), "{}", output("ip -4 rule"));
            assert!(output("ip -6 rule").contains("32765:\tfrom fd02::2 lookup 70000\n"), "{}", output("ip -6 rule"));
            for (family, rule) in Family::ALL.into_iter().zip(&rules) {
                let listed = netlink.list_rules(family).unwrap();
                let there = listed.iter().find(|there| there.source == rule.source).unwrap();
                assert_eq!((there.table, there.priority), (rule.table, Some(32765)));
                assert!(listed.iter().any(|main| main.table == 254 && main.source.is_none()), "{listed:?}");
                netlink.purge_rule(there).unwrap();
                netlink.purge_rule(there).unwrap();
                assert_eq!(netlink.list_rules(family).unwrap().len(), listed.len() - 1);
            }
        });
    }

    #[test]
    fn the_newest_rule_becomes_the_second() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            for (host, table) in [("10.2.0.2", 100), ("10.2.0.3", 101)] {
                netlink.add_rule(&Rule::from_host(host.parse().unwrap(), table)).unwrap();
            }
            let tables: Vec<u32> = netlink.list_rules(Family::V4).unwrap().iter().map(|rule| rule.table).collect();
            assert_eq!(tables, [255, 101, 100, 254, 253]);
        });
    }

    #[test]
    fn a_refusal_names_the_rule() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let rule = Rule { priority: Some(1000), ..Rule::from_host("10.2.0.2".parse().unwrap(), 100) };
            netlink.add_rule(&rule).unwrap();
            let error = netlink.add_rule(&rule).unwrap_err();
            assert!(error.is_exists());
            let error = error.to_string();
            assert!(error.starts_with("failed to add rule from 10.2.0.2/32 lookup 100: "), "{error}");
        });
    }
}
