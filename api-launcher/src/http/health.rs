//! The health paths of a stock executor (contract 2.7), and the metrics. They need no token, so they contain only states,
//! numbers, and why a launcher is not ready.

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use http_service::{CONTENT_TYPE, Readiness};
use serde_json::json;

use super::AppState;
use super::answer::json_body;

/// The launcher is alive if it responds.
pub(super) async fn liveness() -> Response {
    status(StatusCode::OK, "UP")
}

/// Responds whether a dispatch would be accepted. Running jobs do not matter: there is a queue.
pub(super) async fn readiness(State(state): State<AppState>) -> Response {
    if state.draining.is_cancelled() {
        return status(StatusCode::SERVICE_UNAVAILABLE, "OUT_OF_SERVICE");
    }
    let target = state.target.readiness().await;
    let hub = match &state.hub {
        Some(hub) => hub.readiness().await,
        None => Readiness::Ready,
    };
    match target.and(hub) {
        Readiness::Ready => status(StatusCode::OK, "UP"),
        // A launcher that is not ready gets no dispatch, and then cannot report the reason to the platform.
        Readiness::Impaired(reason) => explained(StatusCode::OK, "UP", &reason),
        Readiness::NotReady(reason) => {
            tracing::warn!(reason, "not ready");
            explained(StatusCode::SERVICE_UNAVAILABLE, "DOWN", &reason)
        }
    }
}

/// All answers of a second share one text, also those that their clients do not read.
pub(super) async fn prometheus(State(state): State<AppState>) -> Response {
    let render = Box::pin(async {
        if let Some(hub) = &state.hub {
            hub.measure().await;
        }
        Bytes::from(state.metrics.render())
    });
    let text = state.rendered.get(render).await;
    let mut response = text.into_response();
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    response
}

fn explained(code: StatusCode, word: &str, reason: &str) -> Response {
    json_body(code, json!({"status": word, "problem": reason}).to_string())
}

fn status(code: StatusCode, word: &str) -> Response {
    json_body(code, format!(r#"{{"status":"{word}"}}"#))
}
