//! The names of DHCP options.

use cni::{Error, Result};

/// The codes of the options and their names: first that of dhcp-options(5) for the options of RFC
/// 2132, then that of dnsmasq if it differs. The six names that the Go plugin accepts are among
/// them.
const NAMES: &[(u8, &[&str])] = &[
    (1, &["subnet-mask", "netmask"]),
    (2, &["time-offset"]),
    (3, &["routers", "router"]),
    (4, &["time-servers"]),
    (5, &["ien116-name-servers"]),
    (6, &["domain-name-servers", "dns-server"]),
    (7, &["log-servers", "log-server"]),
    (8, &["cookie-servers"]),
    (9, &["lpr-servers", "lpr-server"]),
    (10, &["impress-servers"]),
    (11, &["resource-location-servers"]),
    (12, &["host-name"]),
    (13, &["boot-size", "boot-file-size"]),
    (14, &["merit-dump"]),
    (15, &["domain-name"]),
    (16, &["swap-server"]),
    (17, &["root-path"]),
    (18, &["extensions-path", "extension-path"]),
    (19, &["ip-forwarding", "ip-forward-enable"]),
    (20, &["non-local-source-routing"]),
    (21, &["policy-filter"]),
    (22, &["max-dgram-reassembly", "max-datagram-reassembly"]),
    (23, &["default-ip-ttl", "default-ttl"]),
    (24, &["path-mtu-aging-timeout"]),
    (25, &["path-mtu-plateau-table"]),
    (26, &["interface-mtu", "mtu"]),
    (27, &["all-subnets-local"]),
    (28, &["broadcast-address"]),
    (29, &["perform-mask-discovery"]),
    (30, &["mask-supplier"]),
    (31, &["router-discovery"]),
    (32, &["router-solicitation-address", "router-solicitation"]),
    (33, &["static-routes", "static-route"]),
    (34, &["trailer-encapsulation"]),
    (35, &["arp-cache-timeout", "arp-timeout"]),
    (36, &["ieee802-3-encapsulation", "ethernet-encap"]),
    (37, &["default-tcp-ttl", "tcp-ttl"]),
    (38, &["tcp-keepalive-interval", "tcp-keepalive"]),
    (39, &["tcp-keepalive-garbage"]),
    (40, &["nis-domain"]),
    (41, &["nis-servers", "nis-server"]),
    (42, &["ntp-servers", "ntp-server"]),
    (43, &["vendor-encapsulated-options"]),
    (44, &["netbios-name-servers", "netbios-ns"]),
    (45, &["netbios-dd-server", "netbios-dd"]),
    (46, &["netbios-node-type", "netbios-nodetype"]),
    (47, &["netbios-scope"]),
    (48, &["font-servers", "x-windows-fs"]),
    (49, &["x-display-manager", "x-windows-dm"]),
    (58, &["dhcp-renewal-time", "T1"]),
    (59, &["dhcp-rebinding-time", "T2"]),
    (60, &["vendor-class-identifier", "vendor-class"]),
    (61, &["dhcp-client-identifier"]),
    (64, &["nisplus-domain", "nis+-domain"]),
    (65, &["nisplus-servers", "nis+-server"]),
    (66, &["tftp-server-name", "tftp-server"]),
    (67, &["bootfile-name"]),
    (68, &["mobile-ip-home-agent", "mobile-ip-home"]),
    (69, &["smtp-server"]),
    (70, &["pop-server", "pop3-server"]),
    (71, &["nntp-server"]),
    (72, &["www-server"]),
    (73, &["finger-server"]),
    (74, &["irc-server"]),
    (75, &["streettalk-server"]),
    (76, &["streettalk-directory-assistance-server"]),
    (77, &["user-class"]),
    (80, &["rapid-commit"]),
    (93, &["client-arch"]),
    (94, &["client-interface-id"]),
    (97, &["client-machine-id"]),
    (100, &["posix-timezone"]),
    (101, &["tzdb-timezone"]),
    (108, &["ipv6-only"]),
    (119, &["domain-search"]),
    (120, &["sip-servers", "sip-server"]),
    (121, &["classless-static-routes", "classless-static-route"]),
    (125, &["vendor-id-encap"]),
    (150, &["tftp-server-address"]),
];

/// The names that the Go plugin accepts, as examples in an error.
const COMMON: &str = "dhcp-client-identifier, subnet-mask, routers, host-name, user-class, vendor-class-identifier";

/// Returns the code of an option, which is given as a number or by name.
///
/// # Errors
/// Code 7 for another text, and for options that a configuration must not set.
pub(crate) fn option_code(text: &str) -> Result<u8> {
    let named = NAMES.iter().find(|(_, names)| names.contains(&text)).map(|(code, _)| *code);
    let code = named.or_else(|| text.parse::<u8>().ok());
    // 0 and 255 are padding and the end of a message. The protocol sets the others: requested
    // address, lease time, overload, message type, server, requested options, and longest message.
    let details = match code {
        Some(0 | 50..=55 | 57 | 255) => {
            "the DHCP protocol itself uses this option, so a configuration must not use it".to_owned()
        }
        Some(code) => return Ok(code),
        None => format!("an option is a number from 1 to 254 or one of {COMMON}, or another name of RFC 2132"),
    };
    Err(Error::config(format!("Can not parse option {text:?}")).with_details(details))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_have_the_names_of_rfc_2132_and_of_dnsmasq() {
        for (name, code) in [
            ("interface-mtu", 26),
            ("mtu", 26),
            ("domain-search", 119),
            ("ntp-servers", 42),
            ("ntp-server", 42),
            ("domain-name-servers", 6),
            ("dns-server", 6),
            ("dhcp-client-identifier", 61),
            ("42", 42),
        ] {
            assert_eq!(option_code(name).unwrap(), code, "{name}");
        }
        let all: Vec<&str> = NAMES.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let distinct: std::collections::BTreeSet<&str> = all.iter().copied().collect();
        assert_eq!(distinct.len(), all.len(), "no name has two codes");
        assert!(NAMES.iter().all(|(_, names)| option_code(names[0]).is_ok()), "all are allowed");
        assert!(COMMON.split(", ").all(|name| distinct.contains(name)));
    }
}
