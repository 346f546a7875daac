//! Gives a pod the tokens of its identities at the clouds. They are in a volume of their own, and none of them opens the cluster.

use job_contract::identity::{FOLDER, Identities, TOKEN_SECONDS};
use k8s_openapi::api::core::v1::{
    PodSpec, ProjectedVolumeSource, ServiceAccountTokenProjection, Volume, VolumeMount,
    VolumeProjection,
};

use super::container;
use super::container::{literal, set_env};

const VOLUME: &str = "mayfly-identity";

/// Nothing of a workspace or of a pod template remains at the place of the tokens.
pub(super) fn give(spec: &mut PodSpec, identities: &Identities) {
    let tokens = identities.tokens();
    let Some(executor) = container::executor_mut(spec).filter(|_| !tokens.is_empty()) else {
        return;
    };
    let variables = executor.env.get_or_insert_default();
    for (name, value) in identities.variables() {
        set_env(variables, literal(name, value));
    }
    let mounts = executor.volume_mounts.get_or_insert_default();
    mounts.retain(|mount| mount.name != VOLUME && mount.mount_path.trim_end_matches('/') != FOLDER);
    mounts.push(VolumeMount {
        name: VOLUME.to_owned(),
        mount_path: FOLDER.to_owned(),
        read_only: Some(true),
        ..VolumeMount::default()
    });
    let sources = tokens.into_iter().map(|token| VolumeProjection {
        service_account_token: Some(ServiceAccountTokenProjection {
            audience: Some(token.audience),
            expiration_seconds: Some(TOKEN_SECONDS),
            path: token.file.to_owned(),
        }),
        ..VolumeProjection::default()
    });
    let volume = Volume {
        name: VOLUME.to_owned(),
        projected: Some(ProjectedVolumeSource {
            default_mode: None,
            sources: Some(sources.collect()),
        }),
        ..Volume::default()
    };
    let volumes = spec.volumes.get_or_insert_default();
    volumes.retain(|known| known.name != VOLUME);
    volumes.push(volume);
}
