//! A kept set: files that installed programs have replaced, in a folder with two lists.
//!
//! `SHA256SUMS` has the programs that were put in their places, and `ABSENT` the names that were
//! not there. In the original set, which outlives many installs, a name has a line in `SHA256SUMS`
//! for each program that was ever put there.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::Error;
use crate::disk::{absent_is_fine, holds, link_or_copy, metadata, put, read, sync};
use crate::set::{self, ABSENT, Program, SUMS, Set};

/// A kept set, complete on the disk.
#[derive(Debug)]
pub(crate) struct Kept {
    folder: PathBuf,
    programs: Vec<Program>,
    absent: BTreeSet<String>,
    /// The time when an install replaced it.
    pub(crate) since: SystemTime,
}

impl Kept {
    /// Reads a kept set; `None` if there is none, or if it is not complete.
    pub(crate) fn read(folder: &Path) -> Result<Option<Kept>, Error> {
        let is_folder = metadata(folder).map_err(Error::io("look at", folder))?.is_some_and(|found| found.is_dir());
        let (absent_path, sums_path) = (folder.join(ABSENT), folder.join(SUMS));
        if !is_folder {
            return Ok(None);
        }
        let (Some(absent), Some(sums)) = (text(&absent_path)?, text(&sums_path)?) else { return Ok(None) };
        let programs = set::parse_lines(&sums).map_err(|why| Error::new(format!("{}: {why}", sums_path.display())))?;
        let since = fs::metadata(&absent_path).and_then(|found| found.modified());
        Ok(Some(Kept {
            folder: folder.to_owned(),
            programs,
            absent: absent.lines().map(str::to_owned).collect(),
            since: since.map_err(Error::io("look at", &absent_path))?,
        }))
    }

    /// Keeps the files that the set's programs will replace.
    pub(crate) fn take(places: &Path, set: &Set, folder: &Path) -> Result<(), Error> {
        let _ = fs::remove_dir_all(folder); // left by an installer that was killed before it used the folder
        DirBuilder::new().mode(0o755).create(folder).map_err(Error::io("create the folder", folder))?;
        let mut absent = String::new();
        for Program { name, .. } in set.programs() {
            let place = places.join(name);
            match metadata(&place).map_err(Error::io("look at", &place))? {
                Some(found) if found.is_dir() => {
                    return Err(Error::new(format!("{} is a folder", place.display())));
                }
                Some(_) => link_or_copy(&place, &folder.join(name)).map_err(Error::io("keep", &place))?,
                None => {
                    absent.push_str(name);
                    absent.push('\n');
                }
            }
        }
        for (name, text) in [(ABSENT, &absent), (SUMS, &set::text(set.programs()))] {
            let path = folder.join(name);
            put(&path, text.as_bytes(), 0o644).map_err(Error::io("write", &path))?;
        }
        sync(folder).map_err(Error::io("write out", folder))
    }

    /// Returns the names of the set, each once.
    pub(crate) fn names(&self) -> Vec<&str> {
        let mut seen = BTreeSet::new();
        self.programs.iter().map(|program| program.name.as_str()).filter(|name| seen.insert(*name)).collect()
    }

    /// Whether no file had this name.
    pub(crate) fn was_absent(&self, name: &str) -> bool {
        self.absent.contains(name)
    }

    /// Returns the path of the kept file of that name.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Whether an install has put the program with this sum in the place of that name.
    pub(crate) fn is_ours(&self, name: &str, sum: &str) -> bool {
        self.programs.iter().any(|program| program.name == name && program.sum == sum)
    }

    /// Returns the names of the kept files that `folder` does not hold.
    pub(crate) fn not_held_by(&self, folder: &Path) -> Result<Vec<String>, Error> {
        let mut names = Vec::new();
        for name in self.names() {
            let file = self.file(name);
            let place = folder.join(name);
            let has_file = !self.was_absent(name) && exists(&file)?;
            if has_file && !holds(&place, &file).map_err(Error::io("compare", &place))? {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Merges this set into the one in `folder`, or creates it. A file that is already kept under a
    /// name is not replaced.
    ///
    /// The list of programs is written last: until then an interrupted run has no effect.
    pub(crate) fn add_to(&self, folder: &Path) -> Result<(), Error> {
        let known = Kept::read(folder)?;
        let since = known.as_ref().map_or(self.since, |known| known.since);
        let before = known.as_ref().map(Kept::names).unwrap_or_default();
        // An interrupted run may have listed names in `ABSENT` whose programs are not in `SUMS`.
        let mut absent: BTreeSet<&str> =
            before.iter().copied().filter(|name| known.as_ref().is_some_and(|known| known.was_absent(name))).collect();
        let mut new = Vec::new();
        for name in self.names().into_iter().filter(|name| !before.contains(name)) {
            if self.was_absent(name) || exists(&self.file(name))? {
                new.push(name);
            }
        }
        let mut programs = known.as_ref().map(|known| known.programs.clone()).unwrap_or_default();
        let listed = programs.len();
        for program in &self.programs {
            let counts = before.contains(&program.name.as_str()) || new.contains(&program.name.as_str());
            if counts && !programs.contains(program) {
                programs.push(program.clone());
            }
        }
        if programs.len() == listed {
            return Ok(());
        }
        make_folder(folder).map_err(Error::io("create the folder", folder))?;
        for name in new {
            if self.was_absent(name) {
                absent.insert(name);
                continue;
            }
            let (from, to) = (self.file(name), folder.join(name));
            absent_is_fine(fs::remove_file(&to)).map_err(Error::io("remove", &to))?;
            link_or_copy(&from, &to).map_err(Error::io("keep", &from))?;
        }
        let absent: String = absent.iter().map(|name| format!("{name}\n")).collect();
        replace(folder, (ABSENT, &absent), since)?;
        replace(folder, (SUMS, &set::text(&programs)), since)
    }
}

pub(crate) fn exists(path: &Path) -> Result<bool, Error> {
    Ok(metadata(path).map_err(Error::io("look at", path))?.is_some())
}

/// Reads the text of a file; `None` if there is none.
fn text(path: &Path) -> Result<Option<String>, Error> {
    match read(path) {
        Ok(text) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(Error::io("read", path)(cause)),
    }
}

/// Makes a folder, replacing a link or a file of that name.
fn make_folder(path: &Path) -> io::Result<()> {
    match metadata(path)? {
        Some(found) if found.is_dir() => return Ok(()),
        Some(_) => fs::remove_file(path)?,
        None => {}
    }
    DirBuilder::new().mode(0o755).create(path)
}

/// Writes a list to the disk in one step, together with what was written before it.
fn replace(folder: &Path, (name, text): (&str, &str), modified: SystemTime) -> Result<(), Error> {
    let (path, temporary) = (folder.join(name), folder.join(format!(".{name}")));
    let put = put(&temporary, text.as_bytes(), 0o644);
    let put = put.and_then(|()| File::options().write(true).open(&temporary)?.set_modified(modified));
    put.map_err(Error::io("write", &temporary))?;
    sync(folder).map_err(Error::io("write out", folder))?;
    fs::rename(&temporary, &path).map_err(Error::io("write", &path))?;
    sync(folder).map_err(Error::io("write out", folder))
}
