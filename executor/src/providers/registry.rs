//! Downloads packages from the registry of their host, by the provider registry protocol. It sends no credentials, so private
//! packages are left to the tool.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use job_contract::chain;
use provider_store::{Package, sha256_of};
use serde::Deserialize;
use tokio::sync::{Mutex, OnceCell};
use url::Url;

use crate::error::StepError;
use crate::tool::{FetchError, Fetcher};

pub(crate) const SERVICE: &str = "providers.v1";
pub(crate) const LARGEST_DOCUMENT: u64 = 1024 * 1024;
pub(crate) const LARGEST_ARCHIVE: u64 = 2 * 1024 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistryError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("{0}")]
    Download(StepError),
    #[error("`{0}` cannot be reached as a registry of providers")]
    NoRegistry(String),
    #[error("the registry does not say where its archive is")]
    NoArchive,
    #[error("the archive is not the one that its registry names")]
    Altered,
    #[error("its archive could not be written")]
    Write(#[from] io::Error),
}

/// The registries of one run.
#[derive(Debug)]
pub(crate) struct Registry {
    fetcher: Fetcher,
    /// The services of each host, with their addresses. `None`: it has none of providers.
    services: Mutex<HashMap<String, Arc<OnceCell<Option<Services>>>>>,
}

/// The services of a host.
#[derive(Clone, Debug)]
pub(crate) struct Services {
    /// The base address of its providers.
    pub(crate) providers: Url,
    /// The others that have an address.
    pub(crate) others: Vec<(String, Url)>,
}

/// Where an archive is.
#[derive(Debug, Deserialize)]
struct Download {
    download_url: String,
    /// SHA-256, in hex.
    shasum: String,
}

impl Registry {
    pub(crate) fn new(fetcher: Fetcher) -> Self {
        Self {
            fetcher,
            services: Mutex::default(),
        }
    }

    /// Downloads the archive of a package into a new file, and returns its SHA-256 in hex, which is the one that the registry names.
    pub(crate) async fn fetch(
        &self,
        package: &Package,
        target: &Path,
    ) -> Result<String, RegistryError> {
        let base = self.services(&package.host).await?.providers;
        let (system, architecture) = package
            .platform
            .split_once('_')
            .ok_or(RegistryError::NoArchive)?;
        let Package {
            namespace,
            name,
            version,
            ..
        } = package;
        let path = format!("{namespace}/{name}/{version}/download/{system}/{architecture}");
        let document = base.join(&path).map_err(|_| RegistryError::NoArchive)?;
        let text = self.fetcher.bytes(&document, LARGEST_DOCUMENT).await?;
        let download: Download =
            serde_json::from_slice(&text).map_err(|_| RegistryError::NoArchive)?;
        let archive = document.join(&download.download_url);
        let archive = archive.map_err(|_| RegistryError::NoArchive)?;
        if archive.scheme() != "https" {
            return Err(RegistryError::NoArchive);
        }
        let file = File::create_new(target)?;
        let fetched = self.fetcher.file(&archive, LARGEST_ARCHIVE, &file, target);
        fetched.await.map_err(RegistryError::Download)?;
        drop(file);
        let path = target.to_owned();
        let sha256 = tokio::task::spawn_blocking(move || sha256_of(&path));
        let sha256 = sha256.await.map_err(io::Error::from)??;
        if sha256.eq_ignore_ascii_case(&download.shasum) {
            Ok(sha256)
        } else {
            Err(RegistryError::Altered)
        }
    }

    /// The services of a host that has one of providers. Each host is asked once.
    pub(crate) async fn services(&self, host: &str) -> Result<Services, RegistryError> {
        let cell = self
            .services
            .lock()
            .await
            .entry(host.to_owned())
            .or_default()
            .clone();
        let discover = async || {
            self.discover(host).await.unwrap_or_else(|error| {
                tracing::warn!(
                    host,
                    error = chain(&error),
                    "the registry of providers cannot be used"
                );
                None
            })
        };
        let services = cell.get_or_init(discover).await.clone();
        services.ok_or_else(|| RegistryError::NoRegistry(host.to_owned()))
    }

    async fn discover(&self, host: &str) -> Result<Option<Services>, RegistryError> {
        let url = format!("https://{host}/.well-known/terraform.json");
        let Ok(url) = Url::parse(&url) else {
            return Ok(None);
        };
        let (text, url) = self.fetcher.located(&url, LARGEST_DOCUMENT).await?;
        let services: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&text).unwrap_or_default();
        let addresses = services.into_iter();
        let addresses = addresses.filter_map(|(name, address)| {
            // They are relative to the address of the document.
            let address = url.join(address.as_str()?).ok()?;
            Some((name, address))
        });
        let (of_providers, others) = addresses.partition::<Vec<_>, _>(|(name, _)| name == SERVICE);
        let mut providers = of_providers.into_iter().map(|(_, address)| address);
        let providers = providers.find(|address| address.scheme() == "https");
        Ok(providers.map(|providers| Services { providers, others }))
    }
}
