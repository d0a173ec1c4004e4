//! Reads and writes `.cni-install/state`: the installed generation, or the command that is running.
//!
//! A generation is the number of an install in this folder. The documentation of
//! [`folder`](crate::folder) has the meaning of each state.

use std::fs;
use std::path::Path;

use crate::Error;
use crate::disk::{ignore_not_found, read_text, sync, write_new};

/// The state, which is in the first line of the file. The number is the generation that the command
/// installs, rolls back or forgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Installing(u64),
    Installed(u64),
    RollingBack(u64),
    /// `rollback --original` is running. It has no number, because the original set belongs to no
    /// generation.
    Restoring,
    Forgetting(u64),
}

/// The second line of the file. An older cni-install, which would delete kept files, accepts only a
/// file with one line, so it refuses the folder.
const NOTE: &str = "An older cni-install, without `rollback --original`, must not change this folder.";

impl State {
    /// Parses the text of the file; `None` if the first line is invalid.
    fn parse(text: &str) -> Option<State> {
        let line = text.lines().next()?;
        if line == "restoring" {
            return Some(State::Restoring);
        }
        let (word, number) = line.split_once(' ')?;
        let number = number.parse().ok().filter(|&number| number > 0)?;
        match word {
            "installing" => Some(State::Installing(number)),
            "installed" => Some(State::Installed(number)),
            "rolling-back" => Some(State::RollingBack(number)),
            "forgetting" => Some(State::Forgetting(number)),
            _ => None,
        }
    }

    /// Returns the text of the file.
    fn text(self) -> String {
        let line = match self {
            State::Installing(generation) => format!("installing {generation}"),
            State::Installed(generation) => format!("installed {generation}"),
            State::RollingBack(generation) => format!("rolling-back {generation}"),
            State::Restoring => "restoring".to_owned(),
            State::Forgetting(generation) => format!("forgetting {generation}"),
        };
        format!("{line}\n{NOTE}\n")
    }

    /// Reads the state from `own_folder`, the installer's own folder. `None` if the file does not
    /// exist.
    pub(crate) fn read(own_folder: &Path) -> Result<Option<State>, Error> {
        let path = own_folder.join("state");
        let Some(text) = read_text(&path).map_err(Error::io("read", &path))? else { return Ok(None) };
        match State::parse(&text) {
            Some(state) => Ok(Some(state)),
            None => Err(Error::new(format!(
                "{} has an unknown state: {text:?}. A newer cni-install wrote it, or the file is damaged",
                path.display()
            ))),
        }
    }

    /// Replaces the state atomically, and waits until it is on the disk.
    pub(crate) fn write(self, own_folder: &Path) -> Result<(), Error> {
        let (path, temporary) = (own_folder.join("state"), own_folder.join("state.new"));
        write_new(&temporary, self.text().as_bytes(), 0o644).map_err(Error::io("write", &temporary))?;
        fs::rename(&temporary, &path).map_err(Error::io("write", &path))?;
        sync(own_folder).map_err(Error::io("sync", own_folder))
    }

    /// Removes the state, and waits until the removal is on the disk.
    pub(crate) fn remove(own_folder: &Path) -> Result<(), Error> {
        let path = own_folder.join("state");
        ignore_not_found(fs::remove_file(&path)).map_err(Error::io("remove", &path))?;
        sync(own_folder).map_err(Error::io("sync", own_folder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_as_it_was_written() {
        for state in [
            State::Installing(7),
            State::Installed(1),
            State::RollingBack(2),
            State::Restoring,
            State::Forgetting(u64::MAX),
        ] {
            assert_eq!(State::parse(&state.text()), Some(state));
        }
        assert_eq!(State::parse("installed 3\n"), Some(State::Installed(3)), "as an older version wrote it");
        let text = State::Installed(3).text();
        let number = text.trim_end().split_once(' ').map(|(_, number)| number.parse::<u64>());
        assert!(number.is_some_and(|number| number.is_err()), "an older version accepts it: {text:?}");
        for bad in ["", "installed", "installed 0", "installed x", "restored 1", "restoring 1\n"] {
            assert_eq!(State::parse(bad), None, "{bad:?}");
        }
    }
}
