//! Interprets responses of the hub, and decides what follows a failure. Pure.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use pool_protocol::problem::{Code, Problem};
use pool_protocol::version::VERSION;
use serde::de::DeserializeOwned;

/// The longest pause after a temporary failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The pause while the hub does not accept the token.
const UNAUTHORIZED_PAUSE: Duration = Duration::from_secs(30);
/// The pause after a forbidden call.
const FORBIDDEN_PAUSE: Duration = Duration::from_mins(1);

/// A request that waited for so long reached the hub. A proxy has cut the connection.
const REACHED_THE_HUB: Duration = Duration::from_secs(5);

/// An answer as it came.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// The header `Retry-After`, if it contains a number of seconds.
    pub(crate) retry_after: Option<Duration>,
    pub(crate) body: Vec<u8>,
}

/// Why a call failed. Messages never contain a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// There is no response of the hub: no connection, a server error, or the page of a proxy.
    #[error("the hub cannot be reached: {0}")]
    Unreachable(String),
    #[error("the hub asks to wait for {} s: {text}", wait.as_secs())]
    Busy { wait: Duration, text: String },
    #[error("the hub does not accept the token: {0}")]
    Unauthorized(String),
    #[error("the hub refuses the agent: {0}")]
    Forbidden(String),
    /// The hub does not know this process.
    #[error("the hub does not know this agent")]
    Unregistered,
    #[error(
        "the hub does not support version {VERSION} of the protocol, which the agent uses, but {}: install an agent of the hub's \
         release", versions(*min, *max)
    )]
    Unsupported { min: Option<u32>, max: Option<u32> },
    /// A retry would fail again.
    #[error("the hub refuses the call: {0}")]
    Refused(Problem),
}

fn versions(min: Option<u32>, max: Option<u32>) -> String {
    match (min, max) {
        (Some(min), Some(max)) if min == max => format!("version {min}"),
        (Some(min), Some(max)) => format!("versions {min} to {max}"),
        _ => "others".to_owned(),
    }
}

impl Failure {
    pub(crate) const fn code(&self) -> Option<Code> {
        match self {
            Self::Refused(problem) => Some(problem.code),
            _ => None,
        }
    }
}

impl Answer {
    /// Parses the response. Returns `None` if it has no body.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<Option<T>, Failure> {
        match self.status {
            204 => Ok(None),
            200..=299 => serde_json::from_slice(&self.body)
                .map(Some)
                // The message of this error may quote the response, which may contain a token.
                .map_err(|_| self.not_from_hub()),
            _ => Err(self.failure()),
        }
    }

    fn failure(&self) -> Failure {
        let problem: Option<Problem> = serde_json::from_slice(&self.body).ok();
        let text = || match &problem {
            Some(problem) => problem.title.clone(),
            None => format!("status {}", self.status),
        };
        if let (429 | 503, Some(wait)) = (self.status, self.retry_after) {
            let wait = wait.max(Duration::from_secs(1));
            return Failure::Busy { wait, text: text() };
        }
        if self.status == 429 || self.status >= 500 {
            return Failure::Unreachable(text());
        }
        let Some(problem) = problem else {
            return self.not_from_hub();
        };
        match self.status {
            401 => Failure::Unauthorized(problem.title),
            403 => Failure::Forbidden(problem.title),
            410 => Failure::Unregistered,
            426 => Failure::Unsupported {
                min: problem.min_version,
                max: problem.max_version,
            },
            _ => Failure::Refused(problem),
        }
    }

    fn not_from_hub(&self) -> Failure {
        Failure::Unreachable(format!(
            "the answer with status {} is not the hub's: a proxy may have written it",
            self.status
        ))
    }
}

/// The pauses between the attempts of one kind of call.
#[derive(Debug, Default)]
pub(crate) struct Pauses {
    /// The pauses while the hub is unreachable.
    unreachable: Option<ExponentialBackoff>,
    unauthorized: u32,
}

