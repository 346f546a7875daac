//! Checks the connections of runs and launcher to other systems, from this machine. So errors appear before a run
//! fails.

use std::error::Error;
use std::time::Duration;

use clap::Args;
use cluster::check::CheckResult;
use job_contract::{chain, env};
use platform::redis::{Redis, RedisArgs};
use platform::terrakube::{TokenSource, token};
use reqwest::StatusCode;
use reqwest::redirect::Policy;
use runtime::handover;
use runtime::setting::{SettingError, present};
use serde_json::{Map, Value};

/// The timeout for the response of a peer.
const TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Peers")]
pub struct PeerArgs {
    /// Base URL of the platform's API, to ask whether it can be reached from here
    #[arg(long, value_name = "URL", env = env::API_URL)]
    pub api_url: Option<String>,

    #[command(flatten)]
    pub redis: RedisArgs,
}

/// Checks every configured peer.
pub(super) async fn check(args: &PeerArgs) -> Vec<CheckResult> {
    let mut results = Vec::new();
    let url = args.api_url.as_deref().map(str::trim);
    if let Some(url) = url.filter(|url| !url.is_empty()) {
        results.push(platform(url).await);
        let secret = handover::var(env::INTERNAL_SECRET);
        let tokens = present(secret.as_deref()).and_then(|secret| TokenSource::parse(secret).ok());
        if let Some(tokens) = tokens {
            results.extend(accepted_token(url, &tokens).await);
        }
    }
    match args.redis.resolve() {
        Ok(None) => {}
        Ok(Some(config)) => results.push(redis(&Redis::new(config)).await),
        Err(errors) => results.extend(errors.iter().map(unusable)),
    }
    results
}

fn unusable(error: &SettingError) -> CheckResult {
    let finding = error.to_string();
    CheckResult::failed("Redis", finding, "correct the variable that is named")
}

/// Opens a connection with the configured login and TLS, and sends one command.
async fn redis(redis: &Redis) -> CheckResult {
    let subject = format!("Redis {}", redis.address());
    match redis.ping().await {
        Ok(()) => CheckResult::ok(subject, "answers"),
        Err(error) => CheckResult::failed(
            subject,
            chain(&error),
            format!(
                "check {}, {}, password and TLS, and let launcher and runs reach it",
                env::REDIS_HOSTNAME,
                env::REDIS_PORT
            ),
        ),
    }
}

/// Every response shows that the connection works. Only the platform can judge its content.
async fn platform(url: &str) -> CheckResult {
    let subject = "platform API";
    let fix = format!(
        "set {} to the base URL of the platform's API, and let launcher and runs reach it",
        env::API_URL
    );
    let failed = |finding: String| CheckResult::failed(subject, finding, fix.as_str());
    let health = format!("{}/actuator/health", url.trim_end_matches('/'));
    let Ok(address) = reqwest::Url::parse(&health) else {
        return failed(format!("`{}` is no URL", env::API_URL));
    };
    let host = address.host_str().unwrap_or_default().to_owned();
    let asked = async {
        let client = reqwest::Client::builder().timeout(TIMEOUT).build()?;
        client.get(address).send().await
    };
    match asked.await {
        Ok(answer) if answer.status().is_server_error() => failed(format!(
            "`{host}` answers {}: it is not well",
            answer.status().as_u16()
        )),
        Ok(_) => CheckResult::ok(subject, format!("`{host}` answers")),
        // The address may contain a login.
        Err(error) => failed(format!(
            "`{host}` does not answer: {}",
            root(&error.without_url())
        )),
    }
}

