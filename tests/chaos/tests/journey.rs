//! Short journeys in which each fault happens once.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "these are tests"
)]

use std::path::Path;

use test_chaos::journey::{Options, run_journey};
use test_chaos::schedule::Through;
use test_peers::postgres::PostgresServer;
use test_peers::skips::needed;

const SEED: u64 = 1;
const RUNS: u32 = 40;

// `in_chaos` in its name puts a test into the stage `cargo xtask ci chaos`.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn in_chaos_every_run_ends_once_nothing_is_lost_and_nothing_is_left() {
    if let Some(kubeconfig) = needed(test_cluster::kubeconfig()) {
        make(Through::Launcher, Some(&kubeconfig)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn in_chaos_through_a_hub_every_run_ends_once_nothing_is_lost_and_nothing_is_left() {
    // The journey uses the same server.
    if let Some(_postgres) = needed(PostgresServer::shared()) {
        make(Through::Hub, None).await;
    }
}

async fn make(through: Through, kubeconfig: Option<&Path>) {
    let program = Path::new(env!("CARGO_BIN_EXE_chaos"));
    let options = Options::new(through, SEED, RUNS, program);
    let runs = options.schedule();
    for fault in through.faults() {
        let happens = runs.iter().any(|run| run.fault == Some(*fault));
        assert!(happens, "{fault:?}");
    }
    for kind in through.kinds() {
        assert!(runs.iter().any(|run| run.kind == *kind), "{kind:?}");
    }
    let summary = run_journey(&options, kubeconfig, |line| println!("{line}"))
        .await
        .unwrap();
    assert!(
        summary.passed(),
        "{summary}\nto repeat it: cargo xtask chaos --through {through} --seed {SEED} --runs {RUNS}"
    );
}
