//! The children of this process, and what they leave behind. A process that adopts orphans is the parent of every process
//! that its descendants have started and whose own parent has ended, in whatever group or session it is. So nothing escapes
//! that a run has started, except a process that starts others faster than they are found. The kernel makes PID 1 of a
//! container such a parent in any case.
//!
//! An adopted process stays in the process table until its parent has waited for it. tokio waits for the children that this
//! program has started. So all of them are started here, and the reaper skips them.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::process;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::Signals;
use tokio::process::{Child, Command};
use tracing::warn;

use crate::handover::{self, Handover};
use crate::process_table::{self, ProcessEntry, ProcessIdentity};

/// How long killing may take. The kernel does not end a process that waits for a disk.
const KILL_LIMIT: Duration = Duration::from_secs(5);
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);
/// How many looks in a row have to find nothing. The kernel's list may lack a child while others end.
const QUIET_LOOKS: u32 = 3;
/// Looks at a child that has ended, and leaves it to who waits for it.
const PEEK: WaitPidFlag = WaitPidFlag::WEXITED
    .union(WaitPidFlag::WNOHANG)
    .union(WaitPidFlag::WNOWAIT);
/// In place of the start of a child that `/proc` hides.
const HIDDEN: u64 = 0;

/// The children that tokio waits for.
static OWN_CHILDREN: Mutex<Vec<ProcessIdentity>> = Mutex::new(Vec::new());
/// The children that this process had before it adopted orphans. A script that becomes this program by `exec` may have started
/// them, such as a proxy in the background. They belong to no run.
static EARLIER_CHILDREN: OnceLock<Vec<ProcessIdentity>> = OnceLock::new();

fn own_children() -> MutexGuard<'static, Vec<ProcessIdentity>> {
    crate::lock(&OWN_CHILDREN)
}

/// Starts a child of this program.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    spawn_with(command, None)
}

/// Starts a child, and hands secrets over to it.
pub fn spawn_with(command: &mut Command, secrets: Option<Handover>) -> io::Result<Child> {
    // The lock is kept until the child is on the list, because the child may end at once. No other child starts meanwhile,
    // which would inherit the secrets.
    let mut children = own_children();
    if let Some(secrets) = &secrets {
        command.env(handover::DESCRIPTOR, secrets.number());
        secrets.share()?;
    }
    let child = command.spawn()?;
    drop(secrets);
    children.retain(|known| exists(*known));
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    children.extend(pid.and_then(look_at).map(|entry| entry.identity));
    Ok(child)
}

/// Whether a process is a child that this program has started and still waits for, or descends from one. A process that was left
/// behind is not: its own parent has ended.
pub fn is_below_own_child(pid: i32) -> bool {
    /// Deeper than any tree of processes that is no loop of ids used again.
    const MAX_DEPTH: usize = 64;
    let own = i32::try_from(process::id()).ok();
    let mut entry = ProcessEntry::of(pid);
    for _ in 0..MAX_DEPTH {
        match entry {
            Some(found) if Some(found.parent) == own => return is_in(&own_children(), &found),
            Some(found) => entry = ProcessEntry::of(found.parent),
            None => return false,
        }
    }
    false
}

fn exists(process: ProcessIdentity) -> bool {
    look_at(process.pid).is_some_and(|entry| is_in(&[process], &entry))
}

/// Looks at a child of this process. If `/proc` has the option `hidepid`, it shows no process that is not dumpable.
fn look_at(pid: i32) -> Option<ProcessEntry> {
    ProcessEntry::of(pid).or_else(|| {
        let status = waitid(Id::Pid(Pid::from_raw(pid)), PEEK).ok()?;
        Some(ProcessEntry {
            identity: ProcessIdentity { pid, start: HIDDEN },
            parent: process::id().cast_signed(),
            group: pid,
            has_ended: status != WaitStatus::StillAlive,
        })
    })
}

/// Whether these processes contain the child. It may have become hidden since they were looked at.
fn is_in(known: &[ProcessIdentity], child: &ProcessEntry) -> bool {
    let ProcessIdentity { pid, start } = child.identity;
    known.iter().any(|known| {
        known.pid == pid && (known.start == start || [known.start, start].contains(&HIDDEN))
    })
}

/// Makes this process the parent of orphans among its descendants, and starts to reap them.
pub fn adopt_orphans() {
    let earlier = children().found;
    let _ = EARLIER_CHILDREN.set(earlier.iter().map(|child| child.identity).collect());
    let adopted = prctl::set_child_subreaper(true).map_err(io::Error::from);
    if let Err(error) = adopted.and_then(|()| reap_forever()) {
        warn!(%error, "processes that a run leaves behind may outlive it");
    }
}

fn reap_forever() -> io::Result<()> {
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
    // The usual case needs no list of all children.
    while let Ok(Some(pid)) = waitid(Id::All, PEEK).map(|status| status.pid()) {
        let Some(ended) = look_at(pid.as_raw()) else {
            // tokio has just waited for it.
            continue;
        };
        if !reap_orphan(&ended) {
            break;
        }
    }
    // The kernel shows only the first one. While that is tokio's, the others are on the list.
    for child in children().found {
        if child.has_ended {
            reap_orphan(&child);
        }
    }
}

