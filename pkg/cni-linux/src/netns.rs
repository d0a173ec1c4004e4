//! Opens network namespaces by path, and runs code inside one.
//!
//! The thread always returns to its own namespace, also after an error or a panic. If returning
//! fails, the process ends, because every undo would act in the wrong namespace. Only the runtime
//! creates and deletes namespaces, never this module.
//!
//! `/proc/self/ns/net` is the namespace of the *main thread*; the calling thread's is under
//! `/proc/thread-self`. A thread or program that is started inside a namespace stays in it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{NSFS_MAGIC, PROC_SUPER_MAGIC, statfs};

use crate::error::{Cause, Error, Result};
use crate::sys;

/// The file of the calling thread's namespace.
const OWN_NETNS: &str = "/proc/thread-self/ns/net";

/// An open network namespace. The kernel keeps the namespace at least as long as this handle.
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
    /// [`Error::is_no_netns`], with the texts of the Go plugins, if `path` does not exist or is not
    /// a network namespace.
    pub fn open(path: &Path) -> Result<Netns> {
        open(path).map_err(|cause| Error::new(format_args!("failed to open netns {}", quoted(path)), cause))
    }

    /// Opens the namespace at `path`, as [`open`](Netns::open) does. Returns `None` if `path` is
    /// `None`, does not exist or is not a network namespace, as after the end of a container.
    ///
    /// # Errors
    /// The namespace exists, but cannot be opened.
    pub fn open_if_exists(path: Option<&Path>) -> Result<Option<Netns>> {
        match path.map(Netns::open).transpose() {
            Err(error) if error.is_no_netns() => Ok(None),
            opened => opened,
        }
    }

    /// Opens the calling thread's namespace.
    pub fn current() -> Result<Netns> {
        Netns::open(Path::new(OWN_NETNS))
    }

    /// Whether `path` is the calling thread's network namespace. Opens nothing if `path` is a
    /// namespace: two calls of `stat` are enough. Also returns `false` for a namespace of another
    /// type.
    ///
    /// # Errors
    /// Those of [`open`](Netns::open) if `path` is not a namespace.
    pub fn is_current(path: &Path) -> Result<bool> {
        // All namespaces are on one device. For a path on another device, `open` below returns the
        // error.
        if let (Ok(given), Ok(own)) = (fs::metadata(path), fs::metadata(OWN_NETNS))
            && given.dev() == own.dev()
        {
            return Ok(given.ino() == own.ino());
        }
        Ok(Netns::open(path)?.is_same(&Netns::current()?))
    }

    /// Whether both handles are of the same namespace, even if opened by different paths.
    pub fn is_same(&self, other: &Netns) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// Returns the path by which the namespace was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns device and inode, which identify the namespace while it exists. The kernel may reuse
    /// the inode of a deleted namespace.
    pub fn id(&self) -> (u64, u64) {
        (self.device, self.inode)
    }

    /// Runs `inside` while the calling thread is in this namespace, and returns the result of
    /// `inside`. The thread returns to its own namespace even if `inside` panics.
    ///
    /// Sockets that `inside` opens, and files under /proc/sys/net, are those of this namespace.
    /// `inside` must not start a thread or a program, which would stay in this namespace.
    ///
    /// # Errors
    /// The thread could not enter the namespace; `inside` was not run.
    pub fn run<T>(&self, inside: impl FnOnce() -> T) -> Result<T> {
        let enter = || -> io::Result<ReturnGuard> {
            let own = File::open(OWN_NETNS)?;
            setns(self.as_fd(), CloneFlags::CLONE_NEWNET)?;
            // Created after `setns`, because a thread that lacks the privilege to enter also lacks
            // the privilege to go back: the guard would end the process.
            Ok(ReturnGuard(own))
        };
        let _guard =
            enter().map_err(|error| Error::new(format_args!("failed to enter netns {}", quoted(&self.path)), error))?;
        Ok(inside())
    }
}

