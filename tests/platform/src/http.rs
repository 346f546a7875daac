//! The HTTP interface. It records every request, applies ordered faults, checks the token, and calls the handler. A refusal
//! names the broken rule.

mod documents;
mod plain;
mod reports;
mod rights;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Method, Request, Response, header};
use hyper::body::Incoming;
use serde_json::{Value, json};

use self::rights::About;
use crate::faults::Effect;
use crate::ledger::{self, Actor, Rule};
use crate::platform::Shared;
use crate::token::Bearer;

/// A token that lives longer is noted.
const TOKEN_LIFETIME: Duration = Duration::from_mins(15);
const BODY: usize = 64 * 1024 * 1024;
const JSON_API: &str = "application/vnd.api+json";
const JSON: &str = "application/json";

/// The connection of a request ends without an answer.
#[derive(Debug, thiserror::Error)]
#[error("connection dropped")]
pub(crate) struct Dropped;

/// A request, read to its end.
struct Call {
    method: Method,
    path: String,
    headers: HeaderMap,
    body: Bytes,
}

/// An answer that refuses a request.
#[derive(Debug)]
struct Refusal {
    status: u16,
    /// None if the request was no mistake.
    rule: Option<Rule>,
    why: String,
}

type Answer = Result<Response<Body>, Refusal>;

fn refuse<T>(status: u16, rule: Rule, why: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal {
        status,
        rule: Some(rule),
        why: why.into(),
    })
}

fn not_found<T>(what: &str) -> Result<T, Refusal> {
    Err(Refusal {
        status: 404,
        rule: None,
        why: format!("there is no {what}"),
    })
}

impl Call {
    fn header(&self, name: &header::HeaderName) -> &str {
        let value = self.headers.get(name);
        value
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }

    /// Fails unless the content type is this one, without parameters.
    fn must_be(&self, media_type: &str) -> Result<(), Refusal> {
        let given = self.header(&header::CONTENT_TYPE);
        let plain = media_type == JSON && given.split(';').next().map(str::trim) == Some(JSON);
        if given == media_type || plain {
            return Ok(());
        }
        let why = format!("{} {} as `{given}`", self.method, self.path);
        refuse(415, Rule::MediaType, why)
    }

    /// Fails unless the client takes an answer of this type.
    fn must_accept(&self, media_type: &str) -> Result<(), Refusal> {
        let given = self.header(&header::ACCEPT);
        let takes = |one: &str| {
            let one = one.split(";q=").next().unwrap_or_default().trim();
            [media_type, "*/*", "application/*"].contains(&one)
        };
        if given.is_empty() || given.split(',').any(takes) {
            return Ok(());
        }
        let why = format!("{} {} accepts `{given}`", self.method, self.path);
        refuse(406, Rule::MediaType, why)
    }

    fn json(&self) -> Result<Value, Refusal> {
        serde_json::from_slice(&self.body).or_else(|error| {
            let why = format!("{} {}: {error}", self.method, self.path);
            refuse(400, Rule::BadDocument, why)
        })
    }

    /// Names and values of the query.
    fn query(&self) -> Vec<(String, String)> {
        let url = reqwest::Url::parse(&format!("http://platform{}", self.path));
        url.map(|url| url.query_pairs().into_owned().collect())
            .unwrap_or_default()
    }

    fn segments(&self) -> Vec<&str> {
        let path = self.path.split('?').next().unwrap_or_default();
        path.split('/').filter(|part| !part.is_empty()).collect()
    }
}

/// Answers a request, or ends its connection.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Dropped> {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(Body::new(body), BODY)
        .await
        .map_err(|_| Dropped)?;
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let call = Call {
        method: head.method,
        path: path.to_owned(),
        headers: head.headers,
        body,
    };
    let at = enter(&shared, &call);
    let effect = shared.faults.take(call.method.as_str(), &call.path);
    let answer = match effect {
        Some(Effect::DropBefore) => return Err(Dropped),
        Some(Effect::Status(status)) => Ok(ordered(status)),
        Some(Effect::RetryAfter(status, seconds)) => {
            let mut answer = ordered(status);
            let headers = answer.headers_mut();
            headers.insert(header::RETRY_AFTER, seconds.into());
            Ok(answer)
        }
        Some(Effect::Redirect(to)) => {
            let mut answer = ordered(302);
            let to = header::HeaderValue::from_static(to);
            answer.headers_mut().insert(header::LOCATION, to);
            Ok(answer)
        }
        Some(Effect::Slow(time)) => {
            tokio::time::sleep(time).await;
            carry_out(&shared, &call, at).await
        }
        Some(Effect::StatusAfter(status)) => {
            drop(conclude(
                &shared,
                at,
                carry_out(&shared, &call, at).await,
                true,
            ));
            Ok(ordered(status))
        }
        Some(Effect::Then(status)) => {
            let answer = carry_out(&shared, &call, at).await;
            let job = shared.ledger().requests[at].job;
            if let Some(job) = job {
                shared.write(|records| records.set_job(job, status, Actor::User));
            }
            answer
        }
        Some(Effect::DropAfter) => {
            conclude(&shared, at, carry_out(&shared, &call, at).await, true);
            return Err(Dropped);
        }
        None => carry_out(&shared, &call, at).await,
    };
    Ok(conclude(&shared, at, answer, false))
}

