//! Keeps the ends of run logs that pass the relay, in memory, for the status page. The platform has the whole logs.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pool_protocol::id::TaskId;
use serde::Deserialize;
use tracing::warn;

const KIB: usize = 1024;
/// The largest number of bytes that are kept of one run.
const MAX_BYTES_PER_RUN: usize = 256 * KIB;
/// The largest number of bytes that are kept of all runs.
const MAX_BYTES: usize = 64 * KIB * KIB;

/// The end of the log of each run.
#[derive(Debug, Default)]
pub(crate) struct Tails(Mutex<LogTails>);

#[derive(Debug, Default)]
struct LogTails {
    tails: HashMap<TaskId, Tail>,
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
            Ok(document) => self.lock().add(task, &document.data),
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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LogTails {
    fn add(&mut self, task: TaskId, lines: &[Line]) {
        self.additions += 1;
        let tail = self.tails.entry(task).or_default();
        self.bytes -= tail.text.len();
        tail.last_addition = self.additions;
        for line in lines {
            tail.add(line);
        }
        tail.shorten();
        self.bytes += tail.text.len();
        while self.bytes > MAX_BYTES {
            let Some(oldest) = self.oldest() else { break };
            let dropped = self.tails.remove(&oldest);
            self.bytes -= dropped.map_or(0, |tail| tail.text.len());
        }
    }

    fn oldest(&self) -> Option<TaskId> {
        let oldest = self.tails.iter().min_by_key(|(_, tail)| tail.last_addition);
        oldest.map(|(task, _)| *task)
    }
}

impl Tail {
    fn add(&mut self, line: &Line) {
        // An executor that got no response sends its lines again. The pieces of a long line have the same number.
        if line.line_number < self.line {
            return;
        }
        let text = console::strip_ansi_codes(&line.output);
        if line.line_number == self.line && self.text.trim_end_matches('\n').ends_with(&*text) {
            return;
        }
        self.line = line.line_number;
        self.text.push_str(text.trim_end_matches('\n'));
        self.text.push('\n');
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
        let tasks: Vec<TaskId> = (0..MAX_BYTES / MAX_BYTES_PER_RUN)
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
}
