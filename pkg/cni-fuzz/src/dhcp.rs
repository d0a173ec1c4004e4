//! A DHCP server's answer. Only the offered address, the mask, the times and the requested options
//! are used. Rebinding does not begin before renewal, and the lease ends after both, unless it has
//! only one second. The same input is read as the options of a DHCPv6 answer.

use cni_dhcp::message::v6;
use cni_dhcp::message::{Client, DEFAULT_REQUEST, LeaseParameters, Reply, ReplyMode, RouteChoices};

const XID: u32 = 7;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
/// The length of a message before its options.
const HEADER: usize = 240;

/// Runs the target with one input: unchanged, and changed to an answer to this client.
pub(crate) fn run(data: &[u8]) {
    check(data);
    check_v6(data);
    let mut bytes = data.to_vec();
    if bytes.len() >= HEADER {
        // A reply, on Ethernet, with addresses of 6 bytes.
        bytes[..3].copy_from_slice(&[2, 1, 6]);
        bytes[4..8].copy_from_slice(&XID.to_be_bytes());
        bytes[28..34].copy_from_slice(&MAC);
        // The magic cookie before the options.
        bytes[236..HEADER].copy_from_slice(&[99, 130, 83, 99]);
        check(&bytes);
    }
}

/// Checks what a DHCPv6 client reads from the options of an answer.
fn check_v6(data: &[u8]) {
    let client = v6::Client { mac: MAC, duid: vec![0, 4, 7], iaid: Some(7) };
    let number = XID.to_be_bytes();
    for kind in [2, 7] {
        // The type and the number of the transaction; the DUIDs of client and server.
        let header = [kind, number[1], number[2], number[3], 0, 1, 0, 3, 0, 4, 7, 0, 2, 0, 3, 0, 4, 9];
        let bytes = [&header[..], data].concat();
        let Some(Reply::Offer(lease, _) | Reply::Ack(lease)) = client.read(&bytes, XID) else { continue };
        let is_before_end = lease.t2 < lease.seconds || lease.seconds == 1;
        assert!(lease.t1 <= lease.t2 && is_before_end && lease.seconds > 0, "times out of order: {lease:?}");
        assert!(!lease.cidr.is_ipv4() && lease.cidr.prefix() == 128, "no single IPv6 address: {lease:?}");
        let dns = lease.result(&RouteChoices::default()).dns;
        let mut names = dns.nameservers.iter().chain(&dns.search).chain(&lease.ntp).flat_map(|name| name.bytes());
        assert!(names.all(|byte| byte.is_ascii_graphic()), "invalid name: {dns:?}");
    }
}

/// Checks what the client reads from an answer.
fn check(bytes: &[u8]) {
    let read_lease = |request: &[u8]| match client(request).read(bytes, XID)? {
        Reply::Offer(lease, _) | Reply::Ack(lease) => Some(lease),
        Reply::Nak(_) | Reply::Information(_) => None,
    };
    let Some(lease) = read_lease(&DEFAULT_REQUEST) else { return };
    assert_eq!(lease.address().octets(), bytes[16..20], "the offered address of {lease:?}");
    // T1 and T2 are equal if the server's are both below the client's minimum.
    let is_before_end = lease.t2 < lease.seconds || lease.seconds == 1;
    assert!(lease.t1 <= lease.t2 && is_before_end, "times out of order: {lease:?}");
    let priority = Some(5);
    let result = lease.result(&RouteChoices { priority, ..RouteChoices::default() });
    assert_eq!((result.ips.len(), result.interfaces.len()), (1, 0));
    assert!(result.routes.iter().all(|route| route.priority == priority), "wrong priority: {:?}", result.routes);
    let names = result.dns.search.iter().chain([&result.dns.domain]);
    assert!(names.flat_map(|name| name.bytes()).all(|byte| byte.is_ascii_graphic()), "invalid name: {:?}", result.dns);
    // Without requested options, only the address, the mask and the times are read.
    let bare_lease = read_lease(&[]).expect("the answer is refused if no options are requested");
    let expected = LeaseParameters {
        routers: Vec::new(),
        classless: None,
        classful: Vec::new(),
        nameservers: Vec::new(),
        domain: String::new(),
        search: Vec::new(),
        mtu: None,
        ntp: Vec::new(),
        ..lease
    };
    assert_eq!(bare_lease, expected);
}

/// Returns a client that requests these options.
fn client(request: &[u8]) -> Client {
    Client {
        mac: MAC,
        id: b"\0c/net/eth0".to_vec(),
        request: request.to_vec(),
        provide: Vec::new(),
        answers: ReplyMode::Unicast,
    }
}
