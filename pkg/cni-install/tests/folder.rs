//! Tests what the installer does to a folder, and what it refuses.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use cni_install::set::sum;
use cni_testkit::program;

use common::{Place, Ran, answering, run};

#[test]
fn install_and_rollback_leave_foreign_files() {
    let place = Place::new();
    program::script(place.dest().join("bridge"), &answering("another bridge"));
    program::script(place.dest().join("flannel"), &answering("foreign"));
    symlink("/nowhere", place.dest().join("dangling")).unwrap();
    let set = place.set("v1", &["bridge", "tuning"]);
    let text = place.install(&set).fine();
    assert!(text.contains("bridge, tuning are now in"), "{text}");
    assert_eq!(
        (place.says("bridge").unwrap(), place.says("tuning").unwrap()),
        ("v1 of bridge".into(), "v1 of tuning".into())
    );
    let mode = fs::metadata(place.dest().join("tuning")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o755);
    place.call("status").fine();
    let text = place.call("rollback").fine();
    assert!(text.contains("before the last install: bridge") && text.contains("not exist before: tuning"), "{text}");
    assert_eq!(place.says("bridge").unwrap(), "another bridge");
    assert_eq!(place.files(), ["bridge", "dangling", "flannel"]);
    assert!(place.call("rollback").fine().contains("nothing to roll back"));
    assert_eq!(place.call("status").status, 1);
}

#[test]
fn reinstalling_the_same_set_keeps_the_earlier_backup() {
    let place = Place::new();
    let (v1, v2) = (place.set("v1", &["bridge"]), place.set("v2", &["bridge", "portmap"]));
    place.install(&v1).fine();
    place.install(&v2).fine();
    assert!(place.install(&v2).fine().contains("nothing was changed"));
    place.call("rollback").fine();
    assert_eq!((place.says("bridge"), place.says("portmap")), (Some("v1 of bridge".into()), None));
}

#[test]
fn a_rollback_leaves_files_that_others_installed_since() {
    let place = Place::new();
    program::script(place.dest().join("bridge"), &answering("old"));
    place.install(&place.set("v1", &["bridge", "tuning"])).fine();
    program::script(place.dest().join("tuning"), &answering("another installer's"));
    let status = place.call("status");
    assert!(
        status.status == 1 && status.out.contains("tuning   is not the installed program: its SHA-256 differs"),
        "{status:?}"
    );
    let text = place.call("rollback").fine();
    assert!(text.contains("another installer has replaced or removed them after the install: tuning"), "{text}");
    assert_eq!(
        (place.says("bridge").unwrap(), place.says("tuning").unwrap()),
        ("old".into(), "another installer's".into())
    );
}

#[test]
fn hard_links_of_a_set_stay_hard_links_and_roll_back() {
    let place = Place::new();
    let inode = |name: &str| fs::metadata(place.dest().join(name)).unwrap().ino();
    let linked = |version: &str| {
        let set = place.set(version, &["bridge"]);
        for name in ["ptp", "tuning"] {
            fs::hard_link(set.join("bridge"), set.join(name)).unwrap();
        }
        let sum = sum(&fs::read(set.join("bridge")).unwrap());
        fs::write(set.join("SHA256SUMS"), format!("{sum}  bridge\n{sum}  ptp\n{sum}  tuning\n")).unwrap();
        set
    };
    program::script(place.dest().join("bridge"), &answering("old"));
    place.install(&place.set("v1", &["bridge", "tuning"])).fine();
    place.install(&linked("v2")).fine();
    let second = inode("bridge");
    assert_eq!([inode("ptp"), inode("tuning")], [second, second]);
    place.call("status").fine();
    place.install(&linked("v3")).fine();
    assert!(inode("bridge") != second && inode("bridge") == inode("tuning"));
    place.call("rollback").fine();
    assert_eq!([inode("bridge"), inode("ptp"), inode("tuning")], [second; 3]);
    place.to_original().fine();
    assert_eq!((place.says("bridge").unwrap(), place.files()), ("old".into(), vec!["bridge".to_owned()]));
}

