//! Tests what the installer keeps, and for how long.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use cni_install::set::sum;
use cni_testkit::program;
use serde_json::Value;

use common::{Place, Ran, answering, run};

#[test]
fn the_original_set_survives_upgrades_and_restarts() {
    let place = Place::new();
    program::script(place.dest().join("bridge"), &answering("old"));
    symlink("/nowhere", place.dest().join("tuning")).unwrap();
    let (v1, v2) = (place.set("v1", &["bridge", "tuning"]), place.set("v2", &["bridge", "portmap"]));
    place.install(&v1).fine();
    let status = place.call("status").fine();
    assert!(status.contains("the original set, which is the previous one too, from before 20"), "{status}");
    for set in [&v1, &v2, &v2] {
        place.install(set).fine();
    }
    let status = place.call("status").fine();
    assert!(
        status.contains("the original set, from before 20") && status.contains("did not exist: portmap"),
        "{status}"
    );
    assert!(status.contains("Z: bridge, tuning; did not exist: portmap\nkept, the previous set"), "{status}");
    let json: Value =
        serde_json::from_str(&run(&["status", "--json", "--dest", place.dest().to_str().unwrap()]).fine()).unwrap();
    assert_eq!(cni_testkit::report_errors("cni-install-status", &json), [""; 0], "{json:#}");
    assert_eq!((&json["state"], &json["programs"][1]["name"]), (&"same".into(), &"portmap".into()), "{json:#}");
    assert_eq!(json["original"]["absent"][0], "portmap", "{json:#}");
    place.call("rollback").fine();
    assert_eq!((place.says("bridge"), place.says("portmap")), (Some("v1 of bridge".into()), None));
    let text = place.call("rollback").fine();
    assert!(text.contains("no previous set is kept. The original one is: rollback --original"), "{text}");
    assert_eq!(place.says("bridge"), Some("v1 of bridge".into()));
    let status = place.call("status");
    assert!(status.status == 1 && status.out.contains("kept, the original set, from before"), "{status:?}");
    place.install(&v2).fine();
    let text = place.to_original().fine();
    assert!(text.contains("before the first install: bridge, tuning"), "{text}");
    assert_eq!((place.says("bridge"), place.files()), (Some("old".into()), vec!["bridge".into(), "tuning".into()]));
    assert_eq!(fs::read_link(place.dest().join("tuning")).unwrap(), Path::new("/nowhere"));
    assert!(place.to_original().fine().contains("no earlier set is kept"));
}

/// The original set of an empty folder has no files, only names that did not exist.
#[test]
fn an_empty_folder_is_empty_again_after_upgrade_and_rollback() {
    let place = Place::new();
    for version in ["v1", "v2"] {
        place.install(&place.set(version, &["bridge", "tuning"])).fine();
    }
    place.call("rollback").fine();
    assert_eq!(place.says("bridge"), Some("v1 of bridge".into()));
    let status = place.call("status");
    assert!(status.out.contains("kept, the original set, from before"), "{status:?}");
    place.to_original().fine();
    assert_eq!(place.files(), Vec::<String>::new());
    assert!(place.to_original().fine().contains("no earlier set is kept"));
}

#[test]
fn forget_removes_both_sets_and_the_next_install_starts_over() {
    let place = Place::new();
    program::script(place.dest().join("bridge"), &answering("old"));
    assert!(place.call("forget").fine().contains("nothing to forget"));
    for version in ["v1", "v2"] {
        place.install(&place.set(version, &["bridge"])).fine();
    }
    let text = place.call("forget").fine();
    assert!(text.contains("the original set") && text.contains("the previous set"), "{text}");
    assert!(place.call("status").fine().contains("no earlier set is kept"));
    assert!(place.call("rollback").fine().contains("nothing to roll back"));
    assert!(place.to_original().fine().contains("nothing to roll back"));
    place.install(&place.set("v3", &["bridge"])).fine();
    place.install(&place.set("v4", &["bridge"])).fine();
    place.to_original().fine();
    assert_eq!((place.says("bridge"), place.files()), (Some("v2 of bridge".into()), vec!["bridge".into()]));
}

#[test]
fn an_interrupted_forget_leaves_nothing_to_restore() {
    let place = Place::new();
    for version in ["v1", "v2"] {
        place.install(&place.set(version, &["bridge"])).fine();
    }
    fs::write(place.dest().join(".cni-install/state"), "forgetting 2\n").unwrap();
    let status = place.call("status").fine();
    assert!(
        status.contains("holds what was installed:\nPROGRAM  STATE\nbridge   as installed\nno earlier set is kept"),
        "{status}"
    );
    assert!(place.call("rollback").fine().contains("nothing to roll back"));
    assert_eq!(place.says("bridge"), Some("v2 of bridge".into()));
}

