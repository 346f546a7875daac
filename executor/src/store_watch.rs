//! Reports in the run's log, once each, that the executor waits for the artifact store, and that the store works again.

use std::time::Duration;

use artifact_store::Store;
use run_log::LogWriter;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

/// Shorter failures are not reported.
const MIN_REPORTED_FAILURE: Duration = Duration::from_secs(3);

/// Watches the store until the handle is dropped. A folder needs no watch.
pub(crate) fn start(store: &Store, log: LogWriter) -> Option<AbortOnDropHandle<()>> {
    let trouble = store.trouble()?;
    Some(AbortOnDropHandle::new(tokio::spawn(announce(trouble, log))))
}

async fn announce(mut trouble: watch::Receiver<Option<String>>, log: LogWriter) {
    while trouble.wait_for(Option::is_some).await.is_ok() {
        let passes = timeout(MIN_REPORTED_FAILURE, trouble.wait_for(Option::is_none)).await;
        match passes.map(|passes| passes.is_ok()) {
            Ok(true) => continue,
            // The store is closed.
            Ok(false) => return,
            Err(_) => {}
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
        if trouble.wait_for(Option::is_none).await.is_err() {
            return;
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
        let watching = tokio::spawn(announce(trouble, log.writer()));
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
        pause().await;
        drop(health);
        watching.await.unwrap();
        tokio::time::resume();
        let summary = log.finish(Duration::from_mins(1)).await;
        assert_eq!(
            std::fs::read_to_string(summary.spool.path).unwrap(),
            "The artifact store fails: S3 cannot be reached. The executor repeats its requests.\n\
             The artifact store works again.\n"
        );
    }
}
