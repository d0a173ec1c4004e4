//! `host-device`: an interface of the host moves into the container, and comes back.

mod cards;
mod record;

use std::path::Path;

use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, probe, require};
use conformance::{VERSION, VERSIONS, addresses, ipam, patched, sandboxed, uplink};
use serde_json::{Value, json};

/// The hardware address of `dev0`.
const MAC: &str = "02:00:00:00:00:d0";

/// A node with an interface `dev0`, up, whose other end `peer0` stays, and an interface of the
/// usual name.
fn node() -> Node {
    let node = Node::new();
    for name in ["dev0", "peer0", "eth0", "eth0-peer"] {
        node.expect_left(name);
    }
    node.ip(&[
        &format!("link add dev0 address {MAC} type veth peer name peer0"),
        "link set dev0 up",
        "link set peer0 up",
        "link add eth0 type veth peer name eth0-peer",
    ]);
    node
}

fn layer2(keys: Value) -> Value {
    patched(json!({"cniVersion": VERSION, "name": "net1", "type": "host-device"}), keys)
}

fn network(node: &Node) -> Value {
    layer2(json!({"device": "dev0", "ipam": ipam(node, &["10.1.0.0/24"])}))
}

/// Whether the host has `dev0` as before the ADD: without an alias and, after a DEL, down.
#[track_caller]
fn is_back(node: &Node, state: &str) {
    let link = node.link("dev0").expect("the host has dev0 again");
    let up = link["flags"].as_array().unwrap().contains(&json!("UP"));
    assert_eq!((&link["address"], &link["ifalias"], up), (&json!(MAC), &Value::Null, state == "up"), "{link:#}");
    let shown = node.json(&["ip", "-j", "address", "show", "dev", "dev0", "scope", "global"]);
    assert_eq!(shown[0]["addr_info"].as_array().map_or(0, Vec::len), 0, "{shown:#}");
}

/// Whether the container's eth0 is `dev0`, up.
#[track_caller]
fn is_taken(node: &Node, container: &Container) {
    assert_eq!(node.link("dev0"), None);
    let link = container.link("eth0").expect("the container has the device");
    assert_eq!((&link["address"], &link["ifalias"]), (&json!(MAC), &json!("dev0")));
    assert!(link["flags"].as_array().unwrap().contains(&json!("UP")), "{link:#}");
}

