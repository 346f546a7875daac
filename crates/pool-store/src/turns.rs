//! Turns at the database. SQLite has one connection, so transactions wait for each other. Those of one pool wait in one
//! line, and the lines get equal parts of the time: neither a thousand calls of a pool nor long ones delay calls of
//! another pool that needs less than its part by more than one transaction.
//!
//! This is start-time fair queueing: the next line is the one that has used the least time, and a line that comes back
//! begins where the others are.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pool_protocol::id::PoolName;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::Refusal;

/// The largest number of calls of a pool that wait. Each has a connection and memory of the hub.
pub(crate) const MAX_WAITING: usize = 1000;

/// Who waits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Line {
    /// The hub, for its own duties. It is never refused, and its time does not count, but every second turn is for others.
    Hub,
    Pool(PoolName),
    /// A call about a task whose pool is not known before the task is read: the store has forgotten the task, or has just opened.
    Unknown,
}

/// All turns.
#[derive(Debug)]
pub(crate) struct Turns(Mutex<State>);

#[derive(Debug)]
struct State {
    free: usize,
    /// Lines with waiting calls. Among those that have used the same time, the first one is next.
    lines: VecDeque<(Line, VecDeque<oneshot::Sender<Turn>>)>,
    /// The time that lines have used, if it is more than `begin`.
    used: HashMap<Line, Duration>,
    /// What the line of the last turn had used then. A line that has used less has not called meanwhile.
    begin: Duration,
    /// Whether the last turn was one of the hub.
    after_hub: bool,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn(Option<Taken>);

#[derive(Debug)]
struct Taken {
    turns: Arc<Turns>,
    line: Line,
    at: Instant,
}

impl Turns {
    /// Returns turns of which this many are taken at a time.
    pub(crate) fn new(at_once: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            free: at_once,
            lines: VecDeque::new(),
            used: HashMap::new(),
            begin: Duration::ZERO,
            after_hub: false,
        })))
    }

    /// Waits for a turn. Refuses a call of a pool for which too many wait already.
    pub(crate) async fn next(self: &Arc<Self>, line: &Line) -> Result<Turn, Refusal> {
        let receiver = {
            let mut state = self.lock();
            if state.free > 0 {
                state.free -= 1;
                state.begin = state.used(line);
                state.after_hub = *line == Line::Hub;
                return Ok(self.turn(line.clone()));
            }
            let (sender, receiver) = oneshot::channel();
            state.add(line, sender)?;
            receiver
        };
        // The sender is dropped only with the store.
        receiver.await.map_err(|_| Refusal::StoreBusy)
    }

    fn turn(self: &Arc<Self>, line: Line) -> Turn {
        Turn(Some(Taken {
            turns: Arc::clone(self),
            line,
            at: Instant::now(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        runtime::lock(&self.0)
    }

    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        let state = self.lock();
        state.lines.iter().map(|(_, calls)| calls.len()).sum()
    }
}

impl State {
    fn add(&mut self, line: &Line, call: oneshot::Sender<Turn>) -> Result<(), Refusal> {
        let Some((_, calls)) = self.lines.iter_mut().find(|(known, _)| known == line) else {
            self.lines.push_back((line.clone(), [call].into()));
            return Ok(());
        };
        if *line != Line::Hub && calls.len() >= MAX_WAITING {
            calls.retain(|call| !call.is_closed());
            if calls.len() >= MAX_WAITING {
                return Err(Refusal::StoreBusy);
            }
        }
        calls.push_back(call);
        Ok(())
    }

    /// Takes the next call. Its line goes to the end.
    fn pop(&mut self) -> Option<(Line, oneshot::Sender<Turn>)> {
        let order = |line: &Line| (self.after_hub && *line == Line::Hub, self.used(line));
        let order = self.lines.iter().map(|(line, _)| order(line)).enumerate();
        let (next, (_, begin)) = order.min_by_key(|(_, order)| *order)?;
        let (line, mut calls) = self.lines.remove(next)?;
        self.begin = begin;
        self.after_hub = line == Line::Hub;
        let call = calls.pop_front()?;
        if !calls.is_empty() {
            self.lines.push_back((line.clone(), calls));
        }
        Some((line, call))
    }

    fn used(&self, line: &Line) -> Duration {
        let used = self.used.get(line).copied().unwrap_or_default();
        used.max(self.begin)
    }

    fn add_time(&mut self, line: Line, time: Duration) {
        if line != Line::Hub {
            let used = self.used(&line) + time;
            self.used.insert(line, used);
        }
        let begin = self.begin;
        self.used.retain(|_, used| *used > begin);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(Taken { turns, line, at }) = self.0.take() else {
            return;
        };
        let mut state = turns.lock();
        state.add_time(line, at.elapsed());
        while let Some((line, call)) = state.pop() {
            match call.send(turns.turn(line)) {
                Ok(()) => return,
                // The call has left. Its turn must not end under the lock.
                Err(mut unused) => unused.0 = None,
            }
        }
        state.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn line(pool: &str) -> Line {
        Line::Pool(pool.parse().unwrap())
    }

    #[tokio::test]
    async fn a_call_of_another_pool_waits_for_one_transaction() {
        let turns = Turns::new(1);
        let (busy, calm) = (line("busy"), line("calm"));
        let turn = turns.next(&busy).await.unwrap();
        let mut many: Vec<_> = (0..500).map(|_| Box::pin(turns.next(&busy))).collect();
        for call in &mut many {
            assert!(call.now_or_never().is_none());
        }
        let mut other = Box::pin(turns.next(&calm));
        let mut hub = Box::pin(turns.next(&Line::Hub));
        assert!((&mut other).now_or_never().is_none());
        assert!((&mut hub).now_or_never().is_none());
        drop(turn);
        let first = (&mut other).now_or_never().unwrap().unwrap();
        assert!((&mut hub).now_or_never().is_none(), "one at a time");
        drop(first);
        drop(hub.now_or_never().unwrap().unwrap());
        assert!((&mut many[0]).now_or_never().unwrap().is_ok());
        assert!((&mut many[1]).now_or_never().unwrap().is_ok());
    }

    /// Drops a turn as if it had taken this much longer.
    fn end_after(mut turn: Turn, seconds: u64) {
        let taken = turn.0.as_mut().unwrap();
        taken.at = taken.at.checked_sub(Duration::from_secs(seconds)).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_pool_with_long_transactions_gets_no_more_time_than_another() {
        let turns = Turns::new(1);
        let (slow, fast) = (line("slow"), line("fast"));
        let turn = turns.next(&fast).await.unwrap();
        let mut slow: Vec<_> = (0..9).map(|_| Box::pin(turns.next(&slow))).collect();
        let mut fast: Vec<_> = (0..90).map(|_| Box::pin(turns.next(&fast))).collect();
        for call in slow.iter_mut().chain(&mut fast) {
            assert!(call.now_or_never().is_none());
        }
        end_after(turn, 1);
        let (mut slow, mut fast) = (slow.iter_mut().peekable(), fast.iter_mut().peekable());
        let mut order = String::new();
        while let (Some(one), Some(other)) = (slow.peek_mut(), fast.peek_mut()) {
            if let Some(turn) = one.now_or_never() {
                order.push('s');
                end_after(turn.unwrap(), 10);
                slow.next();
            } else {
                order.push('f');
                end_after(other.now_or_never().unwrap().unwrap(), 1);
                fast.next();
            }
        }
        let (first, rest) = order.split_at(1);
        assert_eq!(first, "s", "{order}");
        let between: Vec<usize> = rest.split('s').map(str::len).collect();
        assert!(
            between[..8].iter().all(|fast| (9..=11).contains(fast)),
            "{order}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn calls_of_the_hub_are_first_but_take_turns_with_the_others() {
        let turns = Turns::new(1);
        let eu = line("eu");
        end_after(turns.next(&eu).await.unwrap(), 10);
        let turn = turns.next(&eu).await.unwrap();
        let mut pool: Vec<_> = (0..3).map(|_| Box::pin(turns.next(&eu))).collect();
        let mut hub: Vec<_> = (0..4).map(|_| Box::pin(turns.next(&Line::Hub))).collect();
        for call in pool.iter_mut().chain(&mut hub) {
            assert!(call.now_or_never().is_none());
        }
        end_after(turn, 10);
        for (hub, pool) in hub.iter_mut().zip(&mut pool) {
            end_after(hub.now_or_never().unwrap().unwrap(), 1);
            end_after(pool.now_or_never().unwrap().unwrap(), 10);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_that_a_pool_had_alone_does_not_count_against_it() {
        let turns = Turns::new(1);
        let (early, late) = (line("early"), line("late"));
        for _ in 0..100 {
            end_after(turns.next(&early).await.unwrap(), 10);
        }
        let turn = turns.next(&early).await.unwrap();
        let mut late: Vec<_> = (0..9).map(|_| Box::pin(turns.next(&late))).collect();
        let mut early = Box::pin(turns.next(&early));
        for call in &mut late {
            assert!(call.now_or_never().is_none());
        }
        assert!((&mut early).now_or_never().is_none());
        end_after(turn, 10);
        end_after((&mut late[0]).now_or_never().unwrap().unwrap(), 11);
        assert!(early.now_or_never().unwrap().is_ok());
    }

    #[tokio::test]
    async fn calls_that_have_left_neither_keep_a_turn_nor_a_place() {
        let turns = Turns::new(1);
        let (busy, calm) = (line("busy"), line("calm"));
        let turn = turns.next(&busy).await.unwrap();
        let mut calls: Vec<_> = (0..MAX_WAITING)
            .map(|_| Box::pin(turns.next(&busy)))
            .collect();
        for call in &mut calls {
            assert!(call.now_or_never().is_none());
        }
        let refused = turns.next(&busy).now_or_never().unwrap();
        assert_eq!(refused.unwrap_err(), Refusal::StoreBusy);
        let mut other = Box::pin(turns.next(&calm));
        assert!((&mut other).now_or_never().is_none(), "has its own line");
        drop(calls);
        let mut last = Box::pin(turns.next(&busy));
        assert!((&mut last).now_or_never().is_none(), "there is a place");
        drop(turn);
        // One of the two has the turn, and left with it unread.
        drop(last);
        assert!(other.now_or_never().unwrap().is_ok());
        assert_eq!(turns.waiting(), 0);
        assert!(turns.next(&busy).now_or_never().unwrap().is_ok());
    }
}
