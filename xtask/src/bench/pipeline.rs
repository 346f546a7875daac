//! Compares the whole pipeline with the tool alone: Mayfly's plan with `init` and `plan`, and its apply with `init` and `apply`
//! of a stored plan. Both sides run in turns, on a configuration for which the tool takes about half a second. Also compares
//! `api-launcher run` on the README's example with the commands that a person would type.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use job_contract::StepType;

use super::executor::{ExecutorFolders, job, pack};
use crate::report::{Goal, Measurement, median};
use crate::terminal::complain;
use crate::workspace_root;

const RESOURCES: usize = 20;
const PLAN: &str = "bench.tfplan";
/// How long each operation of the tool alone should take.
const TARGET: Duration = Duration::from_millis(500);
const TARGET_TOLERANCE: f64 = 0.15;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Plan,
    Apply,
}

pub(super) fn measure(binary: &Path, runs: usize) -> Result<Vec<Measurement>> {
    let folder = tempfile::tempdir()?;
    let tool = which::which("terraform").context("`terraform` is not on PATH")?;
    [
        (Operation::Plan, "plan over init + plan"),
        (Operation::Apply, "apply over init + apply"),
    ]
    .into_iter()
    .map(|(operation, name)| {
        let bench = Bench {
            tool: tool.clone(),
            binary: binary.to_owned(),
            folder: folder.path().join(name.replace(' ', "-")),
        };
        bench.compare(operation, name, runs)
    })
    .collect()
}

struct Bench {
    tool: PathBuf,
    binary: PathBuf,
    folder: PathBuf,
}

impl Bench {
    fn compare(
        &self,
        operation: Operation,
        name: &'static str,
        runs: usize,
    ) -> Result<Measurement> {
        let load = self.calibrate(operation)?;
        let module = self.folder.join("module");
        let archive = self.folder.join("content.tar.gz");
        write_module(&module, load)?;
        pack(&module, &archive)?;
        // Each side runs once before the measurement, so that both have warm caches.
        let mut pairs = Vec::new();
        for run in 0..=runs {
            let bare = self.bare(operation, load, &format!("bare-{run}"))?;
            let ours = self.mayfly(operation, &archive, &format!("mayfly-{run}"))?;
            if run > 0 {
                pairs.push((ours, bare));
            }
        }
        Ok(ratio_of(name, 1.10, &pairs))
    }

    /// Finds the amount of work for which the tool alone takes [`TARGET`].
    fn calibrate(&self, operation: Operation) -> Result<usize> {
        let mut load = 20;
        for attempt in 0..8 {
            let samples: Vec<_> = (0..5)
                .map(|run| self.bare(operation, load, &format!("calibrate-{attempt}-{run}")))
                .collect::<Result<_>>()?;
            // The fastest sample, because other work of the machine can only add time.
            let took = samples.iter().min().map_or(0.0, Duration::as_secs_f64);
            let floor = 0.1;
            let wanted = TARGET.as_secs_f64();
            complain(&format!(
                "calibrating: load {load} takes {:.0} ms",
                took * 1000.0
            ));
            if (took / wanted - 1.0).abs() <= TARGET_TOLERANCE {
                break;
            }
            let factor = ((wanted - floor) / (took - floor).max(0.02)).clamp(0.25, 4.0);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "a small positive number"
            )]
            let next = (load as f64 * factor).round() as usize;
            load = next.clamp(1, 1000);
        }
        Ok(load)
    }

    /// Runs the tool alone, as a person would in a fresh folder.
    fn bare(&self, operation: Operation, load: usize, name: &str) -> Result<Duration> {
        let folder = self.folder.join(name);
        write_module(&folder, load)?;
        let plan: &[&str] = &["plan", "-input=false", "-out", PLAN, "-detailed-exitcode"];
        if operation == Operation::Apply {
            let planned = self.folder.join(format!("{name}-planned"));
            write_module(&planned, load)?;
            self.tool(&planned, &["init", "-input=false"], &[0])?;
            self.tool(&planned, plan, &[2])?;
            fs::copy(planned.join(PLAN), folder.join(PLAN))?;
        }
        let started = Instant::now();
        self.tool(&folder, &["init", "-input=false"], &[0])?;
        match operation {
            Operation::Plan => self.tool(&folder, plan, &[2])?,
            Operation::Apply => self.tool(&folder, &["apply", "-input=false", PLAN], &[0])?,
        }
        Ok(started.elapsed())
    }

    fn tool(&self, folder: &Path, args: &[&str], expected: &[i32]) -> Result<()> {
        run_tool(&self.tool, folder, args, expected)
    }

    /// Measures one executor process from start to end. For an apply, the plan before is not measured.
    fn mayfly(&self, operation: Operation, archive: &Path, name: &str) -> Result<Duration> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = ExecutorFolders::new(self.folder.join(name), path)?;
        let plan = job(StepType::Plan, archive);
        let apply = job(StepType::Apply, archive);
        folders.queue(&[&plan, &apply])?;
        let planned = self.step(&folders, &plan)?;
        match operation {
            Operation::Plan => Ok(planned),
            Operation::Apply => self.step(&folders, &apply),
        }
    }

    fn step(&self, folders: &ExecutorFolders, job: &job_contract::JobData) -> Result<Duration> {
        let started = Instant::now();
        let status = folders.command(&self.binary, job).status()?;
        let elapsed = started.elapsed();
        folders.ensure_done(status)?;
        Ok(elapsed)
    }
}

