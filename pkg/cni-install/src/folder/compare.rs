//! Compares the plugin folder with the programs that were installed.

use super::Folder;
use crate::Error;
use crate::report::Comparison;
use crate::set::Program;
use crate::state::State;

impl Folder {
    /// Compares the folder with the installed programs.
    ///
    /// # Errors
    /// If the installer's own files cannot be read.
    pub fn compare(&self) -> Result<Comparison, Error> {
        let installed = match self.state()? {
            None => return Ok(Comparison::NothingInstalled),
            Some(State::Installing(_)) => return Ok(Comparison::Interrupted("an installation")),
            Some(State::RollingBack(_) | State::Restoring) => return Ok(Comparison::Interrupted("a rollback")),
            Some(State::Installed(generation) | State::Forgetting(generation)) => self.list_installed(generation)?,
        };
        let compare = |program: Program| Ok((self.difference(&program)?, program.name));
        let programs = installed.into_iter().map(compare).collect::<Result<Vec<_>, Error>>()?;
        Ok(Comparison::Installed(programs.into_iter().map(|(difference, name)| (name, difference)).collect()))
    }

    /// Returns how the file in the plugin folder differs from the installed program. `None` if a
    /// runtime that executes the file gets this program.
    fn difference(&self, program: &Program) -> Result<Option<&'static str>, Error> {
        Ok(match self.mode_and_sum(&program.name)? {
            None => Some("is missing"),
            Some((_, sum)) if sum != program.sum => Some("is not the installed program: its SHA-256 differs"),
            Some((mode, _)) if mode & 0o555 != 0o555 => Some("is not executable by all users"),
            Some(_) => None,
        })
    }

    /// Whether one of the programs has a [`difference`](Folder::difference).
    pub(super) fn differs(&self, programs: &[Program]) -> Result<bool, Error> {
        let differences = programs.iter().map(|program| self.difference(program)).collect::<Result<Vec<_>, Error>>()?;
        Ok(differences.iter().any(Option::is_some))
    }
}