#[test]
fn files_that_rollback_could_not_restore_stay_kept() {
    for original in [false, true] {
        let place = Place::new();
        for name in ["bridge", "tuning"] {
            program::script(place.dest().join(name), &answering("old"));
        }
        place.install(&place.set("v1", &["bridge", "tuning"])).fine();
        program::script(place.dest().join("tuning"), &answering("another installer's"));
        let back = || if original { place.to_original() } else { place.call("rollback") };
        for _ in 0..2 {
            let text = back().fine();
            assert!(
                text.contains("install: bridge") && text.contains("removed them after the install: tuning"),
                "{text}"
            );
            assert!(text.contains("still kept") && text.contains("deletes the copies): tuning"), "{text}");
            assert_eq!(place.says("bridge"), Some("old".into()));
        }
        // The obstacle is gone.
        program::copy(place.temporary.path().join("v1/tuning"), place.dest().join("tuning"));
        back().fine();
        assert_eq!((place.says("tuning"), place.files()), (Some("old".into()), vec!["bridge".into(), "tuning".into()]));
    }
}

#[test]
fn a_missing_kept_file_does_not_stop_the_rollback() {
    let place = Place::new();
    for name in ["bridge", "tuning"] {
        program::script(place.dest().join(name), &answering("old"));
    }
    place.install(&place.set("v1", &["bridge", "tuning"])).fine();
    fs::remove_file(place.dest().join(".cni-install/1/bridge")).unwrap();
    let ran = place.call("rollback");
    assert!(ran.status == 1 && ran.out.contains("because the kept file is gone: bridge"), "{ran:?}");
    assert_eq!((place.says("bridge"), place.says("tuning")), (Some("v1 of bridge".into()), Some("old".into())));
    assert_eq!(place.files(), ["bridge", "tuning"]);
}

/// The older version, without `rollback --original`, wrote one generation and a state of one line.
#[test]
fn folders_of_older_versions_are_understood() {
    for (state, generations) in [("installed 7\n", &["7"][..]), ("installing 8\n", &["7", "8"])] {
        for (command, expected) in
            [("rollback", "v6 of bridge"), ("original", "v6 of bridge"), ("install", "v9 of bridge")]
        {
            let place = Place::new();
            let own = place.dest().join(".cni-install");
            program::script(place.dest().join("bridge"), &answering("v7 of bridge"));
            for generation in generations {
                let number: u64 = generation.parse().unwrap();
                let kept = answering(&format!("v{} of bridge", number - 1));
                program::script(own.join(generation).join("bridge"), &kept);
                let sum = sum(answering(&format!("v{number} of bridge")).as_bytes());
                fs::write(own.join(generation).join("SHA256SUMS"), format!("{sum}  bridge\n")).unwrap();
                fs::write(own.join(generation).join("ABSENT"), "").unwrap();
            }
            fs::write(own.join("state"), state).unwrap();
            match command {
                "original" => place.to_original().fine(),
                "install" => place.install(&place.set("v9", &["bridge"])).fine(),
                _ => place.call("rollback").fine(),
            };
            // A rollback of a cut-off install ends with the programs from before that install.
            let expected = if generations.len() == 2 && command == "rollback" { "v7 of bridge" } else { expected };
            assert_eq!(place.says("bridge").as_deref(), Some(expected), "{state}, {command}");
            place.to_original().fine();
            assert_eq!((place.says("bridge"), place.files()), (Some("v6 of bridge".into()), vec!["bridge".into()]));
        }
    }
}

#[test]
fn on_a_full_disk_a_rollback_loses_nothing_and_works_later() {
    let place = Place::new();
    let (v1, v2) = (place.set("v1", &["bridge"]), place.set("v2", &["bridge"]));
    let script = "set -e
        dest=$1 installer=$2
        mount -t tmpfs -o size=64k,mode=755 none \"$dest\"
        install -m 755 \"$5\" \"$dest/bridge\"
        \"$installer\" install --from \"$3\" --dest \"$dest\"
        \"$installer\" install --from \"$4\" --dest \"$dest\"
        cat /dev/zero >\"$dest/filler\" 2>/dev/null && exit 9
        for words in 'rollback' 'rollback --original' 'forget'; do
            \"$installer\" $words --dest \"$dest\" && exit 8
            tail -n 1 \"$dest/bridge\"
        done
        rm \"$dest/filler\"
        \"$installer\" rollback --dest \"$dest\"
        tail -n 1 \"$dest/bridge\"
        \"$installer\" rollback --original --dest \"$dest\"
        tail -n 1 \"$dest/bridge\"
        ls -A \"$dest\"";
    let old = place.temporary.path().join("old");
    program::script(&old, &answering("old"));
    let mut unshare = Command::new("unshare");
    unshare.args(["-rm", "sh", "-c", script, "sh"]).arg(place.dest()).arg(env!("CARGO_BIN_EXE_cni-install"));
    let ran: Ran = unshare.args([&v1, &v2, &old]).stdin(Stdio::null()).output().unwrap().into();
    assert_eq!((ran.status, ran.err.matches("No space left on device").count()), (0, 3), "{ran:?}");
    let says: Vec<&str> = ran.out.lines().filter(|line| line.starts_with("# ")).collect();
    let full = ["# v2 of bridge"; 3];
    assert_eq!(says, [&full[..], &["# v1 of bridge", "# old"]].concat(), "{ran:?}");
    assert!(ran.out.ends_with("# old\nbridge\n"), "{ran:?}");
}
