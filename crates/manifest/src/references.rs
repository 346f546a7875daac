//! The objects that a finished pod refers to. They must exist in the cluster before a run can start. Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, PodSpec, Volume};

/// Names of objects. They are in the namespace of the runs, unless a field says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    pub secrets: BTreeSet<String>,
    pub config_maps: BTreeSet<String>,
    pub service_accounts: BTreeSet<String>,
    pub claims: BTreeSet<String>,
    /// In the cluster, not in a namespace.
    pub priority_classes: BTreeSet<String>,
    /// In the cluster, not in a namespace.
    pub runtime_classes: BTreeSet<String>,
    /// Of every container.
    pub images: BTreeSet<String>,
}

impl References {
    /// Returns the objects that a pod refers to. `own_secret` holds its job data and is created with it, so it is left
    /// out.
    pub fn of(spec: &PodSpec, own_secret: &str) -> Self {
        let mut found = Self::default();
        let pulls = spec.image_pull_secrets.iter().flatten();
        found
            .secrets
            .extend(pulls.map(|secret| secret.name.clone()));
        found
            .service_accounts
            .extend(spec.service_account_name.clone());
        found
            .priority_classes
            .extend(spec.priority_class_name.clone());
        found
            .runtime_classes
            .extend(spec.runtime_class_name.clone());
        let init = spec.init_containers.iter().flatten();
        for container in init.chain(&spec.containers) {
            found.add_container(container);
        }
        for volume in spec.volumes.iter().flatten() {
            found.add_volume(volume);
        }
        found.secrets.remove(own_secret);
        for names in [
            &mut found.secrets,
            &mut found.config_maps,
            &mut found.service_accounts,
            &mut found.priority_classes,
        ] {
            names.remove("");
        }
        found
    }

    fn add_container(&mut self, container: &Container) {
        self.images.extend(container.image.clone());
        for variable in container.env.iter().flatten() {
            let Some(source) = &variable.value_from else {
                continue;
            };
            if let Some(key) = &source.secret_key_ref {
                self.add_secret(Some(&key.name), key.optional);
            }
            if let Some(key) = &source.config_map_key_ref {
                self.add_config_map(Some(&key.name), key.optional);
            }
        }
        for source in container.env_from.iter().flatten() {
            if let Some(secret) = &source.secret_ref {
                self.add_secret(Some(&secret.name), secret.optional);
            }
            if let Some(map) = &source.config_map_ref {
                self.add_config_map(Some(&map.name), map.optional);
            }
        }
    }

    fn add_volume(&mut self, volume: &Volume) {
        if let Some(secret) = &volume.secret {
            self.add_secret(secret.secret_name.as_ref(), secret.optional);
        }
        if let Some(map) = &volume.config_map {
            self.add_config_map(Some(&map.name), map.optional);
        }
        if let Some(claim) = &volume.persistent_volume_claim {
            self.claims.insert(claim.claim_name.clone());
        }
        let projected = volume.projected.iter();
        for source in projected.flat_map(|projected| projected.sources.iter().flatten()) {
            if let Some(secret) = &source.secret {
                self.add_secret(Some(&secret.name), secret.optional);
            }
            if let Some(map) = &source.config_map {
                self.add_config_map(Some(&map.name), map.optional);
            }
        }
    }

    /// Optional objects may be missing.
    fn add_secret(&mut self, name: Option<&String>, optional: Option<bool>) {
        if optional != Some(true) {
            self.secrets.extend(name.cloned());
        }
    }

    fn add_config_map(&mut self, name: Option<&String>, optional: Option<bool>) {
        if optional != Some(true) {
            self.config_maps.extend(name.cloned());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn everything_a_pod_cannot_start_without_is_found_wherever_it_is_named() {
        let spec: PodSpec = serde_json::from_value(json!({
            "serviceAccountName": "runner", "priorityClassName": "batch", "runtimeClassName": "sandbox",
            "imagePullSecrets": [{"name": "pull"}],
            "initContainers": [{"name": "a", "image": "ca:1", "envFrom": [
                {"secretRef": {"name": "s1"}}, {"configMapRef": {"name": "m1"}},
                {"secretRef": {"name": "maybe", "optional": true}}]}],
            "containers": [{"name": "executor", "image": "executor:1", "env": [
                {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s2", "key": "k"}}},
                {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "m2", "key": "k"}}},
                {"name": "C", "valueFrom": {"secretKeyRef": {"name": "job-1-step", "key": "k"}}}]}],
            "volumes": [
                {"name": "v1", "secret": {"secretName": "s3"}},
                {"name": "v2", "configMap": {"name": "m3"}},
                {"name": "v3", "configMap": {"name": "maybe", "optional": true}},
                {"name": "v4", "persistentVolumeClaim": {"claimName": "cache"}},
                {"name": "v5", "projected": {"sources": [
                    {"secret": {"name": "s4"}}, {"configMap": {"name": "m4"}}]}}],
        }))
        .unwrap();
        let found = References::of(&spec, "job-1-step");
        let names = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(" ");
        assert_eq!(names(&found.secrets), "pull s1 s2 s3 s4");
        assert_eq!(names(&found.config_maps), "m1 m2 m3 m4");
        assert_eq!(names(&found.service_accounts), "runner");
        assert_eq!(names(&found.claims), "cache");
        assert_eq!(names(&found.priority_classes), "batch");
        assert_eq!(names(&found.runtime_classes), "sandbox");
        assert_eq!(names(&found.images), "ca:1 executor:1");
    }
}