#[test]
fn a_set_that_differs_from_its_list_changes_nothing() {
    let place = Place::new();
    program::script(place.dest().join("bridge"), &answering("old"));
    let set = place.set("v1", &["bridge", "tuning"]);
    program::script(set.join("tuning"), &answering("torn"));
    place.install(&set).failed("tuning does not match SHA256SUMS");
    fs::remove_file(set.join("tuning")).unwrap();
    place.install(&set).failed("failed to look at");
    symlink("/bin/sh", set.join("tuning")).unwrap();
    place.install(&set).failed("is not a regular file");
    fs::remove_file(set.join("SHA256SUMS")).unwrap();
    place.install(&set).failed("SHA256SUMS: No such file");
    assert_eq!((place.says("bridge").unwrap(), place.files()), ("old".into(), vec!["bridge".to_owned()]));
}

#[test]
fn a_program_that_does_not_run_here_changes_nothing() {
    for (content, why) in [
        ("\x7fELF for another processor", "does not run here"),
        ("#!/bin/sh\nexit 3\n", "does not answer VERSION"),
        ("#!/bin/sh\necho no plugin\n", "does not answer VERSION"),
    ] {
        let place = Place::new();
        let set = place.set("v1", &["bridge", "tuning"]);
        program::script(set.join("tuning"), content);
        let sums = fs::read_to_string(set.join("SHA256SUMS")).unwrap();
        let first = sums.lines().next().unwrap();
        fs::write(set.join("SHA256SUMS"), format!("{first}\n{}  tuning\n", sum(content.as_bytes()))).unwrap();
        place.install(&set).failed(why);
        assert_eq!(place.files(), Vec::<String>::new());
    }
}

#[test]
fn a_path_of_the_wrong_file_type_is_reported() {
    let place = Place::new();
    fs::create_dir(place.dest().join("tuning")).unwrap();
    let set = place.set("v1", &["bridge", "tuning"]);
    place.install(&set).failed("tuning is a folder");
    assert_eq!(place.files(), ["tuning"]);
    let file = place.temporary.path().join("file");
    fs::write(&file, "").unwrap();
    run(&["install", "--from", set.to_str().unwrap(), "--dest", file.to_str().unwrap()])
        .failed("failed to create the folder");
}

/// In a mount namespace of its own, `prepare` being shell that mounts something over the folder
/// `$1`.
fn in_mounts(place: &Place, prepare: &str, args: &[&str]) -> Ran {
    let script = format!("set -e\n{prepare}\nshift\nexec \"$@\"");
    let mut unshare = Command::new("unshare");
    unshare
        .args(["-rm", "sh", "-c", &script, "sh"])
        .arg(place.dest())
        .arg(env!("CARGO_BIN_EXE_cni-install"))
        .args(args);
    unshare.stdin(Stdio::null()).output().unwrap().into()
}

#[test]
fn an_unusable_target_is_reported_and_left_unchanged() {
    let place = Place::new();
    program::script(place.dest().join("bridge"), &answering("old"));
    let set = place.set("v1", &["bridge", "tuning"]);
    let big = format!("{}# {}\n", answering("big"), "x".repeat(2 << 20));
    program::script(set.join("tuning"), &big);
    let sums = fs::read_to_string(set.join("SHA256SUMS")).unwrap();
    fs::write(set.join("SHA256SUMS"), format!("{}\n{}  tuning\n", sums.lines().next().unwrap(), sum(big.as_bytes())))
        .unwrap();
    let dest = place.dest();
    let args = ["install", "--from", set.to_str().unwrap(), "--dest", dest.to_str().unwrap()];
    // The listing and the old program's last line go to standard output, if the installer fails as
    // it should.
    let then = "inspect() { ls -A \"$dest\"; tail -n 1 \"$dest/bridge\"; }; dest=$1; shift; if \"$@\"; then exit 9; fi; inspect; exit 1; set --";
    for (mount, why) in [
        ("mount --bind \"$1\" \"$1\"; mount -o remount,bind,ro \"$1\"", "Read-only file system"),
        (
            "cp \"$1/bridge\" /tmp/kept.$$; mount -t tmpfs -o size=1m,mode=755 none \"$1\"; mv /tmp/kept.$$ \"$1/bridge\"",
            "No space left on device",
        ),
        ("mount --bind \"$1\" \"$1\"; mount -o remount,bind,noexec \"$1\"", "does not run here"),
    ] {
        let ran = in_mounts(&place, &format!("{mount}\n{then}"), &args);
        assert!(ran.status == 1 && ran.err.contains(why), "{mount}: {ran:?}");
        assert_eq!(ran.out, "bridge\n# old\n", "{mount}: {ran:?}");
    }
    assert_eq!(place.files(), ["bridge"]);
}

