//! Injects the faults of a schedule. Each fault waits until its run has reached the right point. Afterwards the run
//! continues.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::Value;
use test_peers::proxy::Trouble;
use test_platform::{Effect, Fault as PlatformFault};

use crate::peers::{Gate, Peers, holds};
use crate::schedule::{Fault, InjectionPoint, Run};

/// How long a run may take to reach the point of its fault. If another run's fault delays its release, it waits half a minute
/// for a launcher that watches, and again for each launcher that is killed meanwhile.
pub(crate) const ARRIVAL: Duration = Duration::from_mins(8);
/// How long a pod may take to end after its fault.
pub(crate) const END: Duration = Duration::from_mins(3);
/// How long the work after a gate may take while peers fail.
pub(crate) const WORK: Duration = Duration::from_mins(3);
/// How long the Job of a finished run may stay: longer than its time to live.
pub(crate) const REMOVAL: Duration = Duration::from_mins(5);
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
    /// Injects a fault into a started job. Returns whether the fault happened as scheduled.
    pub(crate) async fn inject(&self, fault: Fault, target: Target) -> Result<bool> {
        let fault_happened = match fault.injection_point() {
            InjectionPoint::Dispatch => {
                let dispatched = || async { self.platform.job(target.job).posts > 0 };
                match fault {
                    Fault::HubAtDispatch => {
                        self.side.inject_at_dispatch(self, fault, target).await?
                    }
                    _ if !holds(ARRIVAL, "the dispatch", dispatched).await => false,
                    Fault::DuplicatesAtDispatch => self.deliver_again(target.job, 4).await?,
                    _ => self.side.inject_at_dispatch(self, fault, target).await?,
                }
            }
            InjectionPoint::Fetch => {
                let arrived = self.until_held(target, Gate::Fetch).await;
                let fault_happened =
                    arrived && self.side.inject_before_claim(self, fault, target).await?;
                self.release(target.run.number, Gate::Fetch);
                fault_happened
            }
            InjectionPoint::Work | InjectionPoint::Report => {
                let arrived = self.until_held(target, Gate::Work).await;
                let arrived = arrived && self.side.until_printed(self, target).await;
                let fault_happened = arrived && self.inject_at_work(fault, target).await?;
                self.release(target.run.number, Gate::Work);
                fault_happened
            }
            InjectionPoint::After => {
                self.until_over(target.job).await
                    && self.side.until_removed(self, target).await?
                    && self.deliver_again(target.job, 2).await?
            }
        };
        Ok(fault_happened)
    }

    async fn inject_at_work(&self, fault: Fault, target: Target) -> Result<bool> {
        match fault {
            Fault::Cancel => {
                let executor = self.side.executor(self, target.job).await;
                self.platform.cancel(target.job).await;
                Ok(match executor {
                    Some(executor) => self.side.until_ended(self, target.job, &executor).await,
                    None => false,
                })
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
            Fault::KilledAtReport | Fault::HubAtReport => self.kill_at_report(fault, target).await,
            _ if fault.disturbs_store() => self.inject_into_store(fault, target).await,
            Fault::PlatformErrors
            | Fault::PlatformCuts
            | Fault::PlatformSlow
            | Fault::PlatformAway => self.inject_into_platform(fault, target).await,
            _ => self.side.inject_at_work(self, fault, target).await,
        }
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

    /// Kills the executor or the hub after the platform has refused a report.
    async fn kill_at_report(&self, fault: Fault, target: Target) -> Result<bool> {
        let Some(executor) = self.side.executor(self, target.job).await else {
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
        let refused = || async {
            let ledger = self.platform.ledger();
            let reports = ledger.of(REPORT, "");
            let mut reports = reports.iter().filter(|one| one.job == Some(target.job));
            // Reports of the running tool may have been refused earlier.
            reports.any(|report| report.status == 503 && report.at >= since)
        };
        let refused = holds(WORK, "a refused report", refused).await;
        if fault == Fault::HubAtReport {
            let _lock = self.locks.launchers.lock().await;
            self.side.kill_hub().await;
            self.platform.clear_faults();
            self.side.start_missing().await?;
            return Ok(refused && self.until_over(target.job).await);
        }
        self.side.kill(&executor);
        let over = self.side.until_ended(self, target.job, &executor).await;
        self.platform.clear_faults();
        Ok(refused && over)
    }

    async fn inject_into_store(&self, fault: Fault, target: Target) -> Result<bool> {
        let _lock = self.locks.store.lock().await;
        let before = self.store_proxy.troubled();
        self.store_outages.fetch_add(1, Ordering::SeqCst);
        match fault {
            Fault::StoreRefuses => self.store_proxy.next(5, Trouble::Refuse),
            Fault::StoreSlow => self.store_proxy.next(4, Trouble::Stall(SLOW)),
            _ => {
                self.store_proxy.next(2, Trouble::CutAnswer(20));
                self.store_proxy.next(2, Trouble::CutRequest(200));
            }
        }
        self.store_proxy.cut_open();
        self.release(target.run.number, Gate::Work);
        let over = self.until_over(target.job).await;
        let fault_happened = over && self.store_proxy.troubled() > before;
        self.store_proxy.clear();
        Ok(fault_happened)
    }

    /// Delivers the last dispatch of a job again, to every launcher. Returns whether one accepted it.
    async fn deliver_again(&self, job: u32, times: usize) -> Result<bool> {
        // One of them has to run.
        let _lock = self.locks.launchers.lock().await;
        let urls = self.side.dispatch_urls().await;
        let (document, token) = (
            self.platform.job_data(job).to_string(),
            self.platform.dispatch_token(),
        );
        let mut posts = tokio::task::JoinSet::new();
        for url in urls.iter().cycle().take(times * urls.len()) {
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
            let post = self
                .client
                .post(self.side.dispatch_url())
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
        let is_held = || self.is_held(target.run.number, gate);
        let over = || self.platform.job(target.job).status.is_terminal();
        holds(ARRIVAL, "the run at its gate", || async {
            is_held() || over()
        })
        .await;
        is_held()
    }

    /// Releases the run, and waits until its work is done. Returns whether it is.
    pub(crate) async fn finish_work(&self, target: Target) -> bool {
        self.release(target.run.number, Gate::Work);
        let done = format!("end {}", target.phase);
        holds(WORK, &done, || async {
            let journal = self.journal(target.run.number);
            if journal.contains(&done) {
                Ok(())
            } else {
                Err(journal.join("\n"))
            }
        })
        .await
    }

    /// Waits until the platform's job has ended.
    pub(crate) async fn until_over(&self, job: u32) -> bool {
        let is_over = || async { self.platform.job(job).status.is_terminal() };
        holds(WORK * 3, &format!("the end of job {job}"), is_over).await
    }
}
