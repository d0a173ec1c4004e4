//! The folder that runtimes execute plugins from, changed while they do.
//!
//! The installer's own files are in `.cni-install/`, beside the programs:
//!
//! - `<n>/`, a generation: what the n-th install replaced, a kept set (see `kept.rs`) with the list
//!   of what it put in place. It is complete before anything is replaced. The newest one is the
//!   *previous* set. Without `ABSENT`, nothing is kept.
//! - `original/`, the *original* set: what was there before the first install, for each name that
//!   any install has replaced since. An install adds the previous set to it before replacing the
//!   previous set, so a first install, or installs of an older cni-install, leave none: then the
//!   previous set is the original one.
//! - `state`: what is installed, or which command is under way:
//!
//! | command | `state` before | while it changes programs | afterwards |
//! | --- | --- | --- | --- |
//! | install | none or `installed <n-1>` | `installing <n>` | `installed <n>` |
//! | rollback | `installed <n>` or `installing <n>` | `rolling-back <n>` | none |
//! | rollback --original | none or `installed <n>` | `restoring` | none |
//! | forget | `installed <n>` | `forgetting <n>` | `installed <n>` |
//!
//! - `staging/`: new programs, whole and tried, before they are renamed, and links to kept ones. It
//!   is on the same file system, so no rename of a program fails for want of space.
//!
//! Each change of `state` is one rename, and each command can repeat every step of its own. So a
//! killed command leaves one of these states, and the next command that changes anything starts
//! from that state: it undoes `installing <n>`, which leads to `installed <n-1>` or none, and
//! finishes the other commands. A rollback treats a cut-off install as the last install.
//!
//! A kept set is deleted when the folder holds all of its files; a rollback that left another
//! installer's program in place keeps the set. The next install and `rollback --original` also
//! delete the previous set, after they have added it to the original set. `forget` deletes both
//! sets. Everything else that `state` does not need is garbage.
//!
//! The lock is an flock of the folder itself. It needs no file, so a failure leaves none behind.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::Error;
use crate::disk::{absent_is_fine, look, metadata, read, sync};
use crate::kept::{Kept, exists};
use crate::report::{Comparison, ForgetReport, Installed, KeptSets, RecoveryReport, RollbackReport};
use crate::set::{self, ABSENT, Program, Set};
use crate::staging;
use crate::state::State;

mod restore;

/// A folder of plugins, locked against other installers as long as this value lives.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    own: PathBuf,
    /// The flock.
    handle: File,
}

/// The kept set that a rollback puts back.
#[derive(Clone, Copy)]
enum Which {
    Previous(u64),
    Original,
}

impl Folder {
    /// The folder, made with its parents (0755) if it is not there, and locked.
    ///
    /// # Errors
    /// It cannot be made or opened, or another installer is at work.
    pub fn ensure(path: &Path) -> Result<Folder, Error> {
        DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(Error::io("create the folder", path))?;
        Folder::open(path)
    }

