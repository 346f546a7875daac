//! A client of the pool protocol. It acts as an agent or an executor.

use pool_protocol::id::{InstanceId, LeaseId};
use pool_protocol::path::{self, LeaseCall};
use pool_protocol::problem::{Code, Problem};
use pool_protocol::task::LeasedTask;
use pool_protocol::version;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use test_peers::wait::DEADLINE;

/// A response of the hub.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: Value,
}

impl Answer {
    /// Returns the document of a call that must succeed.
    #[track_caller]
    pub(crate) fn ok(self) -> Value {
        assert!(self.status.is_success(), "{self:?}");
        self.body
    }

    /// Returns the code of a call that must fail. The status must match the code.
    #[track_caller]
    pub(crate) fn refused(self) -> Code {
        let problem: Problem = serde_json::from_value(self.body)
            .unwrap_or_else(|error| panic!("{} is no problem: {error}", self.status));
        assert_eq!(self.status.as_u16(), problem.code.status());
        problem.code
    }
}

/// A client with one token.
#[derive(Clone)]
pub(crate) struct Client {
    base: String,
    token: String,
    http: reqwest::Client,
}

impl Client {
    pub(crate) fn new(base: &str, token: &str) -> Self {
        Self {
            base: base.to_owned(),
            token: token.to_owned(),
            http: reqwest::Client::builder()
                .no_proxy()
                .timeout(DEADLINE)
                .build()
                .unwrap(),
        }
    }

    /// Returns the client with another token.
    pub(crate) fn with_token(&self, token: &str) -> Self {
        Self {
            token: token.to_owned(),
            ..self.clone()
        }
    }

    /// Returns a request without token and version.
    pub(crate) fn plain(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base))
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        let request = self
            .plain(Method::POST, path)
            .header(version::HEADER, version::VERSION)
            .bearer_auth(&self.token);
        send(request.json(&body)).await
    }

    /// Registers an instance of this name and installation.
    pub(crate) async fn try_register(&self, name: &str, installation: &str) -> Answer {
        self.register_with(name, installation, [1, 1]).await
    }

    /// Registers an instance that speaks these versions of the protocol.
    pub(crate) async fn register_with(
        &self,
        name: &str,
        installation: &str,
        [min, max]: [u32; 2],
    ) -> Answer {
        let body = json!({
            "systemId": format!("{name} of {installation}"),
            "name": name,
            "executorVersion": "1",
            "protocolMinVersion": min,
            "protocolMaxVersion": max,
            "platform": "linux",
            "architecture": "amd64",
            "capacity": 10,
            "installation": installation,
        });
        self.post(path::REGISTER, body).await
    }

    /// Registers an instance.
    pub(crate) async fn register(&self) -> InstanceId {
        let registered = self.try_register("eu-1", "one").await.ok();
        serde_json::from_value(registered["instanceId"].clone()).unwrap()
    }

    pub(crate) async fn try_request(
        &self,
        instance: InstanceId,
        wait_seconds: u32,
        holding: &[LeaseId],
    ) -> Answer {
        let body = json!({
            "instanceId": instance,
            "availableCapacity": 1,
            "waitSeconds": wait_seconds,
            "holding": holding,
        });
        self.post(path::REQUEST_TASK, body).await
    }

    /// Waits for a task, which must come.
    pub(crate) async fn request(&self, instance: InstanceId) -> LeasedTask {
        let answer = self.try_request(instance, 50, &[]).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        serde_json::from_value(answer.body).unwrap()
    }

    /// The same of an instance that holds leases.
    pub(crate) async fn take(&self, instance: InstanceId, held: &[LeasedTask]) -> LeasedTask {
        let held: Vec<_> = held.iter().map(|lease| lease.lease_id).collect();
        let answer = self.try_request(instance, 50, &held).await.ok();
        serde_json::from_value(answer).unwrap()
    }

    pub(crate) async fn heartbeat(&self, instance: InstanceId) -> Answer {
        let body = json!({"state": "ONLINE", "availableCapacity": 1});
        self.post(&path::instance_heartbeat(instance), body).await
    }

    pub(crate) async fn remove(&self, instance: InstanceId) {
        let request = self
            .plain(Method::DELETE, &path::instance(instance))
            .header(version::HEADER, version::VERSION)
            .bearer_auth(&self.token);
        send(request).await.ok();
    }

    /// Makes a call for a lease.
    pub(crate) async fn lease(&self, task: &LeasedTask, call: LeaseCall, body: Value) -> Answer {
        let path = path::lease(task.task_id, task.lease_id, call);
        self.post(&path, body).await
    }

    pub(crate) async fn accept(&self, task: &LeasedTask, uid: &str) -> Answer {
        self.lease(task, LeaseCall::Accept, holder(uid)).await
    }

    pub(crate) async fn lease_heartbeat(&self, task: &LeasedTask, uid: &str) -> Answer {
        self.lease(task, LeaseCall::Heartbeat, holder(uid)).await
    }

    /// Sends a request to the platform through the relay.
    pub(crate) async fn relay(
        &self,
        task: &LeasedTask,
        method: Method,
        below: &str,
        body: Option<Value>,
    ) -> Answer {
        let path = format!("{}{below}", path::relay(task.task_id, task.lease_id));
        let mut request = self.plain(method, &path).bearer_auth(&self.token);
        if let Some(body) = body {
            request = request.body(body.to_string());
        }
        send(request).await
    }
}

/// Returns the client with the job token of a lease.
pub(crate) fn executor_of(agent: &Client, task: &LeasedTask) -> Client {
    agent.with_token(&task.job_token)
}

fn holder(uid: &str) -> Value {
    json!({"holder": {"uid": uid, "name": format!("pod-{uid}")}})
}

async fn send(request: RequestBuilder) -> Answer {
    let answer = request.send().await.unwrap();
    let status = answer.status();
    let text = answer.text().await.unwrap();
    let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
    Answer { status, body }
}
