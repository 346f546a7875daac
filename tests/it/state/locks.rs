//! Locks on the state: one that a dead tool left is released, one of another run is left alone and named.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use integration_tests::process::{Stream, ends};
use integration_tests::tool::program;
use integration_tests::{FakeTool, Repository, job};
use job_contract::report::{LockStatus, StateLock, StateStatus, StopReason};
use job_contract::{StepType, Tool, env};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_peers::wait::until_blocking;

use super::{Bucket, Journey, gated, lock_key, tool_at_the_gate};
use crate::machine;

with_both_tools! {
    the_lock_of_a_killed_tool_is_released_and_the_report_names_what_the_state_lacks,
    a_killed_tool_leaves_in_a_local_state_what_it_has_written,
    a_tool_that_ignores_interrupts_is_killed_and_its_lock_released,
    the_lock_of_a_killed_plan_is_released,
    a_lock_of_another_run_is_named_with_its_holder_and_left_alone,
    a_lock_that_may_be_another_ones_is_left_alone_and_named,
}

/// The tool keeps a remote state in memory for up to twenty seconds; what it made in that time dies with it.
fn the_lock_of_a_killed_tool_is_released_and_the_report_names_what_the_state_lacks(tool: Tool) {
    for signal in [Signal::SIGKILL, Signal::SIGSEGV] {
        let journey = Journey::planned(tool);
        let run = journey.executor().start();
        let process = tool_at_the_gate(&run);
        let locked = journey.bucket.lock().expect("a lock")["ID"].clone();
        kill(process, signal).unwrap();
        let outcome = run.wait().expect_code(1);

        assert!(journey.bucket.lock().is_none(), "still locked: {outcome}");
        let report = outcome.report();
        let lock = report.lock.as_ref().expect("the lock");
        assert_eq!(lock.status, LockStatus::Released, "{outcome}");
        assert_eq!(locked, lock.id.as_str());
        assert!(outcome.log().contains("It is released."), "{outcome}");
        assert_eq!(report.state, Some(StateStatus::Unknown), "{outcome}");
        let progress = report.progress.as_ref().unwrap();
        assert_eq!(progress.applied, 1, "{outcome}");
        assert_eq!(progress.unfinished, ["terraform_data.second"], "{outcome}");
        let words = "the state does not contain the last changes: terraform_data.first";
        assert!(outcome.error().contains(words), "{outcome}");
        assert!(
            report.hint.as_ref().unwrap().contains("import"),
            "{outcome}"
        );
    }
}

fn a_killed_tool_leaves_in_a_local_state_what_it_has_written(tool: Tool) {
    let machine = machine();
    let gate = machine.gate();
    let repository = gated(&gate);
    // Without a plan, and so without events: its lines tell as much.
    let apply = job::step_by(tool, StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let run = machine.executor(&apply).start();
    kill(tool_at_the_gate(&run), Signal::SIGKILL).unwrap();
    let outcome = run.wait().expect_code(1);
    assert_eq!(outcome.report().lock, None, "{outcome}");
    let progress = "the tool ended with signal SIGKILL: 1 of 3 changes was made, 1 was in progress \
                    (terraform_data.second), 1 was not begun";
    if tool == Tool::OpenTofu {
        // It keeps this state in memory too, and the backend has none.
        let lost = "the state does not contain the last changes: terraform_data.first";
        assert_eq!(outcome.error(), format!("{progress}; {lost}"), "{outcome}");
        assert_eq!(outcome.report().state, Some(StateStatus::Unknown));
        return;
    }
    assert_eq!(machine.resources(&apply), ["terraform_data.first"]);
    assert_eq!(machine.record(&apply).history.len(), 1, "{outcome}");
    let stored = format!("{progress}; the state is stored");
    assert_eq!(outcome.error(), stored, "{outcome}");
    assert_eq!(outcome.report().state, Some(StateStatus::Stored));
}

fn a_tool_that_ignores_interrupts_is_killed_and_its_lock_released(tool: Tool) {
    let journey = Journey::planned(tool);
    let executor = journey.executor().env(env::GRACE_PERIOD_SECONDS, "30");
    let run = executor.start();
    let process = tool_at_the_gate(&run);
    // It hears nothing any more, and can do nothing.
    kill(process, Signal::SIGSTOP).unwrap();
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);
    assert!(outcome.log().contains("signal SIGKILL"), "{outcome}");
    assert!(journey.bucket.lock().is_none(), "still locked: {outcome}");
    let report = outcome.report();
    let status = report.lock.as_ref().map(|lock| lock.status);
    assert_eq!(status, Some(LockStatus::Released), "{outcome}");
    assert_eq!(report.stopped, Some(StopReason::Signal));
    assert!(report.progress.is_some(), "{outcome}");
    assert!(ends(process), "{outcome}");
}

