//! Reads the secrets of one run: each once, several at a time, with one login for each store.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use runtime::lock;
use secrecy::SecretString;
use tokio::time::{Instant, timeout_at};

use crate::aws::{AwsSecret, SecretsManager};
use crate::azure::KeyVault;
use crate::error::{ErrorClass, ReadError};
use crate::gcp::{GoogleSecret, SecretManager};
use crate::http::{Http, TlsSettings, with_retries};
use crate::reference::{SecretId, StoreKind};
use crate::settings::Settings;
use crate::value::SecretValue;
use crate::vault::Vault;

/// How long all reads of one call may take.
const READ_TIME: Duration = Duration::from_mins(1);
const AT_ONCE: usize = 8;

/// The secrets that were asked for, or why not.
pub type Found = BTreeMap<SecretId, Result<Arc<SecretValue>, ReadError>>;

/// Reads secrets for one run. Nothing is kept beyond the run.
#[derive(Debug)]
pub struct SecretReader {
    http: Http,
    aws: Option<SecretsManager>,
    gcp: Option<SecretManager>,
    azure: Option<KeyVault>,
    vault: Option<Vault>,
    secrets: Vec<SecretString>,
    known: Mutex<BTreeMap<SecretId, Arc<SecretValue>>>,
}

impl SecretReader {
    /// Opens the stores. It sends no request yet.
    ///
    /// # Errors
    /// Says which certificates cannot be used.
    pub fn open(settings: Settings) -> Result<Self, String> {
        Ok(Self {
            http: Http::new(&TlsSettings::default())?,
            aws: settings.aws.map(SecretsManager::new),
            gcp: settings.gcp.map(SecretManager::new),
            azure: settings.azure.map(KeyVault::new),
            vault: settings.vault.map(Vault::new).transpose()?,
            secrets: settings.secrets,
            known: Mutex::default(),
        })
    }

    /// What the logins consist of. No log may show it.
    pub fn login_secrets(&self) -> &[SecretString] {
        &self.secrets
    }

    /// Reads secrets. Each has its own result.
    pub async fn read(&self, ids: BTreeSet<SecretId>) -> Found {
        let deadline = Instant::now() + READ_TIME;
        let found: Vec<_> = stream::iter(ids)
            .map(async |id| {
                let result = self.read_known(&id, deadline).await;
                (id, result)
            })
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        if let Some(vault) = &self.vault {
            vault.end_reads().await;
        }
        found.into_iter().collect()
    }

    async fn read_known(
        &self,
        id: &SecretId,
        deadline: Instant,
    ) -> Result<Arc<SecretValue>, ReadError> {
        if let Some(value) = lock(&self.known).get(id) {
            return Ok(Arc::clone(value));
        }
        let reading = with_retries(deadline, async || self.read_once(id).await);
        let value = timeout_at(deadline, reading).await.unwrap_or_else(|_| {
            let detail = "not read within a minute";
            Err(ReadError::new(id.store(), ErrorClass::Unreachable, detail))
        });
        let value = Arc::new(value?);
        let mut known = lock(&self.known);
        known.insert(id.clone(), Arc::clone(&value));
        Ok(value)
    }

    async fn read_once(&self, id: &SecretId) -> Result<SecretValue, ReadError> {
        let absent = || ReadError::new(id.store(), ErrorClass::NotConfigured, "");
        match id {
            SecretId::Aws {
                id,
                region,
                stage,
                version,
            } => {
                let secret = AwsSecret {
                    id,
                    region: region.as_deref(),
                    stage: stage.as_deref(),
                    version: version.as_deref(),
                };
                self.aws
                    .as_ref()
                    .ok_or_else(absent)?
                    .read(&self.http, secret)
                    .await
            }
            SecretId::Gcp {
                project,
                location,
                secret,
                version,
            } => {
                let secret = GoogleSecret {
                    project: project.as_deref(),
                    location: location.as_deref(),
                    secret,
                    version: version.as_deref(),
                };
                self.gcp
                    .as_ref()
                    .ok_or_else(absent)?
                    .read(&self.http, secret)
                    .await
            }
            SecretId::Azure {
                vault,
                name,
                version,
            } => {
                let store = self.azure.as_ref().ok_or_else(absent)?;
                store
                    .read(&self.http, vault, name, version.as_deref())
                    .await
            }
            SecretId::Vault {
                path,
                namespace,
                version,
            } => {
                let store = self.vault.as_ref().ok_or_else(absent)?;
                store.read(path, namespace.as_deref(), *version).await
            }
        }
    }

    /// Proves each login without reading a secret, and says as whom.
    pub async fn check(&self) -> Vec<(StoreKind, Result<String, ReadError>)> {
        let mut results = Vec::new();
        if let Some(aws) = &self.aws {
            results.push((StoreKind::Aws, aws.check(&self.http).await));
        }
        if let Some(gcp) = &self.gcp {
            results.push((StoreKind::Gcp, gcp.check(&self.http).await));
        }
        if let Some(azure) = &self.azure {
            results.push((StoreKind::Azure, azure.check(&self.http).await));
        }
        if let Some(vault) = &self.vault {
            results.push((StoreKind::Vault, vault.check().await));
            vault.finish().await;
        }
        results
    }

    /// Gives back what stores have lent. It takes two seconds at most.
    pub async fn finish(&self) {
        if let Some(vault) = &self.vault {
            vault.finish().await;
        }
    }
}

#[cfg(test)]
mod tests;
