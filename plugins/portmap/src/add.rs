//! Implements ADD: determines addresses and ports, and writes the rules.
//!
//! The order is: the search for an interface without `route_localnet`, the rules, that sysctl, and
//! the deletion of tracked connections that older rules for the same ports have mapped elsewhere.

use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Cidr, Code, Error, Result};
use cni_firewall::portmap::{Forwarding, PortMap, Refusal, Snat};
use cni_linux::conntrack::{Conntrack, FlushScope};
use cni_linux::route::Family;
use cni_linux::{Link, Netlink, sysctl};

use crate::conf::Conf;

/// Maps the configured ports to the addresses in `prev`, and pushes the undo onto `rollback`. If no
/// port is configured, only removes dead containers' rules to the addresses. If `prev` has no
/// address of the container, changes nothing.
///
/// # Errors
/// - Code 102 if another container that exists has one of the ports.
/// - Code 2 if the configured backend cannot be used on this host.
/// - Code 7 if nftables cannot parse a condition.
/// - The kernel's or iptables' error otherwise.
pub(crate) fn add<'a>(call: &'a Call<'_>, conf: &Conf, prev: &AddResult, rollback: &mut Rollback<'a>) -> Result<()> {
    let host_interfaces = prev.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    let forwarding = Forwarding {
        links: host_interfaces.map(|interface| interface.name.clone()).collect(),
        ..configured_forwarding(call, conf, container_addresses(&call.ifname, prev))
    };
    let wanted_ports = forwarding.all_claims();
    if wanted_ports.is_empty() && !conf.mappings.is_empty() {
        call.notes.note("portmap: no port is mapped: prevResult has no address that a mapping can use");
    }
    if conf.mappings.is_empty() || forwarding.containers.is_empty() {
        PortMap::new(call.machine, call.notes.clone()).remove_stale(&forwarding);
        return Ok(());
    }
    let link_without_localnet = find_link_without_localnet(call, &forwarding);
    // Even if no port is wanted, the chains are written, because Go's CHECK looks for them.
    write_rules(call, conf, &forwarding, rollback)?;
    if let Some(link) = link_without_localnet {
        // The rollback does not reset the sysctl: other attachments may share the interface, for
        // example a bridge.
        match sysctl::write(&localnet_key(&link), "1") {
            // The interface was deleted meanwhile, or has no IPv4.
            Err(error) if error.is_not_found() => note_no_localnet(call, &error),
            Err(error) => return Err(Error::from(error).context("unable to enable route_localnet")),
            Ok(()) => {}
        }
    }
    // A failure is only a note: the ports are mapped, and only packets of already tracked
    // connections may still go elsewhere.
    if let Err(error) = Conntrack::open().and_then(|mut table| table.flush(&wanted_ports, FlushScope::Others)) {
        call.notes.note(format_args!("portmap: {error}"));
    }
    Ok(())
}

/// Writes the rules, and pushes the undo onto `rollback` if rules may have been changed, even on an
/// error.
///
/// # Errors
/// As [`add`], for which this converts the [`Refusal`].
fn write_rules<'a>(
    call: &'a Call<'_>,
    conf: &Conf,
    forwarding: &Forwarding,
    rollback: &mut Rollback<'a>,
) -> Result<()> {
    let open = || PortMap::new(call.machine, call.notes.clone());
    let mut changed = None;
    let outcome = open().ensure(forwarding, conf.backend, &mut changed);
    if let Some(backend) = changed {
        let forwarding = forwarding.clone();
        rollback.push("remove the host ports", move || open().undo(&forwarding, backend));
    }
    outcome.map_err(|refusal| match refusal {
        Refusal::Failed(error) => error.into(),
        Refusal::Unusable { backend, error } => Error::from(error)
            .context(format!("\"backend\": \"{}\" cannot be used on this host", backend.name()))
            .with_code(Code::UNSUPPORTED_FIELD),
        Refusal::PortTaken(holder) => Error::new(Code::CONFLICT, holder)
            .with_details("that container is alive; \"portConflict\": \"ignore\" maps the port anyway"),
        Refusal::Condition { token, why } => {
            Error::config(format!("conditionsV4 or conditionsV6 cannot be parsed from {token:?} on: {why}"))
        }
    })
}

