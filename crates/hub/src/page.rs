//! The status page: pools, agents, the queue and runs, for people. It is read-only, works without JavaScript, and loads
//! nothing from other sites. It never contains job data.
//!
//! - [`access`] says who sees what, and [`sessions`] how long a browser does.
//! - [`overview`], [`pool`] and [`run`] turn what the store says into markup. Pure.
//! - [`json`] is the same for scripts.
//! - [`frame`] is what all pages have in common, and [`words`] how states and times are named.

mod access;
mod frame;
mod json;
mod overview;
mod pool;
mod run;
mod sessions;
#[cfg(test)]
mod tests;
mod timeline;
mod viewer;
pub(super) mod words;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use pool_protocol::id::{PoolName, TaskId};
use pool_protocol::problem::Code;
use pool_store::{Page, TaskFilter, TaskView};
use tracing::error;

use self::access::Site;
use self::overview::Summary;
use self::sessions::Sessions;
use self::viewer::Viewer;
use super::Hub;
use super::artifacts::kept;
use super::failure::Failure;
use super::forms::Forms;
use super::passing;
use super::pools::Pool;
use super::shares::Shares;

/// The largest number of rows of a list.
const ROWS: u32 = 100;
/// The most answers in progress, until they are sent. One can have some MiB.
const MAX_ANSWERS: usize = 64;
/// Those of one viewer.
const MAX_ANSWERS_OF_A_VIEWER: usize = 8;
/// Those that each viewer gets, also when others have taken all.
const ANSWERS_OF_EACH_VIEWER: usize = 2;
/// How long an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);
/// The most login forms in progress.
const MAX_LOGINS: usize = 64;
/// Forbids content of other sites, and inline styles and scripts.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; \
                      form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// The paths of the status page. If `open`, clients on this machine need no token.
pub fn router(hub: Arc<Hub>, open: bool) -> Router {
    let site = Site {
        hub,
        open,
        sessions: Arc::new(Sessions::new(SystemTime::now())),
        answers: Shares::with_reserve(MAX_ANSWERS_OF_A_VIEWER, MAX_ANSWERS, ANSWERS_OF_EACH_VIEWER),
        logins: Forms::new(MAX_LOGINS),
    };
    Router::new()
        .route("/pools", get(json::pools))
        .route("/pools/{pool}/agents", get(json::agents))
        .route("/pools/{pool}/runs", get(json::runs))
        .route("/pools/{pool}/runs/{run}", get(json::one_run))
        .route("/pools/{pool}/runs/{run}/log", get(json::log))
        .route("/ui", get(show_overview))
        .route("/ui/", get(show_overview))
        .route("/ui/pools/{pool}", get(show_pool))
        .route("/ui/runs/{task}", get(show_run))
        .route("/ui/runs/{task}/log", get(log))
        .route("/ui/login", get(access::form).post(access::login))
        .route("/ui/logout", post(access::logout))
        .layer(from_fn_with_state(site.clone(), limit))
        .layer(map_response(do_not_store))
        .route("/ui/style.css", get(style))
        .route("/ui/script.js", get(script))
        .route("/ui/icon.svg", get(icon))
        .layer(map_response(secure))
        .with_state(site)
}

/// Limits the answers of each viewer and of all that are in progress, because a viewer may read slowly. Others get the login
/// form alone.
async fn limit(State(site): State<Site>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let viewer = site.viewer(&parts);
    let is_json = is_json(&parts.uri);
    let request = Request::from_parts(parts, body);
    let Some(viewer) = viewer else {
        return next.run(request).await;
    };
    match site.answers.take(&viewer) {
        Some(share) => passing::whole(next.run(request).await, ANSWER_TIMEOUT, share).await,
        None if is_json => {
            let text = "this viewer has too many requests in progress: try again";
            Failure::new(Code::RateLimited, text).into_response()
        }
        None => PageError::Busy.into_response(),
    }
}

/// Whether the answer is JSON for scripts, and no page.
fn is_json(uri: &Uri) -> bool {
    !uri.path().starts_with("/ui")
}

