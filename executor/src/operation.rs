//! Plan, apply and destroy: the phases between a prepared workspace and a reported outcome (contract 4.3),
//! without the fixed sleeps.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::{Duration, SystemTime};

use artifact_store::{BackendSettings, Digest};
use futures_util::future::{Either, maybe_done, select};
use job_contract::keys::{ObjectKey, PLAN_FILE};
use job_contract::progress::Phase;
use job_contract::report::{ApplyProgress, ChangeCounts, StateLock, StateStanding};
use job_contract::settlement::{self, Ending};
use job_contract::{StepType, chain, progress};
use platform::History;
use platform::live::LivePhase;
use runtime::Deadline;
use runtime::private_file::private_folder;
use serde_json::{Map, Value, json};
use tracing::warn;

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::error::{StepError, catch_panic};
use crate::phases::live_view::{self, Publication};
use crate::phases::release_lock;
use crate::phases::save_state::{self, Left, Published};
use crate::preparation;
use crate::process::{Capture, Completion, Ended};
use crate::scripts::{self, Moment, Scripts};
use crate::stored_plan::{PlanNote, PlanRecord, ReviewedPlan};
use crate::terraform::backend::{self, BackendAccess};
use crate::terraform::event_state::EventState;
use crate::terraform::structured::Structured;
use crate::terraform::variables::{self, Declarations};
use crate::terraform::{Terraform, ToLog, credentials};
use crate::tool::ResolvedTool;
use crate::workspace::{Workspace, write_private_file};

/// How long the platform is asked what the plan does not depend on.
const ASKING: Duration = Duration::from_secs(10);
/// Output of a quiet init that is kept for the case that it fails.
const QUIET_INIT_BYTES: usize = 4 * 1024 * 1024;

/// What the step's inputs have become: all there is before the operation begins.
#[derive(Debug)]
pub struct Prepared {
    pub workspace: Workspace,
    pub working_dir: PathBuf,
    pub tool: ResolvedTool,
    pub plan: Option<ReviewedPlan>,
}

/// How the operation ended, and what it left.
#[derive(Debug)]
pub struct Operated {
    pub ending: Ending,
    pub after_ok: bool,
    pub changes: Option<ChangeCounts>,
    /// Where a plan step stored its plan.
    pub plan: Option<String>,
    /// What the platform is to record of the state that was published.
    pub history: Option<History>,
    /// What went wrong, unless the tool's own output says it all.
    pub error: Option<StepError>,
    pub account: Account,
    /// Another executor has reported the step meanwhile: its outcome counts, and nothing of this one.
    pub step_has_ended: bool,
}

/// A plan as the tool shows it.
#[derive(Default)]
struct Rendered {
    people: Option<Vec<u8>>,
    machines: Option<Value>,
}

/// What is told of an operation beside its outcome: how far it came, and what became of the state.
#[derive(Debug, Default)]
pub struct Account {
    pub progress: Option<ApplyProgress>,
    pub state: Option<StateStanding>,
    pub lock: Option<StateLock>,
    /// How the tool ended, in words.
    pub end: Option<String>,
    /// The rest of what is worth a sentence when it did not end well.
    pub sentence: Option<String>,
    pub hint: Option<String>,
}

impl Operated {
    pub(crate) fn ended(ending: Ending) -> Self {
        Self {
            ending,
            after_ok: true,
            changes: None,
            plan: None,
            history: None,
            error: None,
            account: Account::default(),
            step_has_ended: false,
        }
    }
}

/// Runs the step's phases. Whatever fails in here ends in an [`Operated`]: the scripts that follow a failure
/// still run, and what was changed is still published.
pub async fn run(run: &RunContext<'_>, prepared: &Prepared) -> Operated {
    let mut env = run.env.clone();
    let mut operation = match Operation::new(run, prepared, &mut env) {
        Ok(operation) => operation,
        Err(error) => {
            return Operated {
                error: Some(error),
                ..Operated::ended(Ending::NotReached)
            };
        }
    };
    let mut operated = match operation.reach(&mut env).await {
        Ok(true) => operation.operate(&env).await,
        Ok(false) => Operated::ended(Ending::NotReached),
        Err(error) => Operated {
            error: Some(error),
            ..Operated::ended(Ending::NotReached)
        },
    };
    operated.history = operation.history.take();
    operated.account = std::mem::take(&mut operation.account);
    operation.follow_up(&mut operated, &mut env).await;
    operated
}

