//! ADD: which files are made, who is refused, and what undoing frees.

use std::os::unix::fs::PermissionsExt;
use std::time::SystemTime;

use super::*;

#[test]
fn files_are_byte_for_byte_those_of_go() {
    let net = Net::new();
    assert_eq!(net.add(" abc\n", &sets(&["10.0.0.0/24", "fd00::/64"])).unwrap(), ["10.0.0.2", "fd00::2"]);
    assert_eq!(net.names(), ["10.0.0.2", "fd00::2", "last_reserved_ip.0", "last_reserved_ip.1", "lock"]);
    assert_eq!(fs::read_to_string(net.path("10.0.0.2")).unwrap(), "abc\r\neth0");
    assert_eq!(fs::read_to_string(net.path("last_reserved_ip.1")).unwrap(), "fd00::2");
    for (name, mode) in [("10.0.0.2", 0o600), ("last_reserved_ip.0", 0o600), ("lock", 0o750)] {
        assert_eq!(fs::metadata(net.path(name)).unwrap().permissions().mode() & 0o777, mode, "{name}");
    }
    assert_eq!(fs::metadata(net.data.path().join(".cni/net")).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn a_repeated_add_is_refused_and_changes_nothing() {
    let net = Net::new();
    let pools = sets(&["10.0.0.0/24", "10.1.0.0/24"]);
    net.add("a", &sets(&["10.1.0.0/24"])).unwrap();
    let before = net.names();
    // The first set would have an address; the second one refuses.
    let error = net.add("a", &pools).unwrap_err();
    assert_eq!(error.code(), Code::CONFLICT);
    assert_eq!(
        error.msg(),
        "failed to allocate for range 1: 10.1.0.2 has been allocated to a, duplicate allocation is not allowed"
    );
    assert_eq!(net.names(), before);
    assert_eq!(net.add_asking("a", &pools, &asking("10.0.0.9")).unwrap_err().code(), Code::CONFLICT);
    assert_eq!(net.names(), before, "a refused request frees nothing either");
}

#[test]
fn a_requested_address_that_is_held_names_its_holder() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    net.add_asking("a", &pool, &asking("10.0.0.50")).unwrap();
    assert_eq!(fs::read_to_string(net.path("last_reserved_ip.0")).unwrap(), "10.0.0.50");
    let error = net.add_asking("b", &pool, &asking("10.0.0.50")).unwrap_err();
    assert_eq!(error.code(), Code::CONFLICT);
    assert_eq!(
        error.msg(),
        "failed to allocate for range 0: requested IP address 10.0.0.50 is not available in range set \
         10.0.0.1-10.0.0.254: 10.0.0.50 is held by a eth0"
    );
    let error = net.add_asking("b", &pool, &asking("10.0.0.1")).unwrap_err();
    assert_eq!(error.msg(), "failed to allocate for range 0: requested ip 10.0.0.1 is subnet's gateway");
    assert_eq!(error.code(), Code::INVALID_CONFIG);
}

#[test]
fn exhaustion_is_code_11_and_changes_nothing() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/29"]);
    for id in ["a", "b", "c", "d", "e"] {
        net.add(id, &pool).unwrap();
    }
    let made = fs::metadata(net.path("10.0.0.2")).unwrap().modified().unwrap();
    let age = || SystemTime::now().duration_since(made).unwrap().as_secs();
    let youngest = age();
    let error = net.add("f", &pool).unwrap_err();
    let oldest = age();
    assert_eq!(error.code(), Code::TRY_AGAIN);
    assert_eq!(
        error.msg(),
        "failed to allocate for range 0: no IP addresses available in range set: 10.0.0.1-10.0.0.6; 5 of 5 are used"
    );
    let told = |age| error.details().contains(&format!("10.0.0.2 is held by a eth0 for {age} s"));
    assert!((youngest..=oldest).any(told), "{youngest} to {oldest} s: {}", error.details());
    let before = (net.names(), net.linked());
    net.add("f", &pool).unwrap_err();
    assert_eq!((net.names(), net.linked()), before);
    assert_eq!(net.del("c"), ["10.0.0.4"]);
    assert_eq!(net.add("f", &pool).unwrap(), ["10.0.0.4"]);
}

