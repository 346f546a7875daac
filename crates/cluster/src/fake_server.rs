//! A fake API server of a few lines for the tests of this module: names, UIDs, resource versions, preconditions, merge
//! patches, watches. It runs no controllers; tests write what those would.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body as AnyBody;
use futures_util::stream;
use http::header::DATE;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use k8s_openapi::jiff::fmt::rfc2822::DateTimePrinter;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::client::Body;
use manifest::Manifest;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tower::{BoxError, service_fn};

use super::{Cluster, RetryPolicy};

/// Answers a request in the server's place, by method and path.
type Fault = Box<dyn Fn(&str, usize) -> Option<Response<AnyBody>> + Send + Sync>;

#[derive(Default)]
pub(super) struct Server {
    store: Mutex<Store>,
    changed: Notify,
    /// By how much its clock is ahead; it tells the time once that is said.
    ahead: Mutex<Option<SignedDuration>>,
}

#[derive(Default)]
struct Store {
    version: u64,
    objects: BTreeMap<(String, String), Value>,
    log: Vec<(u64, String, &'static str, Value)>,
    requests: Vec<String>,
}

/// When a client stops to get through.
#[derive(Clone, Copy, Debug)]
pub(super) enum Crash {
    Never,
    /// So many requests are answered; no more are sent.
    Before(usize),
    /// The last request is carried out, but its answer never arrives.
    Within(usize),
    /// That request is never answered; those after it are.
    Hanging(usize),
}

impl Server {
    pub(super) fn start() -> Arc<Self> {
        Arc::new(Self::default())
    }

    pub(super) fn cluster(self: &Arc<Self>) -> Cluster {
        self.crashing(Crash::Never)
    }

    pub(super) fn crashing(self: &Arc<Self>, crash: Crash) -> Cluster {
        self.client(crash, Box::new(|_, _| None))
    }

    /// A launcher that dies while it submits a run.
    pub(super) async fn submit_and_crash(self: &Arc<Self>, crash: Crash, objects: &Manifest) {
        let cluster = self.crashing(crash);
        cluster.submit(objects).await.unwrap_err();
    }

    pub(super) fn faulty(
        self: &Arc<Self>,
        fault: impl Fn(&str, usize) -> Option<Response<AnyBody>> + Send + Sync + 'static,
    ) -> Cluster {
        self.client(Crash::Never, Box::new(fault))
    }

    fn client(self: &Arc<Self>, crash: Crash, fault: Fault) -> Cluster {
        let server = Arc::clone(self);
        let sent = Arc::new(Mutex::new(0_usize));
        let fault = Arc::new(fault);
        let service = service_fn(move |request: Request<Body>| {
            let (server, sent, fault) =
                (Arc::clone(&server), Arc::clone(&sent), Arc::clone(&fault));
            async move {
                let number = {
                    let mut sent = sent.lock().unwrap();
                    *sent += 1;
                    *sent
                };
                let dead = || Err::<Response<AnyBody>, BoxError>("connection reset".into());
                if let Crash::Before(n) = crash
                    && number > n
                {
                    return dead();
                }
                if let Crash::Within(n) = crash
                    && number > n
                {
                    return dead();
                }
                if let Crash::Hanging(n) = crash
                    && number == n
                {
                    return std::future::pending().await;
                }
                let line = format!("{} {}", request.method(), request.uri().path());
                if let Some(answer) = fault(&line, number) {
                    return Ok(answer);
                }
                let mut answer = server.answer(request).await;
                if let Some(date) = server.date() {
                    answer.headers_mut().insert(DATE, date);
                }
                if let Crash::Within(n) = crash
                    && number == n
                {
                    return dead();
                }
                Ok(answer)
            }
        });
        Cluster::from_client(Client::new(service, "runs"), "runs").with_retry_policy(RetryPolicy {
            attempts: 3,
            first_pause: Duration::from_millis(1),
            longest_pause: Duration::from_millis(20),
            answer: Duration::from_mins(1),
        })
    }

    async fn answer(self: &Arc<Self>, request: Request<Body>) -> Response<AnyBody> {
        let (parts, body) = request.into_parts();
        let body = axum::body::to_bytes(AnyBody::new(body), usize::MAX)
            .await
            .unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let path: Vec<&str> = parts.uri.path().split('/').collect();
        let at = path.iter().position(|part| *part == "namespaces").unwrap();
        let kind = path[at + 2].to_owned();
        let name = path.get(at + 3).map(|name| (*name).to_owned());
        let query = parts.uri.query().unwrap_or_default();
        let trial = query.contains("dryRun=All");
        if query.contains("watch=true") {
            return self.watch(&kind, query);
        }
        let mut store = self.store.lock().unwrap();
        store.requests.push(format!(
            "{}{} {kind}",
            if trial { "try to " } else { "" },
            parts.method.as_str().to_lowercase()
        ));
        let answer = match (parts.method, name) {
            (Method::POST, None) if trial => store.could_create(&kind, body),
            (Method::POST, None) => store.create(&kind, body),
            (Method::GET, None) => Ok(store.list(&kind)),
            (Method::GET, Some(name)) => store.get(&kind, &name),
            (Method::PATCH, Some(name)) => store.patch(&kind, &name, body),
            (Method::PUT, Some(name)) => store.replace(&kind, &name, body),
            (Method::DELETE, Some(name)) => store.delete(&kind, &name, &body),
            other => panic!("not spoken here: {other:?}"),
        };
        drop(store);
        self.changed.notify_waiters();
        match answer {
            Ok(object) => reply(StatusCode::OK, &object),
            Err((code, reason)) => refusal(code, reason, reason),
        }
    }

