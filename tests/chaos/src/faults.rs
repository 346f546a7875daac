//! Injects the faults of a schedule. Each fault waits until its run has reached the right point. Afterwards the run
//! continues.

use std::time::{Duration, Instant};

use anyhow::Result;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt as _};
use serde_json::Value;
use test_cluster::{ADMIN, Fault as ApiFault};
use test_peers::proxy::Trouble;
use test_platform::{Effect, Fault as PlatformFault};

use crate::check::Line;
use crate::facts::marks;
use crate::peers::{Gate, LAUNCHER, LINES, Peers, until};
use crate::schedule::{Fault, InjectionPoint, Run};

/// How long a run may take to reach the point of its fault. If another run's fault delays its release, it waits half a minute
/// for a launcher that watches, and again for each launcher that is killed meanwhile.
const ARRIVAL: Duration = Duration::from_mins(4);
/// How long a pod may take to end after its fault.
const END: Duration = Duration::from_mins(1);
/// How long the work after a gate may take while peers fail.
const WORK: Duration = Duration::from_mins(1);
/// How long the Job of a finished run may stay: longer than its time to live.
const REMOVAL: Duration = Duration::from_mins(2);
/// The method of reports. Executors send requests of other methods all the time.
const REPORT: &str = "PATCH";
/// How long a slow peer takes to answer.
const SLOW: Duration = Duration::from_secs(3);

/// The job that gets a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) run: Run,
    pub(crate) job: u32,
    /// Name of the phase in which the run can be stopped.
    pub(crate) phase: &'static str,
}

