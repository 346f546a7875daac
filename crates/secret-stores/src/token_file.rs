//! The token in a file, which its issuer replaces from time to time.

use std::path::Path;

use runtime::regular_file;
use secrecy::SecretString;

use crate::error::{ErrorClass, ReadError};
use crate::lookup::MAX_FILE_BYTES;
use crate::reference::StoreKind;

/// The token that is in the file now.
pub(crate) async fn token_of_file(
    path: &Path,
    store: StoreKind,
) -> Result<SecretString, ReadError> {
    let owned = path.to_owned();
    let read =
        tokio::task::spawn_blocking(move || regular_file::read_text(&owned, MAX_FILE_BYTES)).await;
    let path = path.display();
    let wrong = |why: String| {
        ReadError::new(
            store,
            ErrorClass::CredentialsRejected,
            format!("the token file `{path}` {why}"),
        )
    };
    let text = match read {
        Ok(Ok(text)) => text,
        Ok(Err(error)) => return Err(wrong(format!("cannot be read: {error}"))),
        Err(_) => return Err(wrong("cannot be read".to_owned())),
    };
    match text.trim() {
        "" => Err(wrong("is empty".to_owned())),
        token => Ok(token.into()),
    }
}
