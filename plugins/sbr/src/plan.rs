//! Implements ADD in two steps: [`Plan::new`] reads the kernel's state and decides what to change,
//! [`Plan::carry_out`] changes it.
//!
//! A table is complete before a rule leads to it, and the routes of the main table are removed
//! last, so packets always have a route.

use std::net::IpAddr;

use cni::result::IpConfig;
use cni::rollback::Rollback;
use cni::{Cidr, Code, Error, Result};
use cni_linux::route::MAIN_TABLE;
use cni_linux::rule::tables_in_use;
use cni_linux::{Addr, Family, Link, Netlink, Route, Rule, SavedRoute};
use cni_plugin::interface::SCOPE_LINK;

use crate::conf::{Conf, MainTable};

/// The first table that may be chosen, as in Go's plugin.
const FIRST_TABLE: u32 = 100;

/// The changes that ADD makes in the container's namespace.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The routes to add to the new tables: mostly copies of the routes in `moved`.
    table_routes: Vec<SavedRoute>,
    /// The rules to add: one for each address.
    rules: Vec<Rule>,
    /// The routes with a source address to add to the main table (`addSourceHints`).
    hints: Vec<SavedRoute>,
    /// The routes to remove from the main table.
    moved: Vec<SavedRoute>,
}

impl Plan {
    /// Decides what to change for the addresses `ips` of `link`.
    ///
    /// # Errors
    /// - Code 102 if an address has a rule already.
    /// - Code 100 if the kernel cannot list rules, routes or addresses.
    pub(crate) fn new(netlink: &Netlink, link: &Link, conf: &Conf, ips: &[IpConfig]) -> Result<Plan> {
        let (mut existing_rules, mut all_routes) = (Vec::new(), Vec::new());
        for family in Family::ALL {
            existing_rules.extend(netlink.list_rules(family)?);
            all_routes.extend(netlink.save_routes(family)?);
        }
        for ip in ips {
            let source = Some(Cidr::host(ip.address.address()));
            if let Some(rule) = existing_rules.iter().find(|rule| rule.source == source) {
                let msg = format!("failed to add a rule from {}: rule {rule} exists already", ip.address.address());
                return Err(Error::new(Code::CONFLICT, msg));
            }
        }
        let main_table = match conf {
            Conf::Table(table) => {
                let rules = ips.iter().map(|ip| Rule::from_host(ip.address.address(), *table)).collect();
                return Ok(Plan { rules, ..Plan::default() });
            }
            Conf::FreeTables { main_table, .. } => *main_table,
        };
        let taken = tables_in_use(&existing_rules, &all_routes);
        let mut interface_routes = all_routes;
        interface_routes.retain(|route| {
            let is_of_used_family = ips.iter().any(|ip| Family::of(ip.address.address()) == route.family());
            route.table_id() == MAIN_TABLE && route.leaves_by(link.index) && is_of_used_family
        });
        let mut plan = Plan::default();
        let free_tables = (FIRST_TABLE..).filter(|table| !taken.contains(table));
        for (ip, table) in ips.iter().zip(free_tables) {
            plan.rules.push(Rule::from_host(ip.address.address(), table));
            let copied = routes_of_address(ip, ips, &interface_routes);
            let table_routes = routes_of_table(ip, conf, link, copied);
            plan.table_routes.extend(table_routes.iter().map(|route| route.in_table(table)));
        }
        // The route to fe80::/64 stays: packets with a link-local source address match no rule, and
        // so use the main table.
        plan.moved = interface_routes;
        plan.moved.retain(|route| !route.routes().iter().any(is_link_local));
        if main_table == MainTable::SourceHints {
            let addresses = netlink.list_addresses(link.index)?;
            plan.add_hints(link, ips, &addresses);
        }
        Ok(plan)
    }

