//! Runs every input of `fuzz/corpus` through its target, without libFuzzer. Each target's inputs
//! are one archive, `<target>.tar`.

#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;

use cni_fuzz::TARGETS;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

/// # Panics
/// If an input breaks its target's property, or there is none.
fn replay(name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let archive = corpus().join(format!("{name}.tar"));
    let unpacked = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(folder.path()).status().unwrap();
    assert!(unpacked.success(), "failed to unpack {}: {unpacked}", archive.display());
    let mut broken = Vec::new();
    let mut inputs = 0;
    for entry in fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        let bytes = fs::read(entry.path()).unwrap();
        inputs += 1;
        if catch_unwind(|| cni_fuzz::run(name, &bytes)).is_err() {
            broken.push(entry.file_name().display().to_string());
        }
    }
    assert!(inputs > 0, "{} has no input: nothing was tested", archive.display());
    assert!(broken.is_empty(), "{} of {inputs} inputs break {name}:\n{}", broken.len(), broken.join("\n"));
}

macro_rules! replayed {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                replay(stringify!($name));
            }
        )*

        #[test]
        fn no_target_and_no_archive_is_left_out() {
            let mut archives: Vec<String> =
                fs::read_dir(corpus()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            archives.sort();
            let targets = TARGETS.map(|(name, _)| name);
            assert_eq!(archives, targets.map(|name| format!("{name}.tar")));
            assert_eq!(targets, [$(stringify!($name)),*]);
        }
    };
}

replayed! { advertisement answer args cache config conflist conntrack dhcp gob iptables ledger links nft node_file pods proc resolv result store subnet sums tuning }

/// The crate that libFuzzer is built from is outside the workspace: nothing here compiles it.
#[test]
fn libfuzzer_has_every_target_and_no_other() {
    let manifest = fs::read_to_string(corpus().with_file_name("Cargo.toml")).unwrap();
    let value = |key: &str, text: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
        line.unwrap_or_else(|| panic!("no {key} in {text}")).trim_matches('"').to_owned()
    };
    let programs: Vec<_> =
        manifest.split("[[bin]]").skip(1).map(|text| (value("name", text), value("path", text))).collect();
    let expected = TARGETS.map(|(name, _)| (name.to_owned(), "target.rs".to_owned()));
    assert_eq!(programs, expected);
}
