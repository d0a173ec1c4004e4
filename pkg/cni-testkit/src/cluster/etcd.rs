//! Real members of etcd with TLS.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::Authority;
use crate::{Container, Node, probe, retry};

/// The members of one etcd. Each is a process in a network namespace of its own, with the address
/// 10.99.0.1, 10.99.0.2 or 10.99.0.3 on a bridge of the node. The node has 10.99.0.100.
#[derive(Debug)]
pub struct Etcd<'a> {
    node: &'a Node,
    authority: Authority,
    folder: TempDir,
    certificate: PathBuf,
    members: Vec<(Container, Option<Child>)>,
}

impl Etcd<'_> {
    /// Starts the members and waits until all of them answer.
    ///
    /// # Panics
    /// Without etcd ([`probe::etcd`]), or if a member does not answer within 30 s.
    pub fn start(node: &Node, members: usize) -> Etcd<'_> {
        let authority = Authority::new();
        let certificate = authority.issue("/CN=node", "IP:10.99.0.1,IP:10.99.0.2,IP:10.99.0.3");
        node.ip(&["link add etcd type bridge", "addr add 10.99.0.100/24 dev etcd", "link set etcd up"]);
        let member = |number: usize| {
            let container = node.container();
            let netns = container.netns().display();
            node.ip(&[
                &format!("link add etcd{number} type veth peer name eth0 netns {netns}"),
                &format!("link set etcd{number} master etcd up"),
            ]);
            container.ip(&[
                &format!("addr add 10.99.0.{}/24 dev eth0", number + 1),
                "link set eth0 up",
                "link set lo up",
            ]);
            (container, None)
        };
        let (members, folder) = ((0..members).map(member).collect(), tempfile::tempdir().unwrap());
        let mut etcd = Etcd { node, authority, folder, certificate, members };
        (0..etcd.members.len()).for_each(|member| etcd.start_member(member));
        etcd.wait();
        etcd
    }

    /// Starts a member, with the data that it has had before.
    pub fn start_member(&mut self, member: usize) {
        let peer = |member: usize| format!("https://10.99.0.{}:2380", member + 1);
        let all = (0..self.members.len()).map(|other| format!("m{other}={}", peer(other))).collect::<Vec<_>>();
        let log = File::options().create(true).append(true).open(self.folder.path().join(format!("log{member}")));
        let mut command = Command::new(probe::etcd().unwrap());
        command
            .args(["--name", &format!("m{member}"), "--initial-cluster", &all.join(",")])
            .arg("--data-dir")
            .arg(self.folder.path().join(format!("data{member}")))
            .args(["--listen-client-urls", &client_url(member), "--advertise-client-urls", &client_url(member)])
            .args(["--listen-peer-urls", &peer(member), "--initial-advertise-peer-urls", &peer(member)])
            .args(["--client-cert-auth", "--peer-client-cert-auth", "--logger", "zap"]);
        for prefix in ["", "peer-"] {
            command.arg(format!("--{prefix}cert-file")).arg(&self.certificate);
            command.arg(format!("--{prefix}key-file")).arg(&self.certificate);
            command.arg(format!("--{prefix}trusted-ca-file")).arg(self.authority.ca_file());
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.unwrap());
        let (container, child) = &mut self.members[member];
        *child = Some(container.enter(|| command.spawn()).expect("to start etcd"));
    }

    /// Waits until all members answer.
    ///
    /// # Panics
    /// If a member does not answer within 30 s.
    pub fn wait(&self) {
        retry(|| self.try_control(&["endpoint", "health"]).map_err(|error| format!("etcd does not answer: {error}")));
    }

    /// Kills a member.
    pub fn kill(&mut self, member: usize) {
        if let Some(mut child) = self.members[member].1.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Sends a signal to a member, such as SIGSTOP.
    pub fn signal(&self, member: usize, signal: Signal) {
        let child = self.members[member].1.as_ref().expect("a running member");
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
    }

    /// Cuts a member off from the node and from the other members.
    pub fn cut(&self, member: usize) {
        self.node.ip(&[&format!("link set etcd{member} down")]);
    }

    /// Ends what [`cut`](Etcd::cut) has begun.
    pub fn join(&self, member: usize) {
        self.node.ip(&[&format!("link set etcd{member} up")]);
    }

    /// Returns the node's file for all members.
    pub fn node_file(&self, node: &str) -> Value {
        json!({"node": node, "etcd": {"endpoints": self.urls(), "caFile": self.authority.ca_file(),
            "certFile": self.certificate, "keyFile": self.certificate}})
    }

    /// Runs etcdctl against all members and returns what it printed.
    ///
    /// # Panics
    /// If it fails.
    pub fn control(&self, args: &[&str]) -> String {
        self.try_control(args).unwrap_or_else(|error| panic!("etcdctl {args:?}: {error}"))
    }

    /// Returns the number of the leader.
    pub fn leader(&self) -> usize {
        let status: Value = serde_json::from_str(&self.control(&["endpoint", "status", "-w", "json"])).unwrap();
        let is_leader = |of: &&Value| of["Status"]["header"]["member_id"] == of["Status"]["leader"];
        let leader = status.as_array().unwrap().iter().find(is_leader).expect("a leader");
        self.urls().iter().position(|url| leader["Endpoint"] == **url).unwrap()
    }

    fn urls(&self) -> Vec<String> {
        (0..self.members.len()).map(client_url).collect()
    }

    fn try_control(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(probe::etcd().unwrap().with_file_name("etcdctl"));
        command.env("ETCDCTL_API", "3").args(["--endpoints", &self.urls().join(",")]);
        command.arg("--cacert").arg(self.authority.ca_file());
        command.arg("--cert").arg(&self.certificate).arg("--key").arg(&self.certificate).args(args);
        let output = self.node.enter(|| command.output()).expect("to run etcdctl");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }
}

impl Drop for Etcd<'_> {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|member| self.kill(member));
        (0..self.members.len()).for_each(|member| self.node.ip(&[&format!("link del etcd{member}")]));
        self.node.ip(&["link del etcd"]);
    }
}

fn client_url(member: usize) -> String {
    format!("https://10.99.0.{}:2379", member + 1)
}
