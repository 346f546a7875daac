//! An operation that is stopped in the middle saves its state and says how far it came.

use integration_tests::job;
use integration_tests::process::Stream;
use job_contract::report::{StateStatus, StopReason};
use job_contract::status::JobStatus;
use job_contract::{StepType, Tool, env};
use nix::sys::signal::{Signal, killpg};

use super::{AT_THE_GATE, Bucket, Journey, assert_interrupted_once, gated_when, tool_at_the_gate};
use crate::machine;

with_both_tools! {
    an_apply_that_gets_sigterm_saves_its_state_and_reports_its_changes,
    the_tool_is_interrupted_once_however_many_signals_arrive,
    an_apply_that_is_not_done_by_its_deadline_saves_its_state,
    an_apply_whose_job_is_cancelled_saves_its_state,
    an_interrupted_destroy_keeps_what_it_has_not_destroyed,
    an_executor_that_gets_sigterm_reports_in_time_though_the_store_hangs,
}

fn an_apply_that_gets_sigterm_saves_its_state_and_reports_its_changes(tool: Tool) {
    let journey = Journey::planned(tool);
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);
    assert_interrupted_once(&outcome);
    journey.assert_saved(&outcome);
    let beginning = "stopped by signal 15 before it was done: 1 of 3 changes was made";
    assert!(outcome.error().starts_with(beginning), "{outcome}");
}

/// As where the whole container gets the signal, and where a person sends it again.
fn the_tool_is_interrupted_once_however_many_signals_arrive(tool: Tool) {
    let journey = Journey::planned(tool);
    // A group of its own, as a container has, which the test is no part of.
    let run = journey.executor().wrapped_in(&["setsid"]).start();
    tool_at_the_gate(&run);
    for _ in 0..3 {
        killpg(run.running.pid(), Signal::SIGTERM).unwrap();
    }
    let outcome = run.wait().expect_code(143);
    assert_interrupted_once(&outcome);
    journey.assert_saved(&outcome);
}

/// The deadline is to come while the tool is at the gate. How long it takes to be there is the machine's affair.
fn an_apply_that_is_not_done_by_its_deadline_saves_its_state(tool: Tool) {
    let in_time = [5, 10, 20, 40, 80].into_iter().any(|seconds| {
        let journey = Journey::planned(tool);
        let deadline = seconds.to_string();
        let run = journey.executor().env(env::DEADLINE_SECONDS, deadline);
        let run = run.start();
        let came_to_its_gate = run.running.shows(Stream::Stdout, AT_THE_GATE);
        let outcome = run.wait().expect_code(1);
        assert_eq!(outcome.report().stopped, Some(StopReason::Deadline));
        if came_to_its_gate {
            let words = format!("it did not end within {seconds}s");
            assert!(outcome.log().contains(&words), "{outcome}");
            assert!(outcome.error().contains(&words), "{outcome}");
            assert!(outcome.report().hint.is_some(), "{outcome}");
            assert_interrupted_once(&outcome);
            journey.assert_saved(&outcome);
        }
        came_to_its_gate
    });
    assert!(in_time, "it never came to its gate");
}

fn an_apply_whose_job_is_cancelled_saves_its_state(tool: Tool) {
    let journey = Journey::planned(tool);
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    journey
        .machine
        .set_status(&journey.apply, JobStatus::Cancelled);
    let outcome = run.wait();
    assert_eq!(outcome.report().stopped, Some(StopReason::Cancelled));
    assert_interrupted_once(&outcome);
    journey.assert_saved(&outcome);
}

fn an_interrupted_destroy_keeps_what_it_has_not_destroyed(tool: Tool) {
    let (bucket, machine) = (Bucket::new(), machine());
    let gate = machine.gate();
    let repository = gated_when(&gate, "when = destroy\n");
    let apply = job::step_by(tool, StepType::Apply, &repository);
    machine.queue(&[&apply]);
    bucket.executor(&machine, &apply).run().expect_code(0);
    let destroy = job::in_job(&job::step_by(tool, StepType::Destroy, &repository), "413");
    machine.queue(&[&destroy]);

    let run = bucket.executor(&machine, &destroy).start();
    tool_at_the_gate(&run);
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);

    assert_interrupted_once(&outcome);
    let mut resources = bucket.resources();
    resources.sort();
    assert_eq!(resources, ["first", "second"], "{outcome}");
    assert!(bucket.lock().is_none(), "{outcome}");
    let report = outcome.report();
    assert_eq!(report.state, Some(StateStatus::Stored), "{outcome}");
    let progress = report.progress.as_ref().unwrap();
    assert_eq!((progress.applied, progress.not_begun), (1, Some(1)));
    let words = "1 was not begun; the state is stored";
    assert!(outcome.error().contains(words), "{outcome}");
}

/// It takes the copy of the state and the log, and never answers.
fn an_executor_that_gets_sigterm_reports_in_time_though_the_store_hangs(tool: Tool) {
    let journey = Journey::planned(tool);
    let executor = journey.executor();
    let run = executor.env(env::GRACE_PERIOD_SECONDS, "30").start();
    tool_at_the_gate(&run);
    let endpoint = &journey.bucket.endpoint;
    let copy = endpoint.hold("PUT", |path| path.ends_with(".raw.json"));
    let log = endpoint.hold("PUT", |path| path.ends_with(".tfoutput"));
    run.running.signal(Signal::SIGTERM);
    copy.wait();
    let outcome = run.wait().expect_code(143);
    log.wait();
    let report = outcome.report();
    assert_eq!(report.state, Some(StateStatus::Stored), "{outcome}");
    let words = "no copy of it is published: the object store did not take it in time";
    assert!(outcome.error().contains(words), "{outcome}");
    assert_eq!(
        journey.machine.statuses(&journey.apply),
        ("failed".into(), "failed".into())
    );
}
