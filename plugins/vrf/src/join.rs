//! Implements ADD in two steps: [`Plan::new`] reads and checks the kernel's state and decides what
//! to change, [`Plan::carry_out`] changes it.

use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::{Code, Error, Result};
use cni_linux::route::{LOCAL_TABLE, MAIN_TABLE};
use cni_linux::rule::tables_in_use;
use cni_linux::{Family, Link, Netlink, SavedAddr, SavedRoute};

use crate::conf::Conf;
use crate::{different_table_text, find_vrf};

/// What ADD needs for its changes in the container's namespace.
#[derive(Debug)]
pub(crate) struct Plan {
    vrf: Target,
    /// CNI_IFNAME.
    link: Link,
    /// The interface's IPv6 addresses, which the kernel deletes when the interface joins.
    addresses: Vec<SavedAddr>,
    /// The interface's routes, which the kernel deletes too. Does not include the routes that the
    /// kernel adds with each address.
    routes: Vec<SavedRoute>,
    /// The same routes as they are added again: those of the main table are in the VRF's table.
    moved_routes: Vec<SavedRoute>,
}

/// The VRF that the interface joins, and its routing table.
#[derive(Debug)]
enum Target {
    Existing { index: u32, table: u32 },
    New { name: String, table: u32 },
}

impl Target {
    /// Returns the VRF's table.
    fn table(&self) -> u32 {
        match self {
            Target::Existing { table, .. } | Target::New { table, .. } => *table,
        }
    }
}

impl Plan {
    /// Checks that the interface can join the VRF, and reads the addresses and routes that have to
    /// be restored afterwards. `prev` is the result of the earlier plugins.
    ///
    /// # Errors
    /// - Code 102 if another kind of interface has the VRF's name, the VRF's table is not the
    ///   configured one, or the interface already is in a bridge, bond or VRF.
    /// - Code 4 if the interface does not exist.
    /// - Code 100 if the kernel cannot list its links, addresses, routes or rules.
    pub(crate) fn new(netlink: &Netlink, conf: &Conf, ifname: &str, prev: &AddResult) -> Result<Plan> {
        let existing = find_vrf(netlink, &conf.name)?;
        if let Some(Link { vrf_table: Some(found), .. }) = existing
            && conf.table.is_some_and(|configured| configured != found)
        {
            return Err(Error::new(Code::CONFLICT, different_table_text(&conf.name, found)));
        }
        let missing = || Error::new(Code::INVALID_ENVIRONMENT, format!("could not get link by name {ifname}"));
        let link = netlink.find_link(ifname)?.ok_or_else(missing)?;
        if let Some(master) = link.master {
            let master = netlink.find_link_by_index(master)?.map_or_else(|| master.to_string(), |master| master.name);
            return Err(Error::new(Code::CONFLICT, format!("interface {ifname} has already a master set: {master}")));
        }
        let mut cidrs: Vec<_> = netlink.list_addresses(link.index)?.iter().map(|addr| addr.cidr).collect();
        cidrs.retain(|cidr| !cidr.is_ipv4());
        let addresses = netlink.save_addresses(link.index, &cidrs)?;
        let [v4, v6] = Family::ALL.map(|family| netlink.save_routes(family));
        let all_routes = [v4?, v6?].concat();
        let vrf = match existing {
            Some(Link { index, vrf_table: Some(table), .. }) => Target::Existing { index, table },
            _ => Target::New { name: conf.name.clone(), table: table_for_new_vrf(netlink, conf, &all_routes)? },
        };
        let is_moved = |route: &&SavedRoute| {
            let is_added_by_kernel = || route.routes().iter().any(|route| route.is_connected(link.index));
            route.table_id() != LOCAL_TABLE && route.leaves_by(link.index) && !is_added_by_kernel()
        };
        let routes: Vec<SavedRoute> = all_routes.iter().filter(is_moved).cloned().collect();
        let moved_routes = routes_in_vrf(&routes, &all_routes, &vrf, prev);
        Ok(Plan { vrf, link, addresses, routes, moved_routes })
    }

    /// Creates the VRF if it does not exist, adds the interface to it and restores the interface's
    /// addresses and routes. Routes of the main table go to the VRF's table. Registers the undo of
    /// a change on `rollback` before making the change.
    ///
    /// # Errors
    /// - Code 2 if the kernel does not support VRFs.
    /// - Code 100 if the kernel refuses a change.
    pub(crate) fn carry_out(self, netlink: &Netlink, rollback: &mut Rollback<'_>) -> Result<()> {
        let Plan { vrf, link, addresses, routes, moved_routes } = self;
        let vrf_index = match vrf {
            Target::Existing { index, .. } => index,
            Target::New { name, table } => {
                let (undo_netlink, undo_name) = (netlink.clone(), name.clone());
                rollback.push(format!("delete VRF {name}"), move || match undo_netlink.find_link(&undo_name)? {
                    Some(vrf) if vrf.vrf_table.is_some() => purge_if_empty(&undo_netlink, &vrf),
                    _ => Ok(()),
                });
                create_vrf(netlink, &name, table)?.index
            }
        };
        let (undo_netlink, saved_addresses) = (netlink.clone(), addresses.clone());
        rollback.push(format!("remove {} from its VRF", link.name), move || {
            undo_netlink.unset_master(link.index)?;
            restore(&undo_netlink, &saved_addresses, &routes)
        });
        netlink.set_master(link.index, vrf_index)?;
        Ok(restore(netlink, &addresses, &moved_routes)?)
    }
}

