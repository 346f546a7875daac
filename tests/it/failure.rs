//! Bad input: a message that names the fault, the right exit code, with nothing half done and nothing tried twice.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use integration_tests::{FakeTool, Outcome, Repository, job};
use job_contract::{JobData, env};
use test_peers::http::{Response, Server};
use test_peers::port::Port;

use crate::machine;

#[track_caller]
fn assert_named(outcome: &Outcome, code: i32, words: &[&str]) {
    assert_eq!(outcome.code(), code, "{outcome}");
    let error = outcome.error();
    for word in words {
        assert!(
            error.contains(word),
            "{word:?} is not in {error:?}\n{outcome}"
        );
    }
    assert_eq!(i32::from(outcome.report().outcome), code);
    assert!(!outcome.finished.stderr.contains("panicked"), "{outcome}");
}

#[test]
fn job_data_that_cannot_be_decoded_is_refused_without_showing_it() {
    let secret = r#"{"accessToken":"hunter2000","jobId":"412","refresh":"hunter2000"}"#;
    let cut_off = r#"{"accessToken":"hunter2000","#;
    for text in [
        String::new(),
        "hunter2000$".to_owned(),
        STANDARD.encode(secret),
        STANDARD.encode(cut_off),
        STANDARD.encode([0x28, 0xb5, 0x2f, 0xfd, 9, 9, 9]),
        secret.to_owned(),
    ] {
        let machine = machine();
        let outcome = machine.executor_with_data(Some(&text)).run();
        assert_named(&outcome, 65, &["job data"]);
        assert!(!outcome.to_string().contains("hunter2000"), "{outcome}");
        assert!(
            !machine.data_dir().join("platform/jobs").exists(),
            "something was recorded"
        );
    }
}

#[test]
fn absent_job_data_is_named_by_its_variable() {
    let outcome = machine().executor_with_data(None).run();
    assert_named(&outcome, 65, &[env::JOB_DATA]);
}

#[test]
fn job_data_may_come_from_a_file() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    let file = machine.scratch("job-data");
    std::fs::write(
        &file,
        job_contract::Document::written(&plan)
            .encode_compressed()
            .unwrap(),
    )
    .unwrap();
    machine
        .executor_with_data(None)
        .env(env::JOB_DATA_FILE, &file)
        .run()
        .expect_code(0);
    let missing = machine
        .executor_with_data(None)
        .env(env::JOB_DATA_FILE, machine.scratch("not-there"))
        .run();
    assert_named(&missing, 65, &["not-there"]);
}

/// Tools and scripts never ran, and nothing is left behind.
#[test]
fn the_file_of_the_job_data_is_gone_also_where_a_setting_is_unusable() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job_contract::Document::written(&job::plan(&repository));
    let file = machine.scratch("job-data");
    for (name, value) in [
        (env::GRACE_PERIOD_SECONDS, "soon"),
        (env::REPORT_KEY, "c2hvcnQ"),
        (env::LOG_FILTER, "a=b=c"),
    ] {
        std::fs::write(&file, plan.encode_compressed().unwrap()).unwrap();
        let outcome = machine
            .executor_with_data(None)
            .env(env::JOB_DATA_FILE, &file)
            .env(name, value)
            .run();
        assert_named(&outcome, 64, &[]);
        assert!(outcome.finished.stderr.contains(name), "{outcome}");
        assert!(!file.exists(), "{outcome}");
    }
}

#[test]
fn a_folder_that_cannot_be_is_refused_with_the_setting_that_names_it() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    let (file, dangling) = (machine.scratch("file"), machine.scratch("dangling"));
    std::fs::write(&file, "no folder").unwrap();
    std::os::unix::fs::symlink("nowhere/at/all", &dangling).unwrap();
    let places = [
        file.clone(),
        file.join("below"),
        dangling,
        "/proc/work".into(),
    ];
    for place in &places {
        for variable in [env::WORK_DIR, env::DATA_DIR, env::CHECKOUT_DIR] {
            machine.queue(&[&plan]);
            let outcome = machine.executor(&plan).env(variable, place).run();
            assert_named(&outcome, 64, &[&*place.to_string_lossy()]);
            let hint = outcome.report().hint.as_deref().unwrap_or_default();
            assert!(hint.contains(variable), "{hint:?}\n{outcome}");
        }
    }
}

