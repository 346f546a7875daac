//! Which processes an executor has started: its tool runs in a group of its own, which killing the executor's
//! group would leave to go on changing things unwatched. Those of an executor that is gone have no parent any more to
//! be found by; they carry the mark of their run.

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
use tracing::warn;

/// How often is looked for what a run has left, and how long after each look: what is killed while it starts another is
/// not seen with it, and the kernel takes its time.
const LOOKS: usize = 100;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

/// Kills the group of `leader` and the groups of everything it has started, directly or through others. Where
/// there is no `/proc` to tell what that is, the group of `leader` alone.
pub(crate) fn kill(leader: Pid) -> nix::Result<()> {
    let groups = groups_below(&processes(Path::new("/proc")), leader.as_raw());
    let killed = killpg(leader, Signal::SIGKILL);
    for group in groups {
        // One that has ended in between needs no killing.
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    killed
}

/// Kills what is left of a run whose executor is gone, wherever it has gone itself, and returns when there is nothing any
/// more. `work_dir` is that of the run.
pub(crate) async fn kill_leftovers(work_dir: &Path) {
    let mut mark = OsString::from(env::RUN_MARK);
    mark.push("=");
    mark.push(work_dir);
    let killed = tokio::task::spawn_blocking(move || {
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
        killed.len()
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    id: i32,
    parent: i32,
    group: i32,
}

fn processes(proc: &Path) -> Vec<Process> {
    fs::read_dir(proc)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| parse(&fs::read_to_string(entry.path().join("stat")).ok()?))
        .collect()
}

/// `pid (name) state ppid pgrp …`, where the name may hold anything, parentheses and blanks included.
fn parse(stat: &str) -> Option<Process> {
    let (id, rest) = stat.split_once(" (")?;
    let mut fields = rest.rsplit_once(") ")?.1.split(' ').skip(1);
    Some(Process {
        id: id.parse().ok()?,
        parent: fields.next()?.parse().ok()?,
        group: fields.next()?.parse().ok()?,
    })
}

/// Groups of the descendants of `leader`, other than its own.
fn groups_below(all: &[Process], leader: i32) -> BTreeSet<i32> {
    let mut family = BTreeSet::from([leader]);
    let mut groups = BTreeSet::new();
    // Parents are not listed before their children, so look until no new process is found.
    loop {
        let known = family.len();
        for process in all {
            if family.contains(&process.parent) && family.insert(process.id) {
                groups.insert(process.group);
            }
        }
        if family.len() == known {
            groups.remove(&leader);
            return groups;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_confuse_the_reader() {
        let expected = Process {
            id: 12,
            parent: 3,
            group: 4,
        };
        assert_eq!(parse("12 (a b) c) S 3 4 5 0 -1"), Some(expected));
        assert_eq!(parse("12 (a"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn indirect_descendants_are_found_and_unrelated_processes_are_not() {
        let process = |id, parent, group| Process { id, parent, group };
        let all = [
            process(40, 30, 40),
            process(30, 20, 30),
            process(20, 10, 10),
            process(10, 1, 10),
            process(50, 1, 50),
        ];
        assert_eq!(groups_below(&all, 10), BTreeSet::from([30, 40]));
    }
}
