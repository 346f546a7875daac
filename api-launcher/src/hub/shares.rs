//! Limits what is in progress at a time, in all and for each key, so that one key leaves room for the others.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

/// The shares of all keys.
#[derive(Debug)]
pub(super) struct Shares<K: Hash + Eq> {
    /// The limit of each key.
    each: usize,
    /// The limit of all.
    total: usize,
    counts: Mutex<HashMap<K, usize>>,
}

/// One of the shares, until it is dropped.
#[derive(Debug)]
pub(super) struct Share<K: Hash + Eq> {
    key: K,
    shares: Arc<Shares<K>>,
}

impl<K: Hash + Eq + Clone> Shares<K> {
    pub(super) fn new(each: usize, total: usize) -> Arc<Self> {
        Arc::new(Self {
            each,
            total,
            counts: Mutex::default(),
        })
    }

    /// Takes a share, if there is one for this key.
    pub(super) fn take(self: &Arc<Self>, key: &K) -> Option<Share<K>> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let taken: usize = counts.values().sum();
        let of_key = counts.get(key).copied().unwrap_or_default();
        if taken >= self.total || of_key >= self.each {
            return None;
        }
        counts.insert(key.clone(), of_key + 1);
        Some(Share {
            key: key.clone(),
            shares: Arc::clone(self),
        })
    }

    /// Returns how many are taken.
    pub(super) fn taken(&self) -> usize {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.values().sum()
    }
}

impl<K: Hash + Eq> Drop for Share<K> {
    fn drop(&mut self) {
        let mut counts = self.shares.counts.lock();
        let counts = counts
            .as_mut()
            .unwrap_or_else(|poisoned| poisoned.get_mut());
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_key_leaves_room_for_the_others() {
        let shares = Shares::new(2, 3);
        let first = shares.take(&"a").unwrap();
        let _second = shares.take(&"a").unwrap();
        assert!(shares.take(&"a").is_none(), "the limit of a key");
        let _other = shares.take(&"b").unwrap();
        assert!(shares.take(&"c").is_none(), "the limit of all");
        drop(first);
        assert_eq!(shares.taken(), 2);
        assert!(shares.take(&"a").is_some());
        assert_eq!(shares.taken(), 2);
    }
}
