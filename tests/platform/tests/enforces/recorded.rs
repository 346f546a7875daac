//! The recorded traffic of a stock Terrakube (`tests/recorded`): the platform sends such documents, and accepts such
//! requests.

use std::fs;
use std::path::PathBuf;

use test_platform::Variable;

use super::*;

/// The recorded documents of a folder, with the names of their files.
fn recorded(folder: &str) -> Vec<(String, Value)> {
    let folder = PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../recorded/terrakube-2.32"
    ))
    .join(folder);
    let files = fs::read_dir(&folder).unwrap();
    let read = |file: fs::DirEntry| {
        let text = fs::read_to_string(file.path()).unwrap();
        let name = file.file_name().into_string().unwrap();
        (name, serde_json::from_str(&text).unwrap())
    };
    let found: Vec<_> = files.map(|file| read(file.unwrap())).collect();
    assert!(!found.is_empty(), "{}", folder.display());
    found
}

fn text(document: &Value, name: &str) -> Option<String> {
    document[name].as_str().map(str::to_owned)
}

/// The workspace that a document is about.
fn workspace(sent: &Value) -> Workspace {
    let of = |name: &str, make: fn(&str, &str) -> Variable| {
        let values = sent[name].as_object().unwrap().clone().into_iter();
        let variables = values.map(move |(key, value)| make(&key, value.as_str().unwrap()));
        variables.collect::<Vec<_>>()
    };
    let tool = if sent["tofu"] == true {
        "tofu"
    } else {
        "terraform"
    };
    Workspace {
        name: text(&sent["environmentVariables"], "workspaceName").unwrap(),
        branch: text(sent, "branch").unwrap(),
        folder: text(sent, "folder"),
        terraform_version: text(sent, "terraformVersion").unwrap(),
        iac_type: tool.to_owned(),
        vcs_type: text(sent, "vcsType").unwrap(),
        connection_type: text(sent, "connectionType"),
        access_token: text(sent, "accessToken"),
        module_ssh_key: text(sent, "moduleSshKey"),
        variables: [
            of("environmentVariables", Variable::env),
            of("variables", Variable::terraform),
        ]
        .concat(),
        ..Workspace::new(&text(sent, "source").unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn documents_are_those_of_a_stock_platform() {
    let platform = Platform::builder().start().await.unwrap();
    for (name, dispatch) in recorded("dispatches") {
        let mut sent: Value = serde_json::from_str(dispatch["body"].as_str().unwrap()).unwrap();
        let flow = Flow {
            commands: sent["commandList"].clone(),
            on_failure: sent["onFailureList"].clone(),
            ..Flow::new(sent["type"].as_str().unwrap(), 100)
        };
        let workspace = platform.workspace(workspace(&sent));
        let new = NewJob {
            refresh: sent["refresh"] == true,
            refresh_only: sent["refreshOnly"] == true,
            ..NewJob::new(&workspace, vec![flow])
        };
        let job = platform.store_job(new, |job| {
            job.commit_id = text(&sent, "commitId");
            job.dispatched = Some(job.steps[0].id.clone());
        });
        let made = platform.job_data(job);
        for id in ["organizationId", "workspaceId", "jobId", "stepId"] {
            assert!(sent[id].is_string(), "{name}");
            sent[id] = made[id].clone();
        }
        assert_eq!(made, sent, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_a_stock_executor_are_accepted() {
    // The recorded executor does not know what newer releases ask for.
    let scene = Scene::of(Platform::builder().release(Release::Old)).await;
    for (name, calls) in recorded("calls") {
        let new = NewJob::new(&scene.workspace, Flow::plan_apply());
        let id = scene
            .platform
            .store_job(new, |job| job.status = Status::Queue);
        let job = scene.platform.job(id);
        let names = [
            ("{organization}", scene.platform.organization()),
            ("{workspace}", scene.workspace.clone()),
            ("{job}", id.to_string()),
            ("{step1}", job.steps[0].id.clone()),
            ("{step2}", job.steps[1].id.clone()),
        ];
        let with_ids = |text: &str| {
            let text = text.to_owned();
            names
                .iter()
                .fold(text, |text, (name, id)| text.replace(name, id))
        };
        let calls = calls.as_array().unwrap();
        assert!(!calls.is_empty(), "{name}");
        for call in calls {
            let path = with_ids(call["path"].as_str().unwrap());
            let mut body: Value =
                serde_json::from_str(&with_ids(&call["body"].to_string())).unwrap();
            if body["data"]["type"] == "job" {
                body["data"]["id"] = json!(id.to_string());
            }
            let is_resource = path.starts_with("/api/");
            let media_type = if is_resource { JSON_API } else { JSON };
            let method = call["method"].as_str().unwrap();
            let status = scene.send(method, &path, media_type, &body).await;
            assert!(
                (200..300).contains(&status),
                "{name}: {method} {path} {body}"
            );
        }
        assert!(scene.platform.job(id).steps[0].status.is_terminal());
    }
}
