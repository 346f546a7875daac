//! The operator's hooks: what they get, what they decide, and what code of a run can do to them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use integration_tests::job::{after, bash, before, before_init};
use integration_tests::machine::{ExecutorRun, Outcome, files_below, give_away};
use integration_tests::process::{Stream, ends};
use integration_tests::{FakeTool, Machine, Repository, job};
use job_contract::{JobData, StepType, Tool, env};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::machine;

mod hostile;
mod infracost;
mod opa;

const KEY: &str = "ico-0123456789abcdef";

with_both_tools! {
    hooks_see_the_plan_and_its_end_and_leave_results,
}

/// A folder of hooks, as an operator provides it. Each runs in bash.
fn hooks(machine: &Machine, scripts: &[(&str, &str)]) -> PathBuf {
    let folder = machine.scratch("hooks");
    fs::create_dir_all(&folder).unwrap();
    for (name, script) in scripts {
        let path = folder.join(name);
        let is_program = !name.contains('.');
        let text = if is_program {
            format!("#!/bin/bash\n{script}\n")
        } else {
            (*script).to_owned()
        };
        fs::write(&path, text).unwrap();
        let mode = if is_program { 0o755 } else { 0o644 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    folder
}

fn with_hooks<'m>(machine: &'m Machine, job: &JobData, tool: &FakeTool) -> ExecutorRun<'m> {
    machine
        .executor(job)
        .env("PATH", tool.path())
        .env(env::HOOKS_DIR, machine.scratch("hooks"))
        .env(format!("{}API_KEY", env::FOR_HOOKS_PREFIX), KEY)
}

/// A plan step with these hooks and a tool that finds changes.
fn run_plan(scripts: &[(&str, &str)], code: i32) -> (Machine, JobData, Outcome) {
    let machine = machine();
    let (plan, outcome) = run_plan_of(&machine, &Repository::fixture(), scripts, code);
    (machine, plan, outcome)
}

fn run_plan_of(
    machine: &Machine,
    repository: &Repository,
    scripts: &[(&str, &str)],
    code: i32,
) -> (JobData, Outcome) {
    hooks(machine, scripts);
    let plan = job::plan(repository);
    machine.queue(&[&plan, &job::apply_after(&plan)]);
    let tool = FakeTool::new().on("plan", "echo plan > \"$out\"; exit 2");
    let outcome = with_hooks(machine, &plan, &tool).run().expect_code(code);
    (plan, outcome)
}

fn result(machine: &Machine, job: &JobData, hook: &str) -> Value {
    machine.context(job)["mayflyHooks"][&job.step_id][hook].clone()
}

fn has_plan_as_json(folder: &Path) -> bool {
    let mut files = files_below(folder).into_iter();
    files.any(|path| path.file_name().is_some_and(|name| name == "plan.json"))
}

