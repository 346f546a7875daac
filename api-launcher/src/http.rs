//! The HTTP service of contract section 2: authorizes requests, reads dispatches and responds. The target runs what is
//! accepted.

mod answer;
pub mod auth;
mod dispatch;
mod health;
pub(crate) mod settings;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use git_address::AllowList;
use job_contract::env;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub(crate) use auth::Gate;

use crate::dispatch::DispatchTarget;
use crate::dispatch::route::Routing;
use crate::metrics::Metrics;
use http_service::Fresh;
use hub::Hub;

/// Largest job document (contract 2.9).
const MAX_BODY_BYTES: usize = 8 * 1024 * KIB;
const KIB: usize = 1024;
/// How long a body may take. The platform gives up after 60 s in all.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Dispatches that are accepted at a time; further ones wait for their turn.
const AT_ONCE: usize = 25;
/// Memory of the dispatches that are accepted at a time, in KiB. Further ones wait for their turn. The largest one fits.
const MEMORY_KIB: usize = 80 * KIB;

/// What the handlers share.
#[derive(Clone, Debug)]
pub(crate) struct AppState {
    gate: Arc<Gate>,
    routing: Arc<Routing>,
    allowed: Option<Arc<AllowList>>,
    target: Arc<dyn DispatchTarget>,
    hub: Option<Arc<Hub>>,
    page: Option<StatusPage>,
    metrics: Metrics,
    rendered: Arc<Fresh<Bytes>>,
    /// Turns of dispatches.
    turns: Arc<Semaphore>,
    /// Memory of dispatches, in KiB.
    memory: Arc<Semaphore>,
    draining: CancellationToken,
}

#[derive(Clone, Debug)]
pub(crate) struct StatusPage {
    pub(crate) hub: Arc<Hub>,
    /// Clients on this machine need no token.
    pub(crate) open: bool,
}

impl AppState {
    pub(crate) fn new(
        gate: Gate,
        routing: Routing,
        target: Arc<dyn DispatchTarget>,
        hub: Option<Arc<Hub>>,
        page: Option<StatusPage>,
        metrics: Metrics,
        draining: CancellationToken,
    ) -> Self {
        Self {
            gate: Arc::new(gate),
            routing: Arc::new(routing),
            allowed: None,
            target,
            hub,
            page,
            metrics,
            rendered: Arc::default(),
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            memory: Arc::new(Semaphore::new(MEMORY_KIB)),
            draining,
        }
    }

    /// Refuses dispatches with other sources.
    pub(crate) fn with_allowed(self, allowed: Option<AllowList>) -> Self {
        for advice in allowed.iter().flat_map(AllowList::advice) {
            warn!("`{}`: {advice}", env::ALLOWED_VCS_URL_REGEX);
        }
        Self {
            allowed: allowed.map(Arc::new),
            ..self
        }
    }
}

/// The paths of the service. `metrics` are served here if they have no port of their own.
pub(crate) fn router(state: AppState, metrics: bool) -> Router {
    let mut router = health().route("/api/v1/terraform-rs", post(dispatch::dispatch));
    if metrics {
        router = router.merge(self::metrics());
    }
    if state.hub.is_some() {
        let pool = "/pools/{pool}/api/v1/terraform-rs";
        router = router.route(pool, post(dispatch::dispatch_to_pool));
    }
    let mut router = router.with_state(state.clone());
    if let Some(hub) = &state.hub {
        router = router.merge(hub::router(Arc::clone(hub)));
    }
    if let Some(page) = &state.page {
        router = router.merge(hub::page::router(Arc::clone(&page.hub), page.open));
    }
    router
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(state, close_while_draining))
}

/// The paths of the port for health checks and metrics.
pub(crate) fn health_router(state: AppState) -> Router {
    let router = health().merge(metrics()).with_state(state);
    router
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
}

fn health() -> Router<AppState> {
    Router::new()
        .route("/actuator/health", get(health::readiness))
        .route("/actuator/health/readiness", get(health::readiness))
        .route("/actuator/health/liveness", get(health::liveness))
}

fn metrics() -> Router<AppState> {
    Router::new().route("/metrics", get(health::prometheus))
}

/// Closes each connection after its response while the launcher drains. A client that kept its connection would reach this
/// launcher again, wherever the address leads by then.
async fn close_while_draining(
    State(state): State<AppState>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = next.run(request).await;
    if state.draining.is_cancelled() {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    response
}

async fn not_found() -> Response {
    answer::error(StatusCode::NOT_FOUND, "there is nothing at this path")
}

async fn wrong_method() -> Response {
    answer::error(
        StatusCode::METHOD_NOT_ALLOWED,
        "this path has another method",
    )
}

#[cfg(test)]
mod tests;
