//! Tells a target when the response to a dispatch is on its way.
//!
//! Terrakube holds the job's row while the request is open (contract 2.5). Before the response, the launcher must not ask
//! the platform about the job.

use tokio::sync::oneshot;

/// Held by the response. Dropping it says that the response is on its way.
#[derive(Debug)]
pub(crate) struct PendingResponse(
    #[expect(dead_code, reason = "dropping it is the signal")] oneshot::Sender<()>,
);

/// Held by the target until the response is on its way.
#[derive(Debug)]
pub(crate) struct ResponseSent(oneshot::Receiver<()>);

/// Creates the two ends of the signal.
pub(crate) fn response_signal() -> (PendingResponse, ResponseSent) {
    let (sender, receiver) = oneshot::channel();
    (PendingResponse(sender), ResponseSent(receiver))
}

impl ResponseSent {
    /// Waits until the response is on its way.
    pub(crate) async fn wait(self) {
        // Nothing is ever sent: the sender is dropped with the response.
        let _ = self.0.await;
    }
}
