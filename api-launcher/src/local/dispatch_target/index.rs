//! What is known of every run, in memory: which pairs were accepted, which wait, and how many run.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::sync::watch;

use super::queue::{Found, RunKey, Stamp};
use crate::metrics::Load;

/// How far a pair has come.
#[derive(Debug)]
enum Known {
    /// Its document is being written; the channel closes when that has ended.
    Accepting(watch::Receiver<()>),
    Accepted,
}

/// Answer to the question who writes a pair's document.
#[derive(Debug)]
pub(super) enum Turn {
    /// The asker. Dropping the sender wakes whoever waits.
    Write(Stamp, watch::Sender<()>),
    /// Somebody else, right now.
    Wait(watch::Receiver<()>),
    /// It is there.
    Done,
}

#[derive(Debug, Default)]
pub(super) struct Index {
    known: HashMap<RunKey, Known>,
    waiting: BTreeMap<Stamp, RunKey>,
    running: usize,
    last: Stamp,
}

impl Index {
    /// The index of what a former launcher has left. Its runs are not admitted yet.
    pub(super) fn of(found: &Found) -> Self {
        let mut index = Self::default();
        let keys = found.waiting.iter().map(|(_, key)| key);
        for key in keys.chain(&found.finished) {
            index.known.insert(key.clone(), Known::Accepted);
        }
        index.last = found.waiting.last().map_or(0, |(at, _)| *at);
        index
    }

    /// Decides who accepts a pair. Stamps increase whatever the clock does.
    pub(super) fn turn(&mut self, key: &RunKey, now: Stamp) -> Turn {
        match self.known.get(key) {
            Some(Known::Accepting(end)) => Turn::Wait(end.clone()),
            Some(Known::Accepted) => Turn::Done,
            None => {
                let (begin, end) = watch::channel(());
                self.known.insert(key.clone(), Known::Accepting(end));
                self.last = now.max(self.last + 1);
                Turn::Write(self.last, begin)
            }
        }
    }

    /// The document is on disk.
    pub(super) fn accepted(&mut self, key: &RunKey) {
        self.known.insert(key.clone(), Known::Accepted);
    }

    /// The document could not be written, or nobody needs to remember the pair any more.
    pub(super) fn forget(&mut self, key: &RunKey) {
        self.known.remove(key);
    }

    /// The run may start when its turn comes. Two of one stamp, from a clock set back, keep their order.
    pub(super) fn admit(&mut self, mut at: Stamp, key: RunKey) {
        while self.waiting.contains_key(&at) {
            at += 1;
        }
        self.waiting.insert(at, key);
    }

    /// The oldest waiting run, if there is a place for it.
    pub(super) fn start(&mut self, places: usize) -> Option<RunKey> {
        if self.running >= places {
            return None;
        }
        let (_, key) = self.waiting.pop_first()?;
        self.running += 1;
        Some(key)
    }

    /// A run has given its place back.
    pub(super) fn ended(&mut self) {
        self.running -= 1;
    }

    pub(super) fn load(&self, now: Stamp) -> Load {
        let oldest = self.waiting.keys().next().copied();
        Load {
            queued: self.waiting.len(),
            running: self.running,
            oldest: Duration::from_micros(oldest.map_or(0, |at| now.saturating_sub(at))),
        }
    }
}
