//! The platform delivers a step at least once. Mayfly runs it at most once.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use integration_tests::Repository;
use job_contract::report::FinalReport;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{DeleteParams, LogParams, PostParams};
use serde_json::Value;
use test_cluster::{ADMIN, Fault, State};
use test_platform::launcher::{DISPATCH, Launcher};
use test_platform::{Builder, Flow, Native, NewJob, Platform, Status, Workspace};

use crate::in_cluster::{Fixture, LAUNCHER};
use crate::with_terrakube::{RunTarget, Stage, quick};

impl Stage {
    /// Delivers the last dispatch of a job again; returns status and body of the answer.
    async fn deliver_again(&self, launcher: &Launcher, job: u32) -> (u16, String) {
        let endpoint = self.platform.endpoint(launcher.endpoint.address);
        let data = self.platform.job_data(job).to_string();
        let answer = endpoint.request(DISPATCH, data).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatch_that_was_not_answered_in_time_is_not_run_twice_when_it_is_repeated() {
    let run_target = RunTarget::Cluster(Box::new(or_skip!(Fixture::new().await)));
    let platform = Platform::builder().answer_within(Duration::from_secs(2));
    let stage = Stage::on(run_target, platform).await;
    let faults = stage.fixture().cluster.faults();
    faults.next_of(LAUNCHER, 1, "create", "secrets", Fault::Hang);
    let _launcher = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::plan_apply());
    let job = stage.platform.until_job(job, Status::Completed).await;
    assert!(job.posts > 2, "every dispatch was answered in time");
    let cluster = stage.fixture().state().await;
    assert_eq!(
        (cluster.jobs.len(), cluster.secrets.len()),
        (2, 3),
        "the settings and one Secret for each Job"
    );
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_that_waits_for_approval_is_not_made_again_by_a_late_delivery() {
    let stage = or_skip!(Stage::in_cluster().await);
    let launcher = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::plan_approve_apply());
    stage.platform.until_job(job, Status::WaitingApproval).await;
    // Its time to live has passed.
    let fixture = stage.fixture();
    let name = only_job(&fixture.state().await);
    let jobs = Api::<Job>::namespaced(fixture.cluster.client(ADMIN).unwrap(), &fixture.runs);
    jobs.delete(&name, &DeleteParams::background())
        .await
        .unwrap();
    let gone = |state: &State| state.jobs.is_empty().then_some(());
    fixture.until("the Job is gone", gone).await;
    let before = stage.platform.job(job);

    let answer = stage.deliver_again(&launcher, job).await;
    assert_eq!(answer, (202, "{}".to_owned()));
    let complete = |state: &State| state.has_condition(&name, "Complete").then_some(());
    fixture.until("the second Job is over", complete).await;
    let after = stage.platform.job(job);
    assert_eq!(after.status, Status::WaitingApproval);
    assert_eq!(after.terraform_plan, before.terraform_plan);
    assert_eq!(after.step_statuses(), before.step_statuses());
    stage.platform.assert_kept().await;
}

fn only_job(state: &State) -> String {
    let [job] = &state.jobs[..] else {
        panic!("{} Jobs", state.jobs.len());
    };
    job.metadata.name.clone().unwrap()
}

/// What two executors do of which one too many was started.
struct Twins {
    stage: Stage,
    ledger: PathBuf,
}

impl Twins {
    /// Words of a shell after which executors go on two at a time.
    fn barrier(starts: &Path) -> String {
        let starts = starts.display();
        format!(
            "{}\necho here >> '{starts}'\nuntil [ $(( $(wc -l < '{starts}') % 2 )) -eq 0 ]; do sleep 0.02; done\n",
            quick()
        )
    }

    fn of(stage: Stage) -> Self {
        let ledger = stage.machine().scratch("ledger");
        Self { stage, ledger }
    }

    /// A resource that notes when it is made and when it is destroyed.
    fn module(&self) -> Repository {
        let ledger = self.ledger.display();
        Repository::module(&format!(
            "resource \"terraform_data\" \"a\" {{\n  input = \"{ledger}\"\n  provisioner \"local-exec\" {{\n    \
             command = \"echo made >> {ledger}\"\n  }}\n  provisioner \"local-exec\" {{\n    when = destroy\n    \
             command = \"echo destroyed >> ${{self.input}}\"\n  }}\n}}\n"
        ))
    }

