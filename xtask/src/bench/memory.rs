//! Measures the peak memory of the executor process while a tool prints 100 MB.

use std::fs;
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use job_contract::StepType;

use super::MEGABYTE;
use super::executor::{ExecutorFolders, job, pack};
use crate::report::{Goal, Measurement};
use crate::terminal::complain;

const OUTPUT_BYTES: usize = 100_000_000;
/// How often the kernel's peak value is read. It never falls, so the last value before the end misses only the last moments.
const INTERVAL: Duration = Duration::from_millis(5);

pub(super) fn measure(binary: &Path) -> Result<Measurement> {
    let folder = tempfile::tempdir()?;
    let (content, archive) = (
        folder.path().join("content"),
        folder.path().join("content.tar.gz"),
    );
    fs::create_dir(&content)?;
    fs::write(content.join("main.tf"), "")?;
    pack(&content, &archive)?;
    let lines = write_flood(&folder.path().join("flood"))?;
    let path = pouring_tool(folder.path())?;

    let folders = ExecutorFolders::new(folder.path().join("executor"), path)?;
    let plan = job(StepType::Plan, &archive);
    folders.queue(&[&plan])?;
    complain("==> peak memory with 100 MB of tool output");
    let started = std::time::Instant::now();
    let mut child = folders.command(binary, &plan).spawn()?;
    let mut peak = 0;
    let status = loop {
        if let Some(high_water) = high_water_mark(child.id()) {
            peak = peak.max(high_water);
        }
        if let Some(status) = child.try_wait()? {
            break status;
        }
        thread::sleep(INTERVAL);
    };
    folders.ensure_done(status)?;
    let stored = folders.step_output(&plan).metadata()?.len();
    ensure!(
        stored >= OUTPUT_BYTES as u64,
        "only {stored} bytes of the output were stored"
    );
    ensure!(
        peak > 0,
        "the executor's peak memory could not be read in /proc"
    );
    #[expect(
        clippy::cast_precision_loss,
        reason = "a process is far below 2^52 bytes"
    )]
    let megabytes = peak as f64 / MEGABYTE;
    Ok(Measurement {
        name: "executor peak memory",
        value: megabytes,
        unit: "MB",
        goal: Some(Goal::AtMost(25.0)),
        detail: format!("{lines} lines in {:.1} s", started.elapsed().as_secs_f64()),
    })
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
        written += line.len();
        lines += 1;
    }
    file.flush()?;
    Ok(lines)
}

/// A `terraform` whose plan prints a large output. Returns a `PATH` that begins with its folder.
fn pouring_tool(folder: &Path) -> Result<std::ffi::OsString> {
    let bin = folder.join("bin");
    fs::create_dir(&bin)?;
    let tool = bin.join("terraform");
    fs::write(
        &tool,
        format!(
            r#"#!/usr/bin/env bash
case "$1" in
version) echo '{{"terraform_version":"1.9.8","platform":"linux_amd64","provider_selections":{{}}}}' ;;
init) mkdir -p .terraform; path=$(sed -n 's/^    path = //p' terrakube_override.tf)
echo "{{\"version\":3,\"backend\":{{\"type\":\"local\",\"config\":{{\"path\":$path}}}}}}" > .terraform/terraform.tfstate ;;
plan) echo plan > terraformLibrary.tfPlan; cat '{}'; exit 2 ;;
show) [[ " $* " == *" -json "* ]] && echo '{{"format_version":"1.2","terraform_version":"1.9.8"}}' ;;
esac
exit 0
"#,
            folder.join("flood").display()
        ),
    )?;
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755))?;
    let path = std::env::var_os("PATH").context("PATH is not set")?;
    let folders = std::iter::once(bin).chain(std::env::split_paths(&path));
    Ok(std::env::join_paths(folders)?)
}