/// Notes a request as it comes; returns its place in the ledger.
fn enter(shared: &Shared, call: &Call) -> usize {
    let bearer = shared.secret.read(call.header(&header::AUTHORIZATION)).ok();
    let segments = call.segments();
    let named = segments
        .iter()
        .position(|part| *part == "job" || *part == "logs");
    let job = match segments.as_slice() {
        ["context", "v1", job] => job.parse().ok(),
        _ => named.and_then(|at| segments.get(at + 1)?.parse().ok()),
    };
    let open = |job| shared.read(|records| records.open_posts.contains(&job));
    let during_dispatch = job.is_some_and(open);
    let mut ledger = shared.ledger();
    ledger.requests.push(ledger::Request {
        at: Instant::now(),
        method: call.method.to_string(),
        path: call.path.clone(),
        status: 0,
        done: false,
        body: serde_json::from_slice(&call.body).unwrap_or_default(),
        issuer: bearer.map(|bearer| bearer.issuer),
        job,
        during_dispatch,
    });
    let at = ledger.requests.len() - 1;
    drop(ledger);
    shared.requests_changed();
    at
}

/// Does what a request asks for, and notes whether that was accepted.
async fn carry_out(shared: &Arc<Shared>, call: &Call, at: usize) -> Answer {
    let answer = route(shared, call).await;
    shared.ledger().requests[at].done = answer.is_ok();
    answer
}

/// Notes the answer of a request. A lost answer does not reach the client.
fn conclude(shared: &Shared, at: usize, answer: Answer, lost: bool) -> Response<Body> {
    let response = answer.unwrap_or_else(|refusal| {
        if let Some(rule) = refusal.rule {
            shared.ledger().violated(rule, &refusal.why);
        }
        let errors = json!({"errors": [{"detail": refusal.why}]});
        json_response(refusal.status, JSON_API, &errors)
    });
    if !lost {
        shared.ledger().requests[at].status = response.status().as_u16();
    }
    shared.requests_changed();
    response
}

/// What a proxy answers in the platform's place.
fn ordered(status: u16) -> Response<Body> {
    let errors = json!({"errors": [{"detail": "out of\norder"}]});
    json_response(status, JSON_API, &errors)
}

fn response(status: u16, media_type: &str, body: Body) -> Response<Body> {
    let mut response = Response::builder().status(status);
    if !media_type.is_empty() {
        response = response.header(header::CONTENT_TYPE, media_type);
    }
    response.body(body).expect("a status and a constant header")
}

fn json_response(status: u16, media_type: &str, document: &Value) -> Response<Body> {
    response(status, media_type, Body::from(document.to_string()))
}

async fn route(shared: &Arc<Shared>, call: &Call) -> Answer {
    let segments = call.segments();
    match (call.method.as_str(), segments.as_slice()) {
        ("GET", ["context", "v1", job]) => {
            permitted(shared, call, About::Context(job))?;
            plain::context(shared, job)
        }
        ("POST", ["context", "v1", job]) => {
            permitted(shared, call, About::Context(job))?;
            plain::replace_context(shared, call, job)
        }
        ("POST", ["logs"]) => {
            permitted(shared, call, About::Lines)?;
            plain::append_lines(shared, call).await
        }
        ("POST", ["logs", job, "setup-consumer-groups"]) => {
            permitted(shared, call, About::Log(job))?;
            plain::create_groups(shared, call, job).await
        }
        (
            "GET",
            [
                "remote",
                "tfe",
                "v2",
                "configuration-versions",
                id,
                "terraformContent.tar.gz",
            ],
        ) => {
            permitted(shared, call, About::Content)?;
            plain::content(shared, id)
        }
        ("GET", ["api", "v1", "organization", organization]) => {
            permitted(shared, call, About::Organization)?;
            call.must_accept(JSON_API)?;
            documents::organization(shared, organization)
        }
        (method, ["api", "v1", "organization", organization, rest @ ..]) => {
            let about = match rest {
                ["job", job, ..] => About::Job(job),
                ["workspace", workspace, ..] => About::Workspace(workspace),
                _ => About::Organization,
            };
            permitted(shared, call, about)?;
            call.must_accept(JSON_API)?;
            if shared.read(|records| records.organization != *organization) {
                return not_found("such organization");
            }
            match (method, rest) {
                ("GET", ["job", job]) => documents::job(shared, call, job),
                ("GET", ["workspace", workspace]) => documents::workspace(shared, workspace),
                ("GET", ["workspace", workspace, "history"]) => {
                    documents::histories(shared, call, workspace)
                }
                ("PATCH", ["job", job]) => reports::patch_job(shared, call, job).await,
                ("PATCH", ["job", job, "step", step]) => {
                    reports::patch_step(shared, call, job, step)
                }
                ("POST", ["workspace", workspace, "history"]) => {
                    reports::post_history(shared, call, workspace)
                }
                _ => not_found("such path"),
            }
        }
        _ => not_found("such path"),
    }
}

/// Fails unless the request brings a valid token.
fn authenticated(shared: &Shared, call: &Call) -> Result<Bearer, Refusal> {
    let about = format!("{} {}", call.method, call.path);
    let read = shared.secret.read(call.header(&header::AUTHORIZATION));
    let bearer = read.or_else(|why| refuse(401, Rule::Token, format!("{about}: {why}")))?;
    if bearer
        .lifetime
        .is_none_or(|lifetime| lifetime > TOKEN_LIFETIME)
    {
        let lived = bearer.lifetime.map(|lifetime| Duration::as_secs(&lifetime));
        let why = format!("{about}: a token of {lived:?} seconds");
        shared.ledger().violated(Rule::TokenLifetime, why);
    }
    Ok(bearer)
}

/// Fails unless the request brings a token that permits it.
fn permitted(shared: &Shared, call: &Call, about: About<'_>) -> Result<(), Refusal> {
    let bearer = authenticated(shared, call)?;
    rights::check(shared, call, &bearer, about)
}