    fn noted(&self) -> String {
        fs::read_to_string(&self.ledger).unwrap_or_default()
    }

    /// Once these pods have ended: fails unless exactly one did the step, and the others name it and its time.
    async fn assert_one_of(&self, pods: &[String]) {
        let fixture = self.stage.fixture();
        let ends = fixture
            .until("the pods have ended", |state| {
                let ends = pods.iter().map(|name| {
                    let mut all = state.pods.iter();
                    end_of(all.find(|pod| pod.metadata.name.as_ref() == Some(name))?)
                });
                ends.collect::<Option<Vec<_>>>()
            })
            .await;
        let took = |end: &&(String, FinalReport)| end.1.outcome != 76;
        let (holders, others): (Vec<_>, Vec<_>) = ends.iter().partition(took);
        let [holder] = &holders[..] else {
            panic!("{ends:#?}");
        };
        for (name, report) in others {
            let said = report.error.as_deref().unwrap_or_default();
            assert!(
                said.contains(&holder.0) && said.contains("since 20"),
                "{said}"
            );
            let log = self.log(name).await;
            assert!(log.contains(&holder.0) && log.contains("since 20"), "{log}");
        }
    }

    async fn log(&self, pod: &str) -> String {
        let fixture = self.stage.fixture();
        let pods = Api::<Pod>::namespaced(fixture.cluster.client(ADMIN).unwrap(), &fixture.runs);
        pods.logs(pod, &LogParams::default()).await.unwrap()
    }
}

/// The name of a pod that has ended, and its executor's report.
fn end_of(pod: &Pod) -> Option<(String, FinalReport)> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let end = statuses[0].state.as_ref()?.terminated.as_ref()?;
    let report = serde_json::from_str(end.message.as_deref()?).ok()?;
    Some((pod.metadata.name.clone()?, report))
}