#[test]
fn a_step_with_policies_is_not_run_unless_the_operator_allows_it() {
    let repository = Repository::fixture();
    let with_policies = || {
        let mut plan = job::plan(&repository);
        plan.policy_list = serde_json::json!([{"severity": "HARD_MANDATORY"}]);
        plan
    };
    let evaluation = JobData {
        step_type: Some("policyEvaluation".to_owned()),
        ..job::plan(&repository)
    };
    let by_itself = |mut job: JobData| {
        let own = format!("{}=true", env::IGNORE_POLICIES);
        job.environment_variables
            .insert(env::EPHEMERAL_ENV.to_owned(), own);
        job
    };
    for job in [
        with_policies(),
        evaluation.clone(),
        by_itself(with_policies()),
    ] {
        let machine = machine();
        machine.queue(&[&job]);
        let own = job.environment_variables.contains_key(env::EPHEMERAL_ENV);
        let value = if own { "true" } else { "" };
        let outcome = machine
            .executor(&job)
            .env(env::IGNORE_POLICIES, value)
            .run();
        assert_named(&outcome, 1, &["policies", "nothing was run"]);
        assert_eq!(machine.statuses(&job), ("failed".into(), "failed".into()));
        let output = machine.step_output(&job);
        assert!(output.contains(env::IGNORE_POLICIES), "{output}");
    }
    for job in [with_policies(), evaluation] {
        let machine = machine();
        machine.queue(&[&job]);
        let outcome = machine
            .executor(&job)
            .env(env::IGNORE_POLICIES, "true")
            .run();
        outcome.expect_code(0);
        assert_eq!(
            machine.statuses(&job),
            ("completed".into(), "completed".into())
        );
        let output = machine.step_output(&job);
        assert!(output.contains("NONE IS EVALUATED"), "{output}");
    }
}

