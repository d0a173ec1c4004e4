//! Changes the folder from which runtimes execute plugins, while they do so.
//!
//! The installer's own files are in `.cni-install/`, beside the programs:
//!
//! - `<n>/`, a generation: the kept set (see `kept.rs`) with the files that the n-th install
//!   replaced, and the list of the programs that it installed. It is complete before a program is
//!   replaced. The newest one is the *previous* set. After `forget` it has only the list, and no
//!   `ABSENT`.
//! - `original/`, the *original* set: for each name that any install has replaced, the file from
//!   before the first install. An install adds the previous set to it before it replaces the
//!   previous set. So there is none after the first install, and none after installs of an older
//!   cni-install: then the previous set is the original one.
//! - `state`: the installed generation, or the command that is running:
//!
//! | command | `state` before | while programs change | afterwards |
//! | --- | --- | --- | --- |
//! | install | none or `installed <n-1>` | `installing <n>` | `installed <n>` |
//! | rollback | `installed <n>` or `installing <n>` | `rolling-back <n>` | none |
//! | rollback --original | none or `installed <n>` | `restoring` | none |
//! | forget | `installed <n>` | `forgetting <n>` | `installed <n>` |
//!
//! - `staging/`: new programs, which are written and tried there and then renamed into place, and
//!   links to kept files. It is on the same file system, so a rename cannot fail because the disk
//!   is full.
//!
//! Each change of `state` is one rename, and every step of a command can be repeated. So a killed
//! command leaves one of these states, and the next command that changes something first cleans up:
//! it undoes an installation (`installing <n>` becomes `installed <n-1>` or none), and finishes the
//! other commands. For a rollback an interrupted install counts as the last install.
//!
//! A kept set is deleted as soon as a rollback to it would change nothing: the plugin folder has
//! all of its files, and no program that was installed where no file existed. A rollback that left
//! another installer's program in place keeps the set. The next install and `rollback --original`
//! also delete the previous set, after they have added it to the original set. `forget` deletes
//! both sets. All other files that `state` does not need are removed.
//!
//! The lock is an flock of the plugin folder itself, so there is no lock file.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::Error;
use crate::disk::{absent_is_fine, metadata, read, read_if_regular, sync};
use crate::kept::{Kept, exists};
use crate::report::{Comparison, ForgetReport, Installed, KeptSets, RecoveryReport, RollbackReport};
use crate::set::{self, ABSENT, Program, Set};
use crate::staging;
use crate::state::State;

mod restore;

/// A plugin folder. It is locked against other installers as long as this value exists.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// The installer's own folder, `.cni-install` in `path`.
    own: PathBuf,
    /// The open folder, which holds the lock.
    handle: File,
}

/// The kept set that a rollback puts back.
#[derive(Clone, Copy)]
enum KeptSetId {
    /// That of this generation.
    Previous(u64),
    Original,
}

impl Folder {
    /// Creates the folder and its parents (mode 0755) if they do not exist, and locks it.
    ///
    /// # Errors
    /// It cannot be created or opened, or another installer is running.
    pub fn ensure(path: &Path) -> Result<Folder, Error> {
        DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(Error::io("create the folder", path))?;
        Folder::open(path)
    }