impl Pauses {
    /// Returns the pause before the next attempt, or `None` if another attempt would fail too. `jitter` chooses a pause between
    /// zero and the given one.
    pub(crate) fn after(
        &mut self,
        failure: &Failure,
        jitter: impl FnOnce(Duration) -> Duration,
    ) -> Option<Duration> {
        match failure {
            Failure::Unreachable(_) => {
                let pauses = self.unreachable.get_or_insert_with(|| {
                    ExponentialBuilder::default()
                        .with_min_delay(Duration::from_secs(1))
                        .with_max_delay(LONGEST_PAUSE)
                        .without_max_times()
                        .build()
                });
                Some(jitter(pauses.next().unwrap_or(LONGEST_PAUSE)))
            }
            Failure::Busy { wait, .. } => Some(*wait),
            Failure::Unauthorized(_) => {
                self.unauthorized += 1;
                // The token file is read for each call, and may have changed.
                Some(match self.unauthorized {
                    1 => Duration::ZERO,
                    _ => UNAUTHORIZED_PAUSE,
                })
            }
            Failure::Forbidden(_) => Some(FORBIDDEN_PAUSE),
            Failure::Unregistered | Failure::Unsupported { .. } | Failure::Refused(_) => None,
        }
    }

    /// Notes how long a request waited before it failed. Some proxies end every request before the hub answers it. The
    /// pauses between such requests stay short, because no run is taken during a pause.
    pub(crate) fn waited(&mut self, time: Duration) {
        if time >= REACHED_THE_HUB {
            self.unreachable = None;
        }
    }

    /// Whether the hub did not accept the token twice in a row.
    pub(crate) const fn is_locked_out(&self) -> bool {
        self.unauthorized > 1
    }
}

/// Returns a random time between zero and this one.
pub(crate) fn jitter(most: Duration) -> Duration {
    most.mul_f64(fastrand::f64())
}

#[cfg(test)]
mod tests {
    use pool_protocol::task::TaskState;
    use rstest::rstest;
    use serde_json::Value;

    use super::*;

    fn problem(code: Code) -> Vec<u8> {
        let problem = Problem::new(code, "why").with_versions(2..=3, Some(1));
        serde_json::to_vec(&problem).unwrap()
    }

    fn answer(status: u16, retry_after: Option<u64>, body: &[u8]) -> Answer {
        Answer {
            status,
            retry_after: retry_after.map(Duration::from_secs),
            body: body.to_vec(),
        }
    }

