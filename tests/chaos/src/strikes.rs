//! What happens to runs, and around them: each strike waits until its run is where it is to be struck, strikes, and
//! lets it go on.

use std::time::{Duration, Instant};

use anyhow::Result;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt as _};
use serde_json::Value;
use test_cluster::{ADMIN, Fault as ApiFault};
use test_peers::proxy::Trouble;
use test_platform::{Effect, Fault};

use crate::books::Line;
use crate::facts::marks;
use crate::schedule::{Moment, Run, Strike};
use crate::world::{Gate, LAUNCHER, LINES, World, until};

/// A run that has not come to the place of its strike by then never will. One that the strike of another keeps from being
/// released waits for a launcher to watch for half a minute, and again for each that is killed meanwhile.
const ARRIVAL: Duration = Duration::from_mins(4);
/// How long what was struck may take to end.
const END: Duration = Duration::from_mins(1);
/// How long what follows a gate may take, with everything around it in trouble.
const WORK: Duration = Duration::from_mins(1);
/// How long the Job of a run may stay that is over: its time to live, and some.
const REMOVAL: Duration = Duration::from_mins(2);
/// How executors tell the platform what became of a run; they ask it all the time.
const REPORT: &str = "PATCH";
/// What slow peers take.
const SLOW: Duration = Duration::from_secs(3);

/// A job that is to be struck.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) run: Run,
    pub(crate) job: u32,
    /// What its work is called where it can be held.
    pub(crate) phase: &'static str,
}

