//! A node with an uplink, a client beyond it, containers on a bridge, servers in them, and three
//! backends.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use cni_testkit::{Attachment, Container, Node, Outcome, bin_dir, patience, probe};
pub(crate) use conformance::HOST;
use conformance::{VERSION, bridge, patched, uplink};
use serde_json::{Value, json};

/// The backend of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    Nftables,
    IptablesNft,
    IptablesLegacy,
}

pub(crate) const BACKENDS: [Backend; 3] = [Backend::Nftables, Backend::IptablesNft, Backend::IptablesLegacy];
pub(crate) const IPTABLES: [Backend; 2] = [Backend::IptablesNft, Backend::IptablesLegacy];

impl Backend {
    pub(crate) fn key(self) -> &'static str {
        if self == Backend::Nftables { "nftables" } else { "iptables" }
    }

    /// Probes for the programs that the plugin or the test needs for this backend.
    pub(crate) fn probe(self) -> Result<(), String> {
        match self {
            Backend::Nftables => probe::nft(),
            Backend::IptablesNft => probe::tool("xtables-nft-multi"),
            Backend::IptablesLegacy => probe::tool("xtables-legacy-multi"),
        }
    }

    pub(crate) fn multi(self) -> &'static str {
        if self == Backend::IptablesLegacy { "xtables-legacy-multi" } else { "xtables-nft-multi" }
    }

    /// Returns a PATH with this backend's `iptables`, in which every program logs its call.
    pub(crate) fn path(self, node: &Node) -> String {
        let folder = node.dir().join(format!("bin-{self:?}"));
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
        if folder.exists() {
            return path;
        }
        let script = format!(
            "#!/bin/sh\nname=${{0##*/}}\necho $name >> {}\ncase $name in nft) exec /usr/sbin/nft \"$@\";;\n\
             *nft*) multi=xtables-nft-multi;; *legacy*) multi=xtables-legacy-multi;; *) multi={};; esac\n\
             exec /usr/sbin/$multi ${{name#xtables-*-}} \"$@\"\n",
            node.dir().join("ran").display(),
            self.multi(),
        );
        let script = node.script(&format!("bin-{self:?}/nft"), &script);
        for family in ["iptables", "ip6tables"] {
            for (multi, variants) in [
                ("xtables-nft-multi", ["-nft", if self.multi() == "xtables-nft-multi" { "" } else { "-nft" }]),
                (
                    "xtables-legacy-multi",
                    ["-legacy", if self.multi() == "xtables-legacy-multi" { "" } else { "-legacy" }],
                ),
            ] {
                for job in ["", "-save", "-restore"] {
                    // The plugin derives the variant from the name of the link's target.
                    let file = format!("{}-{family}{job}", &multi[..multi.len() - 6]);
                    std::fs::hard_link(&script, folder.join(&file)).unwrap();
                    for variant in variants {
                        let link = folder.join(format!("{family}{variant}{job}"));
                        let _ = std::os::unix::fs::symlink(&file, link);
                    }
                }
            }
        }
        path
    }
}

/// A node, its uplink and a client, which all tests use.
pub(crate) struct World {
    pub(crate) node: Node,
    pub(crate) client: Container,
    pub(crate) backend: Backend,
}

impl World {
    pub(crate) fn new(backend: Backend) -> World {
        let node = Node::new();
        let client = uplink(&node, "up0");
        World { node, client, backend }
    }

    /// The bridge network `name`, over these subnets.
    pub(crate) fn network(&self, name: &str, subnets: &[&str]) -> Value {
        let patch =
            json!({"name": name, "isDefaultGateway": true, "hairpinMode": true, "bridge": format!("br-{name}")});
        patched(bridge(&self.node, subnets), patch)
    }

