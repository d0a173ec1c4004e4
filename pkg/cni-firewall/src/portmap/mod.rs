//! Maps host ports: connections to a port of the host go to a port of a container.
//!
//! A [`Forwarding`] has the port mappings of one attachment. [`PortMap`] writes, compares and
//! removes them in one of two backends, `nft` and `iptables`, as rules of the form that the Go
//! plugin uses. The backends plan; the crate's engine makes the changes. For both, [`conflict`]
//! decides which rules of other containers are removed. For nftables, [`conditions`] compiles extra
//! matches.
//!
//! A *claim* ([`ClaimedPort`]) is a mapping in one family: a host port, and the container's address
//! and port.
//!
//! Everything works in the network namespace of the calling thread, which must be the host's. A
//! mapping without a host address applies in both families, one with 0.0.0.0 only in IPv4.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;
use cni::{AttachmentId, Cidr};
use cni_linux::error::{Error, Result};
use cni_linux::route::Family;

use crate::engine::Store;
use crate::iptables::Table;
use crate::{AttachmentFilter, Backend};

pub mod conditions;
pub mod conflict;
pub(super) mod iptables;
pub(super) mod nft;

pub use cni_linux::conntrack::{ClaimedPort, Protocol};
use conflict::ConflictSearch;
pub use conflict::Policy;

/// Host ports in one network namespace.
///
/// As with [`Masquerade`](crate::Masquerade), connections that have removed rules stay open until
/// this value is dropped.
pub struct PortMap<'m> {
    store: Store<'m>,
}

/// The reason why host ports could not be mapped.
#[derive(Debug)]
pub enum Refusal {
    /// The kernel's error, or that of a program of iptables.
    Failed(Error),
    /// This host does not have the backend: a program is not installed, or the kernel has no
    /// nf_tables with NAT.
    Unusable {
        /// The backend.
        backend: Backend,
        /// The error that shows this.
        error: Error,
    },
    /// A living container, which the text describes, has one of the ports.
    PortTaken(String),
    /// Conditions that neither portmap nor the program `nft` understands.
    Condition {
        /// The first token that is not understood.
        token: String,
        /// The reason, or the error of the program `nft`.
        why: String,
    },
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal::Failed(error)
    }
}

