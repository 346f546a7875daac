//! Renders the timeline of a run from its events, with one bar for each state.

use std::time::{Duration, SystemTime};

use maud::{Markup, html};
use pool_store::EventView;
use pool_store::state::State;

use super::words::{Tone, span};

/// The width of the drawing, in its own units.
const WIDTH: u32 = 1000;
/// The smallest width of a bar, so that short states are visible.
const MIN_WIDTH: u32 = 6;

/// The time of a run in one state.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Period {
    state: State,
    /// The number of the lease.
    attempt: u32,
    actor: String,
    /// The time since the first event.
    from: Duration,
    length: Duration,
    /// Whether the run is still in this state.
    is_current: bool,
}

pub(super) fn render(events: &[EventView], now: SystemTime) -> Markup {
    let periods = periods(events, now);
    let total = periods
        .last()
        .map_or(Duration::ZERO, |period| period.from + period.length);
    let attempts = periods.last().map_or(0, |period| period.attempt);
    html! {
        table.timeline {
            caption.hidden { "How long the run was in each state" }
            thead.hidden {
                tr {
                    th scope="col" { "State" }
                    th scope="col" { "Time" }
                    th scope="col" { "Drawn" }
                }
            }
            tbody {
                @for period in &periods {
                    tr {
                        th scope="row" {
                            (label(period.state))
                            span.more {
                                @if attempts > 1 && period.attempt > 0 { " attempt " (period.attempt) }
                                @if is_of_agent(period.state) { " " (period.actor) }
                            }
                        }
                        td.number { (span(period.length)) @if period.is_current { " so far" } }
                        td.drawn { (bar(period, total)) }
                    }
                }
            }
            tfoot {
                tr {
                    th scope="row" { "In all" }
                    td.number { (span(total)) }
                    td.drawn {}
                }
            }
        }
    }
}

fn bar(period: &Period, total: Duration) -> Markup {
    let part = |time: Duration| {
        let part = time.as_millis() * u128::from(WIDTH) / total.as_millis().max(1);
        u32::try_from(part).unwrap_or(WIDTH).min(WIDTH)
    };
    let width = part(period.length).max(MIN_WIDTH);
    let x = part(period.from).min(WIDTH - width);
    html! {
        svg viewBox={ "0 0 " (WIDTH) " 10" } preserveAspectRatio="none" aria-hidden="true" focusable="false" {
            rect.track x="0" y="0" width=(WIDTH) height="10" {}
            rect class=(tone(period.state).class()) x=(x) y="0" width=(width) height="10" {}
        }
    }
}

fn periods(events: &[EventView], now: SystemTime) -> Vec<Period> {
    let Some(first) = events.first() else {
        return Vec::new();
    };
    // The clock of the machine may have been set back.
    let since = |time: SystemTime| time.duration_since(first.at).unwrap_or_default();
    let mut periods: Vec<Period> = Vec::new();
    let mut attempt = 0;
    for event in events {
        let Some(state) = State::of_name(event.to) else {
            continue;
        };
        let at = since(event.at);
        if let Some(last) = periods.last_mut().filter(|period| period.is_current) {
            last.length = at.saturating_sub(last.from);
            if last.state == state && state != State::Leased {
                continue;
            }
            last.is_current = false;
        }
        if state == State::Leased {
            attempt += 1;
        }
        if !state.is_over() {
            periods.push(Period {
                state,
                attempt,
                actor: event.actor.clone(),
                from: at,
                length: Duration::ZERO,
                is_current: true,
            });
        }
    }
    if let Some(last) = periods.last_mut().filter(|period| period.is_current) {
        last.length = since(now).saturating_sub(last.from);
    }
    periods
}

/// Returns the name of a state for people.
pub(super) const fn label(state: State) -> &'static str {
    match state {
        State::Submitted => "Waits for the platform",
        State::Available => "Waits for an agent",
        State::Leased => "Agent prepares",
        State::Started => "Executor starts",
        State::Running => "Runs",
        State::Orphaned => "Silent",
        State::Completed => "Completed",
        State::Failed => "Failed",
        State::Cancelled => "Cancelled",
    }
}

const fn is_of_agent(state: State) -> bool {
    matches!(state, State::Leased | State::Started | State::Running)
}

const fn tone(state: State) -> Tone {
    match state {
        State::Submitted | State::Available | State::Cancelled => Tone::Quiet,
        State::Leased | State::Started | State::Running => Tone::Active,
        State::Completed => Tone::Good,
        State::Orphaned => Tone::Warning,
        State::Failed => Tone::Bad,
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    fn event(at: u64, to: State) -> EventView {
        EventView {
            at: UNIX_EPOCH + Duration::from_secs(at),
            from: None,
            to: to.name(),
            actor: "agent eu-1".to_owned(),
            note: String::new(),
        }
    }

    fn lengths(events: &[EventView], now: u64) -> Vec<(State, u32, u64, u64)> {
        periods(events, UNIX_EPOCH + Duration::from_secs(now))
            .iter()
            .map(|period| {
                let (from, length) = (period.from.as_secs(), period.length.as_secs());
                (period.state, period.attempt, from, length)
            })
            .collect()
    }

    #[test]
    fn each_state_lasts_until_the_next_one() {
        let events = [
            event(100, State::Submitted),
            event(102, State::Available),
            event(105, State::Leased),
            event(110, State::Available),
            event(120, State::Leased),
            event(121, State::Started),
            event(125, State::Running),
            event(185, State::Completed),
            event(186, State::Completed),
        ];
        let expected = [
            (State::Submitted, 0, 0, 2),
            (State::Available, 0, 2, 3),
            (State::Leased, 1, 5, 5),
            (State::Available, 1, 10, 10),
            (State::Leased, 2, 20, 1),
            (State::Started, 2, 21, 4),
            (State::Running, 2, 25, 60),
        ];
        assert_eq!(lengths(&events, 999), expected);
        // The current state lasts until now.
        assert_eq!(lengths(&events[..1], 130), [(State::Submitted, 0, 0, 30)]);
        assert_eq!(lengths(&[], 130), []);
    }

    #[test]
    fn a_clock_that_was_set_back_breaks_nothing() {
        let events = [event(100, State::Submitted), event(90, State::Available)];
        let expected = [(State::Submitted, 0, 0, 0), (State::Available, 0, 0, 0)];
        assert_eq!(lengths(&events, 50), expected);
        render(&events, UNIX_EPOCH);
    }

    #[test]
    fn bars_stay_within_the_drawing() {
        let events = [
            event(0, State::Submitted),
            event(10_000, State::Available),
            event(10_001, State::Failed),
        ];
        let markup = render(&events, UNIX_EPOCH).into_string();
        assert!(markup.contains(r#"x="994" y="0" width="6""#), "{markup}");
        assert!(!markup.contains("style="), "{markup}");
    }
}
