//! Runs a plugin under `ptrace(2)`, to kill it or to make a call fail at its Nth system call.
//!
//! `strace` could do that too, but takes longer than the plugin itself, and cannot select one of
//! the programs: the plugin, its delegate, the iptables that it runs, or a child between fork and
//! exec.
//!
//! A shell is started first, which reads one line and then becomes the plugin, so that no call of
//! the plugin is missed. A call is stopped before the kernel executes it: a program that is killed
//! at call N has made N - 1 calls.
//!
//! A tracer is a *thread* and waits for its own tracees only. It must not be the first thread of
//! the process, which inherits the children of other tests.

mod registers;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::panic::resume_unwind;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::{Invocation, Outcome};

pub use registers::supported;

/// What is done at a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// The process gets this signal before the kernel executes the call.
    Signal(Signal),
    /// The call is not executed and returns this error. Calls that cannot fail with it, and calls
    /// for memory, are not counted.
    Fail(Errno),
}

/// At which call of which program something is done, and what.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The file name of the program; `NAME+fork` is a child of NAME that has not become another
    /// program yet.
    pub victim: String,
    /// The number of the call, from 1 on, counted over all processes and threads of that program.
    pub at: u64,
    /// What is done.
    pub act: Act,
}

/// The outcome of a traced run, after its last process has ended.
#[derive(Debug)]
pub struct Traced {
    /// The outcome of the plugin.
    pub outcome: Outcome,
    /// How many calls the victim made, including the one at which something was done.
    pub calls: u64,
    /// Those calls, in order.
    pub all: Vec<Hit>,
    /// The call at which something was done, or `None` if the victim made fewer calls.
    pub hit: Option<Hit>,
    /// The programs that ran, as a [`Plan`] names them.
    pub programs: BTreeSet<String>,
    /// How long the last process ran after the plugin had ended.
    pub outlived: Duration,
}

/// A call of the victim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hit {
    /// The name of the call, or its number if the name is unknown.
    pub call: String,
    /// Whether the program had not begun to read its standard input yet.
    pub starting: bool,
    /// Whether the kernel may interrupt the call while it waits, so that the program must repeat it
    /// after EINTR.
    pub waits: bool,
}

impl Invocation<'_> {
    /// Runs the plugin, and all programs that it starts, to their end, and does what `plan` says.
    ///
    /// # Panics
    /// As [`Invocation::run`], and if this machine cannot trace ([`supported`]).
    #[track_caller]
    pub fn traced(self, plan: &Plan) -> Traced {
        self.watched(plan, |_| {})
    }

    /// Does the same as [`Invocation::traced`], and calls `look` before each system call of the
    /// victim. The victim is stopped at that moment, so `look` sees what a kill at this call would
    /// leave.
    ///
    /// # Panics
    /// As [`Invocation::traced`].
    #[track_caller]
    pub fn watched(self, plan: &Plan, mut look: impl FnMut(&Hit) + Send) -> Traced {
        thread::scope(|scope| match scope.spawn(|| trace(self, plan, &mut look)).join() {
            Ok(traced) => traced,
            Err(panic) => resume_unwind(panic),
        })
    }
}