struct Operation<'r, 'c> {
    run: &'r RunContext<'c>,
    prepared: &'r Prepared,
    terraform: Terraform<'r>,
    /// JSON of the outputs once there are any, for the scripts that run after.
    terraform_output: String,
    /// Of the state as it was published.
    history: Option<History>,
    account: Account,
}

impl<'r, 'c> Operation<'r, 'c> {
    fn new(
        run: &'r RunContext<'c>,
        prepared: &'r Prepared,
        env: &mut ChildEnv,
    ) -> Result<Self, StepError> {
        for (name, value) in &prepared.workspace.environment {
            env.set(name, value)?;
        }
        let terraform = Terraform {
            tool: &prepared.tool,
            working_dir: &prepared.working_dir,
            stop: &run.stop,
            budget: run.budget,
            color: run.config.run.color_output,
            variables: None,
            refresh: run.job.refresh,
            refresh_only: run.job.refresh_only,
            events: EventState::default(),
        };
        Ok(Self {
            run,
            prepared,
            terraform,
            terraform_output: String::new(),
            history: None,
            account: Account::default(),
        })
    }

    /// Everything before the operation; false when something said no and has said why.
    async fn reach(&mut self, env: &mut ChildEnv) -> Result<bool, StepError> {
        if !self
            .scripts(Phase::BeforeInit, Moment::BeforeInit, env)
            .await?
        {
            return Ok(false);
        }
        let access = self.write_backend(env)?;
        access.offer(env)?;
        self.terraform.variables = self.write_variables().await?;
        if !self.init_with_token(env).await? {
            return Ok(false);
        }
        let before = self.scripts(Phase::Before, Moment::Before, env).await;
        access.offer(env)?;
        before
    }

    fn write_backend(&self, env: &ChildEnv) -> Result<BackendAccess, StepError> {
        let (run, prepared) = (self.run, self.prepared);
        let settings = run
            .store
            .backend(&run.job.organization_id, &run.job.workspace_id);
        if let BackendSettings::Local { path } = &settings {
            let folder = path.parent().expect("a state file has a folder");
            private_folder(folder).map_err(|source| StepError::working_dir(folder, source))?;
        }
        Ok(backend::write(
            &settings,
            &prepared.tool.version,
            &prepared.working_dir,
            run.layout.private(),
            env,
        )?)
    }

    /// Scripts before init may still write configuration, so the declarations are read only now.
    async fn write_variables(&self) -> Result<Option<PathBuf>, StepError> {
        let job = &self.run.job;
        let (dir, tool) = (self.prepared.working_dir.clone(), job.tool());
        if job.variables.is_empty() {
            variables::check(&dir, tool)?;
            return Ok(None);
        }
        // Large files take their time. A stop order does not wait for them.
        let reading = tokio::task::spawn_blocking(move || Declarations::read(&dir, tool));
        let declarations = tokio::select! {
            biased;
            _ = self.run.stop.ordered() => return Err(StepError::stopped()),
            read = reading => read.map_err(|_| StepError::panicked())??,
        };
        let undeclared = declarations.undeclared(&job.variables);
        if !undeclared.is_empty() {
            let names = undeclared.join(", ");
            let text =
                format!("Variables the root module does not declare, not passed on: {names}");
            self.run.log.writer().line(&text).await;
        }
        let path = self.run.layout.private().join("variables.tfvars");
        let definitions = declarations.definitions(&job.variables)?;
        write_private_file(&path, definitions.as_bytes())
            .map_err(|source| StepError::working_dir(&path, source))?;
        Ok(Some(path))
    }

    /// The one command that may show the platform a token. Whatever becomes of it, the token is gone afterwards.
    async fn init_with_token(&self, env: &ChildEnv) -> Result<bool, StepError> {
        let mut env = env.clone();
        let token = credentials::offer(self.run, &mut env)?;
        let init = self.run.timer.time(Phase::Init, self.init(&env), |done| {
            matches!(done, Ok(true))
        });
        let done = init.await;
        token.withdraw()?;
        done
    }

    async fn init(&self, env: &ChildEnv) -> Result<bool, StepError> {
        let (run, job) = (self.run, &self.run.job);
        let ssh = self.prepared.workspace.init_ssh_command.as_deref();
        if job.show_header {
            run.log
                .writer()
                .line(run.palette().init(job).trim_end_matches('\n'))
                .await;
            let mut consumer = ToLog(run.log.writer());
            let done = self.terraform.init(env, ssh, &mut consumer).await;
            consumer.0.close().await;
            return Ok(done?.ended.is_success());
        }
        let mut capture = Capture::up_to(QUIET_INIT_BYTES);
        let done = self.terraform.init(env, ssh, &mut capture).await?;
        if !done.ended.is_success() {
            let mut log = run.log.writer();
            log.write(&capture.bytes).await;
            log.close().await;
        }
        Ok(done.ended.is_success())
    }