fn hooks_see_the_plan_and_its_end_and_leave_results(tool: Tool) {
    let (machine, repository) = (machine(), Repository::fixture());
    let seen = machine.scratch("seen");
    let see = format!(
        "echo \"${{0##*/}}\" $(ls | tr '\\n' ' ') >> {seen}; [ \"$PWD\" = \"$HOME\" ] && [ -d \"$MAYFLY_WORKING_DIR\" ]",
        seen = seen.display()
    );
    let post_plan = format!(
        "{see} && jq '{{summary: (.resource_changes[0].address), checks: [{{name: \"size\", level: \"advisory\", passed: false, \
         message: \"big\"}}], data: {{commit: \"c\"}}}}' plan.json > result.json && [ -s plan.tfplan ]"
    );
    let pre_apply = format!(
        "{see} && jq -e .format_version plan.json && jq -e '.workspaceId != \"\" and .operation == \"apply\"' metadata.json"
    );
    let post_apply = format!("{see} && jq -e '.succeeded and .changes.add == 1' outcome.json");
    hooks(
        &machine,
        &[
            ("pre-init", &see),
            ("pre-plan", &see),
            ("post-plan", &post_plan),
            ("pre-apply", &pre_apply),
            ("post-apply", &post_apply),
        ],
    );
    let plan = job::plan_by(tool, &repository);
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);
    let run = |job| {
        let run = machine.executor(job);
        run.env(env::HOOKS_DIR, machine.scratch("hooks")).run()
    };

    let outcome = run(&plan).expect_code(0);
    let lines = [
        "post-plan: terraform_data.greeting",
        "advisory check `size` failed: big",
    ];
    assert!(
        lines.iter().all(|line| outcome.log().contains(line)),
        "{outcome}"
    );
    let judged = result(&machine, &plan, "post-plan");
    assert_eq!(judged["outcome"], "passed");
    assert_eq!(judged["result"]["data"], json!({"commit": "c"}));
    let record = &machine.context(&plan)["mayflyPlan"][&plan.step_id];
    assert_eq!(judged["planSha256"], record["sha256"]);
    assert_eq!(judged["hooks"], record["judgedBy"]);

    run(&apply).expect_code(0);
    assert_eq!(
        fs::read_to_string(&seen)
            .unwrap()
            .lines()
            .collect::<Vec<_>>(),
        [
            "pre-init metadata.json ",
            "pre-plan metadata.json ",
            "post-plan metadata.json outcome.json plan.json plan.tfplan ",
            "pre-init metadata.json ",
            "pre-apply metadata.json plan.json plan.tfplan ",
            "post-apply metadata.json outcome.json ",
        ]
        .map(str::trim_end)
    );
    assert_eq!(machine.resources(&apply), ["terraform_data.greeting"]);
    assert!(!has_plan_as_json(machine.folder()));
}

#[test]
fn a_plan_that_a_hook_refuses_can_not_be_applied() {
    let (machine, plan, outcome) = run_plan(&[("post-plan", "echo why it is refused; exit 3")], 1);
    assert!(outcome.log().contains("why it is refused"), "{outcome}");
    assert!(
        outcome
            .error()
            .contains("the operator's hook `post-plan` ended with exit code 3"),
        "{outcome}"
    );
    assert_eq!(machine.statuses(&plan), ("failed".into(), "failed".into()));
    assert_eq!(machine.record(&plan).terraform_plan, None);
    assert_eq!(result(&machine, &plan, "post-plan")["outcome"], "failed");
    assert_eq!(machine.context(&plan).get("mayflyPlan"), None);
    assert!(!has_plan_as_json(machine.folder()));
}

#[test]
fn mandatory_checks_fail_a_run_unless_its_workspace_is_exempt_or_the_operator_wants_a_warning() {
    let check = |level| {
        let text = format!(
            "echo '{{\"checks\": [{{\"name\": \"tags\", \"level\": \"{level}\", \"passed\": false}}]}}' > result.json"
        );
        ("post-plan", text)
    };
    let settings = |text: &str| format!("{{\"post-plan\": {text}}}");
    let exempt = settings(&format!("{{\"exempt\": [\"{}\"]}}", job::WORKSPACE));
    for (level, settings, code, outcome) in [
        ("advisory", settings("{}"), 0, "passed"),
        ("mandatory", settings("{}"), 1, "failed"),
        (
            "mandatory",
            settings("{\"exempt\": [\"another\"]}"),
            1,
            "failed",
        ),
        ("mandatory", exempt, 0, "warned"),
        (
            "mandatory",
            settings("{\"onFailure\": \"warn\"}"),
            0,
            "warned",
        ),
    ] {
        let (name, script) = check(level);
        let files = [
            (name, script.as_str()),
            ("settings.json", settings.as_str()),
        ];
        let (machine, plan, ran) = run_plan(&files, code);
        assert_eq!(
            result(&machine, &plan, "post-plan")["outcome"],
            outcome,
            "{ran}"
        );
        assert!(
            ran.log().contains(&format!("{level} check `tags` failed")),
            "{ran}"
        );
    }
}

#[test]
fn a_hook_that_hangs_is_ended_with_all_that_it_started() {
    let machine_pid = "trap '' INT; setsid sleep 600 & echo pid=$!; sleep 600";
    // Enough for the hook to print its line on a busy machine.
    let settings = r#"{"post-plan": {"timeoutSeconds": 5, "onFailure": "warn"}}"#;
    let (_, _, outcome) = run_plan(
        &[("post-plan", machine_pid), ("settings.json", settings)],
        0,
    );
    assert!(outcome.log().contains("did not end within 5s"), "{outcome}");
    let line = outcome
        .log()
        .lines()
        .find_map(|line| line.strip_prefix("pid="));
    assert!(ends(line.unwrap()), "{outcome}");
}

