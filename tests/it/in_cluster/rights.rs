//! The launcher asks the cluster for what `rbac/` grants it, for all of that, and for nothing else.

use integration_tests::process::Stream;
use integration_tests::{Repository, job};
use job_contract::status::JobStatus;
use job_contract::{JobData, env};
use k8s_openapi::api::batch::v1::Job;
use kube::Api;
use kube::api::{DeleteParams, PropagationPolicy};
use nix::sys::signal::Signal;
use test_cluster::{ADMIN, Cluster, State};
use test_peers::wait;
use test_platform::launcher::READINESS;

use super::{Fixture, name, rights, rules, until_ready};

const SEED: &str = include_str!("../../../rbac/seed.yaml");

impl Fixture {
    /// Deletes the Job of a run as `kubectl delete job --cascade=orphan` does.
    async fn orphan(&self, job: &JobData) {
        let jobs = Api::<Job>::namespaced(self.cluster.client(ADMIN).unwrap(), &self.runs);
        let options = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Orphan),
            ..DeleteParams::default()
        };
        let name = name(job);
        jobs.delete(&name, &options).await.unwrap();
        let gone = |state: &State| state.job(&name).is_none().then_some(());
        self.until("the Job is gone", gone).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_the_launcher_does_uses_each_right_and_no_other() {
    everything_it_does(or_skip!(Fixture::new().await)).await;
}

