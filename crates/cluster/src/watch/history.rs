//! How many ended runs are kept, by outcome, beside the time to live that each Job has of its own. Pure.

use k8s_openapi::jiff::Timestamp;

/// How many ended Jobs stay; `None` leaves them to their time to live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryLimits {
    pub successful: Option<usize>,
    pub failed: Option<usize>,
}

impl HistoryLimits {
    /// Everything stays for its time to live.
    pub const NONE: Self = Self {
        successful: None,
        failed: None,
    };
}

impl Default for HistoryLimits {
    /// Ten of each: enough to look at, and a burst of runs leaves no heap.
    fn default() -> Self {
        Self {
            successful: Some(10),
            failed: Some(10),
        }
    }
}

/// An ended run, as far as the limits look at it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EndedRun {
    pub(super) name: String,
    pub(super) successful: bool,
    pub(super) finished: Timestamp,
}

/// Names of the runs that are too many: those that finished first.
pub(super) fn surplus(mut ended: Vec<EndedRun>, limits: HistoryLimits) -> Vec<String> {
    // Newest first; the name settles what the clock does not.
    ended.sort_by(|a, b| (b.finished, &b.name).cmp(&(a.finished, &a.name)));
    let mut kept = [0_usize; 2];
    let mut surplus = Vec::new();
    for run in ended {
        let limit = if run.successful {
            limits.successful
        } else {
            limits.failed
        };
        let kept = &mut kept[usize::from(run.successful)];
        *kept += 1;
        if limit.is_some_and(|limit| *kept > limit) {
            surplus.push(run.name);
        }
    }
    surplus
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, successful: bool, finished: i64) -> EndedRun {
        EndedRun {
            name: name.into(),
            successful,
            finished: Timestamp::from_second(finished).unwrap(),
        }
    }

    #[test]
    fn the_oldest_of_each_outcome_go_first() {
        let ended = vec![
            run("ok-old", true, 1),
            run("bad-old", false, 2),
            run("ok-new", true, 3),
            run("bad-new", false, 4),
            run("ok-mid", true, 2),
        ];
        let limits = HistoryLimits {
            successful: Some(1),
            failed: Some(2),
        };
        assert_eq!(surplus(ended, limits), ["ok-mid", "ok-old"]);
    }

    #[test]
    fn without_limits_everything_stays() {
        let ended = vec![run("a", true, 1), run("b", false, 1)];
        assert!(surplus(ended, HistoryLimits::NONE).is_empty());
    }

    #[test]
    fn zero_keeps_none() {
        let limits = HistoryLimits {
            successful: Some(0),
            failed: None,
        };
        let ended = vec![run("a", true, 1), run("b", false, 1)];
        assert_eq!(surplus(ended, limits), ["a"]);
    }
}