#[test]
fn a_set_with_only_gateways_is_exhausted() {
    let net = Net::new();
    let gateway = || Some("10.0.0.1".to_owned());
    let subnet = Some("10.0.0.0/29".to_owned());
    let conf = RangeConf { subnet, range_start: gateway(), range_end: gateway(), gateway: gateway() };
    let pool = RangeSets::check(&[], &RangeConf::default(), &[vec![conf]]).unwrap();
    assert_eq!(pool.sets()[0].capacity(), 0);
    let error = net.add("f", &pool).unwrap_err();
    assert_eq!((error.code(), error.details()), (Code::TRY_AGAIN, ""));
}

#[test]
fn a_blank_file_after_many_reservations_is_free() {
    let net = Net::new();
    for n in 2..100 {
        net.write(&format!("10.0.0.{n}"), &format!("c{n}\r\neth0"));
    }
    net.write("10.0.0.100", "");
    net.write("10.0.0.101", "x");
    let range =
        RangeConf { subnet: Some("10.0.0.0/24".into()), range_end: Some("10.0.0.101".into()), ..RangeConf::default() };
    let pool = RangeSets::check(&[], &RangeConf::default(), &[vec![range]]).unwrap();
    assert_eq!(net.add("a", &pool).unwrap(), ["10.0.0.100"]);
    assert_eq!(net.add("b", &pool).unwrap_err().code(), Code::TRY_AGAIN);
}

#[test]
fn exhaustion_names_the_longest_holders() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/29"]);
    for id in ["a", "b", "c", "d", "e"] {
        net.add(id, &pool).unwrap();
    }
    assert_eq!(net.del("b"), ["10.0.0.3"]);
    assert_eq!(net.add("f", &pool).unwrap(), ["10.0.0.3"]);
    let error = net.add("g", &pool).unwrap_err();
    assert!(error.details().starts_with("oldest reservations: 10.0.0.2 is held by a eth0 for"), "{}", error.details());
    assert_eq!(error.details().matches(" is held by ").count(), 3, "{}", error.details());
}

#[test]
fn an_empty_file_of_a_killed_go_plugin_is_free() {
    let net = Net::new();
    net.write("10.0.0.2", "");
    net.write("10.0.0.3", "\0\0\0\0");
    net.write("10.0.0.4", "x");
    assert_eq!(net.add("a", &sets(&["10.0.0.0/24"])).unwrap(), ["10.0.0.2"]);
    assert_eq!(net.add_asking("b", &sets(&["10.0.0.0/24"]), &asking("10.0.0.3")).unwrap(), ["10.0.0.3"]);
    assert_eq!(net.add("c", &sets(&["10.0.0.0/24"])).unwrap(), ["10.0.0.5"], "a short text is an old reservation");
    assert_eq!(fs::read_to_string(net.path("10.0.0.3")).unwrap(), "b\r\neth0");
}

#[test]
fn undoing_tries_every_address_and_reports_every_failure() {
    let net = Net::new();
    let mut locked = net.lock();
    let pools = sets(&["10.0.0.0/24", "10.1.0.0/24"]);
    let made = locked.reserve(&owner("a"), &pools, &Requested::none()).unwrap().new_reservations();
    // No folder any more, so that nothing in it can be read.
    locked.folder.file = File::open(net.path("lock")).unwrap();
    let error = locked.undo(&made).unwrap_err();
    assert_eq!(error.code(), Code::IO);
    assert!(error.msg().contains("net/10.0.0.2") && error.msg().contains("net/10.1.0.2"), "{error}");
}

#[test]
fn undo_releases_only_the_reservations_of_this_add() {
    let net = Net::new();
    let pools = sets(&["10.0.0.0/24", "10.1.0.0/24"]);
    net.write("10.5.0.1", "a\r\neth0");
    let made = net.lock().reserve(&owner("a"), &pools, &Requested::none()).unwrap().new_reservations();
    // Meanwhile the second address was released, and another container got it.
    fs::remove_file(net.path("10.1.0.2")).unwrap();
    net.write("10.1.0.2", "b\r\neth0");
    net.lock().undo(&made).unwrap();
    assert_eq!(net.names(), ["10.1.0.2", "10.5.0.1", "last_reserved_ip.0", "last_reserved_ip.1", "lock"]);
    assert_eq!(net.lock().reserved_by(&owner("a")).unwrap().len(), 1);
}

