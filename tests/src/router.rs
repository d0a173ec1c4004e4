//! IPv6 routers that advertise prefixes, in namespaces of a test.

use std::process::{Command, Stdio};

use cni_testkit::{Container, Node, probe};

use crate::lan::Process;

/// Starts radvd in a router's namespace, on its interface `eth0`, with these options and prefixes.
///
/// # Panics
/// If there is no radvd, see [`probe::radvd`].
pub fn radvd(node: &Node, router: &Container, options: &str) -> Process {
    let name = &router.id;
    let config =
        format!("interface eth0 {{ AdvSendAdvert on; MinRtrAdvInterval 3; MaxRtrAdvInterval 4; {options} }};\n");
    let config = node.file(&format!("{name}.radvd.conf"), config).display().to_string();
    let pid = node.dir().join(format!("{name}.radvd.pid")).display().to_string();
    router.set_sysctl("net/ipv6/conf/all/forwarding", "1");
    start(
        node,
        router,
        &[&probe::radvd().unwrap().display().to_string(), "-n", "-m", "stderr", "-C", &config, "-p", &pid],
    )
}

/// Starts dnsmasq in a router's namespace as a router that advertises, with these arguments.
///
/// # Panics
/// If there is no dnsmasq, see [`probe::dnsmasq`].
pub fn dnsmasq(node: &Node, router: &Container, arguments: &[&str]) -> Process {
    let program = probe::dnsmasq().unwrap().display().to_string();
    let file = |name: &str| node.dir().join(format!("{}.{name}", router.id)).display().to_string();
    let (leases, pid) = (format!("--dhcp-leasefile={}", file("leases")), format!("--pid-file={}", file("pid")));
    let argv = [&program, "--no-daemon", "--conf-file=/dev/null", "--port=0", "--interface=eth0", "--user=root"];
    router.set_sysctl("net/ipv6/conf/all/forwarding", "1");
    start(node, router, &[&argv[..], &["--enable-ra", &leases, &pid], arguments].concat())
}

/// Starts a program in a router's namespace. Its output goes to a file in the node's folder.
///
/// # Panics
/// If it cannot be started.
pub fn start(node: &Node, router: &Container, argv: &[&str]) -> Process {
    let log = std::fs::File::create(node.dir().join(format!("{}.log", router.id))).unwrap();
    let mut command = Command::new(argv[0]);
    command.args(&argv[1..]).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    Process(router.enter(|| command.spawn()).unwrap_or_else(|error| panic!("to run {}: {error}", argv[0])))
}
