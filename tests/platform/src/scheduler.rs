//! The scheduler (contract 2.5, 2.8). A firing locks one job, and acts on its status. It keeps the lock while a dispatch is open.
//! In older releases, this is the lock of the job's row, for which changes of the job wait. In newer ones it is only for firings.

use std::sync::Arc;

use crate::token::LIFETIME;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::agent_url;
use crate::dispatch::{self, Answer};
use crate::launcher::DISPATCH;
use crate::ledger::{Actor, Rule};
use crate::platform::Shared;
use crate::records::{Records, Status};
use crate::release::Release;

/// The action of a firing outside the records.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Todo {
    Nothing,
    /// The log stream has no readers any more.
    DeleteStream,
    Dispatch {
        step: String,
        data: Value,
    },
    /// The job stays rejected, whatever the answer is.
    Rejection {
        step: String,
        data: Value,
    },
}

/// Fires for each update, and for waiting jobs at each tick.
pub(crate) async fn run(shared: Arc<Shared>, mut updates: UnboundedReceiver<u32>) {
    let mut ticks = tokio::time::interval(shared.settings.retry);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            update = updates.recv() => match update {
                Some(job) => drop(tokio::spawn(fire(Arc::clone(&shared), job))),
                None => return,
            },
            _ = ticks.tick() => fire_waiting(&shared),
        }
    }
}

/// Fires for every job that waits for dispatch and has no open firing.
pub(crate) fn fire_waiting(shared: &Arc<Shared>) {
    let waiting: Vec<u32> = shared.read(|records| {
        let waiting = records
            .jobs
            .values()
            .filter(|job| job.status.waits_for_dispatch());
        waiting.map(|job| job.id).collect()
    });
    for job in waiting {
        if shared.firing(job).try_lock().is_ok() {
            tokio::spawn(fire(Arc::clone(shared), job));
        }
    }
}

/// One firing.
async fn fire(shared: Arc<Shared>, id: u32) {
    let firing = shared.firing(id);
    let held = firing.lock().await;
    let is_late = shared.settings.release == Release::Newest;
    let (todo, copy) = shared.write(|records| {
        let todo = decide(records, id);
        if let Todo::Dispatch { step, .. } = &todo {
            let job = records.job_mut(id);
            job.posts += 1;
            job.dispatched = Some(step.clone());
            records.open_posts.insert(id);
        }
        (todo, records.jobs.get(&id).cloned())
    });
    match todo {
        Todo::Nothing => {}
        Todo::DeleteStream => shared.delete_stream(id, None).await,
        Todo::Rejection { step, data } => {
            send(&shared, &data).await;
            shared.delete_stream(id, Some(&step)).await;
        }
        Todo::Dispatch { step, data } => {
            let answer = send(&shared, &data).await;
            let is_accepted = answer == Answer::Accepted;
            if is_accepted && !is_late {
                // This happens before the new status is visible: a test that waits for the status loses no lines.
                shared.delete_stream(id, Some(&step)).await;
            }
            shared.write(|records| {
                records.open_posts.remove(&id);
                match &answer {
                    Answer::Accepted => {
                        if let Some(copy) = copy.filter(|_| is_late) {
                            records.write_back(&copy);
                            records.undeleted.insert(id);
                        }
                        records.set_job(id, Status::Queue, Actor::Scheduler);
                    }
                    Answer::Unavailable => {}
                    Answer::Refused(reason) => records.error_at_step(id, &step, reason),
                }
            });
            if is_accepted && is_late {
                // As below: the next job is woken before the stream is deleted.
                fire_waiting(&shared);
                shared.delete_stream_late(id, &step).await;
                return;
            }
            drop(held);
            if answer != Answer::Unavailable {
                fire_waiting(&shared);
            }
        }
    }
}

