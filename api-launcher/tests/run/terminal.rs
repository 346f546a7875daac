//! The same run on a terminal: colours, a live line, and the question.

use test_peers::process::{Running, Stream};

use crate::harness::Fixture;

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
    let fixture = Fixture::new(CHANGES);
    let mut run = Running::start_interactive(&mut fixture.on_terminal("stack"));
    run.wait_for(Stream::Stdout, "Apply these changes?");
    run.write("yes\n");
    run.wait_for(Stream::Stdout, "Applied");
    let done = run.wait();
    assert_eq!(done.code(), 0);
    assert_eq!(fixture.read("started"), "terraformPlan\nterraformApply\n");
    assert!(
        done.stdout.contains("\u{1b}[32mPlan: 1 to add"),
        "{}",
        done.stdout
    );
    assert!(
        fixture
            .read("environment-terraformPlan")
            .contains("TerrakubeEnableColorOutput=true\n")
    );
}

#[test]
fn anything_else_does_not() {
    let fixture = Fixture::new(CHANGES);
    let mut run = Running::start_interactive(&mut fixture.on_terminal("stack"));
    run.wait_for(Stream::Stdout, "Apply these changes?");
    run.write("\n");
    run.wait_for(Stream::Stdout, "Not applied");
    assert_eq!(run.wait().code(), 0);
    assert_eq!(fixture.read("started"), "terraformPlan\n");
    let record = fixture.record("1");
    assert_eq!(record["status"], "rejected");
    assert_eq!(record["steps"][1]["status"], "notExecuted");
}

#[test]
fn an_interrupt_at_the_question_applies_nothing() {
    let fixture = Fixture::new(CHANGES);
    let mut run = Running::start_interactive(&mut fixture.on_terminal("stack"));
    run.wait_for(Stream::Stdout, "Apply these changes?");
    run.write("\x03");
    run.wait_for(Stream::Stdout, "nothing was applied");
    assert_eq!(run.wait().code(), 130);
    assert_eq!(fixture.read("started"), "terraformPlan\n");
    assert!(fixture.leftovers().is_empty());
}

#[test]
fn no_color_keeps_the_live_line_and_drops_the_colours() {
    let fixture = Fixture::new(CHANGES);
    let mut command = fixture.on_terminal("stack --plan-only");
    let run = Running::start_interactive(command.env("NO_COLOR", "1"));
    run.wait_for(Stream::Stdout, "Planned");
    let done = run.wait();
    assert_eq!(done.code(), 0);
    assert!(
        !done.stdout.contains("\u{1b}[32m") && !done.stdout.contains("\u{1b}[1m"),
        "{:?}",
        done.stdout
    );
}
