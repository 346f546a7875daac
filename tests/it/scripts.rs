//! Scripts: their order, their environment, what their failure means, and the interpreter that may be missing.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use integration_tests::job::{after, bash, before, before_init};
use integration_tests::process::ends;
use integration_tests::{FakeTool, Repository, job};
use job_contract::{Command, JobData};

use crate::machine;

fn groovy(script: &str) -> Command {
    Command {
        runtime: Some("GROOVY".into()),
        ..bash(1, script)
    }
}

/// Asserts that the texts appear in this order.
#[track_caller]
fn assert_order(log: &str, texts: &[&str]) {
    let mut rest = log;
    for text in texts {
        let at = rest
            .find(text)
            .unwrap_or_else(|| panic!("{text:?} is missing or out of order in\n{log}"));
        rest = &rest[at + text.len()..];
    }
}

#[test]
fn scripts_run_by_priority_and_equal_priorities_in_the_order_given() {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = job::scripts(
        &repository,
        vec![
            bash(200, "echo fourth"),
            bash(100, "echo second"),
            bash(100, "echo third"),
            bash(-1, "echo first; pwd; ls"),
        ],
    );
    machine.queue(&[&job]);
    let outcome = machine.run(&job).expect_code(0);
    assert_order(
        outcome.log(),
        &["first", "main.tf", "second", "third", "fourth"],
    );
    assert_eq!(
        machine.statuses(&job),
        ("completed".into(), "completed".into())
    );
    assert_order(
        &machine.step_output(&job),
        &["first", "second", "third", "fourth"],
    );
}

#[test]
fn a_failing_script_stops_the_step() {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = job::scripts(
        &repository,
        vec![
            bash(1, "echo before-it >&2; exit 7"),
            bash(2, "echo not-reached"),
        ],
    );
    machine.queue(&[&job]);
    let outcome = machine.run(&job).expect_code(1);
    assert_order(outcome.log(), &["before-it", "Script Exit Code ==>7"]);
    assert!(!outcome.log().contains("not-reached"), "{outcome}");
    assert_eq!(machine.statuses(&job), ("failed".into(), "failed".into()));
}

#[test]
fn an_approval_without_commands_succeeds_at_once() {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = job::step(job_contract::StepType::Approval, &repository);
    machine.queue(&[&job]);
    machine.run(&job).expect_code(0);
    assert_eq!(
        machine.statuses(&job),
        ("completed".into(), "completed".into())
    );
}

#[test]
fn scripts_of_a_plan_run_around_it_in_its_folder() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = JobData {
        folder: Some("/stacks/app".into()),
        command_list: vec![
            after(bash(
                1,
                "echo after-it; test -e terraformLibrary.tfPlan && echo with-plan",
            )),
            before(bash(
                1,
                "echo before-it; test -d .terraform || test -n \"$TF_DATA_DIR\" && echo initialised",
            )),
            before_init(before(bash(1, "echo before-init; basename \"$PWD\""))),
        ],
        on_failure_list: vec![bash(1, "echo on-failure")],
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = machine.run(&plan).expect_code(0);
    assert_order(
        outcome.log(),
        &[
            "before-init",
            "app",
            "Running Terraform Init",
            "before-it",
            "initialised",
            "Running Terraform PLAN",
            "after-it",
            "with-plan",
        ],
    );
    assert_eq!(
        outcome.log().matches("before-init\n").count(),
        1,
        "{outcome}"
    );
    assert!(!outcome.log().contains("on-failure"), "{outcome}");
}

#[test]
fn a_failure_before_the_operation_runs_only_the_failure_scripts() {
    let repository = Repository::fixture();
    for command in [before_init(bash(1, "exit 1")), before(bash(1, "exit 1"))] {
        let machine = machine();
        let tool = FakeTool::new();
        let plan = JobData {
            command_list: vec![command, after(bash(1, "echo after-it"))],
            on_failure_list: vec![bash(2, "echo repaired"), bash(1, "echo looked")],
            ..job::plan(&repository)
        };
        machine.queue(&[&plan]);
        let outcome = machine
            .executor(&plan)
            .env("PATH", tool.path())
            .run()
            .expect_code(1);
        assert_order(outcome.log(), &["looked", "repaired"]);
        assert!(!outcome.log().contains("after-it"), "{outcome}");
        assert!(!tool.was_called("plan"), "{outcome}");
        assert_eq!(machine.statuses(&plan), ("failed".into(), "failed".into()));
    }
}

