//! Addresses of objects: those that Mayfly writes and those of the stock executor (contract 6.2).

use job_contract::keys::{Area, ObjectKey};
use percent_encoding::percent_decode_str;
use url::Url;

/// The parts of an object's address.
#[derive(Debug)]
pub(crate) struct ObjectUrl {
    pub(crate) host: String,
    /// Percent-decoded, without the leading slash.
    pub(crate) path: String,
}

impl ObjectUrl {
    pub(crate) fn parse(reference: &str) -> Option<Self> {
        let url = Url::parse(reference).ok()?;
        Self::of(&url)
    }

    pub(crate) fn of(url: &Url) -> Option<Self> {
        let path = url.path().trim_start_matches('/');
        Some(Self {
            host: url.host_str()?.to_owned(),
            path: percent_decode_str(path).decode_utf8().ok()?.into_owned(),
        })
    }

    /// The path below the address of a bucket or container.
    pub(crate) fn below(&self, base: &Self) -> Option<&str> {
        if self.host != base.host {
            return None;
        }
        match base.path.trim_end_matches('/') {
            "" => Some(&self.path),
            folder => self.path.strip_prefix(folder)?.strip_prefix('/'),
        }
    }
}

/// The key of an object's name in a bucket. The name begins with an area.
pub(crate) fn key_of(name: &str) -> Option<ObjectKey> {
    Area::ALL.into_iter().find_map(|area| {
        let path = name.strip_prefix(area.bucket_prefix())?.strip_prefix('/')?;
        let is_sound = path
            .split('/')
            .all(|segment| !matches!(segment, "" | "." | ".."));
        is_sound.then(|| ObjectKey {
            area,
            path: path.to_owned(),
        })
    })
}

/// Address of an object from the address of its container and its name.
pub(crate) fn address(base: &Url, name: &str) -> String {
    let mut url = base.clone();
    url.path_segments_mut()
        .expect("addresses of stores are http addresses")
        .pop_if_empty()
        .extend(name.split('/'));
    url.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_differ_from_texts_that_only_resemble_them() {
        let key = key_of("tfstate/o/w/1/s/terraformLibrary.tfPlan").unwrap();
        assert_eq!(key, ObjectKey::plan("o", "w", "1", "s"));
        assert_eq!(
            key_of("tfoutput/o/1/s.tfoutput"),
            Some(ObjectKey::step_output("o", "1", "s"))
        );
        for other in [
            "tfstate",
            "tfstate/",
            "tfstates/a",
            "tfstate/../tfoutput/a",
            "tfstate/a//b",
            "a/tfstate/b",
        ] {
            assert_eq!(key_of(other), None, "{other}");
        }
    }

    #[test]
    fn addresses_encode_what_a_path_cannot_hold() {
        let base = Url::parse("https://s3.example.test/bucket/").unwrap();
        let text = address(&base, "tfstate/a b/c?#%");
        assert_eq!(
            text,
            "https://s3.example.test/bucket/tfstate/a%20b/c%3F%23%25"
        );
        let url = ObjectUrl::parse(&text).unwrap();
        let base = ObjectUrl::of(&base).unwrap();
        assert_eq!(url.below(&base), Some("tfstate/a b/c?#%"));
    }
}
