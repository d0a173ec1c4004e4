//! The folder in which new programs are written and tried before they are renamed into place.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::Error;
use crate::disk::{absent_is_fine, link_or_copy, put};
use crate::set::{Program, Set};

/// Writes the new programs to the disk and runs each once, because the folder may be mounted
/// `noexec` and a program may be built for another processor. `contents` are by checksum; programs
/// with equal content become hard links of one file, if the file system has them.
pub(crate) fn fill(staging: &Path, set: &Set, contents: &BTreeMap<&str, Vec<u8>>) -> Result<(), Error> {
    empty(staging)?;
    for (sum, content) in contents {
        let mut names = set.programs().iter().filter(|program| program.sum == *sum).map(|program| &program.name);
        let Some(first) = names.next().map(|name| staging.join(name)) else { continue };
        put(&first, content, 0o755).map_err(Error::io("write", &first))?;
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

/// Makes an empty folder.
pub(crate) fn empty(staging: &Path) -> Result<(), Error> {
    absent_is_fine(fs::remove_dir_all(staging)).map_err(Error::io("remove", staging))?;
    DirBuilder::new().mode(0o700).create(staging).map_err(Error::io("create the folder", staging))
}

/// A plugin that is asked for its versions answers and exits, whatever the node looks like.
fn run_once(path: &Path, program: &Program) -> Result<(), Error> {
    let ran = Command::new(path).env_clear().env("CNI_COMMAND", "VERSION").stdin(Stdio::null()).output();
    let output = ran.map_err(|cause| {
        Error::new(format!(
            "{} does not run here ({cause}): is the folder mounted noexec, or is it for another processor?",
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