    fn watch(self: &Arc<Self>, kind: &str, query: &str) -> Response<AnyBody> {
        let from: u64 = query
            .split('&')
            .find_map(|pair| pair.strip_prefix("resourceVersion="))
            .and_then(|version| version.parse().ok())
            .unwrap_or(0);
        let state = (Arc::clone(self), kind.to_owned(), from);
        let events = stream::unfold(state, |(server, kind, from)| async move {
            loop {
                let found = {
                    let store = server.store.lock().unwrap();
                    store
                        .log
                        .iter()
                        .find(|(version, of, _, _)| *version > from && *of == kind)
                        .cloned()
                };
                if let Some((version, _, type_, object)) = found {
                    let line = format!("{}\n", json!({"type": type_, "object": object}));
                    return Some((Ok::<_, BoxError>(line), (server, kind, version)));
                }
                // A notification between the look and the wait is made up for by the next look.
                let _ = tokio::time::timeout(Duration::from_millis(20), server.changed.notified())
                    .await;
            }
        });
        Response::new(AnyBody::from_stream(events))
    }

    /// From now on it tells what time it is.
    pub(super) fn set_clock(&self, ahead: SignedDuration) {
        *self.ahead.lock().unwrap() = Some(ahead);
    }

    /// What time it is there.
    pub(super) fn now(&self) -> Timestamp {
        Timestamp::now() + self.ahead.lock().unwrap().unwrap_or_default()
    }

    fn date(&self) -> Option<HeaderValue> {
        (*self.ahead.lock().unwrap())?;
        let printer = DateTimePrinter::new();
        let date = printer.timestamp_to_rfc9110_string(&self.now()).unwrap();
        Some(date.parse().unwrap())
    }

    pub(super) fn object(&self, kind: &str, name: &str) -> Option<Value> {
        let store = self.store.lock().unwrap();
        store
            .objects
            .get(&(kind.to_owned(), name.to_owned()))
            .cloned()
    }

    pub(super) fn count(&self, kind: &str) -> usize {
        let store = self.store.lock().unwrap();
        store.objects.keys().filter(|(of, _)| of == kind).count()
    }

    pub(super) fn requests(&self) -> Vec<String> {
        self.store.lock().unwrap().requests.clone()
    }

    /// The Secret that a Job names, and whether it is there.
    pub(super) fn job_data_of(&self, job: &str) -> (String, Option<Value>) {
        let job = self.object("jobs", job).expect("the Job is there");
        let executor = &job["spec"]["template"]["spec"]["containers"][0];
        let name = &executor["env"][0]["valueFrom"]["secretKeyRef"]["name"];
        let name = name.as_str().unwrap().to_owned();
        let secret = self.object("secrets", &name);
        (name, secret)
    }

    /// What a controller or the kubelet would write.
    pub(super) fn put(&self, kind: &str, object: Value) {
        let mut store = self.store.lock().unwrap();
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        if store.get(kind, &name).is_ok() {
            store.patch(kind, &name, object).unwrap();
        } else {
            store.create(kind, object).unwrap();
        }
        drop(store);
        self.changed.notify_waiters();
    }

    /// The same, so that watches have not heard of it yet.
    pub(super) fn put_unheard(&self, kind: &str, object: Value) {
        self.put(kind, object);
        self.store.lock().unwrap().log.pop();
    }

