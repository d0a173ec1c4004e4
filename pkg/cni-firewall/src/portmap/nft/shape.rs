//! The tables, chains and rules of the nft backend, as Go has them, and how they are read back.
//!
//! In families ip and ip6 alike, with `ID` for the container's ID:
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
//! Go puts the conditions before the `fib` of the two base chains, where those of the last ADD
//! replace all others.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::super::super::nft::expr::{self, Base, CmpOp, Expr, MetaKey, Verdict};
use super::super::super::nft::{self, BaseChain, Hook, Kind, Rule, Table};
use super::super::{ClaimedPort, Protocol, Snat};
use cni_linux::route::Family;

pub(super) const TABLE_COMMENT: &str = "CNI portmap plugin";
pub(super) const HOSTPORTS: &str = "hostports";
pub(super) const HOSTIP_HOSTPORTS: &str = "hostip_hostports";
pub(super) const ALL: &str = "hostports_all";
pub(super) const MASQUERADING: &str = "masquerading";

const PREROUTING: (&str, BaseChain) =
    ("prerouting", BaseChain { kind: Kind::Nat, hook: Hook::Prerouting, priority: -100 });
const OUTPUT: (&str, BaseChain) = ("output", BaseChain { kind: Kind::Nat, hook: Hook::Output, priority: -100 });
/// The base chains that lead to [`ALL`].
pub(super) const ENTRIES: [(&str, BaseChain); 2] = [PREROUTING, OUTPUT];
pub(super) const POSTROUTING: BaseChain = BaseChain { kind: Kind::Nat, hook: Hook::Postrouting, priority: 100 };
/// Every chain that can have rules of a container.
pub(crate) const CONTAINERS: [&str; 3] = [HOSTPORTS, HOSTIP_HOSTPORTS, MASQUERADING];

pub(crate) fn table(family: Family) -> Table<'static> {
    let family = match family {
        Family::V4 => nft::Family::Ip,
        Family::V6 => nft::Family::Ip6,
    };
    Table { family, name: "cni_hostport" }
}

/// The rule of a base chain.
pub(super) fn entry() -> Vec<Expr> {
    let mut exprs = expr::fib_daddr_local();
    exprs.push(jump(ALL));
    exprs
}

/// The rules of [`ALL`].
pub(super) fn parts() -> [Vec<Expr>; 2] {
    [vec![jump(HOSTIP_HOSTPORTS)], vec![jump(HOSTPORTS)]]
}

fn jump(chain: &str) -> Expr {
    Expr::Verdict(Verdict::Jump(chain.to_owned()))
}

/// The rule of a mapping, after its conditions.
pub(super) fn forward(claim: &ClaimedPort) -> Vec<Expr> {
    let mut exprs = claim.host_ip.map(expr::daddr).unwrap_or_default();
    exprs.extend(expr::l4proto(claim.protocol.number()));
    exprs.extend(expr::dport(claim.host_port));
    exprs.extend(expr::dnat(claim.container.ip(), Some(claim.container.port())));
    exprs
}

/// The rules of [`MASQUERADING`] for one container.
pub(super) fn masquerades(container: IpAddr, snat: Snat) -> Vec<Vec<Expr>> {
    let rule = |mut source: Vec<Expr>| {
        source.extend(expr::daddr(container));
        source.push(Expr::Masquerade);
        source
    };
    let any = match container {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
    };
    match snat {
        Snat::No => Vec::new(),
        Snat::All => vec![rule(expr::masked(expr::saddr(any), 0))],
        Snat::Hairpin => {
            let mut rules = vec![rule(expr::saddr(container))];
            // There is no such thing for ::1: the kernel does not route it.
            if container.is_ipv4() {
                rules.push(rule(expr::saddr(Ipv4Addr::LOCALHOST.into())));
            }
            rules
        }
    }
}

/// Returns the claims of a mapping's rule, and how many of its expressions, from the first, are
/// conditions. `None` for any other rule.
pub(crate) fn read(rule: &Rule) -> Option<(ClaimedPort, usize)> {
    let exprs = rule.exprs.as_slice();
    let at = exprs.iter().rposition(|expr| matches!(expr, Expr::Dnat { .. }))?;
    let container = target(exprs, at)?;
    let (dport, before) = equal(exprs, at.checked_sub(2)?)?;
    let Expr::Payload { base: Base::TRANSPORT, offset: 2, len: 2, .. } = exprs.get(before)? else { return None };
    let host_port = u16::from_be_bytes(dport.try_into().ok()?);
    let (protocol, before) = equal(exprs, before)?;
    let protocol = match (exprs.get(before)?, protocol) {
        // `tcp dport`, and `ip protocol tcp`, `ip6 nexthdr tcp` of older releases of Go.
        (Expr::Meta { key: MetaKey::L4PROTO, .. }, [number])
        | (Expr::Payload { base: Base::NETWORK, offset: 9 | 6, len: 1, .. }, [number]) => Protocol::by_number(*number)?,
        _ => return None,
    };
    let destination = equal(exprs, before).and_then(|(bytes, at)| {
        let wanted = expr::daddr(container.ip());
        let same_place = exprs.get(at) == wanted.first();
        Some((same_place.then(|| address(bytes)).flatten()?, at))
    });
    let (host_ip, conditions) = match destination {
        Some((host_ip, at)) => (Some(host_ip), at),
        None => (None, before),
    };
    Some((ClaimedPort { protocol, host_ip, host_port, container }, conditions))
}