#[test]
fn a_failing_script_after_a_plan_fails_the_step_and_the_plan_is_recorded() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = JobData {
        command_list: vec![after(bash(1, "exit 1"))],
        ..job::plan(&repository)
    };
    machine.queue(&[&plan, &job::apply_after(&plan)]);
    machine.run(&plan).expect_code(1);
    assert_eq!(machine.statuses(&plan), ("failed".into(), "failed".into()));
    let reference = machine.record(&plan).terraform_plan.unwrap();
    assert!(Path::new(&reference).is_file(), "{reference}");
}

#[test]
fn a_script_passes_variables_to_later_commands() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = JobData {
        command_list: vec![
            before_init(bash(
                1,
                "printf 'TF_VAR_greeting=a=b&c=d\\nHANDED=x = y\\nEMPTY=\\nno-value\\n' >> \"$terrakubeEnv\"",
            )),
            before(bash(1, "echo \"got [$HANDED] [${EMPTY-unset}]\"")),
        ],
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = machine.run(&plan).expect_code(0);
    assert_order(outcome.log(), &["got [x = y] []", "a=b&c=d 0"]);
}

#[test]
fn scripts_see_the_environment_of_the_contract() {
    let (machine, repository) = (machine(), Repository::fixture());
    let script = r#"
for name in workingDirectory terrakubeEnv organizationId workspaceId jobId stepId terraformVersion source branch \
  vcsType accessToken terraformOutput terrakubeApi workspaceName FROM_ENV region bashToolsDirectory terrakubeToolsRepository; do
  echo "$name=[${!name-unset}]"
done
[ "$workingDirectory" = "$PWD" ] && echo in-working-directory
[ "$terrakubeEnv" = "$PWD/.terrakube_temp_env" ] && echo env-file
helper.sh
command -v terraform >/dev/null && echo has-tool
"#;
    repository.commit(&[("scripts/helper.sh", "#!/bin/bash\necho helped\n")]);
    let mut job = job::scripts(&repository, vec![bash(1, script)]);
    job.environment_variables
        .insert("FROM_ENV".into(), "e".into());
    job.environment_variables
        .insert("region".into(), "loses".into());
    job.environment_variables
        .insert("PATH".into(), "/nowhere".into());
    job.variables.insert("region".into(), "eu-west-1".into());
    machine.queue(&[&job]);
    let outcome = machine
        .executor(&job)
        .env(
            job_contract::env::PUBLIC_API_URL,
            "https://api.example.test",
        )
        .run()
        .expect_code(0);
    let source = format!("source=[{}]", repository.url());
    for expected in [
        format!("organizationId=[{}]", job.organization_id).as_str(),
        format!("workspaceId=[{}]", job.workspace_id).as_str(),
        "jobId=[412]",
        format!("stepId=[{}]", job.step_id).as_str(),
        "terraformVersion=[>=1.4.0]",
        &source,
        "branch=[main]",
        "vcsType=[PUBLIC]",
        "accessToken=[]",
        "terraformOutput=[]",
        "terrakubeApi=[https://api.example.test]",
        "workspaceName=[network-dev]",
        "FROM_ENV=[e]",
        "region=[eu-west-1]",
        "in-working-directory",
        "env-file",
        "helped",
        "has-tool",
    ] {
        assert!(
            outcome.log().contains(expected),
            "{expected} is missing\n{outcome}"
        );
    }
    assert!(!outcome.log().contains("[unset]"), "{outcome}");
}

#[test]
fn scripts_after_an_apply_see_its_outputs() {
    let (machine, repository) = (machine(), Repository::fixture());
    let apply = JobData {
        command_list: vec![after(bash(
            1,
            "echo \"outputs: $terraformOutput\" | tr -d ' \\n'",
        ))],
        ..job::step(job_contract::StepType::Apply, &repository)
    };
    machine.queue(&[&apply]);
    let outcome = machine.run(&apply).expect_code(0);
    assert!(outcome.log().contains("\"value\":\"hello\""), "{outcome}");
}

#[test]
fn a_verbose_script_is_shown_with_its_source() {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = job::scripts(
        &repository,
        vec![Command {
            verbose: true,
            ..bash(3, "echo $((40 + 2))")
        }],
    );
    machine.queue(&[&job]);
    let outcome = machine.run(&job).expect_code(0);
    assert_order(
        outcome.log(),
        &[
            "Command Priority 3",
            "Running BASH",
            "Script Information:",
            "echo $((40 + 2))",
            "Begin Execution:",
            "42",
            "End Execution...",
        ],
    );
}