/// The namespace that the thread came from. Dropping the guard takes the thread back.
struct ReturnGuard(File);

impl Drop for ReturnGuard {
    /// Takes the thread back. Ends the process with a message on standard error if that fails.
    fn drop(&mut self) {
        let go_back = || setns(self.0.as_fd(), CloneFlags::CLONE_NEWNET);
        // The thread could enter the namespace, so it also has the privilege to go back, except if
        // its own namespace belongs to another user namespace. Otherwise `setns` can only fail for
        // lack of memory: try three times.
        if let Err(errno) = go_back().or_else(|_| go_back()).or_else(|_| go_back()) {
            // A rollback in the wrong namespace would delete links of other owners.
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

/// Opens a network namespace. Fails with [`Cause::NoNetns`] if `path` does not exist or is not a
/// network namespace, and with the errno after any other failure.
fn open(path: &Path) -> Result<Netns, Cause> {
    // Check the type of the file system first, as Go's plugins do, so that the errors are the same.
    let magic = match statfs(path) {
        Ok(file_system) => file_system.filesystem_type(),
        // A path that is too long or a loop of symlinks can never be opened, so DEL would fail
        // forever if it did not take the namespace as deleted.
        Err(errno @ (Errno::ENOENT | Errno::ENOTDIR | Errno::ENAMETOOLONG | Errno::ELOOP)) => {
            let text = format!("failed to Statfs {}: {}", quoted(path), go_text(errno));
            return Err(Cause::NoNetns { text, source: Some(errno.into()) });
        }
        Err(errno) => return Err(errno.into()),
    };
    if magic != NSFS_MAGIC && magic != PROC_SUPER_MAGIC {
        return Err(not_a_netns(format!("unknown FS magic on {}: {:x}", quoted(path), magic.0)));
    }
    let file = File::open(path)?;
    match sys::namespace_type(&file) {
        Ok(libc::CLONE_NEWNET) => {}
        Ok(_) => return Err(not_a_netns("it is a namespace, but not a network namespace".into())),
        // A file of procfs that is not a namespace answers ENOTTY.
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) && magic != NSFS_MAGIC => {
            return Err(not_a_netns("it is not a namespace".into()));
        }
        // Before Linux 4.11 the type cannot be read. For a namespace of another type, `setns` fails
        // later.
        Err(_) => {}
    }
    let metadata = file.metadata()?;
    Ok(Netns { path: path.to_owned(), device: metadata.dev(), inode: metadata.ino(), file })
}

/// Returns the cause for a path that is not a network namespace.
fn not_a_netns(text: String) -> Cause {
    Cause::NoNetns { text, source: None }
}

/// Quotes a path like Go's `%q`, except for unusual characters.
fn quoted(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

/// Returns the text of an errno as Go writes it: the C library's, beginning in lower case.
fn go_text(errno: Errno) -> String {
    let text = errno.desc();
    let mut chars = text.chars();
    chars.next().map(|first| first.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, new_netns};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// Returns the message of the error for a path, and whether it is [`Error::is_no_netns`].
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
    fn a_plain_file_is_an_error_not_another_namespace() {
        let folder = tempfile::tempdir().unwrap();
        let plain = folder.path().join("plain");
        std::fs::write(&plain, "").unwrap();
        assert!(Netns::is_current(&plain).unwrap_err().is_no_netns());
        assert!(Netns::is_current(Path::new("/proc/self/status")).unwrap_err().is_no_netns());
        assert!(Netns::is_current(Path::new(OWN_NETNS)).unwrap());
    }

    #[test]
    fn run_enters_the_namespace_and_returns_to_the_callers() {
        in_new_netns(|| {
            let here = Netns::current().unwrap();
            let other = new_netns();
            assert!(!here.is_same(&other));
            let inside = other.run(|| Netns::current().unwrap()).unwrap();
            assert!(inside.is_same(&other));
            assert!(Netns::current().unwrap().is_same(&here));
            // The thread also returns after an error inside, and from a `run` within a `run`.
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