    pub(super) fn remove(&self, kind: &str, name: &str) {
        let mut store = self.store.lock().unwrap();
        store.delete(kind, name, &Value::Null).unwrap();
        drop(store);
        self.changed.notify_waiters();
    }
}

type Answer = Result<Value, (StatusCode, &'static str)>;

impl Store {
    fn write(&mut self, kind: &str, type_: &'static str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.log
            .push((self.version, kind.to_owned(), type_, object.clone()));
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        if type_ == "DELETED" {
            self.objects.remove(&(kind.to_owned(), name));
        } else {
            self.objects.insert((kind.to_owned(), name), object.clone());
        }
        object
    }

    fn create(&mut self, kind: &str, mut object: Value) -> Answer {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        if self.get(kind, &name).is_ok() {
            return Err((StatusCode::CONFLICT, "AlreadyExists"));
        }
        let meta = &mut object["metadata"];
        if meta["uid"].is_null() {
            meta["uid"] = json!(format!("uid-{}", self.version + 1));
        }
        if meta["creationTimestamp"].is_null() {
            meta["creationTimestamp"] = json!(Timestamp::now().to_string());
        }
        Ok(self.write(kind, "ADDED", object))
    }

    fn could_create(&self, kind: &str, object: Value) -> Answer {
        let name = object["metadata"]["name"].as_str().unwrap();
        match self.get(kind, name) {
            Ok(_) => Err((StatusCode::CONFLICT, "AlreadyExists")),
            Err(_) => Ok(object),
        }
    }

    fn get(&self, kind: &str, name: &str) -> Answer {
        self.objects
            .get(&(kind.to_owned(), name.to_owned()))
            .cloned()
            .ok_or((StatusCode::NOT_FOUND, "NotFound"))
    }

    fn list(&self, kind: &str) -> Value {
        let items: Vec<&Value> = self
            .objects
            .iter()
            .filter(|((of, _), _)| of == kind)
            .map(|(_, object)| object)
            .collect();
        json!({"kind": "List", "apiVersion": "v1",
            "metadata": {"resourceVersion": self.version.to_string()}, "items": items})
    }

    fn patch(&mut self, kind: &str, name: &str, patch: Value) -> Answer {
        let mut object = self.get(kind, name)?;
        for field in ["uid", "resourceVersion"] {
            let wanted = &patch["metadata"][field];
            if !wanted.is_null() && *wanted != object["metadata"][field] {
                return Err((StatusCode::CONFLICT, "Conflict"));
            }
        }
        merge(&mut object, patch);
        Ok(self.write(kind, "MODIFIED", object))
    }

    fn replace(&mut self, kind: &str, name: &str, object: Value) -> Answer {
        let there = self.get(kind, name)?;
        let version = &object["metadata"]["resourceVersion"];
        if !version.is_null() && *version != there["metadata"]["resourceVersion"] {
            return Err((StatusCode::CONFLICT, "Conflict"));
        }
        Ok(self.write(kind, "MODIFIED", object))
    }

    fn delete(&mut self, kind: &str, name: &str, options: &Value) -> Answer {
        let object = self.get(kind, name)?;
        for field in ["uid", "resourceVersion"] {
            let wanted = &options["preconditions"][field];
            if !wanted.is_null() && *wanted != object["metadata"][field] {
                return Err((StatusCode::CONFLICT, "Conflict"));
            }
        }
        let uid = object["metadata"]["uid"].clone();
        self.write(kind, "DELETED", object.clone());
        // The garbage collector.
        let owned: Vec<(String, Value)> = self
            .objects
            .iter()
            .filter(|(_, object)| object["metadata"]["ownerReferences"][0]["uid"] == uid)
            .map(|((kind, _), object)| (kind.clone(), object.clone()))
            .collect();
        for (kind, object) in owned {
            self.write(&kind, "DELETED", object);
        }
        Ok(object)
    }
}

pub(super) fn merge(base: &mut Value, patch: Value) {
    match (base, patch) {
        (Value::Object(base), Value::Object(patch)) => {
            for (key, value) in patch {
                if value.is_null() {
                    base.remove(&key);
                } else {
                    merge(base.entry(key).or_insert(json!({})), value);
                }
            }
        }
        (base, patch) => *base = patch,
    }
}

fn reply(code: StatusCode, object: &Value) -> Response<AnyBody> {
    Response::builder()
        .status(code)
        .body(AnyBody::from(object.to_string()))
        .unwrap()
}

pub(super) fn refusal(code: StatusCode, reason: &str, message: &str) -> Response<AnyBody> {
    reply(
        code,
        &json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
            "code": code.as_u16(), "reason": reason, "message": message}),
    )
}

/// The objects of a run, with its job data in a Secret.
pub(super) fn objects(job_id: &str, step_id: &str) -> Manifest {
    let name = format!("job-{job_id}-{step_id}");
    let labels = json!({"app.kubernetes.io/managed-by": "mayfly", "mayfly.dev/job-id": job_id,
        "mayfly.dev/step-id": step_id});
    let job = json!({"apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": name, "namespace": "runs", "labels": labels},
        "spec": {"suspend": true, "template": {"spec": {"containers": [{"name": "executor", "env": [
            {"name": "EphemeralJobData", "valueFrom": {"secretKeyRef": {"name": name, "key": "job-data"}}}]}]}}}});
    let secret = json!({"apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": name, "namespace": "runs", "labels": labels}, "data": {"job-data": "e30="}});
    Manifest {
        job: serde_json::from_value(job).unwrap(),
        secret: Some(serde_json::from_value(secret).unwrap()),
        notes: Vec::new(),
    }
}

/// The same with the job data in the environment.
pub(super) fn inline(job_id: &str, step_id: &str) -> Manifest {
    let mut objects = objects(job_id, step_id);
    objects.secret = None;
    let spec = objects.job.spec.as_mut().unwrap();
    spec.template.spec.as_mut().unwrap().containers[0].env = None;
    objects
}
