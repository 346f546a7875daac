//! Renders the page of a pool: its agents, its queue, its active runs and its recent runs.

use maud::{Markup, html};
use pool_protocol::task::TaskState;
use pool_store::{InstanceView, TaskView};

use super::more;
use super::overview::{Summary, condition, tile};
use super::words::{ago, condition_badge, end_sentence, run_badge, span, wait_reason};

/// The data of the page.
#[derive(Debug)]
pub(super) struct PoolPage {
    pub(super) summary: Summary,
    pub(super) agents: Vec<InstanceView>,
    /// Runs that are not over, oldest first.
    pub(super) open: Vec<TaskView>,
    /// Runs that are over, the last submitted first.
    pub(super) over: Vec<TaskView>,
    /// For viewers who may add agents.
    pub(super) new_agents: Option<NewAgents>,
}

/// What an agent of the pool has to know.
#[derive(Debug)]
pub(super) struct NewAgents {
    /// The address at which the viewer has found the hub.
    pub(super) hub: String,
    /// The address of the platform as users know it.
    pub(super) platform: Option<String>,
}

pub(super) fn render(page: &PoolPage) -> Markup {
    let summary = &page.summary;
    let is_waiting = |task: &&TaskView| task.state == TaskState::Available;
    let (queue, active): (Vec<_>, Vec<_>) = page.open.iter().partition(is_waiting);
    let path = format!("/ui/pools/{}", summary.pool);
    let next_open = more(&page.open, |task| task.task.to_string());
    html! {
        nav.crumbs aria-label="Breadcrumb" { a href="/ui" { "Pools" } }
        h1 { "Pool " (summary.pool) }
        div #summary data-live {
            p { (condition(summary)) }
            dl.tiles {
                (tile("Runs waiting", summary.waiting()))
                (tile("Runs active", summary.running()))
                (tile("Agents online", summary.of(|view| view.online)))
                (tile("Free slots", summary.of(|view| view.free)))
            }
        }
        section #active data-live aria-labelledby="active-title" {
            h2 #active-title { "Active runs" }
            @if active.is_empty() { p.empty { "No run is active." } }
            @else { (active_runs(&active)) }
        }
        section #queue data-live aria-labelledby="queue-title" {
            h2 #queue-title { "Queue" }
            @if queue.is_empty() { p.empty { "No run waits." } }
            @else {
                p.note { "In the order of arrival. If several organizations wait, agents take the oldest run of the one with the fewest active runs." }
                (waiting_runs(&queue))
            }
            @if let Some(after) = next_open {
                p { a href={ (path) "?after=" (after) } { "More active and waiting runs" } }
            }
        }
        section #agents data-live aria-labelledby="agents-title" {
            h2 #agents-title { "Agents" }
            @if page.agents.is_empty() {
                p.empty { "No agent has registered. Start one with a token of this pool." }
            } @else { (agents(&page.agents)) }
            @if let Some(after) = more(&page.agents, |agent| agent.instance.to_string()) {
                p { a href={ (path) "?agents=" (after) } { "More agents" } }
            }
        }
        @if let Some(new) = &page.new_agents { (adding(summary, new)) }
        section #over data-live aria-labelledby="over-title" {
            h2 #over-title { "Recent runs" }
            @if page.over.is_empty() { p.empty { "No run has ended in the last 24 hours." } }
            @else { (runs_that_are_over(&page.over)) }
            @if let Some(before) = more(&page.over, |task| task.task.to_string()) {
                p { a href={ (path) "?before=" (before) } { "Earlier runs" } }
            }
        }
    }
}

/// Returns the steps that add an agent to the pool.
fn adding(summary: &Summary, new: &NewAgents) -> Markup {
    let pool = &summary.pool;
    let platform = new.platform.as_deref();
    let platform = platform.map_or_else(String::new, |url| format!(" --public-api-url {url}"));
    let token = format!(
        "api-launcher pool token new --pool {pool} --values --service-url {}{platform} > values.yaml",
        new.hub
    );
    let install = format!(
        "helm install {pool}-agent helm/mayfly --namespace runs --create-namespace -f values.yaml"
    );
    html! {
        section #add aria-labelledby="add-title" {
            h2 #add-title { "Add an agent" }
            ol {
                li {
                    "Make its token. Correct the address of the hub if agents reach it at another one."
                    pre { code { (token) } }
                }
                li {
                    "Add the line that this prints to " code { "pools." (pool) ".tokens" } " in the file of the pools."
                }
                li {
                    "Install it in its own cluster, from a checkout of Mayfly. Then remove " code { "values.yaml" }
                    ", which has the token."
                    pre { code { (install) } }
                }
            }
        }
    }
}

/// Returns the name of a run, with a link to its page.
fn name(task: &TaskView) -> Markup {
    html! {
        a href={ "/ui/runs/" (task.task) } { "Job " (task.job) }
        @if !task.kind.is_empty() { span.more { " " (task.kind) } }
    }
}

