//! Finds the Terraform or OpenTofu binary of a run: on PATH, in the cache, or by a verified download.
//!
//! From the job data, this module knows only the tool's name and the text of the range. It knows nothing of the
//! binary's use. It deliberately does not read the stock executor's binary cache in object storage, because any
//! workspace could have written to it (contract 9.4).

mod cache;
mod cached;
mod download;
mod fetch;
mod index;
mod probe;
mod range;
mod shared;
pub(crate) mod verify;

use std::{ffi::OsString, fmt, path::PathBuf, time::Duration};

pub use cache::install_archive;
pub use cached::{CachedTool, check_cached_tool};
pub(crate) use fetch::{FetchError, Fetcher, RETRY_FOR};
pub use job_contract::job::Tool;
pub use range::{Range, RangeError};
pub use shared::SharedCache;

use cache::{Slot, cache_error};
use clap::ValueEnum;
use fetch::Shown;
use job_contract::chain;
use range::EXAMPLES;
use semver::Version;
use tracing::warn;
use url::Url;

use crate::error::StepError;

/// So many versions in a cache are tried. Others may have made folders for more.
const MOST_CANDIDATES: usize = 16;

/// Receives one-line messages about slow work and warnings.
pub type Notify<'a> = &'a (dyn Fn(&str) + Send + Sync);

/// Which of several matching versions is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Selection {
    /// The binary on PATH if it satisfies the range, else the greatest in the cache, else the greatest published one.
    Installed,
    /// The greatest published one, as with the stock executor.
    Newest,
}

/// The required signature of a release. A signature that exists must be valid in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SignaturePolicy {
    /// A release may have no signature, because a mirror may lack them. Checksums are still required.
    Offered,
    /// A release without a signature is refused.
    Required,
}

/// Where tools come from.
#[derive(Clone)]
pub struct ToolConfig {
    /// Directory of downloaded tools. Many executors may share it.
    pub cache_dir: PathBuf,
    /// What is used instead if others can write that directory.
    pub shared: Option<SharedCache>,
    pub terraform_index: Url,
    pub tofu_index: Url,
    /// Replaces scheme, host and path prefix of the index's download addresses.
    pub mirror: Option<Url>,
    pub selection: Selection,
    pub signatures: SignaturePolicy,
    /// OpenPGP public keys that are trusted in addition to the publishers' own.
    pub extra_keys: Option<PathBuf>,
    pub path: OsString,
    /// How long requests to an unusable release server are repeated.
    pub retry_for: Duration,
}

impl ToolConfig {
    fn index(&self, tool: Tool) -> &Url {
        match tool {
            Tool::Terraform => &self.terraform_index,
            Tool::OpenTofu => &self.tofu_index,
        }
    }
}

// Debug output omits addresses, because they may hold credentials.
impl fmt::Debug for ToolConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolConfig")
            .field("cache_dir", &self.cache_dir)
            .field("shared", &self.shared)
            .field("terraform_index", &Shown(&self.terraform_index))
            .field("tofu_index", &Shown(&self.tofu_index))
            .field("mirror", &self.mirror.as_ref().map(Shown))
            .field("selection", &self.selection)
            .field("signatures", &self.signatures)
            .field("extra_keys", &self.extra_keys)
            .field("path", &self.path)
            .field("retry_for", &self.retry_for)
            .finish()
    }
}

/// How a binary was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Path,
    Cache,
    Download,
}

/// A binary and its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedTool {
    pub tool: Tool,
    pub version: Version,
    /// Absolute.
    pub path: PathBuf,
    pub origin: Origin,
}

