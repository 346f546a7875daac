//! When something was to be seen of a Job in the cluster: one watch of a namespace, the same for every side of a
//! comparison.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures_util::StreamExt as _;
use k8s_openapi::api::batch::v1::Job;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::mpsc::{self, UnboundedReceiver};

/// Nothing that works takes so long.
const PATIENCE: Duration = Duration::from_mins(2);

/// The Jobs of a namespace as soon as a look at them says yes.
pub(crate) struct Sight {
    seen: UnboundedReceiver<(String, Instant)>,
    known: HashMap<String, Instant>,
}

impl Sight {
    /// Watches from now on.
    pub(crate) async fn of(
        client: Client,
        namespace: &str,
        look: fn(&Job) -> bool,
    ) -> Result<Self> {
        let jobs = Api::<Job>::namespaced(client, namespace);
        let now = jobs.list_metadata(&ListParams::default().limit(1)).await?;
        let version = now.metadata.resource_version.unwrap_or_default();
        let params = WatchParams::default();
        let (sender, seen) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut version = version;
            loop {
                let Ok(events) = jobs.watch(&params, &version).await else {
                    return;
                };
                let mut events = events.boxed();
                while let Some(Ok(event)) = events.next().await {
                    let (WatchEvent::Added(job) | WatchEvent::Modified(job)) = event else {
                        continue;
                    };
                    version = job.resource_version().unwrap_or_default();
                    if look(&job) && sender.send((job.name_any(), Instant::now())).is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Self {
            seen,
            known: HashMap::new(),
        })
    }

    /// When the Job of this name was first seen so.
    pub(crate) async fn when(&mut self, name: &str) -> Result<Instant> {
        loop {
            if let Some(at) = self.known.get(name) {
                return Ok(*at);
            }
            let next = tokio::time::timeout(PATIENCE, self.seen.recv()).await;
            let Ok(next) = next else {
                bail!("nothing was seen of {name} in time");
            };
            let (name, at) = next.context("the watch has ended")?;
            self.known.entry(name).or_insert(at);
        }
    }
}
