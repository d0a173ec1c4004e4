//! After a reboot the earlier reservations of host-local are free again, and no others.
//!
//! Here a reboot is another boot ID and another uptime: files of the test, mounted over the
//! kernel's in the node's own mount namespace. A time namespace would not do, because it does not
//! change the times of files.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{Attachment, Container, Node, probe, require};
use conformance::{address, attach, bridge, host_end, host_local, patched};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const UPTIME: &str = "/proc/uptime";
const MACHINE_ID: &str = "/etc/machine-id";

/// A node with a machine ID and boot ID that the test chooses.
struct Machine {
    node: Node,
    boots: Cell<u32>,
    booted: Cell<Instant>,
}

impl Machine {
    /// Returns a machine with an ID in its first boot.
    fn new() -> Machine {
        let node = Node::new();
        for (name, path) in [("boot_id", BOOT_ID), ("uptime", UPTIME), ("machine-id", MACHINE_ID)] {
            let file = node.file(name, "");
            node.exec(&["mount", "--bind", file.to_str().unwrap(), path]);
        }
        let machine = Machine { node, boots: Cell::new(0), booted: Cell::new(Instant::now()) };
        machine.identify("0123456789abcdef0123456789abcdef\n");
        machine.reboot();
        machine
    }

    /// Starts a new boot now.
    fn reboot(&self) {
        self.boots.set(self.boots.get() + 1);
        self.node.file("boot_id", format!("00000000-0000-4000-8000-{:012}\n", self.boots.get()));
        self.node.file("uptime", "0.00 0.00\n");
        self.booted.set(Instant::now());
    }

    /// Sets the uptime to the time since the reboot. It does not grow by itself.
    fn update_uptime(&self) {
        self.node.file("uptime", format!("{:.2} 0.00\n", self.booted.get().elapsed().as_secs_f64()));
    }

    fn identify(&self, id: &str) {
        self.node.file("machine-id", id);
    }

    fn network(&self, subnet: &str) -> Value {
        let keys = json!({"cniVersion": "1.1.0", "ipam": {"fullIsUnavailable": true}});
        patched(host_local(&self.node, &[subnet]), keys)
    }

    fn dir(&self, name: &str) -> String {
        let dir = self.node.dir().join(name);
        fs::create_dir(&dir).unwrap();
        dir.to_str().unwrap().to_owned()
    }

    /// A folder on an overlay, and the folder below it that stores its files.
    fn overlay(&self) -> (String, String) {
        let (overlay, upper) = (self.dir("overlay"), self.dir("upper"));
        let layers = format!("lowerdir={},upperdir={upper},workdir={}", self.dir("lower"), self.dir("work"));
        self.node.exec(&["mount", "-t", "overlay", "overlay", "-o", &layers, &overlay]);
        (overlay, upper)
    }

    fn held(&self) -> Vec<(String, String)> {
        self.node.reservations("net1")
    }

    fn held_addresses(&self) -> Vec<String> {
        self.held().into_iter().map(|(address, _)| address).collect()
    }
}

/// Whether the folder of the tests is on a file system that the plugin trusts, and the machine has
/// an ID to mount over.
fn possible() -> probe::Probed {
    if !Path::new(MACHINE_ID).exists() {
        return Err(format!("no {MACHINE_ID} on this machine"));
    }
    let node = Node::new();
    let kind = node.exec(&["stat", "-f", "-c", "%T", node.dir().to_str().unwrap()]);
    match kind.trim() {
        "ext2/ext3" | "xfs" | "btrfs" | "f2fs" | "zfs" => Ok(()),
        kind => Err(format!("{} is on {kind}; set TMPDIR to a folder on a disk", node.dir().display())),
    }
}

fn another(node: &Node, config: &Value) -> (Container, String) {
    let container = node.container();
    let result = Attachment::new(node, &container, config.clone()).add().success();
    (container, address(&result))
}

fn full(node: &Node, config: &Value) {
    let container = node.container();
    Attachment::new(node, &container, config.clone()).add().fails_with(11, "failed to allocate for range 0: ");
}

