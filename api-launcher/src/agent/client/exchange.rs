//! Access tokens of the pool, in exchange for the token of an OpenID provider, which a file has. The kubelet replaces that
//! file, so it is read for each exchange. Its token goes to the exchange alone.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pool_protocol::exchange::{
    ACCESS_TOKEN, ExchangeError, ID_TOKEN, IssuedToken, ORGANIZATION, POOL, TOKEN_EXCHANGE,
    TokenExchange,
};
use pool_protocol::id::PoolName;
use runtime::regular_file;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::Value;
use tokio::sync::Mutex;
use tracing::{info, warn};
use url::form_urlencoded;

use super::answer::{Answer, Failure};

/// More than any token has.
const MAX_BYTES: u64 = 64 * 1024;
/// How long an agent whose token is still good waits after an exchange that failed.
const AGAIN: Duration = Duration::from_secs(30);

/// What is exchanged for what.
#[derive(Clone, Debug)]
pub(crate) struct ExchangeSettings {
    /// File with the token of the provider.
    pub(crate) file: PathBuf,
    /// Id of an organization of the pool.
    pub(crate) organization: String,
    pub(crate) pool: PoolName,
    /// For how long access tokens are wanted, in seconds.
    pub(crate) expiration: u64,
}

/// Gets access tokens, and keeps one while it is good.
#[derive(Debug)]
pub(super) struct Exchange {
    settings: ExchangeSettings,
    current: Mutex<Option<Current>>,
}

#[derive(Debug)]
struct Current {
    token: SecretString,
    renew: Instant,
    expires: Instant,
}

impl Exchange {
    pub(super) fn new(settings: ExchangeSettings) -> Self {
        Self {
            settings,
            current: Mutex::default(),
        }
    }

    /// Returns an access token. `send` makes one attempt to exchange, with this form.
    pub(super) async fn token(
        &self,
        send: impl AsyncFnOnce(String) -> Result<Answer, Failure>,
    ) -> Result<SecretString, Failure> {
        let mut current = self.current.lock().await;
        if let Some(known) = current
            .as_ref()
            .filter(|known| Instant::now() < known.renew)
        {
            return Ok(known.token.clone());
        }
        let requested = Instant::now();
        let exchanged = async { self.read(&send(self.form()?).await?) };
        match exchanged.await {
            Ok(issued) => {
                info!(seconds = issued.expires_in, "exchanged the OIDC token");
                let lifetime = Duration::from_secs(issued.expires_in);
                let token = SecretString::from(issued.access_token);
                *current = Some(Current {
                    token: token.clone(),
                    renew: requested + lifetime.mul_f64(share(fastrand::f64())),
                    expires: requested + lifetime,
                });
                Ok(token)
            }
            Err(failure) => match current.as_mut() {
                Some(known) if Instant::now() < known.expires => {
                    warn!(%failure, "could not renew the access token, which is still good");
                    known.renew = Instant::now() + AGAIN;
                    Ok(known.token.clone())
                }
                _ => Err(failure),
            },
        }
    }

    /// The hub does not accept this token.
    pub(super) async fn forget(&self, token: &SecretString) {
        let mut current = self.current.lock().await;
        let is_it = |known: &Current| known.token.expose_secret() == token.expose_secret();
        if current.as_ref().is_some_and(is_it) {
            *current = None;
        }
    }

    fn form(&self) -> Result<String, Failure> {
        let settings = &self.settings;
        let text = regular_file::read_text(&settings.file, MAX_BYTES).map_err(|error| {
            let file = settings.file.display();
            Failure::Unauthorized(format!(
                "could not read the OIDC token in `{file}`: {error}"
            ))
        })?;
        let exchange = TokenExchange {
            grant_type: TOKEN_EXCHANGE.to_owned(),
            subject_token: text.trim().to_owned(),
            subject_token_type: ID_TOKEN.to_owned(),
            requested_token_type: Some(ACCESS_TOKEN.to_owned()),
            audience: format!("{ORGANIZATION}{}", settings.organization),
            scope: format!("{POOL}{}", settings.pool),
            expiration: Some(settings.expiration),
        };
        let fields = serde_json::to_value(&exchange).expect("the form is plain");
        let mut form = form_urlencoded::Serializer::new(String::new());
        for (name, value) in fields.as_object().into_iter().flatten() {
            match value {
                Value::String(text) => form.append_pair(name, text),
                other => form.append_pair(name, &other.to_string()),
            };
        }
        Ok(form.finish())
    }

