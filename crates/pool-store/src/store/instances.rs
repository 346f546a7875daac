//! Operations of instances: registration, heartbeats and removal.

use pool_protocol::id::{InstanceId, LeaseId, PoolName};
use pool_protocol::instance::{
    InstanceHeartbeat, InstanceLease, InstanceState, Phase, Registration, Signal, SignalKind,
};

use super::Store;
use super::leases::{MAX_LEASES, agent_of};
use crate::clock::millis;
use crate::db::{Tx, Value};
use crate::error::{Error, Refusal};
use crate::model::{Orders, RegisteredInstance};
use crate::state::{Event, Task, apply};
use crate::text::{identifier, limited};
use crate::view::PAGE;

/// The largest number of instances of a pool, including offline ones that are still listed.
const INSTANCES: i64 = 1000;
/// The most leases that one transaction renews. The other pools wait for its end.
const RENEWED_AT_ONCE: usize = 64;
/// The largest number of tags of an instance.
const TAGS: usize = 32;

const NAME_IN_USE: &str = "\
    SELECT installation FROM instances \
    WHERE pool = $1 AND agent = $2 AND installation <> $3 AND seen_at > $4 LIMIT 1";
const IS_ITS: &str = "\
    SELECT id FROM tasks WHERE id = $1 AND pool = $2 AND agent = $3 AND lease = $4";
const SIGNALS: &str = "\
    SELECT id, lease FROM tasks WHERE instance = $1 AND cancel_requested = 1 AND lease IS NOT NULL \
    AND state IN ('leased', 'started', 'running', 'orphaned') ORDER BY id LIMIT $2";
const REPLACED: &str = "\
    UPDATE instances SET seen_at = $4 WHERE pool = $1 AND agent = $2 AND id <> $3 AND seen_at > $4";
const REGISTER: &str = "\
    INSERT INTO instances (id, pool, agent, system_id, installation, version, platform, architecture, target, tags, \
    capacity, free, draining, failures, seen_at) \
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $11, 0, 0, $12) \
    ON CONFLICT (id) DO UPDATE SET version = excluded.version, platform = excluded.platform, \
    architecture = excluded.architecture, target = excluded.target, tags = excluded.tags, \
    capacity = excluded.capacity, free = excluded.free, draining = 0, failures = 0, seen_at = excluded.seen_at";

impl Store {
    /// Registers an instance. The same `system_id` of the same name gets the same instance again. Another instance of this
    /// installation is offline until it is heard again: an agent that starts again gets at once what it was given before.
    pub async fn register(
        &self,
        pool: &PoolName,
        credential: &str,
        registration: &Registration,
    ) -> Result<RegisteredInstance, Error> {
        check(registration)?;
        let mut tx = self.begin_for_pool(pool).await?;
        tx.lock(&format!("register {pool}")).await?;
        let reserved = self.reserve_name(&mut tx, pool, registration).await;
        let (mut tx, ()) = tx.unless_refused(reserved).await?;
        let sql = "SELECT id FROM instances WHERE pool = $1 AND agent = $2 AND system_id = $3";
        let key = [
            Value::text(pool),
            Value::text(&registration.name),
            Value::text(&registration.system_id),
        ];
        let known = tx.row(sql, &key).await?;
        let instance = known.map_or_else(|| Ok(InstanceId::new()), |row| row.parsed("id"))?;
        let mut values = vec![Value::text(instance)];
        values.extend(key);
        values.extend([
            Value::text(&registration.installation),
            Value::text(&registration.executor_version),
            Value::text(&registration.operating_system),
            Value::text(&registration.architecture),
            Value::text(&registration.target),
            Value::text(serde_json::Value::from(registration.tags.clone())),
            Value::from(registration.capacity),
            Value::from(tx.now),
        ]);
        tx.execute(REGISTER, &values).await?;
        let values = [
            Value::text(pool),
            Value::text(&registration.name),
            Value::text(instance),
            Value::from(tx.now - millis(self.rules.offline_after)),
        ];
        tx.execute(REPLACED, &values).await?;
        tx.commit().await?;
        // An agent that gets no response registers again.
        let holder = (instance, credential);
        let leases = in_order(&registration.leases);
        let stale = self.renew_in_parts(pool, holder, &leases).await?;
        Ok(RegisteredInstance { instance, stale })
    }

