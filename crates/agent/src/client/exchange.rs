//! Exchanges the token of an OpenID provider for access tokens of the pool. The kubelet replaces the file with the
//! provider's token, so the file is read for each exchange. Its token is sent to the exchange only.

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

/// The largest token file that is read.
const MAX_BYTES: u64 = 64 * 1024;
/// The longest use of an access token, whatever the hub says.
const LONGEST: Duration = Duration::from_hours(12);
/// The pause after a failed exchange.
const RETRY_PAUSE: Duration = Duration::from_secs(30);

/// The settings of the exchange.
#[derive(Clone, Debug)]
pub(crate) struct ExchangeSettings {
    /// File with the token of the provider.
    pub(crate) file: PathBuf,
    /// The id of an organization of the pool.
    pub(crate) organization: String,
    pub(crate) pool: PoolName,
    /// The requested lifetime of access tokens, in seconds.
    pub(crate) expiration: u64,
}

/// Gets access tokens, and caches one while it is valid.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) settings: ExchangeSettings,
    current: Mutex<Option<CachedToken>>,
}

#[derive(Debug)]
struct CachedToken {
    token: SecretString,
    renew: Instant,
    expires: Instant,
}

impl Exchange {
    pub(crate) fn new(settings: ExchangeSettings) -> Self {
        Self {
            settings,
            current: Mutex::default(),
        }
    }

    /// Returns an access token. `send` sends the form of an exchange once.
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
                let lifetime = Duration::from_secs(issued.expires_in).min(LONGEST);
                let token = SecretString::from(issued.access_token);
                *current = Some(CachedToken {
                    token: token.clone(),
                    renew: requested + lifetime.mul_f64(share(fastrand::f64())),
                    expires: requested + lifetime,
                });
                Ok(token)
            }
            Err(failure) => match current.as_mut() {
                Some(known) if Instant::now() < known.expires => {
                    warn!(%failure, "could not renew the access token, which is still valid");
                    known.renew = Instant::now() + RETRY_PAUSE;
                    Ok(known.token.clone())
                }
                _ => Err(failure),
            },
        }
    }

    /// Discards the token, because the hub refuses it.
    pub(super) async fn discard(&self, token: &SecretString) {
        let mut current = self.current.lock().await;
        let is_same = |known: &CachedToken| known.token.expose_secret() == token.expose_secret();
        if current.as_ref().is_some_and(is_same) {
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
                wait: answer.retry_after.unwrap_or(RETRY_PAUSE),
                text: error.error_description,
            }),
            _ => {
                let issued = answer.read()?;
                issued.ok_or_else(|| Failure::Unreachable("the exchange has no answer".to_owned()))
            }
        }
    }
}

/// Returns the share of its lifetime after which a token is renewed: about 80 %, at random, so that agents do not all
/// renew at once.
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
    async fn a_token_is_cached_until_it_is_refused_and_each_exchange_reads_the_file() {
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
            let cached = exchange
                .token(async |_| panic!("the token is cached"))
                .await
                .unwrap();
            exchange.discard(&"another".into()).await;
            let still = exchange
                .token(async |_| panic!("the token is cached"))
                .await
                .unwrap();
            assert_eq!(cached.expose_secret(), still.expose_secret());
            exchange.discard(&token).await;
        }
    }

    #[tokio::test]
    async fn the_error_of_an_exchange_has_the_reason_and_no_token() {
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
        let shown = failure.to_string();
        assert!(
            shown.contains("the token has expired") && !shown.contains("planted"),
            "{shown}"
        );
        assert!(matches!(failure, Failure::Unauthorized(_)));
        let unavailable = r#"{"error":"temporarily_unavailable","error_description":"the keys"}"#;
        let failure = exchange
            .token(async |_| Ok(answer(503, unavailable)))
            .await
            .unwrap_err();
        let text = "the keys".to_owned();
        assert_eq!(
            failure,
            Failure::Busy {
                wait: RETRY_PAUSE,
                text
            }
        );
    }

    #[tokio::test]
    async fn a_valid_token_is_used_after_a_failed_exchange() {
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
        // No further exchange follows at once.
        exchange.token(async |_| panic!("too soon")).await.unwrap();
    }

    #[tokio::test]
    async fn no_lifetime_that_a_hub_says_does_harm() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        fs::write(&file, "a.b.c").unwrap();
        for endless in [u64::MAX, 10 * 365 * 86_400] {
            let exchange = exchange(file.clone());
            let issued = async |_| Ok(issued("one", endless));
            exchange.token(issued).await.unwrap();
            let renew = exchange.current.lock().await.as_ref().unwrap().renew;
            assert!(renew <= Instant::now() + LONGEST);
        }
        let exchange = exchange(file);
        for name in ["one", "two"] {
            let issued = async |_| Ok(issued(name, 0));
            let token = exchange.token(issued).await.unwrap();
            assert_eq!(token.expose_secret(), name);
        }
    }

    #[test]
    fn tokens_are_renewed_at_about_80_percent() {
        assert!(share(0.0) >= 0.75 && share(1.0) <= 0.85);
    }
}