#[test]
fn ten_reboots_of_a_full_node_leak_nothing() {
    require!(possible());
    let machine = Machine::new();
    let config = machine.network("10.1.0.0/28");
    let any = machine.node.container();
    for boot in 1..=10 {
        let mut all = attach(&machine.node, &config, 13 - machine.held().len());
        full(&machine.node, &config);
        let (_, attachment, _) = all.remove(0);
        attachment.status().fails_with(50, "");
        machine.reboot();
        attachment.status().success();
        assert_eq!(machine.held().len(), 13, "STATUS changes nothing");
        if boot % 2 == 0 {
            // Even attachments that the runtime still lists as valid: no container survives a
            // reboot.
            attachment.gc(&[(&attachment.id, "eth0")]).success();
            assert_eq!(machine.held(), [], "after boot {boot} and GC");
        }
        let (container, _) = another(&machine.node, &config);
        let content = format!("{}\r\neth0", container.id);
        assert_eq!(machine.held().iter().map(|held| &held.1).collect::<Vec<_>>(), [&content], "after boot {boot}");
    }
    Attachment::new(&machine.node, &any, config.clone()).gc(&[]).success();
    assert_eq!(machine.held(), []);
}

/// Wherever host-local was killed, the next boot reclaims its reservation: a file without a record
/// would stay forever.
#[test]
fn reservations_of_a_killed_add_are_reclaimed() {
    require!(possible());
    require!(trace::supported());
    let machine = Machine::new();
    let config = machine.network("10.1.0.0/24");
    let kill = |container: &Container, at| {
        let plan = Plan { victim: "host-local".into(), at, act: Act::Signal(Signal::SIGKILL) };
        Attachment::new(&machine.node, container, config.clone()).invocation("ADD", None).traced(&plan)
    };
    // Creates the links, so that the killed calls are ordinary ADDs.
    another(&machine.node, &config);
    let (mut reserved, mut at) = (0, 1);
    loop {
        let victim = machine.node.container();
        if kill(&victim, at).hit.is_none() {
            break;
        }
        reserved += usize::from(machine.held().iter().any(|(_, content)| content.starts_with(&victim.id)));
        if at % 2 == 0 {
            another(&machine.node, &config);
        }
        machine.reboot();
        let (alive, _) = another(&machine.node, &config);
        let held: Vec<String> = machine.held().into_iter().map(|(_, content)| content).collect();
        assert_eq!(held, [format!("{}\r\neth0", alive.id)], "killed at call {at}");
        at += 1;
    }
    Attachment::new(&machine.node, &machine.node.container(), config.clone()).gc(&[]).success();
    assert!(reserved > 10, "only {reserved} of {at} kills left a reservation behind");
}

#[test]
fn without_a_reboot_nothing_is_reclaimed() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/29"]);
    let all = attach(&node, &config, 5);
    full(&node, &config);
    assert_eq!(node.reservations("net1").len(), 5);
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

#[test]
fn other_verbs_first_put_it_off_and_nothing_more() {
    require!(possible());
    let machine = Machine::new();
    let config = machine.network("10.1.0.0/29");
    let all = attach(&machine.node, &config, 5);
    machine.reboot();
    all[0].1.check(&all[0].2).success();
    all[1].1.status().success();
    all[2].1.del().success();
    assert_eq!(machine.held().len(), 4, "only what was asked for");
    all[3].1.status().success();
    let (container, _) = another(&machine.node, &config);
    assert_eq!(machine.held().len(), 1);
    // The old holders' DELs come late, when the address has a new holder.
    for (_, attachment, result) in &all {
        attachment.del_with(result).success();
    }
    assert_eq!(machine.held()[0].1, format!("{}\r\neth0", container.id));
    Attachment::new(&machine.node, &container, config).del().success();
}

#[test]
fn the_same_container_gets_an_address_again() {
    require!(possible());
    let machine = Machine::new();
    let (_container, attachment, _) = attach(&machine.node, &machine.network("10.1.0.0/29"), 1).remove(0);
    attachment.add().failure();
    machine.reboot();
    assert_eq!(address(&attachment.add().success()), "10.1.0.3", "the next in turn");
    attachment.del().success();
}

