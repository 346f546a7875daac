//! Reads the pool token: a given one, or one in a file. The file is read for each call, because it may be replaced.

use std::path::PathBuf;

use pool_protocol::token::{PoolToken, TokenError};
use runtime::regular_file;
use secrecy::SecretString;

/// The largest token file that is read.
const MAX_BYTES: u64 = 16 * 1024;

/// The source of the pool token.
#[derive(Clone, Debug)]
pub(crate) enum PoolTokenSource {
    Given(SecretString),
    File(PathBuf),
}

impl PoolTokenSource {
    /// Reads the token. Returns why it cannot be read.
    pub(crate) fn read(&self) -> Result<SecretString, String> {
        match self {
            Self::Given(token) => Ok(token.clone()),
            Self::File(path) => {
                let text = regular_file::read_text(path, MAX_BYTES);
                check(&text.map_err(|error| {
                    format!("could not read the token in `{}`: {error}", path.display())
                })?)
            }
        }
    }
}

/// Returns the token in a text. A token in the form of Mayfly's hub must be complete. Other hubs may have other forms.
pub(crate) fn check(text: &str) -> Result<SecretString, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("the token is empty".to_owned());
    }
    match PoolToken::parse(text) {
        Err(error @ TokenError::Checksum) => Err(error.to_string()),
        Ok(_) | Err(TokenError::Form) => Ok(text.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use secrecy::ExposeSecret as _;

    use super::*;

    #[test]
    fn a_file_is_read_each_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let source = PoolTokenSource::File(path.clone());
        let error = source.read().unwrap_err();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        for text in ["first", "second\n"] {
            fs::write(&path, text).unwrap();
            assert_eq!(source.read().unwrap().expose_secret(), text.trim());
        }
        fs::write(&path, " \n").unwrap();
        assert_eq!(source.read().unwrap_err(), "the token is empty");
    }

    #[test]
    fn an_incomplete_token_is_refused_and_not_shown() {
        let token = PoolToken::new("eu".parse().unwrap());
        let whole = token.reveal();
        assert_eq!(check(whole).unwrap().expose_secret(), whole);
        let shown = check(&whole[..whole.len() - 1]).unwrap_err();
        assert!(!shown.contains(&whole[8..20]), "{shown}");
        let source = PoolTokenSource::Given(whole.into());
        assert!(!format!("{source:?}").contains(&whole[8..20]));
    }
}
