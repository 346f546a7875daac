//! From a release index to a verified binary in the cache.

use std::path::PathBuf;

use job_contract::Exit;
use job_contract::build::BUILD_FULLY;
use reqwest::StatusCode;
use semver::Version;
use tempfile::NamedTempFile;
use tracing::warn;
use url::Url;

use super::{
    Origin, Range, ResolvedTool, Resolver, SignaturePolicy, Tool,
    cache::{Lock, Slot, cache_error},
    fetch::{FetchError, Fetcher, Shown},
    index::{self, Files, OsArch, Release},
    shared::{self, SharedCache, SignedList},
    verify::{self, Keyring, MAX_ARCHIVE, MAX_SMALL_FILE},
};
use crate::error::StepError;

/// Terraform's index has about 10 MiB.
const MAX_INDEX: u64 = 64 << 20;
/// GitHub lists 30 releases a page; this reaches back years.
const MAX_PAGES: usize = 20;

impl Resolver<'_> {
    /// The greatest published release that satisfies the range and is built for this system.
    pub(super) async fn published(&self) -> Result<(Version, Files), StepError> {
        if !verify::IS_BUILT {
            return Err(left_out(self.tool, &self.range));
        }
        let os_arch = OsArch::current();
        let (matching, others): (Vec<_>, Vec<_>) = self
            .releases(os_arch)
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
            (None, Some(version)) => {
                let text = format!("{} {version} is not published for {os_arch}", self.tool);
                let hint = "choose another version, or run on a system it is published for";
                Err(StepError::user(text).with_hint(hint))
            }
            (None, None) => {
                let index = Shown(self.config.index(self.tool));
                let stable = others
                    .into_iter()
                    .map(|release| release.version)
                    .filter(|version| version.pre.is_empty());
                let hint = match stable.max() {
                    Some(newest) => format!("the newest release offered by `{index}` is {newest}"),
                    None => format!("`{index}` offers no stable release at all; check its address"),
                };
                let text = format!("no {} release satisfies `{}`", self.tool, self.range);
                Err(StepError::user(text).with_hint(hint))
            }
        }
    }

    async fn releases(&self, os_arch: OsArch) -> Result<Vec<Release>, StepError> {
        let tool = self.tool;
        let fetcher = Fetcher::new(self.config.retry_for)?;
        let mut releases = Vec::new();
        let mut next = Some(self.config.index(tool).clone());
        for _ in 0..MAX_PAGES {
            let Some(url) = next else { break };
            let (bytes, after) = fetcher.page(&url, MAX_INDEX).await.map_err(|error| {
                let exit = if error.is_transient() {
                    Exit::BadConfiguration
                } else {
                    Exit::Infrastructure
                };
                StepError::new(exit, format!("could not read the {tool} release index"))
                    .because(&error)
                    .with_hint(error.hint())
            })?;
            let shown = Shown(&url).to_string();
            let page = blocking("read the release index", move || {
                index::parse(tool, &bytes, &url, os_arch)
            })
            .await?;
            releases.extend(page.map_err(|error| {
                StepError::infrastructure(format!(
                    "the {tool} release index at `{shown}` is not in the format expected"
                ))
                .because(&error)
                .with_hint("check its address; a proxy or a login page may have answered instead")
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
    ) -> Result<ResolvedTool, StepError> {
        let name = format!("{} {version}", self.tool);
        let shared = self.config.shared.as_ref();
        let cache_dir = shared.map_or(&self.cache_dir, SharedCache::private);
        let slot = Slot::new(cache_dir, self.tool, &version);
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
        let (expected, signed) = self.expected_digest(&fetcher, &files).await?;
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
        let (path, archive) = unpack(slot, lock, archive, &files.archive, expected).await?;
        let is_usual =
            index::file_name(&files.archive) == shared::archive_name(self.tool, &version);
        if let (Some(shared), Some(signed), true) = (shared, signed, is_usual) {
            shared.keep(self.tool, &version, archive, signed).await;
        }
        Ok(self.found(version, path, Origin::Download))
    }

    /// The archive's SHA-256 from its publisher's list, after the list's signature was checked. The list too, if there is one.
    async fn expected_digest(
        &self,
        fetcher: &Fetcher,
        files: &Files,
    ) -> Result<(String, Option<SignedList>), StepError> {
        let url = Shown(&files.checksums).to_string();
        let checksums = match fetcher.bytes(&files.checksums, MAX_SMALL_FILE).await {
            Ok(checksums) => checksums,
            Err(FetchError::Status {
                status: StatusCode::NOT_FOUND | StatusCode::GONE,
                ..
            }) => {
                let hint =
                    "a mirror must have each release's SHA256SUMS in the folder of its archives";
                let text = format!("no checksums are published at `{url}`");
                return Err(StepError::infrastructure(text).with_hint(hint));
            }
            Err(error) => return Err(error.into()),
        };
        let signature = self.check_signatures(fetcher, files, &checksums).await?;
        let archive = index::file_name(&files.archive).to_owned();
        let digest = verify::listed_digest(&String::from_utf8_lossy(&checksums), &archive)
            .ok_or_else(|| changed(format!("the checksums at `{url}` do not list `{archive}`")))?;
        let signed = signature.map(|signature| SignedList {
            list: checksums,
            signature,
        });
        Ok((digest, signed))
    }

    /// One valid signature by a trusted key is enough. An invalid signature before it is an error. A signature by an
    /// unknown key is not, if a valid one follows. Returns the valid one.
    async fn check_signatures(
        &self,
        fetcher: &Fetcher,
        files: &Files,
        checksums: &[u8],
    ) -> Result<Option<Vec<u8>>, StepError> {
        let keyring = self.keyring().await?;
        let mut untrusted = None;
        for url in &files.signatures {
            let Some(signature) = fetcher.bytes_if_any(url, MAX_SMALL_FILE).await? else {
                continue;
            };
            let text = format!("the signature at `{}` was not accepted", Shown(url));
            match keyring.check(checksums, &signature) {
                Ok(()) => return Ok(Some(signature)),
                Err(error) if error.is_by_unknown_signer() => {
                    let hint =
                        "if this mirror signs releases itself, name its public key as an extra key";
                    let error = StepError::infrastructure(text).because(&error);
                    untrusted = Some(error.with_hint(hint));
                }
                Err(error) => return Err(changed(text).because(&error)),
            }
        }
        match (untrusted, self.config.signatures) {
            (Some(error), _) => Err(error),
            (None, SignaturePolicy::Offered) => Ok(None),
            (None, SignaturePolicy::Required) => {
                let url = Shown(&files.checksums);
                let text = format!("no signature is published for `{url}`");
                let hint = "mirror the signature files too, or do not require signatures";
                Err(StepError::infrastructure(text).with_hint(hint))
            }
        }
    }

    pub(super) async fn keyring(&self) -> Result<Keyring, StepError> {
        let tool = self.tool;
        let extra = self.config.extra_keys.clone();
        blocking("load the signing keys", move || {
            let mut keyring = Keyring::publisher(tool).map_err(|error| {
                StepError::defect("could not load the built-in signing keys").because(&error)
            })?;
            if let Some(path) = extra {
                keyring.add_file(&path).map_err(|error| {
                    let text = format!("could not load the signing keys in `{}`", path.display());
                    StepError::new(Exit::BadConfiguration, text)
                        .because(&error)
                        .with_hint("the file must hold OpenPGP public keys")
                })?;
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
) -> Result<(PathBuf, NamedTempFile), StepError> {
    let url = Shown(url).to_string();
    blocking("unpack the archive", move || {
        // The task holds the lock, so that the lock outlives a cancelled caller.
        let actual = verify::file_digest(archive.as_file())
            .map_err(|error| cache_error(archive.path(), &error))?;
        if actual != expected {
            let text = format!("`{url}` has SHA-256 {actual}, but its release lists {expected}");
            return Err(changed(text));
        }
        let path = slot.install(archive.as_file(), &url)?;
        if let Err(error) = slot.note_digest(&lock) {
            warn!(%error, "the digest of a tool is not noted beside it");
        }
        Ok((path, archive))
    })
    .await?
}

async fn blocking<T: Send + 'static>(
    task: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StepError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        StepError::defect(format!("the task to {task} ended unexpectedly")).because(&error)
    })
}

/// The error of a build that checks no signatures: it downloads nothing.
fn left_out(tool: Tool, range: &Range) -> StepError {
    let text = format!("this build leaves out the download of {tool}");
    let (program, other) = match tool {
        Tool::Terraform => ("terraform", "tofu"),
        Tool::OpenTofu => ("tofu", "terraform"),
    };
    StepError::new(Exit::BadConfiguration, text).with_hint(format!(
        "put a `{program}` that satisfies `{range}` on PATH, or use `{other}`; or {BUILD_FULLY}"
    ))
}

fn changed(text: String) -> StepError {
    let hint = "the mirror or a proxy serves a changed or incomplete file; nothing was installed";
    StepError::infrastructure(text).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_that_downloads_nothing_names_every_way_out() {
        let error = left_out(Tool::Terraform, &Range::parse("~> 1.9").unwrap());
        assert_eq!(error.exit(), Exit::BadConfiguration);
        assert_eq!(
            error.to_string(),
            "this build leaves out the download of Terraform"
        );
        assert_eq!(
            error.hint().as_deref(),
            Some(
                "put a `terraform` that satisfies `~> 1.9` on PATH, or use `tofu`; or build without `--no-default-features`"
            )
        );
    }
}
