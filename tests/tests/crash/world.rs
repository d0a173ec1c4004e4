//! A node with a neighbour that must not be affected, and the state of that node.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

use cni_testkit::{Container, Node, patience, probe};
use serde_json::{Value, json};

use crate::chain::{Chain, Links};

/// The backend of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    Nftables,
    IptablesNft,
    IptablesLegacy,
}

impl Backend {
    pub(crate) fn key(self) -> &'static str {
        if self == Backend::Nftables { "nftables" } else { "iptables" }
    }

    /// The executable behind the programs of this iptables.
    pub(crate) fn program(self) -> Option<&'static str> {
        match self {
            Backend::Nftables => None,
            Backend::IptablesNft => Some("xtables-nft-multi"),
            Backend::IptablesLegacy => Some("xtables-legacy-multi"),
        }
    }

    pub(crate) fn probe(self) -> Result<(), String> {
        probe::nft()?;
        match self.program() {
            None => Ok(()),
            Some(program) => {
                probe::tool(program)?;
                probe::iptables()
            }
        }
    }

    /// A node with this variant of iptables as the default.
    fn node(self) -> Node {
        let node = Node::new();
        let variant = if self == Backend::IptablesLegacy { "legacy" } else { "nft" };
        conformance::choose_iptables(&node, variant);
        node
    }
}

/// The node, the neighbour, and the state of both before any process was killed.
pub(crate) struct World {
    pub(crate) node: Node,
    pub(crate) backend: Backend,
    neighbour: Option<(Container, Links)>,
    /// The containers that live beside the neighbour.
    pub(crate) live: Mutex<BTreeSet<String>>,
    before: State,
}

impl World {
    pub(crate) fn new(backend: Backend) -> World {
        let node = backend.node();
        let before = State::default();
        let mut world = World { node, backend, neighbour: None, live: Mutex::default(), before };
        // A container that is added and deleted, so that the shared resources exist.
        let passer = world.node.container();
        let chain = Chain::new(&world, &passer);
        let links = chain.add_all();
        chain.del_all(links.last());
        let neighbour = world.node.container();
        let links = Chain::new(&world, &neighbour).add_all();
        world.neighbour = Some((neighbour, links));
        world.before = world.state();
        world.neighbour_lives();
        world
    }

    /// Returns the list of valid attachments, for GC.
    pub(crate) fn valid(&self) -> Value {
        let (neighbour, _) = self.neighbour.as_ref().expect("there is a neighbour");
        let live = self.live.lock().unwrap();
        let ids = live.iter().chain([&neighbour.id]);
        ids.map(|id| json!({"containerID": id, "ifname": "eth0"})).collect()
    }

    /// Whether the spoof check is on: with one of the backends.
    pub(crate) fn checks_spoofing(&self) -> bool {
        self.backend == Backend::Nftables && probe::nft_bridge().is_ok()
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.node.data_dir()
    }

    pub(crate) fn backups(&self) -> PathBuf {
        self.node.dir().join("tuning")
    }

    /// Returns the existing lock files, as paths on the node.
    pub(crate) fn lock_files(&self) -> Vec<PathBuf> {
        let store = self.data_dir().join("net1");
        let folders = [store.as_path(), Path::new("/run/cni"), Path::new("/run")];
        self.node.enter(|| {
            let files = folders.iter().flat_map(fs::read_dir).flatten().flatten().map(|entry| entry.path());
            files.filter(|path| path.is_file() && path.to_string_lossy().ends_with("lock")).collect()
        })
    }

    /// Returns the current state of the node.
    pub(crate) fn state(&self) -> State {
        State::of(self)
    }

    /// Returns the differences from the initial state. Waits a little, because the kernel removes
    /// namespaces asynchronously.
    pub(crate) fn left(&self) -> Vec<String> {
        self.left_after(&self.before)
    }

    /// Returns the differences from `before`.
    pub(crate) fn left_after(&self, before: &State) -> Vec<String> {
        let deadline = Instant::now() + patience(Duration::from_secs(10)).min(Duration::from_secs(60));
        loop {
            let left = self.state().differs_from(before);
            if left.is_empty() || Instant::now() > deadline {
                return left;
            }
            sleep(Duration::from_millis(2));
        }
    }

    /// Returns the current differences from the initial state, without waiting. After a DEL only
    /// the end of a namespace is asynchronous.
    pub(crate) fn left_now(&self) -> Vec<String> {
        self.state().differs_from(&self.before)
    }

    /// Asserts that the neighbour still reaches its gateway.
    pub(crate) fn neighbour_lives(&self) {
        let (neighbour, _) = self.neighbour.as_ref().expect("there is a neighbour");
        neighbour.ping("10.1.0.1");
    }

