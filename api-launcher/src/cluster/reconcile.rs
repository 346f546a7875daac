//! Which suspended Jobs are released next, oldest first within the limit. Pure.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

/// With no limit whoever submitted a Job releases it. Only after this long the watcher does it in its place.
pub(super) const SUBMITTERS_TURN: Duration = Duration::from_secs(2);
/// The same for a Job that is there only in case the launcher cannot report its step done, which that may be at until
/// then.
pub(super) const REPORTERS_TURN: Duration = Duration::from_secs(20);
/// A Job whose job data was missing is looked at again after this long.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// A suspended Job that was never released.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Held<'a> {
    /// The order of release: creation, then name.
    pub created: Timestamp,
    pub name: &'a str,
}

/// Names to release now, in order, when `in_flight` runs are released and not over. A limit of 0 is none.
pub fn next(mut held: Vec<Held<'_>>, in_flight: usize, limit: usize) -> Vec<&str> {
    held.sort();
    let slots = if limit == 0 {
        held.len()
    } else {
        limit.saturating_sub(in_flight)
    };
    held.into_iter().take(slots).map(|held| held.name).collect()
}

#[cfg(test)]
mod tests {
    use platform::heartbeat::EXPIRY;

    use super::*;
    use crate::cluster::lease::LeaseSettings;

    fn held(name: &str, created: i64) -> Held<'_> {
        Held {
            created: Timestamp::from_second(created).unwrap(),
            name,
        }
    }

    #[test]
    fn the_beat_of_a_dead_launcher_counts_until_another_watches() {
        let lease = LeaseSettings::new("runs", "mayfly-launcher", "next");
        let succession = lease.duration + lease.renew;
        assert!(succession < EXPIRY);
    }

    #[test]
    fn the_oldest_go_first_and_the_name_breaks_ties() {
        let waiting = vec![held("c", 2), held("b", 1), held("a", 2), held("d", 3)];
        assert_eq!(next(waiting, 1, 4), ["b", "a", "c"]);
    }

    #[test]
    fn a_full_house_releases_none_and_no_limit_releases_all() {
        assert!(next(vec![held("a", 1)], 5, 3).is_empty());
        assert_eq!(next(vec![held("b", 2), held("a", 1)], 900, 0), ["a", "b"]);
    }
}