/// Runs and traces the plugin on the calling thread.
fn trace(call: Invocation<'_>, plan: &Plan, look: &mut dyn FnMut(&Hit)) -> Traced {
    let mut started = call.held();
    let main = Pid::from_raw(i32::try_from(started.pid()).expect("a pid"));
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_EXITKILL;
    ptrace::seize(main, options).expect("to trace our own child");
    started.let_go();
    let (is_late, alive) = (AtomicBool::new(false), Mutex::new(BTreeSet::from([main])));
    let (threads, programs, seen) = (HashMap::new(), BTreeMap::new(), Seen::default());
    let mut tracer = Tracer { plan, look, main, threads, programs, alive: &alive, seen };
    thread::scope(|scope| {
        let (done, waiting) = mpsc::channel::<()>();
        let (is_late, alive, timeout) =
            (&is_late, &alive, crate::patience(started.timeout()).min(Duration::from_secs(300)));
        scope.spawn(move || {
            let mut wait_time = timeout;
            while waiting.recv_timeout(wait_time) == Err(mpsc::RecvTimeoutError::Timeout) {
                is_late.store(true, Ordering::SeqCst);
                // Each process, because a child may still run in its own process group after the
                // plugin has ended. Repeated, because one that has just been forked is not in the
                // list yet.
                for process in alive.lock().unwrap().iter() {
                    let _ = kill(*process, Signal::SIGKILL);
                }
                wait_time = Duration::from_millis(50);
            }
        });
        tracer.run();
        drop(done);
    });
    let seen = tracer.seen;
    let (status, ended) = seen.ended.expect("the first program ends");
    let outcome = started.outcome(status);
    assert!(!is_late.load(Ordering::SeqCst), "still running at its deadline, {:?}\n{}", seen.hit, outcome.report());
    let Seen { calls, all, hit, programs, .. } = seen;
    Traced { outcome: outcome.validated(), calls, all, hit, programs, outlived: ended.elapsed() }
}

/// The state of the tracing thread.
struct Tracer<'p> {
    plan: &'p Plan,
    look: &'p mut dyn FnMut(&Hit),
    /// The plugin's process.
    main: Pid,
    /// Each thread's process.
    threads: HashMap<Pid, Pid>,
    /// Each process's program, by file name.
    programs: BTreeMap<Pid, String>,
    /// The processes that have not been waited for. Their IDs cannot belong to other processes,
    /// apart from the moment between the wait and the removal here.
    alive: &'p Mutex<BTreeSet<Pid>>,
    seen: Seen,
}

/// What the tracer has seen so far.
#[derive(Default)]
struct Seen {
    /// How many calls the victim has made.
    calls: u64,
    all: Vec<Hit>,
    programs: BTreeSet<String>,
    /// Whether the victim has begun to read its standard input.
    has_read: bool,
    hit: Option<Hit>,
    /// The thread whose call is to fail, from its entry to its exit.
    failing: Option<(Pid, Errno)>,
    /// The plugin's exit status, and the time of its end.
    ended: Option<(ExitStatus, Instant)>,
}

