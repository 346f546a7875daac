//! `api-launcher cache export` and `import`: carries packages of providers to where no registry can be reached, in a folder that
//! Terraform and OpenTofu accept as a filesystem mirror.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use executor::digest_of_archive;
use job_contract::{Exit, chain};
use provider_store::{Item, Package, ProviderStore, sha256_of};
use runtime::regular_file;
use serde_json::{Value, json};

use crate::failure::Failure;

const PREFIX: &str = "terraform-provider-";
const LIST: &str = "SHA256SUMS";
const NOT_LOCKED: &str = "none of the digests in the lock file is one of it";
const LARGEST_TEXT: u64 = 16 * 1024 * 1024;

/// A package that was carried, or was not.
#[derive(Debug)]
pub(super) struct Carried {
    /// `HOST/NAMESPACE/TYPE/terraform-provider-TYPE_VERSION_OS_ARCH.zip`
    pub(super) file: String,
    pub(super) result: Result<How, String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// It has a digest of the lock file.
    ByLockFile,
    /// It has the digest of the list beside it.
    ByList,
    /// Nothing said what it must be. A run still checks it by the lock file of its workspace.
    Unverified,
}

impl How {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::ByLockFile => "lock-file",
            Self::ByList => "list",
            Self::Unverified => "nothing",
        }
    }
}

impl Carried {
    pub(super) fn document(&self) -> Value {
        match &self.result {
            Ok(how) => json!({"file": self.file, "verifiedBy": how.name()}),
            Err(why) => json!({"file": self.file, "refused": why}),
        }
    }
}

/// The name of an archive in a mirror.
fn archive_name(package: &Package) -> String {
    let Package {
        name,
        version,
        platform,
        ..
    } = package;
    format!("{PREFIX}{name}_{version}_{platform}.zip")
}

fn folder(package: &Package) -> PathBuf {
    [&package.host, &package.namespace, &package.name]
        .iter()
        .collect()
}

fn file(package: &Package) -> String {
    format!("{}/{}", package.address(), archive_name(package))
}

/// Whether an address is the one that was asked for, which may lack the host or the namespace.
fn is_asked_for(address: &str, asked: &str) -> bool {
    address
        .strip_suffix(asked)
        .is_some_and(|before| before.is_empty() || before.ends_with('/'))
}

/// Copies archives into a folder. Empty `providers` or `platforms`: all. Others may have put archives into the store, whose names are
/// what they are. So only a lock file tells which are genuine, and only these get lists of digests, which an import believes.
pub(super) fn export(
    store: &ProviderStore,
    target: &Path,
    providers: &[String],
    platforms: &[String],
    lock_file: Option<&Path>,
) -> Result<Vec<Carried>, Failure> {
    let locked = lock_file.map(locked).transpose()?;
    let unreadable = |error| super::unusable(store, error);
    let mut chosen: BTreeMap<Package, Vec<String>> = BTreeMap::new();
    for entry in store.list().map_err(unreadable)? {
        let Item::Archive { package, sha256 } = entry.item else {
            continue;
        };
        let address = package.address();
        let is_locked = |locked: &Locked| locked.contains_key(&key(&package));
        let is_chosen = locked.as_ref().is_none_or(is_locked)
            && (platforms.is_empty() || platforms.contains(&package.platform))
            && (providers.is_empty()
                || providers.iter().any(|asked| is_asked_for(&address, asked)));
        if is_chosen {
            chosen.entry(package).or_default().push(sha256);
        }
    }
    for asked in providers {
        if !chosen
            .keys()
            .any(|package| is_asked_for(&package.address(), asked))
        {
            let text = format!("`{}` has no package of `{asked}`", store.root().display());
            return Err(Failure::new(Exit::BadJobData, text)
                .with_hint("`api-launcher cache list` shows what it has"));
        }
    }
    let unwritable = |error| {
        let text = format!("could not write into `{}`", target.display());
        Failure::new(Exit::Infrastructure, text).because(error)
    };
    fs::create_dir_all(target).map_err(unwritable)?;
    let mut carried = Vec::new();
    let mut lists: BTreeMap<PathBuf, String> = BTreeMap::new();
    for (package, digests) in &chosen {
        let locked = locked.as_ref().and_then(|locked| locked.get(&key(package)));
        let exported = export_one(store, target, package, digests, locked).map_err(unwritable)?;
        let result = exported.map(|sha256| {
            if locked.is_none() {
                return How::Unverified;
            }
            let list = format!("{PREFIX}{}_{}_{LIST}", package.name, package.version);
            let list = lists.entry(folder(package).join(list)).or_default();
            let _ = writeln!(list, "{sha256}  {}", archive_name(package));
            How::ByLockFile
        });
        carried.push(Carried {
            file: file(package),
            result,
        });
    }
    for (list, text) in lists {
        fs::write(target.join(list), text).map_err(unwritable)?;
    }
    Ok(carried)
}

