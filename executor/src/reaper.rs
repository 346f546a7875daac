//! Reaps orphans if the executor is PID 1 of its container. The kernel makes PID 1 the parent of every process whose
//! own parent has ended. Such a process stays in the process table until its parent has waited for it. So scripts that
//! leave processes behind could fill the table.
//!
//! tokio waits for the executor's own children. So all of them are started here, and the reaper skips them.

use std::fs;
use std::io;
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::Signals;
use tokio::process::{Child, Command};
use tracing::warn;

/// The identity of a process. Process ids are reused, so the start time belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessIdentity {
    pid: i32,
    /// In ticks since the machine's start.
    start: u64,
}

/// The children that tokio waits for. A run has few, so they stay on the list.
static OWN_CHILDREN: Mutex<Vec<ProcessIdentity>> = Mutex::new(Vec::new());

fn own_children() -> MutexGuard<'static, Vec<ProcessIdentity>> {
    OWN_CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a child of the executor.
pub(crate) fn spawn(command: &mut Command) -> io::Result<Child> {
    // The lock is held until the child is on the list, because the child may end at once.
    let mut children = own_children();
    let child = command.spawn()?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    children.extend(pid.and_then(Stat::of).map(|stat| stat.identity));
    Ok(child)
}

/// Starts to reap all orphans, if the executor is the first process of its container.
pub(crate) fn start_as_init() {
    if process::id() != 1 {
        return;
    }
    if let Err(error) = start() {
        warn!(%error, "processes that scripts leave behind stay in the process table");
    }
}

fn start() -> io::Result<()> {
    let mut signals = Signals::new([SIGCHLD])?;
    // Some may have ended before this thread started.
    reap();
    let reaper = move || {
        for _ in signals.forever() {
            reap();
        }
    };
    thread::Builder::new()
        .name("reaper".to_owned())
        .spawn(reaper)
        .map(drop)
}

/// Reaps every child that has ended and that tokio does not wait for.
fn reap() {
    let children = own_children();
    let own = i32::try_from(process::id()).ok();
    let Ok(processes) = fs::read_dir("/proc") else {
        return;
    };
    let ended = processes
        .filter_map(|entry| Stat::of(entry.ok()?.file_name().to_str()?.parse().ok()?))
        .filter(|stat| {
            stat.has_ended && Some(stat.parent) == own && !children.contains(&stat.identity)
        });
    for stat in ended {
        // No other code uses the exit status, and a missing one does no harm.
        let _ = waitpid(Pid::from_raw(stat.identity.pid), Some(WaitPidFlag::WNOHANG));
    }
}

/// The kernel's data about a process.
#[derive(Clone, Copy, Debug)]
struct Stat {
    identity: ProcessIdentity,
    parent: i32,
    /// It has ended, but its parent has not waited for it yet.
    has_ended: bool,
}

impl Stat {
    fn of(pid: i32) -> Option<Self> {
        Self::parse(pid, &fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// See `proc_pid_stat(5)`. The second field is the program's name in brackets, and may hold anything.
    fn parse(pid: i32, text: &[u8]) -> Option<Self> {
        let end = text.iter().rposition(|byte| *byte == b')')?;
        let text = str::from_utf8(&text[end + 1..]).ok()?;
        let mut fields = text.split_ascii_whitespace();
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        let start = fields.nth(17)?.parse().ok()?;
        Some(Self {
            identity: ProcessIdentity { pid, start },
            parent,
            has_ended: state == "Z",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::time::{Duration, Instant};

    use nix::sys::prctl;

    use super::*;

    const PART: &str = "REAPER_PART";
    const TIMEOUT: Duration = Duration::from_mins(1);

    fn bash(script: &str) -> Command {
        let mut command = Command::new("bash");
        command.args(["-c", script]);
        command
    }

    fn dead_children() -> Vec<i32> {
        let own = i32::try_from(process::id()).unwrap();
        fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| Stat::of(entry.ok()?.file_name().to_str()?.parse().ok()?))
            .filter(|stat| stat.has_ended && stat.parent == own)
            .map(|stat| stat.identity.pid)
            .collect()
    }

    /// Makes this process inherit orphans as PID 1 does.
    #[tokio::main(flavor = "multi_thread", worker_threads = 2)]
    async fn reap_orphans() {
        prctl::set_child_subreaper(true).unwrap();
        start().unwrap();
        for code in 0..40 {
            // The inner shell ends before its child. The child is inherited and ends at once.
            let script = format!("(true & true &) ; (true &) ; exit {code}");
            let status = spawn(&mut bash(&script)).unwrap().wait().await.unwrap();
            assert_eq!(
                status.code(),
                Some(code),
                "the reaper waited for a child of tokio"
            );
        }
        let until = Instant::now() + TIMEOUT;
        while !dead_children().is_empty() {
            assert!(Instant::now() < until, "left: {:?}", dead_children());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// This test needs a process of its own. The other tests have children that the reaper does not know.
    #[test]
    fn orphans_are_reaped_and_own_children_are_left_to_tokio() {
        if env::var(PART).is_ok() {
            return reap_orphans();
        }
        let name = "reaper::tests::orphans_are_reaped_and_own_children_are_left_to_tokio";
        let done = process::Command::new(env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture"])
            .env(PART, "inherit")
            .output()
            .unwrap();
        assert!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&done.stderr)
        );
    }

    #[test]
    fn a_program_name_may_contain_brackets() {
        let text =
            b"7 (a) Z 1 (b) Z 4 7 7 0 -1 4 1 0 0 0 0 0 0 0 20 0 1 0 987 0 0 18446744073709551615";
        let stat = Stat::parse(7, text).unwrap();
        assert_eq!(
            (stat.parent, stat.identity.start, stat.has_ended),
            (4, 987, true)
        );
        assert!(Stat::parse(7, b"7 (a").is_none());
    }
}
