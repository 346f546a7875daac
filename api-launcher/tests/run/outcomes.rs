//! Plans, applies, exit codes, and how they are shown without a terminal.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use rstest::rstest;
use serde_json::{Value, json};
use test_peers::process::Running;

use crate::harness::{Fixture, names_in};

/// Plans one change and applies it.
const CHANGES: &str = r#"
cp "$(ls "$MAYFLY_DATA_DIR"/launcher/work/*/content.tar.gz)" "$MAYFLY_DATA_DIR/content-$type"
started workspace; finished workspace 3
case $type in
terraformPlan*)
    started plan; printf '\e[1mPlan: 1 to add\e[0m\r\n'; finished plan 120
    record pending completed true
    report '{"changes":{"add":1,"change":0,"destroy":0,"import":0}}' ;;
terraformApply)
    started apply; echo 'Apply complete!'; finished apply 340
    say WARN 'one thing'; say INFO 'chatter'; echo 'a panic' >&2
    record completed completed true
    outputs '[{"name":"a","type":"string","sensitive":false,"value":"x"},{"name":"b","sensitive":true,"value":"hunter2"}]'
    report '{"changes":{"add":1,"change":0,"destroy":0,"import":0}}' ;;
esac
"#;

const NO_CHANGES: &str = "echo 'No changes.'; record completed completed false";

#[test]
fn an_approved_run_plans_and_applies_in_two_executors_from_one_snapshot() {
    let fixture = Fixture::new(CHANGES);
    let done = fixture.run("stack --auto-approve");
    assert_eq!(done.code(), 0, "{}{}", done.stdout, done.stderr);
    assert_eq!(fixture.read("started"), "terraformPlan\nterraformApply\n");
    assert_eq!(
        names_in(&fixture.data().join("content-terraformPlan")),
        ["main.tf"]
    );
    assert_eq!(
        fs::read(fixture.data().join("content-terraformPlan")).unwrap(),
        fs::read(fixture.data().join("content-terraformApply")).unwrap()
    );
    assert!(done.stdout.contains("Plan: 1 to add\n"), "{}", done.stdout);
    assert!(done.stdout.contains("Applied: +1 ~0 -0"), "{}", done.stdout);
    assert!(done.stdout.contains("a = \"x\""), "{}", done.stdout);
    assert_eq!(done.stderr, "warning: one thing\na panic\n");
    assert_eq!(fixture.leftovers(), [] as [std::path::PathBuf; 0]);
}

#[test]
fn piped_output_is_plain_lines() {
    let fixture = Fixture::new(CHANGES);
    let done = fixture.run("stack --auto-approve");
    for text in [&done.stdout, &done.stderr] {
        assert!(!text.contains(['\u{1b}', '\r']), "{text:?}");
        assert!(!text.contains("hunter2"), "{text}");
    }
    let plan = fixture.read("environment-terraformPlan");
    assert!(
        plan.contains("TerrakubeEnableColorOutput=false\n"),
        "{plan}"
    );
    assert!(!plan.contains("hunter2"), "{plan}");
    assert!(!plan.contains("EphemeralJobData"), "{plan}");
}

#[test]
fn colours_can_be_asked_for_and_are_asked_of_the_tool() {
    let fixture = Fixture::new(CHANGES);
    let done = fixture.run("stack --plan-only --color always");
    assert!(done.stdout.contains("\u{1b}[1mPlan: 1 to add\u{1b}[0m"));
    let plan = fixture.read("environment-terraformPlan");
    assert!(plan.contains("TerrakubeEnableColorOutput=true\n"), "{plan}");
}

#[test]
fn without_a_terminal_nothing_is_applied_unasked() {
    let fixture = Fixture::new(CHANGES);
    let done = fixture.run("stack");
    assert_eq!(done.code(), 0);
    assert_eq!(fixture.read("started"), "terraformPlan\n");
    assert!(done.stdout.contains("Planned, not applied: +1 ~0 -0"));
    assert!(done.stdout.contains("--auto-approve"), "{}", done.stdout);
}

#[test]
fn a_plan_without_changes_ends_the_run() {
    let fixture = Fixture::new(NO_CHANGES);
    let done = fixture.run("stack --auto-approve");
    assert_eq!(done.code(), 0);
    assert_eq!(fixture.read("started"), "terraformPlan\n");
    assert!(done.stdout.contains("No changes in "), "{}", done.stdout);
}

#[test]
fn a_destroy_is_a_plan_and_its_apply() {
    let fixture = Fixture::new(CHANGES);
    let done = fixture.run("stack --destroy --auto-approve");
    assert_eq!(done.code(), 0);
    assert_eq!(
        fixture.read("started"),
        "terraformPlanDestroy\nterraformApply\n"
    );
    assert!(done.stdout.contains("Destroyed: "), "{}", done.stdout);
}