#[test]
fn a_late_del_keeps_the_address_of_the_new_holder() {
    require!(possible());
    let machine = Machine::new();
    let config = machine.network("10.1.0.0/30");
    let (_old, old, result) = attach(&machine.node, &config, 1).remove(0);
    machine.reboot();
    let (new, given) = another(&machine.node, &config);
    assert_eq!(given, address(&result), "there is only this one");
    old.del_with(&result).success();
    old.netns("").del_with(&result).success();
    assert_eq!(machine.held(), [(given, format!("{}\r\neth0", new.id))]);
    Attachment::new(&machine.node, &new, config).del().success();
}

#[test]
fn a_late_chained_del_leaves_the_rules_of_the_new_holder() {
    require!(possible());
    require!(probe::nft());
    require!(probe::iptables());
    require!(probe::plugin("portmap"));
    for backend in ["nftables", "iptables"] {
        let machine = Machine::new();
        let node = &machine.node;
        let config = patched(
            bridge(node, &["10.1.0.0/30"]),
            json!({"cniVersion": "1.1.0", "ipMasq": true, "ipMasqBackend": backend}),
        );
        let ports = json!({"cniVersion": "1.1.0", "name": "net1", "type": "portmap", "backend": backend,
            "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}});
        let add = |container: &Container| {
            let result = Attachment::new(node, container, config.clone()).add().success();
            Attachment::new(node, container, ports.clone()).add_after(&result).success()
        };
        let del = |container: &Container, result: &Value| {
            Attachment::new(node, container, ports.clone()).del_with(result).success();
            Attachment::new(node, container, config.clone()).del_with(result).success();
        };
        let old = node.container();
        let before = add(&old);
        machine.reboot();
        node.exec(&["ip", "link", "del", host_end(&before, "br0")]);
        node.exec(&["ip", "link", "del", "br0"]);
        node.exec(&["nft", "flush", "ruleset"]);
        old.unlink();

        let new = node.container();
        let result = add(&new);
        assert_eq!(address(&result), address(&before));
        let rules = node.ruleset();
        assert!(rules.contains("8080") && rules.contains("10.1.0.2"), "{rules}");
        del(&old, &before);
        assert_eq!(node.ruleset(), rules, "{backend}");
        assert_eq!(machine.held().len(), 1);
        Attachment::new(node, &new, config.clone()).check(&result).success();
        Attachment::new(node, &new, ports.clone()).check(&result).success();
        del(&new, &result);
    }
}

/// Asserts that every reservation is kept after a reboot if `change` runs before the next ADD.
#[track_caller]
fn kept(change: impl FnOnce(&Machine, &Path)) {
    let machine = Machine::new();
    let config = machine.network("10.1.0.0/29");
    let all = attach(&machine.node, &config, 5);
    let before = machine.held();
    machine.reboot();
    let folder = machine.node.data_dir().join("net1");
    // What is changed in the tick of the kernel's clock in which it was made looks unchanged on
    // kernels before 6.13.
    let made = fs::read_dir(&folder).unwrap().map(|entry| changed_at(&entry.unwrap().path())).max().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while changed_at(&machine.node.file("now", "")) <= made {
        assert!(Instant::now() < deadline, "the clock stands still");
        std::thread::sleep(Duration::from_millis(1));
    }
    change(&machine, &folder);
    all[0].1.status().fails_with(50, "");
    full(&machine.node, &config);
    let mut valid: Vec<&str> = before.iter().map(|(_, content)| content.split("\r\n").next().unwrap()).collect();
    valid.dedup();
    let valid: Vec<(&str, &str)> = valid.into_iter().map(|id| (id, "eth0")).collect();
    all[0].1.gc(&valid).success();
    assert_eq!(machine.held(), before);
    all[0].1.gc(&[]).success();
    assert_eq!(machine.held(), [], "GC alone still takes what is not valid");
}

/// Asserts that every reservation is kept if `change` runs some seconds after the reboot.
#[track_caller]
fn kept_if_changed_after_the_boot(change: impl FnOnce(&Machine, &Path)) {
    kept(|machine, folder| {
        // Longer than the calls after the change, during which the boot seems to come later.
        std::thread::sleep(Duration::from_secs(5));
        change(machine, folder);
        machine.update_uptime();
    });
}

fn changed_at(path: &Path) -> (i64, i64) {
    let metadata = fs::metadata(path).unwrap();
    (metadata.ctime(), metadata.ctime_nsec())
}

fn each(folder: &Path, mut change: impl FnMut(PathBuf)) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with("10.")) {
            change(entry.path());
        }
    }
}

