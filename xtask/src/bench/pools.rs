//! Measures the hub of pools and its agents: how soon runs start, what an idle agent costs, and a hub with 10,000 runs in its
//! queue and 500 agents.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::MEGABYTE;
use super::kubernetes::{list, ratios, server};
use crate::report::{Goal, Measurement, median, percentile, spread};
use crate::setup::kubernetes::Release;
use crate::skips;
use crate::terminal::complain;

const MILLISECONDS: f64 = 1000.0;

pub(super) fn measure(runs: usize) -> Result<Vec<Measurement>> {
    complain("==> a hub of pools and its agents");
    let taken = take("pools", &[], runs)?;
    let mut measurements = starts(&taken)?;
    measurements.extend(load(&taken["load"], store(&taken)?)?);
    if let Some(server) = skips::unless_skipped("pool to Job", Release::NEWEST.api_server())? {
        complain("==> a run of a pool as a Job");
        measurements.extend(jobs(&take("pool-jobs", &server, runs)?)?);
    }
    Ok(measurements)
}

/// What it costs that a run reaches its store through a hub.
pub(super) fn artifacts(executor: &Path, runs: usize) -> Result<Vec<Measurement>> {
    complain("==> plan and apply through the store of a hub");
    let taken = take_with("artifacts", &[], &[executor.to_owned()], runs)?;
    let subjects = [
        ("pool: plan and apply over direct S3", "usual", 1.10),
        ("pool: the same, state of 20 MB", "large", 1.30),
    ];
    let measured = subjects.into_iter().map(|(name, key, goal)| {
        let side = |index: usize| list(&taken[key], |pair| pair[index].as_f64());
        let (relayed, direct) = (side(0)?, side(1)?);
        Ok(Measurement {
            name,
            value: median(&ratios(&relayed, &direct)),
            unit: "ratio",
            goal: Some(Goal::AtMost(goal)),
            detail: format!(
                "median of {} interleaved pairs; medians {:.0} ms over {:.0} ms",
                relayed.len(),
                median(&relayed) * MILLISECONDS,
                median(&direct) * MILLISECONDS
            ),
        })
    });
    measured.collect()
}

/// How soon executors start, as processes.
fn starts(taken: &Value) -> Result<Vec<Measurement>> {
    let single = &taken["single"];
    let started = list(single, |sample| sample["started"].as_f64())?;
    let late = numbers(&taken["late"])?;
    let freed = numbers(&taken["freed"])?;
    let (burst, idle) = (&taken["burst"], &taken["idle"]);
    let minutes = number(&idle["minutes"])?;
    Ok(vec![
        at_most(
            "pool: POST to process, p50",
            median(&started) * MILLISECONDS,
            300.0,
            format!(
                "{} ms, longest {:.0} ms; {} runs one by one, the agent is idle; {}",
                spread(&scaled(&started)),
                percentile(&started, 100) * MILLISECONDS,
                started.len(),
                store(taken)?
            ),
        ),
        at_most(
            "pool: POST to process, p99",
            percentile(&started, 99) * MILLISECONDS,
            1000.0,
            "of the same runs".to_owned(),
        ),
        at_most(
            "pool: new agent to process",
            percentile(&late, 100) * MILLISECONDS,
            1000.0,
            format!(
                "the longest of {}, {} ms, from the registration of the agent; the run has waited for it",
                late.len(),
                spread(&scaled(&late))
            ),
        ),
        at_most(
            "pool: freed slot to next",
            percentile(&freed, 100) * MILLISECONDS,
            1000.0,
            format!(
                "the longest of {}, {} ms, from the signal that ends an executor to the start of the next one",
                freed.len(),
                spread(&scaled(&freed))
            ),
        ),
        Measurement {
            name: "pool: all slots busy",
            value: number(&burst["all_busy"])?,
            unit: "s",
            goal: Some(Goal::AtMost(3.0)),
            detail: format!(
                "{} runs at once, {} agents of {} slots; each run was taken once, and no agent had more; posted in {:.2} s, over after {:.1} s",
                burst["runs"],
                burst["agents"],
                burst["slots"],
                number(&burst["posted"])?,
                number(&burst["drained"])?
            ),
        },
        Measurement {
            name: "pool: idle agent",
            value: number(&idle["requests"])? / minutes,
            unit: "requests/min",
            goal: Some(Goal::AtMost(2.0)),
            detail: format!(
                "besides {:.1} heartbeats a minute; in {minutes:.1} minutes",
                number(&idle["heartbeats"])? / minutes
            ),
        },
    ])
}

