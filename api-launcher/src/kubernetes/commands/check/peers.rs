//! Checks the connections of runs and launcher to other systems, from this machine. So errors appear before a run
//! fails.

use std::error::Error;
use std::time::Duration;

use clap::Args;
use cluster::check::CheckResult;
use job_contract::{chain, env};
use platform::redis::{Redis, RedisArgs};
use runtime::setting::SettingError;

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
    use axum::http::StatusCode;
    use axum::routing::get;
    use rstest::rstest;
    use runtime::setting::from_variables;
    use test_peers::redis::{Options, RedisServer};

    use super::*;
    use cluster::check::CheckOutcome;

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