#[rstest]
#[case(
    "report '{\"error\":\"the tool said no\"}'; exit 1",
    1,
    "error: the tool said no"
)]
#[case("exit 64", 64, "configuration")]
#[case("exit 65", 65, "job data")]
#[case("exit 75", 75, "infrastructure")]
#[case("exit 76", 76, "holds this step")]
#[case("exit 101", 2, "exit code 101")]
#[case("exit 0", 2, "without a report")]
#[case("kill -KILL $$", 137, "ended by SIGKILL")]
fn the_executors_end_is_the_runs(#[case] scenario: &str, #[case] code: i32, #[case] words: &str) {
    let fixture = Fixture::new(scenario);
    let done = fixture.run("stack --auto-approve");
    assert_eq!(done.code(), code, "{}", done.stderr);
    assert!(done.stderr.contains(words), "{}", done.stderr);
    assert_eq!(fixture.read("started"), "terraformPlan\n");
    assert!(fixture.leftovers().is_empty());
}

#[test]
fn the_job_of_a_killed_executor_does_not_stay_running() {
    let fixture = Fixture::new("record running running false; kill -KILL $$");
    fixture.run("stack");
    let record = fixture.record("1");
    assert_eq!(record["status"], "failed");
    assert_eq!(record["steps"][0]["status"], "failed");
}

#[test]
fn json_output_is_events_and_nothing_else() {
    let fixture = Fixture::new(CHANGES);
    let done = fixture.run("stack --auto-approve --output json --color always");
    let events = done.events();
    let names: Vec<&str> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(names.first(), Some(&"run_started"));
    assert_eq!(names.last(), Some(&"run_finished"));
    let count = |name| names.iter().filter(|known| **known == name).count();
    assert_eq!(count("step_started"), 2);
    assert_eq!(count("step_finished"), 2);
    assert_eq!(count("diagnostic"), 2, "{names:?}");
    let steps: std::collections::BTreeSet<&str> = events
        .iter()
        .filter_map(|event| event["stepId"].as_str())
        .collect();
    assert_eq!(steps.len(), 2);
    assert!(
        events
            .iter()
            .all(|event| event["jobId"] == "1" && event["time"].is_string())
    );

    let find = |name: &str| events.iter().find(|event| event["type"] == name).unwrap();
    assert_eq!(find("log")["line"], "Plan: 1 to add");
    assert_eq!(find("step_finished")["changes"]["add"], 1);
    assert_eq!(
        find("outputs")["outputs"],
        json!([
            {"name": "a", "type": "string", "sensitive": false, "value": "x"},
            {"name": "b", "type": null, "sensitive": true, "value": null},
        ])
    );
    let end = find("run_finished");
    assert_eq!(
        (&end["status"], &end["exitCode"]),
        (&json!("applied"), &json!(0))
    );
    assert!(!done.stdout.contains("hunter2"));
}

#[test]
fn a_run_that_cannot_start_still_ends_with_an_event() {
    let fixture = Fixture::new("");
    let done = fixture.run("absent --output json");
    assert_eq!(done.code(), 64);
    let events = done.events();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0]["status"], "failed");
    assert_eq!(events[0].get("jobId"), None::<&Value>);
}

#[rstest]
#[case("absent", 64, "there is no folder `absent`")]
#[case("stack/main.tf", 64, "is not a folder")]
#[case("empty", 65, "holds no .tf")]
#[case("stack --var-file absent.tfvars", 64, "absent.tfvars")]
#[case("stack --env NOT_SET_ANYWHERE", 64, "NOT_SET_ANYWHERE")]
#[case("stack --plan-only --auto-approve", 64, "cannot be used with")]
#[case("stack --no-such-option", 64, "--no-such-option")]
#[case("-f absent.json", 64, "absent.json")]
#[case("stack --var novalue", 64, "NAME=VALUE")]
#[case("stack --var 1st=x", 64, "begins with a letter")]
#[case("stack --tool pulumi", 64, "pulumi")]
fn bad_input_is_named_and_nothing_is_created(
    #[case] words: &str,
    #[case] code: i32,
    #[case] expected: &str,
) {
    let fixture = Fixture::new("");
    fs::create_dir(fixture.path("empty")).unwrap();
    let data = fixture.path("untouched");
    let done = Running::start(fixture.launcher(words).env("MAYFLY_DATA_DIR", &data)).wait();
    assert_eq!(done.code(), code, "{}", done.stderr);
    assert!(done.stderr.contains(expected), "{}", done.stderr);
    assert_eq!(done.stdout, "");
    assert!(!data.exists());
}

