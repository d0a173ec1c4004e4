//! The folder that runtimes execute plugins from, while they do.
//!
//! Ours in it, beside the programs, is `.cni-install/`:
//!
//! - `<n>/`, a generation: what the n-th install replaced (hard links, or copies), `ABSENT`, the names that were not
//!   there, and `SHA256SUMS`, what it put in their places. It is complete before anything is replaced.
//! - `state`: `installing <n>` from before the first rename to after the last, then `installed <n>`. Each change of it is
//!   one rename, so a killed installer always left one of the two. The next one undoes what is `installing`, from `<n>/`,
//!   and goes back to `installed <n-1>`. Every generation that `state` does not need is garbage.
//! - `staging/`: new programs, whole and tried, before they are renamed. Same file system, so a rename cannot fail for
//!   want of space.
//!
//! The lock is an flock of the folder itself: it needs no file, so a failure leaves none behind.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Error;
use crate::set::{self, Program, Set};

/// A folder of plugins, locked against other installers as long as this value lives.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    own: PathBuf,
    /// The flock.
    handle: File,
}

/// What `state` says.
enum State {
    Installing(u64),
    Installed(u64),
}

/// What an install did.
#[derive(Debug, PartialEq, Eq)]
pub enum Installed {
    /// Nothing: the folder holds these very programs.
    AlreadyThere,
    /// The programs are in place.
    Replaced {
        /// An earlier installation had been cut off, and was undone first.
        repaired: bool,
    },
}

/// What a rollback did.
#[derive(Debug, PartialEq, Eq)]
pub enum RolledBack {
    /// Nothing: no earlier set is kept.
    NothingKept,
    /// By name.
    Done {
        /// Put back.
        restored: Vec<String>,
        /// Removed, because the last install brought them.
        removed: Vec<String>,
        /// Left, because somebody else replaced or removed them since.
        left: Vec<String>,
    },
}

/// The folder beside what was installed.
#[derive(Debug, PartialEq, Eq)]
pub enum Comparison {
    /// This program installed nothing here.
    NothingInstalled,
    /// An installation was killed half-way.
    CutOff,
    /// These are there, unchanged.
    Same(Vec<String>),
    /// A line for each that is not.
    Different(Vec<String>),
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

    /// The folder as it is, locked.
    ///
    /// # Errors
    /// It cannot be opened, or another installer is at work.
    pub fn open(path: &Path) -> Result<Folder, Error> {
        let handle = File::open(path).map_err(Error::io("open the folder", path))?;
        let own = path.join(".cni-install");
        // Behind a link would be a folder of somebody else, which must not become our rubbish.
        match fs::symlink_metadata(&own) {
            Ok(metadata) if !metadata.is_dir() => {
                return Err(Error::new(format!("{} is no folder of ours", own.display())));
            }
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(Error::io("look at", &own)(cause)),
            Ok(_) | Err(_) => {}
        }
        match handle.try_lock() {
            Ok(()) => Ok(Folder { path: path.to_owned(), own, handle }),
            Err(TryLockError::WouldBlock) => {
                Err(Error::new(format!("another cni-install is at work in {}", path.display())))
            }
            Err(TryLockError::Error(cause)) => Err(Error::io("lock the folder", path)(cause)),
        }
    }

    /// Puts the set's programs in place of what is there.
    ///
    /// # Errors
    /// A program is not what its list says, cannot be copied here or does not run here. Nothing was changed then, or, if a
    /// rename failed half-way, all was put back; the message says if even that failed.
    pub fn install(&self, set: &Set) -> Result<Installed, Error> {
        let contents = set.programs().iter().map(|program| set.content(program)).collect::<Result<Vec<_>, _>>()?;
        let done = self.install_these(set, &contents);
        self.purge_garbage();
        done
    }

