//! The differences that are meant, each as narrow as it can be told.

use serde_json::Value;

use crate::compare::{Difference, Kind};
use crate::side::{at_least, list};

/// A difference that is meant.
pub(crate) struct Explanation {
    /// Its name in the figures.
    pub(crate) name: &'static str,
    /// Where it is explained to users, or the decision behind it.
    pub(crate) reason: &'static str,
    /// Whether a difference in a case is this one.
    pub(crate) covers: fn(&Value, &Difference) -> bool,
}

/// All of them.
pub(crate) const EXPLANATIONS: &[Explanation] = &[
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
        reason: "differences, bridge: usable at once unless enabledad; Go's gets its local routes a second later",
        covers: |_, it| it.key.starts_with("host/route/local/") && it.key.contains(':') && it.expected.is_none(),
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
        name: "a refused ADD leaves the bridge",
        reason: "differences, the protocol: a failed ADD leaves nothing but the bridge",
        covers: |case, it| {
            left(it) && bridges(case).any(|bridge| it.key == format!("host/link/{bridge}")) && it.expected.is_none()
        },
    },
    Explanation {
        name: "a refused ADD leaves the store's own files",
        reason: "docs/plugins/host-local.md, What it leaves: lock and last_reserved_ip are nobody's reservation",
        covers: |_, it| {
            left(it)
                && it.key.starts_with("file/")
                && (it.key.ends_with("/lock") || it.key.contains("/last_reserved_ip."))
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
        name: "another network's default route stays alone",
        reason: "differences, bridge: a default route is left out where another network's is there already",
        covers: |case, it| {
            let (theirs, ours) = (it.expected.as_deref().unwrap_or_default(), it.ours.as_deref().unwrap_or_default());
            let route = it.key.starts_with('c') && it.key.ends_with("/main/default");
            let interfaces = |text: &str| text.matches("dev=").count() + text.matches("\"dev\":").count();
            let fewer = !ours.is_empty() && interfaces(ours) < interfaces(theirs);
            // Without the route of the first network there is none after its DEL.
            other_default(case) && route && (fewer || it.verb == "DEL" && it.ours.is_none())
        },
    },
    Explanation {
        name: "a default route that was left out is not in the result",
        reason: "differences, bridge: a default route is left out where another network's is there already",
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
        name: "a family without a port has no chains",
        reason: "differences, portmap: in a family in which no port is mapped nothing is made",
        covers: |case, it| {
            let family = if it.key.starts_with("ip6tables") || it.key.starts_with("nft/ip6") { ':' } else { '.' };
            let mut hosts = mappings(case).map(|mapping| mapping["hostIP"].as_str().unwrap_or_default());
            let ours = it.ours.as_deref().unwrap_or_default();
            let fewer = ours.lines().all(|line| it.expected.as_deref().is_some_and(|theirs| theirs.contains(line)));
            let nobody = hosts.all(|host| !host.is_empty() && !host.contains(family));
            let rules = it.key.contains("tables")
                || it.key.starts_with("nft/ip cni_hostport")
                || it.key.starts_with("nft/ip6 cni_hostport");
            nobody && (rules && fewer || it.key.ends_with("/route_localnet") && is(&it.expected, "1"))
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
            it.verb == "DEL"
                && two_interfaces(case)
                && (it.key.contains("tables") || it.key.starts_with("nft/"))
                && it.ours.is_some()
        },
    },
    Explanation {
        name: "the same route twice is one",
        reason: "differences, bridge: a route that is there already, and alike, is fine",
        covers: |_, it| {
            outcome(it, "failed to add route", "done")
                && it.expected.as_deref().is_some_and(|text| text.contains("file exists"))
        },
    },
    Explanation {
        name: "two IPv4 ranges with a gateway",
        reason: "differences, bridge: two IPv4 ranges with a gateway work",
        covers: |_, it| outcome(it, "failed to set bridge addr", "done"),
    },
    Explanation {
        name: "an empty ipMasqBackend",
        reason: "differences, bridge: an empty ipMasqBackend is none",
        covers: |_, it| outcome(it, "unknown ipmasq backend \"\"", "done"),
    },
    Explanation {
        name: "another interface's route is in the way",
        reason: "differences, bridge: any other route fails the ADD where another interface of the container has one to the same destination",
        covers: |case, it| {
            let crowded = two_interfaces(case) || case["inside"].to_string().contains("route add");
            crowded
                && outcome(it, "done", "failed to add route")
                && it.ours.as_deref().is_some_and(|text| text.contains("File exists"))
        },
    },
    Explanation {
        name: "Go's CHECK of a layer 2 network",
        reason: "differences, bridge: CHECK of a layer 2 network works",
        covers: |_, it| it.verb == "CHECK" && outcome(it, "no plugin name provided", "done"),
    },
    Explanation {
        name: "Go's CHECK compares texts",
        reason: "differences, tuning: CHECK compares MACs and sysctls by value",
        covers: |_, it| {
            it.verb == "CHECK"
                && (outcome(it, "Tuning configured value of", "done")
                    || outcome(it, "Tuning configured Ethernet of", "done")
                    || outcome(it, "doesn't match container Mac", "done"))
        },
    },
    Explanation {
        name: "Go's CHECK knows the main table alone",
        reason: "differences, bridge: CHECK looks for a route in its table",
        covers: |_, it| {
            it.verb == "CHECK"
                && outcome(it, "not found in routing table", "done")
                && !it.expected.as_deref().unwrap_or_default().contains("Table:<nil>")
        },
    },
    Explanation {
        name: "Go's DEL of masquerading fails",
        reason: "differences, bridge: in Go the DEL of one interface of two, or of two addresses of one family, fails",
        covers: |_, it| {
            ["DEL", "GC"].contains(&it.verb.as_str())
                && (outcome(it, "tables -t nat -D POSTROUTING", "done") || outcome(it, "tables -t nat -X CNI-", "done"))
        },
    },
    Explanation {
        name: "masqAll in nftables",
        reason: "differences, portmap: masqAll works in nftables too",
        covers: |case, it| {
            let asked = plugins(case).any(|plugin| plugin["masqAll"] == true || plugin["MASQALL"] == true);
            asked && it.key.ends_with(" cni_hostport/masquerading")
        },
    },
    Explanation {
        name: "forceAddress spares the gateways of its own list",
        reason: "docs/plugins/bridge.md, forceAddress: never a gateway of this configuration",
        covers: |case, it| {
            let forced = plugins(case).any(|plugin| plugin["forceAddress"] == true);
            let theirs = it.expected.as_deref().unwrap_or_default();
            let more = it.ours.as_deref().is_some_and(|ours| theirs.lines().all(|line| ours.contains(line)));
            forced && more && (it.key.starts_with("host/addresses/") || it.key.starts_with("host/route/"))
        },
    },
    Explanation {
        name: "CHECK of the earlier of two tunings",
        reason: "differences, tuning: CHECK of the earlier accepts what the later set",
        covers: |case, it| {
            let twice = plugins(case).filter(|plugin| plugin["type"] == "tuning").count() > 1;
            it.verb == "CHECK" && twice && outcome(it, "refused by tuning", "done")
        },
    },
    Explanation {
        name: "Go's CHECK misses its empty chain",
        reason: "differences, portmap: in a family in which no port is mapped nothing is made",
        covers: |_, it| it.verb == "CHECK" && outcome(it, "dnat: chain CNI-DN-", "done"),
    },
    Explanation {
        name: "STATUS asks what ADD will need",
        reason: "differences, the protocol: STATUS; `status` is compared with the ADD that follows",
        covers: |_, it| it.verb == "STATUS" && outcome(it, "done", "refused"),
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
        name: "Go's CHECK compares the MAC of a bridge that follows its ports",
        reason: "differences, bridge: the MAC never changes with the ports, and CHECK does not judge it",
        covers: |_, it| {
            let words = outcome(it, "Bridge interface", "done");
            it.verb == "CHECK" && words && it.expected.as_deref().is_some_and(|text| text.contains("Mac doesn't match"))
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
        name: "Go's CHECK counts the rules without masqAll",
        reason: "differences, portmap: masqAll works in nftables too",
        covers: |case, it| {
            let asked = plugins(case).any(|plugin| plugin["masqAll"] == true || plugin["MASQALL"] == true);
            asked && it.verb == "CHECK" && outcome(it, "missing hostport rules in \"masquerading\" chain", "done")
        },
    },
    Explanation {
        name: "an absent protocol is tcp",
        reason: "differences, portmap: an absent protocol is tcp",
        covers: |case, it| {
            let absent = mappings(case).any(|mapping| mapping["protocol"].as_str().unwrap_or_default().is_empty());
            absent && it.verb == "ADD" && outcome(it, "refused by portmap", "done")
        },
    },
    Explanation {
        name: "capabilities are the runtime's",
        reason: "differences, the protocol: keys that only the runtime reads are not judged",
        covers: |_, it| outcome(it, "PluginConf.capabilities", "done"),
    },
    Explanation {
        name: "a route of link scope needs no gateway",
        reason: "differences, bridge: a route with a scope of link or narrower goes to the link",
        covers: |_, it| {
            let text = it.expected.as_deref().unwrap_or_default();
            let scope = text.contains("Scope: link") || text.contains("Scope: host");
            scope && outcome(it, "failed to add route", "done")
        },
    },
    Explanation {
        name: "the kernel sees a missing carrier a second later",
        reason: "no difference: the port of an interface that stays down is disabled by then",
        covers: |case, it| {
            let down = plugins(case).any(|plugin| plugin["disableContainerInterface"] == true);
            down && it.key.starts_with("host/link/veth(") && it.key.ends_with("/info_slave_data/state")
        },
    },
    Explanation {
        name: "a jump for the other family's ports goes with the next interface",
        reason: "differences, portmap: interfaces of one container have rules of their own",
        covers: |case, it| {
            let (theirs, ours) = (it.expected.as_deref().unwrap_or_default(), it.ours.as_deref().unwrap_or_default());
            let one_family = mappings(case).any(|mapping| !mapping["hostIP"].as_str().unwrap_or_default().is_empty());
            let fewer = ours.lines().all(|line| theirs.contains(line));
            it.verb == "ADD"
                && one_family
                && fewer
                && two_interfaces(case)
                && it.key.ends_with("tables/CNI-HOSTPORT-DNAT")
        },
    },
    Explanation {
        name: "rules that ip6tables-legacy -C hid from Go",
        reason: "differences, portmap: ip6tables-legacy -C finds rules that are not there",
        covers: |_, it| {
            let ours = it.ours.as_deref().unwrap_or_default();
            let more = it.expected.as_deref().is_some_and(|theirs| theirs.lines().all(|line| ours.contains(line)));
            more && it.key.starts_with("ip6tables-legacy/CNI-DN-")
        },
    },
    Explanation {
        name: "CHECK sees a spoof rule of another MAC",
        reason: "docs/plugins/bridge.md, macspoofchk: CHECK names the MAC that the rule pins",
        covers: |case, it| {
            let asked = plugins(case).any(|plugin| plugin["macspoofchk"] == true);
            asked && it.verb == "CHECK" && outcome(it, "done", "spoof rule pins MAC")
        },
    },
];

/// Whether this is something that a refused ADD has left.
fn left(it: &Difference) -> bool {
    it.kind != Kind::Differs
}

fn is(value: &Option<String>, text: &str) -> bool {
    value.as_deref() == Some(text)
}

/// Whether Go's step came to this and ours to that: `done`, or words of the error.
fn outcome(it: &Difference, theirs: &str, ours: &str) -> bool {
    let came_to = |value: &Option<String>, words: &str| {
        let text = value.as_deref().unwrap_or_default();
        if words == "done" { text == "done" } else { text.contains(words) }
    };
    it.key == "outcome" && came_to(&it.expected, theirs) && came_to(&it.ours, ours)
}

fn plugins(case: &Value) -> impl Iterator<Item = &Value> {
    list(&case["lists"]).iter().flat_map(|of| list(&of["plugins"]))
}

fn has_plugin(case: &Value, name: &str) -> bool {
    plugins(case).any(|plugin| plugin["type"] == name)
}

/// The bridges of the case's lists. Keys are alike in any case.
fn bridges(case: &Value) -> impl Iterator<Item = &str> {
    let bridges = plugins(case).filter(|plugin| plugin["type"] == "bridge");
    bridges.map(|plugin| {
        let name = plugin["bridge"].as_str().or(plugin["BRIDGE"].as_str());
        name.filter(|name| !name.is_empty()).unwrap_or("cni0")
    })
}

fn mappings(case: &Value) -> impl Iterator<Item = &Value> {
    plugins(case).flat_map(|plugin| list(&plugin["runtimeConfig"]["portMappings"]))
}

/// Whether a container may have a default route of another network's.
fn other_default(case: &Value) -> bool {
    let first = case["inside"].to_string().contains("route add default");
    first || list(&case["lists"]).len() > 1 || two_interfaces(case)
}

/// Whether one container has two interfaces.
fn two_interfaces(case: &Value) -> bool {
    let adds = list(&case["steps"]).iter().filter(|step| step["verb"] == "ADD");
    let places: std::collections::BTreeSet<(u64, String)> =
        adds.map(|step| (step["container"].as_u64().unwrap_or_default(), step["ifname"].to_string())).collect();
    let mut containers: Vec<u64> = places.into_iter().map(|(container, _)| container).collect();
    let all = containers.len();
    containers.dedup();
    containers.len() < all
}

/// The first explanation of a difference.
pub(crate) fn explanation(case: &Value, difference: &Difference) -> Option<usize> {
    EXPLANATIONS.iter().position(|explanation| (explanation.covers)(case, difference))
}