fn the_lock_of_a_killed_plan_is_released(tool: Tool) {
    let (bucket, machine) = (Bucket::new(), machine());
    let gate = machine.gate();
    // Read while planning, under the lock.
    let repository = Repository::module(&format!(
        "data \"terraform_remote_state\" \"waits\" {{\n  backend = \"local\"\n  config = {{\n    path = \"{}\"\n  \
         }}\n}}\nresource \"terraform_data\" \"first\" {{}}\n",
        gate.path().display()
    ));
    let plan = job::plan_by(tool, &repository);
    machine.queue(&[&plan]);
    let run = bucket.executor(&machine, &plan).start();
    run.running.wait_for(Stream::Stdout, "Refreshing...");
    assert!(bucket.lock().is_some());
    let process = child_of(run.running.pid());
    kill(process, Signal::SIGKILL).unwrap();
    let outcome = run.wait().expect_code(1);
    assert!(bucket.lock().is_none(), "still locked: {outcome}");
    let status = outcome.report().lock.as_ref().map(|lock| lock.status);
    assert_eq!(status, Some(LockStatus::Released), "{outcome}");
}

/// A crash ends with the code of a plan that has changes.
#[test]
fn after_a_plan_without_a_plan_file_its_lock_is_checked_and_a_failed_check_is_reported() {
    for (made, looked) in [("", true), ("echo plan > \"$out\"; ", false)] {
        let (machine, repository) = (machine(), Repository::fixture());
        let tool = FakeTool::new()
            .on("plan", &format!("{made}exit 2"))
            .on("untaint", "echo 'no route to the backend'; exit 1");
        let plan = job::plan(&repository);
        machine.queue(&[&plan]);
        let outcome = machine.executor(&plan).env("PATH", tool.path()).run();
        assert_eq!(tool.was_called("untaint"), looked, "{outcome}");
        for words in [
            "no route to the backend",
            "Whether the tool left its lock on the state is not known.",
        ] {
            assert_eq!(outcome.log().contains(words), looked, "{outcome}");
        }
    }
}

/// The one child of a process. Threads come and go, and what they had started goes to another.
fn child_of(parent: Pid) -> Pid {
    let child = until_blocking("one child", || {
        let tasks = fs::read_dir(format!("/proc/{parent}/task")).unwrap();
        let children = tasks.flatten().filter_map(|task| {
            let children = fs::read_to_string(task.path().join("children"));
            children.ok()
        });
        children.collect::<String>().trim().parse::<i32>()
    });
    Pid::from_raw(child)
}

