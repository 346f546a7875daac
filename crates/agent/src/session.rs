//! The session of an agent at the hub: registration, heartbeats and requests for tasks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pool_protocol::id::{InstanceId, LeaseId};
use pool_protocol::instance::{
    Action, InstanceHeartbeat, InstanceOrders, InstanceState, Registered, Registration, SignalKind,
};
use pool_protocol::task::TaskRequest;
use pool_protocol::version::VERSION;
use tracing::{info, warn};
use uuid::Uuid;

use super::client::answer::{Failure, Pauses, jitter};
use super::lease::{Stop, StopOrder, StoppedBy};
use super::{Agent, AgentError};

/// The pause after a refused registration or request, for example if another installation uses the name.
const REFUSED_PAUSE: Duration = Duration::from_secs(30);
/// The longest pause after a response without a task. It is random, so that agents do not send requests at the same
/// time.
const EMPTY_PAUSE: Duration = Duration::from_secs(1);

impl Agent {
    /// Returns the registration of this process. Registers if there is none, or if the hub no longer knows the instance
    /// `unknown`. Concurrent callers wait.
    async fn registered(&self, unknown: Option<InstanceId>) -> Result<Registered, AgentError> {
        let mut registered = self.registered.lock().await;
        if let Some(known) = registered
            .as_ref()
            .filter(|known| Some(known.instance_id) != unknown)
        {
            return Ok(known.clone());
        }
        let new = self.register().await?;
        info!(
            agent = %self.settings.name,
            pool = %new.pool_id,
            instance = %new.instance_id,
            leases = self.leases.len(),
            "registered"
        );
        *registered = Some(new.clone());
        Ok(new)
    }

    async fn register(&self) -> Result<Registered, AgentError> {
        let registration = Registration {
            system_id: self.system_id.clone(),
            name: self.settings.name.clone(),
            executor_version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol_min_version: VERSION,
            protocol_max_version: VERSION,
            operating_system: std::env::consts::OS.to_owned(),
            architecture: architecture().to_owned(),
            capacity: self.settings.slots,
            tags: Vec::new(),
            installation: self.target.installation().to_owned(),
            target: self.target.name().to_owned(),
            leases: self.leases.reports(),
        };
        let key = Uuid::new_v4();
        let mut pauses = Pauses::default();
        loop {
            let failure = match self.client.register(key, &registration).await {
                Ok(registered) => {
                    self.withdraw(&registered.stale);
                    return Ok(registered);
                }
                Err(failure) => failure,
            };
            let pause = self.pause(&mut pauses, &failure)?.unwrap_or(REFUSED_PAUSE);
            warn!(%failure, seconds = pause.as_secs_f32(), "could not register, trying again");
            tokio::time::sleep(pause).await;
        }
    }

    /// Returns how long to wait after a failure. `None`: the hub refuses the call or does not know this process. An
    /// error ends the agent.
    fn pause(
        &self,
        pauses: &mut Pauses,
        failure: &Failure,
    ) -> Result<Option<Duration>, AgentError> {
        let next = pauses.after(failure, jitter);
        // An agent with `single_run` does not wait until a token is replaced, but it does not leave its run.
        let is_rejected = pauses.is_locked_out()
            || matches!(failure, Failure::Forbidden(_) | Failure::Refused(_));
        if self.settings.single_run && is_rejected && self.leases.len() == 0 {
            return Err(AgentError::Rejected(failure.clone()));
        }
        match failure {
            Failure::Unsupported { .. } => Err(AgentError::Unsupported(failure.clone())),
            _ => Ok(next),
        }
    }

