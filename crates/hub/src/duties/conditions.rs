//! Asks the artifact store at the start of the hub which conditions it keeps. The hub works meanwhile, and also if the store does not
//! answer.

use std::sync::Arc;
use std::time::Duration;

use artifact_store::{KeptConditions, StoreError};
use job_contract::chain;
use tracing::{info, warn};

use crate::Hub;

const PAUSE: Duration = Duration::from_mins(1);

pub(super) async fn perform(hub: &Arc<Hub>) {
    let mut is_told = false;
    loop {
        let asked = tokio::select! {
            asked = hub.artifacts.ask_conditions() => asked,
            () = hub.shutdown.graceful.cancelled() => return,
        };
        match asked {
            None => return,
            Some(Ok(kept)) => {
                hub.metrics.keeps(&kept);
                return log(&kept);
            }
            Some(Err(error @ StoreError::Refused { .. })) => {
                // Each question may leave an object that it may not remove.
                warn!(
                    error = chain(&error),
                    hint = error.hint(),
                    "whether the artifact store keeps conditions is not known, and it is asked again when the hub starts"
                );
                return;
            }
            Some(Err(error)) if !is_told => {
                is_told = true;
                warn!(
                    error = chain(&error),
                    hint = error.hint(),
                    "whether the artifact store keeps conditions is not known, asking again"
                );
            }
            Some(Err(_)) => {}
        }
        if !hub.pause(PAUSE).await {
            return;
        }
    }
}

fn log(kept: &KeptConditions) {
    match kept.lacks() {
        None => info!("the artifact store keeps conditions"),
        Some(changes) => warn!(
            changes,
            "the artifact store does not keep conditions of these changes: a late one can undo a newer one"
        ),
    }
}
