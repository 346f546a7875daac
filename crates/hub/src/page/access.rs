//! Decides who sees what. The holder of a pool token sees its own pool. An operator sees all pools. Operators have a
//! token, or a trusted proxy names them. A browser logs in with a token and gets a session, which ends with its token.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::body::Body;
use axum::extract::{ConnectInfo, FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use http_service::{bearer, body};
use pool_protocol::id::PoolName;
use pool_protocol::problem::Code;
use pool_protocol::token::{OperatorToken, PoolToken};
use url::form_urlencoded;

use super::sessions::{LIFETIME, Sessions};
use super::viewer::Viewer;
use super::{frame, is_json};
use crate::failure::Failure;
use crate::forms::Forms;
use crate::pools::Pools;
use crate::shares::Shares;
use crate::{FORM_TIMEOUT, Hub};

const COOKIE: &str = "mayfly_session";
/// Means all pools in a session.
const ALL: &str = "*";
const HOME: &str = "/ui";
/// Headers that only proxies send, beside `X-Forwarded…`.
const PROXY_HEADERS: [&str; 7] = [
    "forwarded",
    "via",
    "x-real-ip",
    "x-original-forwarded-for",
    "x-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
];
/// The largest form.
const MAX_FORM_BYTES: usize = 4096;

/// The state of the page handlers.
#[derive(Clone, Debug)]
pub(super) struct Site {
    pub(super) hub: Arc<Hub>,
    /// Clients on this machine need no token.
    pub(super) open: bool,
    pub(super) sessions: Arc<Sessions>,
    /// The answers in progress.
    pub(super) answers: Arc<Shares<Viewer>>,
    /// The login forms in progress.
    pub(super) logins: Arc<Forms>,
}

impl FromRequestParts<Site> for Viewer {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, site: &Site) -> Result<Self, Response> {
        site.viewer(parts).ok_or_else(|| {
            if !is_json(&parts.uri) {
                return login_required(&parts.uri, None);
            }
            let text = "the request has no token of this pool or of an operator that is good now";
            Failure::new(Code::ExecutorAuthenticationFailed, text).into_response()
        })
    }
}

impl Site {
    pub(super) fn viewer(&self, parts: &Parts) -> Option<Viewer> {
        let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>();
        let peer = peer.map(|ConnectInfo(peer)| peer.ip().to_canonical());
        // The `Host` header counts too, because another site can let its own name resolve to this machine. A proxy on this
        // machine has clients elsewhere.
        let is_on_this_machine = peer.is_some_and(|peer| peer.is_loopback())
            && is_local(&parts.headers)
            && !is_forwarded(&parts.headers);
        if self.open && is_on_this_machine {
            return Some(Viewer::Open);
        }
        let pools = self.hub.pools.current();
        if let Some(name) = peer.and_then(|peer| named(&pools, peer, &parts.headers)) {
            return Some(Viewer::Named(name));
        }
        let now = SystemTime::now();
        let authorization = parts.headers.get(header::AUTHORIZATION);
        if let Some(token) = authorization.and_then(|value| bearer(value.as_bytes())) {
            return Credential::of_token(token)
                .filter(|credential| credential.is_valid(&pools, now))
                .map(Credential::viewer);
        }
        let keys = self.hub.keys.current();
        let session = keys.verify_session(cookie(&parts.headers)?)?;
        Credential::parse(self.sessions.credential(session, now)?)
            .filter(|credential| credential.is_valid(&pools, now))
            .map(Credential::viewer)
    }
}

/// The pool and the digest of a token.
#[derive(Debug, PartialEq, Eq)]
struct Credential {
    /// `None`: all pools.
    pool: Option<PoolName>,
    digest: String,
}

impl Credential {
    fn of_token(text: &str) -> Option<Self> {
        if let Some(token) = OperatorToken::parse(text) {
            return Some(Self {
                pool: None,
                digest: token.digest(),
            });
        }
        let token = PoolToken::parse(text).ok()?;
        Some(Self {
            pool: Some(token.pool().clone()),
            digest: token.digest(),
        })
    }

