//! Whose runs are shown: those of a hub, or those of this machine.

use std::sync::Arc;

use pool_protocol::id::{InstanceId, PoolName, TaskId};
use pool_store::{Error, EventView, InstanceView, Page, TaskFilter, TaskView};

use super::overview::Summary;
use crate::hub::Hub;
use crate::hub::pools::Boundary;
use crate::hub::tails::Part;
use crate::local::dispatch_target::journal::Journal;

/// What the pages read.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Hub(Arc<Hub>),
    /// The runs of target `process`, as those of one pool with one agent.
    Machine(Arc<Journal>),
}

impl Source {
    /// All pools: those of the file, and those that the store still knows.
    pub(super) async fn pools(&self) -> Result<Vec<Summary>, Error> {
        let hub = match self {
            Self::Hub(hub) => hub,
            Self::Machine(journal) => {
                let counts = journal.counts();
                return Ok(vec![Summary {
                    pool: counts.pool.clone(),
                    counts: Some(counts),
                    is_in_file: true,
                }]);
            }
        };
        // Viewers cause no more reads than those without a token.
        let counted = hub.views.pools(&hub.store).await;
        let mut counted = counted
            .map_err(|problem| Error::Unavailable(problem.into()))?
            .to_vec();
        let pools = hub.pools.current();
        let mut summaries: Vec<Summary> = pools
            .names()
            .map(|name| {
                let at = counted.iter().position(|view| view.pool == *name);
                Summary {
                    pool: name.clone(),
                    counts: at.map(|at| counted.swap_remove(at)),
                    is_in_file: true,
                }
            })
            .collect();
        summaries.extend(counted.into_iter().map(|view| Summary {
            pool: view.pool.clone(),
            counts: Some(view),
            is_in_file: false,
        }));
        summaries.sort_by(|one, other| one.pool.cmp(&other.pool));
        Ok(summaries)
    }

    pub(super) async fn agents(
        &self,
        pool: &PoolName,
        page: Page<InstanceId>,
    ) -> Result<Vec<InstanceView>, Error> {
        match self {
            Self::Hub(hub) => hub.store.instances(Some(pool), page).await,
            Self::Machine(journal) => Ok(journal.agents(page)),
        }
    }

    pub(super) async fn runs(
        &self,
        pool: &PoolName,
        listed: TaskFilter,
        page: Page<TaskId>,
    ) -> Result<Vec<TaskView>, Error> {
        match self {
            Self::Hub(hub) => hub.store.tasks(Some(pool), listed, page).await,
            Self::Machine(journal) => Ok(journal.runs(listed, page)),
        }
    }

    pub(super) async fn run(&self, run: TaskId) -> Result<Option<TaskView>, Error> {
        match self {
            Self::Hub(hub) => hub.store.task(run).await,
            Self::Machine(journal) => Ok(journal.run(run)),
        }
    }

    /// How many runs wait in front of a run, if it waits.
    pub(super) async fn position(&self, run: TaskId) -> Result<Option<u32>, Error> {
        match self {
            Self::Hub(hub) => hub.store.position(run).await,
            Self::Machine(journal) => Ok(journal.position(run)),
        }
    }

    pub(super) async fn events(&self, run: TaskId) -> Result<Vec<EventView>, Error> {
        match self {
            Self::Hub(hub) => hub.store.events(run).await,
            Self::Machine(journal) => Ok(journal.events(run)),
        }
    }

    /// The log of a run from an offset, or all that is kept if the offset is not in it.
    pub(super) async fn log(&self, run: TaskId, from: u64) -> Option<Part> {
        match self {
            Self::Hub(hub) => hub.tails.since(run, from),
            Self::Machine(journal) => journal.log(run, from).await,
        }
    }

    /// How executors of a pool reach the platform, if the file of the pools has it.
    pub(super) fn boundary(&self, pool: &PoolName) -> Option<Boundary> {
        match self {
            Self::Hub(hub) => hub.pools.current().get(pool).map(|pool| pool.boundary),
            Self::Machine(_) => None,
        }
    }
}
