//! Jobs that wait for an approval while their workspace moves between a stock executor and Mayfly.
//!
//! No plan of a stock executor is on record. [`Switch::run_stock`] makes one with the real tool, as the contract describes: the
//! clone in a folder of its own (8.1), the backend file (6.1), the command lines (4.5), the plan's key and reference (6.2).
//! What it tells the platform is recorded from a stock executor (`tests/recorded`).

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::SystemTime;

use artifact_store::{
    Handover, HttpUrl, S3Credentials, S3Settings, StaticKeys, Store, StoreSettings,
};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use integration_tests::Repository;
use integration_tests::tool::program;
use job_contract::keys::{Area, ObjectKey};
use job_contract::{Tool, env};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use secrecy::SecretString;
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use test_peers::s3::{self, S3};
use test_platform::{Flow, Native, NewJob, Platform, Release, Status, Variable, Workspace};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use url::Url;

use super::{RunTarget, Stage};
use crate::machine;

/// The changes that a stock executor asked of the platform for one job.
const RECORD: &str = include_str!("../../recorded/terrakube-2.32/calls/apply-vars.json");
/// What is of another installation in it, apart from ids that have names.
const RECORDED_PLAN: &str = "/home/terrakube/.terraform-spring-boot/local/state/c57b12a4-8caf-4b48-ae58-73134d28eb0d/5ffcb7af-d907-404b-86eb-4456b80c7f24/18/{step1}/terraformLibrary.tfPlan";
const RECORDED_ORGANIZATION: &str = "c57b12a4-8caf-4b48-ae58-73134d28eb0d";
const RECORDED_WORKSPACE: &str = "5ffcb7af-d907-404b-86eb-4456b80c7f24";
const RECORDED_COMMIT: &str = "7f941ccc1bd55e08e6b528321bc3174d02edb500";
const RECORDED_API: &str = "http://127.0.0.1:18093";

/// The settings of the launcher that the steps of a switch name (`docs/migration.md`).
const SETTINGS_OF_A_SWITCH: &[(&str, &str)] = &[
    (env::MIXED_FLEET, "true"),
    (env::BACKEND_CREDENTIALS, "file"),
];

/// A platform with two executors and one store.
struct Switch {
    stage: Stage,
    server: S3,
    store: Store,
    repository: Repository,
    /// The job data of the Jobs that the platform makes itself.
    dispatches: UnboundedReceiver<Value>,
}

impl Switch {
    async fn new() -> Self {
        let server = S3::start().unwrap();
        let (sender, dispatches) = unbounded_channel();
        let native = Native::new(move |data| {
            let sent = sender.send(data).map_err(|error| error.to_string());
            std::future::ready(sent)
        });
        let settings = [
            (env::STATE_TYPE, "AwsTerraformStateImpl"),
            (env::AWS_BUCKET, s3::BUCKET),
            (env::AWS_REGION, s3::REGION),
            (env::AWS_ENDPOINT, &server.url()),
            (env::AWS_ACCESS_KEY, server.access_key()),
            (env::AWS_SECRET_KEY, server.secret_key()),
        ];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
        // The recorded executor does not know the rules of newer releases.
        let platform = Platform::builder().release(Release::Old).native(native);
        let target = RunTarget::Machine(machine());
        let stage = Stage::with(target, platform, None, settings.into()).await;
        Self {
            stage,
            store: store(&server),
            server,
            repository: Repository::module(include_str!("../../../examples/hello/main.tf")),
            dispatches,
        }
    }

    /// Starts a job with an approval, in a new workspace.
    fn start(&self) -> u32 {
        let languages = "{ english = \"Hi\", spanish = \"Hola\" }";
        let workspace = Workspace::new(&self.repository.url())
            .with(Variable::terraform("languages", languages))
            .with(Variable::terraform("name", "Ann"));
        let workspace = self.stage.platform.workspace(workspace);
        let job = NewJob::new(&workspace, Flow::plan_approve_apply());
        self.stage.platform.start_job(job)
    }

    /// Selects the executor of all workspaces.
    fn select(&self, is_stock: bool) {
        let variable = Variable::env(env::EPHEMERAL_SWITCH, "true");
        self.stage.platform.edit(|records| {
            records.globals = Vec::from_iter(is_stock.then_some(variable));
        });
    }