impl<'m> PortMap<'m> {
    /// Returns a value that has not opened anything yet; `notes` receives remarks for the operator.
    pub fn new(machine: &'m dyn Machine, notes: Notes) -> PortMap<'m> {
        PortMap { store: Store::new(machine, notes, Table::Nat, "host port rules") }
    }

    /// Returns the backend for new rules if the configuration names none: iptables, or nftables if
    /// the programs of iptables are not installed. Whether the programs work is not checked.
    ///
    /// # Errors
    /// If the variant of the installed program cannot be found out.
    pub fn default_backend(&self) -> Result<Backend> {
        self.store.default_backend([Family::V4])
    }

    /// Replaces the attachment's rules in `backend` with those of `wanted`. If these are in place
    /// already, nothing is changed. Without a `backend`, uses the
    /// [default](PortMap::default_backend), or nftables if iptables does not work.
    ///
    /// Sets `changed` to the backend in which the attachment's rules may have been changed, even on
    /// an error: the caller then owes an [`undo`](PortMap::undo) if its ADD fails.
    ///
    /// With [`Policy::RefuseIfAlive`], first removes the rules of dead containers (see
    /// [`conflict`]) that lead to the container's addresses, from the tables that the backend does
    /// not write.
    ///
    /// # Errors
    /// See [`Refusal`]. If a port is taken, in any table, no rule is added. Exception: if the port
    /// was taken during the call, iptables can have the rules of IPv4 already.
    pub fn ensure(
        &self,
        wanted: &Forwarding,
        backend: Option<Backend>,
        changed: &mut Option<Backend>,
    ) -> Result<(), Refusal> {
        let chosen = match backend {
            Some(backend) => backend,
            None => self.default_backend()?,
        };
        let has_fallback = backend.is_none() && chosen == Backend::Iptables;
        let families = || wanted.families().map(|request| request.family);
        let error = match self.ensure_in(chosen, wanted, changed) {
            Err(Refusal::Failed(error) | Refusal::Unusable { error, .. })
                if has_fallback && self.store.only_nftables_works(&error, families()) =>
            {
                error
            }
            result => return result,
        };
        self.note(format_args!("nftables is used, because iptables does not work: {error}"));
        // Removes the rules of the family in which iptables has not failed. `take`: the caller then
        // owes only an undo of what nftables changes.
        if changed.take().is_some()
            && let Err(error) = self.undo(wanted, Backend::Iptables)
        {
            self.store.notes.note(format_args!("rollback: failed to remove the host ports: {error}"));
        }
        self.ensure_in(Backend::Nftables, wanted, changed)
    }

    /// Does [`ensure`](PortMap::ensure) in this backend. Converts the error to
    /// [`Refusal::PortTaken`] if a living container has a wanted port, and to
    /// [`Refusal::Unusable`] if the error shows that the host does not have the backend.
    fn ensure_in(
        &self,
        backend: Backend,
        wanted: &Forwarding,
        changed_backend: &mut Option<Backend>,
    ) -> Result<(), Refusal> {
        let (mut search, mut changed) = (ConflictSearch::new(wanted, self.store.notes.clone()), false);
        let result = self.ensure_unless_taken(backend, &mut search, &mut changed);
        if changed {
            *changed_backend = Some(backend);
        }
        // The search has set `held` if it failed because of a living container.
        match (result, search.held) {
            (Err(_), Some(holder)) => Err(Refusal::PortTaken(holder)),
            (Err(Refusal::Failed(error)), None) if self.lacks_backend(backend, wanted, &error) => {
                Err(Refusal::Unusable { backend, error })
            }
            (result, _) => result,
        }
    }

    /// Searches the tables that `backend` does not write, unless conflicts are ignored, then writes
    /// the rules in `backend`. Sets `changed` to true if the rules in `backend` may have been
    /// changed, even on an error. If a living container has a wanted port, fails and stores the
    /// container in `search.held`.
    fn ensure_unless_taken(
        &self,
        backend: Backend,
        search: &mut ConflictSearch<'_>,
        changed: &mut bool,
    ) -> Result<(), Refusal> {
        if search.wanted.policy == Policy::RefuseIfAlive {
            iptables::search_other_tables(&self.store, search, Some(backend))?;
            if backend == Backend::Iptables {
                nft::search_other_tables(search)?;
            }
        }
        match backend {
            Backend::Nftables => nft::ensure(&self.store, search, changed)?,
            Backend::Iptables => iptables::ensure(&self.store, search, changed)?,
        }
        // The remarks about the tables of `backend`. Each search above has written its own.
        search.note_remarks();
        Ok(())
    }

    /// Whether the failure of `backend` with this error shows that the host does not have the
    /// backend.
    fn lacks_backend(&self, backend: Backend, wanted: &Forwarding, error: &Error) -> bool {
        if backend == Backend::Nftables {
            return error.is_unsupported();
        }
        // Rules of iptables-nft can be read and written over netlink, without a program: an error
        // with an errno is the kernel's answer. The other two errors end a wait.
        if error.errno().is_some() || error.is_terminated() || error.is_deadline() {
            return false;
        }
        let Ok(iptables) = self.store.open(OnSigterm::Kill) else { return false };
        // `Ok(None)`: no program of iptables is installed for the family.
        wanted.families().any(|request| matches!(iptables.chosen_variant(request.family), Ok(None)))
    }

    /// Undoes an [`ensure`](PortMap::ensure) that changed rules in `backend`: removes the
    /// attachment's rules, but does not delete tracked connections. Rules that `ensure` replaced
    /// stay lost.
    ///
    /// # Errors
    /// As [`purge`](PortMap::purge).
    pub fn undo(&self, wanted: &Forwarding, backend: Backend) -> Result<()> {
        let addresses = wanted.addresses();
        let filter = AttachmentFilter::for_del(&wanted.attachment, &addresses);
        match backend {
            Backend::Nftables => nft::purge(&self.store, filter, &mut BTreeSet::new()),
            Backend::Iptables => iptables::purge(&self.store, filter, &mut BTreeSet::new()),
        }
    }

    /// Removes the rules of dead containers that lead to the container's addresses, for an ADD that
    /// maps no port, unless conflicts are ignored. Searches nftables and iptables-nft; a search of
    /// iptables-legacy would cost a process. A failure is only a note.
    pub fn remove_stale(&self, wanted: &Forwarding) {
        if wanted.policy == Policy::Ignore {
            return;
        }
        let mut search = ConflictSearch::new(wanted, self.store.notes.clone());
        let in_nft = nft::search_other_tables(&mut search);
        let in_iptables = iptables::search_other_tables(&self.store, &mut search, None);
        for error in [in_nft, in_iptables].into_iter().filter_map(Result::err) {
            self.note(format_args!("failed to look for stale rules to the container's addresses: {error}"));
        }
    }

    /// Removes the rules of the selected attachments from both backends, even if one of them fails.
    /// Missing programs of iptables-legacy are not an error but a note.
    ///
    /// Adds the claims of all rules that were found to `claims`, even on an error. The caller must
    /// delete their tracked connections now: a repeated removal does not find removed rules again.
    ///
    /// # Errors
    /// Those of both removals, joined.
    pub fn purge(&self, filter: AttachmentFilter<'_>, claims: &mut BTreeSet<ClaimedPort>) -> Result<()> {
        let results = [nft::purge(&self.store, filter, claims), iptables::purge(&self.store, filter, claims)];
        Error::join(results.into_iter().filter_map(Result::err))
    }

    /// Returns a sentence for each difference from the rules that [`ensure`](PortMap::ensure)
    /// writes to `backend`; empty if one of the backends has all rules. If only the other backend
    /// has rules of the attachment, returns the differences there. `None` if neither has any.
    ///
    /// # Errors
    /// The rules cannot be read.
    pub fn check(&self, wanted: &Forwarding, backend: Backend) -> Result<Option<Vec<String>>> {
        let check_in = |searched| match searched {
            Backend::Nftables => nft::check(wanted),
            Backend::Iptables => iptables::check(&self.store, wanted),
        };
        let differences = check_in(backend)?;
        if differences.as_ref().is_some_and(Vec::is_empty) {
            return Ok(differences);
        }
        let in_other = check_in(backend.other())?;
        let other_is_complete = in_other.as_ref().is_some_and(Vec::is_empty);
        Ok(if differences.is_none() || other_is_complete { in_other } else { differences })
    }

    /// Writes a note.
    fn note(&self, text: impl std::fmt::Display) {
        self.store.notes.note(format_args!("portmap: {text}"));
    }
}

/// One port mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The protocol.
    pub protocol: Protocol,
    /// The host's address. `None` means every address of both families, 0.0.0.0 or `::` every
    /// address of its family.
    pub host_ip: Option<IpAddr>,
    /// The host's port.
    pub host_port: u16,
    /// The container's port.
    pub container_port: u16,
}

