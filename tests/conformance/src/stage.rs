//! What the scenarios stand on: an organization, workspaces, templates and jobs, and their removal. Everything made bears
//! the name of the run, so that it can be found and removed whatever was interrupted, an answer on its way included.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::Args;
use crate::api::{Api, id_of, records};

const MODULE: &str = include_str!("../module/main.tf");
/// What the platform runs for uploaded content; every organization is made with it.
const TEMPLATE_FOR_CONTENT: &str = "Terraform-Plan/Apply-Cli";
pub(crate) const POLL: Duration = Duration::from_millis(300);
/// The platform's own timer comes every 30 seconds.
const PLATFORM_TIMER: Duration = Duration::from_secs(45);
/// What has ended altogether changes no more; the last answers may have crossed.
const SETTLED: Duration = Duration::from_secs(2);
pub(crate) const ENDED: [&str; 5] = ["completed", "noChanges", "failed", "rejected", "cancelled"];

#[derive(Debug)]
pub(crate) struct Stage<'a> {
    pub(crate) api: &'a Api,
    args: &'a Args,
    /// Name of everything that is made.
    name: String,
    /// `/api/v1/organization/ID`.
    organization: String,
}

/// A workspace, and where its module comes from.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) id: String,
    pub(crate) path: String,
    /// The content that was uploaded for it, unless it has a repository.
    content: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: String,
    pub(crate) posted: Instant,
    pub(crate) attributes: Value,
    /// In their order.
    pub(crate) steps: Vec<Step>,
}

#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) status: String,
    pub(crate) output: String,
    number: i64,
}

impl Job {
    fn status(&self) -> &str {
        self.attributes["status"].as_str().unwrap_or("unknown")
    }

    fn step_statuses(&self) -> Vec<&str> {
        self.steps.iter().map(|step| step.status.as_str()).collect()
    }

    /// Its status and those of its steps: `completed: completed, notExecuted`.
    pub(crate) fn statuses(&self) -> String {
        format!("{}: {}", self.status(), self.step_statuses().join(", "))
    }

    /// What to do about an address of the executor that the platform refuses. It says so in the name of the step.
    fn advice(&self) -> &'static str {
        let is_refused = |step: &Step| step.name.contains("URL blocked");
        if self.steps.iter().any(is_refused) {
            "; Terrakube refuses executors at private addresses: set AgentSsrfBlockPrivateNetworks=false in the environment of its API"
        } else {
            ""
        }
    }

    fn is_settled(&self) -> bool {
        let open = ["pending", "queue", "running"];
        !self
            .step_statuses()
            .iter()
            .any(|status| open.contains(status))
    }
}

impl<'a> Stage<'a> {
    /// Finds the organization, or makes one in which the token's team may do what is done here.
    pub(crate) async fn set(api: &'a Api, args: &'a Args, name: &str, token: &str) -> Result<Self> {
        let stage = |id: &str| Self {
            api,
            args,
            name: name.to_owned(),
            organization: format!("/api/v1/organization/{id}"),
        };
        // Also asked for an organization that is yet to be made: a wrong address or token is told before anything else.
        let wanted = args.organization.as_deref();
        let found = find_organization(api, wanted.unwrap_or(name)).await?;
        if let Some(wanted) = wanted {
            let found = found.with_context(|| format!("the token sees no organization `{wanted}`"));
            return Ok(stage(&found?));
        }
        let team = match &args.team {
            Some(team) => team.clone(),
            None => group_of(token)
                .context("which of the token's teams may use the organization? Give --team")?,
        };
        let attributes = json!({
            "name": name, "description": "cargo xtask conformance", "executionMode": "remote",
        });
        let made = api
            .create("/api/v1/organization", "organization", attributes)
            .await;
        let stage = stage(&made.context(
            "could not make an organization; a token that may not can use one: --organization with --source",
        )?);
        let rights = json!({
            "name": team, "manageState": true, "manageWorkspace": true, "manageTemplate": true,
            "manageJob": true, "planJob": true, "approveJob": true,
        });
        stage.create("team", "team", rights).await?;
        for (key, value) in &args.global {
            let attributes = json!({
                "key": key, "value": value, "category": "ENV", "sensitive": false, "hcl": false,
                "description": "",
            });
            stage.create("globalvar", "globalvar", attributes).await?;
        }
        Ok(stage)
    }

