//! Builds and reads the rules of the nft backend, and adds the shared chains that are missing. The
//! rules are those of Go's plugin, except that the conditions are in another place.
//!
//! The table in family ip (ip6 is alike), with H and P for the host's address and port, A and C for
//! those of the container, and ID for the container ID:
//! ```text
//! table cni_hostport { comment "CNI portmap plugin"
//!     chain hostip_hostports { }              # older releases of Go put rules here
//!     chain hostports        { [CONDITIONS] [ip daddr H] tcp dport P dnat to A:C comment "ID" }
//!     chain hostports_all    { jump hostip_hostports; jump hostports }
//!     chain prerouting       { type nat hook prerouting priority -100;  fib daddr type local jump hostports_all }
//!     chain output           { type nat hook output priority -100;      fib daddr type local jump hostports_all }
//!     chain masquerading     { type nat hook postrouting priority 100;  # only where source addresses are replaced
//!         ip saddr A ip daddr A masquerade comment "ID"
//!         ip saddr 127.0.0.1 ip daddr A masquerade comment "ID" } }    # not in ip6
//! ```
//! Go puts the conditions before the `fib` of the chains prerouting and output instead, where those
//! of the last ADD replace all others.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::super::super::nft::expr::{self, Base, CmpOp, Expr, MetaKey};
use super::super::super::nft::{self, BaseChain, Batch, Chain, Hook, Key, Kind, Listed, Nft, Rule, Table};
use super::super::{ClaimedPort, Protocol, Snat};
use cni::cidr::from_octets;
use cni_linux::error::{Cause, Error, Result};
use cni_linux::route::Family;

const TABLE_COMMENT: &str = "CNI portmap plugin";
/// The chain of the mappings.
pub(super) const HOSTPORTS: &str = "hostports";
/// The chain in which older releases of Go put mappings with a host address.
pub(super) const HOSTIP_HOSTPORTS: &str = "hostip_hostports";
/// The chain that the base chains jump to. It jumps to [`HOSTIP_HOSTPORTS`] and [`HOSTPORTS`].
pub(super) const HOSTPORTS_ALL: &str = "hostports_all";
/// The base chain of the masquerading rules.
pub(super) const MASQUERADING: &str = "masquerading";

/// The base chains that jump to [`HOSTPORTS_ALL`].
const ENTRY_CHAINS: [&str; 2] = ["prerouting", "output"];

/// A chain that all containers share: its name, its type, hook and priority if it is a base chain,
/// and the rules that all containers share.
type SharedChain = (&'static str, Option<BaseChain>, Vec<Vec<Expr>>);

/// Returns the chains that all containers share, in the order in which they are created.
fn shared_chains() -> [SharedChain; 6] {
    let [prerouting, output] = ENTRY_CHAINS;
    let nat_at = |hook, priority| Some(BaseChain { kind: Kind::Nat, hook, priority });
    [
        (HOSTPORTS, None, Vec::new()),
        (HOSTIP_HOSTPORTS, None, Vec::new()),
        (HOSTPORTS_ALL, None, vec![vec![expr::jump(HOSTIP_HOSTPORTS)], vec![expr::jump(HOSTPORTS)]]),
        (prerouting, nat_at(Hook::Prerouting, -100), vec![entry_rule()]),
        (output, nat_at(Hook::Output, -100), vec![entry_rule()]),
        (MASQUERADING, nat_at(Hook::Postrouting, 100), Vec::new()),
    ]
}

/// Every chain that can have rules of containers.
pub(crate) const CONTAINER_CHAINS: [&str; 3] = [HOSTPORTS, HOSTIP_HOSTPORTS, MASQUERADING];

/// Returns the table of host ports in this family.
pub(crate) fn table(family: Family) -> Table<'static> {
    let family = match family {
        Family::V4 => nft::Family::Ip,
        Family::V6 => nft::Family::Ip6,
    };
    Table { family, name: "cni_hostport" }
}

