//! Installs a set of programs, and undoes that if it fails.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;

use super::Folder;
use crate::Error;
use crate::kept::Kept;
use crate::report::{InstallReport, RecoveryReport};
use crate::set::Set;
use crate::staging;
use crate::state::State;

impl Folder {
    /// Installs the programs of `set` and keeps the files that they replace.
    ///
    /// # Errors
    /// - If a program's checksum differs from the set's list, or the program cannot be written or
    ///   does not run here. No program has been replaced.
    /// - If a rename or a change of `state` fails. All programs have been put back, unless the
    ///   message reports that this failed too.
    pub fn install(&self, set: &Set) -> Result<(RecoveryReport, InstallReport), Error> {
        // Keyed by checksum: the programs of the multi-call archive are hard links of one file,
        // which is kept in memory once.
        let mut contents = BTreeMap::new();
        for program in set.programs() {
            contents.insert(program.sum.as_str(), set.content(program)?);
        }
        self.run_and_remove_garbage(|| self.install_contents(set, &contents))
    }

    /// Installs the programs of `set`. `contents` maps each checksum to the content.
    fn install_contents(
        &self,
        set: &Set,
        contents: &BTreeMap<&str, Vec<u8>>,
    ) -> Result<(RecoveryReport, InstallReport), Error> {
        let (recovered, current) = self.recover()?;
        let is_installed = current > 0 && self.list_installed(current)? == set.programs();
        if is_installed && !self.differs(set.programs())? {
            return Ok((recovered, InstallReport::AlreadyThere));
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.own_folder)
            .map_err(Error::io("create the folder", &self.own_folder))?;
        staging::write_and_try(&self.own_path("staging"), set, contents)?;
        let generation = current + 1;
        Kept::create(&self.path, set, &self.generation_folder(generation))?;
        // The kept set of this install replaces the previous set, whose files are therefore added
        // to the original set first.
        self.add_to_original(current)?;
        if let Err(error) = self.replace_programs(set, generation) {
            // The first change of `state` may have failed. Then there is nothing to undo, and on a
            // full disk the undo would fail as well.
            let is_begun =
                !matches!(self.state(), Ok(state) if state == (current > 0).then_some(State::Installed(current)));
            let undone = if is_begun { self.undo_install(generation).map(drop) } else { Ok(()) };
            return Err(match undone {
                Ok(()) => Error::new(format!("{error}. All changes were undone")),
                Err(undo_error) => Error::new(format!("{error}. Undoing the changes failed too: {undo_error}")),
            });
        }
        Ok((recovered, InstallReport::Replaced))
    }

    /// Renames the programs in `staging` into place, and writes the states for it.
    fn replace_programs(&self, set: &Set, generation: u64) -> Result<(), Error> {
        State::Installing(generation).write(&self.own_folder)?;
        for program in set.programs() {
            let path = self.path.join(&program.name);
            fs::rename(self.own_path("staging").join(&program.name), &path).map_err(Error::io("replace", &path))?;
        }
        self.sync()?;
        State::Installed(generation).write(&self.own_folder)
    }
}
