//! The plugin `firewall`: lets packets from and to a container pass the node's filter and, if
//! configured, isolates bridges. It is a chained plugin, and returns the result of the plugin
//! before it unchanged.
//!
//! `conf` reads the configuration. [`cni_firewall::forward`] writes the rules, or `firewalld` adds
//! the addresses to a zone of firewalld instead. The container's namespace is never entered.
//!
//! DEL often has no `prevResult`, and the configuration may have changed since ADD. So DEL looks
//! for the attachment's rules and zone sources in all backends.

mod add;
mod bus;
mod conf;
mod firewalld;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;

use std::cell::LazyCell;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::result::AddResult;
use cni::skel::{Added, Call, Plugin, RestoreMode, Role, missing_rules};
use cni::{Code, Error, Result, file};
use cni_firewall::forward::{self, Egress, Forward, ForwardRules, Ingress};
use cni_firewall::forward::{egress, sources};
use cni_firewall::{AttachmentFilter, Backend, nft_usable};
use cni_linux::{LinkKind, Mac, Netlink};

use conf::{BackendChoice, CleanupConf, Conf, Policy};
use firewalld::Zone;

/// The plugin `firewall`.
#[derive(Clone, Copy, Debug)]
pub struct Firewall;

/// The default folder of libcni's cached results.
const RESULT_CACHE: &str = "/var/lib/cni/results";

/// Go's text for a missing `prevResult`.
const NO_PREV_RESULT: &str = "missing prevResult from earlier plugin";

impl Plugin for Firewall {
    fn name(&self) -> &'static str {
        "firewall"
    }

    fn role(&self) -> Role {
        Role::Chained
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        Conf::new(conf).map(drop)
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    /// Writes the rules for the addresses in `prevResult`, and returns `prevResult` unchanged.
    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let mut rollback = call.rollback();
        let result = add::add(call, &mut rollback)?;
        Ok(Added { result, rollback })
    }

    /// Fails with code 101 and a sentence for each rule, or source of firewalld's zone, that is
    /// missing.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config(NO_PREV_RESULT))?;
        let rules = required_rules(call, &conf, &prev)?;
        let mut missing = find_missing(call, &conf, &rules)?;
        missing.extend(egress::check(&rules)?);
        match missing.as_slice() {
            [] => Ok(()),
            missing => Err(Error::new(Code::CHECK_FAILED, missing.join("; "))),
        }
    }

    /// Removes the attachment's rules and sources, and those of the Go plugin for the addresses in
    /// `prevResult`. An invalid `prevResult` is only noted.
    fn del(&self, call: &Call<'_>) -> Result<()> {
        let addresses = match call.conf.prev_result() {
            Ok(prev) => prev.map_or_else(Vec::new, |prev| addresses(&prev)),
            Err(error) => {
                call.notes.note(format_args!("firewall: prevResult is not used: {error}"));
                Vec::new()
            }
        };
        let conf = CleanupConf::new(&call.conf);
        let attachment = call.attachment();
        let zone_addresses: &[IpAddr] = if conf.may_be_firewalld { &addresses } else { &[] };
        let from_zone = zone(call, &conf.zone).purge(AttachmentFilter::one(&attachment), zone_addresses, &[]);
        // `purge` returns the sources of the Go plugin that it has removed. For one address, that
        // plugin writes either a source or rules. So rules for an address whose source was just
        // removed are another attachment's, and stay. If `purge` failed, which is reported below,
        // each address may have rules.
        let sources_of_go = from_zone.as_deref().unwrap_or_default();
        let other_addresses: Vec<IpAddr> =
            addresses.into_iter().filter(|address| !sources_of_go.contains(address)).collect();
        let filter = AttachmentFilter::for_del(&attachment, &other_addresses);
        // `Vec::new`: only GC has the list of valid attachments that shows the addresses in use.
        let from_rules = forward(call).purge(filter, &Vec::new).map_err(Error::from);
        Error::join([from_rules.err(), from_zone.err()].into_iter().flatten())
    }

    /// Removes the rules and sources of the network's attachments that are not in `valid`.
    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let filter = AttachmentFilter::Garbage { network: call.conf.name(), valid };
        let zone = zone(call, &CleanupConf::new(&call.conf).zone);
        // The addresses of Go's unrecorded sources are not known, and no address is kept.
        let from_zone = zone.purge(filter, &[], &[]);
        // `purge` may need the addresses several times, or not at all.
        let addresses_in_use = LazyCell::new(|| cached_addresses(call, valid));
        let from_rules = forward(call).purge(filter, &|| addresses_in_use.clone()).map_err(Error::from);
        Error::join([from_rules.err(), from_zone.err()].into_iter().flatten())
    }

    /// Fails with code 50 if the backend that ADD would use, or the configured `egress`, does not
    /// work here.
    fn status(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(&call.conf)?;
        if conf.egress.is_some() {
            egress::probe().map_err(|error| not_available(explain_egress(error)))?;
        }
        let backend = match choose_backend(call, &conf).map_err(not_available)? {
            BackendChoice::Rules(backend) => backend,
            BackendChoice::Firewalld => return zone(call, &conf.zone).probe().map_err(not_available),
        };
        // `probe` would also fail without nf_tables, but would not name the key.
        if backend == Backend::Nftables && !nft_usable().map_err(not_available)? {
            return Err(Error::new(
                Code::NOT_AVAILABLE,
                "\"backend\": \"nftables\" cannot be used: this kernel has no nf_tables",
            ));
        }
        forward(call).probe(backend, conf.nftables_admin_chain.as_ref()).map_err(not_available)
    }

    /// Compares the rules as CHECK does and, with [`RestoreMode::Write`] and if one is missing,
    /// writes all of them as ADD does.
    fn restore_rules<'a>(&self, call: &'a Call<'_>, mode: RestoreMode<'_, 'a>) -> Result<Option<Vec<String>>> {
        let missing = missing_rules(self.check(call))?;
        if let RestoreMode::Write(rollback) = mode
            && !missing.is_empty()
        {
            add::add(call, rollback)?;
        }
        Ok(Some(missing))
    }
}

