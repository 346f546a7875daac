//! From a release index to a verified binary in the cache.

use std::path::PathBuf;

use reqwest::StatusCode;
use semver::Version;
use tempfile::NamedTempFile;
use url::Url;

use super::{
    Origin, ResolvedTool, Resolver, SignaturePolicy,
    cache::{Lock, Slot},
    error::{FetchError, ToolError},
    fetch::{Fetcher, Shown},
    index::{self, Files, Platform, Release},
    verify::{self, Keyring, SignatureError},
};

/// Terraform's index has about 10 MiB.
const MAX_INDEX: u64 = 64 << 20;
const MAX_SMALL_FILE: u64 = 1 << 20;
const MAX_ARCHIVE: u64 = 512 << 20;
/// GitHub lists 30 releases a page; this reaches back years.
const MAX_PAGES: usize = 20;

impl Resolver<'_> {
    /// The greatest published release that satisfies the range and is built for this platform.
    pub(super) async fn published(&self) -> Result<(Version, Files), ToolError> {
        let platform = Platform::current();
        let (matching, others): (Vec<_>, Vec<_>) = self
            .releases(platform)
            .await?
            .into_iter()
            .partition(|release| self.range.matches(&release.version));
        let greatest = matching
            .iter()
            .map(|release| &release.version)
            .max()
            .cloned();
        let built = matching
            .into_iter()
            .filter_map(|release| Some((release.version, release.files?)))
            .max_by(|(a, _), (b, _)| a.cmp(b));
        match (built, greatest) {
            (Some(built), _) => Ok(built),
            (None, Some(version)) => Err(ToolError::NoBuild {
                tool: self.tool,
                version,
                platform: platform.to_string(),
            }),
            (None, None) => Err(ToolError::NoMatch {
                tool: self.tool,
                range: self.range.to_string(),
                newest: others
                    .into_iter()
                    .map(|release| release.version)
                    .filter(|version| version.pre.is_empty())
                    .max(),
                index: Shown(self.config.index(self.tool)).to_string(),
            }),
        }
    }

    async fn releases(&self, platform: Platform) -> Result<Vec<Release>, ToolError> {
        let tool = self.tool;
        let fetcher = Fetcher::new(self.config.retry_for)?;
        let mut releases = Vec::new();
        let mut next = Some(self.config.index(tool).clone());
        for _ in 0..MAX_PAGES {
            let Some(url) = next else { break };
            let (bytes, after) = fetcher
                .page(&url, MAX_INDEX)
                .await
                .map_err(|source| ToolError::Index { tool, source })?;
            let shown = Shown(&url).to_string();
            let page = blocking("read the release index", move || {
                index::parse(tool, &bytes, &url, platform)
            })
            .await?;
            releases.extend(page.map_err(|source| ToolError::IndexFormat {
                tool,
                url: shown,
                source,
            })?);
            next = after.filter(|_| !self.is_decided(&releases));
        }
        Ok(releases)
    }

    /// Whether older pages of the index cannot change the choice. The newest releases come first, but patches of older
    /// lines are among them. So the search ends only with the greatest version of all, or with the exact version that
    /// was requested.
    fn is_decided(&self, releases: &[Release]) -> bool {
        if self.range.exact().is_some() {
            return releases
                .iter()
                .any(|release| self.range.matches(&release.version));
        }
        releases
            .iter()
            .filter(|release| release.version.pre.is_empty() && release.files.is_some())
            .map(|release| &release.version)
            .max()
            .is_some_and(|greatest| self.range.matches(greatest))
    }

    /// Puts a release into the cache, unless another executor has installed it meanwhile.
    pub(super) async fn download(
        &self,
        (version, files): (Version, Files),
    ) -> Result<ResolvedTool, ToolError> {
        let name = format!("{} {version}", self.tool);
        let slot = Slot::new(&self.cache_dir, self.tool, &version);
        let lock = slot
            .lock(|| {
                (self.notify)(&format!("waiting for another executor to install {name}"));
            })
            .await?;
        if let Some(path) = slot.installed() {
            return Ok(self.found(version, path, Origin::Cache));
        }
        slot.sweep(&lock);
        let files = match &self.config.mirror {
            Some(mirror) => files.on(mirror),
            None => files,
        };
        let fetcher = Fetcher::new(self.config.retry_for)?;
        let expected = self.expected_digest(&fetcher, &files).await?;
        (self.notify)(&format!(
            "downloading {name} from {}",
            Shown(&files.archive)
        ));
        let archive = slot.unfinished()?;
        fetcher
            .file(
                &files.archive,
                MAX_ARCHIVE,
                archive.as_file(),
                archive.path(),
            )
            .await?;
        let path = unpack(slot, lock, archive, &files.archive, expected).await?;
        Ok(self.found(version, path, Origin::Download))
    }

    /// The archive's SHA-256 from its publisher's list, after the list's signature was checked.
    async fn expected_digest(&self, fetcher: &Fetcher, files: &Files) -> Result<String, ToolError> {
        let url = Shown(&files.checksums).to_string();
        let checksums = match fetcher.bytes(&files.checksums, MAX_SMALL_FILE).await {
            Ok(checksums) => checksums,
            Err(FetchError::Status {
                status: StatusCode::NOT_FOUND | StatusCode::GONE,
                ..
            }) => return Err(ToolError::ChecksumsMissing { url }),
            Err(error) => return Err(error.into()),
        };
        self.check_signatures(fetcher, files, &checksums).await?;
        let archive = index::file_name(&files.archive).to_owned();
        verify::listed_digest(&String::from_utf8_lossy(&checksums), &archive)
            .ok_or(ToolError::ChecksumUnlisted { url, archive })
    }

    /// One valid signature by a trusted key is enough. An invalid signature before it is an error. A signature by an
    /// unknown key is not, if a valid one follows.
    async fn check_signatures(
        &self,
        fetcher: &Fetcher,
        files: &Files,
        checksums: &[u8],
    ) -> Result<(), ToolError> {
        let keyring = self.keyring().await?;
        let mut untrusted = None;
        for url in &files.signatures {
            let Some(signature) = fetcher.bytes_if_any(url, MAX_SMALL_FILE).await? else {
                continue;
            };
            let rejected = |source| ToolError::Signature {
                url: Shown(url).to_string(),
                source,
            };
            match keyring.check(checksums, &signature) {
                Ok(()) => return Ok(()),
                Err(error @ SignatureError::UnknownSigner { .. }) => {
                    untrusted = Some(rejected(error));
                }
                Err(error) => return Err(rejected(error)),
            }
        }
        match (untrusted, self.config.signatures) {
            (Some(error), _) => Err(error),
            (None, SignaturePolicy::Offered) => Ok(()),
            (None, SignaturePolicy::Required) => Err(ToolError::SignatureMissing {
                url: Shown(&files.checksums).to_string(),
            }),
        }
    }

    async fn keyring(&self) -> Result<Keyring, ToolError> {
        let tool = self.tool;
        let extra = self.config.extra_keys.clone();
        blocking("load the signing keys", move || {
            let mut keyring = Keyring::publisher(tool);
            if let Some(path) = extra {
                keyring
                    .add_file(&path)
                    .map_err(|source| ToolError::ExtraKeys { path, source })?;
            }
            Ok(keyring)
        })
        .await?
    }
}

/// Checks and unpacks an archive. The digest is that of the file on disk, which is then unpacked.
async fn unpack(
    slot: Slot,
    lock: Lock,
    archive: NamedTempFile,
    url: &Url,
    expected: String,
) -> Result<PathBuf, ToolError> {
    let url = Shown(url).to_string();
    blocking("unpack the archive", move || {
        // The task holds the lock, so that the lock outlives a cancelled caller.
        let _lock = lock;
        let actual = verify::file_digest(archive.as_file())
            .map_err(|error| ToolError::cache(archive.path(), error))?;
        if actual != expected {
            return Err(ToolError::ChecksumMismatch {
                url,
                expected,
                actual,
            });
        }
        slot.install(archive.as_file(), &url)
    })
    .await?
}

async fn blocking<T: Send + 'static>(
    task: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ToolError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|source| ToolError::Task { task, source })
}