impl World {
    /// What has to be ordered before the job is there. Whoever holds the guard has the API server for itself.
    pub(crate) async fn before_dispatch(
        &self,
        strike: Strike,
    ) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        let faults = self.cluster.faults();
        let order = |count, verb, resource, fault| {
            faults.next_of(LAUNCHER, count, verb, resource, fault);
        };
        match strike {
            Strike::ApiAtDispatch => {
                let turn = self.turns.api.lock().await;
                order(1, "create", "jobs", ApiFault::TooManyRequests(1));
                order(1, "create", "jobs", ApiFault::InternalError);
                order(1, "create", "jobs", ApiFault::DropAfter);
                order(1, "create", "secrets", ApiFault::Unavailable);
                order(1, "create", "secrets", ApiFault::DropAfter);
                order(2, "patch", "jobs", ApiFault::DropBefore);
                Some(turn)
            }
            Strike::LaunchersAtDispatch => {
                let turn = self.turns.api.lock().await;
                order(1, "create", "secrets", ApiFault::Hang);
                Some(turn)
            }
            _ => None,
        }
    }

    /// Strikes a job that was started. Says whether it was struck as scheduled.
    pub(crate) async fn strike(&self, strike: Strike, target: Target) -> Result<bool> {
        let struck = match strike.moment() {
            Moment::Dispatch => self.strike_dispatch(strike, target).await?,
            Moment::Fetch => {
                let arrived = self.until_held(target, Gate::Fetch).await;
                let struck = arrived && self.strike_early(strike, target).await?;
                self.release(target.run.number, Gate::Fetch);
                struck
            }
            Moment::Work | Moment::Report => {
                let arrived = self.until_held(target, Gate::Work).await;
                let arrived = arrived && self.until_printed(target).await;
                let struck = arrived && self.strike_work(strike, target).await?;
                self.release(target.run.number, Gate::Work);
                struck
            }
            Moment::After => {
                self.until_over(target.job).await
                    && self.until_job_is_gone(target).await?
                    && self.deliver_again(target.job, 2).await?
            }
        };
        Ok(struck)
    }

    async fn strike_dispatch(&self, strike: Strike, target: Target) -> Result<bool> {
        let dispatched = || self.platform.job(target.job).posts > 0;
        if !until(ARRIVAL, dispatched).await {
            return Ok(false);
        }
        match strike {
            Strike::DuplicatesAtDispatch => self.deliver_again(target.job, 4).await,
            Strike::LaunchersAtDispatch => {
                let jobs = Api::<Job>::namespaced(self.cluster.client(ADMIN)?, &self.runs);
                let name = self.job_name(target.job);
                let limit = tokio::time::Instant::now() + ARRIVAL;
                while jobs.get_opt(&name).await?.is_none() || self.cluster.faults().left() > 0 {
                    if tokio::time::Instant::now() > limit {
                        return Ok(false);
                    }
                    tokio::time::sleep(Duration::from_millis(25)).await;
                }
                let _turn = self.turns.launchers.lock().await;
                self.launchers.lock().await.kill_all();
                self.start_launchers().await?;
                Ok(true)
            }
            // A dispatch is over only when it has met them all.
            _ => Ok(until(ARRIVAL, || self.cluster.faults().left() == 0).await),
        }
    }

    async fn strike_early(&self, strike: Strike, target: Target) -> Result<bool> {
        if strike == Strike::LauncherEarly {
            let replica = usize::try_from(target.run.number).unwrap_or_default();
            let _turn = self.turns.launchers.lock().await;
            self.launchers.lock().await.kill(replica);
            self.release(target.run.number, Gate::Fetch);
            self.start_launchers().await?;
            return Ok(true);
        }
        let Some(pod) = self.pod_at_work(target.job).await else {
            return Ok(false);
        };
        match strike {
            Strike::EvictedEarly => {
                self.cluster.evict(&pod);
            }
            Strike::NodeLostEarly => {
                self.cluster.lose_node(&pod).await?;
                self.cluster.remove_node_of(&pod).await?;
            }
            _ => self.cluster.preempt(&pod).await?,
        }
        Ok(self.until_pod_is_over(target.job, &pod).await)
    }

    async fn strike_work(&self, strike: Strike, target: Target) -> Result<bool> {
        match strike {
            Strike::OomKilled
            | Strike::Evicted
            | Strike::NodeLost
            | Strike::Deleted
            | Strike::Drained => self.strike_pod(strike, target).await,
            Strike::Cancel => {
                let pod = self.pod_at_work(target.job).await;
                self.platform.cancel(target.job).await;
                match pod {
                    Some(pod) => Ok(self.until_pod_is_over(target.job, &pod).await),
                    None => Ok(false),
                }
            }
            Strike::Launcher | Strike::Launchers => {
                let replica = usize::try_from(target.run.number).unwrap_or_default();
                let _turn = self.turns.launchers.lock().await;
                {
                    let mut launchers = self.launchers.lock().await;
                    match strike {
                        Strike::Launcher => launchers.kill(replica),
                        _ => launchers.kill_all(),
                    }
                }
                let worked = self.let_it_work(target).await;
                self.start_launchers().await?;
                Ok(worked)
            }
            Strike::Duplicates => self.deliver_again(target.job, 3).await,
            Strike::RedisRestarted => {
                let mut redis = self.redis.lock().await;
                redis.kill();
                let worked = self.let_it_work(target).await;
                redis.restart()?;
                self.redis_forgets();
                Ok(worked)
            }
            Strike::RedisFrozen => {
                let redis = self.redis.lock().await;
                redis.freeze()?;
                let worked = self.let_it_work(target).await;
                redis.thaw()?;
                Ok(worked)
            }
            Strike::KilledAtReport => self.strike_at_report(target).await,
            _ if strike.takes_the_store() => self.strike_store(strike, target).await,
            Strike::ApiErrors | Strike::ApiHangs | Strike::WatchesCut => {
                self.strike_api(strike, target).await
            }
            _ => self.strike_platform(strike, target).await,
        }
    }

    async fn strike_pod(&self, strike: Strike, target: Target) -> Result<bool> {
        let Some(pod) = self.pod_at_work(target.job).await else {
            return Ok(false);
        };
        let pods = Api::<Pod>::namespaced(self.cluster.client(ADMIN)?, &self.runs);
        match strike {
            Strike::OomKilled => {
                self.cluster.oom_kill(&pod);
            }
            Strike::Evicted => {
                self.cluster.evict(&pod);
            }
            Strike::NodeLost => {
                self.cluster.lose_node(&pod).await?;
                self.cluster.remove_node_of(&pod).await?;
            }
            Strike::Deleted => {
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

    async fn strike_platform(&self, strike: Strike, target: Target) -> Result<bool> {
        let _turn = self.turns.platform.lock().await;
        let order = |method, effect, times| {
            self.platform.fault(Fault {
                times,
                ..Fault::once(method, "", effect)
            });
        };
        if strike == Strike::PlatformAway {
            self.platform.go_down().await;
            // It reports when its work is done, and nobody is there.
            let worked = self.let_it_work(target).await;
            self.platform.come_up().await;
            return Ok(worked);
        }
        for method in ["GET", "PATCH", "POST"] {
            match strike {
                Strike::PlatformErrors => order(method, Effect::Status(503), 8),
                Strike::PlatformSlow => order(method, Effect::Slow(SLOW), 3),
                _ => {
                    order(method, Effect::DropBefore, 2);
                    order(method, Effect::DropAfter, 3);
                }
            }
        }
        let ordered = self.platform.faults_left(REPORT);
        self.release(target.run.number, Gate::Work);
        let over = self.until_over(target.job).await;
        let met = self.platform.faults_left(REPORT) < ordered;
        self.platform.clear_faults();
        Ok(over && met)
    }

    /// The container is killed once the platform has refused its report.
    async fn strike_at_report(&self, target: Target) -> Result<bool> {
        let Some(pod) = self.pod_at_work(target.job).await else {
            return Ok(false);
        };
        let _turn = self.turns.platform.lock().await;
        let since = Instant::now();
        // The job itself, and its steps.
        for end in ["$", "/"] {
            let path = format!("/job/{}{end}", target.job);
            self.platform
                .fault(Fault::always(REPORT, &path, Effect::Status(503)));
        }
        self.release(target.run.number, Gate::Work);
        let refused = || {
            let ledger = self.platform.ledger();
            let reports = ledger.of(REPORT, "");
            let mut reports = reports.iter().filter(|one| one.job == Some(target.job));
            // Others may have been refused before, of a tool that was still at work.
            reports.any(|report| report.status == 503 && report.at >= since)
        };
        let refused = until(WORK, refused).await;
        self.cluster.oom_kill(&pod);
        let over = self.until_pod_is_over(target.job, &pod).await;
        self.platform.clear_faults();
        Ok(refused && over)
    }

    async fn strike_store(&self, strike: Strike, target: Target) -> Result<bool> {
        let _turn = self.turns.store.lock().await;
        let before = self.way_to_store.troubled();
        self.store_goes();
        match strike {
            Strike::StoreRefuses => self.way_to_store.next(5, Trouble::Refuse),
            Strike::StoreSlow => self.way_to_store.next(4, Trouble::Stall(SLOW)),
            _ => {
                self.way_to_store.next(2, Trouble::CutAnswer(20));
                self.way_to_store.next(2, Trouble::CutRequest(200));
            }
        }
        self.way_to_store.cut();
        self.release(target.run.number, Gate::Work);
        let over = self.until_over(target.job).await;
        let struck = over && self.way_to_store.troubled() > before;
        self.store_returns();
        Ok(struck)
    }

    async fn strike_api(&self, strike: Strike, target: Target) -> Result<bool> {
        let _turn = self.turns.api.lock().await;
        let faults = self.cluster.faults();
        match strike {
            // Whoever watches again is refused for the age of what it has seen, and has to list anew.
            Strike::WatchesCut => {
                faults.next_of(LAUNCHER, 4, "watch", "*", ApiFault::Expired);
            }
            Strike::ApiHangs => {
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
        if strike != Strike::ApiHangs {
            self.cluster.cut_watches();
        }
        // The run waits until a launcher has met the first of it.
        let met = until(END, || faults.left() < ordered).await;
        self.release(target.run.number, Gate::Work);
        let over = self.until_over(target.job).await;
        faults.clear();
        Ok(met && over)
    }

    /// Delivers the last dispatch of a job again, to every launcher; says whether any took it.
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

    /// Posts what is no job data; returns the answer where it was let in.
    pub(crate) async fn post_nonsense(&self, run: u32) -> Result<Vec<String>> {
        let mut let_in = Vec::new();
        let short = Value::from(run).to_string();
        for body in ["", "{", "[]", "{\"jobId\": {}}", short.as_str()] {
            let url = format!("http://{}/api/v1/terraform-rs", self.door.address());
            let post = self
                .client
                .post(url)
                .bearer_auth(self.platform.dispatch_token())
                .header("content-type", "application/json")
                .body(body.to_owned());
            // With nobody at the door it was not let in either.
            if let Ok(answer) = post.send().await
                && answer.status().is_success()
            {
                let_in.push(format!("{body:?} was answered {}", answer.status()));
            }
        }
        Ok(let_in)
    }

    async fn until_held(&self, target: Target, gate: Gate) -> bool {
        let over = || self.platform.job(target.job).status.is_terminal();
        until(ARRIVAL, || self.is_held(target.run.number, gate) || over()).await;
        self.is_held(target.run.number, gate)
    }

    /// Waits until what was printed before the gate has left the container.
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

    /// Lets the run go on, and waits until its work is done; says whether it is.
    async fn let_it_work(&self, target: Target) -> bool {
        self.release(target.run.number, Gate::Work);
        let done = format!("end {}", target.phase);
        until(WORK, || {
            let journal = self.journal(target.run.number);
            journal.contains(&done)
        })
        .await
    }

    /// Waits until the platform's job is over.
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