/// Sets an error's code to 50: the plugin is not available here.
fn not_available(error: impl Into<Error>) -> Error {
    error.into().with_code(Code::NOT_AVAILABLE)
}

/// Returns the configured backend. If none is configured, returns firewalld if it is running, as
/// with Go, or else the default of the host.
fn choose_backend(call: &Call<'_>, conf: &Conf) -> Result<BackendChoice> {
    match conf.backend {
        Some(choice) => Ok(choice),
        None if zone(call, &conf.zone).is_running()? => Ok(BackendChoice::Firewalld),
        None => Ok(BackendChoice::Rules(forward(call).default_backend()?)),
    }
}

/// Returns a sentence for each missing rule or source of the zone; empty if none. What is required
/// depends on whether this plugin or Go's has run ADD.
fn find_missing(call: &Call<'_>, conf: &Conf, rules: &ForwardRules) -> Result<Vec<String>> {
    let forward = forward(call);
    let zone = match choose_backend(call, conf)? {
        BackendChoice::Rules(backend) => return Ok(forward.check(rules, backend)?),
        BackendChoice::Firewalld => zone(call, &conf.zone),
    };
    let mut missing = zone.check(&rules.addresses)?;
    let is_recorded = !sources::find(AttachmentFilter::one(&rules.attachment))?.selected.is_empty();
    // If sources are missing and there is no record, firewalld may have started after the ADD. Then
    // the ADD has written rules to the default backend.
    if !missing.is_empty() && !is_recorded && conf.backend.is_none() {
        return Ok(forward.check(rules, forward.default_backend()?)?);
    }
    // A record shows that this plugin, not Go's, has added the sources. With firewalld, only this
    // plugin also writes rules to isolate the bridge.
    if is_recorded && conf.policy != Policy::Open {
        missing.extend(forward.check(rules, Backend::Nftables)?);
    }
    Ok(missing)
}

/// Returns the zone of firewalld with this name.
fn zone<'m>(call: &Call<'m>, name: &str) -> Zone<'m> {
    Zone { machine: call.machine, name: name.to_owned() }
}

/// Returns the value that writes, checks and removes rules. Its notes are printed as those of the
/// call.
fn forward<'m>(call: &Call<'m>) -> Forward<'m> {
    Forward::new(call.machine, call.notes.clone())
}

/// Returns all addresses of the result, each once. As with Go, those of other interfaces are
/// included.
fn addresses(prev: &AddResult) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for address in prev.ips.iter().map(|ip| ip.address.address()) {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses
}

