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

/// Why the token cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenSourceError {
    #[error("could not read the token in `{}`: {reason}", path.display())]
    File { path: PathBuf, reason: String },
    #[error("the token is empty")]
    Empty,
    #[error(transparent)]
    Token(TokenError),
}

impl PoolTokenSource {
    /// Reads the token.
    pub(crate) fn read(&self) -> Result<SecretString, TokenSourceError> {
        match self {
            Self::Given(token) => Ok(token.clone()),
            Self::File(path) => {
                let text = regular_file::read_text(path, MAX_BYTES).map_err(|error| {
                    TokenSourceError::File {
                        path: path.clone(),
                        reason: error.to_string(),
                    }
                })?;
                check(&text)
            }
        }
    }
}

/// Returns the token in a text. A token in the form of Mayfly's hub must be complete. Other hubs may have other forms.
pub(crate) fn check(text: &str) -> Result<SecretString, TokenSourceError> {
    let text = text.trim();
    if text.is_empty() {
        return Err(TokenSourceError::Empty);
    }
    match PoolToken::parse(text) {
        Err(error @ TokenError::Checksum) => Err(TokenSourceError::Token(error)),
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
        let error = source.read().unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        for text in ["first", "second\n"] {
            fs::write(&path, text).unwrap();
            assert_eq!(source.read().unwrap().expose_secret(), text.trim());
        }
        fs::write(&path, " \n").unwrap();
        assert!(matches!(source.read(), Err(TokenSourceError::Empty)));
    }

    #[test]
    fn an_incomplete_token_is_refused_and_not_shown() {
        let token = PoolToken::new("eu".parse().unwrap());
        let whole = token.reveal();
        assert_eq!(check(whole).unwrap().expose_secret(), whole);
        let error = check(&whole[..whole.len() - 1]).unwrap_err();
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains(&whole[8..20]), "{shown}");
        let source = PoolTokenSource::Given(whole.into());
        assert!(!format!("{source:?}").contains(&whole[8..20]));
    }
}