#[rstest]
#[case("absent")]
#[case("stack")]
#[case("text")]
#[case("program")]
#[case("text/program")]
fn an_executor_that_is_no_program_is_named(#[case] path: &str) {
    let fixture = Fixture::new("");
    fs::write(fixture.path("text"), "no program").unwrap();
    fs::write(fixture.path("program"), "\u{0}no program").unwrap();
    fs::set_permissions(fixture.path("program"), Permissions::from_mode(0o700)).unwrap();
    let path = format!("./{path}");
    let by_option = fixture.run(&format!("stack --executor {path}"));
    let mut launcher = fixture.launcher("stack");
    let by_variable = Running::start(launcher.env("MAYFLY_EXECUTOR", &path)).wait();
    assert_eq!((by_option.code(), by_variable.code()), (64, 64));
    assert_eq!(by_option.stderr, by_variable.stderr);
    for words in [&format!("`{path}`"), "hint: name a program"] {
        assert!(by_option.stderr.contains(words), "{by_option}");
    }
}

#[rstest]
#[case("text", "Not a directory")]
#[case("text/data", "Not a directory")]
#[case("dangling", "Not a directory")]
#[case("/proc/data", "No such file or directory")]
fn a_data_directory_that_cannot_be_is_named_with_what_to_do(
    #[case] place: &str,
    #[case] cause: &str,
    #[values("run", "serve", "serve in a cluster")] command: &str,
) {
    let fixture = Fixture::new("");
    fs::write(fixture.path("text"), "no folder").unwrap();
    std::os::unix::fs::symlink("nowhere/at/all", fixture.path("dangling")).unwrap();
    let kubeconfig = "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
        clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\n\
        contexts: [{name: a, context: {cluster: a, user: a}}]\nusers: [{name: a, user: {token: a}}]\n";
    fs::write(fixture.path("kubeconfig"), kubeconfig).unwrap();
    let place = fixture.path(place);
    let mut launcher = match command {
        "run" => fixture.launcher("stack"),
        serve => {
            let target = if serve == "serve" {
                "process"
            } else {
                "kubernetes"
            };
            let mut launcher = Command::new(env!("CARGO_BIN_EXE_api-launcher"));
            launcher
                .args(["serve", "--target", target])
                .env("KUBECONFIG", fixture.path("kubeconfig"))
                .env("MAYFLY_ALLOW_UNAUTHENTICATED", "true")
                .env("MAYFLY_LISTEN", "127.0.0.1:0");
            launcher
        }
    };
    let by_variable = launcher.env("MAYFLY_DATA_DIR", &place).output().unwrap();
    launcher
        .env_remove("MAYFLY_DATA_DIR")
        .arg("--data-dir")
        .arg(&place);
    let by_option = launcher.output().unwrap();
    for done in [by_variable, by_option] {
        let told = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(64), "{told}");
        for word in [
            &*place.to_string_lossy(),
            cause,
            "--data-dir or MAYFLY_DATA_DIR",
        ] {
            assert!(told.contains(word), "{word} is not in: {told}");
        }
    }
}

#[test]
fn variable_files_are_added_under_names_that_the_tool_reads_last() {
    let fixture = Fixture::new(CHANGES);
    fs::write(fixture.path("prod.tfvars"), "a = 1").unwrap();
    fs::write(fixture.path("more.tfvars.json"), "{}").unwrap();
    let done = fixture.run("stack --var-file prod.tfvars --var-file more.tfvars.json");
    assert_eq!(done.code(), 0, "{}", done.stderr);
    assert_eq!(
        names_in(&fixture.data().join("content-terraformPlan")),
        [
            "main.tf",
            "zz_mayfly_0000_prod.auto.tfvars",
            "zz_mayfly_0001_more.auto.tfvars.json"
        ]
    );
}

#[test]
fn a_state_file_in_the_folder_is_pointed_out() {
    let fixture = Fixture::new(NO_CHANGES);
    fs::write(fixture.path("stack/terraform.tfstate"), "{}").unwrap();
    let done = fixture.run("stack");
    assert!(done.stderr.contains("terraform.tfstate"), "{}", done.stderr);
    assert!(done.stderr.contains("local/backend/"), "{}", done.stderr);
}

#[test]
fn the_run_continues_when_its_output_is_closed() {
    let fixture = Fixture::new(&format!(
        "for n in $(seq 20000); do echo \"line $n\"; done\n{CHANGES}"
    ));
    let mut command = fixture.launcher("stack --auto-approve");
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(fixture.read("started"), "terraformPlan\nterraformApply\n");
}
