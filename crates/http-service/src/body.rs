//! Reads the body of a request, up to a limit.

use std::time::Duration;

use axum::body::Body;
use futures_util::StreamExt as _;

/// How much more than the limit is read and forgotten: a sender that has not read its response gets none when the
/// connection closes under what it still sends.
const FORGOTTEN: usize = 8;

/// Why a body was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyError {
    TooLarge,
    /// The bodies in progress have as many bytes as they may have.
    Busy,
    TooSlow,
    Broken,
}

/// Returns a body of `limit` bytes at most.
pub async fn read(body: Body, limit: usize) -> Result<Vec<u8>, BodyError> {
    read_counted(body, limit, |_| true).await
}

/// Returns a body of `limit` bytes at most that arrives in this time. `take` gets the length of each piece as it arrives, so a sender that only says
/// how much it will send takes nothing. If it returns `false`, there is no memory for the piece.
pub async fn read_in_time(
    body: Body,
    limit: usize,
    timeout: Duration,
    take: impl FnMut(usize) -> bool,
) -> Result<Vec<u8>, BodyError> {
    tokio::time::timeout(timeout, read_counted(body, limit, take))
        .await
        .unwrap_or(Err(BodyError::TooSlow))
}

async fn read_counted(
    body: Body,
    limit: usize,
    mut take: impl FnMut(usize) -> bool,
) -> Result<Vec<u8>, BodyError> {
    let mut stream = body.into_data_stream();
    let mut whole = Vec::new();
    let mut length = 0;
    let mut refused = None;
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|_| BodyError::Broken)?;
        length += piece.len();
        if length > FORGOTTEN * limit {
            break;
        }
        if refused.is_some() {
            continue;
        }
        if length > limit {
            refused = Some(BodyError::TooLarge);
        } else if !take(piece.len()) {
            refused = Some(BodyError::Busy);
        } else {
            whole.extend_from_slice(&piece);
            continue;
        }
        whole = Vec::new();
    }
    refused.map_or(Ok(whole), Err)
}

#[cfg(test)]
mod tests {
    use std::io;

    use axum::body::Bytes;
    use futures_util::stream;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn body(pieces: usize) -> Body {
        let pieces = (0..pieces).map(|_| Ok::<_, io::Error>(Bytes::from_static(b"1234")));
        Body::from_stream(stream::iter(pieces))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_takes_what_has_arrived() {
        let mut taken = 0;
        let mut take = |length| {
            taken += length;
            taken <= 12
        };
        let read = read_in_time(body(2), 8, TIMEOUT, &mut take).await;
        assert_eq!(read, Ok(b"12341234".to_vec()));
        let busy = read_in_time(body(2), 8, TIMEOUT, &mut take).await;
        assert_eq!(busy, Err(BodyError::Busy));
        let too_large = read_in_time(body(3), 8, TIMEOUT, |_| true).await;
        assert_eq!(too_large, Err(BodyError::TooLarge));
        let never = stream::pending::<Result<Bytes, io::Error>>();
        let never = read_in_time(Body::from_stream(never), 8, TIMEOUT, |_| {
            panic!("nothing has arrived")
        });
        assert_eq!(never.await, Err(BodyError::TooSlow));
    }
}
