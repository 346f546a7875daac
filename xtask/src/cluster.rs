//! `cargo xtask test cluster`: the tests that need a cluster, against the control plane of Kubernetes. Knows how one is started
//! for a run of tests and handed to them; knows nothing of what the tests do there.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::setup::kubernetes;
use crate::suite;
use crate::terminal::say;
use crate::workspace_root;

/// Names the kubeconfig of the cluster in which tests run (`test_cluster::Target`).
const CLUSTER: &str = "MAYFLY_TEST_CLUSTER";
/// What the names of the tests contain that have a cluster.
const TESTS: [&str; 4] = ["kubernetes::", "terrakube::", "honest::", "pods::"];
/// What the names of those contain that are left to other stages.
const OTHERS: [&str; 1] = ["images::"];

/// Runs the tests with a control plane of their own, which ends with them.
pub(crate) fn run(only: &[&str]) -> Result<()> {
    let programs = match kubernetes::programs() {
        Ok(programs) => programs,
        Err(error) if env::var_os("CI").is_none() => {
            say(&format!("\n==> cluster: SKIPPED, {error:#}"));
            return Ok(());
        }
        Err(error) => return Err(error.context("in CI no test is skipped")),
    };
    let plane = ControlPlane::start(&programs)?;
    in_cluster(&plane.kubeconfig, only)
}

/// Runs the tests in the cluster `KUBECONFIG` names, or `kubectl` would use.
pub(crate) fn run_in_existing(only: &[&str]) -> Result<()> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty());
    let kubeconfig = match set("KUBECONFIG") {
        Some(kubeconfig) => PathBuf::from(kubeconfig),
        None => PathBuf::from(set("HOME").context("neither `KUBECONFIG` nor `HOME` is set")?)
            .join(".kube/config"),
    };
    ensure!(
        kubeconfig.is_file(),
        "`{}` is no kubeconfig: set `KUBECONFIG` to the one file that names the cluster",
        kubeconfig.display()
    );
    in_cluster(&kubeconfig.canonicalize()?.display().to_string(), only)
}

fn in_cluster(kubeconfig: &str, only: &[&str]) -> Result<()> {
    let tests = if only.is_empty() { &TESTS } else { only };
    suite::run_waiting_tests(tests, &OTHERS, &[(CLUSTER, kubeconfig)])
}

/// A running control plane; it ends with this value.
struct ControlPlane {
    process: Child,
    /// Its end is the control plane's.
    input: Option<ChildStdin>,
    kubeconfig: String,
}

impl ControlPlane {
    fn start(programs: &[PathBuf]) -> Result<Self> {
        suite::build("control plane")?;
        let target = env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| workspace_root().join("target"), PathBuf::from);
        let mut process = Command::new(target.join("debug/control-plane"))
            .args(programs)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("could not start `control-plane`")?;
        let input = process.stdin.take();
        let output = process.stdout.take();
        let mut plane = Self {
            process,
            input,
            kubeconfig: String::new(),
        };
        let mut line = String::new();
        BufReader::new(output.context("its output was asked for")?).read_line(&mut line)?;
        line.trim_end().clone_into(&mut plane.kubeconfig);
        ensure!(
            !plane.kubeconfig.is_empty(),
            "the control plane did not start; it has said why"
        );
        Ok(plane)
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        drop(self.input.take());
        // It ends by itself now.
        let _ = self.process.wait();
    }
}
