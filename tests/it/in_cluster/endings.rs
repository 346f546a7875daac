//! Runs that wait, are killed or are disrupted: what is said about them, and what Kubernetes does with them.

use std::fs;

use cluster::Cluster;
use integration_tests::{Repository, job};
use job_contract::annotations;
use job_contract::job::StepType;
use job_contract::{JobData, env};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt as _};
use test_cluster::{ADMIN, Fault, State};
use test_peers::terraform;
use test_peers::wait;
use test_platform::launcher::Launcher;
use verdict::{VerdictKind, WaitReason};

use super::{Fixture, LAUNCHER, name};

impl Fixture {
    /// What a launcher would say of runs.
    pub(super) fn library(&self) -> Cluster {
        Cluster::from_client(self.cluster.client(LAUNCHER).unwrap(), &self.runs)
    }

    /// Returns when this is what the run waits for.
    pub(super) async fn until_waiting(&self, job: &JobData, reason: WaitReason, words: &str) {
        let library = self.library();
        let is_waiting = async || {
            let explanation = Box::pin(library.explain(&name(job))).await.unwrap();
            match &explanation.wait {
                Some(wait) if wait.reason == reason && wait.sentence.contains(words) => Ok(()),
                _ => Err(format!("{explanation:#?}")),
            }
        };
        wait::until(&format!("{reason:?} with {words:?}"), is_waiting).await;
    }

    pub(super) async fn until_waiting_for_its_turn(&self, job: &JobData) {
        self.until_waiting(job, WaitReason::Queued, "its turn")
            .await;
    }

    /// Returns when the verdict is on the Job. A pod that was deleted goes with its last finalizer, maybe before that.
    pub(super) async fn until_recorded(&self, job: &JobData) {
        let recorded = |state: &State| {
            let annotations = state.job(&name(job))?.metadata.annotations.as_ref()?;
            annotations.contains_key(annotations::VERDICT).then_some(())
        };
        self.until("the verdict is recorded", recorded).await;
    }

    pub(super) async fn verdict(&self, job: &JobData) -> VerdictKind {
        let explanation = self.library().explain(&name(job)).await.unwrap();
        let verdict = explanation.verdict.expect("the run is over");
        assert!(!verdict.sentence.is_empty() && !verdict.evidence.is_empty());
        verdict.kind
    }

    /// A launcher that reports to the platform whose records the executors write.
    pub(super) fn serve_reporting(&self) -> Launcher {
        self.serve_reporting_with(&[])
    }

    pub(super) fn serve_reporting_with(&self, settings: &[(&str, &str)]) -> Launcher {
        let data = self.machine.data_dir();
        let reporting = [(env::DATA_DIR, data.to_str().unwrap())];
        self.serve_with(&[&reporting, settings].concat())
    }

    /// Returns when the platform knows that the step failed, and why.
    pub(super) async fn until_reported(&self, job: &JobData, words: &str) {
        let failed = |_: &State| {
            let (_, step) = self.machine.statuses(job);
            let told = || self.machine.step_output(job).contains(words);
            (step == "failed" && told()).then_some(())
        };
        self.until("the platform is told", failed).await;
    }

    /// The pod of a run that is being worked in once `is_there`.
    pub(super) async fn pod_at_work(&self, job: &JobData, is_there: impl Fn() -> bool) -> Pod {
        let name = name(job);
        let at_work = |state: &State| {
            let pod = (*state.pods_of(&name).first()?).clone();
            let phase = pod.status.as_ref()?.phase.as_deref()?;
            (phase == "Running" && is_there()).then_some(pod)
        };
        self.until("the pod is at work", at_work).await
    }

    /// Returns when the run's log has passed the tool's pipe as far as this number.
    async fn until_printed(&self, pod: &Pod, number: usize) {
        let library = self.library();
        let is_printed = async || {
            let target = self.machine.scratch("seen");
            library.save_log(&pod.name_any(), &target).await.unwrap();
            let printed = numbers(&fs::read_to_string(&target).unwrap());
            if printed.last() == Some(&number) {
                Ok(())
            } else {
                Err(format!("{printed:?}"))
            }
        };
        wait::until(&format!("{number} is printed"), is_printed).await;
    }

    pub(super) async fn config_map(&self, name: &str) {
        let mut map = ConfigMap::default();
        map.metadata.name = Some(name.to_owned());
        let client = self.cluster.client(ADMIN).unwrap();
        let maps = Api::<ConfigMap>::namespaced(client, &self.runs);
        maps.create(&PostParams::default(), &map).await.unwrap();
    }
}