#[test]
fn a_file_made_again_after_the_reboot_is_kept() {
    require!(possible());
    kept(|_, folder| {
        each(folder, |path| {
            let content = fs::read(&path).unwrap();
            fs::remove_file(&path).unwrap();
            fs::write(&path, content).unwrap();
        });
    });
}

#[test]
fn a_file_written_to_after_the_reboot_is_kept() {
    require!(possible());
    kept_if_changed_after_the_boot(|_, folder| {
        each(folder, |path| fs::write(&path, fs::read(&path).unwrap()).unwrap())
    });
}

#[test]
fn a_file_touched_in_any_way_after_the_reboot_is_kept() {
    use std::os::unix::fs::PermissionsExt;
    require!(possible());
    kept_if_changed_after_the_boot(|_, folder| {
        each(folder, |path| fs::set_permissions(path, fs::Permissions::from_mode(0o640)).unwrap())
    });
}

/// A machine cloned with its ID, file by file: the boot differs and the ID is the same. A disk
/// cloned block by block looks like a reboot, which is correct: none of the recorded containers
/// lives on the clone.
#[test]
fn a_data_dir_copied_with_all_its_times_is_kept() {
    require!(possible());
    kept_if_changed_after_the_boot(|machine, folder| {
        let data = folder.parent().unwrap();
        let copy = data.with_file_name("copy");
        machine.node.exec(&["cp", "-a", data.to_str().unwrap(), copy.to_str().unwrap()]);
        fs::rename(data, data.with_file_name("original")).unwrap();
        fs::rename(copy, data).unwrap();
    });
}

#[test]
fn reservations_on_a_disk_of_another_machine_are_kept() {
    require!(possible());
    kept(|machine, _| machine.identify("ffffffffffffffffffffffffffffffff\n"));
}

#[test]
fn a_machine_without_an_id_reclaims_nothing() {
    require!(possible());
    for id in ["", "\n", "uninitialized\n"] {
        kept(|machine, _| machine.identify(id));
    }
}

