//! A platform of a few lines: one job, whose API refuses what the contract does not allow, records what it is told, and
//! fails on demand.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use reqwest::Url;
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::StepRef;
use crate::terrakube::client::Pace;
use crate::terrakube::{Terrakube, TerrakubeConfig, TokenSource};

const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
/// Attributes an executor may change (contract 5.3, 5.4).
const JOB_ATTRIBUTES: [&str; 5] = [
    "status",
    "planChanges",
    "output",
    "terraformPlan",
    "commitId",
];
const STEP_ATTRIBUTES: [&str; 3] = ["status", "output", "name"];

/// What happens to a call instead of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// Refused with that status.
    Status(StatusCode),
    /// Refused with that status and a number of seconds to wait.
    Later(StatusCode, u64),
    /// Redirected to that address.
    Redirect(&'static str),
    /// Done, but answered with an error of the proxy in front.
    AnswerLost,
    /// Done, and answered after that time.
    Late(Duration),
    /// Answered as if it were done.
    Forgotten,
}

/// The job, and what has been asked and told.
#[derive(Debug, Default)]
pub(super) struct Job {
    pub(super) attributes: Map<String, Value>,
    pub(super) steps: Vec<(String, Map<String, Value>)>,
    pub(super) context: Option<Value>,
    pub(super) histories: Vec<Value>,
    /// Statuses of the job that become true one after another, each after the job was read once more.
    pub(super) becomes: VecDeque<&'static str>,
    /// Faults of the next calls of a method and path end.
    pub(super) faults: VecDeque<(Method, &'static str, Fault)>,
    /// Method, last part of the path, and attributes of every change so far.
    pub(super) told: Vec<(String, Value)>,
    pub(super) asked: usize,
}

/// The server, until it is dropped.
pub(super) struct StandIn {
    job: Arc<Mutex<Job>>,
    url: Url,
    serving: JoinHandle<()>,
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl StandIn {
    /// A job of a plan and an apply step, in that status.
    pub(super) async fn with_status(status: &str) -> Self {
        // Another test may have installed it already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let step = |id: &str, number: i64| {
            let step =
                json!({"status": "pending", "stepNumber": number, "name": id, "output": null});
            (id.to_owned(), object(step))
        };
        let job = Job {
            attributes: object(json!({"status": status, "output": null, "tcl": null})),
            steps: vec![step("plan-id", 100), step("apply-id", 200)],
            ..Job::default()
        };
        let job = Arc::new(Mutex::new(job));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let app = Router::new().fallback(answer).with_state(Arc::clone(&job));
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self {
            job,
            url: Url::parse(&url).unwrap(),
            serving,
        }
    }

    pub(super) fn job(&self) -> MutexGuard<'_, Job> {
        self.job.lock().unwrap()
    }

    pub(super) fn fault(&self, method: Method, path_end: &'static str, fault: Fault) {
        self.job().faults.push_back((method, path_end, fault));
    }

    pub(super) fn config(&self) -> TerrakubeConfig {
        TerrakubeConfig {
            api_url: self.url.clone(),
            public_url: self.url.clone(),
            registry_domain: None,
            tokens: TokenSource::parse(SECRET).unwrap(),
            dispatch_wait: Duration::from_millis(50),
            status_poll: Duration::from_millis(5),
            report_patience: Duration::from_secs(5),
        }
    }

    pub(super) fn client(&self) -> Terrakube {
        client(self.config())
    }

    /// What was told so far: method and place, and the attributes.
    pub(super) fn told(&self) -> Vec<(String, Value)> {
        self.job().told.clone()
    }

    pub(super) fn status(&self) -> String {
        self.job().attributes["status"].as_str().unwrap().to_owned()
    }
}

/// A client that waits for nobody long.
pub(super) fn client(config: TerrakubeConfig) -> Terrakube {
    let pace = Pace {
        first_pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(5),
        dispatch_poll: Duration::from_millis(1),
    };
    Terrakube::with_pace(config, None, pace).unwrap()
}

