//! Long sequences of steps by this store, by other programs and by killed processes, compared with
//! a model; and threads on one store.

use std::collections::{BTreeMap, HashSet};

use super::*;
use proptest::prelude::*;

#[test]
fn threads_on_one_store_get_distinct_addresses() {
    let net = Net::new();
    let data = net.data.path();
    let got: Vec<String> = std::thread::scope(|scope| {
        let run = |worker: usize| {
            move || {
                let (store, pool) = (Net::open(data), sets(&["10.0.0.0/23"]));
                let mut got = Vec::new();
                for n in 0..25 {
                    let id = format!("c{worker}-{n}");
                    let mut locked = store.lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap();
                    let lease = locked.reserve(&owner(&id), &pool, &Requested::none()).unwrap();
                    drop(locked);
                    if n % 5 == 0 {
                        let mut locked = store.lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap();
                        assert_eq!(locked.release(&owner(&id)).unwrap().len(), 1);
                    } else {
                        got.push(lease.addresses[0].1.to_string());
                    }
                }
                got
            }
        };
        let threads: Vec<_> = (0..8).map(|worker| scope.spawn(run(worker))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(got.len(), 160);
    assert_eq!(got.iter().collect::<HashSet<_>>().len(), 160);
    assert_eq!(net.lock().list().unwrap().reservations.len(), 160);
}

/// A change of a store: by its operations, by another program (`Foreign...`), or by a process that
/// is killed (`Killed...`). The numbers are those of a container and of an address's last byte.
/// `stage` is how many steps the killed process has done.
#[derive(Clone, Debug)]
enum Step {
    Add(u8),
    Ask(u8, u8),
    Del(u8),
    ForeignCreate(u8, u8),
    ForeignRemove(u8),
    ForeignBlank(u8),
    KilledAdd(u8, u8, u8),
    KilledDel(u8, u8),
    Collect(u8),
    LoseLinks,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u8..8).prop_map(Step::Add),
        1 => (0u8..8, 0u8..16).prop_map(|(id, at)| Step::Ask(id, at)),
        3 => (0u8..8).prop_map(Step::Del),
        2 => (0u8..16, 0u8..8).prop_map(|(at, id)| Step::ForeignCreate(at, id)),
        2 => (0u8..16).prop_map(Step::ForeignRemove),
        1 => (0u8..16).prop_map(Step::ForeignBlank),
        2 => (0u8..16, 0u8..8, 0u8..4).prop_map(|(at, id, stage)| Step::KilledAdd(at, id, stage)),
        2 => (0u8..16, 0u8..4).prop_map(|(at, stage)| Step::KilledDel(at, stage)),
        1 => (0u8..8).prop_map(Step::Collect),
        1 => Just(Step::LoseLinks),
    ]
}

fn at(offset: u8) -> String {
    format!("10.0.0.{offset}")
}

fn id(number: u8) -> String {
    format!("c{number}")
}

fn content(number: u8) -> String {
    format!("c{number}\r\neth0")
}

/// Creates the reservation of an address, or removes it without `content`, as a process that is
/// killed after `stage` steps.
fn killed(net: &Net, address: &str, content: Option<&str>, stage: u8) {
    let mut locked = net.lock();
    locked.prepare_view().unwrap();
    let ip: IpAddr = address.parse().unwrap();
    let file = locked.folder.path.join(address);
    let Some(content) = content else {
        let held = match stage {
            0 => None,
            _ => fs::read(&file).ok(),
        };
        drop(fs::remove_file(&file));
        let link = held.map(|content| Link::new(&content, ip, None));
        link.into_iter().for_each(|link| locked.folder.links.remove(&link));
        if stage > 1 {
            stamp_only_the_folder(&locked);
        }
        return;
    };
    let link = Link::new(content.as_bytes(), ip, locked.recorded_boot());
    if file.exists() {
        return;
    }
    drop(locked.folder.links.create(&link, content).unwrap());
    if stage > 0 {
        fs::hard_link(locked.folder.links.path(&link), &file).unwrap();
    }
    if stage > 1 {
        stamp_only_the_folder(&locked);
    }
}

/// Stamps the folder of reservations and not that of the links.
fn stamp_only_the_folder(locked: &Locked) {
    let before = fs::metadata(locked.folder.path.join("../.cni/net/links")).unwrap().modified().unwrap();
    locked.folder.links.stamp(&locked.folder.file).unwrap();
    File::open(locked.folder.path.join("../.cni/net/links")).unwrap().set_modified(before).unwrap();
}

/// Returns the contents of the files that are not blank, by their addresses.
fn truth(net: &Net) -> BTreeMap<IpAddr, String> {
    let Ok(entries) = fs::read_dir(net.store.path()) else { return BTreeMap::new() };
    let read = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        let address: IpAddr = entry.file_name().to_str()?.parse().ok()?;
        Some((address, fs::read_to_string(entry.path()).unwrap()))
    };
    entries.filter_map(read).filter(|(_, content)| !content.is_empty()).collect()
}

