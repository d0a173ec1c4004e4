//! Tests changes that the index on disk does not have: it must not be trusted then.

use super::*;

#[test]
fn a_change_after_reading_the_index_is_noticed() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    net.add("a", &pool).unwrap();
    let mut locked = net.lock();
    locked.reserved_by(&owner("a")).unwrap();
    net.write("10.0.0.9", "y\r\neth0");
    locked.reserve(&owner("b"), &pool, &Requested::none()).unwrap();
    drop(locked);
    assert_eq!(net.del("y"), ["10.0.0.9"]);
}

#[test]
fn an_unnoticed_removal_is_found_before_reporting_exhaustion() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/29"]);
    for id in ["a", "b", "c", "d"] {
        net.add(id, &pool).unwrap();
    }
    let mut locked = net.lock();
    assert!(locked.begin_change().is_ok_and(|fresh| fresh));
    // Without the lock, in the few microseconds between the comparison and the new stamp.
    fs::remove_file(net.path("10.0.0.3")).unwrap();
    let folder::LinkOutcome::Created(record) =
        locked.folder.create("10.0.0.6".parse().unwrap(), "e\r\neth0", 0, &mut |_| ()).unwrap()
    else {
        panic!("10.0.0.6 was free");
    };
    locked.finish_change(|index| index.put(&record));
    drop(locked);
    assert_eq!(net.store.usage(&pool).unwrap()[0].used, 5, "so the index was deceived");
    assert_eq!(net.add("f", &pool).unwrap(), ["10.0.0.3"]);
}
