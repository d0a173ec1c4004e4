//! ADD: everything is read and checked ([`Plan::new`]), and then written ([`Plan::carry_out`]).

use cni::rollback::Rollback;
use cni::{Code, Error, Result};
use cni_linux::route::{LOCAL_TABLE, MAIN_TABLE};
use cni_linux::rule::tables_in_use;
use cni_linux::{Family, Link, Netlink, SavedAddr, SavedRoute};

use crate::conf::Conf;
use crate::{different_table, find_vrf};

/// The changes to write.
#[derive(Debug)]
pub(crate) struct Plan {
    vrf: Target,
    link: Link,
    /// The interface's IPv6 addresses.
    addresses: Vec<SavedAddr>,
    /// The interface's routes, those aside that the kernel makes with an address.
    routes: Vec<SavedRoute>,
}

/// The VRF that the interface is to join.
#[derive(Debug)]
enum Target {
    Existing { index: u32, table: u32 },
    New { name: String, table: u32 },
}

impl Plan {
    /// # Errors
    /// 102 if something is in the way, 4 without the interface, 100 if the kernel cannot be asked.
    pub(crate) fn new(netlink: &Netlink, conf: &Conf, ifname: &str) -> Result<Plan> {
        let existing = find_vrf(netlink, &conf.name)?;
        if let Some(Link { vrf_table: Some(found), .. }) = existing
            && conf.table.is_some_and(|wanted| wanted != found)
        {
            return Err(Error::new(Code::CONFLICT, different_table(&conf.name, found)));
        }
        let missing = || Error::new(Code::INVALID_ENVIRONMENT, format!("could not get link by name {ifname}"));
        let link = netlink.find_link(ifname)?.ok_or_else(missing)?;
        if let Some(master) = link.master {
            let master = netlink.find_link_by_index(master)?.map_or_else(|| master.to_string(), |master| master.name);
            return Err(Error::new(Code::CONFLICT, format!("interface {ifname} has already a master set: {master}")));
        }
        let addresses = netlink.list_addresses(link.index)?;
        let ipv6: Vec<_> = addresses.iter().map(|addr| addr.cidr).filter(|cidr| !cidr.is_ipv4()).collect();
        let addresses = netlink.save_addresses(link.index, &ipv6)?;
        let [v4, v6] = Family::ALL.map(|family| netlink.save_routes(family));
        let mut routes = [v4?, v6?].concat();
        let vrf = match existing {
            Some(Link { index, vrf_table: Some(table), .. }) => Target::Existing { index, table },
            _ => Target::New { name: conf.name.clone(), table: free_table(netlink, conf, &routes)? },
        };
        routes.retain(|route| {
            let made_with_address = || route.routes().iter().any(|route| route.is_connected(link.index));
            route.table_id() != LOCAL_TABLE && route.leaves_by(link.index) && !made_with_address()
        });
        Ok(Plan { vrf, link, addresses, routes })
    }

    /// Writes it all, with the undo before each effect.
    ///
    /// # Errors
    /// What the kernel refuses; 2 if it has no VRFs.
    pub(crate) fn carry_out(self, netlink: &Netlink, rollback: &mut Rollback<'_>) -> Result<()> {
        let Plan { vrf, link, addresses, routes } = self;
        let (index, table) = match vrf {
            Target::Existing { index, table } => (index, table),
            Target::New { name, table } => {
                let (undo, undone) = (netlink.clone(), name.clone());
                rollback.push(format!("delete VRF {name}"), move || match undo.find_link(&undone)? {
                    Some(vrf) if vrf.vrf_table.is_some() => purge_empty(&undo, &vrf),
                    _ => Ok(()),
                });
                (create(netlink, &name, table)?.index, table)
            }
        };
        let (undo, saved) = (netlink.clone(), (addresses.clone(), routes.clone()));
        rollback.push(format!("take {} off its VRF", link.name), move || {
            undo.unset_master(link.index)?;
            put_back(&undo, &saved.0, &saved.1)
        });
        netlink.set_master(link.index, index)?;
        let moved = routes.iter().map(|route| match route.table_id() {
            MAIN_TABLE => route.in_table(table),
            _ => route.clone(),
        });
        Ok(put_back(netlink, &addresses, &moved.collect::<Vec<_>>())?)
    }
}

/// The configured table, or the first one that nothing uses.
fn free_table(netlink: &Netlink, conf: &Conf, routes: &[SavedRoute]) -> Result<u32> {
    if let Some(table) = conf.table {
        return Ok(table);
    }
    let [v4, v6] = Family::ALL.map(|family| netlink.list_rules(family));
    let mut taken = tables_in_use(&[v4?, v6?].concat(), routes);
    taken.extend(netlink.list_links()?.iter().filter_map(|link| link.vrf_table));
    Ok((1..).find(|table| !taken.contains(table)).unwrap_or(u32::MAX))
}

fn create(netlink: &Netlink, name: &str, table: u32) -> Result<Link> {
    netlink.create_vrf(name, table).map_err(|error| {
        let unsupported = error.is_unsupported();
        let error = Error::from(error).context(format_args!("could not add VRF {name}"));
        if unsupported { error.with_code(Code::UNSUPPORTED_FIELD) } else { error }
    })
}

/// Adds the addresses and routes again. What the kernel has kept is left as it is.
fn put_back(netlink: &Netlink, addresses: &[SavedAddr], routes: &[SavedRoute]) -> cni_linux::Result<()> {
    addresses.iter().try_for_each(|address| netlink.restore_address(address))?;
    // The kernel accepts a gateway only if a route to it is there: behind ptp that is one of these.
    let (through_gateway, direct): (Vec<_>, Vec<_>) =
        routes.iter().partition(|route| route.routes().iter().any(|route| route.gw.is_some()));
    direct.into_iter().chain(through_gateway).try_for_each(|route| netlink.append_route(route))
}

/// Removes a VRF unless an interface is in it.
pub(crate) fn purge_empty(netlink: &Netlink, vrf: &Link) -> cni_linux::Result<()> {
    if netlink.list_ports(vrf.index)?.is_empty() {
        netlink.purge_link(vrf.index)?;
    }
    Ok(())
}
