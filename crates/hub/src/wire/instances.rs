//! Registration, heartbeats and removal of instances.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse as _;
use pool_protocol::id::InstanceId;
use pool_protocol::instance::{
    Action, InstanceHeartbeat, InstanceOrders, InstanceStatus, Registered, Registration,
};
use pool_protocol::version::{self, VERSION};
use pool_store::Refusal;
use tracing::info;

use super::answer::{Answer, json, read};
use super::{LONGEST_WAIT, MANY_LEASES, seconds};
use crate::failure::Failure;
use crate::{HEARTBEAT, Hub};

/// Registers an instance. It may already be registered.
pub(super) async fn register(
    State(hub): State<Arc<Hub>>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let agent = hub.agent(&headers)?;
    let mut taken = hub.budget.of_pool(agent.pool());
    let registration: Registration = read(body, MANY_LEASES, &mut taken).await?;
    let (min, max) = (
        registration.protocol_min_version,
        registration.protocol_max_version,
    );
    if !(min..=max).contains(&VERSION) {
        return Err(version::unsupported(max).into());
    }
    let registered = hub
        .store
        .register(agent.pool(), &agent.credential(), &registration)
        .await?;
    info!(
        pool = %agent.pool(),
        agent = %registration.name,
        instance = %registered.instance,
        version = registration.executor_version,
        "an instance has registered"
    );
    Ok(json(&Registered {
        instance_id: registered.instance,
        pool_id: agent.pool().clone(),
        system_id: registration.system_id,
        selected_protocol_version: VERSION,
        status: InstanceStatus::Active,
        heartbeat_interval_seconds: seconds(HEARTBEAT),
        lease_duration_seconds: seconds(hub.lease),
        max_wait_seconds: seconds(LONGEST_WAIT),
        stale: registered.stale,
    }))
}

pub(super) async fn heartbeat(
    State(hub): State<Arc<Hub>>,
    headers: HeaderMap,
    Path(instance): Path<String>,
    body: Body,
) -> Answer {
    let agent = hub.agent(&headers)?;
    let instance = parse(&instance)?;
    let mut taken = hub.budget.of_pool(agent.pool());
    let heartbeat: InstanceHeartbeat = read(body, MANY_LEASES, &mut taken).await?;
    let orders = hub
        .store
        .heartbeat(agent.pool(), &agent.credential(), instance, &heartbeat)
        .await?;
    Ok(json(&InstanceOrders {
        action: Action::None,
        signals: orders.signals,
        stale: orders.stale,
    }))
}

pub(super) async fn remove(
    State(hub): State<Arc<Hub>>,
    headers: HeaderMap,
    Path(instance): Path<String>,
) -> Answer {
    let agent = hub.agent(&headers)?;
    let instance = parse(&instance)?;
    hub.store.remove(agent.pool(), instance).await?;
    info!(pool = %agent.pool(), %instance, "an instance was removed");
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn parse(id: &str) -> Result<InstanceId, Failure> {
    id.parse().map_err(|_| Refusal::InstanceUnknown.into())
}