#[test]
fn install_adopts_equal_programs_and_replaces_broken_ones() {
    let place = Place::new();
    let set = place.set("v1", &["bridge", "tuning"]);
    for name in ["bridge", "tuning"] {
        program::copy(set.join(name), place.dest().join(name));
    }
    place.install(&set).fine();
    place.call("status").fine();
    fs::set_permissions(place.dest().join("tuning"), fs::Permissions::from_mode(0o644)).unwrap();
    let status = place.call("status");
    assert!(status.status == 1 && status.out.contains("tuning   is not executable by all users"), "{status:?}");
    place.install(&set).fine();
    place.call("status").fine();
}

#[test]
fn only_one_installer_runs_at_a_time() {
    let place = Place::new();
    let set = place.set("v1", &["bridge"]);
    let held = fs::File::open(place.dest()).unwrap();
    held.lock().unwrap();
    place.install(&set).failed("another cni-install is running");
    // Not by closing it: a child that another test has just forked may have the locked file until
    // it runs its program.
    held.unlock().unwrap();
    place.install(&set).fine();
}

#[test]
fn status_runs_beside_another_status() {
    let place = Place::new();
    place.install(&place.set("v1", &["bridge"])).fine();
    let held = fs::File::open(place.dest()).unwrap();
    held.lock_shared().unwrap();
    place.call("status").fine();
    place.install(&place.set("v2", &["bridge"])).failed("another cni-install is running");
    held.lock().unwrap();
    place.call("status").failed("another cni-install is running");
    held.unlock().unwrap();
}

#[test]
fn a_full_standard_output_is_reported_with_the_outcome() {
    let place = Place::new();
    let set = place.set("v1", &["bridge"]);
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for (verb, says) in [("install", "bridge are now in"), ("status", "PROGRAM  STATE\nbridge   as installed\n")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cni-install"));
        command.arg(verb).arg("--dest").arg(place.dest());
        if verb == "install" {
            command.arg("--from").arg(&set);
        }
        let ran: Ran =
            command.stdout(full()).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap().into();
        let why = "cni-install: failed to write to standard output: No space left on device (os error 28). The command was executed";
        assert!(ran.status == 1 && ran.err.contains(why) && ran.err.contains(says), "{verb}: {ran:?}");
    }
}

#[test]
fn a_caller_that_ignores_sigchld_can_install() {
    let place = Place::new();
    let set = place.set("v1", &["bridge"]);
    let mut command = Command::new("env");
    command.args(["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_cni-install"), "install", "--from"]);
    let ran: Ran = command.arg(&set).arg("--dest").arg(place.dest()).stdin(Stdio::null()).output().unwrap().into();
    ran.fine();
    assert_eq!(place.says("bridge").unwrap(), "v1 of bridge");
}

