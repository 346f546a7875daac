//! Which suspended Jobs are released next: the oldest first, within the limit. Pure.

use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;

/// Without a limit, or into a queue of the cluster, the delivery that created a Job releases it. The watcher does so in its
/// place only after this time.
const SUBMITTERS_TURN: Duration = Duration::from_secs(2);
/// The same for a Job with nothing to run: until then, the launcher may report its step done instead.
const REPORTERS_TURN: Duration = Duration::from_secs(20);
/// A Job that could not be released or stopped is looked at again after this time.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// How far the release of one Job has come.
#[derive(Debug, Default)]
pub(super) struct ReleaseProgress {
    /// Its launcher reports its step done. See [`NOTHING_TO_RUN`](job_contract::annotations::NOTHING_TO_RUN).
    pub(super) has_nothing_to_run: bool,
    /// The Job is not in its queue of the cluster yet.
    pub(super) awaits_queue: bool,
    /// Before this time there is no further attempt.
    pub(super) not_before: Option<Instant>,
    /// The log says why the Job stays suspended.
    pub(super) is_logged: bool,
}

impl ReleaseProgress {
    /// When the watcher may release the Job. A `limit` of 0 is none.
    pub(super) fn due(&self, first_seen: Instant, limit: usize) -> Instant {
        let turn = if self.has_nothing_to_run {
            REPORTERS_TURN
        } else if limit == 0 || self.awaits_queue {
            SUBMITTERS_TURN
        } else {
            Duration::ZERO
        };
        let first = first_seen + turn;
        self.not_before.map_or(first, |due| due.max(first))
    }
}

/// A suspended Job that may be released. They are released in this order: creation, then name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    pub(super) created: Timestamp,
    pub(super) name: String,
}

/// Splits candidates, in order, into those to release now and those that wait for their turn. `in_flight` runs are released
/// and not over. A `limit` of 0 is none.
pub(super) fn split(
    mut candidates: Vec<Candidate>,
    in_flight: usize,
    limit: usize,
) -> (Vec<Candidate>, Vec<Candidate>) {
    candidates.sort();
    let slots = if limit == 0 {
        candidates.len()
    } else {
        limit.saturating_sub(in_flight).min(candidates.len())
    };
    let waiting = candidates.split_off(slots);
    (candidates, waiting)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, created: i64) -> Candidate {
        Candidate {
            created: Timestamp::from_second(created).unwrap(),
            name: name.to_owned(),
        }
    }

    fn released(candidates: Vec<Candidate>, in_flight: usize, limit: usize) -> Vec<String> {
        let (released, _) = split(candidates, in_flight, limit);
        released.into_iter().map(|one| one.name).collect()
    }

    #[test]
    fn the_oldest_go_first_and_the_name_breaks_ties() {
        let waiting = vec![
            candidate("c", 2),
            candidate("b", 1),
            candidate("a", 2),
            candidate("d", 3),
        ];
        assert_eq!(released(waiting, 1, 4), ["b", "a", "c"]);
    }

    #[test]
    fn a_full_limit_releases_none_and_no_limit_releases_all() {
        assert!(released(vec![candidate("a", 1)], 5, 3).is_empty());
        let two = vec![candidate("b", 2), candidate("a", 1)];
        assert_eq!(released(two, 900, 0), ["a", "b"]);
    }
}