    fn read(&self, answer: &Answer) -> Result<IssuedToken, Failure> {
        let error: Option<ExchangeError> = serde_json::from_slice(&answer.body).ok();
        match (answer.status, error) {
            (400, Some(error)) => Err(Failure::Unauthorized(format!(
                "the OIDC token in `{}` is not exchanged: {}",
                self.settings.file.display(),
                error.error_description
            ))),
            (503, Some(error)) => Err(Failure::Busy {
                wait: answer.retry_after.unwrap_or(AGAIN),
                text: error.error_description,
            }),
            _ => {
                let issued = answer.read()?;
                issued.ok_or_else(|| Failure::Unreachable("the exchange has no answer".to_owned()))
            }
        }
    }
}

/// After which share of its lifetime a token is renewed: 80 %, more or less, so that agents do not all ask at once.
fn share(random: f64) -> f64 {
    0.75 + random / 10.0
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn exchange(file: PathBuf) -> Exchange {
        Exchange::new(ExchangeSettings {
            file,
            organization: "one".to_owned(),
            pool: "eu".parse().unwrap(),
            expiration: 600,
        })
    }

    fn answer(status: u16, body: &str) -> Answer {
        Answer {
            status,
            retry_after: None,
            body: body.as_bytes().to_vec(),
        }
    }

    fn issued(token: &str, seconds: u64) -> Answer {
        let body = format!(
            r#"{{"access_token":"{token}","issued_token_type":"x","token_type":"Bearer","expires_in":{seconds},"scope":"pool:eu"}}"#
        );
        answer(200, &body)
    }

    #[tokio::test]
    async fn a_token_is_kept_until_it_is_refused_and_the_file_is_read_for_each_exchange() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let exchange = exchange(file.clone());
        for (content, name) in [("first.a.b\n", "one"), ("second.a.b", "two")] {
            fs::write(&file, content).unwrap();
            let sent = async |form: String| {
                let sent = format!("subject_token={}&", content.trim());
                assert!(
                    form.contains(&sent) && form.contains("expiration=600"),
                    "{form}"
                );
                Ok(issued(name, 600))
            };
            let token = exchange.token(sent).await.unwrap();
            assert_eq!(token.expose_secret(), name);
            let kept = exchange
                .token(async |_| panic!("it is kept"))
                .await
                .unwrap();
            exchange.forget(&"another".into()).await;
            let still = exchange
                .token(async |_| panic!("it is kept"))
                .await
                .unwrap();
            assert_eq!(kept.expose_secret(), still.expose_secret());
            exchange.forget(&token).await;
        }
    }

    #[tokio::test]
    async fn an_exchange_that_fails_says_why_and_shows_no_token() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let exchange = exchange(file.clone());
        let failure = exchange
            .token(async |_| panic!("nothing to send"))
            .await
            .unwrap_err();
        assert!(failure.to_string().contains("could not read"), "{failure}");
        fs::write(&file, "planted.a.b").unwrap();
        let refused = r#"{"error":"invalid_request","error_description":"the token has expired"}"#;
        let failure = exchange
            .token(async |_| Ok(answer(400, refused)))
            .await
            .unwrap_err();
        let told = failure.to_string();
        assert!(
            told.contains("the token has expired") && !told.contains("planted"),
            "{told}"
        );
        assert!(matches!(failure, Failure::Unauthorized(_)));
        let away = r#"{"error":"temporarily_unavailable","error_description":"the keys"}"#;
        let failure = exchange
            .token(async |_| Ok(answer(503, away)))
            .await
            .unwrap_err();
        let text = "the keys".to_owned();
        assert_eq!(failure, Failure::Busy { wait: AGAIN, text });
    }

    #[tokio::test]
    async fn a_good_token_outlives_an_exchange_that_fails() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        fs::write(&file, "a.b.c").unwrap();
        let exchange = exchange(file);
        exchange
            .token(async |_| Ok(issued("one", 600)))
            .await
            .unwrap();
        exchange.current.lock().await.as_mut().unwrap().renew = Instant::now();
        let token = exchange
            .token(async |_| Ok(answer(502, "<html>")))
            .await
            .unwrap();
        assert_eq!(token.expose_secret(), "one");
        // It is not requested again at once.
        exchange.token(async |_| panic!("too soon")).await.unwrap();
    }

    #[test]
    fn tokens_are_renewed_at_about_80_percent() {
        assert!(share(0.0) >= 0.75 && share(1.0) <= 0.85);
    }
}
