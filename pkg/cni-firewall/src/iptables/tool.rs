//! Finds and runs the programs of iptables, reads the output of the save program, and looks for
//! tables of iptables-legacy.
//!
//! The variant of a program is taken from the name of its file, after following links. If that name
//! contains no variant, the program is run with `--version`. Programs run without a shell and with
//! a time limit; an error has the program's arguments, its status and its stderr.
//!
//! Callers must not run a save program of iptables-legacy if the table does not exist: reading the
//! table makes the kernel create it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cni::machine::{Child, Exit, Machine, OnSigterm, RunError};

use super::{Chain, Rule, Table, Variant, split};
use cni_linux::error::{Cause, Error, Result};
use cni_linux::program;
use cni_linux::route::Family;

/// How long iptables-legacy waits for its own lock at most, in seconds.
const XTABLES_WAIT: &str = "10";
/// How long a program can run, including its wait for that lock.
const LIMIT: Duration = Duration::from_secs(20);

/// What a program of iptables does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramKind {
    /// Changes a table.
    Restore,
    /// Prints a table.
    Save,
}

impl ProgramKind {
    /// Returns the last part of the program's name.
    fn suffix(self) -> &'static str {
        match self {
            ProgramKind::Restore => "restore",
            ProgramKind::Save => "save",
        }
    }
}

/// The folder of the lock's file.
const LOCK_FOLDER: &str = "/run/cni";

/// The folders in which programs are searched, and the folder of the lock's file.
#[derive(Clone, Debug)]
pub struct Folders {
    programs: Vec<PathBuf>,
    pub(super) lock_folder: PathBuf,
}

impl Folders {
    /// Searches programs in the folders of `path` (the value of the variable PATH), then in the
    /// system's folders. The lock's file is in /run/cni.
    pub fn new(path: Option<OsString>) -> Folders {
        Folders::only(program::folders(path))
    }

    /// Searches programs in these folders only. The lock's file is in /run/cni.
    pub fn only(folders: impl IntoIterator<Item = PathBuf>) -> Folders {
        Folders { programs: folders.into_iter().collect(), lock_folder: LOCK_FOLDER.into() }
    }

    /// Puts the lock's file into `folder`. Only processes with the same folder exclude each other.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with_lock_folder(self, folder: impl Into<PathBuf>) -> Folders {
        Folders { lock_folder: folder.into(), ..self }
    }

    /// Returns the path of the program with this name; `None` if it is not installed.
    fn find(&self, name: &str) -> Option<PathBuf> {
        program::find(&self.programs, name)
    }
}

/// A program of one variant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tool {
    pub(crate) program: PathBuf,
    pub(crate) variant: Variant,
}

/// Returns the first part of the names of a family's programs.
pub(crate) fn program_prefix(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

/// Returns the first part of the names of a variant's programs: `ip6tables-nft`.
pub(crate) fn variant_prefix(family: Family, variant: Variant) -> String {
    format!("{}-{variant}", program_prefix(family))
}

/// The programs of iptables on this host, and the means to run them.
pub(crate) struct Programs<'m> {
    pub(crate) machine: &'m dyn Machine,
    /// Whether SIGTERM ends the wait for the lock. SIGTERM never ends a program that runs.
    pub(crate) on_sigterm: OnSigterm,
    pub(crate) folders: Folders,
}

