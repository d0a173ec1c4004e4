//! ADD: everything is read and decided ([`Plan::new`]), and then written ([`Plan::carry_out`]).
//!
//! A table is complete before a rule leads to it, and the main table loses its routes last, so
//! packets always have a route.

use std::net::IpAddr;

use cni::result::IpConfig;
use cni::rollback::Rollback;
use cni::{Cidr, Code, Error, Result};
use cni_linux::route::MAIN_TABLE;
use cni_linux::rule::tables_in_use;
use cni_linux::{Addr, Family, Link, Netlink, Route, Rule, SavedRoute};

use crate::conf::{Conf, MainTable};

/// The first table that is handed out.
const FIRST_TABLE: u32 = 100;

/// The scope of what is on the link.
const SCOPE_LINK: u8 = 253;

/// The changes to write.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The routes of the new tables.
    tables: Vec<SavedRoute>,
    rules: Vec<Rule>,
    /// The routes that are added to the main table.
    hints: Vec<SavedRoute>,
    /// The routes that are removed from the main table.
    moved: Vec<SavedRoute>,
}

impl Plan {
    /// # Errors
    /// 102 if an address has a rule already; 100 if the kernel cannot be asked.
    pub(crate) fn new(netlink: &Netlink, link: &Link, conf: &Conf, ips: &[IpConfig]) -> Result<Plan> {
        let (mut rules, mut routes) = (Vec::new(), Vec::new());
        for family in Family::ALL {
            rules.extend(netlink.list_rules(family)?);
            routes.extend(netlink.save_routes(family)?);
        }
        for ip in ips {
            let source = Some(Cidr::host(ip.address.address()));
            if let Some(rule) = rules.iter().find(|rule| rule.source == source) {
                let msg = format!("failed to add a rule from {}: rule {rule} exists already", ip.address.address());
                return Err(Error::new(Code::CONFLICT, msg));
            }
        }
        let main = match conf {
            Conf::Table(table) => {
                let rules = ips.iter().map(|ip| Rule::from_host(ip.address.address(), *table)).collect();
                return Ok(Plan { rules, ..Plan::default() });
            }
            Conf::FreeTables { main, .. } => *main,
        };
        let taken = tables_in_use(&rules, &routes);
        routes.retain(|route| {
            let has_table = ips.iter().any(|ip| Family::of(ip.address.address()) == route.family());
            route.table_id() == MAIN_TABLE && route.leaves_by(link.index) && has_table
        });
        let mut plan = Plan::default();
        for (ip, table) in ips.iter().zip((FIRST_TABLE..).filter(|table| !taken.contains(table))) {
            plan.rules.push(Rule::from_host(ip.address.address(), table));
            let copied = copied(ip, ips, &routes);
            plan.tables.extend(table_of(ip, conf, link, copied).iter().map(|route| route.in_table(table)));
        }
        // Packets with a link-local source match no rule.
        plan.moved = routes;
        plan.moved.retain(|route| !route.routes().iter().any(is_link_local));
        if main == MainTable::SourceHints {
            let addresses = netlink.list_addresses(link.index)?;
            plan.keep_hints(link, ips, &addresses);
        }
        Ok(plan)
    }

    /// Leaves what is on the link in the main table, and a route to the network of each address.
    ///
    /// The kernel refuses a tentative address as the source. The route then has none: for IPv6 the
    /// kernel chooses an address of the interface anyway.
    fn keep_hints(&mut self, link: &Link, ips: &[IpConfig], addresses: &[Addr]) {
        let is_tentative = |ip: IpAddr| addresses.iter().any(|addr| addr.cidr.address() == ip && addr.tentative);
        let hint = |ip: &IpConfig| Route {
            source: Some(ip.address.address()).filter(|source| !is_tentative(*source)),
            scope: Some(SCOPE_LINK),
            ..Route::new(ip.address.network(), None, link.index)
        };
        let hints: Vec<Route> = ips.iter().map(hint).collect();
        let is_replaced = |route: &Route| hints.iter().any(|hint| hint.conflicts_with(route));
        self.moved
            .retain(|saved| saved.routes().iter().any(|route| route.scope != Some(SCOPE_LINK) || is_replaced(route)));
        self.hints = hints.iter().map(SavedRoute::from).collect();
    }

    /// Writes it all, with the undo before each effect.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub(crate) fn carry_out(self, netlink: &Netlink, rollback: &mut Rollback<'_>) -> Result<()> {
        for route in self.tables {
            let (undo, undone) = (netlink.clone(), route.clone());
            rollback.push("delete a copied route", move || undo.purge_route(&undone));
            netlink.append_route(&route)?;
        }
        for rule in self.rules {
            let undo = netlink.clone();
            rollback.push(format!("delete rule {rule}"), move || undo.purge_rule(&rule));
            netlink.add_rule(&rule)?;
        }
        // Before the undos of the hints, so that the hints are gone when the routes come back.
        let (undo, undone) = (netlink.clone(), self.moved.clone());
        rollback.push("put the routes of the main table back", move || {
            undone.iter().map(|route| undo.append_route(route)).fold(Ok(()), Result::and)
        });
        for hint in self.hints {
            let (undo, undone) = (netlink.clone(), hint.clone());
            rollback.push("delete a route with a source hint", move || undo.purge_route(&undone));
            netlink.append_route(&hint)?;
        }
        for route in &self.moved {
            netlink.purge_route(route)?;
        }
        Ok(())
    }
}

/// The interface's routes that packets from `ip` take: those of its own network, and those of no
/// address's network.
fn copied(ip: &IpConfig, ips: &[IpConfig], routes: &[SavedRoute]) -> Vec<SavedRoute> {
    let is_of_another = |route: &SavedRoute| {
        !route.belongs_to(ip.address.network()) && ips.iter().any(|other| route.belongs_to(other.address.network()))
    };
    let family = Family::of(ip.address.address());
    routes.iter().filter(|route| route.family() == family && !is_of_another(route)).cloned().collect()
}

/// The routes of the table of `ip`. What is on the link comes first: the gateways are reached by
/// it.
fn table_of(ip: &IpConfig, conf: &Conf, link: &Link, mut copied: Vec<SavedRoute>) -> Vec<SavedRoute> {
    let address = ip.address.address();
    let family = Family::of(address);
    let default = |gateway: IpAddr| Route::new(Cidr::default_route(address), Some(gateway), link.index);
    let is_default = |route: &SavedRoute| route.routes().iter().any(|route| route.dst.is_default_route());
    if let Some(gateway) = conf.gateway(family) {
        copied.retain(|route| !is_default(route));
        copied.push(SavedRoute::from(&default(gateway)));
    } else if let Some(gateway) = ip.gateway.filter(|gateway| Family::of(*gateway) == family) {
        let default = default(gateway);
        if !copied.iter().any(|route| route.routes().iter().any(|route| route.conflicts_with(&default))) {
            copied.push(SavedRoute::from(&default));
        }
    }
    copied.sort_by_key(|route| route.routes().iter().any(|route| route.gw.is_some()));
    copied
}

fn is_link_local(route: &Route) -> bool {
    matches!(route.dst.address(), IpAddr::V6(v6) if v6.is_unicast_link_local())
}
