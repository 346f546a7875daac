//! Handles one task, from its lease until the hub has its end.

use std::sync::Arc;
use std::time::Duration;

use job_contract::Document;
use pool_protocol::instance::Phase;
use pool_protocol::lease::{Decline, DeclineReason, End, Ended, Lease, LeaseRef, Started};
use pool_protocol::path::LeaseCall;
use pool_protocol::problem::Code;
use pool_protocol::task::{LeasedTask, Task, TaskState};
use secrecy::SecretString;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::{info, warn};
use uuid::Uuid;
use verdict::VerdictKind;

use super::Agent;
use super::client::answer::{Failure, Pauses, jitter};
use super::lease::{AgentLease, Stop, StopOrder, StoppedBy};
use super::target::{Executor, FoundExecutor, RunEnd, StartFailure, StartRequest, unreported};

/// The pause after a failed stop.
const STOP_RETRY_PAUSE: Duration = Duration::from_secs(5);

/// The outcome of a task at this agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskOutcome {
    Ran,
    Declined,
}

impl Agent {
    /// Takes a task that the hub has given at least `delay` ago.
    pub(crate) fn take(self: &Arc<Self>, task: LeasedTask, delay: Duration) {
        let lease = LeaseRef {
            task: task.task_id,
            lease: task.lease_id,
            fencing_token: task.fencing_token,
        };
        let run = format!("{}/{}", task.task.job_id, task.task.step_id);
        let token = SecretString::from(task.job_token.clone());
        let Some(lease) = self.leases.add(lease, run, Some(token), Phase::Preparing) else {
            return;
        };
        info!(run = lease.run, lease = %lease.reference.lease, attempt = task.attempt, "took a task");
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            let outcome = agent.run(&lease, task, delay).await;
            agent.finish(&lease, outcome);
        });
    }

    /// Follows an executor of an earlier agent, or one that was started elsewhere for this agent.
    pub(crate) fn adopt(self: &Arc<Self>, found: FoundExecutor) {
        let FoundExecutor {
            lease,
            run,
            executor,
            ..
        } = found;
        let Some(lease) = self.leases.add(lease, run, None, Phase::Started) else {
            let agent = Arc::clone(self);
            // The task that follows the run may already have forgotten it, when the target found it again.
            tokio::spawn(async move {
                agent.leases.without(lease.lease).await;
                executor.forget().await;
            });
            return;
        };
        info!(run = lease.run, lease = %lease.reference.lease, executor = executor.name(), "found an executor of an earlier agent");
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            agent.follow(&lease, executor).await;
            agent.finish(&lease, TaskOutcome::Ran);
        });
    }

    fn finish(&self, lease: &AgentLease, outcome: TaskOutcome) {
        self.last_outcome.send_replace(Some(outcome));
        self.leases.remove(lease.reference.lease);
        // The heartbeat shows the free slot at once.
        self.heartbeat_now.notify_one();
    }

    async fn run(&self, lease: &AgentLease, task: LeasedTask, delay: Duration) -> TaskOutcome {
        let expires_in = Duration::from_secs(task.expires_in_seconds.into());
        // A hub that does not say how long counts it itself.
        let is_late = !expires_in.is_zero() && delay >= expires_in;
        if is_late {
            warn!(run = lease.run, "the lease was over before it arrived");
            return TaskOutcome::Declined;
        }
        let order = match open(lease, task, &self.client.lease_url(&lease.reference)) {
            Ok(order) => order,
            Err((reason, text)) => return self.decline(lease, reason, text).await,
        };
        if self.detaching.is_cancelled() || lease.is_stopped_by_agent() {
            let text = "the agent stops".to_owned();
            return self.decline(lease, DeclineReason::Draining, text).await;
        }
        match self.target.start(&order).await {
            Ok(executor) => {
                drop(order);
                self.leases.set_phase(lease, Phase::Started);
                let name = executor.name();
                let mut followed = std::pin::pin!(self.follow(lease, executor));
                // An executor is stopped also while the hub cannot be reached.
                tokio::select! {
                    () = self.report_started(lease, name) => followed.await,
                    () = &mut followed => {}
                }
                TaskOutcome::Ran
            }
            Err(StartFailure::Decline(reason, text)) => self.decline(lease, reason, text).await,
            Err(StartFailure::Fail(verdict, text)) => {
                let end = super::target::over(LeaseCall::Fail, None, verdict, text);
                self.report_end(lease, end).await;
                TaskOutcome::Ran
            }
        }
    }

    async fn decline(
        &self,
        lease: &AgentLease,
        reason: DeclineReason,
        text: String,
    ) -> TaskOutcome {
        self.report_end(lease, RunEnd::Decline(reason, text)).await;
        TaskOutcome::Declined
    }

    async fn report_started(&self, lease: &AgentLease, executor: String) {
        info!(run = lease.run, executor, "started an executor");
        let started = Started { executor };
        match self
            .call::<Lease>(lease, LeaseCall::Started, &started)
            .await
        {
            Ok(answer) => {
                lease.set_token(answer.job_token.into());
                if answer.state == TaskState::Running {
                    self.leases.set_phase(lease, Phase::Running);
                }
            }
            Err(failure) => {
                let stop = match failure.code() {
                    // The executor has already reported the end.
                    Some(Code::TaskAlreadyTerminal) => return,
                    // An executor that has not accepted the task can no longer do so.
                    _ => Stop::Withdraw,
                };
                warn!(run = lease.run, %failure, "the hub refuses the executor that was started");
                let by = StoppedBy::Hub;
                lease.order(StopOrder { stop, by });
            }
        }
    }

    /// Follows an executor to its end, and stops it on an order. Then reports the end to the hub, because the executor
    /// may not have reported it.
    async fn follow(&self, lease: &AgentLease, mut executor: Box<dyn Executor>) {
        let mut orders = lease.orders();
        let mut stopped: Option<Stop> = None;
        let (end, order) = loop {
            let order = *orders.borrow_and_update();
            let due = order.filter(|order| stopped < Some(order.stop));
            if let Some(StopOrder { stop, by }) = due {
                info!(run = lease.run, ?stop, ?by, "stopping an executor");
                match executor.stop(stop).await {
                    Ok(()) => stopped = Some(stop),
                    Err(error) => {
                        warn!(
                            run = lease.run,
                            error, "an executor could not be stopped, trying again"
                        );
                    }
                }
            }
            let failed = due.is_some_and(|order| stopped < Some(order.stop));
            tokio::select! {
                end = executor.ended(lease) => break (end, order),
                // The sender lives as long as the lease.
                _ = orders.changed() => {}
                () = tokio::time::sleep(STOP_RETRY_PAUSE), if failed => {}
            }
        };
        let is_answered = self.report_end(lease, with_cause(end, order)).await;
        // Otherwise the next agent finds the executor and reports its end.
        if is_answered {
            executor.forget().await;
        }
    }

    /// Reports an end. Returns whether the hub has an answer to it: not if it does not speak the agent's protocol.
    async fn report_end(&self, lease: &AgentLease, end: RunEnd) -> bool {
        let answer = match &end {
            RunEnd::Elsewhere => {
                let text = "the hub refused its executor";
                self.send_decline(lease, DeclineReason::Failed, text).await
            }
            RunEnd::Over(call, end) => match self.call::<Ended>(lease, *call, end).await {
                // It ended by itself before its claim. The platform decides whether it is given again.
                Err(failure) if failure.code() == Some(Code::LeaseNotAccepted) => {
                    let text = format!(
                        "its executor ended before it had accepted the task. {}",
                        end.diagnostic
                    );
                    self.send_decline(lease, DeclineReason::Failed, text.trim_end())
                        .await
                }
                answer => answer,
            },
            RunEnd::Decline(reason, text) => {
                let end = unreported(None, VerdictKind::Lost, text.clone());
                self.decline_or_fail(lease, *reason, &end).await
            }
            RunEnd::Lost(reason, end) => self.decline_or_fail(lease, *reason, end).await,
        };
        let is_answered = !matches!(answer, Err(Failure::Unsupported { .. }));
        match answer {
            Ok(ended) => {
                info!(run = lease.run, end = ?end, state = ?ended.state, "a task has ended here");
            }
            Err(failure) if end == RunEnd::Elsewhere => {
                info!(run = lease.run, %failure, "another executor has the task");
            }
            // The executor has reported its end.
            Err(failure) if failure.code() == Some(Code::TaskAlreadyTerminal) => {
                info!(run = lease.run, "a task has ended");
            }
            Err(failure) => {
                warn!(run = lease.run, end = ?end, %failure, "the hub refuses the end of a task");
            }
        }
        is_answered
    }

    /// Declines a task, or fails it if its executor had accepted it.
    async fn decline_or_fail(
        &self,
        lease: &AgentLease,
        reason: DeclineReason,
        end: &End,
    ) -> Result<Ended, Failure> {
        match self.send_decline(lease, reason, &end.diagnostic).await {
            Err(failure) if failure.code() == Some(Code::LeaseAccepted) => {
                self.call(lease, LeaseCall::Fail, end).await
            }
            answer => answer,
        }
    }

    async fn send_decline(
        &self,
        lease: &AgentLease,
        reason: DeclineReason,
        text: &str,
    ) -> Result<Ended, Failure> {
        let decline = Decline {
            reason,
            diagnostic: text.to_owned(),
            delay_seconds: None,
        };
        self.call(lease, LeaseCall::Decline, &decline).await
    }

    /// Makes a call about a lease, again until it is answered.
    async fn call<T: DeserializeOwned>(
        &self,
        lease: &AgentLease,
        call: LeaseCall,
        body: &impl Serialize,
    ) -> Result<T, Failure> {
        let mut token = lease.token();
        let key = Uuid::new_v4();
        let mut pauses = Pauses::default();
        loop {
            let sent = self
                .client
                .lease(&lease.reference, token.as_ref(), call, key, body);
            let failure = match sent.await {
                Ok(answer) => return Ok(answer),
                // The hub may have another key by now. The token of the pool may make the same calls.
                Err(Failure::Unauthorized(_) | Failure::Forbidden(_)) if token.is_some() => {
                    token = None;
                    continue;
                }
                Err(failure) => failure,
            };
            let Some(pause) = pauses.after(&failure, jitter) else {
                return Err(failure);
            };
            tokio::time::sleep(pause).await;
        }
    }
}

