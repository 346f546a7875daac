//! One dispatch: the job data of a step, the request, and the meaning of the answer (contract 1.2, 1.4, 2.1 to 2.4).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Map, Value, json};

use crate::records::{Job, Records, Step, Variable};
use crate::release::Release;

/// The largest answer that the client of older APIs decodes.
const DECODED: usize = 256 * 1024;
/// Chooses the platform's own Kubernetes Jobs, whatever its value.
const EPHEMERAL: &str = "TERRAKUBE_ENABLE_EPHEMERAL_EXECUTOR";

type Create = dyn Fn(Value) -> BoxFuture<'static, Result<(), String>> + Send + Sync;

/// Makes a Kubernetes Job of job data, in the place of the platform's own client.
#[derive(Clone)]
pub struct Native(pub(crate) Arc<Create>);

impl Native {
    /// `create` gets the job data. Its error fails the job.
    pub fn new<F>(create: impl Fn(Value) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        Self(Arc::new(move |data| Box::pin(create(data))))
    }
}

impl fmt::Debug for Native {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Native")
    }
}

/// The result of a dispatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Accepted,
    /// The scheduler tries again. The executor may have accepted the dispatch.
    Unavailable,
    /// The job fails with this reason.
    Refused(String),
}

/// Whether the platform makes a Kubernetes Job of this job data itself.
pub(crate) fn asks_for_native(data: &Value) -> bool {
    data["environmentVariables"].get(EPHEMERAL).is_some()
}

/// The document of a step, complete with its nulls. A rejected approval brings its own scripts.
pub(crate) fn job_data(records: &Records, job: &Job, step: &Step, commands: &Value) -> Value {
    let workspace = &records.workspaces[&job.workspace];
    let first = |list: &str| list.split(',').next().unwrap_or_default().to_owned();
    let remote = "remote-content";
    let header = workspace.branch != remote && job.override_branch.as_deref() != Some(remote);
    let start = [
        ("TF_IN_AUTOMATION", "1"),
        ("workspaceName", workspace.name.as_str()),
        ("organizationName", "measure"),
    ];
    let (environment, inputs) = (
        variables(&start, &workspace.variables, &records.globals, false),
        variables(&[], &workspace.variables, &records.globals, true),
    );
    json!({
        "commandList": commands,
        "onFailureList": step.flow.on_failure,
        "type": step.flow.kind,
        "organizationId": records.organization,
        "workspaceId": job.workspace,
        "jobId": job.id.to_string(),
        "stepId": step.id,
        "terraformVersion": workspace.terraform_version,
        "source": job.override_source.as_ref().unwrap_or(&workspace.source),
        "branch": job.override_branch.clone().unwrap_or_else(|| first(&workspace.branch)),
        "folder": workspace.folder.as_deref().map_or_else(|| "/".to_owned(), first),
        "vcsType": workspace.vcs_type,
        "connectionType": workspace.connection_type,
        "refresh": job.refresh,
        "refreshOnly": job.refresh_only,
        "showHeader": header,
        "ignoreError": step.flow.ignore_error,
        "accessToken": workspace.access_token,
        "moduleSshKey": workspace.module_ssh_key,
        "commitId": job.commit_id,
        "tofu": workspace.iac_type != "terraform",
        "environmentVariables": environment,
        "variables": inputs,
    })
}

fn variables(
    start: &[(&str, &str)],
    workspace: &[Variable],
    globals: &[Variable],
    terraform: bool,
) -> Map<String, Value> {
    let mut all: Map<String, Value> = start
        .iter()
        .map(|(key, value)| ((*key).to_owned(), json!(value)))
        .collect();
    for found in workspace
        .iter()
        .filter(|found| found.terraform == terraform)
    {
        all.insert(found.key.clone(), json!(found.value));
    }
    for found in globals.iter().filter(|found| found.terraform == terraform) {
        all.entry(&found.key).or_insert_with(|| json!(found.value));
    }
    all
}

