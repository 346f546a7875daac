//! Where the time of stages and tests goes. Each stage has a file with one line for each fact; the processes of the stage add
//! theirs (`test_peers::times`). Knows how to write and sum up such files, but not what the stages do.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

use crate::target_folder;

/// The variable with the file of the stage.
pub(crate) const TIMES: &str = "MAYFLY_TEST_TIMES";
/// The name under which `cargo xtask test` is listed, which is no stage.
pub(crate) const SUITE: &str = "test";
/// How many of the slowest tests are listed.
const SLOWEST: usize = 20;

/// The file of the stage that runs.
static CURRENT: Mutex<Option<PathBuf>> = Mutex::new(None);

/// A part of a stage. What is none of them is the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    /// Programs that tests need are looked for, installed or built, and servers for all tests of a stage start.
    SetUp,
    /// Cargo compiles and links.
    Build,
    /// Tests run.
    Tests,
}

impl Part {
    const fn name(self) -> &'static str {
        match self {
            Self::SetUp => "set-up",
            Self::Build => "build",
            Self::Tests => "tests",
        }
    }
}

/// Begins a stage: what is noted from here on is noted for it. What an earlier run noted is forgotten.
pub(crate) fn begin(stage: &str) -> Result<()> {
    let file = folder().join(stage);
    fs::create_dir_all(folder())
        .and_then(|()| fs::write(&file, ""))
        .with_context(|| format!("could not write `{}`", file.display()))?;
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
    Ok(())
}

/// Ends the stage, with the time that all of it took.
pub(crate) fn end(whole: f64) -> Result<()> {
    note(&format!("whole\t{whole}"))?;
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = None;
    Ok(())
}

/// The file of the stage, if one has begun.
pub(crate) fn file() -> Option<PathBuf> {
    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    current.clone()
}

/// Does a part of the stage, and notes how long it took.
pub(crate) fn spent<T>(part: Part, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let (started, before) = (Instant::now(), processor_seconds()?);
    let outcome = work();
    let wall = started.elapsed().as_secs_f64();
    let processor = processor_seconds()? - before;
    note(&format!("part\t{}\t{wall}\t{processor}", part.name()))?;
    outcome
}

/// The processor time of all ended child processes and their children.
pub(crate) fn processor_seconds() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("no processor time")?;
    #[expect(clippy::cast_precision_loss, reason = "below 2^52")]
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

fn folder() -> PathBuf {
    target_folder().join("times")
}

/// Notes a fact of the stage, if one has begun. In one write, because processes write at the same time.
pub(crate) fn note(line: &str) -> Result<()> {
    let Some(file) = file() else {
        return Ok(());
    };
    let write = || {
        let mut file = OpenOptions::new().append(true).create(true).open(&file)?;
        file.write_all(format!("{line}\n").as_bytes())
    };
    write().with_context(|| format!("could not write `{}`", file.display()))
}

/// The tests that failed in the stage so far.
pub(crate) fn failed() -> Result<Vec<String>> {
    let Some(file) = file() else {
        return Ok(Vec::new());
    };
    let text = fs::read_to_string(&file)
        .with_context(|| format!("could not read `{}`", file.display()))?;
    Ok(Stage::read(&text).failed)
}

/// The tables of these stages, as far as they ran in this target folder.
pub(crate) fn tables(stages: &[String]) -> String {
    let read = |name: &String| {
        let text = fs::read_to_string(folder().join(name)).ok()?;
        Some((name.clone(), Stage::read(&text)))
    };
    let stages: Vec<_> = stages.iter().filter_map(read).collect();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    tables_of(&stages, processors)
}

/// What was noted of one stage. Times are in seconds.
#[derive(Debug, Default)]
struct Stage {
    whole: f64,
    /// Wall time and processor time of each part.
    parts: BTreeMap<String, (f64, f64)>,
    tests: Vec<(String, f64)>,
    failed: Vec<String>,
    /// Programs that tests started: how often, and the time until they were ready.
    peers: BTreeMap<String, (usize, f64)>,
}

