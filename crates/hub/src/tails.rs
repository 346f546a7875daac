//! Keeps the ends of run logs that pass the relay, in memory, for the status page. The platform has the whole logs.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};

use pool_protocol::id::TaskId;
use serde::Deserialize;
use tracing::warn;

const KIB: usize = 1024;
/// The largest number of bytes that are kept of one run.
const MAX_BYTES_PER_RUN: usize = 256 * KIB;
/// The most memory of all logs.
const MAX_BYTES: usize = 64 * KIB * KIB;
/// The memory that a log takes beside its text.
const ENTRY: usize = 512;

/// The end of the log of each run.
#[derive(Debug, Default)]
pub(crate) struct Tails(Mutex<LogTails>);

#[derive(Debug, Default)]
struct LogTails {
    tails: HashMap<TaskId, Tail>,
    /// The logs by their last addition.
    order: BTreeMap<u64, TaskId>,
    /// The memory that they take.
    bytes: usize,
    /// The number of additions.
    additions: u64,
}

#[derive(Debug, Default)]
struct Tail {
    text: String,
    /// How many bytes of the log before the text were dropped.
    start: u64,
    /// The number of the last line.
    line: u64,
    /// The number of the last addition to this log.
    last_addition: u64,
}

/// A part of a run log. Offsets count the bytes that passed this hub.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) text: String,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// The body of the platform's `POST /logs`.
#[derive(Deserialize)]
struct Document {
    data: Vec<Line>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    #[serde(default)]
    line_number: u64,
    #[serde(default)]
    output: String,
}

impl Tails {
    /// Adds the lines of a document that the platform has accepted.
    pub(crate) fn add(&self, task: TaskId, document: &[u8]) {
        match serde_json::from_slice::<Document>(document) {
            Ok(document) => {
                // All logs share one lock, so the lines are made before it is taken.
                let lines: Vec<_> = document.data.iter().map(Line::plain).collect();
                self.lock().add(task, &lines);
            }
            Err(error) => warn!(%task, %error, "lines of a run log are not on the status page"),
        }
    }

