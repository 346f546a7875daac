//! Writes the reasons for which a run waits into its log.

use std::sync::Arc;
use std::time::Duration;

use cluster::RunRef;
use job_contract::chain;
use reporter::PlatformReporter;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::step_of;

/// How long the response to a dispatch takes at most once its Job exists.
const RESPONSE: Duration = Duration::from_secs(2);

/// Writes one reason after the other. Dropping it discards what is not written yet.
#[derive(Debug)]
pub(super) struct Notes {
    sender: UnboundedSender<String>,
    _writer: AbortOnDropHandle<()>,
}

impl Notes {
    pub(super) fn start(reporter: Arc<dyn PlatformReporter>, run: RunRef) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let writer = tokio::spawn(write(reporter, run, receiver));
        Self {
            sender,
            _writer: AbortOnDropHandle::new(writer),
        }
    }

    pub(super) fn add(&self, sentence: &str) {
        let _ = self.sender.send(sentence.to_owned());
    }
}

async fn write(
    reporter: Arc<dyn PlatformReporter>,
    run: RunRef,
    mut sentences: UnboundedReceiver<String>,
) {
    // The request that brought the run may still be open.
    tokio::time::sleep(RESPONSE).await;
    while let Some(sentence) = sentences.recv().await {
        let written = match reporter.find_step(step_of(&run)) {
            Ok(Some(step)) => reporter.add_log_line(&step, &sentence).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            warn!(%run, error = chain(&error), "the reason could not be written into the run's log");
        }
    }
}
