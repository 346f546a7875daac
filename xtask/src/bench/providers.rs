//! Compares `init` of the executor with `init` of the tool alone, for three providers whose packages have 100 MB each. A registry of
//! the tests gives each connection 25 MB/s. Both sides run in turns.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
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
/// Makes a store read-only for the program behind it, as the mount of a pod is. Only root can.
const READ_ONLY: [&str; 4] = [
    "--mount",
    "sh",
    "-ec",
    "mount --bind -o ro \"$0\" \"$0\" && exec \"$@\"",
];
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
        host: registry.host.clone(),
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
    /// Of the registry.
    host: String,
    folder: PathBuf,
}

/// How runs get what a store has.
#[derive(Clone, Copy, PartialEq)]
enum Uses {
    Copies,
    Links,
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
        let filled = self.folder.join("filled");
        self.fill(&filled)?;
        let (mut cold, mut warm, mut linked) = (Vec::new(), Vec::new(), Vec::new());
        // Each side runs once before the measurement, so that both have warm caches.
        for run in 0..=runs {
            let empty = self.folder.join(format!("bare-{run}"));
            fs::create_dir(&empty)?;
            for name in ["main.tf", LOCK_FILE] {
                fs::copy(locked.join(name), empty.join(name))?;
            }
            let bare_cold = self.bare(&empty)?;
            let store = self.folder.join(format!("store-{run}"));
            let ours_cold = self.mayfly(&store, &format!("cold-{run}"), Uses::Copies)?;
            let copy = self.folder.join(format!("copy-{run}"));
            let floor = self.bare(&installed)?;
            let with_copy = floor + copied(&installed.join(".terraform"), &copy)?;
            let ours_warm = self.mayfly(&store, &format!("warm-{run}"), Uses::Copies)?;
            let ours_linked = self.mayfly(&filled, &format!("linked-{run}"), Uses::Links)?;
            for folder in [&empty, &store, &copy] {
                fs::remove_dir_all(folder)?;
            }
            if run > 0 {
                cold.push((ours_cold, bare_cold));
                warm.push((ours_warm, with_copy));
                linked.push((ours_linked, floor));
            }
        }
        Ok(vec![
            ratio_of("providers: empty store over init", 0.6, &cold),
            ratio_of("providers: copies over installed init and cp", 1.15, &warm),
            ratio_of("providers: links over installed init", 1.15, &linked),
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

    /// Fills a store as a Job of the operator does, which also unpacks.
    fn fill(&self, store: &Path) -> Result<()> {
        let platform = format!("{}_{}", std::env::consts::OS, architecture()?);
        let packages = PROVIDERS
            .map(|(name, version)| format!("{}/acme/{name}/{version}/{platform}", self.host));
        fs::create_dir(store)?;
        let status = Command::new(&self.binary)
            .arg("fill")
            .args(packages)
            .env_clear()
            .env("HOME", &self.folder)
            .env(CERTIFICATES, &self.certificate)
            .env(env::PROVIDER_CACHE_DIR, store)
            .env(env::PROVIDER_CACHE_REGISTRIES, &self.host)
            .env(env::WORK_DIR, self.folder.join("filling"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        ensure!(status.success(), "`executor fill` failed ({status})");
        Ok(())
    }

    /// Plans with this store. Returns the time of the phase that provides the providers and runs `init`.
    fn mayfly(&self, store: &Path, name: &str, uses: Uses) -> Result<Duration> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = ExecutorFolders::new(self.folder.join(name), path)?;
        let plan = job(StepType::Plan, &self.archive);
        folders.queue(&[&plan])?;
        let mut command = match uses {
            Uses::Copies => folders.command(&self.binary, &plan),
            Uses::Links => {
                let mut command = folders.command(Path::new("unshare"), &plan);
                command.args(READ_ONLY).arg(store).arg(&self.binary);
                command.env(env::PROVIDER_CACHE_MODE, "fill");
                command
            }
        };
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

/// The processor, as registries name it.
fn architecture() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => bail!("the providers of the tests have no packages for {other}"),
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
