//! What is run, and what has to hold afterwards whichever executor ran it. Where the stock executor and Mayfly differ on
//! purpose, nothing is asked.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use serde_json::{Value, json};

use crate::api::records;
use crate::report::Record;
use crate::stage::{Job, POLL, Stage, Workspace};

/// Characters that a shell, a command line or a template could take for its own.
const WORD: &str = r#"it's "odd" & $HOME, {x} = \y"#;
const SECRET: &str = "conformance-s3cret-value";
const LINES: usize = 5000;
const LINES_TEXT: &str = "5000";
/// Longer than any executor takes from a cancellation to its tool's end, where it heeds one.
const SECONDS: &str = "40";
const PLANNED: &str = "Plan: 2 to add, 0 to change, 0 to destroy";
const APPLIED: &str = "Apply complete! Resources: 2 added, 0 changed, 0 destroyed.";
const REFUSED: &str = "Resource precondition failed";
const CREATING: &str = "terraform_data.work: Creating";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    /// A plan alone: its summary, its reference, its changes in the job's context
    Plan,
    /// A plan, its apply, and a plan that finds nothing to do
    Apply,
    /// An apply, and a destroy of what it made
    Destroy,
    /// Scripts before the initialization, before and after a plan, and a step of scripts
    Scripts,
    /// An apply that waits for its approval
    Approval,
    /// An apply that is rejected
    Rejection,
    /// An apply that is cancelled while it works, and the plan after it
    Cancel,
    /// A plan that fails
    Failure,
    /// An apply that prints thousands of lines
    Large,
}

impl Scenario {
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value().expect("no scenario is hidden");
        value.get_name().to_owned()
    }

    pub(crate) async fn run(self, stage: &Stage<'_>, record: &mut Record) -> Result<()> {
        let variables: &[(&str, &str)] = match self {
            Self::Plan | Self::Apply => &[("word", WORD), ("secret", SECRET)],
            Self::Cancel => &[("seconds", SECONDS)],
            Self::Failure => &[("refuse", "true")],
            Self::Large => &[("lines", LINES_TEXT)],
            _ => &[],
        };
        let workspace = stage.workspace(&self.name(), variables).await?;
        let mut scene = Scene {
            stage,
            record,
            workspace,
            has_secret: variables.iter().any(|(name, _)| *name == "secret"),
        };
        match self {
            Self::Plan => scene.plan().await?,
            Self::Apply => scene.apply().await?,
            Self::Destroy => scene.destroy().await?,
            Self::Scripts => scene.scripts().await?,
            Self::Approval => scene.approval().await?,
            Self::Rejection => scene.rejection().await?,
            Self::Cancel => scene.cancel().await?,
            Self::Failure => scene.failure().await?,
            Self::Large => scene.large().await?,
        }
        scene.unlocked().await
    }
}

/// One scenario at work in its workspace.
struct Scene<'a> {
    stage: &'a Stage<'a>,
    record: &'a mut Record,
    workspace: Workspace,
    has_secret: bool,
}