/// Returns the request for an executor from the payload of a task. The payload must belong to the task.
fn open(
    lease: &AgentLease,
    task: LeasedTask,
    url: &str,
) -> Result<StartRequest, (DeclineReason, String)> {
    let LeasedTask {
        job_token, task, ..
    } = task;
    let refused = |text: &str| (DeclineReason::Refused, text.to_owned());
    // The message of the error may quote the document.
    let job = Document::from_json(task.payload.get().as_bytes().to_vec())
        .map_err(|_| refused("the job document cannot be read"))?;
    if let Some(field) = difference(&task, &job) {
        return Err(refused(&format!(
            "the job document has another `{field}` than its task"
        )));
    }
    Ok(StartRequest {
        lease: lease.reference,
        job,
        url: url.to_owned(),
        token: job_token.into(),
    })
}

fn difference(task: &Task, job: &Document) -> Option<&'static str> {
    [
        (
            "organizationId",
            &task.organization_id,
            &job.organization_id,
        ),
        ("jobId", &task.job_id, &job.job_id),
        ("stepId", &task.step_id, &job.step_id),
    ]
    .into_iter()
    .find(|(_, outside, inside)| outside != inside)
    .map(|(field, _, _)| field)
}

/// Adds who stopped a run to its end.
fn with_cause(ended: RunEnd, order: Option<StopOrder>) -> RunEnd {
    let Some(StopOrder { stop, by }) = order.filter(|order| order.stop > Stop::Withdraw) else {
        return ended;
    };
    match (ended, by, stop) {
        (RunEnd::Over(LeaseCall::Fail, end) | RunEnd::Lost(_, end), StoppedBy::Hub, _) => {
            RunEnd::Over(LeaseCall::Cancelled, end)
        }
        (
            RunEnd::Over(LeaseCall::Fail | LeaseCall::Cancelled, end) | RunEnd::Lost(_, end),
            StoppedBy::Agent,
            Stop::Kill,
        ) => RunEnd::Over(
            LeaseCall::Fail,
            End {
                verdict: Some(VerdictKind::AgentForced.name().to_owned()),
                diagnostic: format!(
                    "The agent had to stop at once and has ended the executor. {}",
                    end.diagnostic
                ),
                ..end
            },
        ),
        // On target `kubernetes`, an interrupted run looks as if its job was cancelled.
        (RunEnd::Over(LeaseCall::Cancelled, end), StoppedBy::Agent, _) if !end.reported => {
            RunEnd::Lost(
                DeclineReason::Draining,
                End {
                    verdict: Some(VerdictKind::Signalled.name().to_owned()),
                    diagnostic: format!(
                        "The agent had to stop and has interrupted the executor. {}",
                        end.diagnostic
                    ),
                    ..end
                },
            )
        }
        (RunEnd::Lost(_, end), StoppedBy::Agent, _) => RunEnd::Lost(DeclineReason::Draining, end),
        (RunEnd::Decline(_, text), StoppedBy::Agent, _) => {
            RunEnd::Decline(DeclineReason::Draining, text)
        }
        (ended, ..) => ended,
    }
}