impl Peers {
    /// Prepares the faults that must be ready before the job exists. The guard prevents other faults of the API server.
    pub(crate) async fn before_dispatch(
        &self,
        fault: Fault,
    ) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        let faults = self.cluster.faults();
        let order = |count, verb, resource, fault| {
            faults.next_of(LAUNCHER, count, verb, resource, fault);
        };
        match fault {
            Fault::ApiAtDispatch => {
                let guard = self.locks.api.lock().await;
                order(1, "create", "jobs", ApiFault::TooManyRequests(1));
                order(1, "create", "jobs", ApiFault::InternalError);
                order(1, "create", "jobs", ApiFault::DropAfter);
                order(1, "create", "secrets", ApiFault::Unavailable);
                order(1, "create", "secrets", ApiFault::DropAfter);
                order(2, "patch", "jobs", ApiFault::DropBefore);
                Some(guard)
            }
            Fault::LaunchersAtDispatch => {
                let guard = self.locks.api.lock().await;
                order(1, "create", "secrets", ApiFault::Hang);
                Some(guard)
            }
            _ => None,
        }
    }

    /// Injects a fault into a started job. Returns whether the fault happened as scheduled.
    pub(crate) async fn inject(&self, fault: Fault, target: Target) -> Result<bool> {
        let fault_happened = match fault.injection_point() {
            InjectionPoint::Dispatch => self.inject_at_dispatch(fault, target).await?,
            InjectionPoint::Fetch => {
                let arrived = self.until_held(target, Gate::Fetch).await;
                let fault_happened = arrived && self.inject_before_claim(fault, target).await?;
                self.release(target.run.number, Gate::Fetch);
                fault_happened
            }
            InjectionPoint::Work | InjectionPoint::Report => {
                let arrived = self.until_held(target, Gate::Work).await;
                let arrived = arrived && self.until_printed(target).await;
                let fault_happened = arrived && self.inject_at_work(fault, target).await?;
                self.release(target.run.number, Gate::Work);
                fault_happened
            }
            InjectionPoint::After => {
                self.until_over(target.job).await
                    && self.until_job_is_gone(target).await?
                    && self.deliver_again(target.job, 2).await?
            }
        };
        Ok(fault_happened)
    }

    async fn inject_at_dispatch(&self, fault: Fault, target: Target) -> Result<bool> {
        let dispatched = || self.platform.job(target.job).posts > 0;
        if !until(ARRIVAL, dispatched).await {
            return Ok(false);
        }
        match fault {
            Fault::DuplicatesAtDispatch => self.deliver_again(target.job, 4).await,
            Fault::LaunchersAtDispatch => {
                let jobs = Api::<Job>::namespaced(self.cluster.client(ADMIN)?, &self.runs);
                let name = self.job_name(target.job);
                let limit = tokio::time::Instant::now() + ARRIVAL;
                while jobs.get_opt(&name).await?.is_none() || self.cluster.faults().left() > 0 {
                    if tokio::time::Instant::now() > limit {
                        return Ok(false);
                    }
                    tokio::time::sleep(Duration::from_millis(25)).await;
                }
                let _lock = self.locks.launchers.lock().await;
                self.launchers.lock().await.kill_all();
                self.start_launchers().await?;
                Ok(true)
            }
            // The dispatch ends only after all faults have happened.
            _ => Ok(until(ARRIVAL, || self.cluster.faults().left() == 0).await),
        }
    }

    async fn inject_before_claim(&self, fault: Fault, target: Target) -> Result<bool> {
        if fault == Fault::LauncherEarly {
            let replica = usize::try_from(target.run.number).unwrap_or_default();
            let _lock = self.locks.launchers.lock().await;
            self.launchers.lock().await.kill(replica);
            self.release(target.run.number, Gate::Fetch);
            self.start_launchers().await?;
            return Ok(true);
        }
        let Some(pod) = self.pod_at_work(target.job).await else {
            return Ok(false);
        };
        match fault {
            Fault::EvictedEarly => {
                self.cluster.evict(&pod);
            }
            Fault::NodeLostEarly => {
                self.cluster.lose_node(&pod).await?;
                self.cluster.remove_node_of(&pod).await?;
            }
            _ => self.cluster.preempt(&pod).await?,
        }
        Ok(self.until_pod_is_over(target.job, &pod).await)
    }

    async fn inject_at_work(&self, fault: Fault, target: Target) -> Result<bool> {
        match fault {
            Fault::OomKilled
            | Fault::Evicted
            | Fault::NodeLost
            | Fault::Deleted
            | Fault::Drained => self.inject_into_pod(fault, target).await,
            Fault::Cancel => {
                let pod = self.pod_at_work(target.job).await;
                self.platform.cancel(target.job).await;
                match pod {
                    Some(pod) => Ok(self.until_pod_is_over(target.job, &pod).await),
                    None => Ok(false),
                }
            }
            Fault::Launcher | Fault::Launchers => {
                let replica = usize::try_from(target.run.number).unwrap_or_default();
                let _lock = self.locks.launchers.lock().await;
                {
                    let mut launchers = self.launchers.lock().await;
                    match fault {
                        Fault::Launcher => launchers.kill(replica),
                        _ => launchers.kill_all(),
                    }
                }
                let worked = self.finish_work(target).await;
                self.start_launchers().await?;
                Ok(worked)
            }
            Fault::Duplicates => self.deliver_again(target.job, 3).await,
            Fault::RedisRestarted => {
                let mut redis = self.redis.lock().await;
                redis.kill();
                let worked = self.finish_work(target).await;
                redis.restart()?;
                self.record_redis_data_loss();
                Ok(worked)
            }
            Fault::RedisFrozen => {
                let redis = self.redis.lock().await;
                redis.freeze()?;
                let worked = self.finish_work(target).await;
                redis.thaw()?;
                Ok(worked)
            }
            Fault::KilledAtReport => self.kill_at_report(target).await,
            _ if fault.disturbs_store() => self.inject_into_store(fault, target).await,
            Fault::ApiErrors | Fault::ApiHangs | Fault::WatchesCut => {
                self.inject_into_api_server(fault, target).await
            }
            _ => self.inject_into_platform(fault, target).await,
        }
    }

    async fn inject_into_pod(&self, fault: Fault, target: Target) -> Result<bool> {
        let Some(pod) = self.pod_at_work(target.job).await else {
            return Ok(false);
        };
        let pods = Api::<Pod>::namespaced(self.cluster.client(ADMIN)?, &self.runs);
        match fault {
            Fault::OomKilled => {
                self.cluster.oom_kill(&pod);
            }
            Fault::Evicted => {
                self.cluster.evict(&pod);
            }
            Fault::NodeLost => {
                self.cluster.lose_node(&pod).await?;
                self.cluster.remove_node_of(&pod).await?;
            }
            Fault::Deleted => {
                let options = DeleteParams {
                    grace_period_seconds: Some(0),
                    ..DeleteParams::default()
                };
                pods.delete(&pod.name_any(), &options).await?;
            }
            _ => {
                pods.delete(&pod.name_any(), &DeleteParams::default())
                    .await?;
            }
        }
        Ok(self.until_pod_is_over(target.job, &pod).await)
    }

    async fn inject_into_platform(&self, fault: Fault, target: Target) -> Result<bool> {
        let _lock = self.locks.platform.lock().await;
        let order = |method, effect, times| {
            self.platform.fault(PlatformFault {
                times,
                ..PlatformFault::once(method, "", effect)
            });
        };
        if fault == Fault::PlatformAway {
            self.platform.go_down().await;
            // The executor reports after its work, while the platform is unreachable.
            let worked = self.finish_work(target).await;
            self.platform.come_up().await;
            return Ok(worked);
        }
        for method in ["GET", "PATCH", "POST"] {
            match fault {
                Fault::PlatformErrors => order(method, Effect::Status(503), 8),
                Fault::PlatformSlow => order(method, Effect::Slow(SLOW), 3),
                _ => {
                    order(method, Effect::DropBefore, 2);
                    order(method, Effect::DropAfter, 3);
                }
            }
        }
        let ordered = self.platform.faults_left(REPORT);
        self.release(target.run.number, Gate::Work);
        let over = self.until_over(target.job).await;
        let happened = self.platform.faults_left(REPORT) < ordered;
        self.platform.clear_faults();
        Ok(over && happened)
    }

    /// Kills the container after the platform has refused its report.
    async fn kill_at_report(&self, target: Target) -> Result<bool> {
        let Some(pod) = self.pod_at_work(target.job).await else {
            return Ok(false);
        };
        let _lock = self.locks.platform.lock().await;
        let since = Instant::now();
        // The paths of the job and of its steps.
        for end in ["$", "/"] {
            let path = format!("/job/{}{end}", target.job);
            self.platform
                .fault(PlatformFault::always(REPORT, &path, Effect::Status(503)));
        }
        self.release(target.run.number, Gate::Work);
        let refused = || {
            let ledger = self.platform.ledger();
            let reports = ledger.of(REPORT, "");
            let mut reports = reports.iter().filter(|one| one.job == Some(target.job));
            // Reports of the running tool may have been refused earlier.
            reports.any(|report| report.status == 503 && report.at >= since)
        };
        let refused = until(WORK, refused).await;
        self.cluster.oom_kill(&pod);
        let over = self.until_pod_is_over(target.job, &pod).await;
        self.platform.clear_faults();
        Ok(refused && over)
    }

    async fn inject_into_store(&self, fault: Fault, target: Target) -> Result<bool> {
        let _lock = self.locks.store.lock().await;
        let before = self.store_proxy.troubled();
        self.begin_store_outage();
        match fault {
            Fault::StoreRefuses => self.store_proxy.next(5, Trouble::Refuse),
            Fault::StoreSlow => self.store_proxy.next(4, Trouble::Stall(SLOW)),
            _ => {
                self.store_proxy.next(2, Trouble::CutAnswer(20));
                self.store_proxy.next(2, Trouble::CutRequest(200));
            }
        }
        self.store_proxy.cut();
        self.release(target.run.number, Gate::Work);
        let over = self.until_over(target.job).await;
        let fault_happened = over && self.store_proxy.troubled() > before;
        self.end_store_outage();
        Ok(fault_happened)
    }

    async fn inject_into_api_server(&self, fault: Fault, target: Target) -> Result<bool> {
        let _lock = self.locks.api.lock().await;
        let faults = self.cluster.faults();
        match fault {
            // The API server answers 410, because the launchers' resource versions are too old. So they list again.
            Fault::WatchesCut => {
                faults.next_of(LAUNCHER, 4, "watch", "*", ApiFault::Expired);
            }
            Fault::ApiHangs => {
                for (verb, resource) in [("update", "leases"), ("patch", "jobs"), ("list", "pods")]
                {
                    faults.next_of(LAUNCHER, 2, verb, resource, ApiFault::Hang);
                }
            }
            _ => {
                for fault in [
                    ApiFault::TooManyRequests(1),
                    ApiFault::InternalError,
                    ApiFault::Unavailable,
                    ApiFault::DropAfter,
                ] {
                    faults.next_of(LAUNCHER, 4, "*", "*", fault);
                }
            }
        }
        let ordered = faults.left();
        if fault != Fault::ApiHangs {
            self.cluster.cut_watches();
        }
        // The run waits until the first fault has happened to a launcher.
        let happened = until(END, || faults.left() < ordered).await;
        self.release(target.run.number, Gate::Work);
        let over = self.until_over(target.job).await;
        faults.clear();
        Ok(happened && over)
    }

    /// Delivers the last dispatch of a job again, to every launcher. Returns whether one accepted it.
    async fn deliver_again(&self, job: u32, times: usize) -> Result<bool> {
        let launchers = self.launchers.lock().await.addresses();
        let (document, token) = (
            self.platform.job_data(job).to_string(),
            self.platform.dispatch_token(),
        );
        let mut posts = tokio::task::JoinSet::new();
        for address in launchers.iter().cycle().take(times * launchers.len()) {
            let url = format!("http://{address}/api/v1/terraform-rs");
            let post = self
                .client
                .post(url)
                .bearer_auth(&token)
                .header("content-type", "application/json")
                .body(document.clone());
            posts.spawn(async move { post.send().await.map(|answer| answer.status().as_u16()) });
        }
        let answers = posts.join_all().await;
        Ok(!answers.is_empty() && answers.into_iter().any(|answer| matches!(answer, Ok(202))))
    }

    /// Posts requests without valid job data. Returns the answers that accept one.
    pub(crate) async fn post_bad_data(&self, run: u32) -> Result<Vec<String>> {
        let mut accepted_bad = Vec::new();
        let short = Value::from(run).to_string();
        for body in ["", "{", "[]", "{\"jobId\": {}}", short.as_str()] {
            let url = format!(
                "http://{}/api/v1/terraform-rs",
                self.launcher_proxy.address()
            );
            let post = self
                .client
                .post(url)
                .bearer_auth(self.platform.dispatch_token())
                .header("content-type", "application/json")
                .body(body.to_owned());
            // If no launcher answers, the request is not accepted either.
            if let Ok(answer) = post.send().await
                && answer.status().is_success()
            {
                accepted_bad.push(format!("{body:?} was answered {}", answer.status()));
            }
        }
        Ok(accepted_bad)
    }

    async fn until_held(&self, target: Target, gate: Gate) -> bool {
        let over = || self.platform.job(target.job).status.is_terminal();
        until(ARRIVAL, || self.is_held(target.run.number, gate) || over()).await;
        self.is_held(target.run.number, gate)
    }

    /// Waits until the lines before the gate are in the container log.
    async fn until_printed(&self, target: Target) -> bool {
        let mark = (target.run.number, Line::new(target.phase, LINES));
        let limit = tokio::time::Instant::now() + END;
        while tokio::time::Instant::now() < limit {
            for pod in self.pods_of(target.job).await {
                let log = self.cluster.container_log(&pod, "executor");
                let log = log.unwrap_or_default();
                if marks(&log).contains(&mark) {
                    return true;
                }
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        false
    }

    /// Releases the run, and waits until its work is done. Returns whether it is.
    async fn finish_work(&self, target: Target) -> bool {
        self.release(target.run.number, Gate::Work);
        let done = format!("end {}", target.phase);
        until(WORK, || {
            let journal = self.journal(target.run.number);
            journal.contains(&done)
        })
        .await
    }

    /// Waits until the platform's job has ended.
    pub(crate) async fn until_over(&self, job: u32) -> bool {
        until(WORK * 3, || self.platform.job(job).status.is_terminal()).await
    }

    async fn until_job_is_gone(&self, target: Target) -> Result<bool> {
        let jobs = Api::<Job>::namespaced(self.cluster.client(ADMIN)?, &self.runs);
        let name = self.job_name(target.job);
        let limit = tokio::time::Instant::now() + REMOVAL;
        while jobs.get_opt(&name).await?.is_some() {
            if tokio::time::Instant::now() > limit {
                return Ok(false);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(true)
    }

    fn job_name(&self, job: u32) -> String {
        let step = self.platform.job(job).dispatched.unwrap_or_default();
        format!("job-{job}-{step}")
    }

    async fn pods_of(&self, job: u32) -> Vec<Pod> {
        let step = self.platform.job(job).dispatched.unwrap_or_default();
        self.pods(job, &step).await
    }

    async fn pod_at_work(&self, job: u32) -> Option<Pod> {
        let limit = tokio::time::Instant::now() + END;
        while tokio::time::Instant::now() < limit {
            let pods = self.pods_of(job).await;
            if let Some(pod) = pods.into_iter().find(|pod| phase(pod) == "Running") {
                return Some(pod);
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        None
    }

    async fn until_pod_is_over(&self, job: u32, pod: &Pod) -> bool {
        let limit = tokio::time::Instant::now() + END;
        while tokio::time::Instant::now() < limit {
            let pods = self.pods_of(job).await;
            let same = pods.iter().find(|other| other.uid() == pod.uid());
            if same.is_none_or(|pod| matches!(phase(pod), "Succeeded" | "Failed")) {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        false
    }
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending")
}
