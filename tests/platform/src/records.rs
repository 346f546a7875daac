//! What the platform stores: organizations, workspaces, jobs, steps and histories, with the rules that hold between
//! them. Knows no network; every change of a status goes through [`Records::set_job`] and [`Records::set_step`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::ledger::{Actor, Transition};
use crate::template::Flow;

/// Id of the first job of a platform.
const FIRST_JOB: u32 = 412;

/// Status of a job or a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Status {
    Pending,
    WaitingApproval,
    Approved,
    Queue,
    Running,
    Completed,
    NoChanges,
    NotExecuted,
    Rejected,
    Cancelled,
    Failed,
    Unknown,
}

impl Status {
    /// Whether it is final.
    pub fn is_terminal(self) -> bool {
        matches!(
            self,
            Self::Completed
                | Self::NoChanges
                | Self::NotExecuted
                | Self::Rejected
                | Self::Cancelled
                | Self::Failed
        )
    }

    /// Whether a job with this status waits for dispatch.
    pub fn waits_for_dispatch(self) -> bool {
        matches!(self, Self::Pending | Self::Approved)
    }

    /// Whether a job with this status was dispatched and has not ended.
    pub fn is_with_an_executor(self) -> bool {
        matches!(self, Self::Queue | Self::Running)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A variable of a workspace or of the organization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    pub key: String,
    pub value: String,
    /// For Terraform rather than for the environment.
    pub terraform: bool,
}

impl Variable {
    /// An input variable.
    pub fn terraform(key: &str, value: &str) -> Self {
        Self {
            key: key.to_owned(),
            value: value.to_owned(),
            terraform: true,
        }
    }

    /// An environment variable.
    pub fn env(key: &str, value: &str) -> Self {
        Self {
            terraform: false,
            ..Self::terraform(key, value)
        }
    }
}

/// The name of the organization, which addresses of modules and providers have.
pub const ORGANIZATION: &str = "acme";

/// A workspace. The platform has one organization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workspace {
    pub id: String,
    pub name: String,
    pub source: String,
    pub branch: String,
    pub folder: Option<String>,
    pub terraform_version: String,
    /// `terraform`; anything else is OpenTofu.
    pub iac_type: String,
    /// `GITHUB`, `SSH~id_rsa` and so on.
    pub vcs_type: String,
    pub connection_type: Option<String>,
    pub access_token: Option<String>,
    pub module_ssh_key: Option<String>,
    pub variables: Vec<Variable>,
    /// The URL of its agent. `None`: its jobs go where those of the platform go.
    pub agent: Option<String>,
}

impl Workspace {
    /// A workspace on the branch `main` of a public repository.
    pub fn new(source: &str) -> Self {
        Self {
            id: Uuid::new_v4().to_string(),
            name: "network-dev".to_owned(),
            source: source.to_owned(),
            branch: "main".to_owned(),
            folder: Some("/".to_owned()),
            terraform_version: ">=1.4.0".to_owned(),
            iac_type: "terraform".to_owned(),
            vcs_type: "PUBLIC".to_owned(),
            connection_type: None,
            access_token: None,
            module_ssh_key: None,
            variables: Vec::new(),
            agent: None,
        }
    }

    /// The same workspace with one variable more.
    #[must_use]
    pub fn with(mut self, variable: Variable) -> Self {
        self.variables.push(variable);
        self
    }
}

/// A new job.
#[derive(Debug, Clone)]
pub struct NewJob {
    pub workspace: String,
    pub template: Vec<Flow>,
    pub override_source: Option<String>,
    pub override_branch: Option<String>,
    pub refresh: bool,
    pub refresh_only: bool,
}

impl NewJob {
    /// A job of this template in a workspace.
    pub fn new(workspace: &str, template: Vec<Flow>) -> Self {
        Self {
            workspace: workspace.to_owned(),
            template,
            override_source: None,
            override_branch: None,
            refresh: true,
            refresh_only: false,
        }
    }

    /// A run of the command line: its content was uploaded there.
    #[must_use]
    pub fn from_upload(mut self, url: &str) -> Self {
        self.override_source = Some(url.to_owned());
        self.override_branch = Some("remote-content".to_owned());
        self
    }
}

/// One step of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    pub id: String,
    pub name: String,
    pub status: Status,
    pub output: Option<String>,
    pub flow: Flow,
}

/// A job and its steps, in the order of their numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    pub id: u32,
    pub workspace: String,
    pub status: Status,
    pub output: Option<String>,
    pub plan_changes: bool,
    pub terraform_plan: Option<String>,
    pub commit_id: Option<String>,
    pub override_source: Option<String>,
    pub override_branch: Option<String>,
    pub refresh: bool,
    pub refresh_only: bool,
    pub steps: Vec<Step>,
    /// The scheduler ignores this job: it was `pending` without changes, or a test owns its statuses.
    pub wedged: bool,
    /// The step that was dispatched last.
    pub dispatched: Option<String>,
    /// How often a step of this job was posted, answered or not.
    pub posts: u32,
    /// How often the sweep found a heartbeat and kept the job.
    pub spared: u32,
    /// The rejection was dispatched.
    pub(crate) rejection_sent: bool,
    /// When the record last changed.
    pub(crate) updated: Instant,
    /// The test has ended the grace period since then.
    pub(crate) grace_ended: bool,
}

