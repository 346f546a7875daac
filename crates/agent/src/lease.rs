//! The leases of the agent, and the stop orders for them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard};

use pool_protocol::id::LeaseId;
use pool_protocol::instance::{InstanceLease, Phase};
use pool_protocol::lease::LeaseRef;
use secrecy::SecretString;
use tokio::sync::watch;

/// How an executor is stopped. Later values are stronger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stop {
    /// Remove the executor unless it may be running. The lease is over, so an executor that has not accepted the task
    /// can no longer do so.
    Withdraw,
    /// Let the executor stop gracefully. It saves the state.
    Terminate,
    /// Kill the executor.
    Kill,
}

/// The origin of a stop order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoppedBy {
    Hub,
    Agent,
}

/// The order to stop an executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StopOrder {
    pub(crate) stop: Stop,
    pub(crate) by: StoppedBy,
}

/// A lease of the agent.
#[derive(Debug)]
pub(crate) struct AgentLease {
    pub(crate) reference: LeaseRef,
    /// The job and step, for the log.
    pub(crate) run: String,
    state: Mutex<AgentLeaseState>,
    orders: watch::Sender<Option<StopOrder>>,
}

#[derive(Debug)]
struct AgentLeaseState {
    token: Option<SecretString>,
    phase: Phase,
    reason: Option<String>,
}

impl AgentLease {
    fn new(reference: LeaseRef, run: String, token: Option<SecretString>, phase: Phase) -> Self {
        Self {
            reference,
            run,
            state: Mutex::new(AgentLeaseState {
                token,
                phase,
                reason: None,
            }),
            orders: watch::Sender::new(None),
        }
    }

    fn state(&self) -> MutexGuard<'_, AgentLeaseState> {
        runtime::lock(&self.state)
    }

    /// Returns the job token. A lease that was found has none.
    pub(crate) fn token(&self) -> Option<SecretString> {
        self.state().token.clone()
    }

    pub(crate) fn set_token(&self, token: SecretString) {
        self.state().token = Some(token);
    }

    /// Sets why the executor waits. The hub shows it.
    pub(crate) fn set_reason(&self, reason: Option<String>) {
        self.state().reason = reason;
    }

    /// Orders a stop, unless a stronger stop is already ordered.
    pub(crate) fn order(&self, order: StopOrder) {
        self.orders.send_if_modified(|known| {
            let is_stronger = known.is_none_or(|known| known.stop < order.stop);
            if is_stronger {
                // The first order is the reason for the end.
                let by = known.map_or(order.by, |known| known.by);
                *known = Some(StopOrder { by, ..order });
            }
            is_stronger
        });
    }

    /// Returns whether the agent stops, and has ordered the end of its runs.
    pub(crate) fn is_stopped_by_agent(&self) -> bool {
        let order = *self.orders.borrow();
        order.is_some_and(|order| order.by == StoppedBy::Agent)
    }

    pub(crate) fn orders(&self) -> watch::Receiver<Option<StopOrder>> {
        self.orders.subscribe()
    }

    fn report(&self) -> InstanceLease {
        let state = self.state();
        InstanceLease {
            task_id: self.reference.task,
            lease_id: self.reference.lease,
            fencing_token: self.reference.fencing_token,
            phase: state.phase,
            reason: state.reason.clone(),
        }
    }
}

/// All leases of the agent.
#[derive(Debug)]
pub(crate) struct Leases {
    by_id: Mutex<BTreeMap<LeaseId, Arc<AgentLease>>>,
    changes: watch::Sender<()>,
}

impl Default for Leases {
    fn default() -> Self {
        Self {
            by_id: Mutex::default(),
            changes: watch::Sender::new(()),
        }
    }
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<LeaseId, Arc<AgentLease>>> {
        runtime::lock(&self.by_id)
    }

