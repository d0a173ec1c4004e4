//! Provides a test node, which stands for a host, and the containers on it.

use std::fs::{self, File};
use std::io::{Seek, Write};
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{process, thread};

use nix::net::if_::if_nameindex;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::{leftovers, namespace, program, retry};

/// A host: a network namespace, a mount namespace with private `/run` and `/var/lib`, and a
/// temporary folder.
///
/// When it is dropped, it asserts that no link, reservation or firewall rule is left, unless the
/// test has already failed.
#[derive(Debug)]
pub struct Node {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    dir: TempDir,
    place: Place,
    /// How many containers were created.
    container_count: AtomicUsize,
    /// The containers' namespaces. They are kept to the end of the test: the kernel would remove
    /// the links of a namespace that ends, also those on the host, and hide what a plugin has left.
    kept: Mutex<Vec<Arc<File>>>,
    /// The names of links that may be left.
    pub(crate) expected: Mutex<Vec<String>>,
    /// Whether leftovers are not looked for.
    is_abandoned: AtomicBool,
}

impl Node {
    /// Creates a node, whose `lo` is up.
    #[expect(clippy::new_without_default, reason = "creating a node has side effects")]
    pub fn new() -> Node {
        let (net, mnt) = namespace::node();
        let dir = tempfile::Builder::new().prefix("cni-node-").tempdir().expect("a temporary folder");
        fs::create_dir(dir.path().join("netns")).expect("a folder for paths to namespaces");
        let inner = Inner {
            dir,
            place: Place { net: Arc::new(net), mnt: Arc::new(mnt) },
            container_count: AtomicUsize::new(0),
            kept: Mutex::default(),
            expected: Mutex::default(),
            is_abandoned: AtomicBool::new(false),
        };
        let node = Node { inner: Arc::new(inner) };
        node.exec(&["ip", "link", "set", "lo", "up"]);
        // Some kernels put links of their own into every namespace (`tunl0`, `sit0`).
        let links = node.enter(|| {
            if_nameindex().expect("to list links").iter().map(|link| link.name().to_owned()).collect::<Vec<_>>()
        });
        for link in links {
            node.expect_left(&link.to_string_lossy());
        }
        node
    }

    /// Creates a container on this node.
    pub fn container(&self) -> Container {
        let number = self.inner.container_count.fetch_add(1, Ordering::Relaxed);
        let net = Arc::new(namespace::network());
        self.inner.kept.lock().unwrap().push(Arc::clone(&net));
        let path = self.dir().join(format!("netns/c{number}"));
        symlink(fd_path(&net), &path).expect("a path to the namespace");
        let place = Place { net, mnt: Arc::clone(&self.mnt) };
        Container { inner: Arc::clone(&self.inner), id: format!("container-{number}"), place, path }
    }

    /// Returns a path to the node's own network namespace.
    pub fn netns(&self) -> PathBuf {
        fd_path(&self.net)
    }

    /// Returns the node's temporary folder.
    pub fn dir(&self) -> &Path {
        self.inner.dir.path()
    }

    /// Returns the folder in which host-local keeps its reservations on this node. The first plugin
    /// that needs the folder creates it.
    pub fn data_dir(&self) -> PathBuf {
        self.dir().join("networks")
    }

    /// Returns the reservations of `network`, each as its address and content, sorted.
    pub fn reservations(&self, network: &str) -> Vec<(String, String)> {
        leftovers::reservations(&self.data_dir().join(network))
    }

    /// Writes a file below the node's folder and returns its path.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.dir().join(name);
        fs::create_dir_all(path.parent().expect("a file has a folder")).expect("to make a folder");
        fs::write(&path, content).expect("to write a file");
        path
    }

    /// Writes a script below the node's folder, which can be run at once, and returns its path.
    #[track_caller]
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir().join(name);
        program::script(&path, text);
        path
    }

    /// Accepts that the link `name` is left on the host at the end.
    pub fn expect_left(&self, name: &str) {
        self.inner.expected.lock().unwrap().push(name.to_owned());
    }

    /// Drops the node without looking for leftovers.
    pub fn abandon(self) {
        self.inner.is_abandoned.store(true, Ordering::Relaxed);
    }

    /// Returns the names of the links whose master is `bridge`.
    pub fn ports(&self, bridge: &str) -> Vec<String> {
        let links = self.json(&["ip", "-j", "-d", "link", "show"]);
        let ports = links.as_array().into_iter().flatten().filter(|link| link["master"] == bridge);
        ports.filter_map(|link| link["ifname"].as_str().map(str::to_owned)).collect()
    }

    /// Returns the IDs of the processes on this node, without this one: plugins and what they have
    /// started. Ended processes that were not waited for do not count.
    pub fn processes(&self) -> Vec<u32> {
        self.inner.processes()
    }

    /// Returns all rules of nf_tables as `nft` prints them, those of `iptables-nft` too. Without
    /// counters, which change at any time: the kernel sends packets by itself, such as the IGMP
    /// report of a new bridge.
    #[track_caller]
    pub fn ruleset(&self) -> String {
        self.exec(&["nft", "--stateless", "list", "ruleset"])
    }

    /// Returns the content of a file of the node below `/proc/net`, or nothing if it does not
    /// exist.
    pub fn proc_net(&self, name: &str) -> String {
        // `thread-self`, because `/proc/net` would be that of the main thread.
        self.enter(|| fs::read_to_string(Path::new("/proc/thread-self/net").join(name)).unwrap_or_default())
    }
}

