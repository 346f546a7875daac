//! `cargo xtask test node`: the journeys on a node with a real kubelet. Knows what a node needs and leaves on this machine, but
//! not how it is started (`tests/cluster/src/node`) or what the journeys do.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::setup::kubernetes::Release;
use crate::setup::{self, Purpose};
use crate::skips::unless_skipped;
use crate::suite::{self, Selection};
use crate::target_folder;
use crate::times::{self, Part};

/// The part that the names of its tests contain.
pub(crate) const TESTS: &str = "real_node::";
/// Prefix of a node's folder and control groups. The id of the process that started the node follows.
const NAME: &str = "mayfly-node-";
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";
/// Namespaces for the node. All processes in them end with the first one, also if this process is killed.
const NAMESPACES: [&str; 7] = [
    "--mount",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation=private",
];
/// The first process of the namespace: a shell, because it must reap processes without a parent.
const FIRST: &str = "\"$@\"; exit $?";

/// Runs the tests with their own node, and stops it after them.
pub(crate) fn run(only: &[&str]) -> Result<()> {
    let programs = times::spent(Part::SetUp, || unless_skipped("node", programs()))?;
    let Some(programs) = programs else {
        return Ok(());
    };
    suite::build()?;
    let target = target_folder();
    let nodes = target.join("node");
    remove_remains(&nodes, |process| !Path::new("/proc").join(process).exists())?;
    let own = std::process::id().to_string();
    let folder = nodes.join(format!("{NAME}{own}"));
    let temporary = folder.join("tmp");
    fs::create_dir_all(&temporary)
        .with_context(|| format!("could not create `{}`", temporary.display()))?;
    let node = || {
        let mut command = Command::new("unshare");
        command
            .args(NAMESPACES)
            .args(["sh", "-c", FIRST, "sh"])
            .arg(target.join("debug/real_node"))
            .args([&folder, &nodes.join("images")])
            .args(&programs)
            .env("TMPDIR", &temporary);
        command
    };
    let only = if only.is_empty() { &[TESTS] } else { only };
    let outcome = suite::run_tests(&Selection {
        only,
        wait: true,
        under: Some(&node),
        ..Selection::default()
    });
    let removed = remove_remains(&nodes, |process| process == own);
    outcome.and(removed)
}

/// The programs of a node, in the order of `real_node`'s arguments.
fn programs() -> Result<Vec<PathBuf>> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "a kubelet creates control groups and mounts, which needs root: run this as root"
    );
    setup::ensure(&[Purpose::Tests, Purpose::Images, Purpose::Node])?;
    let mut programs = Release::NEWEST.programs()?;
    programs.extend(Release::NEWEST.programs_of_nodes()?);
    Ok(programs)
}

/// Removes the folders and control groups of ended nodes. `of` selects the processes that started the nodes. The nodes' own
/// processes, mounts and networks do not exist any more.
fn remove_remains(nodes: &Path, of: impl Fn(&str) -> bool) -> Result<()> {
    let is_left = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.and_then(|name| name.strip_prefix(NAME))
            .is_some_and(&of)
    };
    let mut groups = folders_in(Path::new(CONTROL_GROUPS))?;
    // Control groups have one hierarchy (v2) or several (v1).
    groups.push(PathBuf::from(CONTROL_GROUPS));
    for hierarchy in groups {
        for group in folders_in(&hierarchy)?.iter().filter(|path| is_left(path)) {
            remove_groups(group)
                .with_context(|| format!("could not remove `{}`", group.display()))?;
        }
    }
    for folder in folders_in(nodes)?.iter().filter(|path| is_left(path)) {
        fs::remove_dir_all(folder)
            .with_context(|| format!("could not remove `{}`", folder.display()))?;
    }
    Ok(())
}

/// Removes a control group after the groups below it. The kernel removes its files.
fn remove_groups(group: &Path) -> io::Result<()> {
    for below in folders_in(group)? {
        remove_groups(&below)?;
    }
    fs::remove_dir(group)
}

fn folders_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_run_left_is_removed_and_what_others_use_is_not() {
        let nodes = tempfile::tempdir().unwrap();
        for name in ["mayfly-node-1/tmp", "mayfly-node-2/tmp", "images"] {
            fs::create_dir_all(nodes.path().join(name)).unwrap();
        }
        remove_remains(nodes.path(), |process| process == "1").unwrap();
        let mut left = folders_in(nodes.path()).unwrap();
        left.sort();
        assert_eq!(
            left,
            ["images", "mayfly-node-2"].map(|name| nodes.path().join(name))
        );
    }
}
