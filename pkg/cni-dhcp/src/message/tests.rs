use cni::result::{AddResult, Route};

use super::*;
use proptest::prelude::*;

pub(crate) fn client() -> Client {
    Client {
        mac: [2, 0, 0, 0, 0, 7],
        id: b"\0c/net/eth0".to_vec(),
        request: DEFAULT_REQUEST.to_vec(),
        provide: vec![(12, b"pod".to_vec())],
        answers: ReplyMode::Unicast,
    }
}

/// A server's message. `options` without the end.
pub(crate) fn from_server(xid: u32, address: [u8; 4], options: &[&[u8]]) -> Vec<u8> {
    let mut bytes = vec![0; 236];
    bytes[..3].copy_from_slice(&[2, 1, 6]);
    bytes[4..8].copy_from_slice(&xid.to_be_bytes());
    bytes[16..20].copy_from_slice(&address);
    bytes[28..34].copy_from_slice(&client().mac);
    bytes.extend([99, 130, 83, 99]);
    options.iter().for_each(|option| bytes.extend(*option));
    bytes.push(255);
    bytes
}

const SERVER: &[u8] = &[54, 4, 10, 0, 0, 1];
const MASK: &[u8] = &[1, 4, 255, 255, 255, 0];

fn acked(options: &[&[u8]]) -> Option<LeaseParameters> {
    let all = [&[&[53, 1, 5][..], SERVER, MASK][..], options].concat();
    match client().read(&from_server(1, [10, 0, 0, 9], &all), 1) {
        Some(Reply::Ack(terms)) => Some(terms),
        _ => None,
    }
}

#[test]
fn messages_have_the_options_of_their_kind() {
    let terms = &acked(&[]).unwrap();
    let codes = |ask: Ask<'_>| {
        let bytes = client().write(ask, 7).unwrap();
        assert!(bytes.len() >= MIN_LENGTH && bytes[4..8] == [0, 0, 0, 7]);
        let message = DhcpPacket::new_checked(&bytes).unwrap();
        (message.options().map(|option| option.kind).collect::<Vec<u8>>(), message.client_ip())
    };
    let none = Ipv4Addr::UNSPECIFIED;
    assert_eq!(codes(Ask::Discover), (vec![12, 53, 55, 57, 61], none));
    assert_eq!(codes(Ask::Request(terms)), (vec![12, 50, 53, 54, 55, 57, 61], none));
    assert_eq!(codes(Ask::Confirm(terms.cidr)), (vec![12, 50, 53, 55, 57, 61], none));
    assert_eq!(codes(Ask::Renew(terms)), (vec![12, 53, 55, 57, 61], terms.address()));
    assert_eq!(codes(Ask::Release(terms)), (vec![53, 54, 61], terms.address()));
}

#[test]
fn a_provided_identifier_is_in_the_release_too() {
    let client = Client { id: b"mine".to_vec(), ..client() };
    let bytes = client.write(Ask::Release(&acked(&[]).unwrap()), 7).unwrap();
    assert!(bytes.windows(6).any(|window| window == [61, 4, b'm', b'i', b'n', b'e']));
}

#[test]
fn the_broadcast_flag_is_set_only_if_requested() {
    let flag = |answers| Client { answers, ..client() }.write(Ask::Discover, 1).unwrap()[10];
    assert_eq!((flag(ReplyMode::Unicast), flag(ReplyMode::Broadcast)), (0, 0x80));
}

#[test]
fn answers_for_others_are_ignored() {
    let offer = from_server(1, [10, 0, 0, 9], &[&[53, 1, 2], SERVER, MASK]);
    assert!(client().read(&offer, 1).is_some());
    assert_eq!(client().read(&offer, 2), None);
    for at in [0, 2, 30, 237] {
        let mut other = offer.clone();
        other[at] ^= 1;
        assert_eq!(client().read(&other, 1), None, "byte {at}");
    }
}

#[test]
fn times_that_contradict_each_other_are_replaced() {
    let times = |options: &[&[u8]]| acked(options).map(|terms| (terms.seconds, terms.t1, terms.t2));
    assert_eq!(times(&[]), Some((3600, 1800, 3150)));
    assert_eq!(times(&[&[51, 4, 0, 0, 0, 100], &[58, 4, 0, 0, 0, 20], &[59, 4, 0, 0, 0, 30]]), Some((100, 20, 30)));
    assert_eq!(times(&[&[51, 4, 0, 0, 0, 100], &[58, 4, 0, 0, 0, 40], &[59, 4, 0, 0, 0, 30]]), Some((100, 50, 87)));
    assert_eq!(times(&[&[51, 4, 0, 0, 0, 0]]), None);
    // No server makes the client renew without a pause.
    assert_eq!(times(&[&[51, 4, 0, 0, 0, 100], &[58, 4, 0, 0, 0, 0], &[59, 4, 0, 0, 0, 1]]), Some((100, 10, 10)));
    assert_eq!(times(&[&[51, 4, 0, 0, 0, 1]]), Some((1, 1, 1)));
}

#[test]
fn impossible_addresses_and_masks_are_refused() {
    for (address, mask) in [([0; 4], [255, 255, 255, 0]), ([224, 0, 0, 1], [255; 4]), ([10, 0, 0, 9], [255, 0, 255, 0])]
    {
        let mask = [&[1, 4][..], &mask].concat();
        assert_eq!(client().read(&from_server(1, address, &[&[53, 1, 5], SERVER, &mask]), 1), None);
    }
}