pub(super) fn step(id: &str, step_type: &str) -> StepRef {
    StepRef {
        organization_id: "org".into(),
        workspace_id: "ws".into(),
        job_id: "412".into(),
        step_id: id.into(),
        step_type: step_type.into(),
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        other => panic!("{other} is no object"),
    }
}

async fn answer(
    State(job): State<Arc<Mutex<Job>>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let (answer, pause) = answer_now(&mut job.lock().unwrap(), &method, &uri, &headers, &body);
    tokio::time::sleep(pause).await;
    answer
}

fn answer_now(
    job: &mut Job,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    body: &[u8],
) -> (Response, Duration) {
    let at_once = |answer: Response| (answer, Duration::ZERO);
    if let Err(refusal) = check_token(headers) {
        return at_once((StatusCode::UNAUTHORIZED, refusal).into_response());
    }
    let is_next = |(on, end, _): &&(Method, &str, Fault)| on == method && uri.path().ends_with(end);
    let fault = if job.faults.front().as_ref().is_some_and(is_next) {
        job.faults.pop_front().map(|(.., fault)| fault)
    } else {
        None
    };
    match fault {
        Some(Fault::Status(status)) => {
            let body = json!({"errors": [{"detail": "out of\norder"}]}).to_string();
            return at_once((status, body).into_response());
        }
        Some(Fault::Later(status, seconds)) => {
            let answer = (status, [("retry-after", seconds.to_string())]);
            return at_once(answer.into_response());
        }
        Some(Fault::Redirect(to)) => {
            return at_once((StatusCode::FOUND, [("location", to)]).into_response());
        }
        Some(Fault::Forgotten) => return at_once("{}".into_response()),
        Some(Fault::AnswerLost | Fault::Late(_)) | None => {}
    }
    let answer = job
        .handle(method, uri, headers, body)
        .unwrap_or_else(|refusal| (StatusCode::BAD_REQUEST, refusal).into_response());
    match fault {
        None => at_once(answer),
        Some(Fault::Late(pause)) => (answer, pause),
        Some(_) => at_once(StatusCode::BAD_GATEWAY.into_response()),
    }
}

/// Contract 5.2.
fn check_token(headers: &HeaderMap) -> Result<(), String> {
    let value = headers.get(AUTHORIZATION).ok_or("no token")?;
    let token = value
        .to_str()
        .ok()
        .and_then(|value| value.strip_prefix("Bearer "));
    let mut validation = Validation::new(Algorithm::HS256);
    validation.set_audience(&["TerrakubeInternal"]);
    validation.set_issuer(&["TerrakubeInternal"]);
    let key = DecodingKey::from_secret(&STANDARD.decode(SECRET).unwrap());
    let claims = jsonwebtoken::decode::<Value>(token.unwrap_or_default(), &key, &validation)
        .map_err(|error| error.to_string())?
        .claims;
    let lifetime = claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap();
    if lifetime > 300 || claims.get("jti").is_some() {
        return Err("not a token of minutes".to_owned());
    }
    Ok(())
}

