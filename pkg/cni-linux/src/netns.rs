//! Opens network namespaces by path, and runs code inside one.
//!
//! The thread always returns to its own namespace, also after an error or a panic. If returning
//! fails, the process ends, because every undo would act in the wrong namespace. Only the runtime
//! creates and deletes namespaces, never this module.
//!
//! `/proc/self/ns/net` is the namespace of the *main thread*
//! (`/proc/thread-self` is the caller's); and a thread or program started inside a namespace
//! inherits it and keeps it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{NSFS_MAGIC, PROC_SUPER_MAGIC, statfs};

use crate::error::{Cause, Error, Reason, Result};
use crate::sys;

/// The calling thread's own.
const OWN: &str = "/proc/thread-self/ns/net";

/// An open network namespace. It lives at least as long as this handle.
#[derive(Debug)]
pub struct Netns {
    file: File,
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Netns {
    /// Opens the namespace at `path` (CNI_NETNS).
    ///
    /// # Errors
    /// [`Error::is_no_netns`] if there is nothing at `path`, or no network namespace; with Go's
    /// texts.
    pub fn open(path: &Path) -> Result<Netns> {
        open(path).map_err(|cause| Error::new(format_args!("failed to open netns {}", quoted(path)), cause))
    }

    /// The calling thread's own namespace.
    pub fn current() -> Result<Netns> {
        Netns::open(Path::new(OWN))
    }

    /// Whether `path` is the calling thread's own namespace. Two looks; where it is a namespace
    /// nothing is opened.
    ///
    /// # Errors
    /// Those of [`open`](Netns::open), where there is no namespace at `path`. One of another kind
    /// passes for a network's.
    pub fn is_current(path: &Path) -> Result<bool> {
        // All namespaces of a kernel are on one device; what is on another is a plain file, or a
        // puzzle.
        if let (Ok(there), Ok(own)) = (fs::metadata(path), fs::metadata(OWN))
            && there.dev() == own.dev()
        {
            return Ok(there.ino() == own.ino());
        }
        Ok(Netns::open(path)?.is_same(&Netns::current()?))
    }

    /// Whether both are the same namespace, whatever the paths.
    pub fn is_same(&self, other: &Netns) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device and inode, which identify the namespace while it lives. Numbers of dead namespaces
    /// are used again.
    pub fn id(&self) -> (u64, u64) {
        (self.device, self.inode)
    }

    /// Takes the calling thread into this namespace, runs `inside`, and takes it back. A panic of
    /// `inside` continues in the caller, after the way back.
    ///
    /// For what depends on the calling thread: files under /proc/sys/net, sockets being born. Five
    /// system calls. No thread and no child may be started in there: it would stay.
    ///
    /// # Errors
    /// The namespace could not be entered; then `inside` has not run.
    pub fn run<T>(&self, inside: impl FnOnce() -> T) -> Result<T> {
        let enter = || -> io::Result<WayBack> {
            let home = File::open(OWN)?;
            setns(self.as_fd(), CloneFlags::CLONE_NEWNET)?;
            Ok(WayBack(home)) // Only after setns succeeded: without the privilege to enter, the thread could not leave.
        };
        let _back =
            enter().map_err(|error| Error::new(format_args!("failed to enter netns {}", quoted(&self.path)), error))?;
        Ok(inside())
    }
}

/// The namespace that a visitor came from, and goes back to whatever happens.
struct WayBack(File);

impl Drop for WayBack {
    fn drop(&mut self) {
        let go_back = || setns(self.0.as_fd(), CloneFlags::CLONE_NEWNET);
        // The kernel refuses a thread that has just entered only if it lacks memory, so it is asked
        // again.
        if let Err(errno) = go_back().or_else(|_| go_back()).or_else(|_| go_back()) {
            // In this namespace a rollback would delete links of other owners.
            let _ = writeln!(
                io::stderr(),
                "failed to leave a network namespace: {errno}; the process ends, because later changes would be made in the wrong namespace"
            );
            std::process::abort();
        }
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn open(path: &Path) -> Result<Netns, Cause> {
    // Go looks at the file system first; where several things are wrong at once its text is the one
    // people know.
    let magic = statfs(path).map_err(|errno| {
        let text = format!("failed to Statfs {}: {}", quoted(path), go_text(errno));
        let source = Some(errno.into());
        match errno {
            // For the last two errors nothing can be opened later either: a DEL that waited for it
            // would never end.
            Errno::ENOENT | Errno::ENOTDIR | Errno::ENAMETOOLONG | Errno::ELOOP => {
                Reason::NoNetns { text, source }.into()
            }
            _ => Cause::from(errno),
        }
    })?;
    let magic = magic.filesystem_type();
    if magic != NSFS_MAGIC && magic != PROC_SUPER_MAGIC {
        return Err(none(format!("unknown FS magic on {}: {:x}", quoted(path), magic.0)));
    }
    let file = File::open(path)?;
    match sys::namespace_type(&file) {
        Ok(libc::CLONE_NEWNET) => {}
        Ok(_) => return Err(none("it is a namespace, but not a network namespace".into())),
        // A file of procfs that is not a namespace.
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) && magic != NSFS_MAGIC => {
            return Err(none("it is not a namespace".into()));
        }
        // A kernel too old to tell; setns will.
        Err(_) => {}
    }
    let metadata = file.metadata()?;
    Ok(Netns { path: path.to_owned(), device: metadata.dev(), inode: metadata.ino(), file })
}

fn none(text: String) -> Cause {
    Reason::NoNetns { text, source: None }.into()
}

/// A path as Go's `%q` writes the ones that occur.
fn quoted(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

/// The errno's words as Go writes them: libc's, beginning in lower case.
fn go_text(errno: Errno) -> String {
    let text = errno.desc();
    let mut letters = text.chars();
    letters.next().map(|first| first.to_lowercase().chain(letters).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn text_and_kind(path: &str) -> (String, bool) {
        let error = Netns::open(Path::new(path)).unwrap_err();
        (error.to_string(), error.is_no_netns())
    }

    #[test]
    fn a_path_that_is_not_a_namespace_gets_gos_message() {
        assert_eq!(
            text_and_kind("/nonexistent/ns"),
            (
                "failed to open netns \"/nonexistent/ns\": failed to Statfs \"/nonexistent/ns\": no such file or directory"
                    .into(),
                true
            )
        );
        let folder = tempfile::tempdir().unwrap();
        let (ring, long) = (folder.path().join("ring"), format!("/{}", "n".repeat(256)));
        std::os::unix::fs::symlink(&ring, &ring).unwrap();
        let (ring, long) = (text_and_kind(ring.to_str().unwrap()), text_and_kind(&long));
        assert!(ring.1 && long.1, "{ring:?} {long:?}");
        let plain = folder.path().join("plain");
        std::fs::write(&plain, "").unwrap();
        let magic = format!("{:x}", statfs(&plain).unwrap().filesystem_type().0);
        let plain = plain.to_str().unwrap();
        assert_eq!(
            text_and_kind(plain),
            (format!("failed to open netns \"{plain}\": unknown FS magic on \"{plain}\": {magic}"), true)
        );
    }

    #[test]
    fn other_namespaces_and_other_proc_files_are_refused() {
        let (text, kind) = text_and_kind("/proc/self/ns/mnt");
        assert!(kind && text.ends_with("it is a namespace, but not a network namespace"), "{text}");
        let (text, kind) = text_and_kind("/proc/self/status");
        assert!(kind && text.ends_with("it is not a namespace"), "{text}");
    }

    #[test]
    fn the_same_namespace_is_recognised_by_any_path() {
        let here = Netns::current().unwrap();
        let thread = format!("/proc/self/task/{}/ns/net", nix::unistd::gettid());
        assert!(here.is_same(&Netns::open(Path::new(&thread)).unwrap()));
    }

    #[test]
    fn a_plain_file_is_nobodys_namespace_rather_than_anothers() {
        let folder = tempfile::tempdir().unwrap();
        let plain = folder.path().join("plain");
        std::fs::write(&plain, "").unwrap();
        assert!(Netns::is_current(&plain).unwrap_err().is_no_netns());
        assert!(Netns::is_current(Path::new("/proc/self/status")).unwrap_err().is_no_netns());
        assert!(Netns::is_current(Path::new(OWN)).unwrap());
    }

    #[test]
    fn the_door_leads_inside_and_leaves_the_caller_where_it_was() {
        in_new_netns(|| {
            let here = Netns::current().unwrap();
            let other = new_netns();
            assert!(!here.is_same(&other));
            let inside = other.run(|| Netns::current().unwrap()).unwrap();
            assert!(inside.is_same(&other));
            assert!(Netns::current().unwrap().is_same(&here));
            // An error inside is the caller's business; a visit within a visit ends where it began.
            let failed = other.run(|| new_netns().run(|| ()).and_then(|()| Netns::open(Path::new("/nonexistent"))));
            assert!(failed.unwrap().is_err());
            assert!(Netns::current().unwrap().is_same(&here));
        });
    }

    #[test]
    fn after_a_panic_inside_the_thread_is_back_in_its_namespace() {
        in_new_netns(|| {
            let here = Netns::current().unwrap();
            let other = new_netns();
            let panic = catch_unwind(AssertUnwindSafe(|| other.run(|| panic!("inside")))).unwrap_err();
            assert_eq!(panic.downcast_ref::<&str>(), Some(&"inside"));
            assert!(Netns::current().unwrap().is_same(&here));
        });
    }
}
