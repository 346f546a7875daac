//! The runs and faults of a seed. This module is pure: the same seed has the same schedule.
//!
//! A fault depends on the progress of its run, not on the clock: the run stops at the point of its fault until the fault has
//! happened. The progress of other runs depends on the machine.

use std::fmt;

use crate::random::Random;

/// What takes the dispatches of a journey.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Through {
    /// Two launchers in front of a cluster.
    #[default]
    Launcher,
    /// A hub with agents, whose executors are processes.
    Hub,
}

impl fmt::Display for Through {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Launcher => "launcher",
            Self::Hub => "hub",
        })
    }
}

impl Through {
    /// The faults of its journeys.
    pub const fn faults(self) -> &'static [Fault] {
        match self {
            Self::Launcher => &Fault::OF_LAUNCHERS,
            Self::Hub => &Fault::OF_HUBS,
        }
    }

    /// The kinds that can have a fault.
    const fn with_faults(self) -> &'static [Kind] {
        match self {
            Self::Launcher => &Kind::WITH_FAULTS,
            Self::Hub => &Kind::OF_HUBS_WITH_FAULTS,
        }
    }

    /// The kinds of runs of its journeys.
    pub const fn kinds(self) -> &'static [Kind] {
        match self {
            Self::Launcher => &Kind::ALL,
            Self::Hub => &Kind::OF_HUBS,
        }
    }
}

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
    /// A plan of an invalid module.
    FailingPlan,
    /// An apply with a resource that fails.
    FailingApply,
    /// A setting that the launcher's rules refuse.
    BadSetting,
    /// A folder that does not exist.
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

    /// Without the setting that only launchers of a cluster refuse.
    const OF_HUBS: [Self; 9] = [
        Self::Apply,
        Self::PlanApply,
        Self::Approved,
        Self::Destroy,
        Self::Scripts,
        Self::FailingPlan,
        Self::FailingApply,
        Self::BadFolder,
        Self::BadData,
    ];

    /// Kinds that can have a fault. Frequent kinds are listed more than once.
    const WITH_FAULTS: [Self; 9] = [
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

    /// The same for journeys through a hub. Mostly scripts: they are cheap, and what the hub hands out may run once whatever
    /// it is.
    const OF_HUBS_WITH_FAULTS: [Self; 12] = [
        Self::Scripts,
        Self::Scripts,
        Self::Scripts,
        Self::Scripts,
        Self::Scripts,
        Self::Scripts,
        Self::Apply,
        Self::Apply,
        Self::PlanApply,
        Self::Approved,
        Self::Destroy,
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
pub enum InjectionPoint {
    /// While the launcher turns the dispatch into a Job.
    Dispatch,
    /// While the first executor fetches the source, before it claims the step.
    Fetch,
    /// While the tool or a script works.
    Work,
    /// While the executor reports.
    Report,
    /// After the end of the run.
    After,
}

/// A fault of a run or of its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The API server answers the dispatch with 429, 500, 503 and lost connections.
    ApiAtDispatch,
    /// Both launchers are killed after the Job and before the Secret is created.
    LaunchersAtDispatch,
    /// Both launchers get the dispatch many times.
    DuplicatesAtDispatch,
    /// The pod is evicted.
    EvictedEarly,
    /// The pod's node is lost.
    NodeLostEarly,
    /// The pod is preempted, with its grace period.
    PreemptedEarly,
    /// One launcher is killed.
    LauncherEarly,
    /// The kernel kills the container.
    OomKilled,
    /// The pod is evicted.
    Evicted,
    /// The pod's node is lost.
    NodeLost,
    /// The pod is deleted without a grace period.
    Deleted,
    /// The node is drained: the pod is deleted with its grace period.
    Drained,
    /// One launcher is killed.
    Launcher,
    /// Both launchers are killed.
    Launchers,
    /// Both launchers get the dispatch again.
    Duplicates,
    /// Redis is killed, and starts again without its data.
    RedisRestarted,
    /// Redis does not answer for a while.
    RedisFrozen,
    /// The platform answers 503.
    PlatformErrors,
    /// Answers of the platform are lost.
    PlatformCuts,
    /// The platform takes seconds to answer.
    PlatformSlow,
    /// The platform is unreachable until the work is done.
    PlatformAway,
    /// The object store refuses connections.
    StoreRefuses,
    /// The object store takes seconds to answer.
    StoreSlow,
    /// The object store's answers are cut off.
    StoreCuts,
    /// The API server answers 429, 500 and 503.
    ApiErrors,
    /// Requests to the API server hang.
    ApiHangs,
    /// Watches are cut off, and the API server answers `410 Gone` to new ones.
    WatchesCut,
    /// A person cancels the job.
    Cancel,
    /// The container is killed while the platform refuses its report.
    KilledAtReport,
    /// The dispatch comes again after the run has ended and its Job or folder was removed.
    LateDuplicates,
    /// The hub is down when the platform dispatches.
    HubAtDispatch,
    /// The hub is killed.
    HubEarly,
    /// The agent of the run is killed.
    AgentEarly,
    /// The executor is killed.
    ExecutorEarly,
    /// The agent of the run is killed, and then the executor.
    AgentAndExecutorEarly,
    /// The hub is killed.
    Hub,
    /// The agent of the run is killed.
    Agent,
    /// All agents are killed.
    Agents,
    /// The hub and all agents are killed.
    HubAndAgents,
    /// The executor is killed.
    Executor,
    /// The agent of the run is killed, and then the executor.
    AgentAndExecutor,
    /// The executor gets SIGTERM.
    Terminated,
    /// The hub is killed while the platform refuses a report.
    HubAtReport,
    /// The store gets a write of the state late: after the end of the run.
    StateLate,
    /// The store gets a request for the lock late: after the lock was released.
    LockLate,
    /// One of two hubs is frozen while it writes the state, and thawed after the other one has ended the run.
    HubFrozen,
    /// The agent of the run is cut off until the hub gives the run up, and then reaches it again.
    AgentCutOff,
}

impl Fault {
    /// Faults of journeys through launchers.
    const OF_LAUNCHERS: [Self; 30] = [
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

    /// Faults of journeys through a hub.
    const OF_HUBS: [Self; 31] = [
        Self::DuplicatesAtDispatch,
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
        Self::Cancel,
        Self::KilledAtReport,
        Self::LateDuplicates,
        Self::HubAtDispatch,
        Self::HubEarly,
        Self::AgentEarly,
        Self::ExecutorEarly,
        Self::AgentAndExecutorEarly,
        Self::Hub,
        Self::Agent,
        Self::Agents,
        Self::HubAndAgents,
        Self::Executor,
        Self::AgentAndExecutor,
        Self::Terminated,
        Self::HubAtReport,
        Self::StateLate,
        Self::LockLate,
        Self::HubFrozen,
        Self::AgentCutOff,
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
            Self::HubAtDispatch => "hub-down-at-dispatch",
            Self::HubEarly => "hub-killed-before-claim",
            Self::AgentEarly => "agent-killed-before-claim",
            Self::ExecutorEarly => "executor-killed-before-claim",
            Self::AgentAndExecutorEarly => "agent-and-executor-killed-before-claim",
            Self::Hub => "hub-killed",
            Self::Agent => "agent-killed",
            Self::Agents => "agents-killed",
            Self::HubAndAgents => "hub-and-agents-killed",
            Self::Executor => "executor-killed",
            Self::AgentAndExecutor => "agent-and-executor-killed",
            Self::Terminated => "terminated",
            Self::HubAtReport => "hub-killed-at-report",
            Self::StateLate => "state-written-late",
            Self::LockLate => "lock-taken-late",
            Self::HubFrozen => "hub-frozen",
            Self::AgentCutOff => "agent-cut-off",
        }
    }

    /// The point of the run at which the fault happens.
    pub const fn injection_point(self) -> InjectionPoint {
        match self {
            Self::ApiAtDispatch
            | Self::LaunchersAtDispatch
            | Self::DuplicatesAtDispatch
            | Self::HubAtDispatch => InjectionPoint::Dispatch,
            Self::EvictedEarly
            | Self::NodeLostEarly
            | Self::PreemptedEarly
            | Self::LauncherEarly
            | Self::HubEarly
            | Self::AgentEarly
            | Self::ExecutorEarly
            | Self::AgentAndExecutorEarly
            | Self::LockLate => InjectionPoint::Fetch,
            Self::KilledAtReport | Self::HubAtReport => InjectionPoint::Report,
            Self::LateDuplicates => InjectionPoint::After,
            _ => InjectionPoint::Work,
        }
    }

    /// Whether it kills the run's tool. If an executor is killed while it reports, its tool has ended: it has written the
    /// state and released the lock.
    pub const fn kills_the_tool(self) -> bool {
        matches!(
            self,
            Self::OomKilled
                | Self::Evicted
                | Self::NodeLost
                | Self::Deleted
                | Self::Executor
                | Self::AgentAndExecutor
        )
    }

    /// Whether the fault ends the run.
    pub const fn ends(self) -> bool {
        self.kills_the_tool()
            || matches!(
                self,
                Self::Drained
                    | Self::Cancel
                    | Self::KilledAtReport
                    | Self::ExecutorEarly
                    | Self::Terminated
                    | Self::AgentCutOff
            )
    }

    /// Whether the fault disturbs the store, so that unfinished runs may fail.
    pub const fn disturbs_store(self) -> bool {
        matches!(self, Self::StoreRefuses | Self::StoreSlow | Self::StoreCuts)
    }
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its position in the schedule, from 1.
    pub number: u32,
    /// Its kind.
    pub kind: Kind,
    /// Its fault.
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
/// Every fault and every kind occurs once before one occurs again, if there are enough runs.
pub fn schedule(through: Through, seed: u64, runs: u32) -> Vec<Run> {
    let mut random = Random::new(seed);
    let mut all: Vec<(Kind, Option<Fault>)> = Vec::new();
    let wanted = usize::try_from(runs).unwrap_or(usize::MAX);
    while all.len() < wanted {
        let mut round: Vec<_> = through
            .faults()
            .iter()
            .map(|fault| (kind_for(through, *fault, &mut random), Some(*fault)))
            .collect();
        let has = |kind: &Kind, round: &[(Kind, Option<Fault>)]| {
            round.iter().any(|(other, _)| other == kind)
        };
        for kind in through.kinds() {
            if !has(kind, &round) {
                round.push((*kind, None));
            }
        }
        // Some runs have no fault. They must not notice the faults of others.
        for _ in 0..round.len() / 8 {
            round.push((random.pick(through.with_faults()), None));
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

fn kind_for(through: Through, fault: Fault, random: &mut Random) -> Kind {
    match fault {
        // The state of these kinds shows whether they ran twice. The whole run is in the pool that is cut off.
        Fault::KilledAtReport | Fault::LateDuplicates | Fault::HubAtReport | Fault::AgentCutOff => {
            random.pick(&[Kind::Apply, Kind::PlanApply])
        }
        // These kinds write a state.
        Fault::StateLate | Fault::LockLate | Fault::HubFrozen => {
            random.pick(&[Kind::Apply, Kind::PlanApply, Kind::Destroy])
        }
        _ => random.pick(through.with_faults()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const BOTH: [Through; 2] = [Through::Launcher, Through::Hub];

    #[test]
    fn a_seed_is_all_it_takes_to_have_a_schedule_again() {
        for through in BOTH {
            let of_seed = |seed| schedule(through, seed, 100);
            assert_eq!(of_seed(3), of_seed(3));
            assert_ne!(of_seed(3), of_seed(4));
            assert_eq!(of_seed(3).len(), 100);
        }
    }

    #[test]
    fn every_fault_and_every_kind_occurs_before_any_occurs_twice() {
        for (through, seed) in BOTH
            .into_iter()
            .flat_map(|one| (0..50).map(move |seed| (one, seed)))
        {
            // The longest possible round: every fault, every kind, and runs without a fault.
            let longest = through.faults().len() * 3 / 2;
            let runs = schedule(through, seed, u32::try_from(longest).unwrap());
            let faults: BTreeSet<_> = runs.iter().filter_map(|run| run.fault).collect();
            let kinds: BTreeSet<_> = runs.iter().map(|run| run.kind).collect();
            assert_eq!(faults.len(), through.faults().len(), "seed {seed}");
            assert_eq!(kinds.len(), through.kinds().len(), "seed {seed}");
        }
    }

    #[test]
    fn only_kinds_at_work_have_faults() {
        for run in BOTH
            .into_iter()
            .flat_map(|through| schedule(through, 5, 200))
        {
            let at_work = Kind::WITH_FAULTS.contains(&run.kind);
            assert!(run.fault.is_none() || at_work, "{run}");
        }
    }

    #[test]
    fn names_are_names_of_one_thing() {
        let all: BTreeSet<_> = BOTH.iter().flat_map(|through| through.faults()).collect();
        let faults: BTreeSet<_> = all.iter().map(|fault| fault.name()).collect();
        let kinds: BTreeSet<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!((faults.len(), kinds.len()), (all.len(), 10));
    }
}