/// Posts job data and judges the answer.
pub(crate) async fn post(
    client: &reqwest::Client,
    url: &str,
    token: &str,
    data: &Value,
    limit: Duration,
    release: Release,
) -> Answer {
    let request = client
        .post(url)
        .bearer_auth(token)
        .header("content-type", "application/json")
        .timeout(limit)
        .body(data.to_string());
    let response = match request.send().await {
        Ok(response) => response,
        Err(error) if error.is_builder() => return Answer::Refused(error.to_string()),
        Err(_) => return Answer::Unavailable,
    };
    let status = response.status();
    match (status.as_u16(), release) {
        (202, Release::Newest) => return Answer::Accepted,
        (202, Release::Old) => {}
        (503, _) | (502 | 504, Release::Newest) => return Answer::Unavailable,
        _ => return Answer::Refused(format!("{status} from POST {url}")),
    }
    let content_type = response.headers().get("content-type").cloned();
    let is_json = content_type
        .as_ref()
        .is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
    let Ok(body) = response.bytes().await else {
        return Answer::Unavailable;
    };
    let decoded = || serde_json::from_slice::<Map<String, Value>>(&body).is_ok();
    if body.is_empty() && (content_type.is_none() || is_json) {
        Answer::Accepted
    } else if body.len() > DECODED {
        Answer::Refused("Exceeded limit on max bytes to buffer : 262144".to_owned())
    } else if is_json && decoded() {
        Answer::Accepted
    } else {
        Answer::Refused(format!("202 of {content_type:?} could not be decoded"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_peers::http::{Response, Server};
    use test_peers::port::Port;
    use test_peers::wait::DEADLINE;

    #[tokio::test]
    async fn newer_releases_read_only_the_status() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        for (status, is_accepted, is_repeated) in [
            (202, true, false),
            (200, false, false),
            (429, false, false),
            (500, false, false),
            (502, false, true),
            (503, false, true),
            (504, false, true),
        ] {
            let server = Server::start(move |_| Response::new(status, "no JSON")).unwrap();
            let client = crate::platform::client();
            let (url, data) = (server.url(), json!({}));
            let answer = post(&client, &url, "token", &data, DEADLINE, Release::Newest).await;
            assert_eq!(answer == Answer::Accepted, is_accepted, "{status}");
            assert_eq!(answer == Answer::Unavailable, is_repeated, "{status}");
        }
    }

    #[tokio::test]
    async fn only_a_202_that_can_be_decoded_is_an_acceptance() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let json = |status: u16, body: String| {
            Response::new(status, body).with_header("content-type", "application/json")
        };
        let large = |size: usize| format!("{{\"x\":\"{}\"}}", "y".repeat(size));
        for (response, expected) in [
            (json(202, "{}".into()), Some(Answer::Accepted)),
            (Response::new(202, ""), Some(Answer::Accepted)),
            (json(202, large(DECODED - 8)), Some(Answer::Accepted)),
            (json(202, large(DECODED - 7)), None),
            (json(202, "accepted".into()), None),
            (json(202, "[]".into()), None),
            (
                Response::new(202, "{}").with_header("content-type", "text/plain"),
                None,
            ),
            (Response::new(503, ""), Some(Answer::Unavailable)),
            (json(200, "{}".into()), None),
            (Response::new(204, ""), None),
            (Response::new(302, "").with_header("location", "/"), None),
            (Response::new(429, ""), None),
            (Response::new(500, ""), None),
            (Response::new(502, ""), None),
        ] {
            let answer = response.clone();
            let server = Server::start(move |_| answer.clone()).unwrap();
            let client = crate::platform::client();
            let (url, data) = (server.url(), json!({}));
            let answer = post(&client, &url, "token", &data, DEADLINE, Release::Old).await;
            match expected {
                Some(expected) => assert_eq!(answer, expected, "{response:?}"),
                None => assert!(matches!(answer, Answer::Refused(_)), "{response:?}"),
            }
        }
        let port = Port::take().unwrap();
        let nobody = format!("http://{}", port.address());
        let client = crate::platform::client();
        let answer = post(
            &client,
            &nobody,
            "token",
            &json!({}),
            DEADLINE,
            Release::Old,
        )
        .await;
        assert_eq!(answer, Answer::Unavailable);
    }
}