/// An apply that notes in a file that it began, and then takes very long.
pub(super) fn endless(fixture: &Fixture) -> (Repository, JobData) {
    let ledger = fixture.machine.scratch("ledger");
    let module = format!(
        "resource \"terraform_data\" \"a\" {{\n  provisioner \"local-exec\" {{\n    command = \"echo begun >> {}; sleep 600\"\n  }}\n}}\n",
        ledger.display()
    );
    let repository = Repository::module(&module);
    let apply = job::step(StepType::Apply, &repository);
    fixture.machine.queue(&[&apply]);
    (repository, apply)
}

pub(super) fn begun(fixture: &Fixture) -> usize {
    let ledger = fs::read_to_string(fixture.machine.scratch("ledger")).unwrap_or_default();
    ledger.lines().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_run_shows_what_it_waits_for_and_continues_once_that_exists() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let settings = [
        ("ExecutorEphemeralImage", "registry.example.test/missing:1"),
        ("ExecutorEphemeralConfigMap", "settings"),
    ];
    let launcher = fixture.serve_with(&settings);
    let mut plan = job::plan(&repository);
    let selector = "EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS".to_owned();
    plan.environment_variables
        .insert(selector, "disk=ssd".to_owned());
    fixture.machine.queue(&[&plan]);
    launcher.endpoint.accept(&plan).await;

    fixture.until_waiting(&plan, WaitReason::Node, "node").await;
    fixture.cluster.nodes().set(test_cluster::Node {
        name: "node-2".to_owned(),
        labels: [("disk".to_owned(), "ssd".to_owned())].into(),
    });
    fixture
        .until_waiting(&plan, WaitReason::Image, "missing:1")
        .await;
    fixture.cluster.image(
        "registry.example.test/missing:1",
        &fixture.program_that_first(""),
    );
    fixture
        .until_waiting(&plan, WaitReason::Config, "settings")
        .await;
    fixture.config_map("settings").await;
    fixture.until_over(&plan, "Complete").await;
    assert_eq!(fixture.verdict(&plan).await, VerdictKind::Completed);
}

