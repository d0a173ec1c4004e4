//! Finds out what this machine supports, once per process, by trying it on a separate node.
//!
//! A probe returns `Ok` or the reason, for [`require!`](crate::require). Versions are not compared,
//! because kernels are configured and patched differently.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use crate::Node;

/// The outcome of a probe: `Err` has the reason why something is not supported.
pub type Probed = Result<(), String>;

/// Probes for bridges that filter by VLAN.
pub fn vlan_filtering() -> Probed {
    let argv = ["ip", "link", "add", "probe0", "type", "bridge", "vlan_filtering", "1"];
    once("the kernel's bridges have no VLAN filtering", &[&argv])
}

/// Probes for VLAN interfaces.
pub fn vlan_links() -> Probed {
    let base = ["ip", "link", "add", "base0", "type", "veth", "peer", "name", "base1"];
    let argv = ["ip", "link", "add", "link", "base0", "name", "probe0", "type", "vlan", "id", "7"];
    once("the kernel has no VLAN interfaces", &[&base, &argv, &["ip", "link", "del", "base0"]])
}

/// Probes for dummy interfaces.
pub fn dummy() -> Probed {
    let argv = ["ip", "link", "add", "probe0", "type", "dummy"];
    once("the kernel has no dummy interfaces", &[&argv, &["ip", "link", "del", "probe0"]])
}

/// Probes for bonds.
pub fn bond() -> Probed {
    let argv = ["ip", "link", "add", "probe0", "type", "bond"];
    once("the kernel has no bonds", &[&argv, &["ip", "link", "del", "probe0"]])
}

/// Probes for VRFs.
pub fn vrf() -> Probed {
    let argv = ["ip", "link", "add", "probe0", "type", "vrf", "table", "7"];
    once("the kernel has no VRFs", &[&argv, &["ip", "link", "del", "probe0"]])
}

/// Probes for ipvlan interfaces in the newest mode, `l3s`.
pub fn ipvlan() -> Probed {
    let base = ["ip", "link", "add", "base0", "type", "veth", "peer", "name", "base1"];
    let argv = ["ip", "link", "add", "link", "base0", "name", "probe0", "type", "ipvlan", "mode", "l3s"];
    once("the kernel has no ipvlan interfaces", &[&base, &argv, &["ip", "link", "del", "base0"]])
}

/// Probes for SCTP sockets.
pub fn sctp() -> Probed {
    let opened = socket(AddressFamily::Inet6, SockType::Stream, SockFlag::SOCK_CLOEXEC, SockProtocol::Sctp);
    opened.map(drop).map_err(|errno| format!("the kernel has no SCTP: {}", errno.desc()))
}

/// Probes for the program `nft` and nf_tables in the bridge family, which `macspoofchk` needs.
pub fn nft_bridge() -> Probed {
    tool("nft")?;
    let table = ["nft", "add table bridge probe"];
    once("no nf_tables in the bridge family", &[&table, &["nft", "delete table bridge probe"]])
}

/// Probes for the program `nft` and nf_tables in the inet family.
pub fn nft() -> Probed {
    tool("nft")?;
    once("no nf_tables in the inet family", &[&["nft", "add table inet probe"], &["nft", "delete table inet probe"]])
}

/// Probes for a working `iptables -t nat`.
pub fn iptables() -> Probed {
    tool("iptables")?;
    once("iptables does not work here", &[&["iptables", "-w", "-t", "nat", "-S", "POSTROUTING"]])
}

/// Probes for a program in `PATH` or the system folders.
pub fn tool(name: &str) -> Probed {
    if has_tool(name) { Ok(()) } else { Err(format!("no program {name} on this machine")) }
}

/// Probes for a plugin in the folder under test.
pub fn plugin(name: &str) -> Probed {
    let path = crate::bin_dir().join(name);
    if path.is_file() { Ok(()) } else { Err(format!("no {name} in {}", crate::bin_dir().display())) }
}

/// Probes for Go's plugins.
pub fn go_plugins() -> Probed {
    let dir = crate::go_bin_dir();
    let missing = ["bridge", "host-local", "loopback"].into_iter().find(|name| !dir.join(name).is_file());
    missing.map_or(Ok(()), |name| Err(format!("no Go plugin {name} in {}; set CNI_GO_BIN_DIR", dir.display())))
}

/// Returns the path of the DHCP server dnsmasq.
pub fn dnsmasq() -> Result<PathBuf, String> {
    program("dhcp-servers/dnsmasq-base/root", "usr/sbin/dnsmasq", "no dnsmasq (Debian's package dnsmasq-base)")
}

/// Returns the path of the DHCP server Kea.
pub fn kea() -> Result<PathBuf, String> {
    let missing = "no kea-dhcp4 (Debian's package kea-dhcp4-server)";
    program("dhcp-servers/kea-dhcp4-server/root", "usr/sbin/kea-dhcp4", missing)
}

