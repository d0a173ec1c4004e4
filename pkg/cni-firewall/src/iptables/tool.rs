//! Finding and running iptables' programs.
//!
//! Which variant a program belongs to is read off the file its name leads to, not asked of it: no
//! process is spent on a question. Programs run through [`Machine::run`], without a shell, with a
//! deadline; an error has its arguments, its status and what it wrote to stderr.
//!
//! A legacy program must not be run to look for rules: that makes the kernel create the legacy
//! table.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cni::machine::{Child, Exit, Machine, OnSigterm, RunError};

use super::{Table, Variant};
use cni_linux::error::{Cause, Error, Result};
use cni_linux::program;
use cni_linux::route::Family;

/// How long iptables-legacy waits for its own lock, in seconds.
const XTABLES_WAIT: &str = "10";
/// How long a program may take, its wait for that lock included.
const LIMIT: Duration = Duration::from_secs(20);

/// The kinds of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramKind {
    Restore,
    Save,
}

impl ProgramKind {
    fn suffix(self) -> &'static str {
        match self {
            ProgramKind::Restore => "restore",
            ProgramKind::Save => "save",
        }
    }
}

/// Runs programs. Knows whether SIGTERM ends them.
#[derive(Clone, Copy)]
pub(crate) struct Runner<'m> {
    pub(crate) machine: &'m dyn Machine,
    pub(crate) on_sigterm: OnSigterm,
}

/// Where the lock lies.
const LOCKS: &str = "/run/cni";

/// Where to look for programs, and where the lock lies.
#[derive(Clone, Debug)]
pub struct Folders {
    programs: Vec<PathBuf>,
    locks: PathBuf,
}

impl Folders {
    /// Programs in those of `path` (as in the variable PATH), then in the system's; the lock in
    /// /run/cni.
    pub fn new(path: Option<OsString>) -> Folders {
        Folders::only(program::folders(path))
    }

    /// Programs in these alone.
    pub fn only(folders: impl IntoIterator<Item = PathBuf>) -> Folders {
        Folders { programs: folders.into_iter().collect(), locks: LOCKS.into() }
    }

    /// The lock elsewhere. All who are to keep out each other must agree.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with_locks(self, folder: impl Into<PathBuf>) -> Folders {
        Folders { locks: folder.into(), ..self }
    }

    pub(crate) fn locks(&self) -> &Path {
        &self.locks
    }

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

fn base(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

/// The program that the machine's owner has chosen: the one without a variant in its name, else
/// whichever there is.
pub(crate) fn chosen(folders: &Folders, runner: Runner<'_>, family: Family) -> Result<Option<Tool>> {
    let plain = format!("{}-{}", base(family), ProgramKind::Restore.suffix());
    if let Some(program) = folders.find(&plain) {
        let variant = variant_of(&program, runner)?;
        return Ok(Some(Tool { program, variant }));
    }
    for variant in [Variant::Nft, Variant::Legacy] {
        if let Some(program) = folders.find(&named(family, variant, ProgramKind::Restore)) {
            return Ok(Some(Tool { program, variant }));
        }
    }
    Ok(None)
}

/// The program of one variant.
pub(crate) fn find(
    folders: &Folders,
    runner: Runner<'_>,
    family: Family,
    variant: Variant,
    job: ProgramKind,
) -> Result<Option<Tool>> {
    if let Some(program) = folders.find(&named(family, variant, job)) {
        return Ok(Some(Tool { program, variant }));
    }
    let Some(program) = folders.find(&format!("{}-{}", base(family), job.suffix())) else { return Ok(None) };
    Ok((variant_of(&program, runner)? == variant).then_some(Tool { program, variant }))
}

fn named(family: Family, variant: Variant, job: ProgramKind) -> String {
    format!("{}-{variant}-{}", base(family), job.suffix())
}

/// Returns the variant by the name of the file behind the links, `xtables-nft-multi` or
/// `xtables-legacy-multi`. If a distribution names it otherwise, or a script is in its place, the
/// program is asked.
fn variant_of(program: &Path, runner: Runner<'_>) -> Result<Variant> {
    let file = program.canonicalize().unwrap_or_else(|_| program.to_owned());
    let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if name.contains("nft") {
        return Ok(Variant::Nft);
    }
    if name.contains("legacy") {
        return Ok(Variant::Legacy);
    }
    let said = run(runner, program, &["--version"], b"")?;
    // Before there were two there was only what is now called legacy.
    Ok(if String::from_utf8_lossy(&said).contains("nf_tables") { Variant::Nft } else { Variant::Legacy })
}

/// Feeds `text` to a restore program, which makes all of its changes or, if it fails, none.
pub(crate) fn restore(runner: Runner<'_>, tool: &Tool, text: &str) -> Result<()> {
    run(runner, &tool.program, &["--noflush", "-w", XTABLES_WAIT], text.as_bytes()).map(drop)
}

/// The table `nat`, as the save program writes it.
pub(crate) fn save(runner: Runner<'_>, tool: &Tool, table: Table) -> Result<String> {
    run(runner, &tool.program, &["-t", table.name()], b"").map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

fn run(runner: Runner<'_>, program: &Path, args: &[&str], stdin: &[u8]) -> Result<Vec<u8>> {
    let doing = CommandContext { program, args };
    let args = args.iter().map(OsString::from).collect();
    // Short, and wanted by rollbacks too: SIGTERM does not cut it off.
    let on_sigterm = OnSigterm::Finish;
    let child = Child { program: program.to_owned(), args, env: None, stdin, timeout: LIMIT, on_sigterm };
    let output = runner.machine.run(&child).map_err(|error| {
        let cause = match error {
            RunError::Timeout(limit) => Cause::deadline(limit),
            RunError::Terminated => Cause::terminated(),
            RunError::Start(error) => error.into(),
            RunError::Io(error) => Cause::text(format!("talking to it failed: {error}")),
        };
        Error::new(&doing, cause)
    })?;
    if output.status == Exit::Status(0) {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    Err(Error::new(doing, Cause::text(format!("{}: {}", output.status, said.join(" / ")))))
}

/// `failed to run PROGRAM ARGS`
struct CommandContext<'a> {
    program: &'a Path,
    args: &'a [&'a str],
}

impl fmt::Display for CommandContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "failed to run {} {}", self.program.display(), self.args.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use cni_testkit::program;

    use super::*;

    /// Runs `test` with a real machine.
    fn with_runner<T>(test: impl FnOnce(Runner<'_>) -> T) -> T {
        test(Runner { machine: &crate::testing::machine(), on_sigterm: OnSigterm::Kill })
    }

    fn chosen_in(folder: &tempfile::TempDir, family: Family) -> Option<Tool> {
        with_runner(|runner| chosen(&in_folder(folder), runner, family).unwrap())
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
    fn a_script_is_asked() {
        let folder = folder_with(&[("iptables-restore", "iptables-restore")]);
        let tool = chosen_in(&folder, Family::V4).unwrap();
        assert_eq!(tool.variant, Variant::Nft);
        let find = |variant| {
            with_runner(|runner| find(&in_folder(&folder), runner, Family::V4, variant, ProgramKind::Restore).unwrap())
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
        let error = with_runner(|runner| run(runner, Path::new("/bin/sh"), &args, b"").unwrap_err());
        let text = error.to_string();
        assert!(
            text.starts_with("failed to run /bin/sh -c ") && text.ends_with(": exit status 3: one / two"),
            "{text}"
        );
    }
}
