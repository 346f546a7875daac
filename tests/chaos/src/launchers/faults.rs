//! Faults of launchers, pods and the API server.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt as _};
use test_cluster::{ADMIN, Fault as ApiFault};
use test_peers::wait::within;
use tokio::sync::MutexGuard;

use super::{LAUNCHER, LauncherSide};
use crate::check::Line;
use crate::facts::marks;
use crate::faults::{ARRIVAL, END, REMOVAL, Target};
use crate::peers::{Gate, LINES, Locks, Peers, found, holds};
use crate::schedule::Fault;

impl LauncherSide {
    /// Prepares the faults that must be ready before the job exists. The guard prevents other faults of the API server.
    pub(crate) async fn before_dispatch<'a>(
        &self,
        locks: &'a Locks,
        fault: Fault,
    ) -> Option<MutexGuard<'a, ()>> {
        let faults = self.cluster.faults();
        let order = |count, verb, resource, fault| {
            faults.next_of(LAUNCHER, count, verb, resource, fault);
        };
        match fault {
            Fault::ApiAtDispatch => {
                let guard = locks.api.lock().await;
                order(1, "create", "jobs", ApiFault::TooManyRequests(1));
                order(1, "create", "jobs", ApiFault::InternalError);
                order(1, "create", "jobs", ApiFault::DropAfter);
                order(1, "create", "secrets", ApiFault::Unavailable);
                order(1, "create", "secrets", ApiFault::DropAfter);
                order(2, "patch", "jobs", ApiFault::DropBefore);
                Some(guard)
            }
            Fault::LaunchersAtDispatch => {
                let guard = locks.api.lock().await;
                order(1, "create", "secrets", ApiFault::Hang);
                Some(guard)
            }
            _ => None,
        }
    }

    pub(crate) async fn inject_at_dispatch(
        &self,
        peers: &Peers,
        fault: Fault,
        target: Target,
    ) -> Result<bool> {
        match fault {
            Fault::LaunchersAtDispatch => {
                let jobs = Api::<Job>::namespaced(self.cluster.client(ADMIN)?, &self.runs);
                let name = job_name(peers, target.job);
                let is_there = || async {
                    jobs.get(&name).await?;
                    self.faults_happened()
                };
                if !holds(ARRIVAL, "the Job", is_there).await {
                    return Ok(false);
                }
                let _lock = peers.locks.launchers.lock().await;
                self.launchers.lock().await.kill_all();
                self.start_missing().await?;
                Ok(true)
            }
            // The dispatch ends only after all faults have happened.
            _ => Ok(holds(ARRIVAL, "all faults", || async { self.faults_happened() }).await),
        }
    }

    pub(crate) async fn inject_before_claim(
        &self,
        peers: &Peers,
        fault: Fault,
        target: Target,
    ) -> Result<bool> {
        if fault == Fault::LauncherEarly {
            let replica = usize::try_from(target.run.number).unwrap_or_default();
            let _lock = peers.locks.launchers.lock().await;
            self.launchers.lock().await.kill(replica);
            peers.release(target.run.number, Gate::Fetch);
            self.start_missing().await?;
            return Ok(true);
        }
        let Some(pod) = self.executor(peers, target.job).await else {
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
        Ok(self.until_ended(peers, target.job, &pod).await)
    }

    /// Injects a fault while the tool works. Returns whether it happened.
    pub(crate) async fn inject_at_work(
        &self,
        peers: &Peers,
        fault: Fault,
        target: Target,
    ) -> Result<bool> {
        match fault {
            Fault::Launcher | Fault::Launchers => {
                let replica = usize::try_from(target.run.number).unwrap_or_default();
                let _lock = peers.locks.launchers.lock().await;
                {
                    let mut launchers = self.launchers.lock().await;
                    match fault {
                        Fault::Launcher => launchers.kill(replica),
                        _ => launchers.kill_all(),
                    }
                }
                let worked = peers.finish_work(target).await;
                self.start_missing().await?;
                Ok(worked)
            }
            Fault::ApiErrors | Fault::ApiHangs | Fault::WatchesCut => {
                self.inject_into_api_server(peers, fault, target).await
            }
            _ => self.inject_into_pod(peers, fault, target).await,
        }
    }

    async fn inject_into_pod(&self, peers: &Peers, fault: Fault, target: Target) -> Result<bool> {
        let Some(pod) = self.executor(peers, target.job).await else {
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
        Ok(self.until_ended(peers, target.job, &pod).await)
    }

    async fn inject_into_api_server(
        &self,
        peers: &Peers,
        fault: Fault,
        target: Target,
    ) -> Result<bool> {
        let _lock = peers.locks.api.lock().await;
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
        let happened = holds(END, "a fault", || async { faults.left() < ordered }).await;
        peers.release(target.run.number, Gate::Work);
        let over = peers.until_over(target.job).await;
        faults.clear();
        Ok(happened && over)
    }

    /// Waits until the lines before the gate are in the container log.
    pub(crate) async fn until_printed(&self, peers: &Peers, target: Target) -> bool {
        let mark = (target.run.number, Line::new(target.phase, LINES));
        let is_printed = || async {
            let pods = self.pods_of(peers, target.job).await?;
            let logs = pods
                .iter()
                .filter_map(|pod| self.cluster.container_log(pod, "executor"));
            let logs: String = logs.collect();
            ensure!(marks(&logs).contains(&mark), "{logs}");
            Ok(())
        };
        holds(END, "the lines before the gate", is_printed).await
    }

    /// Fails while not all ordered faults have happened.
    fn faults_happened(&self) -> Result<()> {
        let left = self.cluster.faults().left();
        ensure!(left == 0, "{left} faults are left");
        Ok(())
    }

    /// Waits until the Job of a finished run is removed. Returns whether it is.
    pub(crate) async fn until_removed(&self, peers: &Peers, target: Target) -> Result<bool> {
        let jobs = Api::<Job>::namespaced(self.cluster.client(ADMIN)?, &self.runs);
        let name = job_name(peers, target.job);
        let is_removed = || async {
            ensure!(jobs.get_opt(&name).await?.is_none(), "it is there");
            Ok(())
        };
        Ok(holds(REMOVAL, "the removal of the Job", is_removed).await)
    }

    async fn pods_of(&self, peers: &Peers, job: u32) -> Result<Vec<Pod>> {
        let step = peers.platform.job(job).dispatched.unwrap_or_default();
        self.pods(job, &step).await
    }

    /// The executor of a job, once it works.
    pub(crate) async fn executor(&self, peers: &Peers, job: u32) -> Option<Pod> {
        let at_work = || async {
            let pods = self.pods_of(peers, job).await?;
            let pod = pods.into_iter().find(|pod| phase(pod) == "Running");
            pod.context("no pod is running")
        };
        found(within(END, "the executor", at_work).await)
    }

    /// Kills an executor, as the kernel does.
    pub(crate) fn kill(&self, executor: &Pod) {
        self.cluster.oom_kill(executor);
    }

    /// Waits until an executor has ended. Returns whether it has.
    pub(crate) async fn until_ended(&self, peers: &Peers, job: u32, pod: &Pod) -> bool {
        let has_ended = || async {
            let pods = self.pods_of(peers, job).await?;
            let same = pods.iter().find(|other| other.uid() == pod.uid());
            let phase = same.map_or("Succeeded", phase);
            ensure!(matches!(phase, "Succeeded" | "Failed"), "it is {phase}");
            Ok(())
        };
        holds(END, "the end of the executor", has_ended).await
    }
}

/// The name of the Job of a platform's job.
fn job_name(peers: &Peers, job: u32) -> String {
    let step = peers.platform.job(job).dispatched.unwrap_or_default();
    format!("job-{job}-{step}")
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending")
}
