//! A node: the host's side of a test, and the containers on it.

use std::fs::{self, File};
use std::io::{Seek, Write};
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

use crate::{leftovers, namespace, program};

/// A host: a network namespace, a mount namespace with private `/run` and `/var/lib`, and a
/// temporary folder.
///
/// Its drop asserts that no link, reservation or firewall rule is left, unless the test is failing
/// already.
#[derive(Debug)]
pub struct Node {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    dir: TempDir,
    net: File,
    mnt: File,
    made: AtomicUsize,
    /// Containers' namespaces, kept to the end: a namespace that ends takes its links with it, host
    /// ends included, and would hide what a plugin left behind.
    kept: Mutex<Vec<Arc<File>>>,
    pub(crate) expected: Mutex<Vec<String>>,
    abandoned: AtomicBool,
}

impl Node {
    /// A fresh node with `lo` up.
    #[expect(clippy::new_without_default, reason = "a node is made on purpose, never by default")]
    pub fn new() -> Node {
        let (net, mnt) = namespace::node();
        let dir = tempfile::Builder::new().prefix("cni-node-").tempdir().expect("a temporary folder");
        fs::create_dir(dir.path().join("netns")).expect("a folder for paths to namespaces");
        let inner = Inner {
            dir,
            net,
            mnt,
            made: AtomicUsize::new(0),
            kept: Mutex::default(),
            expected: Mutex::default(),
            abandoned: AtomicBool::new(false),
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

    /// A new container on this node.
    pub fn container(&self) -> Container {
        let number = self.inner.made.fetch_add(1, Ordering::Relaxed);
        let net = Arc::new(namespace::network());
        self.inner.kept.lock().unwrap().push(Arc::clone(&net));
        let path = self.dir().join(format!("netns/c{number}"));
        symlink(fd_path(&net), &path).expect("a path to the namespace");
        Container { inner: Arc::clone(&self.inner), id: format!("container-{number}"), net, path }
    }

    /// A path to the node's own network namespace.
    pub fn netns(&self) -> PathBuf {
        fd_path(&self.inner.net)
    }

    /// The node's temporary folder.
    pub fn dir(&self) -> &Path {
        self.inner.dir.path()
    }

    /// Where host-local keeps its reservations on this node. The first plugin that needs the folder
    /// creates it.
    pub fn data_dir(&self) -> PathBuf {
        self.dir().join("networks")
    }

    /// The reservations of `network` as (address, content), in the order of their names.
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

    /// From now on the drop accepts that the link `name` is left on the host.
    pub fn expect_left(&self, name: &str) {
        self.inner.expected.lock().unwrap().push(name.to_owned());
    }

    /// Ends the node without looking for leftovers: the test has looked and reported them itself.
    pub fn abandon(self) {
        self.inner.abandoned.store(true, Ordering::Relaxed);
    }

    /// Runs `f` on a fresh thread inside the node, the mount namespace included.
    pub fn enter<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        namespace::within(&self.inner.net, &self.inner.mnt, f)
    }

    /// Runs a program in the node, whatever it returns.
    pub fn run(&self, argv: &[&str]) -> Ran {
        self.enter(|| ran(argv))
    }

    /// Runs a program in the node, asserts success and returns what it printed.
    #[track_caller]
    pub fn exec(&self, argv: &[&str]) -> String {
        self.run(argv).success()
    }

    /// Asserts that an address answers from the node. Asks again and again: under load the kernel
    /// answers for a new address some seconds late, and `ping` itself ends at the first error.
    #[track_caller]
    pub fn ping(&self, address: &str) {
        answered(|| self.run(&["ping", "-nqc1", "-W2", address]));
    }

    /// Like [`exec`](Node::exec), for programs that print JSON (`ip -j`); nothing printed is
    /// `null`.
    #[track_caller]
    pub fn json(&self, argv: &[&str]) -> Value {
        parse(argv, &self.exec(argv))
    }

    /// One link of the host as `ip -j -d` shows it.
    pub fn link(&self, name: &str) -> Option<Value> {
        find_link(self.json(&["ip", "-j", "-d", "link", "show"]), name)
    }

    /// The names of the links whose master is `bridge`.
    pub fn ports(&self, bridge: &str) -> Vec<String> {
        let links = self.json(&["ip", "-j", "-d", "link", "show"]);
        let ports = links.as_array().into_iter().flatten().filter(|link| link["master"] == bridge);
        ports.filter_map(|link| link["ifname"].as_str().map(str::to_owned)).collect()
    }

    /// Has one `ip` do all of this, a line each without the word `ip`, and asserts success. Half of
    /// what a test costs where programs start slowly is a dozen of them that set the scene.
    #[track_caller]
    pub fn ip(&self, lines: &[&str]) {
        self.enter(|| ip(lines)).success();
    }

    /// A sysctl of the node, by its path below `/proc/sys`, without the newline.
    #[track_caller]
    pub fn sysctl(&self, path: &str) -> String {
        self.enter(|| read_sysctl(path))
    }

    /// Sets a sysctl of the node, by its path below `/proc/sys`.
    #[track_caller]
    pub fn set_sysctl(&self, path: &str, value: &str) {
        self.enter(|| write_sysctl(path, value));
    }

    /// The processes on this node, this one's threads aside: plugins, what they have started, what
    /// outlives them. Those that have ended and wait to be reaped are gone.
    pub fn processes(&self) -> Vec<u32> {
        self.inner.processes()
    }

    /// All rules of nf_tables as `nft` writes them, those of `iptables-nft` among them, without
    /// counters: packets that the kernel sends by itself change those at any time (a new bridge's
    /// IGMP report, within its first second).
    #[track_caller]
    pub fn ruleset(&self) -> String {
        self.exec(&["nft", "--stateless", "list", "ruleset"])
    }

    /// A file of the node's below `/proc/net`; nothing if there is none.
    pub fn proc_net(&self, name: &str) -> String {
        // Of the thread that is in the node: `/proc/net` would be the main thread's.
        self.enter(|| fs::read_to_string(Path::new("/proc/thread-self/net").join(name)).unwrap_or_default())
    }
}

impl Inner {
    fn processes(&self) -> Vec<u32> {
        let mnt = fs::read_link(fd_path(&self.mnt)).expect("an open namespace has a name");
        let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = numbers.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
        numbers.filter(|pid| fs::read_link(format!("/proc/{pid}/ns/mnt")).is_ok_and(|link| link == mnt)).collect()
    }
}

/// Ends what still runs on the node: a test that fails does not wait for what it has started, and a
/// program that makes a file while the folder is being removed leaves both behind.
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
        if thread::panicking() || self.inner.abandoned.load(Ordering::Relaxed) {
            return;
        }
        let left = leftovers::of(self);
        assert!(left.is_empty(), "left behind on the node:\n{}", left.join("\n"));
    }
}