/// Whether a rule, as the kernel sends it, compares something with one of these ports: in every
/// such rule stands an attribute `NFTA_DATA_VALUE` of two bytes, and attributes begin at multiples
/// of four.
pub(super) fn names_port(rule: &[u8], claims: &[ClaimedPort]) -> bool {
    let [len, kind] = [6_u16.to_ne_bytes(), 1_u16.to_ne_bytes()];
    let head = [len[0], len[1], kind[0], kind[1]];
    let is_claimed = |[high, low, ..]: [u8; 4]| {
        let port = u16::from_be_bytes([high, low]);
        claims.iter().any(|claim| claim.host_port == port)
    };
    rule.as_chunks::<4>().0.windows(2).any(|words| matches!(words, [a, b] if *a == head && is_claimed(*b)))
}

/// Returns an address as rules contain it.
pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Where a `dnat` at this place leads.
fn target(exprs: &[Expr], at: usize) -> Option<SocketAddr> {
    let Expr::Dnat { addr, port: Some(port), .. } = exprs.get(at)? else { return None };
    let loaded = |reg| {
        exprs[..at].iter().rev().find_map(|expr| match expr {
            Expr::Load { to, data } if *to == reg => Some(data.as_slice()),
            _ => None,
        })
    };
    let port = u16::from_be_bytes(loaded(*port)?.try_into().ok()?);
    Some(SocketAddr::new(address(loaded(*addr)?)?, port))
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        16 => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        _ => None,
    }
}

/// The data of the comparison for equality that ends before `end`, and where its load stands.
fn equal(exprs: &[Expr], end: usize) -> Option<(&[u8], usize)> {
    match exprs.get(end.checked_sub(1)?)? {
        Expr::Cmp { op: CmpOp::EQ, data, .. } => Some((data, end.checked_sub(2)?)),
        _ => None,
    }
}

/// The container a rule is about: where it leads, or whose connections it masquerades.
pub(super) fn container(rule: &Rule) -> Option<IpAddr> {
    if let Some((claim, _)) = read(rule) {
        return Some(claim.container.ip());
    }
    match rule.exprs.as_slice() {
        [
            ..,
            Expr::Payload { base: Base::NETWORK, offset: 16 | 24, .. },
            Expr::Cmp { op: CmpOp::EQ, data, .. },
            Expr::Masquerade,
        ] => address(data),
        _ => None,
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
                exprs.extend(forward(&claim));
                let rule = Rule::new(exprs);
                assert_eq!(read(&rule), Some((claim, before)), "{conditions}");
                assert_eq!(super::container(&rule), Some(container.ip()));
            }
        }
    }

    #[test]
    fn a_masquerade_is_known_by_its_destination() {
        for address in ["10.0.0.2", "fd00::2"] {
            let address: IpAddr = address.parse().unwrap();
            let rules: Vec<_> =
                [Snat::Hairpin, Snat::All].into_iter().flat_map(|snat| masquerades(address, snat)).collect();
            assert_eq!(rules.len(), if address.is_ipv4() { 3 } else { 2 });
            for exprs in rules {
                assert_eq!(container(&Rule::new(exprs)), Some(address));
            }
        }
        assert_eq!(masquerades("10.0.0.2".parse().unwrap(), Snat::No), Vec::<Vec<Expr>>::new());
    }

    #[test]
    fn any_other_rule_is_not_a_mapping() {
        assert_eq!(read(&Rule::new(entry())), None);
        assert_eq!(container(&Rule::new(entry())), None);
        assert_eq!(read(&Rule::default()), None);
        let mut exprs = forward(&ClaimedPort {
            protocol: Protocol::Tcp,
            host_ip: None,
            host_port: 1,
            container: "10.0.0.2:80".parse().unwrap(),
        });
        while !exprs.is_empty() {
            exprs.remove(0);
            assert_eq!(read(&Rule::new(exprs.clone())), None, "{exprs:?}");
        }
    }
}
