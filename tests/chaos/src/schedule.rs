//! What is run and what happens to it, from a seed: pure, so that a seed is all it takes to have it again.
//!
//! Strikes are bound to what a run is doing, not to the clock: a run that is to be struck in the middle of its work
//! stops there until it has been. What other runs do meanwhile is up to the machine.

use std::fmt;

use crate::dice::Dice;

/// What a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// One step, an apply.
    Apply,
    /// A plan, and its apply.
    PlanApply,
    /// A plan, a person's approval, and its apply.
    Approved,
    /// An apply, and then the job that destroys what it made.
    Destroy,
    /// One step of scripts.
    Scripts,
    /// A plan of a module that is wrong.
    FailingPlan,
    /// An apply one of whose resources fails.
    FailingApply,
    /// A setting that the launcher's rules refuse.
    BadSetting,
    /// A folder that is not there.
    BadFolder,
    /// A request that is no job data, at the launcher's door.
    BadData,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Apply,
        Self::PlanApply,
        Self::Approved,
        Self::Destroy,
        Self::Scripts,
        Self::FailingPlan,
        Self::FailingApply,
        Self::BadSetting,
        Self::BadFolder,
        Self::BadData,
    ];

    /// Those that do something that can be struck, the likelier ones more than once.
    const AT_WORK: [Self; 9] = [
        Self::Apply,
        Self::Apply,
        Self::Apply,
        Self::PlanApply,
        Self::PlanApply,
        Self::Approved,
        Self::Destroy,
        Self::Scripts,
        Self::FailingApply,
    ];

    /// As it is called in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Apply => "apply",
            Self::PlanApply => "plan-apply",
            Self::Approved => "plan-approve-apply",
            Self::Destroy => "apply-destroy",
            Self::Scripts => "scripts",
            Self::FailingPlan => "failing-plan",
            Self::FailingApply => "failing-apply",
            Self::BadSetting => "bad-setting",
            Self::BadFolder => "bad-folder",
            Self::BadData => "bad-data",
        }
    }
}

/// When a run is struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// While its dispatch becomes a Job.
    Dispatch,
    /// While its first executor fetches the source: nothing is claimed.
    Fetch,
    /// In the middle of what it does.
    Work,
    /// While its executor tries to report.
    Report,
    /// When it is over.
    After,
}

/// What happens to a run, or around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Strike {
    /// The API server answers the dispatch with 429, 500, 503 and lost connections.
    ApiAtDispatch,
    /// Both launchers are killed between Job and Secret.
    LaunchersAtDispatch,
    /// The dispatch comes many times at both launchers.
    DuplicatesAtDispatch,
    /// The pod is evicted.
    EvictedEarly,
    /// The pod's node is lost.
    NodeLostEarly,
    /// The pod is preempted, with its grace.
    PreemptedEarly,
    /// One launcher is killed.
    LauncherEarly,
    /// The kernel kills the container.
    OomKilled,
    /// The pod is evicted.
    Evicted,
    /// The pod's node is lost.
    NodeLost,
    /// The pod is deleted without grace.
    Deleted,
    /// The node is drained: the pod is deleted with its grace.
    Drained,
    /// One launcher is killed.
    Launcher,
    /// Both launchers are killed.
    Launchers,
    /// The dispatch comes again, at both launchers.
    Duplicates,
    /// Redis is killed, and comes back empty.
    RedisRestarted,
    /// Redis does not answer for a while.
    RedisFrozen,
    /// The platform answers 503.
    PlatformErrors,
    /// Answers of the platform are lost.
    PlatformCuts,
    /// The platform takes seconds.
    PlatformSlow,
    /// The platform is away until the work is done.
    PlatformAway,
    /// The object store takes no connection.
    StoreRefuses,
    /// The object store takes seconds.
    StoreSlow,
    /// The object store's answers break off.
    StoreCuts,
    /// The API server answers 429, 500 and 503.
    ApiErrors,
    /// Requests to the API server hang.
    ApiHangs,
    /// Watches break off, and what they followed is forgotten: `410 Gone`.
    WatchesCut,
    /// A person cancels.
    Cancel,
    /// The container is killed while the platform takes no report.
    KilledAtReport,
    /// The dispatch comes again when the run is over and its Job is gone.
    LateDuplicates,
}

impl Strike {
    /// All of them.
    pub const ALL: [Self; 30] = [
        Self::ApiAtDispatch,
        Self::LaunchersAtDispatch,
        Self::DuplicatesAtDispatch,
        Self::EvictedEarly,
        Self::NodeLostEarly,
        Self::PreemptedEarly,
        Self::LauncherEarly,
        Self::OomKilled,
        Self::Evicted,
        Self::NodeLost,
        Self::Deleted,
        Self::Drained,
        Self::Launcher,
        Self::Launchers,
        Self::Duplicates,
        Self::RedisRestarted,
        Self::RedisFrozen,
        Self::PlatformErrors,
        Self::PlatformCuts,
        Self::PlatformSlow,
        Self::PlatformAway,
        Self::StoreRefuses,
        Self::StoreSlow,
        Self::StoreCuts,
        Self::ApiErrors,
        Self::ApiHangs,
        Self::WatchesCut,
        Self::Cancel,
        Self::KilledAtReport,
        Self::LateDuplicates,
    ];

