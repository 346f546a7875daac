//! What a stock Terrakube API sent to an executor (`tests/recorded`), sent again to the launcher.

use std::collections::BTreeMap;
use std::fs;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use job_contract::JobData;
use jsonwebtoken::Algorithm;
use serde::Deserialize;
use serde_json::{Value, json};
use test_cluster::State;
use test_platform::Secret;
use test_platform::launcher::{DISPATCH, Endpoint};

use super::{Fixture, job_data, name, unix_time};

/// The largest answer that the API reads: the default limit of its HTTP client.
const MAX_ANSWER_BYTES: usize = 256 * 1024;

/// One recorded request.
#[derive(Deserialize)]
struct Dispatch {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
    claims: Value,
    body: String,
}

fn dispatches() -> Vec<Dispatch> {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/recorded/terrakube-2.32/dispatches"
    );
    let files = fs::read_dir(folder).unwrap();
    let read = |path| serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    files.map(|file| read(file.unwrap().path())).collect()
}

/// The Job that a stock API applied for a workspace with settings for its pods.
fn stock_job() -> Value {
    let job = include_str!("../../recorded/terrakube-2.32/job.json");
    serde_json::from_str(job).unwrap()
}

impl Dispatch {
    /// Sends it again, with the token of its time made now.
    async fn send(&self, endpoint: &Endpoint) -> reqwest::Response {
        let mut claims = self.claims.clone();
        let seconds = |name: &str| self.claims[name].as_u64().unwrap();
        let now = unix_time();
        claims["iat"] = json!(now);
        claims["exp"] = json!(now + seconds("exp") - seconds("iat"));
        let token = Secret::long().sign(Algorithm::HS256, &claims);
        let mut request = endpoint
            .client
            .request(self.method.parse().unwrap(), endpoint.url(&self.path))
            .bearer_auth(token)
            .body(self.body.clone());
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.send().await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_dispatch_of_a_stock_api_is_answered_as_it_needs_and_reaches_the_executor() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let launcher = fixture.serve();
    let dispatches = dispatches();
    assert_eq!(dispatches.len(), 33);
    for dispatch in &dispatches {
        let answer = dispatch.send(&launcher.endpoint.clone()).await;
        // Everything else fails the job.
        assert_eq!(answer.status(), 202, "{}", dispatch.body);
        assert_eq!(answer.headers()["content-type"], "application/json");
        let answer = answer.bytes().await.unwrap();
        assert!(answer.len() <= MAX_ANSWER_BYTES);
        serde_json::from_slice::<Value>(&answer).unwrap();

        let job: JobData = serde_json::from_str(&dispatch.body).unwrap();
        let received = |state: &State| {
            let secret = job_data(state.job(&name(&job))?)?;
            let mut secrets = state.secrets.iter();
            let stored = secrets.find(|stored| stored.metadata.name.as_deref() == Some(secret))?;
            Some(stored.data.as_ref()?["job-data"].0.clone())
        };
        let received = fixture.until("the Secret is there", received).await;
        let received = BASE64_STANDARD.decode(received).unwrap();
        assert_eq!(String::from_utf8(received).unwrap(), dispatch.body);
    }
}

/// What a stock executor finds in its pod is there in our Jobs too.
#[tokio::test(flavor = "multi_thread")]
async fn a_stock_executor_gets_the_pod_that_the_stock_api_gives_it() {
    let stock = stock_job();
    let stock_container = &stock["spec"]["template"]["spec"]["containers"][0];
    let data = stock_container["env"][1]["value"].as_str().unwrap();
    let document = String::from_utf8(BASE64_STANDARD.decode(data).unwrap()).unwrap();
    let job: JobData = serde_json::from_str(&document).unwrap();
    let fixture = or_skip!(Fixture::without_pods().await);
    let launcher = fixture.serve_with(&[
        (
            "ExecutorEphemeralImage",
            stock_container["image"].as_str().unwrap(),
        ),
        ("ExecutorEphemeralSecret", "terrakube-executor-secrets"),
        ("MAYFLY_JOB_DATA_MODE", "env"),
    ]);
    let answer = launcher.endpoint.request(DISPATCH, document).send().await;
    assert_eq!(answer.unwrap().status(), 202);
    let ours = |state: &State| state.job(&name(&job)).cloned();
    let ours = fixture.until("the Job is there", ours).await;
    let ours = serde_json::to_value(ours).unwrap();

    let decided = [
        // Made of job and step, so that a second delivery finds it.
        "/metadata/name",
        // Variables that a workspace gives its executor: of those, only harmless ones of the stock executor.
        "/spec/template/spec/containers/executor/env/A",
        "/spec/template/spec/containers/executor/env/B",
        // A Job is kept until its end is reported.
        "/spec/ttlSecondsAfterFinished",
    ];
    assert_eq!(differences("", &stock, &ours), decided);
}

/// Where `ours` is not what `stock` is, apart from what it has more. Items with names are found by these.
fn differences(path: &str, stock: &Value, ours: &Value) -> Vec<String> {
    match (stock, ours) {
        (Value::Object(stock), Value::Object(ours)) => stock
            .iter()
            .flat_map(|(key, value)| {
                let ours = ours.get(key).unwrap_or(&Value::Null);
                differences(&format!("{path}/{key}"), value, ours)
            })
            .collect(),
        (Value::Array(stock), Value::Array(ours)) => stock
            .iter()
            .enumerate()
            .flat_map(|(at, item)| {
                let (place, ours) = match item["name"].as_str() {
                    Some(name) => {
                        let same = |other: &&Value| other["name"] == name;
                        (name.to_owned(), ours.iter().find(same))
                    }
                    None => (at.to_string(), ours.get(at)),
                };
                let ours = ours.unwrap_or(&Value::Null);
                differences(&format!("{path}/{place}"), item, ours)
            })
            .collect(),
        _ if stock == ours => Vec::new(),
        _ => vec![path.to_owned()],
    }
}
