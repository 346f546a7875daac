//! Tests of single transitions.

use std::time::Duration;

use pool_protocol::id::{InstanceId, LeaseId, TaskId};
use pool_protocol::lease::{Acceptance, Decline, DeclineReason, End, Holder, LeaseRef};
use rstest::rstest;

use super::*;
use crate::clock::{Millis, millis};
use crate::error::Refusal;
use crate::model::{Ending, PlatformState};
use crate::rules::Rules;

pub(super) const CREDENTIAL: &str = "a digest";

pub(super) fn submitted() -> Task {
    Task {
        id: TaskId::new(),
        pool: "eu".parse().unwrap(),
        organization: "acme".to_owned(),
        workspace: "net".to_owned(),
        job: "1".to_owned(),
        step: "a".to_owned(),
        kind: "terraformPlan".to_owned(),
        traceparent: None,
        state: State::Submitted,
        fencing_token: 0,
        lease: None,
        instance: None,
        agent: None,
        credential: None,
        attempts: 0,
        reasons: Vec::new(),
        submitted_at: 0,
        not_before: 0,
        leased_at: 0,
        heard_at: 0,
        executor: None,
        holder: None,
        phase: None,
        cancel_requested: false,
        end: None,
    }
}

pub(super) fn holder(uid: &str) -> Holder {
    Holder {
        uid: uid.to_owned(),
        name: format!("pod-{uid}"),
    }
}

pub(super) fn heartbeat(uid: &str) -> Acceptance {
    Acceptance {
        holder: holder(uid),
        phase: Some("init".to_owned()),
    }
}

pub(super) fn end() -> End {
    End {
        exit_code: Some(1),
        final_log_sequence: None,
        report: None,
        diagnostic: "it failed".to_owned(),
        verdict: None,
        reported: false,
    }
}

pub(super) fn declined(reason: DeclineReason) -> Decline {
    Decline {
        reason,
        diagnostic: "no room".to_owned(),
        delay_seconds: None,
    }
}

/// A task and the time of a test.
struct Story {
    task: Task,
    now: Millis,
    rules: Rules,
    agents: Vec<pool_protocol::id::AgentName>,
}

impl Story {
    fn new() -> Self {
        Self {
            task: submitted(),
            now: 0,
            rules: Rules::default(),
            agents: ["one", "two"].map(|name| name.parse().unwrap()).to_vec(),
        }
    }

    fn leased() -> Self {
        let mut story = Self::new();
        story.confirm();
        story.lease(0);
        story
    }

    fn running() -> Self {
        let mut story = Self::leased();
        let (grant, holder) = (story.grant(), holder("x"));
        story
            .happens(Event::Accept {
                grant,
                holder: &holder,
            })
            .unwrap();
        story
    }

    fn happens(&mut self, event: Event<'_>) -> Result<Transition, Refusal> {
        let transition = apply(&self.task, event, self.now, &self.rules)?;
        self.task = transition.task.clone();
        Ok(transition)
    }

    fn confirm(&mut self) {
        self.happens(Event::PlatformState(PlatformState::Waiting))
            .unwrap();
    }

    fn lease(&mut self, agent: usize) {
        let agent = self.agents[agent].clone();
        let event = Event::Lease {
            lease: LeaseId::new(),
            instance: InstanceId::new(),
            agent: &agent,
            credential: CREDENTIAL,
        };
        assert!(self.happens(event).unwrap().changed);
    }

    fn decline(&mut self, reason: DeclineReason) {
        let (grant, decline) = (self.grant(), declined(reason));
        let event = Event::Decline {
            grant,
            decline: &decline,
        };
        self.happens(event).unwrap();
    }

    fn revoke(&mut self) {
        let credential = CREDENTIAL;
        self.happens(Event::Revoked { credential }).unwrap();
    }

    fn grant(&self) -> LeaseRef {
        self.task.grant().unwrap()
    }

    fn passes(&mut self, time: Duration) -> Transition {
        self.now += millis(time);
        self.happens(Event::TimeOut).unwrap()
    }