    /// A workspace of the module, with values for its variables.
    pub(crate) async fn workspace(
        &self,
        scenario: &str,
        variables: &[(&str, &str)],
    ) -> Result<Workspace> {
        let args = self.args;
        let source = args.source.as_deref();
        let attributes = json!({
            "name": format!("{}-{scenario}", self.name), "executionMode": "remote",
            "source": source.unwrap_or("empty"),
            "branch": source.map_or("remote-content", |_| &args.branch),
            "folder": source.map_or("/", |_| &args.folder),
            "iacType": if args.tofu { "tofu" } else { "terraform" },
            "terraformVersion": args.tool_version,
        });
        let id = self.create("workspace", "workspace", attributes).await?;
        let path = format!("{}/workspace/{id}", self.organization);
        for (key, value) in variables {
            let attributes = json!({
                "key": key, "value": value, "category": "TERRAFORM", "sensitive": *key == "secret", "hcl": false,
            });
            let variables = format!("{path}/variable");
            self.api.create(&variables, "variable", attributes).await?;
        }
        let content = match source {
            Some(_) => None,
            None => Some(self.upload(&id).await?),
        };
        Ok(Workspace { id, path, content })
    }

    async fn upload(&self, workspace: &str) -> Result<String> {
        let attributes = json!({"speculative": false, "auto-queue-runs": false});
        let versions = format!("/remote/tfe/v2/workspaces/{workspace}/configuration-versions");
        let id = self
            .api
            .create(&versions, "configuration-versions", attributes)
            .await?;
        let path = format!("/remote/tfe/v2/configuration-versions/{id}");
        self.api.upload(&path, packed()?).await?;
        Ok(id)
    }

    /// Starts a job with the steps of `flow`, the `flow` of a template.
    pub(crate) async fn job(&self, workspace: &Workspace, flow: &Value) -> Result<Job> {
        // YAML is a superset of JSON.
        let tcl = BASE64_STANDARD.encode(json!({"flow": flow}).to_string());
        let posted = Instant::now();
        let id = match &workspace.content {
            None => self.job_of_source(workspace, &tcl).await?,
            Some(content) => self.job_of_content(workspace, content, &tcl).await?,
        };
        self.look(id, posted).await
    }

    async fn job_of_source(&self, workspace: &Workspace, tcl: &str) -> Result<String> {
        let name = format!("{}-{}", self.name, uuid::Uuid::new_v4().simple());
        let attributes = json!({"name": name, "description": "", "version": "1.0.0", "tcl": tcl});
        let template = self.create("template", "template", attributes).await?;
        let document = json!({"data": {
            "type": "job", "attributes": {"templateReference": template},
            "relationships": {"workspace": {"data": {"type": "workspace", "id": workspace.id}}},
        }});
        let jobs = format!("{}/job", self.organization);
        id_of(&self.api.post(&jobs, &document).await?)
    }

    /// Only by this way do all executors get uploaded content. It always takes one template, which therefore is changed:
    /// the organization is this run's own, and a job has its copy once it has steps.
    async fn job_of_content(
        &self,
        workspace: &Workspace,
        content: &str,
        tcl: &str,
    ) -> Result<String> {
        let templates = format!("{}/template", self.organization);
        let all = self.api.get(&templates).await?;
        let mut all = records(&all).iter();
        let template = all.find(|template| template["attributes"]["name"] == TEMPLATE_FOR_CONTENT);
        let template = template.and_then(|template| template["id"].as_str());
        let template = template.with_context(|| format!("no template `{TEMPLATE_FOR_CONTENT}`"))?;
        let path = format!("{templates}/{template}");
        self.api
            .change(&path, "template", json!({"tcl": tcl}))
            .await?;
        let document = json!({"data": {
            "type": "runs", "attributes": {},
            "relationships": {
                "workspace": {"data": {"type": "workspaces", "id": workspace.id}},
                "configuration-version": {"data": {"type": "configuration-versions", "id": content}},
            },
        }});
        let run = id_of(&self.api.post("/remote/tfe/v2/runs", &document).await?)?;
        Ok(run.trim_start_matches("run-").to_owned())
    }