#[test]
fn groovy_scripts_run_where_groovy_is() {
    let (machine, repository) = (machine(), Repository::fixture());
    let script =
        r#"println "job " + jobId + " in " + new File(workingDirectory).exists() + " " + FROM_ENV"#;
    let mut job = job::scripts(&repository, vec![groovy(script)]);
    job.environment_variables
        .insert("FROM_ENV".into(), "marked".into());
    machine.queue(&[&job]);
    let outcome = machine.run(&job).expect_code(0);
    assert!(
        outcome.log().contains("job 412 in true marked"),
        "{outcome}"
    );
}

#[test]
fn without_groovy_its_scripts_fail_early_with_an_error() {
    let (machine, repository) = (machine(), Repository::fixture());
    let programs = machine.scratch("programs");
    fs::create_dir(&programs).unwrap();
    for program in ["git", "bash", "sh", "env", "terraform", "cat", "rm"] {
        symlink(which::which(program).unwrap(), programs.join(program)).unwrap();
    }
    let marker = machine.scratch("ran");
    let plan = JobData {
        command_list: vec![
            before_init(bash(0, &format!("touch {}", marker.display()))),
            after(groovy("println 1")),
        ],
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = machine.executor(&plan).env("PATH", &programs).run();
    assert_ne!(outcome.code(), 0, "{outcome}");
    assert!(
        outcome.error().to_lowercase().contains("groovy"),
        "{outcome}"
    );
    assert!(
        !marker.exists(),
        "something ran before the refusal\n{outcome}"
    );
    assert_eq!(machine.statuses(&plan), ("failed".into(), "failed".into()));
}

#[test]
fn a_command_without_a_runtime_is_refused() {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = job::scripts(
        &repository,
        vec![Command {
            runtime: None,
            ..bash(1, "echo ran")
        }],
    );
    machine.queue(&[&job]);
    let outcome = machine.run(&job);
    assert_ne!(outcome.code(), 0, "{outcome}");
    assert!(outcome.error().contains("runtime"), "{outcome}");
    assert_eq!(machine.statuses(&job).0, "failed");
}

#[test]
fn a_process_left_in_the_background_does_not_hold_the_run() {
    let (machine, repository) = (machine(), Repository::fixture());
    let fifo = machine.scratch("never-written");
    let script = format!("mkfifo {0}; cat {0} & echo left $!", fifo.display());
    let job = job::scripts(&repository, vec![bash(1, &script)]);
    machine.queue(&[&job]);
    let outcome = machine.run(&job).expect_code(0);
    let pid = outcome
        .log()
        .lines()
        .find_map(|line| line.strip_prefix("left "))
        .unwrap_or_else(|| panic!("{outcome}"));
    assert!(ends(pid), "process {pid} outlived the run\n{outcome}");
}

/// It has no parent, no group, no folder and no variable of the run.
#[test]
fn a_process_that_left_its_session_ends_with_the_run() {
    let (machine, repository) = (machine(), Repository::fixture());
    let noted = machine.scratch("noted");
    let daemon =
        "trap \"\" TERM INT HUP; echo $$ > \"$0\"; while :; do read -t 9 < <(sleep 9); done";
    let script = format!(
        "setsid --fork env -i PATH=\"$PATH\" bash -c 'cd /; {daemon}' {0} </dev/null >/dev/null 2>&1\n\
         until [[ -s {0} ]]; do :; done",
        noted.display()
    );
    let job = job::scripts(&repository, vec![bash(1, &script)]);
    machine.queue(&[&job]);
    let outcome = machine.run(&job).expect_code(0);
    let pid = std::fs::read_to_string(&noted).unwrap();
    assert!(
        ends(pid.trim()),
        "process {pid} outlived the run\n{outcome}"
    );
}

/// The file through which scripts export variables may be anything once they have run.
#[test]
fn a_file_of_exported_variables_that_cannot_be_read_fails_the_step_at_once() {
    for (make, words) in [
        ("mkfifo \"$terrakubeEnv\"", "it is a FIFO"),
        ("ln -s /dev/zero \"$terrakubeEnv\"", "it is a device"),
        (
            "truncate -s 10G \"$terrakubeEnv\"",
            "it has 10737418240 bytes, and the limit is 4194304",
        ),
    ] {
        let (machine, repository) = (machine(), Repository::fixture());
        let job = job::scripts(
            &repository,
            vec![bash(1, make), bash(2, "echo not-reached")],
        );
        machine.queue(&[&job]);
        let outcome = machine.run(&job).expect_code(1);
        assert!(
            outcome.error().contains("/.terrakube_temp_env`: "),
            "{outcome}"
        );
        assert!(outcome.error().contains(words), "{outcome}");
        assert!(!outcome.log().contains("not-reached"), "{outcome}");
    }
}
