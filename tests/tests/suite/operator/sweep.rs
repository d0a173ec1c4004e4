//! gc of all networks, and gc with a list of the valid attachments.

use std::time::{Duration, Instant};

use cni_testkit::{Container, Started, crowd, patience, probe, report_errors, require};
use conformance::{bridge, patched};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{Operator, path};

/// The folder of Multus' result cache.
const MULTUS: &str = "/var/lib/cni/multus";

/// Attaches a container to the network `nad` of an old version, which only Multus' result cache has
/// afterwards.
fn attach_by_multus(operator: &Operator, container: &Container) {
    let plugin = patched(bridge(&operator.node, &["10.2.0.0/24"]), json!({"name": null, "bridge": "br2"}));
    let list = json!({"cniVersion": "0.4.0", "name": "nad", "plugins": [plugin]});
    let file = operator.node.file("net.d/20-nad.conflist", list.to_string());
    let args = ["add", "nad", path(container), "--container-id", &container.id, "-i", "net1", "--cache-dir", MULTUS];
    operator.done(&args);
    std::fs::remove_file(file).unwrap();
}

/// Returns the owners of a network's reservations.
pub(crate) fn owners(operator: &Operator, network: &str) -> Vec<String> {
    operator.node.reservations(network).into_iter().map(|(_, owner)| owner.replace("\r\n", "/")).collect()
}

/// Returns the decision about an attachment in the document of gc, and its state.
pub(crate) fn decision<'a>(json: &'a Value, network: &str, container: &str) -> (&'static str, &'a str) {
    let plan = json["networks"].as_array().unwrap().iter().find(|plan| plan["network"] == network).unwrap();
    for list in ["removed", "kept"] {
        let rows = plan[list].as_array().unwrap();
        if let Some(row) = rows.iter().find(|row| row["containerID"] == container) {
            return (list, row["state"].as_str().unwrap());
        }
    }
    panic!("nothing about {container}: {json:#}");
}

#[test]
fn gc_without_a_name_covers_the_folder_and_every_cache() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let (lives, dies, pod) = (operator.attach(), operator.attach(), operator.node.container());
    attach_by_multus(&operator, &pod);
    let (dead, dead_pod) = (dies.id.clone(), pod.id.clone());
    dies.destroy();
    pod.destroy();
    let dry = operator.json(&["gc", "--dry-run"]);
    assert_eq!(decision(&dry, "net1", &lives.id), ("kept", "in use"));
    assert_eq!(decision(&dry, "net1", &dead), ("removed", "over"));
    assert_eq!(decision(&dry, "nad", &dead_pod), ("removed", "over"));
    assert_eq!(owners(&operator, "nad"), [format!("{dead_pod}/net1")]);
    // Only the given caches are read.
    let other = operator.json(&["gc", "--dry-run", "--cache-dir", "/var/lib/cni"]);
    assert_eq!(other["networks"].as_array().unwrap().len(), 1, "{other:#}");

    // As the timer runs it.
    let unit = include_str!("../../../../pkg/cnitool/systemd/cni-gc.service");
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/cnitool ")).unwrap();
    let text = operator.done(&command.split(' ').collect::<Vec<_>>());
    assert!(text.contains(&format!("remove  {dead}/eth0  (its namespace")), "{text}");
    assert_eq!(owners(&operator, "net1"), [format!("{}/eth0", lives.id)]);
    assert_eq!(owners(&operator, "nad"), Vec::<String>::new());
    assert_eq!(operator.node.exec(&["ls", &format!("{MULTUS}/results")]), "");
    lives.ping("10.1.0.1");
    operator.detach(&lives);
}