    /// Waits until the job is as wanted. A job that ends otherwise is no longer waited for.
    pub(crate) async fn until(
        &self,
        mut job: Job,
        what: &str,
        wanted: impl Fn(&Job) -> bool,
    ) -> Result<Job> {
        let mut limit = Instant::now() + self.timeout();
        let mut ended = None;
        loop {
            job = self.look(job.id, job.posted).await?;
            if wanted(&job) {
                return Ok(job);
            }
            // Of a job that has ended, the platform settles the steps that are left a little later.
            if ENDED.contains(&job.status()) {
                let ended = *ended.get_or_insert_with(Instant::now);
                let settled = job.is_settled();
                let patience = if settled { SETTLED } else { PLATFORM_TIMER };
                limit = limit.min(ended + patience);
            }
            if Instant::now() > limit {
                let (id, statuses) = (&job.id, job.statuses());
                let last = self.last_words(&job).await;
                let advice = job.advice();
                bail!("waited for `{what}`, but job {id} is `{statuses}`; {last}{advice}");
            }
            tokio::time::sleep(POLL).await;
        }
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.args.timeout()
    }

    /// Waits until a job and its steps have these statuses.
    pub(crate) async fn until_it_is(&self, job: Job, statuses: &str) -> Result<Job> {
        self.until(job, statuses, |job| job.statuses() == statuses)
            .await
    }

    pub(crate) async fn look(&self, id: String, posted: Instant) -> Result<Job> {
        let path = format!("{}?include=step", self.path_of(&id));
        Ok(job_in(&self.api.get(&path).await?, id, posted))
    }

    pub(crate) fn path_of(&self, job: &str) -> String {
        format!("{}/job/{job}", self.organization)
    }