    /// Adds a lease. Returns `None` if the agent already has it.
    pub(crate) fn add(
        &self,
        lease: LeaseRef,
        run: String,
        token: Option<SecretString>,
        phase: Phase,
    ) -> Option<Arc<AgentLease>> {
        let new = Arc::new(AgentLease::new(lease, run, token, phase));
        match self.lock().entry(lease.lease) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(place) => place.insert(Arc::clone(&new)),
        };
        self.changes.send_replace(());
        Some(new)
    }

    pub(crate) fn remove(&self, lease: LeaseId) {
        self.lock().remove(&lease);
        self.changes.send_replace(());
    }

    pub(crate) fn set_phase(&self, lease: &AgentLease, phase: Phase) {
        lease.state().phase = phase;
        self.changes.send_replace(());
    }

    pub(crate) fn get(&self, lease: LeaseId) -> Option<Arc<AgentLease>> {
        self.lock().get(&lease).cloned()
    }

    pub(crate) fn ids(&self) -> Vec<LeaseId> {
        self.lock().keys().copied().collect()
    }

    pub(crate) fn reports(&self) -> Vec<InstanceLease> {
        self.lock().values().map(|lease| lease.report()).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    pub(crate) fn order_all(&self, order: StopOrder) {
        for lease in self.lock().values() {
            lease.order(order);
        }
    }

    pub(crate) async fn fewer_than(&self, limit: usize) {
        self.until(|all| all.len() < limit).await;
    }

    pub(crate) async fn at_least_one(&self) {
        self.until(|all| !all.is_empty()).await;
    }

    pub(crate) async fn without(&self, lease: LeaseId) {
        self.until(|all| !all.contains_key(&lease)).await;
    }

    pub(crate) async fn none_in(&self, phase: Phase) {
        self.until(|all| all.values().all(|lease| lease.state().phase != phase))
            .await;
    }

    async fn until(&self, condition: impl Fn(&BTreeMap<LeaseId, Arc<AgentLease>>) -> bool) {
        let mut changes = self.changes.subscribe();
        while !condition(&self.lock()) {
            // The sender lives as long as this table.
            let _ = changes.changed().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use pool_protocol::id::TaskId;

    use super::*;

    fn lease() -> LeaseRef {
        LeaseRef {
            task: TaskId::new(),
            lease: LeaseId::new(),
            fencing_token: 1,
        }
    }

    #[test]
    fn a_lease_is_added_once() {
        let leases = Leases::default();
        let lease = lease();
        let add = || leases.add(lease, "1/step".to_owned(), None, Phase::Started);
        assert!(add().is_some());
        assert!(add().is_none());
        assert_eq!(leases.ids(), [lease.lease]);
        assert_eq!(leases.reports()[0].phase, Phase::Started);
        leases.remove(lease.lease);
        assert_eq!(leases.len(), 0);
    }

    #[tokio::test]
    async fn the_end_of_a_lease_wakes_a_waiting_request() {
        let leases = Arc::new(Leases::default());
        let lease = lease();
        leases.add(lease, String::new(), None, Phase::Preparing);
        let waiting = tokio::spawn({
            let leases = Arc::clone(&leases);
            async move { leases.fewer_than(1).await }
        });
        leases.remove(lease.lease);
        waiting.await.unwrap();
    }

    #[test]
    fn only_stronger_orders_replace_an_order_and_the_first_is_the_reason() {
        let lease = AgentLease::new(lease(), String::new(), None, Phase::Started);
        let order = |stop, by| StopOrder { stop, by };
        let mut orders = lease.orders();
        lease.order(order(Stop::Terminate, StoppedBy::Hub));
        lease.order(order(Stop::Withdraw, StoppedBy::Agent));
        assert_eq!(
            *orders.borrow_and_update(),
            Some(order(Stop::Terminate, StoppedBy::Hub))
        );
        lease.order(order(Stop::Kill, StoppedBy::Agent));
        assert_eq!(
            *orders.borrow_and_update(),
            Some(order(Stop::Kill, StoppedBy::Hub))
        );
        lease.order(order(Stop::Kill, StoppedBy::Agent));
        assert!(!orders.has_changed().unwrap());
    }

    #[test]
    fn debug_output_contains_no_token() {
        let lease = AgentLease::new(
            lease(),
            String::new(),
            Some("mfr_planted".into()),
            Phase::Started,
        );
        assert!(!format!("{lease:?}").contains("planted"));
    }
}