    /// As it is called in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ApiAtDispatch => "api-errors-at-dispatch",
            Self::LaunchersAtDispatch => "launchers-killed-at-dispatch",
            Self::DuplicatesAtDispatch => "duplicates-at-dispatch",
            Self::EvictedEarly => "evicted-before-claim",
            Self::NodeLostEarly => "node-lost-before-claim",
            Self::PreemptedEarly => "preempted-before-claim",
            Self::LauncherEarly => "launcher-killed-before-claim",
            Self::OomKilled => "oom-killed",
            Self::Evicted => "evicted",
            Self::NodeLost => "node-lost",
            Self::Deleted => "pod-deleted",
            Self::Drained => "drained",
            Self::Launcher => "launcher-killed",
            Self::Launchers => "launchers-killed",
            Self::Duplicates => "duplicates",
            Self::RedisRestarted => "redis-restarted",
            Self::RedisFrozen => "redis-frozen",
            Self::PlatformErrors => "platform-errors",
            Self::PlatformCuts => "platform-cuts",
            Self::PlatformSlow => "platform-slow",
            Self::PlatformAway => "platform-away",
            Self::StoreRefuses => "store-refuses",
            Self::StoreSlow => "store-slow",
            Self::StoreCuts => "store-cuts",
            Self::ApiErrors => "api-errors",
            Self::ApiHangs => "api-hangs",
            Self::WatchesCut => "watches-cut",
            Self::Cancel => "cancelled",
            Self::KilledAtReport => "killed-at-report",
            Self::LateDuplicates => "late-duplicates",
        }
    }

    /// When it strikes.
    pub const fn moment(self) -> Moment {
        match self {
            Self::ApiAtDispatch | Self::LaunchersAtDispatch | Self::DuplicatesAtDispatch => {
                Moment::Dispatch
            }
            Self::EvictedEarly
            | Self::NodeLostEarly
            | Self::PreemptedEarly
            | Self::LauncherEarly => Moment::Fetch,
            Self::KilledAtReport => Moment::Report,
            Self::LateDuplicates => Moment::After,
            _ => Moment::Work,
        }
    }

    /// Whether the run's tool ends at once, whatever it was doing. One that is killed while it reports has no tool any
    /// more: its state is written, and its lock released.
    pub const fn kills_the_tool(self) -> bool {
        matches!(
            self,
            Self::OomKilled | Self::Evicted | Self::NodeLost | Self::Deleted
        )
    }

    /// Whether the run ends because of it.
    pub const fn ends(self) -> bool {
        self.kills_the_tool() || matches!(self, Self::Drained | Self::Cancel | Self::KilledAtReport)
    }

    /// Whether runs that are under way may fail for want of the store, theirs or others.
    pub const fn takes_the_store(self) -> bool {
        matches!(self, Self::StoreRefuses | Self::StoreSlow | Self::StoreCuts)
    }
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its place in the schedule, from 1.
    pub number: u32,
    /// What it is.
    pub kind: Kind,
    /// What happens to it.
    pub strike: Option<Strike>,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let strike = self.strike.map_or("in peace", Strike::name);
        write!(
            f,
            "run {:>3}  {:<18}  {strike}",
            self.number,
            self.kind.name()
        )
    }
}

/// The runs of a seed, in the order they start.
///
/// Every strike and every kind comes once before any comes again, as far as there are runs enough.
pub fn schedule(seed: u64, runs: u32) -> Vec<Run> {
    let mut dice = Dice::new(seed);
    let mut all: Vec<(Kind, Option<Strike>)> = Vec::new();
    let wanted = usize::try_from(runs).unwrap_or(usize::MAX);
    while all.len() < wanted {
        let mut round: Vec<_> = Strike::ALL
            .iter()
            .map(|strike| (kind_for(*strike, &mut dice), Some(*strike)))
            .collect();
        let met = |kind: &Kind, round: &[(Kind, Option<Strike>)]| {
            round.iter().any(|(other, _)| other == kind)
        };
        for kind in Kind::ALL {
            if !met(&kind, &round) {
                round.push((kind, None));
            }
        }
        // Some are left in peace, so that peace is seen to be kept beside trouble.
        for _ in 0..round.len() / 8 {
            round.push((dice.pick(&Kind::AT_WORK), None));
        }
        dice.shuffle(&mut round);
        all.extend(round);
    }
    all.truncate(wanted);
    let numbered = (1..).zip(all);
    numbered
        .map(|(number, (kind, strike))| Run {
            number,
            kind,
            strike,
        })
        .collect()
}

fn kind_for(strike: Strike, dice: &mut Dice) -> Kind {
    match strike {
        // What its state shows tells whether it was run again.
        Strike::KilledAtReport | Strike::LateDuplicates => {
            dice.pick(&[Kind::Apply, Kind::PlanApply])
        }
        _ => dice.pick(&Kind::AT_WORK),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_seed_is_all_it_takes_to_have_a_schedule_again() {
        assert_eq!(schedule(3, 100), schedule(3, 100));
        assert_ne!(schedule(3, 100), schedule(4, 100));
        assert_eq!(schedule(3, 100).len(), 100);
    }

    #[test]
    fn every_strike_and_every_kind_comes_once_before_any_comes_again() {
        for seed in 0..50 {
            // The longest round there can be: every strike, every kind, and those in peace.
            let runs = schedule(seed, 45);
            let strikes: BTreeSet<_> = runs.iter().filter_map(|run| run.strike).collect();
            let kinds: BTreeSet<_> = runs.iter().map(|run| run.kind).collect();
            assert_eq!(strikes.len(), Strike::ALL.len(), "seed {seed}");
            assert_eq!(kinds.len(), Kind::ALL.len(), "seed {seed}");
        }
    }

    #[test]
    fn only_what_does_something_is_struck() {
        for run in schedule(5, 200) {
            let at_work = Kind::AT_WORK.contains(&run.kind);
            assert!(run.strike.is_none() || at_work, "{run}");
        }
    }

    #[test]
    fn names_are_names_of_one_thing() {
        let strikes: BTreeSet<_> = Strike::ALL.iter().map(|strike| strike.name()).collect();
        let kinds: BTreeSet<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!((strikes.len(), kinds.len()), (30, 10));
    }
}