/// The namespaces in which a test runs programs: those of a [`Node`], or the network namespace of a
/// [`Container`] with the mount namespace of its node. Both dereference to their namespaces.
#[derive(Debug)]
pub struct Place {
    net: Arc<File>,
    mnt: Arc<File>,
}

impl Deref for Node {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.inner.place
    }
}

impl Deref for Container {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

impl Place {
    /// Runs `f` on a new thread in these namespaces.
    pub fn enter<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        namespace::within(&self.net, &self.mnt, f)
    }

    /// Runs a program. It may fail.
    pub fn run(&self, argv: &[&str]) -> Ran {
        self.enter(|| run_program(argv, Stdio::null()))
    }

    /// Runs a program, asserts success and returns what it printed.
    #[track_caller]
    pub fn exec(&self, argv: &[&str]) -> String {
        self.run(argv).success()
    }

    /// Asserts that an address can be reached. Repeats `ping`: under load a new
    /// address may answer only after some seconds, and `ping` ends at the first error.
    #[track_caller]
    pub fn ping(&self, address: &str) {
        retry(|| {
            let ran = self.run(&["ping", "-nqc1", "-W2", address]);
            if ran.ok { Ok(()) } else { Err(format!("no answer from {address}: {}{}", ran.stderr, ran.stdout)) }
        });
    }

    /// Runs a program that prints JSON, such as `ip -j`, asserts success and returns the JSON, or
    /// `null` if it printed nothing.
    #[track_caller]
    pub fn json(&self, argv: &[&str]) -> Value {
        let text = self.exec(argv);
        if text.trim().is_empty() {
            return Value::Null;
        }
        serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("`{}` did not print JSON: {error}: {text}", argv.join(" ")))
    }

    /// Returns a link as `ip -j -d` shows it, or `None` if it does not exist.
    pub fn link(&self, name: &str) -> Option<Value> {
        let Value::Array(links) = self.json(&["ip", "-j", "-d", "link", "show"]) else { return None };
        links.into_iter().find(|link| link["ifname"] == name)
    }

    /// Runs several `ip` commands, a line each without the word `ip`, and asserts success. It is
    /// one process for all of them, which saves much time where programs start slowly.
    #[track_caller]
    pub fn ip(&self, lines: &[&str]) {
        let mut batch = tempfile::tempfile().expect("a temporary file");
        batch.write_all((lines.join("\n") + "\n").as_bytes()).expect("to write a temporary file");
        batch.rewind().expect("to rewind a temporary file");
        let mut ran = self.enter(|| run_program(&["ip", "-batch", "-"], Stdio::from(batch)));
        ran.stderr.insert_str(0, &format!("of {lines:?}: "));
        ran.success();
    }

    /// Returns a sysctl, by its path below `/proc/sys`, without the newline. It does not run `cat`:
    /// starting programs would take most of the time of many tests.
    #[track_caller]
    pub fn sysctl(&self, path: &str) -> String {
        let path = format!("/proc/sys/{path}");
        let text = self.enter(|| fs::read_to_string(&path)).unwrap_or_else(|error| panic!("to read {path}: {error}"));
        text.trim_end().to_owned()
    }

    /// Sets a sysctl, by its path below `/proc/sys`.
    #[track_caller]
    pub fn set_sysctl(&self, path: &str, value: &str) {
        let path = format!("/proc/sys/{path}");
        self.enter(|| fs::write(&path, value)).unwrap_or_else(|error| panic!("to write {value} to {path}: {error}"));
    }
}

