//! Changes the folder from which runtimes execute plugins, while they do so.
//!
//! A *kept set* is a folder with the files that an install has replaced, for a rollback (see
//! `kept.rs`). A *generation* is the number of an install. The installer's own files are in
//! `.cni-install/`, beside the programs:
//!
//! - `<n>/`: the kept set of the n-th install, complete before a program is replaced. The newest
//!   one is the *previous* set. After `forget` the folder has only `SHA256SUMS`, the list of the
//!   programs that the install has installed, and is not a kept set any more.
//! - `original/`, the *original* set: for each name that any install has replaced, the file from
//!   before the first install. Each install adds the previous set to the original set, before its
//!   own kept set becomes the previous set. So after only one install, and after installs of an
//!   older cni-install, this folder does not exist. Then the previous set is the original one too.
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
//! other commands. The exception is `rollback` after an interrupted install: it rolls that install
//! back. A `rollback` that could not put all kept files back ends in `installed <n>` instead of
//! none.
//!
//! A kept set is deleted as soon as a rollback to it would change nothing: the plugin folder has
//! all of its files, and none of the programs that were installed where no file existed. A rollback
//! that left another installer's program in place of a kept file keeps the set. The next install
//! and a rollback to the original set also delete the previous set, after they have added it to the
//! original set. `forget` deletes both sets. All other files that `state` does not need are
//! removed.
//!
//! The lock is an flock of the plugin folder itself, so it needs no lock file. Commands that change
//! nothing share it.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::Error;
use crate::disk::{find_metadata, ignore_not_found, read, read_if_regular, sync};
use crate::kept::{Kept, exists};
use crate::report::{ForgetReport, KeptSets, RecoveryReport, RollbackReport};
use crate::set::{self, ABSENT_LIST, Program};
use crate::state::State;

mod compare;
mod install;
mod restore;

/// A plugin folder. It is locked as long as this value exists.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// The installer's own folder, `.cni-install` in `path`.
    own_folder: PathBuf,
    /// The open plugin folder, which holds the lock.
    handle: File,
}

/// The kept set that a rollback puts back.
#[derive(Clone, Copy)]
enum KeptSetId {
    /// The files that the install of this generation replaced.
    Previous(u64),
    Original,
}

impl Folder {
    /// Creates the folder and its parents (mode 0755) if they do not exist, and locks it.
    ///
    /// # Errors
    /// If the folder cannot be created or opened, or another installer is running.
    pub fn ensure(path: &Path) -> Result<Folder, Error> {
        DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(Error::io("create the folder", path))?;
        Folder::open(path)
    }

    /// Opens an existing folder and locks it for changes.
    ///
    /// # Errors
    /// If the folder cannot be opened, or another installer is running.
    pub fn open(path: &Path) -> Result<Folder, Error> {
        Folder::open_with(path, File::try_lock)
    }

    /// Opens an existing folder to read it. Its lock excludes only changes.
    ///
    /// # Errors
    /// If the folder cannot be opened, or another installer is changing it.
    pub fn open_to_read(path: &Path) -> Result<Folder, Error> {
        Folder::open_with(path, File::try_lock_shared)
    }

