//! Runs that cannot continue: what the platform and the launcher's commands show once their time is up.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use cluster::RunRef;
use cluster::watch::{ReportOutcome, RunObserver, WatchSettings};
use futures_util::FutureExt as _;
use futures_util::future::{self, BoxFuture};
use integration_tests::{Repository, job};
use job_contract::{JobData, env};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod, Secret};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use test_cluster::{ADMIN, Node, State};
use test_platform::launcher::Launcher;
use verdict::{Observation, Verdict, WaitReason};

use super::endings::{begun, endless};
use super::{Fixture, name};

/// Longer than the launcher waits for a pod that no quota holds back.
const WAIT_FOR_POD: Duration = Duration::from_mins(3);
const NODE_SELECTOR: &str = "EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS";

impl Fixture {
    /// Once it is said what a run waits for, however long that takes, another launcher comes that gives it up soon.
    async fn lose_patience(
        &self,
        patient: Launcher,
        job: &JobData,
        (reason, words): (WaitReason, &str),
        impatience: &[(&str, &str)],
    ) -> Launcher {
        self.until_waiting(job, reason, words).await;
        self.restart(patient, impatience)
    }

    /// Stops a launcher and starts another one.
    fn restart(&self, before: Launcher, settings: &[(&str, &str)]) -> Launcher {
        let before = before.running;
        before.signal(Signal::SIGTERM);
        before.wait();
        self.serve_reporting_with(settings)
    }

    /// A plan the platform has queued and dispatched, of a repository that is never fetched.
    async fn dispatched(&self, launcher: &Launcher) -> JobData {
        let plan = job::plan(&Repository::fixture());
        self.dispatch(launcher, plan).await
    }

    async fn dispatch(&self, launcher: &Launcher, job: JobData) -> JobData {
        self.machine.queue(&[&job]);
        launcher.endpoint.accept(&job).await;
        job
    }

    fn jobs(&self) -> Api<Job> {
        Api::namespaced(self.cluster.client(ADMIN).unwrap(), &self.runs)
    }

    /// An operator shortens the run's deadline.
    async fn end_soon(&self, job: &JobData) {
        let soon = Patch::Merge(json!({"spec": {"activeDeadlineSeconds": 1}}));
        let jobs = self.jobs();
        jobs.patch(&name(job), &PatchParams::default(), &soon)
            .await
            .unwrap();
    }

    /// Returns when Kubernetes has such an event. The controller of Jobs sends its events when it has time.
    async fn until_event(&self, what: &str, is_it: impl Fn(&Event) -> bool) {
        let is_told = |state: &State| state.events.iter().any(&is_it).then_some(());
        self.until(&format!("an event says {what}"), is_told).await;
    }

    /// Returns when everybody is told the same: whoever reads the step's output at the platform, and whoever has
    /// the run explained.
    async fn until_told(&self, job: &JobData, kind: &str, words: &str) -> Value {
        self.until_reported(job, words).await;
        self.until_recorded(job).await;
        let verdict = self.json(&["explain", &name(job)])["verdict"].clone();
        assert_eq!(verdict["kind"], kind, "{verdict:#}");
        let sentence = verdict["sentence"].as_str().unwrap();
        let advice = verdict["advice"].as_str().unwrap();
        assert!(sentence.contains(words), "{verdict:#}");
        let output = self.machine.step_output(job);
        assert!(
            output.contains(sentence) && output.contains(advice),
            "{output}"
        );
        let text = self.told(&["explain", &name(job)]);
        assert!(text.contains(sentence) && text.contains(advice), "{text}");
        verdict
    }

    /// As [`Fixture::until_told`] of a run that never began, whose Job Kubernetes is then rid of.
    async fn until_given_up(&self, job: &JobData, kind: &str, words: &str) {
        let verdict = self.until_told(job, kind, words).await;
        assert_eq!(verdict["started"], false);
        self.until_over(job, "Failed").await;
        let pods = |state: &State| state.pods_of(&name(job)).is_empty().then_some(());
        self.until("its pod is gone", pods).await;
        // The end of the Job does not change what was said of the run.
        let after = self.json(&["explain", &name(job)])["verdict"]["kind"].clone();
        assert_eq!(after, kind);
    }
}

