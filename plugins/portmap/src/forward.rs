//! ADD: which addresses and ports, with which backend, and the rules in force.
//!
//! The order: what can be refused without a change, the rules, what they need of the host
//! (`route_localnet`), and last the connections that the kernel still remembers by older rules.

use cni::config::NetConf;
use cni::machine::OnSigterm;
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Cidr, Code, Error, Result};
use cni_firewall::iptables::{Iptables, Table};
use cni_firewall::nft_usable;
use cni_firewall::portmap::iptables::{IptablesPortMap, UnreadTables};
use cni_firewall::portmap::nft::NftPortMap;
use cni_firewall::portmap::{ConflictAction, Conflicts, EnsureOutcome, Forwarding, Holder, Snat};
use cni_linux::conntrack::{Conntrack, FlushScope};
use cni_linux::route::Family;
use cni_linux::{Netlink, sysctl};

use crate::conf::Conf;
use cni_firewall::Backend;

pub(crate) fn add<'a>(call: &'a Call<'_>, conf: &Conf, prev: &AddResult) -> Result<Rollback<'a>> {
    let mut rollback = call.rollback();
    let links = prev.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    let wanted = Forwarding {
        links: links.map(|interface| interface.name.clone()).collect(),
        ..forwarding(call, conf, containers(&call.ifname, prev))
    };
    let claims = wanted.all_claims();
    if claims.is_empty() && !conf.mappings.is_empty() {
        call.notes.note("portmap: no port is mapped: prevResult has no address that a mapping can use");
    }
    if conf.mappings.is_empty() || wanted.containers.is_empty() {
        displace_stale(call, &wanted);
        return Ok(rollback);
    }
    // Without a route to the container only this does not work, and another node may route.
    let localnet = localnet_key(&wanted).unwrap_or_else(|error| {
        note_no_localnet(call, &error);
        None
    });
    let backend = backend(call, conf)?;
    if let Err(error) = establish(call, &wanted, backend, &mut rollback) {
        if conf.backend.is_some() || backend == Backend::Nftables || !is_useless(call, &wanted, &error) {
            return Err(error);
        }
        call.notes.note(format_args!("portmap: iptables does not work here, nftables is used: {error}"));
        establish(call, &wanted, Backend::Nftables, &mut rollback)?;
    }
    if let Some(key) = localnet {
        match sysctl::ensure(&key, "1") {
            // The interface was deleted meanwhile, or has no IPv4.
            Err(error) if error.is_not_found() => note_no_localnet(call, &error.into()),
            Err(error) => return Err(Error::from(error).context("unable to enable route_localnet")),
            Ok(_) => {}
        }
    }
    // The mapping works without; only connections that are under way may be lost a little longer.
    let forgotten = Conntrack::open().and_then(|mut table| table.forget(&claims, FlushScope::Others));
    if let Err(error) = forgotten {
        call.notes.note(format_args!("portmap: {error}"));
    }
    Ok(rollback)
}

/// Removes rules that lead from a port of a removed container to this container. A failure does not
/// fail an ADD that maps nothing, and the lock of iptables is taken only if there is something to
/// remove.
fn displace_stale(call: &Call<'_>, wanted: &Forwarding) {
    let nft = |then| match NftPortMap::open() {
        Ok(mut nft) => nft.conflicts(wanted, then),
        Err(error) if error.is_unsupported() => Ok(Conflicts::default()),
        Err(error) => Err(error),
    };
    let iptables = |then| iptables(call, OnSigterm::Kill)?.conflicts(wanted, UnreadTables::Both, then);
    let looks: [&dyn Fn(ConflictAction) -> cni_linux::Result<Conflicts>; 2] = [&nft, &iptables];
    for look in looks {
        let conflicts = match look(ConflictAction::Keep) {
            Ok(conflicts) if conflicts.found_dead => look(ConflictAction::Displace),
            conflicts => conflicts,
        };
        match conflicts {
            Ok(conflicts) => {
                conflicts.remarks.iter().for_each(|remark| call.notes.note(format_args!("portmap: {remark}")))
            }
            Err(error) => call
                .notes
                .note(format_args!("portmap: failed to look for stale rules to the container's addresses: {error}")),
        }
    }
}

