//! Runs the installer on test folders. The programs to install are small scripts that answer
//! VERSION: the installer only needs files that run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use cni_install::set::sum;
use cni_testkit::program;
use tempfile::TempDir;

/// A place with sets to install from and a folder to install into.
pub(crate) struct Place {
    pub(crate) temporary: TempDir,
}

impl Place {
    pub(crate) fn new() -> Place {
        let place = Place { temporary: tempfile::tempdir().unwrap() };
        fs::create_dir(place.dest()).unwrap();
        place
    }

    pub(crate) fn dest(&self) -> PathBuf {
        self.temporary.path().join("bin")
    }

    /// A set of programs called `names` that print `version`.
    pub(crate) fn set(&self, version: &str, names: &[&str]) -> PathBuf {
        let folder = self.temporary.path().join(version);
        fs::create_dir(&folder).unwrap();
        let mut sums = String::new();
        for name in names {
            let content = answering(&format!("{version} of {name}"));
            program::script(folder.join(name), &content);
            sums += &format!("{}  {name}\n", sum(content.as_bytes()));
        }
        fs::write(folder.join("SHA256SUMS"), sums).unwrap();
        folder
    }

    pub(crate) fn install(&self, from: &Path) -> Ran {
        run(&["install", "--from", from.to_str().unwrap(), "--dest", self.dest().to_str().unwrap()])
    }

    pub(crate) fn call(&self, verb: &str) -> Ran {
        run(&[verb, "--dest", self.dest().to_str().unwrap()])
    }

    pub(crate) fn to_original(&self) -> Ran {
        run(&["rollback", "--original", "--dest", self.dest().to_str().unwrap()])
    }

    /// What a program in the folder says it is; `None` if there is none.
    pub(crate) fn says(&self, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.dest().join(name)).ok()?;
        Some(text.lines().last()?.trim_start_matches("# ").to_owned())
    }

    /// Everything in the folder, our own included.
    pub(crate) fn files(&self) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(self.dest()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

pub(crate) fn answering(version: &str) -> String {
    format!("#!/bin/sh\necho '{{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"1.1.0\"]}}'\n# {version}\n")
}

#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) status: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    #[track_caller]
    pub(crate) fn fine(self) -> String {
        assert_eq!((self.status, self.err.as_str()), (0, ""), "{}", self.out);
        self.out
    }

    #[track_caller]
    pub(crate) fn failed(self, why: &str) {
        assert!(self.status == 1 && self.out.is_empty() && self.err.contains(why), "{self:?}");
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Ran {
        Ran {
            status: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

pub(crate) fn installer() -> Command {
    Command::new(env!("CARGO_BIN_EXE_cni-install"))
}

pub(crate) fn run(args: &[&str]) -> Ran {
    installer().args(args).stdin(Stdio::null()).output().unwrap().into()
}
