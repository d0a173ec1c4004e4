//! Implements DEL: removes the rules of the interface.

use std::net::IpAddr;

use cni::skel::Call;
use cni::{Cidr, Error, Result};
use cni_linux::{Family, Netlink, Netns};
use cni_plugin::identity::{Identity, identify};

use crate::addresses_of;
use crate::conf::Conf;

/// Removes the rules whose source is an address of the interface, from the configured table or,
/// if there is none, from all tables. The kernel removes the routes together with the
/// interface.
///
/// The addresses are those of `prevResult`. Those that the interface has only count if
/// `prevResult` is missing or invalid. If the interface has the mark of another attachment,
/// CNI_NETNS leads to another container, and nothing is removed.
///
/// # Errors
/// All errors of the kernel, joined. The rules of every family are tried, even after an error.
pub(crate) fn del(call: &Call<'_>) -> Result<()> {
    let Some(netns) = Netns::open_if_exists(call.netns.as_deref())? else { return Ok(()) };
    let table = match Conf::new(&call.conf) {
        Ok(Conf::Table(table)) => Some(table),
        Ok(Conf::FreeTables { .. }) => None,
        Err(error) => {
            call.notes.note(format_args!(
                "sbr: the configuration is not used, so rules are removed from every table: {error}"
            ));
            None
        }
    };
    let netlink = netns.run(Netlink::open)??;
    let link = netlink.find_link(&call.ifname)?;
    let prev = call.conf.prev_result().ok().flatten();
    if let Some(link) = &link
        && identify(call, prev.as_ref(), link)? == Identity::Other
    {
        call.notes.note(format_args!(
            "sbr: no rule was removed: {} in {} belongs to another attachment",
            link.name,
            netns.path().display()
        ));
        return Ok(());
    }
    let addresses: Vec<IpAddr> = match (&prev, &link) {
        (Some(prev), _) => addresses_of(prev, &call.ifname).iter().map(|ip| ip.address.address()).collect(),
        (None, Some(link)) => netlink.list_addresses(link.index)?.iter().map(|addr| addr.cidr.address()).collect(),
        (None, None) => return Ok(()),
    };
    let mut errors = Vec::new();
    for family in Family::ALL {
        let rules = netlink.list_rules(family).unwrap_or_else(|error| {
            errors.push(error.into());
            Vec::new()
        });
        for rule in &rules {
            let has_table = table.is_none_or(|table| rule.table == table);
            let is_of_interface = addresses.iter().any(|address| rule.source == Some(Cidr::host(*address)));
            if has_table && is_of_interface {
                errors.extend(netlink.purge_rule(rule).err().map(Error::from));
            }
        }
    }
    Error::join(errors)
}
