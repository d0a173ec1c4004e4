//! Decides which routes ADD removes and adds, makes these changes, and takes them back.

use cni::result::{AddResult, Route as ResultRoute};
use cni::rollback::Notes;
use cni_linux::route::MAIN_TABLE;
use cni_linux::{Family, Netlink, Result, Route, SavedRoute};
use cni_plugin::interface::{kernel_route, merge_conflicting};

use crate::conf::Conf;

/// The routes that one ADD removes and adds.
#[derive(Debug, Default)]
pub(crate) struct Change {
    /// The routes to remove.
    pub(crate) removed: Vec<SavedRoute>,
    /// The routes to add, each with its paths.
    added: Vec<Vec<Route>>,
    /// The routes that exist afterwards because of the configuration, as the result lists them.
    pub(crate) listed: Vec<ResultRoute>,
}

impl Change {
    /// Decides what to change. `links` are the indexes of the attachment's interfaces, and `index`
    /// is that of CNI_IFNAME, over which routes are added.
    ///
    /// A default route that conflicts with one over another interface gets the metric behind the
    /// existing default routes, which keep the traffic, as with the plugins that create interfaces.
    /// A note reports it.
    pub(crate) fn new(netlink: &Netlink, links: &[u32], index: u32, conf: &Conf, notes: &Notes) -> Result<Change> {
        let (removed, remaining): (Vec<_>, Vec<_>) =
            list(netlink)?.into_iter().partition(|route| is_removed(route, links, conf));
        let mut change = Change { removed, ..Change::default() };
        let remaining: Vec<Route> = remaining.iter().flat_map(SavedRoute::routes).collect();
        change.listed.clone_from(&conf.added);
        for mut paths in merge_conflicting(&kernel_routes(&conf.added, index)) {
            let first = paths[0];
            let existing: Vec<&Route> = remaining.iter().filter(|route| route.conflicts_with(&first)).collect();
            let exists =
                existing.len() == paths.len() && existing.iter().zip(&paths).all(|(one, path)| one.is_same(path));
            let is_elsewhere = !existing.is_empty() && existing.iter().all(|route| !links.contains(&route.oif));
            if first.dst.is_default_route() && is_elsewhere {
                let defaults =
                    remaining.iter().filter(|route| route.table_id() == MAIN_TABLE && route.dst == first.dst);
                let metric = defaults.map(Route::metric).max().map_or(0, |last| last.saturating_add(1));
                let is_one_of = |listed: &&mut ResultRoute| kernel_route(listed, None, index).conflicts_with(&first);
                change.listed.iter_mut().filter(is_one_of).for_each(|listed| listed.priority = Some(metric));
                paths.iter_mut().for_each(|path| path.priority = Some(metric));
                notes.note(format_args!(
                    "{first} is added with metric {metric}, behind the default route of another network"
                ));
            }
            if !exists {
                change.added.push(paths);
            }
        }
        Ok(change)
    }

    /// Whether nothing is changed.
    pub(crate) fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.added.is_empty()
    }

    /// Returns the routes to add, as they are recorded.
    pub(crate) fn added(&self) -> Vec<SavedRoute> {
        self.added.iter().filter_map(|paths| SavedRoute::over(paths)).collect()
    }

    /// Makes the changes.
    ///
    /// # Errors
    /// The kernel refuses one of them. The earlier ones stay.
    pub(crate) fn carry_out(&self, netlink: &Netlink) -> Result<()> {
        self.removed.iter().try_for_each(|route| netlink.purge_route(route))?;
        self.added.iter().try_for_each(|paths| netlink.add_multipath_route(paths))
    }
}

/// Takes changes back, of which any part may have been made: removes the `added` routes that exist,
/// and adds the `removed` ones that do not. Continues after an error, and returns the first one.
pub(crate) fn take_back(netlink: &Netlink, removed: &[SavedRoute], added: &[SavedRoute]) -> Result<()> {
    let mut existing = list(netlink)?;
    existing.retain(|route| added.iter().any(|added| added.is_same(route)));
    let purged = existing.iter().map(|route| netlink.purge_route(route)).fold(Ok(()), Result::and);
    purged.and(netlink.append_routes(removed))
}

/// Returns a text for each route that should exist and does not, or should not and does. `prev` is
/// the result of the whole list: a route that it lists is one of a later plugin, and a route that
/// it does not list was removed by a later plugin.
///
/// A missing route is looked for in all tables, because later plugins (sbr, vrf) move routes, and
/// with any metric.
pub(crate) fn differences(
    netlink: &Netlink,
    links: &[u32],
    index: u32,
    conf: &Conf,
    prev: &AddResult,
) -> Result<Vec<String>> {
    let mut differences = Vec::new();
    let is_listed = |route: &Route| prev.routes.iter().any(|listed| lists(listed, route));
    let existing = list(netlink)?;
    for expected in kernel_routes(&conf.added, index).into_iter().filter(is_listed) {
        let is_expected = |route: &Route| (route.dst, route.gw, route.oif) == (expected.dst, expected.gw, expected.oif);
        if !existing.iter().flat_map(SavedRoute::routes).any(|route| is_expected(&route)) {
            differences.push(format!("route {expected} does not exist"));
        }
    }
    for route in existing.iter().filter(|route| is_removed(route, links, conf)).flat_map(SavedRoute::routes) {
        if !is_listed(&route) {
            differences.push(format!("route {route} exists, but ADD has removed it"));
        }
    }
    Ok(differences)
}

/// Whether `listed`, a route of a result, is `route`. A listed route without a gateway may have any
/// gateway.
pub(crate) fn lists(listed: &ResultRoute, route: &Route) -> bool {
    let gateways = listed.gateways();
    listed.dst.network() == route.dst && (gateways.is_empty() || route.gw.is_some_and(|gw| gateways.contains(&gw)))
}

/// Returns the routes of both families in all tables.
fn list(netlink: &Netlink) -> Result<Vec<SavedRoute>> {
    let [v4, v6] = Family::ALL.map(|family| netlink.save_routes(family));
    Ok([v4?, v6?].concat())
}

/// Whether ADD removes this route: it is in the main table, leaves by one of `links`, the
/// attachment's interfaces, and the configuration removes it.
fn is_removed(route: &SavedRoute, links: &[u32], conf: &Conf) -> bool {
    route.table_id() == MAIN_TABLE
        && links.iter().any(|link| route.leaves_by(*link))
        && route.routes().iter().any(|route| conf.removes(route))
}

/// Returns the kernel's routes for routes of the configuration, one for each gateway, over the
/// interface `index`.
fn kernel_routes(routes: &[ResultRoute], index: u32) -> Vec<Route> {
    routes.iter().flat_map(ResultRoute::paths).map(|path| kernel_route(&path, path.gw, index)).collect()
}
