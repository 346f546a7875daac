//! The launcher under measurement: `serve --target kubernetes`, as a process.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use integration_tests::Machine;
use integration_tests::process::{Running, Stream};
use job_contract::{JobData, env};
use nix::unistd::Pid;
use serde_json::Value;
use test_peers::wait::DEADLINE;
use test_platform::Secret;

use crate::server::{ApiServer, RUNS};

/// Whom the launcher tells how runs end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reports {
    /// Its log alone: nothing on disk slows a dispatch down.
    Nowhere,
    /// The local platform of the machine.
    ToRecords,
}

/// A launcher; killed when dropped.
pub(crate) struct Launcher {
    pub(crate) running: Running,
    endpoint: Endpoint,
}

/// Where it takes dispatches.
#[derive(Clone)]
pub(crate) struct Endpoint {
    url: String,
    token: String,
    client: reqwest::Client,
}

impl Launcher {
    /// Starts it beside an API server.
    pub(crate) fn start(
        program: &str,
        server: &ApiServer,
        machine: &Machine,
        reports: Reports,
    ) -> Result<Self> {
        let secret = Secret::long().text();
        let mut command = Command::new(program);
        command.env_clear();
        if reports == Reports::ToRecords {
            command.env(env::DATA_DIR, machine.data_dir());
        }
        let running = Running::start(
            command
                .args(["serve", "--target", "kubernetes"])
                .env("HOME", machine.scratch("home"))
                .env("KUBECONFIG", &server.kubeconfig)
                .env(env::INTERNAL_SECRET, secret)
                .env(env::LISTEN, "127.0.0.1:0")
                .env(env::LOG_FORMAT, "json")
                .env(env::NAMESPACE, RUNS),
        );
        let line = running.line_with(Stream::Stderr, "\"listening\"");
        let line: Value = serde_json::from_str(&line)?;
        let address = line["address"]
            .as_str()
            .context("the launcher did not say where it listens")?;
        Ok(Self {
            running,
            endpoint: Endpoint {
                url: format!("http://{address}/api/v1/terraform-rs"),
                // Good for the whole bench.
                token: Secret::long().dispatch_token(Duration::from_hours(24)),
                client: reqwest::Client::builder()
                    .no_proxy()
                    .timeout(DEADLINE)
                    .build()?,
            },
        })
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        self.endpoint.clone()
    }

    pub(crate) fn memory(&self, figure: &str) -> Result<u64> {
        memory_of(self.running.pid(), figure)
    }
}

/// A memory figure of the kernel, in bytes: `VmRSS` is resident now, `VmHWM` is the most that ever was.
pub(crate) fn memory_of(process: Pid, figure: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(figure));
    let kilobytes = line.and_then(|line| line.strip_prefix(':')?.trim().strip_suffix("kB"));
    let kilobytes: u64 = kilobytes.context("no such figure")?.trim().parse()?;
    Ok(kilobytes * 1024)
}

impl Endpoint {
    /// Posts a dispatch, which must be accepted.
    pub(crate) async fn post(&self, job: &JobData) -> Result<()> {
        let request = self
            .client
            .post(&self.url)
            .bearer_auth(&self.token)
            .header("content-type", "application/json")
            .body(serde_json::to_string(job)?);
        let status = request.send().await?.status();
        ensure!(status.as_u16() == 202, "a dispatch was answered {status}");
        Ok(())
    }
}