fn a_lock_of_another_run_is_named_with_its_holder_and_left_alone(tool: Tool) {
    let holder = Journey::planned(tool);
    let run = holder.executor().start();
    tool_at_the_gate(&run);
    let locked = holder.bucket.lock().expect("a lock");
    let id = locked["ID"].as_str().unwrap();

    let machine = machine();
    let repository = Repository::fixture();
    // Each in a job of its own: a job whose plan has failed is not applied.
    for (job_id, step) in [
        ("11", StepType::Plan),
        ("12", StepType::Apply),
        ("13", StepType::Destroy),
    ] {
        let second = job::in_job(&job::step_by(tool, step, &repository), job_id);
        machine.queue(&[&second]);
        let outcome = holder
            .bucket
            .executor(&machine, &second)
            .run()
            .expect_code(1);

        let lock = outcome.report().lock.clone().expect("the lock");
        let StateLock { who, operation, .. } = &lock;
        assert_eq!(lock.status, LockStatus::InTheWay, "{outcome}");
        assert_eq!(
            (lock.id.as_str(), &**who),
            (id, locked["Who"].as_str().unwrap())
        );
        assert_eq!(operation, "OperationTypeApply");
        for words in [id, who.as_str(), "since 20", "nothing was changed"] {
            assert!(outcome.error().contains(words), "{words}: {outcome}");
        }
        let unlock = format!("`{} force-unlock {id}`", tool.binary());
        assert!(outcome.report().hint.as_ref().unwrap().contains(&unlock));
        assert!(outcome.log().contains(&unlock), "{outcome}");
        assert!(machine.record(&second).history.is_empty(), "{outcome}");
        assert_eq!(holder.bucket.lock().as_ref(), Some(&locked), "{outcome}");
    }
    holder.gate.open_blocking();
    run.wait().expect_code(0);
    assert!(holder.bucket.lock().is_none());
}

/// The tool dies before it has a lock, and another run on the same machine takes one meanwhile: all that can be seen
/// of that lock would fit the tool as well.
fn a_lock_that_may_be_another_ones_is_left_alone_and_named(tool: Tool) {
    let (bucket, machine, repository) = (Bucket::new(), machine(), Repository::fixture());
    let apply = job::step_by(tool, StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let bin = machine.scratch("bin");
    fs::create_dir(&bin).unwrap();
    let wrapper = bin.join(tool.binary());
    // Everything but the apply is done by the real tool.
    let script = format!(
        "#!/bin/bash\necho \"$1\" >> '{0}/calls'\n[ \"$1\" = apply ] || exec '{1}' \"$@\"\nmkfifo '{0}/gate'; echo \
         before-the-lock; read -r line < '{0}/gate'; kill -KILL $$\n",
        bin.display(),
        program(tool).unwrap().display(),
    );
    fs::write(&wrapper, script).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let run = bucket.executor(&machine, &apply).env("PATH", path).start();
    run.running.wait_for(Stream::Stdout, "before-the-lock");
    let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
    let now = String::from_utf8(
        Command::new("date")
            .args(["-u", "+%Y-%m-%dT%H:%M:%S.%NZ"])
            .output()
            .unwrap()
            .stdout,
    );
    let theirs = serde_json::json!({
        "ID": "7d0c51a6-0000-4000-8000-2f6f6a1f0001", "Operation": "OperationTypeApply", "Info": "",
        "Who": format!("root@{host}"), "Version": "1.9.8", "Created": now.unwrap().trim(), "Path": "p",
    });
    bucket.write(&lock_key(), theirs.to_string());
    fs::write(bin.join("gate"), "go\n").unwrap();
    let outcome = run.wait().expect_code(1);

    assert_eq!(bucket.lock(), Some(theirs), "{outcome}");
    let lock = outcome.report().lock.as_ref().expect("the lock");
    assert_eq!(lock.status, LockStatus::LeftBehind, "{outcome}");
    let calls = fs::read_to_string(bin.join("calls")).unwrap();
    assert!(calls.contains("untaint"), "{calls}");
    assert!(!calls.contains("force-unlock"), "{calls}");
    assert!(outcome.log().contains(&lock.id), "{outcome}");
    let hint = outcome.report().hint.as_ref().unwrap();
    assert!(hint.contains("force-unlock"), "{hint}");
}
