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
        let lines = self.differences(&installed)?;
        Ok(if lines.is_empty() {
            Comparison::Same(installed.into_iter().map(|program| program.name).collect())
        } else {
            Comparison::Different(lines)
        })
    }

    /// Returns how the file in the plugin folder differs from the installed program. `None` if a
    /// runtime that executes the file gets this program.
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

    /// Returns the [`difference`](Folder::difference) of each program that has one.
    pub(super) fn differences(&self, programs: &[Program]) -> Result<Vec<String>, Error> {
        programs.iter().filter_map(|program| self.difference(program).transpose()).collect()
    }
}
