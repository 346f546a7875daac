//! Sends heartbeats to a hub. They have their own thread and runtime, so that a busy run cannot delay them. The
//! responses show whether the run must stop.

use std::io;
use std::thread;
use std::time::Duration;

use job_contract::chain;
use pool_protocol::lease as wire;
use pool_protocol::path::LeaseCall;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

use super::{CurrentPhase, Hub, JobToken, LeaseConfig, LeaseStatus, PACE, Renewal};
use crate::calls::client::LONGEST_RETRY_AFTER;
use runtime::Deadline;

/// The time between two heartbeats, unless the lease is short.
const INTERVAL: Duration = Duration::from_secs(15);
/// The fewest heartbeats within one lease.
const PER_LEASE: u32 = 3;
/// The timeout of one heartbeat.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// The shortest pause that a hub can ask for.
const SHORTEST: Duration = Duration::from_secs(1);

/// What a heartbeat says.
#[derive(Debug)]
pub(super) struct Beat {
    pub(super) acceptance: wire::Acceptance,
    pub(super) phase: CurrentPhase,
}

impl Beat {
    fn now(&self) -> wire::Acceptance {
        let phase = *runtime::lock(&self.phase);
        wire::Acceptance {
            phase: phase.map(str::to_owned),
            ..self.acceptance.clone()
        }
    }
}

/// Running heartbeats. They end when this value is dropped.
#[derive(Debug)]
pub(super) struct Heartbeat {
    _alive: oneshot::Sender<()>,
}

impl Heartbeat {
    /// Starts heartbeats. The first one is due after one interval, because the hub has just responded.
    pub(super) fn start(
        hub: LeaseConfig,
        lease: &wire::Lease,
        beat: Beat,
        (status, renewed): (watch::Sender<LeaseStatus>, watch::Sender<Option<Renewal>>),
    ) -> io::Result<Self> {
        let (alive, over) = oneshot::channel();
        let heartbeat_loop = HeartbeatLoop {
            beat,
            interval: interval(lease),
            status,
            renewed,
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let beats = move || {
            runtime.block_on(async {
                // The connections must belong to this runtime.
                match Hub::new(hub) {
                    Ok(hub) => tokio::select! {
                        _ = over => {}
                        () = heartbeat_loop.run(&hub) => {}
                    },
                    Err(error) => warn!(error = chain(&error), "the run has no heartbeat"),
                }
            });
        };
        thread::Builder::new()
            .name("lease".to_owned())
            .spawn(beats)?;
        Ok(Self { _alive: alive })
    }
}

fn interval(lease: &wire::Lease) -> Duration {
    match lease.expires_in_seconds {
        0 => INTERVAL,
        seconds => INTERVAL.min(Duration::from_secs(seconds.into()) / PER_LEASE),
    }
}

/// Applies the hub's response to the lease.
pub(super) fn apply_response(
    lease: &wire::Lease,
    token: &JobToken,
    status: &watch::Sender<LeaseStatus>,
) {
    token.replace(&lease.job_token);
    if lease.cancel_requested {
        status.send_if_modified(|now| {
            let changed = *now == LeaseStatus::Valid;
            if changed {
                *now = LeaseStatus::CancelRequested;
            }
            changed
        });
    }
}

/// Notes that the hub has answered a request of this time. An older hub does not say how long it waits for the next one.
pub(super) fn renew(lease: &wire::Lease, at: Instant, renewed: &watch::Sender<Option<Renewal>>) {
    if lease.lost_in_seconds > 0 {
        let lost_in = Duration::from_secs(lease.lost_in_seconds.into());
        renewed.send_replace(Some(Renewal { at, lost_in }));
    }
}

/// Returns how long a run waits for the hub until it stops. If stopping may take longer than the hub waits, it begins in the middle.
pub(super) fn patience(lost_in: Duration, stopping: Duration) -> Duration {
    lost_in.saturating_sub(stopping).max(lost_in / 2)
}

struct HeartbeatLoop {
    beat: Beat,
    interval: Duration,
    status: watch::Sender<LeaseStatus>,
    renewed: watch::Sender<Option<Renewal>>,
}

impl HeartbeatLoop {
    /// Sends heartbeats until the lease is lost.
    async fn run(self, hub: &Hub) {
        let mut failing = None;
        let mut next = Instant::now() + self.interval;
        loop {
            sleep_until(next).await;
            let call = hub.call(LeaseCall::Heartbeat, &self.beat.now());
            let deadline = Deadline::after(ATTEMPT_TIMEOUT);
            let sent_at = Instant::now();
            match hub
                .client
                .request_json_once::<wire::Lease>(&call, &deadline)
                .await
            {
                Ok(lease) => {
                    apply_response(&lease, &hub.config.token, &self.status);
                    renew(&lease, sent_at, &self.renewed);
                    if failing.take().is_some() {
                        info!("the hub accepts heartbeats again");
                    }
                    next = sent_at + self.interval;
                }
                Err(error) => {
                    if let Some(why) = error.lost_lease() {
                        warn!(
                            why,
                            "the lease is lost: the executor no longer changes the statuses of this run"
                        );
                        self.status.send_replace(LeaseStatus::Lost);
                        return;
                    }
                    if failing.is_none() {
                        warn!(
                            error = chain(&error),
                            "the hub does not accept heartbeats, trying again"
                        );
                    } else {
                        debug!(
                            error = chain(&error),
                            "the hub does not accept heartbeats yet"
                        );
                    }
                    let pauses = failing.get_or_insert_with(|| PACE.pauses());
                    let pause = pauses.next().unwrap_or(INTERVAL).min(INTERVAL);
                    let requested = error.retry_after();
                    let pause = requested.map_or(pause, |requested| {
                        requested.clamp(SHORTEST, LONGEST_RETRY_AFTER)
                    });
                    next = Instant::now() + pause;
                }
            }
        }
    }
}
