//! The metrics of a hub.

use artifact_store::{Change, KeptConditions};
use http_service::MetricsRegistry;
use pool_protocol::id::PoolName;
use pool_protocol::lease::DeclineReason;
use pool_store::PoolView;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

type Labels = Vec<(&'static str, String)>;

const REASONS: [DeclineReason; 5] = [
    DeclineReason::Draining,
    DeclineReason::Quota,
    DeclineReason::Refused,
    DeclineReason::Failed,
    DeclineReason::Other,
];

/// The metrics of pools. Their labels are the names in the file of the pools, so there are few series.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolMetrics {
    tasks: Family<Labels, Gauge>,
    oldest: Family<Labels, Gauge>,
    agents: Family<Labels, Gauge>,
    slots: Family<Labels, Gauge>,
    pub(crate) polls: Gauge,
    pub(crate) store_full: Gauge,
    redelivered: Family<Labels, Counter>,
    declined: Family<Labels, Counter>,
    pub(crate) stale: Counter,
    poison: Family<Labels, Counter>,
    lost: Family<Labels, Counter>,
    conditions: Family<Labels, Gauge>,
}

impl PoolMetrics {
    /// Adds the metrics to those of the launcher.
    pub(crate) fn register(metrics: &MetricsRegistry) -> Self {
        let ours = Self::default();
        metrics.extend(|registry| {
            registry.register("pool_tasks", "Tasks of a pool by state", ours.tasks.clone());
            registry.register(
                "pool_oldest_queued_seconds",
                "How long the oldest task of a pool has waited",
                ours.oldest.clone(),
            );
            registry.register(
                "pool_agents",
                "Instances of agents of a pool by state",
                ours.agents.clone(),
            );
            registry.register(
                "pool_slots",
                "Tasks that the agents of a pool that are online run at once, by state",
                ours.slots.clone(),
            );
            registry.register(
                "pool_polls_waiting",
                "Requests for tasks that wait",
                ours.polls.clone(),
            );
            registry.register(
                "pool_store_full",
                "1 while the disk of the store has too little space for new tasks",
                ours.store_full.clone(),
            );
            registry.register(
                "pool_redelivered",
                "Leases that were given to their instance again",
                ours.redelivered.clone(),
            );
            registry.register(
                "pool_declined",
                "Leases that agents declined, by reason",
                ours.declined.clone(),
            );
            registry.register(
                "pool_stale",
                "Calls that were refused because of a lease that is no longer valid",
                ours.stale.clone(),
            );
            registry.register(
                "pool_poison",
                "Tasks that were given up after too many attempts",
                ours.poison.clone(),
            );
            registry.register(
                "pool_lost",
                "Tasks that were given up because nothing was heard of their executors",
                ours.lost.clone(),
            );
            registry.register(
                "artifact_store_conditions",
                "1 if the artifact store keeps the conditions of a change, by change. Absent until it has been asked",
                ours.conditions.clone(),
            );
        });
        ours
    }

