//! Runs without faults.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use integration_tests::Repository;
use job_contract::env;
use serde_json::{Value, json};
use test_platform::{Actor, Flow, NewJob, Platform, Release, Status, Variable, Workspace};

use super::{RunTarget, Stage, default_template};

#[tokio::test(flavor = "multi_thread")]
async fn the_default_template_runs_on_one_machine() {
    for release in Release::ALL {
        let stage = Stage::under(release).await;
        let _launcher = stage.serve();
        default_template(&stage).await;
        stage.platform.assert_kept().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_secret_may_be_in_a_file_that_is_gone_before_anything_runs() {
    let stage = Stage::on_this_machine().await;
    let file = stage.machine().scratch("internal-secret");
    fs::write(&file, format!("{}\n", stage.platform.secret())).unwrap();
    let settings = [
        (env::INTERNAL_SECRET, ""),
        (env::INTERNAL_SECRET_FILE, file.to_str().unwrap()),
    ];
    let _launcher = stage.serve_with(&settings);
    assert!(!file.exists());
    default_template(&stage).await;
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_needs_redis() {
    for release in Release::ALL {
        let machine = RunTarget::Machine(crate::machine());
        let platform = Platform::builder().release(release);
        let stage = Stage::of(machine, platform, None).await;
        let _launcher = stage.serve();
        default_template(&stage).await;
        stage.platform.assert_kept().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_made_is_not_made_again_and_can_be_destroyed() {
    let stage = Stage::on_this_machine().await;
    let _launcher = stage.serve();
    let platform = &stage.platform;
    let repository = Repository::fixture();
    let workspace = platform.workspace(Workspace::new(&repository.url()));
    let start = |template| platform.start_job(NewJob::new(&workspace, template));

    let made = start(Flow::plan_apply());
    platform.until_job(made, Status::Completed).await;
    assert_eq!(stage.resources(made), ["greeting"]);

    // Nothing to do: the plan is the end of the job, and the rest of its template is left out.
    let idle = start(Flow::plan_apply());
    let idle = platform.until_job(idle, Status::Completed).await;
    assert!(!idle.plan_changes);
    platform
        .until("the apply is left out", |records| {
            let left = records.job(idle.id).step_statuses();
            (left == [Status::Completed, Status::NotExecuted]).then_some(())
        })
        .await;

    // A plan that is the whole template ends its job although there are changes.
    let only = start(Flow::only("terraformPlanDestroy"));
    let only = platform.until_job(only, Status::Completed).await;
    assert!(only.plan_changes && only.terraform_plan.is_some());

    let gone = start(Flow::only("terraformDestroy"));
    platform.until_job(gone, Status::Completed).await;
    assert_eq!(stage.state(gone)["resources"], serde_json::json!([]));
    let serials: Vec<i64> = platform
        .records()
        .histories
        .iter()
        .map(|history| history.serial)
        .collect();
    assert!(serials.len() == 2 && serials[0] < serials[1], "{serials:?}");
    platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_that_fails_ends_its_job_with_the_reason_in_its_output() {
    let stage = Stage::on_this_machine().await;
    let _launcher = stage.serve();
    let module = "resource \"terraform_data\" \"a\" {\n  input = var.missing\n}\n";
    let mut template = Flow::plan_apply();
    template[0] = template[0].clone().on_failure("echo so-it-failed");
    let job = stage.start(Repository::module(module), template);
    let job = stage.platform.until_job(job, Status::Failed).await;
    assert_eq!(job.terraform_plan.as_deref().unwrap_or_default(), "");
    let output = stage.output(job.id, "terraformPlan");
    assert!(
        output.contains("Reference to undeclared input variable"),
        "{output}"
    );
    assert!(output.contains("so-it-failed"), "{output}");
    let ends: Vec<_> = stage
        .history(job.id)
        .into_iter()
        .filter(|(_, _, by)| *by == Actor::Client)
        .collect();
    let expected = [
        (0, Status::Running),
        (100, Status::Running),
        (100, Status::Failed),
        (0, Status::Failed),
    ];
    assert_eq!(
        ends,
        expected.map(|(step, status)| (step, status, Actor::Client))
    );
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_of_a_step_and_of_a_rejection_run() {
    let stage = Stage::on_this_machine().await;
    let _launcher = stage.serve();
    let (platform, repository) = (&stage.platform, Repository::fixture());
    let told = stage.machine().scratch("told");
    let tell = |word: &str| format!("echo {word}-$STAGE >> {}", told.display());
    let template = vec![
        Flow::new("customScripts", 100).with_script(&tell("scripts")),
        Flow::new("approval", 150).on_reject(&tell("rejected")),
        Flow::new("terraformApply", 200),
    ];
    let workspace = Workspace::new(&repository.url()).with(Variable::env("STAGE", "dev"));
    let workspace = platform.workspace(workspace);
    let job = platform.start_job(NewJob::new(&workspace, template));
    platform.until_job(job, Status::WaitingApproval).await;
    platform.reject(job).await;
    platform.until_step(job, "approval", Status::Failed).await;
    assert_eq!(
        std::fs::read_to_string(&told).unwrap(),
        "scripts-dev\nrejected-dev\n"
    );
    let job = platform.job(job);
    assert_eq!(job.status, Status::Rejected);
    assert_eq!(
        job.step_statuses(),
        [Status::Completed, Status::Failed, Status::Failed]
    );
    platform.assert_kept().await;
}

/// Makes a tool that runs a script before each command. Returns the `PATH` that leads to it.
fn tool_that_first(stage: &Stage, script: &str) -> String {
    let real = which::which("terraform").unwrap();
    let bin = stage.machine().scratch("bin");
    fs::create_dir(&bin).unwrap();
    let wrapper = bin.join("terraform");
    let script = format!("#!/bin/sh\n{script}exec '{}' \"$@\"\n", real.display());
    fs::write(&wrapper, script).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::join_paths(
        std::iter::once(bin).chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    path.unwrap().into_string().unwrap()
}

/// The registry's token is the whole platform's. Each command of the tool, and a script, note whether they are given it, and
/// how many files below the data directory hold it.
#[tokio::test(flavor = "multi_thread")]
async fn the_tool_has_a_token_for_the_platform_while_init_runs_and_at_no_other_time() {
    let stage = Stage::on_this_machine().await;
    let notes = stage.machine().scratch("notes");
    // The pattern does not match itself, since a script is kept in a file there too.
    let look = format!(
        "found=$(grep -rls 'credentials \"registry[.]example.test\"' '{}' | wc -l)\n\
         if grep -qs 'credentials \"registry[.]example.test\"' \"$TF_CLI_CONFIG_FILE\"; then given=given; else given=none; fi\n",
        stage.machine().data_dir().display()
    );
    let note = |who: &str| {
        format!(
            "{look}echo \"{who} $given $found\" >> '{}'\n",
            notes.display()
        )
    };
    let path = tool_that_first(&stage, &note("$1"));
    let _launcher = stage.serve_with(&[("PATH", &path)]);

    let platform = &stage.platform;
    let commands = |script: &str| {
        let command = |moment: &str| {
            json!({"runtime": "BASH", "script": script, "priority": 100, "before": moment == "before",
                   "after": moment == "after", "verbose": false, "beforeInit": moment == "beforeInit"})
        };
        json!([command("beforeInit"), command("before"), command("after")])
    };
    let template = vec![
        Flow {
            commands: commands(&note("script")),
            ..Flow::new("terraformPlan", 100)
        },
        Flow::new("terraformApply", 200),
    ];
    let repository = Repository::fixture();
    let workspace = platform.workspace(Workspace::new(&repository.url()));
    let job = platform.start_job(NewJob::new(&workspace, template));
    platform.until_job(job, Status::Completed).await;

    let notes = fs::read_to_string(&notes).unwrap();
    for who in ["init ", "plan ", "apply ", "script "] {
        assert!(notes.lines().any(|line| line.starts_with(who)), "{notes}");
    }
    for line in notes.lines() {
        let expected = if line.starts_with("init ") {
            "given 1"
        } else {
            "none 0"
        };
        assert!(line.ends_with(expected), "{notes}");
    }
    let of = |who: &str| notes.lines().filter(|line| line.starts_with(who)).count();
    assert_eq!((of("init "), of("script ")), (2, 3), "{notes}");
    assert!(of("plan ") == 1 && of("apply ") == 1, "{notes}");
}

/// The newest release gives a token rights by its subject and these ids.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_of_scripts_and_of_the_tool_name_their_step_and_live_for_minutes() {
    let stage = Stage::on_this_machine().await;
    let scratch = |name: &str| stage.machine().scratch(name);
    let (of_script, of_tool) = (scratch("of-script"), scratch("of-tool"));
    let keep = format!(
        "if [ \"$1\" = init ]; then cp \"$TF_CLI_CONFIG_FILE\" '{}'; fi\n",
        of_tool.display()
    );
    let path = tool_that_first(&stage, &keep);
    let _launcher = stage.serve_with(&[("PATH", &path)]);
    let script = format!("printf %s \"$terrakubeToken\" > '{}'", of_script.display());
    let template = vec![
        Flow::new("customScripts", 100).with_script(&script),
        Flow::new("terraformPlan", 200),
    ];
    let platform = &stage.platform;
    let job = stage.start(Repository::fixture(), template);
    let job = platform.until_job(job, Status::Completed).await;

    let config = fs::read_to_string(&of_tool).unwrap();
    let of_tool = config.split('"').find(|text| text.starts_with("eyJ"));
    let of_script = fs::read_to_string(&of_script).unwrap();
    let (organization, id) = (platform.organization(), job.id.to_string());
    for (token, step, seconds) in [
        (of_script.as_str(), "customScripts", 300),
        (of_tool.unwrap(), "terraformPlan", 600),
    ] {
        assert!(platform.token_check()(&format!("Bearer {token}")));
        let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap());
        let claims: Value = serde_json::from_slice(&claims.unwrap()).unwrap();
        let named = [
            ("sub", "TerrakubeInternal (EXECUTOR)"),
            ("organizationId", organization.as_str()),
            ("workspaceId", job.workspace.as_str()),
            ("jobId", id.as_str()),
            ("stepId", job.step_of(step).id.as_str()),
        ];
        for (name, value) in named {
            assert_eq!(claims[name], value, "{step}: {claims}");
        }
        let time = |name: &str| claims[name].as_u64().unwrap();
        assert_eq!(time("exp") - time("iat"), seconds, "{step}: {claims}");
    }
    platform.assert_kept().await;
}
