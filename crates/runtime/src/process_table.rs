//! The processes of this machine, as `/proc` lists them.

use std::collections::BTreeSet;
use std::fs;

/// The identity of a process. Process ids are reused, so the start time belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessIdentity {
    pub pid: i32,
    /// In ticks since the machine's start.
    pub start: u64,
}

/// The kernel's data about a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessEntry {
    pub identity: ProcessIdentity,
    pub parent: i32,
    pub group: i32,
    /// It has ended, but its parent has not waited for it yet.
    pub has_ended: bool,
}

impl ProcessEntry {
    /// The process with this id, if there is one.
    pub fn of(pid: i32) -> Option<Self> {
        Self::parse(pid, &fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// See `proc_pid_stat(5)`. The second field is the program's name in brackets, and may hold anything.
    fn parse(pid: i32, text: &[u8]) -> Option<Self> {
        let end = text.iter().rposition(|byte| *byte == b')')?;
        let text = str::from_utf8(&text[end + 1..]).ok()?;
        let mut fields = text.split_ascii_whitespace();
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let start = fields.nth(16)?.parse().ok()?;
        Some(Self {
            identity: ProcessIdentity { pid, start },
            parent,
            group,
            has_ended: state == "Z",
        })
    }
}

/// All processes. None where there is no `/proc`.
pub fn all() -> Vec<ProcessEntry> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| ProcessEntry::of(entry.file_name().to_str()?.parse().ok()?))
        .collect()
}

/// Those of the processes that these ones have started, directly or through others.
pub fn below(all: &[ProcessEntry], roots: impl IntoIterator<Item = i32>) -> Vec<ProcessEntry> {
    let mut family: BTreeSet<i32> = roots.into_iter().collect();
    let mut found = Vec::new();
    // Parents are not listed before their children, so look until no new process is found.
    loop {
        let known = found.len();
        for process in all {
            if family.contains(&process.parent) && family.insert(process.identity.pid) {
                found.push(*process);
            }
        }
        if found.len() == known {
            return found;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_may_contain_brackets() {
        let text =
            b"7 (a) Z 1 (b) Z 4 6 7 0 -1 4 1 0 0 0 0 0 0 0 20 0 1 0 987 0 0 18446744073709551615";
        let entry = ProcessEntry::parse(7, text).unwrap();
        assert_eq!((entry.parent, entry.group), (4, 6));
        assert_eq!((entry.identity.start, entry.has_ended), (987, true));
        assert_eq!(ProcessEntry::parse(7, b"7 (a"), None);
        assert_eq!(ProcessEntry::parse(7, b""), None);
    }

    #[test]
    fn indirect_descendants_are_found_and_unrelated_processes_are_not() {
        let process = |pid, parent| ProcessEntry {
            identity: ProcessIdentity { pid, start: 1 },
            parent,
            group: pid,
            has_ended: false,
        };
        let all = [
            process(40, 30),
            process(30, 20),
            process(20, 10),
            process(10, 1),
            process(50, 1),
        ];
        let found: Vec<i32> = below(&all, [10]).iter().map(|it| it.identity.pid).collect();
        assert_eq!(found, [20, 30, 40]);
    }
}
