//! STATUS: how full the sets are, without the lock.

use super::*;

#[test]
fn status_survives_a_counter_that_counts_less_than_the_gateway() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    net.add("a", &pool).unwrap();
    net.write("10.0.0.1", "another has the gateway");
    let mut locked = net.lock();
    locked.reserved_by(&owner("a")).unwrap();
    drop(locked);
    let mut file = fs::OpenOptions::new().read(true).write(true).open(net.index()).unwrap();
    let mut page = vec![0; 4096];
    std::io::Read::read_exact(&mut file, &mut page).unwrap();
    let mut header = index::header::Header::decode(&page).unwrap();
    header.counters.iter_mut().for_each(|counter| counter.used = 0);
    std::os::unix::fs::FileExt::write_all_at(&file, &header.encode(), 0).unwrap();
    assert_eq!(net.store.usage(&pool).unwrap()[0].used, 0);
}

#[test]
fn status_counts_with_and_without_an_index_and_makes_nothing() {
    let net = Net::new();
    let pools = sets(&["10.0.0.0/29", "fd00::/64"]);
    assert_eq!(net.store.usage(&pools).unwrap()[0].to_string(), "10.0.0.1-10.0.0.6: 0 of 5 used");
    assert!(!net.store.path().exists());
    net.write("10.0.0.1", "another has the gateway");
    for id in ["a", "b", "c", "d"] {
        net.add(id, &pools).unwrap();
    }
    let usage = net.store.usage(&pools).unwrap();
    assert_eq!((usage[0].used, usage[1].used, usage[0].is_exhausted()), (4, 4, false));
    net.add("e", &pools).unwrap();
    let _held = net.lock();
    assert!(net.store.usage(&pools).unwrap()[0].is_exhausted(), "answered although the lock is held");
    fs::remove_file(net.index()).unwrap();
    assert!(net.store.usage(&pools).unwrap()[0].is_exhausted());
}
