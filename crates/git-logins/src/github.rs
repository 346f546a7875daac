//! Tokens of a GitHub App: each is for one repository, may only read, and lasts an hour.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use backon::{ExponentialBuilder, Retryable as _};
use git_address::Address;
use reqwest::{Client, RequestBuilder, Response};
use secrecy::{ExposeSecret as _, SecretString};
use secret_stores::signed_token;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::Mutex;
use url::Url;

const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// A token is replaced so long before its end.
const MARGIN: Duration = Duration::from_mins(5);
/// Clocks differ.
const JWT_BEFORE_SECONDS: u64 = 60;
/// GitHub permits 10 minutes.
const JWT_LIFETIME_SECONDS: u64 = 9 * 60;
/// From this difference on, the clock may be why a key is refused.
const MAX_SKEW: Duration = Duration::from_mins(1);
const MAX_ANSWER_BYTES: usize = 1024 * 1024;
/// More than the repositories of a run.
const MAX_REPOSITORIES: usize = 1000;

/// A GitHub App on one server.
pub(crate) struct App {
    id: String,
    key: SecretString,
    api: Url,
    /// By repository. What was refused is not asked for again.
    known: Mutex<BTreeMap<String, Result<Token, String>>>,
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("App").field(&self.id).finish()
    }
}

#[derive(Clone)]
struct Token {
    value: SecretString,
    ends: SystemTime,
}

/// Why a request has no document as its answer.
enum Refusal {
    Unreachable,
    Status { status: u16, skew: Option<Duration> },
    Foreign,
}

impl Refusal {
    fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable => true,
            Self::Status { status, .. } => *status >= 500 || *status == 429,
            Self::Foreign => false,
        }
    }

    /// Whether a later question may have another answer. GitHub says 403 also while it limits the rate.
    fn is_for_now(&self) -> bool {
        self.is_transient() || matches!(self, Self::Status { status: 403, .. })
    }
}

#[derive(Deserialize)]
struct Installation {
    id: u64,
}

#[derive(Deserialize)]
struct AccessToken {
    token: SecretString,
    expires_at: String,
    repositories: Vec<Repository>,
}

#[derive(Deserialize)]
struct Repository {
    full_name: String,
}

impl App {
    /// # Errors
    /// If the key cannot sign.
    pub(crate) fn new(id: &str, key: &SecretString, base: &Address) -> Result<Self, String> {
        let app = Self {
            id: id.to_owned(),
            key: key.clone(),
            api: api(base)?,
            known: Mutex::default(),
        };
        app.proof().ok_or("its key is no RSA key in PEM")?;
        Ok(app)
    }

    /// A token for the repository of a path. The error says what to do.
    pub(crate) async fn token(&self, client: &Client, path: &str) -> Result<SecretString, String> {
        let (owner, name) = repository(path)
            .ok_or_else(|| format!("`{path}` is no path of a repository on a GitHub server"))?;
        let repository = format!("{owner}/{name}").to_ascii_lowercase();
        let mut known = self.known.lock().await;
        match known.get(&repository) {
            Some(Ok(token)) if SystemTime::now() + MARGIN < token.ends => {
                return Ok(token.value.clone());
            }
            Some(Err(problem)) => return Err(problem.clone()),
            _ => {}
        }
        let made = match self.make(client, owner, name).await {
            Ok(token) => Ok(token),
            Err((true, problem)) => return Err(problem),
            Err((false, problem)) => Err(problem),
        };
        if known.len() >= MAX_REPOSITORIES {
            known.clear();
        }
        known.insert(repository, made.clone());
        made.map(|token| token.value)
    }