/// Returns the configured port mappings to the addresses `containers`. `links`, the names of the
/// attachment's interfaces on the host, stays empty: only ADD needs them.
pub(crate) fn configured_forwarding(call: &Call<'_>, conf: &Conf, containers: Vec<Cidr>) -> Forwarding {
    Forwarding {
        attachment: call.attachment(),
        containers,
        mappings: conf.mappings.clone(),
        snat: conf.snat,
        set_mark: conf.set_mark.clone(),
        conditions_v4: conf.conditions_v4.clone(),
        conditions_v6: conf.conditions_v6.clone(),
        policy: conf.policy,
        links: Vec::new(),
    }
}

/// Returns the first IPv4 and the first IPv6 address in `prev` that is the container's: its
/// interface is `ifname` in a container, or `prev` does not name an interface for it.
pub(crate) fn container_addresses(ifname: &str, prev: &AddResult) -> Vec<Cidr> {
    let is_of_container = |index: Option<usize>| match index.and_then(|index| prev.interfaces.get(index)) {
        Some(interface) => interface.name == ifname && !interface.sandbox.is_empty(),
        None => true,
    };
    let first_of_family = |family: Family| {
        let mut addresses = prev.ips.iter().filter(|ip| is_of_container(ip.interface)).map(|ip| ip.address);
        addresses.find(|address| Family::of(address.address()) == family)
    };
    [Family::V4, Family::V6].into_iter().filter_map(first_of_family).collect()
}

/// Prints a note that the loopback address is not mapped.
pub(crate) fn note_no_localnet(call: &Call<'_>, error: &cni_linux::Error) {
    call.notes.note(format_args!("portmap: route_localnet is not set, so 127.0.0.1 is not mapped: {error}"));
}

/// Returns the interface to the container if its sysctl `route_localnet` is off: then 127.0.0.1 is
/// not mapped, because the kernel sends no packets with a loopback address through the interface.
/// `None` if no IPv4 port is mapped, or the configuration excludes 127.0.0.1 with `"snat": false`.
///
/// Also `None`, with a note, if the kernel cannot name the interface, for example because the host
/// has no route to the container. Then only 127.0.0.1 is not mapped.
pub(crate) fn find_link_without_localnet(call: &Call<'_>, forwarding: &Forwarding) -> Option<Link> {
    if forwarding.snat == Snat::No {
        return None;
    }
    let request = forwarding.families().find(|request| request.family == Family::V4)?;
    let find_link = || {
        let netlink = Netlink::open()?;
        netlink.find_link_by_index(netlink.outgoing_interface(request.container.address())?)
    };
    let link = find_link().unwrap_or_else(|error| {
        note_no_localnet(call, &error);
        None
    });
    link.filter(|link| !link.ipv4.is_some_and(|ipv4| ipv4.route_localnet))
}

/// Returns the name of the link's sysctl `route_localnet`.
pub(crate) fn localnet_key(link: &Link) -> String {
    format!("net/ipv4/conf/{}/route_localnet", link.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::config::NetConf;

    #[test]
    fn addresses_without_a_known_interface_count_as_the_containers() {
        let prev = |ips: &str| {
            let text = format!(
                r#"{{"cniVersion":"1.0.0","name":"n","prevResult":{{"interfaces":[{{"name":"br0"}},
                {{"name":"eth0"}},{{"name":"eth0","sandbox":"/x"}},{{"name":"eth1","sandbox":"/x"}}],"ips":[{ips}]}}}}"#
            );
            let prev = NetConf::parse(text).unwrap().prev_result().unwrap().unwrap();
            container_addresses("eth0", &prev).iter().map(Cidr::to_string).collect::<Vec<_>>()
        };
        for (index, ours) in [("0", false), ("1", false), ("2", true), ("3", false), ("9", true), ("null", true)] {
            let found = prev(&format!(r#"{{"address":"10.0.0.2/24","interface":{index}}}"#));
            assert_eq!(found.len(), usize::from(ours), "interface {index}");
        }
        let found = prev(
            r#"{"address":"fd00::2/64"},{"address":"10.0.0.9/24","interface":3},{"address":"10.0.0.2/24"},
            {"address":"10.0.0.3/24"}"#,
        );
        assert_eq!(found, ["10.0.0.2/24", "fd00::2/64"]);
    }
}