    /// A new container in a network, without ports.
    pub(crate) fn pod(&self, network: &Value) -> Pod<'_> {
        let container = self.node.container();
        container.exec(&["ip", "link", "set", "lo", "up"]);
        Pod::join(self, container, network, "eth0")
    }

    /// A new container in `net1`, IPv4 and IPv6.
    pub(crate) fn dual(&self) -> Pod<'_> {
        self.pod(&self.network("net1", &["10.1.0.0/24", "fd00:1::/64"]))
    }

    /// The same with these mappings.
    #[track_caller]
    pub(crate) fn mapped(&self, mappings: Value) -> Pod<'_> {
        let pod = self.dual();
        pod.add(&self.config(mappings)).success();
        pod
    }

    /// portmap's configuration in `net1`.
    pub(crate) fn config(&self, mappings: Value) -> Value {
        json!({"cniVersion": VERSION, "name": "net1", "type": "portmap", "backend": self.backend.key(),
               "capabilities": {"portMappings": true}, "runtimeConfig": {"portMappings": mappings}})
    }

    /// Returns the programs that have run since the last call.
    pub(crate) fn ran(&self) -> Vec<String> {
        let log = self.node.dir().join("ran");
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let _ = std::fs::remove_file(log);
        text.lines().map(str::to_owned).collect()
    }

    /// Returns all rules and chains of the backend in comparable form: for iptables the output of
    /// its save program for `nat`.
    pub(crate) fn rules(&self) -> String {
        match self.backend {
            Backend::Nftables => self.node.ruleset(),
            backend => {
                let multi = format!("/usr/sbin/{}", backend.multi());
                // The save program of iptables-legacy creates the table that it looks for.
                let save = |family: &str| {
                    let names = if family == "iptables" { "ip_tables_names" } else { "ip6_tables_names" };
                    let legacy = backend == Backend::IptablesLegacy;
                    if legacy && !self.node.proc_net(names).contains("nat") {
                        return String::new();
                    }
                    self.node.exec(&[&multi, &format!("{family}-save"), "-t", "nat"])
                };
                let text = save("iptables") + "\nv6\n" + &save("ip6tables");
                let lines = text.lines().filter(|line| !line.starts_with('#'));
                // Counters.
                let without = |line: &str| {
                    if line.starts_with(':') { line.split(" [").next().unwrap_or(line) } else { line }.to_owned()
                };
                lines.map(|line| without(line) + "\n").collect()
            }
        }
    }
}

/// A container with an attachment and its result.
pub(crate) struct Pod<'w> {
    pub(crate) world: &'w World,
    pub(crate) container: std::rc::Rc<Container>,
    pub(crate) network: Attachment<'w>,
    pub(crate) result: Value,
    /// The configurations of portmap's ADDs.
    added: RefCell<Vec<Value>>,
}

impl<'w> Pod<'w> {
    #[track_caller]
    fn join(world: &'w World, container: Container, network: &Value, ifname: &str) -> Pod<'w> {
        let attachment = Attachment::new(&world.node, &container, network.clone()).ifname(ifname);
        let (result, container) = (attachment.add().success(), std::rc::Rc::new(container));
        Pod { world, container, network: attachment, result, added: RefCell::default() }
    }

    /// The first address of a family, 0 being IPv4.
    pub(crate) fn address(&self, family: usize) -> IpAddr {
        let addresses = conformance::addresses(&self.result);
        let all = addresses.iter().map(|cidr| cidr.split('/').next().unwrap().parse::<IpAddr>().unwrap());
        all.into_iter().find(|address| address.is_ipv4() == (family == 0)).expect("an address of the family")
    }

    /// A call of portmap, by the plugins of a folder.
    #[track_caller]
    pub(crate) fn call_by(&self, dir: &Path, verb: &str, config: &Value, prev: Option<&Value>) -> Outcome {
        if verb == "ADD" {
            self.added.borrow_mut().push(config.clone());
        }
        self.invocation(dir, verb, config, prev).run()
    }

    #[track_caller]
    pub(crate) fn invocation(
        &self,
        dir: &Path,
        verb: &str,
        config: &Value,
        prev: Option<&Value>,
    ) -> cni_testkit::Invocation<'w> {
        let attachment = self.network.clone().config(config.clone()).by(dir);
        let path = self.world.backend.path(&self.world.node);
        attachment.invocation(verb, prev).env("PATH", path)
    }

    #[track_caller]
    pub(crate) fn add(&self, config: &Value) -> Outcome {
        self.call_by(&bin_dir(), "ADD", config, Some(&self.result))
    }

    #[track_caller]
    pub(crate) fn check(&self, config: &Value) -> Outcome {
        self.call_by(&bin_dir(), "CHECK", config, Some(&self.result))
    }

    #[track_caller]
    pub(crate) fn del(&self, config: &Value) -> Outcome {
        self.call_by(&bin_dir(), "DEL", config, Some(&self.result))
    }

