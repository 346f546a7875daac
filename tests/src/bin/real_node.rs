//! The node with a real kubelet, built where `cargo xtask test node` can find it.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    test_cluster::node::run(std::env::args_os()).await
}