#[test]
fn a_list_decides_even_if_the_namespace_exists() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let (listed, unlisted, pod) = (operator.attach(), operator.attach(), operator.node.container());
    attach_by_multus(&operator, &pod);
    let pods = json!({"items": [{"id": listed.id, "state": "SANDBOX_READY"}]}).to_string();
    let gc = |args: &[&str]| {
        let outcome =
            operator.call(&[&["gc", "--json", "--valid-from", "-"], args].concat()).stdin(pods.as_str()).run();
        assert_eq!(outcome.status, Some(0), "{}", outcome.report());
        let json = outcome.json.clone().unwrap();
        assert_eq!(report_errors("gc", &json), [""; 0], "{json:#}");
        json
    };
    // A pod may be listed only some time after its ADD.
    assert_eq!(decision(&gc(&[]), "net1", &unlisted.id), ("kept", "young"));
    let dry = gc(&["--min-age", "0", "--dry-run"]);
    let done = gc(&["--min-age", "0"]);
    assert_eq!(dry["networks"][0]["removed"], done["networks"][0]["removed"]);
    assert_eq!(decision(&done, "net1", &listed.id), ("kept", "listed"));
    assert_eq!(decision(&done, "net1", &unlisted.id), ("removed", "over"));
    assert_eq!(decision(&done, "nad", &pod.id), ("removed", "over"));
    assert_eq!(owners(&operator, "net1"), [format!("{}/eth0", listed.id)]);
    assert!(unlisted.link("eth0").is_none() && pod.link("net1").is_none() && listed.link("eth0").is_some());
    operator.detach(&listed);
}

#[test]
fn what_is_younger_than_the_list_is_kept() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let older = operator.attach();
    // The clock of files is coarse: the list could have the same time.
    operator.node.exec(&["sh", "-c", "touch -d '1 hour ago' /var/lib/cni/results/*"]);
    let list = operator.node.file("valid", "some-pod/eth0\n");
    let younger = operator.attach();
    let json = operator.json(&["gc", "--valid-from", list.to_str().unwrap(), "--min-age", "0"]);
    assert_eq!(decision(&json, "net1", &older.id), ("removed", "over"));
    assert_eq!(decision(&json, "net1", &younger.id), ("kept", "young"));
    assert_eq!(owners(&operator, "net1"), [format!("{}/eth0", younger.id)]);
    younger.ping("10.1.0.1");
    operator.detach(&younger);
}

#[test]
fn an_unreadable_list_stops_gc_before_any_change() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let (lives, dies) = (operator.attach(), operator.attach());
    let dead = dies.id.clone();
    dies.destroy();
    for (stdin, code) in
        [("", "code 6"), ("{\"items\":[{\"id\":\"x\"}", "code 6"), ("x\n", "code 6"), ("{\"items\":[]}", "code 103")]
    {
        let outcome = operator.call(&["gc", "--valid-from", "-", "--min-age", "0"]).stdin(stdin).run();
        assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(1), ""), "{}", outcome.report());
        assert!(outcome.stderr.contains(code), "{stdin}: {}", outcome.report());
    }
    operator.failed(&["gc", "--valid-from", "/nowhere/list"], &["/nowhere/list: it cannot be read", "No such file"]);
    assert_eq!(owners(&operator, "net1").len(), 2);
    operator.done(&["gc"]);
    assert_eq!(owners(&operator, "net1"), [format!("{}/eth0", lives.id)], "{dead}");
    operator.detach(&lives);
}

