//! The executor's container in a pod, and the resources that a container requests.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, EnvVar, PodSpec, ResourceRequirements, Volume};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::overrides::{Resources, Span};
use super::quantity::Amount;

/// The container that runs the step. The pod failure policy and overlays name it.
pub(super) const CONTAINER: &str = "executor";

/// The executor's container.
pub(super) fn executor(spec: &PodSpec) -> Option<&Container> {
    spec.containers.iter().find(|c| c.name == CONTAINER)
}

/// The executor's container, to change it.
pub(super) fn executor_mut(spec: &mut PodSpec) -> Option<&mut Container> {
    spec.containers.iter_mut().find(|c| c.name == CONTAINER)
}

/// The volume that the executor has at a path.
pub(super) fn volume_at<'s>(spec: &'s PodSpec, path: &str) -> Option<&'s Volume> {
    let executor = executor(spec)?;
    let mut mounts = executor.volume_mounts.iter().flatten();
    let mount = mounts.find(|mount| mount.mount_path.trim_end_matches('/') == path)?;
    let mut volumes = spec.volumes.iter().flatten();
    volumes.find(|volume| volume.name == mount.name)
}

pub(super) const CPU: &str = "cpu";
pub(super) const MEMORY: &str = "memory";
pub(super) const EPHEMERAL_STORAGE: &str = "ephemeral-storage";

/// The three resources of a container that settings can change.
pub(super) fn amounts(requirements: &ResourceRequirements) -> Resources {
    let span = |name: &str| Span {
        request: amount_in(requirements.requests.as_ref(), name),
        limit: amount_in(requirements.limits.as_ref(), name),
    };
    Resources {
        cpu: span(CPU),
        memory: span(MEMORY),
        ephemeral_storage: span(EPHEMERAL_STORAGE),
    }
}

fn amount_in(quantities: Option<&BTreeMap<String, Quantity>>, name: &str) -> Option<Amount> {
    // Defaults are valid quantities. The quantities of an overlay were checked when it was parsed.
    quantities
        .and_then(|quantities| quantities.get(name))
        .and_then(|quantity| Amount::parse(&quantity.0).ok())
}

pub(super) fn literal(name: &str, value: &str) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value: Some(value.to_owned()),
        value_from: None,
    }
}

/// Replaces the variable of that name, or adds it at the end.
pub(super) fn set_env(variables: &mut Vec<EnvVar>, variable: EnvVar) {
    match variables
        .iter_mut()
        .find(|known| known.name == variable.name)
    {
        Some(known) => *known = variable,
        None => variables.push(variable),
    }
}