    async fn operate(&mut self, env: &ChildEnv) -> Operated {
        let (phase, name) = match self.run.step_type {
            StepType::Plan | StepType::PlanDestroy => (Phase::Plan, "PLAN"),
            StepType::Apply => (Phase::Apply, "APPLY"),
            StepType::Destroy => (Phase::Destroy, "DESTROY"),
            StepType::CustomScripts | StepType::Approval | StepType::PolicyEvaluation => {
                unreachable!("script steps run no operation")
            }
        };
        let banner = self.run.palette().operation(self.run.job.tool(), name);
        self.run
            .log
            .writer()
            .line(banner.trim_end_matches('\n'))
            .await;
        let operated = match phase {
            Phase::Plan => self.plan(env).await,
            _ => self.change(phase, env).await,
        };
        operated.unwrap_or_else(|error| Operated {
            error: Some(error),
            ..Operated::ended(Ending::Failure)
        })
    }

    async fn plan(&mut self, env: &ChildEnv) -> Result<Operated, StepError> {
        let (run, started) = (self.run, SystemTime::now());
        if run.connections.is_local() {
            // Whatever becomes of the plan: an apply of this job is not to go ahead without one.
            self.note_plan(None).await?;
        }
        let destroy = run.step_type == StepType::PlanDestroy;
        let shown = Publication::start(run, self.terraform.events.clone(), LivePhase::Plan);
        let planned = self.terraform.plan(env, destroy, run.log.writer());
        let planned = run
            .timer
            .time(
                Phase::Plan,
                planned,
                |done| matches!(done, Ok((done, _)) if plan_ending(*done) != Ending::Failure),
            )
            .await;
        let done = planned.as_ref().ok().map(|(done, _)| *done);
        if !self.told_of_lock() {
            let tenure = release_lock::tenure(run, &self.terraform, Phase::Plan, started, done);
            if let Some(tenure) = tenure {
                self.account.lock = release_lock::release(run, &self.terraform, env, &tenure).await;
                self.advise_on_lock();
            }
        }
        let (done, mut structured) = planned?;
        let ending = plan_ending(done);
        self.note_unusual_end(done).await;
        let mut stored = None;
        if ending != Ending::Failure {
            if self.step_has_ended().await {
                return Ok(Operated {
                    step_has_ended: true,
                    ..Operated::ended(Ending::Failure)
                });
            }
            // The tool only reads the plan, so that it can do so while the plan is on its way to the store.
            let mut rendered = pin!(maybe_done(self.render_plan(env)));
            let store = async {
                let store = pin!(self.store_plan());
                match select(store, &mut rendered).await {
                    Either::Left((stored, _)) => stored,
                    Either::Right(((), store)) => store.await,
                }
            };
            stored = Some(run.phase(Phase::Store, store).await?);
            let show = async {
                rendered.as_mut().await;
                let rendered = rendered.as_mut().take_output();
                let Rendered { people, machines } = rendered.transpose()?.unwrap_or_default();
                self.print(people).await;
                if let Some(plan) = machines {
                    structured.complete_from_plan(&plan);
                }
                Ok::<_, StepError>(())
            };
            run.phase(Phase::Show, show).await?;
        }
        let changes = structured.counts().unwrap_or_else(|| structured.counted());
        let record = stored
            .as_ref()
            .map(|record| record.patch(&run.job.step_id))
            .unwrap_or_default();
        let marker = json!("<div data-terrakube-structured-plan=\"true\"></div>");
        self.publish(shown, &structured, record, Some(("terrakubeUI", marker)))
            .await;
        Ok(Operated {
            changes: (ending != Ending::Failure).then_some(changes),
            plan: stored.map(|record| record.reference),
            ..Operated::ended(ending)
        })
    }

    /// A plan may be repeated while another executor still makes it. Once that one has reported, its plan is the one
    /// that is reviewed, and must not be replaced.
    async fn step_has_ended(&self) -> bool {
        let run = self.run;
        let deadline = Deadline::after(ASKING);
        match run
            .connections
            .platform
            .step_view(&run.step, &deadline)
            .await
        {
            Ok(view) => view.step_has_ended() && !view.status.is_over(),
            Err(error) => {
                warn!(
                    error = chain(&error),
                    "the platform cannot be asked whether the plan is still awaited"
                );
                false
            }
        }
    }