impl Job {
    fn handle(
        &mut self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Result<Response, String> {
        let media = match uri.path() {
            path if path.starts_with("/api/v1/") => "application/vnd.api+json",
            _ => "application/json",
        };
        if headers.get(ACCEPT).is_none_or(|value| value != media) {
            return Err(format!("expected to be asked for {media}"));
        }
        let body: Value = if body.is_empty() {
            Value::Null
        } else if headers
            .get(CONTENT_TYPE)
            .is_some_and(|value| value == media)
        {
            serde_json::from_slice(body).map_err(|error| error.to_string())?
        } else {
            return Err(format!("expected {media}"));
        };
        let path: Vec<&str> = uri.path().trim_start_matches('/').split('/').collect();
        match (method.as_str(), path.as_slice()) {
            ("GET", ["api", "v1", "organization", "org", "job", "412"]) => {
                Ok(self.read(uri.query()))
            }
            ("PATCH", ["api", "v1", "organization", "org", "job", "412"]) => {
                let attributes = attributes(&body, "job", Some("412"), &JOB_ATTRIBUTES)?;
                if attributes.get("status") == Some(&json!("pending"))
                    && attributes.get("planChanges") != Some(&json!(true))
                {
                    return Err("pending without changes".to_owned());
                }
                self.told
                    .push(("job".into(), Value::Object(attributes.clone())));
                self.attributes.extend(attributes);
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            ("PATCH", ["api", "v1", "organization", "org", "job", "412", "step", id]) => {
                let attributes = attributes(&body, "step", Some(id), &STEP_ATTRIBUTES)?;
                self.told
                    .push((format!("step {id}"), Value::Object(attributes.clone())));
                let (_, step) = self
                    .steps
                    .iter_mut()
                    .find(|(known, _)| known == id)
                    .ok_or("step")?;
                step.extend(attributes);
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            (
                method @ ("GET" | "POST"),
                [
                    "api",
                    "v1",
                    "organization",
                    "org",
                    "workspace",
                    "ws",
                    "history",
                ],
            ) => {
                if method == "GET" {
                    return self.records(uri);
                }
                let allowed = ["output", "jobReference", "serial", "md5", "lineage"];
                let attributes = attributes(&body, "history", None, &allowed)?;
                self.histories.push(Value::Object(attributes));
                Ok((StatusCode::CREATED, "{}").into_response())
            }
            ("GET", ["context", "v1", "412"]) => {
                let context = self.context.clone().unwrap_or_else(|| json!({}));
                Ok(context.to_string().into_response())
            }
            ("POST", ["context", "v1", "412"]) => {
                self.context = Some(body);
                Ok("{}".into_response())
            }
            _ => Ok(StatusCode::NOT_FOUND.into_response()),
        }
    }

    /// Records of published states, filtered by their jobs.
    fn records(&mut self, uri: &Uri) -> Result<Response, String> {
        self.asked += 1;
        let url =
            Url::parse(&format!("http://stand-in{uri}")).map_err(|error| error.to_string())?;
        let query: Vec<_> = url.query_pairs().into_owned().collect();
        let [(name, filter)] = query.as_slice() else {
            return Err(format!("{query:?}"));
        };
        let reference = filter
            .strip_prefix("jobReference=='")
            .and_then(|rest| rest.strip_suffix('\''))
            .filter(|_| name == "filter[history]");
        let reference = reference.ok_or_else(|| format!("{query:?}"))?;
        let of_job = |record: &&Value| record["jobReference"] == reference;
        let records = self.histories.iter().filter(of_job);
        let records: Vec<_> = records
            .map(|attributes| json!({"type": "history", "id": "h", "attributes": attributes}))
            .collect();
        Ok(json!({"data": records}).to_string().into_response())
    }

    fn read(&mut self, query: Option<&str>) -> Response {
        self.asked += 1;
        let of_steps = |f: fn(&(String, Map<String, Value>)) -> Value| -> Vec<Value> {
            self.steps.iter().map(f).collect()
        };
        let mut document = json!({"data": {
            "type": "job", "id": "412", "attributes": self.attributes,
            "relationships": {"step": {"data": of_steps(|(id, _)| json!({"type": "step", "id": id}))}},
        }});
        if query == Some("include=step") {
            let steps =
                of_steps(|(id, step)| json!({"type": "step", "id": id, "attributes": step}));
            document["included"] = Value::Array(steps);
        }
        if let Some(next) = self.becomes.pop_front() {
            self.attributes.insert("status".into(), json!(next));
        }
        document.to_string().into_response()
    }
}

fn attributes(
    body: &Value,
    kind: &str,
    id: Option<&str>,
    allowed: &[&str],
) -> Result<Map<String, Value>, String> {
    let data = &body["data"];
    if data["type"] != kind || data["id"].as_str() != id || data.get("relationships").is_some() {
        return Err(format!("not a change of {kind}: {body}"));
    }
    let attributes = data["attributes"].as_object().ok_or("no attributes")?;
    match attributes
        .keys()
        .find(|name| !allowed.contains(&name.as_str()))
    {
        Some(name) => Err(format!("attribute {name} is not ours to change")),
        None => Ok(attributes.clone()),
    }
}
