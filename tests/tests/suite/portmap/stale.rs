//! Tests rules of a removed container to the address that another one was just given: until the
//! rules are removed, its host ports lead into the new container.

use cni_testkit::{Attachment, Invocation, bin_dir, probe, require};
use conformance::patched;
use serde_json::{Value, json};

use super::world::{BACKENDS, Backend, IPTABLES, Pod, World, each, map};

/// Returns a network with one address of each family.
fn narrow(world: &World, name: &str) -> Value {
    let only = |subnet: &str, address: &str| json!([{"subnet": subnet, "rangeStart": address, "rangeEnd": address}]);
    let ranges = json!([only("10.1.0.0/24", "10.1.0.2"), only("fd00:1::/64", "fd00:1::2")]);
    patched(world.network(name, &[]), json!({"ipam": {"ranges": ranges}}))
}

/// Makes the rules that Go 1.9.1's nftables backend makes for a container: port 8080 in both
/// families.
fn map_as_go(world: &World, id: &str) {
    let table = |family: &str, address: &str, to: &str, local: &str| {
        format!(
            "table {family} cni_hostport {{\n comment \"CNI portmap plugin\"\n chain hostip_hostports {{ }}\n\
             chain hostports {{\n tcp dport 8080 dnat to {to}:80 comment \"{id}\"\n }}\n\
             chain hostports_all {{\n jump hostip_hostports\n jump hostports\n }}\n\
             chain prerouting {{\n type nat hook prerouting priority -100\n fib daddr type local jump hostports_all\n }}\n\
             chain output {{\n type nat hook output priority -100\n fib daddr type local jump hostports_all\n }}\n\
             chain masquerading {{\n type nat hook postrouting priority 100\n\
             {family} saddr {address} {family} daddr {address} masquerade comment \"{id}\"\n{local}\n }}\n }}\n"
        )
    };
    let local = format!("ip saddr 127.0.0.1 ip daddr 10.1.0.2 masquerade comment \"{id}\"");
    let text = table("ip", "10.1.0.2", "10.1.0.2", &local) + &table("ip6", "fd00:1::2", "[fd00:1::2]", "");
    let file = world.node.file("go.nft", text);
    world.node.exec(&["nft", "-f", file.to_str().unwrap()]);
}

/// The plugins that made the leftover rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    /// Go with nftables: the rules name only the container.
    GoNft,
    /// These plugins, with this backend.
    Ours(Backend),
    /// These plugins in another network, with this backend; no link had the mark.
    Elsewhere(Backend),
}

/// Makes rules for port 8080 of a container at 10.1.0.2 that is gone. Returns its ID.
fn leave_behind(world: &World, maker: Maker) -> String {
    let pod = world.pod(&narrow(world, "net1"));
    let id = pod.container.id.clone();
    let make = |backend: Backend, name: &str| {
        let patch = json!({"name": name, "backend": backend.key()});
        let config = patched(world.config(json!([map(8080, 80, "tcp")])), patch);
        let call = pod.invocation(&bin_dir(), "ADD", &config, Some(&pod.result));
        call.env("PATH", backend.path(&world.node)).run().success();
    };
    match maker {
        Maker::GoNft => map_as_go(world, &id),
        Maker::Ours(backend) => make(backend, "net1"),
        Maker::Elsewhere(backend) => make(backend, "net9"),
    }
    pod.network.del_with(&pod.result).success();
    id
}

fn everything(world: &World) -> String {
    let legacy = "for f in ip ip6; do ! grep -qs nat /proc/net/${f}_tables_names || /usr/sbin/xtables-legacy-multi ${f}tables-save -t nat; done";
    world.node.ruleset() + &world.node.exec(&["sh", "-ec", legacy])
}

fn makers() -> Vec<Maker> {
    let backends = BACKENDS.into_iter().filter(|backend| backend.probe().is_ok());
    let ours = backends.flat_map(|backend| [Maker::Ours(backend), Maker::Elsewhere(backend)]);
    [Maker::GoNft].into_iter().chain(ours).collect()
}

