//! What a run lacked in the store of providers that only Jobs of the operator fill, and what became of these Jobs.

use std::collections::BTreeSet;

use job_contract::labels;
use job_contract::provider_cache::{MOST_WANTED, WantedPackage};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use manifest::fill;
use serde::Serialize;
use verdict::{Observation, final_report};

use super::observe;
use crate::view::RunState;
use crate::{Cluster, ClusterError};

/// The longest reason that is shown.
const MAX_REASON_CHARS: usize = 2000;

/// What a run lacked, and the Jobs that fetch it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StoreFilling {
    /// Packages that the run did not find in the store.
    pub lacked: Vec<String>,
    /// Jobs that fetch some of them, the oldest first.
    pub jobs: Vec<FillJobView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// A Job that fetches packages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FillJobView {
    pub name: String,
    /// All that it fetches. Another run may have lacked some of them.
    pub packages: Vec<String>,
    /// Its node, if the store is on a disk of each node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// `waiting`, `running`, `completed` or `failed`.
    pub state: RunState,
    /// Why it waits or has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Cluster {
    /// What an ended run lacked. `None`: nothing.
    pub(super) async fn filling(
        &self,
        of_run: &[Pod],
    ) -> Result<Option<StoreFilling>, ClusterError> {
        let lacked = lacked(of_run);
        if lacked.is_empty() {
            return Ok(None);
        }
        let jobs = self.jobs();
        let params = ListParams::default().labels(labels::FILL_SELECTOR);
        let mut there = self
            .request_with_retries("list the Jobs that fill the store", || jobs.list(&params))
            .await?
            .items;
        there.retain(|job| is_for(job, &lacked, of_run));
        there.sort_by_key(|job| job.metadata.creation_timestamp.as_ref().map(|time| time.0));
        let mut views = Vec::new();
        for job in &there {
            let pods = self.pods_of(job).await?;
            views.push(view(job, &pods, self.now()));
        }
        Ok(Some(StoreFilling {
            lacked: texts(&lacked),
            advice: advice(&views),
            jobs: views,
        }))
    }
}

fn lacked(pods: &[Pod]) -> BTreeSet<WantedPackage> {
    let reports = pods.iter().filter_map(final_report);
    let wanted = reports.flat_map(|report| report.wanted);
    let packages = wanted.filter_map(|text| text.parse().ok());
    packages.take(MOST_WANTED).collect()
}

/// Whether a Job fetches one of these packages into the store that the run has read.
fn is_for(job: &Job, lacked: &BTreeSet<WantedPackage>, of_run: &[Pod]) -> bool {
    let node = fill::node(job);
    let is_there = node.is_none_or(|node| {
        let mut specs = of_run.iter().filter_map(|pod| pod.spec.as_ref());
        specs.any(|spec| spec.node_name.as_deref() == Some(node))
    });
    is_there && !fill::packages(job).is_disjoint(lacked)
}

fn view(job: &Job, pods: &[Pod], now: Timestamp) -> FillJobView {
    let end = verdict::terminal(job).map(|condition| &*condition.type_);
    let (state, reason) = match (end, observe(job, pods, &[], now)) {
        (Some("Complete"), _) => (RunState::Completed, None),
        (Some(_), Observation::Ended(verdict)) => {
            let said = verdict::newest(pods).and_then(said);
            (RunState::Failed, Some(said.unwrap_or(verdict.sentence)))
        }
        (Some(_), _) => (RunState::Failed, None),
        (None, Observation::Waiting(wait)) => (RunState::Waiting, Some(wait.sentence)),
        // Only its deadline ends it.
        (None, Observation::Ended(verdict)) => (RunState::Waiting, Some(verdict.sentence)),
        (None, Observation::InProgress) => (RunState::Running, None),
    };
    FillJobView {
        name: job.metadata.name.clone().unwrap_or_default(),
        packages: texts(&fill::packages(job)),
        node: fill::node(job).map(str::to_owned),
        state,
        reason,
    }
}

/// What the program itself says about its failure, as the termination message.
fn said(pod: &Pod) -> Option<String> {
    let end = verdict::executor_state(pod)?.terminated.as_ref()?;
    let message = end.message.as_deref()?.trim();
    let message: String = message.chars().take(MAX_REASON_CHARS).collect();
    (!message.is_empty()).then_some(message)
}

fn advice(jobs: &[FillJobView]) -> Option<String> {
    if jobs.is_empty() {
        let text = "no Job that fetches these packages is there. It may have ended more than ten minutes ago. Otherwise the log \
                    of launcher or agent says why none was made, if it allows their registries";
        return Some(text.to_owned());
    }
    let mut failed = jobs.iter().filter(|job| job.state == RunState::Failed);
    let name = &failed.next()?.name;
    Some(format!(
        "correct the cause. Until then, each run downloads these packages. The next run that lacks them gets a new Job when \
         this one is gone: ten minutes after its end, or after `kubectl delete job {name}`"
    ))
}

