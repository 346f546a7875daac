//! Addresses of objects: those that Mayfly writes and those of the stock executor (contract 6.2).

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