fn run_tool(tool: &Path, folder: &Path, args: &[&str], expected: &[i32]) -> Result<()> {
    run_tool_with(tool, folder, args, expected, &[])
}

pub(super) fn run_tool_with(
    tool: &Path,
    folder: &Path,
    args: &[&str],
    expected: &[i32],
    variables: &[(&str, &OsStr)],
) -> Result<()> {
    let output = Command::new(tool)
        .args(args)
        .current_dir(folder)
        .env("TF_IN_AUTOMATION", "1")
        .env("CHECKPOINT_DISABLE", "1")
        .env_remove("TF_CLI_CONFIG_FILE")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .output()?;
    ensure!(
        output
            .status
            .code()
            .is_some_and(|code| expected.contains(&code)),
        "terraform {args:?} ended with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Compares `api-launcher run` on the README's example with `init`, `plan`, `init` and `apply`. Each run is a workspace of its
/// own in one data directory, as after the first run on a machine.
pub(super) fn measure_run(launcher: &Path, runs: usize) -> Result<Measurement> {
    let folder = tempfile::tempdir()?;
    let tool = which::which("terraform").context("`terraform` is not on PATH")?;
    let data = folder.path().join("data");
    let mut pairs = Vec::new();
    for run in 0..=runs {
        let [planned, applied, ours] =
            ["planned", "applied", "ours"].map(|name| folder.path().join(format!("{name}-{run}")));
        for module in [&planned, &applied, &ours] {
            fs::create_dir(module)?;
            let example = workspace_root().join("examples/hello/main.tf");
            fs::copy(example, module.join("main.tf"))?;
        }
        let bare = bare_run(&tool, &planned, &applied)?;
        let ours = launcher_run(launcher, &ours, &data)?;
        if run > 0 {
            pairs.push((ours, bare));
        }
    }
    Ok(ratio_of(
        "run over init + plan + init + apply",
        1.15,
        &pairs,
    ))
}

fn bare_run(tool: &Path, planned: &Path, applied: &Path) -> Result<Duration> {
    let plan = ["plan", "-input=false", "-out", PLAN, "-detailed-exitcode"];
    let started = Instant::now();
    run_tool(tool, planned, &["init", "-input=false"], &[0])?;
    run_tool(tool, planned, &plan, &[2])?;
    fs::copy(planned.join(PLAN), applied.join(PLAN))?;
    run_tool(tool, applied, &["init", "-input=false"], &[0])?;
    run_tool(tool, applied, &["apply", "-input=false", PLAN], &[0])?;
    Ok(started.elapsed())
}

fn launcher_run(launcher: &Path, module: &Path, data: &Path) -> Result<Duration> {
    let started = Instant::now();
    let output = Command::new(launcher)
        .arg("run")
        .arg(module)
        .args(["--auto-approve", "--data-dir"])
        .arg(data)
        .stdin(Stdio::null())
        .output()?;
    let elapsed = started.elapsed();
    ensure!(
        output.status.success(),
        "`run` ended with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(elapsed)
}

/// The median of the pairs' ratios. A short load of the machine slows down both sides of a pair.
pub(super) fn ratio_of(
    name: &'static str,
    goal: f64,
    pairs: &[(Duration, Duration)],
) -> Measurement {
    let seconds = |of: fn(&(Duration, Duration)) -> f64| pairs.iter().map(of).collect::<Vec<_>>();
    let ours = seconds(|(ours, _)| ours.as_secs_f64());
    let bare = seconds(|(_, bare)| bare.as_secs_f64());
    let ratios = seconds(|(ours, bare)| ours.as_secs_f64() / bare.as_secs_f64());
    Measurement {
        name,
        value: median(&ratios),
        unit: "ratio",
        goal: Some(Goal::AtMost(goal)),
        detail: format!(
            "median of {} interleaved pairs; medians {:.0} ms over {:.0} ms",
            pairs.len(),
            median(&ours) * 1000.0,
            median(&bare) * 1000.0
        ),
    }
}

/// Writes a module with a few resources, and with expensive expressions that plan and apply evaluate. Its time does not come
/// from the number of resources, as in real configurations.
fn write_module(folder: &Path, load: usize) -> Result<()> {
    fs::create_dir_all(folder)?;
    let module = format!(
        r#"locals {{
  work = length([for a in range({load}) : length([for b in range(1000) : sha256("${{a}} ${{b}}")])])
}}
resource "terraform_data" "item" {{
  count = {RESOURCES}
  input = "${{local.work}} ${{count.index}}"
}}
output "work" {{
  value = local.work
}}
"#
    );
    fs::write(folder.join("main.tf"), module)?;
    Ok(())
}
