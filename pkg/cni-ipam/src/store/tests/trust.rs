//! When the index may be believed: changes that it could not see.

use super::*;

#[test]
fn what_changes_between_reading_the_index_and_changing_the_folder_is_seen() {
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
fn a_removal_that_nobody_could_see_is_found_before_a_range_is_called_exhausted() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/29"]);
    for id in ["a", "b", "c", "d"] {
        net.add(id, &pool).unwrap();
    }
    let mut locked = net.lock();
    assert!(locked.begin().is_ok_and(|fresh| fresh));
    // Without the lock, in the few microseconds between the comparison and the mark.
    fs::remove_file(net.path("10.0.0.3")).unwrap();
    let folder::Linked::Made(record) =
        locked.folder.create("10.0.0.6".parse().unwrap(), "e\r\neth0", 0, &mut |_| ()).unwrap()
    else {
        panic!("10.0.0.6 was free");
    };
    locked.settle(|index| index.put(&record));
    drop(locked);
    assert_eq!(net.store.usage(&pool).unwrap()[0].used, 5, "so the index was deceived");
    assert_eq!(net.add("f", &pool).unwrap(), ["10.0.0.3"]);
}
