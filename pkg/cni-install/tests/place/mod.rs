//! Makes the folders that cni-install works on, saves their content, and makes them again from it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Mutex;

use cni_install::set::sum;
use cni_testkit::trace::{Act, Plan, Traced};
use cni_testkit::{Invocation, Node};
use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::model::{self, Command, FIRST, Model, Programs, SECOND};

const INSTALLER: &str = env!("CARGO_BIN_EXE_cni-install");

/// Calls that change no file.
const LOOKING: [&str; 14] = [
    "close",
    "fstat",
    "newfstatat",
    "statx",
    "lseek",
    "read",
    "mmap",
    "munmap",
    "mprotect",
    "brk",
    "getdents64",
    "flock",
    "fsync",
    "fcntl",
];

/// The sets to install.
pub(crate) struct Place<'n> {
    node: &'n Node,
    sets: TempDir,
    seen: Mutex<HashSet<(State, BTreeSet<Model>, bool)>>,
}

/// A folder of plugins, removed on drop.
pub(crate) struct Folder<'p> {
    place: &'p Place<'p>,
    temporary: TempDir,
}

/// Everything in a folder except times and inode numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State(BTreeMap<PathBuf, Entry>);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Entry {
    Folder(u32),
    File(u32, Vec<u8>),
    Link(PathBuf),
}

fn program(text: &str) -> String {
    format!("#!/bin/sh\necho '{{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"1.1.0\"]}}'\n# {text}\n")
}

impl Place<'_> {
    pub(crate) fn new(node: &Node) -> Place<'_> {
        let sets = tempfile::tempdir().unwrap();
        for (version, names) in [("first", FIRST), ("second", SECOND)] {
            let folder = sets.path().join(version);
            fs::create_dir(&folder).unwrap();
            let mut sums = String::new();
            for name in names {
                let content = program(&model::says(version, name));
                fs::write(folder.join(name), &content).unwrap();
                sums += &format!("{}  {name}\n", sum(content.as_bytes()));
            }
            fs::write(folder.join("SHA256SUMS"), sums).unwrap();
        }
        Place { node, sets, seen: Mutex::default() }
    }

    /// Whether no folder was in this state before, after a command that was not interrupted.
    pub(crate) fn is_new(&self, healed: (State, BTreeSet<Model>, bool)) -> bool {
        self.seen.lock().unwrap().insert(healed)
    }

    /// Makes a folder as it was before any install.
    pub(crate) fn original(&self) -> Folder<'_> {
        let entries = Model::new()
            .folder
            .into_iter()
            .map(|(name, text)| (PathBuf::from(name), Entry::File(0o100_755, program(&text).into_bytes())));
        self.load(&State(entries.collect()))
    }

    pub(crate) fn load(&self, state: &State) -> Folder<'_> {
        let folder = Folder { place: self, temporary: tempfile::tempdir().unwrap() };
        fs::create_dir(folder.path()).unwrap();
        for (path, entry) in &state.0 {
            let path = folder.path().join(path);
            match entry {
                Entry::Folder(mode) => {
                    fs::create_dir(&path).unwrap();
                    fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
                }
                Entry::File(mode, content) => {
                    fs::write(&path, content).unwrap();
                    fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
                }
                Entry::Link(target) => symlink(target, &path).unwrap(),
            }
        }
        folder
    }
}

impl Folder<'_> {
    pub(crate) fn path(&self) -> PathBuf {
        self.temporary.path().join("bin")
    }

    fn arguments(&self, command: Command) -> Vec<PathBuf> {
        let sets = self.place.sets.path();
        let words: Vec<PathBuf> = match command {
            Command::InstallFirst => vec!["install".into(), "--from".into(), sets.join("first")],
            Command::InstallSecond => vec!["install".into(), "--from".into(), sets.join("second")],
            Command::Rollback => vec!["rollback".into()],
            Command::Original => vec!["rollback".into(), "--original".into()],
            Command::Forget => vec!["forget".into()],
            Command::Status => vec!["status".into()],
        };
        [words, vec!["--dest".into(), self.path()]].concat()
    }

    /// Runs the command; returns the exit status and the output.
    pub(crate) fn run(&self, command: Command) -> (i32, String) {
        let mut call = std::process::Command::new(INSTALLER);
        let output = call.args(self.arguments(command)).stdin(Stdio::null()).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code().unwrap_or(-1), String::from_utf8(text).unwrap())
    }

    fn invocation(&self, command: Command) -> Invocation<'_> {
        let call = Invocation::new(self.place.node, INSTALLER);
        self.arguments(command).iter().fold(call, |call, word| call.arg(word))
    }

    pub(crate) fn traced(&self, command: Command, act: Act, at: u64) -> Traced {
        self.invocation(command).traced(&Plan { victim: "cni-install".to_owned(), at, act })
    }

    /// Counts the calls of the command, and returns the states in which a kill at each call leaves
    /// the folder.
    pub(crate) fn watched(&self, command: Command) -> (u64, Vec<(u64, State)>) {
        let plan = Plan { victim: "cni-install".to_owned(), at: u64::MAX, act: Act::Signal(Signal::SIGKILL) };
        let (mut calls, mut states, mut locked, mut changed): (u64, Vec<(u64, State)>, bool, bool) =
            (0, Vec::new(), false, true);
        self.invocation(command).watched(&plan, |hit| {
            calls += 1;
            // Calls before the lock, and calls that cannot change a file, need no look.
            if changed {
                let state = self.save();
                if states.last().is_none_or(|(_, last)| *last != state) {
                    states.push((calls, state));
                }
            }
            locked |= hit.call == "flock";
            changed = locked && !LOOKING.contains(&hit.call.as_str());
        });
        (calls, states)
    }

    pub(crate) fn save(&self) -> State {
        let mut entries = BTreeMap::new();
        let mut left = vec![self.path()];
        while let Some(folder) = left.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let metadata = fs::symlink_metadata(&path).unwrap();
                let mode = metadata.permissions().mode();
                let value = if metadata.is_dir() {
                    left.push(path.clone());
                    Entry::Folder(mode)
                } else if metadata.is_symlink() {
                    Entry::Link(fs::read_link(&path).unwrap())
                } else {
                    Entry::File(mode, fs::read(&path).unwrap())
                };
                entries.insert(path.strip_prefix(self.path()).unwrap().to_owned(), value);
            }
        }
        State(entries)
    }

    /// Returns the programs that are there, by what their last line prints.
    pub(crate) fn programs(&self) -> Programs {
        let names = fs::read_dir(self.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name != ".cni-install").map(|name| (name.clone(), says(&self.path().join(name)))).collect()
    }

    /// Checks that each program is one of the known ones and can be run, and that the foreign one
    /// is unchanged.
    pub(crate) fn assert_whole_programs(&self, story: &str) {
        let programs = self.programs();
        assert_eq!(programs.get("flannel").map(String::as_str), Some("original flannel"), "{story}");
        assert!(programs.contains_key("bridge") && programs.contains_key("tuning"), "{story}: {programs:?}");
        for (name, text) in programs {
            let known = ["original", "first", "second"].map(|version| model::says(version, &name));
            assert!(known.contains(&text), "{story}: {name} is {text:?}");
            let mode = fs::metadata(self.path().join(&name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o755, "{story}: {name}");
        }
    }

    pub(crate) fn has_own_files(&self) -> bool {
        fs::symlink_metadata(self.path().join(".cni-install")).is_ok()
    }
}

fn says(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    text.lines().last().unwrap_or_default().trim_start_matches("# ").to_owned()
}
