//! Differences of firewall rules.

use super::{Explanation, has_capitals, host_of, is, mappings, plugins, said, swapped, two_interfaces};

pub(super) const RULES: &[Explanation] = &[
    Explanation {
        name: "conditions in the container's own rules",
        reason: "differences, portmap: conditions are the container's own",
        covers: |case, it| {
            let conditions = case.to_string().to_lowercase().contains("\"conditionsv");
            conditions
                && ["hostports", "output", "prerouting"]
                    .iter()
                    .any(|chain| it.key.ends_with(&format!(" cni_hostport/{chain}")))
        },
    },
    Explanation {
        name: "without a mapped IPv4 port 127.0.0.1 is not routed",
        reason: "differences, portmap: route_localnet is set only where an IPv4 port is mapped",
        covers: |case, it| {
            let mut hosts = mappings(case).map(host_of);
            hosts.all(|host| host.contains(':')) && it.key.ends_with("/route_localnet") && is(&it.expected, "1")
        },
    },
    Explanation {
        name: "two networks of one family are accepted before masquerading",
        reason: "differences, bridge: two networks of one family in one attachment",
        covers: |_, it| {
            let sorted = |value: &Option<String>| {
                let mut lines: Vec<String> = value.as_deref().unwrap_or_default().lines().map(str::to_owned).collect();
                lines.sort();
                lines.dedup();
                lines
            };
            it.key.contains("tables")
                && it.key.contains("/CNI-")
                && it.ours.as_deref().is_some_and(|ours| ours.contains("-j MASQUERADE"))
                && sorted(&it.expected) == sorted(&it.ours)
        },
    },
    Explanation {
        name: "two interfaces of a container go one after the other",
        reason: "differences, portmap and bridge: interfaces of one container have rules of their own; Go's DEL of one takes the others'",
        covers: |case, it| {
            // A runtime calls DEL before Go's GC.
            ["DEL", "GC"].contains(&it.verb.as_str())
                && two_interfaces(case)
                && (it.key.contains("tables") || it.key.starts_with("nft/"))
                // What we made, Go deletes after a switch.
                && (it.ours.is_some() || it.expected.is_some() && swapped(case, it))
        },
    },
    Explanation {
        name: "a protocol in capitals is the same one",
        reason: "differences, portmap: a protocol in capitals; in Go each spelling has a jump of its own",
        covers: |case, it| {
            let ports = |value: &Option<String>| {
                let text = value.as_deref().unwrap_or_default();
                let lists = text.lines().filter_map(|line| line.split("--dports ").nth(1)?.split(' ').next());
                let mut ports: Vec<String> = lists.flat_map(|list| list.split(',')).map(str::to_owned).collect();
                ports.sort();
                ports
            };
            has_capitals(case)
                && it.key.contains("tables")
                && it.key.ends_with("/CNI-HOSTPORT-DNAT")
                && ports(&it.expected) == ports(&it.ours)
        },
    },
    Explanation {
        name: "masqAll in nftables",
        reason: "differences, portmap: masqAll works in nftables too",
        covers: |case, it| {
            let asked = plugins(case).any(|plugin| said(plugin, "masqAll") == true);
            asked && it.key.ends_with(" cni_hostport/masquerading")
        },
    },
    Explanation {
        name: "a jump for the other family's ports goes with the next interface",
        reason: "differences, portmap: interfaces of one container have rules of their own",
        covers: |case, it| {
            let (theirs, ours) = (it.expected.as_deref().unwrap_or_default(), it.ours.as_deref().unwrap_or_default());
            let one_family = mappings(case).any(|mapping| !host_of(mapping).is_empty());
            let fewer = ours.lines().all(|line| theirs.contains(line));
            it.verb == "ADD"
                && one_family
                && fewer
                && two_interfaces(case)
                && it.key.contains("tables")
                && it.key.ends_with("/CNI-HOSTPORT-DNAT")
        },
    },
    Explanation {
        name: "rules that ip6tables-legacy -C hid from Go",
        reason: "differences, portmap: ip6tables-legacy -C finds rules that are not there",
        covers: |_, it| {
            let ours = it.ours.as_deref().unwrap_or_default();
            let more = it.expected.as_deref().is_some_and(|theirs| theirs.lines().all(|line| ours.contains(line)));
            more && it.key.starts_with("ip6tables-legacy/CNI-")
        },
    },
];
