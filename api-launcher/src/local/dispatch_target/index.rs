//! The runs in memory: which were accepted, which wait, and how many run.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::sync::watch;

use super::queue::{Found, RunKey, Stamp};
use crate::metrics::Load;

/// How far the delivery of a run has come.
#[derive(Debug)]
enum Known {
    /// Its document is being written; the channel closes when that has ended.
    Accepting(watch::Receiver<()>),
    Accepted,
}

/// Which delivery writes the document of a run.
#[derive(Debug)]
pub(super) enum Turn {
    /// This one. Dropping the sender wakes those that wait.
    Write(Stamp, watch::Sender<()>),
    /// Another one, right now.
    Wait(watch::Receiver<()>),
    /// The document exists.
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

    /// Decides which delivery writes the document. Stamps increase even if the clock does not.
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

    /// The document could not be written, or its run is old enough to forget.
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

    /// Takes the oldest waiting run, if a slot is free.
    pub(super) fn start(&mut self, slots: usize) -> Option<RunKey> {
        if self.running >= slots {
            return None;
        }
        let (_, key) = self.waiting.pop_first()?;
        self.running += 1;
        Some(key)
    }

    /// A run has freed its slot.
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