impl Job {
    /// The step of this id.
    pub fn step(&self, id: &str) -> Option<&Step> {
        self.steps.iter().find(|step| step.id == id)
    }

    /// The step of this type. Fails without one.
    #[track_caller]
    pub fn step_of(&self, kind: &str) -> &Step {
        let found = self.steps.iter().find(|step| step.flow.kind == kind);
        found.unwrap_or_else(|| panic!("job {} has no step {kind}", self.id))
    }

    /// Statuses of the steps, in order.
    pub fn step_statuses(&self) -> Vec<Status> {
        self.steps.iter().map(|step| step.status).collect()
    }

    /// The next step to dispatch.
    pub fn next_step(&self) -> Option<&Step> {
        self.steps
            .iter()
            .find(|step| step.status == Status::Pending)
    }

    /// The step that was dispatched last.
    pub fn dispatched_step(&self) -> Option<&Step> {
        self.step(self.dispatched.as_deref()?)
    }

    fn changes_infrastructure(&self) -> bool {
        let plans = ["terraformPlan", "terraformPlanDestroy"];
        self.steps
            .iter()
            .any(|step| !plans.contains(&step.flow.kind.as_str()))
    }

    fn is_changing_infrastructure(&self) -> bool {
        let changing = ["terraformApply", "terraformDestroy", "customScripts"];
        self.steps.iter().any(|step| {
            step.status == Status::Running && changing.contains(&step.flow.kind.as_str())
        })
    }
}

/// A published state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    pub id: String,
    pub workspace: String,
    pub output: String,
    pub job_reference: String,
    pub serial: i64,
    pub md5: String,
    pub lineage: String,
}

/// All records.
#[derive(Debug, Clone, Default)]
pub struct Records {
    pub organization: String,
    pub workspaces: BTreeMap<String, Workspace>,
    pub globals: Vec<Variable>,
    pub jobs: BTreeMap<u32, Job>,
    pub histories: Vec<History>,
    pub contexts: BTreeMap<u32, Map<String, Value>>,
    /// Uploaded archives by the ids of their configuration versions.
    pub uploads: BTreeMap<String, Vec<u8>>,
    /// Every change of a status, in order.
    pub transitions: Vec<Transition>,
    /// Jobs whose dispatch has not been answered yet.
    pub open_posts: BTreeSet<u32>,
    /// Jobs in `queue` whose log stream is about to be deleted.
    pub undeleted: BTreeSet<u32>,
}

impl Records {
    pub(crate) fn new() -> Self {
        Self {
            organization: Uuid::new_v4().to_string(),
            ..Self::default()
        }
    }

    /// The job of this id. Fails without one.
    #[track_caller]
    pub fn job(&self, id: u32) -> &Job {
        let found = self.jobs.get(&id);
        found.unwrap_or_else(|| panic!("there is no job {id}"))
    }

    pub(crate) fn job_mut(&mut self, id: u32) -> &mut Job {
        let found = self.jobs.get_mut(&id);
        found.unwrap_or_else(|| panic!("there is no job {id}"))
    }

    pub(crate) fn create(&mut self, new: NewJob) -> u32 {
        let id = self.jobs.keys().max().map_or(FIRST_JOB, |last| last + 1);
        let mut template = new.template;
        template.sort_by_key(|flow| flow.number);
        let steps = template.into_iter().map(|flow| Step {
            id: Uuid::new_v4().to_string(),
            name: flow.name.clone(),
            status: Status::Pending,
            output: None,
            flow,
        });
        let job = Job {
            id,
            workspace: new.workspace,
            status: Status::Pending,
            output: None,
            plan_changes: true,
            terraform_plan: None,
            commit_id: None,
            override_source: new.override_source,
            override_branch: new.override_branch,
            refresh: new.refresh,
            refresh_only: new.refresh_only,
            steps: steps.collect(),
            wedged: false,
            dispatched: None,
            posts: 0,
            spared: 0,
            rejection_sent: false,
            updated: Instant::now(),
            grace_ended: false,
        };
        self.jobs.insert(id, job);
        id
    }

    /// Sets the status of a job.
    pub(crate) fn set_job(&mut self, id: u32, status: Status, by: Actor) {
        let job = self.job_mut(id);
        job.updated = Instant::now();
        job.grace_ended = false;
        let from = std::mem::replace(&mut job.status, status);
        self.note(id, None, from, status, by);
    }

    /// Overwrites the row of a job with a copy from before its dispatch, but for its status.
    pub(crate) fn write_back(&mut self, copy: &Job) {
        let job = self.job_mut(copy.id);
        job.output.clone_from(&copy.output);
        job.plan_changes = copy.plan_changes;
        job.terraform_plan.clone_from(&copy.terraform_plan);
        job.commit_id.clone_from(&copy.commit_id);
    }

