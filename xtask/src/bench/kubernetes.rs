//! Measures the launcher with an API server: launches compared with only creating the same objects, the memory of the watcher,
//! and the time to a verdict.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::MEGABYTE;
use crate::report::{Goal, Measurement, median, spread};
use crate::setup::kubernetes::Release;
use crate::skips;
use crate::terminal::complain;

/// Live Jobs of the memory goal.
const JOBS: usize = 10_000;

/// Measures the time from a dispatch to the release of its Job, and launches per second.
pub(super) fn launches(runs: usize) -> Result<Vec<Measurement>> {
    complain("==> launches compared with bare creates");
    let Some(taken) = take("launches", &[runs])? else {
        return Ok(Vec::new());
    };
    let single = |side| numbers(&taken["single"], side);
    let bursts = |side| numbers(&taken["bursts"], side);
    let (ours, answered, bare) = (single("ours")?, single("answered")?, single("bare")?);
    let (our_rates, bare_rates) = (bursts("ours")?, bursts("bare")?);
    // The ratios are taken pair by pair, because a short load of the machine slows down both sides of a pair.
    let latency = ratios(&ours, &bare);
    let throughput = ratios(&our_rates, &bare_rates);
    let server = server(&taken)?;
    Ok(vec![
        Measurement {
            name: "POST to released Job",
            value: median(&latency),
            unit: "ratio",
            goal: Some(Goal::AtMost(1.3)),
            detail: format!(
                "{}; {} pairs, medians {} ms over {} ms, answered after {} ms; {server}",
                spread(&latency),
                latency.len(),
                milliseconds(&ours),
                milliseconds(&bare),
                milliseconds(&answered),
            ),
        },
        Measurement {
            name: "launches per second",
            value: median(&throughput),
            unit: "ratio",
            goal: Some(Goal::AtLeast(0.8)),
            detail: format!(
                "{}; {} pairs of {} launches, {} at once, medians {:.0}/s over {:.0}/s; {server}",
                spread(&throughput),
                throughput.len(),
                taken["burst"],
                taken["at_once"],
                median(&our_rates),
                median(&bare_rates),
            ),
        },
    ])
}

/// Measures the memory of a launcher with many live Jobs, and the time until it reports one of them.
pub(super) fn watching(runs: usize) -> Result<Vec<Measurement>> {
    complain(&format!("==> {JOBS} live Jobs watched"));
    let Some(taken) = take("watching", &[runs, JOBS])? else {
        return Ok(Vec::new());
    };
    let bytes = |figure: &str| {
        let bytes = taken[figure].as_f64().context("a figure is missing")?;
        anyhow::Ok(bytes / MEGABYTE)
    };
    let told = |figure: &str| list(&taken[figure], Value::as_f64);
    let (verdicts, reasons) = (told("verdicts")?, told("reasons")?);
    let server = server(&taken)?;
    let seconds = |samples: &[f64]| format!("{} s; median of {runs}", spread(samples));
    Ok(vec![
        Measurement {
            name: "launcher memory",
            value: bytes("resident")?,
            unit: "MB",
            goal: Some(Goal::AtMost(64.0)),
            detail: format!(
                "resident with {JOBS} live Jobs and their pods; at most {:.1} MB; {server}",
                bytes("peak")?
            ),
        },
        Measurement {
            name: "pod status to verdict",
            value: median(&verdicts),
            unit: "s",
            goal: Some(Goal::AtMost(1.0)),
            detail: format!(
                "{}, until the report to the platform, {JOBS} Jobs watched",
                seconds(&verdicts)
            ),
        },
        Measurement {
            name: "pod status to reason",
            value: median(&reasons),
            unit: "s",
            goal: Some(Goal::AtMost(1.0)),
            detail: format!("{}, until a wait is explained", seconds(&reasons)),
        },
    ])
}

/// Takes the samples with a separate program, which links the launcher's crates. `None` without an API server.
fn take(subject: &str, amounts: &[usize]) -> Result<Option<Value>> {
    let Some(server) = skips::unless_skipped(subject, Release::NEWEST.api_server())? else {
        return Ok(None);
    };
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
        .args(amounts.iter().map(ToString::to_string))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(
        output.status.success(),
        "kubernetes_bench ended with {}",
        output.status
    );
    let samples = serde_json::from_slice(&output.stdout);
    samples
        .context("kubernetes_bench printed no JSON")
        .map(Some)
}

pub(super) fn server(taken: &Value) -> Result<&str> {
    taken["server"]
        .as_str()
        .context("the API server has no name")
}

pub(super) fn list(samples: &Value, number: impl Fn(&Value) -> Option<f64>) -> Result<Vec<f64>> {
    let samples = samples.as_array().context("samples are missing")?;
    samples
        .iter()
        .map(|sample| number(sample).context("a sample is no number"))
        .collect()
}

fn numbers(samples: &Value, side: &str) -> Result<Vec<f64>> {
    list(samples, |sample| sample[side].as_f64())
}

pub(super) fn ratios(ours: &[f64], floor: &[f64]) -> Vec<f64> {
    ours.iter()
        .zip(floor)
        .map(|(ours, floor)| ours / floor)
        .collect()
}

fn milliseconds(samples: &[f64]) -> String {
    format!("{:.1}", median(samples) * 1000.0)
}
