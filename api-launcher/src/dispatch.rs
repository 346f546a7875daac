//! What becomes of a dispatch: where it goes (`route`), and where it runs. A target holds it durably before it
//! says so, and holds it once however often it comes.

pub(crate) mod kubernetes;
pub(crate) mod process;
pub(crate) mod reporter;
pub(crate) mod route;

use job_contract::{Document, JobData, StepType};
use tokio::sync::oneshot;

use self::kubernetes::KubernetesTarget;
use self::process::ProcessTarget;
use crate::metrics::Load;

/// Where accepted steps run.
#[derive(Debug)]
pub(crate) enum Target {
    /// Jobs of a cluster.
    Kubernetes(Box<KubernetesTarget>),
    /// Executors on this machine.
    Process(ProcessTarget),
}

/// Tells, when it is dropped, that the answer to a dispatch is on its way.
#[derive(Debug)]
pub(crate) struct Answering(
    #[expect(dead_code, reason = "being dropped is what it is for")] oneshot::Sender<()>,
);

/// Whether a step is done by saying so: it has no scripts, and there is nothing else in it.
fn has_nothing_to_run(job: &JobData) -> bool {
    let idle = matches!(
        job.step_type(),
        Ok(StepType::Approval | StepType::CustomScripts)
    );
    idle && job.command_list.is_empty()
}

/// Whether the answer to a dispatch is on its way. Before that nothing may be asked of the platform about its job: it
/// holds the job's row while the request is open (contract 2.5).
#[derive(Debug)]
pub(crate) struct Answered(oneshot::Receiver<()>);

/// The two ends of an answer.
pub(crate) fn answer() -> (Answering, Answered) {
    let (sender, receiver) = oneshot::channel();
    (Answering(sender), Answered(receiver))
}

impl Answered {
    pub(crate) async fn wait(self) {
        // Nothing is ever sent; the sender goes with the answer.
        let _ = self.0.await;
    }
}

/// A dispatch that is safe with us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accepted {
    New,
    /// The same job and step came before.
    Duplicate,
}

/// A dispatch that is not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    /// It may come again.
    #[error("{0}")]
    Unavailable(String),
    /// It would be refused again.
    #[error("{0}")]
    Invalid(String),
}

/// Whether the target could accept a dispatch now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    /// It would be accepted, and something is amiss: its run would fail for this reason, or is watched with less care.
    Impaired(String),
    NotReady(String),
}

impl Target {
    /// Takes a valid job over, with its document as it came. What it returns holds even if the caller has
    /// gone away meanwhile. The platform hears of it once it is `answered`.
    pub(crate) async fn accept(
        &self,
        job: Document,
        answered: Answered,
    ) -> Result<Accepted, Refused> {
        match self {
            Self::Kubernetes(target) => target.accept(job, answered).await,
            Self::Process(target) => target.accept(job, answered).await,
        }
    }

    pub(crate) async fn readiness(&self) -> Readiness {
        match self {
            Self::Kubernetes(target) => target.readiness().await,
            Self::Process(target) => target.readiness().await,
        }
    }

    /// What waits and runs here. Of a cluster the replica that watches keeps count.
    pub(crate) fn load(&self) -> Option<Load> {
        match self {
            Self::Kubernetes(_) => None,
            Self::Process(target) => Some(target.load()),
        }
    }

    /// Does what the target has to do beside accepting, until the launcher stops.
    pub(crate) async fn work(&self) {
        match self {
            Self::Kubernetes(target) => target.work().await,
            Self::Process(target) => target.work().await,
        }
    }

    /// Does what answers have promised, once no more of them are given.
    pub(crate) async fn keep_promises(&self) {
        match self {
            Self::Kubernetes(target) => target.keep_promises().await,
            // Whatever it promises is in its queue.
            Self::Process(_) => {}
        }
    }

    /// The name in the configuration.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Kubernetes(_) => "kubernetes",
            Self::Process(_) => "process",
        }
    }
}
