//! Differences of links, addresses, routes, sysctls, files and results.

use super::{Explanation, bridges, has_plugin, is, other_default, outcome, plugins, said};
use crate::side::{at_least, list};

pub(super) const NODE: &[Explanation] = &[
    Explanation {
        name: "IPv6 addresses without duplicate detection",
        reason: "differences, bridge: usable at once unless enabledad",
        covers: |_, it| {
            let plain = |value: &Option<String>| value.as_deref().unwrap_or_default().replace(" nodad=true", "");
            it.key.contains("/addresses/") && plain(&it.expected) == plain(&it.ours)
        },
    },
    Explanation {
        name: "the gateway's IPv6 address needs no detection",
        reason: "differences, bridge: usable at once unless enabledad; until detection is over, an address has no local routes",
        covers: |case, it| {
            let theirs = it.expected.as_deref().unwrap_or_default();
            let more = it.ours.as_deref().is_some_and(|ours| theirs.lines().all(|line| ours.contains(line)));
            let detected = plugins(case).any(|plugin| said(plugin, "enabledad") == true);
            it.key.starts_with("host/route/local/") && it.key.contains(':') && (more || detected)
        },
    },
    Explanation {
        name: "IPv6 addresses are announced",
        reason: "differences, bridge: addresses are announced, those of IPv6 too",
        covers: |_, it| {
            it.key.ends_with("/ndisc_notify") && it.key.starts_with('c') && is(&it.expected, "0") && is(&it.ours, "1")
        },
    },
    Explanation {
        name: "transmit queue of the host's end",
        reason: "differences, bridge: the host's end has the kernel's transmit queue length",
        covers: |_, it| {
            it.key.starts_with("host/link/veth(")
                && it.key.ends_with("/txqlen")
                && it.expected.is_none()
                && is(&it.ours, "1000")
        },
    },
    Explanation {
        name: "the bridge's MAC is set when it is made",
        reason: "differences, bridge: never changes with the ports",
        covers: |_, it| {
            it.key.starts_with("host/link/")
                && it.key.ends_with("/addr_assign_type")
                && is(&it.expected, "\"1\"")
                && is(&it.ours, "\"3\"")
        },
    },
    Explanation {
        name: "route mtu and advmss are set",
        reason: "differences, bridge: route mtu and advmss are set",
        covers: |_, it| {
            let without =
                it.ours.as_deref().unwrap_or_default().split(' ').filter(|field| !field.starts_with("metrics="));
            it.key.contains("/route/")
                && it.expected.as_deref().is_some_and(|theirs| theirs == without.collect::<Vec<_>>().join(" "))
        },
    },
    Explanation {
        name: "the originals stay in the backup",
        reason: "differences, tuning: a second ADD keeps the first one's originals; two entries in one list share the backup",
        covers: |case, it| {
            it.key.starts_with("file/run/")
                && it.key.ends_with(".json")
                && it.expected.is_some()
                && it.ours.is_some()
                && plugins(case).filter(|plugin| plugin["type"] == "tuning").count() > 1
        },
    },
    Explanation {
        name: "sysctls go back at DEL",
        reason: "differences, tuning: sysctls are restored at DEL",
        covers: |case, it| it.verb == "DEL" && it.key.contains("/sysctl/") && case.to_string().contains("\"sysctl\":"),
    },
    Explanation {
        name: "a backup of sysctls alone",
        reason: "docs/differences.md, In the kernel and on disk: more keys in the backups of tuning",
        covers: |case, it| {
            it.key.starts_with("file/run/")
                && it.expected.is_none()
                && is(&it.ours, "{}")
                && case.to_string().contains("\"sysctl\":")
        },
    },
    Explanation {
        name: "several gateways make one route",
        reason: "differences, bridge: several gateways of one destination make one route over several paths",
        covers: |_, it| {
            it.key.contains("/route/")
                && it.ours.as_deref().is_some_and(|ours| ours.contains("nexthops="))
                && it.expected.as_deref().is_some_and(|theirs| theirs.lines().count() > 1)
        },
    },
    Explanation {
        name: "a default route is behind that of another network",
        reason: "differences, bridge: a default route is added behind that of another network",
        covers: |case, it| {
            let ours = it.ours.as_deref().unwrap_or_default();
            let route = it.key.starts_with('c') && it.key.contains("/route/") && it.key.ends_with("/default");
            // After the DEL of one network, the other's route still has its metric.
            other_default(case) && route && ours.contains("metric=")
        },
    },
    Explanation {
        name: "the metric of a default route that is behind another is in the result",
        reason: "differences, bridge: a default route is added behind that of another network",
        covers: |case, it| other_default(case) && it.key.starts_with("result/") && it.key.contains("routes/"),
    },
    Explanation {
        name: "the result of loopback has its version's shape",
        reason: "differences, loopback: results for 0.1.0 to 0.4.0 have the right shape",
        covers: |case, it| {
            it.key.starts_with("result/")
                && case["lists"][0]["plugins"][0]["type"] == "loopback"
                && !at_least(&case["lists"][0], "1.0.0")
        },
    },
    Explanation {
        name: "a MAC in the result as the kernel writes it",
        reason: "docs/plugins/tuning.md: the result has the MAC as it is now",
        covers: |_, it| {
            let (theirs, ours) = (it.expected.as_deref().unwrap_or_default(), it.ours.as_deref().unwrap_or_default());
            it.key.starts_with("result/interfaces/") && it.key.ends_with("/mac") && theirs.eq_ignore_ascii_case(ours)
        },
    },
    Explanation {
        name: "the MTU that tuning has set",
        reason: "differences, tuning: this sandbox's entry of the result gets, in 1.1.0, the MTU",
        covers: |case, it| it.key == "result/interfaces/2/mtu" && it.expected.is_none() && has_plugin(case, "tuning"),
    },
    Explanation {
        name: "forceAddress spares the gateways of its own list",
        reason: "docs/plugins/bridge.md, forceAddress: never a gateway of this configuration",
        covers: |case, it| {
            let forced = plugins(case).any(|plugin| said(plugin, "forceAddress") == true);
            let theirs = it.expected.as_deref().unwrap_or_default();
            let more = it
                .ours
                .as_deref()
                .is_some_and(|ours| theirs.lines().all(|line| ours.replace(" nodad=true", "").contains(line)));
            // Without the address Go's host has no route to the container, and its portmap sets no
            // route_localnet.
            let localnet = it.key.ends_with("/route_localnet") && is(&it.ours, "1");
            forced && (localnet || more && (it.key.starts_with("host/addresses/") || it.key.starts_with("host/route/")))
        },
    },
    Explanation {
        name: "what follows forwarding goes back with it",
        reason: "differences, tuning: sysctls are restored at DEL",
        covers: |case, it| {
            let anycast = it.expected.as_deref().is_some_and(|route| route.ends_with("type=\"anycast\""));
            it.verb == "DEL"
                && anycast
                && it.ours.is_none()
                && case.to_string().contains("net.ipv6.conf.all.forwarding")
        },
    },
    Explanation {
        name: "an interface named like its bridge",
        reason: "differences, tuning: Go changes every entry of the result with that name",
        covers: |case, it| {
            let ifnames = list(&case["steps"]).iter().filter_map(|step| step["ifname"].as_str());
            let alike = ifnames.into_iter().any(|ifname| bridges(case).any(|bridge| bridge == ifname));
            let check = it.verb == "CHECK" && outcome(it, "should not be in sandbox", "done");
            alike && (check || it.key == "result/interfaces/0/mac")
        },
    },
    Explanation {
        name: "the kernel sees a missing carrier a second later",
        reason: "no difference: the port of an interface that stays down is disabled by then",
        covers: |case, it| {
            let down = plugins(case).any(|plugin| said(plugin, "disableContainerInterface") == true);
            down && it.key.starts_with("host/link/veth(") && it.key.ends_with("/info_slave_data/state")
        },
    },
    Explanation {
        name: "the runtime's DNS",
        reason: "differences, bridge: runtimeConfig.dns goes into the result",
        covers: |case, it| {
            let asked = plugins(case).any(|plugin| plugin["runtimeConfig"]["dns"].is_object());
            asked && it.key.starts_with("result/dns")
        },
    },
    Explanation {
        name: "a default route of IPAM's without a gateway is the gateway's",
        reason: "differences, bridge: isDefaultGateway with a default route from IPAM works",
        covers: |case, it| {
            let listed = plugins(case).filter(|plugin| said(plugin, "isDefaultGateway") == true);
            let bare = listed.flat_map(|plugin| list(&plugin["ipam"]["routes"])).any(|route| {
                route["gw"].is_null() && ["0.0.0.0/0", "::/0"].iter().any(|default| route["dst"] == *default)
            });
            let fewer = it.ours.as_deref().is_some_and(|ours| {
                ours.lines().all(|line| it.expected.as_deref().is_some_and(|theirs| theirs.contains(line)))
            });
            let route = it.key.starts_with('c') && it.key.ends_with("/main/default") && fewer;
            bare && it.verb == "ADD" && (route || it.key.starts_with("result/") && it.key.contains("routes/"))
        },
    },
];
