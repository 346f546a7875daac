//! The templates in `examples/templates`, with programs and a server that behave as their documents say.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use integration_tests::machine::{ExecutorRun, Outcome};
use integration_tests::{FakeTool, Machine, Repository, job};
use job_contract::{Command, JobData, StepType};
use serde::Deserialize;
use test_peers::http::{Request, Response, Server};

use crate::machine;

const TOKEN: &str = "xoxb-0123456789-abcdef";

#[derive(Deserialize)]
struct Template {
    flow: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct Entry {
    r#type: String,
    commands: Vec<Command>,
    on_failure: Vec<Command>,
}

/// The step of this type, as the platform makes it of the template.
fn step_of(template: &str, step_type: StepType, repository: &Repository) -> JobData {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../examples/templates")
        .join(template);
    let template: Template = serde_saphyr::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let mut entries = template.flow.into_iter();
    let entry = entries.find(|entry| entry.r#type == step_type.name());
    let entry = entry.unwrap();
    let mut step = JobData {
        command_list: entry.commands,
        on_failure_list: entry.on_failure,
        ..job::step(step_type, repository)
    };
    let variables = [("SLACK_TOKEN", TOKEN), ("SLACK_CHANNEL", "#ops")];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    step.environment_variables.extend(variables);
    step
}

/// A tool whose plan has these actions.
fn tool_with(actions: &[&str]) -> FakeTool {
    let changes = actions.iter().map(|action| {
        let secret = "\"after\": {\"password\": \"in-the-plan\"}";
        format!("{{\"address\": \"a.b\", \"change\": {{\"actions\": [\"{action}\"], {secret}}}}}")
    });
    let plan = format!(
        "{{\"resource_changes\": [{}]}}",
        changes.collect::<Vec<_>>().join(",")
    );
    FakeTool::new().on(
        "show",
        &format!("[[ \" $* \" == *' -json '* ]] && echo '{plan}'"),
    )
}

fn program(machine: &Machine, name: &str, script: &str) {
    let path = machine.scratch("programs").join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, format!("#!/bin/bash\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn executor<'m>(machine: &'m Machine, step: &JobData, tool: &FakeTool) -> ExecutorRun<'m> {
    machine.queue(&[step]);
    let programs = machine.scratch("programs");
    let path = format!("{}:{}", programs.display(), tool.path().display());
    machine.executor(step).env("PATH", path)
}

#[track_caller]
fn has_no_secret(outcome: &Outcome) {
    assert!(!outcome.log().contains("in-the-plan"), "{outcome}");
    assert!(!outcome.log().contains(TOKEN), "{outcome}");
}

#[test]
fn costs_are_estimated_where_there_is_a_program_for_it() {
    let (machine, repository) = (machine(), Repository::fixture());
    let step = step_of("cost.yaml", StepType::Plan, &repository);
    let tool = tool_with(&["create"]);
    let outcome = executor(&machine, &step, &tool).run().expect_code(0);
    assert!(
        outcome.log().contains("there is no program infracost"),
        "{outcome}"
    );
    let answer = r#"{"currency":"USD","totalMonthlyCost":"10.5","diffTotalMonthlyCost":"2"}"#;
    program(
        &machine,
        "infracost",
        &format!("grep -q in-the-plan \"$3\" && echo '{answer}'"),
    );
    let outcome = executor(&machine, &step, &tool).run().expect_code(0);
    let line = "estimated costs: 10.5 USD a month, 2 by this plan";
    assert!(outcome.log().contains(line), "{outcome}");
    has_no_secret(&outcome);
}

#[test]
fn a_policy_refuses_a_plan_that_deletes_too_much() {
    for (actions, most, code) in [
        (&["create", "delete"][..], None, 1),
        (&["create", "delete"], Some("1"), 0),
        (&["update"], None, 0),
    ] {
        let (machine, repository) = (machine(), Repository::fixture());
        let mut step = step_of("policy.yaml", StepType::Plan, &repository);
        let most = most.map(|most| ("MAX_DELETIONS".to_owned(), most.to_owned()));
        step.environment_variables.extend(most);
        let outcome = executor(&machine, &step, &tool_with(actions))
            .run()
            .expect_code(code);
        let passed = outcome.log().contains("policies passed");
        assert_eq!(passed, code == 0, "{outcome}");
        assert_eq!(
            outcome.log().contains("the plan deletes 1 resources"),
            code != 0,
            "{outcome}"
        );
        has_no_secret(&outcome);
    }
}

fn slack(request: &Request) -> Response {
    let is_right = request.path == "/api/chat.postMessage"
        && request.header("authorization") == Some(&format!("Bearer {TOKEN}"));
    Response::new(
        200,
        if is_right {
            "{\"ok\": true}"
        } else {
            "{\"ok\": false, \"error\": \"invalid_auth\"}"
        },
    )
}

#[test]
fn slack_hears_of_an_apply_with_and_without_curl() {
    let server = Server::start_tls(slack).unwrap();
    for (has_curl, fails) in [(true, false), (false, true)] {
        let (machine, repository) = (machine(), Repository::fixture());
        let authority = machine.scratch("slack.pem");
        fs::write(&authority, server.certificate().unwrap()).unwrap();
        let mut step = step_of("slack.yaml", StepType::Apply, &repository);
        let address = server.url().replace("127.0.0.1", "localhost");
        let url = ("SLACK_API_URL".to_owned(), format!("{address}/api"));
        step.environment_variables.extend([url]);
        let tool = FakeTool::new().on("apply", if fails { "exit 1" } else { "exit 0" });
        let mut run = executor(&machine, &step, &tool).env("SSL_CERT_FILE", &authority);
        if !has_curl {
            // What the default image has.
            let folder = machine.scratch("image");
            fs::create_dir(&folder).unwrap();
            for name in [
                "bash", "cat", "dirname", "env", "git", "grep", "jq", "mkdir", "openssl", "rm",
                "sed", "wc",
            ] {
                std::os::unix::fs::symlink(which::which(name).unwrap(), folder.join(name)).unwrap();
            }
            let tool_folder = tool.file("terraform");
            let tool_folder = tool_folder.parent().unwrap();
            run = run.env(
                "PATH",
                format!("{}:{}", tool_folder.display(), folder.display()),
            );
        }
        let outcome = run.run().expect_code(i32::from(fails));
        assert!(!outcome.log().contains("Slack did not take"), "{outcome}");
        has_no_secret(&outcome);
    }
    let asked = server.requests();
    assert_eq!(asked.len(), 2);
    for request in asked {
        let body = String::from_utf8(request.body).unwrap();
        assert!(
            body.contains("\"channel\": \"#ops\"") && body.contains("has ended"),
            "{body}"
        );
    }
}

#[test]
fn drift_is_counted_and_told() {
    let server = Server::start(slack).unwrap();
    for (actions, told) in [(&["no-op"][..], 0), (&["update", "delete"], 1)] {
        let (machine, repository) = (machine(), Repository::fixture());
        let mut step = step_of("drift.yaml", StepType::Plan, &repository);
        let url = ("SLACK_API_URL".to_owned(), format!("{}/api", server.url()));
        step.environment_variables.extend([url]);
        let outcome = executor(&machine, &step, &tool_with(actions))
            .run()
            .expect_code(0);
        assert_eq!(outcome.log().contains("no drift"), told == 0, "{outcome}");
        assert!(!outcome.log().contains("Slack did not take"), "{outcome}");
        has_no_secret(&outcome);
        assert_eq!(server.requests().len(), told);
    }
    let asked = server.requests();
    let body = String::from_utf8(asked[0].body.clone()).unwrap();
    assert!(
        body.contains("\\\"updated\\\":1,\\\"deleted\\\":1"),
        "{body}"
    );
}
