//! Runs another program (an IPAM delegate, iptables) and waits until it has ended or been killed.
//!
//! The child is killed when the thread that started it ends, and so when this process dies
//! (`PR_SET_PDEATHSIG`); at its deadline; and on SIGTERM, unless the child undoes an interrupted
//! call ([`OnSigterm::Finish`]). When [`run`] returns, the child has been reaped, so it cannot act
//! after a rollback. No shell is involved.
//!
//! The wait ends with the child, not at the end of its output, because a grandchild may keep the
//! pipe open forever. The pipes are read meanwhile, because the child blocks once one is full.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{self, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use cni::machine::{Child, Exit, Machine as _, OnSigterm, Output, RunError};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags};

use crate::machine::{LinuxMachine, is_ready, wait_ready};
use crate::sys;

/// The largest standard output that is accepted.
const STDOUT_MAX: usize = 16 << 20;

/// How many bytes of standard error are returned. Further bytes are read and discarded.
const STDERR_MAX: usize = 1 << 20;

/// Runs `child` to its end and returns its exit status and output.
///
/// # Errors
/// In each case, a child that was started has been killed and reaped.
/// - [`RunError::Start`]: the program could not be started.
/// - [`RunError::Terminated`]: a termination signal (SIGTERM, SIGINT, SIGHUP) arrived, and
///   `child.on_sigterm` says that it ends the child.
/// - [`RunError::Timeout`]: the child's timeout passed.
/// - [`RunError::Io`]: the child's standard output is larger than [`STDOUT_MAX`], or the kernel
///   failed.
pub(crate) fn run(machine: &LinuxMachine, child: &Child<'_>) -> Result<Output, RunError> {
    if must_stop(machine, child) {
        return Err(RunError::Terminated);
    }
    let deadline = machine.now().checked_add(child.timeout);
    let mut running = Running::start(child).map_err(RunError::Start)?;
    // After an error, dropping `running` kills and reaps the child.
    running.communicate(machine, child, deadline)
}

/// Whether a termination signal has arrived and must end the child. Also empties the machine's
/// signal descriptor: a loop that polls the descriptor must call this after each poll.
fn must_stop(machine: &LinuxMachine, child: &Child<'_>) -> bool {
    machine.terminated() && child.on_sigterm == OnSigterm::Kill
}

/// A started child and its pipes. Dropping the value kills and reaps a child that has not ended.
struct Running {
    process: process::Child,
    /// The exit status, once the child has been reaped.
    exit: Option<ExitStatus>,
    /// Readable when the child has ended. `None` before Linux 5.3, where SIGCHLD ends the wait.
    pidfd: Option<OwnedFd>,
    /// Whether the pidfd has reported the child's end.
    has_ended: bool,
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
}