#[test]
fn reservations_of_a_machine_without_an_id_are_kept() {
    require!(possible());
    let machine = Machine::new();
    machine.identify("");
    let config = machine.network("10.1.0.0/29");
    let all = attach(&machine.node, &config, 5);
    for id in ["", "0123456789abcdef0123456789abcdef\n"] {
        machine.reboot();
        machine.identify(id);
        full(&machine.node, &config);
    }
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

#[test]
fn another_boot_id_without_a_boot_reclaims_nothing() {
    require!(possible());
    // A container that mounts its own boot ID over the kernel's, on data of its host.
    kept(|machine, _| drop(machine.node.file("uptime", "86400.00 0.00\n")));
    kept(|machine, _| drop(machine.node.file("uptime", "unreadable\n")));
    kept(|machine, _| drop(machine.node.file("boot_id", "")));
}

#[test]
fn without_records_of_this_plugin_all_is_kept() {
    require!(possible());
    kept(|_, folder| fs::remove_dir_all(folder.with_file_name(".cni")).unwrap());
    kept(|_, folder| fs::remove_dir_all(folder.with_file_name(".cni").join("net1/links")).unwrap());
}

#[test]
fn reclaiming_can_be_disabled_for_a_network() {
    require!(possible());
    let machine = Machine::new();
    let config = machine.network("10.1.0.0/29");
    let never = patched(config.clone(), json!({"ipam": {"reclaimAfterReboot": false}}));
    let all = attach(&machine.node, &config, 5);
    machine.reboot();
    full(&machine.node, &never);
    all[0].1.clone().config(never.clone()).status().fails_with(50, "");
    let ids: Vec<(&str, &str)> = all.iter().map(|one| (one.1.id.as_str(), "eth0")).collect();
    all[0].1.clone().config(never).gc(&ids).success();
    assert_eq!(machine.held().len(), 5);
    // Reclaimed later, not lost.
    let (container, _) = another(&machine.node, &config);
    assert_eq!(machine.held().len(), 1);
    Attachment::new(&machine.node, &container, config).del().success();
}

#[test]
fn on_a_shared_or_temporary_file_system_all_is_kept() {
    require!(possible());
    let machine = Machine::new();
    let tmpfs = machine.dir("tmpfs");
    machine.node.exec(&["mount", "-t", "tmpfs", "tmpfs", &tmpfs]);
    for folder in [tmpfs, machine.overlay().0] {
        let config = patched(machine.network("10.1.0.0/29"), json!({"ipam": {"dataDir": folder}}));
        let all = attach(&machine.node, &config, 5);
        machine.reboot();
        full(&machine.node, &config);
        for (_, attachment, _) in all {
            attachment.del().success();
        }
        let left = machine.node.exec(&["ls", &format!("{folder}/net1")]);
        assert_eq!(left, "last_reserved_ip.0\nlock\n", "{folder}");
    }
}

/// Another machine, cloned with its ID, has its data on a disk of this one (here an overlay stands
/// for NFS). Its reservations stay valid when this one is booted, and inode and times are the same
/// on both.
#[test]
fn reservations_of_a_remote_machine_of_the_same_id_are_kept() {
    require!(possible());
    let machine = Machine::new();
    let (afar, here) = machine.overlay();
    let on = |folder: &str| patched(machine.network("10.1.0.0/29"), json!({"ipam": {"dataDir": folder}}));
    let all = attach(&machine.node, &on(&afar), 5);
    let inode = |folder: &str| machine.node.exec(&["stat", "-c", "%i %z", &format!("{folder}/net1/10.1.0.2")]);
    assert_eq!(inode(&afar), inode(&here), "else they are kept for that");
    machine.node.exec(&["umount", &afar]);
    machine.reboot();
    full(&machine.node, &on(&here));
    for (_, attachment, _) in all {
        attachment.config(on(&here)).del().success();
    }
    assert_eq!(machine.node.exec(&["ls", &format!("{here}/net1")]), "last_reserved_ip.0\nlock\n");
}

#[test]
fn reservations_of_go_are_kept() {
    require!(possible());
    require!(probe::go_plugins());
    let machine = Machine::new();
    let config = patched(machine.network("10.1.0.0/29"), json!({"cniVersion": "1.0.0"}));
    let go =
        |container: &Container| Attachment::new(&machine.node, container, config.clone()).by(cni_testkit::go_bin_dir());
    let (before, _, _) = attach(&machine.node, &config, 1).remove(0);
    let by_go = machine.node.container();
    go(&by_go).add().success();
    let (_last, _, _) = attach(&machine.node, &config, 1).remove(0);
    machine.reboot();
    // A node switched back to Go for a while: files that Go has rewritten belong to Go.
    go(&before).del().success();
    let mut again = Vec::new();
    while machine.held().len() < 5 {
        let container = machine.node.container();
        go(&container).add().success();
        again.push(container);
    }
    let (ours, given) = another(&machine.node, &config);
    assert_eq!(given, "10.1.0.4", "the only recorded reservation of the earlier boot");
    assert_eq!(machine.held().len(), 5);
    for container in again.iter().chain([&by_go, &ours]) {
        Attachment::new(&machine.node, container, config.clone()).del().success();
    }
    assert_eq!(machine.held_addresses(), [""; 0]);
}