    /// Returns the credential as it is in a session.
    fn to_text(&self) -> String {
        let pool = self.pool.as_ref().map_or(ALL, PoolName::as_str);
        format!("{pool}.{}", self.digest)
    }

    fn parse(text: &str) -> Option<Self> {
        let (pool, digest) = text.split_once('.')?;
        let pool = match pool {
            ALL => None,
            name => Some(name.parse().ok()?),
        };
        Some(Self {
            pool,
            digest: digest.to_owned(),
        })
    }

    /// Returns whether the file of the pools still contains the token.
    fn is_valid(&self, pools: &Pools, now: SystemTime) -> bool {
        pools.has_digest(self.pool.as_ref(), &self.digest, now)
    }

    fn viewer(self) -> Viewer {
        self.pool.map_or(Viewer::Operator, Viewer::Pool)
    }
}

/// Handles a direct request for the login form.
pub(super) async fn form(State(site): State<Site>, uri: Uri, parts: Parts) -> Response {
    if site.viewer(&parts).is_some() {
        return redirect(HOME);
    }
    frame::respond(StatusCode::OK, frame::login(&next_of(&uri), None))
}

/// Handles the login: exchanges a token for a session.
pub(super) async fn login(State(site): State<Site>, headers: HeaderMap, body: Body) -> Response {
    let home = Uri::from_static(HOME);
    if is_cross_site(&headers) {
        return login_required(
            &home,
            Some("The form was sent by another site. Log in here."),
        );
    }
    let read = async {
        let place = site.logins.enter()?;
        let reading = tokio::time::timeout(FORM_TIMEOUT, body::read(body, MAX_FORM_BYTES));
        place.read(reading).await
    };
    let Some(Ok(Ok(form))) = read.await else {
        return login_required(&home, Some("The form could not be read. Try again."));
    };
    let field = |name: &str| {
        let mut fields = form_urlencoded::parse(&form);
        let found = fields.find(|(field, _)| field == name);
        found.map(|(_, value)| value.trim().to_owned())
    };
    let next = field("next").unwrap_or_default();
    let next = if is_page(&next) { &next } else { HOME };
    let now = SystemTime::now();
    let credential = field("token").and_then(|token| Credential::of_token(&token));
    let pools = site.hub.pools.current();
    let Some(credential) = credential.filter(|credential| credential.is_valid(&pools, now)) else {
        let text = "The token is unknown, has expired, was removed, or was not copied completely.";
        let page = frame::login(next, Some(text));
        return frame::respond(StatusCode::UNAUTHORIZED, page);
    };
    let session = site.sessions.begin(&credential.to_text(), now);
    let session = site.hub.keys.current().sign_session(&session);
    with_cookie(redirect(next), &session, LIFETIME, &headers)
}

/// Handles the logout: ends the session, and removes it from the browser.
pub(super) async fn logout(State(site): State<Site>, headers: HeaderMap) -> Response {
    if is_cross_site(&headers) {
        return redirect(HOME);
    }
    if let Some(cookie) = cookie(&headers)
        && let Some(session) = site.hub.keys.current().verify_session(cookie)
    {
        site.sessions.end(session, SystemTime::now());
    }
    with_cookie(redirect("/ui/login"), "", Duration::ZERO, &headers)
}

/// Returns the login form for a page that needs a token.
fn login_required(uri: &Uri, problem: Option<&str>) -> Response {
    let page = frame::login(&next_of(uri), problem);
    let mut response = frame::respond(StatusCode::UNAUTHORIZED, page);
    let scheme = HeaderValue::from_static("Bearer");
    response
        .headers_mut()
        .insert(header::WWW_AUTHENTICATE, scheme);
    response
}