impl Programs<'_> {
    /// Returns the restore program that the administrator has chosen: `iptables-restore`, usually a
    /// link; if it is not installed, `iptables-nft-restore`, else `iptables-legacy-restore`. `None`
    /// if none is installed.
    pub(crate) fn chosen(&self, family: Family) -> Result<Option<Tool>> {
        let kind = ProgramKind::Restore;
        if let Some(plain) = self.find_plain(family, kind)? {
            return Ok(Some(plain));
        }
        Ok([Variant::Nft, Variant::Legacy].into_iter().find_map(|variant| self.find_named(family, variant, kind)))
    }

    /// Returns the program of one variant: `iptables-nft-save`, for example, or else
    /// `iptables-save` if that has the variant. `None` if no program of the variant is installed.
    pub(crate) fn find(&self, family: Family, variant: Variant, kind: ProgramKind) -> Result<Option<Tool>> {
        if let Some(named) = self.find_named(family, variant, kind) {
            return Ok(Some(named));
        }
        Ok(self.find_plain(family, kind)?.filter(|plain| plain.variant == variant))
    }

    /// Returns the program whose name does not contain the variant: `iptables-restore`. `None` if
    /// it is not installed.
    fn find_plain(&self, family: Family, kind: ProgramKind) -> Result<Option<Tool>> {
        let name = format!("{}-{}", program_prefix(family), kind.suffix());
        let Some(program) = self.folders.find(&name) else { return Ok(None) };
        let variant = self.variant_of(&program)?;
        Ok(Some(Tool { program, variant }))
    }

    /// Returns the program whose name contains the variant: `iptables-nft-restore`. `None` if it is
    /// not installed.
    fn find_named(&self, family: Family, variant: Variant, kind: ProgramKind) -> Option<Tool> {
        let program = self.folders.find(&format!("{}-{}", variant_prefix(family, variant), kind.suffix()))?;
        Some(Tool { program, variant })
    }

    /// Returns the variant of a program. Follows links, usually to `xtables-nft-multi` or
    /// `xtables-legacy-multi`, whose names contain the variant. A program with another name, for
    /// example a script, is run with `--version`; fails if that fails.
    fn variant_of(&self, program: &Path) -> Result<Variant> {
        // If a link cannot be followed, its own name is used; running the program then reports why.
        let file = program.canonicalize().unwrap_or_else(|_| program.to_owned());
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name.contains("nft") {
            return Ok(Variant::Nft);
        }
        if name.contains("legacy") {
            return Ok(Variant::Legacy);
        }
        let version = self.run(program, &["--version"], "")?;
        // Releases from before iptables-nft print no variant; they are what is now called legacy.
        Ok(if version.contains("nf_tables") { Variant::Nft } else { Variant::Legacy })
    }

    /// Runs a restore program with `text` as its input. If the program fails, it has changed
    /// nothing.
    pub(crate) fn restore(&self, tool: &Tool, text: &str) -> Result<()> {
        self.run(&tool.program, &["--noflush", "-w", XTABLES_WAIT], text).map(drop)
    }

    /// Runs a save program and returns its output.
    pub(crate) fn save(&self, tool: &Tool, table: Table) -> Result<String> {
        self.run(&tool.program, &["-t", table.name()], "")
    }

    /// Runs a program and returns its stdout. Fails if it cannot be started, does not end within
    /// [`LIMIT`], or does not exit with status 0.
    fn run(&self, program: &Path, args: &[&str], stdin: &str) -> Result<String> {
        let child = Child {
            program: program.to_owned(),
            args: args.iter().map(OsString::from).collect(),
            env: None,
            stdin: stdin.as_bytes(),
            timeout: LIMIT,
            // SIGTERM does not end the program: its run is short, and rollbacks after a SIGTERM
            // need it too.
            on_sigterm: OnSigterm::Finish,
        };
        let cause = match self.machine.run(&child) {
            Ok(output) if output.status == Exit::Status(0) => {
                return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
            }
            Ok(output) => {
                let stderr = String::from_utf8_lossy(&output.stderr);
                let lines: Vec<&str> = stderr.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
                Cause::text(format!("{}: {}", output.status, lines.join(" / ")))
            }
            Err(RunError::Timeout(limit)) => Cause::Deadline(limit),
            Err(RunError::Terminated) => Cause::Terminated,
            Err(RunError::Start(error)) => error.into(),
            Err(RunError::Io(error)) => {
                Cause::text(format!("failed to write to the program or to read its output: {error}"))
            }
        };
        Err(Error::new(format_args!("failed to run {} {}", program.display(), args.join(" ")), cause))
    }
}

/// Whether iptables-legacy has this table in the network namespace of the calling thread, which may
/// differ from the process's.
pub(super) fn legacy_table_exists(table: Table, family: Family) -> Result<bool> {
    use std::io::ErrorKind::{NotFound, PermissionDenied};
    let path = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    match std::fs::read_to_string(path) {
        Ok(names) => Ok(names.lines().any(|name| name == table.name())),
        // A kernel without iptables-legacy does not have the file. A process that is not allowed to
        // read the file cannot change the tables either.
        Err(error) if [NotFound, PermissionDenied].contains(&error.kind()) => Ok(false),
        Err(error) => Err(Error::new(format_args!("failed to read {path}"), error)),
    }
}