async fn stage_with(redis: bool, platform: Builder) -> Option<Stage> {
    let run_target = RunTarget::Cluster(Box::new(Fixture::new().await?));
    Some(if redis {
        Stage::on(run_target, platform).await
    } else {
        Stage::of(run_target, platform, None).await
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_pods_for_one_apply_and_one_destroy_one_does_it_and_the_other_names_it() {
    Box::pin(one_of_two_pods_does_it(true)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_redis_too_one_of_two_pods_does_it_and_the_other_names_it() {
    Box::pin(one_of_two_pods_does_it(false)).await;
}

/// No launcher runs meanwhile, so all reports come from executors.
async fn one_of_two_pods_does_it(redis: bool) {
    let twins = Twins::of(or_skip!(stage_with(redis, Platform::builder()).await));
    let (stage, fixture) = (&twins.stage, twins.stage.fixture());
    fixture.image_that_first(&Twins::barrier(&stage.machine().scratch("starts")));
    let module = twins.module();
    let workspace = stage.platform.workspace(Workspace::new(&module.url()));
    for (kind, noted) in [
        ("terraformApply", "made\n"),
        ("terraformDestroy", "made\ndestroyed\n"),
    ] {
        let launcher = stage.serve();
        let job = NewJob::new(&workspace, Flow::only(kind));
        let job = stage.platform.start_job(job);
        let of_job = format!("job-{job}-");
        let original = fixture
            .until("the Job is released", |state| {
                let mut jobs = state.jobs.iter();
                let job = jobs.find(|job| {
                    let name = job.metadata.name.as_deref().unwrap_or_default();
                    name.starts_with(&of_job)
                })?;
                (!crate::in_cluster::suspended(job)).then(|| job.clone())
            })
            .await;
        stage.platform.until_job(job, Status::Queue).await;
        launcher.crash();
        let twin = twin_of(&original);
        let jobs = Api::<Job>::namespaced(fixture.cluster.client(ADMIN).unwrap(), &fixture.runs);
        jobs.create(&PostParams::default(), &twin).await.unwrap();
        let pods = fixture
            .until("both have a pod", |state| {
                let of = |job: &Job| {
                    let pods = state.pods_of(job.metadata.name.as_deref()?);
                    pods.first()?.metadata.name.clone()
                };
                Some([of(&original)?, of(&twin)?])
            })
            .await;
        twins.assert_one_of(&pods).await;
        stage.platform.until_job(job, Status::Completed).await;
        assert_eq!(twins.noted(), noted, "{kind}");
        // A launcher that finds what happened changes nothing.
        let launcher = stage.serve();
        launcher.running.wait_for(
            integration_tests::process::Stream::Stderr,
            "a run has ended",
        );
        let job = stage.platform.job(job);
        assert_eq!(job.step_statuses(), [Status::Completed]);
        launcher.crash();
    }
    stage.platform.assert_kept().await;
}

/// The same step once more, of which the launcher knows nothing.
fn twin_of(job: &Job) -> Job {
    let mut twin = job.clone();
    let name = job.metadata.name.as_deref().unwrap();
    twin.metadata = ObjectMeta {
        name: Some(format!("twin-{}", &name[..12])),
        ..ObjectMeta::default()
    };
    twin.status = None;
    let spec = twin.spec.as_mut().unwrap();
    (spec.selector, spec.backoff_limit) = (None, Some(0));
    spec.pod_failure_policy = None;
    let template = spec.template.metadata.as_mut().unwrap();
    template.labels = None;
    twin
}

#[tokio::test(flavor = "multi_thread")]
async fn under_a_stock_launcher_an_apply_killed_in_its_midst_is_not_done_again_by_the_pod_that_follows()
 {
    the_pod_that_follows_does_nothing(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn under_a_stock_launcher_without_redis_neither() {
    the_pod_that_follows_does_nothing(false).await;
}

async fn the_pod_that_follows_does_nothing(redis: bool) {
    let run_target = or_skip!(Fixture::new().await);
    let client = run_target.cluster.client(ADMIN).unwrap();
    let jobs = Api::<Job>::namespaced(client, &run_target.runs);
    let create = move |data: Value| {
        let jobs = jobs.clone();
        async move {
            let mut job: Job = serde_json::from_value(super::stock::manifest(&data, 1)).unwrap();
            job.spec.as_mut().unwrap().backoff_limit = Some(1);
            let made = jobs.create(&PostParams::default(), &job).await;
            made.map(|_| ()).map_err(|error| error.to_string())
        }
    };
    let platform = Platform::builder().native(Native::new(create));
    let run_target = RunTarget::Cluster(Box::new(run_target));
    let stage = if redis {
        Stage::on(run_target, platform).await
    } else {
        Stage::of(run_target, platform, None).await
    };
    let stage = super::stock::asking_for_jobs(stage);
    // By its host's name an executor knows itself, and pods share one here.
    let words = format!(
        "{}\nexport {}=\"$HOSTNAME\"\n",
        quick(),
        job_contract::env::POD_NAME
    );
    stage.fixture().image_that_first(&words);
    let twins = Twins::of(stage);
    let stage = &twins.stage;
    let ledger = twins.ledger.display();
    let module = Repository::module(&format!(
        "resource \"terraform_data\" \"a\" {{\n  provisioner \"local-exec\" {{\n    command = \"echo made >> {ledger}; sleep 600\"\n  }}\n}}\n"
    ));
    stage.start(module, Flow::only("terraformApply"));
    let begun = || (twins.noted() == "made\n").then_some(());
    stage.until("the apply is at work", begun).await;
    let fixture = stage.fixture();
    let holder = fixture.state().await.pods[0].clone();
    assert!(fixture.cluster.oom_kill(&holder));
    let (name, report) = fixture
        .until("another pod has ended", |state| {
            state.pods.iter().find_map(end_of)
        })
        .await;
    let holder = holder.metadata.name.unwrap();
    assert_ne!(name, holder);
    assert_eq!(report.outcome, 76);
    let said = report.error.unwrap();
    assert!(
        said.contains(&holder) && said.contains("since 20"),
        "{said}"
    );
    let log = twins.log(&name).await;
    assert!(log.contains(&holder), "{log}");
    assert_eq!(twins.noted(), "made\n");
}