async fn send(shared: &Shared, data: &Value) -> Answer {
    if !dispatch::asks_for_native(data) {
        let (url, token) = (
            shared.executor_of(data),
            shared.secret.dispatch_token(LIFETIME),
        );
        let (limit, release) = (shared.settings.answer_within, shared.settings.release);
        let refusal = agent_url::refusal(&url, shared.settings.blocks_private);
        if let Some(why) = refusal.filter(|_| release == Release::Newest) {
            return Answer::Refused(format!("Error sending to executor: {why}"));
        }
        return dispatch::post(&shared.client, &url, &token, data, limit, release).await;
    }
    let Some(native) = &shared.settings.native else {
        return Answer::Refused("there is no cluster".to_owned());
    };
    match (native.0)(data.clone()).await {
        Ok(()) => Answer::Accepted,
        Err(reason) => Answer::Refused(reason),
    }
}

/// The action for the status of a job. Changes of status without an action are made at once.
pub(crate) fn decide(records: &mut Records, id: u32) -> Todo {
    let Some(job) = records.jobs.get(&id) else {
        return Todo::Nothing;
    };
    if job.wedged {
        return Todo::Nothing;
    }
    match job.status {
        Status::Pending if !job.plan_changes => {
            records.job_mut(id).wedged = true;
            Todo::Nothing
        }
        Status::Pending => pending(records, id),
        Status::Approved => match job.next_step().map(|step| step.id.clone()) {
            Some(step) if records.may_dispatch(id) => dispatch_of(records, id, step),
            _ => Todo::Nothing,
        },
        Status::Completed | Status::NoChanges => {
            records.close_steps(id, Status::NotExecuted, Actor::Scheduler);
            Todo::DeleteStream
        }
        Status::Failed => {
            records.close_steps(id, Status::Failed, Actor::Scheduler);
            Todo::DeleteStream
        }
        Status::Cancelled => {
            records.close_steps(id, Status::Cancelled, Actor::User);
            Todo::DeleteStream
        }
        Status::Rejected => rejected(records, id),
        Status::WaitingApproval
        | Status::Queue
        | Status::Running
        | Status::NotExecuted
        | Status::Unknown => Todo::Nothing,
    }
}

fn pending(records: &mut Records, id: u32) -> Todo {
    let job = records.job(id);
    let Some(step) = job.next_step() else {
        records.set_job(id, Status::Completed, Actor::Scheduler);
        return Todo::DeleteStream;
    };
    if step.flow.kind == "approval" {
        records.set_job(id, Status::WaitingApproval, Actor::Scheduler);
        return Todo::DeleteStream;
    }
    let step = step.id.clone();
    if records.may_dispatch(id) {
        dispatch_of(records, id, step)
    } else {
        Todo::Nothing
    }
}

fn dispatch_of(records: &Records, id: u32, step: String) -> Todo {
    let job = records.job(id);
    let Some(found) = job.step(&step) else {
        return Todo::Nothing;
    };
    let data = dispatch::job_data(records, job, found, &found.flow.commands);
    Todo::Dispatch { step, data }
}

fn rejected(records: &mut Records, id: u32) -> Todo {
    let job = records.job(id);
    let sent = job.rejection_sent;
    let approval = job
        .next_step()
        .filter(|step| step.flow.kind == "approval")
        .cloned();
    let reject = approval.filter(|step| !step.flow.on_reject.is_null() && !sent);
    let Some(step) = reject else {
        if !sent {
            records.close_steps(id, Status::Failed, Actor::Scheduler);
        }
        return Todo::DeleteStream;
    };
    let data = dispatch::job_data(records, job, &step, &step.flow.on_reject);
    let later: Vec<_> = job
        .steps
        .iter()
        .filter(|other| other.id != step.id)
        .cloned()
        .collect();
    for other in later.iter().filter(|other| other.status == Status::Pending) {
        records.set_step(id, &other.id, Status::Failed, Actor::Scheduler);
    }
    let job = records.job_mut(id);
    job.rejection_sent = true;
    job.posts += 1;
    job.dispatched = Some(step.id.clone());
    Todo::Rejection {
        step: step.id,
        data,
    }
}

