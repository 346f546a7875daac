//! Exchanges the token of an OpenID provider for an access token of a pool (RFC 8693).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use http_service::body;
use pool_protocol::exchange::{
    ACCESS_TOKEN, BEARER, ExchangeCode, ExchangeError, ID_TOKEN, IssuedToken, ORGANIZATION, POOL,
    TOKEN_EXCHANGE,
};
use pool_protocol::id::PoolName;
use pool_protocol::token::AccessGrant;
use tracing::{info, warn};
use url::form_urlencoded;

use crate::oidc::{IdToken, Refusal};
use crate::{FORM_TIMEOUT, Hub};

/// The default lifetime of an access token, in seconds.
const DEFAULT_LIFETIME: u64 = 3600;
const MAX_LIFETIME: u64 = 12 * 3600;
/// Larger than a form with the longest token.
const MAX_FORM_BYTES: usize = 32 * 1024;
/// The `Retry-After` if a provider cannot be reached, in seconds.
const RETRY_AFTER: u32 = 30;

pub(super) async fn exchange(State(hub): State<Arc<Hub>>, body: Body) -> Response {
    // Callers have no token yet. Where none of them can get one, their bodies are not waited for.
    if !hub.pools.current().has_oidc() {
        let error = failure(
            ExchangeCode::InvalidScope,
            "no pool of this hub trusts an OpenID provider",
        );
        let close = [(header::CONNECTION, HeaderValue::from_static("close"))];
        return (StatusCode::BAD_REQUEST, close, Json(error)).into_response();
    }
    // The spawned task completes a request to a provider even if the sender disconnects.
    let exchanged = tokio::spawn(async move {
        let too_many = || {
            let text = "the hub has too many exchanges in progress";
            failure(ExchangeCode::TemporarilyUnavailable, text)
        };
        let place = hub.exchanges.enter().ok_or_else(too_many)?;
        let reading = tokio::time::timeout(FORM_TIMEOUT, body::read(body, MAX_FORM_BYTES));
        let Ok(Ok(form)) = place.read(reading).await.ok_or_else(too_many)? else {
            return Err(invalid("the body cannot be read, or takes too long"));
        };
        hub.exchange(&form).await
    });
    let exchanged = exchanged.await.unwrap_or_else(|error| {
        warn!(%error, "a token could not be exchanged");
        let text = "the hub could not check the token";
        Err(failure(ExchangeCode::TemporarilyUnavailable, text))
    });
    let mut response = match exchanged {
        Ok(token) => Json(token).into_response(),
        Err(error) if error.error == ExchangeCode::TemporarilyUnavailable => {
            let again = [(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER))];
            (StatusCode::SERVICE_UNAVAILABLE, again, Json(error)).into_response()
        }
        Err(error) => (StatusCode::BAD_REQUEST, Json(error)).into_response(),
    };
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

impl Hub {
    async fn exchange(&self, form: &[u8]) -> Result<IssuedToken, ExchangeError> {
        let request = Request::parse(form)?;
        let pools = self.pools.current();
        let pool = pools
            .get(&request.pool)
            .filter(|pool| !pool.oidc.is_empty());
        let Some(pool) = pool else {
            let text = format!(
                "pool `{}` does not exist, or trusts no provider",
                request.pool
            );
            return Err(failure(ExchangeCode::InvalidScope, text));
        };
        if !pool.takes(&request.organization) {
            let text = format!(
                "pool `{}` takes no runs of the organization in `audience`, which is named by its id",
                request.pool
            );
            return Err(failure(ExchangeCode::InvalidTarget, text));
        }
        let accepted = async {
            let token = IdToken::parse(&request.token)?;
            token.accepted_by(&pool.oidc, &self.issuers).await
        };
        let (trust, subject) = accepted.await.map_err(|refusal| {
            warn!(pool = %request.pool, %refusal, "refused a token of a provider");
            let code = match refusal {
                Refusal::NoKeys => ExchangeCode::TemporarilyUnavailable,
                _ => ExchangeCode::InvalidRequest,
            };
            failure(code, refusal.to_string())
        })?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let grant = AccessGrant {
            pool: request.pool,
            trust: trust.digest.clone(),
            expires: now.unwrap_or_default().as_secs() + request.lifetime,
        };
        info!(
            pool = %grant.pool,
            issuer = trust.issuer,
            subject,
            seconds = request.lifetime,
            "issued an access token"
        );
        Ok(IssuedToken {
            access_token: self.keys.current().sign_access(&grant),
            issued_token_type: ACCESS_TOKEN.to_owned(),
            token_type: BEARER.to_owned(),
            expires_in: request.lifetime,
            scope: format!("{POOL}{}", grant.pool),
        })
    }
}

struct Request {
    token: String,
    organization: String,
    pool: PoolName,
    lifetime: u64,
}