#[cfg(test)]
mod tests {
    use pool_protocol::id::{LeaseId, TaskId};
    use rstest::rstest;
    use serde_json::value::RawValue;
    use serde_json::{Value, json};

    use super::*;
    use crate::lease::Leases;

    fn task(payload: &str) -> LeasedTask {
        LeasedTask {
            task_id: TaskId::new(),
            lease_id: LeaseId::new(),
            fencing_token: 1,
            leased_at: String::new(),
            expires_at: String::new(),
            expires_in_seconds: 30,
            attempt: 1,
            job_token: "mfr_planted".to_owned(),
            task: Task {
                organization_id: "org".to_owned(),
                workspace_id: "ws".to_owned(),
                job_id: "7".to_owned(),
                step_id: "step".to_owned(),
                kind: "terraformApply".to_owned(),
                payload: RawValue::from_string(payload.to_owned()).unwrap(),
                traceparent: None,
            },
        }
    }

    fn open_task(task: LeasedTask) -> Result<StartRequest, (DeclineReason, String)> {
        let lease = LeaseRef {
            task: task.task_id,
            lease: task.lease_id,
            fencing_token: task.fencing_token,
        };
        let lease = Leases::default().add(lease, String::new(), None, Phase::Preparing);
        open(&lease.unwrap(), task, "http://hub/lease")
    }

