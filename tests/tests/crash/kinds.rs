//! Which plugin a leftover belongs to, and the state inside a container.
//!
//! DEL continues after an error: a failed call may leave only the resource that it was about. The
//! resources of a plugin fall into kinds, which are removed one after the other, so at most one
//! kind may be left.

use std::collections::BTreeSet;

use cni_testkit::Container;
use serde_json::Value;

use crate::chain::SYSCTL;

/// A kind of resource that is created for a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// host-local's file for an address, and its record of it.
    Reservation,
    /// The veth pair.
    Link,
    /// The masquerade rules.
    Masquerade,
    /// The rules that drop frames of another MAC.
    Spoof,
    /// portmap's rules.
    Forward,
    /// The values that tuning has set, and its backup.
    Tuned,
    /// The ifb.
    Ifb,
    /// A held lock, or anything that no plugin of this chain creates.
    Other,
}

impl Kind {
    /// Returns the kind of a line of [`State::differs_from`](crate::world::State::differs_from).
    pub(crate) fn of(line: &str) -> Kind {
        let has = |what: &str| line.contains(what);
        // A qdisc is removed with its link.
        if line.starts_with("link ") && has(": bwp") || line.starts_with("qdisc ") && has("\"bwp") {
            Kind::Ifb
        } else if line.starts_with("link ") || line.starts_with("qdisc ") {
            Kind::Link
        } else if line.starts_with("inside ") || (line.starts_with("file ") && has("/tuning/")) {
            Kind::Tuned
        } else if line.starts_with("file ") && has("/networks/") {
            Kind::Reservation
        } else if !line.starts_with("rule") {
            Kind::Other
        } else if has("cni_hostport") || has("CNI-HOSTPORT-") || has("CNI-DN-") {
            Kind::Forward
        } else if has("table bridge nat") {
            Kind::Spoof
        } else if has("cni_plugins_masquerade") || has("CNI-") {
            Kind::Masquerade
        } else {
            Kind::Other
        }
    }

    /// Returns the plugin of the list that creates it.
    pub(crate) fn plugin(self) -> Option<&'static str> {
        match self {
            Kind::Reservation | Kind::Link | Kind::Masquerade | Kind::Spoof => Some("bridge"),
            Kind::Tuned => Some("tuning"),
            Kind::Forward => Some("portmap"),
            Kind::Ifb => Some("bandwidth"),
            Kind::Other => None,
        }
    }
}

/// Returns the kinds of these lines.
pub(crate) fn kinds(lines: &[String]) -> BTreeSet<Kind> {
    lines.iter().map(|line| Kind::of(line)).collect()
}

/// Everything that the list can change inside a container with an existing namespace, as lines that
/// can be compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inside(BTreeSet<String>);

impl Inside {
    pub(crate) fn of(container: &Container) -> Inside {
        let mut lines = BTreeSet::new();
        let links = container.json(&["ip", "-j", "-d", "addr", "show"]);
        for link in links.as_array().into_iter().flatten() {
            let name = link["ifname"].as_str().unwrap_or_default();
            for key in ["address", "mtu", "promiscuity", "txqlen"] {
                lines.insert(format!("{name}: {key} {}", link[key]));
            }
            for flag in ["UP", "PROMISC", "ALLMULTI"] {
                let set = link["flags"].as_array().is_some_and(|flags| flags.contains(&Value::from(flag)));
                lines.insert(format!("{name}: {flag} {set}"));
            }
            let addresses = link["addr_info"].as_array().into_iter().flatten();
            let global = addresses.filter(|address| address["scope"] != "link");
            lines.extend(global.map(|address| format!("{name}: {}/{}", address["local"], address["prefixlen"])));
        }
        lines.extend(container.enter(|| {
            let names = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            let names = names.lines().skip(2).filter_map(|line| line.split(':').next());
            let filters = names.map(|name| format!("net/ipv4/conf/{}/arp_filter", name.trim()));
            let value = |path: String| {
                let value = std::fs::read_to_string(format!("/proc/sys/{path}")).unwrap_or_default();
                format!("{path} is {}", value.trim())
            };
            let routes = std::fs::read_to_string("/proc/thread-self/net/route").unwrap_or_default();
            let routes: Vec<String> = routes.lines().skip(1).map(|route| format!("route {route}")).collect();
            filters.chain([SYSCTL.to_owned()]).map(value).chain(routes).collect::<Vec<_>>()
        }));
        Inside(lines)
    }

    /// Returns one line for each difference.
    pub(crate) fn differs_from(&self, before: &Inside) -> Vec<String> {
        let left = self.0.difference(&before.0).map(|line| format!("inside left: {line}"));
        left.chain(before.0.difference(&self.0).map(|line| format!("inside lost: {line}"))).collect()
    }
}
