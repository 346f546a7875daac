//! Measures the lines per second of the log path, and of `cat` for the same amount of text from file to file.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::report::{Measurement, median};
use crate::terminal::complain;

const LINES: usize = 1_000_000;
/// Length of the example's lines with their newline.
const LINE_BYTES: usize = 80;

pub(super) fn measure(runs: usize) -> Result<Vec<Measurement>> {
    let example =
        super::build(&["--package", "run-log", "--example", "log_path"])?.join("examples/log_path");
    let folder = tempfile::tempdir()?;
    let source = folder.path().join("source");
    write_lines(&source)?;
    complain(&format!("==> log path, {LINES} lines"));
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for run in 0..=runs {
        let copied = copy(&source, &folder.path().join("copy"))?;
        let logged = log(&example, folder.path())?;
        if run > 0 {
            floor.push(copied);
            ours.push(logged);
        }
    }
    let (ours, floor) = (median(&ours), median(&floor));
    Ok(vec![
        Measurement {
            name: "log path",
            value: ours,
            unit: "lines/s",
            goal: None,
            detail: format!(
                "{LINES} lines of {LINE_BYTES} bytes: redact, spool, file; median of {runs}"
            ),
        },
        Measurement {
            name: "log path under cat",
            value: floor / ours,
            unit: "ratio",
            goal: None,
            detail: format!("`cat` from file to file copies {floor:.0} lines/s in the same run"),
        },
    ])
}

fn log(example: &Path, folder: &Path) -> Result<f64> {
    let output = Command::new(example)
        .arg(LINES.to_string())
        .arg(folder)
        .stdin(Stdio::null())
        .output()?;
    ensure!(
        output.status.success(),
        "log_path ended with {}",
        output.status
    );
    let report: Value =
        serde_json::from_slice(&output.stdout).context("log_path printed no JSON")?;
    ensure!(report["complete"] == true, "log_path lost lines: {report}");
    report["lines_per_second"]
        .as_f64()
        .context("log_path names no rate")
}

#[expect(
    clippy::cast_precision_loss,
    reason = "rates need no more than 52 bits"
)]
fn copy(source: &Path, target: &Path) -> Result<f64> {
    let started = Instant::now();
    let status = Command::new("cat")
        .arg(source)
        .stdout(File::create(target)?)
        .status()
        .context("could not start `cat`")?;
    let elapsed = started.elapsed();
    ensure!(status.success(), "cat failed ({status})");
    fs::remove_file(target)?;
    Ok(LINES as f64 / elapsed.as_secs_f64())
}

fn write_lines(path: &Path) -> Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for number in 0..LINES {
        writeln!(file, "{number:.<width$}", width = LINE_BYTES - 1)?;
    }
    file.flush()?;
    Ok(())
}