#[test]
fn classless_routes_replace_the_others() {
    let router = &[3, 4, 10, 0, 0, 1][..];
    let classful = &[33, 16, 10, 0, 0, 0, 10, 0, 0, 2, 192, 168, 1, 0, 10, 0, 0, 3][..];
    let routes = |options: &[&[u8]]| -> Vec<(String, Option<String>, Option<u8>)> {
        let routes =
            acked(options).unwrap().result(&RouteChoices { priority: Some(5), ..RouteChoices::default() }).routes;
        assert!(routes.iter().all(|route| route.priority == Some(5)));
        routes.iter().map(|route| (route.dst.to_string(), route.gw.map(|gw| gw.to_string()), route.scope)).collect()
    };
    let via = |dst: &str, gw: &str| (dst.to_owned(), Some(gw.to_owned()), None);
    let all = [via("10.0.0.0/8", "10.0.0.2"), via("192.168.1.0/24", "10.0.0.3"), via("0.0.0.0/0", "10.0.0.1")];
    assert_eq!(routes(&[router, classful]), all);
    let classless = &[121, 14, 16, 10, 9, 10, 0, 0, 4, 24, 10, 8, 7, 0, 0, 0, 0][..];
    let only = [via("10.9.0.0/16", "10.0.0.4"), ("10.8.7.0/24".into(), None, Some(253))];
    assert_eq!(routes(&[router, classful, &[&[121, 15], &classless[2..]].concat()]), only);
    assert_eq!(routes(&[router, &[121, 2, 33, 1]]), [via("0.0.0.0/0", "10.0.0.1")], "a wrong one counts as absent");
}

#[test]
fn host_bits_of_routes_are_cleared() {
    let dsts = |option: &[u8]| -> Vec<String> {
        let routes = acked(&[option]).unwrap().result(&RouteChoices::default()).routes;
        routes.iter().map(|route| route.dst.to_string()).collect()
    };
    assert_eq!(dsts(&[121, 8, 20, 10, 9, 0xff, 10, 0, 0, 4]), ["10.9.240.0/20"]);
    assert_eq!(dsts(&[33, 8, 10, 1, 2, 3, 10, 0, 0, 2]), ["10.0.0.0/8"]);
}

#[test]
fn routes_of_the_configuration_are_added_to_the_lease() {
    let terms = acked(&[&[3, 4, 10, 0, 0, 1], &[26, 2, 0x23, 0x28]]).unwrap();
    let route = |dst: &str, gw: Option<&str>| Route::new(dst.parse().unwrap(), gw.map(|gw| gw.parse().unwrap()));
    let added = [route("10.9.0.0/16", None), route("10.8.0.0/16", Some("10.0.0.8")), route("fd00::/8", None)];
    let choices = RouteChoices { priority: Some(5), link_mtu: Some(1500), routes: &added };
    let result = terms.result(&choices);
    let written = |result: &AddResult| -> Vec<String> {
        let gw = |route: &Route| route.gw.map(|gw| gw.to_string()).unwrap_or_default();
        result.routes.iter().map(|route| format!("{} {}", route.dst, gw(route))).collect()
    };
    assert_eq!(written(&result), ["0.0.0.0/0 10.0.0.1", "10.9.0.0/16 10.0.0.1", "10.8.0.0/16 10.0.0.8", "fd00::/8 "]);
    let is_complete = |route: &Route| route.mtu == Some(1500) && route.priority == Some(5);
    assert!(result.routes.iter().all(is_complete), "{:?}", result.routes);
    let default = [route("0.0.0.0/0", Some("10.0.0.2"))];
    let replaced = terms.result(&RouteChoices { routes: &default, ..RouteChoices::default() });
    assert_eq!(written(&replaced), ["0.0.0.0/0 10.0.0.2"]);
    assert_eq!(replaced.routes[0].mtu, Some(9000), "the MTU of the link is not known");
}

#[test]
fn name_servers_and_domains_are_in_the_result() {
    let search = &[119, 15, 1, b'a', 2, b'd', b'e', 0, 1, b'b', 192, 2, 3, b'x', b'\n', b'y', 0][..];
    let dns = acked(&[&[6, 4, 10, 0, 0, 1], &[15, 4, b'a', b'.', b'd', b'e'], search])
        .unwrap()
        .result(&RouteChoices::default())
        .dns;
    assert_eq!((dns.nameservers, dns.domain.as_str()), (vec!["10.0.0.1".to_owned()], "a.de"));
    assert_eq!(dns.search, ["a.de", "b.de"], "a name with a newline is left out");
    assert_eq!(acked(&[&[15, 3, b'a', b'\n', b'b']]).unwrap().domain, "");
}

#[test]
fn an_option_that_was_not_requested_is_not_used() {
    let client = Client { request: vec![3], ..client() };
    let ack = from_server(1, [10, 0, 0, 9], &[&[53, 1, 5], SERVER, MASK, &[6, 4, 10, 0, 0, 1], &[3, 4, 10, 0, 0, 1]]);
    let Some(Reply::Ack(terms)) = client.read(&ack, 1) else { panic!() };
    assert_eq!((terms.nameservers.len(), terms.routers.len()), (0, 1));
}

proptest! {
    #[test]
    fn any_options_are_read_or_refused(options: Vec<u8>, head: [u8; 40], length in 0..300_usize) {
        let mut bytes = from_server(1, [10, 0, 0, 9], &[&[53, 1, 5], SERVER, MASK, &options]);
        if let Some(Reply::Ack(terms)) = client().read(&bytes, 1) {
            terms.result(&RouteChoices::default());
        }
        bytes[..40].copy_from_slice(&head);
        bytes.truncate(length);
        let _ = client().read(&bytes, 1);
    }
}
