//! Tests a file far longer than any reservation: its address is never handed out, it is never read
//! whole, and it is released.

use std::fs;
use std::path::PathBuf;

use cni_testkit::{Attachment, Node, bin_dir, probe, require};
use conformance::{address, attach, host_local, patched};
use serde_json::{Value, json};

fn config(node: &Node) -> Value {
    patched(host_local(node, &["10.1.0.0/29"]), json!({"cniVersion": "1.1.0"}))
}

/// Makes a sparse file of 10 GB with this beginning.
fn oversized(node: &Node, host: u8, beginning: &str) -> PathBuf {
    let path = node.file(&format!("networks/net1/10.1.0.{host}"), beginning);
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10 << 30).unwrap();
    path
}

#[test]
fn an_oversized_file_holds_its_address_until_its_owners_del() {
    let node = Node::new();
    let container = node.container();
    let path = oversized(&node, 2, &format!("{}\r\neth0", container.id));
    let owner = Attachment::new(&node, &container, config(&node));
    owner.add().fails_with(102, "failed to allocate for range 0: 10.1.0.2 has been allocated to");
    let all = attach(&node, &config(&node), 4);
    assert!(all.iter().all(|(.., result)| address(result) != "10.1.0.2"));
    let late = node.container();
    Attachment::new(&node, &late, config(&node)).add().fails_with(11, "");
    let other = owner.clone().ifname("eth1");
    other.del().success();
    assert!(path.exists(), "another interface's");
    owner.del().success();
    assert!(!path.exists());
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

#[test]
fn gc_releases_oversized_files_of_invalid_attachments() {
    let node = Node::new();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, config(&node));
    let valid = oversized(&node, 2, &format!("{}\r\neth0\r\n", container.id));
    let old = oversized(&node, 3, &format!("{}\n", container.id));
    let dead = oversized(&node, 4, "gone\r\neth0");
    let garbage = node.file("networks/net1/10.1.0.5", "x".repeat(70_000));
    attachment.gc(&[(&container.id, "eth0")]).success();
    assert_eq!([valid, old, dead, garbage].map(|path| path.exists()), [true, true, false, false]);
    attachment.gc(&[]).success();
    assert_eq!(fs::read_dir(node.data_dir().join("net1")).unwrap().count(), 1, "the lock alone");
}

/// A blank beginning and a directory name no owner: they stay and are reported. STATUS reads no
/// file, so it reports only the directory.
#[test]
fn a_file_without_an_owner_stays_and_is_reported() {
    require!(probe::plugin("cnitool"));
    let node = Node::new();
    let container = node.container();
    let config = config(&node);
    let blank = oversized(&node, 2, "");
    let folder = node.data_dir().join("net1/10.1.0.3");
    fs::create_dir(&folder).unwrap();
    oversized(&node, 4, "gone\r\neth0");
    let attachment = Attachment::new(&node, &container, config.clone());
    let result = attachment.add().success();
    assert_eq!(address(&result), "10.1.0.5");
    let status = attachment.status();
    status.success();
    assert!(status.stderr.contains("10.1.0.3 in ") && status.stderr.contains("not a reservation"));

    let list = json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [patched(config, json!({"name": null}))]});
    node.file("net.d/10-net1.conflist", list.to_string());
    let (cnitool, conf) = (bin_dir().join("cnitool"), node.dir().join("net.d"));
    let [cnitool, conf] = [&cnitool, &conf].map(|path| path.to_str().unwrap());
    let said = |arguments: &[&str]| {
        let ran = node.run(&[&[cnitool][..], arguments, &["--conf-dir", conf]].concat());
        format!("{}{}", ran.stdout, ran.stderr)
    };
    let shown = said(&["ipam", "show", "net1"]);
    for words in [
        "10.1.0.2: its file has 10737418240 bytes, more than any reservation",
        "10.1.0.3: it is a directory, not a reservation",
        "10.1.0.4: its file has 10737418240 bytes",
        "gone",
    ] {
        assert!(shown.contains(words), "ipam show should say `{words}`:\n{shown}");
    }
    let shown: Value = serde_json::from_str(&said(&["ipam", "show", "net1", "--json"])).unwrap();
    assert_eq!(shown["unusual"].as_array().unwrap().len(), 3, "{shown}");
    let found = said(&["doctor"]);
    assert!(found.contains("net1/10.1.0.2: its file has") && found.contains("10.1.0.3: it is a dir"), "{found}");

    let gc = attachment.gc(&[]);
    gc.success();
    assert!(gc.stderr.contains("10.1.0.2, 10.1.0.3 in ") && gc.stderr.contains("not a reservation"), "{}", gc.stderr);
    assert!(blank.exists() && folder.exists());
    fs::remove_file(blank).unwrap();
    fs::remove_dir(folder).unwrap();
}
