//! The platform delivers at least once; what it delivers runs at most once, and shows nothing it must not.

use std::time::Duration;

use integration_tests::Repository;
use k8s_openapi::api::batch::v1::Job;
use kube::Api;
use kube::api::DeleteParams;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use test_cluster::{ADMIN, Fault, State};
use test_platform::{Flow, NewJob, Platform, Status, Variable, Workspace};

use super::{Ground, Stage};
use crate::kubernetes::{LAUNCHER, Launcher, Place};

const KEY: &str = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAA\n-----END OPENSSH PRIVATE KEY-----\n";

impl Stage {
    /// Delivers the last dispatch of a job again; returns status and body of the answer.
    async fn deliver_again(&self, launcher: &Launcher, job: u32) -> (u16, String) {
        let url = format!("http://{}/api/v1/terraform-rs", launcher.door().address);
        let request = reqwest::Client::builder()
            .no_proxy()
            .build()
            .unwrap()
            .post(url)
            .bearer_auth(self.platform.dispatch_token())
            .header("content-type", "application/json")
            .body(self.platform.job_data(job).to_string());
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }
}

/// Workspaces and templates whose documents differ in everything a document can differ in.
fn kinds() -> Vec<(Workspace, Vec<Flow>)> {
    let workspace = || Workspace::new("https://git.example.test/acme/network.git");
    let plan = || Flow::only("terraformPlan");
    let over_ssh = Workspace {
        vcs_type: "SSH~id_ed25519".to_owned(),
        access_token: Some(KEY.to_owned()),
        module_ssh_key: Some(KEY.to_owned()),
        branch: "release-1,main".to_owned(),
        terraform_version: "~> 1.9.0".to_owned(),
        ..workspace()
    };
    let with_options = workspace()
        .with(Variable::env(
            "EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS",
            "pool=terraform",
        ))
        .with(Variable::env(
            "EPHEMERAL_CONFIG_TOLERATIONS",
            "spot:Exists:NoExecute;;",
        ))
        .with(Variable::env("EPHEMERAL_CPU_REQUEST", "100m"))
        .with(Variable::env("EPHEMERAL_CONFIG_LABELS", "team=platform"));
    let tofu = Workspace {
        iac_type: "tofu".to_owned(),
        ..workspace()
    };
    let hooks = Flow::new("terraformPlan", 100)
        .with_script("./lint.sh")
        .on_failure("echo failed");
    vec![
        (workspace(), plan()),
        (workspace(), Flow::only("terraformApply")),
        (over_ssh, Flow::only("terraformDestroy")),
        (with_options, plan()),
        (workspace(), vec![hooks]),
        (workspace(), Flow::only("terraformPlanDestroy")),
        (tofu, plan()),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_document_becomes_one_job_however_often_it_comes() {
    let ground = Ground::Cluster(Box::new(Place::without_pods().await));
    let stage = Stage::on(ground, Platform::builder()).await;
    let launcher = stage.serve();
    let platform = &stage.platform;
    let mut jobs = Vec::new();
    for (workspace, template) in kinds() {
        let workspace = platform.workspace(workspace);
        jobs.push(platform.start_job(NewJob::new(&workspace, template)));
    }
    let workspace = platform.workspace(Workspace::new("https://git.example.test/none.git"));
    let uploaded = NewJob::new(&workspace, Flow::only("terraformPlan"));
    let uploaded = uploaded.from_upload("https://terrakube.example.test/terraformContent.tar.gz");
    jobs.push(platform.start_job(NewJob {
        refresh: false,
        refresh_only: true,
        ..uploaded
    }));
    for job in &jobs {
        platform.until_job(*job, Status::Queue).await;
        assert_eq!(
            stage.deliver_again(&launcher, *job).await,
            (202, "{}".to_owned())
        );
    }
    let cluster = stage.place().state().await;
    assert_eq!(cluster.jobs.len(), jobs.len());
    assert_eq!(
        cluster.secrets.len(),
        jobs.len() + 1,
        "one for each, and the settings"
    );
    let during = platform
        .ledger()
        .requests
        .iter()
        .filter(|request| request.during_dispatch)
        .count();
    assert_eq!(during, 0, "{}", platform.ledger());
    platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatch_that_was_not_answered_in_time_is_not_run_twice_when_it_is_repeated() {
    let ground = Ground::Cluster(Box::new(Place::new().await));
    let platform = Platform::builder().answer_within(Duration::from_secs(2));
    let stage = Stage::on(ground, platform).await;
    let faults = stage.place().cluster.faults();
    faults.next_of(LAUNCHER, 1, "create", "secrets", Fault::Hang);
    let _launcher = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::plan_apply());
    let job = stage.platform.until_job(job, Status::Completed).await;
    assert!(job.posts > 2, "every dispatch was answered in time");
    let cluster = stage.place().state().await;
    assert_eq!(
        (cluster.jobs.len(), cluster.secrets.len()),
        (2, 3),
        "the settings and one Secret for each Job"
    );
    stage.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_credential_shows_in_the_cluster_or_in_the_log_of_the_launcher() {
    const TOKEN: &str = "ghs_planted0token1for2the3clone";
    const SENSITIVE: &str = "planted-sensitive-variable";
    let stage = Stage::in_cluster().await;
    let launcher = stage.serve_with(&[(job_contract::env::LOG_FILTER, "trace")]);
    let repository = Repository::fixture();
    let workspace = Workspace {
        access_token: Some(TOKEN.to_owned()),
        ..Workspace::new(&repository.url())
    };
    let workspace = workspace.with(Variable::terraform("greeting", SENSITIVE));
    let workspace = stage.platform.workspace(workspace);
    let job = NewJob::new(&workspace, Flow::plan_apply());
    let job = stage.platform.start_job(job);
    stage.platform.until_job(job, Status::Completed).await;

    let data: Value = stage.platform.job_data(job);
    let document = job_contract::encoding::encode(&serde_json::from_value(data).unwrap());
    let cluster = stage.place().state().await;
    let visible = json!([cluster.jobs, cluster.pods, cluster.events]).to_string();
    launcher.running.signal(Signal::SIGTERM);
    let said = launcher.into_running().wait().to_string();
    for secret in [TOKEN, SENSITIVE, &stage.platform.secret(), &document] {
        assert!(!visible.contains(secret), "{secret} is in {visible}");
        assert!(!said.contains(secret), "{secret} is in {said}");
    }
    assert!(
        said.contains("listening") && visible.contains(&job.to_string()),
        "nothing was looked at"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_that_waits_for_approval_is_not_made_again_by_a_late_delivery() {
    let stage = Stage::in_cluster().await;
    let launcher = stage.serve();
    let job = stage.start(Repository::fixture(), Flow::plan_approve_apply());
    stage.platform.until_job(job, Status::WaitingApproval).await;
    // Its time to live has passed.
    let place = stage.place();
    let name = only_job(&place.state().await);
    let jobs = Api::<Job>::namespaced(place.cluster.client(ADMIN).unwrap(), &place.runs);
    jobs.delete(&name, &DeleteParams::background())
        .await
        .unwrap();
    let gone = |state: &State| state.jobs.is_empty().then_some(());
    place.until("the Job is gone", gone).await;
    let before = stage.platform.job(job);

    let answer = stage.deliver_again(&launcher, job).await;
    assert_eq!(answer, (202, "{}".to_owned()));
    let complete = |state: &State| state.has_condition(&name, "Complete").then_some(());
    place.until("the second Job is over", complete).await;
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
