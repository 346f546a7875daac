//! Time, silence and memory that run out: the tool is interrupted in time and what there is is kept.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context as _;
use integration_tests::{FakeTool, Repository, job};
use job_contract::keys::local_backend_state;
use job_contract::report::{StateStanding, StopReason};
use job_contract::{StepType, env};

use crate::site;

/// An apply that makes something, runs `then` and ends when it is interrupted.
fn stuck(site: &integration_tests::Site, then: &str) -> FakeTool {
    let state = site
        .data_dir()
        .join(local_backend_state(job::ORGANIZATION, job::WORKSPACE));
    FakeTool::new().on(
        "apply",
        &format!(
            r#"trap 'echo INT >> "$tool/signals"; echo interrupted; exit 1' INT
mkdir -p "$(dirname {0})"; echo '{{"version":4,"serial":1,"lineage":"x"}}' > {0}
echo made; {then}
sleep 1000 & while :; do wait; done"#,
            state.display()
        ),
    )
}

fn interrupted_for(reason: StopReason, setting: (&str, &str), words: &str) {
    let (site, repository) = (site(), Repository::fixture());
    let tool = stuck(&site, "true");
    let apply = job::step(StepType::Apply, &repository);
    site.queue(&[&apply]);
    let outcome = site
        .executor(&apply)
        .env("PATH", tool.path())
        .env(setting.0, setting.1)
        .run()
        .expect_code(1);

    assert_eq!(outcome.report().stopped, Some(reason), "{outcome}");
    assert!(outcome.log().contains(words), "{outcome}");
    let error = outcome.report().error.as_deref().unwrap();
    assert!(error.contains(words), "{error}");
    assert!(outcome.report().hint.is_some(), "{outcome}");
    assert_eq!(
        fs::read_to_string(tool.file("signals")).unwrap(),
        "INT\n",
        "one interrupt and no more"
    );
    assert_eq!(site.statuses(&apply), ("failed".into(), "failed".into()));
    assert_eq!(
        site.record(&apply).history.len(),
        1,
        "state was not kept\n{outcome}"
    );
    assert!(
        site.step_output(&apply).contains("interrupted"),
        "{outcome}"
    );
    assert!(outcome.left_behind.is_empty(), "{outcome}");
}

#[test]
fn a_run_that_is_not_done_by_its_deadline_is_interrupted_and_its_state_kept() {
    interrupted_for(
        StopReason::Deadline,
        (env::DEADLINE_SECONDS, "8"),
        "it was not done within 8s",
    );
}

#[test]
fn a_run_that_falls_silent_is_interrupted_and_its_state_kept() {
    interrupted_for(
        StopReason::Silence,
        (env::SILENCE_SECONDS, "8"),
        "nothing was heard of it for 8s",
    );
}

/// A control group with a memory limit, for one process tree.
struct MemoryGroup {
    folder: PathBuf,
    mib: u64,
}

impl MemoryGroup {
    /// `None` where this user may not make one, which is said. Whoever may, tests.
    #[track_caller]
    fn of(mib: u64) -> Option<Self> {
        match Self::make(mib) {
            Ok(group) => Some(group),
            Err(error) if nix::unistd::geteuid().is_root() => panic!("{error:#}"),
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "not tested, which takes root: {error:#}");
                None
            }
        }
    }

    fn make(mib: u64) -> anyhow::Result<Self> {
        // Tests of one process run side by side.
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let root = Path::new("/sys/fs/cgroup");
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("mayfly-test-{}-{number}", std::process::id());
        let (folder, limit) = if root.join("cgroup.controllers").exists() {
            (root.join(name), "memory.max")
        } else {
            (root.join("memory").join(name), "memory.limit_in_bytes")
        };
        fs::create_dir(&folder)
            .with_context(|| format!("no memory control group `{}`", folder.display()))?;
        let group = Self { folder, mib };
        let limit = group.folder.join(limit);
        fs::OpenOptions::new()
            .write(true)
            .open(&limit)
            .and_then(|mut file| write!(file, "{}", mib << 20))
            .with_context(|| format!("no limit on memory in `{}`", limit.display()))?;
        Ok(group)
    }

    /// A shell command that enters it and becomes what it is given.
    fn entrance(&self) -> String {
        format!(
            "echo $$ > '{}/cgroup.procs' && exec \"$@\"",
            self.folder.display()
        )
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Its processes have ended, or the test failed anyway.
        let _ = fs::remove_dir(&self.folder);
    }
}

#[test]
fn a_tool_that_fills_its_memory_is_interrupted_before_the_kernel_kills_it() {
    let Some(group) = MemoryGroup::of(160) else {
        return;
    };
    let (site, repository) = (site(), Repository::fixture());
    // In steps, as a provider does; 10 MiB are a string of so many letters.
    let tool = stuck(
        &site,
        r#"grown=(); ten=$(head -c 10485760 /dev/zero | tr '\0' x)
for i in {1..12}; do grown+=("$ten"); echo "grown to ${i}0 MiB"; sleep 0.3; done"#,
    );
    let apply = job::step(StepType::Apply, &repository);
    site.queue(&[&apply]);
    let outcome = site
        .executor(&apply)
        .env("PATH", tool.path())
        .wrapped_in(&["sh", "-c", &group.entrance(), "sh"])
        .run()
        .expect_code(1);

    assert_eq!(
        outcome.report().stopped,
        Some(StopReason::Memory),
        "{outcome}"
    );
    let log = outcome.log();
    let warned = log
        .find("at 80 % the tool is interrupted")
        .expect("a warning");
    let stopped = log.find("of memory were in use").expect("the reason");
    assert!(warned < stopped, "{outcome}");
    assert!(log.contains(&format!("of {} MiB", group.mib)), "{outcome}");
    assert_eq!(
        site.record(&apply).history.len(),
        1,
        "state was not kept\n{outcome}"
    );
    assert_eq!(site.statuses(&apply), ("failed".into(), "failed".into()));
}

#[test]
fn the_real_tool_is_interrupted_in_a_full_memory_and_saves_its_state() {
    let Some(group) = MemoryGroup::of(400) else {
        return;
    };
    let site = site();
    let grow = r#"grown=(); ten=$(head -c 10485760 /dev/zero | tr '\0' x)
      while :; do grown+=("$ten"); sleep 0.1; done"#;
    let repository = Repository::module(&format!(
        "resource \"terraform_data\" \"first\" {{\n  input = \"made\"\n}}\nresource \"terraform_data\" \
         \"second\" {{\n  depends_on = [terraform_data.first]\n  provisioner \"local-exec\" {{\n    \
         interpreter = [\"bash\", \"-c\"]\n    command     = <<-END\n      {grow}\n    END\n  }}\n}}\n"
    ));
    let apply = job::step(StepType::Apply, &repository);
    site.queue(&[&apply]);
    let outcome = site
        .executor(&apply)
        .wrapped_in(&["sh", "-c", &group.entrance(), "sh"])
        .run()
        .expect_code(1);

    let report = outcome.report();
    assert_eq!(report.stopped, Some(StopReason::Memory), "{outcome}");
    assert_eq!(report.state, Some(StateStanding::Stored), "{outcome}");
    assert_eq!(report.progress.as_ref().unwrap().applied, 1, "{outcome}");
    assert_eq!(
        outcome.log().matches("Interrupt received").count(),
        1,
        "{outcome}"
    );
    let resources = site.resources(&apply);
    assert!(resources.contains(&"terraform_data.first".to_owned()));
    assert_eq!(site.record(&apply).history.len(), 1, "{outcome}");
}
