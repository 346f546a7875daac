//! What a stock Terrakube API sent to an executor (`tests/recorded`), sent again to the launcher.

use std::collections::BTreeMap;
use std::fs;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use job_contract::JobData;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde::Deserialize;
use serde_json::{Value, json};
use test_cluster::State;

use super::{Door, Place, SECRET, job_data, name, unix_time};

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

impl Dispatch {
    /// Sends it again, with the token of its time made now.
    async fn send(&self, door: &Door) -> reqwest::Response {
        let mut claims = self.claims.clone();
        let seconds = |name: &str| self.claims[name].as_u64().unwrap();
        let now = unix_time();
        claims["iat"] = json!(now);
        claims["exp"] = json!(now + seconds("exp") - seconds("iat"));
        let key = EncodingKey::from_secret(&SECRET);
        let token = jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims, &key).unwrap();
        let url = format!("http://{}{}", door.address, self.path);
        let mut request = door
            .client
            .request(self.method.parse().unwrap(), url)
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
    let place = Place::without_pods().await;
    let launcher = place.serve();
    let dispatches = dispatches();
    assert_eq!(dispatches.len(), 33);
    for dispatch in &dispatches {
        let answer = dispatch.send(&launcher.door()).await;
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
        let received = place.until("the Secret is there", received).await;
        let received = BASE64_STANDARD.decode(received).unwrap();
        assert_eq!(String::from_utf8(received).unwrap(), dispatch.body);
    }
}
