//! From a dispatch to its released Job, one by one and many at once, beside a bare client that makes the same objects
//! with the same requests. In turns: what slows the machine down for a while slows both sides of a pair.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use integration_tests::{Machine, job};
use job_contract::JobData;
use serde_json::{Value, json};
use test_platform::launcher::{Endpoint, Launcher};
use tokio::sync::Semaphore;

use crate::launcher::{self, Reports, post};
use crate::runs::{self, Bare};
use crate::server::{ApiServer, BARE, RUNS};
use crate::sight::Sight;

/// Launches of one burst.
const BURST: usize = 200;
/// Requests under way at once in a burst, on either side.
const AT_ONCE: usize = 16;

struct Bench {
    /// Lives as long as the bench.
    _launcher: Launcher,
    endpoint: Endpoint,
    bare: Bare,
    ours: Sight,
    theirs: Sight,
    step: JobData,
    /// Number of the next job.
    next: usize,
}

pub(crate) async fn measure(server: [&str; 2], program: &str, runs: usize) -> Result<Value> {
    let server = ApiServer::start(server).await?;
    let machine = Machine::new("");
    let client = server.client().await?;
    let launcher = launcher::start(program, &server, &machine, Reports::Nowhere);
    let mut bench = Bench {
        endpoint: launcher.endpoint.clone(),
        _launcher: launcher,
        bare: Bare::new(client.clone()),
        ours: Sight::of(client.clone(), RUNS, runs::is_released).await?,
        theirs: Sight::of(client, BARE, runs::is_released).await?,
        step: runs::step(),
        next: 1,
    };
    // Once unmeasured each, so that both sides find open connections and warm caches.
    let mut single = Vec::new();
    for run in 0..=runs {
        let bare = bench.bare_single().await?;
        let (ours, answered) = bench.single().await?;
        if run > 0 {
            single.push(json!({"ours": ours, "answered": answered, "bare": bare}));
        }
    }
    let mut bursts = Vec::new();
    for run in 0..=runs {
        let bare = bench.bare_burst().await?;
        let ours = bench.burst().await?;
        if run > 0 {
            bursts.push(json!({"ours": ours, "bare": bare}));
        }
    }
    Ok(
        json!({"server": server.name, "single": single, "bursts": bursts, "burst": BURST, "at_once": AT_ONCE}),
    )
}

impl Bench {
    fn jobs(&mut self, count: usize) -> Vec<JobData> {
        let numbers = self.next..self.next + count;
        self.next += count;
        numbers
            .map(|number| job::in_job(&self.step, &number.to_string()))
            .collect()
    }

    /// Seconds from a dispatch until its Job is seen released, and until the dispatch is answered.
    async fn single(&mut self) -> Result<(f64, f64)> {
        let job = self.jobs(1).remove(0);
        let name = runs::name(&job);
        let begun = Instant::now();
        post(&self.endpoint, &job).await?;
        let answered = begun.elapsed();
        let seen = self.ours.when(&name).await?;
        Ok((seconds(seen - begun), seconds(answered)))
    }

    async fn bare_single(&mut self) -> Result<f64> {
        let job = self.jobs(1).remove(0);
        let manifest = runs::manifest_in(BARE, &job)?;
        let begun = Instant::now();
        self.bare.launch(manifest).await?;
        let seen = self.theirs.when(&runs::name(&job)).await?;
        Ok(seconds(seen - begun))
    }

    /// Launches per second, from the first dispatch until the last Job is seen released.
    async fn burst(&mut self) -> Result<f64> {
        let jobs = self.jobs(BURST);
        let names: Vec<_> = jobs.iter().map(runs::name).collect();
        let begun = Instant::now();
        let endpoint = self.endpoint.clone();
        at_once(jobs, move |job| {
            let endpoint = endpoint.clone();
            async move { post(&endpoint, &job).await }
        })
        .await?;
        rate(begun, &names, &mut self.ours).await
    }

    async fn bare_burst(&mut self) -> Result<f64> {
        let jobs = self.jobs(BURST);
        let names: Vec<_> = jobs.iter().map(runs::name).collect();
        let manifests = jobs.iter().map(|job| runs::manifest_in(BARE, job));
        let manifests = manifests.collect::<Result<Vec<_>>>()?;
        let begun = Instant::now();
        let bare = self.bare.clone();
        at_once(manifests, move |manifest| {
            let bare = bare.clone();
            async move { bare.launch(manifest).await }
        })
        .await?;
        rate(begun, &names, &mut self.theirs).await
    }
}

/// Does all the work, [`AT_ONCE`] at a time.
pub(crate) async fn at_once<T, F>(items: Vec<T>, work: impl Fn(T) -> F) -> Result<()>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(AT_ONCE));
    let mut tasks = tokio::task::JoinSet::new();
    for item in items {
        let (slots, work) = (Arc::clone(&slots), work(item));
        tasks.spawn(async move {
            let _slot = slots.acquire_owned().await?;
            work.await
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

async fn rate(begun: Instant, names: &[String], sight: &mut Sight) -> Result<f64> {
    let mut last = begun;
    for name in names {
        last = last.max(sight.when(name).await?);
    }
    #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
    Ok(names.len() as f64 / seconds(last - begun))
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}