#[test]
fn undoing_an_add_keeps_a_later_reservation_of_the_owner() {
    let net = Net::new();
    let made = net.lock().reserve(&owner("a"), &sets(&["10.0.0.0/24"]), &Requested::none()).unwrap().new_reservations();
    // The inode stays in use, so that the new file cannot get it.
    fs::hard_link(net.path("10.0.0.2"), net.data.path().join("old")).unwrap();
    replace(&net, "10.0.0.2", "a\r\neth0");
    net.lock().undo(&made).unwrap();
    assert!(net.path("10.0.0.2").exists());
}

#[test]
fn a_refused_add_names_held_addresses_and_remedies() {
    let net = Net::new();
    net.write("10.7.0.9", "a");
    net.add("a", &sets(&["10.0.0.0/24", "10.1.0.0/24"])).unwrap();
    let error = net.add("a", &sets(&["10.0.0.0/24"])).unwrap_err();
    assert_eq!(
        error.details(),
        "10.0.0.2 is held by a eth0, 10.1.0.2 is held by a eth0, 10.7.0.9 is held by a; run DEL to release it, or set \"reuse\": true in ipam \
         to get it again"
    );
}

fn reusing(net: &Net) -> Locked {
    let options = Options { on_repeat: RepeatPolicy::Reuse, ..Options::new(Notes::silent(), Host::new("m", "b")) };
    Store::open(net.data.path(), "net", options).lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap()
}

fn again(net: &Net, id: &str, sets: &RangeSets, requested: &Requested) -> Result<Vec<String>> {
    let lease = reusing(net).reserve(&owner(id), sets, requested)?;
    Ok(lease.addresses.iter().map(|(_, address)| address.to_string()).collect())
}

#[test]
fn reuse_returns_the_same_addresses_and_adds_missing_ones() {
    let net = Net::new();
    let two = sets(&["10.0.0.0/24", "10.1.0.0/24"]);
    net.add("a", &sets(&["10.1.0.0/24"])).unwrap();
    net.add("b", &two).unwrap();
    let first = again(&net, "a", &two, &Requested::none()).unwrap();
    assert_eq!(first, ["10.0.0.3", "10.1.0.2"]);
    let (before, links) = (net.names(), net.linked());
    assert_eq!(again(&net, "a", &two, &Requested::none()).unwrap(), first);
    assert_eq!(again(&net, "a", &two, &asking("10.1.0.2")).unwrap(), first, "also when asked for");
    assert_eq!((net.names(), net.linked()), (before, links), "nothing is written");
    assert_eq!(fs::read_to_string(net.path("last_reserved_ip.1")).unwrap(), "10.1.0.3");
    assert_eq!(net.lock().release(&owner("a")).unwrap().len(), 2);
}

#[test]
fn reuse_of_another_address_or_another_owners_is_refused() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    net.add("a", &pool).unwrap();
    let error = again(&net, "a", &pool, &asking("10.0.0.9")).unwrap_err();
    assert_eq!(error.code(), Code::CONFLICT);
    assert!(!error.details().contains("true"), "no advice to set what is set: {error:?}");
    // The interface of this reservation is unknown.
    net.write("10.0.0.3", "old");
    assert_eq!(again(&net, "old", &pool, &Requested::none()).unwrap_err().code(), Code::CONFLICT);
    // The configuration has made a gateway of it since.
    let conf =
        RangeConf { subnet: Some("10.0.0.0/24".into()), gateway: Some("10.0.0.2".into()), ..RangeConf::default() };
    let moved = RangeSets::check(&[], &RangeConf::default(), &[vec![conf]]).unwrap();
    assert_eq!(again(&net, "a", &moved, &Requested::none()).unwrap_err().code(), Code::CONFLICT);
    assert_eq!(again(&net, "b", &pool, &asking("10.0.0.2")).unwrap_err().code(), Code::CONFLICT, "another's");
    assert_eq!(net.names(), ["10.0.0.2", "10.0.0.3", "last_reserved_ip.0", "lock"]);
}