    /// Sets the status of a step.
    pub(crate) fn set_step(&mut self, id: u32, step: &str, status: Status, by: Actor) {
        let steps = &mut self.job_mut(id).steps;
        let Some(found) = steps.iter_mut().find(|known| known.id == step) else {
            return;
        };
        let from = std::mem::replace(&mut found.status, status);
        let number = found.flow.number;
        self.note(id, Some(number), from, status, by);
    }

    fn note(&mut self, job: u32, step: Option<u32>, from: Status, to: Status, by: Actor) {
        if from != to {
            self.transitions.push(Transition {
                at: Instant::now(),
                job,
                step,
                from,
                to,
                by,
            });
        }
    }

    /// Sets the status of all waiting and running steps.
    pub(crate) fn close_steps(&mut self, id: u32, status: Status, by: Actor) {
        let open: Vec<_> = self
            .job(id)
            .steps
            .iter()
            .filter(|step| matches!(step.status, Status::Pending | Status::Running))
            .map(|step| step.id.clone())
            .collect();
        for step in open {
            self.set_step(id, &step, status, by);
        }
    }

    /// Fails a job that cannot be dispatched. The reason becomes the step's name (contract 2.4).
    pub(crate) fn error_at_step(&mut self, id: u32, step: &str, reason: &str) {
        let reason: String = reason.chars().take(127).collect();
        let job = self.job_mut(id);
        if let Some(step) = job.steps.iter_mut().find(|known| known.id == step) {
            step.name = reason;
        }
        self.set_job(id, Status::Failed, Actor::Scheduler);
        self.close_steps(id, Status::Failed, Actor::Scheduler);
    }

    /// Whether a job has to wait for an earlier one of its workspace (contract 2.5).
    fn waits_for_its_workspace(&self, job: &Job) -> bool {
        let earlier = || {
            let before = self.jobs.range(..job.id).map(|(_, other)| other);
            before.filter(|other| other.workspace == job.workspace && !other.status.is_terminal())
        };
        if job.changes_infrastructure() {
            earlier().next().is_some()
        } else {
            earlier().any(Job::is_changing_infrastructure)
        }
    }

    /// Whether the job is next: no older job of any workspace can be dispatched.
    pub(crate) fn may_dispatch(&self, id: u32) -> bool {
        let job = self.job(id);
        let mut older = self.jobs.range(..id).map(|(_, other)| other);
        !self.waits_for_its_workspace(job)
            && !older.any(|other| {
                other.status.waits_for_dispatch() && !self.waits_for_its_workspace(other)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(workspaces: &[&str]) -> (Records, Vec<u32>) {
        let mut records = Records::new();
        let jobs = workspaces
            .iter()
            .map(|workspace| records.create(NewJob::new(workspace, Flow::plan_apply())))
            .collect();
        (records, jobs)
    }

    #[test]
    fn the_oldest_ready_job_runs_first_whatever_its_workspace() {
        let (mut records, jobs) = records(&["a", "a", "b"]);
        let may = |records: &Records| {
            let may = |job: &&u32| {
                records.job(**job).status.waits_for_dispatch() && records.may_dispatch(**job)
            };
            jobs.iter().filter(may).copied().collect::<Vec<_>>()
        };
        assert_eq!(may(&records), [jobs[0]]);
        records.set_job(jobs[0], Status::Running, Actor::Scheduler);
        // The second job waits for its own workspace, and delays no other one.
        assert_eq!(may(&records), [jobs[2]]);
        records.set_job(jobs[0], Status::Completed, Actor::Scheduler);
        assert_eq!(may(&records), [jobs[1]]);
    }

    #[test]
    fn a_plan_alone_runs_beside_another_run_of_its_workspace_unless_that_is_changing_something() {
        let mut records = Records::new();
        let first = records.create(NewJob::new("a", Flow::plan_apply()));
        let plan = records.create(NewJob::new("a", Flow::only("terraformPlan")));
        records.set_job(first, Status::Running, Actor::Scheduler);
        let steps: Vec<_> = records
            .job(first)
            .steps
            .iter()
            .map(|s| s.id.clone())
            .collect();
        records.set_step(first, &steps[0], Status::Running, Actor::Scheduler);
        assert!(records.may_dispatch(plan));
        records.set_step(first, &steps[0], Status::Completed, Actor::Scheduler);
        records.set_step(first, &steps[1], Status::Running, Actor::Scheduler);
        assert!(!records.may_dispatch(plan));
    }

    #[test]
    fn a_job_that_cannot_be_dispatched_leaves_its_reason_as_the_name_of_its_step() {
        let (mut records, jobs) = records(&["a"]);
        let step = records.job(jobs[0]).steps[0].id.clone();
        records.error_at_step(jobs[0], &step, &"x".repeat(300));
        let job = records.job(jobs[0]);
        assert_eq!(job.steps[0].name.len(), 127);
        assert_eq!(job.status, Status::Failed);
        assert_eq!(job.step_statuses(), [Status::Failed, Status::Failed]);
    }
}