fn redirect(path: &str) -> Response {
    (StatusCode::SEE_OTHER, [(header::LOCATION, path)]).into_response()
}

fn with_cookie(
    mut response: Response,
    value: &str,
    age: Duration,
    headers: &HeaderMap,
) -> Response {
    // Browsers keep no `Secure` cookie of a plain connection; without TLS the page is for this machine alone.
    let secure = if is_plain(headers) { "" } else { "; Secure" };
    let cookie = format!(
        "{COOKIE}={value}; Path={HOME}; Max-Age={}; HttpOnly; SameSite=Strict{secure}",
        age.as_secs()
    );
    if let Ok(cookie) = HeaderValue::try_from(cookie) {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}

/// Returns the path to open after the login.
fn next_of(uri: &Uri) -> String {
    let path = uri.path();
    let path = if is_page(path) { path } else { HOME };
    path.to_owned()
}

/// Returns whether this is the path of a page of this site.
fn is_page(path: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-');
    let is_below = path == HOME || path.starts_with("/ui/pools/") || path.starts_with("/ui/runs/");
    is_below && !path.ends_with("/log") && path.bytes().all(is_plain)
}

/// Returns the operator whom the trusted proxy names.
fn named(pools: &Pools, peer: IpAddr, headers: &HeaderMap) -> Option<String> {
    let name = headers.get(pools.trusted_header(peer)?)?;
    let name = String::from_utf8_lossy(name.as_bytes()).trim().to_owned();
    (!name.is_empty()).then_some(name)
}

/// Returns whether another site caused the request, according to the browser. Browsers send `Sec-Fetch-Site` only over TLS
/// and to this machine. Without it, `Origin` must be this site.
fn is_cross_site(headers: &HeaderMap) -> bool {
    if let Some(site) = headers.get("sec-fetch-site") {
        return site != "same-origin" && site != "none";
    }
    let Some(origin) = headers.get(header::ORIGIN) else {
        return false;
    };
    let origin = origin
        .to_str()
        .ok()
        .and_then(|origin| origin.split_once("://"));
    let is_origin =
        |host: &&str| origin.is_some_and(|(_, origin)| origin.eq_ignore_ascii_case(host));
    // A proxy may replace the `Host` header. A page of another site cannot set the other one.
    let mut hosts = ["host", "x-forwarded-host"]
        .into_iter()
        .filter_map(|name| headers.get(name)?.to_str().ok()?.split(',').next())
        .map(str::trim);
    !hosts.any(|host| is_origin(&host))
}

/// Returns whether a proxy has sent the request for another client.
fn is_forwarded(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| {
        let name = name.as_str();
        PROXY_HEADERS.contains(&name) || name.starts_with("x-forwarded")
    })
}

/// Whether the browser has a connection without TLS to this machine. A proxy with TLS may hide both: `Origin` has what the
/// browser shows.
fn is_plain(headers: &HeaderMap) -> bool {
    let origin = headers.get(header::ORIGIN);
    let is_tls = origin.is_some_and(|origin| !origin.as_bytes().starts_with(b"http://"));
    !is_tls && is_local(headers)
}

/// Whether the client asked for this machine by a name that no other machine has.
fn is_local(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST);
    let host = host.and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next(),
        None => host.split(':').next(),
    };
    let name = name.unwrap_or_default();
    let is_loopback = |ip: IpAddr| ip.is_loopback();
    name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(is_loopback)
}