#[test]
fn a_hook_that_takes_too_long_fails_the_run() {
    let settings = r#"{"post-plan": {"timeoutSeconds": 1}}"#;
    let files = [("post-plan", "exec sleep 600"), ("settings.json", settings)];
    let (machine, plan, outcome) = run_plan(&files, 1);
    let expected = "the operator's hook `post-plan` did not end within 1s";
    assert!(outcome.error().contains(expected), "{outcome}");
    assert_eq!(result(&machine, &plan, "post-plan")["outcome"], "failed");
    assert_eq!(machine.record(&plan).terraform_plan, None);
}

#[test]
fn a_hook_gets_no_secret_of_the_platform_of_stores_or_of_the_run() {
    // In base64, as the internal secret is.
    const OF_OPERATOR: &str = "operatorcanary0123456789operatorcanary0123456789operatorcanary01";
    let (machine, repository) = (machine(), Repository::fixture());
    let seen = machine.scratch("seen");
    let see = format!(
        "{{ env; cat metadata.json outcome.json; }} > {}",
        seen.display()
    );
    hooks(&machine, &[("post-plan", &see)]);
    let mut plan = JobData {
        access_token: Some("token-canary".into()),
        module_ssh_key: Some("key-canary".into()),
        ..job::plan(&repository)
    };
    plan.variables
        .insert("greeting".into(), "input-canary".into());
    plan.environment_variables
        .insert("DB_PASSWORD".into(), "variable-canary".into());
    machine.queue(&[&plan]);
    let secrets = [
        env::INTERNAL_SECRET,
        env::REPORT_KEY,
        env::AWS_ACCESS_KEY,
        env::AWS_SECRET_KEY,
        env::AZURE_ACCESS_KEY,
        env::GCP_CREDENTIALS,
        env::REDIS_PASSWORD,
        env::CUSTOMER_VAULT_TOKEN,
        env::ASSUMER_ACCESS_KEY_ID,
        env::ASSUMER_SECRET_ACCESS_KEY,
    ];
    let tool = FakeTool::new();
    let run = with_hooks(&machine, &plan, &tool)
        .env(env::CUSTOMER_VAULT_ADDRESS, "http://127.0.0.1:9")
        .env(env::ENV_FORWARD, secrets.join(","));
    let run = secrets
        .iter()
        .fold(run, |run, name| run.env(name, OF_OPERATOR));
    let outcome = run.run().expect_code(0);
    let seen = fs::read_to_string(seen).unwrap();
    assert!(seen.contains(&format!("API_KEY={KEY}")), "{outcome}");
    assert!(seen.contains("\"workspaceId\""), "{seen}");
    for hidden in secrets.iter().chain(&["canary", OF_OPERATOR]) {
        assert!(!seen.contains(hidden), "{hidden}\n{seen}");
    }
}

#[test]
fn the_output_of_a_hook_is_limited_and_masked() {
    let script = "echo key=$API_KEY; head -c 100000000 /dev/zero | tr '\\0' x";
    let (machine, plan, outcome) = run_plan(&[("post-plan", script)], 0);
    let output = machine.step_output(&plan);
    assert!(output.len() < 2_000_000, "{} bytes", output.len());
    assert!(output.contains("more output than 1048576 bytes was dropped"));
    assert!(output.contains("key=") && !output.contains(KEY) && !outcome.log().contains(KEY));
}

