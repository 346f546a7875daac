//! The ends of run logs, as they pass the relay. In memory, for the status page: the platform has the whole log.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pool_protocol::id::TaskId;
use serde::Deserialize;
use tracing::warn;

const KIB: usize = 1024;
/// What is kept of one run.
const OF_A_RUN: usize = 256 * KIB;
/// What is kept of all runs.
const OF_ALL: usize = 64 * KIB * KIB;

/// The end of the log of each run.
#[derive(Debug, Default)]
pub(crate) struct Tails(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    tails: HashMap<TaskId, Tail>,
    bytes: usize,
    /// Counts additions.
    clock: u64,
}

#[derive(Debug, Default)]
struct Tail {
    text: String,
    /// How many bytes of the log were dropped before the text.
    start: u64,
    /// The number of the last line.
    line: u64,
    /// When it was added to last.
    used: u64,
}

/// A part of a run's log. Offsets count the bytes of the log as the hub has seen it.
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
    /// Adds the lines of a document that the platform has taken.
    pub(crate) fn add(&self, task: TaskId, document: &[u8]) {
        match serde_json::from_slice::<Document>(document) {
            Ok(document) => self.lock().add(task, &document.data),
            Err(error) => warn!(%task, %error, "lines of a run log are not on the status page"),
        }
    }

    /// Returns the log from an offset, or all that is kept if the offset is not in it.
    pub(crate) fn since(&self, task: TaskId, from: u64) -> Option<Part> {
        let kept = self.lock();
        let tail = kept.tails.get(&task)?;
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

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn add(&mut self, task: TaskId, lines: &[Line]) {
        self.clock += 1;
        let tail = self.tails.entry(task).or_default();
        self.bytes -= tail.text.len();
        tail.used = self.clock;
        for line in lines {
            tail.add(line);
        }
        tail.shorten();
        self.bytes += tail.text.len();
        while self.bytes > OF_ALL {
            let Some(oldest) = self.oldest() else { break };
            let dropped = self.tails.remove(&oldest);
            self.bytes -= dropped.map_or(0, |tail| tail.text.len());
        }
    }

    fn oldest(&self) -> Option<TaskId> {
        let oldest = self.tails.iter().min_by_key(|(_, tail)| tail.used);
        oldest.map(|(task, _)| *task)
    }
}

impl Tail {
    fn add(&mut self, line: &Line) {
        // An executor that got no answer sends its lines again. Pieces of a long line have one number.
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

    /// Drops whole lines, or what is too much of a single one.
    fn shorten(&mut self) {
        let surplus = self.text.len().saturating_sub(OF_A_RUN);
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
        // Another hub counted, or the offset was made up.
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
        assert!(part.text.len() <= OF_A_RUN && part.text.len() > OF_A_RUN - 2000);
        assert_eq!(part.end - part.start, part.text.len() as u64);
        assert!(part.start > 0 && part.text.ends_with(&format!("400 {long}\n")));
        let first = part.text.split(' ').next().unwrap();
        assert!(first.parse::<u64>().is_ok(), "{first}");
        // A reader who has seen what was dropped gets what is kept.
        assert_eq!(tails.since(task, 1).unwrap(), part);
        let one = TaskId::new();
        add(&tails, one, &[(1, &"ü".repeat(OF_A_RUN))]);
        assert!(tails.since(one, 0).unwrap().text.len() <= OF_A_RUN);
    }

    #[test]
    fn the_run_that_was_quiet_for_longest_is_dropped_first() {
        let tails = Tails::default();
        let line = "x".repeat(OF_A_RUN - 1);
        let tasks: Vec<TaskId> = (0..OF_ALL / OF_A_RUN).map(|_| TaskId::new()).collect();
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
