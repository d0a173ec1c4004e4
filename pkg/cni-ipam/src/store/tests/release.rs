//! DEL and GC: what goes and what stays.

use super::*;

#[test]
fn del_takes_the_exact_owner_and_the_old_form_only_without_one() {
    let net = Net::new();
    net.write("10.0.0.7", "old\n");
    net.write("10.0.0.8", "both\n");
    net.write("10.0.0.9", "both\r\neth0");
    net.write("10.0.0.10", "both\r\neth1");
    assert_eq!(net.del("absent"), [""; 0]);
    assert_eq!(net.del("both"), ["10.0.0.9"]);
    assert_eq!(net.del("both"), ["10.0.0.8"]);
    assert_eq!(net.del("old"), ["10.0.0.7"]);
    assert_eq!(net.names(), ["10.0.0.10", "lock"]);
}

#[test]
fn gc_trusts_the_file_and_not_its_link() {
    let net = Net::new();
    net.write("10.0.0.2", "gone\r\neth0");
    net.lock().reserved_by(&owner("gone")).unwrap();
    net.write("10.0.0.2", "here\r\neth0"); // in place: the folder is as it was
    assert_eq!(net.lock().gc(&[owner("here")]).unwrap().removed, []);
    assert!(net.path("10.0.0.2").exists());
    assert_eq!(net.del("here"), ["10.0.0.2"]);
}

#[test]
fn a_del_that_finds_an_edited_file_links_the_new_owner() {
    let net = Net::new();
    net.add("a", &sets(&["10.0.0.0/24"])).unwrap();
    net.write("10.0.0.2", "b\r\neth0"); // in place: the folder is as it was
    assert_eq!(net.del("a"), [""; 0]);
    assert_eq!(net.del("b"), ["10.0.0.2"]);
    assert_eq!((net.names().len(), net.linked().len()), (2, 0));
}

#[test]
fn gc_keeps_valid_and_old_form_reservations_and_foreign_files() {
    let net = Net::new();
    for (name, content) in [
        ("10.0.0.2", "a\r\neth0"),
        ("10.0.0.3", "a\r\neth1"),
        ("10.0.0.4", "a"),
        ("10.0.0.5", "b"),
        ("10.0.0.6", ""),
        ("fd00::2", "b\r\neth0"),
        ("readme", "b"),
    ] {
        net.write(name, content);
    }
    let collected = net.lock().gc(&[owner("a")]).unwrap();
    let removed: Vec<String> = collected.removed.iter().map(Reservation::to_string).collect();
    assert_eq!(removed, ["10.0.0.3 is held by a eth1", "10.0.0.5 is held by b", "fd00::2 is held by b eth0"]);
    assert_eq!((collected.kept, collected.error.is_none()), (2, true));
    assert_eq!(net.names(), ["10.0.0.2", "10.0.0.4", "10.0.0.6", "lock", "readme"]);
}

#[test]
fn gc_of_very_many_leaves_correct_links() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    for n in 2..200 {
        net.write(&format!("10.0.0.{n}"), &format!("c{n}\r\neth0"));
    }
    let collected = net.lock().gc(&[owner("c77")]).unwrap();
    assert_eq!((collected.removed.len(), collected.kept), (197, 1));
    assert_eq!(net.linked().len(), 1);
    assert_eq!(net.store.usage(&pool).unwrap()[0].used, 1);
    assert_eq!(net.add("x", &pool).unwrap(), ["10.0.0.2"]);
}

#[test]
fn chosen_reservations_are_released_unless_changed() {
    let net = Net::new();
    let sets = sets(&["10.0.0.0/24"]);
    for id in ["a", "b", "c"] {
        net.add(id, &sets).unwrap();
    }
    let mut locked = net.lock();
    let chosen: Vec<Reservation> =
        locked.list().unwrap().reservations.into_iter().filter(|held| held.id != "b").collect();
    fs::write(net.path("10.0.0.4"), "other\r\neth0").unwrap();
    let removed = locked.release_chosen(&chosen).unwrap();
    drop(locked);
    assert_eq!(removed, ["10.0.0.2".parse::<IpAddr>().unwrap()], "c's file is another's now");
    let left: Vec<String> = net.lock().list().unwrap().reservations.into_iter().map(|held| held.id).collect();
    assert_eq!(left, ["b", "other"]);
    assert_eq!(net.add("d", &sets).unwrap(), ["10.0.0.5"]);
    assert_eq!(networks(net.data.path()).unwrap(), ["net"]);
    assert_eq!(networks(Path::new("/nonexistent")).unwrap(), Vec::<String>::new());
}