    /// Opens an existing folder and locks it with `lock`.
    fn open_with(path: &Path, lock: fn(&File) -> Result<(), TryLockError>) -> Result<Folder, Error> {
        let handle = File::open(path).map_err(Error::io("open the folder", path))?;
        let own_folder = path.join(".cni-install");
        // A link could lead to another program's folder, which the installer must not delete.
        let found = find_metadata(&own_folder).map_err(Error::io("look at", &own_folder))?;
        if found.is_some_and(|found| !found.is_dir()) {
            return Err(Error::new(format!("{} exists and is not a cni-install directory", own_folder.display())));
        }
        match lock(&handle) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::new(format!("another cni-install is running in {}", path.display())));
            }
            Err(TryLockError::Error(cause)) => return Err(Error::io("lock the folder", path)(cause)),
        }
        // Between opening and locking, another folder may have been renamed to this path.
        let locked = handle.metadata().map_err(Error::io("look at the folder", path))?;
        let at_path = fs::metadata(path).map_err(Error::io("look at the folder", path))?;
        if (locked.dev(), locked.ino()) != (at_path.dev(), at_path.ino()) {
            return Err(Error::new(format!(
                "{} was replaced by another folder during this call; repeat the command",
                path.display()
            )));
        }
        Ok(Folder { path: path.to_owned(), own_folder, handle })
    }

    /// Puts back the files from before the last install, even if that install was interrupted.
    /// Afterwards no previous set is kept, unless some of its files were not put back because
    /// another installer has changed the programs.
    ///
    /// # Errors
    /// If a program cannot be put back or removed. The other programs are still processed, and the
    /// next command tries again.
    pub fn rollback(&self) -> Result<RollbackReport, Error> {
        self.run_and_remove_garbage(|| match self.state()? {
            Some(State::Installed(generation)) if self.find_kept(generation)?.is_some() => {
                self.begin_rollback(generation)
            }
            Some(State::Installing(generation)) => {
                // `remove_garbage` will also delete the kept set of the install before the
                // interrupted one.
                self.add_to_original(generation - 1)?;
                self.begin_rollback(generation)
            }
            // An interrupted `rollback`.
            Some(State::RollingBack(generation)) => self.finish_rollback(KeptSetId::Previous(generation)),
            // An interrupted `rollback --original`.
            Some(State::Restoring) => self.finish_rollback(KeptSetId::Original),
            // There is no previous set, or an interrupted `forget` was removing it.
            None | Some(State::Installed(_) | State::Forgetting(_)) => {
                let (_, current) = self.recover()?;
                if current > 0 {
                    // Fails if the list of installed programs cannot be read. Otherwise a kept set
                    // with a missing list would be reported as none.
                    self.list_installed(current)?;
                }
                Ok(RollbackReport::NothingKept { is_original_kept: self.find_original()?.is_some() })
            }
        })
    }

    /// Puts back the files from before the first install, for all names that were installed since.
    /// Afterwards no set is kept, unless some files of the original set were not put back because
    /// another installer has changed the programs.
    ///
    /// # Errors
    /// As [`Folder::rollback`].
    pub fn rollback_to_original(&self) -> Result<(RecoveryReport, RollbackReport), Error> {
        self.run_and_remove_garbage(|| {
            // This command itself was interrupted. Its completion is the outcome, not a recovery.
            if self.state()? == Some(State::Restoring) {
                return Ok((RecoveryReport::Nothing, self.finish_rollback(KeptSetId::Original)?));
            }
            let (recovered, current) = self.recover()?;
            self.add_to_original(current)?;
            if self.find_original()?.is_none() {
                return Ok((recovered, RollbackReport::NothingKept { is_original_kept: false }));
            }
            State::Restoring.write(&self.own_folder)?;
            Ok((recovered, self.finish_rollback(KeptSetId::Original)?))
        })
    }

    /// Removes the kept sets. The installed programs stay.
    ///
    /// # Errors
    /// If the kept sets cannot be removed. The next command tries again.
    pub fn forget(&self) -> Result<(RecoveryReport, ForgetReport), Error> {
        self.run_and_remove_garbage(|| {
            let (recovered, current) = self.recover()?;
            let kept = self.kept_sets()?;
            if kept == KeptSets::default() {
                return Ok((recovered, ForgetReport::NothingKept));
            }
            if current == 0 {
                // Nothing is installed, so there is only the original set.
                self.remove_original()?;
            } else {
                State::Forgetting(current).write(&self.own_folder)?;
                self.finish_forget(current)?;
            }
            Ok((recovered, ForgetReport::Dropped(kept)))
        })
    }

    /// Returns the kept sets. After an interrupted command, the next command may remove some of
    /// these. After an interrupted `forget`, returns none, because no rollback can put a set back.
    ///
    /// # Errors
    /// If the installer's own files cannot be read.
    pub fn kept_sets(&self) -> Result<KeptSets, Error> {
        let previous = match self.state()? {
            // Completing the interrupted `rollback --original` deletes the previous set.
            None | Some(State::Restoring) => None,
            Some(State::Forgetting(_)) => return Ok(KeptSets::default()),
            Some(State::Installing(generation) | State::Installed(generation) | State::RollingBack(generation)) => {
                self.find_kept(generation)?
            }
        };
        Ok(KeptSets::new(self.find_original()?.as_ref(), previous.as_ref()))
    }

    /// Undoes or finishes a command that was interrupted. Returns what was done, and the generation
    /// that is installed afterwards, or 0 for none.
    fn recover(&self) -> Result<(RecoveryReport, u64), Error> {
        let context = |action: &'static str| move |error: Error| Error::new(format!("{action}: {error}"));
        match self.state()? {
            None => {
                // The original set may still exist: a rollback first removes `state` and then this
                // set, and may have been killed in between. An older cni-install, which does not
                // know this set, never removes it.
                self.remove_original_if_restored()?;
                Ok((RecoveryReport::Nothing, 0))
            }
            Some(State::Installed(generation)) => Ok((RecoveryReport::Nothing, generation)),
            Some(State::Installing(generation)) => {
                let current = self
                    .undo_install(generation)
                    .map_err(context("failed to undo an installation that was interrupted"))?;
                Ok((RecoveryReport::InstallUndone, current))
            }
            Some(State::RollingBack(generation)) => {
                let outcome = self.finish_rollback(KeptSetId::Previous(generation));
                outcome.map_err(context("failed to finish a rollback that was interrupted"))?;
                // If another installer's program was left in place of a kept file,
                // `finish_rollback` still keeps the set and has written `installed <generation>`.
                let current = if self.state()?.is_some() { generation } else { 0 };
                Ok((RecoveryReport::RollbackFinished, current))
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
    fn undo_install(&self, generation: u64) -> Result<u64, Error> {
        let kept = self.require_kept(generation)?;
        let report = self.restore(&kept)?;
        // The generation's folder will be removed, so the original set gets the files that were not
        // put back.
        if !report.still_kept.is_empty() {
            kept.add_to(&self.own_path("original"))?;
        }
        // The earlier install's programs are listed in its folder. Without the folder, nothing
        // counts as installed.
        let earlier = generation - 1;
        if earlier > 0 && exists(&self.generation_folder(earlier))? {
            State::Installed(earlier).write(&self.own_folder)?;
            return Ok(earlier);
        }
        State::remove(&self.own_folder)?;
        Ok(0)
    }

    /// Starts the rollback of the generation's install, and finishes it.
    fn begin_rollback(&self, generation: u64) -> Result<RollbackReport, Error> {
        State::RollingBack(generation).write(&self.own_folder)?;
        self.finish_rollback(KeptSetId::Previous(generation))
    }

    /// Puts the kept set back and updates `state`. Can be repeated after an interruption.
    fn finish_rollback(&self, id: KeptSetId) -> Result<RollbackReport, Error> {
        let kept = match id {
            KeptSetId::Previous(generation) => self.require_kept(generation)?,
            KeptSetId::Original => {
                let folder = self.own_path("original");
                self.find_original()?.ok_or_else(|| incomplete(&folder))?
            }
        };
        let report = self.restore(&kept)?;
        match id {
            // This state keeps the generation's folder from being removed as garbage.
            KeptSetId::Previous(generation) if !report.still_kept.is_empty() => {
                State::Installed(generation).write(&self.own_folder)?;
            }
            KeptSetId::Previous(_) | KeptSetId::Original => State::remove(&self.own_folder)?,
        }
        self.remove_original_if_restored()?;
        Ok(RollbackReport::Done(report))
    }

    /// Removes both kept sets. The generation's list of installed programs stays. Can be repeated
    /// after an interruption.
    fn finish_forget(&self, generation: u64) -> Result<(), Error> {
        self.remove_original()?;
        let folder = self.generation_folder(generation);
        // A kept file has the name of the program that replaced it.
        let kept_files = self.list_installed(generation)?.into_iter().map(|program| program.name);
        // A folder without `ABSENT` is not a kept set (see `kept.rs`). `ABSENT` is removed first,
        // so a killed `forget` never leaves a kept set that lacks files.
        for name in std::iter::once(ABSENT_LIST.to_owned()).chain(kept_files) {
            let path = folder.join(name);
            ignore_not_found(fs::remove_file(&path)).map_err(Error::io("remove", &path))?;
        }
        sync(&folder).map_err(Error::io("sync", &folder))?;
        State::Installed(generation).write(&self.own_folder)
    }

    /// Removes the original set if a rollback to it would change nothing.
    fn remove_original_if_restored(&self) -> Result<(), Error> {
        match self.find_original()? {
            Some(original) if self.is_restored(&original)? => self.remove_original(),
            Some(_) | None => Ok(()),
        }
    }

    /// Removes the original set atomically: renames its folder to `dropped`, which
    /// [`remove_garbage`](Folder::remove_garbage) deletes.
    fn remove_original(&self) -> Result<(), Error> {
        let (original, dropped) = (self.own_path("original"), self.own_path("dropped"));
        ignore_not_found(fs::remove_dir_all(&dropped)).map_err(Error::io("remove", &dropped))?;
        ignore_not_found(fs::rename(&original, &dropped)).map_err(Error::io("remove", &original))
    }

    /// Adds the kept set of the generation to the original set. Does nothing if the generation has
    /// no kept set. Generation 0, which means that nothing is installed, never has one.
    fn add_to_original(&self, generation: u64) -> Result<(), Error> {
        match self.find_kept(generation)? {
            Some(kept) => kept.add_to(&self.own_path("original")),
            None => Ok(()),
        }
    }

    /// Reads the original set. `None` if there is none.
    fn find_original(&self) -> Result<Option<Kept>, Error> {
        Kept::read(&self.own_path("original"))
    }

    /// Reads the kept set of the generation. `None` if `forget` has removed it, or a list is
    /// missing.
    fn find_kept(&self, generation: u64) -> Result<Option<Kept>, Error> {
        Kept::read(&self.generation_folder(generation))
    }

    /// Reads the kept set of the generation.
    ///
    /// # Errors
    /// If the set does not exist or is not complete.
    fn require_kept(&self, generation: u64) -> Result<Kept, Error> {
        let folder = self.generation_folder(generation);
        self.find_kept(generation)?.ok_or_else(|| incomplete(&folder))
    }

    /// Returns the path of the file or folder `name` in the installer's own folder.
    fn own_path(&self, name: &str) -> PathBuf {
        self.own_folder.join(name)
    }

    /// Returns the path of a generation's folder.
    fn generation_folder(&self, generation: u64) -> PathBuf {
        self.own_path(&generation.to_string())
    }

    /// Reads the state. `None` if nothing is installed and no command was interrupted.
    fn state(&self) -> Result<Option<State>, Error> {
        State::read(&self.own_folder)
    }

    /// Waits until all renames in the plugin folder are on the disk.
    fn sync(&self) -> Result<(), Error> {
        self.handle.sync_all().map_err(Error::io("sync", &self.path))
    }

    /// Runs `command` and then removes the installer's files that are not needed any more, even if
    /// `command` failed. Returns the outcome of `command`.
    fn run_and_remove_garbage<T>(&self, command: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let outcome = command();
        self.remove_garbage();
        outcome
    }

    /// Removes the installer's files that `state` does not need, and then the installer's own
    /// folder if it is empty. Failures are ignored: a file that cannot be removed is reported when
    /// it has to be created again.
    fn remove_garbage(&self) {
        let needed_generations = match self.state() {
            Ok(Some(State::Installing(generation))) => vec![generation, generation - 1],
            Ok(Some(State::Installed(generation) | State::RollingBack(generation) | State::Forgetting(generation))) => {
                vec![generation]
            }
            Ok(None) => vec![],
            // The interrupted `rollback --original` must be finished first.
            Ok(Some(State::Restoring)) => return,
            // It is unknown which files are needed.
            Err(_) => return,
        };
        let needed: Vec<PathBuf> =
            needed_generations.into_iter().map(|generation| self.generation_folder(generation)).collect();
        let is_incomplete = |original: &Path| Kept::read(original).is_ok_and(|kept| kept.is_none());
        for entry in fs::read_dir(&self.own_folder).into_iter().flatten().flatten() {
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
        let _ = fs::remove_file(self.own_path("state.new"));
        let _ = fs::remove_dir(&self.own_folder);
    }

    /// Returns the mode and the checksum of the program of this name in the plugin folder. `None`
    /// if it is neither a regular file nor a link to one.
    fn mode_and_sum(&self, name: &str) -> Result<Option<(u32, String)>, Error> {
        let path = self.path.join(name);
        let file = read_if_regular(&path).map_err(Error::io("read", &path))?;
        Ok(file.map(|(mode, content)| (mode, set::sum(&content))))
    }

    /// Returns the programs that the install of this generation has installed.
    fn list_installed(&self, generation: u64) -> Result<Vec<Program>, Error> {
        let path = self.generation_folder(generation).join(set::SUMS);
        let text = read(&path).map_err(Error::io("read", &path))?;
        set::parse(&String::from_utf8_lossy(&text))
            .map_err(|reason| Error::new(format!("{}: {reason}", path.display())))
    }
}

/// Returns the error that `folder` is needed for a rollback but is not a kept set any more.
fn incomplete(folder: &Path) -> Error {
    Error::new(format!("the kept set in {} is not complete", folder.display()))
}