/// Why a page is not shown.
#[derive(Debug)]
enum PageError {
    /// The pool or run does not exist, or the viewer may not see it.
    NotFound,
    /// The viewer has too many requests in progress.
    Busy,
    Store(pool_store::Error),
}

impl From<pool_store::Error> for PageError {
    fn from(error: pool_store::Error) -> Self {
        Self::Store(error)
    }
}

impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        let (status, title, text) = match self {
            Self::NotFound => (
                StatusCode::NOT_FOUND,
                "Not found",
                "There is nothing at this address, or your token does not show it. The hub forgets a run 24 hours after its end.",
            ),
            Self::Busy => (
                StatusCode::TOO_MANY_REQUESTS,
                "Too many requests",
                "The hub still sends you other pages. Try again in a moment.",
            ),
            Self::Store(error) => {
                error!(%error, "a page could not be shown");
                (
                    StatusCode::SERVICE_UNAVAILABLE,
                    "The store cannot be used now",
                    "The hub cannot read its store. Its log has the reason. Try again in a moment.",
                )
            }
        };
        frame::respond(status, frame::message(title, text))
    }
}

async fn show_overview(State(site): State<Site>, viewer: Viewer) -> Result<Response, PageError> {
    let summaries = site.summaries(&viewer).await?;
    let body = overview::render(&summaries);
    Ok(frame::respond(
        StatusCode::OK,
        frame::page("Pools", Some(&viewer), &body),
    ))
}

/// Returns the address at which a viewer has found the hub.
fn address(headers: &HeaderMap) -> String {
    let named = headers
        .get("x-forwarded-host")
        .or(headers.get(header::HOST));
    let is_plain = |host: &&str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte);
        !host.is_empty() && host.bytes().all(known)
    };
    let host = named.and_then(|host| host.to_str().ok()).filter(is_plain);
    let host = host.unwrap_or("hub.example.com");
    let is_here = host.starts_with("localhost") || host.starts_with("127.");
    let scheme = if is_here { "http" } else { "https" };
    format!("{scheme}://{host}")
}