/// Copies the archive of a package. Returns its SHA-256, or why there is none to copy.
fn export_one(
    store: &ProviderStore,
    target: &Path,
    package: &Package,
    digests: &[String],
    locked: Option<&Vec<String>>,
) -> io::Result<Result<String, String>> {
    if locked.is_none() && digests.len() > 1 {
        return Ok(Err(format!(
            "the store has {} different archives of it; `--lock-file` tells which one is genuine",
            digests.len()
        )));
    }
    let folder = target.join(folder(package));
    fs::create_dir_all(&folder)?;
    for sha256 in digests {
        let new = tempfile::tempdir_in(&folder)?;
        let copy = new.path().join("archive");
        if !store.copy(package, sha256, &copy)? {
            continue;
        }
        // One that cannot be read is no package.
        if locked.is_some_and(|locked| !has_digest(locked, sha256, &copy).unwrap_or(false)) {
            continue;
        }
        fs::set_permissions(&copy, Permissions::from_mode(0o644))?;
        fs::rename(copy, folder.join(archive_name(package)))?;
        return Ok(Ok(sha256.clone()));
    }
    Ok(Err(match locked {
        Some(_) => NOT_LOCKED.to_owned(),
        None => "it is not what its name in the store says".to_owned(),
    }))
}

/// The digests that a lock file has: by address and version.
type Locked = BTreeMap<(String, String), Vec<String>>;

fn key(package: &Package) -> (String, String) {
    (package.address(), package.version.clone())
}

/// Whether a lock file has a digest of an archive. As for the tool, one of either kind is enough. That of the files takes longer.
fn has_digest(locked: &[String], sha256: &str, archive: &Path) -> io::Result<bool> {
    let has_files = locked.iter().any(|digest| digest.starts_with("h1:"));
    Ok(locked.contains(&format!("zh:{sha256}"))
        || (has_files && locked.contains(&digest_of_archive(archive)?)))
}

fn locked(path: &Path) -> Result<Locked, Failure> {
    let text = regular_file::read_text(path, LARGEST_TEXT).map_err(Failure::unreadable(path))?;
    let packages = executor::locked_digests(&text).ok_or_else(|| {
        let text = format!("`{}` is no lock file of providers", path.display());
        Failure::new(Exit::BadJobData, text)
            .with_hint("name a file `.terraform.lock.hcl`, as `init` writes it")
    })?;
    Ok(packages
        .into_iter()
        .map(|(address, version, digests)| ((address, version), digests))
        .collect())
}

/// Adds the archives of a folder to the store.
pub(super) fn import(
    store: &ProviderStore,
    source: &Path,
    lock_file: Option<&Path>,
) -> Result<Vec<Carried>, Failure> {
    let locked = lock_file.map(locked).transpose()?;
    let mut carried = Vec::new();
    for path in archives(source)? {
        let relative = path.strip_prefix(source).unwrap_or(&path);
        let file = relative.display().to_string();
        let result = match package_of(relative) {
            Some(package) => import_one(store, &path, &package, locked.as_ref()),
            None => Err(format!(
                "it is not `HOST/NAMESPACE/TYPE/{PREFIX}TYPE_VERSION_OS_ARCH.zip`"
            )),
        };
        carried.push(Carried { file, result });
    }
    if carried.is_empty() {
        let text = format!("`{}` has no archives of providers", source.display());
        return Err(Failure::new(Exit::BadJobData, text).with_hint(
            "name the folder with the folders of registries, as `cache export` and `terraform providers mirror` write it",
        ));
    }
    Ok(carried)
}