/// Fails when a right of the place is not used; that nothing else is, every place says at its end.
pub(super) async fn everything_it_does(fixture: Fixture) {
    let repository = Repository::fixture();
    let [mut plan, other, stuck] = ["11", "12", "13"].map(|id| {
        let job = job::plan(&repository);
        job::in_job(&job, id)
    });
    // There is no such claim, so it is an empty folder.
    for (name, value) in [
        (env::PLUGIN_CACHE_DIR, "/cache"),
        (env::PLUGIN_CACHE_CLAIM, "gone"),
    ] {
        let variables = &mut plan.environment_variables;
        variables.insert(name.to_owned(), value.to_owned());
    }
    fixture.machine.queue(&[&plan]);
    fixture.machine.queue(&[&other]);

    fixture.told(&["check"]);
    let launcher = fixture.serve();
    until_ready(&launcher.endpoint).await;
    launcher.endpoint.accept(&plan).await;
    launcher.endpoint.accept(&plan).await;
    fixture.until_over(&plan, "Complete").await;
    let log = fixture.told(&["launch", "--follow", "-f", &fixture.document(&other)]);
    assert!(log.contains("Plan:"), "{log}");
    fixture.told(&["launch", "--wait", "-f", &fixture.document(&other)]);
    let listed = fixture.told(&["list"]);
    assert!(listed.contains("11") && listed.contains("12"), "{listed}");
    let log = fixture.told(&["logs", "11"]);
    assert!(log.contains("Plan:"), "{log}");
    fixture.told(&["logs", "-f", "12"]);
    fixture.told(&["explain", "11"]);

    // Job data that an earlier Job left does no harm, and the next run is cancelled before it starts.
    let mut stuck = stuck;
    let nowhere = ("EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS", "disk=none");
    let variables = &mut stuck.environment_variables;
    variables.insert(nowhere.0.to_owned(), nowhere.1.to_owned());
    launcher.endpoint.accept(&stuck).await;
    let job_data = async || {
        let state = fixture.state().await;
        super::job_data(state.job(&name(&stuck)).unwrap()).map(str::to_owned)
    };
    let left = job_data().await;
    fixture.orphan(&stuck).await;
    launcher.endpoint.accept(&stuck).await;
    assert_ne!(job_data().await, left);
    fixture.told(&["cancel", "13"]);
    let cancelled = |state: &State| state.job(&name(&stuck)).is_none().then_some(());
    fixture.until("the run is cancelled", cancelled).await;

    // A launcher that stops releases the Lease.
    launcher.running.signal(Signal::SIGTERM);
    launcher.running.wait();

    let asked = fixture.asked();
    assert_eq!(asked.unused(&fixture.rules), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_without_rights_puts_runs_off_and_then_fails_them() {
    let fixture = or_skip!(Fixture::without_pods().await).where_it_is_refused();
    fixture.cluster.revoke(super::LAUNCHER).await.unwrap();
    let plan = job::plan(&Repository::fixture());
    fixture.machine.queue(&[&plan]);
    let data_dir = fixture.machine.data_dir();
    let launcher = fixture.serve_with(&[(env::DATA_DIR, data_dir.to_str().unwrap())]);
    let endpoint = launcher.endpoint.clone();
    assert_eq!(endpoint.post(&plan).await.unwrap(), 503);
    assert_eq!(endpoint.get(READINESS).await.unwrap(), 503);
    assert!(!fixture.machine.record(&plan).status.is_over());

    let answer = wait::until("it is put off no more", async || {
        let answer = endpoint.post(&plan).await.unwrap();
        (answer != 503).then_some(answer)
    })
    .await;
    // A platform on record is told so by the answer too.
    assert_eq!(answer, 400);
    assert_eq!(fixture.machine.record(&plan).status, JobStatus::Failed);
    let output = fixture.machine.step_output(&plan);
    assert!(output.contains("cannot create resource"), "{output}");
    // A launcher that is not ready gets no dispatch, and could fail none.
    until_ready(&endpoint).await;
    assert!(fixture.state().await.jobs.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn with_job_data_in_the_environment_the_rights_of_the_documentation_carry_a_run() {
    let fixture = or_skip!(Fixture::of(Cluster::builder(), &rules(SEED)).await);
    // It looks for a Lease and for pods, and does without.
    let fixture = fixture.where_it_is_refused();
    let repository = Repository::fixture();
    let plan = job::plan(&repository);
    fixture.machine.queue(&[&plan]);
    let launcher = fixture.serve_with(&[(env::JOB_DATA_MODE, "env")]);
    launcher
        .running
        .wait_for(Stream::Stderr, "watches without one");
    until_ready(&launcher.endpoint).await;
    launcher.endpoint.accept(&plan).await;
    launcher.endpoint.accept(&plan).await;
    fixture.until_over(&plan, "Complete").await;
    assert!(fixture.machine.record(&plan).plan_changes);

    let asked = fixture.asked();
    let denied = rights(&asked.denied());
    assert!(
        denied.iter().all(|right| {
            ["pods", "events", "leases.coordination.k8s.io"]
                .iter()
                .any(|resource| right.ends_with(&format!(" {resource}")))
        }),
        "{denied:?}"
    );
    // What is denied and what is beyond the Role is the same.
    assert_eq!(rights(&asked.beyond(&fixture.rules)), denied);
    assert!(fixture.state().await.secrets.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_rights_of_the_documentation_failures_are_reported_and_cancelled_runs_stopped() {
    let fixture = or_skip!(Fixture::of(Cluster::builder(), &rules(SEED)).await);
    let fixture = fixture.where_it_is_refused();
    let repository = Repository::fixture();
    let [mut stuck, failing] = ["11", "12"].map(|id| {
        let job = job::plan(&repository);
        job::in_job(&job, id)
    });
    let nowhere = ("EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS", "disk=none");
    let variables = &mut stuck.environment_variables;
    variables.insert(nowhere.0.to_owned(), nowhere.1.to_owned());
    fixture.machine.queue(&[&stuck]);
    fixture.machine.queue(&[&failing]);
    let data = fixture.machine.data_dir();
    let launcher = fixture.serve_with(&[
        (env::JOB_DATA_MODE, "env"),
        (env::DATA_DIR, data.to_str().unwrap()),
    ]);
    launcher
        .running
        .wait_for(Stream::Stderr, "judged by their Jobs alone");
    launcher.endpoint.accept(&stuck).await;
    fixture.machine.set_status(&stuck, JobStatus::Cancelled);

    // Its executor is killed before it can say anything.
    fixture.image_that_first("kill -9 $$");
    launcher.endpoint.accept(&failing).await;
    fixture
        .until_reported(&failing, "Job condition Failed")
        .await;

    let stopped = |state: &State| state.job(&name(&stuck)).is_none().then_some(());
    fixture.until("the cancelled run is stopped", stopped).await;
}