async fn show_pool(
    State(site): State<Site>,
    viewer: Viewer,
    Path(name): Path<String>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, PageError> {
    let name: PoolName = name.parse().map_err(|_| PageError::NotFound)?;
    let summaries = site.summaries(&viewer).await?;
    let summary = summaries.into_iter().find(|summary| summary.pool == name);
    let summary = summary.ok_or(PageError::NotFound)?;
    let store = &site.hub.store;
    let page = |name: &str| Page {
        after: parameter(&uri, name),
        limit: ROWS,
    };
    let agents = Page {
        after: parameter(&uri, "agents"),
        limit: ROWS,
    };
    let pools = site.hub.pools.current();
    let takes_agents = viewer.is_operator() && pools.get(&name).is_some_and(Pool::takes_agents);
    let view = pool::PoolPage {
        agents: store.instances(Some(&name), agents).await?,
        open: store
            .tasks(Some(&name), TaskFilter::Open, page("after"))
            .await?,
        over: store
            .tasks(Some(&name), TaskFilter::Latest, page("before"))
            .await?,
        summary,
        new_agents: takes_agents.then(|| pool::NewAgents {
            hub: address(&headers),
            platform: site.hub.relay.public_url().map(ToString::to_string),
        }),
    };
    let title = format!("Pool {name}");
    Ok(frame::respond(
        StatusCode::OK,
        frame::page(&title, Some(&viewer), &pool::render(&view)),
    ))
}

async fn show_run(
    State(site): State<Site>,
    viewer: Viewer,
    Path(task): Path<String>,
) -> Result<Response, PageError> {
    let task = site.task(&viewer, &task).await?;
    let hub = &site.hub;
    let pools = hub.pools.current();
    let view = run::RunPage {
        position: hub.store.position(task.task).await?,
        events: hub.store.events(task.task).await?,
        log: hub.tails.since(task.task, 0),
        kept: hub.store.seen_state(task.task).await?.kept,
        is_listed: kept::is_listed(hub, &task),
        boundary: pools.get(&task.pool).map(|pool| pool.boundary),
        now: SystemTime::now(),
        task,
    };
    let title = run::title(&view.task);
    Ok(frame::respond(
        StatusCode::OK,
        frame::page(&title, Some(&viewer), &run::render(&view)),
    ))
}

/// Returns the end of a run log as text. With `from`, returns the text after that offset.
async fn log(
    State(site): State<Site>,
    viewer: Viewer,
    Path(task): Path<String>,
    uri: Uri,
) -> Result<Response, PageError> {
    let task = site.task(&viewer, &task).await?;
    Ok(log_response(&site, &task, &uri))
}

fn log_response(site: &Site, task: &TaskView, uri: &Uri) -> Response {
    let from = parameter(uri, "from").unwrap_or(0);
    let part = site.hub.tails.since(task.task, from).unwrap_or_default();
    let is_over = if task.end.is_some() { "true" } else { "false" };
    let number =
        |name: &'static str, value: u64| (HeaderName::from_static(name), HeaderValue::from(value));
    let headers = [
        (
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/plain; charset=utf-8"),
        ),
        number("log-start", part.start),
        number("log-end", part.end),
        (
            HeaderName::from_static("log-over"),
            HeaderValue::from_static(is_over),
        ),
    ];
    (headers, part.text).into_response()
}

impl Site {
    /// The pools that the viewer sees, of those that the hub serves and those that the store still knows.
    async fn summaries(&self, viewer: &Viewer) -> Result<Vec<Summary>, pool_store::Error> {
        // Viewers cause no more reads than those without a token.
        let counted = self.hub.pool_views().await;
        let mut counted = counted
            .map_err(|problem| pool_store::Error::Unavailable(problem.into()))?
            .to_vec();
        let pools = self.hub.pools.current();
        let mut summaries: Vec<Summary> = pools
            .names()
            .map(|name| {
                let at = counted.iter().position(|view| view.pool == *name);
                Summary {
                    pool: name.clone(),
                    counts: at.map(|at| counted.swap_remove(at)),
                    is_in_file: true,
                }
            })
            .collect();
        summaries.extend(counted.into_iter().map(|view| Summary {
            pool: view.pool.clone(),
            counts: Some(view),
            is_in_file: false,
        }));
        summaries.sort_by(|one, other| one.pool.cmp(&other.pool));
        summaries.retain(|summary| viewer.sees(&summary.pool));
        Ok(summaries)
    }

    /// Returns a run that the viewer sees.
    async fn task(&self, viewer: &Viewer, id: &str) -> Result<TaskView, PageError> {
        let id: TaskId = id.parse().map_err(|_| PageError::NotFound)?;
        let task = self.hub.store.task(id).await?;
        task.filter(|task| viewer.sees(&task.pool))
            .ok_or(PageError::NotFound)
    }
}

/// Returns the id of the last entry if there may be more entries.
fn more<T>(list: &[T], id: impl Fn(&T) -> String) -> Option<String> {
    (list.len() >= ROWS as usize)
        .then(|| list.last().map(id))
        .flatten()
}

/// Returns a parameter of the query. An invalid value counts as absent.
fn parameter<T: std::str::FromStr>(uri: &Uri, name: &str) -> Option<T> {
    let query = uri.query()?.as_bytes();
    let mut pairs = url::form_urlencoded::parse(query);
    let (_, value) = pairs.find(|(found, _)| found == name)?;
    value.parse().ok()
}

async fn style() -> Response {
    asset("text/css; charset=utf-8", include_str!("page/style.css"))
}

async fn script() -> Response {
    asset(
        "text/javascript; charset=utf-8",
        include_str!("page/script.js"),
    )
}

async fn icon() -> Response {
    asset("image/svg+xml", include_str!("page/icon.svg"))
}

/// Returns a file of the page. Browsers cache it for a short time, because another release of the hub may have another
/// one.
fn asset(media_type: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, media_type),
        (header::CACHE_CONTROL, "private, max-age=60"),
    ];
    (headers, text).into_response()
}

async fn do_not_store(mut response: Response) -> Response {
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

async fn secure(mut response: Response) -> Response {
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "same-origin"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}
