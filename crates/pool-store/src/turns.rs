//! Turns at the database. SQLite has one connection, so transactions wait for each other. Those of one pool wait in one
//! line, and the lines take turns: a pool with a thousand calls delays a call of another pool by one transaction.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pool_protocol::id::PoolName;
use tokio::sync::oneshot;

use crate::error::Refusal;

/// The largest number of calls of a pool that wait. Each has a connection and memory of the hub.
pub(crate) const MAX_WAITING: usize = 1000;

/// Who waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// The hub, for its own duties. It is never refused.
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
    /// Lines with waiting calls. The first one is next.
    lines: VecDeque<(Line, VecDeque<oneshot::Sender<Turn>>)>,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn(Option<Arc<Turns>>);

impl Turns {
    /// Returns turns of which this many are taken at a time.
    pub(crate) fn new(at_once: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            free: at_once,
            lines: VecDeque::new(),
        })))
    }

    /// Waits for a turn. Refuses a call of a pool for which too many wait already.
    pub(crate) async fn next(self: &Arc<Self>, line: &Line) -> Result<Turn, Refusal> {
        let receiver = {
            let mut state = self.lock();
            if state.free > 0 {
                state.free -= 1;
                return Ok(Turn(Some(Arc::clone(self))));
            }
            let (sender, receiver) = oneshot::channel();
            state.add(line, sender)?;
            receiver
        };
        // The sender is dropped only with the store.
        receiver.await.map_err(|_| Refusal::StoreBusy)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn pop(&mut self) -> Option<oneshot::Sender<Turn>> {
        let (line, mut calls) = self.lines.pop_front()?;
        let call = calls.pop_front();
        if !calls.is_empty() {
            self.lines.push_back((line, calls));
        }
        call
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(turns) = self.0.take() else {
            return;
        };
        let mut state = turns.lock();
        while let Some(call) = state.pop() {
            match call.send(Self(Some(Arc::clone(&turns)))) {
                Ok(()) => return,
                // The call has left. Its turn must not end while the lock is held.
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
        let first = (&mut many[0]).now_or_never().unwrap().unwrap();
        assert!((&mut other).now_or_never().is_none(), "one at a time");
        drop(first);
        let second = other.now_or_never().unwrap().unwrap();
        drop(second);
        drop(hub.now_or_never().unwrap().unwrap());
        assert!((&mut many[1]).now_or_never().unwrap().is_ok());
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