fn cookie(headers: &HeaderMap) -> Option<&str> {
    let values = headers.get_all(header::COOKIE).into_iter();
    let mut pairs = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(|pair| pair.trim().split_once('='));
    pairs
        .find(|(name, _)| *name == COOKIE)
        .map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use rstest::rstest;

    use super::*;
    use crate::pools;

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_hours(500_000)
    }

    fn file(eu: &PoolToken, operator: &OperatorToken) -> Pools {
        let (eu, operator) = (eu.digest(), operator.digest());
        pools::parse(&format!(
            "pools: {{eu: {{organizations: [a], tokens: [{{id: e, sha256: {eu}}}]}}, us: {{organizations: [a]}}}}\n\
             operators:\n  tokens: [{{id: o, sha256: {operator}, expires: \"2027-01-16T00:00:00Z\"}}]\n  \
             proxy: {{header: X-User, addresses: [10.0.0.0/24, \"::1\"]}}\n"
        ))
        .unwrap()
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn a_pool_token_shows_its_pool_and_an_operator_token_all_pools() {
        let (eu, operator) = (
            PoolToken::new("eu".parse().unwrap()),
            OperatorToken::random(),
        );
        let pools = file(&eu, &operator);
        let viewer = |text: &str| {
            Credential::of_token(text)
                .filter(|credential| credential.is_valid(&pools, now()))
                .map(Credential::viewer)
        };
        let [seen, other] = ["eu", "us"].map(|name| name.parse::<PoolName>().unwrap());
        let of_pool = viewer(eu.reveal()).unwrap();
        assert!(of_pool.sees(&seen) && !of_pool.sees(&other));
        let of_all = viewer(operator.reveal()).unwrap();
        assert!(of_all.sees(&seen) && of_all.sees(&other));
        for unknown in [
            PoolToken::new("eu".parse().unwrap()).reveal(),
            PoolToken::new("us".parse().unwrap()).reveal(),
            OperatorToken::random().reveal(),
            "",
        ] {
            assert_eq!(viewer(unknown), None, "{unknown}");
        }
        let late = now() + Duration::from_hours(48);
        let expired = Credential::of_token(operator.reveal()).unwrap();
        assert!(!expired.is_valid(&pools, late));
    }

    #[test]
    fn a_session_is_valid_while_its_token_is_in_the_file() {
        let (eu, operator) = (
            PoolToken::new("eu".parse().unwrap()),
            OperatorToken::random(),
        );
        for token in [eu.reveal(), operator.reveal()] {
            let credential = Credential::of_token(token).unwrap();
            let read = Credential::parse(&credential.to_text()).unwrap();
            assert_eq!(read, credential);
            assert!(read.is_valid(&file(&eu, &operator), now()));
            let others = (
                PoolToken::new("eu".parse().unwrap()),
                OperatorToken::random(),
            );
            assert!(!read.is_valid(&file(&others.0, &others.1), now()));
        }
    }

    #[rstest]
    #[case("10.0.0.7", &[("x-user", "ada")], Some("ada"))]
    #[case("::ffff:10.0.0.7", &[("x-user", "ada")], Some("ada"))]
    #[case("::1", &[("x-user", "ada")], Some("ada"))]
    #[case("10.0.1.7", &[("x-user", "ada")], None)]
    #[case("10.0.0.7", &[("x-user", " ")], None)]
    #[case("10.0.0.7", &[("x-other", "ada")], None)]
    #[case("10.0.1.7", &[("x-user", "ada"), ("x-forwarded-for", "10.0.0.7")], None)]
    fn the_header_counts_only_from_the_proxy(
        #[case] peer: &str,
        #[case] sent: &[(&'static str, &str)],
        #[case] expected: Option<&str>,
    ) {
        let pools = file(
            &PoolToken::new("eu".parse().unwrap()),
            &OperatorToken::random(),
        );
        let found = named(&pools, peer.parse().unwrap(), &headers(sent));
        assert_eq!(found.as_deref(), expected);
    }

    #[rstest]
    #[case("localhost", true)]
    #[case("LOCALHOST:8090", true)]
    #[case("127.0.0.1:8090", true)]
    #[case("[::1]:8090", true)]
    #[case("hub.example.com", false)]
    #[case("127.0.0.1.example.com", false)]
    #[case("10.0.0.1:80", false)]
    #[case("", false)]
    fn only_names_of_this_machine_are_local(#[case] host: &str, #[case] expected: bool) {
        assert_eq!(is_local(&headers(&[("host", host)])), expected);
    }

    #[rstest]
    #[case("/ui", true)]
    #[case("/ui/pools/eu-1", true)]
    #[case("/ui/runs/0198", true)]
    #[case("/ui/runs/0198/log", false)]
    #[case("//evil.example", false)]
    #[case("/ui/pools/../../x", false)]
    #[case("/ui/pools/\\evil", false)]
    #[case("https://evil.example", false)]
    #[case("", false)]
    fn a_login_redirects_only_to_pages_of_this_site(#[case] next: &str, #[case] expected: bool) {
        assert_eq!(is_page(next), expected);
    }

    #[test]
    fn the_session_is_found_among_cookies() {
        let found = headers(&[("cookie", "a=b; mayfly_session=x.y=z; c")]);
        assert_eq!(cookie(&found), Some("x.y=z"));
        assert_eq!(cookie(&headers(&[("cookie", "xmayfly_session=1")])), None);
    }

    #[rstest]
    #[case(&[], false)]
    #[case(&[("sec-fetch-site", "same-origin"), ("origin", "https://hub.example.com")], false)]
    #[case(&[("sec-fetch-site", "none")], false)]
    #[case(&[("sec-fetch-site", "same-site")], true)]
    #[case(&[("sec-fetch-site", "cross-site"), ("origin", "http://hub:8090")], true)]
    #[case(&[("origin", "http://hub:8090")], false)]
    #[case(&[("origin", "http://HUB:8090")], false)]
    #[case(&[("origin", "http://hub:8091")], true)]
    #[case(&[("origin", "http://evil.example")], true)]
    #[case(&[("origin", "http://hub:8090.evil.example")], true)]
    #[case(&[("origin", "null")], true)]
    #[case(&[("origin", "")], true)]
    #[case(&[("origin", "https://hub.example.com"), ("x-forwarded-host", "hub.example.com, proxy")], false)]
    #[case(&[("origin", "https://evil.example"), ("x-forwarded-host", "hub.example.com")], true)]
    fn a_form_of_another_site_is_recognized(
        #[case] sent: &[(&'static str, &str)],
        #[case] expected: bool,
    ) {
        let mut all = headers(sent);
        all.insert("host", HeaderValue::from_static("hub:8090"));
        assert_eq!(is_cross_site(&all), expected);
    }

    #[rstest]
    #[case("forwarded")]
    #[case("via")]
    #[case("x-real-ip")]
    #[case("X-Forwarded-For")]
    #[case("X-Forwarded-Host")]
    #[case("X-Forwarded")]
    #[case("X-Original-Forwarded-For")]
    #[case("X-Client-IP")]
    #[case("True-Client-IP")]
    #[case("CF-Connecting-IP")]
    fn a_request_through_a_proxy_is_recognized(#[case] name: &'static str) {
        assert!(is_forwarded(&headers(&[(name, "a")])));
        assert!(!is_forwarded(&headers(&[
            ("host", "localhost"),
            ("cookie", "via=a")
        ])));
    }

    #[test]
    fn a_cookie_is_secure_unless_it_is_for_this_machine() {
        let cookie = |host| {
            let response = with_cookie(redirect(HOME), "v", LIFETIME, &headers(&[("host", host)]));
            response.headers()[header::SET_COOKIE]
                .to_str()
                .unwrap()
                .to_owned()
        };
        let remote = cookie("hub.example.com");
        assert_eq!(
            remote,
            "mayfly_session=v; Path=/ui; Max-Age=14400; HttpOnly; SameSite=Strict; Secure"
        );
        assert!(!cookie("localhost:8090").contains("Secure"));
        let behind_a_proxy = [
            ("host", "127.0.0.1:8090"),
            ("origin", "https://hub.example.com"),
        ];
        assert!(!is_plain(&headers(&behind_a_proxy)));
    }
}