#[test]
fn what_no_cache_has_goes_on_request_and_if_old() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let stranger = operator.attach();
    operator.node.exec(&["sh", "-c", "rm /var/lib/cni/results/net1-*"]);
    operator.node.file("networks/net1/10.1.0.77", "gone\r\neth0");
    let dry = |args: &[&str]| operator.json(&[&["gc", "--dry-run"], args].concat());
    assert_eq!(decision(&dry(&[]), "net1", "gone"), ("kept", "unknown"));
    assert_eq!(decision(&dry(&["--unknown"]), "net1", "gone"), ("kept", "young"));
    // Reservations have whole seconds.
    let deadline = std::time::Instant::now() + patience(std::time::Duration::from_secs(20));
    while decision(&dry(&["--unknown", "--min-age", "0"]), "net1", "gone") != ("removed", "over") {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
    // Its link shows that the container exists.
    assert_eq!(decision(&dry(&["--unknown", "--min-age", "0"]), "net1", &stranger.id), ("kept", "in use"));
    operator.done(&["gc", "--unknown", "--min-age", "0"]);
    assert_eq!(owners(&operator, "net1"), [format!("{}/eth0", stranger.id)]);
    let list = operator.node.file("valid", "some-pod/eth0\n");
    operator.done(&["gc", "--valid-from", list.to_str().unwrap(), "--min-age", "0"]);
    assert_eq!(owners(&operator, "net1"), Vec::<String>::new());
    assert!(stranger.link("eth0").is_none());
}

#[test]
fn gc_keeps_attachments_whose_reservations_are_not_mounted() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let dies = operator.attach();
    let dead = dies.id.clone();
    dies.destroy();
    // As in a container in which the folder is not mounted.
    let (folder, elsewhere) = (operator.node.data_dir(), operator.node.dir().join("elsewhere"));
    std::fs::rename(&folder, &elsewhere).unwrap();
    assert_eq!(decision(&operator.json(&["gc"]), "net1", &dead), ("kept", "unknown"));
    let text = operator.done(&["gc"]);
    let missing = format!("{}/net1 with its reservations does not exist: mount or create", folder.display());
    assert!(text.contains(&format!("keep    {dead}/eth0  (its namespace")) && text.contains(&missing), "{text}");
    // A restart of the node may have emptied the folder.
    let dry = |time: &str| {
        operator.node.exec(&["sh", "-c", &format!("touch -d {time} /var/lib/cni/results/*")]);
        operator.json(&["gc", "--dry-run"])
    };
    assert_eq!(decision(&dry("2001-01-01"), "net1", &dead), ("removed", "over"));
    assert_eq!(decision(&dry("now"), "net1", &dead), ("kept", "unknown"));
    std::fs::rename(&elsewhere, &folder).unwrap();
    assert_eq!(owners(&operator, "net1"), [format!("{dead}/eth0")]);
    assert_eq!(decision(&operator.json(&["gc"]), "net1", &dead), ("removed", "over"));
    assert_eq!(owners(&operator, "net1"), Vec::<String>::new());
}

#[test]
fn gc_of_one_network_keeps_what_multus_has_attached() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let (lives, pod, dies) = (operator.attach(), operator.node.container(), operator.node.container());
    for container in [&pod, &dies] {
        let names = ["--container-id", &container.id, "-i", "net1", "--cache-dir", MULTUS];
        operator.done(&[&["add", "net1", path(container)], &names[..]].concat());
    }
    dies.unlink();
    operator.node.exec(&[
        "find",
        &operator.node.data_dir().display().to_string(),
        "-exec",
        "touch",
        "-d",
        "2001-01-01",
        "{}",
        "+",
    ]);
    operator.done(&["ipam", "gc", "net1", "--unknown"]);
    operator.done(&["gc", "net1"]);
    assert_eq!(owners(&operator, "net1"), [format!("{}/eth0", lives.id), format!("{}/net1", pod.id)]);
    assert_eq!(operator.node.ports("br0").len(), 2);
    let cached = operator.node.exec(&["ls", &format!("{MULTUS}/results")]);
    assert!(cached.contains(&pod.id) && !cached.contains(&dies.id), "{cached}");
    operator.done(&["del", "net1", path(&pod), "--container-id", &pod.id, "-i", "net1", "--cache-dir", MULTUS]);
    operator.detach(&lives);
}