/// Asks for the context of a job that cannot exist, with a token as the launcher sends it. Older releases answer with an empty
/// one, and newer ones with 404. Both do so whatever rights the token has.
async fn accepted_token(url: &str, tokens: &TokenSource) -> Vec<CheckResult> {
    let subject = "platform token";
    let url = format!("{}/context/v1/0", url.trim_end_matches('/'));
    let asked = async {
        // A redirect would send the token to another address.
        let client = reqwest::Client::builder()
            .timeout(TIMEOUT)
            .redirect(Policy::none())
            .build()?;
        let request = tokens.authorize(client.get(url), token::BRIEF);
        let answer = request.send().await?;
        Ok::<_, reqwest::Error>((answer.status(), answer.bytes().await?))
    };
    // Whether the platform answers at all is another check.
    let Ok((status, body)) = asked.await else {
        return Vec::new();
    };
    let is_refused = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
    let is_newer = status == StatusCode::NOT_FOUND;
    if is_refused {
        let fix = format!(
            "set {} to the platform's secret, let the clocks agree, and use a release of Mayfly that knows how this \
             release of Terrakube reads tokens",
            env::INTERNAL_SECRET
        );
        return vec![CheckResult::failed(subject, "is refused", fix)];
    }
    if !is_newer && !status.is_success() {
        return Vec::new();
    }
    if !may_be_context(&body) {
        let status = status.as_u16();
        let finding = format!("something in front of the platform answers {status}");
        let fix = format!(
            "set {} to the base URL of the platform's API, not of its interface, and let what is in front of it pass on \
             requests to /context",
            env::API_URL
        );
        return vec![CheckResult::failed(subject, finding, fix)];
    }
    let finding = "its signature is accepted. Its rights cannot be seen from here";
    let mut results = vec![CheckResult::ok(subject, finding)];
    if is_newer {
        let finding = "a newer release of Terrakube refuses a private one, unless its API has \
                       AgentSsrfBlockPrivateNetworks=false. This cannot be seen from here";
        results.push(CheckResult::ok("address of the launcher", finding));
    }
    results
}

/// Whether the platform may have sent this. Its context is a JSON object, and its 404 may have no body.
fn may_be_context(body: &[u8]) -> bool {
    let is_object = || serde_json::from_slice::<Map<String, Value>>(body).is_ok();
    body.trim_ascii().is_empty() || is_object()
}

