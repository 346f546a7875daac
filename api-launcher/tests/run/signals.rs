//! Stopping a run, once and twice; and two runs at once.

use nix::sys::signal::Signal;
use rstest::rstest;
use test_peers::process::{Stream, ends};

use crate::harness::Fixture;

/// Stops when asked, after storing the state.
const GRACEFUL: &str = r"
trap 'echo stored the state; record failed failed true; exit 143' TERM
trap 'echo the terminal reached me' INT HUP
echo working
wait_for_signal
";

/// Does not stop.
const STUBBORN: &str = r#"
trap 'echo not yet' TERM
# As the real one runs its tool: in a group of its own, deaf to what the terminal sends.
set -m
{ trap '' INT TERM; while :; do read -r -t 1 -u "$keep"; done; } {keep}<> <(:) &
set +m
echo $! >"$MAYFLY_DATA_DIR/pid"
echo working
wait_for_signal
"#;

#[rstest]
#[case(Signal::SIGINT, 130)]
#[case(Signal::SIGTERM, 143)]
#[case(Signal::SIGHUP, 129)]
fn one_signal_lets_the_executor_finish(#[case] signal: Signal, #[case] code: i32) {
    let fixture = Fixture::new(GRACEFUL);
    let run = fixture.start("stack --auto-approve");
    run.wait_for(Stream::Stdout, "working");
    run.signal(signal);
    let done = run.wait();
    assert_eq!(done.code(), code, "{}", done.stderr);
    assert!(done.stdout.contains("stored the state"), "{}", done.stdout);
    assert!(!done.stdout.contains("reached me"), "{}", done.stdout);
    assert!(
        done.stderr.contains("stopping: asked the executor"),
        "{}",
        done.stderr
    );
    assert_eq!(fixture.read("started"), "terraformPlan\n");
    assert!(fixture.leftovers().is_empty());
}

#[test]
fn a_second_signal_kills_the_executor_and_names_the_risk() {
    let fixture = Fixture::new(STUBBORN);
    let run = fixture.start("stack --auto-approve");
    run.wait_for(Stream::Stdout, "working");
    run.signal(Signal::SIGINT);
    run.wait_for(Stream::Stdout, "not yet");
    run.signal(Signal::SIGINT);
    let done = run.wait();
    assert_eq!(done.code(), 130, "{}", done.stderr);
    assert!(
        done.stderr.contains("may exist without being in the state"),
        "{}",
        done.stderr
    );
    assert!(ends(fixture.noted_pid()), "its tool still runs");
    assert!(fixture.leftovers().is_empty());
}

/// As an executor does that cannot store the state.
const KEEPING: &str = r#"
folder="$MAYFLY_DATA_DIR/errored/$(field organizationId)/$(field workspaceId)"
mkdir -p "$folder"
echo '{}' >"$folder/errored-$job_id-$step_id.tfstate"
"#;

#[test]
fn a_second_signal_names_the_copy_of_a_state_before_it_kills() {
    let fixture = Fixture::new(&format!("{KEEPING}{STUBBORN}"));
    let run = fixture.start("stack --auto-approve");
    run.wait_for(Stream::Stdout, "working");
    run.signal(Signal::SIGINT);
    run.wait_for(Stream::Stdout, "not yet");
    run.signal(Signal::SIGINT);
    let done = run.wait();
    assert_eq!(done.code(), 130, "{}", done.stderr);
    let at = |words: &str| done.stderr.find(words).expect(&done.stderr);
    let copy = at("a state that the run could not store is kept in `");
    assert!(copy < at("killed: "), "{}", done.stderr);
}

#[test]
fn a_plan_that_finishes_after_the_signal_is_not_applied() {
    let fixture = Fixture::new(
        "trap 'record pending completed true; exit 0' TERM\necho working\nwait_for_signal",
    );
    let run = fixture.start("stack --auto-approve");
    run.wait_for(Stream::Stdout, "working");
    run.signal(Signal::SIGINT);
    let done = run.wait();
    assert_eq!(done.code(), 130, "{}", done.stderr);
    assert_eq!(fixture.read("started"), "terraformPlan\n");
    assert_eq!(fixture.record("1")["status"], "cancelled");
}

#[test]
fn a_second_run_of_a_folder_is_refused_and_one_of_another_folder_is_not() {
    let fixture = Fixture::new(GRACEFUL);
    let first = fixture.start("stack");
    first.wait_for(Stream::Stdout, "working");
    let second = fixture.run("./stack/../stack --output json");
    assert_eq!(second.code(), 75);
    assert!(
        second.stdout.contains("in progress (process"),
        "{}",
        second.stdout
    );

    std::fs::create_dir(fixture.path("other")).unwrap();
    std::fs::write(fixture.path("other/main.tf"), "").unwrap();
    let third = fixture.start("other");
    third.wait_for(Stream::Stdout, "working");
    for run in [&first, &third] {
        run.signal(Signal::SIGTERM);
    }
    assert_eq!((first.wait().code(), third.wait().code()), (143, 143));
}

#[test]
fn processes_of_a_killed_executor_are_killed_in_every_session() {
    let fixture = Fixture::new(
        "setsid --fork bash -c 'trap \"\" TERM; cd /; echo $$ >\"$1\"; while :; do sleep 1; done' \
         _ \"$MAYFLY_DATA_DIR/pid\" </dev/null >/dev/null 2>&1\n\
         until [[ -s $MAYFLY_DATA_DIR/pid ]]; do :; done\nkill -KILL $$",
    );
    let done = fixture.run("stack");
    assert_eq!(done.code(), 137, "{}", done.stderr);
    assert!(ends(fixture.noted_pid()), "it goes on");
}

#[test]
fn a_child_that_keeps_the_streams_open_does_not_hold_the_run_up_and_ends_with_it() {
    let fixture = Fixture::new(
        "record completed completed false\n\
         { trap '' TERM; exec {never}<> <(:); read -r -t 150 -u \"$never\"; \
         echo >\"$MAYFLY_DATA_DIR/alone\"; } &\n\
         echo $! >\"$MAYFLY_DATA_DIR/pid\"; exit 0",
    );
    assert_eq!(fixture.run("stack").code(), 0);
    assert!(ends(fixture.noted_pid()), "it goes on");
    let alone = fixture.path("data/alone");
    assert!(!alone.exists(), "the run waited until it ended by itself");
}
