//! For pkg/cni-fuzz: reads a subnet file.

use std::fmt::Write as _;

use cni::Cidr;

use crate::subnet::Lease;

/// Reads a subnet file and asserts what must be true of each that is accepted. Returns the file as
/// flanneld writes it, or `None` if it is refused.
pub fn rewritten(text: &str) -> Option<String> {
    let lease = Lease::parse(text).ok()?;
    let Lease { networks, subnets, mtu, is_masquerading } = &lease;
    assert!(!networks.is_empty() && !subnets.is_empty());
    assert!(networks.iter().chain(subnets).all(Cidr::is_network));
    let mut written = String::new();
    for (name, all) in [("NETWORK", networks), ("SUBNET", subnets)] {
        for (family, is_ipv4) in [("", true), ("IPV6_", false)] {
            let of_family = all.iter().filter(|cidr| cidr.is_ipv4() == is_ipv4).map(Cidr::to_string);
            let joined = of_family.collect::<Vec<_>>().join(",");
            if !joined.is_empty() {
                let _ = writeln!(written, "FLANNEL_{family}{name}={joined}");
            }
        }
    }
    let _ = writeln!(written, "FLANNEL_MTU={mtu}\nFLANNEL_IPMASQ={is_masquerading}");
    assert_eq!(Lease::parse(&written).as_ref(), Ok(&lease), "a subnet file must be read as it was written");
    Some(written)
}