    /// Changes a variable after the plan. An apply of the reviewed plan does not see it.
    fn rename(&self, job: u32) {
        let workspace = self.stage.platform.job(job).workspace;
        self.stage.platform.edit(|records| {
            let workspace = records.workspaces.get_mut(&workspace).unwrap();
            let mut variables = workspace.variables.iter_mut();
            let name = variables.find(|variable| variable.key == "name").unwrap();
            "Bob".clone_into(&mut name.value);
        });
    }

    async fn assert_applied(&self, job: u32) {
        let job = self.stage.platform.until_job(job, Status::Completed).await;
        assert_eq!(job.step_statuses(), [Status::Completed; 3]);
        let organization = self.stage.platform.organization();
        let state = ObjectKey::backend_state(&organization, &job.workspace);
        let state = self.store.read(&state).await.unwrap().unwrap();
        let state: Value = serde_json::from_slice(&state).unwrap();
        let greetings = &state["outputs"]["greetings"]["value"];
        assert_eq!(
            *greetings,
            json!({"english": "Hi, Ann!", "spanish": "Hola, Ann!"})
        );
    }

    /// Runs the next step as a stock executor does. The error is what the tool printed.
    async fn run_stock(&mut self) -> Result<(), String> {
        let data = self.dispatches.recv().await.unwrap();
        let job = data["jobId"].as_str().unwrap().parse().unwrap();
        self.stage.platform.until_job(job, Status::Queue).await;
        let (begin, end, reference) = match data["type"].as_str().unwrap() {
            "terraformPlan" => (0..2, 2..5, self.plan_reference(&data)),
            "approval" => (5..7, 10..12, self.plan_of(job)),
            "terraformApply" => (5..7, 7..12, self.plan_of(job)),
            other => panic!("no step of type {other} is recorded"),
        };
        let calls = self.calls(&data, &reference);
        for call in &calls[begin] {
            self.send(call).await;
        }
        match data["type"].as_str().unwrap() {
            "terraformPlan" => self.plan(&data).await?,
            "terraformApply" => self.apply(&data, &reference).await?,
            _ => {}
        }
        for call in &calls[end] {
            self.send(call).await;
        }
        Ok(())
    }

    async fn plan(&self, data: &Value) -> Result<(), String> {
        let work = self.prepare(data);
        succeeds(&tool(work.path(), data, &["init", "-input=false"]), 0)?;
        let mut arguments = vec![
            "plan".to_owned(),
            "-no-color".to_owned(),
            "-json".to_owned(),
        ];
        for (name, value) in data["variables"].as_object().unwrap() {
            arguments.extend([
                "--var".to_owned(),
                format!("{name}={}", value.as_str().unwrap()),
            ]);
        }
        let rest = [
            "-out=terraformLibrary.tfPlan",
            "-input=false",
            "-detailed-exitcode",
        ];
        arguments.extend(rest.map(str::to_owned));
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        succeeds(&tool(work.path(), data, &arguments), 2)?;
        let plan = fs::read(work.path().join("terraformLibrary.tfPlan")).unwrap();
        let key = key_of(&self.plan_reference(data));
        self.store.put(&key, plan).await.unwrap();
        Ok(())
    }

    async fn apply(&self, data: &Value, reference: &str) -> Result<(), String> {
        let work = self.prepare(data);
        succeeds(&tool(work.path(), data, &["init", "-input=false"]), 0)?;
        let plan = self.store.read(&key_of(reference)).await.unwrap().unwrap();
        fs::write(work.path().join("terraformLibrary.tfPlan"), plan).unwrap();
        let arguments = [
            "apply",
            "-no-color",
            "-json",
            "-auto-approve",
            "-input=false",
            "terraformLibrary.tfPlan",
        ];
        succeeds(&tool(work.path(), data, &arguments), 0)
    }