    #[test]
    fn a_document_that_belongs_to_its_task_is_opened() {
        let document = r#"{"later": [1, 1.0],"organizationId":"org", "jobId":7, "stepId":"step"}"#;
        let order = open_task(task(document)).unwrap();
        assert_eq!(order.url, "http://hub/lease");
        assert_eq!(order.job.json(), document.as_bytes());
        assert!(!format!("{order:?}").contains("planted"));
    }

    #[rstest]
    #[case(json!({"organizationId": "other", "jobId": "7", "stepId": "step"}), "organizationId")]
    #[case(json!({"organizationId": "org", "jobId": "8", "stepId": "step"}), "jobId")]
    #[case(json!({"organizationId": "org", "jobId": "7", "stepId": "other"}), "stepId")]
    #[case(json!({"organizationId": "org", "jobId": "7"}), "stepId")]
    #[case(json!(["hunter2"]), "cannot be read")]
    fn a_document_of_another_task_is_refused(#[case] payload: Value, #[case] word: &str) {
        let (reason, text) = open_task(task(&payload.to_string())).unwrap_err();
        assert_eq!(reason, DeclineReason::Refused);
        assert!(text.contains(word) && !text.contains("hunter2"), "{text}");
    }

    const TERMINATED_BY_HUB: Option<(Stop, StoppedBy)> = Some((Stop::Terminate, StoppedBy::Hub));
    const KILLED_BY_HUB: Option<(Stop, StoppedBy)> = Some((Stop::Kill, StoppedBy::Hub));
    const TERMINATED_BY_AGENT: Option<(Stop, StoppedBy)> =
        Some((Stop::Terminate, StoppedBy::Agent));
    const KILLED_BY_AGENT: Option<(Stop, StoppedBy)> = Some((Stop::Kill, StoppedBy::Agent));
    const WITHDRAWN: Option<(Stop, StoppedBy)> = Some((Stop::Withdraw, StoppedBy::Hub));

    fn end_of_executor() -> End {
        unreported(Some(143), VerdictKind::Defect, "The end.".to_owned())
    }

    fn failed() -> RunEnd {
        RunEnd::Over(LeaseCall::Fail, end_of_executor())
    }