#[test]
fn an_object_without_an_interface_is_of_a_known_attachment() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let lives = operator.node.container();
    operator.done(&["add", "net1", path(&lives), "--container-id", &lives.id, "-i", "net1"]);
    // As very old releases of host-local wrote it.
    operator.node.file("networks/net1/10.1.0.77", &lives.id);
    operator.node.exec(&[
        "touch",
        "-d",
        "2001-01-01",
        &operator.node.data_dir().join("net1/10.1.0.77").display().to_string(),
    ]);
    let dry = operator.json(&["gc", "--unknown", "--dry-run"]);
    assert_eq!(dry["networks"][0]["removed"], json!([]), "{dry:#}");
    operator.done(&["del", "net1", path(&lives), "--container-id", &lives.id, "-i", "net1"]);
    std::fs::remove_file(operator.node.data_dir().join("net1/10.1.0.77")).unwrap();
}

#[test]
fn the_plugins_of_an_older_list_collect_too() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let lives = operator.attach();
    let file = operator.node.dir().join("net.d/10-net1.conflist");
    let text = std::fs::read_to_string(&file).unwrap().replace("\"1.1.0\"", "\"0.4.0\"");
    std::fs::write(&file, text).unwrap();
    operator.node.file("networks/net1/10.1.0.77", "gone\r\neth0");
    let skipped = operator.done(&["gc"]);
    assert!(skipped.contains("The GC of the plugins of net1 is not run: it is only run with --plugins."), "{skipped}");
    assert_eq!(owners(&operator, "net1").len(), 2);
    operator.done(&["gc", "net1"]);
    assert_eq!(owners(&operator, "net1"), [format!("{}/eth0", lives.id)]);
    operator.detach(&lives);
}

/// Starts an ADD for each container, and kills all of them when each has created its link and waits
/// for the lock of the reservations.
fn kill_adds_before_their_reservations(operator: &Operator, containers: &[Container]) {
    let lock = std::fs::File::open(operator.node.dir().join("networks/net1/lock")).unwrap();
    lock.lock().unwrap();
    let config = bridge(&operator.node, &["10.1.0.0/24"]);
    let start = |container| operator.node.plugin("bridge").command("ADD").container(container).config(&config).start();
    let mut started: Vec<Started> = containers.iter().map(start).collect();
    started.iter_mut().for_each(Started::release);
    let deadline = Instant::now() + patience(Duration::from_secs(20));
    let has_link = |container: &Container| aliases(operator).contains(&format!("cni:net1/{}/eth0", container.id));
    while !containers.iter().all(has_link) {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    started.iter().for_each(|add| add.signal_group(Signal::SIGKILL));
    started.into_iter().for_each(|add| assert_eq!(add.finish().status, None));
    lock.unlock().unwrap();
}

/// Returns the aliases of the node's links to containers.
fn aliases(operator: &Operator) -> Vec<String> {
    let links = operator.node.json(&["ip", "-j", "link"]);
    let links = links.as_array().unwrap().iter();
    let aliases = links.filter_map(|link| link["ifalias"].as_str());
    aliases.filter(|alias| alias.starts_with("cni:net1/")).map(str::to_owned).collect()
}

#[test]
fn links_of_a_killed_storm_go_and_young_links_stay() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let alive = operator.attach();
    let killed: Vec<Container> = (0..crowd(50)).map(|_| operator.node.container()).collect();
    kill_adds_before_their_reservations(&operator, &killed);
    let gc = |args: &[&str]| {
        let list = format!("{}/eth0\n", alive.id);
        operator.call(&[&["gc", "--json", "--valid-from", "-"], args].concat()).stdin(list).run().success()
    };
    // Such a link could be that of a running ADD.
    let json = gc(&[]);
    for container in &killed {
        assert_eq!(decision(&json, "net1", &container.id), ("kept", "unknown"));
    }
    let json = gc(&["--min-age", "0"]);
    for container in &killed {
        assert_eq!(decision(&json, "net1", &container.id), ("removed", "over"));
        assert!(container.link("eth0").is_none());
    }
    assert_eq!(aliases(&operator), [format!("cni:net1/{}/eth0", alive.id)]);
    alive.ping("10.1.0.1");
    operator.detach(&alive);
}
