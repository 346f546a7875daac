//! The operator's rule for addresses: what it refuses is never connected to, whatever led there.

use std::fs;
use std::path::Path;

use integration_tests::job::{bash, before_init};
use integration_tests::{Outcome, Repository, job};
use job_contract::{Exit, JobData, Tool, env};
use test_peers::modules::{MODULE, ModuleRegistry};
use test_peers::name_server::NameServer;
use test_peers::{skips, wait};
use test_platform::Secret;
use test_platform::launcher::{self, Launcher};

use super::{Private, call};
use crate::machine;

with_both_tools! {
    a_module_that_is_not_allowed_ends_init,
    modules_that_a_registry_or_a_web_server_has_in_git_are_judged,
    an_address_that_a_script_replaces_is_judged,
}

/// The executor ended a step in `init` because of this address.
#[track_caller]
fn assert_refused(outcome: &Outcome, address: &str) {
    // The step has failed, and is reported.
    let failed = i32::from(Exit::StepFailed.code());
    assert_eq!(outcome.code(), failed, "{outcome}");
    let refusal = format!(
        "the git URL `{address}` is not allowed by `{}`",
        env::ALLOWED_VCS_URL_REGEX
    );
    // The tool breaks its lines.
    let words = outcome.log().split_whitespace();
    let words: Vec<_> = words.filter(|word| *word != "│").collect();
    assert!(words.join(" ").contains(&refusal), "{outcome}");
}

/// Runs the plan while these repositories alone are allowed.
fn run_with(
    private: &Private,
    plan: &JobData,
    allowed: &str,
    authorities: Option<&str>,
) -> Outcome {
    let machine = machine();
    machine.queue(&[plan]);
    let rule = format!("{}/({allowed})\\.git", private.server.url());
    let run = machine.executor(plan).env(env::ALLOWED_VCS_URL_REGEX, rule);
    match authorities {
        Some(text) => {
            let file = machine.scratch("authorities.pem");
            fs::write(&file, text).unwrap();
            run.env(env::RUN_CA_FILE, file).run()
        }
        None => run.run(),
    }
}

fn a_module_that_is_not_allowed_ends_init(tool: Tool) {
    let private = Private::nested();
    let outcome = run_with(&private, &private.plan(tool), "source|module", None);
    assert_refused(&outcome, &private.url("inner"));
    assert!(private.was_asked("module") && !private.was_asked("inner"));
}

fn modules_that_a_registry_or_a_web_server_has_in_git_are_judged(tool: Tool) {
    let [name, provider, version] = MODULE;
    let mut servers = Vec::new();
    let private = Private::start(|url| {
        servers = ["of-registry", "of-web"]
            .map(|name| ModuleRegistry::leading_to(&format!("git::{url}/{name}.git")).unwrap())
            .into();
        let [registry, web] = [&servers[0], &servers[1]].map(ModuleRegistry::host);
        format!(
            "module \"registry\" {{\n  source  = \"{registry}/acme/{name}/{provider}\"\n  version = \"{version}\"\n}}\n\
             module \"web\" {{\n  source = \"https://{web}/plain\"\n}}\n"
        )
    });
    let names = ["of-registry", "of-web"];
    for name in names {
        private.add(name, &Repository::module("locals { led = true }\n"));
    }
    let authorities: String = servers.iter().map(ModuleRegistry::certificate).collect();
    let plan = private.plan(tool);
    let outcome = run_with(&private, &plan, "source", Some(&authorities));
    for name in names {
        assert_refused(&outcome, &private.url(name));
        assert!(!private.was_asked(name));
    }
    let allowed = "source|of-registry|of-web";
    run_with(&private, &plan, allowed, Some(&authorities)).expect_code(0);
    assert!(names.iter().all(|name| private.was_asked(name)));
}

fn an_address_that_a_script_replaces_is_judged(tool: Tool) {
    let private = Private::start(|url| call(&format!("{url}/module.git")));
    let other = private.url("other");
    let script = format!(
        "git config --global url.{other}.insteadOf {}",
        private.url("module")
    );
    private.add("other", &Repository::module("locals { other = true }\n"));
    let plan = JobData {
        command_list: vec![before_init(bash(1, &script))],
        ..private.plan(tool)
    };
    let outcome = run_with(&private, &plan, "source|module", None);
    assert_refused(&outcome, &other);
    assert!(!private.was_asked("other"));
    run_with(&private, &plan, "source|module|other", None).expect_code(0);
    assert!(private.was_asked("other") && !private.was_asked("module"));
}

const RULE: &str = r"https://allowed\.test/.*";

/// A plan whose source is on this host.
fn plan_from(host: &str, repository: &Repository) -> JobData {
    JobData {
        source: Some(format!("https://{host}/a.git")),
        ..job::plan(repository)
    }
}

#[test]
fn an_executor_resolves_no_name_for_a_source_that_is_not_allowed() {
    let Some(names) = skips::needed(NameServer::start()) else {
        return;
    };
    let (machine, repository) = (machine(), Repository::fixture());
    let words = names.words(&machine.scratch("resolv.conf")).unwrap();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let run = |host: &str| {
        let plan = plan_from(host, &repository);
        machine.queue(&[&plan]);
        let run = machine.executor(&plan).wrapped_in(&words);
        run.env(env::ALLOWED_VCS_URL_REGEX, RULE).run()
    };
    let outcome = run("bob:hunter2@forbidden.test");
    assert_eq!(outcome.code(), i32::from(Exit::BadJobData.code()));
    assert!(
        outcome.error().contains(
            "the git URL `https://forbidden.test/a.git` is not allowed by `ALLOWED_VCS_URL_REGEX`"
        ),
        "{outcome}"
    );
    assert_eq!(names.asked(), Vec::<String>::new());
    // The same executor asks this server, if it asks any.
    let outcome = run("allowed.test");
    assert!(outcome.error().contains("allowed.test"), "{outcome}");
    assert!(
        names.asked().contains(&"allowed.test".to_owned()),
        "{outcome}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_resolves_no_name_for_a_source_that_is_not_allowed() {
    let Some(names) = skips::needed(NameServer::start()) else {
        return;
    };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (machine, repository) = (machine(), Repository::fixture());
    let words = names.words(&machine.scratch("resolv.conf")).unwrap();
    let mut command = launcher::command(&words[0], &machine.scratch("home"));
    command.args(&words[1..]).arg(crate::LAUNCHER);
    launcher::serve(&mut command, "process")
        .env(env::EXECUTOR, Path::new(crate::EXECUTOR))
        .env(env::DATA_DIR, machine.data_dir())
        .env(env::INTERNAL_SECRET, Secret::long().text())
        .env(env::ALLOWED_VCS_URL_REGEX, RULE);
    let launcher = tokio::task::block_in_place(|| Launcher::start(&mut command));
    let forbidden = plan_from("bob:hunter2@forbidden.test", &repository);
    let status = launcher.endpoint.post(&forbidden).await.unwrap();
    assert_eq!(status, 400);
    assert_eq!(names.asked(), Vec::<String>::new());
    // The executor of this launcher asks this server.
    let allowed = plan_from("allowed.test", &repository);
    machine.queue(&[&allowed]);
    launcher.endpoint.accept(&allowed).await;
    wait::until("the name of the source is asked for", async || {
        names.asked().contains(&"allowed.test".to_owned())
    })
    .await;
}