    fn end_reason(&self) -> Option<EndReason> {
        self.task.end.as_ref().map(|end| end.reason)
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn names_are_read_back() {
    for state in State::ALL {
        assert_eq!(State::of_name(state.name()), Some(state));
    }
    for reason in EndReason::ALL {
        assert_eq!(EndReason::of_name(reason.name()), Some(reason));
    }
    assert_eq!(State::of_name("claimed"), None);
}

#[test]
fn a_lease_lasts_30_s_and_a_heartbeat_renews_it() {
    let mut story = Story::leased();
    story.passes(29 * SECOND);
    assert_eq!(story.task.state, State::Leased);
    let instance = story.task.instance.unwrap();
    story
        .happens(Event::Renewed {
            instance,
            credential: CREDENTIAL,
            reason: None,
        })
        .unwrap();
    story.passes(29 * SECOND);
    assert_eq!(story.task.state, State::Leased);
    let transition = story.passes(SECOND);
    assert_eq!(story.task.state, State::Submitted);
    assert_eq!(transition.instance, Some((instance, LeaseOutcome::Failed)));
    assert_eq!(story.task.reasons, ["no heartbeat from agent one for 30 s"]);
}

#[test]
fn an_instance_that_starts_no_executor_has_a_task_for_300_s() {
    let mut story = Story::leased();
    let instance = story.task.instance.unwrap();
    for _ in 0..14 {
        story.passes(20 * SECOND);
        story
            .happens(Event::Renewed {
                instance,
                credential: CREDENTIAL,
                reason: None,
            })
            .unwrap();
    }
    story.passes(19 * SECOND);
    assert_eq!(story.task.state, State::Leased);
    story.passes(SECOND);
    assert_eq!(
        (story.task.state, story.task.attempts),
        (State::Submitted, 1)
    );
    assert_eq!(
        story.task.reasons,
        ["agent one started no executor within 300 s"]
    );
}

#[test]
fn a_started_task_is_given_up_after_300_s() {
    let mut story = Story::leased();
    let grant = story.grant();
    story
        .happens(Event::Started {
            grant,
            executor: "ns/job",
        })
        .unwrap();
    story.passes(299 * SECOND);
    assert_eq!(story.task.state, State::Started);
    story.passes(SECOND);
    assert_eq!(story.task.state, State::Submitted);
    // The executor accepts too late.
    let late = holder("x");
    let event = Event::Accept {
        grant,
        holder: &late,
    };
    assert_eq!(story.happens(event).unwrap_err(), Refusal::LeaseExpired);
    story.now += 10_000;
    story.confirm();
    story.lease(1);
    let event = Event::Accept {
        grant,
        holder: &late,
    };
    assert_eq!(story.happens(event).unwrap_err(), Refusal::LeaseSuperseded);
}

#[test]
fn pauses_grow_and_five_failed_attempts_end_the_task_with_all_reasons() {
    let mut story = Story::new();
    let mut pauses = Vec::new();
    for attempt in 1..=5 {
        story.confirm();
        story.now = story.task.not_before;
        story.lease(0);
        assert_eq!(story.task.fencing_token, attempt);
        story.decline(DeclineReason::Failed);
        pauses.push(story.task.not_before - story.now);
    }
    assert_eq!(pauses[..4], [10_000, 20_000, 40_000, 80_000]);
    assert_eq!(story.task.state, State::Failed);
    let end = story.task.end.as_ref().unwrap();
    assert_eq!(end.reason, EndReason::Poison);
    for number in 1..=5 {
        let reason = format!("{number}. agent one declined it (Failed): no room");
        assert!(end.diagnostic.contains(&reason), "{}", end.diagnostic);
    }
}

#[rstest]
#[case(DeclineReason::Draining, 0, 5_000)]
#[case(DeclineReason::Quota, 10_000, 10_000)]
fn an_agent_without_room_costs_no_attempt(
    #[case] reason: DeclineReason,
    #[case] first: Millis,
    #[case] later: Millis,
) {
    let mut story = Story::leased();
    for turn in 0..10 {
        story.decline(reason);
        let pause = if turn == 0 { first } else { later };
        assert_eq!(story.task.not_before - story.now, pause);
        assert_eq!((story.task.attempts, story.task.reasons.len()), (0, 1));
        story.now = story.task.not_before;
        story.confirm();
        story.lease(0);
    }
    let (grant, decline) = (
        story.grant(),
        Decline {
            delay_seconds: Some(u32::MAX),
            ..declined(reason)
        },
    );
    let event = Event::Decline {
        grant,
        decline: &decline,
    };
    story.happens(event).unwrap();
    assert_eq!(story.task.not_before - story.now, 300_000);
}

#[test]
fn a_task_that_an_agent_refuses_is_over_at_once() {
    let mut story = Story::leased();
    story.decline(DeclineReason::Refused);
    assert_eq!(story.end_reason(), Some(EndReason::Refused));
    assert!(story.task.is_unreported());
}

#[test]
fn silence_orphans_a_task_then_loses_it_and_a_heartbeat_recovers_an_orphan() {
    let mut story = Story::running();
    story.passes(89 * SECOND);
    assert_eq!(story.task.state, State::Running);
    story.passes(SECOND);
    assert_eq!(story.task.state, State::Orphaned);
    story.passes(300 * SECOND);
    let (grant, heartbeat) = (story.grant(), heartbeat("x"));
    let event = Event::Heartbeat {
        grant,
        heartbeat: &heartbeat,
    };
    let entry = story.happens(event).unwrap().entry.unwrap();
    assert_eq!(entry.note, "heard again after 390 s");
    assert_eq!(story.task.state, State::Running);
    story.passes(90 * SECOND);
    story.passes(509 * SECOND);
    assert_eq!(story.task.state, State::Orphaned);
    story.passes(SECOND);
    assert_eq!(story.end_reason(), Some(EndReason::Lost));
    assert!(story.task.is_unreported());
    let refusal = story.happens(event).unwrap_err();
    assert_eq!(refusal, Refusal::TaskAlreadyTerminal);
}

#[test]
fn only_one_holder_can_accept_a_task_and_it_may_repeat() {
    let mut story = Story::running();
    let grant = story.grant();
    let (same, other) = (holder("x"), holder("y"));
    let event = Event::Accept {
        grant,
        holder: &same,
    };
    let again = story.happens(event).unwrap();
    assert_eq!((again.task.state, again.entry), (State::Running, None));
    let event = Event::Accept {
        grant,
        holder: &other,
    };
    assert_eq!(story.happens(event).unwrap_err(), Refusal::LeaseSuperseded);
    let heartbeat = heartbeat("y");
    let event = Event::Heartbeat {
        grant,
        heartbeat: &heartbeat,
    };
    assert_eq!(story.happens(event).unwrap_err(), Refusal::LeaseSuperseded);
    let decline = declined(DeclineReason::Failed);
    let event = Event::Decline {
        grant,
        decline: &decline,
    };
    assert_eq!(story.happens(event).unwrap_err(), Refusal::LeaseAccepted);
}

#[test]
fn a_heartbeat_restores_an_acceptance_that_a_backup_lacks() {
    let running = Story::running();
    let (grant, heartbeat) = (running.grant(), heartbeat("x"));
    // Two backups: from before the lease, and from before the task was accepted.
    let mut before_lease = Story::new();
    before_lease.task.id = running.task.id;
    let mut before_accept = Story::leased();
    before_accept.task.lease = running.task.lease;
    before_accept.task.id = running.task.id;
    // The platform reported that the step runs.
    let mut adopted = Story::new();
    adopted.task.id = running.task.id;
    adopted
        .happens(Event::PlatformState(PlatformState::Running))
        .unwrap();
    // The task was leased again.
    let mut given_away = Story::leased();
    given_away.task.id = running.task.id;
    for mut story in [before_lease, before_accept, adopted, given_away] {
        let event = Event::Heartbeat {
            grant,
            heartbeat: &heartbeat,
        };
        let transition = story.happens(event).unwrap();
        assert!(transition.drops_payload);
        assert_eq!(story.task.state, State::Running);
        assert_eq!(story.task.grant(), Some(grant));
        assert_eq!(story.task.holder, Some(holder("x")));
    }
}

#[rstest]
#[case::declined(|story: &mut Story| story.decline(DeclineReason::Draining), Refusal::LeaseExpired)]
#[case::expired(|story: &mut Story| drop(story.passes(Duration::from_secs(31))), Refusal::LeaseExpired)]
#[case::confirmed_again(|story: &mut Story| { story.decline(DeclineReason::Draining); story.confirm(); }, Refusal::LeaseExpired)]
#[case::cancelled(|story: &mut Story| drop(story.happens(Event::Cancel).unwrap()), Refusal::TaskCancelled)]
#[case::revoked(|story: &mut Story| story.revoke(), Refusal::LeaseExpired)]
#[case::over(|story: &mut Story| story.decline(DeclineReason::Refused), Refusal::TaskAlreadyTerminal)]
#[case::runs_at_the_platform(|story: &mut Story| {
    story.decline(DeclineReason::Draining);
    story.happens(Event::PlatformState(PlatformState::Running)).unwrap();
}, Refusal::LeaseSuperseded)]
#[case::leased_again(|story: &mut Story| { story.decline(DeclineReason::Draining); story.confirm(); story.lease(1); }, Refusal::LeaseSuperseded)]
fn a_heartbeat_does_not_bring_an_ended_lease_back(
    #[case] ends: fn(&mut Story),
    #[case] expected: Refusal,
) {
    let mut story = Story::leased();
    let (grant, heartbeat) = (story.grant(), heartbeat("x"));
    ends(&mut story);
    let accept = Event::Accept {
        grant,
        holder: &heartbeat.holder,
    };
    let beat = Event::Heartbeat {
        grant,
        heartbeat: &heartbeat,
    };
    for event in [beat, accept] {
        assert_eq!(story.happens(event).unwrap_err(), expected, "{event:?}");
    }
}