impl Tracer<'_> {
    /// Handles the events of all tracees until the last one has ended.
    fn run(&mut self) {
        let flags = WaitPidFlag::__WALL | WaitPidFlag::from_bits_retain(libc::__WNOTHREAD);
        loop {
            match waitpid(None, Some(flags)) {
                Ok(status) => self.handle(status),
                Err(Errno::EINTR) => {}
                Err(Errno::ECHILD) => return,
                Err(error) => panic!("to wait for tracees: {error}"),
            }
        }
    }

    /// Handles one event and resumes the thread that it is about.
    fn handle(&mut self, status: WaitStatus) {
        match status {
            WaitStatus::Exited(thread, code) => self.thread_ended(thread, ExitStatus::from_raw(code << 8)),
            WaitStatus::Signaled(thread, signal, _) => self.thread_ended(thread, ExitStatus::from_raw(signal as i32)),
            WaitStatus::PtraceEvent(thread, _, libc::PTRACE_EVENT_EXEC) => {
                let process = self.process(thread);
                let name = fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
                let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if process == self.main {
                    // Before, it was the shell that becomes the plugin.
                    self.seen.programs.clear();
                }
                self.seen.programs.insert(name.clone());
                self.programs.insert(process, name);
                self.resume(thread, None);
            }
            WaitStatus::PtraceEvent(thread, ..) => self.resume(thread, None),
            WaitStatus::PtraceSyscall(thread) => self.handle_call(thread),
            WaitStatus::Stopped(thread, signal) => self.resume(thread, Some(signal)),
            _ => {}
        }
    }

    /// Removes an ended thread from the lists.
    fn thread_ended(&mut self, thread: Pid, status: ExitStatus) {
        if thread == self.main {
            self.seen.ended = Some((status, Instant::now()));
        }
        self.threads.remove(&thread);
        self.alive.lock().unwrap().remove(&thread);
    }

    /// The thread's process. One never seen before gets a name: it is a fork.
    fn process(&mut self, thread: Pid) -> Pid {
        if let Some(process) = self.threads.get(&thread) {
            return *process;
        }
        let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
        let number = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            Pid::from_raw(line.and_then(|line| line.trim().parse().ok()).unwrap_or(thread.as_raw()))
        };
        let process = number("Tgid:");
        self.threads.insert(thread, process);
        self.alive.lock().unwrap().insert(process);
        if process == thread && !self.programs.contains_key(&process) {
            // The first process is the shell that becomes the plugin.
            if let Some(parent) = self.programs.get(&number("PPid:")) {
                self.seen.programs.insert(format!("{parent}+fork"));
            }
            let parent = self.programs.get(&number("PPid:")).cloned().unwrap_or_default();
            self.programs.insert(process, format!("{parent}+fork"));
        }
        process
    }

    /// Whether the thread belongs to the program that the plan is about.
    fn is_victim(&mut self, thread: Pid) -> bool {
        let process = self.process(thread);
        self.programs.get(&process).is_some_and(|name| *name == self.plan.victim)
    }

    /// Resumes a thread: the victim until its next system call, others until their next event.
    fn resume(&mut self, thread: Pid, signal: Option<Signal>) {
        let resumed =
            if self.is_victim(thread) { ptrace::syscall(thread, signal) } else { ptrace::cont(thread, signal) };
        match resumed {
            // ESRCH: it was killed while it was stopped.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => panic!("to resume thread {thread}: {error}"),
        }
    }

    /// Handles a stop before or after a system call.
    fn handle_call(&mut self, thread: Pid) {
        match registers::stop(thread) {
            Some(registers::Stop::Entry) if self.is_victim(thread) && self.handle_victims_call(thread) => return,
            Some(registers::Stop::Exit) => {
                if let Some((failing, errno)) = self.seen.failing
                    && failing == thread
                {
                    registers::answer(thread, errno);
                    self.seen.failing = None;
                }
            }
            _ => {}
        }
        self.resume(thread, None);
    }

    /// Counts a call of the victim before the kernel executes it, and does what the plan says if it
    /// is the call of the plan. Returns whether the process was killed, so that it must not be
    /// resumed.
    fn handle_victims_call(&mut self, thread: Pid) -> bool {
        let Some(number) = registers::number(thread) else { return false };
        if let Act::Fail(errno) = self.plan.act
            && registers::cannot_fail(thread, number, errno)
        {
            return false;
        }
        self.seen.calls += 1;
        let starting = !self.seen.has_read;
        self.seen.has_read |= registers::reads_stdin(thread, number);
        let hit = Hit { call: registers::name(number), starting, waits: registers::waits(number) };
        (self.look)(&hit);
        self.seen.all.push(hit.clone());
        if self.seen.calls != self.plan.at {
            return false;
        }
        self.seen.hit = Some(hit);
        match self.plan.act {
            Act::Signal(signal) => {
                let process = self.process(thread);
                kill(process, signal).expect("to signal a tracee");
                signal == Signal::SIGKILL
            }
            Act::Fail(errno) => {
                registers::skip_call(thread);
                self.seen.failing = Some((thread, errno));
                false
            }
        }
    }
}