/// Puts the rules in force, or leaves everything as it was.
fn establish<'a>(call: &'a Call<'_>, wanted: &Forwarding, backend: Backend, rollback: &mut Rollback<'a>) -> Result<()> {
    let elsewhere = conflicts(call, wanted, backend, ConflictAction::Keep)?;
    if let Some(holder) = elsewhere.held {
        return Err(conflict(&holder));
    }
    let remarks = match backend {
        Backend::Nftables => {
            let mut nft = NftPortMap::open().map_err(|error| unserved(error, Backend::Nftables))?;
            let ensured = nft.ensure(call.machine, wanted).map_err(|error| refusal(error, Backend::Nftables))?;
            let (previous, remarks) = done(ensured)?;
            if let Some(previous) = previous {
                let wanted = wanted.clone();
                rollback.push(TAKE_BACK, move || NftPortMap::open()?.put_back(&wanted, &previous));
            }
            remarks
        }
        Backend::Iptables => {
            let ensured = iptables(call, OnSigterm::Kill)?.ensure(wanted);
            let ensured = ensured.map_err(|error| without_programs(call, wanted, error))?;
            let (previous, remarks) = done(ensured)?;
            if let Some(previous) = previous {
                let wanted = wanted.clone();
                rollback.push(TAKE_BACK, move || iptables(call, OnSigterm::Finish)?.put_back(&wanted, &previous));
            }
            remarks
        }
    };
    for remark in remarks.iter().chain(&elsewhere.remarks) {
        call.notes.note(format_args!("portmap: {remark}"));
    }
    // Displaced only now that the ports lead to this container. If it fails, the old rules stay
    // beside the new ones.
    if elsewhere.found_dead
        && let Err(error) = conflicts(call, wanted, backend, ConflictAction::Displace)
    {
        call.notes.note(format_args!("portmap: failed to displace what is gone: {error}"));
    }
    Ok(())
}

/// Whether iptables has failed because it does not work on this host, where nftables does. Costs a
/// process, so it is asked only after a failure.
fn is_useless(call: &Call<'_>, wanted: &Forwarding, error: &Error) -> bool {
    if [Code::TRY_AGAIN, Code::CONFLICT].contains(&error.code()) {
        return false;
    }
    let works = |mut iptables: Iptables<'_>| {
        let mut families = wanted.families().map(|(container, _)| Family::of(container.address()));
        families.all(|family| iptables.probe(family).is_ok())
    };
    let opened = Iptables::open(Table::Nat, call.machine, call.notes.clone(), OnSigterm::Kill);
    opened.is_ok_and(|iptables| !works(iptables)) && matches!(nft_usable(), Ok(true))
}

/// Completes the sentence "failed to ...".
const TAKE_BACK: &str = "put the host ports back as they were";

fn iptables<'m>(call: &Call<'m>, on_sigterm: OnSigterm) -> cni_linux::Result<IptablesPortMap<'m>> {
    IptablesPortMap::open(call.machine, call.notes.clone(), on_sigterm)
}

/// Returns the earlier rules, if anything has changed, and the remarks.
fn done<PreviousRules>(ensured: EnsureOutcome<PreviousRules>) -> Result<(Option<PreviousRules>, Vec<String>)> {
    match ensured {
        EnsureOutcome::Done { previous, remarks } => Ok((previous, remarks)),
        EnsureOutcome::Held(holder) => Err(conflict(&holder)),
    }
}

fn conflict(holder: &Holder) -> Error {
    Error::new(Code::CONFLICT, holder.to_string())
        .with_details("that container is alive; \"portConflict\": \"ignore\" maps the port anyway")
}