#[test]
fn a_step_that_asks_for_what_does_not_exist_is_refused() {
    type Case = (&'static str, fn(&mut JobData), &'static [&'static str]);
    let repository = Repository::fixture();
    let cases: [Case; 6] = [
        (
            "type",
            |job| job.step_type = Some("terraformShow".into()),
            &["terraformShow"],
        ),
        ("no type", |job| job.step_type = None, &["type"]),
        (
            "folder",
            |job| job.folder = Some("/not/there".into()),
            &["not/there"],
        ),
        (
            "outside",
            |job| job.folder = Some("/../../etc".into()),
            &["etc"],
        ),
        (
            "version",
            |job| job.terraform_version = "one.two".into(),
            &["one.two"],
        ),
        (
            "organization",
            |job| job.organization_id = "../x".into(),
            &["organizationId"],
        ),
    ];
    for (name, change, words) in cases {
        let machine = machine();
        let mut plan = job::plan(&repository);
        if name != "organization" {
            machine.queue(&[&plan]);
        }
        change(&mut plan);
        plan.access_token = Some("hunter2000".into());

        let outcome = machine.run(&plan);

        assert_named(&outcome, 65, words);
        assert!(
            !outcome.to_string().contains("hunter2000"),
            "{name}: {outcome}"
        );
        assert!(outcome.left_behind.is_empty(), "{name}: {outcome}");
        if name != "organization" {
            assert_eq!(machine.statuses(&plan).0, "failed", "{name}: {outcome}");
        }
    }
}

#[test]
fn a_folder_that_leaves_the_tree_through_a_link_is_refused() {
    let (machine, repository) = (machine(), Repository::fixture());
    std::os::unix::fs::symlink("/etc", repository.path().join("way-out")).unwrap();
    repository.commit(&[]);
    let plan = JobData {
        folder: Some("/way-out".into()),
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    assert_named(&machine.run(&plan), 65, &["way-out"]);
}

/// As the stock executor, which records the commit that it cloned.
#[test]
fn a_missing_folder_is_reported_with_the_commit_that_lacks_it() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = JobData {
        folder: Some("/not-there".into()),
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = machine.run(&plan);
    assert_named(&outcome, 65, &["not-there"]);
    assert_eq!(machine.statuses(&plan), ("failed".into(), "failed".into()));
    assert_eq!(machine.record(&plan).commit_id, Some(repository.head()));
    assert_eq!(outcome.report().commit_id, Some(repository.head()));
}

#[test]
fn a_source_that_cannot_be_fetched_fails_before_the_claim() {
    let repository = Repository::fixture();
    let broken = Server::start(|_| Response::new(503, "")).unwrap();
    let of_server = format!("{}/not/there.git", broken.url());
    let port = Port::take().unwrap();
    let of_none = format!("http://{}/not/there.git", port.address());
    // What may pass is not reported: a report would end the job, and another executor is to try again.
    for (source, code, statuses) in [
        ("file:///not/there.git", 65, ("failed", "failed")),
        (&of_none, 75, ("queue", "pending")),
        (&of_server, 75, ("queue", "pending")),
    ] {
        let machine = machine();
        let plan = JobData {
            source: Some(source.into()),
            ..job::plan(&repository)
        };
        machine.queue(&[&plan]);
        let outcome = machine.run(&plan);
        assert_named(&outcome, code, &[source]);
        assert!(
            !machine.data_dir().join("platform/claims").exists(),
            "{outcome}"
        );
        let (job, step) = machine.statuses(&plan);
        assert_eq!((job.as_str(), step.as_str()), statuses);
        assert_eq!(outcome.report().unreported, code == 75);
        assert!(machine.step_output(&plan).contains(source), "{outcome}");
    }
    // It is another executor that tries again.
    assert_eq!(broken.requests().len(), 1);
}

#[test]
fn temporary_failures_are_reported_if_exit_codes_are_not_read() {
    let (machine, repository) = (machine(), Repository::fixture());
    let port = Port::take().unwrap();
    let plan = JobData {
        source: Some(format!("http://{}/not/there.git", port.address())),
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = machine
        .executor(&plan)
        .without(env::OUTCOME_EXIT_CODE)
        .run()
        .expect_code(0);
    assert_eq!(machine.statuses(&plan), ("failed".into(), "failed".into()));
    assert!(!outcome.report().unreported, "{outcome}");
}

#[test]
fn a_branch_or_commit_that_is_not_there_is_named() {
    let repository = Repository::fixture();
    let gone = "00112233445566778899aabbccddeeff00112233";
    for (change, word) in [
        (
            (|job: &mut JobData| job.branch = "no-such-branch".into()) as fn(&mut JobData),
            "no-such-branch",
        ),
        (
            |job| job.commit_id = Some("00112233445566778899aabbccddeeff00112233".into()),
            gone,
        ),
    ] {
        let machine = machine();
        let mut plan = job::plan(&repository);
        change(&mut plan);
        machine.queue(&[&plan]);
        let outcome = machine.run(&plan);
        assert_ne!(outcome.code(), 0, "{outcome}");
        assert!(outcome.error().contains(word), "{outcome}");
    }
}

#[test]
fn configuration_errors_name_their_variable() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    for (name, value) in [
        (env::STATE_TYPE, "NoSuchStateImpl"),
        (env::GRACE_PERIOD_SECONDS, "soon"),
        (env::LOG_FILTER, "a=b=c"),
    ] {
        let outcome = machine.executor(&plan).env(name, value).run();
        assert_eq!(outcome.code(), 64, "{outcome}");
        assert!(outcome.finished.stderr.contains(name), "{outcome}");
        assert!(
            outcome.report().hint.as_deref().unwrap().contains(name),
            "{outcome}"
        );
        assert!(!machine.plan_file(&plan).exists(), "{outcome}");
    }
}

#[test]
fn a_setting_that_is_no_text_is_named() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    let broken = OsStr::from_bytes(b"hunter2\xff");
    for name in [env::JOB_DATA, env::TOOLS_BRANCH] {
        let outcome = machine.executor(&plan).env(name, broken).run();
        assert_eq!(outcome.code(), 64, "{outcome}");
        let hint = outcome.report().hint.as_deref();
        assert!(hint.is_some_and(|hint| hint.contains(name)), "{outcome}");
        assert!(!outcome.to_string().contains("hunter2"), "{outcome}");
    }
}

#[test]
fn an_executor_that_does_not_get_its_secrets_begins_nothing() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    // One that is not open, one that is a pipe, and none.
    for descriptor in ["999", "1", "three", ""] {
        let executor = machine.executor(&plan);
        let outcome = executor.env("MAYFLY_SECRETS_DESCRIPTOR", descriptor).run();
        assert_eq!(outcome.code(), 75, "{outcome}");
        let said = &outcome.finished.stderr;
        assert!(said.contains("MAYFLY_SECRETS_DESCRIPTOR"), "{outcome}");
        assert_eq!(machine.statuses(&plan).1, "pending", "{outcome}");
    }
}

/// A chart writes empty values for what is not set.
#[test]
fn a_setting_that_is_blank_is_one_that_is_not_set() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    let mut executor = machine.executor(&plan);
    for name in [
        env::JOB_DATA_FILE,
        env::WORK_DIR,
        env::CHECKOUT_DIR,
        env::RELEASE_MIRROR_URL,
        env::RELEASE_SIGNATURES,
        env::RELEASE_KEYS_FILE,
        env::SSH_KNOWN_HOSTS,
        env::ARCHIVE_MAX_BYTES,
        env::COLOR_OUTPUT,
        env::DISABLE_ACKNOWLEDGE,
        env::GRACE_PERIOD_SECONDS,
        env::MAX_DURATION_MINUTES,
        env::MEMORY_STOP_PERCENT,
        env::ENV_FORWARD,
        env::LOG_FILE,
        env::LOG_FILTER,
        env::POD_NAME,
    ] {
        executor = executor.env(name, "");
    }
    let outcome = executor.env(env::POD_UID, " ").run();
    assert_eq!(outcome.code(), 0, "{outcome}");
    let claims = machine.data_dir().join("platform/claims");
    let claim = std::fs::read_dir(claims).unwrap().next().unwrap().unwrap();
    let claim = std::fs::read_to_string(claim.path()).unwrap();
    // Pods without a name of their own would otherwise all be the holder of each other's claims.
    let claim: serde_json::Value = serde_json::from_str(&claim).unwrap();
    assert!(!claim["uid"].as_str().unwrap().trim().is_empty(), "{claim}");
    assert!(!claim["pod"].as_str().unwrap().is_empty(), "{claim}");
}

#[test]
fn a_configuration_the_tool_rejects_fails_the_step_not_the_executor() {
    let (machine, repository) = (machine(), Repository::module("resource {\n"));
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    let outcome = machine.run(&plan).expect_code(1);
    assert!(outcome.log().contains("main.tf"), "{outcome}");
    assert_eq!(machine.statuses(&plan), ("failed".into(), "failed".into()));
    assert!(machine.step_output(&plan).contains("main.tf"), "{outcome}");
}

#[test]
fn a_failing_init_reaches_no_plan() {
    let (machine, tool, repository) = (
        machine(),
        FakeTool::new().on("init", "echo cannot-initialise >&2; exit 1"),
        Repository::fixture(),
    );
    let plan = JobData {
        on_failure_list: vec![job::bash(1, "echo cleaned-up")],
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = machine
        .executor(&plan)
        .env("PATH", tool.path())
        .run()
        .expect_code(1);
    assert!(outcome.log().contains("cannot-initialise"), "{outcome}");
    assert!(outcome.log().contains("cleaned-up"), "{outcome}");
    assert!(!tool.was_called("plan"), "{outcome}");
}
