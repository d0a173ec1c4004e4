//! Reads and writes `.cni-install/state`: the installed generation, or the command that is running.

use std::fs;
use std::path::Path;

use crate::Error;
use crate::disk::{absent_is_fine, read, sync, write_new};

/// The state, which is in the first line of the file. The number is the generation's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Installing(u64),
    Installed(u64),
    RollingBack(u64),
    /// `rollback --original` is running. `original/` is complete.
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

    /// Reads the state from `own`, the installer's own folder. `None` if the file does not exist.
    pub(crate) fn read(own: &Path) -> Result<Option<State>, Error> {
        let path = own.join("state");
        let text = match read(&path) {
            Ok(text) => String::from_utf8_lossy(&text).into_owned(),
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(cause) => return Err(Error::io("read", &path)(cause)),
        };
        let state = State::parse(&text);
        state.map(Some).ok_or_else(|| Error::new(format!("{} is not ours: {text:?}", path.display())))
    }

    /// Replaces the state atomically, and waits until it is on the disk.
    pub(crate) fn write(self, own: &Path) -> Result<(), Error> {
        let (path, temporary) = (own.join("state"), own.join("state.new"));
        write_new(&temporary, self.text().as_bytes(), 0o644).map_err(Error::io("write", &temporary))?;
        fs::rename(&temporary, &path).map_err(Error::io("write", &path))?;
        sync(own).map_err(Error::io("write out", own))
    }

    /// Removes the state, and waits until the disk has that too.
    pub(crate) fn remove(own: &Path) -> Result<(), Error> {
        let path = own.join("state");
        absent_is_fine(fs::remove_file(&path)).map_err(Error::io("remove", &path))?;
        sync(own).map_err(Error::io("write out", own))
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
