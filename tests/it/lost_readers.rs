//! Readers of a run that leave before its end: of the executor's standard output and standard error, and a launcher that is killed.
//! The tool ends by itself, its state is stored, and the outcome is reported.

use integration_tests::process::Running;
use integration_tests::{Gate, Machine, Repository, job};
use job_contract::progress::Phase;
use job_contract::{JobData, StepType};

use crate::{laptop, machine};

/// The phases of an apply in which diagnostics are written.
const PHASES: [Phase; 7] = [
    Phase::Workspace,
    Phase::Tool,
    Phase::Claim,
    Phase::Init,
    Phase::Apply,
    Phase::State,
    Phase::Report,
];

/// What diagnostics say of a phase.
fn words_of(phase: Phase) -> String {
    format!("\"phase\":\"{}\"", phase.name())
}

#[track_caller]
fn assert_applied(machine: &Machine, apply: &JobData, case: &str) {
    assert_eq!(
        machine.statuses(apply),
        ("completed".into(), "completed".into()),
        "{case}"
    );
    assert_eq!(machine.resources(apply), ["terraform_data.greeting"]);
    assert_eq!(machine.record(apply).history.len(), 1, "{case}");
    let stored = machine.step_output(apply);
    assert!(stored.contains("Apply complete!"), "{case}\n{stored}");
}

#[test]
fn a_plan_and_its_apply_complete_without_readers() {
    for streams in [
        "1>gone",
        "2>gone",
        "1>gone 2>gone",
        "2>/dev/full",
        "1>&- 2>&-",
    ] {
        let (machine, repository) = (machine(), Repository::fixture());
        let plan = job::plan(&repository);
        let apply = job::apply_after(&plan);
        machine.queue(&[&plan, &apply]);
        // The shell is the only reader of the pipe.
        let shell = format!("mkfifo gone; exec 3<>gone; exec {streams} 3>&-; rm gone; exec \"$0\"");
        for step in [&plan, &apply] {
            let run = machine.executor(step);
            let run = run.wrapped_in(&["bash", "-c", &shell]);
            run.run().expect_code(0);
        }
        assert_applied(&machine, &apply, streams);
    }
}

#[test]
fn readers_may_leave_in_any_phase() {
    let (machine, repository) = (machine(), Repository::fixture());
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let outcome = machine.run(&apply).expect_code(0);
    let said = &outcome.finished.stderr;
    let of_diagnostics = PHASES.map(|phase| (2, words_of(phase)));
    for (_, words) in &of_diagnostics {
        assert!(said.contains(words), "{words}\n{outcome}");
    }
    let of_log = ["Creating...", "Apply complete!"].map(|words| (1, words.to_owned()));
    for (stream, words) in of_diagnostics.into_iter().chain(of_log) {
        let machine = crate::machine();
        machine.queue(&[&apply]);
        // The reader leaves when it has read these words.
        let reader = format!("exec grep --quiet --fixed-strings '{words}' > /dev/null 2>&1");
        let shell = format!("exec {stream}> >({reader}); exec \"$0\"");
        let run = machine.executor(&apply);
        let run = run.wrapped_in(&["bash", "-c", &shell]);
        run.run().expect_code(0);
        assert_applied(&machine, &apply, &words);
    }
}

#[test]
fn an_apply_outlives_its_launcher() {
    let laptop = laptop("");
    let gate = Gate::new(laptop.home().join("gate"));
    laptop.write("stack/main.tf", &gate.module());
    let args = ["run", "stack", "--auto-approve"];
    let first = Running::start(&mut laptop.command(&args));
    let at_the_gate = gate.reached();
    first.kill();
    drop(at_the_gate);

    // It waits for its turn.
    let second = laptop.run(&args);
    assert_eq!(second.code(), 0, "{second}");
    assert!(second.stdout.contains("No changes"), "{second}");
    assert_eq!(laptop.resources(), ["first", "second", "third"]);
}