    /// The plan is stored before any script that follows could touch it: what was planned is what is kept.
    async fn store_plan(&self) -> Result<PlanRecord, StepError> {
        let (run, job) = (self.run, &self.run.job);
        let file = self.prepared.working_dir.join(PLAN_FILE);
        let digest = Digest::of(&file).map_err(|source| StepError::working_dir(&file, source))?;
        let key = ObjectKey::plan(
            &job.organization_id,
            &job.workspace_id,
            &job.job_id,
            &job.step_id,
        );
        let record = PlanRecord {
            reference: run.stored(run.store.put_file(&key, &file)).await?,
            sha256: digest.sha256,
            size_bytes: digest.size_bytes,
            tool: self.prepared.tool.tool,
            version: self.prepared.tool.version.to_string(),
            commit_id: self.prepared.workspace.commit_id.clone(),
        };
        self.note_plan(Some(record.clone())).await?;
        Ok(record)
    }

    async fn note_plan(&self, plan: Option<PlanRecord>) -> Result<(), StepError> {
        let run = self.run;
        let note = PlanNote {
            step_id: run.job.step_id.clone(),
            plan,
        };
        run.stored(note.leave(&run.store, &run.job)).await
    }

    /// Both renderings at once: each is a process of the tool that only reads the plan.
    async fn render_plan(&self, env: &ChildEnv) -> Result<Rendered, StepError> {
        let (people, machines) = tokio::join!(
            self.terraform.show_plan(env),
            self.terraform.show_plan_json(env)
        );
        let people = people?;
        let machines = match machines?.map(|text| serde_json::from_slice(&text)) {
            Some(Ok(plan)) => Some(plan),
            Some(Err(error)) => {
                warn!(%error, "the tool's JSON rendering of the plan is not usable");
                None
            }
            None => {
                warn!("the tool could not render the plan as JSON");
                None
            }
        };
        Ok(Rendered { people, machines })
    }

    /// Apply or destroy, and then the state, whatever happened.
    async fn change(&mut self, phase: Phase, env: &ChildEnv) -> Result<Operated, StepError> {
        let (run, started) = (self.run, SystemTime::now());
        let errored_before = save_state::errored_at(&self.prepared.working_dir);
        if let Some(plan) = &self.prepared.plan {
            plan.place(&self.prepared.working_dir.join(PLAN_FILE))?;
        }
        let shown = Publication::start(run, self.terraform.events.clone(), LivePhase::Apply);
        let work = catch_panic(self.apply_or_destroy(phase, env));
        let changed = run
            .timer
            .time(
                phase,
                work,
                |done| matches!(done, Ok((done, ..)) if done.ended.is_success()),
            )
            .await;
        // From here on something may have been changed: the state is saved before any error is looked at.
        let done = changed.as_ref().ok().map(|(done, ..)| *done);
        let left = Left {
            success: done.is_some_and(|done| done.ended.is_success()),
            progress: self.terraform.events.progress(),
            tenure: release_lock::tenure(run, &self.terraform, phase, started, done),
            errored_before,
            said: self.terraform.events.state_said(),
        };
        let (published, missing) = self.save(env, &left).await;
        self.account.end = done
            .filter(|_| !left.success)
            .map(|done| format!("the tool ended with {}", done.ended));
        let (done, mut structured, rendered) = changed?;
        self.note_unusual_end(done).await;
        let success = done.ended.is_success();
        if success {
            self.print(rendered).await;
        }
        // The tool has stored the state where it belongs, or it would not have succeeded. An outcome of `failed` would
        // have people repeat what is done.
        let missing = missing.filter(|_| success);
        if missing.is_some() {
            let text = "The state is stored. Only the copy of it that the platform shows could not be published.";
            run.log.writer().line(text).await;
        }
        self.show_outputs(success, phase, published.as_ref()).await;
        if let Some(state) = published
            .as_ref()
            .and_then(|published| published.json.as_ref())
        {
            structured.complete_from_state(state, success);
        }
        let outputs = published
            .as_ref()
            .and_then(|published| published.raw.as_ref());
        let outputs = outputs.map(|raw| ("terraformOutputs", raw.outputs_for_context()));
        self.publish(shown, &structured, Map::new(), outputs).await;
        let ending = if success {
            Ending::Success
        } else {
            Ending::Failure
        };
        Ok(Operated {
            changes: structured.counts(),
            error: missing,
            ..Operated::ended(ending)
        })
    }