/// Returns the chains by name from the output of `iptables-save -t TABLE`. Each value is `Some`, as
/// [`Chains`](super::Chains) needs it: there `None` is a chain that is known not to exist.
pub(crate) fn parse(saved: &str) -> BTreeMap<String, Option<Chain>> {
    let mut chains: BTreeMap<String, Option<Chain>> = BTreeMap::new();
    let empty = || Some(Chain::default());
    for line in saved.lines() {
        if let Some(declaration) = line.strip_prefix(':') {
            let name = declaration.split(' ').next().unwrap_or_default();
            chains.entry(name.to_owned()).or_insert_with(empty);
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let mut words = split(rule);
            if words.is_empty() {
                continue;
            }
            let chain_name = words.remove(0);
            if let Some(chain) = chains.entry(chain_name).or_insert_with(empty) {
                chain.rules.push(Rule { words, handle: None, whole: true });
            }
        }
    }
    chains
}

#[cfg(test)]
mod tests {
    use cni_testkit::program;

    use super::*;

    /// Runs `test` with the programs in these folders and a real machine.
    fn with_programs<T>(folders: Folders, test: impl FnOnce(&Programs<'_>) -> T) -> T {
        test(&Programs { machine: &crate::testing::machine(), on_sigterm: OnSigterm::Kill, folders })
    }

    fn chosen_in(folder: &tempfile::TempDir, family: Family) -> Option<Tool> {
        with_programs(in_folder(folder), |programs| programs.chosen(family).unwrap())
    }

    fn folder_with(names: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, target) in names {
            let target = folder.path().join(target);
            if !target.exists() {
                program::script(&target, "#!/bin/sh\necho 'iptables-restore v1.8.9 (nf_tables)'\n");
            }
            let path = folder.path().join(name);
            if path != target {
                std::os::unix::fs::symlink(target, path).unwrap();
            }
        }
        folder
    }

    fn in_folder(folder: &tempfile::TempDir) -> Folders {
        Folders::only([folder.path().to_owned()])
    }

    #[test]
    fn the_target_of_the_plain_name_decides_the_variant() {
        for (target, variant) in [("xtables-nft-multi", Variant::Nft), ("xtables-legacy-multi", Variant::Legacy)] {
            let folder = folder_with(&[("iptables-restore", target), ("iptables-nft-restore", "xtables-nft-multi")]);
            let tool = chosen_in(&folder, Family::V4).unwrap();
            assert_eq!((tool.program, tool.variant), (folder.path().join("iptables-restore"), variant));
            assert_eq!(chosen_in(&folder, Family::V6), None);
        }
    }

    #[test]
    fn the_version_of_a_script_shows_its_variant() {
        let folder = folder_with(&[("iptables-restore", "iptables-restore")]);
        let tool = chosen_in(&folder, Family::V4).unwrap();
        assert_eq!(tool.variant, Variant::Nft);
        let find = |variant| {
            let restore = ProgramKind::Restore;
            with_programs(in_folder(&folder), |programs| programs.find(Family::V4, variant, restore).unwrap())
        };
        assert!(find(Variant::Nft).is_some() && find(Variant::Legacy).is_none());
    }

    #[test]
    fn without_a_plain_name_any_variant_will_do() {
        let folder = folder_with(&[("ip6tables-legacy-restore", "xtables-legacy-multi")]);
        let tool = chosen_in(&folder, Family::V6).unwrap();
        assert_eq!(tool.variant, Variant::Legacy);
    }

    #[test]
    fn what_cannot_be_executed_and_relative_folders_do_not_count() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("iptables-restore"), "").unwrap();
        assert_eq!(chosen_in(&folder, Family::V4), None);
        assert!(!Folders::new(Some("bin:/x".into())).programs.contains(&PathBuf::from("bin")));
    }

    #[test]
    fn a_failure_names_the_program_its_arguments_and_what_it_said() {
        let args = ["-c", "echo one >&2; echo two >&2; exit 3"];
        let run = |programs: &Programs<'_>| programs.run(Path::new("/bin/sh"), &args, "");
        let error = with_programs(Folders::only([]), run).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("failed to run /bin/sh -c ") && text.ends_with(": exit status 3: one / two"),
            "{text}"
        );
    }
}
