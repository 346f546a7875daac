//! Receives contents on their way into the store. Their senders declare size and digest before. A hub holds parts of few large
//! contents at a time; others wait for their turn, and nothing of them is read meanwhile.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use artifact_store::{Digest, Upload};
use axum::body::HttpBody as _;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode};
use futures_util::future::BoxFuture;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use pool_protocol::artifact::{CONTENT_DIGEST, sha256_of};
use pool_protocol::id::TaskId;
use pool_protocol::problem::Code;
use tokio::time::{Instant, timeout};
use tokio_util::io::StreamReader;

use super::{Allowed, BYTES_A_SECOND};
use crate::Hub;
use crate::budget::TakenBytes;
use crate::failure::Failure;
use crate::pool_turns::{Limits, PoolTurn, PoolTurns};
use crate::relay::{Place, Turn};
use crate::shares::{Share, Shares};

/// Large contents at a time, and those of one pool. Each takes 5 MiB: the part that is read, and then sent. No pool takes all of
/// them.
const CONTENTS: Limits = Limits {
    shared: 3,
    of_a_pool: 2,
    own: 0,
};
/// The same of states. They wait for no plan, and each pool has one turn that no other pool can take.
const STATES: Limits = Limits {
    shared: 2,
    of_a_pool: 2,
    own: 1,
};
/// Contents up to this size are taken as documents of the relay are.
const SMALL: u64 = 512 * 1024;
/// How long a large content waits for its turn. Its sender tries again.
pub(super) const TURN_TIMEOUT: Duration = Duration::from_secs(45);
/// How long a sender may send nothing.
const STALLED: Duration = Duration::from_secs(30);
/// The time that a sender of a content of any size takes, and what a larger one needs at least.
const SHORTEST: Duration = Duration::from_mins(1);

/// The large contents in progress.
#[derive(Debug)]
pub(super) struct Uploads {
    of_pools: PoolTurns,
    /// One of each task.
    of_tasks: Arc<Shares<TaskId>>,
}

impl Uploads {
    pub(super) fn of_contents() -> Self {
        Self::new(CONTENTS)
    }

    pub(super) fn of_states() -> Self {
        Self::new(STATES)
    }

    fn new(limits: Limits) -> Self {
        Self {
            of_pools: PoolTurns::new(limits),
            of_tasks: Shares::new(1, usize::MAX),
        }
    }
}

/// The chunks of a content.
pub(super) type Chunks = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// What a content takes until it is stored.
#[derive(Debug)]
pub(super) enum Taken {
    Small(#[expect(dead_code, reason = "it is dropped")] (Turn, TakenBytes)),
    Large(#[expect(dead_code, reason = "it is dropped")] (Place, Share<TaskId>, PoolTurn)),
}

/// A content whose turn it is. Nothing of it is read yet.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) digest: Digest,
    taken: Taken,
}

/// A content that arrives.
pub(super) struct Incoming {
    pub(super) digest: Digest,
    pub(super) chunks: Chunks,
    pub(super) taken: Taken,
}

impl Waiting {
    pub(super) fn receive(self, body: Body) -> Incoming {
        Incoming {
            chunks: in_time(body, self.digest.size_bytes),
            digest: self.digest,
            taken: self.taken,
        }
    }
}

/// Why a content was refused when all of it had arrived.
pub(super) type WhyRefused<R> = Arc<Mutex<Option<R>>>;

impl Incoming {
    /// Returns the content for a store. What `check` refuses when all of it has arrived never appears there, and `refused` then
    /// has the reason.
    pub(super) fn into_upload<R: Send + 'static>(
        self,
        check: BoxFuture<'static, Result<(), R>>,
        refused: WhyRefused<R>,
    ) -> (Upload, Taken) {
        let chunks = checked(self.chunks, check, refused);
        let upload = Upload {
            content: Box::new(StreamReader::new(chunks)),
            digest: self.digest,
        };
        (upload, self.taken)
    }
}

/// Returns the chunks, and an error instead of their end if they are refused. The store then keeps what it has.
fn checked<R: Send + 'static>(
    chunks: Chunks,
    check: BoxFuture<'static, Result<(), R>>,
    refused: WhyRefused<R>,
) -> Chunks {
    let start = (chunks, Some((check, refused)));
    Box::pin(stream::unfold(start, async |(mut chunks, mut check)| {
        check.as_ref()?;
        let next = chunks.next().await;
        if let Some(next) = next {
            return Some((next, (chunks, check)));
        }
        let (at_the_end, refused) = check.take()?;
        let why = at_the_end.await.err()?;
        *runtime::lock(&refused) = Some(why);
        let error = io::Error::other("the content is refused");
        Some((Err(error), (chunks, check)))
    }))
}

/// The length of a body, if its sender has declared it.
pub(super) fn length(body: Option<&Body>) -> Option<u64> {
    body?.size_hint().exact()
}

/// Checks what the sender declares, and waits for the content's turn.
pub(super) async fn turn(
    hub: &Hub,
    uploads: &Uploads,
    allowed: Allowed,
    (headers, size): (&HeaderMap, Option<u64>),
    largest: u64,
) -> Result<Waiting, Failure> {
    let digest = declared(headers, size, largest)?;
    let (pool, task) = (allowed.task.pool.clone(), allowed.task.task);
    let taken = if digest.size_bytes <= SMALL {
        let turn = super::turn(hub, allowed).await?;
        let mut bytes = hub.budget.of_task(&pool, task);
        if !bytes.grow(usize::try_from(digest.size_bytes).unwrap_or(usize::MAX)) {
            return Err(busy());
        }
        Taken::Small((turn, bytes))
    } else {
        let of_task = uploads.of_tasks.take(&task).ok_or_else(busy)?;
        let next = timeout(TURN_TIMEOUT, uploads.of_pools.next(&pool)).await;
        let of_pool = next.ok().flatten().ok_or_else(busy)?;
        Taken::Large((allowed.place, of_task, of_pool))
    };
    Ok(Waiting { digest, taken })
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

/// Returns the chunks of a body. They end with an error if their sender takes too long. The time in which the store takes them
/// does not count.
fn in_time(body: Body, size_bytes: u64) -> Chunks {
    let in_all = SHORTEST + Duration::from_secs(size_bytes / BYTES_A_SECOND);
    let chunks = body.into_data_stream().map_err(io::Error::other).boxed();
    Box::pin(stream::unfold(
        (chunks, in_all),
        async |(mut chunks, left)| {
            let since = Instant::now();
            let next = timeout(left.min(STALLED), chunks.next()).await;
            let late = || io::Error::new(io::ErrorKind::TimedOut, "it did not arrive in time");
            let chunk = next.unwrap_or_else(|_| Some(Err(late())))?;
            Some((chunk, (chunks, left.saturating_sub(since.elapsed()))))
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