/// Returns the rule by which the [`ENTRY_CHAINS`] jump to [`HOSTPORTS_ALL`].
fn entry_rule() -> Vec<Expr> {
    let mut exprs = expr::fib_daddr_local();
    exprs.push(expr::jump(HOSTPORTS_ALL));
    exprs
}

/// Returns the rule of a mapping, without the conditions that come before it.
pub(super) fn mapping_rule(claim: &ClaimedPort) -> Vec<Expr> {
    let mut exprs = claim.host_ip.map(expr::daddr).unwrap_or_default();
    exprs.extend(expr::l4proto(claim.protocol.number()));
    exprs.extend(expr::dport(claim.host_port));
    exprs.extend(expr::dnat(claim.container.ip(), Some(claim.container.port())));
    exprs
}

/// Returns the rules of [`MASQUERADING`] for one container.
pub(in super::super) fn masquerade_rules(container: IpAddr, snat: Snat) -> Vec<Vec<Expr>> {
    let masquerade_from = |source: Vec<Expr>| {
        let mut exprs = source;
        exprs.extend(expr::daddr(container));
        exprs.push(Expr::Masquerade);
        exprs
    };
    match snat {
        Snat::No => Vec::new(),
        // From 0.0.0.0/0 or ::/0: no bit of the address is compared.
        Snat::All => vec![masquerade_from(expr::masked(expr::saddr(container), 0))],
        Snat::Hairpin => {
            let mut rules = vec![masquerade_from(expr::saddr(container))];
            // Not for ::1, which the kernel does not route to another interface.
            if container.is_ipv4() {
                rules.push(masquerade_from(expr::saddr(Ipv4Addr::LOCALHOST.into())));
            }
            rules
        }
    }
}

/// Reads the rule of a mapping: returns its claim, and the number of expressions at its beginning
/// that are conditions. `None` for any other rule.
pub(crate) fn read_mapping(rule: &Rule) -> Option<(ClaimedPort, usize)> {
    // A mapping ends with: [destination address,] protocol, destination port, two loads, DNAT. The
    // parts are read from the end: each `_at` is the position of a part's first expression.
    let exprs = rule.exprs.as_slice();
    let dnat_at = exprs.iter().rposition(|expr| matches!(expr, Expr::Dnat { .. }))?;
    let container = dnat_destination(exprs, dnat_at)?;
    let first_load_at = dnat_at.checked_sub(2)?;
    let (port_bytes, port_at) = compared_before(exprs, first_load_at)?;
    // The destination port in the header of TCP, UDP or SCTP.
    let Expr::Payload { base: Base::TRANSPORT, offset: 2, len: 2, .. } = exprs.get(port_at)? else { return None };
    let host_port = u16::from_be_bytes(port_bytes.try_into().ok()?);
    let (protocol_bytes, protocol_at) = compared_before(exprs, port_at)?;
    let protocol = match (exprs.get(protocol_at)?, protocol_bytes) {
        // `tcp dport`; older releases of Go write `ip protocol tcp` (offset 9) or `ip6 nexthdr tcp`
        // (offset 6).
        (Expr::Meta { key: MetaKey::L4PROTO, .. }, [number])
        | (Expr::Payload { base: Base::NETWORK, offset: 9 | 6, len: 1, .. }, [number]) => Protocol::by_number(*number)?,
        _ => return None,
    };
    let (mut host_ip, mut condition_count) = (None, protocol_at);
    // The first expression of `daddr` only loads the packet's destination address. It is the same
    // for all addresses of a family.
    if let Some((address_bytes, address_at)) = compared_before(exprs, protocol_at)
        && exprs.get(address_at) == expr::daddr(container.ip()).first()
        && let Some(address) = from_octets(address_bytes)
    {
        (host_ip, condition_count) = (Some(address), address_at);
    }
    Some((ClaimedPort { protocol, host_ip, host_port, container }, condition_count))
}