fn texts(packages: &BTreeSet<WantedPackage>) -> Vec<String> {
    packages.iter().map(WantedPackage::to_string).collect()
}

#[cfg(test)]
mod tests {
    use job_contract::report::FinalReport;
    use serde_json::{Value, json};

    use super::*;
    use crate::fake_server::Server;

    const AWS: &str = "registry.terraform.io/hashicorp/aws/5.0.0/linux_amd64";
    const NULL: &str = "registry.terraform.io/hashicorp/null/3.0.0/linux_amd64";
    const TLS: &str = "registry.terraform.io/hashicorp/tls/4.0.0/linux_amd64";

    fn ended_pod(job: &str, code: u8, message: &str) -> Value {
        json!({
            "metadata": {"name": format!("{job}-x"), "labels": {"batch.kubernetes.io/job-name": job},
                "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": job}]},
            "spec": {"nodeName": "one", "containers": []},
            "status": {"phase": if code == 0 { "Succeeded" } else { "Failed" }, "containerStatuses": [{
                "name": "executor", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": code, "message": message}}}]},
        })
    }

    /// The pod of a run. The seal of its report was checked before.
    fn run_that_lacked(wanted: &[&str]) -> Vec<Pod> {
        let report = FinalReport {
            wanted: wanted.iter().map(|text| (*text).to_owned()).collect(),
            ..FinalReport::default()
        };
        let pod = ended_pod("job-1-plan", 0, &report.to_termination_message(None));
        vec![serde_json::from_value(pod).unwrap()]
    }

    fn job(name: &str, package: &str, node: Option<&str>, condition: Option<&str>) -> Value {
        let affinity = node.map(|node| {
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]}}})
        });
        let conditions: Vec<_> = condition
            .map(|kind| json!({"type": kind, "status": "True", "reason": "BackoffLimitExceeded"}))
            .into_iter()
            .collect();
        json!({
            "metadata": {"name": name, "uid": name, "labels": {labels::MANAGED_BY: labels::MANAGED_BY_FILL}},
            "spec": {"template": {"spec": {"affinity": affinity,
                "containers": [{"name": "executor", "args": ["fill", package]}]}}},
            "status": {"conditions": conditions},
        })
    }

    #[tokio::test]
    async fn a_person_sees_the_jobs_of_a_run_and_why_one_failed() {
        let server = Server::start();
        for object in [
            job("fill-aws", AWS, None, Some("Failed")),
            job("fill-null", NULL, Some("one"), Some("Complete")),
            job("fill-null-elsewhere", NULL, Some("two"), Some("Complete")),
            job("fill-tls", TLS, None, Some("Failed")),
        ] {
            server.put("jobs", object);
        }
        let why = format!("{AWS}: the registry answered 503");
        server.put("pods", ended_pod("fill-aws", 75, &why));
        let run = run_that_lacked(&[AWS, NULL, "\u{1b}[2J"]);
        let told = server.cluster().filling(&run).await.unwrap().unwrap();
        assert_eq!(told.lacked, [AWS, NULL]);
        let jobs: Vec<_> = told
            .jobs
            .iter()
            .map(|job| (&*job.name, job.state, job.reason.as_deref()))
            .collect();
        let expected = [
            ("fill-aws", RunState::Failed, Some(&*why)),
            ("fill-null", RunState::Completed, None),
        ];
        assert_eq!(jobs, expected);
        let advice = told.advice.unwrap();
        assert!(advice.contains("kubectl delete job fill-aws"), "{advice}");
    }

    #[tokio::test]
    async fn a_run_without_a_job_is_told_where_to_look_and_one_that_lacked_nothing_nothing() {
        let server = Server::start();
        server.put("jobs", job("fill-tls", TLS, None, None));
        let told = server
            .cluster()
            .filling(&run_that_lacked(&[AWS]))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(told.jobs, []);
        assert!(told.advice.unwrap().contains("log of launcher or agent"));
        let nothing = server.cluster().filling(&run_that_lacked(&[])).await;
        assert_eq!(nothing.unwrap(), None);
    }

    #[test]
    fn a_job_that_is_not_over_waits_or_runs() {
        let unfinished: Job = serde_json::from_value(job("fill-aws", AWS, None, None)).unwrap();
        let state = |pods: &[Pod]| view(&unfinished, pods, Timestamp::UNIX_EPOCH).state;
        assert_eq!(state(&[]), RunState::Waiting);
        let mut pod = ended_pod("fill-aws", 0, "");
        pod["status"]["phase"] = "Running".into();
        pod["status"]["containerStatuses"][0]["state"] =
            json!({"running": {"startedAt": "1970-01-01T00:00:00Z"}});
        let pod = serde_json::from_value(pod).unwrap();
        assert_eq!(state(&[pod]), RunState::Running);
    }
}