    /// Returns the log from an offset on. If the offset is not in the kept text, returns the whole kept text.
    pub(crate) fn since(&self, task: TaskId, from: u64) -> Option<Part> {
        let tails = self.lock();
        let tail = tails.tails.get(&task)?;
        let skipped = from
            .checked_sub(tail.start)
            .and_then(|skipped| usize::try_from(skipped).ok())
            .filter(|skipped| tail.text.is_char_boundary(*skipped))
            .unwrap_or(0);
        Some(Part {
            text: tail.text[skipped..].to_owned(),
            start: tail.start + skipped as u64,
            end: tail.end(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, LogTails> {
        runtime::lock(&self.0)
    }
}

impl Line {
    /// Returns the number, and the text without colours and without its end.
    fn plain(&self) -> (u64, Cow<'_, str>) {
        let text = match console::strip_ansi_codes(&self.output) {
            Cow::Borrowed(text) => Cow::Borrowed(text.trim_end_matches('\n')),
            Cow::Owned(text) => Cow::Owned(text.trim_end_matches('\n').to_owned()),
        };
        (self.line_number, text)
    }
}

impl LogTails {
    fn add(&mut self, task: TaskId, lines: &[(u64, Cow<'_, str>)]) {
        let mut tail = self.remove(task).unwrap_or_default();
        tail.add(lines);
        self.additions += 1;
        tail.last_addition = self.additions;
        self.bytes += tail.memory();
        self.order.insert(tail.last_addition, task);
        self.tails.insert(task, tail);
        while self.bytes > MAX_BYTES {
            let Some((_, oldest)) = self.order.first_key_value() else {
                break;
            };
            self.remove(*oldest);
        }
    }

    fn remove(&mut self, task: TaskId) -> Option<Tail> {
        let tail = self.tails.remove(&task)?;
        self.order.remove(&tail.last_addition);
        self.bytes -= tail.memory();
        Some(tail)
    }
}

impl Tail {
    fn add(&mut self, lines: &[(u64, Cow<'_, str>)]) {
        let length = lines.iter().map(|(_, text)| text.len() + 1).sum();
        self.text.reserve_exact(length);
        for (number, text) in lines {
            // An executor that got no response sends its lines again. The pieces of a long line have the same number.
            if *number < self.line || (*number == self.line && self.ends_with(text)) {
                continue;
            }
            self.line = *number;
            self.text.push_str(text);
            self.text.push('\n');
        }
        self.shorten();
        self.text.shrink_to(MAX_BYTES_PER_RUN);
    }

    /// Whether this is the last line. Looks at no more of the text than the line has.
    fn ends_with(&self, line: &str) -> bool {
        let last = self.text.strip_suffix('\n');
        let before = last.and_then(|last| last.strip_suffix(line));
        before.is_some_and(|before| before.is_empty() || before.ends_with('\n'))
    }

    /// The memory that the log takes. What was dropped may still be allocated.
    fn memory(&self) -> usize {
        self.text.capacity() + ENTRY
    }

    /// Drops the oldest whole lines, or the start of a single long line.
    fn shorten(&mut self) {
        let surplus = self.text.len().saturating_sub(MAX_BYTES_PER_RUN);
        if surplus == 0 {
            return;
        }
        let cut = self.text.as_bytes()[surplus..self.text.len() - 1]
            .iter()
            .position(|byte| *byte == b'\n');
        let cut = cut.map_or_else(
            || self.text.ceil_char_boundary(surplus),
            |newline| surplus + newline + 1,
        );
        self.text.drain(..cut);
        self.start += cut as u64;
    }

    fn end(&self) -> u64 {
        self.start + self.text.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn add(tails: &Tails, task: TaskId, lines: &[(u64, &str)]) {
        let line = |(number, output): &(u64, &str)| json!({"jobId": 1, "stepId": "a", "lineNumber": number, "output": output});
        let data: Vec<_> = lines.iter().map(line).collect();
        tails.add(task, json!({ "data": data }).to_string().as_bytes());
    }

    #[test]
    fn lines_are_kept_once_and_without_colours() {
        let (tails, task) = (Tails::default(), TaskId::new());
        assert_eq!(tails.since(task, 0), None);
        add(&tails, task, &[(1, "\u{1b}[32mone\u{1b}[0m"), (2, "two")]);
        add(&tails, task, &[(1, "one"), (2, "two"), (3, "")]);
        let part = tails.since(task, 0).unwrap();
        assert_eq!((&*part.text, part.start, part.end), ("one\ntwo\n\n", 0, 9));
        let rest = tails.since(task, 4).unwrap();
        assert_eq!((&*rest.text, rest.start), ("two\n\n", 4));
        assert_eq!(tails.since(task, 9).unwrap().text, "");
        // The offset is from another hub, or invalid.
        assert_eq!(tails.since(task, 99).unwrap(), part);
        assert_eq!(tails.since(TaskId::new(), 0), None);
    }

    #[test]
    fn the_end_of_a_long_log_is_kept_by_whole_lines() {
        let (tails, task) = (Tails::default(), TaskId::new());
        let long = "ü".repeat(500);
        for number in 1..=400 {
            add(&tails, task, &[(number, &format!("{number} {long}"))]);
        }
        let part = tails.since(task, 0).unwrap();
        assert!(part.text.len() <= MAX_BYTES_PER_RUN && part.text.len() > MAX_BYTES_PER_RUN - 2000);
        assert_eq!(part.end - part.start, part.text.len() as u64);
        assert!(part.start > 0 && part.text.ends_with(&format!("400 {long}\n")));
        let first = part.text.split(' ').next().unwrap();
        assert!(first.parse::<u64>().is_ok(), "{first}");
        // A reader whose offset was dropped gets all kept lines.
        assert_eq!(tails.since(task, 1).unwrap(), part);
        let one = TaskId::new();
        add(&tails, one, &[(1, &"ü".repeat(MAX_BYTES_PER_RUN))]);
        assert!(tails.since(one, 0).unwrap().text.len() <= MAX_BYTES_PER_RUN);
    }

    #[test]
    fn the_log_without_additions_for_longest_is_dropped_first() {
        let tails = Tails::default();
        let line = "x".repeat(MAX_BYTES_PER_RUN - 1);
        let tasks: Vec<TaskId> = (0..MAX_BYTES / (MAX_BYTES_PER_RUN + ENTRY))
            .map(|_| TaskId::new())
            .collect();
        for task in &tasks {
            add(&tails, *task, &[(1, &line)]);
        }
        add(&tails, tasks[0], &[(2, "y")]);
        add(&tails, TaskId::new(), &[(1, &line)]);
        assert!(tails.since(tasks[0], 0).is_some());
        assert_eq!(tails.since(tasks[1], 0), None);
        assert!(tails.since(tasks[2], 0).is_some());
    }

    #[test]
    fn lines_of_a_long_log_that_come_again_cost_no_more_than_themselves() {
        let (tails, task) = (Tails::default(), TaskId::new());
        let tail = Tail {
            text: "\n".repeat(MAX_BYTES_PER_RUN),
            line: 2,
            ..Tail::default()
        };
        let mut logs = tails.lock();
        logs.bytes = tail.memory();
        logs.tails.insert(task, tail);
        drop(logs);
        let again = vec![(2, Cow::Borrowed("")); 20_000];
        // A look at the whole text for each of these four million lines takes minutes at least, and the runner ends it.
        for _ in 0..200 {
            tails.lock().add(task, &again);
        }
        let kept = tails.since(task, 0).unwrap();
        assert_eq!((kept.start, kept.text.len()), (0, MAX_BYTES_PER_RUN));
    }

    #[test]
    fn the_limit_counts_the_memory_of_the_logs() {
        let tails = Tails::default();
        let large = "x".repeat(MAX_BYTES_PER_RUN);
        for _ in 0..300 {
            let lines = [(1, Cow::Borrowed(&*large)), (2, Cow::Borrowed("y"))];
            tails.lock().add(TaskId::new(), &lines);
        }
        for _ in 0..2000 {
            add(&tails, TaskId::new(), &[(1, "")]);
        }
        let logs = tails.lock();
        let allocated: usize = logs.tails.values().map(|tail| tail.text.capacity()).sum();
        let in_all = allocated + logs.tails.len() * size_of::<(TaskId, Tail)>();
        assert!(in_all <= MAX_BYTES, "{in_all}");
        assert!(logs.bytes >= logs.tails.len() * ENTRY);
        assert_eq!(logs.order.len(), logs.tails.len());
    }
}
