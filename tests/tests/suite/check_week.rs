//! CHECK of a container that works, on a node where other programs work too: a runtime such as
//! Nomad kills the allocation if CHECK fails. So CHECK passes while packets pass, whatever a normal
//! week brings, and fails when they do not. Attachments of these plugins and of Go's.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::thread;
use std::time::Duration;

use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, patience, probe, require};
use conformance::{HOST, OUTSIDE, VERSION, address, choose_iptables, patched, uplink};
use serde_json::{Value, json};

use crate::portmap::world::ask_tcp_for;

/// What Nomad 1.6 and later sends with an allocation's `CNI_CONTAINERID`.
const NOMAD_ARGS: &str = "IgnoreUnknown=true;NOMAD_REGION=global;NOMAD_NAMESPACE=default;NOMAD_JOB_ID=web;\
                          NOMAD_GROUP_NAME=front;NOMAD_ALLOC_ID=2e2bd3a4-7b7c-4c4e-8d36-0ce5d0d3ff6f";

/// Nomad's list of its bridge network with an IPv6 subnet.
fn nomad(node: &Node) -> Vec<Value> {
    let ports: Value =
        [8080, 8081].map(|port| json!({"hostPort": port, "containerPort": 80, "protocol": "tcp"})).into();
    let ranges = json!([[{"subnet": "172.26.64.0/20"}], [{"subnet": "fd00:a110::/64"}]]);
    let plugins = [
        json!({"type": "loopback"}),
        json!({"type": "bridge", "bridge": "nomad", "ipMasq": true, "isGateway": true, "forceAddress": true,
               "hairpinMode": false,
               "ipam": {"type": "host-local", "dataDir": node.data_dir(), "ranges": ranges,
                        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}),
        json!({"type": "firewall", "backend": "iptables", "iptablesAdminChainName": "NOMAD-ADMIN"}),
        json!({"type": "portmap", "capabilities": {"portMappings": true}, "snat": true,
               "runtimeConfig": {"portMappings": ports}}),
    ];
    plugins.into_iter().map(|plugin| patched(plugin, json!({"cniVersion": "0.4.0", "name": "nomad"}))).collect()
}

/// The same with hairpin mode and, behind it, tuning.
fn tuned(node: &Node) -> Vec<Value> {
    let mut plugins = nomad(node);
    plugins[1]["hairpinMode"] = json!(true);
    plugins.push(json!({"cniVersion": "0.4.0", "name": "nomad", "type": "tuning", "txQLen": 900, "allmulti": false,
                        "dataDir": node.dir().join("tuning"), "sysctl": {"net.core.somaxconn": "500"}}));
    plugins
}

/// bridge and portmap with every rule in nftables.
fn in_nftables(node: &Node) -> Vec<Value> {
    let mut plugins = nomad(node);
    plugins.retain(|plugin| plugin["type"] != "firewall");
    plugins[1]["ipMasqBackend"] = json!("nftables");
    plugins[2]["backend"] = json!("nftables");
    plugins
}

/// A list with one interface plugin.
fn alone(node: &Node, plugin: Value) -> Vec<Value> {
    let ranges = json!([[{"subnet": "192.0.2.0/24", "rangeStart": "192.0.2.100", "gateway": "192.0.2.9"}]]);
    let base = json!({"cniVersion": VERSION, "name": "nomad",
                      "ipam": {"type": "host-local", "dataDir": node.data_dir(), "ranges": ranges}});
    vec![patched(base, plugin)]
}

fn macvlan(node: &Node) -> Vec<Value> {
    alone(node, json!({"type": "macvlan", "master": "up0", "ipam": {"routes": [{"dst": "0.0.0.0/0"}]}}))
}

fn ptp(node: &Node) -> Vec<Value> {
    let ranges = json!([[{"subnet": "172.26.64.0/20"}], [{"subnet": "fd00:a110::/64"}]]);
    alone(
        node,
        json!({"type": "ptp", "ipMasq": true,
                       "ipam": {"ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}),
    )
}

/// A container attached to a list, a client beyond the uplink, and a TCP server in each.
struct Live<'n> {
    node: &'n Node,
    client: Container,
    pod: Container,
    list: Vec<Attachment<'n>>,
    result: Value,
}

impl<'n> Live<'n> {
    /// ADD of the list by the plugins in `by`, in order.
    #[track_caller]
    fn new(node: &'n Node, list: Vec<Value>, by: &Path) -> Live<'n> {
        choose_iptables(node, "nft");
        let client = uplink(node, "up0");
        if list.iter().any(|plugin| plugin["type"] == "firewall") {
            // Only what firewall accepts, and the published ports, pass.
            let script = "for i in iptables ip6tables; do $i -w -P FORWARD DROP;
                          $i -w -A FORWARD -m conntrack --ctstate DNAT -j ACCEPT; done";
            node.exec(&["sh", "-ec", script]);
        }
        let pod = node.container();
        let attach = |config: Value| Attachment::new(node, &pod, config).args(NOMAD_ARGS).by(by);
        let list: Vec<Attachment<'n>> = list.into_iter().map(attach).collect();
        let mut result = list[0].add().success();
        for plugin in &list[1..] {
            result = plugin.add_after(&result).success();
        }
        serve(&pod, 80);
        serve(&client, 7777);
        Live { node, client, pod, list, result }
    }

    /// CHECK of each plugin by those in `by`. Returns what failed.
    fn check(&self, by: &Path) -> Vec<String> {
        let check = |plugin: &Attachment<'n>| plugin.clone().by(by).check(&self.result);
        let failed = self.list.iter().map(check).filter(|outcome| outcome.status != Some(0));
        failed.map(|outcome| format!("{}{}", outcome.stdout, outcome.stderr)).collect()
    }

    /// DEL of the list by the plugins in `by`, in reverse.
    #[track_caller]
    fn del(&self, by: &Path) {
        for plugin in self.list.iter().rev() {
            plugin.clone().by(by).del_with(&self.result).success();
        }
        assert!(self.pod.link("eth0").is_none());
        assert_eq!(self.node.reservations("nomad"), []);
        // Go's DEL leaves the records of firewall.
        let save = "for i in iptables ip6tables; do $i-save | grep -v CNI-FW-OWNERS; done";
        let rules = self.node.exec(&["sh", "-c", save]);
        for address in ["172.26.64.2", "fd00:a110::2"] {
            assert!(!rules.contains(address), "{rules}");
        }
    }

    /// Runs a script in the node, with the names of the links that events are about.
    #[track_caller]
    fn on_node(&self, script: &str) {
        let host = self.result["interfaces"].as_array().unwrap().iter().find(|interface| {
            let name = interface["name"].as_str().unwrap_or_default();
            interface["sandbox"].as_str().unwrap_or_default().is_empty() && name.starts_with("veth")
        });
        let host = format!("host={}", host.map_or("none", |host| host["name"].as_str().unwrap()));
        self.node.exec(&["env", &host, "sh", "-ec", script]);
    }

    /// The kind of the list's interface.
    fn kind(&self) -> &str {
        let kinds = self.list.iter().map(|plugin| plugin.config["type"].as_str().unwrap());
        kinds.into_iter().find(|kind| *kind != "loopback").unwrap()
    }

    /// Returns the paths of the list on which no answer comes within `time`.
    fn broken(&self, time: Duration) -> Vec<&'static str> {
        let mut paths: Vec<(&str, &Container, String)> = vec![("out", &self.pod, at(OUTSIDE[0], 7777))];
        if self.kind() != "macvlan" {
            paths.push(("out by IPv6", &self.pod, at(OUTSIDE[1], 7777)));
        }
        let mut broken: Vec<&str> =
            paths.iter().filter(|(_, from, to)| from.enter(|| !answers(time, to))).map(|path| path.0).collect();
        if self.kind() != "bridge" {
            return broken;
        }
        for (path, to) in [("in", at(HOST[0], 8080)), ("in by IPv6", at(HOST[1], 8081))] {
            if self.client.enter(|| !answers(time, &to)) {
                broken.push(path);
            }
        }
        for (path, to) in [("node", at(&address(&self.result), 80)), ("127.0.0.1", at("127.0.0.1", 8080))] {
            if self.node.enter(|| !answers(time, &to)) {
                broken.push(path);
            }
        }
        if self.list[1].config["hairpinMode"] == true && self.pod.enter(|| !answers(time, &at(HOST[0], 8080))) {
            broken.push("itself");
        }
        broken
    }
}

/// `HOST:PORT`.
fn at(host: &str, port: u16) -> String {
    SocketAddr::new(host.parse().unwrap(), port).to_string()
}

/// Whether the TCP server at `to` answers the current namespace.
fn answers(time: Duration, to: &str) -> bool {
    ask_tcp_for(time, to).is_some()
}

/// A TCP server that sends each client one byte.
fn serve(container: &Container, port: u16) {
    let listener = container.enter(|| TcpListener::bind(("::", port)).unwrap());
    thread::spawn(move || listener.incoming().flatten().for_each(|mut stream| drop(stream.write_all(b"!"))));
}

/// What other programs do: in the node, and in the container. `$host` is the host's end.
struct Event {
    name: &'static str,
    node: &'static str,
    pod: &'static str,
}

const fn event(name: &'static str, node: &'static str, pod: &'static str) -> Event {
    Event { name, node, pod }
}

/// Events after which packets pass, for every list, one after the other.
const WEEK: [Event; 10] = [
    event(
        "nft -f with the same rules",
        "if nft list tables | grep -q cni_; then rules=$(nft list ruleset); nft flush ruleset;
         echo \"$rules\" | nft -f -; fi",
        "",
    ),
    event("reload of the firewall", "for i in iptables ip6tables; do $i-save | $i-restore; done", ""),
    event(
        "sysctl --system",
        "cd /proc/sys/net; for i in all default; do echo 2 > ipv4/conf/$i/rp_filter;
         echo 0 > ipv4/conf/$i/accept_redirects; echo 0 > ipv4/conf/$i/send_redirects;
         echo 0 > ipv4/conf/$i/route_localnet; echo 0 > ipv6/conf/$i/accept_ra;
         echo 0 > ipv6/conf/$i/accept_redirects; done;
         echo 1 > ipv4/ip_forward; echo 1 > ipv6/conf/all/forwarding;
         for i in bridge/bridge-nf-call-*tables; do [ ! -e $i ] || echo 1 > $i; done",
        "",
    ),
    event(
        "another bridge",
        "ip link add br9 type bridge; ip address add 10.99.0.1/24 dev br9; ip link set br9 up;
         ip link add port9 type veth peer name peer9; ip link set port9 master br9 up; ip link set peer9 up",
        "",
    ),
    event(
        "kube-proxy",
        "for i in iptables ip6tables; do
         for c in SERVICES POSTROUTING NODEPORTS MARK-MASQ; do $i -w -t nat -N KUBE-$c; done;
         $i -w -t nat -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000;
         $i -w -t nat -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS;
         $i -w -t nat -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN;
         $i -w -t nat -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000;
         $i -w -t nat -A KUBE-POSTROUTING -j MASQUERADE;
         for c in PREROUTING OUTPUT; do $i -w -t nat -I $c -m comment --comment 'kubernetes service portals' -j KUBE-SERVICES; done;
         $i -w -t nat -I POSTROUTING -m comment --comment 'kubernetes postrouting rules' -j KUBE-POSTROUTING;
         for c in FORWARD EXTERNAL-SERVICES FIREWALL; do $i -w -N KUBE-$c; $i -w -I FORWARD -j KUBE-$c; done;
         $i -w -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP;
         $i -w -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT; done",
        "",
    ),
    event("a second address", "", "ip address add 10.99.1.1/24 dev eth0; ip address add fd00:99::1/64 dev eth0 nodad preferred_lft 0"),
    event("tcpdump", "[ $host = none ] || ip link set $host promisc on", "ip link set eth0 promisc on allmulticast on"),
    event(
        "the uplink is renamed",
        "ip link set up0 down; ip link set up0 name up1; ip link set up1 up;
         ip address add 2001:db8::1/64 dev up1 nodad",
        "",
    ),
    event(
        "other queues and a smaller MTU",
        "[ $host = none ] || ip link set $host txqueuelen 77",
        "ip link set eth0 txqueuelen 78; ip link set eth0 mtu 1400",
    ),
    event(
        "systemd-networkd forwards per link",
        "cd /proc/sys/net/ipv4; echo 0 > ip_forward; for i in conf/*/forwarding; do case $i in */all/*|*/default/*) ;;
         *) echo 1 > $i;; esac; done",
        "",
    ),
];

/// The same for a list with bridge.
const BRIDGE_WEEK: [Event; 3] = [
    event("kubelet sets hairpin mode", "bridge link set dev $host hairpin on", ""),
    event(
        "kube-proxy sets route_localnet",
        "cd /proc/sys/net/ipv4/conf; echo 1 > all/route_localnet; echo 0 > nomad/route_localnet",
        "",
    ),
    event(
        "a wider prefix of the gateway",
        "ip address add 172.26.64.1/16 dev nomad; ip address del 172.26.64.1/20 dev nomad",
        "",
    ),
];

/// An event after which packets do not pass, how it is undone, and a path that it breaks.
type Harm = (&'static str, &'static str, &'static str);

const RESTORE: &str = "iptables-restore < $TMP/saved";

/// For every list behind the node.
const HARM: [Harm; 3] = [
    ("sysctl -qw net.ipv4.ip_forward=0", "sysctl -qw net.ipv4.ip_forward=1", "out"),
    ("sysctl -qw net.ipv6.conf.all.forwarding=0", "sysctl -qw net.ipv6.conf.all.forwarding=1", "out by IPv6"),
    ("iptables -w -t nat -F POSTROUTING", RESTORE, "out"),
];

/// For a list with bridge, firewall and portmap.
const BRIDGE_HARM: [Harm; 8] = [
    ("sysctl -qw net.ipv4.conf.nomad.forwarding=0", "sysctl -qw net.ipv4.conf.nomad.forwarding=1", "out"),
    ("ip link set $host down", "ip link set $host up", "node"),
    ("ip link set $host nomaster", "ip link set $host master nomad; bridge link set dev $host hairpin on", "node"),
    ("bridge link set dev $host hairpin off", "bridge link set dev $host hairpin on", "itself"),
    ("ip address del 172.26.64.1/20 dev nomad", "ip address add 172.26.64.1/20 dev nomad", "out"),
    ("iptables -w -t nat -F CNI-HOSTPORT-DNAT", RESTORE, "in"),
    ("iptables -w -F CNI-FORWARD", RESTORE, "out"),
    ("sysctl -qw net.ipv4.conf.nomad.route_localnet=0", "sysctl -qw net.ipv4.conf.nomad.route_localnet=1", "127.0.0.1"),
];

/// A list by the plugins under test, and one by Go's.
#[track_caller]
fn by_each(list: fn(&Node) -> Vec<Value>, test: impl Fn(&Live<'_>, &str)) {
    for by in [bin_dir(), go_bin_dir()] {
        let node = Node::new();
        let live = Live::new(&node, list(&node), &by);
        assert_eq!(live.broken(patience(Duration::from_secs(10))), [""; 0]);
        test(&live, &format!("added by {}", by.display()));
        live.del(&bin_dir());
        drop(live);
        // The other programs' rules are left.
        node.abandon();
    }
}

#[track_caller]
fn check_passes_all_week(list: fn(&Node) -> Vec<Value>) {
    require!(probe::iptables());
    require!(probe::go_plugins());
    by_each(list, |live, by| {
        let more = if live.kind() == "bridge" || live.list.len() > 1 { &BRIDGE_WEEK[..] } else { &[] };
        let mut failed = Vec::new();
        for event in WEEK.iter().chain(more) {
            live.on_node(event.node);
            live.pod.exec(&["sh", "-ec", event.pod]);
            assert_eq!(live.broken(patience(Duration::from_secs(10))), [""; 0], "{}", event.name);
            failed.extend(live.check(&bin_dir()).iter().map(|report| format!("{}: {report}", event.name)));
        }
        assert!(failed.is_empty(), "{by}:\n{}", failed.join("\n"));
    });
}

#[track_caller]
fn check_fails_with_the_packets(list: fn(&Node) -> Vec<Value>, more: &[Harm]) {
    require!(probe::iptables());
    require!(probe::go_plugins());
    by_each(list, |live, by| {
        let tmp = format!("TMP={}; ", live.node.dir().display());
        let mut passed = Vec::new();
        for (harm, undo, path) in HARM.iter().chain(more) {
            live.on_node(&format!("{tmp} iptables-save > $TMP/saved; {harm}"));
            let broken = live.broken(Duration::from_millis(400));
            assert!(broken.contains(path), "{harm}: {broken:?}");
            if live.check(&bin_dir()).is_empty() {
                passed.push(*harm);
            }
            live.on_node(&format!("{tmp} {undo}"));
            assert_eq!(live.check(&bin_dir()), [""; 0], "{by}, after {undo}");
        }
        assert!(passed.is_empty(), "{by}: CHECK passed after\n{}", passed.join("\n"));
    });
}

#[test]
fn nomads_list_passes_check_all_week() {
    check_passes_all_week(nomad);
}

#[test]
fn a_list_with_tuning_passes_check_all_week() {
    check_passes_all_week(tuned);
}

#[test]
fn a_list_in_nftables_passes_check_all_week() {
    require!(probe::nft());
    require!(probe::go_nftables());
    check_passes_all_week(in_nftables);
}

#[test]
fn macvlan_passes_check_all_week() {
    check_passes_all_week(macvlan);
}

#[test]
fn ptp_passes_check_all_week() {
    check_passes_all_week(ptp);
}

#[test]
fn check_of_a_bridge_list_fails_when_packets_are_lost() {
    check_fails_with_the_packets(tuned, &BRIDGE_HARM);
}

#[test]
fn check_of_ptp_fails_when_packets_are_lost() {
    check_fails_with_the_packets(ptp, &[]);
}

#[test]
fn nomads_attachments_are_handed_over_both_ways() {
    require!(probe::iptables());
    require!(probe::go_plugins());
    for (first, second) in [(bin_dir(), go_bin_dir()), (go_bin_dir(), bin_dir())] {
        let node = Node::new();
        let live = Live::new(&node, nomad(&node), &first);
        assert_eq!(live.check(&second), [""; 0]);
        assert_eq!(live.broken(patience(Duration::from_secs(10))), [""; 0]);
        live.del(&second);
        drop(live);
        node.abandon();
    }
}