    /// Implements `addSourceHints`: the main table gets a hint for each address, which is a route
    /// to the network of the address, with the address as the source. The main table keeps the
    /// routes of link scope that do not conflict with a hint. IPv6 routes have no scope, so only
    /// IPv4 routes are kept, as in Go's plugin.
    ///
    /// `addresses` are the addresses of the interface. The kernel refuses a tentative IPv6 address
    /// as a source. The hint for such an address has no source, and the kernel chooses one.
    fn add_hints(&mut self, link: &Link, ips: &[IpConfig], addresses: &[Addr]) {
        let is_tentative = |ip: IpAddr| addresses.iter().any(|addr| addr.cidr.address() == ip && addr.tentative);
        let hint = |ip: &IpConfig| Route {
            source: Some(ip.address.address()).filter(|source| !is_tentative(*source)),
            scope: Some(SCOPE_LINK),
            ..Route::new(ip.address.network(), None, link.index)
        };
        let hints: Vec<Route> = ips.iter().map(hint).collect();
        let has_conflict = |route: &Route| hints.iter().any(|hint| hint.conflicts_with(route));
        let must_move = |route: &Route| route.scope != Some(SCOPE_LINK) || has_conflict(route);
        self.moved.retain(|saved| saved.routes().iter().any(must_move));
        self.hints = hints.iter().map(SavedRoute::from).collect();
    }

    /// Makes the changes. Registers the undo of a change on `rollback` before making the change.
    ///
    /// # Errors
    /// Code 100 if the kernel refuses a change.
    pub(crate) fn carry_out(self, netlink: &Netlink, rollback: &mut Rollback<'_>) -> Result<()> {
        for route in self.table_routes {
            let (undo_netlink, added) = (netlink.clone(), route.clone());
            rollback.push("delete a copied route", move || undo_netlink.purge_route(&added));
            netlink.append_route(&route)?;
        }
        for rule in self.rules {
            let undo_netlink = netlink.clone();
            rollback.push(format!("delete rule {rule}"), move || undo_netlink.purge_rule(&rule));
            netlink.add_rule(&rule)?;
        }
        // Undos run in reverse order. The hints must be deleted before the routes are restored,
        // because they conflict, so this undo is registered first.
        let (undo_netlink, removed) = (netlink.clone(), self.moved.clone());
        rollback.push("put the routes of the main table back", move || undo_netlink.append_routes(&removed));
        for hint in self.hints {
            let (undo_netlink, added) = (netlink.clone(), hint.clone());
            rollback.push("delete a route with a source hint", move || undo_netlink.purge_route(&added));
            netlink.append_route(&hint)?;
        }
        for route in &self.moved {
            netlink.purge_route(route)?;
        }
        Ok(())
    }
}

/// Returns the routes that packets from the address `ip` need: all `routes` of the address's
/// family, except those whose gateway or source is in the network of another address in `ips` but
/// not in the network of `ip`.
fn routes_of_address(ip: &IpConfig, ips: &[IpConfig], routes: &[SavedRoute]) -> Vec<SavedRoute> {
    let is_of_other_address = |route: &SavedRoute| {
        !route.belongs_to(ip.address.network()) && ips.iter().any(|other| route.belongs_to(other.address.network()))
    };
    let family = Family::of(ip.address.address());
    routes.iter().filter(|route| route.family() == family && !is_of_other_address(route)).cloned().collect()
}

/// Returns the routes for the table of the address `ip`: `copied` and, if there is a gateway, a
/// default route. A configured gateway replaces the default routes in `copied`. The gateway of `ip`
/// is only used if no copied route has the same destination and metric as the default route through
/// that gateway.
///
/// Routes with a gateway come last: the kernel accepts such a route only if it can already reach
/// the gateway.
fn routes_of_table(ip: &IpConfig, conf: &Conf, link: &Link, mut copied: Vec<SavedRoute>) -> Vec<SavedRoute> {
    let address = ip.address.address();
    let family = Family::of(address);
    let default_through = |gateway: IpAddr| Route::new(Cidr::default_route(address), Some(gateway), link.index);
    let is_default = |route: &SavedRoute| route.routes().iter().any(|route| route.dst.is_default_route());
    if let Some(gateway) = conf.gateway(family) {
        copied.retain(|route| !is_default(route));
        copied.push(SavedRoute::from(&default_through(gateway)));
    } else if let Some(gateway) = ip.gateway.filter(|gateway| Family::of(*gateway) == family) {
        let default = default_through(gateway);
        if !copied.iter().any(|route| route.routes().iter().any(|route| route.conflicts_with(&default))) {
            copied.push(SavedRoute::from(&default));
        }
    }
    copied.sort_by_key(|route| route.routes().iter().any(|route| route.gw.is_some()));
    copied
}

/// Whether the route's destination is IPv6 link-local (`fe80::/10`).
fn is_link_local(route: &Route) -> bool {
    matches!(route.dst.address(), IpAddr::V6(v6) if v6.is_unicast_link_local())
}
