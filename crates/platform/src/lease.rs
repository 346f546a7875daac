//! The lease of a hub on a step: the claim, the heartbeats and the end of the task. The hub may request that the run
//! stops, or take the lease away.

mod args;
mod heartbeat;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use job_contract::chain;
use job_contract::status::JobStatus;
use pool_protocol::lease as wire;
use pool_protocol::path::LeaseCall;
use reqwest::{Method, Url};
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

pub use args::{LeaseArgs, LeaseConfig};

pub use crate::calls::job_token::JobToken;

use self::heartbeat::{Beat, Heartbeat};
use crate::calls::client::{Call, Client, JSON, Pace};
use crate::calls::error::TerrakubeError;
use crate::calls::text::fitting;
use crate::calls::token::TokenSource;
use crate::step::{Claim, Holder, RunEnd, RunResult};
use runtime::Deadline;

/// How long the executor retries a claim. This is longer than a hub takes to start. Before the claim, nothing is
/// changed.
const ACCEPT_TIMEOUT: Duration = Duration::from_mins(5);
/// The longest diagnostic, in characters.
const DIAGNOSTIC: usize = 1000;
const PACE: Pace = Pace {
    first_pause: Duration::from_secs(1),
    longest_pause: Duration::from_secs(30),
    ..Pace::USUAL
};

/// One lease. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Lease(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    hub: Hub,
    status: watch::Sender<LeaseStatus>,
    renewed: watch::Sender<Option<Renewal>>,
    /// The claim, once it is granted.
    accepted: OnceLock<wire::Acceptance>,
    heartbeat: Mutex<Option<Heartbeat>>,
    /// What the executor does, for people.
    phase: CurrentPhase,
}

/// The name of the current phase of the executor. Clones share it.
type CurrentPhase = Arc<Mutex<Option<&'static str>>>;

/// The status of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeaseStatus {
    Valid,
    /// The platform has cancelled the run.
    CancelRequested,
    /// The lease has ended, or another executor has the task.
    Lost,
}

/// The last answer of the hub to a claim or a heartbeat.
#[derive(Clone, Copy, Debug)]
struct Renewal {
    at: Instant,
    /// How long the hub then waits for the next heartbeat until it gives the run up.
    lost_in: Duration,
}

/// A client for the calls of one lease.
#[derive(Debug)]
struct Hub {
    config: LeaseConfig,
    client: Client,
}

impl Hub {
    fn new(config: LeaseConfig) -> Result<Self, TerrakubeError> {
        let client = Client::new(TokenSource::of_lease(config.token.clone()), PACE)?;
        Ok(Self { config, client })
    }

    fn call(&self, call: LeaseCall, body: &impl Serialize) -> Call {
        let url: Url = self.config.call(call);
        Call::new(Method::POST, url, JSON).for_hub().body(body)
    }
}

impl Lease {
    /// Returns the lease. Sends nothing yet.
    pub(crate) fn new(config: LeaseConfig) -> Result<Self, TerrakubeError> {
        Ok(Self(Arc::new(Inner {
            hub: Hub::new(config)?,
            status: watch::channel(LeaseStatus::Valid).0,
            renewed: watch::channel(None).0,
            accepted: OnceLock::new(),
            heartbeat: Mutex::default(),
            phase: CurrentPhase::default(),
        })))
    }