impl Scene<'_> {
    async fn plan(&mut self) -> Result<()> {
        let flow = json!([step(100, "terraformPlan")]);
        let job = self.job("plan", &flow, "completed: completed").await?;
        self.says(&job, 0, PLANNED).await?;
        let reference = job.attributes["terraformPlan"].as_str().unwrap_or_default();
        self.holds("the job names its plan", !reference.is_empty());
        let changes = &job.attributes["planChanges"];
        self.equal("the job says that there are changes", changes, true);
        let context = self.context(&job).await?;
        let changes = by_address(&context["planStructuredOutput"][&job.steps[0].id], "action");
        self.equal(
            "the context holds both changes",
            &changes,
            ["create", "create"],
        );
        self.states(&[]).await.map(drop)
    }

    async fn apply(&mut self) -> Result<()> {
        let job = self.applied().await?;
        let context = self.context(&job).await?;
        let apply = &job.steps[1].id;
        let changes = by_address(&context["applyStructuredOutput"][apply], "status");
        self.equal(
            "the context holds both changes as applied",
            &changes,
            ["applied", "applied"],
        );
        // By name: the sensitive one comes first.
        let outputs = &context["terraformOutputs"][apply];
        self.equal("the context holds the output", &outputs[1]["value"], WORD);
        let secret = (&outputs[0]["name"], &outputs[0]["value"]);
        let secret = json!([secret.0, secret.1]);
        self.equal(
            "the context withholds the sensitive output",
            &secret,
            json!(["secret", null]),
        );
        let states = self.states(&[&job]).await?;
        let state = self.stage.api.get(&states[0]).await?;
        let word = &state["values"]["outputs"]["word"]["value"];
        self.equal("the state version holds the output", word, WORD);

        let statuses = "completed: completed, notExecuted";
        let again = self.job("unchanged", &plan_and_apply(), statuses).await?;
        self.says(&again, 0, "No changes.").await?;
        let changes = &again.attributes["planChanges"];
        self.equal("the job says that there are none", changes, false);
        self.states(&[&job]).await.map(drop)
    }

    async fn destroy(&mut self) -> Result<()> {
        let made = self.applied().await?;
        let flow = json!([step(100, "terraformDestroy")]);
        let job = self.job("destroy", &flow, "completed: completed").await?;
        self.says(&job, 0, "Destroy complete! Resources: 2 destroyed.")
            .await?;
        let mut left = Vec::new();
        for state in self.states(&[&made, &job]).await? {
            let state = self.stage.api.get(&state).await?;
            let resources = state["values"]["root_module"]["resources"].as_array();
            left.push(resources.map_or(0, Vec::len));
        }
        left.sort_unstable();
        self.equal(
            "one state version has two resources, one has none",
            &json!(left),
            [0, 2],
        );
        Ok(())
    }

    async fn scripts(&mut self) -> Result<()> {
        let script = |priority: u32, phase: &str, script: &str| {
            let kind = "BASH";
            json!({"runtime": kind, "priority": priority, phase: true, "script": script})
        };
        let mut plan = step(100, "terraformPlan");
        let first = "echo first; echo CONFORMANCE_WORD=on >> .terrakube_temp_env";
        plan["commands"] = json!([
            script(10, "beforeInit", first),
            script(20, "before", "echo second in $workspaceName"),
            script(30, "after", "echo last, handed $CONFORMANCE_WORD"),
        ]);
        let mut alone = step(200, "customScripts");
        alone["commands"] = json!([script(10, "before", "echo alone in job $jobId")]);
        let flow = json!([plan, alone]);
        let job = self
            .job("scripts", &flow, "completed: completed, completed")
            .await?;
        let text = self.output(&job, 0).await?;
        let said = [
            "first",
            "second in conformance-",
            PLANNED,
            "last, handed on",
        ];
        let places = said.map(|words| text.find(words));
        self.record.check(
            "the scripts ran in their phases, and one handed a variable on",
            places.iter().all(Option::is_some) && places.is_sorted(),
            || format!("{said:?} at {places:?}"),
        );
        self.says(&job, 1, &format!("alone in job {}", job.id))
            .await
    }

    async fn approval(&mut self) -> Result<()> {
        let job = self.waiting_for_approval().await?;
        self.states(&[]).await?;
        self.decide(&job, "approved").await?;
        let approved = Instant::now();
        let statuses = "completed: completed, completed, completed";
        let job = self.stage.until_it_is(job, statuses).await?;
        self.record.job("approved apply", &job, approved.elapsed());
        self.says(&job, 2, APPLIED).await?;
        self.states(&[&job]).await.map(drop)
    }

    async fn rejection(&mut self) -> Result<()> {
        let job = self.waiting_for_approval().await?;
        self.decide(&job, "rejected").await?;
        let rejected = Instant::now();
        let statuses = "rejected: completed, failed, failed";
        let job = self.stage.until_it_is(job, statuses).await?;
        self.record.job("rejected apply", &job, rejected.elapsed());
        self.states(&[]).await.map(drop)
    }

    async fn cancel(&mut self) -> Result<()> {
        let job = self.stage.job(&self.workspace, &plan_and_apply()).await?;
        let applies = |job: &Job| {
            job.steps
                .get(1)
                .is_some_and(|step| step.status == "running")
        };
        let job = self.stage.until(job, "a running apply", applies).await?;
        let shown = async || Ok(self.output(&job, 1).await?.contains(CREATING));
        self.wait("the live log shows the apply while it works", shown)
            .await?;
        self.holds("the live log shows the apply while it works", true);
        self.decide(&job, "cancelled").await?;
        let cancelled = Instant::now();
        // The platform sets the statuses at once; the state is the executor's last word.
        let stored = async || Ok(!self.history().await?.is_empty());
        self.wait("the cancelled apply stores its state", stored)
            .await?;
        self.states(&[&job]).await?;
        let job = self.stage.look(job.id, job.posted).await?;
        self.record
            .job("cancelled apply", &job, cancelled.elapsed());
        self.equal(
            "the job stays cancelled",
            &job.attributes["status"],
            "cancelled",
        );
        let flow = json!([step(100, "terraformPlan")]);
        self.job("plan after it", &flow, "completed: completed")
            .await
            .map(drop)
    }

    async fn failure(&mut self) -> Result<()> {
        let job = self
            .job("failure", &plan_and_apply(), "failed: failed, failed")
            .await?;
        self.says(&job, 0, REFUSED).await?;
        let context = self.context(&job).await?;
        let diagnostic = &context["jobDiagnostics"][&job.steps[0].id][0];
        self.equal(
            "the context holds the diagnostic",
            &diagnostic["summary"],
            REFUSED,
        );
        self.holds("the apply has no output", job.steps[1].output.is_empty());
        self.states(&[]).await.map(drop)
    }

    async fn large(&mut self) -> Result<()> {
        let job = self.applied().await?;
        let numbers = numbered(&self.output(&job, 1).await?);
        let wrong = numbers
            .iter()
            .zip(1..)
            .find(|(found, wanted)| **found != *wanted);
        self.record.check(
            &format!("the output holds all {LINES} lines, once and in their order"),
            numbers.iter().copied().eq(1..=LINES),
            || {
                format!(
                    "{} lines; the first at a wrong place: {wrong:?}",
                    numbers.len()
                )
            },
        );
        Ok(())
    }

    /// Plan and apply, with what always holds of them.
    async fn applied(&mut self) -> Result<Job> {
        let statuses = "completed: completed, completed";
        let job = self
            .job("plan and apply", &plan_and_apply(), statuses)
            .await?;
        self.says(&job, 0, PLANNED).await?;
        self.says(&job, 1, APPLIED).await?;
        Ok(job)
    }

    async fn waiting_for_approval(&mut self) -> Result<Job> {
        let kinds = ["terraformPlan", "approval", "terraformApply"];
        let flow: Value = (1..)
            .zip(kinds)
            .map(|(number, kind)| step(number * 100, kind))
            .collect();
        let statuses = "waitingApproval: completed, pending, pending";
        self.job("plan", &flow, statuses).await
    }

    /// Runs a job until it and its steps are as told, and notes how long that took.
    async fn job(&mut self, name: &str, flow: &Value, statuses: &str) -> Result<Job> {
        let job = self.stage.job(&self.workspace, flow).await?;
        let job = self.stage.until_it_is(job, statuses).await;
        let job = job.with_context(|| name.to_owned())?;
        self.record.job(name, &job, job.posted.elapsed());
        Ok(job)
    }

    async fn decide(&self, job: &Job, status: &str) -> Result<()> {
        let path = self.stage.path_of(&job.id);
        self.stage
            .api
            .change(&path, "job", json!({"status": status}))
            .await
    }

    /// Waits for what no status tells.
    async fn wait(&self, what: &str, done: impl AsyncFn() -> Result<bool>) -> Result<()> {
        let limit = Instant::now() + self.stage.timeout();
        while !done().await? {
            ensure!(Instant::now() < limit, "waited in vain: {what}");
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    async fn output(&self, job: &Job, step: usize) -> Result<String> {
        self.stage.output(job, &job.steps[step]).await
    }

    async fn says(&mut self, job: &Job, step: usize, words: &str) -> Result<()> {
        let text = plain(&self.output(job, step).await?);
        let found = || format!("its {} bytes lack that", text.len());
        let name = &job.steps[step].name;
        let what = format!("the output of {name} says `{words}`");
        self.record.check(&what, text.contains(words), found);
        self.conceals(&format!("the output of {name}"), &text);
        Ok(())
    }

    async fn context(&mut self, job: &Job) -> Result<Value> {
        let context = self
            .stage
            .api
            .get(&format!("/context/v1/{}", job.id))
            .await?;
        self.conceals("the context", &context.to_string());
        Ok(context)
    }

    /// Only the scenarios that have a secret are asked whether they keep it.
    fn conceals(&mut self, what: &str, text: &str) {
        if self.has_secret {
            self.holds(
                &format!("{what} conceals the sensitive value"),
                !text.contains(SECRET),
            );
        }
    }

    /// Checks which jobs left a state version, and gives the paths of the versions.
    async fn states(&mut self, jobs: &[&Job]) -> Result<Vec<String>> {
        let versions = self.history().await?;
        let mut found: Vec<_> = versions
            .iter()
            .map(|version| version["jobReference"].clone())
            .collect();
        found.sort_by_key(ToString::to_string);
        let wanted: Vec<_> = jobs.iter().map(|job| job.id.as_str()).collect();
        let what = format!("state versions: {}", jobs.len());
        self.equal(&what, &json!(found), wanted);
        let path = |version: &Value| {
            let url = version["output"].as_str().unwrap_or_default();
            let at = url
                .find("/tfstate/v1/")
                .context("a state version without its address")?;
            Ok(url[at..].to_owned())
        };
        let paths: Vec<_> = versions.iter().map(path).collect::<Result<_>>()?;
        ensure!(
            paths.len() == jobs.len(),
            "the state versions cannot be compared"
        );
        Ok(paths)
    }

    async fn history(&self) -> Result<Vec<Value>> {
        let answer = self
            .stage
            .api
            .get(&format!("{}/history", self.workspace.path))
            .await?;
        let versions = records(&answer).iter();
        Ok(versions
            .map(|version| version["attributes"].clone())
            .collect())
    }

    async fn unlocked(&mut self) -> Result<()> {
        let workspace = self.stage.api.get(&self.workspace.path).await?;
        let locked = &workspace["data"]["attributes"]["locked"];
        self.equal("the workspace is not locked", locked, false);
        Ok(())
    }

    fn equal(&mut self, what: &str, found: &Value, wanted: impl Into<Value>) {
        let wanted = wanted.into();
        let instead = || format!("{found}, not {wanted}");
        self.record.check(what, *found == wanted, instead);
    }

    fn holds(&mut self, what: &str, holds: bool) {
        self.record.check(what, holds, || "it does not".to_owned());
    }
}

fn step(number: u32, kind: &str) -> Value {
    json!({"type": kind, "name": kind, "step": number})
}

fn plan_and_apply() -> Value {
    json!([step(100, "terraformPlan"), step(200, "terraformApply")])
}

/// One value of every change in a context, by address.
fn by_address(changes: &Value, key: &str) -> Value {
    let mut changes = changes.as_array().cloned().unwrap_or_default();
    changes.sort_by_key(|change| change["address"].to_string());
    changes.iter().map(|change| change[key].clone()).collect()
}

/// The numbers of the lines that the module's apply prints, in the order of the text.
fn numbered(text: &str) -> Vec<usize> {
    let rest = text.split("numbered line ").skip(1);
    rest.filter_map(|rest| rest.split_once('.')?.0.parse().ok())
        .collect()
}

/// A text without the colours of a terminal.
fn plain(text: &str) -> String {
    let mut parts = text.split('\u{1b}');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain.push_str(part.split_once('m').map_or(part, |(_, rest)| rest));
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_module_differ_from_the_command_that_prints_them() {
        let text = "Executing: echo \"numbered line $i.\"\nx (local-exec): numbered line 1.\nx (local-exec): numbered line 2.\n";
        assert_eq!(numbered(text), [1, 2]);
        assert!(numbered("nothing").is_empty());
    }

    #[test]
    fn text_is_found_between_colour_codes() {
        assert_eq!(plain("\u{1b}[1mPlan:\u{1b}[0m 2 to add"), "Plan: 2 to add");
        assert_eq!(plain("no colours"), "no colours");
    }

    #[test]
    fn changes_are_compared_by_address() {
        let changes =
            json!([{"address": "b", "action": "create"}, {"address": "a", "action": "read"}]);
        assert_eq!(by_address(&changes, "action"), json!(["read", "create"]));
        assert_eq!(by_address(&Value::Null, "action"), json!([]));
    }
}