#[test]
fn add_removes_every_stale_port_to_its_address() {
    require!(Backend::Nftables.probe());
    each(&BACKENDS, |world| {
        for maker in makers() {
            let world = World::new(world.backend);
            let gone = leave_behind(&world, maker);
            let heir = world.pod(&narrow(&world, "net1"));
            assert_eq!(heir.address(0).to_string(), "10.1.0.2");
            let config = world.config(json!([map(9090, 90, "tcp")]));
            let added = heir.add(&config);
            added.success();
            for word in ["tcp port 8080", "10.1.0.2:80", "[fd00:1::2]:80", &gone] {
                assert!(added.stderr.contains(word), "{word} {maker:?} {:?} {}", world.backend, added.report());
            }
            let left = everything(&world);
            assert!(!left.contains(&gone) && !left.contains("8080"), "{maker:?} {:?}\n{left}", world.backend);
            assert!(left.contains("10.1.0.2:90"), "{maker:?} {:?}\n{left}", world.backend);
            heir.check(&config).success();
            assert!(!heir.add(&config).stderr.contains("8080"), "reported once");
            heir.leave();
        }
    });
}

#[test]
fn a_living_container_with_the_address_keeps_its_ports() {
    require!(Backend::Nftables.probe());
    each(&BACKENDS, |world| {
        // Two folders of reservations, so both containers get the address.
        let network = |folder: &str| {
            let only = json!([[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.2", "rangeEnd": "10.1.0.2"}]]);
            let data_dir = world.node.dir().join(folder);
            patched(world.network("net1", &[]), json!({"ipam": {"ranges": only, "dataDir": data_dir}}))
        };
        let (first, second) = (world.pod(&network("one")), world.pod(&network("two")));
        first.add(&world.config(json!([map(8080, 80, "tcp")]))).success();
        // Without the time of day and the counters of iptables-legacy.
        let is_rule = |line: &&str| !line.starts_with(['#', ':']);
        let rules = || everything(world).lines().filter(is_rule).map(str::to_owned).collect::<Vec<_>>();
        let before = rules();
        second.add(&world.config(json!([]))).success();
        assert_eq!(rules(), before, "{:?}", world.backend);
        first.del(&world.config(json!([map(8080, 80, "tcp")]))).success();
        first.leave();
        second.leave();
    });
}

#[test]
fn add_without_snat_removes_stale_masquerading() {
    require!(Backend::Nftables.probe());
    for maker in [Maker::GoNft, Maker::Ours(Backend::Nftables)] {
        let world = World::new(Backend::Nftables);
        let gone = leave_behind(&world, maker);
        assert!(everything(&world).contains("masquerade"));
        let heir = world.pod(&narrow(&world, "net1"));
        let config = patched(world.config(json!([map(9090, 90, "tcp")])), json!({"snat": false}));
        heir.add(&config).success();
        let left = everything(&world);
        assert!(!left.contains(&gone) && !left.contains("masquerade"), "{maker:?}\n{left}");
        heir.check(&config).success();
        heir.leave();
    }
}

#[test]
fn add_without_mappings_removes_stale_ports_too() {
    require!(Backend::Nftables.probe());
    for maker in makers() {
        let world = World::new(Backend::Nftables);
        let gone = leave_behind(&world, maker);
        let heir = world.pod(&narrow(&world, "net1"));
        world.ran();
        let added = heir.add(&world.config(json!([])));
        added.success();
        // Reading iptables-legacy takes a process, which a container without ports must not start.
        let is_legacy =
            [Maker::Ours(Backend::IptablesLegacy), Maker::Elsewhere(Backend::IptablesLegacy)].contains(&maker);
        assert_eq!(everything(&world).contains(&gone), is_legacy, "{maker:?}\n{}", everything(&world));
        assert_eq!(added.stderr.contains("8080"), !is_legacy, "{maker:?} {}", added.report());
        assert_eq!(world.ran(), Vec::<String>::new());
        heir.add(&world.config(json!([map(9090, 90, "tcp")]))).success();
        assert!(!everything(&world).contains(&gone), "{maker:?}\n{}", everything(&world));
        heir.leave();
    }
}

#[test]
fn add_without_mappings_waits_for_no_lock() {
    require!(probe::tool("flock"));
    require!(Backend::IptablesNft.probe());
    let world = World::new(Backend::IptablesNft);
    let pod = world.mapped(json!([map(8080, 80, "tcp")]));
    let lock = world.node.exec(&["sh", "-ec", "echo /run/cni/iptables-*.lock"]);
    let lock = std::path::Path::new(lock.trim());
    let holder = Invocation::new(&world.node, "/usr/bin/flock").arg(lock).arg("-c").arg("read x").start();
    world.node.enter(|| cni_testkit::locks::wait_until_locked(lock));
    let other = world.dual();
    let added = other.add(&world.config(json!([])));
    holder.finish();
    added.success();
    assert!(!added.stderr.contains("lock"), "{}", added.report());
    other.leave();
    pod.leave();
}

#[test]
fn add_leaves_what_an_administrator_hooked_in() {
    each(&IPTABLES, |world| {
        let first = world.mapped(json!([map(8080, 80, "tcp")]));
        let multi = format!("/usr/sbin/{}", world.backend.multi());
        let iptables = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            world.node.exec(&[&[&multi, "iptables", "-t", "nat"], &words[..]].concat());
        };
        for chain in ["ADMIN-USER", "CNI-DN-USER"] {
            iptables(&format!("-N {chain}"));
            iptables(&format!("-I CNI-HOSTPORT-DNAT -p tcp --dport 1001 -j {chain}"));
        }
        let second = world.dual();
        // A rule of the administrator to the container's own address.
        iptables("-N ADMIN-OTHER");
        iptables("-A ADMIN-OTHER -p tcp -m tcp --dport 1002 -j DNAT --to-destination 10.1.0.3:80");
        iptables("-A CNI-HOSTPORT-DNAT -p tcp --dport 1002 -j ADMIN-OTHER");
        assert_eq!(second.address(0).to_string(), "10.1.0.3");
        second.add(&world.config(json!([map(1001, 80, "tcp"), map(1002, 80, "tcp")]))).success();
        for words in ["-j ADMIN-USER", "-j CNI-DN-USER", "-j ADMIN-OTHER", "--dport 1002 -j DNAT"] {
            assert!(world.rules().contains(words), "{words} {:?}\n{}", world.backend, world.rules());
        }
        second.leave();
        first.leave();
        for (chain, port) in [("ADMIN-USER", 1001), ("CNI-DN-USER", 1001), ("ADMIN-OTHER", 1002)] {
            iptables(&format!("-D CNI-HOSTPORT-DNAT -p tcp --dport {port} -j {chain}"));
            iptables(&format!("-F {chain}"));
            iptables(&format!("-X {chain}"));
        }
    });
}

/// Checks that the heir's ADD succeeds and leaves the rule for port 8080.
#[track_caller]
fn leaves(heir: &Pod<'_>, config: &Value, words: &[&str]) {
    let added = heir.add(config);
    added.success();
    for target in ["dnat to 10.1.0.2:80", "dnat to [fd00:1::2]:80", "ip saddr 127.0.0.1 ip daddr 10.1.0.2 masquerade"] {
        assert!(everything(heir.world).contains(target), "{}\n{}", added.report(), everything(heir.world));
    }
    for word in words {
        assert!(added.stderr.contains(word), "{word}: {}", added.report());
    }
}

#[test]
fn add_leaves_ports_of_an_overlapping_network() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let first = world.pod(&narrow(&world, "net1"));
    map_as_go(&world, &first.container.id);
    // The same subnet on another bridge: the host's first route leads to the first container.
    let second = world.pod(&narrow(&world, "net2"));
    assert_eq!(first.address(0), second.address(0));
    let config = patched(world.config(json!([map(9090, 90, "tcp")])), json!({"name": "net2"}));
    leaves(&second, &config, &[&first.container.id, "may still exist", "was not removed"]);
    leaves(&second, &patched(world.config(json!([])), json!({"name": "net2"})), &[&first.container.id]);
    second.leave();
    first.leave();
    world.node.exec(&["nft", "flush", "ruleset"]);
}

#[test]
fn add_leaves_a_port_that_a_table_of_its_own_routes() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let gone = leave_behind(&world, Maker::GoNft);
    let heir = world.pod(&narrow(&world, "net1"));
    world.node.ip(&["route add 10.1.0.0/24 dev up0 table 77", "route add fd00:1::/64 dev up0 table 77"]);
    leaves(&heir, &world.config(json!([map(9090, 90, "tcp")])), &[&gone, "was not removed"]);
    // A default route does not prove that another container exists.
    world.node.ip(&["route flush table 77"]);
    world.node.exec(&["ip", "-6", "route", "flush", "table", "77"]);
    world.node.ip(&["route add default dev up0 table 77"]);
    assert!(heir.add(&world.config(json!([]))).stderr.contains("displaced"));
    assert!(!everything(&world).contains(&gone), "{}", everything(&world));
    heir.leave();
}

