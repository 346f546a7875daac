//! Downloads packages from the registry of their host, by the provider registry protocol. It sends no credentials, so private
//! packages are left to the tool.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use job_contract::chain;
use provider_store::{LARGEST_ARCHIVE, Package, sha256_of};
use serde::Deserialize;
use tokio::sync::{Mutex, OnceCell};
use url::Url;

use crate::error::StepError;
use crate::tool::verify::{Keyring, SignatureError};
use crate::tool::{FetchError, Fetcher};

pub(crate) const SERVICE: &str = "providers.v1";
pub(crate) const LARGEST_DOCUMENT: u64 = 1024 * 1024;

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
    #[error("its name leads away from its registry")]
    Elsewhere,
    #[error("the registry names an address that is not one of https")]
    Insecure,
    #[error("the archive is not the one that its registry names")]
    Altered,
    #[error("the list of its digests is not signed by the keys that its registry names")]
    Signature(#[from] SignatureError),
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
    #[serde(rename = "download_url")]
    archive_url: String,
    /// SHA-256, in hex.
    shasum: String,
    #[serde(default)]
    filename: String,
    /// The list of the digests of all platforms, and its signature.
    #[serde(default)]
    shasums_url: String,
    #[serde(default)]
    shasums_signature_url: String,
    #[serde(default)]
    signing_keys: SigningKeys,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SigningKeys {
    gpg_public_keys: Vec<SigningKey>,
}

#[derive(Debug, Deserialize)]
struct SigningKey {
    ascii_armor: String,
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
        let (document, download) = self.document(package).await?;
        self.archive(&document, &download, target).await
    }

    /// The same, for those who keep the archive for others: the list of digests has to name it too, and if the registry names keys,
    /// one of them must have signed the list. Without keys, its certificate alone says whose archive it is: as for the tool itself.
    pub(crate) async fn fetch_signed(
        &self,
        package: &Package,
        target: &Path,
    ) -> Result<String, RegistryError> {
        let (document, download) = self.document(package).await?;
        let list = secure(&document, &download.shasums_url)?;
        let list = self.fetcher.bytes(&list, LARGEST_DOCUMENT).await?;
        if let Some((last, others)) = download.signing_keys.gpg_public_keys.split_last() {
            let signature = secure(&document, &download.shasums_signature_url)?;
            let signature = self.fetcher.bytes(&signature, LARGEST_DOCUMENT).await?;
            let is_by = |key: &SigningKey| {
                Keyring::of(key.ascii_armor.as_bytes())?.check(&list, &signature)
            };
            if !others.iter().any(|key| is_by(key).is_ok()) {
                is_by(last)?;
            }
        }
        let list = String::from_utf8_lossy(&list);
        let mut lines = list.lines().filter_map(|line| line.split_once("  "));
        let named = lines.any(|(sha256, name)| {
            name == download.filename && sha256.eq_ignore_ascii_case(&download.shasum)
        });
        if named {
            self.archive(&document, &download, target).await
        } else {
            Err(RegistryError::Altered)
        }
    }

    /// What a registry says of a package, and at which address.
    async fn document(&self, package: &Package) -> Result<(Url, Download), RegistryError> {
        let base = self.services(&package.host).await?.providers;
        let document = document_of(&base, package)?;
        let text = self.fetcher.bytes(&document, LARGEST_DOCUMENT).await?;
        let download = serde_json::from_slice(&text).map_err(|_| RegistryError::NoArchive)?;
        Ok((document, download))
    }

    async fn archive(
        &self,
        document: &Url,
        download: &Download,
        target: &Path,
    ) -> Result<String, RegistryError> {
        let archive = secure(document, &download.archive_url)?;
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

/// Where the registry at `base` describes a package.
fn document_of(base: &Url, package: &Package) -> Result<Url, RegistryError> {
    let Package {
        namespace,
        name,
        version,
        platform,
        ..
    } = package;
    let (system, architecture) = platform.split_once('_').ok_or(RegistryError::NoArchive)?;
    let path = format!("{namespace}/{name}/{version}/download/{system}/{architecture}");
    let document = base.join(&path).map_err(|_| RegistryError::NoArchive)?;
    // An address in the place of a namespace would replace the one of the registry.
    if document.origin() == base.origin() {
        Ok(document)
    } else {
        Err(RegistryError::Elsewhere)
    }
}

/// An address in a registry's document, which is relative to the one of the document.
fn secure(document: &Url, text: &str) -> Result<Url, RegistryError> {
    let address = document.join(text).map_err(|_| RegistryError::NoArchive)?;
    if address.scheme() == "https" {
        Ok(address)
    } else {
        Err(RegistryError::Insecure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Url {
        Url::parse("https://registry.example.test/v1/providers/").unwrap()
    }

    #[test]
    fn a_package_is_asked_for_only_at_its_registry() {
        let address = "registry.example.test/acme/null";
        let package = Package::new(address, "1.0.0", "linux_amd64").unwrap();
        assert_eq!(
            document_of(&base(), &package).unwrap().as_str(),
            "https://registry.example.test/v1/providers/acme/null/1.0.0/download/linux/amd64"
        );
        for namespace in [
            "http:evil.example",
            "http://evil.example",
            "https://evil.example",
            "//evil.example",
        ] {
            let hostile = Package {
                namespace: namespace.to_owned(),
                ..package.clone()
            };
            let document = document_of(&base(), &hostile);
            assert!(
                matches!(document, Err(RegistryError::Elsewhere)),
                "{namespace}"
            );
        }
    }

    #[test]
    fn what_a_registry_names_is_fetched_by_https_alone() {
        let secured = |text| secure(&base(), text).map(String::from);
        assert_eq!(
            secured("/files/SHA256SUMS").unwrap(),
            "https://registry.example.test/files/SHA256SUMS"
        );
        assert!(secured("https://releases.example.test/a.zip").is_ok());
        for text in [
            "http://registry.example.test/a",
            "file:///etc/passwd",
            "ftp://a.test/b",
        ] {
            assert!(
                matches!(secured(text), Err(RegistryError::Insecure)),
                "{text}"
            );
        }
    }
}
