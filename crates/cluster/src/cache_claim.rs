//! A cache that is missing must not fail a run: a plugin cache whose claim does not exist becomes an empty folder.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use manifest::Manifest;
use tracing::debug;

use super::Cluster;

impl Cluster {
    /// The objects of a run, with an empty folder in the place of a plugin cache whose claim does not exist. If this cannot be seen,
    /// for example without the right to read claims, the objects stay as they are, and the pod of a missing claim waits.
    pub async fn without_missing_cache(&self, objects: Manifest) -> Manifest {
        let Some(claim) = objects.cache_claim() else {
            return objects;
        };
        let claims: Api<PersistentVolumeClaim> =
            Api::namespaced(self.client.clone(), &self.namespace);
        let found = self
            .request_with_retries("look for the claim of the plugin cache", || {
                claims.get_metadata_opt(claim)
            })
            .await;
        match found {
            Ok(None) => objects.without_cache_claim(),
            Ok(Some(_)) => objects,
            Err(error) => {
                debug!(claim, %error, "whether the claim of the plugin cache exists is not known");
                objects
            }
        }
    }
}