fn on_ssd(mut job: JobData) -> JobData {
    let selector = (NODE_SELECTOR.to_owned(), "disk=ssd".to_owned());
    job.environment_variables.extend([selector]);
    job
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_config_map_ends_the_run() {
    let fixture = or_skip!(Fixture::new().await);
    let launcher = fixture.serve_reporting_with(&[
        ("ExecutorEphemeralConfigMap", "settings"),
        (env::CONTAINER_ERROR_SECONDS, "2"),
    ]);
    let plan = fixture.dispatched(&launcher).await;
    fixture
        .until_given_up(&plan, "config_missing", "settings")
        .await;
}

/// Neither can be mounted or scheduled; the limits on both are far longer than this test.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_source_does_not_exist_ends_the_run_as_fast_as_a_missing_setting() {
    let fixture = or_skip!(Fixture::new().await);
    let launcher = fixture.serve_reporting_with(&[(env::CONTAINER_ERROR_SECONDS, "2")]);
    let repository = Repository::fixture();
    let mut plan = job::plan(&repository);
    plan.environment_variables
        .insert(env::EPHEMERAL_CONFIG_MAP.into(), "cli-settings".into());
    let plan = fixture.dispatch(&launcher, plan).await;
    let words = "configmap \"cli-settings\" not found";
    fixture.until_given_up(&plan, "config_missing", words).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_job_data_was_deleted_ends_with_its_name() {
    let fixture = or_skip!(Fixture::new().await);
    let launcher = fixture.serve_reporting_with(&[(env::CONTAINER_ERROR_SECONDS, "2")]);
    let plan = on_ssd(job::plan(&Repository::fixture()));
    let plan = fixture.dispatch(&launcher, plan).await;
    fixture.until_waiting(&plan, WaitReason::Node, "node").await;
    let client = fixture.cluster.client(ADMIN).unwrap();
    let secrets = Api::<Secret>::namespaced(client, &fixture.runs);
    let params = DeleteParams::default();
    let state = fixture.state().await;
    let job_data = super::job_data(state.job(&name(&plan)).unwrap()).unwrap();
    secrets.delete(job_data, &params).await.unwrap();
    fixture.cluster.nodes().set(Node {
        name: "node-2".to_owned(),
        labels: [("disk".to_owned(), "ssd".to_owned())].into(),
    });
    fixture
        .until_given_up(&plan, "config_missing", &name(&plan))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unschedulable_run_ends_with_the_schedulers_message() {
    let fixture = or_skip!(Fixture::new().await);
    let launcher = fixture.serve_reporting();
    let plan = on_ssd(job::plan(&Repository::fixture()));
    let plan = fixture.dispatch(&launcher, plan).await;
    // A real scheduler counts the nodes of others too.
    let words = " nodes are available";
    let impatience = [(env::UNSCHEDULABLE_SECONDS, "1")];
    let _launcher = fixture
        .lose_patience(launcher, &plan, (WaitReason::Node, words), &impatience)
        .await;
    fixture
        .until_given_up(&plan, "never_scheduled", words)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_admission_denies_ends_the_run_with_its_message() {
    let fixture = or_skip!(Fixture::new().await);
    let words = "runs need an owner";
    let refused = fixture.cluster.refuse_pods(&fixture.runs, words);
    refused.await.unwrap();
    let launcher = fixture.serve_reporting();
    let plan = fixture.dispatched(&launcher).await;
    fixture
        .until_waiting(&plan, WaitReason::Admission, words)
        .await;
    fixture.cluster.set_clock_ahead(WAIT_FOR_POD);
    let _launcher = fixture.restart(launcher, &[]);
    fixture
        .until_given_up(&plan, "admission_refused", words)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_is_waited_for_until_the_deadline() {
    let fixture = or_skip!(Fixture::new().await);
    fixture.cluster.allow_no_pod(&fixture.runs).await.unwrap();
    let launcher = fixture.serve_reporting();
    let plan = fixture.dispatched(&launcher).await;
    let words = "exceeded quota";
    fixture.until_waiting(&plan, WaitReason::Quota, words).await;
    fixture.cluster.set_clock_ahead(WAIT_FOR_POD);
    let _launcher = fixture.restart(launcher, &[]);
    fixture.until_waiting(&plan, WaitReason::Quota, words).await;
    let (_, step) = fixture.machine.statuses(&plan);
    assert_eq!(step, "pending");
    fixture.end_soon(&plan).await;
    fixture.until_given_up(&plan, "quota_exceeded", words).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_verdict_of_a_run_over_its_deadline_names_the_deadline() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = endless(&fixture);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    fixture.pod_at_work(&apply, || begun(&fixture) == 1).await;
    fixture.end_soon(&apply).await;
    fixture.until_over(&apply, "Failed").await;
    let over = |_: &State| (fixture.machine.statuses(&apply).1 == "failed").then_some(());
    fixture.until("the platform is told", over).await;
    fixture.until_recorded(&apply).await;
    let verdict = &fixture.json(&["explain", &name(&apply)])["verdict"];
    assert_eq!(verdict["kind"], "deadline_exceeded", "{verdict:#}");
    let sentence = verdict["sentence"].as_str().unwrap();
    assert!(sentence.contains("deadline of 1 s"), "{sentence}");
    assert_eq!(
        (&verdict["started"], &verdict["outcome"]),
        (&json!(true), &json!(143))
    );
    assert_eq!(begun(&fixture), 1);
}

/// Before Kubernetes 1.31, the Job has failed when its pod is told to end.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_at_its_deadline_is_over_when_its_pod_has_ended() {
    let fixture = or_skip!(Fixture::new().await);
    let gate = fixture.machine.scratch("gate");
    fixture.image_that_first(&format!(
        "trap : TERM; until [ -e '{}' ]; do sleep 0.1; done; exit 143",
        gate.display()
    ));
    let launcher = fixture.serve_reporting();
    let plan = fixture.dispatched(&launcher).await;
    fixture.pod_at_work(&plan, || true).await;
    fixture.end_soon(&plan).await;
    let run = name(&plan);
    let is_stopped = |state: &State| {
        let mut conditions = ["Failed", "FailureTarget"].iter();
        let is_failing = conditions.any(|condition| state.has_condition(&run, condition));
        let is_going = |pod: &&Pod| pod.metadata.deletion_timestamp.is_some();
        (is_failing && state.pods_of(&run).iter().any(is_going)).then_some(())
    };
    fixture.until("the pod is told to end", is_stopped).await;
    let explained = fixture.json(&["explain", &run]);
    assert_eq!(explained["verdict"], Value::Null, "{explained:#}");
    assert_ne!(fixture.machine.statuses(&plan).1, "failed");
    fs::write(gate, "").unwrap();
    fixture
        .until_told(&plan, "deadline_exceeded", "deadline of 1 s")
        .await;
}

/// Whatever a run executes can write the termination message.
#[tokio::test(flavor = "multi_thread")]
async fn an_unsealed_report_is_shown_and_not_trusted() {
    let fixture = or_skip!(Fixture::new().await);
    let forged = json!({
        "jobId": "1", "stepId": "another", "outcome": 0, "unreported": true, "error": "trust me",
        "unreported_step": {"ending": "changes", "afterOk": true, "ignoreError": false, "plan": "/tmp/forged"},
    });
    fixture.image_that_first(&format!(
        "printf '%s' '{forged}' > \"$MAYFLY_TERMINATION_LOG\"; exit 1"
    ));
    let launcher = fixture.serve_reporting();
    let plan = fixture.dispatched(&launcher).await;
    let over = |_: &State| (fixture.machine.statuses(&plan).1 == "failed").then_some(());
    fixture.until("the step has failed", over).await;
    assert_eq!(fixture.machine.record(&plan).terraform_plan, None);
    let verdict = &fixture.json(&["explain", &name(&plan)])["verdict"];
    assert_eq!(verdict["kind"], "step_failed", "{verdict:#}");
    let evidence = verdict["evidence"].to_string();
    let words = "the pod left a message that could not be verified: trust me";
    assert!(evidence.contains(words), "{evidence}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_verdict_of_an_apply_on_a_lost_node_names_the_node_and_it_is_not_run_again() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = endless(&fixture);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let pod = fixture.pod_at_work(&apply, || begun(&fixture) == 1).await;
    fixture.cluster.lose_node(&pod).await.unwrap();
    fixture.cluster.remove_node_of(&pod).await.unwrap();
    fixture.until_over(&apply, "Failed").await;
    let verdict = fixture.until_told(&apply, "node_lost", "node-1").await;
    assert_eq!(verdict["started"], true);
    assert_eq!(begun(&fixture), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_job_ends_its_run_at_the_platform() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let launcher = fixture.serve_reporting();
    let plan = fixture.dispatched(&launcher).await;
    let released = |state: &State| {
        let job = state.job(&name(&plan))?;
        (!super::suspended(job)).then_some(())
    };
    fixture.until("the run is released", released).await;
    // What a pod did that is gone before the launcher has seen it, nobody knows.
    let noted = |_: &State| {
        let output = fixture.machine.output_if_any(&plan)?;
        output.contains("node").then_some(())
    };
    fixture.until("the log says what it waits for", noted).await;
    let jobs = fixture.jobs();
    let params = DeleteParams::background();
    jobs.delete(&name(&plan), &params).await.unwrap();
    fixture
        .until_reported(&plan, "the run's Job was deleted before it had started")
        .await;
    let output = fixture.machine.step_output(&plan);
    assert!(output.contains("start the run again"), "{output}");
}

/// For a watcher whose observations do not matter.
#[derive(Debug)]
struct Unheard;

impl RunObserver for Unheard {
    fn on_observation(&self, _run: &RunRef, _observation: &Observation) {}

    fn on_ended<'a>(
        &'a self,
        _run: &'a RunRef,
        _verdict: &'a Verdict,
    ) -> BoxFuture<'a, ReportOutcome> {
        future::ready(ReportOutcome::Delivered).boxed()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_never_got_its_job_data_is_removed_after_a_timeout() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let plan = fixture.cut_between_job_and_secret().await;
    let settings = WatchSettings {
        incomplete_after: Duration::from_secs(1),
        ..WatchSettings::default()
    };
    let watcher = fixture.library();
    let watching = tokio::spawn(async move { watcher.watch(settings, Arc::new(Unheard)).await });
    let gone = |state: &State| state.job(&name(&plan)).is_none().then_some(());
    fixture.until("the Job is removed", gone).await;
    watching.abort();
    // That run was not accepted: the next delivery is the first.
    let launcher = fixture.serve_reporting();
    fixture.dispatch(&launcher, plan.clone()).await;
    fixture.assert_exactly_one_each(&[plan]).await;
    assert_eq!(fixture.jobs_created(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_run_is_removed_when_its_time_to_live_is_over() {
    let fixture = or_skip!(Fixture::new().await);
    let repository = Repository::fixture();
    let launcher = fixture.serve_reporting_with(&[(env::TTL_SECONDS_AFTER_FINISHED, "1")]);
    let plan = fixture.dispatch(&launcher, job::plan(&repository)).await;
    let completed = |_: &State| (fixture.machine.statuses(&plan).1 == "completed").then_some(());
    fixture.until("the step is completed", completed).await;
    let empty = |state: &State| {
        let left = state.jobs.len() + state.pods.len() + state.secrets.len();
        (left == 0).then_some(())
    };
    fixture.until("nothing is left of it", empty).await;
    assert_eq!(fixture.machine.statuses(&plan).1, "completed");
    let ended = |event: &Event| event.reason.as_deref() == Some("Completed");
    fixture.until_event("it completed", ended).await;
    let explained = fixture.told(&["explain", &plan.job_id]);
    assert!(explained.contains("completed"), "{explained}");
}

/// Its pod is gone and, after its time to live, the Job.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_of_which_only_events_are_left_is_still_explained() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = super::endings::endless(&fixture);
    let launcher = fixture.serve_reporting_with(&[(env::TTL_SECONDS_AFTER_FINISHED, "1")]);
    launcher.endpoint.accept(&apply).await;
    let pod = fixture
        .pod_at_work(&apply, || super::endings::begun(&fixture) == 1)
        .await;
    assert!(fixture.cluster.oom_kill(&pod));
    let empty = |state: &State| (state.jobs.len() + state.pods.len() == 0).then_some(());
    fixture.until("nothing is left of it", empty).await;
    let of_end = |event: &Event| {
        let text = event.message.as_ref();
        text.is_some_and(|text| text.contains("137"))
    };
    fixture.until_event("how it ended", of_end).await;
    for word in [apply.job_id.clone(), name(&apply)] {
        let told = fixture.json(&["explain", &word]);
        let verdict = &told["verdict"];
        assert_ne!(verdict["kind"], "completed", "{told:#}");
        assert_eq!(verdict["started"], true, "{told:#}");
        assert!(verdict["sentence"].as_str().unwrap().len() > 10, "{told:#}");
        assert!(
            verdict["advice"].as_str().unwrap().contains("platform"),
            "{told:#}"
        );
        let evidence = verdict["evidence"].to_string();
        assert!(evidence.contains("known from its events"), "{told:#}");
        assert!(evidence.contains("137"), "{told:#}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_ended_runs_are_kept_than_the_history_allows() {
    let fixture = or_skip!(Fixture::new().await);
    let repository = Repository::fixture();
    let launcher = fixture.serve_reporting_with(&[(env::HISTORY_SUCCEEDED, "1")]);
    let first = fixture.dispatch(&launcher, job::plan(&repository)).await;
    fixture.until_over(&first, "Complete").await;
    let second = job::in_job(&first, "413");
    let second = fixture.dispatch(&launcher, second).await;
    fixture.until_over(&second, "Complete").await;
    let newest = |state: &State| state.job(&name(&first)).is_none().then_some(());
    fixture.until("the older one is removed", newest).await;
    assert!(fixture.state().await.job(&name(&second)).is_some());
    assert_eq!(fixture.machine.statuses(&first).1, "completed");
}
