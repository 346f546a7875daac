//! Faults of the hub, agents and executors.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_peers::wait::within;
use tokio::sync::MutexGuard;
use tokio::time::timeout;

use super::front::Write;
use super::{APART_AGENT, HubSide, LOST_AFTER, file_of, orphans, step_of};
use crate::check::Line;
use crate::facts::{lock_key, marks};
use crate::faults::{ARRIVAL, END, REMOVAL, Target, WORK};
use crate::peers::{Gate, LINES, Locks, Peers, found, holds};
use crate::schedule::Fault;

/// How long an executor may take to end. One that is stopped stores its output first, and sends the rest of its log for up to a
/// minute.
const ENDED: Duration = Duration::from_mins(3);
/// The longest time for which a hub is frozen. It may have locked rows of the database, for which the other one waits.
const FROZEN: Duration = Duration::from_secs(30);

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
        match fault {
            Fault::HubAtDispatch => {
                let guard = locks.launchers.lock().await;
                self.kill_hub().await;
                Some(guard)
            }
            // The agent has no other run.
            Fault::AgentCutOff => Some(locks.apart.lock().await),
            _ => None,
        }
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
        if fault == Fault::LockLate {
            return self.lock_late(peers, target).await;
        }
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
        match fault {
            Fault::Terminated => {
                executor.signal(Signal::SIGTERM);
                return Ok(executor.until_ended().await);
            }
            Fault::StateLate => return self.write_late(peers, target).await,
            Fault::HubFrozen => return self.freeze_hub(peers, target).await,
            Fault::AgentCutOff => return Ok(self.cut_off(peers, target, executor).await),
            _ => {}
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

    /// Lets the store get the first write of the state after the run has ended. Its sender repeats it meanwhile.
    async fn write_late(&self, peers: &Peers, target: Target) -> Result<bool> {
        let _lock = peers.locks.store.lock().await;
        let workspace = peers.platform.job(target.job).workspace;
        let kept = self.front.keep_back(Write::State, &workspace);
        peers.release(target.run.number, Gate::Work);
        let Ok(Ok(late)) = timeout(WORK, kept).await else {
            return Ok(false);
        };
        let over = peers.until_over(target.job).await;
        self.front.pass_on(&late).await?;
        Ok(over)
    }

    /// Lets the store get the first request for the lock after the lock was released.
    async fn lock_late(&self, peers: &Peers, target: Target) -> Result<bool> {
        let _lock = peers.locks.store.lock().await;
        let workspace = peers.platform.job(target.job).workspace;
        let key = lock_key(&peers.platform.organization(), &workspace);
        let before = self.front.removals(&workspace).len();
        let kept = self.front.keep_back(Write::Lock, &workspace);
        peers.release(target.run.number, Gate::Fetch);
        let Ok(Ok(late)) = timeout(ARRIVAL, kept).await else {
            return Ok(false);
        };
        let is_released = || async {
            let removals = self.front.removals(&workspace).len();
            ensure!(removals > before, "nobody has removed it");
            ensure!(peers.store.object(&key)?.is_none(), "it is there");
            Ok(())
        };
        let released = holds(ARRIVAL, "the release of the lock", is_released).await;
        self.front.pass_on(&late).await?;
        Ok(released)
    }

    /// Freezes one of two hubs while it writes the state, until the other one has ended the run. The store gets the write of the
    /// frozen hub then.
    async fn freeze_hub(&self, peers: &Peers, target: Target) -> Result<bool> {
        let _store = peers.locks.store.lock().await;
        let _lock = peers.locks.launchers.lock().await;
        let [frozen, other] = self.two_hubs().await?;
        self.before_hub.pass_on_to(&[frozen]);
        let workspace = peers.platform.job(target.job).workspace;
        let held = self.front.hold(Write::State, &workspace);
        peers.release(target.run.number, Gate::Work);
        let held = timeout(WORK, held).await;
        let happened = if let Ok(Ok(held)) = held {
            self.signal_hub(frozen, Signal::SIGSTOP).await;
            // As a load balancer does that has found a server dead.
            self.before_hub.pass_on_to(&[other]);
            self.before_hub.cut_open();
            let is_over = || async { peers.platform.job(target.job).status.is_terminal() };
            holds(FROZEN, "the end of the run at the other hub", is_over).await;
            held.release();
            self.signal_hub(frozen, Signal::SIGCONT).await;
            true
        } else {
            false
        };
        self.before_hub.pass_on_to(&[frozen, other]);
        Ok(happened)
    }

    /// The addresses of two hubs. Starts the second one, if it does not run.
    async fn two_hubs(&self) -> Result<[SocketAddr; 2]> {
        let mut programs = self.programs.lock().await;
        while programs.hubs.len() < 2 {
            self.start_hub(&mut programs).await?;
        }
        Ok([programs.hubs[0].1, programs.hubs[1].1])
    }

    async fn signal_hub(&self, address: SocketAddr, signal: Signal) {
        let programs = self.programs.lock().await;
        let mut hubs = programs.hubs.iter();
        if let Some((hub, _)) = hubs.find(|(_, other)| *other == address) {
            hub.signal(signal);
        }
    }

    /// Cuts the agent of the run and its executor off. The work ends meanwhile, and the hub gives the run up. Then both reach the
    /// hub again, and the executor saves what it has.
    async fn cut_off(&self, peers: &Peers, target: Target, executor: ExecutorProcess) -> bool {
        self.network_apart.cut();
        let worked = peers.finish_work(target).await;
        let is_over = || async { peers.platform.job(target.job).status.is_terminal() };
        // The limit starts again if no hub was there for a while.
        let given_up = holds(3 * LOST_AFTER, "the end of the lost run", is_over).await;
        self.network_apart.heal();
        executor.until_ended().await && worked && given_up
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
        for agent in 0..=APART_AGENT {
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
