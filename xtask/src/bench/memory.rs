//! Measures the peak memory of the executor process while a tool prints 100 MB: with a folder of its machine alone, and as
//! Terrakube runs it, with S3 and Redis.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use job_contract::{JobData, StepType};
use serde_json::Value;

use super::MEGABYTE;
use super::executor::{ExecutorFolders, job, pack};
use crate::report::{Goal, Measurement};
use crate::terminal::complain;

const OUTPUT_BYTES: u64 = 100_000_000;
/// Lines of the live log. Its limit comes later.
const LIVE_LINES: u64 = 100_000;
/// How often the kernel's peak value is read. It never falls, so the last value before the end misses only the last moments.
const INTERVAL: Duration = Duration::from_millis(5);
/// What the tool does. It notes the backend of the override file, as a real one.
const TOOL: &str = r#"#!/usr/bin/env bash
kind='^  backend "([a-z0-9]+)" [{]$'
setting='^    ([a-z_]+) = (".*"|true|[{] s3 = ".*" [}])$'
case "$1" in
version) echo '{"terraform_version":"1.9.8","platform":"linux_amd64","provider_selections":{}}' ;;
init) mkdir -p .terraform
settings=
while IFS= read -r line; do
if [[ $line =~ $kind ]]; then backend=${BASH_REMATCH[1]}
elif [[ $line =~ $setting ]]; then
name=${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}
settings+="${settings:+,}\"$name\":${value/s3 =/\"s3\":}"
fi
done < <(cat ./*_override.tf)
echo "{\"version\":3,\"backend\":{\"type\":\"$backend\",\"config\":{$settings}}}" > .terraform/terraform.tfstate ;;
plan) echo plan > terraformLibrary.tfPlan; cat '@FLOOD@'; exit 2 ;;
show) [[ " $* " == *" -json "* ]] && echo '{"format_version":"1.2","terraform_version":"1.9.8"}' ;;
esac
exit 0
"#;

pub(super) fn measure(binary: &Path) -> Result<Vec<Measurement>> {
    let folder = tempfile::tempdir()?;
    let (content, archive) = (
        folder.path().join("content"),
        folder.path().join("content.tar.gz"),
    );
    fs::create_dir(&content)?;
    fs::write(content.join("main.tf"), "")?;
    pack(&content, &archive)?;
    let bench = Bench {
        binary,
        archive,
        lines: write_flood(&folder.path().join("flood"))?,
        path: pouring_tool(folder.path())?,
        folder: folder.path(),
    };
    complain("==> peak memory with 100 MB of tool output");
    let local = bench.local()?;
    complain("==> the same with S3 and Redis");
    Ok(vec![local, bench.terrakube()?])
}

struct Bench<'b> {
    binary: &'b Path,
    archive: PathBuf,
    /// Of the tool's output.
    lines: usize,
    /// Begins with the folder of the tool.
    path: OsString,
    folder: &'b Path,
}

impl Bench<'_> {
    fn local(&self) -> Result<Measurement> {
        let folders = ExecutorFolders::new(self.folder.join("local"), self.path.clone())?;
        let plan = job(StepType::Plan, &self.archive);
        folders.queue(&[&plan])?;
        let run = Run::watched(&folders, &mut folders.command(self.binary, &plan))?;
        ensure_stored(folders.step_output(&plan).metadata()?.len())?;
        Ok(run.measurement(
            "executor peak memory",
            &format!("{} lines into a folder", self.lines),
        ))
    }

    fn terrakube(&self) -> Result<Measurement> {
        let folders = ExecutorFolders::new(self.folder.join("terrakube"), self.path.clone())?;
        let mut platform = Terrakube::start(&self.archive)?;
        let mut command = folders.command(self.binary, &platform.job);
        let run = Run::watched(&folders, command.envs(&platform.settings))?;
        let arrived = platform.arrived()?;
        let number = |name: &str| arrived[name].as_u64().context("a figure is missing");
        ensure_stored(number("storedBytes")?)?;
        let live = number("liveLines")?;
        ensure!(
            live >= LIVE_LINES,
            "only {live} lines are in the stream of the live log"
        );
        Ok(run.measurement(
            "executor peak memory, S3 and Redis",
            &format!("{} lines to S3, {live} of them to Redis", self.lines),
        ))
    }
}

fn ensure_stored(bytes: u64) -> Result<()> {
    ensure!(
        bytes >= OUTPUT_BYTES,
        "only {bytes} bytes of the output were stored"
    );
    Ok(())
}

/// A run of the executor.
struct Run {
    /// Its peak memory.
    peak_bytes: u64,
    time: Duration,
}

impl Run {
    fn watched(folders: &ExecutorFolders, command: &mut Command) -> Result<Self> {
        let started = Instant::now();
        let mut child = command.spawn()?;
        let mut peak_bytes = 0;
        let status = loop {
            if let Some(high_water) = high_water_mark(child.id()) {
                peak_bytes = high_water.max(peak_bytes);
            }
            if let Some(status) = child.try_wait()? {
                break status;
            }
            thread::sleep(INTERVAL);
        };
        folders.ensure_done(status)?;
        ensure!(
            peak_bytes > 0,
            "the executor's peak memory could not be read in /proc"
        );
        Ok(Self {
            peak_bytes,
            time: started.elapsed(),
        })
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "a process is far below 2^52 bytes"
    )]
    fn measurement(&self, name: &'static str, what: &str) -> Measurement {
        Measurement {
            name,
            value: self.peak_bytes as f64 / MEGABYTE,
            unit: "MB",
            goal: Some(Goal::AtMost(25.0)),
            detail: format!("{what} in {:.1} s", self.time.as_secs_f64()),
        }
    }
}

/// A platform of the tests with Redis and S3, and the plan that waits there. It ends with this value.
struct Terrakube {
    process: Child,
    output: BufReader<ChildStdout>,
    job: JobData,
    /// Of the executor.
    settings: BTreeMap<String, String>,
}

impl Terrakube {
    fn start(archive: &Path) -> Result<Self> {
        let mut process = Command::new(super::build_of_tests("terrakube_job")?)
            .arg(archive)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = process.stdout.take().context("it has an output")?;
        let mut output = BufReader::new(output);
        let mut known = next_value(&mut output)?;
        Ok(Self {
            process,
            output,
            job: serde_json::from_value(known["job"].take())?,
            settings: serde_json::from_value(known["settings"].take())?,
        })
    }

    /// Ends it, and returns what has arrived.
    fn arrived(&mut self) -> Result<Value> {
        drop(self.process.stdin.take());
        next_value(&mut self.output)
    }
}

impl Drop for Terrakube {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        if let Err(error) = self.process.wait() {
            complain(&format!("the platform has not ended: {error}"));
        }
    }
}

fn next_value(output: &mut BufReader<ChildStdout>) -> Result<Value> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    serde_json::from_str(&line).context("`terrakube_job` has not printed what it should")
}

/// `VmHWM` in bytes; `None` after the end of the process.
fn high_water_mark(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

fn write_flood(path: &Path) -> Result<usize> {
    let mut file = BufWriter::new(fs::File::create(path)?);
    let (mut written, mut lines) = (0, 0);
    while written < OUTPUT_BYTES {
        let line = format!(
            "{lines:>9} terraform_data.item[{lines}]: Plan to create, and a tail to fill the line up\n"
        );
        file.write_all(line.as_bytes())?;
        written += line.len() as u64;
        lines += 1;
    }
    file.flush()?;
    Ok(lines)
}

/// A `terraform` whose plan prints a large output. Returns a `PATH` that begins with its folder.
fn pouring_tool(folder: &Path) -> Result<OsString> {
    let bin = folder.join("bin");
    fs::create_dir(&bin)?;
    let tool = bin.join("terraform");
    let flood = folder.join("flood").display().to_string();
    fs::write(&tool, TOOL.replace("@FLOOD@", &flood))?;
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755))?;
    let path = std::env::var_os("PATH").context("PATH is not set")?;
    let folders = std::iter::once(bin).chain(std::env::split_paths(&path));
    Ok(std::env::join_paths(folders)?)
}