#[test]
fn without_hard_links_rollback_restores_time_and_mode() {
    let place = Place::new();
    let path = place.dest().join("bridge");
    program::script(&path, &answering("old"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o555)).unwrap();
    let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_700_000_000, 123_456_789);
    fs::File::open(&path).unwrap().set_modified(time).unwrap();
    let (v1, v2) = (place.set("v1", &["bridge"]), place.set("v2", &["bridge"]));
    let call = |args: &[&str]| {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-o", "/dev/null", "-e", "inject=link,linkat:error=EPERM"]);
        strace.arg(env!("CARGO_BIN_EXE_cni-install")).args(args).arg("--dest").arg(place.dest());
        Ran::from(strace.stdin(Stdio::null()).output().unwrap()).fine()
    };
    for set in [&v1, &v2] {
        call(&["install", "--from", set.to_str().unwrap()]);
    }
    call(&["rollback", "--original"]);
    let found = fs::metadata(&path).unwrap();
    assert_eq!((place.says("bridge").unwrap(), place.files()), ("old".into(), vec!["bridge".to_owned()]));
    assert_eq!((found.modified().unwrap(), found.permissions().mode() & 0o7777), (time, 0o555));
}

#[test]
fn without_hard_links_what_cannot_be_copied_is_refused() {
    for kind in ["FIFO", "socket"] {
        let place = Place::new();
        let (set, path) = (place.set("v1", &["bridge"]), place.dest().join("bridge"));
        if kind == "FIFO" {
            assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        } else {
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        }
        let before = path.symlink_metadata().unwrap();
        // A process that waits at the FIFO is ended, with another status.
        let mut call = Command::new("timeout");
        call.args(["-k", "1", "10", "strace", "-f", "-o", "/dev/null", "-e", "inject=link,linkat:error=EPERM"]);
        call.arg(env!("CARGO_BIN_EXE_cni-install")).args(["install", "--from"]).arg(&set);
        let ran: Ran = call.arg("--dest").arg(place.dest()).stdin(Stdio::null()).output().unwrap().into();
        ran.failed("bridge: it is not a regular file");
        let after = path.symlink_metadata().unwrap();
        assert_eq!((after.ino(), place.files()), (before.ino(), vec!["bridge".to_owned()]), "{kind}");
    }
}

#[test]
fn a_failed_replacement_restores_all_programs() {
    let place = Place::new();
    program::script(place.dest().join("bridge"), &answering("old bridge"));
    program::script(place.dest().join("tuning"), &answering("old tuning"));
    let set = place.set("v1", &["bridge", "tuning"]);
    // The second rename of a program: the first four are bookkeeping's and bridge's.
    let dest = place.dest();
    let mut refused = 0;
    for when in 1..=6 {
        let mut strace = Command::new("strace");
        let inject = format!("inject=rename:error=EPERM:when={when}");
        strace.args(["-o", "/dev/null", "-e", &inject, env!("CARGO_BIN_EXE_cni-install"), "install", "--from"]);
        let ran: Ran = strace.arg(&set).arg("--dest").arg(&dest).stdin(Stdio::null()).output().unwrap().into();
        if ran.status == 1 && ran.err.contains("failed to replace") {
            refused += 1;
            assert!(ran.err.contains("Operation not permitted (os error 1). All changes were undone"), "{ran:?}");
            assert_eq!(
                (place.says("bridge").unwrap(), place.says("tuning").unwrap()),
                ("old bridge".into(), "old tuning".into())
            );
        }
        place.call("rollback");
    }
    assert_eq!(refused, 2, "each of the two programs' renames");
}