/// `kubectl delete pod`.
#[tokio::test(flavor = "multi_thread")]
async fn the_verdict_of_an_apply_whose_pod_is_deleted_names_the_deletion() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = endless(&fixture);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let pod = fixture.pod_at_work(&apply, || begun(&fixture) == 1).await;
    let pods = Api::<Pod>::namespaced(fixture.cluster.client(ADMIN).unwrap(), &fixture.runs);
    let pod = pod.metadata.name.unwrap();
    pods.delete(&pod, &DeleteParams::default()).await.unwrap();
    fixture.until_over(&apply, "Failed").await;
    fixture.until_recorded(&apply).await;
    assert_eq!(fixture.verdict(&apply).await, VerdictKind::Deleted);
    assert_eq!(begun(&fixture), 1);
    let explained = fixture.json(&["explain", &name(&apply)]);
    assert_eq!(explained["pods"][0]["name"], pod.as_str());
    assert_eq!(explained["pods"][0]["started"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_verdict_of_an_apply_on_a_restarted_node_names_the_restart() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = endless(&fixture);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let pod = fixture.pod_at_work(&apply, || begun(&fixture) == 1).await;
    assert!(fixture.cluster.reboot(&pod));
    fixture.until_over(&apply, "Failed").await;
    assert_eq!(fixture.verdict(&apply).await, VerdictKind::NodeLost);
    fixture
        .until_reported(&apply, "was restarted while the executor ran")
        .await;
    fixture.until_reported(&apply, "plan again").await;
    assert_eq!(begun(&fixture), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_apply_evicted_at_work_is_not_run_again() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = endless(&fixture);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let pod = fixture.pod_at_work(&apply, || begun(&fixture) == 1).await;
    assert!(fixture.cluster.evict(&pod));
    fixture.until_over(&apply, "Failed").await;
    assert_eq!(fixture.verdict(&apply).await, VerdictKind::Evicted);
    fixture.until_reported(&apply, "evicted").await;
    assert_eq!(begun(&fixture), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_evicted_before_its_image_was_there_is_replaced() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let other = "registry.example.test/mayfly-executor-late:1";
    let launcher = fixture.serve_with(&[("ExecutorEphemeralImage", other)]);
    let plan = job::plan(&repository);
    fixture.machine.queue(&[&plan]);
    launcher.endpoint.accept(&plan).await;
    fixture
        .until_waiting(&plan, WaitReason::Image, "late:1")
        .await;
    let pod = fixture.state().await.pods[0].clone();
    assert!(fixture.cluster.evict(&pod));
    fixture
        .cluster
        .image(other, &fixture.program_that_first(""));
    fixture.until_over(&plan, "Complete").await;
    assert_eq!(fixture.state().await.pods_of(&name(&plan)).len(), 2);
    assert_eq!(fixture.verdict(&plan).await, VerdictKind::Completed);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_started_nothing_is_tried_again() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let tried = fixture.machine.scratch("tried");
    let tried = tried.display();
    fixture.image_that_first(&format!(
        "if ! test -e '{tried}'; then : > '{tried}'; exit 75; fi"
    ));
    let plan = job::plan(&repository);
    fixture.machine.queue(&[&plan]);
    let launcher = fixture.serve();
    launcher.endpoint.accept(&plan).await;
    fixture.until_over(&plan, "Complete").await;
    assert_eq!(fixture.state().await.pods_of(&name(&plan)).len(), 2);
    assert_eq!(fixture.verdict(&plan).await, VerdictKind::Completed);
}

/// An apply that prints as many lines, and then takes very long.
fn talkative(fixture: &Fixture, lines: usize) -> (Repository, JobData) {
    let ledger = fixture.machine.scratch("ledger");
    let module = format!(
        "resource \"terraform_data\" \"a\" {{\n  provisioner \"local-exec\" {{\n    command = \"seq -f 'numbered-%g.' 1 {lines}; echo begun >> {}; sleep 600\"\n  }}\n}}\n",
        ledger.display()
    );
    let repository = Repository::module(&module);
    let apply = job::step(StepType::Apply, &repository);
    fixture.machine.queue(&[&apply]);
    (repository, apply)
}

/// What was printed, in whatever pieces the tool passed it on.
fn numbers(output: &str) -> Vec<usize> {
    let is_whole = |line: &str| line.starts_with("numbered-") && line.ends_with('.');
    let output = terraform::whole(output, is_whole);
    let lines = output
        .lines()
        .filter_map(|line| line.split_once("numbered-"));
    lines
        .filter_map(|(_, rest)| rest.strip_suffix('.')?.parse().ok())
        .collect()
}

/// There is no Redis and nothing was stored: the container has it all.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_executor_had_printed_is_in_the_output_of_its_step_once_and_in_order() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = talkative(&fixture, 3000);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let pod = fixture.pod_at_work(&apply, || begun(&fixture) == 1).await;
    fixture.until_printed(&pod, 3000).await;
    assert!(fixture.cluster.oom_kill(&pod));
    fixture.until_reported(&apply, "memory").await;
    let output = fixture.machine.step_output(&apply);
    let expected: Vec<usize> = (1..=3000).collect();
    assert_eq!(numbers(&output), expected);
    assert!(!output.contains("\"target\":"), "messages of the executor");
    let (printed, said) = (output.rfind("(local-exec):"), output.rfind("memory"));
    assert!(said > printed, "{output}");
}

/// More refusals than one look at the log takes.
#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_killed_executor_is_asked_for_again_while_the_cluster_cannot_answer() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = talkative(&fixture, 300);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let pod = fixture.pod_at_work(&apply, || begun(&fixture) == 1).await;
    fixture.until_printed(&pod, 300).await;
    fixture
        .cluster
        .faults()
        .next_of(LAUNCHER, 12, "get", "pods/log", Fault::Unavailable);
    assert!(fixture.cluster.oom_kill(&pod));
    fixture.until_reported(&apply, "memory").await;
    let expected: Vec<usize> = (1..=300).collect();
    assert_eq!(numbers(&fixture.machine.step_output(&apply)), expected);
    assert_eq!(fixture.machine.statuses(&apply).1, "failed");
}

/// A file stands where the outputs are stored.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_no_store_took_is_stored_by_the_launcher_once_one_does() {
    let fixture = or_skip!(Fixture::new().await);
    let module = "resource \"terraform_data\" \"a\" {\n  provisioner \"local-exec\" {\n    command = \"seq -f 'numbered-%g.' 1 50\"\n  }\n}\n";
    let repository = Repository::module(module);
    let apply = job::step(StepType::Apply, &repository);
    fixture.machine.queue(&[&apply]);
    let outputs = fixture.machine.data_dir().join("local/output");
    let _ = fs::remove_dir_all(&outputs);
    fs::create_dir_all(outputs.parent().unwrap()).unwrap();
    fs::write(&outputs, "in the way").unwrap();
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    fixture.until_over(&apply, "Failed").await;
    fs::remove_file(&outputs).unwrap();
    fixture
        .until("the log is stored", |_| {
            let output = fixture.machine.output_if_any(&apply)?;
            (numbers(&output).len() == 50).then_some(())
        })
        .await;
    // The executor had reported the end of the step, and the launcher does not contradict it.
    assert_eq!(
        fixture.machine.statuses(&apply),
        ("completed".into(), "completed".into())
    );
}