#[test]
fn undo_of_a_reuse_releases_only_added_addresses() {
    let net = Net::new();
    net.add("a", &sets(&["10.1.0.0/24"])).unwrap();
    let lease = reusing(&net).reserve(&owner("a"), &sets(&["10.0.0.0/24", "10.1.0.0/24"]), &Requested::none()).unwrap();
    assert_eq!((lease.addresses.len(), lease.new_reservations().len()), (2, 1));
    net.lock().undo(&lease.new_reservations()).unwrap();
    assert_eq!(net.names(), ["10.1.0.2", "last_reserved_ip.0", "lock"]);
}

/// Reserves for `id` in the blocks, each written as `first-last`.
fn add_in(net: &Net, id: &str, sets: &RangeSets, blocks: &[&str]) -> Result<String, Shortage> {
    let block = |text: &&str| {
        let (first, last) = text.split_once('-').unwrap();
        (first.parse().unwrap(), last.parse().unwrap())
    };
    let blocks: Vec<_> = blocks.iter().map(block).collect();
    let lease = net.lock().reserve_in(&owner(id), sets, &Requested::none(), &blocks).unwrap();
    lease.map(|lease| lease.addresses.iter().map(|(_, address)| format!("{address} ")).collect())
}

#[test]
fn a_set_without_an_address_in_the_blocks_is_named() {
    let net = Net::new();
    let pools = sets(&["10.0.0.0/24", "fd00::/64"]);
    let (v4, v6) = ("10.0.0.8-10.0.0.9", "fd00::8-fd00::8");
    let shortage = |set| Err(Shortage { set, requested: None });
    assert_eq!(add_in(&net, "a", &pools, &[]), shortage(0));
    assert_eq!(add_in(&net, "a", &pools, &[v4]), shortage(1));
    assert_eq!(net.names(), ["lock"], "nothing is reserved");
    assert_eq!(add_in(&net, "a", &pools, &[v4, v6]), Ok("10.0.0.8 fd00::8 ".to_owned()));
    assert_eq!(add_in(&net, "b", &pools, &[v4, v6]), shortage(1));
    assert_eq!(add_in(&net, "b", &sets(&["10.0.0.0/24"]), &[v4]), Ok("10.0.0.9 ".to_owned()));
    assert_eq!(add_in(&net, "c", &sets(&["10.0.0.0/24"]), &[v4]), shortage(0));
    let occupied = ["10.0.0.8", "10.0.0.9", "fd00::8"].map(|ip| ip.parse::<IpAddr>().unwrap());
    assert_eq!(net.lock().occupied().unwrap(), occupied);
    assert_eq!(net.store.occupied(), occupied);
    fs::remove_dir_all(net.links()).unwrap();
    assert_eq!(net.store.occupied(), occupied);
}

#[test]
fn a_requested_address_must_be_in_a_block() {
    let net = Net::new();
    let pools = sets(&["10.0.0.0/24"]);
    let block = [("10.0.0.8".parse().unwrap(), "10.0.0.9".parse().unwrap())];
    let add = |address: &str| net.lock().reserve_in(&owner(address), &pools, &asking(address), &block);
    let requested = Some("10.0.0.10".parse().unwrap());
    assert_eq!(add("10.0.0.10").unwrap().unwrap_err(), Shortage { set: 0, requested });
    assert_eq!(add("10.0.0.9").unwrap().unwrap().addresses[0].1.to_string(), "10.0.0.9");
    assert_eq!(add("10.0.0.1").unwrap_err().code(), Code::INVALID_CONFIG, "the gateway comes first");
}

#[test]
fn a_reused_address_need_not_be_in_a_block() {
    let net = Net::new();
    let pools = sets(&["10.0.0.0/24"]);
    net.add("a", &pools).unwrap();
    let lease = reusing(&net).reserve_in(&owner("a"), &pools, &Requested::none(), &[]).unwrap().unwrap();
    assert_eq!(lease.addresses[0].1.to_string(), "10.0.0.2");
    assert!(lease.new_reservations().is_empty());
}
