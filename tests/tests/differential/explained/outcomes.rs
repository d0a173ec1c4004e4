//! Steps that one side does and the other refuses.

use serde_json::Value;

use crate::side::list;

use super::{Explanation, bridges, has_capitals, has_twins, mappings, outcome, plugins, said, swapped, two_interfaces};

pub(super) const OUTCOMES: &[Explanation] = &[
    Explanation {
        name: "the same route twice is one",
        reason: "differences, bridge: a route that is there already, and alike, is fine",
        covers: |_, it| {
            outcome(it, "failed to add route", "done")
                && it.expected.as_deref().is_some_and(|text| text.contains("file exists"))
        },
    },
    Explanation {
        name: "a default route of IPAM's and of isDefaultGateway is one",
        reason: "differences, bridge: isDefaultGateway with a default route from IPAM works",
        covers: |case, it| {
            let asked = plugins(case).any(|plugin| said(plugin, "isDefaultGateway") == true);
            // The second one is refused where a route between them leads to the gateway through
            // itself.
            let unreachable = it.expected.as_deref().is_some_and(|text| text.contains("no route to host"));
            asked && unreachable && case.to_string().contains("\"::/0\"") && outcome(it, "failed to add route", "done")
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
        name: "Go's CHECK knows no route over several paths",
        reason: "differences, bridge: several gateways of one destination make one route over several paths",
        covers: |case, it| {
            let mut routes = plugins(case).filter_map(|plugin| said(plugin, "ipam")["routes"].as_array());
            let twice = |routes: &Vec<Value>| {
                let all: Vec<&str> = routes.iter().filter_map(|route| route["dst"].as_str()).collect();
                // Those of IPv4 that Go made are separate routes, which its CHECK finds.
                let ours = swapped(case, it);
                all.iter()
                    .any(|dst| (ours || dst.contains(':')) && all.iter().filter(|other| *other == dst).count() > 1)
            };
            it.verb == "CHECK" && outcome(it, "not found in routing table", "done") && routes.any(twice)
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
        name: "CHECK of the earlier of two tunings",
        reason: "differences, tuning: CHECK of the earlier accepts what the later set",
        covers: |case, it| {
            let twice = plugins(case).filter(|plugin| plugin["type"] == "tuning").count() > 1;
            it.verb == "CHECK" && twice && outcome(it, "refused by tuning", "done")
        },
    },
    Explanation {
        name: "STATUS asks what ADD will need",
        reason: "differences, the protocol: STATUS; `status` is compared with the ADD that follows",
        covers: |_, it| it.verb == "STATUS" && outcome(it, "done", "refused"),
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
        name: "Go's CHECK counts the rules without masqAll",
        reason: "differences, portmap: masqAll works in nftables too",
        covers: |case, it| {
            let asked = plugins(case).any(|plugin| said(plugin, "masqAll") == true);
            asked && it.verb == "CHECK" && outcome(it, "missing hostport rules in \"masquerading\" chain", "done")
        },
    },
    Explanation {
        name: "an absent protocol is tcp",
        reason: "differences, portmap: an absent protocol is tcp",
        covers: |case, it| {
            let absent =
                mappings(case).any(|mapping| said(mapping, "protocol").as_str().unwrap_or_default().is_empty());
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
        name: "CHECK sees a spoof rule of another MAC",
        reason: "docs/plugins/bridge.md, macspoofchk: CHECK names the MAC that the rule pins",
        covers: |case, it| {
            let asked = plugins(case).any(|plugin| said(plugin, "macspoofchk") == true);
            asked && it.verb == "CHECK" && outcome(it, "done", "spoof rule pins MAC")
        },
    },
    Explanation {
        name: "CHECK sees rules that ip6tables-legacy -C hid from Go",
        reason: "differences, portmap: ip6tables-legacy -C finds rules that are not there",
        covers: |case, it| {
            let lacks = it.ours.as_deref().is_some_and(|text| text.contains("101 ip6tables: chain CNI-DN-"));
            it.verb == "CHECK" && case["iptables"] == "legacy" && lacks && outcome(it, "done", "lacks")
        },
    },
    Explanation {
        name: "VLANs on a bridge that does not filter and has foreign ports",
        reason: "differences, bridge: vlan on an existing bridge refuses (7) where a port is not a container's",
        covers: |_, it| {
            it.verb == "ADD" && outcome(it, "done", "does not filter VLANs and has ports that are not CNI's")
        },
    },
    Explanation {
        name: "names that mean another interface",
        reason: "differences, the protocol: names that the kernel expands or that are special to it are refused",
        covers: |case, it| {
            let special = bridges(case).any(|bridge| bridge.contains('%') || bridge == "all" || bridge == "default");
            special && (outcome(it, "done", "7 bridge \"") || outcome(it, "refused", "done") && it.verb == "DEL")
        },
    },
    Explanation {
        name: "a number that is out of range",
        reason: "differences, host-local: a negative table of a route is refused",
        covers: |_, it| it.verb == "ADD" && outcome(it, "done", "invalid value: integer `-"),
    },
    Explanation {
        name: "requested addresses of two sources",
        reason: "docs/plugins/host-local.md: of several sources that name an address of one range set the first one wins",
        covers: |case, it| {
            let args = case["args"].as_str().is_some_and(|args| args.contains("IP="));
            args && it.verb == "ADD" && outcome(it, "failed to allocate all requested IPs", "done")
        },
    },
    Explanation {
        name: "promiscuity that another network asked for",
        reason: "differences, bridge: CHECK tolerates promiscuity that others added",
        covers: |_, it| it.verb == "CHECK" && outcome(it, "configured Promisc Mode false", "done"),
    },
    Explanation {
        name: "Go's CHECK looks for a jump of its own for a protocol in capitals",
        reason: "differences, portmap: a protocol in capitals; in Go each spelling has a jump of its own",
        covers: |case, it| it.verb == "CHECK" && swapped(case, it) && outcome(it, "dnat", "done") && has_capitals(case),
    },
    Explanation {
        name: "a key given twice in different cases",
        reason: "differences, the protocol: the last value of a key that is given twice counts",
        covers: |case, it| outcome(it, "cannot unmarshal", "done") && has_twins(case),
    },
    Explanation {
        name: "a negative MTU",
        reason: "differences, bridge: a negative mtu is refused",
        covers: |_, it| it.verb == "ADD" && outcome(it, "done", "7 invalid MTU -"),
    },
    Explanation {
        name: "forceAddress takes another list's gateway, Go's also one of its own list",
        reason: "docs/plugins/bridge.md, forceAddress: never a gateway of this configuration; CHECK misses the one that is gone",
        covers: |case, it| {
            let forced = plugins(case).any(|plugin| said(plugin, "forceAddress") == true);
            forced
                && it.verb == "CHECK"
                && (swapped(case, it) || list(&case["lists"]).len() > 1)
                && outcome(it, "done", "does not have the gateway's address")
        },
    },
    Explanation {
        name: "an unknown ipMasqBackend without ipMasq",
        reason: "differences, bridge: an unknown ipMasqBackend is an error also without ipMasq",
        covers: |_, it| it.verb == "ADD" && outcome(it, "done", "7 unknown ipmasq backend \""),
    },
    Explanation {
        name: "VLANs on an existing bridge of a kernel without VLAN filtering",
        reason: "differences, bridge: vlan on an existing bridge switches VLAN filtering on; Go leaves the port unfiltered",
        covers: |_, it| it.verb == "ADD" && outcome(it, "done", "needs a kernel with bridge VLAN filtering"),
    },
    Explanation {
        name: "a gateway of the other family",
        reason: "decision 14, docs/plugins/bridge.md: code 7 before any work; Go leaves the gateway of such a range out",
        covers: |_, it| it.verb == "ADD" && outcome(it, "done", "the gateway is of the other address family"),
    },
    Explanation {
        name: "conditions in nft's words choose nftables",
        reason: "differences, portmap: without backend, conditions in nft's words choose nftables",
        covers: |_, it| it.verb == "ADD" && outcome(it, "contains nftables-specific options", "done"),
    },
];
