//! cni-install changes the folder of plugins while a runtime keeps using it.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cni_testkit::{Attachment, Node, bin_dir, go_bin_dir, probe, program, require};
use conformance::{PLUGINS, bridge};

/// Installs or rolls back; the program must report success.
#[track_caller]
fn cni_install(args: &[&str], dest: &Path) {
    let ran = Command::new(bin_dir().join("cni-install")).args(args).arg("--dest").arg(dest).output().unwrap();
    assert!(ran.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ran.stderr));
}

/// A folder with the plugins under test and their sums.
fn set(folder: &Path) {
    fs::create_dir(folder).unwrap();
    for plugin in PLUGINS {
        program::copy(bin_dir().join(plugin), folder.join(plugin));
    }
    let sums = Command::new("sha256sum").args(PLUGINS).current_dir(folder).output().unwrap();
    assert!(sums.status.success());
    fs::write(folder.join("SHA256SUMS"), sums.stdout).unwrap();
}

#[test]
fn pods_come_and_go_while_a_folder_is_switched_and_restored() {
    require!(probe::plugin("cni-install"));
    require!(probe::go_plugins());
    let temporary = tempfile::tempdir().unwrap();
    let (from, dest) = (temporary.path().join("set"), temporary.path().join("bin"));
    set(&from);
    fs::create_dir(&dest).unwrap();
    for plugin in PLUGINS {
        program::copy(go_bin_dir().join(plugin), dest.join(plugin));
    }
    fs::write(dest.join("flannel"), "foreign").unwrap();
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, bridge(&node, &["10.1.0.0/24"])).by(&dest);
    let over = AtomicBool::new(false);
    let (lives, looks) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        // Whatever ends a thread, the others end too.
        scope.spawn(|| {
            let _end = End(&over);
            while !over.load(Ordering::Relaxed) {
                let result = attachment.add().success();
                attachment.del_with(&result).success();
                lives.fetch_add(1, Ordering::Relaxed);
            }
        });
        // As kubelet and the runtimes check: does the program exist, and does it answer?
        scope.spawn(|| {
            let _end = End(&over);
            while !over.load(Ordering::Relaxed) {
                for plugin in PLUGINS {
                    let mut program = Command::new(dest.join(plugin));
                    let ran = program.env_clear().env("CNI_COMMAND", "VERSION").stdin(Stdio::null()).output();
                    let ran = ran.unwrap_or_else(|error| panic!("{plugin} is missing or torn: {error}"));
                    assert!(String::from_utf8_lossy(&ran.stdout).contains("supportedVersions"), "{plugin}: {ran:?}");
                }
                looks.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _end = End(&over);
        // At least this many switches, and until the other threads have made some calls.
        let mut switches = 0;
        while !over.load(Ordering::Relaxed)
            && (switches < 10 || lives.load(Ordering::Relaxed) < 10 || looks.load(Ordering::Relaxed) < 10)
        {
            cni_install(&["install", "--from", from.to_str().unwrap()], &dest);
            cni_install(&["rollback"], &dest);
            switches += 2;
        }
        assert!(switches >= 10, "another thread ended before");
    });
    for plugin in PLUGINS {
        assert_eq!(
            fs::read(dest.join(plugin)).unwrap(),
            fs::read(go_bin_dir().join(plugin)).unwrap(),
            "{plugin} is Go's again"
        );
    }
    assert_eq!(fs::read_to_string(dest.join("flannel")).unwrap(), "foreign");
    assert_eq!(fs::read_dir(&dest).unwrap().count(), PLUGINS.len() + 1, "nothing of the installer is left");
    assert_eq!(node.reservations("net1"), []);
}

/// Sets the flag when it is dropped, also after a panic.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