impl Stage {
    /// A line that cannot be read is left out: a killed process has not finished it.
    fn read(text: &str) -> Self {
        let mut stage = Self::default();
        for line in text.lines() {
            let fields: Vec<_> = line.split('\t').collect();
            let number = |at: usize| fields.get(at).and_then(|field| field.parse().ok());
            match (fields.as_slice(), number(fields.len() - 1)) {
                (["whole", _], Some(seconds)) => stage.whole = seconds,
                (["part", name, _, _], Some(processor)) => {
                    let part = stage.parts.entry((*name).to_owned()).or_default();
                    part.0 += number(2).unwrap_or(0.0);
                    part.1 += processor;
                }
                (["test", name, _], Some(seconds)) => {
                    stage.tests.push(((*name).to_owned(), seconds));
                }
                (["failed", name], _) => stage.failed.push((*name).to_owned()),
                (["peer", name, _], Some(seconds)) => {
                    let peer = stage.peers.entry((*name).to_owned()).or_default();
                    peer.0 += 1;
                    peer.1 += seconds;
                }
                _ => {}
            }
        }
        stage
    }

    fn wall(&self, part: Part) -> f64 {
        self.parts.get(part.name()).map_or(0.0, |part| part.0)
    }
}

fn tables_of(stages: &[(String, Stage)], processors: usize) -> String {
    let mut text = String::new();
    #[expect(clippy::cast_precision_loss, reason = "there are few processors")]
    let processors = processors as f64;
    let mut line = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    line(format!(
        "{:<10} {:>7} {:>7} {:>7} {:>7} {:>8} {:>8}",
        "stage", "whole", "set-up", "build", "tests", "running", "waiting"
    ));
    for (name, stage) in stages {
        let (tests, running) = stage
            .parts
            .get(Part::Tests.name())
            .copied()
            .unwrap_or_default();
        line(format!(
            "{name:<10} {:>7.1} {:>7.1} {:>7.1} {tests:>7.1} {running:>8.1} {:>8.1}",
            stage.whole,
            stage.wall(Part::SetUp),
            stage.wall(Part::Build),
            (tests * processors - running).max(0.0),
        ));
    }
    line(
        "Seconds. `running` and `waiting` are those of all processors while tests run.".to_owned(),
    );
    let tests = stages.iter().flat_map(|(stage, times)| {
        let tests = times.tests.iter();
        tests.map(move |(name, seconds)| (*seconds, stage.as_str(), name.as_str()))
    });
    let mut tests: Vec<_> = tests.collect();
    tests.sort_by(|one, other| other.0.total_cmp(&one.0));
    line(format!("\nslowest of {} tests", tests.len()));
    for (seconds, stage, name) in tests.iter().take(SLOWEST) {
        line(format!("{seconds:>7.1} {stage:<10} {name}"));
    }
    let mut peers = BTreeMap::<&str, (usize, f64)>::new();
    for (name, (count, seconds)) in stages.iter().flat_map(|(_, stage)| &stage.peers) {
        let peer = peers.entry(name).or_default();
        peer.0 += count;
        peer.1 += seconds;
    }
    let mut peers: Vec<_> = peers.into_iter().collect();
    peers.sort_by(|one, other| other.1.1.total_cmp(&one.1.1));
    line("\nprograms that tests waited for at their start".to_owned());
    for (name, (count, seconds)) in peers {
        line(format!("{seconds:>7.1} {name}, {count} times"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_facts_of_a_stage_become_tables() {
        let text = "part\tset-up\t2.5\t1\npart\tbuild\t10\t19\npart\ttests\t40\t30\npart\ttests\t20\t20\n\
                    test\tpools\tin_pools::one\t3.5\ntest\tin_pools::two\t7.25\ntest\tin_pools::three\t1\n\
                    failed\tin_pools::two\npeer\tredis-server\t0.5\npeer\tredis-server\t1\npeer\thalf\nwhole\t75\n";
        let stage = Stage::read(text);
        assert_eq!(stage.failed, ["in_pools::two"]);
        let shown = tables_of(&[("pools".to_owned(), stage)], 2);
        let words: Vec<Vec<_>> = shown
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            words[1],
            ["pools", "75.0", "2.5", "10.0", "60.0", "50.0", "70.0"]
        );
        assert_eq!(words[4], ["slowest", "of", "2", "tests"]);
        assert_eq!(words[5], ["7.2", "pools", "in_pools::two"]);
        assert_eq!(words[6], ["1.0", "pools", "in_pools::three"]);
        assert_eq!(words[9], ["1.5", "redis-server,", "2", "times"]);
    }
}
