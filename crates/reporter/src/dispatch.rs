//! What becomes of a dispatch, and when its response is on its way.
//!
//! Terrakube holds the job's row while the request is open (contract 2.5). Before the response, the launcher must not ask
//! the platform about the job.

use tokio::sync::oneshot;

/// How a dispatch was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    New,
    /// The same job and step came before.
    Duplicate,
}

/// Why a dispatch was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DispatchError {
    /// The platform may dispatch again.
    #[error("{0}")]
    Unavailable(String),
    /// The same dispatch would be rejected again.
    #[error("{0}")]
    Invalid(String),
}

/// Owned by the response. Dropping it says that the response is on its way.
#[derive(Debug)]
pub struct PendingResponse(
    #[expect(dead_code, reason = "dropping it is the signal")] oneshot::Sender<()>,
);

/// Owned by the target until the response is on its way.
#[derive(Debug)]
pub struct ResponseSent(oneshot::Receiver<()>);

/// Creates the two ends of the signal.
pub fn response_signal() -> (PendingResponse, ResponseSent) {
    let (sender, receiver) = oneshot::channel();
    (PendingResponse(sender), ResponseSent(receiver))
}

impl ResponseSent {
    /// Waits until the response is on its way.
    pub async fn wait(self) {
        // Nothing is ever sent: the sender is dropped with the response.
        let _ = self.0.await;
    }
}
