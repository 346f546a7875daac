//! The runs and faults of a seed. This module is pure: the same seed has the same schedule.
//!
//! A fault depends on the progress of its run, not on the clock: the run stops at the point of its fault until the fault has
//! happened. The progress of other runs depends on the machine.

use std::fmt;

use crate::random::Random;

/// A kind of run.
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
    /// A request to the launcher without valid job data.
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

    /// Kinds that can have a fault. Frequent ones occur more than once.
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

    /// Its name in reports.
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

/// The point of a run at which its fault happens.
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

/// A fault of a run or of its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
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

impl Fault {
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

    /// Its name in reports.
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

    /// When it happens.
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

    /// Whether it kills the run's tool. An executor that is killed while it reports has no tool any more: the state is
    /// written, and the lock released.
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

    /// Whether unfinished runs may fail because the store is away.
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
    pub fault: Option<Fault>,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fault = self.fault.map_or("no fault", Fault::name);
        write!(
            f,
            "run {:>3}  {:<18}  {fault}",
            self.number,
            self.kind.name()
        )
    }
}

/// The runs of a seed, in the order they start.
///
/// Every fault and every kind comes once before any comes again, as far as there are runs enough.
pub fn schedule(seed: u64, runs: u32) -> Vec<Run> {
    let mut random = Random::new(seed);
    let mut all: Vec<(Kind, Option<Fault>)> = Vec::new();
    let wanted = usize::try_from(runs).unwrap_or(usize::MAX);
    while all.len() < wanted {
        let mut round: Vec<_> = Fault::ALL
            .iter()
            .map(|fault| (kind_for(*fault, &mut random), Some(*fault)))
            .collect();
        let has = |kind: &Kind, round: &[(Kind, Option<Fault>)]| {
            round.iter().any(|(other, _)| other == kind)
        };
        for kind in Kind::ALL {
            if !has(&kind, &round) {
                round.push((kind, None));
            }
        }
        // Some runs have no fault. They must not notice the faults of others.
        for _ in 0..round.len() / 8 {
            round.push((random.pick(&Kind::AT_WORK), None));
        }
        random.shuffle(&mut round);
        all.extend(round);
    }
    all.truncate(wanted);
    let numbered = (1..).zip(all);
    numbered
        .map(|(number, (kind, fault))| Run {
            number,
            kind,
            fault,
        })
        .collect()
}

fn kind_for(fault: Fault, random: &mut Random) -> Kind {
    match fault {
        // Their states show whether they ran twice.
        Fault::KilledAtReport | Fault::LateDuplicates => {
            random.pick(&[Kind::Apply, Kind::PlanApply])
        }
        _ => random.pick(&Kind::AT_WORK),
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
    fn every_fault_and_every_kind_occurs_before_any_occurs_twice() {
        for seed in 0..50 {
            // The longest possible round: every fault, every kind, and runs without a fault.
            let runs = schedule(seed, 45);
            let faults: BTreeSet<_> = runs.iter().filter_map(|run| run.fault).collect();
            let kinds: BTreeSet<_> = runs.iter().map(|run| run.kind).collect();
            assert_eq!(faults.len(), Fault::ALL.len(), "seed {seed}");
            assert_eq!(kinds.len(), Kind::ALL.len(), "seed {seed}");
        }
    }

    #[test]
    fn only_kinds_at_work_have_faults() {
        for run in schedule(5, 200) {
            let at_work = Kind::AT_WORK.contains(&run.kind);
            assert!(run.fault.is_none() || at_work, "{run}");
        }
    }

    #[test]
    fn names_are_names_of_one_thing() {
        let faults: BTreeSet<_> = Fault::ALL.iter().map(|fault| fault.name()).collect();
        let kinds: BTreeSet<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!((faults.len(), kinds.len()), (30, 10));
    }
}
