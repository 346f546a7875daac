//! Tests of the exchange of OpenID tokens, and of an agent without a pool token.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::net::TcpStream;
use std::process::Command;

use integration_tests::Running;
use integration_tests::process::Stream;
use jsonwebtoken::Algorithm;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use pool_protocol::path;
use pool_protocol::problem::Code;
use pool_protocol::token::JobTokenKeys;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use test_peers::oidc::{Issuer, SigningKey, now};
use test_platform::Status;

use super::agent::ends_with;
use super::client::Client;
use super::fixture::{Fixture, Hub};

const AUDIENCE: &str = "https://hub.example.test";
const SUBJECT: &str = "system:serviceaccount:mayfly:agent";
const UNREACHABLE: &str = "https://127.0.0.1:1";
const OFFLINE: &str = "https://offline.example.test";

/// A fixture whose pool `eu` trusts providers and has no pool tokens.
struct OidcFixture {
    fixture: Fixture,
    issuer: Issuer,
    key: SigningKey,
    /// The key of a provider that the hub cannot reach.
    offline: SigningKey,
}

impl OidcFixture {
    async fn new() -> Self {
        let key = SigningKey::new("first", Algorithm::ES256);
        let offline = SigningKey::new("offline", Algorithm::EdDSA);
        let issuer = Issuer::start(&[&key]).unwrap();
        let fixture = Fixture::new().await;
        let certificate = fixture.path("issuer.pem");
        fs::write(&certificate, issuer.certificate()).unwrap();
        let fixture = fixture.with("SSL_CERT_FILE", certificate.to_str().unwrap());
        let jwks = json!({"keys": [offline.jwk]}).to_string();
        fs::write(fixture.path("jwks.json"), jwks).unwrap();
        let this = Self {
            fixture,
            issuer,
            key,
            offline,
        };
        this.trust("mayfly");
        this
    }

    /// Makes pool `eu` trust service accounts of this namespace.
    fn trust(&self, namespace: &str) {
        let (organization, url) = (self.fixture.platform.organization(), self.issuer.url());
        let subjects = format!("system:serviceaccount:{namespace}:*");
        let entry = |issuer: &str| json!({"issuer": issuer, "audiences": [AUDIENCE], "subjects": [subjects]});
        let mut offline = entry(OFFLINE);
        offline["jwks_file"] = self.fixture.path("jwks.json").to_str().into();
        let oidc = [entry(&url), entry(UNREACHABLE), offline];
        let eu = json!({"organizations": [organization], "oidc": oidc});
        let pools = json!({"pools": {"eu": eu, "us": {"organizations": ["other"]}}});
        self.fixture.replace_pools(&pools.to_string());
    }

    fn claims(&self) -> Value {
        self.issuer.claims(AUDIENCE, SUBJECT)
    }

    fn token(&self) -> String {
        self.key.sign(&self.claims())
    }

    fn claims_with(&self, name: &str, value: Value) -> Value {
        let mut claims = self.claims();
        claims[name] = value;
        claims
    }

    async fn exchange(&self, hub: &Hub, token: &str) -> (StatusCode, Value) {
        let organization = format!("urn:mayfly:org:{}", self.fixture.platform.organization());
        self.exchange_for(hub, token, &organization, "pool:eu")
            .await
    }

    async fn exchange_for(
        &self,
        hub: &Hub,
        token: &str,
        audience: &str,
        scope: &str,
    ) -> (StatusCode, Value) {
        let kind = |name: &str| format!("urn:ietf:params:oauth:token-type:{name}");
        let body = url::form_urlencoded::Serializer::new(String::new())
            .append_pair(
                "grant_type",
                "urn:ietf:params:oauth:grant-type:token-exchange",
            )
            .append_pair("subject_token", token)
            .append_pair("subject_token_type", &kind("id_token"))
            .append_pair("requested_token_type", &kind("access_token"))
            .append_pair("audience", audience)
            .append_pair("scope", scope)
            .append_pair("expiration", "600")
            .finish();
        let request = Client::new(&hub.url(), "").plain(Method::POST, path::TOKEN);
        let form = "application/x-www-form-urlencoded";
        let answer = request.header("Content-Type", form).body(body);
        let answer = answer.send().await.unwrap();
        assert_eq!(answer.headers()["cache-control"], "no-store");
        (answer.status(), answer.json().await.unwrap())
    }