/// Returns the innermost cause, because it is the most exact.
fn root(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use rstest::rstest;
    use runtime::setting::from_variables;
    use test_peers::redis::{Options, RedisServer};
    use test_platform::{Platform, Release};

    use super::*;
    use cluster::check::CheckOutcome;

    #[rstest]
    #[case::older(StatusCode::OK, "{}", 1, CheckOutcome::Ok)]
    #[case::newer(StatusCode::NOT_FOUND, "", 2, CheckOutcome::Ok)]
    #[case::proxy(StatusCode::NOT_FOUND, "<html>", 1, CheckOutcome::Failed)]
    #[case::interface(StatusCode::OK, "<html>", 1, CheckOutcome::Failed)]
    #[tokio::test]
    async fn what_is_in_front_of_a_platform_is_not_taken_for_it(
        #[case] status: StatusCode,
        #[case] body: &'static str,
        #[case] count: usize,
        #[case] outcome: CheckOutcome,
    ) {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let answer = get(move || async move { (status, body) });
        let app = axum::Router::new().route("/context/v1/0", answer);
        tokio::spawn(axum::serve(listener, app).into_future());
        let tokens = TokenSource::parse(&"QUJD".repeat(12)).unwrap();
        let results = accepted_token(&url, &tokens).await;
        assert_eq!(results.len(), count, "{results:?}");
        assert_eq!(results[0].outcome, outcome, "{results:?}");
        let is_told = results[0].finding.contains("signature is accepted");
        assert_eq!(is_told, outcome == CheckOutcome::Ok, "{results:?}");
    }

    async fn answering(status: StatusCode) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let app = axum::Router::new().route("/actuator/health", get(move || async move { status }));
        tokio::spawn(axum::serve(listener, app).into_future());
        url
    }

    async fn asked(url: &str) -> CheckResult {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let args = PeerArgs {
            api_url: Some(url.to_owned()),
            ..PeerArgs::default()
        };
        check(&args).await.remove(0)
    }

    #[rstest]
    #[case(StatusCode::OK, CheckOutcome::Ok)]
    #[case(StatusCode::UNAUTHORIZED, CheckOutcome::Ok)]
    #[case(StatusCode::SERVICE_UNAVAILABLE, CheckOutcome::Failed)]
    #[tokio::test]
    async fn a_platform_that_answers_is_there(
        #[case] status: StatusCode,
        #[case] outcome: CheckOutcome,
    ) {
        assert_eq!(asked(&answering(status).await).await.outcome, outcome);
    }

    #[tokio::test]
    async fn a_token_is_known_or_gets_a_fix_and_a_newer_platform_gets_a_hint() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        for release in Release::ALL {
            let platform = Platform::builder().release(release).start().await.unwrap();
            let tokens = TokenSource::parse(&platform.secret()).unwrap();
            let results = accepted_token(&platform.url(), &tokens).await;
            let is_ok = |result: &CheckResult| result.outcome == CheckOutcome::Ok;
            assert!(!results.is_empty() && results.iter().all(is_ok));
            let named = "AgentSsrfBlockPrivateNetworks=false";
            let is_named = results.iter().any(|result| result.finding.contains(named));
            assert_eq!(is_named, release == Release::Newest, "{results:?}");

            let wrong = TokenSource::parse(&"QUJD".repeat(12)).unwrap();
            let results = accepted_token(&platform.url(), &wrong).await;
            assert_eq!(results.len(), 1);
            assert_eq!(results[0].outcome, CheckOutcome::Failed);
            let fix = results[0].fix.as_deref().unwrap();
            assert!(fix.contains(env::INTERNAL_SECRET), "{fix}");
        }
    }

    #[tokio::test]
    async fn a_platform_that_does_not_answer_gets_a_fix_without_its_credentials() {
        for url in ["http://user:hunter2@127.0.0.1:9", "nonsense"] {
            let result = asked(url).await;
            assert_eq!(result.outcome, CheckOutcome::Failed, "{result:?}");
            let shown = format!("{result:?}");
            assert!(
                shown.contains("AzBuilderApiUrl") && !shown.contains("hunter2"),
                "{shown}"
            );
        }
    }

    async fn redis_at(port: u16, password: &str) -> CheckResult {
        let args = PeerArgs {
            redis: RedisArgs {
                redis_hostname: Some("127.0.0.1".into()),
                redis_port: Some(port.to_string().into()),
                redis_password: Some(password.to_owned().into()),
                ..RedisArgs::default()
            },
            ..PeerArgs::default()
        };
        check(&args).await.remove(0)
    }

    #[tokio::test]
    async fn a_redis_that_accepts_the_login_passes_and_another_gets_a_fix() {
        let server = RedisServer::with(Options::default().password("hunter2")).unwrap();
        let result = redis_at(server.port(), "hunter2").await;
        assert_eq!(result.outcome, CheckOutcome::Ok, "{result:?}");
        let result = redis_at(server.port(), "hunter3").await;
        assert_eq!(result.outcome, CheckOutcome::Failed);
        assert!(!format!("{result:?}").contains("hunter"), "{result:?}");
        let port = server.port();
        drop(server);
        let result = redis_at(port, "hunter2").await;
        assert_eq!(result.outcome, CheckOutcome::Failed);
        assert!(result.fix.unwrap().contains(env::REDIS_HOSTNAME));
    }

    #[tokio::test]
    async fn a_setting_of_redis_that_cannot_be_used_is_named() {
        let args = PeerArgs {
            redis: from_variables(&[(env::REDIS_HOSTNAME, "redis"), (env::REDIS_PORT, "many")]),
            ..PeerArgs::default()
        };
        let results = check(&args).await;
        assert_eq!(results.len(), 1);
        assert!(results[0].finding.contains(env::REDIS_PORT), "{results:?}");
    }

    #[tokio::test]
    async fn what_is_not_configured_is_not_checked() {
        assert_eq!(check(&PeerArgs::default()).await, []);
    }
}
