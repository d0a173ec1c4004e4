//! Writes new programs into a temporary folder and runs each once, before they are renamed into
//! place.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::Error;
use crate::disk::{ignore_not_found, link_or_copy, write_new};
use crate::set::{Program, Set};

/// Writes the programs of `set` to the folder `staging` and runs each once, to find out before the
/// install whether the folder is mounted `noexec` or a program is built for another processor.
///
/// `contents` maps each checksum to the content. Programs with equal content become hard links of
/// one file, if the file system supports them.
///
/// # Errors
/// If a program cannot be written, or does not run.
pub(crate) fn write_and_try(staging: &Path, set: &Set, contents: &BTreeMap<&str, Vec<u8>>) -> Result<(), Error> {
    create_empty(staging)?;
    for (sum, content) in contents {
        let mut names = set.programs().iter().filter(|program| program.sum == *sum).map(|program| &program.name);
        let Some(first) = names.next().map(|name| staging.join(name)) else { continue };
        write_new(&first, content, 0o755).map_err(Error::io("write", &first))?;
        for name in names {
            let path = staging.join(name);
            link_or_copy(&first, &path).map_err(Error::io("write", &path))?;
        }
    }
    for program in set.programs() {
        run_once(&staging.join(&program.name), program)?;
    }
    Ok(())
}

/// Creates the empty folder `staging`. An existing folder is removed first.
pub(crate) fn create_empty(staging: &Path) -> Result<(), Error> {
    ignore_not_found(fs::remove_dir_all(staging)).map_err(Error::io("remove", staging))?;
    DirBuilder::new().mode(0o700).create(staging).map_err(Error::io("create the folder", staging))
}

/// Runs the program with the verb VERSION, which needs no configuration and changes nothing.
///
/// # Errors
/// If the program cannot be executed, fails, or does not print the versions.
fn run_once(path: &Path, program: &Program) -> Result<(), Error> {
    cni_linux::default_sigchld().map_err(|cause| Error::new(format!("failed to reset SIGCHLD: {cause}")))?;
    let outcome = Command::new(path).env_clear().env("CNI_COMMAND", "VERSION").stdin(Stdio::null()).output();
    let output = outcome.map_err(|cause| {
        Error::new(format!(
            "{} does not run here ({cause}): the folder may be mounted noexec, or the program is for another processor",
            program.name
        ))
    })?;
    if !output.status.success() || !String::from_utf8_lossy(&output.stdout).contains("supportedVersions") {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(Error::new(format!(
            "{} does not answer VERSION: {}: {}",
            program.name,
            output.status,
            stderr.trim()
        )));
    }
    Ok(())
}
