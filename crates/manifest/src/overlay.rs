//! Merges the operator's pod template over the built one. It can have all that Kubernetes has: affinity, topology
//! spread, volumes, init containers, sidecars, proxies, certificates.
//!
//! The merge follows `kubectl patch`:
//! - Objects are merged key by key.
//! - Containers, volumes and environment are merged by name, mounts by path.
//! - Other lists are replaced.
//!
//! A volume or a variable of the same name is replaced as a whole, because it has only one source. The overlay cannot
//! remove anything.

use job_contract::labels;
use k8s_openapi::DeepMerge as _;
use k8s_openapi::api::core::v1::{Container, EnvVar, PodTemplateSpec, Volume};
use serde_json::Value;

use super::check;
use super::container::{self, CONTAINER};
use super::overrides::{Resources, is_reserved_env};
use super::quantity::{Amount, SLIP};

/// A pod template that has been checked.
#[derive(Clone, PartialEq)]
pub struct Overlay(PodTemplateSpec);

/// Its environment can contain secrets.
impl std::fmt::Debug for Overlay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Overlay").finish_non_exhaustive()
    }
}

impl Overlay {
    /// Parses a template from YAML or JSON, and returns all its errors, as phrases that follow the name of the setting.
    pub fn parse(text: &str) -> Result<Self, Vec<String>> {
        let shape = |error: String| vec![format!("is no pod template: {error}")];
        let document: Value = serde_saphyr::from_str(text).map_err(|e| shape(first_line(&e)))?;
        let document = match document {
            Value::Null => Value::Object(serde_json::Map::new()),
            other => other,
        };
        let template: PodTemplateSpec =
            serde_json::from_value(document.clone()).map_err(|e| shape(e.to_string()))?;
        let understood = serde_json::to_value(&template).map_err(|e| shape(e.to_string()))?;
        let mut errors = Vec::new();
        unknown_fields(&document, &understood, "", &mut errors);
        reserved_fields(&template, &mut errors);
        side_cars(&template, &mut errors);
        if errors.is_empty() {
            Ok(Self(template))
        } else {
            Err(errors)
        }
    }

    /// Returns the executor's mount of the overlay that a mount at `path` would hide, or that would hide it.
    pub(super) fn mount_meeting(&self, path: &str) -> Option<&str> {
        let executor = self.0.spec.as_ref()?.containers.iter();
        executor
            .filter(|container| container.name == CONTAINER)
            .flat_map(|container| container.volume_mounts.iter().flatten())
            .map(|mount| mount.mount_path.as_str())
            .find(|mounted| check::meet(mounted, path))
    }

    /// Whether the overlay mounts something for the executor at exactly this path.
    pub(super) fn mounts(&self, path: &str) -> bool {
        let mounted = self.mount_meeting(path);
        mounted.is_some_and(|mounted| mounted.trim_end_matches('/') == path)
    }

    /// The claim that the overlay mounts for the executor at this path.
    pub(super) fn claim_at(&self, path: &str) -> Option<&str> {
        let volume = container::volume_at(self.0.spec.as_ref()?, path)?;
        let claim = volume.persistent_volume_claim.as_ref()?;
        Some(&claim.claim_name)
    }

    /// The executor's image, if the overlay sets it.
    pub(super) fn image(&self) -> Option<&str> {
        let containers = self.0.spec.iter().flat_map(|spec| &spec.containers);
        containers
            .filter(|container| container.name == CONTAINER)
            .find_map(|container| container.image.as_deref())
    }

    /// Requests and limits of the executor's container in the overlay.
    pub(super) fn resources(&self) -> Resources {
        let containers = self.0.spec.iter().flat_map(|spec| &spec.containers);
        containers
            .filter(|container| container.name == CONTAINER)
            .find_map(|container| container.resources.as_ref())
            .map(container::amounts)
            .unwrap_or_default()
    }

    /// Merges the overlay over a template.
    pub(super) fn merge_into(&self, base: &mut PodTemplateSpec) {
        let overlay = self.0.clone();
        let over = overlay.spec.clone().unwrap_or_default();
        if let Some(spec) = &mut base.spec {
            let replaced =
                |volume: &Volume| over.volumes.iter().flatten().any(|v| v.name == volume.name);
            if let Some(volumes) = &mut spec.volumes {
                volumes.retain(|volume| !replaced(volume));
            }
        }
        let over = over.containers.into_iter().find(|c| c.name == CONTAINER);
        let over = over.unwrap_or_default();
        let mut env_from = Vec::new();
        if let Some(executor) = executor_of(base) {
            let replaced = |env: &EnvVar| over.env.iter().flatten().any(|e| e.name == env.name);
            if let Some(env) = &mut executor.env {
                env.retain(|env| !replaced(env));
            }
            env_from.extend(executor.env_from.take().into_iter().flatten());
        }
        base.merge_from(overlay);
        if let Some(executor) = executor_of(base) {
            // The sources of the executor's settings are added. A list in the overlay would otherwise remove the built
            // ones.
            env_from.extend(over.env_from.into_iter().flatten());
            executor.env_from = Some(env_from);
        }
    }
}

fn executor_of(template: &mut PodTemplateSpec) -> Option<&mut Container> {
    container::executor_mut(template.spec.as_mut()?)
}

fn first_line(error: &serde_saphyr::Error) -> String {
    error
        .to_string()
        .lines()
        .next()
        .unwrap_or_default()
        .to_owned()
}