#[test]
fn with_stay_it_waits_for_a_signal_even_as_process_one() {
    let place = Place::new();
    let set = place.set("v1", &["bridge"]);
    for wrapper in [&["env"][..], &["unshare", "-rpf", "--kill-child"][..]] {
        let mut command = Command::new(wrapper[0]);
        command.args(&wrapper[1..]).arg(env!("CARGO_BIN_EXE_cni-install"));
        command.args(["install", "--stay", "--from"]).arg(&set).arg("--dest").arg(place.dest());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        std::io::BufRead::read_line(&mut out, &mut line).unwrap();
        assert!(line.contains("bridge"), "{line}");
        // Of unshare's, the child is the one to end.
        let pid = child.id();
        let inner = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let target = inner.split_whitespace().next().map_or(pid.to_string(), str::to_owned);
        assert!(child.try_wait().unwrap().is_none(), "it stays");
        assert!(Command::new("kill").arg(&target).status().unwrap().success());
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_usage_error_exits_with_status_two() {
    for args in [
        &[][..],
        &["install"][..],
        &["frob"][..],
        &["rollback", "--from", "x"][..],
        &["status", "--stay"][..],
        &["forget", "--original"][..],
    ] {
        let ran = run(args);
        assert!(ran.status == 2 && ran.err.starts_with("cni-install: "), "{args:?}: {ran:?}");
    }
    assert!(run(&["--help"]).fine().contains("rollback"));
    assert!(run(&["--version"]).fine().starts_with("cni-install 0."));
}

#[test]
fn links_inside_the_installers_folder_are_not_followed() {
    let place = Place::new();
    let outside = place.temporary.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("bridge"), "mine").unwrap();
    let own = place.dest().join(".cni-install");
    fs::create_dir(&own).unwrap();
    for name in ["staging", "1", "7"] {
        symlink(&outside, own.join(name)).unwrap();
    }
    symlink(&outside, own.join("original")).unwrap();
    symlink(outside.join("bridge"), own.join("state.new")).unwrap();
    place.install(&place.set("v1", &["bridge"])).fine();
    place.install(&place.set("v2", &["bridge"])).fine();
    place.call("rollback").fine();
    assert_eq!(place.says("bridge").unwrap(), "v1 of bridge");
    let names: Vec<_> = fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(
        (names, fs::read_to_string(outside.join("bridge")).unwrap()),
        (vec!["bridge".into()], "mine".to_owned())
    );
}

#[test]
fn a_link_instead_of_the_installers_folder_is_refused() {
    let place = Place::new();
    let outside = place.temporary.path().join("outside");
    fs::create_dir_all(outside.join("precious")).unwrap();
    fs::write(outside.join("precious/data"), "mine").unwrap();
    symlink(&outside, place.dest().join(".cni-install")).unwrap();
    let refused = ".cni-install exists and is not a cni-install directory";
    place.install(&place.set("v1", &["bridge"])).failed(refused);
    place.call("rollback").failed(refused);
    place.call("status").failed(refused);
    assert_eq!(fs::read_to_string(outside.join("precious/data")).unwrap(), "mine");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    assert_eq!(place.says("bridge"), None);
}

#[test]
fn only_files_that_the_installer_created_are_garbage() {
    let place = Place::new();
    place.install(&place.set("v1", &["bridge"])).fine();
    for name in ["notes", "12", "1.old"] {
        fs::create_dir(place.dest().join(".cni-install").join(name)).unwrap();
    }
    place.install(&place.set("v2", &["bridge"])).fine();
    let own = fs::read_dir(place.dest().join(".cni-install")).unwrap();
    let mut left: Vec<String> = own.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["1.old", "2", "notes", "original", "state"]);
}

#[test]
fn a_fifo_does_not_block_a_command() {
    let fifo = |path: &Path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    // Who waits at a FIFO is ended, with another status.
    let call = |place: &Place, verb: &str| -> Ran {
        let mut call = Command::new("timeout");
        call.args(["10", env!("CARGO_BIN_EXE_cni-install"), verb, "--dest"]).arg(place.dest());
        call.stdin(Stdio::null()).output().unwrap().into()
    };
    let place = Place::new();
    place.install(&place.set("v1", &["bridge"])).fine();
    fs::remove_file(place.dest().join("bridge")).unwrap();
    fifo(&place.dest().join("bridge"));
    let ran = call(&place, "status");
    assert!(ran.status == 1 && (ran.out + &ran.err).contains("bridge   is missing"));
    call(&place, "rollback").fine();
    let place = Place::new();
    fs::create_dir(place.dest().join(".cni-install")).unwrap();
    fifo(&place.dest().join(".cni-install/state"));
    for verb in ["status", "rollback"] {
        call(&place, verb).failed("not a regular file");
    }
}
