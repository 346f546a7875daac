//! `api-launcher agent check`: whether the hub takes the agent, and whether runs would start here. Takes no task.

use cluster::check::CheckResult;
use job_contract::chain;
use pool_protocol::id::InstanceId;
use pool_protocol::instance::{InstanceHeartbeat, InstanceState};

use super::AgentError;
use super::client::HubClient;
use super::client::answer::Failure;
use super::config::{Settings, TargetSettings};
use super::kubernetes;
use super::process::{OpenProcessError, ProcessTarget};

/// Makes all checks.
pub(super) async fn check(settings: Settings) -> Result<Vec<CheckResult>, AgentError> {
    let agent = &settings.agent;
    let hub = HubClient::new(&agent.service_url, agent.hub_is_here, settings.token);
    let mut results = vec![of_hub(&hub.map_err(AgentError::Client)?).await];
    match settings.target {
        TargetSettings::Process(process) => results.push(match ProcessTarget::open(process) {
            Ok(_) => CheckResult::ok("folder of runs", "is there"),
            Err(OpenProcessError::InUse { .. }) => {
                CheckResult::ok("folder of runs", "an agent is at work in it")
            }
            Err(error) => {
                let advice = "give the agent a folder that its user can write";
                CheckResult::failed("folder of runs", chain(&error), advice)
            }
        }),
        TargetSettings::Kubernetes(settings) => {
            match Box::pin(kubernetes::check(*settings)).await {
                Ok(found) => results.extend(found),
                Err(error) => {
                    let advice = "check KUBECONFIG, or the agent's service account";
                    results.push(CheckResult::failed("cluster", chain(&error), advice));
                }
            }
        }
    }
    Ok(results)
}

/// Sends a heartbeat of an agent that does not exist. A hub that says so has taken the token.
async fn of_hub(hub: &HubClient) -> CheckResult {
    let heartbeat = InstanceHeartbeat {
        state: InstanceState::Online,
        available_capacity: 0,
        leases: Vec::new(),
    };
    let failure = match hub.heartbeat(InstanceId::new(), &heartbeat).await {
        Ok(_) | Err(Failure::Unregistered) => {
            return CheckResult::ok("hub", "answers, and takes the token");
        }
        Err(failure) => failure,
    };
    let advice = match &failure {
        Failure::Unreachable(_) | Failure::Busy { .. } => {
            "check the address of the hub, and the proxies and network policies in between"
        }
        Failure::Unauthorized(_) | Failure::Forbidden(_) => {
            "add the token to the file of the pools, or give the agent the right one"
        }
        _ => "install an agent of the hub's release",
    };
    CheckResult::failed("hub", failure.to_string(), advice)
}
