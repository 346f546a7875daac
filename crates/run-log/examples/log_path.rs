//! Measures the log path: lines of 80 bytes go through redaction with 20 secrets, the spool and a file sink. Also measures
//! how long a redactor takes to index a megabyte of secrets.
//!
//! `log_path [LINES [FOLDER]]` prints one JSON document. Its rates use the wall-clock time from the first write to the end of
//! delivery. With `taskset -c 0` they show the rate of one core.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use run_log::{FileSink, LogConfig, Redactor, RunLog};

const LINE_BYTES: usize = 80;
const CHUNK_BYTES: usize = 64 * 1024;
/// One line in so many contains a secret.
const SECRET_EVERY: usize = 1000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let lines: usize = arguments
        .next()
        .map_or(Ok(5_000_000), |text| text.parse())?;
    let parent = arguments
        .next()
        .map_or_else(std::env::temp_dir, PathBuf::from);
    let folder = tempfile::tempdir_in(parent)?;

    let secrets: Vec<String> = (0..20).map(secret).collect();
    let output = output(&secrets);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let sink = Box::new(FileSink::new(folder.path().join("sink.log")));
    let log = RunLog::start(
        LogConfig::new(folder.path()),
        Redactor::new(&secrets),
        vec![sink],
    )?;
    let (secrets_took, secrets_growth) = learn_a_megabyte()?;
    let rss_before = resident_peak_kib()?;

    let start = Instant::now();
    let (summary, written_after) = runtime.block_on(async move {
        let mut writer = log.writer();
        let mut left = lines * LINE_BYTES;
        while left > 0 {
            for chunk in output.chunks(CHUNK_BYTES) {
                let chunk = &chunk[..chunk.len().min(left)];
                writer.write(chunk).await;
                left -= chunk.len();
            }
        }
        writer.close().await;
        let written_after = start.elapsed();
        (log.finish(Duration::from_mins(1)).await, written_after)
    });
    let took = start.elapsed();

    #[expect(
        clippy::cast_precision_loss,
        reason = "rates need no more than 52 bits"
    )]
    let report = serde_json::json!({
        "lines": summary.lines,
        "complete": summary.is_complete(),
        "lines_per_second": (lines as f64 / took.as_secs_f64()).round(),
        "mb_per_second": (lines as f64 * LINE_BYTES as f64 / took.as_secs_f64() / 1e4).round() / 100.0,
        "written_after_ms": written_after.as_millis(),
        "delivered_after_ms": took.as_millis(),
        "megabyte_of_secrets_ms": secrets_took.as_millis(),
        "megabyte_of_secrets_rss_kib": secrets_growth,
        "peak_rss_kib": resident_peak_kib()?,
        "peak_rss_growth_kib": resident_peak_kib()? - rss_before,
    });
    writeln!(io::stdout(), "{report}")?;
    Ok(())
}

/// Time and memory to index a megabyte of secrets.
fn learn_a_megabyte() -> io::Result<(Duration, u64)> {
    let mut left = 1_000_000;
    let secrets = (0..).map(|number| format!("{}/+ {}", secret(number), secret(number + 7)));
    let secrets: Vec<String> = secrets
        .take_while(|secret| {
            let is_wanted = left > 0;
            left -= secret.len().min(left);
            is_wanted
        })
        .collect();
    let (start, rss_before) = (Instant::now(), resident_peak_kib()?);
    let redactor = Redactor::new(&secrets);
    let took = start.elapsed();
    let growth = resident_peak_kib()? - rss_before;
    drop(redactor);
    Ok((took, growth))
}

/// A secret like a generated token: all characters differ.
fn secret(number: usize) -> String {
    let mut seed = number as u64 + 1;
    let mut secret = String::from("s_");
    for _ in 0..4 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let _ = write!(secret, "{:010x}", seed >> 24);
    }
    secret
}

/// About a megabyte of text like the output of an apply.
fn output(secrets: &[String]) -> Vec<u8> {
    let mut output = Vec::new();
    for number in 0..13_000 {
        let text = if number % SECRET_EVERY == 0 {
            let secret = &secrets[number / SECRET_EVERY % secrets.len()];
            format!("resource[{number}]: token = \"{secret}\" ")
        } else {
            format!(
                "module.network.aws_subnet.private[{number}]: Still creating... [id=subnet-{number:08x}] "
            )
        };
        let mut line = text.into_bytes();
        line.resize(LINE_BYTES - 1, b'.');
        line.push(b'\n');
        output.extend_from_slice(&line);
    }
    output
}

fn resident_peak_kib() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    status
        .lines()
        .find_map(|line| {
            line.strip_prefix("VmHWM:")?
                .split_whitespace()
                .next()?
                .parse()
                .ok()
        })
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}
