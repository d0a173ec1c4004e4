//! A bridge with a real DHCP server, and a dhcp daemon, each in the node of a test.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::{fs, thread};

use cni_testkit::{Attachment, Container, Node, bin_dir, probe, wait_until};
use serde_json::{Value, json};

use crate::VERSION;

/// A process that ends with its test.
#[derive(Debug)]
pub struct Process(pub Child);

impl Process {
    /// Starts a program on the node. Its output goes to a file in the node's folder.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(node: &Node, log: &str, argv: &[&str]) -> Process {
        Process::start_with(node, log, argv, &[])
    }

    fn start_with(node: &Node, log: &str, argv: &[&str], environment: &[(&str, PathBuf)]) -> Process {
        let log = fs::File::create(node.dir().join(log)).unwrap();
        let mut command = Command::new(argv[0]);
        command.args(&argv[1..]).envs(environment.iter().map(|(key, value)| (key, value)));
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        Process(node.enter(|| command.spawn()).unwrap_or_else(|error| panic!("to run {}: {error}", argv[0])))
    }

    /// Ends it by SIGKILL.
    ///
    /// # Panics
    /// If it has ended already.
    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Which DHCP server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// dnsmasq.
    Dnsmasq,
    /// ISC's Kea.
    Kea,
}

impl Server {
    /// Probes for the server.
    ///
    /// # Errors
    /// Why it cannot be run.
    pub fn probe(self) -> Result<(), String> {
        match self {
            Server::Dnsmasq => probe::dnsmasq().map(drop),
            Server::Kea => probe::kea().map(drop),
        }
    }
}

/// A node with the bridge `lan`, 192.168.1.1, and a DHCP server on it.
#[derive(Debug)]
pub struct Lan {
    /// The node.
    pub node: Node,
    server: Mutex<Option<Process>>,
    kind: Server,
}

impl Lan {
    /// dnsmasq with this many addresses from 192.168.1.5 on, and these arguments.
    pub fn new(addresses: u8, arguments: &[&str]) -> Lan {
        let lan = Lan::silent();
        lan.serve(addresses, arguments);
        lan
    }

    /// dnsmasq with DHCPv4 and DHCPv6: addresses from 2001:db8:1::5 on, and these arguments. It
    /// advertises only if these say so.
    pub fn dual(arguments: &[&str]) -> Lan {
        let lan = Lan::silent();
        lan.node.ip(&["address add 2001:db8:1::1/64 dev lan nodad"]);
        lan.serve_dual(arguments);
        lan
    }

    /// Starts that dnsmasq, in the place of the server that runs.
    pub fn serve_dual(&self, arguments: &[&str]) {
        self.serve(10, &[&["--dhcp-range=2001:db8:1::5,2001:db8:1::fff,64,120"], arguments].concat());
    }

    /// Kea's DHCPv6 server, with ten addresses from 2001:db8:1::5 on.
    pub fn kea6() -> Lan {
        let mut lan = Lan::silent();
        lan.kind = Server::Kea;
        lan.node.ip(&["address add 2001:db8:1::1/64 dev lan nodad"]);
        // Kea does not listen on a tentative address.
        wait_until("the server has a link-local address", || {
            let argv = ["ip", "-6", "-o", "address", "show", "dev", "lan", "scope", "link", "-tentative"];
            lan.node.exec(&argv).contains("fe80:")
        });
        lan.serve_kea6();
        lan
    }

    /// Starts that Kea in the place of the server that runs.
    pub fn serve_kea6(&self) {
        let subnet = json!({
            // The client does not ask for a lease without an offer before, so it has none.
            "id": 1, "subnet": "2001:db8:1::/64", "interface": "lan", "rapid-commit": true,
            "pools": [{"pool": "2001:db8:1::5 - 2001:db8:1::e"}],
            "option-data": [
                {"name": "dns-servers", "data": "2001:db8:1::53"},
                {"name": "domain-search", "data": "lan.example"},
            ],
        });
        let config = json!({
            "interfaces-config": {"interfaces": ["lan"]},
            "data-directory": self.node.dir(),
            "valid-lifetime": 120, "preferred-lifetime": 100, "renew-timer": 60, "rebind-timer": 90,
            "subnet6": [subnet],
        });
        self.start_kea(6, &probe::kea6().unwrap(), config);
    }

    /// A server with ten addresses from 192.168.1.5 on, which names itself as the router.
    pub fn of(kind: Server) -> Lan {
        let mut lan = Lan::silent();
        lan.kind = kind;
        lan.serve_for(&[]);
        lan
    }

    /// No server.
    pub fn silent() -> Lan {
        let node = Node::new();
        // Kea does not listen on an interface without carrier, so the bridge has a port from the
        // start.
        node.expect_left("port");
        node.expect_left("peer");
        node.ip(&[
            "link add lan type bridge",
            "link set lan up",
            "address add 192.168.1.1/24 dev lan",
            "link add port type veth peer name peer",
            "link set port master lan up",
            "link set peer up",
        ]);
        Lan { node, server: Mutex::default(), kind: Server::Dnsmasq }
    }

