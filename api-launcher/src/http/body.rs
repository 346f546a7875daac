//! Reads the body of a request, up to a limit.

use axum::body::Body;
use futures_util::StreamExt as _;

/// How much more than the limit is read and forgotten: a sender that has not read its response gets none when the
/// connection closes under what it still sends.
const FORGOTTEN: usize = 8;

/// Why a body was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyError {
    TooLarge,
    Broken,
}

/// Returns a body of `limit` bytes at most.
pub(crate) async fn read(body: Body, limit: usize) -> Result<Vec<u8>, BodyError> {
    let mut stream = body.into_data_stream();
    let mut whole = Vec::new();
    let mut length = 0;
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|_| BodyError::Broken)?;
        length += piece.len();
        if length <= limit {
            whole.extend_from_slice(&piece);
        } else if length > FORGOTTEN * limit {
            break;
        }
    }
    if length > limit {
        return Err(BodyError::TooLarge);
    }
    Ok(whole)
}
