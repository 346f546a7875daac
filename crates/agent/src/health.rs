//! Health checks: whether the agent is alive, and whether it reaches the hub.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;

use super::Agent;

/// The agent is not ready if the hub was not reached for so long.
const SILENCE: Duration = Duration::from_mins(1);

pub(super) fn router(agent: Arc<Agent>) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readiness))
        .with_state(agent)
}

async fn readiness(State(agent): State<Arc<Agent>>) -> (StatusCode, String) {
    match problem(&agent) {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

pub(super) fn problem(agent: &Agent) -> Option<String> {
    let (silence, problem) = agent.client.silence();
    unready(silence, problem)
}

fn unready(silence: Option<Duration>, problem: Option<String>) -> Option<String> {
    problem.or_else(|| match silence {
        None => Some("the hub was not reached yet".to_owned()),
        Some(silence) => (silence >= SILENCE)
            .then(|| format!("the hub was not reached for {} s", silence.as_secs())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_is_ready_while_the_hub_responds_and_accepts_the_token() {
        assert_eq!(unready(Some(Duration::from_millis(59_999)), None), None);
        let reason = unready(Some(Duration::from_mins(1)), None).unwrap();
        assert_eq!(reason, "the hub was not reached for 60 s");
        let reason = unready(None, None).unwrap();
        assert_eq!(reason, "the hub was not reached yet");
        let problem = Some("the hub does not accept the token: revoked".to_owned());
        assert_eq!(unready(Some(Duration::ZERO), problem.clone()), problem);
        assert_eq!(unready(None, problem.clone()), problem);
    }
}