#[test]
fn hooks_that_cannot_run_end_the_run_before_it_begins() {
    let unknown = [("settings.json", r#"{"after-plan": {}}"#)];
    let (_, _, outcome) = run_plan(&unknown, 64);
    assert!(
        outcome.error().contains("unknown variant `after-plan`"),
        "{outcome}"
    );
    let missing = [("settings.json", r#"{"pre-apply": {}}"#)];
    let (_, _, outcome) = run_plan(&missing, 64);
    assert!(
        outcome.error().contains("could not find the hook `"),
        "{outcome}"
    );
    // The interpreter is only missed when it is needed.
    let (machine, repository) = (machine(), Repository::fixture());
    let folder = hooks(&machine, &[("pre-init", "")]);
    fs::write(folder.join("pre-init"), "#!/nonexistent/interpreter\n").unwrap();
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    let tool = FakeTool::new();
    let outcome = with_hooks(&machine, &plan, &tool).run().expect_code(1);
    assert!(outcome.log().contains("could not start"), "{outcome}");
    assert!(!tool.was_called("init"), "{outcome}");
}

#[test]
fn a_workspace_does_not_influence_a_hook() {
    let (machine, repository) = (machine(), Repository::fixture());
    let evil = machine.scratch("evil");
    hooks(&machine, &[("post-plan", "env; ls -a")]);
    let variables = [
        "PATH",
        "LD_PRELOAD",
        "BASH_ENV",
        "ENV",
        "TF_CLI_ARGS_show",
        "HOME",
        "TMPDIR",
        "API_KEY",
    ];
    let evil = format!("/tmp/{}", evil.file_name().unwrap().display());
    let mut plan = JobData {
        command_list: vec![before(bash(
            1,
            &format!(
                "for name in BASH_ENV PYTHONPATH; do echo $name={evil} >> $terrakubeEnv; done; echo evil > jq"
            ),
        ))],
        ..job::plan(&repository)
    };
    let pairs = variables.map(|name| (name.to_owned(), evil.clone()));
    plan.environment_variables.extend(pairs);
    machine.queue(&[&plan]);
    let tool = FakeTool::new().on(
        "show",
        "[ -z \"$TF_CLI_ARGS_show\" ] && echo '{}' || echo '{\"evil\":1}'",
    );
    let outcome = with_hooks(&machine, &plan, &tool).run().expect_code(0);
    let hook = outcome.log().split("MAYFLY_HOOKS_DIR=").nth(1).unwrap();
    assert!(hook.contains("plan.json"), "{outcome}");
    let (_, shown) = outcome
        .log()
        .split_once("Plan")
        .unwrap_or(("", outcome.log()));
    assert!(!shown.contains(&evil), "{outcome}");
}

#[test]
fn hooks_that_code_of_the_run_has_changed_do_not_run() {
    let (machine, repository) = (machine(), Repository::fixture());
    let folder = hooks(&machine, &[("post-plan", "exit 1")]);
    let script = format!(
        "printf '#!/bin/bash\\nexit 0\\n' > {}/post-plan",
        folder.display()
    );
    let plan = JobData {
        command_list: vec![before_init(bash(1, &script))],
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = with_hooks(&machine, &plan, &FakeTool::new())
        .run()
        .expect_code(1);
    assert!(
        outcome.error().contains("have changed during the run"),
        "{outcome}"
    );
    assert_eq!(machine.record(&plan).terraform_plan, None);
}

#[test]
fn secrets_of_hooks_are_out_of_reach_for_code_of_the_run() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "run this test as root, which may become another user"
    );
    let (machine, repository) = (machine(), Repository::fixture());
    hooks(
        &machine,
        &[
            (
                "pre-plan",
                "[ \"$API_KEY\" = ico-0123456789abcdef ] && setsid sleep 600 & sleep 1; echo hook ran",
            ),
            ("post-plan", "exit 0"),
        ],
    );
    // The text of the key is not in the environment of the spies themselves.
    let look = "grep -aqs 'API_KEY=ico-[0-9]' /proc/[0-9]*/environ && echo FOUND";
    let spied = machine.scratch("spied");
    let spy = format!(
        "setsid bash -c \"while :; do {look} >> {}; done\" > /dev/null 2>&1 & echo spies",
        spied.display()
    );
    let mut plan = JobData {
        command_list: vec![
            before(bash(1, &spy)),
            after(bash(1, &format!("{look}; env | grep API_KEY; echo looked"))),
        ],
        ..job::plan(&repository)
    };
    plan.environment_variables
        .insert("EPHEMERAL_JOB_ENV_VARS".into(), "X=1".into());
    machine.queue(&[&plan]);
    give_away(repository.path(), 65534);
    let run = machine
        .executor(&plan)
        .env(env::HOOKS_DIR, machine.scratch("hooks"))
        .env(
            env::ENV_FORWARD,
            format!("{}API_KEY", env::FOR_HOOKS_PREFIX),
        )
        .env(format!("{}API_KEY", env::FOR_HOOKS_PREFIX), KEY);
    let outcome = run.as_user(65534).run().expect_code(0);
    for line in ["spies", "hook ran", "looked"] {
        assert!(outcome.log().contains(line), "{line}\n{outcome}");
    }
    assert!(!outcome.log().contains("FOUND"), "{outcome}");
    let spied = fs::read_to_string(spied).unwrap_or_default();
    assert_eq!(spied, "", "{outcome}");
    assert!(!outcome.log().contains("API_KEY="), "{outcome}");
}

#[test]
fn an_apply_without_a_reviewed_plan_is_judged_before_it() {
    for step in [StepType::Apply, StepType::Destroy] {
        for (script, code) in [("[ -s plan.tfplan ] && [ -s plan.json ]", 0), ("exit 1", 1)] {
            let (machine, repository, tool) = (machine(), Repository::fixture(), FakeTool::new());
            hooks(&machine, &[("post-plan", script)]);
            let job = job::step(step, &repository);
            machine.queue(&[&job]);
            let outcome = with_hooks(&machine, &job, &tool).run().expect_code(code);
            let calls = tool.calls();
            let plans = calls.iter().filter(|call| call.starts_with("plan "));
            let plans: Vec<_> = plans.map(|call| call.contains(" -destroy ")).collect();
            assert_eq!(plans, [step == StepType::Destroy], "{calls:?}\n{outcome}");
            let applies: Vec<_> = calls
                .iter()
                .filter(|call| call.starts_with("apply"))
                .collect();
            assert_eq!(
                applies.len(),
                usize::from(code == 0),
                "{calls:?}\n{outcome}"
            );
            assert!(
                applies
                    .iter()
                    .all(|call| call.ends_with("terraformLibrary.tfPlan")),
                "{calls:?}"
            );
            assert!(!tool.was_called("destroy"), "{calls:?}");
        }
    }
}

#[test]
fn a_plan_that_other_hooks_have_judged_is_judged_again_before_its_apply() {
    let (machine, repository) = (machine(), Repository::fixture());
    let (plan, _) = run_plan_of(&machine, &repository, &[("post-plan", "exit 0")], 0);
    let apply = job::apply_after(&plan);
    hooks(&machine, &[("post-plan", "echo judged again; exit 1")]);
    let tool = FakeTool::new();
    let outcome = with_hooks(&machine, &apply, &tool).run().expect_code(1);
    assert!(outcome.log().contains("judged again"), "{outcome}");
    assert!(!tool.was_called("apply"), "{outcome}");
}

#[test]
fn a_signal_during_a_hook_ends_the_run_before_the_apply() {
    let (machine, repository, tool) = (machine(), Repository::fixture(), FakeTool::new());
    let settings = r#"{"pre-apply": {"onFailure": "warn"}}"#;
    hooks(
        &machine,
        &[
            ("pre-apply", "echo in-hook; exec sleep 600"),
            ("settings.json", settings),
        ],
    );
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let run = with_hooks(&machine, &apply, &tool)
        .env(env::GRACE_PERIOD_SECONDS, "60")
        .start();
    run.running.wait_for(Stream::Stdout, "in-hook");
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);
    assert!(!tool.was_called("apply"), "{outcome}");
    assert_eq!(machine.statuses(&apply), ("failed".into(), "failed".into()));
}

#[test]
fn a_failed_hook_after_an_apply_fails_the_step_and_keeps_its_state() {
    let (machine, repository) = (machine(), Repository::fixture());
    hooks(&machine, &[("post-apply", "exit 9")]);
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let run = machine
        .executor(&apply)
        .env(env::HOOKS_DIR, machine.scratch("hooks"));
    let outcome = run.run().expect_code(1);
    assert!(
        outcome
            .error()
            .contains("`post-apply` ended with exit code 9"),
        "{outcome}"
    );
    assert_eq!(machine.resources(&apply), ["terraform_data.greeting"]);
}