/// All archives below a folder, at any depth that a mirror has.
fn archives(source: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut found = Vec::new();
    let mut folders = vec![(source.to_owned(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(Failure::unreadable(&folder))?;
        for entry in entries {
            let entry = entry.map_err(Failure::unreadable(&folder))?;
            let (path, kind) = (
                entry.path(),
                entry.file_type().map_err(Failure::unreadable(&folder))?,
            );
            if kind.is_dir() && depth < 3 {
                folders.push((path, depth + 1));
            } else if kind.is_file() && path.extension().is_some_and(|end| end == "zip") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The package of a file of a mirror.
fn package_of(relative: &Path) -> Option<Package> {
    let parts: Option<Vec<_>> = relative.iter().map(|part| part.to_str()).collect();
    let [host, namespace, name, file] = parts?[..] else {
        return None;
    };
    let rest = file.strip_prefix(PREFIX)?.strip_prefix(name)?;
    let rest = rest.strip_prefix('_')?.strip_suffix(".zip")?;
    let (rest, arch) = rest.rsplit_once('_')?;
    let (version, os) = rest.rsplit_once('_')?;
    let address = format!("{host}/{namespace}/{name}");
    Package::new(&address, version, &format!("{os}_{arch}"))
}

fn import_one(
    store: &ProviderStore,
    path: &Path,
    package: &Package,
    locked: Option<&Locked>,
) -> Result<How, String> {
    let text = |error: io::Error| chain(&error);
    let sha256 = sha256_of(path).map_err(text)?;
    let how = match locked {
        Some(locked) => {
            let digests = locked
                .get(&key(package))
                .ok_or("the lock file does not have this version of the provider")?;
            if !has_digest(digests, &sha256, path).map_err(text)? {
                return Err(NOT_LOCKED.to_owned());
            }
            How::ByLockFile
        }
        None => match listed(path, package).map_err(text)? {
            Some(digest) if digest != sha256 => {
                return Err(format!(
                    "it has SHA-256 {sha256}, but its list says {digest}"
                ));
            }
            Some(_) => How::ByList,
            None => How::Unverified,
        },
    };
    store.publish(package, path, &sha256).map_err(text)?;
    Ok(how)
}

/// The digest in a list beside an archive, whose name is the one of the release or has no prefix.
fn listed(path: &Path, package: &Package) -> io::Result<Option<String>> {
    let (Some(folder), Some(file)) = (
        path.parent(),
        path.file_name().and_then(|name| name.to_str()),
    ) else {
        return Ok(None);
    };
    let of_release = format!("{PREFIX}{}_{}_{LIST}", package.name, package.version);
    for list in [&*of_release, LIST] {
        let text = match regular_file::read_text(&folder.join(list), LARGEST_TEXT) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let found = text.lines().find_map(|line| {
            let (digest, name) = line.split_once(char::is_whitespace)?;
            let name = name.trim_start().trim_start_matches('*');
            (name == file).then(|| digest.to_ascii_lowercase())
        });
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_mirror_name_packages() {
        let of = |path: &str| package_of(Path::new(path));
        let null =
            "registry.example.test/acme/null/terraform-provider-null_1.0.0-rc.1_linux_amd64.zip";
        let package = of(null).unwrap();
        assert_eq!(package.version, "1.0.0-rc.1");
        assert_eq!(package.platform, "linux_amd64");
        assert_eq!(file(&package), null);
        let dashed =
            "localhost:80/a/google-beta/terraform-provider-google-beta_1.0.0_linux_arm64.zip";
        assert_eq!(file(&of(dashed).unwrap()), dashed);
        for path in [
            "acme/null/terraform-provider-null_1.0.0_linux_amd64.zip",
            "h/acme/null/terraform-provider-other_1.0.0_linux_amd64.zip",
            "h/acme/null/terraform-provider-null_1.0.0.zip",
            "h/../null/terraform-provider-null_1.0.0_linux_amd64.zip",
            "h/acme/null/1.0.0/terraform-provider-null_1.0.0_linux_amd64.zip",
        ] {
            assert_eq!(of(path), None, "{path}");
        }
    }

    #[test]
    fn a_provider_may_be_asked_for_without_its_host() {
        let address = "registry.example.test/acme/null";
        for asked in [address, "acme/null", "null"] {
            assert!(is_asked_for(address, asked), "{asked}");
        }
        for asked in ["ull", "e/null", "other/null", "acme"] {
            assert!(!is_asked_for(address, asked), "{asked}");
        }
    }
}
