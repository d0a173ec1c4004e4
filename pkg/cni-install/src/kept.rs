//! A kept set: a folder with the files that installed programs have replaced, for a rollback.
//!
//! It has two lists. `SHA256SUMS` lists the programs that were installed in place of the kept
//! files, and `ABSENT` the names under which no file existed. The original set is kept over many
//! installs: in its `SHA256SUMS` a name has a line for each program that was ever installed under
//! it.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::Error;
use crate::disk::{absent_is_fine, is_same, link_or_copy, metadata, read, sync, write_new};
use crate::set::{self, ABSENT, Program, SUMS, Set};

/// A complete kept set.
#[derive(Debug)]
pub(crate) struct Kept {
    folder: PathBuf,
    /// The programs that were installed in place of the kept files.
    programs: Vec<Program>,
    /// The names under which no file existed.
    absent: BTreeSet<String>,
    /// The time of the install that replaced the files.
    pub(crate) since: SystemTime,
}

impl Kept {
    /// Reads a kept set. `None` if the folder does not exist or lacks one of the lists.
    pub(crate) fn read(folder: &Path) -> Result<Option<Kept>, Error> {
        let is_folder = metadata(folder).map_err(Error::io("look at", folder))?.is_some_and(|found| found.is_dir());
        let (absent_path, sums_path) = (folder.join(ABSENT), folder.join(SUMS));
        if !is_folder {
            return Ok(None);
        }
        let (Some(absent), Some(sums)) = (read_text(&absent_path)?, read_text(&sums_path)?) else { return Ok(None) };
        let programs =
            set::parse_lines(&sums).map_err(|reason| Error::new(format!("{}: {reason}", sums_path.display())))?;
        let since = fs::metadata(&absent_path).and_then(|found| found.modified());
        Ok(Some(Kept {
            folder: folder.to_owned(),
            programs,
            absent: absent.lines().map(str::to_owned).collect(),
            since: since.map_err(Error::io("look at", &absent_path))?,
        }))
    }

    /// Copies or links the files of `plugin_folder` that the programs of `set` will replace into
    /// `folder`, which becomes a kept set.
    ///
    /// # Errors
    /// A folder has the name of a program, or a file cannot be kept.
    pub(crate) fn create(plugin_folder: &Path, set: &Set, folder: &Path) -> Result<(), Error> {
        // It may exist if an installer was killed here.
        let _ = fs::remove_dir_all(folder);
        DirBuilder::new().mode(0o755).create(folder).map_err(Error::io("create the folder", folder))?;
        let mut absent = String::new();
        for Program { name, .. } in set.programs() {
            let path = plugin_folder.join(name);
            match metadata(&path).map_err(Error::io("look at", &path))? {
                Some(found) if found.is_dir() => {
                    return Err(Error::new(format!("{} is a folder", path.display())));
                }
                Some(_) => link_or_copy(&path, &folder.join(name)).map_err(Error::io("keep", &path))?,
                None => {
                    absent.push_str(name);
                    absent.push('\n');
                }
            }
        }
        for (name, text) in [(ABSENT, &absent), (SUMS, &set::text(set.programs()))] {
            let path = folder.join(name);
            write_new(&path, text.as_bytes(), 0o644).map_err(Error::io("write", &path))?;
        }
        sync(folder).map_err(Error::io("write out", folder))
    }

    /// Returns the names of the installed programs, each once.
    pub(crate) fn names(&self) -> Vec<&str> {
        let mut seen = BTreeSet::new();
        self.programs.iter().map(|program| program.name.as_str()).filter(|name| seen.insert(*name)).collect()
    }

    /// Whether no file of this name existed before the install.
    pub(crate) fn was_absent(&self, name: &str) -> bool {
        self.absent.contains(name)
    }

    /// Returns the path of the kept file of this name.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Whether an install has installed a program with this name and checksum.
    pub(crate) fn was_installed(&self, name: &str, sum: &str) -> bool {
        self.programs.iter().any(|program| program.name == name && program.sum == sum)
    }