    /// Saves the state and keeps account of it. A lock of somebody else's kept everything from happening: there is
    /// nothing to save then, and what would be published is theirs.
    async fn save(
        &mut self,
        env: &ChildEnv,
        left: &Left,
    ) -> (Option<Published>, Option<StepError>) {
        let run = self.run;
        if !left.progress.has_begun() && self.told_of_lock() {
            return (None, None);
        }
        let save = save_state::save(run, &self.terraform, env, left);
        let saved = run
            .timer
            .time(Phase::State, save, |saved| saved.missing.is_none())
            .await;
        self.account.state = saved.standing;
        self.account.lock = saved.lock;
        self.account.hint = saved.hint;
        if !left.success {
            let progress = left.progress.sentence();
            self.account.sentence = Some(match saved.words {
                Some(words) => format!("{progress}; {words}"),
                None => progress,
            });
            self.account.progress = Some(left.progress.report());
        }
        self.advise_on_lock();
        if let Some(published) = &saved.published {
            self.history.clone_from(&published.history);
        }
        (saved.published, saved.missing)
    }

    /// Keeps account of the lock the tool met, if it met one.
    fn told_of_lock(&mut self) -> bool {
        let Some(lock) = self.terraform.events.locks().in_the_way() else {
            return false;
        };
        self.account.sentence = Some(format!(
            "the state is locked {}: nothing was changed",
            release_lock::words(&lock)
        ));
        self.account.lock = Some(lock);
        self.advise_on_lock();
        true
    }

    fn advise_on_lock(&mut self) {
        let lock = self.account.lock.as_ref();
        let advice = lock.and_then(|lock| release_lock::advice(lock, self.run.job.tool()));
        let both = [self.account.hint.take(), advice];
        self.account.hint = joined(both, "; ");
    }

    async fn apply_or_destroy(
        &self,
        phase: Phase,
        env: &ChildEnv,
    ) -> Result<(Completion, Structured, Option<Vec<u8>>), StepError> {
        let log = self.run.log.writer();
        if phase == Phase::Destroy {
            let (done, structured) = self.terraform.destroy(env, log).await?;
            return Ok((done, structured, None));
        }
        if self.prepared.plan.is_none() {
            let (done, structured) = self.terraform.apply_direct(env, log).await?;
            return Ok((done, structured, None));
        }
        let seed = self.planned_changes().await;
        // The plan is rendered beside the apply: it only reads the file. Who sees plan and apply in one stream, as
        // CLI-driven runs do, has just read it.
        let rendered = async {
            if self.run.job.show_header {
                self.terraform.show_plan(env).await
            } else {
                Ok(None)
            }
        };
        let (applied, rendered) = tokio::join!(self.terraform.apply_plan(env, log, seed), rendered);
        let (done, structured) = applied?;
        Ok((done, structured, rendered.unwrap_or_default()))
    }

    /// The changes of the job's one plan, still to be done.
    async fn planned_changes(&self) -> Structured {
        let context = preparation::known_context(self.run).await;
        match context
            .get("planStructuredOutput")
            .and_then(Value::as_object)
        {
            Some(plans) if plans.len() == 1 => plans
                .values()
                .next()
                .map(Structured::seeded)
                .unwrap_or_default(),
            _ => Structured::default(),
        }
    }

    async fn show_outputs(&mut self, success: bool, phase: Phase, published: Option<&Published>) {
        let Some(raw) = published.and_then(|published| published.raw.as_ref()) else {
            return;
        };
        self.terraform_output = raw.outputs_json().to_string();
        if success && phase == Phase::Apply && !raw.outputs.is_empty() {
            let text = format!("\nOutputs:\n\n{}", raw.outputs_text().join("\n"));
            self.run.log.writer().line(&text).await;
        }
    }

