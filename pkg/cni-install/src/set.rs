//! Reads a set of programs: a folder with the file `SHA256SUMS`, as `sha256sum` writes it, with one
//! line per program.
//!
//! Other files in the folder do not belong to the set. A list with a name that is not a plain file
//! name is refused, so that it cannot name a file in another folder.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::Error;

/// The file name of the list of programs, in a set and in a kept set (see `kept.rs`).
pub const SUMS: &str = "SHA256SUMS";

/// The file name, in a kept set (see `kept.rs`), of the list of programs that did not exist before.
/// No program can have this name.
pub(crate) const ABSENT_LIST: &str = "ABSENT";

/// The longest file name, in bytes, that Linux's file systems accept.
const NAME_MAX: usize = 255;

/// A program's name and the SHA-256 of its content, in lower-case hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// A plain file name.
    pub name: String,
    /// 64 digits.
    pub sum: String,
}

/// A folder of programs with their checksums. The content is verified when it is read
/// ([`Set::content`]).
#[derive(Debug)]
pub struct Set {
    folder: PathBuf,
    programs: Vec<Program>,
}

impl Set {
    /// Reads the list of `folder`. The programs are not read yet.
    ///
    /// # Errors
    /// If the list cannot be read, is empty, or has a line in another format.
    pub fn read(folder: &Path) -> Result<Set, Error> {
        let path = folder.join(SUMS);
        let text = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
        let programs = parse(&text).map_err(|reason| Error::new(format!("{}: {reason}", path.display())))?;
        if programs.is_empty() {
            return Err(Error::new(format!("{} lists no program", path.display())));
        }
        Ok(Set { folder: folder.to_owned(), programs })
    }

    /// Returns the programs, in the order of the list.
    pub fn programs(&self) -> &[Program] {
        &self.programs
    }

    /// Returns the names of the programs.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.programs.iter().map(|program| program.name.as_str())
    }

    /// Reads a program and verifies its checksum.
    ///
    /// # Errors
    /// If the program is not a regular file, cannot be read, or its checksum differs from the
    /// list's.
    pub fn content(&self, program: &Program) -> Result<Vec<u8>, Error> {
        let path = self.folder.join(&program.name);
        let metadata = fs::symlink_metadata(&path).map_err(Error::io("look at", &path))?;
        if !metadata.is_file() {
            return Err(Error::new(format!("{} is not a regular file", path.display())));
        }
        let content = fs::read(&path).map_err(Error::io("read", &path))?;
        let sum = sum(&content);
        if sum != program.sum {
            return Err(Error::new(format!(
                "{} does not match {SUMS}: its SHA-256 is {sum}, expected {}",
                path.display(),
                program.sum
            )));
        }
        Ok(content)
    }
}

/// Returns the SHA-256 of `content`, in hexadecimal.
pub fn sum(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the text of a list, as `sha256sum` writes it.
pub fn text(programs: &[Program]) -> String {
    programs.iter().map(|program| format!("{}  {}\n", program.sum, program.name)).collect()
}

/// Parses the text of a list.
///
/// # Errors
/// If a line is invalid, or a name has two lines. The error has the line's number and the reason.
pub fn parse(text: &str) -> Result<Vec<Program>, String> {
    let programs = parse_lines(text)?;
    for (index, Program { name, .. }) in programs.iter().enumerate() {
        if programs[..index].iter().any(|earlier| earlier.name == *name) {
            return Err(format!("line {}: {name:?} is named twice", index + 1));
        }
    }
    Ok(programs)
}

/// Parses like [`parse`], but a name may have several lines, as in the original set: see `kept.rs`.
pub(crate) fn parse_lines(text: &str) -> Result<Vec<Program>, String> {
    let mut programs: Vec<Program> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let (sum, name) = line.split_once("  ").ok_or(format!("line {number} is not `<sha256>  <name>`"))?;
        if sum.len() != 64 || !sum.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)) {
            return Err(format!("line {number}: {sum:?} is not a SHA-256 checksum"));
        }
        if !is_program_name(name) {
            return Err(format!("line {number}: {name:?} is not a program's name"));
        }
        programs.push(Program { name: name.to_owned(), sum: sum.to_owned() });
    }
    Ok(programs)
}

/// Whether a program may have this name: a plain file name that is neither hidden nor that of a
/// list.
fn is_program_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_list = name == SUMS || name == ABSENT_LIST;
    (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(is_allowed) && !name.starts_with('.') && !is_list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_plain_files_once_each() {
        let sum = sum(b"x");
        let good = format!("{sum}  bridge\n{sum}  host-local\n");
        let programs = parse(&good).unwrap();
        assert_eq!(programs.iter().map(|program| program.name.as_str()).collect::<Vec<_>>(), ["bridge", "host-local"]);
        assert_eq!(text(&programs), good);
        for (bad, why) in [
            (format!("{sum} bridge\n"), "line 1 is not"),
            (format!("{sum}  ../bridge\n"), "is not a program's name"),
            (format!("{sum}  /bin/sh\n"), "is not a program's name"),
            (format!("{sum}  .cni-install\n"), "is not a program's name"),
            (format!("{sum}  \n"), "is not a program's name"),
            (format!("{sum}  SHA256SUMS\n"), "is not a program's name"),
            (format!("{sum}  ABSENT\n"), "is not a program's name"),
            (format!("{sum}  a b\n"), "is not a program's name"),
            (format!("{sum}  a\n{sum}  a\n"), "line 2: \"a\" is named twice"),
            (format!("{}  bridge\n", &sum[1..]), "is not a SHA-256 checksum"),
            (format!("{}  bridge\n", sum.to_uppercase()), "is not a SHA-256 checksum"),
        ] {
            let said = parse(&bad).unwrap_err();
            assert!(said.contains(why), "{bad:?}: {said}");
        }
    }

    #[test]
    fn the_checksum_equals_that_of_sha256sum() {
        assert_eq!(sum(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