    /// Returns the names of the kept files that `folder` does not have.
    pub(crate) fn missing_in(&self, folder: &Path) -> Result<Vec<String>, Error> {
        let mut names = Vec::new();
        for name in self.names() {
            let file = self.file(name);
            let path = folder.join(name);
            let has_file = !self.was_absent(name) && exists(&file)?;
            if has_file && !is_same(&path, &file).map_err(Error::io("compare", &path))? {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Merges this set into the one in `folder`, or creates that one. A name that it already has
    /// keeps its file.
    ///
    /// `SHA256SUMS` is written last. If the process is killed before, the set in `folder` is as it
    /// was.
    ///
    /// # Errors
    /// A file cannot be kept or a list cannot be written.
    pub(crate) fn add_to(&self, folder: &Path) -> Result<(), Error> {
        let existing = Kept::read(folder)?;
        let since = existing.as_ref().map_or(self.since, |existing| existing.since);
        let existing_names = existing.as_ref().map(Kept::names).unwrap_or_default();
        // A killed process may have listed names in `ABSENT` whose programs are not in
        // `SHA256SUMS`: they are dropped.
        let mut absent: BTreeSet<&str> = existing_names
            .iter()
            .copied()
            .filter(|name| existing.as_ref().is_some_and(|existing| existing.was_absent(name)))
            .collect();
        let mut new_names = Vec::new();
        for name in self.names().into_iter().filter(|name| !existing_names.contains(name)) {
            if self.was_absent(name) || exists(&self.file(name))? {
                new_names.push(name);
            }
        }
        let mut programs = existing.as_ref().map(|existing| existing.programs.clone()).unwrap_or_default();
        let count_before = programs.len();
        for program in &self.programs {
            let name = program.name.as_str();
            let is_in_merged_set = existing_names.contains(&name) || new_names.contains(&name);
            if is_in_merged_set && !programs.contains(program) {
                programs.push(program.clone());
            }
        }
        if programs.len() == count_before {
            return Ok(());
        }
        create_folder(folder).map_err(Error::io("create the folder", folder))?;
        for name in new_names {
            if self.was_absent(name) {
                absent.insert(name);
                continue;
            }
            let (from, to) = (self.file(name), folder.join(name));
            absent_is_fine(fs::remove_file(&to)).map_err(Error::io("remove", &to))?;
            link_or_copy(&from, &to).map_err(Error::io("keep", &from))?;
        }
        let absent: String = absent.iter().map(|name| format!("{name}\n")).collect();
        replace_list(folder, (ABSENT, &absent), since)?;
        replace_list(folder, (SUMS, &set::text(&programs)), since)
    }
}

/// Whether a file, folder or link exists at `path`.
pub(crate) fn exists(path: &Path) -> Result<bool, Error> {
    Ok(metadata(path).map_err(Error::io("look at", path))?.is_some())
}

/// Reads a text file. `None` if it does not exist.
fn read_text(path: &Path) -> Result<Option<String>, Error> {
    match read(path) {
        Ok(text) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(Error::io("read", path)(cause)),
    }
}

/// Creates the folder. A file or a link of that name is replaced.
fn create_folder(path: &Path) -> io::Result<()> {
    match metadata(path)? {
        Some(found) if found.is_dir() => return Ok(()),
        Some(_) => fs::remove_file(path)?,
        None => {}
    }
    DirBuilder::new().mode(0o755).create(path)
}

/// Replaces a list atomically and gives it the time of modification `modified`. The files that were
/// written to the folder before are on the disk before the list is.
fn replace_list(folder: &Path, (name, text): (&str, &str), modified: SystemTime) -> Result<(), Error> {
    let (path, temporary) = (folder.join(name), folder.join(format!(".{name}")));
    write_new(&temporary, text.as_bytes(), 0o644)
        .and_then(|()| File::options().write(true).open(&temporary)?.set_modified(modified))
        .map_err(Error::io("write", &temporary))?;
    sync(folder).map_err(Error::io("write out", folder))?;
    fs::rename(&temporary, &path).map_err(Error::io("write", &path))?;
    sync(folder).map_err(Error::io("write out", folder))
}
