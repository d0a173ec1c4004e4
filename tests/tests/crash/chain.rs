//! Drives a list of bridge (with host-local and masquerading), tuning, portmap and bandwidth as a
//! runtime does.

use std::path::PathBuf;

use cni_testkit::{Attachment, Container, Invocation, Outcome};
use conformance::ipam;
use serde_json::{Value, json};

use crate::world::World;

/// A sysctl of the whole namespace, which is not removed with the interface.
pub(crate) const SYSCTL: &str = "net/ipv4/ip_unprivileged_port_start";

/// The plugins of the list, in the order of an ADD.
pub(crate) const PLUGINS: [&str; 4] = ["bridge", "tuning", "portmap", "bandwidth"];

/// Returns the plugins with a later DEL than `plugin`.
pub(crate) fn dels_after(plugin: &str) -> impl Iterator<Item = &'static str> {
    let after = PLUGINS.iter().rev().skip_while(move |one| **one != plugin).skip(1);
    after.copied()
}

/// The results of the plugins that have been added, in order.
pub(crate) type Links = Vec<Value>;

/// One container and the list.
#[derive(Clone)]
pub(crate) struct Chain<'w> {
    world: &'w World,
    container: Attachment<'w>,
    /// Port mappings are per container.
    port: u64,
    version: &'static str,
    ip_masq: Value,
}

impl<'w> Chain<'w> {
    pub(crate) fn new(world: &'w World, container: &Container) -> Chain<'w> {
        let number: u64 = container.id.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or_default();
        let attachment = Attachment::new(&world.node, container, Value::Null);
        let ip_masq = json!({"exclude": ["198.51.100.0/22", "fd00:9::/61"]});
        Chain { world, container: attachment, port: 10_000 + number % 50_000, version: "1.1.0", ip_masq }
    }

    /// Makes `ipMasq` a boolean, the only form that Go's plugins know.
    pub(crate) fn without_exclusions(mut self) -> Self {
        self.ip_masq = json!(true);
        self
    }

    /// Uses the plugins of another folder, in a version that older ones support too.
    pub(crate) fn by(mut self, folder: impl Into<PathBuf>) -> Self {
        self.version = "1.0.0";
        self.container = self.container.by(folder);
        self
    }

    /// The configuration of one plugin, as a runtime writes it.
    fn config(&self, plugin: &str) -> Value {
        let world = self.world;
        // Either the spoof check drops frames of another MAC, or tuning sets a MAC.
        let spoof_check = world.checks_spoofing();
        let mut config = match plugin {
            "bridge" => json!({
                "bridge": "br0", "isDefaultGateway": true, "hairpinMode": true, "ipMasq": self.ip_masq,
                "groupFwdMask": 0x4000, "mcastSnooping": false,
                "ipMasqBackend": world.backend.key(), "macspoofchk": spoof_check, "ipam": ipam(&world.node, &["10.1.0.0/20", "fd00:1::/64"]),
            }),
            "tuning" => json!({
                "dataDir": world.backups(), "mtu": 1400, "promisc": true, "mac": if spoof_check { "" } else { "02:00:00:00:00:aa" },
                "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1", "net.ipv4.ip_unprivileged_port_start": "7"},
            }),
            "bandwidth" => json!({"capabilities": {"bandwidth": true}, "runtimeConfig": {"bandwidth": {
                "ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 8_000_000, "egressBurst": 800_000,
            }}}),
            _ => json!({
                "backend": world.backend.key(), "capabilities": {"portMappings": true},
                "runtimeConfig": {"portMappings": [
                    {"hostPort": self.port, "containerPort": 80, "protocol": "tcp"},
                    {"hostPort": self.port, "containerPort": 53, "protocol": "udp"},
                ]},
            }),
        };
        config["cniVersion"] = json!(self.version);
        config["name"] = json!("net1");
        config["type"] = json!(plugin);
        config
    }

    /// Returns one call of one plugin of the list.
    pub(crate) fn call(&self, plugin: &str, verb: &str, prev: Option<&Value>) -> Invocation<'w> {
        let mut config = self.config(plugin);
        if verb == "GC" {
            config["cni.dev/valid-attachments"] = self.world.valid();
        }
        self.container.clone().config(config).invocation(verb, prev)
    }

    /// Calls ADD of all plugins.
    pub(crate) fn add_all(&self) -> Links {
        let mut links = Links::new();
        for plugin in PLUGINS {
            links.push(self.call(plugin, "ADD", links.last()).run().success());
        }
        links
    }

    /// Calls CHECK of all plugins.
    pub(crate) fn check_all(&self, links: &Links) {
        for plugin in PLUGINS {
            self.call(plugin, "CHECK", links.last()).run().success();
        }
    }

    /// Does the same, continues after failures and returns them.
    pub(crate) fn try_check_all(&self, links: &Links) -> Vec<String> {
        let outcomes = PLUGINS.iter().map(|plugin| self.call(plugin, "CHECK", links.last()).run());
        outcomes.filter_map(not_silent).collect()
    }

    /// Calls DEL of all plugins in reverse, as after a failed ADD (no result) or an ordinary end.
    pub(crate) fn del_all(&self, prev: Option<&Value>) {
        for plugin in PLUGINS.iter().rev() {
            self.call(plugin, "DEL", prev).run().success();
        }
    }

    /// Does the same, continues after failures and returns them.
    pub(crate) fn try_del_all(&self, prev: Option<&Value>) -> Vec<String> {
        let outcomes = PLUGINS.iter().rev().map(|plugin| self.call(plugin, "DEL", prev).run());
        outcomes.filter_map(not_silent).collect()
    }

    /// Calls DEL of the plugins with a later DEL than `plugin` and returns the failures.
    pub(crate) fn try_del_after(&self, plugin: &str, prev: Option<&Value>) -> Vec<String> {
        let outcomes = dels_after(plugin).map(|plugin| self.call(plugin, "DEL", prev).run());
        outcomes.filter_map(not_silent).collect()
    }

    /// Calls GC of all plugins, with the neighbour as the only valid attachment, and returns the
    /// failures.
    pub(crate) fn try_gc_all(&self) -> Vec<String> {
        PLUGINS.iter().filter_map(|plugin| not_silent(self.call(plugin, "GC", None).run())).collect()
    }
}

/// Returns a report if a verb failed or printed to stdout.
fn not_silent(outcome: Outcome) -> Option<String> {
    (outcome.status != Some(0) || !outcome.stdout.is_empty()).then(|| outcome.report())
}

/// Returns the leftovers inside a container whose namespace still exists.
pub(crate) fn left_inside(container: &Container) -> Vec<String> {
    let (links, sysctl) = container.enter(|| {
        let links = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        (links, std::fs::read_to_string(format!("/proc/sys/{SYSCTL}")).unwrap())
    });
    let names = links.lines().skip(2).filter_map(|line| line.split(':').next().map(str::trim));
    let mut left: Vec<String> = names.filter(|name| *name == "eth0").map(|name| format!("{name} inside")).collect();
    if sysctl.trim() != "1024" {
        left.push(format!("{SYSCTL} is {}", sysctl.trim()));
    }
    left
}
