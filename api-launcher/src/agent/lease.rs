//! The leases that the agent holds, and what is ordered for each of them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pool_protocol::id::{LeaseId, TaskId};
use pool_protocol::instance::{HeldLease, Phase};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// Which lease it is. Every executor carries it, so that a later agent finds what it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LeaseRef {
    pub(crate) task: TaskId,
    pub(crate) lease: LeaseId,
    pub(crate) fencing_token: u64,
}

/// How the executor of a lease is stopped. Later ones are stronger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stop {
    /// Remove it unless it may be at work: the lease is over, and an executor that has not accepted the task cannot.
    Withdraw,
    /// Ask it to stop. It saves the state.
    Terminate,
    /// End it now.
    Kill,
}

/// Who wants it to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoppedBy {
    Hub,
    Agent,
}

/// An order to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StopOrder {
    pub(crate) stop: Stop,
    pub(crate) by: StoppedBy,
}

/// A lease that the agent holds.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) lease: LeaseRef,
    /// Which step it is, for the log.
    pub(crate) run: String,
    state: Mutex<HeldState>,
    orders: watch::Sender<Option<StopOrder>>,
}

#[derive(Debug)]
struct HeldState {
    token: Option<SecretString>,
    phase: Phase,
    reason: Option<String>,
}

impl Held {
    fn new(lease: LeaseRef, run: String, token: Option<SecretString>, phase: Phase) -> Self {
        Self {
            lease,
            run,
            state: Mutex::new(HeldState {
                token,
                phase,
                reason: None,
            }),
            orders: watch::Sender::new(None),
        }
    }

    fn state(&self) -> MutexGuard<'_, HeldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The token for calls about the lease. An agent that has found the lease has none.
    pub(crate) fn token(&self) -> Option<SecretString> {
        self.state().token.clone()
    }

    pub(crate) fn set_token(&self, token: SecretString) {
        self.state().token = Some(token);
    }

    /// Sets why the executor waits, which the hub shows.
    pub(crate) fn set_reason(&self, reason: Option<String>) {
        self.state().reason = reason;
    }

    /// Orders a stop, unless a stronger one is ordered.
    pub(crate) fn order(&self, order: StopOrder) {
        self.orders.send_if_modified(|known| {
            let is_stronger = known.is_none_or(|known| known.stop < order.stop);
            if is_stronger {
                // Who was first is the reason why it ends.
                let by = known.map_or(order.by, |known| known.by);
                *known = Some(StopOrder { by, ..order });
            }
            is_stronger
        });
    }

    /// The orders from now on.
    pub(crate) fn orders(&self) -> watch::Receiver<Option<StopOrder>> {
        self.orders.subscribe()
    }

    fn to_wire(&self) -> HeldLease {
        let state = self.state();
        HeldLease {
            task_id: self.lease.task,
            lease_id: self.lease.lease,
            fencing_token: self.lease.fencing_token,
            phase: state.phase,
            reason: state.reason.clone(),
        }
    }
}

/// All leases that the agent holds.
#[derive(Debug)]
pub(crate) struct Leases {
    held: Mutex<BTreeMap<LeaseId, Arc<Held>>>,
    changes: watch::Sender<()>,
}

impl Default for Leases {
    fn default() -> Self {
        Self {
            held: Mutex::default(),
            changes: watch::Sender::new(()),
        }
    }
}

impl Leases {
    fn held(&self) -> MutexGuard<'_, BTreeMap<LeaseId, Arc<Held>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a lease. `None`: it is held already.
    pub(crate) fn add(
        &self,
        lease: LeaseRef,
        run: String,
        token: Option<SecretString>,
        phase: Phase,
    ) -> Option<Arc<Held>> {
        let new = Arc::new(Held::new(lease, run, token, phase));
        match self.held().entry(lease.lease) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(place) => place.insert(Arc::clone(&new)),
        };
        self.changes.send_replace(());
        Some(new)
    }

    pub(crate) fn remove(&self, lease: LeaseId) {
        self.held().remove(&lease);
        self.changes.send_replace(());
    }

    pub(crate) fn set_phase(&self, held: &Held, phase: Phase) {
        held.state().phase = phase;
        self.changes.send_replace(());
    }

    pub(crate) fn get(&self, lease: LeaseId) -> Option<Arc<Held>> {
        self.held().get(&lease).cloned()
    }

    pub(crate) fn ids(&self) -> Vec<LeaseId> {
        self.held().keys().copied().collect()
    }

    pub(crate) fn to_wire(&self) -> Vec<HeldLease> {
        self.held().values().map(|held| held.to_wire()).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.held().len()
    }

    /// Orders the same for all of them.
    pub(crate) fn order_all(&self, order: StopOrder) {
        for held in self.held().values() {
            held.order(order);
        }
    }

    /// Waits until fewer than so many are held.
    pub(crate) async fn fewer_than(&self, limit: usize) {
        self.until(|held| held.len() < limit).await;
    }

    /// Waits until one is held.
    pub(crate) async fn at_least_one(&self) {
        self.until(|held| !held.is_empty()).await;
    }

    /// Waits until none is in this phase.
    pub(crate) async fn none_in(&self, phase: Phase) {
        self.until(|held| held.values().all(|held| held.state().phase != phase))
            .await;
    }

    async fn until(&self, condition: impl Fn(&BTreeMap<LeaseId, Arc<Held>>) -> bool) {
        let mut changes = self.changes.subscribe();
        while !condition(&self.held()) {
            // The sender lives as long as this table.
            let _ = changes.changed().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease() -> LeaseRef {
        LeaseRef {
            task: TaskId::new(),
            lease: LeaseId::new(),
            fencing_token: 1,
        }
    }

    #[test]
    fn a_lease_is_held_once() {
        let leases = Leases::default();
        let lease = lease();
        let add = || leases.add(lease, "1/step".to_owned(), None, Phase::Started);
        assert!(add().is_some());
        assert!(add().is_none());
        assert_eq!(leases.ids(), [lease.lease]);
        assert_eq!(leases.to_wire()[0].phase, Phase::Started);
        leases.remove(lease.lease);
        assert_eq!(leases.len(), 0);
    }

    #[tokio::test]
    async fn a_slot_that_is_freed_wakes_who_waits_for_it() {
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
    fn orders_only_get_stronger_and_the_first_is_the_reason() {
        let held = Held::new(lease(), String::new(), None, Phase::Started);
        let order = |stop, by| StopOrder { stop, by };
        let mut orders = held.orders();
        held.order(order(Stop::Terminate, StoppedBy::Hub));
        held.order(order(Stop::Withdraw, StoppedBy::Agent));
        assert_eq!(
            *orders.borrow_and_update(),
            Some(order(Stop::Terminate, StoppedBy::Hub))
        );
        held.order(order(Stop::Kill, StoppedBy::Agent));
        assert_eq!(
            *orders.borrow_and_update(),
            Some(order(Stop::Kill, StoppedBy::Hub))
        );
        held.order(order(Stop::Kill, StoppedBy::Agent));
        assert!(!orders.has_changed().unwrap());
    }

    #[test]
    fn no_token_is_shown() {
        let held = Held::new(
            lease(),
            String::new(),
            Some("mfr_planted".into()),
            Phase::Started,
        );
        assert!(!format!("{held:?}").contains("planted"));
    }
}
