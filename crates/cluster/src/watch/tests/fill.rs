//! What ended runs lacked in the store of providers becomes Jobs.

use std::sync::Arc;
use std::time::Duration;

use job_contract::report::FinalReport;
use k8s_openapi::api::batch::v1::Job;
use manifest::Deployment;
use manifest::deployment::FilledStore;
use manifest::fill::FillTemplate;
use manifest::overrides::Overrides;
use serde_json::{Value, json};

use super::super::WatchSettings;
use super::super::message::{Request, Response};
use super::machine::{Machine, job, over, pod_with_executor};
use crate::fake_server::Server;
use crate::fill::{FillJob, MOST_AT_A_TIME};

const AWS: &str = "registry.terraform.io/hashicorp/aws/5.0.0/linux_amd64";

pub(super) fn template() -> Arc<FillTemplate> {
    let deployment = Deployment {
        filled_store: Some(FilledStore {
            path: "/store".to_owned(),
            registries: vec!["registry.terraform.io".to_owned()],
        }),
        defaults: Overrides {
            plugin_cache_dir: Some("/store".to_owned()),
            ..Overrides::default()
        },
        ..Deployment::default()
    };
    Arc::new(FillTemplate::of(&deployment).unwrap().unwrap())
}

fn settings() -> WatchSettings {
    WatchSettings {
        fill: Some(template()),
        ..WatchSettings::default()
    }
}

/// A pod whose executor wanted these packages. The seal of its report was checked before.
fn pod_that_wanted(step: &str, wanted: &[&str]) -> Value {
    let report = FinalReport {
        wanted: wanted.iter().map(|text| (*text).to_owned()).collect(),
        ..FinalReport::default()
    };
    let ended = json!({"exitCode": 0, "message": report.to_termination_message(None)});
    pod_with_executor(step, "Succeeded", &json!({"terminated": ended}))
}

fn jobs(machine: &Machine) -> Vec<&Job> {
    let jobs = machine.requests().filter_map(|request| match request {
        Request::Fill { job } => Some(&**job),
        _ => None,
    });
    jobs.collect()
}

fn arguments(job: &Job) -> &[String] {
    let spec = job.spec.as_ref().unwrap().template.spec.as_ref().unwrap();
    spec.containers[0].args.as_deref().unwrap()
}

#[test]
fn what_a_run_lacked_is_asked_for_once() {
    let mut machine = Machine::start(settings(), 0, vec![job("a", json!({}))]);
    let other = "registry.example.test/x/y/1.0.0/linux_amd64";
    machine.pod(pod_that_wanted("a", &[AWS, other, "no package"]));
    machine.job(job("a", over("Complete", 0)));
    assert_eq!(arguments(jobs(&machine)[0]), ["fill", AWS]);
    machine.job(job("a", over("Complete", 0)));
    machine.pass(Duration::from_mins(1));
    assert_eq!(jobs(&machine).len(), 1);
    machine.take();
    machine.respond("a", Response::Fill { done: true });
    machine.pass(Duration::from_mins(1));
    assert_eq!(jobs(&machine).len(), 0);
}

/// The API server was away, for longer than the retries of a request.
#[test]
fn a_job_that_could_not_be_made_is_asked_for_again() {
    let mut machine = Machine::start(settings(), 0, vec![job("a", over("Complete", 0))]);
    machine.pod(pod_that_wanted("a", &[AWS]));
    machine.take();
    machine.respond("a", Response::Fill { done: false });
    machine.pass_until(|request| matches!(request, Request::Fill { .. }));
}

#[test]
fn a_restarted_launcher_asks_for_what_just_ended_and_nothing_older() {
    let mut machine = Machine::start(settings(), 0, vec![job("a", over("Complete", 0))]);
    machine.pod(pod_that_wanted("a", &[AWS]));
    assert_eq!(jobs(&machine).len(), 1);
    let mut machine = Machine::start(settings(), 0, vec![job("a", over("Complete", -700))]);
    machine.pod(pod_that_wanted("a", &[AWS]));
    assert_eq!(jobs(&machine).len(), 0);
}

#[test]
fn runs_that_fill_their_store_themselves_want_nothing() {
    let mut machine = Machine::with(job("a", json!({})));
    machine.pod(pod_that_wanted("a", &[AWS]));
    assert_eq!(jobs(&machine).len(), 0);
}

fn fill_job(number: usize) -> Job {
    let wanted = [format!(
        "registry.terraform.io/a/b/1.0.{number}/linux_amd64"
    )];
    let template = template();
    template.job(&template.allowed(wanted.iter()), None)
}

#[tokio::test]
async fn a_burst_makes_one_job_and_hostile_runs_a_few() {
    let server = Server::start();
    let cluster = server.cluster();
    assert_eq!(
        cluster.create_fill_job(&fill_job(0)).await.unwrap(),
        FillJob::Created
    );
    let same = futures_util::future::join_all(
        (0..5).map(async |_| cluster.create_fill_job(&fill_job(0)).await.unwrap()),
    );
    assert_eq!(same.await, [FillJob::AlreadyThere; 5]);
    let others = futures_util::future::join_all(
        (1..20).map(async |number| cluster.create_fill_job(&fill_job(number)).await.unwrap()),
    );
    let created = others
        .await
        .into_iter()
        .filter(|made| *made == FillJob::Created);
    assert_eq!(created.count(), MOST_AT_A_TIME - 1);
    assert_eq!(server.count("jobs"), MOST_AT_A_TIME);
    // One that is over makes space for another.
    let name = fill_job(0).metadata.name.unwrap();
    let mut ended = over("Complete", 0);
    ended["metadata"] = json!({"name": name});
    server.put("jobs", ended.clone());
    assert_eq!(
        cluster.create_fill_job(&fill_job(30)).await.unwrap(),
        FillJob::Created
    );
    // One that has failed is not repeated while it is there.
    ended["status"]["conditions"][0]["type"] = json!("Failed");
    server.put("jobs", ended);
    assert_eq!(
        cluster.create_fill_job(&fill_job(0)).await.unwrap(),
        FillJob::HasFailed
    );
}
