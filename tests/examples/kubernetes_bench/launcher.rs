//! The launcher under measurement: `serve --target kubernetes`, as a process.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use integration_tests::Machine;
use job_contract::{JobData, env};
use nix::unistd::Pid;
use test_platform::Secret;
use test_platform::launcher::{self, Endpoint, Launcher};

use crate::server::{ApiServer, RUNS};

/// Whom the launcher tells how runs end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reports {
    /// Its log alone: nothing on disk slows a dispatch down.
    Nowhere,
    /// The local platform of the machine.
    ToRecords,
}

/// Starts a launcher beside an API server.
pub(crate) fn start(
    program: &str,
    server: &ApiServer,
    machine: &Machine,
    reports: Reports,
) -> Launcher {
    let mut command = launcher::command(program, &machine.scratch("home"));
    if reports == Reports::ToRecords {
        command.env(env::DATA_DIR, machine.data_dir());
    }
    launcher::serve(&mut command, "kubernetes")
        .env("KUBECONFIG", &server.kubeconfig)
        .env(env::INTERNAL_SECRET, Secret::long().text())
        .env(env::NAMESPACE, RUNS);
    Launcher::start(&mut command)
}

/// Posts a dispatch, which must be accepted.
pub(crate) async fn post(endpoint: &Endpoint, job: &JobData) -> Result<()> {
    let status = endpoint.post(job).await?;
    ensure!(status == 202, "a dispatch was answered {status}");
    Ok(())
}

/// A memory figure of the kernel, in bytes: `VmRSS` is resident now, `VmHWM` is the most that ever was.
pub(crate) fn memory_of(process: Pid, figure: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(figure));
    let kilobytes = line.and_then(|line| line.strip_prefix(':')?.trim().strip_suffix("kB"));
    let kilobytes: u64 = kilobytes.context("no such figure")?.trim().parse()?;
    Ok(kilobytes * 1024)
}
