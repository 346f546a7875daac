//! Time, silence and memory that run out: the tool is interrupted in time and what there is is kept.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use integration_tests::process::Stream;
use integration_tests::{FakeTool, Repository, job};
use job_contract::keys::local_backend_state;
use job_contract::report::{StateStatus, StopReason};
use job_contract::{StepType, env};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_peers::skips::needed;
use test_peers::wait::{DEADLINE, within_blocking};

use crate::machine;

/// How much time a run has is to end while the apply is at work, of which the test is. How long a run takes to come to
/// its apply is the machine's affair.
#[test]
fn a_run_that_falls_silent_is_interrupted_and_its_state_kept() {
    let at_work = [2, 4, 8, 16, 32, 64].into_iter().any(|seconds| {
        let (machine, repository) = (machine(), Repository::fixture());
        let tool = silent(&machine);
        let apply = job::step(StepType::Apply, &repository);
        machine.queue(&[&apply]);
        let outcome = machine
            .executor(&apply)
            .env("PATH", tool.path())
            .env(env::SILENCE_SECONDS, seconds.to_string())
            .run();
        if !outcome.log().contains("made\n") {
            return false;
        }
        let outcome = outcome.expect_code(1);

        let reason = Some(StopReason::Silence);
        assert_eq!(outcome.report().stopped, reason, "{outcome}");
        let words = format!("its log had no new line for {seconds}s");
        assert!(outcome.log().contains(&words), "{outcome}");
        assert!(outcome.error().contains(&words), "{outcome}");
        assert!(outcome.report().hint.is_some(), "{outcome}");
        assert_eq!(
            fs::read_to_string(tool.file("signals")).unwrap(),
            "INT\n",
            "one interrupt and no more"
        );
        assert_eq!(machine.statuses(&apply), ("failed".into(), "failed".into()));
        assert_eq!(
            machine.record(&apply).history.len(),
            1,
            "state was not kept\n{outcome}"
        );
        assert!(
            machine.step_output(&apply).contains("interrupted"),
            "{outcome}"
        );
        assert!(outcome.left_behind.is_empty(), "{outcome}");
        true
    });
    assert!(at_work, "no run came to its apply");
}

/// An apply that makes something, says no more, and ends when it is interrupted.
fn silent(machine: &integration_tests::Machine) -> FakeTool {
    let state = machine
        .data_dir()
        .join(local_backend_state(job::ORGANIZATION, job::WORKSPACE));
    FakeTool::new().on(
        "apply",
        &format!(
            r#"trap 'echo INT >> "$tool/signals"; echo interrupted; exit 1' INT
mkdir -p "$(dirname {0})"; echo '{{"version":4,"serial":1,"lineage":"x"}}' > {0}
echo made
sleep 1000 & while :; do wait; done"#,
            state.display()
        ),
    )
}

/// A control group with a memory limit, for one process tree.
pub(crate) struct MemoryGroup {
    folder: PathBuf,
    mib: u64,
    files: &'static MemoryFiles,
}

/// Names of one version of control groups: of the limit, of what is in use, and of what of that is page cache, and what
/// of it cannot be dropped.
struct MemoryFiles {
    limit: &'static str,
    usage: &'static str,
    cache: &'static str,
    shared: &'static str,
}

const V1: MemoryFiles = MemoryFiles {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: "total_cache",
    shared: "total_shmem",
};
const V2: MemoryFiles = MemoryFiles {
    limit: "memory.max",
    usage: "memory.current",
    cache: "file",
    shared: "shmem",
};

impl MemoryGroup {
    /// `None` where this user may not make one.
    #[track_caller]
    pub(crate) fn of(mib: u64) -> Option<Self> {
        let group = Self::make(mib);
        if nix::unistd::geteuid().is_root() {
            return Some(group.unwrap());
        }
        needed(
            group.map_err(|error| format!("making a memory control group takes root: {error:#}")),
        )
    }