    fn install_these(&self, set: &Set, contents: &[Vec<u8>]) -> Result<Installed, Error> {
        let before = self.state()?;
        let repaired = matches!(before, Some(State::Installing(_)));
        let current = match before {
            Some(State::Installing(generation)) => self.undo(generation)?,
            Some(State::Installed(generation)) => generation,
            None => 0,
        };
        let ours = current > 0 && self.list(current)? == set.programs();
        if ours && set.programs().iter().all(|program| self.is_in_place(program)) {
            return Ok(Installed::AlreadyThere);
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.own)
            .map_err(Error::io("create the folder", &self.own))?;
        self.stage(set, contents)?;
        let generation = current + 1;
        self.keep(set, generation)?;
        self.write_state(&State::Installing(generation))?;
        for program in set.programs() {
            let place = self.path.join(&program.name);
            if let Err(cause) = fs::rename(self.own("staging").join(&program.name), &place) {
                let error = Error::io("replace", &place)(cause);
                return Err(match self.undo(generation) {
                    Ok(_) => Error::new(format!("{error}. All was put back")),
                    Err(more) => Error::new(format!("{error}. And it could not all be put back: {more}")),
                });
            }
        }
        self.handle.sync_all().map_err(Error::io("write out", &self.path))?;
        self.write_state(&State::Installed(generation))?;
        Ok(Installed::Replaced { repaired })
    }

    /// Puts back what was there before the last install. Harmless to repeat.
    ///
    /// # Errors
    /// A program cannot be put back or removed: the rest is done all the same, and the kept set stays.
    pub fn rollback(&self) -> Result<RolledBack, Error> {
        let done = match self.state()? {
            None => RolledBack::NothingKept,
            Some(State::Installing(generation) | State::Installed(generation)) => {
                let done = self.restore(generation)?;
                let path = self.own("state");
                fs::remove_file(&path).map_err(Error::io("remove", &path))?;
                done
            }
        };
        self.purge_garbage();
        Ok(done)
    }

    /// Compares the folder with what was installed.
    ///
    /// # Errors
    /// Our own files cannot be read.
    pub fn compare(&self) -> Result<Comparison, Error> {
        let installed = match self.state()? {
            None => return Ok(Comparison::NothingInstalled),
            Some(State::Installing(_)) => return Ok(Comparison::CutOff),
            Some(State::Installed(generation)) => self.list(generation)?,
        };
        let lines: Vec<String> = installed
            .iter()
            .filter_map(|program| match self.sum_of(&program.name) {
                Some(_) if self.is_in_place(program) => None,
                Some(sum) if sum == program.sum => Some(format!("{} cannot be executed by all", program.name)),
                Some(_) => Some(format!("{} is another program", program.name)),
                None => Some(format!("{} is missing", program.name)),
            })
            .collect();
        Ok(if lines.is_empty() {
            Comparison::Same(installed.into_iter().map(|program| program.name).collect())
        } else {
            Comparison::Different(lines)
        })
    }

    fn own(&self, name: &str) -> PathBuf {
        self.own.join(name)
    }

    /// The folder of a generation.
    fn generation(&self, generation: u64) -> PathBuf {
        self.own(&generation.to_string())
    }

