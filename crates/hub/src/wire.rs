//! The hub's side of the protocol: handlers for the requests of agents and executors. `openapi.yaml` of `pool_protocol`
//! describes them.

mod answer;
mod instances;
mod leases;
mod requests;
mod token_exchange;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::{delete, get, post};
use pool_protocol::path;
use pool_protocol::version::{MAX_HEADER, MIN_HEADER, VERSION};

use super::{Hub, artifacts};

/// What a body may be, and what it takes.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// The largest number of bytes.
    limit: usize,
    /// The bytes that each byte takes at most: as it arrives, and the values that are made of it.
    cost: usize,
}

/// A call that names many leases. Each value of a list takes more than its text.
const MANY_LEASES: Size = Size {
    limit: 512 * 1024,
    cost: 16,
};
/// The end of a task. Its report becomes a tree of values.
const ONE_END: Size = Size {
    limit: 64 * 1024,
    cost: 16,
};
/// A call with a text for people.
const ONE_TEXT: Size = Size {
    limit: 64 * 1024,
    cost: 3,
};
/// Another call.
const ONE_LEASE: Size = Size {
    limit: 16 * 1024,
    cost: 3,
};
/// The timeout for reading a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest wait of a request for a task. Proxies often end requests after a minute.
const LONGEST_WAIT: Duration = Duration::from_secs(50);

/// Returns the routes of the protocol, without the relay to the platform.
pub(super) fn router() -> Router<Arc<Hub>> {
    Router::new()
        .route(path::PROTOCOL, get(requests::protocol))
        .route(path::TOKEN, post(token_exchange::exchange))
        .route(path::REGISTER, post(instances::register))
        .route(path::INSTANCE, delete(instances::remove))
        .route(path::INSTANCE_HEARTBEAT, post(instances::heartbeat))
        .route(path::REQUEST_TASK, post(requests::task))
        .route(path::LEASE, post(leases::call))
        .merge(artifacts::router())
        .layer(map_response(name_versions))
}

/// Adds the supported versions to each response.
async fn name_versions(mut response: Response) -> Response {
    for name in [MIN_HEADER, MAX_HEADER] {
        let name = HeaderName::from_static(name);
        response
            .headers_mut()
            .insert(name, HeaderValue::from(VERSION));
    }
    response
}

/// Returns whole seconds, as in the protocol.
fn seconds(time: Duration) -> u32 {
    u32::try_from(time.as_secs()).unwrap_or(u32::MAX)
}

/// Returns the time after a duration, by the clock of the hub.
fn time_after(time: Duration) -> String {
    humantime::format_rfc3339_seconds(SystemTime::now() + time).to_string()
}