    /// Starts the server, in the place of the one that runs. It has an address for each of these
    /// hardware addresses.
    pub fn serve_for(&self, reserved: &[(&str, &str)]) {
        match self.kind {
            Server::Dnsmasq => {
                let reserved = reserved.iter().map(|(mac, address)| format!("--dhcp-host={mac},{address}"));
                let reserved: Vec<String> = reserved.collect();
                let router = ["--dhcp-option=3,192.168.1.1"].into_iter();
                self.serve(10, &router.chain(reserved.iter().map(String::as_str)).collect::<Vec<_>>());
            }
            Server::Kea => self.serve_kea(reserved),
        }
    }

    /// Starts dnsmasq, in the place of the server that runs, with ten addresses from
    /// 192.168.1.`first` on.
    pub fn serve_from(&self, first: u8) {
        self.serve_range(first, 10, &[]);
    }

    /// Starts dnsmasq, in the place of the server that runs.
    pub fn serve(&self, addresses: u8, arguments: &[&str]) {
        self.serve_range(5, addresses, arguments);
    }

    fn serve_range(&self, first: u8, addresses: u8, arguments: &[&str]) {
        self.stop();
        let program = probe::dnsmasq().unwrap();
        let range = format!("--dhcp-range=192.168.1.{first},192.168.1.{},255.255.255.0,120", first + addresses - 1);
        let (leases, pid) =
            (format!("--dhcp-leasefile={}", self.file("leases")), format!("--pid-file={}", self.file("pid")));
        let argv = [&program.display().to_string(), "--no-daemon", "--conf-file=/dev/null", "--no-ping", "--port=0"];
        let argv =
            [&argv[..], &["--interface=lan", "--bind-interfaces", "--user=root", "--dhcp-authoritative"]].concat();
        let argv = [&argv[..], &["--dhcp-sequential-ip", "--log-dhcp", &range, &leases, &pid], arguments].concat();
        *self.server.lock().unwrap() = Some(Process::start(&self.node, "server.log", &argv));
        wait_until("the server runs", || self.log().contains("started"));
    }

    fn serve_kea(&self, reserved: &[(&str, &str)]) {
        let program = probe::kea().unwrap();
        let reserved = reserved.iter().map(|(mac, address)| json!({"hw-address": mac, "ip-address": address}));
        let subnet = json!({
            "subnet": "192.168.1.0/24",
            "pools": [{"pool": "192.168.1.5 - 192.168.1.14"}],
            "reservations": reserved.collect::<Vec<_>>(),
            "option-data": [{"name": "routers", "data": "192.168.1.1"}],
        });
        let config = json!({
            "interfaces-config": {"interfaces": ["lan"], "dhcp-socket-type": "raw"},
            "valid-lifetime": 120, "renew-timer": 60, "rebind-timer": 105, "authoritative": true,
            "subnet4": [subnet],
        });
        self.start_kea(4, &program, config);
    }

    fn start_kea(&self, version: u8, program: &Path, mut config: Value) {
        self.stop();
        // The program is in usr/sbin.
        let root = program.ancestors().nth(3).unwrap();
        let output = json!([{"output": "stdout", "flush": true}]);
        let name = format!("kea-dhcp{version}");
        config["lease-database"] = json!({"type": "memfile", "name": self.file("leases"), "lfc-interval": 0});
        config["loggers"] = json!([{"name": name, "severity": "INFO", "output_options": output}]);
        let config = json!({(format!("Dhcp{version}")): config});
        let config = self.node.file("kea.conf", config.to_string()).display().to_string();
        // A program of Debian's finds its libraries in the system's folders, where these are not.
        let libraries = fs::read_dir(root.join("usr/lib")).unwrap().flatten().map(|entry| entry.path());
        let libraries = libraries.filter(|path| path.to_string_lossy().ends_with("-linux-gnu"));
        let libraries: Vec<String> = libraries.map(|path| path.display().to_string()).collect();
        let folder = self.node.dir().to_owned();
        let environment = [
            ("LD_LIBRARY_PATH", libraries.join(":").into()),
            ("KEA_PIDFILE_DIR", folder.clone()),
            ("KEA_LOCKFILE_DIR", folder),
        ];
        // The killed one's.
        let _ = fs::remove_file(self.node.dir().join(format!("kea.{name}.pid")));
        let argv = [&program.display().to_string(), "-c", &config];
        let server = Process::start_with(&self.node, "server.log", &argv, &environment);
        *self.server.lock().unwrap() = Some(server);
        wait_until("the server runs", || self.log().contains(&format!("DHCP{version}_STARTED")));
    }

    /// Ends the server, if there is one.
    ///
    /// # Panics
    /// If another thread has done so.
    pub fn stop(&self) {
        *self.server.lock().unwrap() = None;
    }

    fn file(&self, name: &str) -> String {
        self.node.dir().join(name).display().to_string()
    }

