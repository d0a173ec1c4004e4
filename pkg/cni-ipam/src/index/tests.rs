//! The index against a map, and the number of its reads and writes.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

fn record(address: IpAddr, holder: Holder) -> Record {
    Record { address, inode: 1, ctime: (2, 3), mtime_nanos: 4, holder, boot: 5 }
}

fn v4(number: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + number))
}

fn v6(number: u128) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from_bits(0xfd00 << 112 | number))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn an_index_agrees_with_a_map(
        steps in prop::collection::vec((any::<bool>(), 0u32..200, prop::option::of(0u64..6)), 1..300),
    ) {
        let mut index = Index::build(&[], &Host::default()).unwrap();
        let mut model: BTreeMap<IpAddr, Holder> = BTreeMap::new();
        for (is_v4, offset, holder) in steps {
            let address = if is_v4 { v4(offset) } else { v6(u128::from(offset)) };
            match holder {
                None => {
                    index.remove(address).unwrap();
                    model.remove(&address);
                }
                Some(holder) => {
                    let holder = match holder {
                        0 => Holder::Free,
                        1 => Holder::Foreign,
                        2 => Holder::Unreadable,
                        hash => Holder::Content(hash),
                    };
                    index.put(&record(address, holder)).unwrap();
                    model.insert(address, holder);
                }
            }
            index.finish().unwrap();
        }
        for hash in 3..6 {
            let mut held = index.owned_by(hash).unwrap();
            held.sort_unstable();
            let expected: Vec<IpAddr> =
                model.iter().filter(|(_, holder)| **holder == Holder::Content(hash)).map(|(address, _)| *address).collect();
            prop_assert_eq!(held, expected);
        }
        let mut records = index.records().unwrap();
        records.sort_unstable_by_key(|record| record.address);
        let expected: Vec<Record> = model.iter().map(|(address, holder)| record(*address, *holder)).collect();
        prop_assert_eq!(records, expected);
    }
}

#[test]
fn the_oldest_are_those_whose_files_changed_first_and_are_meant() {
    let aged = |n: u32, ctime: (i64, u32), holder| Record { ctime, ..record(v4(n), holder) };
    let held = Holder::Content(9);
    let mut records: Vec<Record> = (10..200).map(|n| aged(n, (1000 - i64::from(n), 7), held)).collect();
    records.extend([
        aged(1, (0, 0), held),
        aged(2, (5, 0), Holder::Free),
        aged(3, (6, 0), Holder::Foreign),
        aged(4, (7, PROVISIONAL_NANOS), Holder::Unreadable),
        aged(5, (4, 0), held),
    ]);
    // Of another range.
    records.push(aged(1000, (1, 0), held));
    let oldest = |records: &[Record], gateway: &str| {
        let conf = crate::RangeConf {
            subnet: Some("10.0.0.0/24".to_owned()),
            gateway: Some(gateway.to_owned()),
            ..Default::default()
        };
        Index::build(records, &Host::default()).unwrap().oldest(&crate::RangeSet::check(&[conf]).unwrap()).unwrap()
    };
    assert_eq!(oldest(&records, "10.0.0.254"), [v4(5), v4(3), v4(4)]);
    assert_eq!(oldest(&records[188..], "10.0.0.5"), [v4(3), v4(4), v4(199)], "no gateway");
    assert_eq!(
        oldest(&records[190..194], "10.0.0.254"),
        [v4(3), v4(4), v4(1)],
        "just changed when it was read, so new; blank is free"
    );
}

#[test]
fn cost_does_not_grow_with_sixty_thousand_reservations() {
    let many: Vec<Record> = (2..60_002).map(|n| record(v4(n), Holder::Content(u64::from(n) + 1000))).collect();
    let cost = |records: &[Record], at: u32| {
        let mut index = Index::build(records, &Host::default()).unwrap();
        let before = index.accesses();
        let free = v4(at);
        assert!(!OccupiedAddresses::new(&index).contains(free).unwrap());
        assert!(index.owned_by(7).unwrap().is_empty() && index.owned_by(8).unwrap().is_empty());
        index.put(&record(free, Holder::Content(7))).unwrap();
        index.finish().unwrap();
        let add = index.accesses() - before;
        assert_eq!(index.owned_by(7).unwrap(), [free]);
        index.remove(free).unwrap();
        index.finish().unwrap();
        (add, index.accesses() - before - add)
    };
    let (none, sixty_thousand) = (cost(&[], 2), cost(&many, 60_002));
    assert!(none.0 <= 14 && none.1 <= 14, "{none:?} accesses with no reservation");
    // A few more for longer runs, and never a number that grows with the content.
    assert!(
        sixty_thousand.0 <= 18 && sixty_thousand.1 <= 18,
        "{sixty_thousand:?} accesses with 60,000, {none:?} with none"
    );
}

