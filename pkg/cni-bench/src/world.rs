//! Creates the namespaces in which the benchmark runs.
//!
//! After [`isolate`], the process does not see the machine's network and its mounts do not change
//! the machine's. The namespaces end with the process. Each side has its own containers, and its
//! own node, so that no plugin finds the rules of another side.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

use crate::error::{Doing as _, Result};

/// The scratch folder, a tmpfs that only this process and its children see.
const SCRATCH: &str = "/run";

/// Folders that plugins write to. Each is replaced by a tmpfs that no other process sees.
const PRIVATE: [&str; 2] = [SCRATCH, "/var/lib"];

/// The network namespace that stands for a host.
#[derive(Debug)]
pub(crate) struct Node {
    net: File,
}

/// A program that runs beside the measured plugins. It is killed when this value is dropped, and by
/// the kernel when this process ends.
#[derive(Debug)]
pub(crate) struct Process(Child);

/// Moves the calling thread into new network and mount namespaces, so that nothing changes the
/// machine. The process must have only this thread. Fails without `CAP_SYS_ADMIN`.
pub(crate) fn isolate() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)
        .doing("failed to leave the machine's network and mounts (run as root, or inside `unshare -Urmn`)")?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).doing("failed to make mounts private")?;
    for folder in PRIVATE {
        // Each side has up to 60,000 reservations, and each reservation is a file.
        mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("mode=755,nr_inodes=1000000"))
            .doing(format_args!("failed to mount a tmpfs on {folder}"))?;
    }
    Ok(())
}

/// Returns an unused name, with `kind` as its beginning.
fn unused_name(kind: &str) -> String {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    format!("{kind}{}", MADE.fetch_add(1, Ordering::Relaxed))
}

/// Creates a container's network namespace and returns its path.
pub(crate) fn create_container() -> Result<PathBuf> {
    let name = unused_name("container");
    run(&["ip", "netns", "add", &name])?;
    Ok(Path::new(SCRATCH).join("netns").join(name))
}

/// Creates an empty folder and returns its path.
pub(crate) fn create_folder() -> Result<PathBuf> {
    let path = Path::new(SCRATCH).join(unused_name("folder"));
    fs::create_dir(&path).doing(format_args!("failed to make {}", path.display()))?;
    Ok(path)
}

impl Node {
    /// Creates a node: a network namespace with `lo` up, which the calling thread enters. The
    /// namespace ends with this value, so that nodes of earlier cases slow nothing down.
    pub(crate) fn create() -> Result<Node> {
        unshare(CloneFlags::CLONE_NEWNET).doing("failed to create the network namespace of a node")?;
        let net = File::open("/proc/thread-self/ns/net").doing("failed to open the network namespace of a node")?;
        run(&["ip", "link", "set", "lo", "up"])?;
        Ok(Node { net })
    }

    /// Moves the calling thread, and the programs that it starts later, into this node's namespace.
    pub(crate) fn enter(&self) -> Result<()> {
        setns(&self.net, CloneFlags::CLONE_NEWNET).doing("failed to enter the network namespace of a node")
    }
}

impl Process {
    /// Starts a program on the current node, with its output in the file `log`, and waits until
    /// `is_ready` returns `true`. Fails if the program ends first, or is not ready in time.
    pub(crate) fn start(argv: &[&str], log: &Path, is_ready: impl Fn() -> bool) -> Result<Process> {
        const LIMIT: Duration = Duration::from_secs(10);
        let shown = argv.join(" ");
        let output = File::create(log).doing(format_args!("failed to make {}", log.display()))?;
        let errors = output.try_clone().doing(format_args!("failed to duplicate {}", log.display()))?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).args(argv);
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        let mut process = Process(command.spawn().doing(format_args!("failed to run `{shown}`"))?);
        let begin = Instant::now();
        // Polls, because dnsmasq and the daemons of dhcp do not notify this process.
        while !is_ready() {
            let ended = process.0.try_wait().doing(format_args!("failed to wait for `{shown}`"))?;
            let problem = match ended {
                Some(status) => format!("ended before it was ready ({status})"),
                None if begin.elapsed() > LIMIT => format!("was not ready after {} s", LIMIT.as_secs()),
                None => {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                }
            };
            let printed = fs::read_to_string(log).unwrap_or_default();
            return Err(format!("`{shown}` {problem}. Its output: {:?}", printed.trim()));
        }
        Ok(process)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail if the program has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program and returns what it printed.
pub(crate) fn run(argv: &[&str]) -> Result<String> {
    feed(argv, "")
}

/// Runs a program with `input` on its standard input, and returns what it printed. Fails if the
/// program fails.
pub(crate) fn feed(argv: &[&str], input: &str) -> Result<String> {
    let shown = argv.join(" ");
    let mut command = Command::new(argv.first().copied().unwrap_or_default());
    command.args(argv.iter().skip(1)).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().doing(format_args!("failed to run `{shown}`"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).doing(format_args!("failed to feed `{shown}`"))?;
    }
    let output = child.wait_with_output().doing(format_args!("failed to run `{shown}`"))?;
    if !output.status.success() {
        return Err(format!("`{shown}` failed: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