    /// Stores a heartbeat of an instance, and renews the leases that it names.
    pub async fn heartbeat(
        &self,
        pool: &PoolName,
        credential: &str,
        instance: InstanceId,
        heartbeat: &InstanceHeartbeat,
    ) -> Result<Orders, Error> {
        limited("`leases`", heartbeat.leases.len(), MAX_LEASES)?;
        let holder = (instance, credential);
        let leases = in_order(&heartbeat.leases);
        let (first, others) = leases.split_at(leases.len().min(RENEWED_AT_ONCE));
        let (mut tx, mut stale) = self.renew_leases(pool, holder, first).await?;
        let values = [Value::text(instance), Value::from(PAGE)];
        let mut signals = Vec::new();
        for row in tx.rows(SIGNALS, &values).await? {
            signals.push(Signal {
                task_id: row.parsed("id")?,
                lease_id: row.parsed("lease")?,
                signal: SignalKind::Cancel,
            });
        }
        // Every transaction changes tasks before instances. Another order could cause deadlocks.
        let sql = "UPDATE instances SET seen_at = $2, free = $3, draining = $4 WHERE id = $1";
        let values = [
            Value::text(instance),
            Value::from(tx.now),
            Value::from(heartbeat.available_capacity),
            Value::from(heartbeat.state != InstanceState::Online),
        ];
        tx.execute(sql, &values).await?;
        tx.commit().await?;
        stale.extend(self.renew_in_parts(pool, holder, others).await?);
        Ok(Orders { signals, stale })
    }

    /// Removes an instance. Its leases stay until another instance of the agent gets them or names them, or until they
    /// expire.
    pub async fn remove(&self, pool: &PoolName, instance: InstanceId) -> Result<(), Error> {
        let mut tx = self.begin_for_pool(pool).await?;
        let agent = agent_of(&mut tx, instance, pool).await;
        let mut tx = match tx.unless_refused(agent).await {
            Ok((tx, _)) => tx,
            // The request was repeated.
            Err(Error::Refused(Refusal::InstanceUnknown)) => return Ok(()),
            Err(error) => return Err(error),
        };
        let sql = "DELETE FROM instances WHERE id = $1";
        tx.execute(sql, &[Value::text(instance)]).await?;
        tx.commit().await
    }

    /// Refuses a name that another installation uses online, and an instance beyond the limit. Removes offline
    /// instances of other installations with this name.
    async fn reserve_name(
        &self,
        tx: &mut Tx,
        pool: &PoolName,
        registration: &Registration,
    ) -> Result<(), Error> {
        let name = [
            Value::text(pool),
            Value::text(&registration.name),
            Value::text(&registration.installation),
        ];
        let online = Value::from(tx.now - millis(self.rules.offline_after));
        let mut values = name.to_vec();
        values.push(online);
        if let Some(row) = tx.row(NAME_IN_USE, &values).await? {
            // The operator may see both. An agent must not learn of an installation that may be another team's.
            tracing::warn!(
                %pool,
                agent = %registration.name,
                installation = registration.installation,
                in_use_by = row.text("installation")?,
                "refused a name that another installation uses"
            );
            return Err(Refusal::InstanceNameTaken.into());
        }
        let sql = "DELETE FROM instances WHERE pool = $1 AND agent = $2 AND installation <> $3";
        tx.execute(sql, &name).await?;
        let sql = "SELECT count(*) AS instances FROM instances \
                   WHERE pool = $1 AND NOT (agent = $2 AND system_id = $3)";
        let others = [
            name[0].clone(),
            name[1].clone(),
            Value::text(&registration.system_id),
        ];
        let row = tx.row(sql, &others).await?;
        let registered = row.map_or(Ok(0), |row| row.int("instances"))?;
        if registered >= INSTANCES {
            let text = format!(
                "the pool has {registered} instances, online or offline: no more are registered"
            );
            return Err(Refusal::RequestInvalid(text).into());
        }
        Ok(())
    }