    fn make(mib: u64) -> anyhow::Result<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let (parent, files) = if root.join("cgroup.controllers").exists() {
            (root.to_owned(), &V2)
        } else {
            (root.join("memory"), &V1)
        };
        // A name that no process has, and that no killed process has left behind.
        let folder = tempfile::Builder::new()
            .prefix("mayfly-test-")
            .tempdir_in(&parent)
            .with_context(|| format!("no memory control group in `{}`", parent.display()))?
            .keep();
        let group = Self { folder, mib, files };
        let limit = group.folder.join(files.limit);
        fs::OpenOptions::new()
            .write(true)
            .open(&limit)
            .and_then(|mut file| write!(file, "{}", mib << 20))
            .with_context(|| format!("no limit on memory in `{}`", limit.display()))?;
        Ok(group)
    }

    /// A shell command that enters it and becomes what it is given.
    pub(crate) fn entrance(&self) -> String {
        format!(
            "echo $$ > '{}/cgroup.procs' && exec \"$@\"",
            self.folder.display()
        )
    }

    /// A function of bash that takes memory until so many hundredths of the limit are in use, however fast the machine
    /// and however large its programs are. The rest is for what has to be done then.
    fn filler(&self) -> String {
        let MemoryFiles {
            usage,
            cache,
            shared,
            ..
        } = self.files;
        format!(
            r#"part=$(head -c 1048576 /dev/zero | tr '\0' x); taken=()
fill() {{
  local used name value cache shared
  while :; do
    read -r used < '{folder}/{usage}'
    while read -r name value; do
      case "$name" in {cache}) cache=$value ;; {shared}) shared=$value ;; esac
    done < '{folder}/memory.stat'
    [ $(((used - cache + shared) / ({mib} * 1048576 / 100))) -ge "$1" ] && return
    taken+=("$part")
  done
}}
"#,
            folder = self.folder.display(),
            mib = self.mib,
        )
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // If the test failed, processes may be left, which would fill their memory for ever.
        let left = fs::read_to_string(self.folder.join("cgroup.procs")).unwrap_or_default();
        for process in left.lines().filter_map(|line| line.parse().ok()) {
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
        let is_removed = || fs::remove_dir(&self.folder);
        let _ = within_blocking(DEADLINE, "the group has no process", is_removed);
    }
}

#[test]
fn the_real_tool_is_interrupted_in_a_full_memory_and_saves_its_state() {
    let Some(group) = MemoryGroup::of(400) else {
        return;
    };
    let machine = machine();
    let gate = machine.gate();
    let fills = machine.scratch("fills.sh");
    let script = format!(
        "{}fill 74; {}; fill 84; while :; do sleep 0.1; done\n",
        group.filler(),
        gate.words()
    );
    fs::write(&fills, script).unwrap();
    let repository = Repository::module(&format!(
        "resource \"terraform_data\" \"first\" {{\n  input = \"made\"\n}}\nresource \"terraform_data\" \
         \"second\" {{\n  depends_on = [terraform_data.first]\n  provisioner \"local-exec\" {{\n    \
         command = \"exec bash '{}'\"\n  }}\n}}\n",
        fills.display()
    ));
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let run = machine
        .executor(&apply)
        .wrapped_in(&["sh", "-c", &group.entrance(), "sh"])
        .start();
    let warning = "at 80 % the tool is interrupted";
    run.running.wait_for(Stream::Stdout, warning);
    gate.open_blocking();
    let outcome = run.wait().expect_code(1);

    let log = outcome.log();
    let warned = log.find(warning).expect("a warning");
    let stopped = log.find("of memory were in use").expect("the reason");
    assert!(warned < stopped, "{outcome}");
    assert!(log.contains(&format!("of {} MiB", group.mib)), "{outcome}");
    assert_eq!(machine.statuses(&apply), ("failed".into(), "failed".into()));
    let report = outcome.report();
    assert_eq!(report.stopped, Some(StopReason::Memory), "{outcome}");
    assert_eq!(report.state, Some(StateStatus::Stored), "{outcome}");
    assert_eq!(report.progress.as_ref().unwrap().applied, 1, "{outcome}");
    assert_eq!(
        outcome.log().matches("Interrupt received").count(),
        1,
        "{outcome}"
    );
    let resources = machine.resources(&apply);
    assert!(resources.contains(&"terraform_data.first".to_owned()));
    assert_eq!(machine.record(&apply).history.len(), 1, "{outcome}");
}
