//! Reads and writes kept sets: folders with the files that installed programs have replaced, for a
//! rollback.
//!
//! A kept set has two lists. `SHA256SUMS` lists the programs that were installed in place of the
//! kept files, and `ABSENT` the names under which no file existed. A folder that lacks one of the
//! lists is not a kept set: the process that wrote it was killed, or `forget` has removed `ABSENT`.
//!
//! The original set is kept over many installs: in its `SHA256SUMS` a name has a line for each
//! program that was ever installed under it.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::Error;
use crate::disk::{find_metadata, ignore_not_found, is_same, link_or_copy, read_text, sync, write_new};
use crate::set::{self, ABSENT_LIST, Program, SUMS, Set};

/// A complete kept set.
#[derive(Debug)]
pub(crate) struct Kept {
    folder: PathBuf,
    /// The programs that were installed in place of the kept files.
    programs: Vec<Program>,
    /// The names under which no file existed.
    absent: BTreeSet<String>,
    /// The time of the install that replaced the files.
    pub(crate) replaced_at: SystemTime,
}

impl Kept {
    /// Reads a kept set. `None` if the folder does not exist or lacks one of the lists.
    pub(crate) fn read(folder: &Path) -> Result<Option<Kept>, Error> {
        let is_folder =
            find_metadata(folder).map_err(Error::io("look at", folder))?.is_some_and(|found| found.is_dir());
        if !is_folder {
            return Ok(None);
        }
        let (absent_path, sums_path) = (folder.join(ABSENT_LIST), folder.join(SUMS));
        let read = |path: &Path| read_text(path).map_err(Error::io("read", path));
        let (Some(absent), Some(sums)) = (read(&absent_path)?, read(&sums_path)?) else { return Ok(None) };
        let programs =
            set::parse_lines(&sums).map_err(|reason| Error::new(format!("{}: {reason}", sums_path.display())))?;
        let modified = fs::metadata(&absent_path).and_then(|found| found.modified());
        Ok(Some(Kept {
            folder: folder.to_owned(),
            programs,
            absent: absent.lines().map(str::to_owned).collect(),
            replaced_at: modified.map_err(Error::io("look at", &absent_path))?,
        }))
    }

