//! Renders the page of a run.

use std::time::SystemTime;

use maud::{Markup, html};
use pool_protocol::id::AgentName;
use pool_protocol::task::TaskState;
use pool_store::state::TaskEnd;
use pool_store::{EventView, TaskView, Wait};

use super::timeline;
use super::words::{
    ago, end_advice, end_sentence, moment, run_badge, span, wait_advice, wait_reason,
};
use crate::artifacts::kept;
use crate::pools::Boundary;
use crate::tails::Part;

/// The text before the advice in a diagnostic.
const ADVICE: &str = "What to do: ";

/// The data of the page.
#[derive(Debug)]
pub(super) struct RunPage {
    pub(super) task: TaskView,
    /// How many runs are before it in the queue. `None`: it does not wait.
    pub(super) position: Option<u32>,
    pub(super) events: Vec<EventView>,
    /// The end of the log. `None`: no line passed this hub.
    pub(super) log: Option<Part>,
    /// Where a state of the run is that was refused, or could not be stored.
    pub(super) kept: Option<String>,
    /// Whether runs of the workspace wait for such a state.
    pub(super) is_listed: bool,
    /// `None`: the pool is no longer in the file of the pools.
    pub(super) boundary: Option<Boundary>,
    pub(super) now: SystemTime,
}

pub(super) fn title(task: &TaskView) -> String {
    match &*task.kind {
        "" => format!("Job {}", task.job),
        kind => format!("Job {} {kind}", task.job),
    }
}

pub(super) fn render(page: &RunPage) -> Markup {
    let task = &page.task;
    html! {
        nav.crumbs aria-label="Breadcrumb" {
            a href="/ui" { "Pools" } " / "
            a href={ "/ui/pools/" (task.pool) } { (task.pool) }
        }
        h1 { (title(task)) }
        div #state data-live {
            p.state {
                (run_badge(task))
                @if let Some(phase) = task.phase.as_ref().filter(|_| task.end.is_none()) { " " (phase) }
            }
            (callout(page))
        }
        section #timeline data-live aria-labelledby="timeline-title" {
            h2 #timeline-title { "Timeline" }
            (timeline::render(&page.events, page.now))
        }
        (log(page))
        section #facts data-live aria-labelledby="facts-title" {
            h2 #facts-title { "Facts" }
            (facts(page))
        }
        section #events data-live aria-labelledby="events-title" {
            h2 #events-title { "Events" }
            (events(&page.events))
        }
    }
}

/// Returns the most important facts: why the run waits, what is wrong, how it ended, and the advice.
fn callout(page: &RunPage) -> Markup {
    let task = &page.task;
    html! {
        @if let Some(end) = &task.end { (ending(task, end)) }
        @if let Some(kept) = &page.kept {
            div.callout.bad {
                p.sentence { "A state of this run is not stored. It is kept in " code { (kept) } "." }
                (advise(&format!("Before the next run, {}.", kept::advice(task, page.is_listed))))
            }
        }
        @if let Some(wait) = task.wait {
            div.callout.quiet {
                p.sentence { (wait_reason(wait, task.attempts)) "." }
                @if let Wait::Workspace(active) = wait {
                    p { a href={ "/ui/runs/" (active) } { "The run of that step" } }
                } @else if let Some(ahead) = page.position {
                    p {
                        @match ahead {
                            0 => "It is the first of the queue.",
                            1 => "One run is in front of it.",
                            _ => { (ahead) " runs are in front of it." },
                        }
                    }
                }
                @if let Some(advice) = wait_advice(wait) { (advise(advice)) }
            }
        }
        @if task.state == TaskState::Orphaned {
            div.callout.warning {
                p.sentence { "Nothing is heard of the executor or its agent." }
                (advise("Check the network and the cluster of the agent. If neither returns, the hub gives the run up and the step fails."))
            }
        }
        @if task.cancel_requested && task.end.is_none() {
            div.callout.warning { p.sentence { "The platform has cancelled the run. It stops at the next heartbeat." } }
        }
        @if !task.reasons.is_empty() {
            div.callout.warning {
                p.sentence { "Attempts that failed" }
                ol { @for reason in &task.reasons { li.text { (reason) } } }
            }
        }
    }
}