    #[rstest]
    #[case::server_error(500, None, b"".to_vec(), Some(Duration::from_secs(1)))]
    #[case::bad_gateway(502, None, b"<html>".to_vec(), Some(Duration::from_secs(1)))]
    #[case::store(
        503,
        None,
        problem(Code::StoreUnavailable),
        Some(Duration::from_secs(1))
    )]
    #[case::wait(503, Some(7), b"<html>".to_vec(), Some(Duration::from_secs(7)))]
    #[case::wait_for_the_hub(
        503,
        Some(0),
        problem(Code::ExecutorPoolPaused),
        Some(Duration::from_secs(1))
    )]
    #[case::rate(
        429,
        Some(90),
        problem(Code::RateLimited),
        Some(Duration::from_secs(90))
    )]
    #[case::rate_of_a_proxy(429, None, b"".to_vec(), Some(Duration::from_secs(1)))]
    #[case::token(
        401,
        None,
        problem(Code::ExecutorAuthenticationFailed),
        Some(Duration::ZERO)
    )]
    #[case::token_of_a_proxy(401, None, b"<html>".to_vec(), Some(Duration::from_secs(1)))]
    #[case::forbidden(
        403,
        None,
        problem(Code::ExecutorPoolForbidden),
        Some(Duration::from_mins(1))
    )]
    #[case::forbidden_by_a_proxy(403, None, b"blocked".to_vec(), Some(Duration::from_secs(1)))]
    #[case::unknown(410, None, problem(Code::InstanceUnknown), None)]
    #[case::version(426, None, problem(Code::ExecutorProtocolVersionUnsupported), None)]
    #[case::lease(409, None, problem(Code::LeaseExpired), None)]
    #[case::request(400, None, problem(Code::RequestInvalid), None)]
    #[case::task(404, None, problem(Code::TaskNotFound), None)]
    #[case::page_not_found(404, None, b"<html>".to_vec(), Some(Duration::from_secs(1)))]
    #[case::redirect(302, None, b"".to_vec(), Some(Duration::from_secs(1)))]
    #[case::page(200, None, b"<html>sign in</html>".to_vec(), Some(Duration::from_secs(1)))]
    fn each_failure_has_its_decision(
        #[case] status: u16,
        #[case] retry_after: Option<u64>,
        #[case] body: Vec<u8>,
        #[case] expected: Option<Duration>,
    ) {
        let answer = answer(status, retry_after, &body);
        let failure = answer.read::<TaskState>().unwrap_err();
        assert_eq!(Pauses::default().after(&failure, |most| most), expected);
    }

    #[test]
    fn an_instance_that_the_hub_does_not_know_registers_again() {
        let answer = answer(410, None, &problem(Code::InstanceUnknown));
        let failure = answer.read::<TaskState>().unwrap_err();
        assert_eq!(failure, Failure::Unregistered);
    }

    #[test]
    fn a_success_has_a_body_or_none() {
        let read = |status, body: &[u8]| answer(status, None, body).read::<Value>();
        assert_eq!(read(204, b""), Ok(None));
        assert_eq!(read(200, b"1"), Ok(Some(1.into())));
    }

    #[test]
    fn the_error_does_not_quote_an_invalid_response() {
        let error = answer(200, None, br#"{"jobToken": "mfr_planted"}"#)
            .read::<TaskState>()
            .unwrap_err();
        assert!(!format!("{error} {error:?}").contains("planted"));
    }

    #[test]
    fn the_error_names_both_versions() {
        let body = problem(Code::ExecutorProtocolVersionUnsupported);
        let error = answer(426, None, &body).read::<Value>().unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("version 1") && text.contains("versions 2 to 3"),
            "{text}"
        );
    }

    #[test]
    fn pauses_grow_to_30_s_and_are_random_below_that() {
        let mut pauses = Pauses::default();
        let failure = Failure::Unreachable(String::new());
        let seconds: Vec<_> = (0..8)
            .map(|_| match pauses.after(&failure, |most| most) {
                Some(pause) => pause.as_secs(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 30, 30, 30]);
        let chosen: Vec<_> = (0..100).map(|_| jitter(LONGEST_PAUSE)).collect();
        assert!(chosen.iter().all(|pause| *pause <= LONGEST_PAUSE));
        assert!(chosen.iter().any(|pause| *pause != chosen[0]));
    }

    #[test]
    fn a_proxy_that_ends_waiting_requests_does_not_make_the_pauses_longer() {
        let mut pauses = Pauses::default();
        let failure = Failure::Unreachable(String::new());
        for (waited, pause) in [(0, 1), (4, 2), (30, 1), (30, 1), (0, 2)] {
            pauses.waited(Duration::from_secs(waited));
            let expected = Some(Duration::from_secs(pause));
            assert_eq!(pauses.after(&failure, |most| most), expected);
        }
    }

    #[test]
    fn the_token_is_tried_once_more_and_then_half_a_minute_later() {
        let mut pauses = Pauses::default();
        let failure = Failure::Unauthorized(String::new());
        for (pause, locked_out) in [(0, false), (30, true), (30, true)] {
            let expected = Some(Duration::from_secs(pause));
            assert_eq!(pauses.after(&failure, |most| most), expected);
            assert_eq!(pauses.is_locked_out(), locked_out);
        }
    }
}