    /// A clone, with the backend file.
    fn prepare(&self, data: &Value) -> TempDir {
        let work = tempfile::tempdir().unwrap();
        let cloned = Command::new("git")
            .args(["clone", "--quiet", "--branch"])
            .arg(data["branch"].as_str().unwrap())
            .arg(data["source"].as_str().unwrap())
            .arg(work.path())
            .status()
            .unwrap();
        assert!(cloned.success());
        let backend = format!(
            r#"terraform {{
  backend "s3" {{
    bucket = "{}"
    region = "{}"
    key = "tfstate/{}/{}/terraform.tfstate"
    access_key = "{}"
    secret_key = "{}"
    endpoints = {{ s3 = "{}" }}
    skip_requesting_account_id = true
    skip_s3_checksum = true
    use_path_style = true
    skip_credentials_validation = true
    skip_metadata_api_check = true
    skip_region_validation = true
  }}
}}
"#,
            s3::BUCKET,
            s3::REGION,
            data["organizationId"].as_str().unwrap(),
            data["workspaceId"].as_str().unwrap(),
            self.server.access_key(),
            self.server.secret_key(),
            self.server.url(),
        );
        fs::write(work.path().join("aws_backend_override.tf"), backend).unwrap();
        work
    }

    /// The address that Amazon's library gives an object of this server.
    fn plan_reference(&self, data: &Value) -> String {
        let id = |name: &str| data[name].as_str().unwrap();
        format!(
            "{}/{}/tfstate/{}/{}/{}/{}/terraformLibrary.tfPlan",
            self.server.url(),
            s3::BUCKET,
            id("organizationId"),
            id("workspaceId"),
            id("jobId"),
            id("stepId")
        )
    }

    fn plan_of(&self, job: u32) -> String {
        self.stage.platform.job(job).terraform_plan.unwrap()
    }

    /// The record, about this step.
    fn calls(&self, data: &Value, reference: &str) -> Vec<Value> {
        let id = |name: &str| data[name].as_str().unwrap();
        let job = self.stage.platform.job(id("jobId").parse().unwrap());
        let text = RECORD
            .replace(RECORDED_PLAN, reference)
            .replace(RECORDED_COMMIT, &self.repository.head())
            .replace(RECORDED_API, &self.stage.platform.url())
            .replace("{organization}", id("organizationId"))
            .replace(RECORDED_ORGANIZATION, id("organizationId"))
            .replace("{workspace}", id("workspaceId"))
            .replace(RECORDED_WORKSPACE, id("workspaceId"))
            .replace("{job}", id("jobId"))
            .replace("\"18\"", &format!("\"{}\"", id("jobId")))
            .replace("/job/18/", &format!("/job/{}/", id("jobId")))
            .replace("{step1}", &job.step_of("terraformPlan").id)
            .replace("{step2}", id("stepId"));
        serde_json::from_str(&text).unwrap()
    }

    async fn send(&self, call: &Value) {
        let path = call["path"].as_str().unwrap();
        let url = format!("{}{path}", self.stage.platform.url());
        let client = reqwest::Client::new();
        let mut body = call["body"].clone();
        if path.starts_with("/context/") {
            let stored = client.get(&url).bearer_auth(self.token()).send().await;
            let mut stored: Map<String, Value> = stored.unwrap().json().await.unwrap();
            for (key, value) in body.as_object().unwrap() {
                let kept = stored.entry(key).or_insert_with(|| json!({}));
                let steps = value.as_object().unwrap().clone();
                kept.as_object_mut().unwrap().extend(steps);
            }
            body = stored.into();
        }
        let method = call["method"].as_str().unwrap().parse().unwrap();
        let answer = client
            .request(method, url)
            .bearer_auth(self.token())
            .header("content-type", call["contentType"].as_str().unwrap())
            .body(body.to_string())
            .send()
            .await
            .unwrap();
        let status = answer.status();
        assert!(status.is_success(), "{status} {:?}", answer.text().await);
    }

    fn token(&self) -> String {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_secs();
        let claims = json!({
            "iss": "TerrakubeInternal", "sub": "TerrakubeInternal (TOKEN)", "aud": "TerrakubeInternal",
            "iat": now, "exp": now + 60,
        });
        let secret = URL_SAFE_NO_PAD
            .decode(self.stage.platform.secret())
            .unwrap();
        let key = EncodingKey::from_secret(&secret);
        jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims, &key).unwrap()
    }
}

