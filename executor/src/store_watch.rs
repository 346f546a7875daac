//! Reports in the run's log, once each, that the executor waits for the artifact store, and that the store works again.

use std::time::Duration;

use artifact_store::Store;
use run_log::LogWriter;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

/// Shorter failures are not reported.
const MIN_REPORTED_FAILURE: Duration = Duration::from_secs(3);

/// The watch of a run's store. It ends with [`Self::end`], or without its last line when it is dropped.
#[derive(Debug)]
pub(crate) struct StoreWatch {
    ending: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl StoreWatch {
    /// Watches the store. A folder needs no watch.
    pub(crate) fn start(store: &Store, log: LogWriter) -> Option<Self> {
        Some(Self::over(store.trouble()?, log))
    }

    fn over(trouble: watch::Receiver<Option<String>>, log: LogWriter) -> Self {
        let ending = CancellationToken::new();
        let announcing = announce(trouble, log, ending.clone());
        Self {
            ending,
            task: AbortOnDropHandle::new(tokio::spawn(announcing)),
        }
    }

    /// Ends the watch before its log does. A reported failure that is over by now is still reported as over.
    pub(crate) async fn end(self) {
        self.ending.cancel();
        if let Err(error) = self.task.await {
            warn!(%error, "the watch of the artifact store ended early");
        }
    }
}

async fn announce(
    mut trouble: watch::Receiver<Option<String>>,
    log: LogWriter,
    ending: CancellationToken,
) {
    // An error means that the store is closed.
    loop {
        tokio::select! {
            began = trouble.wait_for(Option::is_some) => if began.is_err() { return },
            () = ending.cancelled() => return,
        }
        tokio::select! {
            passed = trouble.wait_for(Option::is_none) => match passed {
                Ok(_) => continue,
                Err(_) => return,
            },
            () = tokio::time::sleep(MIN_REPORTED_FAILURE) => {}
            () = ending.cancelled() => return,
        }
        let Some(text) = trouble.borrow().clone() else {
            continue;
        };
        warn!(
            trouble = text,
            "the artifact store fails, requests are repeated"
        );
        let line = format!("The artifact store fails: {text}. The executor repeats its requests.");
        log.line(&line).await;
        tokio::select! {
            biased;
            over = trouble.wait_for(Option::is_none) => if over.is_err() { return },
            () = ending.cancelled() => return,
        }
        info!("the artifact store works again");
        log.line("The artifact store works again.").await;
    }
}

#[cfg(test)]
mod tests {
    use run_log::{LogConfig, Redactor, RunLog};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wait_for_the_store_and_its_end_are_reported_once_each() {
        let folder = tempfile::tempdir().unwrap();
        let log =
            RunLog::start(LogConfig::new(folder.path()), Redactor::default(), vec![]).unwrap();
        let (health, trouble) = watch::channel(None);
        let watch = StoreWatch::over(trouble, log.writer());
        let pause = || tokio::time::sleep(MIN_REPORTED_FAILURE / 2);
        // A short failure, then a long one with changing causes.
        for text in [
            Some("S3 answers 503"),
            None,
            Some("S3 answers 503"),
            Some("S3 cannot be reached"),
        ] {
            health.send_replace(text.map(str::to_owned));
            pause().await;
        }
        for _ in 0..5 {
            pause().await;
        }
        health.send_replace(None);
        // The run ends at once, before the watch had its turn.
        watch.end().await;
        tokio::time::resume();
        let summary = log.finish(Duration::from_mins(1)).await;
        assert_eq!(
            std::fs::read_to_string(summary.spool.path).unwrap(),
            "The artifact store fails: S3 cannot be reached. The executor repeats its requests.\n\
             The artifact store works again.\n"
        );
    }
}