#[test]
fn a_revoked_credential_ends_its_leases_and_no_others() {
    let mut story = Story::leased();
    let other = Event::Revoked {
        credential: "another digest",
    };
    assert!(!story.happens(other).unwrap().changed);
    story.revoke();
    assert_eq!(story.task.state, State::Submitted);
    assert_eq!((story.task.attempts, story.task.reasons.len()), (0, 1));

    let mut story = Story::running();
    story.revoke();
    let end = story.task.end.clone().unwrap();
    assert_eq!((end.reason, end.reported), (EndReason::Revoked, false));
    assert!(end.diagnostic.contains("no longer valid"), "{end:?}");
    let (grant, heartbeat) = (story.grant(), heartbeat("x"));
    let beat = Event::Heartbeat {
        grant,
        heartbeat: &heartbeat,
    };
    assert_eq!(
        story.happens(beat).unwrap_err(),
        Refusal::TaskAlreadyTerminal
    );

    // The agent has renewed it with a new token.
    let mut story = Story::running();
    let instance = story.task.instance.unwrap();
    let renewed = Event::Renewed {
        instance,
        credential: "another digest",
        reason: None,
    };
    story.happens(renewed).unwrap();
    story.revoke();
    assert_eq!(story.task.state, State::Running);
}

#[test]
fn a_task_whose_document_cannot_be_read_fails_after_five_attempts() {
    let mut story = Story::new();
    for _ in 0..5 {
        story.confirm();
        let reason = "no key";
        story.happens(Event::Unreadable { reason }).unwrap();
        story.now = story.now.max(story.task.not_before);
    }
    let end = story.task.end.clone().unwrap();
    assert_eq!(end.reason, EndReason::Poison);
    assert!(end.diagnostic.contains("5. no key"), "{}", end.diagnostic);
}

