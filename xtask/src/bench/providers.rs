//! Compares `init` of the executor with `init` of the tool alone, for three providers whose packages have 100 MB each. A registry of
//! the tests gives each connection 25 MB/s. Both sides run in turns.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use job_contract::progress::Phase;
use job_contract::report::FinalReport;
use job_contract::{StepType, env};

use super::executor::{ExecutorFolders, job, pack};
use super::pipeline::{ratio_of, run_tool_with};
use crate::report::Measurement;
use crate::setup;
use crate::terminal::complain;

const BALLAST_BYTES: u64 = 100_000_000;
const BYTES_PER_SECOND: u64 = 25_000_000;
/// The registry has them in these versions (`test_peers::providers`).
const PROVIDERS: [(&str, &str); 3] = [("null", "2.2.0"), ("random", "3.6.0"), ("time", "0.14.2")];
/// A cold `init` of the tool alone takes twelve seconds.
const MOST_RUNS: usize = 5;
const CERTIFICATES: &str = "SSL_CERT_FILE";
const LOCK_FILE: &str = ".terraform.lock.hcl";

pub(super) fn measure(binary: &Path, runs: usize) -> Result<Vec<Measurement>> {
    complain("==> init with three providers of 100 MB");
    setup::opentofu::ensure()?;
    let folder = tempfile::tempdir()?;
    let certificate = folder.path().join("ca.pem");
    let registry = Registry::start(&certificate)?;
    let bench = Bench {
        tool: which::which("terraform").context("`terraform` is not on PATH")?,
        binary: binary.to_owned(),
        certificate,
        module: module(&registry.host),
        archive: folder.path().join("content.tar.gz"),
        folder: folder.path().to_owned(),
    };
    bench.measure(runs.min(MOST_RUNS))
}

struct Bench {
    tool: PathBuf,
    binary: PathBuf,
    certificate: PathBuf,
    module: String,
    /// The module with its lock file.
    archive: PathBuf,
    folder: PathBuf,
}

impl Bench {
    fn measure(&self, runs: usize) -> Result<Vec<Measurement>> {
        let installed = self.folder.join("installed");
        fs::create_dir(&installed)?;
        fs::write(installed.join("main.tf"), &self.module)?;
        self.bare(&installed)?;
        let locked = self.folder.join("locked");
        fs::create_dir(&locked)?;
        for name in ["main.tf", LOCK_FILE] {
            fs::copy(installed.join(name), locked.join(name))?;
        }
        pack(&locked, &self.archive)?;
        let (mut cold, mut warm) = (Vec::new(), Vec::new());
        // Each side runs once before the measurement, so that both have warm caches.
        for run in 0..=runs {
            let empty = self.folder.join(format!("bare-{run}"));
            fs::create_dir(&empty)?;
            for name in ["main.tf", LOCK_FILE] {
                fs::copy(locked.join(name), empty.join(name))?;
            }
            let bare_cold = self.bare(&empty)?;
            let store = self.folder.join(format!("store-{run}"));
            let ours_cold = self.mayfly(&store, &format!("cold-{run}"))?;
            let copy = self.folder.join(format!("copy-{run}"));
            let floor = self.bare(&installed)? + copied(&installed.join(".terraform"), &copy)?;
            let ours_warm = self.mayfly(&store, &format!("warm-{run}"))?;
            for folder in [&empty, &store, &copy] {
                fs::remove_dir_all(folder)?;
            }
            if run > 0 {
                cold.push((ours_cold, bare_cold));
                warm.push((ours_warm, floor));
            }
        }
        Ok(vec![
            ratio_of("providers: empty store over init", 0.6, &cold),
            ratio_of("providers: copies over installed init and cp", 1.15, &warm),
        ])
    }

    /// Runs `init` of the tool alone.
    fn bare(&self, folder: &Path) -> Result<Duration> {
        let started = Instant::now();
        let certificate = [(CERTIFICATES, self.certificate.as_os_str())];
        run_tool_with(
            &self.tool,
            folder,
            &["init", "-input=false"],
            &[0],
            &certificate,
        )?;
        Ok(started.elapsed())
    }

    /// Plans with this store. Returns the time of the phase that provides the providers and runs `init`.
    fn mayfly(&self, store: &Path, name: &str) -> Result<Duration> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = ExecutorFolders::new(self.folder.join(name), path)?;
        let plan = job(StepType::Plan, &self.archive);
        folders.queue(&[&plan])?;
        let mut command = folders.command(&self.binary, &plan);
        command
            .env(CERTIFICATES, &self.certificate)
            .env(env::PROVIDER_CACHE_DIR, store);
        let status = command.status()?;
        let said = fs::read(folders.folder.join("termination"))?;
        folders.ensure_done(status)?;
        let report: FinalReport = serde_json::from_slice(&said)?;
        let init = report
            .phases
            .iter()
            .find(|timing| timing.phase == Phase::Init);
        let init = init.context("the final report names no `init`")?;
        fs::remove_dir_all(&folders.folder)?;
        Ok(Duration::from_millis(init.duration_ms))
    }
}

/// How long `cp` takes for a folder.
fn copied(from: &Path, to: &Path) -> Result<Duration> {
    let started = Instant::now();
    let status = Command::new("cp").arg("-r").arg(from).arg(to).status()?;
    ensure!(status.success(), "cp failed ({status})");
    Ok(started.elapsed())
}

fn module(host: &str) -> String {
    let providers = PROVIDERS.map(|(name, version)| {
        format!("    {name} = {{\n      source  = \"{host}/acme/{name}\"\n      version = \"{version}\"\n    }}\n")
    });
    format!(
        "terraform {{\n  required_providers {{\n{}  }}\n}}\n",
        providers.concat()
    )
}

/// The registry, which ends with this value.
struct Registry {
    process: Child,
    host: String,
}

impl Registry {
    fn start(certificate: &Path) -> Result<Self> {
        let built = super::build(&["--package", "test-peers", "--example", "provider_registry"])?;
        let mut process = Command::new(built.join("examples/provider_registry"))
            .arg(certificate)
            .args([BALLAST_BYTES.to_string(), BYTES_PER_SECOND.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = process.stdout.take().context("it has an output")?;
        let mut host = String::new();
        BufReader::new(output).read_line(&mut host)?;
        ensure!(!host.trim().is_empty(), "the registry has not started");
        Ok(Self {
            process,
            host: host.trim().to_owned(),
        })
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        if let Err(error) = self.process.wait() {
            complain(&format!("the registry has not ended: {error}"));
        }
    }
}