    /// Opens an existing folder and locks it.
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
                return Err(Error::new(format!("another cni-install is running in {}", path.display())));
            }
            Err(TryLockError::Error(cause)) => return Err(Error::io("lock the folder", path)(cause)),
        }
        // Between opening and locking another folder may have got this name.
        let of_locked = handle.metadata().map_err(Error::io("look at the folder", path))?;
        let of_path = fs::metadata(path).map_err(Error::io("look at the folder", path))?;
        if (of_locked.dev(), of_locked.ino()) != (of_path.dev(), of_path.ino()) {
            return Err(Error::new(format!(
                "{} was replaced by another folder during this call; repeat the command",
                path.display()
            )));
        }
        Ok(Folder { path: path.to_owned(), own, handle })
    }

    /// Installs the programs of `set` and keeps the files that they replace.
    ///
    /// # Errors
    /// A program has another checksum than its list says, cannot be written here or does not run
    /// here: no program has been replaced. Or a rename failed: all programs have been put back,
    /// unless the message says that this failed too.
    pub fn install(&self, set: &Set) -> Result<(RecoveryReport, Installed), Error> {
        // By checksum, because the programs of the multi-call archive are hard links of one file.
        let mut contents = BTreeMap::new();
        for program in set.programs() {
            contents.insert(program.sum.as_str(), set.content(program)?);
        }
        self.then_remove_garbage(|| self.install_contents(set, &contents))
    }

    /// Installs the programs of `set`, whose contents are in `contents` by checksum.
    fn install_contents(
        &self,
        set: &Set,
        contents: &BTreeMap<&str, Vec<u8>>,
    ) -> Result<(RecoveryReport, Installed), Error> {
        let (recovered, current) = self.recover()?;
        let is_installed = current > 0 && self.list(current)? == set.programs();
        if is_installed && self.differences(set.programs())?.is_empty() {
            return Ok((recovered, Installed::AlreadyThere));
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.own)
            .map_err(Error::io("create the folder", &self.own))?;
        staging::write_and_try(&self.own("staging"), set, contents)?;
        let generation = current + 1;
        Kept::create(&self.path, set, &self.generation(generation))?;
        self.add_to_original(current)?;
        State::Installing(generation).write(&self.own)?;
        for program in set.programs() {
            let path = self.path.join(&program.name);
            if let Err(cause) = fs::rename(self.own("staging").join(&program.name), &path) {
                let error = Error::io("replace", &path)(cause);
                return Err(match self.undo(generation) {
                    Ok(_) => Error::new(format!("{error}. All changes were undone")),
                    Err(undo_error) => Error::new(format!("{error}. Undoing the changes failed too: {undo_error}")),
                });
            }
        }
        self.sync()?;
        State::Installed(generation).write(&self.own)?;
        Ok((recovered, Installed::Replaced))
    }

    /// Puts back the files from before the last install. If it is repeated, it does nothing.
    ///
    /// # Errors
    /// A program cannot be put back or removed. The other programs are still processed, and the
    /// next command tries again.
    pub fn rollback(&self) -> Result<RollbackReport, Error> {
        self.then_remove_garbage(|| match self.state()? {
            Some(State::Installed(generation)) if self.kept(generation)?.is_some() => self.begin_rollback(generation),
            Some(State::Installing(generation)) => {
                self.add_to_original(generation - 1)?;
                self.begin_rollback(generation)
            }
            Some(State::RollingBack(generation)) => self.finish_rollback(KeptSetId::Previous(generation)),
            Some(State::Restoring) => self.finish_rollback(KeptSetId::Original),
            None | Some(State::Installed(_) | State::Forgetting(_)) => {
                let (_, current) = self.recover()?;
                if current > 0 {
                    // Fails if the list cannot be read, since a damaged kept set looks like none.
                    self.list(current)?;
                }
                Ok(RollbackReport::NothingKept { original: self.original()?.is_some() })
            }
        })
    }

    /// Puts back the files from before the first install, for all names that were installed since.
    /// If it is repeated, it does nothing.
    ///
    /// # Errors
    /// As [`Folder::rollback`].
    pub fn rollback_to_original(&self) -> Result<(RecoveryReport, RollbackReport), Error> {
        self.then_remove_garbage(|| {
            if self.state()? == Some(State::Restoring) {
                return Ok((RecoveryReport::Nothing, self.finish_rollback(KeptSetId::Original)?));
            }
            let (recovered, current) = self.recover()?;
            self.add_to_original(current)?;
            if self.original()?.is_none() {
                return Ok((recovered, RollbackReport::NothingKept { original: false }));
            }
            State::Restoring.write(&self.own)?;
            Ok((recovered, self.finish_rollback(KeptSetId::Original)?))
        })
    }

    /// Removes the kept sets. The installed programs stay.
    ///
    /// # Errors
    /// They cannot be removed; the next command tries again.
    pub fn forget(&self) -> Result<(RecoveryReport, ForgetReport), Error> {
        self.then_remove_garbage(|| {
            let (recovered, current) = self.recover()?;
            let kept = self.kept_sets()?;
            if kept == KeptSets::default() {
                return Ok((recovered, ForgetReport::NothingKept));
            }
            if current == 0 {
                self.remove_original()?;
            } else {
                State::Forgetting(current).write(&self.own)?;
                self.finish_forget(current)?;
            }
            Ok((recovered, ForgetReport::Dropped(kept)))
        })
    }

    /// Compares the folder with the installed programs.
    ///
    /// # Errors
    /// The installer's own files cannot be read.
    pub fn compare(&self) -> Result<Comparison, Error> {
        let installed = match self.state()? {
            None => return Ok(Comparison::NothingInstalled),
            Some(State::Installing(_)) => return Ok(Comparison::Interrupted("an installation")),
            Some(State::RollingBack(_) | State::Restoring) => return Ok(Comparison::Interrupted("a rollback")),
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

    /// Undoes or finishes a command that was interrupted. Returns what it did, and the generation
    /// that is installed then, or 0 for none.
    fn recover(&self) -> Result<(RecoveryReport, u64), Error> {
        let context = |action: &'static str| move |error: Error| Error::new(format!("{action}: {error}"));
        match self.state()? {
            None => {
                // A rollback may have been killed before it removed the set, and an older
                // cni-install does not know the set.
                self.remove_original_if_restored()?;
                Ok((RecoveryReport::Nothing, 0))
            }
            Some(State::Installed(generation)) => Ok((RecoveryReport::Nothing, generation)),
            Some(State::Installing(generation)) => {
                let before =
                    self.undo(generation).map_err(context("failed to undo an installation that was interrupted"))?;
                Ok((RecoveryReport::InstallUndone, before))
            }
            Some(State::RollingBack(generation)) => {
                let outcome = self.finish_rollback(KeptSetId::Previous(generation));
                outcome.map_err(context("failed to finish a rollback that was interrupted"))?;
                // The generation still counts as installed if another installer's file was left.
                Ok((RecoveryReport::RollbackFinished, self.state()?.map_or(0, |_| generation)))
            }
            Some(State::Restoring) => {
                let outcome = self.finish_rollback(KeptSetId::Original);
                outcome.map_err(context("failed to finish a rollback that was interrupted"))?;
                Ok((RecoveryReport::RollbackFinished, 0))
            }
            Some(State::Forgetting(generation)) => {
                self.finish_forget(generation).map_err(context("failed to finish a forget that was interrupted"))?;
                Ok((RecoveryReport::ForgetFinished, generation))
            }
        }
    }

    /// Undoes the generation's install, which was interrupted or failed. Returns the generation
    /// before it, or 0 for none.
    fn undo(&self, generation: u64) -> Result<u64, Error> {
        let kept = self.kept_or_fail(generation)?;
        self.restore(&kept)?;
        // Files that could not be put back must not get lost.
        if !kept.missing_in(&self.path)?.is_empty() {
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

    /// Starts the rollback of the generation's install, and finishes it.
    fn begin_rollback(&self, generation: u64) -> Result<RollbackReport, Error> {
        State::RollingBack(generation).write(&self.own)?;
        self.finish_rollback(KeptSetId::Previous(generation))
    }

    /// Puts the kept set back and updates `state`. It can be repeated if it was interrupted.
    fn finish_rollback(&self, id: KeptSetId) -> Result<RollbackReport, Error> {
        let kept = match id {
            KeptSetId::Previous(generation) => self.kept_or_fail(generation)?,
            KeptSetId::Original => {
                let folder = self.own("original");
                self.original()?.ok_or_else(|| Error::new(format!("{} is not complete", folder.display())))?
            }
        };
        let mut report = self.restore(&kept)?;
        let still_kept = kept.missing_in(&self.path)?;
        match id {
            KeptSetId::Previous(generation) if !still_kept.is_empty() => {
                State::Installed(generation).write(&self.own)?;
            }
            KeptSetId::Previous(_) | KeptSetId::Original => State::remove(&self.own)?,
        }
        self.remove_original_if_restored()?;
        if let RollbackReport::Done { kept, .. } = &mut report {
            *kept = still_kept;
        }
        Ok(report)
    }

    /// Removes the kept files of the generation and the original set. The generation's list of
    /// installed programs stays. It can be repeated if it was interrupted.
    fn finish_forget(&self, generation: u64) -> Result<(), Error> {
        self.remove_original()?;
        let folder = self.generation(generation);
        let names = self.list(generation)?.into_iter().map(|program| program.name);
        // `ABSENT` first: without it the remaining files are not a kept set.
        for name in std::iter::once(ABSENT.to_owned()).chain(names) {
            let path = folder.join(name);
            absent_is_fine(fs::remove_file(&path)).map_err(Error::io("remove", &path))?;
        }
        sync(&folder).map_err(Error::io("write out", &folder))?;
        State::Installed(generation).write(&self.own)
    }

    /// Removes the original set if a rollback to it would change nothing.
    fn remove_original_if_restored(&self) -> Result<(), Error> {
        match self.original()? {
            Some(original) if self.is_restored(&original)? => self.remove_original(),
            Some(_) | None => Ok(()),
        }
    }

    /// Removes the original set atomically, by renaming its folder to one that is garbage.
    fn remove_original(&self) -> Result<(), Error> {
        let (original, dropped) = (self.own("original"), self.own("dropped"));
        absent_is_fine(fs::remove_dir_all(&dropped)).map_err(Error::io("remove", &dropped))?;
        absent_is_fine(fs::rename(&original, &dropped)).map_err(Error::io("remove", &original))
    }

    /// Adds the files that the generation's install kept to the original set. Generation 0 stands
    /// for no install and has kept nothing.
    fn add_to_original(&self, generation: u64) -> Result<(), Error> {
        match self.kept(generation)? {
            Some(kept) => kept.add_to(&self.own("original")),
            None => Ok(()),
        }
    }

    /// Reads the original set. `None` if there is none.
    fn original(&self) -> Result<Option<Kept>, Error> {
        Kept::read(&self.own("original"))
    }

    /// Reads the kept set of the generation. `None` if it was removed by `forget`.
    fn kept(&self, generation: u64) -> Result<Option<Kept>, Error> {
        Kept::read(&self.generation(generation))
    }

    /// Reads the kept set of the generation.
    ///
    /// # Errors
    /// It does not exist or is not complete.
    fn kept_or_fail(&self, generation: u64) -> Result<Kept, Error> {
        let folder = self.generation(generation);
        self.kept(generation)?.ok_or_else(|| Error::new(format!("{} is not complete", folder.display())))
    }

    /// Returns the path of one of the installer's own files.
    fn own(&self, name: &str) -> PathBuf {
        self.own.join(name)
    }

    /// Returns the path of a generation's folder.
    fn generation(&self, generation: u64) -> PathBuf {
        self.own(&generation.to_string())
    }

    /// Reads the state. `None` if nothing is installed and no command was interrupted.
    fn state(&self) -> Result<Option<State>, Error> {
        State::read(&self.own)
    }

    /// Waits until all renames in the plugin folder are on the disk.
    fn sync(&self) -> Result<(), Error> {
        self.handle.sync_all().map_err(Error::io("write out", &self.path))
    }

    /// Runs `command`, and then removes the installer's files that are not needed any more, even if
    /// `command` failed.
    fn then_remove_garbage<T>(&self, command: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let outcome = command();
        self.remove_garbage();
        outcome
    }

    /// Removes the installer's files that `state` does not need, and the installer's own folder if
    /// it is empty then. Failures are ignored: a file that cannot be removed is reported when it
    /// has to be created again.
    fn remove_garbage(&self) {
        let needed = match self.state() {
            Ok(Some(State::Installing(generation))) => vec![generation, generation - 1],
            Ok(Some(State::Installed(generation) | State::RollingBack(generation) | State::Forgetting(generation))) => {
                vec![generation]
            }
            Ok(None) => vec![],
            Ok(Some(State::Restoring)) | Err(_) => return,
        };
        let needed: Vec<PathBuf> = needed.into_iter().map(|generation| self.generation(generation)).collect();
        let is_incomplete = |original: &Path| Kept::read(original).is_ok_and(|kept| kept.is_none());
        for entry in fs::read_dir(&self.own).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.as_encoded_bytes();
            let is_removable = name == b"staging"
                || name == b"dropped"
                || name.iter().all(u8::is_ascii_digit)
                || (name == b"original" && is_incomplete(&path));
            if is_removable && path.is_dir() && !needed.contains(&path) {
                let _ = fs::remove_dir_all(path);
            }
        }
        let _ = fs::remove_file(self.own("state.new"));
        let _ = fs::remove_dir(&self.own);
    }

    /// Returns the mode and the checksum of the program of this name. `None` if it is neither a
    /// regular file nor a link to one.
    fn mode_and_sum(&self, name: &str) -> Result<Option<(u32, String)>, Error> {
        let path = self.path.join(name);
        let file = read_if_regular(&path).map_err(Error::io("read", &path))?;
        Ok(file.map(|(mode, content)| (mode, set::sum(&content))))
    }

    /// Returns how the file in the folder differs from the installed program. `None` if a runtime
    /// that executes it gets this program.
    fn difference(&self, program: &Program) -> Result<Option<String>, Error> {
        let name = &program.name;
        Ok(match self.mode_and_sum(name)? {
            None => Some(format!("{name} is missing")),
            Some((_, sum)) if sum != program.sum => {
                Some(format!("{name} is not the installed program: its SHA-256 differs"))
            }
            Some((mode, _)) if mode & 0o555 != 0o555 => Some(format!("{name} is not executable by all users")),
            Some(_) => None,
        })
    }

    /// Returns a text for each of the programs that is not in the folder.
    fn differences(&self, programs: &[Program]) -> Result<Vec<String>, Error> {
        programs.iter().filter_map(|program| self.difference(program).transpose()).collect()
    }

    /// Returns the programs that the generation's install has installed.
    fn list(&self, generation: u64) -> Result<Vec<Program>, Error> {
        let path = self.generation(generation).join(set::SUMS);
        let text = read(&path).map_err(Error::io("read", &path))?;
        set::parse(&String::from_utf8_lossy(&text))
            .map_err(|reason| Error::new(format!("{}: {reason}", path.display())))
    }
}
