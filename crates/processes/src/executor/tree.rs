//! Ends everything that an executor has started: its tool runs in a group of its own, which killing the executor's group
//! would leave to go on changing things unwatched. What an ended executor has left is a child of this process. If a former
//! launcher had started the executor, its leftovers are found by the mark of their run in their environment.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use job_contract::env;
use nix::sys::signal::{Signal, kill as signal, killpg};
use nix::unistd::Pid;
use runtime::{process_table, reaper};
use tracing::warn;

/// How often is looked for what a run has left, and how long after each look: what is killed while it starts another is
/// not seen with it, and the kernel takes its time.
const LOOKS: usize = 100;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

/// Kills the group of `leader` and the groups of everything it has started, directly or through others. Where
/// there is no `/proc` to tell what that is, the group of `leader` alone.
pub fn kill(leader: Pid) -> nix::Result<()> {
    let below = process_table::below(&process_table::all(), [leader.as_raw()]);
    let groups: BTreeSet<i32> = below.iter().map(|process| process.group).collect();
    let killed = killpg(leader, Signal::SIGKILL);
    for group in groups {
        // One that has ended in between needs no killing.
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    killed
}

/// Kills what is left of a run whose executor is gone, wherever it has gone itself, and returns when there is nothing any
/// more. `work_dir` is that of the run.
pub async fn kill_leftovers(work_dir: &Path) {
    let mut mark = OsString::from(env::RUN_MARK);
    mark.push("=");
    mark.push(work_dir);
    let killed = tokio::task::spawn_blocking(move || {
        let orphans = reaper::kill_orphans();
        let mut killed = BTreeSet::new();
        for _ in 0..LOOKS {
            let left = marked(Path::new("/proc"), &mark);
            if left.is_empty() {
                break;
            }
            for id in left {
                killed.insert(id);
                let id = Pid::from_raw(id);
                // With those of its group that threw the mark away, if it leads one; it may have ended by itself.
                let _ = killpg(id, Signal::SIGKILL);
                let _ = signal(id, Signal::SIGKILL);
            }
            thread::sleep(BETWEEN_LOOKS);
        }
        orphans + killed.len()
    });
    let killed = killed.await.unwrap_or_default();
    if killed > 0 {
        warn!(
            processes = killed,
            work_dir = %work_dir.display(),
            "killed processes that an executor left behind"
        );
    }
}

/// Ids of the processes with this variable, as far as this user may look.
fn marked(proc: &Path, mark: &OsStr) -> Vec<i32> {
    let own = std::process::id().cast_signed();
    fs::read_dir(proc)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let id: i32 = entry.file_name().to_str()?.parse().ok()?;
            let environment = fs::read(entry.path().join("environ")).ok()?;
            let has_mark = environment
                .split(|byte| *byte == 0)
                .any(|variable| variable == mark.as_bytes());
            (has_mark && id != own).then_some(id)
        })
        .collect()
}