/// Puts a sysfs of our own over the node's. Go's plugin sees it too.
fn sysfs(node: &Node) {
    let script = "
        mount -t tmpfs tmpfs /sys && cd /sys
        mkdir -p bus/pci/devices bus/auxiliary/devices devices/pci0 drivers/veth drivers/vfio-pci elsewhere/net/dev0
        device() { mkdir -p devices/pci0/$1/$3; ln -s /sys/devices/pci0/$1 bus/pci/devices/$1
                   [ -z \"$2\" ] || ln -s /sys/drivers/$2 devices/pci0/$1/driver; }
        device 0000:00:01.0 veth net/dev0
        device 0000:00:02.0 veth virtio7/net/dev0
        device 0000:00:03.0 vfio-pci
        device 0000:00:04.0 veth
        device 0000:00:05.0 veth net
        device 0000:00:06.0 veth net/gone0
        device 0000:00:07.0 ''
        ln -s /sys/elsewhere devices/pci0/outside
        for sf in 4/net/dev0 5; do
            mkdir -p devices/pci0/mlx5_core.sf.$sf
            ln -s /sys/devices/pci0/mlx5_core.sf.${sf%%/*} bus/auxiliary/devices/
        done";
    node.exec(&["sh", "-ec", script]);
}

#[test]
fn a_device_moves_in_and_comes_back() {
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    is_taken(&node, &container);
    assert_eq!(container.addresses("eth0"), addresses(&result));
    assert_eq!(result["interfaces"].as_array().unwrap().len(), 1);
    assert_eq!((&sandboxed(&result)["name"], &sandboxed(&result)["mac"]), (&json!("eth0"), &json!(MAC)));
    assert_eq!(result["ips"][0]["interface"], 0);
    node.ip(&["address add 10.1.0.1/24 dev peer0"]);
    container.ping("10.1.0.1");
    attachment.check(&result).success();
    for _ in 0..2 {
        attachment.del_with(&result).success();
        is_back(&node, "down");
    }
    assert_eq!((container.link("eth0"), node.reservations("net1")), (None, vec![]));
}

#[test]
fn every_key_selects_the_device() {
    let node = node();
    sysfs(&node);
    for keys in [
        json!({"device": "dev0"}),
        json!({"hwaddr": MAC}),
        json!({"kernelpath": "/sys/devices/pci0/0000:00:01.0"}),
        json!({"pciBusID": "0000:00:01.0"}),
        json!({"pciBusID": "0000:00:02.0"}),
        json!({"runtimeConfig": {"deviceID": "0000:00:01.0"}}),
        json!({"runtimeConfig": {"deviceID": "mlx5_core.sf.4"}}),
        // By precedence.
        json!({"device": "dev0", "hwaddr": "02:00:00:00:00:ff", "pciBusID": "0000:00:04.0"}),
        json!({"hwaddr": MAC, "kernelpath": "/sys/devices/pci0/0000:00:05.0"}),
        json!({"kernelpath": "/sys/devices/pci0/0000:00:01.0", "pciBusID": "0000:00:04.0"}),
        json!({"pciBusID": "0000:00:07.0", "runtimeConfig": {"deviceID": "mlx5_core.sf.4"}}),
    ] {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, layer2(keys));
        let result = attachment.add().success();
        is_taken(&node, &container);
        attachment.check(&result).success();
        attachment.del().success();
        is_back(&node, "down");
    }
}

#[test]
fn a_device_that_is_not_there_is_refused_in_gos_words() {
    let node = node();
    sysfs(&node);
    let not_found = |reason: &str| format!("failed to find host device: {reason}");
    for (keys, msg) in [
        (json!({}), r#"specify either "device", "hwaddr", "kernelpath" or "pciBusID""#.to_owned()),
        (json!({"DPDKMode": true}), r#"specify either "device", "hwaddr", "kernelpath" or "pciBusID""#.to_owned()),
        (json!({"device": "gone0"}), not_found("Link not found")),
        (json!({"hwaddr": "02:00:00:00:00:ff"}), not_found("failed to find physical interface")),
        (json!({"hwaddr": "zz"}), not_found("failed to parse MAC address \"zz\": address zz: invalid MAC address")),
        (
            json!({"kernelpath": "/tmp/x"}),
            not_found("kernel device path \"/tmp/x\" must be absolute and begin with /sys/devices/"),
        ),
        (
            json!({"kernelpath": "/sys/devices/gone"}),
            not_found(
                "failed to read directory /sys/devices/gone/net: \"open /sys/devices/gone/net: no such file or directory\"",
            ),
        ),
        (json!({"pciBusID": "0000:00:04.0"}), not_found("no net directory under pci device 0000:00:04.0")),
        (
            json!({"pciBusID": "0000:00:05.0"}),
            not_found("failed to find network device in path /sys/bus/pci/devices/0000:00:05.0/net"),
        ),
        (json!({"pciBusID": "0000:00:06.0"}), not_found("Link not found")),
        (
            json!({"pciBusID": "0000:00:07.0"}),
            "error with host device: lstat /sys/devices/pci0/0000:00:07.0/driver: no such file or directory".to_owned(),
        ),
        (
            json!({"pciBusID": "0000:00:09.0"}),
            "error with host device: lstat /sys/bus/pci/devices/0000:00:09.0: no such file or directory".to_owned(),
        ),
        (
            json!({"device": "dev0", "runtimeConfig": {"deviceID": "0000:00:09.0"}}),
            "runtime config DeviceID 0000:00:09.0 not found or unsupported".to_owned(),
        ),
        (
            json!({"runtimeConfig": {"deviceID": "mlx5_core.sf.5"}}),
            not_found(
                "failed to read directory /sys/bus/auxiliary/devices/mlx5_core.sf.5/net: \"open /sys/bus/auxiliary/devices/mlx5_core.sf.5/net: no such file or directory\"",
            ),
        ),
    ] {
        let container = node.container();
        let outcome = Attachment::new(&node, &container, layer2(keys)).add();
        assert_eq!(outcome.json.as_ref().map(|error| &error["msg"]), Some(&json!(msg)), "{}", outcome.report());
    }
    is_back(&node, "up");
}

#[test]
fn a_refusal_of_the_device_is_about_the_configuration() {
    let node = node();
    sysfs(&node);
    let container = node.container();
    node.ip(&["link add dev1 type bridge", &format!("link set dev1 address {MAC}")]);
    for (keys, words) in [
        // Resolved before it is judged.
        (json!({"kernelpath": "/sys/devices/../elsewhere"}), vec!["/sys/devices/../elsewhere", "/sys/devices/"]),
        (json!({"kernelpath": "/sys/devices/pci0/outside"}), vec!["/sys/devices/pci0/outside", "/sys/devices/"]),
        (json!({"pciBusID": "../../../elsewhere"}), vec!["pciBusID", "elsewhere"]),
        (json!({"hwaddr": MAC}), vec!["hwaddr", "dev0", "dev1"]),
        (json!({"device": "gone0"}), vec!["gone0"]),
    ] {
        Attachment::new(&node, &container, layer2(keys)).add().fails_naming(7, &words);
    }
    is_back(&node, "up");
}

#[test]
fn a_device_that_a_program_drives_is_not_moved() {
    let node = node();
    sysfs(&node);
    let container = node.container();
    let keys = json!({"pciBusID": "0000:00:03.0", "device": "dev0", "ipam": ipam(&node, &["10.1.0.0/24"])});
    let attachment = Attachment::new(&node, &container, layer2(keys));
    let result = attachment.add().success();
    is_back(&node, "up");
    assert_eq!(container.link("eth0"), None);
    let interface = sandboxed(&result);
    assert_eq!((&interface["name"], interface.get("mac"), addresses(&result).len()), (&json!("eth0"), None, 1));
    assert_eq!(node.reservations("net1").len(), 1);
    attachment.check(&result).success();
    for _ in 0..2 {
        attachment.del_with(&result).success();
    }
    is_back(&node, "up");
}

#[test]
fn the_container_may_have_an_interface_of_the_hosts_name() {
    let node = node();
    let container = node.container();
    container.ip(&["link add dev0 type bridge"]);
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    is_taken(&node, &container);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    is_back(&node, "down");
    assert_eq!(container.link("dev0").unwrap()["linkinfo"]["info_kind"], "bridge");
}

#[test]
fn an_existing_interface_of_that_name_stays_untouched() {
    let node = node();
    let container = node.container();
    // With an alias, as an interface that another attachment got from the host.
    container.ip(&["link add eth0 type bridge", "link set eth0 alias dev7"]);
    let attachment = Attachment::new(&node, &container, network(&node));
    attachment.add().fails_naming(102, &["eth0"]);
    is_back(&node, "up");
    attachment.del().success();
    assert_eq!(container.link("eth0").unwrap()["ifalias"], "dev7");
    is_back(&node, "up");
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn an_add_that_fails_gives_the_device_back() {
    let node = node();
    let container = node.container();
    node.ip(&["link set dev0 alias uplink"]);
    let config = patched(network(&node), json!({"ipam": {"ranges": []}}));
    let attachment = Attachment::new(&node, &container, config);
    attachment.add().failure();
    assert_eq!(container.link("eth0"), None);
    let link = node.link("dev0").unwrap();
    assert_eq!(link["ifalias"], "uplink");
    assert!(link["flags"].as_array().unwrap().contains(&json!("UP")), "{link:#}");
    attachment.del().success();
    let attachment = attachment.config(network(&node));
    let result = attachment.add().success();
    attachment.add().fails_naming(102, &["eth0"]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    is_back(&node, "down");
}

#[test]
fn a_taken_host_name_fails_del_and_leaves_the_device_working() {
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    node.ip(&["link add dev0 type bridge", "address add 10.1.0.1/24 dev peer0"]);
    let failure = attachment.del_with(&result).failure();
    assert_eq!(failure.msg, "failed to move \"dev0\" to hostNS: file exists");
    assert_eq!(container.link("eth0").unwrap()["ifalias"], "dev0");
    container.ping("10.1.0.1");
    node.ip(&["link del dev0"]);
    attachment.del_with(&result).success();
    is_back(&node, "down");
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn del_without_a_namespace_releases_the_address() {
    for netns in ["", "/nonexistent/netns"] {
        let node = node();
        let container = node.container();
        let attachment = Attachment::new(&node, &container, network(&node));
        let result = attachment.add().success();
        attachment.clone().netns(netns).del_with(&result).success();
        assert_eq!(node.reservations("net1"), []);
        attachment.del_with(&result).success();
        is_back(&node, "down");
    }
}

#[test]
fn a_device_that_the_kernel_moved_back_gets_its_name() {
    let mac = json!({"hwaddr": MAC});
    let by_pci = json!({"pciBusID": "0000:00:01.0"});
    let by_name = json!({"device": "dev0"});
    let by_path = json!({"kernelpath": "/sys/devices/pci0/0000:00:01.0"});
    for (keys, with_result) in
        [(by_name.clone(), true), (by_name, false), (mac, false), (by_pci, false), (by_path, false)]
    {
        let node = node();
        sysfs(&node);
        let container = node.container();
        let config = patched(layer2(keys.clone()), json!({"ipam": ipam(&node, &["10.1.0.0/24"])}));
        let attachment = Attachment::new(&node, &container, config);
        let result = attachment.add().success();
        // A veth dies with its namespace; the kernel brings hardware back, down, as here.
        let namespace = node.netns();
        container.ip(&[&format!("link set eth0 netns {} name eth7", namespace.display())]);
        node.exec(&["mv", "/sys/devices/pci0/0000:00:01.0/net/dev0", "/sys/devices/pci0/0000:00:01.0/net/eth7"]);
        assert_eq!(node.link("eth7").unwrap()["ifalias"], "dev0");
        let attachment = attachment.netns("");
        for _ in 0..2 {
            if with_result {
                attachment.del_with(&result).success()
            } else {
                attachment.del().success()
            };
            is_back(&node, "down");
        }
        assert_eq!(node.reservations("net1"), [], "{keys}");
    }
}

#[test]
fn a_neighbours_alias_is_not_taken_for_the_devices() {
    let node = node();
    let container = node.container();
    node.expect_left("dev1");
    node.expect_left("peer1");
    node.ip(&["link add dev1 type veth peer name peer1", "link set dev1 alias dev0"]);
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    attachment.clone().netns("").del_with(&result).success();
    assert_eq!(node.link("dev1").unwrap()["ifalias"], "dev0");
    attachment.del_with(&result).success();
    is_back(&node, "down");
}

#[test]
fn an_interface_whose_alias_was_removed_stays_with_an_error() {
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    record::forget(&node);
    container.exec(&["ip", "link", "set", "eth0", "alias", ""]);
    let failure = attachment.del_with(&result).failure();
    assert_eq!(failure.msg, "failed to find original ifname for \"eth0\" (alias is not set)");
    container.ip(&["link set eth0 alias dev0"]);
    attachment.del_with(&result).success();
    is_back(&node, "down");
}

#[test]
fn an_alias_that_cannot_be_a_name_is_quoted_in_the_error() {
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    record::forget(&node);
    container.ip(&["link set eth0 alias a/b"]);
    let failure = attachment.del_with(&result).failure();
    let text = "failed to find original ifname for \"eth0\" (its alias \"a/b\" is not an interface name)";
    assert_eq!(failure.msg, text);
    container.ip(&["link set eth0 alias dev0"]);
    attachment.del_with(&result).success();
}

#[test]
fn check_compares_with_the_result() {
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node));
    let result = attachment.add().success();
    attachment.check(&result).success();
    container.ip(&["address del 10.1.0.2/24 dev eth0"]);
    attachment.check(&result).fails_naming(101, &["10.1.0.2/24"]);
    container.ip(&["address add 10.1.0.2/24 dev eth0", "link set eth0 down"]);
    attachment.check(&result).fails_naming(101, &["eth0"]);
    attachment.del_with(&result).success();
    attachment.check(&result).fails_naming(3, &["eth0"]);
    is_back(&node, "down");
}

#[test]
fn a_host_that_loses_its_default_route_is_warned() {
    let node = node();
    let outside = uplink(&node, "out0");
    let add = || {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, network(&node));
        let outcome = attachment.add();
        let warned = outcome.stderr.contains("without dev0 this host has no default route");
        attachment.del_with(&outcome.success()).success();
        warned
    };
    assert!(!add());
    let route = ["link set dev0 up", "address add 10.7.0.1/24 dev dev0", "route add default via 10.7.0.9"];
    node.ip(&route);
    assert!(add(), "the only default route leads over dev0");
    node.ip(&route);
    node.ip(&["route add default via 192.0.2.9 metric 7"]);
    assert!(!add(), "another one stays");
    drop(outside);
}

#[test]
fn validate_warns_before_the_default_route_is_lost() {
    require!(probe::plugin("cnitool"));
    let node = node();
    let list = json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [{"type": "host-device", "device": "dev0"}]});
    let file = node.file("net1.conflist", list.to_string());
    let validate = || {
        let cnitool = bin_dir().join("cnitool");
        let ran = node.run(&[cnitool.to_str().unwrap(), "validate", file.to_str().unwrap()]);
        format!("{}{}", ran.stdout, ran.stderr)
    };
    let warning = "without dev0 this host has no default route";
    let before = validate();
    assert!(!before.contains(warning), "{before}");
    node.ip(&["address add 10.7.0.1/24 dev dev0", "route add default via 10.7.0.9"]);
    let after = validate();
    assert!(after.contains(warning) && after.contains("plugins[0].device"), "{after}");
}

#[test]
fn gc_and_status_reach_ipam_and_leave_the_device() {
    let node = node();
    let container = node.container();
    let config = patched(network(&node), json!({"cniVersion": "1.1.0"}));
    let attachment = Attachment::new(&node, &container, config);
    let result = attachment.add().success();
    // Neither knows what the runtime will select.
    attachment.clone().config(patched(attachment.config.clone(), json!({"device": null}))).status().success();
    attachment.gc(&[]).success();
    assert_eq!(node.reservations("net1"), []);
    is_taken(&node, &container);
    attachment.del_with(&result).success();
    is_back(&node, "down");
}

#[test]
fn every_version_gets_its_result() {
    let node = node();
    for version in VERSIONS {
        let container = node.container();
        let config = patched(network(&node), json!({"cniVersion": version}));
        let attachment = Attachment::new(&node, &container, config);
        assert_eq!(attachment.add().success()["cniVersion"], version);
        attachment.del().success();
        is_back(&node, "down");
    }
}

#[test]
fn what_one_side_added_the_other_checks_and_deletes() {
    require!(probe::go_plugins());
    let node = node();
    let (ours, go) = (bin_dir(), go_bin_dir());
    let mut seen = Vec::new();
    for (adds, deletes) in [(&ours, &go), (&go, &ours)] {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, network(&node)).by(Path::new(adds));
        let mut result = attachment.add().success();
        is_taken(&node, &container);
        let attachment = attachment.by(Path::new(deletes));
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        is_back(&node, "down");
        assert_eq!(node.reservations("net1"), []);
        result["interfaces"][0].as_object_mut().unwrap().remove("sandbox");
        result["ips"][0].as_object_mut().unwrap().remove("address");
        seen.push(result);
    }
    assert_eq!(seen[0], seen[1]);
}
