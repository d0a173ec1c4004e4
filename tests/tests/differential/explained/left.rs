//! What an ADD that both refuse may leave.

use super::{Explanation, bridges, left};

pub(super) const REFUSED: &[Explanation] = &[
    Explanation {
        name: "a refused ADD leaves the bridge",
        reason: "differences, the protocol: a failed ADD leaves nothing but the bridge",
        covers: |case, it| {
            left(it) && bridges(case).any(|bridge| it.key == format!("host/link/{bridge}")) && it.expected.is_none()
        },
    },
    Explanation {
        name: "a refused ADD leaves the store's own files",
        reason: "docs/plugins/host-local.md, What it leaves: lock and last_reserved_ip are not reservations",
        covers: |_, it| {
            left(it)
                && it.key.starts_with("file/")
                && (it.key.ends_with("/lock") || it.key.contains("/last_reserved_ip."))
        },
    },
    Explanation {
        name: "a refused ADD leaves an existing bridge up",
        reason: "differences, the protocol: a failed ADD leaves nothing but the bridge, which is shared",
        covers: |case, it| {
            let of = |bridge: &str| {
                ["flags", "promiscuity", "qdisc", "tso_max_size", "tso_max_segs"]
                    .iter()
                    .any(|field| it.key == format!("host/link/{bridge}/{field}"))
                    || it.key == format!("host/sysctl/net/ipv6/conf/{bridge}/accept_ra")
            };
            left(it) && (bridges(case).any(of) || it.key == "host/link/port0/linkinfo/info_slave_data/state")
        },
    },
    Explanation {
        name: "a refused ADD leaves shared chains",
        reason: "docs/plugins/bridge.md and portmap.md, What it leaves: shared tables and chains stay",
        covers: |_, it| {
            let shared = [
                "nft/bridge nat",
                "nft/bridge nat/PREROUTING",
                "nft/inet cni_plugins_masquerade",
                "nft/ip cni_hostport",
                "nft/ip6 cni_hostport",
            ];
            let rules = it.ours.as_deref().unwrap_or_default();
            left(it)
                && shared.iter().any(|key| it.key.starts_with(key))
                && !rules.contains(" saddr ")
                && !rules.contains("iifname")
        },
    },
    Explanation {
        name: "a refused ADD leaves shared chains of iptables",
        reason: "docs/plugins/portmap.md, What it leaves: CNI-HOSTPORT-DNAT, -SETMARK and -MASQ and the rules that lead there",
        covers: |_, it| {
            let rules = it.ours.as_deref().unwrap_or_default();
            let leads_there = rules.lines().all(|rule| rule.contains("-j CNI-HOSTPORT-"));
            left(it)
                && it.expected.is_none()
                && it.key.contains("tables")
                && (it.key.contains("/CNI-HOSTPORT-") && !rules.contains("CNI-DN-") || leads_there)
        },
    },
    Explanation {
        name: "a refused ADD leaves the gateway",
        reason: "differences, the protocol: a failed ADD leaves nothing but the bridge, its gateway addresses and forwarding",
        covers: |_, it| {
            let keys = ["host/addresses/", "host/route/", "host/sysctl/net/ipv4/ip_forward", "host/link/"];
            let sysctl = it.key.starts_with("host/sysctl/")
                && ["/forwarding", "/accept_redirects"].iter().any(|end| it.key.ends_with(end));
            left(it)
                && it.ours.is_some()
                && (sysctl || !it.key.contains("veth") && keys.iter().any(|key| it.key.starts_with(key)))
        },
    },
];