fn store(server: &S3) -> Store {
    // A second installation leaves the first in force.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let url = server.url();
    Store::open(&StoreSettings::S3(S3Settings {
        bucket: s3::BUCKET.to_owned(),
        region: s3::REGION.to_owned(),
        endpoint: Some(HttpUrl {
            url: Url::parse(&url).unwrap(),
            text: url,
        }),
        endpoint_region: None,
        path_style: true,
        credentials: S3Credentials::Keys(StaticKeys {
            access_key: SecretString::from(server.access_key()),
            secret_key: SecretString::from(server.secret_key()),
        }),
        role: None,
        handover: Handover::Outside,
        use_lockfile: false,
    }))
    .unwrap()
}

/// The key that the stock executor finds in a reference.
fn key_of(reference: &str) -> ObjectKey {
    let (_, path) = reference.split_once("/tfstate/").unwrap();
    ObjectKey {
        area: Area::State,
        path: path.to_owned(),
    }
}

fn tool(work: &Path, data: &Value, arguments: &[&str]) -> Output {
    let variables = data["environmentVariables"].as_object().unwrap();
    let variables = variables
        .iter()
        .map(|(name, value)| (name, value.as_str().unwrap()));
    let mut command = Command::new(program(Tool::Terraform).unwrap());
    command
        .args(arguments)
        .current_dir(work)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("HOME", work)
        .env("CHECKPOINT_DISABLE", "1")
        .envs(variables);
    tokio::task::block_in_place(|| command.output()).unwrap()
}

fn succeeds(output: &Output, code: i32) -> Result<(), String> {
    if output.status.code() == Some(code) {
        return Ok(());
    }
    let text = [&*output.stdout, &*output.stderr].concat();
    Err(String::from_utf8_lossy(&text).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_a_stock_executor_planned_is_applied_after_the_switch() {
    let mut switch = Switch::new().await;
    let mut waiting = Vec::new();
    for _ in 0..2 {
        switch.select(true);
        let job = switch.start();
        switch.run_stock().await.unwrap();
        let planned = switch
            .stage
            .platform
            .until_job(job, Status::WaitingApproval);
        assert!(planned.await.terraform_plan.is_some());
        switch.rename(job);
        waiting.push(job);
    }
    switch.select(false);

    // Without the settings of the switch, the plan is of unknown origin.
    let launcher = switch.stage.serve();
    switch.stage.platform.approve(waiting[0]).await;
    let failed = switch.stage.platform.until_job(waiting[0], Status::Failed);
    let failed = failed.await;
    let step = &failed.step_of("terraformApply").id;
    let organization = switch.stage.platform.organization();
    let output = ObjectKey::step_output(&organization, &failed.id.to_string(), step);
    let output = switch.store.read(&output).await.unwrap().unwrap();
    let output = String::from_utf8_lossy(&output);
    assert!(output.contains("MAYFLY_MIXED_FLEET=true"), "{output}");
    drop(launcher);

    let _launcher = switch.stage.serve_with(SETTINGS_OF_A_SWITCH);
    switch.stage.platform.approve(waiting[1]).await;
    switch.assert_applied(waiting[1]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_mayfly_planned_is_applied_by_a_stock_executor() {
    let mut switch = Switch::new().await;
    // Without the settings of the switch, the plan names credentials that only Mayfly has.
    for (settings, is_applied) in [(&[][..], false), (SETTINGS_OF_A_SWITCH, true)] {
        switch.select(false);
        let launcher = switch.stage.serve_with(settings);
        let job = switch.start();
        switch
            .stage
            .platform
            .until_job(job, Status::WaitingApproval)
            .await;
        switch.rename(job);
        drop(launcher);
        switch.select(true);
        switch.stage.platform.approve(job).await;
        switch.run_stock().await.unwrap();
        match switch.run_stock().await {
            Ok(()) => {
                assert!(is_applied);
                switch.assert_applied(job).await;
            }
            Err(printed) => {
                assert!(!is_applied, "{printed}");
                assert!(printed.contains("mayfly-state"), "{printed}");
            }
        }
    }
}