    pub(crate) async fn send_heartbeats(&self) -> Result<(), AgentError> {
        let mut pauses = Pauses::default();
        let mut unknown = None;
        loop {
            let registered = self.registered(unknown.take()).await?;
            let interval = Duration::from_secs(registered.heartbeat_interval_seconds.max(1).into());
            let heartbeat = InstanceHeartbeat {
                state: if self.is_stopping() {
                    InstanceState::Draining
                } else {
                    InstanceState::Online
                },
                available_capacity: self.free(),
                leases: self.leases.reports(),
            };
            let sent = self.client.heartbeat(registered.instance_id, &heartbeat);
            let pause = match sent.await {
                Ok(orders) => {
                    pauses = Pauses::default();
                    self.apply_orders(&orders);
                    interval
                }
                Err(Failure::Unregistered) => {
                    unknown = Some(registered.instance_id);
                    continue;
                }
                Err(failure) => {
                    warn!(%failure, "a heartbeat did not reach the hub, trying again");
                    self.pause(&mut pauses, &failure)?.unwrap_or(interval)
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // An immediate heartbeat is only useful while the hub responds.
                () = self.heartbeat_now.notified(), if pause == interval => {}
            }
        }
    }

    fn apply_orders(&self, orders: &InstanceOrders) {
        for signal in &orders.signals {
            let stop = match signal.signal {
                SignalKind::Cancel => Stop::Terminate,
                SignalKind::Force => Stop::Kill,
                SignalKind::Other => continue,
            };
            if let Some(lease) = self.leases.get(signal.lease_id) {
                let by = StoppedBy::Hub;
                lease.order(StopOrder { stop, by });
            }
        }
        self.withdraw(&orders.stale);
        self.action.send_if_modified(|action| {
            let is_new = *action != orders.action;
            if is_new {
                info!(action = ?orders.action, "the hub has an order for this agent");
                *action = orders.action;
            }
            is_new
        });
    }

    fn withdraw(&self, stale: &[LeaseId]) {
        for lease in stale.iter().filter_map(|id| self.leases.get(*id)) {
            info!(run = lease.run, lease = %lease.reference.lease, "the lease is over");
            lease.order(StopOrder {
                stop: Stop::Withdraw,
                by: StoppedBy::Hub,
            });
        }
    }

    /// Waits for tasks and takes them. With `single_run`, returns after one task. Otherwise runs until it is dropped.
    pub(crate) async fn take_tasks(self: &Arc<Self>) -> Result<(), AgentError> {
        let mut pauses = Pauses::default();
        let mut unknown = None;
        let slots = usize::try_from(self.settings.slots).unwrap_or(usize::MAX);
        let mut action = self.action.subscribe();
        loop {
            self.leases.fewer_than(slots).await;
            // The sender lives as long as this agent.
            let _ = action.wait_for(|action| *action != Action::Pause).await;
            let registered = self.registered(unknown.take()).await?;
            let request = TaskRequest {
                instance_id: registered.instance_id,
                available_capacity: self.free(),
                wait_seconds: registered.max_wait_seconds,
                holding: self.leases.ids(),
            };
            let sent = Instant::now();
            let failure = match self.client.request_task(&request).await {
                Ok(task) => {
                    pauses = Pauses::default();
                    match task {
                        Some(task) => {
                            // The hub may have waited that long before it leased the task.
                            let wait = Duration::from_secs(request.wait_seconds.into());
                            let delay = sent.elapsed().saturating_sub(wait);
                            self.take(task, delay);
                            if self.settings.single_run {
                                return Ok(());
                            }
                        }
                        None => tokio::time::sleep(jitter(EMPTY_PAUSE)).await,
                    }
                    continue;
                }
                Err(Failure::Unregistered) => {
                    unknown = Some(registered.instance_id);
                    continue;
                }
                Err(failure) => failure,
            };
            pauses.waited(sent.elapsed());
            let pause = self.pause(&mut pauses, &failure)?.unwrap_or(REFUSED_PAUSE);
            warn!(%failure, seconds = pause.as_secs_f32(), "a request for a task failed, trying again");
            tokio::time::sleep(pause).await;
        }
    }

    /// Removes this process from the list of agents. If that fails, the hub shows it as offline later.
    pub(crate) async fn disconnect(&self) {
        let registered = self.registered.lock().await.clone();
        if let Some(registered) = registered
            && let Err(failure) = self.client.remove(registered.instance_id).await
        {
            warn!(%failure, "this agent could not be removed from the list of its pool");
        }
    }

    fn free(&self) -> u32 {
        let used = u32::try_from(self.leases.len()).unwrap_or(u32::MAX);
        self.settings.slots.saturating_sub(used)
    }
}

/// Returns the architecture as in names of images.
const fn architecture() -> &'static str {
    if cfg!(target_arch = "x86_64") {
        "amd64"
    } else if cfg!(target_arch = "aarch64") {
        "arm64"
    } else {
        std::env::consts::ARCH
    }
}
