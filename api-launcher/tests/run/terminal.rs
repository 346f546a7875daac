//! The same run on a terminal: colours, a live line, and the question.

use nix::sys::signal::Signal;

use crate::harness::{Bench, Process, Pty};

const CHANGES: &str = r#"
case $type in
terraformPlan)
    started plan; printf '\e[32mPlan: 1 to add\e[0m\n'; finished plan 120
    cat >"$MAYFLY_DATA_DIR/platform/jobs/$job_id.json" <<EOF
{"organizationId":"o","workspaceId":"w","status":"pending","planChanges":true,
 "steps":[{"id":"$step_id","type":"terraformPlan","status":"completed"},{"id":"a","type":"terraformApply","status":"pending"}]}
EOF
    ;;
terraformApply) echo applied; record completed completed true ;;
esac
"#;

#[test]
fn a_yes_applies_the_plan() {
    let bench = Bench::new(CHANGES);
    let pty = Pty::open();
    let mut run = Process::on_terminal(&mut bench.launcher("stack"), &pty);
    run.wait_for("Apply these changes?");
    pty.type_line("yes");
    run.wait_for("Applied");
    let done = run.end();
    assert_eq!(done.code(), 0);
    assert_eq!(bench.read("started"), "terraformPlan\nterraformApply\n");
    assert!(
        done.stdout.contains("\u{1b}[32mPlan: 1 to add"),
        "{}",
        done.stdout
    );
    assert!(
        bench
            .read("environment-terraformPlan")
            .contains("TerrakubeEnableColorOutput=true\n")
    );
}

#[test]
fn anything_else_does_not() {
    let bench = Bench::new(CHANGES);
    let pty = Pty::open();
    let mut run = Process::on_terminal(&mut bench.launcher("stack"), &pty);
    run.wait_for("Apply these changes?");
    pty.type_line("");
    run.wait_for("Not applied");
    assert_eq!(run.end().code(), 0);
    assert_eq!(bench.read("started"), "terraformPlan\n");
    let record = bench.record("1");
    assert_eq!(record["status"], "rejected");
    assert_eq!(record["steps"][1]["status"], "notExecuted");
}

#[test]
fn an_interrupt_at_the_question_applies_nothing() {
    let bench = Bench::new(CHANGES);
    let pty = Pty::open();
    let mut run = Process::on_terminal(&mut bench.launcher("stack"), &pty);
    run.wait_for("Apply these changes?");
    run.signal(Signal::SIGINT);
    run.wait_for("nothing was applied");
    assert_eq!(run.end().code(), 130);
    assert_eq!(bench.read("started"), "terraformPlan\n");
    assert!(bench.leftovers().is_empty());
}

#[test]
fn no_color_keeps_the_live_line_and_drops_the_colours() {
    let bench = Bench::new(CHANGES);
    let pty = Pty::open();
    let mut command = bench.launcher("stack --plan-only");
    let mut run = Process::on_terminal(command.env("NO_COLOR", "1"), &pty);
    run.wait_for("Planned");
    let done = run.end();
    assert_eq!(done.code(), 0);
    assert!(
        !done.stdout.contains("\u{1b}[32m") && !done.stdout.contains("\u{1b}[1m"),
        "{:?}",
        done.stdout
    );
}
