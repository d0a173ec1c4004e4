use super::*;

pub(crate) const SERVER: [u8; 4] = [0, 3, 0, 1];
pub(crate) const ADDRESS: &str = "2001:db8::5";

pub(crate) fn client() -> Client {
    Client { mac: [2, 0, 0, 0, 0, 7], duid: vec![0, 4, 7], iaid: Some(9) }
}

pub(crate) fn option(code: u16, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_option(&mut bytes, code, data);
    bytes
}

/// An association of the client with these times, and these options.
pub(crate) fn association(t1: u32, t2: u32, nested: &[u8]) -> Vec<u8> {
    option(3, &[&9_u32.to_be_bytes()[..], &t1.to_be_bytes(), &t2.to_be_bytes(), nested].concat())
}

pub(crate) fn address(text: &str, preferred: u32, valid: u32) -> Vec<u8> {
    let octets = text.parse::<Ipv6Addr>().unwrap().octets();
    option(5, &[&octets[..], &preferred.to_be_bytes(), &valid.to_be_bytes()].concat())
}

/// An answer of the server to the client.
pub(crate) fn answer(kind: u8, xid: u32, server: &[u8], options: &[u8]) -> Vec<u8> {
    let header = (u32::from(kind) << 24 | (xid & XID_MASK)).to_be_bytes();
    [&header[..], &option(1, &client().duid), &option(2, server), options].concat()
}

fn read(options: &[u8]) -> Option<Reply> {
    client().read(&answer(7, 5, &SERVER, options), 5)
}

fn granted(options: &[u8]) -> Option<(String, u32, u32, u32)> {
    match read(options)? {
        Reply::Ack(terms) => Some((terms.cidr.to_string(), terms.seconds, terms.t1, terms.t2)),
        reply => panic!("{reply:?}"),
    }
}

#[test]
fn messages_have_the_options_of_their_kind() {
    let Some(Reply::Ack(terms)) = read(&association(0, 0, &address(ADDRESS, 100, 100))) else { panic!() };
    let codes = |ask| {
        let bytes = client().write(ask, 0xff12_3456, 70);
        assert_eq!(bytes[1..4], [0x12, 0x34, 0x56]);
        let codes: Vec<u16> = options(&bytes[4..]).unwrap().iter().map(|(code, _)| *code).collect();
        (bytes[0], codes)
    };
    assert_eq!(codes(Ask::Discover), (1, vec![1, 8, 3, 6]));
    assert_eq!(codes(Ask::Request(&terms)), (3, vec![1, 2, 8, 3, 6]));
    assert_eq!(codes(Ask::Renew(&terms)), (5, vec![1, 2, 8, 3, 6]));
    assert_eq!(codes(Ask::Rebind(&terms)), (6, vec![1, 8, 3, 6]));
    assert_eq!(codes(Ask::Release(&terms)), (8, vec![1, 2, 8, 3]));
    assert_eq!(codes(Ask::Decline(&terms)), (9, vec![1, 2, 8, 3]));
    let stateless = Client { iaid: None, ..client() };
    assert_eq!(stateless.write(Ask::Discover, 5, 0)[0], 11);
    let renewal = client().write(Ask::Renew(&terms), 5, 70);
    assert!(renewal.windows(28).any(|window| window == address(ADDRESS, 0, 0)), "the address is in the message");
}

#[test]
fn times_of_zero_follow_from_the_preferred_lifetime() {
    let leased = |t1, t2, preferred, valid| granted(&association(t1, t2, &address(ADDRESS, preferred, valid)));
    let times = |seconds, t1, t2| Some(("2001:db8::5/128".to_owned(), seconds, t1, t2));
    assert_eq!(leased(0, 0, 1000, 2000), times(2000, 500, 800));
    assert_eq!(leased(60, 90, 1000, 2000), times(2000, 60, 90));
    assert_eq!(leased(0, 0, u32::MAX, u32::MAX).unwrap().1, u32::MAX);
    // Out of order, and a T1 that the T2 of the preferred lifetime precedes.
    assert_eq!(leased(90, 60, 1000, 2000), None);
    assert_eq!(leased(900, 0, 1000, 2000), times(2000, 1000, 1750));
}