    /// Deletes the neighbour; dropping the node checks the rest.
    pub(crate) fn close(mut self) {
        if let Some((neighbour, links)) = self.neighbour.take() {
            let chain = Chain::new(&self, &neighbour);
            chain.check_all(&links);
            chain.del_all(links.last());
        }
    }
}

/// The resources that an attachment can leave, as lines that can be compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    links: BTreeSet<String>,
    rules: Vec<String>,
    files: BTreeSet<String>,
    locks: BTreeSet<String>,
    qdiscs: BTreeSet<String>,
}

impl State {
    fn of(world: &World) -> State {
        let node = &world.node;
        let (links, run, locks) = node.enter(|| {
            let links = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            let names = links.lines().skip(2).filter_map(|line| line.split(':').next());
            let names: BTreeSet<String> = names.map(|name| name.trim().to_owned()).collect();
            let mut files = BTreeSet::new();
            for folder in ["/run", "/var/lib"] {
                walk(Path::new(folder), &mut files);
            }
            let store = world.data_dir().join("net1/lock");
            (names, files, held(&[Path::new("/run/cni"), store.parent().unwrap()]))
        });
        let mut files = run;
        walk(&world.data_dir(), &mut files);
        walk(&world.backups(), &mut files);
        State { links, rules: rules(world), files, locks, qdiscs: qdiscs(world) }
    }

    /// Returns one line for each difference.
    pub(crate) fn differs_from(&self, before: &State) -> Vec<String> {
        let mut lines = Vec::new();
        for (kind, now, then) in [
            ("link", &self.links, &before.links),
            ("file", &self.files, &before.files),
            ("held", &self.locks, &before.locks),
            ("qdisc", &self.qdiscs, &before.qdiscs),
        ] {
            lines.extend(now.difference(then).map(|one| format!("{kind} left: {one}")));
            lines.extend(then.difference(now).map(|one| format!("{kind} lost: {one}")));
        }
        if self.rules != before.rules {
            let only = |these: &[String], those: &[String], how: &str| -> Vec<String> {
                let these = these.iter().filter(|line| !those.contains(line));
                these.map(|line| format!("rule {how}: {line}")).collect()
            };
            let count = lines.len();
            lines.extend(only(&self.rules, &before.rules, "left"));
            lines.extend(only(&before.rules, &self.rules, "lost"));
            if lines.len() == count {
                lines.push("rules are in another order, or there twice".to_owned());
            }
        }
        lines
    }
}

/// Collects every file below, with its content if that belongs to an attachment, without shared
/// files that may stay.
fn walk(folder: &Path, into: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&path, into);
            continue;
        }
        let shared = name == "lock"
            || name.starts_with("last_reserved_ip.")
            || (name.starts_with("iptables-") && name.ends_with(".lock"))
            || name == "xtables.lock"
            // Indexes of long chains.
            || name.starts_with("rules-")
            || (name == "boot" && path.to_string_lossy().contains("/.cni/"));
        if !shared {
            let content = fs::read(&path).unwrap_or_default();
            let content: String = String::from_utf8_lossy(&content).chars().take(60).collect();
            into.insert(format!("{} {content:?}", path.display()));
        }
    }
}

/// Returns the lock files in these folders that are held.
fn held(folders: &[&Path]) -> BTreeSet<String> {
    let mut held = BTreeSet::new();
    for entry in folders.iter().flat_map(fs::read_dir).flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with("lock") && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_err()) {
            held.insert(entry.path().display().to_string());
        }
    }
    held
}

/// Returns all qdiscs but noqueue, with their devices.
fn qdiscs(world: &World) -> BTreeSet<String> {
    let all = world.node.json(&["tc", "-j", "qdisc", "show"]);
    let limits = all.as_array().into_iter().flatten().filter(|qdisc| qdisc["kind"] != "noqueue");
    limits.map(|qdisc| format!("{} of {}", qdisc["kind"], qdisc["dev"])).collect()
}

/// Returns all rules and chains, each with its table and chain, without counters.
fn rules(world: &World) -> Vec<String> {
    let mut text = world.node.ruleset();
    if world.backend == Backend::IptablesLegacy {
        text += &world.node.exec(&["iptables-legacy-save", "-t", "nat"]);
        text += &world.node.exec(&["ip6tables-legacy-save", "-t", "nat"]);
    }
    let (mut table, mut chain) = ("", "");
    let mut rules = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let line = line.trim();
        match line.strip_suffix(" {").unwrap_or(line) {
            name if name.starts_with("table ") || name.starts_with('*') => (table, chain) = (name, ""),
            name if name.starts_with("chain ") => chain = name,
            "" | "}" => continue,
            _ => {}
        }
        // `:POSTROUTING ACCEPT [3:180]`, of iptables-save.
        let without_counters = if line.starts_with(':') { line.split(" [").next().unwrap_or(line) } else { line };
        rules.push(format!("{table}, {chain}: {without_counters}"));
    }
    rules
}