#[test]
fn a_task_that_runs_at_the_platform_cannot_be_accepted() {
    let mut story = Story::leased();
    let (grant, holder) = (story.grant(), holder("y"));
    story.decline(DeclineReason::Draining);
    story
        .happens(Event::PlatformState(PlatformState::Running))
        .unwrap();
    let event = Event::Accept {
        grant,
        holder: &holder,
    };
    assert_eq!(story.happens(event).unwrap_err(), Refusal::LeaseSuperseded);
}

#[rstest]
fn an_ended_lease_does_not_end_a_task_that_runs_at_the_platform(
    #[values(Ending::Completed, Ending::Failed, Ending::Cancelled)] ending: Ending,
) {
    let mut story = Story::leased();
    let grant = story.grant();
    story.decline(DeclineReason::Draining);
    story
        .happens(Event::PlatformState(PlatformState::Running))
        .unwrap();
    let end = &end();
    let event = Event::End { grant, ending, end };
    assert_eq!(story.happens(event).unwrap_err(), Refusal::LeaseSuperseded);
}

#[test]
fn a_cancelled_task_is_neither_accepted_nor_leased_again() {
    let mut story = Story::leased();
    let (grant, holder) = (story.grant(), holder("x"));
    let transition = story.happens(Event::Cancel).unwrap();
    assert!(!transition.drops_payload);
    let event = Event::Accept {
        grant,
        holder: &holder,
    };
    assert_eq!(story.happens(event).unwrap_err(), Refusal::TaskCancelled);
    story.passes(30 * SECOND);
    assert_eq!(story.end_reason(), Some(EndReason::Cancelled));
    assert_eq!(story.task.state, State::Cancelled);
}

