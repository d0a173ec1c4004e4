//! The subnet file, in which flanneld publishes the node's part of the network.

use std::path::Path;

use cni::{Cidr, Code, Error, Result};

/// What flanneld has leased for this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    /// The networks of the cluster, IPv4 before IPv6.
    pub(crate) networks: Vec<Cidr>,
    /// The node's subnet of each family, IPv4 first.
    pub(crate) subnets: Vec<Cidr>,
    /// The MTU of the network.
    pub(crate) mtu: u32,
    /// Whether flanneld masquerades.
    pub(crate) is_masquerading: bool,
}

impl Lease {
    /// Reads the subnet file.
    ///
    /// # Errors
    /// - Code 5 if the file exists and cannot be read.
    /// - Code 11 if it does not exist, or is incomplete or invalid: flanneld may still write it.
    pub(crate) fn read(path: &Path) -> Result<Lease> {
        let shown = path.display();
        let not_yet = |error: Error| {
            error.with_details("flanneld writes this file once it has a subnet for the node: is flanneld running?")
        };
        let bytes = cni::file::read(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                let doing = format_args!("flanneld has not written the subnet file {shown} yet");
                not_yet(Error::caused(Code::TRY_AGAIN, doing, error))
            }
            _ => Error::caused(Code::IO, format_args!("failed to read the subnet file {shown}"), error),
        })?;
        Lease::parse(&String::from_utf8_lossy(&bytes)).map_err(|why| {
            let msg = format!("flanneld has not written the subnet file {shown} completely yet: {why}");
            not_yet(Error::new(Code::TRY_AGAIN, msg))
        })
    }

    /// Parses the content of the file: a line `KEY=value` for each value. Other keys are ignored.
    /// Of duplicate keys, the last one is used. The error is the reason why the file has no lease.
    pub(crate) fn parse(text: &str) -> Result<Lease, String> {
        let value_of = |name: &str| {
            let mut values = text.lines().filter_map(|line| line.split_once('=').filter(|(key, _)| *key == name));
            values.next_back().map(|(_, value)| value)
        };
        let invalid = |name: &str, value: &str| format!("invalid {name}: {value:?}");
        let mut missing = Vec::new();
        let mut families = |names: [&'static str; 2]| {
            let mut all: Vec<Cidr> = Vec::new();
            for (name, is_ipv4) in names.into_iter().zip([true, false]) {
                for part in value_of(name).into_iter().flat_map(|value| value.split(',')) {
                    let cidr = part.parse().ok().filter(|cidr: &Cidr| cidr.is_ipv4() == is_ipv4);
                    let network = cidr.ok_or_else(|| invalid(name, part))?.network();
                    if !all.contains(&network) {
                        all.push(network);
                    }
                }
            }
            if all.is_empty() {
                missing.push(format!("{} and {}", names[0], names[1]));
            }
            Ok::<_, String>(all)
        };
        let networks = families(["FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"])?;
        let subnets = families(["FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"])?;
        let mut single = |name: &'static str| {
            let value = value_of(name);
            if value.is_none() {
                missing.push(name.to_owned());
            }
            value.unwrap_or_default()
        };
        let (mtu, masquerading) = (single("FLANNEL_MTU"), single("FLANNEL_IPMASQ"));
        if !missing.is_empty() {
            return Err(format!("{} missing", missing.join(", ")));
        }
        let mtu = mtu.parse().map_err(|_| invalid("FLANNEL_MTU", mtu))?;
        let is_masquerading = masquerading.parse().map_err(|_| invalid("FLANNEL_IPMASQ", masquerading))?;
        Ok(Lease { networks, subnets, mtu, is_masquerading })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str =
        "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.3.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

    fn cidrs(all: &[Cidr]) -> Vec<String> {
        all.iter().map(Cidr::to_string).collect()
    }

    #[test]
    fn the_values_of_both_families_are_read() {
        let lease = Lease::parse(FILE).unwrap();
        assert_eq!(
            (cidrs(&lease.networks), cidrs(&lease.subnets)),
            (vec!["10.42.0.0/16".into()], vec!["10.42.3.0/24".into()])
        );
        assert_eq!((lease.mtu, lease.is_masquerading), (1450, true));
        let both = format!(
            "{FILE}OTHER=1\n\nFLANNEL_NETWORK=10.42.0.0/16,10.43.0.0/16,10.42.0.9/16\nFLANNEL_IPV6_NETWORK=fd42::/48\n\
             FLANNEL_IPV6_SUBNET=fd42:0:0:3::1/64\nFLANNEL_IPMASQ=false"
        );
        let lease = Lease::parse(&both).unwrap();
        assert_eq!(cidrs(&lease.networks), ["10.42.0.0/16", "10.43.0.0/16", "fd42::/48"]);
        assert_eq!(cidrs(&lease.subnets), ["10.42.3.0/24", "fd42:0:0:3::/64"]);
        assert!(!lease.is_masquerading);
    }

    #[test]
    fn a_file_that_is_cut_anywhere_is_refused() {
        for end in 0..FILE.len() - 1 {
            assert!(Lease::parse(&FILE[..end]).is_err(), "{:?}", &FILE[..end]);
        }
        assert_eq!(
            Lease::parse("").unwrap_err(),
            "FLANNEL_NETWORK and FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET and FLANNEL_IPV6_SUBNET, FLANNEL_MTU, FLANNEL_IPMASQ missing"
        );
    }

    #[test]
    fn invalid_values_are_named() {
        for (from, to, why) in [
            ("10.42.0.0/16", "10.42.0.0", "invalid FLANNEL_NETWORK: \"10.42.0.0\""),
            ("10.42.3.1/24", "fd42::/64", "invalid FLANNEL_SUBNET: \"fd42::/64\""),
            ("1450", "-1", "invalid FLANNEL_MTU: \"-1\""),
            ("=true", "=tru", "invalid FLANNEL_IPMASQ: \"tru\""),
        ] {
            assert_eq!(Lease::parse(&FILE.replace(from, to)).unwrap_err(), why);
        }
    }
}
