//! Measures the README's first command for a new user: from a clone without a target directory to an applied plan. Cargo's
//! downloads are in the cache already.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Deserializer, Value};

use crate::report::{Goal, Measurement};
use crate::terminal::{command_line, complain};
use crate::times::processor_seconds;
use crate::workspace_root;

/// How many crates are listed.
const SHOWN: usize = 12;

pub(super) fn measure() -> Result<Vec<Measurement>> {
    let target = crate::target_folder();
    fs::create_dir_all(&target)?;
    // The folder for temporary files is often in memory.
    let folder = tempfile::tempdir_in(target)?;
    let clone = folder.path().join("clone");
    let (started, before) = (Instant::now(), processor_seconds()?);
    super::run_stage_quietly(
        Command::new("git")
            .args(["clone", "--quiet"])
            .args([workspace_root(), &clone]),
    )?;
    let readme = fs::read_to_string(clone.join("README.md")).context("the clone has no README")?;
    let mut command = command(&readme).context("the README names no `cargo run`")?;
    command
        .args(["--auto-approve", "--data-dir"])
        .arg(folder.path().join("data"))
        .current_dir(&clone)
        .env("CARGO_TARGET_DIR", folder.path().join("target"))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    complain(&format!("==> {}", command_line(&command)));
    let output = command.output().context("could not start cargo")?;
    let shown = String::from_utf8_lossy(&output.stdout);
    complain(&shown);
    ensure!(
        output.status.success() && shown.contains("Apply complete!"),
        "the first command did not apply a plan ({})",
        output.status
    );
    let (wall, processor) = (
        started.elapsed().as_secs_f64(),
        processor_seconds()? - before,
    );
    let timings = folder.path().join("target/cargo-timings/cargo-timing.html");
    let crates = crates(&fs::read_to_string(&timings).context("cargo wrote no timings")?)?;
    let longest: Vec<_> = crates
        .iter()
        .take(SHOWN)
        .map(|(name, seconds)| format!("{name} {seconds:.1}"))
        .collect();
    Ok(vec![
        Measurement {
            name: "first run",
            value: wall,
            unit: "s",
            goal: Some(Goal::AtMost(120.0)),
            detail:
                "from a clone of the last commit to an applied plan; the goal is for 2 processors"
                    .to_owned(),
        },
        Measurement {
            name: "first run, processor time",
            value: processor,
            unit: "s",
            goal: None,
            detail: format!(
                "{} crates; seconds of the longest: {}",
                crates.len(),
                longest.join(", ")
            ),
        },
    ])
}

/// The first command of the README, with the option to record the build time of each crate.
fn command(readme: &str) -> Option<Command> {
    let line = readme
        .lines()
        .map(|line| line.trim_start_matches([' ', '$']))
        .find(|line| line.starts_with("cargo run "))?;
    let mut words = line.split_whitespace().skip(1);
    let mut command = super::cargo();
    command.args(words.next()).arg("--timings").args(words);
    Some(command)
}

/// The build time of each crate with its build script in seconds, longest first. It is wall-clock time, so crates that are
/// compiled at the same time slow each other down.
fn crates(timings: &str) -> Result<Vec<(String, f64)>> {
    let (_, units) = timings
        .split_once("UNIT_DATA = ")
        .context("cargo's timings hold no units")?;
    let units = Deserializer::from_str(units).into_iter::<Vec<Value>>();
    let units = units.take(1).next().context("cargo's timings end early")?;
    let mut crates = BTreeMap::new();
    for unit in units.context("cargo's timings cannot be read")? {
        let text = |key: &str| unit[key].as_str().unwrap_or_default().to_owned();
        let name = format!("{} {}", text("name"), text("version"));
        *crates.entry(name).or_insert(0.0) += unit["duration"].as_f64().unwrap_or_default();
    }
    let mut crates: Vec<_> = crates.into_iter().collect();
    crates.sort_by(|one, other| other.1.total_cmp(&one.1));
    Ok(crates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_command_of_the_readme_is_what_is_measured() {
        let readme = fs::read_to_string(workspace_root().join("README.md")).unwrap();
        let line = command_line(&command(&readme).unwrap());
        assert!(line.contains(" run --timings "), "{line}");
        assert!(line.ends_with(" run examples/hello"), "{line}");
        assert!(command("    cargo test\n").is_none());
    }

    #[test]
    fn the_first_command_compiles_nothing_that_only_a_platform_needs() {
        let mut tree = super::super::cargo();
        let options = "tree --locked --package api-launcher --no-default-features --edges normal,build --prefix none";
        tree.args(options.split(' '));
        let output = tree.current_dir(workspace_root()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let tree = String::from_utf8(output.stdout).unwrap();
        let crates: Vec<_> = tree
            .lines()
            .filter_map(|line| line.split(' ').next())
            .collect();
        assert!(crates.contains(&"executor"), "{tree}");
        for absent in [
            "h2",
            "jsonwebtoken",
            "k8s-openapi",
            "object_store",
            "pgp",
            "redis",
            "rsa",
            "serde-saphyr",
            "sqlx",
            "tracing-attributes",
            "zstd-sys",
        ] {
            assert!(
                !crates.contains(&absent),
                "{absent} is compiled: cargo tree -i {absent}"
            );
        }
    }

    #[test]
    fn a_crate_has_the_seconds_of_its_build_script_too() {
        let page = r#"<script>const UNIT_DATA = [
            {"name": "ring", "version": "1.0.0", "target": " build-script", "duration": 0.5},
            {"name": "kube", "version": "5.0.0", "target": "", "duration": 2.5},
            {"name": "ring", "version": "1.0.0", "target": "", "duration": 3.0}];
            const CPU_USAGE = [];</script>"#;
        let expected = [("ring 1.0.0", 3.5), ("kube 5.0.0", 2.5)];
        assert_eq!(
            crates(page).unwrap(),
            expected.map(|(name, seconds)| (name.to_owned(), seconds))
        );
        assert!(crates("<script></script>").is_err());
    }
}
