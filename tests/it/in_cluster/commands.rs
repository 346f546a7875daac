//! The commands about runs, as a person beside the cluster uses them: what they print, and what they end with.

use std::fs;

use cluster::rights::{LEASE, Need, RIGHTS, Right};
use integration_tests::process::Stream;
use integration_tests::{Finished, Repository, Running, job};
use job_contract::job::StepType;
use job_contract::{JobData, env};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use test_cluster::{Cluster, Rule, State};

use super::endings::{begun, endless};
use super::{Fixture, IMAGE, LAUNCHER, REPORT_KEY, ROLES, name, rules};

impl Fixture {
    /// What a command comes to.
    fn run(&self, args: &[&str]) -> Finished {
        Running::start(&mut self.command(args)).wait()
    }

    /// What a command answers that does what it was asked.
    #[track_caller]
    pub(super) fn told(&self, args: &[&str]) -> String {
        let finished = self.run(args);
        assert_eq!(finished.code(), 0, "{args:?}: {finished}");
        finished.stdout
    }

    #[track_caller]
    pub(super) fn json(&self, args: &[&str]) -> Value {
        let text = self.told(&[args, &["-o", "json"]].concat());
        serde_json::from_str(&text).unwrap()
    }

    /// The document of a step, as a file.
    pub(super) fn document(&self, job: &JobData) -> String {
        let path = self.machine.scratch(&format!("{}.json", job.step_id));
        fs::write(&path, serde_json::to_vec(job).unwrap()).unwrap();
        path.to_str().unwrap().to_owned()
    }

    async fn until_gone(&self, job: &JobData) {
        let name = name(job);
        let gone = |state: &State| state.job(&name).is_none().then_some(());
        self.until(&format!("{name} is gone"), gone).await;
    }
}

fn rule(right: &Right) -> Rule {
    let resource = match right.subresource {
        "" => right.resource.to_owned(),
        below => format!("{}/{below}", right.resource),
    };
    Rule {
        api_groups: vec![right.group.to_owned()],
        resources: vec![resource],
        resource_names: right
            .lease_only
            .then(|| LEASE.to_owned())
            .into_iter()
            .collect(),
        verbs: vec![right.verb.to_owned()],
    }
}

