//! dhcp: the daemon's flags, its end by a signal, systemd's socket; and every version of the
//! specification.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::{fs, thread};

use cni_testkit::{Attachment, bin_dir, probe, require, wait_until};
use conformance::{VERSION, VERSIONS};
use serde_json::{Value, json};

use super::{Lan, Process, configure};

/// Ends a daemon as systemd does.
fn terminate(lan: &Lan, mut daemon: Process) {
    lan.node.exec(&["kill", "-TERM", &daemon.0.id().to_string()]);
    assert!(daemon.0.wait().unwrap().success());
}

#[test]
fn sigterm_keeps_the_leases_unless_a_flag_releases_them() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let result = attachment.add().success();
    configure(&container, "eth0", &result);
    terminate(&lan, daemon);
    assert!(!lan.socket().exists());
    assert!(lan.log().contains(" DHCPACK(lan) 192.168.1.5 ") && !lan.log().contains("DHCPRELEASE"));
    let daemon = lan.daemon_of(&bin_dir(), &["--release-on-exit"]);
    attachment.check(&result).success();
    terminate(&lan, daemon);
    wait_until("the server has the address back", || lan.leased().is_empty());
    assert_eq!(fs::read_dir(lan.node.dir().join("dhcp")).unwrap().count(), 0, "no record");
    attachment.del().success();
}

#[test]
fn the_socket_of_systemd_is_used_and_stays() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let socket = lan.socket();
    let listener = UnixListener::bind(&socket).unwrap();
    let start = |count: u8| {
        let script = format!("exec 3<&0; LISTEN_PID=$$ LISTEN_FDS={count} exec \"$0\" daemon -socketpath \"$1\"");
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).arg(bin_dir().join("dhcp")).arg(&socket);
        command.stdin(Stdio::from(OwnedFd::from(listener.try_clone().unwrap())));
        let log = fs::File::create(lan.node.dir().join("daemon.log")).unwrap();
        command.stdout(Stdio::null()).stderr(log);
        Process(lan.node.enter(|| command.spawn()).unwrap())
    };
    let daemon = start(1);
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    configure(&container, "eth0", &attachment.add().success());
    terminate(&lan, daemon);
    // systemd goes on listening: the next connection starts the daemon again.
    UnixStream::connect(&socket).unwrap();
    let daemon = start(1);
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
    terminate(&lan, daemon);
    let mut refused = start(2);
    assert!(!refused.0.wait().unwrap().success());
    let log = fs::read_to_string(lan.node.dir().join("daemon.log")).unwrap();
    assert!(log.contains("Too many sockets passed in through socket activation: 2"), "{log}");
}

#[test]
fn a_prefix_precedes_the_socket_and_the_namespaces() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let container = lan.container(&["eth0"]);
    // The namespace is there below the prefix alone.
    let prefix = lan.node.dir().join("host");
    let netns = container.netns().display().to_string();
    let folder = Path::new("/elsewhere");
    fs::create_dir_all(prefix.join("run")).unwrap();
    std::os::unix::fs::symlink(container.netns().parent().unwrap(), prefix.join("elsewhere")).unwrap();
    let pidfile = lan.node.dir().join("pid-of-the-daemon");
    let program = bin_dir().join("dhcp").display().to_string();
    let (prefix_text, pidfile_text) = (prefix.display().to_string(), pidfile.display().to_string());
    let argv =
        [&program, "daemon", "--hostprefix", &prefix_text, "--socketpath=/run/d.sock", "-pidfile", &pidfile_text];
    let daemon = Process::start(&lan.node, "daemon.log", &argv);
    let socket = prefix.join("run/d.sock");
    wait_until("the daemon listens", || UnixStream::connect(&socket).is_ok());
    wait_until("the pidfile is written", || pidfile.exists());
    wait_until("its number is in it", || fs::read_to_string(&pidfile).unwrap() == daemon.0.id().to_string());
    let ipam = json!({"type": "dhcp", "daemonSocketPath": socket});
    let config = json!({"cniVersion": VERSION, "name": "net1", "type": "dhcp", "ipam": ipam});
    let inside = folder.join(Path::new(&netns).file_name().unwrap()).display().to_string();
    let attachment = Attachment::new(&lan.node, &container, config).netns(inside);
    configure(&container, "eth0", &attachment.add().success());
    assert!(prefix.join("run/d").is_dir(), "the records are below the prefix");
    attachment.del().success();
    wait_until("the server has the address back", || lan.leased().is_empty());
    terminate(&lan, daemon);
    assert!(!pidfile.exists() && !socket.exists());
}

#[test]
fn every_version_is_spoken() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &["--dhcp-option=3,192.168.1.1"]);
    let _daemon = lan.daemon();
    thread::scope(|scope| {
        for version in VERSIONS {
            let lan = &lan;
            let container = lan.container(&["eth0"]);
            scope.spawn(move || {
                let attachment = lan.attachment(&container);
                let mut config = attachment.config.clone();
                config["cniVersion"] = json!(version);
                let attachment = attachment.config(config);
                let result: Value = attachment.add().success();
                let old = ["0.1.0", "0.2.0"].contains(&version);
                let (address, gateway) = match old {
                    true => (&result["ip4"]["ip"], &result["ip4"]["gateway"]),
                    false => (&result["ips"][0]["address"], &result["ips"][0]["gateway"]),
                };
                assert!(address.as_str().unwrap().ends_with("/24") && gateway == "192.168.1.1", "{result}");
                configure(&container, "eth0", &json!({"ips": [{"address": address}]}));
                attachment.del().success();
            });
        }
    });
    wait_until("the server has all addresses back", || lan.leased().is_empty());
}
