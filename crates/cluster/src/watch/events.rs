//! When the events of a run are fetched. Pure.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use verdict::Observation;

use super::message::Now;
use crate::cache::Packed;

/// A run that waits as every run does has this long before its events are fetched.
const FIRST_FETCH: SignedDuration = SignedDuration::from_secs(5);
/// Events of a run that still waits are fetched again after this time, then after twice as long.
const NEXT_FETCH: Duration = Duration::from_secs(10);

/// The events of a run that were fetched last, and the state of the next fetch.
#[derive(Debug, Default)]
pub(super) struct RunEvents {
    known: Vec<Packed>,
    fetches: u32,
    /// A fetch is in progress. `true`: nothing is announced before it ends.
    in_progress: Option<bool>,
    /// The events after the end of the run were asked for.
    fetched_after_end: bool,
    next_fetch: Option<Instant>,
}

/// What an observation needs of events.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum EventsNeed {
    /// Nothing now. With a time: look again then.
    Nothing(Option<Timestamp>),
    /// A fetch in progress, before anything is announced.
    Pending,
    /// A fetch. `holds_back`: nothing is announced before it ends. With a pause: look again after it.
    Fetch {
        holds_back: bool,
        again_in: Option<Duration>,
    },
}

impl RunEvents {
    /// The events that were fetched last.
    pub(super) fn open(&self) -> Vec<Event> {
        self.known.iter().map(Packed::open).collect()
    }

    /// Says what an observation needs of events. A needed fetch counts as begun.
    pub(super) fn need(&mut self, observation: &Observation, now: Now) -> EventsNeed {
        if !verdict::wants_events(observation) {
            return EventsNeed::Nothing(None);
        }
        if let Observation::Waiting(wait) = observation
            && !wait.reason.is_news()
            && now.server.duration_since(wait.since) < FIRST_FETCH
        {
            // The same moment, however often the run is looked at until then.
            let at = wait.since.checked_add(FIRST_FETCH).unwrap_or(now.server);
            return EventsNeed::Nothing(Some(at));
        }
        let has_ended = matches!(observation, Observation::Ended(_));
        if let Some(holds_back) = self.in_progress {
            return if holds_back || has_ended {
                EventsNeed::Pending
            } else {
                EventsNeed::Nothing(None)
            };
        }
        let is_due = self.next_fetch.is_none_or(|due| due <= now.local);
        if (has_ended && self.fetched_after_end) || (!has_ended && !is_due) {
            return EventsNeed::Nothing(None);
        }
        let holds_back = has_ended || self.fetches == 0;
        let pause = NEXT_FETCH.saturating_mul(1 << self.fetches.min(5));
        self.in_progress = Some(holds_back);
        self.fetched_after_end = has_ended;
        self.fetches += 1;
        self.next_fetch = Some(now.local + pause);
        EventsNeed::Fetch {
            holds_back,
            again_in: (!has_ended).then_some(pause),
        }
    }

    /// Takes in the events of the fetch in progress.
    pub(super) fn finish(&mut self, events: &[Event]) {
        self.in_progress = None;
        self.known = events.iter().map(Packed::of).collect();
    }
}
