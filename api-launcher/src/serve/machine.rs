//! Target `process`: a pool for this machine, and an agent in this process that takes its runs. The two know each other by the
//! wire of pools alone. So a run outlives this process as it outlives an agent, and the next process continues it.

pub(crate) mod settings;

use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use agent::{Agent, AgentError, AgentSettings, ProcessSettings, ProcessTarget, StopSignals};
use data_dir::{DataDir, attempt_lock};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http_service::Readiness;
use hub::Hub;
use job_contract::report::ReportKey;
use job_contract::{Document, Exit, JobData};
use pool_protocol::id::PoolName;
use processes::detached::kill_after;
use reporter::dispatch::{Acceptance, DispatchError, ResponseSent};
use tokio_util::sync::CancellationToken;
use url::Url;

use self::settings::MachineSettings;
use crate::dispatch::DispatchTarget;
use crate::failure::Failure;

/// The name of the agent. It is the same for each process, so that the next one finds the runs of this one.
const AGENT: &str = "this-machine";

/// The agent, once its hub has an address.
type SharedAgent = Arc<OnceLock<Arc<Agent>>>;

/// The agent of this machine, before its hub has an address.
#[derive(Debug)]
pub(crate) struct Machine {
    settings: MachineSettings,
    processes: ProcessTarget,
    agent: SharedAgent,
    /// Keeps a launcher of an earlier version away.
    _old_lock: Option<File>,
}

impl Machine {
    /// Takes the data directory.
    pub(crate) fn open(
        settings: MachineSettings,
        report_key: Option<ReportKey>,
    ) -> Result<Self, Failure> {
        let data = settings.data.clone().create()?;
        let old_lock = refuse_old_queue(&data)?;
        let processes = ProcessTarget::open(ProcessSettings {
            data,
            program: settings.program.clone(),
            forwarded: settings.forwarded.clone(),
            access: settings.access,
            report_key,
        });
        let processes = processes.map_err(|error| Failure::of(error.exit(), error))?;
        Ok(Self {
            settings,
            processes,
            agent: SharedAgent::default(),
            _old_lock: old_lock,
        })
    }

    /// The target that gives dispatches to the pool of this machine.
    pub(crate) fn target(&self, hub: &Arc<Hub>) -> PoolTarget {
        PoolTarget {
            hub: Arc::clone(hub),
            pool: self.settings.pool.token.pool().clone(),
            agent: Arc::clone(&self.agent),
        }
    }

    /// Takes and runs the tasks of the hub at this address until `stop`, and then stops as the settings say.
    pub(crate) async fn work(
        self,
        hub: SocketAddr,
        stop: CancellationToken,
    ) -> Result<(), AgentError> {
        let Self {
            settings,
            processes,
            agent: shared,
            _old_lock,
        } = self;
        let token = settings.pool.token.reveal().into();
        let agent = AgentSettings {
            service_url: Url::parse(&format!("http://{hub}")).expect("an address makes a URL"),
            hub_is_here: true,
            name: AGENT.parse().expect("a valid name"),
            slots: settings.slots,
            single_run: false,
            idle_timeout: None,
            on_stop: settings.on_stop,
            drain_timeout: Duration::ZERO,
            // The process ends earlier, unless it may take that long. Executors then go on.
            grace_timeout: kill_after(),
            disconnect_on_stop: true,
            listen: None,
        };
        let signals = StopSignals::ordered(settings.on_stop, stop);
        let agent = Agent::of_this_machine(agent, token, processes)?;
        let agent = shared.get_or_init(|| Arc::new(agent));
        agent.work(signals).await
    }
}

/// An earlier version kept its queue in files. Executors of its runs may still be at work, so the runs cannot be taken over.
fn refuse_old_queue(data: &DataDir) -> Result<Option<File>, Failure> {
    let path = data.launcher().join("queue");
    let shown = path.display();
    let unreadable = |error| {
        let text = format!("could not look for accepted runs of an earlier version in `{shown}`");
        Failure::new(Exit::Infrastructure, text).because(error)
    };
    let entries = match fs::read_dir(path.join("entries")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries.map_err(unreadable)?,
    };
    let Some(lock) = attempt_lock(&path.join("lock"))? else {
        let text = format!("a launcher of an earlier version uses `{shown}`");
        return Err(Failure::new(Exit::Infrastructure, text)
            .with_hint("stop it, or name another folder with --data-dir"));
    };
    for entry in entries {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|kind| kind == "run") {
            let text = format!("an earlier version has left accepted runs in `{shown}`");
            return Err(Failure::new(Exit::BadConfiguration, text).with_hint(
                "start that version until they have ended, or remove the folder to give them up; the platform then still waits \
                 for them",
            ));
        }
    }
    Ok(Some(lock))
}

/// Gives dispatches to the pool of this machine.
#[derive(Debug)]
pub(crate) struct PoolTarget {
    hub: Arc<Hub>,
    pool: PoolName,
    agent: SharedAgent,
}

impl DispatchTarget for PoolTarget {
    fn accept(
        &self,
        job: Document,
        _response_sent: ResponseSent,
    ) -> BoxFuture<'_, Result<Acceptance, DispatchError>> {
        async move {
            let (json, data) = (job.json().to_vec(), JobData::clone(&job));
            let submitted = self.hub.submit(self.pool.as_str(), json, data, None);
            submitted.await.map_err(DispatchError::from)
        }
        .boxed()
    }

    /// Dispatches are accepted by the hub, which has its own readiness. They do not run without the agent.
    fn readiness(&self) -> BoxFuture<'_, Readiness> {
        let problem = match self.agent.get() {
            Some(agent) => agent.problem(),
            None => Some("it has not started yet".to_owned()),
        };
        let impaired =
            |problem| Readiness::Impaired(format!("the agent of this machine: {problem}"));
        std::future::ready(problem.map_or(Readiness::Ready, impaired)).boxed()
    }

    fn name(&self) -> &'static str {
        "process"
    }
}