#[test]
fn add_leaves_ports_of_the_same_container_and_of_the_living() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    // Another attachment of the same container, in a network with the same subnet.
    let pod = world.pod(&narrow(&world, "net1"));
    pod.add(&world.config(json!([map(8080, 80, "tcp")]))).success();
    let plain = patched(narrow(&world, "net2"), json!({"isDefaultGateway": false, "isGateway": true}));
    let second = pod.also(&plain, "eth1");
    let other = |port: u16| patched(world.config(json!([map(port, 80, "tcp")])), json!({"name": "net2"}));
    leaves(&second, &other(9090), &[]);
    second.leave();
    // A living container of these plugins in that network.
    let neighbour = world.pod(&narrow(&world, "net2"));
    leaves(&neighbour, &other(9090), &[]);
    neighbour.add(&other(8080)).fails_naming(102, &[&pod.container.id, "8080"]);
    pod.check(&world.config(json!([map(8080, 80, "tcp")]))).success();
    neighbour.leave();
    pod.leave();
}

#[test]
fn add_that_ignores_conflicts_leaves_stale_ports() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    leave_behind(&world, Maker::GoNft);
    let heir = world.pod(&narrow(&world, "net1"));
    let ignoring = json!({"portConflict": "ignore"});
    leaves(&heir, &patched(world.config(json!([map(9090, 90, "tcp")])), ignoring.clone()), &[]);
    leaves(&heir, &patched(world.config(json!([])), ignoring), &[]);
    heir.leave();
    world.node.exec(&["nft", "flush", "ruleset"]);
}

#[test]
fn gc_names_the_rules_without_a_network_that_it_leaves() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let gone = leave_behind(&world, Maker::GoNft);
    let pod = world.pod(&narrow(&world, "net1"));
    let config = patched(world.config(json!([])), json!({"cniVersion": "1.1.0"}));
    let gc = Attachment::new(&world.node, &pod.container, config);
    let outcome = gc.gc(&[(&pod.container.id, "eth0")]);
    outcome.success();
    for word in ["tcp port 8080", "10.1.0.2:80", "[fd00:1::2]:80", &gone, "names no network"] {
        assert!(outcome.stderr.contains(word), "{word}: {}", outcome.report());
    }
    assert!(everything(&world).contains(&gone));
    let valid = gc.gc(&[(&pod.container.id, "eth0"), (&gone, "eth0")]);
    valid.success();
    assert!(!valid.stderr.contains(&gone), "a valid container's rules are not reported: {}", valid.report());
    pod.leave();
    world.node.exec(&["nft", "flush", "ruleset"]);
}