    /// Renews leases in transactions of their own. Returns those that the agent no longer has.
    async fn renew_in_parts(
        &self,
        pool: &PoolName,
        holder: (InstanceId, &str),
        leases: &[&InstanceLease],
    ) -> Result<Vec<LeaseId>, Error> {
        let mut stale = Vec::new();
        for part in leases.chunks(RENEWED_AT_ONCE) {
            let (tx, of_part) = self.renew_leases(pool, holder, part).await?;
            tx.commit().await?;
            stale.extend(of_part);
        }
        Ok(stale)
    }

    /// Renews the leases that an instance names, including those of earlier instances of its agent. Returns the transaction, and
    /// the leases that the agent no longer has.
    async fn renew_leases(
        &self,
        pool: &PoolName,
        (instance, credential): (InstanceId, &str),
        leases: &[&InstanceLease],
    ) -> Result<(Tx, Vec<LeaseId>), Error> {
        let mut tx = self.begin_for_pool(pool).await?;
        let agent = agent_of(&mut tx, instance, pool).await;
        let (mut tx, agent) = tx.unless_refused(agent).await?;
        let mut stale = Vec::new();
        for lease in leases {
            // Only a task of this agent is locked.
            let values = [
                Value::text(lease.task_id),
                Value::text(pool),
                Value::text(&agent),
                Value::text(lease.lease_id),
            ];
            let known = match tx.row(IS_ITS, &values).await? {
                Some(_) => tx.task(lease.task_id).await?,
                None => None,
            };
            let is_its = |task: &Task| {
                task.lease == Some(lease.lease_id) && task.fencing_token == lease.fencing_token
            };
            match known.filter(is_its).filter(|task| task.state.is_active()) {
                Some(task) => {
                    let event = Event::Renewed {
                        instance,
                        credential,
                        reason: lease.reason.as_deref(),
                    };
                    let renewed = apply(&task, event, tx.now, &self.rules)?;
                    tx.save(task.state, &renewed, &self.rules).await?;
                }
                // An executor that has accepted its task gets the reason from its own requests. It may have to save the
                // state, and a restored store may not know it.
                None if lease.phase == Phase::Running => {}
                None => stale.push(lease.lease_id),
            }
        }
        Ok((tx, stale))
    }
}

/// Leases in the order in which all transactions change tasks, each once. Another order could cause deadlocks.
fn in_order(leases: &[InstanceLease]) -> Vec<&InstanceLease> {
    let key = |lease: &InstanceLease| (lease.task_id, lease.lease_id, lease.fencing_token);
    let mut leases: Vec<_> = leases.iter().collect();
    leases.sort_unstable_by_key(|lease| key(lease));
    leases.dedup_by_key(|lease| key(lease));
    leases
}

fn check(registration: &Registration) -> Result<(), Refusal> {
    for (what, text) in [
        ("`systemId`", &registration.system_id),
        ("`executorVersion`", &registration.executor_version),
        ("`platform`", &registration.operating_system),
        ("`architecture`", &registration.architecture),
        ("`installation`", &registration.installation),
        ("`target`", &registration.target),
    ] {
        identifier(what, text)?;
    }
    limited("`tags`", registration.tags.len(), TAGS)?;
    for tag in &registration.tags {
        identifier("a tag", tag)?;
    }
    limited("`leases`", registration.leases.len(), MAX_LEASES)
}
