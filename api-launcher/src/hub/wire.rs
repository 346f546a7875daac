//! The hub's side of the wire: reads requests of agents and executors, and says what the store says. `openapi.yaml` of
//! `pool_protocol` describes it.

mod answer;
mod auth;
mod exchange;
mod instances;
mod leases;
mod requests;
#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::{any, delete, get, post};
use pool_protocol::path;
use pool_protocol::version::{MAX_HEADER, MIN_HEADER, Versions};

use super::{Hub, relay};

pub(crate) use self::answer::Failure;

/// The largest body of a request.
const MAX_BODY_BYTES: usize = 512 * 1024;
/// How long a body may take.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// How often an instance says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// How long a request for a task waits at most. Proxies end requests after a minute.
const LONGEST_WAIT: Duration = Duration::from_secs(50);

/// The paths of the wire.
pub(crate) fn router(hub: Arc<Hub>) -> Router {
    Router::new()
        .route(path::PROTOCOL, get(requests::protocol))
        .route(path::TOKEN, post(exchange::exchange))
        .route(path::REGISTER, post(instances::register))
        .route(path::INSTANCE, delete(instances::remove))
        .route(path::INSTANCE_HEARTBEAT, post(instances::heartbeat))
        .route(path::REQUEST_TASK, post(requests::task))
        .route(path::LEASE, post(leases::call))
        .layer(map_response(name_versions))
        .route(path::RELAY, any(relay::handle))
        .with_state(hub)
}

/// Each response says which versions are spoken here.
async fn name_versions(mut response: Response) -> Response {
    let ours = Versions::OURS;
    for (name, version) in [
        (MIN_HEADER, ours.min_version),
        (MAX_HEADER, ours.max_version),
    ] {
        let name = HeaderName::from_static(name);
        response
            .headers_mut()
            .insert(name, HeaderValue::from(version));
    }
    response
}

/// Whole seconds, as the wire has them.
fn seconds(time: Duration) -> u32 {
    u32::try_from(time.as_secs()).unwrap_or(u32::MAX)
}

/// The time in that long, by the clock of the hub.
fn in_time(time: Duration) -> String {
    humantime::format_rfc3339_seconds(SystemTime::now() + time).to_string()
}