/// A container: a network namespace with a path. It lives as long as its node, or until
/// [`destroy`](Self::destroy).
#[derive(Debug)]
pub struct Container {
    inner: Arc<Inner>,
    /// Its container ID; each on a node has its own.
    pub id: String,
    net: Arc<File>,
    path: PathBuf,
}

impl Container {
    /// The path a runtime would put into `CNI_NETNS`.
    pub fn netns(&self) -> &Path {
        &self.path
    }

    /// Runs `f` on a fresh thread inside the container's network namespace and the node's mount
    /// namespace.
    pub fn enter<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        namespace::within(&self.net, &self.inner.mnt, f)
    }

    /// Runs a program in the container, whatever it returns.
    pub fn run(&self, argv: &[&str]) -> Ran {
        self.enter(|| ran(argv))
    }

    /// Runs a program in the container, asserts success and returns what it printed.
    #[track_caller]
    pub fn exec(&self, argv: &[&str]) -> String {
        self.run(argv).success()
    }

    /// Asserts that an address answers from the container. Asks again and again: under load the
    /// kernel answers for a new address some seconds late, and `ping` itself ends at the first
    /// error.
    #[track_caller]
    pub fn ping(&self, address: &str) {
        answered(|| self.run(&["ping", "-nqc1", "-W2", address]));
    }

    /// Like [`exec`](Container::exec), for programs that print JSON.
    #[track_caller]
    pub fn json(&self, argv: &[&str]) -> Value {
        parse(argv, &self.exec(argv))
    }

    /// One link of the container as `ip -j -d` shows it.
    pub fn link(&self, name: &str) -> Option<Value> {
        find_link(self.json(&["ip", "-j", "-d", "link", "show"]), name)
    }

    /// Like [`Node::ip`].
    #[track_caller]
    pub fn ip(&self, lines: &[&str]) {
        self.enter(|| ip(lines)).success();
    }

    /// A sysctl of the container, by its path below `/proc/sys`, without the newline.
    #[track_caller]
    pub fn sysctl(&self, path: &str) -> String {
        self.enter(|| read_sysctl(path))
    }

    /// Sets a sysctl of the container, by its path below `/proc/sys`.
    #[track_caller]
    pub fn set_sysctl(&self, path: &str, value: &str) {
        self.enter(|| write_sysctl(path, value));
    }

    /// The addresses of an interface as `address/prefix`, the kernel's link-local ones left out.
    pub fn addresses(&self, interface: &str) -> Vec<String> {
        let links = self.json(&["ip", "-j", "addr", "show", "dev", interface]);
        let infos = links.as_array().into_iter().flatten().filter_map(|link| link["addr_info"].as_array()).flatten();
        let global = infos.filter(|info| info["scope"] != "link" && info["local"].is_string());
        global.map(|info| format!("{}/{}", info["local"].as_str().unwrap(), info["prefixlen"])).collect()
    }

    /// Makes the path what a runtime leaves after unmounting it: a plain file. The namespace itself
    /// lives on.
    pub fn unmount(&self) {
        fs::remove_file(&self.path).expect("to remove the path");
        fs::write(&self.path, "").expect("to write a plain file");
    }

    /// Removes the path alone: the namespace and the links in it live on, out of any plugin's
    /// reach.
    pub fn unlink(&self) {
        fs::remove_file(&self.path).expect("to remove the path");
    }

    /// Removes the path and ends the namespace, and the links in it with it (a moment later: the
    /// kernel takes its time).
    pub fn destroy(self) {
        let _ = fs::remove_file(&self.path);
        self.inner.kept.lock().unwrap().retain(|kept| !Arc::ptr_eq(kept, &self.net));
    }
}