fn ending(task: &TaskView, end: &TaskEnd) -> Markup {
    let tone = match task.state {
        TaskState::Completed => "good",
        TaskState::Failed => "bad",
        _ => "quiet",
    };
    let (finding, advice) = split(&end.diagnostic);
    let mut lines = finding.lines();
    let first = lines.next().or(end_sentence(end.reason));
    let sentence = match (first, end.exit_code) {
        (Some(first), _) => first.to_owned(),
        (None, Some(0)) => "The step has ended well.".to_owned(),
        (None, Some(code)) => format!("The executor ended with exit code {code}."),
        (None, None) => "The step has ended.".to_owned(),
    };
    let advice = advice.or(end_advice(end.reason));
    html! {
        div class={ "callout " (tone) } {
            p.sentence { (sentence) }
            @for line in lines { p.text { (line.trim()) } }
            @if let Some(advice) = advice { (advise(advice)) }
            @if !end.reported {
                p { "The platform does not have this outcome yet. The hub reports it as soon as the platform answers." }
            }
        }
    }
}

fn advise(advice: &str) -> Markup {
    html! { p.advice { b { "What to do: " } (advice) } }
}

/// Splits a diagnostic into the finding and the advice.
fn split(diagnostic: &str) -> (&str, Option<&str>) {
    match diagnostic.find(ADVICE) {
        Some(at) => {
            let advice = &diagnostic[at + ADVICE.len()..];
            (diagnostic[..at].trim_end(), Some(advice))
        }
        None => (diagnostic, None),
    }
}

fn log(page: &RunPage) -> Markup {
    let task = &page.task;
    let path = format!("/ui/runs/{}/log", task.task);
    let part = page.log.clone().unwrap_or_default();
    let is_over = task.end.is_some();
    html! {
        section aria-labelledby="log-title" {
            h2 #log-title { "Log" }
            p.note #log-note {
                @if page.boundary == Some(Boundary::Direct) {
                    "Executors of this pool send their log to the platform themselves, so the hub does not have it."
                } @else if page.log.is_none() && is_over {
                    "This hub has no line of this run. It keeps the ends of logs in memory; the platform has the whole log."
                } @else if page.log.is_none() {
                    "No line yet."
                } @else {
                    "The last 256 KiB. The platform has the whole log. "
                    a href=(path) { "As plain text" }
                }
            }
            pre #log tabindex="0" aria-labelledby="log-title" hidden[page.log.is_none()]
                data-log=(path) data-end=(part.end) data-over=(is_over) { (part.text) }
        }
    }
}

fn facts(page: &RunPage) -> Markup {
    let task = &page.task;
    let end = task.end.as_ref();
    html! {
        dl.facts {
            (fact("Organization", Some(&task.organization)))
            (fact("Workspace", Some(&task.workspace)))
            (fact("Job", Some(&task.job)))
            (fact("Step", Some(&task.step)))
            (fact("Submitted", Some(&ago(task.age))))
            (fact("Agent", task.agent.as_ref().map(AgentName::as_str)))
            (fact("Executor", task.executor.as_deref()))
            (fact("Accepted by", task.holder.as_deref()))
            (fact("Last heard", task.silent.map(ago).as_deref()))
            (fact("Failed attempts", Some(&task.attempts.to_string())))
            @if task.lease.is_some() { (fact("Fencing token", Some(&task.fencing_token.to_string()))) }
            @if let Some(end) = end {
                (fact("Ended", Some(&ago(task.ended.unwrap_or_default()))))
                (fact("Verdict", end.verdict.as_deref()))
                (fact("Exit code", end.exit_code.map(|code| code.to_string()).as_deref()))
                (fact("Reported", Some(if end.reported { "yes" } else { "not yet" })))
            }
            (fact("Trace", task.traceparent.as_deref()))
            (fact("Run", Some(&task.task.to_string())))
        }
    }
}

fn fact(name: &str, value: Option<&str>) -> Markup {
    html! {
        @if let Some(value) = value.filter(|value| !value.is_empty()) {
            div { dt { (name) } dd { (value) } }
        }
    }
}

fn events(events: &[EventView]) -> Markup {
    let first = events.first().map(|event| event.at);
    html! {
        table {
            caption.hidden { "What happened to the run" }
            thead {
                tr {
                    th scope="col" { "Time" }
                    th.number scope="col" { "After" }
                    th scope="col" { "State" }
                    th scope="col" { "By" }
                    th scope="col" { "Note" }
                }
            }
            tbody {
                @for event in events {
                    tr {
                        td data-label="Time" { (moment(event.at)) }
                        td.number data-label="After" {
                            (span(first.and_then(|first| event.at.duration_since(first).ok()).unwrap_or_default()))
                        }
                        td.word data-label="State" { (event.to) }
                        td data-label="By" { (event.actor) }
                        td.text data-label="Note" { (event.note) }
                    }
                }
            }
        }
    }
}