    /// Returns the command of the agent with the provider's token in a file.
    fn agent(&self, hub: &str, seconds: &str) -> Command {
        let mut command = self.fixture.agent(hub);
        command
            .env_remove("MAYFLY_AGENT_TOKEN")
            .env(
                "MAYFLY_AGENT_OIDC_TOKEN_FILE",
                self.fixture.path("oidc-token"),
            )
            .env(
                "MAYFLY_AGENT_ORGANIZATION_NAME",
                self.fixture.platform.organization(),
            )
            .env("MAYFLY_AGENT_RUNNER_POOL_ID", "eu")
            .env("MAYFLY_AGENT_TOKEN_EXPIRATION", seconds);
        command
    }

    /// Replaces the token file atomically, as the kubelet does.
    fn write_token(&self, token: &str) {
        fs::write(self.fixture.path("new-token"), token).unwrap();
        fs::rename(
            self.fixture.path("new-token"),
            self.fixture.path("oidc-token"),
        )
        .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_forms_without_a_token_do_not_delay_an_exchange() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most.min(8192), most).unwrap();
    let fixture = OidcFixture::new().await;
    let hub = fixture.fixture.serve();
    let head = format!(
        "POST {} HTTP/1.1\r\nHost: hub\r\nContent-Length: 20000\r\n\r\ngrant_type=",
        path::TOKEN
    );
    for attempt in 1.. {
        let slow: Vec<_> = (0..640)
            .map(|_| {
                let mut stream = TcpStream::connect(hub.address()).unwrap();
                stream.write_all(head.as_bytes()).unwrap();
                stream
            })
            .collect();
        let token = fixture.token();
        let (status, answer) = fixture.exchange(&hub, &token).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        // It did not wait until the newest form ended. The hub ends the oldest ones if there are too many.
        let newest = slow.last().unwrap();
        newest.set_nonblocking(true).unwrap();
        let ended = newest.peek(&mut [0]);
        let kind = ended.as_ref().map_err(std::io::Error::kind);
        if kind == Err(ErrorKind::WouldBlock) {
            break;
        }
        // A form ends after seconds, also if the exchange is slow for another reason. One that waits is always too late.
        assert!(attempt < 5, "{ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_invalid_token_is_refused_with_its_reason() {
    let fixture = OidcFixture::new().await;
    let hub = fixture.fixture.serve();
    let key = &fixture.key;
    let other = SigningKey::new("second", Algorithm::ES256);
    let forger = SigningKey::new("first", Algorithm::ES256);
    let with = |name: &str, value: Value| key.sign(&fixture.claims_with(name, value));
    let none = {
        let token = fixture.token();
        let claims = token.split('.').nth(1).unwrap();
        // {"alg":"none"}
        format!("eyJhbGciOiJub25lIn0.{claims}.")
    };
    let hmac = {
        let mut header = jsonwebtoken::Header::new(Algorithm::HS256);
        header.kid = Some(key.id.clone());
        let public = jsonwebtoken::EncodingKey::from_secret(key.jwk.to_string().as_bytes());
        jsonwebtoken::encode(&header, &fixture.claims(), &public).unwrap()
    };
    for (token, status, expected) in [
        (with("exp", json!(now() - 90)), 400, "has expired"),
        (with("aud", json!("elsewhere")), 400, "another audience"),
        (
            with("sub", json!("system:serviceaccount:other:agent")),
            400,
            "does not trust the subject",
        ),
        (
            with("iss", json!("https://else.example.test")),
            400,
            "does not trust the issuer",
        ),
        (
            with("iat", json!(now() - 25 * 3600)),
            400,
            "more than 24 hours ago",
        ),
        (none, 400, "`alg` is `none`"),
        (hmac, 400, "signed with \"HS256\""),
        (other.sign(&fixture.claims()), 400, "has no key \"second\""),
        (
            forger.sign(&fixture.claims()),
            400,
            "signature of the token is wrong",
        ),
        (
            with("iss", json!(UNREACHABLE)),
            503,
            "keys of the issuer cannot be read",
        ),
        ("nonsense".to_owned(), 400, "no signed JSON Web Token"),
    ] {
        let (found, error) = fixture.exchange(&hub, &token).await;
        let text = error["error_description"].as_str().unwrap();
        assert!(text.contains(expected), "{expected}: {error}");
        assert_eq!(found.as_u16(), status, "{error}");
        let code = if status == 400 {
            "invalid_request"
        } else {
            "temporarily_unavailable"
        };
        assert_eq!(error["error"], code);
    }
    let token = fixture.token();
    let organization = format!("urn:mayfly:org:{}", fixture.fixture.platform.organization());
    for (audience, scope, code) in [
        ("urn:mayfly:org:other", "pool:eu", "invalid_target"),
        (&*organization, "pool:us", "invalid_scope"),
        (&*organization, "pool:asia", "invalid_scope"),
    ] {
        let (_, error) = fixture.exchange_for(&hub, &token, audience, scope).await;
        assert_eq!(error["error"], code, "{error}");
    }
    // The unknown keys caused no second request within a minute, and the hub still works.
    assert_eq!(fixture.issuer.reads(), 1);
    let (status, issued) = fixture.exchange(&hub, &token).await;
    assert_eq!(status, StatusCode::OK, "{issued}");
    assert_eq!(issued["token_type"], "Bearer");
    assert_eq!(issued["expires_in"], 600);
    assert_eq!(issued["scope"], "pool:eu");
    let mut claims = fixture.claims();
    claims["iss"] = json!(OFFLINE);
    let (status, _) = fixture.exchange(&hub, &fixture.offline.sign(&claims)).await;
    assert_eq!(status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_access_token_is_valid_while_the_pool_trusts_the_provider() {
    let fixture = OidcFixture::new().await;
    let hub = fixture.fixture.serve();
    let (_, issued) = fixture.exchange(&hub, &fixture.token()).await;
    let token = issued["access_token"].as_str().unwrap();
    let agent = Client::new(&hub.url(), token);
    let instance = agent.register().await;
    let forged = JobTokenKeys::new(b"another key".to_vec(), Vec::new());
    let grant = pool_protocol::token::AccessGrant {
        pool: "eu".parse().unwrap(),
        trust: token.split('.').nth(1).unwrap().to_owned(),
        expires: now() + 600,
    };
    let forged = agent.with_token(&forged.sign_access(&grant));
    let refused = forged.heartbeat(instance).await.refused();
    assert_eq!(refused, Code::ExecutorAuthenticationFailed);
    agent.heartbeat(instance).await.ok();
    // A waiting request ends too.
    let waits = agent.try_request(instance, 50, &[]);
    let (waited, ()) = tokio::join!(waits, async {
        hub.until_metric("mayfly_pool_polls_waiting 1").await;
        fixture.trust("other");
        // The hub reads the file at the next request.
        agent.heartbeat(instance).await.refused();
    });
    assert_eq!(waited.refused(), Code::ExecutorAuthenticationFailed);
    let (_, error) = fixture.exchange(&hub, &fixture.token()).await;
    assert_eq!(error["error"], "invalid_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_runs_with_a_token_file_that_rotates() {
    let fixture = OidcFixture::new().await;
    let hub = fixture.fixture.serve();
    fixture.write_token(&fixture.token());
    // The lifetime is short, so that the agent renews the token several times during a run.
    let agent = Running::start(&mut fixture.agent(&hub.url(), "3"));
    let gate = fixture.fixture.gate();
    let job = fixture.fixture.start_script(&gate);
    fixture
        .fixture
        .platform
        .until_streamed(job, "at-the-gate")
        .await;
    // From here on, the hub refuses the old token.
    fixture.trust("rotated");
    let subject = "system:serviceaccount:rotated:agent";
    fixture.write_token(&fixture.key.sign(&fixture.issuer.claims(AUDIENCE, subject)));
    tokio::task::block_in_place(|| hub.0.running.wait_for(Stream::Stderr, subject));
    gate.open().await;
    fixture
        .fixture
        .platform
        .until_job(job, Status::Completed)
        .await;
    agent.signal(Signal::SIGTERM);
    let log = ends_with(agent, 0);
    assert!(!log.contains("eyJ") && !log.contains("mfa_"), "{log}");
    assert_eq!(fixture.fixture.times_run(), 1);
    assert_eq!(fixture.issuer.reads(), 1);
}