    /// Another interface of the same container.
    #[track_caller]
    pub(crate) fn also(&self, network: &Value, ifname: &str) -> Pod<'w> {
        let attachment = Attachment::new(&self.world.node, &self.container, network.clone()).ifname(ifname);
        let result = attachment.add().success();
        Pod {
            world: self.world,
            container: self.container.clone(),
            network: attachment,
            result,
            added: RefCell::default(),
        }
    }

    /// DEL of portmap for everything that was added to this attachment, then DEL of bridge.
    #[track_caller]
    pub(crate) fn leave(&self) {
        for config in self.added.take() {
            self.del(&config).success();
        }
        self.network.del_with(&self.result).success();
    }

    /// A TCP server on this port that sends every client the name and the client's address.
    pub(crate) fn serve_tcp(&self, port: u16, name: &'static str) {
        let listener = self.container.enter(|| TcpListener::bind(("::", port)).unwrap());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut stream = stream;
                let peer = stream.peer_addr().map(|peer| peer.ip().to_canonical().to_string()).unwrap_or_default();
                let _ = stream.write_all(format!("{name} {peer}").as_bytes());
            }
        });
    }

    /// The same for UDP: answers each datagram.
    pub(crate) fn serve_udp(&self, port: u16, name: &'static str) {
        let socket = self.container.enter(|| UdpSocket::bind(("::", port)).unwrap());
        thread::spawn(move || {
            let mut buffer = [0; 64];
            while let Ok((_, peer)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(format!("{name} {}", peer.ip().to_canonical()).as_bytes(), peer);
            }
        });
    }
}

/// How long to wait for an answer that must not come.
pub(crate) const IN_VAIN: Duration = Duration::from_millis(1500);

/// Asks the TCP server at `to` from the current namespace. `None` without an answer; where that is
/// expected, see [`ask_tcp_for`].
pub(crate) fn ask_tcp(to: &str) -> Option<String> {
    ask_tcp_for(patience(Duration::from_secs(10)), to)
}

/// Does the same, with this timeout for connection and answer.
pub(crate) fn ask_tcp_for(time: Duration, to: &str) -> Option<String> {
    let to: SocketAddr = to.parse().unwrap();
    let mut stream = TcpStream::connect_timeout(&to, time).ok()?;
    stream.set_read_timeout(Some(time)).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text).filter(|text| !text.is_empty())
}

/// Returns a UDP socket for several questions.
pub(crate) fn udp_client() -> UdpSocket {
    UdpSocket::bind("0.0.0.0:0").unwrap()
}

/// Asks the UDP server at `to` once.
pub(crate) fn ask_udp(socket: &UdpSocket, to: &str) -> Option<String> {
    ask_udp_for(patience(Duration::from_secs(10)), socket, to)
}

/// Does the same, with this timeout.
pub(crate) fn ask_udp_for(time: Duration, socket: &UdpSocket, to: &str) -> Option<String> {
    socket.set_read_timeout(Some(time)).unwrap();
    socket.send_to(b"?", to).ok()?;
    let mut buffer = [0; 64];
    let (len, _) = socket.recv_from(&mut buffer).ok()?;
    Some(String::from_utf8_lossy(&buffer[..len]).into_owned())
}

/// `HOST:PORT` of a family.
pub(crate) fn at(family: usize, port: u16) -> String {
    SocketAddr::new(HOST[family].parse().unwrap(), port).to_string()
}

/// One mapping.
pub(crate) fn map(host_port: u16, container_port: u16, protocol: &str) -> Value {
    json!({"hostPort": host_port, "containerPort": container_port, "protocol": protocol})
}

/// Runs the test with each available backend, and prints the missing ones.
pub(crate) fn each(backends: &[Backend], test: impl Fn(&World)) {
    for backend in backends {
        match backend.probe() {
            Ok(()) => test(&World::new(*backend)),
            Err(reason) => cni_testkit::skipped(&format!("{backend:?}: {reason}")),
        }
    }
}

/// Returns the backends that the Go plugins know too.
pub(crate) fn shared() -> &'static [Backend] {
    if cni_testkit::probe::go_nftables().is_ok() { &BACKENDS } else { &IPTABLES }
}

/// The folder of the Go plugins.
pub(crate) fn go() -> PathBuf {
    cni_testkit::go_bin_dir()
}