    /// The stored output of a step, from the path of its record's URL.
    pub(crate) async fn output(&self, job: &Job, step: &Step) -> Result<String> {
        let organization = self.organization.rsplit('/').next().unwrap_or_default();
        let path = format!(
            "/tfoutput/v1/organization/{organization}/job/{}/step/{}",
            job.id, step.id
        );
        if !step.output.ends_with(&path) {
            bail!(
                "the record of step {} names `{}` as its output, not …{path}",
                step.name,
                step.output
            );
        }
        let body = self.api.bytes(&path).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// The end of what a job said, for the reason of a failure.
    async fn last_words(&self, job: &Job) -> String {
        let Some(step) = job.steps.iter().rfind(|step| !step.output.is_empty()) else {
            return "no step has an output".to_owned();
        };
        match self.output(job, step).await {
            Ok(text) => {
                let lines: Vec<_> = text
                    .lines()
                    .filter(|line| !line.trim().is_empty())
                    .collect();
                let last = &lines[lines.len().saturating_sub(6)..];
                format!(
                    "{} ended with:\n          {}",
                    step.name,
                    last.join("\n          ")
                )
            }
            Err(error) => format!("its output cannot be read: {error:#}"),
        }
    }

    async fn create(&self, folder: &str, kind: &str, attributes: Value) -> Result<String> {
        let path = format!("{}/{folder}", self.organization);
        self.api.create(&path, kind, attributes).await
    }
}

/// Removes what the run of this name has made, and says what could not be.
pub(crate) async fn clear(api: &Api, args: &Args, name: &str) -> Result<()> {
    let organization = args.organization.as_deref().unwrap_or(name);
    let Some(id) = find_organization(api, organization).await? else {
        return Ok(());
    };
    let path = format!("/api/v1/organization/{id}");
    let mut left = Vec::new();
    for (folder, kind) in [("workspace", "workspace"), ("template", "template")] {
        let all = api.get(&format!("{path}/{folder}")).await?;
        for record in records(&all) {
            let called = record["attributes"]["name"].as_str().unwrap_or_default();
            let id = record["id"].as_str().unwrap_or_default();
            if !called.starts_with(name) {
                continue;
            }
            let path_of_record = format!("{path}/{folder}/{id}");
            let removed = match kind {
                "workspace" => retire(api, &path, &path_of_record).await,
                _ => api.remove(&path_of_record).await,
            };
            if let Err(error) = removed {
                left.push(format!("{kind} `{called}`: {error:#}"));
            }
        }
    }
    if args.organization.is_none() {
        let disabled = json!({"disabled": true});
        if let Err(error) = api.change(&path, "organization", disabled).await {
            left.push(format!("organization `{name}`: {error:#}"));
        }
    }
    if left.is_empty() {
        return Ok(());
    }
    Err(anyhow!("not removed: {}", left.join("; ")))
}

/// As the platform's interface does it: jobs are no longer run, the workspace is hidden, and its states are deleted.
async fn retire(api: &Api, organization: &str, workspace: &str) -> Result<()> {
    let jobs = api.get(&format!("{workspace}/job")).await?;
    for job in records(&jobs) {
        let status = job["attributes"]["status"].as_str().unwrap_or_default();
        if !ENDED.contains(&status) {
            let path = format!(
                "{organization}/job/{}",
                job["id"].as_str().unwrap_or_default()
            );
            api.change(&path, "job", json!({"status": "cancelled"}))
                .await?;
        }
    }
    let id = workspace.rsplit('/').next().unwrap_or_default();
    let attributes = json!({"name": format!("DEL_{id}"), "deleted": true});
    api.change(workspace, "workspace", attributes).await
}

async fn find_organization(api: &Api, name: &str) -> Result<Option<String>> {
    let all = api.get("/api/v1/organization").await?;
    let mut all = records(&all).iter();
    let found = all.find(|organization| organization["attributes"]["name"] == name);
    Ok(found
        .and_then(|found| found["id"].as_str())
        .map(str::to_owned))
}

fn job_in(answer: &Value, id: String, posted: Instant) -> Job {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let included = answer["included"].as_array().map_or(&[][..], Vec::as_slice);
    let steps = included.iter().filter(|record| record["type"] == "step");
    let mut steps: Vec<_> = steps
        .map(|record| Step {
            id: text(&record["id"]),
            name: text(&record["attributes"]["name"]),
            status: text(&record["attributes"]["status"]),
            output: text(&record["attributes"]["output"]),
            number: record["attributes"]["stepNumber"]
                .as_i64()
                .unwrap_or_default(),
        })
        .collect();
    steps.sort_by_key(|step| step.number);
    let attributes = answer["data"]["attributes"].clone();
    Job {
        id,
        posted,
        attributes,
        steps,
    }
}

/// The first group of a personal or team token; the platform has verified it where it matters.
fn group_of(token: &str) -> Option<String> {
    let claims = BASE64_URL_SAFE_NO_PAD
        .decode(token.split('.').nth(1)?)
        .ok()?;
    let claims: Value = serde_json::from_slice(&claims).ok()?;
    claims["groups"][0].as_str().map(str::to_owned)
}

/// The module as the command line of the tool would upload it.
fn packed() -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    let mut header = tar::Header::new_gnu();
    header.set_size(MODULE.len() as u64);
    header.set_mode(0o644);
    archive.append_data(&mut header, "main.tf", MODULE.as_bytes())?;
    Ok(archive.into_inner()?.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_of_a_job_are_read_in_their_order() {
        let step = |number: i64, status: &str| {
            let attributes =
                json!({"stepNumber": number, "status": status, "name": "s", "output": null});
            json!({"type": "step", "id": number.to_string(), "attributes": attributes})
        };
        let answer = json!({
            "data": {"attributes": {"status": "queue"}},
            "included": [step(200, "pending"), {"type": "workspace"}, step(100, "completed")],
        });
        let job = job_in(&answer, "7".into(), Instant::now());
        assert_eq!(job.id, "7");
        assert_eq!(job.statuses(), "queue: completed, pending");
        let bare = job_in(&json!({}), "7".into(), Instant::now());
        assert_eq!(bare.statuses(), "unknown: ");
    }

    #[test]
    fn a_refused_address_of_the_executor_gets_advice() {
        let job = |name: &str| {
            let attributes = json!({"stepNumber": 100, "status": "failed", "name": name});
            let answer = json!({
                "data": {"attributes": {"status": "failed"}},
                "included": [{"type": "step", "id": "a", "attributes": attributes}],
            });
            job_in(&answer, "7".to_owned(), Instant::now())
        };
        let refused = "Error sending to executor: agent URL blocked: its address is private";
        let advice = job(refused).advice();
        assert!(
            advice.contains("AgentSsrfBlockPrivateNetworks=false"),
            "{advice}"
        );
        assert_eq!(job("Terraform Plan").advice(), "");
    }

    #[test]
    fn the_team_comes_from_the_tokens_groups() {
        let token = |claims: Value| {
            format!(
                "e30.{}.c2ln",
                BASE64_URL_SAFE_NO_PAD.encode(claims.to_string())
            )
        };
        let group = group_of(&token(json!({"groups": ["devs", "ops"]})));
        assert_eq!(group.as_deref(), Some("devs"));
        for none in [
            token(json!({"groups": []})),
            token(json!({})),
            "opaque".into(),
            String::new(),
        ] {
            assert_eq!(group_of(&none), None, "{none}");
        }
    }
}