    /// Opens the folder as it is and locks it.
    ///
    /// # Errors
    /// It cannot be opened, or another installer is running.
    pub fn open(path: &Path) -> Result<Folder, Error> {
        let handle = File::open(path).map_err(Error::io("open the folder", path))?;
        let own = path.join(".cni-install");
        // A link could lead to another program's folder, which the installer must not delete.
        if metadata(&own).map_err(Error::io("look at", &own))?.is_some_and(|found| !found.is_dir()) {
            return Err(Error::new(format!("{} exists and is not a cni-install directory", own.display())));
        }
        match handle.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::new(format!("another cni-install is at work in {}", path.display())));
            }
            Err(TryLockError::Error(cause)) => return Err(Error::io("lock the folder", path)(cause)),
        }
        let (locked, named) = (handle.metadata(), fs::metadata(path));
        let (locked, named) =
            locked.and_then(|locked| Ok((locked, named?))).map_err(Error::io("look at the folder", path))?;
        if (locked.dev(), locked.ino()) != (named.dev(), named.ino()) {
            return Err(Error::new(format!("{} was replaced by another folder just now", path.display())));
        }
        Ok(Folder { path: path.to_owned(), own, handle })
    }

    /// Puts the set's programs in place of what is there.
    ///
    /// # Errors
    /// A program is not what its list says, cannot be copied here or does not run here. Nothing was
    /// changed then, or, if a rename failed half-way, all was put back; the message says if even
    /// that failed.
    pub fn install(&self, set: &Set) -> Result<(RecoveryReport, Installed), Error> {
        // Compared by checksum: the programs of the multi-call archive are hard links of one file.
        let mut contents = BTreeMap::new();
        for program in set.programs() {
            contents.insert(program.sum.as_str(), set.content(program)?);
        }
        self.then_purge(|| self.install_these(set, &contents))
    }

    fn install_these(
        &self,
        set: &Set,
        contents: &BTreeMap<&str, Vec<u8>>,
    ) -> Result<(RecoveryReport, Installed), Error> {
        let (recovered, current) = self.recover()?;
        let ours = current > 0 && self.list(current)? == set.programs();
        if ours && self.differences(set.programs())?.is_empty() {
            return Ok((recovered, Installed::AlreadyThere));
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.own)
            .map_err(Error::io("create the folder", &self.own))?;
        staging::fill(&self.own("staging"), set, contents)?;
        let generation = current + 1;
        Kept::take(&self.path, set, &self.generation(generation))?;
        self.add_to_original(current)?;
        State::Installing(generation).write(&self.own)?;
        for program in set.programs() {
            let place = self.path.join(&program.name);
            if let Err(cause) = fs::rename(self.own("staging").join(&program.name), &place) {
                let error = Error::io("replace", &place)(cause);
                return Err(match self.undo(generation) {
                    Ok(_) => Error::new(format!("{error}. All changes were undone")),
                    Err(more) => Error::new(format!("{error}. Undoing the changes failed too: {more}")),
                });
            }
        }
        self.sync()?;
        State::Installed(generation).write(&self.own)?;
        Ok((recovered, Installed::Replaced))
    }

    /// Puts back what was there before the last install. Done twice it changes nothing more.
    ///
    /// # Errors
    /// A program cannot be put back or removed. The other programs are still processed, and the
    /// next command tries again.
    pub fn rollback(&self) -> Result<RollbackReport, Error> {
        self.then_purge(|| match self.state()? {
            Some(State::Installed(generation)) if self.kept(generation)?.is_some() => self.begin_rollback(generation),
            Some(State::Installing(generation)) => {
                self.add_to_original(generation - 1)?;
                self.begin_rollback(generation)
            }
            Some(State::RollingBack(generation)) => self.finish_rollback(Which::Previous(generation)),
            Some(State::Restoring) => self.finish_rollback(Which::Original),
            None | Some(State::Installed(_) | State::Forgetting(_)) => {
                let (_, current) = self.recover()?;
                if current > 0 {
                    self.list(current)?; // without it a kept set would look like none
                }
                Ok(RollbackReport::NothingKept { original: self.original()?.is_some() })
            }
        })
    }

    /// Puts back what was there before the first install, of all names that were installed since.
    /// Done twice it changes nothing more.
    ///
    /// # Errors
    /// As [`Folder::rollback`].
    pub fn rollback_to_original(&self) -> Result<(RecoveryReport, RollbackReport), Error> {
        self.then_purge(|| {
            if self.state()? == Some(State::Restoring) {
                return Ok((RecoveryReport::Nothing, self.finish_rollback(Which::Original)?));
            }
            let (recovered, current) = self.recover()?;
            self.add_to_original(current)?;
            if self.original()?.is_none() {
                return Ok((recovered, RollbackReport::NothingKept { original: false }));
            }
            State::Restoring.write(&self.own)?;
            Ok((recovered, self.finish_rollback(Which::Original)?))
        })
    }

    /// Drops the kept sets. What is installed stays.
    ///
    /// # Errors
    /// They cannot be removed; the next command tries again.
    pub fn forget(&self) -> Result<(RecoveryReport, ForgetReport), Error> {
        self.then_purge(|| {
            let (recovered, current) = self.recover()?;
            let kept = self.kept_sets()?;
            if kept == KeptSets::default() {
                return Ok((recovered, ForgetReport::NothingKept));
            }
            if current == 0 {
                self.drop_original()?;
            } else {
                State::Forgetting(current).write(&self.own)?;
                self.finish_forget(current)?;
            }
            Ok((recovered, ForgetReport::Dropped(kept)))
        })
    }

    /// Compares the folder with what was installed.
    ///
    /// # Errors
    /// The installer's own files cannot be read.
    pub fn compare(&self) -> Result<Comparison, Error> {
        let installed = match self.state()? {
            None => return Ok(Comparison::NothingInstalled),
            Some(State::Installing(_)) => return Ok(Comparison::CutOff("an installation")),
            Some(State::RollingBack(_) | State::Restoring) => return Ok(Comparison::CutOff("a rollback")),
            Some(State::Installed(generation) | State::Forgetting(generation)) => self.list(generation)?,
        };
        let lines = self.differences(&installed)?;
        Ok(if lines.is_empty() {
            Comparison::Same(installed.into_iter().map(|program| program.name).collect())
        } else {
            Comparison::Different(lines)
        })
    }

    /// Returns the kept sets.
    ///
    /// # Errors
    /// The installer's own files cannot be read.
    pub fn kept_sets(&self) -> Result<KeptSets, Error> {
        let previous = match self.state()? {
            None | Some(State::Restoring) => None,
            Some(
                State::Installing(generation)
                | State::Installed(generation)
                | State::RollingBack(generation)
                | State::Forgetting(generation),
            ) => self.kept(generation)?,
        };
        Ok(KeptSets::new(self.original()?.as_ref(), previous.as_ref()))
    }

    /// Undoes or finishes what a killed command has begun; returns the generation that is installed
    /// then, or 0.
    fn recover(&self) -> Result<(RecoveryReport, u64), Error> {
        let because = |what: &'static str| move |error: Error| Error::new(format!("{what}: {error}"));
        match self.state()? {
            None => {
                // A rollback may have been killed just before, or an older cni-install has rolled
                // back.
                self.drop_original_if_held()?;
                Ok((RecoveryReport::Nothing, 0))
            }
            Some(State::Installed(generation)) => Ok((RecoveryReport::Nothing, generation)),
            Some(State::Installing(generation)) => {
                let before =
                    self.undo(generation).map_err(because("failed to undo an installation that was interrupted"))?;
                Ok((RecoveryReport::InstallUndone, before))
            }
            Some(State::RollingBack(generation)) => {
                let done = self.finish_rollback(Which::Previous(generation));
                done.map_err(because("failed to finish a rollback that was interrupted"))?;
                // The generation is still installed if a file had to stay.
                Ok((RecoveryReport::RollbackFinished, self.state()?.map_or(0, |_| generation)))
            }
            Some(State::Restoring) => {
                let done = self.finish_rollback(Which::Original);
                done.map_err(because("failed to finish a rollback that was interrupted"))?;
                Ok((RecoveryReport::RollbackFinished, 0))
            }
            Some(State::Forgetting(generation)) => {
                self.finish_forget(generation).map_err(because("failed to finish a forget that was interrupted"))?;
                Ok((RecoveryReport::ForgetFinished, generation))
            }
        }
    }

    /// Puts everything back as before the generation's install, which was cut off; returns the
    /// generation before it.
    fn undo(&self, generation: u64) -> Result<u64, Error> {
        let kept = self.kept_or_fail(generation)?;
        self.restore(&kept)?;
        if !kept.not_held_by(&self.path)?.is_empty() {
            kept.add_to(&self.own("original"))?;
        }
        let before = generation - 1;
        if before > 0 && exists(&self.generation(before))? {
            State::Installed(before).write(&self.own)?;
            return Ok(before);
        }
        State::remove(&self.own)?;
        Ok(0)
    }

    fn begin_rollback(&self, generation: u64) -> Result<RollbackReport, Error> {
        State::RollingBack(generation).write(&self.own)?;
        self.finish_rollback(Which::Previous(generation))
    }

    fn finish_rollback(&self, which: Which) -> Result<RollbackReport, Error> {
        let kept = match which {
            Which::Previous(generation) => self.kept_or_fail(generation)?,
            Which::Original => {
                let folder = self.own("original");
                self.original()?.ok_or_else(|| Error::new(format!("{} is not complete", folder.display())))?
            }
        };
        let mut done = self.restore(&kept)?;
        let still = kept.not_held_by(&self.path)?;
        match which {
            Which::Previous(generation) if !still.is_empty() => State::Installed(generation).write(&self.own)?,
            Which::Previous(_) | Which::Original => State::remove(&self.own)?,
        }
        self.drop_original_if_held()?;
        if let RollbackReport::Done { kept, .. } = &mut done {
            *kept = still;
        }
        Ok(done)
    }

    fn finish_forget(&self, generation: u64) -> Result<(), Error> {
        self.drop_original()?;
        let folder = self.generation(generation);
        let names = self.list(generation)?.into_iter().map(|program| program.name);
        // The list goes first: without it the remaining files are not a kept set.
        for name in std::iter::once(ABSENT.to_owned()).chain(names) {
            let path = folder.join(name);
            absent_is_fine(fs::remove_file(&path)).map_err(Error::io("remove", &path))?;
        }
        sync(&folder).map_err(Error::io("write out", &folder))?;
        State::Installed(generation).write(&self.own)
    }

    fn drop_original_if_held(&self) -> Result<(), Error> {
        match self.original()? {
            Some(original) if original.not_held_by(&self.path)?.is_empty() => self.drop_original(),
            Some(_) | None => Ok(()),
        }
    }

    /// Drops the original set in one step; its files are garbage then.
    fn drop_original(&self) -> Result<(), Error> {
        let (original, dropped) = (self.own("original"), self.own("dropped"));
        absent_is_fine(fs::remove_dir_all(&dropped)).map_err(Error::io("remove", &dropped))?;
        absent_is_fine(fs::rename(&original, &dropped)).map_err(Error::io("remove", &original))
    }

    /// Adds the files that the generation kept to the original set. Generation 0 kept nothing.
    fn add_to_original(&self, generation: u64) -> Result<(), Error> {
        match self.kept(generation)? {
            Some(kept) => kept.add_to(&self.own("original")),
            None => Ok(()),
        }
    }

    fn original(&self) -> Result<Option<Kept>, Error> {
        Kept::read(&self.own("original"))
    }

    /// Returns what the generation's install has replaced; `None` if the set was forgotten.
    fn kept(&self, generation: u64) -> Result<Option<Kept>, Error> {
        Kept::read(&self.generation(generation))
    }

    fn kept_or_fail(&self, generation: u64) -> Result<Kept, Error> {
        let folder = self.generation(generation);
        self.kept(generation)?.ok_or_else(|| Error::new(format!("{} is not complete", folder.display())))
    }

    fn own(&self, name: &str) -> PathBuf {
        self.own.join(name)
    }

    /// The folder of a generation.
    fn generation(&self, generation: u64) -> PathBuf {
        self.own(&generation.to_string())
    }

    fn state(&self) -> Result<Option<State>, Error> {
        State::read(&self.own)
    }

    fn sync(&self) -> Result<(), Error> {
        self.handle.sync_all().map_err(Error::io("write out", &self.path))
    }

    /// Runs `act`, then removes what is not needed any more, even if `act` failed.
    fn then_purge<T>(&self, act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let done = act();
        self.purge_garbage();
        done
    }

    /// Removes files with cni-install's names that `state` does not need, and the installer's own
    /// folder once it is empty. A file that cannot be removed is reported when it has to be created
    /// again.
    fn purge_garbage(&self) {
        let needed = match self.state() {
            Ok(Some(State::Installing(generation))) => vec![generation, generation - 1],
            Ok(Some(State::Installed(generation) | State::RollingBack(generation) | State::Forgetting(generation))) => {
                vec![generation]
            }
            Ok(None) => vec![],
            Ok(Some(State::Restoring)) | Err(_) => return,
        };
        let needed: Vec<PathBuf> = needed.into_iter().map(|generation| self.generation(generation)).collect();
        let is_cut_off = |original: &Path| Kept::read(original).is_ok_and(|kept| kept.is_none());
        for entry in fs::read_dir(&self.own).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.as_encoded_bytes();
            let is_ours = name == b"staging"
                || name == b"dropped"
                || name.iter().all(u8::is_ascii_digit)
                || (name == b"original" && is_cut_off(&path));
            if is_ours && path.is_dir() && !needed.contains(&path) {
                let _ = fs::remove_dir_all(path);
            }
        }
        let _ = fs::remove_file(self.own("state.new"));
        let _ = fs::remove_dir(&self.own);
    }

    /// Returns the mode and the sum of the program of that name, if it is a regular file or a link
    /// to one.
    fn look(&self, name: &str) -> Result<Option<(u32, String)>, Error> {
        let place = self.path.join(name);
        let found = look(&place).map_err(Error::io("read", &place))?;
        Ok(found.map(|(mode, content)| (mode, set::sum(&content))))
    }

    /// Returns what is wrong with the program in the folder; `None` if a runtime that starts it
    /// gets this one.
    fn difference(&self, program: &Program) -> Result<Option<String>, Error> {
        let name = &program.name;
        Ok(match self.look(name)? {
            None => Some(format!("{name} is missing")),
            Some((_, sum)) if sum != program.sum => Some(format!("{name} is another program")),
            Some((mode, _)) if mode & 0o555 != 0o555 => Some(format!("{name} cannot be executed by all")),
            Some(_) => None,
        })
    }

    /// Returns a line for each program that is not in place.
    fn differences(&self, programs: &[Program]) -> Result<Vec<String>, Error> {
        programs.iter().filter_map(|program| self.difference(program).transpose()).collect()
    }

    /// Returns the programs that the generation's install put in place.
    fn list(&self, generation: u64) -> Result<Vec<Program>, Error> {
        let path = self.generation(generation).join(set::SUMS);
        let text = read(&path).map_err(Error::io("read", &path))?;
        set::parse(&String::from_utf8_lossy(&text)).map_err(|why| Error::new(format!("{}: {why}", path.display())))
    }
}