    /// Leaves the step's results in the job context, in one update: the changes, the diagnostics, and what else belongs
    /// to this step. A convenience: without it the platform shows the log.
    async fn publish(
        &self,
        shown: Publication,
        structured: &Structured,
        mut patch: Map<String, Value>,
        more: Option<(&str, Value)>,
    ) {
        let (run, step) = (self.run, &self.run.step);
        let redactor = run.log.redactor();
        let (changes, diagnostics) = (structured.changes(), structured.diagnostics());
        patch.extend(shown.patch(&step.step_id, &changes, &diagnostics));
        if let Some((key, value)) = more {
            patch.insert(key.to_owned(), json!({ &step.step_id: value }));
        }
        let patch = live_view::redacted(&redactor, patch);
        let publish = async {
            shown.finish(&redactor, changes, diagnostics).await;
            run.connections.platform.merge_context(step, &patch).await
        };
        // What is left after that belongs to the log and the report.
        let deadline = run.while_saving(Duration::MAX);
        let published = tokio::select! {
            biased;
            published = publish => published.map_err(|error| chain(&error)),
            () = deadline.over() => Err("there was no time left for it".to_owned()),
        };
        if let Err(error) = published {
            warn!(error, "the job context could not be updated");
        }
    }

    /// Scripts after the operation, as the outcome asks for.
    async fn follow_up(&self, operated: &mut Operated, env: &mut ChildEnv) {
        let job = &self.run.job;
        let aftermath =
            settlement::aftermath(self.run.step_type, operated.ending, job.ignore_error);
        if aftermath.on_failure {
            let commands = scripts::select(&job.on_failure_list, Moment::Always);
            match self.scripts_of(Phase::OnFailure, &commands, env).await {
                Ok(_) => {}
                Err(error) => warn!(
                    %error,
                    "the scripts on failure could not be run"
                ),
            }
        }
        if aftermath.after {
            match self.scripts(Phase::After, Moment::After, env).await {
                Ok(ok) => operated.after_ok = ok,
                Err(error) => {
                    operated.after_ok = false;
                    operated.error.get_or_insert(error);
                }
            }
        }
    }

    async fn scripts(
        &self,
        phase: Phase,
        moment: Moment,
        env: &mut ChildEnv,
    ) -> Result<bool, StepError> {
        let commands = scripts::select(&self.run.job.command_list, moment);
        self.scripts_of(phase, &commands, env).await
    }

    async fn scripts_of(
        &self,
        phase: progress::Phase,
        commands: &[&job_contract::Command],
        env: &mut ChildEnv,
    ) -> Result<bool, StepError> {
        if commands.is_empty() {
            // A stop order between two phases keeps the next one from starting.
            return Ok(self.run.stop.given().is_none() || phase == Phase::After);
        }
        let scripts = scripts_in(
            self.run,
            &self.prepared.working_dir,
            Some(&self.prepared.tool),
        );
        let work = scripts.run(commands, env, &self.terraform_output);
        Ok(self
            .run
            .timer
            .time(phase, work, |done| matches!(done, Ok(true)))
            .await?)
    }

    async fn print(&self, rendered: Option<Vec<u8>>) {
        if let Some(rendered) = rendered {
            let mut log = self.run.log.writer();
            log.write(&rendered).await;
            log.close().await;
        }
    }

    /// A tool that was killed says nothing itself.
    async fn note_unusual_end(&self, done: Completion) {
        let text = match done {
            Completion {
                stopped: true,
                ended,
            } => format!("The tool was interrupted and ended with {ended}."),
            Completion {
                ended: ended @ Ended::Signal(_),
                ..
            } => format!("The tool was killed: {ended}."),
            Completion {
                ended: ended @ Ended::Code(3..),
                ..
            } => format!("The tool ended with {ended}."),
            Completion { .. } => return,
        };
        self.run
            .log
            .writer()
            .line(&self.run.palette().failure(&text))
            .await;
    }
}

/// What there is of these texts, one behind the other.
pub fn joined(texts: [Option<String>; 2], by: &str) -> Option<String> {
    texts
        .into_iter()
        .flatten()
        .reduce(|one, other| format!("{one}{by}{other}"))
}

/// Scripts of this run in a folder.
pub fn scripts_in<'r>(
    run: &'r RunContext<'_>,
    dir: &'r Path,
    tool: Option<&'r ResolvedTool>,
) -> Scripts<'r> {
    Scripts {
        job: &run.job,
        dir,
        private: run.layout.private(),
        tool,
        public_api_url: run.config.platform.public_api_url.as_deref(),
        tokens: run.connections.tokens(),
        log: &run.log,
        palette: run.palette(),
        stop: &run.stop,
        budget: run.budget,
    }
}

/// Exit codes of `plan -detailed-exitcode`; every other end is a failure (W-18).
fn plan_ending(done: Completion) -> Ending {
    match done.ended {
        Ended::Code(0) => Ending::Success,
        Ended::Code(2) => Ending::Changes,
        Ended::Code(_) | Ended::Signal(_) => Ending::Failure,
    }
}
