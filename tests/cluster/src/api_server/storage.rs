//! Objects, their one counter of versions, and the history that watches read.
//!
//! Knows nothing of kinds: what may be written is decided before.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tokio::sync::watch;

/// How many changes are remembered for watches without being asked to forget.
const HISTORY: usize = 100_000;

/// Group and plural under which objects of a kind are kept.
pub(crate) type Bucket = (&'static str, &'static str);

/// Where an object is kept.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) bucket: Bucket,
    pub(crate) namespace: String,
    pub(crate) name: String,
}

/// One write.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) key: Key,
    pub(crate) old: Option<Arc<Value>>,
    pub(crate) new: Option<Arc<Value>>,
}

#[derive(Debug)]
pub(crate) struct State {
    objects: BTreeMap<Key, Arc<Value>>,
    version: u64,
    compacted: u64,
    history: VecDeque<Change>,
}

/// All objects of a server.
#[derive(Debug)]
pub(crate) struct Store {
    state: Mutex<State>,
    head: watch::Sender<u64>,
}

impl Store {
    pub(crate) fn new() -> Self {
        let state = State {
            objects: BTreeMap::new(),
            version: 1,
            compacted: 0,
            history: VecDeque::new(),
        };
        Self {
            state: Mutex::new(state),
            head: watch::Sender::new(1),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` with nothing else reading or writing, then wakes the watches.
    pub(crate) fn transaction<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let result = work(&mut state);
        let version = state.version;
        drop(state);
        self.head
            .send_if_modified(|head| std::mem::replace(head, version) != version);
        result
    }

    pub(crate) fn version(&self) -> u64 {
        self.lock().version
    }

    /// Follows the newest version.
    pub(crate) fn follow(&self) -> watch::Receiver<u64> {
        self.head.subscribe()
    }

    /// Forgets the history, as etcd does from time to time: older versions are `410 Gone`.
    pub(crate) fn compact(&self) {
        let mut state = self.lock();
        state.compacted = state.version;
        state.history.clear();
    }

    /// The changes after `version`, and the version they lead to; nothing when they are forgotten.
    pub(crate) fn changes_after(
        &self,
        version: u64,
        bucket: Bucket,
    ) -> Result<(Vec<Change>, u64), u64> {
        let state = self.lock();
        if version < state.compacted {
            return Err(state.compacted);
        }
        let from = state
            .history
            .partition_point(|change| change.version <= version);
        let changes = state
            .history
            .range(from..)
            .filter(|change| change.key.bucket == bucket)
            .cloned()
            .collect();
        Ok((changes, state.version))
    }
}

impl State {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    /// The version the next write gets.
    fn next(&mut self, object: &mut Value) -> u64 {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.version
    }

    fn remember(&mut self, change: Change) {
        self.history.push_back(change);
        if self.history.len() > HISTORY
            && let Some(forgotten) = self.history.pop_front()
        {
            self.compacted = forgotten.version;
        }
    }

    pub(crate) fn put(&mut self, key: Key, mut object: Value) -> Arc<Value> {
        let version = self.next(&mut object);
        let new = Arc::new(object);
        let old = self.objects.insert(key.clone(), Arc::clone(&new));
        self.remember(Change {
            version,
            key,
            old,
            new: Some(Arc::clone(&new)),
        });
        new
    }

    /// Removes an object; `last` is its last form.
    pub(crate) fn remove(&mut self, key: &Key, mut last: Value) -> Arc<Value> {
        let version = self.next(&mut last);
        let last = Arc::new(last);
        if self.objects.remove(key).is_some() {
            self.remember(Change {
                version,
                key: key.clone(),
                old: Some(Arc::clone(&last)),
                new: None,
            });
        }
        last
    }

    /// Objects of a kind, in one namespace or (empty) all, ordered by name.
    pub(crate) fn range<'a>(
        &'a self,
        bucket: Bucket,
        namespace: &'a str,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Value>)> {
        let from = Key {
            bucket,
            namespace: namespace.to_owned(),
            name: String::new(),
        };
        self.objects
            .range((Bound::Included(from), Bound::Unbounded))
            .take_while(move |(key, _)| {
                key.bucket == bucket && (namespace.is_empty() || key.namespace == namespace)
            })
    }

    /// The objects as they were at `version`; nothing when that is forgotten.
    pub(crate) fn at(
        &self,
        version: u64,
        bucket: Bucket,
        namespace: &str,
    ) -> Result<BTreeMap<Key, Arc<Value>>, u64> {
        if version < self.compacted {
            return Err(self.compacted);
        }
        let mut objects: BTreeMap<Key, Arc<Value>> = self
            .range(bucket, namespace)
            .map(|(key, object)| (key.clone(), Arc::clone(object)))
            .collect();
        for change in self
            .history
            .iter()
            .rev()
            .take_while(|change| change.version > version)
        {
            if change.key.bucket != bucket
                || !(namespace.is_empty() || change.key.namespace == namespace)
            {
                continue;
            }
            match &change.old {
                Some(old) => objects.insert(change.key.clone(), Arc::clone(old)),
                None => objects.remove(&change.key),
            };
        }
        Ok(objects)
    }
}
