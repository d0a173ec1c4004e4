//! Announces to the neighbours on a link which hardware address an IP address has now.
//!
//! Without an announcement, packets to a reused IP address go to the hardware address of its last
//! user until the neighbours' entries expire. The kernel sends the announcements (a gratuitous ARP
//! request for each IPv4 address, an unsolicited neighbour advertisement for each IPv6 address that
//! is not tentative) when the interface's hardware address is set and two sysctls allow it.
//!
//! This crate does not send the frames itself, because closing a packet socket waits 4 to 20 ms for
//! an RCU grace period (Linux 6.18), longer than the rest of an ADD. Announce only after the
//! bridge's port forwards: before that, the frames are lost without an error.

use crate::error::Result;
use crate::link::LinkRequest;
use crate::mac::Mac;
use crate::netlink::Netlink;
use crate::sysctl;

/// Allows announcements by the interface `ifname` of the calling thread's namespace: sets the
/// sysctls `arp_notify` and `ndisc_notify` to 1. Ignores a sysctl that does not exist, such as that
/// of a family that the kernel does not support.
///
/// # Errors
/// A sysctl is not 1 and cannot be written.
pub fn allow(ifname: &str) -> Result<()> {
    for (family, setting) in [("ipv4", "arp_notify"), ("ipv6", "ndisc_notify")] {
        let key = format!("net/{family}/conf/{ifname}/{setting}");
        // Write first, because the value of a new interface is 0. If the process is not allowed to
        // write, `ensure` accepts an existing 1.
        let written = sysctl::write(&key, "1").or_else(|_| sysctl::ensure(&key, "1").map(drop));
        match written {
            Err(error) if !error.is_not_found() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

impl Netlink {
    /// Announces all addresses of an interface that is up and for which [`allow`] was called. `mac`
    /// must be its current hardware address: setting it again makes the kernel send the
    /// announcements.
    ///
    /// Does nothing for an ipvlan, whose hardware address cannot be set: the kernel announced the
    /// ipvlan's addresses when the ipvlan was set up.
    pub fn announce(&self, index: u32, mac: Mac) -> Result<()> {
        match self.set_link(LinkRequest::new(index).mac(mac), |link| {
            format!("failed to announce to neighbours that the addresses of {link} are at {mac}")
        }) {
            Err(error) if error.is_unsupported() => Ok(()),
            result => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns, output};
    use crate::{Dad, VethSpec};
    use cni_testkit::patience;
    use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
    use nix::unistd::Pid;
    use std::net::{IpAddr, UdpSocket};
    use std::thread::sleep;
    use std::time::{Duration, Instant};

    /// Keeps the calling thread on one of its processors. The packets that it sends over a veth
    /// pair then arrive in the order of sending, because each processor has one queue for them.
    fn stay_on_one_processor() {
        let mine = Pid::from_raw(0);
        let allowed = sched_getaffinity(mine).unwrap();
        let first = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu).unwrap()).unwrap();
        let mut one = CpuSet::new();
        one.set(first).unwrap();
        sched_setaffinity(mine, &one).unwrap();
    }

    #[test]
    fn a_neighbours_outdated_entry_is_corrected() {
        in_new_netns(|| {
            let (host_mac, mac, stale) = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 5]), Mac([2, 0, 0, 0, 0, 9]));
            let host = Netlink::open().unwrap();
            let netns = new_netns();
            let container = host.open_in(&netns).unwrap();
            let spec = VethSpec { up: true, ..VethSpec::new("veth0", host_mac, "eth0", mac) };
            let veth = host.create_veth(&VethSpec { peer_netns: Some(&netns), ..spec }).unwrap();
            for net in ["10.1.0.1/24", "fd00::1/64"] {
                host.add_address(veth.index, net.parse().unwrap(), Dad::Skip).unwrap();
            }
            for net in ["10.1.0.7/24", "fd00::7/64"] {
                container.add_address(veth.peer_index, net.parse().unwrap(), Dad::Skip).unwrap();
            }
            container.set_up(veth.peer_index).unwrap();
            let addresses: [IpAddr; 2] = ["10.1.0.7".parse().unwrap(), "fd00::7".parse().unwrap()];
            let known = || {
                addresses.map(|ip| {
                    let shown = output(&format!("ip neighbour show {ip} dev veth0"));
                    let mac = shown.split_whitespace().skip_while(|word| *word != "lladdr").nth(1);
                    mac.map(|mac| mac.parse::<Mac>().unwrap())
                })
            };
            for address in addresses {
                output(&format!("ip neighbour replace {address} dev veth0 lladdr {stale} nud reachable"));
            }
            stay_on_one_processor();
            let soon = patience(Duration::from_secs(20));
            let receiver = UdpSocket::bind("0.0.0.0:7").unwrap();
            receiver.set_read_timeout(Some(soon)).unwrap();
            let sender = netns.run(|| UdpSocket::bind("10.1.0.7:0")).unwrap().unwrap();
            sender.set_broadcast(true).unwrap();
            container.announce(veth.peer_index, mac).unwrap();
            // A thread of the kernel may deliver an announcement later. Once a packet that was sent
            // after it has arrived, the announcement has arrived too. The packet is a broadcast,
            // which needs no address resolution.
            sender.send_to(b"x", "10.1.0.255:7").unwrap();
            receiver.recv(&mut [0]).expect("an ordinary packet arrives");
            assert_eq!(known(), [Some(stale); 2], "not allowed, yet announced");
            netns.run(|| allow("eth0")).unwrap().unwrap();
            container.announce(veth.peer_index, mac).unwrap();
            let deadline = Instant::now() + soon;
            while known() != [Some(mac); 2] && Instant::now() < deadline {
                sleep(Duration::from_millis(1));
            }
            assert_eq!(known(), [Some(mac); 2], "{}", output("ip neighbour"));
        });
    }
}