/// Finds a binary of `tool` that satisfies `range`. Downloads it if necessary.
///
/// Dropping the future cancels the work and removes partial files. An unpacking that has begun ends in the background.
/// Partial content never becomes visible.
pub async fn resolve(
    tool: Tool,
    range: &str,
    config: &ToolConfig,
    notify: Notify<'_>,
) -> Result<ResolvedTool, StepError> {
    let range = Range::parse(range).map_err(|error| {
        StepError::user(error.to_string()).with_hint(format!("valid ranges look like {EXAMPLES}"))
    })?;
    let cache_dir = std::path::absolute(&config.cache_dir)
        .map_err(|error| cache_error(&config.cache_dir, &error))?;
    Resolver {
        tool,
        range,
        config,
        cache_dir,
        notify,
    }
    .resolve()
    .await
}

struct Resolver<'a> {
    tool: Tool,
    range: Range,
    config: &'a ToolConfig,
    cache_dir: PathBuf,
    notify: Notify<'a>,
}

impl Resolver<'_> {
    async fn resolve(&self) -> Result<ResolvedTool, StepError> {
        // A full version needs no index, because it is the same from every source.
        let local_first =
            self.config.selection == Selection::Installed || self.range.exact().is_some();
        if local_first {
            if let Some(found) = self.local().await {
                return Ok(found);
            }
            return self.download(self.published().await?).await;
        }
        let failure = match self.published().await {
            Ok(release) => {
                return match self.local_exactly(&release.0).await {
                    Some(found) => Ok(found),
                    None => self.download(release).await,
                };
            }
            Err(error) => error,
        };
        match self.local().await {
            Some(found) => {
                (self.notify)(&format!(
                    "warning: {failure}; using the installed {} {}",
                    self.tool, found.version
                ));
                Ok(found)
            }
            None => Err(failure),
        }
    }

    /// The binary on PATH if it satisfies the range, else the greatest matching one in the cache.
    async fn local(&self) -> Option<ResolvedTool> {
        if let Some(found) = self.on_path().await
            && self.range.matches(&found.version)
        {
            return Some(found);
        }
        let mut versions = match &self.config.shared {
            Some(shared) => shared.versions(self.tool).await,
            None => cache::versions(&self.cache_dir, self.tool),
        };
        versions.retain(|version| self.range.matches(version));
        versions.sort();
        for version in versions.into_iter().rev().take(MOST_CANDIDATES) {
            if let Some(found) = self.cached(&version).await {
                return Some(found);
            }
        }
        None
    }

    async fn local_exactly(&self, version: &Version) -> Option<ResolvedTool> {
        if let Some(found) = self.cached(version).await {
            return Some(found);
        }
        self.on_path()
            .await
            .filter(|found| found.version == *version)
    }

    async fn cached(&self, version: &Version) -> Option<ResolvedTool> {
        let path = match &self.config.shared {
            Some(shared) => {
                let keyring = self.keyring().await;
                let keyring =
                    keyring.inspect_err(|error| warn!(%error, "the tool cache is not used"));
                shared.take(self.tool, version, keyring.ok()?).await?
            }
            None => Slot::new(&self.cache_dir, self.tool, version).installed()?,
        };
        Some(self.found(version.clone(), path, Origin::Cache))
    }

    async fn on_path(&self) -> Option<ResolvedTool> {
        // Relative entries are skipped. They would search the current directory, which could be a run's work tree.
        let absolute = std::env::split_paths(&self.config.path).filter(|entry| entry.is_absolute());
        let searched = std::env::join_paths(absolute).ok()?;
        let path = which::which_in_global(self.tool.binary(), Some(searched))
            .ok()?
            .next()?;
        match probe::version(&path, &self.cache_dir).await {
            Ok(version) => Some(self.found(version, path, Origin::Path)),
            Err(error) => {
                (self.notify)(&format!(
                    "warning: ignoring `{}`, which does not report its version: {}",
                    path.display(),
                    chain(&error)
                ));
                None
            }
        }
    }

    fn found(&self, version: Version, path: PathBuf, origin: Origin) -> ResolvedTool {
        ResolvedTool {
            tool: self.tool,
            version,
            path,
            origin,
        }
    }
}

#[cfg(test)]
mod tests;
