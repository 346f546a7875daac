//! Passes answers on to their readers. A task of its own does, because nobody polls the stream of an answer that is not read.
//! It ends after a time, and with it what the answer holds: a turn, a share, or a connection to the platform.

use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::{Stream, StreamExt as _, stream};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

/// How long a reader may take none of its answer.
const STALLED: Duration = Duration::from_secs(30);
/// Pieces of an answer that wait for their reader. One of the platform can have some 100 KiB.
const PIECES: usize = 1;
/// The bytes of a piece of a whole answer.
const PIECE_BYTES: usize = 16 * 1024;

/// Returns a response whose body is in memory, which a task passes on as [`passed_on`] says.
pub(super) async fn whole<K: Send + 'static>(
    response: Response,
    in_all: Duration,
    kept: K,
) -> Response {
    let (mut head, body) = response.into_parts();
    let bytes = match to_bytes(body, usize::MAX).await {
        Ok(bytes) => bytes,
        // It was not in memory. Half an answer must not seem whole.
        Err(error) => {
            return Response::from_parts(
                head,
                Body::from_stream(stream::iter([Err::<Bytes, _>(error)])),
            );
        }
    };
    if bytes.is_empty() {
        return Response::from_parts(head, Body::empty());
    }
    // A reader recognizes an answer that broke off.
    let length = HeaderValue::from(bytes.len());
    head.headers.insert(header::CONTENT_LENGTH, length);
    let pieces = stream::unfold(bytes, |mut rest| async {
        let piece = rest.split_to(rest.len().min(PIECE_BYTES));
        // A part of the whole would keep all of it, as long as it waits at the connection.
        (!piece.is_empty()).then(|| (Ok(Bytes::copy_from_slice(&piece)), rest))
    });
    let pieces = passed_on(pieces, in_all, kept);
    Response::from_parts(head, Body::from_stream(pieces))
}

/// Returns the pieces of an answer, which a task passes on. The task keeps `kept` until it ends: with the answer, with the
/// response, or when its time is over.
pub(super) fn passed_on<S, K>(
    pieces: S,
    in_all: Duration,
    kept: K,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static
where
    S: Stream<Item = io::Result<Bytes>> + Send + 'static,
    K: Send + 'static,
{
    let (sender, receiver) = mpsc::channel(PIECES);
    tokio::spawn(async move {
        let _kept = kept;
        let pass_on = async {
            let mut pieces = Box::pin(pieces.map(Some).chain(stream::iter([None])));
            while let Some(piece) = pieces.next().await {
                if !matches!(timeout(STALLED, sender.send(piece)).await, Ok(Ok(()))) {
                    break;
                }
            }
        };
        tokio::select! {
            _ = timeout_at(Instant::now() + in_all, pass_on) => {}
            // The source may be silent, and the reader has gone.
            () = sender.closed() => {}
        }
    });
    // Only `None` is the end of the answer. Without it, the answer broke off, and must not seem whole.
    stream::unfold(Some(receiver), |receiver| async {
        let mut receiver: mpsc::Receiver<Option<io::Result<Bytes>>> = receiver?;
        match receiver.recv().await {
            Some(Some(piece)) => Some((piece, Some(receiver))),
            Some(None) => None,
            None => Some((Err(io::ErrorKind::TimedOut.into()), None)),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::response::IntoResponse as _;

    use super::*;

    const IN_ALL: Duration = Duration::from_mins(1);

    const PIECE: &[u8] = &[0; 1024];

    fn answer(pieces: usize) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
        stream::iter((0..pieces).map(|_| Ok(Bytes::from_static(PIECE))))
    }

    /// Waits until the turn is free, in the time of the test.
    async fn free(turn: &Arc<()>) -> Duration {
        let began = Instant::now();
        while Arc::strong_count(turn) > 1 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_nobody_reads_frees_its_turn_and_then_breaks_off() {
        let turn = Arc::new(());
        let response = passed_on(answer(100), 10 * IN_ALL, Arc::clone(&turn));
        assert!(free(&turn).await <= STALLED + Duration::from_secs(1));
        let read: Vec<_> = response.collect().await;
        assert_eq!(read.len(), PIECES + 1);
        assert!(read.last().unwrap().is_err(), "half an answer seems whole");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_read_slowly_ends_in_its_time() {
        let turn = Arc::new(());
        let response = passed_on(answer(100), IN_ALL, Arc::clone(&turn));
        let reader = tokio::spawn(async {
            let read = response.then(async |piece| {
                tokio::time::sleep(STALLED / 2).await;
                piece
            });
            read.collect::<Vec<_>>().await
        });
        assert!(free(&turn).await <= IN_ALL + Duration::from_secs(1));
        assert!(reader.await.unwrap().last().unwrap().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_has_gone_keeps_no_turn_while_the_source_is_silent() {
        let turn = Arc::new(());
        drop(passed_on(stream::pending(), 10 * IN_ALL, Arc::clone(&turn)));
        assert!(free(&turn).await <= Duration::from_secs(1));
    }

    #[tokio::test]
    async fn an_answer_passes_whole() {
        let turn = Arc::new(());
        let response = passed_on(answer(100), IN_ALL, Arc::clone(&turn));
        let read: Vec<_> = response.collect().await;
        assert_eq!(read.len(), 100);
        assert!(read.iter().all(Result::is_ok));
    }

    #[tokio::test(start_paused = true)]
    async fn a_whole_answer_keeps_its_length_and_what_it_holds_until_it_is_read() {
        let (text, turn) = ("0123456789".repeat(100_000), Arc::new(()));
        let answer = || whole(text.clone().into_response(), IN_ALL, Arc::clone(&turn));
        let response = answer().await;
        assert_eq!(response.headers()[header::CONTENT_LENGTH], "1000000");
        tokio::time::sleep(STALLED / 2).await;
        assert_eq!(Arc::strong_count(&turn), 2, "nobody has read it");
        let read = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        assert!(read == text.as_bytes());
        free(&turn).await;
        let unread = answer().await;
        assert!(free(&turn).await <= STALLED + Duration::from_secs(1));
        assert!(to_bytes(unread.into_body(), usize::MAX).await.is_err());
    }
}