impl Mapping {
    /// Whether one packet could match both this mapping and `other`, if the container has an
    /// address in both families.
    pub fn overlaps(&self, other: &Mapping) -> bool {
        self.host_ports().any(|own| other.host_ports().any(|other| own.overlaps(&other)))
    }

    /// Returns the host port in each family, as a claim with a fixed container address and port.
    /// Two mappings have the same host port if they have an equal one.
    pub fn host_ports(&self) -> impl Iterator<Item = ClaimedPort> {
        let mapping = Mapping { container_port: 0, ..*self };
        let fixed_addresses = [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)];
        fixed_addresses.into_iter().filter_map(move |container| mapping.claim(container))
    }

    /// Returns the claim of this mapping for a container with this address; `None` if the mapping's
    /// host address is of the other family.
    pub fn claim(&self, container: IpAddr) -> Option<ClaimedPort> {
        if let Some(host_ip) = self.host_ip
            && Family::of(host_ip) != Family::of(container)
        {
            return None;
        }
        Some(ClaimedPort {
            protocol: self.protocol,
            host_ip: self.host_ip.filter(|host_ip| !host_ip.is_unspecified()),
            host_port: self.host_port,
            container: SocketAddr::new(container, self.container_port),
        })
    }
}

/// Which connections to a host port get the host's address as their source, so that the container's
/// answers come back through the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Snat {
    /// None. Then the container cannot reach its own host port, and the host cannot reach that port
    /// at 127.0.0.1.
    No,
    /// The connections that could not work otherwise: those from the container itself (iptables:
    /// from its whole subnet) and, in IPv4, those from 127.0.0.1.
    Hairpin,
    /// All connections.
    All,
}

/// How iptables rules mark a connection for [`Snat`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetMark {
    /// With this bit of the packet mark, in a chain of these plugins.
    Bit(u8),
    /// With a jump to this chain of another program, which marks and later masquerades the packets.
    Chain(String),
}

/// The port mappings that one attachment wants.
#[derive(Clone, Debug)]
pub struct Forwarding {
    /// The attachment.
    pub attachment: AttachmentId,
    /// The container's addresses: at most one of each family, IPv4 first.
    pub containers: Vec<Cidr>,
    /// The mappings, in the order of the configuration.
    pub mappings: Vec<Mapping>,
    /// The connections whose source address is replaced.
    pub snat: Snat,
    /// How iptables rules mark these connections.
    pub set_mark: SetMark,
    /// Extra matches in IPv4, in the syntax of iptables or nft.
    pub conditions_v4: Vec<String>,
    /// Extra matches in IPv6.
    pub conditions_v6: Vec<String>,
    /// The reaction to a port that another container has.
    pub policy: Policy,
    /// The names of the attachment's interfaces on the host.
    pub links: Vec<String>,
}

