//! STATUS: how full the sets are, without the lock.

use super::*;

#[test]
fn status_counts_without_links_and_creates_nothing() {
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
    fs::remove_dir_all(net.links()).unwrap();
    assert!(net.store.usage(&pools).unwrap()[0].is_exhausted());
}