/// Returns the keys by which a rule of [`CONTAINER_CHAINS`] is searched.
pub(super) fn keys(listed: &Listed) -> Vec<Key> {
    let mut keys: Vec<Key> = listed.rule.comment.iter().map(|comment| Key::comment(comment)).collect();
    keys.extend(container(&listed.rule).map(Key::address));
    keys.extend(read_mapping(&listed.rule).map(|(claim, _)| Key::port(claim.host_port)));
    keys
}

/// Returns the destination of the DNAT at position `dnat_at`: the address and port that earlier
/// expressions load into its registers. `None` if it has no port, or if a register is not loaded.
fn dnat_destination(exprs: &[Expr], dnat_at: usize) -> Option<SocketAddr> {
    let Expr::Dnat { addr, port: Some(port), .. } = exprs.get(dnat_at)? else { return None };
    let last_load = |register| {
        exprs[..dnat_at].iter().rev().find_map(|expr| match expr {
            Expr::Load { to, data } if *to == register => Some(data.as_slice()),
            _ => None,
        })
    };
    let port = u16::from_be_bytes(last_load(*port)?.try_into().ok()?);
    Some(SocketAddr::new(from_octets(last_load(*addr)?)?, port))
}

/// Reads the test for equality right before position `end`, a load and a comparison: returns the
/// bytes that the loaded value is compared with, and the position of the load.
fn compared_before(exprs: &[Expr], end: usize) -> Option<(&[u8], usize)> {
    match exprs.get(end.checked_sub(1)?)? {
        Expr::Cmp { op: CmpOp::EQ, data, .. } => Some((data, end.checked_sub(2)?)),
        _ => None,
    }
}

/// Returns the address of the container that a rule is for: the destination of a mapping, or the
/// destination address that a masquerade rule matches. `None` for any other rule.
pub(in super::super) fn container(rule: &Rule) -> Option<IpAddr> {
    if let Some((claim, _)) = read_mapping(rule) {
        return Some(claim.container.ip());
    }
    match rule.exprs.as_slice() {
        [
            ..,
            // The destination address in the header of IPv4 or IPv6.
            Expr::Payload { base: Base::NETWORK, offset: 16 | 24, .. },
            Expr::Cmp { op: CmpOp::EQ, data, .. },
            Expr::Masquerade,
        ] => from_octets(data),
        _ => None,
    }
}

