//! Measures the floor: the time that the kernel alone needs for an attachment of bridge with
//! host-local.
//!
//! This process makes the attachment itself, with the fewest requests that lead to the same state.
//! Nothing is checked, and nothing is undone after a failure. The requests are those of the crate
//! cni-linux, so the floor lacks everything else that a plugin does.

use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cni::cidr::Cidr;
use cni::machine::{Child, Machine, Output, RunError};
use cni_linux::{Dad, Mac, Netlink, Netns, Route, VethSpec, Watch};
use nix::sys::resource::UsageWho;

use crate::call::{Cost, cpu_time, milliseconds_since};
use crate::error::{Doing as _, Result};
use crate::world::run;

/// How long the port may take until it forwards packets.
const DEADLINE: Duration = Duration::from_secs(10);

/// Makes attachments to the bridge `br0` of the current node without a plugin.
#[derive(Debug)]
pub(crate) struct KernelAttacher {
    data: PathBuf,
}

impl KernelAttacher {
    /// Creates `br0` on the current node, up and with the gateway's address. `data` is the folder
    /// of the reservations.
    pub(crate) fn new(data: &Path) -> Result<KernelAttacher> {
        run(&["ip", "link", "add", "br0", "type", "bridge"])?;
        run(&["ip", "addr", "add", "10.1.0.1/16", "dev", "br0"])?;
        run(&["ip", "link", "set", "br0", "up"])?;
        Ok(KernelAttacher { data: data.to_owned() })
    }

    /// Makes an attachment with an address of this round, and removes it. Returns the costs of the
    /// ADD, of the whole DEL, and of the RTM_DELLINK in it.
    pub(crate) fn measure(&self, netns: &Path, round: usize) -> Result<Vec<(&'static str, Cost)>> {
        // Host 1 is the gateway. There are far fewer rounds than addresses.
        let [.., high, low] = (round + 10).to_be_bytes();
        let address = Ipv4Addr::new(10, 1, high, low);
        let ((reservation, host, link), add) = timed(|| {
            let reservation = self.reserve(address)?;
            let (host, link) = attach(netns, address).doing("failed to make an attachment without a plugin")?;
            Ok((reservation, host, link))
        })?;
        let (dellink, del) = timed(|| {
            let delete = || host.delete_link(link).doing("failed to remove an attachment without a plugin");
            let ((), dellink) = timed(delete)?;
            fs::remove_file(&reservation).doing(format_args!("failed to remove {}", reservation.display()))?;
            Ok(dellink)
        })?;
        Ok(vec![("ADD", add), ("DEL", del), ("RTM_DELLINK", dellink)])
    }

    /// Reserves the address as host-local does, under its lock, and returns the reservation's file.
    fn reserve(&self, address: Ipv4Addr) -> Result<PathBuf> {
        let path = self.data.join(address.to_string());
        let write = || -> io::Result<()> {
            let lock = File::options().create(true).truncate(false).write(true).open(self.data.join("lock"))?;
            lock.lock()?;
            fs::write(&path, "floor\r\neth0")?;
            fs::write(self.data.join("last_reserved_ip.0"), address.to_string())
        };
        write().doing(format_args!("failed to reserve {address} in {}", self.data.display()))?;
        Ok(path)
    }
}

/// Makes an attachment as the bridge plugin does: creates a veth pair between bridge and container,
/// sets the alias of the node's end and the container's sysctls, configures the container's end,
/// waits until the node's end forwards, and announces the address. Returns the connection to the
/// node's namespace and the index of the node's end.
fn attach(netns: &Path, address: Ipv4Addr) -> cni_linux::Result<(Netlink, u32)> {
    let netns = Netns::open(netns)?;
    let host = Netlink::open()?;
    let bridge = host.link("br0")?.index;
    // Subscribed before the port exists, so that no change of it is missed.
    let watch = Watch::open()?;
    let octets = address.octets();
    let mac = |first: u8| Mac([first, 0, octets[0], octets[1], octets[2], octets[3]]);
    let pair = host.create_veth(&VethSpec {
        master: Some(bridge),
        up: true,
        alias: Some("cni:benchnet/floor/eth0"),
        peer_netns: Some(&netns),
        ..VethSpec::new("vethfloor", mac(6), "eth0", mac(2))
    })?;
    let container = netns.run(|| {
        for (sysctl, value) in [("ipv6/conf/eth0/accept_dad", "0"), ("ipv4/conf/eth0/arp_notify", "1")] {
            // A kernel without IPv6 has no `accept_dad`.
            let _ = fs::write(format!("/proc/sys/net/{sysctl}"), value);
        }
        Netlink::open()
    })??;
    if let Some(cidr) = Cidr::new(IpAddr::V4(address), 16) {
        container.add_address(pair.peer_index, cidr, Dad::Skip)?;
    }
    container.set_up(pair.peer_index)?;
    let gateway = IpAddr::V4(Ipv4Addr::new(10, 1, 0, 1));
    container.add_route(&Route::new(Cidr::default_route(gateway), Some(gateway), pair.peer_index))?;
    host.wait_port_forwarding(&watch, pair.index, Instant::now() + DEADLINE, &Uninterrupted)?;
    // Because of `arp_notify`, setting the MAC makes the kernel announce the address.
    container.set_mac(pair.peer_index, mac(2))?;
    Ok((host, pair.index))
}

/// A machine for waits that no signal interrupts: a signal ends this program at once.
#[derive(Debug)]
struct Uninterrupted;

impl Machine for Uninterrupted {
    fn is_own_netns(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }

    fn terminated(&self) -> bool {
        false
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn run(&self, _: &Child<'_>) -> Result<Output, RunError> {
        Err(RunError::Start(io::ErrorKind::Unsupported.into()))
    }
}

/// Runs `work`, and returns its result and its cost. The CPU time is that of this process.
fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, Cost)> {
    let before = cpu_time(UsageWho::RUSAGE_SELF)?;
    let begin = Instant::now();
    let value = work()?;
    let wall = milliseconds_since(begin);
    Ok((value, Cost { wall, cpu: cpu_time(UsageWho::RUSAGE_SELF)? - before }))
}
