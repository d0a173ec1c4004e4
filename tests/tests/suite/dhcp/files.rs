//! dhcp: the daemon's files: what it replaces, and what it keeps because it belongs to another
//! program.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use cni_testkit::{bin_dir, probe, require, wait_until};
use conformance::lan::{Lan, Process};

/// The content of the files of another program.
const FOREIGN: &str = "a program";

/// Creates one file of each kind, and returns their paths with the names of the kinds.
fn kinds(lan: &Lan) -> Vec<(PathBuf, &'static str)> {
    let path = |name: &str| lan.node.dir().join(name);
    let text = |name: &str| path(name).display().to_string();
    fs::write(path("file"), FOREIGN).unwrap();
    fs::create_dir(path("folder")).unwrap();
    symlink(path("file"), path("link")).unwrap();
    symlink(path("nothing"), path("dangling")).unwrap();
    drop(UnixListener::bind(path("dead")).unwrap());
    symlink(path("dead"), path("link-to-socket")).unwrap();
    lan.node.exec(&["mkfifo", &text("fifo")]);
    let mut kinds = vec![
        (path("file"), "a regular file"),
        (path("folder"), "a directory"),
        (path("link"), "a symbolic link"),
        (path("dangling"), "a symbolic link"),
        (path("link-to-socket"), "a symbolic link"),
        (path("fifo"), "a FIFO"),
    ];
    if lan.node.run(&["mknod", &text("device"), "c", "1", "3"]).ok {
        kinds.push((path("device"), "a device"));
    }
    kinds
}

/// Starts the daemon, which must end with an error. Returns the error.
#[track_caller]
fn refused(lan: &Lan, flags: &[&str]) -> String {
    let program = bin_dir().join("dhcp").display().to_string();
    let ran = lan.node.run(&[&["timeout", "10", &program, "daemon"], flags].concat());
    assert!(!ran.ok && !ran.stderr.is_empty(), "{flags:?}: {ran:?}");
    ran.stderr
}

/// The kind, mode, size and inode number of a file, and the target of a link.
fn state(lan: &Lan, path: &Path) -> String {
    lan.node.exec(&["stat", "-c", "%F %a %s %i %N", &path.display().to_string()])
}

#[test]
fn a_socket_path_that_is_not_a_socket_is_refused_and_kept() {
    let lan = Lan::silent();
    for (path, kind) in kinds(&lan) {
        let before = state(&lan, &path);
        let error = refused(&lan, &["-socketpath", &path.display().to_string()]);
        assert!(error.contains(&format!("{}: it exists and is {kind}", path.display())), "{error}");
        assert_eq!(state(&lan, &path), before);
    }
    assert_eq!(fs::read_to_string(lan.node.dir().join("file")).unwrap(), FOREIGN);
    // A socket that no process listens on is replaced.
    let dead = lan.node.dir().join("dead").display().to_string();
    let program = bin_dir().join("dhcp").display().to_string();
    let _daemon = Process::start(&lan.node, "daemon.log", &[&program, "daemon", "-socketpath", &dead]);
    wait_until("the daemon listens", || std::os::unix::net::UnixStream::connect(&dead).is_ok());
}

#[test]
fn a_socket_of_another_program_is_refused_and_kept() {
    let lan = Lan::silent();
    let path = lan.node.dir().join("theirs");
    let _listener = UnixListener::bind(&path).unwrap();
    let before = state(&lan, &path);
    let error = refused(&lan, &["-socketpath", &path.display().to_string()]);
    assert!(error.contains(&path.display().to_string()) && error.contains("already listens on it"), "{error}");
    // A datagram socket has no connections.
    let datagrams = lan.node.dir().join("datagrams");
    let _socket = std::os::unix::net::UnixDatagram::bind(&datagrams).unwrap();
    let error = refused(&lan, &["-socketpath", &datagrams.display().to_string()]);
    assert!(error.contains("it exists, and connecting to it failed"), "{error}");
    assert_eq!(state(&lan, &path), before);
    assert!(datagrams.exists());
}

#[test]
fn a_pid_file_of_another_program_is_refused_and_kept() {
    let lan = Lan::silent();
    let socket = lan.socket().display().to_string();
    for (path, kind) in kinds(&lan) {
        let before = state(&lan, &path);
        let error = refused(&lan, &["-socketpath", &socket, "-pidfile", &path.display().to_string()]);
        let why = if kind == "a regular file" { "it exists and contains more than a process ID" } else { kind };
        assert!(error.contains(&format!("failed to write {}: it exists", path.display())), "{error}");
        assert!(error.contains(why), "{error}");
        assert_eq!(state(&lan, &path), before);
        assert!(!lan.socket().exists(), "a daemon that does not start leaves no socket");
    }
    // The file of an earlier daemon is replaced.
    let path = lan.node.file("pid", "4711\n");
    let daemon = lan.daemon_of(&bin_dir(), &["-pidfile", &path.display().to_string()]);
    wait_until("the process ID is written", || {
        fs::read_to_string(&path).is_ok_and(|text| text == daemon.0.id().to_string())
    });
}

#[test]
fn at_its_end_the_daemon_removes_only_its_own_files() {
    let lan = Lan::silent();
    let pid_file = lan.node.dir().join("pid");
    let mut daemon = lan.daemon_of(&bin_dir(), &["-pidfile", &pid_file.display().to_string()]);
    wait_until("the PID file is there", || pid_file.exists());
    for path in [lan.socket(), pid_file.clone()] {
        fs::rename(&path, path.with_extension("moved")).unwrap();
        fs::write(path, FOREIGN).unwrap();
    }
    lan.node.exec(&["kill", "-TERM", &daemon.0.id().to_string()]);
    assert!(daemon.0.wait().unwrap().success());
    for path in [lan.socket(), pid_file] {
        assert_eq!(fs::read_to_string(path).unwrap(), FOREIGN);
    }
}

#[test]
fn records_are_for_root_alone_and_written_through_no_link() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let (program, socket) = (bin_dir().join("dhcp").display().to_string(), lan.socket().display().to_string());
    let script = "umask 0; exec \"$0\" daemon -socketpath \"$1\"";
    let _daemon = Process::start(&lan.node, "daemon.log", &["sh", "-c", script, &program, &socket]);
    wait_until("the daemon listens", || lan.socket().exists());
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    attachment.add().success();
    let record = fs::read_dir(lan.node.dir().join("dhcp")).unwrap().next().unwrap().unwrap().path();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&record), 0o600);
    attachment.del().success();
    let foreign = lan.node.file("foreign", FOREIGN);
    symlink(&foreign, record.with_extension("tmp")).unwrap();
    attachment.add().success();
    assert_eq!(fs::read_to_string(&foreign).unwrap(), FOREIGN);
    assert_eq!((mode(&record), lan.records()), (0o600, 1));
    attachment.del().success();
}

#[test]
fn a_record_that_a_killed_daemon_left_partly_is_removed() {
    require!(probe::plugin("dhcp"));
    let lan = Lan::silent();
    lan.node.file("dhcp/0123.part", "{}");
    let _daemon = lan.daemon();
    // The daemon accepts connections once it has read the folder.
    lan.attachment(&lan.container(&["eth0"])).del().success();
    assert_eq!(lan.records(), 0);
}
