//! Being told to stop: the tool is interrupted once, state is stored, the outcome is reported.

use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use integration_tests::process::{Stream, ends};
use integration_tests::{FakeTool, Repository, job};
use job_contract::keys::local_backend_state;
use job_contract::{JobData, StepType, env};
use nix::sys::signal::Signal;
use test_peers::wait::until_blocking;

use crate::machine;

#[test]
fn a_tool_that_ignores_interrupts_and_its_children_are_killed_at_the_end_of_the_grace_period() {
    let (machine, repository) = (machine(), Repository::fixture());
    let state = machine
        .data_dir()
        .join(local_backend_state(job::ORGANIZATION, job::WORKSPACE));
    let script = format!(
        r#"trap 'echo INT >> "$tool/signals"' INT; trap 'echo TERM >> "$tool/signals"' TERM
mkdir -p "$(dirname {0})"; echo '{{"version":4,"serial":1,"lineage":"x"}}' > {0}
sleep 1000 & echo $! > "$tool/child"; echo $$ > "$tool/self"; echo deaf
while :; do wait; done"#,
        state.display()
    );
    let tool = FakeTool::new().on("apply", &script);
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let run = machine
        .executor(&apply)
        .env("PATH", tool.path())
        .env(env::GRACE_PERIOD_SECONDS, "20")
        .start();
    run.running.wait_for(Stream::Stdout, "deaf");

    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);

    for name in ["child", "self"] {
        let pid = fs::read_to_string(tool.file(name)).unwrap();
        assert!(ends(pid.trim()), "{name} is still alive\n{outcome}");
    }
    assert_eq!(
        fs::read_to_string(tool.file("signals")).unwrap(),
        "INT\n",
        "one interrupt and no more"
    );
    assert_eq!(machine.statuses(&apply), ("failed".into(), "failed".into()));
    assert_eq!(machine.record(&apply).history.len(), 1, "{outcome}");
}

#[test]
fn a_signal_during_a_script_ends_the_run_before_the_tool() {
    let (machine, repository, tool) = (machine(), Repository::fixture(), FakeTool::new());
    let fifo = machine.scratch("gate");
    let apply = JobData {
        command_list: vec![job::before(job::bash(
            1,
            &format!("mkfifo {0}; echo in-script; exec cat {0}", fifo.display()),
        ))],
        ..job::step(StepType::Apply, &repository)
    };
    machine.queue(&[&apply]);
    let run = machine
        .executor(&apply)
        .env("PATH", tool.path())
        .env(env::GRACE_PERIOD_SECONDS, "60")
        .start();
    run.running.wait_for(Stream::Stdout, "in-script");
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);
    assert!(!tool.was_called("apply"), "{outcome}");
    assert_eq!(machine.statuses(&apply), ("failed".into(), "failed".into()));
}

#[test]
fn a_signal_while_files_of_the_repository_are_read_ends_the_run_without_waiting_for_them() {
    let (machine, repository, tool) = (machine(), Repository::fixture(), FakeTool::new());
    // Under so many names that reading them all takes far longer than the end of a run.
    let large = machine.scratch("large.tf");
    let values = (0..20_000).map(|n| format!("  value_{n} = [{n}]\n"));
    let text = format!("locals {{\n{}}}\n", values.collect::<String>());
    // Files are read in the order of their names.
    let last = machine.scratch("last.tf");
    for (file, text) in [(&large, text.as_str()), (&last, "locals {}\n")] {
        fs::write(file, text).unwrap();
        let never = FileTimes::new().set_accessed(UNIX_EPOCH);
        File::open(file).unwrap().set_times(never).unwrap();
    }
    let is_read = |file: &PathBuf| fs::metadata(file).unwrap().accessed().unwrap() != UNIX_EPOCH;
    let links = machine.scratch("links");
    fs::create_dir(&links).unwrap();
    for n in 0..1000 {
        symlink(&large, links.join(format!("large-{n}.tf"))).unwrap();
    }
    symlink(&last, links.join("last.tf")).unwrap();
    let copy = format!("cp -P '{}'/*.tf .", links.display());
    let apply = JobData {
        command_list: vec![job::before_init(job::bash(1, &copy))],
        variables: [("greeting".to_owned(), "hey".into())].into(),
        ..job::step(StepType::Apply, &repository)
    };
    machine.queue(&[&apply]);
    let run = machine.executor(&apply).env("PATH", tool.path()).start();
    until_blocking("one is read, and the file system tells", || is_read(&large));
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);
    assert!(!is_read(&last), "it waited for all files\n{outcome}");
    assert!(!tool.was_called("init"), "{outcome}");
    assert_eq!(machine.statuses(&apply), ("failed".into(), "failed".into()));
    assert_eq!(outcome.report().outcome, 143, "{outcome}");
}

#[test]
fn an_executor_stopped_before_its_claim_leaves_the_step_to_the_next() {
    let (machine, repository) = (machine(), Repository::fixture());
    let bin = machine.scratch("bin");
    fs::create_dir(&bin).unwrap();
    let (git, gate) = (bin.join("git"), machine.gate());
    // The first fetch never ends.
    let script = format!(
        "#!/bin/sh\nif mkdir '{0}/tried' 2>/dev/null; then exec cat '{1}'; fi\nPATH=\"${{PATH#*:}}\" exec git \"$@\"\n",
        bin.display(),
        gate.path().display(),
    );
    fs::write(&git, script).unwrap();
    fs::set_permissions(&git, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let plan = job::plan(&repository);
    machine.queue(&[&plan, &job::apply_after(&plan)]);

    let run = machine.executor(&plan).env("PATH", &path).start();
    let _at_the_gate = gate.reached();
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(75);

    assert_eq!(machine.statuses(&plan), ("queue".into(), "pending".into()));
    assert!(outcome.report().unreported, "{outcome}");
    assert!(outcome.error().contains("signal 15"), "{outcome}");
    assert!(!machine.data_dir().join("platform/claims").exists());
    machine
        .executor(&plan)
        .env("PATH", &path)
        .run()
        .expect_code(0);
    assert_eq!(
        machine.statuses(&plan),
        ("pending".into(), "completed".into())
    );
}

#[test]
fn a_signalled_plan_is_no_plan() {
    let (machine, repository) = (machine(), Repository::fixture());
    let fifo = machine.scratch("gate");
    let tool = FakeTool::new().on(
        "plan",
        &format!("echo plan > \"$out\"; mkfifo {0}; trap 'exit 1' INT; echo planning; read -r line <> {0} & wait", fifo.display()),
    );
    let plan = job::plan(&repository);
    machine.queue(&[&plan, &job::apply_after(&plan)]);
    let run = machine.executor(&plan).env("PATH", tool.path()).start();
    run.running.wait_for(Stream::Stdout, "planning");
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);
    assert_eq!(
        machine.statuses(&plan),
        ("failed".into(), "failed".into()),
        "{outcome}"
    );
    assert_eq!(machine.record(&plan).terraform_plan.unwrap_or_default(), "");
}