fn active_runs(tasks: &[&TaskView]) -> Markup {
    html! {
        table {
            caption.hidden { "Runs that an agent has" }
            thead {
                tr {
                    th scope="col" { "Run" }
                    th scope="col" { "State" }
                    th scope="col" { "Agent" }
                    th scope="col" { "Executor" }
                    th scope="col" { "Last heard" }
                    th scope="col" { "Submitted" }
                }
            }
            tbody {
                @for task in tasks {
                    tr {
                        th scope="row" { (name(task)) }
                        td data-label="State" {
                            (run_badge(task))
                            @if let Some(phase) = &task.phase { span.more { " " (phase) } }
                        }
                        td data-label="Agent" { (dash(task.agent.as_ref().map(ToString::to_string))) }
                        td data-label="Executor" { (dash(task.executor.clone())) }
                        td data-label="Last heard" { (dash(task.silent.map(ago))) }
                        td data-label="Submitted" { (ago(task.age)) }
                    }
                }
            }
        }
    }
}

fn waiting_runs(tasks: &[&TaskView]) -> Markup {
    html! {
        table {
            caption.hidden { "Runs that wait for an agent" }
            thead {
                tr {
                    th scope="col" { "Run" }
                    th scope="col" { "Waits because" }
                    th scope="col" { "Waits for" }
                    th.number scope="col" { "Attempts" }
                    th scope="col" { "Organization" }
                }
            }
            tbody {
                @for task in tasks {
                    tr {
                        th scope="row" { (name(task)) }
                        td data-label="Waits because" {
                            (dash(task.wait.map(|wait| wait_reason(wait, task.attempts))))
                            @if let Some(reason) = task.reasons.last() {
                                div.more { "Last attempt: " (first_line(reason)) }
                            }
                        }
                        td data-label="Waits for" { (span(task.age)) }
                        td.number data-label="Attempts" { (task.attempts) }
                        td data-label="Organization" { (task.organization) }
                    }
                }
            }
        }
    }
}

fn agents(agents: &[InstanceView]) -> Markup {
    html! {
        table {
            caption.hidden { "Agents of the pool" }
            thead {
                tr {
                    th scope="col" { "Agent" }
                    th scope="col" { "State" }
                    th scope="col" { "Version" }
                    th scope="col" { "Executors" }
                    th.number scope="col" { "Runs" }
                    th.number scope="col" { "Free slots" }
                    th scope="col" { "Last seen" }
                }
            }
            tbody {
                @for agent in agents {
                    tr {
                        th scope="row" {
                            (agent.agent)
                            @for tag in &agent.tags { " " span.tag { (tag) } }
                        }
                        td data-label="State" {
                            (condition_badge(agent.condition))
                            @if agent.failures > 0 {
                                span.more { " " (agent.failures) " leases in a row without an executor" }
                            }
                        }
                        td data-label="Version" { (agent.version) }
                        td data-label="Executors" {
                            (dash(Some(agent.target.clone()).filter(|target| !target.is_empty())))
                            span.more { " " (agent.operating_system) "/" (agent.architecture) }
                        }
                        td.number data-label="Runs" { (agent.tasks) }
                        td.number data-label="Free slots" { (agent.free) " of " (agent.capacity) }
                        td data-label="Last seen" { (ago(agent.last_seen)) }
                    }
                }
            }
        }
    }
}

fn runs_that_are_over(tasks: &[TaskView]) -> Markup {
    html! {
        table {
            caption.hidden { "Runs that are over" }
            thead {
                tr {
                    th scope="col" { "Run" }
                    th scope="col" { "Outcome" }
                    th scope="col" { "Reason" }
                    th scope="col" { "Agent" }
                    th scope="col" { "Ended" }
                }
            }
            tbody {
                @for task in tasks {
                    tr {
                        th scope="row" { (name(task)) }
                        td data-label="Outcome" { (run_badge(task)) }
                        td data-label="Reason" { (dash(reason(task))) }
                        td data-label="Agent" { (dash(task.agent.as_ref().map(ToString::to_string))) }
                        td data-label="Ended" { (dash(task.ended.map(ago))) }
                    }
                }
            }
        }
    }
}

/// Returns why a run is over, in one line.
fn reason(task: &TaskView) -> Option<String> {
    let end = task.end.as_ref()?;
    let diagnostic = Some(first_line(&end.diagnostic)).filter(|line| !line.is_empty());
    let known = end_sentence(end.reason).map(str::to_owned);
    let code = end.exit_code.filter(|code| *code != 0);
    diagnostic
        .or(known)
        .or_else(|| code.map(|code| format!("The executor ended with exit code {code}")))
}

fn first_line(text: &str) -> String {
    const LONGEST: usize = 160;
    let line = text.lines().next().unwrap_or_default();
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.to_owned(),
    }
}

fn dash(value: Option<String>) -> String {
    value.unwrap_or_else(|| "–".to_owned())
}