#[test]
fn a_long_run_of_occupied_addresses_is_read_once() {
    let records: Vec<Record> = (2..60_002).map(|n| record(v4(n), Holder::Content(u64::from(n) + 1000))).collect();
    let index = Index::build(&records, &Host::default()).unwrap();
    let before = index.accesses();
    let mut occupied = OccupiedAddresses::new(&index);
    assert!((2..60_002).all(|n| occupied.contains(v4(n)).unwrap()));
    assert!(!occupied.contains(v4(1)).unwrap() && !occupied.contains(v4(60_002)).unwrap());
    let cost = index.accesses() - before;
    // The table has 64 chunks.
    assert!(cost < 250, "{cost} accesses for 64 lookups and one pass");
}

#[test]
fn a_table_in_a_file_grows_while_it_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("index");
    let open_folder = File::open(folder.path()).unwrap();
    let mut index = Index::build(&[], &Host::default()).unwrap();
    index.stamp_folder(&open_folder).unwrap();
    index.save(&path).unwrap();
    for n in 0..2000 {
        index.put(&record(v4(n * 3), Holder::Content(u64::from(n) + 10))).unwrap();
        index.has_new_stamp = true;
        index.finish().unwrap();
    }
    drop(index);
    let stamp = read_header(&File::open(&path).unwrap()).unwrap().stamp;
    let index = open(&path, &stamp, &Host::default()).unwrap();
    for n in 0..2000 {
        assert_eq!(index.owned_by(u64::from(n) + 10).unwrap(), [v4(n * 3)]);
    }
}

#[test]
fn an_index_of_another_boot_or_machine_only_gives_its_records() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("index");
    let open_folder = File::open(folder.path()).unwrap();
    let host = Host::new("machine", "boot");
    let mut index = Index::build(&[record(v4(1), Holder::Content(7))], &host).unwrap();
    std::fs::write(&path, "").unwrap();
    index.save(&path).unwrap();
    index.stamp_folder(&open_folder).unwrap();
    index.finish().unwrap();
    let stamp = Stamp::of(&open_folder.metadata().unwrap());
    assert!(open(&path, &stamp, &host).is_some());
    assert!(open(&path, &stamp, &Host::new("machine", "later")).is_none());
    assert!(open(&path, &stamp, &Host::new("other", "boot")).is_none());
    assert!(open(&path, &Stamp { mtime: (1, 1), ..stamp }, &host).is_none());
    assert_eq!(old_records(&path, &Host::new("machine", "later"))[&v4(1)], record(v4(1), Holder::Content(7)));
    let elsewhere = old_records(&path, &Host::new("other", "boot"));
    assert_eq!(elsewhere[&v4(1)].boot, 0, "made on another machine: not known when");
    File::create(folder.path().join("x")).unwrap();
    assert_ne!(Stamp::of(&open_folder.metadata().unwrap()), stamp, "the kernel moved the folder's mtime");
}

#[test]
fn marks_are_in_the_past_and_never_alike() {
    let folder = tempfile::tempdir().unwrap();
    let file = File::open(folder.path()).unwrap();
    let (one, two) = (stamp_folder(&file).unwrap(), stamp_folder(&file).unwrap());
    assert_ne!(one.mtime, two.mtime);
    assert!(one.mtime.0 < one.ctime.0 - 80_000, "{one:?}");
    for _ in 0..1000 {
        let nanos = random_nanos().unwrap();
        assert!(nanos < 1_000_000_000 && !nanos.is_multiple_of(1000), "{nanos}");
    }
}

/// Writes an index file of this length with this header, which may be wrong.
fn forge(path: &Path, header: &Header, length: u64) {
    let file = File::create(path).unwrap();
    file.write_all_at(&header.encode(), 0).unwrap();
    file.set_len(length).unwrap();
}

#[test]
fn a_forged_header_neither_panics_nor_takes_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("index");
    let sizes = [(1 << 58, 7), (1 << 63, (1 << 63) - 1), (1 << 62, (1 << 62) - 1), (512, 511)];
    for (slots, used) in sizes {
        let header = Header { clean: true, slots, used, ..Header::default() };
        // The length to which the computed size would wrap, and that of a small index.
        for length in [PAGE_LENGTH, PAGE_LENGTH + 512 * 64] {
            forge(&path, &header, length);
            let believed = slots == 512 && length > PAGE_LENGTH;
            assert_eq!(open(&path, &Stamp::default(), &Host::default()).is_some(), believed, "{slots} {length}");
            let peeked = peek(&path, || Some(Stamp::default()), |_| Ok(()));
            assert_eq!(peeked.is_some(), believed, "{slots} {length}");
            assert!(old_records(&path, &Host::default()).is_empty());
        }
    }
    // A sparse file can have the length of a large table.
    forge(&path, &Header { slots: 1 << 20, used: (1 << 20) - 1, ..Header::default() }, PAGE_LENGTH + (64 << 20));
    assert_eq!(old_records(&path, &Host::default()).capacity(), 0);
}

#[test]
fn garbage_is_not_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("index");
    for garbage in [&b""[..], b"x", &[0; 5000], &[0xff; 70_000]] {
        std::fs::write(&path, garbage).unwrap();
        assert!(open(&path, &Stamp::default(), &Host::default()).is_none());
        assert!(old_records(&path, &Host::default()).is_empty());
    }
}