    /// Removes what `state` does not need, of what is called as we call it, and our own folder with the last of it. What
    /// cannot be removed is met again, and named, when it is to be made anew.
    fn purge_garbage(&self) {
        let needed = match self.state() {
            Ok(Some(State::Installing(generation))) => vec![generation, generation - 1],
            Ok(Some(State::Installed(generation))) => vec![generation],
            Ok(None) => vec![],
            Err(_) => return,
        };
        let needed: Vec<PathBuf> = needed.into_iter().map(|generation| self.generation(generation)).collect();
        for entry in fs::read_dir(&self.own).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.as_encoded_bytes();
            let is_ours = name == b"staging" || name.iter().all(u8::is_ascii_digit);
            if is_ours && path.is_dir() && !needed.contains(&path) {
                let _ = fs::remove_dir_all(path);
            }
        }
        let _ = fs::remove_file(self.own("state.new"));
        let _ = fs::remove_dir(&self.own);
    }

    /// The sum of the program of that name, if it is a regular file, or a link to one, that can be read.
    fn sum_of(&self, name: &str) -> Option<String> {
        Some(set::sum(&read(&self.path.join(name)).ok()?))
    }

    /// Whether a runtime that starts the program gets this one.
    fn is_in_place(&self, program: &Program) -> bool {
        let runs = |metadata: fs::Metadata| metadata.permissions().mode() & 0o555 == 0o555;
        fs::metadata(self.path.join(&program.name)).is_ok_and(runs)
            && self.sum_of(&program.name).as_ref() == Some(&program.sum)
    }

    /// What the generation's install put in place.
    fn list(&self, generation: u64) -> Result<Vec<Program>, Error> {
        let path = self.generation(generation).join(set::SUMS);
        let text = read(&path).map_err(Error::io("read", &path))?;
        set::parse(&String::from_utf8_lossy(&text)).map_err(|why| Error::new(format!("{}: {why}", path.display())))
    }

    fn state(&self) -> Result<Option<State>, Error> {
        let path = self.own("state");
        let text = match read(&path) {
            Ok(text) => String::from_utf8_lossy(&text).into_owned(),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(cause) => return Err(Error::io("read", &path)(cause)),
        };
        let state = text.trim_end().split_once(' ').and_then(|(word, number)| {
            let number = number.parse().ok().filter(|&number| number > 0)?;
            match word {
                "installing" => Some(State::Installing(number)),
                "installed" => Some(State::Installed(number)),
                _ => None,
            }
        });
        state.map(Some).ok_or_else(|| Error::new(format!("{} is not ours: {text:?}", path.display())))
    }

    /// In one step, and on the disk.
    fn write_state(&self, state: &State) -> Result<(), Error> {
        let text = match state {
            State::Installing(generation) => format!("installing {generation}\n"),
            State::Installed(generation) => format!("installed {generation}\n"),
        };
        let (path, temporary) = (self.own("state"), self.own("state.new"));
        put(&temporary, text.as_bytes(), 0o644).map_err(Error::io("write", &temporary))?;
        fs::rename(&temporary, &path).map_err(Error::io("write", &path))?;
        let handle = File::open(&self.own).map_err(Error::io("open the folder", &self.own))?;
        handle.sync_all().map_err(Error::io("write out", &self.own))
    }

    /// Puts everything back as before the generation's install, which was cut off; returns the generation before it.
    fn undo(&self, generation: u64) -> Result<u64, Error> {
        self.restore(generation)?;
        let before = generation - 1;
        if self.generation(before).exists() {
            self.write_state(&State::Installed(before))?;
            return Ok(before);
        }
        let path = self.own("state");
        fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        Ok(0)
    }

    /// The new programs, whole, on the disk, and each run once, since a folder may be mounted `noexec` and a program be
    /// for another processor.
    fn stage(&self, set: &Set, contents: &[Vec<u8>]) -> Result<(), Error> {
        let staging = self.new_staging()?;
        for (program, content) in set.programs().iter().zip(contents) {
            let path = staging.join(&program.name);
            put(&path, content, 0o755).map_err(Error::io("write", &path))?;
        }
        for program in set.programs() {
            run_once(&staging.join(&program.name), program)?;
        }
        Ok(())
    }

    /// An empty folder for what is to be renamed.
    fn new_staging(&self) -> Result<PathBuf, Error> {
        let staging = self.own("staging");
        absent_is_fine(fs::remove_dir_all(&staging)).map_err(Error::io("remove", &staging))?;
        DirBuilder::new().mode(0o700).create(&staging).map_err(Error::io("create the folder", &staging))?;
        Ok(staging)
    }

    /// Keeps what is in the places of the set's programs, as a generation.
    fn keep(&self, set: &Set, generation: u64) -> Result<(), Error> {
        let folder = self.generation(generation);
        let _ = fs::remove_dir_all(&folder); // of an installer killed before it had made use of it
        DirBuilder::new().mode(0o755).create(&folder).map_err(Error::io("create the folder", &folder))?;
        let mut absent = String::new();
        for Program { name, .. } in set.programs() {
            let place = self.path.join(name);
            match fs::symlink_metadata(&place) {
                Ok(metadata) if metadata.is_dir() => {
                    return Err(Error::new(format!("{} is a folder", place.display())));
                }
                Ok(_) => same(&place, &folder.join(name)).map_err(Error::io("keep", &place))?,
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                    absent.push_str(name);
                    absent.push('\n');
                }
                Err(cause) => return Err(Error::io("look at", &place)(cause)),
            }
        }
        for (name, text) in [("ABSENT", &absent), (set::SUMS, &set::text(set.programs()))] {
            let path = folder.join(name);
            put(&path, text.as_bytes(), 0o644).map_err(Error::io("write", &path))?;
        }
        Ok(())
    }

    /// Puts back what the generation kept, and removes what was absent before it. What is not (any more) what it
    /// installed stays.
    fn restore(&self, generation: u64) -> Result<RolledBack, Error> {
        let kept_in = self.generation(generation);
        let ours = self.list(generation)?;
        let list = kept_in.join("ABSENT");
        let absent = read(&list).map_err(Error::io("read", &list))?;
        let absent = String::from_utf8_lossy(&absent);
        let absent: BTreeSet<&str> = absent.lines().collect();
        let staging = self.new_staging()?;
        let (mut restored, mut removed, mut left, mut failed) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for program in &ours {
            let name = &program.name;
            let place = self.path.join(name);
            let kept = kept_in.join(name);
            if self.sum_of(name).as_ref() != Some(&program.sum) {
                // A cut-off installation had not come to this one, or somebody else replaced it.
                left.push(name.clone());
                continue;
            }
            let done = if absent.contains(name.as_str()) {
                removed.push(name.clone());
                absent_is_fine(fs::remove_file(&place)).map_err(Error::io("remove", &place))
            } else {
                restored.push(name.clone());
                let copy = staging.join(name);
                same(&kept, &copy).and_then(|()| fs::rename(&copy, &place)).map_err(Error::io("put back", &place))
            };
            failed.extend(done.err().map(|error| error.to_string()));
        }
        let _ = self.handle.sync_all();
        if failed.is_empty() {
            Ok(RolledBack::Done { restored, removed, left })
        } else {
            Err(Error::new(failed.join("; ")))
        }
    }
}

