//! `tap`: an Ethernet interface in the container whose other end is a program.

use std::path::Path;
use std::time::{Duration, Instant};

use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, patience, probe, require};
use conformance::{VERSION, VERSIONS, addresses, attach, ipam, patched, sandboxed};
use serde_json::{Value, json};

fn network(node: &Node) -> Value {
    patched(layer2(), json!({"ipam": ipam(node, &["10.1.0.0/24", "fd00:1::/64"])}))
}

fn layer2() -> Value {
    json!({"cniVersion": VERSION, "name": "net1", "type": "tap"})
}

/// Returns eth0's link kind data as `ip -d` shows it.
fn info(container: &Container) -> Value {
    let info = container.link("eth0").unwrap()["linkinfo"].clone();
    assert_eq!((&info["info_kind"], &info["info_data"]["type"]), (&json!("tun"), &json!("tap")));
    info["info_data"].clone()
}

/// Returns the names of the container's links without `lo`.
fn links(container: &Container) -> Vec<String> {
    let links = container.json(&["ip", "-j", "link", "show"]);
    let names = links.as_array().unwrap().iter().map(|link| link["ifname"].as_str().unwrap().to_owned());
    names.filter(|name| name != "lo").collect()
}

/// Opens eth0, in the container, as a virtual machine does, with or without multi_queue. Waits for
/// the kernel's ARP request for 10.1.0.77, answers it as `MAC`, and prints the payload of the UDP
/// datagram that comes then.
const MACHINE: &str = r#"
import fcntl, os, socket, struct, sys
tun = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tun, 0x400454ca, struct.pack("16sH22x", b"eth0", 0x1002 | int(sys.argv[1], 16)))
mac = bytes([2, 0, 0, 0, 0, 0x77])
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.sendto(b"from the container", ("10.1.0.77", 7777))
while True:
    frame = os.read(tun, 65536)
    if frame[12:14] == b"\x08\x06" and frame[38:42] == bytes([10, 1, 0, 77]) and frame[20:22] == b"\x00\x01":
        answer = frame[6:12] + mac + frame[12:20] + b"\x00\x02" + mac + frame[38:42] + frame[22:32]
        os.write(tun, answer)
    elif frame[:6] == mac and b"from the container" in frame:
        print(frame[-18:].decode())
        break
"#;

fn machine(container: &Container, flags: &str) -> String {
    container.exec(&["timeout", "60", "python3", "-c", MACHINE, flags])
}

#[test]
fn a_program_in_the_container_reads_and_writes_frames() {
    require!(probe::tool("python3"));
    let node = Node::new();
    for (keys, flags) in [(json!({}), "0"), (json!({"multiQueue": true}), "100")] {
        let (container, attachment, result) = attach(&node, &patched(network(&node), keys), 1).remove(0);
        assert!(addresses(&result)[0].starts_with("10.1.0."));
        assert_eq!(machine(&container, flags).trim(), "from the container");
        attachment.check(&result).success();
        attachment.del_with(&result).success();
    }
}