/// Returns the path of the DHCPv6 server Kea.
pub fn kea6() -> Result<PathBuf, String> {
    let missing = "no kea-dhcp6 (Debian's package kea-dhcp6-server)";
    program("dhcp-servers/kea-dhcp6-server/root", "usr/sbin/kea-dhcp6", missing)
}

/// Returns the path of a program of Prometheus: `promtool` or `prometheus-node-exporter`.
pub fn prometheus(name: &str) -> Result<PathBuf, String> {
    program("prometheus/root", &format!("usr/bin/{name}"), &format!("no {name} (Debian's package)"))
}

/// Returns the path of etcd, beside which etcdctl lies.
pub fn etcd() -> Result<PathBuf, String> {
    let missing = "no etcd (Debian's packages etcd-server and etcd-client)";
    program("etcd/root", "usr/bin/etcdctl", missing)?;
    program("etcd/root", "usr/bin/etcd", missing)
}

/// Returns the path of radvd, which advertises IPv6 prefixes.
pub fn radvd() -> Result<PathBuf, String> {
    program("dhcp-servers/radvd/root", "usr/sbin/radvd", "no radvd (Debian's package)")
}

/// Returns the folders with the programs of iptables, sorted: this machine's, and those of the
/// other releases that `scripts/test` has unpacked into the target folder.
pub fn iptables_releases() -> Result<Vec<PathBuf>, String> {
    tool("iptables-nft")?;
    let mut folders = vec!["/usr/sbin".into()];
    for releases in unpacked("iptables")? {
        let found = releases.read_dir().into_iter().flatten().flatten().map(|release| release.path().join("bin"));
        folders.extend(found.filter(|bin| bin.is_dir()));
    }
    if folders.len() < 2 {
        return Err("no other release of iptables in the target folder: scripts/test unpacks them there".to_owned());
    }
    folders.sort();
    Ok(folders)
}

/// Returns the folder into which `scripts/test` has unpacked firewalld. Also probes for nf_tables
/// and D-Bus, which firewalld needs.
pub fn firewalld() -> Result<PathBuf, String> {
    nft()?;
    dbus_daemon()?;
    let root = unpacked("firewalld/root")?.into_iter().find(|path| path.join("usr/sbin/firewalld").is_file());
    root.ok_or_else(|| "no firewalld in the target folder: scripts/test unpacks Debian's package there".to_owned())
}

/// Returns the path of `dbus-daemon`.
pub fn dbus_daemon() -> Result<PathBuf, String> {
    program("firewalld/root", "usr/bin/dbus-daemon", "no dbus-daemon (Debian's package)")
}

/// Returns the path of a program: the one below `root` in the target folder, where `scripts/test`
/// has unpacked it, or this machine's.
fn program(root: &str, path: &str, missing: &str) -> Result<PathBuf, String> {
    let roots = unpacked(root)?.into_iter().chain(["/".into()]);
    roots.map(|root| root.join(path)).find(|path| path.is_file()).ok_or_else(|| missing.to_owned())
}

/// Returns the paths at which a file may be that `scripts/test` has unpacked into the target
/// folder.
fn unpacked(path: &str) -> Result<Vec<PathBuf>, String> {
    let test = std::env::current_exe().map_err(|error| error.to_string())?;
    Ok(test.ancestors().map(|folder| folder.join(path)).collect())
}

/// Probes for a release of Go's plugins that supports nftables: the releases that support version
/// 1.1.0 of the specification do.
pub fn go_nftables() -> Probed {
    go_plugins()?;
    let program = crate::go_bin_dir().join("portmap");
    let output = Command::new(&program).env("CNI_COMMAND", "VERSION").stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{}: {error}", program.display()))?;
    let has_nftables = String::from_utf8_lossy(&output.stdout).contains("\"1.1.0\"");
    if has_nftables {
        Ok(())
    } else {
        Err(format!("the Go plugins in {} do not support nftables", crate::go_bin_dir().display()))
    }
}

/// Whether a program is in `PATH` or the system folders.
pub(crate) fn has_tool(name: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    let folders = path.split(':').chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"]);
    folders.filter(|folder| !folder.is_empty()).any(|folder| Path::new(folder).join(name).is_file())
}

/// Runs the commands `steps` on a new node, unless an earlier call with the same `reason` has done
/// so, and returns the outcome. The first one that fails decides; `reason` is the beginning of the
/// error.
fn once(reason: &'static str, steps: &[&[&str]]) -> Probed {
    static PROBED: Mutex<BTreeMap<&str, Probed>> = Mutex::new(BTreeMap::new());
    let probe = || {
        let node = Node::new();
        for step in steps {
            let ran = node.run(step);
            if !ran.ok {
                // An earlier step's links may still be there.
                node.abandon();
                return Err(format!("{reason}: `{}`: {}", step.join(" "), ran.stderr.trim()));
            }
        }
        Ok(())
    };
    PROBED.lock().unwrap().entry(reason).or_insert_with(probe).clone()
}