    /// Sets the gauges to the values of the store. Pools without tasks and instances have zeros.
    pub(crate) fn observe<'n>(
        &self,
        names: impl Iterator<Item = &'n PoolName>,
        pools: &[PoolView],
    ) {
        for family in [&self.tasks, &self.oldest, &self.agents, &self.slots] {
            family.clear();
        }
        for name in names {
            self.set(name, None);
            // A series that appears with its first event hides that event from rates.
            for family in [&self.redelivered, &self.poison, &self.lost] {
                drop(family.get_or_create(&of(name)));
            }
            for reason in REASONS {
                drop(self.declined.get_or_create(&declined(name, reason)));
            }
        }
        for view in pools {
            self.set(&view.pool, Some(view));
        }
    }

    fn set(&self, pool: &PoolName, view: Option<&PoolView>) {
        let of_view = |count: fn(&PoolView) -> u32| view.map_or(0, count);
        let set = |family: &Family<Labels, Gauge>, state: &str, count: fn(&PoolView) -> u32| {
            let labels = with(pool, "state", state);
            family.get_or_create(&labels).set(of_view(count).into());
        };
        set(&self.tasks, "unconfirmed", |view| view.unconfirmed);
        set(&self.tasks, "available", |view| view.available);
        set(&self.tasks, "leased", |view| view.leased);
        set(&self.tasks, "running", |view| view.running);
        set(&self.tasks, "orphaned", |view| view.orphaned);
        set(&self.tasks, "unreported", |view| view.unreported);
        set(&self.agents, "online", |view| view.online);
        set(&self.agents, "offline", |view| view.offline);
        set(&self.slots, "free", |view| view.free);
        set(&self.slots, "busy", |view| {
            view.capacity.saturating_sub(view.free)
        });
        let oldest = view.and_then(|view| view.oldest).unwrap_or_default();
        let oldest = i64::try_from(oldest.as_secs()).unwrap_or(i64::MAX);
        self.oldest.get_or_create(&of(pool)).set(oldest);
    }

    pub(crate) fn redelivered(&self, pool: &PoolName) {
        self.redelivered.get_or_create(&of(pool)).inc();
    }

    pub(crate) fn declined(&self, pool: &PoolName, reason: DeclineReason) {
        let labels = declined(pool, reason);
        self.declined.get_or_create(&labels).inc();
    }

    pub(crate) fn poison(&self, pool: &PoolName) {
        self.poison.get_or_create(&of(pool)).inc();
    }

    pub(crate) fn lost(&self, pool: &PoolName) {
        self.lost.get_or_create(&of(pool)).inc();
    }

    /// Shows which conditions the artifact store keeps.
    pub(crate) fn keeps(&self, kept: &KeptConditions) {
        for change in Change::ALL {
            let labels = vec![("change", change.name().to_owned())];
            let is_kept = kept.has(change);
            self.conditions.get_or_create(&labels).set(is_kept.into());
        }
    }
}

fn of(pool: &PoolName) -> Labels {
    vec![("pool", pool.to_string())]
}

fn declined(pool: &PoolName, reason: DeclineReason) -> Labels {
    let reason = match reason {
        DeclineReason::Draining => "draining",
        DeclineReason::Quota => "quota",
        DeclineReason::Refused => "refused",
        DeclineReason::Failed => "failed",
        DeclineReason::Other => "other",
    };
    with(pool, "reason", reason)
}

fn with(pool: &PoolName, name: &'static str, value: &str) -> Labels {
    vec![("pool", pool.to_string()), (name, value.to_owned())]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::sample_views::pool;

    #[test]
    fn each_pool_has_series_and_a_removed_pool_has_none() {
        let metrics = MetricsRegistry::default();
        let pools = PoolMetrics::register(&metrics);
        let view = PoolView {
            online: 2,
            offline: 1,
            capacity: 10,
            free: 4,
            unconfirmed: 1,
            available: 3,
            leased: 2,
            running: 4,
            oldest: Some(Duration::from_secs(61)),
            ..pool()
        };
        let us = "us".parse().unwrap();
        pools.observe([&us].into_iter(), std::slice::from_ref(&view));
        pools.lost(&view.pool);
        pools.declined(&view.pool, DeclineReason::Quota);
        let text = metrics.render();
        for line in [
            r#"mayfly_pool_tasks{pool="eu",state="available"} 3"#,
            r#"mayfly_pool_agents{pool="eu",state="online"} 2"#,
            r#"mayfly_pool_slots{pool="eu",state="busy"} 6"#,
            r#"mayfly_pool_oldest_queued_seconds{pool="eu"} 61"#,
            r#"mayfly_pool_tasks{pool="us",state="available"} 0"#,
            r#"mayfly_pool_lost_total{pool="us"} 0"#,
            r#"mayfly_pool_poison_total{pool="us"} 0"#,
            r#"mayfly_pool_redelivered_total{pool="us"} 0"#,
            r#"mayfly_pool_declined_total{pool="us",reason="other"} 0"#,
            r#"mayfly_pool_lost_total{pool="eu"} 1"#,
            r#"mayfly_pool_declined_total{pool="eu",reason="quota"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        pools.observe([].into_iter(), &[]);
        let text = metrics.render();
        assert!(!text.contains("mayfly_pool_tasks{"), "{text}");
        assert!(text.contains("mayfly_pool_lost_total{"), "{text}");
    }
}