/// A command that could not do what it was asked says why on standard error, and nothing else.
#[track_caller]
fn assert_refused(finished: &Finished, code: i32, words: &[&str]) {
    assert_eq!(finished.code(), code, "{finished}");
    assert_eq!(finished.stdout, "", "{finished}");
    assert!(finished.stderr.starts_with("error: "), "{finished}");
    for words in words {
        assert!(finished.stderr.contains(words), "no {words:?}: {finished}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_launched_followed_and_looked_at_afterwards() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let plan = job::plan(&repository);
    let name = name(&plan);
    fixture.machine.queue(&[&plan]);
    let document = fixture.document(&plan);

    let followed = fixture.run(&["launch", "-f", &document, "--follow"]);
    assert_eq!(followed.code(), 0, "{followed}");
    assert!(followed.stdout.contains("Plan: 1 to add"), "{followed}");
    assert!(!followed.stdout.contains("\"target\""), "{followed}");
    assert!(followed.stderr.contains(&name), "{followed}");
    assert_eq!(
        fixture.machine.statuses(&plan),
        ("completed".into(), "completed".into())
    );
    fixture.until_over(&plan, "Complete").await;

    let again = fixture.run(&["launch", "-f", &document, "--wait"]);
    assert_eq!(again.code(), 0, "{again}");
    assert!(again.stderr.contains("was launched before"), "{again}");
    assert_eq!(again.stdout, "");
    assert_eq!(fixture.jobs_created(), 1);

    // Each of its names means the run, and its log ends by itself.
    for word in [&plan.job_id, &format!("{}/{}", plan.job_id, plan.step_id)] {
        assert_eq!(fixture.told(&["logs", word, "-f"]), followed.stdout);
    }
    let lines = fixture.told(&["logs", &name, "-o", "json"]);
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(lines.iter().all(|line| line["text"].is_string()));
    assert!(lines.len() > followed.stdout.lines().count());

    let table = fixture.told(&["list"]);
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows.len(), 2, "{table}");
    assert!(rows[1].starts_with(&name) && rows[1].contains("completed"));
    let run = &fixture.json(&["list"])["runs"][0];
    assert_eq!(
        (&run["name"], &run["state"], &run["verdict"]),
        (&json!(name), &json!("completed"), &json!("completed"))
    );

    let text = fixture.told(&["explain", &name]);
    for words in ["completed", "Timeline", "accepted", "init", "plan", "ended"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    let told = fixture.json(&["explain", &name]);
    assert_eq!(told["verdict"]["outcome"], 0);
    let timeline = told["timeline"].as_array().unwrap();
    assert_eq!(timeline[0]["what"], "accepted");
    assert!(timeline.iter().any(|moment| moment["isPhase"] == true));

    let result = &fixture.json(&["cancel", &name])["result"];
    assert_eq!(result, "already_over");
    assert!(fixture.state().await.job(&name).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_outcome_of_a_run_is_the_exit_code_of_the_command_that_waits() {
    let fixture = or_skip!(Fixture::new().await);
    let repository = Repository::module("output \"a\" {\n  value = nothing.such\n}\n");
    let plan = job::plan(&repository);
    fixture.machine.queue(&[&plan]);
    let document = fixture.document(&plan);

    let waited = fixture.run(&["launch", "-f", &document, "--wait", "-o", "json"]);
    assert_eq!(waited.code(), 1, "{waited}");
    let events: Vec<Value> = waited
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    assert_eq!((kinds[0], kinds.last()), ("submitted", Some(&"ended")));
    assert!(!kinds.contains(&"log"));
    let verdict = &events.last().unwrap()["verdict"];
    assert_eq!(
        (&verdict["kind"], &verdict["outcome"]),
        (&json!("step_failed"), &json!(1))
    );
    let explained = fixture.told(&["explain", &plan.job_id]);
    let sentence = verdict["sentence"].as_str().unwrap();
    assert!(explained.contains("step_failed"), "{explained}");
    assert!(explained.contains(sentence), "{explained}");

    // The key may follow from the platform's secret in a file. The file stays, and without it there is no key.
    let file = fixture.machine.scratch("internal-secret");
    fs::write(&file, REPORT_KEY).unwrap();
    let explain = || {
        let mut command = fixture.command(&["explain", &plan.job_id]);
        command
            .env_remove(env::REPORT_KEY)
            .env(env::INTERNAL_SECRET_FILE, &file);
        Running::start(&mut command).wait()
    };
    let proven = explain();
    assert_eq!(proven.code(), 0, "{proven}");
    assert!(proven.stdout.contains(sentence), "{proven}");
    let unverified = "the pod left a message that could not be verified";
    assert!(!proven.stdout.contains(unverified), "{proven}");
    fs::remove_file(&file).unwrap();
    let unproven = explain();
    assert_eq!(unproven.code(), 0, "{unproven}");
    assert!(unproven.stdout.contains(unverified), "{unproven}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_cancelled_at_each_stage() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = endless(&fixture);
    let mut nowhere = job::in_job(&apply, "413");
    let selector = "EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS".to_owned();
    nowhere
        .environment_variables
        .insert(selector, "disk=ssd".to_owned());

    fixture.told(&["launch", "-f", &fixture.document(&nowhere)]);
    let waits = |state: &State| {
        let pods = state.pods_of(&name(&nowhere)).len();
        (pods == 1).then_some(())
    };
    fixture.until("the run waits", waits).await;
    let told = fixture.told(&["cancel", "413"]);
    assert!(told.contains("before its executor started"), "{told}");
    fixture.until_gone(&nowhere).await;
    let secrets = |state: &State| state.secrets.is_empty().then_some(());
    fixture.until("its job data is gone", secrets).await;

    let document = fixture.document(&apply);
    let following = Running::start(&mut fixture.command(&["launch", "-f", &document, "--follow"]));
    fixture.pod_at_work(&apply, || begun(&fixture) == 1).await;
    let result = &fixture.json(&["cancel", &apply.job_id])["result"];
    assert_eq!(result, "stopping");
    fixture.until_gone(&apply).await;
    // A command that followed the run shows it and ends as an interrupted run does.
    let followed = following.wait();
    assert_eq!(followed.code(), 143, "{followed}");
    assert_eq!(begun(&fixture), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_ends_the_following_and_not_the_run() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = endless(&fixture);
    let document = fixture.document(&apply);
    let following = Running::start(&mut fixture.command(&["launch", "-f", &document, "--follow"]));
    let pod = fixture.pod_at_work(&apply, || begun(&fixture) == 1).await;
    following.wait_for(Stream::Stdout, "terraform_data.a");
    following.signal(Signal::SIGINT);
    let followed = following.wait();
    assert_eq!(followed.code(), 130, "{followed}");
    assert!(followed.stderr.contains("The run goes on."), "{followed}");
    let run = &fixture.json(&["list"])["runs"][0];
    assert_eq!(run["state"], "running");
    assert_eq!(run["pod"], json!(pod.metadata.name));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_meant_must_be_there_and_be_one_run() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let plan = job::plan(&Repository::fixture());
    let apply = job::apply_after(&plan);
    for job in [&plan, &apply] {
        fixture.told(&["launch", "-f", &fixture.document(job)]);
    }
    for command in ["logs", "explain", "cancel"] {
        let unknown = fixture.run(&[command, "999"]);
        assert_refused(
            &unknown,
            64,
            &["no run `999`", &fixture.runs, "api-launcher list"],
        );
        if command != "explain" {
            let ambiguous = fixture.run(&[command, &plan.job_id, "-o", "json"]);
            assert_refused(&ambiguous, 64, &[&name(&plan), &name(&apply)]);
        }
    }
    let explained = fixture.told(&["explain", &plan.job_id]);
    for (step, job) in [("plan", &plan), ("apply", &apply)] {
        let title = format!("Run {}, {step} step {}", job.job_id, job.step_id);
        assert!(explained.contains(&title), "no {title:?} in {explained}");
    }
    let explained = fixture.json(&["explain", &plan.job_id]);
    let steps = [&explained, &explained["earlierSteps"][0]].map(|step| step["stepType"].clone());
    assert!(steps.contains(&json!("plan")) && steps.contains(&json!("apply")));
    assert_eq!(
        fixture.state().await.jobs.len(),
        2,
        "a word that may mean several runs cancels none"
    );

    let broken = fixture.machine.scratch("broken.json");
    fs::write(&broken, "{").unwrap();
    let refused = fixture.run(&["launch", "-f", broken.to_str().unwrap()]);
    assert_refused(&refused, 65, &["broken.json"]);
    let refused = fixture.run(&["launch", "-f", "/nowhere/job.json"]);
    assert_refused(&refused, 64, &["/nowhere/job.json"]);
    let mut wrong = plan.clone();
    let memory = "EPHEMERAL_MEMORY_LIMIT".to_owned();
    wrong.environment_variables.insert(memory, "lots".into());
    let refused = fixture.run(&["launch", "-f", &fixture.document(&wrong)]);
    assert_refused(&refused, 65, &["EPHEMERAL_MEMORY_LIMIT"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_error_of_an_unreachable_cluster_names_it_and_the_next_step() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let document = fixture.document(&job::plan(&Repository::fixture()));
    let away = fixture.machine.scratch("away");
    let kubeconfig = fixture
        .cluster
        .kubeconfig_file(LAUNCHER, &fixture.runs)
        .unwrap();
    let text = fs::read_to_string(&kubeconfig).unwrap();
    // Nothing serves TCP port multiplexing any more.
    let text = text.replace(&fixture.cluster.url(), "http://127.0.0.1:1");
    fs::write(&away, text).unwrap();
    let away = away.to_str().unwrap();
    for words in [
        &["list"][..],
        &["logs", "1"],
        &["explain", "1"],
        &["cancel", "1"],
        &["launch", "-f", &document],
    ] {
        let lost = fixture.run(&[words, &["--kubeconfig", away]].concat());
        assert_refused(&lost, 75, &["KUBECONFIG"]);
        let wrong = fixture.run(&[words, &["--context", "nowhere"]].concat());
        assert_refused(&wrong, 64, &["nowhere", "get-contexts"]);
        let wrong = fixture.run(&[words, &["--kubeconfig", "/nowhere"]].concat());
        assert_refused(&wrong, 64, &["the kubeconfig `/nowhere`: No such file"]);
        if words[0] != "launch" {
            let wrong = fixture.run(&[words, &["--namespace", "a/../b"]].concat());
            assert_refused(&wrong, 64, &["`ExecutorEphemeralNamespace` must be"]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_passes_or_prints_a_fix_for_each_failure() {
    // It may look at everything, so that what it does not find is not there.
    let parts = Cluster::builder().without_kubelet();
    let fixture = or_skip!(Fixture::of(parts, &[]).await);
    let told = fixture.told(&["check"]);
    // No registry is asked, which is said.
    assert!(
        told.contains("Nothing is missing; 1 could not be checked."),
        "{told}"
    );
    assert_eq!(told.matches("fix:").count(), 1, "{told}");
    assert!(told.contains("fix: ask the registry: `skopeo"), "{told}");
    assert_eq!(fixture.json(&["check"])["ok"], true);

    let failing = |args: &[&str]| -> Value {
        let finished = fixture.run(&[&["check", "-o", "json"], args].concat());
        assert_eq!(finished.code(), 64, "{finished}");
        let told: Value = serde_json::from_str(&finished.stdout).unwrap();
        assert_eq!(told["ok"], false);
        let checks = told["checks"].as_array().unwrap();
        let failed = checks.iter().filter(|check| check["outcome"] == "failed");
        failed.cloned().collect()
    };
    let subjects = |failed: &Value| -> Vec<String> {
        let failed = failed.as_array().unwrap().iter();
        failed
            .map(|check| {
                assert!(!check["fix"].as_str().unwrap().is_empty(), "{check}");
                check["subject"].as_str().unwrap().to_owned()
            })
            .collect()
    };
    for (args, subject) in [
        (["--env-secrets", "credentials"], "Secret credentials"),
        (["--env-config-maps", "settings"], "ConfigMap settings"),
        (["--namespace", "elsewhere"], "namespace elsewhere"),
    ] {
        let failed = failing(&args);
        assert_eq!(subjects(&failed), [subject]);
    }
    let refused = fixture.run(&["check", "--image", "Registry/UPPER"]);
    assert_refused(&refused, 64, &["--image"]);
    fixture.config_map("settings").await;
    fixture.told(&["check", "--env-config-maps", "settings"]);

    // Each right that is missing is found, and no other.
    let needed = |right: &&Right<'_>| right.need != Need::MissingClaim;
    for missing in RIGHTS.iter().filter(needed) {
        let others = RIGHTS.iter().filter(|right| *right != missing);
        let rules: Vec<_> = others.map(rule).collect();
        let (cluster, runs) = (&fixture.cluster, &fixture.runs);
        cluster.revoke(LAUNCHER).await.unwrap();
        cluster.grant(LAUNCHER, runs, &rules).await.unwrap();
        let failed = failing(&[]);
        let right = format!("right to {} {}", missing.verb, missing.resource);
        let rights: Vec<String> = subjects(&failed)
            .into_iter()
            .filter(|subject| subject.starts_with("right to "))
            .collect();
        assert_eq!(rights.len(), 1, "{missing:?}: {rights:?}");
        assert!(rights[0].starts_with(&right), "{rights:?}");
        let fix = &failed.as_array().unwrap().last().unwrap()["fix"];
        assert!(fix.as_str().unwrap().contains("rbac/"), "{failed}");
    }

    // The Role is for one Lease.
    fixture.cluster.revoke(LAUNCHER).await.unwrap();
    let another = ROLES.replace(
        "resourceNames: [\"mayfly-launcher\"]",
        "resourceNames: [\"another\"]",
    );
    assert_ne!(another, ROLES);
    let another = rules(&another);
    let granted = fixture.cluster.grant(LAUNCHER, &fixture.runs, &another);
    granted.await.unwrap();
    let failed = failing(&[]);
    let denied =
        ["get", "update"].map(|verb| format!("right to {verb} leases.coordination.k8s.io {LEASE}"));
    assert_eq!(subjects(&failed), denied);
    fixture.cluster.revoke(LAUNCHER).await.unwrap();
    let granted = rules(ROLES);
    let granted = fixture.cluster.grant(LAUNCHER, &fixture.runs, &granted);
    granted.await.unwrap();

    // What the Role does not let it read is no fault, and can be looked at otherwise.
    let told = fixture.told(&["check", "--env-config-maps", "settings"]);
    assert!(told.contains("2 could not be checked"), "{told}");
    // No registry was asked.
    assert!(told.contains(&format!("?  image {IMAGE}")), "{told}");
    assert!(
        told.contains("not checked: whether the registry has it"),
        "{told}"
    );
    let look = format!("kubectl get -n {} configmap settings", fixture.runs);
    assert!(told.contains(&look), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn colours_are_for_terminals_and_only_when_wanted() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let plan = job::step(StepType::Plan, &Repository::fixture());
    fixture.told(&["launch", "-f", &fixture.document(&plan)]);
    for command in [&["list"][..], &["check"], &["explain", &plan.job_id]] {
        let piped = fixture.told(command);
        assert!(!piped.contains('\u{1b}'), "{piped:?}");
        let forced = fixture.told(&[command, &["--color", "always"]].concat());
        assert!(forced.contains('\u{1b}'), "{forced:?}");
    }
}
