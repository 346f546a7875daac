//! The tool's lock file of providers, `.terraform.lock.hcl`.

use std::fs;
use std::io;
use std::path::Path;

use hcl_edit::expr::{Array, Expression};
use hcl_edit::structure::Body;
use provider_store::Package;
use runtime::regular_file;

pub(crate) const NAME: &str = ".terraform.lock.hcl";
const LARGEST: u64 = 1024 * 1024;
/// Digests of the files of a package, and of its archive.
const H1: &str = "h1:";
const ZH: &str = "zh:";

/// A provider of a lock file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Locked {
    pub(crate) package: Package,
    /// `h1:…`, for one platform or several.
    pub(crate) h1_digests: Vec<String>,
    /// SHA-256 of archives, in hex, for one platform or several.
    pub(crate) zip_digests: Vec<String>,
}

impl Locked {
    /// Whether an archive with this SHA-256 is one of those.
    pub(crate) fn has_zip(&self, sha256: &str) -> bool {
        self.zip_digests.iter().any(|known| known == sha256)
    }
}

/// Reads the lock file of a folder. `None` if there is none, or if it is not one.
pub(crate) fn read(folder: &Path) -> Option<Body> {
    let text = regular_file::read_text(&folder.join(NAME), LARGEST).ok()?;
    text.parse().ok()
}

/// The providers of a lock file, with their versions.
pub(crate) fn versions(body: &Body) -> impl Iterator<Item = (String, String)> {
    body.get_blocks("provider").filter_map(|block| {
        let address = block.labels.first()?.as_str().to_owned();
        match &block.body.get_attribute("version")?.value {
            Expression::String(version) => Some((address, version.as_str().to_owned())),
            _ => None,
        }
    })
}

/// The packages of a lock file for a platform. Without a digest, nothing can be checked, so such a provider is left out.
pub(crate) fn packages(body: &Body, platform: &str) -> Vec<Locked> {
    let versions = versions(body);
    let found = versions.filter_map(|(address, version)| {
        let digests = digests(body, &address);
        let of_kind = |kind: &str| -> Vec<String> {
            let digests = digests.iter();
            digests
                .filter_map(|digest| digest.strip_prefix(kind).map(str::to_owned))
                .collect()
        };
        let locked = Locked {
            package: Package::new(&address, &version, platform)?,
            h1_digests: digests
                .iter()
                .filter(|digest| digest.starts_with(H1))
                .cloned()
                .collect(),
            zip_digests: of_kind(ZH),
        };
        (!digests.is_empty()).then_some(locked)
    });
    found.collect()
}

/// Address, version and digests (`h1:…`, `zh:…`) for all platforms, of each provider in the text of a lock file.
pub fn locked_digests(text: &str) -> Option<Vec<(String, String, Vec<String>)>> {
    let body: Body = text.parse().ok()?;
    let found = versions(&body).map(|(address, version)| {
        let digests = digests(&body, &address);
        (address, version, digests)
    });
    Some(found.collect())
}

fn digests(body: &Body, address: &str) -> Vec<String> {
    let mut blocks = body.get_blocks("provider");
    let block = blocks.find(|block| {
        block
            .labels
            .first()
            .is_some_and(|label| label.as_str() == address)
    });
    let hashes = block.and_then(|block| block.body.get_attribute("hashes"));
    let list = hashes.and_then(|hashes| hashes.value.as_array());
    let texts = list.into_iter().flat_map(Array::iter);
    texts
        .filter_map(|text| text.as_str().map(str::to_owned))
        .collect()
}

/// Adds digests of files, each with the address of its provider. The tool checks a package of a mirror by them alone. Returns
/// whether one was missing.
pub(crate) fn add(body: &mut Body, digests_of: &[(String, String)]) -> bool {
    let mut is_changed = false;
    for (address, digest) in digests_of {
        if digests(body, address).contains(digest) {
            continue;
        }
        let mut blocks = body.get_blocks_mut("provider");
        let block = blocks.find(|block| {
            block
                .labels
                .first()
                .is_some_and(|label| label.as_str() == address)
        });
        let Some(block) = block else { continue };
        let Some(mut hashes) = block.body.get_attribute_mut("hashes") else {
            continue;
        };
        if let Expression::Array(list) = hashes.value_mut() {
            list.push(digest.as_str());
            is_changed = true;
        }
    }
    is_changed
}

/// Replaces the lock file of a folder.
pub(crate) fn write(folder: &Path, body: &Body) -> io::Result<()> {
    let new = tempfile::NamedTempFile::new_in(folder)?;
    fs::write(new.path(), body.to_string())?;
    new.persist(folder.join(NAME))
        .map_err(|failed| failed.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# This file is maintained automatically by "terraform init".

provider "registry.example.test/acme/null" {
  version     = "2.2.0"
  constraints = "~> 2.2"
  hashes = [
    "h1:one=",
    "zh:0123",
    "zh:4567",
  ]
}

provider "registry.example.test/acme/unknown" {
  version = "1.0.0"
}

provider "../acme/null" {
  version = "1.0.0"
  hashes  = ["h1:x="]
}
"#;

    #[test]
    fn providers_with_digests_are_found() {
        let body: Body = TEXT.parse().unwrap();
        let locked = packages(&body, "linux_amd64");
        assert_eq!(locked.len(), 1, "{locked:?}");
        assert_eq!(
            locked[0].package.address(),
            "registry.example.test/acme/null"
        );
        assert_eq!(locked[0].package.version, "2.2.0");
        assert_eq!(locked[0].h1_digests, ["h1:one="]);
        assert_eq!(locked[0].zip_digests, ["0123", "4567"]);
    }

    #[test]
    fn a_digest_is_added_once_and_nothing_else_changes() {
        let folder = tempfile::tempdir().unwrap();
        let mut body: Body = TEXT.parse().unwrap();
        assert_eq!(body.to_string(), TEXT);
        let address = "registry.example.test/acme/null".to_owned();
        let two = [(address.clone(), "h1:two=".to_owned())];
        assert!(add(&mut body, &two));
        assert!(!add(&mut body, &two));
        assert!(!add(
            &mut body,
            &[("registry.example.test/a/b".to_owned(), "h1:x=".to_owned())]
        ));
        write(folder.path(), &body).unwrap();
        let again = read(folder.path()).unwrap();
        assert_eq!(
            digests(&again, &address),
            ["h1:one=", "zh:0123", "zh:4567", "h1:two="]
        );
        let without = again.to_string().replace("\"h1:two=\"", "");
        let words = |text: &str| {
            text.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let mut left = words(&without);
        left.retain(|word| word != ",");
        assert_eq!(left, words(TEXT));
    }

    #[test]
    fn what_is_no_lock_file_is_none() {
        let folder = tempfile::tempdir().unwrap();
        assert!(read(folder.path()).is_none());
        fs::write(folder.path().join(NAME), "provider {{").unwrap();
        assert!(read(folder.path()).is_none());
    }
}