    fn cancelled() -> RunEnd {
        RunEnd::Over(LeaseCall::Cancelled, end_of_executor())
    }

    fn reported_as_cancelled() -> RunEnd {
        let end = End {
            reported: true,
            ..end_of_executor()
        };
        RunEnd::Over(LeaseCall::Cancelled, end)
    }

    fn lost() -> RunEnd {
        RunEnd::Lost(DeclineReason::Failed, end_of_executor())
    }

    fn declined() -> RunEnd {
        RunEnd::Decline(DeclineReason::Failed, "The end.".to_owned())
    }

    #[rstest]
    #[case(failed(), None, "FAIL defect")]
    #[case(failed(), WITHDRAWN, "FAIL defect")]
    #[case(failed(), TERMINATED_BY_HUB, "CANCELLED defect")]
    #[case(failed(), KILLED_BY_HUB, "CANCELLED defect")]
    #[case(failed(), TERMINATED_BY_AGENT, "FAIL defect")]
    #[case(failed(), KILLED_BY_AGENT, "FAIL agent_forced")]
    #[case(cancelled(), None, "CANCELLED defect")]
    #[case(cancelled(), WITHDRAWN, "CANCELLED defect")]
    #[case(cancelled(), TERMINATED_BY_HUB, "CANCELLED defect")]
    #[case(cancelled(), KILLED_BY_HUB, "CANCELLED defect")]
    #[case(cancelled(), TERMINATED_BY_AGENT, "LOST Draining signalled")]
    #[case(reported_as_cancelled(), TERMINATED_BY_AGENT, "CANCELLED defect")]
    #[case(cancelled(), KILLED_BY_AGENT, "FAIL agent_forced")]
    #[case(lost(), None, "LOST Failed defect")]
    #[case(lost(), WITHDRAWN, "LOST Failed defect")]
    #[case(lost(), TERMINATED_BY_HUB, "CANCELLED defect")]
    #[case(lost(), KILLED_BY_HUB, "CANCELLED defect")]
    #[case(lost(), TERMINATED_BY_AGENT, "LOST Draining defect")]
    #[case(lost(), KILLED_BY_AGENT, "FAIL agent_forced")]
    #[case(declined(), None, "DECLINE Failed")]
    #[case(declined(), TERMINATED_BY_HUB, "DECLINE Failed")]
    #[case(declined(), TERMINATED_BY_AGENT, "DECLINE Draining")]
    #[case(declined(), KILLED_BY_AGENT, "DECLINE Draining")]
    fn the_end_names_who_stopped_the_run(
        #[case] end: RunEnd,
        #[case] order: Option<(Stop, StoppedBy)>,
        #[case] expected: &str,
    ) {
        let order = order.map(|(stop, by)| StopOrder { stop, by });
        let (found, text) = match with_cause(end, order) {
            RunEnd::Over(call, end) => {
                let verdict = end.verdict.unwrap_or_default();
                let found = format!("{} {verdict}", call.name().to_uppercase());
                (found, end.diagnostic)
            }
            RunEnd::Lost(reason, end) => {
                let verdict = end.verdict.unwrap_or_default();
                (format!("LOST {reason:?} {verdict}"), end.diagnostic)
            }
            RunEnd::Decline(reason, text) => (format!("DECLINE {reason:?}"), text),
            RunEnd::Elsewhere => ("ELSEWHERE".to_owned(), String::new()),
        };
        assert_eq!(found, expected);
        let names_agent = expected.ends_with("agent_forced") || expected.ends_with("signalled");
        assert_eq!(
            text.contains("The agent had to stop"),
            names_agent,
            "{text}"
        );
        assert!(text.ends_with("The end."), "{text}");
    }

    #[test]
    fn a_lease_knows_that_the_agent_stops() {
        let lease = LeaseRef {
            task: TaskId::new(),
            lease: LeaseId::new(),
            fencing_token: 1,
        };
        let leases = Leases::default();
        let lease = leases
            .add(lease, String::new(), None, Phase::Preparing)
            .unwrap();
        assert!(!lease.is_stopped_by_agent());
        leases.order_all(StopOrder {
            stop: Stop::Terminate,
            by: StoppedBy::Agent,
        });
        assert!(lease.is_stopped_by_agent());
    }
}
