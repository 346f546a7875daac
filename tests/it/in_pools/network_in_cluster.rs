//! Runs of a closed network on target `kubernetes`: agent and pods reach the hub, the source, and the cluster's API server alone.

use super::network::{self, Target};

#[tokio::test(flavor = "multi_thread")]
async fn modules_of_the_platform_and_the_live_view_pass_the_hub() {
    network::modules_and_the_live_view_pass(Target::Kubernetes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_ask_the_platform_what_the_file_of_the_pools_lets_them() {
    network::scripts_ask_what_they_may(Target::Kubernetes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_of_a_closed_network_end_as_elsewhere() {
    network::runs_end_as_elsewhere(Target::Kubernetes).await;
}