/// Reaps a child that has ended. Returns `false` if tokio waits for it.
fn reap_orphan(child: &ProcessEntry) -> bool {
    let own = own_children();
    let is_orphan = !is_in(&own, child);
    if is_orphan {
        // No other code uses the exit status, and a missing one does no harm.
        let pid = Pid::from_raw(child.identity.pid);
        let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
    }
    is_orphan
}

/// One look at the children of this process.
struct Children {
    found: Vec<ProcessEntry>,
    /// Whether one of them has gone during the look.
    has_vanished: bool,
}

/// The children of this process, whichever of its threads has started or adopted them.
fn children() -> Children {
    let threads = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let lists: io::Result<String> = threads
        .map(|thread| fs::read_to_string(thread.path().join("children")))
        .collect();
    if let Ok(list) = lists {
        let ids = list.split_ascii_whitespace();
        let looked: Vec<_> = ids.map(|pid| pid.parse().ok().and_then(look_at)).collect();
        Children {
            has_vanished: looked.contains(&None),
            found: looked.into_iter().flatten().collect(),
        }
    } else {
        // A thread has just ended, or the kernel has no such lists.
        let own = process::id().cast_signed();
        let mut found = process_table::all();
        found.retain(|entry| entry.parent == own);
        Children {
            found,
            has_vanished: false,
        }
    }
}

/// Kills everything that this process has started, directly or through others. Returns how many processes are left: none, unless
/// the kernel does not end them in time, or they start others faster than they are found. It takes no lock and writes nothing.
pub fn kill_descendants() -> usize {
    kill_children(|_| true).1
}

/// Kills the orphans that this process has adopted, with everything below them, and returns how many there were. The
/// children that it has started itself, and what these have started, go on.
pub fn kill_orphans() -> usize {
    let (killed, left) = kill_orphans_and_count();
    if left > 0 {
        warn!(
            processes = left,
            "processes that a run has left could not be killed"
        );
    }
    killed
}

/// Does the same, and returns how many are left.
pub fn end_orphans() -> usize {
    kill_orphans_and_count().1
}

fn kill_orphans_and_count() -> (usize, usize) {
    kill_children(|child| !is_in(&own_children(), child))
}

