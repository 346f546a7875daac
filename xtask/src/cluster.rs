//! The control plane of Kubernetes beside a run of tests. Knows how one is started and handed to them; knows nothing of what the
//! tests do there.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::setup::kubernetes::Release;
use crate::target_folder;
use crate::terminal::{complain, say};

/// Names the kubeconfig of the cluster in which tests run (`test_cluster::kubeconfig`).
const CLUSTER: &str = "MAYFLY_TEST_CLUSTER";

/// What has a cluster in its environment.
pub(crate) type Environment<'a> = [(&'static str, &'a str); 1];

/// With this in their environment, processes find the cluster of a kubeconfig.
pub(crate) fn environment(kubeconfig: &str) -> Environment<'_> {
    [(CLUSTER, kubeconfig)]
}

/// The kubeconfig `KUBECONFIG` names, or `kubectl` would use.
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

/// What tests need, or nothing if they are skipped without it. In CI nothing is skipped.
pub(crate) fn unless_skipped<T>(what: &str, needed: Result<T>) -> Result<Option<T>> {
    match needed {
        Ok(needed) => Ok(Some(needed)),
        Err(error) if env::var_os("CI").is_none() => {
            complain(&format!("\n==> {what}: SKIPPED, {error:#}"));
            Ok(None)
        }
        Err(error) => Err(error.context("in CI nothing is skipped")),
    }
}

/// A running control plane; it ends with this value.
pub(crate) struct ControlPlane {
    process: Child,
    /// Its end is the control plane's.
    input: Option<ChildStdin>,
    pub(crate) kubeconfig: String,
}

impl ControlPlane {
    /// Starts one, once `build` has built `control-plane`. Nothing where `what` is skipped for want of its programs.
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
            "the control plane did not start; it has said why"
        );
        Ok(Some(plane))
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        drop(self.input.take());
        // It ends by itself now.
        let _ = self.process.wait();
    }
}