    /// Accepts the task for `holder`, and starts the heartbeats.
    pub(crate) async fn accept(&self, holder: &Holder) -> Result<Claim, TerrakubeError> {
        let acceptance = wire::Acceptance {
            holder: wire::Holder {
                uid: holder.uid.clone(),
                name: holder.pod.clone(),
            },
            phase: None,
        };
        let hub = &self.0.hub;
        let call = hub.call(LeaseCall::Accept, &acceptance);
        let deadline = Deadline::after(ACCEPT_TIMEOUT);
        let lease: wire::Lease = match hub.client.request_json(&call, &deadline).await {
            Ok(lease) => lease,
            Err(error) => return error.lost_lease().map(Claim::Refused).ok_or(error),
        };
        let acceptance = self.0.accepted.get_or_init(|| acceptance);
        heartbeat::apply_response(&lease, &hub.config.token, &self.0.status);
        heartbeat::renew(&lease, Instant::now(), &self.0.renewed);
        let mut heartbeat = self.heartbeat();
        if heartbeat.is_none() {
            let status = (self.0.status.clone(), self.0.renewed.clone());
            let beat = Beat {
                acceptance: acceptance.clone(),
                phase: Arc::clone(&self.0.phase),
            };
            *heartbeat = Heartbeat::start(hub.config.clone(), &lease, beat, status)
                .inspect_err(|error| warn!(error = chain(error), "the run has no heartbeat"))
                .ok();
        }
        Ok(Claim::Granted)
    }

    /// Notes what the executor does. The next heartbeat says it.
    pub(crate) fn enter(&self, phase: &'static str) {
        *runtime::lock(&self.0.phase) = Some(phase);
    }

    /// Returns whether the lease is lost. Then this executor must not change the statuses.
    pub(crate) fn is_lost(&self) -> bool {
        *self.0.status.borrow() == LeaseStatus::Lost
    }

    /// Returns when the run must stop: `Cancelled` after a cancellation, `Failed` after the loss of the lease.
    pub(crate) async fn stopped(&self) -> JobStatus {
        let mut status = self.0.status.subscribe();
        // The sender lives as long as `self`.
        let _ = status.wait_for(|now| *now != LeaseStatus::Valid).await;
        if self.is_lost() {
            JobStatus::Failed
        } else {
            JobStatus::Cancelled
        }
    }

    /// Returns when the hub has not answered for so long that the run must stop: later, the hub may give it up, and another run
    /// may get the workspace. `stopping` is the time that stopping takes. Returns how long the hub has not answered.
    pub(crate) async fn cut_off(&self, stopping: Duration) -> Duration {
        let mut renewed = self.0.renewed.subscribe();
        loop {
            let last = *renewed.borrow_and_update();
            let silence = async {
                let Some(last) = last else {
                    return std::future::pending().await;
                };
                let patience = heartbeat::patience(last.lost_in, stopping);
                sleep_until(last.at + patience).await;
                patience
            };
            tokio::select! {
                biased;
                // The sender lives as long as `self`.
                Ok(()) = renewed.changed() => {}
                silence = silence => return silence,
            }
        }
    }

    /// Ends the task if it was accepted and the lease is not lost. Heartbeats continue until the hub has responded.
    pub(crate) async fn end(
        &self,
        end: &RunEnd,
        deadline: &Deadline,
    ) -> Result<(), TerrakubeError> {
        if self.0.accepted.get().is_none() || self.is_lost() {
            return Ok(());
        }
        let call = match end.result {
            RunResult::Completed => LeaseCall::Complete,
            RunResult::Failed => LeaseCall::Fail,
            RunResult::Cancelled => LeaseCall::Cancelled,
        };
        let body = wire::End {
            exit_code: Some(end.exit_code.into()),
            final_log_sequence: None,
            diagnostic: fitting(&end.diagnostic, DIAGNOSTIC).to_owned(),
            verdict: None,
            reported: end.reported,
            report: end.report.clone(),
        };
        let hub = &self.0.hub;
        let call = hub.call(call, &body);
        let ended = hub
            .client
            .request_json::<wire::Ended>(&call, deadline)
            .await;
        drop(self.heartbeat().take());
        match ended {
            Ok(_) => Ok(()),
            Err(error) => match error.lost_lease() {
                Some(why) => {
                    info!(
                        why,
                        "the hub does not take the end of the task from this lease"
                    );
                    Ok(())
                }
                None => Err(error),
            },
        }
    }

    fn heartbeat(&self) -> std::sync::MutexGuard<'_, Option<Heartbeat>> {
        runtime::lock(&self.0.heartbeat)
    }
}
