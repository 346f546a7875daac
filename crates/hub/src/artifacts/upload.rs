//! Receives contents on their way into the store. Their senders declare size and digest before. A hub holds parts of few large
//! contents at a time; others wait for their turn, and nothing of them is read meanwhile.

use std::io;
use std::pin::Pin;
use std::time::Duration;

use artifact_store::{Digest, Upload};
use axum::body::HttpBody as _;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use pool_protocol::artifact::{CONTENT_DIGEST, sha256_of};
use pool_protocol::problem::Code;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::io::StreamReader;

use super::{Allowed, turn};
use crate::Hub;
use crate::budget::TakenBytes;
use crate::failure::Failure;
use crate::pool_turns::{Limits, PoolTurn, PoolTurns};
use crate::relay::Turn;

/// Large contents at a time. Each takes 10 MiB, twice the size of a part.
const LIMITS: Limits = Limits {
    shared: 4,
    of_a_pool: 3,
    own: 0,
};
/// Contents up to this size are taken as documents of the relay are.
const SMALL: u64 = 512 * 1024;
/// How long a large content waits for its turn. Its sender tries again.
const TURN_TIMEOUT: Duration = Duration::from_secs(100);
/// How long a sender may send nothing.
const STALLED: Duration = Duration::from_secs(30);
/// The time for a content of any size, and the bytes a second that a larger one needs at least.
const SHORTEST: Duration = Duration::from_mins(1);
const BYTES_A_SECOND: u64 = 256 * 1024;

/// The large contents in progress.
#[derive(Debug)]
pub(super) struct Uploads(PoolTurns);

impl Uploads {
    pub(super) fn new() -> Self {
        Self(PoolTurns::new(LIMITS))
    }
}

/// The chunks of a content.
pub(super) type Chunks = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// What a content takes until it is stored.
#[derive(Debug)]
pub(super) enum Taken {
    Small(#[expect(dead_code, reason = "it is dropped")] (Turn, TakenBytes)),
    Large(#[expect(dead_code, reason = "it is dropped")] PoolTurn),
}

/// A content whose turn it is. Nothing of it is read yet.
pub(super) struct Incoming {
    pub(super) digest: Digest,
    pub(super) chunks: Chunks,
    pub(super) taken: Taken,
}

impl Incoming {
    pub(super) fn into_upload(self) -> (Upload, Taken) {
        let upload = Upload {
            content: Box::new(StreamReader::new(self.chunks)),
            digest: self.digest,
        };
        (upload, self.taken)
    }
}

/// Checks what the sender declares, and waits for the content's turn.
pub(super) async fn receive(
    hub: &Hub,
    allowed: &Allowed,
    headers: &HeaderMap,
    body: Body,
    largest: u64,
) -> Result<Incoming, Failure> {
    let digest = declared(headers, body.size_hint().exact(), largest)?;
    let pool = &allowed.task.pool;
    let taken = if digest.size_bytes <= SMALL {
        let turn = turn(hub, &allowed.task).await?;
        let mut bytes = hub.budget.of_task(pool, allowed.task.task);
        if !bytes.grow(usize::try_from(digest.size_bytes).unwrap_or(usize::MAX)) {
            return Err(busy());
        }
        Taken::Small((turn, bytes))
    } else {
        let next = timeout(TURN_TIMEOUT, hub.artifacts.uploads.0.next(pool)).await;
        Taken::Large(next.ok().flatten().ok_or_else(busy)?)
    };
    let chunks = in_time(body, digest.size_bytes);
    Ok(Incoming {
        digest,
        chunks,
        taken,
    })
}

/// The size and digest that a sender declares.
fn declared(headers: &HeaderMap, size: Option<u64>, largest: u64) -> Result<Digest, Failure> {
    let text = |name| headers.get(name)?.to_str().ok();
    let Some(size_bytes) = size else {
        return Err(
            Failure::new(Code::RequestInvalid, "the content has no length")
                .with_status(StatusCode::LENGTH_REQUIRED),
        );
    };
    if size_bytes > largest {
        let text = format!("the content has more than {largest} bytes");
        return Err(
            Failure::new(Code::RequestInvalid, text).with_status(StatusCode::PAYLOAD_TOO_LARGE)
        );
    }
    let sha256 = text(CONTENT_DIGEST).and_then(sha256_of);
    let sha256 = sha256.ok_or_else(|| {
        let text = format!("the content has no SHA-256 in `{CONTENT_DIGEST}`");
        Failure::new(Code::RequestInvalid, text)
    })?;
    Ok(Digest { size_bytes, sha256 })
}

fn busy() -> Failure {
    Failure::new(
        Code::RateLimited,
        "the hub has too many contents in progress: try again",
    )
}

/// Returns the chunks of a body. They end with an error if they take too long.
fn in_time(body: Body, size_bytes: u64) -> Chunks {
    let until = Instant::now() + SHORTEST + Duration::from_secs(size_bytes / BYTES_A_SECOND);
    let chunks = body.into_data_stream().map_err(io::Error::other);
    Box::pin(stream::unfold(
        chunks.boxed(),
        move |mut chunks| async move {
            let until = until.min(Instant::now() + STALLED);
            let next = timeout_at(until, chunks.next()).await;
            let late = || io::Error::new(io::ErrorKind::TimedOut, "it did not arrive in time");
            let chunk = next.unwrap_or_else(|_| Some(Err(late())))?;
            Some((chunk, chunks))
        },
    ))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pairs = pairs.iter();
        let pair = |(name, value): &(&'static str, &str)| {
            let name = axum::http::HeaderName::from_static(name);
            (name, HeaderValue::from_str(value).unwrap())
        };
        pairs.map(pair).collect()
    }

    #[test]
    fn a_sender_declares_size_and_digest() {
        let digest = "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:";
        let known = headers(&[(CONTENT_DIGEST, digest)]);
        assert_eq!(declared(&known, Some(7), 7).unwrap().size_bytes, 7);
        let too_large = declared(&known, Some(7), 6).unwrap_err();
        assert_eq!(too_large.status(), 413);
        let no_length = declared(&known, None, 7).unwrap_err();
        assert_eq!(no_length.status(), 411);
        let no_digest = declared(&headers(&[]), Some(7), 7).unwrap_err();
        assert_eq!(no_digest.status(), 400);
    }

    #[tokio::test(start_paused = true)]
    async fn a_sender_that_stalls_or_dribbles_is_given_up() {
        let silent = Body::from_stream(stream::pending::<io::Result<Bytes>>());
        let error = in_time(silent, 1).next().await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let slow = stream::repeat(()).then(async |()| {
            tokio::time::sleep(STALLED / 2).await;
            Ok::<_, io::Error>(Bytes::from_static(b"x"))
        });
        let chunks: Vec<_> = in_time(Body::from_stream(slow), 1 << 20)
            .take(100)
            .collect()
            .await;
        assert!(chunks.iter().any(Result::is_err), "it goes on for ever");
    }
}
