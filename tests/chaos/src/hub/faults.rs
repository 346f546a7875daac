//! Faults of the hub, agents and executors.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_peers::wait::within;
use tokio::sync::MutexGuard;

use super::{AGENTS, HubSide, file_of, orphans, step_of};
use crate::check::Line;
use crate::facts::marks;
use crate::faults::{ARRIVAL, END, REMOVAL, Target};
use crate::peers::{Gate, LINES, Locks, Peers, found, holds};
use crate::schedule::Fault;

/// How long an executor may take to end. One that is stopped stores its output first, and sends the rest of its log for up to a
/// minute.
const ENDED: Duration = Duration::from_mins(3);

/// An executor and its agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExecutorProcess {
    pid: i32,
    agent: usize,
}

impl ExecutorProcess {
    /// Kills it, and nothing that it started.
    pub(crate) fn kill(self) {
        self.signal(Signal::SIGKILL);
    }

    fn signal(self, signal: Signal) {
        // It may have ended.
        let _ = kill(Pid::from_raw(self.pid), signal);
    }

    /// Waits until it has ended. Returns whether it has.
    pub(crate) async fn until_ended(self) -> bool {
        let has_ended = || async {
            ensure!(!orphans::runs(self.pid)?, "it runs");
            Ok(())
        };
        holds(ENDED, "the end of the executor", has_ended).await
    }
}

impl HubSide {
    /// Prepares the faults that must be ready before the job exists. The guard prevents other faults of these programs.
    pub(crate) async fn before_dispatch<'a>(
        &self,
        locks: &'a Locks,
        fault: Fault,
    ) -> Option<MutexGuard<'a, ()>> {
        if fault != Fault::HubAtDispatch {
            return None;
        }
        let guard = locks.launchers.lock().await;
        self.kill_hub().await;
        Some(guard)
    }

    /// Lets the hub miss a dispatch. It may be that of an older job: the platform repeats the oldest one first.
    pub(crate) async fn inject_at_dispatch(&self) -> Result<bool> {
        let missed = || async { self.before_hub.missed() > 0 };
        let missed = holds(ARRIVAL, "a missed dispatch", missed).await;
        self.start_missing().await?;
        Ok(missed)
    }

    /// Injects a fault before the task is accepted. Returns whether it happened.
    pub(crate) async fn inject_before_claim(
        &self,
        peers: &Peers,
        fault: Fault,
        target: Target,
    ) -> Result<bool> {
        let Some(executor) = self.executor(peers, target.job).await else {
            return Ok(false);
        };
        let _lock = peers.locks.launchers.lock().await;
        match fault {
            Fault::HubEarly => self.kill_hub().await,
            Fault::AgentEarly | Fault::AgentAndExecutorEarly => {
                self.kill_agent(executor.agent).await;
            }
            _ => {}
        }
        let is_killed = matches!(fault, Fault::ExecutorEarly | Fault::AgentAndExecutorEarly);
        let ended = if is_killed {
            executor.kill();
            executor.until_ended().await
        } else {
            true
        };
        // The executor goes on before its hub or agent is there again.
        peers.release(target.run.number, Gate::Fetch);
        self.start_missing().await?;
        Ok(ended)
    }

    /// Injects a fault while the tool works. Returns whether it happened.
    pub(crate) async fn inject_at_work(
        &self,
        peers: &Peers,
        fault: Fault,
        target: Target,
    ) -> Result<bool> {
        let Some(executor) = self.executor(peers, target.job).await else {
            return Ok(false);
        };
        if fault == Fault::Terminated {
            executor.signal(Signal::SIGTERM);
            return Ok(executor.until_ended().await);
        }
        let _lock = peers.locks.launchers.lock().await;
        match fault {
            Fault::Hub => self.kill_hub().await,
            Fault::Agents => self.kill_agents().await,
            Fault::HubAndAgents => {
                self.kill_hub().await;
                self.kill_agents().await;
            }
            Fault::Agent | Fault::AgentAndExecutor => self.kill_agent(executor.agent).await,
            _ => {}
        }
        if fault.kills_the_tool() {
            executor.kill();
            self.start_missing().await?;
            // An agent ends the tool, which waits at its gate.
            return Ok(executor.until_ended().await && peers.until_over(target.job).await);
        }
        let worked = peers.finish_work(target).await;
        self.start_missing().await?;
        Ok(worked)
    }

    /// Waits until the lines before the gate are printed. An executor that will be killed must have sent them too: its hub
    /// stores what it has got.
    pub(crate) async fn until_printed(&self, peers: &Peers, target: Target) -> bool {
        let number = target.run.number;
        let mark = (number, Line::new(target.phase, LINES));
        let must_be_sent = target.run.fault.is_some_and(Fault::kills_the_tool);
        let is_printed = || async {
            let printed = self.log_of(peers, target.job)?.unwrap_or_default();
            let sent = !must_be_sent || peers.redis_lost_data(number) || {
                let sent = peers.streamed(target.job).await;
                marks(&sent).contains(&mark)
            };
            ensure!(sent, "they are not sent");
            ensure!(marks(&printed).contains(&mark), "{printed}");
            Ok(())
        };
        holds(END, "the lines before the gate", is_printed).await
    }

    /// The executor of a job, once it works.
    pub(crate) async fn executor(&self, peers: &Peers, job: u32) -> Option<ExecutorProcess> {
        let at_work = || async {
            match self.running(peers, job)? {
                None if !peers.platform.job(job).status.is_terminal() => bail!("none runs"),
                found => Ok(found),
            }
        };
        found(within(ARRIVAL, "the executor", at_work).await)?
    }

    /// Waits until the folder of a finished run is removed. Returns whether it is.
    pub(crate) async fn until_removed(&self, peers: &Peers, target: Target) -> bool {
        let is_removed = || async {
            match self.folder_of(peers, target.job)? {
                Some((_, folder)) => bail!("{} is left", folder.display()),
                None => Ok(()),
            }
        };
        holds(REMOVAL, "the removal of the folder", is_removed).await
    }

    /// The folder of the dispatched step of a job, and its agent.
    fn folder_of(&self, peers: &Peers, job: u32) -> Result<Option<(usize, PathBuf)>> {
        let Some(step) = peers.platform.job(job).dispatched else {
            return Ok(None);
        };
        let step = format!("{job}/{step}");
        for agent in 0..AGENTS {
            for run in self.runs_of(agent)? {
                if step_of(&run)?.as_ref() == Some(&step) {
                    return Ok(Some((agent, run)));
                }
            }
        }
        Ok(None)
    }

    fn log_of(&self, peers: &Peers, job: u32) -> Result<Option<String>> {
        let Some((_, run)) = self.folder_of(peers, job)? else {
            return Ok(None);
        };
        let log = file_of(&run, "log")?;
        Ok(log.map(|log| String::from_utf8_lossy(&log).into_owned()))
    }

    fn running(&self, peers: &Peers, job: u32) -> Result<Option<ExecutorProcess>> {
        let Some((agent, run)) = self.folder_of(peers, job)? else {
            return Ok(None);
        };
        let pid = file_of(&run, "pid")?.unwrap_or_default();
        // It is not written yet.
        let Ok(pid) = String::from_utf8_lossy(&pid).trim().parse() else {
            return Ok(None);
        };
        Ok(orphans::runs(pid)?.then_some(ExecutorProcess { pid, agent }))
    }
}
