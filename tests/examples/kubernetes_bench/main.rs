//! What `cargo xtask bench` measures of the launcher beside an API server: samples go to standard output as JSON, and
//! are judged there. The API server, the launcher and this program are three processes, as they are in a cluster.
//!
//! Pools are measured without an API server, except for Jobs of agents.
//!
//! The API server has no controllers: this program does what they would, so that no measurement waits for them.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a measurement that cannot be taken ends the program, with all there is to know about it"
)]

mod launcher;
mod launches;
mod pools;
mod runs;
mod server;
mod sight;
mod watching;

use anyhow::{Context as _, Result, bail};

const USAGE: &str = "usage: kubernetes_bench serve-api ETCD KUBE_APISERVER\n       \
    kubernetes_bench launches ETCD KUBE_APISERVER LAUNCHER RUNS\n       \
    kubernetes_bench watching ETCD KUBE_APISERVER LAUNCHER RUNS JOBS\n       \
    kubernetes_bench pools LAUNCHER RUNS\n       \
    kubernetes_bench artifacts LAUNCHER EXECUTOR RUNS\n       \
    kubernetes_bench pool-jobs ETCD KUBE_APISERVER LAUNCHER RUNS";

fn main() -> Result<()> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let samples = match args[..] {
        ["serve-api", etcd, api_server] => {
            return runtime.block_on(server::serve(etcd, api_server));
        }
        ["launches", etcd, api_server, launcher, runs] => {
            let (server, runs) = ([etcd, api_server], runs.parse().context(USAGE)?);
            runtime.block_on(launches::measure(server, launcher, runs))
        }
        ["watching", etcd, api_server, launcher, runs, jobs] => {
            let (runs, jobs) = (runs.parse().context(USAGE)?, jobs.parse().context(USAGE)?);
            runtime.block_on(watching::measure([etcd, api_server], launcher, runs, jobs))
        }
        ["pools", launcher, runs] => {
            runtime.block_on(pools::measure(launcher, runs.parse().context(USAGE)?))
        }
        ["artifacts", launcher, executor, runs] => {
            let runs = runs.parse().context(USAGE)?;
            runtime.block_on(pools::artifacts::measure(launcher, executor, runs))
        }
        ["pool-jobs", etcd, api_server, launcher, runs] => {
            let (server, runs) = ([etcd, api_server], runs.parse().context(USAGE)?);
            runtime.block_on(pools::jobs(server, launcher, runs))
        }
        _ => bail!(USAGE),
    }?;
    println!("{samples}");
    Ok(())
}
