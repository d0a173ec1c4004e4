//! A node with a bus and firewalld of its own.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cni_testkit::{Node, bin_dir, patience, probe, wait_until};
use conformance::patched;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::super::world::{Backend, Pod, World, config};

/// The socket of the system bus.
pub(super) const SOCKET: &str = "/run/dbus/system_bus_socket";

pub(super) struct Process(Child);

impl Process {
    pub(super) fn start(node: &Node, log: &str, argv: &[&str]) -> Process {
        let log = fs::File::create(node.dir().join(log)).unwrap();
        let mut command = Command::new(argv[0]);
        command.args(&argv[1..]).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        Process(node.enter(|| command.spawn()).unwrap_or_else(|error| panic!("to run {}: {error}", argv[0])))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A system bus in the node's own /run.
pub(super) fn bus(world: &World) -> Process {
    let node = &world.node;
    let text = format!(
        "<busconfig><type>system</type><listen>unix:path={SOCKET}</listen><auth>EXTERNAL</auth><policy context=\"default\">\
         <allow user=\"*\"/><allow own=\"*\"/><allow send_destination=\"*\"/><allow receive_sender=\"*\"/></policy></busconfig>"
    );
    let conf = node.file("bus.conf", text);
    node.exec(&["mkdir", "-p", "/run/dbus"]);
    let program = probe::dbus_daemon().unwrap();
    let argv = [program.to_str().unwrap(), "--config-file", conf.to_str().unwrap(), "--nofork", "--nopidfile"];
    let bus = Process::start(node, "bus.log", &argv);
    wait_until("the bus listens", || node.enter(|| Path::new(SOCKET).exists()));
    bus
}

/// A node with a bus and firewalld on it.
pub(super) struct Firewalld {
    // firewalld first: without a bus it waits for one.
    daemon: RefCell<Option<Process>>,
    _bus: Process,
    pub(super) world: World,
    root: PathBuf,
}

impl Firewalld {
    pub(super) fn new() -> Firewalld {
        let root = probe::firewalld().unwrap();
        let world = World::new(Backend::Nftables);
        let bus = bus(&world);
        let etc = world.node.dir().join("firewalld");
        fs::create_dir(&etc).unwrap();
        fs::copy(root.join("etc/firewalld/firewalld.conf"), etc.join("firewalld.conf")).unwrap();
        let firewalld = Firewalld { daemon: RefCell::default(), _bus: bus, world, root };
        firewalld.start();
        firewalld
    }

    /// Returns the command line of one of firewalld's programs.
    pub(super) fn argv(&self, program: &str) -> Vec<String> {
        let root = self.root.display();
        let multiarch = format!("{root}/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let unpacked = self.root.join("usr/bin/python3");
        let python = if unpacked.exists() { unpacked } else { "/usr/bin/python3".into() };
        let (etc, default) = (self.world.node.dir().join("firewalld"), self.root.join("usr/lib/firewalld"));
        let mut argv = vec![
            "env".to_owned(),
            format!("PYTHONPATH={root}/usr/lib/python3/dist-packages"),
            "PYTHONDONTWRITEBYTECODE=1".to_owned(),
            format!("GI_TYPELIB_PATH={multiarch}/girepository-1.0"),
            format!("LD_LIBRARY_PATH={multiarch}"),
            python.display().to_string(),
            format!("{root}/usr/{program}"),
        ];
        if program == "sbin/firewalld" {
            argv.extend(["--nofork", "--nopid", "--log-target=console", "--system-config"].map(str::to_owned));
            argv.extend([etc.display().to_string(), "--default-config".to_owned(), default.display().to_string()]);
        }
        argv
    }

    pub(super) fn start(&self) {
        let argv = self.argv("sbin/firewalld");
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        self.daemon.replace(Some(Process::start(&self.world.node, "firewalld.log", &argv)));
        let log = self.world.node.dir().join("firewalld.log");
        let deadline = Instant::now() + patience(Duration::from_secs(120));
        while !self.run(&["--state"]).ok {
            assert!(Instant::now() < deadline, "firewalld: {}", fs::read_to_string(&log).unwrap_or_default());
        }
    }

    /// Stops firewalld as its service does, so that it removes its rules.
    pub(super) fn stop(&self) {
        let Some(mut daemon) = self.daemon.take() else { return };
        let pid = nix::unistd::Pid::from_raw(i32::try_from(daemon.0.id()).unwrap());
        nix::sys::signal::kill(pid, Signal::SIGTERM).unwrap();
        daemon.0.wait().unwrap();
    }

    pub(super) fn run(&self, arguments: &[&str]) -> cni_testkit::Ran {
        let argv = self.argv("bin/firewall-cmd");
        let argv: Vec<&str> = argv.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
        self.world.node.run(&argv)
    }

    /// Runs firewall-cmd.
    #[track_caller]
    pub(super) fn cmd(&self, arguments: &[&str]) -> String {
        self.run(arguments).success()
    }

    /// Returns the sources of a zone, sorted.
    #[track_caller]
    pub(super) fn sources(&self, zone: &str) -> Vec<String> {
        let mut all: Vec<String> =
            self.cmd(&["--zone", zone, "--list-sources"]).split_whitespace().map(str::to_owned).collect();
        all.sort();
        all
    }

    pub(super) fn config(&self, patch: Value) -> Value {
        patched(config(&self.world, json!({"backend": "firewalld"})), patch)
    }
}

impl Drop for Firewalld {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the addresses of containers in the form of a zone's sources.
pub(super) fn of(pods: &[&Pod<'_>]) -> Vec<String> {
    let hosts = |pod: &&Pod<'_>| [format!("{}/32", pod.address(0)), format!("{}/128", pod.address(1))];
    let mut all: Vec<String> = pods.iter().flat_map(hosts).collect();
    all.sort();
    all
}

pub(super) fn del_without_result(pod: &Pod<'_>, config: &Value) {
    pod.invocation(&bin_dir(), "DEL", config, None).run().success();
}
