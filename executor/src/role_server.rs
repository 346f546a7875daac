//! Gives the session of a deploy role to the tool and scripts, as the credentials endpoint of a container does. It renews the session
//! long before its end. If AWS does not renew it, the last session is used until its end.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use run_log::LogWriter;
use runtime::lock;
use secrecy::{ExposeSecret, SecretString};
use secret_stores::http::Http;
use serde_json::json;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use crate::deploy_role::{DeployRole, Session};
use crate::loopback::{self, Body, Loopback, is_same, status, whole};

const PATH: &str = "/session";
/// The shortest time from one request for a session to the next, whether it failed or not. By a clock that is ahead, each session is
/// over when it comes.
const MIN_PAUSE: Duration = Duration::from_secs(30);

/// The server of one run. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct RoleServer {
    loopback: Loopback,
    token: SecretString,
    _renewal: AbortOnDropHandle<()>,
}

/// What requests get.
#[derive(Debug)]
struct Sessions {
    token: SecretString,
    last: Mutex<Session>,
}

impl RoleServer {
    /// Starts the server on a free port, with a first session.
    pub(crate) fn start(
        role: DeployRole,
        http: Http,
        first: Session,
        log: LogWriter,
    ) -> io::Result<Self> {
        let token = loopback::new_password();
        let sessions = Arc::new(Sessions {
            token: token.clone(),
            last: Mutex::new(first),
        });
        let served = Arc::clone(&sessions);
        let answer = move |request: Request<Incoming>| {
            let answer = served.answer(&request);
            async move { answer }
        };
        Ok(Self {
            loopback: Loopback::start(answer)?,
            token,
            _renewal: AbortOnDropHandle::new(tokio::spawn(renew(role, http, sessions, log))),
        })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}{PATH}", self.loopback.address())
    }

    pub(crate) const fn token(&self) -> &SecretString {
        &self.token
    }
}

impl Sessions {
    fn answer(&self, request: &Request<Incoming>) -> Response<Body> {
        let given = request.headers().get(AUTHORIZATION);
        if !given.is_some_and(|given| is_same(given.as_bytes(), &self.token)) {
            return status(StatusCode::UNAUTHORIZED);
        }
        if request.method() != Method::GET || request.uri().path() != PATH {
            return status(StatusCode::NOT_FOUND);
        }
        let last = lock(&self.last);
        if last.end <= SystemTime::now() {
            return status(StatusCode::SERVICE_UNAVAILABLE);
        }
        let token = last.keys.session_token.as_ref();
        let document = json!({
            "AccessKeyId": last.keys.access_key_id,
            "SecretAccessKey": last.keys.secret_access_key.expose_secret(),
            "Token": token.map(ExposeSecret::expose_secret),
            "Expiration": humantime::format_rfc3339_seconds(last.end).to_string(),
        });
        let mut response = Response::new(whole(Bytes::from(document.to_string())));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }

    /// Half of the time that the session has left.
    fn pause(&self, role: &DeployRole) -> Duration {
        let left = lock(&self.last).end.duration_since(SystemTime::now());
        let whole = Duration::from_secs(role.seconds.into());
        left.unwrap_or_default().min(whole) / 2
    }
}

/// Replaces each session at half of its time. The first one may be replaced at once.
async fn renew(role: DeployRole, http: Http, sessions: Arc<Sessions>, log: LogWriter) {
    let mut is_failing = false;
    sleep(sessions.pause(&role)).await;
    loop {
        match role.session(&http).await {
            Ok(session) => {
                mask(&log, &session);
                *lock(&sessions.last) = session;
                is_failing = false;
                sleep(sessions.pause(&role).max(MIN_PAUSE)).await;
            }
            Err(error) => {
                warn!(%error, "the session of the deploy role could not be renewed");
                if !is_failing {
                    let text = format!(
                        "WARNING: {error}. The run uses its last session until that ends, and the executor asks again."
                    );
                    log.line(&text).await;
                }
                is_failing = true;
                sleep(MIN_PAUSE).await;
            }
        }
    }
}

/// Masks a session in the log.
pub(crate) fn mask(log: &LogWriter, session: &Session) {
    let keys = &session.keys;
    let secrets = [Some(&keys.secret_access_key), keys.session_token.as_ref()];
    log.add_secrets(
        secrets
            .iter()
            .flatten()
            .map(|secret| secret.expose_secret()),
    );
}