/// The same file under a second name: a hard link, or where the file system or the kernel's protection of links has
/// none, a copy.
fn same(from: &Path, to: &Path) -> io::Result<()> {
    if fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    if fs::symlink_metadata(from)?.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    fs::copy(from, to)?; // with its mode
    File::open(to)?.sync_all()
}

/// What is in a regular file. Of anything else the other end need never come: of a FIFO not even the opening would end.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(content)
}

/// A new file with this content, on the disk.
fn put(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    absent_is_fine(fs::remove_file(path))?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(content)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?; // whatever the umask was
    file.sync_all()
}

fn absent_is_fine(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// A plugin that is asked for its versions answers and exits, whatever the node looks like.
fn run_once(path: &Path, program: &Program) -> Result<(), Error> {
    let ran = Command::new(path).env_clear().env("CNI_COMMAND", "VERSION").stdin(Stdio::null()).output();
    let output = ran.map_err(|cause| {
        Error::new(format!(
            "{} does not run here ({cause}): is the folder mounted noexec, or is it for another processor?",
            program.name
        ))
    })?;
    if !output.status.success() || !String::from_utf8_lossy(&output.stdout).contains("supportedVersions") {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(Error::new(format!(
            "{} does not answer VERSION: {}: {}",
            program.name,
            output.status,
            stderr.trim()
        )));
    }
    Ok(())
}