/// Returns every field of `document` that is not a field of a pod template.
fn unknown_fields(document: &Value, understood: &Value, path: &str, errors: &mut Vec<String>) {
    match (document, understood) {
        (Value::Object(document), Value::Object(understood)) => {
            for (key, value) in document.iter().filter(|(_, value)| !value.is_null()) {
                let path = format!("{path}.{key}");
                match understood.get(key) {
                    Some(known) => unknown_fields(value, known, &path, errors),
                    None => errors.push(format!(
                        "has the field `{}`, which a pod template does not have",
                        path.trim_start_matches('.')
                    )),
                }
            }
        }
        (Value::Array(document), Value::Array(understood)) => {
            for (index, (value, known)) in document.iter().zip(understood).enumerate() {
                unknown_fields(value, known, &format!("{path}[{index}]"), errors);
            }
        }
        _ => {}
    }
}

fn side_cars(template: &PodTemplateSpec, errors: &mut Vec<String>) {
    let containers = template.spec.iter().flat_map(|spec| &spec.containers);
    let others = containers.filter(|container| container.name != CONTAINER);
    errors.extend(
        others
            .filter(|container| !container.name.is_empty())
            .map(|container| {
                format!(
                    "has the container `{}` beside the executor, which would keep the run alive after it has ended; \
                     as a sidecar it belongs in `initContainers`, with `restartPolicy: Always`",
                    container.name
                )
            }),
    );
}

fn reserved_fields(template: &PodTemplateSpec, errors: &mut Vec<String>) {
    let mut reserved =
        |what: String| errors.push(format!("sets {what}, which only the launcher sets"));
    let metadata = template.metadata.clone().unwrap_or_default();
    for key in metadata
        .labels
        .iter()
        .chain(metadata.annotations.iter())
        .flat_map(|map| map.keys())
    {
        if labels::is_reserved(key) {
            reserved(format!("`metadata` key `{key}`"));
        }
    }
    let Some(spec) = &template.spec else { return };
    if spec.restart_policy.as_deref().is_some_and(|p| p != "Never") {
        reserved("`restartPolicy` to something other than `Never`".to_owned());
    }
    if spec.containers.iter().any(|c| c.name.is_empty()) {
        reserved("a container without a name".to_owned());
    }
    for container in spec.containers.iter().filter(|c| c.name == CONTAINER) {
        for variable in container.env.iter().flatten() {
            if is_reserved_env(&variable.name) {
                reserved(format!("the environment variable `{}`", variable.name));
            }
        }
    }
    for container in spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
    {
        quantities(container, errors);
    }
}

fn quantities(container: &Container, errors: &mut Vec<String>) {
    let resources = container.resources.clone().unwrap_or_default();
    let amounts = container::amounts(&resources);
    for (resource, span) in [
        ("memory", &amounts.memory),
        ("ephemeral-storage", &amounts.ephemeral_storage),
    ] {
        let limit = span.limit.as_ref().filter(|limit| limit.is_a_slip());
        if let Some(limit) = limit.filter(|_| container.name == CONTAINER) {
            errors.push(format!(
                "limits the executor's {resource} to {limit}, {SLIP}"
            ));
        }
    }
    for span in [amounts.cpu, amounts.memory, amounts.ephemeral_storage] {
        if let (Some(request), Some(limit)) = (span.request, span.limit)
            && request > limit
        {
            errors.push(format!(
                "has a request of {request} above its limit of {limit}"
            ));
        }
    }
    for quantity in [resources.requests, resources.limits]
        .into_iter()
        .flatten()
        .flat_map(std::collections::BTreeMap::into_values)
    {
        if Amount::parse(&quantity.0).is_err() {
            errors.push(format!(
                "has the quantity `{}`, which cannot be read",
                quantity.0
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("")]
    #[case("{}")]
    #[case("metadata: {labels: {team: x}}")]
    #[case("spec: {containers: [{name: executor, env: [{name: HTTPS_PROXY, value: http://p}]}]}")]
    #[case("spec: {affinity: {nodeAffinity: {}}, containers: []}")]
    #[case("spec: {hostNetwork: null}")]
    #[case(r#"{"spec": {"runtimeClassName": "gvisor"}}"#)]
    fn a_pod_template_is_read(#[case] text: &str) {
        assert!(Overlay::parse(text).is_ok(), "{:?}", Overlay::parse(text));
    }

    #[rstest]
    #[case("[", "no pod template")]
    #[case("- a", "no pod template")]
    #[case("spec: 5", "no pod template")]
    #[case("spec: {containers: [{image: x}]}", "without a name")]
    #[case("spec: {nodeSelektor: {a: b}}", "`spec.nodeSelektor`")]
    #[case("kind: PodTemplate", "`kind`")]
    #[case(
        "spec: {containers: [{name: executor, imagee: x}]}",
        "`spec.containers[0].imagee`"
    )]
    #[case("spec: {restartPolicy: Always}", "restartPolicy")]
    #[case(
        "spec: {containers: [{name: executor, env: [{name: EphemeralJobData}]}]}",
        "EphemeralJobData"
    )]
    #[case("metadata: {labels: {mayfly.dev/job-id: x}}", "mayfly.dev/job-id")]
    #[case(
        "spec: {containers: [{name: executor}, {name: mesh, image: x}]}",
        "`mesh` beside the executor"
    )]
    #[case(
        "spec: {containers: [{name: executor, resources: {limits: {cpu: many}}}]}",
        "many"
    )]
    #[case(
        "spec: {containers: [{name: executor, resources: {limits: {memory: 512}}}]}",
        "memory to 512, and must"
    )]
    #[case(
        "spec: {containers: [{name: executor, resources: {limits: {cpu: 1}, requests: {cpu: 2}}}]}",
        "above its limit"
    )]
    fn what_it_may_not_hold_is_named(#[case] text: &str, #[case] named: &str) {
        let errors = Overlay::parse(text).unwrap_err();
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(errors[0].contains(named), "{}", errors[0]);
    }
}