/// A hub with many runs and agents.
fn load(taken: &Value, store: &str) -> Result<Vec<Measurement>> {
    let posted = numbers(&taken["posted"])?;
    let of = format!(
        "{} runs, {} agents, {store}",
        taken["runs"], taken["agents"]
    );
    let bytes = |figure: &str| anyhow::Ok(number(&taken[figure])? / MEGABYTE);
    let acquire = |name, samples: &str, limit: Option<f64>, how: &str| {
        let samples = numbers(&taken[samples])?;
        anyhow::Ok(Measurement {
            name,
            value: percentile(&samples, 99) * MILLISECONDS,
            unit: "ms",
            goal: limit.map(Goal::AtMost),
            detail: format!(
                "p99, p50 {:.1} ms, longest {:.1} ms; {how}; {of}",
                median(&samples) * MILLISECONDS,
                percentile(&samples, 100) * MILLISECONDS
            ),
        })
    };
    Ok(vec![
        at_most(
            "pool: POST answered",
            percentile(&posted, 99) * MILLISECONDS,
            100.0,
            format!(
                "p99, p50 {:.1} ms; {} dispatches, 16 at a time, no agent is there; all confirmed {:.1} s later",
                median(&posted) * MILLISECONDS,
                posted.len(),
                number(&taken["confirmed"])?
            ),
        ),
        acquire(
            "pool: acquire, paced",
            "paced",
            Some(50.0),
            "each agent takes a run a minute and sends six heartbeats",
        )?,
        acquire(
            "pool: acquire, at once",
            "together",
            None,
            "all agents ask at the same time",
        )?,
        acquire(
            "pool: POST to acquired",
            "waiting",
            None,
            "as many agents of another pool wait, and runs are posted one by one",
        )?,
        Measurement {
            name: "pool: hub memory",
            value: bytes("peak")?,
            unit: "MB",
            goal: Some(Goal::AtMost(128.0)),
            detail: format!(
                "peak; {:.1} MB with all runs queued; {of}",
                bytes("resident_queued")?
            ),
        },
    ])
}

/// From a dispatch to its Job, beside a launcher in the cluster itself.
fn jobs(taken: &Value) -> Result<Vec<Measurement>> {
    let side = |side: &str| list(&taken["pairs"], |pair| pair[side].as_f64());
    let (pooled, direct) = (side("pooled")?, side("direct")?);
    let over = ratios(&pooled, &direct);
    let (server, store) = (server(taken)?, store(taken)?);
    Ok(vec![
        at_most(
            "pool: POST to Job, p50",
            median(&pooled) * MILLISECONDS,
            300.0,
            format!(
                "{} ms; {} runs; {server}, {store}",
                spread(&scaled(&pooled)),
                pooled.len()
            ),
        ),
        at_most(
            "pool: POST to Job, p99",
            percentile(&pooled, 99) * MILLISECONDS,
            1000.0,
            "of the same runs".to_owned(),
        ),
        Measurement {
            name: "pool: POST to Job",
            value: median(&over),
            unit: "ratio",
            goal: None,
            detail: format!(
                "{} over a launcher in the cluster, which takes {:.1} ms; the hub also asks the platform",
                spread(&over),
                median(&direct) * MILLISECONDS
            ),
        },
    ])
}

/// Takes the samples with a separate program.
fn take(subject: &str, server: &[PathBuf], runs: usize) -> Result<Value> {
    take_with(subject, server, &[], runs)
}

/// `more`: programs besides the launcher.
fn take_with(subject: &str, server: &[PathBuf], more: &[PathBuf], runs: usize) -> Result<Value> {
    let launcher = super::build(&["--package", "api-launcher", "--bin", "api-launcher"])?;
    let bench = super::build(&[
        "--package",
        "integration-tests",
        "--example",
        "kubernetes_bench",
    ])?;
    let output = Command::new(bench.join("examples/kubernetes_bench"))
        .arg(subject)
        .args(server)
        .arg(launcher.join("api-launcher"))
        .args(more)
        .arg(runs.to_string())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(
        output.status.success(),
        "kubernetes_bench ended with {}",
        output.status
    );
    serde_json::from_slice(&output.stdout).context("kubernetes_bench printed no JSON")
}

fn at_most(name: &'static str, value: f64, limit: f64, detail: String) -> Measurement {
    Measurement {
        name,
        value,
        unit: "ms",
        goal: Some(Goal::AtMost(limit)),
        detail,
    }
}

fn store(taken: &Value) -> Result<&str> {
    taken["store"].as_str().context("the store has no name")
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().context("a figure is missing")
}

fn numbers(samples: &Value) -> Result<Vec<f64>> {
    list(samples, Value::as_f64)
}

fn scaled(seconds: &[f64]) -> Vec<f64> {
    seconds.iter().map(|time| time * MILLISECONDS).collect()
}