/// Returns the addresses of the network's attachments in `valid`, from the results that libcni has
/// stored in its default folder. Results that cannot be read count as having none.
fn cached_addresses(call: &Call<'_>, valid: &ValidAttachments) -> Vec<IpAddr> {
    let read = |(container_id, ifname): (&str, &str)| {
        let name = format!("{}-{container_id}-{ifname}", call.conf.name());
        // The names come from the runtime's list, and are not checked: a slash could lead to
        // another folder. Symbolic links are not followed.
        let path = if name.contains('/') { None } else { Some(Path::new(RESULT_CACHE).join(name)) };
        let path = path.filter(|path| fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file()))?;
        let bytes = file::read(&path).ok()?;
        let cached = Json::parse(&bytes).ok()?;
        AddResult::decode(cached.get("result")?, call.conf.version()).ok()
    };
    valid.iter().filter_map(read).flat_map(|result| addresses(&result)).collect()
}

/// Returns the rules that the attachment needs.
///
/// # Errors
/// Those of [`ingress`] and [`required_egress`].
fn required_rules(call: &Call<'_>, conf: &Conf, prev: &AddResult) -> Result<ForwardRules> {
    Ok(ForwardRules {
        attachment: call.attachment(),
        addresses: addresses(prev),
        ingress: ingress(conf.policy, prev)?,
        egress: conf.egress.as_ref().map(|egress| required_egress(egress, prev)).transpose()?,
        accepts_redirected: conf.accept_mapped_ports,
        iptables_admin_chain: conf.iptables_admin_chain.clone(),
        nftables_admin_chain: conf.nftables_admin_chain.clone(),
    })
}

/// Returns the egress rules with the link-local addresses that the kernel gives to the container's
/// interfaces.
///
/// # Errors
/// - Code 7 if `prev` names no bridge and no veth on the host: then the packets of the container do
///   not pass the host's rules, which would drop nothing. Also if it has no address.
/// - Code 100 if the kernel cannot list its interfaces.
fn required_egress(egress: &Egress, prev: &AddResult) -> Result<Egress> {
    let refused = |why: &str| Err(Error::config(format!("\"egress\" would have no effect: {why}")));
    if prev.ips.is_empty() {
        return refused("prevResult has no address");
    }
    let netlink = Netlink::open()?;
    let mut passes_host = false;
    for interface in prev.interfaces.iter().filter(|interface| interface.sandbox.is_empty()) {
        let link = netlink.find_link(&interface.name)?;
        passes_host |= link.is_some_and(|link| link.is_bridge() || link.kind == LinkKind::Veth);
    }
    if !passes_host {
        return refused(
            "prevResult names no bridge and no veth of the host, so the packets of the container do not pass the \
             host's rules, as behind macvlan, ipvlan, vlan and host-device",
        );
    }
    let inside = prev.interfaces.iter().filter(|interface| !interface.sandbox.is_empty());
    let macs = inside.filter_map(|interface| interface.mac.parse::<Mac>().ok());
    Ok(Egress { link_local: macs.map(Mac::link_local).collect(), ..egress.clone() })
}

/// Converts the error of a failure to write egress rules. The code is 2 if the kernel lacks
/// nf_tables; the text then reports that.
fn explain_egress(error: cni_linux::Error) -> Error {
    if error.is_unsupported() {
        return Error::from(error)
            .context("\"egress\" needs nf_tables, with every backend")
            .with_code(Code::UNSUPPORTED_FIELD);
    }
    error.into()
}

/// Returns the policy with the bridge to isolate: the first interface on the host that `prev`
/// names, as with Go.
///
/// # Errors
/// - Code 7 if `prev` names no such interface, or the interface does not exist or is not a bridge:
///   rules for a container's own interface would isolate nothing.
/// - Code 100 if the kernel cannot list its interfaces.
fn ingress(policy: Policy, prev: &AddResult) -> Result<Ingress> {
    if policy == Policy::Open {
        return Ok(Ingress::Open);
    }
    let no_bridge =
        |why: String| Error::config(format!("\"ingressPolicy\": {:?} needs a bridge: {why}", policy.name()));
    let Some(interface) = prev.interfaces.iter().find(|interface| interface.sandbox.is_empty()) else {
        return Err(no_bridge("prevResult names no interface of the host".into()));
    };
    match Netlink::open()?.find_link(&interface.name)? {
        Some(link) if link.is_bridge() => Ok(policy.for_bridge(link.name)),
        Some(link) => Err(no_bridge(format!("{} in prevResult is a {}", link.name, link.kind))),
        None => Err(no_bridge(format!("{} in prevResult does not exist", interface.name))),
    }
}