impl Forwarding {
    /// Returns the request for each family in which a port is mapped.
    pub fn families(&self) -> impl Iterator<Item = FamilyRequest<'_>> {
        self.families_with_address().filter(|request| !request.claims.is_empty())
    }

    /// Returns the request for each family in which the container has an address, even if no port
    /// is mapped in the family.
    pub(crate) fn families_with_address(&self) -> impl Iterator<Item = FamilyRequest<'_>> {
        self.containers.iter().map(|container| FamilyRequest {
            wanted: self,
            family: Family::of(container.address()),
            container: *container,
            claims: self.mappings.iter().filter_map(|mapping| mapping.claim(container.address())).collect(),
        })
    }

    /// Returns the claims of both families.
    pub fn all_claims(&self) -> Vec<ClaimedPort> {
        self.families().flat_map(|request| request.claims).collect()
    }

    /// Returns the container's addresses without their prefix lengths.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.containers.iter().map(|container| container.address()).collect()
    }

    /// Whether this is one of the container's addresses.
    pub fn is_container(&self, address: IpAddr) -> bool {
        self.containers.iter().any(|container| container.address() == address)
    }
}

/// What a [`Forwarding`] wants in one family.
#[derive(Clone, Debug)]
pub struct FamilyRequest<'w> {
    /// What it wants in all families.
    pub wanted: &'w Forwarding,
    /// The family.
    pub family: Family,
    /// The container's address.
    pub container: Cidr,
    /// The claims of this address.
    pub claims: Vec<ClaimedPort>,
}

impl<'w> FamilyRequest<'w> {
    /// Returns the extra matches.
    pub(crate) fn conditions(&self) -> &'w [String] {
        match self.family {
            Family::V4 => &self.wanted.conditions_v4,
            Family::V6 => &self.wanted.conditions_v6,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(host_ip: &str) -> Mapping {
        let host_ip = host_ip.parse().ok();
        Mapping { protocol: Protocol::Tcp, host_ip, host_port: 8080, container_port: 80 }
    }

    #[test]
    fn a_host_address_decides_the_family() {
        let (v4, v6): (IpAddr, IpAddr) = ("10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap());
        for (host_ip, in_v4, in_v6) in [
            ("", true, true),
            ("0.0.0.0", true, false),
            ("::", false, true),
            ("192.0.2.1", true, false),
            ("fd00::1", false, true),
        ] {
            let mapping = mapping(host_ip);
            assert_eq!((mapping.claim(v4).is_some(), mapping.claim(v6).is_some()), (in_v4, in_v6), "{host_ip:?}");
        }
        assert_eq!(mapping("0.0.0.0").claim(v4), mapping("").claim(v4));
    }

    #[test]
    fn claims_overlap_where_a_packet_could_be_both_s() {
        let claim = |host_ip: &str, port, protocol| {
            let mapping = Mapping { host_port: port, protocol, ..mapping(host_ip) };
            mapping.claim(if host_ip.contains(':') { "fd00::2" } else { "10.0.0.2" }.parse().unwrap()).unwrap()
        };
        let one = claim("192.0.2.1", 80, Protocol::Tcp);
        for (other, overlaps) in [
            (claim("192.0.2.1", 80, Protocol::Tcp), true),
            (claim("", 80, Protocol::Tcp), true),
            (claim("0.0.0.0", 80, Protocol::Tcp), true),
            (claim("192.0.2.2", 80, Protocol::Tcp), false),
            (claim("", 81, Protocol::Tcp), false),
            (claim("", 80, Protocol::Udp), false),
            (claim("::", 80, Protocol::Tcp), false),
        ] {
            assert_eq!((one.overlaps(&other), other.overlaps(&one)), (overlaps, overlaps), "{other}");
        }
    }

    #[test]
    fn a_protocol_is_known_in_any_case() {
        assert_eq!(Protocol::by_name("SCTP"), Some(Protocol::Sctp));
        assert_eq!(Protocol::by_name("icmp"), None);
        assert_eq!(Protocol::ALL.map(Protocol::number).map(Protocol::by_number), Protocol::ALL.map(Some));
    }
}
