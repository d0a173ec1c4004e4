//! The files compared with those of Go's libcni, and the attachment to which a file belongs.

use std::os::unix::fs::PermissionsExt as _;

use super::*;

/// As Go's libcni writes it (keys in the order of its structure, those of maps sorted).
const GO: &str = concat!(
    r#"{"kind":"cniCacheV1","containerId":"c1","config":"eyJuYW1lIjoibiIsInBsdWdpbnMiOltdfQ==","ifName":"eth0","#,
    r#""networkName":"n","netns":"/run/netns/x","cniArgs":[["K","v"],["IP","1.2.3.4"]],"#,
    r#""capabilityArgs":{"mac":"00:11:22:33:44:55","portMappings":[{"hostPort":8080}]},"#,
    r#""result":{"cniVersion":"1.0.0","dns":{},"ips":[{"address":"10.1.2.3/24"}]}}"#
);

fn id() -> AttachmentId {
    AttachmentId::new("n", "c1", "eth0")
}

fn cache() -> (tempfile::TempDir, Cache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path().join("cni"));
    (folder, cache)
}

fn cache_with(files: &[(&str, &str)]) -> (tempfile::TempDir, Cache) {
    let (folder, cache) = cache();
    fs::create_dir_all(&cache.folder).unwrap();
    for (name, text) in files {
        fs::write(cache.folder.join(name), text).unwrap();
    }
    (folder, cache)
}

fn entry(id: AttachmentId) -> Entry {
    let AttachmentId { network, container_id, ifname } = id;
    let attachment = Attachment { container_id, ifname, ..Attachment::default() };
    Entry { network, attachment, config: b"{}".to_vec(), result: None }
}

#[test]
fn gos_file_is_read_and_written_byte_for_byte() {
    let (_guard, cache) = cache_with(&[("n-c1-eth0", GO)]);
    let entry = cache.find(&id()).unwrap().unwrap();
    assert_eq!(entry.config, br#"{"name":"n","plugins":[]}"#);
    assert_eq!(entry.attachment.netns, "/run/netns/x");
    assert_eq!(entry.attachment.args[1], ("IP".to_owned(), "1.2.3.4".to_owned()));
    assert!(entry.attachment.capability_args.get_exact("portMappings").is_some());
    cache.write(&entry).unwrap();
    assert_eq!(fs::read_to_string(cache.path(&id()).unwrap()).unwrap(), GO);
}

#[test]
fn empty_members_are_omitted_and_all_is_one_line_as_in_go() {
    let (_guard, cache) = cache();
    let mut entry = entry(id());
    entry.result = Some(RawValue::from_string("{\n  \"cniVersion\": \"1.0.0\"\n}".to_owned()).unwrap());
    cache.write(&entry).unwrap();
    assert_eq!(
        fs::read_to_string(cache.path(&id()).unwrap()).unwrap(),
        r#"{"kind":"cniCacheV1","containerId":"c1","config":"e30=","ifName":"eth0","networkName":"n","result":{"cniVersion":"1.0.0"}}"#
    );
}

#[test]
fn only_root_reads_it_and_no_temporary_file_stays() {
    let (_guard, cache) = cache();
    cache.write(&entry(id())).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&cache.folder), mode(&cache.path(&id()).unwrap())), (0o700, 0o600));
    assert_eq!(fs::read_dir(cache.own_folder()).unwrap().count(), 0);
}