/// The shared chains and rules of one family.
pub(super) struct Shared {
    pub(super) family: Family,
    /// The chains that exist.
    pub(super) chains: Vec<Chain>,
    /// The chains that are needed and do not exist. Base chains have their type, hook and priority.
    pub(super) missing_chains: Vec<(&'static str, Option<BaseChain>)>,
    /// The rules that do not exist, each with its chain.
    missing_rules: Vec<(&'static str, Vec<Expr>)>,
}

impl Shared {
    /// Reads the shared chains of the family and their rules. With [`Snat::No`], [`MASQUERADING`]
    /// need not exist. Fails if a base chain that is needed exists with another type, hook or
    /// priority.
    pub(super) fn read(nft: &mut Nft, family: Family, snat: Snat) -> Result<Shared> {
        let table = table(family);
        let (chains, missing_chains, missing_rules) = Default::default();
        let mut shared = Shared { family, chains, missing_chains, missing_rules };
        for (name, base, wanted_rules) in shared_chains() {
            let is_needed = name != MASQUERADING || snat != Snat::No;
            let mut existing = Vec::new();
            if let Some(chain) = nft.find_chain(table, name)? {
                if is_needed && base.is_some() && chain.base != base {
                    let cause =
                        Cause::text("the chain exists, but not with the type, hook and priority that portmap needs");
                    return Err(Error::new(format_args!("failed to use nft chain {table} {name}"), cause));
                }
                if !wanted_rules.is_empty() {
                    existing = nft.rules(table, name)?;
                }
                shared.chains.push(chain);
            } else if is_needed {
                shared.missing_chains.push((name, base));
            }
            let is_absent = |rule: &Vec<Expr>| !existing.iter().any(|listed| listed.rule.exprs == *rule);
            shared.missing_rules.extend(wanted_rules.into_iter().filter(is_absent).map(|rule| (name, rule)));
        }
        Ok(shared)
    }

    /// Adds the missing chains and rules to a transaction.
    pub(super) fn add_missing(&self, batch: &mut Batch) {
        let table = table(self.family);
        if !self.missing_chains.is_empty() {
            batch.ensure_table(table, Some(TABLE_COMMENT));
        }
        for (name, base) in &self.missing_chains {
            match base {
                Some(base) => batch.ensure_base_chain(table, name, *base),
                None => batch.ensure_chain(table, name, None),
            }
        }
        for (chain, exprs) in &self.missing_rules {
            batch.append_rule(table, chain, &Rule::new(exprs.clone()));
        }
    }

    /// Returns the chains that exist and lack a jump to the next chain.
    pub(super) fn chains_without_jump(&self) -> impl Iterator<Item = &'static str> {
        let [prerouting, output] = ENTRY_CHAINS;
        [prerouting, output, HOSTPORTS_ALL].into_iter().filter(|chain| {
            self.missing_rules.iter().any(|(of, _)| of == chain)
                && !self.missing_chains.iter().any(|(missing, _)| missing == chain)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::conditions;
    use super::*;

    #[test]
    fn a_mapping_is_read_back_with_its_conditions_apart() {
        for (container, host_ip, conditions) in [
            ("10.0.0.2:80", None, ""),
            ("10.0.0.2:80", Some("192.0.2.1"), ""),
            ("10.0.0.2:80", Some("192.0.2.1"), "iifname != eth0 ip saddr 10.0.0.0/8"),
            ("10.0.0.2:80", None, "mark & 1 == 1"),
            ("[fd00::2]:80", Some("fd00::1"), "ip6 daddr fd00::/8"),
            ("[fd00::2]:80", None, "ip6 daddr != fd00::7"),
        ] {
            for protocol in Protocol::ALL {
                let container: SocketAddr = container.parse().unwrap();
                let host_ip = host_ip.map(|host_ip| host_ip.parse().unwrap());
                let claim = ClaimedPort { protocol, host_ip, host_port: 8080, container };
                let family = Family::of(container.ip());
                let mut exprs = conditions::compile(&[conditions.to_owned()], family).unwrap();
                let before = exprs.len();
                exprs.extend(mapping_rule(&claim));
                let rule = Rule::new(exprs);
                assert_eq!(read_mapping(&rule), Some((claim, before)), "{conditions}");
                assert_eq!(super::container(&rule), Some(container.ip()));
            }
        }
    }

    #[test]
    fn a_masquerade_is_known_by_its_destination() {
        for address in ["10.0.0.2", "fd00::2"] {
            let address: IpAddr = address.parse().unwrap();
            let rules: Vec<_> =
                [Snat::Hairpin, Snat::All].into_iter().flat_map(|snat| masquerade_rules(address, snat)).collect();
            assert_eq!(rules.len(), if address.is_ipv4() { 3 } else { 2 });
            for exprs in rules {
                assert_eq!(container(&Rule::new(exprs)), Some(address));
            }
        }
        assert_eq!(masquerade_rules("10.0.0.2".parse().unwrap(), Snat::No), Vec::<Vec<Expr>>::new());
    }

    #[test]
    fn any_other_rule_is_not_a_mapping() {
        assert_eq!(read_mapping(&Rule::new(entry_rule())), None);
        assert_eq!(container(&Rule::new(entry_rule())), None);
        assert_eq!(read_mapping(&Rule::default()), None);
        let mut exprs = mapping_rule(&ClaimedPort {
            protocol: Protocol::Tcp,
            host_ip: None,
            host_port: 1,
            container: "10.0.0.2:80".parse().unwrap(),
        });
        while !exprs.is_empty() {
            exprs.remove(0);
            assert_eq!(read_mapping(&Rule::new(exprs.clone())), None, "{exprs:?}");
        }
    }
}