    /// Makes `folder` a kept set with links to, or copies of, the files of `plugin_folder` that the
    /// programs of `set` will replace.
    ///
    /// # Errors
    /// If a folder has the name of a program, or a file cannot be linked or copied.
    pub(crate) fn create(plugin_folder: &Path, set: &Set, folder: &Path) -> Result<(), Error> {
        // An earlier installer that was killed may have left the folder. If it cannot be removed,
        // creating it fails.
        let _ = fs::remove_dir_all(folder);
        DirBuilder::new().mode(0o755).create(folder).map_err(Error::io("create the folder", folder))?;
        let mut absent = String::new();
        for Program { name, .. } in set.programs() {
            let path = plugin_folder.join(name);
            match find_metadata(&path).map_err(Error::io("look at", &path))? {
                Some(found) if found.is_dir() => {
                    return Err(Error::new(format!("{} is a folder, which no program can replace", path.display())));
                }
                Some(_) => link_or_copy(&path, &folder.join(name)).map_err(Error::io("keep", &path))?,
                None => {
                    absent.push_str(name);
                    absent.push('\n');
                }
            }
        }
        for (name, text) in [(ABSENT_LIST, &absent), (SUMS, &set::text(set.programs()))] {
            let path = folder.join(name);
            write_new(&path, text.as_bytes(), 0o644).map_err(Error::io("write", &path))?;
        }
        sync(folder).map_err(Error::io("sync", folder))
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

    /// Returns the names of the kept files that `folder` does not have: under such a name, it has a
    /// different file or none. Skips kept files that were deleted.
    pub(crate) fn not_restored_in(&self, folder: &Path) -> Result<Vec<String>, Error> {
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

    /// Merges this set into the kept set in `folder`, which is created if it does not exist. If
    /// both sets have a name, the kept file of `folder` stays, because it is older, and the lists
    /// of installed programs are merged.
    ///
    /// `SHA256SUMS` is written last, because the names in it are the names of the set. So if the
    /// process is killed earlier, the set in `folder` is unchanged.
    ///
    /// # Errors
    /// If a file cannot be linked or copied, or a list cannot be written.
    pub(crate) fn add_to(&self, folder: &Path) -> Result<(), Error> {
        let mut merged = Kept::read(folder)?.unwrap_or_else(|| Kept {
            folder: folder.to_owned(),
            programs: Vec::new(),
            absent: BTreeSet::new(),
            replaced_at: self.replaced_at,
        });
        let existing_names: BTreeSet<String> = merged.names().into_iter().map(str::to_owned).collect();
        // A killed process may have written names to `ABSENT` but not to `SHA256SUMS`.
        merged.absent.retain(|name| existing_names.contains(name));
        let mut new_names = Vec::new();
        for name in self.names() {
            // A kept file that was deleted cannot be added.
            if !existing_names.contains(name) && (self.was_absent(name) || exists(&self.file(name))?) {
                new_names.push(name);
            }
        }
        let count_before = merged.programs.len();
        for program in &self.programs {
            let has_name = existing_names.contains(&program.name) || new_names.contains(&program.name.as_str());
            if has_name && !merged.programs.contains(program) {
                merged.programs.push(program.clone());
            }
        }
        // Every new name adds a program, so without a new program there is nothing to write.
        if merged.programs.len() == count_before {
            return Ok(());
        }
        create_folder(folder).map_err(Error::io("create the folder", folder))?;
        for name in new_names {
            if self.was_absent(name) {
                merged.absent.insert(name.to_owned());
            } else {
                self.copy_file(name, &merged)?;
            }
        }
        let absent: String = merged.absent.iter().map(|name| format!("{name}\n")).collect();
        replace_list(folder, ABSENT_LIST, &absent, merged.replaced_at)?;
        replace_list(folder, SUMS, &set::text(&merged.programs), merged.replaced_at)
    }

    /// Links or copies the kept file of this name into the folder of another set.
    fn copy_file(&self, name: &str, other: &Kept) -> Result<(), Error> {
        let (from, to) = (self.file(name), other.file(name));
        // A killed process may have left this file.
        ignore_not_found(fs::remove_file(&to)).map_err(Error::io("remove", &to))?;
        link_or_copy(&from, &to).map_err(Error::io("keep", &from))
    }
}

/// Whether a file, folder or symbolic link exists at `path`.
pub(crate) fn exists(path: &Path) -> Result<bool, Error> {
    Ok(find_metadata(path).map_err(Error::io("look at", path))?.is_some())
}

/// Creates the folder if it does not exist. Replaces a file or symbolic link at `path`.
fn create_folder(path: &Path) -> io::Result<()> {
    match find_metadata(path)? {
        Some(found) if found.is_dir() => return Ok(()),
        Some(_) => fs::remove_file(path)?,
        None => {}
    }
    DirBuilder::new().mode(0o755).create(path)
}

/// Replaces the list `name` in `folder` atomically and sets its modification time to `modified`.
/// All earlier changes in the folder are on the disk before the list is.
fn replace_list(folder: &Path, name: &str, text: &str, modified: SystemTime) -> Result<(), Error> {
    let (path, temporary) = (folder.join(name), folder.join(format!(".{name}")));
    write_new(&temporary, text.as_bytes(), 0o644)
        .and_then(|()| File::options().write(true).open(&temporary)?.set_modified(modified))
        .map_err(Error::io("write", &temporary))?;
    sync(folder).map_err(Error::io("sync", folder))?;
    fs::rename(&temporary, &path).map_err(Error::io("write", &path))?;
    sync(folder).map_err(Error::io("sync", folder))
}