impl Running {
    /// Starts the program in its own process group. This process's ends of the three pipes are
    /// non-blocking.
    fn start(child: &Child<'_>) -> io::Result<Running> {
        let mut command = Command::new(&child.program);
        command.args(&child.args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(env) = &child.env {
            command.env_clear().envs(env.iter().map(|(key, value)| (key, value)));
        }
        // A terminal sends Ctrl-C to a whole process group. In its own group, the child does not
        // get the signal: this process decides whether to kill the child.
        command.process_group(0);
        sys::die_with_parent(&mut command);
        // Here and not when the process starts: a call that runs no program saves the system call.
        sys::default_sigchld()?;
        let mut process = command.spawn()?;
        let (stdin, stdout, stderr) = (process.stdin.take(), process.stdout.take(), process.stderr.take());
        let pidfd = sys::pidfd_open(process.id()).ok();
        // From here on, an error drops `running`, which kills the child.
        let running = Running { process, exit: None, pidfd, has_ended: false, stdin, stdout, stderr };
        let pipes = [
            running.stdin.as_ref().map(AsFd::as_fd),
            running.stdout.as_ref().map(AsFd::as_fd),
            running.stderr.as_ref().map(AsFd::as_fd),
        ];
        for pipe in pipes.into_iter().flatten() {
            // O_NONBLOCK is a flag of one end of a pipe: the child's end stays blocking.
            fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(running)
    }

    /// Writes the child's input and reads its output until the child has ended. Fails as [`run`]
    /// does; after a failure the child may still be running.
    fn communicate(
        &mut self,
        machine: &LinuxMachine,
        child: &Child<'_>,
        deadline: Option<Instant>,
    ) -> Result<Output, RunError> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let mut input = child.stdin;
        loop {
            if must_stop(machine, child) {
                return Err(RunError::Terminated);
            }
            self.reap().map_err(RunError::Io)?;
            // The pipes are read after `reap`, so the whole output of a child that has ended is
            // read. Later output of a grandchild is not awaited.
            feed(&mut self.stdin, &mut input).map_err(RunError::Io)?;
            drain(&mut self.stdout, &mut stdout, STDOUT_MAX).map_err(RunError::Io)?;
            // Standard error is only displayed, so a failure to read it is not an error of the run.
            if drain(&mut self.stderr, &mut stderr, STDERR_MAX).is_err() {
                self.stderr = None;
            }
            stderr.truncate(STDERR_MAX);
            if stdout.len() > STDOUT_MAX {
                return Err(RunError::Io(io::Error::other(format!(
                    "it wrote more than {STDOUT_MAX} bytes to standard output"
                ))));
            }
            if let Some(exit) = self.exit {
                return Ok(Output { status: to_exit(exit), stdout, stderr });
            }
            let time_left = deadline.map(|deadline| deadline.saturating_duration_since(machine.now()));
            if time_left == Some(Duration::ZERO) {
                return Err(RunError::Timeout(child.timeout));
            }
            self.wait_for_event(machine, time_left).map_err(RunError::Io)?;
        }
    }

    /// Reaps the child if it has ended, and stores its exit status in `exit`.
    fn reap(&mut self) -> io::Result<()> {
        if self.has_ended {
            // A debugger can delay the reaping of a child that has ended. In that case block: with
            // `try_wait` the caller's loop would spin, because the pidfd is readable.
            self.exit = Some(self.process.wait()?);
        } else if self.pidfd.is_none() {
            self.exit = self.process.try_wait()?;
        }
        Ok(())
    }

    /// Waits until a signal arrives, a pipe is ready, the child has ended, or `time_left` has
    /// passed. Stores in `has_ended` whether the pidfd reports the child's end.
    fn wait_for_event(&mut self, machine: &LinuxMachine, time_left: Option<Duration>) -> io::Result<()> {
        let readable = [
            self.pidfd.as_ref().map(AsFd::as_fd),
            Some(machine.as_fd()),
            self.stdout.as_ref().map(AsFd::as_fd),
            self.stderr.as_ref().map(AsFd::as_fd),
        ];
        let readable = readable.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let writable = self.stdin.as_ref().map(|stdin| PollFd::new(stdin.as_fd(), PollFlags::POLLOUT));
        let mut fds: Vec<PollFd<'_>> = readable.chain(writable).collect();
        wait_ready(&mut fds, time_left)?;
        // The pidfd, if there is one, is the first descriptor.
        self.has_ended = self.pidfd.is_some() && is_ready(&fds[0]);
        Ok(())
    }
}

impl Drop for Running {
    /// Kills and reaps the child unless it has been reaped.
    fn drop(&mut self) {
        if self.exit.is_none() {
            // The process ID is still valid: only this process reaps the child.
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

/// Writes as much of `input` as the pipe takes at once, and removes it from `input`. Closes the
/// pipe (sets it to `None`) after the last byte, or when the child has closed its end.
///
/// Fails on any other error of the pipe, because the child would take partial input for the whole.
fn feed(pipe: &mut Option<ChildStdin>, input: &mut &[u8]) -> io::Result<()> {
    while let Some(stdin) = pipe {
        if input.is_empty() {
            *pipe = None;
            break;
        }
        match stdin.write(input) {
            Ok(written) => *input = &input[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            // The child has closed its standard input, which is not an error.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => *pipe = None,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Appends to `output` what can be read without waiting. Returns early once `output` has more than
/// `max` bytes: the caller reports the excess as an error, or discards the excess and calls again.
/// At the end of the output, closes the pipe (sets it to `None`).
fn drain(pipe: &mut Option<impl Read>, output: &mut Vec<u8>, max: usize) -> io::Result<()> {
    let mut buffer = [0; 16 << 10];
    while let Some(open) = pipe {
        match open.read(&mut buffer) {
            Ok(0) => *pipe = None,
            Ok(count) => output.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
        if output.len() > max {
            return Ok(());
        }
    }
    Ok(())
}

/// Returns the exit status, or the signal that ended the program.
fn to_exit(exit: ExitStatus) -> Exit {
    match exit.code() {
        Some(code) => Exit::Status(code),
        // Never 0: a child without an exit code was ended by a signal.
        None => Exit::Signal(exit.signal().unwrap_or(0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::pthread::{Pthread, pthread_kill, pthread_self};
    use nix::sys::signal::Signal;
    use std::sync::mpsc::channel;
    use std::thread;

    const LONG: Duration = Duration::from_secs(30);

    /// Runs a shell script, on a thread of its own because the signal mask is changed.
    fn shell(script: &str, stdin: &[u8], timeout: Duration) -> Result<Output, RunError> {
        thread::scope(|scope| scope.spawn(|| shell_here(script, stdin, timeout)).join().unwrap())
    }

    fn shell_here(script: &str, stdin: &[u8], timeout: Duration) -> Result<Output, RunError> {
        let args = vec!["-c".into(), script.into()];
        let child = Child { program: "/bin/sh".into(), args, env: None, stdin, timeout, on_sigterm: OnSigterm::Kill };
        LinuxMachine::install().unwrap().run(&child)
    }

    fn is_gone(pid: &str) -> bool {
        !std::path::Path::new(&format!("/proc/{}", pid.trim())).exists()
    }

    #[test]
    fn output_and_exit_status_are_returned() {
        let output = shell("cat; echo oops >&2; exit 3", b"hello", LONG).unwrap();
        assert_eq!((output.status, output.stdout, output.stderr), (Exit::Status(3), b"hello".into(), b"oops\n".into()));
        assert_eq!(shell("kill -SEGV $$", b"", LONG).unwrap().status, Exit::Signal(11));
    }

    #[test]
    fn large_input_and_output_do_not_block() {
        let input = vec![b'x'; 3 << 20];
        let output = shell("cat; head -c 3000000 /dev/zero >&2", &input, LONG).unwrap();
        assert_eq!(output.stdout.len(), input.len());
        assert_eq!(output.stderr.len(), STDERR_MAX);
        assert_eq!(shell("exit 0", &input, LONG).unwrap().status, Exit::Status(0));
    }

    #[test]
    fn endless_output_is_ended() {
        let error = shell("exec cat /dev/zero", b"", LONG).unwrap_err();
        assert!(matches!(&error, RunError::Io(error) if error.to_string().contains("more than")), "{error}");
    }

    #[test]
    fn endless_standard_error_does_not_delay_the_deadline() {
        let timeout = Duration::from_millis(200);
        let args = vec!["-c".into(), "exec sleep 1000".into()];
        let child =
            Child { program: "/bin/sh".into(), args, env: None, stdin: b"", timeout, on_sigterm: OnSigterm::Kill };
        let error = thread::scope(|scope| {
            let run = scope.spawn(|| {
                let machine = LinuxMachine::install().unwrap();
                let mut running = Running::start(&child).unwrap();
                // Unlike a pipe, this file always has something to read.
                running.stderr = Some(OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()).into());
                running.communicate(&machine, &child, Instant::now().checked_add(timeout)).unwrap_err()
            });
            run.join().unwrap()
        });
        assert!(matches!(error, RunError::Timeout(_)), "{error}");
    }

    #[test]
    fn a_program_that_cannot_be_started_is_an_error() {
        for program in ["/nonexistent/program", "/etc/passwd"] {
            let child = Child {
                program: program.into(),
                args: vec![],
                env: None,
                stdin: b"",
                timeout: LONG,
                on_sigterm: OnSigterm::Kill,
            };
            let error = thread::scope(|scope| {
                scope.spawn(|| LinuxMachine::install().unwrap().run(&child)).join().unwrap().unwrap_err()
            });
            assert!(matches!(error, RunError::Start(_)), "{error}");
        }
    }

    #[test]
    fn the_environment_is_inherited_or_complete() {
        let run = |env| {
            thread::scope(|scope| {
                let child = Child {
                    program: "/usr/bin/env".into(),
                    args: vec![],
                    env,
                    stdin: b"",
                    timeout: LONG,
                    on_sigterm: OnSigterm::Kill,
                };
                scope.spawn(move || LinuxMachine::install().unwrap().run(&child)).join().unwrap().unwrap().stdout
            })
        };
        assert_eq!(run(Some(vec![("A".into(), "1".into()), ("B".into(), "".into())])), b"A=1\nB=\n");
        assert!(String::from_utf8(run(None)).unwrap().contains("PATH="));
    }

    #[test]
    fn a_child_that_never_ends_is_killed_at_its_deadline() {
        for script in ["echo $$; exec sleep 1000", "echo $$; exec sleep 1000 >&- 2>&- <&-"] {
            let begin = Instant::now();
            let pid = thread::scope(|scope| {
                let run = scope.spawn(|| {
                    let machine = LinuxMachine::install().unwrap();
                    let args = vec!["-c".into(), script.into()];
                    let timeout = Duration::from_millis(200);
                    let child = Child {
                        program: "/bin/sh".into(),
                        args,
                        env: None,
                        stdin: b"",
                        timeout,
                        on_sigterm: OnSigterm::Kill,
                    };
                    let mut running = Running::start(&child).unwrap();
                    let pid = running.process.id().to_string();
                    let deadline = Instant::now().checked_add(timeout);
                    let error = running.communicate(&machine, &child, deadline).unwrap_err();
                    assert!(matches!(error, RunError::Timeout(limit) if limit == timeout), "{error}");
                    drop(running);
                    pid
                });
                run.join().unwrap()
            });
            assert!(begin.elapsed() >= Duration::from_millis(200) && begin.elapsed() < LONG / 2);
            assert!(is_gone(&pid));
        }
    }

    #[test]
    fn a_grandchild_that_keeps_the_pipe_does_not_block() {
        let begin = Instant::now();
        let output = shell("sleep 20 & echo $!; exit 0", b"", LONG).unwrap();
        assert_eq!(output.status, Exit::Status(0));
        assert!(begin.elapsed() < LONG / 2);
        let pid: i32 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    }

    #[test]
    fn sigterm_kills_and_reaps_the_child() {
        let (told, waiting) = channel::<Pthread>();
        let begin = Instant::now();
        thread::scope(|scope| {
            let run = scope.spawn(move || {
                let machine = LinuxMachine::install().unwrap();
                told.send(pthread_self()).unwrap();
                let args = vec!["1000".into()];
                let child = Child {
                    program: "/bin/sleep".into(),
                    args,
                    env: None,
                    stdin: b"",
                    timeout: LONG,
                    on_sigterm: OnSigterm::Kill,
                };
                let first = machine.run(&child).unwrap_err();
                // From now on only programs that undo a call are started.
                let second = machine.run(&child).unwrap_err();
                let cleaning = Child { program: "/bin/true".into(), on_sigterm: OnSigterm::Finish, ..child };
                (first, second, machine.run(&cleaning).unwrap().status)
            });
            pthread_kill(waiting.recv().unwrap(), Signal::SIGTERM).unwrap();
            let (first, second, cleaning) = run.join().unwrap();
            assert!(matches!((first, second), (RunError::Terminated, RunError::Terminated)));
            assert_eq!(cleaning, Exit::Status(0));
        });
        assert!(begin.elapsed() < LONG / 2);
    }

    #[test]
    fn the_child_starts_with_default_signals_and_no_descriptors() {
        // Descriptors that this process inherited from cargo or a shell are not closed.
        let inherited = Command::new("/bin/sh").args(["-c", "ls /proc/self/fd | wc -l"]).output().unwrap().stdout;
        let output = shell("cat /proc/self/status; ls /proc/self/fd | wc -l", b"", LONG).unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let mask = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        assert_eq!(u64::from_str_radix(&mask("SigBlk:"), 16).unwrap(), 0);
        let ignored = u64::from_str_radix(&mask("SigIgn:"), 16).unwrap();
        assert_eq!(ignored & (1 << (Signal::SIGPIPE as i32 - 1)), 0, "SigIgn: {ignored:x}");
        assert_eq!(text.lines().last().unwrap().trim(), String::from_utf8(inherited).unwrap().trim());
    }

    #[test]
    fn signals_of_a_terminal_do_not_reach_the_child() {
        let output = shell("read pid name state parent group rest < /proc/$$/stat; echo $(($$ - group))", b"", LONG);
        assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), "0\n", "it leads a group of its own");
    }

    #[test]
    fn the_child_dies_with_the_thread_that_started_it() {
        let pid = thread::spawn(|| {
            let args = vec!["1000".into()];
            let child = Child {
                program: "/bin/sleep".into(),
                args,
                env: None,
                stdin: b"",
                timeout: LONG,
                on_sigterm: OnSigterm::Kill,
            };
            let running = Running::start(&child).unwrap();
            let process = running.process.id();
            // Without the value's drop, only the end of this thread can kill the child.
            std::mem::forget(running);
            process
        })
        .join()
        .unwrap();
        let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
        let end = nix::sys::wait::waitpid(pid, None).unwrap();
        assert_eq!(end, nix::sys::wait::WaitStatus::Signaled(pid, Signal::SIGKILL, false));
    }
}