#[test]
fn a_bare_result_of_old_releases_is_understood() {
    let old = r#"{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.1.2.3/24"}],"dns":{}}"#;
    let (_guard, cache) = cache_with(&[("n-c1-eth0", old)]);
    let entry = cache.find(&id()).unwrap().unwrap();
    assert_eq!(entry.id(), id());
    assert_eq!(entry.result_as(Version::V0_4_0).unwrap().unwrap().get(), old);
    let newer = entry.result_as(Version::V1_0_0).unwrap().unwrap();
    assert_eq!(newer.get(), r#"{"cniVersion":"1.0.0","ips":[{"address":"10.1.2.3/24"}]}"#);
    assert_eq!(cache.list(Some("n")).unwrap().problems.len(), 1);
}

#[test]
fn a_shared_file_name_belongs_to_the_recorded_attachment() {
    let mine = AttachmentId::new("a", "b-c", "eth0");
    let other = AttachmentId::new("a-b", "c", "eth0");
    let (_guard, cache) = cache();
    cache.write(&entry(other.clone())).unwrap();
    assert_eq!(cache.path(&mine).unwrap(), cache.path(&other).unwrap());
    assert!(cache.find(&mine).unwrap().is_none());
    let error = cache.prepare_for_add(&mine).unwrap_err();
    assert!(error.code() == Code::CONFLICT && error.msg().ends_with("eth0 of container c in network a-b"), "{error}");
    cache.purge(&mine).unwrap();
    assert!(cache.find(&other).unwrap().is_some());
    assert_eq!((cache.list(Some("a")).unwrap().entries.len(), cache.list(Some("a-b")).unwrap().entries.len()), (0, 1));
}

#[test]
fn keys_cannot_leave_the_folder() {
    let (_guard, cache) = cache();
    for (network, container_id, ifname) in [("../n", "c", "e"), ("n", "../c", "e"), ("n", "c", "../e"), (".", "c", "e")]
    {
        assert!(
            cache.path(&AttachmentId::new(network, container_id, ifname)).is_err(),
            "{network} {container_id} {ifname}"
        );
    }
    let error = cache.path(&AttachmentId::new("", "c", "")).unwrap_err();
    let expected = r#"cache file path requires network name (""), container ID ("c"), and interface name ("")"#;
    assert_eq!(error.msg(), expected);
}

#[test]
fn a_key_too_long_for_a_file_name_is_not_cached() {
    let (_guard, cache) = cache_with(&[]);
    let long = "c".repeat(300);
    let key = AttachmentId::new("n", &long, "eth0");
    assert!(cache.find(&key).unwrap().is_none());
    cache.purge(&key).unwrap();
    assert!(cache.write(&entry(key)).is_err());
}

#[test]
fn damaged_files_are_reported_and_left_alone() {
    let (_guard, cache) = cache_with(&[
        ("n-c1-eth0", ""),
        ("n-c2-eth0", "{\"kind\":\"cniCacheV1\",\"config\":\"%\"}"),
        ("n-c3-eth0.bak", GO),
        ("n2-c1-eth0", "garbage of another network"),
    ]);
    assert_eq!(cache.find(&id()).unwrap_err().code(), Code::DECODE);
    let listing = cache.list(Some("n")).unwrap();
    assert_eq!((listing.entries.len(), listing.problems.len()), (0, 3), "{listing:?}");
    cache.purge(&id()).unwrap();
    assert!(!cache.path(&id()).unwrap().exists());
}

#[test]
fn folder_errors_are_reported_and_an_absent_folder_is_empty() {
    let (guard, cache) = cache();
    assert!(cache.list(Some("n")).unwrap().entries.is_empty());
    cache.purge(&id()).unwrap();
    fs::write(guard.path().join("cni"), "a file").unwrap();
    assert_eq!(cache.prepare_for_add(&id()).unwrap_err().code(), Code::IO);
    assert!(cache.list(Some("n")).is_err());
}

#[test]
fn crash_leftovers_are_reused_or_removed_but_live_files_stay() {
    let (_guard, cache) = cache();
    let own = cache.own_folder();
    create_folder(&own).unwrap();
    fs::write(
        own.join("slot-0"),
        "half an entry that is much longer than the next one, so that a tail would show ".repeat(9),
    )
    .unwrap();
    cache.write(&entry(id())).unwrap();
    assert!(cache.find(&id()).unwrap().is_some());
    assert!(!own.join("slot-0").exists());

    let (_live, path) = lock_slot(&own).unwrap();
    fs::write(own.join("slot-1"), "dead").unwrap();
    cache.write(&entry(AttachmentId::new("n", "c2", "eth0"))).unwrap();
    fs::write(own.join("slot-2"), "dead").unwrap();
    let foreign = ["notes", "slot-", "slot-1.bak", "slot-x"];
    foreign.iter().for_each(|name| fs::write(own.join(name), "of another program").unwrap());
    cache.clean().unwrap();
    assert!(path.exists() && !own.join("slot-1").exists() && !own.join("slot-2").exists());
    assert!(
        foreign.iter().all(|name| own.join(name).exists()),
        "{:?}",
        fs::read_dir(&own).unwrap().collect::<Vec<_>>()
    );
}

#[test]
fn a_file_that_is_not_regular_never_blocks() {
    let (_guard, cache) = cache();
    create_folder(&cache.own_folder()).unwrap();
    let (path, own) = (cache.path(&id()).unwrap(), cache.own_folder());
    let slots = [own.join("slot-0"), own.join("slot-1")];
    fs::create_dir(&slots[1]).unwrap();
    assert!(std::process::Command::new("mkfifo").args([&path, &slots[0]]).status().unwrap().success());
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let found = cache.find(&id()).unwrap_err();
        let listing = cache.list(Some("n")).unwrap();
        cache.clean().unwrap();
        cache.write(&entry(AttachmentId::new("n", "c2", "eth0"))).unwrap();
        cache.prepare_for_add(&id()).unwrap();
        cache.purge(&id()).unwrap();
        sender.send((found, listing, cache.list(Some("n")).unwrap())).unwrap();
    });
    let (found, before, after) = receiver.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
    assert!(found.code() == Code::DECODE && found.msg().ends_with("it is not a regular file"), "{found}");
    assert_eq!((before.entries.len(), before.problems.len()), (0, 1));
    assert_eq!((after.entries.len(), after.problems.len()), (1, 0));
    assert!(!path.exists() && slots.iter().all(|slot| slot.exists()));
}