    /// What the server has written to its log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.node.dir().join("server.log")).unwrap_or_default()
    }

    /// The addresses that the server has leased.
    pub fn leased(&self) -> Vec<String> {
        let text = fs::read_to_string(self.node.dir().join("leases")).unwrap_or_default();
        let mut leased = Vec::new();
        for line in text.lines() {
            match self.kind {
                Server::Dnsmasq => leased.extend(line.split_whitespace().nth(2).map(str::to_owned)),
                // One line for each change: the last one counts, and that of an address that is
                // free again has no time.
                Server::Kea => {
                    let fields: Vec<&str> = line.split(',').collect();
                    leased.retain(|address| address != fields[0]);
                    // DHCPv6 has its time before the time of the end.
                    let time = if fields[0].contains(':') { 2 } else { 3 };
                    if fields[0] != "address" && fields[time] != "0" {
                        leased.push(fields[0].to_owned());
                    }
                }
            }
        }
        leased.sort();
        leased
    }

    /// How often the server has leased an address, renewals among them.
    pub fn granted(&self, address: &str) -> usize {
        match self.kind {
            Server::Dnsmasq => self.log().matches(&format!(" DHCPACK(lan) {address} ")).count(),
            Server::Kea => self.log().matches(&format!("lease {address} has been allocated")).count(),
        }
    }

    /// How often the server has been looked for.
    pub fn searched(&self) -> usize {
        match self.kind {
            Server::Dnsmasq => self.log().matches(" DHCPDISCOVER(lan) ").count(),
            Server::Kea => self.log().matches("DHCP4_LEASE_ADVERT").count(),
        }
    }

    /// The daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.node.dir().join("dhcp.sock")
    }

    /// The number of the daemon's records.
    pub fn records(&self) -> usize {
        fs::read_dir(self.node.dir().join("dhcp")).map_or(0, Iterator::count)
    }

    /// Starts the daemon of a folder of plugins.
    pub fn daemon_of(&self, folder: &Path, flags: &[&str]) -> Process {
        let (program, socket) = (folder.join("dhcp").display().to_string(), self.socket().display().to_string());
        let argv = [&[&program, "daemon", "-socketpath", &socket][..], flags].concat();
        let daemon = Process::start(&self.node, "daemon.log", &argv);
        wait_until("the daemon listens", || std::os::unix::net::UnixStream::connect(self.socket()).is_ok());
        daemon
    }

    /// Starts the daemon under test.
    pub fn daemon(&self) -> Process {
        self.daemon_of(&bin_dir(), &[])
    }

    /// A container with these interfaces on the bridge.
    pub fn container(&self, interfaces: &[&str]) -> Container {
        let container = self.node.container();
        for name in interfaces {
            self.plug(&container, name, "lan");
        }
        container
    }

    /// Gives a container an interface on a bridge.
    pub fn plug(&self, container: &Container, name: &str, bridge: &str) {
        let host = format!("h{}{name}", container.id.trim_start_matches("container-"));
        self.node.expect_left(&host);
        self.node.ip(&[
            &format!("link add name {host} type veth peer name {name} netns {}", container.netns().display()),
            &format!("link set {host} master {bridge} up"),
        ]);
        container.ip(&[&format!("link set {name} up")]);
    }

    /// A container's attachment.
    pub fn attachment(&self, container: &Container) -> Attachment<'_> {
        let ipam = json!({"type": "dhcp", "daemonSocketPath": self.socket()});
        let config = json!({"cniVersion": VERSION, "name": "net1", "type": "dhcp", "ipam": ipam});
        Attachment::new(&self.node, container, config)
    }

    /// Makes the recorded lease older, while no daemon runs.
    ///
    /// # Panics
    /// If there is no record.
    pub fn age(&self, seconds: u64) {
        let entries = fs::read_dir(self.node.dir().join("dhcp")).unwrap().map(|entry| entry.unwrap().path());
        let record = entries.into_iter().find(|path| path.extension().is_some_and(|it| it == "json")).unwrap();
        let mut json: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
        // Not its start, which counts from the machine's: a virtual machine may be younger than
        // that.
        for time in ["seconds", "t1", "t2"] {
            let time = &mut json["held"]["Bound"]["terms"][time];
            *time = json!(time.as_u64().unwrap().saturating_sub(seconds));
        }
        fs::write(record, json.to_string()).unwrap();
    }
}

/// What the plugin that creates the interface does with the result.
///
/// # Panics
/// If the result has no address.
pub fn configure(container: &Container, ifname: &str, result: &Value) {
    container.ip(&[&format!("address add {} dev {ifname}", result["ips"][0]["address"].as_str().unwrap())]);
}

#[expect(clippy::print_stdout, reason = "libtest shows it if the test fails")]
impl Drop for Lan {
    fn drop(&mut self) {
        if thread::panicking() {
            for name in ["server.log", "daemon.log"] {
                println!("{name}:\n{}", fs::read_to_string(self.node.dir().join(name)).unwrap_or_default());
            }
        }
    }
}