impl Request {
    fn parse(form: &[u8]) -> Result<Self, ExchangeError> {
        let mut fields = BTreeMap::new();
        // A parameter without a value counts as none (RFC 6749, 3.2).
        for (name, value) in form_urlencoded::parse(form).filter(|(_, value)| !value.is_empty()) {
            if fields
                .insert(name.into_owned(), value.into_owned())
                .is_some()
            {
                return Err(invalid("a parameter is there twice"));
            }
        }
        let mut take = |name: &str| fields.remove(name);
        let mut require = |name: &str| {
            take(name).ok_or_else(|| invalid(format!("the parameter `{name}` is missing")))
        };
        if require("grant_type")? != TOKEN_EXCHANGE {
            let text = format!("`grant_type` must be `{TOKEN_EXCHANGE}`");
            return Err(failure(ExchangeCode::UnsupportedGrantType, text));
        }
        let token = require("subject_token")?;
        if require("subject_token_type")? != ID_TOKEN {
            return Err(invalid(format!(
                "`subject_token_type` must be `{ID_TOKEN}`"
            )));
        }
        let (audience, scope) = (require("audience")?, require("scope")?);
        if take("requested_token_type").is_some_and(|kind| kind != ACCESS_TOKEN) {
            return Err(invalid(format!(
                "`requested_token_type` must be `{ACCESS_TOKEN}`"
            )));
        }
        let lifetime = match take("expiration") {
            None => DEFAULT_LIFETIME,
            Some(text) => match text.parse() {
                Ok(seconds @ 1..) => MAX_LIFETIME.min(seconds),
                _ => return Err(invalid("`expiration` must be a number of seconds from 1")),
            },
        };
        let organization = audience.strip_prefix(ORGANIZATION).ok_or_else(|| {
            let text = format!("`audience` must be `{ORGANIZATION}` and the id of an organization");
            failure(ExchangeCode::InvalidTarget, text)
        })?;
        let pool = scope.strip_prefix(POOL).and_then(|pool| pool.parse().ok());
        let pool = pool.ok_or_else(|| {
            let text = format!("`scope` must be `{POOL}` and the name of a pool");
            failure(ExchangeCode::InvalidScope, text)
        })?;
        Ok(Self {
            token,
            organization: organization.to_owned(),
            pool,
            lifetime,
        })
    }
}

fn failure(error: ExchangeCode, text: impl Into<String>) -> ExchangeError {
    ExchangeError {
        error,
        error_description: text.into(),
    }
}

fn invalid(text: impl Into<String>) -> ExchangeError {
    failure(ExchangeCode::InvalidRequest, text)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const FORM: [(&str, &str); 7] = [
        ("grant_type", TOKEN_EXCHANGE),
        ("subject_token", "a.b.c"),
        ("subject_token_type", ID_TOKEN),
        ("requested_token_type", ACCESS_TOKEN),
        ("audience", "urn:mayfly:org:one"),
        ("scope", "pool:eu"),
        ("expiration", "600"),
    ];

    fn parse(change: &str, value: Option<&str>) -> Result<Request, ExchangeError> {
        let mut form = form_urlencoded::Serializer::new(String::new());
        for (name, usual) in FORM {
            if name != change {
                form.append_pair(name, usual);
            }
        }
        form.extend_pairs(value.map(|value| (change, value)));
        Request::parse(form.finish().as_bytes())
    }

    #[rstest]
    #[case("", None, 600)]
    #[case("expiration", None, 3600)]
    #[case("expiration", Some(""), 3600)]
    #[case("expiration", Some("99999999"), 43200)]
    #[case("requested_token_type", None, 600)]
    #[case("resource", Some("something"), 600)]
    fn a_complete_request_is_parsed(
        #[case] change: &str,
        #[case] value: Option<&str>,
        #[case] lifetime: u64,
    ) {
        let request = parse(change, value).unwrap();
        assert_eq!(request.lifetime, lifetime);
        assert_eq!(
            (&*request.organization, request.pool.as_str()),
            ("one", "eu")
        );
        assert_eq!(request.token, "a.b.c");
    }

    #[rstest]
    #[case("grant_type", None, ExchangeCode::InvalidRequest)]
    #[case("grant_type", Some("password"), ExchangeCode::UnsupportedGrantType)]
    #[case("subject_token", Some(""), ExchangeCode::InvalidRequest)]
    #[case("subject_token_type", Some(ACCESS_TOKEN), ExchangeCode::InvalidRequest)]
    #[case("requested_token_type", Some(ID_TOKEN), ExchangeCode::InvalidRequest)]
    #[case("audience", None, ExchangeCode::InvalidRequest)]
    #[case("audience", Some("urn:pulumi:org:one"), ExchangeCode::InvalidTarget)]
    #[case("scope", Some("runner:eu"), ExchangeCode::InvalidScope)]
    #[case("scope", Some("pool:../us"), ExchangeCode::InvalidScope)]
    #[case("expiration", Some("0"), ExchangeCode::InvalidRequest)]
    #[case("expiration", Some("soon"), ExchangeCode::InvalidRequest)]
    fn each_mistake_has_the_code_of_the_rfc(
        #[case] change: &str,
        #[case] value: Option<&str>,
        #[case] code: ExchangeCode,
    ) {
        let error = parse(change, value).map(|_| ()).unwrap_err();
        assert_eq!(error.error, code, "{error:?}");
    }

    #[test]
    fn a_repeated_parameter_is_refused() {
        let error = Request::parse(b"scope=pool:eu&scope=pool:us")
            .map(|_| ())
            .unwrap_err();
        assert_eq!(error.error_description, "a parameter is there twice");
    }
}