#[test]
fn a_cancelled_task_that_waits_is_over_at_once() {
    for confirmed in [false, true] {
        let mut story = Story::new();
        if confirmed {
            story.confirm();
        }
        let transition = story.happens(Event::Cancel).unwrap();
        assert!(transition.drops_payload);
        assert_eq!(story.end_reason(), Some(EndReason::Cancelled));
    }
}

#[rstest]
#[case::leased(
    Story::leased(),
    Ending::Completed,
    false,
    Err(Refusal::LeaseNotAccepted)
)]
#[case::leased(
    Story::leased(),
    Ending::Cancelled,
    false,
    Err(Refusal::LeaseNotAccepted)
)]
#[case::leased(Story::leased(), Ending::Cancelled, true, Ok(State::Cancelled))]
#[case::leased(Story::leased(), Ending::Failed, false, Ok(State::Failed))]
#[case::running(Story::running(), Ending::Completed, false, Ok(State::Completed))]
#[case::running(Story::running(), Ending::Cancelled, false, Ok(State::Cancelled))]
#[case::running(Story::running(), Ending::Failed, true, Ok(State::Failed))]
fn the_state_decides_which_ends_are_allowed(
    #[case] mut story: Story,
    #[case] ending: Ending,
    #[case] cancelled: bool,
    #[case] expected: Result<State, Refusal>,
) {
    if cancelled {
        story.happens(Event::Cancel).unwrap();
    }
    let (grant, end) = (story.grant(), end());
    let event = Event::End {
        grant,
        ending,
        end: &end,
    };
    let ended = story.happens(event).map(|transition| transition.task.state);
    assert_eq!(ended, expected);
}

#[test]
fn the_first_end_counts_and_may_be_repeated() {
    let mut story = Story::running();
    let (grant, ended) = (story.grant(), end());
    let event = |ending, end| Event::End { grant, ending, end };
    story.happens(event(Ending::Failed, &ended)).unwrap();
    assert!(story.task.is_unreported());
    let again = story.happens(event(Ending::Failed, &ended)).unwrap();
    assert!(!again.changed);
    let other = story.happens(event(Ending::Completed, &ended)).unwrap_err();
    assert_eq!(other, Refusal::TaskAlreadyTerminal);
    // The executor has reported to the platform, but the agent's request reached the hub first.
    let reported = End {
        reported: true,
        ..ended.clone()
    };
    story.happens(event(Ending::Failed, &reported)).unwrap();
    assert!(!story.task.is_unreported());
}

#[test]
fn a_task_that_waits_too_long_expires_with_the_last_reason() {
    let mut story = Story::leased();
    story.decline(DeclineReason::Quota);
    story.passes(3599 * SECOND);
    assert_eq!(story.task.state, State::Submitted);
    story.passes(SECOND);
    assert_eq!(story.end_reason(), Some(EndReason::Expired));
    let diagnostic = &story.task.end.as_ref().unwrap().diagnostic;
    assert!(
        diagnostic.contains("pool `eu`") && diagnostic.contains("no room"),
        "{diagnostic}"
    );
}

#[test]
fn a_task_that_the_platform_does_not_want_is_not_reported() {
    let mut story = Story::new();
    story
        .happens(Event::PlatformState(PlatformState::Over))
        .unwrap();
    assert_eq!(story.end_reason(), Some(EndReason::Superseded));
    assert!(!story.task.is_unreported());
}

#[test]
fn a_declined_task_may_be_declined_again() {
    let mut story = Story::leased();
    let (grant, decline) = (story.grant(), declined(DeclineReason::Failed));
    let event = Event::Decline {
        grant,
        decline: &decline,
    };
    story.happens(event).unwrap();
    let again = story.happens(event).unwrap();
    assert!(!again.changed);
    story.now = story.task.not_before;
    story.confirm();
    story.lease(1);
    assert_eq!(story.happens(event).unwrap_err(), Refusal::LeaseSuperseded);
}
