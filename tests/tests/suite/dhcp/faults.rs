//! dhcp: another namespace or interface for the same attachment, a daemon that does not answer, a
//! socket for root alone.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread;

use cni_testkit::{Container, bin_dir, go_bin_dir, probe, require, wait_until};
use conformance::lan::{Lan, Process, configure};
use conformance::patched;
use serde_json::json;

#[test]
fn an_add_in_a_new_namespace_takes_a_new_lease() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let _daemon = lan.daemon();
    let [old, new] = [lan.container(&["eth0"]), lan.container(&["eth0"])];
    let attachment = lan.attachment(&old);
    configure(&old, "eth0", &attachment.add().success());
    let before = lan.searched();
    // The same container, network and interface: the runtime has restarted the container.
    let attachment = attachment.netns(new.netns());
    let result = attachment.add().success();
    assert!(lan.searched() > before, "a new search");
    assert_eq!(result["ips"][0]["address"], "192.168.1.5/24", "the same client has the same address");
    assert_eq!(old.addresses("eth0"), [""; 0], "the old interface has lost it");
    configure(&new, "eth0", &result);
    let found = lan.searched();
    attachment.check(&result).success();
    assert_eq!((lan.searched(), lan.records()), (found, 1));
    old.destroy();
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
    assert_eq!(new.addresses("eth0"), [""; 0]);
}

#[test]
fn an_interface_that_was_replaced_takes_a_new_lease() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    configure(&container, "eth0", &attachment.add().success());
    let before = lan.searched();
    // The daemon does not see the interface go.
    daemon.kill();
    container.ip(&["link delete eth0"]);
    lan.plug(&container, "eth0", "lan");
    let _daemon = lan.daemon();
    let result = attachment.add().success();
    assert!(lan.searched() > before, "a new search");
    configure(&container, "eth0", &result);
    attachment.check(&result).success();
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
}

#[test]
fn a_mac_that_is_changed_later_keeps_the_lease() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let result = attachment.add().success();
    configure(&container, "eth0", &result);
    let before = lan.searched();
    // As tuning does it after the ADD.
    container.ip(&["link set eth0 address 02:00:00:00:00:aa"]);
    attachment.check(&result).success();
    assert_eq!(lan.searched(), before, "no new search");
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
}

/// A stopped daemon: the kernel still accepts connections for it.
#[track_caller]
fn a_stopped_daemon_is_noticed(folder: PathBuf) -> (Lan, Process) {
    let lan = Lan::new(10, &[]);
    let daemon = lan.daemon_of(&folder, &[]);
    let [first, second] = [lan.container(&["eth0"]), lan.container(&["eth0"])];
    let newest = |container: &Container| {
        let attachment = lan.attachment(container);
        let config = patched(attachment.config.clone(), json!({"cniVersion": "1.1.0"}));
        attachment.config(config)
    };
    let (leased, other) = (newest(&first), newest(&second));
    leased.status().success();
    configure(&first, "eth0", &leased.add().success());
    lan.node.exec(&["kill", "-STOP", &daemon.0.id().to_string()]);
    let silent = "the other end of the stream did not answer in time";
    thread::scope(|scope| {
        scope.spawn(|| leased.status().fails_naming(50, &["DHCP daemon", silent]));
        scope.spawn(|| other.add().fails_naming(11, &["DHCP daemon", silent]));
        scope.spawn(|| other.del().success());
        // Go's daemon records nothing.
        match folder == bin_dir() {
            true => drop(leased.del().fails_naming(11, &["the attachment has a lease", silent])),
            false => drop(leased.del().success()),
        }
    });
    (lan, daemon)
}

#[test]
fn a_daemon_that_does_not_answer_is_noticed() {
    require!(probe::dnsmasq().map(drop));
    let (lan, daemon) = a_stopped_daemon_is_noticed(bin_dir());
    lan.node.exec(&["kill", "-CONT", &daemon.0.id().to_string()]);
}

#[test]
fn a_go_daemon_that_does_not_answer_is_noticed() {
    require!(probe::dnsmasq().map(drop));
    require!(probe::go_plugins());
    drop(a_stopped_daemon_is_noticed(go_bin_dir()));
}

#[test]
fn del_does_not_wait_for_a_daemon_that_only_greets() {
    let lan = Lan::silent();
    let listener = UnixListener::bind(lan.socket()).unwrap();
    let container = lan.container(&["eth0"]);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"HTTP/1.0 200 Connected to Go RPC\n\n").unwrap();
            // Until the plugin gives up.
            let mut received = Vec::new();
            stream.read_to_end(&mut received).unwrap();
            assert!(received.ends_with(b"\0"), "the call has been received");
        });
        lan.attachment(&container).del().success();
    });
}

#[test]
fn the_socket_is_for_root_alone_whatever_the_umask() {
    let lan = Lan::silent();
    let (program, socket) = (bin_dir().join("dhcp").display().to_string(), lan.socket().display().to_string());
    let script = "umask 0; exec \"$0\" daemon -socketpath \"$1\"";
    let _daemon = Process::start(&lan.node, "daemon.log", &["sh", "-c", script, &program, &socket]);
    wait_until("the daemon listens", || lan.socket().exists());
    assert_eq!(fs::metadata(lan.socket()).unwrap().permissions().mode() & 0o777, 0o600);
    let attachment = lan.attachment(&lan.container(&["eth0"]));
    let config = patched(attachment.config.clone(), json!({"cniVersion": "1.1.0"}));
    attachment.config(config).status().success();
}
