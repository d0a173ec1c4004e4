//! The release build against `tests/costs.txt`: no operation may cost more system calls, programs
//! or threads than it did.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

#[test]
fn no_operation_costs_more_than_the_table_allows() {
    let Some(ours) = std::env::var_os("CNI_BIN_DIR") else {
        cni_testkit::skip!("the table is of the release build: set CNI_BIN_DIR, as scripts/test does");
    };
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/costs.txt");
    let mut guard = Command::new(env!("CARGO_BIN_EXE_cni-bench"));
    guard.arg("guard").arg("--ours").arg(ours).arg("--table").arg(table);
    // The guard looks for dnsmasq in PATH.
    if let (Ok(dnsmasq), Ok(path)) = (cni_testkit::probe::dnsmasq(), std::env::var("PATH")) {
        guard.env("PATH", format!("{path}:{}", dnsmasq.parent().unwrap().display()));
    }
    let output = guard.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).contains("operations counted"), "{}", text(&output.stdout));
}

/// A guard that cannot measure must not pass.
#[test]
fn a_guard_without_plugins_or_without_a_table_fails() {
    let run = |ours: &str, table: &str| {
        let mut guard = Command::new(env!("CARGO_BIN_EXE_cni-bench"));
        guard.args(["guard", "--ours", ours, "--table", table]);
        guard.output().unwrap()
    };
    let table = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/costs.txt");
    for (ours, table) in [("/proc/self/fd", table), ("/bin", "/nonexistent"), ("/bin", "/dev/null")] {
        let output = run(ours, table);
        assert!(!output.status.success() && !output.stderr.is_empty(), "{ours} {table}");
    }
}