/// How a program ended and what it wrote.
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

fn ran(argv: &[&str]) -> Ran {
    ran_with(argv, Stdio::null())
}

fn ran_with(argv: &[&str], stdin: Stdio) -> Ran {
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

/// Repeats what must succeed once, as long as patience says.
#[track_caller]
fn answered(ask: impl Fn() -> Ran) {
    let until = Instant::now() + crate::patience(Duration::from_secs(20));
    loop {
        let ran = ask();
        if ran.ok || Instant::now() > until {
            ran.success();
            return;
        }
    }
}

#[track_caller]
fn parse(argv: &[&str], text: &str) -> Value {
    if text.trim().is_empty() {
        return Value::Null;
    }
    serde_json::from_str(text).unwrap_or_else(|error| panic!("`{}` printed no JSON: {error}: {text}", argv.join(" ")))
}

fn find_link(links: Value, name: &str) -> Option<Value> {
    let Value::Array(links) = links else { return None };
    links.into_iter().find(|link| link["ifname"] == name)
}

/// One `ip` for all lines.
fn ip(lines: &[&str]) -> Ran {
    let mut batch = tempfile::tempfile().expect("a temporary file");
    batch.write_all((lines.join("\n") + "\n").as_bytes()).expect("to write a temporary file");
    batch.rewind().expect("to rewind a temporary file");
    let mut ran = ran_with(&["ip", "-batch", "-"], Stdio::from(batch));
    ran.stderr.insert_str(0, &format!("of {lines:?}: "));
    ran
}

// Read and written by this process: `cat` and `sysctl` would be most of what many tests cost.
fn read_sysctl(path: &str) -> String {
    let path = format!("/proc/sys/{path}");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("to read {path}: {error}"));
    text.trim_end().to_owned()
}

fn write_sysctl(path: &str, value: &str) {
    let path = format!("/proc/sys/{path}");
    fs::write(&path, value).unwrap_or_else(|error| panic!("to write {value} to {path}: {error}"));
}

/// A path to an open file that holds for as long as this process keeps the descriptor. Needs no
/// mount and no name.
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