/// The shell that is started before a traced plugin: it reads one line and becomes the plugin.
pub(crate) const HOLDER: (&str, &str) = ("/bin/sh", "read -r go && exec \"$0\" \"$@\"");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Node;

    fn plan(victim: &str, at: u64, act: Act) -> Plan {
        Plan { victim: victim.into(), at, act }
    }

    fn cat(node: &Node) -> Invocation<'_> {
        Invocation::new(node, "/bin/cat").stdin("hello")
    }

    #[test]
    fn a_program_that_is_not_hit_runs_unchanged() {
        if let Err(reason) = supported() {
            crate::skip!("{reason}");
        }
        let node = Node::new();
        let traced = cat(&node).traced(&plan("cat", 100_000, Act::Signal(Signal::SIGKILL)));
        assert_eq!((traced.outcome.status, traced.outcome.stdout.as_str()), (Some(0), "hello"));
        assert!(traced.hit.is_none() && traced.calls > 5, "{traced:?}");
    }

    #[test]
    fn every_call_is_a_point_and_the_last_one_is_the_exit() {
        if let Err(reason) = supported() {
            crate::skip!("{reason}");
        }
        let node = Node::new();
        let all = cat(&node).traced(&plan("cat", u64::MAX, Act::Signal(Signal::SIGKILL))).calls;
        for (at, starting) in [(1, true), (all, false)] {
            let traced = cat(&node).traced(&plan("cat", at, Act::Signal(Signal::SIGKILL)));
            let hit = traced.hit.clone().unwrap();
            assert_eq!((traced.outcome.status, hit.starting), (None, starting), "{traced:?}");
            assert_eq!(traced.outcome.stdout.is_empty(), starting);
        }
    }

    #[test]
    fn a_call_can_be_made_to_fail() {
        if let Err(reason) = supported() {
            crate::skip!("{reason}");
        }
        let node = Node::new();
        let failing = (1..60).map(|at| cat(&node).traced(&plan("cat", at, Act::Fail(Errno::ENOSPC))));
        let told = failing.filter(|traced| traced.outcome.stderr.contains("No space left on device"));
        let calls: Vec<String> = told.filter_map(|traced| Some(traced.hit?.call)).collect();
        assert!(calls.iter().any(|call| call == "write"), "{calls:?}");
    }

    /// The signal does not hit the process that is gone, and no wait for the child is endless.
    #[test]
    fn an_orphan_in_its_own_group_ends_at_the_deadline() {
        if let Err(reason) = supported() {
            crate::skip!("{reason}");
        }
        let node = Node::new();
        let call = Invocation::new(&node, "/bin/sh").arg("-c").arg("setsid sleep 1000 &");
        let call = call.timeout(Duration::from_secs(1));
        let plan = plan("sleep", u64::MAX, Act::Signal(Signal::SIGKILL));
        let run = std::panic::AssertUnwindSafe(|| call.traced(&plan));
        let panic = std::panic::catch_unwind(run).expect_err("it is late");
        let text = panic.downcast_ref::<String>().expect("a text");
        assert!(text.starts_with("still running at its deadline"), "{text}");
    }

    #[test]
    fn children_and_forks_before_exec_count_as_programs() {
        if let Err(reason) = supported() {
            crate::skip!("{reason}");
        }
        let node = Node::new();
        let shell = || Invocation::new(&node, "/bin/sh").arg("-c").arg("/bin/cat; echo $?").stdin("hello");
        for (victim, said) in [("cat", "137\n"), ("dash+fork", "137\n")] {
            let traced = shell().traced(&plan(victim, 1, Act::Signal(Signal::SIGKILL)));
            if victim == "dash+fork" && traced.hit.is_none() {
                crate::skip!("/bin/sh is not dash here");
            }
            assert_eq!((traced.outcome.status, traced.outcome.stdout.as_str()), (Some(0), said), "{traced:?}");
            let programs = if victim == "cat" { &["cat", "dash", "dash+fork"][..] } else { &["dash", "dash+fork"] };
            assert!(traced.programs.iter().map(String::as_str).eq(programs.iter().copied()), "{traced:?}");
        }
    }
}
