//! Starts a control plane of Kubernetes for tests. Knows how to start it and pass it on, but not what the tests do.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::setup::kubernetes::Release;
use crate::skips::unless_skipped;
use crate::target_folder;
use crate::terminal::say;

/// The variable with the kubeconfig of the cluster in which tests run (`test_cluster::kubeconfig`).
const CLUSTER: &str = "MAYFLY_TEST_CLUSTER";

/// The environment that names a cluster.
pub(crate) type Environment<'a> = [(&'static str, &'a str); 1];

/// The environment with which processes find the cluster of a kubeconfig.
pub(crate) fn environment(kubeconfig: &str) -> Environment<'_> {
    [(CLUSTER, kubeconfig)]
}

/// The kubeconfig that `KUBECONFIG` names, or else the default of `kubectl`.
pub(crate) fn existing() -> Result<String> {
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
    Ok(kubeconfig.canonicalize()?.display().to_string())
}

/// A running control plane. Dropping it stops it.
pub(crate) struct ControlPlane {
    process: Child,
    /// The control plane stops when this input is closed.
    input: Option<ChildStdin>,
    pub(crate) kubeconfig: String,
}

impl ControlPlane {
    /// Starts a control plane of `release` after `build` has built `control-plane`. `None` if `what` is skipped because a program
    /// is missing.
    pub(crate) fn start(
        what: &str,
        release: Release,
        build: impl FnOnce() -> Result<()>,
    ) -> Result<Option<Self>> {
        let Some(programs) = unless_skipped(what, release.programs())? else {
            return Ok(None);
        };
        build()?;
        say(&format!(
            "\n==> control plane: Kubernetes {}",
            release.minor()
        ));
        let mut process = Command::new(target_folder().join("debug/control-plane"))
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
            "the control plane did not start; the cause is in its output above"
        );
        Ok(Some(plane))
    }

    /// Stops it. Fails if one of its programs ended before.
    pub(crate) fn end(mut self) -> Result<()> {
        drop(self.input.take());
        let status = self.process.wait()?;
        ensure!(
            status.success(),
            "the control plane ended before its tests ({status}); the cause is in its output above"
        );
        Ok(())
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        drop(self.input.take());
        // The closed input ends the process.
        let _ = self.process.wait();
    }
}