#[test]
fn a_link_out_of_the_folder_is_not_followed() {
    let (guard, cache) = cache_with(&[("n-c1-eth0", GO)]);
    let (path, outside) = (cache.path(&id()).unwrap(), guard.path().join("outside"));
    cache.find(&id()).unwrap().expect("an entry");
    fs::rename(&path, &outside).unwrap();
    std::os::unix::fs::symlink(&outside, &path).unwrap();
    assert_eq!(cache.find(&id()).unwrap_err().code(), Code::DECODE);
    let listing = cache.list(Some("n")).unwrap();
    assert_eq!((listing.entries.len(), listing.problems.len()), (0, 1), "{listing:?}");
    cache.write(&entry(id())).unwrap();
    assert!(cache.find(&id()).unwrap().is_some() && path.symlink_metadata().unwrap().is_file());
    assert_eq!(fs::read_to_string(&outside).unwrap(), GO);
}

#[test]
fn a_file_far_too_long_is_garbage() {
    let (_guard, cache) = cache_with(&[("n-c1-eth0", "")]);
    let path = cache.path(&id()).unwrap();
    File::create(&path).unwrap().set_len(MAX_FILE_LENGTH + 1).unwrap();
    let error = cache.find(&id()).unwrap_err();
    assert!(error.code() == Code::DECODE && error.msg().ends_with("it is longer than 64 MiB"), "{error}");
    cache.purge(&id()).unwrap();
    assert!(!path.exists());
}

#[test]
fn writers_at_once_never_mix_their_entries() {
    let (_guard, cache) = cache();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let cache = &cache;
            scope.spawn(move || {
                for round in 0..50 {
                    let id = format!("c{thread}x{round}");
                    let mut entry = entry(AttachmentId::new("n", &id, "eth0"));
                    entry.config = vec![b'x'; 100 * (thread + 1)];
                    cache.write(&entry).unwrap();
                }
            });
        }
    });
    let listing = cache.list(Some("n")).unwrap();
    assert_eq!((listing.entries.len(), listing.problems.len()), (400, 0));
}

#[test]
fn all_networks_are_listed_and_what_is_ours_alone_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    for (network, id) in [("net", "c1"), ("net-b", "c1"), ("other", "c2")] {
        let attachment = Attachment { container_id: id.into(), ifname: "eth0".into(), ..Attachment::default() };
        let entry = Entry { network: network.into(), attachment, config: Vec::new(), result: None };
        cache.write(&entry).unwrap();
    }
    fs::write(folder.path().join("results/garbage"), "{").unwrap();
    let all = cache.list(None).unwrap();
    let names: Vec<_> = all.entries.iter().map(|entry| entry.network.as_str()).collect();
    assert_eq!((names.join(" ").as_str(), all.problems.len()), ("net-b net other", 1), "{:?}", all.problems);
    let one = cache.list(Some("net")).unwrap();
    assert_eq!((one.entries.len(), one.problems.len()), (1, 0), "{:?}", one.problems);
}