impl Inner {
    /// Returns the IDs of the processes in the node's mount namespace.
    fn processes(&self) -> Vec<u32> {
        let mnt = fs::read_link(fd_path(&self.place.mnt)).expect("an open namespace has a name");
        let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = numbers.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
        numbers.filter(|pid| fs::read_link(format!("/proc/{pid}/ns/mnt")).is_ok_and(|link| link == mnt)).collect()
    }
}

/// Kills the processes that still run on the node. A test that fails does not wait for them, and
/// one that creates a file while the temporary folder is removed would make that fail.
impl Drop for Inner {
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let left = self.processes();
            if left.is_empty() || Instant::now() > deadline {
                return;
            }
            for pid in left {
                let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if thread::panicking() || self.inner.is_abandoned.load(Ordering::Relaxed) {
            return;
        }
        let left = leftovers::of(self);
        assert!(left.is_empty(), "left behind on the node:\n{}", left.join("\n"));
    }
}

/// A container: a network namespace with a path. It exists as long as its node, or until
/// [`destroy`](Self::destroy).
#[derive(Debug)]
pub struct Container {
    inner: Arc<Inner>,
    /// Its container ID, which is unique on the node.
    pub id: String,
    place: Place,
    path: PathBuf,
}

impl Container {
    /// Returns the path of the namespace, for `CNI_NETNS`.
    pub fn netns(&self) -> &Path {
        &self.path
    }

    /// Returns the addresses of an interface as `address/prefix`, without link-local ones.
    pub fn addresses(&self, interface: &str) -> Vec<String> {
        let links = self.json(&["ip", "-j", "addr", "show", "dev", interface]);
        let infos = links.as_array().into_iter().flatten().filter_map(|link| link["addr_info"].as_array()).flatten();
        let global = infos.filter(|info| info["scope"] != "link" && info["local"].is_string());
        global.map(|info| format!("{}/{}", info["local"].as_str().unwrap(), info["prefixlen"])).collect()
    }

    /// Replaces the path by a plain file, as after a runtime has unmounted it. The namespace still
    /// exists.
    pub fn unmount(&self) {
        fs::remove_file(&self.path).expect("to remove the path");
        fs::write(&self.path, "").expect("to write a plain file");
    }

    /// Removes the path. The namespace and its links still exist, but no plugin can reach them.
    pub fn unlink(&self) {
        fs::remove_file(&self.path).expect("to remove the path");
    }

    /// Removes the path and the namespace. The kernel removes the namespace's links a moment later.
    pub fn destroy(self) {
        let _ = fs::remove_file(&self.path);
        self.inner.kept.lock().unwrap().retain(|kept| !Arc::ptr_eq(kept, &self.net));
    }
}

/// The outcome of a program.
#[derive(Debug)]
pub struct Ran {
    argv: Vec<String>,
    /// Whether it exited with 0.
    pub ok: bool,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Ran {
    /// Asserts success and returns the standard output.
    #[track_caller]
    pub fn success(self) -> String {
        assert!(self.ok, "`{}` failed: {}{}", self.argv.join(" "), self.stderr, self.stdout);
        self.stdout
    }
}

/// Runs a program in the calling thread's namespaces, with this stdin.
fn run_program(argv: &[&str], stdin: Stdio) -> Ran {
    let mut command = Command::new(argv[0]);
    command.args(&argv[1..]).stdin(stdin);
    let output = command.output().unwrap_or_else(|error| panic!("to run `{}`: {error}", argv[0]));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ran {
        argv: argv.iter().map(|&arg| arg.to_owned()).collect(),
        ok: output.status.success(),
        stdout: text(&output.stdout),
        stderr: text(&output.stderr),
    }
}

/// Returns a path to an open file, which is valid as long as this process has the file open.
fn fd_path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_on_a_node_ends_before_its_folder_is_removed() {
        let node = Node::new();
        let folder = node.dir().to_owned();
        let run = "i=0; while i=$((i+1)); do mkdir -p networks/net1; : >networks/net1/$i; done";
        let mut child = node.enter(|| Command::new("sh").args(["-c", run]).current_dir(node.dir()).spawn().unwrap());
        let deadline = Instant::now() + crate::patience(Duration::from_secs(10));
        while !folder.join("networks/net1/9").exists() {
            assert!(Instant::now() < deadline, "it makes no files");
            thread::sleep(Duration::from_millis(1));
        }
        node.abandon();
        let status = child.try_wait().unwrap();
        let _ = child.kill();
        assert!(status.is_some(), "it still runs");
        assert!(!folder.exists(), "its folder is still there");
    }
}
