//! The programs that are not ours: where they are, and how they are run.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// Helm: the one `HELM` names, else what `cargo xtask setup` installs, else the one on `PATH`.
pub fn helm() -> Command {
    if let Some(named) = std::env::var_os("HELM").filter(|named| !named.is_empty()) {
        return Command::new(named);
    }
    let installed = installed("chart/bin/helm");
    if installed.exists() {
        return Command::new(installed);
    }
    Command::new("helm")
}

/// A Python program from the environment `cargo xtask setup` makes.
pub fn python(path: &str) -> Command {
    Command::new(installed(path))
}

/// `kubectl`, where there is one.
pub fn kubectl() -> Option<PathBuf> {
    which::which("kubectl").ok()
}

/// What reads the rules of Prometheus: the one `cargo xtask setup` installs, else the one on `PATH`.
pub fn promtool() -> Command {
    let installed = installed("prometheus/bin/promtool");
    Command::new(if installed.exists() {
        installed
    } else {
        PathBuf::from("promtool")
    })
}

/// The definitions of the Prometheus operator's kinds, where `cargo xtask test cluster` has linked them.
pub fn operator() -> Result<PathBuf, &'static str> {
    let folder = installed("prometheus-operator");
    let found = folder.is_dir().then_some(folder);
    found.ok_or(
        "no definitions of the Prometheus operator's kinds: `cargo xtask test cluster` gets them",
    )
}

fn installed(path: &str) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| crate::root().join("target"), PathBuf::from);
    target.join("peers").join(path)
}

/// Runs a program to its end. Panics with one line when it is not there.
pub fn output(command: &mut Command) -> Output {
    command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| {
            let program = command.get_program().to_string_lossy();
            panic!("{program} does not start ({error}): `cargo xtask setup` installs it, and HELM may name a Helm 3")
        })
}

/// Runs a program that must succeed, and returns its standard output.
#[track_caller]
pub fn told(command: &mut Command) -> String {
    let output = output(command);
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{stdout}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    stdout
}

/// Helm with these arguments, and nothing of the user's own.
pub fn helm_with<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Command {
    let mut command = helm();
    for name in [
        "HELM_NAMESPACE",
        "HELM_KUBECONTEXT",
        "KUBECONFIG",
        "HELM_DEBUG",
    ] {
        command.env_remove(name);
    }
    command.args(args);
    command
}
