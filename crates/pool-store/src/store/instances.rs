//! Instances of agents: registration, heartbeats, and the leases they name.

use std::collections::HashMap;

use pool_protocol::id::{AgentName, InstanceId, LeaseId, PoolName, TaskId};
use pool_protocol::instance::{
    HeldLease, InstanceHeartbeat, InstanceState, Phase, Registration, Signal, SignalKind,
};

use super::Store;
use super::rows::read;
use super::tasks::{HELD, agent_of};
use crate::clock::millis;
use crate::db::{Tx, Value};
use crate::error::{Error, Refusal};
use crate::model::{Orders, RegisteredInstance};
use crate::state::{Event, Task, apply};
use crate::text::{identifier, limited};
use crate::view::PAGE;

/// The most instances of a pool, with those that are offline and still listed.
const INSTANCES: i64 = 1000;
/// The most tags of an instance.
const TAGS: usize = 32;

const TAKEN: &str = "\
    SELECT installation FROM instances \
    WHERE pool = $1 AND agent = $2 AND installation <> $3 AND seen_at > $4 LIMIT 1";
const ACTIVE: &str = "\
    SELECT * FROM tasks WHERE pool = $1 AND agent = $2 \
    AND state IN ('leased', 'started', 'running', 'orphaned') ORDER BY id";
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
        registration: &Registration,
    ) -> Result<RegisteredInstance, Error> {
        check(registration)?;
        let mut tx = self.begin().await?;
        tx.alone(&format!("register {pool}")).await?;
        if let Err(refusal) = self.make_room(&mut tx, pool, registration).await? {
            tx.rollback().await?;
            return Err(refusal.into());
        }
        let sql = "SELECT id FROM instances WHERE pool = $1 AND agent = $2 AND system_id = $3";
        let key = [
            Value::text(pool),
            Value::text(&registration.name),
            Value::text(&registration.system_id),
        ];
        let known = tx.row(sql, &key).await?;
        let instance = known.map_or_else(|| Ok(InstanceId::new()), |row| row.parsed("id"))?;
        let stale = self
            .name(
                &mut tx,
                pool,
                &registration.name,
                instance,
                &registration.leases,
            )
            .await?;
        let mut values = vec![Value::text(instance)];
        values.extend(key);
        values.extend([
            Value::text(&registration.installation),
            Value::text(&registration.executor_version),
            Value::text(&registration.platform),
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
        Ok(RegisteredInstance { instance, stale })
    }

    /// An instance lives. Its leases that it names are renewed.
    pub async fn heartbeat(
        &self,
        pool: &PoolName,
        instance: InstanceId,
        heartbeat: &InstanceHeartbeat,
    ) -> Result<Orders, Error> {
        limited("`leases`", heartbeat.leases.len(), HELD)?;
        let mut tx = self.begin().await?;
        let agent = match agent_of(&mut tx, instance, pool).await? {
            Ok(agent) => agent,
            Err(refusal) => {
                tx.rollback().await?;
                return Err(refusal.into());
            }
        };
        let stale = self
            .name(&mut tx, pool, &agent, instance, &heartbeat.leases)
            .await?;
        let values = [Value::text(instance), Value::from(PAGE)];
        let mut signals = Vec::new();
        for row in tx.rows(SIGNALS, &values).await? {
            signals.push(Signal {
                task_id: row.parsed("id")?,
                lease_id: row.parsed("lease")?,
                signal: SignalKind::Cancel,
            });
        }
        // Tasks before instances, as everywhere: otherwise two transactions could wait for each other.
        let sql = "UPDATE instances SET seen_at = $2, free = $3, draining = $4 WHERE id = $1";
        let values = [
            Value::text(instance),
            Value::from(tx.now),
            Value::from(heartbeat.available_capacity),
            Value::from(heartbeat.state != InstanceState::Online),
        ];
        tx.execute(sql, &values).await?;
        tx.commit().await?;
        Ok(Orders { signals, stale })
    }

    /// Removes an instance. Its leases stay: another instance of the agent gets or names them, or they expire.
    pub async fn remove(&self, pool: &PoolName, instance: InstanceId) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        if let Err(refusal) = agent_of(&mut tx, instance, pool).await? {
            tx.rollback().await?;
            return match refusal {
                // It was removed before.
                Refusal::InstanceUnknown => Ok(()),
                refusal => Err(refusal.into()),
            };
        }
        let sql = "DELETE FROM instances WHERE id = $1";
        tx.execute(sql, &[Value::text(instance)]).await?;
        tx.commit().await
    }

    /// Lets an instance have its name, unless another installation uses it.
    async fn make_room(
        &self,
        tx: &mut Tx,
        pool: &PoolName,
        registration: &Registration,
    ) -> Result<Result<(), Refusal>, Error> {
        let name = [
            Value::text(pool),
            Value::text(&registration.name),
            Value::text(&registration.installation),
        ];
        let online = Value::from(tx.now - millis(self.rules.offline_after));
        let mut values = name.to_vec();
        values.push(online);
        if let Some(row) = tx.row(TAKEN, &values).await? {
            let installation = row.text("installation")?;
            return Ok(Err(Refusal::InstanceNameTaken { installation }));
        }
        let sql = "DELETE FROM instances WHERE pool = $1 AND agent = $2 AND installation <> $3";
        tx.execute(sql, &name).await?;
        let sql = "SELECT count(*) AS instances FROM instances WHERE pool = $1";
        let row = tx.row(sql, &name[..1]).await?;
        let registered = row.map_or(Ok(0), |row| row.int("instances"))?;
        Ok(if registered < INSTANCES {
            Ok(())
        } else {
            Err(Refusal::RequestInvalid(format!(
                "the pool has {registered} instances, online or offline: no more are registered"
            )))
        })
    }

    /// Renews the leases that an instance names, also those of earlier instances of its agent. Returns those that its agent
    /// does not have any more.
    async fn name(
        &self,
        tx: &mut Tx,
        pool: &PoolName,
        agent: &AgentName,
        instance: InstanceId,
        held: &[HeldLease],
    ) -> Result<Vec<LeaseId>, Error> {
        if held.is_empty() {
            return Ok(Vec::new());
        }
        let values = [Value::text(pool), Value::text(agent)];
        let mut active: HashMap<TaskId, Task> = HashMap::new();
        for row in tx.rows(ACTIVE, &values).await? {
            let task = read(&row)?;
            active.insert(task.id, task);
        }
        let mut held: Vec<_> = held.iter().collect();
        // Two transactions that change several tasks do it in the same order.
        held.sort_unstable_by_key(|held| held.task_id);
        let mut stale = Vec::new();
        for held in held {
            let known = match active.get(&held.task_id) {
                Some(_) => tx.task(held.task_id).await?,
                None => None,
            };
            let is_its = |task: &Task| {
                task.lease == Some(held.lease_id) && task.fencing_token == held.fencing_token
            };
            match known.filter(is_its).filter(|task| task.state.is_active()) {
                Some(task) => {
                    let named = apply(&task, Event::Named { instance }, tx.now, &self.rules)?;
                    tx.save(task.state, &named, &self.rules).await?;
                }
                // An executor that has accepted its task learns from its own calls what became of it. It may have to save
                // the state, and a store that was restored does not know it.
                None if held.phase == Phase::Running => {}
                None => stale.push(held.lease_id),
            }
        }
        Ok(stale)
    }
}

fn check(registration: &Registration) -> Result<(), Refusal> {
    for (what, text) in [
        ("`systemId`", &registration.system_id),
        ("`executorVersion`", &registration.executor_version),
        ("`platform`", &registration.platform),
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
    limited("`leases`", registration.leases.len(), HELD)
}