    /// Makes a token. An error says whether another attempt may succeed.
    async fn make(
        &self,
        client: &Client,
        owner: &str,
        name: &str,
    ) -> Result<Token, (bool, String)> {
        let explain = |refusal: Refusal| {
            let text = self.explain(&refusal, owner, name);
            (refusal.is_for_now(), text)
        };
        // The installation of this owner. One with the same repository name could belong to another owner.
        let url = self.url(&["repos", owner, name, "installation"]);
        let installation: Installation = self
            .ask(|| client.get(url.clone()))
            .await
            .map_err(explain)?;
        let id = installation.id.to_string();
        let url = self.url(&["app", "installations", &id, "access_tokens"]);
        let body = json!({
            "repositories": [name],
            "permissions": { "contents": "read", "metadata": "read" },
        });
        let answer: AccessToken = self
            .ask(|| client.post(url.clone()).json(&body))
            .await
            .map_err(explain)?;
        let is_for_it = matches!(&*answer.repositories, [only] if only
            .full_name
            .eq_ignore_ascii_case(&format!("{owner}/{name}")));
        let ends = humantime::parse_rfc3339(&answer.expires_at);
        let text = answer.token.expose_secret();
        match ends {
            Ok(ends) if is_for_it && !text.is_empty() && !text.contains(char::is_control) => {
                Ok(Token {
                    value: answer.token,
                    ends,
                })
            }
            _ => Err(explain(Refusal::Foreign)),
        }
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        request: impl Fn() -> RequestBuilder,
    ) -> Result<T, Refusal> {
        let attempt = async || {
            let proof = self.proof().ok_or(Refusal::Foreign)?;
            let sent = request()
                .bearer_auth(proof.expose_secret())
                .header("accept", "application/vnd.github+json")
                .timeout(REQUEST_TIMEOUT)
                .send()
                .await;
            let answer = sent.map_err(|_| Refusal::Unreachable)?;
            if !answer.status().is_success() {
                return Err(Refusal::Status {
                    status: answer.status().as_u16(),
                    skew: skew(&answer),
                });
            }
            let body = body(answer).await?;
            serde_json::from_slice(&body).map_err(|_| Refusal::Foreign)
        };
        let retries = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(200))
            .with_max_times(2);
        attempt.retry(retries).when(Refusal::is_transient).await
    }

    /// The token that proves the App.
    fn proof(&self) -> Option<SecretString> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
        let claims = json!({
            "iat": now.saturating_sub(JWT_BEFORE_SECONDS),
            "exp": now + JWT_LIFETIME_SECONDS,
            "iss": self.id,
        });
        signed_token(&self.key, None, &claims)
    }

    fn url(&self, segments: &[&str]) -> Url {
        let mut url = self.api.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    fn explain(&self, refusal: &Refusal, owner: &str, name: &str) -> String {
        let reason = match refusal {
            Refusal::Unreachable => "the server cannot be reached: check proxy, certificates and network policy".to_owned(),
            Refusal::Foreign => "the answer is not one of GitHub's interface".to_owned(),
            Refusal::Status { status: 300..=399, .. } => {
                "the server redirects: if the repository has another name now, use that".to_owned()
            }
            Refusal::Status { status: 401, skew } => {
                let clock = skew.map_or_else(String::new, |skew| {
                    format!(", and its clock differs by {} s", skew.as_secs())
                });
                format!("the server refuses the key: check the id and the key of the App{clock}")
            }
            Refusal::Status { status: 404, .. } => {
                "the App is not installed there, or there is no such repository".to_owned()
            }
            Refusal::Status { status: 422, .. } => {
                "the App's installation does not have this repository, or not the right to read its contents".to_owned()
            }
            Refusal::Status { status, .. } => format!("the server answers with status {status}"),
        };
        let (app, host) = (&self.id, self.api.host_str().unwrap_or_default());
        format!("no token of the GitHub App `{app}` for `{owner}/{name}` from `{host}`: {reason}")
    }
}

/// Where the interface of a server is.
fn api(base: &Address) -> Result<Url, String> {
    let host = base.host();
    let text = if host == "github.com" {
        "https://api.github.com".to_owned()
    } else if host.ends_with(".ghe.com") {
        format!("https://api.{host}")
    } else {
        format!("{}/api/v3", base.origin().unwrap_or_default())
    };
    Url::parse(&text).map_err(|error| error.to_string())
}

/// Owner and name in the path of a repository, or of something below it.
fn repository(path: &str) -> Option<(&str, &str)> {
    let mut segments = path.trim_matches('/').split('/');
    let (owner, name) = (segments.next()?, segments.next()?);
    let name = name.strip_suffix(".git").unwrap_or(name);
    let is_name = |text: &str| {
        !text.is_empty()
            && text != "."
            && text != ".."
            && text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    };
    (is_name(owner) && is_name(name)).then_some((owner, name))
}

fn skew(answer: &Response) -> Option<Duration> {
    let theirs = answer.headers().get("date")?.to_str().ok()?;
    let theirs = httpdate::parse_http_date(theirs).ok()?;
    let skew = SystemTime::now()
        .duration_since(theirs)
        .unwrap_or_else(|behind| behind.duration());
    (skew > MAX_SKEW).then_some(skew)
}

async fn body(mut answer: Response) -> Result<Vec<u8>, Refusal> {
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(|_| Refusal::Unreachable)? {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_ANSWER_BYTES {
            return Err(Refusal::Foreign);
        }
    }
    Ok(body)
}

#[cfg(test)]
mod tests;