impl Shared {
    /// Where job data are sent: to the agent of their workspace, if it has one (contract 2.1).
    fn executor_of(&self, data: &Value) -> String {
        let workspace = data["workspaceId"].as_str().unwrap_or_default();
        let agent = self.read(|records| records.workspaces.get(workspace)?.agent.clone());
        agent.map_or_else(|| self.executor_url(), |url| url + DISPATCH)
    }

    /// Deletes the log stream of a job. Lines of a step that was accepted only now are too early.
    pub(crate) async fn delete_stream(&self, job: u32, accepted: Option<&str>) {
        // While Redis is away, the next firing deletes the stream.
        let Ok((entries, findings)) = self.streams.delete(job, None).await else {
            return;
        };
        let early = entries
            .iter()
            .filter(|entry| Some(entry.step_id.as_str()) == accepted)
            .map(|entry| {
                let line = &entry.output;
                (
                    Rule::BeforeQueue,
                    format!("{line:?} in the log of job {job}"),
                )
            });
        self.found(findings.into_iter().chain(early));
    }

    /// Deletes the log stream of a job whose new status is visible. Readers see no line of the accepted step that was in it.
    pub(crate) async fn delete_stream_late(&self, job: u32, accepted: &str) {
        let _permitted = self.deletions.lock().await;
        // While Redis is away, the next firing deletes the stream.
        if let Ok((_, findings)) = self.streams.delete(job, Some(accepted)).await {
            self.found(findings);
        }
        self.write(|records| records.undeleted.remove(&job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{NewJob, Workspace};
    use crate::template::Flow;

    fn records(template: Vec<Flow>) -> (Records, u32) {
        let mut records = Records::new();
        let workspace = Workspace::new("x");
        let id = workspace.id.clone();
        records.workspaces.insert(id.clone(), workspace);
        let job = records.create(NewJob::new(&id, template));
        (records, job)
    }

    fn complete(records: &mut Records, job: u32) {
        let step = records.job(job).next_step().unwrap().id.clone();
        records.set_step(job, &step, Status::Completed, Actor::Client);
    }

    #[test]
    fn pending_without_changes_is_the_end_of_a_job() {
        let (mut records, job) = records(Flow::plan_apply());
        records.job_mut(job).plan_changes = false;
        assert_eq!(decide(&mut records, job), Todo::Nothing);
        records.job_mut(job).plan_changes = true;
        assert_eq!(decide(&mut records, job), Todo::Nothing);
        assert!(records.job(job).wedged);
    }

    #[test]
    fn the_end_of_a_job_closes_its_steps() {
        for (status, left) in [
            (Status::Completed, Status::NotExecuted),
            (Status::Failed, Status::Failed),
            (Status::Cancelled, Status::Cancelled),
            (Status::Rejected, Status::Failed),
        ] {
            let (mut records, job) = records(Flow::plan_apply());
            complete(&mut records, job);
            records.set_job(job, status, Actor::Client);
            assert_eq!(decide(&mut records, job), Todo::DeleteStream);
            assert_eq!(records.job(job).step_statuses(), [Status::Completed, left]);
        }
    }

    #[test]
    fn the_scripts_of_a_rejection_are_sent_once() {
        let mut template = Flow::plan_approve_apply();
        template[1] = template[1].clone().on_reject("echo no");
        let (mut records, job) = records(template);
        complete(&mut records, job);
        records.set_job(job, Status::Rejected, Actor::User);
        let todo = decide(&mut records, job);
        let Todo::Rejection { data, .. } = &todo else {
            panic!("{todo:?}");
        };
        assert_eq!(data["commandList"][0]["script"], "echo no");
        assert_eq!(decide(&mut records, job), Todo::DeleteStream);
        let left = [Status::Completed, Status::Pending, Status::Failed];
        assert_eq!(records.job(job).step_statuses(), left);
    }
}