fn holds(truth: &BTreeMap<IpAddr, String>, number: u8) -> Vec<IpAddr> {
    truth.iter().filter(|(_, text)| **text == content(number)).map(|(address, _)| *address).collect()
}

fn holds_in_pool(truth: &BTreeMap<IpAddr, String>, number: u8) -> bool {
    holds(truth, number).iter().any(|address| (1..15).any(|offset| at(offset) == address.to_string()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn the_links_never_contradict_the_files(steps in prop::collection::vec(step(), 1..40)) {
        let net = Net::new();
        let pool = sets(&["10.0.0.0/28"]);
        drop(net.lock());
        for step in steps {
            let before = truth(&net);
            match step {
                Step::Add(number) => {
                    let last = fs::read_to_string(net.path("last_reserved_ip.0")).ok();
                    let turn = turn(last.as_deref());
                    let free = turn.iter().find(|offset| !before.contains_key(&at(**offset).parse().unwrap()));
                    match (net.add(&id(number), &pool), !holds_in_pool(&before, number), free) {
                        (Ok(got), true, Some(free)) => prop_assert_eq!(&got[0], &at(*free)),
                        (Err(error), false, _) => prop_assert_eq!(error.code(), Code::CONFLICT),
                        (Err(error), true, None) => prop_assert_eq!(error.code(), Code::TRY_AGAIN),
                        (got, free, turn) => prop_assert!(false, "{:?} {} {:?}", got, free, turn),
                    }
                }
                Step::Ask(number, offset) => {
                    let address: IpAddr = at(offset).parse().unwrap();
                    let allowed = (2..15).contains(&offset)
                        && !before.contains_key(&address) && !holds_in_pool(&before, number);
                    let got = net.add_asking(&id(number), &pool, &asking(&at(offset)));
                    prop_assert_eq!(got.is_ok(), allowed, "{:?}", got);
                }
                Step::Del(number) => {
                    let got = net.lock().release(&owner(&id(number))).unwrap();
                    prop_assert_eq!(got, holds(&before, number));
                }
                Step::ForeignCreate(offset, number) => replace(&net, &at(offset), &content(number)),
                Step::ForeignBlank(offset) => replace(&net, &at(offset), ""),
                Step::ForeignRemove(offset) => drop(fs::remove_file(net.path(&at(offset)))),
                Step::KilledAdd(offset, number, stage) => killed(&net, &at(offset), Some(&content(number)), stage),
                Step::KilledDel(offset, stage) => killed(&net, &at(offset), None, stage),
                Step::Collect(number) => {
                    let collected = net.lock().gc(&[owner(&id(number))]).unwrap();
                    prop_assert_eq!(collected.removed.len(), before.len() - holds(&before, number).len());
                }
                Step::LoseLinks => drop(fs::remove_dir_all(net.links())),
            }
            let after = truth(&net);
            for number in 0..8 {
                let got = net.lock().reserved_by(&owner(&id(number))).unwrap();
                prop_assert_eq!(got, holds(&after, number));
            }
            let used = after.keys().filter(|a| (2..15).any(|o| at(o) == a.to_string())).count() as u128;
            if !fs::read_dir(net.store.path()).unwrap().any(|e| e.unwrap().metadata().unwrap().len() == 0) {
                prop_assert_eq!(net.store.usage(&pool).unwrap()[0].used, used);
            }
            drop(net.lock().scan().unwrap());
            prop_assert_eq!(net.linked().len(), after.len(), "links of removed reservations stay");
        }
    }
}

/// Returns the order in which the round robin of 10.0.0.0/28 tries the last bytes of its addresses.
fn turn(last: Option<&str>) -> Vec<u8> {
    let last: u8 = last.and_then(|text| text.rsplit_once('.')?.1.parse().ok()).unwrap_or(0);
    let (behind, before): (Vec<u8>, Vec<u8>) = (2..15).partition(|offset| *offset > last);
    behind.into_iter().chain(before).collect()
}
