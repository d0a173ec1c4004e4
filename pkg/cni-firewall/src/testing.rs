//! Creates network namespaces for tests, and runs `nft`, shell scripts and Go's bridge plugin in
//! the calling thread's namespace.

use std::io::Write as _;
use std::process::{Command, Stdio};

use cni_linux::{LinuxMachine, Netns};

pub(crate) use cni_testkit::{in_new_netns, skipped as skip};

/// Returns a new network namespace; the calling thread stays in its own.
pub(crate) fn new_netns() -> Netns {
    let mut netns = None;
    in_new_netns(|| netns = Netns::current().ok());
    netns.unwrap()
}

/// Returns the real machine. It also handles SIGTERM, which no test sends.
pub(crate) fn machine() -> LinuxMachine {
    LinuxMachine::install().unwrap()
}

/// As [`in_new_netns`], but skips the test if the program `nft` is not installed.
#[track_caller]
pub(crate) fn on_a_host(body: impl FnOnce() + Send) {
    in_new_netns(|| match Command::new("nft").arg("--version").output() {
        Ok(_) => body(),
        Err(error) => skip(&format!("cannot run nft: {error}")),
    });
}

/// Runs a shell script, which must succeed, and returns its output.
#[track_caller]
pub(crate) fn shell(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns all rules, as `nft` lists them, without counters.
#[track_caller]
pub(crate) fn ruleset() -> String {
    shell("nft --stateless list ruleset")
}

/// Runs commands of `nft`.
#[track_caller]
pub(crate) fn nft(commands: &str) {
    shell(&format!("nft -f - <<'EOF'\n{commands}\nEOF"));
}

/// Go's bridge plugin, without IPAM, with `macspoofchk`.
pub(crate) struct GoBridge {
    container: Netns,
    id: String,
}

impl GoBridge {
    /// Returns the plugin with a new network namespace for its container. If the plugin is not
    /// installed, reports the test as skipped and returns `None`.
    pub(crate) fn new(id: &str) -> Option<GoBridge> {
        if let Err(reason) = cni_testkit::probe::go_plugins() {
            skip(&reason);
            return None;
        }
        Some(GoBridge { container: crate::testing::new_netns(), id: id.to_owned() })
    }

    /// Runs one verb for interface eth0, which must succeed.
    #[track_caller]
    pub(crate) fn run(&self, verb: &str) {
        use std::os::fd::{AsFd as _, AsRawFd as _};
        let netns = format!("/proc/{}/fd/{}", std::process::id(), self.container.as_fd().as_raw_fd());
        let config =
            r#"{"cniVersion":"1.0.0","name":"spoof","type":"bridge","bridge":"br0","macspoofchk":true,"ipam":{}}"#;
        let mut child = Command::new(cni_testkit::go_bin_dir().join("bridge"))
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", &self.id)
            .env("CNI_NETNS", netns)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", cni_testkit::go_bin_dir())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(config.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{verb}: {}", String::from_utf8_lossy(&output.stdout));
    }

    /// Returns the name of the host's veth and the container's MAC, as they are in the rules.
    #[track_caller]
    pub(crate) fn guarded() -> (String, cni_linux::mac::Mac) {
        let rules = ruleset();
        let after = |words: &str| rules.split(words).nth(1).unwrap().split([' ', '"']).next().unwrap().to_owned();
        (after("iifname \""), after("ether saddr ").parse().unwrap())
    }
}
