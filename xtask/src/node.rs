//! `cargo xtask test node`: the journeys on a node with a real kubelet. Knows what that needs, and what it leaves on this
//! machine; knows nothing of how the node is started (`tests/node`) and of what the journeys do there.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::cluster::unless_skipped;
use crate::setup::kubernetes::Release;
use crate::setup::{self, Purpose};
use crate::suite;
use crate::target_folder;

/// What the names of its tests contain.
pub(crate) const TESTS: &str = "real_node::";
/// So the folder and the control groups of a node begin, before the number of the process that started it.
const NAME: &str = "mayfly-node-";
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";
/// Ends with everything that was started below it, even where this process is killed.
const NAMESPACES: [&str; 7] = [
    "--mount",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation=private",
];
/// The first process of a namespace must wait for all processes that lose their parents, as shells do.
const FIRST: &str = "\"$@\"; exit $?";

/// Runs the tests with a node of their own, which ends with them.
pub(crate) fn run(only: &[&str]) -> Result<()> {
    let Some(programs) = unless_skipped("node", programs())? else {
        return Ok(());
    };
    suite::build("node")?;
    let target = target_folder();
    let nodes = target.join("node");
    remove_remains(&nodes, |process| !Path::new("/proc").join(process).exists())?;
    let own = std::process::id().to_string();
    let folder = nodes.join(format!("{NAME}{own}"));
    let temporary = folder.join("tmp");
    fs::create_dir_all(&temporary)
        .with_context(|| format!("could not make `{}`", temporary.display()))?;
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
    let outcome = suite::run_tests_under(node, only);
    let removed = remove_remains(&nodes, |process| process == own);
    outcome.and(removed)
}

/// In the order of `real_node`'s arguments.
fn programs() -> Result<Vec<PathBuf>> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "a kubelet makes control groups and mounts, which only root may: run this as root"
    );
    setup::ensure(&[Purpose::Images, Purpose::Node])?;
    let mut programs = Release::NEWEST.programs()?;
    programs.extend(Release::NEWEST.programs_of_nodes()?);
    Ok(programs)
}

/// Removes what nodes have left that were started by processes like that. Their processes, mounts and networks are gone.
fn remove_remains(nodes: &Path, of: impl Fn(&str) -> bool) -> Result<()> {
    let is_left = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.and_then(|name| name.strip_prefix(NAME))
            .is_some_and(&of)
    };
    let mut groups = folders_in(Path::new(CONTROL_GROUPS))?;
    // Where there is one hierarchy, and where there are several.
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

/// A control group is removed without its files, and after those below it.
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
