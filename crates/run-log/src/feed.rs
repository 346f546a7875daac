//! The queue of one sink: ranges of the spool, or text in memory while the spool cannot grow. It also keeps the result of
//! the sink. It knows neither files nor sinks.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How much text waits in memory for a sink if it cannot wait on disk.
const DIRECT_BYTES: usize = 512 * 1024;
/// How long the run waits for a sink that would lose lines because the disk is full. After that the sink counts as too slow.
/// It gets this time again when it has caught up.
const WAIT_LIMIT: Duration = Duration::from_secs(1);

/// The next work of a sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    /// These bytes of the spool.
    Spooled(Range<u64>),
    /// This text, from position `at` on.
    Direct { text: Arc<[u8]>, at: usize },
    /// So many lines were neither spooled nor accepted in time.
    Lost(u64),
}

/// Queue between the spool, which fills it, and a sink's thread.
#[derive(Debug, Default)]
pub(super) struct Feed {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Segment>,
    direct_bytes: usize,
    too_slow: bool,
    ended: bool,
    closed: bool,
    deadline: Option<Instant>,
    /// Ends the wait for a sink that has failed from the beginning.
    first_deadline: Option<Instant>,
    delivered: u64,
    last_error: Option<String>,
}

impl State {
    fn is_over(&self) -> bool {
        let passed = |deadline: Option<Instant>| deadline.is_some_and(|at| Instant::now() >= at);
        let never_worked = self.delivered == 0 && self.last_error.is_some();
        self.closed || passed(self.deadline) || never_worked && passed(self.first_deadline)
    }
}