#[test]
fn invalid_addresses_are_skipped_and_ended_ones_are_refusals() {
    for (text, preferred, valid) in
        [("::", 1, 1), ("::1", 1, 1), ("ff02::1", 1, 1), ("fe80::5", 1, 1), ("::ffff:1.2.3.4", 1, 1), (ADDRESS, 9, 8)]
    {
        let invalid = address(text, preferred, valid);
        assert_eq!(read(&association(0, 0, &invalid)), None, "{text}");
        let both = [invalid, address("2001:db8::6", 100, 100)].concat();
        assert_eq!(granted(&association(0, 0, &both)).unwrap().0, "2001:db8::6/128");
    }
    let nak = Some(Reply::Nak(Server::Duid(SERVER.to_vec())));
    assert_eq!(read(&association(0, 0, &address(ADDRESS, 0, 0))), nak);
    for status in [2, 3, 4] {
        assert_eq!(read(&association(0, 0, &option(13, &[0, status]))), nak);
        assert_eq!(read(&option(13, &[0, status])), nak);
    }
    // A failure without a reason, and one that the client does not know.
    for status in [1, 5, 99] {
        assert_eq!(read(&option(13, &[0, status])), None);
        assert_eq!(read(&association(0, 0, &option(13, &[0, status]))), None);
    }
}

#[test]
fn answers_of_others_are_ignored() {
    let options = association(0, 0, &address(ADDRESS, 100, 100));
    let valid = answer(7, 5, &SERVER, &options);
    assert!(client().read(&valid, 5).is_some());
    assert_eq!(client().read(&valid, 6), None, "another transaction");
    assert_eq!(Client { duid: vec![0, 4, 8], ..client() }.read(&valid, 5), None, "another client");
    let other = Client { iaid: Some(8), ..client() }.read(&valid, 5);
    assert_eq!(other, Some(Reply::Information(Information::default())), "another association");
    for server in [&[][..], &[0, 1], &[0; 131]] {
        assert_eq!(client().read(&answer(7, 5, server, &options), 5), None, "{} bytes", server.len());
    }
    for kind in [0, 1, 3, 10, 12, 13] {
        assert_eq!(client().read(&answer(kind, 5, &SERVER, &options), 5), None, "kind {kind}");
    }
}

#[test]
fn no_cut_or_wrong_length_is_an_answer() {
    let nested = [address(ADDRESS, 100, 100), option(13, &[0, 0, 79, 75])].concat();
    let valid = answer(7, 5, &SERVER, &association(0, 0, &nested));
    let Some(Reply::Ack(_)) = client().read(&valid, 5) else { panic!() };
    for length in 0..valid.len() {
        let cut = client().read(&valid[..length], 5);
        assert!(matches!(cut, None | Some(Reply::Information(_))), "{length}: {cut:?}");
    }
    for nested in [&[0, 5][..], &[0, 5, 0, 9, 1], &[0, 5, 0, 2, 1, 1], &[0, 13, 0, 1, 0]] {
        assert_eq!(read(&association(0, 0, nested)), None, "{nested:?}");
    }
    assert_eq!(read(&option(3, &[0, 0, 0, 9, 0, 0])), None);
}

#[test]
fn names_and_servers_are_read_and_impossible_ones_left_out() {
    let octets = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
    let servers = [octets("2001:db8::53"), octets("ff02::1"), octets("fe80::1")].concat();
    let times = [option(1, &octets("2001:db8::123")), option(1, &[1, 2]), option(3, b"\x03ntp\x01a\0")].concat();
    let search = b"\x03lan\x07example\0\x03a\nb\0";
    let options = [option(23, &servers), option(24, search), option(56, &times)].concat();
    let Some(Reply::Information(information)) = read(&options) else { panic!() };
    let found: Vec<String> = information.nameservers.iter().map(IpAddr::to_string).collect();
    assert_eq!(found, ["2001:db8::53", "fe80::1"]);
    assert_eq!(information.search, ["lan.example"]);
    assert_eq!(information.ntp, ["2001:db8::123", "ntp.a"]);
}