/// Kills the selected children. Their own children are adopted as soon as they have ended, and are killed next. Returns how many
/// processes were killed, and how many are left.
///
/// A child that ended during a look may have started another one, which came too late for that look. So a look shows that
/// nothing is left only if each child had already ended before it.
fn kill_children(is_selected: impl Fn(&ProcessEntry) -> bool) -> (usize, usize) {
    let Some(earlier) = EARLIER_CHILDREN.get() else {
        return (0, 0);
    };
    let deadline = Instant::now() + KILL_LIMIT;
    let (mut killed, mut quiet_looks) = (0, 0);
    let mut dead: BTreeSet<ProcessIdentity> = BTreeSet::new();
    loop {
        let Children {
            mut found,
            has_vanished,
        } = children();
        found.retain(|child| !is_in(earlier, child) && is_selected(child));
        let alive = found.iter().filter(|child| !child.has_ended);
        let mut left = 0;
        for child in alive {
            // One that has ended in between needs no killing.
            let _ = kill(Pid::from_raw(child.identity.pid), Signal::SIGKILL);
            left += 1;
        }
        killed += left;
        let ended = found.iter().filter(|child| child.has_ended);
        let ended: BTreeSet<_> = ended.map(|child| child.identity).collect();
        let is_quiet = left == 0 && !has_vanished && ended.is_subset(&dead);
        dead = ended;
        quiet_looks = if is_quiet { quiet_looks + 1 } else { 0 };
        if quiet_looks == QUIET_LOOKS {
            return (killed, 0);
        }
        if Instant::now() >= deadline {
            return (killed, left.max(1));
        }
        // What starts others again and again is only found by looking at once.
        if is_quiet {
            thread::sleep(BETWEEN_LOOKS);
        } else {
            thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use nix::unistd::geteuid;
    use test_peers::wait::until_blocking;

    use super::*;
    use crate::test_process;

    fn bash(script: &str) -> Command {
        let mut command = Command::new("bash");
        command.args(["-c", script]);
        command
    }

    fn dead_children() -> usize {
        let found = children().found;
        found.iter().filter(|child| child.has_ended).count()
    }

    #[tokio::main(flavor = "multi_thread", worker_threads = 2)]
    async fn reap_orphans() {
        adopt_orphans();
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
        until_blocking("the dead children are reaped", || dead_children() == 0);
    }

    /// A process in a session of its own, without its parent, environment and folder, which ignores signals and has a child.
    const DAEMON: &str = "cd /; exec setsid --fork env -i /bin/bash -c \
        'trap \"\" TERM INT HUP; sleep 3600 & while :; do sleep 3600; done' </dev/null >/dev/null 2>&1";

    #[tokio::main(flavor = "multi_thread", worker_threads = 2)]
    async fn kill_what_is_left() {
        let mut earlier = spawn(bash("exec sleep 3600").kill_on_drop(true)).unwrap();
        until_blocking("an earlier child", || living() == 1);
        adopt_orphans();
        let mut own = spawn(bash("exec sleep 3600").kill_on_drop(true)).unwrap();
        let leave = async || {
            let left = spawn(&mut bash(DAEMON)).unwrap().wait().await.unwrap();
            assert!(left.success());
            // The daemon, and its two sleepers.
            until_blocking("the daemon", || living() == 5);
        };
        until_blocking("the child", || living() == 2);
        leave().await;
        assert!(kill_orphans() > 0);
        assert_eq!(living(), 2, "the children of this program go on");
        leave().await;
        leave_runaway().await;
        assert_eq!(kill_descendants(), 0);
        assert_eq!(living(), 1, "the earlier child goes on");
        earlier.kill().await.unwrap();
        assert!(!own.wait().await.unwrap().success());
    }

    /// A process that starts another one and ends, again and again.
    async fn leave_runaway() {
        let script = "run() { (run &) ; exit; }; cd /; exec setsid --fork bash -c \"$(declare -f run); run\"";
        let left = spawn(&mut bash(script)).unwrap().wait().await.unwrap();
        assert!(left.success());
        until_blocking("runaways", || living() > 5);
    }

    /// Polling cannot win against each of them. So what counts is that it does not believe to have won.
    #[tokio::main(flavor = "multi_thread", worker_threads = 2)]
    async fn kill_many_runaways() {
        // Nothing collects the dead meanwhile. So they are bounded, or no other process of this machine could start one.
        const SCRIPT: &str = "use POSIX; for (1..12) { next if fork; \
            for (1..1000) { POSIX::setsid(); exit if fork; } exit; }";
        adopt_orphans();
        // Whoever believes too early to have won is wrong in every third round.
        for _ in 0..10 {
            let mut command = Command::new("perl");
            command.args(["-e", SCRIPT]);
            // It has started all of them when it ends.
            assert!(spawn(&mut command).unwrap().wait().await.unwrap().success());
            until_blocking("no descendant is left", || kill_descendants() == 0);
            for _ in 0..50 {
                assert_eq!(living(), 0);
                thread::sleep(BETWEEN_LOOKS);
            }
            while waitpid(None, Some(WaitPidFlag::WNOHANG)).is_ok() {}
        }
    }

    /// Nobody may read the program, so its processes are not dumpable, as those of executors.
    #[tokio::main(flavor = "multi_thread", worker_threads = 2)]
    async fn kill_what_is_hidden() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::copy("/bin/sleep", &program).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o111)).unwrap();
        adopt_orphans();
        let mut own = spawn(Command::new(&program).arg("3600")).unwrap();
        let script = format!("{} 3600 & exit", program.display());
        assert!(
            spawn(&mut bash(&script))
                .unwrap()
                .wait()
                .await
                .unwrap()
                .success()
        );
        let hidden = || {
            let found = children().found.into_iter();
            found.filter(|child| ProcessEntry::of(child.identity.pid).is_none())
        };
        until_blocking("hidden processes", || hidden().count() == 2);
        let (killed, left) = kill_children(|child| !is_in(&own_children(), child));
        assert!(killed > 0 && left == 0, "{killed} {left}");
        assert_eq!(own.try_wait().unwrap(), None, "it goes on");
        assert_eq!(kill_descendants(), 0);
        assert!(!own.wait().await.unwrap().success());
    }

    fn living() -> usize {
        let all = process_table::all();
        let below = process_table::below(&all, [process::id().cast_signed()]);
        below.iter().filter(|entry| !entry.has_ended).count()
    }

    /// The other tests have children that the reaper does not know.
    fn alone(test: &str, part: fn()) {
        test_process::alone(&format!("reaper::tests::{test}"), part);
    }

    #[test]
    fn orphans_are_reaped_and_own_children_are_left_to_tokio() {
        let name = "orphans_are_reaped_and_own_children_are_left_to_tokio";
        alone(name, reap_orphans);
    }

    #[test]
    fn what_left_its_session_and_threw_its_mark_away_is_killed() {
        let name = "what_left_its_session_and_threw_its_mark_away_is_killed";
        alone(name, kill_what_is_left);
    }

    #[test]
    fn what_is_hidden_is_found() {
        // Others than root need a user namespace to mount something. `/proc` shows everything to the group of root.
        let (user, group): (&[&str], _) = if geteuid().is_root() {
            (&[], "--regid=65534 --clear-groups")
        } else {
            (&["--user", "--map-root-user"], "")
        };
        let hiding = format!(
            "mount -t proc -o hidepid=2 proc /proc \
             && exec setpriv {group} --bounding-set=-all --inh-caps=-all \"$0\" \"$@\""
        );
        let namespaces = [
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            &hiding,
        ];
        let starter = [&["unshare"], user, &namespaces].concat();
        let name = "reaper::tests::what_is_hidden_is_found";
        test_process::alone_behind(&starter, name, kill_what_is_hidden);
    }

    #[test]
    fn runaways_are_not_taken_for_gone() {
        alone("runaways_are_not_taken_for_gone", kill_many_runaways);
    }
}
