//! Renders the overview of all pools.

use maud::{Markup, html};
use pool_protocol::id::PoolName;
use pool_store::PoolView;

use super::words::{Tone, badge, count, span};

/// A pool in the overview.
#[derive(Debug)]
pub(super) struct Summary {
    pub(super) pool: PoolName,
    /// `None`: the pool has neither agents nor runs.
    pub(super) counts: Option<PoolView>,
    /// Whether the pool is in the file of the pools.
    pub(super) is_in_file: bool,
}

impl Summary {
    pub(super) fn of(&self, count: impl Fn(&PoolView) -> u32) -> u32 {
        self.counts.as_ref().map_or(0, count)
    }

    pub(super) fn waiting(&self) -> u32 {
        self.of(|view| view.unconfirmed + view.available)
    }

    pub(super) fn running(&self) -> u32 {
        self.of(|view| view.leased + view.running + view.orphaned)
    }

    pub(super) fn oldest(&self) -> Option<String> {
        let oldest = self.counts.as_ref().and_then(|view| view.oldest);
        oldest.map(span)
    }

    /// Returns the problems of the pool, the worst first.
    pub(super) fn problems(&self) -> Vec<(Tone, String)> {
        let mut problems = Vec::new();
        let (online, free) = (self.of(|view| view.online), self.of(|view| view.free));
        if self.waiting() > 0 && online == 0 {
            problems.push((Tone::Bad, "Runs wait, and no agent is online".to_owned()));
        }
        if !self.is_in_file {
            let text = "Not in the file of the pools: its agents are refused";
            problems.push((Tone::Bad, text.to_owned()));
        }
        let silent = self.of(|view| view.orphaned);
        if silent > 0 {
            problems.push((Tone::Warning, format!("{} silent", count(silent, "run"))));
        }
        let unreported = self.of(|view| view.unreported);
        if unreported > 0 {
            let text = format!("{} to report to the platform", count(unreported, "outcome"));
            problems.push((Tone::Warning, text));
        }
        if self.waiting() > 0 && online > 0 && free == 0 {
            problems.push((Tone::Warning, "No agent has a free slot".to_owned()));
        }
        problems
    }
}

pub(super) fn render(pools: &[Summary]) -> Markup {
    let sum = |value: fn(&Summary) -> u32| pools.iter().map(value).sum::<u32>();
    html! {
        h1 { "Pools" }
        div #pools data-live {
            dl.tiles {
                (tile("Runs waiting", sum(Summary::waiting)))
                (tile("Runs active", sum(Summary::running)))
                (tile("Agents online", sum(|pool| pool.of(|view| view.online))))
                (tile("Free slots", sum(|pool| pool.of(|view| view.free))))
            }
            @if pools.is_empty() {
                p.empty { "The file of the pools has no pools." }
            } @else {
                (table(pools))
            }
        }
    }
}

/// Returns a number with its name.
pub(super) fn tile(name: &str, value: u32) -> Markup {
    html! { div { dt { (name) } dd { (value) } } }
}

fn table(pools: &[Summary]) -> Markup {
    html! {
        table {
            caption.hidden { "All pools" }
            thead {
                tr {
                    th scope="col" { "Pool" }
                    th scope="col" { "Condition" }
                    th.number scope="col" { "Waiting" }
                    th scope="col" { "Oldest waits" }
                    th.number scope="col" { "Active" }
                    th.number scope="col" { "Agents online" }
                    th.number scope="col" { "Free slots" }
                }
            }
            tbody {
                @for pool in pools {
                    tr {
                        th scope="row" { a href={ "/ui/pools/" (pool.pool) } { (pool.pool) } }
                        td data-label="Condition" { (condition(pool)) }
                        td.number data-label="Waiting" { (pool.waiting()) }
                        td data-label="Oldest waits" { (pool.oldest().as_deref().unwrap_or("–")) }
                        td.number data-label="Active" { (pool.running()) }
                        td.number data-label="Agents online" {
                            (pool.of(|view| view.online))
                            @let offline = pool.of(|view| view.offline);
                            @if offline > 0 { span.more { " + " (offline) " offline" } }
                        }
                        td.number data-label="Free slots" {
                            (pool.of(|view| view.free)) " of " (pool.of(|view| view.capacity))
                        }
                    }
                }
            }
        }
    }
}

/// Returns the problems of a pool, or its condition if there are none.
pub(super) fn condition(pool: &Summary) -> Markup {
    let problems = pool.problems();
    html! {
        @for (tone, text) in &problems { (badge(*tone, text)) " " }
        @if problems.is_empty() {
            @if pool.of(|view| view.online) > 0 { (badge(Tone::Good, "Ready")) }
            @else { (badge(Tone::Quiet, "No agent")) }
        }
    }
}