/// Returns the holders of the ports in the backend that is not used.
fn conflicts(call: &Call<'_>, wanted: &Forwarding, backend: Backend, then: ConflictAction) -> Result<Conflicts> {
    let unread = match backend {
        Backend::Nftables => UnreadTables::Both,
        Backend::Iptables => UnreadTables::OtherVariant,
    };
    let mut all = iptables(call, OnSigterm::Kill)?.conflicts(wanted, unread, then)?;
    if backend == Backend::Iptables && all.held.is_none() {
        match NftPortMap::open().and_then(|mut nft| nft.conflicts(wanted, then)) {
            Ok(more) => {
                all.held = more.held;
                all.found_dead |= more.found_dead;
                all.remarks.extend(more.remarks);
            }
            Err(error) if error.is_unsupported() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(all)
}

/// Returns the port mappings that this attachment wants.
pub(crate) fn forwarding(call: &Call<'_>, conf: &Conf, containers: Vec<Cidr>) -> Forwarding {
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

/// The first address of each family that is the container's interface's, or could be: without an
/// interface, or with one that the result does not list.
pub(crate) fn containers(ifname: &str, prev: &AddResult) -> Vec<Cidr> {
    let is_ours = |index: Option<usize>| match index.and_then(|index| prev.interfaces.get(index)) {
        Some(interface) => interface.name == ifname && !interface.sandbox.is_empty(),
        None => true,
    };
    let first = |v4: bool| {
        let mut ips = prev.ips.iter().filter(|ip| ip.address.is_ipv4() == v4 && is_ours(ip.interface));
        ips.next().map(|ip| ip.address)
    };
    [first(true), first(false)].into_iter().flatten().collect()
}

/// The addresses that the earlier result gives the container, if there is one that can be read.
pub(crate) fn known_addresses(conf: &NetConf, ifname: &str) -> Result<Vec<std::net::IpAddr>> {
    let prev = conf.prev_result()?;
    Ok(prev.map_or_else(Vec::new, |prev| containers(ifname, &prev).iter().map(|cidr| cidr.address()).collect()))
}

/// The backend that is asked for; else iptables, unless its programs are not there. Whether they
/// work shows when they are used.
pub(crate) fn backend(call: &Call<'_>, conf: &Conf) -> Result<Backend> {
    if let Some(backend) = conf.backend {
        return Ok(backend);
    }
    let chosen =
        Iptables::open(Table::Nat, call.machine, call.notes.clone(), OnSigterm::Kill)?.chosen_variant(Family::V4)?;
    Ok(if chosen.is_some() { Backend::Iptables } else { Backend::Nftables })
}

pub(crate) fn note_no_localnet(call: &Call<'_>, error: &Error) {
    call.notes.note(format_args!("portmap: route_localnet is not set, so 127.0.0.1 is not mapped: {error}"));
}

/// Answers from a container to a client at 127.0.0.1 arrive from outside with a loopback address,
/// which the kernel refuses unless the interface allows it. `None` if that is not wanted.
///
/// # Errors
/// The host has no route to the container.
pub(crate) fn localnet_key(wanted: &Forwarding) -> Result<Option<String>> {
    let v4 = wanted.families().map(|(container, _)| container).find(|container| container.is_ipv4());
    let Some(container) = v4.filter(|_| wanted.snat != Snat::No) else { return Ok(None) };
    let netlink = Netlink::open()?;
    let index = netlink.outgoing_interface(container.address())?;
    let link = netlink.find_link_by_index(index)?;
    Ok(link.map(|link| format!("net/ipv4/conf/{}/route_localnet", link.name)))
}

fn unserved(error: cni_linux::Error, backend: Backend) -> Error {
    let unsupported = error.is_unsupported();
    let error = Error::from(error);
    if unsupported { absent(error, backend) } else { error }
}

/// Returns the error for iptables' refusal: its programs are missing, or the request is wrong.
fn without_programs(call: &Call<'_>, wanted: &Forwarding, error: cni_linux::Error) -> Error {
    let is_missing = |iptables: Iptables<'_>| {
        let mut families = wanted.families().map(|(container, _)| Family::of(container.address()));
        families.any(|family| matches!(iptables.chosen_variant(family), Ok(None)))
    };
    let opened = Iptables::open(Table::Nat, call.machine, call.notes.clone(), OnSigterm::Kill);
    // Without a program the kernel may have refused what was written over netlink.
    let is_kernels = error.errno().is_some();
    let error = Error::from(error);
    if !is_kernels && opened.is_ok_and(is_missing) { absent(error, Backend::Iptables) } else { error }
}

fn absent(error: Error, backend: Backend) -> Error {
    error
        .context(format!("\"backend\": \"{}\" cannot be used on this host", backend.name()))
        .with_code(Code::UNSUPPORTED_FIELD)
}

fn refusal(error: cni_firewall::portmap::nft::Refusal, backend: Backend) -> Error {
    use cni_firewall::portmap::nft::Refusal;
    match error {
        Refusal::Kernel(error) => unserved(error, backend),
        Refusal::Condition { token, why } => {
            Error::config(format!("the conditions are not understood from {token:?} on: {why}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_without_a_known_interface_count_as_the_containers() {
        let prev = |ips: &str| {
            let text = format!(
                r#"{{"cniVersion":"1.0.0","name":"n","prevResult":{{"interfaces":[{{"name":"br0"}},
                {{"name":"eth0"}},{{"name":"eth0","sandbox":"/x"}},{{"name":"eth1","sandbox":"/x"}}],"ips":[{ips}]}}}}"#
            );
            let prev = NetConf::parse(text).unwrap().prev_result().unwrap().unwrap();
            containers("eth0", &prev).iter().map(Cidr::to_string).collect::<Vec<_>>()
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