impl Feed {
    fn state(&self) -> MutexGuard<'_, State> {
        // The state is consistent after each statement, so it can be used after a panic of another thread.
        runtime::lock(&self.state)
    }

    /// Adds a new range of the spool.
    pub(super) fn add_spooled(&self, range: Range<u64>) {
        let mut state = self.state();
        if state.closed {
            return;
        }
        match state.queue.back_mut() {
            Some(Segment::Spooled(last)) if last.end == range.start => last.end = range.end,
            _ => state.queue.push_back(Segment::Spooled(range)),
        }
        self.changed.notify_all();
    }

    /// Adds text that the spool could not store. It is lost if the sink is too slow.
    pub(super) fn add_direct(&self, text: &Arc<[u8]>, lines: u64) {
        let must_wait = |state: &State| {
            state.direct_bytes > 0 && state.direct_bytes + text.len() > DIRECT_BYTES
        };
        let mut state = self.state();
        if !state.too_slow && must_wait(&state) {
            state = self
                .changed
                .wait_timeout_while(state, WAIT_LIMIT, |state| {
                    must_wait(state) && !state.is_over()
                })
                .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        }
        if state.closed {
            return;
        }
        if must_wait(&state) {
            state.too_slow = true;
            match state.queue.back_mut() {
                Some(Segment::Lost(lost)) => *lost += lines,
                _ => state.queue.push_back(Segment::Lost(lines)),
            }
        } else {
            state.direct_bytes += text.len();
            state.queue.push_back(Segment::Direct {
                text: Arc::clone(text),
                at: 0,
            });
        }
        self.changed.notify_all();
    }

    /// Marks the end of the log.
    pub(super) fn end(&self) {
        self.state().ended = true;
        self.changed.notify_all();
    }

    /// Returns whether the log has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.state().ended
    }

    /// Waits for the end of the log, or of the sink.
    pub(super) fn wait_for_end(&self, limit: Duration) {
        let goes_on = |state: &mut State| !state.ended && !state.is_over();
        let waited = self
            .changed
            .wait_timeout_while(self.state(), limit, goes_on);
        // The state is consistent after each statement.
        drop(waited);
    }

    /// Sets the time after which undelivered lines are lost. Wakes a sink that pauses after an error.
    pub(super) fn set_deadline(&self, deadline: Instant) {
        self.state().deadline = Some(deadline);
        self.changed.notify_all();
    }

    /// Sets an earlier deadline for a sink that has never accepted a line.
    pub(super) fn set_first_deadline(&self, deadline: Instant) {
        self.state().first_deadline = Some(deadline);
    }

    /// Waits for the next work. `None` at the end of the log, after the deadline, and if the sink accepts nothing more.
    pub(super) fn next(&self) -> Option<Segment> {
        let mut state = self.state();
        loop {
            if state.is_over() {
                return None;
            }
            if let Some(segment) = state.queue.front() {
                return Some(segment.clone());
            }
            state.too_slow = false;
            if state.ended {
                return None;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for work or the end. Returns whether neither came within `limit`.
    pub(super) fn is_quiet_for(&self, limit: Duration) -> bool {
        let is_quiet =
            |state: &mut State| state.queue.is_empty() && !state.ended && !state.is_over();
        let waited = self
            .changed
            .wait_timeout_while(self.state(), limit, is_quiet);
        let (_state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        timeout.timed_out()
    }

    /// Removes the delivered part of the segment that [`Feed::next`] returned.
    pub(super) fn advance(&self, bytes: usize, lines: u64) {
        let mut state = self.state();
        state.delivered += lines;
        let done = match state.queue.front_mut() {
            Some(Segment::Spooled(range)) => {
                range.start += bytes as u64;
                range.start >= range.end
            }
            Some(Segment::Direct { text, at }) => {
                *at += bytes;
                *at >= text.len()
            }
            Some(Segment::Lost(_)) | None => false,
        };
        if done {
            if let Some(Segment::Direct { text, .. }) = state.queue.pop_front() {
                state.direct_bytes -= text.len();
            }
            self.changed.notify_all();
        }
    }

    /// Removes lost lines of which the sink has a notice. More lines may have been lost at the same place meanwhile.
    pub(super) fn pass_lost(&self, lines: u64) {
        let mut state = self.state();
        if let Some(Segment::Lost(lost)) = state.queue.front_mut() {
            *lost -= lines;
            if *lost == 0 {
                state.queue.pop_front();
            }
        }
    }

    /// Records why a delivery failed.
    pub(super) fn note_error(&self, error: &dyn std::error::Error) {
        self.state().last_error = Some(error.to_string());
    }

    /// Waits before another attempt; shorter if a deadline is set meanwhile. Returns whether another attempt may follow.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let state = self.state();
        let known = state.deadline;
        let pause = known.map_or(pause, |deadline| {
            pause.min(deadline.saturating_duration_since(Instant::now()))
        });
        let state = self
            .changed
            .wait_timeout_while(state, pause, |state| {
                state.deadline == known && !state.closed
            })
            .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        !state.is_over()
    }

    /// Whether the sink should stop where it is.
    pub(super) fn is_over(&self) -> bool {
        self.state().is_over()
    }

    /// Drops all work, because the sink accepts nothing more.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.queue.clear();
        state.direct_bytes = 0;
        self.changed.notify_all();
    }

    /// Lines delivered so far, and the last error.
    pub(super) fn outcome(&self) -> (u64, Option<String>) {
        let state = self.state();
        (state.delivered, state.last_error.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(length: usize) -> Arc<[u8]> {
        vec![b'\n'; length].into()
    }

    #[test]
    fn growth_of_the_spool_takes_no_memory_however_far_behind_the_sink_is() {
        let feed = Feed::default();
        for at in 0..1000 {
            feed.add_spooled(at..at + 1);
        }
        assert_eq!(feed.state().queue.len(), 1);
        assert_eq!(feed.next(), Some(Segment::Spooled(0..1000)));
        feed.advance(400, 1);
        assert_eq!(feed.next(), Some(Segment::Spooled(400..1000)));
    }

    #[test]
    fn a_slow_sink_on_a_full_disk_gets_a_note_in_place_of_lost_lines() {
        let feed = Feed::default();
        feed.add_direct(&text(DIRECT_BYTES), 7);
        feed.add_direct(&text(10), 10);
        feed.add_direct(&text(5), 5);
        feed.advance(DIRECT_BYTES, 7);
        feed.add_direct(&text(1), 1);
        assert_eq!(feed.next(), Some(Segment::Lost(15)));
        feed.pass_lost(15);
        assert_eq!(
            feed.next(),
            Some(Segment::Direct {
                text: text(1),
                at: 0
            })
        );
    }

    #[test]
    fn a_feed_is_quiet_until_text_or_its_end_comes() {
        let feed = Feed::default();
        let (moment, long) = (Duration::from_millis(1), Duration::from_hours(1));
        assert!(feed.is_quiet_for(moment));
        feed.add_spooled(0..10);
        assert!(!feed.is_quiet_for(long));
        feed.advance(10, 1);
        assert!(feed.is_quiet_for(moment));
        feed.end();
        assert!(!feed.is_quiet_for(long));
    }

    #[test]
    fn a_closed_feed_keeps_nothing() {
        let feed = Feed::default();
        feed.add_direct(&text(10), 1);
        feed.close();
        feed.add_direct(&text(10), 1);
        feed.add_spooled(0..10);
        assert_eq!(feed.next(), None);
        assert!(feed.state().queue.is_empty());
    }
}