#[test]
fn every_key_is_honoured_together() {
    let node = Node::new();
    let container = node.container();
    let keys =
        json!({"owner": 1, "group": 2, "multiQueue": true, "mtu": 1400, "mac": "02:00:00:00:00:11", "args": {"x": 1}});
    let attachment = Attachment::new(&node, &container, patched(layer2(), keys));
    let result = attachment.add().success();
    let link = container.link("eth0").unwrap();
    assert_eq!((&link["mtu"], &link["address"]), (&json!(1400), &json!("02:00:00:00:00:11")));
    assert!(link["flags"].as_array().unwrap().contains(&json!("UP")), "{link:#}");
    let info = info(&container);
    let expected =
        [("user", json!("daemon")), ("group", json!("bin")), ("multi_queue", json!(true)), ("persist", json!(true))];
    for (key, value) in expected.into_iter().chain([("pi", json!(false)), ("vnet_hdr", json!(true))]) {
        assert_eq!(info[key], value, "{key} of {info:#}");
    }
    assert_eq!(result["interfaces"].as_array().unwrap().len(), 1);
    assert_eq!(sandboxed(&result)["mac"], "02:00:00:00:00:11");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn owner_and_group_may_be_root() {
    let node = Node::new();
    let config = patched(layer2(), json!({"owner": 0, "group": 0}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    let info = info(&container);
    assert_eq!((&info["user"], &info["group"], &info["persist"]), (&json!("root"), &json!("root"), &json!(true)));
    attachment.del_with(&result).success();
}

#[test]
fn the_runtimes_mac_wins_over_the_variable_and_the_key() {
    let node = Node::new();
    let key = json!({"mac": "02:00:00:00:00:13"});
    let runtime = patched(key.clone(), json!({"RuntimeConfig": {"mac": "02:00:00:00:00:11"}}));
    let variable = "IgnoreUnknown=true;MAC=02:00:00:00:00:12";
    for (keys, args, expected) in [(&runtime, variable, "11"), (&key, variable, "12"), (&key, "", "13")] {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, patched(layer2(), keys.clone())).args(args);
        let result = attachment.add().success();
        let mac = format!("02:00:00:00:00:{expected}");
        assert_eq!(
            (&container.link("eth0").unwrap()["address"], &sandboxed(&result)["mac"]),
            (&json!(mac), &json!(mac))
        );
        attachment.del_with(&result).success();
    }
}

#[test]
fn the_tap_becomes_a_port_of_a_bridge_in_the_container() {
    let node = Node::new();
    let container = node.container();
    container.ip(&["link add br7 type bridge"]);
    let attachment = Attachment::new(&node, &container, patched(layer2(), json!({"bridge": "br7"})));
    let result = attachment.add().success();
    assert_eq!(container.link("eth0").unwrap()["master"], "br7");
    attachment.check(&result).success();
    container.ip(&["link set eth0 nomaster"]);
    attachment.check(&result).fails_naming(101, &["eth0", "br7"]);
    attachment.del_with(&result).success();
    assert_eq!(links(&container), ["br7"]);
}

#[test]
fn an_unusable_bridge_is_refused_and_nothing_is_left() {
    let node = Node::new();
    let container = node.container();
    let add = |bridge: &str| {
        let config = patched(network(&node), json!({"bridge": bridge}));
        Attachment::new(&node, &container, config).add().failure()
    };
    assert_eq!(add("br7").msg, "failed to get bridge br7: Link not found");
    let msg = add("lo").msg;
    assert!(msg.starts_with("failed to set tap eth0 as a port of bridge lo: "), "{msg}");
    assert_eq!((links(&container), node.reservations("net1")), (vec![], vec![]));
}

#[test]
fn an_existing_interface_of_that_name_stays_untouched() {
    let node = Node::new();
    let container = node.container();
    container.ip(&["tuntap add mode tap name eth0"]);
    let before = container.link("eth0");
    let attachment = Attachment::new(&node, &container, network(&node));
    attachment.add().fails_naming(102, &["eth0"]);
    assert_eq!(container.link("eth0"), before);
    // Without a result a tap without a mark would be taken for one of Go's.
    let interface = json!({"name": "eth0", "mac": "02:00:00:00:00:77", "sandbox": container.netns()});
    attachment.del_with(&json!({"cniVersion": conformance::VERSION, "interfaces": [interface]})).success();
    assert_eq!(container.link("eth0"), before);
    assert_eq!((links(&container), node.reservations("net1")), (vec!["eth0".to_owned()], vec![]));
}

#[test]
fn an_add_that_fails_leaves_nothing() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, patched(network(&node), json!({"ipam": {"ranges": []}})));
    attachment.add().failure();
    assert_eq!(links(&container), [""; 0]);
    for keys in [json!({"mac": "zz"}), json!({"mtu": -5}), json!({"mtu": 70000})] {
        attachment.clone().config(patched(network(&node), keys)).add().fails_naming(7, &[]);
        assert_eq!(links(&container), [""; 0]);
    }
    let attachment = attachment.config(network(&node));
    let result = attachment.add().success();
    attachment.add().fails_naming(102, &["eth0"]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(links(&container), [""; 0]);
}

#[test]
fn addresses_with_ipv6_gateways_wait_for_no_carrier() {
    let node = Node::new();
    let config = patched(network(&node), json!({"ipam": {"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(container.addresses("eth0"), addresses(&result));
    // Duplicate address detection, which would need a carrier, never runs.
    let shown = container.exec(&["ip", "-6", "address", "show", "dev", "eth0", "tentative"]);
    assert!(!shown.contains("fd00:1:"), "{shown}");
    assert!(container.exec(&["ip", "-6", "route"]).contains("default via fd00:1::1 dev eth0"));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn check_compares_with_the_result() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &network(&node), 1).remove(0);
    attachment.check(&result).success();
    container.ip(&["address del 10.1.0.2/24 dev eth0"]);
    attachment.check(&result).fails_naming(101, &["10.1.0.2/24"]);
    container.ip(&["link del eth0", "link add eth0 type bridge"]);
    attachment.check(&result).fails_naming(101, &["eth0", "tun"]);
    container.ip(&["link del eth0"]);
    attachment.check(&result).fails_naming(3, &["eth0"]);
    attachment.del_with(&result).success();
}

#[test]
fn del_needs_neither_a_result_nor_a_namespace() {
    let node = Node::new();
    let all = attach(&node, &network(&node), 3);
    // The cause of a failed ADD does not keep DEL from removing everything.
    all[0].1.clone().args("FOO=1").del().success();
    assert_eq!(links(&all[0].0), [""; 0]);
    all[0].1.del().success();
    all[1].1.clone().netns("").del().success();
    all[2].1.clone().netns("/nonexistent/netns").del().success();
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn del_leaves_an_interface_that_is_not_a_tap() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &network(&node), 1).remove(0);
    container.ip(&["link del eth0", "link add eth0 type bridge"]);
    attachment.del_with(&result).success();
    assert_eq!(links(&container), ["eth0"]);
}

#[test]
fn gc_and_status_reach_ipam() {
    let node = Node::new();
    let config = patched(network(&node), json!({"cniVersion": "1.1.0"}));
    let all = attach(&node, &config, 2);
    let keep = &all[1].1;
    keep.status().success();
    keep.gc(&[(&keep.id, "eth0")]).success();
    assert_eq!(node.reservations("net1").len(), 2);
    keep.check(&all[1].2).success();
    for (_, attachment, result) in &all {
        attachment.del_with(result).success();
    }
}

#[test]
fn status_reports_a_host_without_the_device_file() {
    let node = Node::new();
    let config = patched(layer2(), json!({"cniVersion": "1.1.0"}));
    let container = node.container();
    let attachment = Attachment::new(&node, &container, config);
    attachment.status().success();
    node.exec(&["mount", "-t", "tmpfs", "tmpfs", "/dev/net"]);
    attachment.status().fails_naming(50, &["/dev/net/tun"]);
    attachment.add().fails_naming(100, &["eth0"]);
}

#[test]
fn a_label_without_selinux_is_refused_and_nothing_is_left() {
    require!(if Path::new("/sys/fs/selinux").exists() { Err("this kernel has SELinux".to_owned()) } else { Ok(()) });
    let node = Node::new();
    let container = node.container();
    let config = patched(layer2(), json!({"selinuxContext": "system_u:system_r:container_t:s0"}));
    let failure = Attachment::new(&node, &container, config).add().failure();
    assert!(failure.msg.starts_with("failed set socket label: "), "{}", failure.msg);
    assert_eq!(links(&container), [""; 0]);
}

#[test]
fn every_version_gets_its_result() {
    let node = Node::new();
    for version in VERSIONS {
        let container = node.container();
        let config = patched(network(&node), json!({"cniVersion": version}));
        let attachment = Attachment::new(&node, &container, config);
        let result = attachment.add().success();
        assert_eq!(result["cniVersion"], version);
        attachment.del().success();
        assert_eq!(links(&container), [""; 0], "{version}");
    }
}

#[test]
fn what_one_side_added_the_other_checks_and_deletes() {
    require!(probe::go_plugins());
    let node = Node::new();
    let (ours, go) = (bin_dir(), go_bin_dir());
    // Go waits five seconds for an IPv6 address.
    let one_family = ipam(&node, &["10.1.0.0/24"]);
    for keys in [json!({}), json!({"owner": 1, "group": 2, "ipam": one_family})] {
        for (adds, deletes) in [(&ours, &go), (&go, &ours)] {
            let container = node.container();
            let config = patched(network(&node), keys.clone());
            let attachment = Attachment::new(&node, &container, config).by(Path::new(adds));
            let result = attachment.add().success();
            let attachment = attachment.by(Path::new(deletes));
            attachment.check(&result).success();
            attachment.del_with(&result).success();
            assert_eq!((links(&container), node.reservations("net1")), (vec![], vec![]));
        }
    }
}

#[test]
fn result_and_kernel_state_equal_those_of_go() {
    require!(probe::go_plugins());
    let node = Node::new();
    let config =
        patched(network(&node), json!({"ipam": {"routes": [{"dst": "0.0.0.0/0"}]}, "mac": "02:00:00:00:00:11"}));
    let result_of = |attachment: &Attachment<'_>| {
        let result = attachment.add().success();
        (result["routes"].clone(), result["ips"][0]["interface"].clone(), sandboxed(&result)["mac"].clone())
    };
    let state = |container: &Container| {
        let link = container.link("eth0").unwrap();
        let facts = ["flags", "mtu", "operstate", "address", "txqlen"].map(|key| link[key].clone());
        (facts, container.exec(&["ip", "route", "show", "default"]))
    };
    let attach = |folder: &Path| {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, config.clone()).by(folder);
        (result_of(&attachment), container, attachment)
    };
    let ((ours, our_container, our), (gos, go_container, go)) = (attach(&bin_dir()), attach(&go_bin_dir()));
    assert_eq!(ours, gos);
    // Before 6.2 the kernel notices late that the tap has lost the carrier that it had during the
    // ADD.
    let deadline = Instant::now() + patience(Duration::from_secs(30));
    while state(&our_container) != state(&go_container) && Instant::now() < deadline {}
    assert_eq!(state(&our_container), state(&go_container));
    our.del().success();
    go.del().success();
}