/// Returns the interface's `routes` as they are added again after the interface has joined the VRF:
/// those of the main table in the VRF's table. `all_routes` are all routes of the namespace.
///
/// A default route gets its [original metric](original_metric). If the VRF's table has a default
/// route with that metric, of another interface in the VRF, the route is put behind the default
/// routes of the table: the kernel would merge the two of IPv6 into one route over both interfaces.
fn routes_in_vrf(routes: &[SavedRoute], all_routes: &[SavedRoute], vrf: &Target, prev: &AddResult) -> Vec<SavedRoute> {
    let mut moved_routes: Vec<SavedRoute> = Vec::new();
    for route in routes {
        if route.table_id() != MAIN_TABLE {
            moved_routes.push(route.clone());
            continue;
        }
        let mut moved = route.in_table(vrf.table());
        if route.is_default() {
            let in_vrf = default_metrics(all_routes, route.family(), vrf.table());
            let metric = original_metric(route, all_routes, prev).unwrap_or(route.metric());
            let is_taken = in_vrf.contains(&metric);
            let last = in_vrf.into_iter().max().filter(|_| is_taken);
            moved = moved.with_metric(last.map_or(metric, |last| last.saturating_add(1)));
        }
        moved_routes.push(moved);
    }
    moved_routes
}

/// Returns the metric that a default route of the interface would have without the default routes
/// of other networks; `None` if the route has the metric that was asked for.
///
/// If a default route conflicts with those of other networks, the plugin that created the interface
/// adds the route with the metric of the last one plus one, and lists this metric in its result.
/// The metric that was asked for is recorded nowhere. It was that of another network's route; this
/// returns the lowest of these.
fn original_metric(route: &SavedRoute, all_routes: &[SavedRoute], prev: &AddResult) -> Option<u32> {
    let metric = route.metric();
    let is_listed = prev.routes.iter().any(|listed| {
        let listed_dst = listed.dst.network();
        let is_of_family = Family::of(listed_dst.address()) == route.family();
        listed_dst.is_default_route() && is_of_family && listed.priority == Some(metric)
    });
    let lower: Vec<u32> =
        default_metrics(all_routes, route.family(), MAIN_TABLE).into_iter().filter(|other| *other < metric).collect();
    let is_behind_last = lower.iter().max().is_some_and(|last| last + 1 == metric);
    lower.into_iter().min().filter(|_| is_listed && is_behind_last)
}

/// Returns the metrics of the default routes of one family in one table.
fn default_metrics(routes: &[SavedRoute], family: Family, table: u32) -> Vec<u32> {
    let is_default = |route: &&SavedRoute| route.is_default() && route.family() == family && route.table_id() == table;
    routes.iter().filter(is_default).map(SavedRoute::metric).collect()
}

/// Returns the configured table or, if none is configured, the first table that no rule, route or
/// VRF uses. `routes` are all routes of the namespace.
fn table_for_new_vrf(netlink: &Netlink, conf: &Conf, routes: &[SavedRoute]) -> Result<u32> {
    if let Some(table) = conf.table {
        return Ok(table);
    }
    let [v4_rules, v6_rules] = Family::ALL.map(|family| netlink.list_rules(family));
    let mut taken = tables_in_use(&[v4_rules?, v6_rules?].concat(), routes);
    taken.extend(netlink.list_links()?.iter().filter_map(|link| link.vrf_table));
    Ok((1..).find(|table| !taken.contains(table)).unwrap_or(u32::MAX))
}

/// Creates the VRF.
///
/// # Errors
/// - Code 2 if the kernel does not support VRFs.
/// - Code 100 if the kernel refuses to create it.
fn create_vrf(netlink: &Netlink, name: &str, table: u32) -> Result<Link> {
    netlink.create_vrf(name, table).map_err(|error| {
        let is_unsupported = error.is_unsupported();
        let error = Error::from(error).context(format_args!("could not add VRF {name}"));
        if is_unsupported { error.with_code(Code::UNSUPPORTED_FIELD) } else { error }
    })
}

/// Adds the addresses and routes that the interface has lost by joining or leaving a VRF. Existing
/// ones are left unchanged.
fn restore(netlink: &Netlink, addresses: &[SavedAddr], routes: &[SavedRoute]) -> cni_linux::Result<()> {
    addresses.iter().try_for_each(|address| netlink.restore_address(address))?;
    netlink.append_routes(routes)
}

/// Removes the VRF if no interface is in it.
pub(crate) fn purge_if_empty(netlink: &Netlink, vrf: &Link) -> cni_linux::Result<()> {
    if netlink.list_ports(vrf.index)?.is_empty() {
        netlink.purge_link(vrf.index)?;
    }
    Ok(())
}
