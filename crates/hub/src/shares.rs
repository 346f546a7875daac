//! Limits what is in progress at a time, in all and for each key, so that one key leaves room for the others: requests, or
//! bytes.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard};

/// The shares of all keys.
#[derive(Debug)]
pub(crate) struct Shares<K: Hash + Eq> {
    /// The limit of each key.
    each: usize,
    /// The limit of all.
    total: usize,
    /// What each key gets, also when others have taken all.
    reserve: usize,
    taken: Mutex<Taken<K>>,
}

#[derive(Debug)]
struct Taken<K> {
    all: usize,
    of_keys: HashMap<K, usize>,
}

/// A part of the shares, until it is dropped.
#[derive(Debug)]
pub(crate) struct Share<K: Hash + Eq> {
    key: K,
    amount: usize,
    shares: Arc<Shares<K>>,
}

impl<K: Hash + Eq + Clone> Shares<K> {
    pub(crate) fn new(each: usize, total: usize) -> Arc<Self> {
        Self::with_reserve(each, total, 0)
    }

    /// Shares of which each key gets a reserve, also when others have taken all.
    pub(crate) fn with_reserve(each: usize, total: usize, reserve: usize) -> Arc<Self> {
        Arc::new(Self {
            each,
            total,
            reserve,
            taken: Mutex::new(Taken {
                all: 0,
                of_keys: HashMap::new(),
            }),
        })
    }

    /// Takes one share, if there is one for this key.
    pub(crate) fn take(self: &Arc<Self>, key: &K) -> Option<Share<K>> {
        let mut share = self.open(key);
        share.grow(1).then_some(share)
    }

    /// Returns a share that is empty, and can grow.
    pub(crate) fn open(self: &Arc<Self>, key: &K) -> Share<K> {
        Share {
            key: key.clone(),
            amount: 0,
            shares: Arc::clone(self),
        }
    }

    pub(crate) fn taken(&self) -> usize {
        self.lock().all
    }
}

impl<K: Hash + Eq> Shares<K> {
    fn lock(&self) -> MutexGuard<'_, Taken<K>> {
        runtime::lock(&self.taken)
    }
}

impl<K: Hash + Eq + Clone> Share<K> {
    /// Takes more. Returns whether there was enough; if not, nothing changes.
    pub(crate) fn grow(&mut self, more: usize) -> bool {
        let mut taken = self.shares.lock();
        let of_key = taken.of_keys.get(&self.key).copied().unwrap_or_default();
        let fits =
            |taken: usize, limit: usize| taken.checked_add(more).is_some_and(|sum| sum <= limit);
        let has_room = fits(taken.all, self.shares.total) || fits(of_key, self.shares.reserve);
        if !fits(of_key, self.shares.each) || !has_room {
            return false;
        }
        taken.of_keys.insert(self.key.clone(), of_key + more);
        taken.all += more;
        self.amount += more;
        true
    }
}

impl<K: Hash + Eq> Drop for Share<K> {
    fn drop(&mut self) {
        let mut taken = self.shares.lock();
        taken.all -= self.amount;
        if let Some(of_key) = taken.of_keys.get_mut(&self.key) {
            *of_key -= self.amount;
            if *of_key == 0 {
                taken.of_keys.remove(&self.key);
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

    #[test]
    fn a_key_gets_its_reserve_when_others_have_taken_all() {
        let shares = Shares::with_reserve(2, 4, 1);
        let many = ["a", "a", "b", "b"].map(|key| shares.take(&key).unwrap());
        let late = shares.take(&"c").unwrap();
        assert!(shares.take(&"c").is_none(), "no more than the reserve");
        drop(many);
        assert!(shares.take(&"c").is_some(), "its share");
        drop(late);
        assert_eq!(shares.taken(), 0);
    }

    #[test]
    fn a_share_grows_up_to_the_limits_and_returns_all_of_it() {
        let shares = Shares::new(10, 15);
        let mut first = shares.open(&"a");
        assert!(first.grow(6) && !first.grow(5) && first.grow(4));
        let mut other = shares.open(&"b");
        assert!(!other.grow(6) && other.grow(5));
        assert!(!other.grow(usize::MAX), "no sum overflows");
        drop(first);
        assert_eq!(shares.taken(), 5);
        assert!(other.grow(5));
        drop(other);
        assert_eq!(shares.taken(), 0);
    }
}
